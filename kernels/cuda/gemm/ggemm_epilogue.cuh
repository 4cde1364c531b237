/* SPDX-License-Identifier: Apache-2.0 */
/* From accumulators to rows in memory: bias, activation, row weight, rounding, store.
 *
 * A warp needs no other warp: it holds 16 rows of the tile (hopper.cuh, multiply). Gate and up rows
 * of the weights alternate in blocks of 8, so one thread has both values of a pair and the
 * activation needs no exchange. Only existing rows are stored: whole blocks of 16 rows leave
 * through the copy engine, the last, partial block by predicated 16-byte stores. */
#ifndef MOE_CUDA_GGEMM_EPILOGUE_CUH
#define MOE_CUDA_GGEMM_EPILOGUE_CUH

#include "cuda/core/hopper.cuh"
#include "cuda/gemm/ggemm_params.cuh"

#include <cuda_bf16.h>

namespace ggemm
{

/* The routing weights of a thread's two rows. Loaded before the main loop, which hides the
 * latency. */
struct row_weights {
    float upper, lower;
};

__device__ __forceinline__ row_weights load_row_weights(const params &p, uint32_t row,
                                                        uint32_t rows)
{
    const uint32_t upper = threadIdx.x % WARP / 4, lower = upper + 8;
    row_weights w = {1.0f, 1.0f};
    if (p.row_weight != nullptr) {
        w.upper = upper < rows ? __ldg(p.row_weight + row + upper) : 0.0f;
        w.lower = lower < rows ? __ldg(p.row_weight + row + lower) : 0.0f;
    }
    return w;
}

__device__ __forceinline__ float min_keep_nan(float a, float b)
{
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ __forceinline__ float max_keep_nan(float a, float b)
{
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

/* The limit is infinity for an activation without clamps. */
__device__ __forceinline__ float activate(const params &p, float gate, float up)
{
    gate = min_keep_nan(gate, p.limit);
    up = max_keep_nan(min_keep_nan(up, p.limit), -p.limit);
    return moe_activate_fast(p.activation, gate, up);
}

__device__ __forceinline__ float activate_situ(const params &p, float gate, float up)
{
    return moe_activate_situ_fast(p.activation.alpha, p.limit, gate, up);
}

__device__ __forceinline__ float activate_up(float up)
{
    const float positive = max_keep_nan(up, 0.0f);
    return positive * positive;
}

/* The bias of this thread's two columns of the 8 output columns at `column`; zero beyond the
 * edge. */
__device__ __forceinline__ float2 bias_pair(const params &p, const float *bias, uint32_t expert,
                                            uint32_t column)
{
    const uint32_t at = column + threadIdx.x % 4 * 2;
    if (at >= p.out_n)
        return make_float2(0.0f, 0.0f);
    return __ldg(reinterpret_cast<const float2 *>(bias + size_t(expert) * p.out_n + at));
}

template <uint32_t N>
__device__ __forceinline__ void weigh(const params &p, float (&acc)[N], row_weights w)
{
    if (p.row_weight == nullptr)
        return;
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        acc[i] *= i % 4 < 2 ? w.upper : w.lower;
}

template <uint32_t N>
__device__ __forceinline__ void add_bias(const params &p, float (&acc)[N], uint32_t expert,
                                         uint32_t column)
{
    if (p.has_bias) {
        const float *bias = (*p.weights)->bias;
#pragma unroll
        for (uint32_t j = 0; j < N / 4; j++) {
            const float2 b = bias_pair(p, bias, expert, column + 8 * j);
            acc[4 * j] += b.x;
            acc[4 * j + 1] += b.y;
            acc[4 * j + 2] += b.x;
            acc[4 * j + 3] += b.y;
        }
    }
}

/* acc = weight * (acc + bias), or ACTIVATES: squared ReLU of weight * acc + bias */
template <bool ACTIVATES, uint32_t N>
__device__ __forceinline__ void finish_plain(const params &p, float (&acc)[N], uint32_t expert,
                                             uint32_t column, row_weights w)
{
    if constexpr (ACTIVATES)
        weigh(p, acc, w);
    add_bias(p, acc, expert, column);
    if constexpr (!ACTIVATES)
        weigh(p, acc, w);
#pragma unroll
    for (uint32_t i = 0; ACTIVATES && i < N; i++)
        acc[i] = activate_up(acc[i]);
}

/* Applies the activation to gate (8 columns) and up (the next 8). Results fill the first half of
 * acc. */
template <bool SITU, uint32_t N>
__device__ __forceinline__ void finish_gated(const params &p, float (&acc)[N], uint32_t expert,
                                             uint32_t column, row_weights w)
{
    weigh(p, acc, w);
    if (p.has_bias) {
        const moe_cuda_ggemm_weights *weights = *p.weights;
#pragma unroll
        for (uint32_t j = 0; j < N / 4; j++) {
            const float2 b = bias_pair(p, j % 2 == 0 ? weights->bias : weights->up_bias, expert,
                                       column + j / 2 * 8);
            acc[4 * j] += b.x;
            acc[4 * j + 1] += b.y;
            acc[4 * j + 2] += b.x;
            acc[4 * j + 3] += b.y;
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < N / 8; j++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            acc[4 * j + i] = SITU ? activate_situ(p, acc[8 * j + i], acc[8 * j + 4 + i])
                                  : activate(p, acc[8 * j + i], acc[8 * j + 4 + i]);
}

__device__ __forceinline__ uint32_t pack(float x, float y)
{
    const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const uint32_t *>(&v);
}

/* A warp's two staging buffers, in alternation: one fills while the other is sent. */
struct staging {
    uint32_t address;
    uint32_t turn = 0;

    __device__ __forceinline__ uint32_t take()
    {
        const uint32_t buffer = address + turn * STORE_BYTES;
        turn ^= 1;
        if (threadIdx.x % WARP == 0)
            hopper::store_wait_read<1>();
        __syncwarp();
        return buffer;
    }
};

/* Stores `rows` <= 16 rows of COLUMNS <= 64 values from staging. */
template <uint32_t COLUMNS>
__device__ __forceinline__ void store_partial(const params &p, uint32_t buffer, uint32_t row,
                                              uint32_t rows, uint32_t column)
{
    constexpr uint32_t PARTS = COLUMNS / 8, TOGETHER = WARP / PARTS;
    const uint32_t lane = threadIdx.x % WARP, part = lane % PARTS;
    auto *out = static_cast<__nv_bfloat16 *>(p.out_rows);
#pragma unroll
    for (uint32_t i = 0; i < STORE_ROWS / TOGETHER; i++) {
        const uint32_t r = i * TOGETHER + lane / PARTS, at = column + part * 8;
        if (r < rows && at < p.out_n)
            *reinterpret_cast<uint4 *>(out + size_t(row + r) * p.out_stride + at) =
                hopper::load_shared16(buffer + r * 128 + ((part ^ (r & 7)) << 4));
    }
}

/* Stores `rows` (1..16) rows of COLUMNS values in accumulator layout as bf16. Fewer columns than a
 * box of the copy engine leave like a partial block. */
template <uint32_t COLUMNS, uint32_t N>
__device__ __forceinline__ void store_bf16(const params &p, const float (&v)[N], staging &stage,
                                           uint32_t row, uint32_t rows, uint32_t column)
{
    constexpr uint32_t WIDTH = COLUMNS < STORE_COLUMNS ? COLUMNS : STORE_COLUMNS;
    const uint32_t lane = threadIdx.x % WARP;
#pragma unroll
    for (uint32_t c = 0; c < COLUMNS / WIDTH; c++) {
        const uint32_t buffer = stage.take();
#pragma unroll
        for (uint32_t q = 0; q < WIDTH / 16; q++) {
            const float *x = v + (c * 4 + q) * 8;
            hopper::store_matrix(
                buffer + lane % 16 * 128 + (((q * 2 + lane / 16) ^ (lane % 8)) << 4),
                pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
        }
        const uint32_t at = column + c * STORE_COLUMNS;
        if (WIDTH == STORE_COLUMNS && rows == STORE_ROWS) {
            hopper::stores_before_copies();
            __syncwarp();
            if (lane == 0 && at < p.out_n)
                hopper::store_box(&p.out, buffer, at, row);
        } else {
            __syncwarp();
            store_partial<WIDTH>(p, buffer, row, rows, at);
        }
        if (lane == 0)
            hopper::store_commit();
    }
}

/* The same as fp32, directly from registers: 32 contiguous bytes per row. `to` has n columns. */
template <uint32_t COLUMNS, uint32_t N>
__device__ __forceinline__ void store_f32(float *to, uint32_t n, uint32_t stride,
                                          const float (&v)[N], uint32_t row, uint32_t rows,
                                          uint32_t column)
{
    const uint32_t upper = threadIdx.x % WARP / 4, lower = upper + 8;
    float *out = to + size_t(row + upper) * stride;
#pragma unroll
    for (uint32_t j = 0; j < COLUMNS / 8; j++) {
        const uint32_t at = column + 8 * j + threadIdx.x % 4 * 2;
        if (at < n && upper < rows)
            *reinterpret_cast<float2 *>(out + at) = make_float2(v[4 * j], v[4 * j + 1]);
        if (at < n && lower < rows)
            *reinterpret_cast<float2 *>(out + size_t(8) * stride + at) =
                make_float2(v[4 * j + 2], v[4 * j + 3]);
    }
}

/* How many of `rows` rows from `row` on fit. */
__device__ __forceinline__ uint32_t rows_with_room(const params &p, uint32_t row, uint32_t rows)
{
    const uint32_t room = __ldg(&p.pre->rows);
    return row < room ? min(rows, room - row) : 0;
}

/* Stores one warp's 16 rows of a tile. Only `rows` of them exist; with none or fewer, nothing
 * happens. `weight_row` is the tile's first weight row; gate and up count separately. */
template <finish FINISH, bool F32, bool SAVE, uint32_t N>
__device__ __forceinline__ void store_tile(const params &p, float (&acc)[N], staging &stage,
                                           uint32_t expert, uint32_t row, int rows,
                                           uint32_t weight_row, row_weights w)
{
    constexpr bool GATED = has_gates(FINISH);
    constexpr uint32_t COLUMNS = GATED ? N : 2 * N;
    const uint32_t exist = rows < int(STORE_ROWS) ? uint32_t(rows) : STORE_ROWS;
    const uint32_t column = GATED ? weight_row / 2 : weight_row;
    if (rows <= 0)
        return;
    if constexpr (SAVE)
        store_f32<2 * N>(p.pre->data, p.n, p.n, acc, row, rows_with_room(p, row, exist),
                         weight_row);
    if constexpr (GATED)
        finish_gated<FINISH == finish::SITU>(p, acc, expert, column, w);
    else
        finish_plain<FINISH == finish::UP>(p, acc, expert, column, w);
    if constexpr (F32)
        store_f32<COLUMNS>(static_cast<float *>(p.out_rows), p.out_n, p.out_stride, acc, row, exist,
                           column);
    else
        store_bf16<COLUMNS>(p, acc, stage, row, exist, column);
}

} // namespace ggemm

#endif
