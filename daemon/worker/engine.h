/* The engine: runs tickets. Requests are submitted to it from any thread and wait in the batcher;
 * a ticket from the sequencer takes what fits into its bucket, and the engine's thread runs the
 * step on the backend, at most two at once: rows of step n+1 are copied in and rows of step n-1 are
 * copied out while step n runs.
 *
 * The engine knows nothing of gRPC, of the coordinator, or of how tickets travel. */
#ifndef MOE_WORKER_ENGINE_H
#define MOE_WORKER_ENGINE_H

#include "moe/backend.h"

struct moe_bell;
struct moe_engine;
struct moe_step_metrics;
struct moe_train;
struct moe_train_answer;

enum moe_step_kind { /* values of moe.v1.StepKind */
                     MOE_STEP_FORWARD = 1,
                     MOE_STEP_BACKWARD = 2,
                     /* What changes the state of training as a whole: such a ticket runs alone. */
                     MOE_STEP_OPTIMIZER = 3,
                     MOE_STEP_ZERO_GRAD = 4,
                     MOE_STEP_SET_FROZEN = 5,
                     MOE_STEP_SAVE = 6,
                     MOE_STEP_LOAD = 7,
                     MOE_STEP_EXPORT = 8,
                     /* One Forward request alone, kept on the devices for its Backward. */
                     MOE_STEP_SAVING_FORWARD = 9,
                     MOE_STEP_KINDS /* past the last */
};

/* The training room decides what becomes of it. */
static inline bool moe_step_is_training(enum moe_step_kind kind)
{
    return kind >= MOE_STEP_BACKWARD && kind <= MOE_STEP_EXPORT;
}

static inline bool moe_step_is_exclusive(enum moe_step_kind kind)
{
    return kind > MOE_STEP_BACKWARD && kind <= MOE_STEP_EXPORT;
}

/* Changes what a Save copies: waits while one does. */
static inline bool moe_step_is_held(enum moe_step_kind kind)
{
    return kind == MOE_STEP_OPTIMIZER;
}

/* Neither changes the state of training by what it does, nor adds to what a held call is to use:
 * may come before one that waits. A Load is refused while a Save runs. */
static inline bool moe_step_passes_held(enum moe_step_kind kind)
{
    return kind == MOE_STEP_SAVE || kind == MOE_STEP_LOAD || kind == MOE_STEP_SAVING_FORWARD;
}

static inline bool moe_step_is_forward(enum moe_step_kind kind)
{
    return kind == MOE_STEP_FORWARD || kind == MOE_STEP_SAVING_FORWARD;
}

/* One call, one ticket, and `order` says whose; the others share a ticket by (layer, dtype). */
static inline bool moe_step_has_order(enum moe_step_kind kind)
{
    return kind > MOE_STEP_FORWARD && kind < MOE_STEP_KINDS;
}

/* Has an order, and rows of the slot that was asked, which all fit its bucket. */
static inline bool moe_step_has_rows(enum moe_step_kind kind)
{
    return kind == MOE_STEP_BACKWARD || kind == MOE_STEP_SAVING_FORWARD;
}

enum { MOE_TRAINING_BODY_MAX = 512 };

/* A training call, or a Forward with a step of its own, as it travels with a notice and a ticket:
 * one call, one ticket. The body is the training room's (worker/training.h); who carries it does
 * not look inside. */
struct moe_training_order {
    uint32_t origin; /* slot that was asked; it has the tensors and answers */
    uint64_t number; /* of the call, among those of its origin; 1, 2, 3 ... */
    uint32_t length; /* of the body */
    uint8_t body[MOE_TRAINING_BODY_MAX];
};

struct moe_ticket {
    uint64_t epoch, seq;
    uint32_t layer; /* the model's layer index; 0 for exclusive kinds, as are dtype and bucket */
    enum moe_step_kind kind;
    enum moe_dtype dtype;
    uint32_t bucket;
    struct moe_training_order order; /* of kinds that have one */
};

/* One forward request. All memory belongs to the submitter and must stay until `done`, which is
 * called exactly once for each accepted request, on the engine's thread (it must not block). */
