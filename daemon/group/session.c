/* SPDX-License-Identifier: Apache-2.0 */
/* The thread of the session: its events, its timers, and the stream to the coordinator. */
#include "group/state.h"

#include "base/clock.h"
#include "base/thread.h"
#include "base/wait.h"
#include "daemon/local.h"
#include "daemon/log.h"
#include "group/report.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    EVENTS_MAX = 1024, /* queued; a message beyond this ends the stream */
    MESSAGE_BYTES_MAX =
        8 << 20, /* an assignment of 256 layers of 1024 experts is well below this */
    BACKOFF_MIN_MS = 100,
    BACKOFF_MAX_MS = 2000,
    /* A restarted coordinator gives its members one lease to come back. The pause of the connection
     * (this one) and of the session (BACKOFF) together stay well below a lease. */
    RECONNECT_MS = 500,
    BACKOFFS_PER_LEASE = 8,
    REASON_BYTES = 160,
    GIVEN_UP_RETRY_MS = 500,
    /* With several coordinators, one that says nothing is left for another: a stopped process has
     * open connections. */
    SILENCE_MS = 1000,      /* before it has answered Register */
    SILENCES_PER_LEASE = 2, /* afterwards; heartbeats are answered much more often */
};

#define AWAY_LOG_INTERVAL_NS (30 * MOE_NS_PER_S)

static const char session_path[] = "/moe.v1.CoordinatorService/Session";

/* -------------------------------------------------------- stream: the rpc client's thread
 *
 * `ctx` is the group. The generation marks late events of an old stream. */

static void stream_message(void *ctx, struct moe_rpc_msg *m)
{
    struct moe_group *g = ctx;
    size_t length = moe_rpc_msg_length(m);
    struct event *e =
        length <= MESSAGE_BYTES_MAX ? moe_group__new_event(EVENT_MESSAGE, length) : NULL;
    struct moe_status st =
        moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_TOO_LARGE, "a message of %zu bytes", length);
    if (e != NULL)
        st = moe_rpc_msg_flatten(m, e->bytes, length, &e->length);
    moe_rpc_msg_free(m);
    moe_mutex_lock(&g->lock);
    if (!moe_failed(&st) && g->event_count < EVENTS_MAX) {
        e->generation = g->generation;
        moe_group__append_event(g, e);
        e = NULL;
    } else if (g->stream != NULL) {
        moe_rpc_stream_cancel(g->stream);
    }
    moe_mutex_unlock(&g->lock);
    free(e);
}

static void stream_closed(void *ctx, struct moe_status status)
{
    struct moe_group *g = ctx;
    struct event *e = moe_group__new_event(EVENT_CLOSED, 0);
    if (e == NULL)
        return;
    e->status = status;
    moe_mutex_lock(&g->lock);
    e->generation = g->generation;
    moe_group__append_event(g, e);
    moe_mutex_unlock(&g->lock);
}

/* -------------------------------------------------------- messages of the coordinator */

/* A send on a dying stream may not arrive, so the request counts until the answer comes. */
static void send_try_again(struct moe_group *g)
{
    if (g->registered)
        moe_report_try_again(g->stream);
    g->unanswered = g->registered ? g->unanswered + 1 : 1;
}

static void on_trying_again(struct moe_group *g)
{
    g->unanswered -= g->unanswered > 0;
}

static const char *coordinator(const struct moe_group *g)
{
    return g->coordinators.all[g->at];
}

static void expect_sign(struct moe_group *g)
{
    uint64_t limit_ns = SILENCE_MS * MOE_NS_PER_MS;
    if (g->registered)
        limit_ns = g->lease.term_ns / SILENCES_PER_LEASE;
    g->silence_ns = g->coordinators.count > 1 ? moe_clock_ns() + limit_ns : MOE_NEVER;
}

