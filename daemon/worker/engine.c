/* The engine's thread and its state; see worker/engine.h. It never knows who asks or who orders.
 *
 * One mutex guards everything that other threads may touch. The thread itself loops over "what is
 * the next thing to do" and drops the lock for every callback, every copy of rows and every call of
 * the backend. The one idea worth knowing: a request is wherever its tokens are. `queued` says that
 * some wait, `taken - finished` is the number of those in steps, and when neither is left its end
 * is reported. */
#include "worker/engine.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/wait.h"
#include "worker/engine_state.h"

#include <sched.h>
#include <stdlib.h>

enum { QUEUE_FULL_RETRY_MS = 20, DRAINING_RETRY_MS = 100 };

/* ---------------------------------------------------------------- ends of requests */

static void append(struct work_list *list, struct moe_work *w)
{
    w->next = NULL;
    if (list->tail != NULL)
        list->tail->next = w;
    else
        list->head = w;
    list->tail = w;
}

/* Lock held. Lists `w` as ended when nothing of it waits or runs. */
static void settle(struct moe_engine *e, struct moe_work *w)
{
    if (w->queued || w->taken != w->finished)
        return;
    append(&e->ended, w);
    moe_bell_ring(e->bell);
}

/* Lock held. Gives up a request that is not queued (any more); the first reason counts. */
static void give_up(struct moe_engine *e, struct moe_work *w, struct moe_status reason)
{
    if (!moe_failed(&w->failure))
        w->failure = reason;
    settle(e, w);
}

static void give_up_all(struct moe_engine *e, struct moe_work *evicted, struct moe_status reason)
{
    for (struct moe_work *next; evicted != NULL; evicted = next) {
        next = evicted->next;
        give_up(e, evicted, reason);
    }
}

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

static bool match_other_version(const struct moe_work *w, uint64_t version)
{
    return w->weights_version != 0 && w->weights_version != version;
}

static struct moe_status other_version(uint64_t version)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                     "the weights version is now %llu", (unsigned long long)version);
}

static struct moe_status stale_epoch(uint64_t epoch)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STALE_EPOCH, "the epoch is now %llu",
                     (unsigned long long)epoch);
}

static struct moe_status draining(void)
{
    return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_DRAINING, DRAINING_RETRY_MS,
                           "this worker is leaving");
}

/* Thread, lock held and given up meanwhile. */
static void report_ended(struct moe_engine *e)
{
    struct moe_work *w = e->ended.head;
    struct moe_train_work *call = e->ended_calls.head;
    e->ended = (struct work_list){0};
    e->ended_calls = (struct call_list){0};
    uint64_t count = 0, failed = 0;
    pthread_mutex_unlock(&e->lock);
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
    pthread_mutex_lock(&e->lock);
    e->counters.requests += count;
    e->counters.failed_requests += failed;
    e->unfinished -= count;
    if (e->unfinished == 0)
        pthread_cond_broadcast(&e->idle);
}

/* --------------------------------------------------------------------------- steps */

static const struct moe_layer_spec *find_spec(const struct moe_engine *e, uint32_t layer,
                                              struct moe_layer **handle)
{
    size_t low = 0, high = e->config.layer_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (e->config.specs[middle]->layer < layer)
            low = middle + 1;
        else
            high = middle;
    }
    MOE_INVARIANT(low < e->config.layer_count && e->config.specs[low]->layer == layer);
    *handle = e->config.layers[low];
    return e->config.specs[low];
}

static struct moe_batch_key key_of(const struct moe_ticket *t)
{
    return (struct moe_batch_key){t->layer, t->kind, t->dtype};
}

