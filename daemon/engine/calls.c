/* SPDX-License-Identifier: Apache-2.0 */
/* Training calls that wait. A call waits in `calls` on the worker that was asked until its ticket
 * comes; a call that began a job (a Save) then waits in `pending_saves` until a later ticket
 * settles the job. The room behind the calls requests progress tickets: calls of the engine without
 * a client. */
#include "engine/state.h"

#include "base/clock.h"

#include <stdlib.h>
#include <string.h>

enum { FULL_RETRY_MS = 50, REFORMING_RETRY_MS = 200, LEAVING_RETRY_MS = 100 };

/* ------------------------------------------------------------------ calls that wait */

void moe_engine__append_call(struct call_list *list, struct moe_train_work *w)
{
    w->next = NULL;
    if (list->tail != NULL)
        list->tail->next = w;
    else
        list->head = w;
    list->tail = w;
}

void moe_engine__end_call(struct moe_engine *e, struct moe_train_work *w, struct moe_status status)
{
    w->failure = status;
    moe_engine__append_call(&e->ended_calls, w);
    moe_eventcount_notify(e->eventcount);
}

/* The sequencer of the present view knows it, so its ticket will come. */
static bool is_known(const struct moe_engine *e, const struct moe_train_work *w)
    MOE_REQUIRES(e->lock)
{
    return e->session != NULL && w->number != 0;
}

/* Takes `w` out of a list; false when it is not in it. */
static bool take_out(struct call_list *list, const struct moe_train_work *w)
{
    struct call_list kept = {0};
    bool found = false;
    for (struct moe_train_work *next, *at = list->head; at != NULL; at = next) {
        next = at->next;
        found = found || at == w;
        if (at != w)
            moe_engine__append_call(&kept, at);
    }
    *list = kept;
    return found;
}

static uint32_t *count_of(struct moe_engine *e, bool is_progress)
{
    return is_progress ? &e->progress_count : &e->call_count;
}

void moe_engine__unlink_call(struct moe_engine *e, struct moe_train_work *w)
{
    (void)take_out(&e->calls, w);
    --*count_of(e, w->is_progress);
}

void moe_engine__give_up_calls(struct moe_engine *e, bool all, uint64_t now,
                               struct moe_status reason)
{
    for (struct moe_train_work *next, *w = e->calls.head; w != NULL; w = next) {
        next = w->next;
        if (is_known(e, w) || !(all || w->deadline_ns <= now))
            continue;
        moe_engine__unlink_call(e, w);
        moe_engine__end_call(e, w, reason);
    }
}

uint64_t moe_engine__next_call_expiry(const struct moe_engine *e)
{
    uint64_t first = MOE_NEVER;
    for (const struct moe_train_work *w = e->calls.head; w != NULL; w = w->next)
        if (!is_known(e, w) && w->deadline_ns < first)
            first = w->deadline_ns;
    return first;
}

struct moe_status moe_engine__call_cancelled(void)
{
    return moe_error(MOE_CANCELLED, MOE_REASON_NONE, "cancelled");
}

void moe_engine__forget_numbers(struct moe_engine *e)
{
    for (struct moe_train_work *next, *w = e->calls.head; w != NULL; w = next) {
        next = w->next;
        w->number = 0;
        if (!w->cancelled)
            continue;
        moe_engine__unlink_call(e, w);
        moe_engine__end_call(e, w, moe_engine__call_cancelled());
    }
}

/* The call as a ticket without a place in the sequence. */
static void describe(const struct moe_engine *e, const struct moe_train_work *w,
                     struct moe_ticket *out) MOE_REQUIRES(e->lock)
{
    *out = (struct moe_ticket){.epoch = e->epoch, .kind = w->kind};
    if (moe_step_traits(w->kind)->has_rows) {
        out->layer = w->layer;
        out->dtype = w->dtype;
    }
    out->descriptor.number = w->number;
    out->descriptor.length = w->body_length;
    memcpy(out->descriptor.body, w->body, w->body_length);
}

/* Numbers the first call without a number, and describes it. */
static bool number_call(struct moe_engine *e, struct moe_ticket *out, uint32_t *tokens)
    MOE_REQUIRES(e->lock)
{
    struct moe_train_work *w = e->calls.head;
    while (w != NULL && w->number != 0)
        w = w->next;
    if (w == NULL)
        return false;
    w->number = ++e->last_number;
    *tokens = w->tokens;
    describe(e, w, out);
    return true;
}

