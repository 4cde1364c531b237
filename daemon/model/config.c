/* SPDX-License-Identifier: Apache-2.0 */
/* From config.json to one layer spec per MoE layer, driven by the family's row. Owns the meaning of
 * the settings. Never guesses: an unknown setting that may matter is refused by name. */
#include "model/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Larger numbers mean a damaged file. */
enum { WIDTH_MAX = 1 << 17, VOCABULARY_MAX = 1 << 24 };

/* The names that a key has in the families, separated by spaces; messages show the first. */
static const char expert_count_keys[] =
    "num_local_experts num_experts n_routed_experts moe_num_experts";
static const char top_k_keys[] =
    "num_experts_per_tok moe_topk moe_k experts_per_token num_experts_per_token";
static const char score_keys[] = "scoring_func score_function moe_router_activation_func";
static const char group_keys[] = "n_group num_expert_group";
static const char renorm_keys[] = "norm_topk_prob moe_renormalize";
static const char act_keys[] = "hidden_act mlp_hidden_act";
static const char latent_keys[] = "routed_expert_hidden_size moe_latent_size";

static struct moe_status invalid(const char *text)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "config.json: %s", text);
}

/* The outer model_type of a multimodal model may be unknown: that of its text model counts. */
static struct moe_status find_family(const json_t *root, struct moe_config *out)
{
    const char *outer = json_string_value(json_object_get(root, "model_type"));
    const char *inner =
        json_string_value(json_object_get(json_object_get(root, "text_config"), "model_type"));
    if (outer == NULL && inner == NULL)
        return invalid("model_type is missing");
    const char *type = outer;
    out->family = outer != NULL ? moe_family_find(outer) : NULL;
    if (out->family == NULL && inner != NULL) {
        type = inner;
        out->family = moe_family_find(inner);
    }
    if (out->family == NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                         "config.json: model_type %.80s is not supported", type);
    snprintf(out->model_type, sizeof out->model_type, "%s", type);
    return moe_ok();
}

static struct moe_status read_score(struct moe_keys *k, const struct moe_family *f,
                                    enum moe_score *score)
{
    static const struct {
        const char *name;
        enum moe_score score;
    } names[] = {{"softmax", MOE_SCORE_SOFTMAX},
                 {"sigmoid", MOE_SCORE_SIGMOID},
                 {"sqrtsoftplus", MOE_SCORE_SQRTSOFTPLUS}};
    const char *name = NULL;
    *score = f->score;
    if (f->scores == NULL)
        return moe_ok();
    MOE_TRY(moe_keys_word(k, score_keys, f->scores, &name));
    for (size_t i = 0; name != NULL && i < sizeof names / sizeof names[0]; i++)
        if (strcmp(name, names[i].name) == 0)
            *score = names[i].score;
    return moe_ok();
}

/* Groups as DeepSeek defines them: n_group of equal size, topk_group of which stay. */
static struct moe_status read_groups(struct moe_keys *k, const struct moe_family *f,
                                     struct moe_layer_spec *s)
{
    struct moe_router_spec *r = &s->router;
    const char *method = "greedy";
    r->groups = r->topk_group = r->group_best = 1;
    if (f->methods != NULL)
        MOE_TRY(moe_keys_word(k, "topk_method", f->methods, &method));
    if (f->group_best == 0)
        return moe_ok();
    if (f->grouped_by_method && strcmp(method, "greedy") == 0) {
        const json_t *without_effect;
        MOE_TRY(moe_keys_get(k, group_keys, &without_effect));
        return moe_keys_get(k, "topk_group", &without_effect);
    }
    struct moe_status (*read)(struct moe_keys *, const char *, uint32_t, uint32_t, uint32_t *) =
        f->one_group ? moe_keys_uint : moe_keys_need_uint;
    MOE_TRY(read(k, group_keys, 1, MOE_MAX_EXPERTS, &r->groups));
    MOE_TRY(read(k, "topk_group", 1, r->groups, &r->topk_group));
    uint32_t group_size = s->experts / r->groups;
    if (s->experts % r->groups != 0)
        return invalid("n_group does not divide the number of experts");
    if (r->groups == 1)
        return moe_ok();
    r->group_best = f->group_best;
    if (group_size < r->group_best)
        return invalid("n_group leaves too few experts in a group");
    if (r->top_k > r->topk_group * group_size)
        return invalid("topk_group leaves fewer experts than num_experts_per_tok");
    return moe_ok();
}

