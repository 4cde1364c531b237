/* SPDX-License-Identifier: Apache-2.0 */
/* Lays out packed weights; see packed.h. One word or scale per thread and iteration: far faster
 * than the bus that delivers the weights. */
#include "cuda/gemm/packed.h"

#include "cuda/core/check.h"
#include "cuda/core/load.h"
#include "cuda/gemm/packed_layout.cuh"

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace
{

constexpr unsigned THREADS = 256, MAX_BLOCKS = 1024;

unsigned blocks_for(size_t threads)
{
    const size_t blocks = (threads + THREADS - 1) / THREADS;
    return blocks < MAX_BLOCKS ? unsigned(blocks) : MAX_BLOCKS;
}

__device__ uint32_t stored_row(const moe_cuda_packed_weight &w, uint32_t row)
{
    return w.interleaved ? row / 8 * 16 + row % 8 + w.offset : row;
}

__device__ uint32_t byte_at(const uint8_t *row, uint32_t c, uint32_t columns, bool *nan)
{
    const uint32_t byte = c < columns ? row[c] : 0;
    *nan = *nan || (byte & 0x7f) == 0x7f;
    return byte;
}

/* Bytes 1, 3 and 0, 2 of a word: columns c, c + 1 and c + 8, c + 9. */
__device__ uint32_t gather_8_bits(const uint8_t *row, uint32_t c, uint32_t columns, bool *nan)
{
    uint32_t word = 0;
    for (uint32_t i = 0; i < 4; i++)
        word |= byte_at(row, c + i / 2 * 8 + i % 2, columns, nan)
                << (8 * (1 - i / 2) + 16 * (i % 2));
    return word;
}

/* Columns c, .. c + 3. */
__device__ uint32_t gather_row(const uint8_t *row, uint32_t c, uint32_t columns, bool *nan)
{
    uint32_t word = 0;
    for (uint32_t i = 0; i < 4; i++)
        word |= byte_at(row, c + i, columns, nan) << 8 * i;
    return word;
}

/* Elements c, c + 1; c + 8, c + 9; ... of a row. */
__device__ uint32_t gather_int4(const uint8_t *row, uint32_t c, uint32_t columns)
{
    uint32_t word = 0;
    for (uint32_t pair = 0; pair < 4; pair++) {
        const uint32_t at = c + 8 * pair, byte = at < columns ? row[at / 2] : 0;
        word |= (byte & 15) << 4 * pair | byte >> 4 << (4 * pair + 16);
    }
    return word;
}

__device__ uint32_t gather_e2m1(const uint8_t *row, uint32_t c, uint32_t columns)
{
    uint32_t pair[4];
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t at = c + 8 * i, byte = at < columns ? row[at / 2] : 0;
        const uint32_t both = (byte & 15) | byte >> 4 << 16;
        pair[i] = (both & 0x00080008) << 12 | (both & 0x00070007) << 6;
    }
    return packed::narrow_e2m1(pair);
}

__device__ uint32_t gather(moe_cuda_packing p, const uint8_t *row, uint32_t c, uint32_t columns,
                           bool *nan)
{
    return packed::in_rows(p)      ? gather_row(row, c, columns, nan)
           : packed::has_8_bits(p) ? gather_8_bits(row, c, columns, nan)
           : packed::is_int4(p)    ? gather_int4(row, c, columns)
                                   : gather_e2m1(row, c, columns);
}

__global__ void place_kernel(const moe_cuda_packed_weight w, const uint8_t *__restrict__ src,
                             uint32_t first, uint32_t count)
{
    const bool wide = packed::has_8_bits(w.packing);
    const uint32_t width = wide ? 16 : 32, words = (w.columns + width - 1) / width * 4;
    const size_t row_bytes = wide ? w.columns : (w.columns + size_t(1)) / 2;
    const size_t stride = size_t(gridDim.x) * THREADS;
    bool nan = false;
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < size_t(count) * words;
         i += stride) {
        const uint32_t row = uint32_t(i / words), column = uint32_t(i % words) / 4 * width;
        const uint32_t c = column + i % 4 * (packed::in_rows(w.packing) ? 4 : 2);
        const uint32_t word = gather(w.packing, src + row * row_bytes, c, w.columns, &nan);
        const packed::place at = packed::find(w.packing, stored_row(w, first + row), c, w.columns);
        *reinterpret_cast<uint32_t *>(static_cast<uint8_t *>(w.entry) + at.word) = word;
    }
    if (nan)
        *w.wrong = 1;
}

