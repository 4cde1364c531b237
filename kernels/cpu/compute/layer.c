/* SPDX-License-Identifier: Apache-2.0 */
/* Creates layers and uploads weights. A layer that lacks a weight never becomes runnable. */
#include "cpu/compute/layer.h"

#include "base/size.h"
#include "common/layer_rules.h"
#include "cpu/compute/packed.h"

#include <stdlib.h>

/* ------------------------------------------------------------- create, destroy */

static struct moe_status out_of_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a layer");
}

static struct moe_status bias_bytes(const struct moe_layer *layer, enum moe_weight w, size_t *bytes)
{
    size_t n, columns;
    moe_weight_shape(&layer->spec, w, &n, &columns);
    if (!moe_size_mul3(moe_cpu_layer_entries(layer, w), n, sizeof(float), bytes))
        return out_of_memory();
    return moe_ok();
}

static struct moe_status make_room(struct moe_layer *layer, enum moe_weight w)
{
    size_t rows, columns;
    moe_weight_shape(&layer->spec, w, &rows, &columns);
    uint32_t entries = moe_cpu_layer_entries(layer, w);
    if (rows == 0 || entries == 0)
        return moe_ok();
    layer->uploaded[w] = calloc(entries, sizeof *layer->uploaded[w]);
    layer->borrowed[w] = calloc(entries, sizeof *layer->borrowed[w]);
    if (layer->uploaded[w] == NULL || layer->borrowed[w] == NULL)
        return out_of_memory();
    if (!moe_weight_is_bias(w)) {
        layer->matrix[w] = calloc(entries, sizeof *layer->matrix[w]);
        return layer->matrix[w] == NULL ? out_of_memory() : moe_ok();
    }
    size_t bytes = 0;
    void *p;
    MOE_TRY(bias_bytes(layer, w, &bytes));
    MOE_TRY(moe_cpu_mem_alloc(layer->device, MOE_MEM_DEVICE, bytes, &p));
    layer->bias[w] = p;
    return moe_ok();
}

struct moe_status moe_cpu_layer_create(struct moe_device *device, const struct moe_layer_spec *spec,
                                       const struct moe_placement *placement, uint32_t slot,
                                       struct moe_layer **out)
{
    MOE_TRY(moe_layer_check(spec, placement, slot));
    MOE_TRY(moe_layer_check_formats(spec, moe_cpu_computes, device));
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
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        MOE_TRY_GOTO(st, make_room(layer, w), fail);
    *out = layer;
    return st;
fail:
    moe_cpu_layer_destroy(layer);
    return st;
}

static void free_weight(struct moe_layer *layer, enum moe_weight w)
{
    for (uint32_t i = 0; layer->matrix[w] != NULL && i < moe_cpu_layer_entries(layer, w); i++)
        if (!layer->borrowed[w][i])
            moe_cpu_matrix_free(layer->device, &layer->matrix[w][i]);
    free(layer->matrix[w]);
    free(layer->uploaded[w]);
    free(layer->borrowed[w]);
    size_t bytes = 0;
    struct moe_status st = bias_bytes(layer, w, &bytes);
    MOE_INVARIANT(layer->bias[w] == NULL || !moe_failed(&st));
    moe_cpu_mem_free(layer->device, MOE_MEM_DEVICE, layer->bias[w], bytes);
}

/* The entry of `from` with the weight that `layer` has at `entry`, or -1. */
static int32_t entry_in(const struct moe_layer *from, const struct moe_layer *layer,
                        enum moe_weight w, uint32_t entry)
{
    return moe_weight_is_expert(w) ? from->local_index[layer->local[entry]] : 0;
}

static void share_entry(struct moe_layer *layer, enum moe_weight w, uint32_t entry, uint32_t of)
{
    const struct moe_layer *from = layer->forebear;
    size_t n, columns;
    moe_weight_shape(&layer->spec, w, &n, &columns);
    layer->uploaded[w][entry] = true;
    if (moe_weight_is_bias(w)) {
        memcpy(layer->bias[w] + entry * n, from->bias[w] + of * n, n * sizeof *layer->bias[w]);
        return;
    }
    layer->matrix[w][entry] = from->matrix[w][of];
    layer->borrowed[w][entry] = true;
}

struct moe_status moe_cpu_layer_succeed(struct moe_layer *from,
                                        const struct moe_placement *placement,
                                        struct moe_layer **out)
{
    if (!from->finished || from->has_trainer || from->heir != NULL || from->forebear != NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "layer %u is not finished, is trained, or changes its placement already",
                         from->spec.layer);
    struct moe_layer *layer;
    MOE_TRY(moe_cpu_layer_create(from->device, &from->spec, placement, from->slot, &layer));
    layer->forebear = from;
    from->heir = layer;
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (uint32_t i = 0; layer->uploaded[w] != NULL && i < moe_cpu_layer_entries(layer, w);
             i++) {
            int32_t of = entry_in(from, layer, w, i);
            if (of >= 0)
                share_entry(layer, w, i, (uint32_t)of);
        }
    *out = layer;
    return moe_ok();
}

