/* SPDX-License-Identifier: Apache-2.0 */
/* Which tile the grouped GEMM uses: a pure function of what the host knows before a step. It never
 * sees real counts, which exist only on the device. So one captured graph serves all routings of a
 * bucket, and the same bucket always gets the same kernel. */
#ifndef MOE_CUDA_GEMM_CHOICE_H
#define MOE_CUDA_GEMM_CHOICE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Tiles with a number are narrow: as wide as that, for products with few tiles. Their results have
 * the same bits as those of the wide tile of that name. */
enum moe_cuda_gemm_tile {
    MOE_CUDA_TILE_DECODE,   /* few rows per expert: streams weights at memory speed */
    MOE_CUDA_TILE_EVEN,     /* hundreds of rows: equal tiles that lose little to rounding */
    MOE_CUDA_TILE_PINGPONG, /* many rows, or short K: the fastest full tile */
    MOE_CUDA_TILE_DECODE_64,
    MOE_CUDA_TILE_DECODE_32,
    MOE_CUDA_TILE_EVEN_64,
    MOE_CUDA_TILE_COUNT
};

/* A tile of the output (up to `rows` rows of an expert), one step of K, how many steps are in
 * flight, and the most experts of a product: their table takes the rest of the shared memory. */
struct moe_cuda_tile_shape {
    uint32_t rows, columns, depth, stages, experts;
};

enum { MOE_CUDA_PINGPONG_EXPERTS = 512 };

struct moe_cuda_tile_shape moe_cuda_tile_shape(enum moe_cuda_gemm_tile tile);

/* The wide tile with the same bits; a wide tile itself. */
enum moe_cuda_gemm_tile moe_cuda_wide_tile(enum moe_cuda_gemm_tile tile);

struct moe_cuda_gemm_params {
    uint32_t bucket;     /* tokens that one slot may bring to the step */
    uint32_t slots;      /* live slots of the group */
    uint32_t top_k;      /* experts per token */
    uint32_t experts;    /* routed experts of the layer, over all slots */
    uint32_t n, k;       /* output columns (gate and up together) and depth of the product */
    uint32_t processors; /* multiprocessors that the product gets; 0 = not known, wide tiles */
};

/* Rows that one expert gets when full buckets are routed evenly, rounded up; at least 1. */
uint32_t moe_cuda_expected_rows(const struct moe_cuda_gemm_params *params);

/* Experts of one slot that get rows when each token of full buckets takes random experts, rounded
 * to the nearest number; at least 1. */
uint32_t moe_cuda_expected_hits(const struct moe_cuda_gemm_params *params);

/* A tile that can have all experts of the layer, so that every slot chooses alike. Rows decide
 * about its form; then experts that get rows, columns and multiprocessors decide about its width.
 */
enum moe_cuda_gemm_tile moe_cuda_choose_tile(const struct moe_cuda_gemm_params *params);

/* For packed weights: DECODE for few rows, else EVEN. Both give the same bits. */
enum moe_cuda_gemm_tile moe_cuda_choose_packed_tile(const struct moe_cuda_gemm_params *params);

#ifdef __cplusplus
}
#endif

#endif
