/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of moe/regions_device.h, with the CPU as the worker's device: it imports memfds, and no
 * code of the daemon but the backend's touches them. The client's device is this test: it runs what
 * kernels run (regions/device_caller.h). */
#include "base/clock.h"
#include "base/wait.h"
#include "moe/regions_device.h"
#include "regions/device_caller.h"
#include "regions/memory.h"
#include "shared_fixture.h"

#include <sys/mman.h>
#include <unistd.h>

enum { SLOT = 64 << 10 };
enum { X, IDS_IN, WEIGHTS_IN, Y, IDS, WEIGHTS, SLOTS };

struct scene {
    struct moe_client *client;
    struct moe_client_session *session;
    struct moe_client_region *region; /* device memory; this process may look at it all the same */
    char *data;
    int released; /* how often the library has freed the memory */
};

static void release(void *ctx, void *data, size_t bytes)
{
    struct scene *s = ctx;
    assert_ptr_equal(data, s->data);
    moe_region_memory_unmap(data, bytes);
    s->released++;
}

static struct moe_status adopt(struct scene *s, const char *name, int descriptor, void *data,
                               size_t bytes, struct moe_client_region **out)
{
    const struct moe_client_memory memory = {.size = sizeof memory,
                                             .data = data,
                                             .bytes = bytes,
                                             .release = release,
                                             .ctx = s,
                                             .descriptor = descriptor};
    return moe_region_adopt(s->session, name, &memory, out);
}

static void start(struct scene *s, uint64_t timeout_ms, size_t requests)
{
    const struct moe_client_session_config config = {.size = sizeof config,
                                                     .timeout_ms = timeout_ms};
    void *data;
    int descriptor;
    *s = (struct scene){.client = shared_client()};
    assert_ok(moe_session_open(s->client, &config, &s->session));
    assert_ok(moe_region_memory_create(requests * SLOTS * SLOT, &descriptor, &data));
    s->data = data;
    assert_ok(adopt(s, "device", descriptor, data, requests * SLOTS * SLOT, &s->region));
    close(descriptor);
    assert_ptr_equal(moe_region_data(s->region), data);
}

static void stop(struct scene *s)
{
    moe_session_close(s->session);
    moe_client_close(s->client);
    assert_int_equal(s->released, 1);
}

static struct moe_client_tensor at(const struct scene *s, size_t request, int slot)
{
    return (struct moe_client_tensor){s->region, (request * SLOTS + (size_t)slot) * SLOT};
}

static void *data_of(const struct scene *s, size_t request, int slot)
{
    return s->data + at(s, request, slot).offset;
}

static size_t rows_of(const struct request *r)
{
    const struct moe_layer_spec *spec = shared.worker.specs[r->layer];
    return (size_t)r->work.tokens * spec->hidden * moe_dtype_bytes(r->work.dtype);
}

static size_t pairs_of(const struct request *r)
{
    return (size_t)r->work.tokens * shared.worker.specs[r->layer]->router.top_k * 4;
}

/* Puts the inputs of a request into the region. */
static void put(const struct scene *s, size_t n, const struct request *r)
{
    memcpy(data_of(s, n, X), r->x, rows_of(r));
    if (r->work.mode != MOE_ROUTE_SERVER)
        memcpy(data_of(s, n, IDS_IN), r->ids_in, pairs_of(r));
    if (r->work.mode == MOE_ROUTE_IDS_WEIGHTS)
        memcpy(data_of(s, n, WEIGHTS_IN), r->weights_in, pairs_of(r));
    memset(data_of(s, n, Y), 0xee, SLOT);
}

static struct moe_client_session_forward forward_of(const struct scene *s, size_t n,
                                                    const struct request *r)
{
    const struct moe_layer_spec *spec = shared.worker.specs[r->layer];
    struct moe_client_session_forward f = {.size = sizeof f,
                                           .layer = spec->layer,
                                           .tokens = r->work.tokens,
                                           .hidden = spec->hidden,
                                           .dtype = r->work.dtype,
                                           .x = at(s, n, X),
                                           .y = at(s, n, Y),
                                           .ids = at(s, n, IDS),
                                           .weights = at(s, n, WEIGHTS)};
    if (r->work.mode != MOE_ROUTE_SERVER)
        f.ids_in = at(s, n, IDS_IN);
    if (r->work.mode == MOE_ROUTE_IDS_WEIGHTS)
        f.weights_in = at(s, n, WEIGHTS_IN);
    return f;
}

