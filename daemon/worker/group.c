/* One thread owns the state of the session and never blocks; everything that happens reaches it as
 * an event in a queue: messages of the coordinator, ends of jobs, evidence of peers, the wish to
 * leave. What blocks (loading, joining) is done by the jobs thread. The one idea worth knowing:
 * `forming` and `epoch` are the only truth about views, and whatever ends a view zeroes them first
 * and then posts `leave` behind the jobs that may still be working on it. */
#include "worker/group.h"

#include "base/clock.h"
#include "base/log.h"
#include "moe/v1/coordinator.pb-c.h"
#include "worker/control.h"
#include "worker/gather.h"
#include "worker/jobs.h"
#include "worker/report.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    EVENTS_MAX = 1024,           /* of the coordinator, not yet handled; more end the stream */
    MESSAGE_BYTES_MAX = 8 << 20, /* an assignment of 256 layers of 512 experts is well below */
    BACKOFF_MIN_MS = 100,
    BACKOFF_MAX_MS = 2000,
    DRAIN_ANSWER_MS = 1000, /* wait for the answer to DrainNotice before draining anyway */
    DRAIN_POLL_MS = 5,
    LINGER_MS = 2000, /* a drained worker stays this long for others when nobody can
                         tell it that they are done */
    REASON_BYTES = 160,
};

static const char session_path[] = "/moe.v1.CoordinatorService/Session";

enum event_kind {
    EVENT_MESSAGE, /* bytes */
    EVENT_CLOSED,  /* status */
    EVENT_LOADED,  /* number: placement version; status */
    EVENT_FORMED,  /* number: epoch; status */
    EVENT_SERVED,  /* number: epoch; status */
    EVENT_LEFT,    /* the last job is done */
    EVENT_LOST,    /* number: epoch; slots; status */
    EVENT_DRAIN,   /* status.text: reason */
};

struct event {
    struct event *next;
    enum event_kind kind;
    uint64_t number, slots;
    struct moe_status status;
    uint32_t generation; /* of the stream that a message or end belongs to */
    size_t length;
    uint8_t bytes[];
};

enum parting {
    STAYING,
    ASKED,    /* DrainNotice sent; drains at the answer, or at parting_ns */
    DRAINING, /* polls `drained`; gives up at drain_limit_ns */
    DRAINED,  /* Leaving sent; goes on taking part until the coordinator ends the stream */
    GOING,    /* the last `leave` is under way */
    GONE,
};

struct moe_group {
    struct moe_group_config config;
    pthread_t thread;
    struct moe_jobs *jobs;
    struct moe_gather *gather;
    struct moe_rpc_channel *channel;

    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct event *first, **end;
    size_t event_count;
    bool quit;
    struct moe_rpc_stream *stream; /* also read by the jobs thread, to send blobs */
    uint32_t generation;           /* of the stream */

    /* Everything below: group's thread only. */
    bool registered; /* on the present stream */
    bool seated;     /* ever */
    uint32_t slot, slots, lease_ms;
    uint64_t floor;   /* no epoch below this is accepted; only rises */
    uint64_t forming; /* epoch that a job is joining, or that awaits COMMIT; 0 = none */
    bool committed;   /* COMMIT of `forming` has come, `serve` is under way */
    uint64_t epoch;   /* in force here; 0 = none */
    uint64_t heartbeat_ns, reconnect_ns, give_up_ns; /* when due; MOE_NEVER = not */
    uint32_t backoff_ms;
    bool away_said; /* the log knows that the coordinator is not there */
    enum parting parting;
    uint64_t parting_ns, drain_limit_ns;
    struct moe_status outcome;
};

/* ----------------------------------------------------------------------- events */

/* With the lock held. */
static void append_event(struct moe_group *g, struct event *e)
{
    *g->end = e;
    g->end = &e->next;
    g->event_count++;
    pthread_cond_signal(&g->wake);
}

