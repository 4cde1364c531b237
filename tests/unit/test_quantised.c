/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised checkpoints with one thing wrong: each is refused by name, when it is opened or when
 * its values are read. And a flipped bit of any part is found by the name of its tensor. */
#include "checkpoint_copy.h"
#include "support/golden.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The folder of a golden model, until the next call. */
static const char *folder(const char *model)
{
    static char path[512];
    snprintf(path, sizeof path, MOE_QUANTISED_DIR "/%s", model);
    return path;
}

/* ---- tensors ---- */

#define MIXTRAL(part)  "model.layers.0.block_sparse_moe.experts.3.w2." part
#define DEEPSEEK(part) "model.layers.1.mlp.experts.3.up_proj." part
#define QWEN(part)     "model.layers.0.mlp.experts.3.up_proj." part
#define GPT_OSS(part)  "model.layers.0.mlp.experts.gate_up_proj" part

static void scale_of_a_wrong_shape(struct copy *c)
{
    copy_find(c, DEEPSEEK("weight_scale_inv"))->shape[1]++;
}
static void scale_missing(struct copy *c)
{
    copy_drop(c, DEEPSEEK("weight_scale_inv"));
}
static void scale_twice(struct copy *c)
{
    copy_add(c, DEEPSEEK("weight_scale_inv"), DEEPSEEK("weight_scale"));
}
static void scale_nan(struct copy *c)
{
    ((uint32_t *)copy_data(c, DEEPSEEK("weight_scale_inv")))[3] = 0x7fc00000;
}
static void scale_zero(struct copy *c)
{
    ((uint32_t *)copy_data(c, DEEPSEEK("weight_scale_inv")))[1] = 0;
}
static void scale_of_a_wrong_dtype(struct copy *c)
{
    copy_find(c, DEEPSEEK("weight_scale_inv"))->dtype = MOE_ST_I32;
}
static void one_matrix_in_bf16(struct copy *c)
{
    struct moe_st_out *t = copy_find(c, DEEPSEEK("weight"));
    uint64_t bytes = t->shape[0] * t->shape[1] * 2;
    void *data = calloc(1, (size_t)bytes);
    assert_non_null(data);
    free((void *)(uintptr_t)t->data);
    t->data = data;
    t->dtype = MOE_ST_BF16;
}
static void router_in_fp8(struct copy *c)
{
    copy_find(c, "model.layers.1.mlp.gate.weight")->dtype = MOE_ST_F8_E4M3;
    copy_find(c, "model.layers.1.mlp.gate.weight")->shape[1] *= 2;
}
static void e8m0_255(struct copy *c)
{
    ((uint8_t *)copy_data(c, GPT_OSS("_scales")))[5] = 255;
}
static void blocks_off_by_one(struct copy *c)
{
    struct moe_st_out *t = copy_find(c, GPT_OSS("_blocks"));
    t->shape[3]--;
}
static void packed_off_by_one(struct copy *c)
{
    copy_find(c, MIXTRAL("weight_packed"))->shape[1]--;
}
static void zero_points_not_declared(struct copy *c)
{
    copy_add(c, "model.layers.1.mlp.experts.3.up_proj.weight_scale", DEEPSEEK("weight_zero_point"));
}
static void zero_points_missing(struct copy *c)
{
    copy_drop(c, MIXTRAL("weight_zero_point"));
}
static void wrong_weight_shape(struct copy *c)
{
    ((int64_t *)copy_data(c, MIXTRAL("weight_shape")))[1] = 95;
}
static void groups_in_another_order(struct copy *c)
{
    int32_t *groups = copy_data(c, QWEN("g_idx"));
    groups[0] = 1;
    groups[16] = 0;
}
static void half_scale_infinite(struct copy *c)
{
    ((uint16_t *)copy_data(c, QWEN("scales")))[7] = 0x7c00;
}
static void global_zero(struct copy *c)
{
    *(float *)copy_data(c, MIXTRAL("weight_global_scale")) = 0;
}
static void global_missing(struct copy *c)
{
    copy_drop(c, QWEN("weight_scale_2"));
}
static void e4m3_scale_nan(struct copy *c)
{
    ((uint8_t *)copy_data(c, QWEN("weight_scale")))[2] = 0xff;
}
static void unknown_part(struct copy *c)
{
    copy_add(c, QWEN("weight_scale_2"), QWEN("pre_quant_scale"));
}

