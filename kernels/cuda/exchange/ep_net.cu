/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of passes over a network; see ep_net.h. In the order of a pass:
 *
 * count     a CTA of 16 warps per expert walks over all choices of this slot's tokens. First each
 *           warp counts its share; then it knows the positions among all rows of that expert
 * list      a CTA of 16 warps per slot lists the tokens that the slot needs, in order, and writes
 *           the control message; over several domains, also one per domain
 * pack      a warp per record
 * publish   one CTA stores the host's reading of the control messages as the pass's outcome and
 *           tables
 * expand    a warp per token of this slot or received record
 * sum       a warp per received record, or part of its row: computes the partial to send back
 * finish    a warp per token of this slot, or part of its row
 *
 * Kernels that move rows use 16 warps per CTA and at most 128 registers per thread; only count and
 * list use shared memory, at most 2 KiB. No kernel waits for a peer. Values from a peer are checked
 * before they are used as an index. Rows move in registers, 16 bytes per lane at a time if the
 * shape allows. */
#include "cuda/core/load.h"
#include "cuda/exchange/count.cuh"
#include "cuda/exchange/ep_net.h"
#include "cuda/exchange/moves.cuh"
#include "cuda/exchange/relay.cuh"
#include "cuda/exchange/sums.cuh"

constexpr uint32_t SHARES = 16;  /* warps of a CTA in count and list */
constexpr uint32_t SUM_ROWS = 4; /* loads of different rows in flight */

/* Slot that computes expert `id` for token t, or NOWHERE. */
__device__ static uint32_t target_of(const struct moe_cuda_pass &p, uint32_t t, int32_t id)
{
    return target_of(p.params->placement, p.experts, t, id);
}

__device__ static struct moe_cuda_control_message *
control_to(const struct moe_cuda_pass &p, const struct moe_cuda_net_pass &n, uint32_t slot)
{
    uint8_t *control = slot == p.slot ? n.control_in : n.control_out;
    return reinterpret_cast<struct moe_cuda_control_message *>(control + slot * n.control_bytes);
}

__device__ static uint32_t *table_of(const struct moe_cuda_pass &p, uint32_t *table, uint32_t slot)
{
    return table + static_cast<size_t>(slot) * p.layout.shape.max_tokens;
}

/* ----------------------------------------------------------------- count */

__global__ void __launch_bounds__(32 * SHARES)
    net_count_kernel(const __grid_constant__ struct moe_cuda_pass p,
                     const __grid_constant__ struct moe_cuda_net_pass n)
{
    __shared__ uint32_t counts[SHARES][32];
    stamp_stage(p, MOE_STAGE_PREPARE);
    if (is_stopped(p))
        return;
    const struct moe_cuda_placement &placement = p.params->placement;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, e = blockIdx.x;
    const uint32_t entry = placement.offset[e], copies = placement.offset[e + 1] - entry;
    const uint32_t pairs = p.params->tokens * p.top_k;
    const uint32_t share = (pairs + 32 * SHARES - 1) / (32 * SHARES) * 32;
    const uint32_t first = min(warp * share, pairs), end = min(first + share, pairs);
    for (uint32_t some = 0; some < copies; some += 32) {
        const struct walked_copies those = {e, copies, some};
        counts[warp][lane] = walk_pairs(p, those, first, end, 0, nullptr);
        __syncthreads();
        uint32_t before = 0, all = 0;
        for (uint32_t w = 0; w < SHARES; w++) {
            before += w < warp ? counts[w][lane] : 0;
            all += counts[w][lane];
        }
        __syncthreads();
        walk_pairs(p, those, first, end, before, n.position);
        if (warp == 0 && some + lane < copies)
            control_to(p, n, placement.slot[entry + some + lane])->body[e] = all;
    }
}

/* ------------------------------------------------------------------ list */

/* Lists the tokens with a choice on `slot`, in order, and returns their number; slots + d: on a
 * slot of domain d. All threads of the CTA. */
