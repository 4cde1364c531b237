/* SPDX-License-Identifier: Apache-2.0 */
/* Tickets of training calls: the row of all training kinds. The call with its tensors is on the
 * origin only; other slots run the ticket without tensors. Its meaning lies behind
 * schedule/call_ops.h. All slots do the same: begin, then the pass or the change, then end. */
#include "engine/state.h"

#include "base/clock.h"

/* The call's tensors have the ticket's shape. Tickets come from another process. */
static bool fits_ticket(const struct moe_train_work *w, const struct moe_ticket *t)
{
    if (w->kind != t->kind)
        return false;
    return !moe_step_traits(t->kind)->has_rows ||
           (w->layer == t->layer && w->dtype == t->dtype && w->tokens <= t->bucket);
}

/* Takes the call of the ticket if this slot is its origin. */
static struct moe_status take_call(struct moe_engine *e, struct moe_step_slot *step_slot)
    MOE_REQUIRES(e->lock)
{
    const struct moe_ticket *t = &step_slot->ticket;
    if (t->descriptor.origin != e->config.calls->slot(e->config.calls_ctx))
        return moe_ok();
    struct moe_train_work *w = e->calls.head;
    while (w != NULL && w->number != t->descriptor.number)
        w = w->next;
    if (w == NULL || !fits_ticket(w, t))
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                         "ticket %llu is for a training call that was not announced",
                         (unsigned long long)t->seq);
    moe_engine__unlink_call(e, w);
    w->started_ns = moe_clock_ns();
    step_slot->call = w;
    step_slot->tokens = moe_step_traits(t->kind)->has_rows ? w->tokens : 0;
    return moe_ok();
}

static struct moe_status claim(struct moe_engine *e, struct moe_step_slot *step_slot)
    MOE_REQUIRES(e->lock)
{
    MOE_TRY(take_call(e, step_slot));
    return e->config.calls->read(&step_slot->ticket, step_slot->exec);
}

static void begin(struct moe_engine *e, struct moe_step_slot *step_slot,
                  struct moe_session *session)
{
    const struct moe_call_rows rows = {.mode = step_slot->mode,
                                       .token_state = step_slot->token_state};
    step_slot->failure =
        e->config.calls->begin(e->config.calls_ctx, &step_slot->ticket, step_slot->call, session,
                               &rows, step_slot->exec, &step_slot->step);
    if (moe_failed(&step_slot->failure))
        step_slot->step = NULL;
}

static void refuse(struct moe_engine *e, struct moe_step_slot *step_slot, struct moe_status why)
{
    e->config.calls->refuse(step_slot->exec, why);
}

/* Without the lock. A bad token of our call fails it. */
static void end_execution(struct moe_engine *e, struct moe_step_slot *step_slot,
                          const struct moe_step_result *result, struct moe_call_end *end)
{
    e->config.calls->end(e->config.calls_ctx, &step_slot->ticket, step_slot->call, result,
                         step_slot->exec, end);
    const struct moe_segment all = {.first = 0, .count = step_slot->tokens};
    if (step_slot->call != NULL && end->passed && !moe_failed(&end->status))
        end->status = moe_step_slot_outcome(step_slot, &all, 0);
}

/* Ends the execution's call, or lets it wait for a later execution. */
static void end_own_call(struct moe_engine *e, struct moe_step_slot *step_slot,
                         const struct moe_call_end *end)
{
    struct moe_train_work *w = step_slot->call;
    w->joined = end->joined;
    if (end->waits && !w->is_progress && !w->cancelled) {
        moe_engine__append_call(&e->pending_saves, w);
        return;
    }
    if (w->answer != NULL)
        e->config.calls->answer(step_slot->exec, w);
    moe_engine__end_call(
        e, w, end->waits && !w->is_progress ? moe_engine__call_cancelled() : end->status);
}

/* Without the lock. */
static void update_block(struct moe_engine *e)
{
    bool block = e->config.calls->blocks_weight_updates(e->config.calls_ctx);
    if (block != e->blocks_weight_updates && e->config.block_weight_updates != NULL)
        e->config.block_weight_updates(e->config.ctx, block);
    e->blocks_weight_updates = block;
}

static void complete(struct moe_engine *e, struct moe_step_slot *step_slot,
                     const struct moe_step_result *result) MOE_REQUIRES(e->lock)
{
    struct moe_call_end end;
    moe_mutex_unlock(&e->lock);
    step_slot->ended_ns = moe_clock_ns();
    end_execution(e, step_slot, result, &end);
    moe_engine__plan_expiry(e, true);
    uint64_t version = e->config.calls->weights_version(e->config.calls_ctx);
    moe_mutex_lock(&e->lock);
    /* Tokens that must be computed again are announced before this ticket's end. */
    moe_engine__change_version(e, version, true);
    moe_mutex_unlock(&e->lock);
    update_block(e);
    e->config.finished(e->config.ctx, &step_slot->ticket, moe_ok(), 0);
    if (end.passed)
        moe_step_metrics_backward(e->config.metrics, result);
    moe_mutex_lock(&e->lock);
    e->counters.steps += end.passed;
    if (end.settles)
        moe_engine__end_pending_saves(e, end.status, step_slot->exec);
    if (step_slot->call == NULL)
        return;
    struct moe_train_work *w = step_slot->call;
    w->step = *result;
    w->ended_ns = step_slot->ended_ns;
    bool left = end.waits && !w->is_progress && w->cancelled;
    end_own_call(e, step_slot, &end);
    if (left)
        moe_engine__stop_waiting(e, w);
}

static void abandon(struct moe_engine *e, struct moe_step_slot *step_slot)
{
    if (e->config.calls != NULL)
        e->config.calls->abandon(e->config.calls_ctx, step_slot->exec);
    if (step_slot->call != NULL)
        moe_engine__end_call(e, step_slot->call, moe_engine__reforming());
    step_slot->call = NULL;
}

const struct moe_step_row moe_engine__call = {
    .claim = claim,
    .begin = begin,
    .refuse = refuse,
    .complete = complete,
    .abandon = abandon,
};
