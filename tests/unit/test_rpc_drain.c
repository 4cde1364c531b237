/* SPDX-License-Identifier: Apache-2.0 */
/* Start and end of servers: accepted addresses, calls that a drain waits for, and calls that it
 * cancels. */
#include "rpc_fixture.h"

#include <arpa/inet.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

struct drain {
    struct moe_rpc_server *server;
    uint64_t limit_ms, took_ms;
    atomic_uint over;
    pthread_t thread;
};

static void *run_drain(void *arg)
{
    struct drain *d = arg;
    uint64_t began = moe_clock_ns();
    moe_rpc_server_drain(d->server, began + d->limit_ms * MOE_NS_PER_MS);
    d->took_ms = (moe_clock_ns() - began) / MOE_NS_PER_MS;
    atomic_fetch_add(&d->over, 1);
    return NULL;
}

static void start_drain(struct fixture *f, struct drain *d, uint64_t limit_ms)
{
    memset(d, 0, sizeof *d);
    d->server = f->server;
    d->limit_ms = limit_ms;
    assert_int_equal(pthread_create(&d->thread, NULL, run_drain, d), 0);
}

static void end_drain(struct fixture *f, struct drain *d)
{
    pthread_join(d->thread, NULL);
    print_message("  drained in %llu ms\n", (unsigned long long)d->took_ms);
    fixture_answer_hanging(f);
    moe_rpc_server_stop(f->server);
    f->server = NULL;
}

struct outcome {
    atomic_uint over;
    struct moe_status status;
    size_t bytes;
};

static void keep_outcome(void *ctx, struct moe_status status, struct moe_rpc_msg *reply)
{
    struct outcome *o = ctx;
    o->status = status;
    o->bytes = reply != NULL ? moe_rpc_msg_length(reply) : 0;
    moe_rpc_msg_free(reply);
    atomic_fetch_add(&o->over, 1);
}

static void start_call(struct fixture *f, const char *model, struct outcome *o)
{
    uint8_t head[256];
    static uint8_t x[1 << 20];
    struct moe_rpc_call_options options = fixture_options(0);
    struct moe_rpc_out out = fixture_request(f, model, x, sizeof x, head);
    memset(o, 0, sizeof *o);
    moe_rpc_call_unary(f->channel, UNARY_PATH, &options, &out, keep_outcome, o);
}

static void a_drain_lets_calls_in_flight_finish(void **state)
{
    struct fixture f;
    struct drain d;
    struct outcome o[4];
    (void)state;
    fixture_start(&f, NULL);
    for (int i = 0; i < 4; i++)
        start_call(&f, "hang", &o[i]);
    fixture_await_hanging(&f, 4);
    start_drain(&f, &d, 20000);
    /* From some moment on no client is let in; until then calls are answered. */
    struct moe_status st;
    uint64_t give_up = moe_clock_ns() + 20 * MOE_NS_PER_S;
    do {
        struct moe_rpc_channel *late = fixture_channel(&f, 0);
        st = fixture_call(&f, late, "", "x", 1, 5000, NULL, 0);
        moe_rpc_channel_close(late);
        assert_true(moe_clock_ns() < give_up);
    } while (!moe_failed(&st));
    print_message("  a new call: %s %s\n", moe_code_name(st.code), st.text);
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    assert_int_equal(st.reason, MOE_REASON_DRAINING);
    assert_true(st.retry_after_ms > 0);
    assert_int_equal(d.over, 0);
    fixture_answer_hanging(&f);
    for (int i = 0; i < 4; i++) {
        fixture_await("an answer", &o[i].over, 1);
        assert_ok(o[i].status);
        assert_true(o[i].bytes > 1 << 20);
    }
    end_drain(&f, &d);
    assert_int_equal(f.cancelled, 0);
    fixture_stop(&f);
}

static void a_drain_cancels_calls_beyond_its_limit(void **state)
{
    struct fixture f;
    struct drain d;
    struct outcome o[4];
    (void)state;
    fixture_start(&f, NULL);
    for (int i = 0; i < 4; i++)
        start_call(&f, "hang", &o[i]);
    fixture_await_hanging(&f, 4);
    start_drain(&f, &d, 100);
    for (int i = 0; i < 4; i++) {
        fixture_await("the end of a call", &o[i].over, 1);
        assert_true(moe_failed(&o[i].status));
        print_message("  %s: %s\n", moe_code_name(o[i].status.code), o[i].status.text);
    }
    end_drain(&f, &d);
    assert_true(d.took_ms >= 100);
    fixture_await("the ends of all calls", &f.done, 4);
    assert_int_equal(f.cancelled, 4);
    fixture_stop(&f);
}

