/* SPDX-License-Identifier: Apache-2.0 */
/* Backward through weights, renormalisation and score, and the load-balance loss; see
 * train_kernels.h. A warp works on a token, with the token's scores and gradients in shared
 * memory; lane k holds its k-th choice. */
#include "cuda/core/load.h"
#include "cuda/plan/limits.h"
#include "cuda/router/scores.cuh"
#include "cuda/training/train_kernels.h"

namespace
{

constexpr uint32_t WARPS = 4;
constexpr unsigned FLAT_BLOCKS = 132 * 8, FLAT_THREADS = 256; /* element by element */
constexpr float TINY = 1e-20f;

/* A token's arrays in shared memory. */
struct row_slot {
    uint32_t token, lane;
    float *z, *score, *d; /* [E+Z]: logit, score, gradient */
};

__device__ row_slot take_row_slot(const struct moe_cuda_router_backward &a)
{
    extern __shared__ float arrays[];
    const uint32_t choices = a.experts + a.spec.zero_experts;
    row_slot s;
    s.lane = threadIdx.x % 32;
    s.token = blockIdx.x * WARPS + threadIdx.x / 32;
    s.z = arrays + static_cast<size_t>(threadIdx.x / 32) * 3 * choices;
    s.score = s.z + choices;
    s.d = s.score + choices;
    return s;
}

__device__ float lone_slope(moe_score kind, float z, float score)
{
    if (kind == MOE_SCORE_SIGMOID)
        return score * (1.0f - score);
    if (score == 0.0f)
        return 0.0f;
    return (z > 20.0f ? 1.0f : sigmoid(z)) / (2.0f * score);
}

__device__ bool is_softmax(moe_score kind)
{
    return kind == MOE_SCORE_SOFTMAX || kind == MOE_SCORE_SOFTMAX_TOPK;
}

/* The token's logits, summed as in the forward pass. */
__device__ void load_logits(const struct moe_cuda_router_backward &a, const row_slot &s)
{
    const uint32_t choices = a.experts + a.spec.zero_experts;
    const size_t slice = static_cast<size_t>(a.tokens) * choices;
    const float *logits = a.logits + static_cast<size_t>(s.token) * choices;
    for (uint32_t i = s.lane; i < choices; i += 32) {
        float z = 0.0f;
        for (uint32_t n = 0; n < a.slices; n++)
            z += logits[n * slice + i];
        s.z[i] = z + (a.logit_bias != nullptr ? a.logit_bias[i] : 0.0f);
    }
    __syncwarp();
}

/* d score of lane k's choice from d weight: through scale and renormalisation. */
__device__ float through_renorm(const struct moe_router_spec &spec, float score, float dweight)
{
    float g = spec.scale * dweight, sum = warp_sum(score), dot = warp_sum(g * score);
    if (spec.renorm == MOE_RENORM_NONE)
        return g;
    float divisor = sum + spec.renorm_eps;
    bool constant = false;
    if (spec.renorm == MOE_RENORM_CLAMPED) {
        divisor = fmaxf(sum, spec.renorm_eps);
        constant = spec.renorm_eps > sum;
    }
    if (divisor == 0.0f)
        return g;
    return constant ? g / divisor : g / divisor - dot / divisor / divisor;
}

/* Adds v of each live lane at d[id], one after the other: an id may occur twice. */
__device__ void scatter(const row_slot &s, uint32_t top_k, int32_t id, float v)
{
    for (uint32_t k = 0; k < top_k; k++) {
        if (s.lane == k && id >= 0)
            s.d[id] += v;
        __syncwarp();
    }
}

__global__ void __launch_bounds__(32 * WARPS)
    router_backward_kernel(const struct moe_cuda_router_backward a)
{
    row_slot s = take_row_slot(a);
    if (s.token >= a.tokens)
        return;
    const uint32_t choices = a.experts + a.spec.zero_experts;
    const moe_score kind = a.spec.score;
    float *out = a.dlogits + static_cast<size_t>(s.token) * choices;
    if (a.use != nullptr && a.use[s.token] == 0) {
        for (uint32_t i = s.lane; i < choices; i += 32)
            out[i] = 0.0f;
        return;
    }
    load_logits(a, s);
    if (kind == MOE_SCORE_SOFTMAX)
        warp_softmax(s.z, s.score, choices, s.lane);
    for (uint32_t i = s.lane; i < choices; i += 32) {
        s.d[i] = 0.0f;
        if (!is_softmax(kind))
            s.score[i] = lone_score(kind, s.z[i]);
    }
    __syncwarp();
    const size_t at = static_cast<size_t>(s.token) * a.spec.top_k + s.lane;
    const int32_t id = s.lane < a.spec.top_k ? a.ids[at] : -1;
    const bool live = id >= 0;
    const float dweight = live ? a.dweights[at] : 0.0f;
    float score = 0.0f;
    if (kind == MOE_SCORE_SOFTMAX_TOPK) {
        float largest = warp_max(live ? s.z[id] : -INFINITY);
        score = live ? expf(s.z[id] - largest) : 0.0f;
        float sum = warp_sum(score);
        score = live ? score / sum : 0.0f;
    } else if (live) {
        score = s.score[id];
    }
    float dscore = through_renorm(a.spec, score, dweight);
    if (kind == MOE_SCORE_SOFTMAX_TOPK)
        dscore = score * (dscore - warp_sum(live ? score * dscore : 0.0f));
    scatter(s, a.spec.top_k, id, dscore);
    float dot = 0.0f;
    if (kind == MOE_SCORE_SOFTMAX) {
        for (uint32_t i = s.lane; i < choices; i += 32)
            dot += s.score[i] * s.d[i];
        dot = warp_sum(dot);
    }
    for (uint32_t i = s.lane; i < choices; i += 32) {
        float d = s.d[i];
        if (kind == MOE_SCORE_SOFTMAX)
            d = s.score[i] * (d - dot);
        else if (kind != MOE_SCORE_SOFTMAX_TOPK)
            d *= lone_slope(kind, s.z[i], s.score[i]);
        out[i] = d;
    }
}

__global__ void __launch_bounds__(32 * WARPS)
    aux_backward_kernel(const struct moe_cuda_aux_backward b)
{
    const struct moe_cuda_router_backward &a = b.router;
    row_slot s = take_row_slot(a);
    if (s.token >= a.tokens)
        return;
    if (a.use != nullptr && a.use[s.token] == 0) {
        if (s.lane == 0)
            b.loss[s.token] = 0.0;
        return;
    }
    load_logits(a, s);
    const bool soft = is_softmax(a.spec.score);
    float divisor = 1.0f;
    if (soft) {
        warp_softmax(s.z, s.score, a.experts, s.lane);
    } else {
        float sum = 0.0f;
        for (uint32_t i = s.lane; i < a.experts; i += 32) {
            s.score[i] = lone_score(a.spec.score, s.z[i]);
            sum += s.score[i];
        }
        divisor = warp_sum(sum) + TINY;
    }
    __syncwarp();
    /* a[e] = score / divisor, g[e] = factor * n_e */
    float dot = 0.0f;
    for (uint32_t i = s.lane; i < a.experts; i += 32)
        dot +=
            s.score[i] / divisor * (static_cast<float>(b.factor) * static_cast<float>(b.loads[i]));
    dot = warp_sum(dot);
    if (s.lane == 0)
        b.loss[s.token] = dot;
    float *out = a.dlogits + static_cast<size_t>(s.token) * (a.experts + a.spec.zero_experts);
    for (uint32_t i = s.lane; i < a.experts; i += 32) {
        float g = static_cast<float>(b.factor) * static_cast<float>(b.loads[i]);
        float slope = soft ? s.score[i] : lone_slope(a.spec.score, s.z[i], s.score[i]) / divisor;
        out[i] += slope * (g - dot);
    }
}

size_t shared_bytes(const struct moe_cuda_router_backward &a)
{
    return static_cast<size_t>(WARPS) * 3 * (a.experts + a.spec.zero_experts) * sizeof(float);
}
constexpr size_t MAX_SHARED = sizeof(float) * WARPS * 3 * 2 * MOE_CUDA_MAX_EXPERTS;
static_assert(MAX_SHARED <= MOE_CUDA_LEAST_SHARED, "the arrays of the most choices fit");

__global__ void count_loads_kernel(uint32_t tokens, uint32_t top_k, uint32_t experts,
                                   const uint8_t *use, const int32_t *ids, uint32_t *loads,
                                   uint32_t *routed)
{
    size_t pair = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (pair >= static_cast<size_t>(tokens) * top_k || use[pair / top_k] == 0)
        return;
    int32_t id = ids[pair];
    if (id >= 0 && id < static_cast<int32_t>(experts))
        atomicAdd(&loads[id], 1u); /* of integers: the order does not matter */
    if (pair % top_k == 0)
        atomicAdd(routed, 1u);
}

/* ------------------------------------------------ for tensor cores, in parts */

__device__ float part_of(float v, bool low)
{
    const float high = static_cast<float>(static_cast<__nv_bfloat16>(v));
    return low ? v - high : high;
}

__global__ void split_logits_kernel(uint32_t choices, uint32_t parts, size_t n, const uint8_t *use,
                                    const float *dlogits, __nv_bfloat16 *to)
{
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
         i += stride) {
        const size_t t = i / choices, e = i % choices;
        const float v = use == nullptr || use[t] != 0 ? dlogits[i] : 0.0f;
        for (uint32_t p = 0; p < parts; p++)
            to[(t * parts + p) * choices + e] = static_cast<__nv_bfloat16>(part_of(v, p == 1));
    }
}