static const struct {
    const char *model;
    void (*change)(struct copy *c);
    enum moe_reason reason;
    const char *named, *why;
} tensor_cases[] = {
    {"fp8_block_deepseek_v3", scale_of_a_wrong_shape, MOE_REASON_TENSOR_INVALID,
     DEEPSEEK("weight_scale_inv"), "config.json implies [2, 2]"},
    {"fp8_block_deepseek_v3", scale_missing, MOE_REASON_TENSOR_MISSING,
     DEEPSEEK("weight_scale_inv"), "lacks"},
    {"fp8_block_deepseek_v3", scale_twice, MOE_REASON_TENSOR_INVALID, DEEPSEEK("weight_scale"),
     "second scale"},
    {"fp8_block_deepseek_v3", scale_nan, MOE_REASON_TENSOR_INVALID, DEEPSEEK("weight_scale_inv"),
     "scale 3 is nan"},
    {"fp8_ue8m0_deepseek_v3", scale_zero, MOE_REASON_TENSOR_INVALID, DEEPSEEK("weight_scale_inv"),
     "scale 1 is 0"},
    {"fp8_block_deepseek_v3", scale_of_a_wrong_dtype, MOE_REASON_TENSOR_INVALID,
     DEEPSEEK("weight_scale_inv"), "is I32"},
    {"fp8_block_deepseek_v3", one_matrix_in_bf16, MOE_REASON_TENSOR_INVALID, DEEPSEEK("weight"),
     "is BF16; for FP8 in blocks"},
    {"fp8_block_deepseek_v3", router_in_fp8, MOE_REASON_TENSOR_INVALID, "mlp.gate.weight",
     "not quantised"},
    {"mxfp4_gpt_oss", e8m0_255, MOE_REASON_TENSOR_INVALID, GPT_OSS("_scales"), "nan"},
    {"mxfp4_gpt_oss", blocks_off_by_one, MOE_REASON_TENSOR_INVALID, GPT_OSS("_blocks"),
     "implies [8, 128, 2, 16]"},
    {"int4_zero_points_mixtral", packed_off_by_one, MOE_REASON_TENSOR_INVALID,
     MIXTRAL("weight_packed"), "implies [64, 12]"},
    {"int4_kimi_k2", zero_points_not_declared, MOE_REASON_TENSOR_INVALID,
     DEEPSEEK("weight_zero_point"), "not understood"},
    {"int4_zero_points_mixtral", zero_points_missing, MOE_REASON_TENSOR_MISSING,
     MIXTRAL("weight_zero_point"), "lacks"},
    {"int4_zero_points_mixtral", wrong_weight_shape, MOE_REASON_TENSOR_INVALID,
     MIXTRAL("weight_shape"), "config.json implies"},
    {"gptq_qwen2_moe", groups_in_another_order, MOE_REASON_TENSOR_INVALID, QWEN("g_idx"),
     "desc_act"},
    {"awq_qwen3_moe", half_scale_infinite, MOE_REASON_TENSOR_INVALID, QWEN("scales"), "inf"},
    {"nvfp4_packed_mixtral", global_zero, MOE_REASON_TENSOR_INVALID, MIXTRAL("weight_global_scale"),
     "no scale"},
    {"nvfp4_modelopt_qwen3_moe", global_missing, MOE_REASON_TENSOR_MISSING, QWEN("weight_scale_2"),
     "lacks"},
    {"nvfp4_modelopt_qwen3_moe", e4m3_scale_nan, MOE_REASON_TENSOR_INVALID, QWEN("weight_scale"),
     "nan"},
    {"nvfp4_modelopt_qwen3_moe", unknown_part, MOE_REASON_TENSOR_INVALID, QWEN("pre_quant_scale"),
     "not understood"},
};

