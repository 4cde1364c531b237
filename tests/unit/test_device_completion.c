/* SPDX-License-Identifier: Apache-2.0 */
/* Requests that a device completes before the worker's host has ended them. The device is the CPU
 * backend behind a table that stores completions as a GPU does, and shows the end of a step later.
 */
#include "base/clock.h"
#include "base/wait.h"
#include "moe/regions_device.h"
#include "regions/device_caller.h"
#include "regions/memory.h"
#include "shared_fixture.h"

#include <sys/mman.h>
#include <unistd.h>

enum { SLOT = 64 << 10, LATE_MS = 3, TOO_LATE_MS = 300, SEGMENTS_MAX = 16 };

/* -------------------------------------------------------------------- the device */

static _Atomic bool held;                  /* no step ends */
static _Atomic uint64_t late_ms = LATE_MS; /* until the host sees the end of a step */
static _Atomic uint64_t stored;            /* completions */
static _Atomic uint64_t early;             /* signals that were there before */

struct late_step {
    struct moe_step *inner; /* NULL: it has ended */
    struct moe_step_args args;
    struct moe_step_segment segments[SEGMENTS_MAX];
    struct moe_status status;
    struct moe_step_result result;
    uint64_t shown_ns; /* when the host may see the end */
};

static struct moe_status late_enqueue(struct moe_session *session, const struct moe_step_args *args,
                                      struct moe_step **out)
{
    struct late_step *l = calloc(1, sizeof *l);
    MOE_INVARIANT(l != NULL && args->segment_count <= SEGMENTS_MAX);
    l->args = *args;
    for (uint32_t i = 0; i < args->segment_count; i++)
        l->segments[i] = args->segments[i];
    struct moe_status st = moe_backend_cpu.step_enqueue(session, args, &l->inner);
    if (moe_failed(&st))
        free(l);
    else
        *out = (struct moe_step *)(void *)l;
    return st;
}

static void complete_segments(const struct late_step *l)
{
    uint32_t row = 0;
    for (uint32_t i = 0; i < l->args.segment_count; row += l->segments[i++].tokens) {
        const struct moe_step_completion *c = &l->segments[i].completion;
        bool good = c->word != NULL && l->segments[i].tokens > 0;
        for (uint32_t t = 0; t < l->segments[i].tokens; t++)
            good = good && l->args.token_state[row + t] == MOE_TOKEN_OK;
        if (!good)
            continue;
        early += __atomic_load_n(c->signal, __ATOMIC_ACQUIRE) != 0;
        __atomic_store_n(c->receipt, c->value, __ATOMIC_RELEASE);
        __atomic_store_n(c->signal, 1, __ATOMIC_RELEASE);
        __atomic_store_n(c->word, c->value, __ATOMIC_RELEASE);
        atomic_fetch_add(&stored, 1);
    }
}

static struct moe_status late_wait(struct moe_step *step, uint64_t deadline_ns,
                                   struct moe_step_result *result)
{
    struct late_step *l = (struct late_step *)(void *)step;
    while (l->inner != NULL) {
        if (atomic_load(&held) && moe_clock_ns() >= deadline_ns)
            return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "held");
        if (atomic_load(&held)) {
            moe_sleep_until(moe_clock_ns() + MOE_NS_PER_MS / 10);
            continue;
        }
        l->status = moe_backend_cpu.step_wait(l->inner, deadline_ns, &l->result);
        if (l->status.code == MOE_DEADLINE_EXCEEDED)
            return l->status;
        l->inner = NULL;
        l->shown_ns = moe_clock_ns() + atomic_load(&late_ms) * MOE_NS_PER_MS;
        if (!moe_failed(&l->status))
            complete_segments(l);
    }
    moe_sleep_until(l->shown_ns < deadline_ns ? l->shown_ns : deadline_ns);
    if (moe_clock_ns() < l->shown_ns)
        return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "not shown yet");
    const struct moe_status st = l->status;
    *result = l->result;
    free(l);
    return st;
}

static bool same_gpu; /* of memory that is imported */

static struct moe_status import(struct moe_device *device, int descriptor, size_t bytes, void **out,
                                bool *same)
{
    MOE_TRY(moe_backend_cpu.mem_import(device, descriptor, bytes, out, same));
    *same = same_gpu;
    return moe_ok();
}

