/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of experts by token id: read in both integer formats, refused by name, and part of
 * fingerprint and digests. The model is a small DeepSeek-V4 with one such layer and one other. */
#include "model/sha256.h"
#include "model_fixture.h"

#include <stdio.h>
#include <string.h>

enum { HIDDEN = 6, INNER = 5, EXPERTS = 4, TOP_K = 2, VOCABULARY = 11, TABLE = VOCABULARY * TOP_K };

#define TABLE_NAME "layers.0.ffn.gate.tid2eid"

static void write_config(const struct fixture *f, const char *vocabulary)
{
    char text[512];
    snprintf(text, sizeof text,
             "{\"model_type\":\"deepseek_v4\",\"hidden_size\":6,\"moe_intermediate_size\":5,"
             "\"num_hidden_layers\":2,\"n_routed_experts\":4,\"n_shared_experts\":0,"
             "\"num_experts_per_tok\":2,\"scoring_func\":\"sqrtsoftplus\","
             "\"norm_topk_prob\":true,\"routed_scaling_factor\":1.5,"
             "\"mlp_layer_types\":[\"hash_moe\",\"moe\"]%s}",
             vocabulary);
    fixture_write_text(f, "config.json", text);
}

static void add_layer(struct tensors *t, int layer)
{
    tensors_add(t, MOE_ST_F32, 2, (uint64_t[]){EXPERTS, HIDDEN}, "layers.%d.ffn.gate.weight",
                layer);
    for (int e = 0; e < EXPERTS; e++)
        for (int w = 1; w <= 3; w++)
            tensors_add(t, MOE_ST_F32, 2,
                        w == 2 ? (uint64_t[]){HIDDEN, INNER} : (uint64_t[]){INNER, HIDDEN},
                        "layers.%d.ffn.experts.%d.w%d.weight", layer, e, w);
}

/* Both layers, the first one without its table. */
static void add_layers(struct tensors *t)
{
    add_layer(t, 0);
    add_layer(t, 1);
    tensors_add(t, MOE_ST_F32, 1, (uint64_t[]){EXPERTS}, "layers.1.ffn.gate.bias");
}

/* Two different experts for each token. */
static void fill(int64_t table[TABLE])
{
    for (int64_t token = 0; token < VOCABULARY; token++) {
        table[token * TOP_K] = token % EXPERTS;
        table[token * TOP_K + 1] = (token + 1 + token / EXPERTS) % EXPERTS;
    }
}

static void write_model(const struct fixture *f, enum moe_st_dtype dtype,
                        const int64_t table[TABLE])
{
    struct tensors t = {0};
    add_layers(&t);
    void *data = tensors_add(&t, dtype, 2, (uint64_t[]){VOCABULARY, TOP_K}, TABLE_NAME);
    for (size_t i = 0; i < TABLE; i++) {
        int32_t narrow = (int32_t)table[i];
        if (dtype == MOE_ST_I64)
            memcpy((char *)data + i * sizeof table[i], &table[i], sizeof table[i]);
        else
            memcpy((char *)data + i * sizeof narrow, &narrow, sizeof narrow);
    }
    tensors_write(&t, f, "model.safetensors");
    tensors_free(&t);
    write_config(f, ",\"vocab_size\":11");
}

static struct moe_status open_directory(const struct fixture *f, struct moe_model **out)
{
    *out = NULL;
    return moe_model_open(f->directory, out);
}

/* ---- reading ---- */

static void tables_are_read_in_both_formats(void **state)
{
    int64_t wanted[TABLE];
    fill(wanted);
    for (int i = 0; i < 2; i++) {
        struct moe_model *m;
        struct moe_token_tables tables;
        write_model(*state, i == 0 ? MOE_ST_I64 : MOE_ST_I32, wanted);
        assert_ok(open_directory(*state, &m));
        assert_int_equal(moe_model_layer(m, 0)->router.vocabulary, VOCABULARY);
        assert_int_equal(moe_model_layer(m, 1)->router.vocabulary, 0);
        assert_ok(moe_model_read_token_tables(m, &tables));
        moe_model_close(m); /* tables do not need it */
        assert_int_equal(tables.count, 1);
        assert_null(moe_token_tables_find(&tables, 1));
        const struct moe_token_table *table = moe_token_tables_find(&tables, 0);
        assert_non_null(table);
        assert_int_equal(table->vocabulary, VOCABULARY);
        assert_int_equal(table->top_k, TOP_K);
        for (size_t at = 0; at < TABLE; at++)
            assert_int_equal(table->ids[at], wanted[at]);
        moe_token_tables_free(&tables);
    }
}

/* ---- refusals ---- */

static void refuse_opening(const struct fixture *f, enum moe_reason reason, const char *named)
{
    struct moe_model *m;
    struct moe_status st = open_directory(f, &m);
    check_reason(st, reason);
    if (strstr(st.text, named) == NULL)
        fail_msg("\"%s\" does not name %s", st.text, named);
}

