/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of a session over several domains, besides those of ep_net.cu: see ep_net.h and
 * session/relay.h.
 *
 * forward   a warp per record of a partner: stores it for each slot of this domain that needs it
 * gather    a warp per record of a partner, or part of its row: adds this domain's sums for it
 * announce  one warp: flags in the memory of the domain's slots
 * await     a thread per slot; the only kernel here that waits for a peer
 *
 * Values from a peer are checked before they are used as an index. */
#include "cuda/core/load.h"
#include "cuda/exchange/relay.cuh"

/* ---------------------------------------------------------------- forward */

/* A record of the partner in another domain. Lane k: choice k; lane j: slot j of this domain. */
struct far_record {
    uint32_t token;
    struct moe_cuda_route route; /* lane k */
    uint32_t target;             /* lane k: slot of choice k, or NOWHERE */
    uint64_t wanted;             /* bit s: slot s gets the record */
    uint32_t slot;               /* lane j, or NOWHERE */
    uint32_t place;              /* lane j: among the source's records for the slot */
};

/* False if the record is impossible. */
__device__ static bool read_record(const struct moe_cuda_pass &p, const struct moe_cuda_net_pass &n,
                                   uint32_t source, struct moe_cuda_record *record,
                                   struct far_record *out)
{
    const uint32_t lane = threadIdx.x % 32;
    struct far_record r = {};
    bool good = true;
    r.token = record->token;
    r.target = NOWHERE;
    if (lane < p.top_k && (record->choices >> lane & 1)) {
        r.route = reinterpret_cast<const struct moe_cuda_route *>(record + 1)[lane];
        r.target = target_of(p.params->placement, p.experts, r.token,
                             static_cast<int32_t>(r.route.expert));
        good = r.target != NOWHERE && is_near(n.relay, r.target);
    }
    r.wanted = slots_of_lanes(good ? r.target : NOWHERE);
    r.slot = NOWHERE;
    if (lane < n.relay.size) {
        r.slot = n.relay.slot_at[n.relay.own * n.relay.size + lane];
        r.place = places_of(p, record)[lane];
        good = good && (!(r.wanted >> r.slot & 1) || r.place < n.tokens_of[source]);
    }
    *out = r;
    return __all_sync(ALL_LANES, good && r.token < n.tokens_of[source]) != 0;
}

template <typename Unit>
__device__ static bool forward_record(const struct moe_cuda_pass &p,
                                      const struct moe_cuda_net_pass &n, uint32_t domain,
                                      uint32_t i)
{
    const uint32_t lane = threadIdx.x % 32, source = partner_in(n.relay, domain);
    uint8_t *from = n.far_in + domain * n.region + static_cast<size_t>(i) * n.record, *to = nullptr;
    struct far_record r;
    if (!read_record(p, n, source, reinterpret_cast<struct moe_cuda_record *>(from), &r))
        return false;
    if (r.slot != NOWHERE && (r.wanted >> r.slot & 1))
        to = records_in(n, r.slot, source) + static_cast<size_t>(r.place) * n.record;
    for (uint32_t j = 0; j < n.relay.size; j++) {
        const uint32_t slot = __shfl_sync(ALL_LANES, r.slot, static_cast<int>(j));
        const uint32_t choices = __ballot_sync(ALL_LANES, r.target == slot);
        struct moe_cuda_record *head =
            reinterpret_cast<struct moe_cuda_record *>(static_cast<uintptr_t>(__shfl_sync(
                ALL_LANES, reinterpret_cast<unsigned long long>(to), static_cast<int>(j))));
        if (choices == 0)
            continue;
        if (lane == 0)
            *head = {r.token, choices, {0, 0}};
        if (choices >> lane & 1)
            reinterpret_cast<struct moe_cuda_route *>(head + 1)[lane] = r.route;
    }
    copy_row<Unit>(p, from + n.record_head, __ballot_sync(ALL_LANES, to != nullptr),
                   to != nullptr ? to + n.record_head : nullptr);
    return true;
}