static struct event *new_event(enum event_kind kind, size_t length)
{
    struct event *e = calloc(1, sizeof *e + length);
    if (e == NULL) {
        moe_log_error("group: no memory for an event");
        return NULL;
    }
    e->kind = kind;
    e->length = length;
    return e;
}

static void post_event(struct moe_group *g, enum event_kind kind, uint64_t number, uint64_t slots,
                       struct moe_status status)
{
    struct event *e = new_event(kind, 0);
    if (e == NULL)
        return;
    e->number = number;
    e->slots = slots;
    e->status = status;
    pthread_mutex_lock(&g->lock);
    append_event(g, e);
    pthread_mutex_unlock(&g->lock);
}

static void to_timespec(uint64_t ns, struct timespec *out)
{
    out->tv_sec = (time_t)(ns / MOE_NS_PER_S);
    out->tv_nsec = (long)(ns % MOE_NS_PER_S);
}

/* The next event, or NULL at `deadline_ns` or when told to quit. */
static struct event *wait_for_event(struct moe_group *g, uint64_t deadline_ns, bool *quit)
{
    struct timespec until;
    to_timespec(deadline_ns, &until);
    pthread_mutex_lock(&g->lock);
    while (g->first == NULL && !g->quit) {
        if (deadline_ns == MOE_NEVER)
            pthread_cond_wait(&g->wake, &g->lock);
        else if (pthread_cond_timedwait(&g->wake, &g->lock, &until) != 0)
            break;
    }
    *quit = g->quit;
    struct event *e = g->first;
    if (e != NULL) {
        g->first = e->next;
        g->event_count--;
        if (g->first == NULL)
            g->end = &g->first;
    }
    pthread_mutex_unlock(&g->lock);
    return e;
}

/* -------------------------------------------------------- stream: the rpc client's thread
 *
 * `ctx` is the group: the generation tells a late event of an old stream apart. */

static void stream_message(void *ctx, struct moe_rpc_msg *m)
{
    struct moe_group *g = ctx;
    size_t length = moe_rpc_msg_length(m);
    struct event *e = length <= MESSAGE_BYTES_MAX ? new_event(EVENT_MESSAGE, length) : NULL;
    struct moe_status st =
        moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_TOO_LARGE, "a message of %zu bytes", length);
    if (e != NULL)
        st = moe_rpc_msg_flatten(m, e->bytes, length, &e->length);
    moe_rpc_msg_free(m);
    pthread_mutex_lock(&g->lock);
    if (!moe_failed(&st) && g->event_count < EVENTS_MAX) {
        e->generation = g->generation;
        append_event(g, e);
        e = NULL;
    } else if (g->stream != NULL) {
        moe_rpc_stream_cancel(g->stream);
    }
    pthread_mutex_unlock(&g->lock);
    free(e);
}

static void stream_closed(void *ctx, struct moe_status status)
{
    struct moe_group *g = ctx;
    struct event *e = new_event(EVENT_CLOSED, 0);
    if (e == NULL)
        return;
    e->status = status;
    pthread_mutex_lock(&g->lock);
    e->generation = g->generation;
    append_event(g, e);
    pthread_mutex_unlock(&g->lock);
}

static void send_heartbeat(struct moe_group *g)
{
    struct moe_group_numbers numbers = {0};
    g->config.hooks.numbers(g->config.hooks.ctx, &numbers);
    moe_report_heartbeat(g->stream, g->epoch, &numbers);
    /* Two may be lost before the lease runs out. */
    g->heartbeat_ns = moe_clock_ns() + g->lease_ms * MOE_NS_PER_MS / 3;
}

/* ------------------------------------------------------------------------- jobs */

/* moe_gather_send_fn; jobs thread. */
static struct moe_status send_blob(void *ctx, uint64_t epoch, uint32_t round, const void *data,
                                   size_t length)
{
    struct moe_group *g = ctx;
    pthread_mutex_lock(&g->lock);
    struct moe_status st =
        g->stream != NULL
            ? moe_report_blob(g->stream, epoch, round, data, length)
            : moe_error(MOE_UNAVAILABLE, MOE_REASON_NONE, "the coordinator is not connected");
    pthread_mutex_unlock(&g->lock);
    return st;
}

