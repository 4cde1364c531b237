/* Training tickets in the engine. A call waits in `calls` on the worker that was asked until its
 * ticket comes; there it brings the tensors, on all other slots the ticket brings none. What a
 * ticket means is the training room's to say, and the same on all slots: begin, then the pass or
 * the change, then end. */
#include "worker/engine_state.h"

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

static void end_call(struct moe_engine *e, struct moe_train_work *w, struct moe_status status)
{
    w->failure = status;
    moe_engine__append_call(&e->ended_calls, w);
    moe_bell_ring(e->bell);
}

/* The sequencer of the view in force has it, so that its ticket will come. */
static bool is_known(const struct moe_engine *e, const struct moe_train_work *w)
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

static uint32_t *count_of(struct moe_engine *e, bool poke)
{
    return poke ? &e->poke_count : &e->call_count;
}

/* Takes `w` out of those that wait for their ticket. */
static void unlink_call(struct moe_engine *e, struct moe_train_work *w)
{
    (void)take_out(&e->calls, w);
    --*count_of(e, w->poke);
}

void moe_engine__give_up_calls(struct moe_engine *e, bool all, uint64_t now,
                               struct moe_status reason)
{
    for (struct moe_train_work *next, *w = e->calls.head; w != NULL; w = next) {
        next = w->next;
        if (is_known(e, w) || !(all || w->deadline_ns <= now))
            continue;
        unlink_call(e, w);
        end_call(e, w, reason);
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

static struct moe_status cancelled(void)
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
        unlink_call(e, w);
        end_call(e, w, cancelled());
    }
}

/* The call as a ticket without a place in the sequence. */
static void describe(const struct moe_engine *e, const struct moe_train_work *w,
                     struct moe_ticket *out)
{
    *out = (struct moe_ticket){.epoch = e->epoch, .kind = w->kind};
    if (w->kind == MOE_STEP_BACKWARD) {
        out->layer = w->layer;
        out->dtype = w->dtype;
    }
    out->order.number = w->number;
    out->order.length = w->body_length;
    memcpy(out->order.body, w->body, w->body_length);
}

/* Gives the first call that has none a number, and describes it. */
static bool number_call(struct moe_engine *e, struct moe_ticket *out, uint32_t *tokens)
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

void moe_engine__announce_orders(struct moe_engine *e)
{
    struct moe_ticket order;
    uint32_t tokens;
    while (e->session != NULL &&
           (number_call(e, &order, &tokens) || moe_engine__number_saving(e, &order, &tokens))) {
        pthread_mutex_unlock(&e->lock);
        e->config.announce_training(e->config.ctx, &order, tokens);
        pthread_mutex_lock(&e->lock);
    }
}

static struct moe_status admit_call(const struct moe_engine *e, const struct moe_train_work *w)
{
    struct moe_batch_key key = {w->layer, MOE_STEP_FORWARD, w->dtype};
    if (e->config.training == NULL)
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED, "there is no training here");
    if (e->refusing)
        return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_DRAINING, LEAVING_RETRY_MS,
                               "this worker is leaving");
    if (w->kind == MOE_STEP_BACKWARD && !moe_batcher_has(e->batcher, &key))
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND, "no MoE layer %u", w->layer);
    uint32_t most = e->session != NULL ? e->bucket_max : e->config.max_tokens_per_step;
    if (w->kind == MOE_STEP_BACKWARD && (w->tokens == 0 || w->tokens > most))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT,
                         "a Backward of %u tokens; one step has 1 to %u", w->tokens, most);
    if (e->call_count >= CALLS_MAX)
        return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, FULL_RETRY_MS,
                               "too many training calls are waiting");
    return moe_ok();
}

/* Lock held, and given up meanwhile. */
static void accept_call(struct moe_engine *e, struct moe_train_work *w, bool poke)
{
    w->submitted_ns = moe_clock_ns();
    w->started_ns = 0;
    w->number = 0;
    w->poke = poke;
    w->joined = w->cancelled = false;
    w->failure = moe_ok();
    w->aux_loss = 0;
    w->step = (struct moe_step_result){.missing_slot = -1};
    moe_engine__append_call(&e->calls, w);
    ++*count_of(e, poke);
    e->unfinished++;
    if (e->session == NULL)
        moe_bell_ring(e->bell); /* for its deadline */
    moe_engine__announce_orders(e);
}

static void free_poke(struct moe_train_work *w, struct moe_status status)
{
    (void)status;
    free(w);
}

