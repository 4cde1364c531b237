/* SPDX-License-Identifier: Apache-2.0 */
/* What opening a model directory refuses, by name, and the fingerprint of what it takes. */
#include "model/sha256.h"
#include "small_model.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- tensors ---- */

static void a_missing_tensor_is_named_at_opening(void **state)
{
    struct tensors t = {0};
    fixture_write_text(*state, "config.json", CONFIG("qwen3_moe", 6, 5, ""));
    tensors_write(&t, *state, "model.safetensors");
    refuse_model(*state, MOE_REASON_TENSOR_MISSING, "model.layers.1.mlp.gate.weight");
    add_router(&t, "model.layers.", H);
    for (int e = 0; e < E - 1; e++)
        add_expert(&t, MOE_ST_F32, e);
    tensors_write(&t, *state, "model.safetensors");
    refuse_model(*state, MOE_REASON_TENSOR_MISSING, "experts.3.gate_proj.weight");
    tensors_free(&t);
}

static void a_wrong_shape_is_named_at_opening(void **state)
{
    make_plain_model(*state, MOE_ST_F32);
    fixture_write_text(*state, "config.json", CONFIG("qwen3_moe", 5, 6, ""));
    refuse_model(*state, MOE_REASON_TENSOR_INVALID, "mlp.gate.weight");
    fixture_write_text(*state, "config.json", CONFIG("qwen3_moe", 6, 4, ""));
    refuse_model(*state, MOE_REASON_TENSOR_INVALID, "experts.0.gate_proj.weight");
    uint32_t first, second;
    make_fused_model(*state, CONFIG("qwen3_moe", 6, 4, ""), "model.layers.", 6, 5, false, &first,
                     &second);
    refuse_model(*state, MOE_REASON_TENSOR_INVALID, "experts.gate_up_proj");
}

/* A scale, a bias or a fifth expert that is not read would mean that the outputs are wrong. */
static void an_unread_tensor_of_the_block_is_refused(void **state)
{
    static const char *const names[] = {"model.layers.1.mlp.gate.bias",
                                        "model.layers.1.mlp.experts.0.up_proj.bias",
                                        "model.layers.1.mlp.experts.4.up_proj.weight",
                                        "model.layers.1.mlp.experts.gate_up_proj_bias",
                                        "model.layers.1.mlp.experts.0.down_proj.weight_scale_inv",
                                        "model.layers.1.mlp.experts.x.down_proj.weight",
                                        "model.layers.1.mlp.shared_expert_gate.weight"};
    static const char *const elsewhere[] = {"model.layers.0.mlp.gate.bias",
                                            "model.layers.2.mlp.gate.bias",
                                            "model.layers.1.mlp_norm",
                                            "model.layers.1.input_layernorm.weight",
                                            "lm_head.weight",
                                            "model.layers.x"};
    for (size_t i = 0; i < 7 + 6; i++) {
        struct tensors t = {0};
        add_router(&t, "model.layers.", H);
        for (int e = 0; e < E; e++)
            add_expert(&t, MOE_ST_F32, e);
        tensors_add(&t, MOE_ST_F32, 1, (uint64_t[]){3}, "%s", i < 7 ? names[i] : elsewhere[i - 7]);
        tensors_write(&t, *state, "model.safetensors");
        tensors_free(&t);
        fixture_write_text(*state, "config.json", CONFIG("qwen3_moe", 6, 5, ""));
        if (i < 7)
            refuse_model(*state, MOE_REASON_TENSOR_INVALID, names[i]);
        else
            moe_model_close(open_model(*state));
    }
}

/* ---- files ---- */

static void a_broken_directory_is_refused(void **state)
{
    struct fixture *f = *state;
    struct moe_model *m;
    check_reason(moe_model_open("/no/such/directory", &m), MOE_REASON_IO);
    refuse_model(f, MOE_REASON_IO, "config.json");
    fixture_write_text(f, "config.json", "{\"model_type\":\"mixtral\",\"model_type\":\"olmoe\"}");
    refuse_model(f, MOE_REASON_MALFORMED, "duplicate");
    fixture_write_text(f, "config.json", "{\"model_type\":\"mixtral\"");
    refuse_model(f, MOE_REASON_MALFORMED, "config.json");
    fixture_write_text(f, "config.json", CONFIG("qwen3_moe", 6, 5, ""));
    refuse_model(f, MOE_REASON_IO, "model.safetensors");
    fixture_write_text(f, "model.safetensors", "not a tensor file");
    refuse_model(f, MOE_REASON_TOO_LARGE, "model.safetensors");
    assert_int_equal(unlinkat(f->fd, "config.json", 0), 0);
    assert_int_equal(symlinkat("/etc/hostname", f->fd, "config.json"), 0);
    refuse_model(f, MOE_REASON_IO, "symbolic link");
    assert_int_equal(unlinkat(f->fd, "config.json", 0), 0);
    int fd = openat(f->fd, "config.json", O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, 65 << 20), 0);
    close(fd);
    refuse_model(f, MOE_REASON_TOO_LARGE, "config.json");
}

