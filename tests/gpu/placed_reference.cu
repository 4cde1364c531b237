/* SPDX-License-Identifier: Apache-2.0 */
/* Host code; see placed_reference.h. */
#include "placed_reference.h"

#include "cuda/gemm/packed_layout.cuh"

#include <string.h>

namespace
{

struct matrix {
    const moe_weight_format *f;
    const moe_packed_matrix *m;
    struct moe_packed_sizes sizes;
    moe_cuda_packing packing;
    uint32_t rows, columns;
    placed_rows order;
    float global;
};

uint32_t stored_row(placed_rows order, uint32_t row)
{
    return order == PLACED_PLAIN ? row : row / 8 * 16 + row % 8 + (order == PLACED_UP ? 8 : 0);
}

packed::place find(const matrix &x, uint32_t row, uint32_t column)
{
    return packed::find(x.packing, stored_row(x.order, row), column, x.columns);
}

uint32_t element(const matrix &x, uint32_t row, uint32_t column)
{
    const auto *bytes = static_cast<const uint8_t *>(x.m->elements) + row * x.sizes.row_bytes;
    return packed::has_8_bits(x.packing) ? bytes[column]
                                         : bytes[column / 2] >> 4 * (column % 2) & 15;
}

void put_element(const matrix &x, uint32_t row, uint32_t column, uint8_t *entry)
{
    const packed::place at = find(x, row, column);
    const uint32_t bits = element(x, row, column);
    uint32_t word;
    memcpy(&word, entry + at.word, sizeof word);
    if (packed::has_8_bits(x.packing)) {
        word |= bits << (8 * (1 - at.pair) + 16 * at.odd);
    } else if (packed::is_int4(x.packing)) {
        word |= bits << (4 * at.pair + 16 * at.odd);
    } else {
        uint32_t pair[4];
        packed::widen_e2m1(word, pair);
        pair[at.pair] |= ((bits & 8) << 12 | (bits & 7) << 6) << 16 * at.odd;
        word = packed::narrow_e2m1(pair);
    }
    memcpy(entry + at.word, &word, sizeof word);
}

size_t block(const matrix &x, uint32_t row, uint32_t column)
{
    return moe_packed_block(x.f, x.sizes.scale_columns, row, column);
}

/* Four bytes of scales, from `column` on. */
void put_joined(const matrix &x, uint32_t row, uint32_t column, uint8_t *entry)
{
    const packed::place at = find(x, row, column);
    const uint32_t width = packed::scale_columns(x.packing);
    const auto *scales = static_cast<const uint8_t *>(x.m->scales);
    uint32_t bytes[4] = {0, 0, 0, 0};
    for (uint32_t i = 0; i < 4 && column + i * width < x.columns; i++) {
        const uint32_t s = scales[block(x, row, column + i * width)];
        if (x.packing == MOE_CUDA_PACKING_E2M1_E4M3)
            (void)packed::narrow_e4m3(s, &bytes[i]);
        else
            bytes[i] = s + packed::EXPONENT_ADDED;
    }
    const uint32_t word = packed::join_bytes(bytes, packed::joined_shift(x.packing));
    const uint32_t words = packed::COLUMNS / (4 * width);
    memcpy(entry + at.scales + (at.row * words + at.column / (4 * width)) * 4, &word, sizeof word);
    if (x.packing == MOE_CUDA_PACKING_E2M1_E4M3 && at.row % 8 == 0)
        memcpy(entry + at.scales + packed::global_offset(at.row), &x.global, sizeof x.global);
}

void put_scale(const matrix &x, uint32_t row, uint32_t column, uint8_t *entry)
{
    const packed::place at = find(x, row, column);
    uint8_t *scales = entry + at.scales;
    const size_t number = block(x, row, column);
    const float s = moe_scale_to_f32(x.f, x.m->scales, number, 1);
    const uint8_t zero = x.m->zeros != nullptr ? x.m->zeros[number] : 8;
    if (packed::scales_product(x.packing)) {
        memcpy(scales + (at.row >> packed::row_shift(x.packing)) * 4, &s, sizeof s);
        return;
    }
    if (x.packing == MOE_CUDA_PACKING_INT4_ROW) {
        memcpy(scales + at.row * 4, &s, sizeof s);
    } else { /* exact: the scale is a bf16 */
        const float scaled = s * packed::INT4_SCALED;
        memcpy(scales + (at.row * 4 + at.column / 32) * 2,
               reinterpret_cast<const char *>(&scaled) + 2, 2);
    }
    if (x.packing != MOE_CUDA_PACKING_INT4_GROUP)
        scales[packed::zero_offset(x.packing, at.row, at.column)] = zero;
}

} // namespace

extern "C" void placed_reference(const moe_weight_format *f, const moe_packed_matrix *m,
                                 uint32_t rows, uint32_t columns, placed_rows order, float global,
                                 uint8_t *entry)
{
    matrix x = {f, m, {}, moe_cuda_packing_of(f), rows, columns, order, global};
    (void)moe_packed_sizes(f, rows, columns, &x.sizes); /* the matrix exists */
    const bool joins = packed::joins_scales(x.packing);
    const uint32_t width = packed::scale_columns(x.packing) * (joins ? 4 : 1);
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t c = 0; c < columns; c++)
            put_element(x, r, c, entry);
        for (uint32_t c = 0; c < columns; c += width)
            if (joins)
                put_joined(x, r, c, entry);
            else
                put_scale(x, r, c, entry);
    }
}
