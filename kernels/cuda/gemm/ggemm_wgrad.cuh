/* SPDX-License-Identifier: Apache-2.0 */
/* Gradient of the experts' weights: dW[e] = dY_e^T X_e, summed over the rows of expert e.
 *
 * In both operands, the summed index (the row) is the slow one in memory. The tensor cores read
 * that layout ("transposed", hopper.cuh), so nothing is transposed. A step is 64 rows of an expert.
 * The last step may include rows without an owner, or of the next expert, with any content, NaN
 * too. In shared memory they are overwritten with zeros, in both operands.
 *
 * Tile      128 columns of dY x 192 columns of X x 64 rows, 4 stages in flight; 128 x 128 and 5
 *           stages to accumulate, and if 192 would leave much of the last tile empty. All experts
 *           have the same tiles. An expert without rows has tiles without steps, which store zeros;
 *           when gradients accumulate, it has no tiles.
 * Cluster   two blocks, with the same columns of X and adjacent columns of dY. Each reads half of
 *           the rows of X for both: with few rows per expert, reading operands from L2 takes most
 *           of the time. A stage is free when both blocks have read it.
 * Warps     0-3 and 4-7 are two consumers that alternate tiles: while one stores its results
 *           (ggemm_wgrad_out.cuh), the other multiplies. Warp 8 issues loads of operands to the
 *           copy engine and lists the tiles. 9-11 only give up their registers.
 * Shared    227 KB: one block per SM, persistent.
 * Registers per thread: 40 in the last warpgroup, 232 in the consumers (64 K in total; 168 at
 *           launch).
 *
 * One block computes each element in one order: the same bits on every run. ggemm_pingpong.cuh
 * explains how the consumers share the ring. */
#ifndef MOE_CUDA_GGEMM_WGRAD_CUH
#define MOE_CUDA_GGEMM_WGRAD_CUH

#include "cuda/gemm/ggemm_wgrad_out.cuh"

