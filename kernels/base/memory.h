/* SPDX-License-Identifier: Apache-2.0 */
/* Available memory for this process: that of the host, or less under a limit (as in containers). */
#ifndef MOE_BASE_MEMORY_H
#define MOE_BASE_MEMORY_H

#include <stdint.h>

/* The minimum of two values in bytes: the kernel's estimate of memory without swapping
 * (MemAvailable), and the rest in the process's control group and those above it (version 2:
 * memory.max less used memory without file cache, which the kernel reclaims). UINT64_MAX if neither
 * is known. Any thread. */
uint64_t moe_available_memory(void);

/* Only the rest in control groups; UINT64_MAX without a limit. Memory of the host may grow at run
 * time (some virtual machines); this limit does not. */
uint64_t moe_confined_memory(void);

/* The same with `root` before the paths of /proc and /sys: for tests. */
uint64_t moe_available_memory_under(const char *root);
uint64_t moe_confined_memory_under(const char *root);

#endif
