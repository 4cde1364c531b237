/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts by the rules of W3C Trace Context, and a tracer against collectors that take spans,
 * hang, refuse or are away. */
#include "base/clock.h"
#include "base/mutex.h"
#include "base/wait.h"
#include "opentelemetry/proto/collector/trace/v1/trace_service.pb-c.h"
#include "rpc/server.h"
#include "support/check.h"
#include "support/random.h"
#include "trace/trace.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

typedef Opentelemetry__Proto__Collector__Trace__V1__ExportTraceServiceRequest Request;
typedef Opentelemetry__Proto__Trace__V1__Span Span;
typedef Opentelemetry__Proto__Common__V1__KeyValue Attribute;

enum { HANG_MAX = 16, REQUESTS_MAX = 1024, AWAIT_S = 60, CHILDREN = 2, SPANS = CHILDREN + 1 };

/* ------------------------------------------------------------------ traceparent */

#define TRACE  "4bf92f3577b34da6a3ce929d0e0e4736"
#define PARENT "00f067aa0ba902b7"

static void a_valid_traceparent_is_read(void **state)
{
    struct moe_trace_context c;
    char text[MOE_TRACE_ID_TEXT];
    (void)state;
    assert_true(moe_trace_parse("00-" TRACE "-" PARENT "-01", 55, &c));
    assert_true(c.sampled);
    assert_int_equal(c.parent_id[1], 0xf0);
    moe_trace_id_text(&c, text);
    assert_string_equal(text, TRACE);
    assert_true(moe_trace_parse("00-" TRACE "-" PARENT "-00", 55, &c));
    assert_false(c.sampled);
    /* Other flags are of later versions. */
    assert_true(moe_trace_parse("00-" TRACE "-" PARENT "-fe", 55, &c));
    assert_false(c.sampled);
    assert_true(moe_trace_parse("00-" TRACE "-" PARENT "-03", 55, &c));
    assert_true(c.sampled);
}

static void any_other_traceparent_counts_as_absent(void **state)
{
    static const char *const bad[] = {
        "",
        "00",
        "00-" TRACE "-" PARENT,
        "00-" TRACE "-" PARENT "-1",
        "00-" TRACE "-" PARENT "-01 ",
        "00-" TRACE "-" PARENT "-01-x",
        " 00-" TRACE "-" PARENT "-0",
        "01-" TRACE "-" PARENT "-01",
        "ff-" TRACE "-" PARENT "-01",
        "0x-" TRACE "-" PARENT "-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-" PARENT "-01",
        "00-" TRACE "-00F067AA0BA902B7-01",
        "00-" TRACE "-" PARENT "-0A",
        "00-00000000000000000000000000000000-" PARENT "-01",
        "00-" TRACE "-0000000000000000-01",
        "00_" TRACE "-" PARENT "-01",
        "00-" TRACE "_" PARENT "-01",
        "00-" TRACE "-" PARENT "_01",
        "00-4bf92f3577b34da6a3ce929d0e0e473g-" PARENT "-01",
    };
    static const struct moe_trace_context none;
    struct moe_trace_context c;
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        memset(&c, 0xff, sizeof c);
        if (moe_trace_parse(bad[i], strlen(bad[i]), &c))
            fail_msg("accepted: %s", bad[i]);
        assert_memory_equal(c.trace_id, none.trace_id, sizeof c.trace_id);
        assert_memory_equal(c.parent_id, none.parent_id, sizeof c.parent_id);
        assert_false(c.sampled);
    }
    char *longest = malloc(4096);
    assert_non_null(longest);
    memset(longest, '0', 4096);
    memcpy(longest, "00-" TRACE "-" PARENT "-01", 55);
    assert_false(moe_trace_parse(longest, 4096, &c));
    free(longest);
}

/* ------------------------------------------------------------------ the collector */

/* What to do with the next requests. */
enum { TAKE, HANG, REFUSE, UNAVAILABLE_TWICE, REJECT };

struct collector {
    struct moe_rpc_server *server;
    char address[64];
    atomic_int mode;
    atomic_uint calls;
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        struct moe_rpc_call *hanging[HANG_MAX];
        unsigned hanging_count;
        Request *requests[REQUESTS_MAX]; /* those that were taken */
        unsigned request_count;
    };
};