/* -------------------------------------------------------------------- the client */

struct scene {
    struct moe_client *client;
    struct moe_client_session *session;
    struct moe_client_region *region;
    char *data;
};

static void release(void *ctx, void *data, size_t bytes)
{
    (void)ctx;
    moe_region_memory_unmap(data, bytes);
}

/* Device memory for x, y and ids. */
static void start(struct scene *s)
{
    const struct moe_client_session_config config = {.size = sizeof config};
    struct moe_client_memory memory = {
        .size = sizeof memory, .bytes = 3 * SLOT, .release = release};
    void *data;
    *s = (struct scene){.client = shared_client()};
    assert_ok(moe_session_open(s->client, &config, &s->session));
    assert_ok(moe_region_memory_create(memory.bytes, &memory.descriptor, &data));
    memory.data = s->data = data;
    assert_ok(moe_region_adopt(s->session, "device", &memory, &s->region));
    close(memory.descriptor);
    atomic_store(&stored, 0);
    atomic_store(&early, 0);
}

static void stop(struct scene *s)
{
    moe_session_close(s->session);
    moe_client_close(s->client);
}

static struct moe_client_session_forward forward_of(const struct scene *s, const struct request *r)
{
    const struct moe_layer_spec *spec = shared.worker.specs[r->layer];
    return (struct moe_client_session_forward){.size = sizeof(struct moe_client_session_forward),
                                               .layer = spec->layer,
                                               .tokens = r->work.tokens,
                                               .hidden = spec->hidden,
                                               .dtype = r->work.dtype,
                                               .x = {s->region, 0},
                                               .y = {s->region, SLOT}};
}

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

static enum moe_code run(struct lane *l)
{
    struct moe_ring *ring = l->lent.ring;
    const uint64_t end = moe_clock_ns() + 20 * MOE_NS_PER_S;
    moe_ring_device_submit(&l->device, ring, l->lent.entry);
    while (__atomic_load_n(&ring->ends[l->lent.entry], __ATOMIC_ACQUIRE) == 0)
        assert_true(moe_clock_ns() < end);
    while (!moe_ring_device_poll(&l->device, ring, l->lent.entry))
        assert_true(moe_clock_ns() < end);
    return moe_ring_code_of(l->device.result);
}

/* Other inputs each time, and what Forward makes of them. */
static void next_input(const struct scene *s, struct request *r, int round)
{
    const struct moe_layer_spec *spec = shared.worker.specs[r->layer];
    const size_t bytes = (size_t)r->work.tokens * spec->hidden * sizeof(float);
    ((float *)r->x)[round % 7] = (float)round / 3;
    struct moe_client_forward f = {.size = sizeof f,
                                   .layer = spec->layer,
                                   .tokens = r->work.tokens,
                                   .hidden = spec->hidden,
                                   .dtype = r->work.dtype,
                                   .x = r->x,
                                   .y = r->y};
    assert_ok(moe_client_forward(s->client, &f));
    memcpy(s->data, r->x, bytes);
    memset(s->data + SLOT, 0xee, bytes);
}

static void assert_y(const struct scene *s, const struct request *r)
{
    const struct moe_layer_spec *spec = shared.worker.specs[r->layer];
    const size_t bytes = (size_t)r->work.tokens * spec->hidden * sizeof(float);
    assert_memory_equal(s->data + SLOT, r->y, bytes);
}

/* -------------------------------------------------------------------- promises */

