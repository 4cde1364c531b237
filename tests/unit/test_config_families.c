/* SPDX-License-Identifier: Apache-2.0 */
/* config.json becomes the layer spec that the published code of each family computes. The expected
 * values are written out by hand from the configurations and the families' own code. */
#include "config_fixture.h"
#include "model_fixture.h"

#include <string.h>

/* ---- golden models, first those of larger sizes ---- */

static void mixtral(void **state)
{
    (void)state;
    check_golden("mixtral", 0, 2,
                 (struct moe_layer_spec){
                     .hidden = 64,
                     .experts = 8,
                     .intermediate = 96,
                     .router = ROUTER(.scale = 1, .top_k = 2, .renorm = MOE_RENORM_SUM),
                 });
}

static void qwen2_moe(void **state)
{
    (void)state;
    check_golden("qwen2_moe", 0, 2,
                 (struct moe_layer_spec){
                     .hidden = 64,
                     .experts = 8,
                     .intermediate = 48,
                     .router = ROUTER(.scale = 1, .top_k = 4),
                     .shared_intermediate = 80,
                     .shared_gated = true,
                 });
}

static void qwen3_moe(void **state)
{
    (void)state;
    check_golden("qwen3_moe", 0, 2,
                 (struct moe_layer_spec){
                     .hidden = 64,
                     .experts = 16,
                     .intermediate = 48,
                     .router = ROUTER(.scale = 1, .top_k = 4, .renorm = MOE_RENORM_SUM),
                 });
}

static void qwen3_next(void **state)
{
    (void)state;
    check_golden("qwen3_next", 0, 2,
                 (struct moe_layer_spec){
                     .hidden = 64,
                     .experts = 16,
                     .intermediate = 48,
                     .router = ROUTER(.scale = 1, .top_k = 4, .renorm = MOE_RENORM_SUM),
                     .shared_intermediate = 48,
                     .shared_gated = true,
                 });
}

static void olmoe(void **state)
{
    (void)state;
    check_golden("olmoe", 0, 2,
                 (struct moe_layer_spec){
                     .hidden = 64,
                     .experts = 16,
                     .intermediate = 48,
                     .router = ROUTER(.scale = 1, .top_k = 4),
                 });
}

static void deepseek_v2(void **state)
{
    (void)state;
    check_golden("deepseek_v2", 1, 1,
                 (struct moe_layer_spec){
                     .hidden = 64,
                     .experts = 16,
                     .intermediate = 48,
                     .router = ROUTER(.scale = 1, .top_k = 4),
                     .shared_intermediate = 96,
                 });
}

static void deepseek_v3(void **state)
{
    (void)state;
    check_golden("deepseek_v3", 1, 1,
                 (struct moe_layer_spec){
                     .hidden = 64,
                     .experts = 16,
                     .intermediate = 48,
                     .router = {.score = MOE_SCORE_SIGMOID,
                                .top_k = 4,
                                .select_bias = true,
                                .groups = 4,
                                .topk_group = 2,
                                .group_best = 2,
                                .renorm = MOE_RENORM_SUM,
                                .renorm_eps = 1e-20f,
                                .scale = 2.5f},
                     .shared_intermediate = 48,
                 });
}

static void glm4_moe(void **state)
{
    (void)state;
    check_golden("glm4_moe", 1, 1,
                 (struct moe_layer_spec){
                     .hidden = 64,
                     .experts = 16,
                     .intermediate = 48,
                     .router = {.score = MOE_SCORE_SIGMOID,
                                .top_k = 4,
                                .select_bias = true,
                                .groups = 1,
                                .topk_group = 1,
                                .group_best = 1,
                                .renorm = MOE_RENORM_SUM,
                                .renorm_eps = 1e-20f,
                                .scale = 2.5f},
                     .shared_intermediate = 48,
                 });
}

static void gpt_oss(void **state)
{
    (void)state;
    check_golden("gpt_oss", 0, 2,
                 (struct moe_layer_spec){
                     .hidden = 64,
                     .experts = 8,
                     .intermediate = 64,
                     .router = ROUTER(.scale = 1, .score = MOE_SCORE_SOFTMAX_TOPK, .top_k = 4,
                                      .logit_bias = true),
                     .activation = MOE_ACT_SWIGLU_OAI,
                     .swiglu_limit = 7.0f,
                     .swiglu_alpha = 1.702f,
                     .gate_up_bias = true,
                     .down_bias = true,
                     .shared_activation = MOE_ACT_SWIGLU_OAI,
                 });
}

static void llama4(void **state)
{
    (void)state;
    check_golden("llama4", 0, 2,
                 (struct moe_layer_spec){
                     .hidden = 64,
                     .experts = 8,
                     .intermediate = 48,
                     .router = ROUTER(.scale = 1, .score = MOE_SCORE_SIGMOID, .top_k = 1),
                     .weighting = MOE_WEIGHT_INPUT,
                     .shared_intermediate = 48,
                 });
}

