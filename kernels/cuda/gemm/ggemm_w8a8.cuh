/* SPDX-License-Identifier: Apache-2.0 */
/* Grouped GEMM of quantised rows (quantise.h) with W8A8 weights (packed.h): E4M3 products.
 *
 * An expert's rows are the instruction's 64-row operand, so a thread needs the scales of two rows
 * only. The sum inside the instructions is exact enough for 128 columns. So after each step of 128
 * it is multiplied by the scales of its row and its weights, and added to fp32 registers. Each
 * output is one chain of such sums in ascending columns: a row's bits depend on that row and its
 * expert alone. One tile serves any number of rows; a second one for few rows was no faster.
 *
 * Gate and up can leave quantised hidden rows (ggemm_w8a8_hidden.cuh). A group of 128 hidden
 * columns comes from two blocks of 128 weight rows, so a tile has both, one after the other.
 * Without a gate it comes from one block.
 *
 * Tile      up to 192 rows x 128 weight rows x 128, 4 stages in flight. An expert's rows are cut
 *           evenly, in multiples of 64.
 * Warps     three consumers with 64 rows each: while one adds to its registers, the others
 *           multiply. Consumers without rows only follow. The first warp of the last warpgroup
 *           issues loads to the copy engine and lists the tiles.
 * Shared    221 KB: one block per SM, persistent.
 * Registers per thread: 160 in the consumers, of which 128 are sums, and 24 in the last
 *           warpgroup. */
#ifndef MOE_CUDA_GGEMM_W8A8_CUH
#define MOE_CUDA_GGEMM_W8A8_CUH

#include "cuda/gemm/ggemm_packed_launch.cuh"
#include "cuda/gemm/ggemm_pipeline.cuh"
#include "cuda/gemm/ggemm_w8a8_hidden.cuh"
#include "cuda/gemm/packed_layout.cuh"

