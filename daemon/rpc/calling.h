/* What the files of the client share: client.c (thread, channels, unary calls) and stream.c. */
#ifndef MOE_RPC_CALLING_H
#define MOE_RPC_CALLING_H

#include "rpc/client.h"
#include "rpc/core.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

/* A call of either kind while the core knows it. */
struct moe_rpc_in_flight {
    struct moe_rpc_client *client;
    grpc_call *core;   /* NULL once the call is over */
    bool asked_to_end; /* by this side: a CANCELLED is our own */
    bool starting;     /* the function that began it has not returned: the client has to stay */
    TAILQ_ENTRY(moe_rpc_in_flight) link;
};

struct moe_rpc_client {
    grpc_completion_queue *queue;
    _Atomic uint64_t spin_ns; /* how long the thread stays awake after an event */
    pthread_t thread;
    pthread_mutex_t lock; /* guards all that follows, and calls in flight */
    pthread_cond_t idle;
    TAILQ_HEAD(, moe_rpc_in_flight) calls; /* not over, or still being started */
    bool closing;                          /* new calls are cancelled at once */
};

struct moe_rpc_channel {
    struct moe_rpc_client *client;
    grpc_channel *core;
};

bool moe_rpc_client_is_this_thread(const struct moe_rpc_client *c);

/* A call that is begun while the client is being destroyed is cancelled at once. */
void moe_rpc_in_flight_begin(struct moe_rpc_in_flight *f, struct moe_rpc_channel *ch,
                             const char *path, uint64_t deadline_ns);
/* Any thread, at any time in the life of the client. */
void moe_rpc_in_flight_cancel(struct moe_rpc_in_flight *f);
/* What the caller is told of a call that has ended. A CANCELLED that nobody here asked for and that
 * no handler explains is a server that reset the call as it went down: UNAVAILABLE, as if it had
 * been gone already. */
struct moe_status moe_rpc_in_flight_status(struct moe_rpc_in_flight *f, grpc_status_code code,
                                           grpc_slice text,
                                           const grpc_metadata_array *trailing) MOE_CHECKED;
/* By the thread that began the call, once it has started its batches. The call may be over by then,
 * and the client gone afterwards. */
void moe_rpc_in_flight_started(struct moe_rpc_in_flight *f);
/* After the last event of the call. */
void moe_rpc_in_flight_end(struct moe_rpc_in_flight *f);

/* The operation that opens every call. */
grpc_op moe_rpc_open_op(const struct moe_rpc_call_options *options);

#endif
