/* SPDX-License-Identifier: Apache-2.0 */
/* Connections without a request, over TCP, a Unix socket and TLS: the server does not see them, and
 * they are served until they make one. */
#include "certificates.h"
#include "listener_fixture.h"
#include "support/random.h"
#include "tls/tls.h"

#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

static const char pong[] = "\0\0\10\6\1\0\0\0\0wonderfu";

static const char parked_figure[] = "moe_rpc_connections_parked{server=\"data\"}";

/* A client that has nothing to ask yet. */
static int come_and_wait(struct scene *s, bool local)
{
    int fd = local ? come_unix(s) : come_tcp(s);
    say(fd, preface, PREFACE);
    say(fd, settings, sizeof settings);
    expect(fd, settings, sizeof settings);
    expect(fd, acknowledged, sizeof acknowledged);
    return fd;
}

static void ask(int fd)
{
    say(fd, request, sizeof request);
    expect(fd, settings, sizeof settings); /* echoed */
    expect(fd, request, sizeof request);
}

static void a_parked_connection_costs_the_server_nothing(void **state)
{
    struct scene s = {.serving = ECHO};
    (void)state;
    start(&s, (struct moe_listener_config){.preface_ms = 200});
    for (int local = 0; local < 2; local++) {
        int fd = come_and_wait(&s, local);
        say(fd, acknowledged, sizeof acknowledged);
        say(fd, ping, PING);
        expect(fd, pong, PING);
        moe_sleep_until(moe_clock_ns() + 800 * MOE_NS_PER_MS); /* no limit runs */
        say(fd, ping, PING);
        expect(fd, pong, PING);
        assert_int_equal(s.opened, local);
        assert_int_equal(figure(&s, parked_figure), 1);
        ask(fd);
        assert_int_equal(s.opened, local + 1);
        assert_int_equal(figure(&s, parked_figure), 0);
        check_alive(fd);
        close(fd);
    }
    await_figure(&s, "client", 2);
    finish(&s);
}

static void byte_by_byte_is_the_same(void **state)
{
    struct scene s = {.serving = ECHO};
    char all[PREFACE + sizeof settings + sizeof request];
    (void)state;
    memcpy(all, preface, PREFACE);
    memcpy(all + PREFACE, settings, sizeof settings);
    memcpy(all + PREFACE + sizeof settings, request, sizeof request);
    start(&s, (struct moe_listener_config){0});
    for (int local = 0; local < 2; local++) {
        int fd = local ? come_unix(&s) : come_tcp(&s);
        for (size_t i = 0; i < sizeof all; i++) {
            say(fd, all + i, 1);
            if (i % 5 == 0)
                moe_sleep_until(moe_clock_ns() + MOE_NS_PER_MS);
        }
        expect(fd, welcome, WELCOME);
        check_alive(fd);
        close(fd);
    }
    finish(&s);
}

/* Everything that comes with the request reaches the server, behind what was said before. */
static void what_was_said_before_comes_first(void **state)
{
    enum { LENGTH = 100000 };
    static const char window[] = "\0\0\4\x8\0\0\0\0\0\0\1\0\0";
    static char body[9 + LENGTH], back[9 + LENGTH];
    static const uint8_t head[] = {
        LENGTH >> 16, LENGTH >> 8 & 0xff, LENGTH & 0xff, 0, 0, 0, 0, 0, 1};
    struct scene s = {.serving = SILENT};
    (void)state;
    fill_random(body, sizeof body);
    memcpy(body, head, sizeof head);
    start(&s, (struct moe_listener_config){.max_streams = 77});
    int fd = come_tcp(&s);
    say(fd, preface, PREFACE);
    say(fd, settings, sizeof settings);
    say(fd, window, 13);
    say(fd, settings, sizeof settings);
    expect(fd, "\0\0\6\4\0\0\0\0\0\0\3\0\0\0\x4d", 15);
    expect(fd, acknowledged, 9);
    expect(fd, acknowledged, 9);
    say(fd, request, sizeof request);
    say(fd, acknowledged, sizeof acknowledged); /* of the relay's SETTINGS: not for the server */
    say(fd, body, sizeof body);
    await_opened(&s, 1);
    int server = s.connections[0].fd;
    expect(server, preface, PREFACE);
    expect(server, settings, sizeof settings);
    expect(server, window, 13);
    expect(server, request, sizeof request);
    assert_true(receive(server, back, sizeof back));
    assert_memory_equal(back, body, sizeof back);
    /* The server acknowledges the SETTINGS that it got: the client has had that. Its own come. */
    say(server, settings, 4);
    moe_sleep_until(moe_clock_ns() + 20 * MOE_NS_PER_MS);
    say(server, settings + 4, 5);
    say(server, acknowledged, sizeof acknowledged);
    say(server, ping, PING);
    expect(fd, settings, sizeof settings);
    expect(fd, ping, PING);
    say(fd, acknowledged, sizeof acknowledged);
    expect(server, acknowledged, sizeof acknowledged);
    /* From now on, all of them belong to the server and the client. */
    say(server, acknowledged, sizeof acknowledged);
    expect(fd, acknowledged, sizeof acknowledged);
    close(fd);
    finish(&s);
}