static void a_damaged_checkpoint_is_refused_by_the_name_of_a_tensor(void **state)
{
    const struct fixture *f = *state;
    for (size_t i = 0; i < sizeof tensor_cases / sizeof tensor_cases[0]; i++) {
        static struct copy c;
        write_config(f, read_config(folder(tensor_cases[i].model)));
        copy_open(&c, folder(tensor_cases[i].model));
        copy_write(&c, f);
        assert_ok(try_model(f));
        tensor_cases[i].change(&c);
        copy_write(&c, f);
        check_refused(f, tensor_cases[i].reason, tensor_cases[i].named, tensor_cases[i].why);
        copy_close(&c);
    }
}

/* With desc_act, only g_idx tells the group of a column. */
static void columns_in_another_order_need_their_groups(void **state)
{
    const struct fixture *f = *state;
    static struct copy c;
    copy_open(&c, folder("gptq_qwen2_moe"));
    copy_drop(&c, QWEN("g_idx"));
    copy_write(&c, f);
    copy_close(&c);
    write_config(f, read_config(folder("gptq_qwen2_moe")));
    assert_ok(try_model(f));
    json_t *root = read_config(folder("gptq_qwen2_moe"));
    json_object_set_new(json_object_get(root, "quantization_config"), "desc_act", json_true());
    write_config(f, root);
    check_refused(f, MOE_REASON_TENSOR_MISSING, QWEN("g_idx"), "lacks");
}

/* ModelOpt's scales of blocks have four dimensions. */
static void dimensions_of_size_one_do_not_matter(void **state)
{
    const struct fixture *f = *state;
    static struct copy c;
    copy_open(&c, folder("fp8_block_deepseek_v3"));
    struct moe_st_out *scale = copy_find(&c, DEEPSEEK("weight_scale_inv"));
    const uint64_t four[] = {2, 1, 2, 1}, wrong[] = {2, 1, 3, 1};
    scale->rank = 4;
    memcpy(scale->shape, four, sizeof four);
    copy_write(&c, f);
    write_config(f, read_config(folder("fp8_block_deepseek_v3")));
    assert_ok(try_model(f));
    memcpy(scale->shape, wrong, sizeof wrong);
    copy_write(&c, f);
    check_refused(f, MOE_REASON_TENSOR_INVALID, DEEPSEEK("weight_scale_inv"), "[2, 1, 3, 1]");
    copy_close(&c);
}

/* ---- settings ---- */

