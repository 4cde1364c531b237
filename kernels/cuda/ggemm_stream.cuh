/* Grouped GEMM for few rows per expert, where reading the weights is the work.
 *
 * Tile     64 x COLUMNS x 64, STAGES in flight: 64 x 128 with 8 (decode) or 64 x 256 with 5
 *          (middle). A tile of up to 16 rows is read in a box of 16.
 * Warps    0-3 multiply and store, 4 keeps the copy engine busy and makes the list of tiles.
 * Shared   decode 215 KB, middle 223 KB: one block per SM, persistent.
 * Registers no cap below 255: 160 threads need none.
 * Weights of an expert with a single row tile are marked evict-first: nobody reads them again. */
#ifndef MOE_CUDA_GGEMM_STREAM_CUH
#define MOE_CUDA_GGEMM_STREAM_CUH

#include "ggemm_epilogue.cuh"
#include "ggemm_pipeline.cuh"

namespace ggemm
{

constexpr uint32_t STREAM_THREADS = WARPGROUP + WARP;

template <uint32_t COLUMNS, uint32_t STAGES>
using stream_shared = shared<MMA_ROWS, COLUMNS, STAGES, 1>;

template <uint32_t COLUMNS, uint32_t STAGES, bool GATED, bool F32>
__device__ __forceinline__ void stream_consume(const params &p,
                                               stream_shared<COLUMNS, STAGES> &s)
{
    const uint32_t warp = threadIdx.x / WARP;
    const uint32_t steps = (p.k + DEPTH - 1) / DEPTH;
    staging stage{hopper::shared_address(s.staging[warp])};
    tile_walk<MMA_ROWS, COLUMNS> tile(p, s.first);
    ring<STAGES> at;
    while (tile.next()) {
        float acc[1][COLUMNS / 2];
        const uint32_t row = tile.row + warp * STORE_ROWS;
        const int rows = int(tile.rows) - int(warp * STORE_ROWS);
        const row_weights w = load_row_weights(p, row, rows > 0 ? uint32_t(rows) : 0);
        const uint32_t last = multiply_tile(s, at, steps, acc);
        finish_product(s, last, acc);
        store_tile<GATED, F32>(p, acc[0], stage, tile.expert, row, rows, tile.weight_row, w);
    }
    if (threadIdx.x % WARP == 0)
        hopper::store_wait_all();
}

template <uint32_t COLUMNS, uint32_t STAGES, bool GATED, bool F32>
__global__ void __launch_bounds__(STREAM_THREADS, 1)
    stream_kernel(const __grid_constant__ params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    auto &s = *reinterpret_cast<stream_shared<COLUMNS, STAGES> *>(memory);
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / WARP, 0);
    if (threadIdx.x == 0) {
        init_barriers(s.full, s.empty);
        hopper::prefetch_map(&p.weights);
        hopper::prefetch_map(&p.rows_short);
    }
    if (warp == WARPGROUP / WARP)
        list_tiles<MMA_ROWS, COLUMNS>(p, s.first);
    __syncthreads();
    if (warp < WARPGROUP / WARP)
        stream_consume<COLUMNS, STAGES, GATED, F32>(p, s);
    else if (threadIdx.x == WARPGROUP)
        produce<MMA_ROWS, STORE_ROWS>(p, s);
#endif
}

} // namespace ggemm

#endif