struct moe_work {
    /* in */
    uint32_t layer; /* the model's layer index */
    enum moe_dtype dtype;
    uint32_t tokens; /* T >= 1; split over steps where it exceeds the bucket */
    enum moe_routing_mode mode;
    const void *x;            /* [T,H] host memory (backend's MOE_MEM_HOST) */
    const int32_t *ids_in;    /* [T,K] or NULL */
    const float *weights_in;  /* [T,K] or NULL */
    uint64_t deadline_ns;     /* not started after this: MOE_DEADLINE_EXCEEDED */
    uint64_t epoch;           /* serve under this epoch only; 0 = any */
    uint64_t weights_version; /* serve with this version only; 0 = any */
    /* Not NULL: what a Backward of (save_session, save_id) can use of this pass is to stay on the
     * devices, as far as they have room; the pass gets a step of its own for that, where it fits
     * one and not too many wait for such a step already. Needs training. */
    const char *save_session;
    uint64_t save_id;
    /* out */
    uint64_t saved_name; /* under which devices may have kept it, in the session of answered_epoch;
                            0 = none has */
    bool saved_here;     /* this slot's device has */
    void *y;             /* [T,H] host memory */
    int32_t *ids_out;    /* [T,K] or NULL */
    float *weights_out;  /* [T,K] or NULL */
    uint64_t answered_epoch;
    uint64_t answered_version; /* of the weights, for all tokens: a request whose steps would have
                                  seen two versions is run again as a whole */
    struct moe_step_result
        step; /* of the last step that carried it; stage times summed over steps */
    uint64_t submitted_ns, started_ns, copy_in_ns, copy_out_ns;
    uint32_t step_tokens, steps;
    /* A token that is not MOE_TOKEN_OK fails the whole request: NONFINITE_LOGITS,
     * EXPERT_INDEX_RANGE or ROUTING_INVALID. */
    void (*done)(struct moe_work *w, struct moe_status status);
    void *user;
    /* owned by the engine between submit and done */
    struct moe_work *next, *prev;
    uint32_t queue;           /* the batcher's queue that it is in, or was in last */
    bool queued;              /* some of its tokens wait in that queue */
    uint32_t taken, finished; /* tokens handed to steps, tokens whose step ended */
    bool own_step;            /* waits, or has waited, for a step of its own */
    uint64_t number;          /* of its order (see moe_training_order); 0 = not announced */
    bool cancelled;
    struct moe_status failure;
};

/* One training call. Memory and `done` as in moe_work. Once a call has been announced it is run,
 * even if nobody waits for its answer any more, because every slot keeps a record of it; until its
 * ticket has begun anywhere it outlives the end of a view. A Save or Load goes on after its ticket,
 * and is called off when nobody waits for it any more. */
struct moe_train_work {
    /* in */
    enum moe_step_kind kind;
    uint32_t layer;             /* BACKWARD: the model's layer index */
    enum moe_dtype dtype;       /* BACKWARD */
    uint32_t tokens;            /* BACKWARD: T, 1 .. max_tokens_per_step of the view */
    enum moe_routing_mode mode; /* MOE_ROUTE_IDS or MOE_ROUTE_IDS_WEIGHTS */
    const void *x, *dy;         /* [T,H] host memory (backend's MOE_MEM_HOST) */
    const int32_t *ids;         /* [T,K] */
    const float *weights;       /* [T,K] or NULL */
    uint32_t body_length;
    uint8_t body[MOE_TRAINING_BODY_MAX];
    uint64_t deadline_ns; /* not announced (again) after this: MOE_DEADLINE_EXCEEDED */
    /* out */
    void *dx;        /* [T,H] host memory */
    float *dweights; /* [T,K] or NULL */
    double aux_loss;
    struct moe_train_answer *answer; /* written before `done`, where the training room has one */
    struct moe_step_result step;
    uint64_t submitted_ns, started_ns;
    void (*done)(struct moe_train_work *w, struct moe_status status);
    void *user;
    /* owned by the engine between submit and done */
    struct moe_train_work *next;
    uint64_t number; /* see moe_training_order */
    bool poke;       /* the engine's own: asks for a ticket on which nobody waits */
    bool joined;     /* what it waits for was begun by an earlier call */
    bool cancelled;
    struct moe_status failure;
};

