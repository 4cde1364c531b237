/* SPDX-License-Identifier: Apache-2.0 */
/* A trainer's memory and its tensors; see trainer.h. Computes no gradient. */
#include "cpu/training/trainer.h"

#include "base/size.h"
#include "common/layer_rules.h"

#include <stdlib.h>

enum { ALIGN = 64 }; /* of every array in the block */

/* ---------------------------------------------------------------------- memory */

/* Allocates arrays from a block; without a block it only counts bytes. */
struct carver {
    char *block;
    size_t used;
    bool overflow;
};

static void *carve(struct carver *c, size_t n, size_t each, size_t entries)
{
    size_t bytes, end;
    if (!moe_size_mul3(n, each, entries, &bytes) || !moe_size_round_up(bytes, ALIGN, &bytes) ||
        !moe_size_add(c->used, bytes, &end)) {
        c->overflow = true;
        return NULL;
    }
    void *p = c->block != NULL ? c->block + c->used : NULL;
    c->used = end;
    return p;
}

static void carve_param(const struct moe_trainer *t, struct carver *c, struct moe_cpu_param *p)
{
    p->entries = moe_cpu_layer_entries(t->layer, p->what.weight);
    p->n = (size_t)p->what.rows * p->what.columns;
    p->value = carve(c, p->n, sizeof(float), p->entries);
    p->grad = carve(c, p->n, sizeof(float), p->entries);
    p->moment1 = carve(c, p->n, sizeof(float), p->entries);
    p->moment2 = NULL;
    if (t->config.optimizer == MOE_OPTIMIZER_ADAMW)
        p->moment2 = carve(c, p->n, sizeof(float), p->entries);
}

/* W0 of every local expert, and the resident weight with the adapter. One of them has its memory
 * here: W0 in the layout of the resident weight, or, if W0 is quantised, the resident weight in
 * BF16. W0 keeps the layer's memory then, and gives it back (free_base). */
static void carve_base(struct moe_trainer *t, struct carver *c, enum moe_weight w)
{
    uint32_t entries = t->layer->local_experts;
    struct moe_cpu_matrix *base = carve(c, sizeof *base, 1, entries);
    t->base[w] = base;
    for (uint32_t i = 0; i < entries; i++) {
        struct moe_cpu_matrix *resident = &t->layer->matrix[w][i], merged = *resident;
        bool quantised = resident->dtype == MOE_DTYPE_NONE;
        if (quantised) {
            struct moe_status st = moe_cpu_matrix_shape(t->layer->device, resident->out,
                                                        resident->in, MOE_DTYPE_BF16, &merged);
            c->overflow |= moe_failed(&st);
        }
        merged.data = carve(c, merged.bytes, 1, 1);
        if (c->block == NULL)
            continue;
        base[i] = quantised ? *resident : merged;
        if (quantised)
            *resident = merged;
    }
}

/* Gives the layer its quantised weights back. */
static void free_base(struct moe_trainer *t)
{
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (uint32_t i = 0; t->base[w] != NULL && i < t->layer->local_experts; i++)
            if (t->base[w][i].dtype == MOE_DTYPE_NONE)
                t->layer->matrix[w][i] = t->base[w][i];
}

/* Lays out all arrays for t->layer and t->config. */
static void carve_all(struct moe_trainer *t, struct carver *c)
{
    struct moe_train_param what[MOE_TRAIN_MAX_PARAMS];
    t->params = moe_train_params(&t->layer->spec, &t->config, what);
    for (uint32_t i = 0; i < t->params; i++) {
        t->param[i].what = what[i];
        carve_param(t, c, &t->param[i]);
        if (what[i].part == MOE_PART_LORA_A)
            carve_base(t, c, what[i].weight);
    }
    t->loads = carve(c, t->layer->spec.experts, sizeof *t->loads, 1);
}

