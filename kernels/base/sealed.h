/* SPDX-License-Identifier: Apache-2.0 */
/* Memory files of other processes: a memfd, sealed so that its size never changes. So no process
 * can make another one fault by shrinking it. Any thread. */
#ifndef MOE_BASE_SEALED_H
#define MOE_BASE_SEALED_H

#include "base/status.h"

#include <stddef.h>

/* What the kernel tells of a descriptor. */
struct moe_sealed_file {
    uint64_t bytes, device, inode;
    uint64_t charge; /* bytes of the pages that hold it */
};

/* Checks a descriptor that came from another process: memory of the kernel's shared memory file
 * system, in small pages, that can neither shrink nor grow nor lose its seals. Errors:
 * MOE_INVALID_ARGUMENT/REGION_INVALID. The descriptor stays the caller's. */
struct moe_status moe_sealed_check(int descriptor, struct moe_sealed_file *out) MOE_CHECKED;
/* After the check. Maps all of it. Errors: MOE_INVALID_ARGUMENT/REGION_INVALID (sealed against
 * writing), MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_sealed_map(int descriptor, size_t bytes, void **base) MOE_CHECKED;
/* Makes the pages of mapped memory resident, all or a part that begins at a page: takes a
 * millisecond for 1 to 10 MiB. Without memory for them they come at the first access, or never. */
void moe_sealed_populate(void *base, size_t bytes);
/* Unmaps the memory, all or a part that begins at a page, and frees its pages: the first to touch a
 * page pays for it, and that may have been this process. Without this a process that keeps the
 * descriptor would keep them, beyond every budget. Its content is gone for all. NULL is ignored. */
void moe_sealed_release(void *base, size_t bytes);

#endif
