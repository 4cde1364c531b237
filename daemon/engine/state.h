/* SPDX-License-Identifier: Apache-2.0 */
/* State that the files of the engine share, and the few functions that cross from one file into
 * another (moe_engine__*). Only files of this folder include it. */
#ifndef MOE_ENGINE_STATE_H
#define MOE_ENGINE_STATE_H

#include "base/mutex.h"
#include "daemon/progress.h"
#include "engine/engine.h"
#include "engine/row_metrics.h"
#include "engine/step_metrics.h"
#include "engine/step_slot.h"
#include "links/eventcount.h"
#include "schedule/batcher.h"
#include "schedule/sequencer.h"

#include <pthread.h>

enum {
    STEP_SLOTS = 2,   /* steps in flight */
    TICKETS_MAX = 64, /* tickets that wait; the sequencer has far fewer in flight */
    CALLS_MAX = 64,   /* training calls that wait */
    PROGRESS_TICKETS_MAX =
        4,            /* progress tickets have a separate quota: blocked calls wait for them */
    RETAIN_MAX = 32,  /* requests that wait for a separate step */
    BATCHES_MAX = 64, /* batches of which some parts are here; those of more do not wait */
    /* While one step runs, the thread waits for its end and for notifications alternately, in
     * slices of this length: it sees a notification at most this much later, and not later than the
     * end of that step. On a member this delays the copy that overlaps the running step. On the
     * sequencer it delays the next ticket, because peers report `done` by notifications, and so
     * that copy on all slots. Slices of 50 us gained nothing that could be measured
     * (results/serving.md). With spin_ns the thread polls all the time. */
    WAIT_SLICE_NS = 200000,
};
_Static_assert(CALLS_MAX + PROGRESS_TICKETS_MAX + RETAIN_MAX <= MOE_SEQUENCER_CALLS,
               "the sequencer has room for all waiting calls");

/* Requests linked by `next`. */
struct work_list {
    struct moe_work *head, *tail;
};

/* Training calls linked by `next`. */
struct call_list {
    struct moe_train_work *head, *tail;
};

/* A batch of which some parts are here. */
struct part_batch {
    uint64_t id; /* the client's */
    struct moe_step_key key;
    uint32_t missing; /* parts */
    uint64_t due_ns;  /* the others go on without the missing ones then */
};

/* The layers that tickets can name. A model leaves the list only while its phase is MODEL_WAITS:
 * then no step slot points to it. */
struct moe_engine_model {
    struct moe_engine_model *next;
    struct moe_engine_layers of;
    enum {
        MODEL_WAITS,  /* not in this view, or none is in force: its requests wait */
        MODEL_SERVED, /* from the begin of its ADD_MODEL ticket on */
        MODEL_LEAVES, /* until its REMOVE_MODEL ticket is complete */
    } phase;
};

struct moe_engine {
    struct moe_engine_config config;
    pthread_t thread;
    struct moe_mutex lock;
    struct moe_eventcount *eventcount; /* there may be something to do for the thread */
    pthread_cond_t idle;               /* the view has ended, or the last request has */

