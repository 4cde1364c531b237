/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the state with which a forming group continues. Pure: no I/O, no clock, no memory. All
 * slots see the same digests, and so all choose alike. */
#ifndef MOE_TRAINING_RECOVERY_H
#define MOE_TRAINING_RECOVERY_H

#include "training/ledger.h"

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
    /* Of a lineage that began without a restart: the one before it, with the same weights. 0 = none
     */
    uint64_t earlier;
    uint64_t gradients; /* slots with a part of the gradients since the last step; 0 = none */
    uint64_t undefined; /* 1: a pass or step was cut short, and weights are as before it */
    /* Slots of the view in which a call was cut short here that another slot may have answered. 0 =
     * none. */
    uint64_t unsettled;
    uint64_t
        saved; /* 1: `checkpoint` has this state, with all records, and no gradients are there */
    /* The Backward that was recorded last, if no other call came after it: a view can end when only
     * some slots have recorded it. `before`: the ledger's hash without it. */
    uint64_t before;
    struct moe_ledger_call backward; /* id 0 = none */
    char backward_session[MOE_TRAINING_NAME_MAX + 8];
    /* The same for an OptimizerStep, a ZeroGrad, a SetFrozen, and a Save or Export that leaves the
     * weights as they are. `squares`: of an OptimizerStep, as in struct moe_optimizer_result. */
    struct moe_ledger_call change;
    double squares;
    uint64_t only_recorded; /* 1: `change` is of the last two kinds */
    uint64_t settled;       /* 1: `checkpoint` has all records, and no call can be taken back */
    /* Id of a call of the first three kinds that was cut short here, in the view `epoch`, as it
     * waited for other slots only: this slot can finish it. 0 = none. A slot that has run it has
     * had what all bring to it. */
    uint64_t begun;
};

/* Why clients of the lineage before have to look at the state. */
enum moe_train_loss {
    MOE_TRAIN_LOSS_NONE,
    MOE_TRAIN_LOSS_GRADIENTS, /* gradients since the last step; all else is there */
    MOE_TRAIN_LOSS_CALL,      /* and perhaps one call that a lost worker has answered */
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
    /* Without `restart`: gradients and the records of their calls are dropped, and `lineage` is
     * new; `earlier` is the one before it. */
    enum moe_train_loss loss;
    uint64_t earlier;
    uint64_t calls, record;          /* of the ledger, before that */
    struct moe_ledger_call backward; /* for a ledger with one call less */
    char backward_session[MOE_TRAINING_NAME_MAX + 8];
    /* Without `restart`: slots that first finish `change`, which the others have run, or only
     * record it. */
    uint64_t finishers;
    bool only_recorded;
    struct moe_ledger_call change;
    double squares;
    bool settled; /* as in the digest */
    /* With `restart`: slots with the state that the group had last, and whether their checkpoint
     * has it. `by_choice`: an operator wants to go back. */
    uint64_t heirs;
    bool older; /* all others are of earlier views, or new */
    bool saved, by_choice;
    uint64_t joiners; /* slots that read `checkpoint`, while the others keep the same state */
};

/* `live`: the slots with a digest. A group without a lineage starts at a random one of 32 bits:
 * short, and a number in JSON. A new lineage exceeds the highest known one by a random number,
 * because clients may know a higher one from a lost member. Errors:
 * MOE_FAILED_PRECONDITION/CONFIG_INVALID (workers were started with different training),
 * CANNOT_GO_BACK (operators chose different targets; members come from groups that began apart,
 * each with a state to go back to, and no operator has chosen one). */
struct moe_status moe_train_choose_recovery(const struct moe_train_digest *digests, uint64_t live,
                                            struct moe_train_recovery *out) MOE_CHECKED;
/* For groups with copies, after the choice. `covers`: the heirs hold every expert. Then the group
 * does not go back: slots without its state, r->joiners, read the checkpoint that has it. Errors:
 * MOE_FAILED_PRECONDITION/REFORMING if none has it; r->joiners is set. The heirs go on without the
 * others then, until somebody saves. The group goes back nevertheless if a member of its last view
 * has missed a call: it cannot take part, and the coordinator cannot tell it from the heirs. */
struct moe_status moe_train_keep_copies(const struct moe_train_digest *digests, uint64_t live,
                                        bool covers, struct moe_train_recovery *r) MOE_CHECKED;
/* A slot that joins has read `ahead`, which is the state of the others: it reads nothing. */
bool moe_train_is_ahead(const struct moe_saved_training *ahead, const struct moe_train_recovery *r);
/* A checkpoint's name for people; "" is the model as loaded. */
const char *moe_train_recovery_name(const char *checkpoint);

#endif
