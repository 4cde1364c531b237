/* SPDX-License-Identifier: Apache-2.0 */
/* From logits to scores, and sums over a warp. The router and its gradient share this code, so both
 * get the same bits. */
#ifndef MOE_CUDA_SCORES_CUH
#define MOE_CUDA_SCORES_CUH

#include "cuda/core/warp.cuh"
#include "moe/layer_spec.h"

#include <cstdint>

/* Result in all lanes; the order is fixed. */
__device__ inline float warp_sum(float v)
{
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(ALL_LANES, v, d);
    return v;
}

__device__ inline float warp_max(float v)
{
    for (int d = 16; d > 0; d /= 2)
        v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, d));
    return v;
}

/* Writes exp(v - max) over the sum of these to `to`, which may be v. n values, by one warp. */
__device__ inline void warp_softmax(const float *v, float *to, uint32_t n, uint32_t lane)
{
    float largest = -INFINITY, sum = 0;
    for (uint32_t i = lane; i < n; i += 32)
        largest = fmaxf(largest, v[i]);
    largest = warp_max(largest);
    for (uint32_t i = lane; i < n; i += 32) {
        to[i] = expf(v[i] - largest);
        sum += to[i];
    }
    sum = warp_sum(sum);
    for (uint32_t i = lane; i < n; i += 32)
        to[i] /= sum;
}

__device__ inline float sigmoid(float z)
{
    return 1.0f / (1.0f + expf(-z));
}

/* Score of one logit; z itself if scores depend on each other (softmax). */
__device__ inline float lone_score(moe_score kind, float z)
{
    switch (kind) {
    case MOE_SCORE_SIGMOID: return sigmoid(z);
    case MOE_SCORE_SQRTSOFTPLUS: return sqrtf(z > 20.0f ? z : log1pf(expf(z)));
    default: return z;
    }
}

#endif
