/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the staging pool. */
#include "service/staging.h"
#include "worker_fixture.h"

static const uint64_t budget = 1 << 20;

static struct moe_device *device;

static struct moe_staging *make(void)
{
    struct moe_device_config config = {.threads = 1};
    struct moe_staging *s;
    assert_ok(moe_backend_cpu.device_open(&config, &device));
    assert_ok(moe_staging_create(&moe_backend_cpu, device, budget, &s));
    return s;
}

static void unmake(struct moe_staging *s)
{
    struct moe_device_info info;
    moe_staging_destroy(s);
    moe_backend_cpu.device_info(device, &info);
    assert_int_equal(info.used_bytes, 0);
    moe_backend_cpu.device_close(device);
}

static void a_released_buffer_is_used_again(void **state)
{
    (void)state;
    struct moe_staging *s = make();
    struct moe_buffer *a, *b;
    assert_ok(moe_staging_take(s, 100000, &a));
    void *memory = moe_buffer_data(a);
    assert_int_equal((uintptr_t)memory % 4096, 0);
    moe_buffer_ref(a);
    moe_buffer_unref(a);
    assert_ok(moe_staging_take(s, 99000, &b)); /* the first one still has a reference */
    assert_ptr_not_equal(moe_buffer_data(b), memory);
    moe_buffer_unref(b);
    moe_buffer_unref(a);
    assert_ok(moe_staging_take(s, 99500, &a));
    assert_ptr_equal(moe_buffer_data(a), memory);
    moe_buffer_unref(a);
    unmake(s);
}

static void the_budget_holds_and_idle_buffers_make_room(void **state)
{
    (void)state;
    struct moe_staging *s = make();
    struct moe_buffer *small[8], *large, *more;
    struct moe_staging_counters c;
    for (int i = 0; i < 8; i++)
        assert_ok(moe_staging_take(s, 100 << 10, &small[i]));
    struct moe_status full = moe_staging_take(s, 400 << 10, &large);
    assert_true(full.retry_after_ms > 0);
    assert_refused(full, MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL);
    for (int i = 0; i < 8; i++)
        moe_buffer_unref(small[i]);
    moe_staging_read_counters(s, &c);
    assert_int_equal(c.in_use_bytes, 0);
    assert_true(c.idle_bytes >= 800 << 10);
    assert_ok(moe_staging_take(s, 1 << 20, &large)); /* frees all idle ones */
    moe_staging_read_counters(s, &c);
    assert_int_equal(c.in_use_bytes, budget);
    assert_int_equal(c.idle_bytes, 0);
    assert_refused(moe_staging_take(s, 1, &more), MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL);
    moe_buffer_unref(large);
    struct moe_status never = moe_staging_take(s, (1 << 20) + 1, &large);
    assert_int_equal(never.retry_after_ms, 0);
    assert_refused(never, MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL);
    assert_refused(moe_staging_take(s, SIZE_MAX, &large), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_QUEUE_FULL);
    unmake(s);
}

static void sizes_are_rounded_up_by_a_quarter_at_most(void **state)
{
    (void)state;
    struct moe_staging *s = make();
    for (int i = 0; i < 2000; i++) {
        size_t bytes = 4096 + random_below((uint32_t)budget - 4096 - (uint32_t)budget / 4);
        struct moe_buffer *b;
        struct moe_staging_counters c;
        assert_ok(moe_staging_take(s, bytes, &b));
        memset(moe_buffer_data(b), 1, bytes);
        moe_staging_read_counters(s, &c);
        assert_true(c.in_use_bytes >= bytes && c.in_use_bytes <= bytes + bytes / 4 + 1);
        assert_true(c.in_use_bytes + c.idle_bytes <= budget);
        moe_buffer_unref(b);
    }
    unmake(s);
}

enum { THREADS = 4, ROUNDS = 3000 };

static void *take_and_release(void *arg)
{
    struct moe_staging *s = arg;
    struct rng random = {.state = (uintptr_t)pthread_self()};
    uintptr_t refused = 0;
    for (int i = 0; i < ROUNDS; i++) {
        struct moe_buffer *b;
        struct moe_status st = moe_staging_take(s, 1 + rng_below(&random, 400000), &b);
        if (moe_failed(&st)) {
            refused++;
            continue;
        }
        uint64_t *word = moe_buffer_data(b); /* no other thread may write here now */
        *word = random.state;
        moe_buffer_ref(b);
        moe_buffer_unref(b);
        MOE_INVARIANT(*word == random.state);
        moe_buffer_unref(b);
    }
    return (void *)refused;
}

static void no_two_threads_share_a_buffer(void **state)
{
    (void)state;
    struct moe_staging *s = make();
    pthread_t threads[THREADS];
    uintptr_t refused = 0;
    struct moe_staging_counters c;
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, take_and_release, s), 0);
    for (int i = 0; i < THREADS; i++) {
        void *n;
        pthread_join(threads[i], &n);
        refused += (uintptr_t)n;
    }
    moe_staging_read_counters(s, &c);
    print_message("%d takes, %llu refused\n", THREADS * ROUNDS, (unsigned long long)refused);
    assert_int_equal(c.in_use_bytes, 0);
    unmake(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_released_buffer_is_used_again),
        cmocka_unit_test(the_budget_holds_and_idle_buffers_make_room),
        cmocka_unit_test(sizes_are_rounded_up_by_a_quarter_at_most),
        cmocka_unit_test(no_two_threads_share_a_buffer),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
