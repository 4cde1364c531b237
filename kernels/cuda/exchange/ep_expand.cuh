/* SPDX-License-Identifier: Apache-2.0 */
/* Receives rows: copies each token's row to the rows of its experts, as it arrives. */
#ifndef MOE_CUDA_EP_EXPAND_CUH
#define MOE_CUDA_EP_EXPAND_CUH

#include "cuda/exchange/ep_receive.cuh"
#include "cuda/exchange/ep_send.cuh"

/* An arriving token, or one of this slot. It is peeked at while the previous one still moves, so
 * that warps do not wait for memory. */
struct incoming {
    uint32_t source, t;
    int32_t id;       /* this slot's token: lane k has choice k */
    uint64_t sent;    /* else, and with QUICK: the `sent` flag, as seen so far */
    uint4 route;      /* lane k: the route of choice k, as seen so far */
    uint32_t choices; /* valid once placed. bit k: choice k has a row here */
    uint32_t row;     /* valid once placed. lane k: row of choice k, or MOE_CUDA_NO_ROW */
};

__device__ static const uint64_t *sent_of(const struct moe_cuda_pass &p, const struct arrival *a,
                                          const struct incoming &in)
{
    return moe_window_sent_of(&p.layout, own_window(p, a), in.source, in.t);
}

__device__ static struct moe_window_route *
routes_of(const struct moe_cuda_pass &p, const struct arrival *a, const struct incoming &in)
{
    return moe_window_routes_of(&p.layout, own_window(p, a), a->step & 1, in.source, in.t);
}

/* Number of items: first this slot's tokens, then the peers' tokens in the order in which they send
 * to this slot. Some items have no token. */
__device__ static uint32_t items_of(const struct moe_cuda_pass &p, const struct arrival *a)
{
    uint32_t peer_tokens = 0;
    for (uint32_t s = 0; s < p.slots; s++)
        peer_tokens = s == p.slot ? peer_tokens : max(peer_tokens, a->tokens_of[s]);
    return a->tokens_of[p.slot] + peer_tokens * (p.slots - 1);
}

__device__ inline bool exists(const struct arrival *a, const struct incoming &in)
{
    return in.t < a->tokens_of[in.source];
}

/* Peeks at item i. QUICK: this slot's tokens have flags too. */
template <way WAY>
__device__ static void peek_token(const struct moe_cuda_pass &p, const struct arrival *a,
                                  uint32_t i, struct incoming *in)
{
    const uint32_t lane = threadIdx.x % 32, own = a->tokens_of[p.slot];
    in->source = p.slot;
    in->t = i;
    if (i >= own)
        peer_item(p, i - own, false, &in->source, &in->t);
    in->choices = 0;
    in->row = MOE_CUDA_NO_ROW;
    if (!exists(a, *in))
        return;
    /* QUICK: data mark their own arrival, so a relaxed load is enough. */
    if (WAY == way::QUICK)
        in->sent = load_relaxed(sent_of(p, a, *in));
    else if (in->source != p.slot)
        in->sent = load_acquire(sent_of(p, a, *in));
    else
        in->id = own_choice(p, in->t);
    if (lane < p.top_k)
        in->route = load_at_once(routes_of(p, a, *in) + lane);
}

__device__ inline bool is_sent(const struct arrival *a, const struct incoming &in)
{
    return moe_window_flag_stamp(in.sent) == a->stamp;
}

/* Waits for the source's second flag; its choices, or NOWHERE if the wait failed. */
__device__ static __noinline__ uint32_t await_more_sent(const struct moe_cuda_pass &p,
                                                        const struct arrival *a, uint32_t source,
                                                        uint32_t t)
{
    uint32_t more = 0;
    const uint64_t *at = moe_window_more_sent_of(&p.layout, own_window(p, a), source, t);
    if (!wait_flag(p.control, p.abort, at, a->stamp, source, &more))
        return NOWHERE;
    return more << MOE_WINDOW_VALUE_BITS;
}

/* Waits for the source's flag and reads the choices for this slot. False if the wait failed. */
__device__ static bool await_sent(const struct moe_cuda_pass &p, const struct arrival *a,
                                  struct incoming *in)
{
    bool came = true;
    in->choices = moe_window_flag_value(in->sent);
    if (!is_sent(a, *in))
        came =
            wait_flag(p.control, p.abort, sent_of(p, a, *in), a->stamp, in->source, &in->choices);
    if (p.top_k > MOE_WINDOW_VALUE_BITS && came) {
        const uint32_t more = await_more_sent(p, a, in->source, in->t);
        came = more != NOWHERE;
        in->choices |= more;
    }
    came = __all_sync(ALL_LANES, came);
    __syncwarp(); /* a vote orders no memory */
    /* All lanes use one value, limited to K choices whatever it contains. */
    in->choices = __shfl_sync(ALL_LANES, in->choices, 0) & ALL_LANES >> (32 - p.top_k);
    return came;
}

/* Finds the choices of this slot's token that stay here, and stores the token's data for
 * combine. */
