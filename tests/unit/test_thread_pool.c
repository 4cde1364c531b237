/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/base: a thread pool does each item of each job once, and each batch gets its result.
 * The pool frees all it took. Also: how many cores a process may use. */
#include "base/cores.h"
#include "base/thread.h"
#include "base/thread_pool.h"
#include "support/check.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THREADS = 4, ITEMS = 50 };

/* A job of these tests. */
struct tally_job {
    atomic_uint *seen; /* [items] */
    uint32_t fails_at; /* item that fails; UINT32_MAX: none */
    uint32_t slow_us;  /* each item takes this long */
};

struct tally {
    atomic_uint calls;
    atomic_uint of_thread[THREADS];
};

static struct moe_status count_item(void *ctx, uint32_t thread, const void *job, uint32_t item)
{
    struct tally *tally = ctx;
    const struct tally_job *o = job;
    atomic_fetch_add(&tally->calls, 1);
    atomic_fetch_add(&tally->of_thread[thread], 1);
    if (o->slow_us > 0)
        usleep(o->slow_us);
    if (item == o->fails_at)
        return moe_error(MOE_DATA_LOSS, MOE_REASON_TRUNCATED, "item %u", item);
    atomic_fetch_add(&o->seen[item], 1);
    return moe_ok();
}

static struct moe_thread_pool *start(uint32_t threads, struct tally *tally)
{
    struct moe_thread_pool *pool = NULL;
    assert_ok(moe_thread_pool_create("pool", threads, count_item, tally, &pool));
    return pool;
}

static struct moe_status give(struct moe_thread_pool *pool, struct moe_thread_pool_batch *batch,
                              atomic_uint *seen, uint32_t items, uint32_t fails_at)
{
    struct tally_job job = {seen, fails_at, 0};
    return moe_thread_pool_submit(pool, batch, &job, sizeof job, items);
}

static void every_item_is_done_once(void **state)
{
    (void)state;
    for (uint32_t threads = 1; threads <= THREADS; threads++) {
        struct tally tally = {0};
        struct moe_thread_pool *pool = start(threads, &tally);
        struct moe_thread_pool_batch batch = {0};
        /* More jobs than the queue holds, of 1 to ITEMS items. */
        static atomic_uint seen[300][ITEMS];
        memset(seen, 0, sizeof seen);
        for (uint32_t i = 0; i < 300; i++)
            assert_ok(give(pool, &batch, seen[i], i % ITEMS + 1, UINT32_MAX));
        assert_ok(moe_thread_pool_wait(pool, &batch));
        for (uint32_t i = 0; i < 300; i++)
            for (uint32_t k = 0; k < ITEMS; k++)
                assert_int_equal(atomic_load(&seen[i][k]), k <= i % ITEMS);
        moe_thread_pool_destroy(pool);
    }
}

static void one_job_is_shared_by_the_threads(void **state)
{
    (void)state;
    struct tally tally = {0};
    struct moe_thread_pool *pool = start(THREADS, &tally);
    struct moe_thread_pool_batch batch = {0};
    atomic_uint seen[ITEMS] = {0};
    struct tally_job job = {seen, UINT32_MAX, 2000};
    assert_ok(moe_thread_pool_submit(pool, &batch, &job, sizeof job, ITEMS));
    assert_ok(moe_thread_pool_wait(pool, &batch));
    for (int i = 0; i < THREADS; i++)
        assert_true(atomic_load(&tally.of_thread[i]) > 0);
    moe_thread_pool_destroy(pool);
}

static void a_failure_ends_its_batch_and_no_other(void **state)
{
    (void)state;
    struct tally tally = {0};
    struct moe_thread_pool *pool = start(1, &tally); /* one thread: items come in order */
    struct moe_thread_pool_batch bad = {0}, good = {0};
    atomic_uint seen[3][ITEMS] = {0};
    /* The first job keeps the thread busy, so that the others are queued behind it. */
    struct tally_job slow = {seen[0], UINT32_MAX, 1000};
    assert_ok(moe_thread_pool_submit(pool, &good, &slow, sizeof slow, 20));
    assert_ok(give(pool, &bad, seen[1], ITEMS, 7));
    assert_ok(give(pool, &good, seen[2], ITEMS, UINT32_MAX));
    struct moe_status st = moe_thread_pool_wait(pool, &bad);
    assert_int_equal(st.reason, MOE_REASON_TRUNCATED);
    assert_string_equal(st.text, "item 7");
    assert_ok(moe_thread_pool_wait(pool, &good));
    for (uint32_t i = 0; i < ITEMS; i++) {
        assert_int_equal(atomic_load(&seen[1][i]), i < 7); /* what is left is skipped */
        assert_int_equal(atomic_load(&seen[2][i]), 1);
    }
    /* The batch may be used again. */
    memset(seen, 0, sizeof seen);
    assert_ok(give(pool, &bad, seen[0], ITEMS, UINT32_MAX));
    assert_ok(moe_thread_pool_wait(pool, &bad));
    assert_int_equal(atomic_load(&seen[0][ITEMS - 1]), 1);
    moe_thread_pool_destroy(pool);
}

