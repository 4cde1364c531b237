/* SPDX-License-Identifier: Apache-2.0 */
/* The safetensors writer: owns the temporary file until it has its final name.
 *
 * A reader sees the old file or the whole new one, also across a crash: the bytes are on disk
 * before the rename, and the rename is on disk before success is reported. */
#include "model/safetensors.h"

#include "base/size.h"
#include "model/json_file.h"
#include "model/sha256.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LENGTH_BYTES = 8, DATA_ALIGN = 8, TEMPORARY_NAMES_MAX = 100 };

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "no memory to write a safetensors file");
}

static struct moe_status io_failed(const char *what)
{
    enum moe_code code = errno == ENOSPC || errno == EDQUOT || errno == EFBIG
                             ? MOE_RESOURCE_EXHAUSTED
                         : errno == EEXIST ? MOE_ALREADY_EXISTS
                                           : MOE_FAILED_PRECONDITION;
    return moe_error(code, MOE_REASON_IO, "%s failed: %s", what, strerror(errno));
}

static int by_width_then_name(const void *a, const void *b)
{
    const struct moe_st_out *const *x = a, *const *y = b;
    uint32_t wx = moe_st_dtype_bits((*x)->dtype), wy = moe_st_dtype_bits((*y)->dtype);
    if (wx != wy)
        return wx > wy ? -1 : 1;
    return strcmp((*x)->name, (*y)->name);
}

/* Adds one entry; `*offset` moves behind its bytes. */
static struct moe_status add_entry(json_t *header, const struct moe_st_out *t, uint64_t *offset)
{
    uint64_t bytes, end;
    if (t->rank > MOE_TENSOR_RANK_MAX || (unsigned)t->dtype >= MOE_ST_DTYPE_COUNT ||
        !moe_st_tensor_bytes(t->dtype, t->rank, t->shape, &bytes) ||
        __builtin_add_overflow(*offset, bytes, &end) || end > INT64_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "tensor %.120s: impossible dtype or shape", t->name);
    if (strcmp(t->name, "__metadata__") == 0 || json_object_get(header, t->name) != NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "tensor %.120s: reserved or repeated name", t->name);
    json_t *entry = json_pack("{s:s, s:[], s:[I, I]}", "dtype", moe_st_dtype_name(t->dtype),
                              "shape", "data_offsets", (json_int_t)*offset, (json_int_t)end);
    /* The header now owns the entry, or has freed it; NULL fails as well. */
    if (json_object_set_new(header, t->name, entry) != 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "a tensor name is not valid UTF-8, or no memory for it");
    json_t *shape = json_object_get(entry, "shape");
    for (uint32_t i = 0; i < t->rank; i++)
        if (json_array_append_new(shape, json_integer((json_int_t)t->shape[i])) != 0)
            return no_memory();
    *offset = end;
    return moe_ok();
}

static struct moe_status add_metadata(json_t *header, const char *const *metadata)
{
    if (metadata == NULL)
        return moe_ok();
    json_t *map = json_object();
    if (map == NULL || json_object_set_new(header, "__metadata__", map) != 0)
        return no_memory();
    for (; metadata[0] != NULL; metadata += 2)
        if (json_object_set_new(map, metadata[0], json_string(metadata[1])) != 0)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                             "metadata is not valid UTF-8");
    return moe_ok();
}

