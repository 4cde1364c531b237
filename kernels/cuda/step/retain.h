/* SPDX-License-Identifier: Apache-2.0 */
/* What forward steps retain on the device for backward passes (moe/training.h, "Retained"): gate
 * and up of the routed rows and of the shared expert's, as the grouped GEMM has them before the
 * activation (ggemm.h). Only where both networks of a pass run on tensor cores; other paths retain
 * nothing.
 *
 * Only the device knows how many rows come. So a step takes room for the expected number
 * (activation_sizing.h), and the kernel drops rows beyond it. When the step has ended, its count
 * shows whether all rows are there and which room was not needed. */
#ifndef MOE_CUDA_RETAINING_H
#define MOE_CUDA_RETAINING_H

#include "common/activation_cache.h"
#include "cuda/layer/step_params.h"
#include "cuda/session/session.h"
#include "moe/training.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Room for what this step retains; pre [MOE_ACTIVATION_PARTS] names it to the kernels. False, with
 * nothing taken, if the step retains nothing. Else moe_cuda_retaining_end must follow with the same
 * `args` at the same address, which distinguishes steps in flight. */
bool moe_cuda_retaining_begin(struct moe_session *session, const struct moe_step_args *args,
                              struct moe_cuda_ggemm_pre *pre);
/* The step has ended, successfully if `good`: `rows` were computed, `in_use` with the padding
 * between them. Returns whether they are retained. */
bool moe_cuda_retaining_end(struct moe_session *session, const struct moe_step_args *args,
                            const struct moe_cuda_ggemm_pre *pre, bool good, uint64_t rows,
                            uint32_t in_use);

/* A step that was to retain has ended successfully, with room or without: records its number of
 * rows for later steps. */
void moe_cuda_retaining_learn(const struct moe_session *session, const struct moe_step_args *args,
                              uint64_t rows);

/* Finds what this slot retained for the batch of a backward pass. */
bool moe_cuda_retaining_find(struct moe_session *session, const struct moe_backward_args *args,
                             enum moe_activation_part part, struct moe_activation_piece *out);

#ifdef __cplusplus
}
#endif

#endif
