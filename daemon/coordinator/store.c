/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/store.h"
#include "coordinator/weights.h"

#include "daemon/log.h"
#include "daemon/trusted_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    FORMAT_VERSION = 3, /* 1: records end with the members; 2: with the lease */
    HEADER_BYTES = 16,
    RECORD_HEAD_BYTES = 16,
    KIND_STATE = 1,
    STATE_FIXED_BYTES = 32,
    MEMBER_MAX_BYTES = 2 + MOE_MEMBERSHIP_ID_BYTES + 8,
    STATE_LEASE_BYTES = 8 + 4 + 1, /* after the members */
    CORDONS_MIN_BYTES = 8,         /* after the lease: the mask, then a reason for each bit */
    CORDON_MAX_BYTES = 2 + MOE_MEMBERSHIP_CORDON_BYTES,
    RECORD_MAX_BYTES = RECORD_HEAD_BYTES + STATE_FIXED_BYTES + STATE_LEASE_BYTES +
                       CORDONS_MIN_BYTES +
                       MOE_PLACEMENT_SLOTS_MAX * (MEMBER_MAX_BYTES + CORDON_MAX_BYTES),
    RECORD_MIN_BYTES = RECORD_HEAD_BYTES + STATE_FIXED_BYTES,
    FILE_MAX_BYTES = MOE_STORE_COMPACT_BYTES + RECORD_MAX_BYTES,
};

static const uint8_t magic[8] = "moedlog\n";
static const char log_name[] = "group.log", temp_name[] = "group.log.new", lock_name[] = "lock",
                  weights_temp_name[] = MOE_STORE_WEIGHTS ".new";

struct moe_store {
    char *path; /* of the directory */
    int dir, lock;
    int log;      /* -1: the next append writes a new file */
    size_t bytes; /* of `log`; all records are intact */
};

/* ------------------------------------------------------------------ encoding */

/* CRC-32C (Castagnoli), reflected polynomial 0x82f63b78; bit by bit, because records are small. */
static uint32_t checksum(const uint8_t *data, size_t length)
{
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < length; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (UINT32_C(0x82f63b78) & (0 - (crc & 1)));
    }
    return ~crc;
}

static uint8_t *put(uint8_t *to, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        *to++ = (uint8_t)(value >> (8 * i));
    return to;
}

static uint64_t get(const uint8_t **from, size_t bytes)
{
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++)
        value |= (uint64_t) * (*from)++ << (8 * i);
    return value;
}

static size_t encode_header(uint8_t to[HEADER_BYTES])
{
    memcpy(to, magic, sizeof magic);
    put(to + 8, FORMAT_VERSION, 4);
    put(to + 12, checksum(to, 12), 4);
    return HEADER_BYTES;
}

static uint8_t *put_text(uint8_t *at, const char *text, size_t capacity)
{
    size_t n = strnlen(text, capacity - 1);
    at = put(at, n, 2);
    memcpy(at, text, n);
    return at + n;
}

static size_t encode_record(uint8_t to[RECORD_MAX_BYTES], const struct moe_membership_saved *state)
{
    uint8_t *payload = to + RECORD_HEAD_BYTES, *at = payload;
    at = put(at, state->epoch, 8);
    at = put(at, state->placement_hash, 8);
    at = put(at, state->view_epoch, 8);
    at = put(at, state->placement_version, 4);
    at = put(at, state->slots, 4);
    for (uint32_t s = 0; state->view_epoch != 0 && s < state->slots; s++) {
        at = put_text(at, state->members[s].worker_id, MOE_MEMBERSHIP_ID_BYTES);
        at = put(at, state->members[s].incarnation, 8);
    }
    at = put(at, state->group_id, 8);
    at = put(at, state->lease_ms, 4);
    at = put(at, state->settled, 1);
    at = put(at, state->cordoned, 8);
    for (uint32_t s = 0; s < MOE_PLACEMENT_SLOTS_MAX; s++)
        if ((state->cordoned >> s & 1) != 0)
            at = put_text(at, state->cordon_reasons[s], MOE_MEMBERSHIP_CORDON_BYTES);
    size_t length = (size_t)(at - payload);
    put(to, length, 4);
    put(to + 4, KIND_STATE, 4);
    put(to + 8, checksum(payload, length), 4);
    put(to + 12, checksum(to, 12), 4);
    return RECORD_HEAD_BYTES + length;
}

/* ------------------------------------------------------------------ decoding */

static struct moe_status damaged(const char *what)
{
    return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "damaged: %s", what);
}

/* A text of less than `capacity` bytes that `after` more bytes follow. False when it is cut. */
static bool get_text(const uint8_t **at, const uint8_t *end, size_t after, char *to,
                     size_t capacity)
{
    size_t left = (size_t)(end - *at);
    size_t n = left >= 2 ? (size_t)get(at, 2) : capacity;
    if (n >= capacity || left < 2 + n + after)
        return false;
    memcpy(to, *at, n);
    *at += n;
    return true;
}

