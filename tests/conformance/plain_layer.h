/* SPDX-License-Identifier: Apache-2.0 */
/* A simple layer, for programs that test something else: a softmax over all experts, and experts
 * spread over the slots. */
#ifndef MOE_TEST_PLAIN_LAYER_H
#define MOE_TEST_PLAIN_LAYER_H

#include "moe/layer_spec.h"

/* A struct moe_router_spec that chooses `k` experts; their weights add up to one. */
#define PLAIN_ROUTER(k)                                                                            \
    {                                                                                              \
        .score = MOE_SCORE_SOFTMAX, .top_k = (k), .groups = 1, .topk_group = 1, .group_best = 1,   \
        .renorm = MOE_RENORM_SUM, .scale = 1                                                       \
    }

/* Memory for the placement below. */
struct dealt {
    uint32_t offset[MOE_MAX_EXPERTS + 1];
    uint16_t slot[MOE_MAX_EXPERTS]; /* where expert e lives */
};

/* Every expert on one slot; each slot has a consecutive range, all of equal size up to one. Points
 * into `d`. */
struct moe_placement deal_experts(struct dealt *d, uint32_t experts, uint32_t slots);

#endif
