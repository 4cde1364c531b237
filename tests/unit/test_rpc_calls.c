/* SPDX-License-Identifier: Apache-2.0 */
/* Unary calls and streams over loopback: sizes, threads, deadlines, cancellation, errors. Every
 * test ends with a check that each part lent to the transport came back exactly once. */
#include "rpc_fixture.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static void tensors_of_every_size_come_back_unchanged(void **state)
{
    static const size_t sizes[] = {
        0,     1,      23,     24,      4095,    16384 - 8,     65535,   65536,
        65537, 131071, 131072, 1048575, 1048577, (8 << 20) - 5, 8 << 20, 32 << 20};
    struct fixture f;
    (void)state;
    fixture_start(&f, NULL);
    uint8_t *x = malloc(32 << 20);
    assert_non_null(x);
    fill_random(x, 32 << 20);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        assert_ok(fixture_call(&f, f.channel, "", x, sizes[i], 0, x, sizes[i]));
    for (int i = 0; i < 50; i++) {
        size_t n = 60000 + random_below(12000); /* around the core's 64 KiB slices */
        assert_ok(fixture_call(&f, f.channel, "thread", x + i, n, 0, x + i, n));
    }
    free(x);
    fixture_stop(&f);
}

/* ------------------------------------------------------------------ many at once */

struct caller {
    struct fixture *f;
    pthread_t thread;
    unsigned calls;
};

static void *call_often(void *arg)
{
    struct caller *c = arg;
    struct moe_rpc_channel *ch = fixture_channel(c->f, 0);
    uint8_t x[3000];
    memset(x, 'a', sizeof x);
    for (unsigned i = 0; i < c->calls; i++)
        assert_ok(
            fixture_call(c->f, ch, i % 2 ? "thread" : "", x, i % sizeof x, 20000, x, i % sizeof x));
    moe_rpc_channel_close(ch);
    return NULL;
}

static void many_threads_call_at_once(void **state)
{
    struct fixture f;
    struct caller callers[8];
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.shards = 4;
    fixture_start(&f, &config);
    for (size_t i = 0; i < 8; i++) {
        callers[i] = (struct caller){.f = &f, .calls = 250};
        assert_int_equal(pthread_create(&callers[i].thread, NULL, call_often, &callers[i]), 0);
    }
    for (size_t i = 0; i < 8; i++)
        pthread_join(callers[i].thread, NULL);
    fixture_await("calls to be over", &f.done, 8 * 250);
    fixture_stop(&f);
}

/* ------------------------------------------------------------------ asynchronous calls */

struct outcome {
    atomic_uint over;
    struct moe_status status;
};

static void keep_outcome(void *ctx, struct moe_status status, struct moe_rpc_msg *reply)
{
    struct outcome *o = ctx;
    assert_true((reply == NULL) == moe_failed(&status));
    moe_rpc_msg_free(reply);
    o->status = status;
    atomic_fetch_add(&o->over, 1);
}

static void start_call(struct fixture *f, const char *model, uint64_t deadline_ns,
                       struct outcome *o)
{
    uint8_t head[256];
    struct moe_rpc_call_options options = {.deadline_ns = deadline_ns, .hand_over = one_in(2)};
    struct moe_rpc_out out = fixture_request(f, model, "xyz", 3, head);
    memset(o, 0, sizeof *o);
    moe_rpc_call_unary(f->channel, UNARY_PATH, &options, &out, keep_outcome, o);
}

static void a_deadline_ends_the_call_on_both_sides(void **state)
{
    struct fixture f;
    (void)state;
    fixture_start(&f, NULL);
    uint64_t began = moe_clock_ns();
    assert_refused(fixture_call(&f, f.channel, "hang", "x", 1, 100, NULL, 0), MOE_DEADLINE_EXCEEDED,
                   MOE_REASON_NONE);
    uint64_t took = moe_clock_ns() - began;
    print_message("  100 ms deadline ended the call after %.1f ms\n", (double)took / 1e6);
    assert_true(took >= 100 * MOE_NS_PER_MS);
    fixture_await("the server to notice", &f.cancelled, 1);
    fixture_await("the call to be over", &f.done, 1);
    fixture_await_hanging(&f, 1);
    uint64_t deadline = moe_rpc_call_deadline(f.hanging[0]);
    print_message("  the server saw a deadline %.1f ms from the client's start\n",
                  (double)(int64_t)(deadline - began) / 1e6);
    assert_true(deadline > began && deadline < began + 10 * MOE_NS_PER_S);
    fixture_stop(&f); /* answers the call that is long over: the part must come back */
}

