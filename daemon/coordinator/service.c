/* SPDX-License-Identifier: Apache-2.0 */
/* Life of the service, the loop of its owner thread, and the way of events into it. */
#include "base/build.h"
#include "coordinator/service_state.h"

#include "daemon/daemon.h"
#include "daemon/hangup.h"
#include "daemon/notify.h"
#include "inspect/log_method.h"
#include "inspect/metrics_method.h"
#include "proto/descriptors.h"

#include <signal.h>
#include <stdlib.h>

enum {
    MESSAGE_MAX_BYTES = 4 << 20, /* the largest ASSIGN stays well below */
    READING_BYTES = 64 << 20,    /* of messages from workers and operators */
    STREAMS_PER_CONNECTION = 64,
    CONTROL_DESCRIPTORS_PERCENT = 25,
    ATTEMPTS_MAX = 8,
};
#define SHUTDOWN_NS    (60 * MOE_NS_PER_S)
#define LAST_NS        (30 * MOE_NS_PER_S) /* from the end of the shutdown to that of the process */
#define STANDBY_NS     MOE_NS_PER_S
#define BACKOFF_NS     (250 * MOE_NS_PER_MS)
#define ANSWER_NS      (100 * MOE_NS_PER_MS)
#define BACKOFF_MAX_NS (8 * MOE_NS_PER_S)
#define ECHO_NS        (100 * MOE_NS_PER_MS)
#define GOODBYE_NS     (2 * MOE_NS_PER_S) /* for answers under way when the service ends */

/* ------------------------------------------------------------------ inbox */

void moe_coordinator__post(struct moe_coordinator *c, struct event *e)
{
    moe_mutex_lock(&c->inbox_lock);
    e->next = NULL;
    e->arrived_ns = moe_clock_ns();
    if (c->inbox_last != NULL)
        c->inbox_last->next = e;
    else
        c->inbox_first = e;
    c->inbox_last = e;
    moe_mutex_unlock(&c->inbox_lock);
    (void)uv_async_send(
        &c->wake); /* fails only on a closing handle, when no thread runs the loop */
}

struct event *moe_coordinator__take_events(struct moe_coordinator *c)
{
    moe_mutex_lock(&c->inbox_lock);
    struct event *e = c->inbox_first;
    c->inbox_first = c->inbox_last = NULL;
    moe_mutex_unlock(&c->inbox_lock);
    return e;
}

uint8_t *moe_coordinator__pack(const ProtobufCMessage *m, size_t *length)
{
    *length = protobuf_c_message_get_packed_size(m);
    uint8_t *bytes = malloc(*length > 0 ? *length : 1);
    if (bytes != NULL)
        (void)protobuf_c_message_pack(m, bytes);
    return bytes;
}

/* ------------------------------------------------------------------ loop */

static void run_inbox(struct moe_coordinator *c)
{
    struct event *e = moe_coordinator__take_events(c);
    while (e != NULL) {
        struct event *next = e->next; /* running an event may free it */
        moe_coordinator__look(c, false);
        e->run(c, e);
        moe_coordinator__act(c);
        e = next;
    }
}

static void on_timer(uv_timer_t *timer);

/* Runs after each change of the machine: sets the next tick, the metrics, and ends the loop. */
static void settle(struct moe_coordinator *c)
{
    moe_coordinator__observe(c);
    if (c->exited || c->quit) {
        uv_stop(&c->loop);
        return;
    }
    uint64_t due = MOE_NEVER, now = moe_clock_ns();
    if (c->leads) {
        due = moe_membership_deadline(c->machine);
        due = moe_earlier(due, moe_added_deadline(c->models));
        due = moe_earlier(due, moe_moves_deadline(c->moves));
    } else {
        due = now + STANDBY_NS; /* for sessions that say nothing */
    }
    if (c->etcd != NULL && moe_etcd_wait_ns(c->etcd) != MOE_NEVER)
        due = moe_earlier(due, now + moe_etcd_wait_ns(c->etcd));
    uint64_t wait_ms = due > now ? (due - now) / MOE_NS_PER_MS + 1 : 1;
    (void)uv_timer_start(&c->timer, on_timer, wait_ms, 0); /* fails without a callback only */
}

/* Messages that came in before the tick count before it: a busy coordinator does not blame its
 * workers. */
static void on_timer(uv_timer_t *timer)
{
    struct moe_coordinator *c = timer->data;
    moe_coordinator__look(c, true);
    run_inbox(c);
    moe_coordinator__look(c, false);
    uint64_t now = moe_clock_ns();
    if (c->leads) {
        moe_membership_on_tick(c->machine, now);
        moe_added_on_tick(c->models, now);
        moe_moves_on_tick(c->moves, now);
        moe_coordinator__act(c);
    }
    moe_coordinator__drop_silent(c, now);
    settle(c);
}

