/* SPDX-License-Identifier: Apache-2.0 */
/* See packing.h. */
#include "cuda/plan/packing.h"

enum { ELEMENTS = MOE_CUDA_PACKED_ROWS * MOE_CUDA_PACKED_COLUMNS, SCALE_ROWS = 8, GROUP = 32 };

static enum moe_cuda_packing packing_of_f8(const struct moe_weight_format *f)
{
    if (f->scale != MOE_SCALE_E4M3 && f->block_columns % MOE_CUDA_PACKED_COLUMNS == 0)
        return f->block_rows % SCALE_ROWS == 0 ? MOE_CUDA_PACKING_F8_BLOCK
                                               : MOE_CUDA_PACKING_F8_ROW;
    return f->scale == MOE_SCALE_E8M0 && f->block_columns % GROUP == 0 ? MOE_CUDA_PACKING_F8_E8M0
                                                                       : MOE_CUDA_PACKING_NONE;
}

enum moe_cuda_packing moe_cuda_packing_of(const struct moe_weight_format *f)
{
    if (f->activations != MOE_ACTIVATIONS_PLAIN)
        return MOE_CUDA_PACKING_NONE; /* no kernel quantises rows */
    if (f->encoding == MOE_ENC_F8E4M3)
        return packing_of_f8(f);
    bool grouped = f->scale == MOE_SCALE_E8M0 && f->block_columns % GROUP == 0;
    return f->encoding == MOE_ENC_E2M1 && grouped ? MOE_CUDA_PACKING_E2M1_E8M0
                                                  : MOE_CUDA_PACKING_NONE;
}

size_t moe_cuda_packed_block_bytes(enum moe_cuda_packing packing)
{
    static const size_t bytes[MOE_CUDA_PACKING_COUNT] = {
        [MOE_CUDA_PACKING_F8_BLOCK] = ELEMENTS + MOE_CUDA_PACKED_ROWS / SCALE_ROWS * sizeof(float),
        [MOE_CUDA_PACKING_F8_ROW] = ELEMENTS + MOE_CUDA_PACKED_ROWS * sizeof(float),
        [MOE_CUDA_PACKING_F8_E8M0] = ELEMENTS + ELEMENTS / GROUP,
        [MOE_CUDA_PACKING_E2M1_E8M0] = ELEMENTS / 2 + ELEMENTS / GROUP,
    };
    return bytes[packing];
}

size_t moe_cuda_packed_bytes(enum moe_cuda_packing packing, size_t rows, size_t columns)
{
    size_t tiles = (rows + MOE_CUDA_PACKED_ROWS - 1) / MOE_CUDA_PACKED_ROWS;
    size_t steps = (columns + MOE_CUDA_PACKED_COLUMNS - 1) / MOE_CUDA_PACKED_COLUMNS;
    return tiles * steps * moe_cuda_packed_block_bytes(packing);
}
