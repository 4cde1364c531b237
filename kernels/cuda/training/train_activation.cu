/* SPDX-License-Identifier: Apache-2.0 */
/* From the products of a backward pass to the operands of the next ones; see train_kernels.h. In
 * fp32 a block works on a row. For tensor cores a warp works on a row, with eight columns to a
 * lane. Sums along a row use one fixed tree. */
#include "common/activation_math.h"
#include "cuda/core/load.h"
#include "cuda/training/train_rows.cuh"

namespace
{

using namespace train_rows;

constexpr uint32_t ROW_WARPS = THREADS / 32;

__device__ float warp_sum(float v)
{
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

__device__ moe_activation_slopes activate(const struct moe_cuda_activation_backward &a, float g,
                                          float u)
{
    float dg = 1.0f, du = 1.0f;
    if (moe_activation_clamps(a.activation)) {
        dg = g > a.limit ? 0.0f : 1.0f;
        du = fabsf(u) > a.limit ? 0.0f : 1.0f;
        g = fminf(g, a.limit);
        u = fminf(fmaxf(u, -a.limit), a.limit);
    }
    return moe_activation_slopes_of(moe_activation_shape_of(a.activation, a.alpha), g, u, dg, du);
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    activation_kernel(const struct moe_cuda_activation_backward a)
{
    const uint32_t padded = (a.inner + 7) / 8 * 8;
    for (uint32_t row = blockIdx.x; row < rows_of(a.rows); row += gridDim.x) {
        uint32_t group;
        if (!find_row(a.rows, row, &group))
            continue;
        const float weight = a.weight != nullptr ? a.weight[row] : 1.0f;
        const float in = a.input_weighting ? weight : 1.0f, out = a.input_weighting ? 1.0f : weight;
        const size_t bias = static_cast<size_t>(group) * a.inner;
        float *pre = a.pre + static_cast<size_t>(row) * 2 * padded;
        float *dh = static_cast<float *>(a.dh) + static_cast<size_t>(row) * a.inner;
        float dot = 0;
        for (uint32_t i = threadIdx.x; i < padded; i += THREADS) {
            float *g = pre + MOE_CUDA_GATE_ROW(i), *u = g + MOE_CUDA_INTERLEAVE;
            if (i >= a.inner) {
                *g = *u = 0.0f;
                continue;
            }
            float gate = *g * in + (a.gate_bias != nullptr ? a.gate_bias[bias + i] : 0.0f);
            float up = *u * in + (a.up_bias != nullptr ? a.up_bias[bias + i] : 0.0f);
            moe_activation_slopes s = activate(a, gate, up);
            float d = dh[i];
            dot = fmaf(d, s.value, dot);
            *g = out * d * s.gate;
            *u = out * d * s.up;
            dh[i] = out * s.value;
        }
        if (a.dweight == nullptr || a.input_weighting)
            continue;
        if (a.down_bias != nullptr) {
            const T *dy = static_cast<const T *>(a.dy) + static_cast<size_t>(row) * a.dy_stride;
            const float *b = a.down_bias + static_cast<size_t>(group) * a.hidden;
            for (uint32_t h = threadIdx.x; h < a.hidden; h += THREADS)
                dot = fmaf(static_cast<float>(dy[h]), b[h], dot);
        }
        dot = block_sum(dot);
        if (threadIdx.x == 0)
            a.dweight[row] = dot;
    }
}

/* Eight neighbouring values of a row. */
struct alignas(16) eight {
    __nv_bfloat16 v[8];
};

__device__ void load_eight(const float *from, float *v)
{
    const float4 a = reinterpret_cast<const float4 *>(from)[0],
                 b = reinterpret_cast<const float4 *>(from)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

/* dy . b_d of one row, by a warp. */
__device__ float bias_dot(const struct moe_cuda_activation_backward &a, uint32_t row,
                          uint32_t group, uint32_t lane)
{
    const auto *dy =
        static_cast<const __nv_bfloat16 *>(a.dy) + static_cast<size_t>(row) * a.dy_stride;
    const float *b = a.down_bias + static_cast<size_t>(group) * a.hidden;
    float dot = 0;
    for (uint32_t h = lane; h < a.hidden; h += 32)
        dot = fmaf(static_cast<float>(dy[h]), b[h], dot);
    return dot;
}

/* Eight columns from `i` on; returns their part of dh . h. */
__device__ float activate_eight(const struct moe_cuda_activation_backward &a, const float *pre,
                                eight *dh, eight *dgu, uint32_t i, size_t bias, float weight)
{
    const float in = a.input_weighting ? weight : 1.0f, out = a.input_weighting ? 1.0f : weight;
    float gate[8], up[8], dot = 0;
    load_eight(pre + 2 * i, gate);
    load_eight(pre + 2 * i + MOE_CUDA_INTERLEAVE, up);
    eight d = dh[i / 8], dg, du;
#pragma unroll
    for (uint32_t j = 0; j < 8; j++) {
        const float g = gate[j] * in + (a.gate_bias != nullptr ? a.gate_bias[bias + i + j] : 0.0f);
        const float u = up[j] * in + (a.up_bias != nullptr ? a.up_bias[bias + i + j] : 0.0f);
        const moe_activation_slopes s = activate(a, g, u);
        const float dj = static_cast<float>(d.v[j]);
        dot = fmaf(dj, s.value, dot);
        dg.v[j] = static_cast<__nv_bfloat16>(out * dj * s.gate);
        du.v[j] = static_cast<__nv_bfloat16>(out * dj * s.up);
        d.v[j] = static_cast<__nv_bfloat16>(out * s.value);
    }
    dgu[i / 4] = dg;
    dgu[i / 4 + 1] = du;
    dh[i / 8] = d;
    return dot;
}

__global__ void __launch_bounds__(THREADS)
    narrow_activation_kernel(const struct moe_cuda_activation_backward a)
{
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t row = blockIdx.x * ROW_WARPS + threadIdx.x / 32; row < rows_of(a.rows);
         row += gridDim.x * ROW_WARPS) {
        uint32_t group;
        if (!find_row(a.rows, row, &group))
            continue;
        const size_t at = static_cast<size_t>(row) * a.inner;
        const float weight = a.weight != nullptr ? a.weight[row] : 1.0f;
        auto *dh = reinterpret_cast<eight *>(static_cast<__nv_bfloat16 *>(a.dh) + at);
        auto *dgu = reinterpret_cast<eight *>(static_cast<__nv_bfloat16 *>(a.dgu) + 2 * at);
        float dot = 0;
        for (uint32_t i = lane * 8; i < a.inner; i += 32 * 8)
            dot += activate_eight(a, a.pre + 2 * at, dh, dgu, i,
                                  static_cast<size_t>(group) * a.inner, weight);
        if (a.dweight == nullptr || a.input_weighting)
            continue;
        if (a.down_bias != nullptr)
            dot += bias_dot(a, row, group, lane);
        dot = warp_sum(dot);
        if (lane == 0)
            a.dweight[row] = dot;
    }
}

/* T: of x, D: of dgu. */
template <typename T, typename D>
__global__ void __launch_bounds__(THREADS) input_kernel(const struct moe_cuda_input_backward a)
{
    for (uint32_t row = blockIdx.x; row < rows_of(a.rows); row += gridDim.x) {
        uint32_t group;
        if (!find_row(a.rows, row, &group))
            continue;
        const float weight = a.weight[row];
        const T *x = static_cast<const T *>(a.x) + static_cast<size_t>(row) * a.x_stride;
        float *dx = a.dx + static_cast<size_t>(row) * a.dx_stride;
        D *dgu = static_cast<D *>(a.dgu) + static_cast<size_t>(row) * a.dgu_columns;
        float dot = 0;
        for (uint32_t h = threadIdx.x; h < a.hidden; h += THREADS) {
            dot = fmaf(dx[h], static_cast<float>(x[h]), dot);
            dx[h] *= weight;
        }
        for (uint32_t i = threadIdx.x; i < a.dgu_columns; i += THREADS)
            dgu[i] = static_cast<D>(static_cast<float>(dgu[i]) * weight);
        dot = block_sum(dot);
        if (threadIdx.x == 0)
            a.dweight[row] = dot;
    }
}

template <typename D>
__global__ void __launch_bounds__(THREADS)
    half_kernel(const struct moe_cuda_row_groups rows, uint32_t inner, const D *dgu, float *out)
{
    const size_t columns = 2 * ((inner + 7) / 8 * 8);
    for (uint32_t row = blockIdx.x; row < rows_of(rows); row += gridDim.x)
        for (uint32_t i = threadIdx.x; i < inner; i += THREADS)
            out[static_cast<size_t>(row) * inner + i] =
                static_cast<float>(dgu[row * columns + MOE_CUDA_GATE_ROW(i)]);
}

} // namespace

struct moe_status moe_cuda_activation_backward(const struct moe_cuda_activation_backward *a,
                                               cudaStream_t stream)
{
    if (a->rows.rows == 0 || a->rows.groups == 0)
        return moe_ok();
    if (a->row_dtype == MOE_DTYPE_BF16)
        narrow_activation_kernel<<<blocks_of(a->rows.rows), THREADS, 0, stream>>>(*a);
    else
        BY_DTYPE(a->dtype, blocks_of(a->rows.rows), activation_kernel, *a);
    return MOE_LAUNCHED("the activation's backward pass");
}

struct moe_status moe_cuda_input_backward(const struct moe_cuda_input_backward *a,
                                          cudaStream_t stream)
{
    if (a->rows.rows == 0 || a->rows.groups == 0)
        return moe_ok();
    const unsigned blocks = blocks_of(a->rows.rows);
    if (a->dtype != MOE_DTYPE_BF16)
        input_kernel<float, float><<<blocks, THREADS, 0, stream>>>(*a);
    else if (a->dgu_dtype == MOE_DTYPE_F32)
        input_kernel<__nv_bfloat16, float><<<blocks, THREADS, 0, stream>>>(*a);
    else
        input_kernel<__nv_bfloat16, __nv_bfloat16><<<blocks, THREADS, 0, stream>>>(*a);
    return MOE_LAUNCHED("the weighted input's backward pass");
}

struct moe_status moe_cuda_take_half(const struct moe_cuda_row_groups *rows, uint32_t inner,
                                     enum moe_dtype dgu_dtype, const void *dgu, bool up, float *out,
                                     cudaStream_t stream)
{
    const size_t skip = up ? MOE_CUDA_INTERLEAVE : 0;
    if (rows->rows == 0 || rows->groups == 0)
        return moe_ok();
    if (dgu_dtype == MOE_DTYPE_BF16)
        half_kernel<<<blocks_of(rows->rows), THREADS, 0, stream>>>(
            *rows, inner, static_cast<const __nv_bfloat16 *>(dgu) + skip, out);
    else
        half_kernel<<<blocks_of(rows->rows), THREADS, 0, stream>>>(
            *rows, inner, static_cast<const float *>(dgu) + skip, out);
    return MOE_LAUNCHED("taking gradients apart");
}

template <typename T> static struct moe_status load_dtype()
{
    return moe_cuda_load(activation_kernel<T>, input_kernel<T, float>, half_kernel<T>);
}

struct moe_status moe_cuda_load_train_activation(void)
{
    MOE_TRY(load_dtype<float>());
    MOE_TRY(load_dtype<__nv_bfloat16>());
    return moe_cuda_load(narrow_activation_kernel, input_kernel<__nv_bfloat16, __nv_bfloat16>);
}
