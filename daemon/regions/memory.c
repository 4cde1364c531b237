/* SPDX-License-Identifier: Apache-2.0 */
/* See regions/memory.h. */
#include "regions/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

static struct moe_status invalid(const char *what)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID, "%s", what);
}

struct moe_status moe_region_memory_create(size_t bytes, int *descriptor, void **base)
{
    if (bytes == 0 || bytes > PTRDIFF_MAX)
        return invalid("a region has at least 1 byte, and less than 2^63");
    int fd = memfd_create("moe-region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    void *map = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 && fcntl(fd, F_ADD_SEALS, SEALS) == 0)
        map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        if (fd >= 0)
            close(fd);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for a region of %zu bytes", bytes);
    }
    *descriptor = fd;
    *base = map;
    return moe_ok();
}

void moe_region_memory_unmap(void *base, size_t bytes)
{
    if (base != NULL)
        munmap(base, bytes);
}
