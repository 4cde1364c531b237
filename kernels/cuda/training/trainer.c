/* SPDX-License-Identifier: Apache-2.0 */
/* A trainer's memory, and reading and writing it; see trainer.h. */
#include "cuda/training/trainer.h"

#include "base/size.h"
#include "common/activation_cache.h"
#include "common/layer_rules.h"

#include <stdlib.h>

enum { LINE = 256 };

static bool is_up(enum moe_weight w)
{
    return w == MOE_WEIGHT_UP || w == MOE_WEIGHT_SHARED_UP;
}

static enum moe_weight stored_with(enum moe_weight w)
{
    return w == MOE_WEIGHT_UP          ? MOE_WEIGHT_GATE
           : w == MOE_WEIGHT_SHARED_UP ? MOE_WEIGHT_SHARED_GATE
                                       : w;
}

/* ---------------------------------------------------------------------- layout */

static void describe_block(const struct moe_layer *layer, const struct moe_train_param *param,
                           struct moe_cuda_block *b)
{
    enum moe_cuda_rows order;
    *b = (struct moe_cuda_block){.weight = param->weight,
                                 .part = param->part,
                                 .expert = moe_weight_is_expert(param->weight),
                                 .columns = param->columns,
                                 .n = (size_t)param->rows * param->columns};
    b->entries = b->expert ? layer->local_experts : 1;
    if (param->part != MOE_PART_WEIGHT) {
        b->kind = MOE_CUDA_BLOCK_ADAPTER;
    } else if (moe_weight_is_bias(param->weight)) {
        b->kind = MOE_CUDA_BLOCK_BIAS;
    } else {
        b->kind = MOE_CUDA_BLOCK_MATRIX;
        b->matrix = moe_cuda_layer_matrix(param->weight, &order);
        b->n = (size_t)layer->desc.matrix[b->matrix].rows * param->columns;
    }
}

/* Everything that is allocated at once: offsets into one allocation, the blocks' as pointers from
 * NULL. Sizes are small multiples of resident weights, so only their sum is checked. */
struct plan {
    uint32_t blocks;
    struct moe_cuda_block block[MOE_TRAIN_MAX_PARAMS];
    struct moe_cuda_matrix
        base[MOE_CUDA_ADAPTED_MATRICES]; /* their memory, as pointers from NULL */
    size_t loads, counted, sums, bytes;
};

static bool take(size_t *at, size_t bytes, size_t *offset)
{
    *offset = *at;
    return moe_size_add(*at, bytes, at) && moe_size_round_up(*at, LINE, at);
}

static bool plan_block(struct moe_cuda_block *b, enum moe_optimizer optimizer, size_t *at)
{
    size_t bytes, offset[4] = {0};
    if (!moe_size_mul3(b->entries, b->n, sizeof(float), &bytes))
        return false;
    for (int i = 0; i < (optimizer == MOE_OPTIMIZER_ADAMW ? 4 : 3); i++)
        if (!take(at, bytes, &offset[i]))
            return false;
    b->value = (void *)offset[0];
    b->grad = (void *)offset[1];
    b->moment1 = (void *)offset[2];
    b->moment2 = (void *)offset[3];
    return true;
}

static const enum moe_cuda_matrices adapted[MOE_CUDA_ADAPTED_MATRICES] = {MOE_CUDA_GATE_UP,
                                                                          MOE_CUDA_DOWN};

static bool is_adapted(const struct moe_trainer_config *c, enum moe_cuda_matrices m)
{
    if (c->frozen >> MOE_PARAMS_EXPERTS & 1)
        return false;
    return m == MOE_CUDA_DOWN
               ? moe_train_is_adapted(c, MOE_WEIGHT_DOWN)
               : moe_train_is_adapted(c, MOE_WEIGHT_GATE) || moe_train_is_adapted(c, MOE_WEIGHT_UP);
}

/* Room for another matrix like this one, in BF16 if it is packed. */
static bool plan_base(const struct moe_cuda_matrix *like, size_t *at, struct moe_cuda_matrix *base)
{
    size_t offset;
    *base = *like;
    if (like->packing != MOE_CUDA_PACKING_NONE) {
        base->packing = MOE_CUDA_PACKING_NONE;
        base->dtype = MOE_DTYPE_BF16;
        /* layer_create checked that fp32 would not overflow. */
        base->bytes = (size_t)like->entries * like->rows * like->columns * sizeof(uint16_t);
    }
    if (!take(at, base->bytes, &offset))
        return false;
    base->data = (void *)offset;
    return true;
}

