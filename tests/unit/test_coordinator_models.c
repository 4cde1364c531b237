/* SPDX-License-Identifier: Apache-2.0 */
/* Added models of a real coordinator, over gRPC: workers obey its orders, or fail. */
#include "base/clock.h"
#include "coordinator_workers.h"
#include "support/check.h"
#include "support/random.h"

#include <pthread.h>
#include <string.h>

/* A call of an operator that waits, on a separate thread. */
struct waiting {
    pthread_t thread;
    const char *path, *from, *name;
    bool dry_run;
    uint64_t limit_ns;
    struct moe_status st;
    uint8_t bytes[16384];
    size_t length;
};

static void *call_and_wait(void *arg)
{
    struct waiting *c = arg;
    uint8_t out[512];
    Moe__V1__LoadModelRequest load_it = MOE__V1__LOAD_MODEL_REQUEST__INIT;
    Moe__V1__UnloadModelRequest unload = MOE__V1__UNLOAD_MODEL_REQUEST__INIT;
    load_it.directory = (char *)(uintptr_t)c->from;
    load_it.name = unload.name = (char *)(uintptr_t)c->name;
    load_it.dry_run = c->dry_run;
    size_t length = protobuf_c_message_pack(c->from[0] != '\0' ? &load_it.base : &unload.base, out);
    struct moe_rpc_call_options options = {.deadline_ns = c->limit_ns, .wait_for_ready = true};
    struct moe_rpc_msg *reply = NULL;
    c->st = moe_rpc_call_wait(channel, c->path, &options,
                              &(struct moe_rpc_out){.head = out, .head_length = length}, &reply);
    if (!moe_failed(&c->st)) {
        c->st = moe_rpc_msg_flatten(reply, c->bytes, sizeof c->bytes, &c->length);
        moe_rpc_msg_free(reply);
    }
    return NULL;
}

static void begin_call(struct waiting *c, const char *path, const char *from, const char *name)
{
    c->path = path;
    c->from = from;
    c->name = name;
    if (c->limit_ns == 0)
        c->limit_ns = time_limit();
    assert_int_equal(pthread_create(&c->thread, NULL, call_and_wait, c), 0);
}

static void begin_load(struct waiting *c, const char *from, const char *name)
{
    begin_call(c, "/moe.v1.AdminService/LoadModel", from, name);
}

static void end_call(struct waiting *c, enum moe_code code, enum moe_reason reason)
{
    pthread_join(c->thread, NULL);
    print_message("  %s %s\n", moe_code_name(c->st.code),
                  moe_failed(&c->st) ? c->st.text : "answered");
    assert_int_equal(c->st.code, code);
    assert_true(code == MOE_OK || c->st.reason == reason);
}

static void fill_layers(Moe__V1__LayerInfo *info, Moe__V1__LayerMemory *memory,
                        Moe__V1__LayerMemory **list)
{
    for (uint32_t i = 0; i < LAYERS; i++) {
        moe__v1__layer_info__init(&info[i]);
        moe__v1__layer_memory__init(&memory[i]);
        info[i].layer = 1 + i;
        info[i].hidden = 64;
        info[i].experts = 8;
        info[i].top_k = 2;
        memory[i].info = &info[i];
        memory[i].common_resident_bytes = 10;
        memory[i].expert_resident_bytes = 100;
        list[i] = &memory[i];
    }
}

