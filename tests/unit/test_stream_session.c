/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions of moe/client_cuda.h without a GPU, on fake_cuda_runtime.h. */
#include "fake_cuda_runtime.h"
#include "moe/client_cuda.h"
#include "moe/regions_device.h"
#include "regions/memory.h"
#include "regions/ring.h"
#include "shared_fixture.h"

#include <unistd.h>

enum { SLOT = 64 << 10, THREADS = 8 };

/* -------------------------------------------------------------------- the client */

struct scene {
    struct moe_client *client;
    struct moe_client_session *session;
    struct moe_client_region *region;
    struct moe_stream_session *streams;
    struct moe_client_session_forward forward;
};

static void release(void *ctx, void *data, size_t bytes)
{
    (void)ctx;
    moe_region_memory_unmap(data, bytes);
}

static void start(struct scene *s, int device)
{
    const struct moe_stream_session_config config = {.size = sizeof config, .device = device};
    struct moe_client_memory memory = {
        .size = sizeof memory, .bytes = 2 * SLOT, .release = release};
    const struct moe_layer_spec *spec = shared.worker.specs[0];
    *s = (struct scene){.client = shared_client()};
    atomic_store(&fake_cuda.registrations, 0);
    assert_ok(moe_session_open(s->client, NULL, &s->session));
    assert_ok(moe_region_memory_create(memory.bytes, &memory.descriptor, &memory.data));
    assert_ok(moe_region_adopt(s->session, "device", &memory, &s->region));
    close(memory.descriptor);
    assert_ok(moe_stream_session_open(s->session, &config, &s->streams));
    s->forward = (struct moe_client_session_forward){.size = sizeof s->forward,
                                                     .layer = spec->layer,
                                                     .tokens = 2,
                                                     .hidden = spec->hidden,
                                                     .dtype = MOE_DTYPE_F32,
                                                     .x = {s->region, 0},
                                                     .y = {s->region, SLOT}};
}

static void stop(struct scene *s)
{
    moe_stream_session_close(s->streams);
    assert_int_equal(atomic_load(&fake_cuda.registered), 0);
    moe_session_close(s->session);
    moe_client_close(s->client);
}

struct first {
    const struct scene *scene;
    pthread_barrier_t *barrier;
    struct moe_stream_request *request;
    struct moe_status status;
};

static void *make_request(void *arg)
{
    struct first *f = arg;
    (void)pthread_barrier_wait(f->barrier);
    f->status = moe_stream_request_create(f->scene->streams, &f->scene->forward, &f->request);
    return NULL;
}

/* -------------------------------------------------------------------- promises */

static void threads_make_their_first_requests_at_once(void **state)
{
    (void)state;
    struct scene s;
    struct first firsts[THREADS];
    pthread_t threads[THREADS];
    pthread_barrier_t barrier;
    fake_cuda.device_of_memory = 0;
    start(&s, 0);
    assert_int_equal(pthread_barrier_init(&barrier, NULL, THREADS), 0);
    for (int i = 0; i < THREADS; i++) {
        firsts[i] = (struct first){.scene = &s, .barrier = &barrier};
        assert_int_equal(pthread_create(&threads[i], NULL, make_request, &firsts[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    (void)pthread_barrier_destroy(&barrier);
    for (int i = 0; i < THREADS; i++) {
        assert_ok(firsts[i].status);
        moe_stream_request_destroy(firsts[i].request);
    }
    assert_int_equal(atomic_load(&fake_cuda.registrations), 1);
    stop(&s);
}

/* A wait writes there. More refusals than entries: none of them keeps one. */
static void y_lies_on_the_device_of_the_session(void **state)
{
    (void)state;
    for (int device = 0; device < 2; device++) {
        struct scene s;
        struct moe_stream_request *request = NULL;
        start(&s, device);
        fake_cuda.device_of_memory = 1 - device;
        for (int i = 0; i < MOE_RING_ENTRIES + 1; i++) {
            struct moe_status st = moe_stream_request_create(s.streams, &s.forward, &request);
            assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
            assert_int_equal(st.reason, MOE_REASON_REGION_INVALID);
        }
        fake_cuda.device_of_memory = device;
        assert_ok(moe_stream_request_create(s.streams, &s.forward, &request));
        moe_stream_request_destroy(request);
        stop(&s);
    }
}

#define shared_test(f) cmocka_unit_test_setup_teardown(f, shared_open, shared_close)

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        shared_test(threads_make_their_first_requests_at_once),
        shared_test(y_lies_on_the_device_of_the_session),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
