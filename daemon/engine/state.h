/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the engine share: its state, and the few functions that cross from one file
 * into another (moe_engine__*). Nobody else includes this. */
#ifndef MOE_ENGINE_STATE_H
#define MOE_ENGINE_STATE_H

#include "base/mutex.h"
#include "engine/engine.h"
#include "engine/step_metrics.h"
#include "engine/step_slot.h"
#include "links/eventcount.h"
#include "schedule/batcher.h"
#include "schedule/sequencer.h"

#include <pthread.h>

enum {
    STEP_SLOTS = 2,   /* steps in flight */
    TICKETS_MAX = 64, /* tickets that wait; the sequencer keeps far fewer unfinished */
    CALLS_MAX = 64,   /* training calls that wait */
    PROGRESS_TICKETS_MAX =
        4,           /* progress tickets have a separate quota: blocked calls wait for them */
    RETAIN_MAX = 32, /* requests that wait for a step of their own */
    /* While one step runs, the thread waits for its end and for notifications in turns of this
     * length: a notification is noticed at most this much later, and never later than the end of
     * that step. On a member this delays the start of a copy that overlaps the running step; on the
     * sequencer, whose peers' `done` comes so, the order of the next ticket, so that copy on all
     * slots. Turns of 50 us gained nothing that could be measured (results/serving.md). With
     * spin_ns the thread polls all the time. */
    WAIT_SLICE_NS = 200000,
};
_Static_assert(CALLS_MAX + PROGRESS_TICKETS_MAX + RETAIN_MAX <= MOE_SEQUENCER_CALLS,
               "the sequencer takes all that wait");

/* Requests linked by `next`. */
struct work_list {
    struct moe_work *head, *tail;
};

/* Training calls linked by `next`. */
struct call_list {
    struct moe_train_work *head, *tail;
};

struct moe_engine {
    struct moe_engine_config config;
    pthread_t thread;
    struct moe_mutex lock;
    struct moe_eventcount *eventcount; /* there may be something to do for the thread */
    pthread_cond_t idle;               /* the view has ended, or the last request has */

    MOE_GUARDED_BY(lock) struct {
        struct moe_batcher *batcher;
        struct work_list ended;         /* left the queues and all steps; `done` is to be called */
        struct call_list calls;         /* training calls whose ticket has not begun here */
        struct call_list pending_saves; /* whose Save or Load is under way */
        struct call_list ended_calls;
        uint32_t call_count;         /* of `calls`, without progress tickets */
        uint32_t progress_count;     /* progress tickets of `calls` */
        uint32_t retain_count;       /* requests that got an order, or are to, without a ticket yet;
                                        cancelled ones included until their ticket comes */
        uint64_t last_number;        /* of a call that was announced */
        uint64_t weights_version;    /* of a step that begins now */
        uint64_t unfinished;         /* requests and calls accepted and not yet done */
        struct moe_session *session; /* NULL: no view is in force */
        uint64_t epoch;              /* of the view */
        uint64_t last_seq;           /* of the ticket begun last under this view; 0 = none */
        uint32_t bucket_max;         /* of the view */
        bool stopping;               /* stop_view waits for the thread to let go of the session */
        bool refusing, quit;
        struct moe_ticket tickets[TICKETS_MAX]; /* a ring */
        size_t ticket_first, ticket_count;
        struct moe_engine_counters counters;
    };

    /* The engine's thread only. */
    bool blocks_weight_updates; /* what `hold` was told last in this view */
    uint64_t next_expiry;       /* something may have been kept for long enough then */
    struct moe_step_slot step_slots[STEP_SLOTS];
    unsigned oldest, in_flight; /* oldest step, number of steps */
    uint32_t seen;              /* count of the eventcount when all state was last looked at */
    uint64_t spin_until;        /* until then the thread waits without sleeping */
};

/* The operations of a kind of step. Which row a ticket has: see row_of. The lock is held unless a
 * comment says otherwise. */
struct moe_step_row {
    /* Takes what of this slot goes into the lane's step. */
    struct moe_status (*claim)(struct moe_engine *e, struct moe_step_slot *step_slot);
    /* Without the lock. Enqueues the step (step_slot->step), or does at once what the ticket asks
     * for; a failure is step_slot->failure, and ends the view. */
    void (*begin)(struct moe_engine *e, struct moe_step_slot *step_slot,
                  struct moe_session *session);
    /* All slots have refused the step, and nothing has happened: the ticket ends with that. NULL:
     * its view ends. */
    void (*refuse)(struct moe_engine *e, struct moe_step_slot *step_slot, struct moe_status why);
    /* The oldest lane's step has ended well. Gives the lock up meanwhile, and reports `finished`.
     */
    void (*complete)(struct moe_engine *e, struct moe_step_slot *step_slot,
                     const struct moe_step_result *result);
    /* The view ends with the step undone. Youngest lane first. */
    void (*abandon)(struct moe_engine *e, struct moe_step_slot *step_slot);
};
extern const struct moe_step_row moe_engine__forward, moe_engine__retained, moe_engine__call;

/* ------------------------------------------------------------------- requests.c */

