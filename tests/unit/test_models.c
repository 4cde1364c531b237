/* SPDX-License-Identifier: Apache-2.0 */
/* The table of added models: the steps of an order, on the CPU backend in a group of one, and what
 * requests see meanwhile. The test is the sequencer: each change becomes a ticket at once. */
#include "all_experts.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "engine/row_metrics.h"
#include "model/model.h"
#include "models/loader.h"
#include "models/models.h"
#include "support/check.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NUMBER = 3, BUCKET = 16, REPORTS = 64, EPOCH = 5 };

static struct {
    struct moe_device *device;
    struct moe_model *base;
    struct moe_loader *loader;
    struct moe_metrics *metrics;
    struct moe_engine *engine;
    struct moe_models *models;
    struct moe_session *session;
    uint64_t seq;
    struct moe_mutex lock;
    struct moe_group_model_report reports[REPORTS]; /* pointers are not valid */
    size_t report_count, layer_count, digest_parts;
    struct moe_group_layer_memory layers[8];
    _Atomic uint64_t loaded;
} t = {.lock = MOE_MUTEX_INITIALIZER};

/* ------------------------------------------------------------------------- hooks */

static struct moe_status count_part(void *ctx, const uint8_t *part, size_t length)
{
    size_t *count = ctx;
    assert_non_null(part);
    assert_true(length > 0 && length <= MOE_GROUP_PART_BYTES);
    ++*count;
    return moe_ok();
}

static void on_report(void *ctx, const struct moe_group_model_report *r)
{
    size_t parts = 0;
    (void)ctx;
    if (r->digests != NULL)
        assert_ok(r->digests(r->digests_ctx, count_part, &parts));
    moe_mutex_lock(&t.lock);
    assert_true(t.report_count < REPORTS);
    t.reports[t.report_count++] = *r;
    t.digest_parts += parts;
    t.layer_count = r->layer_count;
    for (size_t i = 0; i < r->layer_count && i < 8; i++)
        t.layers[i] = r->layers[i];
    moe_mutex_unlock(&t.lock);
}

static void on_progress(void *ctx, uint32_t model, uint64_t loaded, uint64_t total)
{
    (void)ctx;
    assert_int_equal(model, NUMBER);
    assert_true(loaded <= total);
    atomic_store(&t.loaded, loaded);
}

static void on_change(void *ctx, uint64_t epoch, uint32_t model, bool serve)
{
    (void)ctx;
    const struct moe_ticket ticket = {.epoch = epoch,
                                      .seq = ++t.seq,
                                      .layer = moe_layer_key(model, 0),
                                      .kind = serve ? MOE_STEP_ADD_MODEL : MOE_STEP_REMOVE_MODEL};
    moe_engine_run(t.engine, &ticket);
}

static void on_model_changed(void *ctx, uint32_t model, bool served, uint64_t epoch)
{
    (void)ctx;
    moe_models_changed(t.models, model, served, epoch);
}

static void on_finished(void *ctx, const struct moe_ticket *ticket, struct moe_status status,
                        uint64_t lost)
{
    (void)ctx;
    (void)ticket;
    (void)lost;
    assert_ok(status);
}

static void on_announce(void *ctx, uint32_t layer, enum moe_step_kind kind, enum moe_dtype dtype,
                        uint32_t tokens)
{
    (void)ctx;
    (void)tokens;
    const struct moe_ticket ticket = {.epoch = EPOCH,
                                      .seq = ++t.seq,
                                      .layer = layer,
                                      .kind = kind,
                                      .dtype = dtype,
                                      .bucket = BUCKET};
    moe_engine_run(t.engine, &ticket);
}

static struct moe_status gather_alone(void *ctx, const void *mine, void *all, size_t bytes)
{
    (void)ctx;
    memcpy(all, mine, bytes);
    return moe_ok();
}

/* ----------------------------------------------------------------------- fixture */

static void start_view(void)
{
    struct moe_session_config config = {
        .slots = 1,
        .live = 1,
        .epoch = EPOCH,
        .max_tokens = BUCKET,
        .max_hidden = 64,
        .max_top_k = 4,
        .max_experts = 16,
        .wait_budget_ms = 2000,
        .allgather = gather_alone,
    };
    assert_ok(moe_backend_cpu.session_join(t.device, &config, &t.session));
    t.seq = 0;
    moe_engine_start_view(t.engine, t.session, EPOCH, 1, BUCKET);
}

