/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the compute pool and of device memory. */
#include "kernels_fixture.h"

#include <pthread.h>
#include <stdatomic.h>

enum { ITEMS = 1000 };

struct tally {
    struct moe_device *device;
    atomic_uint seen[ITEMS];
};

static void count_item(void *ctx, uint32_t item)
{
    struct tally *tally = ctx;
    atomic_fetch_add_explicit(&tally->seen[item], 1, memory_order_relaxed);
}

static void every_item_of_every_job_runs_exactly_once(void **state)
{
    (void)state;
    struct tally tally = {.device = open_device(NULL, 4)};
    for (uint32_t job = 0; job < 20000; job++) {
        uint32_t items = random_below(job % 100 == 0 ? ITEMS : 8) + 1;
        memset(tally.seen, 0, sizeof tally.seen);
        moe_cpu_parallel(tally.device, items, count_item, &tally);
        for (uint32_t i = 0; i < items; i++)
            assert_int_equal(atomic_load(&tally.seen[i]), 1);
        assert_true(items == ITEMS || atomic_load(&tally.seen[items]) == 0);
    }
    moe_cpu_parallel(tally.device, 0, count_item, &tally);
    moe_cpu_device_close(tally.device);
}

static void *run_jobs(void *device)
{
    static atomic_uint wrong;
    for (uint32_t job = 0; job < 2000; job++) {
        struct tally tally = {.device = device};
        moe_cpu_parallel(device, 20, count_item, &tally);
        for (uint32_t i = 0; i < 20; i++)
            if (atomic_load(&tally.seen[i]) != 1)
                atomic_fetch_add(&wrong, 1);
    }
    return &wrong;
}

static void callers_on_several_threads_do_not_disturb_each_other(void **state)
{
    (void)state;
    struct moe_device *device = open_device(NULL, 3);
    pthread_t thread[3];
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, run_jobs, device), 0);
    for (int i = 0; i < 3; i++) {
        void *wrong;
        pthread_join(thread[i], &wrong);
        assert_int_equal(atomic_load((atomic_uint *)wrong), 0);
    }
    moe_cpu_device_close(device);
}

static void nested_item(void *ctx, uint32_t item)
{
    struct tally *tally = ctx;
    (void)item;
    moe_cpu_parallel(tally->device, 10, count_item, tally);
}

static void a_job_inside_an_item_ends(void **state)
{
    (void)state;
    struct tally tally = {.device = open_device(NULL, 2)};
    moe_cpu_parallel(tally.device, 7, nested_item, &tally);
    for (uint32_t i = 0; i < 10; i++)
        assert_int_equal(atomic_load(&tally.seen[i]), 7);
    moe_cpu_device_close(tally.device);
}

static uint64_t used_bytes(struct moe_device *device)
{
    struct moe_device_info info;
    moe_cpu_device_info(device, &info);
    return info.used_bytes;
}

static void memory_is_zeroed_aligned_and_accounted_for(void **state)
{
    (void)state;
    struct moe_device *device = open_device(NULL, 1);
    struct moe_device_info info;
    moe_cpu_device_info(device, &info);
    print_message("  %s: %llu bytes\n", info.name, (unsigned long long)info.memory_bytes);
    assert_int_equal(info.used_bytes, 0);

    void *p, *q;
    assert_ok(moe_cpu_mem_alloc(device, MOE_MEM_DEVICE, 5000, &p));
    assert_ok(moe_cpu_mem_alloc(device, MOE_MEM_HOST, 3 << 20, &q));
    assert_int_equal((uintptr_t)p % 4096, 0);
    assert_int_equal(used_bytes(device), 5000 + (3 << 20));
    for (int i = 0; i < 5000; i++)
        assert_int_equal(((char *)p)[i], 0);
    assert_ok(moe_cpu_mem_copy(device, q, "moe", 4));
    assert_string_equal(q, "moe");

    void *none = p;
    assert_ok(moe_cpu_mem_alloc(device, MOE_MEM_DEVICE, 0, &none));
    assert_null(none);
    assert_refused(moe_cpu_mem_alloc(device, MOE_MEM_DEVICE, (size_t)info.memory_bytes, &none),
                   MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY);
    assert_refused(moe_cpu_mem_alloc(device, MOE_MEM_DEVICE, SIZE_MAX, &none),
                   MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY);
    moe_cpu_mem_free(device, MOE_MEM_DEVICE, p, 5000);
    moe_cpu_mem_free(device, MOE_MEM_HOST, q, 3 << 20);
    moe_cpu_mem_free(device, MOE_MEM_HOST, NULL, 77);
    assert_int_equal(used_bytes(device), 0);
    moe_cpu_device_close(device);
}

static void scratch_is_used_again_and_never_shared(void **state)
{
    (void)state;
    struct moe_device *device = open_device(NULL, 1);
    char *taken[10];
    for (uint32_t round = 0; round < 50; round++) {
        uint32_t n = random_between(1, 10);
        size_t bytes[10];
        for (uint32_t i = 0; i < n; i++) {
            void *p;
            bytes[i] = random_between(1, 1 << 16);
            assert_ok(moe_cpu_scratch_take(device, bytes[i], &p));
            taken[i] = p;
            memset(p, (int)i, bytes[i]);
        }
        for (uint32_t i = 0; i < n; i++) {
            assert_int_equal(taken[i][0], i);
            assert_int_equal(taken[i][bytes[i] - 1], i);
            moe_cpu_scratch_give(device, taken[i]);
        }
    }
    print_message("  %llu bytes cached\n", (unsigned long long)used_bytes(device));
    assert_true(used_bytes(device) <= 10 * ((1 << 16) + 4096));
    moe_cpu_scratch_give(device, NULL);
    moe_cpu_device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_item_of_every_job_runs_exactly_once),
        cmocka_unit_test(callers_on_several_threads_do_not_disturb_each_other),
        cmocka_unit_test(a_job_inside_an_item_ends),
        cmocka_unit_test(memory_is_zeroed_aligned_and_accounted_for),
        cmocka_unit_test(scratch_is_used_again_and_never_shared),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
