/* What the files of the session share: its state, its events, and the few functions that cross from
 * one file into another (moe_group__*). Nobody else includes this.
 *
 * One thread owns the state and never blocks; everything that happens reaches it as an event in a
 * queue: messages of the coordinator, ends of jobs, evidence of peers, the wish to leave. What
 * blocks (loading, joining) is done by the jobs thread. The one idea worth knowing: `forming` and
 * `epoch` are the only truth about views, and whatever ends a view zeroes them first and then posts
 * `leave` behind the jobs that may still be working on it. */
#ifndef MOE_WORKER_GROUP_STATE_H
#define MOE_WORKER_GROUP_STATE_H

#include "moe/v1/coordinator.pb-c.h"
#include "worker/gather.h"
#include "worker/group.h"
#include "worker/jobs.h"

#include <pthread.h>

enum event_kind {
    EVENT_MESSAGE, /* bytes */
    EVENT_CLOSED,  /* status */
    EVENT_LOADED,  /* number: placement version; status */
    EVENT_FORMED,  /* number: epoch; status */
    EVENT_SERVED,  /* number: epoch; status */
    EVENT_LEFT,    /* the last job is done */
    EVENT_LOST,    /* number: epoch; slots; status */
    EVENT_DRAIN,   /* status.text: reason */
    EVENT_TRY_AGAIN,
};

struct event {
    struct event *next;
    enum event_kind kind;
    uint64_t number, slots;
    struct moe_status status;
    uint32_t generation; /* of the stream that a message or end belongs to */
    size_t length;
    uint8_t bytes[];
};

enum parting {
    STAYING,
    ASKED,    /* DrainNotice sent; drains at the answer, or at parting_ns */
    DRAINING, /* polls `drained`; gives up at drain_limit_ns */
    DRAINED,  /* Leaving sent; goes on taking part until the coordinator ends the stream */
    GOING,    /* the last `leave` is under way */
    GONE,
};

struct moe_group {
    struct moe_group_config config;
    pthread_t thread;
    struct moe_jobs *jobs;
    struct moe_gather *gather;
    struct moe_rpc_channel *channel;

    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct event *first, **end;
    size_t event_count;
    bool quit;
    struct moe_rpc_stream *stream; /* also read by the jobs thread, to send blobs */
    uint32_t generation;           /* of the stream */

    /* Everything below: group's thread only. */
    bool registered; /* on the present stream */
    bool seated;     /* ever */
    uint32_t slot, slots, lease_ms;
    uint64_t floor;   /* no epoch below this is accepted; only rises */
    uint64_t forming; /* epoch that a job is joining, or that awaits COMMIT; 0 = none */
    bool committed;   /* COMMIT of `forming` has come, `serve` is under way */
    uint64_t epoch;   /* in force here; 0 = none */
    uint64_t heartbeat_ns, reconnect_ns, give_up_ns; /* when due; MOE_NEVER = not */
    uint32_t backoff_ms;
    /* TryAgains that the coordinator has not answered yet. Those of a stream that has ended, and
     * those wished for without one, are one TryAgain of the next. */
    uint32_t unanswered;
    uint64_t away_since_ns, away_said_ns; /* coordinator is not there; 0 = it is. Log knows so */
    enum parting parting;
    uint64_t parting_ns, drain_limit_ns;
    struct moe_status outcome;
};

/* [any thread] Losing one for lack of memory is logged. */
void moe_group__post(struct moe_group *g, enum event_kind kind, uint64_t number, uint64_t slots,
                     struct moe_status status);
void moe_group__send_heartbeat(struct moe_group *g);

/* Views (group_view.c). The two messages are taken over. */
void moe_group__on_assign(struct moe_group *g, Moe__V1__SessionResponse *response);
void moe_group__on_prepare(struct moe_group *g, Moe__V1__SessionResponse *response);
void moe_group__on_blobs(struct moe_group *g, const Moe__V1__Blobs *b);
void moe_group__on_commit(struct moe_group *g, uint64_t epoch);
void moe_group__on_abort(struct moe_group *g, const Moe__V1__Abort *a);
void moe_group__on_loaded(struct moe_group *g, const struct event *e);
void moe_group__on_formed(struct moe_group *g, const struct event *e);
void moe_group__on_served(struct moe_group *g, const struct event *e);
void moe_group__on_lost(struct moe_group *g, const struct event *e);
/* The view that forms or is in force, if any, is over here. */
void moe_group__end_view(struct moe_group *g, const char *why);
/* Posts `leave`; the last one is followed by EVENT_LEFT. */
void moe_group__post_leave(struct moe_group *g, bool last);
/* moe_gather_send_fn; jobs thread. */
struct moe_status moe_group__send_blob(void *ctx, uint64_t epoch, uint32_t round, const void *data,
                                       size_t length) MOE_CHECKED;

/* Leaving (group_parting.c). */
void moe_group__on_drain_wish(struct moe_group *g, const char *reason);
void moe_group__begin_drain(struct moe_group *g, uint32_t limit_ms, const char *reason);
/* At parting_ns. */
void moe_group__on_parting_timer(struct moe_group *g);
/* Leaves whatever is formed, then `ended`. */
void moe_group__go(struct moe_group *g, struct moe_status outcome);

#endif