namespace ggemm
{

constexpr uint32_t W8A8_CONSUMERS = 3, W8A8_STAGES = 4;
constexpr uint32_t W8A8_ROWS = W8A8_CONSUMERS * MMA_ROWS;
constexpr uint32_t W8A8_ROW_STEP = 32;               /* of boxes that read rows */
constexpr uint32_t W8A8_ROW_BYTES = packed::COLUMNS; /* of a stage */
constexpr uint32_t W8A8_THREADS = (W8A8_CONSUMERS + 1) * WARPGROUP;
constexpr uint32_t W8A8_WARPS = W8A8_CONSUMERS * WARPGROUP / WARP;
static_assert(W8A8_ROWS / W8A8_ROW_STEP <= ROW_BOXES, "a map for every height");

/* A step's weights with their scales, and the scales of the rows. */
struct w8a8_stage {
    alignas(1024) uint8_t weights[packed::ROWS * W8A8_ROW_BYTES];
    float weight_scale[packed::ROWS]; /* the first 16 if 8 rows share one */
    alignas(128) float row_scale[W8A8_ROWS];
};

struct w8a8_shared {
    w8a8_stage stage[W8A8_STAGES];
    alignas(1024) uint8_t x[W8A8_STAGES][W8A8_ROWS * W8A8_ROW_BYTES];
    alignas(128) uint8_t staging[W8A8_WARPS][WARP_STAGING];
    uint64_t full[W8A8_STAGES], empty[W8A8_STAGES];
    uint32_t first[MOE_CUDA_MAX_EXPERTS + 1];
};
static_assert(sizeof(w8a8_shared) <= 227 * 1024, "a CTA of sm_90 can have no more");

/* BLOCKS of weights in a tile: two if gate and up become quantised hidden rows. */
template <uint32_t BLOCKS> using w8a8_walk = tile_walk<W8A8_ROWS, BLOCKS * packed::ROWS, MMA_ROWS>;

__device__ __forceinline__ uint32_t w8a8_steps(const params &p)
{
    return (p.k + packed::COLUMNS - 1) / packed::COLUMNS;
}

/* Loads one block of 128 weight rows, and the rows with it, step by step. The engine reads scales
 * at addresses that are multiples of 16 only, so experts start at multiples of 4 rows. */
template <class walk>
__device__ __forceinline__ void w8a8_load(const w8a8_params &p, w8a8_shared &s, const walk &tile,
                                          const uint8_t *block, uint64_t once,
                                          ring<W8A8_STAGES> &at)
{
    const uint32_t block_bytes = packed::ROWS * packed::COLUMNS + p.packed_scale_bytes;
    const uint32_t steps = w8a8_steps(p), box = (tile.rows - 1) / W8A8_ROW_STEP;
    const CUtensorMap *rows = &p.rows[box];
    const uint32_t bytes = block_bytes + (box + 1) * W8A8_ROW_STEP * W8A8_ROW_BYTES +
                           W8A8_ROWS * uint32_t(sizeof(float));
    for (uint32_t step = 0; step < steps; step++, block += block_bytes) {
        uint64_t *full = &s.full[at.stage];
        auto &to = s.stage[at.stage];
        hopper::barrier_wait(&s.empty[at.stage], at.phase ^ 1);
        hopper::barrier_expect(full, bytes);
        if (tile.only_row_tile)
            hopper::load_bytes_once(to.weights, block, full, block_bytes, once);
        else
            hopper::load_bytes(to.weights, block, full, block_bytes);
        hopper::load_box(s.x[at.stage], rows, full, step * packed::COLUMNS, tile.row);
        hopper::load_box(to.row_scale, &p.row_scales, full, tile.row, step);
        at.advance();
    }
}

/* One thread keeps the ring full. */
template <uint32_t BLOCKS>
__device__ __forceinline__ void w8a8_produce(const w8a8_params &p, w8a8_shared &s)
{
    const uint32_t block_bytes = packed::ROWS * packed::COLUMNS + p.packed_scale_bytes;
    const uint32_t blocks = (p.n + packed::ROWS - 1) / packed::ROWS;
    const size_t apart = size_t(w8a8_steps(p)) * block_bytes;
    const uint64_t once = hopper::policy_evict_first();
    const auto *weights = static_cast<const uint8_t *>((*p.weights)->data);
    w8a8_walk<BLOCKS> tile(p, s.first);
    ring<W8A8_STAGES> at;
    while (tile.next()) {
        const uint32_t first = tile.weight_row / packed::ROWS;
        for (uint32_t b = first; b < blocks && b < first + BLOCKS; b++)
            w8a8_load(p, s, tile, weights + (size_t(tile.expert) * blocks + b) * apart, once, at);
    }
}

__device__ __forceinline__ void w8a8_release(w8a8_shared &s, uint32_t stage)
{
    __syncwarp();
    if (threadIdx.x % WARP == 0)
        hopper::barrier_arrive(&s.empty[stage]);
}

/* Follows one block of weights without computing. */
__device__ __forceinline__ void w8a8_skip(w8a8_shared &s, ring<W8A8_STAGES> &at, uint32_t steps)
{
    for (uint32_t step = 0; step < steps; step++) {
        hopper::barrier_wait(&s.full[at.stage], at.phase);
        w8a8_release(s, at.stage);
        at.advance();
    }
}

/* sum = the product of a consumer's 64 rows with one block of weights.
 *
 * Of weights with a scale for 128 rows, a block has one, or gate's and up's in turns of 8 rows. If
 * each row has its scale, it is that of all columns, and multiplies the result. */
__device__ __forceinline__ void w8a8_multiply(w8a8_shared &s, ring<W8A8_STAGES> &at, uint32_t steps,
                                              bool by_row, uint32_t group,
                                              float (&sum)[packed::ROWS / 2])
{
    const uint32_t row =
        group * MMA_ROWS + threadIdx.x % WARPGROUP / WARP * STORE_ROWS + threadIdx.x % WARP / 4;
    float part[packed::ROWS / 2];
#pragma unroll
    for (uint32_t i = 0; i < packed::ROWS / 2; i++)
        sum[i] = 0;
    for (uint32_t step = 0; step < steps; step++) {
        /* The same in all lanes. The shuffle tells the compiler, which then computes addresses once
         * for a warp. */
        const uint32_t stage = __shfl_sync(~0u, at.stage, 0);
        const auto &in = s.stage[stage];
        const uint64_t weights = hopper::operand(hopper::shared_address(in.weights));
        const uint64_t rows =
            hopper::operand(hopper::shared_address(s.x[stage]) + group * MMA_ROWS * W8A8_ROW_BYTES);
        hopper::barrier_wait(&s.full[at.stage], at.phase);
        hopper::multiply_fence();
#pragma unroll
        for (uint32_t i = 0; i < packed::COLUMNS / 32; i++)
            hopper::multiply_e4m3(part, rows + i * 2, weights + i * 2, i != 0);
        hopper::multiply_commit();
        const float upper = in.row_scale[row], lower = in.row_scale[row + 8];
        const float of_weights[2] = {by_row ? 1.0f : in.weight_scale[0],
                                     by_row ? 1.0f : in.weight_scale[1]};
        hopper::multiply_wait<0>();
        hopper::multiply_done(part);
        if (!by_row)
            w8a8_release(s, stage);
#pragma unroll
        for (uint32_t i = 0; i < packed::ROWS / 2; i++)
            sum[i] = fmaf(part[i], (i % 4 < 2 ? upper : lower) * of_weights[i / 4 % 2], sum[i]);
        if (by_row && step + 1 == steps) {
#pragma unroll
            for (uint32_t i = 0; i < packed::ROWS / 2; i++)
                sum[i] *= in.weight_scale[i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2];
        }
        if (by_row)
            w8a8_release(s, stage);
        at.advance();
    }
}

template <finish FINISH>
__device__ __forceinline__ void w8a8_consume(const w8a8_params &p, w8a8_shared &s, uint32_t group)
{
    const uint32_t steps = w8a8_steps(p), warp = threadIdx.x / WARP;
    staging stage{hopper::shared_address(s.staging[warp])};
    w8a8_walk<1> tile(p, s.first);
    ring<W8A8_STAGES> at;
    while (tile.next()) {
        if (group * MMA_ROWS >= tile.rows) {
            w8a8_skip(s, at, steps);
            continue;
        }
        float sum[packed::ROWS / 2];
        const uint32_t row = tile.row + warp * STORE_ROWS;
        const int rows = int(tile.rows) - int(warp * STORE_ROWS);
        const row_weights w = load_row_weights(p, row, rows > 0 ? uint32_t(rows) : 0);
        w8a8_multiply(s, at, steps, p.packed_row_shift == 0, group, sum);
        if (p.out_f32)
            store_tile<FINISH, true, false>(p, sum, stage, tile.expert, row, rows, tile.weight_row,
                                            w);
        else
            store_tile<FINISH, false, false>(p, sum, stage, tile.expert, row, rows, tile.weight_row,
                                             w);
    }
    if (threadIdx.x % WARP == 0)
        hopper::store_wait_all();
}

/* Gate and up, to quantised hidden rows. */
template <bool SITU>
__device__ __forceinline__ void w8a8_consume_hidden(const w8a8_params &p, w8a8_shared &s,
                                                    uint32_t group)
{
    const uint32_t steps = w8a8_steps(p), warp = threadIdx.x / WARP;
    w8a8_walk<2> tile(p, s.first);
    ring<W8A8_STAGES> at;
    while (tile.next()) {
        const bool two = tile.weight_row + packed::ROWS < p.n;
        if (group * MMA_ROWS >= tile.rows) {
            w8a8_skip(s, at, two ? 2 * steps : steps);
            continue;
        }
        float sum[packed::ROWS / 2];
#pragma unroll 1
        for (uint32_t half = 0; half <= uint32_t(two); half++) {
            w8a8_multiply(s, at, steps, p.packed_row_shift == 0, group, sum);
            finish_gated<SITU>(p, sum, tile.expert, tile.weight_row / 2 + half * HIDDEN_HALF,
                               {1.0f, 1.0f});
            if (half == 0)
                put_aside(s.staging[warp], sum);
        }
        quantise_hidden(p, s.staging[warp], sum, two, tile.row + warp * STORE_ROWS,
                        int(tile.rows) - int(warp * STORE_ROWS), tile.weight_row / 2);
    }
}

/* Up alone, to quantised hidden rows. */
__device__ __forceinline__ void w8a8_consume_up(const w8a8_params &p, w8a8_shared &s,
                                                uint32_t group)
{
    const uint32_t steps = w8a8_steps(p), warp = threadIdx.x / WARP;
    w8a8_walk<1> tile(p, s.first);
    ring<W8A8_STAGES> at;
    while (tile.next()) {
        if (group * MMA_ROWS >= tile.rows) {
            w8a8_skip(s, at, steps);
            continue;
        }
        float sum[packed::ROWS / 2];
        w8a8_multiply(s, at, steps, p.packed_row_shift == 0, group, sum);
        finish_plain<true>(p, sum, tile.expert, tile.weight_row, {1.0f, 1.0f});
        put_aside(s.staging[warp], sum);
#pragma unroll
        for (uint32_t i = 0; i < HIDDEN_VALUES; i++)
            sum[i] = sum[HIDDEN_VALUES + i];
        quantise_hidden(p, s.staging[warp], sum, true, tile.row + warp * STORE_ROWS,
                        int(tile.rows) - int(warp * STORE_ROWS), tile.weight_row);
    }
}

/* QUANTISES: the results are quantised hidden rows. */
template <finish FINISH, bool QUANTISES>
__global__ void __launch_bounds__(W8A8_THREADS, 1)
    w8a8_kernel(const __grid_constant__ w8a8_params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr uint32_t BLOCKS = has_gates(FINISH) && QUANTISES ? 2 : 1;
    extern __shared__ __align__(1024) uint8_t memory[];
    stamp_begin(p.began);
    auto &s = *reinterpret_cast<w8a8_shared *>(memory);
    const uint32_t group = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0)
        init_barriers(s.full, s.empty, W8A8_WARPS);
    if (threadIdx.x / WARP == W8A8_WARPS)
        list_tiles<W8A8_ROWS, BLOCKS * packed::ROWS>(p, s.first);
    __syncthreads();
    if (group == W8A8_CONSUMERS) {
        hopper::registers_give_back<24>();
        if (threadIdx.x == W8A8_CONSUMERS * WARPGROUP)
            w8a8_produce<BLOCKS>(p, s);
    } else {
        hopper::registers_take<160>();
        if constexpr (QUANTISES && has_gates(FINISH))
            w8a8_consume_hidden<FINISH == finish::SITU>(p, s, group);
        else if constexpr (QUANTISES)
            w8a8_consume_up(p, s, group);
        else
            w8a8_consume<FINISH>(p, s, group);
    }
#endif
}

} // namespace ggemm

#endif
