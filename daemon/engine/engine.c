/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's thread and its state; see engine/engine.h. It knows neither clients nor the
 * sequencer.
 *
 * One mutex guards all state that other threads may touch. The thread does one action per turn of
 * its loop and releases the lock for every callback and every call of the backend. The one idea
 * worth knowing: a request is where its tokens are. `queued` is true while some wait, `taken -
 * finished` of them are in steps. When neither is left, its end is reported. */
#include "engine/engine.h"

#include "base/clock.h"
#include "base/thread.h"
#include "base/wait.h"
#include "daemon/log.h"
#include "engine/state.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { QUEUE_FULL_RETRY_MS = 20, DRAINING_RETRY_MS = 100 };

/* ---------------------------------------------------------------- ends of requests */

static bool match_all(const struct moe_work *w, uint64_t arg)
{
    (void)w;
    (void)arg;
    return true;
}

static bool match_other_epoch(const struct moe_work *w, uint64_t epoch)
{
    return w->epoch != 0 && w->epoch != epoch;
}

/* This worker will have no further view for it. */
static bool is_held(const struct moe_work *w, uint64_t arg)
{
    (void)arg;
    return w->home != NULL && !w->gathers;
}

static struct moe_status stale_epoch(uint64_t epoch)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STALE_EPOCH, "the epoch is now %llu",
                     (unsigned long long)epoch);
}

struct moe_status moe_engine__draining(void)
{
    return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_DRAINING, DRAINING_RETRY_MS,
                           "this worker is leaving");
}

/* Engine's thread. Releases the lock meanwhile. */
static void report_ended(struct moe_engine *e) MOE_REQUIRES(e->lock)
{
    struct moe_work *w = e->ended.head;
    struct moe_train_work *call = e->ended_calls.head;
    e->ended = (struct work_list){0};
    e->ended_calls = (struct call_list){0};
    uint64_t count = 0, failed = 0;
    moe_mutex_unlock(&e->lock);
    for (struct moe_train_work *next; call != NULL; call = next) {
        next = call->next;
        count++;
        failed += moe_failed(&call->failure);
        call->done(call, call->failure);
    }
    for (struct moe_work *next; w != NULL; w = next) {
        next = w->next;
        count++;
        failed += moe_failed(&w->failure);
        w->done(w, w->failure);
    }
    moe_mutex_lock(&e->lock);
    e->counters.requests += count;
    e->counters.failed_requests += failed;
    e->unfinished -= count;
    if (e->unfinished == 0)
        pthread_cond_broadcast(&e->idle);
}

/* --------------------------------------------------------------------------- steps */

/* The operations of a step slot's kind. An unknown kind, which claims no tokens, gets forward's. */
static const struct moe_step_row *row_of(const struct moe_step_slot *step_slot)
{
    const struct moe_step_traits *kind = moe_step_traits(step_slot->ticket.kind);
    if (kind->is_heartbeat)
        return &moe_engine__heartbeat;
    if (kind->changes_models)
        return &moe_engine__model_change;
    if (kind->swaps_placement)
        return &moe_engine__swap;
    if (!kind->has_descriptor)
        return &moe_engine__forward;
    return kind->queued ? &moe_engine__retained : &moe_engine__call;
}

/* The ticket's layer or, of a change, its model. */
static struct moe_status find_layer(struct moe_engine *e, struct moe_step_slot *step_slot)
    MOE_REQUIRES(e->lock)
{
    const struct moe_ticket *t = &step_slot->ticket;
    const struct moe_step_traits *kind = moe_step_traits(t->kind);
    /* Backward passes and heartbeats have the layers and dtypes of forward ones. */
    const struct moe_step_key key = {t->layer, kind->queued ? t->kind : MOE_STEP_FORWARD, t->dtype};
    step_slot->model = NULL;
    if (kind->is_exclusive || kind->swaps_placement)
        return moe_ok();
    struct moe_engine_model *m = moe_engine__find_model(e, moe_layer_model(t->layer));
    bool training = kind->has_descriptor && moe_layer_model(t->layer) != 0;
    if (m == NULL || training ||
        (!kind->changes_models && (m->phase != MODEL_SERVED || !moe_batcher_has(e->batcher, &key) ||
                                   !moe_engine__find_layer(m, t->layer, &step_slot->layer))))
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu: no such layer or dtype",
                         (unsigned long long)t->seq);
    step_slot->model = m;
    return moe_ok();
}

