/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory that a client and a daemon share: a memfd, sealed so that its size never changes. So
 * no client can make the daemon fault by shrinking it. The daemon checks and maps it by
 * base/sealed.h. Any thread. */
#ifndef MOE_REGIONS_MEMORY_H
#define MOE_REGIONS_MEMORY_H

#include "base/status.h"

#include <stddef.h>

/* Client. Makes memory of `bytes` bytes, zeroed and sealed, and maps it. The caller unmaps it and
 * closes the descriptor. Errors: MOE_INVALID_ARGUMENT/REGION_INVALID (0 bytes, or more than files
 * have), MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_region_memory_create(size_t bytes, int *descriptor, void **base) MOE_CHECKED;

/* Unmaps alone. NULL is ignored. */
void moe_region_memory_unmap(void *base, size_t bytes);

#endif
