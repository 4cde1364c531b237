/* SPDX-License-Identifier: Apache-2.0 */
/* An assignment is first copied into tables of the backend's form and checked against the model, so
 * that loading uses no unchecked data from the wire. */
#include "models/loader_state.h"

#include "base/clock.h"
#include "base/cores.h"
#include "base/transfer.h"
#include "common/layer_rules.h"
#include "daemon/log.h"
#include "daemon/notify.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIGEST_THREADS_MAX = 16 };

/* ------------------------------------------------------------------------ tables */

void moe_loader__free_table(struct table *t)
{
    free(t->placements);
    free(t->offsets);
    free(t->slots);
    *t = (struct table){0};
}

static uint64_t mix(uint64_t hash, uint32_t value)
{
    for (int shift = 0; shift < 32; shift += 8) {
        hash ^= value >> shift & 0xff;
        hash *= UINT64_C(0x100000001b3);
    }
    return hash;
}

static uint64_t hash_content(const struct table *t, const struct moe_group_assignment *a)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    hash = mix(hash, a->slots);
    hash = mix(hash, (uint32_t)a->layer_count);
    for (size_t i = 0; i < a->layer_count; i++) {
        const struct moe_placement *p = &t->placements[i];
        hash = mix(hash, a->layers[i].layer);
        hash = mix(hash, p->experts);
        for (uint32_t e = 0; e < p->experts; e++) {
            hash = mix(hash, p->offset[e + 1] - p->offset[e]);
            for (uint32_t c = p->offset[e]; c < p->offset[e + 1]; c++)
                hash = mix(hash, p->slot[c]);
        }
    }
    return hash;
}

static struct moe_status misfit(const struct moe_group_layer *layer)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                     "the placement of layer %u does not fit the model or the group", layer->layer);
}

/* Fills the part of one layer: `offset` [E+1] and `slot` [slot_count]. */
static struct moe_status fill_layer(const struct moe_layer_spec *spec,
                                    const struct moe_group_layer *layer, uint32_t slots,
                                    uint32_t *offset, uint16_t *slot)
{
    if (layer->layer != spec->layer || layer->experts != spec->experts)
        return misfit(layer);
    size_t at = 0;
    for (size_t e = 0; e < layer->experts; e++) {
        offset[e] = (uint32_t)at;
        if (layer->copies[e] == 0 || layer->copies[e] > slots ||
            layer->copies[e] > layer->slot_count - at)
            return misfit(layer);
        for (size_t end = at + layer->copies[e], first = at; at < end; at++) {
            if (layer->slots[at] >= slots ||
                (at > first && layer->slots[at] <= layer->slots[at - 1]))
                return misfit(layer);
            slot[at] = (uint16_t)layer->slots[at];
        }
    }
    offset[layer->experts] = (uint32_t)at;
    return at == layer->slot_count ? moe_ok() : misfit(layer);
}

static struct moe_status allocate_table(const struct moe_group_assignment *a, struct table *out)
{
    size_t offsets = 0, slots = 0;
    for (size_t i = 0; i < a->layer_count; i++) {
        offsets += a->layers[i].experts + 1;
        slots += a->layers[i].slot_count;
    }
    out->layer_count = a->layer_count;
    out->placements = calloc(a->layer_count + 1, sizeof *out->placements);
    out->offsets = calloc(offsets + 1, sizeof *out->offsets);
    out->slots = calloc(slots + 1, sizeof *out->slots);
    if (out->placements != NULL && out->offsets != NULL && out->slots != NULL)
        return moe_ok();
    moe_loader__free_table(out);
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "no memory for the placement");
}

/* Whether a token's index makes no difference to which of its experts share a slot: there is one
 * copy of each expert, or the placement is one that a group begins with, with contiguous ranges of
 * experts and copies that are equally many slots apart, also from the last one to the first. */
