/* SPDX-License-Identifier: Apache-2.0 */
/* Grouped GEMM for any number of rows per expert above a few: rounding up to tiles costs little.
 *
 * Weights are the instruction's 64-row operand. An expert's rows are the other operand, which has
 * steps of 16, so the rows are cut into equal tiles of up to 192. Up to 192 rows, an expert's
 * weights are read once. Beyond, tiles that share weights stay in step because they are equal; a
 * shorter last tile would run ahead and read the weights from memory again.
 *
 * Tile      128 weight rows x up to 192 rows x 64, 5 stages in flight. Rows are read in boxes of
 *           32, 64, ... 192. With few tiles: 64 weight rows, 6 stages. Each sum has the same order
 *           of K, so the bits are the same.
 * Warps     0-3 and 4-7 are two consumers that alternate tiles: while one stores, the other
 *           multiplies. Warp 8 issues loads to the copy engine and lists the tiles. 9-11 only give
 *           up their registers.
 * Shared    218 KB (64 weight rows: 212 KB): one block per SM, persistent.
 * Registers per thread: 24 in the last warpgroup, 240 in the consumers (64 K in total; 168 at
 *           launch).
 *
 * A barrier's parity distinguishes only two successive phases. A consumer that skips a tile may be
 * two phases behind the ring, so it enters only after the other has passed its last wait. The named
 * barriers EVEN_RING and EVEN_RING + 1 pass the ring between them. */
#ifndef MOE_CUDA_GGEMM_EVEN_CUH
#define MOE_CUDA_GGEMM_EVEN_CUH

#include "cuda/gemm/ggemm_pipeline.cuh"
#include "cuda/gemm/ggemm_transposed.cuh"