__device__ static uint32_t list_tokens(const struct moe_cuda_pass &p,
                                       const struct moe_cuda_net_pass &n, uint32_t slot)
{
    __shared__ uint32_t of_warp[SHARES];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t *send_token = table_of(p, n.send_token, slot);
    uint32_t *send_index = table_of(p, n.send_index, slot), listed = 0;
    for (uint32_t t0 = 0; t0 < p.params->tokens; t0 += blockDim.x) {
        const uint32_t t = t0 + threadIdx.x;
        bool wanted = false;
        if (t < p.params->tokens && token_counts(p, t))
            for (uint32_t k = 0; k < p.top_k; k++) {
                uint32_t to = target_of(p, t, p.ids[static_cast<size_t>(t) * p.top_k + k]);
                wanted |= slot < p.slots ? to == slot
                                         : to != NOWHERE && n.relay.domain_of[to] == slot - p.slots;
            }
        uint32_t those = __ballot_sync(ALL_LANES, wanted);
        if (lane == 0)
            of_warp[warp] = __popc(those);
        __syncthreads();
        uint32_t at = listed + __popc(those & ((1u << lane) - 1));
        for (uint32_t w = 0; w < SHARES; w++) {
            at += w < warp ? of_warp[w] : 0;
            listed += of_warp[w];
        }
        if (wanted) {
            send_token[at] = t;
            send_index[t] = at;
        }
        __syncthreads();
    }
    return listed;
}

/* A pass that ends early has no rows. */
__device__ static void open_pass(const struct moe_cuda_pass &p)
{
    for (uint32_t l = threadIdx.x; l <= p.local_experts; l += blockDim.x) {
        p.start[l] = 0;
        if (l < p.local_experts)
            p.count[l] = 0;
    }
}

/* For the gateway of another domain. */
__device__ static void list_for_domain(const struct moe_cuda_pass &p,
                                       const struct moe_cuda_net_pass &n, uint32_t domain)
{
    if (domain == n.relay.own)
        return;
    const uint32_t rows = list_tokens(p, n, p.slots + domain);
    if (threadIdx.x != 0)
        return;
    control_to(p, n, partner_in(n.relay, domain))->across = rows;
    n.outgoing[p.slots + domain] = rows;
}

__global__ void __launch_bounds__(32 * SHARES)
    net_list_kernel(const __grid_constant__ struct moe_cuda_pass p,
                    const __grid_constant__ struct moe_cuda_net_pass n)
{
    const uint32_t slot = blockIdx.x;
    if (slot == p.slot)
        open_pass(p);
    if (is_stopped(p))
        return;
    if (slot >= p.slots) {
        list_for_domain(p, n, slot - p.slots);
        return;
    }
    if (!is_live(p.control->live, slot))
        return;
    const uint32_t rows = slot == p.slot ? 0 : list_tokens(p, n, slot);
    struct moe_cuda_control_message *message = control_to(p, n, slot);
    if (threadIdx.x < MOE_HEAD_COUNT)
        message->head[threadIdx.x] = p.params->head[threadIdx.x];
    if (threadIdx.x != 0)
        return;
    message->kind = MOE_CUDA_MESSAGE_STEP;
    message->size = rows;
    if (!is_partner(n.relay, slot))
        message->across = 0;
    n.outgoing[slot] = rows;
    *trailer_at(reinterpret_cast<uint8_t *>(message), n.control_bytes - MOE_CUDA_TRAILER_BYTES) =
        n.trailer;
}

/* ------------------------------------------------------------------ pack */

/* Where records for `list` go: a slot, or slots + d for the gateway in domain d. */
__device__ static uint8_t *records_for(const struct moe_cuda_pass &p,
                                       const struct moe_cuda_net_pass &n, uint32_t list)
{
    if (list >= p.slots)
        return n.far_out + (list - p.slots) * n.region;
    return n.relay.domains == 0 ? n.out + list * n.region : records_in(n, list, p.slot);
}

