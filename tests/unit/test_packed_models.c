/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised checkpoints of every scheme in the form that backends take: the values are those that
 * decoding gives, and the memory is that of the file. A backend that reads for itself gets the same
 * matrices, and its reads the same digests. */
#include "model_fixture.h"
#include "support/golden.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool every_format(const struct moe_device *device, const struct moe_weight_format *f)
{
    (void)device;
    return f->encoding != MOE_ENC_NONE;
}

static bool no_integers(const struct moe_device *device, const struct moe_weight_format *f)
{
    (void)device;
    return f->encoding != MOE_ENC_INT4;
}

/* A model twice: as it is, and decoded. */
struct pair {
    struct moe_model *packed, *plain;
    size_t layer;
    struct deliveries decoded;
    uint64_t bytes;             /* given, of the packed layer */
    uint32_t packets;           /* packed matrices */
    uint32_t fetched, by_turns; /* sources of one or two of them */
};

static struct moe_status check_packed(void *ctx, enum moe_weight weight, uint32_t expert,
                                      const struct moe_packed_matrix *m)
{
    struct pair *p = ctx;
    const struct moe_layer_spec *spec = moe_model_layer(p->packed, p->layer);
    const struct moe_weight_format *f = moe_weight_format_of(spec, weight);
    const struct delivery *want = deliveries_find(&p->decoded, weight, expert);
    struct moe_packed_sizes sizes;
    size_t rows, columns;
    moe_weight_shape(spec, weight, &rows, &columns);
    assert_non_null(f);
    assert_true(moe_packed_sizes(f, rows, columns, &sizes));
    assert_int_equal(m->zeros != NULL, f->zero_points);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) {
            uint16_t got = moe_f32_to_bf16(moe_packed_value(f, &sizes, m, r, c)), decoded;
            memcpy(&decoded, (const char *)want->data + 2 * (r * columns + c), sizeof decoded);
            if (got != decoded)
                fail_msg("%s: weight %d of expert %u at %zu, %zu: %g, decoded %g",
                         moe_model_name(p->packed), (int)weight, expert, r, c,
                         (double)moe_bf16_to_f32(got), (double)moe_bf16_to_f32(decoded));
        }
    p->bytes += sizes.bytes;
    p->packets++;
    return moe_ok();
}

/* Row `first` and every second one after it. */
static uint8_t *half_of(const uint8_t *rows, size_t count, size_t each, size_t first)
{
    uint8_t *half = malloc(count / 2 * each + 1);
    assert_non_null(half);
    for (size_t r = 0; r < count / 2; r++)
        memcpy(half + r * each, rows + (2 * r + first) * each, each);
    return half;
}

/* Gate and up by turns. */
static void check_both(struct pair *p, uint32_t expert, const uint8_t *elements,
                       const uint8_t *scales)
{
    const struct moe_layer_spec *spec = moe_model_layer(p->packed, p->layer);
    const struct moe_weight_format *f = moe_weight_format_of(spec, MOE_WEIGHT_GATE);
    struct moe_packed_sizes sizes;
    size_t rows, columns;
    moe_weight_shape(spec, MOE_WEIGHT_GATE, &rows, &columns);
    assert_true(moe_packed_sizes(f, 2 * rows, columns, &sizes));
    for (size_t up = 0; up < 2; up++) {
        uint8_t *own = half_of(elements, 2 * rows, sizes.row_bytes, up);
        uint8_t *levels = half_of(scales, 2 * rows, sizes.scales / sizes.scale_rows, up);
        const struct moe_packed_matrix m = {.elements = own, .scales = levels, .global = 1};
        assert_ok(check_packed(p, up ? MOE_WEIGHT_UP : MOE_WEIGHT_GATE, expert, &m));
        free(own);
        free(levels);
    }
}

/* moe_packed_source_sink */
static struct moe_status check_source(void *ctx, enum moe_weight weight, uint32_t expert,
                                      const struct moe_packed_source *source)
{
    struct pair *p = ctx;
    uint8_t *elements, *scales;
    assert_ok(fixture_read_packed(moe_model_layer(p->packed, p->layer), weight, source, &elements,
                                  &scales));
    const struct moe_packed_matrix m = {
        .elements = elements, .scales = scales, .global = source->global};
    if (source->by_turns)
        check_both(p, expert, elements, scales);
    else
        assert_ok(check_packed(p, weight, expert, &m));
    p->fetched++;
    p->by_turns += source->by_turns;
    free(elements);
    free(scales);
    return moe_ok();
}

