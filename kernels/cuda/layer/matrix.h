/* SPDX-License-Identifier: Apache-2.0 */
/* Layout of a layer's weights in device memory. */
#ifndef MOE_CUDA_MATRIX_H
#define MOE_CUDA_MATRIX_H

#include "cuda/plan/packing.h"
#include "moe/types.h"

#include <stddef.h>
#include <stdint.h>

enum { MOE_CUDA_INTERLEAVE = 8 };

/* [entries][rows][columns] row-major in device memory, 256-aligned; or packed. Expert matrices
 * have one entry per local expert, the others one entry. */
struct moe_cuda_matrix {
    void *data;           /* NULL before the first upload, and for matrices that the layer lacks */
    enum moe_dtype dtype; /* of all entries; F32 once an F32 tensor has arrived; packed: NONE */
    enum moe_cuda_packing packing; /* quantised weights that stay so; else NONE */
    uint32_t entries;
    uint32_t rows;    /* includes zero padding */
    uint32_t columns; /* never padded */
    size_t bytes;
};

/* Position of a weight's rows in the stored matrix. */
enum moe_cuda_rows { MOE_CUDA_ROWS_PLAIN, MOE_CUDA_ROWS_GATE, MOE_CUDA_ROWS_UP };

/* Row of the interleaved matrix that holds row i of gate. Row i of up is MOE_CUDA_INTERLEAVE
 * later. */
#define MOE_CUDA_GATE_ROW(i)                                                                       \
    ((i) / MOE_CUDA_INTERLEAVE * (2 * MOE_CUDA_INTERLEAVE) + (i) % MOE_CUDA_INTERLEAVE)

#endif
