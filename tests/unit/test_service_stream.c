/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of ForwardStream, over loopback, with the CPU backend. */
#include "base/clock.h"
#include "base/mutex.h"
#include "service_fixture.h"

#include <math.h>

/* ------------------------------------------------------------------------- one stream */

enum { ITEMS = 300 };

struct client {
    struct moe_rpc_stream *stream;
    struct moe_mutex lock;
    Answer *answers[ITEMS]; /* by request_id */
    uint32_t count, doubles;
    struct moe_status status;
    atomic_int closed;
};

static void on_message(void *ctx, struct moe_rpc_msg *m)
{
    struct client *c = ctx;
    Answer *answer = answer_read(m);
    moe_mutex_lock(&c->lock);
    MOE_INVARIANT(answer->request_id < ITEMS);
    if (c->answers[answer->request_id] == NULL) {
        c->answers[answer->request_id] = answer;
    } else {
        c->doubles++;
        answer_free(answer);
    }
    c->count++;
    moe_mutex_unlock(&c->lock);
}

static void on_closed(void *ctx, struct moe_status status)
{
    struct client *c = ctx;
    c->status = status;
    atomic_store(&c->closed, 1);
}

static void client_open(struct client *c)
{
    static const struct moe_rpc_stream_events events = {on_message, on_closed};
    const struct moe_rpc_call_options options = {.deadline_ns = moe_clock_ns() + 60 * MOE_NS_PER_S,
                                                 .wait_for_ready = true};
    memset(c, 0, sizeof *c);
    moe_mutex_init(&c->lock);
    assert_ok(moe_rpc_stream_open(service.channel, "/moe.v1.ExpertService/ForwardStream", &options,
                                  &events, c, &c->stream));
}

static void client_send(struct client *c, const struct bytes *message)
{
    const struct moe_rpc_out out = {.head = message->data, .head_length = message->length};
    assert_ok(moe_rpc_stream_send(c->stream, &out));
}

static void client_ask(struct client *c, Ask *ask, uint64_t id)
{
    ask->request_id = id;
    struct bytes b = ask_pack(ask);
    client_send(c, &b);
    free(b.data);
}

static void sleep_briefly(void)
{
    struct timespec t = {.tv_nsec = 100000};
    nanosleep(&t, NULL);
}

static uint32_t client_count(struct client *c)
{
    moe_mutex_lock(&c->lock);
    uint32_t n = c->count;
    moe_mutex_unlock(&c->lock);
    return n;
}

static void client_wait(struct client *c, uint32_t answers)
{
    uint64_t limit = moe_clock_ns() + 30 * MOE_NS_PER_S;
    while (client_count(c) < answers) {
        if (moe_clock_ns() > limit)
            fail_msg("%u of %u answers came", client_count(c), answers);
        sleep_briefly();
    }
}

static void client_free(struct client *c)
{
    moe_rpc_stream_free(c->stream);
    for (int i = 0; i < ITEMS; i++)
        if (c->answers[i] != NULL)
            answer_free(c->answers[i]);
    moe_mutex_destroy(&c->lock);
}

/* Half-closes and waits for the server's end. */
static void client_finish(struct client *c)
{
    moe_rpc_stream_close_send(c->stream);
    while (atomic_load(&c->closed) == 0)
        sleep_briefly();
}

/* -------------------------------------------------------------------------------- tests */

static void a_stream_answers_every_item_and_a_bad_one_does_not_end_it(void **state)
{
    (void)state;
    static struct request r[ITEMS];
    struct client c;
    client_open(&c);
    for (int i = 0; i < ITEMS; i++) {
        Ask ask;
        request_fill(&r[i], &service.worker, i % 2, 1 + random_below(3),
                     random_below(2) == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16,
                     (enum moe_routing_mode)random_below(3));
        ask_fill(&ask, &service, &r[i], true);
        if (i % 10 == 3)
            ask.layer = 99;
        client_ask(&c, &ask, (uint64_t)i);
    }
    client_finish(&c); /* the server's end comes after the last answer */
    assert_ok(c.status);
    assert_int_equal(c.count, ITEMS);
    assert_int_equal(c.doubles, 0);
    for (int i = 0; i < ITEMS; i++) {
        const Answer *a = c.answers[i];
        assert_non_null(a);
        if (i % 10 == 3) {
            assert_non_null(a->error);
            assert_int_equal(a->error->code, MOE_NOT_FOUND);
            assert_string_equal(a->error->reason, "LAYER_NOT_FOUND");
            assert_int_equal(a->y_data.len, 0);
        } else if (a->error != NULL) {
            /* 300 items at once may exceed the byte budget: then each item gets that error. */
            assert_string_equal(a->error->reason, "QUEUE_FULL");
        } else {
            answer_check(&service, &r[i], a);
        }
        request_free(&r[i]);
    }
    client_free(&c);
}

static void stream_and_unary_give_the_same_bits(void **state)
{
    (void)state;
    struct client c;
    client_open(&c);
    for (uint32_t i = 0; i < 60; i++) {
        struct request r;
        Ask ask;
        Answer *unary;
        request_fill(&r, &service.worker, (int)(i % 2), 1 + random_below(30),
                     i / 2 % 2 == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16,
                     (enum moe_routing_mode)(i % 3));
        ask_fill(&ask, &service, &r, true);
        assert_ok(call_ask(&service, &ask, &unary));
        client_ask(&c, &ask, i);
        client_wait(&c, i + 1);
        const Answer *streamed = c.answers[i];
        assert_null(streamed->error);
        assert_int_equal(streamed->y_data.len, unary->y_data.len);
        assert_memory_equal(streamed->y_data.data, unary->y_data.data, unary->y_data.len);
        assert_int_equal(streamed->topk_ids.len, unary->topk_ids.len);
        assert_memory_equal(streamed->topk_ids.data, unary->topk_ids.data, unary->topk_ids.len);
        assert_memory_equal(streamed->topk_weights.data, unary->topk_weights.data,
                            unary->topk_weights.len);
        answer_free(unary);
        request_free(&r);
    }
    client_finish(&c);
    assert_ok(c.status);
    client_free(&c);
}

