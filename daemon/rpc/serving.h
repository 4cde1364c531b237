/* What the files of the server share: server.c (life), shard.c (threads), call.c (calls),
 * admission.c (who may read a large message), limits.c (how long a client may take), health.c and
 * reflection.c (built-in services).
 *
 * The one idea: state of a call belongs to its shard's thread. Other threads put operations into
 * the shard's inbox, a lock-free stack, and wake the thread by an empty batch when it was empty. */
#ifndef MOE_RPC_SERVING_H
#define MOE_RPC_SERVING_H

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

/* Limits of a shard that are equally long. Shard thread only. */
struct moe_rpc_limits {
    TAILQ_HEAD(, moe_rpc_limit) running; /* the first passes first */
    uint64_t length_ns;
    void (*passed)(struct moe_rpc_limit *limit);
};

void moe_rpc_limits_init(struct moe_rpc_limits *list, uint64_t length_ns,
                         void (*passed)(struct moe_rpc_limit *limit));
void moe_rpc_limit_start(struct moe_rpc_limits *list, struct moe_rpc_limit *limit);
/* Nothing where it does not run. */
void moe_rpc_limit_stop(struct moe_rpc_limits *list, struct moe_rpc_limit *limit);
/* Calls `passed` for every limit that has; returns when to look again. */
uint64_t moe_rpc_limits_expire(struct moe_rpc_limits *list);

/* ------------------------------------------------------------------ calls */

enum moe_rpc_op_kind {
    MOE_RPC_OP_SEND,  /* one message to the send queue */
    MOE_RPC_OP_END,   /* end with end_status (and end_message) */
    MOE_RPC_OP_READ,  /* read the next message */
    MOE_RPC_OP_GRANT, /* a permit to read has been given to a waiting call */
};

struct moe_rpc_op {
    struct moe_rpc_op *next;
    enum moe_rpc_op_kind kind;
    struct moe_rpc_call *call; /* one reference */
    grpc_byte_buffer *message; /* MOE_RPC_OP_SEND */
};

enum moe_rpc_permit { MOE_RPC_PERMIT_NONE, MOE_RPC_PERMIT_WAITING, MOE_RPC_PERMIT_HELD };

struct moe_rpc_entry {
    struct moe_rpc_method method;
    bool built_in;    /* answered by this room, also while the server drains */
    bool endless;     /* has no end of its own: failed at once when the server drains */
    void *registered; /* NULL: stands for all unknown methods */
};

struct moe_rpc_call {
    struct moe_rpc_shard *shard;
    const struct moe_rpc_entry *entry;
    grpc_call *core; /* NULL until the call was accepted */
    grpc_metadata_array metadata;
    grpc_call_details details; /* unknown methods only */
    gpr_timespec core_deadline;
    uint64_t deadline_ns;
    struct moe_rpc_text *texts; /* copies that moe_rpc_call_metadata gave out */
    void *user;

    /* Any thread. */
    atomic_uint references; /* one of the shard until `done`, one per hold, one per op on its way */
    atomic_bool ended;      /* reply, fail or finish was called; the caller that sets it owns: */
    struct moe_status end_status;
    grpc_byte_buffer *end_message; /* unary answer */
    atomic_bool cancelled;
    atomic_bool read_outstanding;
    atomic_size_t backlog;
    struct moe_rpc_op end_op, read_op, grant_op;