struct load_job {
    uint32_t slot, slots;
    Moe__V1__SessionResponse *response; /* holds the assignment */
};

static void run_load(void *ctx, void *argument)
{
    struct moe_group *g = ctx;
    struct load_job *job = argument;
    const Moe__V1__Assign *a = job->response->assign;
    struct moe_group_layer *layers = calloc(a->n_layers + 1, sizeof *layers);
    struct moe_status st;
    if (layers == NULL) {
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                       "no memory for an assignment");
    } else {
        for (size_t i = 0; i < a->n_layers; i++)
            layers[i] = (struct moe_group_layer){
                .layer = a->layers[i]->layer,
                .copies = a->layers[i]->copies,
                .experts = a->layers[i]->n_copies,
                .slots = a->layers[i]->slots,
                .slot_count = a->layers[i]->n_slots,
            };
        const struct moe_group_assignment assignment = {
            job->slot, job->slots, a->placement_version, layers, a->n_layers,
        };
        st = g->config.hooks.load(g->config.hooks.ctx, &assignment);
    }
    post_event(g, EVENT_LOADED, a->placement_version, 0, st);
    free(layers);
    moe__v1__session_response__free_unpacked(job->response, NULL);
    free(job);
}

static struct moe_status allgather(void *ctx, const void *mine, void *all, size_t bytes)
{
    struct moe_group *g = ctx;
    uint64_t deadline_ns = moe_clock_ns() + g->config.gather_ms * MOE_NS_PER_MS;
    return moe_gather_exchange(g->gather, mine, all, bytes, deadline_ns);
}

struct form_job {
    struct moe_group_view view;         /* points into the response */
    Moe__V1__SessionResponse *response; /* holds the members' texts */
};

static void run_form(void *ctx, void *argument)
{
    struct moe_group *g = ctx;
    struct form_job *job = argument;
    moe_gather_begin(g->gather, job->view.epoch, job->view.slots, job->view.live);
    struct moe_status st = g->config.hooks.form(g->config.hooks.ctx, &job->view, allgather, g);
    post_event(g, EVENT_FORMED, job->view.epoch, 0, st);
    moe__v1__session_response__free_unpacked(job->response, NULL);
    free(job);
}

static void run_serve(void *ctx, void *argument)
{
    struct moe_group *g = ctx;
    uint64_t *epoch = argument;
    struct moe_status st = g->config.hooks.serve(g->config.hooks.ctx);
    post_event(g, EVENT_SERVED, *epoch, 0, st);
    free(epoch);
}

static void run_leave(void *ctx, void *argument)
{
    struct moe_group *g = ctx;
    (void)argument;
    g->config.hooks.leave(g->config.hooks.ctx);
}

static void run_last_leave(void *ctx, void *argument)
{
    run_leave(ctx, argument);
    post_event(ctx, EVENT_LEFT, 0, 0, moe_ok());
}

/* ------------------------------------------------------------------ ends of a view */

static void post_leave(struct moe_group *g, moe_job_fn leave)
{
    struct moe_status st = moe_jobs_post(g->jobs, leave, g, NULL);
    if (moe_failed(&st))
        moe_log_error("group: %s", st.text);
}

/* The view that forms or is in force, if any, is over here. */
static void end_view(struct moe_group *g, const char *why)
{
    if (g->forming == 0 && g->epoch == 0)
        return;
    uint64_t epoch = g->forming != 0 ? g->forming : g->epoch;
    moe_log_write(g->parting == STAYING ? MOE_LOG_WARN : MOE_LOG_INFO, "epoch %llu is over: %s",
                  (unsigned long long)epoch, why);
    if (g->epoch != 0 || g->committed)
        g->give_up_ns = moe_clock_ns() + g->config.reform_ms * MOE_NS_PER_MS;
    if (g->parting != STAYING)
        g->give_up_ns = moe_clock_ns(); /* no further view will have this worker */
    g->forming = g->epoch = 0;
    g->committed = false;
    moe_gather_abort(g->gather, epoch);
    post_leave(g, run_leave);
}

