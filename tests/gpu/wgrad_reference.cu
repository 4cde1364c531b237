/* SPDX-License-Identifier: Apache-2.0 */
/* See wgrad_reference.h. Simple rather than fast; shapes under test are small. */
#include "wgrad_reference.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace
{

constexpr int THREADS = 256;

__global__ void reference(moe_cuda_wgrad w, double *want)
{
    const uint32_t column = blockIdx.x * THREADS + threadIdx.x, row = blockIdx.y, e = blockIdx.z;
    if (column >= w.k)
        return;
    const auto *dy = static_cast<const __nv_bfloat16 *>(w.dy);
    const auto *x = static_cast<const __nv_bfloat16 *>(w.x);
    double sum = 0;
    for (size_t r = w.start[e]; r < size_t(w.start[e]) + w.count[e]; r++)
        sum += double(__bfloat162float(dy[r * (w.dy_stride != 0 ? w.dy_stride : w.n) + row])) *
               double(__bfloat162float(x[r * (w.x_stride != 0 ? w.x_stride : w.k) + column]));
    want[(size_t(e) * w.n + row) * w.k + column] = sum;
}

struct totals {
    double squares;
    unsigned long long worst; /* bits of a non-negative double: they have the same order */
};

__global__ void measure(size_t n, const double *want, totals *t)
{
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n && isfinite(want[i]))
        atomicAdd(&t->squares, want[i] * want[i]);
}

__global__ void compare(size_t n, const float *dw, const float *before, const double *want,
                        totals *t)
{
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n)
        return;
    const double got = double(dw[i]) - (before != nullptr ? double(before[i]) : 0.0);
    const double rms = sqrt(t->squares / double(n));
    const double size = fabs(want[i]) + rms;
    double error = size > 0 ? fabs(got - want[i]) / size : fabs(got - want[i]);
    if (isnan(got) && isnan(want[i]))
        error = 0;
    else if (isnan(error))
        error = INFINITY;
    atomicMax(&t->worst, static_cast<unsigned long long>(__double_as_longlong(error)));
}

} // namespace

extern "C" int wgrad_reference(const moe_cuda_wgrad *w, double *want)
{
    const dim3 blocks((w->k + THREADS - 1) / THREADS, w->n, w->experts);
    reference<<<blocks, THREADS>>>(*w, want);
    return cudaDeviceSynchronize();
}

extern "C" int wgrad_compare(const moe_cuda_wgrad *w, const float *before, const double *want,
                             double *worst)
{
    const size_t n = size_t(w->experts) * w->n * w->k;
    const auto blocks = unsigned((n + THREADS - 1) / THREADS);
    totals sum = {}, *t;
    cudaError_t rc = cudaMalloc(&t, sizeof *t);
    if (rc != cudaSuccess)
        return rc;
    rc = cudaMemcpy(t, &sum, sizeof sum, cudaMemcpyHostToDevice);
    if (rc == cudaSuccess) {
        measure<<<blocks, THREADS>>>(n, want, t);
        compare<<<blocks, THREADS>>>(n, w->dw, before, want, t);
        rc = cudaMemcpy(&sum, t, sizeof sum, cudaMemcpyDeviceToHost);
    }
    __builtin_memcpy(worst, &sum.worst, sizeof *worst);
    const cudaError_t freed = cudaFree(t);
    return rc != cudaSuccess ? rc : freed;
}
