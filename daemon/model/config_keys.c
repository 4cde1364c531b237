/* SPDX-License-Identifier: Apache-2.0 */
/* Looks up keys of config.json and refuses unknown ones.
 *
 * Every lookup is recorded. After a family has read its keys, a remaining key with a name about
 * routing or experts is refused, unless this file lists it as without effect or it has the value
 * that means "off". There are no silent defaults, which could cause wrong routing. */
#include "model/config.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* A key with one of these in its name may change what a MoE layer computes. */
static const char *const suspicious[] = {
    "expert",        "moe",       "rout",       "gate",        "topk",       "group",  "scal",
    "scor",          "swiglu",    "shared",     "hidden_act",  "activation", "act_fn", "mlp_bias",
    "use_bias",      "mlp_layer", "mlp_only",   "sparse_step", "num_hash",   "hash_",  "quant",
    "dense_replace", "capacity",  "token_drop", "limit",       "clamp",      "ffn_",
};

/* ... except these: attention, positions, training, sizes of dense layers, precision hints. */
static const char without_effect[] =
    "attn_output_gate attention_output_gate output_gate_type o_groups num_key_value_groups "
    "index_topk index_topk_blocks index_topk_freq index_topk_pattern index_skip_topk_offset "
    "use_index_cache "
    "rope_scaling attn_scale attention_scale floor_scale mla_scale_q_lora mla_scale_kv_lora "
    "query_pre_attn_scalar embedding_scale logit_scale logits_scaling rope_scaling_factor "
    "router_aux_loss_coef router_z_loss_coef output_router_logits router_jitter_noise "
    "moe_router_dtype router_dtype moe_aux_loss_coef ffn_hidden_size intermediate_size "
    "for_llm_compressor projector_hidden_act";

/* Keys with an effect in some family, and their value (as compact JSON) for "off". */
static const struct {
    const char *key, *off;
} neutral[] = {
    {"n_group", "1"},
    {"topk_group", "1"},
    {"num_expert_group", "1"},
    {"n_shared_experts", "0"},
    {"num_shared_experts", "0"},
    {"moe_num_shared_experts", "0"},
    {"shared_intermediate_size", "0"},
    {"shared_expert_intermediate_size", "0"},
    {"zero_expert_num", "0"},
    {"zero_expert_type", "\"identity\""},
    {"routed_scaling_factor", "1.0"},
    {"router_bias", "false"},
    {"use_bias", "false"},
    {"mlp_bias", "false"},
    {"moe_use_aux_free", "true"},
    {"moe_gate", "\"topk\""},
    {"moe_layer_freq", "1"},
    {"first_k_dense_replace", "0"},
    {"decoder_sparse_step", "1"},
    {"mlp_only_layers", "[]"},
    {"num_hash_layers", "0"},
    {"is_quantized", "false"},
    {"group_limited_greedy", "false"},
    {"moe_drop_tokens", "false"},
    {"moe_random_routing_dropped_token", "false"},
    {"use_mixed_mlp_moe", "true"},
    {"scale_router_input", "false"},
};

enum { COUNT_SUSPICIOUS = sizeof suspicious / sizeof suspicious[0] };
enum { COUNT_NEUTRAL = sizeof neutral / sizeof neutral[0] };

static struct moe_status invalid(const char *key, const char *text)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "config.json: %.80s %s", key,
                     text);
}

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "no memory to read config.json");
}

static const json_t *present(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    return json_is_null(v) ? NULL : v;
}

struct moe_status moe_keys_open(struct moe_keys *k, const json_t *root)
{
    k->top = root;
    k->lists = false;
    k->text = present(root, "text_config");
    if (k->text == NULL) /* Qwen-Omni: the thinker is the language model */
        k->text = present(present(root, "thinker_config"), "text_config");
    if (k->text != NULL && !json_is_object(k->text))
        return invalid("text_config", "is not an object");
    k->read = json_object();
    return k->read != NULL ? moe_ok() : no_memory();
}

void moe_keys_close(struct moe_keys *k)
{
    json_decref(k->read);
}

/* Numbers compare by value: 1 equals 1.0. */
static bool same_value(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

/* The number in a list of equal whole numbers; any other value as it is. */
static const json_t *same_in_all(const json_t *v)
{
    const json_t *first = json_array_get(v, 0);
    if (!json_is_integer(first))
        return v;
    for (size_t i = 1; i < json_array_size(v); i++)
        if (!json_equal(json_array_get(v, i), first))
            return v;
    return first;
}

static struct moe_status agree(struct moe_keys *k, const char *key, const json_t *found,
                               const json_t **value)
{
    if (found == NULL)
        return moe_ok();
    if (k->lists)
        found = same_in_all(found);
    if (*value != NULL && !same_value(found, *value))
        return invalid(key, "contradicts another setting of the same thing");
    *value = found;
    memcpy(k->name, key, strlen(key) + 1);
    return moe_ok();
}

struct moe_status moe_keys_get(struct moe_keys *k, const char *names, const json_t **value)
{
    char key[sizeof k->name];
    *value = NULL;
    snprintf(k->name, sizeof k->name, "%.*s", (int)strcspn(names, " "), names);
    for (const char *at = names; *at != '\0';) {
        size_t n = strcspn(at, " ");
        MOE_INVARIANT(n > 0 && n < sizeof key);
        memcpy(key, at, n);
        key[n] = '\0';
        at += n + strspn(at + n, " ");
        if (json_object_set_new(k->read, key, json_true()) != 0)
            return no_memory();
        MOE_TRY(agree(k, key, present(k->text, key), value));
        MOE_TRY(agree(k, key, present(k->top, key), value));
    }
    return moe_ok();
}

static struct moe_status out_of_range(const struct moe_keys *k, const json_t *v, uint32_t min,
                                      uint32_t max)
{
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII);
    struct moe_status st = moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                                     "config.json: %s is %.40s, not a whole number from %u to %u",
                                     k->name, text != NULL ? text : "?", min, max);
    free(text);
    return st;
}