static struct moe_status make_plan(const struct moe_layer *layer,
                                   const struct moe_trainer_config *c, struct plan *p)
{
    struct moe_train_param params[MOE_TRAIN_MAX_PARAMS];
    MOE_TRY(moe_trainer_check(&layer->spec, c));
    uint32_t n = moe_train_params(&layer->spec, c, params);
    size_t at = 0;
    bool fits = true;
    *p = (struct plan){0};
    for (uint32_t i = 0; i < n; i++) {
        if (params[i].part == MOE_PART_WEIGHT && is_up(params[i].weight))
            continue; /* stored with gate */
        struct moe_cuda_block *b = &p->block[p->blocks++];
        describe_block(layer, &params[i], b);
        fits = fits && plan_block(b, c->optimizer, &at);
    }
    for (uint32_t i = 0; i < MOE_CUDA_ADAPTED_MATRICES; i++)
        if (is_adapted(c, adapted[i]))
            fits = fits && plan_base(&layer->desc.matrix[adapted[i]], &at, &p->base[i]);
    size_t experts = layer->spec.experts;
    fits = fits && take(&at, experts * sizeof(uint64_t), &p->loads) &&
           take(&at, (experts + 1) * sizeof(uint32_t), &p->counted) &&
           take(&at, MOE_CUDA_SQUARES * (MOE_CUDA_SUM_PARTS + 1) * sizeof(double), &p->sums);
    if (!fits)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "training layer %u needs more memory than there is", layer->spec.layer);
    p->bytes = at;
    return moe_ok();
}

struct moe_status moe_cuda_trainer_bytes(struct moe_layer *layer,
                                         const struct moe_trainer_config *config, uint64_t *bytes)
{
    struct plan p;
    MOE_TRY(make_plan(layer, config, &p));
    *bytes = p.bytes;
    return moe_ok();
}

static void set_pointers(struct moe_trainer *t, const struct plan *p)
{
    char *memory = t->memory;
    t->blocks = p->blocks;
    for (uint32_t i = 0; i < p->blocks; i++) {
        struct moe_cuda_block *b = &t->block[i];
        *b = p->block[i];
        b->grad_is_zero = true;
        b->value = (void *)(memory + (size_t)b->value);
        b->grad = (void *)(memory + (size_t)b->grad);
        b->moment1 = (void *)(memory + (size_t)b->moment1);
        b->moment2 = t->config.optimizer == MOE_OPTIMIZER_ADAMW
                         ? (void *)(memory + (size_t)b->moment2)
                         : NULL;
    }
    for (uint32_t i = 0; i < MOE_CUDA_ADAPTED_MATRICES; i++)
        if (is_adapted(&t->config, adapted[i])) {
            t->base[i] = p->base[i];
            t->base[i].data = memory + (size_t)p->base[i].data;
        }
    t->loads = (void *)(memory + p->loads);
    t->counted = (void *)(memory + p->counted);
    t->sums = (void *)(memory + p->sums);
}

/* -------------------------------------------------------------------- find */

struct moe_cuda_block *moe_cuda_trainer_block(struct moe_trainer *t, enum moe_weight weight,
                                              enum moe_train_part part)
{
    if (part == MOE_PART_WEIGHT)
        weight = stored_with(weight);
    for (uint32_t i = 0; i < t->blocks; i++)
        if (t->block[i].weight == weight && t->block[i].part == part)
            return &t->block[i];
    return NULL;
}

bool moe_cuda_block_moves(const struct moe_trainer *t, const struct moe_cuda_block *b)
{
    return (t->frozen >> moe_weight_group(b->weight) & 1) == 0;
}

struct moe_status moe_cuda_block_clear_grad(struct moe_trainer *t, struct moe_cuda_block *b)
{
    size_t n = b->entries * b->n;
    if (n > 0 && b->grad_is_zero)
        MOE_TRY(
            MOE_CUDA(cudaMemsetAsync(b->grad, 0, n * sizeof *b->grad, t->layer->device->compute)));
    b->grad_is_zero = false;
    return moe_ok();
}

/* ---------------------------------------------------------------- resident */