static bool is_regular(const struct moe_placement *p)
{
    uint32_t base = p->experts / p->slots, larger = p->experts % p->slots, e = 0;
    uint32_t copies = p->offset[1];
    if (p->offset[p->experts] == p->experts)
        return true;
    if (p->slots % copies != 0)
        return false;
    for (uint32_t home = 0; home < p->slots; home++) {
        uint64_t mask = 0;
        for (uint32_t c = 0; c < copies; c++)
            mask |= UINT64_C(1) << (home + c * (p->slots / copies)) % p->slots;
        for (uint32_t n = base + (home < larger); n > 0; n--, e++)
            if (moe_placement_slots_of(p, e) != mask)
                return false;
    }
    return true;
}

struct moe_status moe_loader__make_table(const struct moe_loader *l,
                                         const struct moe_group_assignment *a, struct table *out)
{
    if (a->layer_count != l->layer_count)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                         "a placement of %zu layers for a model of %zu", a->layer_count,
                         l->layer_count);
    *out =
        (struct table){.slot = a->slot, .version = a->placement_version, .spare = a->spare_experts};
    MOE_TRY(allocate_table(a, out));
    uint32_t *offset = out->offsets;
    uint16_t *slot = out->slots;
    for (size_t i = 0; i < a->layer_count; i++) {
        const struct moe_group_layer *layer = &a->layers[i];
        struct moe_status st = fill_layer(l->specs[i], layer, a->slots, offset, slot);
        if (moe_failed(&st)) {
            moe_loader__free_table(out);
            return st;
        }
        out->placements[i] = (struct moe_placement){
            .version = a->placement_version,
            .experts = (uint32_t)layer->experts,
            .slots = a->slots,
            .offset = offset,
            .slot = slot,
        };
        out->placements[i].by_content =
            l->backend->layer_succeed != NULL && !is_regular(&out->placements[i]);
        offset += layer->experts + 1;
        slot += layer->slot_count;
    }
    out->content_hash = hash_content(out, a);
    out->hash = mix(out->content_hash, a->placement_version);
    return moe_ok();
}

/* Layers carry the version, and steps compare it with other slots: so it counts. */
static bool is_same(const struct table *a, const struct table *b)
{
    if (a->placements == NULL || a->slot != b->slot || a->version != b->version ||
        a->layer_count != b->layer_count || a->content_hash != b->content_hash)
        return false;
    for (size_t i = 0; i < a->layer_count; i++) {
        const struct moe_placement *p = &a->placements[i], *q = &b->placements[i];
        if (p->experts != q->experts || p->slots != q->slots ||
            memcmp(p->offset, q->offset, (p->experts + 1) * sizeof *p->offset) != 0 ||
            memcmp(p->slot, q->slot, p->offset[p->experts] * sizeof *p->slot) != 0)
            return false;
    }
    return true;
}

size_t moe_loader__list_own(const struct moe_placement *p, uint32_t slot, uint32_t *experts)
{
    size_t count = 0;
    for (uint32_t e = 0; e < p->experts; e++)
        for (uint32_t c = p->offset[e]; c < p->offset[e + 1]; c++)
            if (p->slot[c] == slot)
                experts[count++] = e;
    return count;
}

/* ---------------------------------------------------------------------- progress */

static void log_progress(struct moe_loader *l, uint64_t now, uint64_t loaded)
{
    uint64_t total = atomic_load(&l->total_bytes);
    double seconds = (double)(now - l->begun_ns) / (double)MOE_NS_PER_S;
    double rate = seconds > 0 ? (double)loaded / seconds : 0;
    char text[MOE_TRANSFER_TEXT], total_text[MOE_BYTES_TEXT], rate_text[MOE_BYTES_TEXT];
    const char *name = l->events.name != NULL ? l->events.name : "",
               *colon = l->events.name != NULL ? ": " : "";
    if (l->events.progress != NULL)
        l->events.progress(l->events.ctx, loaded, total);
    if (loaded >= total) {
        moe_bytes_text(total, total_text);
        moe_bytes_text((uint64_t)rate, rate_text);
        moe_log_info("%s%sloaded %s in %.2f s (%s/s)", name, colon, total_text, seconds, rate_text);
        if (l->events.name == NULL)
            moe_notify_status("loaded; the group forms");
        return;
    }
    moe_transfer_text(loaded, total, rate, text);
    moe_log_info("%s%sloading: %s", name, colon, text);
    if (l->events.name == NULL)
        moe_notify_status("loading: %s", text);
}

