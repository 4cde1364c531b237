/* SPDX-License-Identifier: Apache-2.0 */
/* Connections that close while calls arrive. The core aborts when a request for a call and the
 * shutdown of its server run at the same time, and it reads freed memory when a server is destroyed
 * before its shutdown returns. Here requests and shutdowns are slow, and such meetings are counted.
 */
#include "rpc_raw.h"

#include <grpc/grpc.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST = 16, SLOW_US = 2000, ROUNDS = 60, CALLS = 8 };

static struct moe_mutex lock;
static const grpc_server *requested[MOST]; /* a request for a call of it runs */
static const grpc_server *shutting[MOST];  /* its shutdown runs */
static atomic_uint requests;
static unsigned met, shutdowns, destroyed, destroyed_early;

static bool runs(const grpc_server *const *running, const grpc_server *server)
{
    for (int i = 0; i < MOST; i++)
        if (running[i] == server)
            return true;
    return false;
}

static void replace(const grpc_server **running, const grpc_server *old, const grpc_server *new)
{
    int i = 0;
    moe_mutex_lock(&lock);
    while (i < MOST && running[i] != old)
        i++;
    assert_in_range(i, 0, MOST - 1);
    running[i] = new;
    moe_mutex_unlock(&lock);
}

grpc_call_error __real_grpc_server_request_call(grpc_server *server, grpc_call **call,
                                                grpc_call_details *details,
                                                grpc_metadata_array *metadata,
                                                grpc_completion_queue *bound,
                                                grpc_completion_queue *notified, void *tag);
grpc_call_error __wrap_grpc_server_request_call(grpc_server *server, grpc_call **call,
                                                grpc_call_details *details,
                                                grpc_metadata_array *metadata,
                                                grpc_completion_queue *bound,
                                                grpc_completion_queue *notified, void *tag);
void __real_grpc_server_shutdown_and_notify(grpc_server *server, grpc_completion_queue *queue,
                                            void *tag);
void __wrap_grpc_server_shutdown_and_notify(grpc_server *server, grpc_completion_queue *queue,
                                            void *tag);
void __real_grpc_server_destroy(grpc_server *server);
void __wrap_grpc_server_destroy(grpc_server *server);

grpc_call_error __wrap_grpc_server_request_call(grpc_server *server, grpc_call **call,
                                                grpc_call_details *details,
                                                grpc_metadata_array *metadata,
                                                grpc_completion_queue *bound,
                                                grpc_completion_queue *notified, void *tag)
{
    atomic_fetch_add(&requests, 1);
    replace(requested, NULL, server);
    usleep(SLOW_US);
    grpc_call_error error =
        __real_grpc_server_request_call(server, call, details, metadata, bound, notified, tag);
    replace(requested, server, NULL);
    return error;
}

void __wrap_grpc_server_shutdown_and_notify(grpc_server *server, grpc_completion_queue *queue,
                                            void *tag)
{
    replace(shutting, NULL, server);
    moe_mutex_lock(&lock);
    met += runs(requested, server);
    shutdowns++;
    moe_mutex_unlock(&lock);
    __real_grpc_server_shutdown_and_notify(server, queue, tag);
    usleep(SLOW_US); /* the core may have posted the event of its end already */
    replace(shutting, server, NULL);
}

void __wrap_grpc_server_destroy(grpc_server *server)
{
    moe_mutex_lock(&lock);
    destroyed_early += runs(shutting, server);
    destroyed++;
    moe_mutex_unlock(&lock);
    __real_grpc_server_destroy(server);
}

static void test_neither_requests_nor_the_end_meet_the_shutdown(void **state)
{
    struct fixture f;
    const struct moe_rpc_server_config config = fixture_config();
    (void)state;
    fixture_start(&f, &config);
    for (int round = 0; round < ROUNDS; round++) {
        const unsigned before = atomic_load(&f.started);
        int fd = raw_connect(&f);
        for (uint32_t i = 0; i < CALLS; i++)
            raw_headers(fd, 2 * i + 1, UNARY_PATH);
        fixture_await("the first call", &f.started, before + 1);
        close(fd);
    }
    fixture_stop(&f);
    assert_int_equal(met, 0);
    /* A late call of one connection may end the wait of the next: the last ones may find the server
     * at its end, and get none. */
    assert_true(shutdowns > ROUNDS / 2);
    assert_true(requests > ROUNDS / 2);
    assert_true(destroyed > ROUNDS / 2);
    assert_int_equal(destroyed_early, 0);
}

/* Waits for the end of file; then true if the server still takes what the client sends. */
static bool is_read_after_the_end(int fd)
{
    /* A frame of a type that servers pass over. */
    static const uint8_t frame[9 + 16] = {0, 0, 16, 0x42};
    uint8_t bytes[4096];
    while (recv(fd, bytes, sizeof bytes, 0) > 0)
        ;
    bool sent = true;
    for (int i = 0; i < 3 && sent; i++) { /* a closed socket answers the first one with a reset */
        sent = send(fd, frame, sizeof frame, MSG_NOSIGNAL) == (ssize_t)sizeof frame;
        usleep(2000);
    }
    return sent;
}

static void *drain(void *server)
{
    moe_rpc_server_drain(server, moe_clock_ns());
    return NULL;
}

/* A socket that is closed while the client sends resets the connection, and the client may lose an
 * answer that it has not read. So the server waits a moment for the client to close first. */
static void test_a_client_that_still_sends_is_not_reset(void **state)
{
    enum { ATTEMPTS = 5 }; /* the host may keep the client waiting for longer than that moment */
    bool read_on = false;
    (void)state;
    for (int i = 0; i < ATTEMPTS && !read_on; i++) {
        struct fixture f;
        pthread_t drains;
        fixture_start(&f, NULL);
        int fd = raw_connect(&f);
        raw_call(fd, 1, UNARY_PATH, 1 << 20, 16);
        fixture_await("the call", &f.started, 1);
        assert_int_equal(pthread_create(&drains, NULL, drain, f.server), 0);
        read_on = is_read_after_the_end(fd);
        close(fd);
        pthread_join(drains, NULL);
        fixture_stop(&f);
    }
    assert_true(read_on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_neither_requests_nor_the_end_meet_the_shutdown),
        cmocka_unit_test(test_a_client_that_still_sends_is_not_reset)};
    moe_mutex_init(&lock);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