/* Place of token t among the records for each slot of domain d that gets it. */
__device__ static void store_places(const struct moe_cuda_pass &p,
                                    const struct moe_cuda_net_pass &n, uint32_t d, uint32_t t,
                                    uint64_t wanted, struct moe_cuda_record *record)
{
    const uint32_t lane = threadIdx.x % 32;
    if (lane >= n.relay.size)
        return;
    const uint32_t slot = n.relay.slot_at[d * n.relay.size + lane];
    places_of(p, record)[lane] = wanted >> slot & 1 ? table_of(p, n.send_index, slot)[t] : 0;
}

template <typename Unit>
__device__ static void pack_record(const struct moe_cuda_pass &p, const struct moe_cuda_net_pass &n,
                                   uint32_t slot, uint32_t i)
{
    const uint32_t lane = threadIdx.x % 32, t = table_of(p, n.send_token, slot)[i];
    const size_t pair = static_cast<size_t>(t) * p.top_k + lane;
    uint8_t *record = records_for(p, n, slot) + static_cast<size_t>(i) * n.record;
    int32_t id = lane < p.top_k ? p.ids[pair] : -1;
    const uint32_t target = target_of(p, t, id);
    bool mine = target == slot;
    if (slot >= p.slots) {
        mine = target != NOWHERE && n.relay.domain_of[target] == slot - p.slots;
        store_places(p, n, slot - p.slots, t, slots_of_lanes(target),
                     reinterpret_cast<struct moe_cuda_record *>(record));
    }
    uint32_t choices = __ballot_sync(ALL_LANES, mine);
    struct moe_cuda_record *head = reinterpret_cast<struct moe_cuda_record *>(record);
    if (mine)
        reinterpret_cast<struct moe_cuda_route *>(head + 1)[lane] = {
            static_cast<uint32_t>(id), n.position[pair], p.weights[pair]};
    if (lane == 0)
        *head = {t, choices, {0, 0}};
    copy_row<Unit>(p, own_row(p, t), 1, record + n.record_head);
}

template <typename Unit>
__global__ void __launch_bounds__(CTA_THREADS)
    net_pack_kernel(const __grid_constant__ struct moe_cuda_pass p,
                    const __grid_constant__ struct moe_cuda_net_pass n)
{
    stamp_stage(p, MOE_STAGE_DISPATCH);
    if (is_stopped(p))
        return;
    for (uint32_t s = 0; s < p.slots + n.relay.domains; s++) {
        const bool far = s >= p.slots;
        if (far ? s - p.slots == n.relay.own
                : s == p.slot || !is_live(p.control->live, s) || !is_near(n.relay, s))
            continue;
        const uint32_t records = n.outgoing[s];
        for (uint32_t i = warp_in_grid(); i < records; i += warps_in_grid())
            pack_record<Unit>(p, n, s, i);
        if ((far || n.relay.domains == 0) && blockIdx.x == 0 && threadIdx.x == 0)
            *trailer_at(records_for(p, n, s), static_cast<size_t>(records) * n.record) = n.trailer;
    }
}

/* ---------------------------------------------------------------- expand */

/* Copies a token's row to its experts' rows. Lane k: whether choice k is for this slot, and its
 * route. False if the route is impossible. */
template <typename Unit>
__device__ static bool expand_row(const struct moe_cuda_pass &p, const struct moe_cuda_net_pass &n,
                                  uint32_t source, uint32_t t, bool here,
                                  const struct moe_cuda_route &route, const void *from)
{
    const uint32_t lane = threadIdx.x % 32, local = p.local_experts;
    uint32_t row = MOE_CUDA_NO_ROW;
    bool good = true;
    if (here) {
        int32_t l = route.expert < p.experts ? p.params->placement.local_index[route.expert] : -1;
        good = l >= 0;
        if (good) {
            uint32_t first = n.layout[source * local + static_cast<uint32_t>(l)];
            row = first + route.position;
            good = route.position < p.row_capacity && row < p.row_capacity;
        }
        if (good)
            p.row_weight[row] = route.weight;
    }
    if (!__all_sync(ALL_LANES, good))
        return false;
    if (lane < p.top_k)
        row_of_token(p, source, t)[lane] = row;
    uint32_t lanes = __ballot_sync(ALL_LANES, here);
    uint8_t *to = static_cast<uint8_t *>(p.rows) + static_cast<size_t>(row) * p.row_bytes;
    copy_row<Unit>(p, from, lanes, here ? to : nullptr);
    return true;
}

