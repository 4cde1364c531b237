/* daemon/base: statuses, sizes, queue, log lines. */
#include "base/clock.h"
#include "base/log.h"
#include "base/queue.h"
#include "base/size.h"

#include <jansson.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* ------------------------------------------------------------------ status */

static struct moe_status fails_at(int step, int *reached)
{
    *reached = step;
    return step < 2 ? moe_ok()
                    : moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND, "layer %d", step);
}

static struct moe_status climb(int *reached)
{
    MOE_TRY(fails_at(1, reached));
    MOE_TRY(fails_at(2, reached));
    MOE_TRY(fails_at(3, reached));
    return moe_ok();
}

static struct moe_status climb_and_clean(int *reached, bool *cleaned)
{
    struct moe_status st;
    MOE_TRY_GOTO(st, fails_at(1, reached), out);
    MOE_TRY_GOTO(st, fails_at(2, reached), out);
    MOE_TRY_GOTO(st, fails_at(3, reached), out);
out:
    *cleaned = true;
    return st;
}

static void a_failure_stops_the_function_and_reaches_the_caller(void **unused)
{
    (void)unused;
    int reached = 0;
    bool cleaned = false;
    struct moe_status st = climb(&reached);
    assert_int_equal(reached, 2);
    assert_int_equal(st.code, MOE_NOT_FOUND);
    assert_int_equal(st.reason, MOE_REASON_LAYER_NOT_FOUND);
    assert_string_equal(st.text, "layer 2");
    assert_true(moe_failed(&st));
    st = climb_and_clean(&reached, &cleaned);
    assert_int_equal(reached, 2);
    assert_true(cleaned);
    assert_int_equal(st.code, MOE_NOT_FOUND);
}

static void context_is_put_before_the_text(void **unused)
{
    (void)unused;
    struct moe_status st = moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 250, "wait");
    st = moe_error_context(st, "layer %d", 3);
    assert_string_equal(st.text, "layer 3: wait");
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    assert_int_equal(st.reason, MOE_REASON_REFORMING);
    assert_int_equal(st.retry_after_ms, 250);
    st = moe_error_context(moe_ok(), "layer %d", 3);
    assert_int_equal(st.code, MOE_OK);
}

static void long_texts_are_cut_not_spilled(void **unused)
{
    (void)unused;
    char text[2 * MOE_STATUS_TEXT];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    struct moe_status st = moe_error(MOE_INTERNAL, MOE_REASON_NONE, "%s", text);
    assert_int_equal(strlen(st.text), MOE_STATUS_TEXT - 1);
    for (int i = 0; i < 3; i++)
        st = moe_error_context(st, "%s", text);
    assert_int_equal(strlen(st.text), MOE_STATUS_TEXT - 1);
}

static void names_go_to_the_wire_and_back(void **unused)
{
    (void)unused;
    for (int r = 0; r < MOE_REASON_COUNT; r++)
        assert_int_equal(moe_reason_from_name(moe_reason_name((enum moe_reason)r)), r);
    assert_int_equal(moe_reason_from_name("OF_A_NEWER_SERVER"), MOE_REASON_NONE);
    assert_string_equal(moe_reason_name((enum moe_reason)999), "?");
    assert_string_equal(moe_code_name(MOE_UNAUTHENTICATED), "UNAUTHENTICATED");
    assert_string_equal(moe_code_name((enum moe_code)17), "?");
    assert_string_equal(moe_code_name((enum moe_code) - 1), "?");
}

/* ------------------------------------------------------------------ size */

static void overflow_is_reported_and_leaves_the_result_alone(void **unused)
{
    (void)unused;
    size_t out = 42;
    assert_false(moe_size_add(SIZE_MAX, 1, &out));
    assert_false(moe_size_mul(SIZE_MAX / 2, 3, &out));
    assert_false(moe_size_mul3(SIZE_MAX / 4, 2, 3, &out));
    assert_false(moe_size_mul3(SIZE_MAX / 4, 8, 0, &out));
    assert_false(moe_size_round_up(SIZE_MAX - 3, 8, &out));
    assert_int_equal(out, 42);
    assert_true(moe_size_mul3(3, 5, 7, &out));
    assert_int_equal(out, 105);
    assert_true(moe_size_round_up(65, 64, &out));
    assert_int_equal(out, 128);
    assert_true(moe_size_round_up(128, 64, &out));
    assert_int_equal(out, 128);
}

