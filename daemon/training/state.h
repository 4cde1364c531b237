/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of training share; private to this room. Files call only files below them:
 *
 *   lifetime.c   agreement.c   execution.c     create, destroy; how a view forms; tickets
 *                                judge.c       is a call new, a repeat, or refused
 *                job.c                         Save, Load and Export, and their threads
 *                parts.c                       their parts, on this slot
 *                gradients.c                   those that are pending, or lost with a slot
 *                metrics.c, state.c            series; elementary changes of the state */
#ifndef MOE_TRAINING_STATE_H
#define MOE_TRAINING_STATE_H

#include "base/mutex.h"
#include "schedule/call_ops.h"
#include "training/job_machine.h"
#include "training/training.h"

struct moe_train_checkpoint_metrics {
    struct moe_histogram *seconds;
    struct moe_counter *failures;
};

struct moe_train_metrics {
    struct moe_train_checkpoint_metrics saves, loads;
    struct moe_histogram *step_seconds;
    struct moe_counter *backwards, *steps, *skipped, *repeats, *retained_steps, *reused, *lost;
    struct moe_gauge *version, *lineage, *unsaved, *retained, *answers, *idle, *state, *activations,
        *job_done, *job_total;
};

struct moe_train {
    struct moe_train_config config;
    uint64_t config_hash;
    struct moe_pass_store *passes, *answers;
    struct moe_activations *activations;
    struct moe_train_metrics metrics; /* all NULL without a registry */
    _Atomic uint64_t moved;           /* moe_checkpoint_context.moved */

    struct moe_mutex lock; /* trainers are used without it, between tickets */

    /* Written under the lock: by the engine's thread under a view, by the thread that forms one
     * between views. The writer reads without the lock; all other threads lock to read. */
    struct moe_ledger *ledger;
    uint64_t lineage;         /* 0: no view has been agreed on yet */
    uint64_t weights_version; /* 1 after loading; never falls */
    uint64_t steps;
    uint64_t unsaved; /* steps with an effect since `checkpoint`, or since loading */
    uint32_t backwards, frozen;
    struct moe_checkpoint_explicit_loads explicit_loads;
    uint32_t slot, slots;
    uint64_t live;
    uint64_t group, epoch;           /* of the view; see moe_train_fence */
    uint64_t last_group, last_epoch; /* of the last view that was in force; 0 = none */
    /* As in struct moe_train_digest. */
    uint64_t earlier, gradients, unsettled, before;
    bool undefined;
    struct moe_ledger_call backward;
    char backward_session[MOE_TRAINING_NAME_MAX + 1];
    struct moe_ledger_call change;
    double squares;
    bool only_recorded;
    struct moe_train_call begun; /* id 0 = none */
    uint64_t saved_calls;        /* of the ledger, when `checkpoint` had this state; 0 = never */
    enum moe_train_loss loss;    /* of the lineage `earlier` */
    bool gradients_lost;         /* and no step or ZeroGrad has been run since */
    uint64_t lost_total;         /* also those that are not in `lost` */
    uint32_t lost_count;
    struct moe_train_micro_batch lost[MOE_TRAIN_LOST_MAX]; /* Backward calls to send again */
    struct moe_train_job *job; /* the Save, Load or Export under way; NULL = none */

    MOE_GUARDED_BY(lock) struct {
        char checkpoint[MOE_TRAINING_NAME_MAX + 1]; /* latest one of this state; "" = none */
        bool chose_model;                           /* with "": an operator went back to the model
                                                       as loaded */
        bool inconsistent;                          /* a change was cut short, or state was lost */
        bool apart;  /* it reads, or has read, the state of others, and has not joined: clients
                        learn nothing of that state here */
        bool joiner; /* see moe_train_set_joiner */
        uint64_t released_calls;
        bool has_target; /* see moe_train_set_recovery_target */
        char target[MOE_TRAINING_NAME_MAX + 1];
        bool went_back;                /* and no view has been in force since */
        uint64_t lost_steps;           /* with `went_back`: steps that no checkpoint had */
        char problem[MOE_STATUS_TEXT]; /* why the last restart failed; "" = it did not */
        uint64_t state_bytes;
        struct moe_train_job *orphan; /* its view ended; a thread of it may still run */
        struct moe_job machine;
    };

    /* The engine's thread only. */
    uint64_t skips, skip_logged_ns; /* steps with gradients that were not finite; time of the last
                                       line about one, 0 = never */