    /* Shard thread only. */
    unsigned batches;    /* in flight; the call is over when closed and none is left */
    bool closed;         /* the core has said how the call ended */
    bool over;           /* `done` has run */
    bool ending;         /* MOE_RPC_OP_END has arrived */
    bool end_started;    /* the status batch has been started */
    bool headers_sent;   /* initial metadata has been put into a batch */
    bool half_closed;    /* the client sends no more */
    int core_cancelled;  /* written by the core */
    bool introduced;     /* the handler knows of the call */
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

/* Posts accepts until the shard has MOE_RPC_ACCEPT_DEPTH of them for entry `index`. */
enum { MOE_RPC_ACCEPT_DEPTH = 4 };
void moe_rpc_accept(struct moe_rpc_shard *shard, size_t index);
/* What clients of a draining server are told. */
struct moe_status moe_rpc_draining(void) MOE_CHECKED;
/* Does what `op` says and gives its reference back. Never runs a handler. Shard thread. */
void moe_rpc_apply(struct moe_rpc_op *op);
/* What becomes of a call that has used its permit, or has left what was sent, for too long. */
void moe_rpc_reading_passed(struct moe_rpc_limit *reading);
void moe_rpc_taking_passed(struct moe_rpc_limit *taking);

/* ------------------------------------------------------------------ admission */

/* Permits to read large messages: `limit` at a time, others wait in order of arrival. */
struct moe_rpc_admission {
    pthread_mutex_t lock;
    uint32_t limit, active;
    uint32_t max_waiting, waiting;
    struct moe_rpc_calls queue;
};

void moe_rpc_admission_init(struct moe_rpc_admission *a, uint32_t limit, uint32_t max_waiting);
void moe_rpc_admission_destroy(struct moe_rpc_admission *a);
/* Gives `call` a permit at once (`*now`), or lets it wait (MOE_RPC_OP_GRANT will come), or refuses:
 * QUEUE_FULL. */
struct moe_status moe_rpc_admission_enter(struct moe_rpc_admission *a, struct moe_rpc_call *call,
                                          bool *now) MOE_CHECKED;
/* Stops waiting, if the call still waits. */
void moe_rpc_admission_forget(struct moe_rpc_admission *a, struct moe_rpc_call *call);
/* Gives a HELD permit back, and on to the longest waiting call. */
void moe_rpc_admission_leave(struct moe_rpc_admission *a, struct moe_rpc_call *call);

/* ------------------------------------------------------------------ shards */

struct moe_rpc_shard {
    struct moe_rpc_server *server;
    grpc_completion_queue *queue;
    pthread_t thread;
    bool started;
    _Atomic(struct moe_rpc_op *) inbox; /* newest first */
    struct moe_rpc_tag on_wake;
    bool applying;        /* the inbox is being drained */
    uint64_t awake_until; /* of a server with spin_ns */
    struct moe_rpc_limits reading, taking;
    unsigned *accepting; /* accepts posted, per entry */
};

/* Starts the thread. It waits for the server's phase to change, and then serves or ends. */
struct moe_status moe_rpc_shard_start(struct moe_rpc_shard *shard) MOE_CHECKED;
/* Ends and joins the thread, if there is one, and frees the queue. No call may exist any more. */
void moe_rpc_shard_stop(struct moe_rpc_shard *shard);
/* Hands `op` to its call's shard; applied at once when that is the calling thread. One reference of
 * the call passes to the op. */
void moe_rpc_post(struct moe_rpc_op *op);

/* ------------------------------------------------------------------ connections */

/* Before a server listens: a lack of descriptors turns connections away, and does not end the
 * listening (accept.c). */
void moe_rpc_reserve_descriptor(void);

/* Connections to this port are closed as they come, until it is forgotten: whoever made it shut
 * must forget it, once. For the listeners of this process. */
struct moe_rpc_door {
    struct moe_rpc_door *next;
    uint16_t port;
};
void moe_rpc_shut_door(struct moe_rpc_door *door, uint16_t port);
void moe_rpc_forget_door(struct moe_rpc_door *door);

/* ------------------------------------------------------------------ server */

enum moe_rpc_phase { MOE_RPC_STARTING, MOE_RPC_SERVING, MOE_RPC_ABANDONED };

struct moe_rpc_server {
    grpc_server *core;
    struct moe_rpc_shard *shards;
    uint32_t shard_count;
    struct moe_rpc_entry *entries; /* the last one stands for unknown methods */
    size_t entry_count;
    struct moe_rpc_admission admission;
    uint64_t read_limit_ns; /* how long a call may use a permit */
    uint64_t send_limit_ns; /* how long a client may leave what was sent */
    uint64_t spin_ns;       /* how long shards stay awake after an event */
    struct moe_rpc_health *health;
    struct moe_rpc_reflection *reflection;
    uint16_t port;
    struct moe_rpc_door door; /* shut while the server drains */
    struct moe_rpc_tag on_shutdown;

    pthread_mutex_t lock;   /* guards all that follows */
    pthread_cond_t changed; /* monotonic clock */
    enum moe_rpc_phase phase;
    uint32_t shards_ready; /* shards that have posted their accepts */
    size_t unfinished;     /* calls posted for acceptance or started, `done` not run */
    size_t active;         /* calls let in before the server drained, `done` not run */
    size_t allocated;      /* call structs */
    bool draining;
    bool shut_down; /* the core has let go of all connections */
    struct moe_rpc_calls endless;
};

/* ------------------------------------------------------------------ built-in services */

struct moe_rpc_health *moe_rpc_health_create(void);
void moe_rpc_health_destroy(struct moe_rpc_health *h);
void moe_rpc_health_set(struct moe_rpc_health *h, const char *service, bool serving);
/* Everything is NOT_SERVING from here on, whatever is set later. */
void moe_rpc_health_shut(struct moe_rpc_health *h);
enum { MOE_RPC_HEALTH_METHODS = 3 };
void moe_rpc_health_methods(struct moe_rpc_health *h, struct moe_rpc_entry *out);

/* Indexes `descriptors`, which must stay. Errors: MOE_INVALID_ARGUMENT/MALFORMED,
 * MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_rpc_reflection_create(const uint8_t *descriptors, size_t length,
                                            struct moe_rpc_reflection **out) MOE_CHECKED;
void moe_rpc_reflection_destroy(struct moe_rpc_reflection *r);
/* Before the server starts: the service of this method is one that the server lists. Descriptors
 * tell of more services than a server has. */
void moe_rpc_reflection_add_method(struct moe_rpc_reflection *r, const char *path);
enum { MOE_RPC_REFLECTION_METHODS = 2 };
void moe_rpc_reflection_methods(struct moe_rpc_reflection *r, struct moe_rpc_entry *out);

#endif
