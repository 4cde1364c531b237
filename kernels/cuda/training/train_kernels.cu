/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels over the tokens of a backward pass; see train_kernels.h. A block works on a row at a
 * time. All its threads sum over a row, in one fixed tree. */
#include "cuda/core/load.h"
#include "cuda/training/train_rows.cuh"

namespace
{

using namespace train_rows;

/* ------------------------------------------------------------------ tokens */

__global__ void sort_kernel(const struct moe_cuda_sorted_tokens a)
{
    uint32_t t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= a.tokens)
        return;
    bool ok = a.token_state[t] == MOE_TOKEN_OK;
    a.ok[t] = ok;
    a.routed[t] = ok && (a.mode == nullptr || a.mode[t] != MOE_ROUTE_IDS_WEIGHTS);
    for (uint32_t k = 0; k < a.top_k; k++) {
        size_t at = static_cast<size_t>(t) * a.top_k + k;
        int32_t id = a.ids[at];
        a.ids_sent[at] = id < static_cast<int32_t>(a.experts) ? id : -1;
    }
}

__global__ void __launch_bounds__(THREADS)
    clear_kernel(uint32_t tokens, size_t units, const uint8_t *use, const uint16_t *from,
                 uint16_t *x, uint16_t *dy)
{
    for (size_t t = blockIdx.x; t < tokens; t += gridDim.x) {
        const bool counts = use[t] != 0;
        if (counts && from == x)
            continue;
        for (size_t i = threadIdx.x; i < units; i += THREADS) {
            x[t * units + i] = counts ? from[t * units + i] : 0;
            if (!counts && dy != nullptr)
                dy[t * units + i] = 0;
        }
    }
}

template <typename Unit>
__global__ void split_kernel(const uint32_t *rows_in_use, size_t units, const Unit *pairs, Unit *x,
                             Unit *dy)
{
    const size_t n = *rows_in_use * units, stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
         i += stride) {
        size_t row = i / units, at = i % units;
        x[i] = pairs[row * 2 * units + at];
        dy[i] = pairs[row * 2 * units + units + at];
    }
}

template <typename Unit>
void launch_split(const uint32_t *rows_in_use, size_t row_bytes, const void *pairs, void *x,
                  void *dy, cudaStream_t stream)
{
    split_kernel<<<MAX_BLOCKS, THREADS, 0, stream>>>(
        rows_in_use, row_bytes / sizeof(Unit), static_cast<const Unit *>(pairs),
        static_cast<Unit *>(x), static_cast<Unit *>(dy));
}

