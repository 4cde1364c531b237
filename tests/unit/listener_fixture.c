/* SPDX-License-Identifier: Apache-2.0 */
#include "listener_fixture.h"

#include "support/random.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const char settings[9] = "\0\0\0\4\0\0\0\0";
const char acknowledged[9] = "\0\0\0\4\1\0\0\0";
const char request[10] = "\0\0\1\1\4\0\0\0\1\x82";
const char ping[] = "\0\0\10\6\0\0\0\0\0wonderful"; /* less one byte */
/* SETTINGS and the acknowledgement of the client's, then the echo. */
const char welcome[] = "\0\0\0\4\0\0\0\0\0"
                       "\0\0\0\4\1\0\0\0\0"
                       "\0\0\0\4\0\0\0\0\0"
                       "\0\0\1\1\4\0\0\0\1\x82";

/* ------------------------------------------------------------------ the server */

static void wait_for(int fd, short what)
{
    struct pollfd wait = {.fd = fd, .events = what};
    (void)poll(&wait, 1, -1);
}

/* Both sides are non-blocking, as the core's are. */
static void *echo(void *arg)
{
    int fd = *(int *)arg;
    static _Thread_local char bytes[100000];
    ssize_t n, skipped = 0;
    while ((n = read(fd, bytes, sizeof bytes)) != 0) {
        if (n < 0 && errno == EAGAIN) {
            wait_for(fd, POLLIN);
            continue;
        }
        if (n < 0)
            break;
        ssize_t at = n < PREFACE - skipped ? n : PREFACE - skipped;
        skipped += at;
        while (at < n) {
            ssize_t sent = send(fd, bytes + at, (size_t)(n - at), MSG_NOSIGNAL);
            if (sent < 0 && errno != EAGAIN)
                break;
            if (sent < 0)
                wait_for(fd, POLLOUT);
            else
                at += sent;
        }
    }
    shutdown(fd, SHUT_RDWR);
    return NULL;
}

static void *chat(void *arg)
{
    int fd = *(int *)arg;
    static const char bytes[65536];
    while (send(fd, bytes, sizeof bytes, MSG_NOSIGNAL) >= 0 || errno == EAGAIN)
        wait_for(fd, POLLOUT);
    return NULL;
}

static void *opened(void *ctx, const struct moe_rpc_identity *who,
                    struct moe_connection *connection, int fd)
{
    struct scene *s = ctx;
    (void)connection;
    unsigned i = atomic_load(&s->opened);
    if (i == OPENED_MAX)
        abort();
    s->connections[i].scene = s;
    s->connections[i].fd = fd;
    s->connections[i].who = *who;
    if (s->serving != SILENT &&
        pthread_create(&s->connections[i].thread, NULL, s->serving == ECHO ? echo : chat,
                       &s->connections[i].fd) != 0)
        abort();
    atomic_fetch_add(&s->opened, 1);
    return &s->connections[i];
}

static void closed(void *ctx, void *connection)
{
    struct scene *s = ctx;
    assert_non_null(connection);
    atomic_fetch_add(&s->closed, 1);
}

