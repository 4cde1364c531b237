/* SPDX-License-Identifier: Apache-2.0 */
/* Experts of another placement, loaded next to those in use; see "another placement" in loader.h.
 * Each layer gets a successor, which shares the weights of experts that stay; of a backend that
 * cannot do this, it gets a whole new layer. */
#include "models/loader_state.h"

#include "base/clock.h"
#include "base/thread.h"
#include "base/wait.h"
#include "daemon/log.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum {
    QUIET_PRIORITY = 19,
    DIGEST_THREADS = 2, /* that read and hash */
    SETTLE_AFTER_MS = 2000,
    SETTLE_POLL_MS = 50,
};

/* Threads that this one creates have its priority. It cannot be raised again. Without it, steps
 * take longer meanwhile, and that is all. */
static void become_quiet(void)
{
    (void)setpriority(PRIO_PROCESS, (id_t)gettid(), QUIET_PRIORITY);
}

bool moe_loader_moves(const struct moe_loader *l)
{
    return l->backend->layer_succeed != NULL && l->backend->layer_fetch == NULL;
}

/* ---------------------------------------------------------------------- what to fetch */

/* Experts of layer `i` that this slot has to load. */
static size_t list_new(const struct moe_loader *l, const struct table *t, size_t i,
                       uint32_t *experts)
{
    uint32_t own[MOE_MAX_EXPERTS], held[MOE_MAX_EXPERTS];
    size_t owns = moe_loader__list_own(&t->placements[i], t->slot, own), count = 0, at = 0;
    size_t holds =
        moe_loader_moves(l) ? moe_loader__list_own(&l->table.placements[i], t->slot, held) : 0;
    for (size_t e = 0; e < owns; e++) {
        while (at < holds && held[at] < own[e])
            at++;
        if (at == holds || held[at] != own[e])
            experts[count++] = own[e];
    }
    return count;
}

static struct moe_status check_room(const struct moe_loader *l, const struct table *t)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < l->layer_count; i++) {
        uint32_t experts[MOE_MAX_EXPERTS];
        size_t count = list_new(l, t, i, experts);
        uint64_t shared = moe_loader_moves(l) ? moe_model_layer_memory(l->model, i, NULL, 0) : 0;
        bytes += moe_model_layer_memory(l->model, i, experts, count) - shared;
    }
    return moe_loader_check_room(l, bytes, "the experts that move here, next to those in use,");
}

/* ------------------------------------------------------------------------------- fetch */

/* Of a pause: a cancelled fetch ends soon. */
#define SLICE_NS (100 * MOE_NS_PER_MS)

/* One fetch; the thread's. */
struct fetch {
    struct moe_loader *loader;
    struct moe_layer *layer; /* the present one */
    struct moe_digester *digester;
    void (*progress)(void *ctx, uint64_t read_bytes);
    void *ctx;
    uint64_t base, reported_ns; /* bytes read before the layer */
    uint64_t rested_ns;         /* end of the last pause */
    uint32_t share;             /* percent of the time in which it works */
    uint64_t order, next_order; /* cancels before it */
    bool keep;                  /* of the assignment */
    struct table *table;
    struct moe_status status;
};

static struct moe_status check_going_on(const struct fetch *f)
{
    const struct moe_loader *l = f->loader;
    bool ends = atomic_load(&l->cancels) != f->order || atomic_load(&l->cancelled) ||
                (f->keep && (!atomic_load(&l->may_fetch_next) ||
                             atomic_load(&l->next_cancels) != f->next_order));
    return ends ? moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "loading other experts was cancelled")
                : moe_ok();
}

/* A successor has what is not an expert's. */
static bool is_shared(const struct fetch *f, enum moe_weight weight)
{
    return moe_loader_moves(f->loader) && !moe_weight_is_expert(weight);
}

/* moe_weight_sink */
static struct moe_status upload(void *ctx, enum moe_weight weight, uint32_t expert,
                                enum moe_dtype dtype, const void *data, size_t bytes)
{
    struct fetch *f = ctx;
    MOE_TRY(check_going_on(f));
    if (is_shared(f, weight))
        return moe_ok();
    return f->loader->backend->layer_upload(f->layer, weight, expert, dtype, data, bytes);
}

