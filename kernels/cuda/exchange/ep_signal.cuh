/* SPDX-License-Identifier: Apache-2.0 */
/* One warp signals arrived rows to the peers, for all sending warps of a CTA.
 *
 * A peer must not see a row's flag before the row, so a fence of system scope must lie between
 * them. Alone it takes a microsecond or two. While the host's copies keep PCIe busy (results of the
 * last step, tokens of the next), it takes twenty: senders that wait for their own fences then
 * leave the links idle. So a sender only waits until its row has arrived, hands it over in shared
 * memory, and continues. One warp fences for all rows that it finds there, and signals them. */
#ifndef MOE_CUDA_EP_SIGNAL_CUH
#define MOE_CUDA_EP_SIGNAL_CUH

#include "cuda/exchange/ep_send.cuh"

constexpr uint32_t ROWS_AHEAD = 4; /* per sender: handed over, not yet signalled */

/* Shared memory of a CTA, by sender. Counts start at 0 and only rise. A row counts once for each of
 * its plans. */
struct arrived_rows {
    uint32_t arrived[CTA_WARPS];   /* rows handed over */
    uint32_t signalled[CTA_WARPS]; /* of those, signalled */
    uint32_t ended[CTA_WARPS];     /* 1: no more rows */
    uint32_t token[CTA_WARPS][ROWS_AHEAD];
    uint8_t first[CTA_WARPS][ROWS_AHEAD];        /* as in struct send_plan */
    uint32_t choices[CTA_WARPS][ROWS_AHEAD][32]; /* the same, by lane */
};

__device__ inline uint32_t load_acquire_shared(const uint32_t *word)
{
    uint32_t value;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
                 : "=r"(value)
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(word)))
                 : "memory");
    return value;
}

__device__ inline void store_release_shared(uint32_t *word, uint32_t value)
{
    asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(word))),
                 "r"(value)
                 : "memory");
}

/* Called by all threads of the CTA, which synchronise afterwards. */
__device__ inline void clear_arrived(struct arrived_rows *rows)
{
    if (threadIdx.x < CTA_WARPS)
        rows->arrived[threadIdx.x] = rows->signalled[threadIdx.x] = rows->ended[threadIdx.x] = 0;
}

/* Hands over the calling warp's row number `n`, of token t. Lane 0 knows that it has arrived at all
 * slots of the plan. */
__device__ static void hand_over(struct arrived_rows *rows, uint32_t n, uint32_t t,
                                 const struct send_plan &plan)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = n % ROWS_AHEAD;
    if (lane == 0)
        while (n - load_acquire_shared(&rows->signalled[warp]) >= ROWS_AHEAD)
            __nanosleep(20);
    __syncwarp();
    rows->choices[warp][i][lane] = plan.choices;
    if (lane == 0) {
        rows->token[warp][i] = t;
        rows->first[warp][i] = static_cast<uint8_t>(plan.first);
    }
    __syncwarp();
    if (lane == 0)
        store_release_shared(&rows->arrived[warp], n + 1);
}

/* The calling warp hands over no more rows. */
__device__ inline void end_rows(struct arrived_rows *rows)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        store_release_shared(&rows->ended[threadIdx.x / 32], 1);
}

/* Signals rows of the first `senders` warps until all of them have ended. One warp. It waits only
 * for them, and they end when their waits for peers do. */
