/* SPDX-License-Identifier: Apache-2.0 */
/* Creates layers and loads their weights; see layer.h. A matrix gets its memory at its first
 * upload, when its dtype is known. A layer that lacks a weight cannot be finished. */
#include "cuda/layer/layer.h"

#include "base/size.h"
#include "common/layer_rules.h"
#include "cuda/gemm/ggemm_cublas.h"
#include "cuda/layer/weights.h"
#include "cuda/plan/limits.h"

#include <math.h>
#include <stdlib.h>

static uint32_t entries_of(const struct moe_layer *layer, enum moe_weight w)
{
    return moe_weight_is_expert(w) ? layer->local_experts : 1;
}

static struct moe_status out_of_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a layer");
}

/* ------------------------------------------------------------- create, destroy */

/* Shape of a matrix as stored. An interleaved one holds two, each padded to whole blocks. */
static struct moe_status shape_matrix(struct moe_layer *layer, enum moe_cuda_matrices which,
                                      enum moe_weight w, bool interleaved)
{
    struct moe_cuda_matrix *m = &layer->desc.matrix[which];
    size_t rows, columns, bytes;
    moe_weight_shape(&layer->spec, w, &rows, &columns);
    if (interleaved &&
        (!moe_size_round_up(rows, MOE_CUDA_INTERLEAVE, &rows) || !moe_size_mul(rows, 2, &rows)))
        return out_of_memory();
    if (rows > UINT32_MAX || !moe_size_mul3(rows, columns, sizeof(float), &bytes) ||
        !moe_size_mul(bytes, layer->local_experts + (size_t)1, &bytes))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "%s: %zu x %zu is too large",
                         moe_weight_name(w), rows, columns);
    m->entries = rows == 0 ? 0 : entries_of(layer, w);
    m->rows = (uint32_t)rows;
    m->columns = (uint32_t)columns;
    const struct moe_weight_format *format = moe_weight_format_of(&layer->spec, w);
    m->packing = format != NULL ? moe_cuda_packing_of(format) : MOE_CUDA_PACKING_NONE;
    return moe_ok();
}

static struct moe_status shape_matrices(struct moe_layer *layer)
{
    const struct moe_layer_spec *s = &layer->spec;
    MOE_TRY(shape_matrix(layer, MOE_CUDA_ROUTER, MOE_WEIGHT_ROUTER, false));
    MOE_TRY(shape_matrix(layer, MOE_CUDA_GATE_UP, MOE_WEIGHT_UP,
                         moe_cuda_is_gated(s, MOE_CUDA_GATE_UP)));
    MOE_TRY(shape_matrix(layer, MOE_CUDA_DOWN, MOE_WEIGHT_DOWN, false));
    MOE_TRY(shape_matrix(layer, MOE_CUDA_SHARED_GATE_UP, MOE_WEIGHT_SHARED_UP,
                         moe_cuda_is_gated(s, MOE_CUDA_SHARED_GATE_UP)));
    MOE_TRY(shape_matrix(layer, MOE_CUDA_SHARED_DOWN, MOE_WEIGHT_SHARED_DOWN, false));
    MOE_TRY(shape_matrix(layer, MOE_CUDA_TO_LATENT, MOE_WEIGHT_TO_LATENT, false));
    MOE_TRY(shape_matrix(layer, MOE_CUDA_FROM_LATENT, MOE_WEIGHT_FROM_LATENT, false));
    return shape_matrix(layer, MOE_CUDA_SHARED_VECTOR, MOE_WEIGHT_SHARED_GATE_VECTOR, false);
}

static size_t bias_bytes(const struct moe_layer *layer, enum moe_weight w)
{
    size_t n, columns;
    moe_weight_shape(&layer->spec, w, &n, &columns);
    return moe_weight_is_bias(w) ? entries_of(layer, w) * n * sizeof(float) : 0;
}

static struct moe_status make_room(struct moe_layer *layer, enum moe_weight w)
{
    size_t rows, columns;
    moe_weight_shape(&layer->spec, w, &rows, &columns);
    uint32_t entries = entries_of(layer, w);
    if (rows == 0 || entries == 0)
        return moe_ok();
    layer->uploaded[w] = calloc(entries, sizeof *layer->uploaded[w]);
    if (layer->uploaded[w] == NULL)
        return out_of_memory();
    void *p;
    MOE_TRY(moe_cuda_mem_alloc(layer->device, MOE_MEM_DEVICE, bias_bytes(layer, w), &p));
    layer->desc.bias[w] = p;
    return moe_ok();
}