/* Parts high, high, middle of an F32 router's high, middle, low; a BF16 one twice. */
__global__ void stack_kernel(size_t each, uint32_t parts, const uint16_t *router, uint16_t *to)
{
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < each;
         i += stride)
        for (uint32_t p = 0; p < parts; p++)
            to[p * each + i] = router[(p == 2 ? each : 0) + i];
}

__global__ void add_parts_kernel(size_t n, const float *sums, float *grad)
{
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride)
        grad[i] += sums[i] + sums[n + i];
}

} // namespace

struct moe_status moe_cuda_router_backward(const struct moe_cuda_router_backward *a,
                                           cudaStream_t stream)
{
    if (a->tokens == 0)
        return moe_ok();
    router_backward_kernel<<<(a->tokens + WARPS - 1) / WARPS, 32 * WARPS, shared_bytes(*a),
                             stream>>>(*a);
    return MOE_LAUNCHED("the router's backward pass");
}

struct moe_status moe_cuda_aux_backward(const struct moe_cuda_aux_backward *a, cudaStream_t stream)
{
    if (a->router.tokens == 0)
        return moe_ok();
    aux_backward_kernel<<<(a->router.tokens + WARPS - 1) / WARPS, 32 * WARPS,
                          shared_bytes(a->router), stream>>>(*a);
    return MOE_LAUNCHED("the load-balance loss");
}