static void end_view(void)
{
    moe_engine_stop_view(t.engine);
    moe_backend_cpu.session_leave(t.session);
    t.session = NULL;
}

/* The default model is Mixtral's: 8 experts, 2 per token. */
static int open_with(struct moe_models_widths widths)
{
    struct moe_device_config device = {.threads = 2};
    struct moe_group_assignment all = assign_all_experts(MOE_GOLDEN_MODELS "/mixtral");
    assert_ok(moe_backend_cpu.device_open(&device, &t.device));
    assert_ok(moe_model_open(MOE_GOLDEN_MODELS "/mixtral", &t.base));
    assert_ok(moe_loader_create(&moe_backend_cpu, t.device, t.base, NULL, &t.loader));
    assert_ok(moe_loader_load(t.loader, &all));
    free_assignment(&all);
    assert_ok(moe_metrics_create(&t.metrics));
    const struct moe_engine_config engine = {
        .backend = &moe_backend_cpu,
        .device = t.device,
        .layers = moe_loader_layers(t.loader),
        .specs = moe_loader_specs(t.loader),
        .layer_count = moe_loader_layer_count(t.loader),
        .max_hidden = widths.hidden,
        .max_top_k = widths.top_k,
        .max_tokens_per_step = BUCKET,
        .max_queued_tokens = 4096,
        .announce = on_announce,
        .finished = on_finished,
        .model_changed = on_model_changed,
    };
    assert_ok(moe_engine_create(&engine, &t.engine));
    const struct moe_models_config models = {
        .backend = &moe_backend_cpu,
        .device = t.device,
        .engine = t.engine,
        .default_model = moe_model_name(t.base),
        .default_layers = moe_loader_layer_count(t.loader),
        .widths = widths,
        .metrics = t.metrics,
        .report = on_report,
        .progress = on_progress,
        .change = on_change,
    };
    assert_ok(moe_models_create(&models, &t.models));
    t.report_count = t.digest_parts = 0;
    return 0;
}

static int open_narrow(void **state)
{
    (void)state;
    return open_with((struct moe_models_widths){64, 8, 2});
}

static int open_wide(void **state)
{
    (void)state;
    return open_with((struct moe_models_widths){64, 16, 4});
}

static int close_all(void **state)
{
    (void)state;
    if (t.session != NULL)
        end_view();
    moe_models_stop(t.models);
    moe_engine_destroy(t.engine);
    moe_models_destroy(t.models);
    moe_metrics_destroy(t.metrics);
    moe_loader_destroy(t.loader);
    moe_model_close(t.base);
    moe_backend_cpu.device_close(t.device);
    return 0;
}

/* ------------------------------------------------------------------------- orders */

static uint64_t orders;

static struct moe_group_model_order order_of(enum moe_model_step step)
{
    return (struct moe_group_model_order){.model = NUMBER,
                                          .step = step,
                                          .order = ++orders,
                                          .epoch = EPOCH,
                                          .name = "second",
                                          .directory = MOE_GOLDEN_MODELS "/qwen3_moe",
                                          .digest = "ab"};
}

/* Waits for report number `n`. */
static struct moe_group_model_report report_number(size_t n)
{
    uint64_t limit = moe_clock_ns() + 30 * MOE_NS_PER_S;
    struct timespec interval = {.tv_nsec = 100000};
    for (;;) {
        moe_mutex_lock(&t.lock);
        bool there = t.report_count > n;
        struct moe_group_model_report r = t.reports[n % REPORTS];
        moe_mutex_unlock(&t.lock);
        if (there)
            return r;
        if (moe_clock_ns() > limit)
            fail_msg("no report %zu in half a minute", n);
        nanosleep(&interval, NULL);
    }
}

/* Gives the order and waits for its report. */
static struct moe_status do_order(const struct moe_group_model_order *o)
{
    size_t n = t.report_count;
    moe_models_order(t.models, o);
    struct moe_group_model_report r = report_number(n);
    assert_int_equal(r.model, o->model);
    assert_int_equal(r.step, o->step);
    assert_int_equal(r.order, o->order);
    return r.status;
}

