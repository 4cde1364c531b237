/* SPDX-License-Identifier: Apache-2.0 */
/* The judge of loops, under a clock of the test: no result depends on a measured time. */
#include "daemon/progress.h"

#include "base/clock.h"
#include "support/check.h"

#include <pthread.h>
#include <sched.h>
#include <string.h>

#define STEP_NS  (500 * MOE_NS_PER_MS)
#define LIMIT_NS (2500 * MOE_NS_PER_MS)
#define LOOK_NS  (MOE_PROGRESS_LOOK_MS * MOE_NS_PER_MS)

static struct moe_progress *p;
static uint64_t now_ns;
static struct moe_health v;

static int create(void **state)
{
    (void)state;
    now_ns = MOE_NS_PER_S;
    const struct moe_progress_config config = {.step_ns = STEP_NS, .limit_ns = LIMIT_NS};
    assert_ok(moe_progress_create(&config, &p));
    return 0;
}

static int destroy(void **state)
{
    (void)state;
    moe_progress_destroy(p);
    return 0;
}

/* Time passes, with looks as the watch makes them; nothing else happens. */
static void pass(uint64_t ns)
{
    for (uint64_t end = now_ns + ns; now_ns < end; now_ns += LOOK_NS)
        moe_progress_judge(p, now_ns, &v);
    moe_progress_judge(p, now_ns, &v);
}

/* What counts against it, with the codes in a row: "A B". */
static const char *codes(void)
{
    static char text[256];
    text[0] = '\0';
    for (size_t i = 0; i < v.count; i++)
        if (v.lines[i].code != NULL) {
            strcat(text, text[0] != '\0' ? " " : "");
            strcat(text, v.lines[i].code);
        }
    return text;
}

static void expect(bool alive, bool ready, const char *reasons)
{
    assert_int_equal(v.alive, alive);
    assert_int_equal(v.ready, ready);
    assert_string_equal(codes(), reasons);
}

static const struct moe_loop_config engine_config = {
    .name = "engine", .code = "ENGINE_STUCK", .always = true};
static const struct moe_loop_place step = {.what = "a step"};

static void a_loop_that_turns_is_well(void **unused)
{
    (void)unused;
    struct moe_loop *l = moe_progress_add(p, &engine_config);
    for (int i = 0; i < 100; i++) {
        pass(STEP_NS);
        expect(true, true, "");
        moe_loop_turn(l);
    }
}

static void a_stopped_loop_costs_the_readiness_first_and_then_the_life(void **unused)
{
    (void)unused;
    struct moe_loop *l = moe_progress_add(p, &engine_config);
    moe_loop_turn(l);
    pass(LIMIT_NS);
    expect(true, true, "");
    pass(LOOK_NS);
    expect(true, false, "ENGINE_STUCK");
    assert_non_null(strstr(v.lines[0].text, "no progress for 2.5 s"));
    pass((MOE_PROGRESS_DEAD - 1) * LIMIT_NS);
    expect(false, false, "ENGINE_STUCK");
    moe_loop_turn(l);
    pass(LOOK_NS);
    expect(true, true, "");
}

static void an_idle_loop_is_judged_while_it_works_alone(void **unused)
{
    (void)unused;
    const struct moe_loop_config config = {.name = "device", .code = "DEVICE_STUCK"};
    struct moe_loop *l = moe_progress_add(p, &config);
    pass(100 * LIMIT_NS);
    expect(true, true, "");
    moe_loop_enter(l, &step);
    pass(LIMIT_NS - LOOK_NS);
    expect(true, true, "");
    pass(3 * LOOK_NS);
    expect(true, false, "DEVICE_STUCK");
    moe_loop_leave(l);
    pass(100 * LIMIT_NS);
    expect(true, true, "");
}

static uint64_t read_bytes(const void *ctx)
{
    return *(const uint64_t *)ctx;
}

/* A long step, a load, a Save. */
static void slices_and_bytes_are_progress(void **unused)
{
    (void)unused;
    uint64_t bytes = 0;
    struct moe_loop_config config = engine_config;
    config.more = read_bytes;
    config.ctx = &bytes;
    moe_loop_enter(moe_progress_add(p, &config), &step);
    for (int i = 0; i < 100; i++, bytes += 1000) {
        pass(LIMIT_NS - LOOK_NS);
        expect(true, true, "");
    }
    pass(LIMIT_NS + LOOK_NS);
    expect(true, false, "ENGINE_STUCK");
}

