/* SPDX-License-Identifier: Apache-2.0 */
/* Start times of kernels, for the times of a step's stages. An event between the kernels of a
 * captured step costs two microseconds; this costs one store. */
#ifndef MOE_CUDA_STAMP_CUH
#define MOE_CUDA_STAMP_CUH

#include <stdint.h>

/* The device's clock in nanoseconds; it may advance in steps of up to a microsecond. */
__device__ inline uint64_t clock_ns()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

/* The grid's first thread stores the time at `at`: pinned or device memory, or NULL. */
__device__ inline void stamp_begin(uint64_t *at)
{
    if (at != nullptr && (blockIdx.x | blockIdx.y | blockIdx.z | threadIdx.x) == 0)
        *(volatile uint64_t *)at = clock_ns();
}

#endif