/* Lock held. Tickets come from another process. */
static struct moe_status check_ticket(const struct moe_engine *e, const struct moe_ticket *t)
{
    struct moe_batch_key key = key_of(t);
    bool training = e->config.training != NULL && moe_step_has_order(t->kind);
    if (t->kind == MOE_STEP_BACKWARD)
        key.kind = MOE_STEP_FORWARD; /* the same layers and dtypes */
    if (!moe_batcher_has(e->batcher, &key) && !(training && moe_step_is_exclusive(t->kind)))
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu: no such layer, kind or dtype",
                         (unsigned long long)t->seq);
    if (t->kind != MOE_STEP_FORWARD && !training)
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu: no such kind",
                         (unsigned long long)t->seq);
    bool exclusive = moe_step_is_exclusive(t->kind);
    if (!exclusive &&
        (t->bucket == 0 || (t->bucket & (t->bucket - 1)) != 0 || t->bucket > e->bucket_max))
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu: no bucket of %u tokens",
                         (unsigned long long)t->seq, t->bucket);
    if (e->last_seq != 0 && t->seq != e->last_seq + 1)
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu follows ticket %llu",
                         (unsigned long long)t->seq, (unsigned long long)e->last_seq);
    return moe_ok();
}

/* Lock held. */
static void expire(struct moe_engine *e)
{
    uint64_t now = moe_clock_ns();
    if (now >= e->next_drop)
        moe_engine__drop_old(e, now);
    struct moe_work *late = moe_batcher_expire(e->batcher, now);
    if (late == NULL && now < moe_engine__next_call_expiry(e))
        return;
    struct moe_status why = moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                                      "the deadline passed before the request was finished");
    give_up_all(e, late, why);
    moe_engine__give_up_calls(e, false, now, why);
}

/* Lock held. Fills the free lane with the next ticket's tokens. */
static struct moe_lane *fill_lane(struct moe_engine *e)
{
    struct moe_lane *lane = &e->lanes[(e->lane_first + e->in_flight) % LANES];
    lane->ticket = e->tickets[e->ticket_first];
    e->ticket_first = (e->ticket_first + 1) % TICKETS_MAX;
    e->ticket_count--;
    lane->step = NULL;
    lane->segment_count = lane->tokens = 0;
    lane->train = NULL;
    lane->changing = false;
    lane->weights_version = e->weights_version;
    lane->failure = check_ticket(e, &lane->ticket);
    e->in_flight++;
    if (moe_failed(&lane->failure))
        return lane;
    e->last_seq = lane->ticket.seq;
    struct moe_batch_key key = key_of(&lane->ticket);
    if (moe_step_is_training(key.kind))
        lane->failure = moe_engine__claim_call(e, lane);
    else if (key.kind == MOE_STEP_SAVING_FORWARD)
        lane->failure = moe_engine__claim_saving(e, lane);
    else
        lane->segment_count =
            moe_batcher_take(e->batcher, &key, lane->ticket.bucket, lane->segments, &lane->tokens);
    uint64_t now = moe_clock_ns();
    for (size_t i = 0; i < lane->segment_count; i++)
        if (lane->segments[i].work->started_ns == 0)
            lane->segments[i].work->started_ns = now;
    return lane;
}

/* Thread, lock held and given up meanwhile. A step that cannot begin takes its lane all the same,
 * so that it fails in its turn. */
static void begin_step(struct moe_engine *e)
{
    struct moe_lane *lane = fill_lane(e);
    struct moe_session *session = e->session;
    if (moe_failed(&lane->failure))
        return;
    pthread_mutex_unlock(&e->lock);
    if (moe_step_is_training(lane->ticket.kind)) {
        moe_engine__begin_training(e, lane, session);
        pthread_mutex_lock(&e->lock);
        return;
    }
    struct moe_step_args args;
    struct moe_layer *layer;
    const struct moe_layer_spec *spec = find_spec(e, lane->ticket.layer, &layer);
    moe_lane_gather(lane, spec, &args);
    args.layer = layer;
    if (lane->ticket.kind == MOE_STEP_SAVING_FORWARD)
        args.save = lane->ticket.seq; /* no other step of the session has this name */
    lane->failure = e->config.backend->step_enqueue(session, &args, &lane->step);
    if (moe_failed(&lane->failure))
        lane->step = NULL;
    pthread_mutex_lock(&e->lock);
}

