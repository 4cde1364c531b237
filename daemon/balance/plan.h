/* SPDX-License-Identifier: Apache-2.0 */
/* Where copies of experts should be, so that every slot computes about as many rows: the global
 * greedy of EPLB (DeepSeek), made exact about two copies on one slot.
 *
 * For each layer alone: after the copies that each expert has at least, the next copy goes to the
 * expert with the most rows per copy, until all places are taken. Then the copies, heaviest first,
 * go to the lightest slot that has a free place and no copy of that expert. Rows of an expert are
 * shared equally by its copies, as steps do (moe_dispatch_target). Ties go to the lower number, so
 * equal inputs give equal plans everywhere. Pure: no I/O, no clock; memory for one layer. */
#ifndef MOE_BALANCE_PLAN_H
#define MOE_BALANCE_PLAN_H

#include "base/status.h"
#include "moe/types.h"

#include <stddef.h>

struct moe_placement_plan_input {
    uint32_t slots;       /* 1..MOE_MAX_SLOTS */
    uint32_t layers;      /* L */
    uint32_t experts;     /* E of each layer, 1..MOE_MAX_EXPERTS */
    uint32_t places;      /* copies that a slot holds of each layer, at most E */
    uint32_t copies;      /* of each expert at least, 1..slots: slots * places >= E * copies */
    const uint64_t *rows; /* [L,E] rows that each expert gets, or got */
};

/* Fills `expert` [L, slots, places]: the experts of each slot, ascending. Every expert has at least
 * `copies` copies, and at most one on a slot. O(L * slots * places * log E).
 * Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID, OUT_OF_MEMORY. */
struct moe_status moe_placement_plan(const struct moe_placement_plan_input *in,
                                     uint16_t *expert) MOE_CHECKED;

/* To a plan all slots are alike: exchanges the lists of `expert` among them so that fewer copies
 * move. Layer by layer, the list and the slot that have the most experts in common go together.
 *
 * holders  [L,E] bit s: slot s has a copy now
 * Errors: OUT_OF_MEMORY; `expert` is unchanged then. */
struct moe_status moe_placement_match(const struct moe_placement_plan_input *in,
                                      const uint64_t *holders, uint16_t *expert) MOE_CHECKED;

/* Rows of the busiest slot of one layer over the mean of all slots, at least 1; 1 without rows.
 * rows [E], expert [slots, places]. */
double moe_placement_imbalance(const struct moe_placement_plan_input *in, const uint64_t *rows,
                               const uint16_t *expert);

/* Of one layer: rows of the busiest slot, if `holders` [E] says which slots have copies, at least
 * one of each expert. `*mean`: of all slots. */
double moe_placement_busiest(uint32_t slots, uint32_t experts, const uint64_t *rows,
                             const uint64_t *holders, double *mean);

#endif
