/* SPDX-License-Identifier: Apache-2.0 */
/* Directories of checkpoints: made hidden, filled, synced, renamed; removed with the same care.
 *
 * A reader sees a complete checkpoint or none. Every open is relative to the root, of a plain name,
 * and not through a link, so that no client's name leads out of the root. */
#include "checkpoint/internal.h"

#include "daemon/log.h"
#include "model/json_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HASH_BYTES = 1 << 20, DEPTH_MAX = 8 };

struct moe_status moe_ckpt__open_root(const char *root, int *fd)
{
    *fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return *fd >= 0 ? moe_ok() : moe_ckpt__io("the training directory");
}

struct moe_status moe_ckpt__open_dir(int at, const char *name, int *fd)
{
    struct stat there;
    *fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (*fd >= 0)
        return moe_ok();
    struct moe_status st = moe_ckpt__io("opening a directory");
    st.code = errno == ENOENT ? MOE_NOT_FOUND : st.code;
    /* Of a link, the kernel says that it is not a directory. */
    if (fstatat(at, name, &there, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(there.st_mode))
        st = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                       "%s is a symbolic link; links are not followed", name);
    return st;
}

static void hidden_name(char hidden[MOE_CKPT_HIDDEN_MAX], const struct moe_checkpoint_context *c,
                        const char *name)
{
    snprintf(hidden, MOE_CKPT_HIDDEN_MAX, ".%.*s.%016" PRIx64 ".saving", MOE_CHECKPOINT_NAME_MAX,
             name, c->writer);
}

static struct moe_status check_name(const char *name)
{
    if (moe_file_name_is_plain(name) && strlen(name) <= MOE_CHECKPOINT_NAME_MAX)
        return moe_ok();
    return moe_error(
        MOE_INVALID_ARGUMENT, MOE_REASON_NAME_INVALID,
        "a checkpoint's name has 1 to %d characters of A-Z a-z 0-9 . _ - and begins with no dot",
        MOE_CHECKPOINT_NAME_MAX);
}

static struct moe_status exists(const char *name)
{
    return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_CHECKPOINT_EXISTS,
                     "checkpoint %s exists already", name);
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n > m && strcmp(text + n - m, end) == 0;
}

/* Renames a ".saving" directory before it removes it: a process that still writes it then fails to
 * find it, and cannot publish an incomplete checkpoint. */
static void sweep_one(int root, const char *name)
{
    static const char saving[] = ".saving", removed[] = ".removed";
    char doomed[NAME_MAX + sizeof removed];
    struct moe_status st = moe_ok();
    snprintf(doomed, sizeof doomed, "%s", name);
    if (ends_with(name, saving)) {
        snprintf(doomed, sizeof doomed, "%.*s%s", (int)(strlen(name) - strlen(saving)), name,
                 removed);
        st = moe_ckpt__remove_tree(root, doomed);
        if (!moe_failed(&st) && renameat(root, name, root, doomed) != 0 && errno != ENOENT)
            st = moe_ckpt__io("renaming");
    }
    if (!moe_failed(&st))
        st = moe_ckpt__remove_tree(root, doomed);
    if (moe_failed(&st)) /* a process writes into it: the next Save tries again */
        moe_log_warn("%s, left by a Save, could not be removed: %s", name, st.text);
}

