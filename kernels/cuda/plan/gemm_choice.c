/* SPDX-License-Identifier: Apache-2.0 */
/* The rule and the shapes; see gemm_choice.h. The bounds come from measurements on an H200 with
 * randomly routed rows, with counts that are never multiples of a tile
 * (tests/bench/results/products.md). */
#include "cuda/plan/gemm_choice.h"

#include "cuda/plan/limits.h"

enum {
    DECODE_MAX_ROWS = 64, /* one tile of 64 rows: only the bytes of weights matter */
    EVEN_MAX_ROWS =
        768, /* above, an expert's loss of half a tile of 128 costs less than even tiles */
    PACKED_FEW_ROWS = 24, /* a tile of 32 rows: most experts need one */
    EVEN_MIN_K = 1025,    /* below, storing a tile costs more than rounding up */
};

struct moe_cuda_tile_shape moe_cuda_tile_shape(enum moe_cuda_gemm_tile tile)
{
    static const struct moe_cuda_tile_shape shape[MOE_CUDA_TILE_COUNT] = {
        [MOE_CUDA_TILE_DECODE] =
            {.rows = 64, .columns = 128, .depth = 64, .stages = 8, .experts = MOE_CUDA_MAX_EXPERTS},
        [MOE_CUDA_TILE_EVEN] = {.rows = 192,
                                .columns = 128,
                                .depth = 64,
                                .stages = 5,
                                .experts = MOE_CUDA_MAX_EXPERTS},
        [MOE_CUDA_TILE_PINGPONG] = {.rows = 128,
                                    .columns = 128,
                                    .depth = 64,
                                    .stages = 6,
                                    .experts = MOE_CUDA_PINGPONG_EXPERTS},
    };
    return shape[tile];
}

uint32_t moe_cuda_expected_rows(const struct moe_cuda_gemm_params *params)
{
    uint64_t rows = (uint64_t)params->bucket * params->slots * params->top_k;
    uint64_t experts = params->experts > 0 ? params->experts : 1;
    uint64_t expected = (rows + experts - 1) / experts;
    if (expected == 0)
        return 1;
    return expected < UINT32_MAX ? (uint32_t)expected : UINT32_MAX;
}

enum moe_cuda_gemm_tile moe_cuda_choose_tile(const struct moe_cuda_gemm_params *params)
{
    uint32_t rows = moe_cuda_expected_rows(params);
    if (rows <= DECODE_MAX_ROWS)
        return MOE_CUDA_TILE_DECODE;
    bool even = rows <= EVEN_MAX_ROWS && params->k >= EVEN_MIN_K;
    return even || params->experts > MOE_CUDA_PINGPONG_EXPERTS ? MOE_CUDA_TILE_EVEN
                                                               : MOE_CUDA_TILE_PINGPONG;
}

enum moe_cuda_gemm_tile moe_cuda_choose_packed_tile(const struct moe_cuda_gemm_params *params)
{
    return moe_cuda_expected_rows(params) <= PACKED_FEW_ROWS ? MOE_CUDA_TILE_DECODE
                                                             : MOE_CUDA_TILE_EVEN;
}
