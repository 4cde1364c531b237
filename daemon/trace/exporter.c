/* SPDX-License-Identifier: Apache-2.0 */
/* The tracer's life, and the thread that sends batches, one at a time. A collector that hangs or is
 * away holds up this thread alone; meanwhile the queue fills, and what does not fit is dropped. */
#include "base/clock.h"
#include "base/random.h"
#include "base/thread.h"
#include "daemon/endpoint.h"
#include "daemon/log.h"
#include "opentelemetry/proto/collector/trace/v1/trace_service.pb-c.h"
#include "trace/inside.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum {
    QUEUE_TRACES = 2048,
    PARENTS_PER_S = 200,
    FLUSH_MS = 500,
    SEND_MS = 5000,
    RETRY_MS = 1000, /* before the first repeat; doubles */
    RETRY_MAX_MS = 10000,
    TRIES = 4,
    STOP_MS = 1000,
    MESSAGE_BYTES = 4 << 20,
    NICE = 10, /* requests have priority on a busy host */
};

static const char export_path[] = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
static const char plain_scheme[] = "http://", tls_scheme[] = "https://";

/* ------------------------------------------------------------------ waiting */

static bool is_over(struct moe_tracer *t)
{
    return atomic_load(&t->stopping) && moe_clock_ns() >= atomic_load(&t->stop_at);
}

/* Sleeps until `until_ns`, or until the thread is woken. */
static void rest(struct moe_tracer *t, uint64_t until_ns)
{
    const struct timespec at = {.tv_sec = (time_t)(until_ns / MOE_NS_PER_S),
                                .tv_nsec = (long)(until_ns % MOE_NS_PER_S)};
    (void)sem_clockwait(&t->wake, CLOCK_MONOTONIC, &at); /* callers look at the state again */
}

/* Sleeps until `until_ns`, or until the tracer ends. */
static void pause_until(struct moe_tracer *t, uint64_t until_ns)
{
    while (moe_clock_ns() < until_ns && !atomic_load(&t->stopping))
        rest(t, until_ns);
}

/* ------------------------------------------------------------------ batches */

void moe_trace_count(struct moe_tracer *t, enum moe_trace_result result, uint64_t spans)
{
    if (t->counters[result] != NULL)
        moe_counter_add(t->counters[result], spans);
}

/* False if nothing is queued. */
static bool take_batch(struct moe_tracer *t)
{
    struct moe_trace *trace;
    t->batch_count = 0;
    t->batch_spans = 0;
    while (t->batch_count < MOE_TRACE_BATCH_TRACES && t->batch_spans < MOE_TRACE_BATCH_SPANS &&
           (trace = moe_trace_queue_take(&t->queue)) != NULL) {
        t->batch[t->batch_count++] = trace;
        t->batch_spans += trace->span_count;
    }
    return t->batch_count > 0;
}

static void free_batch(struct moe_tracer *t)
{
    for (size_t i = 0; i < t->batch_count; i++)
        moe_trace_free(t->batch[i]);
    t->batch_count = 0;
}

/* ------------------------------------------------------------------ one call */

static struct moe_status read_answer(struct moe_rpc_msg *reply, int64_t *rejected)
{
    struct moe_rpc_arena arena;
    void *message;
    MOE_TRY(moe_rpc_msg_unpack(
        reply,
        &opentelemetry__proto__collector__trace__v1__export_trace_service_response__descriptor,
        &arena, &message));
    const Opentelemetry__Proto__Collector__Trace__V1__ExportTraceServiceResponse *answer = message;
    if (answer->partial_success != NULL)
        *rejected = answer->partial_success->rejected_spans;
    return moe_ok();
}

/* The client's thread. */
static void on_answer(void *ctx, struct moe_status status, struct moe_rpc_msg *reply)
{
    struct moe_tracer *t = ctx;
    t->rejected = 0;
    if (!moe_failed(&status)) {
        /* The spans are taken, also if what the collector says of it cannot be read. */
        struct moe_status unread = read_answer(reply, &t->rejected);
        if (moe_failed(&unread))
            moe_log_debug("the collector's answer: %s", unread.text);
    }
    moe_rpc_msg_free(reply);
    t->status = status;
    atomic_store(&t->answered, true);
    (void)sem_post(&t->wake);
}

/* False if the tracer ends before the answer; the call is still in flight then. */
static bool call(struct moe_tracer *t, const uint8_t *bytes, size_t length)
{
    const struct moe_rpc_call_options options = {.deadline_ns = moe_clock_ns() + t->send_ns};
    const struct moe_rpc_out out = {.head = bytes, .head_length = length};
    atomic_store(&t->answered, false);
    moe_rpc_call_unary(t->channel, export_path, &options, &out, on_answer, t);
    /* A core that does not keep its deadline is given up, too, when the tracer ends. */
    while (!atomic_load(&t->answered) && !is_over(t))
        rest(t, atomic_load(&t->stopping) ? atomic_load(&t->stop_at) : moe_clock_ns() + t->send_ns);
    return atomic_load(&t->answered);
}