__global__ void label_kernel(const struct moe_cuda_label_rows a)
{
    const size_t items = static_cast<size_t>(a.slots) * a.max_tokens * a.top_k;
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < items;
         i += stride) {
        uint32_t k = static_cast<uint32_t>(i % a.top_k);
        size_t token = i / a.top_k; /* of all slots */
        if (token % a.max_tokens >= a.tokens_of[token / a.max_tokens])
            continue;
        uint32_t row = a.row_of[token * a.max_top_k + k];
        if (row == 0xffffffff)
            continue;
        float *at =
            a.rows + static_cast<size_t>(row) * (a.hidden + MOE_CUDA_WEIGHT_COLUMNS) + a.hidden;
        for (uint32_t j = 0; j < MOE_CUDA_WEIGHT_COLUMNS; j++)
            at[j] = j == k ? a.dweight[row] : 0.0f;
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) home_kernel(const struct moe_cuda_home_gradients a)
{
    for (uint32_t t = blockIdx.x; t < a.tokens; t += gridDim.x) {
        const bool ok = a.ok[t] != 0;
        const float *from =
            a.combined + static_cast<size_t>(t) * (a.hidden + MOE_CUDA_WEIGHT_COLUMNS);
        const T *x = static_cast<const T *>(a.x) + static_cast<size_t>(t) * a.hidden;
        const T *dy = static_cast<const T *>(a.dy) + static_cast<size_t>(t) * a.hidden;
        float *dx = a.dx + static_cast<size_t>(t) * a.hidden;
        for (uint32_t h = threadIdx.x; h < a.hidden; h += THREADS)
            dx[h] = ok ? from[h] : 0.0f;
        for (uint32_t k = 0; k < a.top_k; k++) {
            const size_t at = static_cast<size_t>(t) * a.top_k + k;
            const int32_t id = ok ? a.ids[at] : -1;
            float dot = 0;
            if (id >= static_cast<int32_t>(a.experts)) {
                const float weight = a.weights[at];
                for (uint32_t h = threadIdx.x; h < a.hidden; h += THREADS) {
                    float d = static_cast<float>(dy[h]);
                    dot = fmaf(d, static_cast<float>(x[h]), dot);
                    dx[h] = fmaf(weight, d, dx[h]);
                }
                dot = block_sum(dot);
            } else if (id >= 0) {
                dot = from[a.hidden + k];
            }
            if (threadIdx.x == 0)
                a.dweights[at] = dot;
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    gate_kernel(uint32_t tokens, uint32_t hidden, const T *x, const float *v, float *gate)
{
    for (uint32_t t = blockIdx.x; t < tokens; t += gridDim.x) {
        float dot = 0;
        for (uint32_t h = threadIdx.x; h < hidden; h += THREADS)
            dot = fmaf(static_cast<float>(x[static_cast<size_t>(t) * hidden + h]), v[h], dot);
        dot = block_sum(dot);
        if (threadIdx.x == 0)
            gate[t] = 1.0f / (1.0f + expf(-dot));
    }
}

__global__ void __launch_bounds__(THREADS)
    gate_backward_kernel(uint32_t tokens, uint32_t hidden, const uint8_t *ok, const float *gate,
                         const float *v, float *dgate, float *dx)
{
    for (uint32_t t = blockIdx.x; t < tokens; t += gridDim.x) {
        const bool counts = ok == nullptr || ok[t] != 0;
        const float d = counts ? dgate[t] * gate[t] * (1.0f - gate[t]) : 0.0f;
        for (uint32_t h = threadIdx.x; counts && h < hidden; h += THREADS)
            dx[static_cast<size_t>(t) * hidden + h] += d * v[h];
        __syncthreads();
        if (threadIdx.x == 0)
            dgate[t] = d;
    }
}

template <typename T>
__global__ void finish_kernel(size_t n, uint32_t hidden, const uint8_t *ok,
                              const struct moe_cuda_dx_parts p, T *to)
{
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
         i += stride) {
        const float shared = p.shared != nullptr ? p.shared[i] : 0.0f;
        to[i] = static_cast<T>(ok[i / hidden] != 0 ? p.experts[i] + p.router[i] + shared : 0.0f);
    }
}

} // namespace

struct moe_status moe_cuda_sort_tokens(const struct moe_cuda_sorted_tokens *a, cudaStream_t stream)
{
    if (a->tokens == 0)
        return moe_ok();
    sort_kernel<<<(a->tokens + THREADS - 1) / THREADS, THREADS, 0, stream>>>(*a);
    return MOE_LAUNCHED("sorting tokens");
}

struct moe_status moe_cuda_clear_rows(uint32_t tokens, size_t row_bytes, const uint8_t *use,
                                      const void *from, void *x, void *dy, cudaStream_t stream)
{
    if (tokens == 0)
        return moe_ok();
    clear_kernel<<<blocks_of(tokens), THREADS, 0, stream>>>(
        tokens, row_bytes / sizeof(uint16_t), use, static_cast<const uint16_t *>(from),
        static_cast<uint16_t *>(x), static_cast<uint16_t *>(dy));
    return MOE_LAUNCHED("clearing rows");
}

struct moe_status moe_cuda_split_x_dy_rows(const uint32_t *rows_in_use, size_t row_bytes,
                                           const void *pairs, void *x, void *dy,
                                           cudaStream_t stream)
{
    if (row_bytes % sizeof(uint4) == 0)
        launch_split<uint4>(rows_in_use, row_bytes, pairs, x, dy, stream);
    else
        launch_split<uint16_t>(rows_in_use, row_bytes, pairs, x, dy, stream);
    return MOE_LAUNCHED("splitting rows");
}

struct moe_status moe_cuda_label_rows(const struct moe_cuda_label_rows *a, cudaStream_t stream)
{
    label_kernel<<<MAX_BLOCKS, THREADS, 0, stream>>>(*a);
    return MOE_LAUNCHED("labelling rows");
}

struct moe_status moe_cuda_home_gradients(const struct moe_cuda_home_gradients *a,
                                          cudaStream_t stream)
{
    if (a->tokens == 0)
        return moe_ok();
    BY_DTYPE(a->dtype, blocks_of(a->tokens), home_kernel, *a);
    return MOE_LAUNCHED("gradients at home");
}

struct moe_status moe_cuda_shared_gate(uint32_t tokens, uint32_t hidden, enum moe_dtype dtype,
                                       const void *x, const float *v, float *gate,
                                       cudaStream_t stream)
{
    if (tokens == 0)
        return moe_ok();
    if (dtype == MOE_DTYPE_BF16)
        gate_kernel<<<blocks_of(tokens), THREADS, 0, stream>>>(
            tokens, hidden, static_cast<const __nv_bfloat16 *>(x), v, gate);
    else
        gate_kernel<<<blocks_of(tokens), THREADS, 0, stream>>>(
            tokens, hidden, static_cast<const float *>(x), v, gate);
    return MOE_LAUNCHED("the shared expert's gate");
}

struct moe_status moe_cuda_shared_gate_backward(uint32_t tokens, uint32_t hidden, const uint8_t *ok,
                                                const float *gate, const float *v, float *dgate,
                                                float *dx, cudaStream_t stream)
{
    if (tokens == 0)
        return moe_ok();
    gate_backward_kernel<<<blocks_of(tokens), THREADS, 0, stream>>>(tokens, hidden, ok, gate, v,
                                                                    dgate, dx);
    return MOE_LAUNCHED("the shared gate's backward pass");
}

struct moe_status moe_cuda_finish_dx(uint32_t tokens, uint32_t hidden, enum moe_dtype dtype,
                                     const uint8_t *ok, const struct moe_cuda_dx_parts *parts,
                                     void *to, cudaStream_t stream)
{
    if (tokens == 0)
        return moe_ok();
    size_t n = static_cast<size_t>(tokens) * hidden;
    if (dtype == MOE_DTYPE_BF16)
        finish_kernel<<<MAX_BLOCKS, THREADS, 0, stream>>>(n, hidden, ok, *parts,
                                                          static_cast<__nv_bfloat16 *>(to));
    else
        finish_kernel<<<MAX_BLOCKS, THREADS, 0, stream>>>(n, hidden, ok, *parts,
                                                          static_cast<float *>(to));
    return MOE_LAUNCHED("rounding gradients");
}

template <typename T> static struct moe_status load_dtype()
{
    return moe_cuda_load(home_kernel<T>, gate_kernel<T>, finish_kernel<T>);
}

struct moe_status moe_cuda_load_train_kernels(void)
{
    MOE_TRY(load_dtype<float>());
    MOE_TRY(load_dtype<__nv_bfloat16>());
    return moe_cuda_load(sort_kernel, clear_kernel, split_kernel<uint4>, split_kernel<uint16_t>,
                         label_kernel, gate_backward_kernel);
}
