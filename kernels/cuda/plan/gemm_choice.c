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
    PACKED_FEW_ROWS = 24,   /* a tile of 32 rows: most experts need one */
    EVEN_MIN_K = 1025,      /* below, storing a tile costs more than rounding up */
    EVEN_64_MAX_ROWS = 160, /* few experts get more than one tile of 192 rows */
    EVEN_64_MAX_WAVES = 2,
    DECODE_32_MAX_ROWS = 32,     /* above, most of the bytes are rows */
    DECODE_32_MAX_PER_CENT = 60, /* processors that tiles of 64 would have: above, 64 is faster */
    GOOD_PER_CENT = 90, /* of the processors are busy, on average over the waves of tiles */
    MANY_WAVES = 6,     /* a part of a wave more or less makes no difference */
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
        [MOE_CUDA_TILE_DECODE_64] =
            {.rows = 64, .columns = 64, .depth = 64, .stages = 12, .experts = MOE_CUDA_MAX_EXPERTS},
        [MOE_CUDA_TILE_DECODE_32] =
            {.rows = 64, .columns = 32, .depth = 64, .stages = 16, .experts = MOE_CUDA_MAX_EXPERTS},
        [MOE_CUDA_TILE_EVEN_64] =
            {.rows = 192, .columns = 64, .depth = 64, .stages = 6, .experts = MOE_CUDA_MAX_EXPERTS},
    };
    return shape[tile];
}

enum moe_cuda_gemm_tile moe_cuda_wide_tile(enum moe_cuda_gemm_tile tile)
{
    switch (tile) {
    case MOE_CUDA_TILE_DECODE_64:
    case MOE_CUDA_TILE_DECODE_32: return MOE_CUDA_TILE_DECODE;
    case MOE_CUDA_TILE_EVEN_64: return MOE_CUDA_TILE_EVEN;
    default: return tile;
    }
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

/* base^exponent for 0 <= base <= 1, with the same bits on every host. */
static double power(double base, uint64_t exponent)
{
    double result = 1;
    for (; exponent > 0; exponent /= 2) {
        if (exponent % 2 != 0)
            result *= base;
        base *= base;
    }
    return result;
}

/* Mean number of the slot's experts that get rows. */
static double mean_hits(const struct moe_cuda_gemm_params *params)
{
    const uint64_t tokens = (uint64_t)params->bucket * params->slots;
    if (params->slots == 0 || params->experts == 0)
        return 1;
    const double share = (double)params->top_k / params->experts;
    const double missed = share < 1 ? power(1 - share, tokens) : 0;
    return (1 - missed) * params->experts / params->slots;
}

uint32_t moe_cuda_expected_hits(const struct moe_cuda_gemm_params *params)
{
    const double hits = mean_hits(params);
    return hits < 1 ? 1 : (uint32_t)(hits + 0.5);
}

static uint64_t tiles_of(const struct moe_cuda_gemm_params *params, enum moe_cuda_gemm_tile tile)
{
    const uint32_t columns = moe_cuda_tile_shape(tile).columns;
    return (uint64_t)moe_cuda_expected_hits(params) * ((params->n + columns - 1) / columns);
}

/* Per cent of the processors' time in which they have a tile, if all tiles take the same time. */
static uint64_t busy_per_cent(const struct moe_cuda_gemm_params *params,
                              enum moe_cuda_gemm_tile tile)
{
    const uint64_t tiles = tiles_of(params, tile), all = params->processors;
    const uint64_t waves = (tiles + all - 1) / all;
    return waves > 0 ? 100 * tiles / (waves * all) : 0;
}

/* Whether all experts of the slot get rows. If not, the number of tiles varies from step to step.
 */
static bool hits_all(const struct moe_cuda_gemm_params *params)
{
    return mean_hits(params) * params->slots + 0.5 * params->slots > params->experts;
}

/* The wide tile if it keeps the processors as busy as tiles of 64 do, or busy enough. With a
 * varying number of tiles, 64: a last wave of few tiles then takes half the time. */
static enum moe_cuda_gemm_tile decode_tile(const struct moe_cuda_gemm_params *params, uint32_t rows)
{
    const enum moe_cuda_gemm_tile wide = MOE_CUDA_TILE_DECODE, narrow = MOE_CUDA_TILE_DECODE_64;
    const uint64_t all = params->processors;
    const bool known = hits_all(params);
    if (all == 0)
        return wide;
    const uint64_t busy = busy_per_cent(params, wide);
    if (known && rows <= DECODE_32_MAX_ROWS &&
        100 * tiles_of(params, narrow) < DECODE_32_MAX_PER_CENT * all)
        return MOE_CUDA_TILE_DECODE_32;
    if (!known && tiles_of(params, wide) < MANY_WAVES * all)
        return narrow;
    return busy >= GOOD_PER_CENT || busy >= busy_per_cent(params, narrow) ? wide : narrow;
}

static enum moe_cuda_gemm_tile even_tile(const struct moe_cuda_gemm_params *params, uint32_t rows)
{
    const bool few =
        rows <= EVEN_64_MAX_ROWS &&
        tiles_of(params, MOE_CUDA_TILE_EVEN) < (uint64_t)EVEN_64_MAX_WAVES * params->processors &&
        busy_per_cent(params, MOE_CUDA_TILE_EVEN) < GOOD_PER_CENT;
    return few ? MOE_CUDA_TILE_EVEN_64 : MOE_CUDA_TILE_EVEN;
}

enum moe_cuda_gemm_tile moe_cuda_choose_tile(const struct moe_cuda_gemm_params *params)
{
    uint32_t rows = moe_cuda_expected_rows(params);
    if (rows <= DECODE_MAX_ROWS)
        return decode_tile(params, rows);
    bool even = rows <= EVEN_MAX_ROWS && params->k >= EVEN_MIN_K;
    return even || params->experts > MOE_CUDA_PINGPONG_EXPERTS ? even_tile(params, rows)
                                                               : MOE_CUDA_TILE_PINGPONG;
}

enum moe_cuda_gemm_tile moe_cuda_choose_packed_tile(const struct moe_cuda_gemm_params *params)
{
    return moe_cuda_expected_rows(params) <= PACKED_FEW_ROWS ? MOE_CUDA_TILE_DECODE
                                                             : MOE_CUDA_TILE_EVEN;
}