static struct moe_status count_bytes(struct moe_trainer *t)
{
    struct carver counter = {0};
    MOE_TRY(moe_trainer_check(&t->layer->spec, &t->config));
    if (!t->layer->finished)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_MISSING,
                         "layer %u is not finished", t->layer->spec.layer);
    carve_all(t, &counter);
    if (counter.overflow)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "a trainer of that size does not fit");
    t->bytes = counter.used;
    return moe_ok();
}

struct moe_status moe_cpu_trainer_bytes(struct moe_layer *layer,
                                        const struct moe_trainer_config *config, uint64_t *bytes)
{
    struct moe_trainer t = {.layer = layer, .config = *config};
    MOE_TRY(count_bytes(&t));
    *bytes = t.bytes;
    return moe_ok();
}

/* --------------------------------------------------------------- initial values */

typedef void (*read_fn)(struct moe_device *, const struct moe_cpu_matrix *, float *);

static void read_resident(const struct moe_layer *layer, enum moe_weight w, uint32_t entry,
                          float *data, read_fn read)
{
    size_t rows, columns;
    moe_weight_shape(&layer->spec, w, &rows, &columns);
    if (moe_weight_is_bias(w))
        memcpy(data, layer->bias[w] + entry * rows, rows * sizeof *data);
    else
        read(layer->device, &layer->matrix[w][entry], data);
}

static void init_lora(struct moe_trainer *t, const struct moe_cpu_param *p, uint32_t entry)
{
    float *a = p->value + entry * p->n;
    uint32_t expert = t->layer->local[entry];
    for (size_t i = 0; i < p->n; i++)
        a[i] = moe_lora_initial(t->config.lora_seed, t->layer->spec.layer, expert, p->what.weight,
                                i, p->what.columns);
    const struct moe_cpu_matrix *base = &t->base[p->what.weight][entry];
    if (base->dtype != MOE_DTYPE_NONE)
        memcpy(base->data, t->layer->matrix[p->what.weight][entry].data, base->bytes);
}

/* The resident weights of a quantised W0, when A and B have values. */
static void init_merged(struct moe_trainer *t, enum moe_weight w)
{
    for (uint32_t e = 0; e < t->layer->local_experts; e++)
        if (t->base[w][e].dtype == MOE_DTYPE_NONE)
            moe_cpu_trainer_renew(t, w, e);
}

/* The block is zero: B, gradients and moments need no store. */
static void init_values(struct moe_trainer *t)
{
    for (uint32_t i = 0; i < t->params; i++) {
        struct moe_cpu_param *p = &t->param[i];
        for (uint32_t e = 0; e < p->entries; e++)
            if (p->what.part == MOE_PART_WEIGHT)
                read_resident(t->layer, p->what.weight, e, p->value + e * p->n,
                              moe_cpu_matrix_read);
            else if (p->what.part == MOE_PART_LORA_A)
                init_lora(t, p, e);
    }
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        if (t->base[w] != NULL)
            init_merged(t, w);
}

struct moe_status moe_cpu_trainer_create(struct moe_layer *layer,
                                         const struct moe_trainer_config *config,
                                         struct moe_trainer **out)
{
    if (layer->has_trainer)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE, "layer %u has a trainer already",
                         layer->spec.layer);
    struct moe_trainer *t = calloc(1, sizeof *t);
    if (t == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for a trainer");
    t->layer = layer;
    t->config = *config;
    t->frozen = config->frozen;
    struct moe_status st;
    MOE_TRY_GOTO(st, count_bytes(t), fail);
    MOE_TRY_GOTO(st, moe_cpu_mem_alloc(layer->device, MOE_MEM_DEVICE, t->bytes, &t->block), fail);
    struct carver carver = {.block = t->block};
    carve_all(t, &carver);
    init_values(t);
    layer->has_trainer = true;
    *out = t;
    return st;
fail:
    free(t);
    return st;
}

void moe_cpu_trainer_destroy(struct moe_trainer *t)
{
    if (t == NULL)
        return;
    t->layer->has_trainer = false;
    free_base(t);
    moe_activation_cache_drop(moe_cpu_device_activation_cache(t->layer->device), t->layer, 0);
    moe_cpu_mem_free(t->layer->device, MOE_MEM_DEVICE, t->block, t->bytes);
    free(t);
}