static void destroying_the_client_cancels_calls_in_flight(void **state)
{
    struct fixture f;
    struct outcome o[8];
    (void)state;
    fixture_start(&f, NULL);
    for (size_t i = 0; i < 8; i++)
        start_call(&f, "hang", MOE_NEVER, &o[i]);
    fixture_await_hanging(&f, 8);
    moe_rpc_channel_close(f.channel);
    moe_rpc_client_destroy(f.client);
    f.channel = NULL;
    f.client = NULL;
    for (size_t i = 0; i < 8; i++) {
        assert_int_equal(o[i].over, 1);
        assert_int_equal(o[i].status.code, MOE_CANCELLED);
    }
    fixture_await("the server to notice", &f.cancelled, 8);
    fixture_await("the calls to be over", &f.done, 8);
    fixture_stop(&f);
}

static void a_call_may_be_cut_short_at_any_moment(void **state)
{
    enum { CALLS = 300 };
    static struct outcome o[CALLS];
    struct fixture f;
    unsigned answered = 0;
    (void)state;
    fixture_start(&f, NULL);
    for (size_t i = 0; i < CALLS; i++) {
        uint64_t deadline = moe_clock_ns() + random_below(3 * MOE_NS_PER_MS);
        start_call(&f, one_in(2) ? "thread" : "", deadline, &o[i]);
        usleep(random_below(600));
    }
    for (size_t i = 0; i < CALLS; i++) {
        fixture_await("the answer", &o[i].over, 1);
        if (o[i].status.code != MOE_OK && o[i].status.code != MOE_DEADLINE_EXCEEDED)
            fail_msg("call %zu: %d, %s", i, (int)o[i].status.code, o[i].status.text);
        answered += o[i].status.code == MOE_OK;
    }
    print_message("  %u of %d calls were answered before their deadline\n", answered, CALLS);
    fixture_stop(&f);
}

/* A call made by another thread: it may be over before that function returns. */
struct task {
    struct fixture *f;
    struct moe_rpc_channel *channel;
    bool hand_over;
    atomic_uint over;
};

static void task_over(void *ctx, struct moe_status status, struct moe_rpc_msg *reply)
{
    struct task *e = ctx;
    (void)status; /* the answer may be quicker than the deadline */
    moe_rpc_msg_free(reply);
    atomic_store(&e->over, 1);
}

static void *run_task(void *arg)
{
    struct task *e = arg;
    uint8_t head[256];
    struct moe_rpc_call_options options = {.deadline_ns = 1, /* ends as early as possible */
                                           .hand_over = e->hand_over};
    struct moe_rpc_out out = fixture_request(e->f, "sink", "x", 1, head);
    moe_rpc_call_unary(e->channel, UNARY_PATH, &options, &out, task_over, e);
    return NULL;
}

static void a_client_may_go_as_soon_as_its_calls_are_over(void **state)
{
    enum { ROUNDS = 200 };
    struct fixture f;
    (void)state;
    fixture_start(&f, NULL);
    char target[32];
    snprintf(target, sizeof target, "127.0.0.1:%u", moe_rpc_server_port(f.server));
    for (int i = 0; i < ROUNDS; i++) {
        struct task e = {.f = &f, .hand_over = i % 2 == 1};
        struct moe_rpc_client *client;
        struct moe_rpc_channel_config config = {.target = target};
        pthread_t thread;
        assert_ok(moe_rpc_client_create(&client));
        assert_ok(moe_rpc_channel_open(client, &config, &e.channel));
        assert_int_equal(pthread_create(&thread, NULL, run_task, &e), 0);
        while (atomic_load(&e.over) == 0)
            ; /* the watchdog bounds this; a pause would hide the failure */
        moe_rpc_channel_close(e.channel);
        moe_rpc_client_destroy(client);
        pthread_join(thread, NULL);
    }
    fixture_stop(&f);
}

/* ------------------------------------------------------------------ errors */

static void errors_keep_code_reason_text_and_retry_hint(void **state)
{
    struct fixture f;
    (void)state;
    fixture_start(&f, NULL);
    for (unsigned reason = 0; reason < MOE_REASON_COUNT; reason++) {
        char model[16], text[64];
        snprintf(model, sizeof model, "fail:%u", reason);
        snprintf(text, sizeof text, "failed as asked: %u \xc3\xa4%%\n", reason);
        struct moe_status st = fixture_call(&f, f.channel, model, "x", 1, 0, NULL, 0);
        assert_int_equal(st.code, 1 + reason % 16);
        assert_int_equal(st.reason, reason);
        assert_int_equal(st.retry_after_ms, 10 * reason);
        assert_string_equal(st.text, text);
    }
    fixture_stop(&f);
}

