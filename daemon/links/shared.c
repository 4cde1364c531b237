/* SPDX-License-Identifier: Apache-2.0 */
/* A peer may name any descriptor, so this file checks the kind and size before it opens a file and
 * the seals before it maps it. No peer can make this process fault or hang. Even fstat may wait for
 * a file system, so the link's target is checked first. */
#include "links/shared.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL, PATH_BYTES = 64 };

static struct moe_status map(int fd, size_t bytes, struct moe_shared *out)
{
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "cannot map %zu shared bytes: %s", bytes, strerrorname_np(errno));
    *out = (struct moe_shared){.base = base, .bytes = bytes, .fd = fd};
    return moe_ok();
}

struct moe_status moe_shared_create(const char *name, size_t bytes, struct moe_shared *out)
{
    *out = (struct moe_shared){.fd = -1};
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_IO, "cannot share memory: %s",
                         strerrorname_np(errno));
    struct moe_status st = moe_ok();
    if (ftruncate(fd, (off_t)bytes) != 0 || fcntl(fd, F_ADD_SEALS, SEALS) != 0)
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_IO, "cannot share %zu bytes: %s", bytes,
                       strerrorname_np(errno));
    if (!moe_failed(&st))
        st = map(fd, bytes, out);
    if (moe_failed(&st))
        close(fd);
    return st;
}

/* Whether the link at `path`, below /proc, leads to a memfd. Reads only the link itself. A file of
 * such a name in the root directory passes this check, but has no seals. */
static bool names_memory(const char *path)
{
    static const char kind[] = "/memfd:";
    char target[sizeof kind - 1];
    return readlink(path, target, sizeof target) == (ssize_t)sizeof target &&
           memcmp(target, kind, sizeof target) == 0;
}

static bool is_memory_of(int fd, size_t bytes)
{
    struct stat file;
    return fstat(fd, &file) == 0 && S_ISREG(file.st_mode) && file.st_size >= 0 &&
           (size_t)file.st_size == bytes;
}

/* -1: not visible from here, or no such memory. */
static int open_memory(uint32_t pid, uint32_t fd, size_t bytes)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "/proc/%u/fd/%u", pid, fd);
    if (!names_memory(path))
        return -1;
    int named = open(path, O_PATH | O_CLOEXEC), opened = -1; /* O_PATH reaches no device */
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", named);
    if (named >= 0 && names_memory(path) && is_memory_of(named, bytes))
        opened = open(path, O_RDWR | O_CLOEXEC);
    if (named >= 0)
        close(named);
    return opened;
}

struct moe_status moe_shared_open(uint32_t pid, uint32_t fd, size_t bytes, struct moe_shared *out)
{
    *out = (struct moe_shared){.fd = -1};
    int memory = open_memory(pid, fd, bytes);
    if (memory < 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                         "the peer's memory is not visible from here");
    int seals = fcntl(memory, F_GET_SEALS); /* -1: the file cannot have seals */
    struct moe_status st = seals >= 0 && (seals & SEALS) == SEALS
                               ? map(memory, bytes, out)
                               : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                                           "the peer's memory may shrink");
    if (moe_failed(&st))
        close(memory);
    return st;
}

void moe_shared_close(struct moe_shared *m)
{
    if (m->base == NULL)
        return;
    munmap(m->base, m->bytes);
    close(m->fd);
    *m = (struct moe_shared){.fd = -1};
}