static struct moe_status do_step(enum moe_model_step step)
{
    struct moe_group_model_order o = order_of(step);
    return do_order(&o);
}

static struct moe_status do_load(void)
{
    struct moe_group_model_order o = order_of(MOE_MODEL_LOAD);
    o.assignment = assign_all_experts(o.directory);
    struct moe_status st = do_order(&o);
    free_assignment(&o.assignment);
    return st;
}

static struct moe_status take(const struct moe_added_model **out)
{
    return moe_models_take(t.models, "second", out);
}

static bool has_series(void)
{
    char *text;
    size_t length;
    assert_ok(moe_metrics_render(t.metrics, &text, &length));
    bool has = strstr(text, "model=\"second\"") != NULL;
    free(text);
    return has;
}

static uint64_t used_bytes(void)
{
    struct moe_device_info info;
    moe_backend_cpu.device_info(t.device, &info);
    return info.used_bytes;
}

/* -------------------------------------------------------------------------- tests */

static void a_model_goes_through_all_steps_and_leaves_nothing(void **state)
{
    (void)state;
    const struct moe_added_model *model;
    char names[MOE_ADDED_MODELS_MAX][MOE_MODELS_NAME_BYTES];
    start_view();
    uint64_t before = used_bytes();
    assert_refused(take(&model), MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND);
    assert_ok(do_step(MOE_MODEL_OPEN));
    assert_int_equal(t.layer_count, 2);
    assert_true(t.reports[0].free_bytes > 0);
    for (size_t i = 0; i < 2; i++) { /* gate, up, down of 64 x 48; router of 16 x 64 */
        assert_int_equal(t.layers[i].expert_file_bytes, t.layers[i].expert_resident_bytes);
        assert_true(t.layers[i].expert_file_bytes >= 2 * 3 * 64 * 48);
        assert_true(t.layers[i].common_file_bytes >= 2 * 16 * 64);
    }
    assert_refused(take(&model), MOE_UNAVAILABLE, MOE_REASON_MODEL_LOADING);
    assert_int_equal(used_bytes(), before);
    assert_ok(do_load());
    assert_true(t.digest_parts >= 2 && t.loaded > 0);
    assert_true(used_bytes() > before && has_series());
    assert_refused(take(&model), MOE_UNAVAILABLE, MOE_REASON_MODEL_LOADING);
    assert_ok(do_step(MOE_MODEL_ADD));
    assert_ok(take(&model));
    assert_int_equal(model->number, NUMBER);
    assert_string_equal(model->family, "qwen3_moe");
    assert_string_equal(model->digest, "ab");
    assert_int_equal(model->layer_count, 2);
    assert_int_equal(moe_models_list(t.models, EPOCH, names), 1);
    assert_string_equal(names[0], "second");
    assert_int_equal(moe_models_list(t.models, EPOCH + 1, names), 0);
    moe_models_finish(t.models, model);
    assert_ok(do_step(MOE_MODEL_QUIESCE));
    assert_ok(do_step(MOE_MODEL_REMOVE));
    assert_ok(do_step(MOE_MODEL_CLOSE));
    assert_int_equal(used_bytes(), before);
    assert_false(has_series());
    assert_int_equal(model->layers[1]->hidden, 64); /* until the request is gone */
    moe_models_unref(t.models, model);
    assert_refused(take(&model), MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND);
}

static void orders_may_be_repeated(void **state)
{
    (void)state;
    start_view();
    for (int i = 0; i < 2; i++)
        assert_ok(do_step(MOE_MODEL_OPEN));
    assert_ok(do_load());
    size_t parts = t.digest_parts;
    assert_ok(do_load());
    assert_int_equal(t.digest_parts, 2 * parts);
    for (int i = 0; i < 2; i++)
        assert_ok(do_step(MOE_MODEL_ADD));
    for (int i = 0; i < 2; i++)
        assert_ok(do_step(MOE_MODEL_QUIESCE));
    for (int i = 0; i < 2; i++)
        assert_ok(do_step(MOE_MODEL_REMOVE));
    for (int i = 0; i < 2; i++)
        assert_ok(do_step(MOE_MODEL_CLOSE));
    assert_refused(do_load(), MOE_FAILED_PRECONDITION, MOE_REASON_NONE);
    assert_refused(do_step(MOE_MODEL_ADD), MOE_FAILED_PRECONDITION, MOE_REASON_NONE);
    assert_ok(do_step(MOE_MODEL_QUIESCE)); /* nothing of it is in flight */
    assert_int_equal(t.report_count, 15);
}

