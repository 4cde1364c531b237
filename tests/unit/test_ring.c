/* SPDX-License-Identifier: Apache-2.0 */
/* Rings between threads: each request gets its rows, none is lost, sleepers are woken, and a
 * watchdog ends waits. A client that writes any bytes gets errors. The order of acts is tried by
 * tests/simulation/ring; this is about memory, futexes and time. */
#include "base/clock.h"
#include "base/thread.h"
#include "moe/types.h"
#include "regions/checks.h"
#include "regions/registry.h"
#include "regions/server.h"
#include "regions/wait.h"
#include "support/check.h"
#include "support/random.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { T = 3, H = 8, CALLERS = 4, REQUESTS = 1000, ROWS = T * H, AREA = 2 * ROWS * 4 + 64 };

static const struct moe_ring_layer layer = {.hidden = H, .top_k = 1, .max_tokens = 64};

struct side {
    struct moe_ring *ring;
    struct moe_ring_caller caller;
    struct moe_ring_server server;
    struct moe_regions *regions;
    char *memory; /* [MOE_RING_ENTRIES][AREA] */
    uint32_t client, region;
    uint64_t spin_ns;
    atomic_bool stop;
    atomic_uint done;
};

static struct side *open_side(uint64_t spin_ns)
{
    static const struct moe_regions_limits limits = {
        .bytes = 1 << 30, .identity_bytes = 1 << 30, .identity_clients = 1, .client_regions = 4};
    struct side *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->ring = aligned_alloc(MOE_RING_LINE, sizeof *s->ring);
    s->memory = aligned_alloc(4096, (MOE_RING_ENTRIES * (size_t)AREA + 4095) & ~(size_t)4095);
    s->regions = calloc(1, sizeof *s->regions);
    assert_true(s->ring != NULL && s->memory != NULL && s->regions != NULL);
    memset(s->ring, 0, sizeof *s->ring);
    s->spin_ns = spin_ns;
    moe_ring_caller_init(&s->caller, s->ring);
    moe_ring_server_init(&s->server, s->ring);
    moe_regions_init(s->regions, &limits);
    struct moe_region_spec spec = {.name = "a", .bytes = MOE_RING_ENTRIES * (size_t)AREA};
    assert_ok(moe_regions_join(s->regions, "uid:1", &s->client));
    assert_ok(moe_regions_reserve(s->regions, s->client, &spec, &s->region));
    moe_regions_commit(s->regions, s->region, s->memory);
    return s;
}

static void close_side(struct side *s)
{
    free(s->ring);
    free(s->memory);
    free(s->regions);
    free(s);
}

/* The daemon: takes a request, computes y = x + 1, completes. True if there was one. */
static bool serve_one(struct side *s)
{
    struct moe_ring_details details = {.steps = 1};
    struct moe_ring_request q;
    void *at[MOE_RING_ROLES];
    uint32_t entry, use;
    if (!moe_ring_server_take(&s->server, &entry, &q))
        return false;
    struct moe_status st = moe_ring_check(&q, &layer);
    if (!moe_failed(&st))
        st = moe_regions_take(s->regions, s->client, q.tensors, at, &use);
    if (moe_failed(&st)) {
        details.reason = st.reason;
        memcpy(details.text, st.text, sizeof details.text);
    } else {
        const uint32_t *x = at[MOE_RING_X];
        uint32_t *y = at[MOE_RING_Y];
        for (size_t i = 0; i < (size_t)q.tokens * H; i++)
            y[i] = x[i] + 1;
        moe_regions_put(s->regions, s->client, use);
    }
    if (moe_ring_server_complete(&s->server, entry, st.code, &details))
        moe_ring_wake(s->ring, entry);
    return true;
}

static void *serve(void *arg)
{
    struct side *s = arg;
    while (!atomic_load(&s->stop))
        if (!serve_one(s))
            sched_yield();
    return NULL;
}

