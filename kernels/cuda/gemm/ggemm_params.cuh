/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments of a grouped GEMM kernel, and the list of tiles that the kernel makes from them.
 *
 * The list is never stored. One warp scans the experts' row counts into a prefix of tile numbers in
 * shared memory. Then every warp walks the tiles blockIdx, blockIdx + gridDim, ... itself. All
 * warps of a block see the same sequence, so they need no messages. */
#ifndef MOE_CUDA_GGEMM_PARAMS_CUH
#define MOE_CUDA_GGEMM_PARAMS_CUH

#include "common/activation_math.h"
#include "cuda/gemm/ggemm.h"

#include <cuda.h>
#include <stdint.h>

namespace ggemm
{

constexpr uint32_t DEPTH = 64; /* along K, per pipeline step: 128 bytes of bf16 */
constexpr uint32_t DEPTH_BYTES = 2 * DEPTH;
constexpr uint32_t WARP = 32;
constexpr uint32_t WARPGROUP = 128;
constexpr uint32_t MMA_ROWS = 64;   /* of one warpgroup instruction; 16 per warp */
constexpr uint32_t STORE_ROWS = 16; /* box of a store: one warp's rows */
constexpr uint32_t STORE_COLUMNS = 64;
constexpr uint32_t STORE_BYTES = STORE_ROWS * STORE_COLUMNS * 2;
constexpr uint32_t WARP_STAGING = 2 * STORE_BYTES; /* one fills while the other is sent */

constexpr uint32_t ROW_BOXES = 8; /* maps in params.rows: one per box height */

/* What becomes of the sums: they are weighted; or an activation follows, with gate and up, SiTU
 * with gate and up, or squared ReLU with up alone. */
enum class finish { PLAIN, GATED, SITU, UP };

__host__ __device__ constexpr bool has_gates(finish f)
{
    return f == finish::GATED || f == finish::SITU;
}

/* The rows of each expert, and the width of what is cut into tiles. */
struct row_groups {
    const uint32_t *start, *count; /* [experts] */
    uint32_t experts;
    uint32_t n; /* rows of an expert's weights: columns of the product */
};

/* Passed by value as a __grid_constant__: the copy engine reads the maps in place. */
struct params : row_groups {
    CUtensorMap rows[ROW_BOXES]; /* [row_capacity, k], boxes of 1, 2, ... times the row step */
    CUtensorMap out; /* [row_capacity, out_n], box of one warp's store; bf16 output only */
    void *out_rows;  /* [row_capacity, out_stride] */
    const moe_cuda_ggemm_weights *const *weights; /* maps and biases of this run's layer */
    /* [row_capacity], or NULL = 1. Multiplies gate and up before their biases; plain: the
     * result. */
    const float *row_weight;
    uint32_t tile;  /* selects the weights' map; unused with `back` */
    uint32_t k;     /* columns of an expert's weights */
    uint32_t out_n; /* n; or n / 2 where gate and up become one */
    uint32_t out_stride;
    bool has_bias;
    /* Only for kernels with packed weights; others know the first one when they are compiled. */
    bool out_f32;
    uint32_t packed_scale_bytes, packed_row_shift; /* of a block (packed_layout.cuh) */
    const moe_cuda_ggemm_pre *pre;                 /* only for kernels that store gate and up */
    uint64_t *began;                               /* receives the kernel's start time, or NULL */
    float limit;                                   /* of the activation; see ggemm_epilogue.cuh */
    struct moe_activation_shape activation;        /* SiTU: alpha */
};

/* Row tiles of an expert that pass over its weights together, before the next columns. */
constexpr uint32_t STRIP = 8;

constexpr uint32_t ROW_GRAIN = 16; /* usual grain of even tiles */

/* first[e] = number of the first tile of expert e; first[experts] = number of tiles. Called by one
 * warp; the block must synchronise afterwards. */
template <uint32_t ROWS, uint32_t COLUMNS>
__device__ __forceinline__ void list_tiles(const row_groups &p, uint32_t *first)
{
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t columns = (p.n + COLUMNS - 1) / COLUMNS;
    uint32_t before = 0;
    if (lane == 0)
        first[0] = 0;
#pragma unroll 4
    for (uint32_t base = 0; base < p.experts; base += WARP) {
        const uint32_t e = base + lane;
        const uint32_t count = e < p.experts ? __ldg(p.count + e) : 0;
        uint32_t sum = (count + ROWS - 1) / ROWS * columns;
#pragma unroll
        for (uint32_t step = 1; step < WARP; step *= 2) {
            const uint32_t left = __shfl_up_sync(~0u, sum, step);
            sum += lane >= step ? left : 0;
        }
        if (e < p.experts)
            first[e + 1] = before + sum;
        before += __shfl_sync(~0u, sum, WARP - 1);
    }
}

/* The tiles of this block, in order. A tile has at most ROWS rows. An expert's rows are cut at
 * multiples of ROWS, or, with a GRAIN, into pieces of equal height, a multiple of GRAIN. */
template <uint32_t ROWS, uint32_t COLUMNS, uint32_t GRAIN = 0> class tile_walk
{
  public:
    uint32_t expert = 0;
    uint32_t row;        /* first row of the tile, in the buffer of all experts */
    uint32_t rows;       /* of the tile that exist: 1..height */
    uint32_t height;     /* rows to compute */
    uint32_t weight_row; /* first of the expert's weight rows; a weight row is a column of the
                            product */
    bool only_row_tile;  /* no other tile reads these weights */

    __device__ __forceinline__ tile_walk(const row_groups &p, const uint32_t *first)
        : p_(p), first_(first), columns_((p.n + COLUMNS - 1) / COLUMNS), tile_(blockIdx.x)
    {
    }

    __device__ __forceinline__ bool next()
    {
        const uint32_t tile = tile_;
        if (tile >= first_[p_.experts])
            return false;
        tile_ += gridDim.x;
        if (tile >= end_)
            seek(tile);
        place(tile - first_[expert]);
        return true;
    }

  private:
    const row_groups &p_;
    const uint32_t *first_;
    uint32_t columns_, tile_;
    uint32_t end_ = 0; /* first tile of the next expert */
    uint32_t start_ = 0, count_ = 0;
    uint32_t row_tiles_ = 0; /* of the expert */

    /* Finds the last expert with first tile <= `tile`. Experts without rows have no tiles. */
    __device__ __forceinline__ void seek(uint32_t tile)
    {
        uint32_t low = expert, high = p_.experts;
        while (high - low > 1) {
            const uint32_t middle = (low + high) / 2;
            if (first_[middle] <= tile)
                low = middle;
            else
                high = middle;
        }
        expert = low;
        end_ = first_[low + 1];
        start_ = __ldg(p_.start + low);
        count_ = __ldg(p_.count + low);
        row_tiles_ = (count_ + ROWS - 1) / ROWS;
        height = ROWS;
        if constexpr (GRAIN != 0) {
            const uint32_t share = (count_ + row_tiles_ - 1) / row_tiles_;
            height = (share + GRAIN - 1) / GRAIN * GRAIN;
        }
    }

    /* Rows vary fastest inside a strip of row tiles, then columns: blocks that run at the same time
     * share weights in L2. */
    __device__ __forceinline__ void place(uint32_t index)
    {
        const uint32_t strip = index / (STRIP * columns_);
        const uint32_t within = index - strip * STRIP * columns_;
        const uint32_t deep = min(STRIP, row_tiles_ - strip * STRIP);
        const uint32_t column_tile = within / deep;
        const uint32_t row_tile = strip * STRIP + within - column_tile * deep;
        weight_row = column_tile * COLUMNS;
        row = start_ + row_tile * height;
        rows = min(height, count_ - row_tile * height);
        only_row_tile = row_tiles_ == 1;
    }
};

} // namespace ggemm

#endif