/* One that says the same waits for its ticket: all that is known now will be told there. */
static bool is_poked(const struct moe_engine *e, const struct moe_train_work *poke)
{
    const struct moe_train_work *w = e->calls.head;
    while (w != NULL && !(w->poke && w->kind == poke->kind && w->body_length == poke->body_length &&
                          memcmp(w->body, poke->body, w->body_length) == 0))
        w = w->next;
    return w != NULL;
}

/* A worker that refuses new work ends what it has begun: pokes are not refused. */
bool moe_engine__poke(void *ctx, const struct moe_train_call *call)
{
    struct moe_engine *e = ctx;
    struct moe_train_work *w = calloc(1, sizeof *w);
    if (w == NULL)
        return false;
    w->kind = call->kind;
    w->deadline_ns = MOE_NEVER;
    w->done = free_poke;
    moe_train_call_pack(call, w->body, &w->body_length);
    pthread_mutex_lock(&e->lock);
    bool wanted = e->session != NULL && !e->quit && !is_poked(e, w);
    bool room = e->poke_count < POKES_MAX;
    if (wanted && room)
        accept_call(e, w, true);
    pthread_mutex_unlock(&e->lock);
    if (!wanted || !room)
        free(w);
    return !wanted || room;
}

struct moe_status moe_engine_submit_training(struct moe_engine *e, struct moe_train_work *w)
{
    pthread_mutex_lock(&e->lock);
    struct moe_status st = admit_call(e, w);
    if (!moe_failed(&st))
        accept_call(e, w, false);
    pthread_mutex_unlock(&e->lock);
    return st;
}

static struct moe_train_call call_of(const struct moe_train_work *w)
{
    struct moe_ticket t = {.kind = w->kind, .order = {.length = w->body_length}};
    struct moe_train_call call;
    memcpy(t.order.body, w->body, w->body_length);
    struct moe_status st = moe_train_call_read(&t, &call);
    MOE_INVARIANT(!moe_failed(&st)); /* we packed it */
    return call;
}

static bool waits_for(const struct moe_train_work *w, enum moe_step_kind kind, uint64_t id)
{
    return w != NULL && !w->poke && !w->cancelled && w->kind == kind && call_of(w).id == id;
}

/* Lock held. Also who has asked and whose ticket has not come, or has just begun: it will join. */
static bool somebody_waits(const struct moe_engine *e, enum moe_step_kind kind, uint64_t id)
{
    bool found = false;
    for (const struct moe_train_work *w = e->held.head; w != NULL; w = w->next)
        found = found || waits_for(w, kind, id);
    for (const struct moe_train_work *w = e->calls.head; w != NULL; w = w->next)
        found = found || waits_for(w, kind, id);
    for (unsigned i = 0; i < e->in_flight; i++)
        found = found || waits_for(e->lanes[(e->lane_first + i) % LANES].train, kind, id);
    return found;
}

/* Lock held, and given up at the end: `w` may be gone then. It waits no longer, and was perhaps the
 * last that did. Told to the training room with the lock: who asks later is later there, too. */
static void stop_waiting(struct moe_engine *e, const struct moe_train_work *w)
{
    struct moe_train_call call = call_of(w), poke;
    if ((w->kind != MOE_STEP_SAVE && w->kind != MOE_STEP_LOAD) ||
        somebody_waits(e, w->kind, call.id) ||
        !moe_train_job_unwanted(e->config.training, w->kind, call.id, &poke))
        return;
    pthread_mutex_unlock(&e->lock);
    (void)moe_engine__poke(e, &poke); /* without room, the next part that ends does the same */
    pthread_mutex_lock(&e->lock);
}

void moe_engine_cancel_training(struct moe_engine *e, struct moe_train_work *w)
{
    pthread_mutex_lock(&e->lock);
    w->cancelled = true;
    struct moe_train_work *at = e->calls.head;
    while (at != NULL && at != w)
        at = at->next;
    bool unknown = at != NULL && !is_known(e, w);
    if (unknown)
        unlink_call(e, w);
    bool ends = take_out(&e->held, w) || unknown;
    if (ends)
        end_call(e, w, cancelled());
    if (ends || at != NULL)
        stop_waiting(e, w);
    pthread_mutex_unlock(&e->lock);
}

/* ------------------------------------------------------------------ Save and Load */

static struct moe_status reforming(void)
{
    return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, REFORMING_RETRY_MS,
                           "the view ended while the call was running: ask again");
}

