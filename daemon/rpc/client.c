/* SPDX-License-Identifier: Apache-2.0 */
/* gRPC client: one completion queue and its thread, and unary calls. Channels are in channel.c,
 * streams in stream.c. Callers retry: a retry inside the core would keep references to tensors. */
#include "rpc/client.h"

#include "base/clock.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"
#include "rpc/calling.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ------------------------------------------------------------------ client */

static _Thread_local struct moe_rpc_client *this_client;

/* The next event, or a timeout while the thread polls. */
static grpc_event next_event(struct moe_rpc_client *c, uint64_t *spin_until)
{
    const uint64_t spin = atomic_load_explicit(&c->spin_ns, memory_order_relaxed);
    const bool polls = spin > 0 && moe_clock_ns() < *spin_until;
    const gpr_timespec until =
        polls ? gpr_inf_past(GPR_CLOCK_MONOTONIC) : gpr_inf_future(GPR_CLOCK_MONOTONIC);
    grpc_event event = grpc_completion_queue_next(c->queue, until, NULL);
    if (spin > 0 && event.type == GRPC_OP_COMPLETE)
        *spin_until = moe_clock_ns() + spin;
    else if (polls)
        sched_yield(); /* threads with work have priority */
    return event;
}

static void *client_main(void *arg)
{
    struct moe_rpc_client *c = arg;
    uint64_t spin_until = 0;
    this_client = c;
    for (;;) {
        grpc_event event = next_event(c, &spin_until);
        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        if (event.type == GRPC_OP_COMPLETE)
            moe_rpc_run_event(&event);
    }
}

void moe_rpc_client_set_spin(struct moe_rpc_client *c, uint64_t spin_ns)
{
    atomic_store_explicit(&c->spin_ns, spin_ns, memory_order_relaxed);
}

bool moe_rpc_client_is_this_thread(const struct moe_rpc_client *c)
{
    return this_client == c;
}

struct moe_status moe_rpc_client_create(struct moe_rpc_client **out)
{
    struct moe_status no_memory = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                                            "out of memory while starting a client");
    *out = NULL;
    struct moe_rpc_client *c = calloc(1, sizeof *c);
    if (c == NULL)
        return no_memory;
    struct moe_status st = moe_rpc_library_ref();
    if (moe_failed(&st)) {
        free(c);
        return st;
    }
    moe_mutex_init(&c->lock);
    pthread_cond_init(&c->idle, NULL);
    TAILQ_INIT(&c->calls);
    c->queue = grpc_completion_queue_create_for_next(NULL);
    int rc = moe_thread_create(&c->thread, "moe-rpc-client", client_main, c);
    if (rc != 0) {
        grpc_completion_queue_shutdown(c->queue);
        (void)client_main(c);
        this_client = NULL;
        grpc_completion_queue_destroy(c->queue);
        moe_rpc_library_unref();
        free(c);
        return moe_thread_failure("moe-rpc-client", rc);
    }
    *out = c;
    return moe_ok();
}

void moe_rpc_client_destroy(struct moe_rpc_client *c)
{
    struct moe_rpc_in_flight *call;
    if (c == NULL)
        return;
    MOE_INVARIANT(!moe_rpc_client_is_this_thread(c));
    moe_mutex_lock(&c->lock);
    c->closing = true;
    TAILQ_FOREACH(call, &c->calls, link)
    {
        call->asked_to_end = true;
        if (call->core != NULL)
            grpc_call_cancel(call->core, NULL);
    }
    while (!TAILQ_EMPTY(&c->calls))
        moe_wait(&c->idle, &c->lock);
    moe_mutex_unlock(&c->lock);
    grpc_completion_queue_shutdown(c->queue);
    pthread_join(c->thread, NULL);
    grpc_completion_queue_destroy(c->queue);
    pthread_cond_destroy(&c->idle);
    moe_mutex_not_shared(&c->lock);
    moe_tls_pem_free(&c->pem);
    free(c->pem_paths);
    moe_mutex_destroy(&c->lock);
    moe_rpc_library_unref();
    free(c);
}

/* ------------------------------------------------------------------ calls in flight */

