/* SPDX-License-Identifier: Apache-2.0 */
/* The listener with a server that echoes: who connects, what is relayed, and what ends a
 * connection. */
#include "certificates.h"
#include "listener_fixture.h"
#include "support/random.h"
#include "tls/tls.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* Limits that a busy machine does not reach by itself. */
enum { PREFACE_MS = 1500, SILENCE_MS = 1000 };

/* ------------------------------------------------------------------ tests */

static void the_kernel_says_who_connects(void **state)
{
    struct scene s = {.serving = ECHO};
    char name[32];
    struct stat file;
    (void)state;
    start(&s, (struct moe_listener_config){0});
    assert_int_equal(stat(s.path, &file), 0);
    assert_int_equal(file.st_mode & 0777, 0600);
    int tcp = come_tcp(&s), local = -1;
    begin(tcp);
    local = come_unix(&s);
    begin(local);
    assert_int_equal(s.connections[0].who.link, MOE_RPC_LINK_TCP);
    assert_string_equal(s.connections[0].who.name, "");
    assert_string_equal(s.connections[0].who.address, "127.0.0.1");
    snprintf(name, sizeof name, "uid:%u", getuid());
    assert_int_equal(s.connections[1].who.link, MOE_RPC_LINK_UNIX);
    assert_string_equal(s.connections[1].who.name, name);
    assert_int_equal(s.connections[1].who.uid, getuid());
    assert_int_equal(figure(&s, "moe_rpc_connections{server=\"data\"}"), 2);
    close(tcp);
    close(local);
    await_figure(&s, "client", 2);
    finish(&s);
}

static struct moe_status try_open(const char *addresses)
{
    struct moe_listener *l;
    struct moe_status st =
        moe_listener_open(&(struct moe_listener_config){.addresses = addresses}, &l);
    moe_listener_destroy(l);
    return st;
}

static void a_socket_file_in_use_is_refused_and_a_stale_one_replaced(void **state)
{
    struct scene s = {.serving = ECHO};
    char address[128];
    (void)state;
    start(&s, (struct moe_listener_config){0});
    snprintf(address, sizeof address, "unix:%s", s.path);
    assert_refused(try_open(address), MOE_UNAVAILABLE, MOE_REASON_IO);
    int fd = come_unix(&s); /* the first one goes on */
    begin(fd);
    close(fd);
    finish(&s);

    struct sockaddr_un at = {.sun_family = AF_UNIX};
    assert_true(moe_test_directory("listener", s.directory));
    snprintf(at.sun_path, sizeof at.sun_path, "%s/stale", s.directory);
    snprintf(address, sizeof address, "unix:%s", at.sun_path);
    int stale = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(stale, (struct sockaddr *)&at, sizeof at), 0);
    close(stale);
    assert_ok(try_open(address));
    assert_int_equal(access(at.sun_path, F_OK), -1);
    /* What is no socket stays. */
    int file = open(at.sun_path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(file >= 0);
    close(file);
    assert_refused(try_open(address), MOE_UNAVAILABLE, MOE_REASON_IO);
    assert_int_equal(unlink(at.sun_path), 0);
    assert_int_equal(rmdir(s.directory), 0);
}

static void the_socket_of_a_group_is_open_to_it_and_to_no_one_else(void **state)
{
    char directory[MOE_TEST_DIRECTORY_BYTES], address[160], path[128];
    struct stat folder, file;
    struct moe_listener *l;
    (void)state;
    assert_true(moe_test_directory("listener", directory));
    snprintf(path, sizeof path, "%s/sock", directory);
    snprintf(address, sizeof address, "127.0.0.1:0,unix-group:%s", path);
    assert_ok(moe_listener_open(&(struct moe_listener_config){.addresses = address}, &l));
    assert_int_equal(stat(directory, &folder), 0);
    assert_int_equal(lstat(path, &file), 0);
    assert_int_equal(file.st_mode & 07777, 0660);
    assert_int_equal(file.st_gid, folder.st_gid);
    moe_listener_destroy(l);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(rmdir(directory), 0);
}

