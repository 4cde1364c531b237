/* SPDX-License-Identifier: Apache-2.0 */
/* From logits to ids and weights. One warp per token, 4 warps per CTA.
 *
 * Shared    three fp32 arrays per warp (scores, keys, groups), each with one value per expert and
 *           zero expert: at most 96 KiB per CTA. No stages.
 * Registers no limit.
 *
 * A warp chooses in K rounds: each takes the best remaining key. The order is total: key
 * descending, then id ascending (-0 equals +0). Sums run in a fixed order, so the same token always
 * gets the same bits. */
#include "cuda/plan/limits.h"
#include "cuda/router/router.h"

#include "cuda/core/load.h"
#include "cuda/router/scores.cuh"

static constexpr unsigned WARPS = 4;  /* tokens per block */
static constexpr unsigned ALL = ~0u;  /* lanes of a warp */
static constexpr unsigned ARRAYS = 3; /* per warp in shared memory: scores, keys, groups */

/* ---------------------------------------------------------------------- choice */

struct choose_args {
    const moe_cuda_step_params *params;
    moe_router_spec spec;
    uint32_t experts, choices; /* choices: E + Z */
    const float *logits;       /* [slices][T][E+Z] */
    uint32_t slices;
    const uint8_t *mode;
    const int32_t *ids_in;
    const float *weights_in;
    int32_t *ids;
    float *weights;
    uint8_t *token_state;
};

/* [E+Z], or NULL if the layer has none. */
static __device__ const float *bias_of(const choose_args &a, moe_weight which)
{
    return a.params->layer->bias[which];
}

/* One warp's token and its arrays in shared memory. */
struct row_slot {
    uint32_t lane, token;
    float *score; /* [choices] */
    float *key;   /* [choices] */
    float *group; /* [groups] */
};

struct candidate {
    float key;
    uint32_t id;
};

static __device__ candidate better(candidate a, candidate b)
{
    bool first = a.key > b.key || (a.key == b.key && a.id < b.id);
    return first ? a : b;
}

/* The best of v[0 .. n - 1], returned to all lanes. Minus infinity marks an absent value. */
static __device__ candidate best_of(const float *v, uint32_t n, uint32_t lane)
{
    candidate best = {-INFINITY, ALL};
    for (uint32_t i = lane; i < n; i += 32)
        best = better(best, {v[i], i});
    for (int d = 16; d > 0; d /= 2)
        best = better(best, {__shfl_xor_sync(ALL, best.key, d), __shfl_xor_sync(ALL, best.id, d)});
    return best;
}

/* Marks v[i] as taken. */
static __device__ void take(float *v, uint32_t i, uint32_t lane)
{
    __syncwarp();
    if (lane == 0)
        v[i] = -INFINITY;
    __syncwarp();
}

/* Sum of the `many` best of one group's n keys, best first; computed by one lane. */
static __device__ float sum_of_best(const float *key, uint32_t n, uint32_t many)
{
    candidate last = {INFINITY, 0};
    float sum = 0;
    for (uint32_t m = 0; m < many; m++) {
        candidate next = {-INFINITY, ALL};
        for (uint32_t i = 0; i < n; i++) {
            candidate c = {key[i], i};
            bool behind = m == 0 || c.key < last.key || (c.key == last.key && c.id > last.id);
            if (behind)
                next = better(next, c);
        }
        last = next;
        sum += next.key;
    }
    return sum;
}

/* Excludes the keys of all groups but the topk_group best. Excluded keys become minus infinity; 0
 * would beat an allowed expert with a negative key. */
static __device__ void keep_best_groups(const choose_args &a, const row_slot &s)
{
    uint32_t size = a.experts / a.spec.groups;
    for (uint32_t g = s.lane; g < a.spec.groups; g += 32)
        s.group[g] = sum_of_best(s.key + g * size, size, a.spec.group_best);
    __syncwarp();
    for (uint32_t n = 0; n < a.spec.topk_group; n++) {
        candidate best = best_of(s.group, a.spec.groups, s.lane);
        take(s.group, best.id, s.lane);
    }
    /* take() marked the best groups: exclude all others. */
    for (uint32_t i = s.lane; i < a.experts; i += 32)
        if (s.group[i / size] != -INFINITY)
            s.key[i] = -INFINITY;
    __syncwarp();
}

