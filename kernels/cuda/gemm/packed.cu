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

/* Bytes 1, 3 and 0, 2 of a word: columns c, c + 1 and c + 8, c + 9. */
__device__ uint32_t gather_8_bits(const uint8_t *row, uint32_t c, uint32_t columns, bool *nan)
{
    uint32_t word = 0;
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t at = c + i / 2 * 8 + i % 2;
        const uint32_t byte = at < columns ? row[at] : 0;
        *nan = *nan || (byte & 0x7f) == 0x7f;
        word |= byte << (8 * (1 - i / 2) + 16 * (i % 2));
    }
    return word;
}

__device__ uint32_t gather_4_bits(const uint8_t *row, uint32_t c, uint32_t columns)
{
    uint32_t word = 0;
    for (uint32_t pair = 0; pair < 4; pair++) {
        const uint32_t at = c + 8 * pair, byte = at < columns ? row[at / 2] : 0;
        for (uint32_t odd = 0; odd < 2; odd++) {
            const uint32_t bits = byte >> 4 * odd;
            word |= ((bits >> 3 & 1) << packed::sign_bit(pair) | (bits & 7)
                                                                     << packed::magnitude_bit(pair))
                    << 16 * odd;
        }
    }
    return word;
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
        const uint32_t c = column + i % 4 * 2;
        const uint8_t *from = src + row * row_bytes;
        const uint32_t word =
            wide ? gather_8_bits(from, c, w.columns, &nan) : gather_4_bits(from, c, w.columns);
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

/* A thread for each of rows first .. end - 1 and its scale of 32 or 128 columns. src: of these rows
 * on. */
__global__ void scale_kernel(const moe_cuda_packed_weight w, const moe_weight_format f,
                             const void *__restrict__ src, uint32_t first, uint32_t end)
{
    const bool product = packed::scales_product(w.packing);
    const uint32_t width = product ? packed::COLUMNS : 32;
    const uint32_t per_row = (w.columns + width - 1) / width;
    const size_t source_columns =
        f.block_columns == 0 ? 1 : (w.columns + f.block_columns - 1) / f.block_columns;
    const size_t stride = size_t(gridDim.x) * THREADS;
    bool wrong = false;
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < size_t(end - first) * per_row;
         i += stride) {
        const uint32_t below = uint32_t(i / per_row), column = uint32_t(i % per_row) * width;
        const size_t from = (f.block_rows == 0 ? 0 : below / f.block_rows) * source_columns +
                            (f.block_columns == 0 ? 0 : column / f.block_columns);
        const packed::place at =
            packed::find(w.packing, stored_row(w, first + below), column, w.columns);
        uint8_t *to = static_cast<uint8_t *>(w.entry) + at.scales;
        if (product)
            reinterpret_cast<float *>(to)[at.row >> packed::row_shift(w.packing)] =
                scale_at(f, src, from);
        else {
            const uint32_t s = static_cast<const uint8_t *>(src)[from];
            wrong = wrong || s > packed::MAX_EXPONENT;
            to[at.row * 4 + column % packed::COLUMNS / 32] =
                uint8_t(min(s, packed::MAX_EXPONENT) + packed::EXPONENT_ADDED);
        }
    }
    if (wrong)
        *w.wrong = 1;
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
    const uint64_t block = format->block_rows != 0 ? format->block_rows : w->rows;
    const uint64_t end = std::min<uint64_t>(w->rows, (uint64_t(first) + count) * block);
    if (first * block >= end || w->columns == 0)
        return moe_ok();
    scale_kernel<<<MAX_BLOCKS, THREADS, 0, stream>>>(*w, *format, src, uint32_t(first * block),
                                                     uint32_t(end));
    return MOE_LAUNCHED("placing scales");
}

extern "C" moe_status moe_cuda_load_packed(void)
{
    return moe_cuda_load(place_kernel, scale_kernel);
}