static void minimax_m2(void **state)
{
    (void)state;
    check_golden("minimax_m2", 0, 2,
                 (struct moe_layer_spec){
                     .hidden = 64,
                     .experts = 16,
                     .intermediate = 48,
                     .router = ROUTER(.scale = 1, .score = MOE_SCORE_SIGMOID, .top_k = 4,
                                      .select_bias = true, .renorm = MOE_RENORM_SUM),
                 });
}

static void ernie4_5_moe(void **state)
{
    (void)state;
    check_golden("ernie4_5_moe", 0, 2,
                 (struct moe_layer_spec){
                     .hidden = 64,
                     .experts = 16,
                     .intermediate = 48,
                     .router = ROUTER(.scale = 1, .top_k = 4, .select_bias = true,
                                      .renorm = MOE_RENORM_CLAMPED, .renorm_eps = 1e-12f),
                     .shared_intermediate = 48,
                 });
}

/* Made by tests/golden/make_models.py. */
#define SMALL .hidden = 32, .intermediate = 24
#define DEEPSEEK_SIGMOID                                                                           \
    .score = MOE_SCORE_SIGMOID, .select_bias = true, .renorm = MOE_RENORM_SUM, .renorm_eps = 1e-20f

static void small_golden_models(void **state)
{
    (void)state;
    static const struct {
        const char *family;
        uint32_t first, count; /* of MoE layers */
        struct moe_layer_spec spec;
    } models[] = {
        {"minimax",
         0,
         1,
         {SMALL, .experts = 8, .router = ROUTER(.top_k = 2, .scale = 1, .renorm = MOE_RENORM_SUM)}},
        {"minimax_m3_vl",
         1,
         1,
         {SMALL, .experts = 8,
          .router = ROUTER(.top_k = 3, .score = MOE_SCORE_SIGMOID, .select_bias = true,
                           .renorm = MOE_RENORM_SUM, .scale = 2.0f),
          .activation = MOE_ACT_SWIGLU_OAI, .swiglu_limit = 1.0f, .swiglu_alpha = 1.702f,
          .shared_intermediate = 40, .shared_activation = MOE_ACT_SWIGLU_OAI}},
        {"qwen3_vl_moe",
         0,
         1,
         {SMALL, .experts = 8, .router = ROUTER(.top_k = 3, .scale = 1, .renorm = MOE_RENORM_SUM)}},
        {"qwen3_5_moe",
         0,
         1,
         {SMALL, .experts = 8, .router = ROUTER(.top_k = 3, .scale = 1, .renorm = MOE_RENORM_SUM),
          .shared_intermediate = 40, .shared_gated = true}},
        {"qwen3_omni_moe",
         0,
         1,
         {SMALL, .experts = 8, .router = ROUTER(.top_k = 3, .scale = 1, .renorm = MOE_RENORM_SUM)}},
        {"deepseek_v32",
         1,
         1,
         {SMALL, .experts = 16,
          .router = {.top_k = 4,
                     .groups = 4,
                     .topk_group = 2,
                     .group_best = 2,
                     .scale = 2.5f,
                     DEEPSEEK_SIGMOID},
          .shared_intermediate = 24}},
        {"deepseek_v4",
         0,
         2,
         {SMALL, .experts = 8,
          .router = ROUTER(.top_k = 3, .score = MOE_SCORE_SQRTSOFTPLUS, .select_bias = true,
                           .renorm = MOE_RENORM_SUM, .renorm_eps = 1e-20f, .scale = 1.5f),
          .activation = MOE_ACT_SWIGLU_CLAMPED, .swiglu_limit = 1.0f, .shared_intermediate = 24,
          .shared_activation = MOE_ACT_SWIGLU_CLAMPED}},
        {"glm4_moe_lite",
         1,
         1,
         {SMALL, .experts = 8, .router = ROUTER(.top_k = 3, .scale = 2.5f, DEEPSEEK_SIGMOID),
          .shared_intermediate = 24}},
        {"glm_moe_dsa",
         1,
         1,
         {SMALL, .experts = 8, .router = ROUTER(.top_k = 3, .scale = 2.5f, DEEPSEEK_SIGMOID),
          .shared_intermediate = 24}},
        {"dots1",
         1,
         1,
         {SMALL, .experts = 8, .router = ROUTER(.top_k = 3, .scale = 2.5f, DEEPSEEK_SIGMOID),
          .shared_intermediate = 48}},
        {"bailing_hybrid",
         1,
         1,
         {SMALL, .experts = 16,
          .router = {.top_k = 4,
                     .groups = 4,
                     .topk_group = 2,
                     .group_best = 2,
                     .scale = 2.5f,
                     DEEPSEEK_SIGMOID},
          .shared_intermediate = 24}},
        {"kimi_linear",
         1,
         1,
         {SMALL, .experts = 8, .router = ROUTER(.top_k = 3, .scale = 2.5f, DEEPSEEK_SIGMOID),
          .shared_intermediate = 24}},
        {"mimo_v2_flash",
         1,
         1,
         {SMALL, .experts = 8, .router = ROUTER(.top_k = 3, .scale = 1, DEEPSEEK_SIGMOID),
          .shared_intermediate = 0}},
        {"mistral4",
         1,
         1,
         {SMALL, .experts = 16,
          .router = {.top_k = 4,
                     .groups = 4,
                     .topk_group = 2,
                     .group_best = 2,
                     .scale = 2.5f,
                     .renorm = MOE_RENORM_SUM,
                     .renorm_eps = 1e-20f},
          .shared_intermediate = 24}},
        {"mistral_large4",
         1,
         1,
         {SMALL, .experts = 16,
          .router = {.top_k = 4,
                     .groups = 4,
                     .topk_group = 2,
                     .group_best = 2,
                     .scale = 2.5f,
                     .renorm = MOE_RENORM_SUM,
                     .renorm_eps = 1e-20f},
          .shared_intermediate = 24}},
        {"lfm2_moe",
         1,
         1,
         {SMALL, .experts = 8,
          .router = ROUTER(.top_k = 3, .score = MOE_SCORE_SIGMOID, .select_bias = true,
                           .renorm = MOE_RENORM_SUM, .renorm_eps = 1e-6f, .scale = 1.5f)}},
        {"hunyuan_v1_moe",
         0,
         1,
         {SMALL, .experts = 8, .router = ROUTER(.top_k = 3, .scale = 1, .renorm = MOE_RENORM_SUM),
          .shared_intermediate = 24}},
        {"jamba", 1, 1, {SMALL, .experts = 8, .router = ROUTER(.top_k = 2, .scale = 1)}},
        {"granitemoe",
         0,
         1,
         {SMALL, .experts = 8,
          .router = ROUTER(.top_k = 3, .scale = 1, .score = MOE_SCORE_SOFTMAX_TOPK)}},
        {"granitemoehybrid",
         0,
         1,
         {SMALL, .experts = 8,
          .router = ROUTER(.top_k = 3, .scale = 1, .score = MOE_SCORE_SOFTMAX_TOPK)}},
        {"longcat_flash",
         0,
         1,
         {SMALL, .experts = 8,
          .router = ROUTER(.top_k = 4, .select_bias = true, .scale = 6.0f, .zero_experts = 4)}},
    };
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        print_message("    %s\n", models[i].family);
        check_golden(models[i].family, models[i].first, models[i].count, models[i].spec);
    }
}