__device__ static void find_own_choices(const struct moe_cuda_pass &p, struct arrival *a,
                                        struct incoming *in)
{
    const uint32_t target = target_of_choice(p, a, in->t, in->id);
    const struct moe_cuda_own_token own = own_token_of(p, target, in->id);
    in->choices = __ballot_sync(ALL_LANES, target == p.slot);
    if (threadIdx.x % 32 == 0)
        p.own[in->t] = own;
}

/* Finds the row of lane k's choice and stores its weight. False if the wait for its route failed,
 * or if the source's routes contradict its counts. */
__device__ static bool place_choice(const struct moe_cuda_pass &p, struct arrival *a,
                                    struct incoming *in)
{
    struct moe_cuda_control *c = p.control;
    if (!has_stamp(in->route, a->stamp) &&
        !wait_route(c, p.abort, routes_of(p, a, *in) + threadIdx.x % 32, a->stamp, in->source,
                    &in->route))
        return false;
    uint32_t expert = in->route.x & ((1u << MOE_WINDOW_VALUE_BITS) - 1), position = in->route.w;
    int32_t l = expert < p.experts ? local_indices(p, a)[expert] : -1;
    uint32_t i = in->source * p.local_experts + static_cast<uint32_t>(l);
    if (l < 0 || position >= row_counts(p, a)[i]) {
        give_up(c, MOE_CUDA_PASS_PROTOCOL_ERROR, in->source);
        return false;
    }
    in->row = first_rows(a)[i] + position;
    p.row_weight[in->row] = __uint_as_float(in->route.z);
    return true;
}

/* Finds choices and rows of a peeked token. `stores_rows`: also stores them for combine. */
template <way WAY>
__device__ static bool place_token(const struct moe_cuda_pass &p, struct arrival *a,
                                   bool stores_rows, struct incoming *in)
{
    const uint32_t lane = threadIdx.x % 32;
    if (WAY != way::QUICK && in->source == p.slot)
        find_own_choices(p, a, in);
    else if (!await_sent(p, a, in))
        return false;
    bool good = true;
    if (in->choices >> lane & 1)
        good = place_choice(p, a, in);
    if (!__all_sync(ALL_LANES, good))
        return false;
    if (stores_rows && lane < p.top_k)
        row_of_token(p, in->source, in->t)[lane] = in->row;
    return true;
}

/* Lane k: address of choice k's row. */
__device__ inline void *expanded_row(const struct moe_cuda_pass &p, const struct incoming &in)
{
    return static_cast<uint8_t *>(p.rows) + static_cast<size_t>(in.row) * p.row_bytes;
}

__device__ static const void *row_in_window(const struct moe_cuda_pass &p, const struct arrival *a,
                                            const struct incoming &in)
{
    if (in.source == p.slot)
        return own_row(p, in.t);
    return moe_window_row_of(&p.layout, own_window(p, a), in.source, in.t, p.stride);
}

/* ----------------------------------------------------- with flags, in registers */

template <typename Unit>
__device__ static void expand_plain(const struct moe_cuda_pass &p, struct arrival *a, struct walk w)
{
    const uint32_t items = items_of(p, a);
    const struct span s = {0, p.row_bytes / static_cast<uint32_t>(sizeof(Unit))};
    for (; w.item < items; next_item(&w)) {
        struct incoming in;
        struct held_units<Unit> h;
        peek_token<way::PLAIN>(p, a, w.item, &in);
        if (!exists(a, in))
            continue;
        if (!place_token<way::PLAIN>(p, a, true, &in))
            return;
        const void *from = row_in_window(p, a, in);
        load_units(from, threadIdx.x % 32, s.end, &h);
        scatter_row<Unit, false>(from, s, &h, in.choices, expanded_row(p, in));
    }
}

/* ------------------------------------------------------- by the copy engine */

/* Stores the ring's oldest row at its choices' rows. */
__device__ static void leave_ring(const struct moe_cuda_pass &p, struct row_ring *ring,
                                  struct incoming *in)
{
    const uint32_t lane = threadIdx.x % 32;
    if (in->choices == 0)
        return;
    uint32_t place = lane == 0 ? await_row(ring) : 0;
    for (uint32_t left = in->choices; left != 0; left &= left - 1) {
        uint32_t row = __shfl_sync(ALL_LANES, in->row, __ffs(left) - 1);
        if (lane == 0)
            store_row(*ring, place,
                      static_cast<uint8_t *>(p.rows) + static_cast<size_t>(row) * p.row_bytes);
    }
    if (lane == 0)
        end_row();
    in->choices = 0;
}

