/* SPDX-License-Identifier: Apache-2.0 */
/* From the values of gate and up to quantised hidden rows, by one warp for its 16 rows.
 *
 * A tile has 128 hidden columns, one group, in two halves of 64 that are computed one after the
 * other. Values stay fp32: those of the first half wait in shared memory, where each thread reads
 * back what it wrote. A thread holds columns 8j + 2 (t%4) and the next of a half: of row t/4 in
 * v[4j], v[4j+1], and of the row 8 below in v[4j+2], v[4j+3]. So four lanes have a row. */
#ifndef MOE_CUDA_GGEMM_W8A8_HIDDEN_CUH
#define MOE_CUDA_GGEMM_W8A8_HIDDEN_CUH

#include "cuda/gemm/ggemm_epilogue.cuh"
#include "cuda/gemm/packed_layout.cuh"
#include "cuda/gemm/quantise_math.cuh"

namespace ggemm
{

constexpr uint32_t HIDDEN_COLUMNS = packed::COLUMNS, HIDDEN_HALF = HIDDEN_COLUMNS / 2;
constexpr uint32_t HIDDEN_VALUES = HIDDEN_HALF / 4 * 2; /* of a thread, in a half */
static_assert(HIDDEN_VALUES * WARP * sizeof(float) <= WARP_STAGING &&
                  STORE_ROWS * HIDDEN_COLUMNS <= WARP_STAGING,
              "a warp's values, and later its codes");

struct w8a8_params : params {
    CUtensorMap row_scales; /* [steps, row_capacity], a box has those of a tile */
    /* Quantised hidden rows: codes are at out_rows, out_stride bytes apart. */
    float *out_scales;
    uint32_t out_scale_stride;
    bool pow2;
};

__device__ __forceinline__ float *aside_of(uint8_t *staging)
{
    return reinterpret_cast<float *>(staging) + threadIdx.x % WARP;
}

template <uint32_t SIZE>
__device__ __forceinline__ void put_aside(uint8_t *staging, const float (&v)[SIZE])
{
#pragma unroll
    for (uint32_t i = 0; i < HIDDEN_VALUES; i++)
        aside_of(staging)[i * WARP] = v[i];
}

/* The largest magnitudes of a thread's two rows, so far without the other lanes. */
struct row_pair {
    float upper, lower;
};

__device__ __forceinline__ row_pair largest_of(const float *v, row_pair most)
{
#pragma unroll
    for (uint32_t i = 0; i < HIDDEN_VALUES; i++)
        (i % 4 < 2 ? most.upper : most.lower) =
            fmaxf(i % 4 < 2 ? most.upper : most.lower, fabsf(v[i]));
    return most;
}

/* Of the four lanes that have a row. */
__device__ __forceinline__ float share_largest(float v)
{
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

/* Writes the codes of a half: two columns at a time, in 16-byte pieces of a row that are exchanged
 * among rows as in packed_layout.cuh, to spread the banks. */
__device__ __forceinline__ void stage_codes(uint8_t *staging, const float *v, uint32_t half,
                                            quantise::group_scale upper,
                                            quantise::group_scale lower)
{
    const uint32_t lane = threadIdx.x % WARP, row = lane / 4;
#pragma unroll
    for (uint32_t j = 0; j < HIDDEN_HALF / 8; j++) {
        const uint32_t piece = half * HIDDEN_HALF / 16 + j / 2;
        uint8_t *to =
            staging + row * HIDDEN_COLUMNS + ((piece ^ row) << 4) + j % 2 * 8 + lane % 4 * 2;
        *reinterpret_cast<uint16_t *>(to) =
            uint16_t(quantise::codes_of(v[4 * j], v[4 * j + 1], upper));
        *reinterpret_cast<uint16_t *>(to + 8 * HIDDEN_COLUMNS) =
            uint16_t(quantise::codes_of(v[4 * j + 2], v[4 * j + 3], lower));
    }
}

/* Writes a warp's codes to memory, 16 bytes per lane. `rows` exist. */
__device__ __forceinline__ void store_codes(const w8a8_params &p, const uint8_t *staging,
                                            uint32_t row, int rows, uint32_t column)
{
    const uint32_t lane = threadIdx.x % WARP, piece = lane % 8, at = column + piece * 16;
    auto *out = static_cast<uint8_t *>(p.out_rows);
#pragma unroll
    for (uint32_t i = 0; i < STORE_ROWS / 4; i++) {
        const uint32_t r = i * 4 + lane / 8;
        if (int(r) < rows && at < p.out_stride)
            *reinterpret_cast<uint4 *>(out + size_t(row + r) * p.out_stride + at) =
                *reinterpret_cast<const uint4 *>(staging + r * HIDDEN_COLUMNS +
                                                 ((piece ^ (r & 7)) << 4));
    }
}

/* Quantises a warp's rows, `rows` of which exist, from the values aside and, if there are `two`
 * halves, those in `v`. */
template <uint32_t SIZE>
__device__ __forceinline__ void quantise_hidden(const w8a8_params &p, uint8_t *staging,
                                                float (&v)[SIZE], bool two, uint32_t row, int rows,
                                                uint32_t column)
{
    const uint32_t lane = threadIdx.x % WARP, upper_row = lane / 4;
    float first[HIDDEN_VALUES];
#pragma unroll
    for (uint32_t i = 0; i < HIDDEN_VALUES; i++) {
        first[i] = aside_of(staging)[i * WARP];
        v[i] = two ? v[i] : 0.0f;
    }
    const row_pair most = largest_of(v, largest_of(first, {0.0f, 0.0f}));
    const auto upper = quantise::scale_of(share_largest(most.upper), p.pow2);
    const auto lower = quantise::scale_of(share_largest(most.lower), p.pow2);
    float *scales = p.out_scales + size_t(column / HIDDEN_COLUMNS) * p.out_scale_stride + row;
    if (lane % 4 == 0 && int(upper_row) < rows)
        scales[upper_row] = upper.scale;
    if (lane % 4 == 0 && int(upper_row) + 8 < rows)
        scales[upper_row + 8] = lower.scale;
    __syncwarp(); /* all have read the values aside */
    stage_codes(staging, first, 0, upper, lower);
    stage_codes(staging, v, 1, upper, lower);
    __syncwarp();
    store_codes(p, staging, row, rows, column);
    __syncwarp(); /* before the next values are put aside */
}

} // namespace ggemm

#endif
