/* SPDX-License-Identifier: Apache-2.0 */
/* Grouped GEMM for many rows per expert: the tensor cores are the limit. Also for short K:
 * finishing a tile takes a large part of the time.
 *
 * Tile      128 x 128 x 64, 6 stages in flight. Rows are read in boxes of 64 or 128.
 * Warps     0-3 and 4-7 are two consumers that alternate tiles: while one stores, the other
 *           multiplies. Warp 8 issues loads to the copy engine and lists the tiles. 9-11 only give
 *           up their registers.
 * Shared    226 KB: one block per SM, persistent.
 * Registers per thread: 40 in the last warpgroup, 232 in the consumers (64 K in total; 168 at
 *           launch).
 *
 * A barrier's parity distinguishes only two successive phases. A consumer that skips a tile may be
 * two phases behind the ring. So it enters only after the other has passed its last wait. The named
 * barriers TURN and TURN + 1 pass the ring between them. */
#ifndef MOE_CUDA_GGEMM_PINGPONG_CUH
#define MOE_CUDA_GGEMM_PINGPONG_CUH

#include "cuda/gemm/ggemm_epilogue.cuh"
#include "cuda/gemm/ggemm_pipeline.cuh"

namespace ggemm
{

constexpr uint32_t PINGPONG_ROWS = 128, PINGPONG_COLUMNS = 128, PINGPONG_STAGES = 6;
constexpr uint32_t PINGPONG_THREADS = 3 * WARPGROUP, PINGPONG_ROW_STEP = 64;
constexpr int RING_BARRIER = 1;

using pingpong_shared = shared<PINGPONG_ROWS, PINGPONG_COLUMNS, PINGPONG_STAGES,
                               2 * WARPGROUP / WARP * WARP_STAGING, MOE_CUDA_PINGPONG_EXPERTS>;

template <finish FINISH, bool F32, bool BACK, bool SAVE>
__device__ __forceinline__ void pingpong_consume(const params &p, pingpong_shared &s,
                                                 uint32_t group)
{
    constexpr uint32_t SLABS = PINGPONG_ROWS / MMA_ROWS;
    const uint32_t warp = threadIdx.x % WARPGROUP / WARP;
    const uint32_t steps = (p.k + DEPTH - 1) / DEPTH;
    staging stage{hopper::shared_address(s.staging + threadIdx.x / WARP * WARP_STAGING)};
    tile_walk<PINGPONG_ROWS, PINGPONG_COLUMNS> tile(p, s.first);
    ring<PINGPONG_STAGES> at;
    for (uint32_t number = 0; tile.next(); number++) {
        if (number % 2 != group) {
            at.skip(steps);
            continue;
        }
        float acc[SLABS][PINGPONG_COLUMNS / 2];
        const uint32_t row = tile.row + warp * STORE_ROWS;
        const int rows = int(tile.rows) - int(warp * STORE_ROWS);
        row_weights w[SLABS];
#pragma unroll
        for (uint32_t slab = 0; slab < SLABS; slab++) {
            const int left = rows - int(slab * MMA_ROWS);
            w[slab] = load_row_weights(p, row + slab * MMA_ROWS, left > 0 ? uint32_t(left) : 0);
        }
        if (number > 0)
            hopper::named_wait(RING_BARRIER + int(group), 2 * WARPGROUP);
        const uint32_t last = multiply_tile<BACK>(s, at, steps, acc);
        hopper::named_arrive(RING_BARRIER + int(group ^ 1), 2 * WARPGROUP);
        finish_product(s, last, acc);
#pragma unroll
        for (uint32_t slab = 0; slab < SLABS; slab++)
            store_tile<FINISH, F32, SAVE>(p, acc[slab], stage, tile.expert, row + slab * MMA_ROWS,
                                          rows - int(slab * MMA_ROWS), tile.weight_row, w[slab]);
    }
    if (threadIdx.x % WARP == 0)
        hopper::store_wait_all();
}

template <finish FINISH, bool F32, bool BACK, bool SAVE>
__global__ void __launch_bounds__(PINGPONG_THREADS, 1)
    pingpong_kernel(const __grid_constant__ params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    stamp_begin(p.began);
    auto &s = *reinterpret_cast<pingpong_shared *>(memory);
    const uint32_t group = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0) {
        init_barriers(s.full, s.empty, WARPGROUP / WARP);
        s.weights = take_weight_map<BACK>(p);
        hopper::prefetch_map(&p.rows[PINGPONG_ROWS / PINGPONG_ROW_STEP - 1]);
    }
    if (threadIdx.x / WARP == 2 * WARPGROUP / WARP)
        list_tiles<PINGPONG_ROWS, PINGPONG_COLUMNS>(p, s.first);
    __syncthreads();
    if (group == 2) {
        hopper::registers_give_back<40>();
        if (threadIdx.x == 2 * WARPGROUP)
            produce<PINGPONG_ROW_STEP, false, BACK>(p, s);
    } else {
        hopper::registers_take<232>();
        pingpong_consume<FINISH, F32, BACK, SAVE>(p, s, group);
    }
#endif
}

} // namespace ggemm

#endif
