/* SPDX-License-Identifier: Apache-2.0 */
/* Step parameters: the layer and the tokens of a step, which its kernels read from device memory.
 * All other arguments of a kernel follow from the shape of the layer, the bucket and the session's
 * memory. So one captured launch serves all steps and layers of a shape.
 *
 * Step parameters do not change while kernels use them. Whole steps have one struct per step slot,
 * which comes in with their rows. The backend's single parts wait for their kernels and have one
 * per layer; separate passes have one per session (ep.h). */
#ifndef MOE_CUDA_STEP_PARAMS_H
#define MOE_CUDA_STEP_PARAMS_H

#include "common/activation_cache.h"
#include "cuda/layer/layer.h"
#include "moe/window.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_cuda_step_params {
    const struct moe_cuda_layer_desc *layer; /* device memory */
    struct moe_cuda_placement placement;     /* the layer's; a copy here saves kernels of a pass one
                                                read */
    /* For the grouped GEMM: pointers into layer->product, by enum moe_cuda_matrices. */
    const struct moe_cuda_ggemm_weights *weights[MOE_CUDA_MATRICES];
    uint32_t first; /* always 0; with `tokens` after it: start and count of the shared expert's only
                       group */
    uint32_t tokens;      /* T of this slot */
    uint32_t need_logits; /* 0: every token brings ids and weights */
    uint32_t has_modes;   /* 0: all tokens are MOE_ROUTE_SERVER; modes are not read */
    struct moe_cuda_ggemm_pre pre[MOE_ACTIVATION_PARTS]; /* of a step that retains (retain.h) */
    uint32_t head[MOE_HEAD_COUNT];                       /* of this slot, as in moe/window.h */
};

/* Fills step parameters for `tokens` tokens without modes, with logits; the caller changes these
 * two if needed. `layer` is finished; bucket is a power of two, or 0 without a pass. */
void moe_cuda_step_params_fill(const struct moe_layer *layer, enum moe_dtype dtype, uint32_t bucket,
                               uint32_t tokens, struct moe_cuda_step_params *out);

/* For parts that wait for their kernels: copies *f to the layer's step parameters in device memory.
 * Waits. */
struct moe_status
moe_cuda_step_params_upload(struct moe_layer *layer, const struct moe_cuda_step_params *f,
                            const struct moe_cuda_step_params **on_device) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
