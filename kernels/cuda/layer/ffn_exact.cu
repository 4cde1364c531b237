/* SPDX-License-Identifier: Apache-2.0 */
/* The experts' networks in exact fp32, for everything that tensor cores do not support: F32 tokens,
 * F32 weights, odd shapes, other devices. simt.cuh multiplies and states tile, threads and shared
 * memory; the epilogues are here. */
#include "cuda/layer/ffn_exact.h"

#include "common/activation_math.h"
#include "cuda/core/load.h"
#include "cuda/core/stamp.cuh"
#include "cuda/layer/simt.cuh"

using moe_simt::groups;
using moe_simt::PER_THREAD;
using moe_simt::THREADS;
using moe_simt::tile;

struct exact_args {
    const moe_cuda_step_params *params;
    groups g;                /* g.start == nullptr: one group, the step parameters' tokens */
    moe_cuda_matrices which; /* of the layer that the step parameters name */
    const void *in;
    const float *weight; /* per row: of the input of gate and up, of the result of down */
    void *out;
    bool out_bf16;
    uint32_t width; /* columns of out */
    bool has_bias;  /* of the product: [entries][width] */
    moe_activation activation;
    float limit, alpha;
    uint64_t *began;
};

static __device__ float sigmoid(float z)
{
    return 1.0f / (1.0f + expf(-z));
}

/* Bias `w` of an entry's column; 0 without a bias. */
static __device__ float bias_at(const exact_args &a, moe_weight w, uint32_t entry, uint32_t column)
{
    return a.has_bias ? a.params->layer->bias[w][(size_t)entry * a.width + column] : 0.0f;
}

/* The groups of rows of this run. */
static __device__ groups groups_of(const exact_args &a)
{
    groups g = a.g;
    if (g.start == nullptr)
        g.rows = a.params->tokens;
    return g;
}

static __device__ void store(const exact_args &a, size_t at, float v)
{
    if (a.out_bf16)
        ((__nv_bfloat16 *)a.out)[at] = __float2bfloat16_rn(v);
    else
        ((float *)a.out)[at] = v;
}

/* ----------------------------------------------------------------- gate and up */

/* Finishes one gate and its up. A weight of the input equals the same weight on the product: the
 * map is linear. */
static __device__ float gate_and_up(const exact_args &a, const tile &t, size_t row, uint32_t inner,
                                    float g, float u)
{
    if (a.weight != nullptr) {
        g *= a.weight[row];
        u *= a.weight[row];
    }
    if (a.has_bias) {
        g += bias_at(a, MOE_WEIGHT_GATE_BIAS, t.entry, inner);
        u += bias_at(a, MOE_WEIGHT_UP_BIAS, t.entry, inner);
    }
    return a.activation == MOE_ACT_SITU ? moe_activate_situ(a.alpha, a.limit, g, u)
                                        : moe_activate(a.activation, a.limit, a.alpha, g, u);
}

template <typename X, typename W>
static __global__ void __launch_bounds__(THREADS) gate_up_kernel(const exact_args a)
{
    stamp_begin(a.began);
    const moe_cuda_matrix m = a.params->layer->matrix[a.which];
    moe_simt::product<X, W>(groups_of(a), a.in, m, [&](const tile &t, float acc[][PER_THREAD]) {
        /* Eight gates, then their eight ups: the partner of a thread's columns is two lanes on. */
        const uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
        const bool is_gate = tx / 2 % 2 == 0;
        const uint32_t inner = t.column / 2 + tx / 4 * MOE_CUDA_INTERLEAVE + tx % 2 * PER_THREAD;
        for (uint32_t i = 0; i < PER_THREAD; i++)
            for (uint32_t j = 0; j < PER_THREAD; j++) {
                float u = __shfl_xor_sync(~0u, acc[i][j], 2);
                uint32_t r = 4 * ty + i;
                if (!is_gate || r >= t.rows || inner + j >= a.width)
                    continue;
                size_t row = t.row + r;
                store(a, row * a.width + inner + j,
                      gate_and_up(a, t, row, inner + j, acc[i][j], u));
            }
    });
}

/* ------------------------------------------------------------- one matrix a product */

/* Stores finish(product, weight of its row, bias) for each element of a thread. */
template <typename Finish>
static __device__ void store_tile(const exact_args &a, const tile &t, float acc[][PER_THREAD],
                                  moe_weight bias, Finish finish)
{
    const uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    for (uint32_t i = 0; i < PER_THREAD && 4 * ty + i < t.rows; i++) {
        size_t row = t.row + 4 * ty + i;
        float w = a.weight != nullptr ? a.weight[row] : 1.0f;
        for (uint32_t j = 0; j < PER_THREAD; j++) {
            uint32_t column = t.column + 4 * tx + j;
            if (column >= a.width)
                break;
            store(a, row * a.width + column,
                  finish(acc[i][j], w, bias_at(a, bias, t.entry, column)));
        }
    }
}