/* moe_load_progress; `read_bytes` counts within the layer. Weights that the backend reads itself
 * count when it gets their place; it reads them soon after. */
static void on_progress(void *ctx, uint64_t read_bytes)
{
    struct moe_loader *l = ctx;
    uint64_t loaded = l->layer_base + read_bytes, now = moe_clock_ns();
    atomic_store(&l->loaded_bytes, loaded);
    if (now - l->logged_ns < MOE_NS_PER_S || loaded >= atomic_load(&l->total_bytes))
        return;
    l->logged_ns = now;
    log_progress(l, now, loaded);
}

/* ----------------------------------------------------------------------- loading */

void moe_loader__destroy_layers(const struct moe_loader *l, struct moe_layer **layers)
{
    for (size_t i = 0; i < l->layer_count; i++) {
        if (layers[i] != NULL)
            l->backend->layer_destroy(layers[i]);
        layers[i] = NULL;
    }
}

static void drop_layers(struct moe_loader *l)
{
    moe_loader__drop_next(l);
    moe_loader__settle(l);
    moe_loader__destroy_layers(l, l->layers);
    moe_mutex_lock(&l->lock);
    moe_loader__free_table(&l->table);
    moe_digest_table_clear(l->digests);
    moe_mutex_unlock(&l->lock);
    atomic_store(&l->loaded_bytes, 0);
    atomic_store(&l->total_bytes, 0);
}

static struct moe_status load_cancelled(void)
{
    return moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "loading was cancelled");
}

/* moe_weight_sink */
static struct moe_status upload(void *ctx, enum moe_weight weight, uint32_t expert,
                                enum moe_dtype dtype, const void *data, size_t bytes)
{
    struct moe_loader *l = ctx;
    if (atomic_load(&l->cancelled))
        return load_cancelled();
    return l->backend->layer_upload(l->layers[l->current_layer], weight, expert, dtype, data,
                                    bytes);
}

/* moe_weight_source_sink: the backend reads from the model's files itself. */
static struct moe_status fetch(void *ctx, enum moe_weight weight, uint32_t expert,
                               enum moe_dtype dtype, const struct moe_weight_source *source,
                               size_t bytes)
{
    struct moe_loader *l = ctx;
    if (atomic_load(&l->cancelled))
        return load_cancelled();
    return l->backend->layer_fetch(l->layers[l->current_layer], weight, expert, dtype, source,
                                   bytes);
}

/* moe_packed_sink */
static struct moe_status upload_packed(void *ctx, enum moe_weight weight, uint32_t expert,
                                       const struct moe_packed_matrix *matrix)
{
    struct moe_loader *l = ctx;
    if (atomic_load(&l->cancelled))
        return load_cancelled();
    return l->backend->layer_upload_packed(l->layers[l->current_layer], weight, expert, matrix);
}

/* moe_packed_source_sink */
static struct moe_status fetch_packed(void *ctx, enum moe_weight weight, uint32_t expert,
                                      const struct moe_packed_source *source)
{
    struct moe_loader *l = ctx;
    if (atomic_load(&l->cancelled))
        return load_cancelled();
    return l->backend->layer_fetch_packed(l->layers[l->current_layer], weight, expert, source);
}

