/* SPDX-License-Identifier: Apache-2.0 */
/* What every backend demands of a layer before it computes anything: checked once, when the layer
 * is created and when its weights come in, so that the compute parts need no checks of their own.
 */
#ifndef MOE_LAYER_RULES_H
#define MOE_LAYER_RULES_H

#include "base/status.h"
#include "moe/layer_spec.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Spec and placement are possible, alone and together, and `slot` exists.
 * Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID. */
struct moe_status moe_layer_check(const struct moe_layer_spec *spec,
                                  const struct moe_placement *placement, uint32_t slot) MOE_CHECKED;

/* `bytes` of `dtype` are weight `weight` (of one expert, for an expert's) of such a layer.
 * Errors: MOE_INVALID_ARGUMENT with TENSOR_INVALID or DTYPE_UNSUPPORTED. */
struct moe_status moe_layer_check_tensor(const struct moe_layer_spec *spec, enum moe_weight weight,
                                         enum moe_dtype dtype, size_t bytes) MOE_CHECKED;

/* The entry of a weight on `slot` that a tensor is for: 0, or, for an expert's, local_index[expert]
 * (moe_placement_copy). Errors: MOE_INVALID_ARGUMENT with EXPERT_INDEX_RANGE, or TENSOR_INVALID
 * where the expert is not placed on the slot. */
struct moe_status moe_layer_find_entry(const struct moe_layer_spec *spec, uint32_t slot,
                                       const int32_t *local_index, enum moe_weight weight,
                                       uint32_t expert, uint32_t *entry) MOE_CHECKED;

/* A vector of summands rather than a matrix: kept in fp32 by every backend. */
bool moe_weight_is_bias(enum moe_weight weight);

/* "shared gate vector"; for people. */
const char *moe_weight_name(enum moe_weight weight);

/* Whether the placement puts a copy of the expert on the slot. */
bool moe_placement_has(const struct moe_placement *placement, uint32_t expert, uint32_t slot);

/* A placement of a layer's own, and what `slot` holds under it: `local` [*locals] global ids,
 * ascending, and `local_index` [E], from a global id into `local` or -1. All of it is freed by
 * moe_placement_free, after an error as well. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_placement_copy(const struct moe_placement *placement, uint32_t slot,
                                     struct moe_placement *copy, uint32_t **local, uint32_t *locals,
                                     int32_t **local_index) MOE_CHECKED;
void moe_placement_free(struct moe_placement *copy, uint32_t *local, int32_t *local_index);

/* The slots that have a copy of the expert, slot s as bit s. */
uint64_t moe_placement_slots_of(const struct moe_placement *placement, uint32_t expert);

#ifdef __cplusplus
}
#endif

#endif