/* Up alone: experts without a gate. */
template <typename X, typename W>
static __global__ void __launch_bounds__(THREADS) up_kernel(const exact_args a)
{
    stamp_begin(a.began);
    const moe_cuda_matrix m = a.params->layer->matrix[a.which];
    moe_simt::product<X, W>(groups_of(a), a.in, m, [&](const tile &t, float acc[][PER_THREAD]) {
        store_tile(a, t, acc, MOE_WEIGHT_UP_BIAS,
                   [](float v, float w, float b) { return moe_activate_relu2(w * v + b); });
    });
}

template <typename X, typename W>
static __global__ void __launch_bounds__(THREADS) down_kernel(const exact_args a)
{
    stamp_begin(a.began);
    const moe_cuda_matrix m = a.params->layer->matrix[a.which];
    moe_simt::product<X, W>(groups_of(a), a.in, m, [&](const tile &t, float acc[][PER_THREAD]) {
        store_tile(a, t, acc, MOE_WEIGHT_DOWN_BIAS,
                   [](float v, float w, float b) { return w * (v + b); });
    });
}

/* --------------------------------------------------------------------- launches */

template <typename X, typename W>
static void launch_gate_up(const exact_args &a, unsigned blocks, cudaStream_t stream)
{
    gate_up_kernel<X, W><<<blocks, THREADS, 0, stream>>>(a);
}

template <typename X, typename W>
static void launch_up(const exact_args &a, unsigned blocks, cudaStream_t stream)
{
    up_kernel<X, W><<<blocks, THREADS, 0, stream>>>(a);
}

template <typename X, typename W>
static void launch_down(const exact_args &a, unsigned blocks, cudaStream_t stream)
{
    down_kernel<X, W><<<blocks, THREADS, 0, stream>>>(a);
}

static exact_args common_args(const moe_cuda_exact *e)
{
    const moe_cuda_layer_desc *d = &e->layer->desc;
    exact_args a = {};
    a.params = e->params;
    a.began = e->began;
    if (e->rows != nullptr)
        a.g = {e->rows->start, e->rows->count, e->rows->local_experts, 0};
    a.in = e->in;
    a.out = e->out;
    a.out_bf16 = e->out_dtype == MOE_DTYPE_BF16;
    a.limit = d->spec.swiglu_limit;
    a.alpha = d->spec.swiglu_alpha;
    return a;
}

/* Four blocks per multiprocessor fill the device. */
static unsigned blocks_of(const moe_cuda_exact *e)
{
    return 4 * (unsigned)e->layer->device->multiprocessors;
}

static bool nothing_to_do(const moe_cuda_exact *e)
{
    return e->rows != nullptr && e->rows->local_experts == 0;
}

static struct moe_status enqueue_up(const struct moe_cuda_exact *e, const exact_args &a,
                                    cudaStream_t stream)
{
    const moe_cuda_matrix &m = e->layer->desc.matrix[a.which];
    if (m.packing != MOE_CUDA_PACKING_NONE)
        MOE_SIMT_DISPATCH_PACKED(e->in_dtype, launch_up, a, blocks_of(e), stream);
    else
        MOE_SIMT_DISPATCH(e->in_dtype, m.dtype, launch_up, a, blocks_of(e), stream);
    return MOE_LAUNCHED("up");
}

struct moe_status moe_cuda_exact_gate_up(const struct moe_cuda_exact *e, cudaStream_t stream)
{
    if (nothing_to_do(e))
        return moe_ok();
    const moe_cuda_layer_desc *d = &e->layer->desc;
    bool routed = e->rows != nullptr;
    exact_args a = common_args(e);
    a.which = routed ? MOE_CUDA_GATE_UP : MOE_CUDA_SHARED_GATE_UP;
    a.width = moe_cuda_product_columns(&d->spec, a.which);
    a.activation = routed ? d->spec.activation : d->spec.shared_activation;
    a.weight = routed && d->spec.weighting == MOE_WEIGHT_INPUT ? e->weight : nullptr;
    a.has_bias = routed && d->spec.gate_up_bias;
    if (!moe_activation_has_gate(a.activation))
        return enqueue_up(e, a, stream);
    if (d->matrix[a.which].packing != MOE_CUDA_PACKING_NONE)
        MOE_SIMT_DISPATCH_PACKED(e->in_dtype, launch_gate_up, a, blocks_of(e), stream);
    else
        MOE_SIMT_DISPATCH(e->in_dtype, d->matrix[a.which].dtype, launch_gate_up, a, blocks_of(e),
                          stream);
    return MOE_LAUNCHED("gate and up");
}

