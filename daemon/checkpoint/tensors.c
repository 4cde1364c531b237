/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a trainer's state: their names, and the slot that writes each.
 *
 * Names have layers and experts, not slots, so that any number of workers in any placement can load
 * a checkpoint. */
#include "checkpoint/internal.h"

#include "common/layer_rules.h"
#include "common/training_rules.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const weight_names[MOE_WEIGHT_COUNT] = {
    [MOE_WEIGHT_ROUTER] = "router",
    [MOE_WEIGHT_LOGIT_BIAS] = "logit_bias",
    [MOE_WEIGHT_SELECT_BIAS] = "select_bias",
    [MOE_WEIGHT_GATE] = "gate",
    [MOE_WEIGHT_UP] = "up",
    [MOE_WEIGHT_DOWN] = "down",
    [MOE_WEIGHT_GATE_BIAS] = "gate_bias",
    [MOE_WEIGHT_UP_BIAS] = "up_bias",
    [MOE_WEIGHT_DOWN_BIAS] = "down_bias",
    [MOE_WEIGHT_SHARED_GATE] = "shared_gate",
    [MOE_WEIGHT_SHARED_UP] = "shared_up",
    [MOE_WEIGHT_SHARED_DOWN] = "shared_down",
    [MOE_WEIGHT_SHARED_GATE_VECTOR] = "shared_gate_vector",
    [MOE_WEIGHT_TO_LATENT] = "to_latent",
    [MOE_WEIGHT_FROM_LATENT] = "from_latent",
    [MOE_WEIGHT_LATENT_NORM] = "latent_norm",
};

bool moe_ckpt__is_lowest(const struct moe_checkpoint_context *c)
{
    return c->live != 0 && c->slot == (uint32_t)__builtin_ctzll(c->live);
}

/* True if the trainer has the weight itself, or with `adapted` an adapter of it. */
static bool has_param(const struct moe_checkpoint_context *c, size_t layer, enum moe_weight weight,
                      bool adapted)
{
    struct moe_train_param params[MOE_TRAIN_MAX_PARAMS];
    uint32_t n = moe_train_params(c->specs[layer], c->config, params);
    for (uint32_t i = 0; i < n; i++)
        if (params[i].weight == weight && (adapted || params[i].part == MOE_PART_WEIGHT))
            return true;
    return weight == MOE_WEIGHT_SELECT_BIAS;
}

bool moe_ckpt__has_master(const struct moe_checkpoint_context *c, size_t layer,
                          enum moe_weight weight)
{
    return has_param(c, layer, weight, false);
}

bool moe_ckpt__has_value(const struct moe_checkpoint_context *c, size_t layer,
                         enum moe_weight weight)
{
    return has_param(c, layer, weight, true);
}

/* True if this slot writes the expert: it has the first live copy. */
static bool writes_expert(const struct moe_checkpoint_context *c, size_t layer, uint32_t expert)
{
    const struct moe_placement *p = &c->placements[layer];
    for (uint32_t i = p->offset[expert]; i < p->offset[expert + 1]; i++)
        if ((c->live >> p->slot[i] & 1) != 0)
            return p->slot[i] == c->slot;
    return false;
}

size_t moe_ckpt__experts(const struct moe_checkpoint_context *c, size_t layer, bool writing,
                         uint32_t experts[MOE_MAX_EXPERTS])
{
    size_t n = 0;
    for (uint32_t e = 0; e < c->specs[layer]->experts; e++)
        if (writing ? writes_expert(c, layer, e)
                    : moe_placement_has(&c->placements[layer], e, c->slot))
            experts[n++] = e;
    return n;
}