static void bad_addresses_are_refused(void **state)
{
    static const char *const bad[] = {
        "unix:",
        "unix-group:",
        "unix:relative/path",
        "127.0.0.1:0,",
        ",127.0.0.1:0",
        "127.0.0.1:0,,127.0.0.1:0",
        "127.0.0.1:0,0.0.0.0:0",
        "127.0.0.1:0,127.0.0.1:0,127.0.0.1:0,127.0.0.1:0,127.0.0.1:0",
        ("unix:/01234567890123456789012345678901234567890123456789012345678901234567890123456789"
         "012345678901234567890123456789")};
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_refused(try_open(bad[i]), MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID);
    assert_ok(try_open("127.0.0.1:0,localhost:0,[::1]:0"));
}

struct flood {
    int fd;
    const uint8_t *bytes;
    size_t length;
};

static void *send_flood(void *arg)
{
    const struct flood *f = arg;
    for (size_t at = 0; at < f->length;) {
        size_t part = 1 + random_below(300000);
        part = part < f->length - at ? part : f->length - at;
        ssize_t n = send(f->fd, f->bytes + at, part, MSG_NOSIGNAL);
        if (n <= 0)
            abort();
        at += (size_t)n;
    }
    return NULL;
}

static void bytes_arrive_whole_and_in_order_both_ways(void **state)
{
    enum { LENGTH = 48 << 20, FRAME = 1 << 14 };
    struct scene s = {.serving = ECHO};
    pthread_t thread;
    (void)state;
    uint8_t *bytes = malloc(LENGTH), *back = malloc(LENGTH);
    assert_non_null(bytes);
    assert_non_null(back);
    fill_random(bytes, LENGTH);
    for (size_t at = 0; at < LENGTH; at += FRAME) {
        static const uint8_t head[] = {
            (FRAME - 9) >> 16, (FRAME - 9) >> 8 & 0xff, (FRAME - 9) & 0xff, 0, 0, 0, 0, 0, 1};
        memcpy(bytes + at, head, sizeof head);
    }
    start(&s, (struct moe_listener_config){0});
    for (int round = 0; round < 2; round++) {
        int fd = round == 0 ? come_tcp(&s) : come_unix(&s);
        begin(fd);
        struct flood f = {.fd = fd, .bytes = bytes, .length = LENGTH};
        assert_int_equal(pthread_create(&thread, NULL, send_flood, &f), 0);
        assert_true(receive(fd, back, LENGTH));
        pthread_join(thread, NULL);
        assert_memory_equal(bytes, back, LENGTH);
        memset(back, 0, LENGTH);
        shutdown(fd, SHUT_WR);
        assert_true(is_over(fd));
        close(fd);
    }
    finish(&s);
    free(bytes);
    free(back);
}

static void what_the_server_sent_arrives_before_the_end(void **state)
{
    enum { LENGTH = 100000 };
    struct scene s = {.serving = SILENT};
    static const uint8_t head[] = {(LENGTH - 9) >> 16,
                                   (LENGTH - 9) >> 8 & 0xff,
                                   (LENGTH - 9) & 0xff,
                                   0,
                                   0,
                                   0,
                                   0,
                                   0,
                                   1}; /* one DATA frame */
    static uint8_t answer[LENGTH], back[LENGTH];
    (void)state;
    fill_random(answer, LENGTH);
    start(&s, (struct moe_listener_config){0});
    int fd = come_tcp(&s);
    say_request(fd);
    await_opened(&s, 1);
    int server = s.connections[0].fd;
    expect(server, preface, PREFACE);
    expect(server, settings, sizeof settings);
    expect(server, request, sizeof request);
    memcpy(answer, head, sizeof head);
    say(server, answer, LENGTH);
    shutdown(server, SHUT_WR);
    expect(fd, settings, sizeof settings);
    expect(fd, acknowledged, sizeof acknowledged);
    assert_true(receive(fd, back, LENGTH));
    assert_memory_equal(answer, back, LENGTH);
    assert_true(is_over(fd));
    close(fd);
    await_figure(&s, "server", 1);
    finish(&s);
}

