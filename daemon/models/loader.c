/* SPDX-License-Identifier: Apache-2.0 */
/* An assignment is first copied into tables of the backend's form and checked against the model, so
 * that loading uses no unchecked data from the wire. */
#include "models/loader.h"

#include "base/clock.h"
#include "base/cores.h"
#include "base/thread.h"
#include "base/transfer.h"
#include "base/wait.h"
#include "daemon/log.h"
#include "daemon/notify.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum {
    DIGEST_THREADS_MAX = 8,
    /* Of threads that load the next layers, or free old ones, while steps run. */
    QUIET_PRIORITY = 10,
    FREE_AFTER_MS = 2000,
    FREE_POLL_MS = 50,
};

/* The placement in the form of layer_create. */
struct table {
    uint32_t slot; /* own */
    uint64_t content_hash, hash;
    size_t layer_count;
    struct moe_placement *placements; /* [layer_count] */
    uint32_t *offsets;                /* of all layers, one after the other */
    uint16_t *slots;
};

/* What one assignment has loaded. */
struct share {
    struct moe_layer **layers;        /* [layer_count] */
    struct table table;               /* of the layers; placements = NULL when none is loaded */
    struct moe_digest_table *digests; /* of the layers */
};

struct moe_loader {
    const struct moe_backend *backend;
    struct moe_device *device;
    const struct moe_model *model;
    struct moe_loader_events events; /* name NULL: the default model */
    size_t layer_count;
    const struct moe_layer_spec **specs; /* [layer_count] */
    struct share now, next;              /* `next`: in addition */
    struct share old;                    /* what `freeing` frees */
    pthread_t freeing;
    bool is_freeing;
    atomic_bool free_now;
    struct share *loading;         /* during a load, one of these */
    const struct share *assigned;  /* of the last assignment */
    struct moe_digester *digester; /* during a load */
    atomic_bool cancelled, may_load_next;
    _Atomic uint64_t loaded_bytes, total_bytes;
    uint64_t begun_ns, logged_ns; /* of the present load: its start, its last progress line */
    uint64_t layer_base;          /* bytes read before the present layer */
    size_t current_layer;
};

/* ------------------------------------------------------------------------ tables */

static void free_table(struct table *t)
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
    free_table(out);
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "no memory for the placement");
}

/* The assignment in the backend's form, checked against the model. */
static struct moe_status make_table(const struct moe_loader *l,
                                    const struct moe_group_assignment *a, struct table *out)
{
    if (a->layer_count != l->layer_count)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                         "a placement of %zu layers for a model of %zu", a->layer_count,
                         l->layer_count);
    *out = (struct table){.slot = a->slot};
    MOE_TRY(allocate_table(a, out));
    uint32_t *offset = out->offsets;
    uint16_t *slot = out->slots;
    for (size_t i = 0; i < a->layer_count; i++) {
        const struct moe_group_layer *layer = &a->layers[i];
        struct moe_status st = fill_layer(l->specs[i], layer, a->slots, offset, slot);
        if (moe_failed(&st)) {
            free_table(out);
            return st;
        }
        out->placements[i] = (struct moe_placement){
            .version = a->placement_version,
            .experts = (uint32_t)layer->experts,
            .slots = a->slots,
            .offset = offset,
            .slot = slot,
        };
        offset += layer->experts + 1;
        slot += layer->slot_count;
    }
    out->content_hash = hash_content(out, a);
    out->hash = mix(out->content_hash, a->placement_version);
    return moe_ok();
}