static struct moe_status merge(struct moe_trainer *t, enum moe_weight weight, cudaStream_t stream)
{
    struct moe_layer *layer = t->layer;
    const struct moe_cuda_block *a = moe_cuda_trainer_block(t, weight, MOE_PART_LORA_A);
    const struct moe_cuda_block *b = moe_cuda_trainer_block(t, weight, MOE_PART_LORA_B);
    struct moe_cuda_merge m = {.rank = t->config.lora_rank,
                               .scale = t->config.lora_alpha / (float)t->config.lora_rank,
                               .a = a->value,
                               .b = b->value};
    enum moe_cuda_matrices which = moe_cuda_layer_matrix(weight, &m.order);
    const struct moe_cuda_matrix *matrix = &layer->desc.matrix[which];
    m.entries = layer->local_experts;
    m.out = (uint32_t)(b->n / m.rank);
    m.in = (uint32_t)(a->n / m.rank);
    const struct moe_cuda_matrix *base = &t->base[which == MOE_CUDA_DOWN];
    m.stored_rows = matrix->rows;
    m.dtype = matrix->dtype;
    m.packing = base->packing;
    m.base_bytes = moe_cuda_packed_bytes(base->packing, base->rows, base->columns);
    m.base = base->data;
    m.resident = matrix->data;
    return moe_cuda_merge_adapter(&m, stream);
}

struct moe_status moe_cuda_trainer_renew(struct moe_trainer *t, const struct moe_cuda_block *b,
                                         cudaStream_t stream)
{
    struct moe_layer *layer = t->layer;
    size_t n = b->entries * b->n;
    if (n == 0)
        return moe_ok();
    if (b->kind == MOE_CUDA_BLOCK_ADAPTER)
        return merge(t, b->weight, stream);
    if (b->kind == MOE_CUDA_BLOCK_BIAS)
        return moe_cuda_store_values(b->value, n, MOE_DTYPE_F32, layer->desc.bias[b->weight],
                                     stream);
    struct moe_cuda_matrix *m = &layer->desc.matrix[b->matrix];
    MOE_TRY(moe_cuda_store_values(b->value, n, m->dtype, m->data, stream));
    return b->matrix == MOE_CUDA_ROUTER ? moe_cuda_layer_split_router(layer, stream) : moe_ok();
}

/* ------------------------------------------------------------- create, destroy */

/* The masters start as the resident weights. */
static struct moe_status fill_block(struct moe_trainer *t, const struct moe_cuda_block *b,
                                    cudaStream_t stream)
{
    const struct moe_layer *layer = t->layer;
    size_t n = b->entries * b->n;
    if (n == 0 || b->kind == MOE_CUDA_BLOCK_ADAPTER)
        return moe_ok();
    if (b->kind == MOE_CUDA_BLOCK_BIAS)
        return MOE_CUDA(cudaMemcpyAsync(b->value, layer->desc.bias[b->weight], n * sizeof(float),
                                        cudaMemcpyDeviceToDevice, stream));
    const struct moe_cuda_matrix *m = &layer->desc.matrix[b->matrix];
    struct moe_cuda_weight w = {.dst = b->value,
                                .from = m->dtype,
                                .to = MOE_DTYPE_F32,
                                .order = MOE_CUDA_ROWS_PLAIN,
                                .rows = (size_t)m->entries * m->rows,
                                .columns = m->columns};
    return moe_cuda_weights_place(&w, m->data, 0, n, stream);
}