void moe_ckpt__tensor_name(char name[MOE_CKPT_TENSOR_MAX], const struct moe_layer_spec *spec,
                           const struct moe_train_key *key, bool base)
{
    static const char *const parts[] = {"", ".lora_A", ".lora_B"};
    static const char *const tensors[] = {"value", "grad", "moment1", "moment2", "base"};
    const char *weight = weight_names[key->weight],
               *what = tensors[base ? MOE_TRAIN_BASE : key->tensor];
    if (moe_weight_is_expert(key->weight))
        snprintf(name, MOE_CKPT_TENSOR_MAX, "layers.%u.experts.%u.%s%s.%s", spec->layer,
                 key->expert, weight, parts[key->part], what);
    else
        snprintf(name, MOE_CKPT_TENSOR_MAX, "layers.%u.%s.%s", spec->layer, weight, what);
}

static struct moe_status add(struct moe_ckpt_tensors *t, const struct moe_checkpoint_context *c,
                             size_t layer, const struct moe_train_param *p, uint32_t expert,
                             enum moe_train_tensor tensor, bool base)
{
    if (t->count == t->room) {
        size_t room = t->room > 0 ? 2 * t->room : 256;
        struct moe_ckpt_tensor *list = reallocarray(t->list, room, sizeof *list);
        if (list == NULL)
            return moe_ckpt__no_memory();
        t->list = list;
        t->room = room;
    }
    struct moe_ckpt_tensor *to = &t->list[t->count++];
    *to = (struct moe_ckpt_tensor){.layer = layer,
                                   .key = {p->weight, expert, p->part, tensor},
                                   .base = base,
                                   .rows = p->rows,
                                   .columns = p->columns};
    moe_ckpt__tensor_name(to->name, c->specs[layer], &to->key, base);
    return moe_ok();
}

/* One parameter: W0 before the adapter on it, the value before its moments. */
static struct moe_status add_param(struct moe_ckpt_tensors *t,
                                   const struct moe_checkpoint_context *c, size_t layer,
                                   const struct moe_train_param *p, uint32_t expert)
{
    if (p->part == MOE_PART_LORA_A) {
        struct moe_train_param whole = {.weight = p->weight, .part = MOE_PART_WEIGHT};
        size_t rows, columns;
        moe_weight_shape(c->specs[layer], p->weight, &rows, &columns);
        whole.rows = (uint32_t)rows;
        whole.columns = (uint32_t)columns;
        MOE_TRY(add(t, c, layer, &whole, expert, MOE_TRAIN_VALUE, true));
    }
    MOE_TRY(add(t, c, layer, p, expert, MOE_TRAIN_VALUE, false));
    MOE_TRY(add(t, c, layer, p, expert, MOE_TRAIN_MOMENT1, false));
    if (c->config->optimizer == MOE_OPTIMIZER_ADAMW)
        MOE_TRY(add(t, c, layer, p, expert, MOE_TRAIN_MOMENT2, false));
    return moe_ok();
}

static struct moe_status add_layer(struct moe_ckpt_tensors *t,
                                   const struct moe_checkpoint_context *c, size_t layer,
                                   bool writing)
{
    struct moe_train_param params[MOE_TRAIN_MAX_PARAMS];
    uint32_t experts[MOE_MAX_EXPERTS];
    size_t rows, columns, held = moe_ckpt__experts(c, layer, writing, experts);
    uint32_t n = moe_train_params(c->specs[layer], c->config, params);
    bool replicated = !writing || moe_ckpt__is_lowest(c);
    moe_weight_shape(c->specs[layer], MOE_WEIGHT_SELECT_BIAS, &rows, &columns);
    if (replicated && rows > 0) { /* moved by the balance rule, in fp32 */
        const struct moe_train_param bias = {MOE_WEIGHT_SELECT_BIAS, MOE_PART_WEIGHT,
                                             (uint32_t)rows, (uint32_t)columns};
        MOE_TRY(add(t, c, layer, &bias, 0, MOE_TRAIN_VALUE, false));
    }
    for (uint32_t i = 0; i < n; i++) {
        if (!moe_weight_is_expert(params[i].weight) && replicated)
            MOE_TRY(add_param(t, c, layer, &params[i], 0));
        for (size_t e = 0; moe_weight_is_expert(params[i].weight) && e < held; e++)
            MOE_TRY(add_param(t, c, layer, &params[i], experts[e]));
    }
    return moe_ok();
}