static void on_lost(struct moe_group *g, const struct event *e)
{
    bool current =
        e->number != 0 && (e->number == g->epoch || (g->committed && e->number == g->forming));
    if (!current)
        return;
    moe_report_peer_lost(g->stream, e->number, e->slots);
    end_view(g, e->status.text);
}

/* -------------------------------------------------------------------------- leaving */

static void go(struct moe_group *g, struct moe_status outcome)
{
    if (g->parting >= GOING)
        return;
    g->parting = GOING;
    g->outcome = outcome;
    g->config.hooks.cancel_load(g->config.hooks.ctx);
    end_view(g, moe_failed(&outcome) ? outcome.text : "this worker has left");
    post_leave(g, run_last_leave);
}

static void begin_drain(struct moe_group *g, uint32_t limit_ms, const char *reason)
{
    if (g->parting >= DRAINING)
        return;
    g->parting = DRAINING;
    uint64_t now = moe_clock_ns();
    g->drain_limit_ns = now + (limit_ms != 0 ? limit_ms : g->config.drain_ms) * MOE_NS_PER_MS;
    g->parting_ns = now;
    moe_log_info("draining: %s", reason);
    g->config.hooks.drain(g->config.hooks.ctx);
    if (g->epoch == 0 && !g->committed)
        g->give_up_ns = now;
}

/* DRAINING and DRAINED, at parting_ns. */
static void continue_drain(struct moe_group *g)
{
    uint64_t now = moe_clock_ns();
    if (g->parting == DRAINING && g->config.hooks.drained(g->config.hooks.ctx)) {
        g->parting = DRAINED;
        moe_log_info("drained");
        moe_report_leaving(g->stream, "drained");
        if (!g->registered && g->drain_limit_ns > now + LINGER_MS * MOE_NS_PER_MS)
            g->drain_limit_ns = now + LINGER_MS * MOE_NS_PER_MS;
    }
    if (now >= g->drain_limit_ns)
        go(g, g->parting == DRAINED
                  ? moe_ok()
                  : moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_DRAINING,
                              "the drain's time is up; requests that were left are cancelled"));
    else
        g->parting_ns =
            g->parting == DRAINED ? g->drain_limit_ns : now + DRAIN_POLL_MS * MOE_NS_PER_MS;
}

static void on_drain_wish(struct moe_group *g, const char *reason)
{
    if (g->parting != STAYING)
        return;
    if (!g->registered) {
        begin_drain(g, 0, reason);
        return;
    }
    g->parting = ASKED;
    g->parting_ns = moe_clock_ns() + DRAIN_ANSWER_MS * MOE_NS_PER_MS;
    moe_report_drain_notice(g->stream, reason);
}

static void on_parting_timer(struct moe_group *g)
{
    if (g->parting == ASKED)
        begin_drain(g, 0, "the coordinator does not answer");
    else
        continue_drain(g);
}

/* -------------------------------------------------------- messages of the coordinator */

static void on_registered(struct moe_group *g, const Moe__V1__Registered *r)
{
    if (r->slots == 0 || r->slots > MOE_MAX_SLOTS || r->slot >= r->slots || r->lease_ms == 0) {
        moe_log_error("coordinator: seat %u of %u makes no sense", r->slot, r->slots);
        moe_rpc_stream_cancel(g->stream);
        return;
    }
    if (g->seated && (r->slot != g->slot || r->slots != g->slots))
        end_view(g, "this worker has another seat now");
    g->registered = g->seated = true;
    g->slot = r->slot;
    g->slots = r->slots;
    g->lease_ms = r->lease_ms;
    g->backoff_ms = BACKOFF_MIN_MS;
    g->away_said = false;
    if (r->epoch > g->floor)
        g->floor = r->epoch;
    g->config.hooks.seated(g->config.hooks.ctx, r->slot, r->slots);
    moe_log_info("registered: slot %u of %u, lease %u ms", r->slot, r->slots, r->lease_ms);
    send_heartbeat(g);
    if (g->parting == DRAINING)
        moe_report_drain_notice(g->stream, "draining since before the coordinator came back");
    else if (g->parting == DRAINED)
        moe_report_leaving(g->stream, "drained");
}