struct moe_status moe_ckpt__open_names(int root, DIR **names)
{
    int fd = openat(root, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    *names = fd >= 0 ? fdopendir(fd) : NULL;
    if (*names != NULL)
        return moe_ok();
    struct moe_status st = moe_ckpt__io("the training directory");
    if (fd >= 0)
        close(fd);
    return st;
}

/* Removes leftovers of ended processes, for any checkpoint's name. The group writes one checkpoint
 * at a time and has waited for abandoned ones, so a hidden directory is a leftover or belongs to
 * another live process. */
static struct moe_status sweep(const struct moe_checkpoint_context *c, int root)
{
    DIR *names;
    MOE_TRY(moe_ckpt__open_names(root, &names));
    for (struct dirent *e = readdir(names); e != NULL; e = readdir(names)) {
        if (e->d_name[0] != '.')
            continue;
        bool saving = ends_with(e->d_name, ".saving");
        if ((saving && !moe_ckpt__is_written(c, root, e->d_name)) ||
            ends_with(e->d_name, ".removed"))
            sweep_one(root, e->d_name);
        else if (ends_with(e->d_name, MOE_CKPT_WRITER))
            moe_ckpt__sweep_writer(root, e->d_name);
    }
    closedir(names);
    return moe_ok();
}

struct moe_status moe_ckpt__begin(const struct moe_checkpoint_context *c, const char *name,
                                  int *hidden)
{
    int fd = -1;
    struct stat there;
    char directory[MOE_CKPT_HIDDEN_MAX];
    MOE_TRY(check_name(name));
    MOE_TRY(moe_ckpt__open_root(c->root, &fd));
    hidden_name(directory, c, name);
    struct moe_status st = moe_ok();
    if (fstatat(fd, name, &there, AT_SYMLINK_NOFOLLOW) == 0) {
        st = exists(name);
        goto done;
    }
    MOE_TRY_GOTO(st, moe_ckpt__show_writer(c, fd), done);
    MOE_TRY_GOTO(st, sweep(c, fd), done);
    if (mkdirat(fd, directory, 0700) != 0) {
        st = moe_ckpt__io("making a directory");
        goto done;
    }
    st = moe_ckpt__open_dir(fd, directory, hidden);
done:
    if (moe_failed(&st))
        moe_ckpt__hide_writer(c, fd);
    close(fd);
    return st;
}

struct moe_status moe_ckpt__join(const struct moe_checkpoint_context *c, const char *name,
                                 int *hidden)
{
    int fd = -1;
    char directory[MOE_CKPT_HIDDEN_MAX];
    MOE_TRY(check_name(name));
    MOE_TRY(moe_ckpt__open_root(c->root, &fd));
    hidden_name(directory, c, name);
    struct moe_status st = moe_ckpt__open_dir(fd, directory, hidden);
    close(fd);
    return moe_error_context(st, "the lowest slot's directory (is it the same file system?)");
}

struct moe_status moe_ckpt__sync(int directory)
{
    return fsync(directory) == 0 ? moe_ok() : moe_ckpt__io("fsync of a directory");
}

/* Does not replace an existing entry. If the file system cannot guarantee that, checks first. */
static struct moe_status rename_new(int root, const char *from, const char *to)
{
    struct stat there;
    if (renameat2(root, from, root, to, RENAME_NOREPLACE) == 0)
        return moe_ok();
    if (errno == EEXIST)
        return exists(to);
    if (errno != EINVAL && errno != ENOSYS)
        return moe_ckpt__io("renaming");
    if (fstatat(root, to, &there, AT_SYMLINK_NOFOLLOW) == 0)
        return exists(to);
    return renameat(root, from, root, to) == 0 ? moe_ok() : moe_ckpt__io("renaming");
}

struct moe_status moe_ckpt__publish(const struct moe_checkpoint_context *c, const char *name)
{
    int fd = -1;
    char directory[MOE_CKPT_HIDDEN_MAX];
    MOE_TRY(moe_ckpt__open_root(c->root, &fd));
    hidden_name(directory, c, name);
    int fence = -1;
    struct moe_status st = moe_ckpt__pass_fence(c, fd, &fence);
    if (!moe_failed(&st)) {
        st = rename_new(fd, directory, name);
        moe_ckpt__leave_fence(fence);
    }
    if (!moe_failed(&st)) {
        struct moe_status synced = moe_ckpt__sync(fd);
        if (moe_failed(&synced)) /* it exists: nothing can be taken back */
            moe_log_error("checkpoint %s may not survive a loss of power: %s", name, synced.text);
        moe_ckpt__hide_writer(c, fd);
    }
    close(fd);
    return st;
}

void moe_checkpoint_abandon(const struct moe_checkpoint_context *c, const char *name)
{
    int fd = -1;
    char directory[MOE_CKPT_HIDDEN_MAX];
    hidden_name(directory, c, name);
    struct moe_status st = moe_ckpt__open_root(c->root, &fd);
    if (!moe_failed(&st)) {
        st = moe_ckpt__remove_tree(fd, directory);
        moe_ckpt__hide_writer(c, fd);
        close(fd);
    }
    if (moe_failed(&st))
        moe_log_warn("the remains of checkpoint %s could not be removed: %s", name, st.text);
}

static struct moe_status remove_below(int at, const char *name, unsigned depth)
{
    int fd = -1;
    if (unlinkat(at, name, 0) == 0 || errno == ENOENT)
        return moe_ok();
    if (errno != EISDIR && errno != EPERM)
        return moe_ckpt__io("removing a file");
    if (depth == DEPTH_MAX)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                         "directories are nested too deeply");
    struct moe_status opened = moe_ckpt__open_dir(at, name, &fd);
    if (opened.code == MOE_NOT_FOUND) /* another process removes it, too */
        return moe_ok();
    MOE_TRY(opened);
    DIR *list = fdopendir(fd);
    if (list == NULL) {
        struct moe_status st = moe_ckpt__io("reading a directory");
        close(fd);
        return st;
    }
    struct moe_status st = moe_ok();
    for (struct dirent *e = readdir(list); e != NULL && !moe_failed(&st); e = readdir(list))
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            st = remove_below(fd, e->d_name, depth + 1);
    closedir(list);
    if (!moe_failed(&st) && unlinkat(at, name, AT_REMOVEDIR) != 0 && errno != ENOENT)
        st = moe_ckpt__io("removing a directory");
    return st;
}