static bool same_content(const struct table *a, const struct table *b)
{
    if (a->placements == NULL || a->slot != b->slot || a->layer_count != b->layer_count ||
        a->content_hash != b->content_hash)
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

/* Experts of `slot`, ascending; `experts` has room for the layer's E. */
static size_t list_own(const struct moe_placement *p, uint32_t slot, uint32_t *experts)
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

static void destroy_layers(const struct moe_loader *l, struct share *share)
{
    for (size_t i = 0; i < l->layer_count; i++) {
        if (share->layers[i] != NULL)
            l->backend->layer_destroy(share->layers[i]);
        share->layers[i] = NULL;
    }
}

static void drop_share(struct moe_loader *l, struct share *share)
{
    destroy_layers(l, share);
    free_table(&share->table);
    moe_digest_table_clear(share->digests);
}

static void drop_layers(struct moe_loader *l)
{
    drop_share(l, &l->now);
    atomic_store(&l->loaded_bytes, 0);
    atomic_store(&l->total_bytes, 0);
}

static bool is_cancelled(const struct moe_loader *l)
{
    return atomic_load(&l->cancelled) ||
           (l->loading == &l->next && !atomic_load(&l->may_load_next));
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
    if (is_cancelled(l))
        return load_cancelled();
    return l->backend->layer_upload(l->loading->layers[l->current_layer], weight, expert, dtype,
                                    data, bytes);
}

/* moe_weight_source_sink: the backend reads from the model's files itself. */
static struct moe_status fetch(void *ctx, enum moe_weight weight, uint32_t expert,
                               enum moe_dtype dtype, const struct moe_weight_source *source,
                               size_t bytes)
{
    struct moe_loader *l = ctx;
    if (is_cancelled(l))
        return load_cancelled();
    return l->backend->layer_fetch(l->loading->layers[l->current_layer], weight, expert, dtype,
                                   source, bytes);
}

/* moe_packed_sink */
static struct moe_status upload_packed(void *ctx, enum moe_weight weight, uint32_t expert,
                                       const struct moe_packed_matrix *matrix)
{
    struct moe_loader *l = ctx;
    if (is_cancelled(l))
        return load_cancelled();
    return l->backend->layer_upload_packed(l->loading->layers[l->current_layer], weight, expert,
                                           matrix);
}

/* Adds the layer's digests to `digests`. */
static struct moe_status load_layer(struct moe_loader *l, size_t i,
                                    struct moe_digest_table *digests)
{
    uint32_t experts[MOE_MAX_EXPERTS];
    struct share *share = l->loading;
    const struct table *table = &share->table;
    size_t count = list_own(&table->placements[i], table->slot, experts);
    l->current_layer = i;
    MOE_TRY(l->backend->layer_create(l->device, l->specs[i], &table->placements[i], table->slot,
                                     &share->layers[i]));
    MOE_TRY(moe_model_stream_layer(l->model, i, experts, count, upload,
                                   l->backend->layer_fetch != NULL ? fetch : NULL,
                                   l->backend->layer_upload_packed != NULL ? upload_packed : NULL,
                                   l, l->digester, on_progress, l));
    l->layer_base += moe_model_layer_bytes(l->model, i, experts, count);
    MOE_TRY(l->backend->layer_finish(share->layers[i]));
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
        const struct table *table = &l->loading->table;
        size_t count = list_own(&table->placements[i], table->slot, experts);
        *to_read += moe_model_layer_bytes(l->model, i, experts, count);
        *to_keep += moe_model_layer_memory(l->model, i, experts, count);
    }
}

static struct moe_status load_all(struct moe_loader *l, struct moe_digest_table *digests)
{
    uint64_t total, resident;
    count_bytes(l, &total, &resident);
    MOE_TRY(moe_loader_check_room(l, resident, "the experts"));
    atomic_store(&l->total_bytes, total);
    l->begun_ns = l->logged_ns = moe_clock_ns();
    l->layer_base = 0;
    for (size_t i = 0; i < l->layer_count; i++)
        MOE_TRY(moe_error_context(load_layer(l, i, digests), "layer %u", l->specs[i]->layer));
    atomic_store(&l->loaded_bytes, total);
    log_progress(l, moe_clock_ns(), total);
    return moe_ok();
}

static struct moe_status load_with_digests(struct moe_loader *l, struct share *share,
                                           struct moe_digest_table *digests)
{
    l->loading = share;
    uint32_t cores = moe_usable_cores();
    MOE_TRY(moe_digester_create(l->model, cores < DIGEST_THREADS_MAX ? cores : DIGEST_THREADS_MAX,
                                &l->digester));
    struct moe_status st = load_all(l, digests);
    if (moe_failed(&st)) /* a backend may still read from its sources */
        destroy_layers(l, share);
    moe_digester_destroy(l->digester);
    l->digester = NULL;
    l->loading = NULL;
    return st;
}

