/* SPDX-License-Identifier: Apache-2.0 */
/* How a training call is made, whatever it says: sent, tried again, asked for elsewhere. */
#ifndef MOE_CLIENT_SRC_TRAINING_H
#define MOE_CLIENT_SRC_TRAINING_H

#include "internal.h"
#include "moe/client_training.h"

enum { MOE_CLIENT_TRAINING_HEAD_MAX = 512 }; /* numbers, and two names at most */

struct moe_client_training_call {
    const char *path;                  /* lives for ever */
    const struct moe_rpc_out *request; /* `release` and `owner` of its parts are not looked at */
    uint64_t deadline_ns;
    bool home; /* only the home worker has what the call needs */
    bool once; /* do not try again */
    /* Takes the answer, which stays the caller's; after a failure another answer may come. */
    struct moe_status (*read)(void *ctx, struct moe_rpc_msg *answer);
    void *ctx;
};

/* Blocks until the call is over and the transport has let go of the request's memory. */
struct moe_status moe_client_training_run(struct moe_client *c,
                                          const struct moe_client_training_call *call) MOE_CHECKED;

/* A Backward and where its answer goes. */
struct moe_client_gradients {
    struct moe_client_backward *b;
    const struct moe_client_layer *layer;
    size_t rows_bytes, pairs;         /* of [T,H] in dtype; T * K */
    size_t dx_length, weights_length; /* of the parts that came */
};

/* `read` of a Backward: moves the gradients into the caller's memory and checks that they are what
 * was asked for; `ctx` is a struct moe_client_gradients. Errors: MOE_INTERNAL when the answer is
 * broken. */
struct moe_status moe_client_gradients_read(void *ctx, struct moe_rpc_msg *answer) MOE_CHECKED;

#endif