/* Loads one row while it stores the previous one. Stores do not wait for late tokens. */
__device__ static void expand_bulk(const struct moe_cuda_pass &p, struct arrival *a, struct walk w,
                                   struct row_ring *ring)
{
    const uint32_t items = items_of(p, a);
    struct incoming in = {}, ahead = {}, last = {};
    if (w.item < items)
        peek_token<way::BULK>(p, a, w.item, &in);
    for (; w.item < items; in = ahead) {
        next_item(&w);
        if (w.item < items)
            peek_token<way::BULK>(p, a, w.item, &ahead);
        if (!exists(a, in))
            continue;
        if (in.source != p.slot && !__all_sync(ALL_LANES, is_sent(a, in)))
            leave_ring(p, ring, &last);
        if (!place_token<way::BULK>(p, a, true, &in))
            break;
        if (in.choices == 0)
            continue;
        if (threadIdx.x % 32 == 0) {
            loads_before_copies();
            begin_row(ring, row_in_window(p, a, in));
        }
        leave_ring(p, ring, &last);
        last = in;
    }
    leave_ring(p, ring, &last);
    if (threadIdx.x % 32 == 0)
        await_stores();
}

/* -------------------------------------------------------------------- quick */

/* Reads the first units of a peer's row, arrived or not. */
__device__ static void peek_units(const uint4 *row, uint32_t at, uint32_t end,
                                  struct held_units<uint4> *h)
{
    h->at = at;
    h->end = end;
#pragma unroll
    for (uint32_t u = 0; u < MOVE_UNROLL; u++)
        if (at + 32 * u < end)
            h->value[u] = load_relaxed(row + at + 32 * u);
}

/* Waits until all peeked units are data, and writes blanks back. */
__device__ static bool take_units(const struct moe_cuda_pass &p, uint32_t source, uint4 *row,
                                  struct held_units<uint4> *h)
{
    uint64_t since = 0, looked = 0;
    for (uint32_t tries = 1;; tries++) {
        bool here = true;
#pragma unroll
        for (uint32_t u = 0; u < MOVE_UNROLL; u++)
            if (h->at + 32 * u < h->end && has_blank(h->value[u])) {
                h->value[u] = load_relaxed(row + h->at + 32 * u);
                here = false;
            }
        if (here)
            break;
        if (tries % TRIES_BETWEEN_LOOKS == 0 &&
            wait_failed(p.control, p.abort, source, &since, &looked))
            return false;
    }
#pragma unroll
    for (uint32_t u = 0; u < MOVE_UNROLL; u++)
        if (h->at + 32 * u < h->end)
            store_relaxed(row + h->at + 32 * u, all_blank());
    return true;
}

/* Takes a piece of a peer's row. Its first units have been peeked at. */
__device__ static bool take_row(const struct moe_cuda_pass &p, const struct incoming &in,
                                uint4 *row, struct span s, struct held_units<uint4> *h)
{
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t at = s.begin;;) {
        if (!__all_sync(ALL_LANES, take_units(p, in.source, row, h)))
            return false;
        scatter_units<uint4, false>(*h, in.choices, expanded_row(p, in));
        at += 32 * MOVE_UNROLL;
        if (at >= s.end)
            return true;
        peek_units(row, at + lane, s.end, h);
    }
}

/* Loads the data before their destination is known. */
__device__ static bool expand_piece(const struct moe_cuda_pass &p, struct arrival *a,
                                    struct incoming *in, uint32_t piece)
{
    const uint32_t lane = threadIdx.x % 32;
    const struct span s = piece_of(p.row_bytes / sizeof(uint4), piece, p.expand_pieces);
    uint4 *row = static_cast<uint4 *>(
        moe_window_quick_row_of(&p.layout, own_window(p, a), in->source, in->t, p.stride));
    struct held_units<uint4> h;
    if (in->source == p.slot)
        load_units(own_row(p, in->t), s.begin + lane, s.end, &h);
    else
        peek_units(row, s.begin + lane, s.end, &h);
    if (!place_token<way::QUICK>(p, a, piece == 0, in))
        return false;
    if (in->choices == 0)
        return true;
    if (in->source != p.slot)
        return take_row(p, *in, row, s, &h);
    scatter_row<uint4, false>(own_row(p, in->t), s, &h, in->choices, expanded_row(p, *in));
    return true;
}

__device__ static void expand_quick(const struct moe_cuda_pass &p, struct arrival *a, struct walk w)
{
    const uint32_t pieces = p.expand_pieces, items = items_of(p, a) * pieces;
    struct incoming in = {}, ahead = {};
    bool good = true;
    if (w.item < items)
        peek_token<way::QUICK>(p, a, w.item / pieces, &in);
    for (; good && w.item < items; in = ahead) {
        const uint32_t piece = w.item % pieces;
        next_item(&w);
        if (w.item < items)
            peek_token<way::QUICK>(p, a, w.item / pieces, &ahead);
        if (exists(a, in))
            good = expand_piece(p, a, &in, piece);
    }
}

template <typename Unit, way WAY>
__device__ static void expand_tokens(const struct moe_cuda_pass &p, struct arrival *a,
                                     struct walk w, struct row_ring *ring)
{
    if constexpr (WAY == way::QUICK)
        expand_quick(p, a, w);
    else if constexpr (WAY == way::BULK)
        expand_bulk(p, a, w, ring);
    else
        expand_plain<Unit>(p, a, w);
}

#endif