static void stop_once(struct moe_coordinator *c)
{
    if (c->stops_done++ > 0) {
        moe_log_warn("second request to stop: ending at once");
        c->quit = true;
        return;
    }
    if (c->etcd != NULL) { /* the group goes on with another coordinator */
        c->exited = true;
        return;
    }
    uint64_t epoch;
    struct moe_status st = moe_membership_shutdown(c->machine, moe_clock_ns(),
                                                   "the coordinator was asked to stop", 0, &epoch);
    MOE_INVARIANT(st.code == MOE_OK);
    moe_coordinator__act(c);
}

static void on_wake(uv_async_t *wake)
{
    struct moe_coordinator *c = wake->data;
    moe_coordinator__look(c, true);
    run_inbox(c);
    while (c->stops_done < atomic_load(&c->stops_requested) && !c->quit)
        stop_once(c);
    settle(c);
}

/* A second signal right after the first counts as one: a shell may signal both the process group
 * and its leader. */
static void on_signal(uv_signal_t *s, int number)
{
    struct moe_coordinator *c = s->data;
    uint64_t now = moe_clock_ns();
    if (c->first_signal_ns != 0 && now - c->first_signal_ns < ECHO_NS)
        return;
    if (c->first_signal_ns == 0)
        c->first_signal_ns = now;
    moe_log_info("signal %d", number);
    moe_notify_stopping();
    moe_notify_extend((SHUTDOWN_NS + LAST_NS) / MOE_NS_PER_MS);
    stop_once(c);
    settle(c);
}

void moe_coordinator_request_stop(struct moe_coordinator *c)
{
    atomic_fetch_add(&c->stops_requested, 1);
    (void)uv_async_send(&c->wake);
}

struct moe_status moe_coordinator_run(struct moe_coordinator *c)
{
    settle(c);
    if (!c->exited && !c->quit)
        (void)uv_run(&c->loop,
                     UV_RUN_DEFAULT); /* ends by uv_stop; returns the number of open handles */
    if (c->quit)
        return moe_error(MOE_CANCELLED, MOE_REASON_ABORTED, "the shutdown was cut short");
    return c->refused;
}

/* ------------------------------------------------------------------ create, destroy */

static struct moe_status uv_error(const char *what, int code)
{
    return moe_error(MOE_INTERNAL, MOE_REASON_IO, "%s: %s", what, uv_strerror(code));
}

static struct moe_status make_loop(struct moe_coordinator *c, bool signals)
{
    int r = uv_loop_init(&c->loop);
    if (r != 0)
        return uv_error("event loop", r);
    c->loop_made = true;
    c->wake.data = c->timer.data = c->signals[0].data = c->signals[1].data = c;
    r = uv_async_init(&c->loop, &c->wake, on_wake);
    if (r == 0)
        r = uv_timer_init(&c->loop, &c->timer);
    if (r == 0 && signals)
        r = uv_signal_init(&c->loop, &c->signals[0]);
    if (r == 0 && signals)
        r = uv_signal_init(&c->loop, &c->signals[1]);
    if (r == 0 && signals)
        r = uv_signal_start(&c->signals[0], on_signal, SIGTERM);
    if (r == 0 && signals)
        r = uv_signal_start(&c->signals[1], on_signal, SIGINT);
    if (r != 0)
        return uv_error("event loop", r);
    MOE_TRY(moe_daemon_turn(c->health.progress, &c->loop, &c->turn));
    if (!signals)
        return moe_ok();
    MOE_TRY(moe_notify_watch(c->health.progress, &c->loop, &c->watchdog));
    return moe_hangup_watch(&c->loop, &c->hangup);
}

static struct moe_rpc_server_config
server_config(const struct moe_coordinator *c, const struct moe_coordinator_config *config,
              const char *listen, const struct moe_rpc_method *methods, size_t count)
{
    return (struct moe_rpc_server_config){
        .listen = listen,
        .insecure = config->insecure,
        .shards = 1,
        .max_message_bytes = MESSAGE_MAX_BYTES,
        .max_reading_bytes = READING_BYTES,
        .metrics = c->seen.registry,
        .progress = c->health.progress,
        .max_concurrent_streams = STREAMS_PER_CONNECTION,
        .methods = methods,
        .method_count = count,
    };
}

