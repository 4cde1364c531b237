/* SPDX-License-Identifier: Apache-2.0 */
/* How the weights of a layer lie in device memory. */
#ifndef MOE_CUDA_MATRIX_H
#define MOE_CUDA_MATRIX_H

#include "moe/types.h"

#include <stddef.h>
#include <stdint.h>

enum { MOE_CUDA_INTERLEAVE = 8 };

/* [entries][rows][columns] row-major in device memory, 4096-aligned. Expert matrices have an entry
 * per local expert, the others one. */
struct moe_cuda_matrix {
    void *data; /* NULL until the first upload of it, and for matrices that the layer lacks */
    enum moe_dtype dtype; /* of all entries: F32 as soon as one came as F32 */
    uint32_t entries;
    uint32_t rows;    /* padding included, which is zeros */
    uint32_t columns; /* never padded */
    size_t bytes;
};

/* Which rows of a stored matrix a weight's rows are. */
enum moe_cuda_rows { MOE_CUDA_ROWS_PLAIN, MOE_CUDA_ROWS_GATE, MOE_CUDA_ROWS_UP };

/* Row of the interleaved matrix that holds row i of gate; that of up is MOE_CUDA_INTERLEAVE later.
 */
#define MOE_CUDA_GATE_ROW(i)                                                                       \
    ((i) / MOE_CUDA_INTERLEAVE * (2 * MOE_CUDA_INTERLEAVE) + (i) % MOE_CUDA_INTERLEAVE)

#endif
