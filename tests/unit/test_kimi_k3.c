/* SPDX-License-Identifier: Apache-2.0 */
/* Kimi-K3: its published configuration, and settings that are refused. Every weight of the latent
 * space arrives; one that is missing, of another shape or not announced is refused by name. */
#include "config_fixture.h"
#include "small_model.h"

#include <stdio.h>
#include <string.h>

enum { WIDTH = 6, LATENT = 4, INNER = 5, EXPERTS = 3 };

#define BLOCK "language_model.model.layers.1.block_sparse_moe."

/* `extra` ends the settings of the text model. */
#define KIMI(extra)                                                                                \
    "{\"model_type\":\"kimi_k3\",\"text_config\":{\"model_type\":\"kimi_linear\","                 \
    "\"hidden_size\":6,\"num_hidden_layers\":2,\"first_k_dense_replace\":1,\"num_experts\":3,"     \
    "\"num_experts_per_token\":2,\"moe_intermediate_size\":5,\"num_shared_experts\":1,"            \
    "\"moe_router_activation_func\":\"sigmoid\",\"moe_renormalize\":true,"                         \
    "\"routed_scaling_factor\":1.0,\"hidden_act\":\"situ\",\"activation_situ_beta\":4.0,"          \
    "\"activation_situ_linear_beta\":25.0,\"rms_norm_eps\":1e-5" extra "}}"
#define LATENT_KEY ",\"routed_expert_hidden_size\":4"
#define NORM_KEY   ",\"latent_moe_use_norm\":true"

static void add_matrix(struct tensors *t, uint64_t rows, uint64_t columns, const char *name)
{
    tensors_add(t, MOE_ST_F32, 2, (uint64_t[]){rows, columns}, BLOCK "%s.weight", name);
}

/* All weights of the layer but those of the latent space; its experts are `width` wide. */
static void add_block(struct tensors *t, uint64_t width)
{
    add_matrix(t, EXPERTS, WIDTH, "gate");
    tensors_add(t, MOE_ST_F32, 1, (uint64_t[]){EXPERTS}, BLOCK "gate.e_score_correction_bias");
    for (int e = 0; e < EXPERTS; e++) {
        char name[32];
        for (int w = 1; w <= 3; w++) {
            snprintf(name, sizeof name, "experts.%d.w%d", e, w);
            add_matrix(t, w == 2 ? width : INNER, w == 2 ? INNER : width, name);
        }
    }
    add_matrix(t, INNER, WIDTH, "shared_experts.gate_proj");
    add_matrix(t, INNER, WIDTH, "shared_experts.up_proj");
    add_matrix(t, WIDTH, INNER, "shared_experts.down_proj");
}

static void add_norm(struct tensors *t, uint64_t width)
{
    tensors_add(t, MOE_ST_F32, 1, (uint64_t[]){width}, BLOCK "routed_expert_norm.weight");
}

static void write_model(const struct fixture *f, struct tensors *t, const char *config)
{
    fixture_write_text(f, "config.json", config);
    tensors_write(t, f, "model.safetensors");
    tensors_free(t);
}

/* ------------------------------------------------------------------ configuration */

/* The text model as it is published, without its quantization_config. */
static const char kimi_k3_released[] =
    "{\"model_type\":\"kimi_k3\",\"architectures\":[\"KimiK3ForConditionalGeneration\"],"
    "\"text_config\":{\"model_type\":\"kimi_linear\",\"activation_situ_beta\":4.0,"
    "\"activation_situ_linear_beta\":25.0,\"attn_res_block_size\":12,"
    "\"first_k_dense_replace\":1,\"hidden_act\":\"situ\",\"hidden_size\":7168,"
    "\"intermediate_size\":33792,\"kv_lora_rank\":512,\"latent_moe_use_norm\":true,"
    "\"linear_attn_config\":{\"gate_lower_bound\":-5.0,\"use_full_rank_gate\":true},"
    "\"mla_use_nope\":true,\"mla_use_output_gate\":true,\"moe_intermediate_size\":3072,"
    "\"moe_layer_freq\":1,\"moe_renormalize\":true,\"moe_router_activation_func\":\"sigmoid\","
    "\"num_expert_group\":1,\"num_experts\":896,\"num_experts_per_token\":16,"
    "\"num_hidden_layers\":93,\"num_nextn_predict_layers\":0,\"num_shared_experts\":2,"
    "\"rms_norm_eps\":1e-05,\"routed_expert_hidden_size\":3584,\"routed_scaling_factor\":1.0,"
    "\"topk_group\":1,\"topk_method\":\"noaux_tc\",\"use_grouped_topk\":true},"
    "\"vision_config\":{\"patch_size\":14}}";