static struct moe_status check_tables(const struct moe_layer *layer)
{
    const struct moe_placement *p = &layer->placement;
    uint32_t copies = p->offset[p->experts];
    if (moe_cuda_tables_fit(p->slots, layer->local_experts, copies))
        return moe_ok();
    return moe_error(
        MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
        "%u copies of %u experts on %u slots, %u of them here: on GPUs the slots times "
        "the experts of one are at most %d, and the copies %d",
        copies, p->experts, p->slots, layer->local_experts, MOE_CUDA_MAX_CELLS,
        MOE_CUDA_MAX_COPIES);
}

struct moe_status moe_cuda_layer_create(struct moe_device *device,
                                        const struct moe_layer_spec *spec,
                                        const struct moe_placement *placement, uint32_t slot,
                                        struct moe_layer **out)
{
    MOE_TRY(moe_layer_check(spec, placement, slot));
    MOE_TRY(moe_cuda_device_use(device));
    MOE_TRY(moe_layer_check_formats(spec, moe_cuda_layer_computes, device));
    struct moe_layer *layer = calloc(1, sizeof *layer);
    if (layer == NULL)
        return out_of_memory();
    layer->device = device;
    layer->spec = *spec;
    layer->slot = slot;
    struct moe_status st;
    MOE_TRY_GOTO(st,
                 moe_placement_list_local(placement, slot, &layer->local, &layer->local_experts,
                                          &layer->local_index),
                 fail);
    MOE_TRY_GOTO(st, moe_placement_copy(placement, &layer->placement), fail);
    MOE_TRY_GOTO(st, moe_placement_copy(placement, &layer->active), fail);
    layer->live = UINT64_MAX >> (64 - placement->slots);
    MOE_TRY_GOTO(st, check_tables(layer), fail);
    MOE_TRY_GOTO(st, shape_matrices(layer), fail);
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        MOE_TRY_GOTO(st, make_room(layer, w), fail);
    *out = layer;
    return st;
fail:
    moe_cuda_layer_destroy(layer);
    return st;
}

void moe_cuda_layer_destroy(struct moe_layer *layer)
{
    if (layer == NULL)
        return;
    struct moe_device *device = layer->device;
    /* Uploads of an unfinished layer may still be running. */
    struct moe_status st = moe_cuda_weights_finish(device, &layer->coming);
    (void)st; /* memory is freed even after an error */
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        moe_cuda_mem_free(device, MOE_MEM_DEVICE, layer->desc.bias[w], bias_bytes(layer, w));
        free(layer->uploaded[w]);
    }
    for (uint32_t m = 0; m < MOE_CUDA_MATRICES; m++)
        moe_cuda_mem_free(device, MOE_MEM_DEVICE, layer->desc.matrix[m].data,
                          layer->desc.matrix[m].bytes);
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, layer->wrong, sizeof *layer->wrong);
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, layer->tables, layer->tables_bytes);
    moe_cuda_buffer_free(device, &layer->params);
    moe_placement_free(&layer->placement);
    moe_placement_free(&layer->active);
    free(layer->local);
    free(layer->local_index);
    free(layer);
}

/* --------------------------------------------------------------------- weights */

static struct moe_status alloc_matrix(struct moe_layer *layer, struct moe_cuda_matrix *m,
                                      enum moe_dtype dtype)
{
    /* layer_create checked that this does not overflow. */
    size_t bytes = (size_t)m->entries * m->rows * m->columns * moe_dtype_bytes(dtype);
    MOE_TRY(moe_cuda_mem_alloc(layer->device, MOE_MEM_DEVICE, bytes, &m->data));
    m->bytes = bytes;
    m->dtype = dtype;
    return moe_ok();
}