/* Tickets come from another process. */
static struct moe_status check_ticket(struct moe_engine *e, struct moe_step_slot *step_slot)
    MOE_REQUIRES(e->lock)
{
    const struct moe_ticket *t = &step_slot->ticket;
    const struct moe_step_traits *kind = moe_step_traits(t->kind);
    if (kind->has_descriptor    ? e->config.calls == NULL
        : kind->swaps_placement ? e->config.swap_placement == NULL
                                : !kind->queued && !kind->is_heartbeat && !kind->changes_models)
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu: no such kind",
                         (unsigned long long)t->seq);
    MOE_TRY(find_layer(e, step_slot));
    if (!kind->is_exclusive && !kind->changes_models && !kind->swaps_placement &&
        (t->bucket == 0 || (t->bucket & (t->bucket - 1)) != 0 || t->bucket > e->bucket_max))
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu: no bucket of %u tokens",
                         (unsigned long long)t->seq, t->bucket);
    if (e->last_seq != 0 && t->seq != e->last_seq + 1)
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu follows ticket %llu",
                         (unsigned long long)t->seq, (unsigned long long)e->last_seq);
    return moe_ok();
}

static void expire(struct moe_engine *e) MOE_REQUIRES(e->lock)
{
    uint64_t now = moe_clock_ns();
    if (now >= e->next_expiry)
        moe_engine__expire_retained(e, now);
    moe_engine__expire_models(e, now);
    moe_engine__queue_late_parts(e, now);
    struct moe_work *late = moe_batcher_expire(e->batcher, now);
    if (late == NULL && now < moe_engine__next_call_expiry(e))
        return;
    struct moe_status why = moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                                      "the deadline passed before the request was finished");
    moe_engine__give_up_all(e, late, why);
    moe_engine__give_up_calls(e, false, now, why);
}

/* An exclusive ticket runs alone. A training ticket waits for the previous one, which may still
 * fail and so decide whether this one is run. */
static bool may_begin(const struct moe_engine *e) MOE_REQUIRES(e->lock)
{
    if (e->ticket_count == 0 || e->in_flight == STEP_SLOTS || e->stopping)
        return false;
    if (e->in_flight == 0)
        return true;
    const struct moe_step_traits *now = moe_step_traits(e->step_slots[e->oldest].ticket.kind);
    const struct moe_step_traits *next = moe_step_traits(e->tickets[e->ticket_first].kind);
    return !next->is_exclusive && !now->is_exclusive && !(next->is_training && now->is_training);
}

/* Fills the free step slot with the next ticket's tokens. */
static struct moe_step_slot *fill_step_slot(struct moe_engine *e) MOE_REQUIRES(e->lock)
{
    struct moe_step_slot *step_slot = &e->step_slots[(e->oldest + e->in_flight) % STEP_SLOTS];
    step_slot->ticket = e->tickets[e->ticket_first];
    e->ticket_first = (e->ticket_first + 1) % TICKETS_MAX;
    e->ticket_count--;
    step_slot->step = NULL;
    step_slot->segment_count = step_slot->tokens = 0;
    step_slot->timed = false;
    step_slot->call = NULL;
    memset(step_slot->exec, 0, step_slot->shape.exec_bytes);
    step_slot->weights_version =
        moe_layer_model(step_slot->ticket.layer) == 0 ? e->weights_version : 1;
    step_slot->failure = check_ticket(e, step_slot);
    e->in_flight++;
    if (moe_failed(&step_slot->failure))
        return step_slot;
    e->last_seq = step_slot->ticket.seq;
    step_slot->failure = row_of(step_slot)->claim(e, step_slot);
    step_slot->taken_ns = moe_clock_ns();
    for (size_t i = 0; i < step_slot->segment_count; i++) {
        struct moe_work *w = step_slot->segments[i].work;
        if (w->started_ns == 0)
            w->started_ns = step_slot->taken_ns;
        step_slot->timed |= w->times != NULL;
        if (w->rehomed != NULL)
            moe_engine__list_rehomed(e, step_slot, w);
    }
    return step_slot;
}