static struct moe_status read_renorm(struct moe_keys *k, const struct moe_family *f,
                                     struct moe_router_spec *r)
{
    bool assumed = f->renorm != MOE_FAMILY_RENORM_NEVER && f->renorm != MOE_FAMILY_RENORM_KEY_FALSE;
    bool fixed =
        f->renorm != MOE_FAMILY_RENORM_KEY_FALSE && f->renorm != MOE_FAMILY_RENORM_KEY_TRUE;
    bool on = assumed;
    MOE_TRY(moe_keys_bool(k, renorm_keys, &on));
    if (fixed && on != assumed)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                         "config.json: norm_topk_prob is %s, but this model family %s renormalises",
                         on ? "true" : "false", assumed ? "always" : "never");
    r->renorm_eps = f->renorm_eps;
    r->renorm = on ? MOE_RENORM_SUM : MOE_RENORM_NONE;
    if (f->renorm == MOE_FAMILY_RENORM_CLAMPED) {
        r->renorm = MOE_RENORM_CLAMPED;
        MOE_TRY(moe_keys_float(k, "moe_norm_min", &r->renorm_eps));
    }
    if (r->renorm == MOE_RENORM_NONE)
        r->renorm_eps = 0;
    r->scale = 1;
    if (f->scaled && f->null_scale && moe_keys_mention(k, "routed_scaling_factor"))
        MOE_TRY(moe_keys_float(k, "routed_scaling_factor", &r->scale));
    else if (f->scaled)
        MOE_TRY(moe_keys_need_float(k, "routed_scaling_factor", &r->scale));
    if (f->scale_xor_renorm && r->renorm != MOE_RENORM_NONE)
        r->scale = 1;
    return moe_ok();
}

static struct moe_status read_router(struct moe_keys *k, const struct moe_family *f,
                                     struct moe_layer_spec *s)
{
    struct moe_router_spec *r = &s->router;
    if (f->zero_experts != NULL) {
        const char *kind = "identity";
        MOE_TRY(moe_keys_uint(k, f->zero_experts, 0, MOE_MAX_EXPERTS, &r->zero_experts));
        MOE_TRY(moe_keys_word(k, "zero_expert_type", "identity", &kind));
    }
    MOE_TRY(moe_keys_need_uint(k, top_k_keys, 1, MOE_MAX_TOP_K, &r->top_k));
    if (r->top_k > s->experts + r->zero_experts)
        return invalid("num_experts_per_tok is larger than the number of experts");
    MOE_TRY(read_score(k, f, &r->score));
    r->logit_bias = f->logit_bias;
    r->select_bias = f->select_bias;
    if (f->select_bias_key != NULL)
        MOE_TRY(moe_keys_bool(k, f->select_bias_key, &r->select_bias));
    if (f->score == MOE_SCORE_SPARSEMIXER) {
        r->jitter = 0.01f;
        MOE_TRY(moe_keys_float(k, "router_jitter_noise", &r->jitter));
        if (r->top_k != 2)
            return invalid("num_experts_per_tok is not 2, as many as SparseMixer chooses");
    }
    MOE_TRY(read_groups(k, f, s));
    return read_renorm(k, f, r);
}

static struct moe_status read_shared(struct moe_keys *k, const struct moe_family *f,
                                     struct moe_layer_spec *s)
{
    uint32_t count = 1, width = s->intermediate;
    s->shared_activation = s->activation;
    if (f->shared == MOE_SHARED_NONE)
        return moe_ok();
    if (f->shared == MOE_SHARED_COUNT)
        MOE_TRY(moe_keys_uint(k, "moe_shared_expert_intermediate_size", 1, WIDTH_MAX, &width));
    if (f->shared == MOE_SHARED_WIDTH)
        MOE_TRY(moe_keys_need_uint(k, "shared_expert_intermediate_size", 0, WIDTH_MAX, &width));
    if (f->shared == MOE_SHARED_COUNT_WIDTH)
        MOE_TRY(moe_keys_need_uint(k, "shared_intermediate_size", 0, WIDTH_MAX, &width));
    if (f->shared_count_key != NULL) {
        /* null means none. For most families absence is an error, because their classes differ. */
        bool mentioned = moe_keys_mention(k, f->shared_count_key);
        if (!mentioned && f->shared == MOE_SHARED_COUNT)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                             "config.json: %s is missing", f->shared_count_key);
        count = mentioned ? 0 : 1;
        MOE_TRY(moe_keys_uint(k, f->shared_count_key, 0, MOE_MAX_EXPERTS, &count));
    }
    /* Several shared experts are stored, and computed, as one wide one. */
    uint64_t all = (uint64_t)count * width;
    if (all > WIDTH_MAX)
        return invalid("the shared experts are too wide");
    s->shared_intermediate = (uint32_t)all;
    s->shared_gated = f->shared_gated && all != 0;
    return moe_ok();
}

static struct moe_status read_activation(struct moe_keys *k, const struct moe_family *f,
                                         struct moe_layer_spec *s)
{
    const char *act = f->hidden_act;
    /* swish is another name of silu. */
    MOE_TRY(moe_keys_word(k, act_keys,
                          strcmp(f->hidden_act, "silu") == 0 ? "silu swish" : f->hidden_act, &act));
    s->activation = f->activation;
    s->swiglu_limit = f->limit;
    s->swiglu_alpha = f->alpha;
    if (strcmp(act, "situ") == 0) {
        s->activation = MOE_ACT_SITU;
        MOE_TRY(moe_keys_need_float(k, "activation_situ_beta", &s->swiglu_alpha));
        return moe_keys_need_float(k, "activation_situ_linear_beta", &s->swiglu_limit);
    }
    if (f->limit != 0)
        MOE_TRY(moe_keys_float(k, "swiglu_limit", &s->swiglu_limit));
    if (f->alpha != 0)
        MOE_TRY(moe_keys_float(k, "swiglu_alpha", &s->swiglu_alpha));
    return moe_ok();
}