static void only_http2_gets_in_and_only_in_time(void **state)
{
    struct scene s = {.serving = ECHO};
    (void)state;
    start(&s, (struct moe_listener_config){.preface_ms = PREFACE_MS});
    uint64_t began = moe_clock_ns();
    int other = come_tcp(&s), slow = come_tcp(&s), silent = come_tcp(&s), late = come_tcp(&s);
    say(other, "GET / HTTP/1.1\r\n\r\n", 18);
    assert_true(is_over(other));
    for (int i = 0; i < 20; i++) { /* too late with its last byte */
        (void)send(slow, preface + i, 1, MSG_NOSIGNAL);
        moe_sleep_until(moe_clock_ns() + 40 * MOE_NS_PER_MS);
        if (i == 3) { /* two parts */
            say(late, preface, 10);
        } else if (i == 5) {
            go_on(late, 10);
        }
    }
    assert_true(is_over(slow));
    assert_true(is_over(silent));
    assert_true(moe_clock_ns() - began >= PREFACE_MS * MOE_NS_PER_MS);
    assert_int_equal(s.opened, 1);
    assert_int_equal(closed_by(&s, "preface"), 3);
    check_alive(late); /* in time: no limit runs any more */
    close(other);
    close(slow);
    close(silent);
    close(late);
    finish(&s);
}

static void a_peer_has_so_many_connections_and_all_have_so_many(void **state)
{
    struct scene s = {.serving = ECHO};
    int tcp[4], local[4];
    (void)state;
    start(&s, (struct moe_listener_config){.max_connections = 5, .max_per_peer = 3});
    for (int i = 0; i < 4; i++) {
        tcp[i] = come_tcp(&s);
        if (i < 3)
            begin(tcp[i]);
    }
    assert_true(is_over(tcp[3])); /* one address has 3 */
    for (int i = 0; i < 3; i++) {
        local[i] = come_unix(&s);
        if (i < 2)
            begin(local[i]);
    }
    assert_true(is_over(local[2])); /* all have 5 */
    assert_int_equal(closed_by(&s, "limit"), 2);
    close(tcp[0]);
    await_figure(&s, "client", 1);
    local[3] = come_unix(&s);
    begin(local[3]);
    for (int i = 0; i < 4; i++) {
        if (i != 0)
            close(tcp[i]);
        close(local[i]);
    }
    finish(&s);
}

/* The server's own decision: here, connections number 0 and 1 may stay. */
static bool keeps(void *ctx, void *connection)
{
    struct scene *s = ctx;
    return connection == &s->connections[0] || connection == &s->connections[1];
}

static void those_without_a_right_make_room_for_those_who_come(void **state)
{
    struct scene s = {.serving = ECHO};
    (void)state;
    start(&s,
          (struct moe_listener_config){.max_connections = 5, .max_per_peer = 4, .keeps = keeps});
    int tcp[5], local[4];
    tcp[0] = come_tcp(&s);
    begin(tcp[0]); /* keeps its place */
    local[0] = come_unix(&s);
    begin(local[0]);              /* so does this one */
    for (int i = 1; i < 4; i++) { /* all loopback addresses are one peer */
        tcp[i] = come_from(&s, i == 1 ? "127.0.0.2" : "127.3.0.1");
        if (i < 3)
            begin(tcp[i]);
    }
    moe_sleep_until(moe_clock_ns() + 1200 * MOE_NS_PER_MS);
    local[1] = come_unix(&s); /* the sixth */
    begin(local[1]);
    assert_true(is_over(tcp[3])); /* no request for a second */
    tcp[4] = come_from(&s, "127.0.0.4");
    begin(tcp[4]);
    assert_true(is_over(tcp[1])); /* the oldest without a right */
    local[2] = come_unix(&s);
    begin(local[2]);
    assert_true(is_over(tcp[2]));
    local[3] = come_unix(&s);
    begin(local[3]);
    assert_true(is_over(local[1]));
    assert_int_equal(closed_by(&s, "limit"), 4);
    check_alive(tcp[0]);
    check_alive(local[0]);
    for (int i = 0; i < 5; i++)
        close(tcp[i]);
    for (int i = 0; i < 4; i++)
        close(local[i]);
    finish(&s);
}