/* Engine's thread. Releases the lock meanwhile. A step that cannot begin takes its step slot all
 * the same, so that it fails in order. */
static void begin_step(struct moe_engine *e) MOE_REQUIRES(e->lock)
{
    struct moe_step_slot *step_slot = fill_step_slot(e);
    struct moe_session *session = e->session;
    if (moe_failed(&step_slot->failure))
        return;
    moe_mutex_unlock(&e->lock);
    moe_engine__show_steps(e, true, 0);
    moe_engine__show_call(e, step_slot->ticket.kind);
    row_of(step_slot)->begin(e, step_slot, session);
    moe_engine__show_return(e);
    if (step_slot->timed)
        step_slot->enqueued_ns = moe_clock_ns();
    moe_mutex_lock(&e->lock);
}

/* Engine's thread. Releases the lock meanwhile. */
static void complete_oldest(struct moe_engine *e, const struct moe_step_result *result)
    MOE_REQUIRES(e->lock)
{
    struct moe_step_slot *step_slot = &e->step_slots[e->oldest];
    row_of(step_slot)->complete(e, step_slot, result);
    e->oldest = (e->oldest + 1) % STEP_SLOTS;
    e->in_flight--;
    moe_engine__show_steps(e, true, step_slot->ticket.kind);
}

/* ------------------------------------------------------------------- end of a view */

/* The thread releases the session. */
static void end_view(struct moe_engine *e) MOE_REQUIRES(e->lock)
{
    e->session = NULL;
    moe_engine__end_models(e);
    moe_engine__show_steps(e, false, 0);
    e->stopping = false;
    e->ticket_count = 0;
    moe_engine__drop_pending_saves(e);
    pthread_cond_broadcast(&e->idle);
}

/* Engine's thread. Releases the lock meanwhile. The oldest step failed: later steps are invalid, so
 * all are waited for and undone, the youngest first. */
static void fail_view(struct moe_engine *e, struct moe_status why, int missing_slot)
    MOE_REQUIRES(e->lock)
{
    const struct moe_backend *backend = e->config.backend;
    struct moe_session *session = e->session;
    struct moe_ticket failed[STEP_SLOTS];
    unsigned count = e->in_flight;
    moe_mutex_unlock(&e->lock);
    moe_engine__show_call(e, 0);
    backend->session_abort(session);
    for (unsigned i = 0; i < count; i++) {
        struct moe_step_slot *step_slot = &e->step_slots[(e->oldest + i) % STEP_SLOTS];
        struct moe_step_result ignored;
        failed[i] = step_slot->ticket;
        if (step_slot->step != NULL)
            (void)backend->step_wait(step_slot->step, MOE_NEVER, &ignored);
    }
    uint64_t lost = backend->session_lost(session);
    moe_engine__show_return(e);
    if (missing_slot >= 0 && missing_slot < MOE_MAX_SLOTS)
        lost |= UINT64_C(1) << missing_slot;
    moe_mutex_lock(&e->lock);
    for (unsigned i = count; i-- > 0;) {
        struct moe_step_slot *step_slot = &e->step_slots[(e->oldest + i) % STEP_SLOTS];
        row_of(step_slot)->abandon(e, step_slot);
    }
    e->in_flight = 0;
    bool stopped = e->stopping;
    end_view(e);
    moe_mutex_unlock(&e->lock);
    if (!stopped)
        for (unsigned i = 0; i < count; i++)
            e->config.finished(e->config.ctx, &failed[i], why, lost);
    moe_mutex_lock(&e->lock);
}

/* For spin_ns after the last step the thread polls: news is expected soon. */
static bool is_spinning(const struct moe_engine *e) MOE_REQUIRES(e->lock)
{
    return e->config.spin_ns > 0 && moe_clock_ns() < e->spin_until;
}

