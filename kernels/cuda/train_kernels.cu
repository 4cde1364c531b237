/* Row-wise kernels of a backward pass; see train_kernels.h. A block works on a row at a time, and
 * sums over a row are made by all its threads in one fixed tree. */
#include "cuda/train_kernels.h"

#include "cuda/load.h"
#include "cuda/simt.cuh"

namespace
{

constexpr uint32_t THREADS = 256, MOST_BLOCKS = 132 * 8;

__device__ float block_sum(float v)
{
    __shared__ float part[THREADS / 32], all;
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0;
        for (uint32_t i = 0; i < THREADS / 32; i++)
            sum += part[i];
        all = sum;
    }
    __syncthreads();
    return all;
}

/* A row that counts, and its group; false for padding and for rows left out. */
__device__ bool find_row(const struct moe_cuda_row_groups &r, uint32_t row, uint32_t *group)
{
    *group = 0;
    if (r.start == nullptr)
        return r.use == nullptr || r.use[row] != 0;
    *group = moe_simt::group_of({r.start, r.count, r.groups, r.rows}, row);
    return row - r.start[*group] < r.count[*group];
}

__device__ uint32_t rows_of(const struct moe_cuda_row_groups &r)
{
    return r.start != nullptr ? r.start[r.groups] : r.rows;
}

unsigned blocks_of(uint32_t rows)
{
    return rows < MOST_BLOCKS ? rows : MOST_BLOCKS;
}

/* -------------------------------------------------------------- activation */

struct slopes {
    float value, gate, up; /* h, dh/dg, dh/du */
};

__device__ slopes activate(const struct moe_cuda_activation_backward &a, float g, float u)
{
    float dg = 1.0f, du = 1.0f, alpha = 1.0f, shift = 0.0f;
    if (a.activation != MOE_ACT_SWIGLU) {
        dg = g > a.limit ? 0.0f : 1.0f;
        du = fabsf(u) > a.limit ? 0.0f : 1.0f;
        g = fminf(g, a.limit);
        u = fminf(fmaxf(u, -a.limit), a.limit);
    }
    if (a.activation == MOE_ACT_SWIGLU_OAI) {
        alpha = a.alpha;
        shift = 1.0f;
    }
    float s = 1.0f / (1.0f + expf(-alpha * g));
    return {g * s * (u + shift), dg * (u + shift) * s * (1.0f + alpha * g * (1.0f - s)),
            du * g * s};
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
        float *dh = a.dh + static_cast<size_t>(row) * a.inner;
        float dot = 0;
        for (uint32_t i = threadIdx.x; i < padded; i += THREADS) {
            float *g = pre + MOE_CUDA_GATE_ROW(i), *u = g + MOE_CUDA_INTERLEAVE;
            if (i >= a.inner) {
                *g = *u = 0.0f;
                continue;
            }
            float gate = *g * in + (a.gate_bias != nullptr ? a.gate_bias[bias + i] : 0.0f);
            float up = *u * in + (a.up_bias != nullptr ? a.up_bias[bias + i] : 0.0f);
            slopes s = activate(a, gate, up);
            float d = dh[i];
            dot = fmaf(d, s.value, dot);
            *g = out * d * s.gate;
            *u = out * d * s.up;
            dh[i] = out * s.value;
        }
        if (a.dweight == nullptr || a.input_weighting)
            continue;
        if (a.down_bias != nullptr) {
            const T *dy = static_cast<const T *>(a.dy) + static_cast<size_t>(row) * a.hidden;
            const float *b = a.down_bias + static_cast<size_t>(group) * a.hidden;
            for (uint32_t h = threadIdx.x; h < a.hidden; h += THREADS)
                dot = fmaf(static_cast<float>(dy[h]), b[h], dot);
        }
        dot = block_sum(dot);
        if (threadIdx.x == 0)
            a.dweight[row] = dot;
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) input_kernel(const struct moe_cuda_input_backward a)
{
    for (uint32_t row = blockIdx.x; row < rows_of(a.rows); row += gridDim.x) {
        uint32_t group;
        if (!find_row(a.rows, row, &group))
            continue;
        const float weight = a.weight[row];
        const T *x = static_cast<const T *>(a.x) + static_cast<size_t>(row) * a.hidden;
        float *dx = a.dx + static_cast<size_t>(row) * a.dx_stride;
        float *dgu = a.dgu + static_cast<size_t>(row) * a.dgu_columns;
        float dot = 0;
        for (uint32_t h = threadIdx.x; h < a.hidden; h += THREADS) {
            dot = fmaf(dx[h], static_cast<float>(x[h]), dot);
            dx[h] *= weight;
        }
        for (uint32_t i = threadIdx.x; i < a.dgu_columns; i += THREADS)
            dgu[i] *= weight;
        dot = block_sum(dot);
        if (threadIdx.x == 0)
            a.dweight[row] = dot;
    }
}

