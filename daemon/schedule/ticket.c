/* SPDX-License-Identifier: Apache-2.0 */
/* The kinds of steps, a row each. */
#include "schedule/ticket.h"

static const struct moe_step_traits kinds[MOE_STEP_KINDS] = {
    [MOE_STEP_FORWARD] = {.queued = true},
    [MOE_STEP_BACKWARD] = {.has_descriptor = true, .has_rows = true, .is_training = true},
    [MOE_STEP_OPTIMIZER] = {.has_descriptor = true,
                            .is_training = true,
                            .is_exclusive = true,
                            .is_weight_update = true},
    [MOE_STEP_ZERO_GRAD] = {.has_descriptor = true, .is_training = true, .is_exclusive = true},
    [MOE_STEP_SET_FROZEN] = {.has_descriptor = true, .is_training = true, .is_exclusive = true},
    [MOE_STEP_SAVE] = {.has_descriptor = true,
                       .is_training = true,
                       .is_exclusive = true,
                       .passes_blocked = true,
                       .is_job = true},
    [MOE_STEP_LOAD] = {.has_descriptor = true,
                       .is_training = true,
                       .is_exclusive = true,
                       .passes_blocked = true,
                       .is_job = true},
    [MOE_STEP_EXPORT] = {.has_descriptor = true,
                         .is_training = true,
                         .is_exclusive = true,
                         .passes_blocked = true,
                         .is_job = true},
    [MOE_STEP_FORWARD_RETAIN] = {.queued = true,
                                 .has_descriptor = true,
                                 .has_rows = true,
                                 .passes_blocked = true},
    [MOE_STEP_HEARTBEAT] = {.is_heartbeat = true},
    [MOE_STEP_ADD_MODEL] = {.changes_models = true},
    [MOE_STEP_REMOVE_MODEL] = {.changes_models = true},
    [MOE_STEP_SWAP_PLACEMENT] = {.swaps_placement = true},
};

const struct moe_step_traits *moe_step_traits(enum moe_step_kind kind)
{
    unsigned i = (unsigned)kind;
    return &kinds[i < MOE_STEP_KINDS ? i : 0];
}
