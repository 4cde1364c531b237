/* SPDX-License-Identifier: Apache-2.0 */
/* The fence of a training directory: the latest epoch of each group that uses it, in the file
 * ".GROUP.fence". Each new view raises it before it is in force. A view that is over, but does not
 * know it, then finds that it may not publish or remove anything.
 *
 * A process that raises the fence, or acts behind it, holds a lock on the file meanwhile. So an act
 * is either over when the fence rises, or refused. The file is not synced: it stops processes that
 * live, and a hung disk must not keep a group from forming. */
#include "checkpoint/internal.h"

#include "daemon/log.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

/* The number has all digits of 64 bits, so that a later one replaces all of it. */
enum { FILE_NAME = 32, DIGITS = 20, TEXT = DIGITS + 1, TRIES = 100, PAUSE_NS = 10 * 1000 * 1000 };

static struct moe_status lock_file(int fd)
{
    for (int tries = 0; tries < TRIES; tries++) {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0)
            return moe_ok();
        if (errno != EWOULDBLOCK) {
            moe_log_warn("the training directory's file system has no locks (%s): a view that is "
                         "over may still publish a checkpoint at the moment when the next begins",
                         strerror(errno));
            return moe_ok();
        }
        (void)nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    }
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO,
                     "another process holds the fence of the training directory");
}

/* An empty file has epoch 0: its process ended, or found no room, before it had written. */
static struct moe_status read_epoch(int fd, uint64_t *epoch)
{
    char text[TEXT + 2] = "";
    ssize_t n = pread(fd, text, TEXT + 1, 0);
    *epoch = 0;
    if (n < 0)
        return moe_ckpt__io("reading the fence");
    if (n == 0)
        return moe_ok();
    errno = 0;
    if (n == TEXT && strspn(text, "0123456789") == DIGITS && text[DIGITS] == '\n')
        *epoch = strtoull(text, NULL, 10);
    else
        errno = EINVAL;
    if (errno != 0)
        return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED,
                         "the fence file of the training directory is damaged: remove it while "
                         "all workers of the group are stopped");
    return moe_ok();
}

/* Only the first write needs room on the disk: without it the file stays empty. A later one
 * replaces digits, and one that is cut short leaves no lower epoch than before. */
static struct moe_status write_epoch(int fd, uint64_t epoch, uint64_t latest)
{
    char text[TEXT + 1];
    snprintf(text, sizeof text, "%0*" PRIu64 "\n", DIGITS, epoch);
    ssize_t n = pwrite(fd, text, TEXT, 0);
    if (n == TEXT)
        return moe_ok();
    if (n >= 0)
        errno = ENOSPC;
    struct moe_status st = moe_ckpt__io("writing the fence");
    if (latest == 0 && ftruncate(fd, 0) != 0)
        moe_log_warn("the fence of the training directory is damaged: %s", strerror(errno));
    return st;
}

static struct moe_status over(uint64_t epoch, uint64_t latest)
{
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST,
                     "epoch %llu is over: epoch %llu of the group has the training directory",
                     (unsigned long long)epoch, (unsigned long long)latest);
}

/* Locked, and not later than `epoch`; the caller closes `*fd`, also on failure. */
static struct moe_status open_fence(int root, uint64_t group, uint64_t epoch, int *fd,
                                    uint64_t *latest)
{
    char name[FILE_NAME];
    snprintf(name, sizeof name, ".%016" PRIx64 ".fence", group);
    *fd = openat(root, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (*fd < 0)
        return moe_ckpt__io("opening the fence");
    MOE_TRY(lock_file(*fd));
    struct moe_status st = read_epoch(*fd, latest);
    if (moe_failed(&st))
        return moe_error_context(st, "%s", name);
    return *latest <= epoch ? moe_ok() : over(epoch, *latest);
}

struct moe_status moe_checkpoint_raise_fence(const char *root, uint64_t group, uint64_t epoch)
{
    int fd = -1, directory = -1;
    uint64_t latest = 0;
    MOE_TRY(moe_ckpt__open_root(root, &directory));
    struct moe_status st = open_fence(directory, group, epoch, &fd, &latest);
    if (!moe_failed(&st) && latest < epoch)
        st = write_epoch(fd, epoch, latest);
    if (fd >= 0)
        close(fd);
    close(directory);
    return st;
}

struct moe_status moe_ckpt__pass_fence(const struct moe_checkpoint_context *c, int root, int *fd)
{
    uint64_t latest;
    *fd = -1;
    struct moe_status st = moe_ok();
    if (c->fence.group != 0)
        st = open_fence(root, c->fence.group, c->fence.epoch, fd, &latest);
    if (!moe_failed(&st) && !moe_lease_gate_held(c->fence.lease))
        st = moe_error(MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST,
                       "the coordinator does not answer this worker");
    if (moe_failed(&st))
        moe_ckpt__leave_fence(*fd);
    return st;
}

void moe_ckpt__leave_fence(int fd)
{
    if (fd >= 0)
        close(fd);
}