/* Phi-3.5-MoE as published. */
static void sparse_mixer_reads_its_jitter_and_chooses_two(void **state)
{
    (void)state;
    static const char phi[] =
        "{\"model_type\":\"phimoe\",\"architectures\":[\"PhiMoEForCausalLM\"],"
        "\"attention_bias\":true,\"hidden_act\":\"silu\",\"hidden_size\":4096,"
        "\"input_jitter_noise\":0.01,\"intermediate_size\":6400,\"lm_head_bias\":true,"
        "\"num_attention_heads\":32,\"num_experts_per_tok\":2,\"num_hidden_layers\":32,"
        "\"num_key_value_heads\":8,\"num_local_experts\":16,\"output_router_logits\":false,"
        "\"router_aux_loss_coef\":0.0,\"router_jitter_noise\":0.01,\"sliding_window\":2047}";
    struct moe_config c;
    struct moe_layer_spec want = {
        .hidden = 4096,
        .experts = 16,
        .intermediate = 6400,
        .router = ROUTER(.top_k = 2, .scale = 1, .score = MOE_SCORE_SPARSEMIXER, .jitter = 0.01f)};
    assert_ok(read_text(phi, &c));
    check_config(&c, 0, 32, want);
    json_t *root = json_loads(phi, 0, NULL);
    json_object_set_new(root, "router_jitter_noise", json_real(0.25));
    assert_ok(moe_config_read(root, &c));
    want.router.jitter = 0.25f;
    check_config(&c, 0, 32, want);
    json_object_set_new(root, "router_jitter_noise", json_real(0));
    check_reason(moe_config_read(root, &c), MOE_REASON_CONFIG_INVALID);
    json_object_del(root, "router_jitter_noise");
    assert_ok(moe_config_read(root, &c));
    json_object_set_new(root, "num_experts_per_tok", json_integer(3));
    struct moe_status st = moe_config_read(root, &c);
    assert_non_null(strstr(st.text, "SparseMixer"));
    check_reason(st, MOE_REASON_CONFIG_INVALID);
    json_decref(root);
}

