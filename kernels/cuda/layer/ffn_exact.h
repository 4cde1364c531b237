/* SPDX-License-Identifier: Apache-2.0 */
/* The exact fp32 experts, and small helpers of ffn.c: the launch functions of ffn_exact.cu. They
 * only enqueue. */
#ifndef MOE_CUDA_FFN_EXACT_H
#define MOE_CUDA_FFN_EXACT_H

#include "cuda/layer/step_params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rows == NULL: the shared expert on the step parameters' tokens; else the routed experts on
 * `rows`. */
struct moe_cuda_exact {
    const struct moe_layer
        *layer; /* for its shape; the step parameters name the layer with the weights */
    const struct moe_cuda_step_params *params; /* device memory */
    const struct moe_rows *rows;               /* tables in device memory; `expert` is not read */
    enum moe_dtype in_dtype;
    const void *in;
    const float *weight; /* per row; NULL = 1 */
    void *out;
    enum moe_dtype out_dtype; /* BF16, or any other: F32 */
    uint64_t *began;          /* receives the kernel's start time, or NULL */
};

/* out [rows, I] = activation, with a gate or without. `weight` is used for input weighting only. */
struct moe_status moe_cuda_exact_gate_up(const struct moe_cuda_exact *e,
                                         cudaStream_t stream) MOE_CHECKED;
/* out [rows, W] = result. `weight` is unused for input weighting. */
struct moe_status moe_cuda_exact_down(const struct moe_cuda_exact *e,
                                      cudaStream_t stream) MOE_CHECKED;
/* out [T, columns] = in times a matrix that is not an expert's; `rows` and `weight` are NULL. */
struct moe_status moe_cuda_exact_linear(const struct moe_cuda_exact *e,
                                        enum moe_cuda_matrices which,
                                        cudaStream_t stream) MOE_CHECKED;

/* weight [T] = sigmoid(shared gate vector . x), with T from the step parameters, at most
 * `capacity`. `began` as above. */
struct moe_status moe_cuda_shared_weights(const struct moe_layer *layer,
                                          const struct moe_cuda_step_params *params,
                                          enum moe_dtype dtype, uint32_t capacity, const void *x,
                                          float *weight, uint64_t *began,
                                          cudaStream_t stream) MOE_CHECKED;
/* y [n] += v [n] */
struct moe_status moe_cuda_add(float *y, const float *v, size_t n, cudaStream_t stream) MOE_CHECKED;

/* dst [n] = src [n], between F32 and BF16. */
struct moe_status moe_cuda_narrow(const float *src, void *dst, size_t n,
                                  cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_widen(const void *src, float *dst, size_t n,
                                 cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
