/* SPDX-License-Identifier: Apache-2.0 */
/* Whole steps: a queue of at most two, and the thread that runs them one after the other. */
#ifndef MOE_CPU_STEP_H
#define MOE_CPU_STEP_H

#include "cpu/compute/layer.h"

#include "base/clock.h"
#include "moe/training.h"

struct moe_cpu_steps;

/* Adds the time since `*since` to a stage, and sets `*since` to now. */
static inline void moe_cpu_step_lap(struct moe_step_result *r, enum moe_stage stage,
                                    uint64_t *since)
{
    uint64_t now = moe_clock_ns();
    r->stage_ns[stage] += now - *since;
    *since = now;
}

struct moe_status moe_cpu_steps_create(struct moe_session *session,
                                       struct moe_cpu_steps **out) MOE_CHECKED;
/* Runs the steps that are still in the queue, then frees them and the queue. NULL is ignored. */
void moe_cpu_steps_destroy(struct moe_cpu_steps *steps);

/* MOE_FAILED_PRECONDITION while steps are unfinished: parts and exchanges must not overlap them. */
struct moe_status moe_cpu_steps_idle(struct moe_cpu_steps *steps) MOE_CHECKED;

/* One backward pass, on the thread of the steps; backward_step.c. */
struct moe_status moe_cpu_backward_run(struct moe_session *session,
                                       const struct moe_backward_args *args,
                                       struct moe_step_result *result) MOE_CHECKED;

/* Members of struct moe_backend and struct moe_training. */
struct moe_status moe_cpu_step_enqueue(struct moe_session *session,
                                       const struct moe_step_args *args,
                                       struct moe_step **out) MOE_CHECKED;
struct moe_status moe_cpu_backward_enqueue(struct moe_session *session,
                                           const struct moe_backward_args *args,
                                           struct moe_step **out) MOE_CHECKED;
struct moe_status moe_cpu_step_wait(struct moe_step *step, uint64_t deadline_ns,
                                    struct moe_step_result *result) MOE_CHECKED;

#endif
