/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that lay out weights: rows to their positions, dtype to dtype, one element per thread and
 * iteration; no shared memory. They reach a fraction of the memory's speed, far more than that of
 * the bus that delivers the weights. */
#include "cuda/layer/weights.h"

#include <cuda_bf16.h>

static constexpr unsigned THREADS = 256, MAX_BLOCKS = 1024;

static __device__ size_t row_of(enum moe_cuda_rows order, size_t row)
{
    switch (order) {
    case MOE_CUDA_ROWS_GATE: return MOE_CUDA_GATE_ROW(row);
    case MOE_CUDA_ROWS_UP: return MOE_CUDA_GATE_ROW(row) + MOE_CUDA_INTERLEAVE;
    default: return row;
    }
}

template <typename From, typename To>
static __global__ void place(const From *__restrict__ src, size_t first, size_t n, size_t columns,
                             enum moe_cuda_rows order, To *__restrict__ dst)
{
    size_t stride = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride) {
        size_t row = (first + i) / columns, column = (first + i) % columns;
        dst[row_of(order, row) * columns + column] = (To)src[i];
    }
}

template <typename From, typename To>
static void launch(const struct moe_cuda_weight *w, const void *src, size_t first, size_t n,
                   cudaStream_t stream)
{
    size_t blocks = (n + THREADS - 1) / THREADS;
    unsigned grid = blocks < MAX_BLOCKS ? (unsigned)blocks : MAX_BLOCKS;
    place<<<grid, THREADS, 0, stream>>>((const From *)src, first, n, w->columns, w->order,
                                        (To *)w->dst);
}

struct moe_status moe_cuda_weights_place(const struct moe_cuda_weight *w, const void *src,
                                         size_t first, size_t n, cudaStream_t stream)
{
    if (n == 0)
        return moe_ok();
    if (w->from == MOE_DTYPE_F32)
        launch<float, float>(w, src, first, n, stream);
    else if (w->to == MOE_DTYPE_F32)
        launch<__nv_bfloat16, float>(w, src, first, n, stream);
    else
        launch<__nv_bfloat16, __nv_bfloat16>(w, src, first, n, stream);
    return MOE_LAUNCHED("laying out a weight");
}

/* A piece has less than 2^31 bytes: divisions of 32 bits are several times faster. */
static __global__ void part_rows(const uint8_t *__restrict__ src, uint32_t total, uint32_t bytes,
                                 uint32_t second, uint8_t *__restrict__ dst)
{
    uint32_t stride = gridDim.x * THREADS;
    for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i < total; i += stride) {
        uint32_t row = i / bytes;
        dst[row % 2 * second + row / 2 * bytes + i % bytes] = src[i];
    }
}

struct moe_status moe_cuda_weights_part(const void *src, uint32_t count, uint32_t bytes, void *dst,
                                        cudaStream_t stream)
{
    uint32_t total = count * bytes, blocks = (total + THREADS - 1) / THREADS;
    unsigned grid = blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS;
    if (total == 0)
        return moe_ok();
    part_rows<<<grid, THREADS, 0, stream>>>((const uint8_t *)src, total, bytes,
                                            moe_cuda_second_half(count, bytes), (uint8_t *)dst);
    return MOE_LAUNCHED("parting rows");
}

static __global__ void split(const float *__restrict__ src, size_t n,
                             __nv_bfloat16 *__restrict__ dst)
{
    size_t stride = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride) {
        float rest = src[i];
        for (int part = 0; part < 3; part++) {
            __nv_bfloat16 b = __float2bfloat16_rn(rest);
            dst[part * n + i] = b;
            rest -= __bfloat162float(b);
        }
    }
}

struct moe_status moe_cuda_weights_split(const void *src, size_t n, void *dst, cudaStream_t stream)
{
    split<<<MAX_BLOCKS, THREADS, 0, stream>>>((const float *)src, n, (__nv_bfloat16 *)dst);
    return MOE_LAUNCHED("splitting a weight");
}
