/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of libmoeclient share: a group of fake workers, a client, random requests. */
#ifndef MOE_TEST_CLIENT_FIXTURE_H
#define MOE_TEST_CLIENT_FIXTURE_H

#include "fake_expert.h"
#include "moe/client.h"
#include "support/check.h"
#include "support/random.h"

/* A request with random rows, and room for its answer. */
struct request {
    struct moe_client_forward f;
    bool done; /* under the lock of client_fixture.c, as is `status` */
    uint32_t done_count;
    struct moe_status status;
};

struct request *make_request(uint32_t tokens, enum moe_dtype dtype, bool return_routing);
void free_request(struct request *r);
/* Poison in y and in the routing, so that what was not written shows. */
void poison_answer(struct request *r);
bool is_poisoned(const struct request *r);
/* y = 2 x, and the routing is what the fake server gives to pieces of `piece` rows. */
void assert_answer(const struct request *r);

/* A moe_client_done for a request. */
void on_request_done(void *ctx, struct moe_client_forward *f, struct moe_status st);
void await_request(struct request *r);

/* A client of the first of a group. */
struct moe_client *connect_client(struct fake *first, const struct moe_client_config *with);
/* Frees the request, and closes the client. */
void end_call(struct moe_client *c, struct request *r);

#endif