namespace ggemm
{

constexpr uint32_t EVEN_ROWS = 192, EVEN_ROW_STEP = 32, EVEN_CHUNK = 64;
constexpr uint32_t EVEN_COLUMNS = 128; /* of the wide tile */
constexpr uint32_t EVEN_SLABS = EVEN_COLUMNS / MMA_ROWS;
constexpr uint32_t EVEN_THREADS = 3 * WARPGROUP;
constexpr int EVEN_RING = 1, EVEN_OWN = 3; /* named barriers */

/* A tile has SLABS * 64 weight rows; a stage has 40 or 32 KB. */
template <uint32_t SLABS> constexpr uint32_t EVEN_STAGES = SLABS == EVEN_SLABS ? 5 : 6;

template <uint32_t SLABS>
using even_shared = shared<EVEN_ROWS, SLABS * MMA_ROWS, EVEN_STAGES<SLABS>,
                           2 * EVEN_CHUNK * CHUNK_ROW_BYTES, MOE_CUDA_MAX_EXPERTS>;
template <uint32_t SLABS> using even_ring = ring<EVEN_STAGES<SLABS>>;
template <uint32_t SLABS> using even_sums = float[SLABS][EVEN_ROWS / 2];
static_assert(MMA_ROWS * DEPTH_BYTES == SLAB_BYTES, "64 weight rows, or 64 columns of 64");

/* The main loop for tiles of N rows. Leaves the last product in flight and returns its stage. */
template <uint32_t N, bool BACK, uint32_t SLABS>
__device__ __forceinline__ uint32_t even_multiply(even_shared<SLABS> &s, even_ring<SLABS> &at,
                                                  uint32_t steps, even_sums<SLABS> &acc)
{
    const bool speaks = threadIdx.x % WARP == 0;
    uint32_t previous = 0;
    for (uint32_t step = 0; step < steps; step++) {
        hopper::barrier_wait(&s.full[at.stage], at.phase);
        hopper::multiply_fence();
        const uint32_t weights = hopper::shared_address(s.b[at.stage]);
        const uint64_t rows = hopper::operand(hopper::shared_address(s.a[at.stage]));
#pragma unroll
        for (uint32_t i = 0; i < DEPTH / 16; i++)
#pragma unroll
            for (uint32_t slab = 0; slab < SLABS; slab++) {
                const uint32_t at_slab = weights + slab * SLAB_BYTES;
                if constexpr (BACK)
                    hopper::multiply<N>::start_a_rows(acc[slab],
                                                      hopper::operand_rows(at_slab, SLAB_BYTES) +
                                                          i * hopper::OPERAND_16_ROWS,
                                                      rows + i * 2, (step | i) != 0);
                else
                    hopper::multiply<N>::start(acc[slab], hopper::operand(at_slab) + i * 2,
                                               rows + i * 2, (step | i) != 0);
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

/* Uses the smallest N that holds `rows`. */
template <bool BACK, uint32_t SLABS, uint32_t N = EVEN_ROWS>
__device__ __forceinline__ uint32_t even_multiply_rows(even_shared<SLABS> &s, even_ring<SLABS> &at,
                                                       uint32_t steps, uint32_t rows,
                                                       even_sums<SLABS> &acc)
{
    if constexpr (N > ROW_GRAIN)
        if (rows <= N - ROW_GRAIN)
            return even_multiply_rows<BACK, SLABS, N - ROW_GRAIN>(s, at, steps, rows, acc);
    return even_multiply<N, BACK, SLABS>(s, at, steps, acc);
}

template <uint32_t SLABS, finish FINISH, bool F32, bool BACK, bool SAVE>
__device__ __forceinline__ void even_consume(const params &p, even_shared<SLABS> &s, uint32_t group)
{
    const uint32_t steps = (p.k + DEPTH - 1) / DEPTH;
    const uint32_t chunk = hopper::shared_address(s.staging) + group * EVEN_CHUNK * CHUNK_ROW_BYTES;
    tile_walk<EVEN_ROWS, SLABS * MMA_ROWS, ROW_GRAIN> tile(p, s.first);
    even_ring<SLABS> at;
    for (uint32_t number = 0; tile.next(); number++) {
        if (number % 2 != group) {
            at.skip(steps);
            continue;
        }
        even_sums<SLABS> acc;
        if (number > 0)
            hopper::named_wait(EVEN_RING + int(group), 2 * WARPGROUP);
        const uint32_t last = even_multiply_rows<BACK, SLABS>(s, at, steps, tile.height, acc);
        hopper::named_arrive(EVEN_RING + int(group ^ 1), 2 * WARPGROUP);
        hopper::multiply_wait<0>();
        if (threadIdx.x % WARP == 0)
            hopper::barrier_arrive(&s.empty[last]);
#pragma unroll
        for (uint32_t slab = 0; slab < SLABS; slab++)
            hopper::multiply_done(acc[slab]);
#pragma unroll
        for (uint32_t slab = 0; slab < SLABS; slab++)
            store_transposed_tile<FINISH, F32, SAVE, EVEN_CHUNK, EVEN_ROWS>(
                p, tile, tile.weight_row + slab * MMA_ROWS, acc[slab], chunk,
                EVEN_OWN + int(group));
    }
}

template <uint32_t SLABS, finish FINISH, bool F32, bool BACK, bool SAVE>
__global__ void __launch_bounds__(EVEN_THREADS, 1) even_kernel(const __grid_constant__ params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    stamp_begin(p.began);
    auto &s = *reinterpret_cast<even_shared<SLABS> *>(memory);
    const uint32_t group = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0) {
        init_barriers(s.full, s.empty, WARPGROUP / WARP);
        s.weights = take_weight_map<BACK>(p);
    }
    if (threadIdx.x / WARP == 2 * WARPGROUP / WARP)
        list_tiles<EVEN_ROWS, SLABS * MMA_ROWS>(p, s.first);
    __syncthreads();
    if (group == 2) {
        hopper::registers_give_back<24>();
        if (threadIdx.x == 2 * WARPGROUP)
            produce<EVEN_ROW_STEP, true, BACK>(p, s);
    } else {
        hopper::registers_take<240>();
        even_consume<SLABS, FINISH, F32, BACK, SAVE>(p, s, group);
    }
#endif
}

} // namespace ggemm

#endif