/* Those that OTLP lists; a collector that is full says when to come again. */
static bool may_repeat(const struct moe_status *st)
{
    switch (st->code) {
    case MOE_CANCELLED:
    case MOE_DEADLINE_EXCEEDED:
    case MOE_ABORTED:
    case MOE_OUT_OF_RANGE:
    case MOE_UNAVAILABLE:
    case MOE_DATA_LOSS: return true;
    case MOE_RESOURCE_EXHAUSTED: return st->retry_after_ms > 0;
    default: return false;
    }
}

static void show_result(struct moe_tracer *t, const struct moe_status *st)
{
    if (moe_failed(st) && !t->failing)
        moe_log_warn("the collector takes no spans: %s", st->text);
    if (!moe_failed(st) && t->failing)
        moe_log_info("the collector takes spans again");
    t->failing = moe_failed(st);
}

static uint64_t pause_of(const struct moe_tracer *t, const struct moe_status *st, int tries)
{
    uint64_t asked = st->retry_after_ms * MOE_NS_PER_MS, own = t->retry_ns << tries;
    return moe_earlier(asked > 0 ? asked : own, RETRY_MAX_MS * MOE_NS_PER_MS);
}

/* Sends until the collector takes the message, refuses it, or has had its tries. */
static bool deliver(struct moe_tracer *t, const uint8_t *bytes, size_t length)
{
    for (int tries = 0;; tries++) {
        if (!call(t, bytes, length))
            return false;
        show_result(t, &t->status);
        if (!moe_failed(&t->status))
            return true;
        if (tries + 1 == TRIES || !may_repeat(&t->status) || atomic_load(&t->stopping))
            return false;
        pause_until(t, moe_clock_ns() + pause_of(t, &t->status, tries));
    }
}

/* Never more than were sent, whatever the collector says. */
static uint64_t rejected_of(const struct moe_tracer *t)
{
    if (t->rejected <= 0)
        return 0;
    return (uint64_t)t->rejected < t->batch_spans ? (uint64_t)t->rejected : t->batch_spans;
}

static void send_batch(struct moe_tracer *t)
{
    size_t length;
    uint8_t *bytes = moe_trace_encode(t, &length);
    if (bytes == NULL) {
        moe_trace_count(t, MOE_TRACE_DROPPED, t->batch_spans);
    } else if (deliver(t, bytes, length)) {
        uint64_t rejected = rejected_of(t);
        moe_trace_count(t, MOE_TRACE_REJECTED, rejected);
        moe_trace_count(t, MOE_TRACE_EXPORTED, t->batch_spans - rejected);
    } else {
        moe_trace_count(t, MOE_TRACE_FAILED, t->batch_spans);
    }
    free(bytes);
    free_batch(t);
}

static struct moe_status open_channel(struct moe_tracer *t);

/* The client's thread inherits the niceness of this one, which therefore creates it. */
static void *run_exporter(void *arg)
{
    struct moe_tracer *t = arg;
    (void)setpriority(PRIO_PROCESS, 0, NICE); /* of this thread; without it, it only costs more */
    t->status = open_channel(t);
    bool failed = moe_failed(&t->status);
    (void)sem_post(&t->opened);
    if (failed)
        return NULL;
    while (!atomic_load(&t->stopping)) {
        rest(t, moe_clock_ns() + t->flush_ns);
        while (!is_over(t) && take_batch(t))
            send_batch(t);
    }
    while (take_batch(t)) {
        if (!is_over(t)) {
            send_batch(t);
            continue;
        }
        moe_trace_count(t, MOE_TRACE_DROPPED, t->batch_spans);
        free_batch(t);
    }
    return NULL;
}

/* ------------------------------------------------------------------ the tracer */

/* The address behind the scheme. */
static const char *address_of(const char *collector, bool *tls)
{
    *tls = strncmp(collector, tls_scheme, sizeof tls_scheme - 1) == 0;
    if (*tls)
        return collector + sizeof tls_scheme - 1;
    bool plain = strncmp(collector, plain_scheme, sizeof plain_scheme - 1) == 0;
    return plain ? collector + sizeof plain_scheme - 1 : collector;
}

struct moe_status moe_tracer_check(const char *setting, const char *collector, bool has_ca)
{
    bool tls;
    MOE_TRY(moe_endpoint_check(setting, address_of(collector, &tls)));
    if (tls && !has_ca)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "%s: https needs --tls-ca with the roots of the collector", setting);
    return moe_ok();
}