static void add_result(struct moe_work *w, const struct moe_lane *lane,
                       const struct moe_step_result *r)
{
    for (int i = 0; i < MOE_STAGE_COUNT; i++)
        w->step.stage_ns[i] += r->stage_ns[i];
    w->step.total_ns += r->total_ns;
    w->step.rows += r->rows;
    w->step.missing_slot = -1;
    w->answered_epoch = lane->ticket.epoch;
    w->answered_version = lane->weights_version;
    w->step_tokens = lane->tokens;
    w->steps++;
    bool saving = lane->ticket.kind == MOE_STEP_SAVING_FORWARD;
    w->saved_name = saving ? lane->ticket.seq : 0;
    w->saved_here = saving && r->saved;
}

/* Lock held. */
static void finish_segments(struct moe_engine *e, const struct moe_lane *lane,
                            const struct moe_step_result *result)
{
    uint32_t row = 0;
    for (size_t i = 0; i < lane->segment_count; i++) {
        const struct moe_segment *s = &lane->segments[i];
        struct moe_work *w = s->work;
        struct moe_status verdict = moe_lane_verdict(lane, s, row);
        row += s->count;
        w->finished += s->count;
        add_result(w, lane, result);
        if (moe_failed(&verdict)) {
            (void)moe_batcher_remove(e->batcher, w);
            give_up(e, w, verdict);
        } else {
            settle(e, w);
        }
    }
    e->counters.tokens += lane->tokens;
    e->counters.steps++;
}

static void retire_lane(struct moe_engine *e)
{
    e->lane_first = (e->lane_first + 1) % LANES;
    e->in_flight--;
}

/* Thread, lock held and given up meanwhile. `finished` comes before the rows are copied out: the
 * sequencer can order the next step while they are. Where it is this worker's own, and peers send
 * it mail, this thread reads their word: what comes while rows are copied is read after that. */
static void complete_oldest(struct moe_engine *e, const struct moe_step_result *result)
{
    struct moe_lane *lane = &e->lanes[e->lane_first];
    struct moe_layer *layer;
    if (moe_step_is_training(lane->ticket.kind)) {
        moe_engine__complete_training(e, lane, result);
        retire_lane(e);
        return;
    }
    pthread_mutex_unlock(&e->lock);
    e->config.finished(e->config.ctx, &lane->ticket, moe_ok(), 0);
    moe_lane_scatter(lane, find_spec(e, lane->ticket.layer, &layer));
    if (lane->ticket.kind == MOE_STEP_SAVING_FORWARD)
        moe_engine__note_saved(e, lane, result);
    moe_step_metrics_forward(e->config.metrics, result);
    pthread_mutex_lock(&e->lock);
    finish_segments(e, lane, result);
    retire_lane(e);
}

/* ---------------------------------------------------------------- another version */

/* Lock held. */
static bool rewind_queue(struct moe_engine *e, size_t i, struct moe_batch_key *key,
                         uint32_t *tokens)
{
    struct moe_work *w;
    if (!moe_batcher_rewind(e->batcher, i, key, tokens, &w))
        return false;
    if (*tokens > 0) {
        w->step = (struct moe_step_result){.missing_slot = -1};
        w->steps = 0;
    }
    return true;
}

void moe_engine__change_version(struct moe_engine *e, uint64_t version, bool announce)
{
    if (version == e->weights_version)
        return;
    e->weights_version = version;
    give_up_all(e, moe_batcher_evict(e->batcher, match_other_version, version),
                other_version(version));
    struct moe_batch_key key;
    uint32_t tokens;
    for (size_t i = 0; rewind_queue(e, i, &key, &tokens); i++) {
        if (tokens == 0 || !announce)
            continue;
        pthread_mutex_unlock(&e->lock);
        e->config.announce(e->config.ctx, key.layer, key.kind, key.dtype, tokens);
        pthread_mutex_lock(&e->lock);
    }
}

/* ------------------------------------------------------------------- end of a view */

