/* SPDX-License-Identifier: Apache-2.0 */
/* Grouped GEMM for few rows per expert, where most of the time goes to reading the weights.
 *
 * Tile      64 x 128 x 64, 8 stages in flight. Rows are read in boxes of 16, 32, 48 or 64. With
 *           few tiles: 64 x 64 x 64 in 12 stages, or 64 x 32 x 64 in 16. Each sum has the same
 *           order of K, so the bits are the same.
 * Warps     0-3 multiply and store. Warp 4 issues loads to the copy engine and lists the tiles.
 * Shared    211 KB: one block per SM, persistent.
 * Registers up to 255 per thread: 160 threads need no lower limit. */
#ifndef MOE_CUDA_GGEMM_STREAM_CUH
#define MOE_CUDA_GGEMM_STREAM_CUH

#include "cuda/gemm/ggemm_epilogue.cuh"
#include "cuda/gemm/ggemm_pipeline.cuh"

namespace ggemm
{

constexpr uint32_t STREAM_COLUMNS = 128; /* of the wide tile */
constexpr uint32_t STREAM_THREADS = WARPGROUP + WARP, STREAM_ROW_STEP = 16;

/* A stage has 24, 16 or 12 KB. */
template <uint32_t COLUMNS>
constexpr uint32_t STREAM_STAGES = COLUMNS == STREAM_COLUMNS ? 8
                                   : COLUMNS == 64           ? 12
                                                             : 16;

template <uint32_t COLUMNS>
using stream_shared = shared<MMA_ROWS, COLUMNS, STREAM_STAGES<COLUMNS>,
                             WARPGROUP / WARP * WARP_STAGING, MOE_CUDA_MAX_EXPERTS>;

template <uint32_t COLUMNS, finish FINISH, bool F32, bool BACK, bool SAVE>
__device__ __forceinline__ void stream_consume(const params &p, stream_shared<COLUMNS> &s)
{
    const uint32_t warp = threadIdx.x / WARP;
    const uint32_t steps = (p.k + DEPTH - 1) / DEPTH;
    staging stage{hopper::shared_address(s.staging + warp * WARP_STAGING)};
    tile_walk<MMA_ROWS, COLUMNS> tile(p, s.first);
    ring<STREAM_STAGES<COLUMNS>> at;
    while (tile.next()) {
        float acc[1][COLUMNS / 2];
        const uint32_t row = tile.row + warp * STORE_ROWS;
        const int rows = int(tile.rows) - int(warp * STORE_ROWS);
        const row_weights w = load_row_weights(p, row, rows > 0 ? uint32_t(rows) : 0);
        const uint32_t last = multiply_tile<BACK>(s, at, steps, acc);
        finish_product(s, last, acc);
        store_tile<FINISH, F32, SAVE>(p, acc[0], stage, tile.expert, row, rows, tile.weight_row, w);
    }
    if (threadIdx.x % WARP == 0)
        hopper::store_wait_all();
}

template <uint32_t COLUMNS, finish FINISH, bool F32, bool BACK, bool SAVE>
__global__ void __launch_bounds__(STREAM_THREADS, 1) stream_kernel(const __grid_constant__ params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    stamp_begin(p.began);
    auto &s = *reinterpret_cast<stream_shared<COLUMNS> *>(memory);
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / WARP, 0);
    if (threadIdx.x == 0) {
        init_barriers(s.full, s.empty, WARPGROUP / WARP);
        s.weights = take_weight_map<BACK>(p);
        hopper::prefetch_map(&p.rows[0]);
    }
    if (warp == WARPGROUP / WARP)
        list_tiles<MMA_ROWS, COLUMNS>(p, s.first);
    __syncthreads();
    if (warp < WARPGROUP / WARP)
        stream_consume<COLUMNS, FINISH, F32, BACK, SAVE>(p, s);
    else if (threadIdx.x == WARPGROUP)
        produce<STREAM_ROW_STEP, false, BACK>(p, s);
#endif
}

} // namespace ggemm

#endif