template <typename Unit>
__device__ static bool expand_own(const struct moe_cuda_pass &p, const struct moe_cuda_net_pass &n,
                                  uint32_t t)
{
    const uint32_t lane = threadIdx.x % 32;
    const size_t pair = static_cast<size_t>(t) * p.top_k + lane;
    int32_t id = lane < p.top_k && token_counts(p, t) ? p.ids[pair] : -1;
    bool here = target_of(p, t, id) == p.slot;
    struct moe_cuda_route route = {};
    if (here)
        route = {static_cast<uint32_t>(id), n.position[pair], p.weights[pair]};
    return expand_row<Unit>(p, n, p.slot, t, here, route, own_row(p, t));
}

template <typename Unit>
__device__ static bool expand_record(const struct moe_cuda_pass &p,
                                     const struct moe_cuda_net_pass &n, uint32_t source, uint32_t i)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint8_t *record = n.in + source * n.region + static_cast<size_t>(i) * n.record;
    const struct moe_cuda_record *head = reinterpret_cast<const struct moe_cuda_record *>(record);
    const uint32_t t = head->token;
    if (t >= n.tokens_of[source])
        return false;
    bool here = lane < p.top_k && (head->choices >> lane & 1);
    struct moe_cuda_route route = {};
    if (here)
        route = reinterpret_cast<const struct moe_cuda_route *>(head + 1)[lane];
    if (lane == 0)
        table_of(p, n.came_token, source)[i] = t;
    return expand_row<Unit>(p, n, source, t, here, route, record + n.record_head);
}

/* Stores the host's results: the outcome, and start and count of each expert's rows. */
__global__ void net_publish_kernel(const __grid_constant__ struct moe_cuda_pass p,
                                   const __grid_constant__ struct moe_cuda_net_pass n)
{
    if (is_stopped(p))
        return;
    if (threadIdx.x == 0)
        p.control->outcome = n.outcome;
    if (threadIdx.x < p.slots)
        p.control->tokens_of[threadIdx.x] =
            n.outcome.code == MOE_CUDA_PASS_GOOD ? n.tokens_of[threadIdx.x] : 0;
    const uint32_t local = p.local_experts, *start = n.layout + p.slots * local;
    for (uint32_t l = threadIdx.x; l <= local && n.outcome.code == MOE_CUDA_PASS_GOOD;
         l += blockDim.x) {
        p.start[l] = start[l];
        if (l == local)
            continue;
        p.count[l] = start[local + 1 + l];
        if (p.counts != nullptr)
            p.counts->local_rows[l] = p.count[l];
    }
}

template <typename Unit>
__global__ void __launch_bounds__(CTA_THREADS)
    net_expand_kernel(const __grid_constant__ struct moe_cuda_pass p,
                      const __grid_constant__ struct moe_cuda_net_pass n)
{
    if (is_stopped(p))
        return;
    const uint32_t warp = warp_in_grid(), warps = warps_in_grid(), lane = threadIdx.x % 32;
    for (uint32_t t = warp; t < p.params->tokens; t += warps)
        (void)expand_own<Unit>(p, n, t);
    for (uint32_t s = 0; s < p.slots; s++)
        for (uint32_t i = warp; i < n.rows_in[s]; i += warps)
            if (!expand_record<Unit>(p, n, s, i) && lane == 0)
                give_up(p.control, MOE_CUDA_PASS_PROTOCOL_ERROR, s);
}

/* ------------------------------------------------------------------- sum */

