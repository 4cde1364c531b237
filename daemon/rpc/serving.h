/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the server share: server.c (life), connection.c (one per client), shard.c
 * (threads), call.c (calls), references.c (memory of calls), inbox.c (operations of other threads),
 * budget.c (memory for received messages), limits.c (time limits of clients), health.c and
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
#include "uploads/upload.h"

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
    MOE_RPC_OP_SEND, /* one message to the send queue */
    MOE_RPC_OP_END,  /* end with end_status (and end_message) */
    MOE_RPC_OP_READ, /* read the next message */
};

struct moe_rpc_op {
    struct moe_rpc_op *next;
    enum moe_rpc_op_kind kind;
    struct moe_rpc_call *call; /* one reference */
    grpc_byte_buffer *message; /* MOE_RPC_OP_SEND */
};

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
    struct moe_rpc_upload *upload;         /* from its start until it is over */
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
    struct moe_rpc_op end_op, read_op;

    /* Shard thread only. */
    unsigned batches;    /* in flight; the call is over when `closed` and this is 0 */
    bool closed;         /* the core has reported the end of the call */
    bool over;           /* `done` has run */
    bool ending;         /* MOE_RPC_OP_END has arrived */
    bool end_started;    /* the status batch has been started */
    bool headers_sent;   /* initial metadata is part of a batch */
    bool half_closed;    /* the client sends no more */
    bool reads;          /* a read is in `batches`; the core or the budget has it */
    bool delivers;       /* the handler is getting a message ... */
    bool reads_on;       /* ... and wants the next one */
    bool queued;         /* in the shard's `waiting`; then `reads` too */
    int core_cancelled;  /* written by the core */
    bool introduced;     /* `started` has run, so `done` must */
    bool counted;        /* in the server's `active` */
    bool keeps;          /* in its connection's `keepers` */
    bool linked_endless; /* in the server's list of endless calls */
    grpc_byte_buffer *received;
    struct moe_rpc_op *queue, **queue_end, *sending;
    struct moe_rpc_tag on_accepted, on_closed, on_received, on_sent, on_ended;
    struct moe_rpc_limit reading; /* runs while a unary call has no message */
    struct moe_rpc_limit taking;  /* runs while a message or the status is with the core */

    TAILQ_ENTRY(moe_rpc_call) turn; /* while `queued` */

    TAILQ_ENTRY(moe_rpc_call) endless; /* guarded by the server's lock */
};
TAILQ_HEAD(moe_rpc_calls, moe_rpc_call);

/* Posts accepts until the connection has MOE_RPC_ACCEPT_DEPTH of them, or shuts down. Any thread.
 */
enum { MOE_RPC_ACCEPT_DEPTH = 4 };
void moe_rpc_accept(struct moe_rpc_connection *connection);
/* The status for clients of a draining server. */
struct moe_status moe_rpc_draining(void) MOE_CHECKED;
/* Runs `op` and drops its reference to the call. Never runs a handler. Shard thread. */
void moe_rpc_apply(struct moe_rpc_op *op);
/* For the budget: the read that a call has asked for may start, and drops the reference of `hold`.
 * Any thread. */
void moe_rpc_start_granted(void *call);
/* Begins a round of reads. Shard thread. */
enum { MOE_RPC_ROUND_READS = 16 };
void moe_rpc_next_round(struct moe_rpc_shard *shard);
/* Ends a call that brings no message, or leaves sent data unread, for too long. */
void moe_rpc_reading_passed(struct moe_rpc_limit *reading);
void moe_rpc_taking_passed(struct moe_rpc_limit *taking);

/* ------------------------------------------------------------------ memory */

/* Why a call ended before its method saw it. */
enum moe_rpc_call_refusal {
    MOE_RPC_UNAUTHENTICATED,
    MOE_RPC_DENIED,         /* the caller lacks the role */
    MOE_RPC_UNKNOWN_METHOD, /* the server has no such method */
    MOE_RPC_UNAVAILABLE,    /* the server drains, or the client has left */
    MOE_RPC_CALL_REFUSALS
};

