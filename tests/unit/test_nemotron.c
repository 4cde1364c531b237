/* SPDX-License-Identifier: Apache-2.0 */
/* Nemotron-3: its published configurations, and settings that are refused. Its experts have no
 * gate: two matrices of each are loaded and planned, and a third one is refused by name. */
#include "config_fixture.h"
#include "small_model.h"

#include <stdio.h>
#include <string.h>

enum { WIDTH = 6, INNER = 5, SHARED = 7, EXPERTS = 3 };

#define BLOCK "backbone.layers.1.mixer."

/* `extra` ends the settings. */
#define NEMOTRON(extra)                                                                            \
    "{\"model_type\":\"nemotron_h\",\"hidden_size\":6,\"layers_block_type\":[\"mamba\",\"moe\"],"  \
    "\"n_routed_experts\":3,\"num_experts_per_tok\":2,\"moe_intermediate_size\":5,"                \
    "\"n_shared_experts\":1,\"moe_shared_expert_intermediate_size\":7,"                            \
    "\"routed_scaling_factor\":2.5,\"mlp_hidden_act\":\"relu2\"" extra "}"

/* ------------------------------------------------------------------ configuration */

/* As published for NVIDIA-Nemotron-3-Nano-30B-A3B. */
static const char nano_released[] =
    "{\"architectures\":[\"NemotronHForCausalLM\"],\"attention_bias\":false,"
    "\"attention_dropout\":0.0,\"bos_token_id\":1,\"chunk_size\":128,\"conv_kernel\":4,"
    "\"eos_token_id\":2,\"expand\":2,\"head_dim\":128,\"hidden_dropout\":0.0,"
    "\"hidden_size\":2688,\"hybrid_override_pattern\":"
    "\"MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME\","
    "\"initializer_range\":0.02,\"intermediate_size\":1856,\"layer_norm_epsilon\":1e-05,"
    "\"mamba_head_dim\":64,\"mamba_hidden_act\":\"silu\",\"mamba_num_heads\":64,"
    "\"mamba_proj_bias\":false,\"mamba_ssm_cache_dtype\":\"float32\","
    "\"max_position_embeddings\":262144,\"mlp_bias\":false,\"mlp_hidden_act\":\"relu2\","
    "\"model_type\":\"nemotron_h\",\"moe_intermediate_size\":1856,"
    "\"moe_shared_expert_intermediate_size\":3712,\"n_group\":1,\"n_groups\":8,"
    "\"n_routed_experts\":128,\"n_shared_experts\":1,\"norm_eps\":1e-05,\"norm_topk_prob\":true,"
    "\"num_attention_heads\":32,\"num_experts_per_tok\":6,\"num_hidden_layers\":52,"
    "\"num_key_value_heads\":2,\"num_logits_to_keep\":1,\"pad_token_id\":0,"
    "\"partial_rotary_factor\":1.0,\"rescale_prenorm_residual\":true,\"residual_in_fp32\":false,"
    "\"rope_theta\":10000,\"routed_scaling_factor\":2.5,\"sliding_window\":null,"
    "\"ssm_state_size\":128,\"tie_word_embeddings\":false,\"time_step_floor\":0.0001,"
    "\"time_step_max\":0.1,\"time_step_min\":0.001,\"topk_group\":1,\"torch_dtype\":\"bfloat16\","
    "\"use_bias\":false,\"use_cache\":true,\"use_conv_bias\":true,\"use_mamba_kernels\":true,"
    "\"vocab_size\":131072}";

static const struct moe_layer_spec nano = {
    .hidden = 2688,
    .experts = 128,
    .intermediate = 1856,
    .router = ROUTER(.top_k = 6, .scale = 2.5f, .score = MOE_SCORE_SIGMOID, .select_bias = true,
                     .renorm = MOE_RENORM_SUM, .renorm_eps = 1e-20f),
    .activation = MOE_ACT_RELU2,
    .shared_intermediate = 3712,
    .shared_activation = MOE_ACT_RELU2,
};

static json_t *released(void)
{
    json_t *root = json_loads(nano_released, 0, NULL);
    assert_non_null(root);
    return root;
}

static void the_released_configuration_of_nano_is_understood(void **state)
{
    (void)state;
    static const uint32_t first[] = {1, 3, 6}; /* of its MoE layers */
    struct moe_config c;
    assert_ok(read_text(nano_released, &c));
    assert_int_equal(c.layer_count, 23);
    for (size_t i = 0; i < sizeof first / sizeof *first; i++)
        assert_int_equal(c.layers[i].layer, first[i]);
    assert_int_equal(c.layers[22].layer, 51);
    c.layer_count = 1;
    check_config(&c, 1, 1, nano);
    assert_string_equal(moe_layer_uncommon(&c.layers[0]), "experts without a gate");
}

