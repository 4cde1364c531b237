/* SPDX-License-Identifier: Apache-2.0 */
#include "model_fixture.h"

#include "support/directory.h"

#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int fixture_setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    assert_true(moe_test_directory("model-test", f->directory));
    f->fd = open(f->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(f->fd >= 0);
    *state = f;
    return 0;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

int fixture_teardown(void **state)
{
    struct fixture *f = *state;
    close(f->fd);
    int rc = nftw(f->directory, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    free(f);
    return rc;
}

const char *fixture_path(const struct fixture *f, const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", f->directory, name);
    return path;
}

void fixture_write(const struct fixture *f, const char *name, const void *data, size_t bytes)
{
    FILE *file = fopen(fixture_path(f, name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

void check_header_has(const struct fixture *f, const char *name, const char *text)
{
    int fd = openat(f->fd, name, O_RDONLY | O_CLOEXEC);
    uint64_t length = 0;
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &length, sizeof length, 0), sizeof length);
    char *header = malloc(length);
    assert_non_null(header);
    assert_int_equal(pread(fd, header, length, sizeof length), length);
    if (memmem(header, length, text, strlen(text)) == NULL)
        fail_msg("%s: the header lacks %s", name, text);
    free(header);
    close(fd);
}

void fixture_write_text(const struct fixture *f, const char *name, const char *text)
{
    fixture_write(f, name, text, strlen(text));
}

static void fill(void *data, enum moe_st_dtype dtype, size_t count, uint32_t first)
{
    for (size_t i = 0; i < count; i++) {
        float v = (float)(first + i);
        uint16_t b = moe_f32_to_bf16(v);
        if (dtype == MOE_ST_F32)
            memcpy((char *)data + 4 * i, &v, 4);
        else
            memcpy((char *)data + 2 * i, &b, 2);
    }
}

void *tensors_add(struct tensors *t, enum moe_st_dtype dtype, uint32_t rank, const uint64_t *shape,
                  const char *fmt, ...)
{
    assert_true(t->count < sizeof t->list / sizeof t->list[0]);
    struct moe_st_out *out = &t->list[t->count++];
    char *name = NULL;
    va_list args;
    va_start(args, fmt);
    assert_true(vasprintf(&name, fmt, args) > 0);
    va_end(args);
    uint64_t bytes;
    assert_true(moe_st_tensor_bytes(dtype, rank, shape, &bytes));
    void *data = calloc(1, (size_t)bytes + 1);
    assert_non_null(data);
    size_t count = (size_t)bytes * 8 / moe_st_dtype_bits(dtype);
    if (dtype == MOE_ST_F32 || dtype == MOE_ST_BF16)
        fill(data, dtype, count, t->next);
    t->next += (uint32_t)count;
    *out = (struct moe_st_out){.name = name, .dtype = dtype, .rank = rank, .data = data};
    memcpy(out->shape, shape, rank * sizeof *shape);
    return data;
}

void tensors_write(struct tensors *t, const struct fixture *f, const char *name)
{
    assert_ok(moe_st_write(fixture_path(f, name), t->list, t->count, NULL));
}

void tensors_free(struct tensors *t)
{
    for (size_t i = 0; i < t->count; i++) {
        free((void *)(uintptr_t)t->list[i].name);
        free((void *)(uintptr_t)t->list[i].data);
    }
    *t = (struct tensors){0};
}

struct moe_status deliveries_sink(void *ctx, enum moe_weight weight, uint32_t expert,
                                  enum moe_dtype dtype, const void *data, size_t bytes)
{
    struct deliveries *d = ctx;
    d->list = realloc(d->list, (d->count + 1) * sizeof *d->list);
    assert_non_null(d->list);
    void *copy = malloc(bytes + 1);
    assert_non_null(copy);
    memcpy(copy, data, bytes);
    d->list[d->count++] = (struct delivery){
        .weight = weight, .expert = expert, .dtype = dtype, .bytes = bytes, .data = copy};
    return moe_ok();
}

struct moe_status fixture_ignore(void *ctx, enum moe_weight weight, uint32_t expert,
                                 enum moe_dtype dtype, const void *data, size_t bytes)
{
    (void)ctx;
    (void)weight;
    (void)expert;
    (void)dtype;
    (void)data;
    (void)bytes;
    return moe_ok();
}

/* `rows` of `each` bytes; NULL on failure. */
static uint8_t *read_rows(const struct moe_weight_source *source, size_t rows, size_t each,
                          struct moe_status *st)
{
    enum { PIECE = 3 };
    uint8_t *data = malloc(rows * each + 1);
    assert_non_null(data);
    for (size_t left = rows; left > 0 && !moe_failed(st);) {
        size_t n = left < PIECE ? left : PIECE;
        left -= n;
        *st = source->read(source->ctx, source->at + left * each, n * each, data + left * each);
    }
    if (!moe_failed(st))
        return data;
    free(data);
    return NULL;
}

struct moe_status fixture_read_packed(const struct moe_layer_spec *spec, enum moe_weight weight,
                                      const struct moe_packed_source *source, uint8_t **elements,
                                      uint8_t **scales)
{
    const struct moe_weight_format *f = moe_weight_format_of(spec, weight);
    struct moe_status st = moe_ok();
    struct moe_packed_sizes sizes;
    size_t rows, columns;
    assert_non_null(f);
    moe_weight_shape(spec, weight, &rows, &columns);
    rows *= source->by_turns ? 2 : 1;
    assert_true(moe_packed_sizes(f, rows, columns, &sizes));
    *elements = read_rows(&source->elements, rows, sizes.row_bytes, &st);
    *scales = read_rows(&source->scales, sizes.scale_rows, sizes.scales / sizes.scale_rows, &st);
    if (moe_failed(&st))
        free(*elements);
    return st;
}

void fixture_digest(const struct moe_model *m, uint32_t threads, struct moe_digest_table *all)
{
    struct moe_digester *d;
    assert_ok(moe_digester_create(m, threads, &d));
    for (size_t i = 0; i < moe_model_layer_count(m); i++) {
        uint32_t experts[MOE_MAX_EXPERTS], n = moe_model_layer(m, i)->experts;
        for (uint32_t e = 0; e < n; e++)
            experts[e] = e;
        const struct moe_model_sinks sinks = {.weight = fixture_ignore};
        assert_ok(moe_model_stream_layer(m, i, experts, n, &sinks, d, NULL, NULL));
        assert_ok(moe_digester_finish(d, all));
    }
    moe_digester_destroy(d);
}

void deliveries_progress(void *ctx, uint64_t read_bytes)
{
    struct deliveries *d = ctx;
    assert_true(read_bytes > d->read_bytes);
    d->read_bytes = read_bytes;
    d->progress_calls++;
}

const struct delivery *deliveries_find(const struct deliveries *d, enum moe_weight weight,
                                       uint32_t expert)
{
    const struct delivery *found = NULL;
    for (size_t i = 0; i < d->count; i++) {
        if (d->list[i].weight != weight || d->list[i].expert != expert)
            continue;
        if (found != NULL)
            fail_msg("weight %d of expert %u came twice", weight, expert);
        found = &d->list[i];
    }
    if (found == NULL)
        fail_msg("weight %d of expert %u did not come", weight, expert);
    return found;
}

void deliveries_free(struct deliveries *d)
{
    for (size_t i = 0; i < d->count; i++)
        free(d->list[i].data);
    free(d->list);
    *d = (struct deliveries){0};
}

void check_reason(struct moe_status st, enum moe_reason reason)
{
    if (st.code == MOE_OK)
        fail_msg("succeeded, but should fail with %s", moe_reason_name(reason));
    print_message("    %s\n", st.text);
    assert_string_equal(moe_reason_name(st.reason), moe_reason_name(reason));
}
