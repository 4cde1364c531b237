/* What the files of the engine share: its state, and the few functions that cross from one file
 * into another (moe_engine__*). Nobody else includes this. */
#ifndef MOE_WORKER_ENGINE_STATE_H
#define MOE_WORKER_ENGINE_STATE_H

#include "worker/batcher.h"
#include "worker/bell.h"
#include "worker/lane.h"
#include "worker/sequencer.h"
#include "worker/step_metrics.h"

#include <pthread.h>

enum {
    LANES = 2,        /* steps in flight */
    TICKETS_MAX = 64, /* tickets that wait; the sequencer keeps far fewer unfinished */
    CALLS_MAX = 64,   /* training calls that wait, but for pokes */
    POKES_MAX = 4,    /* the same of pokes: calls that are held wait for what a poke brings about,
                         so that they must not be in its way */
    SAVING_MAX = 32,  /* requests that wait for a step of their own */
    /* While one step runs, its end and what rings the bell are waited for in turns of this length:
     * news that comes by the bell alone is read so much later at most, and never later than the
     * end of that step. On a member this delays the start of a copy that overlaps the running
     * step; on the sequencer, whose peers' `done` comes so, the order of the next ticket, so that
     * copy on all slots. Turns of 50 us gained nothing that could be measured (results/serving.md).
     * With spin_ns the bell is watched all the time. */
    TURN_NS = 200000,
};
_Static_assert(CALLS_MAX + POKES_MAX + SAVING_MAX <= MOE_SEQUENCER_CALLS,
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
    pthread_mutex_t lock;
    struct moe_bell *bell; /* there may be something to do for the thread */
    pthread_cond_t idle;   /* the view has ended, or the last request has */

    /* Under the lock. */
    struct moe_batcher *batcher;
    struct work_list ended; /* left the queues and all steps; `done` is to be called */
    struct call_list calls; /* training calls whose ticket has not begun here */
    struct call_list held;  /* whose Save or Load is under way */
    struct call_list ended_calls;
    uint32_t call_count;         /* of `calls`, without pokes */
    uint32_t poke_count;         /* pokes of `calls` */
    uint32_t saving_count;       /* requests that got an order, or are to, without a ticket yet;
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

    /* The engine's thread only. */
    bool holding;       /* what `hold` was told last in this view */
    uint64_t next_drop; /* something may have been kept for long enough then */
    struct moe_lane lanes[LANES];
    unsigned lane_first, in_flight; /* oldest step, number of steps */
    uint32_t heard;                 /* count of the bell up to which everything was looked at */
    uint64_t awake_until;           /* until then the thread waits without sleeping */
};

/* Everything below: lock held, and kept unless it says otherwise. */

void moe_engine__append_call(struct call_list *list, struct moe_train_work *w);
/* Ends calls that wait and are not known to the sequencer of a view that is in force: those for
 * which `all` or a passed deadline says so. */
void moe_engine__give_up_calls(struct moe_engine *e, bool all, uint64_t now,
                               struct moe_status reason);
/* When the next of these deadlines passes. */
uint64_t moe_engine__next_call_expiry(const struct moe_engine *e);
/* Calls of the last view are to be announced again; those that nobody waits for are dropped. */
void moe_engine__forget_numbers(struct moe_engine *e);
/* Gives calls, and requests with a step of their own, that have none a number and announces them,
 * while a view is in force; gives the lock up meanwhile. */
void moe_engine__announce_orders(struct moe_engine *e);

/* The lane's ticket is one of training and may take its turn. */
bool moe_engine__may_begin(const struct moe_engine *e);
/* Takes the call of the lane's ticket, where it is one of ours. */
struct moe_status moe_engine__claim_call(struct moe_engine *e, struct moe_lane *lane);
/* Without the lock. */
void moe_engine__begin_training(struct moe_engine *e, struct moe_lane *lane,
                                struct moe_session *session);
/* All slots have refused the lane's pass: where it is one of training, its turn ends with that and
 * nothing has happened. */
bool moe_engine__refuse_training(struct moe_lane *lane, struct moe_status why);
/* The oldest lane's turn is over; gives the lock up meanwhile and reports `finished`. */
void moe_engine__complete_training(struct moe_engine *e, struct moe_lane *lane,
                                   const struct moe_step_result *result);
/* A ticket for what is under way in the training room, unless one that does as well is on its way;
 * `ctx` is the engine. Takes the lock. */
bool moe_engine__poke(void *ctx, const struct moe_train_call *call);
/* The view is over: what is under way in the training room is lost, who waits for it is told, and
 * pokes are forgotten. */
void moe_engine__drop_held(struct moe_engine *e);
/* Requests with a step of their own (engine_saving.c). */

/* The kind of the queue that a request is to wait in. */
enum moe_step_kind moe_engine__queue_of(const struct moe_engine *e, const struct moe_work *w);
/* Gives the first one that has none a number, and describes it; false when there is none. */
bool moe_engine__number_saving(struct moe_engine *e, struct moe_ticket *out, uint32_t *tokens);
/* A view begins: what waits is to be announced again; what no step of it can hold waits with the
 * others. */
void moe_engine__forget_orders(struct moe_engine *e);
/* Takes the request of the lane's ticket, where it is one of ours and has not been given up. */
struct moe_status moe_engine__claim_saving(struct moe_engine *e, struct moe_lane *lane);
/* Without the lock: the lane's step is over, and this slot keeps what it left, or does not. */
void moe_engine__note_saved(struct moe_engine *e, const struct moe_lane *lane,
                            const struct moe_step_result *result);
/* [engine's thread, or before it runs; the lock may be held or not] When moe_engine__drop_old is to
 * be called next. `view`: of a view, there may be activations; without, they are others' to touch.
 */
void moe_engine__plan_drop(struct moe_engine *e, bool view);
/* Drops what was kept for long enough; gives the lock up meanwhile. */
void moe_engine__drop_old(struct moe_engine *e, uint64_t now);

/* The lane's turn will not end. */
void moe_engine__abandon_training(struct moe_engine *e, struct moe_lane *lane);

/* From engine.c. */
/* The weights have another version: requests pinned to the old one end, those that have seen part
 * of it begin again. Gives the lock up meanwhile. No step runs. */
void moe_engine__change_version(struct moe_engine *e, uint64_t version, bool announce);

#endif