/* Lock held. The thread lets go of the session. */
static void end_view(struct moe_engine *e)
{
    e->session = NULL;
    e->stopping = false;
    e->ticket_count = 0;
    moe_engine__drop_held(e);
    pthread_cond_broadcast(&e->idle);
}

/* Lock held. Undoes the takes of one step, last segment first. */
static void put_back(struct moe_engine *e, const struct moe_lane *lane)
{
    for (size_t i = lane->segment_count; i-- > 0;) {
        const struct moe_segment *s = &lane->segments[i];
        struct moe_work *w = s->work;
        if (!w->cancelled && !moe_failed(&w->failure)) {
            moe_batcher_put_back(e->batcher, s);
            continue;
        }
        w->finished += s->count;
        give_up(e, w, moe_error(MOE_CANCELLED, MOE_REASON_NONE, "cancelled"));
    }
}

/* Thread, lock held and given up meanwhile. The oldest step failed: no step after it can count, so
 * all of them are waited for and undone, the youngest first. */
static void fail_view(struct moe_engine *e, struct moe_status why, int missing_slot)
{
    const struct moe_backend *backend = e->config.backend;
    struct moe_session *session = e->session;
    struct moe_ticket failed[LANES];
    unsigned count = e->in_flight;
    pthread_mutex_unlock(&e->lock);
    backend->session_abort(session);
    for (unsigned i = 0; i < count; i++) {
        struct moe_lane *lane = &e->lanes[(e->lane_first + i) % LANES];
        struct moe_step_result ignored;
        failed[i] = lane->ticket;
        if (lane->step != NULL)
            (void)backend->step_wait(lane->step, MOE_NEVER, &ignored);
    }
    uint64_t lost = backend->session_lost(session);
    if (missing_slot >= 0 && missing_slot < MOE_MAX_SLOTS)
        lost |= UINT64_C(1) << missing_slot;
    pthread_mutex_lock(&e->lock);
    for (unsigned i = count; i-- > 0;)
        put_back(e, &e->lanes[(e->lane_first + i) % LANES]);
    for (unsigned i = 0; i < count; i++)
        moe_engine__abandon_training(e, &e->lanes[(e->lane_first + i) % LANES]);
    e->in_flight = 0;
    bool called_off = e->stopping;
    end_view(e);
    pthread_mutex_unlock(&e->lock);
    if (!called_off)
        for (unsigned i = 0; i < count; i++)
            e->config.finished(e->config.ctx, &failed[i], why, lost);
    pthread_mutex_lock(&e->lock);
}

/* Lock held. News is expected at any moment: for a while after the last step. */
static bool is_awake(const struct moe_engine *e)
{
    return e->config.spin_ns > 0 && moe_clock_ns() < e->awake_until;
}

/* Lock held. */
static void stay_awake(struct moe_engine *e)
{
    if (e->config.spin_ns > 0)
        e->awake_until = moe_clock_ns() + e->config.spin_ns;
}

/* Thread, no lock. Looks at the step and at the bell in turns, so that the next ticket begins while
 * the step runs. MOE_DEADLINE_EXCEEDED: it still does. */
static struct moe_status watch_step(struct moe_engine *e, struct moe_step *step, uint64_t until,
                                    struct moe_step_result *result)
{
    for (;;) {
        struct moe_status st = e->config.backend->step_wait(step, 0, result);
        if (st.code != MOE_DEADLINE_EXCEEDED || moe_bell_count(e->bell) != e->heard ||
            moe_clock_ns() >= until)
            return st;
        sched_yield(); /* who has something to do comes first */
    }
}

/* Thread, lock held and given up meanwhile. */
static void wait_for_oldest(struct moe_engine *e)
{
    struct moe_lane *lane = &e->lanes[e->lane_first];
    const bool awake = is_awake(e);
    uint64_t until = e->in_flight < LANES ? moe_clock_ns() + TURN_NS : MOE_NEVER;
    struct moe_step_result result = {.missing_slot = -1};
    struct moe_status st = lane->failure;
    if (lane->step != NULL) {
        pthread_mutex_unlock(&e->lock);
        st = awake ? watch_step(e, lane->step, e->awake_until, &result)
                   : e->config.backend->step_wait(lane->step, until, &result);
        pthread_mutex_lock(&e->lock);
        if (st.code == MOE_DEADLINE_EXCEEDED)
            return;
        lane->step = NULL;
    }
    if (moe_failed(&st) && result.refused && moe_engine__refuse_training(lane, st))
        st = moe_ok();
    if (moe_failed(&st))
        fail_view(e, st, result.missing_slot);
    else
        complete_oldest(e, &result);
    stay_awake(e);
}

