/* SPDX-License-Identifier: Apache-2.0 */
/* From quantization_config to a scheme with its settings, one reader for each quant_method.
 *
 * Every lookup of a key is recorded, as for the rest of config.json. A key that was not looked up
 * is refused, unless the method lists it as without effect on stored weights. */
#include "model/config.h"

#include <stdio.h>
#include <string.h>

enum { BLOCK_MAX = 1 << 16 }; /* larger blocks mean a damaged file */

struct reading {
    struct moe_keys *keys; /* of quantization_config */
    const struct moe_family *family;
    const char *expert_dtype; /* of DeepSeek-V4, at the top level or here; or NULL */
    struct moe_quant_config *out;
};

static struct moe_status invalid(const char *text)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                     "config.json: quantization_config: %s", text);
}

static struct moe_status not_understood(const char *key, const char *value)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                     "config.json: quantization_config: %.80s%s%.80s is not understood", key,
                     value != NULL ? " " : "", value != NULL ? value : "");
}

static struct moe_quant quant_of(enum moe_quant_scheme_id id, uint32_t rows, uint32_t columns)
{
    const struct moe_quant_scheme *scheme = moe_quant_scheme(id);
    return (struct moe_quant){
        .scheme = scheme,
        .format = {.encoding = scheme->encoding, .block_rows = rows, .block_columns = columns}};
}

static void set_all(const struct reading *r, struct moe_quant q)
{
    r->out->routed = r->out->shared = q;
}

static void set_activations(const struct reading *r, enum moe_activation_format activations)
{
    r->out->routed.activations = r->out->shared.activations = activations;
}

/* ---- values ---- */

/* The key must be absent, null, or equal to `value`. */
static struct moe_status need_uint(const struct reading *r, const char *names, uint32_t value)
{
    uint32_t got = value;
    MOE_TRY(moe_keys_uint(r->keys, names, 0, UINT32_MAX, &got));
    if (got == value)
        return moe_ok();
    char text[32];
    snprintf(text, sizeof text, "%u", got);
    return not_understood(r->keys->name, text);
}

static struct moe_status need_word(const struct reading *r, const char *name, const char *accepted)
{
    const char *ignored;
    return moe_keys_word(r->keys, name, accepted, &ignored);
}

/* Absent, null, false, 0, "", [] and {}. */
static bool is_empty(const json_t *v)
{
    return v == NULL || json_is_false(v) || (json_is_object(v) && json_object_size(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0) ||
           (json_is_string(v) && json_string_length(v) == 0) ||
           (json_is_integer(v) && json_integer_value(v) == 0);
}

static struct moe_status need_empty(const struct reading *r, const char *name)
{
    const json_t *v;
    MOE_TRY(moe_keys_get(r->keys, name, &v));
    return is_empty(v) ? moe_ok() : not_understood(name, NULL);
}

/* Adds the strings of an array; null and absence are an empty one. */
static struct moe_status add_modules(const json_t *list, enum moe_modules_syntax syntax,
                                     struct moe_modules **out)
{
    if (list == NULL)
        return moe_ok();
    if (!json_is_array(list))
        return invalid("a list of modules is no array");
    if (*out == NULL)
        MOE_TRY(moe_modules_create(syntax, out));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *entry = json_string_value(json_array_get(list, i));
        if (entry == NULL)
            return invalid("a list of modules has an entry that is not a string");
        MOE_TRY(moe_modules_add(*out, entry));
    }
    return moe_ok();
}

static struct moe_status read_excluded(const struct reading *r, const char *names,
                                       enum moe_modules_syntax syntax)
{
    const json_t *list;
    MOE_TRY(moe_keys_get(r->keys, names, &list));
    return add_modules(list, syntax, &r->out->excluded);
}

/* A block [rows, columns] of a JSON array; false if it is absent or null. */
static struct moe_status read_block(const struct reading *r, const char *name, uint32_t *rows,
                                    uint32_t *columns, bool *present)
{
    const json_t *v;
    MOE_TRY(moe_keys_get(r->keys, name, &v));
    *present = v != NULL;
    if (v == NULL)
        return moe_ok();
    json_int_t n = json_integer_value(json_array_get(v, 0));
    json_int_t k = json_integer_value(json_array_get(v, 1));
    if (json_array_size(v) != 2 || n < 1 || k < 1 || n > BLOCK_MAX || k > BLOCK_MAX)
        return invalid("the block of a scale is not two positive numbers");
    *rows = (uint32_t)n;
    *columns = (uint32_t)k;
    return moe_ok();
}

