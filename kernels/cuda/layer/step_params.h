/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels of a step read instead of being told: the layer and the tokens of this step.
 * Every other argument of a kernel follows from the shape of the layer, the bucket and the
 * session's memory, so that one captured launch serves all steps and layers of a shape.
 *
 * The parameters of a step lie in device memory and does not change while kernels use it. Whole
 * steps have one per lane, which comes in with their rows; the parts of the backend, which wait for
 * their kernels, have one per layer, and passes of their own one per session (ep.h). */
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
    struct moe_cuda_placement placement;     /* the layer's: a read less in the kernels of a pass */
    /* For the grouped GEMM, by enum moe_cuda_matrices: into layer->product. */
    const struct moe_cuda_ggemm_weights *weights[MOE_CUDA_MATRICES];
    uint32_t
        first; /* always 0: with `tokens` behind it the only group of the shared expert's rows */
    uint32_t tokens;      /* T of this slot */
    uint32_t need_logits; /* 0: every token brings ids and weights */
    uint32_t has_modes;   /* 0: all tokens are MOE_ROUTE_SERVER, modes are not read */
    struct moe_cuda_ggemm_pre pre[MOE_ACTIVATION_PARTS]; /* of a step that retains (retain.h) */
    uint32_t head[MOE_HEAD_COUNT];                       /* of this slot, as in moe/window.h */
};

/* Step parameters of `tokens` tokens without modes, logits needed; the caller changes the last two
 * where they differ. `layer` is finished; bucket is a power of two, or 0 where no pass is made. */
void moe_cuda_step_params_fill(const struct moe_layer *layer, enum moe_dtype dtype, uint32_t bucket,
                               uint32_t tokens, struct moe_cuda_step_params *out);

/* For parts that wait for their kernels: the layer's own step parameters in device memory become
 * *f. Waits.
 */
struct moe_status
moe_cuda_step_params_upload(struct moe_layer *layer, const struct moe_cuda_step_params *f,
                            const struct moe_cuda_step_params **on_device) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
