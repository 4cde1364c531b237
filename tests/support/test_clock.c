/* SPDX-License-Identifier: Apache-2.0 */
/* Waits read the clock every millisecond, so moving it need not wake them. */
#include "support/test_clock.h"

#include "base/clock.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

struct moe_eventcount; /* links/eventcount.h */

static _Atomic uint64_t ahead_ns;

/* These names come from the linker's option --wrap. */
int __real_clock_gettime(clockid_t clock, struct timespec *out);
int __wrap_clock_gettime(clockid_t clock, struct timespec *out);
int __real_pthread_cond_timedwait(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
int __wrap_pthread_cond_timedwait(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
void __real_moe_eventcount_wait(struct moe_eventcount *b, uint32_t seen, uint64_t deadline_ns);
void __wrap_moe_eventcount_wait(struct moe_eventcount *b, uint32_t seen, uint64_t deadline_ns);

static struct timespec to_timespec(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / MOE_NS_PER_S),
                             .tv_nsec = (long)(ns % MOE_NS_PER_S)};
}

static uint64_t to_ns(const struct timespec *t)
{
    return (uint64_t)t->tv_sec * MOE_NS_PER_S + (uint64_t)t->tv_nsec;
}

/* Now + 1 ms by the system's clock, or the deadline if that is earlier. */
static uint64_t next_look(uint64_t deadline_ns)
{
    struct timespec t;
    (void)__real_clock_gettime(CLOCK_MONOTONIC, &t);
    uint64_t now = to_ns(&t), ahead = atomic_load(&ahead_ns);
    uint64_t real_deadline = deadline_ns > ahead ? deadline_ns - ahead : 0;
    return real_deadline < now + MOE_NS_PER_MS ? real_deadline : now + MOE_NS_PER_MS;
}

void moe_test_clock_advance(uint64_t ns)
{
    atomic_fetch_add(&ahead_ns, ns);
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *out)
{
    int failed = __real_clock_gettime(clock, out);
    if (failed == 0 && clock == CLOCK_MONOTONIC)
        *out = to_timespec(to_ns(out) + atomic_load(&ahead_ns));
    return failed;
}

/* May return early, as waits on condition variables may. */
int __wrap_pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *lock,
                                  const struct timespec *deadline)
{
    const struct timespec at = to_timespec(next_look(to_ns(deadline)));
    int result = __real_pthread_cond_timedwait(cond, lock, &at);
    return result == ETIMEDOUT && moe_clock_ns() < to_ns(deadline) ? 0 : result;
}

/* Sleeps by the system's clock; see links/eventcount.c. */
void __wrap_moe_eventcount_wait(struct moe_eventcount *b, uint32_t seen, uint64_t deadline_ns)
{
    __real_moe_eventcount_wait(b, seen,
                               deadline_ns == MOE_NEVER ? MOE_NEVER : next_look(deadline_ns));
}