static void unknown_methods_are_unimplemented(void **state)
{
    static const char *const paths[] = {"/moe.v1.ExpertService/Nothing", "/none/home", "/x"};
    struct fixture f;
    (void)state;
    fixture_start(&f, NULL);
    for (size_t i = 0; i < 3; i++) {
        uint8_t head[256];
        struct moe_rpc_msg *m;
        struct moe_rpc_call_options options = fixture_options(20000);
        struct moe_rpc_out out = fixture_request(&f, "", "x", 1, head);
        assert_refused(moe_rpc_call_wait(f.channel, paths[i], &options, &out, &m),
                       MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED);
        assert_null(m);
    }
    fixture_stop(&f);
}

static void messages_over_the_limit_are_refused_and_the_server_goes_on(void **state)
{
    struct fixture f;
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_message_bytes = 1 << 20;
    fixture_start(&f, &config);
    uint8_t *x = calloc(1, 4 << 20);
    assert_non_null(x);
    assert_refused(fixture_call(&f, f.channel, "", x, 4 << 20, 20000, NULL, 0),
                   MOE_RESOURCE_EXHAUSTED, MOE_REASON_TOO_LARGE);
    assert_refused(fixture_call(&f, f.channel, "", x, 1 << 20, 20000, NULL, 0),
                   MOE_RESOURCE_EXHAUSTED, MOE_REASON_TOO_LARGE);
    assert_ok(fixture_call(&f, f.channel, "", x, (1 << 20) - 100, 20000, x, (1 << 20) - 100));
    struct moe_rpc_channel *narrow = fixture_channel(&f, 64 << 10);
    assert_refused(fixture_call(&f, narrow, "", x, 100 << 10, 20000, NULL, 0),
                   MOE_RESOURCE_EXHAUSTED, MOE_REASON_NONE);
    moe_rpc_channel_close(narrow);
    free(x);
    fixture_stop(&f);
}

static void without_a_listener_a_call_is_unavailable(void **state)
{
    struct fixture f;
    struct moe_rpc_channel *ch;
    (void)state;
    fixture_start(&f, NULL);
    assert_ok(moe_rpc_channel_open(f.client,
                                   &(struct moe_rpc_channel_config){.target = "127.0.0.1:1"}, &ch));
    assert_refused(fixture_call(&f, ch, "", "x", 1, 20000, NULL, 0), MOE_UNAVAILABLE,
                   MOE_REASON_NONE);
    moe_rpc_channel_close(ch);
    fixture_stop(&f);
}

/* ------------------------------------------------------------------ streams */

struct listener {
    struct moe_rpc_stream *stream;
    atomic_uint messages, closed;
    size_t bytes;
    unsigned free_after; /* give the handle back from inside this message's callback */
    struct moe_status status;
};

static void on_message(void *ctx, struct moe_rpc_msg *m)
{
    struct listener *l = ctx;
    assert_int_equal(l->closed, 0);
    l->bytes += moe_rpc_msg_length(m);
    moe_rpc_msg_free(m);
    if (atomic_fetch_add(&l->messages, 1) + 1 == l->free_after)
        moe_rpc_stream_free(l->stream);
}

static void on_closed(void *ctx, struct moe_status status)
{
    struct listener *l = ctx;
    l->status = status;
    atomic_fetch_add(&l->closed, 1);
}

static const struct moe_rpc_stream_events listening = {.message = on_message, .closed = on_closed};

static void open_stream(struct fixture *f, const char *path, uint64_t ms, struct listener *l)
{
    struct moe_rpc_call_options options = fixture_options(ms);
    memset(l, 0, sizeof *l);
    assert_ok(moe_rpc_stream_open(f->channel, path, &options, &listening, l, &l->stream));
}

static struct moe_status stream_send(struct fixture *f, struct listener *l, const char *model,
                                     const void *x, size_t length)
{
    uint8_t head[256];
    struct moe_rpc_out out = fixture_request(f, model, x, length, head);
    return moe_rpc_stream_send(l->stream, &out);
}

