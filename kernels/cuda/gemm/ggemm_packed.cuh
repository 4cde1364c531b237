/* SPDX-License-Identifier: Apache-2.0 */
/* Grouped GEMM with weights that stay quantised in memory (packed.h).
 *
 * Weights are the instruction's 64-row operand, converted in registers; an expert's rows are the
 * other one, from shared memory. Each output is one chain of sums in ascending columns whatever the
 * tile is: a row's bits depend on that row and its expert alone, and all tiles give the same bits.
 *
 * Scales of products: between two steps of 128 columns, the sum is multiplied by the ratio of their
 * scales, and after the last one by its scale. So it needs no second set of registers.
 *
 * Tiles     few rows: 128 weight rows (4-bit elements: 256) x up to 32 rows x 128; many: 128 x up
 *           to 128 x 128. As many stages in flight as fit.
 * Warps     CONSUMERS warpgroups with 64 weight rows each; all read the same rows. The first warp
 *           of the last warpgroup issues loads to the copy engine and lists the tiles; the others
 *           only give up their registers.
 * Shared    up to 227 KB: one block per SM, persistent.
 * Registers per thread: 240 in two consumers and 24 in the last warpgroup; 112 and 32 with four.
 *
 * Operands of 32 columns are in flight while the next 32 are converted, also from one stage to the
 * next. Few rows and 4-bit elements need four consumers: conversion is most of the work. */
#ifndef MOE_CUDA_GGEMM_PACKED_CUH
#define MOE_CUDA_GGEMM_PACKED_CUH

#include "cuda/gemm/ggemm_packed_convert.cuh"
#include "cuda/gemm/ggemm_packed_launch.cuh"
#include "cuda/gemm/ggemm_pipeline.cuh"
#include "cuda/gemm/ggemm_transposed.cuh"

