/* SPDX-License-Identifier: Apache-2.0 */
/* The safetensors reader: owns an open file and its checked header, never the tensor bytes. The
 * header is read entry by entry: its whole JSON tree would take fifteen times its size.
 *
 * Opening makes all checks: entries sorted by offset must tile the data exactly, from 0 to the end
 * of the file, each with the length of its dtype and shape. A later read fails only if the file was
 * changed, which pread reports. */
#include "model/safetensors.h"

#include "model/json_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    LENGTH_BYTES = 8,             /* of the header length in front */
    ENTRY_BYTES_MAX = 4096,       /* of the JSON of one tensor, which needs some 300 at most */
    METADATA_BYTES_MAX = 8 << 20, /* of the JSON of __metadata__ */
};

#define METADATA "__metadata__"

struct moe_st_file {
    int fd;
    uint64_t data;                    /* where tensor bytes begin, from the start of the file */
    uint64_t size;                    /* of the file */
    struct moe_tensor *tensors;       /* [count], by offset */
    const struct moe_tensor **byname; /* [count], by name */
    size_t count;
    char *names; /* all tensor names, each with its final zero */
    bool has_metadata;
};

/* ---- dtypes ---- */

static const struct {
    const char *name;
    uint32_t bits; /* of one element */
} dtypes[MOE_ST_DTYPE_COUNT] = {
    [MOE_ST_BOOL] = {"BOOL", 8},
    [MOE_ST_F4] = {"F4", 4},
    [MOE_ST_F6_E2M3] = {"F6_E2M3", 6},
    [MOE_ST_F6_E3M2] = {"F6_E3M2", 6},
    [MOE_ST_U8] = {"U8", 8},
    [MOE_ST_I8] = {"I8", 8},
    [MOE_ST_F8_E5M2] = {"F8_E5M2", 8},
    [MOE_ST_F8_E4M3] = {"F8_E4M3", 8},
    [MOE_ST_F8_E8M0] = {"F8_E8M0", 8},
    [MOE_ST_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 8},
    [MOE_ST_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 8},
    [MOE_ST_I16] = {"I16", 16},
    [MOE_ST_U16] = {"U16", 16},
    [MOE_ST_F16] = {"F16", 16},
    [MOE_ST_BF16] = {"BF16", 16},
    [MOE_ST_I32] = {"I32", 32},
    [MOE_ST_U32] = {"U32", 32},
    [MOE_ST_F32] = {"F32", 32},
    [MOE_ST_C64] = {"C64", 64},
    [MOE_ST_F64] = {"F64", 64},
    [MOE_ST_I64] = {"I64", 64},
    [MOE_ST_U64] = {"U64", 64},
};

const char *moe_st_dtype_name(enum moe_st_dtype d)
{
    return (unsigned)d < MOE_ST_DTYPE_COUNT ? dtypes[d].name : "?";
}

uint32_t moe_st_dtype_bits(enum moe_st_dtype d)
{
    return (unsigned)d < MOE_ST_DTYPE_COUNT ? dtypes[d].bits : 0;
}

bool moe_st_tensor_bytes(enum moe_st_dtype d, uint32_t rank, const uint64_t *shape, uint64_t *bytes)
{
    uint64_t bits = moe_st_dtype_bits(d);
    for (uint32_t i = 0; i < rank; i++)
        if (__builtin_mul_overflow(bits, shape[i], &bits))
            return false;
    if (bits % 8 != 0)
        return false;
    *bytes = bits / 8;
    return true;
}

/* ---- the header ---- */

static struct moe_status malformed(const char *text)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "safetensors header: %s", text);
}

static struct moe_status bad_tensor(const char *name, const char *text)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID, "tensor %.120s: %s", name,
                     text);
}

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "no memory for a safetensors header");
}

static bool dtype_from_name(const char *name, enum moe_st_dtype *out)
{
    for (unsigned d = 0; d < MOE_ST_DTYPE_COUNT; d++) {
        if (strcmp(name, moe_st_dtype_name((enum moe_st_dtype)d)) != 0)
            continue;
        *out = (enum moe_st_dtype)d;
        return true;
    }
    return false;
}

