/* What a slot tells the others before and beside its rows: the head of the step, and for each of
 * its choices where the row belongs among all that it sends to this expert.
 *
 * Every CTA of dispatch numbers the choices of a few neighbouring tokens. Its warps count what all
 * tokens before those chose, an addition in shared memory for each choice; then one warp goes on
 * counting through the few, in order. Sums of numbers do not depend on their order, so neither do
 * the positions. Choices are counted by entry of the placement: a copy of an expert. Nothing here
 * waits for a peer or for another CTA, and no row waits for this. */
#ifndef MOE_CUDA_EP_ANNOUNCE_CUH
#define MOE_CUDA_EP_ANNOUNCE_CUH

#include "cuda/arrival.cuh"

constexpr uint32_t GROUP = 4;       /* choices that are loaded at once */
constexpr uint32_t GROUPS_HELD = 4; /* loads in flight, of a thread that counts */
constexpr uint32_t TURNS_HELD = 8;  /* choices that a lane holds ahead, in the warp that numbers */

/* The tokens that a CTA numbers. The last CTA that has any then knows all counts; with no tokens it
 * is the first. */
struct share {
    uint32_t begin, end;
    bool last;
};

__device__ static struct share share_of(uint32_t tokens)
{
    const uint32_t each = max((tokens + gridDim.x - 1) / gridDim.x, 1u);
    const uint32_t begin = min(blockIdx.x * each, tokens);
    return {begin, min(begin + each, tokens), blockIdx.x == (max(tokens, 1u) - 1) / each};
}

/* Entry of the placement that choice `id` of token t is for, or NOWHERE. */
__device__ static uint32_t entry_of(const struct moe_cuda_pass &p, struct arrival *a, uint32_t t,
                                    int32_t id)
{
    if (id < 0 || id >= static_cast<int32_t>(p.experts))
        return NOWHERE;
    const uint32_t e = static_cast<uint32_t>(id);
    if (targets(p, a)[e] != SEVERAL)
        return e;
    const uint32_t first = a->facts.placement.offset[e];
    return first + t % (a->facts.placement.offset[e + 1] - first);
}

/* ------------------------------------------------------- what came before */

struct group {
    int32_t id[GROUP];
    bool counts[GROUP]; /* whether its token takes part */
};

/* Choices pair .. pair + GROUP - 1 of all tokens' in order, those below `end`. */
__device__ static void load_group(const struct moe_cuda_pass &p, uint32_t pair, uint32_t end,
                                  struct group *g)
{
    const int32_t *ids = p.ids + pair;
    if (pair + GROUP <= end && reinterpret_cast<uintptr_t>(ids) % sizeof(int4) == 0) {
        const int4 all = *reinterpret_cast<const int4 *>(ids);
        g->id[0] = all.x, g->id[1] = all.y, g->id[2] = all.z, g->id[3] = all.w;
    } else {
#pragma unroll
        for (uint32_t i = 0; i < GROUP; i++)
            g->id[i] = pair + i < end ? ids[i] : -1;
    }
    if (p.token_state == nullptr || p.top_k % GROUP == 0) {
        const bool counts = pair < end && token_counts(p, pair / p.top_k);
#pragma unroll
        for (uint32_t i = 0; i < GROUP; i++)
            g->counts[i] = counts;
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < GROUP; i++)
        g->counts[i] = pair + i < end && token_counts(p, (pair + i) / p.top_k);
}

/* Adds the choices of the tokens before `tokens` to the tallies. */
__device__ static void tally_before(const struct moe_cuda_pass &p, struct arrival *a,
                                    const struct crew &crew, uint32_t tokens)
{
    const uint32_t end = tokens * p.top_k, stride = crew.threads * GROUP;
    for (uint32_t at = crew.thread * GROUP; at < end; at += GROUPS_HELD * stride) {
        struct group held[GROUPS_HELD];
#pragma unroll
        for (uint32_t u = 0; u < GROUPS_HELD; u++)
            load_group(p, at + u * stride, end, &held[u]);
#pragma unroll
        for (uint32_t u = 0; u < GROUPS_HELD; u++)
#pragma unroll
            for (uint32_t i = 0; i < GROUP; i++) {
                /* Only the copies of an expert make the token's number count. */
                const uint32_t pair = at + u * stride + i, id = held[u].id[i];
                if (!held[u].counts[i] || id >= p.experts)
                    continue;
                const bool single = targets(p, a)[id] != SEVERAL;
                const uint32_t entry =
                    single ? id : entry_of(p, a, pair / p.top_k, static_cast<int32_t>(id));
                atomicAdd(&tallies(a)[entry], 1u);
            }
    }
}

/* --------------------------------------------------------------- numbering */

/* Tells `slot` (maybe the own one) where the row of a choice belongs. */
__device__ static void store_route(const struct moe_cuda_pass &p, const struct arrival *a,
                                   uint32_t t, uint32_t k, uint32_t expert, float weight,
                                   uint32_t position, uint32_t slot)
{
    const uint64_t key = moe_window_word(a->stamp, expert);
    uint8_t *window = a->window[slot];
    if (window == nullptr)
        return;
    store_at_once(moe_window_routes_of(&p.layout, window, a->step & 1, p.slot, t) + k,
                  {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32),
                   __float_as_uint(weight), position});
}
static_assert(sizeof(struct moe_window_route) == sizeof(uint4), "a route is one store");