/* Figures of the budget and of refused calls, for the metrics. */
struct moe_rpc_figures {
    struct moe_counter *calls_refused[MOE_RPC_CALL_REFUSALS];
    struct moe_gauge *bytes, *reading, *waiting, *oldest;
    struct moe_counter *refused[MOE_RPC_REFUSALS];
    uint64_t reported[MOE_RPC_REFUSALS]; /* refusals that are counted in `refused` */
};

/* The bytes of received messages, and the core's memory around them. */
struct moe_rpc_memory {
    struct moe_rpc_budget budget;
    grpc_resource_quota *quota;
    struct moe_rpc_figures figures; /* NULL without metrics */
    /* Thread of the first shard. */
    uint64_t next_check_ns;
    uint64_t quiet_since_ns; /* after a peak; 0 = there was none since memory was given back */
};

/* Makes the budget and the quota. */
void moe_rpc_memory_init(struct moe_rpc_memory *m, const struct moe_rpc_server_config *config);
/* Errors: OUT_OF_MEMORY, ALREADY_EXISTS (two servers of one name). */
struct moe_status
moe_rpc_memory_add_metrics(struct moe_rpc_memory *m,
                           const struct moe_rpc_server_config *config) MOE_CHECKED;
/* [any thread] A call ended with this failure before its method saw it. */
void moe_rpc_memory_count_refused(struct moe_rpc_memory *m, const struct moe_status *why);
/* The quota as an argument of the core. */
grpc_arg moe_rpc_memory_arg(const struct moe_rpc_memory *m);
/* No connection is left. */
void moe_rpc_memory_end(struct moe_rpc_memory *m);
/* At least once a second: ends slow uploads, tells the metrics, and gives memory back to the system
 * some time after a peak. Returns the time of the next check. */
uint64_t moe_rpc_memory_check(struct moe_rpc_memory *m);

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
    struct moe_loop *loop;
    uint64_t turn_ns; /* longest wait of the thread; 0 = any */
    struct moe_rpc_limits reading, taking;
    /* The core looks at its sockets only when it has no event left. A client with many messages in
     * the core could so keep others out. Therefore reads come in rounds, of MOE_RPC_ROUND_READS for
     * each connection at most. A round ends when no event is left and all sockets were looked at.
     */
    uint64_t round;
    struct moe_rpc_calls waiting; /* for a later round */
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
    uint32_t number; /* in the server's order */
    struct moe_rpc_uploads *uploads;
    atomic_uint references; /* core until it is shut down: 1; each call: 1 */
    atomic_uint accepting;  /* accepts posted */
    atomic_uint keepers;    /* calls that keep its place at a limit; see keep_place */
    /* The core aborts when a request for a call meets the shutdown of its server: it keeps the
     * request after it has dropped all others. The shutdown may also post its event before it is
     * done with the server. So one lock covers each request, this mark and the shutdown, and the
     * server is destroyed after that. */
    struct moe_mutex requesting;
    MOE_GUARDED_BY(requesting) bool shutting;
    struct moe_rpc_tag on_shut_down;

    /* Shard thread only. */
    uint64_t round; /* the last one with a read */
    unsigned reads; /* in that round */
};

void moe_rpc_connection_unref(struct moe_rpc_connection *c);
/* For moe_listener_config; `ctx` is the server. */
void *moe_rpc_connection_opened(void *ctx, const struct moe_rpc_identity *who,
                                struct moe_connection *connection, int fd);
bool moe_rpc_connection_keeps(void *ctx, void *connection);
void moe_rpc_connection_closed(void *ctx, void *connection);
/* Its streams; `ctx` is the connection. */
extern const struct moe_frames_events moe_rpc_connection_streams;

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
    struct moe_rpc_memory memory;
    uint32_t max_message_bytes;
    uint32_t max_streams;   /* of a connection */
    uint64_t read_limit_ns; /* how long a unary call may bring no message */
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