__device__ static void signal_rows(const struct moe_cuda_pass &p, const struct arrival *a,
                                   struct arrived_rows *rows, uint32_t senders)
{
    const uint32_t lane = threadIdx.x % 32;
    struct send_plan plan = {};
    uint32_t signalled = 0; /* lane w: rows of warp w */
    for (;;) {
        const bool ended = lane >= senders || load_acquire_shared(&rows->ended[lane]) != 0;
        const uint32_t arrived = lane < senders ? load_acquire_shared(&rows->arrived[lane]) : 0;
        if (!__any_sync(ALL_LANES, arrived != signalled)) {
            if (__all_sync(ALL_LANES, ended))
                return;
            __nanosleep(50);
            continue;
        }
        __syncwarp();
        fence_system(); /* one for all lanes; each stores flags below */
        for (uint32_t w = 0; w < senders; w++) {
            const uint32_t until = __shfl_sync(ALL_LANES, arrived, static_cast<int>(w));
            for (uint32_t n = __shfl_sync(ALL_LANES, signalled, static_cast<int>(w)); n != until;
                 n++) {
                plan.first = rows->first[w][n % ROWS_AHEAD];
                plan.peer = slot_at(p, plan.first + lane);
                plan.choices = rows->choices[w][n % ROWS_AHEAD][lane];
                store_sent(p, a, plan, rows->token[w][n % ROWS_AHEAD], 1);
            }
        }
        __syncwarp();
        signalled = arrived;
        if (lane < senders)
            store_release_shared(&rows->signalled[lane], signalled);
    }
}

/* ------------------------------------------------------------------- sending */

/* Stores the ring's row `row`, of token t, at the plan's slots, and waits until it is there. */
__device__ static void store_row_at(const struct moe_cuda_pass &p, const struct arrival *a,
                                    struct row_ring *ring, uint32_t row,
                                    const struct send_plan &plan, uint32_t t)
{
    void *to = target_row(p, a, plan, t, false);
    for (uint32_t left = plan.lanes; left != 0; left &= left - 1) {
        void *target = reinterpret_cast<void *>(
            __shfl_sync(ALL_LANES, reinterpret_cast<unsigned long long>(to), __ffs(left) - 1));
        if (threadIdx.x % 32 == 0)
            store_row(*ring, row, target);
    }
    if (threadIdx.x % 32 == 0) {
        end_row();
        await_stores();
    }
}

/* Loads the next row while the last one is stored. */
__device__ static void send_bulk(const struct moe_cuda_pass &p, struct arrival *a, struct walk w,
                                 struct row_ring *ring, struct arrived_rows *arrived)
{
    const uint32_t lane = threadIdx.x % 32, tokens = a->params.tokens;
    uint32_t sent = 0; /* rows */
    if (lane == 0 && w.item < tokens)
        begin_row(ring, own_row(p, w.item));
    int32_t id = w.item < tokens ? own_choice(p, w.item) : -1;
    while (w.item < tokens) {
        const uint32_t t = w.item, target = target_of_choice(p, a, t, id);
        next_item(&w);
        if (lane == 0 && w.item < tokens)
            begin_row(ring, own_row(p, w.item));
        id = w.item < tokens ? own_choice(p, w.item) : -1;
        uint32_t row = lane == 0 ? await_row(ring) : 0;
#pragma unroll 1
        for (uint32_t first = 0; first < p.slots; first += MOE_CUDA_WARP_SLOTS) {
            const struct send_plan plan = plan_sends(p, a, target, first);
            store_row_at(p, a, ring, row, plan, t);
            hand_over(arrived, sent++, t, plan);
        }
    }
}

/* Sends tokens until none is left. Call with each sending warp, 0 <= `warp` < `senders`, of each
 * CTA. */
template <typename Unit, way WAY>
__device__ static void send_tokens(const struct moe_cuda_pass &p, struct arrival *a, uint32_t warp,
                                   uint32_t senders, uint64_t peeked, struct row_ring *ring,
                                   struct arrived_rows *arrived)
{
    if (WAY != way::QUICK && !await_done(p, a->step, peeked))
        return;
    struct walk w =
        begin_walk(&p.control->next_push[a->step & 1], warp * a->ctas + a->cta, senders * a->ctas);
    if constexpr (WAY == way::QUICK)
        send_quick(p, a, w, peeked);
    else if constexpr (WAY == way::BULK)
        send_bulk(p, a, w, ring, arrived);
    else
        send_plain<Unit>(p, a, w);
}

#endif
