/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of moe/regions.h: the answers of Forward, bit for bit, in memory that both map; every
 * wait ends; a bad request gets one typed error. */
#include "base/clock.h"
#include "shared_fixture.h"

#include <math.h>
#include <pthread.h>

enum { SLOT = 64 << 10 }; /* bytes of a region for one tensor of these tests */

/* A client with a session and one region, cut into slots. */
struct scene {
    struct moe_client *client;
    struct moe_client_session *session;
    struct moe_client_region *region;
};

enum { X, IDS_IN, WEIGHTS_IN, Y, IDS, WEIGHTS, SLOTS };

static void start(struct scene *s, uint64_t timeout_ms, size_t requests)
{
    const struct moe_client_session_config config = {.size = sizeof config,
                                                     .timeout_ms = timeout_ms};
    s->client = shared_client();
    assert_ok(moe_session_open(s->client, &config, &s->session));
    assert_ok(moe_region_create(s->session, "data", requests * SLOTS * SLOT, &s->region));
    assert_int_equal(moe_region_bytes(s->region), requests * SLOTS * SLOT);
}

static void stop(struct scene *s)
{
    moe_session_close(s->session);
    moe_client_close(s->client);
}

static struct moe_client_tensor at(const struct scene *s, size_t request, int slot)
{
    return (struct moe_client_tensor){s->region, (request * SLOTS + (size_t)slot) * SLOT};
}

static void *data_of(const struct scene *s, size_t request, int slot)
{
    return (char *)moe_region_data(s->region) + at(s, request, slot).offset;
}

/* The request `r` by region, with its inputs copied there. */
static struct moe_client_session_forward by_region(const struct scene *s, size_t n,
                                                   const struct request *r)
{
    const struct moe_layer_spec *spec = shared.worker.specs[r->layer];
    const struct moe_work *w = &r->work;
    size_t pairs = (size_t)w->tokens * spec->router.top_k * 4;
    struct moe_client_session_forward f = {.size = sizeof f,
                                           .layer = spec->layer,
                                           .tokens = w->tokens,
                                           .hidden = spec->hidden,
                                           .dtype = w->dtype,
                                           .x = at(s, n, X),
                                           .y = at(s, n, Y),
                                           .ids = at(s, n, IDS),
                                           .weights = at(s, n, WEIGHTS)};
    memcpy(data_of(s, n, X), r->x, (size_t)w->tokens * spec->hidden * moe_dtype_bytes(w->dtype));
    if (w->mode != MOE_ROUTE_SERVER) {
        f.ids_in = at(s, n, IDS_IN);
        memcpy(data_of(s, n, IDS_IN), r->ids_in, pairs);
    }
    if (w->mode == MOE_ROUTE_IDS_WEIGHTS) {
        f.weights_in = at(s, n, WEIGHTS_IN);
        memcpy(data_of(s, n, WEIGHTS_IN), r->weights_in, pairs);
    }
    memset(data_of(s, n, Y), 0xee, SLOT);
    return f;
}

static struct moe_status run(const struct scene *s, const struct moe_client_session_forward *f)
{
    uint64_t id;
    MOE_TRY(moe_session_submit(s->session, f, &id));
    return moe_session_wait(s->session, id, NULL);
}

/* The same by Forward, from the client's own memory; then compares all bits. */
static void assert_same(const struct scene *s, size_t n, struct request *r)
{
    const struct moe_layer_spec *spec = shared.worker.specs[r->layer];
    const struct moe_work *w = &r->work;
    size_t wide = (size_t)w->tokens * spec->hidden * moe_dtype_bytes(w->dtype);
    size_t pairs = (size_t)w->tokens * spec->router.top_k * 4;
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
                                   .topk_weights = r->weights_out,
                                   .parts = w->without_shared ? MOE_PARTS_ROUTED : MOE_PARTS_BOTH};
    assert_ok(moe_client_forward(s->client, &f));
    assert_memory_equal(data_of(s, n, Y), r->y, wide);
    assert_memory_equal(data_of(s, n, IDS), r->ids_out, pairs);
    assert_memory_equal(data_of(s, n, WEIGHTS), r->weights_out, pairs);
    assert_int_equal(((uint8_t *)data_of(s, n, Y))[wide], 0xee);
    request_check(r, &shared.worker);
}

