/* SPDX-License-Identifier: Apache-2.0 */
/* A task for a session's thread: the executor (executor.h), or the comm thread of a session over a
 * network (net.h). */
#ifndef MOE_CUDA_TASK_H
#define MOE_CUDA_TASK_H

#include "base/status.h"

/* Owned by the caller; it must stay valid until it is done. A thread runs its tasks in the order of
 * posting. */
struct moe_cuda_task {
    struct moe_status (*run)(void *ctx);
    void *ctx;
    struct moe_status status; /* of run; valid once done */
    bool done;                /* guarded by the lock of the thread's queue */
    struct moe_cuda_task *next;
};

#endif