    MOE_GUARDED_BY(lock) struct {
        struct moe_batcher *batcher;
        struct moe_engine_model base;    /* the default model; MODEL_SERVED */
        struct moe_engine_model *models; /* `base`, then the added ones */
        struct work_list ended;          /* left the queues and all steps; `done` is to be called */
        struct call_list calls;          /* training calls without a ticket begun here */
        struct call_list pending_saves;  /* calls that wait for the end of a Save or Load */
        struct call_list ended_calls;
        uint32_t call_count;     /* of `calls`, without progress tickets */
        uint32_t progress_count; /* progress tickets of `calls` */
        uint32_t retain_count; /* requests for a separate step without a ticket yet; cancelled ones
                                  count until their ticket comes */
        uint64_t last_number;  /* of a call that was announced */
        uint64_t weights_version;    /* of a step that begins now */
        uint64_t unfinished;         /* requests and calls accepted and not yet done */
        struct moe_session *session; /* NULL: no view is in force */
        uint64_t epoch, live;        /* of the view; bit s: it has slot s */
        uint64_t last_seq;           /* of the ticket begun last under this view; 0 = none */
        uint32_t bucket_max;         /* of the view */
        bool stopping;               /* stop_view waits until the thread has released the session */
        /* Until then, requests of added models wait for the ticket that adds their model to the
         * view; then they are refused. MOE_NEVER: they are, or no view is in force. */
        uint64_t models_due_ns;
        struct part_batch batches[BATCHES_MAX]; /* in no order */
        size_t batch_count;
        uint64_t batches_due_ns; /* of the first; MOE_NEVER = there is none */
        bool refusing, quit;
        struct moe_status suspended; /* why new work is refused for a while; MOE_OK: it is not */
        struct moe_ticket tickets[TICKETS_MAX]; /* a ring */
        size_t ticket_first, ticket_count;
        struct moe_engine_counters counters;
    };

    /* The engine's thread only. */
    bool blocks_weight_updates; /* last argument of config.block_weight_updates in this view */
    uint64_t next_expiry;       /* retained memory may expire then */
    struct moe_step_slot step_slots[STEP_SLOTS];
    unsigned oldest, in_flight; /* oldest step, number of steps */
    uint32_t seen;              /* count of the eventcount when all state was last read */
    struct moe_loop *turns;     /* of the thread */
    struct moe_loop *device;    /* at work while steps are in flight */
    struct moe_loop *steps;     /* of the view: expected while it is in force */
    uint64_t beat_ns;           /* an idle view beats that often; 0 = never */
    uint64_t next_beat;
    uint64_t shown_epoch; /* of the view that `steps` has shown */
    uint64_t spin_until;  /* until then the thread polls instead of sleeping */
};

/* The operations of a kind of step; row_of chooses the row of a ticket. The lock is held unless a
 * comment says otherwise. */
struct moe_step_row {
    /* Takes this slot's tokens, or call, into the step slot. */
    struct moe_status (*claim)(struct moe_engine *e, struct moe_step_slot *step_slot);
    /* Without the lock. Enqueues the step (step_slot->step), or runs the ticket at once. A failure
     * goes to step_slot->failure and ends the view. */
    void (*begin)(struct moe_engine *e, struct moe_step_slot *step_slot,
                  struct moe_session *session);
    /* All slots have refused the step and nothing has changed: the ticket ends with `why`. NULL:
     * the view ends instead. */
    void (*refuse)(struct moe_engine *e, struct moe_step_slot *step_slot, struct moe_status why);
    /* The oldest step has succeeded. Releases the lock meanwhile, and reports `finished`. */
    void (*complete)(struct moe_engine *e, struct moe_step_slot *step_slot,
                     const struct moe_step_result *result);
    /* The view ends before the step; undoes `claim`. The youngest step comes first. */
    void (*abandon)(struct moe_engine *e, struct moe_step_slot *step_slot);
};
extern const struct moe_step_row moe_engine__forward, moe_engine__retained, moe_engine__heartbeat,
    moe_engine__call, moe_engine__model_change, moe_engine__swap;

/* --------------------------------------------------------------------- models.c */

/* NULL: no such model. */
struct moe_engine_model *moe_engine__find_model(const struct moe_engine *e, uint32_t model)
    MOE_REQUIRES(e->lock);
/* The place of a layer among those of a served model; false if there is none. */
bool moe_engine__find_layer(const struct moe_engine_model *m, uint32_t layer, size_t *index);
/* Widens `shape` to the layers. */
void moe_engine__widen(struct moe_step_slot_shape *shape, const struct moe_layer_spec *const *specs,
                       size_t count);
