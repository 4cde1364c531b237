/* SPDX-License-Identifier: Apache-2.0 */
/* The number format of stored weights: plain data.
 *
 * `moe_dtype` says what tokens, answers and weights without a format have. A weight format says
 * what a quantised matrix [rows, columns] of a checkpoint holds: elements of few bits, with a scale
 * for each block of them. A block never crosses the matrix: those at its lower and right edge may
 * be smaller. The value of an element is
 *
 *   (element - zero point) * scale          integers
 *   element * scale                         floats
 *
 * A format also says whether a product with the matrix quantises the rows that it multiplies.
 *
 * daemon/quant/README.md says which checkpoints have which format. */
#ifndef MOE_WEIGHT_FORMAT_H
#define MOE_WEIGHT_FORMAT_H

#include <stdbool.h>
#include <stdint.h>

/* Of one element. */
enum moe_encoding {
    MOE_ENC_NONE,   /* not quantised */
    MOE_ENC_F8E4M3, /* sign, 4 bits of exponent, 3 of mantissa; no infinity, 0x7f and 0xff are NaN
                     */
    MOE_ENC_E2M1,   /* sign, 2 bits of exponent, 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 */
    MOE_ENC_INT4,   /* 0..15; without zero points the zero is 8 */
    MOE_ENC_COUNT
};

/* Of one scale. */
enum moe_scale_type {
    MOE_SCALE_F32,
    MOE_SCALE_BF16,
    MOE_SCALE_F16,
    MOE_SCALE_E8M0, /* 2^(byte - 127); 255 is NaN */
    MOE_SCALE_E4M3, /* F8E4M3, times (or divided by) one F32 of the whole matrix */
    MOE_SCALE_COUNT
};

/* The rows x that F8E4M3 matrices multiply: tokens for gate and up, hidden rows for down.
 * Weight-only formats (W8A16, W4A16) use them as they are.
 *
 * W8A8 quantises them first. All steps are single precision, rounded to nearest even. The inputs of
 * one block of the matrix (`block_columns`, the last may have fewer; 0: all) are one group:
 *
 *   s = max(largest |x| of the group, 1e-10) / 448;  F8_POW2: rounded up to a power of two
 *   q = x / s, rounded to F8E4M3, ties to even; never above 448
 *   y = sum over blocks of  (sum over the block of q * element) * (s * scale)
 *
 * With input weighting, x is the token times its weight, rounded. A NaN in x makes all of y NaN,
 * and so does an infinity. */
enum moe_activation_format {
    MOE_ACTIVATIONS_PLAIN,
    MOE_ACTIVATIONS_F8,      /* W8A8 */
    MOE_ACTIVATIONS_F8_POW2, /* W8A8, "ue8m0" */
    MOE_ACTIVATIONS_COUNT
};

struct moe_weight_format {
    enum moe_encoding encoding;
    uint32_t block_rows, block_columns; /* elements that share a scale; 0: all of the matrix */
    enum moe_scale_type scale;
    bool zero_points;    /* INT4: each block has a zero point, 0..16 */
    bool global_divides; /* MOE_SCALE_E4M3: the scale is scale / global, not scale * global */
    enum moe_activation_format activations;
};

/* Whether layers of a device may have matrices of a format, which stay quantised in memory. Any
 * thread. */
struct moe_device;
typedef bool (*moe_computes_fn)(const struct moe_device *, const struct moe_weight_format *);

/* Inputs of a group of activations, in rows of `columns`. */
static inline uint32_t moe_activation_group(const struct moe_weight_format *f, uint32_t columns)
{
    return f->block_columns == 0 || f->block_columns > columns ? columns : f->block_columns;
}

struct moe_encoding_traits {
    const char *name;
    uint32_t bits; /* of one element */
    float
        largest; /* magnitude of an element after its zero point; times a scale it must be finite */
};

static inline struct moe_encoding_traits moe_encoding_traits(enum moe_encoding e)
{
    static const struct moe_encoding_traits none = {"none", 0, 0}, f8e4m3 = {"F8E4M3", 8, 448},
                                            e2m1 = {"E2M1", 4, 6}, int4 = {"INT4", 4, 16};
    switch (e) {
    case MOE_ENC_F8E4M3: return f8e4m3;
    case MOE_ENC_E2M1: return e2m1;
    case MOE_ENC_INT4: return int4;
    default: return none;
    }
}

#endif