static void on_registered(struct moe_group *g, const Moe__V1__Registered *r)
{
    if (r->slots == 0 || r->slots > MOE_MAX_SLOTS || r->slot >= r->slots || r->lease_ms == 0 ||
        r->n_models != r->n_model_names) {
        moe_log_error("coordinator: slot %u of %u is impossible", r->slot, r->slots);
        moe_rpc_stream_cancel(g->stream);
        return;
    }
    if (g->has_slot && r->slot != g->slot)
        moe_group__end_view(g, "the coordinator gave this worker another slot");
    g->registered = g->has_slot = true;
    g->slot = r->slot;
    g->slots = r->slots;
    g->lease_ms = r->lease_ms;
    g->lease.term_ns = moe_lease_term_ns(r->lease_ms * MOE_NS_PER_MS, MOE_LEASE_MARGIN_PERCENT);
    g->backoff_ms = BACKOFF_MIN_MS;
    g->away_since_ns = 0;
    g->tried = 0;
    if (r->epoch > g->floor)
        g->floor = r->epoch;
    g->config.hooks.slot_assigned(g->config.hooks.ctx, r->slot, r->slots, coordinator(g),
                                  r->admin_port);
    moe_log_info("registered: slot %u of %u, lease %u ms", r->slot, r->slots, r->lease_ms);
    if (g->config.hooks.fetched_listed != NULL && g->shutdown < LEAVING)
        g->config.hooks.fetched_listed(g->config.hooks.ctx, r->fetched_placement_version);
    if (g->config.hooks.models_listed != NULL && g->shutdown < LEAVING)
        g->config.hooks.models_listed(g->config.hooks.ctx, r->models,
                                      (const char *const *)r->model_names, r->n_models);
    moe_group__send_heartbeat(g);
    if (g->unanswered > 0) {
        g->unanswered = 0;
        send_try_again(g);
    }
    if (g->shutdown == DRAINING)
        moe_report_drain_notice(g->stream, "draining since before the coordinator came back");
    else if (g->shutdown == DRAINED)
        moe_report_leaving(g->stream, "drained");
}

/* Takes over `r`. */
static void dispatch_message(struct moe_group *g, Moe__V1__SessionResponse *r)
{
    if (r->body_case == MOE__V1__SESSION_RESPONSE__BODY_REGISTERED) {
        on_registered(g, r->registered);
    } else if (!g->registered) {
        moe_log_error("coordinator: sent a message before it answered Register");
        moe_rpc_stream_cancel(g->stream);
    } else {
        switch (r->body_case) {
        case MOE__V1__SESSION_RESPONSE__BODY_ASSIGN: moe_group__on_assign(g, r); return;
        case MOE__V1__SESSION_RESPONSE__BODY_PREPARE: moe_group__on_prepare(g, r); return;
        case MOE__V1__SESSION_RESPONSE__BODY_BLOBS: moe_group__on_blobs(g, r->blobs); break;
        case MOE__V1__SESSION_RESPONSE__BODY_READ_CHECKPOINT:
            moe_group__on_read_checkpoint(g, r->read_checkpoint);
            break;
        case MOE__V1__SESSION_RESPONSE__BODY_COMMIT:
            moe_group__on_commit(g, r->commit->epoch);
            break;
        case MOE__V1__SESSION_RESPONSE__BODY_ABORT: moe_group__on_abort(g, r->abort); break;
        case MOE__V1__SESSION_RESPONSE__BODY_DRAIN:
            if (r->drain->experts_move)
                moe_group__await_move(g);
            else
                moe_group__begin_drain(g, r->drain->limit_ms, r->drain->reason);
            break;
        case MOE__V1__SESSION_RESPONSE__BODY_MODEL_ORDER:
            moe_group__on_model_order(g, r->model_order);
            break;
        case MOE__V1__SESSION_RESPONSE__BODY_TRYING_AGAIN: on_trying_again(g); break;
        case MOE__V1__SESSION_RESPONSE__BODY_HEARTBEAT_ANSWER:
            moe_group__on_heartbeat_answer(g, r->heartbeat_answer);
            break;
        default: moe_log_warn("coordinator: a message of an unknown kind"); break;
        }
    }
    moe__v1__session_response__free_unpacked(r, NULL);
}

static void on_message(struct moe_group *g, const struct event *e)
{
    void *message;
    struct moe_status st =
        moe_rpc_unpack(&moe__v1__session_response__descriptor, e->bytes, e->length, NULL, &message);
    if (moe_failed(&st)) {
        moe_log_error("coordinator: %s", st.text);
        moe_rpc_stream_cancel(g->stream);
        return;
    }
    dispatch_message(g, message);
    expect_sign(g);
}