static const struct {
    const char *model, *set; /* the second replaces or adds keys of quantization_config */
    enum moe_reason reason;
    const char *named, *why;
} config_cases[] = {
    {"fp8_block_deepseek_v3", "{\"quant_method\": \"bitsandbytes\"}", MOE_REASON_CONFIG_UNKNOWN_KEY,
     "quant_method", "bitsandbytes"},
    {"fp8_block_deepseek_v3", "{\"quant_method\": null}", MOE_REASON_CONFIG_INVALID, "quant_method",
     "missing"},
    {"fp8_block_deepseek_v3", "{\"moe_quant_algo\": \"NVFP4\"}", MOE_REASON_CONFIG_UNKNOWN_KEY,
     "moe_quant_algo", "not understood"},
    {"fp8_block_deepseek_v3", "{\"fmt\": \"e5m2\"}", MOE_REASON_CONFIG_UNKNOWN_KEY, "fmt", "e5m2"},
    {"fp8_block_deepseek_v3", "{\"weight_block_size\": [128]}", MOE_REASON_CONFIG_INVALID, "block",
     "two positive numbers"},
    {"fp8_block_deepseek_v3", "{\"weight_block_size\": [0, 32]}", MOE_REASON_CONFIG_INVALID,
     "block", "two positive numbers"},
    {"fp8_block_deepseek_v3", "{\"expert_dtype\": \"fp4\"}", MOE_REASON_CONFIG_UNKNOWN_KEY,
     "expert_dtype", "fp4"},
    {"mxfp4_deepseek_v4", "{\"expert_dtype\": \"fp6\"}", MOE_REASON_CONFIG_INVALID, "expert_dtype",
     "contradicts"},
    {"fp8_block_deepseek_v3", "{\"modules_to_not_convert\": [\"down_proj\"]}",
     MOE_REASON_CONFIG_INVALID, "lists of modules", "layer 1"},
    {"fp8_block_deepseek_v3", "{\"modules_to_not_convert\": [\"experts.3\"]}",
     MOE_REASON_CONFIG_INVALID, "lists of modules", "layer 1"},
    {"fp8_block_deepseek_v3", "{\"modules_to_not_convert\": [\"experts\"]}",
     MOE_REASON_TENSOR_INVALID, "experts.0.gate_proj.weight", "F8_E4M3"},
    {"fp8_block_deepseek_v3", "{\"modules_to_not_convert\": 3}", MOE_REASON_CONFIG_INVALID,
     "list of modules", "no array"},
    {"int4_kimi_k2", "{\"ignore\": [\"re:(?!x)\"]}", MOE_REASON_CONFIG_UNKNOWN_KEY,
     "regular expression", "(?!x)"},
    {"int4_kimi_k2", "{\"format\": \"marlin-24\"}", MOE_REASON_CONFIG_UNKNOWN_KEY, "format",
     "marlin-24"},
    {"int4_kimi_k2", "{\"sparsity_config\": {\"format\": \"sparse-24-bitmask\"}}",
     MOE_REASON_CONFIG_UNKNOWN_KEY, "sparsity_config", "not understood"},
    {"int4_kimi_k2", "{\"config_groups\": {}}", MOE_REASON_CONFIG_UNKNOWN_KEY, "config_groups",
     "one"},
    {"int4_kimi_k2",
     "{\"config_groups\": {\"a\": {\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 8, "
     "\"type\": \"int\", \"strategy\": \"group\", \"group_size\": 32}}}}",
     MOE_REASON_CONFIG_UNKNOWN_KEY, "pack-quantized", "8-bit int"},
    {"int4_kimi_k2",
     "{\"config_groups\": {\"a\": {\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 4, "
     "\"type\": \"int\", \"strategy\": \"group\", \"group_size\": 16, \"actorder\": \"group\"}}}}",
     MOE_REASON_CONFIG_UNKNOWN_KEY, "actorder", "group"},
    {"gptq_qwen2_moe", "{\"bits\": 8}", MOE_REASON_CONFIG_UNKNOWN_KEY, "bits", "8"},
    {"gptq_qwen2_moe", "{\"checkpoint_format\": \"marlin\"}", MOE_REASON_CONFIG_UNKNOWN_KEY,
     "checkpoint_format", "marlin"},
    {"gptq_qwen2_moe", "{\"dynamic\": {\"+:.*experts.*\": {\"bits\": 8}}}",
     MOE_REASON_CONFIG_UNKNOWN_KEY, "dynamic", "experts"},
    {"gptq_qwen2_moe", "{\"dynamic\": [\"-:.*shared.*\"]}", MOE_REASON_CONFIG_UNKNOWN_KEY,
     "dynamic", "not understood"},
    {"gptq_qwen2_moe", "{\"novelty\": true}", MOE_REASON_CONFIG_UNKNOWN_KEY, "novelty",
     "not understood"},
    {"awq_qwen3_moe", "{\"zero_point\": false}", MOE_REASON_TENSOR_INVALID, "qzeros",
     "not understood"},
    {"awq_qwen3_moe", "{\"version\": \"gemv\"}", MOE_REASON_CONFIG_UNKNOWN_KEY, "version", "gemv"},
    {"nvfp4_modelopt_qwen3_moe", "{\"quant_algo\": \"MIXED_PRECISION\"}", MOE_REASON_CONFIG_INVALID,
     "MIXED_PRECISION", "quantized_layers is no object"},
    {"nvfp4_modelopt_qwen3_moe", "{\"quantized_layers\": {}}", MOE_REASON_CONFIG_UNKNOWN_KEY,
     "quantized_layers", "not understood"},
    {"nvfp4_modelopt_qwen3_moe", "{\"group_size\": 32}", MOE_REASON_CONFIG_UNKNOWN_KEY,
     "group_size", "32"},
    {"fp8_tensor_mixtral",
     "{\"quant_method\": \"mxfp4\", \"activation_scheme\": null, "
     "\"ignored_layers\": null}",
     MOE_REASON_TENSOR_MISSING, "experts.gate_up_proj_scales", "lacks"},
    {"mxfp4_gpt_oss", "{\"quant_method\": \"fp8\"}", MOE_REASON_CONFIG_UNKNOWN_KEY, "fused experts",
     "FP8"},
};