static struct moe_status read_latent(struct moe_keys *k, const struct moe_family *f,
                                     struct moe_layer_spec *s)
{
    const char *const *names = f->naming->of;
    if (names[MOE_WEIGHT_TO_LATENT] != NULL)
        MOE_TRY(moe_keys_uint(k, latent_keys, 1, s->hidden, &s->latent));
    if (names[MOE_WEIGHT_LATENT_NORM] != NULL)
        MOE_TRY(moe_keys_bool(k, "latent_moe_use_norm", &s->latent_norm));
    if (!s->latent_norm)
        return moe_ok();
    if (s->latent == 0)
        return invalid("latent_moe_use_norm is true without routed_expert_hidden_size");
    return moe_keys_need_float(k, "rms_norm_eps", &s->latent_eps);
}

static struct moe_status read_experts(struct moe_keys *k, const struct moe_family *f,
                                      struct moe_layer_spec *s)
{
    MOE_TRY(moe_keys_need_uint(k, f->inner_key, 1, WIDTH_MAX, &s->intermediate));
    MOE_TRY(read_activation(k, f, s));
    MOE_TRY(read_latent(k, f, s));
    s->weighting = f->weighting;
    bool biases = f->biases;
    if (f->biases_key != NULL)
        MOE_TRY(moe_keys_bool(k, f->biases_key, &biases));
    s->gate_up_bias = s->down_bias = biases;
    MOE_TRY(read_shared(k, f, s));
    if (f->biases_key != NULL && biases && s->shared_intermediate != 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                         "config.json: %s: biases of shared experts are not supported",
                         f->biases_key);
    return moe_ok();
}

static struct moe_status read_spec(struct moe_keys *k, const struct moe_family *f,
                                   struct moe_layer_spec *s)
{
    *s = (struct moe_layer_spec){0};
    MOE_TRY(moe_keys_need_uint(k, "hidden_size", 1, MOE_MAX_HIDDEN, &s->hidden));
    MOE_TRY(moe_keys_need_uint(k, expert_count_keys, 1, MOE_MAX_EXPERTS, &s->experts));
    MOE_TRY(read_experts(k, f, s));
    return read_router(k, f, s);
}

/* Copies `spec` once per MoE layer. */
static struct moe_status add_layers(struct moe_keys *k, const struct moe_layer_spec *spec,
                                    struct moe_config *out)
{
    uint32_t layer_count = 0;
    MOE_TRY(moe_config_count_layers(k, out->family, &layer_count));
    enum moe_layer_kind *kinds = calloc(layer_count, sizeof *kinds);
    if (kinds == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory to read config.json");
    struct moe_status st = moe_config_select_layers(k, out->family, layer_count, kinds);
    out->layer_count = 0;
    for (uint32_t l = 0; l < layer_count && !moe_failed(&st); l++) {
        if (kinds[l] == MOE_LAYER_DENSE)
            continue;
        if (out->layer_count == MOE_MAX_LAYERS) {
            st = invalid("the model has too many MoE layers");
            break;
        }
        struct moe_layer_spec *s = &out->layers[out->layer_count++];
        *s = *spec;
        s->layer = l;
        s->router.by_token = kinds[l] == MOE_LAYER_BY_TOKEN;
        s->router.select_bias = spec->router.select_bias && !s->router.by_token;
        if (s->router.by_token)
            st = moe_keys_need_uint(k, "vocab_size", 1, VOCABULARY_MAX, &s->router.vocabulary);
    }
    free(kinds);
    if (!moe_failed(&st) && out->layer_count == 0)
        st = invalid("no layer of this model is a MoE layer");
    return st;
}

static struct moe_status read_all(struct moe_keys *k, struct moe_config *out)
{
    struct moe_layer_spec spec;
    const json_t *others; /* config_quant.c reads them */
    MOE_TRY(moe_keys_get(k, "quantization_config", &others));
    MOE_TRY(moe_keys_get(k, "compression_config", &others));
    MOE_TRY(moe_keys_get(k, "expert_dtype", &others));
    MOE_TRY(read_spec(k, out->family, &spec));
    MOE_TRY(add_layers(k, &spec, out));
    return moe_keys_refuse_unread(k, out->family->ignored);
}

struct moe_status moe_config_read(const json_t *root, struct moe_config *out)
{
    struct moe_keys keys;
    MOE_TRY(find_family(root, out));
    MOE_TRY(moe_keys_open(&keys, root));
    keys.lists = out->family->layer_lists;
    struct moe_status st = read_all(&keys, out);
    moe_keys_close(&keys);
    return st;
}