    /* The thread that forms views only. The state that was read before a view forms; calls 0 = none
     */
    struct moe_saved_training ahead;
    atomic_bool no_read; /* see moe_train_allow_read */

    uint64_t writer;             /* random; of this process */
    int shown;                   /* moe_checkpoint_context.shown */
    moe_call_request_fn request; /* of `engine`, while it is open */
    void *engine;

    /* Between attach and detach. */
    struct moe_layer *const *layers;
    const struct moe_placement *placements;
    struct moe_trainer **trainers; /* [layer_count], entries NULL when not attached */
};

/* The execution of one ticket of training, from its begin to its end. */
struct moe_call_exec {
    struct moe_train_call call;
    bool run;                       /* the call is new and admissible */
    bool repeat;                    /* it has been run */
    bool joined;                    /* with `run`: an earlier execution has begun it */
    bool waits;                     /* with `run`: a later execution settles what it began */
    bool settles;                   /* with `run`: the calls that wait end with this execution */
    bool changes;                   /* until its end the state may be half changed */
    bool unchanged;                 /* but weights and settings are still as before */
    bool can_finish;                /* and it only waits for other slots, which may have run it */
    uint64_t origin, epoch;         /* of the ticket */
    uint64_t weights_version;       /* as it began */
    struct moe_status refusal;      /* why it does not run; or all slots refuse, without effect */
    double aux_loss;                /* of the pass */
    struct moe_train_answer answer; /* complete at its end */
};

/* ------------------------------------------------------------------------ state.c */

/* Trainers that start from the weights as they are. */
struct moe_status moe_train__make_trainers(struct moe_train *t) MOE_CHECKED;
void moe_train__drop_trainers(struct moe_train *t);
/* The layer's, or NULL. */
struct moe_trainer *moe_train__find_trainer(const struct moe_train *t, uint32_t layer);
/* Of all trainers. After a failure they are undefined. */
struct moe_status moe_train__zero_grad(struct moe_train *t) MOE_CHECKED;
struct moe_status moe_train__set_frozen(struct moe_train *t, uint32_t frozen) MOE_CHECKED;
/* The calls ZeroGrad and SetFrozen on this slot, once all slots have begun them. */
struct moe_status moe_train__run_zero_grad(struct moe_train *t) MOE_CHECKED;
struct moe_status moe_train__run_set_frozen(struct moe_train *t, uint32_t frozen) MOE_CHECKED;
/* A new state under a new lineage: earlier retained passes, answers and gradients mean nothing. */
void moe_train__begin_lineage(struct moe_train *t, uint64_t lineage, uint64_t version)
    MOE_REQUIRES(t->lock);
void moe_train__set_checkpoint(struct moe_train *t, const char *name) MOE_REQUIRES(t->lock);
/* Records a call in the ledger. Where `outcome` names no lineage, fills in the present state. */
void moe_train__record(struct moe_train *t, const struct moe_train_call *call, uint64_t origin,
                       struct moe_ledger_outcome *outcome) MOE_REQUIRES(t->lock);
struct moe_status moe_train__out_of_memory(void) MOE_CHECKED;
/* The trainers have taken a step, or skipped it: its gradients are gone, and it counts. */
void moe_train__count_step(struct moe_train *t, bool nonfinite) MOE_REQUIRES(t->lock);

/* ---------------------------------------------------------------------- metrics.c */

struct moe_status moe_train__add_metrics(struct moe_metrics *m,
                                         struct moe_train_metrics *to) MOE_CHECKED;
/* Brings the gauges up to date. */
/* A collector of the registry: the figures that change between two tickets. */
void moe_train__collect(void *train);
void moe_train__show(struct moe_train *t);
/* NULL, without a registry, is ignored. */
void moe_train__count(struct moe_counter *counter, uint64_t more);
/* [engine's thread, as the next two] A Save or Load has begun. */
void moe_train__log_begun(const struct moe_train *t, const struct moe_train_call *call);
/* A Save or Load has ended with `st`. `bytes`: written by all workers, or read by this one. */
void moe_train__log_ended(struct moe_train *t, const struct moe_train_call *call, uint64_t begun_ns,
                          uint64_t bytes, uint64_t lost_steps, struct moe_status st);
/* An optimizer step has moved the weights, or was skipped for gradients that were not finite. */
void moe_train__log_stepped(struct moe_train *t, uint64_t id, uint64_t begun_ns, bool skipped);

/* ---------------------------------------------------------------- parts.c, job.c */

/* Weights and training state of this checkpoint; the trainers are new. `readers`: the slots that
 * read it now; each checks the hashes of its share of the files. `cancel`: as in struct
 * moe_checkpoint_context. */