static struct moe_status decode_cordons(const uint8_t **at, const uint8_t *end,
                                        struct moe_membership_saved *state)
{
    if (end - *at < CORDONS_MIN_BYTES)
        return damaged("cordons cut");
    state->cordoned = get(at, 8);
    for (uint32_t s = 0; s < MOE_PLACEMENT_SLOTS_MAX; s++)
        if ((state->cordoned >> s & 1) != 0 &&
            !get_text(at, end, 0, state->cordon_reasons[s], MOE_MEMBERSHIP_CORDON_BYTES))
            return damaged("cordons cut");
    return moe_ok();
}

static struct moe_status decode_state(const uint8_t *at, size_t length,
                                      struct moe_membership_saved *state)
{
    const uint8_t *end = at + length;
    *state = (struct moe_membership_saved){0};
    if (length < STATE_FIXED_BYTES)
        return damaged("record too short");
    state->epoch = get(&at, 8);
    state->placement_hash = get(&at, 8);
    state->view_epoch = get(&at, 8);
    state->placement_version = (uint32_t)get(&at, 4);
    state->slots = (uint32_t)get(&at, 4);
    if (state->slots > MOE_PLACEMENT_SLOTS_MAX || state->view_epoch > state->epoch)
        return damaged("impossible values");
    for (uint32_t s = 0; state->view_epoch != 0 && s < state->slots; s++) {
        if (!get_text(&at, end, 8, state->members[s].worker_id, MOE_MEMBERSHIP_ID_BYTES))
            return damaged("member list cut");
        state->members[s].incarnation = get(&at, 8);
    }
    if (end - at >= STATE_LEASE_BYTES) {
        state->group_id = get(&at, 8);
        state->lease_ms = (uint32_t)get(&at, 4);
        state->settled = get(&at, 1) != 0;
        if (at < end)
            MOE_TRY(decode_cordons(&at, end, state));
    }
    return at == end ? moe_ok() : damaged("record too long");
}

/* Length of the intact record at `at`; 0 when there is none. */
static size_t whole_record(const uint8_t *at, size_t left)
{
    if (left < RECORD_HEAD_BYTES)
        return 0;
    const uint8_t *field = at;
    uint64_t length = get(&field, 4);
    (void)get(&field, 4);
    uint32_t payload_sum = (uint32_t)get(&field, 4), head_sum = (uint32_t)get(&field, 4);
    if (checksum(at, 12) != head_sum || length > left - RECORD_HEAD_BYTES ||
        checksum(field, (size_t)length) != payload_sum)
        return 0;
    return RECORD_HEAD_BYTES + (size_t)length;
}

static struct moe_status check_header(const uint8_t *image, size_t length)
{
    if (length < HEADER_BYTES || memcmp(image, magic, sizeof magic) != 0)
        return damaged("not a group log");
    const uint8_t *field = image + 8;
    uint64_t version = get(&field, 4);
    if (get(&field, 4) != checksum(image, 12))
        return damaged("header checksum");
    if (version == 0 || version > FORMAT_VERSION)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "has format %u; this release reads up to %d", (unsigned)version,
                         FORMAT_VERSION);
    return moe_ok();
}

/* The last `left` bytes of the file are no intact record. An intact record inside them means damage
 * in the middle: the announced epochs are then unknown. Otherwise an append was cut short. That
 * record may have been acknowledged (a bit may also flip in the last record). The epoch therefore
 * rises by the number of records that fit into the lost bytes, and the view is void. */
static struct moe_status drop_tail(const uint8_t *at, size_t left,
                                   struct moe_membership_saved *state)
{
    for (size_t skip = 1; skip < left; skip++)
        if (whole_record(at + skip, left - skip) > 0)
            return damaged("a damaged record before good ones");
    state->epoch += 1 + left / RECORD_MIN_BYTES;
    state->view_epoch = 0;
    state->settled = false;
    memset(state->members, 0, sizeof state->members);
    return moe_ok();
}

struct moe_status moe_store_decode(const uint8_t *image, size_t length,
                                   struct moe_membership_saved *state, bool *incomplete)
{
    MOE_TRY(check_header(image, length));
    const uint8_t *at = image + HEADER_BYTES, *end = image + length;
    size_t bytes, records = 0;
    *incomplete = false;
    for (; at < end; at += bytes, records++) {
        bytes = whole_record(at, (size_t)(end - at));
        if (bytes == 0)
            break;
        const uint8_t *kind = at + 4;
        if (get(&kind, 4) != KIND_STATE)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                             "holds a record that only a newer release knows");
        MOE_TRY(decode_state(at + RECORD_HEAD_BYTES, bytes - RECORD_HEAD_BYTES, state));
    }
    if (records == 0) /* a new log gets one record before it gets its name */
        return damaged("no record");
    *incomplete = at < end;
    return *incomplete ? drop_tail(at, (size_t)(end - at), state) : moe_ok();
}

/* ------------------------------------------------------------------ files */

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

/* Replaces the log by one with only `state`. At any moment either the whole old file or the whole
 * new one exists. */
