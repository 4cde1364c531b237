/* SPDX-License-Identifier: Apache-2.0 */
/* The executor: a session's thread for passes that need the host between their kernels.
 *
 * A forward step over windows is one launch, and the host waits for none of its parts. In a
 * backward pass the host reads dispatch's outcome in the middle, and meets the peers again for the
 * load-balance loss. So a task of the executor makes the pass, and the thread that enqueues the
 * pass waits for nothing. A step with memory that must grow is also a task, since growing waits for
 * the device. Work behind an unfinished task becomes a task too, so a session's steps stay in
 * order.
 *
 * Threads: moe_cuda_executor_await may be called from any thread; all other functions from one
 * thread at a time. Inside a task, the device is current. */
#ifndef MOE_CUDA_EXECUTOR_H
#define MOE_CUDA_EXECUTOR_H

#include "cuda/core/device.h"
#include "cuda/core/task.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_cuda_executor;

struct moe_status moe_cuda_executor_start(struct moe_device *device,
                                          struct moe_cuda_executor **out) MOE_CHECKED;
/* Runs the posted tasks, then ends the thread and waits for it. So all that the tasks wait for must
 * end, as it does after moe_cuda_session_abort. NULL is ignored. */
void moe_cuda_executor_stop(struct moe_cuda_executor *executor);

void moe_cuda_executor_post(struct moe_cuda_executor *executor, struct moe_cuda_task *task);
/* Whether a task is unfinished. When this returns false, all effects of the tasks are visible
 * here. */
bool moe_cuda_executor_busy(const struct moe_cuda_executor *executor);
/* False if the task is unfinished at `deadline_ns` (monotonic; MOE_NEVER). */
bool moe_cuda_executor_await(struct moe_cuda_executor *executor, const struct moe_cuda_task *task,
                             uint64_t deadline_ns);

#ifdef __cplusplus
}
#endif

#endif