static struct moe_status count_plain(void *ctx, enum moe_weight weight, uint32_t expert,
                                     enum moe_dtype dtype, const void *data, size_t bytes)
{
    struct pair *p = ctx;
    (void)expert;
    (void)dtype;
    (void)data;
    assert_null(moe_weight_format_of(moe_model_layer(p->packed, p->layer), weight));
    p->bytes += bytes;
    return moe_ok();
}

/* moe_weight_source_sink */
static struct moe_status count_source(void *ctx, enum moe_weight weight, uint32_t expert,
                                      enum moe_dtype dtype, const struct moe_weight_source *source,
                                      size_t bytes)
{
    char *data = malloc(bytes + 1);
    assert_non_null(data);
    assert_ok(source->read(source->ctx, source->at, bytes, data));
    free(data);
    return count_plain(ctx, weight, expert, dtype, NULL, bytes);
}

/* Streams the packed layer, with or without sources. Adds its digests to `t`. */
static void stream(struct pair *p, bool sources, struct moe_digest_table *t)
{
    uint32_t experts[MOE_MAX_EXPERTS], n = moe_model_layer(p->plain, p->layer)->experts;
    struct moe_model_sources contexts = {0};
    const struct moe_model_sinks sinks = {.weight = count_plain,
                                          .packed = check_packed,
                                          .source = sources ? count_source : NULL,
                                          .packed_source = sources ? check_source : NULL,
                                          .ctx = p,
                                          .sources = &contexts};
    struct moe_digester *d;
    for (uint32_t e = 0; e < n; e++)
        experts[e] = e;
    p->bytes = 0;
    assert_ok(moe_digester_create(p->packed, 2, &d));
    assert_ok(moe_model_stream_layer(p->packed, p->layer, experts, n, &sinks, d, NULL, NULL));
    assert_ok(moe_digester_finish(d, t));
    moe_digester_destroy(d);
    moe_model_sources_free(&contexts);
    assert_int_equal(p->bytes, moe_model_layer_memory(p->packed, p->layer, experts, n));
}

static void check_layer(struct pair *p)
{
    uint32_t experts[MOE_MAX_EXPERTS], n = moe_model_layer(p->plain, p->layer)->experts;
    for (uint32_t e = 0; e < n; e++)
        experts[e] = e;
    struct moe_digest_table *given, *fetched;
    struct moe_digest_difference d;
    p->decoded = (struct deliveries){0};
    assert_ok(moe_model_load_layer(p->plain, p->layer, experts, n, deliveries_sink, &p->decoded,
                                   NULL, NULL));
    assert_ok(moe_digest_table_create(&given));
    assert_ok(moe_digest_table_create(&fetched));
    stream(p, false, given);
    stream(p, true, fetched);
    if (moe_digest_table_differs(given, fetched, &d))
        fail_msg("%s: fetched, %s has another digest", moe_model_name(p->packed), d.name);
    assert_true(moe_digest_table_is_complete(fetched));
    assert_true(moe_model_layer_memory(p->plain, p->layer, experts, n) > p->bytes);
    moe_digest_table_destroy(given);
    moe_digest_table_destroy(fetched);
    deliveries_free(&p->decoded);
}

static void open_pair(struct pair *p, const char *directory, moe_computes_fn computes)
{
    *p = (struct pair){0};
    assert_ok(moe_model_open(directory, &p->packed));
    assert_ok(moe_model_open(directory, &p->plain));
    assert_ok(moe_model_keep_quantised(p->packed, computes, NULL, false));
    assert_true(moe_model_decodes(p->plain));
}

static void close_pair(struct pair *p)
{
    moe_model_close(p->packed);
    moe_model_close(p->plain);
}

/* Whether a backend can read matrices of a golden model as they are. */
static bool is_stored_packed(const char *name)
{
    static const char *const others[] = {"awq_", "gptq_", "int4_zero_points_"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strncmp(name, others[i], strlen(others[i])) == 0)
            return false;
    return true;
}

static void packed_values_are_the_decoded_ones_in_every_scheme(void **state)
{
    (void)state;
    struct golden_models models;
    golden_models_list(MOE_QUANTISED_DIR, &models);
    assert_true(models.count >= 18);
    for (size_t i = 0; i < models.count; i++) {
        char path[512];
        struct pair p;
        snprintf(path, sizeof path, MOE_QUANTISED_DIR "/%s", models.names[i]);
        open_pair(&p, path, every_format);
        assert_false(moe_model_decodes(p.packed));
        for (p.layer = 0; p.layer < moe_model_layer_count(p.packed); p.layer++)
            check_layer(&p);
        assert_true(p.packets > 0);
        if ((p.fetched > 0) != is_stored_packed(models.names[i]) ||
            (p.by_turns > 0) != (strcmp(models.names[i], "mxfp4_gpt_oss") == 0))
            fail_msg("%s: %u sources, %u with gate and up", models.names[i], p.fetched, p.by_turns);
        close_pair(&p);
    }
}