static struct moe_status write_new(struct moe_store *s, const struct moe_membership_saved *state)
{
    uint8_t image[HEADER_BYTES + RECORD_MAX_BYTES];
    size_t bytes = encode_header(image);
    bytes += encode_record(image + bytes, state);
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

static struct moe_status replace_directory(struct moe_store *s)
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
static struct moe_status replace_removed(struct moe_store *s)
{
    bool gone = is_unlinked(s->dir);
    if (s->log >= 0 && (gone || is_unlinked(s->log))) {
        moe_log_warn("the group state in %s was removed; creating it again", s->path);
        close(s->log);
        s->log = -1;
    }
    return gone ? replace_directory(s) : moe_ok();
}

struct moe_status moe_store_append(struct moe_store *s, const struct moe_membership_saved *state)
{
    MOE_TRY(replace_removed(s));
    if (s->log < 0 || s->bytes > MOE_STORE_COMPACT_BYTES)
        return write_new(s, state);
    uint8_t record[RECORD_MAX_BYTES];
    size_t bytes = encode_record(record, state);
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
        st = damaged("file too large");
    if (moe_failed(&st)) {
        free(bytes);
        return st;
    }
    *image = bytes;
    return st;
}

static struct moe_status read_log(struct moe_store *s, struct moe_membership_saved *state)
{
    uint8_t *image = NULL;
    bool incomplete = false;
    struct stat file;
    struct moe_status st = damaged("not a regular file"); /* reading a FIFO would block */
    if (fstat(s->log, &file) == 0 && S_ISREG(file.st_mode))
        st = read_all(s->log, FILE_MAX_BYTES, &image, &s->bytes);
    if (!moe_failed(&st))
        st = moe_store_decode(image, s->bytes, state, &incomplete);
    if (st.code == MOE_DATA_LOSS)
        st = moe_error(st.code, st.reason,
                       "%s; move it away: numbering continues from the epoch that workers report",
                       st.text);
    st = moe_error_context(st, "%.120s/%s", s->path, log_name);
    /* Records of this format need a header of this format. */
    if (st.code == MOE_OK && (incomplete || image[sizeof magic] < FORMAT_VERSION))
        st = write_new(s, state);
    free(image);
    return st;
}

struct moe_status moe_store_read_weights(struct moe_store *s, uint8_t **image, size_t *length)
{
    *image = NULL;
    *length = 0;
    int fd = openat(s->dir, MOE_STORE_WEIGHTS, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return errno == ENOENT ? moe_ok() : io_error("cannot open " MOE_STORE_WEIGHTS);
    struct moe_status st = read_all(fd, MOE_WEIGHTS_IMAGE_MAX_BYTES, image, length);
    close(fd);
    return moe_error_context(st, MOE_STORE_WEIGHTS);
}

static struct moe_status replace_weights(struct moe_store *s, const uint8_t *image, size_t length)
{
    struct moe_status st = moe_ok();
    int fd = openat(s->dir, weights_temp_name,
                    O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return io_error("cannot create " MOE_STORE_WEIGHTS);
    if (!write_all(fd, image, length, 0) || fsync(fd) != 0)
        st = io_error("cannot write " MOE_STORE_WEIGHTS);
    close(fd);
    if (!moe_failed(&st) &&
        (renameat(s->dir, weights_temp_name, s->dir, MOE_STORE_WEIGHTS) != 0 || fsync(s->dir) != 0))
        st = io_error("cannot replace " MOE_STORE_WEIGHTS);
    return st;
}

struct moe_status moe_store_write_weights(struct moe_store *s, const uint8_t *image, size_t length)
{
    MOE_TRY(replace_removed(s));
    if (image != NULL)
        return replace_weights(s, image, length);
    if (unlinkat(s->dir, MOE_STORE_WEIGHTS, 0) != 0 && errno != ENOENT)
        return io_error("cannot remove " MOE_STORE_WEIGHTS);
    return fsync(s->dir) == 0 ? moe_ok() : io_error("cannot remove " MOE_STORE_WEIGHTS);
}

static struct moe_status open_files(struct moe_store *s, struct moe_membership_saved *state)
{
    MOE_TRY(open_directory(s->path, &s->dir, &s->lock));
    s->log = openat(s->dir, log_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (s->log >= 0)
        return read_log(s, state);
    if (errno != ENOENT)
        return moe_error_context(io_error("cannot open it"), "%.120s/%s", s->path, log_name);
    return write_new(s, state);
}

struct moe_status moe_store_open(const char *directory, struct moe_store **out,
                                 struct moe_membership_saved *state)
{
    struct moe_store *s = malloc(sizeof *s);
    if (s == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "group state");
    *s = (struct moe_store){.path = strdup(directory), .dir = -1, .lock = -1, .log = -1};
    *state = (struct moe_membership_saved){0};
    struct moe_status st = s->path != NULL ? open_files(s, state)
                                           : moe_error(MOE_RESOURCE_EXHAUSTED,
                                                       MOE_REASON_OUT_OF_MEMORY, "group state");
    if (st.code != MOE_OK) {
        moe_store_close(s);
        return st;
    }
    *out = s;
    return st;
}

void moe_store_close(struct moe_store *s)
{
    if (s == NULL)
        return;
    close_if_open(s->log);
    close_if_open(s->lock);
    close_if_open(s->dir);
    free(s->path);
    free(s);
}