__global__ void __launch_bounds__(THREADS)
    half_kernel(const struct moe_cuda_row_groups rows, uint32_t inner, const float *dgu, float *out)
{
    const size_t columns = 2 * ((inner + 7) / 8 * 8);
    for (uint32_t row = blockIdx.x; row < rows_of(rows); row += gridDim.x)
        for (uint32_t i = threadIdx.x; i < inner; i += THREADS)
            out[static_cast<size_t>(row) * inner + i] = dgu[row * columns + MOE_CUDA_GATE_ROW(i)];
}

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
    split_kernel<<<MOST_BLOCKS, THREADS, 0, stream>>>(
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
__global__ void round_kernel(size_t n, uint32_t hidden, const uint8_t *ok, const float *from, T *to)
{
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride)
        to[i] = static_cast<T>(ok[i / hidden] != 0 ? from[i] : 0.0f);
}

} // namespace

/* Instantiates `kernel` for the dtype of tokens. */
#define BY_DTYPE(dtype, blocks, kernel, ...)                                                       \
    do {                                                                                           \
        if ((dtype) == MOE_DTYPE_BF16)                                                             \
            kernel<__nv_bfloat16><<<blocks, THREADS, 0, stream>>>(__VA_ARGS__);                    \
        else                                                                                       \
            kernel<float><<<blocks, THREADS, 0, stream>>>(__VA_ARGS__);                            \
    } while (0)

struct moe_status moe_cuda_activation_backward(const struct moe_cuda_activation_backward *a,
                                               cudaStream_t stream)
{
    if (a->rows.rows == 0 || a->rows.groups == 0)
        return moe_ok();
    BY_DTYPE(a->dtype, blocks_of(a->rows.rows), activation_kernel, *a);
    return MOE_LAUNCHED("the activation's backward pass");
}

struct moe_status moe_cuda_input_backward(const struct moe_cuda_input_backward *a,
                                          cudaStream_t stream)
{
    if (a->rows.rows == 0 || a->rows.groups == 0)
        return moe_ok();
    BY_DTYPE(a->dtype, blocks_of(a->rows.rows), input_kernel, *a);
    return MOE_LAUNCHED("the weighted input's backward pass");
}

struct moe_status moe_cuda_take_half(const struct moe_cuda_row_groups *rows, uint32_t inner,
                                     const float *dgu, float *out, cudaStream_t stream)
{
    if (rows->rows == 0 || rows->groups == 0)
        return moe_ok();
    half_kernel<<<blocks_of(rows->rows), THREADS, 0, stream>>>(*rows, inner, dgu, out);
    return MOE_LAUNCHED("taking gradients apart");
}

struct moe_status moe_cuda_sort_tokens(const struct moe_cuda_sorted_tokens *a, cudaStream_t stream)
{
    if (a->tokens == 0)
        return moe_ok();
    sort_kernel<<<(a->tokens + THREADS - 1) / THREADS, THREADS, 0, stream>>>(*a);
    return MOE_LAUNCHED("sorting tokens");
}

struct moe_status moe_cuda_split_pairs(const uint32_t *rows_in_use, size_t row_bytes,
                                       const void *pairs, void *x, void *dy, cudaStream_t stream)
{
    if (row_bytes % sizeof(uint4) == 0)
        launch_split<uint4>(rows_in_use, row_bytes, pairs, x, dy, stream);
    else
        launch_split<uint16_t>(rows_in_use, row_bytes, pairs, x, dy, stream);
    return MOE_LAUNCHED("splitting rows");
}

struct moe_status moe_cuda_label_rows(const struct moe_cuda_label_rows *a, cudaStream_t stream)
{
    label_kernel<<<MOST_BLOCKS, THREADS, 0, stream>>>(*a);
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

struct moe_status moe_cuda_round_rows(uint32_t tokens, uint32_t hidden, enum moe_dtype dtype,
                                      const uint8_t *ok, const float *from, void *to,
                                      cudaStream_t stream)
{
    if (tokens == 0)
        return moe_ok();
    size_t n = static_cast<size_t>(tokens) * hidden;
    if (dtype == MOE_DTYPE_BF16)
        round_kernel<<<MOST_BLOCKS, THREADS, 0, stream>>>(n, hidden, ok, from,
                                                          static_cast<__nv_bfloat16 *>(to));
    else
        round_kernel<<<MOST_BLOCKS, THREADS, 0, stream>>>(n, hidden, ok, from,
                                                          static_cast<float *>(to));
    return MOE_LAUNCHED("rounding gradients");
}

template <typename T> static struct moe_status load_dtype()
{
    return moe_cuda_load(activation_kernel<T>, input_kernel<T>, home_kernel<T>, gate_kernel<T>,
                         round_kernel<T>);
}

struct moe_status moe_cuda_load_train_kernels(void)
{
    MOE_TRY(load_dtype<float>());
    MOE_TRY(load_dtype<__nv_bfloat16>());
    return moe_cuda_load(sort_kernel, split_kernel<uint4>, split_kernel<uint16_t>, label_kernel,
                         half_kernel, gate_backward_kernel);
}