/* Lists `w` as ended when nothing of it waits or runs. */
void moe_engine__settle(struct moe_engine *e, struct moe_work *w) MOE_REQUIRES(e->lock);
/* Gives up a request that is not queued (any more); the first reason counts. */
void moe_engine__give_up(struct moe_engine *e, struct moe_work *w, struct moe_status reason)
    MOE_REQUIRES(e->lock);
/* The same of a list. */
void moe_engine__give_up_all(struct moe_engine *e, struct moe_work *evicted,
                             struct moe_status reason) MOE_REQUIRES(e->lock);
bool moe_engine__wants_other_version(const struct moe_work *w, uint64_t version);
struct moe_status moe_engine__other_version(uint64_t version);
/* The weights have another version: requests pinned to the old one end, those that have seen part
 * of it begin again. Gives the lock up meanwhile. No step runs. */
void moe_engine__change_version(struct moe_engine *e, uint64_t version, bool announce)
    MOE_REQUIRES(e->lock);

/* -------------------------------------------------------------------- forward.c */

/* Without the lock. `retain_as`: the name under which devices keep what the pass leaves; 0 = they
 * keep nothing. */
void moe_engine__begin_forward(struct moe_engine *e, struct moe_step_slot *step_slot,
                               struct moe_session *session, uint64_t retain_as);
/* Without the lock: reports `finished`, copies rows out. */
void moe_engine__hand_out(struct moe_engine *e, struct moe_step_slot *step_slot,
                          const struct moe_step_result *result);
void moe_engine__finish_segments(struct moe_engine *e, const struct moe_step_slot *step_slot,
                                 const struct moe_step_result *result) MOE_REQUIRES(e->lock);
void moe_engine__put_back(struct moe_engine *e, struct moe_step_slot *step_slot)
    MOE_REQUIRES(e->lock);

/* --------------------------------------------------------------------- retain.c */

/* The kind of the queue that a request is to wait in. */
enum moe_step_kind moe_engine__queue_of(const struct moe_engine *e, const struct moe_work *w)
    MOE_REQUIRES(e->lock);
/* Gives the first one that has none a number, and describes it; false when there is none. */
bool moe_engine__number_retain(struct moe_engine *e, struct moe_ticket *out, uint32_t *tokens)
    MOE_REQUIRES(e->lock);
/* A view begins: what waits is to be announced again; what no step of it can hold waits with the
 * others. */
void moe_engine__forget_retain_numbers(struct moe_engine *e) MOE_REQUIRES(e->lock);
/* [engine's thread, or before it runs; the lock may be held or not] When
 * moe_engine__expire_retained is to be called next. `view`: of a view, there may be activations;
 * without, they are others' to touch. */
void moe_engine__plan_expiry(struct moe_engine *e, bool view);
/* Drops what was kept for long enough; gives the lock up meanwhile. */
void moe_engine__expire_retained(struct moe_engine *e, uint64_t now) MOE_REQUIRES(e->lock);

/* ---------------------------------------------------------------------- calls.c */

void moe_engine__append_call(struct call_list *list, struct moe_train_work *w);
void moe_engine__end_call(struct moe_engine *e, struct moe_train_work *w, struct moe_status status);
/* Takes `w` out of those that wait for their ticket. */
void moe_engine__unlink_call(struct moe_engine *e, struct moe_train_work *w);
/* Ends calls that wait and are not known to the sequencer of a view that is in force: those for
 * which `all` or a passed deadline says so. */
void moe_engine__give_up_calls(struct moe_engine *e, bool all, uint64_t now,
                               struct moe_status reason) MOE_REQUIRES(e->lock);
/* When the next of these deadlines passes. */
uint64_t moe_engine__next_call_expiry(const struct moe_engine *e) MOE_REQUIRES(e->lock);
/* Calls of the last view are to be announced again; those that nobody waits for are dropped. */
void moe_engine__forget_numbers(struct moe_engine *e) MOE_REQUIRES(e->lock);
/* Gives calls, and requests with a step of their own, that have none a number and announces them,
 * while a view is in force; gives the lock up meanwhile. */
void moe_engine__announce_calls(struct moe_engine *e) MOE_REQUIRES(e->lock);
/* A ticket of this order, unless one that does as well is on its way; `ctx` is the engine. Takes
 * the lock. See moe_call_request_fn. */
bool moe_engine__request(void *ctx, enum moe_step_kind kind,
                         const struct moe_call_descriptor *descriptor);
/* `w` waits no longer, and was perhaps the last at this slot that did. The room behind the calls
 * hears of it with the lock: who asks later is later there, too. Gives the lock up at the end: `w`
 * may be gone then. */
void moe_engine__stop_waiting(struct moe_engine *e, const struct moe_train_work *w)
    MOE_REQUIRES(e->lock);
/* What waits for the end of a call that goes on has it. `x`: the execution that settled it; NULL:
 * its view ended. */
void moe_engine__end_pending_saves(struct moe_engine *e, struct moe_status status,
                                   const struct moe_call_exec *x) MOE_REQUIRES(e->lock);
/* The view is over: what is under way is lost, who waits for it is told, and pokes are forgotten.
 */
void moe_engine__drop_pending_saves(struct moe_engine *e) MOE_REQUIRES(e->lock);
struct moe_status moe_engine__call_cancelled(void);
struct moe_status moe_engine__reforming(void);

#endif
