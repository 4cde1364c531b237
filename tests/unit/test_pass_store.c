/* SPDX-License-Identifier: Apache-2.0 */
/* Retained passes and cached answers: bytes, time, and the order of removal. */
#include "activations/pass_store.h"
#include "support/check.h"

#include <stdlib.h>

static int allocations;
static size_t allocated;

static struct moe_status plain_alloc(struct moe_device *d, enum moe_mem kind, size_t bytes,
                                     void **out)
{
    (void)d;
    (void)kind;
    allocations++;
    allocated += bytes;
    *out = calloc(1, bytes);
    return moe_ok();
}

static void plain_free(struct moe_device *d, enum moe_mem kind, void *p, size_t bytes)
{
    (void)d;
    (void)kind;
    allocated -= bytes;
    free(p);
}

static const struct moe_backend plain = {.mem_alloc = plain_alloc, .mem_free = plain_free};

static struct moe_pass_record *retained_as(struct moe_pass_store *s, uint64_t id)
{
    struct moe_pass_record *r;
    assert_ok(moe_pass_store_reserve(s, 20000, 0, &r));
    moe_pass_store_put(s, r, "a", id, 0);
    r = moe_pass_store_get(s, "a", id, 0);
    assert_non_null(r);
    return r;
}

/* 64 KiB take three of them. */
static void only_drops_that_free_memory_make_room(void **state)
{
    (void)state;
    struct moe_pass_store *s;
    struct moe_pass_record *used, *reserved;
    assert_ok(moe_pass_store_create(&plain, NULL, 64 << 10, 100, &s));
    used = retained_as(s, 1); /* the oldest, and in use */
    moe_pass_record_unref(retained_as(s, 2));
    moe_pass_record_unref(retained_as(s, 3));
    assert_ok(moe_pass_store_reserve(s, 20000, 0, &reserved));
    moe_pass_record_unref(used);
    used = moe_pass_store_get(s, "a", 1, 0);
    assert_non_null(used);
    assert_null(moe_pass_store_get(s, "a", 2, 0));
    /* Even without 3 there would be no room. */
    struct moe_pass_record *r;
    assert_refused(moe_pass_store_reserve(s, 40000, 0, &r), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_QUEUE_FULL);
    r = moe_pass_store_get(s, "a", 3, 0);
    assert_non_null(r);
    moe_pass_record_unref(r);
    moe_pass_record_unref(reserved);
    moe_pass_record_unref(used);
    moe_pass_store_destroy(s);
}

static void retained_passes_stay_within_bytes_and_time(void **state)
{
    (void)state;
    struct moe_pass_store *s;
    struct moe_pass_record *r, *used;
    assert_ok(moe_pass_store_create(&plain, NULL, 64 << 10, 100, &s));
    assert_refused(moe_pass_store_reserve(s, 65 << 10, 0, &r), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_QUEUE_FULL);
    assert_refused(moe_pass_store_reserve(s, 0, 0, &r), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_QUEUE_FULL);
    for (uint64_t id = 1; id <= 100; id++) {
        assert_ok(moe_pass_store_reserve(s, 10000, id, &r));
        ((uint8_t *)r->data)[9999] = (uint8_t)id;
        moe_pass_store_put(s, r, "a", id, id);
        assert_true(moe_pass_store_bytes(s) <= 64 << 10);
    }
    assert_null(moe_pass_store_get(s, "a", 1, 100)); /* removed for a newer one */
    assert_null(moe_pass_store_get(s, "b", 100, 100));
    used = moe_pass_store_get(s, "a", 100, 100);
    assert_non_null(used);
    assert_int_equal(((uint8_t *)used->data)[9999], 100);
    assert_null(moe_pass_store_get(s, "a", 100, 200)); /* too old */
    assert_true(moe_pass_store_bytes(s) >= 10000);     /* but our reference is valid */
    assert_refused(moe_pass_store_reserve(s, 60000, 200, &r), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_QUEUE_FULL);
    moe_pass_record_unref(used);
    assert_int_equal(moe_pass_store_bytes(s), 0);
    assert_ok(moe_pass_store_reserve(s, 60000, 200, &r));
    moe_pass_store_put(s, r, "a", 1, 200);
    moe_pass_store_drop(s, "a", 1);
    assert_int_equal(moe_pass_store_bytes(s), 0);
    for (uint64_t id = 1; id <= 3; id++) { /* the same name again replaces the first */
        assert_ok(moe_pass_store_reserve(s, 10, 200, &r));
        moe_pass_store_put(s, r, "a", 7, 200);
    }
    r = moe_pass_store_get(s, "a", 7, 200);
    assert_non_null(r);
    moe_pass_record_unref(r);
    moe_pass_store_drop(s, "a", 7);
    assert_null(moe_pass_store_get(s, "a", 7, 200));
    moe_pass_store_destroy(s);
}