/* Takes `response` over. */
static void on_assign(struct moe_group *g, Moe__V1__SessionResponse *response)
{
    struct load_job *job = calloc(1, sizeof *job);
    struct moe_status st =
        moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for an assignment");
    uint32_t version = response->assign->placement_version;
    if (job != NULL) {
        *job = (struct load_job){g->slot, g->slots, response};
        st = moe_jobs_post(g->jobs, run_load, g, job);
    }
    if (!moe_failed(&st))
        return;
    free(job);
    moe__v1__session_response__free_unpacked(response, NULL);
    moe_report_loaded(g->stream, version, &st);
}

static struct moe_status read_view(const struct moe_group *g, const Moe__V1__Prepare *p,
                                   struct moe_group_view *view)
{
    if (p->epoch < g->floor)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STALE_EPOCH,
                         "this worker accepts no epoch below %llu", (unsigned long long)g->floor);
    uint32_t bucket = p->max_tokens_per_step;
    bool sound = p->slots == g->slots && bucket != 0 && (bucket & (bucket - 1)) == 0 &&
                 bucket <= g->config.identity.max_tokens_per_step;
    *view = (struct moe_group_view){
        .epoch = p->epoch,
        .slot = g->slot,
        .slots = p->slots,
        .placement_version = p->placement_version,
        .placement_hash = p->placement_hash,
        .max_tokens_per_step = bucket,
    };
    for (size_t i = 0; sound && i < p->n_members; i++) {
        const Moe__V1__Member *m = p->members[i];
        sound = m->slot < p->slots && (view->live >> m->slot & 1) == 0;
        if (!sound)
            break;
        view->live |= UINT64_C(1) << m->slot;
        view->members[m->slot] =
            (struct moe_group_member){m->worker_id, m->endpoint, m->incarnation};
    }
    if (!sound || (view->live >> g->slot & 1) == 0 ||
        view->members[g->slot].incarnation != g->config.identity.incarnation)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                         "PREPARE of epoch %llu does not fit this worker",
                         (unsigned long long)p->epoch);
    return moe_ok();
}

/* Takes `response` over. */
static void on_prepare(struct moe_group *g, Moe__V1__SessionResponse *response)
{
    uint64_t epoch = response->prepare->epoch;
    struct form_job *job = calloc(1, sizeof *job);
    struct moe_status st =
        moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a view");
    if (job == NULL)
        goto refuse;
    job->response = response;
    MOE_TRY_GOTO(st, read_view(g, response->prepare, &job->view), refuse);
    end_view(g, "a new epoch is prepared");
    MOE_TRY_GOTO(st, moe_jobs_post(g->jobs, run_form, g, job), refuse);
    g->forming = epoch;
    g->floor = epoch + 1;
    return;
refuse:
    free(job);
    moe__v1__session_response__free_unpacked(response, NULL);
    moe_report_ready(g->stream, epoch, &st);
}

static void on_blobs(struct moe_group *g, const Moe__V1__Blobs *b)
{
    for (size_t i = 0; i < b->n_blobs; i++)
        moe_gather_deliver(g->gather, b->epoch, b->round, b->blobs[i]->slot, b->blobs[i]->data.data,
                           b->blobs[i]->data.len);
}

static void on_commit(struct moe_group *g, uint64_t epoch)
{
    if (epoch != g->forming || g->committed)
        return;
    struct moe_status st =
        moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a view");
    uint64_t *argument = malloc(sizeof *argument);
    g->committed = true;
    if (argument != NULL) {
        *argument = epoch;
        st = moe_jobs_post(g->jobs, run_serve, g, argument);
    }
    if (!moe_failed(&st))
        return;
    free(argument);
    post_event(g, EVENT_LOST, epoch, 0, st);
}

