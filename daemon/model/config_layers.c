/* SPDX-License-Identifier: Apache-2.0 */
/* Which layers of a model are MoE layers: each family's rule, as its published code states it.
 * Ignores layers at or beyond the layer count (multi-token-prediction heads). */
#include "model/config.h"

#include <string.h>

static const char first_dense_keys[] =
    "first_k_dense_replace num_dense_layers moe_layer_num_skipped";

static struct moe_status invalid(const char *key, const char *text)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "config.json: %s %s", key,
                     text);
}

/* True when the JSON list of layer numbers `v` holds `layer`; NULL holds nothing. */
static bool lists_layer(const json_t *v, uint32_t layer)
{
    for (size_t i = 0; i < json_array_size(v); i++)
        if (json_integer_value(json_array_get(v, i)) == layer)
            return true;
    return false;
}

static struct moe_status check_layer_list(const char *key, const json_t *v, uint32_t layer_count)
{
    if (v != NULL && !json_is_array(v))
        return invalid(key, "is not a list of layer numbers");
    if (json_array_size(v) > layer_count)
        return invalid(key, "is longer than the model has layers");
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *e = json_array_get(v, i);
        if (!json_is_integer(e) || json_integer_value(e) < 0 ||
            json_integer_value(e) >= layer_count)
            return invalid(key, "holds something that is not a layer number");
    }
    return moe_ok();
}

/* Entries beyond the layer count belong to multi-token-prediction heads. */
static struct moe_status check_per_layer(const char *key, const json_t *v, uint32_t layer_count)
{
    return json_array_size(v) >= layer_count ? moe_ok()
                                             : invalid(key, "does not have one entry per layer");
}

/* The kinds of Nemotron-H's layers: a letter for each, or a word for each. */
struct blocks {
    const char *letters; /* hybrid_override_pattern, or NULL */
    const json_t *words; /* layers_block_type, or NULL */
    size_t count;
};

static struct moe_status find_blocks(struct moe_keys *k, struct blocks *b)
{
    const json_t *letters;
    MOE_TRY(moe_keys_get(k, "hybrid_override_pattern", &letters));
    MOE_TRY(moe_keys_get(k, "layers_block_type", &b->words));
    b->letters = json_string_value(letters);
    if (letters != NULL && b->letters == NULL)
        return invalid("hybrid_override_pattern", "is not a string");
    if (b->words != NULL && !json_is_array(b->words))
        return invalid("layers_block_type", "is not a list");
    if (b->letters == NULL && b->words == NULL)
        return invalid("layers_block_type", "is missing");
    b->count = b->words != NULL ? json_array_size(b->words) : strlen(b->letters);
    if (b->letters != NULL && strlen(b->letters) != b->count)
        return invalid("hybrid_override_pattern", "contradicts layers_block_type");
    return moe_ok();
}

static struct moe_status unknown_block(const char *key, const char *block, size_t n, uint32_t layer)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                     "config.json: %s has %.*s for layer %u, which is not supported", key, (int)n,
                     block, layer);
}

static struct moe_status by_blocks(struct moe_keys *k, uint32_t layer_count,
                                   enum moe_layer_kind *kinds)
{
    struct blocks b;
    MOE_TRY(find_blocks(k, &b));
    for (uint32_t l = 0; l < layer_count; l++) {
        const char *word = json_string_value(json_array_get(b.words, l));
        const char *letter = b.letters != NULL ? b.letters + l : NULL;
        if (b.words != NULL && word == NULL)
            return invalid("layers_block_type", "holds something that is not a string");
        if (word != NULL &&
            !moe_word_in(word, "moe mamba linear_attention attention full_attention mlp"))
            return unknown_block("layers_block_type", word, 40, l);
        if (letter != NULL && strchr("EM*-", *letter) == NULL)
            return unknown_block("hybrid_override_pattern", letter, 1, l);
        bool is_moe = word != NULL ? strcmp(word, "moe") == 0 : *letter == 'E';
        if (letter != NULL && is_moe != (*letter == 'E'))
            return invalid("hybrid_override_pattern", "contradicts layers_block_type");
        kinds[l] = is_moe ? MOE_LAYER_MOE : MOE_LAYER_DENSE;
    }
    return moe_ok();
}

