/* SPDX-License-Identifier: Apache-2.0 */
/* For the tests of daemon/rpc: an echo server with a client over loopback that counts the parts it
 * lends to the transport. */
#ifndef MOE_TEST_RPC_FIXTURE_H
#define MOE_TEST_RPC_FIXTURE_H

#include "base/clock.h"
#include "base/mutex.h"
#include "rpc/client.h"
#include "rpc/server.h"
#include "support/check.h"
#include "support/random.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

/* ------------------------------------------------------------------ echo */

#define UNARY_PATH  "/moe.v1.ExpertService/Forward"
#define STREAM_PATH "/moe.v1.ExpertService/ForwardStream"

/* The server answers a ForwardRequest (unary, "large") with its x as y, by reference. The request's
 * `model` selects the rest:
 *   ""        answer at once              "thread"  answer from another thread
 *   "sink"    answer without the tensor   "hang"    keep the call until fixture_answer_hanging
 *   "fail:R"  fail with reason number R            "zeros:N" answer with N bytes of zeros
 * A stream is echoed message by message, one at a time; a message "stop" stops reading for good. */
struct fixture {
    struct moe_rpc_server *server;
    struct moe_rpc_client *client;
    struct moe_rpc_channel *channel;

    atomic_uint lent, released; /* parts, both sides */
    atomic_uint started, done, cancelled, stream_messages;

    struct moe_mutex lock;
    pthread_cond_t changed;
    struct moe_rpc_call *hanging[64]; /* calls that hang, with a reference to each */
    unsigned hanging_count;
};

/* The server's settings before it starts: 2 shards, 64 MiB messages, 256 MiB reading. */
struct moe_rpc_server_config fixture_config(void);
/* With the methods above if `config` has none. */
void fixture_start(struct fixture *f, const struct moe_rpc_server_config *config);
/* Drains, stops, and checks that every lent part came back once. */
void fixture_stop(struct fixture *f);
/* Waits until *counter >= at_least; fails the test after 20 s. */
void fixture_await(const char *what, const atomic_uint *counter, unsigned at_least);
void fixture_await_hanging(struct fixture *f, unsigned count);
/* Answers every call that hangs, or tries to. */
void fixture_answer_hanging(struct fixture *f);
/* A second channel to the same server, with a separate connection. */
struct moe_rpc_channel *fixture_channel(struct fixture *f, uint32_t max_message_bytes);

/* A request with model and x by reference; `head` is filled and referred to. */
struct moe_rpc_out fixture_request(struct fixture *f, const char *model, const void *x,
                                   size_t length, uint8_t head[256]);
struct moe_rpc_call_options fixture_options(uint64_t ms);
/* A blocking unary call; `y` (`length` bytes, may be NULL) must equal the answer's tensor. */
struct moe_status fixture_call(struct fixture *f, struct moe_rpc_channel *ch, const char *model,
                               const void *x, size_t length, uint64_t ms, const void *y,
                               size_t y_length);

#endif
