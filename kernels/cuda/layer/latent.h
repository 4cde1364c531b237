/* SPDX-License-Identifier: Apache-2.0 */
/* The projections of a layer with a latent space: tokens into it before dispatch, and the experts'
 * sums out of it after combine. Calls enqueue and never wait. On tensor cores if dtype, shape and
 * device allow, else in exact fp32. A row's bits do not depend on the other rows. */
#ifndef MOE_CUDA_LATENT_H
#define MOE_CUDA_LATENT_H

#include "cuda/layer/step_params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* All pointers are device memory, 16-byte aligned. T is in the step parameters. The layer is for
 * its shape: the step parameters name the layer with the weights. */
struct moe_cuda_latent {
    const struct moe_layer *layer;
    const struct moe_cuda_step_params *params;
    enum moe_dtype dtype;
    uint32_t bucket;     /* of the step: rows that fit; determines the tile */
    void *scratch;       /* moe_cuda_latent_scratch_bytes(bucket) */
    uint32_t processors; /* limit of multiprocessors for Hopper's kernels; 0 = all */
};

/* Scratch bytes of either projection; they may share it. */
size_t moe_cuda_latent_scratch_bytes(const struct moe_layer *layer, enum moe_dtype dtype,
                                     uint32_t bucket);

/* z [T, L] = W_to x of the dtype; x [T, H]. */
struct moe_status moe_cuda_to_latent(const struct moe_cuda_latent *l, const void *x, void *z,
                                     cudaStream_t stream) MOE_CHECKED;

struct moe_cuda_latent_sums {
    void *u;             /* [T, L] of the dtype; a norm replaces it with the normalised rows */
    float *out;          /* [T, H] scratch */
    const float *base;   /* [T, H] is added, except to tokens without it; or NULL */
    const uint8_t *mode; /* as in struct moe_cuda_batch */
    const uint8_t *token_state; /* [T]; rows of tokens that are not MOE_TOKEN_OK become zeros */
    void *y;                    /* [T, H] of the dtype */
    uint64_t *ends;             /* receives the last kernel's start time, or NULL */
};
/* y = W_from (u, normalised if the layer has a norm) + base, in fp32, rounded once. */
struct moe_status moe_cuda_from_latent(const struct moe_cuda_latent *l,
                                       const struct moe_cuda_latent_sums *f,
                                       cudaStream_t stream) MOE_CHECKED;

/* latent.cu: the parts of moe_cuda_from_latent before and after the product. */
struct moe_status moe_cuda_latent_normalise(const struct moe_cuda_latent *l, void *u,
                                            cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_latent_finish(const struct moe_cuda_latent *l,
                                         const struct moe_cuda_latent_sums *f,
                                         cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
