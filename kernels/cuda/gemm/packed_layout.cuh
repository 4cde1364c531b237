/* SPDX-License-Identifier: Apache-2.0 */
/* Where a block of a packed matrix (packed.h) has each element and each scale: the one definition
 * that placing, multiplying and reading single elements share.
 *
 * A block has two slabs of 64 rows, one for each consumer. Thread t of a consumer holds rows
 * 16 (t / 32) + t % 32 / 4 and the one 8 below, of each 16 columns those at 2 (t % 4), the next,
 * and both of them 8 further: a "pair" is two elements that lie next to each other in a row.
 *
 *   8 bits   [slab][4 groups of 32 columns][thread][2 groups of 16][row, row + 8] words of two
 *            pairs: the first in bytes 1 and 3, the second (8 columns further) in bytes 0 and 2
 *   4 bits   [slab][2 groups of 64 columns][thread][2 groups of 32][row, row + 8] words of four
 *            pairs, in the order of their columns; see ggemm_packed_convert.cuh for their bits
 *
 * Scales follow: fp32 [16] or [128] for rows, or bytes [128][4]. A byte is the exponent of a bf16
 * that multiplies both the scale and the bias of an element's exponent into it, but for a constant
 * power of two, which the sum is multiplied by: so all of them are in range. */
#ifndef MOE_CUDA_PACKED_LAYOUT_CUH
#define MOE_CUDA_PACKED_LAYOUT_CUH

#include "cuda/gemm/packed.h"

#include <stdint.h>

namespace packed
{

constexpr uint32_t ROWS = MOE_CUDA_PACKED_ROWS, COLUMNS = MOE_CUDA_PACKED_COLUMNS;
constexpr uint32_t SLAB_ROWS = 64, THREADS = 128;

__host__ __device__ constexpr bool has_8_bits(moe_cuda_packing p)
{
    return p == MOE_CUDA_PACKING_F8_BLOCK || p == MOE_CUDA_PACKING_F8_ROW ||
           p == MOE_CUDA_PACKING_F8_E8M0;
}

__host__ __device__ constexpr bool scales_product(moe_cuda_packing p)
{
    return p == MOE_CUDA_PACKING_F8_BLOCK || p == MOE_CUDA_PACKING_F8_ROW;
}

__host__ __device__ constexpr uint32_t element_bytes(moe_cuda_packing p)
{
    return has_8_bits(p) ? ROWS * COLUMNS : ROWS * COLUMNS / 2;
}

__host__ __device__ constexpr uint32_t scale_bytes(moe_cuda_packing p)
{
    return p == MOE_CUDA_PACKING_F8_BLOCK ? ROWS / 8 * 4 : ROWS * 4;
}

constexpr uint32_t MAX_SCALE_BYTES = ROWS * 4;

__host__ __device__ constexpr uint32_t block_bytes(moe_cuda_packing p)
{
    return element_bytes(p) + scale_bytes(p);
}

/* A scale 2^(s - 127) is stored as s + 62, so s is at most 192: 2^65. */
constexpr uint32_t EXPONENT_ADDED = 62, MAX_EXPONENT = 254 - EXPONENT_ADDED;

/* What remains for the sum, with the bias 2^120 or 2^126 of the elements' exponent. */
__host__ __device__ constexpr float sum_scale(moe_cuda_packing p)
{
    return has_8_bits(p) ? 0x1p58f : 0x1p64f;
}

/* Rows that share an fp32 scale, as a shift. */
__host__ __device__ constexpr uint32_t row_shift(moe_cuda_packing p)
{
    return p == MOE_CUDA_PACKING_F8_BLOCK ? 3 : 0;
}

/* The thread that holds `row` (0..127, without its slab), at column 2 * quad of each 8. */
__host__ __device__ constexpr uint32_t thread_of(uint32_t row, uint32_t quad)
{
    return row % SLAB_ROWS / 16 * 32 + row % 8 * 4 + quad;
}

/* Byte offset of the word with row `row` and 16 (8 bits) or 32 (4 bits) columns, number `group` of
 * the block, of a thread with `quad`. */
__host__ __device__ constexpr uint32_t word_offset(uint32_t row, uint32_t group, uint32_t quad,
                                                   uint32_t loads)
{
    return ((row / SLAB_ROWS * loads + group / 2) * THREADS + thread_of(row, quad)) * 16 +
           (group % 2 * 2 + row / 8 % 2) * 4;
}

/* Bits of a half word with four E2M1: of the sign, and the lowest of the magnitude, of each pair.
 * The converter needs no shift for the first pair, one for the second. */
__host__ __device__ constexpr uint32_t sign_bit(uint32_t pair)
{
    return pair == 0 ? 15 : pair == 1 ? 12 : pair == 2 ? 14 : 13;
}

__host__ __device__ constexpr uint32_t magnitude_bit(uint32_t pair)
{
    return pair == 0 ? 6 : pair == 1 ? 3 : pair == 2 ? 9 : 0;
}

/* Where the word with an element is, and its place there. */
struct place {
    size_t word;    /* byte offset in the entry */
    size_t scales;  /* byte offset of the block's scales */
    uint32_t group; /* of 16 (8 bits) or 32 (4 bits) columns in the block */
    uint32_t pair;  /* in the word */
    uint32_t odd;   /* the second element of its pair */
    uint32_t row;   /* in the block */
};

__host__ __device__ inline place find(moe_cuda_packing p, uint32_t row, uint32_t column,
                                      uint32_t columns)
{
    const uint32_t steps = (columns + COLUMNS - 1) / COLUMNS;
    const size_t block = (size_t(row / ROWS) * steps + column / COLUMNS) * block_bytes(p);
    const uint32_t wide = has_8_bits(p) ? 16 : 32, quad = column % 8 / 2;
    place at = {
        0,         block + element_bytes(p), column % COLUMNS / wide, column % wide / 8, column % 2,
        row % ROWS};
    at.word = block + word_offset(at.row, at.group, quad, has_8_bits(p) ? 4 : 2);
    return at;
}

#ifdef __CUDACC__
/* The value of one element; for code that need not be fast. */
__device__ inline float value(moe_cuda_packing p, const uint8_t *entry, uint32_t row,
                              uint32_t column, uint32_t columns)
{
    const place at = find(p, row, column, columns);
    const uint32_t word = *reinterpret_cast<const uint32_t *>(entry + at.word);
    const uint8_t *scales = entry + at.scales;
    float v;
    if (has_8_bits(p)) {
        const uint32_t byte = word >> (8 * (1 - at.pair) + 16 * at.odd) & 0xff;
        v = __uint_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
    } else {
        const uint32_t half = word >> 16 * at.odd;
        v = __uint_as_float((half >> sign_bit(at.pair) & 1) << 31 |
                            (half >> magnitude_bit(at.pair) & 7) << 22) *
            0x1p126f;
    }
    if (scales_product(p))
        return v * reinterpret_cast<const float *>(scales)[at.row >> row_shift(p)];
    const int exponent = int(scales[at.row * 4 + column % COLUMNS / 32]) - int(EXPONENT_ADDED);
    return ldexpf(v, exponent - 127);
}
#endif

} // namespace packed

#endif
