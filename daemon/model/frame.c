/* SPDX-License-Identifier: Apache-2.0 */
/* The files of a model without the weights of its MoE layers.
 *
 * Copies each shard except the ranges of these weights; the ranges are holes until their owners
 * write them. Never links files: a copy with shared blocks, if the file system supports it, is as
 * cheap and cannot be changed from outside. */
#include "model/model_write.h"

#include "daemon/log.h"
#include "model/json_file.h"
#include "model/model_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { COPY_BYTES = 1 << 20, SMALL_FILE_BYTES_MAX = 256 << 20, EXTENSIONS = 10 };

/* Bytes [offset, offset + bytes) of `file`. */
struct hole {
    const struct moe_st_file *file;
    uint64_t offset, bytes;
};

struct holes {
    struct hole *list;
    size_t count, room;
};

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory to copy a model");
}

static struct moe_status io_failed(const char *what, int error)
{
    return moe_error(error == ENOSPC || error == EDQUOT || error == EFBIG ? MOE_RESOURCE_EXHAUSTED
                                                                          : MOE_FAILED_PRECONDITION,
                     MOE_REASON_IO, "%s: %s", what, strerror(error));
}

static struct moe_status add_hole(void *ctx, enum moe_weight weight, uint32_t expert,
                                  const struct moe_piece *p)
{
    struct holes *h = ctx;
    (void)weight;
    (void)expert;
    if (h->count == h->room) {
        size_t room = h->room > 0 ? 2 * h->room : 256;
        struct hole *list = reallocarray(h->list, room, sizeof *list);
        if (list == NULL)
            return no_memory();
        h->list = list;
        h->room = room;
    }
    h->list[h->count++] = (struct hole){p->at.file, p->at.tensor->offset + p->first, p->bytes};
    return moe_ok();
}

