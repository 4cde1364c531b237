/* SPDX-License-Identifier: Apache-2.0 */
/* From accumulators to rows in memory when weights were the instruction's 64-row operand: bias,
 * activation, row weight, rounding, transposition, store.
 *
 * For every 8 rows j of the expert, thread t holds output columns t/4 and t/4 + 8 of its warp's 16,
 * rows 8j + 2 (t%4) and the next. Gate and up alternate by 8, so a thread has both values of a
 * pair. One warpgroup transposes bf16 results through shared memory, a chunk of rows at a time.
 * fp32 results go directly from registers to memory. */
#ifndef MOE_CUDA_GGEMM_TRANSPOSED_CUH
#define MOE_CUDA_GGEMM_TRANSPOSED_CUH

#include "cuda/gemm/ggemm_epilogue.cuh"

namespace ggemm
{

constexpr uint32_t FINISH_ROWS = 32;      /* finished together */
constexpr uint32_t CHUNK_ROW_BYTES = 128; /* 64 columns */

/* One thread's columns and their biases. */
struct thread_columns {
    uint32_t first;     /* output column; plain: also first + 8 */
    float bias, bias_8; /* plain: of columns first and first + 8; gated: of gate and up */
};

template <bool GATED>
__device__ __forceinline__ thread_columns load_columns(const params &p, uint32_t expert,
                                                       uint32_t weight_row)
{
    const uint32_t lane_column = threadIdx.x % WARP / 4;
    thread_columns c = {(GATED ? weight_row / 2 : weight_row) + lane_column, 0.0f, 0.0f};
    if (!p.has_bias)
        return c;
    const moe_cuda_ggemm_weights *weights = *p.weights;
    const float *bias = weights->bias + size_t(expert) * p.out_n;
    if (c.first < p.out_n)
        c.bias = __ldg(bias + c.first);
    if (GATED && c.first < p.out_n)
        c.bias_8 = __ldg(weights->up_bias + size_t(expert) * p.out_n + c.first);
    if (!GATED && c.first + 8 < p.out_n)
        c.bias_8 = __ldg(bias + c.first + 8);
    return c;
}

/* Finishes one thread's 8-row block in place, for its two rows, `left` of which exist: x[0], x[1]
 * are column `first`; x[2], x[3] are column first + 8. With gates: only x[0], x[1]. */
template <finish FINISH>
__device__ __forceinline__ void finish_pair(const params &p, const thread_columns &c, float *x,
                                            uint32_t row, int left)
{
    float w[2] = {1.0f, 1.0f};
    if (p.row_weight != nullptr) {
        w[0] = left > 0 ? __ldg(p.row_weight + row) : 0.0f;
        w[1] = left > 1 ? __ldg(p.row_weight + row + 1) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (FINISH == finish::SITU) {
            x[i] = activate_situ(p, x[i] * w[i] + c.bias, x[2 + i] * w[i] + c.bias_8);
        } else if constexpr (FINISH == finish::GATED) {
            x[i] = activate(p, x[i] * w[i] + c.bias, x[2 + i] * w[i] + c.bias_8);
        } else if constexpr (FINISH == finish::UP) {
            x[i] = activate_up(x[i] * w[i] + c.bias);
            x[2 + i] = activate_up(x[2 + i] * w[i] + c.bias_8);
        } else {
            x[i] = w[i] * (x[i] + c.bias);
            x[2 + i] = w[i] * (x[2 + i] + c.bias_8);
        }
    }
}

/* Writes 32 rows (four blocks x of four) of a warp's columns into the chunk. */
template <bool GATED>
__device__ __forceinline__ void stage_rows(const float *x, uint32_t chunk, uint32_t chunk_row)
{
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP;
    const auto place = [&](uint32_t row, uint32_t part) {
        return chunk + row * CHUNK_ROW_BYTES + ((part ^ (row & 7)) << 4);
    };
    if constexpr (GATED) {
        hopper::store_transposed(place(chunk_row + lane, warp), pack(x[0], x[1]), pack(x[4], x[5]),
                                 pack(x[8], x[9]), pack(x[12], x[13]));
    } else {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const float *y = x + half * 8;
            const uint32_t row = chunk_row + half * 16 + lane / 16 * 8 + lane % 8;
            hopper::store_transposed(place(row, warp * 2 + lane / 8 % 2), pack(y[0], y[1]),
                                     pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
        }
    }
}

/* Writes the chunk's first `rows` rows to memory, 16 bytes per thread. Called by one warpgroup. */
template <bool GATED, uint32_t APART>
__device__ __forceinline__ void store_chunk(const params &p, uint32_t chunk, uint32_t row,
                                            uint32_t rows, uint32_t column)
{
    constexpr uint32_t PARTS = GATED ? 4 : 8, TOGETHER = WARPGROUP / PARTS;
    const uint32_t thread = threadIdx.x % WARPGROUP, part = thread % PARTS;
    const uint32_t at = column + (GATED ? part * 8 : part / 2 * APART + part % 2 * 8);
    auto *out = static_cast<__nv_bfloat16 *>(p.out_rows) + size_t(row) * p.out_stride + at;
    if (at >= p.out_n)
        return;
#pragma unroll 4
    for (uint32_t r = thread / PARTS; r < rows; r += TOGETHER)
        *reinterpret_cast<uint4 *>(out + size_t(r) * p.out_stride) =
            hopper::load_shared16(chunk + r * CHUNK_ROW_BYTES + ((part ^ (r & 7)) << 4));
}

/* Writes two rows of fp32 results: 8 lanes write 32 bytes of one row. */
template <bool GATED>
__device__ __forceinline__ void store_pair_f32(const params &p, const thread_columns &c,
                                               const float *x, uint32_t row, int left)
{
    float *out = static_cast<float *>(p.out_rows) + size_t(row) * p.out_stride + c.first;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (i < left && c.first < p.out_n)
            out[size_t(i) * p.out_stride] = x[i];
        if (!GATED && i < left && c.first + 8 < p.out_n)
            out[size_t(i) * p.out_stride + 8] = x[2 + i];
    }
}

