/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/trusted_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TOKEN_FORBIDDEN = 0037 }; /* a group may read it, others may do nothing */

bool moe_trusted_file_changed(const char *path, struct moe_trusted_mark *mark)
{
    struct stat now;
    if (stat(path, &now) != 0)
        memset(&now, 0, sizeof now);
    const struct stat *old = &mark->stat;
    bool same =
        now.st_dev == old->st_dev && now.st_ino == old->st_ino && now.st_size == old->st_size &&
        now.st_mode == old->st_mode && now.st_uid == old->st_uid &&
        now.st_ctim.tv_sec == old->st_ctim.tv_sec && now.st_ctim.tv_nsec == old->st_ctim.tv_nsec &&
        now.st_mtim.tv_sec == old->st_mtim.tv_sec && now.st_mtim.tv_nsec == old->st_mtim.tv_nsec;
    mark->stat = now;
    return !same;
}

static struct moe_status check_file(const char *setting, const char *path, int fd,
                                    unsigned forbidden)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO, "%s: %.120s: %s", setting, path,
                         strerror(errno));
    if (!S_ISREG(st.st_mode))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "%s: %.120s is not a regular file", setting, path);
    if (st.st_uid != geteuid() && st.st_uid != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "%s: %.120s belongs to another user", setting, path);
    if ((st.st_mode & forbidden) != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "%s: %.120s has mode %04o: other users can %s it; chmod %s", setting, path,
                         st.st_mode & 07777,
                         (st.st_mode & forbidden & 0022) != 0 ? "write" : "read",
                         forbidden == TOKEN_FORBIDDEN ? "600" : "go-w");
    if (st.st_size > MOE_TRUSTED_FILE_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "%s: %.120s is larger than %d bytes", setting, path, MOE_TRUSTED_FILE_MAX);
    return moe_ok();
}

static struct moe_status read_all(const char *setting, const char *path, int fd, char **text,
                                  size_t *length)
{
    char *buffer = malloc(MOE_TRUSTED_FILE_MAX + 1);
    size_t at = 0;
    ssize_t n = 1;
    if (buffer == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for %s",
                         setting);
    while (n > 0 && at < MOE_TRUSTED_FILE_MAX) {
        n = read(fd, buffer + at, MOE_TRUSTED_FILE_MAX - at);
        if (n < 0 && errno == EINTR)
            n = 1;
        else if (n > 0)
            at += (size_t)n;
    }
    if (n < 0) {
        free(buffer);
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO, "%s: %.120s: %s", setting, path,
                         strerror(errno));
    }
    buffer[at] = '\0';
    *text = buffer;
    *length = at;
    return moe_ok();
}

struct moe_status moe_trusted_file_read(const char *setting, const char *path, unsigned forbidden,
                                        char **text, size_t *length)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not block */
    if (fd < 0)
        return moe_error(errno == ENOENT ? MOE_NOT_FOUND : MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                         "%s: %.120s: %s", setting, path, strerror(errno));
    struct moe_status st = check_file(setting, path, fd, forbidden);
    if (!moe_failed(&st))
        st = read_all(setting, path, fd, text, length);
    (void)close(fd);
    return st;
}

struct moe_status moe_trusted_directory_check(const char *path, int fd)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "%.150s: %s", path, strerror(errno));
    if (st.st_uid != geteuid() && st.st_uid != 0)
        return moe_error(MOE_PERMISSION_DENIED, MOE_REASON_IO,
                         "%.150s belongs to another user (%u); choose a directory of user %u", path,
                         (unsigned)st.st_uid, (unsigned)geteuid());
    if ((st.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return moe_error(MOE_PERMISSION_DENIED, MOE_REASON_IO,
                         "%.150s has mode %04o: other users may write to it; chmod go-w", path,
                         (unsigned)st.st_mode & 07777);
    return moe_ok();
}

struct moe_status moe_token_check(const char *token)
{
    size_t length = strlen(token);
    bool printable = true;
    for (size_t i = 0; i < length; i++)
        printable = printable && token[i] > ' ' && token[i] <= '~';
    if (length >= MOE_TOKEN_MIN && length <= MOE_TOKEN_MAX && printable)
        return moe_ok();
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                     "a token has %d to %d printable characters, and no blank", MOE_TOKEN_MIN,
                     MOE_TOKEN_MAX);
}

struct moe_status moe_token_read(const char *setting, const char *path, char **token)
{
    char *text;
    size_t length;
    MOE_TRY(moe_trusted_file_read(setting, path, TOKEN_FORBIDDEN, &text, &length));
    text[strcspn(text, "\r\n")] = '\0';
    struct moe_status st = moe_token_check(text);
    if (moe_failed(&st)) {
        explicit_bzero(text, length);
        free(text);
        return moe_error_context(st, "%s: %.120s", setting, path);
    }
    *token = text;
    return st;
}