/* An F32 tensor arrived for a BF16 matrix: convert all of it to F32, which is exact. */
static struct moe_status widen_matrix(struct moe_layer *layer, struct moe_cuda_matrix *m)
{
    struct moe_device *device = layer->device;
    struct moe_cuda_matrix wide = *m;
    MOE_TRY(moe_cuda_weights_finish(device, &layer->coming)); /* uploads into the old matrix */
    MOE_TRY(alloc_matrix(layer, &wide, MOE_DTYPE_F32));
    struct moe_cuda_weight all = {.dst = wide.data,
                                  .from = MOE_DTYPE_BF16,
                                  .to = MOE_DTYPE_F32,
                                  .order = MOE_CUDA_ROWS_PLAIN,
                                  .rows = (size_t)m->entries * m->rows,
                                  .columns = m->columns};
    struct moe_status st;
    MOE_TRY_GOTO(
        st, moe_cuda_weights_place(&all, m->data, 0, all.rows * all.columns, device->upload), fail);
    MOE_TRY_GOTO(st, MOE_CUDA(cudaStreamSynchronize(device->upload)), fail);
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, m->data, m->bytes);
    *m = wide;
    return moe_ok();
fail:
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, wide.data, wide.bytes);
    return st;
}

enum moe_cuda_matrices moe_cuda_layer_matrix(enum moe_weight w, enum moe_cuda_rows *order)
{
    *order = MOE_CUDA_ROWS_PLAIN;
    switch (w) {
    case MOE_WEIGHT_GATE: *order = MOE_CUDA_ROWS_GATE; return MOE_CUDA_GATE_UP;
    case MOE_WEIGHT_UP: *order = MOE_CUDA_ROWS_UP; return MOE_CUDA_GATE_UP;
    case MOE_WEIGHT_DOWN: return MOE_CUDA_DOWN;
    case MOE_WEIGHT_SHARED_GATE: *order = MOE_CUDA_ROWS_GATE; return MOE_CUDA_SHARED_GATE_UP;
    case MOE_WEIGHT_SHARED_UP: *order = MOE_CUDA_ROWS_UP; return MOE_CUDA_SHARED_GATE_UP;
    case MOE_WEIGHT_SHARED_DOWN: return MOE_CUDA_SHARED_DOWN;
    case MOE_WEIGHT_SHARED_GATE_VECTOR: return MOE_CUDA_SHARED_VECTOR;
    case MOE_WEIGHT_TO_LATENT: return MOE_CUDA_TO_LATENT;
    case MOE_WEIGHT_FROM_LATENT: return MOE_CUDA_FROM_LATENT;
    default: return MOE_CUDA_ROUTER;
    }
}

/* The same for any layer. */
static enum moe_cuda_matrices matrix_of(const struct moe_layer *layer, enum moe_weight w,
                                        enum moe_cuda_rows *order)
{
    enum moe_cuda_matrices which = moe_cuda_layer_matrix(w, order);
    if (!moe_cuda_is_gated(&layer->spec, which))
        *order = MOE_CUDA_ROWS_PLAIN;
    return which;
}

/* Source of a weight: `data`, or `source`. */
struct origin {
    const void *data;
    const struct moe_weight_source *source;
};

static struct moe_status bring(struct moe_layer *layer, const struct moe_cuda_weight *w,
                               const struct origin *from)
{
    return from->source != NULL
               ? moe_cuda_weights_fetch(layer->device, w, from->source, &layer->coming)
               : moe_cuda_weights_put(layer->device, w, from->data);
}

static struct moe_status put_matrix(struct moe_layer *layer, enum moe_weight weight, uint32_t entry,
                                    enum moe_dtype dtype, const struct origin *from)
{
    struct moe_cuda_weight w = {.from = dtype};
    struct moe_cuda_matrix *m = &layer->desc.matrix[matrix_of(layer, weight, &w.order)];
    /* The vector is too small to gain from bf16, and it scales whole tokens. */
    enum moe_dtype keep = weight == MOE_WEIGHT_SHARED_GATE_VECTOR ? MOE_DTYPE_F32 : dtype;
    if (m->data == NULL)
        MOE_TRY(alloc_matrix(layer, m, keep));
    else if (keep == MOE_DTYPE_F32 && m->dtype == MOE_DTYPE_BF16)
        MOE_TRY(widen_matrix(layer, m));
    moe_weight_shape(&layer->spec, weight, &w.rows, &w.columns);
    w.to = m->dtype;
    w.dst = (char *)m->data + (size_t)entry * m->rows * m->columns * moe_dtype_bytes(m->dtype);
    return bring(layer, &w, from);
}

