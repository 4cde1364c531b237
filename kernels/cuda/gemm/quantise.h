/* SPDX-License-Identifier: Apache-2.0 */
/* Quantises rows for products with W8A8 weights, by the rules of enum moe_activation_format.
 *
 * Quantised rows lie in one buffer: E4M3 [row_capacity, columns], with rows at multiples of 16
 * bytes, and then fp32 scales [steps of 128 columns, row_capacity rounded up to 4]. The scale of a
 * whole row is stored for each of its steps, so that products know one layout.
 *
 * Rows on their way to experts have another layout (moe/row_format.h): the scales of a row follow
 * its codes. Products read such codes where they are, and a copy of the scales in this layout. */
#ifndef MOE_CUDA_QUANTISE_H
#define MOE_CUDA_QUANTISE_H

#include "base/status.h"
#include "cuda/plan/packing.h"
#include "moe/types.h"

#include <stddef.h>
#include <stdint.h>

struct CUstream_st;

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes from row to row. */
static inline uint32_t moe_cuda_quantised_stride(uint32_t columns)
{
    return (columns + 15) / 16 * 16;
}

/* Steps of 128 columns. */
static inline uint32_t moe_cuda_quantised_steps(uint32_t columns)
{
    return (columns + MOE_CUDA_PACKED_COLUMNS - 1) / MOE_CUDA_PACKED_COLUMNS;
}

/* Scales from step to step. */
static inline uint32_t moe_cuda_quantised_scales(uint32_t rows)
{
    return (rows + 3) / 4 * 4;
}

/* Byte offset of the scales in the buffer. */
static inline size_t moe_cuda_quantised_offset(uint32_t rows, uint32_t columns)
{
    return ((size_t)rows * moe_cuda_quantised_stride(columns) + 255) / 256 * 256;
}

/* Bytes of the buffer. */
static inline size_t moe_cuda_quantised_bytes(uint32_t rows, uint32_t columns)
{
    return moe_cuda_quantised_offset(rows, columns) + (size_t)moe_cuda_quantised_steps(columns) *
                                                          moe_cuda_quantised_scales(rows) *
                                                          sizeof(float);
}

/* All pointers are device memory, 16-byte aligned (start, count and weight: 4). */
struct moe_cuda_quantise {
    enum moe_dtype dtype; /* of x: BF16 or F32 */
    const void *x;        /* [row_capacity, columns] */
    const float *weight;  /* [row_capacity] multiplies a row first; NULL = 1 */
    uint32_t experts;     /* 1.. MOE_CUDA_MAX_EXPERTS */
    uint32_t row_capacity, columns;
    const uint32_t *start, *count; /* [experts] rows to quantise, as in struct moe_cuda_ggemm */
    bool whole_rows;               /* one group is a row, not 128 columns of it */
    bool pow2;                     /* scales are rounded up to powers of two */
    void *quantised;               /* the buffer, or NULL */
    uint32_t row_bytes; /* not 0: `quantised` are rows of moe/row_format.h with so many bytes */
    float *values;   /* instead of it: [row_capacity, columns] quantised value * scale, for products
                        in fp32 */
    uint64_t *began; /* receives the kernel's start time (stamp.cuh), or NULL */
    uint32_t processors; /* limit of multiprocessors; 0 = all */
};

/* Enqueues one kernel; capturable. Other rows of the result are not written. Errors:
 * MOE_INVALID_ARGUMENT (dtype, or a size of 0), MOE_INTERNAL (the launch was refused). */
struct moe_status moe_cuda_quantise_enqueue(const struct moe_cuda_quantise *q,
                                            struct CUstream_st *stream) MOE_CHECKED;

/* Rows of moe/row_format.h, for products. Pointers as above. */
struct moe_cuda_unpack {
    const void *rows;   /* [row_capacity, row_bytes] */
    uint32_t row_bytes; /* a multiple of 16 */
    uint32_t experts;   /* 1.. MOE_CUDA_MAX_EXPERTS */
    uint32_t row_capacity, columns;
    const uint32_t *start, *count; /* [experts] rows to unpack */
    bool whole_rows;               /* a row has one scale */
    float *scales;                 /* as in the buffer above, or NULL */
    float *values;   /* instead of them: [row_capacity, columns] value * scale, for products in
                        fp32 */
    uint64_t *began; /* receives the kernel's start time (stamp.cuh), or NULL */
};

/* Enqueues one kernel; capturable. Other rows of the result are not written. Errors as above. */
struct moe_status moe_cuda_unpack_enqueue(const struct moe_cuda_unpack *u,
                                          struct CUstream_st *stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