/* Adds the layer's digests to `digests`. */
static struct moe_status load_layer(struct moe_loader *l, size_t i,
                                    struct moe_digest_table *digests)
{
    uint32_t experts[MOE_MAX_EXPERTS];
    size_t count = moe_loader__list_own(&l->table.placements[i], l->table.slot, experts);
    l->current_layer = i;
    MOE_TRY(l->backend->layer_create(l->device, l->specs[i], &l->table.placements[i], l->table.slot,
                                     &l->layers[i]));
    const struct moe_model_sinks sinks = {
        .weight = upload,
        .packed = l->backend->layer_upload_packed != NULL ? upload_packed : NULL,
        .source = l->backend->layer_fetch != NULL ? fetch : NULL,
        .packed_source = l->backend->layer_fetch_packed != NULL ? fetch_packed : NULL,
        .ctx = l,
        .sources = &l->sources};
    MOE_TRY(
        moe_model_stream_layer(l->model, i, experts, count, &sinks, l->digester, on_progress, l));
    l->layer_base += moe_model_layer_bytes(l->model, i, experts, count);
    MOE_TRY(l->backend->layer_finish(l->layers[i]));
    moe_model_sources_free(&l->sources);
    return moe_digester_finish(l->digester, digests);
}

struct moe_status moe_loader_check_room(const struct moe_loader *l, uint64_t needed,
                                        const char *what)
{
    struct moe_device_info info;
    l->backend->device_info(l->device, &info);
    if (needed <= info.free_bytes)
        return moe_ok();
    char needed_text[MOE_BYTES_TEXT], free_text[MOE_BYTES_TEXT];
    moe_bytes_text(needed, needed_text);
    moe_bytes_text(info.free_bytes, free_text);
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "%s of this slot take %s and %s are free: more workers, fewer replicas, or "
                     "less in use elsewhere, would help",
                     what, needed_text, free_text);
}

/* Bytes that this slot reads, and bytes of these that it keeps. */
static void count_bytes(const struct moe_loader *l, uint64_t *to_read, uint64_t *to_keep)
{
    *to_read = *to_keep = 0;
    for (size_t i = 0; i < l->layer_count; i++) {
        uint32_t experts[MOE_MAX_EXPERTS];
        size_t count = moe_loader__list_own(&l->table.placements[i], l->table.slot, experts);
        *to_read += moe_model_layer_bytes(l->model, i, experts, count);
        *to_keep += moe_model_layer_memory(l->model, i, experts, count);
    }
}

/* Bytes of the experts that a slot may get by moves, beyond those that it begins with. */
static uint64_t count_spare(const struct moe_loader *l, uint32_t spare)
{
    static const uint32_t first = 0; /* all experts of a layer are alike */
    uint64_t bytes = 0;
    for (size_t i = 0; spare > 0 && i < l->layer_count; i++)
        bytes += spare * (moe_model_layer_memory(l->model, i, &first, 1) -
                          moe_model_layer_memory(l->model, i, NULL, 0));
    return bytes;
}

static struct moe_status load_all(struct moe_loader *l, struct moe_digest_table *digests)
{
    uint64_t total, resident;
    count_bytes(l, &total, &resident);
    resident += count_spare(l, l->table.spare);
    MOE_TRY(moe_loader_check_room(
        l, resident, l->table.spare > 0 ? "the experts and places for spare ones" : "the experts"));
    atomic_store(&l->total_bytes, total);
    l->begun_ns = l->logged_ns = moe_clock_ns();
    l->layer_base = 0;
    for (size_t i = 0; i < l->layer_count; i++)
        MOE_TRY(moe_error_context(load_layer(l, i, digests), "layer %u", l->specs[i]->layer));
    atomic_store(&l->loaded_bytes, total);
    log_progress(l, moe_clock_ns(), total);
    return moe_ok();
}

