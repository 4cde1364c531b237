/* SPDX-License-Identifier: Apache-2.0 */
/* Retained Forward requests: each has a separate step, so that the devices retain exactly the batch
 * of its Backward. Such a request waits in the batcher like others, but is announced alone, with a
 * descriptor, and taken by its number. */
#include "engine/state.h"

enum moe_step_kind moe_engine__queue_of(const struct moe_engine *e, const struct moe_work *w)
{
    uint32_t most = e->session != NULL ? e->bucket_max : e->config.max_tokens_per_step;
    bool own = w->retain_session != NULL && moe_layer_model(w->layer) == 0 &&
               e->config.calls != NULL && w->tokens <= most && e->retain_count < RETAIN_MAX;
    return own ? MOE_STEP_FORWARD_RETAIN : MOE_STEP_FORWARD;
}

/* -------------------------------------------------------------------- descriptors */

static void find_unannounced(struct moe_work *w, void *arg)
{
    struct moe_work **first = arg;
    if (*first == NULL && w->number == 0)
        *first = w;
}

/* The request as a ticket without a place in the sequence. */
static void describe(const struct moe_engine *e, const struct moe_work *w, struct moe_ticket *out)
    MOE_REQUIRES(e->lock)
{
    *out = (struct moe_ticket){
        .epoch = e->epoch, .layer = w->layer, .kind = MOE_STEP_FORWARD_RETAIN, .dtype = w->dtype};
    out->descriptor.number = w->number;
    e->config.calls->describe(w, &out->descriptor);
}

bool moe_engine__number_retain(struct moe_engine *e, struct moe_ticket *out, uint32_t *tokens)
{
    struct moe_work *w = NULL;
    if (e->retain_count > 0)
        moe_batcher_visit_retain(e->batcher, find_unannounced, &w);
    if (w == NULL)
        return false;
    w->number = ++e->last_number;
    *tokens = w->tokens;
    describe(e, w, out);
    return true;
}

static void forget_number(struct moe_work *w, void *arg)
{
    uint32_t *count = arg;
    w->number = 0;
    (*count)++;
}

static bool is_too_large(const struct moe_work *w, uint64_t bucket)
{
    return w->own_step && w->tokens > bucket;
}

void moe_engine__forget_retain_numbers(struct moe_engine *e)
{
    struct moe_work *w = moe_batcher_evict(e->batcher, is_too_large, e->bucket_max);
    for (struct moe_work *next; w != NULL; w = next) {
        const struct moe_step_key key = {w->layer, MOE_STEP_FORWARD, w->dtype};
        next = w->next;
        w->own_step = false;
        moe_batcher_push(e->batcher, &key, w);
    }
    e->retain_count = 0;
    moe_batcher_visit_retain(e->batcher, forget_number, &e->retain_count);
}

/* ------------------------------------------------------------------------- tickets */

/* A request that was cancelled, or expired, after it had been announced: its step runs without
 * tokens, because the other slots run it. */
static struct moe_status claim(struct moe_engine *e, struct moe_step_slot *step_slot)
    MOE_REQUIRES(e->lock)
{
    const struct moe_ticket *t = &step_slot->ticket;
    const struct moe_step_key key = {t->layer, t->kind, t->dtype};
    MOE_TRY(e->config.calls->read(t, step_slot->exec));
    if (t->descriptor.origin != e->config.calls->slot(e->config.calls_ctx))
        return moe_ok();
    if (t->descriptor.number == 0 || t->descriptor.number > e->last_number || e->retain_count == 0)
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                         "ticket %llu is for a request that was not announced",
                         (unsigned long long)t->seq);
    e->retain_count--;
    struct moe_segment *only = &step_slot->segments[0];
    if (!moe_batcher_take_whole(e->batcher, &key, t->descriptor.number, only))
        return moe_ok();
    step_slot->segment_count = 1;
    step_slot->tokens = only->count;
    if (only->count <= t->bucket)
        return moe_ok();
    return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu: %u tokens do not fit into %u",
                     (unsigned long long)t->seq, only->count, t->bucket);
}

static void begin(struct moe_engine *e, struct moe_step_slot *step_slot,
                  struct moe_session *session)
{
    /* No other step of the session has this name. */
    moe_engine__begin_forward(e, step_slot, session, step_slot->ticket.seq);
}

static void complete(struct moe_engine *e, struct moe_step_slot *step_slot,
                     const struct moe_step_result *result) MOE_REQUIRES(e->lock)
{
    moe_mutex_unlock(&e->lock);
    moe_engine__hand_out(e, step_slot, result);
    e->config.calls->retained(e->config.calls_ctx, &step_slot->ticket, step_slot->tokens, result,
                              step_slot->exec);
    moe_engine__plan_expiry(e, true);
    moe_mutex_lock(&e->lock);
    for (size_t i = 0; i < step_slot->segment_count; i++) {
        step_slot->segments[i].work->retained_name = step_slot->ticket.seq;
        step_slot->segments[i].work->retained_here = result->retained;
    }
    moe_engine__finish_segments(e, step_slot, result);
}

const struct moe_step_row moe_engine__retained = {
    .claim = claim,
    .begin = begin,
    .complete = complete,
    .abandon = moe_engine__put_back,
};

/* ------------------------------------------------------------------------- expiry */

void moe_engine__plan_expiry(struct moe_engine *e, bool view)
{
    e->next_expiry = e->config.calls->next_expiry(e->config.calls_ctx, view);
}

void moe_engine__expire_retained(struct moe_engine *e, uint64_t now)
{
    bool view = e->session != NULL;
    moe_mutex_unlock(&e->lock);
    e->config.calls->expire(e->config.calls_ctx, now, view);
    moe_engine__plan_expiry(e, view);
    moe_mutex_lock(&e->lock);
}