/* Its requests are announced, and its tickets may come. */
bool moe_engine__serves(const struct moe_engine *e, uint32_t layer) MOE_REQUIRES(e->lock);
/* A view begins with the default model alone. */
void moe_engine__begin_models(struct moe_engine *e) MOE_REQUIRES(e->lock);
/* Gives up the requests of models that were not added to the view in time. */
void moe_engine__expire_models(struct moe_engine *e, uint64_t now_ns) MOE_REQUIRES(e->lock);
/* Refuses requests of such a model. Errors: MOE_UNAVAILABLE/MODEL_LOADING. */
struct moe_status moe_engine__check_model(const struct moe_engine *e, uint32_t layer) MOE_CHECKED
    MOE_REQUIRES(e->lock);
/* The view is over, no step runs: added models wait. */
void moe_engine__end_models(struct moe_engine *e) MOE_REQUIRES(e->lock);
/* Announces what waits for the layers of one model. Without the lock. */
void moe_engine__announce_model(struct moe_engine *e, uint32_t model);
/* Fills `rehomed` of a request in the step: the layers' placement is the one that the step uses. */
void moe_engine__list_rehomed(const struct moe_engine *e, const struct moe_step_slot *step_slot,
                              struct moe_work *w) MOE_REQUIRES(e->lock);

/* ------------------------------------------------------------------- progress.c */

/* Engine's thread, all of them, with or without the lock. Without config.progress they do nothing.
 */

/* Before the thread starts. */
void moe_engine__add_loops(struct moe_engine *e);
/* The thread calls the device, or the room of training for a ticket of `kind`; 0 = neither. */
void moe_engine__show_call(struct moe_engine *e, enum moe_step_kind kind);
void moe_engine__show_return(struct moe_engine *e);
/* The number of steps in flight, or the view, has changed. `ended`: kind of a step that has just
 * ended; 0 = none has. */
void moe_engine__show_steps(struct moe_engine *e, bool view, enum moe_step_kind ended);
/* When the idle thread is to wake at the latest, to show that it turns and to beat. */
uint64_t moe_engine__next_beat(const struct moe_engine *e, bool view);
/* In an idle view of `epoch`: expects steps of it, and beats if it is time. Without the lock. */
void moe_engine__beat(struct moe_engine *e, uint64_t epoch);

/* ------------------------------------------------------------------- requests.c */

/* This worker takes no work: the refusal. */
struct moe_status moe_engine__draining(void) MOE_CHECKED;
/* Lists `w` as ended when none of its tokens wait or run. */
void moe_engine__settle(struct moe_engine *e, struct moe_work *w) MOE_REQUIRES(e->lock);
/* Ends a request that is not queued, with the first `reason` that it gets. */
void moe_engine__give_up(struct moe_engine *e, struct moe_work *w, struct moe_status reason)
    MOE_REQUIRES(e->lock);
/* The same for a list. */
void moe_engine__give_up_all(struct moe_engine *e, struct moe_work *evicted,
                             struct moe_status reason) MOE_REQUIRES(e->lock);
/* The request begins again. */
void moe_engine__forget_steps(struct moe_work *w);
bool moe_engine__wants_other_version(const struct moe_work *w, uint64_t version);
struct moe_status moe_engine__other_version(uint64_t version);
/* The weights' version has changed: requests pinned to another version end, requests with finished
 * steps restart. Releases the lock meanwhile. No step runs. */
void moe_engine__change_version(struct moe_engine *e, uint64_t version, bool announce)
    MOE_REQUIRES(e->lock);

/* ---------------------------------------------------------------------- parts.c */

/* Queues a request that was accepted, or sets it aside while parts of its batch are missing. With
 * the last part, all of them are queued. Returns the tokens to announce: 0 of one that is set
 * aside, or retained. `served`: a view serves its layer; else nothing waits for parts. */
uint32_t moe_engine__queue(struct moe_engine *e, const struct moe_step_key *key, struct moe_work *w,
                           bool served) MOE_REQUIRES(e->lock);
