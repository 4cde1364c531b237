/* SPDX-License-Identifier: Apache-2.0 */
/* Connections that close while calls arrive. The core aborts when a request for a call and the
 * shutdown of its server run at the same time; here both are slow, and such a meeting is counted.
 */
#include "rpc_raw.h"

#include <grpc/grpc.h>
#include <unistd.h>

enum { MOST = 16, SLOW_US = 2000, ROUNDS = 60, CALLS = 8 };

static struct moe_mutex lock;
static const grpc_server *requested[MOST]; /* a request for a call of it runs */
static unsigned met, requests, shutdowns;

static bool runs(const grpc_server *server)
{
    for (int i = 0; i < MOST; i++)
        if (requested[i] == server)
            return true;
    return false;
}

static void replace(const grpc_server *old, const grpc_server *new)
{
    int i = 0;
    moe_mutex_lock(&lock);
    while (i < MOST && requested[i] != old)
        i++;
    assert_in_range(i, 0, MOST - 1);
    requested[i] = new;
    requests++;
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

grpc_call_error __wrap_grpc_server_request_call(grpc_server *server, grpc_call **call,
                                                grpc_call_details *details,
                                                grpc_metadata_array *metadata,
                                                grpc_completion_queue *bound,
                                                grpc_completion_queue *notified, void *tag)
{
    replace(NULL, server);
    usleep(SLOW_US);
    grpc_call_error error =
        __real_grpc_server_request_call(server, call, details, metadata, bound, notified, tag);
    replace(server, NULL);
    return error;
}

void __wrap_grpc_server_shutdown_and_notify(grpc_server *server, grpc_completion_queue *queue,
                                            void *tag)
{
    moe_mutex_lock(&lock);
    met += runs(server);
    shutdowns++;
    moe_mutex_unlock(&lock);
    __real_grpc_server_shutdown_and_notify(server, queue, tag);
}

static void test_requests_never_meet_the_shutdown(void **state)
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
    assert_true(shutdowns >= ROUNDS);
    assert_true(requests >= ROUNDS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_requests_never_meet_the_shutdown)};
    moe_mutex_init(&lock);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