struct moe_status moe_config_count_layers(struct moe_keys *k, const struct moe_family *family,
                                          uint32_t *count)
{
    struct blocks b;
    const char *key = family->layer_count_key;
    if (family->layers != MOE_LAYERS_BLOCKS)
        return moe_keys_need_uint(k, key, 1, MOE_MODEL_LAYERS_MAX, count);
    MOE_TRY(find_blocks(k, &b));
    if (b.count < 1 || b.count > MOE_MODEL_LAYERS_MAX)
        return invalid("layers_block_type", "has no layer or too many");
    *count = (uint32_t)b.count;
    MOE_TRY(moe_keys_uint(k, key, 1, MOE_MODEL_LAYERS_MAX, count));
    return *count == b.count ? moe_ok() : invalid(key, "contradicts the list of layers");
}

/* `dense` or a kind of MoE layer for each layer; `hash_moe` only in families that have it. */
static struct moe_status by_type_list(const json_t *types, const struct moe_family *family,
                                      uint32_t layer_count, enum moe_layer_kind *kinds)
{
    MOE_TRY(check_per_layer("mlp_layer_types", types, layer_count));
    for (uint32_t l = 0; l < layer_count; l++) {
        const char *type = json_string_value(json_array_get(types, l));
        bool hashes = type != NULL && family->hash_layers != 0 && strcmp(type, "hash_moe") == 0;
        if (type == NULL || !(hashes || moe_word_in(type, "dense sparse moe")))
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                             "config.json: mlp_layer_types has %.40s for layer %u, which is not "
                             "supported",
                             type != NULL ? type : "no string", l);
        kinds[l] = hashes                       ? MOE_LAYER_BY_TOKEN
                   : strcmp(type, "dense") == 0 ? MOE_LAYER_DENSE
                                                : MOE_LAYER_MOE;
    }
    return moe_ok();
}

static enum moe_layer_kind moe_if(bool is_moe)
{
    return is_moe ? MOE_LAYER_MOE : MOE_LAYER_DENSE;
}

static struct moe_status by_frequency(const json_t *frequency, uint32_t first, uint32_t layer_count,
                                      enum moe_layer_kind *kinds)
{
    if (json_is_array(frequency)) {
        MOE_TRY(check_per_layer("moe_layer_freq", frequency, layer_count));
        for (uint32_t l = 0; l < layer_count; l++) {
            const json_t *e = json_array_get(frequency, l);
            if (!json_is_integer(e) || json_integer_value(e) < 0 || json_integer_value(e) > 1)
                return invalid("moe_layer_freq", "is a list of something else than 0 and 1");
            kinds[l] = moe_if(l >= first && json_integer_value(e) == 1);
        }
        return moe_ok();
    }
    json_int_t step = frequency != NULL ? json_integer_value(frequency) : 1;
    if (step < 1) /* also if it is not an integer */
        return invalid("moe_layer_freq", "is neither a positive number nor a list");
    for (uint32_t l = 0; l < layer_count; l++)
        kinds[l] = moe_if(l >= first && l % step == 0);
    return moe_ok();
}

/* The first layers of DeepSeek-V4 route by token id, unless a list of types says which. */
static struct moe_status mark_hash_layers(struct moe_keys *k, const struct moe_family *family,
                                          bool typed, uint32_t layer_count,
                                          enum moe_layer_kind *kinds)
{
    uint32_t listed = 0, hashed = family->hash_layers;
    for (uint32_t l = 0; l < layer_count; l++)
        listed += kinds[l] == MOE_LAYER_BY_TOKEN;
    if (family->hash_layers == 0)
        return moe_ok();
    hashed = typed ? listed : hashed;
    MOE_TRY(moe_keys_uint(k, "num_hash_layers", 0, MOE_MODEL_LAYERS_MAX, &hashed));
    if (typed)
        return hashed == listed ? moe_ok()
                                : invalid("num_hash_layers", "contradicts mlp_layer_types");
    for (uint32_t l = 0; l < layer_count && l < hashed; l++)
        if (kinds[l] == MOE_LAYER_MOE)
            kinds[l] = MOE_LAYER_BY_TOKEN;
    return moe_ok();
}