__device__ float scale_at(const moe_weight_format &f, const void *src, size_t i)
{
    switch (f.scale) {
    case MOE_SCALE_F32: return static_cast<const float *>(src)[i];
    case MOE_SCALE_BF16: return __bfloat162float(static_cast<const __nv_bfloat16 *>(src)[i]);
    case MOE_SCALE_F16: return __half2float(static_cast<const __half *>(src)[i]);
    default: {
        const uint32_t byte = static_cast<const uint8_t *>(src)[i];
        return __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
    }
    }
}

/* Blocks of a row of the source. */
__device__ size_t blocks_of(const moe_weight_format &f, uint32_t columns)
{
    return f.block_columns == 0 ? 1 : (columns + f.block_columns - 1) / f.block_columns;
}

/* Number of the block of an element, `row` counted from where the source begins. */
__device__ size_t block_at(const moe_weight_format &f, uint32_t columns, uint32_t row,
                           uint32_t column)
{
    return (f.block_rows == 0 ? 0 : row / f.block_rows) * blocks_of(f, columns) +
           (f.block_columns == 0 ? 0 : column / f.block_columns);
}

/* A scale of a byte as its block has it. False: it has no place. */
__device__ bool narrow_scale(moe_cuda_packing p, uint32_t s, uint32_t *out)
{
    if (p == MOE_CUDA_PACKING_E2M1_E4M3)
        return packed::narrow_e4m3(s, out);
    *out = min(s, packed::MAX_EXPONENT) + packed::EXPONENT_ADDED;
    return s <= packed::MAX_EXPONENT;
}

/* Stores four scales of the source row `row`, for the columns from `column` on. */
__device__ bool store_joined(const moe_cuda_packed_weight &w, const moe_weight_format &f,
                             const uint8_t *src, uint32_t row, uint32_t column,
                             const packed::place &at)
{
    const uint32_t width = packed::scale_columns(w.packing);
    uint8_t *to = static_cast<uint8_t *>(w.entry) + at.scales;
    uint32_t bytes[4] = {0, 0, 0, 0};
    bool holds = true;
    for (uint32_t i = 0; i < 4 && column + i * width < w.columns; i++)
        holds &= narrow_scale(w.packing, src[block_at(f, w.columns, row, column + i * width)],
                              &bytes[i]);
    reinterpret_cast<uint32_t *>(to)[(at.row * packed::COLUMNS + at.column) / (4 * width)] =
        packed::join_bytes(bytes, packed::joined_shift(w.packing));
    if (w.packing == MOE_CUDA_PACKING_E2M1_E4M3 && at.row % 8 == 0 && at.column == 0)
        *reinterpret_cast<float *>(to + packed::global_offset(at.row)) = w.global;
    return holds;
}

/* Stores scale number `i` of the source. */
__device__ bool store_scale(const moe_cuda_packed_weight &w, const moe_weight_format &f,
                            const void *src, size_t i, const packed::place &at)
{
    uint8_t *to = static_cast<uint8_t *>(w.entry) + at.scales;
    const float s = scale_at(f, src, i);
    if (packed::scales_product(w.packing)) {
        reinterpret_cast<float *>(to)[at.row >> packed::row_shift(w.packing)] = s;
        return true;
    }
    if (w.packing == MOE_CUDA_PACKING_INT4_ROW) {
        reinterpret_cast<float *>(to)[at.row] = s;
        if (!f.zero_points)
            to[packed::zero_offset(w.packing, at.row, at.column)] = 8;
    } else {
        reinterpret_cast<__nv_bfloat16 *>(to)[at.row * 4 + at.column / 32] =
            __float2bfloat16_rn(s * packed::INT4_SCALED);
    }
    return fabsf(s) <= packed::INT4_MAX_SCALE;
}

__device__ bool store_zero(const moe_cuda_packed_weight &w, const void *src, size_t i,
                           const packed::place &at)
{
    const uint8_t zero = static_cast<const uint8_t *>(src)[i];
    static_cast<uint8_t *>(w.entry)[at.scales + packed::zero_offset(w.packing, at.row, at.column)] =
        zero;
    return zero <= 16;
}

/* A thread for each of rows first .. end - 1 and the columns of what it stores: one scale or zero
 * point, or four scales. src: scales or, if ZEROS, zero points, of these rows on. */