/* --------------------------------------------------------------------- tensors */

struct moe_cpu_param *moe_cpu_trainer_param(struct moe_trainer *t, enum moe_weight weight,
                                            enum moe_train_part part)
{
    for (uint32_t i = 0; i < t->params; i++)
        if (t->param[i].what.weight == weight && t->param[i].what.part == part)
            return &t->param[i];
    return NULL;
}

float *moe_cpu_trainer_grad(struct moe_trainer *t, enum moe_weight weight, enum moe_train_part part,
                            uint32_t entry)
{
    struct moe_cpu_param *p = moe_cpu_trainer_param(t, weight, part);
    if (p == NULL || (t->frozen >> moe_weight_group(weight) & 1))
        return NULL;
    return p->grad + entry * p->n;
}

void moe_cpu_trainer_renew(struct moe_trainer *t, enum moe_weight w, uint32_t entry)
{
    struct moe_layer *layer = t->layer;
    const struct moe_cpu_param *p = moe_cpu_trainer_param(t, w, MOE_PART_WEIGHT);
    if (p != NULL && moe_weight_is_bias(w)) {
        memcpy(layer->bias[w] + entry * p->n, p->value + entry * p->n, p->n * sizeof(float));
    } else if (p != NULL) {
        moe_cpu_matrix_renew(layer->device, &layer->matrix[w][entry], p->value + entry * p->n);
    } else if (t->base[w] != NULL) {
        const struct moe_cpu_param *a = moe_cpu_trainer_param(t, w, MOE_PART_LORA_A);
        const struct moe_cpu_param *b = moe_cpu_trainer_param(t, w, MOE_PART_LORA_B);
        moe_cpu_matrix_merge(layer->device, &layer->matrix[w][entry], &t->base[w][entry],
                             moe_cpu_trainer_lora_scale(t), t->config.lora_rank,
                             a->value + entry * a->n, b->value + entry * b->n);
    }
}

static struct moe_status find_entry(const struct moe_layer *layer, const struct moe_train_key *key,
                                    uint32_t *entry)
{
    *entry = 0;
    if (!moe_weight_is_expert(key->weight))
        return moe_ok();
    if (key->expert >= layer->spec.experts || layer->local_index[key->expert] < 0)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_EXPERT_INDEX_RANGE,
                         "expert %u is not on slot %u", key->expert, layer->slot);
    *entry = (uint32_t)layer->local_index[key->expert];
    return moe_ok();
}

static float *tensor_of(const struct moe_cpu_param *p, enum moe_train_tensor tensor, uint32_t entry)
{
    float *const all[] = {p->value, p->grad, p->moment1, p->moment2};
    return all[tensor] + entry * p->n;
}

/* Does not use the pool, which may be busy with a step. */
struct moe_status moe_cpu_trainer_read(struct moe_trainer *t, const struct moe_train_key *key,
                                       float *data, size_t bytes)
{
    struct moe_train_place at;
    uint32_t entry;
    MOE_TRY(moe_train_find(&t->layer->spec, &t->config, key, bytes, &at));
    MOE_TRY(find_entry(t->layer, key, &entry));
    if (key->tensor == MOE_TRAIN_BASE)
        moe_cpu_matrix_read_serial(t->layer->device, &t->base[key->weight][entry], data);
    else if (at.param < 0)
        read_resident(t->layer, key->weight, entry, data, moe_cpu_matrix_read_serial);
    else
        memcpy(data, tensor_of(&t->param[at.param], key->tensor, entry), bytes);
    return moe_ok();
}

/* Writes a resident weight without a master, or W0 of an adapter. */
static void write_resident(struct moe_trainer *t, enum moe_weight w, uint32_t entry,
                           const float *data, size_t bytes)
{
    struct moe_layer *layer = t->layer;
    if (moe_weight_is_bias(w)) {
        memcpy(layer->bias[w] + entry * (bytes / sizeof *data), data, bytes);
        return;
    }
    const struct moe_cpu_matrix *to = t->base[w] != NULL ? t->base[w] : layer->matrix[w];
    moe_cpu_matrix_renew(layer->device, &to[entry], data);
    moe_cpu_trainer_renew(t, w, entry);
}