static void a_layer_without_its_table_is_refused(void **state)
{
    struct tensors t = {0};
    add_layers(&t);
    tensors_write(&t, *state, "model.safetensors");
    tensors_free(&t);
    write_config(*state, ",\"vocab_size\":11");
    refuse_opening(*state, MOE_REASON_TENSOR_MISSING, TABLE_NAME);
    write_config(*state, "");
    refuse_opening(*state, MOE_REASON_CONFIG_INVALID, "vocab_size");
}

static void another_shape_or_format_is_refused(void **state)
{
    static const struct {
        enum moe_st_dtype dtype;
        uint64_t shape[2];
        const char *named;
    } bad[] = {
        {MOE_ST_I64, {VOCABULARY + 1, TOP_K}, "[12, 2]"},
        {MOE_ST_I64, {VOCABULARY, TOP_K + 1}, "[11, 3]"},
        {MOE_ST_I64, {TOP_K, VOCABULARY}, "[2, 11]"},
        {MOE_ST_I16, {VOCABULARY, TOP_K}, "I16"},
        {MOE_ST_F32, {VOCABULARY, TOP_K}, "F32"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct tensors t = {0};
        add_layers(&t);
        tensors_add(&t, bad[i].dtype, 2, bad[i].shape, TABLE_NAME);
        tensors_write(&t, *state, "model.safetensors");
        tensors_free(&t);
        write_config(*state, ",\"vocab_size\":11");
        refuse_opening(*state, MOE_REASON_TENSOR_INVALID, TABLE_NAME);
        refuse_opening(*state, MOE_REASON_TENSOR_INVALID, bad[i].named);
    }
}

static void an_id_that_is_no_expert_is_refused(void **state)
{
    static const struct {
        size_t at;
        int64_t id;
        const char *named;
    } bad[] = {
        {0, -1, "token 0: expert -1"},
        {TABLE - 1, EXPERTS, "token 10: expert 4"},
        {5, INT64_MAX, "token 2"},
        {7, (INT64_C(1) << 32) + 1, "token 3"}, /* not cut to 32 bits */
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct moe_model *m;
        struct moe_token_tables tables;
        int64_t table[TABLE];
        fill(table);
        table[bad[i].at] = bad[i].id;
        write_model(*state, MOE_ST_I64, table);
        assert_ok(open_directory(*state, &m)); /* no data is read */
        struct moe_status st = moe_model_read_token_tables(m, &tables);
        check_reason(st, MOE_REASON_TENSOR_INVALID);
        if (strstr(st.text, TABLE_NAME) == NULL || strstr(st.text, bad[i].named) == NULL)
            fail_msg("\"%s\" does not name %s", st.text, bad[i].named);
        moe_model_close(m);
    }
}

/* ---- fingerprint and digests ---- */

static struct moe_digest_table *digests_of(const struct moe_model *m)
{
    static const uint32_t experts[EXPERTS] = {0, 1, 2, 3};
    struct moe_digest_table *t;
    struct moe_digester *d;
    assert_ok(moe_digest_table_create(&t));
    assert_ok(moe_digester_create(m, 2, &d));
    for (size_t i = 0; i < moe_model_layer_count(m); i++) {
        const struct moe_model_sinks sinks = {.weight = fixture_ignore};
        assert_ok(moe_model_stream_layer(m, i, experts, EXPERTS, &sinks, d, NULL, NULL));
        assert_ok(moe_digester_finish(d, t));
    }
    moe_digester_destroy(d);
    assert_true(moe_digest_table_is_complete(t));
    return t;
}

static void another_table_is_found_by_its_name(void **state)
{
    int64_t table[TABLE];
    struct moe_model *m;
    struct moe_digest_difference where;
    char fingerprint[MOE_SHA256_HEX];
    fill(table);
    write_model(*state, MOE_ST_I64, table);
    assert_ok(open_directory(*state, &m));
    snprintf(fingerprint, sizeof fingerprint, "%s", moe_model_fingerprint(m));
    struct moe_digest_table *good = digests_of(m), *again = digests_of(m);
    assert_false(moe_digest_table_differs(good, again, &where));
    moe_digest_table_destroy(again);
    moe_model_close(m);

    table[3] = 3; /* another expert, so other bytes at the same places */
    write_model(*state, MOE_ST_I64, table);
    assert_ok(open_directory(*state, &m));
    assert_string_equal(fingerprint, moe_model_fingerprint(m));
    struct moe_digest_table *other = digests_of(m);
    assert_true(moe_digest_table_differs(good, other, &where));
    assert_string_equal(where.name, TABLE_NAME);
    assert_int_equal(where.layer, 0);
    assert_int_equal(where.expert, MOE_DIGEST_COMMON);
    moe_digest_table_destroy(other);
    moe_digest_table_destroy(good);
    moe_model_close(m);

    write_model(*state, MOE_ST_I32, table);
    assert_ok(open_directory(*state, &m));
    assert_string_not_equal(fingerprint, moe_model_fingerprint(m));
    moe_model_close(m);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(tables_are_read_in_both_formats),    TEST(a_layer_without_its_table_is_refused),
        TEST(another_shape_or_format_is_refused), TEST(an_id_that_is_no_expert_is_refused),
        TEST(another_table_is_found_by_its_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