/* Compares with Forward, all bits. */
static void assert_same(const struct scene *s, size_t n, struct request *r)
{
    const struct moe_layer_spec *spec = shared.worker.specs[r->layer];
    const struct moe_work *w = &r->work;
    struct moe_client_forward f = {.size = sizeof f,
                                   .layer = spec->layer,
                                   .tokens = w->tokens,
                                   .hidden = spec->hidden,
                                   .dtype = w->dtype,
                                   .x = r->x,
                                   .topk_ids_in = w->ids_in,
                                   .topk_weights_in = w->weights_in,
                                   .y = r->y,
                                   .topk_ids = r->ids_out,
                                   .topk_weights = r->weights_out};
    assert_ok(moe_client_forward(s->client, &f));
    assert_memory_equal(data_of(s, n, Y), r->y, rows_of(r));
    assert_memory_equal(data_of(s, n, IDS), r->ids_out, pairs_of(r));
    assert_memory_equal(data_of(s, n, WEIGHTS), r->weights_out, pairs_of(r));
    assert_int_equal(((uint8_t *)data_of(s, n, Y))[rows_of(r)], 0xee);
}

static struct moe_status run(const struct scene *s, const struct moe_client_session_forward *f)
{
    uint64_t id;
    MOE_TRY(moe_session_submit(s->session, f, &id));
    return moe_session_wait(s->session, id, NULL);
}

/* -------------------------------------------------------------------- regions */

static void y_in_device_memory_is_y_by_forward(void **state)
{
    (void)state;
    struct scene s;
    start(&s, 0, 1);
    for (int i = 0; i < 48; i++) {
        struct request r;
        const uint32_t tokens[] = {1, 7, WORKER_BUCKET, 40}; /* 40: three steps */
        request_fill(&r, &shared.worker, i % 2, tokens[i % 4],
                     i % 3 == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16,
                     (enum moe_routing_mode)(i / 2 % 3));
        put(&s, 0, &r);
        struct moe_client_session_forward f = forward_of(&s, 0, &r);
        assert_ok(run(&s, &f));
        assert_same(&s, 0, &r);
        request_free(&r);
    }
    stop(&s);
}