static struct moe_status put_bias(struct moe_layer *layer, enum moe_weight weight, uint32_t entry,
                                  enum moe_dtype dtype, const struct origin *from)
{
    struct moe_cuda_weight w = {.from = dtype, .to = MOE_DTYPE_F32};
    moe_weight_shape(&layer->spec, weight, &w.rows, &w.columns);
    w.dst = layer->desc.bias[weight] + entry * w.rows;
    return bring(layer, &w, from);
}

/* `*entry` is the place of a weight that has not come yet. */
static struct moe_status find_free(const struct moe_layer *layer, enum moe_weight weight,
                                   uint32_t expert, uint32_t *entry)
{
    if (layer->finished)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_INVALID,
                         "%s: the layer is finished", moe_weight_name(weight));
    MOE_TRY(
        moe_layer_find_entry(&layer->spec, layer->slot, layer->local_index, weight, expert, entry));
    if (layer->uploaded[weight][*entry])
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_TENSOR_INVALID, "%s: uploaded twice",
                         moe_weight_name(weight));
    return moe_ok();
}

static struct moe_status upload(struct moe_layer *layer, enum moe_weight weight, uint32_t expert,
                                enum moe_dtype dtype, const struct origin *from, size_t bytes)
{
    uint32_t entry;
    MOE_TRY(moe_layer_check_tensor(&layer->spec, weight, dtype, bytes));
    MOE_TRY(find_free(layer, weight, expert, &entry));
    MOE_TRY(moe_weight_is_bias(weight) ? put_bias(layer, weight, entry, dtype, from)
                                       : put_matrix(layer, weight, entry, dtype, from));
    layer->uploaded[weight][entry] = true;
    return moe_ok();
}

struct moe_status moe_cuda_layer_upload(struct moe_layer *layer, enum moe_weight weight,
                                        uint32_t expert, enum moe_dtype dtype, const void *data,
                                        size_t bytes)
{
    struct origin memory = {.data = data};
    return upload(layer, weight, expert, dtype, &memory, bytes);
}

struct moe_status moe_cuda_layer_fetch(struct moe_layer *layer, enum moe_weight weight,
                                       uint32_t expert, enum moe_dtype dtype,
                                       const struct moe_weight_source *source, size_t bytes)
{
    struct origin elsewhere = {.source = source};
    return upload(layer, weight, expert, dtype, &elsewhere, bytes);
}

/* ------------------------------------------------------------ quantised weights */

/* cuBLAS multiplies bf16 only. */
bool moe_cuda_layer_computes(const struct moe_device *device,
                             const struct moe_weight_format *format)
{
    struct moe_status st = moe_cuda_device_use(device);
    return !moe_failed(&st) && device->cublas == NULL && moe_cuda_ggemm_serves(8, 8) &&
           moe_cuda_packing_of(format) != MOE_CUDA_PACKING_NONE;
}

/* Device memory of zeros: a block's elements beyond the matrix stay so. */
static struct moe_status alloc_zeros(struct moe_layer *layer, size_t bytes, void **out)
{
    MOE_TRY(moe_cuda_mem_alloc(layer->device, MOE_MEM_DEVICE, bytes, out));
    struct moe_status st = MOE_CUDA(cudaMemsetAsync(*out, 0, bytes, layer->device->upload));
    if (!moe_failed(&st))
        st = MOE_CUDA(cudaStreamSynchronize(layer->device->upload));
    if (moe_failed(&st)) {
        moe_cuda_mem_free(layer->device, MOE_MEM_DEVICE, *out, bytes);
        *out = NULL;
    }
    return st;
}

static struct moe_status alloc_packed(struct moe_layer *layer, struct moe_cuda_matrix *m)
{
    void *p;
    MOE_TRY(moe_cuda_device_use(layer->device));
    if (layer->wrong == NULL) {
        MOE_TRY(alloc_zeros(layer, sizeof *layer->wrong, &p));
        layer->wrong = p;
    }
    if (m->data != NULL)
        return moe_ok();
    /* layer_create checked that fp32 would not overflow. */
    size_t bytes = m->entries * moe_cuda_packed_bytes(m->packing, m->rows, m->columns);
    MOE_TRY(alloc_zeros(layer, bytes, &p));
    m->data = p;
    m->bytes = bytes;
    return moe_ok();
}