static void a_parked_client_may_leave(void **state)
{
    struct scene s = {.serving = ECHO};
    char back[PING];
    (void)state;
    start(&s, (struct moe_listener_config){0});
    int gone = come_and_wait(&s, false), half = come_and_wait(&s, true);
    close(gone);
    say(half, ping, PING);
    shutdown(half, SHUT_WR);
    assert_true(receive(half, back, PING));
    assert_memory_equal(back, pong, PING);
    assert_true(is_over(half));
    close(half);
    await_figure(&s, "client", 2);
    assert_int_equal(figure(&s, parked_figure), 0);
    assert_int_equal(s.opened, 0);
    finish(&s);
}

static bool everyone(void *ctx, const struct moe_rpc_identity *who)
{
    (void)ctx;
    (void)who;
    return true;
}

static void a_parked_connection_ends_with_its_identity(void **state)
{
    struct scene s = {.serving = ECHO};
    (void)state;
    start(&s, (struct moe_listener_config){0});
    int first = come_and_wait(&s, false), second;
    moe_listener_disconnect(s.listener, everyone, NULL);
    assert_true(is_over(first));
    close(first);
    await_figure(&s, "identity", 1);
    second = come_and_wait(&s, true);
    finish(&s);
    assert_true(is_over(second));
    close(second);
}

static void a_flood_while_parked_learns_the_reason(void **state)
{
    struct scene s = {.serving = ECHO};
    uint8_t frame[17];
    bool informed = false;
    (void)state;
    start(&s, (struct moe_listener_config){0});
    int fd = come_and_wait(&s, false), other = come_and_wait(&s, false);
    while (send(fd, settings, sizeof settings, MSG_NOSIGNAL) > 0)
        ;
    while (!informed && receive(fd, frame, 9)) {
        informed = frame[3] == 7;
        assert_true(!informed || (receive(fd, frame + 9, 8) && frame[16] == 11));
    }
    print_message("  GOAWAY %s\n", informed ? "came" : "was lost with the connection");
    await_figure(&s, "flood", 1);
    int bad = come_and_wait(&s, false);
    say(bad, "\0\0\1\0\1\0\0\0\1x", 10); /* DATA without a stream */
    assert_true(is_over(bad));
    await_figure(&s, "malformed", 1);
    ask(other);
    assert_int_equal(s.opened, 1);
    close(fd);
    close(bad);
    close(other);
    finish(&s);
}

/* The answers of the relay count as answers: they take bounded memory, and must be read. */
static void answers_left_unread_end_a_parked_connection(void **state)
{
    enum { SMALL = 4096 };
    static char pings[100 * PING];
    struct scene s = {.serving = ECHO};
    int small = SMALL;
    (void)state;
    for (int i = 0; i < 100; i++)
        memcpy(pings + i * PING, ping, PING);
    start(&s, (struct moe_listener_config){.silence_ms = 1000});
    int fd = come_and_wait(&s, true);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small), 0);
    /* Slowly enough for the rate. The relay stops reading when its answers do not go. */
    uint64_t give_up = moe_clock_ns() + SOON_MS * MOE_NS_PER_MS;
    while (closed_by(&s, "unread") == 0 && moe_clock_ns() < give_up) {
        (void)send(fd, pings, sizeof pings, MSG_NOSIGNAL | MSG_DONTWAIT);
        moe_sleep_until(moe_clock_ns() + 20 * MOE_NS_PER_MS);
    }
    assert_int_equal(closed_by(&s, "unread"), 1);
    close(fd);
    finish(&s);
}

static void settings_must_come_in_time(void **state)
{
    struct scene s = {.serving = ECHO};
    (void)state;
    start(&s, (struct moe_listener_config){.preface_ms = 200});
    int fd = come_tcp(&s);
    say(fd, preface, PREFACE);
    expect(fd, settings, sizeof settings);
    assert_true(is_over(fd));
    await_figure(&s, "preface", 1);
    close(fd);
    finish(&s);
}

/* A listener with so many descriptors for its connections. */
static void start_with_few(struct scene *s, uint32_t descriptors, struct moe_listener_config config)
{
    enum { OTHERS = 128 };
    struct rlimit before, few;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    few.rlim_cur = OTHERS + 100;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    config.descriptors_percent = descriptors;
    start(s, config);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
}

static bool keeps_all(void *ctx, void *connection)
{
    (void)ctx;
    (void)connection;
    return true;
}