/* The same for gate and up, unprocessed. `column` is the weight row of x[0]. */
__device__ __forceinline__ void store_pair_pre(const params &p, uint32_t column, const float *x,
                                               uint32_t row, int left)
{
    const int rows = left > 0 ? int(rows_with_room(p, row, uint32_t(left))) : 0;
    float *out = p.pre->data + size_t(row) * p.n + column;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (i < rows && column < p.n)
            out[size_t(i) * p.n] = x[i];
        if (i < rows && column + 8 < p.n)
            out[size_t(i) * p.n + 8] = x[2 + i];
    }
}

/* Finishes and stores one warpgroup's 64 weight rows from `weight_row` of a tile, CHUNK rows of the
 * expert at a time. `barrier`: a named barrier that only this warpgroup uses. APART: weight rows
 * from a warp's 16 to those of the next warp; more than 16 only for plain products. */
template <finish FINISH, bool F32, bool SAVE, uint32_t CHUNK, uint32_t ROWS,
          uint32_t APART = STORE_ROWS, class walk>
__device__ __forceinline__ void store_transposed_tile(const params &p, const walk &tile,
                                                      uint32_t weight_row, float (&acc)[ROWS / 2],
                                                      uint32_t chunk, int barrier)
{
    constexpr bool GATED = has_gates(FINISH);
    const uint32_t warp = threadIdx.x % WARPGROUP / WARP, pair = threadIdx.x % 4 * 2;
    const thread_columns c = load_columns<GATED>(p, tile.expert, weight_row + warp * APART);
#pragma unroll
    for (uint32_t done = 0; done < ROWS; done += CHUNK) {
        if (done >= tile.rows)
            break;
        if (!F32) /* the previous chunk is stored */
            hopper::named_wait(barrier, WARPGROUP);
#pragma unroll
        for (uint32_t r = done; r < done + CHUNK; r += FINISH_ROWS) {
            if (r >= tile.rows)
                break;
            float *x = acc + r / 2;
#pragma unroll
            for (uint32_t j = 0; j < FINISH_ROWS / 8; j++) {
                const uint32_t at = r + 8 * j + pair;
                const int left = int(tile.rows) - int(at);
                if constexpr (SAVE)
                    store_pair_pre(p, weight_row + warp * STORE_ROWS + threadIdx.x % WARP / 4,
                                   x + 4 * j, tile.row + at, left);
                finish_pair<FINISH>(p, c, x + 4 * j, tile.row + at, left);
                if (F32)
                    store_pair_f32<GATED>(p, c, x + 4 * j, tile.row + at, left);
            }
            if (!F32)
                stage_rows<GATED>(x, chunk, r - done);
        }
        if (!F32) {
            hopper::named_wait(barrier, WARPGROUP);
            store_chunk<GATED, APART>(p, chunk, tile.row + done, min(CHUNK, tile.rows - done),
                                      GATED ? weight_row / 2 : weight_row);
        }
    }
}

} // namespace ggemm

#endif