/* An existing channel repeats its call, like a busy one. */
struct caller {
    struct fixture *f;
    struct moe_rpc_channel *channel;
    atomic_bool *enough;
    unsigned answered, unavailable, other;
    pthread_t thread;
};

static void *keep_asking(void *arg)
{
    struct caller *c = arg;
    while (!atomic_load(c->enough)) {
        struct moe_status st = fixture_call(c->f, c->channel, "", "x", 1, 20000, NULL, 0);
        c->answered += !moe_failed(&st);
        c->unavailable += st.code == MOE_UNAVAILABLE;
        c->other += moe_failed(&st) && st.code != MOE_UNAVAILABLE;
        if (moe_failed(&st) && st.code != MOE_UNAVAILABLE)
            print_message("  %s: %s\n", moe_code_name(st.code), st.text);
    }
    return NULL;
}

static void calls_during_the_end_of_a_server_are_answered_or_get_a_retry_hint(void **state)
{
    enum { ROUNDS = 8, CALLERS = 4 };
    unsigned answered = 0, unavailable = 0, other = 0;
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        struct fixture f;
        struct drain d;
        struct caller callers[CALLERS];
        atomic_bool enough = false;
        fixture_start(&f, NULL);
        for (int i = 0; i < CALLERS; i++) {
            callers[i] =
                (struct caller){.f = &f, .channel = fixture_channel(&f, 0), .enough = &enough};
            assert_int_equal(pthread_create(&callers[i].thread, NULL, keep_asking, &callers[i]), 0);
        }
        fixture_await("calls to be answered", &f.done, 20);
        start_drain(&f, &d, 2000); /* the core may wait this long for a connection to go */
        fixture_await("the end of the drain", &d.over, 1);
        atomic_store(&enough, true);
        for (int i = 0; i < CALLERS; i++) {
            pthread_join(callers[i].thread, NULL);
            moe_rpc_channel_close(callers[i].channel);
            answered += callers[i].answered;
            unavailable += callers[i].unavailable;
            other += callers[i].other;
        }
        end_drain(&f, &d);
        fixture_stop(&f);
    }
    print_message("  %u answered, %u UNAVAILABLE, %u anything else\n", answered, unavailable,
                  other);
    assert_true(answered > 0);
    assert_int_equal(other, 0);
}

static int come(uint16_t port)
{
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    int refused = connect(fd, (struct sockaddr *)&to, sizeof to);
    if (refused == 0)
        return fd;
    close(fd);
    return -1;
}

static void after_a_drain_no_client_is_let_in(void **state)
{
    struct fixture f;
    struct drain d;
    (void)state;
    fixture_start(&f, NULL);
    assert_ok(fixture_call(&f, f.channel, "", "x", 1, 20000, "x", 1));
    uint16_t port = moe_rpc_server_port(f.server);
    int before = come(port);
    assert_true(before >= 0);
    start_drain(&f, &d, 20000);
    fixture_await("the end of the drain", &d.over, 1);
    char byte;
    assert_true(recv(before, &byte, 1, 0) <= 0);
    close(before);
    assert_int_equal(come(port), -1);
    end_drain(&f, &d);
    fixture_stop(&f);
}

static void an_idle_server_drains_at_once_and_its_port_can_be_bound_again(void **state)
{
    struct fixture f;
    struct drain d;
    char listen[32];
    (void)state;
    for (int i = 0; i < 3; i++) {
        struct moe_rpc_server_config config = fixture_config();
        if (i > 0)
            config.listen = listen;
        fixture_start(&f, &config);
        snprintf(listen, sizeof listen, "127.0.0.1:%u", moe_rpc_server_port(f.server));
        assert_ok(fixture_call(&f, f.channel, "", "x", 1, 20000, "x", 1));
        start_drain(&f, &d,
                    3600 * 1000); /* no call is in flight; longer than the watchdog's time */
        end_drain(&f, &d);
        fixture_stop(&f);
    }
}

static struct moe_status ask(struct fixture *f, struct moe_rpc_channel *ch)
{
    uint8_t head[256];
    struct moe_rpc_msg *reply = NULL;
    struct moe_rpc_call_options options = fixture_options(5000);
    struct moe_rpc_out out = fixture_request(f, "", "x", 1, head);
    struct moe_status st = moe_rpc_call_wait(ch, UNARY_PATH, &options, &out, &reply);
    moe_rpc_msg_free(reply);
    return st;
}

