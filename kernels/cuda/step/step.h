/* SPDX-License-Identifier: Apache-2.0 */
/* Whole steps on a GPU, at most two unfinished; enqueuing waits for nothing. A forward step is
 * enqueued on three streams, and the host waits for none of its parts. The session's executor runs
 * passes that the host leads, steps with memory that must grow, and everything enqueued while such
 * a task lasts. */
#ifndef MOE_CUDA_STEP_H
#define MOE_CUDA_STEP_H

#include "cuda/step/steps.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Takes a step slot and has the executor run the pass, after all steps that were enqueued before.
 * `args` is copied. */
struct moe_status moe_cuda_step_post_pass(struct moe_session *session,
                                          const struct moe_backward_args *args,
                                          moe_cuda_pass_fn pass, struct moe_step **out) MOE_CHECKED;

/* Members of struct moe_backend. */
struct moe_status moe_cuda_step_enqueue(struct moe_session *session,
                                        const struct moe_step_args *args,
                                        struct moe_step **out) MOE_CHECKED;
struct moe_status moe_cuda_step_wait(struct moe_step *step, uint64_t deadline_ns,
                                     struct moe_step_result *result) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
