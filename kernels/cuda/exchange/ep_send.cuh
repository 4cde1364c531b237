/* SPDX-License-Identifier: Apache-2.0 */
/* Sends rows: each token's row once to every slot that needs it, to an address that needs no
 * agreement. */
#ifndef MOE_CUDA_EP_SEND_CUH
#define MOE_CUDA_EP_SEND_CUH

#include "cuda/exchange/arrival.cuh"
#include "cuda/exchange/bulk.cuh"
#include "cuda/exchange/moves.cuh"

/* ------------------------------------------------------------------- plans */

/* Destinations of a token. Lanes are numbered by distance, so that slots begin with different
 * peers; lane 0 is this slot. */
struct send_plan {
    uint32_t peer;    /* lane i: the slot at distance i */
    uint32_t choices; /* bit k: choice k goes to that slot */
    uint32_t lanes;   /* the lanes with a peer that needs the row */
    struct moe_cuda_own_token own;
};

/* Lane k: the k-th choice of this slot's token t. */
__device__ static int32_t own_choice(const struct moe_cuda_pass &p, uint32_t t)
{
    const uint32_t lane = threadIdx.x % 32;
    return lane < p.top_k && token_counts(p, t) ? p.ids[static_cast<size_t>(t) * p.top_k + lane]
                                                : -1;
}

__device__ static struct send_plan plan_token(const struct moe_cuda_pass &p, struct arrival *a,
                                              uint32_t t, int32_t id)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t target = NOWHERE, mine = 0;
    if (id >= 0 && id < static_cast<int32_t>(p.experts)) {
        target = targets(p, a)[id];
        if (target == SEVERAL)
            target = target_of(a->params.placement, p.experts, t, id);
    }
    for (uint32_t s = 0; s < p.slots; s++) {
        uint32_t those = __ballot_sync(ALL_LANES, target == s);
        if (lane == s && is_live(a->live, s))
            mine = those;
    }
    struct send_plan plan;
    plan.peer = (p.slot + lane) % p.slots;
    plan.choices = __shfl_sync(ALL_LANES, mine, static_cast<int>(plan.peer));
    plan.lanes = __ballot_sync(ALL_LANES, lane > 0 && lane < p.slots && plan.choices != 0);
    plan.own.wanted = __reduce_or_sync(ALL_LANES, target == NOWHERE ? 0 : 1u << target);
    plan.own.zero = __ballot_sync(ALL_LANES, id >= static_cast<int32_t>(p.experts));
    return plan;
}

/* Stores `sent` of token t in every slot at a distance of `nearest` or more. */
__device__ static void store_sent(const struct moe_cuda_pass &p, const struct arrival *a,
                                  const struct send_plan &plan, uint32_t t, uint32_t nearest)
{
    const uint32_t lane = threadIdx.x % 32;
    uint8_t *window = a->window[plan.peer];
    if (lane >= nearest && lane < p.slots && window != nullptr)
        store_relaxed(moe_window_sent_of(&p.layout, window, p.slot, t),
                      moe_window_flag(a->stamp, plan.choices));
}

/* Lane i: destination of token t's row on the slot at distance i, or NULL. */
__device__ static void *target_row(const struct moe_cuda_pass &p, const struct arrival *a,
                                   const struct send_plan &plan, uint32_t t, bool quick)
{
    if (!(plan.lanes >> threadIdx.x % 32 & 1))
        return nullptr;
    uint8_t *window = a->window[plan.peer];
    return quick ? moe_window_quick_row_of(&p.layout, window, p.slot, t, p.stride)
                 : moe_window_row_of(&p.layout, window, p.slot, t, p.stride);
}

__device__ inline const void *own_row(const struct moe_cuda_pass &p, uint32_t t)
{
    return static_cast<const uint8_t *>(p.x) + static_cast<size_t>(t) * p.row_bytes;
}

/* -------------------------------------------------------------------- send */

/* A lane's view of the last step's `done` flag: rows of that step must have left the peers' windows
 * before new rows arrive. Loaded early, checked when needed. */
__device__ inline uint64_t peek_done(const struct moe_cuda_pass &p)
{
    const uint32_t lane = threadIdx.x % 32;
    if (lane >= p.slots)
        return 0;
    return load_acquire(moe_window_done_of(&p.layout, p.control->window[p.slot], lane));
}

__device__ static bool await_done(const struct moe_cuda_pass &p, uint32_t step, uint64_t peeked)
{
    struct moe_cuda_control *c = p.control;
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t last = moe_window_stamp(c->epoch, step - 1);
    bool clear = true;
    if (step > 1 && lane < p.slots && lane != p.slot && is_live(c->live, lane) &&
        moe_window_flag_stamp(peeked) != last)
        clear = wait_flag_reached(
            c, p.abort, moe_window_done_of(&p.layout, c->window[p.slot], lane), last, lane);
    clear = __all_sync(ALL_LANES, clear);
    /* Before it set its flag, the peer may have written blanks. */
    if (c->refused == step - 1)
        fence_system();
    __syncwarp();
    return clear;
}

template <typename Unit>
__device__ static void send_plain(const struct moe_cuda_pass &p, struct arrival *a, struct walk w)
{
    const struct span s = {0, p.row_bytes / static_cast<uint32_t>(sizeof(Unit))};
    for (; w.item < a->params.tokens; next_item(&w)) {
        const struct send_plan plan = plan_token(p, a, w.item, own_choice(p, w.item));
        if (plan.lanes != 0) {
            struct held_units<Unit> h;
            const void *from = own_row(p, w.item);
            load_units(from, threadIdx.x % 32, s.end, &h);
            scatter_row<Unit, false>(from, s, &h, plan.lanes,
                                     target_row(p, a, plan, w.item, false));
            __syncwarp();
            fence_system();
        }
        store_sent(p, a, plan, w.item, 1);
    }
}

/* `sent` precedes the row, because the row's data mark their own arrival; also for this slot. The
 * row is loaded before its destination is known. */
__device__ static void send_quick(const struct moe_cuda_pass &p, struct arrival *a, struct walk w,
                                  uint64_t peeked)
{
    const uint32_t pieces = p.send_pieces, items = a->params.tokens * pieces;
    const uint32_t lane = threadIdx.x % 32;
    bool clear = false;
    for (; w.item < items; next_item(&w)) {
        const uint32_t t = w.item / pieces, piece = w.item % pieces;
        const struct span s = piece_of(p.row_bytes / sizeof(uint4), piece, pieces);
        struct held_units<uint4> h;
        load_units(own_row(p, t), s.begin + lane, s.end, &h);
        const struct send_plan plan = plan_token(p, a, t, own_choice(p, t));
        if (!clear && !(clear = await_done(p, a->step, peeked)))
            return;
        if (piece == 0) {
            store_sent(p, a, plan, t, 0);
            if (lane == 0)
                p.own[t] = plan.own;
        }
        scatter_row<uint4, true>(own_row(p, t), s, &h, plan.lanes, target_row(p, a, plan, t, true));
    }
}

#endif
