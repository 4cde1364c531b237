/* SPDX-License-Identifier: Apache-2.0 */
#include "store/file.h"

#include "daemon/log.h"
#include "daemon/trusted_file.h"
#include "store/records.h"
#include "store/remembered.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const char log_name[] = "group.log", temp_name[] = "group.log.new", lock_name[] = "lock",
                  image_temp_name[] = MOE_STORE_IMAGE ".new";

enum { IMAGE_NAME_BYTES = sizeof MOE_STORE_IMAGE + 12 };

struct file_store {
    struct moe_store store;
    const struct moe_store_format *format;
    char *path; /* of the directory */
    int dir, lock;
    int log;      /* -1: the next append writes a new file */
    size_t bytes; /* of `log`; all records are intact */
};

static struct moe_status io_error(const char *what)
{
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "%s: %s", what, strerror(errno));
}

static void close_if_open(int fd)
{
    if (fd >= 0)
        close(fd);
}

static bool write_all(int fd, const uint8_t *data, size_t length, size_t offset)
{
    while (length > 0) {
        ssize_t n = pwrite(fd, data, length, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        data += n;
        offset += (size_t)n;
        length -= (size_t)n;
    }
    return true;
}

/* A whole log of one record, which the caller frees; NULL without memory. */
static uint8_t *make_image(const struct file_store *s, const uint8_t *record, size_t length)
{
    uint8_t *image = malloc(MOE_RECORDS_HEADER_BYTES + MOE_RECORDS_HEAD_BYTES + length);
    if (image == NULL)
        return NULL;
    moe_records_put_header(image, s->format->version);
    moe_records_put_head(image + MOE_RECORDS_HEADER_BYTES, record, length);
    memcpy(image + MOE_RECORDS_HEADER_BYTES + MOE_RECORDS_HEAD_BYTES, record, length);
    return image;
}

/* Replaces the log by `image`. At any moment either the whole old file or the whole new one
 * exists. */
static struct moe_status write_new(struct file_store *s, const uint8_t *image, size_t bytes)
{
    struct moe_status st = moe_ok();
    int fd = openat(s->dir, temp_name, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return io_error("cannot create the group state");
    if (!write_all(fd, image, bytes, 0) || fsync(fd) != 0)
        st = io_error("cannot write the group state");
    else if (renameat(s->dir, temp_name, s->dir, log_name) != 0 || fsync(s->dir) != 0)
        st = io_error("cannot replace the group state");
    if (s->log >= 0)
        close(s->log);
    s->log = st.code == MOE_OK ? fd : -1; /* it is unknown which file has the name */
    if (st.code != MOE_OK) {
        close(fd);
        return st;
    }
    s->bytes = bytes;
    return st;
}

/* Creates the directory if it is missing, opens and locks it. The caller closes what was opened,
 * also on failure. */
static struct moe_status open_directory(const char *path, int *dir, int *lock)
{
    if (mkdir(path, 0700) != 0 && errno != EEXIST)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "cannot create the state directory %s: %s",
                         path, strerror(errno));
    *dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*dir < 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "cannot open the state directory %s: %s",
                         path, strerror(errno));
    MOE_TRY(moe_error_context(moe_trusted_directory_check(path, *dir), "the state directory"));
    *lock = openat(*dir, lock_name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (*lock < 0)
        return io_error("cannot open the lock of the state directory");
    if (flock(*lock, LOCK_EX | LOCK_NB) != 0)
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_IO,
                         "another coordinator uses this state directory");
    return moe_ok();
}

static bool is_unlinked(int fd)
{
    struct stat info;
    return fstat(fd, &info) == 0 && info.st_nlink == 0;
}

static struct moe_status replace_directory(struct file_store *s)
{
    int dir = -1, lock = -1;
    struct moe_status st = open_directory(s->path, &dir, &lock);
    if (moe_failed(&st)) {
        close_if_open(lock);
        close_if_open(dir);
        return st;
    }
    close(s->lock);
    close(s->dir);
    s->dir = dir;
    s->lock = lock;
    return st;
}

/* The log may have been removed, also with its directory. A record holds the whole state, so the
 * next append restores it, in the same directory or in a new one of the same name. */