static void a_peer_replaces_its_own_connections(void **state)
{
    struct scene s = {.serving = ECHO};
    (void)state;
    start(&s,
          (struct moe_listener_config){.max_connections = 8, .max_per_peer = 3, .keeps = keeps});
    int tcp[4], local = come_unix(&s), other = come_unix(&s), third = come_unix(&s);
    begin(local); /* numbers 0 and 1 are kept, number 2 is older than all of TCP */
    begin(other);
    begin(third);
    for (int i = 0; i < 4; i++) {
        tcp[i] = i % 2 == 0 ? come_tcp(&s) : come_from(&s, "127.0.0.9");
        begin(tcp[i]);
    }
    assert_true(is_over(tcp[0]));
    check_alive(third);
    check_alive(tcp[1]);
    for (int i = 0; i < 4; i++)
        close(tcp[i]);
    close(local);
    close(other);
    close(third);
    finish(&s);
}

/* Reads so much every 10 ms. */
static bool is_read_for(int fd, size_t bytes, uint64_t ms)
{
    static char sink[65536];
    uint64_t until = moe_clock_ns() + ms * MOE_NS_PER_MS;
    while (moe_clock_ns() < until) {
        if (recv(fd, sink, bytes, 0) <= 0)
            return false;
        moe_sleep_until(moe_clock_ns() + 10 * MOE_NS_PER_MS);
    }
    return true;
}

static void answers_left_unread_end_a_connection(void **state)
{
    struct scene s = {.serving = CHATTY};
    (void)state;
    start(&s, (struct moe_listener_config){.silence_ms = SILENCE_MS});
    int stopped = come_tcp(&s), trickle = come_tcp(&s), slow = come_unix(&s);
    say_request(stopped);
    say_request(trickle);
    say_request(slow);
    /* 10 KB/s is as good as nothing; some MB/s are enough. */
    uint64_t give_up = moe_clock_ns() + SOON_MS * MOE_NS_PER_MS;
    while (closed_by(&s, "unread") < 2 && moe_clock_ns() < give_up) {
        (void)is_read_for(trickle, 100, 10);
        assert_true(is_read_for(slow, 65536, 10));
    }
    assert_int_equal(closed_by(&s, "unread"), 2);
    assert_true(is_read_for(slow, 65536, 2 * SILENCE_MS));
    close(stopped);
    close(trickle);
    close(slow);
    finish(&s);
}

static bool is_unix(void *ctx, const struct moe_rpc_identity *who)
{
    (void)ctx;
    return who->link == MOE_RPC_LINK_UNIX;
}

static void connections_of_an_identity_can_be_ended(void **state)
{
    struct scene s = {.serving = ECHO};
    (void)state;
    start(&s, (struct moe_listener_config){0});
    int tcp = come_tcp(&s), local = come_unix(&s), young = come_unix(&s);
    begin(tcp);
    begin(local);
    moe_listener_disconnect(s.listener, is_unix, NULL);
    assert_true(is_over(local));
    assert_true(is_over(young));
    await_figure(&s, "identity", 2);
    check_alive(tcp);
    close(tcp);
    close(local);
    close(young);
    finish(&s);
}

/* ------------------------------------------------------------------ without descriptors */

enum { CROWD = 200, LOW_MAX = 4096 };

