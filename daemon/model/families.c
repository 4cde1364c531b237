/* SPDX-License-Identifier: Apache-2.0 */
/* The table of model families. A new family with known parts needs no other code than a row here;
 * CONTRIBUTING.md lists its tests and pages. */
#include "model/families.h"

#include <string.h>

#define QWEN_EXPERTS(block)                                                                        \
    [MOE_WEIGHT_GATE] = block ".experts.*.gate_proj.weight",                                       \
    [MOE_WEIGHT_UP] = block ".experts.*.up_proj.weight",                                           \
    [MOE_WEIGHT_DOWN] = block ".experts.*.down_proj.weight",                                       \
    [MOE_WEIGHT_GATE_BIAS] = block ".experts.*.gate_proj.bias",                                    \
    [MOE_WEIGHT_UP_BIAS] = block ".experts.*.up_proj.bias",                                        \
    [MOE_WEIGHT_DOWN_BIAS] = block ".experts.*.down_proj.bias"

#define MIXTRAL_EXPERTS(block)                                                                     \
    [MOE_WEIGHT_GATE] = block ".experts.*.w1.weight",                                              \
    [MOE_WEIGHT_UP] = block ".experts.*.w3.weight",                                                \
    [MOE_WEIGHT_DOWN] = block ".experts.*.w2.weight"

#define SHARED_EXPERT(name)                                                                        \
    [MOE_WEIGHT_SHARED_GATE] = name ".gate_proj.weight",                                           \
    [MOE_WEIGHT_SHARED_UP] = name ".up_proj.weight",                                               \
    [MOE_WEIGHT_SHARED_DOWN] = name ".down_proj.weight"

static const struct moe_naming mixtral_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "block_sparse_moe.gate.weight",
           [MOE_WEIGHT_SELECT_BIAS] = "block_sparse_moe.e_score_correction_bias",
           MIXTRAL_EXPERTS("block_sparse_moe"),
           SHARED_EXPERT("block_sparse_moe.shared_experts")},
    .block = "block_sparse_moe"};

static const struct moe_naming qwen_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "mlp.gate.weight",
           QWEN_EXPERTS("mlp"),
           SHARED_EXPERT("mlp.shared_expert"),
           [MOE_WEIGHT_SHARED_GATE_VECTOR] = "mlp.shared_expert_gate.weight"},
    .block = "mlp"};

static const struct moe_naming deepseek_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "mlp.gate.weight",
           [MOE_WEIGHT_SELECT_BIAS] = "mlp.gate.e_score_correction_bias",
           QWEN_EXPERTS("mlp"),
           SHARED_EXPERT("mlp.shared_experts")},
    .block = "mlp"};

static const struct moe_naming bailing_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "mlp.gate.weight",
           [MOE_WEIGHT_SELECT_BIAS] = "mlp.gate.expert_bias",
           QWEN_EXPERTS("mlp"),
           SHARED_EXPERT("mlp.shared_experts")},
    .block = "mlp"};

static const struct moe_naming deepseek_v4_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "ffn.gate.weight",
           [MOE_WEIGHT_SELECT_BIAS] = "ffn.gate.bias",
           MIXTRAL_EXPERTS("ffn"),
           [MOE_WEIGHT_SHARED_GATE] = "ffn.shared_experts.w1.weight",
           [MOE_WEIGHT_SHARED_UP] = "ffn.shared_experts.w3.weight",
           [MOE_WEIGHT_SHARED_DOWN] = "ffn.shared_experts.w2.weight"},
    .block = "ffn",
    .token_table = "ffn.gate.tid2eid"};

static const struct moe_naming ernie_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "mlp.gate.weight",
           [MOE_WEIGHT_SELECT_BIAS] = "mlp.moe_statics.e_score_correction_bias",
           QWEN_EXPERTS("mlp"),
           SHARED_EXPERT("mlp.shared_experts")},
    .block = "mlp"};

static const struct moe_naming longcat_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "mlp.router.classifier.weight",
           [MOE_WEIGHT_SELECT_BIAS] = "mlp.router.e_score_correction_bias",
           QWEN_EXPERTS("mlp")},
    .block = "mlp"};

/* The block's tensors have no prefix in common. So of those that nothing reads, only experts' are
 * refused. */
static const struct moe_naming mistral_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "gate.weight",
           [MOE_WEIGHT_GATE] = "experts.*.w1.weight",
           [MOE_WEIGHT_UP] = "experts.*.w3.weight",
           [MOE_WEIGHT_DOWN] = "experts.*.w2.weight",
           [MOE_WEIGHT_SHARED_GATE] = "shared_experts.w1.weight",
           [MOE_WEIGHT_SHARED_UP] = "shared_experts.w3.weight",
           [MOE_WEIGHT_SHARED_DOWN] = "shared_experts.w2.weight"},
    .block = "experts"};

