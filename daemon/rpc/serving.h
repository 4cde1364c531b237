/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the server share: server.c (life), connection.c (one per client), shard.c
 * (threads), call.c (calls), references.c (memory of calls), inbox.c (operations of other threads),
 * admission.c (permits for large messages), limits.c (time limits of clients), health.c and
 * reflection.c (built-in services).
 *
 * The state of a call belongs to its shard's thread. Other threads push operations to the shard's
 * inbox, a lock-free stack. A push to an empty inbox wakes the thread by an empty batch. */
#ifndef MOE_RPC_SERVING_H
#define MOE_RPC_SERVING_H

#include "base/mutex.h"
#include "listener/listener.h"
#include "rpc/core.h"
#include "rpc/server.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

struct moe_rpc_shard;

/* ------------------------------------------------------------------ time limits */

/* One limit of one call. */
struct moe_rpc_limit {
    TAILQ_ENTRY(moe_rpc_limit) link;
    uint64_t since_ns;
    bool runs;
};

/* Limits of a shard with the same length. Shard thread only. */
struct moe_rpc_limits {
    TAILQ_HEAD(, moe_rpc_limit) running; /* the first passes first */
    uint64_t length_ns;
    void (*passed)(struct moe_rpc_limit *limit);
};

void moe_rpc_limits_init(struct moe_rpc_limits *list, uint64_t length_ns,
                         void (*passed)(struct moe_rpc_limit *limit));
void moe_rpc_limit_start(struct moe_rpc_limits *list, struct moe_rpc_limit *limit);
/* Does nothing if the limit does not run. */
void moe_rpc_limit_stop(struct moe_rpc_limits *list, struct moe_rpc_limit *limit);
/* Calls `passed` for every limit that has passed. Returns the time (monotonic ns) of the next
 * check, or MOE_NEVER. */
uint64_t moe_rpc_limits_expire(struct moe_rpc_limits *list);

/* ------------------------------------------------------------------ calls */

enum moe_rpc_op_kind {
    MOE_RPC_OP_SEND,  /* one message to the send queue */
    MOE_RPC_OP_END,   /* end with end_status (and end_message) */
    MOE_RPC_OP_READ,  /* read the next message */
    MOE_RPC_OP_GRANT, /* a waiting call has got a permit to read */
};

struct moe_rpc_op {
    struct moe_rpc_op *next;
    enum moe_rpc_op_kind kind;
    struct moe_rpc_call *call; /* one reference */
    grpc_byte_buffer *message; /* MOE_RPC_OP_SEND */
};

enum moe_rpc_permit { MOE_RPC_PERMIT_NONE, MOE_RPC_PERMIT_WAITING, MOE_RPC_PERMIT_GRANTED };

struct moe_rpc_entry {
    struct moe_rpc_method method;
    bool built_in; /* this room answers it, also while the server drains */
    bool endless;  /* clients never end it: fails at once when the server drains */
    bool unknown;  /* stands for all other methods */
};

struct moe_rpc_call {
    struct moe_rpc_shard *shard;
    struct moe_rpc_connection *connection; /* one reference */
    struct moe_rpc_grant grant;            /* set before `started` */
    const struct moe_rpc_entry *entry;     /* NULL until the call was accepted */
    grpc_call *core;                       /* the same */
    grpc_metadata_array metadata;
    grpc_call_details details;
    uint64_t deadline_ns;
    void *user;

    /* Any thread. */
    atomic_uint references; /* shard until `done`: 1; each moe_rpc_call_ref: 1; each posted op: 1 */
    atomic_bool ended;      /* reply, fail or finish was called; the caller that sets it writes: */
    struct moe_status end_status;
    grpc_byte_buffer *end_message; /* unary answer */
    atomic_bool cancelled;
    atomic_bool read_outstanding;
    atomic_size_t backlog;
    struct moe_rpc_op end_op, read_op, grant_op;

