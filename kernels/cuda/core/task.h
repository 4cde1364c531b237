/* SPDX-License-Identifier: Apache-2.0 */
/* Something for a thread of a session to do: for the executor (executor.h), or for the comm thread
 * of a session over a network (net.h). */
#ifndef MOE_CUDA_TASK_H
#define MOE_CUDA_TASK_H

#include "base/status.h"

/* Belongs to the caller and stays until it is done. A thread runs its tasks one after the other, in
 * the order in which they were posted. */
struct moe_cuda_task {
    struct moe_status (*run)(void *ctx);
    void *ctx;
    struct moe_status status; /* of run; valid once done */
    bool done;                /* under the lock of the thread's queue */
    struct moe_cuda_task *next;
};

#endif