/* ---- models that are refused by name ---- */

static void an_unknown_model_type_is_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *text, *named, *why;
    } cases[] = {
        {"{\"model_type\":\"novelty\"}", "novelty", "not supported"},
        {"{\"model_type\":\"some_shell\",\"text_config\":{\"model_type\":\"novelty\"}}", "novelty",
         "not supported"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct moe_config c;
        struct moe_status st = read_text(cases[i].text, &c);
        assert_non_null(strstr(st.text, cases[i].named));
        assert_non_null(strstr(st.text, cases[i].why));
        check_reason(st, MOE_REASON_CONFIG_UNKNOWN_KEY);
    }
}

/* ---- settings as released, where they differ from those of the golden models ---- */

static void hunyuan_a13b_has_lists_of_equal_numbers(void **state)
{
    (void)state;
    struct moe_config c;
    static const char released[] =
        "{\"model_type\":\"hunyuan_v1_moe\",\"hidden_size\":4096,\"intermediate_size\":3072,"
        "\"num_hidden_layers\":2,\"num_experts\":64,\"moe_intermediate_size\":[3072,3072],"
        "\"moe_topk\":[8,8],\"num_shared_expert\":[1,1],\"use_mixed_mlp_moe\":true,"
        "\"moe_drop_tokens\":false,\"moe_random_routing_dropped_token\":false,"
        "\"moe_layer_num_skipped\":0,\"norm_topk_prob\":true,\"hidden_act\":\"silu\"}";
    assert_ok(read_text(released, &c));
    check_config(&c, 0, 2,
                 (struct moe_layer_spec){
                     .hidden = 4096,
                     .experts = 64,
                     .intermediate = 3072,
                     .router = ROUTER(.top_k = 8, .scale = 1, .renorm = MOE_RENORM_SUM),
                     .shared_intermediate = 3072,
                 });
    json_t *root = json_loads(released, 0, NULL);
    json_object_set_new(root, "moe_topk", json_pack("[i,i]", 8, 4));
    struct moe_status st = moe_config_read(root, &c);
    assert_non_null(strstr(st.text, "moe_topk is [8,4]"));
    check_reason(st, MOE_REASON_CONFIG_INVALID);
    json_decref(root);
}

static void ling_has_keys_of_its_own(void **state)
{
    (void)state;
    struct moe_config c;
    assert_ok(read_text(
        "{\"model_type\":\"bailing_hybrid\",\"hidden_size\":1536,\"intermediate_size\":4608,"
        "\"num_hidden_layers\":24,\"layer_group_size\":4,\"kda_safe_gate\":true,"
        "\"gated_attention_proj_granularity_type\":\"head_wise\",\"first_k_dense_replace\":1,"
        "\"num_experts\":128,\"num_experts_per_tok\":8,\"num_shared_experts\":1,"
        "\"moe_intermediate_size\":512,\"moe_shared_expert_intermediate_size\":1024,"
        "\"n_group\":8,\"topk_group\":4,\"topk_method\":\"noaux_tc\",\"norm_topk_prob\":true,"
        "\"score_function\":\"sigmoid\",\"scoring_func\":\"sigmoid\",\"router_dtype\":\"fp32\","
        "\"routed_scaling_factor\":2.5,\"moe_router_enable_expert_bias\":true,"
        "\"scale_router_input\":false,\"group_norm_size\":1,\"use_bias\":false}",
        &c));
    check_config(&c, 1, 23,
                 (struct moe_layer_spec){
                     .hidden = 1536,
                     .experts = 128,
                     .intermediate = 512,
                     .router = {.score = MOE_SCORE_SIGMOID,
                                .top_k = 8,
                                .select_bias = true,
                                .groups = 8,
                                .topk_group = 4,
                                .group_best = 2,
                                .renorm = MOE_RENORM_SUM,
                                .renorm_eps = 1e-20f,
                                .scale = 2.5f},
                     .shared_intermediate = 1024,
                 });
}

/* Ling 1 has the same model_type, but softmax and no groups. */
static void ling_1_is_refused(void **state)
{
    (void)state;
    struct moe_config c;
    struct moe_status st = read_text(
        "{\"model_type\":\"bailing_moe\",\"hidden_size\":2048,\"intermediate_size\":5632,"
        "\"num_hidden_layers\":28,\"num_experts\":64,\"num_experts_per_tok\":6,"
        "\"num_shared_experts\":2,\"moe_intermediate_size\":1408,\"norm_topk_prob\":true}",
        &c);
    assert_non_null(strstr(st.text, "n_group is missing"));
    check_reason(st, MOE_REASON_CONFIG_INVALID);
}

