/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels of passes over a network share: places of records and sums, of a session over
 * several domains too (session/relay.h), and the shapes of launches. */
#ifndef MOE_CUDA_RELAY_CUH
#define MOE_CUDA_RELAY_CUH

#include "cuda/exchange/ep_net.h"
#include "cuda/exchange/moves.cuh"
#include "cuda/exchange/sums.cuh"

/* Copies a row to the address `to` of each lane in `lanes`. */
template <typename Unit>
__device__ inline void copy_row(const struct moe_cuda_pass &p, const void *from, uint32_t lanes,
                                void *to)
{
    const struct span all = {0, p.row_bytes / static_cast<uint32_t>(sizeof(Unit))};
    struct held_units<Unit> held;
    load_units(from, threadIdx.x % 32, all.end, &held);
    scatter_row<Unit, false>(from, all, &held, lanes, to);
}

__device__ inline bool is_stopped(const struct moe_cuda_pass &p)
{
    return __syncthreads_or(load_volatile(&p.control->stop) != 0) != 0;
}

/* Address of the trailer that follows `bytes` of a message. */
__device__ inline uint64_t *trailer_at(uint8_t *message, size_t bytes)
{
    return reinterpret_cast<uint64_t *>(message + bytes + MOE_CUDA_TRAILER_BYTES) - 1;
}

/* The number of this warp in the grid. */
__device__ inline uint32_t warp_in_grid()
{
    return blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
}

__device__ inline uint32_t warps_in_grid()
{
    return gridDim.x * (blockDim.x / 32);
}

/* ----------------------------------------------------------------- domains */

/* Whether this slot exchanges records with `slot` directly. */
__device__ inline bool is_near(const struct moe_cuda_relay &r, uint32_t slot)
{
    return r.domains == 0 || r.domain_of[slot] == r.own;
}

/* Bit s: slot s is in the own domain. */
__device__ inline uint64_t slots_near(const struct moe_cuda_relay &r)
{
    uint64_t near = 0;
    for (uint32_t i = 0; i < r.size; i++)
        near |= UINT64_C(1) << r.slot_at[r.own * r.size + i];
    return near;
}

__device__ inline uint32_t partner_in(const struct moe_cuda_relay &r, uint32_t domain)
{
    return r.slot_at[domain * r.size + r.index];
}

__device__ inline bool is_partner(const struct moe_cuda_relay &r, uint32_t slot)
{
    return r.domains != 0 && r.domain_of[slot] != r.own && r.index_of[slot] == r.index;
}

/* The slot of the own domain that exchanges messages with `slot`; itself if it is in the domain. */
__device__ inline uint32_t gateway_of(const struct moe_cuda_relay &r, uint32_t slot)
{
    return r.slot_at[r.own * r.size + r.index_of[slot]];
}

__device__ inline struct moe_cuda_shared_flags *flags_in(const struct moe_cuda_net_pass &n,
                                                         uint32_t slot)
{
    return reinterpret_cast<struct moe_cuda_shared_flags *>(n.relay.shared[slot] +
                                                            MOE_CUDA_SHARED_FLAGS);
}

/* Records of `source` in the shared memory of `slot`. */
__device__ inline uint8_t *records_in(const struct moe_cuda_net_pass &n, uint32_t slot,
                                      uint32_t source)
{
    return n.relay.shared[slot] + MOE_CUDA_SHARED_REGIONS + source * n.region;
}

/* Block `back` of `slot`: its region of a slot. */
__device__ inline uint8_t *sums_in(const struct moe_cuda_net_pass &n, uint32_t slot,
                                   uint32_t region)
{
    return n.relay.shared[slot] + MOE_CUDA_SHARED_REGIONS + (n.relay.slots + region) * n.region;
}

/* Where this slot stores its sums for tokens of `source`: with the source or its gateway. */
__device__ inline uint8_t *sums_for(const struct moe_cuda_net_pass &n, uint32_t source)
{
    return sums_in(n, gateway_of(n.relay, source), partner_in(n.relay, n.relay.domain_of[source]));
}

/* Sums of `slot`, of the own domain, for this slot's tokens. */
__device__ inline const uint8_t *sums_from(const struct moe_cuda_net_pass &n, uint32_t slot)
{
    return sums_in(n, partner_in(n.relay, n.relay.own), slot);
}

/* A record's place among the records for each slot of its domain. */
__device__ inline uint32_t *places_of(const struct moe_cuda_pass &p, struct moe_cuda_record *record)
{
    return reinterpret_cast<uint32_t *>(reinterpret_cast<struct moe_cuda_route *>(record + 1) +
                                        p.top_k);
}

/* ---------------------------------------------------------------- launches */

/* The widest unit that fits rows of this shape. */
static inline uint32_t unit_bytes(const struct moe_cuda_pass *pass)
{
    uintptr_t all = pass->row_bytes | reinterpret_cast<uintptr_t>(pass->outgoing) |
                    reinterpret_cast<uintptr_t>(pass->rows);
    return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 2;
}

static inline bool is_wide(const struct moe_cuda_pass *pass)
{
    uintptr_t all = reinterpret_cast<uintptr_t>(pass->x) | reinterpret_cast<uintptr_t>(pass->y) |
                    reinterpret_cast<uintptr_t>(pass->expert_out) |
                    reinterpret_cast<uintptr_t>(pass->base);
    return pass->hidden % WIDE == 0 && all % 16 == 0;
}

#endif
