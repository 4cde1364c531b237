/* SPDX-License-Identifier: Apache-2.0 */
/* ModelOpt's MIXED_PRECISION: settings by the name of a module, so layers, routed and shared
 * experts, and the projections of a latent space have different formats. Settings of other modules
 * have no effect; wrong ones of these are refused by the module's name. */
#include "checkpoint_copy.h"
#include "model/digest.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MIXED         MOE_UNCOMMON_DIR "/mixed_nemotron_h_latent"
#define BLOCK(module) "backbone.layers.1.mixer." module
#define LAYER_3       "backbone.layers.3.mixer."

enum { WIDTH = 32, LATENT = 16, INNER = 32, SHARED = 48, EXPERTS = 40 };

static json_t *modules_of(json_t *root)
{
    json_t *modules =
        json_object_get(json_object_get(root, "quantization_config"), "quantized_layers");
    assert_non_null(modules);
    return modules;
}

/* Sets the settings of a module to this JSON; NULL: removes them. */
static void set_module(json_t *modules, const char *name, const char *settings)
{
    if (settings == NULL) {
        assert_int_equal(json_object_del(modules, name), 0);
        return;
    }
    json_t *value = json_loads(settings, JSON_DECODE_ANY, NULL);
    assert_non_null(value);
    assert_int_equal(json_object_set_new(modules, name, value), 0);
}

/* The golden model's tensors in the directory. */
static void write_tensors(const struct fixture *f)
{
    static struct copy c;
    copy_open(&c, MIXED);
    copy_write(&c, f);
    copy_close(&c);
}

static bool every_format(const struct moe_device *device, const struct moe_weight_format *f)
{
    (void)device;
    return f->encoding != MOE_ENC_NONE;
}

static void check_formats(const struct fixture *f)
{
    struct moe_model *m = open_model(f);
    assert_ok(moe_model_keep_quantised(m, every_format, NULL, false));
    assert_int_equal(moe_model_layer_count(m), 2);
    const struct moe_layer_spec *mixed = moe_model_layer(m, 0), *plain = moe_model_layer(m, 1);
    assert_int_equal(mixed->routed_format.encoding, MOE_ENC_E2M1);
    assert_int_equal(mixed->routed_format.block_columns, 16);
    assert_int_equal(mixed->routed_format.scale, MOE_SCALE_E4M3);
    assert_int_equal(mixed->shared_format.encoding, MOE_ENC_F8E4M3);
    assert_int_equal(mixed->shared_format.block_columns, 0);
    assert_int_equal(plain->routed_format.encoding, MOE_ENC_NONE);
    assert_int_equal(plain->shared_format.encoding, MOE_ENC_NONE);
    assert_false(moe_model_decodes(m));
    assert_true(moe_model_decodes_projections(m));
    assert_string_equal(moe_model_quantisation(m), "NVFP4 of ModelOpt, FP8");
    moe_model_close(m);
}

/* ------------------------------------------------------------------ formats */

/* Matrices that a backend gets packed, and bytes of all weights. */
struct given {
    struct deliveries plain;
    const struct moe_layer_spec *spec;
    uint64_t bytes;
    uint32_t routed, shared;
};

static struct moe_status take_packed(void *ctx, enum moe_weight weight, uint32_t expert,
                                     const struct moe_packed_matrix *m)
{
    struct given *g = ctx;
    struct moe_packed_sizes sizes;
    size_t rows, columns;
    (void)expert;
    (void)m;
    moe_weight_shape(g->spec, weight, &rows, &columns);
    assert_true(moe_packed_sizes(moe_weight_format_of(g->spec, weight), rows, columns, &sizes));
    g->bytes += sizes.bytes;
    if (moe_weight_is_expert(weight))
        g->routed++;
    else
        g->shared++;
    return moe_ok();
}

static struct moe_status take_plain(void *ctx, enum moe_weight weight, uint32_t expert,
                                    enum moe_dtype dtype, const void *data, size_t bytes)
{
    struct given *g = ctx;
    g->bytes += bytes;
    return deliveries_sink(&g->plain, weight, expert, dtype, data, bytes);
}

static void check_bf16(const struct given *g, enum moe_weight weight, size_t elements)
{
    const struct delivery *d = deliveries_find(&g->plain, weight, 0);
    assert_int_equal(d->dtype, MOE_DTYPE_BF16);
    assert_int_equal(d->bytes, 2 * elements);
}

