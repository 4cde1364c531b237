/* Gradient of the experts' weights: dW[e] = dY_e^T X_e, summed over the rows of expert e.
 *
 * Both operands lie in memory with the summed index, the row, as their slow one; the tensor cores
 * take them so ("transposed", hopper.cuh), and nothing is transposed on the way. A step is 64 rows
 * of an expert. Its last one reaches into rows of nobody or of the next expert, which may hold
 * anything, NaN too: they are overwritten with zeros in shared memory, in both operands.
 *
 * Tile     128 columns of dY x 128 columns of X x 64 rows, 6 stages in flight. All experts have
 *          the same tiles; an expert without rows has tiles without steps, which store zeros, or,
 *          where gradients accumulate, no tiles.
 * Cluster  two blocks, with the same columns of X and neighbouring ones of dY. Each reads half of
 *          the columns of X for both: with few rows to an expert, reading operands from L2 is what
 *          takes time. A stage is free when both blocks have read it.
 * Warps    0-3 and 4-7 are two consumers that take tiles in turn: while one stores, the other
 *          multiplies; so that 4 bytes an element leave while few steps are computed. Warp 8 keeps
 *          the copy engine busy and makes the list of tiles; 9-11 only lend their registers.
 * Shared   194 KB: one block per SM, persistent.
 * Registers 40 for the last warpgroup, 232 for the consumers (64 K in all, 168 at the start).
 *
 * To accumulate, the old values of a tile are fetched into L2 when the tile before it is stored,
 * and read, added to and stored at its end. (Adding in L2 itself, red.global.add, took 1.2 times as
 * long.) Every element is made by one block in one order: the same bits on every run. For the ring
 * and the hand-over between consumers see ggemm_pingpong.cuh. */
#ifndef MOE_CUDA_GGEMM_WGRAD_CUH
#define MOE_CUDA_GGEMM_WGRAD_CUH

#include "ggemm_pipeline.cuh"

namespace ggemm
{

constexpr uint32_t WGRAD_TILE = 128, WGRAD_STAGES = 6, WGRAD_THREADS = 3 * WARPGROUP;
constexpr uint32_t WGRAD_SLABS = WGRAD_TILE / MMA_ROWS;
constexpr uint32_t WGRAD_CLUSTER = 2;
constexpr uint32_t WGRAD_TALL = WGRAD_CLUSTER * WGRAD_TILE; /* columns of dY of a cluster */
constexpr uint32_t WGRAD_STRIP = 4;          /* of them share a pass over the columns of X */
constexpr int WGRAD_TURN = 1, WGRAD_OWN = 3; /* named barriers */

struct wgrad_params {
    CUtensorMap dy;                /* [row_capacity, n]; see load_slabs */
    CUtensorMap x;                 /* [row_capacity, k], boxes of one slab */
    const uint32_t *start, *count; /* [experts] */
    uint32_t experts, n, k;
    bool whole_slabs; /* the map of dy has slabs of 64 columns as a dimension */
    bool accumulate;
    float *dw; /* [experts, n, k] */
};

/* A stage's operands are slabs of 64 columns, each 64 rows of 128 bytes. */
using wgrad_shared = shared<WGRAD_TILE, WGRAD_TILE, WGRAD_STAGES, 16>;

/* first[e] = number of the first tile (of a cluster) of expert e; by one warp. */
__device__ __forceinline__ void list_wgrad_tiles(const wgrad_params &p, uint32_t *first)
{
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t tiles =
        (p.n + WGRAD_TALL - 1) / WGRAD_TALL * ((p.k + WGRAD_TILE - 1) / WGRAD_TILE);
    uint32_t before = 0;
    for (uint32_t base = 0; base < p.experts; base += WARP) {
        const uint32_t e = base + lane;
        const bool has = e < p.experts && (!p.accumulate || __ldg(p.count + e) > 0);
        const uint32_t mask = __ballot_sync(~0u, has);
        if (e < p.experts)
            first[e] = (before + __popc(mask & ((1u << lane) - 1))) * tiles;
        before += __popc(mask);
    }
    if (lane == 0)
        first[p.experts] = before * tiles;
}

/* The tiles of this block, in order: the other block of the cluster takes the same steps. */
class wgrad_walk
{
  public:
    uint32_t expert = 0;
    uint32_t row, rows, steps; /* of the expert */
    uint32_t n, k;             /* first column of dY (maybe behind the last) and of X */