static void a_disk_never_costs_the_life(void **unused)
{
    (void)unused;
    static const struct moe_loop_place disk = {
        .what = "a write", .code = "DISK_SLOW", .outside = true};
    struct moe_loop *l = moe_progress_add(p, &engine_config);
    moe_loop_enter(l, &disk);
    pass(1000 * LIMIT_NS);
    expect(true, false, "DISK_SLOW");
    moe_loop_leave(l);
    pass(LOOK_NS);
    expect(true, true, "");
}

static void a_loop_of_others_costs_the_readiness_alone(void **unused)
{
    (void)unused;
    const struct moe_loop_config config = {
        .name = "steps", .code = "NO_STEPS", .readies_only = true};
    moe_loop_enter(moe_progress_add(p, &config), &step);
    pass(1000 * LIMIT_NS);
    expect(true, false, "NO_STEPS");
}

/* The engine collects the steps of the device: if it is stopped, the device is not to blame. */
static void the_cause_is_named_and_not_its_victim(void **unused)
{
    (void)unused;
    struct moe_loop *engine = moe_progress_add(p, &engine_config);
    const struct moe_loop_config config = {
        .name = "device", .code = "DEVICE_STUCK", .mover = engine};
    struct moe_loop *device = moe_progress_add(p, &config);
    const struct moe_loop_config steps = {.name = "steps", .code = "NO_STEPS", .mover = device};
    moe_loop_enter(device, &step);
    moe_loop_enter(moe_progress_add(p, &steps), &step);
    pass(2 * LIMIT_NS);
    expect(true, false, "ENGINE_STUCK");
    for (int i = 0; i < 8; i++, moe_loop_turn(engine))
        pass(STEP_NS);
    expect(true, false, "DEVICE_STUCK");
}

static void a_pause_of_the_whole_process_blames_no_loop(void **unused)
{
    (void)unused;
    struct moe_loop *l = moe_progress_add(p, &engine_config);
    moe_loop_turn(l);
    pass(STEP_NS);
    for (int i = 0; i < 5; i++) {
        now_ns += 1000 * LIMIT_NS; /* SIGSTOP, SIGCONT */
        moe_progress_judge(p, now_ns, &v);
        expect(true, true, "");
    }
    pass(LIMIT_NS);
    expect(true, false, "ENGINE_STUCK");
}

static void a_clock_that_stands_or_a_second_asker_changes_nothing(void **unused)
{
    (void)unused;
    struct moe_loop *l = moe_progress_add(p, &engine_config);
    moe_loop_turn(l);
    for (int i = 0; i < 1000; i++)
        moe_progress_judge(p, now_ns, &v);
    expect(true, true, "");
    moe_progress_judge(p, now_ns - STEP_NS, &v);
    pass(LIMIT_NS);
    expect(true, true, "");
}

static void add_reasons(void *ctx, struct moe_health *to)
{
    (void)ctx;
    moe_health_add(to, "view", "LOADING", false, "%d of %d bytes", 3, 10);
    moe_health_add(to, "lease", NULL, false, "held");
}

static void probes_print_reasons(void **unused)
{
    (void)unused;
    char text[512];
    (void)moe_progress_add(p, &engine_config);
    moe_progress_set_conditions(p, add_reasons, NULL);
    pass(LOOK_NS);
    expect(true, false, "LOADING");
    moe_health_print(&v, true, true, text, sizeof text);
    assert_string_equal(text, "[+] engine: turns\n[-] view LOADING: 3 of 10 bytes\n"
                              "[+] lease: held\nnot ready\n");
    moe_health_print(&v, true, false, text, sizeof text);
    assert_string_equal(text, "[-] view LOADING: 3 of 10 bytes\nnot ready\n");
    moe_health_print(&v, false, false, text, sizeof text);
    assert_string_equal(text, "ok\n");
    moe_health_print(&v, false, true, text, sizeof text);
    assert_string_equal(text, "[+] engine: turns\n[+] view LOADING: 3 of 10 bytes\n"
                              "[+] lease: held\nok\n");
    for (size_t size = 0; size < 40; size++) { /* cut, and never beyond the end */
        memset(text, 'x', sizeof text);
        moe_health_print(&v, true, true, text, size);
        assert_int_equal(text[size], 'x');
        assert_true(size == 0 || strlen(text) < size);
    }
}