static void a_setting_that_is_not_understood_is_refused_by_name(void **state)
{
    const struct fixture *f = *state;
    for (size_t i = 0; i < sizeof config_cases / sizeof config_cases[0]; i++) {
        static struct copy c;
        json_t *root = read_config(folder(config_cases[i].model));
        json_t *set = json_loads(config_cases[i].set, 0, NULL);
        assert_non_null(set);
        json_object_update(json_object_get(root, "quantization_config"), set);
        json_decref(set);
        write_config(f, root);
        copy_open(&c, folder(config_cases[i].model));
        copy_write(&c, f);
        check_refused(f, config_cases[i].reason, config_cases[i].named, config_cases[i].why);
        copy_close(&c);
    }
}

/* What the quantisers of transformers 5.24 and compressed-tensors 0.20 write. */
static const struct {
    const char *model, *set;
} accepted[] = {
    {"fp8_block_deepseek_v3",
     "{\"quant_method\": \"fp8\", \"modules_to_not_convert\": null, \"modules_to_convert\": null, "
     "\"activation_scheme\": \"dynamic\", \"weight_block_size\": [32, 32], \"dequantize\": false, "
     "\"scale_fmt\": \"float\", \"expert_dtype\": \"fp8\"}"},
    {"mxfp4_gpt_oss", "{\"modules_to_not_convert\": null}"},
    {"gptq_qwen2_moe",
     "{\"tokenizer\": \"x\", \"dataset\": null, \"damp_percent\": 0.1, \"act_group_aware\": true, "
     "\"true_sequential\": true, \"format\": \"gptq\", \"backend\": \"auto\", \"batch_size\": 1, "
     "\"cache_block_outputs\": true, \"max_input_length\": null, \"meta\": {\"quantizer\": []}}"},
    {"awq_qwen3_moe",
     "{\"tokenizer\": null, \"damp_percent\": 0.1, \"desc_act\": false, \"act_group_aware\": true, "
     "\"sym\": true, \"true_sequential\": true, \"format\": \"gemm\", \"backend\": \"auto\", "
     "\"batch_size\": 1, \"cache_block_outputs\": true}"},
    {"int4_kimi_k2",
     "{\"version\": \"0.20.0\", \"moe_sparsity_config\": null, \"sparsity_config\": {}, "
     "\"transform_config\": {}, \"config_groups\": {\"group_0\": {\"targets\": [\"Linear\"], "
     "\"format\": null, \"weights\": {\"actorder\": null, \"block_structure\": null, \"dynamic\": "
     "false, \"group_size\": 16, \"num_bits\": 4, \"observer\": \"minmax\", \"observer_kwargs\": "
     "{}, \"strategy\": \"group\", \"symmetric\": true, \"type\": \"int\"}}}}"},
    {"int4_kimi_k2", "{\"config_groups\": {\"a\": {\"targets\": [\"re:.*experts.*_proj$\"], "
                     "\"weights\": {\"num_bits\": 4, \"type\": \"int\", \"strategy\": "
                     "\"group\", \"group_size\": 16}}}}"},
    {"nvfp4_modelopt_qwen3_moe", "{\"quant_algo\": \"W4A16_NVFP4\"}"},
    {"fp8_block_128_qwen3_moe",
     "{\"quant_method\": \"modelopt\", \"quant_algo\": \"FP8_PB_WO\", \"group_size\": 128, "
     "\"fmt\": "
     "null, \"activation_scheme\": null, \"weight_block_size\": null, \"modules_to_not_convert\": "
     "null}"},
    {"nvfp4_modelopt_qwen3_moe",
     "{\"group_size\": null, \"config_groups\": {\"group_0\": {}}, \"kv_cache_scheme\": {\"type\": "
     "\"float\"}, \"producer\": {\"name\": \"modelopt\"}}"},
};