void moe_rpc_in_flight_begin(struct moe_rpc_in_flight *f, struct moe_rpc_channel *ch,
                             const char *path, uint64_t deadline_ns)
{
    struct moe_rpc_client *c = ch->client;
    f->client = c;
    f->route = moe_rpc_channel_route(ch);
    f->core = grpc_channel_create_call(f->route->core, NULL, GRPC_PROPAGATE_DEFAULTS, c->queue,
                                       grpc_slice_from_static_string(path), NULL,
                                       moe_rpc_time_to_core(deadline_ns), NULL);
    f->starting = true;
    moe_mutex_lock(&c->lock);
    TAILQ_INSERT_TAIL(&c->calls, f, link);
    f->asked_to_end = c->closing;
    if (c->closing)
        grpc_call_cancel(f->core, NULL);
    moe_mutex_unlock(&c->lock);
}

void moe_rpc_in_flight_cancel(struct moe_rpc_in_flight *f)
{
    struct moe_rpc_client *c = f->client;
    moe_mutex_lock(&c->lock);
    grpc_call *core = f->core;
    f->asked_to_end = true;
    if (core != NULL)
        grpc_call_ref(core);
    moe_mutex_unlock(&c->lock);
    if (core == NULL)
        return;
    grpc_call_cancel(core, NULL);
    grpc_call_unref(core);
}

static void leave_list(struct moe_rpc_client *c, struct moe_rpc_in_flight *f) MOE_REQUIRES(c->lock)
{
    TAILQ_REMOVE(&c->calls, f, link);
    pthread_cond_broadcast(&c->idle);
}

void moe_rpc_in_flight_started(struct moe_rpc_in_flight *f)
{
    struct moe_rpc_client *c = f->client;
    moe_mutex_lock(&c->lock);
    f->starting = false;
    if (f->core == NULL)
        leave_list(c, f);
    moe_mutex_unlock(&c->lock);
}

/* What a user can do about the words of the core or of OpenSSL; NULL: they say it themselves. */
static const char *hint_for(const char *cause, enum moe_rpc_link link)
{
    static const char *const ends[] = {"Socket closed", "reset by peer", "Endpoint read failed"};
    bool ends_early = false;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        ends_early = ends_early || strstr(cause, ends[i]) != NULL;
    if (strstr(cause, "certificate verify failed") != NULL)
        return "the server's certificate does not lead to the CA of this client, or its dates do "
               "not hold";
    if (strstr(cause, "is not in peer certificate") != NULL)
        return "the server's certificate is not for the host of the endpoint";
    if (strstr(cause, "wrong version number") != NULL)
        return "the server does not use TLS there";
    if (ends_early && link == MOE_RPC_LINK_TLS)
        return "the server closed the connection; it may not accept the certificate of this client";
    if (ends_early && link == MOE_RPC_LINK_TCP)
        return "the server closed the connection; it may expect TLS";
    return NULL;
}

/* The cause at the end of the core's text ("...; last error: UNKNOWN: ...: Connection refused"). */
static struct moe_status in_plain_words(struct moe_status st, enum moe_rpc_link link)
{
    static const char no_address[] = "failed to connect to all addresses";
    static const char no_name[] = "DNS resolution failed";
    const char *cause = strrchr(st.text, ':');
    bool wrapped = strncmp(st.text, no_address, sizeof no_address - 1) == 0 ||
                   strncmp(st.text, no_name, sizeof no_name - 1) == 0;
    if (st.code != MOE_UNAVAILABLE || !wrapped || cause == NULL)
        return st;
    const char *hint = hint_for(cause + 1, link);
    return hint != NULL ? moe_error(MOE_UNAVAILABLE, st.reason, "cannot connect: %s", hint)
                        : moe_error(MOE_UNAVAILABLE, st.reason, "cannot connect:%s", cause + 1);
}

struct moe_status moe_rpc_in_flight_status(struct moe_rpc_in_flight *f, grpc_status_code code,
                                           grpc_slice text, const grpc_metadata_array *trailing)
{
    enum { RETRY_MS = 100 };
    moe_mutex_lock(&f->client->lock);
    bool ours = f->asked_to_end;
    moe_mutex_unlock(&f->client->lock);
    if (code == GRPC_STATUS_CANCELLED && !ours && trailing->count == 0)
        return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_NONE, RETRY_MS,
                               "the server dropped the call");
    return in_plain_words(moe_rpc_status_from_core(code, text, trailing), f->route->link);
}

void moe_rpc_in_flight_end(struct moe_rpc_in_flight *f)
{
    struct moe_rpc_client *c = f->client;
    struct moe_rpc_route *route = f->route;
    moe_mutex_lock(&c->lock);
    grpc_call *core = f->core;
    f->core = NULL;
    if (!f->starting)
        leave_list(c, f);
    moe_mutex_unlock(&c->lock);
    grpc_call_unref(core);
    moe_rpc_route_drop(route);
}

