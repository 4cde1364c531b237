/* SPDX-License-Identifier: Apache-2.0 */
/* What an added model needs on each slot, from what a worker has found in its directory. Pure. */
#include "base/size.h"
#include "coordinator/models.h"

#include <inttypes.h>
#include <string.h>

enum { LAYER_INDEX_MAX = 65535 }; /* moe_layer_key has 16 bits for it */

struct moe_status moe_model_check_layers(const struct moe_model_layer *layers, size_t count)
{
    if (count == 0 || count > MOE_PLACEMENT_LAYERS_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "%zu MoE layers", count);
    for (size_t i = 0; i < count; i++) {
        const struct moe_membership_layer *l = &layers[i].info;
        if (l->layer > LAYER_INDEX_MAX || (i > 0 && l->layer <= layers[i - 1].info.layer))
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                             "layer %u is out of order or above %d", l->layer, LAYER_INDEX_MAX);
        if (l->experts == 0 || l->experts > MOE_PLACEMENT_EXPERTS_MAX || l->hidden == 0 ||
            l->top_k == 0)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                             "layer %u has an impossible shape", l->layer);
    }
    return moe_ok();
}

bool moe_model_same_layers(const struct moe_model_layer *a, size_t a_count,
                           const struct moe_model_layer *b, size_t b_count)
{
    bool same = a_count == b_count;
    for (size_t i = 0; same && i < a_count; i++)
        same = moe_membership_same_layers(&a[i].info, &b[i].info, 1);
    return same;
}

struct moe_status moe_model_place(struct moe_placement *p, uint64_t places, uint32_t replicas,
                                  const struct moe_model_layer *layers, size_t count)
{
    struct moe_placement_layer list[MOE_PLACEMENT_LAYERS_MAX];
    for (size_t i = 0; i < count; i++)
        list[i] = (struct moe_placement_layer){layers[i].info.layer, layers[i].info.experts};
    return moe_placement_set_linear(p, 1, places, replicas, list, count);
}

static uint32_t count_experts(const struct moe_placement *p, size_t layer, uint32_t slot)
{
    uint32_t experts = moe_placement_layer_at(p, layer).experts, held = 0;
    for (uint32_t e = 0; e < experts; e++) {
        const uint8_t *holders;
        uint32_t copies = moe_placement_holders(p, layer, e, &holders);
        held += memchr(holders, (int)slot, copies) != NULL;
    }
    return held;
}

/* *sum += common + experts * each */
static bool add(uint64_t *sum, uint64_t common, uint32_t experts, uint64_t each)
{
    size_t bytes;
    return moe_size_mul(each, experts, &bytes) && moe_size_add(bytes, common, &bytes) &&
           moe_size_add(bytes, *sum, sum);
}

struct moe_status moe_model_plan_slot(const struct moe_placement *p,
                                      const struct moe_model_layer *layers, uint32_t slot,
                                      struct moe_model_plan *plan)
{
    plan->file_bytes = plan->resident_bytes = 0;
    for (size_t i = 0; i < moe_placement_layer_count(p); i++) {
        const struct moe_model_layer *l = &layers[i];
        uint32_t experts = count_experts(p, i, slot);
        if (!add(&plan->file_bytes, l->common_file, experts, l->expert_file) ||
            !add(&plan->resident_bytes, l->common_resident, experts, l->expert_resident))
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                             "it reports an impossible number of bytes");
    }
    if (plan->resident_bytes > plan->free_bytes)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "it needs %" PRIu64 " bytes for the model and has %" PRIu64 " free",
                         plan->resident_bytes, plan->free_bytes);
    return moe_ok();
}