void moe_engine__announce_calls(struct moe_engine *e)
{
    struct moe_ticket call;
    uint32_t tokens;
    while (e->session != NULL &&
           (number_call(e, &call, &tokens) || moe_engine__number_retain(e, &call, &tokens))) {
        moe_mutex_unlock(&e->lock);
        e->config.announce_training(e->config.ctx, &call, tokens);
        moe_mutex_lock(&e->lock);
    }
}

static struct moe_status admit_call(const struct moe_engine *e, const struct moe_train_work *w)
    MOE_REQUIRES(e->lock)
{
    const struct moe_step_key key = {w->layer, MOE_STEP_FORWARD, w->dtype};
    const bool has_rows = moe_step_traits(w->kind)->has_rows;
    if (e->config.calls == NULL)
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "this worker has no training; start it with --training");
    if (e->refusing)
        return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_DRAINING, LEAVING_RETRY_MS,
                               "this worker is leaving");
    MOE_TRY(e->suspended);
    if (has_rows && !moe_batcher_has(e->batcher, &key))
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND, "no MoE layer %u", w->layer);
    uint32_t most = e->session != NULL ? e->bucket_max : e->config.max_tokens_per_step;
    if (has_rows && (w->tokens == 0 || w->tokens > most))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT,
                         "a Backward of %u tokens; one step has 1 to %u", w->tokens, most);
    if (e->call_count >= CALLS_MAX)
        return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, FULL_RETRY_MS,
                               "too many training calls are waiting");
    return moe_ok();
}

static struct moe_call_descriptor descriptor_of(const struct moe_train_work *w)
{
    struct moe_call_descriptor descriptor = {.length = w->body_length};
    memcpy(descriptor.body, w->body, w->body_length);
    return descriptor;
}

/* Releases the lock meanwhile. */
static void accept_call(struct moe_engine *e, struct moe_train_work *w, bool is_progress)
    MOE_REQUIRES(e->lock)
{
    const struct moe_call_descriptor descriptor = descriptor_of(w);
    w->submitted_ns = moe_clock_ns();
    w->id = e->config.calls->id_of(w->kind, &descriptor);
    w->started_ns = w->ended_ns = 0;
    w->number = 0;
    w->is_progress = is_progress;
    w->joined = w->cancelled = false;
    w->failure = moe_ok();
    w->aux_loss = 0;
    w->step = (struct moe_step_result){.missing_slot = -1};
    moe_engine__append_call(&e->calls, w);
    ++*count_of(e, is_progress);
    e->unfinished++;
    if (e->session == NULL)
        moe_eventcount_notify(e->eventcount); /* for its deadline */
    moe_engine__announce_calls(e);
}

static void free_progress_ticket(struct moe_train_work *w, struct moe_status status)
{
    (void)status;
    free(w);
}

/* An equal one waits: its ticket will carry all that is known now. */
static bool has_progress_ticket(const struct moe_engine *e, const struct moe_train_work *ticket)
    MOE_REQUIRES(e->lock)
{
    const struct moe_train_work *w = e->calls.head;
    while (w != NULL &&
           !(w->is_progress && w->kind == ticket->kind && w->body_length == ticket->body_length &&
             memcmp(w->body, ticket->body, w->body_length) == 0))
        w = w->next;
    return w != NULL;
}

/* A worker that refuses new work finishes its jobs: progress tickets are not refused. */
bool moe_engine__request(void *ctx, enum moe_step_kind kind,
                         const struct moe_call_descriptor *descriptor)
{
    struct moe_engine *e = ctx;
    struct moe_train_work *w = calloc(1, sizeof *w);
    if (w == NULL)
        return false;
    w->kind = kind;
    w->deadline_ns = MOE_NEVER;
    w->done = free_progress_ticket;
    w->body_length = descriptor->length;
    memcpy(w->body, descriptor->body, descriptor->length);
    moe_mutex_lock(&e->lock);
    bool wanted = e->session != NULL && !e->quit && !has_progress_ticket(e, w);
    bool room = e->progress_count < PROGRESS_TICKETS_MAX;
    if (wanted && room)
        accept_call(e, w, true);
    moe_mutex_unlock(&e->lock);
    if (!wanted || !room)
        free(w);
    return !wanted || room;
}