/* Elements along a row that share a scale: 0 for -1 or null, which mean all. */
static struct moe_status read_group(const struct reading *r, const char *names, uint32_t *group)
{
    const json_t *v;
    MOE_TRY(moe_keys_get(r->keys, names, &v));
    *group = 0;
    if (v == NULL || (json_is_integer(v) && json_integer_value(v) == -1))
        return moe_ok();
    MOE_TRY(moe_keys_uint(r->keys, names, 8, BLOCK_MAX, group));
    return *group % 8 == 0 ? moe_ok() : invalid("group_size is not a multiple of 8");
}

/* ---- FP8 of transformers and DeepSeek; FBGEMM ---- */

static bool is_deepseek_v4(const struct moe_family *f)
{
    return moe_word_in("deepseek_v4", f->model_types);
}

static struct moe_status set_deepseek_v4(const struct reading *r, struct moe_quant blocks)
{
    blocks.scheme = moe_quant_scheme(MOE_QUANT_FP8_DEEPSEEK_V4);
    set_all(r, blocks);
    if (r->expert_dtype == NULL || strcmp(r->expert_dtype, "fp8") == 0)
        return moe_ok();
    if (strcmp(r->expert_dtype, "fp4") != 0)
        return not_understood("expert_dtype", r->expert_dtype);
    r->out->routed = quant_of(MOE_QUANT_MXFP4_DEEPSEEK_V4, 1, 32);
    return moe_ok();
}

static bool is_word(const char *a, const char *b)
{
    return a != NULL && strcmp(a, b) == 0;
}

static struct moe_status read_fp8_like(const struct reading *r, uint32_t rows, uint32_t columns)
{
    bool in_blocks = false;
    const char *scheme = "dynamic", *scale = "float";
    MOE_TRY(need_word(r, "fmt", "e4m3 float8_e4m3fn"));
    MOE_TRY(moe_keys_word(r->keys, "activation_scheme", "dynamic static", &scheme));
    MOE_TRY(moe_keys_word(r->keys, "scale_fmt", "ue8m0 float", &scale));
    MOE_TRY(need_empty(r, "dequantize"));
    MOE_TRY(read_excluded(r, "modules_to_not_convert ignored_layers", MOE_MODULES_PATHS));
    MOE_TRY(read_block(r, "weight_block_size", &rows, &columns, &in_blocks));
    in_blocks |= rows != 0;
    struct moe_quant q =
        quant_of(in_blocks ? MOE_QUANT_FP8_BLOCK : MOE_QUANT_FP8_SCALE, rows, columns);
    if (is_word(scheme, "dynamic"))
        q.activations = is_word(scale, "ue8m0") ? MOE_ACTIVATIONS_F8_POW2 : MOE_ACTIVATIONS_F8;
    if (is_deepseek_v4(r->family))
        return set_deepseek_v4(r, q);
    set_all(r, q);
    return moe_ok();
}

static struct moe_status read_fp8(const struct reading *r)
{
    return read_fp8_like(r, 0, 0);
}

static struct moe_status read_mxfp8(const struct reading *r)
{
    MOE_TRY(read_fp8_like(r, 1, 32));
    set_activations(r, MOE_ACTIVATIONS_PLAIN); /* MXFP8 scales rows by another rule */
    return moe_ok();
}

static struct moe_status read_fbgemm(const struct reading *r)
{
    MOE_TRY(read_excluded(r, "modules_to_not_convert", MOE_MODULES_PATHS));
    set_all(r, quant_of(MOE_QUANT_FP8_SCALE, 1, 0));
    if (moe_word_in("llama4_text", r->family->model_types))
        r->out->routed = quant_of(MOE_QUANT_FP8_LLAMA4, 1, 0);
    return moe_ok();
}