static void keep_spinning(struct moe_engine *e) MOE_REQUIRES(e->lock)
{
    if (e->config.spin_ns > 0)
        e->spin_until = moe_clock_ns() + e->config.spin_ns;
}

/* Thread, no lock. Polls the step and the eventcount alternately, so that the next ticket begins
 * while the step runs. MOE_DEADLINE_EXCEEDED: the step still runs. */
static struct moe_status poll_step(struct moe_engine *e, struct moe_step *step, uint64_t until,
                                   struct moe_step_result *result)
{
    for (;;) {
        struct moe_status st = e->config.backend->step_wait(step, 0, result);
        if (st.code != MOE_DEADLINE_EXCEEDED || moe_eventcount_prepare(e->eventcount) != e->seen ||
            moe_clock_ns() >= until)
            return st;
        sched_yield(); /* threads with work come first */
    }
}

/* Engine's thread. Releases the lock meanwhile. */
static void wait_for_oldest(struct moe_engine *e) MOE_REQUIRES(e->lock)
{
    struct moe_step_slot *step_slot = &e->step_slots[e->oldest];
    const bool spinning = is_spinning(e);
    /* A pass may be long: cancelled and expired requests end meanwhile, though no step can begin.
     */
    const bool sliced =
        e->in_flight < STEP_SLOTS || moe_step_traits(step_slot->ticket.kind)->is_training;
    uint64_t until = sliced           ? moe_clock_ns() + WAIT_SLICE_NS
                     : e->beat_ns > 0 ? moe_clock_ns() + e->beat_ns
                                      : MOE_NEVER;
    struct moe_step_result result = {.missing_slot = -1};
    struct moe_status st = step_slot->failure;
    if (step_slot->step != NULL) {
        moe_mutex_unlock(&e->lock);
        st = spinning ? poll_step(e, step_slot->step, e->spin_until, &result)
                      : e->config.backend->step_wait(step_slot->step, until, &result);
        moe_mutex_lock(&e->lock);
        if (st.code == MOE_DEADLINE_EXCEEDED)
            return;
        step_slot->step = NULL;
    }
    if (moe_failed(&st) && result.refused && row_of(step_slot)->refuse != NULL) {
        row_of(step_slot)->refuse(e, step_slot, st);
        st = moe_ok();
    }
    if (moe_failed(&st))
        fail_view(e, st, result.missing_slot);
    else
        complete_oldest(e, &result);
    keep_spinning(e);
}

/* ---------------------------------------------------------------------- the thread */

static void fail_queued(struct moe_engine *e, struct moe_status reason) MOE_REQUIRES(e->lock)
{
    moe_engine__give_up_all(e, moe_batcher_evict(e->batcher, match_all, 0), reason);
    moe_engine__give_up_calls(e, true, 0, reason);
}

/* Releases the lock meanwhile. */
static void wait_for_notification(struct moe_engine *e) MOE_REQUIRES(e->lock)
{
    uint64_t until = moe_batcher_next_expiry(e->batcher), call = moe_engine__next_call_expiry(e);
    until = call < until ? call : until;
    until = moe_earlier(moe_earlier(e->next_expiry, e->models_due_ns), until);
    until = moe_earlier(e->batches_due_ns, until);
    const bool spinning = is_spinning(e), view = e->session != NULL;
    const uint64_t epoch = e->epoch;
    moe_mutex_unlock(&e->lock);
    if (view)
        moe_engine__beat(e, epoch);
    until = moe_earlier(until, moe_engine__next_beat(e, view));
    if (spinning)
        moe_eventcount_poll(e->eventcount, e->seen, until < e->spin_until ? until : e->spin_until);
    else
        moe_eventcount_wait(e->eventcount, e->seen, until);
    moe_mutex_lock(&e->lock);
}

/* Releases the lock meanwhile. Reads all state that was written before the last notification; a
 * later change notifies again. */
static void check_notifications(struct moe_engine *e) MOE_REQUIRES(e->lock)
{
    uint32_t count = moe_eventcount_prepare(e->eventcount);
    if (count == e->seen)
        return;
    e->seen = count;
    if (e->config.listen == NULL)
        return;
    moe_mutex_unlock(&e->lock);
    e->config.listen(e->config.ctx);
    moe_mutex_lock(&e->lock);
}

