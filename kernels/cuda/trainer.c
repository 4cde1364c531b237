/* A trainer's memory, and the way in and out of it; see trainer.h. */
#include "cuda/trainer.h"

#include "base/size.h"
#include "kept.h"
#include "layer_rules.h"

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

/* Everything that is taken at once: offsets into one piece of memory, the blocks' as pointers from
 * NULL. Sizes are those of resident weights times a few, so only their sum is checked. */
struct plan {
    uint32_t blocks;
    struct moe_cuda_block block[MOE_TRAIN_MAX_PARAMS];
    size_t base[MOE_CUDA_ADAPTED_MATRICES], loads, counted, sums, bytes;
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
    return m == MOE_CUDA_DOWN
               ? moe_train_is_adapted(c, MOE_WEIGHT_DOWN)
               : moe_train_is_adapted(c, MOE_WEIGHT_GATE) || moe_train_is_adapted(c, MOE_WEIGHT_UP);
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
            continue; /* with gate */
        struct moe_cuda_block *b = &p->block[p->blocks++];
        describe_block(layer, &params[i], b);
        fits = fits && plan_block(b, c->optimizer, &at);
    }
    for (uint32_t i = 0; i < MOE_CUDA_ADAPTED_MATRICES; i++)
        if (is_adapted(c, adapted[i]))
            fits = fits && take(&at, layer->desc.matrix[adapted[i]].bytes, &p->base[i]);
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
        if (is_adapted(&t->config, adapted[i]))
            t->base[i] = memory + p->base[i];
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
    m.stored_rows = matrix->rows;
    m.dtype = matrix->dtype;
    m.base = t->base[which == MOE_CUDA_DOWN];
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

/* The masters begin as the resident weights. */
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

static struct moe_status fill(struct moe_trainer *t)
{
    struct moe_device *device = t->layer->device;
    for (uint32_t i = 0; i < MOE_CUDA_ADAPTED_MATRICES; i++)
        if (t->base[i] != NULL)
            MOE_TRY(MOE_CUDA(cudaMemcpyAsync(t->base[i], t->layer->desc.matrix[adapted[i]].data,
                                             t->layer->desc.matrix[adapted[i]].bytes,
                                             cudaMemcpyDeviceToDevice, device->compute)));
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
    moe_cuda_mem_free(layer->device, MOE_MEM_DEVICE, t->memory, t->bytes);
    free(t);
    return st;
}

void moe_cuda_trainer_destroy(struct moe_trainer *t)
{
    if (t == NULL)
        return;
    t->layer->trained = false;
    moe_kept_drop(t->layer->device->kept, t->layer, 0);
    moe_cuda_mem_free(t->layer->device, MOE_MEM_DEVICE, t->memory, t->bytes);
    free(t);
}

/* ----------------------------------------------------------------- in and out */

/* One entry's tensor as it lies on the device: rows in blocks of MOE_CUDA_INTERLEAVE where gate and
 * up alternate, else all in a row. */
struct spot {
    char *data;
    size_t each, rows, row_bytes;
    bool alternates;
};

/* Enqueued with the kernels that come before and behind it: a plain cudaMemcpy returns when the
 * host's memory has been read, and what a kernel of another stream then finds on the device may be
 * old. */
static struct moe_status move(const struct spot *s, char *host, bool out, cudaStream_t stream)
{
    enum cudaMemcpyKind kind = out ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
    size_t whole = s->rows / MOE_CUDA_INTERLEAVE, width = MOE_CUDA_INTERLEAVE * s->row_bytes;
    size_t rest = (s->rows - whole * MOE_CUDA_INTERLEAVE) * s->row_bytes;
    if (!s->alternates)
        return MOE_CUDA(cudaMemcpyAsync(out ? host : s->data, out ? s->data : host,
                                        s->rows * s->row_bytes, kind, stream));
    if (whole > 0)
        MOE_TRY(MOE_CUDA(cudaMemcpy2DAsync(out ? host : s->data, out ? width : 2 * width,
                                           out ? s->data : host, out ? 2 * width : width, width,
                                           whole, kind, stream)));
    if (rest == 0)
        return moe_ok();
    char *tail = s->data + whole * 2 * width, *host_tail = host + whole * width;
    return MOE_CUDA(
        cudaMemcpyAsync(out ? host_tail : tail, out ? tail : host_tail, rest, kind, stream));
}