/* A non-negative JSON integer. Jansson refuses values beyond int64. */
static bool read_count(const json_t *v, uint64_t *out)
{
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return false;
    *out = (uint64_t)json_integer_value(v);
    return true;
}

static struct moe_status read_shape(const char *name, const json_t *shape, struct moe_tensor *t)
{
    if (!json_is_array(shape))
        return bad_tensor(name, "no shape");
    size_t rank = json_array_size(shape);
    if (rank > MOE_TENSOR_RANK_MAX)
        return bad_tensor(name, "more dimensions than supported");
    t->rank = (uint32_t)rank;
    for (size_t i = 0; i < rank; i++)
        if (!read_count(json_array_get(shape, i), &t->shape[i]))
            return bad_tensor(name, "a dimension is not a number");
    return moe_ok();
}

/* `data_bytes` is the length of the part behind the header. */
static struct moe_status read_entry(const char *name, const json_t *entry, uint64_t data_bytes,
                                    struct moe_tensor *t)
{
    if (!json_is_object(entry) || json_object_size(entry) != 3)
        return bad_tensor(name, "the entry is not {dtype, shape, data_offsets}");
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    if (dtype == NULL)
        return bad_tensor(name, "no dtype");
    if (!dtype_from_name(dtype, &t->dtype))
        return bad_tensor(name, "unknown dtype");
    MOE_TRY(read_shape(name, json_object_get(entry, "shape"), t));

    const json_t *offsets = json_object_get(entry, "data_offsets");
    uint64_t begin, end, bytes;
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 ||
        !read_count(json_array_get(offsets, 0), &begin) ||
        !read_count(json_array_get(offsets, 1), &end))
        return bad_tensor(name, "data_offsets is not [begin, end]");
    if (begin > end || end > data_bytes)
        return bad_tensor(name, "its bytes lie outside the file");
    if (!moe_st_tensor_bytes(t->dtype, t->rank, t->shape, &bytes))
        return bad_tensor(name, "dtype and shape do not give a possible size");
    if (bytes != end - begin)
        return bad_tensor(name, "dtype and shape disagree with data_offsets");
    t->offset = begin;
    t->bytes = bytes;
    return moe_ok();
}

static struct moe_status check_metadata(json_t *metadata)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata))
        return malformed("__metadata__ is not an object");
    json_object_foreach(metadata, key, value) if (!json_is_string(value)) return malformed(
        "__metadata__ holds something that is not a string");
    return moe_ok();
}

static int by_offset(const void *a, const void *b)
{
    const struct moe_tensor *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    /* Empty tensors come before the one that starts at the same place. */
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int by_name(const void *a, const void *b)
{
    const struct moe_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/* Memory for the header, counted before any allocation. */
static struct moe_status allocate_tables(struct moe_st_file *f, const char *text, size_t length)
{
    struct moe_json_member m;
    size_t at = 0, members = 0, name_bytes = 1;
    while (moe_json_next_member(text, length, &at, &m)) {
        if (++members > MOE_ST_TENSORS_MAX)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                             "safetensors header: more than %d tensors", MOE_ST_TENSORS_MAX);
        name_bytes += m.name_length; /* two quotes are more than a final zero */
    }
    if (at != length)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                         "safetensors header, behind byte %zu: not an object", at);
    f->tensors = calloc(members + 1, sizeof *f->tensors);
    f->byname = calloc(members + 1, sizeof *f->byname);
    f->names = malloc(name_bytes);
    return f->tensors != NULL && f->byname != NULL && f->names != NULL ? moe_ok() : no_memory();
}

static struct moe_status index_names(struct moe_st_file *f)
{
    qsort(f->tensors, f->count, sizeof *f->tensors, by_offset);
    for (size_t i = 0; i < f->count; i++)
        f->byname[i] = &f->tensors[i];
    qsort(f->byname, f->count, sizeof *f->byname, by_name);
    for (size_t i = 1; i < f->count; i++)
        if (strcmp(f->byname[i - 1]->name, f->byname[i]->name) == 0)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                             "safetensors header: two tensors %.120s", f->byname[i]->name);
    return moe_ok();
}