/* A socket that reserves `*listen` for servers started at it: it is bound, does not listen, and
 * allows reuse of its address. */
static int hold_port(char *listen, size_t capacity)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int yes = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes), 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &size), 0);
    snprintf(listen, capacity, "127.0.0.1:%u", ntohs(at.sin_port));
    return fd;
}

/* The core's tries to connect to a port. Where nothing bounds the pauses between them, the last
 * dozen of these take seconds each: longer than the watchdog of this program lets it run. */
enum { TRIES = 34 };
static struct {
    atomic_uint port; /* 0: none is looked at */
    atomic_uint count;
} tries;

/* In place of the system's, for the core. */
int connect(int fd, const struct sockaddr *to, socklen_t length)
{
    int type = 0;
    in_port_t port = 0;           /* lies at the same place in both families */
    socklen_t size = sizeof type; /* datagrams are how the core puts addresses in order */
    if (to->sa_family == AF_INET || to->sa_family == AF_INET6)
        memcpy(&port, (const char *)to + offsetof(struct sockaddr_in, sin_port), sizeof port);
    if (port != 0 && ntohs(port) == atomic_load(&tries.port) &&
        getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM) {
        atomic_fetch_add(&tries.count, 1);
    }
    return (int)syscall(SYS_connect, fd, to, length);
}

/* A client that lost its connection finds the next server at the address soon after it starts, even
 * a late one. (The core alone would try again after half a minute.) */
static void a_server_that_comes_back_is_found_soon(void **state)
{
    struct fixture first, second;
    struct moe_rpc_server_config config = fixture_config();
    struct moe_rpc_client *client;
    struct moe_rpc_channel *ch;
    struct timespec pause = {.tv_nsec = 5 * 1000 * 1000};
    char listen[32];
    (void)state;
    int held = hold_port(listen, sizeof listen);
    config.listen = listen;
    fixture_start(&first, &config);
    assert_ok(moe_rpc_client_create(&client));
    assert_ok(moe_rpc_channel_open(client,
                                   &(struct moe_rpc_channel_config){.target = listen,
                                                                    .own_connection = true,
                                                                    .reconnect_ms = 50},
                                   &ch));
    assert_ok(ask(&first, ch));
    fixture_stop(&first);
    atomic_store(&tries.count, 0);
    atomic_store(&tries.port, (unsigned)atoi(strrchr(listen, ':') + 1));
    while (atomic_load(&tries.count) < TRIES) {
        assert_int_equal(ask(&first, ch).code, MOE_UNAVAILABLE);
        nanosleep(&pause, NULL);
    }
    atomic_store(&tries.port, 0);
    fixture_start(&second, &config);
    struct moe_status st = ask(&second, ch);
    while (moe_failed(&st)) {
        nanosleep(&pause, NULL);
        st = ask(&second, ch);
    }
    moe_rpc_channel_close(ch);
    moe_rpc_client_destroy(client);
    fixture_stop(&second);
    close(held);
}

static struct moe_status try_start(const char *listen, bool insecure)
{
    struct moe_rpc_server *s;
    struct moe_rpc_server_config config = fixture_config();
    config.listen = listen;
    config.insecure = insecure;
    struct moe_status st = moe_rpc_server_start(&config, &s);
    assert_true((s == NULL) == moe_failed(&st));
    if (s != NULL) {
        assert_int_not_equal(moe_rpc_server_port(s), 0);
        moe_rpc_server_drain(s, moe_clock_ns() + MOE_NS_PER_S);
        moe_rpc_server_stop(s);
    }
    return st;
}

static void without_insecure_only_loopback_is_listened_on(void **state)
{
    static const char *const refused[] = {"0.0.0.0:0",  "[::]:0",          "192.0.2.1:0",
                                          "example:0",  "[2001:db8::1]:0", "128.0.0.1:0",
                                          "127.0.0.x:0"};
    static const char *const malformed[] = {
        "",     "127.0.0.1",   "127.0.0.1:",      ":1",     "[::1]",        "::1:0",
        "[]:1", "127.0.0.1:x", "127.0.0.1:65536", "[::1:0", "127.0.0.1:-1", "127.0.0.1: 1"};
    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        assert_refused(try_start(refused[i], false), MOE_INVALID_ARGUMENT,
                       MOE_REASON_CONFIG_INVALID);
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++)
        assert_refused(try_start(malformed[i], true), MOE_INVALID_ARGUMENT,
                       MOE_REASON_CONFIG_INVALID);
    struct moe_status st = try_start("0.0.0.0:0", false);
    assert_non_null(strstr(st.text, "--insecure")); /* what to do about it */
    assert_ok(try_start("127.0.0.1:0", false));
    assert_ok(try_start("127.9.9.9:0", false));
    assert_ok(try_start("localhost:0", false));
    assert_ok(try_start("0.0.0.0:0", true));
}