static Request *read_request(struct moe_rpc_msg *m)
{
    size_t length = moe_rpc_msg_length(m);
    uint8_t *flat = malloc(length + 1);
    assert_non_null(flat);
    assert_ok(moe_rpc_msg_flatten(m, flat, length, &length));
    moe_rpc_msg_free(m);
    Request *r = opentelemetry__proto__collector__trace__v1__export_trace_service_request__unpack(
        NULL, length, flat);
    assert_non_null(r);
    free(flat);
    return r;
}

static void reply(struct moe_rpc_call *call, const char *bytes, size_t length)
{
    const struct moe_rpc_out out = {.head = (const uint8_t *)bytes, .head_length = length};
    moe_rpc_reply(call, &out);
}

static void take(struct collector *c, struct moe_rpc_msg *m)
{
    Request *r = read_request(m);
    moe_mutex_lock(&c->lock);
    assert_true(c->request_count < REQUESTS_MAX);
    c->requests[c->request_count++] = r;
    moe_mutex_unlock(&c->lock);
}

static void hang(struct collector *c, struct moe_rpc_call *call)
{
    moe_rpc_call_ref(call);
    moe_mutex_lock(&c->lock);
    assert_true(c->hanging_count < HANG_MAX);
    c->hanging[c->hanging_count++] = call;
    moe_mutex_unlock(&c->lock);
}

static void on_export(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct collector *c = ctx;
    const unsigned number = atomic_fetch_add(&c->calls, 1);
    switch (atomic_load(&c->mode)) {
    case HANG: hang(c, call); break;
    case REFUSE:
        moe_rpc_fail(call, moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "no"));
        break;
    case UNAVAILABLE_TWICE:
        if (number < 2) {
            moe_rpc_fail(call, moe_error(MOE_UNAVAILABLE, MOE_REASON_NONE, "later"));
            break;
        }
        take(c, m);
        reply(call, "", 0);
        return;
    case REJECT: /* partial_success { rejected_spans: 2 error_message: "x" } */
        take(c, m);
        reply(call, "\x0a\x05\x08\x02\x12\x01x", 7);
        return;
    default:
        take(c, m);
        reply(call, "", 0);
        return;
    }
    moe_rpc_msg_free(m);
}

static void open_collector(struct collector *c, int mode)
{
    memset(c, 0, sizeof *c);
    moe_mutex_init(&c->lock);
    atomic_store(&c->mode, mode);
    const struct moe_rpc_method method = {
        .path = EXPORT, .kind = MOE_RPC_UNARY, .message = on_export, .ctx = c};
    const struct moe_rpc_server_config config = {
        .listen = "127.0.0.1:0",
        .max_message_bytes = 4 << 20,
        .max_reading_bytes = 64 << 20,
        .max_waiting_reads = 16,
        .methods = &method,
        .method_count = 1,
    };
    assert_ok(moe_rpc_server_start(&config, &c->server));
    (void)snprintf(c->address, sizeof c->address, "127.0.0.1:%u",
                   (unsigned)moe_rpc_server_port(c->server));
}

/* Answers the calls that hang. */
static void let_go(struct collector *c)
{
    struct moe_rpc_call *calls[HANG_MAX];
    atomic_store(&c->mode, TAKE);
    moe_mutex_lock(&c->lock);
    unsigned count = c->hanging_count;
    memcpy(calls, c->hanging, sizeof calls);
    c->hanging_count = 0;
    moe_mutex_unlock(&c->lock);
    for (unsigned i = 0; i < count; i++) {
        reply(calls[i], "", 0);
        moe_rpc_call_unref(calls[i]);
    }
}

static void close_collector(struct collector *c)
{
    let_go(c);
    moe_rpc_server_drain(c->server, moe_clock_ns() + 5 * MOE_NS_PER_S);
    moe_rpc_server_stop(c->server);
    moe_mutex_not_shared(&c->lock);
    for (unsigned i = 0; i < c->request_count; i++)
        opentelemetry__proto__collector__trace__v1__export_trace_service_request__free_unpacked(
            c->requests[i], NULL);
    moe_mutex_destroy(&c->lock);
}

/* ------------------------------------------------------------------ the tracer */

struct world {
    struct moe_metrics *metrics;
    struct moe_tracer *tracer;
};

