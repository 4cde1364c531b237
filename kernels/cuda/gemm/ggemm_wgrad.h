/* SPDX-License-Identifier: Apache-2.0 */
/* Gradient of grouped weights on Hopper's tensor cores, the third of the grouped products:
 *
 *   dw[e] [n, k] (+)= dY_e^T X_e      over the rows of local expert e, bf16 in, fp32 out
 *
 * The kernel reads counts on the device, as in ggemm.h: nothing waits, and a captured launch serves
 * all counts. The same input gives the same bits on any number of multiprocessors. */
#ifndef MOE_CUDA_GGEMM_WGRAD_H
#define MOE_CUDA_GGEMM_WGRAD_H

#include "cuda/plan/limits.h"

#include "base/status.h"

#include <stdint.h>

struct CUstream_st;

#ifdef __cplusplus
extern "C" {
#endif

/* All pointers are device memory, 16-byte aligned (start and count: 4). Expert e owns rows start[e]
 * .. start[e] + count[e] - 1 of x and dy, at any alignment. The values of all other rows do not
 * matter. */
struct moe_cuda_wgrad {
    uint32_t experts;              /* local ones, 1..MOE_CUDA_MAX_EXPERTS */
    uint32_t row_capacity;         /* rows of x and dy */
    uint32_t n, k;                 /* columns of dy and of x, multiples of 8; multiples of 64 are
                                      faster */
    const uint32_t *start, *count; /* [experts] */
    const void *dy;                /* bf16 [row_capacity, n] */
    const void *x;                 /* bf16 [row_capacity, k] */
    uint32_t dy_stride, x_stride;  /* elements from row to row, multiples of 8; 0 = n and k */
    bool accumulate;     /* true: adds to dw, and leaves experts without rows unchanged. false:
                            overwrites all of dw, experts without rows with zeros */
    float *dw;           /* [experts, n, k] */
    uint32_t processors; /* limit of multiprocessors, an even number >= 2; 0 = all */
};

/* Launches a kernel on `stream`, or two for more than 512 experts; capturable. For shapes and
 * devices that moe_cuda_ggemm_serves. Errors: as moe_cuda_ggemm_enqueue. */
struct moe_status moe_cuda_wgrad_enqueue(const struct moe_cuda_wgrad *w,
                                         struct CUstream_st *stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
