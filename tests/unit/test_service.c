/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of ExpertService's unary methods, over loopback, with the CPU backend. */
#include "base/clock.h"
#include "service_fixture.h"

#include <math.h>

/* ---------------------------------------------------------------------- good requests */

/* Ids as U8 or U16 if they fit; the caller frees the result. */
static uint8_t *narrow(Ask *ask, const struct request *r)
{
    size_t pairs = ask->topk_ids.len / sizeof(int32_t);
    size_t size = r->layer == 0 ? 1 : 2;
    uint8_t *ids = malloc(pairs * size);
    assert_non_null(ids);
    for (size_t i = 0; i < pairs; i++) {
        uint16_t id = (uint16_t)r->ids_in[i];
        memcpy(ids + i * size, &id, size); /* little-endian */
    }
    ask->topk_ids_dtype =
        size == 1 ? MOE__V1__DATA_TYPE__DATA_TYPE_U8 : MOE__V1__DATA_TYPE__DATA_TYPE_U16;
    ask->topk_ids = (ProtobufCBinaryData){.len = pairs * size, .data = ids};
    return ids;
}

static void check_id_format(const struct request *r, const Answer *answer)
{
    bool absent = false;
    for (uint32_t i = 0; i < answer->tokens * answer->top_k; i++)
        absent |= r->ids_out[i] < 0;
    assert_int_equal(answer->topk_ids_dtype, absent          ? MOE__V1__DATA_TYPE__DATA_TYPE_I32
                                             : r->layer == 0 ? MOE__V1__DATA_TYPE__DATA_TYPE_U8
                                                             : MOE__V1__DATA_TYPE__DATA_TYPE_U16);
}

static void every_mode_dtype_and_layer_gives_the_oracles_answer(void **state)
{
    (void)state;
    for (int i = 0; i < 60; i++) {
        struct request r;
        Ask ask;
        Answer *answer;
        uint8_t *ids = NULL;
        enum moe_routing_mode mode = (enum moe_routing_mode)(i % 3);
        request_fill(&r, &service.worker, i / 3 % 2, 1 + random_below(40),
                     i / 6 % 2 == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16, mode);
        ask_fill(&ask, &service, &r, true);
        if (mode == MOE_ROUTE_IDS)
            ids = narrow(&ask, &r);
        assert_ok(call_ask(&service, &ask, &answer));
        answer_check(&service, &r, answer);
        check_id_format(&r, answer);
        answer_free(answer);
        free(ids);
        request_free(&r);
    }
}

static void routing_is_returned_only_when_asked_for(void **state)
{
    (void)state;
    struct request r;
    Ask ask;
    Answer *with, *without;
    request_fill(&r, &service.worker, 1, 5, MOE_DTYPE_BF16, MOE_ROUTE_SERVER);
    ask_fill(&ask, &service, &r, true);
    assert_ok(call_ask(&service, &ask, &with));
    ask_fill(&ask, &service, &r, false);
    assert_ok(call_ask(&service, &ask, &without));
    assert_int_equal(without->topk_ids.len, 0);
    assert_int_equal(without->topk_weights.len, 0);
    assert_int_equal(without->y_data.len, with->y_data.len);
    assert_memory_equal(without->y_data.data, with->y_data.data, with->y_data.len);
    answer_free(with);
    answer_free(without);
    request_free(&r);
}

