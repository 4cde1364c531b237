/* SPDX-License-Identifier: Apache-2.0 */
/* The number of processors for this process. An affinity mask or a quota (as in containers) makes
 * it smaller than that of the machine. */
#ifndef MOE_BASE_CORES_H
#define MOE_BASE_CORES_H

#include <stdint.h>

/* The minimum of the calling thread's affinity mask and the quotas of its control group and those
 * above it (version 2, rounded up); at least 1. */
uint32_t moe_usable_cores(void);

/* The same quota as a number of processors, from the text of a cpu.max file ("150000 100000": 2);
 * UINT32_MAX for no quota ("max 100000") or another text. */
uint32_t moe_cores_of_quota(const char *cpu_max);

#endif
