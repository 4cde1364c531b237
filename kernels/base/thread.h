/* SPDX-License-Identifier: Apache-2.0 */
/* Threads with names, for debuggers and `top -H`. daemon/CONCURRENCY.md lists the threads. */
#ifndef MOE_BASE_THREAD_H
#define MOE_BASE_THREAD_H

#include "base/status.h"

#include <pthread.h>

enum { MOE_THREAD_NAME_MAX = 15 }; /* characters: the system's limit */

/* Starts `run(arg)` on a thread called `name` (1..MOE_THREAD_NAME_MAX characters; copied). The
 * thread blocks all signals: the owner of the process handles them on other threads. Join or detach
 * it like any other. Returns 0 or an error number, and then no thread runs. */
int moe_thread_create(pthread_t *thread, const char *name, void *(*run)(void *), void *arg)
    __attribute__((warn_unused_result));

/* The failure for an error number of moe_thread_create: MOE_RESOURCE_EXHAUSTED; the text has the
 * name of the thread and the system's reason. */
struct moe_status moe_thread_failure(const char *name, int error) MOE_CHECKED;

#endif
