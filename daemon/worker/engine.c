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
#include "worker/batcher.h"
#include "worker/lane.h"

#include <pthread.h>
#include <stdlib.h>

enum {
    LANES = 2,        /* steps in flight */
    TICKETS_MAX = 64, /* tickets that wait; the sequencer keeps far fewer unfinished */
    /* While one step runs, its end and the next ticket are waited for in turns of this length. It
     * delays nothing but the start of a copy that overlaps the running step. */
    TURN_NS = 200000,
    QUEUE_FULL_RETRY_MS = 20,
    DRAINING_RETRY_MS = 100,
};

/* Requests linked by `next`. */
struct work_list {
    struct moe_work *head, *tail;
};

struct moe_engine {
    struct moe_engine_config config;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake; /* there may be something to do for the thread */
    pthread_cond_t idle; /* the view has ended, or the last request has */

    /* Under the lock. */
    struct moe_batcher *batcher;
    struct work_list ended;      /* left the queues and all steps; `done` is to be called */
    uint64_t unfinished;         /* requests accepted and not yet done */
    struct moe_session *session; /* NULL: no view is in force */
    uint64_t epoch;              /* of the view */
    uint64_t last_seq;           /* of the ticket begun last under this view; 0 = none */
    uint32_t bucket_max;         /* of the view */
    bool stopping;               /* stop_view waits for the thread to let go of the session */
    bool refusing, quit;
    struct moe_ticket tickets[TICKETS_MAX]; /* a ring */
    size_t ticket_first, ticket_count;
    struct moe_engine_counters counters;

    /* The engine's thread only. */
    struct moe_lane lanes[LANES];
    unsigned lane_first, in_flight; /* oldest step, number of steps */
};

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
    pthread_cond_signal(&e->wake);
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
    e->ended = (struct work_list){0};
    uint64_t count = 0, failed = 0;
    pthread_mutex_unlock(&e->lock);
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
    if (!moe_batcher_has(e->batcher, &key))
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu: no such layer, kind or dtype",
                         (unsigned long long)t->seq);
    if (t->bucket == 0 || (t->bucket & (t->bucket - 1)) != 0 || t->bucket > e->bucket_max)
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
    struct moe_work *late = moe_batcher_expire(e->batcher, moe_clock_ns());
    if (late != NULL)
        give_up_all(e, late,
                    moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                              "the deadline passed before the request was finished"));
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
    lane->failure = check_ticket(e, &lane->ticket);
    e->in_flight++;
    if (moe_failed(&lane->failure))
        return lane;
    e->last_seq = lane->ticket.seq;
    struct moe_batch_key key = key_of(&lane->ticket);
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
    struct moe_step_args args;
    struct moe_layer *layer;
    const struct moe_layer_spec *spec = find_spec(e, lane->ticket.layer, &layer);
    moe_lane_gather(lane, spec, &args);
    args.layer = layer;
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
    w->step_tokens = lane->tokens;
    w->steps++;
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
 * sequencer can order the next step while they are. */
static void complete_oldest(struct moe_engine *e, const struct moe_step_result *result)
{
    struct moe_lane *lane = &e->lanes[e->lane_first];
    struct moe_layer *layer;
    pthread_mutex_unlock(&e->lock);
    e->config.finished(e->config.ctx, &lane->ticket, moe_ok(), 0);
    moe_lane_scatter(lane, find_spec(e, lane->ticket.layer, &layer));
    pthread_mutex_lock(&e->lock);
    finish_segments(e, lane, result);
    retire_lane(e);
}

/* ------------------------------------------------------------------- end of a view */

/* Lock held. The thread lets go of the session. */
static void end_view(struct moe_engine *e)
{
    e->session = NULL;
    e->stopping = false;
    e->ticket_count = 0;
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
    e->in_flight = 0;
    bool called_off = e->stopping;
    end_view(e);
    pthread_mutex_unlock(&e->lock);
    if (!called_off)
        for (unsigned i = 0; i < count; i++)
            e->config.finished(e->config.ctx, &failed[i], why, lost);
    pthread_mutex_lock(&e->lock);
}