/* In order of offsets, the tensors must cover the data without hole or overlap. */
static struct moe_status check_tiling(struct moe_st_file *f, uint64_t data_bytes)
{
    uint64_t next = 0;
    for (size_t i = 0; i < f->count; i++) {
        struct moe_tensor *t = &f->tensors[i];
        if (t->offset != next)
            return bad_tensor(t->name, t->offset < next ? "overlaps another tensor"
                                                        : "leaves a hole before it");
        next += t->bytes;
        t->offset += f->data;
    }
    if (next != data_bytes)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                         "safetensors: bytes after the last tensor");
    return moe_ok();
}

/* Copies the decoded name of a member to `*to`, with its final zero, and advances it. */
static struct moe_status read_name(const struct moe_json_member *m, char **to)
{
    json_t *name;
    MOE_TRY(moe_json_parse_piece(m->name, m->name_length, "safetensors header: a name", &name));
    size_t bytes = json_string_length(name) + 1; /* the parser refuses a zero inside */
    memcpy(*to, json_string_value(name), bytes);
    *to += bytes;
    json_decref(name);
    return moe_ok();
}

static struct moe_status read_metadata(struct moe_st_file *f, const struct moe_json_member *m)
{
    if (f->has_metadata)
        return malformed("two " METADATA);
    f->has_metadata = true;
    if (m->value_length > METADATA_BYTES_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "safetensors header: " METADATA " is larger than %d bytes",
                         METADATA_BYTES_MAX);
    json_t *metadata;
    MOE_TRY(moe_json_parse_piece(m->value, m->value_length, METADATA, &metadata));
    struct moe_status st = check_metadata(metadata);
    json_decref(metadata);
    return st;
}

static struct moe_status read_member(struct moe_st_file *f, const struct moe_json_member *m,
                                     char **names)
{
    struct moe_tensor *t = &f->tensors[f->count];
    t->name = *names;
    MOE_TRY(read_name(m, names));
    if (strcmp(t->name, METADATA) == 0)
        return read_metadata(f, m);
    if (m->value_length > ENTRY_BYTES_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                         "tensor %.120s: its entry is longer than %d bytes", t->name,
                         ENTRY_BYTES_MAX);
    json_t *entry;
    MOE_TRY(moe_error_context(
        moe_json_parse_piece(m->value, m->value_length, "safetensors header", &entry),
        "tensor %.120s", t->name));
    struct moe_status st = read_entry(t->name, entry, f->size - f->data, t);
    json_decref(entry);
    f->count++;
    return st;
}

/* The header is one object, padded with spaces only. */
static struct moe_status read_header(struct moe_st_file *f, const char *text, size_t length)
{
    if (length == 0 || text[0] != '{')
        return malformed("does not start with {");
    while (length > 0 && text[length - 1] == ' ')
        length--;
    if (text[length - 1] != '}')
        return malformed("does not end with } and spaces");
    MOE_TRY(allocate_tables(f, text, length));
    struct moe_json_member m;
    size_t at = 0;
    char *names = f->names;
    while (moe_json_next_member(text, length, &at, &m))
        MOE_TRY(read_member(f, &m, &names));
    MOE_TRY(index_names(f));
    return check_tiling(f, f->size - f->data);
}

static struct moe_status read_file(struct moe_st_file *f)
{
    uint8_t raw[LENGTH_BYTES];
    if (f->size < sizeof raw)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TRUNCATED,
                         "shorter than a safetensors header");
    MOE_TRY(moe_file_read(f->fd, 0, raw, sizeof raw));
    uint64_t length = 0;
    for (size_t i = sizeof raw; i-- > 0;)
        length = length << 8 | raw[i];
    if (length > MOE_ST_HEADER_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "not a safetensors file: its header would be of %llu bytes, the largest "
                         "is %llu",
                         (unsigned long long)length, (unsigned long long)MOE_ST_HEADER_MAX);
    if (length > f->size - sizeof raw)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TRUNCATED,
                         "the file ends inside the safetensors header");
    f->data = sizeof raw + length;

    struct moe_status st;
    char *text = malloc((size_t)length + 1);
    if (text == NULL)
        return no_memory();
    MOE_TRY_GOTO(st, moe_file_read(f->fd, sizeof raw, text, length), done);
    MOE_TRY_GOTO(st, read_header(f, text, (size_t)length), done);