static struct moe_ring_request request_at(const struct side *s, uint32_t entry, uint32_t tokens)
{
    struct moe_ring_request q = {.tokens = tokens, .hidden = H, .dtype = MOE_DTYPE_F32};
    uint64_t first = (uint64_t)entry * AREA;
    if (tokens > 0) {
        q.tensors[MOE_RING_X] = (struct moe_ring_tensor){
            .region = s->region, .offset = first, .bytes = 4 * (uint64_t)tokens * H};
        q.tensors[MOE_RING_Y] = q.tensors[MOE_RING_X];
        q.tensors[MOE_RING_Y].offset += ROWS * 4;
    }
    return q;
}

struct talker {
    struct side *side;
    uint32_t first; /* its entries: first and first + CALLERS, in turn */
    unsigned wrong;
};

static void *talk(void *arg)
{
    struct talker *t = arg;
    struct side *s = t->side;
    uint32_t entries[2] = {t->first, t->first + CALLERS};
    for (uint32_t n = 0; n < REQUESTS; n++) {
        uint32_t e = entries[n % 2];
        uint32_t *x = (uint32_t *)(void *)(s->memory + e * (size_t)AREA);
        struct moe_ring_details details;
        enum moe_code code = MOE_UNKNOWN;
        if (s->caller.waiting[e]) { /* two are in flight */
            uint32_t expected = x[0] + 1;
            t->wrong += !moe_ring_wait(&s->caller, e, s->spin_ns, MOE_NEVER, &code);
            t->wrong += code != MOE_OK || x[ROWS] != expected || x[2 * ROWS - 1] != expected;
            t->wrong += !moe_ring_caller_details(&s->caller, e, &details) || details.steps != 1;
        }
        for (uint32_t i = 0; i < ROWS; i++)
            x[i] = n * CALLERS + t->first;
        struct moe_ring_request q = request_at(s, e, T);
        t->wrong += !moe_ring_caller_is_free(&s->caller, e);
        moe_ring_caller_submit(&s->caller, e, &q);
    }
    for (int i = 0; i < 2; i++) {
        enum moe_code code;
        t->wrong += !moe_ring_wait(&s->caller, entries[i], s->spin_ns, MOE_NEVER, &code);
    }
    return NULL;
}

static void requests_of_many_threads_are_answered(void **state)
{
    (void)state;
    for (int spins = 0; spins < 2; spins++) {
        struct side *s = open_side(spins == 1 ? MOE_NS_PER_S : 0);
        struct talker talkers[CALLERS];
        pthread_t threads[CALLERS], server;
        assert_int_equal(pthread_create(&server, NULL, serve, s), 0);
        for (uint32_t i = 0; i < CALLERS; i++) {
            talkers[i] = (struct talker){.side = s, .first = i};
            assert_int_equal(pthread_create(&threads[i], NULL, talk, &talkers[i]), 0);
        }
        for (uint32_t i = 0; i < CALLERS; i++) {
            pthread_join(threads[i], NULL);
            assert_int_equal(talkers[i].wrong, 0);
        }
        atomic_store(&s->stop, true);
        pthread_join(server, NULL);
        close_side(s);
    }
}

static void a_request_without_tokens_is_answered(void **state)
{
    (void)state;
    struct side *s = open_side(0);
    struct moe_ring_request q = request_at(s, 0, 0);
    enum moe_code code;
    moe_ring_caller_submit(&s->caller, 0, &q);
    assert_false(moe_ring_caller_poll(&s->caller, 0, &code));
    assert_true(serve_one(s));
    assert_true(moe_ring_caller_poll(&s->caller, 0, &code));
    assert_int_equal(code, MOE_OK);
    close_side(s);
}

/* It is taken again, as often as it is given back. */
static void a_request_that_is_given_back_is_taken_again(void **state)
{
    (void)state;
    struct side *s = open_side(0);
    struct moe_ring_request q = request_at(s, 3, 0), got;
    uint32_t entry;
    enum moe_code code;
    moe_ring_caller_submit(&s->caller, 3, &q);
    for (int i = 0; i < 3; i++) {
        assert_true(moe_ring_server_take(&s->server, &entry, &got));
        assert_int_equal(entry, 3);
        assert_false(moe_ring_server_take(&s->server, &entry, &got));
        moe_ring_server_give_back(&s->server, 3);
    }
    assert_true(serve_one(s));
    assert_true(moe_ring_caller_poll(&s->caller, 3, &code));
    assert_int_equal(code, MOE_OK);
    close_side(s);
}