/* Two requests have the same memory, in turns. The client waits for no end at the host. */
static void memory_of_a_completed_request_serves_the_next_one(void **state)
{
    (void)state;
    enum { LANES = 2, ROUNDS = 20 };
    struct scene s;
    struct request r;
    struct lane lanes[LANES];
    start(&s);
    request_fill(&r, &shared.worker, 0, 5, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    const struct moe_client_session_forward f = forward_of(&s, &r);
    next_input(&s, &r, 1);
    for (int i = 0; i < LANES; i++)
        lend(&s, &f, &lanes[i]);
    for (int n = 0; n < ROUNDS; n++) {
        assert_int_equal(run(&lanes[n % LANES]), MOE_OK);
        assert_y(&s, &r);
    }
    assert_int_equal(atomic_load(&stored), ROUNDS);
    assert_int_equal(atomic_load(&early), 0);
    for (int i = 0; i < LANES; i++)
        moe_session_take_back(s.session, &lanes[i].lent);
    request_free(&r);
    stop(&s);
}

/* Times and epoch come later than the completion; who asks for them waits. */
static void details_follow_the_completion(void **state)
{
    (void)state;
    struct scene s;
    struct request r;
    struct lane lane;
    start(&s);
    request_fill(&r, &shared.worker, 0, 5, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    const struct moe_client_session_forward f = forward_of(&s, &r);
    lend(&s, &f, &lane);
    for (int n = 0; n < 10; n++) {
        struct moe_client_session_answer answer = {.size = sizeof answer};
        next_input(&s, &r, n);
        assert_int_equal(run(&lane), MOE_OK);
        assert_y(&s, &r);
        assert_ok(moe_session_result(s.session, &lane.lent, lane.device.result, &answer));
        assert_int_equal(answer.epoch, shared.worker.epoch);
        assert_int_equal(answer.step_tokens, 5);
    }
    for (int n = 0; n < 10; n++) /* the host ends each one while the next one waits */
        assert_int_equal(run(&lane), MOE_OK);
    assert_int_equal(atomic_load(&early), 0);
    moe_session_take_back(s.session, &lane.lent);
    struct moe_client_session_answer answer = {.size = sizeof answer};
    uint64_t id; /* a thread of the host, with y in device memory */
    assert_ok(moe_session_submit(s.session, &f, &id));
    assert_ok(moe_session_wait(s.session, id, &answer));
    assert_int_equal(answer.epoch, shared.worker.epoch);
    assert_int_equal(atomic_load(&stored), 21);
    request_free(&r);
    stop(&s);
}

/* They come too late, or never: then no field is what a caller had there. */
static void an_answer_without_details_is_zeros(void **state)
{
    (void)state;
    struct scene s;
    struct request r;
    struct lane lane;
    uint64_t id;
    const struct moe_client_session_answer zeros = {.size = sizeof zeros};
    struct moe_client_session_answer answer;
    start(&s);
    request_fill(&r, &shared.worker, 0, 5, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    const struct moe_client_session_forward f = forward_of(&s, &r);
    next_input(&s, &r, 1);
    lend(&s, &f, &lane);
    atomic_store(&late_ms, TOO_LATE_MS);
    assert_int_equal(run(&lane), MOE_OK);
    answer = (struct moe_client_session_answer){.size = sizeof answer, .epoch = 77, .steps = 77};
    assert_ok(moe_session_result(s.session, &lane.lent, lane.device.result, &answer));
    assert_memory_equal(&answer, &zeros, sizeof answer);
    moe_session_take_back(s.session, &lane.lent);
    assert_ok(moe_session_submit(s.session, &f, &id));
    answer = (struct moe_client_session_answer){.size = sizeof answer, .epoch = 77, .steps = 77};
    assert_ok(moe_session_wait(s.session, id, &answer));
    assert_memory_equal(&answer, &zeros, sizeof answer);
    assert_y(&s, &r);
    assert_int_equal(atomic_load(&stored), 2);
    atomic_store(&late_ms, LATE_MS);
    request_free(&r);
    stop(&s);
}

/* More tokens than a step has: the last part tells the end, or the host where two are in flight. */
static void a_request_in_parts_ends_once(void **state)
{
    (void)state;
    struct scene s;
    struct request r;
    struct lane lane;
    start(&s);
    request_fill(&r, &shared.worker, 0, 3 * WORKER_BUCKET - 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    const struct moe_client_session_forward f = forward_of(&s, &r);
    lend(&s, &f, &lane);
    for (int n = 0; n < 10; n++) {
        next_input(&s, &r, n);
        assert_int_equal(run(&lane), MOE_OK);
        assert_y(&s, &r);
    }
    assert_true(atomic_load(&stored) <= 10);
    assert_int_equal(lane.device.results, 10);
    moe_session_take_back(s.session, &lane.lent);
    request_free(&r);
    stop(&s);
}

/* A device's memory, registered without libmoeclient. */
static uint32_t add_device_region(struct raw *r, size_t bytes)
{
    Moe__V1__AddRegion action = MOE__V1__ADD_REGION__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    char name[] = "device";
    uint32_t number;
    void *data;
    int descriptor;
    assert_ok(moe_region_memory_create(bytes, &descriptor, &data));
    action.name = name;
    action.kind = MOE__V1__REGION_KIND__REGION_KIND_DEVICE;
    action.bytes = bytes;
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_ADD;
    q.add = &action;
    assert_ok(raw_ask(r, &q, descriptor, &number));
    close(descriptor);
    moe_region_memory_unmap(data, bytes);
    return number;
}

/* Its ring is mapped until the device can store to it no more. */
static void a_request_ends_after_its_client_has_left(void **state)
{
    (void)state;
    struct raw r;
    const struct moe_layer_spec *spec = shared.worker.specs[0];
    const uint64_t bytes = spec->hidden * sizeof(float);
    atomic_store(&stored, 0);
    raw_join(&r);
    const uint32_t region = add_device_region(&r, 2 * SLOT);
    struct moe_ring_request q = {
        .layer = spec->layer, .tokens = 1, .hidden = spec->hidden, .dtype = MOE_DTYPE_F32};
    q.tensors[MOE_RING_X] = (struct moe_ring_tensor){.bytes = bytes, .region = region};
    q.tensors[MOE_RING_Y] =
        (struct moe_ring_tensor){.offset = SLOT, .bytes = bytes, .region = region};
    atomic_store(&held, true);
    const uint64_t tickets = atomic_load(&shared.worker.tickets);
    raw_submit(&r, 0, &q);
    while (atomic_load(&shared.worker.tickets) == tickets)
        moe_sleep_until(moe_clock_ns() + MOE_NS_PER_MS);
    moe_sleep_until(moe_clock_ns() + 20 * MOE_NS_PER_MS); /* the step is enqueued */
    raw_leave(&r);
    shared_await_status("-ring-", MOE__V1__REGION_STATUS__REGION_STATUS_CLOSING);
    moe_sleep_until(moe_clock_ns() + 20 * MOE_NS_PER_MS); /* what could be unmapped is */
    shared_await_status("-ring-", MOE__V1__REGION_STATUS__REGION_STATUS_CLOSING);
    atomic_store(&held, false);
    shared_await_metric("moe_regions_clients", 0);
    assert_int_equal(atomic_load(&stored), 1);
}

static void assert_host_completes(void)
{
    struct scene s;
    struct request r;
    struct lane lane;
    start(&s);
    request_fill(&r, &shared.worker, 0, 5, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    const struct moe_client_session_forward f = forward_of(&s, &r);
    lend(&s, &f, &lane);
    next_input(&s, &r, 1);
    assert_int_equal(run(&lane), MOE_OK);
    assert_y(&s, &r);
    assert_int_equal(atomic_load(&stored), 0);
    moe_session_take_back(s.session, &lane.lent);
    request_free(&r);
    stop(&s);
}

/* A device cannot look at the lease. */
static void the_host_completes_where_answers_need_a_lease(void **state)
{
    (void)state;
    assert_host_completes();
}

/* The processes would take turns for each early completion. */
static void the_host_completes_requests_of_the_same_gpu(void **state)
{
    (void)state;
    same_gpu = true;
    assert_host_completes();
    same_gpu = false;
}

static struct moe_backend late;

static int open_serving(void **state)
{
    service_trains = false;
    return shared_open(state);
}

static int open_training(void **state)
{
    service_trains = true;
    return shared_open(state);
}

#define serving_test(f) cmocka_unit_test_setup_teardown(f, open_serving, shared_close)

int main(void)
{
    seed_random();
    late = moe_backend_cpu;
    late.stores_completions = true;
    late.step_enqueue = late_enqueue;
    late.step_wait = late_wait;
    late.mem_import = import;
    worker_backend = &late;
    const struct CMUnitTest tests[] = {
        serving_test(memory_of_a_completed_request_serves_the_next_one),
        serving_test(details_follow_the_completion),
        serving_test(an_answer_without_details_is_zeros),
        serving_test(a_request_in_parts_ends_once),
        serving_test(a_request_ends_after_its_client_has_left),
        cmocka_unit_test_setup_teardown(the_host_completes_where_answers_need_a_lease,
                                        open_training, shared_close),
        serving_test(the_host_completes_requests_of_the_same_gpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
