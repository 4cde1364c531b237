/* SPDX-License-Identifier: Apache-2.0 */
/* Opens and reads small files of a model directory. Never maps a file and never follows a link, so
 * a file that shrinks or is a link gives an error value. */
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

/* ----------------------------------------------------------------------- members */

static size_t skip_space(const char *text, size_t length, size_t at)
{
    while (at < length && memchr(" \t\r\n", text[at], 4) != NULL)
        at++;
    return at;
}

/* The place after the string that begins at `at`; `length` if it does not end. */
static size_t skip_string(const char *text, size_t length, size_t at)
{
    for (at++; at < length && text[at] != '"'; at++)
        if (text[at] == '\\')
            at++;
    return at < length ? at + 1 : length;
}

/* The place of the comma or bracket that ends the value; `length` if there is none. */
static size_t skip_value(const char *text, size_t length, size_t at)
{
    for (size_t depth = 0; at < length;) {
        char c = text[at];
        bool closes = c == '}' || c == ']';
        if (depth == 0 && (closes || c == ','))
            return at;
        if (c == '"') {
            at = skip_string(text, length, at);
            continue;
        }
        depth += c == '{' || c == '[';
        depth -= closes;
        at++;
    }
    return length;
}

/* Sets `*at` to the end of the text if only space follows the closing bracket. Returns false. */
static bool end_members(const char *text, size_t length, size_t bracket, size_t *at)
{
    if (skip_space(text, length, bracket + 1) == length)
        *at = length;
    return false;
}

bool moe_json_next_member(const char *text, size_t length, size_t *at, struct moe_json_member *out)
{
    bool first = *at == 0;
    size_t i = skip_space(text, length, *at);
    if (i < length && text[i] == '}' && !first)
        return end_members(text, length, i, at);
    if (i == length || text[i] != (first ? '{' : ','))
        return false;
    i = skip_space(text, length, i + 1);
    if (i < length && text[i] == '}' && first)
        return end_members(text, length, i, at);
    if (i == length || text[i] != '"')
        return false;
    size_t name = i, value;
    i = skip_string(text, length, i);
    out->name = text + name;
    out->name_length = i - name;
    i = skip_space(text, length, i);
    if (i == length || text[i] != ':')
        return false;
    value = skip_space(text, length, i + 1);
    i = skip_value(text, length, value);
    if (i == length || text[i] == ']')
        return false;
    out->value = text + value;
    out->value_length = i - value;
    *at = i;
    return true;
}

/* ----------------------------------------------------------------------- parsing */

/* Counts opening brackets and commas: each value except the first follows one. */
static bool has_too_many_values(const char *text, size_t length)
{
    size_t count = 1;
    for (size_t at = 0; at < length && count <= MOE_JSON_VALUES_MAX;) {
        if (text[at] == '"') {
            at = skip_string(text, length, at);
            continue;
        }
        count += text[at] == '{' || text[at] == '[' || text[at] == ',';
        at++;
    }
    return count > MOE_JSON_VALUES_MAX;
}

struct moe_status moe_json_parse_piece(const char *text, size_t length, const char *what,
                                       json_t **out)
{
    json_error_t error;
    if (has_too_many_values(text, length))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "%s: more than %d values",
                         what, MOE_JSON_VALUES_MAX);
    json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
    if (root == NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "%s, byte %d: %s", what,
                         error.position, error.text);
    *out = root;
    return moe_ok();
}

struct moe_status moe_json_parse(const char *text, size_t length, const char *what, json_t **out)
{
    json_t *root;
    MOE_TRY(moe_json_parse_piece(text, length, what, &root));
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
