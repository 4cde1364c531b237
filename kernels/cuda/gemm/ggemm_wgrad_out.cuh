/* SPDX-License-Identifier: Apache-2.0 */
/* The weights' gradient (ggemm_wgrad.cuh): its kernel's arguments, the list of tiles, and how
 * results leave the kernel.
 *
 * Each element of a gradient writes 4 bytes, and also reads 4 to accumulate. With few rows per
 * expert this takes as long as the products. So a consumer cuts its tile into pieces of 64 rows x
 * 32 columns and sends them through its slots in shared memory: the copy engine stores one piece
 * while the next is written. To accumulate, old values of the first pieces load into the slots
 * while the other consumer still multiplies; the other pieces follow as slots become free. Results
 * are added to them in place.
 *
 * These methods were slower: storing 16 bytes at a time from registers to memory; adding in L2 (the
 * copy engine's reduction); prefetching old values into L2, which evicts operands. */
#ifndef MOE_CUDA_GGEMM_WGRAD_OUT_CUH
#define MOE_CUDA_GGEMM_WGRAD_OUT_CUH

#include "cuda/gemm/ggemm_pipeline.cuh"
#include "cuda/plan/limits.h"

namespace ggemm
{

constexpr uint32_t WGRAD_TILE = 128; /* columns of dY per block */
constexpr uint32_t WGRAD_SLABS = WGRAD_TILE / MMA_ROWS;
constexpr uint32_t WGRAD_THREADS = 3 * WARPGROUP;
constexpr uint32_t WGRAD_CLUSTER = 2;
constexpr uint32_t WGRAD_TALL = WGRAD_CLUSTER * WGRAD_TILE; /* columns of dY per cluster */
constexpr uint32_t WGRAD_HALF = DEPTH / WGRAD_CLUSTER;      /* rows of X that one block reads */
constexpr uint32_t WGRAD_HALF_BYTES = WGRAD_HALF * DEPTH_BYTES;
constexpr int WGRAD_RING = 1, WGRAD_OWN = 3; /* named barriers, two each */

constexpr uint32_t PIECE_ROWS = MMA_ROWS, PIECE_COLUMNS = 32; /* of fp32: 128 bytes */
constexpr uint32_t PIECE_BYTES = PIECE_ROWS * PIECE_COLUMNS * 4;
constexpr uint32_t WGRAD_SLOTS = 4; /* per consumer */

constexpr uint32_t WGRAD_EXPERTS = 512; /* of a launch: their table takes the rest of the memory */

/* COLUMNS: columns of X in a tile. */
template <uint32_t COLUMNS> struct wgrad_shape {
    static constexpr uint32_t SLABS = COLUMNS / DEPTH;
    static constexpr uint32_t STAGES = COLUMNS == 192 ? 4 : 5;
    static constexpr uint32_t ACROSS = COLUMNS / PIECE_COLUMNS; /* pieces */
    static constexpr uint32_t PIECES = WGRAD_SLABS * ACROSS;
};

struct wgrad_params {
    CUtensorMap dy;                /* [row_capacity, n]; see load_dy */
    CUtensorMap x;                 /* [row_capacity, k]; see load_x */
    CUtensorMap dw;                /* fp32 [experts, n, k], boxes of a piece */
    const uint32_t *start, *count; /* [experts] */
    uint32_t experts, n, k;
    bool whole_dy, whole_x; /* the map's slabs of 64 columns are a dimension */
};

/* A stage's operands are slabs of 64 columns. dY: 64 rows of 128 bytes each. X: the first 32 rows
 * of all slabs, then the other 32. */
template <uint32_t COLUMNS> struct wgrad_shared {
    using shape = wgrad_shape<COLUMNS>;
    alignas(1024) uint8_t dy[shape::STAGES][WGRAD_SLABS * SLAB_BYTES];
    alignas(1024) uint8_t x[shape::STAGES][shape::SLABS * SLAB_BYTES];
    alignas(1024) uint8_t piece[2][WGRAD_SLOTS][PIECE_BYTES];
    uint64_t full[shape::STAGES];  /* the copy engine has filled the stage */
    uint64_t empty[shape::STAGES]; /* all warps of the cluster that read the stage are done */
    uint64_t old[2][WGRAD_SLOTS];  /* the slot has its old values */
    uint32_t first[WGRAD_EXPERTS + 1];
};

static_assert(sizeof(wgrad_shared<128>) <= 227 * 1024 && sizeof(wgrad_shared<192>) <= 227 * 1024,
              "a CTA of sm_90 can have no more");

/* first[e] = number of the first tile (of a cluster) of expert e. Called by one warp. */
template <uint32_t COLUMNS, bool ADD>
__device__ __forceinline__ void list_wgrad_tiles(const wgrad_params &p, uint32_t *first)
{
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t tiles = (p.n + WGRAD_TALL - 1) / WGRAD_TALL * ((p.k + COLUMNS - 1) / COLUMNS);
    uint32_t before = 0;
    for (uint32_t base = 0; base < p.experts; base += WARP) {
        const uint32_t e = base + lane;
        const bool has = e < p.experts && (!ADD || __ldg(p.count + e) > 0);
        const uint32_t mask = __ballot_sync(~0u, has);
        if (e < p.experts)
            first[e] = (before + __popc(mask & ((1u << lane) - 1))) * tiles;
        before += __popc(mask);
    }
    if (lane == 0)
        first[p.experts] = before * tiles;
}

/* Number of a cluster's tiles along dY that share a pass over the columns of X. When overwriting,
 * more are better while their dY stays in L2: with 512 rows, 16 take 5 % less time than 4. */
template <bool ADD> __device__ __forceinline__ uint32_t wgrad_strip(uint32_t rows)
{
    constexpr uint32_t LEAST = 4, LIMIT = 16, BYTES = 4 << 20;
    if (ADD || rows == 0)
        return LEAST;
    return min(max(BYTES / (WGRAD_TALL * 2) / rows, LEAST), LIMIT);
}

/* The tiles of this block, in order. The other block of the cluster takes the same steps. */
template <uint32_t COLUMNS, bool ADD> class wgrad_walk
{
  public:
    uint32_t expert = 0;
    uint32_t row, rows, steps; /* of the expert */
    uint32_t n, k;             /* first column of dY (maybe past the last) and of X */

    __device__ __forceinline__ wgrad_walk(const wgrad_params &p, const uint32_t *first)
        : p_(p), first_(first), tall_((p.n + WGRAD_TALL - 1) / WGRAD_TALL),
          wide_((p.k + COLUMNS - 1) / COLUMNS), tile_(blockIdx.x / WGRAD_CLUSTER),
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
        const uint32_t height = wgrad_strip<ADD>(rows), index = tile - first_[expert];
        const uint32_t strip = index / (height * wide_);
        const uint32_t within = index - strip * height * wide_;
        const uint32_t deep = min(height, tall_ - strip * height);
        k = within / deep * COLUMNS;
        n = (strip * height + within % deep) * WGRAD_TALL + rank_ * WGRAD_TILE;
        return true;
    }