/* null as scale means 1, and there is no n_shared_experts. */
static void mimo_v2_flash(void **state)
{
    (void)state;
    struct moe_config c;
    assert_ok(read_text(
        "{\"model_type\":\"mimo_v2_flash\",\"hidden_size\":4096,\"intermediate_size\":16384,"
        "\"num_hidden_layers\":3,\"moe_layer_freq\":[0,1,1],\"n_routed_experts\":256,"
        "\"num_experts_per_tok\":8,\"moe_intermediate_size\":2048,\"n_shared_experts\":null,"
        "\"routed_scaling_factor\":null,\"scoring_func\":\"sigmoid\",\"topk_method\":\"noaux_tc\","
        "\"n_group\":1,\"norm_topk_prob\":true,\"attention_value_scale\":0.707}",
        &c));
    check_config(&c, 1, 2,
                 (struct moe_layer_spec){
                     .hidden = 4096,
                     .experts = 256,
                     .intermediate = 2048,
                     .router = ROUTER(.score = MOE_SCORE_SIGMOID, .top_k = 8, .select_bias = true,
                                      .renorm = MOE_RENORM_SUM, .renorm_eps = 1e-20f, .scale = 1),
                 });
}

/* ---- further families, with the sizes their makers publish ---- */

static void deepseek_v2_keeps_the_best_groups_by_their_maximum(void **state)
{
    (void)state;
    struct moe_config c;
    assert_ok(read_text("{\"model_type\":\"deepseek_v2\",\"hidden_size\":5120,"
                        "\"intermediate_size\":12288,\"moe_intermediate_size\":1536,"
                        "\"num_hidden_layers\":60,\"n_routed_experts\":160,\"n_shared_experts\":2,"
                        "\"num_experts_per_tok\":6,\"n_group\":8,\"topk_group\":3,"
                        "\"topk_method\":\"group_limited_greedy\",\"scoring_func\":\"softmax\","
                        "\"routed_scaling_factor\":16.0,\"norm_topk_prob\":false,"
                        "\"first_k_dense_replace\":1,\"moe_layer_freq\":1,\"aux_loss_alpha\":0.001,"
                        "\"seq_aux\":true,\"ep_size\":1,\"rope_scaling\":{\"factor\":40},"
                        "\"hidden_act\":\"silu\"}",
                        &c));
    check_config(
        &c, 1, 59,
        (struct moe_layer_spec){
            .hidden = 5120,
            .experts = 160,
            .intermediate = 1536,
            .router = {.top_k = 6, .groups = 8, .topk_group = 3, .group_best = 1, .scale = 16.0f},
            .shared_intermediate = 3072,
        });
}

/* DeepSeek's own gate renormalises or scales, never both. */
static void deepseek_v2_scales_only_what_it_does_not_renormalise(void **state)
{
    (void)state;
    struct moe_config c;
    json_t *root = golden("deepseek_v2");
    json_object_set_new(root, "norm_topk_prob", json_true());
    json_object_set_new(root, "routed_scaling_factor", json_real(16));
    assert_ok(moe_config_read(root, &c));
    assert_int_equal(c.layers[0].router.renorm, MOE_RENORM_SUM);
    assert_true(c.layers[0].router.scale == 1.0f);
    json_decref(root);
}

static void kimi_k2(void **state)
{
    (void)state;
    struct moe_config c;
    assert_ok(read_text("{\"model_type\":\"kimi_k2\",\"hidden_size\":7168,"
                        "\"intermediate_size\":18432,\"moe_intermediate_size\":2048,"
                        "\"num_hidden_layers\":61,\"n_routed_experts\":384,\"n_shared_experts\":1,"
                        "\"num_experts_per_tok\":8,\"n_group\":1,\"topk_group\":1,"
                        "\"topk_method\":\"noaux_tc\",\"scoring_func\":\"sigmoid\","
                        "\"routed_scaling_factor\":2.827,\"norm_topk_prob\":true,"
                        "\"first_k_dense_replace\":1,\"moe_layer_freq\":1,"
                        "\"num_nextn_predict_layers\":0,\"hidden_act\":\"silu\"}",
                        &c));
    check_config(
        &c, 1, 60,
        (struct moe_layer_spec){
            .hidden = 7168,
            .experts = 384,
            .intermediate = 2048,
            .router = ROUTER(.score = MOE_SCORE_SIGMOID, .top_k = 8, .select_bias = true,
                             .renorm = MOE_RENORM_SUM, .renorm_eps = 1e-20f, .scale = 2.827f),
            .shared_intermediate = 2048,
        });
}