static void without_descriptors_clients_are_refused_and_may_come_back(void **state)
{
    struct scene s = {.serving = ECHO};
    struct rlimit before, few;
    static int crowd[CROWD], low[LOW_MAX];
    int low_count = 0, fd;
    (void)state;
    start(&s, (struct moe_listener_config){0});
    int first = come_tcp(&s);
    begin(first);
    for (int i = 0; i < CROWD; i++)
        assert_true((crowd[i] = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    few.rlim_cur = (rlim_t)crowd[CROWD - 1] + 2;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    while ((fd = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0) {
        assert_true(low_count < LOW_MAX);
        low[low_count++] = fd;
    }
    for (int i = 0; i < CROWD; i++) {
        assert_int_equal(connect(crowd[i], (struct sockaddr *)&s.tcp, sizeof s.tcp), 0);
        assert_true(is_over(crowd[i]));
    }
    await_figure(&s, "descriptors", CROWD);
    /* The lowest limit below the reserve: it cannot be opened again, as if another thread had
     * taken it. */
    few.rlim_cur = 3;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    close(crowd[0]);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    crowd[0] = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    assert_int_equal(connect(crowd[0], (struct sockaddr *)&s.tcp, sizeof s.tcp), 0);
    struct pollfd wait = {.fd = crowd[0], .events = POLLIN};
    (void)poll(&wait, 1, 100);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    check_alive(first); /* an established connection goes on */
    while (low_count > 0)
        close(low[--low_count]);
    int last = come_tcp(&s);
    begin(last);
    close(last);
    close(first);
    for (int i = 0; i < CROWD; i++)
        close(crowd[i]);
    finish(&s);
}

static void a_flood_learns_the_reason_and_is_closed(void **state)
{
    struct scene s = {.serving = ECHO};
    uint8_t frame[17];
    bool informed = false;
    (void)state;
    start(&s, (struct moe_listener_config){0});
    int fd = come_tcp(&s), other = come_tcp(&s);
    begin(fd);
    begin(other);
    while (send(fd, settings, sizeof settings, MSG_NOSIGNAL) > 0)
        ;
    while (!informed && receive(fd, frame, 9)) {
        informed = frame[3] == 7;
        assert_true(!informed || (receive(fd, frame + 9, 8) && frame[16] == 11));
    }
    print_message("  GOAWAY %s\n", informed ? "came" : "was lost with the connection");
    await_figure(&s, "flood", 1);
    check_alive(other);
    close(fd);
    close(other);
    int bad = come_tcp(&s);
    begin(bad);
    say(bad, "\0\0\1\1\4\0\0\0\2\x83", 10); /* HEADERS on a stream of the server */
    assert_true(is_over(bad));
    await_figure(&s, "malformed", 1);
    close(bad);
    finish(&s);
}

static void a_header_block_must_end_in_time(void **state)
{
    struct scene s = {.serving = ECHO};
    char back[9 + 1];
    (void)state;
    start(&s, (struct moe_listener_config){.preface_ms = PREFACE_MS});
    int fd = come_tcp(&s);
    begin(fd);
    uint64_t began = moe_clock_ns();
    say(fd, "\0\0\1\1\0\0\0\0\1\x83", 10);
    assert_true(receive(fd, back, sizeof back));
    assert_true(is_over(fd));
    assert_true(moe_clock_ns() - began >= PREFACE_MS * MOE_NS_PER_MS);
    await_figure(&s, "preface", 1);
    close(fd);
    finish(&s);
}

/* ------------------------------------------------------------------ TLS */

struct secure {
    int fd;
    SSL *ssl;
};

/* A client with the pair `own`, or without one. False if the server closes the connection. */
static bool begin_tls(struct scene *s, const char *at, const char *own, struct secure *c)
{
    char back[WELCOME];
    size_t n, have = 0;
    c->fd = come_tcp(s);
    c->ssl = certificates_client(c->fd, at, "ca", own, "h2");
    bool goes_on = SSL_connect(c->ssl) == 1 && SSL_write(c->ssl, preface, 7) == 7 &&
                   SSL_write(c->ssl, preface + 7, PREFACE - 7) == PREFACE - 7 &&
                   SSL_write(c->ssl, settings, sizeof settings) == sizeof settings &&
                   SSL_write(c->ssl, request, sizeof request) == sizeof request;
    while (goes_on && have < sizeof back) {
        goes_on = SSL_read_ex(c->ssl, back + have, sizeof back - have, &n) == 1;
        have += goes_on ? n : 0;
    }
    assert_true(!goes_on || memcmp(back, welcome, WELCOME) == 0);
    return goes_on;
}

static void end_tls(struct secure *c)
{
    SSL_free(c->ssl);
    close(c->fd);
}

static bool is_ann(void *ctx, const struct moe_rpc_identity *who)
{
    (void)ctx;
    return strcmp(who->name, "spiffe://a/ann") == 0;
}

static unsigned long handshakes_failed(struct scene *s, const char *reason)
{
    char series[128];
    snprintf(series, sizeof series,
             "moe_rpc_handshakes_failed_total{server=\"data\",reason=\"%s\"}", reason);
    return figure(s, series);
}

struct tls_scene {
    struct scene s;
    struct moe_tls *tls;
    char at[CERTIFICATES_PATH], paths[3][CERTIFICATES_PATH + 16];
};

static void start_tls(struct tls_scene *t, struct moe_listener_config config)
{
    static const char *const names[] = {"server.pem", "server.key", "ca.pem"};
    t->s.serving = ECHO;
    certificates_directory(t->at);
    certificates_make(t->at, "ca", NULL, NULL, -60, 3600);
    certificates_make(t->at, "server", "ca", "DNS:localhost", -60, 3600);
    certificates_make(t->at, "ann", "ca", "URI:spiffe://a/ann", -60, 3600);
    certificates_make(t->at, "old", "ca", "URI:spiffe://a/ann", -60, -30);
    for (int i = 0; i < 3; i++)
        snprintf(t->paths[i], sizeof t->paths[i], "%s/%s", t->at, names[i]);
    const struct moe_rpc_tls_files files = {t->paths[0], t->paths[1], t->paths[2]};
    assert_ok(moe_tls_create(&files, &t->tls));
    config.tls = t->tls;
    start(&t->s, config);
}

static void finish_tls(struct tls_scene *t)
{
    finish(&t->s);
    moe_tls_destroy(t->tls);
    certificates_remove(t->at);
}

static void a_certificate_names_a_connection_and_counts_for_it(void **state)
{
    static struct tls_scene t;
    struct secure ann[3], unnamed[2], more;
    char byte;
    (void)state;
    start_tls(&t, (struct moe_listener_config){.max_per_peer = 3});
    for (int i = 0; i < 3; i++)
        assert_true(begin_tls(&t.s, t.at, "ann", &ann[i]));
    assert_int_equal(t.s.connections[0].who.link, MOE_RPC_LINK_TLS);
    assert_string_equal(t.s.connections[0].who.name, "spiffe://a/ann");
    assert_string_equal(t.s.connections[0].who.address, "127.0.0.1");
    assert_false(begin_tls(&t.s, t.at, "ann", &more)); /* ann has 3 */
    assert_int_equal(closed_by(&t.s, "limit"), 1);
    end_tls(&more);
    for (int i = 0; i < 2; i++) /* the address has none of them */
        assert_true(begin_tls(&t.s, t.at, NULL, &unnamed[i]));
    assert_string_equal(t.s.connections[3].who.name, "");
    int local = come_unix(&t.s); /* plain */
    begin(local);
    moe_listener_disconnect(t.s.listener, is_ann, NULL);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(SSL_read(ann[i].ssl, &byte, 1), 0);
        assert_int_equal(SSL_get_error(ann[i].ssl, 0), SSL_ERROR_ZERO_RETURN); /* close_notify */
        end_tls(&ann[i]);
    }
    await_figure(&t.s, "identity", 3);
    check_alive(local);
    assert_true(begin_tls(&t.s, t.at, "ann", &more)); /* its places are free */
    end_tls(&more);
    close(local);
    for (int i = 0; i < 2; i++)
        end_tls(&unnamed[i]);
    finish_tls(&t);
}

static void a_handshake_succeeds_in_time_or_is_counted(void **state)
{
    static struct tls_scene t;
    struct secure old, good;
    (void)state;
    start_tls(&t, (struct moe_listener_config){.preface_ms = 500});
    int plain = come_tcp(&t.s), half = come_tcp(&t.s), silent = come_tcp(&t.s);
    say(half, "\26\3\1", 3);
    say(plain, preface, PREFACE);
    assert_true(is_over(plain));
    assert_int_equal(handshakes_failed(&t.s, "protocol"), 1);
    assert_false(begin_tls(&t.s, t.at, "old", &old));
    assert_true(is_over(half));
    assert_true(is_over(silent));
    assert_int_equal(handshakes_failed(&t.s, "certificate"), 1); /* its alert comes before */
    assert_int_equal(handshakes_failed(&t.s, "time"), 2);
    assert_int_equal(closed_by(&t.s, "handshake"), 4);
    assert_true(begin_tls(&t.s, t.at, "ann", &good));
    assert_int_equal(t.s.opened, 1);
    end_tls(&old);
    end_tls(&good);
    close(plain);
    close(half);
    close(silent);
    finish_tls(&t);
}

/* Sends `bytes` and the end of the connection in one segment, so no event is about the end alone.
 */
static void send_last(struct secure *c, const char *bytes, int length)
{
    const int on = 1;
    assert_int_equal(setsockopt(c->fd, IPPROTO_TCP, TCP_CORK, &on, sizeof on), 0);
    assert_int_equal(SSL_write(c->ssl, bytes, length), length);
    assert_int_equal(shutdown(c->fd, SHUT_WR), 0);
}

static void a_tls_client_that_sends_and_leaves_is_done_at_once(void **state)
{
    static struct tls_scene t;
    struct secure early, late;
    (void)state;
    start_tls(&t, (struct moe_listener_config){.preface_ms = 10 * SOON_MS});
    early.fd = come_tcp(&t.s);
    early.ssl = certificates_client(early.fd, t.at, "ca", NULL, "h2");
    assert_int_equal(SSL_connect(early.ssl), 1);
    send_last(&early, preface, PREFACE / 2);
    await_figure(&t.s, "client", 1);
    assert_true(begin_tls(&t.s, t.at, NULL, &late));
    send_last(&late, settings, sizeof settings);
    await_figure(&t.s, "client", 2);
    end_tls(&early);
    end_tls(&late);
    finish_tls(&t);
}

int main(void)
{
    seed_random();
    signal(SIGPIPE, SIG_IGN); /* OpenSSL's client writes to what the server has closed */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_kernel_says_who_connects),
        cmocka_unit_test(a_socket_file_in_use_is_refused_and_a_stale_one_replaced),
        cmocka_unit_test(the_socket_of_a_group_is_open_to_it_and_to_no_one_else),
        cmocka_unit_test(bad_addresses_are_refused),
        cmocka_unit_test(bytes_arrive_whole_and_in_order_both_ways),
        cmocka_unit_test(what_the_server_sent_arrives_before_the_end),
        cmocka_unit_test(only_http2_gets_in_and_only_in_time),
        cmocka_unit_test(a_peer_has_so_many_connections_and_all_have_so_many),
        cmocka_unit_test(those_without_a_right_make_room_for_those_who_come),
        cmocka_unit_test(a_peer_replaces_its_own_connections),
        cmocka_unit_test(answers_left_unread_end_a_connection),
        cmocka_unit_test(connections_of_an_identity_can_be_ended),
        cmocka_unit_test(a_flood_learns_the_reason_and_is_closed),
        cmocka_unit_test(a_header_block_must_end_in_time),
        cmocka_unit_test(a_certificate_names_a_connection_and_counts_for_it),
        cmocka_unit_test(a_handshake_succeeds_in_time_or_is_counted),
        cmocka_unit_test(a_tls_client_that_sends_and_leaves_is_done_at_once),
        cmocka_unit_test(without_descriptors_clients_are_refused_and_may_come_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
