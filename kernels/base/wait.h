/* SPDX-License-Identifier: Apache-2.0 */
/* Waits with deadlines on the monotonic clock of base/clock.h. */
#ifndef MOE_BASE_WAIT_H
#define MOE_BASE_WAIT_H

#include "base/clock.h"
#include "base/mutex.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>

static inline void moe_wait_init(pthread_cond_t *cond)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/* Waits with `lock` held and releases it while waiting. May wake spuriously: call it in a loop.
 * `cond` is from moe_wait_init or pthread_cond_init.
 */
static inline void moe_wait(pthread_cond_t *cond, struct moe_mutex *lock) MOE_REQUIRES(lock)
{
    (void)pthread_cond_wait(cond, &lock->os);
}

/* The same; false once `deadline_ns` has passed. `cond` is from moe_wait_init. */
static inline bool moe_wait_until(pthread_cond_t *cond, struct moe_mutex *lock,
                                  uint64_t deadline_ns) MOE_REQUIRES(lock)
{
    if (deadline_ns == MOE_NEVER)
        return pthread_cond_wait(cond, &lock->os) == 0;
    const struct timespec at = {.tv_sec = (time_t)(deadline_ns / MOE_NS_PER_S),
                                .tv_nsec = (long)(deadline_ns % MOE_NS_PER_S)};
    return pthread_cond_timedwait(cond, &lock->os, &at) == 0;
}

/* Sleeps until `deadline_ns`, which is not MOE_NEVER, however many signals the thread is
 * interrupted by. */
static inline void moe_sleep_until(uint64_t deadline_ns)
{
    const struct timespec at = {.tv_sec = (time_t)(deadline_ns / MOE_NS_PER_S),
                                .tv_nsec = (long)(deadline_ns % MOE_NS_PER_S)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR)
        ;
}

#endif
