/* SPDX-License-Identifier: Apache-2.0 */
/* Reading messages is bounded: so many bytes at once, so many that wait, none for long. Clients
 * that misbehave are raw: they write frames. */
#include "daemon/metrics.h"
#include "rpc_fixture.h"
#include "rpc_raw.h"

#include <arpa/inet.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct outcome {
    atomic_uint over;
    struct moe_status status;
};

static void keep_outcome(void *ctx, struct moe_status status, struct moe_rpc_msg *reply)
{
    struct outcome *o = ctx;
    moe_rpc_msg_free(reply);
    o->status = status;
    atomic_fetch_add(&o->over, 1);
}

static void ignore_message(void *ctx, struct moe_rpc_msg *m)
{
    (void)ctx;
    moe_rpc_msg_free(m);
}

static void stream_closed(void *ctx, struct moe_status status)
{
    keep_outcome(ctx, status, NULL);
}

/* A client that opens a Forward call and does not send its message. */
static struct moe_rpc_stream *open_silent_call(struct fixture *f, struct outcome *o)
{
    static const struct moe_rpc_stream_events events = {.message = ignore_message,
                                                        .closed = stream_closed};
    struct moe_rpc_call_options options = fixture_options(0);
    struct moe_rpc_stream *s;
    unsigned before = f->started;
    memset(o, 0, sizeof *o);
    assert_ok(moe_rpc_stream_open(f->channel, UNARY_PATH, &options, &events, o, &s));
    fixture_await("the call to reach the server", &f->started, before + 1);
    return s;
}

static void start_call(struct fixture *f, struct moe_rpc_channel *ch, const char *model,
                       const void *x, size_t length, struct outcome *o)
{
    uint8_t head[256];
    struct moe_rpc_call_options options = fixture_options(0);
    struct moe_rpc_out out = fixture_request(f, model, x, length, head);
    memset(o, 0, sizeof *o);
    moe_rpc_call_unary(ch, UNARY_PATH, &options, &out, keep_outcome, o);
}

/* A server with metrics. */
static struct moe_metrics *start_counted(struct fixture *f, struct moe_rpc_server_config *config)
{
    struct moe_metrics *metrics;
    assert_ok(moe_metrics_create(&metrics));
    config->metrics = metrics;
    fixture_start(f, config);
    return metrics;
}

static void stop_counted(struct fixture *f, struct moe_metrics *metrics)
{
    fixture_stop(f);
    moe_metrics_destroy(metrics);
}

static double counted(struct moe_metrics *m, const char *series)
{
    char *text = NULL;
    size_t length;
    assert_ok(moe_metrics_render(m, &text, &length));
    const char *at = strstr(text, series);
    assert_non_null(at);
    double value = strtod(at + strlen(series), NULL);
    free(text);
    return value;
}

static void await_count(struct moe_metrics *m, const char *series, double at_least)
{
    const uint64_t give_up = moe_clock_ns() + 20 * MOE_NS_PER_S;
    while (counted(m, series) < at_least) {
        assert_true(moe_clock_ns() < give_up);
        usleep(20000);
    }
}

/* ------------------------------------------------------------------ waiting */

#define WAITING  "moe_rpc_uploads_waiting{server=\"data\"} "
#define TOO_SLOW "moe_rpc_uploads_refused_total{server=\"data\",reason=\"too_slow\"} "
#define FLOODS   "moe_rpc_connections_closed_total{server=\"data\",reason=\"flood\"} "
#define TOO_MUCH "moe_rpc_uploads_refused_total{server=\"data\",reason=\"too_large\"} "

/* Stalled uploads have a place in line and no bytes, until they are ended for their rate. Other
 * clients do not notice. */