/* ---------------------------------------------------------------------- the thread */

/* Lock held. */
static void fail_queued(struct moe_engine *e, struct moe_status reason)
{
    give_up_all(e, moe_batcher_evict(e->batcher, match_all, 0), reason);
    moe_engine__give_up_calls(e, true, 0, reason);
}

/* Lock held, and given up meanwhile. */
static void wait_for_news(struct moe_engine *e)
{
    uint64_t until = moe_batcher_next_expiry(e->batcher), call = moe_engine__next_call_expiry(e);
    until = call < until ? call : until;
    until = e->next_drop < until ? e->next_drop : until;
    const bool awake = is_awake(e);
    pthread_mutex_unlock(&e->lock);
    if (awake)
        moe_bell_watch(e->bell, e->heard, until < e->awake_until ? until : e->awake_until);
    else
        moe_bell_wait(e->bell, e->heard, until);
    pthread_mutex_lock(&e->lock);
}

/* Lock held, and given up meanwhile. Everything that was told before the last ring is known then;
 * what comes while it is looked at rings again. */
static void hear(struct moe_engine *e)
{
    uint32_t rung = moe_bell_count(e->bell);
    if (rung == e->heard)
        return;
    e->heard = rung;
    if (e->config.listen == NULL)
        return;
    pthread_mutex_unlock(&e->lock);
    e->config.listen(e->config.ctx);
    pthread_mutex_lock(&e->lock);
}