static void jobs_of_a_failed_batch_are_not_taken(void **state)
{
    (void)state;
    struct tally tally = {0};
    struct moe_thread_pool *pool = start(2, &tally);
    struct moe_thread_pool_batch batch = {0};
    atomic_uint seen[ITEMS] = {0};
    struct moe_status st = moe_ok();
    uint32_t given = 0;
    for (; !moe_failed(&st) && given < 100000; given++)
        st = give(pool, &batch, seen, ITEMS, 0);
    assert_int_equal(st.reason, MOE_REASON_TRUNCATED);
    st = moe_thread_pool_wait(pool, &batch);
    assert_int_equal(st.reason, MOE_REASON_TRUNCATED);
    assert_true(atomic_load(&tally.calls) <= given * ITEMS);
    moe_thread_pool_destroy(pool);
}

struct giver {
    struct moe_thread_pool *pool;
    uint32_t number;
    bool wrong;
};

static void *give_many(void *arg)
{
    struct giver *g = arg;
    for (uint32_t round = 0; round < 200; round++) {
        struct moe_thread_pool_batch batch = {0};
        atomic_uint seen[ITEMS] = {0};
        bool fails = (round + g->number) % 5 == 0;
        struct moe_status st = give(g->pool, &batch, seen, ITEMS, fails ? round % ITEMS : ITEMS);
        struct moe_status end = moe_thread_pool_wait(g->pool, &batch);
        g->wrong |= moe_failed(&st) || moe_failed(&end) != fails;
        for (uint32_t i = 0; i < ITEMS && !fails; i++)
            g->wrong |= atomic_load(&seen[i]) != 1;
    }
    return NULL;
}

static void givers_on_several_threads_do_not_disturb_each_other(void **state)
{
    (void)state;
    struct tally tally = {0};
    struct giver giver[3];
    pthread_t thread[3];
    struct moe_thread_pool *pool = start(THREADS, &tally);
    for (uint32_t i = 0; i < 3; i++) {
        giver[i] = (struct giver){pool, i, false};
        assert_int_equal(pthread_create(&thread[i], NULL, give_many, &giver[i]), 0);
    }
    for (int i = 0; i < 3; i++) {
        assert_int_equal(pthread_join(thread[i], NULL), 0);
        assert_false(giver[i].wrong);
    }
    moe_thread_pool_destroy(pool);
}

static void an_idle_pool_ends(void **state)
{
    (void)state;
    struct tally tally = {0};
    moe_thread_pool_destroy(start(THREADS, &tally));
    moe_thread_pool_destroy(NULL);
    struct moe_thread_pool *pool = start(2, &tally);
    struct moe_thread_pool_batch empty = {0};
    assert_ok(moe_thread_pool_wait(pool, &empty));
    moe_thread_pool_destroy(pool);
    assert_int_equal(atomic_load(&tally.calls), 0);
}

/* ------------------------------------------------------------------- cores */

static void a_quota_counts_as_whole_cores(void **state)
{
    (void)state;
    assert_int_equal(moe_cores_of_quota("max 100000\n"), UINT32_MAX);
    assert_int_equal(moe_cores_of_quota("200000 100000\n"), 2);
    assert_int_equal(moe_cores_of_quota("150000 100000\n"), 2);
    assert_int_equal(moe_cores_of_quota("1000 100000\n"), 1);
    assert_int_equal(moe_cores_of_quota("18446744073709551615 1\n"), UINT32_MAX);
    assert_int_equal(moe_cores_of_quota("0 100000\n"), UINT32_MAX);
    assert_int_equal(moe_cores_of_quota("100000 0\n"), UINT32_MAX);
    assert_int_equal(moe_cores_of_quota(""), UINT32_MAX);
    assert_int_equal(moe_cores_of_quota("many"), UINT32_MAX);
}

static void a_mask_confines(void **state)
{
    (void)state;
    cpu_set_t all, one;
    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    uint32_t cores = moe_usable_cores();
    assert_true(cores >= 1 && cores <= (uint32_t)CPU_COUNT(&all));
    size_t first = 0;
    while (!CPU_ISSET(first, &all))
        first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(moe_usable_cores(), 1);
    assert_int_equal(sched_setaffinity(0, sizeof all, &all), 0);
}

static void a_thread_that_does_not_start_has_a_name_and_a_reason(void **state)
{
    (void)state;
    struct moe_status st = moe_thread_failure("moe-engine", EAGAIN);
    assert_int_equal(st.code, MOE_RESOURCE_EXHAUSTED);
    assert_string_equal(st.text,
                        "cannot start the thread moe-engine: Resource temporarily unavailable");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_item_is_done_once),
        cmocka_unit_test(one_job_is_shared_by_the_threads),
        cmocka_unit_test(a_failure_ends_its_batch_and_no_other),
        cmocka_unit_test(jobs_of_a_failed_batch_are_not_taken),
        cmocka_unit_test(givers_on_several_threads_do_not_disturb_each_other),
        cmocka_unit_test(an_idle_pool_ends),
        cmocka_unit_test(a_thread_that_does_not_start_has_a_name_and_a_reason),
        cmocka_unit_test(a_quota_counts_as_whole_cores),
        cmocka_unit_test(a_mask_confines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
