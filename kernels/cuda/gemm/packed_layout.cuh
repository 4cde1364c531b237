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
 *            pairs, in the order of their columns. INT4: pair p in bits 4 p and 16 + 4 p;
 *            E2M1: see widen_e2m1
 *
 *   W8A8     [128 rows][128 columns] bytes, as the copy engine's 128-byte swizzle has them: 16-byte
 *            piece c of row r is at piece c ^ (r % 8), so that the instruction reads them as they
 *            are
 *
 * Scales follow:
 *
 *   F8_BLOCK, F8_ROW     fp32 [16] or [128] for rows; W8A8_BLOCK and W8A8_ROW alike
 *   F8_E8M0, E2M1_E8M0   words [128] of four bytes (join_bytes). A byte is the exponent of a bf16
 *                        that multiplies both the scale and the bias of an element's exponent into
 *                        it
 *   E2M1_E4M3            words [128][2] of four bytes of narrow_e4m3, then the matrix's fp32 scale
 *                        [16], for 8 rows each
 *   INT4_ROW             fp32 [128], then zero points, bytes [128]
 *   INT4_GROUP           bf16 [128][4], times 2^100
 *   INT4_GROUP_ZEROS     the same, then zero points, bytes [128][4]
 *
 * Operands are values times a constant power of two, so that all of them are in bf16's range. The
 * sum is multiplied by the rest (sum_scale). */
#ifndef MOE_CUDA_PACKED_LAYOUT_CUH
#define MOE_CUDA_PACKED_LAYOUT_CUH

#include "cuda/gemm/packed.h"

#include <math.h>
#include <stdint.h>