    /* Shard thread only. */
    unsigned batches;    /* in flight; the call is over when `closed` and this is 0 */
    bool closed;         /* the core has reported the end of the call */
    bool over;           /* `done` has run */
    bool ending;         /* MOE_RPC_OP_END has arrived */
    bool end_started;    /* the status batch has been started */
    bool headers_sent;   /* initial metadata is part of a batch */
    bool half_closed;    /* the client sends no more */
    int core_cancelled;  /* written by the core */
    bool introduced;     /* `started` has run, so `done` must */
    bool counted;        /* in the server's `active` */
    bool linked_endless; /* in the server's list of endless calls */
    grpc_byte_buffer *received;
    struct moe_rpc_op *queue, **queue_end, *sending;
    struct moe_rpc_tag on_accepted, on_closed, on_received, on_sent, on_ended;
    struct moe_rpc_limit reading; /* runs while a read uses a permit */
    struct moe_rpc_limit taking;  /* runs while a message or the status is with the core */

    /* Guarded by the admission's lock while WAITING, else shard thread only. */
    enum moe_rpc_permit permit;
    TAILQ_ENTRY(moe_rpc_call) waiting;

    TAILQ_ENTRY(moe_rpc_call) endless; /* guarded by the server's lock */
};
TAILQ_HEAD(moe_rpc_calls, moe_rpc_call);

/* Posts accepts until the connection has MOE_RPC_ACCEPT_DEPTH of them. Any thread, but one at a
 * time. */
enum { MOE_RPC_ACCEPT_DEPTH = 4 };
void moe_rpc_accept(struct moe_rpc_connection *connection);
/* The status for clients of a draining server. */
struct moe_status moe_rpc_draining(void) MOE_CHECKED;
/* Runs `op` and drops its reference to the call. Never runs a handler. Shard thread. */
void moe_rpc_apply(struct moe_rpc_op *op);
/* Ends a call that reads, or leaves sent data unread, for too long. */
void moe_rpc_reading_passed(struct moe_rpc_limit *reading);
void moe_rpc_taking_passed(struct moe_rpc_limit *taking);

/* ------------------------------------------------------------------ admission */

/* Permits to read large messages: `limit` at a time; other calls wait in order of arrival. */
struct moe_rpc_admission {
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        uint32_t limit, active;
        uint32_t max_waiting, waiting;
        struct moe_rpc_calls queue;
    };
};

void moe_rpc_admission_init(struct moe_rpc_admission *a, uint32_t limit, uint32_t max_waiting);
void moe_rpc_admission_destroy(struct moe_rpc_admission *a);
/* Grants a permit at once (`*now` = true), or queues the call (MOE_RPC_OP_GRANT follows).
 * Errors: RESOURCE_EXHAUSTED/QUEUE_FULL. */
struct moe_status moe_rpc_admission_enter(struct moe_rpc_admission *a, struct moe_rpc_call *call,
                                          bool *now) MOE_CHECKED;
/* Removes the call from the queue, if it still waits. */
void moe_rpc_admission_forget(struct moe_rpc_admission *a, struct moe_rpc_call *call);
/* Returns a GRANTED permit and passes it to the call that has waited longest. */
void moe_rpc_admission_leave(struct moe_rpc_admission *a, struct moe_rpc_call *call);

/* ------------------------------------------------------------------ shards */

struct moe_rpc_shard {
    struct moe_rpc_server *server;
    grpc_completion_queue *queue;
    pthread_t thread;
    bool started;
    _Atomic(struct moe_rpc_op *) inbox; /* newest first */
    struct moe_rpc_tag on_wake;
    void (*apply)(struct moe_rpc_op *op);
    bool applying;       /* the inbox is being drained */
    uint64_t spin_until; /* of a server with spin_ns */
    struct moe_rpc_limits reading, taking;
};

/* Starts the thread, which serves connections of this shard. */
struct moe_status moe_rpc_shard_start(struct moe_rpc_shard *shard) MOE_CHECKED;
/* Ends and joins the thread, if there is one, and frees the queue. All calls are freed before. */
void moe_rpc_shard_stop(struct moe_rpc_shard *shard);

/* ------------------------------------------------------------------ inbox */

/* `apply` runs an operation and drops its reference to the call. Before the shard's thread. */
void moe_rpc_inbox_init(struct moe_rpc_shard *shard, void (*apply)(struct moe_rpc_op *op));
/* The current thread becomes the shard's. */
void moe_rpc_inbox_enter(struct moe_rpc_shard *shard);
/* Hands `op` to its call's shard; on the shard's thread it is applied at once. The op takes one
 * reference to the call. */
