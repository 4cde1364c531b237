/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of tokens on their way to routed experts, between slots and in memory.
 *
 * Experts in W8A8 (weight_format.h) quantise the rows that gate and up multiply. A row is quantised
 * once, on the token's slot, and travels so: about half the bytes of BF16. The result has the same
 * bits wherever it is quantised. Other rows travel in the step's dtype. So do those with input
 * weighting, because each expert's row is quantised after its own weight.
 *
 * A quantised row:
 *   0          W values q of F8E4M3, one byte each; W = moe_expert_width
 *   scales_at  [groups] F32, the scales s
 *   bytes
 *
 * Both offsets are the end of what lies before, rounded up to a multiple of 16. The padding is
 * zero. */
#ifndef MOE_ROW_FORMAT_H
#define MOE_ROW_FORMAT_H

#include "moe/layer_spec.h"

#include <stddef.h>

struct moe_row_format {
    bool quantised;         /* else W values of the step's dtype, and the next three are 0 */
    uint32_t group, groups; /* values of a group, the last may have fewer; groups of a row */
    size_t scales_at;
    size_t bytes; /* of a row; at most those of W values of the dtype */
};

/* Of rows for the layer's routed experts in a forward step. */
static inline struct moe_row_format moe_row_format(const struct moe_layer_spec *spec,
                                                   enum moe_dtype dtype)
{
    const struct moe_weight_format *f = &spec->routed_format;
    const uint32_t width = moe_expert_width(spec);
    const struct moe_row_format plain = {false, 0, 0, 0, width * moe_dtype_bytes(dtype)};
    if (f->encoding == MOE_ENC_NONE || f->activations == MOE_ACTIVATIONS_PLAIN ||
        spec->weighting == MOE_WEIGHT_INPUT || width == 0)
        return plain;
    struct moe_row_format r = {true, moe_activation_group(f, width), 0, 0, 0};
    r.groups = (width - 1) / r.group + 1;
    r.scales_at = ((size_t)width + 15) / 16 * 16;
    r.bytes = (r.scales_at + r.groups * sizeof(float) + 15) / 16 * 16;
    return r.bytes <= plain.bytes ? r : plain;
}

#endif