static void on_abort(struct moe_group *g, const Moe__V1__Abort *a)
{
    if (a->epoch != 0 && (a->epoch == g->forming || a->epoch == g->epoch))
        end_view(g, a->reason);
}

/* Takes `r` over. */
static void dispatch_message(struct moe_group *g, Moe__V1__SessionResponse *r)
{
    if (r->body_case == MOE__V1__SESSION_RESPONSE__BODY_REGISTERED) {
        on_registered(g, r->registered);
    } else if (!g->registered) {
        moe_log_error("coordinator: spoke before it answered Register");
        moe_rpc_stream_cancel(g->stream);
    } else {
        switch (r->body_case) {
        case MOE__V1__SESSION_RESPONSE__BODY_ASSIGN: on_assign(g, r); return;
        case MOE__V1__SESSION_RESPONSE__BODY_PREPARE: on_prepare(g, r); return;
        case MOE__V1__SESSION_RESPONSE__BODY_BLOBS: on_blobs(g, r->blobs); break;
        case MOE__V1__SESSION_RESPONSE__BODY_COMMIT: on_commit(g, r->commit->epoch); break;
        case MOE__V1__SESSION_RESPONSE__BODY_ABORT: on_abort(g, r->abort); break;
        case MOE__V1__SESSION_RESPONSE__BODY_DRAIN:
            begin_drain(g, r->drain->limit_ms, r->drain->reason);
            break;
        default: moe_log_warn("coordinator: a message of an unknown kind"); break;
        }
    }
    moe__v1__session_response__free_unpacked(r, NULL);
}

static void on_message(struct moe_group *g, const struct event *e)
{
    Moe__V1__SessionResponse *r = moe__v1__session_response__unpack(NULL, e->length, e->bytes);
    if (r == NULL) {
        moe_log_error("coordinator: not a SessionResponse");
        moe_rpc_stream_cancel(g->stream);
        return;
    }
    dispatch_message(g, r);
}

/* --------------------------------------------------------------------- connection */

static struct moe_rpc_stream *take_stream(struct moe_group *g)
{
    pthread_mutex_lock(&g->lock);
    struct moe_rpc_stream *stream = g->stream;
    g->stream = NULL;
    g->generation++;
    pthread_mutex_unlock(&g->lock);
    g->registered = false;
    g->heartbeat_ns = MOE_NEVER;
    return stream;
}

static void plan_reconnect(struct moe_group *g)
{
    g->reconnect_ns = moe_clock_ns() + g->backoff_ms * MOE_NS_PER_MS;
    g->backoff_ms = g->backoff_ms * 2 < BACKOFF_MAX_MS ? g->backoff_ms * 2 : BACKOFF_MAX_MS;
}

static void connect_stream(struct moe_group *g)
{
    g->reconnect_ns = MOE_NEVER;
    pthread_mutex_lock(&g->lock);
    g->generation++; /* what the last stream said after it was taken is of neither */
    pthread_mutex_unlock(&g->lock);
    const struct moe_rpc_call_options options = {.deadline_ns = MOE_NEVER};
    const struct moe_rpc_stream_events events = {stream_message, stream_closed};
    struct moe_rpc_stream *stream = NULL;
    struct moe_status st =
        moe_rpc_stream_open(g->channel, session_path, &options, &events, g, &stream);
    if (moe_failed(&st)) {
        moe_log_warn("coordinator: %s", st.text);
        plan_reconnect(g);
        return;
    }
    pthread_mutex_lock(&g->lock);
    g->stream = stream;
    pthread_mutex_unlock(&g->lock);
    moe_report_register(g->stream, &g->config.identity,
                        g->seated ? g->slot + 1 : g->config.identity.wanted_slot_plus_one);
}