static void stalled_uploads_harm_no_small_call_and_end_soon(void **state)
{
    enum { STALLED = 8, MIB = 1 << 20 };
    struct fixture f;
    struct outcome large;
    int fds[STALLED];
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_reading_bytes = 64 * MIB;
    struct moe_metrics *metrics = start_counted(&f, &config);
    for (unsigned i = 0; i < STALLED; i++) {
        fds[i] = raw_connect(&f);
        raw_call(fds[i], 1, UNARY_PATH, 40 * MIB, i % 2 == 0 ? 1000 : 60000);
    }
    fixture_await("the stalled calls", &f.started, STALLED);
    await_count(metrics, WAITING, STALLED);
    uint64_t began = moe_clock_ns();
    for (int i = 0; i < 100; i++)
        assert_ok(fixture_call(&f, f.channel, "", "abc", 3, 20000, "abc", 3));
    uint64_t small_ns = (moe_clock_ns() - began) / 100;
    uint8_t *x = calloc(1, 8 * MIB);
    assert_non_null(x);
    start_call(&f, f.channel, "", x, 8 * MIB, &large);
    fixture_await("the large call", &large.over, 1);
    assert_ok(large.status);
    print_message("  next to %d stalled uploads: small calls %.1f ms, a large one %.1f s\n",
                  STALLED, (double)small_ns / 1e6, (double)(moe_clock_ns() - began) / 1e9);
    assert_true(small_ns < 200 * MOE_NS_PER_MS);
    assert_true(moe_clock_ns() - began < MOE_NS_PER_S + 100 * small_ns);
    await_count(metrics, TOO_SLOW, STALLED);
    for (int i = 0; i < STALLED; i++)
        close(fds[i]);
    free(x);
    stop_counted(&f, metrics);
}

static void a_line_without_a_place_refuses(void **state)
{
    enum { MIB = 1 << 20 };
    struct fixture f;
    struct outcome refused;
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_reading_bytes = 16 * MIB;
    config.max_waiting_reads = 1;
    struct moe_metrics *metrics = start_counted(&f, &config);
    int waits = raw_connect(&f);
    raw_call(waits, 1, UNARY_PATH, 12 * MIB, 0);
    fixture_await("the first call", &f.started, 1);
    await_count(metrics, WAITING, 1);
    uint8_t *x = calloc(1, 2 * MIB);
    assert_non_null(x);
    start_call(&f, f.channel, "", x, 2 * MIB, &refused);
    fixture_await("the refusal", &refused.over, 1);
    print_message("  %s, retry after %u ms: %s\n", moe_reason_name(refused.status.reason),
                  refused.status.retry_after_ms, refused.status.text);
    assert_int_equal(refused.status.code, MOE_RESOURCE_EXHAUSTED);
    assert_int_equal(refused.status.reason, MOE_REASON_QUEUE_FULL);
    assert_true(refused.status.retry_after_ms > 0);
    close(waits);
    fixture_await("the end of the first call", &f.done, 2);
    start_call(&f, f.channel, "", x, 2 * MIB, &refused);
    fixture_await("the answer", &refused.over, 1);
    assert_ok(refused.status);
    free(x);
    stop_counted(&f, metrics);
}

/* Announced with 2 GiB - 1: refused before the body, and nothing is kept for it. */
static void too_long_a_message_is_refused_by_its_prefix(void **state)
{
    struct fixture f;
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    struct moe_metrics *metrics = start_counted(&f, &config);
    int fd = raw_connect(&f);
    raw_call(fd, 1, UNARY_PATH, INT32_MAX, 0);
    raw_call(fd, 3, STREAM_PATH, INT32_MAX, 0);
    fixture_await("both ends", &f.done, 2);
    await_count(metrics, TOO_MUCH, 2);
    assert_ok(fixture_call(&f, f.channel, "", "abc", 3, 20000, "abc", 3));
    close(fd);
    stop_counted(&f, metrics);
}

static void a_call_without_a_message_ends(void **state)
{
    struct fixture f;
    struct outcome silent[3];
    struct moe_rpc_stream *streams[3];
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_read_ms = 100;
    fixture_start(&f, &config);
    for (int i = 0; i < 3; i++)
        streams[i] = open_silent_call(&f, &silent[i]);
    assert_ok(fixture_call(&f, f.channel, "", "abc", 3, 20000, "abc", 3));
    for (int i = 0; i < 3; i++) {
        fixture_await("the end of a silent call", &silent[i].over, 1);
        assert_int_equal(silent[i].status.code, MOE_DEADLINE_EXCEEDED);
        moe_rpc_stream_free(streams[i]);
    }
    fixture_stop(&f);
}