static struct moe_status read_mxfp4(const struct reading *r)
{
    MOE_TRY(need_empty(r, "dequantize"));
    MOE_TRY(read_excluded(r, "modules_to_not_convert", MOE_MODULES_PATHS));
    r->out->routed = quant_of(MOE_QUANT_MXFP4_GPT_OSS, 1, 32);
    return moe_ok();
}

/* ---- compressed-tensors ---- */

/* One entry of config_groups. */
struct group {
    const char *format, *strategy;
    bool is_float, symmetric;
    uint32_t bits, size; /* of an element; elements along a row that share a scale, 0 = all */
    uint32_t block_rows, block_columns;
    const json_t *inputs; /* input_activations, or NULL */
};

/* A scale for each token goes with one for each row of weights, one for a group of a token with
 * one for such a block. */
static bool quantises_inputs(const struct group *g, uint32_t block_columns)
{
    const json_t *inputs = g->inputs;
    const char *type = json_string_value(json_object_get(inputs, "type"));
    const char *strategy = json_string_value(json_object_get(inputs, "strategy"));
    bool fp8 = json_integer_value(json_object_get(inputs, "num_bits")) == 8 &&
               is_word(type, "float") && json_is_true(json_object_get(inputs, "dynamic"));
    if (!fp8 || is_word(g->format, "mxfp8-quantized"))
        return false;
    return block_columns == 0
               ? is_word(strategy, "token")
               : is_word(strategy, "group") &&
                     json_integer_value(json_object_get(inputs, "group_size")) == block_columns;
}

static struct moe_status choose_packed(const struct reading *r, const struct group *g)
{
    struct moe_quant q;
    bool grouped = is_word(g->strategy, "group") || is_word(g->strategy, "channel");
    if (is_word(g->format, "pack-quantized") && !g->is_float && g->bits == 4 && grouped) {
        q = quant_of(MOE_QUANT_INT4_PACKED, 1, g->size);
        q.format.zero_points = !g->symmetric;
    } else if (is_word(g->format, "mxfp4-pack-quantized") && g->is_float && g->bits == 4) {
        q = quant_of(MOE_QUANT_MXFP4_PACKED, 1, g->size != 0 ? g->size : 32);
    } else if (is_word(g->format, "nvfp4-pack-quantized") && g->is_float && g->bits == 4) {
        q = quant_of(MOE_QUANT_NVFP4_PACKED, 1, g->size != 0 ? g->size : 16);
    } else {
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                         "config.json: quantization_config: format %.60s with %u-bit %s weights "
                         "and strategy %.40s is not understood",
                         g->format != NULL ? g->format : "(none)", g->bits,
                         g->is_float ? "float" : "int",
                         g->strategy != NULL ? g->strategy : "(none)");
    }
    set_all(r, q);
    return moe_ok();
}

static struct moe_status choose_compressed(const struct reading *r, const struct group *g)
{
    bool fp8 = g->is_float && g->bits == 8;
    if (!fp8 || g->format == NULL ||
        !moe_word_in(g->format, "float-quantized naive-quantized mxfp8-quantized"))
        return choose_packed(r, g);
    if (is_word(g->strategy, "tensor"))
        set_all(r, quant_of(MOE_QUANT_FP8_SCALE, 0, 0));
    else if (is_word(g->strategy, "channel"))
        set_all(r, quant_of(MOE_QUANT_FP8_SCALE, 1, 0));
    else if (is_word(g->strategy, "block") && g->block_rows != 0)
        set_all(r, quant_of(MOE_QUANT_FP8_BLOCK, g->block_rows, g->block_columns));
    else if (is_word(g->strategy, "group") && g->size != 0)
        set_all(r, quant_of(MOE_QUANT_FP8_BLOCK, 1, g->size));
    else
        return choose_packed(r, g);
    if (quantises_inputs(g, r->out->routed.format.block_columns))
        set_activations(r, MOE_ACTIVATIONS_F8);
    return moe_ok();
}

/* Refuses a key of `k` that was not looked up and is not among `ignored`. */
static struct moe_status refuse_unread(const struct moe_keys *k, const char *ignored)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)k->top, key, value)
    {
        if (!json_is_null(value) && json_object_get(k->read, key) == NULL &&
            !moe_word_in(key, ignored))
            return not_understood(key, NULL);
    }
    return moe_ok();
}

