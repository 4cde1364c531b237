/* SPDX-License-Identifier: Apache-2.0 */
/* Which slots hold which experts: for every MoE layer and every expert the list of slots with a
 * copy. Pure: no I/O, no clock, no allocation after create.
 *
 * Linear placement uses the slots of a mask, its places: n of them, in ascending order. It has a
 * rule for replicas: what place i holds without them is also on the places i + c * (n / replicas),
 * modulo n, for c < replicas. So copies of an expert are far apart, and n / replicas neighbours,
 * such as those of one host, may be lost at once. */
#ifndef MOE_COORDINATOR_PLACEMENT_H
#define MOE_COORDINATOR_PLACEMENT_H

#include "base/status.h"

#include <stddef.h>

enum {
    MOE_PLACEMENT_SLOTS_MAX = 64,
    MOE_PLACEMENT_LAYERS_MAX = 256,
    MOE_PLACEMENT_EXPERTS_MAX = 1024, /* of one layer */
};

struct moe_placement;

struct moe_placement_layer {
    uint32_t layer;   /* the model's layer index */
    uint32_t experts; /* E */
};

/* Empty: version 0, no slots, no layers. */
struct moe_status moe_placement_create(struct moe_placement **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_placement_destroy(struct moe_placement *p);

/* Makes `to` equal to `from`. */
void moe_placement_assign(struct moe_placement *to, const struct moe_placement *from);

/* Starts over with no layers. Errors: MOE_INVALID_ARGUMENT (slots outside 1..SLOTS_MAX). */
struct moe_status moe_placement_begin(struct moe_placement *p, uint32_t version,
                                      uint32_t slots) MOE_CHECKED;

/* Adds a layer. `copies[e]` is the number of slots that hold expert e (at least 1); `holders` lists
 * them for expert 0, then 1, ..., each list ascending.
 * Errors: MOE_INVALID_ARGUMENT (limits, a list empty, out of order or out of range, layer indices
 * not rising); the placement is unchanged then. */
struct moe_status moe_placement_add_layer(struct moe_placement *p,
                                          const struct moe_placement_layer *layer,
                                          const uint8_t *copies, const uint8_t *holders,
                                          size_t holder_count) MOE_CHECKED;

/* The slots 0 .. count - 1, as a mask (bit s: slot s). count 0..MOE_PLACEMENT_SLOTS_MAX. */
uint64_t moe_placement_first_slots(uint32_t count);
/* One more than the highest slot of the mask. */
uint32_t moe_placement_slot_bound(uint64_t places);

/* `replicas` copies of each expert, 1 .. n, over the n slots of the mask `places`; the placement's
 * slots are moe_placement_slot_bound(places). First copies are in contiguous ranges, in the order
 * of slots. If E is not divisible by n, each of the first E % n places holds one more. The others
 * follow the rule above. Errors: MOE_INVALID_ARGUMENT; the placement has no use then. */
struct moe_status moe_placement_set_linear(struct moe_placement *p, uint32_t version,
                                           uint64_t places, uint32_t replicas,
                                           const struct moe_placement_layer *layers,
                                           size_t count) MOE_CHECKED;
/* Whether every expert has a copy on a slot of `live`, in any linear placement over these places.
 * replicas 1..n. */
bool moe_placement_covers(uint64_t places, uint32_t replicas, uint64_t live);
/* The same for this placement. */
bool moe_placement_is_live(const struct moe_placement *p, uint64_t live);
/* Whether each expert has at least `replicas` copies, and no slot more than `spare` copies beyond
 * those of the fullest slot in a linear placement. */
bool moe_placement_fits(const struct moe_placement *p, uint32_t replicas, uint32_t spare);
/* Copies that the fullest slot has of a layer in a linear placement, and `spare` more; at most one
 * of each expert. */
uint32_t moe_placement_places(uint32_t slots, uint32_t experts, uint32_t replicas, uint32_t spare);
/* Experts of all layers with exactly n copies on slots of `live`, into experts[n], for n up to
 * MOE_PLACEMENT_SLOTS_MAX. */
void moe_placement_count_copies(const struct moe_placement *p, uint64_t live,
                                uint32_t experts[MOE_PLACEMENT_SLOTS_MAX + 1]);

void moe_placement_set_version(struct moe_placement *p, uint32_t version);
uint32_t moe_placement_version(const struct moe_placement *p);
/* Experts are on slots below this. */
uint32_t moe_placement_slots(const struct moe_placement *p);
size_t moe_placement_layer_count(const struct moe_placement *p);
/* `index` < layer_count. */
struct moe_placement_layer moe_placement_layer_at(const struct moe_placement *p, size_t index);
/* Index of the model's layer `layer`; false when it is no MoE layer. */
bool moe_placement_find_layer(const struct moe_placement *p, uint32_t layer, size_t *index);
/* Number of slots that hold the expert, and the slots, ascending. */
uint32_t moe_placement_holders(const struct moe_placement *p, size_t index, uint32_t expert,
                               const uint8_t **holders);

/* Bit s: slot s holds the expert. */
uint64_t moe_placement_mask(const struct moe_placement *p, size_t index, uint32_t expert);

/* FNV-1a over slots, layers and lists, each number as 32 bits little-endian: equal for equal
 * content, independent of the version. */
uint64_t moe_placement_content_hash(const struct moe_placement *p);
/* The same with the version. Workers compare it to detect a difference. */
uint64_t moe_placement_hash(const struct moe_placement *p);

#endif
