/* SPDX-License-Identifier: Apache-2.0 */
/* Weights are written back where they were read: what nothing was done to is the same file, bit for
 * bit, in every family's layout and every dtype, whichever slot writes which expert. */
#include "model/model_write.h"
#include "model_fixture.h"
#include "support/golden.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The weights of one layer, fp32. */
struct layer {
    float *values[MOE_WEIGHT_COUNT][MOE_MAX_EXPERTS];
    size_t count[MOE_WEIGHT_COUNT];
    size_t ranges;
    uint64_t bytes;
};

static struct moe_status keep(void *ctx, enum moe_weight weight, uint32_t expert,
                              enum moe_dtype dtype, const void *data, size_t bytes)
{
    struct layer *l = ctx;
    size_t n = bytes / moe_dtype_bytes(dtype);
    float *to = malloc(n * sizeof *to);
    assert_non_null(to);
    for (size_t i = 0; i < n; i++)
        to[i] = dtype == MOE_DTYPE_F32 ? ((const float *)data)[i]
                                       : moe_bf16_to_f32(((const uint16_t *)data)[i]);
    l->values[weight][expert] = to;
    l->count[weight] = n;
    return moe_ok();
}

static struct moe_status give(void *ctx, enum moe_weight weight, uint32_t expert, float *to,
                              size_t count)
{
    const struct layer *l = ctx;
    assert_int_equal(count, l->count[weight]);
    memcpy(to, l->values[weight][expert], count * sizeof *to);
    return moe_ok();
}

static struct moe_status count_range(void *ctx, const struct moe_model_range *range)
{
    struct layer *l = ctx;
    assert_int_equal(strlen(range->sha256), MOE_SHA256_HEX - 1);
    l->ranges++;
    l->bytes += range->bytes;
    return moe_ok();
}

static struct layer *load(const struct moe_model *m, size_t i, uint32_t experts[MOE_MAX_EXPERTS])
{
    struct layer *l = calloc(1, sizeof *l);
    assert_non_null(l);
    uint32_t n = moe_model_layer(m, i)->experts;
    for (uint32_t e = 0; e < n; e++)
        experts[e] = e;
    assert_ok(moe_model_load_layer(m, i, experts, n, keep, l, NULL, NULL));
    return l;
}