    __device__ __forceinline__ wgrad_walk(const wgrad_params &p, const uint32_t *first)
        : p_(p), first_(first), tall_((p.n + WGRAD_TALL - 1) / WGRAD_TALL),
          wide_((p.k + WGRAD_TILE - 1) / WGRAD_TILE), tile_(blockIdx.x / WGRAD_CLUSTER),
          rank_(hopper::cluster_rank())
    {
    }

    __device__ __forceinline__ bool next()
    {
        const uint32_t tile = tile_;
        if (tile >= first_[p_.experts])
            return false;
        tile_ += gridDim.x / WGRAD_CLUSTER;
        while (tile >= first_[expert + 1])
            expert++;
        row = __ldg(p_.start + expert);
        rows = __ldg(p_.count + expert);
        steps = (rows + DEPTH - 1) / DEPTH;
        const uint32_t index = tile - first_[expert];
        const uint32_t strip = index / (WGRAD_STRIP * wide_);
        const uint32_t within = index - strip * WGRAD_STRIP * wide_;
        const uint32_t deep = min(WGRAD_STRIP, tall_ - strip * WGRAD_STRIP);
        k = within / deep * WGRAD_TILE;
        n = (strip * WGRAD_STRIP + within % deep) * WGRAD_TALL + rank_ * WGRAD_TILE;
        return true;
    }