static void a_port_in_use_and_bad_settings_are_errors(void **state)
{
    struct fixture f;
    char listen[32];
    struct moe_rpc_server *s;
    (void)state;
    fixture_start(&f, NULL);
    snprintf(listen, sizeof listen, "127.0.0.1:%u", moe_rpc_server_port(f.server));
    assert_refused(try_start(listen, false), MOE_UNAVAILABLE, MOE_REASON_IO);
    struct moe_rpc_server_config config = fixture_config();
    config.max_message_bytes = 0;
    assert_refused(moe_rpc_server_start(&config, &s), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
    config = fixture_config();
    config.descriptors = (const uint8_t *)"\x0a\x05xyz";
    config.descriptors_length = 5;
    assert_refused(moe_rpc_server_start(&config, &s), MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED);
    assert_ok(fixture_call(&f, f.channel, "", "x", 1, 20000, "x", 1));
    fixture_stop(&f);
}

/* Each connection takes three descriptors. */
static void without_a_free_descriptor_clients_are_turned_away_and_may_come_back(void **state)
{
    static const char hello[] =
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0"; /* and settings */
    enum { CROWD = 64 };
    struct fixture f;
    struct rlimit before, none;
    int crowd[CROWD];
    (void)state;
    fixture_start(&f, NULL);
    assert_ok(fixture_call(&f, f.channel, "", "x", 1, 20000, "x", 1));
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons(moe_rpc_server_port(f.server)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    for (int i = 0; i < CROWD; i++)
        assert_true((crowd[i] = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = before;
    none.rlim_cur = (rlim_t)crowd[CROWD - 1] + 2;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    unsigned turned_away = 0;
    for (int i = 0; i < CROWD; i++) {
        char byte;
        struct pollfd wait = {.fd = crowd[i], .events = POLLIN};
        assert_int_equal(connect(crowd[i], (struct sockaddr *)&to, sizeof to), 0);
        assert_int_equal(send(crowd[i], hello, sizeof hello - 1, MSG_NOSIGNAL), sizeof hello - 1);
        while (poll(&wait, 1, 20000) == 1) { /* the server answers where it has taken it */
            ssize_t n = recv(crowd[i], &byte, 1, 0);
            turned_away += n <= 0;
            break;
        }
    }
    print_message("  %u of %d turned away\n", turned_away, CROWD);
    assert_true(turned_away > CROWD / 2);
    /* Existing clients go on. */
    assert_ok(fixture_call(&f, f.channel, "", "x", 1, 20000, "x", 1));
    for (int i = 0; i < CROWD; i++)
        close(crowd[i]);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    /* Clients that waited are still turned away, with those that come at that moment. */
    struct moe_status st;
    do {
        struct moe_rpc_channel *late = fixture_channel(&f, 0);
        st = fixture_call(&f, late, "", "x", 1, 20000, NULL, 0);
        moe_rpc_channel_close(late);
        assert_true(!moe_failed(&st) || st.code == MOE_UNAVAILABLE);
    } while (moe_failed(&st));
    fixture_stop(&f);
}

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_drain_lets_calls_in_flight_finish),
        cmocka_unit_test(a_drain_cancels_calls_beyond_its_limit),
        cmocka_unit_test(calls_during_the_end_of_a_server_are_answered_or_get_a_retry_hint),
        cmocka_unit_test(after_a_drain_no_client_is_let_in),
        cmocka_unit_test(an_idle_server_drains_at_once_and_its_port_can_be_bound_again),
        cmocka_unit_test(a_server_that_comes_back_is_found_soon),
        cmocka_unit_test(without_insecure_only_loopback_is_listened_on),
        cmocka_unit_test(a_port_in_use_and_bad_settings_are_errors),
        cmocka_unit_test(without_a_free_descriptor_clients_are_turned_away_and_may_come_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