template <typename Element, typename Out, uint32_t N>
__device__ static void sum_record(const struct moe_cuda_pass &p, const struct moe_cuda_net_pass &n,
                                  uint32_t source, uint32_t i, uint32_t part)
{
    const uint32_t lane = threadIdx.x % 32, t = table_of(p, n.came_token, source)[i];
    uint32_t row = lane < p.top_k ? row_of_token(p, source, t)[lane] : MOE_CUDA_NO_ROW;
    uint32_t lanes = __ballot_sync(ALL_LANES, row != MOE_CUDA_NO_ROW), begin, end;
    uint8_t *partial = n.relay.domains == 0 ? n.in + source * n.region : sums_for(n, source);
    partial += static_cast<size_t>(i) * n.partial;
    part_columns<N>(p.hidden, n.parts, part, &begin, &end);
    for (uint32_t h = begin + lane * N; h - lane * N < end; h += 32 * N) {
        columns<N> sum[1];
        packed<Element, N> stored;
        sum_rows<Out, N, SUM_ROWS>(p, lanes, row, h, p.hidden, sum);
        pack(sum[0], &stored);
        if (h < p.hidden)
            put(reinterpret_cast<Element *>(partial) + h, stored);
    }
}

template <typename Element, typename Out, uint32_t N>
__global__ void __launch_bounds__(CTA_THREADS)
    net_sum_kernel(const __grid_constant__ struct moe_cuda_pass p,
                   const __grid_constant__ struct moe_cuda_net_pass n)
{
    stamp_stage(p, MOE_STAGE_COMBINE);
    if (is_stopped(p))
        return;
    for (uint32_t s = 0; s < p.slots; s++) {
        for (uint32_t i = warp_in_grid(); i < n.rows_in[s] * n.parts; i += warps_in_grid())
            sum_record<Element, Out, N>(p, n, s, i / n.parts, i % n.parts);
        if (n.relay.domains == 0 && blockIdx.x == 0 && threadIdx.x == 0 && s != p.slot &&
            is_live(p.control->live, s))
            *trailer_at(n.in + s * n.region, static_cast<size_t>(n.rows_in[s]) * n.partial) =
                n.trailer;
    }
}

/* ---------------------------------------------------------------- finish */

/* Data to finish a token: lane k has its k-th choice, lane s the slots s and s + 32. */
struct own_token {
    uint32_t row;       /* local row of choice k, or MOE_CUDA_NO_ROW */
    uint32_t local;     /* bit k: choice k has a local row */
    uint64_t wanted;    /* bit s: slot s has rows of this token */
    uint32_t record[2]; /* index of this token among those for slot s, and for slot s + 32 */
    uint32_t far;       /* lane d: the same among those for domain d */
    uint32_t across;    /* bit d: domain d has rows of this token; not the own one */
    uint32_t zero;      /* bit k: choice k is a zero expert */
    float weight;       /* of choice k */
    bool base;          /* its sum begins with its row of `base` */
};
static_assert(MOE_CUDA_MAX_SLOTS <= 64, "a lane has two slots, and half as many domains have two");

/* Index of token t among those for `slot`, if that slot has rows of it and is another one. */
__device__ static uint32_t record_for(const struct moe_cuda_pass &p,
                                      const struct moe_cuda_net_pass &n, const struct own_token &o,
                                      uint32_t slot, uint32_t t)
{
    return slot != p.slot && (o.wanted >> slot & 1) ? table_of(p, n.send_index, slot)[t] : 0;
}

