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

#endif