static void the_released_configuration_is_understood(void **state)
{
    (void)state;
    struct moe_config c;
    assert_ok(read_text(kimi_k3_released, &c));
    assert_string_equal(c.model_type, "kimi_k3");
    check_config(
        &c, 1, 92,
        (struct moe_layer_spec){
            .hidden = 7168,
            .experts = 896,
            .intermediate = 3072,
            .router = ROUTER(.top_k = 16, .scale = 1, .score = MOE_SCORE_SIGMOID,
                             .select_bias = true, .renorm = MOE_RENORM_SUM, .renorm_eps = 1e-20f),
            .activation = MOE_ACT_SITU,
            .swiglu_limit = 25,
            .swiglu_alpha = 4,
            .latent = 3584,
            .latent_norm = true,
            .latent_eps = 1e-5f,
            .shared_intermediate = 6144,
            .shared_activation = MOE_ACT_SITU,
        });
}

/* NULL: without the key. */
static void settings_of_a_latent_space_are_checked(void **state)
{
    (void)state;
    static const struct {
        const char *key, *value, *named;
        enum moe_reason reason;
    } cases[] = {
        {"routed_expert_hidden_size", "7169", "from 1 to 7168", MOE_REASON_CONFIG_INVALID},
        {"routed_expert_hidden_size", "0", "from 1 to 7168", MOE_REASON_CONFIG_INVALID},
        {"routed_expert_hidden_size", NULL, "latent_moe_use_norm", MOE_REASON_CONFIG_INVALID},
        {"routed_expert_hidden_size", "null", "latent_moe_use_norm", MOE_REASON_CONFIG_INVALID},
        {"latent_moe_use_norm", "1", "not true or false", MOE_REASON_CONFIG_INVALID},
        {"rms_norm_eps", NULL, "rms_norm_eps is missing", MOE_REASON_CONFIG_INVALID},
        {"rms_norm_eps", "0", "rms_norm_eps is not a positive", MOE_REASON_CONFIG_INVALID},
        {"activation_situ_beta", NULL, "situ_beta is missing", MOE_REASON_CONFIG_INVALID},
        {"activation_situ_beta", "-4.0", "not a positive", MOE_REASON_CONFIG_INVALID},
        {"activation_situ_linear_beta", "null", "linear_beta is missing",
         MOE_REASON_CONFIG_INVALID},
        {"hidden_act", "\"silu\"", "activation_situ", MOE_REASON_CONFIG_UNKNOWN_KEY},
        {"hidden_act", "\"relu2\"", "relu2", MOE_REASON_CONFIG_UNKNOWN_KEY},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_t *root = json_loads(kimi_k3_released, 0, NULL);
        struct moe_status st =
            read_with(root, json_object_get(root, "text_config"), cases[i].key, cases[i].value);
        if (strstr(st.text, cases[i].named) == NULL)
            fail_msg("%s = %s: %s", cases[i].key, cases[i].value, st.text);
        check_reason(st, cases[i].reason);
    }
}

/* Other families do not read the keys, and refuse them. */
static void a_latent_space_elsewhere_is_refused(void **state)
{
    (void)state;
    struct moe_config c;
    json_t *root = golden("deepseek_v3");
    json_object_set_new(root, "routed_expert_hidden_size", json_integer(16));
    struct moe_status st = moe_config_read(root, &c);
    assert_non_null(strstr(st.text, "routed_expert_hidden_size"));
    check_reason(st, MOE_REASON_CONFIG_UNKNOWN_KEY);
    json_decref(root);
}

/* ------------------------------------------------------------------- weights */