/* Answers the worker's next order, which must be `step`, and any repeated earlier one. */
static void obey(struct worker *w, Moe__V1__ModelStep step, uint64_t free_bytes)
{
    Moe__V1__LayerInfo info[LAYERS];
    Moe__V1__LayerMemory memory[LAYERS], *list[LAYERS];
    for (;;) {
        Moe__V1__SessionResponse *r = expect(w, MOE__V1__SESSION_RESPONSE__BODY_MODEL_ORDER);
        const Moe__V1__ModelOrder *order = r->model_order;
        bool wanted = order->step == step;
        if (!wanted && order->step > step)
            fail_msg("worker %u: order %d instead of %d", w->id, order->step, step);
        Moe__V1__ModelReport report = MOE__V1__MODEL_REPORT__INIT;
        report.model = order->model;
        report.step = order->step;
        report.order = order->order;
        report.epoch = order->epoch;
        report.fingerprint = (char *)(uintptr_t) "feed";
        report.family = (char *)(uintptr_t) "mixtral";
        report.free_bytes = free_bytes;
        fill_layers(info, memory, list);
        report.n_layers = LAYERS;
        report.layers = list;
        if (order->step == MOE__V1__MODEL_STEP__MODEL_STEP_LOAD) {
            assert_int_equal(order->n_layers, LAYERS);
            assert_int_equal(order->layers[1]->slots[7], 2);
            report_digests(w, order->model);
        }
        if (order->step == MOE__V1__MODEL_STEP__MODEL_STEP_ADD)
            assert_int_equal(strlen(order->digest), 64);
        Moe__V1__SessionRequest m = MOE__V1__SESSION_REQUEST__INIT;
        m.body_case = MOE__V1__SESSION_REQUEST__BODY_MODEL_REPORT;
        m.model_report = &report;
        uint8_t bytes[1024];
        send_bytes(w, bytes, moe__v1__session_request__pack(&m, bytes));
        moe__v1__session_response__free_unpacked(r, NULL);
        if (wanted)
            return;
    }
}

static void obey_all(struct worker *w, Moe__V1__ModelStep step)
{
    for (uint32_t i = 0; i < SLOTS; i++)
        obey(&w[i], step, 1000);
}

static const Moe__V1__ModelStep OPEN = MOE__V1__MODEL_STEP__MODEL_STEP_OPEN,
                                LOAD = MOE__V1__MODEL_STEP__MODEL_STEP_LOAD,
                                ADD = MOE__V1__MODEL_STEP__MODEL_STEP_ADD,
                                QUIESCE = MOE__V1__MODEL_STEP__MODEL_STEP_QUIESCE,
                                REMOVE = MOE__V1__MODEL_STEP__MODEL_STEP_REMOVE,
                                CLOSE = MOE__V1__MODEL_STEP__MODEL_STEP_CLOSE;

/* Waits until the group has the default model and, if `name` is not NULL, this one in this state.
 */
static void await_models(const char *name, Moe__V1__ModelState state)
{
    uint8_t bytes[8192];
    struct moe_status st;
    Moe__V1__ListModelsRequest request = MOE__V1__LIST_MODELS_REQUEST__INIT;
    uint64_t until = time_limit();
    for (bool there = false; !there;) {
        assert_true(moe_clock_ns() < until);
        size_t length =
            call_admin("/moe.v1.AdminService/ListModels", &request.base, bytes, sizeof bytes, &st);
        assert_ok(st);
        Moe__V1__ListModelsResponse *r = moe__v1__list_models_response__unpack(NULL, length, bytes);
        assert_non_null(r);
        assert_true(r->models[0]->is_default);
        assert_string_equal(r->models[0]->name, "tiny");
        there = r->n_models == (name != NULL ? 2 : 1);
        if (there && name != NULL) {
            assert_string_equal(r->models[1]->name, name);
            assert_int_equal(r->models[1]->state, state);
            assert_int_equal(r->models[1]->n_layers, LAYERS);
            assert_int_equal(strlen(r->models[1]->digest), 64);
        }
        moe__v1__list_models_response__free_unpacked(r, NULL);
    }
}

static void check_load_answer(const struct waiting *c, Moe__V1__ModelState state)
{
    static const uint64_t resident[SLOTS] = {2 * 310, 2 * 310, 2 * 210};
    Moe__V1__LoadModelResponse *r = moe__v1__load_model_response__unpack(NULL, c->length, c->bytes);
    assert_non_null(r);
    assert_string_equal(r->model->name, c->name);
    assert_int_equal(r->model->state, state);
    assert_int_equal(r->n_slots, SLOTS);
    for (uint32_t s = 0; s < SLOTS; s++) {
        assert_int_equal(r->slots[s]->slot, s);
        assert_int_equal(r->slots[s]->resident_bytes, resident[s]);
        assert_int_equal(r->slots[s]->free_bytes, 1000);
    }
    moe__v1__load_model_response__free_unpacked(r, NULL);
}