static void too_many_reasons_count_and_are_not_shown(void **unused)
{
    (void)unused;
    v = (struct moe_health){.alive = true, .ready = true};
    for (int i = 0; i < MOE_PROGRESS_LINES; i++)
        moe_health_add(&v, "fine", NULL, false, "line %d", i);
    moe_health_add(&v, "late", "LATE", true, "beyond");
    assert_int_equal(v.count, MOE_PROGRESS_LINES);
    assert_false(v.alive);
    assert_false(v.ready);
}

static void a_full_table_gives_no_loop_and_no_crash(void **unused)
{
    (void)unused;
    for (int i = 0; i < MOE_PROGRESS_LOOPS; i++)
        assert_non_null(moe_progress_add(p, &engine_config));
    struct moe_loop *none = moe_progress_add(p, &engine_config);
    assert_null(none);
    moe_loop_turn(none);
    moe_loop_enter(none, &step);
    moe_loop_leave(none);
    assert_null(moe_progress_add(NULL, &engine_config));
    assert_int_equal(moe_progress_step_ns(NULL), 0);
    assert_true(moe_progress_is_alive(NULL));
}

static void a_daemon_that_ends_asks_its_parts_nothing(void **unused)
{
    (void)unused;
    struct moe_loop_config config = engine_config;
    config.more = read_bytes; /* of NULL: a call would crash */
    (void)moe_progress_add(p, &config);
    moe_progress_close(p);
    pass(1000 * LIMIT_NS);
    expect(true, false, "STOPPING");
}

/* ------------------------------------------------------------------------- the watch */

static atomic_int changes; /* calls of `changed` */
static atomic_bool was_ready;
static atomic_bool is_well;

static void add_well(void *ctx, struct moe_health *to)
{
    (void)ctx;
    moe_health_add(to, "view", atomic_load(&is_well) ? NULL : "NO_VIEW", false, "x");
}

static void changed(void *ctx, const struct moe_health *now)
{
    assert_ptr_equal(ctx, p);
    atomic_store(&was_ready, now->ready);
    atomic_fetch_add(&changes, 1);
}

static void await_changes(int count)
{
    while (atomic_load(&changes) < count)
        (void)sched_yield();
}

static void the_watch_tells_the_first_answer_and_each_change(void **unused)
{
    (void)unused;
    moe_progress_set_conditions(p, add_well, NULL);
    assert_ok(moe_progress_watch(p, changed, p));
    await_changes(1);
    assert_false(atomic_load(&was_ready));
    atomic_store(&is_well, true);
    await_changes(2);
    assert_true(atomic_load(&was_ready));
    moe_progress_close(p);
    assert_int_equal(atomic_load(&changes), 2);
    moe_progress_close(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define STORY(name) cmocka_unit_test_setup_teardown(name, create, destroy)
        STORY(a_loop_that_turns_is_well),
        STORY(a_stopped_loop_costs_the_readiness_first_and_then_the_life),
        STORY(an_idle_loop_is_judged_while_it_works_alone),
        STORY(slices_and_bytes_are_progress),
        STORY(a_disk_never_costs_the_life),
        STORY(a_loop_of_others_costs_the_readiness_alone),
        STORY(the_cause_is_named_and_not_its_victim),
        STORY(a_pause_of_the_whole_process_blames_no_loop),
        STORY(a_clock_that_stands_or_a_second_asker_changes_nothing),
        STORY(probes_print_reasons),
        STORY(too_many_reasons_count_and_are_not_shown),
        STORY(a_full_table_gives_no_loop_and_no_crash),
        STORY(a_daemon_that_ends_asks_its_parts_nothing),
        STORY(the_watch_tells_the_first_answer_and_each_change),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