static struct moe_status replace_removed(struct file_store *s)
{
    bool gone = is_unlinked(s->dir);
    if (s->log >= 0 && (gone || is_unlinked(s->log))) {
        moe_log_warn("the group state in %s was removed; creating it again", s->path);
        close(s->log);
        s->log = -1;
    }
    return gone ? replace_directory(s) : moe_ok();
}

static struct moe_status append_record(struct file_store *s, const uint8_t *record, size_t bytes)
{
    if (write_all(s->log, record, bytes, s->bytes) && fdatasync(s->log) == 0) {
        s->bytes += bytes;
        return moe_ok();
    }
    /* After a failed write or sync the content is unknown: never append to it. */
    struct moe_status st = io_error("cannot write the group state");
    if (ftruncate(s->log, (off_t)s->bytes) != 0)
        st = moe_error_context(st, "and cannot undo it");
    close(s->log);
    s->log = -1;
    return st;
}

static struct moe_status append(struct moe_store *store, const uint8_t *record, size_t length)
{
    struct file_store *s = (struct file_store *)store;
    MOE_TRY(replace_removed(s));
    uint8_t *image = make_image(s, record, length);
    if (image == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "group state");
    bool anew = s->log < 0 || s->bytes > MOE_STORE_COMPACT_BYTES;
    size_t bytes = MOE_RECORDS_HEAD_BYTES + length;
    struct moe_status st = anew ? write_new(s, image, MOE_RECORDS_HEADER_BYTES + bytes)
                                : append_record(s, image + MOE_RECORDS_HEADER_BYTES, bytes);
    free(image);
    return st;
}

/* All of a file of at most `max` bytes; the caller frees `*image`. */
static struct moe_status read_all(int fd, size_t max, uint8_t **image, size_t *length)
{
    uint8_t *bytes = malloc(max + 1);
    if (bytes == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "group state");
    struct moe_status st = moe_ok();
    ssize_t n = 1;
    *length = 0;
    while (*length <= max && n != 0) {
        n = read(fd, bytes + *length, max + 1 - *length);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            st = io_error("cannot read the group state");
            break;
        }
        *length += (size_t)n;
    }
    if (!moe_failed(&st) && *length > max)
        st = moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "damaged: file too large");
    if (moe_failed(&st)) {
        free(bytes);
        return st;
    }
    *image = bytes;
    return st;
}

static struct moe_status copy_record(const struct moe_records_last *last,
                                     struct moe_store_found *found)
{
    found->record = malloc(last->length > 0 ? last->length : 1);
    if (found->record == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "group state");
    memcpy(found->record, last->payload, last->length);
    found->length = last->length;
    found->format = last->format;
    found->lost = last->lost;
    return moe_ok();
}

static struct moe_status read_log(struct file_store *s, struct moe_store_found *found)
{
    uint8_t *image = NULL;
    struct moe_records_last last;
    struct stat file;
    struct moe_status st = moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED,
                                     "damaged: not a regular file"); /* a FIFO would block */
    size_t most = MOE_STORE_COMPACT_BYTES + MOE_RECORDS_HEAD_BYTES + s->format->record_most;
    if (fstat(s->log, &file) == 0 && S_ISREG(file.st_mode))
        st = read_all(s->log, most, &image, &s->bytes);
    if (!moe_failed(&st))
        st = moe_records_read(image, s->bytes, s->format, &last);
    if (!moe_failed(&st))
        st = copy_record(&last, found);
    free(image);
    if (st.code == MOE_DATA_LOSS)
        st = moe_error(st.code, st.reason,
                       "%s; move it away: numbering continues from the epoch that workers report",
                       st.text);
    if (!moe_failed(&st) && last.lost > 0)
        moe_log_warn("%s ends with an incomplete record: it is dropped, and epochs go on above it",
                     s->store.name);
    /* Records of this format need a header of this format, and stand behind intact ones. */
    if (!moe_failed(&st) && (last.lost > 0 || last.format < s->format->version)) {
        close(s->log);
        s->log = -1;
    }
    return moe_error_context(st, "%s", s->store.name);
}

static void image_name(uint32_t number, char name[IMAGE_NAME_BYTES])
{
    int n = snprintf(name, IMAGE_NAME_BYTES, "%s", MOE_STORE_IMAGE);
    if (number >= MOE_STORE_PLACEMENTS)
        (void)snprintf(name, IMAGE_NAME_BYTES, "placement.%u", number - MOE_STORE_PLACEMENTS);
    else if (number != 0)
        (void)snprintf(name + n, IMAGE_NAME_BYTES - (size_t)n, ".%u", number);
}