template <typename Unit>
__global__ void __launch_bounds__(CTA_THREADS)
    relay_forward_kernel(const __grid_constant__ struct moe_cuda_pass p,
                         const __grid_constant__ struct moe_cuda_net_pass n)
{
    if (is_stopped(p))
        return;
    for (uint32_t d = 0; d < n.relay.domains; d++)
        for (uint32_t i = warp_in_grid(); i < n.across_in[d]; i += warps_in_grid())
            if (!forward_record<Unit>(p, n, d, i) && threadIdx.x % 32 == 0)
                give_up(p.control, MOE_CUDA_PASS_PROTOCOL_ERROR, partner_in(n.relay, d));
}

/* ----------------------------------------------------------------- gather */

template <typename Element, uint32_t N>
__device__ static void gather_record(const struct moe_cuda_pass &p,
                                     const struct moe_cuda_net_pass &n, uint32_t domain, uint32_t i,
                                     uint32_t part)
{
    const uint32_t lane = threadIdx.x % 32, source = partner_in(n.relay, domain);
    uint8_t *from = n.far_in + domain * n.region + static_cast<size_t>(i) * n.record;
    Element *to = reinterpret_cast<Element *>(n.far_out + domain * n.region +
                                              static_cast<size_t>(i) * n.partial);
    struct far_record r;
    /* The record was good when it was forwarded. */
    (void)read_record(p, n, source, reinterpret_cast<struct moe_cuda_record *>(from), &r);
    const bool here = r.slot != NOWHERE && (r.wanted >> r.slot & 1);
    const uint8_t *mine = nullptr;
    if (here) /* the region of slot j, in the memory of this slot */
        mine = sums_in(n, partner_in(n.relay, n.relay.own),
                       n.relay.slot_at[domain * n.relay.size + lane]) +
               static_cast<size_t>(r.place) * n.partial;
    const uint32_t lanes = __ballot_sync(ALL_LANES, here);
    uint32_t begin, end;
    part_columns<N>(p.hidden, n.parts, part, &begin, &end);
    for (uint32_t h = begin + lane * N; h - lane * N < end; h += 32 * N) {
        columns<N> sum = {};
        packed<Element, N> element = {};
        for (uint32_t left = lanes; left != 0; left &= left - 1) {
            const Element *partial =
                reinterpret_cast<const Element *>(static_cast<uintptr_t>(__shfl_sync(
                    ALL_LANES, reinterpret_cast<unsigned long long>(mine), __ffs(left) - 1)));
            if (h < p.hidden)
                fetch(partial + h, &element);
            add_scaled(sum, unpack(element), 1.0f);
        }
        pack(sum, &element);
        if (h < p.hidden)
            put(to + h, element);
    }
}

template <typename Element, uint32_t N>
__global__ void __launch_bounds__(CTA_THREADS)
    relay_gather_kernel(const __grid_constant__ struct moe_cuda_pass p,
                        const __grid_constant__ struct moe_cuda_net_pass n)
{
    if (is_stopped(p))
        return;
    for (uint32_t d = 0; d < n.relay.domains; d++) {
        for (uint32_t i = warp_in_grid(); i < n.across_in[d] * n.parts; i += warps_in_grid())
            gather_record<Element, N>(p, n, d, i / n.parts, i % n.parts);
        if (blockIdx.x == 0 && threadIdx.x == 0 && d != n.relay.own)
            *trailer_at(n.far_out + d * n.region, static_cast<size_t>(n.across_in[d]) * n.partial) =
                n.trailer;
    }
}

/* ------------------------------------------------------------------ flags */

__global__ void relay_announce_kernel(const __grid_constant__ struct moe_cuda_pass p,
                                      const __grid_constant__ struct moe_cuda_net_pass n,
                                      enum moe_cuda_relay_flag flag, uint64_t number)
{
    const uint32_t lane = threadIdx.x;
    if (load_volatile(&p.control->stop) != 0 || lane >= n.relay.size)
        return;
    struct moe_cuda_shared_flags *flags =
        flags_in(n, n.relay.slot_at[n.relay.own * n.relay.size + lane]);
    fence_system();
    if (flag == MOE_CUDA_RELAY_RECORDS)
        store_relaxed(&flags->in[p.slot], number);
    if (flag == MOE_CUDA_RELAY_SUMS)
        store_relaxed(&flags->back[p.slot], number);
    for (uint32_t d = 0; flag == MOE_CUDA_RELAY_FORWARDED && d < n.relay.domains; d++)
        if (d != n.relay.own)
            store_relaxed(&flags->in[partner_in(n.relay, d)], number);
}