__device__ static struct own_token describe_token(const struct moe_cuda_pass &p,
                                                  const struct moe_cuda_net_pass &n, uint32_t t)
{
    const uint32_t lane = threadIdx.x % 32;
    const size_t pair = static_cast<size_t>(t) * p.top_k + lane;
    struct own_token o = {};
    int32_t id = lane < p.top_k ? p.ids[pair] : -1;
    uint32_t target = target_of(p, t, id);
    o.weight = lane < p.top_k ? p.weights[pair] : 0.0f;
    o.base = has_base(p, t);
    o.row = lane < p.top_k ? row_of_token(p, p.slot, t)[lane] : MOE_CUDA_NO_ROW;
    o.local = __ballot_sync(ALL_LANES, o.row != MOE_CUDA_NO_ROW);
    o.wanted = slots_of_lanes(target);
    o.record[0] = record_for(p, n, o, lane, t);
    o.record[1] = record_for(p, n, o, lane + 32, t);
    if (n.relay.domains != 0) {
        uint32_t domain = target == NOWHERE ? n.relay.own : n.relay.domain_of[target];
        o.across = __reduce_or_sync(ALL_LANES, 1u << domain) & ~(1u << n.relay.own);
        if (o.across >> lane & 1)
            o.far = table_of(p, n.send_index, p.slots + lane)[t];
    }
    o.zero = __ballot_sync(ALL_LANES, id >= static_cast<int32_t>(p.experts));
    return o;
}

/* Adds the sums of the slots in `slots`, in order, to *sum. */
template <typename Element, typename Out, uint32_t N>
__device__ static void add_slots(const struct moe_cuda_pass &p, const struct moe_cuda_net_pass &n,
                                 const struct own_token &o, uint64_t slots, uint32_t h,
                                 columns<N> &sum)
{
    for (uint64_t left = slots; left != 0; left &= left - 1) {
        uint32_t s = static_cast<uint32_t>(__ffsll(static_cast<long long>(left))) - 1;
        size_t record =
            __shfl_sync(ALL_LANES, s < 32 ? o.record[0] : o.record[1], static_cast<int>(s % 32));
        const uint8_t *from = n.relay.domains == 0 ? n.out + s * n.region : sums_from(n, s);
        packed<Element, N> element = {};
        if (s == p.slot) {
            columns<N> own[1];
            sum_rows<Out, N, SUM_ROWS>(p, o.local, o.row, h, p.hidden, own);
            pack(own[0], &element);
        } else if (h < p.hidden) {
            fetch(reinterpret_cast<const Element *>(from + record * n.partial) + h, &element);
        }
        add_scaled(sum, unpack(element), 1.0f);
    }
}

/* Adds the sum of each domain, in order, to *sum. That of the own one is rounded as the others
 * are. */
template <typename Element, typename Out, uint32_t N>
__device__ static void add_domains(const struct moe_cuda_pass &p, const struct moe_cuda_net_pass &n,
                                   const struct own_token &o, uint32_t h, columns<N> &sum)
{
    const uint64_t near = o.wanted & slots_near(n.relay);
    for (uint32_t d = 0; d < n.relay.domains; d++) {
        packed<Element, N> element = {};
        size_t record = __shfl_sync(ALL_LANES, o.far, static_cast<int>(d));
        if (d == n.relay.own && near != 0) {
            columns<N> inside = {};
            add_slots<Element, Out, N>(p, n, o, near, h, inside);
            pack(inside, &element);
        } else if (!(o.across >> d & 1)) {
            continue;
        } else if (h < p.hidden) {
            const uint8_t *partial = n.far_in + d * n.region + record * n.partial;
            fetch(reinterpret_cast<const Element *>(partial) + h, &element);
        }
        add_scaled(sum, unpack(element), 1.0f);
    }
}

/* Finishes columns h .. of this slot's token: base, then the slots in order, then zero experts. */
template <typename Element, typename Out, uint32_t N>
__device__ static void finish_columns(const struct moe_cuda_pass &p,
                                      const struct moe_cuda_net_pass &n, const struct own_token &o,
                                      uint32_t t, uint32_t h)
{
    const bool inside = h < p.hidden;
    const size_t at = static_cast<size_t>(t) * p.hidden + h;
    columns<N> sum = {};
    packed<Element, N> element = {};
    if (inside && o.base) {
        packed<float, N> base;
        fetch(p.base + at, &base);
        sum = unpack(base);
    }
    if (n.relay.domains == 0)
        add_slots<Element, Out, N>(p, n, o, o.wanted, h, sum);
    else
        add_domains<Element, Out, N>(p, n, o, h, sum);
    for (uint32_t left = o.zero; left != 0; left &= left - 1) {
        float weight = __shfl_sync(ALL_LANES, o.weight, __ffs(left) - 1);
        if (inside)
            fetch(static_cast<const Element *>(p.x) + at, &element);
        add_scaled(sum, unpack(element), weight);
    }
    pack(sum, &element);
    if (inside)
        put(static_cast<Element *>(p.y) + at, element);
}

