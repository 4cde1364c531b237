/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the engine about added models, on the CPU backend in a group of one. The added model
 * has the layers of the default one, under other keys. */
#include "base/clock.h"
#include "worker_fixture.h"

static struct worker worker;

enum { ADDED = 7 };

static int open_worker(void **state)
{
    (void)state;
    worker_open(&worker);
    return 0;
}

static int close_worker(void **state)
{
    (void)state;
    worker_close(&worker);
    return 0;
}

static void add_model(uint32_t model)
{
    const struct moe_engine_layers layers = {
        .model = model, .layers = worker.layers, .specs = worker.specs, .count = WORKER_LAYERS};
    assert_ok(moe_engine_add_model(worker.engine, &layers));
}

static struct moe_status unloaded(void)
{
    return moe_error(MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND, "unloaded");
}

/* Request of the added model. */
static void fill(struct request *r, uint32_t model, int layer)
{
    request_fill(r, &worker, layer, 1 + random_below(4), MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    r->work.layer = moe_layer_key(model, r->work.layer);
}

static void check(struct request *r)
{
    request_wait(r);
    assert_ok(r->status);
    request_check(r, &worker);
    request_free(r);
}

static void requests_wait_for_the_ticket_that_adds_their_model(void **state)
{
    (void)state;
    struct request early, late, base;
    fill(&early, ADDED, 0);
    assert_refused(moe_engine_submit(worker.engine, &early.work), MOE_NOT_FOUND,
                   MOE_REASON_LAYER_NOT_FOUND);
    add_model(ADDED);
    const struct moe_engine_layers again = {
        .model = ADDED, .layers = worker.layers, .specs = worker.specs, .count = WORKER_LAYERS};
    assert_refused(moe_engine_add_model(worker.engine, &again), MOE_ALREADY_EXISTS,
                   MOE_REASON_NONE);
    assert_ok(moe_engine_submit(worker.engine, &early.work));
    worker_start_view(&worker);
    fill(&base, 0, 0);
    assert_ok(request_run(&base, &worker));
    assert_int_equal(early.done, 0); /* the view has the default model alone */
    request_free(&base);
    worker_change_model(&worker, ADDED, true);
    check(&early);
    fill(&late, ADDED, 1);
    assert_ok(request_run(&late, &worker));
    check(&late);
}

static void they_wait_over_views(void **state)
{
    (void)state;
    struct request r[2];
    add_model(ADDED);
    worker_start_view(&worker);
    worker_change_model(&worker, ADDED, true);
    worker_stop_view(&worker);
    for (int i = 0; i < 2; i++)
        fill(&r[i], ADDED, i);
    r[1].work.deadline_ns = moe_clock_ns() + 20 * MOE_NS_PER_MS;
    for (int i = 0; i < 2; i++)
        assert_ok(moe_engine_submit(worker.engine, &r[i].work));
    worker_start_view(&worker);
    request_wait(&r[1]);
    assert_int_equal(r[1].status.code, MOE_DEADLINE_EXCEEDED);
    assert_int_equal(r[0].done, 0);
    worker_change_model(&worker, ADDED, true);
    check(&r[0]);
    request_free(&r[1]);
}

/* Those that wait must not fill the queue for other models, nor hold back the unload. */
static void requests_of_a_model_that_a_view_does_not_add_are_refused(void **state)
{
    (void)state;
    struct request waiting, late, base;
    add_model(ADDED);
    fill(&waiting, ADDED, 0);
    assert_ok(moe_engine_submit(worker.engine, &waiting.work));
    worker_start_view(&worker);
    request_wait(&waiting); /* two seconds */
    assert_refused(waiting.status, MOE_UNAVAILABLE, MOE_REASON_MODEL_LOADING);
    fill(&late, ADDED, 0);
    assert_refused(moe_engine_submit(worker.engine, &late.work), MOE_UNAVAILABLE,
                   MOE_REASON_MODEL_LOADING);
    fill(&base, 0, 0);
    assert_ok(request_run(&base, &worker));
    check(&base);
    worker_change_model(&worker, ADDED, true); /* later, it serves all the same */
    assert_ok(moe_engine_submit(worker.engine, &late.work));
    check(&late);
    request_free(&waiting);
}

static void a_model_in_service_is_not_removed(void **state)
{
    (void)state;
    struct request r;
    add_model(ADDED);
    worker_start_view(&worker);
    worker_change_model(&worker, ADDED, true);
    assert_refused(moe_engine_remove_model(worker.engine, ADDED, unloaded()),
                   MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_IN_USE);
    worker_change_model(&worker, ADDED, false);
    fill(&r, ADDED, 0);
    assert_ok(moe_engine_submit(worker.engine, &r.work)); /* the service refuses such */
    assert_ok(moe_engine_remove_model(worker.engine, ADDED, unloaded()));
    request_wait(&r);
    assert_refused(r.status, MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND);
    assert_refused(moe_engine_submit(worker.engine, &r.work), MOE_NOT_FOUND,
                   MOE_REASON_LAYER_NOT_FOUND);
    assert_ok(moe_engine_remove_model(worker.engine, ADDED, unloaded())); /* gone already */
    request_free(&r);
    fill(&r, 0, 0);
    assert_ok(request_run(&r, &worker));
    check(&r);
}

static void layers_wider_than_the_steps_are_refused(void **state)
{
    (void)state;
    struct moe_layer_spec wide = worker.spec[0];
    const struct moe_layer_spec *specs[] = {&wide};
    const struct moe_engine_layers layers = {
        .model = ADDED, .layers = worker.layers, .specs = specs, .count = 1};
    wide.hidden = WORKER_HIDDEN + 8;
    assert_refused(moe_engine_add_model(worker.engine, &layers), MOE_INVALID_ARGUMENT,
                   MOE_REASON_TOO_LARGE);
    wide.hidden = 24;
    wide.router.top_k = 4;
    assert_refused(moe_engine_add_model(worker.engine, &layers), MOE_INVALID_ARGUMENT,
                   MOE_REASON_TOO_LARGE);
    wide.router.top_k = 2;
    assert_ok(moe_engine_add_model(worker.engine, &layers));
}

/* Requests of the default model, sent all the time, never notice. */
static void models_come_and_go_under_load(void **state)
{
    (void)state;
    enum { ROUNDS = 40, EACH = 6 };
    worker_start_view(&worker);
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        struct request base[EACH], added[EACH];
        for (int i = 0; i < EACH; i++) {
            fill(&base[i], 0, (int)random_below(WORKER_LAYERS));
            assert_ok(moe_engine_submit(worker.engine, &base[i].work));
        }
        add_model(round);
        if (random_below(4) == 0) {
            worker_stop_view(&worker);
            worker_start_view(&worker);
        }
        worker_change_model(&worker, round, true);
        for (int i = 0; i < EACH; i++) {
            fill(&added[i], round, (int)random_below(WORKER_LAYERS));
            assert_ok(moe_engine_submit(worker.engine, &added[i].work));
        }
        for (int i = 0; i < EACH; i++) {
            check(&base[i]);
            check(&added[i]);
        }
        if (random_below(4) == 0) {
            worker_stop_view(&worker);
            worker_start_view(&worker);
        } else {
            worker_change_model(&worker, round, false);
        }
        assert_ok(moe_engine_remove_model(worker.engine, round, unloaded()));
    }
    print_message("%d models, %llu views, %llu tickets\n", ROUNDS, (unsigned long long)worker.epoch,
                  (unsigned long long)worker.tickets);
}

#define with_worker(test) cmocka_unit_test_setup_teardown(test, open_worker, close_worker)

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_worker(requests_wait_for_the_ticket_that_adds_their_model),
        with_worker(they_wait_over_views),
        with_worker(requests_of_a_model_that_a_view_does_not_add_are_refused),
        with_worker(a_model_in_service_is_not_removed),
        with_worker(layers_wider_than_the_steps_are_refused),
        with_worker(models_come_and_go_under_load),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
