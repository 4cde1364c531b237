/* SPDX-License-Identifier: Apache-2.0 */
/* The ExpertService of a group of one, over loopback: server, client, and messages built and read
 * by protobuf-c, which is the yardstick for the hand-made framing on both sides. */
#ifndef MOE_TEST_SERVICE_FIXTURE_H
#define MOE_TEST_SERVICE_FIXTURE_H

#include "daemon/lease.h"
#include "moe/v1/expert.pb-c.h"
#include "rpc/client.h"
#include "service/region_service.h"
#include "service/service.h"
#include "worker_fixture.h"

struct service {
    struct worker worker;
    struct moe_staging *staging;
    struct moe_metrics *metrics;
    struct moe_models *models;
    _Atomic unsigned reports;    /* of models */
    struct moe_status reported;  /* by the last one */
    struct moe_lease_gate lease; /* held until service_hold_lease(s, false) */
    struct moe_service *service;
    struct moe_region_service *regions;
    struct moe_rpc_server *server;
    struct moe_rpc_client *client;
    struct moe_rpc_channel *channel;
};

enum {
    SERVICE_BUDGET = 1 << 20,
    SERVICE_MESSAGE = 2 << 20,
    SERVICE_TOKENS = 256, /* of one request */
    SERVICE_VOCABULARY = 10,
};

/* Experts of each token id for layer 1 (K 2), which has a table if its spec has by_token or not. */
extern uint16_t service_experts[SERVICE_VOCABULARY][2];

/* Whether the group trains, so that it answers with a lease only. Set it before service_open. */
extern bool service_trains;

/* With a view in force. */
void service_open(struct service *s);
/* The same; clients may share this much memory, through this socket. `progress` gets the loop of
 * the thread that serves them; NULL = none. */
void service_open_shared(struct service *s, uint64_t bytes, uint64_t identity_bytes,
                         const char *socket, struct moe_progress *progress);
/* Checks that every buffer came back. */
void service_close(struct service *s);
/* The one of test programs: with_service(test) opens it before the test, and closes it after. */
extern struct service service;
int open_service(void **state);
int close_service(void **state);
#define with_service(test) cmocka_unit_test_setup_teardown(test, open_service, close_service)
/* A view for engine and service, or none. */
void service_start_view(struct service *s);
/* Takes the lease of a group that trains away, or gives it back. */
void service_hold_lease(struct service *s, bool held);
/* One more client; the caller closes the channel, then destroys the client. */
void service_connect(const struct service *s, struct moe_rpc_client **client,
                     struct moe_rpc_channel **channel);

typedef Moe__V1__ForwardStreamRequest Ask;
/* Digest of the served model. */
#define TOY_DIGEST "7070707070707070707070707070707070707070707070707070707070707070"

typedef Moe__V1__ForwardStreamResponse Answer;

/* A message for the request `r`, ids as I32; its tensors are borrowed from `r`. */
void ask_fill(Ask *ask, const struct service *s, const struct request *r, bool return_routing);

/* Bytes of one message; freed with free(). */
struct bytes {
    uint8_t *data;
    size_t length;
};
struct bytes ask_pack(const Ask *ask);

/* A valid request with separate tensors, to be changed: CLIENT_IDS_AND_WEIGHTS, F32, layer 0 (H
 * 24, E 8, K 2). */
enum { SAMPLE_TOKENS = 5 };
struct sample {
    Ask ask;
    float x[SAMPLE_TOKENS * 24], weights[SAMPLE_TOKENS * 2];
    int32_t ids[SAMPLE_TOKENS * 2];
    int64_t token_ids[SAMPLE_TOKENS];
    Moe__V1__RetainForBackward retain;
    Moe__V1__BatchPart batch_part;
};
void sample_fill(struct sample *b, const struct service *s);
/* A small request of any mode, dtype and layer. */
struct bytes random_message(const struct service *s);

/* One unary call. On success the caller frees `*answer` with answer_free. */
struct moe_status call_forward(struct service *s, const struct bytes *message, Answer **answer);
struct moe_status call_ask(struct service *s, const Ask *ask, Answer **answer);
void answer_free(Answer *answer);
Answer *answer_read(struct moe_rpc_msg *m); /* frees `m` */

/* Copies the answer's tensors into `r` and compares them with the oracle's; `answer` must carry the
 * routing. */
void answer_check(const struct service *s, struct request *r, const Answer *answer);
/* A good request is served. */
void assert_serves(struct service *s);

#endif