static void minimax_text_01(void **state)
{
    (void)state;
    struct moe_config c;
    assert_ok(read_text("{\"model_type\":\"minimax\",\"hidden_size\":6144,"
                        "\"intermediate_size\":9216,\"num_hidden_layers\":80,"
                        "\"num_local_experts\":32,\"num_experts_per_tok\":2,"
                        "\"shared_intermediate_size\":0,\"shared_moe_mode\":\"sigmoid\","
                        "\"router_aux_loss_coef\":0.001,\"router_jitter_noise\":0.0,"
                        "\"layernorm_mlp_alpha\":3.5,\"hidden_act\":\"silu\"}",
                        &c));
    check_config(&c, 0, 80,
                 (struct moe_layer_spec){
                     .hidden = 6144,
                     .experts = 32,
                     .intermediate = 9216,
                     .router = ROUTER(.scale = 1, .top_k = 2, .renorm = MOE_RENORM_SUM),
                 });
}

static void minimax_m3(void **state)
{
    (void)state;
    struct moe_config c;
    assert_ok(read_text("{\"model_type\":\"minimax_m3_vl\",\"image_token_index\":200025,"
                        "\"vision_config\":{\"hidden_size\":32,\"hidden_act\":\"gelu\"},"
                        "\"text_config\":{\"hidden_size\":6144,\"intermediate_size\":3072,"
                        "\"dense_intermediate_size\":12288,\"shared_intermediate_size\":3072,"
                        "\"num_hidden_layers\":6,\"num_local_experts\":128,"
                        "\"num_experts_per_tok\":4,\"n_shared_experts\":1,"
                        "\"scoring_func\":\"sigmoid\",\"use_routing_bias\":true,"
                        "\"routed_scaling_factor\":2.0,\"moe_layer_freq\":[0,0,0,1,1,1],"
                        "\"hidden_act\":\"swigluoai\",\"swiglu_alpha\":1.702,\"swiglu_limit\":7.0,"
                        "\"attention_output_gate\":false}}",
                        &c));
    check_config(&c, 3, 3,
                 (struct moe_layer_spec){
                     .hidden = 6144,
                     .experts = 128,
                     .intermediate = 3072,
                     .router = ROUTER(.score = MOE_SCORE_SIGMOID, .top_k = 4, .select_bias = true,
                                      .renorm = MOE_RENORM_SUM, .scale = 2.0f),
                     .activation = MOE_ACT_SWIGLU_OAI,
                     .swiglu_limit = 7.0f,
                     .swiglu_alpha = 1.702f,
                     .shared_intermediate = 3072,
                     .shared_activation = MOE_ACT_SWIGLU_OAI,
                 });
}

static void qwen3_vl_moe(void **state)
{
    (void)state;
    struct moe_config c;
    assert_ok(read_text("{\"model_type\":\"qwen3_vl_moe\",\"tie_word_embeddings\":false,"
                        "\"vision_config\":{\"hidden_act\":\"gelu_pytorch_tanh\"},"
                        "\"text_config\":{\"model_type\":\"qwen3_vl_moe_text\","
                        "\"hidden_size\":2048,\"intermediate_size\":6144,"
                        "\"moe_intermediate_size\":768,\"num_hidden_layers\":48,"
                        "\"num_experts\":128,\"num_experts_per_tok\":8,\"norm_topk_prob\":true,"
                        "\"decoder_sparse_step\":1,\"mlp_only_layers\":[],"
                        "\"hidden_act\":\"silu\"}}",
                        &c));
    assert_string_equal(c.model_type, "qwen3_vl_moe");
    check_config(&c, 0, 48,
                 (struct moe_layer_spec){
                     .hidden = 2048,
                     .experts = 128,
                     .intermediate = 768,
                     .router = ROUTER(.scale = 1, .top_k = 8, .renorm = MOE_RENORM_SUM),
                 });
}

static void qwen3_5_moe(void **state)
{
    (void)state;
    struct moe_config c;
    assert_ok(read_text("{\"model_type\":\"qwen3_5_moe\",\"text_config\":{"
                        "\"model_type\":\"qwen3_5_moe_text\",\"hidden_size\":2048,"
                        "\"moe_intermediate_size\":512,\"shared_expert_intermediate_size\":512,"
                        "\"num_hidden_layers\":40,\"num_experts\":256,\"num_experts_per_tok\":8,"
                        "\"attn_output_gate\":true,\"mtp_num_hidden_layers\":1,"
                        "\"router_aux_loss_coef\":0.001,\"hidden_act\":\"silu\"}}",
                        &c));
    check_config(&c, 0, 40,
                 (struct moe_layer_spec){
                     .hidden = 2048,
                     .experts = 256,
                     .intermediate = 512,
                     .router = ROUTER(.scale = 1, .top_k = 8, .renorm = MOE_RENORM_SUM),
                     .shared_intermediate = 512,
                     .shared_gated = true,
                 });
}