/* Packed experts, decoded projections; the planner's memory is what is given. */
static void each_layer_has_the_formats_of_its_modules(void **state)
{
    const struct fixture *f = *state;
    static const uint32_t experts[] = {0, 3, 39};
    write_tensors(f);
    write_config(f, read_config(MIXED));
    check_formats(f);
    struct moe_model *m = open_model(f);
    assert_ok(moe_model_keep_quantised(m, every_format, NULL, false));
    for (size_t i = 0; i < 2; i++) {
        struct given g = {.spec = moe_model_layer(m, i)};
        const struct moe_model_sinks sinks = {
            .weight = take_plain, .packed = take_packed, .ctx = &g};
        assert_ok(moe_model_stream_layer(m, i, experts, 3, &sinks, NULL, NULL, NULL));
        assert_int_equal(g.routed, i == 0 ? 3 * 2 : 0);
        assert_int_equal(g.shared, i == 0 ? 2 : 0);
        check_bf16(&g, MOE_WEIGHT_TO_LATENT, LATENT * WIDTH);
        check_bf16(&g, MOE_WEIGHT_FROM_LATENT, LATENT * WIDTH);
        assert_int_equal(g.bytes, moe_model_layer_memory(m, i, experts, 3));
        deliveries_free(&g.plain);
    }
    moe_model_close(m);
}

static void without_packed_matrices_all_is_decoded(void **state)
{
    const struct fixture *f = *state;
    static const uint32_t experts[] = {1};
    struct given g = {0};
    write_tensors(f);
    write_config(f, read_config(MIXED));
    struct moe_model *m = open_model(f);
    assert_true(moe_model_decodes(m));
    assert_ok(moe_model_load_layer(m, 0, experts, 1, take_plain, &g, NULL, NULL));
    assert_int_equal(deliveries_find(&g.plain, MOE_WEIGHT_UP, 1)->bytes, 2 * INNER * LATENT);
    check_bf16(&g, MOE_WEIGHT_SHARED_UP, SHARED * WIDTH);
    assert_int_equal(g.bytes, moe_model_layer_memory(m, 0, experts, 1));
    deliveries_free(&g.plain);
    moe_model_close(m);
}

#define NVFP4 "{\"quant_algo\": \"NVFP4\", \"group_size\": 16}"
#define FP8   "{\"quant_algo\": \"FP8\"}"

/* The layer's four groups, by the names of whole modules behind a prefix. */
static json_t *whole_modules(const char *prefix)
{
    static const char *const names[][2] = {{"experts", NVFP4},
                                           {"shared_experts", FP8},
                                           {"fc1_latent_proj", FP8},
                                           {"fc2_latent_proj", FP8}};
    json_t *modules = json_object();
    for (int i = 0; i < 4; i++) {
        char name[128];
        snprintf(name, sizeof name, "%slayers.1.mixer.%s", prefix, names[i][0]);
        set_module(modules, name, names[i][1]);
    }
    return modules;
}

static void set_modules(const struct fixture *f, json_t *modules)
{
    json_t *root = read_config(MIXED);
    json_object_set_new(json_object_get(root, "quantization_config"), "quantized_layers", modules);
    write_config(f, root);
}

static void settings_are_those_of_the_module_or_of_one_around_it(void **state)
{
    const struct fixture *f = *state;
    write_tensors(f);
    set_modules(f, whole_modules("backbone."));
    check_formats(f);
    /* The nearest counts. */
    json_t *modules = whole_modules("backbone.");
    set_module(modules, BLOCK("shared_experts"), NVFP4);
    set_module(modules, BLOCK("shared_experts.up_proj"), FP8);
    set_module(modules, BLOCK("shared_experts.down_proj"), FP8);
    set_modules(f, modules);
    check_formats(f);
    /* Not a beginning of a name. */
    modules = whole_modules("backbone.");
    set_module(modules, BLOCK("shared_experts"), NULL);
    set_module(modules, BLOCK("shared"), FP8);
    set_modules(f, modules);
    check_refused(f, MOE_REASON_TENSOR_INVALID, BLOCK("shared_experts.up_proj.weight"),
                  "not quantised");
}