  private:
    const wgrad_params &p_;
    const uint32_t *first_;
    uint32_t tall_, wide_, tile_, rank_;
};

/* Stores or adds a lane's results to a slot: 32 columns of one of its two rows. In the
 * accumulators, 8 columns are a block of 4 values, and a lane has two adjacent columns. Odd rows
 * use another column order: 16 lanes store at once, four rows of two swizzled 16-byte places each.
 * Then each of the eight places is used once. */
template <bool ADD>
__device__ __forceinline__ void put_columns(uint32_t row_address, const float *acc, uint32_t half)
{
    const uint32_t lane = threadIdx.x % WARP, row = lane / 4;
    const bool odd = row % 2 != 0;
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        const float *even_from = acc + 4 * j + 2 * half, *odd_from = acc + 4 * (j ^ 2) + 2 * half;
        float2 v = make_float2(odd ? odd_from[0] : even_from[0], odd ? odd_from[1] : even_from[1]);
        const uint32_t place = (odd ? j ^ 2 : j) * 2 + lane % 4 / 2;
        const uint32_t at = row_address + ((place ^ row) << 4) + lane % 2 * 8;
        if (ADD) {
            const float2 old = hopper::load_shared8(at);
            v = make_float2(old.x + v.x, old.y + v.y);
        }
        hopper::store_shared8(at, v);
    }
}

/* The output of one consumer. All its threads call begin, finish and end; its first thread issues
 * the copies. Slots rotate: piece c of every tile uses slot `c % WGRAD_SLOTS`. */
