/* SPDX-License-Identifier: Apache-2.0 */
/* The norm of a latent space, and the last sum outside of it; see latent.h. One CTA of 256 threads
 * per token. No stages; shared memory only for one sum. Registers no limit. */
#include "cuda/layer/latent.h"

#include "cuda/core/load.h"
#include "cuda/core/stamp.cuh"

#include <cuda_bf16.h>

static constexpr uint32_t THREADS = 256;

static __device__ void put(float *to, float v)
{
    *to = v;
}

static __device__ void put(__nv_bfloat16 *to, float v)
{
    *to = __float2bfloat16_rn(v);
}

/* The sum over all threads, in a fixed order, for all of them. */
static __device__ float sum_of_block(float v)
{
    __shared__ float parts[THREADS / 32];
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0.0f;
    for (uint32_t i = 0; i < THREADS / 32; i++)
        sum += parts[i];
    return sum;
}

/* u [n] = g * u / sqrt(mean(u^2) + eps) */
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    normalise_kernel(const moe_cuda_step_params *params, T *rows, uint32_t n, float eps)
{
    if (blockIdx.x >= params->tokens)
        return;
    T *u = rows + (size_t)blockIdx.x * n;
    const float *g = params->layer->bias[MOE_WEIGHT_LATENT_NORM];
    float squares = 0.0f;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        squares = fmaf((float)u[i], (float)u[i], squares);
    const float scale = 1.0f / sqrtf(sum_of_block(squares) / (float)n + eps);
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        put(u + i, (float)u[i] * scale * g[i]);
}

struct moe_status moe_cuda_latent_normalise(const struct moe_cuda_latent *l, void *u,
                                            cudaStream_t stream)
{
    const moe_layer_spec &s = l->layer->spec;
    if (l->dtype == MOE_DTYPE_F32)
        normalise_kernel<<<l->bucket, THREADS, 0, stream>>>(l->params, (float *)u, s.latent,
                                                            s.latent_eps);
    else
        normalise_kernel<<<l->bucket, THREADS, 0, stream>>>(l->params, (__nv_bfloat16 *)u, s.latent,
                                                            s.latent_eps);
    return MOE_LAUNCHED("the norm of a latent space");
}

struct finish_args {
    const moe_cuda_step_params *params;
    moe_cuda_latent_sums f;
    uint32_t hidden;
};

template <typename T>
static __global__ void __launch_bounds__(THREADS) finish_kernel(const finish_args a)
{
    const uint32_t t = blockIdx.x;
    stamp_begin(a.f.ends);
    if (t >= a.params->tokens)
        return;
    const bool good = a.f.token_state[t] == MOE_TOKEN_OK;
    const bool bare = a.params->has_modes && (a.f.mode[t] & MOE_ROUTE_WITHOUT_SHARED) != 0;
    const bool adds = a.f.base != nullptr && !bare;
    const size_t row = (size_t)t * a.hidden;
    T *y = (T *)a.f.y + row;
    for (uint32_t i = threadIdx.x; i < a.hidden; i += THREADS) {
        const float base = adds ? a.f.base[row + i] : 0.0f;
        put(y + i, good ? a.f.out[row + i] + base : 0.0f);
    }
}

struct moe_status moe_cuda_latent_finish(const struct moe_cuda_latent *l,
                                         const struct moe_cuda_latent_sums *f, cudaStream_t stream)
{
    const finish_args a = {l->params, *f, l->layer->spec.hidden};
    if (l->dtype == MOE_DTYPE_F32)
        finish_kernel<float><<<l->bucket, THREADS, 0, stream>>>(a);
    else
        finish_kernel<__nv_bfloat16><<<l->bucket, THREADS, 0, stream>>>(a);
    return MOE_LAUNCHED("leaving a latent space");
}

struct moe_status moe_cuda_load_latent(void)
{
    return moe_cuda_load(normalise_kernel<float>, normalise_kernel<__nv_bfloat16>,
                         finish_kernel<float>, finish_kernel<__nv_bfloat16>);
}