/* Messages without their last byte, on calls and streams: their rate ends them. */
static void half_sent_messages_end_for_their_rate(void **state)
{
    enum { CALLS = 20 };
    struct fixture f;
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    struct moe_metrics *metrics = start_counted(&f, &config);
    int fd = raw_connect(&f);
    for (uint32_t i = 0; i < CALLS; i++)
        raw_call(fd, 2 * i + 1, i % 2 == 0 ? UNARY_PATH : STREAM_PATH, 1000, 999);
    fixture_await("all ends", &f.done, CALLS);
    await_count(metrics, TOO_SLOW, CALLS);
    assert_ok(fixture_call(&f, f.channel, "", "abc", 3, 20000, "abc", 3));
    close(fd);
    stop_counted(&f, metrics);
}

/* A client that never acknowledges SETTINGS: the core would let it open any number of streams. */
static void a_client_with_too_many_open_streams_is_disconnected(void **state)
{
    enum { STREAMS = 8, EARLY = 100 };
    struct fixture f;
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_concurrent_streams = STREAMS;
    struct moe_metrics *metrics = start_counted(&f, &config);
    int fd = raw_connect(&f);
    for (uint32_t i = 0; i < STREAMS + EARLY; i++)
        raw_call(fd, 2 * i + 1, UNARY_PATH, 1000, 0);
    fixture_await("all streams", &f.started, STREAMS + EARLY);
    raw_headers(fd, 2 * (STREAMS + EARLY) + 1, UNARY_PATH);
    await_count(metrics, FLOODS, 1);
    fixture_await("the ends of all", &f.done, STREAMS + EARLY);
    assert_int_equal(f.started, STREAMS + EARLY);
    assert_ok(fixture_call(&f, f.channel, "", "abc", 3, 20000, "abc", 3));
    close(fd);
    stop_counted(&f, metrics);
}

/* ------------------------------------------------------------------ turns */

/* A server of one shard. A stream is swallowed; its message number HELD keeps the shard's thread
 * until `open` is set, and some that follow are slow until the unary call has come. */
enum { MESSAGES = 12000, HELD = 100, SLOW = 2000, SLOW_US = 5000 };
struct swallowing {
    atomic_uint seen, held, open, called;
    atomic_uint before; /* messages between the held one and the call */
};

static void swallow(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct swallowing *s = ctx;
    if (m == NULL) {
        moe_rpc_finish(call);
        return;
    }
    moe_rpc_msg_free(m);
    const unsigned seen = atomic_fetch_add(&s->seen, 1) + 1;
    if (seen == HELD)
        atomic_store(&s->held, 1);
    while (seen == HELD && atomic_load(&s->open) == 0)
        usleep(1000);
    if (seen > HELD && seen <= HELD + SLOW && atomic_load(&s->called) == 0)
        usleep(SLOW_US);
    moe_rpc_read_next(call);
}

static void answer_call(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct swallowing *s = ctx;
    moe_rpc_msg_free(m);
    if (atomic_load(&s->open) != 0 && atomic_fetch_add(&s->called, 1) == 0)
        atomic_store(&s->before, atomic_load(&s->seen) - HELD);
    moe_rpc_reply(call, &(struct moe_rpc_out){.head = (const uint8_t *)"", .head_length = 0});
}

