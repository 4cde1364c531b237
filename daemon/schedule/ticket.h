/* SPDX-License-Identifier: Apache-2.0 */
/* Tickets: instructions to run one step or one call. All slots of a view run them in the same
 * sequence. This header has the kinds of steps, the key of work that may share a step, and the data
 * of a ticket. */
#ifndef MOE_SCHEDULE_TICKET_H
#define MOE_SCHEDULE_TICKET_H

#include "moe/types.h"
#include "schedule/layer_key.h"

#include <stdbool.h>
#include <stdint.h>

enum moe_step_kind { /* values of moe.v1.StepKind */
                     MOE_STEP_FORWARD = 1,
                     MOE_STEP_BACKWARD = 2,
                     /* Exclusive: these change the state of training as a whole and run alone. */
                     MOE_STEP_OPTIMIZER = 3,
                     MOE_STEP_ZERO_GRAD = 4,
                     MOE_STEP_SET_FROZEN = 5,
                     MOE_STEP_SAVE = 6,
                     MOE_STEP_LOAD = 7,
                     MOE_STEP_EXPORT = 8,
                     /* One Forward request alone, retained on the devices for its Backward. */
                     MOE_STEP_FORWARD_RETAIN = 9,
                     /* A forward pass without tokens, in an idle group: all slots and devices show
                        that they answer. */
                     MOE_STEP_HEARTBEAT = 10,
                     /* Begin and end the serving of an added model in this view. No device runs
                        anything. */
                     MOE_STEP_ADD_MODEL = 11,
                     MOE_STEP_REMOVE_MODEL = 12,
                     /* Other copies of the default model's experts from here on. No device runs
                        anything. */
                     MOE_STEP_SWAP_PLACEMENT = 13,
                     MOE_STEP_KINDS /* past the last */
};

/* Properties of a kind that all rooms use; the functions of a kind are a row of the engine's table.
 */
struct moe_step_traits {
    bool queued;         /* a forward pass: its tokens wait in the batcher */
    bool has_descriptor; /* a ticket carries one call, which `descriptor` names; other kinds share
                            tickets by moe_step_key */
    bool has_rows;       /* has a descriptor, and rows of the origin slot, which fit the bucket */
    bool is_training;    /* such tickets run one after the other: each may change the state that the
                            next reads */
    bool is_exclusive;   /* changes the state of training as a whole: runs alone */
    bool is_weight_update; /* changes the weights, so it waits while a Save copies them */
    bool is_job;           /* a Save, Load or Export: several tickets, and steps run between them */
    bool is_heartbeat;     /* has no tokens */
    bool changes_models;   /* has no tokens; its place in the sequence decides from where on tickets
                              are of that model */
    bool swaps_placement;  /* the same for the copies of experts that steps use */
    bool passes_blocked;   /* may overtake calls that are blocked or held, if it is not held itself:
                              it changes no training state that they use. (A Load is refused while a
                              Save runs.) */
};
/* Numbers come from other processes: for one that is no kind, all traits are false. */
const struct moe_step_traits *moe_step_traits(enum moe_step_kind kind);

/* What of training waits while a process reads the state. */
enum moe_hold {
    MOE_HOLD_NOTHING,
    MOE_HOLD_CHANGES,  /* all but jobs: one is under way, and needs its tickets */
    MOE_HOLD_TRAINING, /* also jobs: none begins */
};

/* Work with the same key may share a step. */
struct moe_step_key {
    uint32_t layer; /* moe_layer_key */
    enum moe_step_kind kind;
    enum moe_dtype dtype;
};

enum { MOE_TRAINING_BODY_MAX = 512 };

/* A training call, or a retained Forward, as it travels in an announcement and in a ticket: one
 * call, one ticket. Only the training room reads the body (training/training.h). */
struct moe_call_descriptor {
    uint32_t origin; /* slot that was asked; it has the tensors and answers */
    uint64_t number; /* of the call, among those of its origin; 1, 2, 3 ... */
    uint32_t length; /* of the body */
    uint8_t body[MOE_TRAINING_BODY_MAX];
};

struct moe_ticket {
    uint64_t epoch, seq;
    uint32_t layer; /* moe_layer_key; index 0 for changes of models, 0 for exclusive kinds, the
                       version of the placement for SWAP_PLACEMENT. Dtype and bucket of all three
                       are 0 */
    enum moe_step_kind kind;
    enum moe_dtype dtype;
    uint32_t bucket;
    struct moe_call_descriptor descriptor; /* of kinds that have one */
};

#endif
