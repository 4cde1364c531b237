/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the rows that a step can bring to a slot, by its shape. Counts are known on the device
 * only, so memory is for the most rows that are possible. */
#ifndef MOE_CUDA_ROWS_H
#define MOE_CUDA_ROWS_H

#include "moe/types.h"

#include <stddef.h>

/* Rows of a step of `bucket` tokens on each of the `live` slots, with padding: all choices of all
 * slots may come to one slot, and each expert's rows are padded to whole blocks. */
static inline uint32_t moe_cuda_max_rows(uint32_t live, uint32_t bucket, uint32_t top_k,
                                         uint32_t local_experts)
{
    uint32_t rows = live * bucket * top_k;
    uint32_t experts = local_experts < rows ? local_experts : rows;
    if (experts == 0)
        return 0;
    rows += experts * (MOE_ROW_ALIGN - 1);
    return rows / MOE_ROW_ALIGN * MOE_ROW_ALIGN;
}

/* Bytes of an arrived row of a forward step. Down's result lies over it: nothing reads the rows
 * after gate and up, and the next step's rows arrive after combine. */
static inline size_t moe_cuda_row_bytes(size_t hidden, enum moe_dtype dtype, enum moe_dtype result)
{
    size_t row = moe_dtype_bytes(dtype), out = moe_dtype_bytes(result);
    return hidden * (row > out ? row : out);
}

#endif