bool moe_loader_holds(const struct moe_loader *l, const struct moe_group_assignment *a)
{
    struct table t;
    struct moe_status st = make_table(l, a, &t);
    if (moe_failed(&st))
        return false;
    bool holds = same_content(&l->now.table, &t) || same_content(&l->next.table, &t);
    free_table(&t);
    return holds;
}

/* Threads that this one creates have its priority. It cannot be raised again. */
static void become_quiet(void)
{
    (void)setpriority(PRIO_PROCESS, (id_t)gettid(), QUIET_PRIORITY);
}

/* A view that begins touches new memory. Threads that free much meanwhile would delay it. */
static void *free_old(void *arg)
{
    struct moe_loader *l = arg;
    uint64_t due_ns = moe_clock_ns() + FREE_AFTER_MS * MOE_NS_PER_MS;
    become_quiet();
    for (uint64_t now = moe_clock_ns(); now < due_ns && !atomic_load(&l->free_now);
         now = moe_clock_ns())
        moe_sleep_until(now + FREE_POLL_MS * MOE_NS_PER_MS);
    drop_share(l, &l->old);
    return NULL;
}

static void await_freeing(struct moe_loader *l)
{
    atomic_store(&l->free_now, true);
    if (l->is_freeing)
        pthread_join(l->freeing, NULL);
    l->is_freeing = false;
    atomic_store(&l->free_now, false);
}

/* Loads `t` into an empty share, and owns it. */
static struct moe_status fill_share(struct moe_loader *l, struct share *share, struct table t)
{
    share->table = t;
    l->assigned = share;
    struct moe_status st = load_with_digests(l, share, share->digests);
    if (moe_failed(&st) && share == &l->now)
        drop_layers(l);
    else if (moe_failed(&st))
        drop_share(l, share);
    return st;
}

/* True if a share has the content of `t`, which may be of a later version. Owns `t` then. */
static bool find_share(struct moe_loader *l, struct share *share, struct table *t)
{
    if (!same_content(&share->table, t))
        return false;
    share->table.hash = t->hash;
    l->assigned = share;
    free_table(t);
    return true;
}

struct moe_status moe_loader_load(struct moe_loader *l, const struct moe_group_assignment *a)
{
    struct table t;
    MOE_TRY(make_table(l, a, &t));
    if (find_share(l, &l->now, &t)) {
        drop_share(l, &l->next);
        return moe_ok();
    }
    if (find_share(l, &l->next, &t))
        return moe_ok();
    drop_share(l, &l->next);
    drop_layers(l);
    return fill_share(l, &l->now, t);
}

struct quiet_load {
    struct moe_loader *loader;
    struct table table;
    struct moe_status status;
};

static void *load_quietly(void *arg)
{
    struct quiet_load *q = arg;
    become_quiet();
    q->status = fill_share(q->loader, &q->loader->next, q->table);
    return NULL;
}

struct moe_status moe_loader_load_next(struct moe_loader *l, const struct moe_group_assignment *a)
{
    struct table t;
    pthread_t thread;
    if (l->now.table.placements == NULL)
        return moe_loader_load(l, a);
    MOE_TRY(make_table(l, a, &t));
    if (find_share(l, &l->now, &t) || find_share(l, &l->next, &t))
        return moe_ok();
    drop_share(l, &l->next);
    await_freeing(l);
    struct quiet_load q = {.loader = l, .table = t};
    int rc = moe_thread_create(&thread, "moe-load-next", load_quietly, &q);
    if (rc != 0) {
        free_table(&t);
        return moe_thread_failure("moe-load-next", rc);
    }
    pthread_join(thread, NULL);
    return q.status;
}

void moe_loader_take_next(struct moe_loader *l, uint64_t placement_hash)
{
    if (l->next.table.placements == NULL || l->next.table.hash != placement_hash)
        return;
    struct share old = l->now;
    for (size_t i = 0; i < l->layer_count; i++) { /* readers have the array of `now` */
        struct moe_layer *layer = l->now.layers[i];
        l->now.layers[i] = l->next.layers[i];
        l->next.layers[i] = layer;
    }
    l->now.table = l->next.table;
    l->now.digests = l->next.digests;
    l->next.table = old.table;
    l->next.digests = old.digests;
    l->assigned = &l->now;
}

