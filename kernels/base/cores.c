/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the affinity mask and the control group's quota. An unreadable value is no limit. */
#include "base/cores.h"

#include "base/cgroup.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>

uint32_t moe_cores_of_quota(const char *cpu_max)
{
    uint64_t quota = 0, period = 0;
    if (sscanf(cpu_max, "%" SCNu64 " %" SCNu64, &quota, &period) != 2 || quota == 0 || period == 0)
        return UINT32_MAX;
    uint64_t cores = (quota - 1) / period + 1;
    return cores < UINT32_MAX ? (uint32_t)cores : UINT32_MAX;
}

static uint32_t affinity_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1; /* more than CPU_SETSIZE processors, or forbidden */
    int n = CPU_COUNT(&set);
    return n < 1 ? 1 : (uint32_t)n;
}

/* moe_cgroup_fn; `ctx`: the minimum so far. */
static void look_at_group(void *ctx, const char *directory)
{
    char line[64];
    uint32_t *least = ctx;
    if (!moe_cgroup_read_line(directory, "cpu.max", line, sizeof line))
        return;
    uint32_t here = moe_cores_of_quota(line);
    *least = here < *least ? here : *least;
}

static uint32_t quota_cores(void)
{
    uint32_t cores = UINT32_MAX;
    moe_cgroup_walk("", look_at_group, &cores);
    return cores;
}

uint32_t moe_usable_cores(void)
{
    uint32_t mask = affinity_cores(), quota = quota_cores();
    return quota < mask ? quota : mask;
}