template <bool ZEROS>
__global__ void scale_kernel(const moe_cuda_packed_weight w, const moe_weight_format f,
                             const void *__restrict__ src, uint32_t first, uint32_t end)
{
    const bool joins = packed::joins_scales(w.packing);
    const uint32_t width = packed::scale_columns(w.packing) * (joins ? 4 : 1);
    const uint32_t per_row = (w.columns + width - 1) / width;
    const size_t stride = size_t(gridDim.x) * THREADS;
    bool wrong = false;
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < size_t(end - first) * per_row;
         i += stride) {
        const uint32_t below = uint32_t(i / per_row), column = uint32_t(i % per_row) * width;
        const size_t from = block_at(f, w.columns, below, column);
        const packed::place at =
            packed::find(w.packing, stored_row(w, first + below), column, w.columns);
        const bool holds =
            ZEROS   ? store_zero(w, src, from, at)
            : joins ? store_joined(w, f, static_cast<const uint8_t *>(src), below, column, at)
                    : store_scale(w, f, src, from, at);
        wrong = wrong || !holds;
    }
    if (wrong)
        *w.wrong = 1;
}

template <typename T>
__global__ void read_kernel(const moe_cuda_packed_weight w, size_t first, size_t n, T *to)
{
    const size_t stride = size_t(gridDim.x) * THREADS;
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < n; i += stride) {
        const uint32_t row = uint32_t((first + i) / w.columns),
                       c = uint32_t((first + i) % w.columns);
        to[i] = T(packed::value(w.packing, static_cast<const uint8_t *>(w.entry),
                                stored_row(w, row), c, w.columns));
    }
}

/* Enqueues scale_kernel for `count` rows of blocks. */
template <bool ZEROS>
moe_status place_by_block(const moe_cuda_packed_weight &w, const moe_weight_format &format,
                          const void *src, uint32_t first, uint32_t count, CUstream_st *stream)
{
    const uint64_t block = format.block_rows != 0 ? format.block_rows : w.rows;
    const uint64_t end = std::min<uint64_t>(w.rows, (uint64_t(first) + count) * block);
    if (first * block >= end || w.columns == 0)
        return moe_ok();
    scale_kernel<ZEROS><<<MAX_BLOCKS, THREADS, 0, stream>>>(w, format, src, uint32_t(first * block),
                                                            uint32_t(end));
    return MOE_LAUNCHED(ZEROS ? "placing zero points" : "placing scales");
}

} // namespace

extern "C" moe_status moe_cuda_packed_place(const moe_cuda_packed_weight *w, const void *src,
                                            uint32_t first, uint32_t count, CUstream_st *stream)
{
    if (count == 0 || w->columns == 0)
        return moe_ok();
    const size_t words = size_t(count) * (w->columns + 15) / 4;
    place_kernel<<<blocks_for(words), THREADS, 0, stream>>>(*w, static_cast<const uint8_t *>(src),
                                                            first, count);
    return MOE_LAUNCHED("placing quantised weights");
}

extern "C" moe_status moe_cuda_packed_scale(const moe_cuda_packed_weight *w,
                                            const moe_weight_format *format, const void *src,
                                            uint32_t first, uint32_t count, CUstream_st *stream)
{
    return place_by_block<false>(*w, *format, src, first, count, stream);
}

extern "C" moe_status moe_cuda_packed_zeros(const moe_cuda_packed_weight *w,
                                            const moe_weight_format *format, const void *src,
                                            uint32_t first, uint32_t count, CUstream_st *stream)
{
    return place_by_block<true>(*w, *format, src, first, count, stream);
}

extern "C" moe_status moe_cuda_packed_read(const moe_cuda_packed_weight *w, size_t first, size_t n,
                                           moe_dtype dtype, void *to, CUstream_st *stream)
{
    if (n == 0)
        return moe_ok();
    if (dtype == MOE_DTYPE_BF16)
        read_kernel<<<blocks_for(n), THREADS, 0, stream>>>(*w, first, n,
                                                           static_cast<__nv_bfloat16 *>(to));
    else
        read_kernel<<<blocks_for(n), THREADS, 0, stream>>>(*w, first, n, static_cast<float *>(to));
    return MOE_LAUNCHED("decoding weights");
}

extern "C" moe_status moe_cuda_load_packed(void)
{
    return moe_cuda_load(place_kernel, scale_kernel<false>, scale_kernel<true>, read_kernel<float>,
                         read_kernel<__nv_bfloat16>);
}
