/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters in PEFT's format. Each slot writes the adapters of its experts to a separate file; the
 * lowest joins them into one, because PEFT reads one file.
 *
 * There are two layouts, after the model's files. A model with a tensor per expert gets an A [r,
 * in] and a B [out, r] per expert and projection, under the names of its modules. A model with
 * fused experts gets PEFT's adapters of parameters (target_parameters, from PEFT 0.19 on): one A [E
 * R, in] with rank j of expert e in row e R + j, and one B [out, R E] with it in column j E + e.
 * Gate and up are one parameter there, so R = 2 r: the first r ranks are gate's and reach its rows
 * only, the others are up's.
 *
 * The export always has all three projections: when transformers fuses experts in memory, PEFT
 * fuses the modules and expects gate, up and down together. A projection without an adapter gets
 * zeros.
 *
 * PEFT applies A to the last dimension of a parameter and B to the middle one, unless the module
 * has is_transposed. Llama4's experts are transposed without it, so A and B change places. */
#include "checkpoint/internal.h"

#include "daemon/log.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ADAPTER_FILE   "adapter_model.safetensors"
#define ADAPTER_CONFIG "adapter_config.json"

enum { PEFT_NAME_MAX = MOE_MODEL_NAME_MAX + 48 };

static struct moe_status named(struct moe_status st, const char *name)
{
    return moe_error_context(st, "adapter %s", name);
}

static bool targeted(const struct moe_checkpoint_context *c, enum moe_weight weight)
{
    uint32_t bit = weight == MOE_WEIGHT_GATE ? MOE_LORA_GATE
                   : weight == MOE_WEIGHT_UP ? MOE_LORA_UP
                                             : MOE_LORA_DOWN;
    return (c->config->lora_targets & bit) != 0;
}

/* The tensor's name without its last component: "model.layers.0.mlp.experts.3.gate_proj", or
 * "model.layers.0.mlp.experts" for fused experts. Granite's files have fused experts as
 * "...block_sparse_moe.input_linear.weight", and transformers' memory as
 * "...block_sparse_moe.experts.gate_up_proj". */
static struct moe_status module_name(const struct moe_checkpoint_context *c, size_t layer,
                                     enum moe_weight weight, uint32_t expert,
                                     char name[MOE_MODEL_NAME_MAX])
{
    MOE_TRY(moe_model_weight_name(c->model, layer, weight, expert, name));
    bool fused = moe_model_layer_fusion(c->model, layer).fused;
    char *last = strrchr(name, '.');
    bool is_linear = last != NULL && strcmp(last, ".weight") == 0;
    if (last == NULL || (!fused && !is_linear))
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "tensor %.120s belongs to no module", name);
    *last = '\0';
    last = strrchr(name, '.');
    if (fused && is_linear && last != NULL)
        snprintf(last, MOE_MODEL_NAME_MAX - (size_t)(last - name), ".experts");
    return moe_ok();
}

/* ------------------------------------------------------------------ the part of one slot */

/* A and B of the slot's experts. */
static struct moe_status write_part(const struct moe_checkpoint_context *c, int hidden,
                                    uint64_t *bytes)
{
    char file[MOE_CKPT_FILE_MAX];
    struct moe_ckpt_tensors tensors;
    size_t n = 0;
    moe_ckpt__state_file(file, c->slot, "safetensors");
    MOE_TRY(moe_ckpt__list(c, true, &tensors));
    for (size_t i = 0; i < tensors.count; i++) {
        const struct moe_ckpt_tensor *t = &tensors.list[i];
        if (t->key.part != MOE_PART_WEIGHT && t->key.tensor == MOE_TRAIN_VALUE)
            tensors.list[n++] = *t;
    }
    tensors.count = n;
    struct moe_status st = moe_ckpt__write_tensors(c, hidden, file, &tensors, bytes, NULL);
    moe_ckpt__list_free(&tensors);
    return st;
}

struct moe_status moe_checkpoint_export_begin(const struct moe_checkpoint_context *c,
                                              const char *name)
{
    int hidden = -1;
    char module[MOE_MODEL_NAME_MAX];
    for (size_t layer = 0; layer < c->layer_count; layer++) {
        if (moe_model_layer_fusion(c->model, layer).fused !=
            moe_model_layer_fusion(c->model, 0).fused)
            return named(
                moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                          "some layers of this model have fused experts and others do not"),
                name);
        for (enum moe_weight w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN; w++)
            MOE_TRY(named(module_name(c, layer, w, 0, module), name));
    }
    MOE_TRY(named(moe_ckpt__begin(c, name, &hidden), name));
    close(hidden);
    return moe_ok();
}

