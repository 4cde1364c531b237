/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded into a worker: simulates a slow file system and a host without memory, so that a test
 * can stop a checkpoint at a chosen point. With G = $MOE_TEST_GATE:
 *
 *  - While file G exists, fsync does not return. If MOE_TEST_GATE_OF is a path, this applies to
 *    that directory only; if it is a name, to files of that name.
 *  - While file G.memory.PID exists (PID of the worker), it replaces /proc/meminfo.
 *  - While file G.copy exists, opening /proc/meminfo blocks. A copy reads it first, so it waits.
 *  - While file G.read exists, opening records.bin of a checkpoint blocks. File G.waits says so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_gated(int fd)
{
    struct stat this, gated;
    char link[64], path[PATH_MAX] = "";
    const char *of = getenv("MOE_TEST_GATE_OF");
    if (of == NULL)
        return 1;
    if (strchr(of, '/') == NULL) {
        (void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        return readlink(link, path, sizeof path - 1) > 0 && strrchr(path, '/') != NULL &&
               strcmp(strrchr(path, '/') + 1, of) == 0;
    }
    return fstat(fd, &this) == 0 && stat(of, &gated) == 0 && this.st_dev == gated.st_dev &&
           this.st_ino == gated.st_ino;
}

int fsync(int fd)
{
    const char *gate = getenv("MOE_TEST_GATE");
    while (gate != NULL && is_gated(fd) && access(gate, F_OK) == 0)
        (void)usleep(5000);
    return (int)syscall(SYS_fsync, fd);
}

int openat(int directory, const char *name, int flags, ...)
{
    char held[PATH_MAX] = "", waits[PATH_MAX];
    const char *gate = getenv("MOE_TEST_GATE");
    va_list rest;
    va_start(rest, flags);
    const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    if (gate != NULL && strcmp(name, "records.bin") == 0) {
        (void)snprintf(held, sizeof held, "%s.read", gate);
        (void)snprintf(waits, sizeof waits, "%s.waits", gate);
    }
    while (held[0] != '\0' && access(held, F_OK) == 0) {
        (void)close((int)syscall(SYS_openat, AT_FDCWD, waits, O_WRONLY | O_CREAT, 0600));
        (void)usleep(5000);
    }
    return (int)syscall(SYS_openat, directory, name, flags, mode);
}

typedef FILE *(*open_fn)(const char *, const char *);

FILE *fopen(const char *path, const char *mode)
{
    char other[PATH_MAX];
    open_fn next;
    *(void **)&next = dlsym(RTLD_NEXT, "fopen");
    const char *gate = getenv("MOE_TEST_GATE");
    if (gate == NULL || strcmp(path, "/proc/meminfo") != 0)
        return next(path, mode);
    (void)snprintf(other, sizeof other, "%s.copy", gate);
    while (access(other, F_OK) == 0)
        (void)usleep(5000);
    (void)snprintf(other, sizeof other, "%s.memory.%ld", gate, (long)getpid());
    return next(access(other, F_OK) == 0 ? other : path, mode);
}
