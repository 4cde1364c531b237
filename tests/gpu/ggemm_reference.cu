/* SPDX-License-Identifier: Apache-2.0 */
/* See ggemm_reference.h. Simple rather than fast; shapes under test are small. */
#include "ggemm_reference.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace
{

constexpr int THREADS = 256;

__device__ float random_value(uint64_t seed, uint64_t index, float scale)
{
    uint64_t z = seed + (index + 1) * UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    z ^= z >> 31;
    return (float(z >> 40) * 0x1p-23f - 1.0f) * scale;
}

template <class T> __global__ void fill(T *to, size_t count, uint64_t seed, float scale)
{
    const size_t stride = size_t(gridDim.x) * blockDim.x;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride)
        to[i] = T(random_value(seed, i, scale));
}

/* The expert that owns `row`, or -1. */
__device__ int owner(const moe_cuda_ggemm &g, uint32_t row)
{
    for (uint32_t e = 0; e < g.experts; e++)
        if (row >= g.start[e] && row - g.start[e] < g.count[e])
            return int(e);
    return -1;
}

__host__ __device__ size_t x_stride(const moe_cuda_ggemm &g)
{
    return g.x_stride != 0 ? g.x_stride : g.k;
}

__host__ __device__ size_t out_stride(const moe_cuda_ggemm &g)
{
    return g.out_stride != 0 ? g.out_stride : g.n;
}

__device__ double dot(const moe_cuda_ggemm &g, uint32_t row, size_t weight_row)
{
    const bool w8a8 =
        g.packing == MOE_CUDA_PACKING_W8A8_BLOCK || g.packing == MOE_CUDA_PACKING_W8A8_ROW;
    const auto *x = static_cast<const __nv_bfloat16 *>(g.x) + row * x_stride(g);
    const auto *quantised = static_cast<const float *>(g.x) + row * x_stride(g);
    const void *data = (*g.weights)->data;
    const auto *w = static_cast<const __nv_bfloat16 *>(data) + weight_row * g.k;
    const auto *values = static_cast<const float *>(data) + weight_row * g.k;
    double sum = 0;
    for (uint32_t i = 0; i < g.k; i++)
        sum += double(w8a8 ? quantised[i] : __bfloat162float(x[i])) *
               double(g.packing != MOE_CUDA_PACKING_NONE ? values[i] : __bfloat162float(w[i]));
    return sum;
}

/* For a product with W: weights are [experts, k, n]. */
__device__ double dot_back(const moe_cuda_ggemm &g, uint32_t e, uint32_t row, uint32_t column)
{
    const auto *x = static_cast<const __nv_bfloat16 *>(g.x) + row * x_stride(g);
    const size_t first = size_t(e) * g.k * g.n + column;
    const auto *w = static_cast<const __nv_bfloat16 *>((*g.weights)->data) + first;
    const auto *values = static_cast<const float *>((*g.weights)->data) + first;
    double sum = 0;
    for (uint32_t i = 0; i < g.k; i++) {
        const size_t at = size_t(i) * g.n;
        sum += double(__bfloat162float(x[i])) *
               double(g.packing != MOE_CUDA_PACKING_NONE ? values[at] : __bfloat162float(w[at]));
    }
    return sum;
}

__device__ double keep_nan_min(double a, double b)
{
    return a > b ? b : a;
}

__device__ double act(const moe_cuda_ggemm &g, double gate, double up)
{
    if (g.activation == MOE_ACT_SITU)
        return g.alpha * tanh(gate / g.alpha) / (1 + exp(-gate)) * g.limit * tanh(up / g.limit);
    if (g.activation != MOE_ACT_SWIGLU) {
        gate = keep_nan_min(gate, g.limit);
        up = up < -g.limit ? -double(g.limit) : keep_nan_min(up, g.limit);
    }
    if (g.activation == MOE_ACT_SWIGLU_OAI)
        return gate / (1 + exp(-g.alpha * gate)) * (up + 1);
    return gate / (1 + exp(-gate)) * up;
}

__device__ double gated(const moe_cuda_ggemm &g, uint32_t e, uint32_t row, uint32_t column)
{
    const size_t gate_row = size_t(e) * 2 * g.n + column / 8 * 16 + column % 8;
    const double weight = g.row_weight != nullptr ? double(g.row_weight[row]) : 1.0;
    const double input = g.weighting == MOE_WEIGHT_INPUT ? weight : 1.0;
    double gate = input * dot(g, row, gate_row), up = input * dot(g, row, gate_row + 8);
    if (g.has_bias) {
        gate += (*g.weights)->bias[size_t(e) * g.n + column];
        up += (*g.weights)->up_bias[size_t(e) * g.n + column];
    }
    return act(g, gate, up);
}