struct moe_status moe_cuda_count_loads(uint32_t tokens, uint32_t top_k, uint32_t experts,
                                       const uint8_t *use, const int32_t *ids, uint32_t *loads,
                                       uint32_t *routed, cudaStream_t stream)
{
    if (tokens == 0)
        return moe_ok();
    size_t pairs = static_cast<size_t>(tokens) * top_k;
    count_loads_kernel<<<static_cast<unsigned>((pairs + 255) / 256), 256, 0, stream>>>(
        tokens, top_k, experts, use, ids, loads, routed);
    return MOE_LAUNCHED("counting loads");
}

struct moe_status moe_cuda_split_logits(uint32_t tokens, uint32_t choices, uint32_t parts,
                                        const uint8_t *use, const float *dlogits, void *to,
                                        cudaStream_t stream)
{
    split_logits_kernel<<<FLAT_BLOCKS, FLAT_THREADS, 0, stream>>>(
        choices, parts, static_cast<size_t>(tokens) * choices, use, dlogits,
        static_cast<__nv_bfloat16 *>(to));
    return MOE_LAUNCHED("splitting the logits' gradient");
}

struct moe_status moe_cuda_stack_router(uint32_t choices, uint32_t hidden, uint32_t parts,
                                        const void *router, void *to, cudaStream_t stream)
{
    stack_kernel<<<FLAT_BLOCKS, FLAT_THREADS, 0, stream>>>(
        static_cast<size_t>(choices) * hidden, parts, static_cast<const uint16_t *>(router),
        static_cast<uint16_t *>(to));
    return MOE_LAUNCHED("stacking the router");
}

struct moe_status moe_cuda_add_parts(size_t n, const float *sums, float *grad, cudaStream_t stream)
{
    add_parts_kernel<<<FLAT_BLOCKS, FLAT_THREADS, 0, stream>>>(n, sums, grad);
    return MOE_LAUNCHED("adding the router's gradient");
}

struct moe_status moe_cuda_load_train_router(void)
{
    MOE_TRY(moe_cuda_allow_shared(router_backward_kernel, MAX_SHARED));
    MOE_TRY(moe_cuda_allow_shared(aux_backward_kernel, MAX_SHARED));
    return moe_cuda_load(count_loads_kernel, split_logits_kernel, stack_kernel, add_parts_kernel);
}
