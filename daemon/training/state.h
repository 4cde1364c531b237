/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of training share; nobody else includes this. */
#ifndef MOE_TRAINING_STATE_H
#define MOE_TRAINING_STATE_H

#include "base/mutex.h"
#include "schedule/call_ops.h"
#include "training/job_machine.h"
#include "training/training.h"

#include <stdatomic.h>

struct moe_train_checkpoint_metrics {
    struct moe_histogram *seconds;
    struct moe_counter *failures;
};

struct moe_train_metrics {
    struct moe_train_checkpoint_metrics saves, loads;
    struct moe_histogram *step_seconds;
    struct moe_counter *lost;
    struct moe_gauge *unsaved;
    struct moe_counter *backwards, *steps, *skipped, *repeats, *saved_steps, *reused;
    struct moe_gauge *version, *lineage, *retained, *answers, *idle, *state, *activations;
};

struct moe_train {
    struct moe_train_config config;
    uint64_t config_hash;
    struct moe_pass_store *passes, *answers;
    struct moe_activations *activations;
    struct moe_train_metrics metrics; /* all NULL without a registry */

    struct moe_mutex lock; /* trainers are used without it, between tickets */

    /* Under a view the engine's thread alone changes these, and between views the thread that forms
     * one: under the lock. It reads them without; all others take the lock to read. */
    struct moe_ledger *ledger;
    uint64_t lineage;         /* 0: no view has been agreed on yet */
    uint64_t weights_version; /* 1 after loading; never falls */
    uint64_t steps;
    uint64_t unsaved; /* that moved something since the state of `checkpoint`, or since loading */
    uint32_t backwards, frozen;
    struct moe_checkpoint_explicit_loads explicit_loads; /* by an operator or a trainer, to load */
    uint32_t slot, slots;
    uint64_t live;
    struct moe_train_job *job; /* the Save or Load that is under way; NULL = none */

    MOE_GUARDED_BY(lock) struct {
        char checkpoint[MOE_TRAINING_NAME_MAX + 1];
        bool inconsistent;
        bool has_target; /* see moe_train_set_recovery_target */
        char target[MOE_TRAINING_NAME_MAX + 1];
        bool went_back;                /* and no view has been in force since */
        uint64_t lost_steps;           /* with `went_back`: those that no checkpoint had */
        char problem[MOE_STATUS_TEXT]; /* why the last restart failed; "" = it did not */
        uint64_t state_bytes;
        struct moe_train_job *old; /* one that was given up, and may still have a thread */
        struct moe_job machine;
    };

    /* The engine's thread only. */
    uint64_t skips, skip_logged_ns; /* steps with gradients that were not finite; when the log said
                                     so last, 0 = never */

    uint64_t writer; /* random; of this process */
    int shown;       /* moe_checkpoint_context.shown */
    moe_train_progress_fn request_progress;
    void *progress_ctx;
    moe_call_request_fn request; /* of `engine`; call_ops.c */
    void *engine;

    /* Between attach and detach. */
    struct moe_layer *const *layers;
    const struct moe_placement *placements;
    struct moe_trainer **trainers; /* [layer_count], entries NULL when not attached */
};

/* A new state under a new lineage: nothing saved or answered before means anything. */
void moe_train__begin_lineage(struct moe_train *t, uint64_t lineage, uint64_t version)
    MOE_REQUIRES(t->lock);
/* The layer's, or NULL. */
struct moe_trainer *moe_train__find_trainer(const struct moe_train *t, uint32_t layer);
/* Series and log (metrics.c). */
struct moe_status moe_train__add_metrics(struct moe_metrics *m,
                                         struct moe_train_metrics *to) MOE_CHECKED;
/* Brings the series up to date. */
void moe_train__show(struct moe_train *t);
/* [engine's thread, as the next] A Save or Load has had its turn. */
void moe_train__log_begun(const struct moe_train *t, const struct moe_train_call *call);
/* It is over, well or not; `begun_ns` by moe_clock_ns. `bytes`: written by all workers. */
void moe_train__log_saved(struct moe_train *t, const char *name, uint64_t begun_ns, uint64_t bytes,
                          struct moe_status st);
/* `checked`: bytes that this worker has read. */
void moe_train__log_loaded(struct moe_train *t, const char *name, uint64_t begun_ns,
                           uint64_t checked, uint64_t lost_steps, struct moe_status st);
/* An optimizer step, begun then, has moved the weights or was skipped for gradients that were not
 * finite. */
void moe_train__log_stepped(struct moe_train *t, uint64_t id, uint64_t begun_ns, bool skipped);
/* Weights and training state of `t->checkpoint`; the trainers are fresh. */
struct moe_status moe_train__load_checkpoint(struct moe_train *t) MOE_CHECKED;
/* Trainers that start from the weights as they are. */
struct moe_status moe_train__make_trainers(struct moe_train *t) MOE_CHECKED;
void moe_train__drop_trainers(struct moe_train *t);

/* A Save, Load or Export has been done: into the ledger; fills in the state where `outcome` names
 * none. */
void moe_train__record(struct moe_train *t, const struct moe_train_call *call, uint32_t origin,
                       struct moe_ledger_outcome *outcome);
/* A ticket of a Save, Load or Export (job.c). As moe_train_run. */
struct moe_status moe_train__run_job(struct moe_train *t, struct moe_session *session,
                                     const struct moe_train_call *call,
                                     struct moe_train_execution *turn,
                                     struct moe_ledger_outcome *outcome) MOE_CHECKED;
/* Name and kind of what is under way, how far it is; zeros where nothing is. */
void moe_train__read_job(const struct moe_train *t, struct moe_train_state *out)
    MOE_REQUIRES(t->lock);
/* No view is in force: a Save that was given up with its view may still be reading trainers; waits
 * until it is not, as long as one tensor takes. Before trainers change or go. */
void moe_train__end_copying(struct moe_train *t);
/* Of the changes that were run and the one that is under way: a step id above it is
 * free. */
uint64_t moe_train__highest_id(const struct moe_train *t) MOE_REQUIRES(t->lock);
/* Something is under way that began with this lineage; 0 = any. */
bool moe_train__names_job_lineage(const struct moe_train *t, uint64_t lineage)
    MOE_REQUIRES(t->lock);
/* What is under way, or NULL. */
const struct moe_train_call *moe_train__job_call(const struct moe_train *t) MOE_REQUIRES(t->lock);

#endif
