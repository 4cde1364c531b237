/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files of the client: client.c (thread, channels, unary calls) and stream.c. */
#ifndef MOE_RPC_CALLING_H
#define MOE_RPC_CALLING_H

#include "base/mutex.h"
#include "daemon/trusted_file.h"
#include "rpc/client.h"
#include "rpc/core.h"
#include "tls/pem.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

/* A call of either kind while the core knows it. */
struct moe_rpc_in_flight {
    struct moe_rpc_client *client;
    struct moe_rpc_route *route;
    grpc_call *core;   /* NULL once the call is over */
    bool asked_to_end; /* this side cancelled the call */
    bool starting;     /* the function that starts it has not returned: the client must stay */
    TAILQ_ENTRY(moe_rpc_in_flight) link;
};

struct moe_rpc_client {
    grpc_completion_queue *queue;
    _Atomic uint64_t spin_ns; /* how long the thread polls without sleep after an event */
    pthread_t thread;
    struct moe_mutex lock; /* guards all that follows, and calls in flight */
    pthread_cond_t idle;
    MOE_GUARDED_BY(lock) struct {
        TAILQ_HEAD(, moe_rpc_in_flight) calls; /* unfinished, or still starting */
        bool closing;                          /* new calls are cancelled at once */
        char *pem_paths;                       /* channel.c: the files of `pem`; NULL: none */
        struct moe_tls_pem pem;                /* valid contents, for channels that find others */
    };
};

/* token.c */
struct moe_rpc_token {
    char *path;
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        struct moe_trusted_mark mark;
        grpc_slice header; /* "Bearer ..." */
        uint64_t looked_ns;
    };
};
struct moe_status moe_rpc_token_open(const char *path, struct moe_rpc_token **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_rpc_token_close(struct moe_rpc_token *t);
/* One reference for the caller. */
grpc_slice moe_rpc_token_header(struct moe_rpc_token *t);

/* channel.c. A channel of the core, with one state of the files of TLS. Calls hold it until
 * they are over, so a new certificate breaks none. */
struct moe_rpc_route {
    atomic_uint references; /* one of each call, and one of its channel while it is the current */
    enum moe_rpc_link link;
    grpc_channel *core;
};

struct moe_rpc_channel {
    struct moe_rpc_client *client;
    struct moe_rpc_token *token; /* NULL: none */
    char *target;
    uint32_t max_message_bytes, reconnect_ms;
    bool own_connection, local; /* a Unix socket */
    struct moe_rpc_tls *tls;    /* NULL: plain */
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct moe_rpc_route *route;
};
/* The route for a call that begins now; one reference for the caller. */
struct moe_rpc_route *moe_rpc_channel_route(struct moe_rpc_channel *ch);
void moe_rpc_route_drop(struct moe_rpc_route *route);

/* Cancels the call at once if the client is being destroyed. */
void moe_rpc_in_flight_begin(struct moe_rpc_in_flight *f, struct moe_rpc_channel *ch,
                             const char *path, uint64_t deadline_ns);
/* Any thread, during the life of the client. */
void moe_rpc_in_flight_cancel(struct moe_rpc_in_flight *f);
/* The status of an ended call for its caller. CANCELLED without a cancel of this side and without
 * trailing metadata means that a server reset the call while it shut down. It becomes UNAVAILABLE.
 */
struct moe_status moe_rpc_in_flight_status(struct moe_rpc_in_flight *f, grpc_status_code code,
                                           grpc_slice text,
                                           const grpc_metadata_array *trailing) MOE_CHECKED;
/* Called once, after the batches of the call have been started. The call may be over
 * by then, and the client may be freed afterwards. */
void moe_rpc_in_flight_started(struct moe_rpc_in_flight *f);
/* After the last event of the call. */
void moe_rpc_in_flight_end(struct moe_rpc_in_flight *f);

/* The operation that opens every call. `header` lives until the batch is started; then
 * moe_rpc_open_done drops it. */
grpc_op moe_rpc_open_op(struct moe_rpc_channel *ch, const struct moe_rpc_call_options *options,
                        grpc_metadata *header);
void moe_rpc_open_done(grpc_metadata *header);

#endif
