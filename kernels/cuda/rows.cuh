/* Moving and naming rows inside a pass: helpers that dispatch and combine share. A warp works on a
 * token; lane k holds what concerns its k-th choice. */
#ifndef MOE_CUDA_ROWS_CUH
#define MOE_CUDA_ROWS_CUH

#include "cuda/words.cuh"

constexpr uint32_t NOWHERE = 0xffffffffu;
constexpr uint32_t CTA_THREADS = 512;
constexpr uint32_t CTA_WARPS = CTA_THREADS / 32;

static_assert(MOE_MAX_TOP_K <= 32 && MOE_MAX_SLOTS <= 32, "a lane per choice, a lane per slot");

/* Call first in the first kernel of a stage. */
__device__ inline void stamp_stage(const struct moe_cuda_pass &p, enum moe_stage stage)
{
    stamp_begin(p.began != nullptr ? p.began + stage : nullptr);
}

/* Whether token t takes part at all. */
__device__ inline bool token_counts(const struct moe_cuda_pass &p, uint32_t t)
{
    return p.token_state == nullptr || p.token_state[t] == MOE_TOKEN_OK;
}

/* Slot that computes expert `id` for token t of any source, or NOWHERE. */
__device__ inline uint32_t target_of(const struct moe_cuda_pass &p, uint32_t t, int32_t id)
{
    if (id < 0 || id >= static_cast<int32_t>(p.experts))
        return NOWHERE;
    uint32_t first = p.facts->placement.offset[id],
             copies = p.facts->placement.offset[id + 1] - first;
    return p.facts->placement.slot[copies == 1 ? first : first + t % copies];
}

__device__ inline uint32_t *row_of_token(const struct moe_cuda_pass &p, uint32_t source, uint32_t t)
{
    const struct moe_window_shape &shape = p.layout.shape;
    return p.row_of + (static_cast<size_t>(source) * shape.max_tokens + t) * shape.max_top_k;
}

/* The next number of a counter, the same in all lanes. */
__device__ inline uint32_t take_item(uint32_t *counter)
{
    uint32_t item = 0;
    if (threadIdx.x % 32 == 0)
        item = atomicAdd(counter, 1u);
    return __shfl_sync(ALL_LANES, item, 0);
}

/* (token, peer) of item i of a walk over the tokens of all peers: by token, and among peers in the
 * order in which they send to this slot (`forward` false), or in which this slot sends to them. */
__device__ inline void peer_item(const struct moe_cuda_pass &p, uint32_t i, bool forward,
                                 uint32_t *source, uint32_t *t)
{
    uint32_t peers = p.slots - 1, distance = 1 + i % peers;
    *t = i / peers;
    *source = (forward ? p.slot + distance : p.slot + p.slots - distance) % p.slots;
}

/* Most tokens that any live peer brings. */
__device__ inline uint32_t most_peer_tokens(const struct moe_cuda_pass &p)
{
    uint32_t most = 0;
    for (uint32_t s = 0; s < p.slots; s++)
        if (s != p.slot)
            most = max(most, p.control->tokens_of[s]);
    return most;
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
