/* SPDX-License-Identifier: Apache-2.0 */
/* Making, checking and mapping windows; see window.h. */
#include "cpu/exchange/window.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WINDOW_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

static struct moe_status map_shared(int fd, size_t bytes, struct moe_cpu_window *out)
{
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "cannot map a window of %zu bytes: %s", bytes, strerror(errno));
    out->base = base;
    out->bytes = bytes;
    return moe_ok();
}

struct moe_status moe_cpu_window_create(const struct moe_window_layout *layout, uint32_t slot,
                                        uint64_t epoch, struct moe_cpu_window *out, int *fd)
{
    *out = (struct moe_cpu_window){0};
    int memory = memfd_create("moe-window", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory < 0)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_IO, "cannot create a window: %s",
                         strerror(errno));
    struct moe_status st;
    if (layout->bytes > INT64_MAX || ftruncate(memory, (off_t)layout->bytes) != 0 ||
        fcntl(memory, F_ADD_SEALS, WINDOW_SEALS) != 0) {
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_IO,
                       "cannot size a window to %zu bytes: %s", layout->bytes, strerror(errno));
        goto failed;
    }
    MOE_TRY_GOTO(st, map_shared(memory, layout->bytes, out), failed);
    struct moe_window_header *h = (void *)out->base;
    h->magic = MOE_WINDOW_MAGIC;
    h->version = MOE_WINDOW_VERSION;
    h->slot = slot;
    h->epoch = epoch;
    h->bytes = layout->bytes;
    *fd = memory;
    return moe_ok();
failed:
    close(memory);
    return st;
}

struct moe_status moe_cpu_window_map(const struct moe_window_layout *layout, uint32_t slot,
                                     uint64_t epoch, int fd, struct moe_cpu_window *out)
{
    *out = (struct moe_cpu_window){0};
    struct stat file;
    int seals = fcntl(fd, F_GET_SEALS); /* -1 if a file cannot have seals */
    if (seals < 0 || (seals & WINDOW_SEALS) != WINDOW_SEALS || fstat(fd, &file) != 0 ||
        file.st_size < 0 || (size_t)file.st_size != layout->bytes)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "slot %u offers a window of the wrong size or without its seals", slot);
    MOE_TRY(map_shared(fd, layout->bytes, out));
    const struct moe_window_header *h = (const void *)out->base;
    if (h->magic == MOE_WINDOW_MAGIC && h->version == MOE_WINDOW_VERSION && h->slot == slot &&
        h->epoch == epoch && h->bytes == layout->bytes)
        return moe_ok();
    moe_cpu_window_unmap(out);
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                     "slot %u offers a window of another version, slot or view", slot);
}

void moe_cpu_window_renew(const struct moe_cpu_window *own, uint64_t epoch)
{
    struct moe_window_header *h = (void *)own->base;
    h->epoch = epoch;
    __atomic_store_n(&h->waiting, 0, __ATOMIC_RELEASE);
}

void moe_cpu_window_unmap(struct moe_cpu_window *window)
{
    if (window->base != NULL)
        munmap(window->base, window->bytes);
    *window = (struct moe_cpu_window){0};
}