namespace ggemm
{

/* Loads 64 rows x 128 columns of dY as two slabs. One instruction if slabs are a dimension of the
 * map; two if the last slab is not whole. */
__device__ __forceinline__ void load_dy(uint8_t *to, const wgrad_params &p, uint64_t *barrier,
                                        uint32_t column, uint32_t row)
{
    if (p.whole_dy) {
        hopper::load_box3(to, &p.dy, barrier, 0, row, column / DEPTH);
        return;
    }
#pragma unroll
    for (uint32_t slab = 0; slab < WGRAD_SLABS; slab++)
        hopper::load_box(to + slab * SLAB_BYTES, &p.dy, barrier, column + slab * DEPTH, row);
}

/* Loads half of the rows of X's slabs into both blocks. A stage holds one half after the other. */
template <uint32_t SLABS>
__device__ __forceinline__ void load_x(uint8_t *to, const wgrad_params &p, uint64_t *barrier,
                                       uint32_t column, uint32_t row)
{
    constexpr uint16_t ALL = (1 << WGRAD_CLUSTER) - 1;
    const uint32_t half = hopper::cluster_rank();
    row += half * WGRAD_HALF;
    to += half * SLABS * WGRAD_HALF_BYTES;
    if (p.whole_x) {
        hopper::load_box3_for_all(to, &p.x, barrier, 0, row, column / DEPTH, ALL);
        return;
    }
#pragma unroll
    for (uint32_t slab = 0; slab < SLABS; slab++)
        hopper::load_box_for_all(to + slab * WGRAD_HALF_BYTES, &p.x, barrier, column + slab * DEPTH,
                                 row, ALL);
}

template <uint32_t COLUMNS, bool ADD>
__device__ __forceinline__ void wgrad_produce(const wgrad_params &p, wgrad_shared<COLUMNS> &s)
{
    using shape = wgrad_shape<COLUMNS>;
    wgrad_walk<COLUMNS, ADD> tile(p, s.first);
    ring<shape::STAGES> at;
    while (tile.next())
        for (uint32_t step = 0; step < tile.steps; step++) {
            uint64_t *full = &s.full[at.stage];
            const uint32_t row = tile.row + step * DEPTH;
            hopper::barrier_wait(&s.empty[at.stage], at.phase ^ 1);
            hopper::barrier_expect(full, (WGRAD_SLABS + shape::SLABS) * SLAB_BYTES);
            load_dy(s.dy[at.stage], p, full, tile.n, row);
            load_x<shape::SLABS>(s.x[at.stage], p, full, tile.k, row);
            at.advance();
        }
}

/* One warpgroup sets the rows from `left` on of a stage to zero, before the tensor cores read
 * it. */
template <uint32_t COLUMNS>
__device__ __forceinline__ void clear_rows(wgrad_shared<COLUMNS> &s, uint32_t stage, uint32_t left,
                                           int barrier)
{
    constexpr uint32_t SLABS = wgrad_shape<COLUMNS>::SLABS;
    const uint32_t thread = threadIdx.x % WARPGROUP;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    for (uint32_t at = left * DEPTH_BYTES + thread * 16; at < SLAB_BYTES; at += WARPGROUP * 16) {
        uint8_t *x =
            s.x[stage] + at / WGRAD_HALF_BYTES * SLABS * WGRAD_HALF_BYTES + at % WGRAD_HALF_BYTES;
#pragma unroll
        for (uint32_t slab = 0; slab < WGRAD_SLABS; slab++)
            *reinterpret_cast<uint4 *>(s.dy[stage] + slab * SLAB_BYTES + at) = zero;
#pragma unroll
        for (uint32_t slab = 0; slab < SLABS; slab++)
            *reinterpret_cast<uint4 *>(x + slab * WGRAD_HALF_BYTES) = zero;
    }
    hopper::stores_before_copies(); /* tensor cores read through the copy engine's proxy */
    hopper::named_wait(barrier, WARPGROUP);
}

/* One warp has read a stage. When all have, both blocks may write to it again. */
template <uint32_t COLUMNS>
__device__ __forceinline__ void wgrad_release(wgrad_shared<COLUMNS> &s, uint32_t stage)
{
    const uint32_t lane = threadIdx.x % WARP;
    if (lane < WGRAD_CLUSTER)
        hopper::barrier_arrive_at(&s.empty[stage], lane);
}

/* Starts the products of one stage. */
template <uint32_t COLUMNS>
__device__ __forceinline__ void wgrad_start(const wgrad_shared<COLUMNS> &s, uint32_t stage,
                                            bool first, float (&acc)[WGRAD_SLABS][COLUMNS / 2])
{
    constexpr uint32_t HALF = wgrad_shape<COLUMNS>::SLABS * WGRAD_HALF_BYTES >> 4;
    constexpr uint32_t STEPS = WGRAD_HALF / 16; /* instructions in half a stage */
    const uint32_t dy = hopper::shared_address(s.dy[stage]);
    const uint64_t x = hopper::operand_rows(hopper::shared_address(s.x[stage]), WGRAD_HALF_BYTES);
#pragma unroll
    for (uint32_t i = 0; i < DEPTH / 16; i++)
#pragma unroll
        for (uint32_t slab = 0; slab < WGRAD_SLABS; slab++)
            hopper::multiply<COLUMNS>::start_both_rows(
                acc[slab],
                hopper::operand_rows(dy + slab * SLAB_BYTES, SLAB_BYTES) +
                    i * hopper::OPERAND_16_ROWS,
                x + i / STEPS * HALF + i % STEPS * hopper::OPERAND_16_ROWS, !first || i > 0);
    hopper::multiply_commit();
}

/* Multiplies one tile with rows. Leaves the last product in flight and returns its stage. */
template <uint32_t COLUMNS>
__device__ __forceinline__ uint32_t wgrad_multiply(wgrad_shared<COLUMNS> &s,
                                                   ring<wgrad_shape<COLUMNS>::STAGES> &at,
                                                   uint32_t rows, int own_barrier,
                                                   float (&acc)[WGRAD_SLABS][COLUMNS / 2])
{
    uint32_t previous = 0;
    for (uint32_t done = 0; done < rows; done += DEPTH) {
        hopper::barrier_wait(&s.full[at.stage], at.phase);
        if (rows - done < DEPTH)
            clear_rows(s, at.stage, rows - done, own_barrier);
        hopper::multiply_fence();
        wgrad_start(s, at.stage, done == 0, acc);
        hopper::multiply_wait<1>();
        if (done > 0)
            wgrad_release(s, previous);
        previous = at.stage;
        at.advance();
    }
    return previous;
}

template <uint32_t COLUMNS, bool ADD>
__device__ __forceinline__ void wgrad_consume(const wgrad_params &p, wgrad_shared<COLUMNS> &s,
                                              uint32_t group)
{
    wgrad_walk<COLUMNS, ADD> tile(p, s.first);
    wgrad_out<COLUMNS, ADD> out(p, s, group);
    ring<wgrad_shape<COLUMNS>::STAGES> at;
    for (uint32_t number = 0; tile.next(); number++) {
        if (number % 2 != group) {
            at.skip(tile.steps);
            continue;
        }
        out.begin(tile);
        float acc[WGRAD_SLABS][COLUMNS / 2] = {};
        if (number > 0)
            hopper::named_wait(WGRAD_RING + int(group), 2 * WARPGROUP);
        const uint32_t last = wgrad_multiply(s, at, tile.rows, WGRAD_OWN + int(group), acc);
        hopper::named_arrive(WGRAD_RING + int(group ^ 1), 2 * WARPGROUP);
        hopper::multiply_wait<0>();
        if (tile.rows > 0)
            wgrad_release(s, last);
#pragma unroll
        for (uint32_t slab = 0; slab < WGRAD_SLABS; slab++)
            hopper::multiply_done(acc[slab]);
        out.finish(tile, acc);
    }
    out.end();
}

template <uint32_t COLUMNS>
__device__ __forceinline__ void wgrad_prepare(const wgrad_params &p, wgrad_shared<COLUMNS> &s)
{
    init_barriers(s.full, s.empty, WGRAD_CLUSTER * WARPGROUP / WARP);
    for (uint32_t i = 0; i < 2 * WGRAD_SLOTS; i++)
        hopper::barrier_init(&s.old[i / WGRAD_SLOTS][i % WGRAD_SLOTS], 1);
    hopper::barrier_init_done();
    hopper::prefetch_map(&p.dy);
    hopper::prefetch_map(&p.x);
    hopper::prefetch_map(&p.dw);
}

template <uint32_t COLUMNS, bool ADD>
__global__ void __cluster_dims__(WGRAD_CLUSTER, 1, 1) __launch_bounds__(WGRAD_THREADS, 1)
    wgrad_kernel(const __grid_constant__ wgrad_params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    auto &s = *reinterpret_cast<wgrad_shared<COLUMNS> *>(memory);
    const uint32_t group = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0)
        wgrad_prepare(p, s);
    if (threadIdx.x / WARP == 2 * WARPGROUP / WARP)
        list_wgrad_tiles<COLUMNS, ADD>(p, s.first);
    hopper::cluster_meet(); /* the list and both blocks' barriers are ready */
    if (group == 2) {
        hopper::registers_give_back<40>();
        if (threadIdx.x == 2 * WARPGROUP)
            wgrad_produce<COLUMNS, ADD>(p, s);
    } else {
        hopper::registers_take<232>();
        wgrad_consume<COLUMNS, ADD>(p, s, group);
    }
    hopper::cluster_meet(); /* the other block sends no more copies or arrivals */
#endif
}

} // namespace ggemm

#endif