struct moe_status moe_ckpt__list(const struct moe_checkpoint_context *c, bool writing,
                                 struct moe_ckpt_tensors *out)
{
    *out = (struct moe_ckpt_tensors){0};
    for (size_t i = 0; i < c->layer_count; i++) {
        struct moe_status st = add_layer(out, c, i, writing);
        if (moe_failed(&st)) {
            moe_ckpt__list_free(out);
            return st;
        }
    }
    return moe_ok();
}

/* Weights of one layer that have no value in the state. */
static struct moe_status add_values(struct moe_ckpt_tensors *t,
                                    const struct moe_checkpoint_context *c, size_t layer)
{
    uint32_t experts[MOE_MAX_EXPERTS];
    size_t held = moe_ckpt__experts(c, layer, true, experts);
    for (unsigned w = 0; w < MOE_WEIGHT_COUNT; w++) {
        size_t rows, columns;
        enum moe_weight weight = (enum moe_weight)w;
        moe_weight_shape(c->specs[layer], weight, &rows, &columns);
        if (rows == 0 || moe_ckpt__has_master(c, layer, weight))
            continue;
        const struct moe_train_param p = {weight, MOE_PART_WEIGHT, (uint32_t)rows,
                                          (uint32_t)columns};
        size_t n = moe_weight_is_expert(weight) ? held : moe_ckpt__is_lowest(c);
        for (size_t e = 0; e < n; e++)
            MOE_TRY(add(t, c, layer, &p, moe_weight_is_expert(weight) ? experts[e] : 0,
                        MOE_TRAIN_VALUE, false));
    }
    return moe_ok();
}

struct moe_status moe_ckpt__list_copied(const struct moe_checkpoint_context *c,
                                        struct moe_ckpt_tensors *out)
{
    MOE_TRY(moe_ckpt__list(c, true, out));
    struct moe_status st = moe_ok();
    for (size_t i = 0; i < c->layer_count && !moe_failed(&st); i++)
        st = add_values(out, c, i);
    if (moe_failed(&st))
        moe_ckpt__list_free(out);
    return st;
}

void moe_ckpt__list_free(struct moe_ckpt_tensors *t)
{
    free(t->list);
    *t = (struct moe_ckpt_tensors){0};
}

/* -------------------------------------------------------------------------- writing */

const char *const moe_ckpt__metadata[] = {"format", "pt", NULL};

struct source {
    const struct moe_checkpoint_context *context;
    const struct moe_ckpt_tensors *tensors;
};

static struct moe_status read_tensor(void *ctx, size_t i, void *to, uint64_t bytes)
{
    const struct source *s = ctx;
    return moe_ckpt__read(s->context, &s->tensors->list[i], to, (size_t)bytes);
}

struct moe_status moe_ckpt__write_tensors(const struct moe_checkpoint_context *c, int at,
                                          const char *file, const struct moe_ckpt_tensors *tensors,
                                          uint64_t *bytes, char *sha256)
{
    struct source source = {c, tensors};
    struct moe_st_out *out = calloc(tensors->count + 1, sizeof *out);
    if (out == NULL)
        return moe_ckpt__no_memory();
    for (size_t i = 0; i < tensors->count; i++)
        out[i] = (struct moe_st_out){.name = tensors->list[i].name,
                                     .dtype = MOE_ST_F32,
                                     .rank = 2,
                                     .shape = {tensors->list[i].rows, tensors->list[i].columns}};
    struct moe_status st = moe_st_write_at(at, file, out, tensors->count, moe_ckpt__metadata,
                                           read_tensor, &source, bytes, sha256);
    free(out);
    return st;
}