void start(struct scene *s, struct moe_listener_config config)
{
    char addresses[256];
    enum serving serving = s->serving;
    *s = (struct scene){.serving = serving};
    assert_true(moe_test_directory("listener", s->directory));
    snprintf(s->path, sizeof s->path, "%s/sock", s->directory);
    snprintf(addresses, sizeof addresses, "127.0.0.1:0,unix:%s", s->path);
    assert_ok(moe_metrics_create(&s->metrics));
    config.addresses = addresses;
    config.spin_ns = random_below(2) * UINT64_C(50000); /* relays that poll do the same */
    config.metrics = s->metrics;
    config.opened = opened;
    config.closed = closed;
    config.ctx = s;
    assert_ok(moe_listener_open(&config, &s->listener));
    assert_ok(moe_listener_run(s->listener));
    s->tcp = (struct sockaddr_in){.sin_family = AF_INET,
                                  .sin_port = htons(moe_listener_port(s->listener)),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

void finish(struct scene *s)
{
    moe_listener_close(s->listener);
    moe_listener_destroy(s->listener);
    assert_int_equal(s->opened, s->closed);
    for (unsigned i = 0; i < s->opened; i++) {
        if (s->serving != SILENT)
            pthread_join(s->connections[i].thread, NULL);
        close(s->connections[i].fd);
    }
    moe_metrics_destroy(s->metrics);
    assert_int_equal(rmdir(s->directory), 0); /* the socket's file is gone */
}

unsigned long figure(struct scene *s, const char *series)
{
    char *text;
    size_t length;
    assert_ok(moe_metrics_render(s->metrics, &text, &length));
    const char *line = strstr(text, series);
    assert_non_null(line);
    unsigned long value = strtoul(line + strlen(series), NULL, 10);
    free(text);
    return value;
}

unsigned long closed_by(struct scene *s, const char *reason)
{
    char series[128];
    snprintf(series, sizeof series,
             "moe_rpc_connections_closed_total{server=\"data\",reason=\"%s\"}", reason);
    return figure(s, series);
}

void await_figure(struct scene *s, const char *reason, unsigned long value)
{
    uint64_t give_up = moe_clock_ns() + SOON_MS * MOE_NS_PER_MS;
    while (closed_by(s, reason) < value && moe_clock_ns() < give_up)
        moe_sleep_until(moe_clock_ns() + MOE_NS_PER_MS);
    assert_int_equal(closed_by(s, reason), value);
}

void await_opened(struct scene *s, unsigned count)
{
    uint64_t give_up = moe_clock_ns() + SOON_MS * MOE_NS_PER_MS;
    while (atomic_load(&s->opened) < count && moe_clock_ns() < give_up)
        moe_sleep_until(moe_clock_ns() + MOE_NS_PER_MS);
    assert_int_equal(atomic_load(&s->opened), count);
}

/* ------------------------------------------------------------------ clients */

int come_tcp(struct scene *s)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&s->tcp, sizeof s->tcp), 0);
    return fd;
}

int come_unix(struct scene *s)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%s", s->path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof at), 0);
    return fd;
}

void say(int fd, const void *bytes, size_t length)
{
    assert_int_equal(send(fd, bytes, length, MSG_NOSIGNAL), (ssize_t)length);
}

bool receive(int fd, void *bytes, size_t length)
{
    for (size_t at = 0; at < length;) {
        struct pollfd wait = {.fd = fd, .events = POLLIN};
        assert_int_equal(poll(&wait, 1, SOON_MS), 1);
        ssize_t n = recv(fd, (char *)bytes + at, length - at, 0);
        if (n <= 0)
            return false;
        at += (size_t)n;
    }
    return true;
}

int come_from(struct scene *s, const char *address)
{
    struct sockaddr_in from = {.sin_family = AF_INET};
    assert_int_equal(inet_pton(AF_INET, address, &from.sin_addr), 1);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&from, sizeof from), 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&s->tcp, sizeof s->tcp), 0);
    return fd;
}

void expect(int fd, const void *bytes, size_t length)
{
    char back[256];
    assert_true(length <= sizeof back && receive(fd, back, length));
    assert_memory_equal(back, bytes, length);
}

bool is_over(int fd)
{
    char byte;
    return !receive(fd, &byte, 1);
}

/* ------------------------------------------------------------------ the client's frames */

void go_on(int fd, size_t from)
{
    say(fd, preface + from, PREFACE - from);
    say(fd, settings, sizeof settings);
    say(fd, request, sizeof request);
    expect(fd, welcome, WELCOME);
}

void begin(int fd)
{
    go_on(fd, 0);
}

void say_request(int fd)
{
    say(fd, preface, PREFACE);
    say(fd, settings, sizeof settings);
    say(fd, request, sizeof request);
}

void check_alive(int fd)
{
    say(fd, ping, PING);
    expect(fd, ping, PING);
}