template <typename Element, typename Out, uint32_t N>
__device__ static void finish_token(const struct moe_cuda_pass &p,
                                    const struct moe_cuda_net_pass &n, uint32_t t, uint32_t part)
{
    const uint32_t lane = threadIdx.x % 32;
    const bool counts = token_counts(p, t);
    struct own_token o = {};
    if (counts)
        o = describe_token(p, n, t);
    uint32_t begin, end;
    part_columns<N>(p.hidden, n.parts, part, &begin, &end);
    const packed<Element, N> nothing = {};
    for (uint32_t h = begin + lane * N; h - lane * N < end; h += 32 * N) {
        if (counts)
            finish_columns<Element, Out, N>(p, n, o, t, h);
        else if (h < p.hidden)
            put(static_cast<Element *>(p.y) + static_cast<size_t>(t) * p.hidden + h, nothing);
    }
}

template <typename Element, typename Out, uint32_t N>
__global__ void __launch_bounds__(CTA_THREADS)
    net_finish_kernel(const __grid_constant__ struct moe_cuda_pass p,
                      const __grid_constant__ struct moe_cuda_net_pass n)
{
    if (is_stopped(p))
        return;
    for (uint32_t i = warp_in_grid(); i < p.params->tokens * n.parts; i += warps_in_grid())
        finish_token<Element, Out, N>(p, n, i / n.parts, i % n.parts);
}

/* Runs at the end of every pass, good or not. */
__global__ void net_report_kernel(const __grid_constant__ struct moe_cuda_pass p,
                                  const __grid_constant__ struct moe_cuda_net_pass n)
{
    const uint32_t s = threadIdx.x;
    if (p.counts != nullptr && s < p.slots)
        p.counts->sent_rows[s] = s != p.slot && is_live(p.control->live, s) ? n.outgoing[s] : 0;
    if (s != 0)
        return;
    if (p.outcome != nullptr)
        *p.outcome = p.control->outcome;
    if (p.began != nullptr)
        p.began[MOE_STAGE_COUNT] = clock_ns();
}

/* ---------------------------------------------------------------- launches */

extern "C" struct moe_status moe_cuda_launch_net_list(const struct moe_cuda_pass *pass,
                                                      const struct moe_cuda_net_pass *n,
                                                      cudaStream_t stream)
{
    net_count_kernel<<<pass->experts, 32 * SHARES, 0, stream>>>(*pass, *n);
    MOE_TRY(MOE_LAUNCHED("net_count_kernel"));
    net_list_kernel<<<pass->slots + n->relay.domains, 32 * SHARES, 0, stream>>>(*pass, *n);
    return MOE_LAUNCHED("net_list_kernel");
}

extern "C" struct moe_status moe_cuda_launch_net_pack(const struct moe_cuda_pass *pass,
                                                      const struct moe_cuda_net_pass *n,
                                                      uint32_t ctas, cudaStream_t stream)
{
    switch (unit_bytes(pass)) {
    case 16: net_pack_kernel<uint4><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n); break;
    case 4: net_pack_kernel<uint32_t><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n); break;
    default: net_pack_kernel<uint16_t><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n);
    }
    return MOE_LAUNCHED("net_pack_kernel");
}

extern "C" struct moe_status moe_cuda_launch_net_expand(const struct moe_cuda_pass *pass,
                                                        const struct moe_cuda_net_pass *n,
                                                        uint32_t ctas, cudaStream_t stream)
{
    net_publish_kernel<<<1, CTA_THREADS, 0, stream>>>(*pass, *n);
    MOE_TRY(MOE_LAUNCHED("net_publish_kernel"));
    if (n->outcome.code != MOE_CUDA_PASS_GOOD)
        return moe_ok();
    switch (unit_bytes(pass)) {
    case 16: net_expand_kernel<uint4><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n); break;
    case 4: net_expand_kernel<uint32_t><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n); break;
    default: net_expand_kernel<uint16_t><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n);
    }
    return MOE_LAUNCHED("net_expand_kernel");
}