__global__ void relay_await_kernel(const __grid_constant__ struct moe_cuda_pass p,
                                   const __grid_constant__ struct moe_cuda_net_pass n, bool sums,
                                   uint64_t number)
{
    const uint32_t slot = threadIdx.x;
    if (slot >= p.slots || slot == p.slot || !is_live(p.control->live, slot) ||
        (sums && !is_near(n.relay, slot)))
        return;
    const struct moe_cuda_shared_flags *flags = flags_in(n, p.slot);
    const uint64_t *word = sums ? &flags->back[slot] : &flags->in[slot];
    uint64_t since = 0, looked = 0;
    for (uint32_t tries = 1; load_acquire(word) < number; tries++)
        if (tries % TRIES_BETWEEN_LOOKS == 0 &&
            wait_failed(p.control, p.abort, gateway_of(n.relay, slot), &since, &looked))
            return;
}

/* ---------------------------------------------------------------- launches */

extern "C" struct moe_status moe_cuda_launch_relay_forward(const struct moe_cuda_pass *pass,
                                                           const struct moe_cuda_net_pass *n,
                                                           uint32_t ctas, cudaStream_t stream)
{
    switch (unit_bytes(pass)) {
    case 16: relay_forward_kernel<uint4><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n); break;
    case 4: relay_forward_kernel<uint32_t><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n); break;
    default: relay_forward_kernel<uint16_t><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n);
    }
    return MOE_LAUNCHED("relay_forward_kernel");
}

template <typename Element>
static struct moe_status launch_gather(const struct moe_cuda_pass *pass,
                                       const struct moe_cuda_net_pass *n, uint32_t ctas,
                                       cudaStream_t stream)
{
    if (is_wide(pass))
        relay_gather_kernel<Element, WIDE><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n);
    else
        relay_gather_kernel<Element, 1><<<ctas, CTA_THREADS, 0, stream>>>(*pass, *n);
    return MOE_LAUNCHED("relay_gather_kernel");
}

extern "C" struct moe_status moe_cuda_launch_relay_gather(const struct moe_cuda_pass *pass,
                                                          const struct moe_cuda_net_pass *n,
                                                          uint32_t ctas, cudaStream_t stream)
{
    return pass->dtype == MOE_DTYPE_F32 ? launch_gather<float>(pass, n, ctas, stream)
                                        : launch_gather<__nv_bfloat16>(pass, n, ctas, stream);
}

extern "C" struct moe_status moe_cuda_launch_relay_announce(const struct moe_cuda_pass *pass,
                                                            const struct moe_cuda_net_pass *n,
                                                            enum moe_cuda_relay_flag flag,
                                                            uint64_t number, cudaStream_t stream)
{
    relay_announce_kernel<<<1, MOE_CUDA_MAX_SLOTS, 0, stream>>>(*pass, *n, flag, number);
    return MOE_LAUNCHED("relay_announce_kernel");
}

extern "C" struct moe_status moe_cuda_launch_relay_await(const struct moe_cuda_pass *pass,
                                                         const struct moe_cuda_net_pass *n,
                                                         bool sums, uint64_t number,
                                                         cudaStream_t stream)
{
    relay_await_kernel<<<1, MOE_CUDA_MAX_SLOTS, 0, stream>>>(*pass, *n, sums, number);
    return MOE_LAUNCHED("relay_await_kernel");
}

extern "C" struct moe_status moe_cuda_load_ep_relay(void)
{
    return moe_cuda_load(relay_forward_kernel<uint4>, relay_forward_kernel<uint32_t>,
                         relay_forward_kernel<uint16_t>, relay_gather_kernel<float, 1>,
                         relay_gather_kernel<float, WIDE>, relay_gather_kernel<__nv_bfloat16, 1>,
                         relay_gather_kernel<__nv_bfloat16, WIDE>, relay_announce_kernel,
                         relay_await_kernel);
}