static void open_tracer(struct world *w, const char *collector, struct moe_tracer_config config)
{
    assert_ok(moe_metrics_create(&w->metrics));
    config.collector = collector;
    config.service_name = "test";
    config.metrics = w->metrics;
    config.flush_ms = 5;
    if (config.parents_per_s == 0)
        config.parents_per_s = 1000 * 1000;
    if (config.send_ms == 0)
        config.send_ms = 1000 * AWAIT_S; /* a slow machine changes no result */
    assert_ok(moe_tracer_create(&config, &w->tracer));
}

static void close_tracer(struct world *w)
{
    moe_tracer_destroy(w->tracer);
    moe_metrics_destroy(w->metrics);
}

/* `series` ends with a blank. */
static uint64_t value_of(const struct world *w, const char *series)
{
    char *text;
    size_t length;
    assert_ok(moe_metrics_render(w->metrics, &text, &length));
    const char *at = strstr(text, series);
    assert_non_null(at);
    uint64_t value = strtoull(at + strlen(series), NULL, 10);
    free(text);
    return value;
}

static uint64_t counted(const struct world *w, const char *result)
{
    char series[64];
    (void)snprintf(series, sizeof series, "moe_trace_spans_total{result=\"%s\"} ", result);
    return value_of(w, series);
}

static void await_count(const struct world *w, const char *result, uint64_t want)
{
    uint64_t end = moe_clock_ns() + AWAIT_S * MOE_NS_PER_S, now = 0;
    while ((now = counted(w, result)) < want && moe_clock_ns() < end)
        moe_sleep_until(moe_clock_ns() + MOE_NS_PER_MS);
    assert_int_equal(now, want);
}

static void await_calls(struct collector *c, unsigned want)
{
    uint64_t end = moe_clock_ns() + AWAIT_S * MOE_NS_PER_S;
    while (atomic_load(&c->calls) < want && moe_clock_ns() < end)
        moe_sleep_until(moe_clock_ns() + MOE_NS_PER_MS);
    assert_true(atomic_load(&c->calls) >= want);
}

/* Finishes one request of SPANS spans; with `error`, it has failed. */
static void finish_one(struct world *w, const char *error)
{
    struct moe_trace_context c;
    moe_trace_begin(w->tracer, "00-" TRACE "-" PARENT "-01", 55, &c);
    assert_true(c.sampled);
    struct moe_trace *trace = moe_trace_create(w->tracer, &c, "request", 1000, CHILDREN);
    assert_non_null(trace);
    uint32_t step = moe_trace_add(trace, 0, "step", 1100, 1900);
    moe_trace_add(trace, step, "stage", 1200, 1150); /* a clock that is not exact */
    moe_trace_set_text(trace, "rpc.system", "grpc");
    moe_trace_set_number(trace, "moe.tokens", -7);
    if (error != NULL)
        moe_trace_fail(trace, error);
    moe_trace_finish(w->tracer, trace, 2000);
}

static const Attribute *find(Attribute *const *list, size_t count, const char *key)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(list[i]->key, key) == 0)
            return list[i];
    fail_msg("no attribute %s", key);
    return NULL;
}

static const Span *find_span(const Request *r, const char *name)
{
    const Opentelemetry__Proto__Trace__V1__ScopeSpans *scope = r->resource_spans[0]->scope_spans[0];
    for (size_t i = 0; i < scope->n_spans; i++)
        if (strcmp(scope->spans[i]->name, name) == 0)
            return scope->spans[i];
    fail_msg("no span %s", name);
    return NULL;
}

static void check_child(const Span *child, const Span *parent)
{
    assert_int_equal(child->parent_span_id.len, 8);
    assert_memory_equal(child->parent_span_id.data, parent->span_id.data, 8);
    assert_memory_equal(child->trace_id.data, parent->trace_id.data, 16);
    assert_int_equal(child->kind, 1);
    assert_true(child->start_time_unix_nano >= parent->start_time_unix_nano);
    assert_true(child->end_time_unix_nano <= parent->end_time_unix_nano);
    assert_true(child->end_time_unix_nano >= child->start_time_unix_nano);
}