/* As Nemotron-3-Super has them. */
static void super_adds_a_latent_space_and_chooses_22_experts(void **state)
{
    (void)state;
    struct moe_config c;
    json_t *root = released();
    json_object_set_new(root, "hidden_size", json_integer(4096));
    json_object_set_new(root, "n_routed_experts", json_integer(512));
    json_object_set_new(root, "num_experts_per_tok", json_integer(22));
    json_object_set_new(root, "moe_intermediate_size", json_integer(2688));
    json_object_set_new(root, "moe_latent_size", json_integer(1024));
    json_object_set_new(root, "moe_shared_expert_intermediate_size", json_integer(5376));
    json_object_set_new(root, "moe_shared_expert_overlap", json_false());
    json_object_set_new(root, "routed_scaling_factor", json_real(5));
    json_object_set_new(root, "num_nextn_predict_layers", json_integer(1));
    json_object_set_new(root, "mtp_hybrid_override_pattern", json_string("*E"));
    assert_ok(moe_config_read(root, &c));
    json_decref(root);
    struct moe_layer_spec want = nano;
    want.hidden = 4096;
    want.experts = 512;
    want.router.top_k = 22;
    want.router.scale = 5;
    want.intermediate = 2688;
    want.latent = 1024;
    want.shared_intermediate = 5376;
    c.layer_count = 1;
    check_config(&c, 1, 1, want);
}