/* The coordinator refuses this process for good. */
static bool is_final(const struct moe_status *st)
{
    switch (st->code) {
    case MOE_INVALID_ARGUMENT:
    case MOE_FAILED_PRECONDITION:
    case MOE_ALREADY_EXISTS:
    case MOE_PERMISSION_DENIED:
    case MOE_UNAUTHENTICATED:
    case MOE_UNIMPLEMENTED: return true;
    default: return st->reason == MOE_REASON_STALE_EPOCH; /* a newer process has the seat */
    }
}

static void on_closed(struct moe_group *g, const struct event *e)
{
    bool was_registered = g->registered;
    moe_rpc_stream_free(take_stream(g));
    if (g->parting == DRAINED && was_registered) {
        go(g, moe_ok());
        return;
    }
    if (is_final(&e->status)) {
        go(g, moe_error_context(e->status, "refused by the coordinator"));
        return;
    }
    if (g->forming != 0 && !g->committed)
        end_view(g, "the coordinator went away");
    if (g->parting == ASKED)
        begin_drain(g, 0, "the coordinator went away");
    if (was_registered || !g->away_said)
        moe_log_warn("coordinator: %s; trying again",
                     moe_failed(&e->status) ? e->status.text : "ended the session");
    g->away_said = true;
    plan_reconnect(g);
}

/* ---------------------------------------------------------------------- the thread */

static void on_loaded(struct moe_group *g, const struct event *e)
{
    if (moe_failed(&e->status))
        moe_log_error("cannot load: %s", e->status.text);
    moe_report_loaded(g->stream, (uint32_t)e->number, &e->status);
}

static void on_formed(struct moe_group *g, const struct event *e)
{
    if (e->number != g->forming)
        return;
    if (moe_failed(&e->status)) {
        moe_log_warn("epoch %llu does not form: %s", (unsigned long long)e->number, e->status.text);
        g->forming = 0;
    }
    moe_report_ready(g->stream, e->number, &e->status);
}

static void on_served(struct moe_group *g, const struct event *e)
{
    if (e->number != g->forming)
        return;
    if (moe_failed(&e->status)) {
        on_lost(g, e);
        return;
    }
    g->epoch = e->number;
    g->forming = 0;
    g->committed = false;
    g->give_up_ns = MOE_NEVER;
    moe_log_info("serving under epoch %llu", (unsigned long long)g->epoch);
    send_heartbeat(g);
}

static void handle_event(struct moe_group *g, const struct event *e)
{
    bool of_stream = e->kind == EVENT_MESSAGE || e->kind == EVENT_CLOSED;
    if (of_stream && e->generation != g->generation)
        return;
    switch (e->kind) {
    case EVENT_MESSAGE: on_message(g, e); break;
    case EVENT_CLOSED: on_closed(g, e); break;
    case EVENT_LOADED: on_loaded(g, e); break;
    case EVENT_FORMED: on_formed(g, e); break;
    case EVENT_SERVED: on_served(g, e); break;
    case EVENT_LOST: on_lost(g, e); break;
    case EVENT_DRAIN: on_drain_wish(g, e->status.text); break;
    case EVENT_LEFT:
        g->parting = GONE;
        g->config.hooks.ended(g->config.hooks.ctx, g->outcome);
        break;
    }
}

static void give_up(struct moe_group *g)
{
    g->config.hooks.give_up(g->config.hooks.ctx,
                            moe_error(MOE_UNAVAILABLE, MOE_REASON_REFORMING,
                                      "the group has lost a worker and has not formed again"));
    /* Again, for what was accepted as the view ended. */
    g->give_up_ns = moe_clock_ns() + g->config.reform_ms * MOE_NS_PER_MS;
}

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static bool is_waiting_to_part(const struct moe_group *g)
{
    return g->parting == ASKED || g->parting == DRAINING || g->parting == DRAINED;
}