/* moe_packed_sink */
static struct moe_status upload_packed(void *ctx, enum moe_weight weight, uint32_t expert,
                                       const struct moe_packed_matrix *matrix)
{
    struct fetch *f = ctx;
    MOE_TRY(check_going_on(f));
    if (is_shared(f, weight))
        return moe_ok();
    return f->loader->backend->layer_upload_packed(f->layer, weight, expert, matrix);
}

/* Steps come first: the weight took its share of the time, and the rest is theirs. */
static void rest(struct fetch *f)
{
    uint64_t now = moe_clock_ns(), until = now + (now - f->rested_ns) * (100 - f->share) / f->share;
    struct moe_status st = check_going_on(f);
    while (now < until && !moe_failed(&st)) {
        moe_sleep_until(until - now < SLICE_NS ? until : now + SLICE_NS);
        now = moe_clock_ns();
        st = check_going_on(f);
    }
    f->rested_ns = moe_clock_ns();
}

static void on_progress(void *ctx, uint64_t read_bytes)
{
    struct fetch *f = ctx;
    rest(f);
    uint64_t now = moe_clock_ns();
    if (f->progress == NULL || now - f->reported_ns < MOE_NS_PER_S)
        return;
    f->reported_ns = now;
    f->progress(f->ctx, f->base + read_bytes);
}

static struct moe_status create_layer(const struct moe_loader *l, const struct table *t, size_t i)
{
    return moe_loader_moves(l)
               ? l->backend->layer_succeed(l->layers[i], &t->placements[i], &l->next_layers[i])
               : l->backend->layer_create(l->device, l->specs[i], &t->placements[i], t->slot,
                                          &l->next_layers[i]);
}

static struct moe_status fetch_layer(struct fetch *f, const struct table *t, size_t i,
                                     struct moe_digest_table *digests)
{
    struct moe_loader *l = f->loader;
    uint32_t experts[MOE_MAX_EXPERTS];
    size_t count = list_new(l, t, i, experts);
    bool reads = count > 0 || !moe_loader_moves(l);
    MOE_TRY(check_going_on(f));
    MOE_TRY(create_layer(l, t, i));
    f->layer = l->next_layers[i];
    if (reads) {
        const struct moe_model_sinks sinks = {
            .weight = upload,
            .packed = l->backend->layer_upload_packed != NULL ? upload_packed : NULL,
            .ctx = f};
        MOE_TRY(moe_model_stream_layer(l->model, i, experts, count, &sinks, f->digester,
                                       on_progress, f));
        f->base += moe_model_layer_bytes(l->model, i, experts, count);
    }
    MOE_TRY(l->backend->layer_finish(f->layer));
    return reads ? moe_digester_finish(f->digester, digests) : moe_ok();
}

static struct moe_status fetch_layers(struct fetch *f, const struct table *t,
                                      struct moe_digest_table *digests)
{
    struct moe_loader *l = f->loader;
    MOE_TRY(check_room(l, t));
    MOE_TRY(moe_digester_create(l->model, DIGEST_THREADS, &f->digester));
    struct moe_status st = moe_ok();
    for (size_t i = 0; i < l->layer_count && !moe_failed(&st); i++)
        st = moe_error_context(fetch_layer(f, t, i, digests), "layer %u", l->specs[i]->layer);
    moe_digester_destroy(f->digester);
    return st;
}

/* What was read again, such as routers, has the bytes of the first load. The experts are compared
 * by the coordinator. */
static struct moe_status keep_digests(struct moe_loader *l, const struct moe_digest_table *digests)
{
    struct moe_digest_difference d;
    if (moe_digest_table_differs(digests, l->digests, &d))
        return moe_error(MOE_DATA_LOSS, MOE_REASON_MODEL_MISMATCH,
                         "%.150s in the model's files is not what was loaded before", d.name);
    return moe_digest_table_merge(l->digests, digests);
}

