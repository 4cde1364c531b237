/* Whole steps on a GPU: enqueued on three streams, at most two unfinished; the host waits for none
 * of their parts. */
#ifndef MOE_CUDA_STEP_H
#define MOE_CUDA_STEP_H

#include "cuda/session.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_cuda_steps;

struct moe_status moe_cuda_steps_create(struct moe_session *session,
                                        struct moe_cuda_steps **out) MOE_CHECKED;
/* Waits for what was enqueued and never waited for, then frees. NULL is ignored. */
void moe_cuda_steps_destroy(struct moe_cuda_steps *steps);

/* MOE_FAILED_PRECONDITION while steps are unfinished: parts and exchanges must not overlap them. */
struct moe_status moe_cuda_steps_idle(struct moe_cuda_steps *steps) MOE_CHECKED;

/* For passes that run outside the lanes' streams, a backward pass: takes one of the two places, and
 * puts the outcome where moe_cuda_step_wait finds it. */
struct moe_status moe_cuda_step_hold(struct moe_session *session,
                                     struct moe_step **out) MOE_CHECKED;
void moe_cuda_step_finish(struct moe_step *step, struct moe_status outcome,
                          const struct moe_step_result *result);

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
