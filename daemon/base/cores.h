/* How many processors this process may keep busy: fewer than the machine has where it is confined
 * to some of them, or given a share of their time, as containers are. */
#ifndef MOE_BASE_CORES_H
#define MOE_BASE_CORES_H

#include <stdint.h>

/* Processors of the calling thread's affinity mask, or the quota of its control group and of those
 * above it (version 2 of control groups, rounded up), whichever is less; at least 1. */
uint32_t moe_usable_cores(void);

/* The same quota as a number of processors, from the text of a cpu.max file ("150000 100000": 2);
 * UINT32_MAX where there is none ("max 100000") or the text is not understood. */
uint32_t moe_cores_of_quota(const char *cpu_max);

#endif