static void a_model_comes_and_goes_in_the_running_view(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    start_coordinator(SLOTS, 60000);
    bring_up(w);
    struct waiting dry = {.dry_run = true}, loads = {0}, again = {0}, unload = {0};
    begin_load(&dry, "/models/b", "b");
    obey_all(w, OPEN);
    obey_all(w, CLOSE);
    end_call(&dry, MOE_OK, MOE_REASON_NONE);
    check_load_answer(&dry, MOE__V1__MODEL_STATE__MODEL_STATE_PLANNING);
    await_models(NULL, 0);

    begin_load(&loads, "/models/b", "b");
    obey_all(w, OPEN);
    obey_all(w, LOAD);
    obey_all(w, ADD);
    end_call(&loads, MOE_OK, MOE_REASON_NONE);
    check_load_answer(&loads, MOE__V1__MODEL_STATE__MODEL_STATE_SERVING);
    await_models("b", MOE__V1__MODEL_STATE__MODEL_STATE_SERVING);
    check_metrics("\nmoe_group_models{state=\"serving\"} 1\n");
    check_serving(1); /* the same view */
    begin_load(&again, "/models/b", "b");
    end_call(&again, MOE_ALREADY_EXISTS, MOE_REASON_NAME_INVALID);

    crash_coordinator(); /* the view and the model are in the log */
    for (uint32_t i = 0; i < SLOTS; i++)
        free_stream(&w[i]);
    start_coordinator(SLOTS, 60000);
    for (uint32_t i = 0; i < SLOTS; i++) {
        join(&w[i], i, 100 + i);
        send_heartbeat(&w[i], 1);
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        load(&w[i]);
    obey_all(w, QUIESCE); /* requests are let in again, if they were not */
    obey_all(w, OPEN);
    obey_all(w, LOAD);
    obey_all(w, ADD);
    begin_call(&unload, "/moe.v1.AdminService/UnloadModel", "", "b");
    obey_all(w, QUIESCE);
    obey_all(w, REMOVE);
    obey_all(w, CLOSE);
    end_call(&unload, MOE_OK, MOE_REASON_NONE);
    await_models(NULL, 0);
    shut_down(w);
}

static void a_load_that_fails_anywhere_is_undone_everywhere(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    start_coordinator(SLOTS, 60000);
    bring_up(w);
    static const char *const names[][2] = {
        {"models/b", ""}, {"/models/b\n", "b"}, {"/models/..", ""}, {"/", ""}, {"/b", "a b"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct waiting bad = {0};
        begin_load(&bad, names[i][0], names[i][1]);
        pthread_join(bad.thread, NULL);
        assert_int_equal(bad.st.code, MOE_INVALID_ARGUMENT);
    }
    struct waiting small = {0}, spoilt = {0}, left = {0};
    begin_load(&small, "/models/b", "b");
    obey(&w[0], OPEN, 1000);
    obey(&w[1], OPEN, 1000);
    obey(&w[2], OPEN, 419);
    obey_all(w, CLOSE);
    end_call(&small, MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY);
    assert_non_null(strstr(small.st.text, "slot 2: it needs 420 bytes"));

    begin_load(&spoilt, "/models/b", "b");
    obey_all(w, OPEN);
    obey(&w[0], LOAD, 0);
    obey(&w[1], LOAD, 0);
    w[2].other_common = true;
    obey(&w[2], LOAD, 0);
    w[2].other_common = false;
    obey_all(w, CLOSE);
    end_call(&spoilt, MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH);

    left.limit_ns = moe_clock_ns() + 3 * MOE_NS_PER_S;
    begin_load(&left, "/models/b", "b");
    obey_all(w, OPEN);
    end_call(&left, MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE);
    obey_all(w, CLOSE); /* LOAD comes before it */
    await_models(NULL, 0);
    check_serving(1);
    shut_down(w);
}

int main(void)
{
    seed_random();
#define SERVICE_TEST(f) cmocka_unit_test_setup_teardown(f, make_directory, remove_directory)
    const struct CMUnitTest tests[] = {
        SERVICE_TEST(a_model_comes_and_goes_in_the_running_view),
        SERVICE_TEST(a_load_that_fails_anywhere_is_undone_everywhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
