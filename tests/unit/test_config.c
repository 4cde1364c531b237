/* SPDX-License-Identifier: Apache-2.0 */
/* Which layers a configuration makes, what settings mean that are absent, and that unknown settings
 * are refused by name. What each family computes: test_config_families.c. */
#include "config_fixture.h"
#include "model_fixture.h"

#include <stdio.h>
#include <string.h>

/* ---- which layers ---- */

static void check_layers(const char *family, const char *changes, const char *want)
{
    struct moe_config c;
    json_t *root = golden(family);
    json_t *patch = json_loads(changes, 0, NULL);
    assert_non_null(patch);
    assert_int_equal(json_object_update(root, patch), 0);
    assert_ok(moe_config_read(root, &c));
    char got[256] = "";
    for (size_t i = 0; i < c.layer_count; i++)
        sprintf(got + strlen(got), "%s%u", i > 0 ? " " : "", c.layers[i].layer);
    print_message("    %s %s: %s\n", family, changes, got);
    assert_string_equal(got, want);
    json_decref(patch);
    json_decref(root);
}

static void moe_layers_follow_each_familys_rule(void **state)
{
    (void)state;
    check_layers("deepseek_v3", "{\"num_hidden_layers\":6,\"first_k_dense_replace\":3}", "3 4 5");
    check_layers("deepseek_v3", "{\"num_hidden_layers\":6,\"moe_layer_freq\":2}", "2 4");
    check_layers("deepseek_v3", "{\"num_hidden_layers\":5,\"first_k_dense_replace\":null}", "3 4");
    check_layers("glm4_moe",
                 "{\"num_hidden_layers\":3,\"mlp_layer_types\":[\"dense\",\"sparse\",\"dense\"]}",
                 "1");
    check_layers("qwen2_moe", "{\"num_hidden_layers\":6,\"decoder_sparse_step\":2}", "1 3 5");
    check_layers("qwen3_moe", "{\"num_hidden_layers\":5,\"mlp_only_layers\":[0,3]}", "1 2 4");
    check_layers("qwen3_next",
                 "{\"num_hidden_layers\":6,\"decoder_sparse_step\":2,\"mlp_only_layers\":[3]}",
                 "1 5");
    check_layers("llama4", "{\"num_hidden_layers\":6,\"moe_layers\":[1,4]}", "1 4");
    check_layers("llama4",
                 "{\"num_hidden_layers\":6,\"moe_layers\":null,\"interleave_moe_layer_step\":3}",
                 "2 5");
    check_layers("ernie4_5_moe",
                 "{\"num_hidden_layers\":8,\"moe_layer_start_index\":2,\"moe_layer_end_index\":6,"
                 "\"moe_layer_interval\":2}",
                 "3 5");
    check_layers("ernie4_5_moe", "{\"num_hidden_layers\":3,\"moe_layer_end_index\":-1}", "0 1 2");
}

/* ---- refusals ---- */

static void check_refused(const char *family, const char *changes, enum moe_reason reason,
                          const char *named)
{
    struct moe_config c;
    json_t *root = golden(family);
    json_t *patch = json_loads(changes, 0, NULL);
    assert_non_null(patch);
    assert_int_equal(json_object_update(root, patch), 0);
    struct moe_status st = moe_config_read(root, &c);
    check_reason(st, reason);
    if (strstr(st.text, named) == NULL)
        fail_msg("the text does not name %s: %s", named, st.text);
    json_decref(patch);
    json_decref(root);
}

