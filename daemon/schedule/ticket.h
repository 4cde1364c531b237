/* SPDX-License-Identifier: Apache-2.0 */
/* Tickets: the order to run one step, or one call, that all slots of a view take in the same order.
 * What kinds of steps there are, what may share one, and what travels with a ticket. */
#ifndef MOE_SCHEDULE_TICKET_H
#define MOE_SCHEDULE_TICKET_H

#include "moe/types.h"

#include <stdbool.h>
#include <stdint.h>

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
                     MOE_STEP_FORWARD_RETAIN = 9,
                     MOE_STEP_KINDS /* past the last */
};

/* What everybody has to know of a kind; functions of a kind are rows of the engine's table. */
struct moe_step_traits {
    bool queued;         /* a forward pass: its tokens wait in the batcher */
    bool has_descriptor; /* one call, one ticket, and `order` names the call; all others share a
                       ticket by moe_step_key */
    bool has_rows;     /* has an order, and rows of the slot that was asked: they fit its bucket */
    bool is_training;  /* one after the other, because each may change the state of the next */
    bool is_exclusive; /* changes the state of training as a whole: runs alone */
    bool is_weight_update; /* changes what a Save copies: waits while one does */
    bool passes_blocked; /* neither changes the state of training by what it does, nor adds to what
                         a held call is to use: may come before one. A Load is refused while a Save
                         runs. */
};
/* Of numbers that are no kind everything is false: kinds come from other processes. */
const struct moe_step_traits *moe_step_traits(enum moe_step_kind kind);

/* What may share a step. */
struct moe_step_key {
    uint32_t layer; /* the model's layer index */
    enum moe_step_kind kind;
    enum moe_dtype dtype;
};

enum { MOE_TRAINING_BODY_MAX = 512 };

/* A training call, or a Forward with a step of its own, as it travels with a notice and a ticket:
 * one call, one ticket. The body is the training room's (training/training.h); who carries it does
 * not look inside. */
struct moe_call_descriptor {
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
    struct moe_call_descriptor descriptor; /* of kinds that have one */
};

#endif