template <typename Element, typename Out>
static struct moe_status launch_sum(const struct moe_cuda_pass *pass,
                                    const struct moe_cuda_net_pass *n, uint32_t ctas,
                                    cudaStream_t stream)
{
    if (is_wide(pass))
        net_sum_kernel<Element, Out, WIDE><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n);
    else
        net_sum_kernel<Element, Out, 1><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n);
    return MOE_LAUNCHED("net_sum_kernel");
}

template <typename Element, typename Out>
static struct moe_status launch_finish(const struct moe_cuda_pass *pass,
                                       const struct moe_cuda_net_pass *n, uint32_t ctas,
                                       cudaStream_t stream)
{
    if (is_wide(pass))
        net_finish_kernel<Element, Out, WIDE><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n);
    else
        net_finish_kernel<Element, Out, 1><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n);
    return MOE_LAUNCHED("net_finish_kernel");
}

extern "C" struct moe_status moe_cuda_launch_net_sum(const struct moe_cuda_pass *pass,
                                                     const struct moe_cuda_net_pass *n,
                                                     uint32_t ctas, cudaStream_t stream)
{
    if (pass->dtype == MOE_DTYPE_F32)
        return launch_sum<float, float>(pass, n, ctas, stream);
    return pass->out_dtype == MOE_DTYPE_F32
               ? launch_sum<__nv_bfloat16, float>(pass, n, ctas, stream)
               : launch_sum<__nv_bfloat16, __nv_bfloat16>(pass, n, ctas, stream);
}

static struct moe_status launch_finish_of(const struct moe_cuda_pass *pass,
                                          const struct moe_cuda_net_pass *n, uint32_t ctas,
                                          cudaStream_t stream)
{
    if (pass->dtype == MOE_DTYPE_F32)
        return launch_finish<float, float>(pass, n, ctas, stream);
    return pass->out_dtype == MOE_DTYPE_F32
               ? launch_finish<__nv_bfloat16, float>(pass, n, ctas, stream)
               : launch_finish<__nv_bfloat16, __nv_bfloat16>(pass, n, ctas, stream);
}

extern "C" struct moe_status moe_cuda_launch_net_finish(const struct moe_cuda_pass *pass,
                                                        const struct moe_cuda_net_pass *n,
                                                        uint32_t ctas, cudaStream_t stream)
{
    if (n->outcome.code == MOE_CUDA_PASS_GOOD)
        MOE_TRY(launch_finish_of(pass, n, ctas, stream));
    net_report_kernel<<<1, MOE_CUDA_MAX_SLOTS, 0, stream>>>(*pass, *n);
    return MOE_LAUNCHED("net_report_kernel");
}

template <typename Element, typename Out> static struct moe_status load_sums(void)
{
    return moe_cuda_load(net_sum_kernel<Element, Out, 1>, net_sum_kernel<Element, Out, WIDE>,
                         net_finish_kernel<Element, Out, 1>, net_finish_kernel<Element, Out, WIDE>);
}

extern "C" struct moe_status moe_cuda_load_ep_net(void)
{
    MOE_TRY(moe_cuda_load(net_count_kernel, net_list_kernel, net_publish_kernel, net_report_kernel,
                          net_pack_kernel<uint4>, net_pack_kernel<uint32_t>,
                          net_pack_kernel<uint16_t>, net_expand_kernel<uint4>,
                          net_expand_kernel<uint32_t>, net_expand_kernel<uint16_t>));
    MOE_TRY((load_sums<float, float>()));
    MOE_TRY((load_sums<__nv_bfloat16, float>()));
    return load_sums<__nv_bfloat16, __nv_bfloat16>();
}