static void spans_arrive_as_a_tree_below_the_callers_span(void **state)
{
    struct collector c;
    struct world w;
    static const uint8_t parent[] = {0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7};
    (void)state;
    open_collector(&c, TAKE);
    open_tracer(&w, c.address, (struct moe_tracer_config){0});
    moe_tracer_set_instance(w.tracer, "w3");
    moe_tracer_set_slot(w.tracer, 3);
    finish_one(&w, "bad byte \xff here");
    await_count(&w, "exported", SPANS);
    moe_mutex_lock(&c.lock);
    assert_int_equal(c.request_count, 1);
    const Request *r = c.requests[0];
    const Opentelemetry__Proto__Resource__V1__Resource *resource = r->resource_spans[0]->resource;
    Attribute *const *of = resource->attributes;
    assert_string_equal(find(of, resource->n_attributes, "service.name")->value->string_value,
                        "test");
    assert_string_equal(
        find(of, resource->n_attributes, "service.instance.id")->value->string_value, "w3");
    assert_int_equal(find(of, resource->n_attributes, "moe.slot")->value->int_value, 3);
    const Span *first = find_span(r, "request"), *step = find_span(r, "step");
    assert_int_equal(first->kind, 2);
    assert_int_equal(first->parent_span_id.len, sizeof parent);
    assert_memory_equal(first->parent_span_id.data, parent, sizeof parent);
    assert_int_equal(first->trace_id.data[0], 0x4b);
    assert_int_equal(first->flags, 0x301);
    assert_int_equal(first->end_time_unix_nano - first->start_time_unix_nano, 1000);
    assert_int_equal(find(first->attributes, first->n_attributes, "moe.tokens")->value->int_value,
                     -7);
    assert_non_null(first->status);
    assert_int_equal(first->status->code, 2);
    assert_string_equal(first->status->message, "bad byte \\xff here");
    check_child(step, first);
    check_child(find_span(r, "stage"), step);
    moe_mutex_unlock(&c.lock);
    close_tracer(&w);
    close_collector(&c);
}

static void a_full_queue_drops_and_counts(void **state)
{
    enum { ROOM = 4, MORE = 10 };
    struct collector c;
    struct world w;
    (void)state;
    open_collector(&c, HANG);
    open_tracer(&w, c.address, (struct moe_tracer_config){.queue_traces = ROOM});
    finish_one(&w, NULL);
    await_calls(&c, 1); /* it hangs with the first request; the queue is empty */
    for (int i = 0; i < MORE; i++)
        finish_one(&w, NULL);
    assert_int_equal(counted(&w, "dropped"), (MORE - ROOM) * SPANS);
    assert_int_equal(counted(&w, "exported"), 0);
    let_go(&c);
    await_count(&w, "exported", (1 + ROOM) * SPANS);
    assert_int_equal(counted(&w, "dropped"), (MORE - ROOM) * SPANS);
    close_tracer(&w);
    close_collector(&c);
}

static void a_collector_that_hangs_is_left_at_the_limit(void **state)
{
    enum { TRIES = 4 };
    struct collector c;
    struct world w;
    (void)state;
    open_collector(&c, HANG);
    open_tracer(&w, c.address, (struct moe_tracer_config){.send_ms = 20, .retry_ms = 1});
    finish_one(&w, NULL);
    await_count(&w, "failed", SPANS);
    assert_true(atomic_load(&c.calls) <= TRIES); /* a call may end before it has a connection */
    close_tracer(&w);
    close_collector(&c);
}

static void a_tracer_ends_while_the_collector_hangs(void **state)
{
    struct collector c;
    struct world w;
    (void)state;
    open_collector(&c, HANG);
    open_tracer(&w, c.address, (struct moe_tracer_config){0});
    finish_one(&w, NULL);
    await_calls(&c, 1);
    for (int i = 0; i < 100; i++)
        finish_one(&w, NULL);
    uint64_t begin = moe_clock_ns();
    moe_tracer_destroy(w.tracer);
    print_message("  ended after %.3f s\n", (double)(moe_clock_ns() - begin) / 1e9);
    assert_int_equal(counted(&w, "failed") + counted(&w, "dropped"), 101 * SPANS);
    moe_metrics_destroy(w.metrics);
    close_collector(&c);
}

static void without_a_collector_spans_fail_and_are_counted(void **state)
{
    struct collector c;
    struct world w;
    (void)state;
    open_collector(&c, TAKE);
    close_collector(&c); /* its port is free now */
    open_tracer(&w, c.address, (struct moe_tracer_config){.retry_ms = 1});
    finish_one(&w, NULL);
    await_count(&w, "failed", SPANS);
    close_tracer(&w);
}

