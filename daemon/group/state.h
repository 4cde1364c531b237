/* SPDX-License-Identifier: Apache-2.0 */
/* The session's state and events, and the functions that cross from one file into another
 * (moe_group__*). Private to this room.
 *
 * One thread owns the state and never blocks. Every input reaches it as an event in a queue:
 * messages of the coordinator, ends of tasks, evidence of lost peers, requests to drain. The serial
 * executor runs the blocking tasks (load, form, read, serve, leave). `forming` and `epoch` alone
 * say which view exists. To end a view, the thread zeroes them first and then posts `leave` behind
 * the tasks that may still work on it. */
#ifndef MOE_GROUP_STATE_H
#define MOE_GROUP_STATE_H

#include "base/mutex.h"
#include "daemon/endpoint.h"
#include "daemon/lease.h"
#include "daemon/progress.h"
#include "group/gather.h"
#include "group/group.h"
#include "group/report.h"
#include "group/serial_executor.h"
#include "moe/v1/coordinator.pb-c.h"
#include "rpc/client.h"

#include <pthread.h>

enum event_kind {
    EVENT_MESSAGE, /* bytes */
    EVENT_CLOSED,  /* status */
    EVENT_LOADED, /* number: placement version; status; bytes: digests, of parts u32 length, part */
    EVENT_FORMED, /* number: epoch; slots: of Ready.together, or Ready.without; status */
    EVENT_READ,   /* order: of ReadCheckpoint; status */
    EVENT_SERVED, /* number: epoch; status */
    EVENT_LEFT,   /* the last task is done */
    EVENT_LOST,   /* number: epoch; slots; status */
    EVENT_DRAIN,  /* status.text: reason */
    EVENT_TRY_AGAIN,
    EVENT_SEND, /* bytes: packed moe.v1.SessionRequest, of parts u32 length, message */
};

struct event {
    struct event *next;
    enum event_kind kind;
    uint64_t number, slots;
    uint64_t order; /* LOADED: of Assign; READ: of ReadCheckpoint */
    struct moe_status status;
    uint32_t generation; /* of the stream that sent or ended */
    size_t length;
    uint8_t bytes[];
};

enum shutdown_phase {
    RUNNING,
    DRAIN_REQUESTED, /* DrainNotice sent; drains at Drain, or at shutdown_ns */
    DRAINING,        /* polls `drained`; gives up at drain_limit_ns */
    DRAINED,         /* Leaving sent; takes part in steps until the coordinator ends the stream */
    LEAVING,         /* the last `leave` runs */
    LEFT,
};

struct moe_group {
    struct moe_group_config config;
    pthread_t thread;
    struct moe_serial_executor *executor;
    struct moe_gather *gather;
    struct moe_rpc_channel *channel;
    struct moe_endpoints coordinators;
    size_t at;         /* of the coordinator that is asked */
    size_t tried;      /* coordinators that have failed since the last one that answered */
    bool found_socket; /* the coordinator had a local socket when `channel` was opened */

    struct moe_mutex lock;
    pthread_cond_t wake;
    /* The group's thread alone changes these two, under the lock, and reads them without it. Other
     * threads read them under the lock. */
    struct moe_rpc_stream *stream;
    uint32_t generation; /* of the stream */
    MOE_GUARDED_BY(lock) struct {
        struct event *first, **end;
        size_t event_count;
        bool quit;
    };

    /* Everything below: group's thread only. */
    bool registered; /* on the current stream */
    bool has_slot;   /* ever */
    uint32_t slot, slots, lease_ms;
    uint32_t reads;   /* tasks of ReadCheckpoint that have not ended */
    uint64_t floor;   /* lowest epoch that is accepted; only rises */
    uint64_t forming; /* epoch that a task forms, or that waits for COMMIT; 0 = none */
    bool committed;   /* COMMIT of `forming` has come, `serve` is under way */
    uint64_t epoch;   /* in force here; 0 = none */
    /* Of the last view that was formed here, if the session can take masks. */
    struct moe_group_session session;
    struct moe_lease lease;
    uint64_t round_trip_ns; /* of heartbeats: the longest, less with each later one; 0 = none */
    bool lease_held;        /* as last passed to the hook */
    /* When due; MOE_NEVER = not. session_end_ns: without a view until then, the session is left. */
    uint64_t heartbeat_ns, reconnect_ns, give_up_ns, lease_end_ns, session_end_ns;
    uint64_t silence_ns; /* the stream ends unless the coordinator says something before; MOE_NEVER
                            with one coordinator */
    uint32_t backoff_ms;
    /* TryAgains without an answer. Requests without a stream, and unanswered ones of a stream that
     * ended, are sent as one TryAgain on the next stream. */
    uint32_t unanswered;
    uint64_t away_since_ns, away_logged_ns; /* coordinator is not there; 0 = it is. Log knows so */
    enum shutdown_phase shutdown;
    bool experts_move;       /* others load this worker's experts before its drain */
    uint64_t shutdown_ns;    /* next step of the shutdown */
    uint64_t drain_limit_ns; /* end of the drain */
    struct moe_status outcome;
    struct moe_loop *loop;
    uint64_t turn_ns; /* longest wait of the thread; 0 = any */
};

