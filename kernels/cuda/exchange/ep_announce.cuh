/* SPDX-License-Identifier: Apache-2.0 */
/* What a slot announces to the others before and while it sends rows: the head of the step, and
 * each choice's position among all its rows for that expert.
 *
 * Every receiving CTA numbers the choices of some adjacent tokens, its share. For that it must know
 * the choices of all tokens before them. If these are few, it counts them itself. Else CTAs
 * exchange the counts of their shares in device memory, and each adds up those before its share.
 * Then one warp numbers the share in order. Integer sums do not depend on their order, so neither
 * do the positions. Counts are by entry of the placement: a copy of an expert. Nothing here waits
 * for a peer, and no row waits for this. */
#ifndef MOE_CUDA_EP_ANNOUNCE_CUH
#define MOE_CUDA_EP_ANNOUNCE_CUH

#include "cuda/exchange/arrival.cuh"
#include "cuda/exchange/moves.cuh"

constexpr uint32_t SHARES_HELD = 10;   /* loads in flight per thread that adds up shares */
constexpr uint32_t FEW_CHOICES = 2048; /* of all this slot's tokens; up to here, each CTA counts
                                          alone */

/* The tokens that a CTA numbers. The last CTA with tokens then knows all counts; without tokens, it
 * is the first CTA. */
struct share {
    uint32_t begin, end;
    bool last;
    bool few; /* equal in all CTAs */
};

__device__ static struct share share_of(const struct moe_cuda_pass &p, const struct arrival *a)
{
    const uint32_t tokens = a->params.tokens, each = max((tokens + a->ctas - 1) / a->ctas, 1u);
    const uint32_t begin = min(a->cta * each, tokens);
    return {begin, min(begin + each, tokens), a->cta == (max(tokens, 1u) - 1) / each,
            tokens * p.top_k <= FEW_CHOICES};
}

/* Whether each expert has one copy, and so is its own entry. */
__device__ static bool is_plain(const struct moe_cuda_pass &p)
{
    return p.entries == p.experts;
}

/* Entry of the placement for choice `id` of token t, if some expert has several copies. Not
 * inlined: code that a step runs once should be small, since instructions come from memory too. */
__device__ static __noinline__ uint32_t entry_of_copy(const struct moe_cuda_placement &placement,
                                                      uint32_t t, uint32_t id)
{
    const uint32_t first = placement.offset[id];
    return first + t % (placement.offset[id + 1] - first);
}

/* Entry of the placement for choice `id` of token t, or NOWHERE. */
__device__ static uint32_t entry_of(const struct moe_cuda_pass &p, struct arrival *a, uint32_t t,
                                    int32_t id)
{
    if (id < 0 || id >= static_cast<int32_t>(p.experts) || !token_counts(p, t))
        return NOWHERE;
    if (is_plain(p))
        return static_cast<uint32_t>(id);
    return entry_of_copy(a->params.placement, t, static_cast<uint32_t>(id));
}

/* ------------------------------------------------------------------- tallies */

/* The range of choices that a CTA counts. */
__device__ static struct span counted_by(const struct moe_cuda_pass &p, const struct share &share)
{
    if (share.few)
        return {0, share.begin * p.top_k};
    return {share.begin * p.top_k, share.end * p.top_k};
}

/* Adds choices to the tallies. */
__device__ static void tally_choices(const struct moe_cuda_pass &p, struct arrival *a,
                                     const struct group &group, struct span range)
{
#pragma unroll 4
    for (uint32_t pair = range.begin + group.thread; pair < range.end; pair += group.threads) {
        const uint32_t entry = entry_of(p, a, pair / p.top_k, p.ids[pair]);
        if (entry != NOWHERE)
            atomicAdd(&tallies(a)[entry], 1u);
    }
}

__device__ static void clear_tallies(const struct moe_cuda_pass &p, struct arrival *a,
                                     const struct group &group)
{
    for (uint32_t i = group.thread; i < tally_length(&p); i += group.threads)
        tallies(a)[i] = 0;
}

/* The tally of a CTA's share, in device memory. */
__device__ static uint4 *tally_of_share(const struct moe_cuda_pass &p, uint32_t cta)
{
    return reinterpret_cast<uint4 *>(p.share_tally + static_cast<size_t>(cta) * tally_length(&p));
}

/* Publishes this share's tally for the CTAs behind this one. */
__device__ static void publish_share(const struct moe_cuda_pass &p, struct arrival *a,
                                     const struct group &group)
{
    const uint4 *from = reinterpret_cast<const uint4 *>(tallies(a));
    for (uint32_t q = group.thread; q < tally_length(&p) / 4; q += group.threads)
        __stcg(tally_of_share(p, a->cta) + q, from[q]);
    group_sync(group);
    if (group.thread != 0)
        return;
    __threadfence();
    store_relaxed(&p.share_ready[a->cta], moe_window_flag(a->stamp, 0));
}