static struct moe_status read_weights(const struct reading *r, struct group *g)
{
    const char *type = NULL;
    bool present;
    MOE_TRY(moe_keys_need_uint(r->keys, "num_bits", 1, 64, &g->bits));
    MOE_TRY(moe_keys_word(r->keys, "type", "int float", &type));
    MOE_TRY(moe_keys_word(r->keys, "strategy", "tensor channel group block tensor_group",
                          &g->strategy));
    MOE_TRY(moe_keys_bool(r->keys, "symmetric", &g->symmetric));
    MOE_TRY(read_group(r, "group_size", &g->size));
    MOE_TRY(read_block(r, "block_structure", &g->block_rows, &g->block_columns, &present));
    MOE_TRY(need_word(r, "actorder", "static weight"));
    MOE_TRY(need_empty(r, "dynamic"));
    g->is_float = is_word(type, "float");
    return refuse_unread(r->keys, "observer observer_kwargs scale_dtype zp_dtype");
}

/* Reads an object below quantization_config with `read`, which gets its keys. */
static struct moe_status
read_inside(const struct reading *r, const json_t *object,
            struct moe_status (*read)(const struct reading *, struct group *), struct group *g)
{
    struct moe_keys keys;
    struct reading inside = *r;
    if (!json_is_object(object))
        return invalid("a group has no weights, or is not an object");
    MOE_TRY(moe_keys_open(&keys, object));
    inside.keys = &keys;
    struct moe_status st = read(&inside, g);
    moe_keys_close(&keys);
    return st;
}

static struct moe_status read_config_group(const struct reading *r, struct group *g)
{
    const json_t *weights, *targets;
    const char *format = NULL;
    MOE_TRY(moe_keys_get(r->keys, "weights", &weights));
    MOE_TRY(moe_keys_get(r->keys, "targets", &targets));
    MOE_TRY(moe_keys_get(r->keys, "input_activations", &g->inputs));
    MOE_TRY(add_modules(targets, MOE_MODULES_EXACT, &r->out->included));
    MOE_TRY(moe_keys_word(
        r->keys, "format",
        "float-quantized naive-quantized mxfp8-quantized pack-quantized mxfp4-pack-quantized "
        "nvfp4-pack-quantized",
        &format));
    if (format != NULL)
        g->format = format;
    MOE_TRY(refuse_unread(r->keys, "output_activations"));
    return read_inside(r, weights, read_weights, g);
}

static struct moe_status read_compressed_tensors(const struct reading *r)
{
    struct group g = {.symmetric = true};
    const json_t *groups;
    MOE_TRY(moe_keys_get(r->keys, "config_groups", &groups));
    if (json_object_size(groups) != 1)
        return not_understood("config_groups: another number of groups than one", NULL);
    MOE_TRY(moe_keys_word(
        r->keys, "format",
        "float-quantized naive-quantized mxfp8-quantized pack-quantized mxfp4-pack-quantized "
        "nvfp4-pack-quantized",
        &g.format));
    MOE_TRY(need_word(r, "quantization_status", "compressed frozen"));
    MOE_TRY(need_empty(r, "transform_config"));
    const json_t *sparse;
    MOE_TRY(moe_keys_get(r->keys, "sparsity_config", &sparse));
    if (!is_empty(sparse) &&
        !is_word(json_string_value(json_object_get(sparse, "format")), "dense"))
        return not_understood("sparsity_config", NULL);
    MOE_TRY(read_excluded(r, "ignore", MOE_MODULES_EXACT));
    json_t *only = json_object_iter_value(json_object_iter((json_t *)groups));
    MOE_TRY(read_inside(r, only, read_config_group, &g));
    return choose_compressed(r, &g);
}

/* ---- ModelOpt ---- */