static void what_quantisers_write_is_accepted(void **state)
{
    const struct fixture *f = *state;
    for (size_t i = 0; i < sizeof accepted / sizeof accepted[0]; i++) {
        static struct copy c;
        json_t *root = read_config(folder(accepted[i].model)),
               *set = json_loads(accepted[i].set, 0, NULL);
        assert_non_null(set);
        json_object_update(json_object_get(root, "quantization_config"), set);
        json_decref(set);
        write_config(f, root);
        copy_open(&c, folder(accepted[i].model));
        copy_write(&c, f);
        assert_ok(try_model(f));
        copy_close(&c);
    }
}

/* The same settings in hf_quant_config.json, as older releases of ModelOpt have them. */
static void modelopts_own_file_stands_for_a_quantization_config(void **state)
{
    static struct copy c;
    const struct fixture *f = *state;
    json_t *root = read_config(folder("nvfp4_modelopt_qwen3_moe"));
    json_object_del(root, "quantization_config");
    write_config(f, json_incref(root));
    copy_open(&c, folder("nvfp4_modelopt_qwen3_moe"));
    copy_write(&c, f);
    check_refused(f, MOE_REASON_TENSOR_INVALID, "gate_proj.weight", "not quantised");
    fixture_write_text(
        f, "hf_quant_config.json",
        "{\"producer\": {\"name\": \"modelopt\"}, \"quantization\": {\"quant_algo\": "
        "\"NVFP4\", \"kv_cache_quant_algo\": \"FP8\", \"group_size\": 16, "
        "\"exclude_modules\": [\"lm_head\", \"*.mlp.gate\"]}}");
    assert_ok(try_model(f));
    fixture_write_text(f, "hf_quant_config.json",
                       "{\"quantization\": {\"quant_algo\": \"W4A8_AWQ\", \"group_size\": 128}}");
    check_refused(f, MOE_REASON_CONFIG_UNKNOWN_KEY, "quant_algo", "W4A8_AWQ");
    fixture_write_text(f, "hf_quant_config.json", "{\"quantization\": {\"group_size\": 16}}");
    check_refused(f, MOE_REASON_CONFIG_INVALID, "hf_quant_config.json", "quant_algo is missing");
    /* Only the KV cache is quantised. */
    fixture_write_text(
        f, "hf_quant_config.json",
        "{\"quantization\": {\"quant_algo\": null, \"kv_cache_quant_algo\": \"FP8\"}}");
    check_refused(f, MOE_REASON_TENSOR_INVALID, "gate_proj.weight", "not quantised");
    /* config.json counts first. */
    write_config(f, read_config(folder("nvfp4_modelopt_qwen3_moe")));
    assert_ok(try_model(f));
    assert_int_equal(unlink(fixture_path(f, "hf_quant_config.json")), 0);
    copy_close(&c);
    json_decref(root);
}

/* ---- digests ---- */

static void a_flipped_bit_of_any_part_is_found_by_name(void **state)
{
    const struct fixture *f = *state;
    struct golden_models models;
    golden_models_list(MOE_QUANTISED_DIR, &models);
    for (size_t i = 0; i < models.count; i++) {
        static struct copy c;
        write_config(f, read_config(folder(models.names[i])));
        copy_open(&c, folder(models.names[i]));
        copy_write(&c, f);
        struct moe_digest_table *good = digests(f);
        for (size_t t = 0; t < c.count; t++)
            if (strstr(c.list[t].name, "experts.") == NULL ||
                strstr(c.list[t].name, "experts.3.") != NULL)
                check_flip(f, &c, t, good);
        moe_digest_table_destroy(good);
        copy_close(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_damaged_checkpoint_is_refused_by_the_name_of_a_tensor,
                                        fixture_setup, fixture_teardown),
        cmocka_unit_test_setup_teardown(columns_in_another_order_need_their_groups, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(dimensions_of_size_one_do_not_matter, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(a_setting_that_is_not_understood_is_refused_by_name,
                                        fixture_setup, fixture_teardown),
        cmocka_unit_test_setup_teardown(what_quantisers_write_is_accepted, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(modelopts_own_file_stands_for_a_quantization_config,
                                        fixture_setup, fixture_teardown),
        cmocka_unit_test_setup_teardown(a_flipped_bit_of_any_part_is_found_by_name, fixture_setup,
                                        fixture_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