static void settings_that_are_not_understood_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *family, *changes, *named;
    } cases[] = {
        {"mixtral", "{\"moe_temperature\":0.5}", "moe_temperature"},
        {"mixtral", "{\"expert_capacity\":0.5}", "expert_capacity"},
        {"mixtral", "{\"router_temperature\":2}", "router_temperature"},
        {"mixtral", "{\"gate_scale\":2}", "gate_scale"},
        {"mixtral", "{\"scoring_func\":\"sigmoid\"}", "scoring_func"},
        {"mixtral", "{\"norm_topk_prob\":false}", "norm_topk_prob"},
        {"mixtral", "{\"n_group\":8}", "n_group"},
        {"mixtral", "{\"routed_scaling_factor\":2.5}", "routed_scaling_factor"},
        {"mixtral", "{\"n_shared_experts\":1}", "n_shared_experts"},
        {"mixtral", "{\"swiglu_limit\":7}", "swiglu_limit"},
        {"mixtral", "{\"hidden_act\":\"gelu\"}", "gelu"},
        {"mixtral", "{\"mlp_bias\":true}", "mlp_bias"},
        {"mixtral", "{\"model_type\":\"mixtral2\"}", "mixtral2"},
        {"qwen3_moe", "{\"shared_expert_intermediate_size\":80}",
         "shared_expert_intermediate_size"},
        {"qwen3_moe", "{\"text_config\":{\"moe_novelty\":1}}", "moe_novelty"},
        {"qwen3_next", "{\"MoE_Novelty\":1}", "MoE_Novelty"},
        {"deepseek_v2", "{\"topk_method\":\"noaux_tc\"}", "noaux_tc"},
        {"deepseek_v3", "{\"topk_method\":\"greedy\"}", "greedy"},
        {"deepseek_v3", "{\"scoring_func\":\"softmax\"}", "softmax"},
        {"deepseek_v3", "{\"zero_expert_num\":4}", "zero_expert_num"},
        {"glm4_moe", "{\"mlp_layer_types\":[\"dense\",\"linear\"]}", "linear"},
        {"llama4", "{\"norm_topk_prob\":true}", "norm_topk_prob"},
        {"minimax_m2", "{\"shared_intermediate_size\":64}", "shared_intermediate_size"},
        {"ernie4_5_moe", "{\"moe_gate\":\"top2_fused\"}", "moe_gate"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_refused(cases[i].family, cases[i].changes, MOE_REASON_CONFIG_UNKNOWN_KEY,
                      cases[i].named);
}

static void impossible_values_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *family, *changes, *named;
    } cases[] = {
        {"mixtral", "{\"hidden_size\":null}", "hidden_size"},
        {"mixtral", "{\"hidden_size\":0}", "hidden_size"},
        {"mixtral", "{\"hidden_size\":-64}", "hidden_size"},
        {"mixtral", "{\"hidden_size\":64.0}", "hidden_size"},
        {"mixtral", "{\"hidden_size\":\"64\"}", "hidden_size"},
        {"mixtral", "{\"hidden_size\":1000000}", "hidden_size"},
        {"mixtral", "{\"intermediate_size\":0}", "intermediate_size"},
        {"mixtral", "{\"num_local_experts\":0}", "num_local_experts"},
        {"mixtral", "{\"num_local_experts\":1025}", "num_local_experts"},
        {"mixtral", "{\"num_local_experts\":4294967304}", "num_local_experts"},
        {"mixtral", "{\"num_experts_per_tok\":0}", "num_experts_per_tok"},
        {"mixtral", "{\"num_experts_per_tok\":9}", "num_experts_per_tok"},
        {"mixtral", "{\"num_experts_per_tok\":17}", "num_experts_per_tok"},
        {"mixtral", "{\"num_hidden_layers\":0}", "num_hidden_layers"},
        {"mixtral", "{\"num_hidden_layers\":257}", "MoE layers"},
        {"mixtral", "{\"num_hidden_layers\":100000}", "num_hidden_layers"},
        {"mixtral", "{\"num_experts\":7}", "num_experts"},
        {"mixtral", "{\"experts_per_token\":3}", "experts_per_token"},
        {"mixtral", "{\"text_config\":{\"hidden_size\":65}}", "hidden_size"},
        {"mixtral", "{\"text_config\":[]}", "text_config"},
        {"mixtral", "{\"model_type\":null}", "model_type"},
        {"qwen3_moe", "{\"norm_topk_prob\":1}", "norm_topk_prob"},
        {"qwen3_moe", "{\"mlp_only_layers\":[0,1]}", "MoE layer"},
        {"qwen3_moe", "{\"mlp_only_layers\":[2]}", "mlp_only_layers"},
        {"qwen3_moe", "{\"mlp_only_layers\":3}", "mlp_only_layers"},
        {"qwen3_moe", "{\"decoder_sparse_step\":0}", "decoder_sparse_step"},
        {"qwen2_moe", "{\"shared_expert_intermediate_size\":null}",
         "shared_expert_intermediate_size"},
        {"deepseek_v3", "{\"n_group\":3}", "n_group"},
        {"deepseek_v3", "{\"n_group\":16}", "n_group"},
        {"deepseek_v3", "{\"n_group\":null}", "n_group"},
        {"deepseek_v3", "{\"topk_group\":5}", "topk_group"},
        {"deepseek_v3", "{\"topk_group\":1,\"num_experts_per_tok\":5}", "topk_group"},
        {"deepseek_v3", "{\"routed_scaling_factor\":null}", "routed_scaling_factor"},
        {"deepseek_v3", "{\"routed_scaling_factor\":0}", "routed_scaling_factor"},
        {"deepseek_v3", "{\"routed_scaling_factor\":1e300}", "routed_scaling_factor"},
        {"deepseek_v3", "{\"n_shared_experts\":-1}", "n_shared_experts"},
        {"deepseek_v3", "{\"moe_layer_freq\":0}", "moe_layer_freq"},
        {"deepseek_v3", "{\"moe_layer_freq\":[1]}", "moe_layer_freq"},
        {"deepseek_v3", "{\"moe_layer_freq\":[0,2]}", "moe_layer_freq"},
        {"deepseek_v3", "{\"n_shared_experts\":500,\"moe_intermediate_size\":4096}", "shared"},
        {"deepseek_v3", "{\"first_k_dense_replace\":9}", "MoE layer"},
        {"llama4", "{\"moe_layers\":[0,2]}", "moe_layers"},
        {"ernie4_5_moe", "{\"moe_layer_start_index\":[0,1]}", "moe_layer_start_index"},
        {"ernie4_5_moe", "{\"moe_norm_min\":-1}", "moe_norm_min"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_refused(cases[i].family, cases[i].changes, MOE_REASON_CONFIG_INVALID, cases[i].named);
}

/* Settings of other matters, and settings at the value that means "off", change nothing. */
static void settings_without_effect_are_accepted(void **state)
{
    (void)state;
    static const char *const changes[] = {
        "{\"some_new_attention_thing\":7}",
        "{\"rope_scaling\":{\"type\":\"yarn\"}}",
        "{\"router_aux_loss_coef\":0.5,\"router_jitter_noise\":0.1}",
        "{\"output_router_logits\":true,\"moe_router_dtype\":\"float32\"}",
        "{\"n_group\":1,\"topk_group\":1,\"routed_scaling_factor\":1}",
        "{\"n_shared_experts\":0,\"shared_intermediate_size\":0}",
        "{\"moe_novelty\":null,\"norm_topk_prob\":true,\"mlp_bias\":false}",
        "{\"experts_per_token\":2,\"num_experts\":8,\"hidden_act\":\"swish\"}",
        "{\"quantization_config\":null,\"vision_config\":{\"moe_novelty\":1}}",
        "{\"text_config\":null,\"is_quantized\":false}",
    };
    struct moe_config plain, changed;
    json_t *base = golden("mixtral");
    assert_ok(moe_config_read(base, &plain));
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        json_t *root = json_deep_copy(base), *patch = json_loads(changes[i], 0, NULL);
        assert_non_null(patch);
        assert_int_equal(json_object_update(root, patch), 0);
        print_message("    %s\n", changes[i]);
        assert_ok(moe_config_read(root, &changed));
        check_config(&changed, 0, 2, plain.layers[0]);
        json_decref(patch);
        json_decref(root);
    }
    json_decref(base);
}

