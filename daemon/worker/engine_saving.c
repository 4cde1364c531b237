/* Forward requests with a step of their own, so that what it leaves on the devices is of exactly
 * the batch that their Backward will have. Such a request waits in the batcher like any other, but
 * is announced by itself, with an order that names it, and taken by that name. */
#include "worker/engine_state.h"

#include "base/clock.h"

#include <string.h>

enum moe_step_kind moe_engine__queue_of(const struct moe_engine *e, const struct moe_work *w)
{
    uint32_t most = e->session != NULL ? e->bucket_max : e->config.max_tokens_per_step;
    bool own = w->save_session != NULL && e->config.training != NULL && w->tokens <= most &&
               e->saving_count < SAVING_MAX;
    return own ? MOE_STEP_SAVING_FORWARD : MOE_STEP_FORWARD;
}

/* ------------------------------------------------------------------------- orders */

static void find_unannounced(struct moe_work *w, void *arg)
{
    struct moe_work **first = arg;
    if (*first == NULL && w->number == 0)
        *first = w;
}

/* The request as a ticket without a place in the sequence. */
static void describe(const struct moe_engine *e, const struct moe_work *w, struct moe_ticket *out)
{
    struct moe_train_call call = {.kind = MOE_STEP_SAVING_FORWARD, .id = w->save_id};
    *out = (struct moe_ticket){
        .epoch = e->epoch, .layer = w->layer, .kind = MOE_STEP_SAVING_FORWARD, .dtype = w->dtype};
    strncpy(call.session, w->save_session, MOE_TRAINING_NAME_MAX);
    out->order.number = w->number;
    moe_train_call_pack(&call, out->order.body, &out->order.length);
}

bool moe_engine__number_saving(struct moe_engine *e, struct moe_ticket *out, uint32_t *tokens)
{
    struct moe_work *w = NULL;
    if (e->saving_count > 0)
        moe_batcher_visit_saving(e->batcher, find_unannounced, &w);
    if (w == NULL)
        return false;
    w->number = ++e->last_number;
    *tokens = w->tokens;
    describe(e, w, out);
    return true;
}

static void forget_order(struct moe_work *w, void *arg)
{
    uint32_t *count = arg;
    w->number = 0;
    (*count)++;
}

static bool is_too_large(const struct moe_work *w, uint64_t bucket)
{
    return w->own_step && w->tokens > bucket;
}

void moe_engine__forget_orders(struct moe_engine *e)
{
    struct moe_work *w = moe_batcher_evict(e->batcher, is_too_large, e->bucket_max);
    for (struct moe_work *next; w != NULL; w = next) {
        const struct moe_batch_key key = {w->layer, MOE_STEP_FORWARD, w->dtype};
        next = w->next;
        w->own_step = false;
        moe_batcher_push(e->batcher, &key, w);
    }
    e->saving_count = 0;
    moe_batcher_visit_saving(e->batcher, forget_order, &e->saving_count);
}

/* ------------------------------------------------------------------------- tickets */

/* One that was cancelled, or whose time was over, after it had been announced: its step runs all
 * the same, without tokens, because all slots have begun it. */
struct moe_status moe_engine__claim_saving(struct moe_engine *e, struct moe_lane *lane)
{
    const struct moe_ticket *t = &lane->ticket;
    const struct moe_batch_key key = {t->layer, t->kind, t->dtype};
    MOE_TRY(moe_train_call_read(t, &lane->call));
    if (t->order.origin != moe_train_slot(e->config.training))
        return moe_ok();
    if (t->order.number == 0 || t->order.number > e->last_number || e->saving_count == 0)
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                         "ticket %llu is for a request that was not announced",
                         (unsigned long long)t->seq);
    e->saving_count--;
    struct moe_segment *only = &lane->segments[0];
    if (!moe_batcher_take_whole(e->batcher, &key, t->order.number, only))
        return moe_ok();
    lane->segment_count = 1;
    lane->tokens = only->count;
    if (only->count <= t->bucket)
        return moe_ok();
    return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu: %u tokens do not fit into %u",
                     (unsigned long long)t->seq, only->count, t->bucket);
}

/* --------------------------------------------------------------------- activations */

void moe_engine__note_saved(struct moe_engine *e, const struct moe_lane *lane,
                            const struct moe_step_result *result)
{
    /* No tokens here and no rows of others': an empty step, or one whose tokens all went to experts
     * of other slots. This slot need not know which: there is nothing to keep in either. */
    if (lane->tokens == 0 && result->rows == 0)
        moe_train_drop_empty(e->config.training, &lane->ticket);
    else
        moe_train_note_saved(e->config.training, &lane->ticket, &lane->call, result->saved);
    moe_engine__plan_drop(e, true);
}

void moe_engine__plan_drop(struct moe_engine *e, bool view)
{
    struct moe_train *t = e->config.training;
    uint64_t activations = view ? moe_train_next_drop(t) : MOE_NEVER;
    uint64_t memory = moe_train_next_expiry(t, moe_clock_ns());
    e->next_drop = activations < memory ? activations : memory;
}

void moe_engine__drop_old(struct moe_engine *e, uint64_t now)
{
    bool view = e->session != NULL;
    pthread_mutex_unlock(&e->lock);
    if (view && moe_train_next_drop(e->config.training) <= now)
        moe_train_drop_old(e->config.training, now);
    moe_train_expire(e->config.training, now);
    moe_engine__plan_drop(e, view);
    pthread_mutex_lock(&e->lock);
}
