/* SPDX-License-Identifier: Apache-2.0 */
/* Plans another placement of the default model from the rows of its experts: the plans of
 * daemon/balance, between two placements. Pure: no I/O, no clock. */
#ifndef MOE_COORDINATOR_MOVE_PLAN_H
#define MOE_COORDINATOR_MOVE_PLAN_H

#include "coordinator/placement.h"

struct moe_move_input {
    const struct moe_placement *now; /* in force */
    uint64_t places;                 /* bit s: slot s holds experts, before and after */
    uint32_t replicas, spare;        /* of the group; see moe_placement_places */
    const uint64_t *rows;            /* of each expert: of the first layer, then of the next one */
};

/* What a plan gains. Each step waits for its busiest slot. Rows of one layer: */
struct moe_move_layer {
    double mean, now, planned; /* of a slot; of the busiest one at present, and with the plan */
    uint32_t added;            /* copies that slots lack */
};

struct moe_move_gain {
    double mean, now, planned; /* sums over layers */
    uint64_t added;
    struct moe_move_layer layers[MOE_PLACEMENT_LAYERS_MAX];
};

/* `out` becomes the plan, with version 0. A layer without rows keeps its copies. Errors:
 * OUT_OF_MEMORY. */
struct moe_status moe_move_plan(const struct moe_move_input *in, struct moe_placement *out,
                                struct moe_move_gain *gain) MOE_CHECKED;

#endif