static void *run_thread(void *arg)
{
    struct moe_engine *e = arg;
    pthread_mutex_lock(&e->lock);
    for (;;) {
        hear(e);
        expire(e);
        if (e->quit)
            fail_queued(e, draining());
        if (e->ended.head != NULL || e->ended_calls.head != NULL)
            report_ended(e);
        else if (moe_engine__may_begin(e))
            begin_step(e);
        else if (e->in_flight > 0)
            wait_for_oldest(e);
        else if (e->stopping)
            end_view(e);
        else if (e->quit)
            break;
        else
            wait_for_news(e);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

/* ----------------------------------------------------------------- create, destroy */

static struct moe_status create_batcher(struct moe_engine *e, struct moe_lane_shape *shape)
{
    const struct moe_engine_config *c = &e->config;
    uint32_t *layers = calloc(c->layer_count + 1, sizeof *layers);
    if (layers == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for layers");
    for (size_t i = 0; i < c->layer_count; i++) {
        const struct moe_layer_spec *spec = c->specs[i];
        layers[i] = spec->layer;
        if (spec->hidden > shape->hidden)
            shape->hidden = spec->hidden;
        if (spec->router.top_k > shape->top_k)
            shape->top_k = spec->router.top_k;
    }
    struct moe_status st = moe_batcher_create(layers, c->layer_count, &e->batcher);
    free(layers);
    return st;
}

static void free_memory(struct moe_engine *e)
{
    for (unsigned i = 0; i < LANES; i++)
        moe_lane_free(&e->lanes[i]);
    moe_bell_destroy(e->bell);
    moe_batcher_destroy(e->batcher);
    free(e);
}

static struct moe_status start_thread(struct moe_engine *e)
{
    pthread_mutex_init(&e->lock, NULL);
    moe_wait_init(&e->idle);
    if (pthread_create(&e->thread, NULL, run_thread, e) == 0)
        return moe_ok();
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "cannot start a thread");
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
    struct moe_lane_shape shape = {.tokens = bucket};
    e->config = *config;
    e->weights_version = 1;
    e->next_drop = MOE_NEVER;
    if (config->training != NULL)
        moe_engine__plan_drop(e, false);
    MOE_TRY_GOTO(st, moe_bell_create(&e->bell), fail);
    MOE_TRY_GOTO(st, create_batcher(e, &shape), fail);
    for (unsigned i = 0; i < LANES; i++)
        MOE_TRY_GOTO(st, moe_lane_init(&e->lanes[i], config->backend, config->device, &shape),
                     fail);
    if (config->training != NULL)
        moe_train_set_poke(config->training, moe_engine__poke, e);
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
    pthread_mutex_lock(&e->lock);
    e->refusing = e->quit = true;
    moe_bell_ring(e->bell);
    pthread_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
    if (e->config.training != NULL)
        moe_train_end_jobs(e->config.training); /* nobody pokes any more */
    pthread_cond_destroy(&e->idle);
    pthread_mutex_destroy(&e->lock);
    free_memory(e);
}

struct moe_bell *moe_engine_bell(const struct moe_engine *e)
{
    return e->bell;
}

/* ---------------------------------------------------------------------- other threads */

/* Everything that is queued was lost to the sequencer with the last view. What waits for a step of
 * its own is announced one by one. */
static void announce_queued(struct moe_engine *e)
{
    struct moe_batch_key key;
    uint64_t tokens;
    for (size_t i = 0;; i++) {
        pthread_mutex_lock(&e->lock);
        bool more = moe_batcher_queue(e->batcher, i, &key, &tokens);
        pthread_mutex_unlock(&e->lock);
        if (!more)
            return;
        if (tokens > 0 && key.kind == MOE_STEP_FORWARD)
            e->config.announce(e->config.ctx, key.layer, key.kind, key.dtype, (uint32_t)tokens);
    }
}

void moe_engine_start_view(struct moe_engine *e, struct moe_session *session, uint64_t epoch,
                           uint32_t max_tokens_per_step)
{
    moe_engine_stop_view(e);
    pthread_mutex_lock(&e->lock);
    e->session = session;
    e->epoch = epoch;
    e->last_seq = 0;
    e->bucket_max = max_tokens_per_step < e->config.max_tokens_per_step
                        ? max_tokens_per_step
                        : e->config.max_tokens_per_step;
    give_up_all(e, moe_batcher_evict(e->batcher, match_other_epoch, epoch), stale_epoch(epoch));
    if (e->config.training != NULL)
        moe_engine__change_version(e, moe_train_weights_version(e->config.training), false);
    moe_engine__forget_numbers(e);
    moe_engine__forget_orders(e);
    pthread_mutex_unlock(&e->lock);
    announce_queued(e);
    pthread_mutex_lock(&e->lock);
    moe_engine__announce_orders(e);
    pthread_mutex_unlock(&e->lock);
}

void moe_engine_stop_view(struct moe_engine *e)
{
    pthread_mutex_lock(&e->lock);
    if (e->session != NULL) {
        e->stopping = true;
        e->config.backend->session_abort(e->session);
        moe_bell_ring(e->bell);
    }
    while (e->session != NULL)
        (void)moe_wait_until(&e->idle, &e->lock, MOE_NEVER);
    pthread_mutex_unlock(&e->lock);
}

/* Lock held. */
static struct moe_status admit(const struct moe_engine *e, const struct moe_work *w,
                               const struct moe_batch_key *key)
{
    if (e->refusing)
        return draining();
    if (!moe_batcher_has(e->batcher, key))
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND, "no MoE layer %u", w->layer);
    if (w->tokens == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH, "a request of no tokens");
    if (e->session != NULL && match_other_epoch(w, e->epoch))
        return stale_epoch(e->epoch);
    if (e->session != NULL && match_other_version(w, e->weights_version))
        return other_version(e->weights_version);
    if (moe_batcher_tokens(e->batcher) + w->tokens > e->config.max_queued_tokens)
        return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, QUEUE_FULL_RETRY_MS,
                               "too many tokens are waiting");
    return moe_ok();
}