/* Converts while it copies, through host memory. */
static struct moe_status move_bf16(const struct spot *s, float *data, bool out,
                                   struct moe_device *device)
{
    size_t n = s->rows * s->row_bytes / sizeof(uint16_t);
    uint16_t *half = malloc(n * sizeof *half);
    if (half == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory to convert a weight");
    for (size_t i = 0; !out && i < n; i++)
        half[i] = moe_f32_to_bf16(data[i]);
    struct moe_status st = move(s, (char *)half, out, device->compute);
    if (!moe_failed(&st))
        st = moe_cuda_device_finish(device); /* `half` is in use until then */
    for (size_t i = 0; out && !moe_failed(&st) && i < n; i++)
        data[i] = moe_bf16_to_f32(half[i]);
    free(half);
    return st;
}

/* Where `weight` of an entry stands in memory that is laid out as its matrix or bias. */
static struct spot spot_of(const struct moe_layer *layer, enum moe_weight w, uint32_t entry,
                           void *memory, size_t each)
{
    enum moe_cuda_rows order = MOE_CUDA_ROWS_PLAIN;
    size_t rows, columns, stored;
    moe_weight_shape(&layer->spec, w, &rows, &columns);
    stored = rows;
    if (!moe_weight_is_bias(w))
        stored = layer->desc.matrix[moe_cuda_layer_matrix(w, &order)].rows;
    size_t first = entry * stored + (order == MOE_CUDA_ROWS_UP ? MOE_CUDA_INTERLEAVE : 0);
    return (struct spot){.data = (char *)memory + first * columns * each,
                         .each = each,
                         .rows = rows,
                         .row_bytes = columns * each,
                         .alternates = order != MOE_CUDA_ROWS_PLAIN};
}

static struct moe_status move_resident(struct moe_trainer *t, enum moe_weight w, uint32_t entry,
                                       float *data, bool out)
{
    struct moe_layer *layer = t->layer;
    cudaStream_t stream = layer->device->compute;
    enum moe_cuda_rows order;
    if (moe_weight_is_bias(w)) {
        struct spot s = spot_of(layer, w, entry, layer->desc.bias[w], sizeof(float));
        MOE_TRY(move(&s, (char *)data, out, stream));
        return moe_cuda_device_finish(layer->device);
    }
    enum moe_cuda_matrices which = moe_cuda_layer_matrix(w, &order);
    const struct moe_cuda_matrix *m = &layer->desc.matrix[which];
    /* Written for a target of an adapter, it is W0. */
    void *memory = m->data;
    if (!out && moe_train_is_adapted(&t->config, w))
        memory = t->base[which == MOE_CUDA_DOWN];
    struct spot s = spot_of(layer, w, entry, memory, moe_dtype_bytes(m->dtype));
    MOE_TRY(m->dtype == MOE_DTYPE_BF16 ? move_bf16(&s, data, out, layer->device)
                                       : move(&s, (char *)data, out, stream));
    if (!out && which == MOE_CUDA_ROUTER)
        MOE_TRY(moe_cuda_layer_split_router(layer, stream));
    if (!out && moe_train_is_adapted(&t->config, w))
        MOE_TRY(merge(t, w, stream));
    return moe_cuda_device_finish(layer->device);
}

static float *tensor_of(const struct moe_cuda_block *b, enum moe_train_tensor tensor)
{
    switch (tensor) {
    case MOE_TRAIN_VALUE: return b->value;
    case MOE_TRAIN_GRAD: return b->grad;
    case MOE_TRAIN_MOMENT1: return b->moment1;
    case MOE_TRAIN_MOMENT2: return b->moment2;
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

static struct moe_status move_tensor(struct moe_trainer *t, const struct moe_train_key *key,
                                     float *data, size_t bytes, bool out)
{
    struct moe_layer *layer = t->layer;
    struct moe_train_place place;
    uint32_t entry;
    MOE_TRY(moe_train_find(&layer->spec, &t->config, key, bytes, &place));
    MOE_TRY(find_entry(layer, key, &entry));
    MOE_TRY(moe_cuda_device_use(layer->device));
    MOE_TRY(moe_cuda_device_finish(layer->device));
    if (!out && key->tensor == MOE_TRAIN_VALUE)
        moe_kept_drop(layer->device->kept, layer, 0);
    struct moe_cuda_block *b = moe_cuda_trainer_block(t, key->weight, key->part);
    if (place.param < 0 || b == NULL)
        return move_resident(t, key->weight, entry, data, out);
    if (key->tensor == MOE_TRAIN_GRAD)
        MOE_TRY(moe_cuda_block_clear_grad(t, b));
    float *memory = tensor_of(b, key->tensor);
    struct spot s = b->kind == MOE_CUDA_BLOCK_ADAPTER
                        ? (struct spot){.data = (char *)(memory + entry * b->n),
                                        .rows = 1,
                                        .row_bytes = b->n * sizeof(float)}
                        : spot_of(layer, key->weight, entry, memory, sizeof(float));
    MOE_TRY(move(&s, (char *)data, out, layer->device->compute));
    if (!out && key->tensor == MOE_TRAIN_VALUE)
        MOE_TRY(moe_cuda_trainer_renew(t, b, layer->device->compute));
    return moe_cuda_device_finish(layer->device);
}

struct moe_status moe_cuda_trainer_read(struct moe_trainer *t, const struct moe_train_key *key,
                                        float *data, size_t bytes)
{
    return move_tensor(t, key, data, bytes, true);
}

struct moe_status moe_cuda_trainer_write(struct moe_trainer *t, const struct moe_train_key *key,
                                         const float *data, size_t bytes)
{
    return move_tensor(t, key, (float *)data, bytes, false);
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