static struct moe_status start_adapter(struct moe_trainer *t, const struct moe_cuda_block *b)
{
    if (b->part != MOE_PART_LORA_A || b->entries == 0)
        return moe_ok();
    const struct moe_layer *layer = t->layer;
    float *first = malloc(b->n * sizeof *first);
    if (first == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for an adapter");
    struct moe_status st = moe_ok();
    for (uint32_t e = 0; e < b->entries && !moe_failed(&st); e++) {
        for (size_t i = 0; i < b->n; i++)
            first[i] = moe_lora_initial(t->config.lora_seed, layer->spec.layer, layer->local[e],
                                        b->weight, i, b->columns);
        st = moe_cuda_mem_copy(layer->device, b->value + e * b->n, first, b->n * sizeof *first);
    }
    free(first);
    return st;
}

/* Entry number `entry` of a packed matrix, with all of its rows as they are stored. */
static struct moe_cuda_packed_weight packed_entry(const struct moe_cuda_matrix *m, uint32_t entry)
{
    return (struct moe_cuda_packed_weight){
        .packing = m->packing,
        .entry = (char *)m->data + entry * moe_cuda_packed_bytes(m->packing, m->rows, m->columns),
        .rows = m->rows,
        .columns = m->columns};
}

/* Puts the decoded weights in the place of packed ones, which become W0. */
static struct moe_status decode_resident(struct moe_trainer *t, uint32_t i)
{
    struct moe_layer *layer = t->layer;
    struct moe_cuda_matrix merged = t->base[i];
    const struct moe_cuda_matrix packed = layer->desc.matrix[adapted[i]];
    size_t each = (size_t)packed.rows * packed.columns;
    for (uint32_t e = 0; e < packed.entries; e++) {
        struct moe_cuda_packed_weight w = packed_entry(&packed, e);
        MOE_TRY(moe_cuda_packed_read(&w, 0, each, MOE_DTYPE_BF16,
                                     (uint16_t *)merged.data + e * each, layer->device->compute));
    }
    t->base[i] = packed;
    return moe_cuda_layer_replace(layer, adapted[i], &merged);
}

/* The layer gets its packed weights back. */
static void give_back_base(struct moe_trainer *t)
{
    for (uint32_t i = 0; i < MOE_CUDA_ADAPTED_MATRICES; i++)
        if (t->base[i].packing != MOE_CUDA_PACKING_NONE) {
            struct moe_status st = moe_cuda_layer_replace(t->layer, adapted[i], &t->base[i]);
            /* The device may still have the addresses of the trainer's memory: no more steps. */
            if (moe_failed(&st))
                t->layer->finished = false;
        }
}

static struct moe_status fill_base(struct moe_trainer *t, uint32_t i)
{
    const struct moe_cuda_matrix *resident = &t->layer->desc.matrix[adapted[i]];
    if (t->base[i].data == NULL || t->base[i].bytes == 0)
        return moe_ok();
    if (resident->packing != MOE_CUDA_PACKING_NONE)
        return decode_resident(t, i);
    return MOE_CUDA(cudaMemcpyAsync(t->base[i].data, resident->data, resident->bytes,
                                    cudaMemcpyDeviceToDevice, t->layer->device->compute));
}

static struct moe_status fill(struct moe_trainer *t)
{
    struct moe_device *device = t->layer->device;
    for (uint32_t i = 0; i < MOE_CUDA_ADAPTED_MATRICES; i++)
        MOE_TRY(fill_base(t, i));
    for (uint32_t i = 0; i < t->blocks; i++) {
        MOE_TRY(fill_block(t, &t->block[i], device->compute));
        MOE_TRY(start_adapter(t, &t->block[i]));
    }
    return moe_cuda_device_finish(device);
}

struct moe_status moe_cuda_trainer_create(struct moe_layer *layer,
                                          const struct moe_trainer_config *config,
                                          struct moe_trainer **out)
{
    struct plan p;
    if (!layer->finished || layer->trained)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "layer %u is not finished, or has a trainer already", layer->spec.layer);
    MOE_TRY(make_plan(layer, config, &p));
    MOE_TRY(moe_cuda_device_use(layer->device));
    struct moe_trainer *t = calloc(1, sizeof *t);
    if (t == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a trainer");
    t->layer = layer;
    t->config = *config;
    t->frozen = config->frozen;
    t->bytes = p.bytes;
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_cuda_mem_alloc(layer->device, MOE_MEM_DEVICE, p.bytes, &t->memory), fail);
    set_pointers(t, &p);
    MOE_TRY_GOTO(st, fill(t), fail);
    layer->trained = true;
    *out = t;
    return st;
fail:
    give_back_base(t);
    moe_cuda_mem_free(layer->device, MOE_MEM_DEVICE, t->memory, t->bytes);
    free(t);
    return st;
}

void moe_cuda_trainer_destroy(struct moe_trainer *t)
{
    if (t == NULL)
        return;
    t->layer->trained = false;
    give_back_base(t);
    moe_activation_cache_drop(t->layer->device->activation_cache, t->layer, 0);
    moe_cuda_mem_free(t->layer->device, MOE_MEM_DEVICE, t->memory, t->bytes);
    free(t);
}

/* ----------------------------------------------------------------- in and out */

