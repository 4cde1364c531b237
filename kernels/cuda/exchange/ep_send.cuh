/* SPDX-License-Identifier: Apache-2.0 */
/* Sends rows: each token's row once to every slot that needs it, to an address that needs no
 * agreement. */
#ifndef MOE_CUDA_EP_SEND_CUH
#define MOE_CUDA_EP_SEND_CUH

#include "cuda/exchange/arrival.cuh"
#include "cuda/exchange/bulk.cuh"
#include "cuda/exchange/moves.cuh"
#include "cuda/plan/peers.h"

/* ------------------------------------------------------------------- plans */

/* Destinations of a token among the slots at distances first .. first + 31 (plan/peers.h). */
struct send_plan {
    uint32_t first;
    uint32_t peer;    /* lane i: the slot at distance first + i */
    uint32_t choices; /* bit k: choice k goes to that slot */
    uint32_t lanes;   /* the lanes with a peer that needs the row */
};

__device__ inline uint32_t slot_at(const struct moe_cuda_pass &p, uint32_t distance)
{
    return moe_cuda_slot_at(p.slot, p.slots, distance);
}

/* Lane k: the k-th choice of this slot's token t. */
__device__ static int32_t own_choice(const struct moe_cuda_pass &p, uint32_t t)
{
    const uint32_t lane = threadIdx.x % 32;
    return lane < p.top_k && token_counts(p, t) ? p.ids[static_cast<size_t>(t) * p.top_k + lane]
                                                : -1;
}

/* Lane k: the slot of choice `id` of token t, or NOWHERE. */
__device__ static uint32_t target_of_choice(const struct moe_cuda_pass &p, struct arrival *a,
                                            uint32_t t, int32_t id)
{
    if (id < 0 || id >= static_cast<int32_t>(p.experts))
        return NOWHERE;
    const uint32_t target = targets(p, a)[id];
    return target != SEVERAL ? target : target_of(a->params.placement, p.experts, t, id);
}

/* The plan of a token from distance `first` on. Lane k: `target` of choice k. */
__device__ static struct send_plan
plan_sends(const struct moe_cuda_pass &p, const struct arrival *a, uint32_t target, uint32_t first)
{
    const uint32_t lane = threadIdx.x % 32;
    struct send_plan plan = {first, slot_at(p, first + lane), 0, 0};
    const uint32_t count = min(p.slots - first, static_cast<uint32_t>(MOE_CUDA_WARP_SLOTS));
    uint32_t slot = slot_at(p, first);
#pragma unroll 4
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t those = __ballot_sync(ALL_LANES, target == slot);
        if (lane == i)
            plan.choices = those;
        slot = slot + 1 == p.slots ? 0 : slot + 1;
    }
    if (!is_live(a->live, plan.peer))
        plan.choices = 0;
    plan.lanes = __ballot_sync(ALL_LANES, first + lane > 0 && plan.choices != 0);
    return plan;
}

/* Combine's data about a token. Lane k: choice `id`, and its `target`. */
__device__ static struct moe_cuda_own_token own_token_of(const struct moe_cuda_pass &p,
                                                         uint32_t target, int32_t id)
{
    return {slots_of_lanes(target),
            __ballot_sync(ALL_LANES, id >= static_cast<int32_t>(p.experts))};
}

/* Stores the choices of token t from 24 on. Few layers have so many. */
__device__ static __noinline__ void store_more_sent(const struct moe_cuda_pass &p, uint64_t stamp,
                                                    uint8_t *window, uint32_t t, uint32_t choices)
{
    store_relaxed(moe_window_more_sent_of(&p.layout, window, p.slot, t),
                  moe_window_flag(stamp, choices >> MOE_WINDOW_VALUE_BITS));
}

/* Stores `sent` of token t in the plan's slots at a distance of `nearest` or more. */
__device__ static void store_sent(const struct moe_cuda_pass &p, const struct arrival *a,
                                  const struct send_plan &plan, uint32_t t, uint32_t nearest)
{
    const uint32_t distance = plan.first + threadIdx.x % 32;
    uint8_t *window = a->window[plan.peer];
    if (distance < nearest || distance >= p.slots || window == nullptr)
        return;
    store_relaxed(moe_window_sent_of(&p.layout, window, p.slot, t),
                  moe_window_flag(a->stamp, plan.choices));
    if (p.top_k > MOE_WINDOW_VALUE_BITS)
        store_more_sent(p, a->stamp, window, t, plan.choices);
}

/* Lane i: destination of token t's row on the plan's slot, or NULL. */
__device__ static void *target_row(const struct moe_cuda_pass &p, const struct arrival *a,
                                   const struct send_plan &plan, uint32_t t, bool quick)
{
    if (!(plan.lanes >> threadIdx.x % 32 & 1))
        return nullptr;
    uint8_t *window = a->window[plan.peer];
    return quick ? moe_window_quick_row_of(&p.layout, window, p.slot, t, p.stride)
                 : moe_window_row_of(&p.layout, window, p.slot, t, p.stride);
}

/* -------------------------------------------------------------------- send */

/* A lane's view of the last step's `done` flag of the slot with its number: rows of that step must
 * have left the peers' windows before new rows arrive. Loaded early, checked when needed. */
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
#pragma unroll 1
    for (uint32_t slot = lane; step > 1 && clear && slot < p.slots; slot += 32) {
        const bool seen = slot < 32 && moe_window_flag_stamp(peeked) == last;
        if (slot != p.slot && is_live(c->live, slot) && !seen)
            clear = wait_flag_reached(
                c, p.abort, moe_window_done_of(&p.layout, c->window[p.slot], slot), last, slot);
    }
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
        const uint32_t target = target_of_choice(p, a, w.item, own_choice(p, w.item));
#pragma unroll 1
        for (uint32_t first = 0; first < p.slots; first += MOE_CUDA_WARP_SLOTS) {
            const struct send_plan plan = plan_sends(p, a, target, first);
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
        const int32_t id = own_choice(p, t);
        const uint32_t target = target_of_choice(p, a, t, id);
        if (!clear && !(clear = await_done(p, a->step, peeked)))
            return;
        if (piece == 0) {
            const struct moe_cuda_own_token own = own_token_of(p, target, id);
            if (lane == 0)
                p.own[t] = own;
        }
#pragma unroll 1
        for (uint32_t first = 0; first < p.slots; first += MOE_CUDA_WARP_SLOTS) {
            const struct send_plan plan = plan_sends(p, a, target, first);
            if (piece == 0)
                store_sent(p, a, plan, t, 0);
            if (first != 0) /* a long row has passed through `h` */
                load_units(own_row(p, t), s.begin + lane, s.end, &h);
            scatter_row<uint4, true>(own_row(p, t), s, &h, plan.lanes,
                                     target_row(p, a, plan, t, true));
        }
    }
}

#endif