static struct moe_status load_with_digests(struct moe_loader *l, struct moe_digest_table *digests)
{
    uint32_t cores = moe_usable_cores();
    MOE_TRY(moe_digester_create(l->model, cores < DIGEST_THREADS_MAX ? cores : DIGEST_THREADS_MAX,
                                &l->digester));
    moe_digester_heed(l->digester, &l->cancelled);
    struct moe_status st = load_all(l, digests);
    if (moe_failed(&st)) /* a backend may still read from its sources */
        moe_loader__destroy_layers(l, l->layers);
    moe_model_sources_free(&l->sources);
    moe_digester_destroy(l->digester);
    l->digester = NULL;
    return st;
}

bool moe_loader__holds(struct moe_loader *l, const struct table *t)
{
    moe_mutex_lock(&l->lock);
    bool holds = is_same(&l->table, t) || (l->ready && is_same(&l->next, t));
    moe_mutex_unlock(&l->lock);
    return holds;
}

bool moe_loader_holds(struct moe_loader *l, const struct moe_group_assignment *a)
{
    struct table t;
    struct moe_status st = moe_loader__make_table(l, a, &t);
    if (moe_failed(&st))
        return false;
    bool holds = moe_loader__holds(l, &t);
    moe_loader__free_table(&t);
    return holds;
}

/* What was fetched for a move stays so: its ticket, or the next view, brings it in. */
static bool accept_held(struct moe_loader *l, const struct table *t)
{
    bool holds = moe_loader__holds(l, t);
    if (holds && t->spare == 0)
        moe_loader_drop_fetched(l, t->version);
    return holds;
}

bool moe_loader_accept(struct moe_loader *l, const struct moe_group_assignment *a)
{
    struct table t;
    struct moe_status st = moe_loader__make_table(l, a, &t);
    if (moe_failed(&st))
        return false;
    bool holds = accept_held(l, &t);
    moe_loader__free_table(&t);
    return holds;
}

static struct moe_status replace(struct moe_loader *l, const struct table *t)
{
    struct moe_digest_table *digests = NULL, *old = l->digests;
    drop_layers(l);
    moe_mutex_lock(&l->lock);
    l->table = *t;
    moe_mutex_unlock(&l->lock);
    struct moe_status st = moe_digest_table_create(&digests);
    if (!moe_failed(&st))
        st = load_with_digests(l, digests);
    if (moe_failed(&st)) {
        moe_digest_table_destroy(digests);
        drop_layers(l);
        return st;
    }
    moe_mutex_lock(&l->lock);
    l->digests = digests;
    moe_mutex_unlock(&l->lock);
    moe_digest_table_destroy(old);
    return st;
}

struct moe_status moe_loader_load(struct moe_loader *l, const struct moe_group_assignment *a)
{
    struct table t;
    MOE_TRY(moe_loader__make_table(l, a, &t));
    if (accept_held(l, &t)) {
        moe_loader__free_table(&t);
        return moe_ok();
    }
    moe_loader_cancel_fetch(l);
    moe_mutex_lock(&l->fetching);
    struct moe_status st = replace(l, &t);
    moe_mutex_unlock(&l->fetching);
    return st;
}

struct moe_status moe_loader_reload(struct moe_loader *l)
{
    if (l->table.placements == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE, "nothing is loaded");
    moe_loader__destroy_layers(l, l->layers);
    struct moe_digest_table *again = NULL;
    struct moe_digest_difference difference;
    struct moe_status st = moe_digest_table_create(&again);
    if (!moe_failed(&st))
        st = load_with_digests(l, again);
    if (!moe_failed(&st) && moe_digest_table_differs(again, l->digests, &difference))
        st = moe_error(MOE_DATA_LOSS, MOE_REASON_MODEL_MISMATCH,
                       "%s in the model's files is not what was loaded before", difference.name);
    moe_digest_table_destroy(again);
    if (moe_failed(&st))
        drop_layers(l);
    return st;
}

