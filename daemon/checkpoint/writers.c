/* SPDX-License-Identifier: Apache-2.0 */
/* Processes that write checkpoints below a root: each holds a lock that ends with it. */
#include "checkpoint/internal.h"

#include "daemon/log.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HEX = 16, FILE_NAME = HEX + 16, TRIES = 100, PAUSE_NS = 10 * 1000 * 1000 };

static void file_of(char name[FILE_NAME], uint64_t writer)
{
    snprintf(name, FILE_NAME, ".%016" PRIx64 MOE_CKPT_WRITER, writer);
}

/* Opened for each check: a lock belongs to an open file description. */
static int open_file(int root, const char *name, int flags)
{
    return openat(root, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC | flags, 0666);
}

/* True if `fd` still has that name: the file was not removed since it was opened. */
static bool has_name(int root, const char *name, int fd)
{
    struct stat opened, named;
    return fstat(fd, &opened) == 0 && fstatat(root, name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
           opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

/* Another process may remove the file as a leftover between opening and locking. */
static int create_locked(int root, const char *name)
{
    for (int tries = 0; tries < TRIES; tries++) {
        int fd = open_file(root, name, O_CREAT);
        if (fd < 0)
            return -1;
        bool locked = flock(fd, LOCK_EX | LOCK_NB) == 0;
        if (!locked && errno != EWOULDBLOCK) {
            moe_log_warn(
                "the training directory's file system has no locks (%s): groups that share it "
                "cannot tell each other's running Saves from leftovers of a crash",
                strerror(errno));
            return fd;
        }
        if (locked && has_name(root, name, fd))
            return fd;
        close(fd);
        (void)nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    }
    errno = EAGAIN;
    return -1;
}

struct moe_status moe_ckpt__show_writer(const struct moe_checkpoint_context *c, int root)
{
    char name[FILE_NAME];
    if (c->shown == NULL || *c->shown >= 0)
        return moe_ok();
    file_of(name, c->writer);
    *c->shown = create_locked(root, name);
    return *c->shown >= 0 ? moe_ok() : moe_ckpt__io("making a file");
}

void moe_ckpt__hide_writer(const struct moe_checkpoint_context *c, int root)
{
    char name[FILE_NAME];
    if (c->shown == NULL || *c->shown < 0)
        return;
    file_of(name, c->writer);
    (void)unlinkat(root, name, 0); /* if it stays, the next Save removes it */
    close(*c->shown);
    *c->shown = -1;
}

/* True if no process holds its lock, or there is no such file. With a file, this process holds the
 * lock until `*fd` is closed. */
static bool take(int root, const char *name, int *fd)
{
    *fd = open_file(root, name, 0);
    if (*fd < 0)
        return errno == ENOENT;
    if (flock(*fd, LOCK_EX | LOCK_NB) == 0)
        return true;
    close(*fd);
    *fd = -1;
    return false;
}

bool moe_ckpt__is_written(const struct moe_checkpoint_context *c, int root, const char *name)
{
    char file[FILE_NAME], own[FILE_NAME];
    const char *end = strrchr(name, '.');
    int fd;
    if (end == NULL || end - name < HEX + 1 || end[-HEX - 1] != '.' ||
        strspn(end - HEX, "0123456789abcdef") != HEX)
        return false; /* not a name that a Save makes */
    snprintf(file, sizeof file, ".%.*s" MOE_CKPT_WRITER, HEX, end - HEX);
    file_of(own, c->writer);
    if (strcmp(file, own) == 0)
        return false; /* one Save at a time: this one was abandoned, and its thread has ended */
    bool gone = take(root, file, &fd);
    if (fd >= 0)
        close(fd);
    return !gone;
}

void moe_ckpt__sweep_writer(int root, const char *file)
{
    int fd;
    if (take(root, file, &fd) && fd >= 0)
        (void)unlinkat(root, file, 0);
    if (fd >= 0)
        close(fd);
}