static const struct moe_naming hunyuan_names = {.of = {[MOE_WEIGHT_ROUTER] = "mlp.gate.wg.weight",
                                                       QWEN_EXPERTS("mlp"),
                                                       SHARED_EXPERT("mlp.shared_mlp")},
                                                .block = "mlp"};

static const struct moe_naming lfm2_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "feed_forward.gate.weight",
           [MOE_WEIGHT_SELECT_BIAS] = "feed_forward.expert_bias",
           MIXTRAL_EXPERTS("feed_forward")},
    .block = "feed_forward"};

static const struct moe_naming jamba_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "feed_forward.router.weight", QWEN_EXPERTS("feed_forward")},
    .block = "feed_forward"};

static const struct moe_naming kimi_linear_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "block_sparse_moe.gate.weight",
           [MOE_WEIGHT_SELECT_BIAS] = "block_sparse_moe.gate.e_score_correction_bias",
           MIXTRAL_EXPERTS("block_sparse_moe"),
           SHARED_EXPERT("block_sparse_moe.shared_experts"),
           [MOE_WEIGHT_TO_LATENT] = "block_sparse_moe.routed_expert_down_proj.weight",
           [MOE_WEIGHT_FROM_LATENT] = "block_sparse_moe.routed_expert_up_proj.weight",
           [MOE_WEIGHT_LATENT_NORM] = "block_sparse_moe.routed_expert_norm.weight"},
    .block = "block_sparse_moe"};

/* Its experts have no gate. */
static const struct moe_naming nemotron_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "mixer.gate.weight",
           [MOE_WEIGHT_SELECT_BIAS] = "mixer.gate.e_score_correction_bias",
           [MOE_WEIGHT_UP] = "mixer.experts.*.up_proj.weight",
           [MOE_WEIGHT_DOWN] = "mixer.experts.*.down_proj.weight",
           [MOE_WEIGHT_SHARED_UP] = "mixer.shared_experts.up_proj.weight",
           [MOE_WEIGHT_SHARED_DOWN] = "mixer.shared_experts.down_proj.weight",
           [MOE_WEIGHT_TO_LATENT] = "mixer.fc1_latent_proj.weight",
           [MOE_WEIGHT_FROM_LATENT] = "mixer.fc2_latent_proj.weight"},
    .block = "mixer"};

static const struct moe_naming granite_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "block_sparse_moe.router.layer.weight"},
    .block = "block_sparse_moe",
    .fused_gate_up = "block_sparse_moe.input_linear.weight",
    .fused_down = "block_sparse_moe.output_linear.weight"};

static const struct moe_naming gpt_oss_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "mlp.router.weight", [MOE_WEIGHT_LOGIT_BIAS] = "mlp.router.bias"},
    .block = "mlp"};

static const struct moe_naming llama4_names = {
    .of = {[MOE_WEIGHT_ROUTER] = "feed_forward.router.weight",
           SHARED_EXPERT("feed_forward.shared_expert")},
    .block = "feed_forward"};

