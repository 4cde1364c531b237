/* SPDX-License-Identifier: Apache-2.0 */
#include "store/remembered.h"

#include "daemon/trusted_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TEXT_BYTES = 17 }; /* 16 digits and the end of the line */

static const char name[] = MOE_STORE_GROUP_ID;

static struct moe_status io_error(const char *directory)
{
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "%.120s/%s: %s", directory, name,
                     strerror(errno));
}

static struct moe_status write_id(const char *directory, int dir, uint64_t group_id)
{
    char text[TEXT_BYTES + 1];
    (void)snprintf(text, sizeof text, "%016" PRIx64 "\n", group_id);
    int fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return io_error(directory);
    bool written = write(fd, text, TEXT_BYTES) == TEXT_BYTES && fsync(fd) == 0 && fsync(dir) == 0;
    struct moe_status st = written ? moe_ok() : io_error(directory);
    if (!written)
        (void)unlinkat(dir, name, 0);
    close(fd);
    return st;
}

static struct moe_status compare(const char *directory, int fd, uint64_t group_id)
{
    char text[TEXT_BYTES + 1] = "";
    uint64_t known;
    if (read(fd, text, TEXT_BYTES) != TEXT_BYTES || sscanf(text, "%16" SCNx64, &known) != 1)
        return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "%.120s/%s: damaged", directory,
                         name);
    if (known == group_id)
        return moe_ok();
    if (group_id == 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "there is no group; this coordinator belongs to %016" PRIx64
                         " (remove %.80s/%s to change that)",
                         known, directory, name);
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                     "the keys are of another group, %016" PRIx64 "; this coordinator belongs to "
                     "%016" PRIx64 " (remove %.80s/%s to change that)",
                     group_id, known, directory, name);
}

static struct moe_status remember(const char *directory, int dir, uint64_t group_id)
{
    MOE_TRY(moe_error_context(moe_trusted_directory_check(directory, dir), "the state directory"));
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && errno != ENOENT)
        return io_error(directory);
    if (fd < 0)
        return group_id != 0 ? write_id(directory, dir, group_id) : moe_ok();
    struct moe_status st = compare(directory, fd, group_id);
    close(fd);
    return st;
}

struct moe_status moe_store_remember(const char *directory, uint64_t group_id)
{
    if (mkdir(directory, 0700) != 0 && errno != EEXIST)
        return io_error(directory);
    int dir = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0)
        return io_error(directory);
    struct moe_status st = remember(directory, dir, group_id);
    close(dir);
    return st;
}
