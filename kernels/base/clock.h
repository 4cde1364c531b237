/* SPDX-License-Identifier: Apache-2.0 */
/* Monotonic time. Pure rooms do not call this: their callers pass the time. */
#ifndef MOE_BASE_CLOCK_H
#define MOE_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

#define MOE_NS_PER_MS UINT64_C(1000000)
#define MOE_NS_PER_S  UINT64_C(1000000000)
#define MOE_NEVER     UINT64_MAX /* no deadline */

/* CLOCK_MONOTONIC in ns; the same clock in every process of a host. */
static inline uint64_t moe_clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * MOE_NS_PER_S + (uint64_t)t.tv_nsec;
}

/* The earlier of two times; MOE_NEVER is later than all others. */
static inline uint64_t moe_earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

#endif
