/* SPDX-License-Identifier: Apache-2.0 */
/* The stages of a forward step, in their order: router, dispatch, products of the experts, combine.
 */
#ifndef MOE_CUDA_STAGES_H
#define MOE_CUDA_STAGES_H

#include "cuda/step/step_slots.h"

/* What a graph depends on, apart from the step slot; from one step of its shape. */
struct moe_cuda_step_shape {
    struct moe_cuda_steps *steps;
    const struct moe_layer *layer;
    enum moe_dtype dtype;
    uint32_t bucket;
    struct moe_cuda_step_layout at;
    bool retains;
};

/* Enqueues the stages of `step` on `stream`, which may capture; never waits, except over a network
 * for what peers announce. */
struct moe_status moe_cuda_stages_capture(const struct moe_cuda_step_shape *shape,
                                          struct moe_step *step, cudaStream_t stream) MOE_CHECKED;

#endif