static void *run_thread(void *arg)
{
    struct moe_engine *e = arg;
    moe_mutex_lock(&e->lock);
    for (;;) {
        moe_loop_turn(e->turns);
        check_notifications(e);
        expire(e);
        if (e->quit)
            fail_queued(e, moe_engine__draining());
        if (e->ended.head != NULL || e->ended_calls.head != NULL)
            report_ended(e);
        else if (may_begin(e))
            begin_step(e);
        else if (e->in_flight > 0)
            wait_for_oldest(e);
        else if (e->stopping)
            end_view(e);
        else if (e->quit)
            break;
        else
            wait_for_notification(e);
    }
    moe_mutex_unlock(&e->lock);
    return NULL;
}

/* ----------------------------------------------------------------- create, destroy */

static struct moe_status create_batcher(struct moe_engine *e, struct moe_step_slot_shape *shape)
{
    const struct moe_engine_config *c = &e->config;
    uint32_t *layers = calloc(c->layer_count + 1, sizeof *layers);
    if (layers == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for layers");
    for (size_t i = 0; i < c->layer_count; i++)
        layers[i] = c->specs[i]->layer;
    moe_engine__widen(shape, c->specs, c->layer_count);
    struct moe_status st = moe_batcher_create(layers, c->layer_count, &e->batcher);
    free(layers);
    return st;
}

static void free_memory(struct moe_engine *e)
{
    moe_mutex_not_shared(&e->lock);
    for (struct moe_engine_model *next, *m = e->base.next; m != NULL; m = next) {
        next = m->next;
        free(m);
    }
    for (unsigned i = 0; i < STEP_SLOTS; i++)
        moe_step_slot_free(&e->step_slots[i]);
    moe_eventcount_destroy(e->eventcount);
    moe_batcher_destroy(e->batcher);
    free(e);
}

static struct moe_status start_thread(struct moe_engine *e)
{
    moe_mutex_init(&e->lock);
    moe_wait_init(&e->idle);
    int rc = moe_thread_create(&e->thread, "moe-engine", run_thread, e);
    return rc == 0 ? moe_ok() : moe_thread_failure("moe-engine", rc);
}

struct moe_status moe_engine_create(const struct moe_engine_config *config, struct moe_engine **out)
{
    uint32_t bucket = config->max_tokens_per_step;
    if (config->layer_count == 0 || bucket == 0 || (bucket & (bucket - 1)) != 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "the engine needs a layer and a bucket that is a power of two");
    struct moe_engine *e = calloc(1, sizeof *e);
    if (e == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the engine");
    struct moe_status st;
    struct moe_step_slot_shape shape = {.tokens = bucket,
                                        .hidden = config->max_hidden,
                                        .top_k = config->max_top_k,
                                        .exec_bytes =
                                            config->calls != NULL ? config->calls->exec_bytes : 0};
    moe_mutex_not_shared(&e->lock);
    e->config = *config;
    e->weights_version = 1;
    e->base = (struct moe_engine_model){.of = {.layers = config->layers,
                                               .specs = config->specs,
                                               .placements = config->placements,
                                               .count = config->layer_count,
                                               .row_metrics = config->row_metrics},
                                        .phase = MODEL_SERVED};
    e->models = &e->base;
    e->next_expiry = e->models_due_ns = e->batches_due_ns = MOE_NEVER;
    moe_engine__add_loops(e);
    if (config->calls != NULL)
        moe_engine__plan_expiry(e, false);
    MOE_TRY_GOTO(st, moe_eventcount_create(&e->eventcount), fail);
    MOE_TRY_GOTO(st, create_batcher(e, &shape), fail);
    for (unsigned i = 0; i < STEP_SLOTS; i++)
        MOE_TRY_GOTO(st,
                     moe_step_slot_init(&e->step_slots[i], config->backend, config->device, &shape),
                     fail);
    if (config->calls != NULL)
        config->calls->open(config->calls_ctx, moe_engine__request, e);
    MOE_TRY_GOTO(st, start_thread(e), fail);
    *out = e;
    return st;
fail:
    free_memory(e);
    return st;
}

void moe_engine_destroy(struct moe_engine *e)
{
    if (e == NULL)
        return;
    moe_engine_stop_view(e);
    moe_mutex_lock(&e->lock);
    e->refusing = e->quit = true;
    moe_eventcount_notify(e->eventcount);
    moe_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
    if (e->config.calls != NULL)
        e->config.calls->close(e->config.calls_ctx);
    pthread_cond_destroy(&e->idle);
    moe_mutex_destroy(&e->lock);
    free_memory(e);
}

struct moe_eventcount *moe_engine_eventcount(const struct moe_engine *e)
{
    return e->eventcount;
}

/* ---------------------------------------------------------------------- other threads */

void moe_engine_start_view(struct moe_engine *e, struct moe_session *session, uint64_t epoch,
                           uint64_t live, uint32_t max_tokens_per_step)
{
    moe_engine_stop_view(e);
    moe_mutex_lock(&e->lock);
    e->session = session;
    e->epoch = epoch;
    e->live = live;
    e->last_seq = 0;
    moe_batcher_release(e->batcher); /* the new view may have their experts */
    e->bucket_max = max_tokens_per_step < e->config.max_tokens_per_step
                        ? max_tokens_per_step
                        : e->config.max_tokens_per_step;
    moe_engine__give_up_all(e, moe_batcher_evict(e->batcher, match_other_epoch, epoch),
                            stale_epoch(epoch));
    if (e->config.calls != NULL)
        moe_engine__change_version(e, e->config.calls->weights_version(e->config.calls_ctx), false);
    moe_engine__forget_numbers(e);
    moe_engine__forget_retain_numbers(e);
    moe_engine__begin_models(e);
    moe_engine__queue_all_parts(e);
    moe_mutex_unlock(&e->lock);
    moe_engine__announce_model(e, 0); /* the sequencer of the new view knows no queued work */
    moe_mutex_lock(&e->lock);
    moe_engine__announce_calls(e);
    moe_mutex_unlock(&e->lock);
}

void moe_engine_stop_view(struct moe_engine *e)
{
    moe_mutex_lock(&e->lock);
    if (e->session != NULL) {
        e->stopping = true;
        e->config.backend->session_abort(e->session);
        moe_eventcount_notify(e->eventcount);
    }
    while (e->session != NULL)
        (void)moe_wait_until(&e->idle, &e->lock, MOE_NEVER);
    moe_mutex_unlock(&e->lock);
}

static struct moe_status admit(const struct moe_engine *e, const struct moe_work *w,
                               const struct moe_step_key *key) MOE_REQUIRES(e->lock)
{
    if (e->refusing)
        return moe_engine__draining();
    MOE_TRY(e->suspended);
    if (!moe_batcher_has(e->batcher, key))
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND, "no MoE layer %u",
                         moe_layer_index(w->layer));
    if (w->tokens == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH, "a request of no tokens");
    MOE_TRY(moe_engine__check_model(e, w->layer));
    if (e->session != NULL && match_other_epoch(w, e->epoch))
        return stale_epoch(e->epoch);
    if (e->session != NULL && moe_engine__wants_other_version(w, e->weights_version))
        return moe_engine__other_version(moe_layer_model(w->layer) == 0 ? e->weights_version : 1);
    if (moe_batcher_tokens(e->batcher) + w->tokens > e->config.max_queued_tokens)
        return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, QUEUE_FULL_RETRY_MS,
                               "too many tokens are waiting");
    return moe_ok();
}

