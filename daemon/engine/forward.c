/* SPDX-License-Identifier: Apache-2.0 */
/* Forward passes: the rows of MOE_STEP_FORWARD and of heartbeats. Steps of the former take all
 * waiting tokens of their layer and dtype, the latter none. Retained passes (retain.c) share parts
 * of it. */
#include "base/clock.h"
#include "engine/state.h"

static struct moe_status claim(struct moe_engine *e, struct moe_step_slot *step_slot)
    MOE_REQUIRES(e->lock)
{
    const struct moe_ticket *t = &step_slot->ticket;
    const struct moe_step_key key = {t->layer, t->kind, t->dtype};
    step_slot->segment_count =
        moe_batcher_take(e->batcher, &key, t->bucket, step_slot->segments, &step_slot->tokens);
    return moe_ok();
}

void moe_engine__begin_forward(struct moe_engine *e, struct moe_step_slot *step_slot,
                               struct moe_session *session, uint64_t retain_as)
{
    struct moe_step_args args;
    const struct moe_engine_layers *of = &step_slot->model->of;
    moe_step_slot_args(step_slot, of->specs[step_slot->layer], &args);
    args.layer = of->layers[step_slot->layer];
    args.retain = retain_as;
    step_slot->failure = e->config.backend->step_enqueue(session, &args, &step_slot->step);
    if (moe_failed(&step_slot->failure))
        step_slot->step = NULL;
}

static void begin(struct moe_engine *e, struct moe_step_slot *step_slot,
                  struct moe_session *session)
{
    moe_engine__begin_forward(e, step_slot, session, 0);
}

/* --------------------------------------------------------------------------- ends */

static void add_times(struct moe_work_times *to, const struct moe_step_slot *step_slot,
                      const struct moe_step_result *r)
{
    to->count += to->count < MOE_WORK_TIMES_MAX;
    struct moe_step_times *times = &to->step[to->count - 1];
    *times = (struct moe_step_times){.taken_ns = step_slot->taken_ns,
                                     .enqueued_ns = step_slot->enqueued_ns,
                                     .began_ns = r->began_ns,
                                     .ended_ns = step_slot->ended_ns,
                                     .total_ns = r->total_ns};
    for (int i = 0; i < MOE_STAGE_COUNT; i++)
        times->stage_ns[i] = r->stage_ns[i];
}

static void add_result(struct moe_work *w, const struct moe_step_slot *step_slot,
                       const struct moe_step_result *r)
{
    for (int i = 0; i < MOE_STAGE_COUNT; i++)
        w->step.stage_ns[i] += r->stage_ns[i];
    w->step.total_ns += r->total_ns;
    w->step.rows += r->rows;
    w->step.missing_slot = -1;
    w->copy_in_ns += r->copy_in_ns;
    w->copy_out_ns += r->copy_out_ns;
    w->answered_epoch = step_slot->ticket.epoch;
    w->answered_version = step_slot->weights_version;
    w->step_tokens = step_slot->tokens;
    w->steps++;
    if (w->times != NULL)
        add_times(w->times, step_slot, r);
}

/* `finished` comes first, so that the sequencer can issue the next ticket meanwhile. If the
 * sequencer is this worker's, peers report through shared memory and this thread reads that later.
 */
void moe_engine__hand_out(struct moe_engine *e, struct moe_step_slot *step_slot,
                          const struct moe_step_result *result)
{
    const struct moe_engine_layers *of = &step_slot->model->of;
    if (step_slot->timed)
        step_slot->ended_ns = moe_clock_ns();
    e->config.finished(e->config.ctx, &step_slot->ticket, moe_ok(), 0);
    moe_step_metrics_forward(e->config.metrics, result);
    moe_row_metrics_add(of->row_metrics, step_slot->layer, step_slot->ticket.dtype, result->rows,
                        &step_slot->counts);
}

/* A request that waits for experts runs again as a whole, under the next view. The rest of it is
 * not begun under this one. */
static void lack_experts(struct moe_engine *e, struct moe_work *w) MOE_REQUIRES(e->lock)
{
    w->lacks_experts = true;
    (void)moe_batcher_remove(e->batcher, w);
}

