/* SPDX-License-Identifier: Apache-2.0 */
/* From which state a forming group goes on. Pure: no I/O, no clock, no memory. All slots see the
 * same stands, and so all decide alike. */
#ifndef MOE_TRAINING_RECOVERY_H
#define MOE_TRAINING_RECOVERY_H

#include "daemon/name.h"

#include "base/status.h"

#include "moe/types.h"

/* Where one slot stands. Exchanged as it is; without training all fields are 0. */
struct moe_train_stand {
    uint64_t config; /* hash of the trainers' configuration */
    uint64_t lineage, weights_version;
    uint64_t fresh;                             /* random, of this process: see decide */
    uint64_t calls, record;                     /* of the ledger: how many, and their hash */
    uint64_t torn;                              /* 1: a change was cut short, or state was lost */
    uint64_t unsaved;                           /* steps that no checkpoint has */
    char checkpoint[MOE_TRAINING_NAME_MAX + 8]; /* that the state came from or went to; "" = none */
    uint64_t told;                              /* 1: to load `checkpoint`, by its name */
    uint64_t
        chosen; /* 1: an operator wants the group to go back to `choice`, if it has to go back */
    char choice[MOE_TRAINING_NAME_MAX + 8]; /* "" = the model as loaded */
};

/* What the members' stands mean for all of them. */
struct moe_train_decision {
    bool restart; /* the group goes back to `checkpoint`, or to the model as loaded */
    uint64_t lineage, weights_version;
    char checkpoint[MOE_TRAINING_NAME_MAX + 1]; /* the latest that any member knows, or the choice
                                                   of an operator; "" = the model as loaded */
    uint64_t lost_steps; /* of the latest state, that `checkpoint` does not have */
    bool told;           /* somebody has named it, now or when the group loaded it */
};

/* `live`: whose stands count. Where
 * no member has a lineage yet, the group's first one is random (of 32 bits: short, and a
 * number in JSON); a new one after that rises by a random number, for a member that was lost may
 * have told clients of a higher one than those who are left know. Errors:
 * MOE_FAILED_PRECONDITION/CONFIG_INVALID (workers were started with different training),
 * CANNOT_GO_BACK (workers were told different checkpoints to recover from). */
struct moe_status moe_train_decide(const struct moe_train_stand *stands, uint64_t live,
                                   struct moe_train_decision *out) MOE_CHECKED;
/* A checkpoint's name for people; "" is the model as loaded. */
const char *moe_train_recovery_name(const char *checkpoint);

#endif
