/* SPDX-License-Identifier: Apache-2.0 */
/* Counts the rows of one expert in token order; this gives each choice's row position. */
#ifndef MOE_CUDA_COUNT_CUH
#define MOE_CUDA_COUNT_CUH

#include "cuda/exchange/rows.cuh"

constexpr uint32_t COUNT_UNROLL = 4;

/* Copies first .. first + 31 of expert e, which has `copies`: lane j has that of copy first + j. */
struct walked_copies {
    uint32_t e, copies, first;
};

/* Positions of the choices in `match`, by copy. Lane j has the running count of its copy. */
__device__ inline uint32_t place_matches(const struct walked_copies &c, uint32_t match,
                                         uint32_t copy, uint32_t *running)
{
    const uint32_t lane = threadIdx.x % 32, below = (1u << lane) - 1;
    uint32_t position = 0;
    for (uint32_t j = 0; j < 32 && c.first + j < c.copies; j++) {
        uint32_t mine = __ballot_sync(ALL_LANES, (match >> lane & 1) && copy == c.first + j);
        uint32_t before = __shfl_sync(ALL_LANES, *running, static_cast<int>(j));
        if (copy == c.first + j)
            position = before + __popc(mine & below);
        if (lane == j)
            *running += __popc(mine);
    }
    return position;
}

/* Walks over choices first .. end - 1 in order and counts the expert's rows for these copies.
 * Stores their positions unless `position` is NULL. Lane j has the count of its copy, before and
 * after. */
__device__ inline uint32_t walk_pairs(const struct moe_cuda_pass &p, const struct walked_copies &c,
                                      uint32_t first, uint32_t end, uint32_t running,
                                      uint32_t *position)
{
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t at = first; at < end; at += 32 * COUNT_UNROLL) {
        int32_t id[COUNT_UNROLL];
#pragma unroll
        for (uint32_t u = 0; u < COUNT_UNROLL; u++) {
            uint32_t pair = at + u * 32 + lane;
            id[u] = pair < end ? p.ids[pair] : -1;
        }
#pragma unroll
        for (uint32_t u = 0; u < COUNT_UNROLL; u++) {
            uint32_t pair = at + u * 32 + lane;
            bool mine = id[u] == static_cast<int32_t>(c.e) && token_counts(p, pair / p.top_k);
            uint32_t copy = c.copies == 1 ? 0 : pair / p.top_k % c.copies;
            mine = mine && copy - c.first < 32;
            uint32_t match = __ballot_sync(ALL_LANES, mine);
            if (match == 0)
                continue;
            uint32_t place = place_matches(c, match, copy, &running);
            if (mine && position != nullptr)
                position[pair] = place;
        }
    }
    return running;
}

#endif