static void a_model_that_cannot_be_served_is_refused_before_it_is_loaded(void **state)
{
    (void)state;
    struct moe_group_model_order o = order_of(MOE_MODEL_OPEN);
    struct moe_status st = do_order(&o);
    assert_refused(st, MOE_FAILED_PRECONDITION, MOE_REASON_TOO_LARGE);
    assert_non_null(strstr(st.text, "--max-experts 16"));
    o.directory = MOE_GOLDEN_MODELS "/none";
    assert_int_equal(do_order(&o).code, MOE_NOT_FOUND);
    o.directory = "relative";
    assert_refused(do_order(&o), MOE_INVALID_ARGUMENT, MOE_REASON_NAME_INVALID);
    o.directory = MOE_GOLDEN_MODELS "/mixtral";
    o.name = "a/b";
    assert_refused(do_order(&o), MOE_INVALID_ARGUMENT, MOE_REASON_NAME_INVALID);
    o.name = "mixtral"; /* the default model's */
    assert_refused(do_order(&o), MOE_ALREADY_EXISTS, MOE_REASON_NAME_INVALID);
    o.name = "second";
    assert_ok(do_order(&o));
    o.model++;
    assert_refused(do_order(&o), MOE_ALREADY_EXISTS, MOE_REASON_NAME_INVALID);
}

static void a_model_in_use_is_kept_or_drained(void **state)
{
    (void)state;
    const struct moe_added_model *model, *other, *none;
    start_view();
    assert_ok(do_step(MOE_MODEL_OPEN));
    assert_ok(do_load());
    assert_ok(do_step(MOE_MODEL_ADD));
    assert_ok(take(&model));
    struct moe_group_model_order o = order_of(MOE_MODEL_QUIESCE);
    o.if_idle = true;
    assert_refused(do_order(&o), MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_IN_USE);
    assert_ok(take(&other)); /* it goes on */
    size_t n = t.report_count;
    o = order_of(MOE_MODEL_QUIESCE);
    moe_models_order(t.models, &o);
    assert_refused(take(&none), MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND);
    moe_models_finish(t.models, model);
    assert_int_equal(t.report_count, n);
    moe_models_finish(t.models, other);
    assert_int_equal(report_number(n).step, MOE_MODEL_QUIESCE);
    assert_int_equal(report_number(n).order, o.order);
    o = order_of(MOE_MODEL_QUIESCE);
    o.resume = true;
    assert_ok(do_order(&o));
    moe_models_unref(t.models, model);
    assert_ok(take(&model));
    moe_models_finish(t.models, model);
    moe_models_unref(t.models, model);
    moe_models_unref(t.models, other);
    assert_refused(do_step(MOE_MODEL_CLOSE), MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_IN_USE);
    end_view(); /* no view serves it any longer */
    assert_ok(do_step(MOE_MODEL_CLOSE));
}