/* --------------------------------------------------------------------- connection */

static struct moe_rpc_stream *take_stream(struct moe_group *g)
{
    moe_mutex_lock(&g->lock);
    struct moe_rpc_stream *stream = g->stream;
    g->stream = NULL;
    g->generation++;
    moe_mutex_unlock(&g->lock);
    g->registered = false;
    g->heartbeat_ns = g->silence_ns = MOE_NEVER;
    return stream;
}

static void plan_reconnect(struct moe_group *g)
{
    uint32_t longest = BACKOFF_MAX_MS;
    if (g->lease_ms != 0 && g->lease_ms / BACKOFFS_PER_LEASE < longest)
        longest = g->lease_ms / BACKOFFS_PER_LEASE;
    if (longest < BACKOFF_MIN_MS)
        longest = BACKOFF_MIN_MS;
    g->reconnect_ns = moe_clock_ns() + g->backoff_ms * MOE_NS_PER_MS;
    g->backoff_ms = g->backoff_ms * 2 < longest ? g->backoff_ms * 2 : longest;
}

/* A new channel each time: a coordinator that starts later than this worker may have a local socket
 * then. */
static struct moe_status reopen_channel(struct moe_group *g)
{
    const struct moe_rpc_channel_config config = {
        .target = coordinator(g),
        .trust = g->config.trust,
        .max_message_bytes = MESSAGE_BYTES_MAX,
        .own_connection = true,
        .reconnect_ms = RECONNECT_MS,
    };
    char path[MOE_LOCAL_PATH_BYTES];
    moe_rpc_channel_close(g->channel);
    g->channel = NULL;
    g->found_socket = moe_local_find(coordinator(g), path);
    return moe_rpc_channel_open(g->config.client, &config, &g->channel);
}

/* To another coordinator at once; after all of them, with a pause. */
static void try_next(struct moe_group *g, const struct moe_status *why)
{
    g->at = moe_endpoints_next(&g->coordinators, g->at, why);
    g->tried++;
    if (g->tried % g->coordinators.count == 0)
        plan_reconnect(g);
    else
        g->reconnect_ns = moe_clock_ns();
}

static void connect_stream(struct moe_group *g)
{
    g->reconnect_ns = MOE_NEVER;
    moe_group__show_lease(g); /* less is left of it */
    moe_mutex_lock(&g->lock);
    g->generation++; /* late events of the previous stream belong to neither */
    moe_mutex_unlock(&g->lock);
    const struct moe_rpc_call_options options = {.deadline_ns = MOE_NEVER};
    const struct moe_rpc_stream_events events = {stream_message, stream_closed};
    struct moe_rpc_stream *stream = NULL;
    struct moe_status st = reopen_channel(g);
    if (!moe_failed(&st))
        st = moe_rpc_stream_open(g->channel, session_path, &options, &events, g, &stream);
    if (moe_failed(&st)) {
        moe_log_warn("coordinator: %s", st.text);
        try_next(g, &st);
        return;
    }
    moe_mutex_lock(&g->lock);
    g->stream = stream;
    moe_mutex_unlock(&g->lock);
    expect_sign(g);
    moe_report_register(g->stream, &g->config.identity,
                        g->has_slot ? g->slot + 1 : g->config.identity.wanted_slot_plus_one,
                        &g->session);
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
    default: return st->reason == MOE_REASON_STALE_EPOCH; /* a newer process has the slot */
    }
}

/* The coordinator began to listen between the look for its local socket and the connection, which
 * so has no identity: the next one has. */
static bool came_too_early(const struct moe_group *g, const struct moe_status *st)
{
    char path[MOE_LOCAL_PATH_BYTES];
    return (st->code == MOE_PERMISSION_DENIED || st->code == MOE_UNAUTHENTICATED) &&
           !g->found_socket && moe_local_find(coordinator(g), path);
}