/* Length field, JSON and padding in one piece, `*bytes` long. The caller frees `*out`. */
static struct moe_status build_header(const struct moe_st_out *const *tensors, size_t count,
                                      const char *const *metadata, char **out, size_t *bytes)
{
    struct moe_status st;
    char *text = NULL, *head = NULL;
    json_t *header = json_object();
    if (header == NULL)
        return no_memory();
    uint64_t offset = 0;
    MOE_TRY_GOTO(st, add_metadata(header, metadata), done);
    for (size_t i = 0; i < count; i++)
        MOE_TRY_GOTO(st, add_entry(header, tensors[i], &offset), done);
    text = json_dumps(header, JSON_COMPACT);
    if (text == NULL) {
        st = no_memory();
        goto done;
    }
    size_t length = strlen(text), padded;
    if (!moe_size_round_up(length, DATA_ALIGN, &padded) || padded > MOE_ST_HEADER_MAX) {
        st = moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                       "too many tensors for one safetensors file");
        goto done;
    }
    head = malloc(LENGTH_BYTES + padded);
    if (head == NULL) {
        st = no_memory();
        goto done;
    }
    for (size_t i = 0; i < LENGTH_BYTES; i++)
        head[i] = (char)(unsigned char)((uint64_t)padded >> (8 * i));
    memcpy(head + LENGTH_BYTES, text, length);
    memset(head + LENGTH_BYTES + length, ' ', padded - length);
    *out = head;
    *bytes = LENGTH_BYTES + padded;
    st = moe_ok();
done:
    free(text);
    json_decref(header);
    return st;
}

static struct moe_status write_all(int fd, const void *data, uint64_t length)
{
    const char *at = data;
    while (length > 0) {
        size_t want = length < (UINT64_C(1) << 30) ? (size_t)length : (size_t)1 << 30;
        ssize_t n = write(fd, at, want);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return io_failed("writing");
        at += n;
        length -= (uint64_t)n;
    }
    return moe_ok();
}

/* Makes the rename itself durable. `path` is the file's; its directory is opened. */
static struct moe_status sync_directory(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *directory = slash == NULL   ? strdup(".")
                      : slash == path ? strdup("/")
                                      : strndup(path, (size_t)(slash - path));
    if (directory == NULL)
        return no_memory();
    int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(directory);
    if (fd < 0)
        return io_failed("opening the directory");
    struct moe_status st = fsync(fd) == 0 ? moe_ok() : io_failed("fsync of the directory");
    close(fd);
    return st;
}

static struct moe_status write_file(int fd, const char *head, size_t head_bytes,
                                    const struct moe_st_out *const *tensors, size_t count)
{
    MOE_TRY(write_all(fd, head, head_bytes));
    for (size_t i = 0; i < count; i++) {
        uint64_t bytes = 0;
        MOE_INVARIANT(
            moe_st_tensor_bytes(tensors[i]->dtype, tensors[i]->rank, tensors[i]->shape, &bytes));
        MOE_TRY(write_all(fd, tensors[i]->data, bytes));
    }
    return fsync(fd) == 0 ? moe_ok() : io_failed("fsync");
}

/* A new file next to `path`, with the mode of the umask. Tries other names when a crashed writer
 * has left a file. The caller frees `*name`. */
