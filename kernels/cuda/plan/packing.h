/* SPDX-License-Identifier: Apache-2.0 */
/* How quantised weights lie in device memory: a pure function of their format, and the sizes.
 *
 * A packed matrix is [entries][tiles of 128 rows][steps of 128 columns] of blocks. A block holds
 * the elements of its 128 x 128 weights and then their scales, so that one bulk copy loads all that
 * a step of a product needs (cuda/gemm/packed.h). Elements beyond the matrix are zeros. */
#ifndef MOE_CUDA_PACKING_H
#define MOE_CUDA_PACKING_H

#include "moe/weight_format.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum moe_cuda_packing {
    MOE_CUDA_PACKING_NONE, /* bf16 or fp32, not packed */
    /* E4M3. An fp32 scale for 128 columns multiplies the product of these columns, in fp32. */
    MOE_CUDA_PACKING_F8_BLOCK, /* 8 rows share a scale */
    MOE_CUDA_PACKING_F8_ROW,   /* each row has its own */
    /* A scale 2^(byte - 127) for 32 columns of a row multiplies the elements in bf16, which is
     * exact for scales up to 2^65. */
    MOE_CUDA_PACKING_F8_E8M0,
    MOE_CUDA_PACKING_E2M1_E8M0,
    /* A positive scale E4M3 for 16 columns of a row multiplies the elements in bf16, which is
     * exact. An fp32 scale of the matrix multiplies the product. */
    MOE_CUDA_PACKING_E2M1_E4M3,
    /* Elements minus their zero point are multiplied by a scale, and rounded to bf16. Scales are
     * at most 2^27. */
    MOE_CUDA_PACKING_INT4_ROW,         /* fp32 scale (rounded to bf16 before) and zero point for 128
                                          columns of a row */
    MOE_CUDA_PACKING_INT4_GROUP,       /* bf16 scale for 32 columns of a row; the zero point is 8 */
    MOE_CUDA_PACKING_INT4_GROUP_ZEROS, /* the same with zero points */
    /* W8A8: E4M3 with scales as in F8_BLOCK and F8_ROW, for rows that are quantised too. */
    MOE_CUDA_PACKING_W8A8_BLOCK, /* 128 rows of the matrix share a scale */
    MOE_CUDA_PACKING_W8A8_ROW,   /* a scale is that of all columns */
    MOE_CUDA_PACKING_COUNT
};

enum { MOE_CUDA_PACKED_ROWS = 128, MOE_CUDA_PACKED_COLUMNS = 128 }; /* of a block */

/* The packing for matrices of this format; NONE if there is none. */
enum moe_cuda_packing moe_cuda_packing_of(const struct moe_weight_format *format);

/* Whether products with these weights quantise the rows that they multiply. */
static inline bool moe_cuda_packing_is_w8a8(enum moe_cuda_packing packing)
{
    return packing == MOE_CUDA_PACKING_W8A8_BLOCK || packing == MOE_CUDA_PACKING_W8A8_ROW;
}

/* Bytes of a block, and of one entry with its padding; `rows` as stored. */
size_t moe_cuda_packed_block_bytes(enum moe_cuda_packing packing);
size_t moe_cuda_packed_bytes(enum moe_cuda_packing packing, size_t rows, size_t columns);

#ifdef __cplusplus
}
#endif

#endif