/* The client has submitted the next request already: its wait does not end. */
static void details_of_a_completed_request_end_no_later_one(void **state)
{
    (void)state;
    struct side *s = open_side(0);
    struct moe_ring_request q = request_at(s, 0, 0), got;
    const struct moe_ring_details details = {.steps = 7};
    struct moe_ring_details d;
    uint32_t entry;
    enum moe_code code;
    const uint32_t first = moe_ring_caller_submit(&s->caller, 0, &q);
    assert_true(moe_ring_server_take(&s->server, &entry, &got));
    const struct moe_ring_good good = moe_ring_server_good(&s->server, entry);
    *good.signal = 1; /* as a device */
    *good.word = good.value;
    assert_true(moe_ring_caller_poll(&s->caller, 0, &code));
    assert_int_equal(code, MOE_OK);
    assert_false(moe_ring_caller_details(&s->caller, 0, &d));
    s->ring->ends[0] = 0;
    (void)moe_ring_caller_submit(&s->caller, 0, &q);
    assert_false(moe_ring_server_take(&s->server, &entry, &got)); /* the first has not ended */
    (void)moe_ring_server_add_details(&s->server, 0, &details);
    assert_int_equal(s->ring->ends[0], 0);
    assert_false(moe_ring_caller_poll(&s->caller, 0, &code));
    assert_true(moe_ring_caller_details_of(&s->caller, 0, first, &d));
    assert_int_equal(d.steps, 7);
    assert_true(serve_one(s));
    assert_true(moe_ring_caller_poll(&s->caller, 0, &code));
    close_side(s);
}

static void an_error_comes_with_its_text(void **state)
{
    (void)state;
    struct side *s = open_side(0);
    struct moe_ring_request q = request_at(s, 0, T);
    struct moe_ring_details d;
    enum moe_code code;
    q.tensors[MOE_RING_Y].offset = 1 << 20;
    moe_ring_caller_submit(&s->caller, 0, &q);
    assert_false(moe_ring_caller_details(&s->caller, 0, &d));
    assert_true(serve_one(s));
    assert_true(moe_ring_caller_poll(&s->caller, 0, &code));
    assert_int_equal(code, MOE_OUT_OF_RANGE);
    assert_true(moe_ring_caller_details(&s->caller, 0, &d));
    assert_int_equal(d.reason, MOE_REASON_REGION_RANGE);
    assert_non_null(strstr(d.text, "past the end"));
    close_side(s);
}

static void a_silent_daemon_costs_a_wait_its_limit(void **state)
{
    (void)state;
    struct side *s = open_side(0);
    struct moe_ring_request q = request_at(s, 0, T);
    enum moe_code code;
    moe_ring_caller_submit(&s->caller, 0, &q);
    assert_false(moe_ring_wait(&s->caller, 0, 1000, moe_clock_ns() + MOE_NS_PER_MS, &code));
    moe_ring_caller_watch(&s->caller, 1000, 500);
    moe_ring_caller_watch(&s->caller, 1499, 500);
    assert_false(moe_ring_caller_poll(&s->caller, 0, &code));
    moe_ring_caller_watch(&s->caller, 1500, 500);
    assert_true(moe_ring_wait(&s->caller, 0, 0, MOE_NEVER, &code));
    assert_int_equal(code, MOE_DEADLINE_EXCEEDED);
    assert_false(moe_ring_caller_is_free(&s->caller, 0)); /* y is still lent */
    assert_true(serve_one(s));
    assert_true(moe_ring_caller_is_free(&s->caller, 0));
    moe_ring_caller_submit(&s->caller, 0, &q); /* the late completion does not end this one */
    assert_false(moe_ring_caller_poll(&s->caller, 0, &code));
    moe_ring_caller_watch(&s->caller, 1600, 500); /* its time begins now */
    assert_false(moe_ring_caller_poll(&s->caller, 0, &code));
    moe_ring_caller_end(&s->caller);
    assert_true(moe_ring_caller_poll(&s->caller, 0, &code));
    assert_int_equal(code, MOE_UNAVAILABLE);
    assert_true(moe_ring_caller_is_free(&s->caller, 0));
    moe_ring_caller_submit(&s->caller, 0, &q); /* after the end: at once */
    assert_true(moe_ring_caller_poll(&s->caller, 0, &code));
    assert_int_equal(code, MOE_UNAVAILABLE);
    close_side(s);
}