static void a_stream_carries_messages_both_ways_until_both_ends_close(void **state)
{
    struct fixture f;
    struct listener l;
    size_t sent = 0;
    static uint8_t x[300000];
    (void)state;
    fixture_start(&f, NULL);
    fill_random(x, sizeof x);
    open_stream(&f, STREAM_PATH, 0, &l);
    for (int i = 0; i < 200; i++) {
        size_t n = one_in(10) ? random_below(sizeof x) : random_below(500);
        uint8_t prefix[15];
        sent += 2 + n + moe_rpc_put_part_prefix(prefix, 15, n); /* tokens and y */
        assert_ok(stream_send(&f, &l, "", x, n));
    }
    moe_rpc_stream_close_send(l.stream);
    assert_refused(stream_send(&f, &l, "", "x", 1), MOE_UNAVAILABLE, MOE_REASON_NONE);
    fixture_await("the stream to close", &l.closed, 1);
    assert_int_equal(l.status.code, MOE_OK);
    assert_int_equal(l.messages, 200);
    assert_int_equal(l.bytes, sent);
    assert_int_equal(moe_rpc_stream_backlog(l.stream), 0);
    moe_rpc_stream_free(l.stream);
    fixture_stop(&f);
}

static void a_server_that_does_not_read_is_not_sent_to(void **state)
{
    enum { MESSAGES = 64, BYTES = 1 << 20 };
    struct fixture f;
    struct listener l;
    (void)state;
    fixture_start(&f, NULL);
    uint8_t *x = calloc(1, BYTES);
    assert_non_null(x);
    open_stream(&f, STREAM_PATH, 0, &l);
    assert_ok(stream_send(&f, &l, "stop", x, 1));
    for (int i = 0; i < MESSAGES; i++)
        assert_ok(stream_send(&f, &l, "", x, BYTES));
    fixture_await("the first message", &f.stream_messages, 1);
    /* The stream does not delay another call on the same connection. */
    for (int i = 0; i < 20; i++)
        assert_ok(fixture_call(&f, f.channel, "", x, 5000, 20000, x, 5000));
    size_t backlog = moe_rpc_stream_backlog(l.stream);
    print_message("  %zu of %d messages are still with the sender\n", backlog, MESSAGES);
    assert_int_equal(f.stream_messages, 1);
    assert_true(backlog > MESSAGES / 2);
    moe_rpc_stream_cancel(l.stream);
    fixture_await("the stream to close", &l.closed, 1);
    assert_int_equal(l.status.code, MOE_CANCELLED);
    assert_refused(stream_send(&f, &l, "", "x", 1), MOE_UNAVAILABLE, MOE_REASON_NONE);
    moe_rpc_stream_free(l.stream);
    free(x);
    fixture_stop(&f);
}

static void a_stream_may_be_given_back_at_any_time(void **state)
{
    struct fixture f;
    struct listener first, l;
    (void)state;
    fixture_start(&f, NULL);
    open_stream(&f, STREAM_PATH, 0, &first);
    first.free_after = 3;
    for (int i = 0; i < 3; i++)
        assert_ok(stream_send(&f, &first, "", "abc", 3));
    fixture_await("the third answer", &first.messages, 3); /* its callback gives the stream back */
    fixture_await("the call to be over", &f.done, 1);
    assert_int_equal(first.closed, 0);
    for (int i = 0; i < 100; i++) {
        open_stream(&f, STREAM_PATH, 0, &l);
        for (uint32_t n = random_below(5); n > 0; n--)
            assert_ok(stream_send(&f, &l, "", "abc", 3));
        usleep(random_below(600));
        moe_rpc_stream_free(l.stream);
        unsigned messages = l.messages;
        atomic_store(&l.closed, 100); /* a callback from here on would fail the test */
        assert_true(messages <= 5);
    }
    fixture_stop(&f);
}

static void streams_fail_with_the_servers_reason(void **state)
{
    struct fixture f;
    struct listener l;
    struct moe_rpc_out malformed = {.head = (const uint8_t *)"\x0b", .head_length = 1};
    (void)state;
    fixture_start(&f, NULL);
    open_stream(&f, STREAM_PATH, 0, &l);
    assert_ok(stream_send(&f, &l, "", "abc", 3));
    assert_ok(moe_rpc_stream_send(l.stream, &malformed));
    fixture_await("the stream to close", &l.closed, 1);
    print_message("  %s\n", l.status.text);
    assert_int_equal(l.messages, 1);
    assert_int_equal(l.status.code, MOE_INVALID_ARGUMENT);
    assert_int_equal(l.status.reason, MOE_REASON_MALFORMED);
    moe_rpc_stream_free(l.stream);

    open_stream(&f, STREAM_PATH, 100, &l);
    fixture_await("the deadline", &l.closed, 1);
    assert_int_equal(l.status.code, MOE_DEADLINE_EXCEEDED);
    moe_rpc_stream_free(l.stream);

    open_stream(&f, UNARY_PATH, 0, &l); /* a unary call without a message */
    moe_rpc_stream_close_send(l.stream);
    fixture_await("the refusal", &l.closed, 1);
    assert_int_equal(l.status.code, MOE_INVALID_ARGUMENT);
    assert_int_equal(l.status.reason, MOE_REASON_TRUNCATED);
    moe_rpc_stream_free(l.stream);
    fixture_stop(&f);
}

