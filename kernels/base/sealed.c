/* SPDX-License-Identifier: Apache-2.0 */
/* See base/sealed.h. Huge pages are refused: the kernel may have none left at the first touch, and
 * then sends SIGBUS. A hole that another process punches later reads as zeros. */
#include "base/sealed.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

static struct moe_status invalid(const char *what)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID, "%s", what);
}

struct moe_status moe_sealed_check(int descriptor, struct moe_sealed_file *out)
{
    struct statfs system;
    struct stat file;
    int seals = fcntl(descriptor, F_GET_SEALS); /* -1: the file cannot have seals */
    if (seals < 0 || (seals & SEALS) != SEALS)
        return invalid("the memory is not sealed against shrinking, growing and further seals");
    if (fstatfs(descriptor, &system) != 0 || system.f_type != TMPFS_MAGIC)
        return invalid("the memory is not a memfd with small pages");
    if (fstat(descriptor, &file) != 0 || file.st_size <= 0)
        return invalid("the memory is empty");
    uint64_t bytes = (uint64_t)file.st_size, page = (uint64_t)sysconf(_SC_PAGESIZE);
    *out = (struct moe_sealed_file){.bytes = bytes,
                                    .charge = (bytes + page - 1) / page * page,
                                    .device = (uint64_t)file.st_dev,
                                    .inode = (uint64_t)file.st_ino};
    return moe_ok();
}

struct moe_status moe_sealed_map(int descriptor, size_t bytes, void **base)
{
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (map == MAP_FAILED && (errno == EPERM || errno == EACCES))
        return invalid("the memory cannot be written");
    if (map == MAP_FAILED)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory to map a region of %zu bytes", bytes);
    *base = map;
    return moe_ok();
}

void moe_sealed_populate(void *base, size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (madvise(base, bytes, MADV_POPULATE_WRITE) == 0 || errno != EINVAL)
        return;
    for (size_t at = 0; at < bytes; at += page) /* Linux before 5.14 */
        (void)((volatile char *)base)[at];
}

void moe_sealed_release(void *base, size_t bytes)
{
    if (base == NULL)
        return;
    (void)madvise(base, bytes, MADV_REMOVE); /* fails only where the pages are gone already */
    munmap(base, bytes);
}