static void free_layer(struct layer *l)
{
    for (size_t w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (size_t e = 0; e < MOE_MAX_EXPERTS; e++)
            free(l->values[w][e]);
    free(l);
}

/* All layers of `m` into the frame `to`, odd experts by another writer than even ones. Both compute
 * digests: `all` gets their union. */
static void write_back(const struct moe_model *m, int to, struct moe_digest_table *all)
{
    struct moe_digester *d;
    assert_ok(moe_digester_create(m, 1, &d));
    for (size_t i = 0; i < moe_model_layer_count(m); i++) {
        uint32_t experts[MOE_MAX_EXPERTS], some[2][MOE_MAX_EXPERTS];
        struct layer *l = load(m, i, experts);
        uint32_t n = moe_model_layer(m, i)->experts;
        for (uint32_t e = 0; e < n; e++)
            some[e & 1][e / 2] = e;
        assert_ok(moe_model_write_layer(m, to, i, false, some[1], n / 2, give, count_range, l, d));
        assert_ok(moe_digester_finish(d, all));
        assert_ok(
            moe_model_write_layer(m, to, i, true, some[0], n - n / 2, give, count_range, l, d));
        assert_ok(moe_digester_finish(d, all));
        assert_int_equal(l->bytes, moe_model_layer_bytes(m, i, experts, n));
        free_layer(l);
    }
    moe_digester_destroy(d);
}

static void same_digests(const struct moe_model *again, const struct moe_digest_table *written)
{
    struct moe_digest_table *read;
    struct moe_digest_difference difference;
    assert_ok(moe_digest_table_create(&read));
    fixture_digest(again, 1, read);
    assert_true(moe_digest_table_is_complete(written) && moe_digest_table_is_complete(read));
    assert_false(moe_digest_table_differs(read, written, &difference));
    moe_digest_table_destroy(read);
}

static void *read_whole(int directory, const char *name, size_t *bytes)
{
    struct stat st;
    int fd = openat(directory, name, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fstat(fd, &st), 0);
    *bytes = (size_t)st.st_size;
    char *data = malloc(*bytes + 1);
    assert_non_null(data);
    assert_int_equal(read(fd, data, *bytes), st.st_size);
    close(fd);
    return data;
}

static void same_file(int one, int other, const char *name)
{
    size_t a_bytes, b_bytes;
    void *a = read_whole(one, name, &a_bytes), *b = read_whole(other, name, &b_bytes);
    assert_int_equal(a_bytes, b_bytes);
    assert_memory_equal(a, b, a_bytes);
    free(a);
    free(b);
}

static void check_models(const struct fixture *f, const char *directory)
{
    struct golden_models models;
    golden_models_list(directory, &models);
    for (size_t i = 0; i < models.count; i++) {
        const char *name = models.names[i];
        char path[512];
        uint64_t bytes;
        struct moe_model *m = NULL, *again = NULL;
        snprintf(path, sizeof path, "%s/%s", directory, name);
        assert_ok(moe_model_open(path, &m));
        assert_int_equal(mkdirat(f->fd, name, 0700), 0);
        int from = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        int to = openat(f->fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        assert_true(from >= 0 && to >= 0);
        assert_ok(moe_model_write_frame(m, to, "generation_config.json", &bytes));
        assert_int_equal(faccessat(to, "generation_config.json", F_OK, 0), -1);
        assert_int_equal(faccessat(to, "golden.safetensors", F_OK, 0), -1);
        struct moe_digest_table *written;
        assert_ok(moe_digest_table_create(&written));
        write_back(m, to, written);
        same_file(from, to, "model.safetensors");
        same_file(from, to, "config.json");
        assert_ok(moe_model_open_at(f->fd, name, &again));
        assert_string_equal(moe_model_fingerprint(m), moe_model_fingerprint(again));
        same_digests(again, written);
        moe_digest_table_destroy(written);
        moe_model_close(again);
        moe_model_close(m);
        close(from);
        close(to);
    }
}

static void every_family_is_written_back_bit_for_bit(void **state)
{
    check_models(*state, MOE_GOLDEN_DIR);
}

static void models_that_only_cpus_compute_are_written_back_bit_for_bit(void **state)
{
    check_models(*state, MOE_NUMPY_DIR);
    check_models(*state, MOE_UNCOMMON_DIR);
}

static void every_quantised_model_is_written_back_bit_for_bit(void **state)
{
    check_models(*state, MOE_QUANTISED_DIR);
}

enum { E = 4, H = 64, I = 256 };

/* One layer in F16; its gates are all 65536 numbers of the format. */
static void make_half_model(const struct fixture *f)
{
    static const char *const names[] = {"gate", "up", "down"};
    struct tensors t = {0};
    tensors_add(&t, MOE_ST_F32, 2, (uint64_t[]){E, H}, "model.layers.0.mlp.gate.weight");
    for (int e = 0; e < E; e++)
        for (int n = 0; n < 3; n++) {
            uint16_t *data =
                tensors_add(&t, MOE_ST_F16, 2, n < 2 ? (uint64_t[]){I, H} : (uint64_t[]){H, I},
                            "model.layers.0.mlp.experts.%d.%s_proj.weight", e, names[n]);
            for (size_t i = 0; i < (size_t)H * I; i++)
                data[i] = (uint16_t)((size_t)e * H * I + i);
        }
    tensors_write(&t, f, "model.safetensors");
    tensors_free(&t);
    fixture_write_text(f, "config.json",
                       "{\"model_type\":\"qwen3_moe\",\"hidden_size\":64,\"moe_intermediate_size\":"
                       "256,\"num_hidden_layers\":1,\"num_experts\":4,\"num_experts_per_tok\":2}");
}

static int make_directory(const struct fixture *f, const char *name)
{
    assert_int_equal(mkdirat(f->fd, name, 0700), 0);
    int fd = openat(f->fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(fd >= 0);
    return fd;
}

static void every_half_is_written_as_it_was_read(void **state)
{
    const struct fixture *f = *state;
    struct moe_model *m = NULL;
    uint64_t bytes;
    make_half_model(f);
    assert_ok(moe_model_open(f->directory, &m));
    int to = make_directory(f, "out");
    assert_ok(moe_model_write_frame(m, to, NULL, &bytes));
    struct moe_digest_table *written;
    assert_ok(moe_digest_table_create(&written));
    write_back(m, to, written);
    moe_digest_table_destroy(written);
    same_file(f->fd, to, "model.safetensors");
    moe_model_close(m);
    close(to);
}

/* Every gate is `*ctx`. */
static struct moe_status give_one(void *ctx, enum moe_weight weight, uint32_t expert, float *to,
                                  size_t count)
{
    (void)weight;
    (void)expert;
    for (size_t i = 0; i < count; i++)
        to[i] = *(const float *)ctx;
    return moe_ok();
}

static struct moe_status forget_range(void *ctx, const struct moe_model_range *range)
{
    (void)ctx;
    (void)range;
    return moe_ok();
}

static void singles_become_the_nearest_half_and_ties_the_even_one(void **state)
{
    static const struct {
        float single;
        uint16_t half;
    } cases[] = {{1.0f, 0x3c00},         {-1.0f, 0xbc00},
                 {0x1.002p0f, 0x3c00}, /* halfway to the next: even */
                 {0x1.006p0f, 0x3c02},   {0x1.002002p0f, 0x3c01},
                 {65504.0f, 0x7bff},     {65519.0f, 0x7bff},
                 {65520.0f, 0x7c00},     {1e30f, 0x7c00},
                 {0x1p-14f, 0x0400},     {0x1.ff8p-15f, 0x03ff},
                 {0x1.ffcp-15f, 0x0400}, {0x1p-24f, 0x0001},
                 {0x1p-25f, 0x0000},     {0x1.000002p-25f, 0x0001},
                 {0x1.8p-24f, 0x0002},   {-0x1p-30f, 0x8000}};
    const struct fixture *f = *state;
    struct moe_model *m = NULL;
    uint64_t bytes;
    const uint32_t expert = 2;
    make_half_model(f);
    assert_ok(moe_model_open(f->directory, &m));
    int to = make_directory(f, "out");
    assert_ok(moe_model_write_frame(m, to, NULL, &bytes));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct moe_st_file *file = NULL;
        uint16_t got = 0;
        float value = cases[i].single;
        assert_ok(moe_model_write_layer(m, to, 0, false, &expert, 1, give_one, forget_range, &value,
                                        NULL));
        assert_ok(moe_st_open_at(to, "model.safetensors", &file));
        const struct moe_tensor *t =
            moe_st_find(file, "model.layers.0.mlp.experts.2.up_proj.weight");
        assert_ok(moe_st_read(file, t, 2 * 77, 2, &got));
        moe_st_close(file);
        if (got != cases[i].half)
            fail_msg("%a became %04x, not %04x", (double)value, got, cases[i].half);
    }
    moe_model_close(m);
    close(to);
}

static void a_frame_that_was_cut_is_not_written_into(void **state)
{
    const struct fixture *f = *state;
    struct moe_model *m = NULL;
    uint64_t bytes;
    float value = 1;
    const uint32_t expert = 0;
    make_half_model(f);
    assert_ok(moe_model_open(f->directory, &m));
    int to = make_directory(f, "out");
    assert_ok(moe_model_write_frame(m, to, NULL, &bytes));
    assert_int_equal(truncate(fixture_path(f, "out/model.safetensors"), 1000), 0);
    check_reason(
        moe_model_write_layer(m, to, 0, false, &expert, 1, give_one, forget_range, &value, NULL),
        MOE_REASON_TRUNCATED);
    moe_model_close(m);
    close(to);
}

/* ---- tensors one by one */

static struct moe_status number_tensor(void *ctx, size_t i, void *to, uint64_t bytes)
{
    if (i == *(const size_t *)ctx)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "no more");
    for (size_t b = 0; b < bytes; b++)
        ((uint8_t *)to)[b] = (uint8_t)(16 * i + b);
    return moe_ok();
}

static void tensors_are_streamed_and_hashed(void **state)
{
    const struct fixture *f = *state;
    static const char *const metadata[] = {"format", "pt", NULL};
    const struct moe_st_out out[] = {
        {.name = "narrow", .dtype = MOE_ST_BF16, .rank = 2, .shape = {3, 1}},
        {.name = "wide", .dtype = MOE_ST_F32, .rank = 1, .shape = {2}},
        {.name = "none", .dtype = MOE_ST_F32, .rank = 1, .shape = {0}}};
    size_t fails = SIZE_MAX, length;
    uint64_t bytes = 0;
    char said[MOE_SHA256_HEX], is[MOE_SHA256_HEX];
    assert_ok(moe_st_write_at(f->fd, "t", out, 3, metadata, number_tensor, &fails, &bytes, said));
    void *data = read_whole(f->fd, "t", &length);
    assert_ok(moe_sha256_of(data, length, is));
    free(data);
    assert_int_equal(length, bytes);
    assert_string_equal(said, is);
    struct moe_st_file *file = NULL;
    uint8_t narrow[6];
    assert_ok(moe_st_open_at(f->fd, "t", &file));
    check_header_has(f, "t", "\"__metadata__\":{\"format\":\"pt\"}");
    assert_int_equal(moe_st_find(file, "wide")->offset % 8, 0);
    assert_ok(moe_st_read(file, moe_st_find(file, "narrow"), 0, 6, narrow));
    for (uint8_t i = 0; i < 6; i++)
        assert_int_equal(narrow[i], i);
    moe_st_close(file);
    /* Never over something, and nothing half done. */
    check_reason(moe_st_write_at(f->fd, "t", out, 3, NULL, number_tensor, &fails, &bytes, NULL),
                 MOE_REASON_IO);
    fails = 0; /* written last: wide tensors come first */
    check_reason(moe_st_write_at(f->fd, "u", out, 3, NULL, number_tensor, &fails, &bytes, NULL),
                 MOE_REASON_IO);
    assert_int_equal(faccessat(f->fd, "u", F_OK, 0), -1);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)
    const struct CMUnitTest tests[] = {
        TEST(every_family_is_written_back_bit_for_bit),
        TEST(models_that_only_cpus_compute_are_written_back_bit_for_bit),
        TEST(every_quantised_model_is_written_back_bit_for_bit),
        TEST(every_half_is_written_as_it_was_read),
        TEST(singles_become_the_nearest_half_and_ties_the_even_one),
        TEST(a_frame_that_was_cut_is_not_written_into),
        TEST(tensors_are_streamed_and_hashed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