/* The place of an entry's `weight` in memory with the layout of its matrix or bias; `dtype` is the
 * memory's. */
static struct moe_cuda_weight place_of(const struct moe_layer *layer, enum moe_weight weight,
                                       uint32_t entry, void *memory, enum moe_dtype dtype)
{
    struct moe_cuda_weight w = {.to = dtype, .from = MOE_DTYPE_F32, .order = MOE_CUDA_ROWS_PLAIN};
    moe_weight_shape(&layer->spec, weight, &w.rows, &w.columns);
    size_t stored = w.rows;
    if (!moe_weight_is_bias(weight))
        stored = layer->desc.matrix[moe_cuda_layer_matrix(weight, &w.order)].rows;
    w.dst = (char *)memory + entry * stored * w.columns * moe_dtype_bytes(dtype);
    return w;
}

/* The same in one of a block's arrays. */
static struct moe_cuda_weight place_in(const struct moe_layer *layer,
                                       const struct moe_cuda_block *b, enum moe_weight weight,
                                       uint32_t entry, float *array)
{
    if (b->kind != MOE_CUDA_BLOCK_ADAPTER)
        return place_of(layer, weight, entry, array, MOE_DTYPE_F32);
    return (struct moe_cuda_weight){.dst = array + entry * b->n,
                                    .from = MOE_DTYPE_F32,
                                    .to = MOE_DTYPE_F32,
                                    .order = MOE_CUDA_ROWS_PLAIN,
                                    .rows = 1,
                                    .columns = b->n};
}

/* The place in the layer, or, with `base`, in the stored W0. */
static struct moe_cuda_weight resident_place(const struct moe_trainer *t, enum moe_weight weight,
                                             uint32_t entry, bool base)
{
    const struct moe_layer *layer = t->layer;
    enum moe_cuda_rows order;
    if (moe_weight_is_bias(weight))
        return place_of(layer, weight, entry, layer->desc.bias[weight], MOE_DTYPE_F32);
    enum moe_cuda_matrices which = moe_cuda_layer_matrix(weight, &order);
    const struct moe_cuda_matrix *m =
        base ? &t->base[which == MOE_CUDA_DOWN] : &layer->desc.matrix[which];
    return place_of(layer, weight, entry, m->data, m->dtype);
}

/* Reads the layer's weight, or, with `base`, W0. */
static struct moe_status read_resident(const struct moe_trainer *t, enum moe_weight weight,
                                       uint32_t entry, bool base, float *data)
{
    struct moe_cuda_weight w = {.order = MOE_CUDA_ROWS_PLAIN};
    enum moe_cuda_rows order;
    enum moe_cuda_matrices which = moe_cuda_layer_matrix(weight, &order);
    const struct moe_cuda_matrix *m =
        base ? &t->base[which == MOE_CUDA_DOWN] : &t->layer->desc.matrix[which];
    if (moe_weight_is_bias(weight) || m->packing == MOE_CUDA_PACKING_NONE) {
        w = resident_place(t, weight, entry, base);
        return moe_cuda_weights_read(t->layer->device, &w, data);
    }
    w.packed = packed_entry(m, entry);
    w.packed.interleaved = order != MOE_CUDA_ROWS_PLAIN;
    w.packed.offset = order == MOE_CUDA_ROWS_UP ? MOE_CUDA_INTERLEAVE : 0;
    moe_weight_shape(&t->layer->spec, weight, &w.rows, &w.columns);
    return moe_cuda_weights_read(t->layer->device, &w, data);
}

/* Backends may differ in the last bit of a value with the scale of a whole matrix. */
static bool is_same(float own, float given)
{
    return moe_f32_to_bf16(own) == moe_f32_to_bf16(given) ||
           fabsf(own - given) <= 0x1p-22f * fabsf(own);
}

/* A quantised weight does not change: only what it has can be written. */
static struct moe_status check_same(const struct moe_trainer *t, const struct moe_train_key *key,
                                    uint32_t entry, const float *data, size_t bytes)
{
    enum moe_cuda_rows order;
    enum moe_cuda_matrices which = moe_cuda_layer_matrix(key->weight, &order);
    bool base = moe_weight_is_expert(key->weight) && t->base[which == MOE_CUDA_DOWN].data != NULL;
    float *own = malloc(bytes + 1);
    if (own == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory to compare weights");
    struct moe_status st = read_resident(t, key->weight, entry, base, own);
    size_t same = 0, count = bytes / sizeof *data;
    while (!moe_failed(&st) && same < count && is_same(own[same], data[same]))
        same++;
    free(own);
    if (moe_failed(&st) || same == count)
        return st;
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH,
                     "%s of expert %u is quantised, and cannot become other values",
                     moe_weight_name(key->weight), key->expert);
}