static int by_place(const void *a, const void *b)
{
    const struct hole *x = a, *y = b;
    if (x->file != y->file)
        return (uintptr_t)x->file < (uintptr_t)y->file ? -1 : 1;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

static struct moe_status find_holes(const struct moe_model *m, struct holes *h)
{
    for (size_t i = 0; i < m->config.layer_count; i++) {
        uint32_t experts[MOE_MAX_EXPERTS];
        for (uint32_t e = 0; e < m->config.layers[i].experts; e++)
            experts[e] = e;
        MOE_TRY(
            moe_model__visit_layer(m, i, true, experts, m->config.layers[i].experts, add_hole, h));
    }
    qsort(h->list, h->count, sizeof *h->list, by_place);
    return moe_ok();
}

static struct moe_status write_all(int fd, const char *from, size_t length, uint64_t offset)
{
    while (length > 0) {
        ssize_t n = pwrite(fd, from, length, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return io_failed("writing", errno);
        from += n;
        offset += (uint64_t)n;
        length -= (size_t)n;
    }
    return moe_ok();
}

/* Copies through memory, if the file system has no better way. */
static struct moe_status copy_plainly(int from, int to, uint64_t offset, uint64_t end)
{
    struct moe_status st = moe_ok();
    char *buffer = malloc(COPY_BYTES);
    if (buffer == NULL)
        return no_memory();
    for (; offset < end && !moe_failed(&st); offset += COPY_BYTES) {
        size_t n = end - offset < COPY_BYTES ? (size_t)(end - offset) : COPY_BYTES;
        st = moe_file_read(from, offset, buffer, n);
        if (!moe_failed(&st))
            st = write_all(to, buffer, n, offset);
    }
    free(buffer);
    return st;
}

static struct moe_status copy_range(int from, int to, uint64_t offset, uint64_t end)
{
    off_t in = (off_t)offset, out = (off_t)offset;
    while ((uint64_t)in < end) {
        ssize_t n = copy_file_range(from, &in, to, &out, (size_t)(end - (uint64_t)in), 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) /* includes an early end, which a later read reports */
            return copy_plainly(from, to, (uint64_t)in, end);
    }
    return moe_ok();
}

/* Allocates disk space for the whole file, so that a full disk fails here. */
static struct moe_status reserve(int fd, uint64_t bytes)
{
    int error = bytes > 0 ? posix_fallocate(fd, 0, (off_t)bytes) : 0;
    if (error == EOPNOTSUPP || error == EINVAL)
        error = ftruncate(fd, (off_t)bytes) == 0 ? 0 : errno;
    return error == 0 ? moe_ok() : io_failed("making room", error);
}

/* Copies `bytes` of `from` to a new file, except the holes [0, count). */
static struct moe_status copy_file(int from, uint64_t bytes, int directory, const char *name,
                                   const struct hole *holes, size_t count, uint64_t *copied)
{
    int fd = openat(directory, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0)
        return io_failed("creating a file", errno);
    struct moe_status st = reserve(fd, bytes);
    uint64_t at = 0;
    for (size_t i = 0; i < count && !moe_failed(&st); i++) {
        if (holes[i].offset > at) {
            st = copy_range(from, fd, at, holes[i].offset);
            *copied += holes[i].offset - at;
        }
        if (holes[i].offset + holes[i].bytes > at)
            at = holes[i].offset + holes[i].bytes;
    }
    if (!moe_failed(&st))
        st = copy_range(from, fd, at, bytes);
    *copied += bytes - at;
    if (!moe_failed(&st) && fsync(fd) != 0)
        st = io_failed("fsync", errno);
    if (close(fd) != 0 && !moe_failed(&st))
        st = io_failed("closing", errno);
    return moe_error_context(st, "%s", name);
}

static struct moe_status copy_shards(const struct moe_model *m, int to, const struct holes *h,
                                     uint64_t *copied)
{
    for (size_t s = 0; s < moe_checkpoint_shards(m->checkpoint); s++) {
        const char *name;
        const struct moe_st_file *file = moe_checkpoint_shard(m->checkpoint, s, &name);
        size_t first = 0, count = 0;
        while (first < h->count && h->list[first].file != file)
            first++;
        while (first + count < h->count && h->list[first + count].file == file)
            count++;
        MOE_TRY(copy_file(moe_st_descriptor(file), moe_st_file_bytes(file), to, name,
                          h->list + first, count, copied));
    }
    return moe_ok();
}

static bool is_companion(const char *name)
{
    static const char *const extensions[EXTENSIONS] = {
        ".json", ".txt", ".model", ".jinja", ".py", ".md", ".tiktoken", ".yaml", ".yml", ".spm"};
    const char *dot = strrchr(name, '.');
    for (size_t i = 0; dot != NULL && i < EXTENSIONS; i++)
        if (strcmp(dot, extensions[i]) == 0)
            return true;
    return strncmp(name, "LICENSE", 7) == 0;
}

static struct moe_status copy_companion(const struct moe_model *m, int to, const char *name,
                                        uint64_t *copied)
{
    int fd = -1;
    uint64_t size = 0;
    struct moe_status st = moe_file_open_at(m->directory, name, &fd, &size);
    if (moe_failed(&st) || size > SMALL_FILE_BYTES_MAX) {
        moe_log_warn("%s is a link, a directory or too large, and is not part of the checkpoint",
                     name);
        st = moe_ok();
    } else {
        st = copy_file(fd, size, to, name, NULL, 0, copied);
    }
    if (fd >= 0)
        close(fd);
    return st;
}

static struct moe_status copy_companions(const struct moe_model *m, int to, const char *except,
                                         uint64_t *copied)
{
    struct moe_status st = moe_ok();
    int fd = openat(m->directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = fd >= 0 ? fdopendir(fd) : NULL;
    if (list == NULL) {
        st = io_failed("the model directory", errno);
        if (fd >= 0)
            close(fd);
        return st;
    }
    for (struct dirent *e = readdir(list); e != NULL && !moe_failed(&st); e = readdir(list))
        if (moe_file_name_is_plain(e->d_name) && is_companion(e->d_name) &&
            (except == NULL || strcmp(e->d_name, except) != 0))
            st = copy_companion(m, to, e->d_name, copied);
    closedir(list);
    return st;
}

struct moe_status moe_model_write_frame(const struct moe_model *m, int to, const char *except,
                                        uint64_t *bytes)
{
    struct moe_status st;
    struct holes holes = {0};
    *bytes = 0;
    MOE_TRY_GOTO(st, find_holes(m, &holes), done);
    MOE_TRY_GOTO(st, copy_shards(m, to, &holes, bytes), done);
    MOE_TRY_GOTO(st, copy_companions(m, to, except, bytes), done);
    if (fsync(to) != 0)
        st = io_failed("fsync of the directory", errno);
done:
    free(holes.list);
    return st;
}