/* A parked connection takes one descriptor, an open one three. */
static void parked_connections_make_room_for_those_with_requests(void **state)
{
    struct scene s = {.serving = ECHO};
    int tcp[7], local[7];
    (void)state;
    start_with_few(&s, 12, (struct moe_listener_config){.keeps = keeps_all});
    for (int i = 0; i < 6; i++) {
        tcp[i] = come_and_wait(&s, false);
        local[i] = come_and_wait(&s, true);
    }
    ask(tcp[5]);
    assert_true(is_over(tcp[0]));
    assert_true(is_over(local[0]));
    ask(local[5]);
    assert_true(is_over(tcp[1]));
    assert_true(is_over(local[1]));
    tcp[6] = come_and_wait(&s, false);
    assert_true(is_over(tcp[2]));
    assert_int_equal(closed_by(&s, "limit"), 5);
    check_alive(tcp[5]);
    check_alive(local[5]);
    say(tcp[6], ping, PING);
    expect(tcp[6], pong, PING);
    for (int i = 0; i < 7; i++)
        close(tcp[i]);
    for (int i = 0; i < 6; i++)
        close(local[i]);
    finish(&s);
}

static void a_peer_has_so_many_open_ones(void **state)
{
    struct scene s = {.serving = ECHO};
    int tcp[5];
    (void)state;
    start_with_few(&s, 12, (struct moe_listener_config){0}); /* all keep their places */
    for (int i = 0; i < 4; i++) {
        tcp[i] = come_and_wait(&s, false);
        if (i < 3)
            ask(tcp[i]);
    }
    say(tcp[3], request, sizeof request);
    assert_true(is_over(tcp[3])); /* it has 3 of 4 */
    assert_int_equal(closed_by(&s, "limit"), 1);
    close(tcp[0]);
    await_figure(&s, "client", 1);
    tcp[4] = come_and_wait(&s, false);
    ask(tcp[4]);
    for (int i = 1; i < 5; i++)
        close(tcp[i]);
    finish(&s);
}

static void under_tls_it_is_the_same(void **state)
{
    static struct scene s = {.serving = ECHO};
    static char at[CERTIFICATES_PATH], paths[3][CERTIFICATES_PATH + 16];
    static const char *const names[] = {"server.pem", "server.key", "ca.pem"};
    struct moe_tls *tls;
    char back[64];
    size_t n, have = 0;
    (void)state;
    certificates_directory(at);
    certificates_make(at, "ca", NULL, NULL, -60, 3600);
    certificates_make(at, "server", "ca", "DNS:localhost", -60, 3600);
    for (int i = 0; i < 3; i++)
        snprintf(paths[i], sizeof paths[i], "%s/%s", at, names[i]);
    const struct moe_rpc_tls_files files = {paths[0], paths[1], paths[2]};
    assert_ok(moe_tls_create(&files, &tls));
    start(&s, (struct moe_listener_config){.tls = tls});
    int fd = come_tcp(&s);
    SSL *ssl = certificates_client(fd, at, "ca", NULL, "h2");
    assert_int_equal(SSL_connect(ssl), 1);
    for (int i = 0; i < PREFACE; i++)
        assert_int_equal(SSL_write(ssl, preface + i, 1), 1);
    assert_int_equal(SSL_write(ssl, settings, sizeof settings), sizeof settings);
    assert_int_equal(SSL_write(ssl, ping, PING), PING);
    while (have < 18 + PING && SSL_read_ex(ssl, back + have, 18 + PING - have, &n) == 1)
        have += n;
    assert_int_equal(have, 18 + PING);
    assert_memory_equal(back + 18, pong, PING);
    assert_int_equal(s.opened, 0);
    assert_int_equal(SSL_write(ssl, request, sizeof request), sizeof request);
    for (have = 0; have < 19 && SSL_read_ex(ssl, back + have, 19 - have, &n) == 1;)
        have += n;
    assert_int_equal(have, 19);
    assert_memory_equal(back + 9, request, sizeof request);
    assert_int_equal(s.opened, 1);
    SSL_free(ssl);
    close(fd);
    finish(&s);
    moe_tls_destroy(tls);
    certificates_remove(at);
}

int main(void)
{
    seed_random();
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_parked_connection_costs_the_server_nothing),
        cmocka_unit_test(byte_by_byte_is_the_same),
        cmocka_unit_test(what_was_said_before_comes_first),
        cmocka_unit_test(a_parked_client_may_leave),
        cmocka_unit_test(a_parked_connection_ends_with_its_identity),
        cmocka_unit_test(a_flood_while_parked_learns_the_reason),
        cmocka_unit_test(answers_left_unread_end_a_parked_connection),
        cmocka_unit_test(settings_must_come_in_time),
        cmocka_unit_test(parked_connections_make_room_for_those_with_requests),
        cmocka_unit_test(a_peer_has_so_many_open_ones),
        cmocka_unit_test(under_tls_it_is_the_same),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
