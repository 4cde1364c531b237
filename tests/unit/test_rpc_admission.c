/* SPDX-License-Identifier: Apache-2.0 */
/* Reading large requests is bounded: so many at once, so many waiting, each for so long. */
#include "rpc_fixture.h"

#include <string.h>

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

/* A client that opens a Forward call and does not send its message: it has a permit. */
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

static void large_calls_wait_their_turn_and_the_rest_is_refused(void **state)
{
    struct fixture f;
    struct outcome silent[2], waiting, refused;
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_message_bytes = 1 << 20;
    config.max_reading_bytes = 2 << 20; /* two permits */
    config.max_waiting_reads = 1;
    fixture_start(&f, &config);
    struct moe_rpc_stream *first = open_silent_call(&f, &silent[0]);
    struct moe_rpc_stream *second = open_silent_call(&f, &silent[1]);

    start_call(&f, f.channel, "", "abc", 3, &waiting);
    fixture_await("the third call", &f.started, 3);
    start_call(&f, f.channel, "", "abc", 3, &refused);
    fixture_await("the refusal", &refused.over, 1);
    print_message("  %s, retry after %u ms: %s\n", moe_reason_name(refused.status.reason),
                  refused.status.retry_after_ms, refused.status.text);
    assert_int_equal(refused.status.code, MOE_RESOURCE_EXHAUSTED);
    assert_int_equal(refused.status.reason, MOE_REASON_QUEUE_FULL);
    assert_true(refused.status.retry_after_ms > 0);
    assert_int_equal(waiting.over, 0);

    moe_rpc_stream_free(first);
    fixture_await("the waiting call", &waiting.over, 1);
    assert_ok(waiting.status);
    assert_ok(fixture_call(&f, f.channel, "", "abc", 3, 20000, "abc", 3));
    moe_rpc_stream_free(second);
    fixture_stop(&f);
}

static void a_waiting_call_that_is_cancelled_leaves_the_line(void **state)
{
    struct fixture f;
    struct outcome silent, waiting[3];
    struct moe_rpc_stream *streams[3];
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_message_bytes = 1 << 20;
    config.max_reading_bytes = 1; /* still one permit */
    config.max_waiting_reads = 3;
    fixture_start(&f, &config);
    struct moe_rpc_stream *holder = open_silent_call(&f, &silent);
    for (int i = 0; i < 3; i++)
        streams[i] = open_silent_call(&f, &waiting[i]);
    for (int i = 0; i < 3; i++)
        moe_rpc_stream_cancel(streams[i]);
    fixture_await("three calls to be over", &f.done, 3);
    struct outcome last;
    start_call(&f, f.channel, "", "abc", 3, &last);
    fixture_await("the last call", &f.started, 5);
    moe_rpc_stream_cancel(holder);
    fixture_await("its answer", &last.over, 1);
    assert_ok(last.status);
    for (int i = 0; i < 3; i++)
        moe_rpc_stream_free(streams[i]);
    moe_rpc_stream_free(holder);
    fixture_stop(&f);
}

static void a_client_that_does_not_send_loses_its_permit(void **state)
{
    struct fixture f;
    struct outcome silent[3];
    struct moe_rpc_stream *streams[3];
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_message_bytes = 1 << 20;
    config.max_reading_bytes = 1 << 20;
    config.max_read_ms = 100;
    fixture_start(&f, &config);
    uint64_t began = moe_clock_ns();
    for (int i = 0; i < 3; i++)
        streams[i] = open_silent_call(&f, &silent[i]);
    assert_ok(fixture_call(&f, f.channel, "", "abc", 3, 20000, "abc", 3));
    uint64_t took = moe_clock_ns() - began;
    print_message("  three silent clients held up another one for %.1f ms\n", (double)took / 1e6);
    assert_true(took >= 300 * MOE_NS_PER_MS);
    for (int i = 0; i < 3; i++) {
        fixture_await("the end of a silent call", &silent[i].over, 1);
        assert_int_equal(silent[i].status.code, MOE_DEADLINE_EXCEEDED);
        moe_rpc_stream_free(streams[i]);
    }
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

/* Without permits, 16 clients at once cost the server 16 whole messages of the core's memory. */
static void memory_for_requests_is_bounded_by_permits(void **state)
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

static void permits_survive_clients_that_come_and_go(void **state)
{
    enum { ROUNDS = 150 };
    struct fixture f;
    static struct outcome o[ROUNDS];
    struct moe_rpc_stream *streams[ROUNDS];
    const struct outcome *asked[ROUNDS];
    size_t opened = 0, started = 0;
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_message_bytes = 1 << 20;
    config.max_reading_bytes = 2 << 20;
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
    /* Both permits are back: two at a time still pass, one is not enough for this. */
    struct outcome silent;
    struct moe_rpc_stream *s = open_silent_call(&f, &silent);
    assert_ok(fixture_call(&f, f.channel, "", "abc", 3, 20000, "abc", 3));
    moe_rpc_stream_free(s);
    fixture_stop(&f);
    /* Not ROUNDS: a call that is cancelled before the server has seen it never starts there. */
    assert_int_equal(f.done, f.started);
}

int main(void)
{
    seed_random();
    moe_rpc_tune_allocator();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(large_calls_wait_their_turn_and_the_rest_is_refused),
        cmocka_unit_test(a_waiting_call_that_is_cancelled_leaves_the_line),
        cmocka_unit_test(a_client_that_does_not_send_loses_its_permit),
        cmocka_unit_test(memory_for_requests_is_bounded_by_permits),
        cmocka_unit_test(permits_survive_clients_that_come_and_go),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