/* Where a packed weight comes from. */
struct packed_origin {
    struct origin elements, scales, zeros;
    float global;
    bool by_turns;
};

/* Brings a part: `rows` of `bytes` each, or twice as many by turns. */
static struct moe_status bring_part(struct moe_layer *layer, struct moe_cuda_weight w,
                                    enum moe_cuda_packed_part part, size_t rows, size_t bytes,
                                    const struct origin *from)
{
    w.part = part;
    w.rows = w.by_turns ? 2 * rows : rows;
    w.columns = bytes;
    return bring(layer, &w, from);
}

/* What the scales of a matrix are multiplied by; for E4M3. */
static struct moe_status global_of(const struct moe_weight_format *f, enum moe_weight weight,
                                   float global, float *out)
{
    *out = f->global_divides ? 1 / global : global;
    if (f->scale != MOE_SCALE_E4M3 || isnormal(*out))
        return moe_ok();
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                     "%s: the scale of the matrix, %g, is out of range", moe_weight_name(weight),
                     (double)global);
}

static struct moe_status place_packed(struct moe_layer *layer, enum moe_weight weight,
                                      uint32_t entry, const struct packed_origin *from)
{
    const struct moe_weight_format *f = moe_weight_format_of(&layer->spec, weight);
    enum moe_cuda_rows order;
    struct moe_cuda_matrix *m = &layer->desc.matrix[matrix_of(layer, weight, &order)];
    struct moe_packed_sizes sizes;
    size_t rows, columns;
    moe_weight_shape(&layer->spec, weight, &rows, &columns);
    if (!moe_packed_sizes(f, rows, columns, &sizes))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "%s is too large",
                         moe_weight_name(weight));
    float global;
    MOE_TRY(global_of(f, weight, from->global, &global));
    MOE_TRY(alloc_packed(layer, m));
    const struct moe_cuda_weight w = {
        .packed = {.packing = m->packing,
                   .entry = (char *)m->data +
                            entry * moe_cuda_packed_bytes(m->packing, m->rows, m->columns),
                   .rows = (uint32_t)rows,
                   .columns = (uint32_t)columns,
                   .interleaved = order != MOE_CUDA_ROWS_PLAIN,
                   .offset = order == MOE_CUDA_ROWS_UP ? MOE_CUDA_INTERLEAVE : 0,
                   .global = global,
                   .wrong = layer->wrong},
        .format = f,
        .by_turns = from->by_turns};
    MOE_TRY(bring_part(layer, w, MOE_CUDA_ELEMENTS, rows, sizes.row_bytes, &from->elements));
    MOE_TRY(bring_part(layer, w, MOE_CUDA_SCALES, sizes.scale_rows,
                       sizes.scale_columns * moe_scale_bytes(f->scale), &from->scales));
    if (!f->zero_points)
        return moe_ok();
    return bring_part(layer, w, MOE_CUDA_ZEROS, sizes.scale_rows, sizes.scale_columns,
                      &from->zeros);
}

static struct moe_status upload_packed(struct moe_layer *layer, enum moe_weight weight,
                                       uint32_t expert, const struct packed_origin *from)
{
    uint32_t entry;
    MOE_TRY(find_free(layer, weight, expert, &entry));
    if (from->by_turns)
        MOE_TRY(find_free(layer, MOE_WEIGHT_UP, expert, &entry));
    MOE_TRY(place_packed(layer, weight, entry, from));
    layer->uploaded[weight][entry] = true;
    if (from->by_turns)
        layer->uploaded[MOE_WEIGHT_UP][entry] = true;
    return moe_ok();
}

struct moe_status moe_cuda_layer_upload_packed(struct moe_layer *layer, enum moe_weight weight,
                                               uint32_t expert, const struct moe_packed_matrix *m)
{
    MOE_TRY(moe_layer_check_packed(&layer->spec, weight, m));
    const struct packed_origin memory = {.elements.data = m->elements,
                                         .scales.data = m->scales,
                                         .zeros.data = m->zeros,
                                         .global = m->global};
    return upload_packed(layer, weight, expert, &memory);
}