static struct moe_status first_dense(struct moe_keys *k, const struct moe_family *family,
                                     uint32_t layer_count, enum moe_layer_kind *kinds)
{
    const json_t *types, *frequency;
    uint32_t first = family->first_dense;
    MOE_TRY(moe_keys_get(k, "mlp_layer_types", &types));
    MOE_TRY(moe_keys_get(k, "moe_layer_freq", &frequency));
    if (json_is_array(frequency))
        first = 0;
    MOE_TRY(moe_keys_uint(k, first_dense_keys, 0, MOE_MODEL_LAYERS_MAX, &first));
    if (types != NULL)
        MOE_TRY(by_type_list(types, family, layer_count, kinds));
    else
        MOE_TRY(by_frequency(frequency, first, layer_count, kinds));
    return mark_hash_layers(k, family, types != NULL, layer_count, kinds);
}

static struct moe_status sparse_step(struct moe_keys *k, uint32_t layer_count,
                                     enum moe_layer_kind *kinds)
{
    const json_t *dense;
    uint32_t step = 1;
    MOE_TRY(moe_keys_uint(k, "decoder_sparse_step", 1, MOE_MODEL_LAYERS_MAX, &step));
    MOE_TRY(moe_keys_get(k, "mlp_only_layers", &dense));
    MOE_TRY(check_layer_list("mlp_only_layers", dense, layer_count));
    for (uint32_t l = 0; l < layer_count; l++)
        kinds[l] = moe_if((l + 1) % step == 0 && !lists_layer(dense, l));
    return moe_ok();
}

static struct moe_status interleaved(struct moe_keys *k, uint32_t layer_count,
                                     enum moe_layer_kind *kinds)
{
    const json_t *list;
    uint32_t step = 1;
    MOE_TRY(moe_keys_uint(k, "interleave_moe_layer_step", 1, MOE_MODEL_LAYERS_MAX, &step));
    MOE_TRY(moe_keys_get(k, "moe_layers", &list));
    MOE_TRY(check_layer_list("moe_layers", list, layer_count));
    for (uint32_t l = 0; l < layer_count; l++)
        kinds[l] = moe_if(list != NULL ? lists_layer(list, l) : (l + 1) % step == 0);
    return moe_ok();
}

static struct moe_status interval(struct moe_keys *k, uint32_t layer_count,
                                  enum moe_layer_kind *kinds)
{
    const json_t *end;
    uint32_t first = 0, last = layer_count - 1, step = 1;
    MOE_TRY(moe_keys_need_uint(k, "moe_layer_start_index", 0, MOE_MODEL_LAYERS_MAX, &first));
    MOE_TRY(moe_keys_get(k, "moe_layer_end_index", &end));
    if (!json_is_integer(end) || json_integer_value(end) != -1) /* -1: the last layer */
        MOE_TRY(moe_keys_uint(k, "moe_layer_end_index", 0, MOE_MODEL_LAYERS_MAX, &last));
    MOE_TRY(moe_keys_uint(k, "moe_layer_interval", 1, MOE_MODEL_LAYERS_MAX, &step));
    for (uint32_t l = 0; l < layer_count; l++)
        kinds[l] = moe_if((l + 1) % step == 0 && l >= first && l <= last);
    return moe_ok();
}

static struct moe_status period(struct moe_keys *k, uint32_t layer_count,
                                enum moe_layer_kind *kinds)
{
    uint32_t step = 2, offset = 1;
    MOE_TRY(moe_keys_uint(k, "expert_layer_period", 1, MOE_MODEL_LAYERS_MAX, &step));
    MOE_TRY(moe_keys_uint(k, "expert_layer_offset", 0, MOE_MODEL_LAYERS_MAX, &offset));
    for (uint32_t l = 0; l < layer_count; l++)
        kinds[l] = moe_if(l % step == offset);
    return moe_ok();
}

struct moe_status moe_config_select_layers(struct moe_keys *k, const struct moe_family *family,
                                           uint32_t layer_count, enum moe_layer_kind *kinds)
{
    switch (family->layers) {
    case MOE_LAYERS_FIRST_DENSE: return first_dense(k, family, layer_count, kinds);
    case MOE_LAYERS_SPARSE_STEP: return sparse_step(k, layer_count, kinds);
    case MOE_LAYERS_INTERLEAVED: return interleaved(k, layer_count, kinds);
    case MOE_LAYERS_INTERVAL: return interval(k, layer_count, kinds);
    case MOE_LAYERS_PERIOD: return period(k, layer_count, kinds);
    case MOE_LAYERS_BLOCKS: return by_blocks(k, layer_count, kinds);
    case MOE_LAYERS_ALL: break;
    }
    for (uint32_t l = 0; l < layer_count; l++)
        kinds[l] = MOE_LAYER_MOE;
    return moe_ok();
}