/* Some tokens of `w` are out of a step. */
static void settle_or_hold(struct moe_engine *e, struct moe_work *w) MOE_REQUIRES(e->lock)
{
    if (!w->lacks_experts || moe_failed(&w->failure) || w->cancelled) {
        if (w->cancelled && w->lacks_experts && !moe_failed(&w->failure))
            w->failure = moe_error(MOE_CANCELLED, MOE_REASON_NONE, "cancelled");
        moe_engine__settle(e, w);
        return;
    }
    if (w->taken != w->finished)
        return;
    w->lacks_experts = false;
    moe_engine__forget_steps(w);
    if (e->refusing)
        moe_engine__give_up(e, w, moe_engine__draining());
    else
        moe_batcher_hold(e->batcher, w);
}

static bool waits_for_experts(const struct moe_work *w, const struct moe_status *outcome)
{
    return outcome->reason == MOE_REASON_EXPERT_UNAVAILABLE &&
           w->on_unavailable == MOE_ON_UNAVAILABLE_WAIT;
}

void moe_engine__finish_segments(struct moe_engine *e, const struct moe_step_slot *step_slot,
                                 const struct moe_step_result *result)
{
    uint32_t row = 0;
    for (size_t i = 0; i < step_slot->segment_count; i++) {
        const struct moe_segment *s = &step_slot->segments[i];
        struct moe_work *w = s->work;
        struct moe_status outcome = moe_step_slot_outcome(step_slot, s, row);
        row += s->count;
        w->finished += s->count;
        add_result(w, step_slot, result);
        if (waits_for_experts(w, &outcome))
            lack_experts(e, w);
        if (moe_failed(&outcome) && !w->lacks_experts) {
            (void)moe_batcher_remove(e->batcher, w);
            moe_engine__give_up(e, w, outcome);
        } else {
            settle_or_hold(e, w);
        }
    }
    e->counters.tokens += step_slot->tokens;
    e->counters.steps++;
}

static void complete(struct moe_engine *e, struct moe_step_slot *step_slot,
                     const struct moe_step_result *result) MOE_REQUIRES(e->lock)
{
    moe_mutex_unlock(&e->lock);
    moe_engine__hand_out(e, step_slot, result);
    moe_mutex_lock(&e->lock);
    moe_engine__finish_segments(e, step_slot, result);
}

/* The device has completed the request. The step that had its last part failed later, or its view
 * has ended. */
static void finish_completed(struct moe_engine *e, const struct moe_step_slot *step_slot,
                             const struct moe_segment *s) MOE_REQUIRES(e->lock)
{
    const struct moe_step_result unknown = {.missing_slot = -1};
    s->work->finished += s->count;
    add_result(s->work, step_slot, &unknown);
    moe_engine__settle(e, s->work);
}

/* Undoes the takes of one step, last segment first. */
void moe_engine__put_back(struct moe_engine *e, struct moe_step_slot *step_slot)
{
    for (size_t i = step_slot->segment_count; i-- > 0;) {
        const struct moe_segment *s = &step_slot->segments[i];
        struct moe_work *w = s->work;
        if (moe_work_is_completed(w)) {
            finish_completed(e, step_slot, s);
            continue;
        }
        if (!w->cancelled && !moe_failed(&w->failure) && !w->lacks_experts) {
            moe_batcher_put_back(e->batcher, s);
            continue;
        }
        w->finished += s->count;
        if (w->lacks_experts) {
            settle_or_hold(e, w);
            continue;
        }
        moe_engine__give_up(e, w, moe_error(MOE_CANCELLED, MOE_REASON_NONE, "cancelled"));
    }
}

/* ---------------------------------------------------------------------- heartbeats */

static struct moe_status claim_nothing(struct moe_engine *e, struct moe_step_slot *step_slot)
    MOE_REQUIRES(e->lock)
{
    (void)e;
    (void)step_slot;
    return moe_ok();
}

/* It counts as no step: no client asked for it. */
static void complete_heartbeat(struct moe_engine *e, struct moe_step_slot *step_slot,
                               const struct moe_step_result *result) MOE_REQUIRES(e->lock)
{
    (void)result;
    moe_mutex_unlock(&e->lock);
    e->config.finished(e->config.ctx, &step_slot->ticket, moe_ok(), 0);
    moe_mutex_lock(&e->lock);
}

const struct moe_step_row moe_engine__heartbeat = {
    .claim = claim_nothing,
    .begin = begin,
    .complete = complete_heartbeat,
    .abandon = moe_engine__put_back,
};

const struct moe_step_row moe_engine__forward = {
    .claim = claim,
    .begin = begin,
    .complete = complete,
    .abandon = moe_engine__put_back,
};