/* Logs at once when the coordinator goes away, then every AWAY_LOG_INTERVAL_NS. */
static void log_away(struct moe_group *g, const char *why)
{
    uint64_t now = moe_clock_ns();
    if (g->away_since_ns == 0) {
        g->away_since_ns = now;
        moe_log_warn("coordinator %s: %s; trying again", coordinator(g), why);
    } else if (now >= g->away_logged_ns + AWAY_LOG_INTERVAL_NS) {
        moe_log_warn("coordinator %s: %s; trying again for %llu s", coordinator(g), why,
                     (unsigned long long)((now - g->away_since_ns) / MOE_NS_PER_S));
    } else {
        return;
    }
    g->away_logged_ns = now;
}

static void on_closed(struct moe_group *g, const struct event *e)
{
    bool was_registered = g->registered;
    moe_rpc_stream_free(take_stream(g));
    if (g->shutdown == DRAINED && was_registered) {
        moe_group__begin_leave(g, moe_ok());
        return;
    }
    if (is_final(&e->status) && !came_too_early(g, &e->status)) {
        moe_group__begin_leave(g, moe_error_context(e->status, "refused by the coordinator"));
        return;
    }
    if (e->status.reason == MOE_REASON_SLOT_TAKEN) {
        moe_group__end_view(g, "another worker has the slot");
        moe_lease_end(&g->lease);
        moe_group__show_lease(g);
    }
    if (g->forming != 0 && !g->committed)
        moe_group__end_view(g, "the coordinator went away");
    if (g->shutdown == DRAIN_REQUESTED)
        moe_group__begin_drain(g, 0, "the coordinator went away");
    if (was_registered)
        g->away_since_ns = 0;
    log_away(g, moe_failed(&e->status) ? e->status.text : "ended the session");
    try_next(g, &e->status);
}

/* ---------------------------------------------------------------------- the thread */

static void handle_event(struct moe_group *g, const struct event *e)
{
    bool of_stream = e->kind == EVENT_MESSAGE || e->kind == EVENT_CLOSED;
    if (of_stream && e->generation != g->generation)
        return;
    switch (e->kind) {
    case EVENT_MESSAGE: on_message(g, e); break;
    case EVENT_CLOSED: on_closed(g, e); break;
    case EVENT_LOADED: moe_group__on_loaded(g, e); break;
    case EVENT_READ: moe_group__on_read(g, e); break;
    case EVENT_FORMED: moe_group__on_formed(g, e); break;
    case EVENT_SERVED: moe_group__on_served(g, e); break;
    case EVENT_LOST: moe_group__on_lost(g, e); break;
    case EVENT_DRAIN: moe_group__request_drain(g, e->status.text); break;
    case EVENT_TRY_AGAIN: send_try_again(g); break;
    case EVENT_SEND: moe_group__on_send(g, e); break;
    case EVENT_LEFT:
        g->shutdown = LEFT;
        g->config.hooks.ended(g->config.hooks.ctx, g->outcome);
        break;
    }
}

static void give_up(struct moe_group *g)
{
    g->config.hooks.give_up(
        g->config.hooks.ctx,
        moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, GIVEN_UP_RETRY_MS,
                        "the group has lost a worker and has not formed again"));
    /* Again, for what was accepted as the view ended. */
    g->give_up_ns = moe_clock_ns() + g->config.reform_ms * MOE_NS_PER_MS;
}

static bool has_shutdown_timer(const struct moe_group *g)
{
    return g->shutdown == DRAIN_REQUESTED || g->shutdown == DRAINING || g->shutdown == DRAINED;
}

static uint64_t next_deadline(const struct moe_group *g)
{
    if (g->shutdown >= LEAVING)
        return MOE_NEVER;
    uint64_t at = moe_earlier(moe_earlier(g->heartbeat_ns, g->reconnect_ns), g->give_up_ns);
    at = moe_earlier(moe_earlier(at, g->lease_end_ns), g->silence_ns);
    at = moe_earlier(at, g->session_end_ns);
    return has_shutdown_timer(g) ? moe_earlier(at, g->shutdown_ns) : at;
}

static void run_timers(struct moe_group *g)
{
    if (g->shutdown >= LEAVING)
        return;
    uint64_t now = moe_clock_ns();
    if (now >= g->heartbeat_ns)
        moe_group__send_heartbeat(g);
    if (now >= g->lease_end_ns)
        moe_group__show_lease(g);
    if (now >= g->reconnect_ns)
        connect_stream(g);
    if (now >= g->silence_ns) {
        g->silence_ns = MOE_NEVER;
        moe_rpc_stream_cancel(g->stream); /* then on_closed */
    }
    if (now >= g->give_up_ns)
        give_up(g);
    if (now >= g->session_end_ns)
        moe_group__drop_session(g);
    if (has_shutdown_timer(g) && now >= g->shutdown_ns)
        moe_group__on_shutdown_timer(g);
}