struct moe_status moe_checkpoint_export_write(const struct moe_checkpoint_context *c,
                                              const char *name, uint64_t *bytes)
{
    int hidden = -1;
    *bytes = 0;
    MOE_TRY(named(moe_ckpt__join(c, name, &hidden), name));
    struct moe_status st = write_part(c, hidden, bytes);
    close(hidden);
    return named(st, name);
}

/* ------------------------------------------------------------------ the file that PEFT reads */

/* One A or B of that file. */
struct adapter {
    size_t layer;
    enum moe_weight weight; /* fused: down, or gate for gate and up */
    uint32_t expert;        /* 0 if it is of all experts */
    enum moe_train_part part;
};

struct whole {
    const struct moe_checkpoint_context *context;
    struct moe_st_file *files[MOE_MAX_SLOTS]; /* the parts */
    struct moe_st_out *out;                   /* owns the names */
    struct adapter *from;
    size_t count, room;
};

static void free_whole(struct whole *w)
{
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++)
        moe_st_close(w->files[slot]);
    for (size_t i = 0; i < w->count; i++)
        free((char *)w->out[i].name);
    free(w->out);
    free(w->from);
}

static struct moe_status open_parts(struct whole *w, int hidden)
{
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++) {
        char file[MOE_CKPT_FILE_MAX];
        moe_ckpt__state_file(file, slot, "safetensors");
        if ((w->context->live >> slot & 1) != 0)
            MOE_TRY(moe_st_open_at(hidden, file, &w->files[slot]));
    }
    return moe_ok();
}

static struct moe_status remove_parts(const struct moe_checkpoint_context *c, int hidden)
{
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++) {
        char file[MOE_CKPT_FILE_MAX];
        moe_ckpt__state_file(file, slot, "safetensors");
        if ((c->live >> slot & 1) != 0 && unlinkat(hidden, file, 0) != 0)
            return moe_ckpt__io("removing a file");
    }
    return moe_ok();
}

static struct moe_status add(struct whole *w, const char *module, const struct adapter *a,
                             uint64_t rows, uint64_t columns)
{
    char name[PEFT_NAME_MAX];
    if (w->count == w->room) {
        size_t room = w->room > 0 ? 2 * w->room : 256;
        struct moe_st_out *out = reallocarray(w->out, room, sizeof *out);
        w->out = out != NULL ? out : w->out;
        struct adapter *from = reallocarray(w->from, room, sizeof *from);
        w->from = from != NULL ? from : w->from;
        if (out == NULL || from == NULL)
            return moe_ckpt__no_memory();
        w->room = room;
    }
    snprintf(name, sizeof name, "base_model.model.%s.lora_%c.weight", module,
             a->part == MOE_PART_LORA_A ? 'A' : 'B');
    char *copy = strdup(name);
    if (copy == NULL)
        return moe_ckpt__no_memory();
    w->from[w->count] = *a;
    w->out[w->count++] =
        (struct moe_st_out){.name = copy, .dtype = MOE_ST_F32, .rank = 2, .shape = {rows, columns}};
    return moe_ok();
}

static struct moe_status add_experts(struct whole *w, size_t layer, enum moe_weight weight)
{
    const struct moe_checkpoint_context *c = w->context;
    size_t rows, columns, rank = c->config->lora_rank;
    char module[MOE_MODEL_NAME_MAX];
    moe_weight_shape(c->specs[layer], weight, &rows, &columns);
    for (uint32_t e = 0; e < c->specs[layer]->experts; e++) {
        struct adapter a = {layer, weight, e, MOE_PART_LORA_A};
        MOE_TRY(module_name(c, layer, weight, e, module));
        MOE_TRY(add(w, module, &a, rank, columns));
        a.part = MOE_PART_LORA_B;
        MOE_TRY(add(w, module, &a, rows, rank));
    }
    return moe_ok();
}

/* PEFT wraps a module once per parameter, so the first parameter's adapter is inside the second's.
 */
static struct moe_status add_fused(struct whole *w, size_t layer, enum moe_weight weight)
{
    const struct moe_checkpoint_context *c = w->context;
    bool pair = weight == MOE_WEIGHT_GATE;
    size_t out, in, all = (size_t)c->config->lora_rank * c->specs[layer]->experts * (pair ? 2 : 1);
    char module[MOE_MODEL_NAME_MAX], inside[MOE_MODEL_NAME_MAX + 16];
    MOE_TRY(module_name(c, layer, weight, 0, module));
    snprintf(inside, sizeof inside, "%s%s", module, pair ? ".base_layer" : "");
    moe_weight_shape(c->specs[layer], weight, &out, &in);
    out *= pair ? 2 : 1;
    bool swapped = moe_model_layer_fusion(c->model, layer).input_first;
    struct adapter a = {layer, weight, 0, MOE_PART_LORA_A};
    MOE_TRY(add(w, inside, &a, all, swapped ? out : in));
    a.part = MOE_PART_LORA_B;
    return add(w, inside, &a, swapped ? in : out, all);
}