static void accept_work(struct moe_engine *e, struct moe_work *w, struct moe_step_key *key)
    MOE_REQUIRES(e->lock)
{
    w->submitted_ns = moe_clock_ns();
    w->started_ns = w->copy_in_ns = w->copy_out_ns = 0;
    w->answered_epoch = w->answered_version = 0;
    w->step = (struct moe_step_result){.missing_slot = -1};
    w->step_tokens = w->steps = 0;
    w->retained_name = w->number = 0;
    w->retained_here = w->cancelled = w->lacks_experts = false;
    w->failure = moe_ok();
    if (w->times != NULL)
        w->times->count = 0;
    key->kind = moe_engine__queue_of(e, w);
    w->own_step = key->kind == MOE_STEP_FORWARD_RETAIN;
    e->retain_count += w->own_step;
    e->unfinished++;
    if (w->deadline_ns < moe_batcher_next_expiry(e->batcher))
        moe_eventcount_notify(e->eventcount);
}

struct moe_status moe_engine_submit(struct moe_engine *e, struct moe_work *w)
{
    struct moe_step_key key = {w->layer, MOE_STEP_FORWARD, w->dtype};
    uint32_t tokens = 0; /* to announce. `w` may be gone as soon as the lock is free */
    moe_mutex_lock(&e->lock);
    struct moe_status st = admit(e, w, &key);
    bool announce = !moe_failed(&st) && moe_engine__serves(e, w->layer);
    if (!moe_failed(&st)) {
        accept_work(e, w, &key);
        tokens = moe_engine__queue(e, &key, w, announce);
    }
    if (announce && key.kind == MOE_STEP_FORWARD_RETAIN)
        moe_engine__announce_calls(e);
    moe_mutex_unlock(&e->lock);
    if (announce && tokens > 0)
        e->config.announce(e->config.ctx, key.layer, key.kind, key.dtype, tokens);
    return st;
}