/* Lock held. */
static void accept_work(struct moe_engine *e, struct moe_work *w, struct moe_batch_key *key)
{
    w->submitted_ns = moe_clock_ns();
    w->started_ns = w->copy_in_ns = w->copy_out_ns = 0;
    w->answered_epoch = w->answered_version = 0;
    w->step = (struct moe_step_result){.missing_slot = -1};
    w->step_tokens = w->steps = 0;
    w->saved_name = w->number = 0;
    w->saved_here = w->cancelled = false;
    w->failure = moe_ok();
    key->kind = moe_engine__queue_of(e, w);
    w->own_step = key->kind == MOE_STEP_SAVING_FORWARD;
    e->saving_count += w->own_step;
    e->unfinished++;
    if (w->deadline_ns < moe_batcher_next_expiry(e->batcher))
        moe_bell_ring(e->bell);
    moe_batcher_push(e->batcher, key, w);
}

struct moe_status moe_engine_submit(struct moe_engine *e, struct moe_work *w)
{
    struct moe_batch_key key = {w->layer, MOE_STEP_FORWARD, w->dtype};
    uint32_t tokens = w->tokens; /* `w` may be done, and gone, as soon as the lock is free */
    pthread_mutex_lock(&e->lock);
    struct moe_status st = admit(e, w, &key);
    bool tell = !moe_failed(&st) && e->session != NULL;
    if (!moe_failed(&st))
        accept_work(e, w, &key);
    if (tell && key.kind == MOE_STEP_SAVING_FORWARD)
        moe_engine__announce_orders(e);
    pthread_mutex_unlock(&e->lock);
    if (tell && key.kind == MOE_STEP_FORWARD)
        e->config.announce(e->config.ctx, key.layer, key.kind, key.dtype, tokens);
    return st;
}

void moe_engine_cancel(struct moe_engine *e, struct moe_work *w)
{
    pthread_mutex_lock(&e->lock);
    w->cancelled = true;
    if (moe_batcher_remove(e->batcher, w))
        give_up(e, w, moe_error(MOE_CANCELLED, MOE_REASON_NONE, "cancelled"));
    pthread_mutex_unlock(&e->lock);
}

void moe_engine_run(struct moe_engine *e, const struct moe_ticket *ticket)
{
    pthread_mutex_lock(&e->lock);
    if (e->session != NULL && !e->stopping && ticket->epoch == e->epoch) {
        if (e->ticket_count < TICKETS_MAX)
            e->tickets[(e->ticket_first + e->ticket_count++) % TICKETS_MAX] = *ticket;
        else /* the gap in seq fails the view */
            moe_log_warn("ticket %llu came while %d wait", (unsigned long long)ticket->seq,
                         TICKETS_MAX);
        moe_bell_ring(e->bell);
    }
    pthread_mutex_unlock(&e->lock);
}

bool moe_engine_drain(struct moe_engine *e, uint64_t deadline_ns)
{
    pthread_mutex_lock(&e->lock);
    e->refusing = true;
    bool in_time = true;
    while (e->unfinished > 0 && in_time)
        in_time = moe_wait_until(&e->idle, &e->lock, deadline_ns);
    bool drained = e->unfinished == 0;
    pthread_mutex_unlock(&e->lock);
    return drained;
}

void moe_engine_fail_queued(struct moe_engine *e, struct moe_status reason)
{
    pthread_mutex_lock(&e->lock);
    fail_queued(e, reason);
    pthread_mutex_unlock(&e->lock);
}

uint64_t moe_engine_weights_version(struct moe_engine *e)
{
    pthread_mutex_lock(&e->lock);
    uint64_t version = e->weights_version;
    pthread_mutex_unlock(&e->lock);
    return version;
}

void moe_engine_read_counters(struct moe_engine *e, struct moe_engine_counters *out)
{
    pthread_mutex_lock(&e->lock);
    *out = e->counters;
    out->queued_tokens = moe_batcher_tokens(e->batcher);
    pthread_mutex_unlock(&e->lock);
}