static struct moe_status list_whole(struct whole *w)
{
    const struct moe_checkpoint_context *c = w->context;
    for (size_t layer = 0; layer < c->layer_count; layer++) {
        bool fused = moe_model_layer_fusion(c->model, layer).fused;
        for (enum moe_weight k = MOE_WEIGHT_GATE; k <= MOE_WEIGHT_DOWN; k++) {
            if (!fused)
                MOE_TRY(add_experts(w, layer, k));
            else if (k != MOE_WEIGHT_UP) /* up is part of gate's */
                MOE_TRY(add_fused(w, layer, k));
        }
    }
    return moe_ok();
}

/* A or B of one expert, from the file of the slot that wrote it. */
static struct moe_status read_one(const struct whole *w, size_t layer, enum moe_weight weight,
                                  uint32_t expert, enum moe_train_part part, float *to,
                                  uint64_t bytes)
{
    char name[MOE_CKPT_TENSOR_MAX];
    const struct moe_train_key key = {weight, expert, part, MOE_TRAIN_VALUE};
    moe_ckpt__tensor_name(name, w->context->specs[layer], &key, false);
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++) {
        const struct moe_tensor *t =
            w->files[slot] != NULL ? moe_st_find(w->files[slot], name) : NULL;
        if (t != NULL && t->bytes == bytes)
            return moe_st_read(w->files[slot], t, 0, bytes, to);
    }
    return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "no slot wrote tensor %s", name);
}

/* Place of one weight's A or B in a fused one: rank j of expert e at `position` of the other
 * dimension. */
struct place {
    size_t experts, ranks; /* E, R */
    size_t rank;           /* first rank of this weight */
    size_t first, step;    /* position p of the weight is first + p step of the parameter */
    size_t width;          /* of the other dimension */
};

static void scatter(const struct place *to, enum moe_train_part as, size_t expert,
                    enum moe_train_part part, size_t rank, size_t positions, const float *value,
                    float *out)
{
    for (size_t j = 0; j < rank; j++)
        for (size_t p = 0; p < positions; p++) {
            size_t position = to->first + p * to->step, r = to->rank + j;
            size_t at = as == MOE_PART_LORA_A ? (expert * to->ranks + r) * to->width + position
                                              : (position * to->ranks + r) * to->experts + expert;
            out[at] = value[part == MOE_PART_LORA_A ? j * positions + p : p * rank + j];
        }
}

/* One weight of all experts into a fused A or B. */
static struct moe_status fill_weight(const struct whole *w, const struct adapter *a,
                                     enum moe_weight weight, float *out)
{
    const struct moe_checkpoint_context *c = w->context;
    struct moe_model_fusion fusion = moe_model_layer_fusion(c->model, a->layer);
    enum moe_train_part part = !fusion.input_first          ? a->part
                               : a->part == MOE_PART_LORA_A ? MOE_PART_LORA_B
                                                            : MOE_PART_LORA_A;
    bool pair = weight != MOE_WEIGHT_DOWN, rows = part == MOE_PART_LORA_B;
    size_t height, columns, rank = c->config->lora_rank;
    moe_weight_shape(c->specs[a->layer], weight, &height, &columns);
    size_t positions = rows ? height : columns, second = weight == MOE_WEIGHT_UP;
    struct place to = {.experts = c->specs[a->layer]->experts,
                       .ranks = pair ? 2 * rank : rank,
                       .rank = second * rank,
                       .step = pair && rows && fusion.interleaved ? 2 : 1,
                       .width = pair && rows ? 2 * positions : positions};
    if (pair && rows)
        to.first = fusion.interleaved ? second : second * positions;
    size_t bytes = rank * positions * sizeof(float);
    float *value = malloc(bytes);
    struct moe_status st = value != NULL ? moe_ok() : moe_ckpt__no_memory();
    for (uint32_t e = 0; e < to.experts && !moe_failed(&st); e++) {
        st = read_one(w, a->layer, weight, e, part, value, bytes);
        if (!moe_failed(&st))
            scatter(&to, a->part, e, part, rank, positions, value, out);
    }
    free(value);
    return st;
}

static struct moe_status fill(void *ctx, size_t i, void *to, uint64_t bytes)
{
    const struct whole *w = ctx;
    const struct adapter *a = &w->from[i];
    const struct moe_checkpoint_context *c = w->context;
    memset(to, 0, (size_t)bytes);
    if (!moe_model_layer_fusion(c->model, a->layer).fused)
        return targeted(c, a->weight)
                   ? read_one(w, a->layer, a->weight, a->expert, a->part, to, bytes)
                   : moe_ok();
    if (targeted(c, a->weight))
        MOE_TRY(fill_weight(w, a, a->weight, to));
    if (a->weight == MOE_WEIGHT_GATE && targeted(c, MOE_WEIGHT_UP))
        MOE_TRY(fill_weight(w, a, MOE_WEIGHT_UP, to));
    return moe_ok();
}