/* -------------------------------------------------------------------- good requests */

static void y_by_region_is_y_by_forward_bit_for_bit(void **state)
{
    (void)state;
    struct scene s;
    assert_true(shared_is_offered());
    start(&s, 0, 1);
    for (int i = 0; i < 60; i++) {
        struct request r;
        const uint32_t tokens[] = {1, 7, WORKER_BUCKET, 40}; /* 40: three steps */
        request_fill(&r, &shared.worker, i % 2, tokens[i % 4],
                     i % 3 == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16,
                     (enum moe_routing_mode)(i / 2 % 3));
        struct moe_client_session_forward f = by_region(&s, 0, &r);
        struct moe_client_session_answer answer = {.size = sizeof answer};
        uint64_t id;
        f.epoch = shared.worker.epoch;
        f.weights_version = 1;
        assert_ok(moe_session_submit(s.session, &f, &id));
        bool done = false;
        while (!done) /* each of these waits is too short */
            assert_ok(moe_session_wait_for(s.session, id, 0, &done, &answer));
        assert_int_equal(answer.epoch, shared.worker.epoch);
        assert_int_equal(answer.weights_version, 1);
        assert_int_equal(answer.steps, r.work.tokens == 40 ? 3 : 1);
        assert_true(answer.step_ns > 0 && answer.server_ns >= answer.step_ns);
        assert_true(answer.layer_ns > 0 && answer.copy_in_ns > 0 && answer.copy_out_ns > 0);
        assert_true(answer.layer_ns + answer.copy_in_ns + answer.copy_out_ns <= answer.step_ns);
        assert_int_equal(answer.stream_ns, 0);
        assert_same(&s, 0, &r);
        request_free(&r);
    }
    stop(&s);
}