static void powers_of_two_are_the_next_ones_up(void **unused)
{
    (void)unused;
    assert_int_equal(moe_pow2_ceil(0), 1);
    for (uint32_t n = 1; n <= 70000; n++) {
        uint32_t p = moe_pow2_ceil(n);
        if (p < n || p / 2 >= n || (p & (p - 1)) != 0)
            fail_msg("%u -> %u", n, p);
    }
    assert_true(moe_pow2_ceil(UINT32_C(0x80000000)) == UINT32_C(0x80000000));
}

/* ------------------------------------------------------------------ queue */

static struct moe_queue *new_queue(size_t capacity)
{
    struct moe_queue *q;
    struct moe_status st = moe_queue_create(capacity, &q);
    assert_int_equal(st.code, MOE_OK);
    return q;
}

static void a_full_queue_refuses_and_a_closed_one_drains(void **unused)
{
    (void)unused;
    int items[4];
    struct moe_queue *q = new_queue(3);
    for (int lap = 0; lap < 5; lap++) { /* round the ring more than once */
        for (int i = 0; i < 3; i++)
            assert_true(moe_queue_push(q, &items[i]));
        assert_false(moe_queue_push(q, &items[3]));
        assert_int_equal(moe_queue_length(q), 3);
        for (int i = 0; i < 3 - (lap == 4); i++)
            assert_ptr_equal(moe_queue_pop(q, 0), &items[i]);
    }
    moe_queue_close(q);
    assert_false(moe_queue_push(q, &items[0]));
    assert_ptr_equal(moe_queue_pop(q, MOE_NEVER), &items[2]);
    assert_null(moe_queue_pop(q, MOE_NEVER)); /* does not wait for what cannot come */
    moe_queue_destroy(q);
    moe_queue_destroy(NULL);
    struct moe_status st = moe_queue_create(0, &q);
    assert_int_not_equal(st.code, MOE_OK);
}

static void a_pop_waits_until_its_deadline(void **unused)
{
    (void)unused;
    struct moe_queue *q = new_queue(1);
    uint64_t deadline = moe_clock_ns() + 20 * MOE_NS_PER_MS;
    assert_null(moe_queue_pop(q, deadline));
    assert_true(moe_clock_ns() >= deadline);
    assert_null(moe_queue_pop(q, 1)); /* long past */
    moe_queue_destroy(q);
}

enum { THREADS = 4, PER_THREAD = 20000 };

struct crowd {
    struct moe_queue *queue;
    unsigned char *items; /* the address of items[i] stands for i */
    atomic_uint *seen;    /* [THREADS * PER_THREAD] */
    atomic_uint next_part;
};

static void *produce(void *arg)
{
    struct crowd *c = arg;
    size_t part = atomic_fetch_add(&c->next_part, 1);
    for (size_t i = 0; i < PER_THREAD; i++)
        while (!moe_queue_push(c->queue, &c->items[part * PER_THREAD + i]))
            sched_yield();
    return NULL;
}

static void *consume(void *arg)
{
    struct crowd *c = arg;
    unsigned char *item;
    while ((item = moe_queue_pop(c->queue, MOE_NEVER)) != NULL)
        atomic_fetch_add(&c->seen[item - c->items], 1);
    return NULL;
}

static void every_item_arrives_once_among_many_threads(void **unused)
{
    (void)unused;
    struct crowd c = {.queue = new_queue(64),
                      .items = calloc(THREADS * PER_THREAD, 1),
                      .seen = calloc(THREADS * PER_THREAD, sizeof *c.seen)};
    assert_non_null(c.items);
    assert_non_null(c.seen);
    pthread_t producers[THREADS], consumers[THREADS];
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_create(&producers[i], NULL, produce, &c), 0);
        assert_int_equal(pthread_create(&consumers[i], NULL, consume, &c), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(producers[i], NULL);
    moe_queue_close(c.queue);
    for (int i = 0; i < THREADS; i++)
        pthread_join(consumers[i], NULL);
    for (size_t i = 0; i < THREADS * PER_THREAD; i++)
        if (atomic_load(&c.seen[i]) != 1)
            fail_msg("item %zu arrived %u times", i, atomic_load(&c.seen[i]));
    moe_queue_destroy(c.queue);
    free(c.items);
    free(c.seen);
}