/* The coordinator has forgotten a load: it sends no CLOSE, but a list without the model. */
static void a_model_that_the_group_does_not_list_is_closed(void **state)
{
    (void)state;
    const uint64_t before = used_bytes();
    const uint32_t listed[] = {NUMBER + 1, NUMBER};
    const char *const names[] = {"other", "this"};
    const size_t reports = t.report_count + 2; /* of OPEN and LOAD */
    assert_ok(do_step(MOE_MODEL_OPEN));
    assert_ok(do_load());
    assert_true(used_bytes() > before);
    moe_models_keep(t.models, listed, names, 2);
    moe_models_keep(t.models, listed, names, 1);
    for (uint64_t limit = moe_clock_ns() + 30 * MOE_NS_PER_S; used_bytes() != before;) {
        assert_true(moe_clock_ns() < limit);
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    assert_int_equal(t.report_count, reports); /* it was not asked */
    assert_ok(do_step(MOE_MODEL_OPEN));        /* the name is free */
    assert_ok(do_step(MOE_MODEL_CLOSE));
}

/* A ticket may run before this slot's order comes. */
static void the_order_and_the_ticket_come_in_any_sequence(void **state)
{
    (void)state;
    const struct moe_added_model *model;
    start_view();
    assert_ok(do_step(MOE_MODEL_OPEN));
    assert_ok(do_load());
    on_change(NULL, EPOCH, NUMBER, true);
    struct timespec interval = {.tv_nsec = 100000};
    char names[MOE_ADDED_MODELS_MAX][MOE_MODELS_NAME_BYTES];
    for (int i = 0; i < 100; i++) {
        assert_int_equal(moe_models_list(t.models, EPOCH, names), 0); /* no digest yet */
        nanosleep(&interval, NULL);
    }
    assert_ok(do_step(MOE_MODEL_ADD));
    assert_int_equal(moe_models_list(t.models, EPOCH, names), 1);
    assert_ok(take(&model));
    assert_string_equal(model->digest, "ab");
    moe_models_finish(t.models, model);
    moe_models_unref(t.models, model);
    end_view();
    start_view();
    assert_ok(take(&model)); /* requests wait over views */
    moe_models_finish(t.models, model);
    moe_models_unref(t.models, model);
}

static void a_load_is_cancelled_by_close(void **state)
{
    (void)state;
    assert_ok(do_step(MOE_MODEL_OPEN));
    uint64_t before = used_bytes();
    struct moe_group_model_order load = order_of(MOE_MODEL_LOAD), close = order_of(MOE_MODEL_CLOSE);
    load.assignment = assign_all_experts(load.directory);
    size_t n = t.report_count;
    moe_models_order(t.models, &load);
    moe_models_order(t.models, &close);
    assert_int_equal(report_number(n).step, MOE_MODEL_LOAD); /* it may have ended before */
    assert_int_equal(report_number(n + 1).step, MOE_MODEL_CLOSE);
    assert_ok(report_number(n + 1).status);
    assert_int_equal(used_bytes(), before);
    free_assignment(&load.assignment);
    assert_ok(do_step(MOE_MODEL_OPEN));
}

/* A worker that has restarted, and one after a load that failed. */
static void a_model_that_another_slot_may_have_is_loading(void **state)
{
    (void)state;
    const uint32_t listed[] = {NUMBER};
    const char *const names[] = {"second"};
    const struct moe_added_model *none;
    start_view();
    assert_refused(take(&none), MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND);
    moe_models_keep(t.models, listed, names, 1);
    assert_refused(take(&none), MOE_UNAVAILABLE, MOE_REASON_MODEL_LOADING);
    assert_ok(do_step(MOE_MODEL_OPEN));
    struct moe_group_model_order o = order_of(MOE_MODEL_CLOSE);
    o.again = true;
    assert_ok(do_order(&o));
    assert_refused(take(&none), MOE_UNAVAILABLE, MOE_REASON_MODEL_LOADING);
    assert_ok(do_step(MOE_MODEL_CLOSE)); /* unloaded */
    assert_refused(take(&none), MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND);
}

static void errors_repeat_no_text_that_can_be_no_name(void **state)
{
    (void)state;
    const struct moe_added_model *none;
    const char *const names[] = {"\xff\xfe", "../etc", "\xe2\x82\xac", "a b"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct moe_status st = moe_models_take(t.models, names[i], &none);
        assert_refused(st, MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND);
        assert_null(strstr(st.text, names[i]));
    }
    struct moe_status st = moe_models_take(t.models, "third", &none);
    assert_non_null(strstr(st.text, "third"));
}

#define wide(test) cmocka_unit_test_setup_teardown(test, open_wide, close_all)

int main(void)
{
    const struct CMUnitTest tests[] = {
        wide(a_model_goes_through_all_steps_and_leaves_nothing),
        wide(orders_may_be_repeated),
        wide(a_model_that_the_group_does_not_list_is_closed),
        cmocka_unit_test_setup_teardown(
            a_model_that_cannot_be_served_is_refused_before_it_is_loaded, open_narrow, close_all),
        wide(a_model_in_use_is_kept_or_drained),
        wide(the_order_and_the_ticket_come_in_any_sequence),
        wide(a_load_is_cancelled_by_close),
        wide(a_model_that_another_slot_may_have_is_loading),
        wide(errors_repeat_no_text_that_can_be_no_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