static void errors_of_broken_items_name_their_request_where_they_can(void **state)
{
    (void)state;
    struct client c;
    struct request r;
    Ask ask;
    client_open(&c);
    request_fill(&r, &service.worker, 0, 2, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    ask_fill(&ask, &service, &r, true);
    ask.request_id = 7;
    struct bytes good = ask_pack(&ask);
    uint8_t *twice = malloc(good.length + 2);
    assert_non_null(twice);
    memcpy(twice, good.data, good.length);
    memcpy(twice + good.length, "\x7a", 2); /* an empty x_data after the first one */
    client_send(&c, &(struct bytes){twice, good.length + 2});
    client_wait(&c, 1);
    client_send(&c,
                &(struct bytes){good.data, 9}); /* ends inside a field: it has no readable number */
    client_wait(&c, 2);
    client_ask(&c, &ask, 5);
    client_wait(&c, 3);
    client_finish(&c);
    assert_ok(c.status);
    assert_non_null(c.answers[7]);
    assert_string_equal(c.answers[7]->error->reason, "DUPLICATE_TENSOR");
    assert_non_null(c.answers[0]);
    assert_string_equal(c.answers[0]->error->reason, "TRUNCATED");
    assert_non_null(c.answers[5]);
    answer_check(&service, &r, c.answers[5]);
    free(twice);
    free(good.data);
    request_free(&r);
    client_free(&c);
}

static void a_bad_token_fails_its_item_only(void **state)
{
    (void)state;
    struct client c;
    struct request r[3];
    client_open(&c);
    for (int i = 0; i < 3; i++) {
        Ask ask;
        request_fill(&r[i], &service.worker, 1, 4, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
        if (i == 1)
            ((float *)r[i].x)[41] = NAN;
        ask_fill(&ask, &service, &r[i], true);
        client_ask(&c, &ask, (uint64_t)i);
    }
    client_finish(&c);
    assert_ok(c.status);
    assert_string_equal(c.answers[1]->error->reason, "NONFINITE_LOGITS");
    print_message("  %s\n", c.answers[1]->error->message);
    answer_check(&service, &r[0], c.answers[0]);
    answer_check(&service, &r[2], c.answers[2]);
    for (int i = 0; i < 3; i++)
        request_free(&r[i]);
    client_free(&c);
}

static uint64_t queued_tokens(void)
{
    struct moe_engine_counters counters;
    moe_engine_read_counters(service.worker.engine, &counters);
    return counters.queued_tokens;
}

static void wait_queued(uint64_t tokens)
{
    uint64_t limit = moe_clock_ns() + 30 * MOE_NS_PER_S;
    while (queued_tokens() != tokens) {
        if (moe_clock_ns() > limit)
            fail_msg("%llu tokens are queued", (unsigned long long)queued_tokens());
        sleep_briefly();
    }
}

/* With no view in the engine, requests are accepted and wait. */
static void a_stream_is_not_read_faster_than_it_is_answered(void **state)
{
    (void)state;
    struct client c;
    struct request r;
    Ask ask;
    request_fill(&r, &service.worker, 0, 1, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    ask_fill(&ask, &service, &r, true);
    worker_stop_view(&service.worker);
    client_open(&c);
    for (uint32_t i = 0; i < 150; i++)
        client_ask(&c, &ask, i);
    wait_queued(MOE_SERVICE_STREAM_REQUESTS);
    for (int i = 0; i < 200; i++) {
        sleep_briefly();
        assert_int_equal(queued_tokens(), MOE_SERVICE_STREAM_REQUESTS);
    }
    service_start_view(&service);
    client_wait(&c, 150);
    client_finish(&c);
    assert_ok(c.status);
    for (int i = 0; i < 150; i++)
        answer_check(&service, &r, c.answers[i]);
    request_free(&r);
    client_free(&c);
}

static void a_cancelled_stream_leaves_no_request(void **state)
{
    (void)state;
    struct request r;
    Ask ask;
    request_fill(&r, &service.worker, 0, 1, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    ask_fill(&ask, &service, &r, true);
    for (int round = 0; round < 10; round++) {
        struct client c;
        bool waiting = round % 2 == 0;
        if (waiting)
            worker_stop_view(&service.worker);
        client_open(&c);
        for (uint32_t i = 0; i < 40; i++)
            client_ask(&c, &ask, i);
        if (waiting)
            wait_queued(40);
        moe_rpc_stream_cancel(c.stream);
        while (atomic_load(&c.closed) == 0)
            sleep_briefly();
        assert_int_equal(c.status.code, MOE_CANCELLED);
        wait_queued(0);
        client_free(&c);
        if (waiting)
            service_start_view(&service);
        assert_serves(&service);
    }
    request_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_service(a_stream_answers_every_item_and_a_bad_one_does_not_end_it),
        with_service(stream_and_unary_give_the_same_bits),
        with_service(errors_of_broken_items_name_their_request_where_they_can),
        with_service(a_bad_token_fails_its_item_only),
        with_service(a_stream_is_not_read_faster_than_it_is_answered),
        with_service(a_cancelled_stream_leaves_no_request),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