static void a_bad_index_is_refused(void **state)
{
    make_sharded_model(*state, "\"x\":\"../model-1.safetensors\"");
    refuse_model(*state, MOE_REASON_MALFORMED, "outside the model directory");
    make_sharded_model(*state, "\"x\":\"/etc/passwd\"");
    refuse_model(*state, MOE_REASON_MALFORMED, "outside the model directory");
    make_sharded_model(*state, "\"x\":7");
    refuse_model(*state, MOE_REASON_MALFORMED, "not a string");
    make_sharded_model(*state, "\"x\":\"model-3.safetensors\"");
    refuse_model(*state, MOE_REASON_IO, "model-3.safetensors");
    make_sharded_model(*state, "\"x\":\"model-1.safetensors\"");
    refuse_model(*state, MOE_REASON_TENSOR_MISSING, "x");
    make_sharded_model(*state, "\"x\":\"model-1.safetensors\",\"x\":\"model-1.safetensors\"");
    refuse_model(*state, MOE_REASON_MALFORMED, "duplicate");
    fixture_write_text(*state, "model.safetensors.index.json", "{\"weight_map\":{}}");
    refuse_model(*state, MOE_REASON_MALFORMED, "weight_map");
    fixture_write_text(*state, "model.safetensors.index.json", "[]");
    refuse_model(*state, MOE_REASON_MALFORMED, "index.json");
}

static void a_shard_that_is_a_link_is_refused(void **state)
{
    struct fixture *f = *state;
    make_sharded_model(f, "");
    assert_int_equal(renameat(f->fd, "model-2.safetensors", f->fd, "real"), 0);
    assert_int_equal(symlinkat("real", f->fd, "model-2.safetensors"), 0);
    refuse_model(f, MOE_REASON_IO, "symbolic link");
}

/* ---- number formats ---- */

static void formats_that_cannot_be_computed_with_are_refused_by_name(void **state)
{
    struct fixture *f = *state;
    make_plain_model(f, MOE_ST_F8_E4M3);
    refuse_model(f, MOE_REASON_TENSOR_INVALID, "experts.0.gate_proj.weight");
    make_plain_model(f, MOE_ST_I8);
    refuse_model(f, MOE_REASON_TENSOR_INVALID, "I8");
    make_plain_model(f, MOE_ST_BF16);
    moe_model_close(open_model(f));
}

/* ---- fingerprint ---- */

/* The form is that of files that others read. */
static void hashes_are_sha256_in_hexadecimal_for_any_pieces(void **state)
{
    static const char abc[] = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    (void)state;
    char hex[MOE_SHA256_HEX];
    struct moe_sha256 s;
    assert_ok(moe_sha256_of("abc", 3, hex));
    assert_string_equal(hex, abc);
    moe_sha256_begin(&s);
    moe_sha256_update(&s, "a", 1);
    moe_sha256_update(&s, "", 0);
    moe_sha256_update(&s, "bc", 2);
    assert_ok(moe_sha256_finish(&s, hex));
    assert_string_equal(hex, abc);
    moe_sha256_drop(&s);
}

static void fingerprint(const struct fixture *f, char out[65])
{
    struct moe_model *m = open_model(f);
    snprintf(out, 65, "%s", moe_model_fingerprint(m));
    assert_int_equal(strlen(out), 64);
    moe_model_close(m);
}

static void the_fingerprint_tells_checkpoints_apart(void **state)
{
    void *other;
    assert_int_equal(fixture_setup(&other), 0);
    char here[65], there[65];
    make_plain_model(*state, MOE_ST_F32);
    make_plain_model(other, MOE_ST_F32);
    fingerprint(*state, here);
    fingerprint(other, there);
    assert_string_equal(here, there); /* another place, same checkpoint */

    fixture_write_text(other, "config.json",
                       CONFIG("qwen3_moe", 6, 5, ",  \"norm_topk_prob\":true"));
    fingerprint(other, there);
    assert_string_not_equal(here, there);
    make_plain_model(other, MOE_ST_BF16);
    fingerprint(other, there);
    assert_string_not_equal(here, there);
    make_sharded_model(other, "");
    fingerprint(other, there);
    assert_string_not_equal(here, there);
    /* Spelling of the JSON does not count. */
    fixture_write_text(*state, "config.json",
                       "{ \"num_hidden_layers\":2, \"mlp_only_layers\":[0], \"num_experts\":4,"
                       "\"num_experts_per_tok\":2, \"hidden_size\":6,"
                       "\"moe_intermediate_size\":5, \"model_type\":\"qwen3_moe\"}\n");
    fingerprint(*state, there);
    assert_string_equal(here, there);
    assert_int_equal(fixture_teardown(&other), 0);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)
    const struct CMUnitTest tests[] = {
        TEST(a_missing_tensor_is_named_at_opening),
        TEST(a_wrong_shape_is_named_at_opening),
        TEST(an_unread_tensor_of_the_block_is_refused),
        TEST(a_broken_directory_is_refused),
        TEST(a_bad_index_is_refused),
        TEST(a_shard_that_is_a_link_is_refused),
        TEST(formats_that_cannot_be_computed_with_are_refused_by_name),
        TEST(hashes_are_sha256_in_hexadecimal_for_any_pieces),
        TEST(the_fingerprint_tells_checkpoints_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
