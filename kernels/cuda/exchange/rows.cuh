/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers for rows that dispatch and combine share. A warp works on a token; lane k has its k-th
 * choice. */
#ifndef MOE_CUDA_ROWS_CUH
#define MOE_CUDA_ROWS_CUH

#include "cuda/exchange/flags.cuh"
#include "cuda/plan/limits.h"

constexpr uint32_t NOWHERE = 0xffffffffu;
constexpr uint32_t CTA_THREADS = 512;
constexpr uint32_t CTA_WARPS = CTA_THREADS / 32;

static_assert(MOE_MAX_TOP_K <= 32, "a lane per choice");

/* Bit s: slot s is some lane's `target` (a slot or NOWHERE). All lanes. */
__device__ inline uint64_t slots_of_lanes(uint32_t target)
{
    static_assert(MOE_CUDA_MAX_SLOTS <= 64, "bits of a mask");
    const uint32_t bit = target == NOWHERE ? 0 : 1u << target % 32;
    const uint32_t low = __reduce_or_sync(ALL_LANES, target < 32 ? bit : 0);
    const uint32_t high = __reduce_or_sync(ALL_LANES, target < 32 ? 0 : bit);
    return static_cast<uint64_t>(high) << 32 | low;
}

/* Call first in the first kernel of a stage. */
__device__ inline void stamp_stage(const struct moe_cuda_pass &p, enum moe_stage stage)
{
    stamp_begin(p.began != nullptr ? p.began + stage : nullptr);
}

/* Whether token t takes part in the pass. */
__device__ inline bool token_counts(const struct moe_cuda_pass &p, uint32_t t)
{
    return p.token_state == nullptr || p.token_state[t] == MOE_TOKEN_OK;
}

/* The row of token t of this slot on its way to the experts. */
__device__ inline const void *own_row(const struct moe_cuda_pass &p, uint32_t t)
{
    return static_cast<const uint8_t *>(p.outgoing) + static_cast<size_t>(t) * p.row_bytes;
}

/* Whether the sum of token t of this slot begins with its row of `base`. */
__device__ inline bool has_base(const struct moe_cuda_pass &p, uint32_t t)
{
    return p.base != nullptr && (p.mode == nullptr || !p.params->has_modes ||
                                 (p.mode[t] & MOE_ROUTE_WITHOUT_SHARED) == 0);
}

/* Slot that computes expert `id` of E for token t of any source, or NOWHERE. */
__device__ inline uint32_t target_of(const struct moe_cuda_placement &placement, uint32_t experts,
                                     uint32_t t, int32_t id)
{
    if (id < 0 || id >= static_cast<int32_t>(experts))
        return NOWHERE;
    uint32_t first = placement.offset[id], copies = placement.offset[id + 1] - first;
    /* Correct unless an expert has two copies, and known without waiting for `first`. */
    uint32_t guess = placement.slot[id];
    if (copies == 1 && first == static_cast<uint32_t>(id))
        return guess;
    return placement.slot[copies == 1 ? first : first + t % copies];
}

__device__ inline uint32_t *row_of_token(const struct moe_cuda_pass &p, uint32_t source, uint32_t t)
{
    const struct moe_window_shape &shape = p.layout.shape;
    return p.row_of + (static_cast<size_t>(source) * shape.max_tokens + t) * shape.max_top_k;
}

/* A warp's walk through numbered items. The first item may be fixed. The others come from a
 * counter, which is read one item ahead, so that the warp does not wait for it. */
struct walk {
    uint32_t *counter;
    uint32_t fixed; /* items below are some warp's first */
    uint32_t item;
    uint32_t next; /* in lane 0 */
};

__device__ inline void ask_ahead(struct walk *w)
{
    w->next = threadIdx.x % 32 == 0 ? w->fixed + atomicAdd(w->counter, 1u) : 0;
}

__device__ inline void next_item(struct walk *w)
{
    w->item = __shfl_sync(ALL_LANES, w->next, 0);
    ask_ahead(w);
}

/* Begins a walk of `warps` warps; each has a different `first` item. */
__device__ inline struct walk begin_walk(uint32_t *counter, uint32_t first, uint32_t warps)
{
    struct walk w = {counter, warps, first, 0};
    ask_ahead(&w);
    return w;
}

/* Joins a walk that `warps` other warps began. */
__device__ inline struct walk join_walk(uint32_t *counter, uint32_t warps)
{
    struct walk w = begin_walk(counter, 0, warps);
    next_item(&w);
    return w;
}

/* (token, peer) of item i of a walk over the tokens of all peers, by token. Within a token, peers
 * are in the order in which they send to this slot (`forward` false), or this slot sends to
 * them. */
__device__ inline void peer_item(const struct moe_cuda_pass &p, uint32_t i, bool forward,
                                 uint32_t *source, uint32_t *t)
{
    uint32_t peers = p.slots - 1, distance = 1 + i % peers;
    *t = i / peers;
    *source = (forward ? p.slot + distance : p.slot + p.slots - distance) % p.slots;
}

/* Signals the peers that the rows of `step` have left this slot's window. One warp, all lanes. */
__device__ inline void signal_done(const struct moe_cuda_pass &p, uint32_t step)
{
    struct moe_cuda_control *c = p.control;
    const uint32_t lane = threadIdx.x % 32;
    fence_system();
#pragma unroll 1
    for (uint32_t slot = lane; slot < p.slots; slot += 32)
        if (slot != p.slot && is_live(c->live, slot))
            store_relaxed(moe_window_done_of(&p.layout, c->window[slot], p.slot),
                          moe_window_flag(moe_window_stamp(c->epoch, step), 0));
    if (lane == 0)
        c->done_sent = step;
}

constexpr uint32_t COPY_UNROLL = 4; /* loads in flight per lane */

/* Copies a row to the address `to` of each lane in `lanes`. */
template <typename Unit>
__device__ inline void scatter_row(const void *from, uint32_t bytes, uint32_t lanes, void *to)
{
    const uint32_t lane = threadIdx.x % 32, units = bytes / sizeof(Unit);
    const Unit *row = static_cast<const Unit *>(from);
    for (uint32_t at = lane; at - lane < units; at += 32 * COPY_UNROLL) {
        Unit value[COPY_UNROLL];
#pragma unroll
        for (uint32_t u = 0; u < COPY_UNROLL; u++)
            if (at + 32 * u < units)
                value[u] = __ldcg(row + at + 32 * u);
        for (uint32_t left = lanes; left != 0; left &= left - 1) {
            Unit *target = reinterpret_cast<Unit *>(
                __shfl_sync(ALL_LANES, reinterpret_cast<unsigned long long>(to), __ffs(left) - 1));
#pragma unroll
            for (uint32_t u = 0; u < COPY_UNROLL; u++)
                if (at + 32 * u < units)
                    target[at + 32 * u] = value[u];
        }
    }
}

#endif
