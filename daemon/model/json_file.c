/* Opens and reads small files of a model directory. Never maps a file and never follows a link:
 * a file that shrinks or points elsewhere is an error value, not a signal or a leak. */
#include "model/json_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NAME_MAX_BYTES = 128 };

bool moe_file_name_is_plain(const char *name)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    size_t n = strlen(name);
    return n >= 1 && n <= NAME_MAX_BYTES && name[0] != '.' && strspn(name, allowed) == n;
}

struct moe_status moe_file_open_at(int directory, const char *name, int *fd, uint64_t *size)
{
    if (!moe_file_name_is_plain(name))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                         "a file name of the model is not a plain name inside its directory");
    /* O_NONBLOCK: opening a FIFO must not wait for a writer. */
    int opened = openat(directory, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (opened < 0 && errno == ELOOP)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_IO,
                         "%s is a symbolic link; a model directory holds the files themselves",
                         name);
    if (opened < 0)
        return moe_error(errno == ENOENT ? MOE_NOT_FOUND : MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                         "%s cannot be opened: %s", name, strerror(errno));
    struct stat st;
    if (fstat(opened, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size < 0) {
        close(opened);
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_IO, "%s is not a regular file", name);
    }
    *fd = opened;
    *size = (uint64_t)st.st_size;
    return moe_ok();
}

struct moe_status moe_file_read(int fd, uint64_t offset, void *to, uint64_t length)
{
    char *at = to;
    while (length > 0) {
        size_t want = length < (UINT64_C(1) << 30) ? (size_t)length : (size_t)1 << 30;
        ssize_t n = pread(fd, at, want, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "reading failed: %s", strerror(errno));
        if (n == 0)
            return moe_error(MOE_DATA_LOSS, MOE_REASON_TRUNCATED,
                             "the file ends early: it was changed while in use");
        at += n;
        offset += (uint64_t)n;
        length -= (uint64_t)n;
    }
    return moe_ok();
}

struct moe_status moe_json_parse(const char *text, size_t length, const char *what, json_t **out)
{
    json_error_t error;
    json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "%s, byte %d: %s", what,
                         error.position, error.text);
    if (!json_is_object(root)) {
        json_decref(root);
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "%s is not a JSON object",
                         what);
    }
    *out = root;
    return moe_ok();
}

struct moe_status moe_json_read_at(int directory, const char *name, size_t limit, json_t **out)
{
    int fd = -1;
    uint64_t size = 0;
    MOE_TRY(moe_file_open_at(directory, name, &fd, &size));
    struct moe_status st;
    char *text = NULL;
    if (size > limit) {
        st = moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "%s is larger than %zu bytes",
                       name, limit);
        goto done;
    }
    text = malloc((size_t)size + 1);
    if (text == NULL) {
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory to read %s",
                       name);
        goto done;
    }
    MOE_TRY_GOTO(st, moe_error_context(moe_file_read(fd, 0, text, size), "%s", name), done);
    MOE_TRY_GOTO(st, moe_json_parse(text, (size_t)size, name, out), done);
done:
    free(text);
    close(fd);
    return st;
}