static void a_refused_message_is_not_repeated(void **state)
{
    struct collector c;
    struct world w;
    (void)state;
    open_collector(&c, REFUSE);
    open_tracer(&w, c.address, (struct moe_tracer_config){.retry_ms = 1});
    finish_one(&w, NULL);
    await_count(&w, "failed", SPANS);
    assert_int_equal(atomic_load(&c.calls), 1);
    close_tracer(&w);
    close_collector(&c);
}

static void an_unavailable_collector_is_asked_again(void **state)
{
    struct collector c;
    struct world w;
    (void)state;
    open_collector(&c, UNAVAILABLE_TWICE);
    open_tracer(&w, c.address, (struct moe_tracer_config){.retry_ms = 1});
    finish_one(&w, NULL);
    await_count(&w, "exported", SPANS);
    assert_int_equal(atomic_load(&c.calls), 3);
    assert_int_equal(counted(&w, "failed"), 0);
    close_tracer(&w);
    close_collector(&c);
}

static void rejected_spans_are_counted(void **state)
{
    struct collector c;
    struct world w;
    (void)state;
    open_collector(&c, REJECT);
    open_tracer(&w, c.address, (struct moe_tracer_config){0});
    finish_one(&w, NULL);
    await_count(&w, "rejected", 2);
    await_count(&w, "exported", SPANS - 2);
    close_tracer(&w);
    close_collector(&c);
}

static void the_end_sends_what_is_queued(void **state)
{
    enum { MANY = 700 }; /* several messages */
    struct collector c;
    struct world w;
    (void)state;
    open_collector(&c, TAKE);
    assert_ok(moe_metrics_create(&w.metrics));
    const struct moe_tracer_config config = {.collector = c.address,
                                             .service_name = "test",
                                             .metrics = w.metrics,
                                             .flush_ms = 1000 * AWAIT_S};
    assert_ok(moe_tracer_create(&config, &w.tracer));
    finish_one(&w, NULL);
    moe_tracer_destroy(w.tracer);
    /* On a machine so slow that a second was not enough, they are counted in another way. */
    assert_int_equal(counted(&w, "exported") + counted(&w, "failed") + counted(&w, "dropped"),
                     SPANS);
    moe_metrics_destroy(w.metrics);

    open_tracer(&w, c.address, (struct moe_tracer_config){0});
    for (int i = 0; i < MANY; i++)
        finish_one(&w, NULL);
    await_count(&w, "exported", MANY * SPANS);
    close_tracer(&w);
    close_collector(&c);
}

/* ------------------------------------------------------------------ sampling */

static unsigned sampled_of(double share, unsigned requests, const char *parent)
{
    struct world w;
    unsigned count = 0;
    open_tracer(&w, "127.0.0.1:9", (struct moe_tracer_config){.sample = share});
    for (unsigned i = 0; i < requests; i++) {
        struct moe_trace_context c;
        moe_trace_begin(w.tracer, parent, parent != NULL ? strlen(parent) : 0, &c);
        count += c.sampled;
    }
    close_tracer(&w);
    return count;
}

static void roots_are_sampled_by_share_and_others_by_their_parent(void **state)
{
    enum { MANY = 100000 };
    (void)state;
    assert_int_equal(sampled_of(0, MANY, NULL), 0);
    assert_int_equal(sampled_of(1, MANY, NULL), MANY);
    unsigned some = sampled_of(0.25, MANY, NULL);
    print_message("  0.25 of %d: %u\n", MANY, some);
    assert_in_range(some, MANY / 4 - 1400, MANY / 4 + 1400); /* 10 standard deviations */
    assert_int_equal(sampled_of(1, MANY, "00-" TRACE "-" PARENT "-00"), 0);
    assert_int_equal(sampled_of(0, MANY, "00-" TRACE "-" PARENT "-01"), MANY);
    assert_int_equal(sampled_of(0, MANY, "00-" TRACE "-" PARENT "-01x"), 0); /* as without one */
    assert_int_equal(sampled_of(1, MANY, "nonsense"), MANY);
    struct moe_trace_context c;
    moe_trace_begin(NULL, "00-" TRACE "-" PARENT "-01", 55, &c);
    assert_false(c.sampled);
}