/* Messages that wait in the core do not keep the sockets of other clients waiting. */
static void a_pile_of_messages_lets_others_pass(void **state)
{
    enum { PER_FRAME = 2000, PREFIX = 5 };
    static uint8_t messages[PER_FRAME * PREFIX]; /* all empty */
    struct swallowing s = {0};
    const struct moe_rpc_method methods[] = {
        {.path = UNARY_PATH, .kind = MOE_RPC_UNARY, .message = answer_call, .ctx = &s},
        {.path = STREAM_PATH, .kind = MOE_RPC_STREAM, .message = swallow, .ctx = &s}};
    struct moe_rpc_server_config config = fixture_config();
    struct outcome first, second;
    struct fixture f;
    (void)state;
    config.methods = methods;
    config.method_count = 2;
    config.shards = 1;
    fixture_start(&f, &config);
    start_call(&f, f.channel, "", "abc", 3, &first);
    fixture_await("a connection", &first.over, 1);
    int fd = raw_connect(&f);
    raw_headers(fd, 1, STREAM_PATH);
    for (unsigned i = 0; i < MESSAGES / PER_FRAME; i++) {
        raw_frame(fd, RAW_DATA, 0, 1, messages, sizeof messages);
        usleep(1000000 / 100000 * 2 * PER_FRAME); /* half of the rate of small messages */
    }
    fixture_await("the held message", &s.held, 1);
    start_call(&f, f.channel, "", "abc", 3, &second);
    usleep(200000); /* for the call to reach the server's socket; later is no error */
    atomic_store(&s.open, 1);
    fixture_await("the call", &second.over, 1);
    printf("%u messages of the pile came before the call\n", atomic_load(&s.before));
    assert_in_range(s.before, 0, SLOW / 2);
    fixture_await("the pile", &s.seen, MESSAGES);
    close(fd);
    fixture_stop(&f);
}

static unsigned long peak_kib(void)
{
    unsigned long kib = 0;
    char line[256];
    FILE *status = fopen("/proc/self/status", "r");
    assert_non_null(status);
    while (fgets(line, sizeof line, status) != NULL)
        sscanf(line, "VmHWM: %lu", &kib);
    fclose(status);
    return kib;
}

/* Sends `x` itself, which must stay: any growth of memory is the server's. */
static void start_call_in_place(struct moe_rpc_channel *ch, const void *x, size_t length,
                                struct outcome *o)
{
    static const uint8_t head[] = "\x0a\x04sink"; /* model = "sink" */
    struct moe_rpc_call_options options = fixture_options(0);
    memset(o, 0, sizeof *o);
    moe_rpc_call_unary(ch, UNARY_PATH, &options,
                       &(struct moe_rpc_out){.head = head,
                                             .head_length = sizeof head - 1,
                                             .parts[0] = {.field = 15, .data = x, .length = length},
                                             .part_count = 1},
                       keep_outcome, o);
}

/* Without a budget, 16 clients at once cost the server 16 whole messages of the core's memory. */
static void memory_for_requests_is_bounded(void **state)
{
    enum { CALLS = 16, BYTES = 16 << 20 };
    struct fixture f;
    struct outcome o[CALLS];
    struct moe_rpc_channel *channels[CALLS];
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_message_bytes = BYTES + 1024;
    config.max_reading_bytes = 2 * config.max_message_bytes;
    fixture_start(&f, &config);
    uint8_t *x = malloc(BYTES);
    assert_non_null(x);
    memset(x, 1, BYTES);
    for (int i = 0; i < CALLS; i++)
        channels[i] = fixture_channel(&f, 0);
    unsigned long before = peak_kib();
    for (int i = 0; i < CALLS; i++)
        start_call_in_place(channels[i], x, BYTES, &o[i]);
    for (int i = 0; i < CALLS; i++) {
        fixture_await("an answer", &o[i].over, 1);
        assert_ok(o[i].status);
    }
    unsigned long after = peak_kib(), grown = after > before ? (after - before) >> 10 : 0;
    print_message("  %d x %d MiB at once: server's memory grew by %lu MiB\n", CALLS, BYTES >> 20,
                  grown);
#ifndef __SANITIZE_ADDRESS__
    assert_true(grown < CALLS * (BYTES >> 20) * 3 / 4);
#endif
    for (int i = 0; i < CALLS; i++)
        moe_rpc_channel_close(channels[i]);
    free(x);
    fixture_stop(&f);
}