/* Layer 1 has a shared expert, layer 0 has none. */
static void parts_by_region_are_parts_by_forward(void **state)
{
    (void)state;
    struct scene s;
    start(&s, 0, 1);
    for (int i = 0; i < 8; i++) {
        struct request r;
        const int layer = i % 2;
        const uint32_t tokens = i < 4 ? 3 : 40; /* 40: three steps */
        request_fill(&r, &shared.worker, layer, tokens, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
        const struct moe_layer_spec *spec = shared.worker.specs[layer];
        size_t n = (size_t)tokens * spec->hidden;
        float *routed = calloc(n, sizeof *routed);
        assert_non_null(routed);
        r.work.without_shared = true;
        struct moe_client_session_forward f = by_region(&s, 0, &r);
        f.parts = MOE_PARTS_ROUTED;
        assert_ok(run(&s, &f));
        assert_same(&s, 0, &r);
        memcpy(routed, r.y, n * sizeof *routed);
        r.work.without_shared = false;
        f = by_region(&s, 0, &r);
        assert_ok(run(&s, &f));
        assert_same(&s, 0, &r);
        f = by_region(&s, 0, &r);
        f.ids = f.weights = (struct moe_client_tensor){0};
        f.parts = MOE_PARTS_SHARED;
        assert_ok(run(&s, &f));
        const float *only = data_of(&s, 0, Y), *both = r.y;
        double difference = 0, norm = 0;
        for (size_t k = 0; k < n; k++) {
            difference += fabs((double)routed[k] + only[k] - both[k]);
            norm += fabs((double)only[k]);
        }
        assert_true((norm > 0) == (layer == 1));
        assert_true(difference <= 1e-5 * (double)n);
        f.ids_in = at(&s, 0, IDS_IN);
        assert_refused(run(&s, &f), MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
        f.ids_in = (struct moe_client_tensor){0};
        f.parts = (enum moe_parts)7;
        assert_refused(run(&s, &f), MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID);
        free(routed);
        request_free(&r);
    }
    stop(&s);
}

/* The token ids are in the region; the oracle gets the ids of their experts. */
static void token_ids_by_region_are_topk_ids_by_forward(void **state)
{
    (void)state;
    struct scene s;
    start(&s, 0, 1);
    for (int i = 0; i < 12; i++) {
        struct request r;
        const uint32_t tokens[] = {1, 7, 40}; /* 40: three steps */
        request_fill(&r, &shared.worker, 0, tokens[i % 3],
                     i % 2 == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16, MOE_ROUTE_IDS);
        int64_t token_ids[40], *placed = data_of(&s, 0, IDS_IN);
        for (uint32_t t = 0; t < r.work.tokens; t++) {
            token_ids[t] = random_below(SERVICE_VOCABULARY);
            for (uint32_t k = 0; k < 2; k++)
                r.ids_in[2 * t + k] = service_experts[token_ids[t]][k];
        }
        struct moe_client_session_forward f = by_region(&s, 0, &r);
        f.token_ids_in = f.ids_in;
        f.ids_in = (struct moe_client_tensor){0};
        memcpy(placed, token_ids, r.work.tokens * sizeof *placed);
        assert_ok(run(&s, &f));
        assert_same(&s, 0, &r);
        placed[r.work.tokens - 1] = SERVICE_VOCABULARY;
        assert_refused(run(&s, &f), MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID);
        placed[r.work.tokens - 1] = 0;
        f.parts = MOE_PARTS_SHARED;
        assert_refused(run(&s, &f), MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
        f.parts = MOE_PARTS_BOTH;
        f.ids_in = f.token_ids_in;
        assert_refused(run(&s, &f), MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
        request_free(&r);
    }
    struct request r;
    request_fill(&r, &shared.worker, 1, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    struct moe_client_session_forward f = by_region(&s, 0, &r); /* of a layer without a table */
    f.token_ids_in = at(&s, 0, IDS_IN);
    assert_refused(run(&s, &f), MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
    request_free(&r);
    stop(&s);
}

/* All entries of the ring, taken in reverse; they share steps. */
static void sixty_four_are_in_flight_and_no_more(void **state)
{
    (void)state;
    struct scene s;
    struct request r[MOE_RING_ENTRIES];
    uint64_t id[MOE_RING_ENTRIES], more;
    struct moe_client_session_forward f;
    start(&s, 0, MOE_RING_ENTRIES / 2);
    shared_pause_view();
    for (uint32_t i = 0; i < MOE_RING_ENTRIES / 2; i++) {
        request_fill(&r[i], &shared.worker, 0, 1 + i % 5, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
        f = by_region(&s, i, &r[i]);
        assert_ok(moe_session_submit(s.session, &f, &id[i]));
    }
    struct moe_client_session_forward none = {
        .size = sizeof none, .layer = 1, .hidden = 24, .dtype = MOE_DTYPE_F32};
    for (uint32_t i = MOE_RING_ENTRIES / 2; i < MOE_RING_ENTRIES; i++)
        assert_ok(moe_session_submit(s.session, &none, &id[i]));
    assert_refused(moe_session_submit(s.session, &none, &more), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_QUEUE_FULL);
    shared_resume_view();
    for (uint32_t i = MOE_RING_ENTRIES; i-- > 0;)
        assert_ok(moe_session_wait(s.session, id[i], NULL));
    for (uint32_t i = 0; i < MOE_RING_ENTRIES / 2; i++) {
        assert_same(&s, i, &r[i]);
        request_free(&r[i]);
    }
    stop(&s);
}

/* T = 0 is answered at once, while a request before it waits for a view. */
static void answers_come_out_of_order(void **state)
{
    (void)state;
    struct scene s;
    struct request r;
    uint64_t first, second;
    bool done;
    start(&s, 0, 1);
    request_fill(&r, &shared.worker, 0, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    struct moe_client_session_forward f = by_region(&s, 0, &r), none = {.size = sizeof none};
    none.layer = 1;
    none.hidden = 24;
    none.dtype = MOE_DTYPE_BF16;
    shared_pause_view();
    assert_ok(moe_session_submit(s.session, &f, &first));
    assert_ok(moe_session_submit(s.session, &none, &second));
    assert_ok(moe_session_wait(s.session, second, NULL));
    assert_ok(moe_session_poll(s.session, first, &done, NULL));
    assert_false(done);
    assert_int_equal(shared_metric("moe_regions_in_flight"), 1);
    shared_resume_view();
    while (!done)
        assert_ok(moe_session_poll(s.session, first, &done, NULL));
    assert_same(&s, 0, &r);
    assert_refused(moe_session_wait(s.session, first, NULL), MOE_INVALID_ARGUMENT,
                   MOE_REASON_VALUE_INVALID); /* its end was returned before */
    assert_refused(moe_session_wait(s.session, 63, NULL), MOE_INVALID_ARGUMENT,
                   MOE_REASON_VALUE_INVALID);
    request_free(&r);
    stop(&s);
}

struct sender {
    struct scene *scene;
    size_t place;
    pthread_t thread;
    struct moe_status status;
};

static void *send_many(void *arg)
{
    struct sender *t = arg;
    for (int i = 0; i < 200 && t->status.code == MOE_OK; i++) {
        struct moe_client_session_forward f = {.size = sizeof f,
                                               .layer = 1,
                                               .hidden = 24,
                                               .tokens = 1 + (uint32_t)i % 9,
                                               .dtype = MOE_DTYPE_F32,
                                               .x = at(t->scene, t->place, X),
                                               .y = at(t->scene, t->place, Y)};
        t->status = run(t->scene, &f);
    }
    return NULL;
}

static void threads_share_a_session(void **state)
{
    (void)state;
    enum { THREADS = 4 };
    struct scene s;
    struct sender all[THREADS];
    start(&s, 0, THREADS);
    for (size_t i = 0; i < THREADS; i++) {
        all[i] = (struct sender){.scene = &s, .place = i, .status = moe_ok()};
        assert_int_equal(pthread_create(&all[i].thread, NULL, send_many, &all[i]), 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
        pthread_join(all[i].thread, NULL);
        assert_ok(all[i].status);
    }
    stop(&s);
}

/* -------------------------------------------------------------------- bad requests */

static void a_bad_request_gets_one_typed_error(void **state)
{
    (void)state;
    struct scene s, other;
    struct request r;
    uint64_t id;
    struct moe_client_session_forward f;
    start(&s, 0, 1);
    start(&other, 0, 1);
    request_fill(&r, &shared.worker, 0, 3, MOE_DTYPE_F32, MOE_ROUTE_IDS_WEIGHTS);
    const struct moe_client_session_forward good = by_region(&s, 0, &r);
#define refused(change, code, reason)                                                              \
    f = good;                                                                                      \
    change;                                                                                        \
    assert_refused(run(&s, &f), MOE_##code, MOE_REASON_##reason);                                  \
    assert_ok(run(&s, &good))
    refused(f.layer = 2, NOT_FOUND, LAYER_NOT_FOUND);
    refused(f.hidden = 40, INVALID_ARGUMENT, SHAPE_MISMATCH);
    refused(f.dtype = (enum moe_dtype)9, INVALID_ARGUMENT, DTYPE_UNSUPPORTED);
    refused(f.tokens = SERVICE_TOKENS + 1, INVALID_ARGUMENT, TOKEN_LIMIT);
    refused(f.y.region = NULL, INVALID_ARGUMENT, SHAPE_MISMATCH);
    refused(f.ids_in.region = NULL, INVALID_ARGUMENT, ROUTING_INVALID);
    refused(f.ids.region = NULL, INVALID_ARGUMENT, ROUTING_INVALID);
    refused(f.x.region = other.region, NOT_FOUND, REGION_NOT_FOUND);
    refused(f.x.offset = SLOTS * SLOT - 16, OUT_OF_RANGE, REGION_RANGE);
    refused(f.x.offset = UINT64_MAX - 15, OUT_OF_RANGE, REGION_RANGE);
    refused(f.x.offset = 8, OUT_OF_RANGE, REGION_RANGE);
    refused(f.y = f.x, FAILED_PRECONDITION, REGION_OVERLAP);
    refused(f.epoch = shared.worker.epoch + 1, FAILED_PRECONDITION, STALE_EPOCH);
    refused(f.weights_version = 9, FAILED_PRECONDITION, VERSION_MISMATCH);
    refused(f.size = 8, INVALID_ARGUMENT, VALUE_INVALID);
#undef refused
    ((int32_t *)data_of(&s, 0, IDS_IN))[2] = 8; /* E = 8 */
    assert_refused(run(&s, &good), MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE);
    ((int32_t *)data_of(&s, 0, IDS_IN))[2] = 0;
    ((uint32_t *)data_of(&s, 0, WEIGHTS_IN))[1] = 0x7fc00000; /* NaN */
    assert_refused(run(&s, &good), MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
    ((uint32_t *)data_of(&s, 0, WEIGHTS_IN))[1] = 0;
    f = good;
    f.ids_in.region = f.weights_in.region = NULL;
    ((uint32_t *)data_of(&s, 0, X))[1] = 0x7fc00000;
    struct moe_status st = run(&s, &f);
    assert_string_equal(moe_reason_name(st.reason), "NONFINITE_LOGITS");
    shared_pause_view(); /* a request in flight lends its outputs */
    assert_ok(moe_session_submit(s.session, &good, &id));
    shared_await_metric("moe_regions_in_flight", 1);
    f = good;
    f.x.offset = good.y.offset;
    f.y.offset = good.x.offset + SLOT / 2;
    assert_refused(run(&s, &f), MOE_FAILED_PRECONDITION, MOE_REASON_REGION_OVERLAP);
    f = good; /* only y is that of the other */
    f.ids.region = f.weights.region = NULL;
    assert_refused(run(&s, &f), MOE_FAILED_PRECONDITION, MOE_REASON_REGION_OVERLAP);
    shared_resume_view();
    assert_ok(moe_session_wait(s.session, id, NULL));
    request_free(&r);
    stop(&other);
    stop(&s);
}

static void a_bad_region_gets_one_typed_error(void **state)
{
    (void)state;
    struct scene s;
    struct moe_client_region *region;
    start(&s, 0, 1);
    assert_refused(moe_region_create(s.session, "data", 4096, &region), MOE_ALREADY_EXISTS,
                   MOE_REASON_REGION_EXISTS);
    assert_refused(moe_region_create(s.session, "a/b", 4096, &region), MOE_INVALID_ARGUMENT,
                   MOE_REASON_NAME_INVALID);
    assert_refused(moe_region_create(s.session, NULL, 4096, &region), MOE_INVALID_ARGUMENT,
                   MOE_REASON_NAME_INVALID);
    assert_refused(moe_region_create(s.session, "none", 0, &region), MOE_INVALID_ARGUMENT,
                   MOE_REASON_REGION_INVALID);
    assert_refused(moe_region_create(s.session, "large", SHARED_IDENTITY_BYTES, &region),
                   MOE_RESOURCE_EXHAUSTED, MOE_REASON_REGION_LIMIT);
    assert_ok(moe_region_create(s.session, "more", 1 << 20, &region));
    assert_ok(moe_region_destroy(region));
    assert_ok(moe_region_create(s.session, "more", 1 << 20, &region)); /* the name is free again */
    stop(&s);
}

/* -------------------------------------------------------------------- ends */

static void *destroy_region(void *arg)
{
    static struct moe_status st;
    st = moe_region_destroy(arg);
    return &st;
}

/* Unregister waits for what is in flight, and refuses what comes later. */
static void a_region_in_use_is_freed_after_its_requests(void **state)
{
    (void)state;
    struct scene s;
    struct request r;
    uint64_t id;
    pthread_t thread;
    void *status;
    struct moe_client_region *out;
    start(&s, 0, 1);
    assert_ok(moe_region_create(s.session, "out", 4096, &out));
    request_fill(&r, &shared.worker, 0, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    struct moe_client_session_forward f = by_region(&s, 0, &r), late = f;
    f.y = (struct moe_client_tensor){out, 0};
    late.x = (struct moe_client_tensor){out, 1024};
    const double bytes = shared_metric("moe_regions_bytes");
    shared_pause_view();
    assert_ok(moe_session_submit(s.session, &f, &id));
    shared_await_metric("moe_regions_in_flight", 1);
    assert_int_equal(pthread_create(&thread, NULL, destroy_region, out), 0);
    shared_await_status("out", MOE__V1__REGION_STATUS__REGION_STATUS_CLOSING);
    assert_refused(run(&s, &late), MOE_NOT_FOUND, MOE_REASON_REGION_NOT_FOUND);
    assert_true(shared_metric("moe_regions_bytes") == bytes);
    shared_resume_view();
    assert_ok(moe_session_wait(s.session, id, NULL));
    pthread_join(thread, &status);
    assert_ok(*(struct moe_status *)status);
    shared_await_status("out", MOE__V1__REGION_STATUS__REGION_STATUS_UNSPECIFIED);
    assert_true(shared_metric("moe_regions_bytes") == bytes - 4096);
    request_free(&r);
    stop(&s);
}

/* A request that no view serves ends by its deadline, and so does one on an ended connection. */
static void every_wait_ends(void **state)
{
    (void)state;
    enum { TIMEOUT_MS = 300, LATE_MS = 100, TRIES = 3 }; /* other tests use the processors, too */
    struct scene s;
    struct request r;
    struct moe_status st;
    uint64_t id, begin, ms = 0;
    start(&s, TIMEOUT_MS, 1);
    request_fill(&r, &shared.worker, 0, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    struct moe_client_session_forward f = by_region(&s, 0, &r);
    assert_ok(run(&s, &f));
    shared_pause_view();
    for (int i = 0; i < TRIES && (i == 0 || ms > TIMEOUT_MS + LATE_MS); i++) {
        const struct moe_client_tensor spare[TRIES] = {at(&s, 0, Y), at(&s, 0, IDS),
                                                       at(&s, 0, WEIGHTS)};
        f.y = spare[i]; /* that of an earlier try may still be written */
        f.ids.region = f.weights.region = NULL;
        begin = moe_clock_ns();
        st = run(&s, &f);
        ms = (moe_clock_ns() - begin) / MOE_NS_PER_MS;
        print_message("  %s after %llu ms\n", moe_code_name(st.code), (unsigned long long)ms);
        assert_int_equal(st.code, MOE_DEADLINE_EXCEEDED);
        assert_true(ms >= TIMEOUT_MS);
    }
    assert_true(ms <= TIMEOUT_MS + LATE_MS);
    shared_resume_view();
    f.y = at(&s, 0, IDS_IN); /* y may still be written */
    assert_ok(run(&s, &f));
    stop(&s);
    /* The worker's sockets close while a request waits. */
    start(&s, 0, 1);
    f = by_region(&s, 0, &r);
    shared_pause_view();
    assert_ok(moe_session_submit(s.session, &f, &id));
    shared_await_metric("moe_regions_in_flight", 1);
    service_close(&shared);
    begin = moe_clock_ns();
    st = moe_session_wait(s.session, id, NULL);
    ms = (moe_clock_ns() - begin) / MOE_NS_PER_MS;
    print_message("  %s after %llu ms\n", moe_code_name(st.code), (unsigned long long)ms);
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    assert_true(ms <= LATE_MS);
    st = run(&s, &f);
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    struct moe_client_region *region;
    st = moe_region_create(s.session, "late", 4096, &region);
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    request_free(&r);
    stop(&s);
}

static int open_plain(void **state)
{
    (void)state;
    service_open(&shared);
    return 0;
}

static int forget_shared(void **state)
{
    (void)state;
    return shared_remove_directory();
}

static int close_plain(void **state)
{
    (void)state;
    service_close(&shared);
    return 0;
}

static void a_worker_shares_no_memory_by_default(void **state)
{
    (void)state;
    struct moe_client *client = shared_client();
    struct moe_client_session *session;
    assert_false(shared_is_offered());
    assert_refused(moe_session_open(client, NULL, &session), MOE_FAILED_PRECONDITION,
                   MOE_REASON_UNSUPPORTED);
    moe_client_close(client);
}

#define shared_test(f) cmocka_unit_test_setup_teardown(f, shared_open, shared_close)

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_worker_shares_no_memory_by_default, open_plain,
                                        close_plain),
        shared_test(y_by_region_is_y_by_forward_bit_for_bit),
        shared_test(parts_by_region_are_parts_by_forward),
        shared_test(token_ids_by_region_are_topk_ids_by_forward),
        shared_test(sixty_four_are_in_flight_and_no_more),
        shared_test(answers_come_out_of_order),
        shared_test(threads_share_a_session),
        shared_test(a_bad_request_gets_one_typed_error),
        shared_test(a_bad_region_gets_one_typed_error),
        shared_test(a_region_in_use_is_freed_after_its_requests),
        cmocka_unit_test_setup_teardown(every_wait_ends, shared_open, forget_shared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