static void formats_that_a_backend_lacks_are_decoded(void **state)
{
    (void)state;
    static const struct {
        const char *path;
        bool kept;
    } cases[] = {{MOE_QUANTISED_DIR "/int4_kimi_k2", false},
                 {MOE_QUANTISED_DIR "/mxfp4_gpt_oss", true}};
    for (size_t i = 0; i < 2; i++) {
        struct pair p;
        open_pair(&p, cases[i].path, no_integers);
        assert_int_equal(moe_model_decodes(p.packed), !cases[i].kept);
        assert_int_equal(moe_model_layer(p.packed, 0)->routed_format.encoding,
                         cases[i].kept ? MOE_ENC_E2M1 : MOE_ENC_NONE);
        close_pair(&p);
        open_pair(&p, cases[i].path, NULL);
        assert_true(moe_model_decodes(p.packed));
        close_pair(&p);
    }
}

static bool nothing_in_w8a8(const struct moe_device *device, const struct moe_weight_format *f)
{
    (void)device;
    return f->activations == MOE_ACTIVATIONS_PLAIN;
}

static struct moe_status open_w8a8(const char *name, moe_computes_fn computes, struct moe_model **m)
{
    char path[512];
    snprintf(path, sizeof path, MOE_QUANTISED_DIR "/%s", name);
    assert_ok(moe_model_open(path, m));
    return moe_model_keep_quantised(*m, computes, NULL, true);
}

/* By default no row is quantised. */
static void fp8_activations_are_those_that_the_checkpoint_asks_for(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        enum moe_activation_format routed, shared;
    } cases[] = {
        {"fp8_block_deepseek_v3", MOE_ACTIVATIONS_F8, MOE_ACTIVATIONS_F8},
        {"fp8_ue8m0_deepseek_v3", MOE_ACTIVATIONS_F8_POW2, MOE_ACTIVATIONS_F8_POW2},
        {"fp8_block_minimax_m2", MOE_ACTIVATIONS_F8, MOE_ACTIVATIONS_PLAIN},
        {"fp8_channel_glm4_moe", MOE_ACTIVATIONS_F8, MOE_ACTIVATIONS_F8},
        {"mxfp4_deepseek_v4", MOE_ACTIVATIONS_PLAIN, MOE_ACTIVATIONS_F8_POW2},
        {"int4_kimi_k2", MOE_ACTIVATIONS_PLAIN, MOE_ACTIVATIONS_PLAIN},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_model *m;
        assert_ok(open_w8a8(cases[i].name, every_format, &m));
        const struct moe_layer_spec *spec = moe_model_layer(m, moe_model_layer_count(m) - 1);
        assert_int_equal(spec->routed_format.activations, cases[i].routed);
        assert_int_equal(spec->shared_format.activations, cases[i].shared);
        assert_ok(moe_model_keep_quantised(m, every_format, NULL, false));
        assert_int_equal(spec->routed_format.activations, MOE_ACTIVATIONS_PLAIN);
        assert_int_equal(spec->shared_format.activations, MOE_ACTIVATIONS_PLAIN);
        moe_model_close(m);
    }
}

/* Static scales, FBGEMM's bound of scales, MXFP8's rule for them; and backends without W8A8. */
static void fp8_activations_that_are_not_computed_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        moe_computes_fn computes;
        const char *why;
    } cases[] = {
        {"fp8_tensor_mixtral", every_format, "config.json"},
        {"fp8_modelopt_mixtral", every_format, "config.json"},
        {"fp8_fbgemm_qwen2_moe", every_format, "config.json"},
        {"mxfp8_mixtral", every_format, "config.json"},
        {"fp8_block_deepseek_v3", nothing_in_w8a8, "this backend"},
        {"fp8_block_deepseek_v3", NULL, "decoded"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_model *m;
        struct moe_status st = open_w8a8(cases[i].name, cases[i].computes, &m);
        if (strstr(st.text, cases[i].why) == NULL || strstr(st.text, "W8A8") == NULL)
            fail_msg("%s: %s", cases[i].name, st.text);
        assert_refused(st, MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED);
        moe_model_close(m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packed_values_are_the_decoded_ones_in_every_scheme),
        cmocka_unit_test(formats_that_a_backend_lacks_are_decoded),
        cmocka_unit_test(fp8_activations_are_those_that_the_checkpoint_asks_for),
        cmocka_unit_test(fp8_activations_that_are_not_computed_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
