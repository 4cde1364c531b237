/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded into a worker: simulates a slow file system and a host without memory, so that a test
 * can stop a checkpoint at a chosen point. With G = $MOE_TEST_GATE:
 *
 *  - While file G exists, fsync does not return. If MOE_TEST_GATE_OF is a path, this applies to
 *    that directory only; if it is a name, to files of that name.
 *  - While file G.memory.PID exists (PID of the worker), it replaces /proc/meminfo.
 *  - While file G.copy exists, opening /proc/meminfo blocks. A copy reads it first, so it waits. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
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
