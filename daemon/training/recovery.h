/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the state with which a forming group continues. Pure: no I/O, no clock, no memory. All
 * slots see the same digests, and so all choose alike. */
#ifndef MOE_TRAINING_RECOVERY_H
#define MOE_TRAINING_RECOVERY_H

#include "daemon/name.h"

#include "base/status.h"

#include "moe/types.h"

/* The state of training of one slot, in short. Slots exchange these bytes; without training all
 * fields are 0. */
struct moe_train_digest {
    uint64_t config; /* hash of the trainers' configuration */
    /* The last view that was in force here: the group's random number, and the epoch. 0 = none */
    uint64_t group, epoch;
    uint64_t lineage, weights_version;
    uint64_t nonce;                             /* random, of this process */
    uint64_t calls, record;                     /* of the ledger: number of calls, and their hash */
    uint64_t inconsistent;                      /* 1: a change was cut short, or state was lost */
    uint64_t unsaved;                           /* steps that no checkpoint has */
    char checkpoint[MOE_TRAINING_NAME_MAX + 8]; /* latest one of this state; "" = none */
    uint64_t explicit_load;                     /* 1: somebody chose `checkpoint`, also "" */
    uint64_t has_target; /* 1: an operator has chosen `target`, for the next recovery */
    char target[MOE_TRAINING_NAME_MAX + 8]; /* "" = the model as loaded */
};

/* The state with which all members continue. */
struct moe_train_recovery {
    bool restart; /* the group goes back to `checkpoint`, or to the model as loaded */
    uint64_t lineage, weights_version;
    char checkpoint[MOE_TRAINING_NAME_MAX + 1]; /* the operator's target, or the latest that any
                                                   member knows; "" = the model as loaded */
    uint64_t lost_steps; /* with `restart`: the most that a member had beyond its checkpoint;
                            else: steps that `checkpoint` does not have */
    bool explicit_load;  /* somebody has named it, now or when the group loaded it */
};

/* `live`: the slots with a digest. A group without a lineage starts at a random one of 32 bits:
 * short, and a number in JSON. A new lineage exceeds the highest known one by a random number,
 * because clients may know a higher one from a lost member. Errors:
 * MOE_FAILED_PRECONDITION/CONFIG_INVALID (workers were started with different training),
 * CANNOT_GO_BACK (operators chose different targets; members come from groups that began apart,
 * each with a state to go back to, and no operator has chosen one). */
struct moe_status moe_train_choose_recovery(const struct moe_train_digest *digests, uint64_t live,
                                            struct moe_train_recovery *out) MOE_CHECKED;
/* A checkpoint's name for people; "" is the model as loaded. */
const char *moe_train_recovery_name(const char *checkpoint);

#endif