static void end_held(struct moe_engine *e, struct moe_status status,
                     const struct moe_train_answer *answer)
{
    struct moe_train_work *w = e->held.head;
    e->held = (struct call_list){0};
    for (struct moe_train_work *next; w != NULL; w = next) {
        next = w->next;
        if (w->answer != NULL) {
            *w->answer = *answer;
            w->answer->repeated = w->joined;
        }
        end_call(e, w, status);
    }
}

/* They speak of a Save or Load that has ended with its view; no later one has a ticket for them. */
static void drop_pokes(struct moe_engine *e)
{
    for (struct moe_train_work *next, *w = e->calls.head; w != NULL; w = next) {
        next = w->next;
        if (!w->poke)
            continue;
        unlink_call(e, w);
        end_call(e, w, reforming());
    }
}

void moe_engine__drop_held(struct moe_engine *e)
{
    const struct moe_train_answer none = {0};
    e->holding = false;
    drop_pokes(e);
    if (e->config.training == NULL)
        return;
    moe_train_forget_activations(e->config.training);
    moe_engine__plan_drop(e, false);
    moe_train_give_up_job(e->config.training);
    end_held(e, reforming(), &none);
}

/* --------------------------------------------------------------------------- tickets */

/* An exclusive ticket has the engine for itself. One of training waits for the one before: until
 * that has ended nobody knows whether it will have been run. */
bool moe_engine__may_begin(const struct moe_engine *e)
{
    if (e->ticket_count == 0 || e->in_flight == LANES || e->stopping)
        return false;
    if (e->in_flight == 0)
        return true;
    const struct moe_lane *running = &e->lanes[e->lane_first];
    enum moe_step_kind next = e->tickets[e->ticket_first].kind, now = running->ticket.kind;
    return !moe_step_is_exclusive(next) && !moe_step_is_exclusive(now) &&
           !(moe_step_is_training(next) && moe_step_is_training(now));
}

/* Its tensors are of the shape that the ticket says. Tickets come from another process. */
static bool fits_ticket(const struct moe_train_work *w, const struct moe_ticket *t)
{
    if (w->kind != t->kind)
        return false;
    return w->kind != MOE_STEP_BACKWARD ||
           (w->layer == t->layer && w->dtype == t->dtype && w->tokens <= t->bucket);
}

struct moe_status moe_engine__claim_call(struct moe_engine *e, struct moe_lane *lane)
{
    const struct moe_ticket *t = &lane->ticket;
    if (t->order.origin != moe_train_slot(e->config.training))
        return moe_ok();
    struct moe_train_work *w = e->calls.head;
    while (w != NULL && w->number != t->order.number)
        w = w->next;
    if (w == NULL || !fits_ticket(w, t))
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                         "ticket %llu is for a training call that was not announced",
                         (unsigned long long)t->seq);
    unlink_call(e, w);
    w->started_ns = moe_clock_ns();
    lane->train = w;
    return moe_ok();
}

static struct moe_status enqueue_backward(struct moe_engine *e, struct moe_lane *lane,
                                          struct moe_session *session, struct moe_trainer *trainer)
{
    const struct moe_train_work *w = lane->train;
    struct moe_backward_args args = {
        .trainer = trainer,
        .dtype = lane->ticket.dtype,
        .bucket = lane->ticket.bucket,
        .aux_coeff = lane->call.aux_coeff,
        .accumulate = !lane->call.input_only,
        .aux_loss = &lane->turn.aux_loss,
        .saved = lane->turn.saved,
    };
    lane->tokens = 0;
    if (w != NULL) {
        lane->tokens = args.tokens = w->tokens;
        memset(lane->mode, (int)w->mode, w->tokens);
        args.x = w->x;
        args.dy = w->dy;
        args.mode = lane->mode;
        args.ids = w->ids;
        args.weights = w->weights;
        args.dx = w->dx;
        args.dweights = w->dweights;
        args.token_state = lane->token_state;
    }
    return e->config.backend->training->backward_enqueue(session, &args, &lane->step);
}