/* ModelOpt's algorithms. group_size is block_columns; those without have none. */
static const struct algorithm {
    const char *names; /* of quant_algo */
    enum moe_quant_scheme_id scheme;
    uint32_t block_rows, block_columns;
    enum moe_activation_format activations;
} algorithms[] = {
    {"FP8", MOE_QUANT_FP8_SCALE, 0, 0, MOE_ACTIVATIONS_PLAIN},
    {"FP8_PER_CHANNEL_PER_TOKEN", MOE_QUANT_FP8_SCALE, 1, 0, MOE_ACTIVATIONS_F8},
    {"FP8_PB_WO fp8_pb_wo FP8_BLOCK_SCALES", MOE_QUANT_FP8_BLOCK, 128, 128, MOE_ACTIVATIONS_PLAIN},
    {"MXFP8", MOE_QUANT_FP8_BLOCK, 1, 32, MOE_ACTIVATIONS_PLAIN},
    {"NVFP4 W4A16_NVFP4", MOE_QUANT_NVFP4_MODELOPT, 1, 16, MOE_ACTIVATIONS_PLAIN},
};
#define ALGORITHMS                                                                                 \
    "FP8 FP8_PER_CHANNEL_PER_TOKEN FP8_PB_WO fp8_pb_wo FP8_BLOCK_SCALES MXFP8 NVFP4 W4A16_NVFP4"

/* `name` is one of ALGORITHMS. */
static struct moe_status choose_algorithm(const struct reading *r, const char *name,
                                          struct moe_quant *out)
{
    const struct algorithm *a = NULL;
    for (size_t i = 0; a == NULL && i < sizeof algorithms / sizeof algorithms[0]; i++)
        a = moe_word_in(name, algorithms[i].names) ? &algorithms[i] : NULL;
    MOE_INVARIANT(a != NULL);
    if (a->block_columns != 0)
        MOE_TRY(need_uint(r, "group_size", a->block_columns));
    *out = quant_of(a->scheme, a->block_rows, a->block_columns);
    out->activations = a->activations;
    return moe_ok();
}

/* Each module has its own settings, without a default for all: moe_quant_config_find reads them. */
static struct moe_status read_mixed(const struct reading *r)
{
    const json_t *modules, *of_no_module;
    MOE_TRY(moe_keys_get(r->keys, "quantized_layers", &modules));
    MOE_TRY(moe_keys_get(r->keys, "group_size", &of_no_module));
    if (!json_is_object(modules))
        return invalid("quant_algo is MIXED_PRECISION, but quantized_layers is no object");
    r->out->by_module = json_incref((json_t *)modules);
    return moe_ok();
}

static struct moe_status read_modelopt(const struct reading *r)
{
    const char *algorithm = NULL;
    struct moe_quant q;
    MOE_TRY(moe_keys_word(r->keys, "quant_algo", ALGORITHMS " MIXED_PRECISION", &algorithm));
    if (algorithm == NULL)
        return invalid("quant_algo is missing");
    MOE_TRY(read_excluded(r, "ignore exclude_modules", MOE_MODULES_GLOBS));
    if (is_word(algorithm, "MIXED_PRECISION"))
        return read_mixed(r);
    MOE_TRY(choose_algorithm(r, algorithm, &q));
    set_all(r, q);
    return moe_ok();
}

/* ---- GPTQ and AWQ ---- */

/* GPTQModel's rules: "-:" and a regular expression name modules that are not quantised. Rules with
 * other settings for some modules are refused, unless they have none. */
static struct moe_status read_dynamic(const struct reading *r)
{
    const json_t *rules;
    const char *rule;
    json_t *settings;
    char entry[600];
    MOE_TRY(moe_keys_get(r->keys, "dynamic", &rules));
    if (!json_is_object(rules))
        return is_empty(rules) ? moe_ok() : not_understood("dynamic", NULL);
    json_object_foreach((json_t *)rules, rule, settings)
    {
        if (strncmp(rule, "-:", 2) != 0 && is_empty(settings))
            continue;
        if (strncmp(rule, "-:", 2) != 0 || strlen(rule) >= sizeof entry - 3)
            return not_understood("dynamic", rule);
        if (r->out->excluded == NULL)
            MOE_TRY(moe_modules_create(MOE_MODULES_EXACT, &r->out->excluded));
        snprintf(entry, sizeof entry, "re:%s", rule + 2);
        MOE_TRY(moe_modules_add(r->out->excluded, entry));
    }
    return moe_ok();
}