/* Those of a wrapper of the same model. */
static void names_of_modules_may_have_another_prefix_than_tensors(void **state)
{
    const struct fixture *f = *state;
    write_tensors(f);
    set_modules(f, whole_modules("model."));
    check_formats(f);
    set_modules(f, whole_modules("language_model.backbone."));
    check_formats(f);
    /* Only if none has that of the tensors. */
    json_t *modules = whole_modules("model.");
    set_module(modules, "backbone.layers.0.mixer.in_proj", FP8);
    set_modules(f, modules);
    check_refused(f, MOE_REASON_TENSOR_INVALID, BLOCK("experts.0.up_proj.weight"), "not quantised");
    set_modules(f, whole_modules("decoder."));
    check_refused(f, MOE_REASON_TENSOR_INVALID, BLOCK("experts.0.up_proj.weight"), "not quantised");
}

static void other_modules_have_no_effect(void **state)
{
    const struct fixture *f = *state;
    static const char *const names[] = {"lm_head", "backbone.layers.2.mixer.q_proj",
                                        "backbone.layers.9.mixer.experts", BLOCK("gate"),
                                        "mtp.layers.0.mixer.experts"};
    write_tensors(f);
    json_t *root = read_config(MIXED);
    for (int i = 0; i < 5; i++)
        set_module(modules_of(root), names[i], "{\"quant_algo\": \"W4A8_AWQ\", \"novelty\": 1}");
    set_module(modules_of(root), "backbone.embeddings", "7");
    write_config(f, root);
    check_formats(f);
}

/* ModelOpt's own file has all, or what config.json leaves out. */
static void modelopts_own_file_has_the_modules(void **state)
{
    const struct fixture *f = *state;
    write_tensors(f);
    json_t *root = read_config(MIXED), *modules = json_incref(modules_of(root));
    json_object_del(json_object_get(root, "quantization_config"), "quantized_layers");
    write_config(f, json_incref(root));
    check_refused(f, MOE_REASON_CONFIG_INVALID, "MIXED_PRECISION", "quantized_layers is no object");
    json_t *file =
        json_pack("{s:{s:s},s:{s:s,s:s,s:i,s:[s],s:O}}", "producer", "name", "modelopt",
                  "quantization", "quant_algo", "MIXED_PRECISION", "kv_cache_quant_algo", "FP8",
                  "group_size", 16, "exclude_modules", "lm_head", "quantized_layers", modules);
    assert_non_null(file);
    assert_int_equal(json_dump_file(file, fixture_path(f, "hf_quant_config.json"), 0), 0);
    check_formats(f);
    json_object_del(root, "quantization_config");
    write_config(f, root);
    check_formats(f);
    json_decref(file);
    json_decref(modules);
    /* That of config.json counts first. */
    fixture_write_text(f, "hf_quant_config.json", "{\"quantization\": {}}");
    write_config(f, read_config(MIXED));
    check_formats(f);
    assert_int_equal(unlink(fixture_path(f, "hf_quant_config.json")), 0);
}

/* ------------------------------------------------------------------ refusals */

#define UP_3 BLOCK("experts.3.up_proj")