struct moe_status moe_engine_submit_training(struct moe_engine *e, struct moe_train_work *w)
{
    moe_mutex_lock(&e->lock);
    struct moe_status st = admit_call(e, w);
    if (!moe_failed(&st))
        accept_call(e, w, false);
    moe_mutex_unlock(&e->lock);
    return st;
}

static bool waits_for(const struct moe_train_work *w, enum moe_step_kind kind, uint64_t id)
{
    return w != NULL && !w->is_progress && !w->cancelled && w->kind == kind && w->id == id;
}

/* Calls without a ticket, and those with a ticket that has just begun, count: they will join. */
static bool is_waited_for(const struct moe_engine *e, enum moe_step_kind kind, uint64_t id)
    MOE_REQUIRES(e->lock)
{
    bool found = false;
    for (const struct moe_train_work *w = e->pending_saves.head; w != NULL; w = w->next)
        found = found || waits_for(w, kind, id);
    for (const struct moe_train_work *w = e->calls.head; w != NULL; w = w->next)
        found = found || waits_for(w, kind, id);
    for (unsigned i = 0; i < e->in_flight; i++)
        found = found || waits_for(e->step_slots[(e->oldest + i) % STEP_SLOTS].call, kind, id);
    return found;
}

void moe_engine__stop_waiting(struct moe_engine *e, const struct moe_train_work *w)
{
    const enum moe_step_kind kind = w->kind;
    struct moe_call_descriptor descriptor;
    if (is_waited_for(e, kind, w->id) ||
        !e->config.calls->is_unwanted(e->config.calls_ctx, kind, w->id, &descriptor))
        return;
    moe_mutex_unlock(&e->lock);
    /* Without room, the next part that ends requests it again. */
    (void)moe_engine__request(e, kind, &descriptor);
    moe_mutex_lock(&e->lock);
}

void moe_engine_cancel_training(struct moe_engine *e, struct moe_train_work *w)
{
    moe_mutex_lock(&e->lock);
    w->cancelled = true;
    struct moe_train_work *at = e->calls.head;
    while (at != NULL && at != w)
        at = at->next;
    bool unknown = at != NULL && !is_known(e, w);
    if (unknown)
        moe_engine__unlink_call(e, w);
    bool ends = take_out(&e->pending_saves, w) || unknown;
    if (ends)
        moe_engine__end_call(e, w, moe_engine__call_cancelled());
    if (ends || at != NULL)
        moe_engine__stop_waiting(e, w);
    moe_mutex_unlock(&e->lock);
}

/* ------------------------------------------------------- calls that wait for a job's end */

struct moe_status moe_engine__reforming(void)
{
    return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, REFORMING_RETRY_MS,
                           "the view ended while the call was running: ask again");
}

void moe_engine__end_pending_saves(struct moe_engine *e, struct moe_status status,
                                   const struct moe_call_exec *x)
{
    struct moe_train_work *w = e->pending_saves.head;
    e->pending_saves = (struct call_list){0};
    for (struct moe_train_work *next; w != NULL; w = next) {
        next = w->next;
        if (w->answer != NULL)
            e->config.calls->answer(x, w);
        moe_engine__end_call(e, w, status);
    }
}

/* Their Save or Load has ended with its view; no ticket will come for them. */
static void drop_progress_tickets(struct moe_engine *e) MOE_REQUIRES(e->lock)
{
    for (struct moe_train_work *next, *w = e->calls.head; w != NULL; w = next) {
        next = w->next;
        if (!w->is_progress)
            continue;
        moe_engine__unlink_call(e, w);
        moe_engine__end_call(e, w, moe_engine__reforming());
    }
}

void moe_engine__drop_pending_saves(struct moe_engine *e)
{
    e->blocks_weight_updates = false;
    drop_progress_tickets(e);
    if (e->config.calls == NULL)
        return;
    e->config.calls->end_view(e->config.calls_ctx);
    moe_engine__plan_expiry(e, false);
    moe_engine__end_pending_saves(e, moe_engine__reforming(), NULL);
}