/* Writes logits to `key` and scores to `score`. False if a logit is not finite. */
static __device__ bool score_token(const choose_args &a, const row_slot &s)
{
    const float *logits = a.logits + (size_t)s.token * a.choices;
    const float *bias = bias_of(a, MOE_WEIGHT_LOGIT_BIAS);
    size_t slice = (size_t)a.params->tokens * a.choices;
    bool finite = true;
    for (uint32_t i = s.lane; i < a.choices; i += 32) {
        float z = 0.0f;
        for (uint32_t n = 0; n < a.slices; n++)
            z += logits[n * slice + i];
        z += bias != nullptr ? bias[i] : 0.0f;
        finite &= isfinite(z) != 0;
        s.key[i] = z;
        s.score[i] = lone_score(a.spec.score, z);
    }
    if (!__all_sync(ALL, finite))
        return false;
    if (a.spec.score == MOE_SCORE_SOFTMAX)
        warp_softmax(s.score, s.score, a.choices, s.lane);
    return true;
}

/* Turns the logits in `key` into keys. layer_spec.h says when a logit is already a key. */
static __device__ bool make_keys(const choose_args &a, const row_slot &s)
{
    const float *bias = bias_of(a, MOE_WEIGHT_SELECT_BIAS);
    if (bias == nullptr && (a.spec.groups == 1 || a.spec.group_best == 1))
        return true;
    bool finite = true;
    for (uint32_t i = s.lane; i < a.choices; i += 32) {
        s.key[i] = s.score[i] + (bias != nullptr ? bias[i] : 0.0f);
        finite &= isfinite(s.key[i]) != 0;
    }
    return __all_sync(ALL, finite);
}

/* Lane k gets the k-th best id. */
static __device__ int32_t choose(const choose_args &a, const row_slot &s)
{
    int32_t id = -1;
    __syncwarp();
    if (a.spec.groups > 1)
        keep_best_groups(a, s);
    for (uint32_t k = 0; k < a.spec.top_k; k++) {
        candidate best = best_of(s.key, a.choices, s.lane);
        take(s.key, best.id, s.lane);
        if (s.lane == k)
            id = (int32_t)best.id;
    }
    return id;
}

/* SparseMixer's weight of lane k's id, before renormalisation; the scores are logits. It divides as
 * the vendor's code, so bounds round alike. */
static __device__ float mix(const choose_args &a, const row_slot &s, int32_t id)
{
    float weight = 0.0f;
    int32_t earlier = -1;
    for (uint32_t k = 0; k < a.spec.top_k; k++) {
        const int32_t chosen = __shfl_sync(ALL, id, (int)k);
        if (chosen < 0)
            continue;
        const float z = s.score[chosen];
        float sum = 0.0f;
        for (uint32_t i = s.lane; i < a.choices; i += 32) {
            const float other = s.score[i];
            const bool far = (z - other) / fmaxf(fabsf(other), z) > 2 * a.spec.jitter;
            if ((int32_t)i == chosen || !((int32_t)i == earlier || far))
                sum += expf(other - z);
        }
        sum = warp_sum(sum);
        if (s.lane == k)
            weight = 1.0f / sum;
        earlier = chosen;
    }
    return weight;
}

/* The weight of lane k's id from the unbiased scores; 0 for id -1. Lanes from K on have id -1. */
static __device__ float weigh(const choose_args &a, const row_slot &s, int32_t id)
{
    bool live = id >= 0;
    float score = live ? s.score[id] : 0.0f;
    if (a.spec.score == MOE_SCORE_SPARSEMIXER)
        score = mix(a, s, id);
    if (a.spec.score == MOE_SCORE_SOFTMAX_TOPK && __any_sync(ALL, live)) {
        float largest = warp_max(live ? score : -INFINITY);
        score = live ? expf(score - largest) : 0.0f;
        score /= warp_sum(score);
    }
    float sum = warp_sum(score), divisor = 1.0f;
    if (a.spec.renorm == MOE_RENORM_SUM)
        divisor = sum + a.spec.renorm_eps;
    else if (a.spec.renorm == MOE_RENORM_CLAMPED)
        divisor = fmaxf(sum, a.spec.renorm_eps);
    if (divisor == 0.0f)
        divisor = 1.0f; /* every score underflowed to 0, and so does every weight */
    return live ? score / divisor * a.spec.scale : 0.0f;
}

/* ---------------------------------------------------------------------- tokens */