static const struct {
    const char *module, *settings;
    enum moe_reason reason;
    const char *named, *why;
} cases[] = {
    {UP_3, "{\"quant_algo\": \"W4A8_AWQ\"}", MOE_REASON_CONFIG_UNKNOWN_KEY, UP_3, "W4A8_AWQ"},
    {UP_3, "{\"quant_algo\": \"MIXED_PRECISION\"}", MOE_REASON_CONFIG_UNKNOWN_KEY, UP_3,
     "quant_algo is MIXED_PRECISION"},
    {UP_3, "{\"quant_algo\": \"NVFP4\", \"group_size\": 32}", MOE_REASON_CONFIG_UNKNOWN_KEY, UP_3,
     "group_size 32"},
    {UP_3, "{\"quant_algo\": \"NVFP4\", \"pre_quant_scale\": true}", MOE_REASON_CONFIG_UNKNOWN_KEY,
     UP_3, "pre_quant_scale is not understood"},
    {UP_3, "{\"group_size\": 16}", MOE_REASON_CONFIG_INVALID, UP_3, "quant_algo is missing"},
    {UP_3, "{\"quant_algo\": 4}", MOE_REASON_CONFIG_INVALID, UP_3, "quant_algo is not a string"},
    {UP_3, "\"NVFP4\"", MOE_REASON_CONFIG_INVALID, UP_3, "not an object"},
    {UP_3, FP8, MOE_REASON_CONFIG_INVALID, UP_3 " is FP8", "layer 1: NVFP4 of ModelOpt"},
    {UP_3, NULL, MOE_REASON_CONFIG_INVALID, UP_3 " is not quantised", "layer 1: NVFP4 of ModelOpt"},
    {BLOCK("shared_experts.down_proj"), "{\"quant_algo\": \"MXFP8\"}", MOE_REASON_CONFIG_INVALID,
     BLOCK("shared_experts.down_proj") " is FP8 in blocks", "layer 1: FP8"},
    {BLOCK("fc1_latent_proj"), "{\"quant_algo\": \"NVFP4_AWQ\"}", MOE_REASON_CONFIG_UNKNOWN_KEY,
     BLOCK("fc1_latent_proj"), "NVFP4_AWQ"},
    {BLOCK("fc1_latent_proj"), NULL, MOE_REASON_TENSOR_INVALID, BLOCK("fc1_latent_proj.weight"),
     "F8_E4M3; for a weight that is not quantised"},
    {BLOCK("fc2_latent_proj"), NVFP4, MOE_REASON_TENSOR_MISSING,
     BLOCK("fc2_latent_proj.weight_scale_2"), "lacks"},
    {LAYER_3 "shared_experts", FP8, MOE_REASON_TENSOR_MISSING,
     LAYER_3 "shared_experts.up_proj.weight_scale", "lacks"},
    {LAYER_3 "fc1_latent_proj", FP8, MOE_REASON_TENSOR_MISSING,
     LAYER_3 "fc1_latent_proj.weight_scale", "lacks"},
    {LAYER_3 "experts.0.up_proj", NVFP4, MOE_REASON_CONFIG_INVALID,
     LAYER_3 "experts.0.down_proj is not quantised", "layer 3: NVFP4 of ModelOpt"},
};

static void wrong_settings_of_a_module_are_refused_by_its_name(void **state)
{
    const struct fixture *f = *state;
    write_tensors(f);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *root = read_config(MIXED);
        set_module(modules_of(root), cases[i].module, cases[i].settings);
        write_config(f, root);
        check_refused(f, cases[i].reason, cases[i].named, cases[i].why);
    }
}

/* Lists of excluded modules count, too. */
static void excluded_modules_are_not_quantised(void **state)
{
    const struct fixture *f = *state;
    write_tensors(f);
    json_t *root = read_config(MIXED);
    json_t *ignore = json_object_get(json_object_get(root, "quantization_config"), "ignore");
    assert_int_equal(json_array_append_new(ignore, json_string("*.mixer.fc2_latent_proj")), 0);
    write_config(f, root);
    check_refused(f, MOE_REASON_TENSOR_INVALID, BLOCK("fc2_latent_proj.weight"), "not quantised");
}

static void a_missing_or_wrong_scale_is_named(void **state)
{
    const struct fixture *f = *state;
    static const char *const names[] = {
        BLOCK("experts.3.up_proj.weight_scale"), BLOCK("experts.3.down_proj.weight_scale_2"),
        BLOCK("shared_experts.down_proj.weight_scale"), BLOCK("fc1_latent_proj.weight_scale"),
        BLOCK("fc2_latent_proj.weight_scale")};
    write_config(f, read_config(MIXED));
    for (int i = 0; i < 5; i++) {
        static struct copy c;
        copy_open(&c, MIXED);
        copy_drop(&c, names[i]);
        copy_write(&c, f);
        check_refused(f, MOE_REASON_TENSOR_MISSING, names[i], "lacks");
        copy_close(&c);
        copy_open(&c, MIXED);
        memset(copy_data(&c, names[i]), 0xff, 1); /* E4M3: NaN */
        if (copy_find(&c, names[i])->dtype == MOE_ST_F32)
            memcpy(copy_data(&c, names[i]), &(uint32_t){0x7f800000}, 4);
        copy_write(&c, f);
        check_refused(f, MOE_REASON_TENSOR_INVALID, names[i],
                      copy_find(&c, names[i])->dtype == MOE_ST_F32 ? "inf" : "nan");
        copy_close(&c);
    }
}