static void sequence_numbers_wrap(void **state)
{
    (void)state;
    struct side *s = open_side(0);
    struct moe_ring_request q = request_at(s, 0, T);
    enum moe_code code;
    s->caller.sequence[0] = UINT32_MAX - 2;
    for (int i = 0; i < 6; i++) {
        assert_int_not_equal(moe_ring_caller_submit(&s->caller, 0, &q), 0);
        assert_false(moe_ring_caller_poll(&s->caller, 0, &code));
        assert_true(serve_one(s));
        assert_true(moe_ring_caller_poll(&s->caller, 0, &code));
        assert_int_equal(code, MOE_OK);
    }
    close_side(s);
}

/* One entry that never stops does not keep the others waiting. */
static void entries_are_served_in_turn(void **state)
{
    (void)state;
    struct side *s = open_side(0);
    struct moe_ring_request q = request_at(s, 0, 0);
    enum moe_code code;
    moe_ring_caller_submit(&s->caller, 9, &q);
    for (int i = 0; i < 2; i++) {
        moe_ring_caller_submit(&s->caller, 0, &q);
        assert_true(serve_one(s));
        if (!moe_ring_caller_poll(&s->caller, 0, &code))
            break;
    }
    assert_true(moe_ring_caller_poll(&s->caller, 9, &code));
    close_side(s);
}

#ifndef MOE_TSAN /* the rogue races with the daemon on purpose */
static void *scribble(void *arg)
{
    struct side *s = arg;
    struct rng random = {choose_seed()};
    volatile uint8_t *bytes = (volatile uint8_t *)s->ring;
    while (!atomic_load(&s->stop)) {
        uint32_t at = rng_below(&random, sizeof *s->ring);
        uint32_t entry = rng_below(&random, 4);
        struct moe_ring_request q = request_at(s, entry, T);
        if (rng_chance(&random, 50))
            bytes[at] = (uint8_t)rng_next(&random);
        s->ring->requests[entry] = q;
        bytes[offsetof(struct moe_ring, requests) + entry * sizeof q +
              rng_below(&random, sizeof q)] = (uint8_t)rng_next(&random);
        s->ring->submitted[entry]++;
    }
    return NULL;
}

static void a_ring_that_is_written_while_it_is_read_harms_only_its_writer(void **state)
{
    (void)state;
    struct side *s = open_side(0);
    struct moe_region_info info;
    pthread_t rogue;
    uint32_t served = 0, cursor = 0;
    assert_int_equal(pthread_create(&rogue, NULL, scribble, s), 0);
    while (served < 20000)
        served += serve_one(s);
    atomic_store(&s->stop, true);
    pthread_join(rogue, NULL);
    while (serve_one(s))
        served++;
    assert_true(moe_regions_next(s->regions, s->client, &cursor, &info));
    assert_int_equal(info.references, 0);
    close_side(s);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_of_many_threads_are_answered),
        cmocka_unit_test(a_request_without_tokens_is_answered),
        cmocka_unit_test(a_request_that_is_given_back_is_taken_again),
        cmocka_unit_test(details_of_a_completed_request_end_no_later_one),
        cmocka_unit_test(an_error_comes_with_its_text),
        cmocka_unit_test(a_silent_daemon_costs_a_wait_its_limit),
        cmocka_unit_test(sequence_numbers_wrap),
        cmocka_unit_test(entries_are_served_in_turn),
#ifndef MOE_TSAN
        cmocka_unit_test(a_ring_that_is_written_while_it_is_read_harms_only_its_writer),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