  private:
    const wgrad_params &p_;
    const uint32_t *first_;
    uint32_t tall_, wide_, tile_, rank_;
};

/* 64 rows x 128 columns as two slabs. One instruction where slabs are a dimension of the map, two
 * where the last one is not whole. */
__device__ __forceinline__ void load_slabs(uint8_t *to, const CUtensorMap *map, bool whole,
                                           uint64_t *barrier, uint32_t column, uint32_t row)
{
    if (whole) {
        hopper::load_box3(to, map, barrier, 0, row, column / DEPTH);
        return;
    }
#pragma unroll
    for (uint32_t slab = 0; slab < WGRAD_SLABS; slab++)
        hopper::load_box(to + slab * SLAB_BYTES, map, barrier, column + slab * DEPTH, row);
}

__device__ __forceinline__ void wgrad_produce(const wgrad_params &p, wgrad_shared &s)
{
    constexpr uint16_t ALL = (1 << WGRAD_CLUSTER) - 1;
    static_assert(WGRAD_SLABS == WGRAD_CLUSTER, "each block reads one slab of X for all");
    const uint32_t slab = hopper::cluster_rank();
    wgrad_walk tile(p, s.first);
    ring<WGRAD_STAGES> at;
    while (tile.next())
        for (uint32_t step = 0; step < tile.steps; step++) {
            uint64_t *full = &s.full[at.stage];
            const uint32_t row = tile.row + step * DEPTH;
            hopper::barrier_wait(&s.empty[at.stage], at.phase ^ 1);
            hopper::barrier_expect(full, 2 * WGRAD_SLABS * SLAB_BYTES);
            load_slabs(s.a[at.stage], &p.dy, p.whole_slabs, full, tile.n, row);
            hopper::load_box_for_all(s.b[at.stage] + slab * SLAB_BYTES, &p.x, full,
                                     tile.k + slab * DEPTH, row, ALL);
            at.advance();
        }
}

/* Rows `left`.. of a stage become zeros, by one warpgroup, before the tensor cores read it. */
__device__ __forceinline__ void clear_rows(wgrad_shared &s, uint32_t stage, uint32_t left,
                                           int barrier)
{
    const uint32_t thread = threadIdx.x % WARPGROUP;
    for (uint32_t at = left * DEPTH_BYTES + thread * 16; at < SLAB_BYTES; at += WARPGROUP * 16)
#pragma unroll
        for (uint32_t slab = 0; slab < WGRAD_SLABS; slab++) {
            *reinterpret_cast<uint4 *>(s.a[stage] + slab * SLAB_BYTES + at) =
                make_uint4(0, 0, 0, 0);
            *reinterpret_cast<uint4 *>(s.b[stage] + slab * SLAB_BYTES + at) =
                make_uint4(0, 0, 0, 0);
        }
    hopper::stores_before_copies(); /* the tensor cores read as the copy engine does */
    hopper::named_wait(barrier, WARPGROUP);
}

/* One warp has read a stage: both blocks may write to it again when all have. */
__device__ __forceinline__ void wgrad_release(wgrad_shared &s, uint32_t stage)
{
    const uint32_t lane = threadIdx.x % WARP;
    if (lane < WGRAD_CLUSTER)
        hopper::barrier_arrive_at(&s.empty[stage], lane);
}

/* One tile; leaves the last product under way and returns its stage. */
__device__ __forceinline__ uint32_t wgrad_multiply(wgrad_shared &s, ring<WGRAD_STAGES> &at,
                                                   uint32_t rows, int own_barrier,
                                                   float (&acc)[WGRAD_SLABS][WGRAD_TILE / 2])
{
    uint32_t previous = 0;
    for (uint32_t done = 0; done < rows; done += DEPTH) {
        hopper::barrier_wait(&s.full[at.stage], at.phase);
        if (rows - done < DEPTH)
            clear_rows(s, at.stage, rows - done, own_barrier);
        hopper::multiply_fence();
        const uint32_t dy = hopper::shared_address(s.a[at.stage]);
        const uint64_t x = hopper::operand_rows(hopper::shared_address(s.b[at.stage]), SLAB_BYTES);
#pragma unroll
        for (uint32_t i = 0; i < DEPTH / 16; i++)
#pragma unroll
            for (uint32_t slab = 0; slab < WGRAD_SLABS; slab++)
                hopper::multiply<WGRAD_TILE>::start_both_rows(
                    acc[slab],
                    hopper::operand_rows(dy + slab * SLAB_BYTES, SLAB_BYTES) +
                        i * hopper::OPERAND_16_ROWS,
                    x + i * hopper::OPERAND_16_ROWS, (done | i) != 0);
        hopper::multiply_commit();
        hopper::multiply_wait<1>();
        if (done > 0)
            wgrad_release(s, previous);
        previous = at.stage;
        at.advance();
    }
    return previous;
}

/* Old values of a tile on their way into L2, by one warpgroup: a row to a thread. */
__device__ __forceinline__ void wgrad_fetch(const wgrad_params &p, const wgrad_walk &tile)
{
    static_assert(WGRAD_TILE == WARPGROUP, "a row to a thread");
    const uint32_t row = tile.n + threadIdx.x % WARPGROUP;
    const uint32_t bytes = min(WGRAD_TILE, p.k - tile.k) * uint32_t(sizeof(float));
    if (row < p.n)
        hopper::fetch_into_l2(p.dw + (size_t(tile.expert) * p.n + row) * p.k + tile.k, bytes);
}

/* Neighbouring lanes swap pairs, so that each has four columns in a row and a warp writes 64 bytes
 * in one piece. acc: 8 columns of the thread's rows (its first or, with `half`, its second), and
 * the next 8. */
__device__ __forceinline__ float4 wgrad_four(const float *acc, uint32_t half)
{
    const bool odd = threadIdx.x % 2 != 0;
    const float *left = acc + 2 * half, *right = left + 4;
    const float x = __shfl_xor_sync(~0u, odd ? left[0] : right[0], 1);
    const float y = __shfl_xor_sync(~0u, odd ? left[1] : right[1], 1);
    return odd ? make_float4(x, y, right[0], right[1]) : make_float4(left[0], left[1], x, y);
}

/* A tile in accumulator layout, four columns of a row at a time: piece i of a thread is in column
 * block i / 2 (of 16) and row 8 * (i % 2) of its slab's. */
constexpr uint32_t WGRAD_PIECES = WGRAD_TILE / 8; /* of a slab */

struct wgrad_place {
    float *first;
    uint32_t row, column, n, k;

    __device__ __forceinline__ wgrad_place(const wgrad_params &p, const wgrad_walk &tile)
        : row(tile.n + threadIdx.x % WARPGROUP / WARP * 16 + threadIdx.x % WARP / 4),
          column(tile.k + threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4), n(p.n), k(p.k)
    {
        first = p.dw + (size_t(tile.expert) * n + row) * k + column;
    }