struct moe_status moe_train__load_checkpoint(struct moe_train *t, const char *name,
                                             uint64_t readers,
                                             const atomic_bool *cancel) MOE_CHECKED;
/* A ticket of a Save, Load or Export. `origin`: slot that was asked. */
struct moe_status moe_train__run_job(struct moe_train *t, struct moe_session *session,
                                     const struct moe_ticket *ticket,
                                     struct moe_call_exec *x) MOE_CHECKED;
/* What is under way, or NULL; for a call that names `lineage` (0 = any), only what began with it.
 */
const struct moe_train_call *moe_train__job_call(const struct moe_train *t, uint64_t lineage)
    MOE_REQUIRES(t->lock);
/* Fills in name, kind and progress of the job under way. */
void moe_train__read_job(const struct moe_train *t, struct moe_train_state *out)
    MOE_REQUIRES(t->lock);
/* See moe_call_ops.is_unwanted. */
bool moe_train__is_unwanted(void *train, enum moe_step_kind kind, uint64_t id,
                            struct moe_call_descriptor *descriptor);
/* [engine's thread] The view is over. Does not wait. */
void moe_train__give_up_job(struct moe_train *t);
/* No view is in force. Waits until no orphan reads the trainers: at most one tensor's time. */
void moe_train__end_copying(struct moe_train *t);
/* No ticket comes: gives up the job and waits for its thread. */
void moe_train__end_jobs(void *train);

/* -------------------------------------------------------------------- gradients.c */

/* Into the ledger, pending; counted if it has gradients (outcome.backwards). */
void moe_train__record_backward(struct moe_train *t, const char *session,
                                const struct moe_ledger_call *call) MOE_REQUIRES(t->lock);
/* What a slot does that lacks a call which the others have recorded. */
enum moe_train_missed {
    MOE_TRAIN_LOST,   /* nothing: its state is another one */
    MOE_TRAIN_FINISH, /* it finishes what it has begun */
    MOE_TRAIN_RECORD, /* it records the call, which has changed no weights */
};
/* Of a call of the sequence of all sessions. */
enum moe_train_missed moe_train__missed(const struct moe_train_call *call);
/* Such a call, into the ledger. */
void moe_train__record_change(struct moe_train *t, const struct moe_ledger_call *call,
                              enum moe_train_missed missed) MOE_REQUIRES(t->lock);
/* A step has used the gradients, or a call has dropped them. */
void moe_train__drop_gradients(struct moe_train *t) MOE_REQUIRES(t->lock);
/* `checkpoint` has this state, with all records. */
bool moe_train__is_saved(const struct moe_train *t) MOE_REQUIRES(t->lock);
void moe_train__cut_short(struct moe_train *t, const struct moe_call_exec *x) MOE_REQUIRES(t->lock);
/* The records, and the new lineage; the caller sets the gradients to zero. Errors: MOE_INTERNAL. */
struct moe_status moe_train__lose_gradients(struct moe_train *t, const struct moe_train_recovery *r)
    MOE_REQUIRES(t->lock) MOE_CHECKED;
/* There is no earlier lineage with the same weights. */
void moe_train__forget_lost(struct moe_train *t) MOE_REQUIRES(t->lock);

/* ------------------------------------------------------------------------ judge.c */

/* Fills in run, repeat, joined and refusal. */
void moe_train__judge(const struct moe_train *t, struct moe_call_exec *x) MOE_REQUIRES(t->lock);
/* The recorded answer of x->call. */
struct moe_status moe_train__answer_repeat(struct moe_train *t, const struct moe_train_call *call,
                                           struct moe_train_answer *answer) MOE_REQUIRES(t->lock);
/* The highest step id that was used. */
uint64_t moe_train__highest_id(const struct moe_train *t) MOE_REQUIRES(t->lock);

/* -------------------------------------------------------------------- execution.c */

/* Judges x->call. `trainer` gets the layer's, for a Backward. Errors: MOE_INTERNAL where the ticket
 * fits no layer; the view ends then. */
struct moe_status moe_train__begin(struct moe_train *t, const struct moe_ticket *ticket,
                                   struct moe_call_exec *x,
                                   struct moe_trainer **trainer) MOE_CHECKED;
/* Returns the status for the origin's client, and completes x->answer. */
struct moe_status moe_train__end(struct moe_train *t, const struct moe_ticket *ticket,
                                 struct moe_call_exec *x) MOE_CHECKED;

#endif
