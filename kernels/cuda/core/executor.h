/* SPDX-License-Identifier: Apache-2.0 */
/* The executor: the thread of a session that makes passes which the host leads.
 *
 * A forward step over windows is one launch, and the host waits for none of its parts. A backward
 * pass is not: the host hears dispatch's outcome in its middle, and meets the peers again for the
 * load-balance loss. So a task of the executor makes it, and the thread that enqueues the pass
 * waits for nothing. A step whose memory has to grow is a task as well, since growing waits for the
 * device. What is enqueued behind a task that is not done is a task too: the steps of a session
 * stay in their order.
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
/* Runs the tasks that were posted, then ends the thread. Waits for it; so what the tasks wait for
 * must end, as after moe_cuda_session_abort. NULL is ignored. */
void moe_cuda_executor_stop(struct moe_cuda_executor *executor);

void moe_cuda_executor_post(struct moe_cuda_executor *executor, struct moe_cuda_task *task);
/* Whether a task is not done. Once this is false, all that the tasks did is visible here. */
bool moe_cuda_executor_busy(const struct moe_cuda_executor *executor);
/* False when the task is not done at `deadline_ns` (monotonic; MOE_NEVER). */
bool moe_cuda_executor_await(struct moe_cuda_executor *executor, const struct moe_cuda_task *task,
                             uint64_t deadline_ns);

#ifdef __cplusplus
}
#endif

#endif
