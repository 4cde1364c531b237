/* SPDX-License-Identifier: Apache-2.0 */
/* One Save, Load or Export on this slot, and what its parts do; private to this room. */
#ifndef MOE_TRAINING_PARTS_H
#define MOE_TRAINING_PARTS_H

#include "checkpoint/checkpoint.h"
#include "training/state.h"

#include <pthread.h>

enum { MOE_TRAIN_JOB_THREADS = 3 }; /* a part's; one that only asks; the undoing of an orphan */

struct moe_train_job {
    struct moe_train *train;
    struct moe_train_call call;
    struct moe_call_descriptor progress; /* of its progress tickets */
    struct moe_checkpoint_context context;
    struct moe_checkpoint_state state;
    struct moe_placement
        *placements; /* [layer_count]; owned, for a view's may go before a thread */
    struct moe_checkpoint_copy *copy;      /* owned; NULL = none */
    struct moe_checkpoint_removed removed; /* by TIDY, on the lowest slot */
    bool found;                            /* see moe_job_end */
    bool from_trainers;                    /* WRITE: see moe_job_action */
    uint64_t number;                       /* of the machine; 0 = it never began */
    uint64_t lineage, calls, begun_ns;     /* as it began; calls: of the ledger */
    bool wrote;                            /* WRITE has begun: the checkpoint is of this job */
    struct moe_ledger_outcome outcome;
    enum moe_job_part part;               /* that the thread runs; NONE: it only asks */
    _Atomic uint64_t processed, expected; /* of the context; expected 0 = not known */
    atomic_bool cancel;                   /* the part is to end soon */
    unsigned threads;
    pthread_t thread[MOE_TRAIN_JOB_THREADS];
};

struct moe_checkpoint_context moe_train__context_of(struct moe_train *t);
/* [the job's thread; TAKE: engine's] Does this slot's share of `part`, however long it takes. */
struct moe_job_end moe_train__run_part(struct moe_train_job *j, enum moe_job_part part);
/* [engine's thread, as the next] Lowest slot: packs the ledger as it will be after this Save. */
struct moe_status moe_train__pack_records(struct moe_train_job *j) MOE_CHECKED;
/* After a Save: all slots learn which checkpoints the lowest has removed. */
struct moe_status moe_train__share_removed(struct moe_train_job *j, struct moe_session *session,
                                           struct moe_checkpoint_removed *out) MOE_CHECKED;
/* Recovery goes to checkpoint `name`, of the state after `steps`, unless it knows a later one. */
void moe_train__note_checkpoint(struct moe_train *t, const char *name, uint64_t steps);

#endif