grpc_op moe_rpc_open_op(struct moe_rpc_channel *ch, const struct moe_rpc_call_options *options,
                        grpc_metadata *header)
{
    grpc_op op = {.op = GRPC_OP_SEND_INITIAL_METADATA};
    *header = (grpc_metadata){.key = grpc_slice_from_static_string("authorization"),
                              .value = grpc_empty_slice()};
    if (ch->token != NULL) {
        header->value = moe_rpc_token_header(ch->token);
        op.data.send_initial_metadata.count = 1;
        op.data.send_initial_metadata.metadata = header;
    }
    if (options->wait_for_ready)
        op.flags = GRPC_INITIAL_METADATA_WAIT_FOR_READY |
                   GRPC_INITIAL_METADATA_WAIT_FOR_READY_EXPLICITLY_SET;
    return op;
}

void moe_rpc_open_done(grpc_metadata *header)
{
    grpc_slice_unref(header->value);
}

/* ------------------------------------------------------------------ unary calls */

struct unary {
    struct moe_rpc_in_flight flight;
    atomic_uint references; /* one of the call in flight, one of those that start it */
    atomic_uint starters;   /* functions that start it and have not returned */
    struct moe_rpc_tag on_start, on_done;
    grpc_op open;
    grpc_metadata header;
    grpc_byte_buffer *request; /* until the call has started */
    moe_rpc_reply_fn reply;
    void *ctx;
    grpc_metadata_array initial, trailing;
    grpc_byte_buffer *message;
    grpc_status_code code;
    grpc_slice text;
};

static void drop(struct unary *p)
{
    if (atomic_fetch_sub(&p->references, 1) == 1)
        free(p);
}

static void on_done(struct moe_rpc_tag *tag, bool ok)
{
    struct unary *p = MOE_RPC_OWNER(struct unary, on_done, tag);
    (void)ok; /* the status reports failures */
    struct moe_status status = moe_rpc_in_flight_status(&p->flight, p->code, p->text, &p->trailing);
    grpc_byte_buffer *message = p->message;
    if (!moe_failed(&status) && message == NULL)
        status = moe_error(MOE_INTERNAL, MOE_REASON_NONE, "the server answered without a message");
    if (moe_failed(&status) && message != NULL) {
        grpc_byte_buffer_destroy(message);
        message = NULL;
    }
    grpc_metadata_array_destroy(&p->initial);
    grpc_metadata_array_destroy(&p->trailing);
    grpc_slice_unref(p->text);
    p->reply(p->ctx, status, moe_rpc_msg_from_buffer(message));
    moe_rpc_in_flight_end(&p->flight);
    drop(p);
}

/* The client must stay until all starters have returned. */
static void starter_returns(struct unary *p)
{
    if (atomic_fetch_sub(&p->starters, 1) != 1)
        return;
    moe_rpc_in_flight_started(&p->flight);
    drop(p);
}