template <uint32_t COLUMNS, bool ADD> class wgrad_out
{
    using shape = wgrad_shape<COLUMNS>;
    using walk = wgrad_walk<COLUMNS, ADD>;
    static_assert(shape::PIECES % WGRAD_SLOTS == 0 && WGRAD_SLOTS >= 2, "slots are taken in turn");

  public:
    __device__ __forceinline__ wgrad_out(const wgrad_params &p, wgrad_shared<COLUMNS> &s,
                                         uint32_t group)
        : p_(p), slot_(s.piece[group]), old_(s.old[group]), own_(WGRAD_OWN + int(group)),
          speaks_(threadIdx.x % WARPGROUP == 0), once_(hopper::policy_evict_first())
    {
    }

    /* Call before the products of a tile. */
    __device__ __forceinline__ void begin(const walk &tile)
    {
        if (!ADD || !speaks_)
            return;
        hopper::store_wait_read<0>();
        for (uint32_t c = 0; c < WGRAD_SLOTS; c++)
            ask(tile, c);
    }

    /* Call after the products. */
    __device__ __forceinline__ void finish(const walk &tile,
                                           const float (&acc)[WGRAD_SLABS][COLUMNS / 2])
    {
#pragma unroll
        for (uint32_t c = 0; c < shape::PIECES; c++) {
            await(c);
            put(c, &acc[c / shape::ACROSS][c % shape::ACROSS * 16]);
            hopper::stores_before_copies();
            hopper::named_wait(own_, WARPGROUP);
            if (speaks_)
                send(tile, c);
        }
    }

    /* Call before the block ends: the copy engine still reads its shared memory. */
    __device__ __forceinline__ void end()
    {
        if (speaks_)
            hopper::store_wait_all();
    }

  private:
    const wgrad_params &p_;
    uint8_t (&slot_)[WGRAD_SLOTS][PIECE_BYTES];
    uint64_t (&old_)[WGRAD_SLOTS];
    int own_; /* named barrier */
    bool speaks_;
    uint64_t once_;
    uint32_t phases_ = 0; /* of old_, one bit each */

    __device__ __forceinline__ uint32_t column(const walk &tile, uint32_t c) const
    {
        return tile.k + c % shape::ACROSS * PIECE_COLUMNS;
    }

    __device__ __forceinline__ uint32_t row(const walk &tile, uint32_t c) const
    {
        return tile.n + c / shape::ACROSS * PIECE_ROWS;
    }

    /* Starts loading the old values of piece c. */
    __device__ __forceinline__ void ask(const walk &tile, uint32_t c)
    {
        uint64_t *old = &old_[c % WGRAD_SLOTS];
        hopper::barrier_expect(old, PIECE_BYTES);
        hopper::load_box3_once(slot_[c % WGRAD_SLOTS], &p_.dw, old, column(tile, c), row(tile, c),
                               tile.expert, once_);
    }

    /* Waits until piece c's slot may be written. */
    __device__ __forceinline__ void await(uint32_t c)
    {
        const uint32_t slot = c % WGRAD_SLOTS;
        if (ADD) {
            hopper::barrier_wait(&old_[slot], phases_ >> slot & 1);
            phases_ ^= 1u << slot;
            return;
        }
        if (speaks_)
            hopper::store_wait_read<WGRAD_SLOTS - 1>();
        hopper::named_wait(own_, WARPGROUP);
    }

    /* acc: this thread's values of piece c. */
    __device__ __forceinline__ void put(uint32_t c, const float *acc)
    {
        const uint32_t thread = threadIdx.x % WARPGROUP;
        const uint32_t row = thread / WARP * 16 + thread % WARP / 4;
        const uint32_t to = hopper::shared_address(slot_[c % WGRAD_SLOTS]) + row * DEPTH_BYTES;
#pragma unroll
        for (uint32_t half = 0; half < 2; half++)
            put_columns<ADD>(to + half * 8 * DEPTH_BYTES, acc, half);
    }

    /* Starts storing piece c, and loading the old values that reuse the slot of the piece before
     * it. */
    __device__ __forceinline__ void send(const walk &tile, uint32_t c)
    {
        hopper::store_box3_once(&p_.dw, hopper::shared_address(slot_[c % WGRAD_SLOTS]),
                                column(tile, c), row(tile, c), tile.expert, once_);
        hopper::store_commit();
        if (ADD && c > 0 && c - 1 + WGRAD_SLOTS < shape::PIECES) {
            hopper::store_wait_read<1>();
            ask(tile, c - 1 + WGRAD_SLOTS);
        }
    }
};

} // namespace ggemm

#endif