/* clang-format off */
static const struct moe_family families[] = {
    {
        .model_types = "mixtral",
        .naming = &mixtral_names, .layers = MOE_LAYERS_ALL,
        .layer_count_key = "num_hidden_layers", .inner_key = "intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .renorm = MOE_FAMILY_RENORM_ALWAYS,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
    },
    {
        /* input_jitter_noise is for training. */
        .model_types = "phimoe",
        .naming = &mixtral_names, .layers = MOE_LAYERS_ALL,
        .layer_count_key = "num_hidden_layers", .inner_key = "intermediate_size",
        .score = MOE_SCORE_SPARSEMIXER, .renorm = MOE_FAMILY_RENORM_NEVER,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
    },
    {
        .model_types = "minimax minimax_text_01",
        .naming = &mixtral_names, .layers = MOE_LAYERS_ALL,
        .layer_count_key = "num_hidden_layers", .inner_key = "intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .renorm = MOE_FAMILY_RENORM_ALWAYS,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .ignored = "shared_moe_mode",
    },
    {
        .model_types = "minimax_m2",
        .naming = &mixtral_names, .layers = MOE_LAYERS_ALL,
        .layer_count_key = "num_hidden_layers", .inner_key = "intermediate_size",
        .score = MOE_SCORE_SIGMOID, .scores = "sigmoid",
        .select_bias = true, .select_bias_key = "use_routing_bias",
        .renorm = MOE_FAMILY_RENORM_ALWAYS,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .ignored = "shared_moe_mode",
    },
    {
        /* transformers writes hidden_act silu, and computes this activation all the same. */
        .model_types = "minimax_m3 minimax_m3_text minimax_m3_vl minimax_m3_vl_text",
        .naming = &mixtral_names, .layers = MOE_LAYERS_FIRST_DENSE,
        .layer_count_key = "num_hidden_layers", .inner_key = "intermediate_size",
        .score = MOE_SCORE_SIGMOID, .scores = "sigmoid",
        .select_bias = true, .select_bias_key = "use_routing_bias",
        .renorm = MOE_FAMILY_RENORM_ALWAYS, .scaled = true,
        .activation = MOE_ACT_SWIGLU_OAI, .hidden_act = "swigluoai silu",
        .limit = 7.0f, .alpha = 1.702f,
        .shared = MOE_SHARED_COUNT_WIDTH, .shared_count_key = "n_shared_experts",
    },
    {
        .model_types = "qwen2_moe",
        .naming = &qwen_names, .layers = MOE_LAYERS_SPARSE_STEP,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .renorm = MOE_FAMILY_RENORM_KEY_FALSE,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .shared = MOE_SHARED_WIDTH, .shared_gated = true,
    },
    {
        .model_types = "qwen3_moe",
        .naming = &qwen_names, .layers = MOE_LAYERS_SPARSE_STEP,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .renorm = MOE_FAMILY_RENORM_KEY_FALSE,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
    },
    {
        .model_types = "qwen3_vl_moe qwen3_vl_moe_text qwen3_omni_moe qwen3_omni_moe_thinker "
                       "qwen3_omni_moe_text",
        .naming = &qwen_names, .layers = MOE_LAYERS_SPARSE_STEP,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .renorm = MOE_FAMILY_RENORM_ALWAYS,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
    },
    {
        .model_types = "qwen3_next",
        .naming = &qwen_names, .layers = MOE_LAYERS_SPARSE_STEP,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .renorm = MOE_FAMILY_RENORM_KEY_TRUE,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .shared = MOE_SHARED_WIDTH, .shared_gated = true,
    },
    {
        .model_types = "qwen3_5_moe qwen3_5_moe_text",
        .naming = &qwen_names, .layers = MOE_LAYERS_SPARSE_STEP,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .renorm = MOE_FAMILY_RENORM_ALWAYS,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .shared = MOE_SHARED_WIDTH, .shared_gated = true,
    },
    {
        .model_types = "olmoe",
        .naming = &qwen_names, .layers = MOE_LAYERS_ALL,
        .layer_count_key = "num_hidden_layers", .inner_key = "intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .renorm = MOE_FAMILY_RENORM_KEY_FALSE,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
    },
    {
        /* DeepSeek's own code renormalises or scales, never both. */
        .model_types = "deepseek_v2",
        .naming = &deepseek_names, .layers = MOE_LAYERS_FIRST_DENSE,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .scores = "softmax",
        .methods = "greedy group_limited_greedy", .group_best = 1, .grouped_by_method = true,
        .renorm = MOE_FAMILY_RENORM_KEY_FALSE, .renorm_eps = 1e-20f,
        .scaled = true, .scale_xor_renorm = true,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .shared = MOE_SHARED_COUNT, .shared_count_key = "n_shared_experts",
    },
    {
        .model_types = "deepseek_v3 deepseek_v32 kimi_k2 glm_moe_dsa",
        .naming = &deepseek_names, .layers = MOE_LAYERS_FIRST_DENSE,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SIGMOID, .scores = "sigmoid", .methods = "noaux_tc",
        .select_bias = true, .group_best = 2,
        .renorm = MOE_FAMILY_RENORM_KEY_TRUE, .renorm_eps = 1e-20f, .scaled = true,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .shared = MOE_SHARED_COUNT, .shared_count_key = "n_shared_experts",
        .first_dense = 3,
    },
    {
        .model_types = "glm4_moe glm4_moe_lite",
        .naming = &deepseek_names, .layers = MOE_LAYERS_FIRST_DENSE,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SIGMOID, .scores = "sigmoid", .methods = "noaux_tc",
        .select_bias = true, .group_best = 2, .one_group = true,
        .renorm = MOE_FAMILY_RENORM_KEY_TRUE, .renorm_eps = 1e-20f, .scaled = true,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .shared = MOE_SHARED_COUNT, .shared_count_key = "n_shared_experts",
        .first_dense = 1,
    },
    {
        .model_types = "dots1",
        .naming = &deepseek_names, .layers = MOE_LAYERS_FIRST_DENSE,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SIGMOID, .scores = "sigmoid", .methods = "noaux_tc",
        .select_bias = true, .group_best = 2, .one_group = true,
        .renorm = MOE_FAMILY_RENORM_KEY_FALSE, .renorm_eps = 1e-20f, .scaled = true,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .shared = MOE_SHARED_COUNT, .shared_count_key = "n_shared_experts",
    },
    {
        .model_types = "bailing_hybrid bailing_moe bailing_moe_v2",
        .naming = &bailing_names, .layers = MOE_LAYERS_FIRST_DENSE,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SIGMOID, .scores = "sigmoid", .methods = "noaux_tc",
        .select_bias = true, .group_best = 2,
        .renorm = MOE_FAMILY_RENORM_KEY_TRUE, .renorm_eps = 1e-20f, .scaled = true,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .shared = MOE_SHARED_COUNT, .shared_count_key = "n_shared_experts num_shared_experts",
        .select_bias_key = "moe_router_enable_expert_bias", .first_dense = 2,
        .ignored = "kda_safe_gate layer_group_size group_norm_size mtp_loss_scaling_factor "
                   "gated_attention_proj_granularity_type",
    },
    {
        /* Kimi-K3 is a kimi_linear model with a latent space and SiTU. */
        .model_types = "kimi_linear kimi_k3",
        .naming = &kimi_linear_names, .layers = MOE_LAYERS_FIRST_DENSE,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SIGMOID, .scores = "sigmoid", .methods = "noaux_tc",
        .select_bias = true, .group_best = 2, .one_group = true,
        .renorm = MOE_FAMILY_RENORM_KEY_TRUE, .renorm_eps = 1e-20f, .scaled = true,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu swish situ",
        .shared = MOE_SHARED_COUNT, .shared_count_key = "n_shared_experts num_shared_experts",
        .first_dense = 1,
        .ignored = "use_grouped_topk mla_use_output_gate",
    },
    {
        .model_types = "mimo_v2_flash",
        .naming = &deepseek_names, .layers = MOE_LAYERS_FIRST_DENSE,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SIGMOID, .scores = "sigmoid", .methods = "noaux_tc",
        .select_bias = true, .group_best = 2, .one_group = true,
        .renorm = MOE_FAMILY_RENORM_KEY_TRUE, .renorm_eps = 1e-20f, .scaled = true,
        .null_scale = true,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .first_dense = 1,
        .ignored = "attention_value_scale",
    },
    {
        .model_types = "mistral4",
        .naming = &deepseek_names, .layers = MOE_LAYERS_FIRST_DENSE,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .group_best = 2, .one_group = true,
        .renorm = MOE_FAMILY_RENORM_KEY_TRUE, .renorm_eps = 1e-20f, .scaled = true,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .shared = MOE_SHARED_COUNT, .shared_count_key = "n_shared_experts",
    },
    {
        .model_types = "mistral_large4 mistral_large4_text",
        .naming = &mistral_names, .layers = MOE_LAYERS_FIRST_DENSE,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .group_best = 2, .one_group = true,
        .renorm = MOE_FAMILY_RENORM_ALWAYS, .renorm_eps = 1e-20f, .scaled = true,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .shared = MOE_SHARED_COUNT, .shared_count_key = "n_shared_experts",
        .first_dense = 1,
    },
    {
        .model_types = "lfm2_moe",
        .naming = &lfm2_names, .layers = MOE_LAYERS_FIRST_DENSE,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SIGMOID,
        .select_bias = true, .select_bias_key = "use_expert_bias",
        .renorm = MOE_FAMILY_RENORM_KEY_TRUE, .renorm_eps = 1e-6f, .scaled = true,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .first_dense = 2,
    },
    {
        .model_types = "hunyuan_v1_moe",
        .naming = &hunyuan_names, .layers = MOE_LAYERS_FIRST_DENSE,
        .layer_count_key = "num_hidden_layers",
        .inner_key = "moe_intermediate_size intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .renorm = MOE_FAMILY_RENORM_ALWAYS,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .shared = MOE_SHARED_COUNT_ONE, .shared_count_key = "num_shared_expert",
        .layer_lists = true, .ignored = "capacity_factor",
    },
    {
        .model_types = "jamba",
        .naming = &jamba_names, .layers = MOE_LAYERS_PERIOD,
        .layer_count_key = "num_hidden_layers", .inner_key = "intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .renorm = MOE_FAMILY_RENORM_NEVER,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
    },
    {
        /* shared_mlp is not in the block: the caller computes it. */
        .model_types = "granitemoe granitemoeshared granitemoehybrid",
        .naming = &granite_names, .layers = MOE_LAYERS_ALL,
        .layer_count_key = "num_hidden_layers", .inner_key = "intermediate_size",
        .score = MOE_SCORE_SOFTMAX_TOPK, .renorm = MOE_FAMILY_RENORM_NEVER,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .ignored = "shared_intermediate_size mamba_n_groups time_step_limit",
    },
    {
        .model_types = "nemotron_h",
        .naming = &nemotron_names, .layers = MOE_LAYERS_BLOCKS,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SIGMOID, .select_bias = true, .group_best = 2, .one_group = true,
        .renorm = MOE_FAMILY_RENORM_KEY_TRUE, .renorm_eps = 1e-20f, .scaled = true,
        .activation = MOE_ACT_RELU2, .hidden_act = "relu2",
        .shared = MOE_SHARED_COUNT, .shared_count_key = "n_shared_experts",
        .ignored = "moe_shared_expert_overlap mamba_hidden_act n_groups time_step_limit "
                   "rescale_prenorm_residual",
    },
    {
        .model_types = "deepseek_v4",
        .naming = &deepseek_v4_names, .layers = MOE_LAYERS_FIRST_DENSE,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SQRTSOFTPLUS, .scores = "sqrtsoftplus softmax sigmoid",
        .methods = "noaux_tc", .select_bias = true,
        .renorm = MOE_FAMILY_RENORM_KEY_TRUE, .renorm_eps = 1e-20f, .scaled = true,
        .activation = MOE_ACT_SWIGLU_CLAMPED, .hidden_act = "silu", .limit = 10.0f,
        .shared = MOE_SHARED_COUNT, .shared_count_key = "n_shared_experts",
        .hash_layers = 3,
    },
    {
        .model_types = "gpt_oss",
        .naming = &gpt_oss_names, .layers = MOE_LAYERS_ALL,
        .layer_count_key = "num_hidden_layers", .inner_key = "intermediate_size",
        .score = MOE_SCORE_SOFTMAX_TOPK, .logit_bias = true, .renorm = MOE_FAMILY_RENORM_NEVER,
        .activation = MOE_ACT_SWIGLU_OAI, .hidden_act = "silu", .limit = 7.0f, .alpha = 1.702f,
        .biases = true, .interleaved = true,
    },
    {
        .model_types = "llama4_text llama4",
        .naming = &llama4_names, .layers = MOE_LAYERS_INTERLEAVED,
        .layer_count_key = "num_hidden_layers", .inner_key = "intermediate_size",
        .score = MOE_SCORE_SIGMOID, .renorm = MOE_FAMILY_RENORM_NEVER,
        .weighting = MOE_WEIGHT_INPUT,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
        .shared = MOE_SHARED_SAME, .input_first = true,
    },
    {
        .model_types = "ernie4_5_moe",
        .naming = &ernie_names, .layers = MOE_LAYERS_INTERVAL,
        .layer_count_key = "num_hidden_layers", .inner_key = "moe_intermediate_size",
        .score = MOE_SCORE_SOFTMAX, .select_bias = true, .renorm = MOE_FAMILY_RENORM_CLAMPED,
        .renorm_eps = 1e-12f,
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu", .biases_key = "use_bias",
        .shared = MOE_SHARED_COUNT, .shared_count_key = "moe_num_shared_experts",
        .ignored = "moe_capacity",
    },
    {
        .model_types = "longcat_flash",
        .naming = &longcat_names, .layers = MOE_LAYERS_ALL,
        .layer_count_key = "num_layers", .inner_key = "expert_ffn_hidden_size",
        .score = MOE_SCORE_SOFTMAX, .select_bias = true, .renorm = MOE_FAMILY_RENORM_NEVER,
        .scaled = true, .zero_experts = "zero_expert_num",
        .activation = MOE_ACT_SWIGLU, .hidden_act = "silu",
    },
};
/* clang-format on */

bool moe_word_in(const char *word, const char *words)
{
    size_t n = strlen(word);
    if (n == 0 || strchr(word, ' ') != NULL)
        return false;
    for (const char *at = words; (at = strstr(at, word)) != NULL; at += n)
        if ((at == words || at[-1] == ' ') && (at[n] == ' ' || at[n] == '\0'))
            return true;
    return false;
}

const struct moe_family *moe_family_find(const char *model_type)
{
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++)
        if (moe_word_in(model_type, families[i].model_types))
            return &families[i];
    return NULL;
}