/* Thread, lock held and given up meanwhile. */
static void wait_for_oldest(struct moe_engine *e)
{
    struct moe_lane *lane = &e->lanes[e->lane_first];
    uint64_t until = e->in_flight < LANES ? moe_clock_ns() + TURN_NS : MOE_NEVER;
    struct moe_step_result result = {.missing_slot = -1};
    struct moe_status st = lane->failure;
    if (lane->step != NULL) {
        pthread_mutex_unlock(&e->lock);
        st = e->config.backend->step_wait(lane->step, until, &result);
        pthread_mutex_lock(&e->lock);
        if (st.code == MOE_DEADLINE_EXCEEDED)
            return;
        lane->step = NULL;
    }
    if (moe_failed(&st))
        fail_view(e, st, result.missing_slot);
    else
        complete_oldest(e, &result);
}

/* ---------------------------------------------------------------------- the thread */

static void *run_thread(void *arg)
{
    struct moe_engine *e = arg;
    pthread_mutex_lock(&e->lock);
    for (;;) {
        expire(e);
        if (e->quit)
            give_up_all(e, moe_batcher_evict(e->batcher, match_all, 0), draining());
        if (e->ended.head != NULL)
            report_ended(e);
        else if (e->ticket_count > 0 && e->in_flight < LANES && !e->stopping)
            begin_step(e);
        else if (e->in_flight > 0)
            wait_for_oldest(e);
        else if (e->stopping)
            end_view(e);
        else if (e->quit)
            break;
        else
            (void)moe_wait_until(&e->wake, &e->lock, moe_batcher_next_expiry(e->batcher));
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
    moe_batcher_destroy(e->batcher);
    free(e);
}

static struct moe_status start_thread(struct moe_engine *e)
{
    pthread_mutex_init(&e->lock, NULL);
    moe_wait_init(&e->wake);
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
    MOE_TRY_GOTO(st, create_batcher(e, &shape), fail);
    for (unsigned i = 0; i < LANES; i++)
        MOE_TRY_GOTO(st, moe_lane_init(&e->lanes[i], config->backend, config->device, &shape),
                     fail);
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
    pthread_cond_signal(&e->wake);
    pthread_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
    pthread_cond_destroy(&e->idle);
    pthread_cond_destroy(&e->wake);
    pthread_mutex_destroy(&e->lock);
    free_memory(e);
}

/* ---------------------------------------------------------------------- other threads */

/* Everything that is queued was lost to the sequencer with the last view. */
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
        if (tokens > 0)
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
    pthread_mutex_unlock(&e->lock);
    announce_queued(e);
}

void moe_engine_stop_view(struct moe_engine *e)
{
    pthread_mutex_lock(&e->lock);
    if (e->session != NULL) {
        e->stopping = true;
        e->config.backend->session_abort(e->session);
        pthread_cond_signal(&e->wake);
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
    if (moe_batcher_tokens(e->batcher) + w->tokens > e->config.max_queued_tokens)
        return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, QUEUE_FULL_RETRY_MS,
                               "too many tokens are waiting");
    return moe_ok();
}

/* Lock held. */
static void accept_work(struct moe_engine *e, struct moe_work *w, const struct moe_batch_key *key)
{
    w->submitted_ns = moe_clock_ns();
    w->started_ns = w->copy_in_ns = w->copy_out_ns = 0;
    w->answered_epoch = 0;
    w->step = (struct moe_step_result){.missing_slot = -1};
    w->step_tokens = w->steps = 0;
    w->cancelled = false;
    w->failure = moe_ok();
    e->unfinished++;
    if (w->deadline_ns < moe_batcher_next_expiry(e->batcher))
        pthread_cond_signal(&e->wake);
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
    pthread_mutex_unlock(&e->lock);
    if (tell)
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
        pthread_cond_signal(&e->wake);
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
    give_up_all(e, moe_batcher_evict(e->batcher, match_all, 0), reason);
    pthread_mutex_unlock(&e->lock);
}

void moe_engine_read_counters(struct moe_engine *e, struct moe_engine_counters *out)
{
    pthread_mutex_lock(&e->lock);
    *out = e->counters;
    out->queued_tokens = moe_batcher_tokens(e->batcher);
    pthread_mutex_unlock(&e->lock);
}