/* A lane's choices of the next turns of the warp that numbers. */
struct held_choices {
    int32_t id[TURNS_HELD];
    float weight[TURNS_HELD];
};

/* Choices `first`, first + 32, ... below `end`. */
__device__ static void hold_choices(const struct moe_cuda_pass &p, uint32_t first, uint32_t end,
                                    struct held_choices *h)
{
#pragma unroll
    for (uint32_t u = 0; u < TURNS_HELD; u++) {
        const uint32_t pair = first + u * 32;
        h->id[u] = pair < end ? p.ids[pair] : -1;
        h->weight[u] = pair < end ? p.weights[pair] : 0.0f;
    }
}

/* 32 neighbouring choices, one per lane, get their positions; the tallies go on. */
__device__ static void number_turn(const struct moe_cuda_pass &p, struct arrival *a, uint32_t pair,
                                   uint32_t end, int32_t id, float weight)
{
    const uint32_t lane = threadIdx.x % 32, t = pair / p.top_k;
    uint32_t entry = NOWHERE, position = 0;
    if (pair < end && token_counts(p, t))
        entry = entry_of(p, a, t, id);
    const uint32_t same = __match_any_sync(ALL_LANES, entry);
    if (entry != NOWHERE)
        position = tallies(a)[entry] + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (entry == NOWHERE)
        return;
    if (same >> lane == 1) /* the last of them */
        tallies(a)[entry] = position + 1;
    const uint32_t target = targets(p, a)[id];
    store_route(p, a, t, pair - t * p.top_k, static_cast<uint32_t>(id), weight, position,
                target != SEVERAL ? target : a->facts.placement.slot[entry]);
}

/* One warp. `held` has the first turns. */
__device__ static void number_share(const struct moe_cuda_pass &p, struct arrival *a,
                                    const struct share &share, struct held_choices *held)
{
    const uint32_t end = share.end * p.top_k;
    uint32_t at = share.begin * p.top_k + threadIdx.x % 32;
    for (;;) {
        uint32_t left = end - (at - threadIdx.x % 32);
#pragma unroll
        for (uint32_t u = 0; u < TURNS_HELD; u++) {
            if (u * 32 >= left)
                continue;
            number_turn(p, a, at + u * 32, end, held->id[u], held->weight[u]);
            __syncwarp();
        }
        if (left <= TURNS_HELD * 32)
            return;
        at += TURNS_HELD * 32;
        hold_choices(p, at, end, held);
    }
}

/* ------------------------------------------------------------------ telling */

/* The tallies of all tokens, to the slots of the copies. */
__device__ static void store_counts(const struct moe_cuda_pass &p, struct arrival *a,
                                    const struct crew &crew)
{
    const struct moe_cuda_placement &placement = a->facts.placement;
    for (uint32_t e = crew.thread; e < p.experts; e += crew.threads) {
        const uint32_t target = targets(p, a)[e];
        const uint32_t first = target != SEVERAL ? e : placement.offset[e];
        const uint32_t end = target != SEVERAL ? e + 1 : placement.offset[e + 1];
        for (uint32_t entry = first; entry < end; entry++) {
            const uint32_t slot = target != SEVERAL ? target : placement.slot[entry];
            uint8_t *window = a->window[slot];
            if (window != nullptr)
                store_relaxed(moe_window_counts_of(&p.layout, window, a->step & 1, p.slot) + e,
                              moe_window_word(a->stamp, tallies(a)[entry]));
        }
    }
}

/* This CTA's share of the choices, and the counts of all where it is the last. */
__device__ static void announce_choices(const struct moe_cuda_pass &p, struct arrival *a,
                                        const struct crew &crew)
{
    const struct share share = share_of(a->facts.tokens);
    struct held_choices held;
    if (crew.warp == 0)
        hold_choices(p, share.begin * p.top_k + crew.thread, share.end * p.top_k, &held);
    for (uint32_t i = crew.thread; i < p.entries; i += crew.threads)
        tallies(a)[i] = 0;
    meet(crew);
    if (share.begin != share.end)
        tally_before(p, a, crew, share.begin);
    meet(crew);
    if (crew.warp == 0 && share.begin != share.end)
        number_share(p, a, share, &held);
    meet(crew);
    if (share.last)
        store_counts(p, a, crew);
}

/* Lane i: head word i to every slot, the own one included. One warp. */
__device__ static void store_head(const struct moe_cuda_pass &p, const struct arrival *a)
{
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t s = 0; s < p.slots && lane < MOE_HEAD_WORDS; s++)
        if (is_live(a->live, s))
            store_relaxed(moe_window_head_of(&p.layout, a->window[s], a->step & 1, p.slot) + lane,
                          moe_window_word(a->stamp, a->facts.head[lane]));
}

#endif