static struct moe_status add_metrics(struct moe_tracer *t, struct moe_metrics *metrics)
{
    static const char *const results[MOE_TRACE_RESULTS] = {"exported", "dropped", "failed",
                                                           "rejected"};
    for (int i = 0; metrics != NULL && i < MOE_TRACE_RESULTS; i++) {
        const struct moe_metric_desc desc = {
            .name = "moe_trace_spans_total",
            .help = "Spans of sampled requests, by what has become of them.",
            .labels = {{"result", results[i]}}};
        MOE_TRY(moe_metrics_add_counter(metrics, &desc, &t->counters[i]));
    }
    const struct moe_metric_desc capped = {
        .name = "moe_trace_capped_requests_total",
        .help = "Requests that their callers sample, and that have no spans: there are too many."};
    return metrics != NULL ? moe_metrics_add_counter(metrics, &capped, &t->capped) : moe_ok();
}

static struct moe_status open_channel(struct moe_tracer *t)
{
    const struct moe_tracer_config *config = t->config;
    bool tls;
    struct moe_rpc_channel_config channel = {.target = address_of(config->collector, &tls),
                                             .max_message_bytes = MESSAGE_BYTES,
                                             .own_connection = true};
    if (tls) {
        channel.trust.tls = config->trust->tls;
        channel.trust.server_name = config->trust->server_name;
    }
    MOE_TRY(moe_rpc_client_create(&t->client));
    return moe_rpc_channel_open(t->client, &channel, &t->channel);
}

static uint64_t or_default(uint32_t ms, uint32_t usual_ms)
{
    return (ms != 0 ? ms : usual_ms) * MOE_NS_PER_MS;
}

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for traces");
}

static struct moe_status start(struct moe_tracer *t, const struct moe_tracer_config *config)
{
    uint64_t seed;
    MOE_TRY(moe_random_bytes(&seed, sizeof seed));
    atomic_store(&t->id_state, seed);
    MOE_TRY(add_metrics(t, config->metrics));
    uint32_t traces = config->queue_traces != 0 ? config->queue_traces : QUEUE_TRACES;
    if (!moe_trace_queue_init(&t->queue, traces))
        return no_memory();
    t->config = config;
    int rc = moe_thread_create(&t->thread, "moe-trace", run_exporter, t);
    if (rc != 0)
        return moe_thread_failure("moe-trace", rc);
    t->started = true;
    while (sem_wait(&t->opened) != 0) /* a signal */
        ;
    return t->status;
}

struct moe_status moe_tracer_create(const struct moe_tracer_config *config, struct moe_tracer **out)
{
    *out = NULL;
    MOE_TRY(moe_tracer_check("--otlp", config->collector,
                             config->trust != NULL && config->trust->tls.ca != NULL));
    struct moe_tracer *t = calloc(1, sizeof *t);
    if (t == NULL)
        return no_memory();
    (void)sem_init(&t->wake, 0, 0);
    (void)sem_init(&t->opened, 0, 0);
    t->service_name = config->service_name;
    t->samples_roots = config->sample > 0;
    uint32_t parents = config->parents_per_s != 0 ? config->parents_per_s : PARENTS_PER_S;
    t->parent_ns = MOE_NS_PER_S / parents;
    t->parents_ns = parents * t->parent_ns;
    t->threshold = config->sample < 1 ? (uint64_t)(config->sample * 0x1p64) : UINT64_MAX;
    t->flush_ns = or_default(config->flush_ms, FLUSH_MS);
    t->send_ns = or_default(config->send_ms, SEND_MS);
    t->retry_ns = or_default(config->retry_ms, RETRY_MS);
    atomic_store(&t->instance, "");
    atomic_store(&t->slot, -1);
    struct moe_status st = start(t, config);
    if (moe_failed(&st))
        moe_tracer_destroy(t);
    else
        *out = t;
    return st;
}

void moe_tracer_destroy(struct moe_tracer *t)
{
    if (t == NULL)
        return;
    atomic_store(&t->stop_at, moe_clock_ns() + STOP_MS * MOE_NS_PER_MS);
    atomic_store(&t->stopping, true);
    (void)sem_post(&t->wake);
    if (t->started)
        pthread_join(t->thread, NULL);
    moe_rpc_channel_close(t->channel);
    moe_rpc_client_destroy(t->client);
    moe_trace_queue_free(&t->queue);
    (void)sem_destroy(&t->wake);
    (void)sem_destroy(&t->opened);
    free(t);
}

void moe_tracer_set_instance(struct moe_tracer *t, const char *id)
{
    if (t != NULL)
        atomic_store(&t->instance, id);
}

void moe_tracer_set_slot(struct moe_tracer *t, uint32_t slot)
{
    if (t != NULL)
        atomic_store(&t->slot, slot);
}