/* The sessions of workers have a separate server if they have a separate address. */
static struct moe_status make_servers(struct moe_coordinator *c,
                                      const struct moe_coordinator_config *config)
{
    struct moe_rpc_method methods[ADMIN_METHODS + 3];
    size_t count = ADMIN_METHODS;
    struct moe_rpc_method session = moe_coordinator__session_method(c);
    moe_coordinator__admin_methods(c, methods);
    methods[count++] = moe_inspect_metrics_method(&c->seen.shown);
    methods[count++] = moe_inspect_log_method();
    if (config->control_listen != NULL) {
        struct moe_rpc_server_config control =
            server_config(c, config, config->control_listen, &session, 1);
        control.name = "control";
        control.max_concurrent_streams = SESSIONS_PER_CONNECTION;
        control.descriptors_percent = CONTROL_DESCRIPTORS_PERCENT;
        MOE_TRY(moe_guard_start_server(c->guard, &control, &c->control_server));
    } else {
        methods[count++] = session;
    }
    struct moe_rpc_server_config public = server_config(c, config, config->listen, methods, count);
    public.descriptors = moe_proto_descriptors;
    public.descriptors_length = (size_t)(moe_proto_descriptors_end - moe_proto_descriptors);
    if (c->control_server != NULL)
    public.descriptors_percent = 100 - CONTROL_DESCRIPTORS_PERCENT;
    MOE_TRY(moe_guard_start_server(c->guard, &public, &c->server));
    return moe_coordinator__health_watch(c);
}

struct moe_status moe_coordinator_create(const struct moe_coordinator_config *config,
                                         struct moe_coordinator **out)
{
    struct moe_coordinator *c = calloc(1, sizeof *c);
    if (c == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "coordinator");
    c->lease_ms = config->lease_ms;
    c->guard = config->guard;
    c->rebalance = config->rebalance;
    c->started_ns = moe_clock_ns();
    c->started_unix_ms = moe_coordinator__unix_ms();
    moe_mutex_init(&c->inbox_lock);
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_coordinator__health_create(c, config->health_step_ms), fail);
    MOE_TRY_GOTO(st, make_loop(c, config->handle_signals), fail);
    c->machine_config = (struct moe_membership_config){
        .slots = config->slots,
        .size = config->size,
        .replicas = config->replicas,
        .partial = config->partial,
        .spare = config->spare,
        .lease_ns = config->lease_ms * MOE_NS_PER_MS,
        .form_ns = config->form_timeout_ms * MOE_NS_PER_MS,
        .answer_ns = ANSWER_NS,
        .read_ns = config->join_wait_s * MOE_NS_PER_S,
        .shutdown_ns = SHUTDOWN_NS,
        .backoff_ns = BACKOFF_NS,
        .backoff_max_ns = BACKOFF_MAX_NS,
        .attempts_max = ATTEMPTS_MAX,
        .version = moe_build_version(),
    };
    MOE_TRY_GOTO(st, moe_coordinator__open_state(c, config), fail);
    MOE_TRY_GOTO(st, moe_coordinator__observe_start(c, config->metrics_listen), fail);
    moe_coordinator__act(c); /* no stream exists yet, so these are log lines */
    MOE_TRY_GOTO(st, make_servers(c, config), fail);
    moe_coordinator__join_election(c, config);
    *out = c;
    return moe_ok();
fail:
    moe_coordinator_destroy(c);
    return st;
}

uint16_t moe_coordinator_port(const struct moe_coordinator *c)
{
    return moe_rpc_server_port(c->server);
}

uint16_t moe_coordinator_control_port(const struct moe_coordinator *c)
{
    return c->control_server != NULL ? moe_rpc_server_port(c->control_server) : 0;
}

uint16_t moe_coordinator_metrics_port(const struct moe_coordinator *c)
{
    return c->seen.http != NULL ? moe_metrics_http_port(c->seen.http) : 0;
}

static void close_handle(uv_handle_t *handle, void *arg)
{
    (void)arg;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

static void stop_server(struct moe_coordinator *c, struct moe_rpc_server *server)
{
    if (server == NULL)
        return;
    moe_guard_remove(c->guard, server);
    moe_rpc_server_drain(server, moe_clock_ns() + GOODBYE_NS);
    run_inbox(c);
    moe_rpc_server_stop(server);
}

/* Stops the servers first, as gRPC threads post events until then. The inbox then holds only ends
 * of calls, which free them. */
void moe_coordinator_destroy(struct moe_coordinator *c)
{
    if (c == NULL)
        return;
    moe_progress_close(c->health.progress);
    if (c->server != NULL) {
        c->quit = true;
        moe_rpc_server_set_health(c->server, "", false);
        const struct moe_status why = moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_DRAINING, 1000,
                                                      "the coordinator is leaving");
        moe_coordinator__end_sessions(c, &why);
        moe_coordinator__end_model_calls(c, &why);
    }
    moe_coordinator__leave_election(c);
    stop_server(c, c->server);
    stop_server(c, c->control_server);
    if (c->loop_made) {
        uv_walk(&c->loop, close_handle, NULL);
        (void)uv_run(&c->loop, UV_RUN_DEFAULT);
        (void)uv_loop_close(&c->loop);
    }
    moe_coordinator__observe_stop(c);
    moe_coordinator__close_state(c);
    moe_progress_destroy(c->health.progress);
    moe_mutex_destroy(&c->inbox_lock);
    free(c);
}