static struct moe_status read_gptq(const struct reading *r)
{
    const char *format = "gptq";
    uint32_t group;
    bool ignored = false, reorders = false;
    MOE_TRY(need_uint(r, "bits", 4));
    MOE_TRY(read_group(r, "group_size", &group));
    MOE_TRY(moe_keys_bool(r->keys, "sym", &ignored)); /* zero points are always stored */
    MOE_TRY(moe_keys_bool(r->keys, "desc_act", &reorders));
    MOE_TRY(moe_keys_word(r->keys, "checkpoint_format format", "gptq gptq_v2", &format));
    MOE_TRY(need_word(r, "pack_dtype", "int32"));
    MOE_TRY(need_empty(r, "is_marlin_format"));
    MOE_TRY(read_dynamic(r));
    struct moe_quant q = quant_of(MOE_QUANT_GPTQ, 1, group);
    q.format.zero_points = true;
    q.zero_offset = strcmp(format, "gptq") == 0;
    q.needed = reorders ? 1 << MOE_QUANT_GROUPS : 0; /* g_idx tells which columns moved */
    set_all(r, q);
    return moe_ok();
}

static struct moe_status read_awq(const struct reading *r)
{
    uint32_t group;
    bool zero_points = true;
    MOE_TRY(need_uint(r, "bits w_bit", 4));
    MOE_TRY(read_group(r, "group_size q_group_size", &group));
    MOE_TRY(moe_keys_bool(r->keys, "zero_point", &zero_points));
    MOE_TRY(need_word(r, "version format", "gemm GEMM"));
    MOE_TRY(need_empty(r, "desc_act"));
    MOE_TRY(read_excluded(r, "modules_to_not_convert", MOE_MODULES_PATHS));
    struct moe_quant q = quant_of(MOE_QUANT_AWQ, 1, group);
    q.format.zero_points = zero_points;
    set_all(r, q);
    return moe_ok();
}

/* ---- all ---- */

/* What transformers' and GPTQModel's quantisers write of how they chose the values. */
#define CALIBRATION                                                                                \
    "damp_percent damp_auto_increment true_sequential static_groups act_group_aware quantizer "    \
    "meta "                                                                                        \
    "model_file_base_name model_name_or_path lm_head mse batch_size dataset tokenizer backend "    \
    "block_name_to_quantize module_name_preceding_first_block pad_token_id model_seqlen "          \
    "use_cuda_fp16 use_exllama disable_exllama max_input_length exllama_config "                   \
    "cache_block_outputs modules_in_block_to_quantize offload_to_disk"

static const struct method {
    const char *names; /* of quant_method */
    struct moe_status (*read)(const struct reading *r);
    const char *ignored; /* keys without effect on stored weights of experts */
} methods[] = {
    {"fp8", read_fp8, "expert_dtype"},
    {"mxfp8", read_mxfp8, ""},
    {"fbgemm_fp8", read_fbgemm, "activation_scale_ub"},
    {"mxfp4", read_mxfp4, ""},
    {"compressed-tensors", read_compressed_tensors,
     "version global_compression_ratio kv_cache_scheme"},
    {"modelopt modelopt_fp4", read_modelopt,
     "producer kv_cache_scheme kv_cache_quant_algo config_groups"},
    {"gptq", read_gptq, CALIBRATION},
    {"awq", read_awq, CALIBRATION " sym do_fuse fuse_max_seq_len modules_to_fuse"},
};

static struct moe_status read_method(const struct reading *r)
{
    const char *name = NULL;
    const json_t *v;
    MOE_TRY(moe_keys_get(r->keys, "quant_method", &v));
    name = json_string_value(v);
    if (name == NULL)
        return invalid("quant_method is missing");
    for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++) {
        if (!moe_word_in(name, methods[i].names))
            continue;
        MOE_TRY(methods[i].read(r));
        return refuse_unread(r->keys, methods[i].ignored);
    }
    return not_understood("quant_method", name);
}