struct moe_status moe_cuda_layer_fetch_packed(struct moe_layer *layer, enum moe_weight weight,
                                              uint32_t expert,
                                              const struct moe_packed_source *source)
{
    MOE_TRY(moe_layer_check_packed_source(&layer->spec, weight, source));
    const struct packed_origin elsewhere = {.elements.source = &source->elements,
                                            .scales.source = &source->scales,
                                            .global = source->global,
                                            .by_turns = source->by_turns};
    return upload_packed(layer, weight, expert, &elsewhere);
}

/* Called when all uploads are in place. */
static struct moe_status check_packed_values(struct moe_layer *layer)
{
    uint32_t wrong = 0;
    if (layer->wrong != NULL)
        MOE_TRY(moe_cuda_mem_copy(layer->device, &wrong, layer->wrong, sizeof wrong));
    if (wrong == 0)
        return moe_ok();
    return moe_error(
        MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
        "layer %u: a quantised matrix has a NaN, a zero point above 16, or a scale that GPUs do "
        "not hold (E8M0 above 2^65, INT4's above 2^27, E4M3 not above 0): --weights bf16 decodes "
        "it",
        layer->spec.layer);
}

/* --------------------------------------------------------------------- finish */

/* Offsets of the tables in one allocation of at most a few kilobytes, so no size can overflow. */
struct tables {
    size_t desc, offset, slot, local, local_index, bytes;
};

_Static_assert(offsetof(struct moe_cuda_layer_desc, product) == 0, "maps as aligned as the tables");

static struct tables lay_out_tables(const struct moe_layer *layer)
{
    const size_t line = 256;
    const struct moe_placement *p = &layer->placement;
    size_t sizes[] = {sizeof layer->desc, (p->experts + (size_t)1) * sizeof *p->offset,
                      p->offset[p->experts] * sizeof *p->slot,
                      layer->local_experts * sizeof *layer->local,
                      p->experts * sizeof *layer->local_index};
    size_t at[6] = {0};
    for (int i = 0; i < 5; i++)
        at[i + 1] = (at[i] + sizes[i] + line - 1) / line * line;
    return (struct tables){at[0], at[1], at[2], at[3], at[4], at[5]};
}

static struct moe_status copy_tables(struct moe_layer *layer)
{
    const struct moe_placement *p = &layer->active;
    struct tables t = lay_out_tables(layer);
    char *host = calloc(1, t.bytes), *base = layer->tables;
    if (host == NULL)
        return out_of_memory();
    struct moe_cuda_layer_desc *d = &layer->desc;
    d->spec = layer->spec;
    d->slot = layer->slot;
    d->slots = p->slots;
    d->local_experts = layer->local_experts;
    d->placement = (struct moe_cuda_placement){.offset = (void *)(base + t.offset),
                                               .slot = (void *)(base + t.slot),
                                               .local = (void *)(base + t.local),
                                               .local_index = (void *)(base + t.local_index)};
    memcpy(host + t.desc, d, sizeof *d);
    memcpy(host + t.offset, p->offset, (p->experts + (size_t)1) * sizeof *p->offset);
    memcpy(host + t.slot, p->slot, p->offset[p->experts] * sizeof *p->slot);
    memcpy(host + t.local, layer->local, layer->local_experts * sizeof *layer->local);
    memcpy(host + t.local_index, layer->local_index, p->experts * sizeof *layer->local_index);
    struct moe_status st = moe_cuda_mem_copy(layer->device, base, host, t.bytes);
    free(host);
    layer->on_device = layer->tables;
    return st;
}

/* Lets bf16 tokens use tensor cores with an F32 router. */
static struct moe_status split_router(struct moe_layer *layer)
{
    const struct moe_cuda_matrix *whole = &layer->desc.matrix[MOE_CUDA_ROUTER];
    struct moe_cuda_matrix *parts = &layer->desc.matrix[MOE_CUDA_ROUTER_PARTS];
    if (whole->dtype != MOE_DTYPE_F32 || whole->columns % 8 != 0 || parts->data != NULL)
        return moe_ok();
    parts->entries = 3;
    parts->rows = whole->rows;
    parts->columns = whole->columns;
    MOE_TRY(alloc_matrix(layer, parts, MOE_DTYPE_BF16));
    return moe_cuda_layer_split_router(layer, layer->device->upload);
}