static void longcat_flash(void **state)
{
    (void)state;
    struct moe_config c;
    assert_ok(read_text("{\"model_type\":\"longcat_flash\",\"hidden_size\":6144,"
                        "\"ffn_hidden_size\":12288,\"expert_ffn_hidden_size\":2048,"
                        "\"num_layers\":28,\"num_hidden_layers\":56,\"n_routed_experts\":512,"
                        "\"zero_expert_num\":256,\"zero_expert_type\":\"identity\","
                        "\"moe_topk\":12,\"routed_scaling_factor\":6.0,\"router_bias\":false,"
                        "\"mla_scale_q_lora\":true,\"mla_scale_kv_lora\":true}",
                        &c));
    check_config(
        &c, 0, 28,
        (struct moe_layer_spec){
            .hidden = 6144,
            .experts = 512,
            .intermediate = 2048,
            .router = ROUTER(.top_k = 12, .select_bias = true, .scale = 6.0f, .zero_experts = 256),
        });
}

static void llama4_maverick(void **state)
{
    (void)state;
    struct moe_config c;
    assert_ok(
        read_text("{\"model_type\":\"llama4\",\"text_config\":{\"model_type\":\"llama4_text\","
                  "\"hidden_size\":5120,\"intermediate_size\":8192,"
                  "\"intermediate_size_mlp\":16384,\"num_hidden_layers\":4,"
                  "\"num_local_experts\":128,\"num_experts_per_tok\":1,"
                  "\"interleave_moe_layer_step\":2,\"moe_layers\":null,\"attn_scale\":0.1,"
                  "\"floor_scale\":8192,\"for_llm_compressor\":false,"
                  "\"hidden_act\":\"silu\"}}",
                  &c));
    assert_int_equal(c.layer_count, 2);
    assert_int_equal(c.layers[0].layer, 1);
    assert_int_equal(c.layers[1].layer, 3);
    assert_int_equal(c.layers[0].shared_intermediate, 8192);
    assert_int_equal(c.layers[0].weighting, MOE_WEIGHT_INPUT);
}

#define DEEPSEEK_V4(extra)                                                                         \
    "{\"model_type\":\"deepseek_v4\",\"hidden_size\":4096,\"moe_intermediate_size\":2048,"         \
    "\"num_hidden_layers\":3,\"n_routed_experts\":256,\"n_shared_experts\":1,"                     \
    "\"num_experts_per_tok\":6,\"scoring_func\":\"sqrtsoftplus\",\"norm_topk_prob\":true,"         \
    "\"routed_scaling_factor\":1.5,\"swiglu_limit\":10.0,\"o_groups\":8,\"index_topk\":512,"       \
    "\"hidden_act\":\"silu\",\"vocab_size\":129280" extra "}"

static void deepseek_v4_without_hash_layers(void **state)
{
    (void)state;
    struct moe_config c;
    struct moe_layer_spec want = {
        .hidden = 4096,
        .experts = 256,
        .intermediate = 2048,
        .router = ROUTER(.score = MOE_SCORE_SQRTSOFTPLUS, .top_k = 6, .select_bias = true,
                         .renorm = MOE_RENORM_SUM, .renorm_eps = 1e-20f, .scale = 1.5f),
        .activation = MOE_ACT_SWIGLU_CLAMPED,
        .swiglu_limit = 10.0f,
        .shared_intermediate = 2048,
        .shared_activation = MOE_ACT_SWIGLU_CLAMPED,
    };
    assert_ok(read_text(DEEPSEEK_V4(",\"num_hash_layers\":0"), &c));
    check_config(&c, 0, 3, want);
    assert_ok(read_text(DEEPSEEK_V4(",\"mlp_layer_types\":[\"moe\",\"moe\",\"moe\"]"), &c));
    check_config(&c, 0, 3, want);
}

/* Which of the three layers route by token id; these have no selection bias. */
static void check_hash_layers(const char *text, const char *wanted)
{
    struct moe_config c;
    assert_ok(read_text(text, &c));
    assert_int_equal(c.layer_count, strlen(wanted));
    for (size_t l = 0; l < c.layer_count; l++) {
        const struct moe_router_spec *r = &c.layers[l].router;
        assert_int_equal(c.layers[l].layer, l);
        assert_int_equal(r->by_token, wanted[l] == 'h');
        assert_int_equal(r->vocabulary, wanted[l] == 'h' ? 129280 : 0);
        assert_int_equal(r->select_bias, wanted[l] != 'h');
        assert_int_equal(r->top_k, 6);
        assert_int_equal(r->renorm, MOE_RENORM_SUM);
    }
}