void moe_engine__begin_training(struct moe_engine *e, struct moe_lane *lane,
                                struct moe_session *session)
{
    struct moe_train *t = e->config.training;
    struct moe_trainer *trainer = NULL;
    lane->failure = moe_train_call_read(&lane->ticket, &lane->call);
    if (!moe_failed(&lane->failure))
        lane->failure = moe_train_begin(t, &lane->ticket, &lane->call, &lane->turn, &trainer);
    if (moe_failed(&lane->failure) || !lane->turn.run)
        return;
    lane->changing = lane->turn.changes;
    if (lane->ticket.kind != MOE_STEP_BACKWARD) {
        lane->failure =
            moe_train_run(t, session, &lane->ticket, &lane->call, &lane->turn, &lane->outcome);
        lane->changing = lane->turn.changes;
        return;
    }
    lane->failure = enqueue_backward(e, lane, session, trainer);
    if (moe_failed(&lane->failure))
        lane->step = NULL;
}

bool moe_engine__refuse_training(struct moe_lane *lane, struct moe_status why)
{
    if (lane->ticket.kind != MOE_STEP_BACKWARD)
        return false;
    lane->turn.refusal = moe_error_context(why, "refused by all workers, nothing has changed");
    return true;
}

/* What the pass says about the tokens of our call. */
static struct moe_status verdict_of(const struct moe_lane *lane)
{
    const struct moe_segment all = {.first = 0, .count = lane->tokens};
    return moe_lane_verdict(lane, &all, 0);
}

/* Without the lock. */
static struct moe_status end_turn(struct moe_engine *e, struct moe_lane *lane,
                                  struct moe_train_answer *answer)
{
    struct moe_train_work *w = lane->train;
    struct moe_status st = moe_train_end(e->config.training, &lane->ticket, &lane->call,
                                         &lane->turn, &lane->outcome, answer);
    if (w == NULL || lane->ticket.kind != MOE_STEP_BACKWARD || !lane->turn.run || moe_failed(&st))
        return st;
    w->aux_loss = lane->turn.aux_loss;
    return verdict_of(lane);
}

/* The call of the turn has its end, or waits for a later turn's. */
static void end_own_call(struct moe_engine *e, struct moe_lane *lane, struct moe_status status,
                         const struct moe_train_answer *answer)
{
    struct moe_train_work *w = lane->train;
    if (lane->turn.waits && !w->poke && !w->cancelled) {
        w->joined = lane->turn.joined;
        moe_engine__append_call(&e->held, w);
        return;
    }
    if (w->answer != NULL) {
        *w->answer = *answer;
        w->answer->repeated = answer->repeated || lane->turn.joined;
    }
    end_call(e, w, lane->turn.waits && !w->poke ? cancelled() : status);
}

/* Without the lock. */
static void tell_hold(struct moe_engine *e)
{
    bool hold = moe_train_is_copying(e->config.training);
    if (hold != e->holding && e->config.hold != NULL)
        e->config.hold(e->config.ctx, hold);
    e->holding = hold;
}

void moe_engine__complete_training(struct moe_engine *e, struct moe_lane *lane,
                                   const struct moe_step_result *result)
{
    struct moe_train_answer answer = {0};
    pthread_mutex_unlock(&e->lock);
    struct moe_status st = end_turn(e, lane, &answer);
    if (result->used_saved)
        moe_train_note_reused(e->config.training);
    moe_engine__plan_drop(e, true);
    lane->changing = false;
    uint64_t version = moe_train_weights_version(e->config.training);
    pthread_mutex_lock(&e->lock);
    /* Tokens that have to be computed again are announced before the end of this ticket is. */
    moe_engine__change_version(e, version, true);
    pthread_mutex_unlock(&e->lock);
    tell_hold(e);
    e->config.finished(e->config.ctx, &lane->ticket, moe_ok(), 0);
    bool passed = lane->ticket.kind == MOE_STEP_BACKWARD && lane->turn.run &&
                  !moe_failed(&lane->turn.refusal);
    if (passed)
        moe_step_metrics_backward(e->config.metrics, result);
    pthread_mutex_lock(&e->lock);
    e->counters.steps += passed;
    if (lane->turn.settles)
        end_held(e, st, &answer);
    if (lane->train == NULL)
        return;
    struct moe_train_work *w = lane->train;
    w->step = *result;
    bool left = lane->turn.waits && !w->poke && w->cancelled;
    end_own_call(e, lane, st, &answer);
    if (left)
        stop_waiting(e, w);
}

void moe_engine__abandon_training(struct moe_engine *e, struct moe_lane *lane)
{
    if (moe_step_is_forward(lane->ticket.kind))
        return;
    if (lane->changing)
        moe_train_torn(e->config.training);
    if (lane->train != NULL)
        end_call(e, lane->train, reforming());
    lane->train = NULL;
    lane->changing = false;
}