    /* NULL: behind the edge. */
    __device__ __forceinline__ float4 *piece(uint32_t slab, uint32_t i) const
    {
        const uint32_t down = slab * MMA_ROWS + i % 2 * 8, right = i / 2 * 16;
        if (row + down >= n || column + right >= k)
            return nullptr;
        return reinterpret_cast<float4 *>(first + size_t(down) * k + right);
    }
};

__device__ __forceinline__ float4 wgrad_old(const wgrad_place &at, uint32_t number)
{
    const float4 *from = at.piece(number / WGRAD_PIECES, number % WGRAD_PIECES);
    return from != nullptr ? __ldcg(from) : float4();
}

/* Nobody reads a gradient again soon. To add, DEEP old values are on their way while one is added
 * to: an L2 that answers after a microsecond must be kept busy. */
template <bool ADD>
__device__ __forceinline__ void wgrad_store(const wgrad_params &p, const wgrad_walk &tile,
                                            const float (&acc)[WGRAD_SLABS][WGRAD_TILE / 2])
{
    constexpr uint32_t DEEP = 16, ALL = WGRAD_SLABS * WGRAD_PIECES;
    const wgrad_place at(p, tile);
    float4 old[DEEP];
#pragma unroll
    for (uint32_t i = 0; ADD && i < DEEP; i++)
        old[i] = wgrad_old(at, i);
#pragma unroll
    for (uint32_t i = 0; i < ALL; i++) {
        const uint32_t slab = i / WGRAD_PIECES, piece = i % WGRAD_PIECES;
        float4 v = wgrad_four(&acc[slab][piece / 2 * 8], piece % 2);
        if (ADD) {
            const float4 o = old[i % DEEP];
            v = make_float4(v.x + o.x, v.y + o.y, v.z + o.z, v.w + o.w);
        }
        if (ADD && i + DEEP < ALL)
            old[i % DEEP] = wgrad_old(at, i + DEEP);
        float4 *to = at.piece(slab, piece);
        if (to != nullptr)
            __stcs(to, v);
    }
}

/* The tile of an expert without rows, by one warpgroup. */
__device__ __forceinline__ void wgrad_clear(const wgrad_params &p, const wgrad_walk &tile)
{
    constexpr uint32_t LANES = WGRAD_TILE / 4;
    const uint32_t thread = threadIdx.x % WARPGROUP, column = tile.k + thread % LANES * 4;
    float *to = p.dw + size_t(tile.expert) * p.n * p.k + column;
    if (column >= p.k)
        return;
    for (uint32_t r = thread / LANES; r < WGRAD_TILE && tile.n + r < p.n; r += WARPGROUP / LANES)
        __stcs(reinterpret_cast<float4 *>(to + size_t(tile.n + r) * p.k), float4());
}

template <bool ADD>
__device__ __forceinline__ void wgrad_consume(const wgrad_params &p, wgrad_shared &s,
                                              uint32_t group)
{
    wgrad_walk tile(p, s.first);
    ring<WGRAD_STAGES> at;
    for (uint32_t number = 0; tile.next(); number++) {
        if (number % 2 != group) {
            at.skip(tile.steps);
            continue;
        }
        if (ADD)
            wgrad_fetch(p, tile);
        if (number > 0)
            hopper::named_wait(WGRAD_TURN + int(group), 2 * WARPGROUP);
        if (tile.rows == 0) {
            hopper::named_arrive(WGRAD_TURN + int(group ^ 1), 2 * WARPGROUP);
            wgrad_clear(p, tile);
            continue;
        }
        float acc[WGRAD_SLABS][WGRAD_TILE / 2];
        const uint32_t last = wgrad_multiply(s, at, tile.rows, WGRAD_OWN + int(group), acc);
        hopper::named_arrive(WGRAD_TURN + int(group ^ 1), 2 * WARPGROUP);
        hopper::multiply_wait<0>();
        wgrad_release(s, last);
#pragma unroll
        for (uint32_t slab = 0; slab < WGRAD_SLABS; slab++)
            hopper::multiply_done(acc[slab]);
        wgrad_store<ADD>(p, tile, acc);
    }
}

template <bool ADD>
__global__ void __cluster_dims__(WGRAD_CLUSTER, 1, 1) __launch_bounds__(WGRAD_THREADS, 1)
    wgrad_kernel(const __grid_constant__ wgrad_params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    auto &s = *reinterpret_cast<wgrad_shared *>(memory);
    const uint32_t group = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0) {
        init_barriers(s.full, s.empty, WGRAD_CLUSTER * WARPGROUP / WARP);
        hopper::prefetch_map(&p.dy);
        hopper::prefetch_map(&p.x);
    }
    if (threadIdx.x / WARP == 2 * WARPGROUP / WARP)
        list_wgrad_tiles(p, s.first);
    hopper::cluster_meet(); /* barriers of both blocks are there, and the list */
    if (group == 2) {
        hopper::registers_give_back<40>();
        if (threadIdx.x == 2 * WARPGROUP)
            wgrad_produce(p, s);
    } else {
        hopper::registers_take<232>();
        wgrad_consume<ADD>(p, s, group);
    }
    hopper::cluster_meet(); /* no copy or arrival of the other block is still to come */
#endif
}

} // namespace ggemm

#endif