/* ------------------------------------------------------------------ log */

/* Runs `speak` with stderr in a pipe; what it wrote goes to `text`. */
static void capture(void (*speak)(void), char *text, size_t capacity)
{
    int ends[2], old = dup(STDERR_FILENO);
    assert_true(old >= 0);
    assert_int_equal(pipe(ends), 0);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
    close(ends[1]);
    speak();
    assert_true(dup2(old, STDERR_FILENO) >= 0); /* closes the pipe's last writer */
    close(old);
    size_t length = 0;
    ssize_t n;
    while ((n = read(ends[0], text + length, capacity - 1 - length)) > 0)
        length += (size_t)n;
    text[length] = '\0';
    close(ends[0]);
}

static void speak_at_all_levels(void)
{
    moe_log_error("one %d", 1);
    moe_log_warn("two");
    moe_log_info("three");
    moe_log_debug("four");
}

static void lines_below_the_level_are_not_written(void **unused)
{
    (void)unused;
    char text[4096];
    enum moe_log_level level;
    assert_true(moe_log_level_from_name("warn", &level));
    assert_false(moe_log_level_from_name("loud", &level));
    moe_log_set_component("test 7");
    moe_log_set_level(level);
    capture(speak_at_all_levels, text, sizeof text);
    print_message("%s", text);
    assert_non_null(strstr(text, "Z ERROR test 7: one 1\n"));
    assert_non_null(strstr(text, "Z WARN  test 7: two\n"));
    assert_null(strstr(text, "three"));
    moe_log_set_level(MOE_LOG_DEBUG);
    capture(speak_at_all_levels, text, sizeof text);
    assert_non_null(strstr(text, "Z DEBUG test 7: four\n"));
    moe_log_set_level(MOE_LOG_INFO);
}

static char nasty[3000];

static void speak_nastily(void)
{
    moe_log_info("%s", nasty);
}

static void json_lines_parse_whatever_the_text(void **unused)
{
    (void)unused;
    char text[8192];
    moe_log_set_format(MOE_LOG_JSON);
    for (int kind = 0; kind < 5; kind++) {
        for (size_t i = 0; i + 1 < sizeof nasty; i++)
            nasty[i] = kind == 0   ? '"'
                       : kind == 1 ? '\\'
                       : kind == 2 ? '\n'
                       : kind == 3 ? (char)(1 + i % 127)
                                   : 'x';
        capture(speak_nastily, text, sizeof text);
        json_error_t error;
        json_t *line = json_loads(text, 0, &error);
        if (line == NULL)
            fail_msg("kind %d: %s in %s", kind, error.text, text);
        assert_string_equal(json_string_value(json_object_get(line, "level")), "info");
        assert_string_equal(json_string_value(json_object_get(line, "component")), "test 7");
        size_t length = strlen(text);
        assert_true(length < 1100 && text[length - 1] == '\n');
        assert_ptr_equal(strchr(text, '\n'), text + length - 1); /* one event, one line */
        json_decref(line);
    }
    moe_log_set_format(MOE_LOG_TEXT);
    capture(speak_nastily, text, sizeof text);
    assert_true(text[strlen(text) - 1] == '\n');
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_failure_stops_the_function_and_reaches_the_caller),
        cmocka_unit_test(context_is_put_before_the_text),
        cmocka_unit_test(long_texts_are_cut_not_spilled),
        cmocka_unit_test(names_go_to_the_wire_and_back),
        cmocka_unit_test(overflow_is_reported_and_leaves_the_result_alone),
        cmocka_unit_test(powers_of_two_are_the_next_ones_up),
        cmocka_unit_test(a_full_queue_refuses_and_a_closed_one_drains),
        cmocka_unit_test(a_pop_waits_until_its_deadline),
        cmocka_unit_test(every_item_arrives_once_among_many_threads),
        cmocka_unit_test(lines_below_the_level_are_not_written),
        cmocka_unit_test(json_lines_parse_whatever_the_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