namespace packed
{

constexpr uint32_t ROWS = MOE_CUDA_PACKED_ROWS, COLUMNS = MOE_CUDA_PACKED_COLUMNS;
constexpr uint32_t SLAB_ROWS = 64, THREADS = 128;

__host__ __device__ constexpr bool has_8_bits(moe_cuda_packing p)
{
    return p == MOE_CUDA_PACKING_F8_BLOCK || p == MOE_CUDA_PACKING_F8_ROW ||
           p == MOE_CUDA_PACKING_F8_E8M0 || p == MOE_CUDA_PACKING_W8A8_BLOCK ||
           p == MOE_CUDA_PACKING_W8A8_ROW;
}

__host__ __device__ constexpr bool in_rows(moe_cuda_packing p)
{
    return p == MOE_CUDA_PACKING_W8A8_BLOCK || p == MOE_CUDA_PACKING_W8A8_ROW;
}

/* 8 rows share an fp32 scale. */
__host__ __device__ constexpr bool scales_8_rows(moe_cuda_packing p)
{
    return p == MOE_CUDA_PACKING_F8_BLOCK || p == MOE_CUDA_PACKING_W8A8_BLOCK;
}

__host__ __device__ constexpr bool scales_product(moe_cuda_packing p)
{
    return scales_8_rows(p) || p == MOE_CUDA_PACKING_F8_ROW || p == MOE_CUDA_PACKING_W8A8_ROW;
}

__host__ __device__ constexpr uint32_t element_bytes(moe_cuda_packing p)
{
    return has_8_bits(p) ? ROWS * COLUMNS : ROWS * COLUMNS / 2;
}

__host__ __device__ constexpr bool is_int4(moe_cuda_packing p)
{
    return p == MOE_CUDA_PACKING_INT4_ROW || p == MOE_CUDA_PACKING_INT4_GROUP ||
           p == MOE_CUDA_PACKING_INT4_GROUP_ZEROS;
}

__host__ __device__ constexpr bool joins_scales(moe_cuda_packing p)
{
    return p == MOE_CUDA_PACKING_F8_E8M0 || p == MOE_CUDA_PACKING_E2M1_E8M0 ||
           p == MOE_CUDA_PACKING_E2M1_E4M3;
}

/* Columns of a row that share a scale, and a zero point. */
__host__ __device__ constexpr uint32_t scale_columns(moe_cuda_packing p)
{
    return scales_product(p) || p == MOE_CUDA_PACKING_INT4_ROW ? COLUMNS
           : p == MOE_CUDA_PACKING_E2M1_E4M3                   ? 16
                                                               : 32;
}

/* Lowest bit in a bf16 of a byte that is joined with three others. */
__host__ __device__ constexpr uint32_t joined_shift(moe_cuda_packing p)
{
    return p == MOE_CUDA_PACKING_E2M1_E4M3 ? 4 : 7;
}

/* Four bytes as one word. A mask leaves the first two, each in its place in a bf16; a rotation left
 * by 8 and the same mask, the others. */
__host__ __device__ constexpr uint32_t join_bytes(const uint32_t (&bytes)[4], uint32_t shift)
{
    const uint32_t second = bytes[2] << shift | bytes[3] << (shift + 16);
    return bytes[0] << shift | bytes[1] << (shift + 16) | second >> 8 | second << 24;
}

__host__ __device__ constexpr uint32_t joined_byte(uint32_t word, uint32_t i, uint32_t shift)
{
    return (i < 2 ? word : word << 8 | word >> 24) >> (shift + i % 2 * 16) & 0xff;
}

/* Byte offsets in a block's scales: of the scale of E2M1's matrix for 8 rows, of a zero point. */
__host__ __device__ constexpr uint32_t global_offset(uint32_t row)
{
    return ROWS * 8 + row / 8 * 4;
}

__host__ __device__ constexpr uint32_t zero_offset(moe_cuda_packing p, uint32_t row,
                                                   uint32_t column)
{
    return p == MOE_CUDA_PACKING_INT4_ROW ? ROWS * 4 + row : ROWS * 8 + row * 4 + column / 32;
}

__host__ __device__ constexpr uint32_t scale_bytes(moe_cuda_packing p)
{
    return scales_8_rows(p)                         ? ROWS / 8 * 4
           : p == MOE_CUDA_PACKING_E2M1_E4M3        ? global_offset(ROWS)
           : p == MOE_CUDA_PACKING_INT4_ROW         ? zero_offset(p, ROWS, 0)
           : p == MOE_CUDA_PACKING_INT4_GROUP       ? ROWS * 8
           : p == MOE_CUDA_PACKING_INT4_GROUP_ZEROS ? zero_offset(p, ROWS, 0)
                                                    : ROWS * 4;
}

/* The largest of the packings that have the kernel of `p`. */
__host__ __device__ constexpr uint32_t max_scale_bytes(moe_cuda_packing p)
{
    return scales_product(p) ? ROWS * 4 : scale_bytes(p);
}

__host__ __device__ constexpr uint32_t block_bytes(moe_cuda_packing p)
{
    return element_bytes(p) + scale_bytes(p);
}

/* A scale 2^(s - 127) is stored as s + 62, so s is at most 192: 2^65. */
constexpr uint32_t EXPONENT_ADDED = 62, MAX_EXPONENT = 254 - EXPONENT_ADDED;

/* INT4: scales are multiplied by 2^100, elements are multiples of 2^-133, the smallest bf16. */
constexpr float INT4_SCALED = 0x1p100f, INT4_MAX_SCALE = 0x1p27f;

/* What remains for the sum, with the bias 2^120 or 2^126 of the elements' exponent. */
__host__ __device__ constexpr float sum_scale(moe_cuda_packing p)
{
    return is_int4(p)                        ? 0x1p33f
           : p == MOE_CUDA_PACKING_E2M1_E4M3 ? 0x1p20f
           : has_8_bits(p)                   ? 0x1p58f
                                             : 0x1p64f;
}

/* Rows that share an fp32 scale, as a shift. */
__host__ __device__ constexpr uint32_t row_shift(moe_cuda_packing p)
{
    return scales_8_rows(p) ? 3 : 0;
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

/* The same for W8A8: of the word with columns `column` rounded down to 4, .. + 3. */
__host__ __device__ constexpr uint32_t row_offset(uint32_t row, uint32_t column)
{
    return row * COLUMNS + ((column / 16 ^ row % 8) * 16) + column % 16 / 4 * 4;
}

/* Four E2M1 pairs of a word, as bf16 times 2^-126. A bf16 needs sign and magnitude in the bits of
 * BITS. No four shifts of one word bring 32 bits there, so the fourth pair is the exclusive or of
 * two shifts. */
constexpr uint32_t E2M1_BITS = 0x81c081c0;

__host__ __device__ __forceinline__ void widen_e2m1(uint32_t word, uint32_t (&pair)[4])
{
    pair[0] = word & E2M1_BITS;
    pair[1] = word << 4 & E2M1_BITS;
    pair[2] = (word << 10 | word >> 22) & E2M1_BITS;
    pair[3] = (word << 6 ^ word >> 2) & E2M1_BITS;
}

/* The word that widen_e2m1 makes these pairs of. Bits 0, 1, 9 and 10 of both halves are for pair 3;
 * all others come from one of the first three pairs. */
__host__ __device__ inline uint32_t narrow_e2m1(const uint32_t (&pair)[4])
{
    uint32_t word = pair[0] | pair[1] >> 4 | pair[2] >> 10 | pair[2] << 22;
    word |= (pair[3] >> 6 ^ word >> 8) & 0x00010001;  /* bit 6 of the pair is bit 0 ^ bit 8 */
    word |= (pair[3] << 2 ^ word << 8) & 0x04000400;  /* bit 8: bit 2 ^ bit 10 */
    word |= pair[3] >> 6 & 0x02000000;                /* bit 31: bit 25 */
    word |= (pair[3] >> 6 ^ word >> 8) & 0x00020000;  /* bit 23: bit 17 ^ bit 25 */
    word |= (pair[3] >> 6 ^ word >> 8) & 0x00000200;  /* bit 15: bit 9 ^ bit 17 */
    return word | ((pair[3] >> 6 ^ word >> 8) & 0x2); /* bit 7: bit 1 ^ bit 9 */
}

/* An E4M3 scale: 5 bits of exponent, from that of the smallest subnormal, 2^-9, on, and 3 of
 * mantissa. False: it is zero, negative or NaN. */
__host__ __device__ inline bool narrow_e4m3(uint32_t byte, uint32_t *out)
{
    const uint32_t mantissa = byte & 7, exponent = byte >> 3 & 15;
    *out = exponent != 0  ? (exponent + 2) << 3 | mantissa
           : mantissa < 2 ? 0
           : mantissa < 4 ? 1 << 3 | (mantissa & 1) << 2
                          : 2 << 3 | (mantissa & 3) << 1;
    return byte != 0 && byte < 0x7f;
}

/* Where the word with an element is, and its place there. */
struct place {
    size_t word;          /* byte offset in the entry */
    size_t scales;        /* byte offset of the block's scales */
    uint32_t group;       /* of 16 (8 bits) or 32 (4 bits) columns in the block */
    uint32_t pair;        /* in the word; W8A8: that with the same byte */
    uint32_t odd;         /* the second element of its pair */
    uint32_t row, column; /* in the block */
};

__host__ __device__ inline place find(moe_cuda_packing p, uint32_t row, uint32_t column,
                                      uint32_t columns)
{
    const uint32_t steps = (columns + COLUMNS - 1) / COLUMNS;
    const size_t block = (size_t(row / ROWS) * steps + column / COLUMNS) * block_bytes(p);
    const uint32_t wide = has_8_bits(p) ? 16 : 32, quad = column % 8 / 2;
    place at = {0,
                block + element_bytes(p),
                column % COLUMNS / wide,
                column % wide / 8,
                column % 2,
                row % ROWS,
                column % COLUMNS};
    if (in_rows(p)) {
        at.word = block + row_offset(at.row, column % COLUMNS);
        at.pair = 1 - column % 2;
        at.odd = column % 4 / 2;
        return at;
    }
    at.word = block + word_offset(at.row, at.group, quad, has_8_bits(p) ? 4 : 2);
    return at;
}

#ifdef __CUDACC__
__device__ inline float value_8_bits(uint32_t word, const place &at)
{
    const uint32_t byte = word >> (8 * (1 - at.pair) + 16 * at.odd) & 0xff;
    return __uint_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
}

__device__ inline float value_e2m1(uint32_t word, const place &at)
{
    uint32_t pair[4];
    widen_e2m1(word, pair);
    return __uint_as_float(pair[at.pair] >> 16 * at.odd << 16) * 0x1p126f;
}

/* The value of one element; for code that need not be fast. */
__device__ inline float value(moe_cuda_packing p, const uint8_t *entry, uint32_t row,
                              uint32_t column, uint32_t columns)
{
    const place at = find(p, row, column, columns);
    const uint32_t word = *reinterpret_cast<const uint32_t *>(entry + at.word);
    const uint8_t *scales = entry + at.scales;
    const auto *f32 = reinterpret_cast<const float *>(scales);
    const auto *words = reinterpret_cast<const uint32_t *>(scales);
    if (is_int4(p)) {
        const bool zeros = p != MOE_CUDA_PACKING_INT4_GROUP;
        const int zero = zeros ? scales[zero_offset(p, at.row, at.column)] : 8;
        const float q = float(int(word >> (4 * at.pair + 16 * at.odd) & 15) - zero);
        if (p == MOE_CUDA_PACKING_INT4_ROW)
            return q * f32[at.row];
        const uint32_t s = reinterpret_cast<const uint16_t *>(scales)[at.row * 4 + at.column / 32];
        return q * (__uint_as_float(s << 16) / INT4_SCALED);
    }
    const float v = has_8_bits(p) ? value_8_bits(word, at) : value_e2m1(word, at);
    if (scales_product(p))
        return v * f32[at.row >> row_shift(p)];
    if (p == MOE_CUDA_PACKING_E2M1_E4M3) {
        const uint32_t s =
            joined_byte(words[at.row * 2 + at.column / 64], at.column / 16 % 4, joined_shift(p));
        const float global = *reinterpret_cast<const float *>(scales + global_offset(at.row));
        return v * (__uint_as_float((s << 20) + (118 << 23)) * global);
    }
    const uint32_t s = joined_byte(words[at.row], at.column / 32, joined_shift(p));
    return ldexpf(v, int(s) - int(EXPONENT_ADDED) - 127);
}
#endif

} // namespace packed

#endif
