/* SPDX-License-Identifier: Apache-2.0 */
/* Models: the default one, which is always there, and added ones. Their tickets begin and end them
 * at the same place of the sequence on all slots, so a step never meets a layer that is not loaded
 * everywhere. */
#include "engine/state.h"

#include "base/clock.h"
#include "common/layer_rules.h"

#include <stdlib.h>

enum {
    ADD_MS = 2000,  /* a view adds a model that all slots hold much faster */
    RETRY_MS = 500, /* of requests for a model that a slot has to load */
};

struct moe_engine_model *moe_engine__find_model(const struct moe_engine *e, uint32_t model)
{
    struct moe_engine_model *m = e->models;
    while (m != NULL && m->of.model != model)
        m = m->next;
    return m;
}

bool moe_engine__find_layer(const struct moe_engine_model *m, uint32_t layer, size_t *index)
{
    size_t low = 0, high = m->of.count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (m->of.specs[middle]->layer < moe_layer_index(layer))
            low = middle + 1;
        else
            high = middle;
    }
    *index = low;
    return low < m->of.count && m->of.specs[low]->layer == moe_layer_index(layer);
}

void moe_engine__widen(struct moe_step_slot_shape *shape, const struct moe_layer_spec *const *specs,
                       size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (specs[i]->hidden > shape->hidden)
            shape->hidden = specs[i]->hidden;
        if (specs[i]->router.top_k > shape->top_k)
            shape->top_k = specs[i]->router.top_k;
    }
}

bool moe_engine__serves(const struct moe_engine *e, uint32_t layer)
{
    const struct moe_engine_model *m = moe_engine__find_model(e, moe_layer_model(layer));
    return e->session != NULL && m != NULL && m->phase == MODEL_SERVED;
}

static struct moe_status model_loading(void)
{
    return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_MODEL_LOADING, RETRY_MS,
                           "a slot has to load the model");
}

static bool is_of_model(const struct moe_work *w, uint64_t model)
{
    return moe_layer_model(w->layer) == model;
}

void moe_engine__begin_models(struct moe_engine *e)
{
    e->models_due_ns = moe_clock_ns() + ADD_MS * MOE_NS_PER_MS;
    moe_eventcount_notify(e->eventcount);
}

void moe_engine__expire_models(struct moe_engine *e, uint64_t now_ns)
{
    if (now_ns < e->models_due_ns)
        return;
    e->models_due_ns = MOE_NEVER;
    for (const struct moe_engine_model *m = e->base.next; m != NULL; m = m->next)
        if (m->phase == MODEL_WAITS)
            moe_engine__give_up_all(e, moe_batcher_evict(e->batcher, is_of_model, m->of.model),
                                    model_loading());
}

struct moe_status moe_engine__check_model(const struct moe_engine *e, uint32_t layer)
{
    bool waits = e->session == NULL || e->models_due_ns != MOE_NEVER;
    return waits || moe_engine__serves(e, layer) ? moe_ok() : model_loading();
}

void moe_engine__end_models(struct moe_engine *e)
{
    e->models_due_ns = MOE_NEVER;
    for (struct moe_engine_model *m = e->base.next; m != NULL; m = m->next)
        m->phase = MODEL_WAITS;
}

/* Retained Forwards are announced one by one elsewhere. */
void moe_engine__announce_model(struct moe_engine *e, uint32_t model)
{
    struct moe_step_key key;
    uint64_t tokens;
    for (size_t i = 0;; i++) {
        moe_mutex_lock(&e->lock);
        bool more = moe_batcher_queue(e->batcher, i, &key, &tokens);
        moe_mutex_unlock(&e->lock);
        if (!more)
            return;
        if (tokens > 0 && key.kind == MOE_STEP_FORWARD && moe_layer_model(key.layer) == model)
            e->config.announce(e->config.ctx, key.layer, key.kind, key.dtype, (uint32_t)tokens);
    }
}

/* ------------------------------------------------------------------- add, remove */

static struct moe_status check_layers(const struct moe_engine *e, const struct moe_engine_layers *l)
{
    struct moe_step_slot_shape shape = {0};
    const struct moe_step_slot_shape *have = &e->step_slots[0].shape;
    moe_engine__widen(&shape, l->specs, l->count);
    if (l->model == 0 || l->model > MOE_MODEL_NUMBER_MAX || l->count == 0 ||
        l->specs[l->count - 1]->layer > MOE_LAYER_INDEX_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "model %u cannot be an added one", l->model);
    if (shape.hidden <= have->hidden && shape.top_k <= have->top_k)
        return moe_ok();
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                     "layers of hidden %u and top-k %u; steps have room for %u and %u",
                     shape.hidden, shape.top_k, have->hidden, have->top_k);
}