/* NULL: without the key. */
static void settings_are_checked(void **state)
{
    (void)state;
    static const struct {
        const char *key, *value, *named;
        enum moe_reason reason;
    } cases[] = {
        {"num_experts_per_tok", "33", "num_experts_per_tok is 33", MOE_REASON_CONFIG_INVALID},
        {"mlp_hidden_act", "\"gelu\"", "mlp_hidden_act is gelu", MOE_REASON_CONFIG_UNKNOWN_KEY},
        {"mlp_hidden_act", "\"silu\"", "mlp_hidden_act is silu", MOE_REASON_CONFIG_UNKNOWN_KEY},
        {"hidden_act", "\"silu\"", "hidden_act contradicts", MOE_REASON_CONFIG_INVALID},
        {"mlp_bias", "true", "mlp_bias", MOE_REASON_CONFIG_UNKNOWN_KEY},
        {"moe_latent_size", "2689", "moe_latent_size is 2689", MOE_REASON_CONFIG_INVALID},
        {"latent_moe_use_norm", "true", "latent_moe_use_norm", MOE_REASON_CONFIG_UNKNOWN_KEY},
        {"routed_scaling_factor", NULL, "routed_scaling_factor is missing",
         MOE_REASON_CONFIG_INVALID},
        {"num_hidden_layers", "51", "num_hidden_layers contradicts", MOE_REASON_CONFIG_INVALID},
        {"hybrid_override_pattern", NULL, "layers_block_type is missing",
         MOE_REASON_CONFIG_INVALID},
        {"hybrid_override_pattern", "7", "is not a string", MOE_REASON_CONFIG_INVALID},
        {"hybrid_override_pattern", "\"\"", "no layer", MOE_REASON_CONFIG_INVALID},
        {"hybrid_override_pattern", "\"MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEMX\"",
         "X for layer 51", MOE_REASON_CONFIG_UNKNOWN_KEY},
        {"hybrid_override_pattern", "\"M-M-M*-M-M-M*-M-M-M*-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M-\"",
         "no layer of this model", MOE_REASON_CONFIG_INVALID},
        {"layers_block_type", "\"moe\"", "is not a list", MOE_REASON_CONFIG_INVALID},
        {"layers_block_type", "[\"moe\"]", "hybrid_override_pattern contradicts",
         MOE_REASON_CONFIG_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_t *root = released();
        struct moe_status st = read_with(root, root, cases[i].key, cases[i].value);
        if (strstr(st.text, cases[i].named) == NULL)
            fail_msg("%s = %s: %s", cases[i].key, cases[i].value, st.text);
        check_reason(st, cases[i].reason);
    }
}

static void lists_of_layers_must_agree(void **state)
{
    (void)state;
    static const struct {
        const char *extra, *named;
    } cases[] = {
        {",\"hybrid_override_pattern\":\"ME\"", NULL},
        {",\"hybrid_override_pattern\":\"EM\"", "contradicts layers_block_type"},
        {",\"hybrid_override_pattern\":\"MEM\"", "contradicts layers_block_type"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[1024];
        struct moe_config c;
        snprintf(text, sizeof text, "%.*s%s}", (int)strlen(NEMOTRON("")) - 1, NEMOTRON(""),
                 cases[i].extra);
        struct moe_status st = read_text(text, &c);
        if (cases[i].named == NULL) {
            assert_ok(st);
            assert_int_equal(c.layer_count, 1);
            continue;
        }
        assert_non_null(strstr(st.text, cases[i].named));
        check_reason(st, MOE_REASON_CONFIG_INVALID);
    }
    struct moe_config c;
    json_t *root = json_loads(NEMOTRON(""), 0, NULL);
    json_object_set_new(root, "layers_block_type", json_pack("[s,s]", "moe", "conv"));
    struct moe_status st = moe_config_read(root, &c);
    assert_non_null(strstr(st.text, "layers_block_type has conv for layer 1"));
    check_reason(st, MOE_REASON_CONFIG_UNKNOWN_KEY);
    json_object_set_new(root, "layers_block_type", json_pack("[s,i]", "moe", 3));
    st = moe_config_read(root, &c);
    assert_non_null(strstr(st.text, "not a string"));
    json_decref(root);
}

/* ------------------------------------------------------------------- weights */

static void add_matrix(struct tensors *t, uint64_t rows, uint64_t columns, const char *name)
{
    tensors_add(t, MOE_ST_F32, 2, (uint64_t[]){rows, columns}, BLOCK "%s.weight", name);
}

/* All weights of the layer but the matrix `missing`, and the tensor `extra`; NULL: none. */
static void write_block(const struct fixture *f, const char *missing, const char *extra,
                        const char *config)
{
    struct tensors t = {0};
    add_matrix(&t, EXPERTS, WIDTH, "gate");
    tensors_add(&t, MOE_ST_F32, 1, (uint64_t[]){EXPERTS}, BLOCK "gate.e_score_correction_bias");
    for (int e = 0; e <= EXPERTS; e++) {
        for (int down = 0; down < 2; down++) {
            char name[40], whose[24] = "shared_experts";
            uint64_t inner = e < EXPERTS ? INNER : SHARED;
            if (e < EXPERTS)
                snprintf(whose, sizeof whose, "experts.%d", e);
            snprintf(name, sizeof name, "%s.%s_proj", whose, down ? "down" : "up");
            if (missing == NULL || strcmp(name, missing) != 0)
                add_matrix(&t, down ? WIDTH : inner, down ? inner : WIDTH, name);
        }
    }
    if (extra != NULL)
        add_matrix(&t, INNER, WIDTH, extra);
    fixture_write_text(f, "config.json", config);
    tensors_write(&t, f, "model.safetensors");
    tensors_free(&t);
}

static void two_matrices_of_each_expert_are_delivered_and_planned(void **state)
{
    static const uint32_t experts[] = {0, 2};
    write_block(*state, NULL, NULL, NEMOTRON(""));
    struct moe_model *m = open_model(*state);
    struct deliveries d = {0};
    assert_ok(moe_model_load_layer(m, 0, experts, 2, deliveries_sink, &d, NULL, NULL));
    assert_int_equal(deliveries_find(&d, MOE_WEIGHT_UP, 2)->bytes, 4 * INNER * WIDTH);
    assert_int_equal(deliveries_find(&d, MOE_WEIGHT_DOWN, 0)->bytes, 4 * INNER * WIDTH);
    assert_int_equal(deliveries_find(&d, MOE_WEIGHT_SHARED_UP, 0)->bytes, 4 * SHARED * WIDTH);
    /* router and its bias, two shared matrices, two of each expert */
    assert_int_equal(d.count, 2 + 2 + 2 * 2);
    uint64_t none = moe_model_layer_memory(m, 0, NULL, 0);
    assert_int_equal(moe_model_layer_memory(m, 0, experts, 2) - none, 2 * 2 * 4 * INNER * WIDTH);
    deliveries_free(&d);
    moe_model_close(m);
}

static void a_missing_matrix_is_named(void **state)
{
    static const char *const names[] = {"experts.1.up_proj", "experts.2.down_proj",
                                        "shared_experts.up_proj"};
    for (int i = 0; i < 3; i++) {
        write_block(*state, names[i], NULL, NEMOTRON(""));
        refuse_model(*state, MOE_REASON_TENSOR_MISSING, names[i]);
    }
}

static void a_gate_of_experts_without_one_is_refused(void **state)
{
    static const char *const names[] = {"experts.1.gate_proj", "shared_experts.gate_proj",
                                        "experts.gate_up_proj", "fc1_latent_proj"};
    for (int i = 0; i < 4; i++) {
        write_block(*state, NULL, names[i], NEMOTRON(""));
        refuse_model(*state, MOE_REASON_TENSOR_INVALID, names[i]);
    }
}

/* Schemes of fused experts have a gate; others need the parts of both matrices. */
static void quantised_experts_are_looked_for_under_their_two_names(void **state)
{
    write_block(*state, NULL, NULL,
                NEMOTRON(",\"quantization_config\":{\"quant_method\":\"mxfp4\"}"));
    refuse_model(*state, MOE_REASON_CONFIG_UNKNOWN_KEY, "ungated experts");
    write_block(*state, NULL, NULL,
                NEMOTRON(",\"quantization_config\":{\"quant_method\":\"fp8\","
                         "\"weight_block_size\":[128,128]}"));
    refuse_model(*state, MOE_REASON_TENSOR_MISSING, "experts.0.up_proj.weight_scale_inv");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_released_configuration_of_nano_is_understood),
        cmocka_unit_test(super_adds_a_latent_space_and_chooses_22_experts),
        cmocka_unit_test(settings_are_checked),
        cmocka_unit_test(lists_of_layers_must_agree),
        TEST(two_matrices_of_each_expert_are_delivered_and_planned),
        TEST(a_missing_matrix_is_named),
        TEST(a_gate_of_experts_without_one_is_refused),
        TEST(quantised_experts_are_looked_for_under_their_two_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