/* Replaces the tallies with the sum of all shares before this one. False if a wait failed. */
__device__ static bool add_shares_before(const struct moe_cuda_pass &p, struct arrival *a,
                                         const struct group &group)
{
    uint32_t unused;
    for (uint32_t cta = group.thread; cta < a->cta; cta += group.threads)
        if (!wait_flag(p.control, p.abort, &p.share_ready[cta], a->stamp, p.slot, &unused))
            a->failed = 1;
    clear_tallies(p, a, group);
    group_sync(group);
    if (a->failed != 0)
        return false;
    const uint32_t quads = tally_length(&p) / 4, teams = max(group.threads / quads, 1u);
    for (uint32_t i = group.thread; i < quads * teams; i += group.threads) {
        const uint32_t quad = i % quads;
        uint4 sum = {};
        for (uint32_t cta = i / quads; cta < a->cta; cta += SHARES_HELD * teams) {
            uint4 from[SHARES_HELD];
#pragma unroll
            for (uint32_t u = 0; u < SHARES_HELD; u++) {
                from[u] = {};
                if (cta + u * teams < a->cta)
                    from[u] = __ldcg(tally_of_share(p, cta + u * teams) + quad);
            }
#pragma unroll
            for (uint32_t u = 0; u < SHARES_HELD; u++) {
                sum.x += from[u].x, sum.y += from[u].y;
                sum.z += from[u].z, sum.w += from[u].w;
            }
        }
        atomicAdd(&tallies(a)[4 * quad], sum.x);
        atomicAdd(&tallies(a)[4 * quad + 1], sum.y);
        atomicAdd(&tallies(a)[4 * quad + 2], sum.z);
        atomicAdd(&tallies(a)[4 * quad + 3], sum.w);
    }
    return true;
}

/* --------------------------------------------------------------- numbering */

/* Sends `slot` (maybe this one) the route of a choice. */
__device__ static void store_route(const struct moe_cuda_pass &p, const struct arrival *a,
                                   uint32_t t, uint32_t k, uint32_t expert, float weight,
                                   uint32_t position, uint32_t slot)
{
    const uint64_t key = moe_window_flag(a->stamp, expert);
    uint8_t *window = a->window[slot];
    if (window == nullptr)
        return;
    store_at_once(moe_window_routes_of(&p.layout, window, a->step & 1, p.slot, t) + k,
                  {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32),
                   __float_as_uint(weight), position});
}
static_assert(sizeof(struct moe_window_route) == sizeof(uint4), "a route is one store");

/* Numbers 32 adjacent choices, one per lane, and advances the tallies. */
__device__ static void number_batch(const struct moe_cuda_pass &p, struct arrival *a, uint32_t pair,
                                    int32_t id, float weight)
{
    const uint32_t lane = threadIdx.x % 32, t = pair / p.top_k, entry = entry_of(p, a, t, id);
    const uint32_t same = __match_any_sync(ALL_LANES, entry);
    uint32_t position = 0;
    if (entry != NOWHERE)
        position = tallies(a)[entry] + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (entry == NOWHERE)
        return;
    if (same >> lane == 1) /* the last lane with this entry */
        tallies(a)[entry] = position + 1;
    const uint32_t target = targets(p, a)[id];
    store_route(p, a, t, pair - t * p.top_k, static_cast<uint32_t>(id), weight, position,
                target != SEVERAL ? target : a->params.placement.slot[entry]);
}

/* Numbers the share. One warp; each iteration loads the next one's choices. */
__device__ static void number_share(const struct moe_cuda_pass &p, struct arrival *a,
                                    const struct share &share)
{
    const uint32_t end = share.end * p.top_k;
    uint32_t pair = share.begin * p.top_k + threadIdx.x % 32;
    int32_t id = pair < end ? p.ids[pair] : -1;
    float weight = pair < end ? p.weights[pair] : 0.0f;
#pragma unroll 1
    while (pair - threadIdx.x % 32 < end) {
        const uint32_t next = pair + 32;
        const int32_t next_id = next < end ? p.ids[next] : -1;
        const float next_weight = next < end ? p.weights[next] : 0.0f;
        number_batch(p, a, pair, id, weight);
        __syncwarp();
        pair = next;
        id = next_id;
        weight = next_weight;
    }
}

/* --------------------------------------------------------------- announcing */

/* Sends the tallies of all tokens to the slots of the copies. */
__device__ static void store_counts(const struct moe_cuda_pass &p, struct arrival *a,
                                    const struct group &group)
{
    const struct moe_cuda_placement &placement = a->params.placement;
#pragma unroll 1
    for (uint32_t e = group.thread; e < p.experts; e += group.threads) {
        const uint32_t target = targets(p, a)[e];
        const uint32_t first = target != SEVERAL ? e : placement.offset[e];
        const uint32_t end = target != SEVERAL ? e + 1 : placement.offset[e + 1];
        for (uint32_t entry = first; entry < end; entry++) {
            const uint32_t slot = target != SEVERAL ? target : placement.slot[entry];
            uint8_t *window = a->window[slot];
            if (window != nullptr)
                store_relaxed(moe_window_counts_of(&p.layout, window, a->step & 1, p.slot) + e,
                              moe_window_flag(a->stamp, tallies(a)[entry]));
        }
    }
}

/* Announces this CTA's share of the choices; the last CTA also sends all counts. */
__device__ static void announce_choices(const struct moe_cuda_pass &p, struct arrival *a,
                                        const struct group &group)
{
    const struct share share = share_of(p, a);
    clear_tallies(p, a, group);
    group_sync(group);
    tally_choices(p, a, group, counted_by(p, share));
    group_sync(group);
    if (!share.few) {
        publish_share(p, a, group);
        if (!add_shares_before(p, a, group))
            return;
        group_sync(group);
    }
    if (group.warp == 0 && share.begin != share.end)
        number_share(p, a, share);
    group_sync(group);
    if (share.last)
        store_counts(p, a, group);
}

/* Sends the head to every slot, this one included: lane i stores head word i. One warp. */
__device__ static void store_head(const struct moe_cuda_pass &p, const struct arrival *a)
{
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t s = 0; s < p.slots && lane < MOE_HEAD_COUNT; s++)
        if (is_live(a->live, s))
            store_relaxed(moe_window_head_of(&p.layout, a->window[s], a->step & 1, p.slot) + lane,
                          moe_window_flag(a->stamp, a->params.head[lane]));
}

#endif