/* The state of a token from its input alone. */
static __device__ moe_token_state check_given(const choose_args &a, moe_routing_mode mode,
                                              int32_t id, float weight)
{
    bool bad_id = id < -1 || id >= (int32_t)a.choices;
    bool bad_weight = mode == MOE_ROUTE_IDS_WEIGHTS && id >= 0 && !isfinite(weight);
    if (__any_sync(ALL, bad_id))
        return MOE_TOKEN_BAD_EXPERT;
    return __any_sync(ALL, bad_weight) ? MOE_TOKEN_BAD_WEIGHT : MOE_TOKEN_OK;
}

/* Routes one token. Afterwards lane k has the k-th id and weight. */
static __device__ moe_token_state route(const choose_args &a, const row_slot &s, int32_t *id,
                                        float *weight)
{
    moe_routing_mode mode = a.params->has_modes
                                ? (moe_routing_mode)(a.mode[s.token] & ~MOE_ROUTE_WITHOUT_SHARED)
                                : MOE_ROUTE_SERVER;
    size_t at = (size_t)s.token * a.spec.top_k + s.lane;
    bool has_k = s.lane < a.spec.top_k;
    *id = mode != MOE_ROUTE_SERVER && has_k ? a.ids_in[at] : -1;
    *weight = mode == MOE_ROUTE_IDS_WEIGHTS && has_k ? a.weights_in[at] : 0.0f;
    moe_token_state given = check_given(a, mode, *id, *weight);
    if (given != MOE_TOKEN_OK)
        return given;
    if (mode == MOE_ROUTE_IDS_WEIGHTS) {
        *weight = *id >= 0 ? *weight : 0.0f;
        return MOE_TOKEN_OK;
    }
    if (!score_token(a, s) || (mode == MOE_ROUTE_SERVER && !make_keys(a, s)))
        return MOE_TOKEN_NONFINITE_LOGITS;
    if (mode == MOE_ROUTE_SERVER)
        *id = choose(a, s);
    __syncwarp();
    *weight = weigh(a, s, *id);
    return MOE_TOKEN_OK;
}

static __global__ void __launch_bounds__(32 * WARPS) choose_kernel(const choose_args a)
{
    extern __shared__ float arrays[];
    row_slot s;
    s.lane = threadIdx.x % 32;
    s.token = blockIdx.x * WARPS + threadIdx.x / 32;
    s.score = arrays + (size_t)(threadIdx.x / 32) * ARRAYS * a.choices;
    s.key = s.score + a.choices;
    s.group = s.key + a.choices;
    if (s.token >= a.params->tokens)
        return;
    int32_t id;
    float weight;
    moe_token_state state = route(a, s, &id, &weight);
    size_t at = (size_t)s.token * a.spec.top_k + s.lane;
    if (s.lane < a.spec.top_k) {
        a.ids[at] = state == MOE_TOKEN_OK ? id : -1;
        a.weights[at] = state == MOE_TOKEN_OK ? weight : 0.0f;
    }
    if (s.lane == 0)
        a.token_state[s.token] = (uint8_t)state;
}

struct moe_status moe_cuda_router_choose(const struct moe_layer *layer,
                                         const struct moe_cuda_routing *r, cudaStream_t stream)
{
    choose_args a = {};
    a.params = r->params;
    a.spec = layer->spec.router;
    a.experts = layer->spec.experts;
    a.choices = a.experts + a.spec.zero_experts;
    a.logits = r->logits;
    a.slices = moe_cuda_router_slices(layer, r->dtype);
    a.mode = r->mode;
    a.ids_in = r->ids_in;
    a.weights_in = r->weights_in;
    a.ids = r->ids;
    a.weights = r->weights;
    a.token_state = r->token_state;
    unsigned blocks = (r->capacity + WARPS - 1) / WARPS;
    size_t shared = (size_t)WARPS * ARRAYS * a.choices * sizeof(float);
    choose_kernel<<<blocks, 32 * WARPS, shared, stream>>>(a);
    return MOE_LAUNCHED("routing");
}

struct moe_status moe_cuda_load_router(void)
{
    constexpr size_t most = sizeof(float) * WARPS * ARRAYS * 2 * MOE_CUDA_MAX_EXPERTS;
    static_assert(most <= MOE_CUDA_LEAST_SHARED, "the arrays of the most choices fit");
    return moe_cuda_allow_shared(choose_kernel, most);
}