namespace ggemm
{

constexpr uint32_t PACKED_HALVES = packed::COLUMNS / DEPTH; /* boxes of rows in a stage */
constexpr int PACKED_OWN = 1;                               /* named barriers */

/* A kernel's elements and kind of scales (any packing that has them), rows of its tile, and
 * consumers. */
template <moe_cuda_packing PACKING, uint32_t TILE_ROWS, uint32_t CONSUMER_COUNT>
struct packed_form {
    static constexpr moe_cuda_packing P = PACKING;
    static constexpr uint32_t ROWS = TILE_ROWS, CONSUMERS = CONSUMER_COUNT;
    static constexpr uint32_t THREADS = (CONSUMERS + 1) * WARPGROUP;
    static constexpr uint32_t WEIGHT_ROWS = CONSUMERS * MMA_ROWS;
    static constexpr uint32_t BLOCKS = WEIGHT_ROWS / packed::ROWS;
    static constexpr uint32_t BLOCK =
        (packed::element_bytes(P) + packed::max_scale_bytes(P) + 127) / 128 * 128;
    static constexpr uint32_t CHUNK = ROWS < 64 ? ROWS : 64; /* rows that are stored together */
    static constexpr uint32_t STAGING = CONSUMERS * CHUNK * CHUNK_ROW_BYTES;
    static constexpr uint32_t STAGE = PACKED_HALVES * ROWS * DEPTH_BYTES + BLOCKS * BLOCK;
    static constexpr uint32_t TABLES = 4 * (MOE_CUDA_MAX_EXPERTS + 1) + 1024;
    static constexpr uint32_t STAGES = (227 * 1024 - STAGING - TABLES) / (STAGE + 16);
    static constexpr uint32_t ROW_BOXES = packed_boxes(ROWS);
    /* Together, a block's threads must not take more than it was launched with. */
    static constexpr int REGISTERS = CONSUMERS == 2 ? 240 : 112;
    static constexpr int REGISTERS_LEFT = CONSUMERS == 2 ? 24 : 32;
    static_assert(REGISTERS * CONSUMERS + REGISTERS_LEFT <=
                      65536 / THREADS / 8 * 8 * (CONSUMERS + 1),
                  "else a consumer waits for registers for ever");
    using walk = tile_walk<ROWS, WEIGHT_ROWS, ROW_GRAIN>;
};

template <class F> struct packed_shared {
    alignas(1024) uint8_t x[F::STAGES][PACKED_HALVES][F::ROWS * DEPTH_BYTES];
    alignas(1024) uint8_t staging[F::STAGING];
    alignas(128) uint8_t weights[F::STAGES][F::BLOCKS][F::BLOCK];
    uint64_t full[F::STAGES], empty[F::STAGES];
    uint32_t first[MOE_CUDA_MAX_EXPERTS + 1];
};

/* One thread keeps the ring full: blocks of weights and two boxes of rows per stage. */
template <class F>
__device__ __forceinline__ void packed_produce(const params &p, packed_shared<F> &s)
{
    constexpr uint32_t ROW_STEP = F::ROWS / F::ROW_BOXES;
    const uint32_t block_bytes = packed::element_bytes(F::P) + p.packed_scale_bytes;
    const uint32_t steps = (p.k + packed::COLUMNS - 1) / packed::COLUMNS;
    const uint32_t tiles = (p.n + packed::ROWS - 1) / packed::ROWS;
    const uint64_t once = hopper::policy_evict_first();
    const auto *weights = static_cast<const uint8_t *>((*p.weights)->data);
    typename F::walk tile(p, s.first);
    ring<F::STAGES> at;
    while (tile.next()) {
        const uint32_t box = (tile.rows - 1) / ROW_STEP, tile_row = tile.weight_row / packed::ROWS;
        const uint32_t blocks = min(F::BLOCKS, tiles - tile_row);
        const CUtensorMap *rows = &p.rows[box];
        const uint32_t bytes =
            (box + 1) * ROW_STEP * DEPTH_BYTES * PACKED_HALVES + blocks * block_bytes;
        const size_t apart = size_t(steps) * block_bytes;
        const uint8_t *block = weights + (size_t(tile.expert) * tiles + tile_row) * apart;
        for (uint32_t step = 0; step < steps; step++, block += block_bytes) {
            uint64_t *full = &s.full[at.stage];
            hopper::barrier_wait(&s.empty[at.stage], at.phase ^ 1);
            hopper::barrier_expect(full, bytes);
            for (uint32_t b = 0; b < blocks; b++)
                if (tile.only_row_tile)
                    hopper::load_bytes_once(s.weights[at.stage][b], block + b * apart, full,
                                            block_bytes, once);
                else
                    hopper::load_bytes(s.weights[at.stage][b], block + b * apart, full,
                                       block_bytes);
#pragma unroll
            for (uint32_t half = 0; half < PACKED_HALVES; half++)
                hopper::load_box(s.x[at.stage][half], rows, full,
                                 step * packed::COLUMNS + half * DEPTH, tile.row);
            at.advance();
        }
    }
}

/* Starts the products of 32 columns, number i of a stage. */
template <uint32_t N, uint32_t BYTES, uint32_t SIZE>
__device__ __forceinline__ void packed_start(const uint8_t (&x)[PACKED_HALVES][BYTES], uint32_t i,
                                             const uint32_t (&a)[8], float (&sum)[SIZE])
{
    const uint64_t rows = hopper::operand(hopper::shared_address(x[i / 2])) + i % 2 * 4;
    hopper::multiply_fence();
    hopper::multiply_registers<N>::start(sum, a, rows, true);
    hopper::multiply_registers<N>::start(sum, a + 4, rows + 2, true);
    hopper::multiply_commit();
}

/* Multiplies the sums of a thread's two weight rows. */
template <uint32_t N, uint32_t SIZE>
__device__ __forceinline__ void packed_scale(float (&sum)[SIZE], float upper, float lower)
{
#pragma unroll
    for (uint32_t j = 0; j < N / 2; j++)
        sum[j] *= j / 2 % 2 == 0 ? upper : lower;
}

template <uint32_t STAGES>
__device__ __forceinline__ void packed_release(uint64_t (&empty)[STAGES], uint32_t stage)
{
    __syncwarp();
    if (threadIdx.x % WARP == 0)
        hopper::barrier_arrive(&empty[stage]);
}

/* sum = the product of one tile of N rows, for one consumer. */
template <uint32_t N, class F>
__device__ __forceinline__ void packed_multiply(packed_shared<F> &s, ring<F::STAGES> &at,
                                                uint32_t steps, uint32_t row_shift, uint32_t group,
                                                float (&sum)[F::ROWS / 2])
{
    constexpr bool BY_STEP = packed::scales_product(F::P);
    packed_step<F::P> now;
    uint32_t a[2][8];
    float upper = 1, lower = 1; /* scales of the step in flight */
#pragma unroll
    for (uint32_t j = 0; j < N / 2; j++)
        sum[j] = 0;
    hopper::barrier_wait(&s.full[at.stage], at.phase);
    now.load(s.weights[at.stage][group / 2], group % 2, row_shift);
    now.template convert<0>(a[0]);
    uint32_t stage = 0;
    for (uint32_t step = 0; step < steps; step++) {
        /* The same in all lanes. The shuffle tells the compiler, which then computes addresses once
         * for a warp. */
        const auto &x = s.x[__shfl_sync(~0u, at.stage, 0)];
        packed_start<N>(x, 0, a[0], sum);
        hopper::multiply_wait<1>();
        if (!BY_STEP && step > 0)
            packed_release(s.empty, stage);
        now.template convert<1>(a[1]);
        packed_start<N>(x, 1, a[1], sum);
        hopper::multiply_wait<1>();
        now.template convert<2>(a[0]);
        packed_start<N>(x, 2, a[0], sum);
        hopper::multiply_wait<1>();
        now.template convert<3>(a[1]);
        packed_start<N>(x, 3, a[1], sum);
        stage = at.stage;
        at.advance();
        upper = now.upper();
        lower = now.lower();
        if (step + 1 == steps)
            break;
        hopper::barrier_wait(&s.full[at.stage], at.phase);
        now.load(s.weights[at.stage][group / 2], group % 2, row_shift);
        hopper::multiply_wait<1>();
        now.template convert<0>(a[0]);
        if constexpr (BY_STEP) {
            hopper::multiply_wait<0>();
            hopper::multiply_done(sum);
            packed_release(s.empty, stage);
            packed_scale<N>(sum, __fdividef(upper, now.upper()), __fdividef(lower, now.lower()));
        }
    }
    hopper::multiply_wait<0>();
    hopper::multiply_done(sum);
    packed_release(s.empty, stage);
    packed_scale<N>(sum, upper, lower);
}

/* Uses the smallest N that holds `rows`. */
template <class F, uint32_t N = F::ROWS>
__device__ __forceinline__ void
packed_multiply_rows(packed_shared<F> &s, ring<F::STAGES> &at, uint32_t steps, uint32_t row_shift,
                     uint32_t group, uint32_t rows, float (&sum)[F::ROWS / 2])
{
    constexpr uint32_t NEXT = N > 32 ? N - 32 : N / 2;
    if constexpr (N > 8)
        if (rows <= NEXT)
            return packed_multiply_rows<F, NEXT>(s, at, steps, row_shift, group, rows, sum);
    packed_multiply<N, F>(s, at, steps, row_shift, group, sum);
}

template <class F, finish FINISH>
__device__ __forceinline__ void packed_consume(const params &p, packed_shared<F> &s, uint32_t group)
{
    const uint32_t steps = (p.k + packed::COLUMNS - 1) / packed::COLUMNS;
    const uint32_t chunk = hopper::shared_address(s.staging) + group * F::CHUNK * CHUNK_ROW_BYTES;
    const int own = PACKED_OWN + int(group);
    typename F::walk tile(p, s.first);
    ring<F::STAGES> at;
    while (tile.next()) {
        float sum[F::ROWS / 2];
        packed_multiply_rows<F>(s, at, steps, p.packed_row_shift, group, tile.rows, sum);
        const uint32_t weight_row = tile.weight_row + group * MMA_ROWS;
        if (p.out_f32)
            store_transposed_tile<FINISH, true, false, F::CHUNK, F::ROWS>(p, tile, weight_row, sum,
                                                                          chunk, own);
        else if (FINISH == finish::GATED && p.pre != nullptr)
            store_transposed_tile<FINISH, false, FINISH == finish::GATED, F::CHUNK, F::ROWS>(
                p, tile, weight_row, sum, chunk, own);
        else
            store_transposed_tile<FINISH, false, false, F::CHUNK, F::ROWS>(p, tile, weight_row, sum,
                                                                           chunk, own);
    }
}

template <class F, finish FINISH>
__global__ void __launch_bounds__(F::THREADS, 1) packed_kernel(const __grid_constant__ params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    stamp_begin(p.began);
    auto &s = *reinterpret_cast<packed_shared<F> *>(memory);
    const uint32_t group = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0)
        init_barriers(s.full, s.empty, F::CONSUMERS * WARPGROUP / WARP);
    if (threadIdx.x / WARP == F::CONSUMERS * WARPGROUP / WARP)
        list_tiles<F::ROWS, F::WEIGHT_ROWS>(p, s.first);
    __syncthreads();
    if (group == F::CONSUMERS) {
        hopper::registers_give_back<F::REGISTERS_LEFT>();
        if (threadIdx.x == F::CONSUMERS * WARPGROUP)
            packed_produce<F>(p, s);
    } else {
        hopper::registers_take<F::REGISTERS>();
        packed_consume<F, FINISH>(p, s, group);
    }
#endif
}

} // namespace ggemm

#endif