struct moe_status moe_keys_uint(struct moe_keys *k, const char *names, uint32_t min, uint32_t max,
                                uint32_t *out)
{
    const json_t *v;
    MOE_TRY(moe_keys_get(k, names, &v));
    if (v == NULL)
        return moe_ok();
    if (!json_is_integer(v) || json_integer_value(v) < min || json_integer_value(v) > max)
        return out_of_range(k, v, min, max);
    *out = (uint32_t)json_integer_value(v);
    return moe_ok();
}

struct moe_status moe_keys_float(struct moe_keys *k, const char *names, float *out)
{
    const json_t *v;
    MOE_TRY(moe_keys_get(k, names, &v));
    if (v == NULL)
        return moe_ok();
    float f = (float)json_number_value(v);
    if (!json_is_number(v) || !isfinite(f) || f <= 0)
        return invalid(k->name, "is not a positive number");
    *out = f;
    return moe_ok();
}

struct moe_status moe_keys_bool(struct moe_keys *k, const char *names, bool *out)
{
    const json_t *v;
    MOE_TRY(moe_keys_get(k, names, &v));
    if (v == NULL)
        return moe_ok();
    if (!json_is_boolean(v))
        return invalid(k->name, "is not true or false");
    *out = json_is_true(v);
    return moe_ok();
}

struct moe_status moe_keys_word(struct moe_keys *k, const char *name, const char *accepted,
                                const char **out)
{
    const json_t *v;
    MOE_TRY(moe_keys_get(k, name, &v));
    if (v == NULL)
        return moe_ok();
    if (!json_is_string(v))
        return invalid(k->name, "is not a string");
    if (!moe_word_in(json_string_value(v), accepted))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                         "config.json: %.60s is %.60s, which is not understood (known: %s)",
                         k->name, json_string_value(v), accepted);
    *out = json_string_value(v);
    return moe_ok();
}

static struct moe_status need(struct moe_keys *k, const char *names)
{
    const json_t *v;
    MOE_TRY(moe_keys_get(k, names, &v));
    return v != NULL ? moe_ok() : invalid(k->name, "is missing");
}

struct moe_status moe_keys_need_uint(struct moe_keys *k, const char *names, uint32_t min,
                                     uint32_t max, uint32_t *out)
{
    MOE_TRY(need(k, names));
    return moe_keys_uint(k, names, min, max, out);
}

struct moe_status moe_keys_need_float(struct moe_keys *k, const char *names, float *out)
{
    MOE_TRY(need(k, names));
    return moe_keys_float(k, names, out);
}

bool moe_keys_mention(const struct moe_keys *k, const char *names)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)k->top, key, value)
    {
        if (moe_word_in(key, names))
            return true;
    }
    json_object_foreach((json_t *)k->text, key, value)
    {
        if (moe_word_in(key, names))
            return true;
    }
    return false;
}

static bool smells_of_routing(const char *key)
{
    for (size_t i = 0; i < COUNT_SUSPICIOUS; i++)
        if (strcasestr(key, suspicious[i]) != NULL)
            return true;
    return false;
}

static bool is_off(const char *key, const json_t *value)
{
    if (json_is_null(value))
        return true;
    for (size_t i = 0; i < COUNT_NEUTRAL; i++) {
        if (strcmp(key, neutral[i].key) != 0)
            continue;
        json_t *off = json_loads(neutral[i].off, JSON_DECODE_ANY, NULL);
        bool same = off != NULL && same_value(off, value);
        json_decref(off);
        if (same)
            return true;
    }
    return false;
}

static struct moe_status refuse_unread_in(const struct moe_keys *k, const json_t *object,
                                          const char *ignored)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        if (json_object_get(k->read, key) != NULL || !smells_of_routing(key) ||
            moe_word_in(key, without_effect) || is_off(key, value) ||
            (ignored != NULL && moe_word_in(key, ignored)))
            continue;
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                         "config.json: %.100s may change what a MoE layer computes and is not "
                         "understood for this model family",
                         key);
    }
    return moe_ok();
}

struct moe_status moe_keys_refuse_unread(const struct moe_keys *k, const char *ignored)
{
    MOE_TRY(refuse_unread_in(k, k->top, ignored));
    return k->text != NULL ? refuse_unread_in(k, k->text, ignored) : moe_ok();
}