static void all_weights_of_a_latent_space_are_delivered(void **state)
{
    static const uint32_t experts[] = {0, 2};
    for (int norm = 0; norm < 2; norm++) {
        struct tensors t = {0};
        add_block(&t, LATENT);
        add_matrix(&t, LATENT, WIDTH, "routed_expert_down_proj");
        add_matrix(&t, WIDTH, LATENT, "routed_expert_up_proj");
        if (norm)
            add_norm(&t, LATENT);
        write_model(*state, &t, norm ? KIMI(LATENT_KEY NORM_KEY) : KIMI(LATENT_KEY));
        struct moe_model *m = open_model(*state);
        struct deliveries d = {0};
        assert_ok(moe_model_load_layer(m, 0, experts, 2, deliveries_sink, &d, NULL, NULL));
        assert_int_equal(deliveries_find(&d, MOE_WEIGHT_TO_LATENT, 0)->bytes, 4 * LATENT * WIDTH);
        assert_int_equal(deliveries_find(&d, MOE_WEIGHT_FROM_LATENT, 0)->bytes, 4 * LATENT * WIDTH);
        assert_int_equal(deliveries_find(&d, MOE_WEIGHT_GATE, 2)->bytes, 4 * INNER * LATENT);
        assert_int_equal(deliveries_find(&d, MOE_WEIGHT_ROUTER, 0)->bytes, 4 * EXPERTS * WIDTH);
        if (norm)
            assert_int_equal(deliveries_find(&d, MOE_WEIGHT_LATENT_NORM, 0)->bytes, 4 * LATENT);
        /* router and its bias, three shared matrices, three of each expert, the latent space */
        assert_int_equal(d.count, 2 + 3 + 2 * 3 + 2 + norm);
        assert_true(moe_model_layer_memory(m, 0, NULL, 0) >
                    2 * sizeof(float) * LATENT * WIDTH); /* the plan counts them on each slot */
        deliveries_free(&d);
        moe_model_close(m);
    }
}

static void a_missing_projection_or_norm_is_named(void **state)
{
    static const char *const names[] = {"routed_expert_down_proj", "routed_expert_up_proj",
                                        "routed_expert_norm"};
    for (int missing = 0; missing < 3; missing++) {
        struct tensors t = {0};
        add_block(&t, LATENT);
        if (missing != 0)
            add_matrix(&t, LATENT, WIDTH, names[0]);
        if (missing != 1)
            add_matrix(&t, WIDTH, LATENT, names[1]);
        if (missing != 2)
            add_norm(&t, LATENT);
        write_model(*state, &t, KIMI(LATENT_KEY NORM_KEY));
        refuse_model(*state, MOE_REASON_TENSOR_MISSING, names[missing]);
    }
}

static void a_wrong_shape_is_named(void **state)
{
    static const char *const names[] = {"routed_expert_down_proj", "routed_expert_up_proj",
                                        "routed_expert_norm", "experts.0.w1"};
    for (int wrong = 0; wrong < 4; wrong++) {
        struct tensors t = {0};
        add_block(&t, wrong == 3 ? WIDTH : LATENT);
        /* Both projections are as large when they are swapped. */
        add_matrix(&t, wrong == 0 ? WIDTH : LATENT, wrong == 0 ? LATENT : WIDTH, names[0]);
        add_matrix(&t, wrong == 1 ? LATENT : WIDTH, wrong == 1 ? WIDTH : LATENT, names[1]);
        add_norm(&t, wrong == 2 ? WIDTH : LATENT);
        write_model(*state, &t, KIMI(LATENT_KEY NORM_KEY));
        refuse_model(*state, MOE_REASON_TENSOR_INVALID, names[wrong]);
    }
}

/* A norm that the configuration does not announce would change the result; so would projections. */
static void weights_that_are_not_announced_are_refused(void **state)
{
    struct tensors t = {0};
    add_block(&t, LATENT);
    add_matrix(&t, LATENT, WIDTH, "routed_expert_down_proj");
    add_matrix(&t, WIDTH, LATENT, "routed_expert_up_proj");
    add_norm(&t, LATENT);
    write_model(*state, &t, KIMI(LATENT_KEY));
    refuse_model(*state, MOE_REASON_TENSOR_INVALID, "routed_expert_norm");
    struct tensors plain = {0};
    add_block(&plain, WIDTH);
    add_matrix(&plain, WIDTH, WIDTH, "routed_expert_up_proj");
    write_model(*state, &plain, KIMI(""));
    refuse_model(*state, MOE_REASON_TENSOR_INVALID, "routed_expert_up_proj");
}

static void a_model_without_latent_space_may_have_situ(void **state)
{
    struct tensors t = {0};
    add_block(&t, WIDTH);
    write_model(*state, &t, KIMI(""));
    struct moe_model *m = open_model(*state);
    assert_int_equal(moe_model_layer(m, 0)->latent, 0);
    assert_int_equal(moe_model_layer(m, 0)->activation, MOE_ACT_SITU);
    assert_string_equal(moe_layer_uncommon(moe_model_layer(m, 0)), "the activation SiTU");
    moe_model_close(m);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_released_configuration_is_understood),
        cmocka_unit_test(settings_of_a_latent_space_are_checked),
        cmocka_unit_test(a_latent_space_elsewhere_is_refused),
        TEST(all_weights_of_a_latent_space_are_delivered),
        TEST(a_missing_projection_or_norm_is_named),
        TEST(a_wrong_shape_is_named),
        TEST(weights_that_are_not_announced_are_refused),
        TEST(a_model_without_latent_space_may_have_situ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
