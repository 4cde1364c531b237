/* SPDX-License-Identifier: Apache-2.0 */
/* Requests and training calls that wait for a step: inputs and outputs of the submitter, and the
 * fields by which queues link and count them. */
#ifndef MOE_SCHEDULE_WORK_H
#define MOE_SCHEDULE_WORK_H

#include "moe/backend.h"
#include "schedule/ticket.h"

struct moe_queue;
struct moe_train_answer;

enum { MOE_WORK_TIMES_MAX = 8 };

/* When one step carried a request; monotonic ns. Between `ended_ns` and the next `taken_ns` the
 * request waits. */
struct moe_step_times {
    uint64_t taken_ns;                  /* the step took the request's tokens */
    uint64_t enqueued_ns;               /* rows are gathered, the backend has the step */
    uint64_t began_ns;                  /* as in moe_step_result; 0 = not known */
    uint64_t ended_ns;                  /* the engine saw its end */
    uint64_t total_ns;                  /* as in moe_step_result */
    uint64_t stage_ns[MOE_STAGE_COUNT]; /* the same */
};

/* The first steps of a request, and its last one. A step that ran in vain, because a view or a
 * version ended, is not among them. */
struct moe_work_times {
    uint32_t count; /* of `step`; `steps` of the request may be more */
    struct moe_step_times step[MOE_WORK_TIMES_MAX];
};

/* One forward request. All memory belongs to the submitter and must stay until `done`, which is
 * called exactly once for each accepted request, on the engine's thread (it must not block). */
struct moe_work {
    /* in */
    uint32_t layer; /* moe_layer_key */
    enum moe_dtype dtype;
    uint32_t tokens; /* T >= 1; split over steps where it exceeds the bucket */
    enum moe_routing_mode mode;
    bool without_shared; /* y without the shared expert; not with retain_session */
    enum moe_on_unavailable on_unavailable; /* without a view, a request waits in any case */
    const void *x;           /* [T,H] memory that steps take (backend's MOE_MEM_HOST) */
    const int32_t *ids_in;   /* [T,K] or NULL */
    const float *weights_in; /* [T,K] or NULL */
    /* Inputs and outputs may be memory that a client can write at any time, or memory for segments
     * alone (moe_step_segment): each step works on copies of its rows, which the backend makes. */
    bool by_copy;
    uint64_t deadline_ns;     /* not started after this: MOE_DEADLINE_EXCEEDED */
    uint64_t epoch;           /* serve under this epoch only; 0 = any */
    uint64_t weights_version; /* serve with this version only; 0 = any */
    /* At least 2: the request is one of so many parts of a batch with this id, which are to share a
     * step. The others wait for it for a short time, and it for them; else they are requests like
     * all others. Not with retain_session. */
    uint32_t batch_parts;
    uint64_t batch;
    /* Not NULL: the devices retain this pass's activations for the Backward of (retain_session,
     * retain_id), as far as they have room. For that the pass gets a separate step if it fits one
     * and not too many such requests wait. Needs training, and a layer of the default model. */
    const char *retain_session;
    uint64_t retain_id;
    struct moe_work_times *times; /* gets the times of its steps; NULL: not wanted */
    /* What a device stores when the request has succeeded; `word` NULL: nothing. The value of its
     * receipt is new. Once that is stored, the request runs no more, and `done` gets MOE_OK. */
    struct moe_step_completion completion;
    /* out */
    uint64_t retained_name; /* name under which devices may have retained it, in the session of
                               answered_epoch; 0 = none has */
    bool retained_here;     /* this slot's device has retained it */
    void *y;                /* [T,H] memory that steps take; so are those below */
    int32_t *ids_out;       /* [T,K] or NULL */
    float *weights_out;     /* [T,K] or NULL */
    uint8_t
        *token_state; /* [T] enum moe_token_state, also of a request that fails for one; or NULL */
    uint64_t answered_epoch;
    uint32_t *rehomed;      /* [E] gets the layer's re-homed experts (expert.proto), ascending, in
                               the view and with the placement of the last step; or NULL */
    uint32_t rehomed_count; /* so many of them */
    uint64_t answered_version; /* of the weights, the same for all tokens: a request restarts as a
                                  whole if the version changes between its steps */
    struct moe_step_result
        step; /* of the last step that carried it; stage times summed over steps */
    uint64_t submitted_ns, started_ns, copy_in_ns, copy_out_ns;
    uint32_t step_tokens, steps;
    /* A token that is not MOE_TOKEN_OK fails the whole request: NONFINITE_LOGITS,
     * EXPERT_INDEX_RANGE or ROUTING_INVALID. For MOE_TOKEN_UNAVAILABLE see on_unavailable. */
    void (*done)(struct moe_work *w, struct moe_status status);
    void *user;
    /* owned by the engine between submit and done */
    struct moe_work *next, *prev;
    struct moe_queue *queue;  /* the batcher's queue, present or last */
    struct moe_queue *home;   /* the queue to go back to; NULL: it is neither held nor `gathers` */
    bool gathers;             /* waits for the other parts of its batch */
    bool queued;              /* some of its tokens wait in that queue */
    uint32_t taken, finished; /* tokens handed to steps, tokens of ended steps */
    bool own_step;            /* waits, or has waited, for a separate step */
    uint64_t number;          /* see moe_call_descriptor; 0 = not announced */
    bool cancelled;
    bool
        lacks_experts; /* a token was MOE_TOKEN_UNAVAILABLE: it is held once its steps have ended */
    struct moe_status failure;
};

/* True if a device has completed the request. */
static inline bool moe_work_is_completed(const struct moe_work *w)
{
    const struct moe_step_completion *c = &w->completion;
    return c->word != NULL && __atomic_load_n(c->receipt, __ATOMIC_ACQUIRE) == c->value;
}

/* One training call. Memory and `done` as in moe_work. Once a call has been announced it is run
 * even if its client has left, because every slot keeps a record of it. Until its ticket has begun
 * on any slot, it outlives the end of a view. A Save or Load goes on after its ticket and is
 * cancelled when its last client leaves. */
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
    uint64_t ended_ns; /* the engine saw the end of its ticket; 0: it had none, or its view ended */
    void (*done)(struct moe_train_work *w, struct moe_status status);
    void *user;
    /* owned by the engine between submit and done */
    struct moe_train_work *next;
    uint64_t number;  /* see moe_call_descriptor */
    uint64_t id;      /* of its job; see moe_call_ops.id_of */
    bool is_progress; /* the engine's request for a progress ticket; no client waits for it */
    bool joined;      /* an earlier call had begun the job that it waits for */
    bool cancelled;
    struct moe_status failure;
};

#endif
