/* How much memory this process may still take: what the host has, or less where it is confined to a
 * part of that, as containers are. */
#ifndef MOE_BASE_MEMORY_H
#define MOE_BASE_MEMORY_H

#include <stdint.h>

/* Bytes that can be had without swapping, as the kernel estimates it (MemAvailable), or that are
 * left in the process's control group or in one above it (version 2: memory.max less what is in
 * use; cached files do not count as used, for they give way), whichever is least. UINT64_MAX where
 * nothing says how many. Any thread. */
uint64_t moe_available_memory(void);

/* The same with `root` before the paths of /proc and /sys: for tests. */
uint64_t moe_available_memory_under(const char *root);

#endif