/* No host code reads ids and weights there: the router finds what is wrong. */
static void the_device_checks_ids_and_weights(void **state)
{
    (void)state;
    struct scene s;
    struct request r;
    start(&s, 0, 1);
    request_fill(&r, &shared.worker, 0, 3, MOE_DTYPE_F32, MOE_ROUTE_IDS_WEIGHTS);
    r.ids_in[1] = 7; /* its weight counts */
    put(&s, 0, &r);
    const struct moe_client_session_forward f = forward_of(&s, 0, &r);
    ((int32_t *)data_of(&s, 0, IDS_IN))[2] = 8; /* E = 8 */
    assert_refused(run(&s, &f), MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE);
    ((int32_t *)data_of(&s, 0, IDS_IN))[2] = r.ids_in[2];
    ((uint32_t *)data_of(&s, 0, WEIGHTS_IN))[1] = 0x7fc00000; /* NaN */
    assert_refused(run(&s, &f), MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
    put(&s, 0, &r);
    assert_ok(run(&s, &f));
    assert_same(&s, 0, &r);
    request_free(&r);
    stop(&s);
}

/* The host looks token ids up, and does not read a device's memory. */
static void token_ids_on_the_device_are_refused(void **state)
{
    (void)state;
    struct scene s;
    struct request r;
    start(&s, 0, 1);
    request_fill(&r, &shared.worker, 0, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    put(&s, 0, &r);
    memset(data_of(&s, 0, IDS_IN), 0, 3 * sizeof(int64_t));
    struct moe_client_session_forward f = forward_of(&s, 0, &r);
    f.token_ids_in = at(&s, 0, IDS_IN);
    struct moe_status st = run(&s, &f);
    assert_refused(st, MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED);
    assert_non_null(strstr(st.text, "give topk_ids"));
    request_free(&r);
    stop(&s);
}

static void what_the_device_cannot_import_is_refused(void **state)
{
    (void)state;
    struct scene s;
    struct moe_client_region *region;
    void *data;
    int descriptor;
    start(&s, 0, 1);
    const double bytes = shared_metric("moe_regions_bytes");
    assert_ok(moe_region_memory_create(SLOT, &descriptor, &data));
    assert_refused(adopt(&s, "large", descriptor, data, 2 * SLOT, &region), MOE_INVALID_ARGUMENT,
                   MOE_REASON_REGION_INVALID);
    assert_refused(adopt(&s, "small", descriptor, data, SLOT / 2, &region), MOE_INVALID_ARGUMENT,
                   MOE_REASON_REGION_INVALID);
    assert_refused(adopt(&s, "none", descriptor, data, 0, &region), MOE_INVALID_ARGUMENT,
                   MOE_REASON_REGION_INVALID);
    assert_refused(adopt(&s, "huge", descriptor, data, SIZE_MAX, &region), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_REGION_LIMIT);
    assert_refused(adopt(&s, "device", descriptor, data, SLOT, &region), MOE_ALREADY_EXISTS,
                   MOE_REASON_REGION_EXISTS);
    int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(unsealed >= 0 && ftruncate(unsealed, SLOT) == 0);
    assert_refused(adopt(&s, "unsealed", unsealed, data, SLOT, &region), MOE_INVALID_ARGUMENT,
                   MOE_REASON_REGION_INVALID);
    close(unsealed);
    close(descriptor);
    moe_region_memory_unmap(data, SLOT);
    assert_int_equal(s.released, 0); /* memory that was refused stays the library's */
    assert_true(shared_metric("moe_regions_bytes") == bytes);
    stop(&s);
}

/* -------------------------------------------------------------------- a device's entries */

/* An entry with what a kernel has of it. */
struct lane {
    struct moe_client_entry lent;
    struct moe_ring_device_entry device;
};

static void lend(const struct scene *s, const struct moe_client_session_forward *f, struct lane *l)
{
    *l = (struct lane){.lent = {.size = sizeof l->lent}};
    assert_ok(moe_session_lend(s->session, f, &l->lent));
    l->device.sequence = l->lent.sequence;
    memcpy(&l->device.request, l->lent.request, sizeof l->device.request);
}

static void submit(struct lane *l)
{
    moe_ring_device_submit(&l->device, l->lent.ring, l->lent.entry);
}

/* As a stream: it sleeps until the signal, then looks for the result. */
static enum moe_code await(struct lane *l)
{
    struct moe_ring *ring = l->lent.ring;
    const uint64_t end = moe_clock_ns() + 20 * MOE_NS_PER_S;
    while (__atomic_load_n(&ring->ends[l->lent.entry], __ATOMIC_ACQUIRE) == 0)
        assert_true(moe_clock_ns() < end);
    while (!moe_ring_device_poll(&l->device, ring, l->lent.entry))
        assert_true(moe_clock_ns() < end);
    return moe_ring_code_of(l->device.result);
}

static struct moe_status result_of(const struct scene *s, const struct lane *l)
{
    return moe_session_result(s->session, &l->lent, l->device.result, NULL);
}

/* Two in flight, again and again with other inputs; the worker sleeps between them. */
static void a_device_submits_again_and_again(void **state)
{
    (void)state;
    enum { LANES = 2, ROUNDS = 60 };
    struct scene s;
    struct request r[LANES];
    struct lane lanes[LANES];
    struct moe_client_session_answer answer = {.size = sizeof answer};
    start(&s, 0, LANES);
    for (size_t i = 0; i < LANES; i++) {
        request_fill(&r[i], &shared.worker, 0, 5, MOE_DTYPE_F32, MOE_ROUTE_IDS_WEIGHTS);
        struct moe_client_session_forward f = forward_of(&s, i, &r[i]);
        lend(&s, &f, &lanes[i]);
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (size_t i = 0; i < LANES; i++) {
            ((float *)r[i].x)[round % 7] = (float)round / (float)(1 + i);
            r[i].ids_in[0] = -1;
            put(&s, i, &r[i]);
            submit(&lanes[i]);
        }
        for (size_t i = LANES; i-- > 0;) {
            assert_int_equal(await(&lanes[i]), MOE_OK);
            assert_ok(
                moe_session_result(s.session, &lanes[i].lent, lanes[i].device.result, &answer));
            assert_int_equal(answer.epoch, shared.worker.epoch);
            assert_same(&s, i, &r[i]);
        }
    }
    for (size_t i = 0; i < LANES; i++) {
        assert_int_equal(lanes[i].device.results, ROUNDS);
        assert_int_equal(lanes[i].device.failures, 0);
        moe_session_take_back(s.session, &lanes[i].lent);
    }
    struct moe_client_session_forward f = forward_of(&s, 0, &r[0]); /* the host goes on there */
    put(&s, 0, &r[0]);
    assert_ok(run(&s, &f));
    assert_same(&s, 0, &r[0]);
    for (size_t i = 0; i < LANES; i++)
        request_free(&r[i]);
    stop(&s);
}

static void a_failed_request_tells_the_device_and_the_host(void **state)
{
    (void)state;
    struct scene s;
    struct request r;
    struct lane lane;
    start(&s, 0, 1);
    request_fill(&r, &shared.worker, 0, 3, MOE_DTYPE_F32, MOE_ROUTE_IDS);
    put(&s, 0, &r);
    struct moe_client_session_forward f = forward_of(&s, 0, &r);
    lend(&s, &f, &lane);
    ((int32_t *)data_of(&s, 0, IDS_IN))[0] = 99;
    submit(&lane);
    assert_int_equal(await(&lane), MOE_INVALID_ARGUMENT);
    assert_refused(result_of(&s, &lane), MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE);
    put(&s, 0, &r);
    submit(&lane);
    assert_int_equal(await(&lane), MOE_OK);
    assert_int_equal(lane.device.failures, 1);
    assert_true(moe_ring_device_poll(&lane.device, lane.lent.ring, lane.lent.entry));
    assert_int_equal(moe_ring_code_of(lane.device.result), MOE_FAILED_PRECONDITION); /* no submit */
    moe_session_take_back(s.session, &lane.lent);
    request_free(&r);
    stop(&s);
}

/* The watchdog ends the wait; later submits fail at once, until the worker is done. */
static void a_request_that_is_given_up_blocks_its_entry(void **state)
{
    (void)state;
    enum { TIMEOUT_MS = 300 };
    struct scene s;
    struct request r;
    struct lane lane;
    start(&s, TIMEOUT_MS, 1);
    request_fill(&r, &shared.worker, 0, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    put(&s, 0, &r);
    struct moe_client_session_forward f = forward_of(&s, 0, &r);
    lend(&s, &f, &lane);
    shared_pause_view();
    submit(&lane);
    assert_int_equal(await(&lane), MOE_DEADLINE_EXCEEDED);
    /* The worker's own answer may be there by now; if not, nothing is submitted. */
    shared_resume_view();
    enum moe_code code = MOE_UNAVAILABLE;
    for (int i = 0; i < 2000 && code == MOE_UNAVAILABLE; i++) {
        submit(&lane);
        code = await(&lane);
        moe_sleep_until(moe_clock_ns() + MOE_NS_PER_MS);
    }
    assert_int_equal(code, MOE_OK);
    assert_same(&s, 0, &r);
    moe_session_take_back(s.session, &lane.lent);
    request_free(&r);
    stop(&s);
}

/* A worker that has lost a client, or has died, ends all its waits, also of later submits. */
static void the_end_of_the_connection_ends_waits(void **state)
{
    (void)state;
    struct scene s;
    struct request r;
    struct lane lane;
    start(&s, 0, 1);
    request_fill(&r, &shared.worker, 0, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    put(&s, 0, &r);
    struct moe_client_session_forward f = forward_of(&s, 0, &r);
    lend(&s, &f, &lane);
    submit(&lane);
    assert_int_equal(await(&lane), MOE_OK);
    service_close(&shared);
    for (int i = 0; i < 3; i++) {
        submit(&lane);
        assert_int_equal(await(&lane), MOE_UNAVAILABLE);
    }
    struct moe_status st = result_of(&s, &lane);
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    moe_session_take_back(s.session, &lane.lent);
    request_free(&r);
    stop(&s);
}

static int forget_shared(void **state)
{
    (void)state;
    return shared_remove_directory();
}

#define shared_test(f) cmocka_unit_test_setup_teardown(f, shared_open, shared_close)

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        shared_test(y_in_device_memory_is_y_by_forward),
        shared_test(the_device_checks_ids_and_weights),
        shared_test(token_ids_on_the_device_are_refused),
        shared_test(what_the_device_cannot_import_is_refused),
        shared_test(a_device_submits_again_and_again),
        shared_test(a_failed_request_tells_the_device_and_the_host),
        shared_test(a_request_that_is_given_up_blocks_its_entry),
        cmocka_unit_test_setup_teardown(the_end_of_the_connection_ends_waits, shared_open,
                                        forget_shared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
