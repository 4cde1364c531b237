/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of every backend for layers. Creation of a layer and upload of weights check them, so
 * the compute parts need no checks. */
#ifndef MOE_LAYER_RULES_H
#define MOE_LAYER_RULES_H

#include "base/status.h"
#include "moe/layer_spec.h"
#include "moe/packed_matrix.h"
#include "moe/weight_source.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Spec and placement are valid and fit together, and `slot` exists.
 * Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID. */
struct moe_status moe_layer_check(const struct moe_layer_spec *spec,
                                  const struct moe_placement *placement, uint32_t slot) MOE_CHECKED;

/* The formats of the spec are valid, and `computes` (moe/backend.h) takes them on this device.
 * Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID, MOE_FAILED_PRECONDITION/UNSUPPORTED. */
struct moe_status moe_layer_check_formats(const struct moe_layer_spec *spec,
                                          moe_computes_fn computes,
                                          const struct moe_device *device) MOE_CHECKED;

/* `m` has the parts that a matrix of the weight's format has. Errors: MOE_INVALID_ARGUMENT with
 * TENSOR_INVALID; so for a weight that has no format. */
struct moe_status moe_layer_check_packed(const struct moe_layer_spec *spec, enum moe_weight weight,
                                         const struct moe_packed_matrix *m) MOE_CHECKED;
/* The same for a source: only gate may have up by turns, and then each row has a scale. */
struct moe_status moe_layer_check_packed_source(const struct moe_layer_spec *spec,
                                                enum moe_weight weight,
                                                const struct moe_packed_source *source) MOE_CHECKED;

/* `bytes` of `dtype` is the size of `weight` (for experts: of one expert) of such a layer.
 * Errors: MOE_INVALID_ARGUMENT with TENSOR_INVALID (also for a weight with a format) or
 * DTYPE_UNSUPPORTED. */
struct moe_status moe_layer_check_tensor(const struct moe_layer_spec *spec, enum moe_weight weight,
                                         enum moe_dtype dtype, size_t bytes) MOE_CHECKED;

/* The entry of a tensor in its weight on `slot`: local_index[expert] (moe_placement_copy) for an
 * expert's weight, else 0. Errors: MOE_INVALID_ARGUMENT with EXPERT_INDEX_RANGE, or TENSOR_INVALID
 * if the expert is not placed on the slot. */
struct moe_status moe_layer_find_entry(const struct moe_layer_spec *spec, uint32_t slot,
                                       const int32_t *local_index, enum moe_weight weight,
                                       uint32_t expert, uint32_t *entry) MOE_CHECKED;

/* Every weight was uploaded: `uploaded` [entries] per weight, NULL for a weight that the layer does
 * not have; `local` [locals] the experts of the slot. Errors: MOE_FAILED_PRECONDITION/
 * TENSOR_MISSING. */
struct moe_status moe_layer_check_complete(const struct moe_layer_spec *spec, const uint32_t *local,
                                           uint32_t locals,
                                           bool *const uploaded[MOE_WEIGHT_COUNT]) MOE_CHECKED;

/* A vector, not a matrix: a bias, or the weight of a norm. Every backend stores it in fp32. */
bool moe_weight_is_bias(enum moe_weight weight);

/* "shared gate vector"; for people. */
const char *moe_weight_name(enum moe_weight weight);

/* Whether the placement puts a copy of the expert on the slot. */
bool moe_placement_has(const struct moe_placement *placement, uint32_t expert, uint32_t slot);

/* Copies a placement. Call moe_placement_free, also after an error. Errors:
 * MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_placement_copy(const struct moe_placement *placement,
                                     struct moe_placement *copy) MOE_CHECKED;
void moe_placement_free(struct moe_placement *copy);

/* The active placement: the copies of `all` that are on live slots. Steps send rows only to these.
 * Writes into the arrays of `active`, a copy of `all`. An expert without a live copy gets an empty
 * list, so moe_session_check_step comes first. */
void moe_placement_activate(const struct moe_placement *all, uint64_t live,
                            struct moe_placement *active);

/* Lists the experts of `slot`: `local` [*locals] global ids, ascending, and `local_index` [E], from
 * a global id into `local` or -1. The caller frees both, also after an error. Errors:
 * MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_placement_list_local(const struct moe_placement *placement, uint32_t slot,
                                           uint32_t **local, uint32_t *locals,
                                           int32_t **local_index) MOE_CHECKED;

/* The slots with a copy of the expert; bit s: slot s. */
uint64_t moe_placement_slots_of(const struct moe_placement *placement, uint32_t expert);
/* Whether each expert has a copy on one of the slots `live`. Errors:
 * MOE_UNAVAILABLE/EXPERT_UNAVAILABLE. */
struct moe_status moe_placement_check_live(const struct moe_placement *placement,
                                           uint64_t live) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
