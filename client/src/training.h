/* SPDX-License-Identifier: Apache-2.0 */
/* Sends a training call, retries it, asks another worker for a recorded answer, and reads answers.
 */
#ifndef MOE_CLIENT_SRC_TRAINING_H
#define MOE_CLIENT_SRC_TRAINING_H

#include "internal.h"
#include "moe/client_training.h"

enum { MOE_CLIENT_TRAINING_HEAD_MAX = 512 }; /* bytes: numbers and at most two names */

struct moe_client_training_call {
    const char *path;                  /* static */
    const struct moe_rpc_out *request; /* `release` and `owner` of its parts are ignored */
    uint64_t deadline_ns;
    bool home; /* only the worker of the configured endpoint has what the call needs */
    bool once; /* do not try again */
    /* Reads the answer, which the caller owns. After a failure it may be called again. */
    struct moe_status (*read)(void *ctx, struct moe_rpc_msg *answer);
    void *ctx;
};

/* Blocks until the call is over and the transport has released the request's memory. */
struct moe_status moe_client_training_run(struct moe_client *c,
                                          const struct moe_client_training_call *call) MOE_CHECKED;

/* An answer without a small bound: it is unpacked into heap memory, not into an arena. */
struct moe_client_large_answer {
    const struct ProtobufCMessageDescriptor *type;
    void *message; /* the caller frees it */
};

/* `read` for such an answer; `ctx` is a struct moe_client_large_answer. */
struct moe_status moe_client_large_answer_read(void *ctx, struct moe_rpc_msg *answer) MOE_CHECKED;

/* Copies `from`, cut to `capacity` bytes. */
void moe_client_copy_text(char *to, size_t capacity, const char *from);

/* One Backward: request and answer. */
struct moe_client_gradients {
    struct moe_client_backward *b;
    const struct moe_client_layer *layer;
    size_t rows_bytes, pairs;         /* of [T,H] in dtype; T * K */
    size_t dx_length, weights_length; /* of the parts that came */
};

/* `read` of a Backward: moves the gradients into the caller's memory and checks that they fit the
 * request. `ctx` is a struct moe_client_gradients. Errors: MOE_INTERNAL if the answer is broken. */
struct moe_status moe_client_gradients_read(void *ctx, struct moe_rpc_msg *answer) MOE_CHECKED;

#endif
