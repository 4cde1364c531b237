/* SPDX-License-Identifier: Apache-2.0 */
/* What forward steps leave on the device for backward passes (moe/training.h, "Retained"): gate and
 * up of the routed rows and of the shared expert's, as their grouped GEMM has them before the
 * activation (ggemm.h), where both networks of a pass run on tensor cores. Other paths retain
 * nothing.
 *
 * How many rows come is known on the device only. So a step takes room for as many as are to be
 * expected (activation_sizing.h), the kernel leaves out what has none, and when the step has ended
 * its count tells whether all of them are there, and what room was not needed. */
#ifndef MOE_CUDA_RETAINING_H
#define MOE_CUDA_RETAINING_H

#include "common/activation_cache.h"
#include "cuda/layer/step_params.h"
#include "cuda/session/session.h"
#include "moe/training.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Room for what this step is to retain, which pre [MOE_ACTIVATION_PARTS] tells the kernels. False,
 * with nothing taken, where it retains nothing. Else moe_cuda_retaining_end must follow, with the
 * same `args` at the same address: it tells steps that are in flight together apart. */
bool moe_cuda_retaining_begin(struct moe_session *session, const struct moe_step_args *args,
                              struct moe_cuda_ggemm_pre *pre);
/* The step has ended, well if `good`: `rows` were computed, which with the padding between them
 * were `in_use`. Whether they are kept. */
bool moe_cuda_retaining_end(struct moe_session *session, const struct moe_step_args *args,
                            const struct moe_cuda_ggemm_pre *pre, bool good, uint64_t rows,
                            uint32_t in_use);

/* A step has ended well, given room or not, if it was to retain: how many rows computed, for what
 * later ones ask. */
void moe_cuda_retaining_learn(const struct moe_session *session, const struct moe_step_args *args,
                              uint64_t rows);

/* What this slot has of the batch of a backward pass. */
bool moe_cuda_retaining_find(struct moe_session *session, const struct moe_backward_args *args,
                             enum moe_activation_part part, struct moe_activation_piece *out);

#ifdef __cplusplus
}
#endif

#endif