/* Queues and announces the parts that have waited long enough. Releases the lock meanwhile. */
void moe_engine__queue_late_parts(struct moe_engine *e, uint64_t now_ns) MOE_REQUIRES(e->lock);
/* Queues all parts: a view begins, which announces all that is queued. */
void moe_engine__queue_all_parts(struct moe_engine *e) MOE_REQUIRES(e->lock);

/* -------------------------------------------------------------------- forward.c */

/* Without the lock. `retain_as`: the name under which devices retain the pass's activations; 0 =
 * they retain none. */
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

/* Chooses the kind of queue for a request. */
enum moe_step_kind moe_engine__queue_of(const struct moe_engine *e, const struct moe_work *w)
    MOE_REQUIRES(e->lock);
/* Numbers the first retained Forward without a number, and describes it; false when there is none.
 */
bool moe_engine__number_retain(struct moe_engine *e, struct moe_ticket *out, uint32_t *tokens)
    MOE_REQUIRES(e->lock);
/* A view begins: waiting requests will be announced again; those larger than its bucket join the
 * queues of shared steps. */
void moe_engine__forget_retain_numbers(struct moe_engine *e) MOE_REQUIRES(e->lock);
/* [engine's thread, or before it runs; the lock may be held] Computes when
 * moe_engine__expire_retained is to be called next. `view`: one is in force; without it,
 * activations on the device must not be touched. */
void moe_engine__plan_expiry(struct moe_engine *e, bool view);
/* Drops expired memory; releases the lock meanwhile. */
void moe_engine__expire_retained(struct moe_engine *e, uint64_t now) MOE_REQUIRES(e->lock);

/* ---------------------------------------------------------------------- calls.c */

void moe_engine__append_call(struct call_list *list, struct moe_train_work *w);
void moe_engine__end_call(struct moe_engine *e, struct moe_train_work *w, struct moe_status status);
/* Takes `w` out of `calls`. */
void moe_engine__unlink_call(struct moe_engine *e, struct moe_train_work *w);
/* Ends waiting calls that the sequencer of the present view does not know: with `all` every one,
 * else those with a deadline at or before `now`. */
void moe_engine__give_up_calls(struct moe_engine *e, bool all, uint64_t now,
                               struct moe_status reason) MOE_REQUIRES(e->lock);
/* The earliest of these deadlines. */
uint64_t moe_engine__next_call_expiry(const struct moe_engine *e) MOE_REQUIRES(e->lock);
/* Calls of the last view will be announced again; cancelled ones end. */
void moe_engine__forget_numbers(struct moe_engine *e) MOE_REQUIRES(e->lock);
/* Numbers and announces calls and retained Forwards that have no number, while a view is in force;
 * releases the lock meanwhile. */
void moe_engine__announce_calls(struct moe_engine *e) MOE_REQUIRES(e->lock);
/* Requests a progress ticket with this descriptor, unless an equal one waits already; `ctx` is the
 * engine. Takes the lock. See moe_call_request_fn. */
bool moe_engine__request(void *ctx, enum moe_step_kind kind,
                         const struct moe_call_descriptor *descriptor);
/* `w` has stopped waiting. If it was the last at this slot, this calls is_unwanted with the lock
 * held, so that a later call for the same job comes later there, too. Releases the lock at the end:
 * `w` may be gone then. */
void moe_engine__stop_waiting(struct moe_engine *e, const struct moe_train_work *w)
    MOE_REQUIRES(e->lock);
/* Ends all calls of pending_saves. `x`: the execution that settled them; NULL: the view ended. */
void moe_engine__end_pending_saves(struct moe_engine *e, struct moe_status status,
                                   const struct moe_call_exec *x) MOE_REQUIRES(e->lock);
/* The view is over: unfinished jobs are lost, calls that wait for them end, and progress tickets
 * are dropped. */
void moe_engine__drop_pending_saves(struct moe_engine *e) MOE_REQUIRES(e->lock);
struct moe_status moe_engine__call_cancelled(void);
struct moe_status moe_engine__reforming(void);

#endif