struct moe_status moe_cuda_layer_split_router(struct moe_layer *layer, cudaStream_t stream)
{
    const struct moe_cuda_matrix *whole = &layer->desc.matrix[MOE_CUDA_ROUTER];
    const struct moe_cuda_matrix *parts = &layer->desc.matrix[MOE_CUDA_ROUTER_PARTS];
    if (parts->data == NULL)
        return moe_ok();
    return moe_cuda_weights_split(whole->data, (size_t)whole->rows * whole->columns, parts->data,
                                  stream);
}

static bool serves(const struct moe_layer *layer, uint32_t n, uint32_t k)
{
    return layer->device->cublas != NULL ? moe_cuda_cublas_serves(n, k)
                                         : moe_cuda_ggemm_serves(n, k);
}

/* Describes the matrices for the products. */
static struct moe_status describe_products(struct moe_layer *layer)
{
    static const enum moe_cuda_matrices products[] = {
        MOE_CUDA_GATE_UP,     MOE_CUDA_DOWN,      MOE_CUDA_SHARED_GATE_UP,
        MOE_CUDA_SHARED_DOWN, MOE_CUDA_TO_LATENT, MOE_CUDA_FROM_LATENT};
    struct moe_cuda_layer_desc *d = &layer->desc;
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) {
        const struct moe_cuda_matrix *m = &d->matrix[products[i]];
        bool packed = m->packing != MOE_CUDA_PACKING_NONE;
        d->served[products[i]] =
            m->data != NULL && (packed || m->dtype == MOE_DTYPE_BF16) &&
            !(packed && layer->device->cublas != NULL) &&
            serves(layer, moe_cuda_product_columns(&layer->spec, products[i]), m->columns);
        if (!d->served[products[i]])
            continue;
        d->product[products[i]].data = m->data;
        if (layer->device->cublas == NULL && !packed)
            MOE_TRY(moe_cuda_ggemm_describe(m->data, m->entries, m->rows, m->columns,
                                            &d->product[products[i]]));
    }
    d->product[MOE_CUDA_GATE_UP].bias =
        d->bias[moe_activation_has_gate(layer->spec.activation) ? MOE_WEIGHT_GATE_BIAS
                                                                : MOE_WEIGHT_UP_BIAS];
    d->product[MOE_CUDA_GATE_UP].up_bias = d->bias[MOE_WEIGHT_UP_BIAS];
    d->product[MOE_CUDA_DOWN].bias = d->bias[MOE_WEIGHT_DOWN_BIAS];
    return moe_ok();
}

struct moe_status moe_cuda_layer_finish(struct moe_layer *layer)
{
    MOE_TRY(moe_layer_check_complete(&layer->spec, layer->local, layer->local_experts,
                                     layer->uploaded));
    if (layer->finished)
        return moe_ok();
    MOE_TRY(moe_cuda_device_use(layer->device));
    MOE_TRY(moe_cuda_weights_finish(layer->device, &layer->coming));
    MOE_TRY(check_packed_values(layer));
    MOE_TRY(split_router(layer));
    MOE_TRY(describe_products(layer));
    MOE_TRY(MOE_CUDA(cudaStreamSynchronize(layer->device->upload)));
    if (layer->tables == NULL) {
        size_t bytes = lay_out_tables(layer).bytes;
        MOE_TRY(moe_cuda_mem_alloc(layer->device, MOE_MEM_DEVICE, bytes, &layer->tables));
        layer->tables_bytes = bytes;
    }
    MOE_TRY(copy_tables(layer));
    layer->finished = true;
    return moe_ok();
}

struct moe_status moe_cuda_layer_replace(struct moe_layer *layer, enum moe_cuda_matrices which,
                                         const struct moe_cuda_matrix *matrix)
{
    layer->desc.matrix[which] = *matrix;
    MOE_TRY(moe_cuda_device_use(layer->device));
    MOE_TRY(describe_products(layer));
    return copy_tables(layer);
}

struct moe_status moe_cuda_layer_activate(struct moe_layer *layer, uint64_t live)
{
    if (layer->live == live)
        return moe_ok();
    layer->live = 0; /* no session's: a failed copy is repeated */
    moe_placement_activate(&layer->placement, live, &layer->active);
    MOE_TRY(copy_tables(layer));
    layer->live = live;
    return moe_ok();
}