__device__ double plain(const moe_cuda_ggemm &g, uint32_t e, uint32_t row, uint32_t column)
{
    const double product =
        g.back ? dot_back(g, e, row, column) : dot(g, row, size_t(e) * g.n + column);
    const double bias = g.has_bias ? double((*g.weights)->bias[size_t(e) * g.n + column]) : 0.0;
    const double weight = g.row_weight != nullptr ? double(g.row_weight[row]) : 1.0;
    if (g.relu2) {
        const double up = (g.weighting == MOE_WEIGHT_INPUT ? weight : 1.0) * product + bias;
        return up < 0 ? 0.0 : up * up;
    }
    return g.weighting == MOE_WEIGHT_INPUT ? product + bias : weight * (product + bias);
}

__global__ void reference(moe_cuda_ggemm g, double *want)
{
    const uint32_t row = blockIdx.y;
    const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x;
    const int e = owner(g, row);
    if (e >= 0 && column < g.n)
        want[size_t(row) * g.n + column] =
            g.gated ? gated(g, uint32_t(e), row, column) : plain(g, uint32_t(e), row, column);
}

__device__ double element(const moe_cuda_ggemm &g, size_t i)
{
    return g.out_dtype == MOE_DTYPE_F32
               ? double(static_cast<const float *>(g.out)[i])
               : double(__bfloat162float(static_cast<const __nv_bfloat16 *>(g.out)[i]));
}

__device__ bool poisoned(const moe_cuda_ggemm &g, size_t i)
{
    return g.out_dtype == MOE_DTYPE_F32 ? static_cast<const uint32_t *>(g.out)[i] == 0xffffffffu
                                        : static_cast<const uint16_t *>(g.out)[i] == 0xffffu;
}

struct totals {
    double squares;
    unsigned long long elements, stray;
    unsigned long long worst; /* bits of a non-negative double: they have the same order */
};

__global__ void measure(moe_cuda_ggemm g, const double *want, totals *t)
{
    const uint32_t row = blockIdx.y;
    const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x;
    const size_t i = size_t(row) * g.n + column;
    if (column >= out_stride(g))
        return;
    if (owner(g, row) < 0 || column >= g.n) {
        if (!poisoned(g, row * out_stride(g) + column))
            atomicAdd(&t->stray, 1ull);
    } else if (isfinite(want[i])) {
        atomicAdd(&t->squares, want[i] * want[i]);
        atomicAdd(&t->elements, 1ull);
    }
}

__global__ void compare(moe_cuda_ggemm g, const double *want, totals *t)
{
    const uint32_t row = blockIdx.y;
    const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x;
    const size_t i = size_t(row) * g.n + column;
    if (column >= g.n || owner(g, row) < 0)
        return;
    const double rms = t->elements > 0 ? sqrt(t->squares / double(t->elements)) : 1.0;
    const double got = element(g, row * out_stride(g) + column);
    double error = fabs(got - want[i]) / (fabs(want[i]) + rms);
    if (isnan(got) && isnan(want[i]))
        error = 0;
    else if (isnan(error))
        error = INFINITY;
    atomicMax(&t->worst, static_cast<unsigned long long>(__double_as_longlong(error)));
}

} // namespace

extern "C" int ggemm_fill_bf16(void *to, size_t count, uint64_t seed, float scale)
{
    fill<<<1024, THREADS>>>(static_cast<__nv_bfloat16 *>(to), count, seed, scale);
    return cudaDeviceSynchronize();
}

extern "C" int ggemm_fill_f32(float *to, size_t count, uint64_t seed, float scale)
{
    fill<<<1024, THREADS>>>(to, count, seed, scale);
    return cudaDeviceSynchronize();
}

extern "C" int ggemm_reference(const moe_cuda_ggemm *g, double *want)
{
    const dim3 blocks((g->n + THREADS - 1) / THREADS, g->row_capacity);
    reference<<<blocks, THREADS>>>(*g, want);
    return cudaDeviceSynchronize();
}

extern "C" int ggemm_compare(const moe_cuda_ggemm *g, const double *want, ggemm_difference *out)
{
    const dim3 blocks(unsigned((out_stride(*g) + THREADS - 1) / THREADS), g->row_capacity);
    totals sum = {}, *t;
    cudaError_t rc = cudaMalloc(&t, sizeof *t);
    if (rc != cudaSuccess)
        return rc;
    rc = cudaMemcpy(t, &sum, sizeof sum, cudaMemcpyHostToDevice);
    if (rc == cudaSuccess) {
        measure<<<blocks, THREADS>>>(*g, want, t);
        compare<<<blocks, THREADS>>>(*g, want, t);
        rc = cudaMemcpy(&sum, t, sizeof sum, cudaMemcpyDeviceToHost);
    }
    __builtin_memcpy(&out->worst, &sum.worst, sizeof out->worst);
    out->stray = sum.stray;
    const cudaError_t freed = cudaFree(t);
    return rc != cudaSuccess ? rc : freed;
}