/* A caller that samples every request gets spans for as many as the rate allows. */
static void callers_sample_up_to_a_rate(void **state)
{
    enum { RATE = 100, MANY = 5000 };
    struct world w;
    struct moe_trace_context c;
    unsigned sampled = 0;
    (void)state;
    open_tracer(&w, "127.0.0.1:9", (struct moe_tracer_config){.parents_per_s = RATE});
    const uint64_t begin = moe_clock_ns();
    for (unsigned i = 0; i < MANY; i++) {
        moe_trace_begin(w.tracer, "00-" TRACE "-" PARENT "-01", 55, &c);
        sampled += c.sampled;
        char id[MOE_TRACE_ID_TEXT];
        moe_trace_id_text(&c, id);
        assert_string_equal(id, TRACE); /* logs name the trace of every request */
    }
    const uint64_t lasted = moe_clock_ns() - begin;
    assert_in_range(sampled, RATE, RATE + 1 + lasted * RATE / MOE_NS_PER_S);
    assert_int_equal(value_of(&w, "\nmoe_trace_capped_requests_total "), MANY - sampled);
    moe_sleep_until(moe_clock_ns() + 50 * MOE_NS_PER_MS); /* room for five */
    for (unsigned i = 0; i < 4; i++) {
        moe_trace_begin(w.tracer, "00-" TRACE "-" PARENT "-01", 55, &c);
        assert_true(c.sampled);
    }
    close_tracer(&w);
}

static int compare_ids(const void *a, const void *b)
{
    return memcmp(a, b, 16);
}

static void roots_have_different_ids(void **state)
{
    enum { MANY = 10000 };
    struct world w;
    static uint8_t ids[MANY][16];
    char text[MOE_TRACE_ID_TEXT];
    (void)state;
    open_tracer(&w, "127.0.0.1:9", (struct moe_tracer_config){.sample = 1});
    for (int i = 0; i < MANY; i++) {
        struct moe_trace_context c;
        moe_trace_begin(w.tracer, NULL, 0, &c);
        moe_trace_id_text(&c, text);
        assert_int_equal(strlen(text), 32);
        memcpy(ids[i], c.trace_id, 16);
    }
    qsort(ids, MANY, 16, compare_ids);
    for (int i = 1; i < MANY; i++)
        assert_memory_not_equal(ids[i - 1], ids[i], 16);
    close_tracer(&w);
}

static void an_address_that_is_no_collectors_is_refused(void **state)
{
    (void)state;
    assert_ok(moe_tracer_check("--otlp", "collector:4317", false));
    assert_ok(moe_tracer_check("--otlp", "http://collector:4317", false));
    assert_ok(moe_tracer_check("--otlp", "https://[::1]:4317", true));
    assert_refused(moe_tracer_check("--otlp", "https://collector:4317", false),
                   MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID);
    static const char *const bad[] = {"",          "collector", "http://",
                                      "https://a", "ftp://a:1", "http://a:1/v1/traces",
                                      "a:0",       "a:70000"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_refused(moe_tracer_check("--otlp", bad[i], true), MOE_INVALID_ARGUMENT,
                       MOE_REASON_CONFIG_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_valid_traceparent_is_read),
        cmocka_unit_test(any_other_traceparent_counts_as_absent),
        cmocka_unit_test(spans_arrive_as_a_tree_below_the_callers_span),
        cmocka_unit_test(a_full_queue_drops_and_counts),
        cmocka_unit_test(a_collector_that_hangs_is_left_at_the_limit),
        cmocka_unit_test(a_tracer_ends_while_the_collector_hangs),
        cmocka_unit_test(without_a_collector_spans_fail_and_are_counted),
        cmocka_unit_test(a_refused_message_is_not_repeated),
        cmocka_unit_test(an_unavailable_collector_is_asked_again),
        cmocka_unit_test(rejected_spans_are_counted),
        cmocka_unit_test(the_end_sends_what_is_queued),
        cmocka_unit_test(roots_are_sampled_by_share_and_others_by_their_parent),
        cmocka_unit_test(callers_sample_up_to_a_rate),
        cmocka_unit_test(roots_have_different_ids),
        cmocka_unit_test(an_address_that_is_no_collectors_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
