/* SPDX-License-Identifier: Apache-2.0 */
/* The place of each weight of a layer in the checkpoint.
 *
 * Three layouts of experts exist: one matrix per expert, all experts fused as [E, 2I, H], and fused
 * and transposed as [E, H, 2I]; gate and up are halves or alternate. Each is a strided view of a
 * byte range, which a `struct moe_piece` describes. Internal to daemon/model.
 */
#ifndef MOE_MODEL_LAYOUT_H
#define MOE_MODEL_LAYOUT_H

#include "model/checkpoint.h"
#include "model/config.h"

struct moe_layout {
    const struct moe_checkpoint *checkpoint;
    const struct moe_family *family;
    const char *prefix; /* "model.layers." */
};

/* One weight as part of a stored tensor: element (r, c) of the canonical weight [rows, columns] is
 * element base + r * row_step + c * column_step of the byte range [first, first + bytes). */
struct moe_piece {
    struct moe_checkpoint_tensor at;
    uint64_t first, bytes; /* counted from the start of the tensor */
    size_t rows, columns;
    size_t base, row_step, column_step;
};

/* Finds the prefix under which the checkpoint stores its layers. Errors: TENSOR_MISSING. */
struct moe_status moe_layout_open(const struct moe_checkpoint *checkpoint,
                                  const struct moe_config *config,
                                  struct moe_layout *out) MOE_CHECKED;

/* Locates one weight; `expert` counts for expert weights only. Errors: TENSOR_MISSING,
 * TENSOR_INVALID (shape or dtype), both by tensor name. */
struct moe_status moe_layout_locate(const struct moe_layout *layout,
                                    const struct moe_layer_spec *spec, enum moe_weight weight,
                                    uint32_t expert, struct moe_piece *out) MOE_CHECKED;

/* The name of the tensor of a weight that `p` locates; '*' stands for the expert where each expert
 * has a tensor. The text ends with a zero, cut at `capacity` - 1 bytes. */
void moe_layout_name_pattern(const struct moe_layout *layout, const struct moe_layer_spec *spec,
                             enum moe_weight weight, const struct moe_piece *p, char *pattern,
                             size_t capacity);

/* True if the layer's experts are fused: all gates and ups in one tensor, all downs in another. */
bool moe_layout_is_fused(const struct moe_layout *layout, const struct moe_layer_spec *spec);

/* Refuses a tensor in the block of a MoE layer that no weight of the layer uses, as an unexpected
 * scale or bias would change results. Errors: TENSOR_INVALID. */
struct moe_status moe_layout_refuse_unread(const struct moe_layout *layout,
                                           const struct moe_config *config) MOE_CHECKED;

/* True when the range is the canonical weight, in order and without other elements. */
bool moe_piece_is_plain(const struct moe_piece *p);
bool moe_piece_same_range(const struct moe_piece *a, const struct moe_piece *b);

#endif
