/* SPDX-License-Identifier: Apache-2.0 */
/* The ring of stages between the copy engine and the tensor cores: how stages are filled and
 * released, and in which order. All forms of the product use it; they differ in how warps share
 * tiles. */
#ifndef MOE_CUDA_GGEMM_PIPELINE_CUH
#define MOE_CUDA_GGEMM_PIPELINE_CUH

#include "cuda/core/hopper.cuh"
#include "cuda/core/stamp.cuh"
#include "cuda/gemm/ggemm_params.cuh"
#include "cuda/plan/limits.h"

namespace ggemm
{

/* Shared memory of a block. A stage's rows are 128 bytes each, swizzled by the copy engine.
 * EXPERTS: as in moe_cuda_tile_shape. */
template <uint32_t ROWS, uint32_t COLUMNS, uint32_t STAGES, uint32_t STAGING, uint32_t EXPERTS>
struct shared {
    alignas(1024) uint8_t a[STAGES][ROWS * DEPTH_BYTES];
    alignas(1024) uint8_t b[STAGES][COLUMNS * DEPTH_BYTES];
    alignas(1024) uint8_t staging[STAGING]; /* results on their way out */
    uint64_t full[STAGES];                  /* the copy engine has filled the stage */
    uint64_t empty[STAGES];                 /* all warps that read the stage are done */
    const CUtensorMap *weights;             /* of this run */
    uint32_t first[EXPERTS + 1];
};

/* Position in the ring. */
template <uint32_t STAGES> struct ring {
    uint32_t stage = 0, phase = 0;

    __device__ __forceinline__ void advance()
    {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }

    __device__ __forceinline__ void skip(uint32_t steps)
    {
        const uint32_t to = stage + steps;
        phase ^= to / STAGES & 1;
        stage = to % STAGES;
    }
};

/* `readers`: warps that read each stage. */
template <uint32_t STAGES>
__device__ __forceinline__ void init_barriers(uint64_t (&full)[STAGES], uint64_t (&empty)[STAGES],
                                              uint32_t readers)
{
    for (uint32_t i = 0; i < STAGES; i++) {
        hopper::barrier_init(&full[i], 1);
        hopper::barrier_init(&empty[i], readers);
    }
    hopper::barrier_init_done();
}

/* Returns the map of this run's weights, for the whole block; one thread calls it before the block
 * synchronises. The acquire is needed because a copy wrote the map, and the engine's cache may hold
 * older data. */
template <bool BACK> __device__ __forceinline__ const CUtensorMap *take_weight_map(const params &p)
{
    const moe_cuda_ggemm_weights *w = *p.weights;
    const auto *map = reinterpret_cast<const CUtensorMap *>(BACK ? &w->back : &w->map[p.tile]);
    hopper::acquire_map(map);
    hopper::prefetch_map(map);
    return map;
}

constexpr uint32_t SLAB_BYTES = DEPTH * DEPTH_BYTES; /* 64 columns of 64 rows */

/* Loads the weights of one step of a product with W: 64 of their rows, COLUMNS columns in slabs of
 * 64. One instruction if slabs are a dimension of the map, else one per slab (tensor_map.cuh). */
template <uint32_t COLUMNS>
__device__ __forceinline__ void load_weight_slabs(uint8_t *to, const CUtensorMap *map, bool whole,
                                                  uint64_t *barrier, uint32_t column, uint32_t row,
                                                  uint32_t expert)
{
    if (whole) {
        hopper::load_box4(to, map, barrier, 0, row, column / DEPTH, expert);
        return;
    }
#pragma unroll
    for (uint32_t slab = 0; slab < COLUMNS / DEPTH; slab++)
        hopper::load_box3(to + slab * SLAB_BYTES, map, barrier, column + slab * DEPTH, row, expert);
}

/* One thread keeps the ring full, over all tiles of the block, with one box of rows and one of
 * weights per step. The engine's instruction rate is a limit when a step lasts 512 cycles. So a
 * short tile uses a separate map (a box of the next multiple of ROW_STEP), not several boxes.
 * Weights that no other tile reads are marked evict-first. */
template <uint32_t ROW_STEP, bool EVEN, bool BACK, uint32_t ROWS, uint32_t COLUMNS, uint32_t STAGES,
          uint32_t STAGING, uint32_t EXPERTS>
__device__ __forceinline__ void produce(const params &p,
                                        shared<ROWS, COLUMNS, STAGES, STAGING, EXPERTS> &s)
{
    static_assert(ROWS / ROW_STEP <= ROW_BOXES, "a map for every height");
    const uint32_t steps = (p.k + DEPTH - 1) / DEPTH;
    const uint64_t once = hopper::policy_evict_first();
    const CUtensorMap *weights = s.weights;
    tile_walk<ROWS, COLUMNS, EVEN ? ROW_GRAIN : 0> tile(p, s.first);
    ring<STAGES> at;
    while (tile.next()) {
        const uint32_t box = ((EVEN ? tile.height : tile.rows) - 1) / ROW_STEP;
        const CUtensorMap *rows = &p.rows[box];
        const uint32_t bytes = ((box + 1) * ROW_STEP + COLUMNS) * DEPTH_BYTES;
        for (uint32_t step = 0; step < steps; step++) {
            uint64_t *full = &s.full[at.stage];
            hopper::barrier_wait(&s.empty[at.stage], at.phase ^ 1);
            hopper::barrier_expect(full, bytes);
            if constexpr (BACK)
                load_weight_slabs<COLUMNS>(s.b[at.stage], weights, p.n % DEPTH == 0, full,
                                           tile.weight_row, step * DEPTH, tile.expert);
            else if (tile.only_row_tile)
                hopper::load_box3_once(s.b[at.stage], weights, full, step * DEPTH, tile.weight_row,
                                       tile.expert, once);
            else
                hopper::load_box3(s.b[at.stage], weights, full, step * DEPTH, tile.weight_row,
                                  tile.expert);
            hopper::load_box(s.a[at.stage], rows, full, step * DEPTH, tile.row);
            at.advance();
        }
    }
}

/* The main loop of one tile, by one warpgroup. Reads `steps` stages, leaves the last product in
 * flight and returns its stage, which finish_product releases. One product stays in flight while
 * the next is issued, so each stage is released one step late. */
template <bool BACK, uint32_t ROWS, uint32_t COLUMNS, uint32_t STAGES, uint32_t STAGING,
          uint32_t EXPERTS>
__device__ __forceinline__ uint32_t
multiply_tile(shared<ROWS, COLUMNS, STAGES, STAGING, EXPERTS> &s, ring<STAGES> &at, uint32_t steps,
              float (&acc)[ROWS / MMA_ROWS][COLUMNS / 2])
{
    const bool speaks = threadIdx.x % WARP == 0;
    uint32_t previous = 0;
    for (uint32_t step = 0; step < steps; step++) {
        hopper::barrier_wait(&s.full[at.stage], at.phase);
        hopper::multiply_fence();
        const uint32_t a = hopper::shared_address(s.a[at.stage]);
        const uint32_t b_address = hopper::shared_address(s.b[at.stage]);
        const uint64_t b =
            BACK ? hopper::operand_rows(b_address, SLAB_BYTES) : hopper::operand(b_address);
#pragma unroll
        for (uint32_t i = 0; i < DEPTH / 16; i++)
#pragma unroll
            for (uint32_t slab = 0; slab < ROWS / MMA_ROWS; slab++) {
                const uint64_t rows = hopper::operand(a + slab * MMA_ROWS * DEPTH_BYTES) + i * 2;
                if constexpr (BACK)
                    hopper::multiply<COLUMNS>::start_b_rows(
                        acc[slab], rows, b + i * hopper::OPERAND_16_ROWS, (step | i) != 0);
                else
                    hopper::multiply<COLUMNS>::start(acc[slab], rows, b + i * 2, (step | i) != 0);
            }
        hopper::multiply_commit();
        hopper::multiply_wait<1>();
        if (step > 0 && speaks)
            hopper::barrier_arrive(&s.empty[previous]);
        previous = at.stage;
        at.advance();
    }
    return previous;
}

template <uint32_t ROWS, uint32_t COLUMNS, uint32_t STAGES, uint32_t STAGING, uint32_t EXPERTS>
__device__ __forceinline__ void finish_product(shared<ROWS, COLUMNS, STAGES, STAGING, EXPERTS> &s,
                                               uint32_t last_stage,
                                               float (&acc)[ROWS / MMA_ROWS][COLUMNS / 2])
{
    hopper::multiply_wait<0>();
    if (threadIdx.x % WARP == 0)
        hopper::barrier_arrive(&s.empty[last_stage]);
#pragma unroll
    for (uint32_t slab = 0; slab < ROWS / MMA_ROWS; slab++)
        hopper::multiply_done(acc[slab]);
}

} // namespace ggemm

#endif