static void the_budget_survives_clients_that_come_and_go(void **state)
{
    enum { ROUNDS = 150 };
    struct fixture f;
    static struct outcome o[ROUNDS];
    struct moe_rpc_stream *streams[ROUNDS];
    const struct outcome *asked[ROUNDS];
    size_t opened = 0, started = 0;
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_reading_bytes = 16 << 20;
    config.max_waiting_reads = 1000;
    config.shards = 4;
    fixture_start(&f, &config);
    for (size_t i = 0; i < ROUNDS; i++) {
        if (one_in(2)) {
            streams[opened] = open_silent_call(&f, &o[i]);
            if (opened++ % 2 == 1)
                moe_rpc_stream_cancel(streams[random_below((uint32_t)opened)]);
        } else {
            start_call(&f, f.channel, one_in(2) ? "" : "thread", "abc", 3, &o[i]);
            asked[started++] = &o[i];
        }
    }
    for (size_t i = 0; i < opened; i++)
        moe_rpc_stream_free(streams[i]);
    for (size_t i = 0; i < started; i++) {
        fixture_await("an answer", &asked[i]->over, 1);
        assert_ok(asked[i]->status);
    }
    assert_ok(fixture_call(&f, f.channel, "", "abc", 3, 20000, "abc", 3));
    fixture_stop(&f);
    /* Not ROUNDS: a call that is cancelled before the server has seen it never starts there. */
    assert_int_equal(f.done, f.started);
}

/* The quota of the core is full of messages that the budget allows. The core then ends calls that
 * hold memory; those of others go on. */
static void at_a_full_quota_calls_that_hold_memory_end(void **state)
{
    enum { HOLDERS = 12, CALLS = 4, LIGHT = 10, MIB = 1 << 20 };
    static const struct moe_rpc_stream_events events = {.message = ignore_message,
                                                        .closed = stream_closed};
    struct fixture f;
    struct outcome light, idle = {0};
    struct moe_rpc_stream *stream;
    struct moe_rpc_call_options options = fixture_options(0);
    int fds[HOLDERS];
    unsigned failed = 0;
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_core_bytes = 4 * MIB;
    fixture_start(&f, &config);
    assert_ok(fixture_call(&f, f.channel, "", "abc", 3, 20000, "abc", 3));
    assert_ok(moe_rpc_stream_open(f.channel, STREAM_PATH, &options, &events, &idle, &stream));
    for (unsigned i = 0; i < HOLDERS; i++) {
        fds[i] = raw_connect(&f);
        for (uint32_t j = 0; j < CALLS; j++)
            raw_call(fds[i], 2 * j + 1, UNARY_PATH, MIB - 1000, 60000);
    }
    fixture_await("an end of a holder", &f.done, 2);
    for (int i = 0; i < LIGHT; i++) {
        start_call(&f, f.channel, "", "abc", 3, &light);
        fixture_await("an answer", &light.over, 1);
        failed += moe_failed(&light.status);
    }
    print_message("  %u calls over of %u; light calls failed: %u of %d; an idle stream: %s\n",
                  f.done, f.started, failed, LIGHT, idle.over ? "ended" : "lives");
    assert_true(failed < LIGHT);
    for (int i = 0; i < HOLDERS; i++)
        close(fds[i]);
    moe_rpc_stream_free(stream);
    for (int i = 0; i < 100; i++) {
        start_call(&f, f.channel, "", "abc", 3, &light);
        fixture_await("an answer", &light.over, 1);
        if (!moe_failed(&light.status))
            break;
        usleep(20000);
    }
    assert_ok(light.status);
    fixture_stop(&f);
}

int main(void)
{
    seed_random();
    moe_rpc_tune_allocator();
    assert_ok(moe_rpc_force_polling()); /* as daemons do */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stalled_uploads_harm_no_small_call_and_end_soon),
        cmocka_unit_test(a_line_without_a_place_refuses),
        cmocka_unit_test(too_long_a_message_is_refused_by_its_prefix),
        cmocka_unit_test(a_call_without_a_message_ends),
        cmocka_unit_test(half_sent_messages_end_for_their_rate),
        cmocka_unit_test(a_client_with_too_many_open_streams_is_disconnected),
        cmocka_unit_test(a_pile_of_messages_lets_others_pass),
        cmocka_unit_test(memory_for_requests_is_bounded),
        cmocka_unit_test(at_a_full_quota_calls_that_hold_memory_end),
        cmocka_unit_test(the_budget_survives_clients_that_come_and_go),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
