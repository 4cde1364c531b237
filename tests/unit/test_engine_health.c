/* SPDX-License-Identifier: Apache-2.0 */
/* What an engine shows of itself. The judge has the clock of the test; the engine has its own, and
 * beats every few milliseconds. */
#include "base/clock.h"
#include "worker_fixture.h"

#include <sched.h>
#include <string.h>

#define LIMIT_NS (2500 * MOE_NS_PER_MS)
#define LOOK_NS  (MOE_PROGRESS_LOOK_MS * MOE_NS_PER_MS)

static struct moe_progress *progress;
static struct worker worker;
static uint64_t now_ns;
static struct moe_health health;

static int open_worker(void **state)
{
    (void)state;
    const struct moe_progress_config config = {.step_ns = 5 * MOE_NS_PER_MS, .limit_ns = LIMIT_NS};
    now_ns = MOE_NS_PER_S;
    assert_ok(moe_progress_create(&config, &progress));
    worker_open_watched(&worker, progress);
    return 0;
}

static int close_worker(void **state)
{
    (void)state;
    worker_close(&worker);
    moe_progress_destroy(progress);
    return 0;
}

/* The reason of a loop; NULL: it is well. */
static const char *code_of(const char *loop)
{
    for (size_t i = 0; i < health.count; i++)
        if (strcmp(health.lines[i].name, loop) == 0)
            return health.lines[i].code;
    fail_msg("there is no loop %s", loop);
    return NULL;
}

/* The judge's time goes on, and the engine has a chance to move. */
static void look(void)
{
    now_ns += LOOK_NS;
    moe_progress_judge(progress, now_ns, &health);
    (void)sched_yield();
}

static void await(const char *loop, const char *code)
{
    const uint64_t end = moe_clock_ns() + 60 * MOE_NS_PER_S;
    const char *seen;
    do {
        look();
        seen = code_of(loop);
    } while (moe_clock_ns() < end &&
             (code == NULL ? seen != NULL : seen == NULL || strcmp(seen, code) != 0));
    if (code == NULL)
        assert_null(seen);
    else
        assert_string_equal(seen, code);
}

static void await_life(bool alive)
{
    const uint64_t end = moe_clock_ns() + 60 * MOE_NS_PER_S;
    do
        look();
    while (health.alive != alive && moe_clock_ns() < end);
    assert_int_equal(health.alive, alive);
}

static void await_beats(uint64_t more)
{
    const uint64_t from = worker.beats, end = moe_clock_ns() + 60 * MOE_NS_PER_S;
    while (worker.beats < from + more && moe_clock_ns() < end)
        (void)sched_yield();
    assert_true(worker.beats >= from + more);
}

static void an_idle_view_runs_steps_without_tokens_that_count_for_no_client(void **state)
{
    (void)state;
    struct request r;
    struct moe_engine_counters counters;
    worker_start_view(&worker);
    for (int i = 0; i < 5; i++) {
        await_beats(3);
        request_fill(&r, &worker, i % WORKER_LAYERS, 5, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
        assert_ok(request_run(&r, &worker));
        request_check(&r, &worker);
        assert_int_equal(r.work.steps, 1);
        request_free(&r);
    }
    moe_engine_read_counters(worker.engine, &counters);
    assert_int_equal(counters.steps, 5);
    assert_true(worker.tickets > 5);
    await("engine", NULL);
    await("steps", NULL);
}

static void an_engine_without_a_view_turns_and_does_not_beat(void **state)
{
    (void)state;
    for (int views = 0; views < 2; views++) {
        await("engine", NULL);
        await("steps", NULL);
        assert_null(code_of("device"));
        worker_start_view(&worker);
        await_beats(1);
        worker_stop_view(&worker);
        uint64_t beats = worker.beats;
        for (int i = 0; i < 1000; i++)
            look();
        assert_int_equal(worker.beats, beats);
    }
}

/* The thread waits for a lock that is not released: a deadlock. */
static void a_stopped_engine_is_found_and_named_alone(void **state)
{
    (void)state;
    worker_start_view(&worker);
    await("engine", NULL);
    moe_mutex_lock(&worker.lock);
    await_life(false);
    assert_string_equal(code_of("engine"), "ENGINE_STUCK");
    assert_null(code_of("device"));
    assert_null(code_of("steps"));
    moe_mutex_unlock(&worker.lock);
    await("engine", NULL);
    await("steps", NULL);
    await_life(true);
}

/* No ticket comes: the sequencer has stopped, on another slot. The engine is well. */
static void a_group_without_steps_is_not_ready_and_alive(void **state)
{
    (void)state;
    worker_start_view(&worker);
    await_beats(2);
    moe_mutex_lock(&worker.lock);
    moe_sequencer_allow(worker.sequencer, false, false);
    moe_mutex_unlock(&worker.lock);
    await("steps", "NO_STEPS");
    for (int i = 0; i < 50; i++) { /* with time for the engine to turn between the looks */
        await_beats(1);
        look();
    }
    assert_string_equal(code_of("steps"), "NO_STEPS");
    assert_null(code_of("engine"));
    assert_true(health.alive);
    assert_false(health.ready);
    moe_mutex_lock(&worker.lock);
    moe_sequencer_allow(worker.sequencer, true, true);
    moe_mutex_unlock(&worker.lock);
    await("steps", NULL);
}

#define with_worker(test) cmocka_unit_test_setup_teardown(test, open_worker, close_worker)

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_worker(an_idle_view_runs_steps_without_tokens_that_count_for_no_client),
        with_worker(an_engine_without_a_view_turns_and_does_not_beat),
        with_worker(a_stopped_engine_is_found_and_named_alone),
        with_worker(a_group_without_steps_is_not_ready_and_alive),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