done:
    free(text);
    return st;
}

/* Takes `fd` over, also on failure. */
static struct moe_status open_fd(int fd, uint64_t size, struct moe_st_file **out)
{
    struct moe_st_file *f = calloc(1, sizeof *f);
    if (f == NULL) {
        close(fd);
        return no_memory();
    }
    f->fd = fd;
    f->size = size;
    struct moe_status st = read_file(f);
    if (moe_failed(&st)) {
        moe_st_close(f);
        return st;
    }
    *out = f;
    return st;
}

struct moe_status moe_st_open(const char *path, struct moe_st_file **out)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return moe_error(errno == ENOENT ? MOE_NOT_FOUND : MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                         "the file cannot be opened: %s", strerror(errno));
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size < 0) {
        close(fd);
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_IO, "not a regular file");
    }
    return open_fd(fd, (uint64_t)st.st_size, out);
}

struct moe_status moe_st_open_at(int directory, const char *name, struct moe_st_file **out)
{
    int fd = -1;
    uint64_t size = 0;
    MOE_TRY(moe_file_open_at(directory, name, &fd, &size));
    return moe_error_context(open_fd(fd, size, out), "%s", name);
}

void moe_st_close(struct moe_st_file *f)
{
    if (f == NULL)
        return;
    close(f->fd);
    free(f->tensors);
    free(f->byname);
    free(f->names);
    free(f);
}

size_t moe_st_count(const struct moe_st_file *f)
{
    return f->count;
}

const struct moe_tensor *moe_st_tensor(const struct moe_st_file *f, size_t i)
{
    return i < f->count ? &f->tensors[i] : NULL;
}

const struct moe_tensor *moe_st_find(const struct moe_st_file *f, const char *name)
{
    struct moe_tensor key = {.name = name};
    const struct moe_tensor *wanted = &key;
    const struct moe_tensor **found =
        bsearch(&wanted, f->byname, f->count, sizeof *f->byname, by_name);
    return found != NULL ? *found : NULL;
}

struct moe_status moe_st_read(const struct moe_st_file *f, const struct moe_tensor *t,
                              uint64_t first, uint64_t length, void *to)
{
    if (first > t->bytes || length > t->bytes - first)
        return moe_error(MOE_OUT_OF_RANGE, MOE_REASON_TENSOR_INVALID,
                         "tensor %.120s: a read past its end", t->name);
    return moe_error_context(moe_file_read(f->fd, t->offset + first, to, length), "tensor %.120s",
                             t->name);
}

/* The tensor at a byte of the file; NULL for the header. */
static const struct moe_tensor *tensor_at(const struct moe_st_file *f, uint64_t offset)
{
    for (size_t i = 0; i < f->count; i++)
        if (offset >= f->tensors[i].offset && offset - f->tensors[i].offset < f->tensors[i].bytes)
            return &f->tensors[i];
    return NULL;
}

/* moe_weight_source.read */
static struct moe_status read_source(const void *ctx, uint64_t at, size_t bytes, void *to)
{
    const struct moe_st_file *f = ctx;
    struct moe_status st = moe_file_read(f->fd, at, to, bytes);
    if (!moe_failed(&st))
        return st;
    const struct moe_tensor *t = tensor_at(f, at);
    return moe_error_context(st, "tensor %.120s", t != NULL ? t->name : "?");
}

struct moe_weight_source moe_st_weight_source(const struct moe_st_file *f,
                                              const struct moe_tensor *t, uint64_t first)
{
    return (struct moe_weight_source){.read = read_source, .ctx = f, .at = t->offset + first};
}

int moe_st_descriptor(const struct moe_st_file *f)
{
    return f->fd;
}

uint64_t moe_st_file_bytes(const struct moe_st_file *f)
{
    return f->size;
}