/* In place of the system's, for the core: a connection under way with a lost errno. */
static atomic_int lost_answers;

int connect(int fd, const struct sockaddr *to, socklen_t length)
{
    int result = (int)syscall(SYS_connect, fd, to, length), type = 0;
    socklen_t size = sizeof type; /* datagrams are how the core puts addresses in order */
    if (atomic_load(&lost_answers) > 0 && getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 &&
        type == SOCK_STREAM) {
        atomic_fetch_sub(&lost_answers, 1);
        errno = ENOENT;
        return -1;
    }
    return result;
}

static void a_connection_that_fails_for_no_possible_reason_is_made_again(void **state)
{
    struct fixture f;
    struct moe_rpc_msg *m;
    const struct moe_rpc_out nothing = {0};
    struct moe_rpc_call_options options = fixture_options(20000);
    (void)state;
    fixture_start(&f, NULL);
    struct moe_rpc_channel *late = fixture_channel(&f, 0);
    atomic_store(&lost_answers, 1);
    struct moe_status st =
        moe_rpc_call_wait(late, "/grpc.health.v1.Health/Check", &options, &nothing, &m);
    print_message("  %s: %s\n", moe_code_name(st.code), st.text);
    assert_int_equal(st.code, MOE_NOT_FOUND); /* the server's own answer: it knows no service */
    assert_int_equal(lost_answers, 0);
    moe_rpc_channel_close(late);
    fixture_stop(&f);
}

/* Bound, so that no other process takes the port, but not listening. The long time of the call
 * stands for a call without a limit: it must not pass. */
static void without_a_listener_a_call_is_unavailable_after_such_a_connection_too(void **state)
{
    struct fixture f;
    struct moe_rpc_msg *m;
    struct moe_rpc_channel *ch;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    const struct moe_rpc_out nothing = {0};
    struct moe_rpc_call_options options = fixture_options(20000);
    char target[32];
    int deaf = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    (void)state;
    assert_int_equal(bind(deaf, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(getsockname(deaf, (struct sockaddr *)&at, &size), 0);
    snprintf(target, sizeof target, "127.0.0.1:%u", ntohs(at.sin_port));
    fixture_start(&f, NULL);
    for (int lost = 1; lost <= 1000; lost += 999) { /* once, and at every later look */
        assert_ok(moe_rpc_channel_open(
            f.client, &(struct moe_rpc_channel_config){.target = target, .own_connection = true},
            &ch));
        atomic_store(&lost_answers, lost);
        struct moe_status st =
            moe_rpc_call_wait(ch, "/grpc.health.v1.Health/Check", &options, &nothing, &m);
        print_message("  %s: %s\n", moe_code_name(st.code), st.text);
        assert_refused(st, MOE_UNAVAILABLE, MOE_REASON_NONE);
        assert_true(lost_answers < lost);
        moe_rpc_channel_close(ch);
    }
    atomic_store(&lost_answers, 0);
    close(deaf);
    fixture_stop(&f);
}

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_of_every_size_come_back_unchanged),
        cmocka_unit_test(many_threads_call_at_once),
        cmocka_unit_test(a_deadline_ends_the_call_on_both_sides),
        cmocka_unit_test(destroying_the_client_cancels_calls_in_flight),
        cmocka_unit_test(a_call_may_be_cut_short_at_any_moment),
        cmocka_unit_test(a_client_may_go_as_soon_as_its_calls_are_over),
        cmocka_unit_test(errors_keep_code_reason_text_and_retry_hint),
        cmocka_unit_test(unknown_methods_are_unimplemented),
        cmocka_unit_test(messages_over_the_limit_are_refused_and_the_server_goes_on),
        cmocka_unit_test(without_a_listener_a_call_is_unavailable),
        cmocka_unit_test(a_connection_that_fails_for_no_possible_reason_is_made_again),
        cmocka_unit_test(without_a_listener_a_call_is_unavailable_after_such_a_connection_too),
        cmocka_unit_test(a_stream_carries_messages_both_ways_until_both_ends_close),
        cmocka_unit_test(a_server_that_does_not_read_is_not_sent_to),
        cmocka_unit_test(a_stream_may_be_given_back_at_any_time),
        cmocka_unit_test(streams_fail_with_the_servers_reason),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