struct moe_engine_config {
    const struct moe_backend *backend;
    struct moe_device *device;
    struct moe_layer *const *layers;           /* runnable layers; borrowed, outlive the engine */
    const struct moe_layer_spec *const *specs; /* of the same; ascending by layer */
    size_t layer_count;
    uint32_t max_tokens_per_step; /* largest bucket, power of two */
    uint64_t max_queued_tokens;   /* more are refused with QUEUE_FULL */
    struct moe_train *training;   /* worker/training.h; borrowed. NULL: no training */
    struct moe_step_metrics
        *metrics; /* told of every step that ended well; borrowed, may be NULL */
    /* Work was queued while a view is in force, or waited when it began: the sequencer should hear
     * of it. Any thread, no lock held: moe_engine_run may be called from within, and nothing else
     * of the engine. May tell of tokens that are gone when their ticket comes (cancelled, or taken
     * by an earlier one), never leaves any out. */
    void (*announce)(void *ctx, uint32_t layer, enum moe_step_kind kind, enum moe_dtype dtype,
                     uint32_t tokens);
    /* The same for one training call or saving Forward, each told once in a view: epoch, kind,
     * layer, dtype and order of `call` are filled in, the order's origin is not. To be ignored in
     * another epoch. `tokens`: its rows, 0 where it has none. May be NULL without training. */
    void (*announce_training)(void *ctx, const struct moe_ticket *call, uint32_t tokens);
    /* A ticket has been run, in order of seq. Engine's thread, no lock held; must not stop or start
     * a view, and may come while moe_engine_stop_view waits. On failure the engine has stopped the
     * view: tickets are ignored until the next moe_engine_start_view. Tickets that stop_view cut
     * short, or that were never begun, are not reported. */
    void (*finished)(void *ctx, const struct moe_ticket *ticket, struct moe_status status,
                     uint64_t lost_slots);
    /* From now on (not any more) no ticket may be ordered whose kind moe_step_is_held: told on all
     * slots, at the same ticket, before `finished` of it; the end of a view ends it unsaid.
     * Engine's thread, no lock held; nothing of the engine may be called from within. NULL: no
     * training. */
    void (*hold)(void *ctx, bool hold);
    /* The engine's bell was rung, by the engine itself or by a process that brought something.
     * Engine's thread, no lock held; moe_engine_run may be called from within, and nothing else of
     * the engine. NULL: nobody else rings. */
    void (*listen)(void *ctx);
    /* After a step the thread waits this long without sleeping, so that the next ticket loses no
     * time in waking it (10 to 60 us); it keeps a processor busy meanwhile. 0: it always sleeps. */
    uint64_t spin_ns;
    void *ctx;
};

struct moe_status moe_engine_create(const struct moe_engine_config *config,
                                    struct moe_engine **out) MOE_CHECKED;
/* Stops the view, fails what is queued with UNAVAILABLE/DRAINING, joins the thread. NULL is
 * ignored.
 */
void moe_engine_destroy(struct moe_engine *e);

/* The bell that wakes the engine's thread; lives as long as the engine. */
struct moe_bell *moe_engine_bell(const struct moe_engine *e);

/* A view is in force: tickets of `epoch` may come, seq without gaps. `session` is borrowed until
 * stop_view returns. Everything that is queued is announced (again), but requests that are pinned
 * to another epoch fail with STALE_EPOCH. A view that still is in force is stopped first. */
void moe_engine_start_view(struct moe_engine *e, struct moe_session *session, uint64_t epoch,
                           uint32_t max_tokens_per_step);
/* The view is over: aborts the session's waits, waits until no step runs. Requests that were in a
 * step go back to the head of the queue and run again under the next view. Idempotent. */
void moe_engine_stop_view(struct moe_engine *e);

/* Any thread. Errors: MOE_RESOURCE_EXHAUSTED/QUEUE_FULL, MOE_NOT_FOUND/LAYER_NOT_FOUND,
 * MOE_FAILED_PRECONDITION/STALE_EPOCH, MOE_UNAVAILABLE/DRAINING; the work is not accepted then and
 * `done` is not called. On success `done` may have been called already. */
struct moe_status moe_engine_submit(struct moe_engine *e, struct moe_work *w) MOE_CHECKED;
/* Any thread, also after `done`: what is still queued of a request is dropped and it ends with
 * MOE_CANCELLED; one that is in a step as a whole runs to its end. `w` must be alive. */
void moe_engine_cancel(struct moe_engine *e, struct moe_work *w);

/* Any thread. As submit; MOE_UNIMPLEMENTED/UNSUPPORTED without training, MOE_INVALID_ARGUMENT/
 * TOKEN_LIMIT for more tokens than a step may have. */
struct moe_status moe_engine_submit_training(struct moe_engine *e,
                                             struct moe_train_work *w) MOE_CHECKED;
/* Any thread, also after `done`: nobody waits for the answer any more. A call that has not been
 * announced under the present view ends with MOE_CANCELLED, and so does a Save or Load that has
 * begun; any other one is run. */
void moe_engine_cancel_training(struct moe_engine *e, struct moe_train_work *w);

/* Any thread. Version of the weights that a step begun now would use; 1 without training. */
uint64_t moe_engine_weights_version(struct moe_engine *e);

/* Any thread. Tickets come in order of seq; those of another epoch are ignored. */
void moe_engine_run(struct moe_engine *e, const struct moe_ticket *ticket);

/* Refuses new work from now on; true once nothing is queued or running, false at `deadline_ns`. */
bool moe_engine_drain(struct moe_engine *e, uint64_t deadline_ns);
/* Fails everything that waits with `reason` (a group that will not come back). */
void moe_engine_fail_queued(struct moe_engine *e, struct moe_status reason);

struct moe_engine_counters {
    uint64_t tokens, steps, requests, failed_requests; /* since start */
    uint64_t queued_tokens;                            /* now */
};
void moe_engine_read_counters(struct moe_engine *e, struct moe_engine_counters *out);

#endif
