/* SPDX-License-Identifier: Apache-2.0 */
/* A quantised matrix [rows, columns] in the form that backends take.
 *
 * One form for each encoding, whatever the checkpoint has: daemon/quant brings all schemes into it,
 * without changing a value. Three arrays in C order, without gaps, little-endian, any alignment:
 *
 *   elements  [rows, row_bytes]. F8E4M3: a byte each. E2M1, INT4: two to a byte, the even column in
 *             the low four bits; after an odd number of columns the last four bits are 0
 *   scales    [scale_rows, scale_columns] of the format's type: one for each block of elements
 *   zeros     [scale_rows, scale_columns] bytes 0..16; only with zero points
 *
 * The value of an element, in single precision, each step rounded to nearest even: the scale (E4M3:
 * times or divided by `global`), then (element - zero point) times scale. */
#ifndef MOE_PACKED_MATRIX_H
#define MOE_PACKED_MATRIX_H

#include "base/size.h"
#include "moe/numbers.h"
#include "moe/types.h"
#include "moe/weight_format.h"

struct moe_packed_matrix {
    const void *elements, *scales;
    const uint8_t *zeros; /* NULL: none */
    float global;         /* with MOE_SCALE_E4M3 */
};

struct moe_packed_sizes {
    size_t row_bytes; /* of a row of elements */
    size_t scale_rows, scale_columns;
    size_t elements, scales, zeros; /* bytes of each array */
    size_t bytes;                   /* of all three */
};

static inline size_t moe_scale_bytes(enum moe_scale_type t)
{
    return t == MOE_SCALE_F32 ? 4 : t == MOE_SCALE_BF16 || t == MOE_SCALE_F16 ? 2 : 1;
}

/* Blocks along a dimension; `block` 0: one. */
static inline size_t moe_format_blocks(size_t elements, uint32_t block)
{
    return block == 0 ? elements != 0 : elements / block + (elements % block != 0);
}

/* False, and all zero, if a size overflows. The format is not MOE_ENC_NONE. */
static inline bool moe_packed_sizes(const struct moe_weight_format *f, size_t rows, size_t columns,
                                    struct moe_packed_sizes *out)
{
    struct moe_packed_sizes s;
    size_t blocks;
    memset(out, 0, sizeof *out);
    s.row_bytes = moe_encoding_traits(f->encoding).bits == 4 ? columns / 2 + columns % 2 : columns;
    s.scale_rows = moe_format_blocks(rows, f->block_rows);
    s.scale_columns = moe_format_blocks(columns, f->block_columns);
    if (!moe_size_mul(rows, s.row_bytes, &s.elements) ||
        !moe_size_mul(s.scale_rows, s.scale_columns, &blocks) ||
        !moe_size_mul(blocks, moe_scale_bytes(f->scale), &s.scales))
        return false;
    s.zeros = f->zero_points ? blocks : 0;
    if (!moe_size_add(s.elements, s.scales, &s.bytes) || !moe_size_add(s.bytes, s.zeros, &s.bytes))
        return false;
    *out = s;
    return true;
}

/* The number of the block of element (row, column) among `scale_columns` blocks of a row. */
static inline size_t moe_packed_block(const struct moe_weight_format *f, size_t scale_columns,
                                      size_t row, size_t column)
{
    size_t r = f->block_rows == 0 ? 0 : row / f->block_rows;
    size_t c = f->block_columns == 0 ? 0 : column / f->block_columns;
    return r * scale_columns + c;
}

/* Number `i` of an array of scales, with `global`. */
static inline float moe_scale_to_f32(const struct moe_weight_format *f, const void *scales,
                                     size_t i, float global)
{
    const char *bytes = (const char *)scales + i * moe_scale_bytes(f->scale);
    uint16_t half;
    float s;
    switch (f->scale) {
    case MOE_SCALE_F32: memcpy(&s, bytes, sizeof s); return s;
    case MOE_SCALE_E8M0: return moe_e8m0_to_f32((uint8_t)*bytes);
    case MOE_SCALE_E4M3:
        s = moe_e4m3_to_f32((uint8_t)*bytes);
        return f->global_divides ? s / global : s * global;
    default: break;
    }
    memcpy(&half, bytes, sizeof half);
    return f->scale == MOE_SCALE_BF16 ? moe_bf16_to_f32(half) : moe_f16_to_f32(half);
}

/* The value of a byte (F8E4M3) or of four bits, without its scale. `zero`: its zero point. */
static inline float moe_element_to_f32(enum moe_encoding e, uint8_t bits, uint32_t zero)
{
    if (e == MOE_ENC_F8E4M3)
        return moe_e4m3_to_f32(bits);
    return e == MOE_ENC_E2M1 ? moe_e2m1_to_f32(bits) : (float)((int)(bits & 15) - (int)zero);
}

/* The value of one element. `sizes`: those of the matrix. */
static inline float moe_packed_value(const struct moe_weight_format *f,
                                     const struct moe_packed_sizes *sizes,
                                     const struct moe_packed_matrix *m, size_t row, size_t column)
{
    size_t block = moe_packed_block(f, sizes->scale_columns, row, column);
    const uint8_t *bytes = (const uint8_t *)m->elements + row * sizes->row_bytes;
    bool whole = moe_encoding_traits(f->encoding).bits == 8;
    uint8_t bits = bytes[whole ? column : column / 2];
    if (!whole)
        bits = (uint8_t)(bits >> 4 * (column % 2) & 15);
    float scale = moe_scale_to_f32(f, m->scales, block, m->global);
    return moe_element_to_f32(f->encoding, bits, m->zeros != NULL ? m->zeros[block] : 8) * scale;
}

#endif
