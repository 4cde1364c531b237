/* config.json becomes the layer spec that the published code of each family computes, and settings
 * that nobody understood are refused by name. The expected values are written out by hand from the
 * configurations and the families' own code. */
#include "model/config.h"
#include "model/json_file.h"
#include "model_fixture.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static struct moe_status read_text(const char *text, struct moe_config *out)
{
    json_t *root = NULL;
    assert_ok(moe_json_parse(text, strlen(text), "config.json", &root));
    struct moe_status st = moe_config_read(root, out);
    json_decref(root);
    return st;
}

static json_t *golden(const char *family)
{
    char path[512];
    snprintf(path, sizeof path, MOE_GOLDEN_DIR "/%s", family);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(fd >= 0);
    json_t *root = NULL;
    assert_ok(moe_json_read_at(fd, "config.json", 1 << 20, &root));
    close(fd);
    return root;
}

#define SAME_INT(field)                                                                            \
    if (got->field != want->field)                                                                 \
    fail_msg(#field " is %ld, not %ld", (long)got->field, (long)want->field)
#define SAME_FLOAT(field)                                                                          \
    if (got->field != want->field)                                                                 \
    fail_msg(#field " is %.9g, not %.9g", (double)got->field, (double)want->field)

static void check_spec(const struct moe_layer_spec *got, const struct moe_layer_spec *want)
{
    SAME_INT(layer);
    SAME_INT(hidden);
    SAME_INT(experts);
    SAME_INT(intermediate);
    SAME_INT(router.score);
    SAME_INT(router.top_k);
    SAME_INT(router.logit_bias);
    SAME_INT(router.select_bias);
    SAME_INT(router.groups);
    SAME_INT(router.topk_group);
    SAME_INT(router.group_best);
    SAME_INT(router.renorm);
    SAME_FLOAT(router.renorm_eps);
    SAME_FLOAT(router.scale);
    SAME_INT(router.zero_experts);
    SAME_INT(weighting);
    SAME_INT(activation);
    SAME_FLOAT(swiglu_limit);
    SAME_FLOAT(swiglu_alpha);
    SAME_INT(gate_up_bias);
    SAME_INT(down_bias);
    SAME_INT(shared_intermediate);
    SAME_INT(shared_gated);
    SAME_INT(shared_activation);
}

/* Layers `first`, first + 1, ... `count` of them, all like `want`. */
static void check_config(const struct moe_config *c, uint32_t first, size_t count,
                         struct moe_layer_spec want)
{
    assert_int_equal(c->layer_count, count);
    for (size_t i = 0; i < count; i++) {
        want.layer = first + (uint32_t)i;
        check_spec(&c->layers[i], &want);
    }
}

static void check_golden(const char *family, uint32_t first, size_t count,
                         struct moe_layer_spec want)
{
    struct moe_config c;
    json_t *root = golden(family);
    assert_ok(moe_config_read(root, &c));
    assert_string_equal(c.model_type, json_string_value(json_object_get(root, "model_type")));
    check_config(&c, first, count, want);
    json_decref(root);
}

/* What most families have in common: no groups. */
#define ROUTER(...)                                                                                \
    {                                                                                              \
        .groups = 1, .topk_group = 1, .group_best = 1, __VA_ARGS__                                 \
    }

/* ---- the twelve golden models ---- */

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
    "\"hidden_act\":\"silu\"" extra "}"

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
        .shared_activation = MOE_ACT_SWIGLU,
    };
    assert_ok(read_text(DEEPSEEK_V4(",\"num_hash_layers\":0"), &c));
    check_config(&c, 0, 3, want);
    assert_ok(read_text(DEEPSEEK_V4(",\"mlp_layer_types\":[\"moe\",\"moe\",\"moe\"]"), &c));
    check_config(&c, 0, 3, want);
}

static void deepseek_v4_refuses_hash_layers(void **state)
{
    (void)state;
    static const char *const texts[] = {
        DEEPSEEK_V4(""), DEEPSEEK_V4(",\"num_hash_layers\":3"),
        DEEPSEEK_V4(",\"mlp_layer_types\":[\"hash_moe\",\"moe\",\"moe\"]")};
    struct moe_config c;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        check_reason(read_text(texts[i], &c), MOE_REASON_CONFIG_UNKNOWN_KEY);
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
        {"mixtral", "{\"quantization_config\":{\"quant_method\":\"fp8\"}}", "fp8"},
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
        {"gpt_oss", "{\"quantization_config\":{\"quant_method\":\"mxfp4\"}}", "mxfp4"},
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
        {"mixtral", "{\"num_local_experts\":513}", "num_local_experts"},
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
static void absent_settings_mean_what_the_familys_class_says(void **state)
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
        cmocka_unit_test(deepseek_v4_refuses_hash_layers),
        cmocka_unit_test(ernie_biases_are_taken_unless_shared_experts_would_have_them),
        cmocka_unit_test(a_text_model_is_found_behind_an_unknown_outer_type),
        cmocka_unit_test(moe_layers_follow_each_familys_rule),
        cmocka_unit_test(settings_that_are_not_understood_are_refused_by_name),
        cmocka_unit_test(impossible_values_are_refused_by_name),
        cmocka_unit_test(settings_without_effect_are_accepted),
        cmocka_unit_test(the_number_of_shared_experts_must_be_written_down),
        cmocka_unit_test(absent_settings_mean_what_the_familys_class_says),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