static struct moe_status fetch(struct fetch *f)
{
    struct moe_loader *l = f->loader;
    struct moe_digest_table *digests;
    MOE_TRY(moe_digest_table_create(&digests));
    struct moe_status st = fetch_layers(f, f->table, digests);
    moe_mutex_lock(&l->lock);
    if (!moe_failed(&st))
        st = keep_digests(l, digests);
    if (!moe_failed(&st)) {
        l->next = *f->table;
        *f->table = (struct table){0};
        l->ready = true;
    }
    moe_mutex_unlock(&l->lock);
    moe_digest_table_destroy(digests);
    if (moe_failed(&st))
        moe_loader__destroy_layers(l, l->next_layers);
    return st;
}

static void *run_fetch(void *arg)
{
    struct fetch *f = arg;
    become_quiet();
    f->status = fetch(f);
    return NULL;
}

/* With `fetching`. */
static struct moe_status fetch_quietly(struct fetch *f)
{
    struct moe_loader *l = f->loader;
    pthread_t thread;
    if (l->table.placements == NULL || f->table->slot != l->table.slot)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "no experts of this slot are loaded, so none can be loaded next to them");
    int rc = moe_thread_create(&thread, "moe-fetch", run_fetch, f);
    if (rc != 0)
        return moe_thread_failure("moe-fetch", rc);
    pthread_join(thread, NULL);
    return f->status;
}

struct moe_status moe_loader_fetch(struct moe_loader *l, const struct moe_group_assignment *a,
                                   uint64_t order, uint32_t share,
                                   void (*progress)(void *ctx, uint64_t read_bytes), void *ctx)
{
    struct table t;
    uint64_t next_order = atomic_load(&l->next_cancels);
    MOE_TRY(moe_loader__make_table(l, a, &t));
    if (moe_loader__holds(l, &t)) {
        moe_loader__free_table(&t);
        return moe_ok();
    }
    struct fetch f = {.loader = l,
                      .order = order,
                      .next_order = next_order,
                      .progress = progress,
                      .ctx = ctx,
                      .rested_ns = moe_clock_ns(),
                      .share = share,
                      .keep = a->keep,
                      .table = &t};
    moe_mutex_lock(&l->fetching);
    moe_loader__drop_next(l);
    moe_loader__settle(l);
    struct moe_status st = fetch_quietly(&f);
    moe_mutex_unlock(&l->fetching);
    moe_loader__free_table(&t);
    return st;
}

void moe_loader_allow_next(struct moe_loader *l, bool allowed)
{
    if (!allowed)
        atomic_fetch_add(&l->next_cancels, 1);
    atomic_store(&l->may_fetch_next, allowed);
}

void moe_loader_cancel_fetch(struct moe_loader *l)
{
    atomic_fetch_add(&l->cancels, 1);
}

uint64_t moe_loader_order_fetch(const struct moe_loader *l)
{
    return atomic_load(&l->cancels);
}

void moe_loader__drop_next(struct moe_loader *l)
{
    moe_mutex_lock(&l->lock);
    struct table old = l->next;
    bool ready = l->ready;
    l->next = (struct table){0};
    l->ready = false;
    moe_mutex_unlock(&l->lock);
    if (ready)
        moe_loader__destroy_layers(l, l->next_layers);
    moe_loader__free_table(&old);
}

void moe_loader_drop_fetched(struct moe_loader *l, uint32_t except)
{
    moe_mutex_lock(&l->fetching);
    uint32_t version = moe_loader_fetched_version(l);
    if (version != 0 && version != except)
        moe_loader__drop_next(l);
    moe_mutex_unlock(&l->fetching);
}

/* -------------------------------------------------------------------------------- swap */

static struct moe_status swap(struct moe_loader *l, uint32_t version)
{
    if (l->table.placements != NULL && l->table.version == version)
        return moe_ok();
    if (!l->ready || l->next.version != version)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "placement %u was not fetched here", version);
    for (size_t i = 0; i < l->layer_count; i++) {
        MOE_INVARIANT(l->previous[i] == NULL);
        l->previous[i] = l->layers[i];
        l->layers[i] = l->next_layers[i];
        l->next_layers[i] = NULL;
    }
    l->swaps++;
    l->next.spare = l->table.spare;
    moe_loader__free_table(&l->table);
    l->table = l->next;
    l->next = (struct table){0};
    l->ready = false;
    return moe_ok();
}