/* Enqueued in order with the kernels before and after it. A plain cudaMemcpy returns when the
 * host's memory has been read; a kernel on another stream might then still read old values. `host`
 * has the layout of the weight and the dtype of the place. */
static struct moe_status put(const struct moe_cuda_weight *w, const char *host, cudaStream_t stream)
{
    size_t row = w->columns * moe_dtype_bytes(w->to), block = MOE_CUDA_INTERLEAVE * row;
    size_t whole = w->rows / MOE_CUDA_INTERLEAVE, rest = w->rows % MOE_CUDA_INTERLEAVE * row;
    char *to = (char *)w->dst + (w->order == MOE_CUDA_ROWS_UP ? block : 0);
    if (w->order == MOE_CUDA_ROWS_PLAIN)
        return MOE_CUDA(cudaMemcpyAsync(to, host, w->rows * row, cudaMemcpyHostToDevice, stream));
    if (whole > 0)
        MOE_TRY(MOE_CUDA(cudaMemcpy2DAsync(to, 2 * block, host, block, block, whole,
                                           cudaMemcpyHostToDevice, stream)));
    if (rest == 0)
        return moe_ok();
    return MOE_CUDA(cudaMemcpyAsync(to + whole * 2 * block, host + whole * block, rest,
                                    cudaMemcpyHostToDevice, stream));
}

/* Rounds on the host. */
static struct moe_status put_rounded(const struct moe_cuda_weight *w, const float *data,
                                     struct moe_device *device)
{
    size_t n = w->rows * w->columns;
    uint16_t *half = malloc(n * sizeof *half);
    if (half == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory to convert a weight");
    for (size_t i = 0; i < n; i++)
        half[i] = moe_f32_to_bf16(data[i]);
    struct moe_status st = put(w, (const char *)half, device->compute);
    struct moe_status done = moe_cuda_device_finish(device); /* `half` is in use until then */
    free(half);
    return moe_failed(&st) ? st : done;
}

static struct moe_status write_resident(struct moe_trainer *t, enum moe_weight weight,
                                        uint32_t entry, const float *data)
{
    struct moe_device *device = t->layer->device;
    enum moe_cuda_rows order;
    bool is_base = moe_cuda_trainer_block(t, weight, MOE_PART_LORA_A) != NULL;
    struct moe_cuda_weight w = resident_place(t, weight, entry, is_base);
    MOE_TRY(w.to == MOE_DTYPE_BF16 ? put_rounded(&w, data, device)
                                   : put(&w, (const char *)data, device->compute));
    if (!moe_weight_is_bias(weight) && moe_cuda_layer_matrix(weight, &order) == MOE_CUDA_ROUTER)
        MOE_TRY(moe_cuda_layer_split_router(t->layer, device->compute));
    if (is_base)
        MOE_TRY(merge(t, weight, device->compute));
    return moe_cuda_device_finish(device);
}

static float *tensor_of(const struct moe_cuda_block *b, enum moe_train_tensor tensor)
{
    switch (tensor) {
    case MOE_TRAIN_VALUE: return b->value;
    case MOE_TRAIN_GRAD: return b->grad;
    case MOE_TRAIN_MOMENT1: return b->moment1;
    case MOE_TRAIN_MOMENT2: return b->moment2;
    case MOE_TRAIN_BASE: break; /* of no block */
    }
    return NULL;
}

static struct moe_status find_entry(const struct moe_layer *layer, const struct moe_train_key *key,
                                    uint32_t *entry)
{
    *entry = 0;
    if (!moe_weight_is_expert(key->weight))
        return moe_ok();
    if (key->expert >= layer->spec.experts)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE,
                         "expert %u of a layer of %u", key->expert, layer->spec.experts);
    if (layer->local_index[key->expert] < 0)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_TENSOR_INVALID,
                         "expert %u is not placed on slot %u", key->expert, layer->slot);
    *entry = (uint32_t)layer->local_index[key->expert];
    return moe_ok();
}