/* A pass of layer 4 (E = 300). The caller frees the answer. */
static Answer *ask_for_rehomed(bool asked)
{
    struct request r;
    Ask ask;
    Answer *answer;
    request_fill(&r, &service.worker, 1, 20, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    ask_fill(&ask, &service, &r, true);
    ask.return_rehomed = asked;
    assert_ok(call_ask(&service, &ask, &answer));
    answer_check(&service, &r, answer);
    request_free(&r);
    return answer;
}

/* The view has slot 0 only. In the second placement one copy of expert e is on slot e % 3. The
 * other one is on slot 4, or on slot 0 for every fifth expert. */
static void rehomed_experts_are_returned_only_when_asked_for(void **state)
{
    (void)state;
    enum { E = 300 };
    static uint32_t offset[E + 1], expected[E];
    static uint16_t slot[2 * E];
    size_t count = 0;
    for (uint32_t e = 0; e < E; e++) {
        offset[e + 1] = 2 * (e + 1);
        slot[2 * e] = (uint16_t)(e % 3);
        slot[2 * e + 1] = e % 5 == 0 ? 0 : 4;
        if ((e % 3 == 0) != (e % 5 == 0))
            expected[count++] = e;
    }
    struct moe_placement second[WORKER_LAYERS] = {
        [1] = {.version = 2, .experts = E, .slots = 5, .offset = offset, .slot = slot}};
    Answer *answer = ask_for_rehomed(true);
    assert_non_null(answer->rehomed); /* one slot: no expert is re-homed */
    assert_int_equal(answer->rehomed->n_experts, 0);
    answer_free(answer);
    worker_stop_view(&service.worker);
    service.worker.placements = second;
    service_start_view(&service);
    answer = ask_for_rehomed(true);
    assert_int_equal(answer->rehomed->n_experts, count);
    assert_memory_equal(answer->rehomed->experts, expected, count * sizeof *expected);
    assert_int_equal(answer->epoch, service.worker.epoch);
    answer_free(answer);
    answer = ask_for_rehomed(false);
    assert_null(answer->rehomed);
    answer_free(answer);
}

/* ------------------------------------------------------------------ state of the worker */

static void a_request_may_name_the_digest_of_its_model(void **state)
{
    (void)state;
    struct sample sample;
    Answer *answer;
    char own[] = TOY_DIGEST;
    sample_fill(&sample, &service);
    sample.ask.model_digest = own;
    assert_ok(call_ask(&service, &sample.ask, &answer));
    answer_free(answer);
    assert_ok(moe_service_set_model(service.service, "toy", "")); /* of an older coordinator */
    assert_refused(call_ask(&service, &sample.ask, &answer), MOE_FAILED_PRECONDITION,
                   MOE_REASON_MODEL_MISMATCH);
    assert_ok(moe_service_set_model(service.service, "toy", TOY_DIGEST));
}

static void without_a_view_clients_get_a_retry_hint(void **state)
{
    (void)state;
    struct sample sample;
    Answer *answer;
    assert_ok(moe_service_set_view(service.service, 0, NULL, 0));
    moe_service_give_up(service.service);
    sample_fill(&sample, &service);
    struct moe_status st = call_ask(&service, &sample.ask, &answer);
    assert_true(st.retry_after_ms > 0);
    assert_refused(st, MOE_UNAVAILABLE, MOE_REASON_REFORMING);
    service_start_view(&service);
    assert_serves(&service);
    moe_service_set_draining(service.service);
    st = call_ask(&service, &sample.ask, &answer);
    assert_true(st.retry_after_ms > 0);
    assert_refused(st, MOE_UNAVAILABLE, MOE_REASON_DRAINING);
}

static void a_group_that_trains_answers_nothing_without_a_lease(void **state)
{
    (void)state;
    struct sample sample;
    Answer *answer;
    sample_fill(&sample, &service);
    service_hold_lease(&service, false);
    assert_refused(call_ask(&service, &sample.ask, &answer), MOE_UNAVAILABLE,
                   MOE_REASON_LEASE_LOST);
    service_hold_lease(&service, true);
    assert_serves(&service);
}

struct outcome {
    struct moe_status status;
    struct moe_rpc_msg *reply;
    atomic_int done;
};

static void on_reply(void *ctx, struct moe_status status, struct moe_rpc_msg *reply)
{
    struct outcome *o = ctx;
    o->status = status;
    o->reply = reply;
    atomic_store(&o->done, 1);
}

static void start_call(struct outcome *o, struct moe_rpc_channel *channel,
                       const struct bytes *message, uint64_t deadline_ns)
{
    const struct moe_rpc_call_options options = {.deadline_ns = deadline_ns};
    const struct moe_rpc_out out = {.head = message->data, .head_length = message->length};
    *o = (struct outcome){0};
    moe_rpc_call_unary(channel, "/moe.v1.ExpertService/Forward", &options, &out, on_reply, o);
}

static void wait_outcome(struct outcome *o)
{
    struct timespec interval = {.tv_nsec = 100000};
    while (atomic_load(&o->done) == 0)
        nanosleep(&interval, NULL);
}

static uint64_t queued_tokens(void)
{
    struct moe_engine_counters c;
    moe_engine_read_counters(service.worker.engine, &c);
    return c.queued_tokens;
}

static void wait_queued(uint64_t tokens)
{
    struct timespec interval = {.tv_nsec = 100000};
    uint64_t limit = moe_clock_ns() + 30 * MOE_NS_PER_S;
    while (queued_tokens() != tokens) {
        if (moe_clock_ns() > limit)
            fail_msg("%llu tokens are queued, not %llu", (unsigned long long)queued_tokens(),
                     (unsigned long long)tokens);
        nanosleep(&interval, NULL);
    }
}

static int open_patient_service(void **state)
{
    worker_parts_wait_ns = 3600 * MOE_NS_PER_S;
    int rc = open_service(state);
    worker_parts_wait_ns = MOE_NS_PER_MS;
    return rc;
}

/* The first part waits for the second one, and a request without a batch does not. */
static void parts_of_a_batch_share_a_step(void **state)
{
    (void)state;
    enum { PARTS = 2, TOKENS = 3 };
    Moe__V1__BatchPart part = MOE__V1__BATCH_PART__INIT;
    struct outcome outcomes[PARTS];
    struct request r[PARTS];
    part.batch = UINT64_C(0x0123456789abcdef);
    part.parts = PARTS;
    for (int i = 0; i < PARTS; i++) {
        Ask ask;
        request_fill(&r[i], &service.worker, 1, TOKENS, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
        ask_fill(&ask, &service, &r[i], true);
        ask.batch_part = &part;
        struct bytes message = ask_pack(&ask);
        start_call(&outcomes[i], service.channel, &message, MOE_NEVER);
        free(message.data);
        if (i + 1 < PARTS) {
            wait_queued(TOKENS);
            assert_serves(&service);
            assert_int_equal(atomic_load(&outcomes[i].done), 0);
        }
    }
    for (int i = 0; i < PARTS; i++) {
        wait_outcome(&outcomes[i]);
        assert_ok(outcomes[i].status);
        Answer *answer = answer_read(outcomes[i].reply);
        answer_check(&service, &r[i], answer);
        assert_int_equal(answer->stages->step_tokens, PARTS * TOKENS);
        answer_free(answer);
        request_free(&r[i]);
    }
}

/* The service has a view, the engine has none: requests are accepted and wait. */
static void cancelled_and_late_calls_leave_the_queue(void **state)
{
    (void)state;
    struct bytes message = random_message(&service);
    struct outcome cancelled, late;
    struct moe_rpc_client *client;
    struct moe_rpc_channel *channel;
    assert_serves(&service);
    worker_stop_view(&service.worker);
    service_connect(&service, &client, &channel);
    start_call(&cancelled, channel, &message, MOE_NEVER);
    struct moe_engine_counters c = {0};
    uint64_t limit = moe_clock_ns() + 30 * MOE_NS_PER_S;
    while (c.queued_tokens == 0 && moe_clock_ns() < limit)
        moe_engine_read_counters(service.worker.engine, &c);
    assert_true(c.queued_tokens > 0);
    moe_rpc_channel_close(channel);
    moe_rpc_client_destroy(client);
    assert_int_equal(atomic_load(&cancelled.done), 1);
    assert_int_equal(cancelled.status.code, MOE_CANCELLED);
    wait_queued(0);

    start_call(&late, service.channel, &message, moe_clock_ns() + 30 * MOE_NS_PER_MS);
    wait_outcome(&late);
    assert_int_equal(late.status.code, MOE_DEADLINE_EXCEEDED);
    wait_queued(0);
    free(message.data);
    service_start_view(&service);
    assert_serves(&service);
}

static void requests_beyond_the_byte_budget_get_a_retry_hint(void **state)
{
    (void)state;
    enum { CALLS = 80 };
    static struct outcome outcomes[CALLS];
    struct request r;
    Ask ask;
    request_fill(&r, &service.worker, 1, SERVICE_TOKENS, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    ask_fill(&ask, &service, &r, false);
    struct bytes message = ask_pack(&ask);
    assert_serves(&service);
    worker_stop_view(&service.worker);
    for (int i = 0; i < CALLS; i++)
        start_call(&outcomes[i], service.channel, &message, MOE_NEVER);
    /* 80 KiB in and out each: 1 MiB of budget ends before the queue's 4096 tokens do. */
    struct moe_staging_counters c;
    int refused = 0;
    uint64_t limit = moe_clock_ns() + 30 * MOE_NS_PER_S;
    while (queued_tokens() + (uint64_t)refused * SERVICE_TOKENS < CALLS * SERVICE_TOKENS &&
           moe_clock_ns() < limit) {
        refused = 0;
        for (int i = 0; i < CALLS; i++)
            refused += atomic_load(&outcomes[i].done);
        moe_staging_read_counters(service.staging, &c);
        assert_true(c.in_use_bytes + c.idle_bytes <= SERVICE_BUDGET);
    }
    service_start_view(&service);
    int answered = 0;
    for (int i = 0; i < CALLS; i++) {
        wait_outcome(&outcomes[i]);
        if (!moe_failed(&outcomes[i].status)) {
            answered++;
            answer_free(answer_read(outcomes[i].reply));
            continue;
        }
        assert_int_equal(outcomes[i].status.code, MOE_RESOURCE_EXHAUSTED);
        assert_int_equal(outcomes[i].status.reason, MOE_REASON_QUEUE_FULL);
        assert_true(outcomes[i].status.retry_after_ms > 0);
    }
    print_message("%d answered, %d refused\n", answered, CALLS - answered);
    assert_true(answered > 0 && answered < CALLS);
    free(message.data);
    request_free(&r);
    assert_serves(&service);
}

/* ------------------------------------------------------------------- what is reported about it */

static struct moe_status call_plain(const char *path, const struct bytes *message,
                                    struct bytes *reply)
{
    const struct moe_rpc_call_options options = {.deadline_ns = moe_clock_ns() + 10 * MOE_NS_PER_S};
    const struct moe_rpc_out out = {.head = message->data, .head_length = message->length};
    struct moe_rpc_msg *m;
    MOE_TRY(moe_rpc_call_wait(service.channel, path, &options, &out, &m));
    reply->length = moe_rpc_msg_length(m);
    reply->data = malloc(reply->length + 1);
    assert_non_null(reply->data);
    assert_ok(moe_rpc_msg_flatten(m, reply->data, reply->length, &reply->length));
    moe_rpc_msg_free(m);
    return moe_ok();
}

static void the_server_describes_itself_and_its_model(void **state)
{
    (void)state;
    struct bytes empty = {(uint8_t *)(uintptr_t) "", 0}, reply;
    moe_service_set_slot(service.service, 3);
    assert_ok(call_plain("/moe.v1.ExpertService/GetServerInfo", &empty, &reply));
    Moe__V1__GetServerInfoResponse *info =
        moe__v1__get_server_info_response__unpack(NULL, reply.length, reply.data);
    assert_non_null(info);
    assert_string_equal(info->name, "moe-worker");
    assert_string_equal(info->backend, "cpu");
    assert_string_equal(info->cuda_problem, ""); /* the fixture tells nothing of modules */
    assert_string_equal(info->coordinator, "127.0.0.1:2");
    assert_int_equal(info->n_workers, 1);
    assert_string_equal(info->workers[0], "127.0.0.1:1");
    assert_int_equal(info->slot, 3);
    assert_int_equal(info->epoch, service.worker.epoch);
    assert_int_equal(info->max_tokens_per_request, SERVICE_TOKENS);
    assert_int_equal(info->n_extensions, 4);
    assert_string_equal(info->extensions[3], "batch_parts");
    moe__v1__get_server_info_response__free_unpacked(info, NULL);
    free(reply.data);

    assert_ok(call_plain("/moe.v1.ExpertService/GetModel", &empty, &reply));
    Moe__V1__GetModelResponse *model =
        moe__v1__get_model_response__unpack(NULL, reply.length, reply.data);
    assert_non_null(model);
    assert_string_equal(model->model, "toy");
    assert_string_equal(model->family, "mixtral");
    assert_int_equal(model->n_layers, WORKER_LAYERS);
    assert_int_equal(model->layers[1]->layer, 4);
    assert_int_equal(model->layers[1]->zero_experts, 4);
    assert_int_equal(model->layers[1]->hidden, 40);
    moe__v1__get_model_response__free_unpacked(model, NULL);
    free(reply.data);

    /* The group's name and digest replace the worker's. */
    assert_ok(moe_service_set_model(service.service, "other", "abc"));
    assert_ok(call_plain("/moe.v1.ExpertService/GetModel", &empty, &reply));
    model = moe__v1__get_model_response__unpack(NULL, reply.length, reply.data);
    assert_non_null(model);
    assert_string_equal(model->model, "other");
    assert_string_equal(model->model_digest, "abc");
    moe__v1__get_model_response__free_unpacked(model, NULL);
    free(reply.data);
    assert_ok(moe_service_set_model(service.service, "toy", TOY_DIGEST));

    struct bytes other = {(uint8_t *)(uintptr_t) "\x0a\x05other", 7};
    assert_refused(call_plain("/moe.v1.ExpertService/GetModel", &other, &reply), MOE_NOT_FOUND,
                   MOE_REASON_MODEL_NOT_FOUND);
}

/* Value of the series `line` in the rendered text. */
static double metric(const char *line)
{
    char *text, *end = NULL;
    size_t length;
    assert_ok(moe_metrics_render(service.metrics, &text, &length));
    const char *at = strstr(text, line);
    if (at == NULL)
        fail_msg("no series %s", line);
    double value = strtod(at + strlen(line), &end);
    free(text);
    return value;
}

static void requests_tokens_and_errors_are_counted(void **state)
{
    (void)state;
    struct sample sample;
    Answer *answer;
    assert_serves(&service);
    assert_serves(&service);
    sample_fill(&sample, &service);
    sample.ask.routing_mode = MOE__V1__ROUTING_MODE__ROUTING_MODE_SERVER;
    sample.ask.topk_ids.len = sample.ask.topk_weights.len = 0;
    sample.x[30] = NAN;
    assert_refused(call_ask(&service, &sample.ask, &answer), MOE_INVALID_ARGUMENT,
                   MOE_REASON_NONFINITE_LOGITS);
    assert_true(metric("moe_requests_total{rpc=\"Forward\",code=\"OK\"} ") == 2);
    assert_true(metric("moe_requests_total{rpc=\"Forward\",code=\"INVALID_ARGUMENT\"} ") == 1);
    assert_true(metric("moe_refused_total{reason=\"NONFINITE_LOGITS\"} ") == 1);
    assert_true(metric("moe_refused_total{reason=\"INVALID_ARGUMENT\"} ") == 0); /* has a reason */
    assert_true(metric("moe_request_seconds_count{rpc=\"Forward\"} ") == 3);
    assert_true(metric("\nmoe_tokens_total ") == 6);
    assert_true(metric("\nmoe_steps_total ") == 3);
    assert_true(metric("\nmoe_queue_tokens ") == 0);
    assert_true(metric("\nmoe_dropped_tokens_total ") == 0);
    assert_true(metric("\nmoe_nonfinite_total ") == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_service(every_mode_dtype_and_layer_gives_the_oracles_answer),
        with_service(routing_is_returned_only_when_asked_for),
        with_service(rehomed_experts_are_returned_only_when_asked_for),
        with_service(a_request_may_name_the_digest_of_its_model),
        with_service(without_a_view_clients_get_a_retry_hint),
        with_service(a_group_that_trains_answers_nothing_without_a_lease),
        cmocka_unit_test_setup_teardown(parts_of_a_batch_share_a_step, open_patient_service,
                                        close_service),
        with_service(cancelled_and_late_calls_leave_the_queue),
        with_service(requests_beyond_the_byte_budget_get_a_retry_hint),
        with_service(the_server_describes_itself_and_its_model),
        with_service(requests_tokens_and_errors_are_counted),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
