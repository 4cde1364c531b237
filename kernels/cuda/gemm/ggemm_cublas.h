/* SPDX-License-Identifier: Apache-2.0 */
/* The products of ggemm.h by cuBLAS, for GPUs without Hopper's instructions, and wherever the
 * option `gemm` of the device asks for it: the same formulas, bf16 in, fp32 accumulate and
 * epilogue.
 *
 * cuBLAS wants sizes from the host, and counts exist only on the device. But rows of an expert
 * start at multiples of MOE_ROW_ALIGN, so every aligned block of that many rows belongs to one
 * expert: a small kernel writes the addresses of weights, rows and results of each block, and one
 * batched call of a fixed size multiplies them all. Nothing waits, and a captured launch serves all
 * counts. The price: blocks that nobody owns are multiplied too, so time goes by row_capacity and
 * not by the rows that came; and gate and up leave as fp32 before the activation takes them.
 *
 * The library is loaded when the first handle is made: Hopper machines need none. */
#ifndef MOE_CUDA_GGEMM_CUBLAS_H
#define MOE_CUDA_GGEMM_CUBLAS_H

#include "cuda/gemm/ggemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A handle of the device that is current on the thread that makes it. Calls must not overlap. */
struct moe_cuda_cublas;

/* Errors: MOE_FAILED_PRECONDITION/UNSUPPORTED when the library is not found or refuses. */
struct moe_status moe_cuda_cublas_open(struct moe_cuda_cublas **out) MOE_CHECKED;
void moe_cuda_cublas_close(struct moe_cuda_cublas *cublas); /* NULL is ignored */

/* Whether these shapes are served; all others are the caller's fallback's. */
bool moe_cuda_cublas_serves(uint32_t n, uint32_t k);

/* Device memory that one product needs, 256-byte aligned: cuBLAS's own workspace, addresses, and
 * fp32 results of a bounded number of rows where they do not go straight to `out`. Products that
 * run one after the other may share it. 0 on overflow. */
size_t moe_cuda_cublas_scratch_bytes(bool gated, enum moe_dtype out_dtype, uint32_t row_capacity,
                                     uint32_t n);

/* As moe_cuda_ggemm_enqueue, with these differences: `tile` and the maps of `weights` do not count;
 * there is no `back`, and rows have no stride of their own; each expert starts at a multiple of
 * MOE_ROW_ALIGN; rows of `out` that no expert owns are written
 * with anything, up to row_capacity. Which kernel cuBLAS takes depends on row_capacity, and with it
 * the order of sums: a row's bits are the same in every batch of one capacity only. */
struct moe_status moe_cuda_cublas_enqueue(struct moe_cuda_cublas *cublas,
                                          const struct moe_cuda_ggemm *g, void *scratch,
                                          struct CUstream_st *stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