static struct moe_status add_queues(struct moe_engine *e, const struct moe_engine_layers *l)
    MOE_REQUIRES(e->lock)
{
    uint32_t *keys = calloc(l->count, sizeof *keys);
    if (keys == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for layers");
    for (size_t i = 0; i < l->count; i++)
        keys[i] = moe_layer_key(l->model, l->specs[i]->layer);
    struct moe_status st = moe_batcher_add_model(e->batcher, keys, l->count);
    free(keys);
    return st;
}

struct moe_status moe_engine_add_model(struct moe_engine *e, const struct moe_engine_layers *layers)
{
    MOE_TRY(check_layers(e, layers));
    struct moe_engine_model *m = calloc(1, sizeof *m);
    if (m == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a model");
    m->of = *layers;
    m->phase = MODEL_WAITS;
    moe_mutex_lock(&e->lock);
    struct moe_status st = add_queues(e, layers);
    if (!moe_failed(&st)) {
        m->next = e->base.next;
        e->base.next = m;
    }
    moe_mutex_unlock(&e->lock);
    if (moe_failed(&st))
        free(m);
    return st;
}

struct moe_status moe_engine_remove_model(struct moe_engine *e, uint32_t model,
                                          struct moe_status why)
{
    struct moe_status st = moe_ok();
    moe_mutex_lock(&e->lock);
    struct moe_engine_model **at = &e->base.next;
    while (*at != NULL && (*at)->of.model != model)
        at = &(*at)->next;
    struct moe_engine_model *m = *at;
    if (m != NULL && m->phase != MODEL_WAITS) {
        st = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_IN_USE,
                       "the view in force serves model %u", model);
        m = NULL;
    }
    if (m != NULL) {
        moe_engine__give_up_all(e, moe_batcher_evict(e->batcher, is_of_model, model), why);
        moe_batcher_remove_model(e->batcher, model);
        *at = m->next;
    }
    moe_mutex_unlock(&e->lock);
    free(m);
    return st;
}

/* ------------------------------------------------------------------------- tickets */

static struct moe_status claim(struct moe_engine *e, struct moe_step_slot *step_slot)
    MOE_REQUIRES(e->lock)
{
    (void)e;
    bool add = step_slot->ticket.kind == MOE_STEP_ADD_MODEL;
    struct moe_engine_model *m = step_slot->model;
    if (m->of.model == 0 || m->phase != (add ? MODEL_WAITS : MODEL_SERVED))
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu: model %u is %sserved",
                         (unsigned long long)step_slot->ticket.seq, m->of.model,
                         m->phase == MODEL_WAITS ? "not " : "");
    m->phase = add ? MODEL_SERVED : MODEL_LEAVES;
    return moe_ok();
}

static void begin(struct moe_engine *e, struct moe_step_slot *step_slot,
                  struct moe_session *session)
{
    (void)e;
    (void)step_slot;
    (void)session;
}

/* All earlier tickets are complete: no step uses the layers of a model that leaves. */
static void complete(struct moe_engine *e, struct moe_step_slot *step_slot,
                     const struct moe_step_result *result) MOE_REQUIRES(e->lock)
{
    (void)result;
    bool served = step_slot->ticket.kind == MOE_STEP_ADD_MODEL;
    uint32_t model = step_slot->model->of.model;
    uint64_t epoch = step_slot->ticket.epoch;
    if (!served)
        step_slot->model->phase = MODEL_WAITS;
    step_slot->model = NULL;
    moe_mutex_unlock(&e->lock);
    e->config.finished(e->config.ctx, &step_slot->ticket, moe_ok(), 0);
    if (e->config.model_changed != NULL)
        e->config.model_changed(e->config.ctx, model, served, epoch);
    if (served)
        moe_engine__announce_model(e, model);
    moe_mutex_lock(&e->lock);
}

const struct moe_step_row moe_engine__model_change = {
    .claim = claim,
    .begin = begin,
    .complete = complete,
    .abandon = moe_engine__put_back,
};

/* ------------------------------------------------------------------------ placements */

/* The view lacks the slot of one copy, and has that of another one. */
static bool is_rehomed(const struct moe_placement *p, uint32_t expert, uint64_t live)
{
    uint64_t slots = moe_placement_slots_of(p, expert);
    return (slots & ~live) != 0 && (slots & live) != 0;
}

void moe_engine__list_rehomed(const struct moe_engine *e, const struct moe_step_slot *step_slot,
                              struct moe_work *w)
{
    const struct moe_engine_layers *of = &step_slot->model->of;
    w->rehomed_count = 0;
    if (of->placements == NULL)
        return;
    const struct moe_placement *p = &(*of->placements)[step_slot->layer];
    for (uint32_t expert = 0; expert < p->experts; expert++)
        if (is_rehomed(p, expert, e->live))
            w->rehomed[w->rehomed_count++] = expert;
}

static struct moe_status claim_swap(struct moe_engine *e, struct moe_step_slot *step_slot)
    MOE_REQUIRES(e->lock)
{
    (void)e;
    (void)step_slot;
    return moe_ok();
}

static void begin_swap(struct moe_engine *e, struct moe_step_slot *step_slot,
                       struct moe_session *session)
{
    (void)session;
    step_slot->failure = e->config.swap_placement(e->config.ctx, step_slot->ticket.layer);
}

/* All earlier tickets are complete. */
static void complete_swap(struct moe_engine *e, struct moe_step_slot *step_slot,
                          const struct moe_step_result *result) MOE_REQUIRES(e->lock)
{
    (void)result;
    const struct moe_ticket *t = &step_slot->ticket;
    moe_mutex_unlock(&e->lock);
    e->config.finished(e->config.ctx, t, moe_ok(), 0);
    e->config.placement_swapped(e->config.ctx, t->layer, t->epoch);
    moe_mutex_lock(&e->lock);
}

const struct moe_step_row moe_engine__swap = {
    .claim = claim_swap,
    .begin = begin_swap,
    .complete = complete_swap,
    .abandon = moe_engine__put_back,
};