static void *thread_main(void *arg)
{
    struct moe_group *g = arg;
    bool quit = false;
    while (!quit) {
        moe_loop_turn(g->loop);
        uint64_t at = next_deadline(g);
        if (g->turn_ns > 0)
            at = moe_earlier(at, moe_clock_ns() + g->turn_ns);
        struct event *e = moe_group__wait_for_event(g, at, &quit);
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
    moe_mutex_not_shared(&g->lock);
    for (struct event *e = g->first; e != NULL; e = next) {
        next = e->next;
        free(e);
    }
    moe_gather_destroy(g->gather);
    moe_rpc_channel_close(g->channel);
    pthread_cond_destroy(&g->wake);
    moe_mutex_destroy(&g->lock);
    free(g);
}

struct moe_status moe_group_start(const struct moe_group_config *config, struct moe_group **out)
{
    if (config->identity.layer_count > MOE_MAX_LAYERS)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "a model may have %d MoE layers", MOE_MAX_LAYERS);
    struct moe_endpoints coordinators;
    MOE_TRY(moe_endpoints_parse("--coordinator", config->coordinator, &coordinators));
    struct moe_group *g = calloc(1, sizeof *g);
    if (g == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the group");
    g->coordinators = coordinators;
    moe_mutex_not_shared(&g->lock);
    g->config = *config;
    g->end = &g->first;
    g->backoff_ms = BACKOFF_MIN_MS;
    g->heartbeat_ns = g->give_up_ns = g->lease_end_ns = g->silence_ns = MOE_NEVER;
    g->session_end_ns = MOE_NEVER;
    g->reconnect_ns = 0;
    g->loop = moe_progress_add(
        config->progress,
        &(struct moe_loop_config){.name = "group", .code = "GROUP_STUCK", .always = true});
    g->turn_ns = moe_progress_step_ns(config->progress);
    moe_mutex_init(&g->lock);
    moe_wait_init(&g->wake);
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_gather_create(moe_group__send_blob, g, &g->gather), fail);
    MOE_TRY_GOTO(st, moe_serial_executor_create(&g->executor), fail);
    *out = g; /* before the thread starts: hooks may use it */
    int rc = moe_thread_create(&g->thread, "moe-group", thread_main, g);
    if (rc == 0)
        return st;
    st = moe_thread_failure("moe-group", rc);
fail:
    *out = NULL;
    moe_serial_executor_destroy(g->executor);
    free_group(g);
    return st;
}

void moe_group_destroy(struct moe_group *g)
{
    if (g == NULL)
        return;
    moe_mutex_lock(&g->lock);
    g->quit = true;
    pthread_cond_signal(&g->wake);
    moe_mutex_unlock(&g->lock);
    pthread_join(g->thread, NULL);

    struct moe_rpc_stream *stream = take_stream(g);
    if (stream != NULL)
        moe_rpc_stream_free(stream);
    g->config.hooks.cancel_load(g->config.hooks.ctx);
    moe_gather_abort(g->gather, UINT64_MAX);
    if (g->shutdown < LEAVING)
        moe_group__post_leave(g, false);
    moe_serial_executor_destroy(g->executor);
    free_group(g);
}

void moe_group_drain(struct moe_group *g, const char *reason)
{
    struct moe_status why = {0};
    snprintf(why.text, sizeof why.text, "%.*s", REASON_BYTES, reason);
    moe_group__post(g, EVENT_DRAIN, 0, 0, why);
}

void moe_group_try_again(struct moe_group *g)
{
    moe_group__post(g, EVENT_TRY_AGAIN, 0, 0, moe_ok());
}

void moe_group_report_lost(struct moe_group *g, uint64_t epoch, uint64_t slots,
                           struct moe_status why)
{
    moe_group__post(g, EVENT_LOST, epoch, slots, why);
}
