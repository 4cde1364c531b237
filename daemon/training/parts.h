/* SPDX-License-Identifier: Apache-2.0 */
/* Save, Load and Export: what a part does on this slot; nobody else includes this. */
#ifndef MOE_TRAINING_PARTS_H
#define MOE_TRAINING_PARTS_H

#include "checkpoint/checkpoint.h"
#include "training/state.h"

/* One Save, Load or Export on this slot. */
struct work {
    struct moe_train *train;
    const struct moe_train_call *call;
    struct moe_checkpoint_context context;
    struct moe_checkpoint_state state;
    uint64_t bytes;     /* written by this slot, in the part that runs */
    bool found;         /* the Save had been done before, and not recorded: `state` says which */
    bool from_trainers; /* WRITE: see moe_job_action */
    struct moe_checkpoint_removed removed; /* by TIDY; the lowest slot's */
    struct moe_checkpoint_copy *copy;      /* owned; NULL = none */
};

struct moe_checkpoint_context moe_train__context_of(struct moe_train *t);
/* [the job's thread; TAKE: engine's] Does this slot's share of a part, however long that takes. */
struct moe_job_end moe_train__run_part(struct work *w, enum moe_job_part part);
/* [engine's thread, as the next] Lowest slot: which calls will have been run when this Save has. */
struct moe_status moe_train__pack_records(struct work *w) MOE_CHECKED;
/* When a Save has ended well: all slots get to know what the lowest has removed. */
struct moe_status moe_train__share_removed(struct work *w, struct moe_session *session,
                                           struct moe_checkpoint_removed *out) MOE_CHECKED;
/* Checkpoint `name`, of the state after `steps`, is where recovery goes from now on, unless it
 * goes to a later one. */
void moe_train__note_checkpoint(struct moe_train *t, const char *name, uint64_t steps);
/* Adapters start anew from the weights as they are. After a failure the trainers are undefined. */
struct moe_status moe_train__merge(struct moe_train *t) MOE_CHECKED;

#endif
