/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels over a trainer's blocks; see trainer.h. */
#include "cuda/core/load.h"
#include "cuda/gemm/packed_layout.cuh"
#include "cuda/plan/limits.h"
#include "cuda/training/trainer.h"

#include <cuda_bf16.h>

namespace
{

constexpr uint32_t THREADS = 256, MAX_BLOCKS = 132 * 16;

unsigned blocks_of(size_t n)
{
    size_t blocks = (n + THREADS - 1) / THREADS;
    return static_cast<unsigned>(blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS);
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

/* Adds the threads' sums in one fixed tree; the result is in thread 0. */
template <uint32_t N> __device__ double sum_of_block(double sum)
{
    __shared__ double part[N];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (uint32_t d = N / 2; d > 0; d /= 2) {
        if (threadIdx.x < d)
            part[threadIdx.x] += part[threadIdx.x + d];
        __syncthreads();
    }
    return part[0];
}

__device__ double square(float v)
{
    return static_cast<double>(v) * v;
}

/* CTA b takes every MOE_CUDA_SUM_PARTS-th piece of SQUARES fours from the b-th on and adds their
 * squares to sums[b]. */
constexpr uint32_t SQUARES = 4;
__global__ void __launch_bounds__(THREADS) squares_kernel(const float *v, size_t n, double *sums)
{
    const size_t fours = reinterpret_cast<uintptr_t>(v) % sizeof(float4) == 0 ? n / 4 : 0;
    const float4 *from = reinterpret_cast<const float4 *>(v);
    double sum[SQUARES] = {};
    for (size_t i = static_cast<size_t>(blockIdx.x) * THREADS * SQUARES + threadIdx.x; i < fours;
         i += static_cast<size_t>(gridDim.x) * THREADS * SQUARES) {
        float4 w[SQUARES];
        for (uint32_t j = 0; j < SQUARES; j++)
            w[j] = i + j * THREADS < fours ? __ldcs(from + i + j * THREADS) : float4{};
        for (uint32_t j = 0; j < SQUARES; j++)
            sum[j] += (square(w[j].x) + square(w[j].y)) + (square(w[j].z) + square(w[j].w));
    }
    for (size_t i = 4 * fours + first_index(); i < n; i += index_step())
        sum[0] += square(v[i]);
    double all = sum_of_block<THREADS>((sum[0] + sum[1]) + (sum[2] + sum[3]));
    if (threadIdx.x == 0)
        sums[blockIdx.x] += all;
}
static_assert(SQUARES == 4, "all partial sums are added");

/* CTA w adds the partial sums of the w-th sum and stores the result after them. */
__global__ void __launch_bounds__(THREADS) finish_squares_kernel(double *sums)
{
    double *mine = sums + blockIdx.x * (MOE_CUDA_SUM_PARTS + 1);
    double sum = 0;
    for (uint32_t i = threadIdx.x; i < MOE_CUDA_SUM_PARTS; i += THREADS)
        sum += mine[i];
    sum = sum_of_block<THREADS>(sum);
    if (threadIdx.x == 0)
        mine[MOE_CUDA_SUM_PARTS] = sum;
}

struct update_args {
    struct moe_train_update u;
    size_t n;
    float *value, *moment1, *moment2;
    const float *grad;
};

template <bool ADAMW>
__device__ float step(const struct moe_train_update &u, float value, float grad, float *m1,
                      float *m2)
{
    return ADAMW ? moe_train_adamw(&u, value, grad, m1, m2) : moe_train_sgd(&u, value, grad, m1);
}

__device__ void store4(float *to, const float4 &v)
{
    __stcs(reinterpret_cast<float4 *>(to), v);
}

__device__ void store4(__nv_bfloat16 *to, const float4 &v)
{
    union {
        __nv_bfloat162 pair[2];
        uint2 all;
    } u;
    u.pair[0] = __floats2bfloat162_rn(v.x, v.y);
    u.pair[1] = __floats2bfloat162_rn(v.z, v.w);
    __stcs(reinterpret_cast<uint2 *>(to), u.all);
}

__device__ float4 load4(const float *from, size_t four)
{
    return __ldcs(reinterpret_cast<const float4 *>(from) + four);
}

template <typename T, bool ADAMW>
__device__ void update_four(const update_args &a, T *resident, size_t i)
{
    float4 value = load4(a.value, i), grad = load4(a.grad, i), m1 = load4(a.moment1, i);
    float4 m2 = ADAMW ? load4(a.moment2, i) : float4{};
    value.x = step<ADAMW>(a.u, value.x, grad.x, &m1.x, &m2.x);
    value.y = step<ADAMW>(a.u, value.y, grad.y, &m1.y, &m2.y);
    value.z = step<ADAMW>(a.u, value.z, grad.z, &m1.z, &m2.z);
    value.w = step<ADAMW>(a.u, value.w, grad.w, &m1.w, &m2.w);
    store4(a.value + 4 * i, value);
    store4(a.moment1 + 4 * i, m1);
    if (ADAMW)
        store4(a.moment2 + 4 * i, m2);
    if (resident != nullptr)
        store4(resident + 4 * i, value);
}

/* A thread updates four elements, which was the fastest of the ways tried. Nothing is used twice,
 * so nothing should stay in the cache. All arrays are aligned to 16 bytes; the first CTA updates
 * the few elements after the last four. */
template <typename T, bool ADAMW>
__global__ void __launch_bounds__(THREADS) update_kernel(const update_args a, T *resident)
{
    const size_t fours = a.n / 4, i = first_index(), last = 4 * fours + threadIdx.x;
    if (i < fours)
        update_four<T, ADAMW>(a, resident, i);
    if (blockIdx.x > 0 || last >= a.n)
        return;
    float unused = 0;
    a.value[last] = step<ADAMW>(a.u, a.value[last], a.grad[last], a.moment1 + last,
                                ADAMW ? a.moment2 + last : &unused);
    if (resident != nullptr)
        resident[last] = static_cast<T>(a.value[last]);
}

template <typename T> void launch_update(const update_args &a, void *resident, cudaStream_t stream)
{
    constexpr size_t each = static_cast<size_t>(4) * THREADS;
    const unsigned blocks = static_cast<unsigned>((a.n + each - 1) / each);
    T *to = static_cast<T *>(resident);
    if (a.u.optimizer == MOE_OPTIMIZER_ADAMW)
        update_kernel<T, true><<<blocks, THREADS, 0, stream>>>(a, to);
    else
        update_kernel<T, false><<<blocks, THREADS, 0, stream>>>(a, to);
}

__global__ void sum_sources_kernel(const struct moe_sources s, size_t n, float *to)
{
    for (size_t i = first_index(); i < n; i += index_step()) {
        float sum = s.from[0][i];
        for (uint32_t j = 1; j < s.count; j++)
            sum += s.from[j][i];
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

/* Element `column` of stored row `row` of an entry of W0. */
template <typename T, bool PACKED>
__device__ float base_of(const struct moe_cuda_merge &m, size_t entry, size_t row, size_t column)
{
    if (PACKED)
        return packed::value(m.packing, static_cast<const uint8_t *>(m.base) + entry * m.base_bytes,
                             static_cast<uint32_t>(row), static_cast<uint32_t>(column), m.in);
    return static_cast<float>(
        static_cast<const T *>(m.base)[(entry * m.stored_rows + row) * m.in + column]);
}

template <typename T, bool PACKED> __global__ void merge_kernel(const struct moe_cuda_merge m)
{
    const size_t each = static_cast<size_t>(m.out) * m.in, n = each * m.entries;
    for (size_t i = first_index(); i < n; i += index_step()) {
        const size_t entry = i / each, row = i % each / m.in, column = i % m.in;
        const float *a = m.a + entry * m.rank * m.in + column;
        const float *b = m.b + (entry * m.out + row) * m.rank;
        float sum = 0;
        for (uint32_t r = 0; r < m.rank; r++)
            sum = fmaf(b[r], a[static_cast<size_t>(r) * m.in], sum);
        const size_t stored = row_of(m.order, row);
        const float w = base_of<T, PACKED>(m, entry, stored, column);
        static_cast<T *>(m.resident)[(entry * m.stored_rows + stored) * m.in + column] =
            static_cast<T>(fmaf(m.scale, sum, w));
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

struct moe_status moe_cuda_clear_squares(double *sums, cudaStream_t stream)
{
    return MOE_CUDA(cudaMemsetAsync(
        sums, 0, MOE_CUDA_SQUARES * (MOE_CUDA_SUM_PARTS + 1) * sizeof *sums, stream));
}

struct moe_status moe_cuda_add_squares(const float *v, size_t n, double *sums,
                                       enum moe_cuda_squares which, cudaStream_t stream)
{
    if (n == 0)
        return moe_ok();
    squares_kernel<<<MOE_CUDA_SUM_PARTS, THREADS, 0, stream>>>(
        v, n, sums + which * (MOE_CUDA_SUM_PARTS + 1));
    return MOE_LAUNCHED("a norm");
}

struct moe_status moe_cuda_read_squares(double *sums, double squares[MOE_CUDA_SQUARES],
                                        cudaStream_t stream)
{
    finish_squares_kernel<<<MOE_CUDA_SQUARES, THREADS, 0, stream>>>(sums);
    MOE_TRY(MOE_LAUNCHED("a norm"));
    const size_t pitch = (MOE_CUDA_SUM_PARTS + 1) * sizeof *sums;
    MOE_TRY(MOE_CUDA(cudaMemcpy2DAsync(squares, sizeof *squares, sums + MOE_CUDA_SUM_PARTS, pitch,
                                       sizeof *squares, MOE_CUDA_SQUARES, cudaMemcpyDeviceToHost,
                                       stream)));
    return MOE_CUDA(cudaStreamSynchronize(stream));
}

struct moe_status moe_cuda_update(const struct moe_train_update *u, size_t n, float *value,
                                  const float *grad, float *moment1, float *moment2,
                                  enum moe_dtype dtype, void *resident, cudaStream_t stream)
{
    if (n == 0)
        return moe_ok();
    const update_args a = {*u, n, value, moment1, moment2, grad};
    if (dtype == MOE_DTYPE_BF16)
        launch_update<__nv_bfloat16>(a, resident, stream);
    else
        launch_update<float>(a, resident, stream);
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
    if (m->packing != MOE_CUDA_PACKING_NONE)
        merge_kernel<__nv_bfloat16, true><<<blocks_of(n), THREADS, 0, stream>>>(*m);
    else if (m->dtype == MOE_DTYPE_BF16)
        merge_kernel<__nv_bfloat16, false><<<blocks_of(n), THREADS, 0, stream>>>(*m);
    else
        merge_kernel<float, false><<<blocks_of(n), THREADS, 0, stream>>>(*m);
    return MOE_LAUNCHED("merging adapters");
}

struct moe_status moe_cuda_load_train_state(void)
{
    MOE_TRY(moe_cuda_load(store_kernel<float>, update_kernel<float, true>,
                          update_kernel<float, false>, merge_kernel<float, false>));
    MOE_TRY(moe_cuda_load(store_kernel<__nv_bfloat16>, update_kernel<__nv_bfloat16, true>,
                          update_kernel<__nv_bfloat16, false>, merge_kernel<__nv_bfloat16, false>));
    return moe_cuda_load(merge_kernel<__nv_bfloat16, true>, squares_kernel, finish_squares_kernel,
                         sum_sources_kernel, add_loads_kernel);
}