static void deepseek_v4_has_layers_that_route_by_token_id(void **state)
{
    (void)state;
    check_hash_layers(DEEPSEEK_V4(""), "hhh"); /* the class says three */
    check_hash_layers(DEEPSEEK_V4(",\"num_hash_layers\":1"), "hmm");
    check_hash_layers(DEEPSEEK_V4(",\"num_hash_layers\":9"), "hhh");
    check_hash_layers(DEEPSEEK_V4(",\"mlp_layer_types\":[\"hash_moe\",\"moe\",\"moe\"]"), "hmm");
    check_hash_layers(DEEPSEEK_V4(",\"num_hash_layers\":2,"
                                  "\"mlp_layer_types\":[\"hash_moe\",\"moe\",\"hash_moe\"]"),
                      "hmh");
    struct moe_config c;
    check_reason(read_text(DEEPSEEK_V4(",\"num_hash_layers\":1,"
                                       "\"mlp_layer_types\":[\"moe\",\"moe\",\"moe\"]"),
                           &c),
                 MOE_REASON_CONFIG_INVALID);
    check_reason(read_text(DEEPSEEK_V4(",\"mlp_layer_types\":[\"hash\",\"moe\",\"moe\"]"), &c),
                 MOE_REASON_CONFIG_UNKNOWN_KEY);
}

/* No other family has them. */
static void hash_layers_elsewhere_are_refused(void **state)
{
    (void)state;
    struct moe_config c;
    json_t *root = golden("deepseek_v3");
    json_object_set_new(root, "num_hash_layers", json_integer(1));
    check_reason(moe_config_read(root, &c), MOE_REASON_CONFIG_UNKNOWN_KEY);
    json_object_set_new(root, "num_hash_layers", json_integer(0));
    assert_ok(moe_config_read(root, &c));
    json_object_set_new(root, "mlp_layer_types", json_pack("[s, s]", "hash_moe", "sparse"));
    check_reason(moe_config_read(root, &c), MOE_REASON_CONFIG_UNKNOWN_KEY);
    json_decref(root);
}

static void ernie_biases_are_taken_unless_shared_experts_would_have_them(void **state)
{
    (void)state;
    struct moe_config c;
    json_t *root = golden("ernie4_5_moe");
    json_object_set_new(root, "use_bias", json_true());
    check_reason(moe_config_read(root, &c), MOE_REASON_CONFIG_UNKNOWN_KEY);
    json_object_set_new(root, "moe_num_shared_experts", json_integer(0));
    assert_ok(moe_config_read(root, &c));
    assert_true(c.layers[0].gate_up_bias && c.layers[0].down_bias);
    json_decref(root);
}

static void a_text_model_is_found_behind_an_unknown_outer_type(void **state)
{
    (void)state;
    struct moe_config c;
    json_t *inner = golden("qwen3_moe");
    json_t *root = json_pack("{s:s, s:o}", "model_type", "some_vision_model", "text_config", inner);
    assert_ok(moe_config_read(root, &c));
    assert_string_equal(c.model_type, "qwen3_moe");
    assert_int_equal(c.layers[0].experts, 16);
    json_decref(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mixtral),
        cmocka_unit_test(qwen2_moe),
        cmocka_unit_test(qwen3_moe),
        cmocka_unit_test(qwen3_next),
        cmocka_unit_test(olmoe),
        cmocka_unit_test(deepseek_v2),
        cmocka_unit_test(deepseek_v3),
        cmocka_unit_test(glm4_moe),
        cmocka_unit_test(gpt_oss),
        cmocka_unit_test(llama4),
        cmocka_unit_test(minimax_m2),
        cmocka_unit_test(ernie4_5_moe),
        cmocka_unit_test(small_golden_models),
        cmocka_unit_test(sparse_mixer_reads_its_jitter_and_chooses_two),
        cmocka_unit_test(an_unknown_model_type_is_refused_by_name),
        cmocka_unit_test(hunyuan_a13b_has_lists_of_equal_numbers),
        cmocka_unit_test(ling_has_keys_of_its_own),
        cmocka_unit_test(ling_1_is_refused),
        cmocka_unit_test(mimo_v2_flash),
        cmocka_unit_test(deepseek_v2_keeps_the_best_groups_by_their_maximum),
        cmocka_unit_test(deepseek_v2_scales_only_what_it_does_not_renormalise),
        cmocka_unit_test(kimi_k2),
        cmocka_unit_test(minimax_text_01),
        cmocka_unit_test(minimax_m3),
        cmocka_unit_test(qwen3_vl_moe),
        cmocka_unit_test(qwen3_5_moe),
        cmocka_unit_test(longcat_flash),
        cmocka_unit_test(llama4_maverick),
        cmocka_unit_test(deepseek_v4_without_hash_layers),
        cmocka_unit_test(deepseek_v4_has_layers_that_route_by_token_id),
        cmocka_unit_test(hash_layers_elsewhere_are_refused),
        cmocka_unit_test(ernie_biases_are_taken_unless_shared_experts_would_have_them),
        cmocka_unit_test(a_text_model_is_found_behind_an_unknown_outer_type),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