static uint64_t next_deadline(const struct moe_group *g)
{
    if (g->parting >= GOING)
        return MOE_NEVER;
    uint64_t at = earlier(earlier(g->heartbeat_ns, g->reconnect_ns), g->give_up_ns);
    return is_waiting_to_part(g) ? earlier(at, g->parting_ns) : at;
}

static void run_timers(struct moe_group *g)
{
    if (g->parting >= GOING)
        return;
    uint64_t now = moe_clock_ns();
    if (now >= g->heartbeat_ns)
        send_heartbeat(g);
    if (now >= g->reconnect_ns)
        connect_stream(g);
    if (now >= g->give_up_ns)
        give_up(g);
    if (is_waiting_to_part(g) && now >= g->parting_ns)
        on_parting_timer(g);
}

static void *thread_main(void *arg)
{
    struct moe_group *g = arg;
    bool quit = false;
    while (!quit) {
        struct event *e = wait_for_event(g, next_deadline(g), &quit);
        if (e != NULL && !quit)
            handle_event(g, e);
        free(e);
        run_timers(g);
    }
    return NULL;
}

/* ---------------------------------------------------------------- start and destroy */

static void free_group(struct moe_group *g)
{
    struct event *next;
    for (struct event *e = g->first; e != NULL; e = next) {
        next = e->next;
        free(e);
    }
    moe_gather_destroy(g->gather);
    moe_rpc_channel_close(g->channel);
    pthread_cond_destroy(&g->wake);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

static void init_lock(struct moe_group *g)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&g->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&g->lock, NULL);
}

struct moe_status moe_group_start(const struct moe_group_config *config, struct moe_group **out)
{
    if (config->identity.layer_count > MOE_MAX_LAYERS)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "a model may have %d MoE layers", MOE_MAX_LAYERS);
    struct moe_group *g = calloc(1, sizeof *g);
    if (g == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the group");
    g->config = *config;
    g->end = &g->first;
    g->backoff_ms = BACKOFF_MIN_MS;
    g->heartbeat_ns = g->give_up_ns = MOE_NEVER;
    g->reconnect_ns = 0;
    init_lock(g);
    const struct moe_rpc_channel_config channel = {
        .target = config->coordinator,
        .max_message_bytes = MESSAGE_BYTES_MAX,
        .own_connection = true,
    };
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_gather_create(send_blob, g, &g->gather), fail);
    MOE_TRY_GOTO(st, moe_rpc_channel_open(config->client, &channel, &g->channel), fail);
    MOE_TRY_GOTO(st, moe_jobs_create(&g->jobs), fail);
    *out = g; /* hooks may need it as soon as the thread runs */
    if (pthread_create(&g->thread, NULL, thread_main, g) != 0) {
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_NONE, "cannot start a thread");
        goto fail;
    }
    return st;
fail:
    *out = NULL;
    moe_jobs_destroy(g->jobs);
    free_group(g);
    return st;
}

void moe_group_destroy(struct moe_group *g)
{
    if (g == NULL)
        return;
    pthread_mutex_lock(&g->lock);
    g->quit = true;
    pthread_cond_signal(&g->wake);
    pthread_mutex_unlock(&g->lock);
    pthread_join(g->thread, NULL);

    struct moe_rpc_stream *stream = take_stream(g);
    if (stream != NULL)
        moe_rpc_stream_free(stream);
    g->config.hooks.cancel_load(g->config.hooks.ctx);
    moe_gather_abort(g->gather, UINT64_MAX);
    if (g->parting < GOING)
        post_leave(g, run_leave);
    moe_jobs_destroy(g->jobs);
    free_group(g);
}

void moe_group_drain(struct moe_group *g, const char *reason)
{
    struct moe_status why = {0};
    snprintf(why.text, sizeof why.text, "%.*s", REASON_BYTES, reason);
    post_event(g, EVENT_DRAIN, 0, 0, why);
}

void moe_group_report_lost(struct moe_group *g, uint64_t epoch, uint64_t slots,
                           struct moe_status why)
{
    post_event(g, EVENT_LOST, epoch, slots, why);
}