static struct moe_status read_image(struct moe_store *store, uint32_t number, size_t max,
                                    uint8_t **image, size_t *length)
{
    struct file_store *s = (struct file_store *)store;
    char name[IMAGE_NAME_BYTES];
    image_name(number, name);
    *image = NULL;
    *length = 0;
    int fd = openat(s->dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return errno == ENOENT ? moe_ok()
                               : moe_error_context(io_error("cannot open it"), "%s", name);
    struct moe_status st = read_all(fd, max, image, length);
    close(fd);
    return moe_error_context(st, "%s", name);
}

static struct moe_status replace_image(struct file_store *s, const char *name, const uint8_t *image,
                                       size_t length)
{
    struct moe_status st = moe_ok();
    int fd = openat(s->dir, image_temp_name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW,
                    0600);
    if (fd < 0)
        return io_error("cannot create " MOE_STORE_IMAGE);
    if (!write_all(fd, image, length, 0) || fsync(fd) != 0)
        st = io_error("cannot write " MOE_STORE_IMAGE);
    close(fd);
    if (!moe_failed(&st) &&
        (renameat(s->dir, image_temp_name, s->dir, name) != 0 || fsync(s->dir) != 0))
        st = io_error("cannot replace " MOE_STORE_IMAGE);
    return st;
}

static struct moe_status write_image(struct moe_store *store, uint32_t number, const uint8_t *image,
                                     size_t length)
{
    struct file_store *s = (struct file_store *)store;
    char name[IMAGE_NAME_BYTES];
    image_name(number, name);
    MOE_TRY(replace_removed(s));
    if (image != NULL)
        return replace_image(s, name, image, length);
    if (unlinkat(s->dir, name, 0) != 0 && errno != ENOENT)
        return io_error("cannot remove " MOE_STORE_IMAGE);
    return fsync(s->dir) == 0 ? moe_ok() : io_error("cannot remove " MOE_STORE_IMAGE);
}

static void close_store(struct moe_store *store)
{
    struct file_store *s = (struct file_store *)store;
    close_if_open(s->log);
    close_if_open(s->lock);
    close_if_open(s->dir);
    free(s->path);
    free(s);
}

/* A coordinator that lost its option --store would begin a second group here. */
static struct moe_status refuse_directory_of_etcd(const struct file_store *s)
{
    struct stat info;
    if (fstatat(s->dir, MOE_STORE_GROUP_ID, &info, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT ? moe_ok() : io_error("cannot look at " MOE_STORE_GROUP_ID);
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                     "the state of this group is in etcd: start with --store etcd, or with another "
                     "--state-dir for another group (%.120s/%s)",
                     s->path, MOE_STORE_GROUP_ID);
}

static struct moe_status open_files(struct file_store *s, struct moe_store_found *found)
{
    MOE_TRY(open_directory(s->path, &s->dir, &s->lock));
    MOE_TRY(refuse_directory_of_etcd(s));
    s->log = openat(s->dir, log_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (s->log >= 0)
        return read_log(s, found);
    if (errno != ENOENT)
        return moe_error_context(io_error("cannot open it"), "%s", s->store.name);
    return moe_ok();
}

struct moe_status moe_store_file_open(const char *directory, const struct moe_store_format *format,
                                      struct moe_store **out, struct moe_store_found *found)
{
    static const struct moe_store_ops ops = {append, read_image, write_image, close_store};
    struct file_store *s = malloc(sizeof *s);
    struct moe_status st =
        moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "group state");
    *found = (struct moe_store_found){0};
    if (s == NULL)
        return st;
    *s = (struct file_store){.store.ops = &ops,
                             .format = format,
                             .path = strdup(directory),
                             .dir = -1,
                             .lock = -1,
                             .log = -1};
    (void)snprintf(s->store.name, sizeof s->store.name, "%.120s/%s", directory, log_name);
    if (s->path != NULL)
        st = open_files(s, found);
    if (moe_failed(&st)) {
        close_store(&s->store);
        return st;
    }
    *out = &s->store;
    return st;
}