static struct moe_status create_temporary(const char *path, int *fd, char **name)
{
    for (unsigned attempt = 0; attempt < TEMPORARY_NAMES_MAX; attempt++) {
        if (asprintf(name, "%s.%ld.%u.tmp", path, (long)getpid(), attempt) < 0)
            return no_memory();
        *fd = open(*name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (*fd >= 0)
            return moe_ok();
        int error = errno;
        free(*name);
        errno = error;
        if (error != EEXIST)
            break;
    }
    return io_failed("creating a temporary file");
}

/* Writes a temporary file next to `path` and renames it. */
static struct moe_status replace_file(const char *path, const char *head, size_t head_bytes,
                                      const struct moe_st_out *const *tensors, size_t count)
{
    int fd = -1;
    char *temporary = NULL;
    MOE_TRY(create_temporary(path, &fd, &temporary));
    struct moe_status st = write_file(fd, head, head_bytes, tensors, count);
    if (close(fd) != 0 && !moe_failed(&st))
        st = io_failed("closing");
    if (!moe_failed(&st) && rename(temporary, path) != 0)
        st = io_failed("renaming");
    if (moe_failed(&st))
        unlink(temporary);
    else
        st = sync_directory(path);
    free(temporary);
    return st;
}

struct moe_status moe_st_write(const char *path, const struct moe_st_out *tensors, size_t count,
                               const char *const *metadata)
{
    struct moe_status st;
    char *head = NULL;
    size_t head_bytes = 0;
    const struct moe_st_out **sorted = calloc(count + 1, sizeof *sorted);
    if (sorted == NULL)
        return no_memory();
    for (size_t i = 0; i < count; i++)
        sorted[i] = &tensors[i];
    qsort(sorted, count, sizeof *sorted, by_width_then_name);
    MOE_TRY_GOTO(st, build_header(sorted, count, metadata, &head, &head_bytes), done);
    st = replace_file(path, head, head_bytes, sorted, count);
done:
    free(head);
    free(sorted);
    return st;
}

/* ---- one tensor after the other, from a source ---- */

struct stream {
    int fd;
    struct moe_sha256 sha; /* of all written bytes */
    uint64_t bytes;
    void *buffer; /* of the largest tensor */
};

static struct moe_status put(struct stream *s, const void *data, uint64_t length)
{
    MOE_TRY(write_all(s->fd, data, length));
    moe_sha256_update(&s->sha, data, (size_t)length);
    s->bytes += length;
    return moe_ok();
}

static uint64_t bytes_of(const struct moe_st_out *t)
{
    uint64_t bytes = 0; /* build_header has checked the sizes */
    MOE_INVARIANT(moe_st_tensor_bytes(t->dtype, t->rank, t->shape, &bytes));
    return bytes;
}

static struct moe_status stream_tensors(struct stream *s, const struct moe_st_out *tensors,
                                        const struct moe_st_out *const *sorted, size_t count,
                                        moe_st_source source, void *ctx)
{
    uint64_t most = 0;
    for (size_t i = 0; i < count; i++)
        most = bytes_of(sorted[i]) > most ? bytes_of(sorted[i]) : most;
    s->buffer = most < SIZE_MAX ? malloc((size_t)most + 1) : NULL;
    if (s->buffer == NULL)
        return no_memory();
    for (size_t i = 0; i < count; i++) {
        MOE_TRY(source(ctx, (size_t)(sorted[i] - tensors), s->buffer, bytes_of(sorted[i])));
        MOE_TRY(put(s, s->buffer, bytes_of(sorted[i])));
    }
    return fsync(s->fd) == 0 ? moe_ok() : io_failed("fsync");
}

struct moe_status moe_st_write_at(int directory, const char *name, const struct moe_st_out *tensors,
                                  size_t count, const char *const *metadata, moe_st_source source,
                                  void *ctx, uint64_t *bytes, char *sha256)
{
    struct moe_status st;
    struct stream s = {.fd = -1};
    char *head = NULL, hex[MOE_SHA256_HEX];
    size_t head_bytes = 0;
    MOE_INVARIANT(moe_file_name_is_plain(name));
    const struct moe_st_out **sorted = calloc(count + 1, sizeof *sorted);
    if (sorted == NULL)
        return no_memory();
    moe_sha256_begin(&s.sha);
    for (size_t i = 0; i < count; i++)
        sorted[i] = &tensors[i];
    qsort(sorted, count, sizeof *sorted, by_width_then_name);
    MOE_TRY_GOTO(st, build_header(sorted, count, metadata, &head, &head_bytes), done);
    s.fd = openat(directory, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (s.fd < 0) {
        st = io_failed("creating a tensor file");
        goto done;
    }
    st = put(&s, head, head_bytes);
    if (!moe_failed(&st))
        st = stream_tensors(&s, tensors, sorted, count, source, ctx);
    if (close(s.fd) != 0 && !moe_failed(&st))
        st = io_failed("closing");
    if (!moe_failed(&st))
        st = moe_sha256_finish(&s.sha, hex);
    if (moe_failed(&st)) {
        (void)unlinkat(directory, name, 0);
        goto done;
    }
    *bytes = s.bytes;
    if (sha256 != NULL)
        memcpy(sha256, hex, sizeof hex);
done:
    moe_sha256_drop(&s.sha);
    free(s.buffer);
    free(head);
    free(sorted);
    return st;
}