static void take_and_drop(struct moe_pass_store *s, size_t bytes, uint64_t now)
{
    struct moe_pass_record *r;
    assert_ok(moe_pass_store_reserve(s, bytes, now, &r));
    moe_pass_store_put(s, r, "a", 1, now);
    moe_pass_store_drop(s, "a", 1);
    assert_true(allocated <= 64 << 10);
}

/* Passes of one size, repeatedly: allocating and pinning memory would cost more than a pass. */
static void memory_of_dropped_records_serves_the_next_of_its_size(void **state)
{
    (void)state;
    struct moe_pass_store *s;
    allocated = 0;
    assert_ok(moe_pass_store_create(&plain, NULL, 64 << 10, 100, &s));
    allocations = 0;
    for (uint64_t i = 0; i < 50; i++)
        take_and_drop(s, 20000, i);
    assert_int_equal(allocations, 1);
    assert_int_equal(moe_pass_store_bytes(s), 0);
    take_and_drop(s, 30000, 50); /* another size, at the same time */
    take_and_drop(s, 20000, 51);
    assert_int_equal(allocations, 2);
    assert_int_equal(allocated, 50000);
    take_and_drop(s, 40000, 52); /* the memory idle for longest makes room */
    assert_int_equal(allocations, 3);
    assert_int_equal(allocated, 60000);
    take_and_drop(s, 20000, 53);
    assert_int_equal(allocations, 3);
    assert_null(moe_pass_store_get(s, "b", 1, 152)); /* idle for too long: the larger one */
    assert_int_equal(allocated, 20000);
    assert_null(moe_pass_store_get(s, "b", 1, 153));
    assert_int_equal(allocated, 0);
    moe_pass_store_destroy(s);
}

/* Without calls for passes, calls that only pass the time free all memory, a record at a time. */
static void idle_memory_expires(void **state)
{
    (void)state;
    struct moe_pass_store *s;
    allocated = 0;
    assert_ok(moe_pass_store_create(&plain, NULL, 64 << 10, 100, &s));
    assert_int_equal(moe_pass_store_next_expiry(s, 5), 105);
    for (uint64_t id = 1; id <= 2; id++) {
        struct moe_pass_record *r;
        assert_ok(moe_pass_store_reserve(s, 20000, 10 * id, &r));
        moe_pass_store_put(s, r, "a", id, 10 * id);
    }
    assert_int_equal(moe_pass_store_next_expiry(s, 20), 110);
    moe_pass_store_expire(s, 110);
    assert_int_equal(moe_pass_store_next_expiry(s, 110), 120);
    moe_pass_store_expire(s, 120);
    assert_int_equal(moe_pass_store_bytes(s), 0);
    assert_true(moe_pass_store_idle_bytes(s) >= 40000);
    assert_int_equal(moe_pass_store_next_expiry(s, 120), 210);
    moe_pass_store_expire(s, 300);
    assert_int_equal(allocated, 20000);
    assert_true(moe_pass_store_next_expiry(s, 300) <= 300);
    moe_pass_store_expire(s, 300);
    assert_int_equal(allocated, 0);
    assert_int_equal(moe_pass_store_idle_bytes(s), 0);
    assert_int_equal(moe_pass_store_next_expiry(s, 300), 400);
    moe_pass_store_destroy(s);
}

static void a_clear_leaves_only_referenced_records(void **state)
{
    (void)state;
    struct moe_pass_store *s;
    allocated = 0;
    assert_ok(moe_pass_store_create(&plain, NULL, 64 << 10, 100, &s));
    struct moe_pass_record *used = retained_as(s, 1);
    moe_pass_record_unref(retained_as(s, 2));
    moe_pass_store_clear(s);
    assert_int_equal(allocated, 20000);
    moe_pass_record_unref(used);
    assert_int_equal(moe_pass_store_bytes(s), 0);
    moe_pass_store_clear(s);
    assert_int_equal(allocated, 0);
    moe_pass_store_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_drops_that_free_memory_make_room),
        cmocka_unit_test(retained_passes_stay_within_bytes_and_time),
        cmocka_unit_test(memory_of_dropped_records_serves_the_next_of_its_size),
        cmocka_unit_test(idle_memory_expires),
        cmocka_unit_test(a_clear_leaves_only_referenced_records),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