/* Events (events.c). */

void moe_group__append_event(struct moe_group *g, struct event *e) MOE_REQUIRES(g->lock);
/* With room for `length` bytes; NULL without memory, which is logged. */
struct event *moe_group__new_event(enum event_kind kind, size_t length);
/* Parts u32 length, bytes; the bytes of an event. Free `bytes` with free. */
struct parts {
    uint8_t *bytes;
    size_t length, room;
};
/* moe_group_part_fn; `ctx` is a struct parts. */
struct moe_status moe_group__add_part(void *ctx, const uint8_t *part, size_t length) MOE_CHECKED;
/* [any thread] Posts an event with the parts. Without memory it is lost, which is logged. */
void moe_group__post_parts(struct moe_group *g, enum event_kind kind, uint64_t number,
                           uint64_t order, struct moe_status status, const struct parts *parts);
/* The parts of an event: the next one, from `*at` on; false past the last. */
bool moe_group__next_part(const struct event *e, size_t *at, const uint8_t **part, size_t *length);
/* The next event, or NULL at `deadline_ns` or when `quit` is set. */
struct event *moe_group__wait_for_event(struct moe_group *g, uint64_t deadline_ns, bool *quit);
/* [any thread] Without memory the event is lost, which is logged. */
void moe_group__post(struct moe_group *g, enum event_kind kind, uint64_t number, uint64_t slots,
                     struct moe_status status);
void moe_group__send_heartbeat(struct moe_group *g);

/* Leases (events.c). */

void moe_group__on_heartbeat_answer(struct moe_group *g, const Moe__V1__HeartbeatAnswer *a);
/* The lease has changed, or the time is lease_end_ns: tells the gate and the hook. */
void moe_group__show_lease(struct moe_group *g);

/* Views (view.c). on_assign and on_prepare take over `response`. */
void moe_group__on_assign(struct moe_group *g, Moe__V1__SessionResponse *response);
void moe_group__on_read_checkpoint(struct moe_group *g, const Moe__V1__ReadCheckpoint *r);
void moe_group__on_prepare(struct moe_group *g, Moe__V1__SessionResponse *response);
void moe_group__on_blobs(struct moe_group *g, const Moe__V1__Blobs *b);
void moe_group__on_commit(struct moe_group *g, uint64_t epoch);
void moe_group__on_abort(struct moe_group *g, const Moe__V1__Abort *a);
void moe_group__on_loaded(struct moe_group *g, const struct event *e);
void moe_group__on_read(struct moe_group *g, const struct event *e);
void moe_group__on_formed(struct moe_group *g, const struct event *e);
void moe_group__on_served(struct moe_group *g, const struct event *e);
void moe_group__on_lost(struct moe_group *g, const struct event *e);
/* Ends the view that forms or is in force, if any. */
void moe_group__end_view(struct moe_group *g, const char *why);
/* Call at session_end_ns. */
void moe_group__drop_session(struct moe_group *g);
/* Posts `leave`; the last one is followed by EVENT_LEFT. */
void moe_group__post_leave(struct moe_group *g, bool last);
/* moe_gather_send_fn; on the serial executor. */
struct moe_status moe_group__send_blob(void *ctx, uint64_t epoch, uint32_t round, const void *data,
                                       size_t length) MOE_CHECKED;

/* `out` has room for `count`, and points into `layers`. */
void moe_group__read_layers(Moe__V1__LayerPlacement *const *layers, size_t count,
                            struct moe_group_layer *out);

/* Added models (models.c). */
void moe_group__on_model_order(struct moe_group *g, const Moe__V1__ModelOrder *o);
void moe_group__on_send(struct moe_group *g, const struct event *e);

/* Leaving (shutdown.c). */
void moe_group__request_drain(struct moe_group *g, const char *reason);
void moe_group__begin_drain(struct moe_group *g, uint32_t limit_ms, const char *reason);
/* Drain will follow once others have loaded this worker's experts. */
void moe_group__await_move(struct moe_group *g);
/* Call at shutdown_ns. */
void moe_group__on_shutdown_timer(struct moe_group *g);
/* Leaves the view, then calls `ended`. */
void moe_group__begin_leave(struct moe_group *g, struct moe_status outcome);

#endif
