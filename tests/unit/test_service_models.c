/* SPDX-License-Identifier: Apache-2.0 */
/* ExpertService with an added model next to the default one: names, pins and what is refused. */
#include "all_experts.h"
#include "base/clock.h"
#include "service_fixture.h"

#include <string.h>
#include <time.h>

#define ADDED_DIGEST "abababababababababababababababababababababababababababababababab"

enum { NUMBER = 3, TOKENS = 5, HIDDEN = 64 };

static float x[TOKENS * HIDDEN];

static void order(enum moe_model_step step)
{
    const char *directory = MOE_GOLDEN_MODELS "/mixtral";
    const struct moe_group_model_order o = {.model = NUMBER,
                                            .step = step,
                                            .order = 1,
                                            .epoch = service.worker.epoch,
                                            .name = "second",
                                            .directory = directory,
                                            .digest = ADDED_DIGEST,
                                            .assignment = assign_all_experts(directory)};
    unsigned before = atomic_load(&service.reports);
    uint64_t limit = moe_clock_ns() + 30 * MOE_NS_PER_S;
    struct timespec interval = {.tv_nsec = 100000};
    moe_models_order(service.models, &o);
    while (atomic_load(&service.reports) == before) {
        if (moe_clock_ns() > limit)
            fail_msg("no report in half a minute");
        nanosleep(&interval, NULL);
    }
    assert_ok(service.reported);
    free_assignment(&o.assignment);
}

/* A request for layer 0 of the model "second". */
static Ask ask_second(void)
{
    Ask ask;
    moe__v1__forward_stream_request__init(&ask);
    ask.model = (char *)(uintptr_t) "second";
    ask.tokens = TOKENS;
    ask.hidden = HIDDEN;
    ask.dtype = MOE__V1__DATA_TYPE__DATA_TYPE_F32;
    ask.x_data = (ProtobufCBinaryData){.len = sizeof x, .data = (uint8_t *)x};
    return ask;
}

static struct moe_status ask_and_free(const Ask *ask)
{
    Answer *answer;
    MOE_TRY(call_ask(&service, ask, &answer));
    assert_int_equal(answer->y_data.len, sizeof x);
    assert_int_equal(answer->weights_version, 1);
    answer_free(answer);
    return moe_ok();
}

static void a_request_names_its_model(void **state)
{
    (void)state;
    Ask ask = ask_second();
    assert_refused(ask_and_free(&ask), MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND);
    order(MOE_MODEL_OPEN);
    order(MOE_MODEL_LOAD);
    assert_refused(ask_and_free(&ask), MOE_UNAVAILABLE, MOE_REASON_MODEL_LOADING);
    order(MOE_MODEL_ADD);
    assert_ok(ask_and_free(&ask));
    assert_serves(&service); /* the default model, which has other widths */
    ask.model_digest = (char *)(uintptr_t)ADDED_DIGEST;
    ask.weights_version = 1;
    assert_ok(ask_and_free(&ask));
    ask.model_digest = (char *)(uintptr_t)TOY_DIGEST; /* the default model's */
    assert_refused(ask_and_free(&ask), MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH);
    ask = ask_second();
    ask.weights_version = 2;
    assert_refused(ask_and_free(&ask), MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH);
    ask = ask_second();
    ask.layer = 77;
    assert_refused(ask_and_free(&ask), MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND);
    ask = ask_second();
    Moe__V1__RetainForBackward retain = MOE__V1__RETAIN_FOR_BACKWARD__INIT;
    ask.retain = &retain;
    assert_refused(ask_and_free(&ask), MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED);
    order(MOE_MODEL_QUIESCE);
    ask = ask_second();
    assert_refused(ask_and_free(&ask), MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND);
    order(MOE_MODEL_REMOVE);
    order(MOE_MODEL_CLOSE);
    assert_refused(ask_and_free(&ask), MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND);
    assert_serves(&service);
}

static struct moe_rpc_msg *call(const char *path, const uint8_t *message, size_t length)
{
    const struct moe_rpc_call_options options = {.deadline_ns = moe_clock_ns() + 30 * MOE_NS_PER_S,
                                                 .wait_for_ready = true};
    const struct moe_rpc_out out = {.head = message, .head_length = length};
    struct moe_rpc_msg *reply;
    assert_ok(moe_rpc_call_wait(service.channel, path, &options, &out, &reply));
    return reply;
}

static void clients_see_the_models(void **state)
{
    (void)state;
    struct moe_rpc_arena arena;
    void *message;
    order(MOE_MODEL_OPEN);
    order(MOE_MODEL_LOAD);
    order(MOE_MODEL_ADD);
    struct moe_rpc_msg *m = call("/moe.v1.ExpertService/GetServerInfo", (const uint8_t *)"", 0);
    assert_ok(
        moe_rpc_msg_unpack(m, &moe__v1__get_server_info_response__descriptor, &arena, &message));
    const Moe__V1__GetServerInfoResponse *info = message;
    assert_int_equal(info->n_models, 2);
    assert_string_equal(info->models[0], "toy");
    assert_string_equal(info->models[1], "second");
    moe_rpc_msg_free(m);
    m = call("/moe.v1.ExpertService/GetModel", (const uint8_t *)"\x0a\x06second", 8);
    assert_ok(moe_rpc_msg_unpack(m, &moe__v1__get_model_response__descriptor, &arena, &message));
    const Moe__V1__GetModelResponse *model = message;
    assert_string_equal(model->model, "second");
    assert_string_equal(model->family, "mixtral");
    assert_string_equal(model->model_digest, ADDED_DIGEST);
    assert_int_equal(model->n_layers, 2);
    assert_int_equal(model->layers[0]->hidden, HIDDEN);
    assert_int_equal(model->weights_version, 1);
    moe_rpc_msg_free(m);
}

int main(void)
{
    for (size_t i = 0; i < TOKENS * HIDDEN; i++)
        x[i] = (float)(i % 17) / 17 - 0.5f;
    const struct CMUnitTest tests[] = {
        with_service(a_request_names_its_model),
        with_service(clients_see_the_models),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