struct moe_status moe_loader_swap(struct moe_loader *l, uint32_t version)
{
    moe_mutex_lock(&l->lock);
    struct moe_status st = swap(l, version);
    moe_mutex_unlock(&l->lock);
    return st;
}

/* With `fetching`. `swaps`: only if there were no more; NULL = in any case. */
static void free_previous(struct moe_loader *l, const uint64_t *swaps)
{
    moe_mutex_lock(&l->lock);
    if (swaps == NULL || l->swaps == *swaps) {
        struct moe_layer **empty = l->dying;
        l->dying = l->previous;
        l->previous = empty;
    }
    moe_mutex_unlock(&l->lock);
    moe_loader__destroy_layers(l, l->dying);
}

/* A swap needs a fetch, which settles first. */
void moe_loader__settle(struct moe_loader *l)
{
    free_previous(l, NULL);
}

void moe_loader_settle(struct moe_loader *l)
{
    moe_mutex_lock(&l->fetching);
    moe_loader__settle(l);
    moe_mutex_unlock(&l->fetching);
}

static void *settle_soon(void *arg)
{
    struct moe_loader *l = arg;
    uint64_t due_ns = moe_clock_ns() + SETTLE_AFTER_MS * MOE_NS_PER_MS;
    become_quiet();
    for (uint64_t now = moe_clock_ns(); now < due_ns && !atomic_load(&l->settle_now);
         now = moe_clock_ns())
        moe_sleep_until(now + SETTLE_POLL_MS * MOE_NS_PER_MS);
    moe_mutex_lock(&l->fetching);
    free_previous(l, &l->settled_swaps);
    moe_mutex_unlock(&l->fetching);
    return NULL;
}

void moe_loader__await_settling(struct moe_loader *l)
{
    atomic_store(&l->settle_now, true);
    if (l->is_settling)
        pthread_join(l->settling, NULL);
    l->is_settling = false;
    atomic_store(&l->settle_now, false);
}

void moe_loader_settle_later(struct moe_loader *l)
{
    moe_mutex_lock(&l->lock);
    bool settled = l->previous[0] == NULL;
    uint64_t swaps = l->swaps;
    moe_mutex_unlock(&l->lock);
    if (settled)
        return;
    moe_loader__await_settling(l);
    l->settled_swaps = swaps;
    int rc = moe_thread_create(&l->settling, "moe-free-layers", settle_soon, l);
    l->is_settling = rc == 0;
    if (rc != 0)
        moe_loader_settle(l);
}

void moe_loader_adopt(struct moe_loader *l, uint64_t placement_hash)
{
    moe_mutex_lock(&l->lock);
    uint32_t version = l->ready && l->next.hash == placement_hash ? l->next.version : 0;
    moe_mutex_unlock(&l->lock);
    if (version == 0)
        moe_loader_cancel_fetch(l);
    moe_mutex_lock(&l->fetching);
    moe_loader__settle(l);
    struct moe_status st = version != 0 ? moe_loader_swap(l, version) : moe_ok();
    if (moe_failed(&st)) /* the next comparison of placements tells the group */
        moe_log_warn("%s", st.text);
    moe_loader__drop_next(l);
    moe_mutex_unlock(&l->fetching);
    if (version != 0)
        moe_log_info("experts have moved: placement %u is in use", version);
}

uint32_t moe_loader_version(struct moe_loader *l)
{
    moe_mutex_lock(&l->lock);
    uint32_t version = l->table.placements != NULL ? l->table.version : 0;
    moe_mutex_unlock(&l->lock);
    return version;
}

uint32_t moe_loader_fetched_version(struct moe_loader *l)
{
    moe_mutex_lock(&l->lock);
    uint32_t version = l->ready ? l->next.version : 0;
    moe_mutex_unlock(&l->lock);
    return version;
}