/* What `layer` owns and its heir has too becomes the heir's. */
static void bequeath(struct moe_layer *layer)
{
    struct moe_layer *heir = layer->heir;
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (uint32_t i = 0; heir->matrix[w] != NULL && i < moe_cpu_layer_entries(heir, w); i++) {
            if (!heir->borrowed[w][i])
                continue;
            heir->borrowed[w][i] = false;
            layer->borrowed[w][entry_in(layer, heir, w, i)] = true;
        }
    heir->forebear = NULL;
}

void moe_cpu_layer_destroy(struct moe_layer *layer)
{
    if (layer == NULL)
        return;
    if (layer->heir != NULL)
        bequeath(layer);
    if (layer->forebear != NULL)
        layer->forebear->heir = NULL;
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        free_weight(layer, w);
    moe_placement_free(&layer->placement);
    moe_placement_free(&layer->active);
    free(layer->local);
    free(layer->local_index);
    free(layer);
}

/* Whether the mask leaves some experts fewer copies than others: then the slots that a token's
 * index chooses no longer come in the same order for each index, and their sums are added in that
 * order. */
static bool has_lost_copies(const struct moe_placement *all, const struct moe_placement *active)
{
    return all->offset[all->experts] > all->experts &&
           active->offset[all->experts] < all->offset[all->experts];
}

void moe_cpu_layer_activate(struct moe_layer *layer, uint64_t live)
{
    if (layer->live == live)
        return;
    moe_placement_activate(&layer->placement, live, &layer->active);
    layer->active.by_content =
        layer->placement.by_content || has_lost_copies(&layer->placement, &layer->active);
    layer->live = live;
}

/* --------------------------------------------------------------------- weights */

/* The entry of a weight that was not uploaded yet. */
static struct moe_status find_room(const struct moe_layer *layer, enum moe_weight w,
                                   uint32_t expert, uint32_t *entry)
{
    if (layer->finished)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_INVALID,
                         "%s: the layer is finished", moe_weight_name(w));
    MOE_TRY(moe_layer_find_entry(&layer->spec, layer->slot, layer->local_index, w, expert, entry));
    if (layer->uploaded[w][*entry])
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_TENSOR_INVALID, "%s: uploaded twice",
                         moe_weight_name(w));
    return moe_ok();
}

static void take_bias(float *to, size_t n, enum moe_dtype dtype, const void *data)
{
    if (dtype == MOE_DTYPE_F32) {
        memcpy(to, data, n * sizeof *to);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t b;
        memcpy(&b, (const char *)data + i * sizeof b, sizeof b);
        to[i] = moe_bf16_to_f32(b);
    }
}

struct moe_status moe_cpu_layer_upload(struct moe_layer *layer, enum moe_weight weight,
                                       uint32_t expert, enum moe_dtype dtype, const void *data,
                                       size_t bytes)
{
    uint32_t entry;
    MOE_TRY(moe_layer_check_tensor(&layer->spec, weight, dtype, bytes));
    MOE_TRY(find_room(layer, weight, expert, &entry));
    size_t rows, columns;
    moe_weight_shape(&layer->spec, weight, &rows, &columns);
    if (moe_weight_is_bias(weight)) {
        take_bias(layer->bias[weight] + entry * rows, rows, dtype, data);
    } else {
        /* Weights that decide between experts or scale a whole token stay fp32. */
        bool exact = weight == MOE_WEIGHT_ROUTER || weight == MOE_WEIGHT_SHARED_GATE_VECTOR;
        MOE_TRY(moe_cpu_matrix_pack(layer->device, (uint32_t)rows, (uint32_t)columns, dtype,
                                    exact ? MOE_DTYPE_F32 : dtype, data,
                                    &layer->matrix[weight][entry]));
    }
    layer->uploaded[weight][entry] = true;
    return moe_ok();
}

struct moe_status moe_cpu_layer_upload_packed(struct moe_layer *layer, enum moe_weight weight,
                                              uint32_t expert, const struct moe_packed_matrix *data)
{
    uint32_t entry;
    size_t rows, columns;
    MOE_TRY(moe_layer_check_packed(&layer->spec, weight, data));
    MOE_TRY(find_room(layer, weight, expert, &entry));
    moe_weight_shape(&layer->spec, weight, &rows, &columns);
    const struct moe_weight_format *format = moe_weight_format_of(&layer->spec, weight);
    MOE_INVARIANT(format != NULL);
    MOE_TRY(moe_cpu_matrix_pack_quantised(layer->device, (uint32_t)rows, (uint32_t)columns, format,
                                          data, &layer->matrix[weight][entry]));
    layer->uploaded[weight][entry] = true;
    return moe_ok();
}

struct moe_status moe_cpu_layer_finish(struct moe_layer *layer)
{
    MOE_TRY(moe_layer_check_complete(&layer->spec, layer->local, layer->local_experts,
                                     layer->uploaded));
    layer->finished = true;
    return moe_ok();
}