void moe_loader_drop_next(struct moe_loader *l)
{
    if (l->next.table.placements == NULL)
        return;
    await_freeing(l);
    struct share empty = l->old;
    l->old = l->next;
    l->next = empty;
    int rc = moe_thread_create(&l->freeing, "moe-free-layers", free_old, l);
    l->is_freeing = rc == 0;
    if (rc != 0)
        drop_share(l, &l->old);
}

void moe_loader_allow_next(struct moe_loader *l, bool allowed)
{
    atomic_store(&l->may_load_next, allowed);
}

struct moe_status moe_loader_reload(struct moe_loader *l)
{
    if (l->now.table.placements == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE, "nothing is loaded");
    destroy_layers(l, &l->now);
    struct moe_digest_table *again = NULL;
    struct moe_digest_difference difference;
    struct moe_status st = moe_digest_table_create(&again);
    if (!moe_failed(&st))
        st = load_with_digests(l, &l->now, again);
    if (!moe_failed(&st) && moe_digest_table_differs(again, l->now.digests, &difference))
        st = moe_error(MOE_DATA_LOSS, MOE_REASON_MODEL_MISMATCH,
                       "%s in the model's files is not what was loaded before", difference.name);
    moe_digest_table_destroy(again);
    if (moe_failed(&st))
        drop_layers(l);
    return st;
}

const struct moe_digest_table *moe_loader_digests(const struct moe_loader *l)
{
    return l->assigned->digests;
}

struct moe_status moe_loader_pass_digests(const struct moe_loader *l, moe_group_part_fn add,
                                          void *add_ctx)
{
    uint8_t part[MOE_GROUP_PART_BYTES];
    struct moe_digest_cursor at = {0};
    size_t length;
    while ((length = moe_digest_table_pack(l->assigned->digests, &at, part, sizeof part)) > 0)
        MOE_TRY(add(add_ctx, part, length));
    return moe_ok();
}

const struct moe_placement *moe_loader_placements(const struct moe_loader *l)
{
    return l->now.table.placements;
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
    return l->now.layers;
}

uint64_t moe_loader_placement_hash(const struct moe_loader *l)
{
    return l->now.table.hash;
}

void moe_loader_progress(const struct moe_loader *l, uint64_t *loaded, uint64_t *total)
{
    *loaded = atomic_load(&l->loaded_bytes);
    *total = atomic_load(&l->total_bytes);
}

static bool make_share(const struct moe_loader *l, struct share *share)
{
    share->layers = calloc(l->layer_count + 1, sizeof *share->layers);
    struct moe_status st = moe_digest_table_create(&share->digests);
    return share->layers != NULL && !moe_failed(&st);
}

static void destroy_share(struct moe_loader *l, struct share *share)
{
    if (share->layers != NULL && share->digests != NULL)
        drop_share(l, share);
    moe_digest_table_destroy(share->digests);
    free(share->layers);
}

struct moe_status moe_loader_create(const struct moe_backend *backend, struct moe_device *device,
                                    const struct moe_model *model,
                                    const struct moe_loader_events *events, struct moe_loader **out)
{
    struct moe_loader *l = calloc(1, sizeof *l);
    if (l == NULL)
        goto no_memory;
    l->assigned = &l->now;
    l->backend = backend;
    l->device = device;
    l->model = model;
    if (events != NULL)
        l->events = *events;
    l->layer_count = moe_model_layer_count(model);
    l->specs = calloc(l->layer_count + 1, sizeof *l->specs);
    if (l->specs == NULL || !make_share(l, &l->now) || !make_share(l, &l->next) ||
        !make_share(l, &l->old))
        goto no_memory;
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
    await_freeing(l);
    destroy_share(l, &l->old);
    destroy_share(l, &l->now);
    destroy_share(l, &l->next);
    free(l->specs);
    free(l);
}