void moe_rpc_post(struct moe_rpc_op *op);

/* ------------------------------------------------------------------ connections */

/* One client, behind the listener. It has a server object of the core for itself: whatever calls
 * come out of that object came in over this connection. So the identity of a call needs no name or
 * number that could be reused or written by a client. All calls of a connection are on one shard.
 */
struct moe_rpc_connection {
    struct moe_rpc_shard *shard;
    grpc_server *core;
    struct moe_rpc_identity who;
    atomic_uint references; /* core until it is shut down: 1; each call: 1 */
    atomic_uint accepting;  /* accepts posted */
    struct moe_rpc_tag on_shut_down;
};

void moe_rpc_connection_unref(struct moe_rpc_connection *c);
/* For moe_listener_config; `ctx` is the server. */
void *moe_rpc_connection_opened(void *ctx, const struct moe_rpc_identity *who, int fd);
void moe_rpc_connection_closed(void *ctx, void *connection);

/* ------------------------------------------------------------------ server */

enum { MOE_RPC_CORE_ARGS_MAX = 24 };

struct moe_rpc_server {
    struct moe_listener *listener;
    grpc_arg args[MOE_RPC_CORE_ARGS_MAX]; /* of each connection's server object */
    size_t arg_count;
    struct moe_rpc_shard *shards;
    uint32_t shard_count;
    atomic_uint next_shard;        /* gets the next connection */
    struct moe_rpc_entry *entries; /* the last one stands for unknown methods */
    size_t entry_count;
    struct moe_rpc_admission admission;
    uint64_t read_limit_ns; /* how long a call may use a permit */
    uint64_t send_limit_ns; /* how long a client may leave sent data unread */
    uint64_t spin_ns;       /* how long shards poll without sleep after an event */
    struct moe_rpc_health *health;
    struct moe_rpc_reflection *reflection;
    struct moe_status (*authorise)(void *ctx, const struct moe_rpc_identity *who, const char *path,
                                   const char *token, struct moe_rpc_grant *grant);
    void (*finished)(void *ctx, const struct moe_rpc_identity *who,
                     const struct moe_rpc_grant *grant, const char *path,
                     const struct moe_status *answer);
    void *authorise_ctx;

    struct moe_mutex lock;
    pthread_cond_t changed; /* monotonic clock */
    MOE_GUARDED_BY(lock) struct {
        size_t connections; /* until their part of the core is shut down */
        size_t unfinished;  /* calls posted for acceptance or started; `done` has not run */
        size_t active;      /* calls admitted before the drain; `done` has not run */
        size_t allocated;   /* call structs */
        bool draining;
        bool closed; /* the listener has closed all connections */
        struct moe_rpc_calls endless;
    };
};

/* ------------------------------------------------------------------ built-in services */

struct moe_rpc_health *moe_rpc_health_create(void);
void moe_rpc_health_destroy(struct moe_rpc_health *h);
void moe_rpc_health_set(struct moe_rpc_health *h, const char *service, bool serving);
/* Sets all services to NOT_SERVING for good; later settings have no effect. */
void moe_rpc_health_shut(struct moe_rpc_health *h);
enum { MOE_RPC_HEALTH_METHODS = 3 };
void moe_rpc_health_methods(struct moe_rpc_health *h, struct moe_rpc_entry *out);

/* Indexes `descriptors`, which outlives the index. Errors: MOE_INVALID_ARGUMENT/MALFORMED,
 * MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_rpc_reflection_create(const uint8_t *descriptors, size_t length,
                                            struct moe_rpc_reflection **out) MOE_CHECKED;
void moe_rpc_reflection_destroy(struct moe_rpc_reflection *r);
/* Adds the service of this method to the list of services; before the server starts. The
 * descriptors also contain services that a server does not offer. */
void moe_rpc_reflection_add_method(struct moe_rpc_reflection *r, const char *path);
enum { MOE_RPC_REFLECTION_METHODS = 2 };
void moe_rpc_reflection_methods(struct moe_rpc_reflection *r, struct moe_rpc_entry *out);

#endif