/* How many shared experts there are is never assumed; null is a way to say none. */
static void the_number_of_shared_experts_must_be_written_down(void **state)
{
    (void)state;
    struct moe_config c;
    json_t *root = golden("glm4_moe");
    json_object_set_new(root, "n_shared_experts", json_null());
    assert_ok(moe_config_read(root, &c));
    assert_int_equal(c.layers[0].shared_intermediate, 0);
    json_object_del(root, "n_shared_experts");
    check_reason(moe_config_read(root, &c), MOE_REASON_CONFIG_INVALID);
    json_decref(root);
}

/* norm_topk_prob absent means what the class of the family means by it. */
static void absent_settings_have_the_defaults_of_the_familys_class(void **state)
{
    (void)state;
    static const struct {
        const char *family;
        enum moe_renorm renorm;
    } cases[] = {{"qwen2_moe", MOE_RENORM_NONE},   {"qwen3_moe", MOE_RENORM_NONE},
                 {"qwen3_next", MOE_RENORM_SUM},   {"olmoe", MOE_RENORM_NONE},
                 {"deepseek_v2", MOE_RENORM_NONE}, {"deepseek_v3", MOE_RENORM_SUM},
                 {"glm4_moe", MOE_RENORM_SUM}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct moe_config c;
        json_t *root = golden(cases[i].family);
        json_object_del(root, "norm_topk_prob");
        assert_ok(moe_config_read(root, &c));
        assert_int_equal(c.layers[0].router.renorm, cases[i].renorm);
        json_decref(root);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(moe_layers_follow_each_familys_rule),
        cmocka_unit_test(settings_that_are_not_understood_are_refused_by_name),
        cmocka_unit_test(impossible_values_are_refused_by_name),
        cmocka_unit_test(settings_without_effect_are_accepted),
        cmocka_unit_test(the_number_of_shared_experts_must_be_written_down),
        cmocka_unit_test(absent_settings_have_the_defaults_of_the_familys_class),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
