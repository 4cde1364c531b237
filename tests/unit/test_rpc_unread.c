/* SPDX-License-Identifier: Apache-2.0 */
/* Data for a client that does not read is kept for a limited time. The clients here are bare
 * sockets with just enough HTTP/2 to request an answer and leave it unread: a library would read
 * it. */
#include "rpc_fixture.h"

#include <arpa/inet.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* ------------------------------------------------------------------ HTTP/2 (RFC 9113, RFC 7541) */

enum frame { DATA = 0, HEADERS = 1, SETTINGS = 4, WINDOW_UPDATE = 8 };
enum flag { END_STREAM = 1, END_HEADERS = 4 };
enum { INITIAL_WINDOW_SIZE = 4, WINDOW_MAX = 0x7fffffff, WINDOW_DEFAULT = 65535 };

static void send_all(int peer, const void *data, size_t length)
{
    assert_int_equal(send(peer, data, length, MSG_NOSIGNAL), (ssize_t)length);
}

static void put_u32(uint8_t *to, uint32_t value)
{
    value = htonl(value);
    memcpy(to, &value, sizeof value);
}

static void send_frame(int peer, enum frame type, uint8_t flags, uint32_t stream, const void *data,
                       size_t length)
{
    uint8_t header[9];
    put_u32(header, (uint32_t)length << 8 | type);
    header[4] = flags;
    put_u32(header + 5, stream);
    send_all(peer, header, sizeof header);
    send_all(peer, data, length);
}

/* A connection that is not read from; each of its streams accepts `window` bytes. */
static int connect_peer(const struct fixture *f, uint32_t window)
{
    int buffer = 4096;
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons(moe_rpc_server_port(f->server)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int peer = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(peer >= 0);
    assert_int_equal(setsockopt(peer, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer), 0);
    assert_int_equal(connect(peer, (const struct sockaddr *)&to, sizeof to), 0);
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    send_all(peer, preface, sizeof preface - 1);
    uint8_t setting[6] = {0, INITIAL_WINDOW_SIZE};
    put_u32(setting + 2, window);
    send_frame(peer, SETTINGS, 0, 0, setting, sizeof setting);
    uint8_t more[4];
    put_u32(more, WINDOW_MAX - WINDOW_DEFAULT);
    send_frame(peer, WINDOW_UPDATE, 0, 0, more, sizeof more);
    return peer;
}

/* Length and text, without Huffman code. */
static size_t put_text(uint8_t *to, const char *text)
{
    size_t length = strlen(text);
    to[0] = (uint8_t)length;
    memcpy(to + 1, text, length);
    return length + 1;
}

/* Calls the method with a ForwardRequest of `model` and no tensor. */
static void ask(int peer, uint32_t stream, const char *path, const char *model)
{
    uint8_t block[256] = {0x83, 0x86, 0x04}; /* :method POST, :scheme http, :path ... */
    size_t n = 3;
    n += put_text(block + n, path);
    block[n++] = 0x01; /* :authority */
    n += put_text(block + n, "localhost");
    block[n++] = 0x00; /* a literal name */
    n += put_text(block + n, "te");
    n += put_text(block + n, "trailers");
    block[n++] = 0x00;
    n += put_text(block + n, "content-type");
    n += put_text(block + n, "application/grpc");
    send_frame(peer, HEADERS, END_HEADERS, stream, block, n);

    uint8_t message[128] = {0}; /* not compressed */
    message[5] = 0x0a;          /* ForwardRequest.model */
    size_t length = 1 + put_text(message + 6, model);
    put_u32(message + 1, (uint32_t)length);
    send_frame(peer, DATA, strcmp(path, UNARY_PATH) == 0 ? END_STREAM : 0, stream, message,
               5 + length);
}

/* ------------------------------------------------------------------ tests */

static void an_answer_that_is_not_taken_is_let_go(void **state)
{
    enum { CALLS = 6 };
    struct fixture f;
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_send_ms = 100;
    fixture_start(&f, &config);
    uint32_t window = random_below(7); /* less than the shortest answer, an echo of nothing */
    int peer = connect_peer(&f, window);
    uint64_t began = moe_clock_ns();
    for (uint32_t i = 0; i < CALLS; i++) /* clients number their streams 1, 3, 5 ... */
        ask(peer, 2 * i + 1, i % 2 == 0 ? UNARY_PATH : STREAM_PATH, "zeros:1000000");
    unsigned served = 0;
    while (atomic_load(&f.cancelled) < CALLS) { /* the watchdog bounds this */
        assert_ok(fixture_call(&f, f.channel, "", "abc", 3, 20000, "abc", 3));
        served++;
    }
    print_message("  window %u: %d answers were left for %.1f ms; meanwhile %u calls of another "
                  "client\n",
                  window, CALLS, (double)(moe_clock_ns() - began) / 1e6, served);
    assert_true(moe_clock_ns() - began >= 100 * MOE_NS_PER_MS);
    fixture_await("all calls to be over", &f.done, CALLS + served);
    fixture_await("all parts to be back", &f.released, f.lent);
    assert_true(f.lent >= CALLS);
    close(peer);
    fixture_stop(&f);
}

/* With windows that never end, all of the answer is part of one write to the connection, where
 * cancelling the call does not reach it: TCP gives the connection up. */
static void a_client_that_stops_reading_its_socket_is_cut_off(void **state)
{
    struct fixture f;
    (void)state;
    struct moe_rpc_server_config config = fixture_config();
    config.max_send_ms = 100;
    config.silence_ms = 500;
    fixture_start(&f, &config);
    int peer = connect_peer(&f, WINDOW_MAX);
    uint64_t began = moe_clock_ns();
    ask(peer, 1, UNARY_PATH, "zeros:50000000");
    fixture_await("the call", &f.started, 1);
    unsigned served = 0;
    do { /* the watchdog bounds this */
        assert_ok(fixture_call(&f, f.channel, "", "abc", 3, 20000, "abc", 3));
        served++;
        usleep(1000);
    } while (atomic_load(&f.done) < 1 + served || atomic_load(&f.released) < f.lent);
    print_message("  cut off after %.1f s; meanwhile %u calls of another client\n",
                  (double)(moe_clock_ns() - began) / 1e9, served);
    close(peer);
    fixture_stop(&f);
}

int main(void)
{
    seed_random();
    moe_rpc_tune_allocator();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_answer_that_is_not_taken_is_let_go),
        cmocka_unit_test(a_client_that_stops_reading_its_socket_is_cut_off),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
