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

/* Matrices of a layer that are stored alike. */
enum moe_layout_group {
    MOE_LAYOUT_ROUTED, /* gate, up and down of all experts */
    MOE_LAYOUT_SHARED,
    MOE_LAYOUT_TO_LATENT,
    MOE_LAYOUT_FROM_LATENT,
    MOE_LAYOUT_GROUPS
};

enum { MOE_LAYOUT_SCHEMES_MAX = 8 }; /* more than one quant_method has */

struct moe_layout {
    const struct moe_checkpoint *checkpoint;
    const struct moe_family *family;
    const char *prefix;        /* "model.layers." */
    const char *module_prefix; /* the same in names of modules, which may have another one */
    struct moe_quant schemes[MOE_LAYOUT_SCHEMES_MAX]; /* of all layers; no two are equal */
    uint8_t scheme_count;
    /* By layer: 1 + the index of a group's scheme; 0: not quantised. */
    uint8_t scheme_of[MOE_MODEL_LAYERS_MAX][MOE_LAYOUT_GROUPS];
};

/* One weight as part of a stored tensor: element (r, c) of the canonical weight [rows, columns] is
 * element base + r * row_step + c * column_step of the byte range [first, first + bytes).
 *
 * A quantised weight has a piece for each of its parts. Row r of the weight is stored row base + r
 * * row_step of the byte range then, and `column_step` is 0. */
struct moe_piece {
    struct moe_checkpoint_tensor at;
    uint64_t first, bytes; /* counted from the start of the tensor */
    size_t rows, columns;  /* of the weight */
    size_t base, row_step, column_step;
    const struct moe_quant *quant; /* NULL: not quantised */
    enum moe_quant_part part;      /* MOE_QUANT_DATA, if not quantised */
    bool again; /* of moe_model__visit_layer: the same range as the last piece of this part */
};

/* Finds the prefix under which the checkpoint stores its layers, and the scheme of each group of
 * matrices of each layer; `quant` is not used later. Errors: TENSOR_MISSING; CONFIG_INVALID (two
 * matrices of a group are stored in two ways); those of moe_quant_config_find. */
struct moe_status moe_layout_open(const struct moe_checkpoint *checkpoint,
                                  const struct moe_config *config,
                                  const struct moe_quant_config *quant,
                                  struct moe_layout *out) MOE_CHECKED;

/* The scheme of a weight, or NULL. */
const struct moe_quant *moe_layout_quant(const struct moe_layout *layout,
                                         const struct moe_layer_spec *spec, enum moe_weight weight);

/* Visits one piece. */
typedef struct moe_status (*moe_piece_visitor)(void *ctx, enum moe_weight weight, uint32_t expert,
                                               const struct moe_piece *piece);

/* Locates all pieces of a weight; `expert` counts for expert weights only. The piece
 * MOE_QUANT_DATA is the last one, and every weight that the layer has has it. Errors:
 * TENSOR_MISSING, TENSOR_INVALID (shape or dtype; two tensors for one part), all by tensor name;
 * those of `visit`.
 */
struct moe_status moe_layout_visit(const struct moe_layout *layout,
                                   const struct moe_layer_spec *spec, enum moe_weight weight,
                                   uint32_t expert, moe_piece_visitor visit, void *ctx) MOE_CHECKED;

/* Locates the table [vocabulary, K] of a layer with router.by_token: the whole tensor. Errors:
 * TENSOR_MISSING, TENSOR_INVALID (shape or dtype). */
struct moe_status moe_layout_token_table(const struct moe_layout *layout,
                                         const struct moe_layer_spec *spec,
                                         struct moe_piece *out) MOE_CHECKED;

/* The name of a weight's tensor as in a checkpoint that is not quantised. The text ends with a
 * zero, cut at `capacity` - 1 bytes. */
void moe_layout_plain_name(const struct moe_layout *layout, const struct moe_layer_spec *spec,
                           enum moe_weight weight, uint32_t expert, char *name, size_t capacity);

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

/* True when the range is the canonical weight, in order, without other elements and not quantised.
 */
bool moe_piece_is_plain(const struct moe_piece *p);
bool moe_piece_same_range(const struct moe_piece *a, const struct moe_piece *b);

#endif