/* *block: the block with the tensor; NULL for a resident weight or W0. */
static struct moe_status find(struct moe_trainer *t, const struct moe_train_key *key, size_t bytes,
                              struct moe_cuda_block **block, uint32_t *entry)
{
    struct moe_train_place place;
    MOE_TRY(moe_train_find(&t->layer->spec, &t->config, key, bytes, &place));
    MOE_TRY(find_entry(t->layer, key, entry));
    *block = place.param < 0 ? NULL : moe_cuda_trainer_block(t, key->weight, key->part);
    return moe_ok();
}

/* Gradients that only count as zero become real zeros; then waits for all enqueued work. */
static struct moe_status settle_grad(struct moe_trainer *t, struct moe_cuda_block *b)
{
    struct moe_device *device = t->layer->device;
    MOE_TRY(moe_cuda_device_use(device));
    MOE_TRY(moe_cuda_block_clear_grad(t, b));
    return moe_cuda_device_finish(device);
}

/* Calls that change anything but gradients wait for the device before they return. */
struct moe_status moe_cuda_trainer_read(struct moe_trainer *t, const struct moe_train_key *key,
                                        float *data, size_t bytes)
{
    struct moe_cuda_block *b;
    uint32_t entry;
    MOE_TRY(find(t, key, bytes, &b, &entry));
    if (b != NULL && key->tensor == MOE_TRAIN_GRAD)
        MOE_TRY(settle_grad(t, b));
    if (b == NULL)
        return read_resident(t, key->weight, entry, key->tensor == MOE_TRAIN_BASE, data);
    struct moe_cuda_weight w = place_in(t->layer, b, key->weight, entry, tensor_of(b, key->tensor));
    return moe_cuda_weights_read(t->layer->device, &w, data);
}

struct moe_status moe_cuda_trainer_write(struct moe_trainer *t, const struct moe_train_key *key,
                                         const float *data, size_t bytes)
{
    struct moe_device *device = t->layer->device;
    struct moe_cuda_block *b;
    uint32_t entry;
    MOE_TRY(find(t, key, bytes, &b, &entry));
    MOE_TRY(moe_train_check_writable(key));
    MOE_TRY(moe_cuda_device_use(device));
    MOE_TRY(moe_cuda_device_finish(device));
    if (b == NULL && moe_weight_format_of(&t->layer->spec, key->weight) != NULL)
        return check_same(t, key, entry, data, bytes);
    if (key->tensor == MOE_TRAIN_VALUE)
        moe_activation_cache_drop(device->activation_cache, t->layer, 0);
    if (b == NULL)
        return write_resident(t, key->weight, entry, data);
    if (key->tensor == MOE_TRAIN_GRAD)
        MOE_TRY(moe_cuda_block_clear_grad(t, b));
    struct moe_cuda_weight w = place_in(t->layer, b, key->weight, entry, tensor_of(b, key->tensor));
    MOE_TRY(put(&w, (const char *)data, device->compute));
    if (key->tensor == MOE_TRAIN_VALUE)
        MOE_TRY(moe_cuda_trainer_renew(t, b, device->compute));
    return moe_cuda_device_finish(device);
}

/* ------------------------------------------------------------------- setting */

struct moe_status moe_cuda_trainer_forget_grads(struct moe_trainer *t)
{
    for (uint32_t i = 0; i < t->blocks; i++)
        t->block[i].grad_is_zero = true;
    return MOE_CUDA(cudaMemsetAsync(t->loads, 0, t->layer->spec.experts * sizeof *t->loads,
                                    t->layer->device->compute));
}

struct moe_status moe_cuda_zero_grad(struct moe_trainer *t)
{
    MOE_TRY(moe_cuda_device_use(t->layer->device));
    MOE_TRY(moe_cuda_trainer_forget_grads(t));
    return moe_cuda_device_finish(t->layer->device);
}

struct moe_status moe_cuda_set_frozen(struct moe_trainer *t, uint32_t frozen)
{
    MOE_TRY(moe_train_check_frozen(&t->config, frozen));
    t->frozen = frozen;
    for (uint32_t i = 0; i < t->blocks; i++)
        if (!moe_cuda_block_moves(t, &t->block[i]))
            t->block[i].grad_is_zero = true;
    return moe_ok();
}