void moe_engine_cancel(struct moe_engine *e, struct moe_work *w)
{
    moe_mutex_lock(&e->lock);
    w->cancelled = true;
    if (moe_batcher_remove(e->batcher, w))
        moe_engine__give_up(e, w, moe_error(MOE_CANCELLED, MOE_REASON_NONE, "cancelled"));
    moe_mutex_unlock(&e->lock);
}

void moe_engine_run(struct moe_engine *e, const struct moe_ticket *ticket)
{
    moe_mutex_lock(&e->lock);
    if (e->session != NULL && !e->stopping && ticket->epoch == e->epoch) {
        if (e->ticket_count < TICKETS_MAX)
            e->tickets[(e->ticket_first + e->ticket_count++) % TICKETS_MAX] = *ticket;
        else /* the gap in seq fails the view */
            moe_log_warn("ticket %llu dropped: %d tickets wait", (unsigned long long)ticket->seq,
                         TICKETS_MAX);
        moe_eventcount_notify(e->eventcount);
    }
    moe_mutex_unlock(&e->lock);
}

bool moe_engine_drain(struct moe_engine *e, uint64_t deadline_ns)
{
    moe_mutex_lock(&e->lock);
    e->refusing = true;
    moe_engine__give_up_all(e, moe_batcher_evict(e->batcher, is_held, 0), moe_engine__draining());
    bool in_time = true;
    while (e->unfinished > 0 && in_time)
        in_time = moe_wait_until(&e->idle, &e->lock, deadline_ns);
    bool drained = e->unfinished == 0;
    moe_mutex_unlock(&e->lock);
    return drained;
}

void moe_engine_fail_queued(struct moe_engine *e, struct moe_status reason)
{
    moe_mutex_lock(&e->lock);
    fail_queued(e, reason);
    moe_mutex_unlock(&e->lock);
}

void moe_engine_suspend(struct moe_engine *e, struct moe_status reason)
{
    moe_mutex_lock(&e->lock);
    e->suspended = reason;
    if (moe_failed(&reason))
        fail_queued(e, reason);
    moe_mutex_unlock(&e->lock);
}

uint64_t moe_engine_weights_version(struct moe_engine *e)
{
    moe_mutex_lock(&e->lock);
    uint64_t version = e->weights_version;
    moe_mutex_unlock(&e->lock);
    return version;
}

void moe_engine_read_counters(struct moe_engine *e, struct moe_engine_counters *out)
{
    moe_mutex_lock(&e->lock);
    *out = e->counters;
    out->queued_tokens = moe_batcher_tokens(e->batcher);
    moe_mutex_unlock(&e->lock);
}
