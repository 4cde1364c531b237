/* SPDX-License-Identifier: Apache-2.0 */
/* The model families: one row of data each, no code.
 *
 * A row lists the keys of config.json that a family reads, the defaults of its class for absent
 * keys, and its tensor names. Sources: the published configuration and modelling files of the
 * vendors and of Hugging Face transformers. Internal to daemon/model. */
#ifndef MOE_MODEL_FAMILIES_H
#define MOE_MODEL_FAMILIES_H

#include "moe/layer_spec.h"

/* Which layers are MoE layers. */
enum moe_layer_rule {
    MOE_LAYERS_ALL,
    MOE_LAYERS_FIRST_DENSE, /* first_k_dense_replace and its other names, moe_layer_freq or
                               mlp_layer_types */
    MOE_LAYERS_SPARSE_STEP, /* decoder_sparse_step and mlp_only_layers */
    MOE_LAYERS_INTERLEAVED, /* moe_layers or interleave_moe_layer_step */
    MOE_LAYERS_INTERVAL,    /* moe_layer_start_index, _end_index, _interval */
    MOE_LAYERS_PERIOD,      /* expert_layer_period, expert_layer_offset */
    MOE_LAYERS_BLOCKS, /* hybrid_override_pattern or layers_block_type, which also count them */
};

enum moe_family_renorm {
    MOE_FAMILY_RENORM_NEVER,
    MOE_FAMILY_RENORM_ALWAYS,
    MOE_FAMILY_RENORM_KEY_FALSE, /* norm_topk_prob; absent means false */
    MOE_FAMILY_RENORM_KEY_TRUE,  /* norm_topk_prob; absent means true */
    MOE_FAMILY_RENORM_CLAMPED,   /* sum not below moe_norm_min; absent means 1e-12 */
};

enum moe_family_shared {
    MOE_SHARED_NONE,
    MOE_SHARED_COUNT,       /* n_shared_experts experts, as wide as the routed ones or
                               moe_shared_expert_intermediate_size */
    MOE_SHARED_WIDTH,       /* one, shared_expert_intermediate_size wide */
    MOE_SHARED_COUNT_ONE,   /* the same; without the key it is one */
    MOE_SHARED_COUNT_WIDTH, /* n_shared_experts of shared_intermediate_size; without it one */
    MOE_SHARED_SAME,        /* one, as wide as a routed expert */
};

/* Tensor names, behind "{prefix}{layer}."; '*' stands for the expert. NULL: no such tensor. */
struct moe_naming {
    const char *of[MOE_WEIGHT_COUNT];
    const char *block;                      /* common prefix */
    const char *fused_gate_up, *fused_down; /* NULL: "{block}.experts.gate_up_proj", "down_proj" */
    const char *token_table;                /* experts by token id. NULL: no such tensor */
};

struct moe_family {
    const char *model_types; /* separated by spaces; the first is the canonical one */
    const struct moe_naming *naming;
    enum moe_layer_rule layers;
    const char *layer_count_key;
    const char *inner_key; /* I of a routed expert; several names, separated by spaces */

    enum moe_score score;
    const char *scores;  /* scoring_func values that are accepted, or NULL: no such key */
    const char *methods; /* topk_method values that are accepted, or NULL: no such key */
    bool logit_bias;
    bool select_bias;
    const char *select_bias_key; /* boolean that can turn select_bias off, or NULL */
    uint32_t group_best;         /* 0: the family has no groups */
    bool one_group;              /* absent n_group and topk_group mean 1 */
    bool grouped_by_method;      /* groups count only with topk_method group_limited_greedy */
    enum moe_family_renorm renorm;
    float renorm_eps;
    bool scaled;              /* routed_scaling_factor, which must be present */
    bool null_scale;          /* null there means 1 */
    bool scale_xor_renorm;    /* the scale is applied only where nothing is renormalised */
    const char *zero_experts; /* key of Z, or NULL */

    enum moe_weighting weighting;
    enum moe_activation activation;
    const char *hidden_act; /* the accepted values; the first is the default. `situ` is SiTU with
                               activation_situ_beta and _linear_beta, whatever `activation` says */
    float limit, alpha;     /* defaults of swiglu_limit and swiglu_alpha; 0: no key */
    bool biases;            /* gate_up and down biases always exist */
    const char *biases_key; /* boolean key for their existence, or NULL */
    bool interleaved;       /* fused: gate even, up odd, instead of halves */
    bool input_first;       /* transformers keeps [E, in, out] in memory and does not mark it so */
    enum moe_family_shared shared;
    const char *shared_count_key;
    bool shared_gated;

    uint32_t first_dense; /* default of first_k_dense_replace */
    uint32_t hash_layers; /* default of num_hash_layers: the first layers, which route by token id.
                             0: the family has none */
    bool layer_lists;     /* a number may be a list of equal numbers, one for each layer */
    const char *ignored;  /* relevant-looking keys without effect in this family, or NULL */
};

/* The row of a model_type, or NULL. */
const struct moe_family *moe_family_find(const char *model_type);

/* True when `word` is one of the space-separated `words`. */
bool moe_word_in(const char *word, const char *words);

#endif
