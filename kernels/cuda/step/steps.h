/* SPDX-License-Identifier: Apache-2.0 */
/* The unfinished steps of a session as a whole: made with the session, ended with it. */
#ifndef MOE_CUDA_STEPS_H
#define MOE_CUDA_STEPS_H

#include "cuda/session/session.h"
#include "moe/training.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_cuda_steps;

struct moe_status moe_cuda_steps_create(struct moe_session *session,
                                        struct moe_cuda_steps **out) MOE_CHECKED;
/* Ends the executor, with all enqueued passes: their waits must end, as after
 * moe_cuda_session_abort. Steps over a network may still be under way. NULL is ignored. */
void moe_cuda_steps_stop(struct moe_cuda_steps *steps);
/* Waits for work that was enqueued and not waited for, then frees. NULL is ignored. */
void moe_cuda_steps_destroy(struct moe_cuda_steps *steps);

/* MOE_FAILED_PRECONDITION while steps are unfinished: parts and exchanges must not overlap them. */
struct moe_status moe_cuda_steps_idle(struct moe_cuda_steps *steps) MOE_CHECKED;

/* A backward pass from start to end, on the executor's thread. result->missing_slot is -1 before.
 * Its status and result become those of the step. */
typedef struct moe_status (*moe_cuda_pass_fn)(struct moe_session *session,
                                              const struct moe_backward_args *args,
                                              struct moe_step_result *result);

#ifdef __cplusplus
}
#endif

#endif