bool moe_loader_differs(struct moe_loader *l, const struct moe_digest_table *want,
                        struct moe_digest_difference *out)
{
    moe_mutex_lock(&l->lock);
    bool differs = moe_digest_table_differs(l->digests, want, out);
    moe_mutex_unlock(&l->lock);
    return differs;
}

struct moe_status moe_loader_pass_digests(struct moe_loader *l, moe_group_part_fn add,
                                          void *add_ctx)
{
    uint8_t part[MOE_GROUP_PART_BYTES];
    struct moe_digest_cursor at = {0};
    size_t length;
    struct moe_status st = moe_ok();
    moe_mutex_lock(&l->lock);
    while (!moe_failed(&st) &&
           (length = moe_digest_table_pack(l->digests, &at, part, sizeof part)) > 0)
        st = add(add_ctx, part, length);
    moe_mutex_unlock(&l->lock);
    return st;
}

struct moe_placement *const *moe_loader_placements(const struct moe_loader *l)
{
    return &l->table.placements;
}

void moe_loader_cancel(struct moe_loader *l)
{
    atomic_store(&l->cancelled, true);
}

/* ---------------------------------------------------------------- reading, lifetime */

size_t moe_loader_layer_count(const struct moe_loader *l)
{
    return l->layer_count;
}

const struct moe_layer_spec *const *moe_loader_specs(const struct moe_loader *l)
{
    return l->specs;
}

struct moe_layer *const *moe_loader_layers(const struct moe_loader *l)
{
    return l->layers;
}

uint64_t moe_loader_placement_hash(struct moe_loader *l)
{
    moe_mutex_lock(&l->lock);
    uint64_t hash = l->table.hash;
    moe_mutex_unlock(&l->lock);
    return hash;
}

void moe_loader_progress(const struct moe_loader *l, uint64_t *loaded, uint64_t *total)
{
    *loaded = atomic_load(&l->loaded_bytes);
    *total = atomic_load(&l->total_bytes);
}

struct moe_status moe_loader_create(const struct moe_backend *backend, struct moe_device *device,
                                    const struct moe_model *model,
                                    const struct moe_loader_events *events, struct moe_loader **out)
{
    struct moe_digest_table *digests;
    MOE_TRY(moe_digest_table_create(&digests));
    struct moe_loader *l = calloc(1, sizeof *l);
    if (l == NULL) {
        moe_digest_table_destroy(digests);
        goto no_memory;
    }
    moe_mutex_init(&l->fetching);
    moe_mutex_init(&l->lock);
    l->digests = digests;
    l->backend = backend;
    l->device = device;
    l->model = model;
    if (events != NULL)
        l->events = *events;
    l->layer_count = moe_model_layer_count(model);
    l->specs = calloc(l->layer_count + 1, sizeof *l->specs);
    l->layers = calloc(l->layer_count + 1, sizeof *l->layers);
    l->next_layers = calloc(l->layer_count + 1, sizeof *l->next_layers);
    l->previous = calloc(l->layer_count + 1, sizeof *l->previous);
    l->dying = calloc(l->layer_count + 1, sizeof *l->dying);
    if (l->specs == NULL || l->layers == NULL || l->next_layers == NULL || l->previous == NULL ||
        l->dying == NULL) {
        l->layer_count = 0;
        goto no_memory;
    }
    for (size_t i = 0; i < l->layer_count; i++)
        l->specs[i] = moe_model_layer(model, i);
    *out = l;
    return moe_ok();
no_memory:
    moe_loader_destroy(l);
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for the layers");
}

void moe_loader_destroy(struct moe_loader *l)
{
    if (l == NULL)
        return;
    moe_loader__await_settling(l);
    drop_layers(l);
    moe_digest_table_destroy(l->digests);
    free(l->specs);
    free(l->layers);
    free(l->next_layers);
    free(l->previous);
    free(l->dying);
    moe_mutex_destroy(&l->lock);
    moe_mutex_destroy(&l->fetching);
    free(l);
}
