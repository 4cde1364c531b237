/* SPDX-License-Identifier: Apache-2.0 */
/* The products of ggemm.h by cuBLAS, for GPUs without Hopper's instructions and where the device's
 * option `gemm` asks for it. Same formulas: bf16 in, fp32 accumulate and epilogue.
 *
 * cuBLAS needs sizes from the host, but counts exist only on the device. Rows of an expert start at
 * multiples of MOE_ROW_ALIGN, so every aligned block of that many rows belongs to one expert. A
 * small kernel writes the addresses of weights, rows and results of each block, and one batched
 * call of constant size multiplies all blocks. Nothing waits, and a captured launch serves all
 * counts. The cost: blocks without an owner are multiplied too, so time follows row_capacity, not
 * the number of rows. Gate and up pass through memory as fp32 before the activation.
 *
 * The library is loaded with the first handle: Hopper machines do not need it. */
#ifndef MOE_CUDA_GGEMM_CUBLAS_H
#define MOE_CUDA_GGEMM_CUBLAS_H

#include "cuda/gemm/ggemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A handle for the device that is current when the handle is made. Calls must not overlap. */
struct moe_cuda_cublas;

/* Errors: MOE_FAILED_PRECONDITION/UNSUPPORTED if the library is not found or refuses. */
struct moe_status moe_cuda_cublas_open(struct moe_cuda_cublas **out) MOE_CHECKED;
void moe_cuda_cublas_close(struct moe_cuda_cublas *cublas); /* NULL is ignored */

/* Whether these shapes are supported. For all others the caller uses its fallback. */
bool moe_cuda_cublas_serves(uint32_t n, uint32_t k);

/* Device memory for one product, 256-byte aligned: cuBLAS's workspace, addresses, and fp32 results
 * of a bounded number of rows unless they go straight to `out`. Products that run one after the
 * other may share it. 0 on overflow. */
size_t moe_cuda_cublas_scratch_bytes(bool gated, enum moe_dtype out_dtype, uint32_t row_capacity,
                                     uint32_t n);

/* Like moe_cuda_ggemm_enqueue, with these differences: `tile` and the maps of `weights` are
 * ignored; `back` and strides are not supported; each expert starts at a multiple of MOE_ROW_ALIGN;
 * rows of `out` without an owner get undefined values, up to row_capacity. cuBLAS chooses its
 * kernel by row_capacity, and the kernel sets the order of sums: a row's bits are the same only in
 * batches of one capacity. */
struct moe_status moe_cuda_cublas_enqueue(struct moe_cuda_cublas *cublas,
                                          const struct moe_cuda_ggemm *g, void *scratch,
                                          struct CUstream_st *stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
