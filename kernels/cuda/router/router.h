/* SPDX-License-Identifier: Apache-2.0 */
/* The router on a GPU: logits, then one kernel from logits to ids and weights. Everything is fp32.
 * A token's routing depends on that token alone, not on its batch or its place there. */
#ifndef MOE_CUDA_ROUTER_H
#define MOE_CUDA_ROUTER_H

#include "cuda/layer/step_params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Columns of the router that one CTA multiplies. The number is fixed, so that a token's logits are
 * the same sums in every batch. */
enum { MOE_CUDA_ROUTER_SLICE = 512 };

/* All in device memory; as in struct moe_step_args. */
struct moe_cuda_routing {
    enum moe_dtype dtype;
    uint32_t capacity; /* limit of the tokens in the step parameters */
    const struct moe_cuda_step_params *params;
    const void *x;           /* [T, H] */
    const uint8_t *mode;     /* [T]; read if the step parameters say that there are modes */
    const int32_t *ids_in;   /* [T, K], or NULL if no mode needs them */
    const float *weights_in; /* [T, K], the same */
    uint64_t *began;         /* receives the first kernel's start time, or NULL */
    float *logits;           /* [slices, T, E+Z] scratch of moe_cuda_router_bytes(capacity) */
    int32_t *ids;            /* [T, K] */
    float *weights;          /* [T, K] */
    uint8_t *token_state;    /* [T] */
};

size_t moe_cuda_router_bytes(const struct moe_layer *layer, enum moe_dtype dtype, uint32_t tokens);

/* Uses only the shape of `layer`; the step parameters name the layer with the weights. */
struct moe_status moe_cuda_router_enqueue(const struct moe_layer *layer,
                                          const struct moe_cuda_routing *r,
                                          cudaStream_t stream) MOE_CHECKED;

/* Checks modes in host memory: each is known and has its inputs. *need_logits as in the step
 * parameters. */
struct moe_status moe_cuda_router_check_modes(uint32_t tokens, const uint8_t *mode, bool has_ids,
                                              bool has_weights, bool *need_logits) MOE_CHECKED;

/* Member of struct moe_backend. */
struct moe_status moe_cuda_router_forward(struct moe_layer *layer, enum moe_dtype dtype,
                                          uint32_t tokens, const void *x, const uint8_t *mode,
                                          const int32_t *ids_in, const float *weights_in,
                                          int32_t *ids, float *weights,
                                          uint8_t *token_state) MOE_CHECKED;

/* bf16 tokens, and router rows in whole 16-byte chunks. */
bool moe_cuda_router_on_tensor_cores(const struct moe_layer *layer, enum moe_dtype dtype);
/* Number of partial sums per logit. */
uint32_t moe_cuda_router_slices(const struct moe_layer *layer, enum moe_dtype dtype);

/* The two launches, in router_logits.cu and router.cu. Without need_logits, logits are neither
 * computed nor read. */
struct moe_status moe_cuda_router_logits(const struct moe_layer *layer,
                                         const struct moe_cuda_routing *r,
                                         cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_router_choose(const struct moe_layer *layer,
                                         const struct moe_cuda_routing *r,
                                         cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