struct moe_status moe_cuda_exact_down(const struct moe_cuda_exact *e, cudaStream_t stream)
{
    if (nothing_to_do(e))
        return moe_ok();
    const moe_cuda_layer_desc *d = &e->layer->desc;
    bool routed = e->rows != nullptr;
    exact_args a = common_args(e);
    a.which = routed ? MOE_CUDA_DOWN : MOE_CUDA_SHARED_DOWN;
    a.width = moe_cuda_product_columns(&d->spec, a.which);
    a.weight = routed && d->spec.weighting == MOE_WEIGHT_INPUT ? nullptr : e->weight;
    a.has_bias = routed && d->spec.down_bias;
    if (d->matrix[a.which].packing != MOE_CUDA_PACKING_NONE)
        MOE_SIMT_DISPATCH_PACKED(e->in_dtype, launch_down, a, blocks_of(e), stream);
    else
        MOE_SIMT_DISPATCH(e->in_dtype, d->matrix[a.which].dtype, launch_down, a, blocks_of(e),
                          stream);
    return MOE_LAUNCHED("down");
}

struct moe_status moe_cuda_exact_linear(const struct moe_cuda_exact *e,
                                        enum moe_cuda_matrices which, cudaStream_t stream)
{
    exact_args a = common_args(e);
    a.which = which;
    a.width = moe_cuda_product_columns(&e->layer->spec, which);
    MOE_SIMT_DISPATCH(e->in_dtype, e->layer->desc.matrix[which].dtype, launch_down, a, blocks_of(e),
                      stream);
    return MOE_LAUNCHED("a linear layer");
}

/* --------------------------------------------------------------- shared weights */

/* One warp per token. */
template <typename X>
static __global__ void shared_weights_kernel(const moe_cuda_step_params *params, const X *x,
                                             uint32_t columns, float *weight, uint64_t *began)
{
    stamp_begin(began);
    uint32_t lane = threadIdx.x % 32, token = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (token >= params->tokens)
        return;
    const float *vector = (const float *)params->layer->matrix[MOE_CUDA_SHARED_VECTOR].data;
    float sum = 0;
    for (uint32_t c = lane; c < columns; c += 32)
        sum = fmaf((float)x[(size_t)token * columns + c], vector[c], sum);
    for (int d = 16; d > 0; d /= 2)
        sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0)
        weight[token] = sigmoid(sum);
}

struct moe_status moe_cuda_shared_weights(const struct moe_layer *layer,
                                          const struct moe_cuda_step_params *params,
                                          enum moe_dtype dtype, uint32_t capacity, const void *x,
                                          float *weight, uint64_t *began, cudaStream_t stream)
{
    unsigned blocks = (capacity + THREADS / 32 - 1) / (THREADS / 32);
    uint32_t hidden = layer->spec.hidden;
    if (blocks == 0)
        return moe_ok();
    if (dtype == MOE_DTYPE_F32)
        shared_weights_kernel<<<blocks, THREADS, 0, stream>>>(params, (const float *)x, hidden,
                                                              weight, began);
    else
        shared_weights_kernel<<<blocks, THREADS, 0, stream>>>(params, (const __nv_bfloat16 *)x,
                                                              hidden, weight, began);
    return MOE_LAUNCHED("the shared expert's weights");
}

/* --------------------------------------------------------------------- helpers */

template <typename From, typename To>
static __global__ void convert_kernel(const From *src, To *dst, size_t n)
{
    size_t stride = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride)
        dst[i] = (To)src[i];
}

struct moe_status moe_cuda_narrow(const float *src, void *dst, size_t n, cudaStream_t stream)
{
    convert_kernel<<<256, THREADS, 0, stream>>>(src, (__nv_bfloat16 *)dst, n);
    return MOE_LAUNCHED("rounding to bf16");
}

struct moe_status moe_cuda_widen(const void *src, float *dst, size_t n, cudaStream_t stream)
{
    convert_kernel<<<256, THREADS, 0, stream>>>((const __nv_bfloat16 *)src, dst, n);
    return MOE_LAUNCHED("widening bf16");
}

static __global__ void add_kernel(float *y, const float *v, size_t n)
{
    size_t stride = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride)
        y[i] += v[i];
}

struct moe_status moe_cuda_add(float *y, const float *v, size_t n, cudaStream_t stream)
{
    add_kernel<<<256, THREADS, 0, stream>>>(y, v, n);
    return MOE_LAUNCHED("adding the shared expert");
}

/* ------------------------------------------------------------------------- load */

template <typename X, typename W> static struct moe_status load_pair()
{
    return moe_cuda_load(gate_up_kernel<X, W>, up_kernel<X, W>, down_kernel<X, W>);
}

struct moe_status moe_cuda_load_ffn_exact(void)
{
    MOE_TRY((load_pair<float, float>()));
    MOE_TRY((load_pair<float, __nv_bfloat16>()));
    MOE_TRY((load_pair<__nv_bfloat16, float>()));
    MOE_TRY((load_pair<__nv_bfloat16, __nv_bfloat16>()));
    MOE_TRY((load_pair<float, moe_simt::packed_weights>()));
    MOE_TRY((load_pair<__nv_bfloat16, moe_simt::packed_weights>()));
    return moe_cuda_load(shared_weights_kernel<float>, shared_weights_kernel<__nv_bfloat16>,
                         convert_kernel<float, __nv_bfloat16>, convert_kernel<__nv_bfloat16, float>,
                         add_kernel);
}
