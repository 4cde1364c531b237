/* SPDX-License-Identifier: Apache-2.0 */
/* The exact fp32 experts, and small helpers of ffn.c: the launch functions of ffn_exact.cu. They
 * enqueue only. */
#ifndef MOE_CUDA_FFN_EXACT_H
#define MOE_CUDA_FFN_EXACT_H

#include "cuda/layer/step_params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rows == NULL: the shared expert on the tokens of the step parameters, else the routed experts on
 * their rows. */
struct moe_cuda_exact {
    const struct moe_layer
        *layer; /* for its shape: the step parameters name the layer that is run */
    const struct moe_cuda_step_params *params; /* device memory */
    const struct moe_rows *rows;               /* tables in device memory; `expert` is not read */
    enum moe_dtype in_dtype;
    const void *in;
    const float *weight; /* of each row; NULL = 1 */
    void *out;
    enum moe_dtype out_dtype; /* of gate_up; down writes F32 */
    uint64_t *began;          /* gets the time when the kernel began, or NULL */
};

/* out [rows, I] = activation; `weight` counts for input weighting only. */
struct moe_status moe_cuda_exact_gate_up(const struct moe_cuda_exact *e,
                                         cudaStream_t stream) MOE_CHECKED;
/* out [rows, H] = result; `weight` counts unless the layer weighs inputs. */
struct moe_status moe_cuda_exact_down(const struct moe_cuda_exact *e,
                                      cudaStream_t stream) MOE_CHECKED;

/* weight [T] = sigmoid(shared gate vector . x), for the step parameters' T, at most `capacity`.
 * `began` as above. */
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