/* The whole call is one batch. */
static void start_unary(struct unary *p)
{
    grpc_op ops[] = {
        p->open,
        {.op = GRPC_OP_SEND_MESSAGE, .flags = GRPC_WRITE_NO_COMPRESS},
        {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
        {.op = GRPC_OP_RECV_INITIAL_METADATA},
        {.op = GRPC_OP_RECV_MESSAGE},
        {.op = GRPC_OP_RECV_STATUS_ON_CLIENT},
    };
    ops[1].data.send_message.send_message = p->request;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &p->initial;
    ops[4].data.recv_message.recv_message = &p->message;
    ops[5].data.recv_status_on_client.trailing_metadata = &p->trailing;
    ops[5].data.recv_status_on_client.status = &p->code;
    ops[5].data.recv_status_on_client.status_details = &p->text;
    MOE_RPC_START(p->flight.core, ops, sizeof ops / sizeof *ops, &p->on_done);
    moe_rpc_open_done(&p->header);
    grpc_byte_buffer_destroy(p->request); /* the core has its references */
    starter_returns(p);
}

static void on_start(struct moe_rpc_tag *tag, bool ok)
{
    (void)ok; /* a call that is cancelled starts too, and ends at once */
    start_unary(MOE_RPC_OWNER(struct unary, on_start, tag));
}

void moe_rpc_call_unary(struct moe_rpc_channel *ch, const char *path,
                        const struct moe_rpc_call_options *options, const struct moe_rpc_out *out,
                        moe_rpc_reply_fn reply, void *ctx)
{
    struct unary *p = calloc(1, sizeof *p);
    if (p == NULL) {
        moe_rpc_out_discard(out);
        reply(
            ctx,
            moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory for a call"),
            NULL);
        return;
    }
    p->on_start.fn = on_start;
    p->on_done.fn = on_done;
    p->reply = reply;
    p->ctx = ctx;
    atomic_init(&p->references, 2); /* once started, the call may end at any time */
    grpc_metadata_array_init(&p->initial);
    grpc_metadata_array_init(&p->trailing);
    moe_rpc_in_flight_begin(&p->flight, ch, path, options->deadline_ns);
    p->open = moe_rpc_open_op(ch, options, &p->header);
    p->request = moe_rpc_out_to_buffer(out);
    const bool hand_over = options->hand_over && !moe_rpc_client_is_this_thread(ch->client);
    atomic_init(&p->starters, hand_over ? 2 : 1);
    if (!hand_over) {
        start_unary(p);
        return;
    }
    MOE_RPC_START(p->flight.core, NULL, 0, &p->on_start); /* an event for the thread */
    starter_returns(p);
}

/* ------------------------------------------------------------------ blocking calls */

struct waiter {
    struct moe_mutex lock;
    pthread_cond_t answered;
    MOE_GUARDED_BY(lock) struct {
        bool done;
        struct moe_status status;
        struct moe_rpc_msg *reply;
    };
};

static void wake_waiter(void *ctx, struct moe_status status, struct moe_rpc_msg *reply)
{
    struct waiter *w = ctx;
    moe_mutex_lock(&w->lock);
    w->status = status;
    w->reply = reply;
    w->done = true;
    pthread_cond_signal(&w->answered);
    moe_mutex_unlock(&w->lock);
}

static struct moe_status call_once(struct moe_rpc_channel *ch, const char *path,
                                   const struct moe_rpc_call_options *options,
                                   const struct moe_rpc_out *out, struct moe_rpc_msg **reply)
{
    struct waiter w = {.done = false};
    MOE_INVARIANT(!moe_rpc_client_is_this_thread(ch->client));
    moe_mutex_init(&w.lock);
    pthread_cond_init(&w.answered, NULL);
    moe_rpc_call_unary(ch, path, options, out, wake_waiter, &w);
    moe_mutex_lock(&w.lock);
    while (!w.done)
        moe_wait(&w.answered, &w.lock);
    struct moe_status st = w.status;
    *reply = w.reply;
    moe_mutex_unlock(&w.lock);
    pthread_cond_destroy(&w.answered);
    moe_mutex_destroy(&w.lock);
    return st;
}

/* The core reads errno late, so another call may have changed it (seen on systems without /sys). A
 * pending connection then fails with "no such file". */
static bool is_made_up(const struct moe_status *st)
{
    return st->code == MOE_UNAVAILABLE &&
           strcmp(st->text, "cannot connect: No such file or directory") == 0;
}

/* False when the call's deadline comes first. */
static bool pause_before(uint64_t deadline_ns, uint64_t pause_ns)
{
    if (moe_clock_ns() + pause_ns >= deadline_ns)
        return false;
    struct timespec left = {.tv_sec = (time_t)(pause_ns / MOE_NS_PER_S),
                            .tv_nsec = (long)(pause_ns % MOE_NS_PER_S)};
    while (nanosleep(&left, &left) != 0) {
    }
    return true;
}

/* The core reconnects after its first back-off and repeats the same error until then.
 * `wait_for_ready` is no solution: without a listener it would wait until the caller's deadline. */
struct moe_status moe_rpc_call_wait(struct moe_rpc_channel *ch, const char *path,
                                    const struct moe_rpc_call_options *options,
                                    const struct moe_rpc_out *out, struct moe_rpc_msg **reply)
{
    enum { PAUSE_MS = 50, TRIES_MAX = 40 };
    struct moe_status st = call_once(ch, path, options, out, reply);
    for (int i = 0; i < TRIES_MAX && is_made_up(&st) && out->part_count == 0; i++) {
        if (!pause_before(options->deadline_ns, PAUSE_MS * MOE_NS_PER_MS))
            break;
        st = call_once(ch, path, options, out, reply);
    }
    return st;
}