static struct moe_status find_expert_dtype(struct moe_keys *top, struct reading *r)
{
    const json_t *outer, *inner;
    MOE_TRY(moe_keys_get(top, "expert_dtype", &outer));
    MOE_TRY(moe_keys_get(r->keys, "expert_dtype", &inner));
    const json_t *v = inner != NULL ? inner : outer;
    if (v == NULL)
        return moe_ok();
    if (!json_is_string(v) || (outer != NULL && !json_equal(outer, v)))
        return invalid("expert_dtype is not a string, or contradicts itself");
    /* transformers writes fp8 for every family. */
    if (!is_deepseek_v4(r->family) && strcmp(json_string_value(v), "fp8") != 0)
        return not_understood("expert_dtype", json_string_value(v));
    r->expert_dtype = json_string_value(v);
    return moe_ok();
}

/* Without a quantization_config, expert_dtype may say that there is none. */
static struct moe_status check_plain(struct moe_keys *top)
{
    const char *ignored;
    return moe_keys_word(top, "expert_dtype", "bf16 bfloat16", &ignored);
}

static struct moe_status read_top(struct moe_keys *top, struct reading *r)
{
    const json_t *q;
    struct moe_keys keys;
    MOE_TRY(moe_keys_get(top, "quantization_config compression_config", &q));
    if (q == NULL || (json_is_object(q) && json_object_size(q) == 0))
        return check_plain(top);
    if (!json_is_object(q))
        return invalid("it is not an object");
    MOE_TRY(moe_keys_open(&keys, q));
    r->keys = &keys;
    struct moe_status st = find_expert_dtype(top, r);
    if (!moe_failed(&st))
        st = read_method(r);
    moe_keys_close(&keys);
    return st;
}

struct moe_status moe_quant_config_read(const json_t *root, const struct moe_family *family,
                                        struct moe_quant_config *out)
{
    struct moe_keys top;
    struct reading r = {.family = family, .out = out};
    *out = (struct moe_quant_config){0};
    MOE_TRY(moe_keys_open(&top, root));
    struct moe_status st = read_top(&top, &r);
    moe_keys_close(&top);
    return st;
}

/* ---- one module ---- */

static struct moe_status read_module(const struct reading *r, struct moe_quant *out)
{
    const char *algorithm = NULL;
    MOE_TRY(moe_keys_word(r->keys, "quant_algo", ALGORITHMS, &algorithm));
    if (algorithm == NULL)
        return invalid("quant_algo is missing");
    MOE_TRY(choose_algorithm(r, algorithm, out));
    return refuse_unread(r->keys, "");
}

static struct moe_status read_entry(const json_t *entry, struct moe_quant *out)
{
    struct moe_keys keys;
    if (!json_is_object(entry))
        return invalid("the settings of a module are not an object");
    MOE_TRY(moe_keys_open(&keys, entry));
    const struct reading r = {.keys = &keys};
    struct moe_status st = read_module(&r, out);
    moe_keys_close(&keys);
    return st;
}

struct moe_status moe_quant_config_find(const struct moe_quant_config *q, const char *path,
                                        bool routed, struct moe_quant *out)
{
    char name[256];
    *out = (struct moe_quant){0};
    if ((q->included != NULL && !moe_modules_match(q->included, path)) ||
        moe_modules_match(q->excluded, path))
        return moe_ok();
    if (q->by_module == NULL) {
        *out = routed ? q->routed : q->shared;
        return moe_ok();
    }
    MOE_INVARIANT(strlen(path) < sizeof name);
    memcpy(name, path, strlen(path) + 1);
    const json_t *entry = json_object_get(q->by_module, name);
    for (char *dot; entry == NULL && (dot = strrchr(name, '.')) != NULL;) {
        *dot = '\0'; /* the module around it */
        entry = json_object_get(q->by_module, name);
    }
    return entry == NULL
               ? moe_ok()
               : moe_error_context(read_entry(entry, out), "quantized_layers: %.120s", name);
}

bool moe_quant_config_names(const struct moe_quant_config *q, const char *prefix)
{
    const char *name;
    json_t *entry;
    json_object_foreach(q->by_module, name, entry)
    {
        if (strncmp(name, prefix, strlen(prefix)) == 0)
            return true;
    }
    return false;
}

void moe_quant_config_free(struct moe_quant_config *q)
{
    json_decref(q->by_module);
    moe_modules_destroy(q->included);
    moe_modules_destroy(q->excluded);
    *q = (struct moe_quant_config){0};
}