static void a_flipped_bit_of_a_projection_is_found_by_name(void **state)
{
    const struct fixture *f = *state;
    static struct copy c;
    size_t flipped = 0;
    write_config(f, read_config(MIXED));
    copy_open(&c, MIXED);
    copy_write(&c, f);
    struct moe_digest_table *good = digests(f);
    for (size_t t = 0; t < c.count; t++)
        if (strstr(c.list[t].name, "latent_proj") != NULL) {
            check_flip(f, &c, t, good);
            flipped++;
        }
    assert_int_equal(flipped, 2 * 3 + 2); /* with the scales of inputs, which have no digest */
    moe_digest_table_destroy(good);
    copy_close(&c);
}

/* ------------------------------------------- projections in one algorithm for all */

static void add_fp8(struct tensors *t, uint64_t rows, uint64_t columns, const char *name)
{
    tensors_add(t, MOE_ST_F8_E4M3, 2, (uint64_t[]){rows, columns}, BLOCK("%s.weight"), name);
    tensors_add(t, MOE_ST_F32, 1, (uint64_t[]){1}, BLOCK("%s.weight_scale"), name);
}

/* `dtype`: of the projections. */
static void write_uniform(const struct fixture *f, enum moe_st_dtype dtype)
{
    static const char *const projections[] = {"fc1_latent_proj", "fc2_latent_proj"};
    struct tensors t = {.next = 1};
    tensors_add(&t, MOE_ST_F32, 2, (uint64_t[]){2, 6}, BLOCK("gate.weight"));
    tensors_add(&t, MOE_ST_F32, 1, (uint64_t[]){2}, BLOCK("gate.e_score_correction_bias"));
    for (int e = 0; e < 2; e++) {
        char name[32];
        snprintf(name, sizeof name, "experts.%d.up_proj", e);
        add_fp8(&t, 5, 4, name);
        snprintf(name, sizeof name, "experts.%d.down_proj", e);
        add_fp8(&t, 4, 5, name);
    }
    for (int i = 0; i < 2; i++) {
        uint64_t rows = i == 0 ? 4 : 6;
        if (dtype == MOE_ST_F8_E4M3)
            add_fp8(&t, rows, 10 - rows, projections[i]);
        else
            tensors_add(&t, dtype, 2, (uint64_t[]){rows, 10 - rows}, BLOCK("%s.weight"),
                        projections[i]);
    }
    fixture_write_text(
        f, "config.json",
        "{\"model_type\":\"nemotron_h\",\"hidden_size\":6,\"layers_block_type\":[\"mamba\","
        "\"moe\"],\"n_routed_experts\":2,\"num_experts_per_tok\":1,\"moe_intermediate_size\":5,"
        "\"moe_latent_size\":4,\"n_shared_experts\":0,\"moe_shared_expert_intermediate_size\":7,"
        "\"routed_scaling_factor\":1.0,\"mlp_hidden_act\":\"relu2\",\"quantization_config\":"
        "{\"quant_method\":\"modelopt\",\"quant_algo\":\"FP8\"}}");
    tensors_write(&t, f, "model.safetensors");
    tensors_free(&t);
}

static void one_algorithm_for_all_is_that_of_projections_too(void **state)
{
    const struct fixture *f = *state;
    write_uniform(f, MOE_ST_F8_E4M3);
    assert_ok(try_model(f));
    struct moe_model *m = open_model(f);
    assert_true(moe_model_decodes_projections(m));
    moe_model_close(m);
}

/* As Kimi-K3's list of modules, which does not exclude its projections in BF16. */
static void a_list_may_forget_projections_that_are_not_quantised(void **state)
{
    const struct fixture *f = *state;
    write_uniform(f, MOE_ST_BF16);
    assert_ok(try_model(f));
    struct moe_model *m = open_model(f);
    assert_false(moe_model_decodes_projections(m));
    moe_model_close(m);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(each_layer_has_the_formats_of_its_modules),
        TEST(without_packed_matrices_all_is_decoded),
        TEST(settings_are_those_of_the_module_or_of_one_around_it),
        TEST(names_of_modules_may_have_another_prefix_than_tensors),
        TEST(other_modules_have_no_effect),
        TEST(modelopts_own_file_has_the_modules),
        TEST(wrong_settings_of_a_module_are_refused_by_its_name),
        TEST(excluded_modules_are_not_quantised),
        TEST(a_missing_or_wrong_scale_is_named),
        TEST(a_flipped_bit_of_a_projection_is_found_by_name),
        TEST(one_algorithm_for_all_is_that_of_projections_too),
        TEST(a_list_may_forget_projections_that_are_not_quantised),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