struct moe_status moe_ckpt__remove_tree(int at, const char *name)
{
    return remove_below(at, name, 0);
}

static struct moe_status write_all(int fd, const char *data, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(fd, data, bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return moe_ckpt__io("writing");
        data += n;
        bytes -= (size_t)n;
    }
    return fsync(fd) == 0 ? moe_ok() : moe_ckpt__io("fsync");
}

struct moe_status moe_ckpt__write_file(int at, const char *name, const void *data, size_t bytes,
                                       char *sha256)
{
    int fd = openat(at, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0)
        return moe_ckpt__io("creating a file");
    struct moe_status st = write_all(fd, data, bytes);
    if (close(fd) != 0 && !moe_failed(&st))
        st = moe_ckpt__io("closing");
    if (sha256 != NULL && !moe_failed(&st))
        st = moe_sha256_of(data, bytes, sha256);
    return st;
}

struct moe_status moe_ckpt__write_json(int at, const char *name, const json_t *json, char *sha256)
{
    char *text = json_dumps(json, JSON_INDENT(1) | JSON_SORT_KEYS | JSON_REAL_PRECISION(17));
    if (text == NULL)
        return moe_ckpt__no_memory();
    struct moe_status st = moe_ckpt__write_file(at, name, text, strlen(text), sha256);
    free(text);
    return st;
}

static struct moe_status hash_open(const struct moe_checkpoint_context *c, int fd, uint64_t offset,
                                   uint64_t bytes, char *sha256)
{
    struct moe_sha256 sha;
    struct moe_status st = moe_ok();
    char *buffer = malloc(HASH_BYTES);
    if (buffer == NULL)
        return moe_ckpt__no_memory();
    moe_sha256_begin(&sha);
    while (bytes > 0 && !moe_failed(&st)) {
        size_t n = bytes < HASH_BYTES ? (size_t)bytes : HASH_BYTES;
        st = moe_file_read(fd, offset, buffer, n);
        moe_sha256_update(&sha, buffer, moe_failed(&st) ? 0 : n);
        offset += n;
        bytes -= n;
        if (c->processed != NULL)
            atomic_fetch_add(c->processed, n);
        if (!moe_failed(&st))
            st = moe_ckpt__go_on(c);
    }
    if (!moe_failed(&st))
        st = moe_sha256_finish(&sha, sha256);
    moe_sha256_drop(&sha);
    free(buffer);
    return st;
}

struct moe_status moe_ckpt__hash(const struct moe_checkpoint_context *c, int at, const char *name,
                                 uint64_t offset, uint64_t bytes, char sha256[MOE_SHA256_HEX])
{
    int fd = -1;
    uint64_t size = 0;
    MOE_TRY(moe_file_open_at(at, name, &fd, &size));
    struct moe_status st =
        hash_open(c, fd, offset, bytes == UINT64_MAX ? size - offset : bytes, sha256);
    close(fd);
    return moe_error_context(st, "%s", name);
}
