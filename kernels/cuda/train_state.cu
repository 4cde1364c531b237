/* Kernels over a trainer's blocks; see trainer.h. */
#include "cuda/load.h"
#include "cuda/trainer.h"

#include <cuda_bf16.h>

namespace
{

constexpr uint32_t THREADS = 256, MOST_BLOCKS = 132 * 16;

unsigned blocks_of(size_t n)
{
    size_t blocks = (n + THREADS - 1) / THREADS;
    return static_cast<unsigned>(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS);
}

__device__ size_t first_index()
{
    return static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ size_t index_step()
{
    return static_cast<size_t>(gridDim.x) * blockDim.x;
}

template <typename T> __global__ void store_kernel(const float *values, size_t n, T *to)
{
    for (size_t i = first_index(); i < n; i += index_step())
        to[i] = static_cast<T>(values[i]);
}

/* Block b sums the b-th part; its threads' sums are added in one fixed tree. */
__global__ void __launch_bounds__(THREADS)
    squares_kernel(const float *v, size_t n, double *partials)
{
    __shared__ double part[THREADS];
    double sum = 0;
    for (size_t i = first_index(); i < n; i += index_step())
        sum += static_cast<double>(v[i]) * v[i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (uint32_t d = THREADS / 2; d > 0; d /= 2) {
        if (threadIdx.x < d)
            part[threadIdx.x] += part[threadIdx.x + d];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        partials[blockIdx.x] = part[0];
}

struct update_args {
    struct moe_train_update u;
    size_t n;
    float *value, *grad, *moment1, *moment2;
};

__device__ float step(const struct moe_train_update &u, float value, float grad, float *m1,
                      float *m2)
{
    return u.optimizer == MOE_OPTIMIZER_ADAMW ? moe_train_adamw(&u, value, grad, m1, m2)
                                              : moe_train_sgd(&u, value, grad, m1);
}

__device__ void store4(float *to, const float4 &v)
{
    *reinterpret_cast<float4 *>(to) = v;
}

__device__ void store4(__nv_bfloat16 *to, const float4 &v)
{
    union {
        __nv_bfloat162 pair[2];
        uint2 all;
    } u;
    u.pair[0] = __floats2bfloat162_rn(v.x, v.y);
    u.pair[1] = __floats2bfloat162_rn(v.z, v.w);
    *reinterpret_cast<uint2 *>(to) = u.all;
}

/* Four elements at a time: all arrays are aligned to 16 bytes. */
template <typename T> __global__ void update_kernel(const update_args a, T *resident)
{
    const size_t fours = a.n / 4;
    for (size_t i = first_index(); i < fours; i += index_step()) {
        float4 value = reinterpret_cast<float4 *>(a.value)[i];
        float4 grad = reinterpret_cast<float4 *>(a.grad)[i];
        float4 m1 = reinterpret_cast<float4 *>(a.moment1)[i];
        float4 m2 = a.moment2 != nullptr ? reinterpret_cast<float4 *>(a.moment2)[i] : float4{};
        value.x = step(a.u, value.x, grad.x, &m1.x, &m2.x);
        value.y = step(a.u, value.y, grad.y, &m1.y, &m2.y);
        value.z = step(a.u, value.z, grad.z, &m1.z, &m2.z);
        value.w = step(a.u, value.w, grad.w, &m1.w, &m2.w);
        reinterpret_cast<float4 *>(a.value)[i] = value;
        reinterpret_cast<float4 *>(a.grad)[i] = float4{};
        reinterpret_cast<float4 *>(a.moment1)[i] = m1;
        if (a.moment2 != nullptr)
            reinterpret_cast<float4 *>(a.moment2)[i] = m2;
        if (resident != nullptr)
            store4(resident + 4 * i, value);
    }
    for (size_t i = 4 * fours + first_index(); i < a.n; i += index_step()) {
        float unused = 0, *m2 = a.moment2 != nullptr ? a.moment2 + i : &unused;
        a.value[i] = step(a.u, a.value[i], a.grad[i], a.moment1 + i, m2);
        a.grad[i] = 0.0f;
        if (resident != nullptr)
            resident[i] = static_cast<T>(a.value[i]);
    }
}

__global__ void sum_sources_kernel(const struct moe_sources s, size_t n, float *to)
{
    for (size_t i = first_index(); i < n; i += index_step()) {
        float sum = 0;
        bool first = true;
        for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++) {
            if (s.from[slot] == nullptr)
                continue;
            sum = first ? s.from[slot][i] : sum + s.from[slot][i];
            first = false;
        }
        to[i] = sum;
    }
}

__global__ void add_loads_kernel(uint32_t experts, const uint32_t *counted, uint64_t *loads)
{
    uint32_t e = blockIdx.x * blockDim.x + threadIdx.x;
    if (e < experts)
        loads[e] += counted[e];
}

__device__ size_t row_of(enum moe_cuda_rows order, size_t row)
{
    if (order == MOE_CUDA_ROWS_PLAIN)
        return row;
    return MOE_CUDA_GATE_ROW(row) + (order == MOE_CUDA_ROWS_UP ? MOE_CUDA_INTERLEAVE : 0);
}

template <typename T> __global__ void merge_kernel(const struct moe_cuda_merge m)
{
    const size_t each = static_cast<size_t>(m.out) * m.in, n = each * m.entries;
    for (size_t i = first_index(); i < n; i += index_step()) {
        const size_t entry = i / each, row = i % each / m.in, column = i % m.in;
        const float *a = m.a + entry * m.rank * m.in + column;
        const float *b = m.b + (entry * m.out + row) * m.rank;
        float sum = 0;
        for (uint32_t r = 0; r < m.rank; r++)
            sum = fmaf(b[r], a[static_cast<size_t>(r) * m.in], sum);
        const size_t at = (entry * m.stored_rows + row_of(m.order, row)) * m.in + column;
        float w = static_cast<float>(static_cast<const T *>(m.base)[at]);
        static_cast<T *>(m.resident)[at] = static_cast<T>(fmaf(m.scale, sum, w));
    }
}

} // namespace

struct moe_status moe_cuda_store_values(const float *values, size_t n, enum moe_dtype dtype,
                                        void *to, cudaStream_t stream)
{
    if (n == 0)
        return moe_ok();
    if (dtype == MOE_DTYPE_BF16)
        store_kernel<<<blocks_of(n), THREADS, 0, stream>>>(values, n,
                                                           static_cast<__nv_bfloat16 *>(to));
    else
        store_kernel<<<blocks_of(n), THREADS, 0, stream>>>(values, n, static_cast<float *>(to));
    return MOE_LAUNCHED("storing weights");
}

struct moe_status moe_cuda_sum_squares(const float *v, size_t n, double *partials,
                                       cudaStream_t stream)
{
    squares_kernel<<<MOE_CUDA_SUM_PARTS, THREADS, 0, stream>>>(v, n, partials);
    return MOE_LAUNCHED("a norm");
}

struct moe_status moe_cuda_update(const struct moe_train_update *u, size_t n, float *value,
                                  float *grad, float *moment1, float *moment2, enum moe_dtype dtype,
                                  void *resident, cudaStream_t stream)
{
    if (n == 0)
        return moe_ok();
    const update_args a = {*u, n, value, grad, moment1, moment2};
    const unsigned blocks = blocks_of((n + 3) / 4);
    if (dtype == MOE_DTYPE_BF16)
        update_kernel<<<blocks, THREADS, 0, stream>>>(a, static_cast<__nv_bfloat16 *>(resident));
    else
        update_kernel<<<blocks, THREADS, 0, stream>>>(a, static_cast<float *>(resident));
    return MOE_LAUNCHED("an optimizer step");
}

struct moe_status moe_cuda_sum_sources(const struct moe_sources *sources, size_t n, float *to,
                                       cudaStream_t stream)
{
    if (n == 0)
        return moe_ok();
    sum_sources_kernel<<<blocks_of(n), THREADS, 0, stream>>>(*sources, n, to);
    return MOE_LAUNCHED("summing gradients");
}

struct moe_status moe_cuda_add_loads(uint32_t experts, const uint32_t *counted, uint64_t *loads,
                                     cudaStream_t stream)
{
    add_loads_kernel<<<(experts + THREADS - 1) / THREADS, THREADS, 0, stream>>>(experts, counted,
                                                                                loads);
    return MOE_LAUNCHED("adding loads");
}

struct moe_status moe_cuda_merge_adapter(const struct moe_cuda_merge *m, cudaStream_t stream)
{
    const size_t n = static_cast<size_t>(m->entries) * m->out * m->in;
    if (n == 0)
        return moe_ok();
    if (m->dtype == MOE_DTYPE_BF16)
        merge_kernel<__nv_bfloat16><<<blocks_of(n), THREADS, 0, stream>>>(*m);
    else
        merge_kernel<float><<<blocks_of(n), THREADS, 0, stream>>>(*m);
    return MOE_LAUNCHED("merging adapters");
}

struct moe_status moe_cuda_load_train_state(void)
{
    MOE_TRY(moe_cuda_load(store_kernel<float>, update_kernel<float>, merge_kernel<float>));
    MOE_TRY(moe_cuda_load(store_kernel<__nv_bfloat16>, update_kernel<__nv_bfloat16>,
                          merge_kernel<__nv_bfloat16>));
    return moe_cuda_load(squares_kernel, sum_sources_kernel, add_loads_kernel);
}