static struct moe_status join_parts(const struct moe_checkpoint_context *c, int hidden)
{
    uint64_t bytes;
    struct whole w = {.context = c};
    struct moe_status st;
    MOE_TRY_GOTO(st, open_parts(&w, hidden), done);
    MOE_TRY_GOTO(st, list_whole(&w), done);
    MOE_TRY_GOTO(st,
                 moe_st_write_at(hidden, ADAPTER_FILE, w.out, w.count, moe_ckpt__metadata, fill, &w,
                                 &bytes, NULL),
                 done);
    st = remove_parts(c, hidden);
done:
    free_whole(&w);
    return st;
}

/* ----------------------------------------------------------------------- its configuration */

/* "experts.3.gate_proj" and so on: ends of module names, long enough to exclude modules of dense
 * layers and shared experts with the same last name. They find experts with a module per
 * projection; target_parameters below finds experts that transformers fuses in memory. If the
 * model's files fuse experts too, the list is empty, so that PEFT chooses no modules itself. */
static struct moe_status target_modules(const struct moe_checkpoint_context *c, json_t **out)
{
    char module[MOE_MODEL_NAME_MAX];
    struct moe_status st = moe_ok();
    uint32_t experts =
        moe_model_layer_fusion(c->model, 0).fused ? 0 : moe_model_layer(c->model, 0)->experts;
    *out = json_array();
    for (uint32_t e = 0; e < experts; e++)
        for (enum moe_weight w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN; w++) {
            MOE_TRY_GOTO(st, module_name(c, 0, w, e, module), fail);
            const char *end = strstr(module, "experts.");
            if (end == NULL || json_array_append_new(*out, json_string(end)) != 0) {
                st = moe_ckpt__no_memory();
                goto fail;
            }
        }
    return *out != NULL ? st : moe_ckpt__no_memory();
fail:
    json_decref(*out);
    return st;
}

static json_t *number(double value)
{
    bool whole = value == floor(value) && fabs(value) < 1e9;
    return whole ? json_integer((json_int_t)value) : json_real(value);
}

/* The parameters of fused experts. Gate and up share one, so its rank and alpha are doubled. */
static struct moe_status add_parameters(const struct moe_checkpoint_context *c, json_t *config)
{
    static const char pair[] = ".*\\.gate_up_proj";
    json_t *more =
        json_pack("{s:[s, s], s:{s:I}, s:{s:o}}", "target_parameters", "experts.gate_up_proj",
                  "experts.down_proj", "rank_pattern", pair, 2 * (json_int_t)c->config->lora_rank,
                  "alpha_pattern", pair, number(2 * (double)c->config->lora_alpha));
    int bad = json_object_update(config, more);
    json_decref(more);
    return bad == 0 ? moe_ok() : moe_ckpt__no_memory();
}

static struct moe_status write_config(const struct moe_checkpoint_context *c, int hidden)
{
    json_t *modules = NULL;
    MOE_TRY(target_modules(c, &modules));
    json_t *config =
        json_pack("{s:s, s:s, s:s, s:s, s:i, s:o, s:o, s:f, s:b, s:b, s:b}", "peft_type", "LORA",
                  "task_type", "CAUSAL_LM", "base_model_name_or_path", moe_model_path(c->model),
                  "bias", "none", "r", (int)c->config->lora_rank, "lora_alpha",
                  number((double)c->config->lora_alpha), "target_modules", modules, "lora_dropout",
                  0.0, "fan_in_fan_out", 0, "inference_mode", 1, "use_rslora", 0);
    if (config == NULL)
        return moe_ckpt__no_memory();
    struct moe_status st = add_parameters(c, config);
    if (!moe_failed(&st))
        st = moe_ckpt__write_json(hidden, ADAPTER_CONFIG, config, NULL);
    json_decref(config);
    return st;
}

struct moe_status moe_checkpoint_export_commit(const struct moe_checkpoint_context *c,
                                               const char *name)
{
    const uint32_t others = 1U << MOE_PARAMS_ROUTER | 1U << MOE_PARAMS_SHARED;
    int hidden = -1;
    if ((c->config->frozen & others) != others)
        moe_log_warn("adapter %s has the experts' adapters only; without --freeze router,shared, "
                     "routers and shared experts may have learnt too",
                     name);
    MOE_TRY(named(moe_ckpt__join(c, name, &hidden), name));
    struct moe_status st = join_parts(c, hidden);
    if (!moe_failed(&st))
        st = write_config(c, hidden);
    if (!moe_failed(&st))
        st = moe_ckpt__sync(hidden);
    close(hidden);
    if (!moe_failed(&st))
        st = moe_ckpt__publish(c, name);
    return named(st, name);
}
