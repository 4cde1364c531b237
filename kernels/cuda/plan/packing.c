/* SPDX-License-Identifier: Apache-2.0 */
/* See packing.h. */
#include "cuda/plan/packing.h"

enum {
    ROWS = MOE_CUDA_PACKED_ROWS,
    COLUMNS = MOE_CUDA_PACKED_COLUMNS,
    ELEMENTS = ROWS * COLUMNS,
    SCALE_ROWS = 8,
    GROUP = 32,
    SMALL_GROUP = 16
};

static enum moe_cuda_packing packing_of_f8(const struct moe_weight_format *f)
{
    if (f->scale != MOE_SCALE_E4M3 && f->block_columns % COLUMNS == 0)
        return f->block_rows % SCALE_ROWS == 0 ? MOE_CUDA_PACKING_F8_BLOCK
                                               : MOE_CUDA_PACKING_F8_ROW;
    return f->scale == MOE_SCALE_E8M0 && f->block_columns % GROUP == 0 ? MOE_CUDA_PACKING_F8_E8M0
                                                                       : MOE_CUDA_PACKING_NONE;
}

static enum moe_cuda_packing packing_of_e2m1(const struct moe_weight_format *f)
{
    if (f->scale == MOE_SCALE_E4M3 && f->block_columns % SMALL_GROUP == 0)
        return MOE_CUDA_PACKING_E2M1_E4M3;
    return f->scale == MOE_SCALE_E8M0 && f->block_columns % GROUP == 0 ? MOE_CUDA_PACKING_E2M1_E8M0
                                                                       : MOE_CUDA_PACKING_NONE;
}

static enum moe_cuda_packing packing_of_int4(const struct moe_weight_format *f)
{
    if (f->scale != MOE_SCALE_E4M3 && f->block_columns % COLUMNS == 0)
        return MOE_CUDA_PACKING_INT4_ROW;
    if (f->scale != MOE_SCALE_BF16 || f->block_columns % GROUP != 0)
        return MOE_CUDA_PACKING_NONE;
    return f->zero_points ? MOE_CUDA_PACKING_INT4_GROUP_ZEROS : MOE_CUDA_PACKING_INT4_GROUP;
}

/* A group of activations is 128 columns or a whole row. */
static enum moe_cuda_packing packing_of_w8a8(const struct moe_weight_format *f)
{
    bool blocks = f->block_columns == COLUMNS || f->block_columns == 0;
    if (f->encoding != MOE_ENC_F8E4M3 || f->scale == MOE_SCALE_E4M3 || !blocks)
        return MOE_CUDA_PACKING_NONE;
    if (f->block_rows % ROWS == 0)
        return MOE_CUDA_PACKING_W8A8_BLOCK;
    return f->block_columns == 0 ? MOE_CUDA_PACKING_W8A8_ROW : MOE_CUDA_PACKING_NONE;
}

enum moe_cuda_packing moe_cuda_packing_of(const struct moe_weight_format *f)
{
    if (f->activations != MOE_ACTIVATIONS_PLAIN)
        return packing_of_w8a8(f);
    switch (f->encoding) {
    case MOE_ENC_F8E4M3: return packing_of_f8(f);
    case MOE_ENC_E2M1: return packing_of_e2m1(f);
    case MOE_ENC_INT4: return packing_of_int4(f);
    default: return MOE_CUDA_PACKING_NONE;
    }
}

size_t moe_cuda_packed_block_bytes(enum moe_cuda_packing packing)
{
    static const size_t bytes[MOE_CUDA_PACKING_COUNT] = {
        [MOE_CUDA_PACKING_F8_BLOCK] = ELEMENTS + ROWS / SCALE_ROWS * sizeof(float),
        [MOE_CUDA_PACKING_F8_ROW] = ELEMENTS + ROWS * sizeof(float),
        [MOE_CUDA_PACKING_F8_E8M0] = ELEMENTS + ELEMENTS / GROUP,
        [MOE_CUDA_PACKING_E2M1_E8M0] = ELEMENTS / 2 + ELEMENTS / GROUP,
        [MOE_CUDA_PACKING_E2M1_E4M3] =
            ELEMENTS / 2 + ELEMENTS / SMALL_GROUP + ROWS / SCALE_ROWS * sizeof(float),
        [MOE_CUDA_PACKING_INT4_ROW] = ELEMENTS / 2 + ROWS * (sizeof(float) + 1),
        [MOE_CUDA_PACKING_INT4_GROUP] = ELEMENTS / 2 + ELEMENTS / GROUP * sizeof(uint16_t),
        [MOE_CUDA_PACKING_INT4_GROUP_ZEROS] =
            ELEMENTS / 2 + ELEMENTS / GROUP * (sizeof(uint16_t) + 1),
        [MOE_CUDA_PACKING_W8A8_BLOCK] = ELEMENTS + ROWS / SCALE_ROWS * sizeof(float),
        [MOE_CUDA_PACKING_W8A8_ROW] = ELEMENTS + ROWS * sizeof(float),
    };
    return bytes[packing];
}

size_t moe_cuda_packed_bytes(enum moe_cuda_packing packing, size_t rows, size_t columns)
{
    size_t tiles = (rows + ROWS - 1) / ROWS;
    size_t steps = (columns + COLUMNS - 1) / COLUMNS;
    return tiles * steps * moe_cuda_packed_block_bytes(packing);
}
