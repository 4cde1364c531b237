/* SPDX-License-Identifier: Apache-2.0 */
/* How kernels of a backward pass walk over grouped rows, and sum along one. Include it in one file
 * of kernels at a time: everything here is local to it. */
#ifndef MOE_CUDA_TRAIN_ROWS_CUH
#define MOE_CUDA_TRAIN_ROWS_CUH

#include "cuda/layer/simt.cuh"
#include "cuda/training/train_kernels.h"

namespace train_rows
{

constexpr uint32_t THREADS = 256, MAX_BLOCKS = 132 * 8;

__device__ inline float block_sum(float v)
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

/* A row that counts, and its group; false for padding and for excluded rows. */
__device__ inline bool find_row(const struct moe_cuda_row_groups &r, uint32_t row, uint32_t *group)
{
    *group = 0;
    if (r.start == nullptr)
        return r.use == nullptr || r.use[row] != 0;
    *group = moe_simt::group_of({r.start, r.count, r.groups, r.rows}, row);
    return row - r.start[*group] < r.count[*group];
}

__device__ inline uint32_t rows_of(const struct moe_cuda_row_groups &r)
{
    return r.start != nullptr ? r.start[r.groups] : r.rows;
}

inline unsigned blocks_of(uint32_t rows)
{
    return rows < MAX_BLOCKS ? rows : MAX_BLOCKS;
}

} // namespace train_rows

/* Instantiates `kernel` for the dtype of tokens. */
#define BY_DTYPE(dtype, blocks, kernel, ...)                                                       \
    do {                                                                                           \
        if ((dtype) == MOE_DTYPE_BF16)                                                             \
            kernel<__nv_bfloat16><<<blocks, THREADS, 0, stream>>>(__VA_ARGS__);                    \
        else                                                                                       \
            kernel<float><<<blocks, THREADS, 0, stream>>>(__VA_ARGS__);                            \
    } while (0)

#endif