/* Backends may differ in the last bit of a value with the scale of a whole matrix. */
static bool is_same(float own, float given)
{
    return moe_f32_to_bf16(own) == moe_f32_to_bf16(given) ||
           fabsf(own - given) <= 0x1p-22f * fabsf(own);
}

/* A quantised weight does not change: only what it has can be written. */
static struct moe_status check_same(struct moe_trainer *t, const struct moe_train_key *key,
                                    uint32_t entry, const float *data, size_t bytes)
{
    const struct moe_cpu_matrix *base = t->base[key->weight] != NULL
                                            ? &t->base[key->weight][entry]
                                            : &t->layer->matrix[key->weight][entry];
    float *own = malloc(bytes + 1);
    if (own == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory to compare weights");
    moe_cpu_matrix_read_serial(t->layer->device, base, own);
    size_t same = 0, count = bytes / sizeof *data;
    while (same < count && is_same(own[same], data[same]))
        same++;
    free(own);
    if (same == count)
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH,
                     "%s of expert %u is quantised, and cannot become other values",
                     moe_weight_name(key->weight), key->expert);
}

struct moe_status moe_cpu_trainer_write(struct moe_trainer *t, const struct moe_train_key *key,
                                        const float *data, size_t bytes)
{
    struct moe_train_place at;
    uint32_t entry;
    MOE_TRY(moe_train_find(&t->layer->spec, &t->config, key, bytes, &at));
    MOE_TRY(moe_train_check_writable(key));
    MOE_TRY(find_entry(t->layer, key, &entry));
    if (at.param < 0 && moe_weight_format_of(&t->layer->spec, key->weight) != NULL)
        return check_same(t, key, entry, data, bytes);
    if (key->tensor == MOE_TRAIN_VALUE)
        moe_activation_cache_drop(moe_cpu_device_activation_cache(t->layer->device), t->layer, 0);
    if (at.param < 0) {
        write_resident(t, key->weight, entry, data, bytes);
        return moe_ok();
    }
    memcpy(tensor_of(&t->param[at.param], key->tensor, entry), data, bytes);
    if (key->tensor == MOE_TRAIN_VALUE)
        moe_cpu_trainer_renew(t, key->weight, entry);
    return moe_ok();
}

/* ------------------------------------------------------------------- gradients */

struct zero_job {
    float *data;
    size_t n;
};

enum { ZERO_CHUNK = 1 << 18 };

static void zero_item(void *ctx, uint32_t item)
{
    const struct zero_job *job = ctx;
    size_t first = (size_t)item * ZERO_CHUNK, left = job->n - first;
    memset(job->data + first, 0, (left < ZERO_CHUNK ? left : ZERO_CHUNK) * sizeof(float));
}

static void zero_param(struct moe_trainer *t, const struct moe_cpu_param *p)
{
    struct zero_job job = {p->grad, p->n * p->entries};
    moe_cpu_parallel(t->layer->device, (uint32_t)((job.n + ZERO_CHUNK - 1) / ZERO_CHUNK), zero_item,
                     &job);
}

struct moe_status moe_cpu_zero_grad(struct moe_trainer *t)
{
    for (uint32_t i = 0; i < t->params; i++)
        zero_param(t, &t->param[i]);
    memset(t->loads, 0, t->layer->spec.experts * sizeof *t->loads);
    return moe_ok();
}

struct moe_status moe_cpu_set_frozen(struct moe_trainer *t, uint32_t frozen)
{
    MOE_TRY(moe_train_check_frozen(&t->config, frozen));
    for (uint32_t i = 0; i < t->params; i++)
        if (frozen >> moe_weight_group(t->param[i].what.weight) & 1)
            zero_param(t, &t->param[i]);
    t->frozen = frozen;
    return moe_ok();
}
