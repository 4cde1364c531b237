/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the room that forward steps ask for: never more than the maximum, enough for the rows
 * of earlier steps in any bucket. If even these would not fit, a step asks for nothing. */
#include "common/activation_sizing.h"
#include "support/check.h"

/* Eight choices per token over 256 experts, all of them here; rows of 32 KiB; 1 GiB. */
static struct moe_activation_sizing layer_of(uint32_t bucket, double learnt)
{
    return (struct moe_activation_sizing){.learnt = learnt,
                                          .even = 8,
                                          .bucket = bucket,
                                          .local_experts = 256,
                                          .max_rows = bucket * 8 + 256 * (MOE_ROW_ALIGN - 1),
                                          .room = 32768};
}

static uint32_t asked(const struct moe_activation_sizing *of)
{
    uint32_t rows = 0;
    assert_true(moe_activation_sizing_ask(of, &rows));
    assert_true(rows <= of->max_rows && rows <= of->room);
    return rows;
}

/* Padding of a small bucket must not count for each token of a large one. */
static void a_small_step_does_not_spoil_a_large_one(void **state)
{
    (void)state;
    double learnt = moe_activation_sizing_learn(0, 256 * 8, 256);
    struct moe_activation_sizing small = layer_of(256, learnt), large = layer_of(2048, learnt);
    small.room = large.room = 60000;
    assert_true(asked(&small) >= 256 * 8 + 256 * (MOE_ROW_ALIGN - 1) - 256);
    assert_in_range(asked(&large), 2048 * 8 + 256 * MOE_ROW_ALIGN / 2,
                    2048 * 8 * 5 / 4 + 256 * 128);
    assert_true(asked(&large) < large.room);
}

/* No earlier step: full buckets of all slots would not fit, but one bucket of eight does. */
static void an_unknown_size_is_tried(void **state)
{
    (void)state;
    struct moe_activation_sizing of = layer_of(8192, 0);
    assert_int_equal(asked(&of), 32768);
    of.learnt = moe_activation_sizing_learn(0, 8192, 8192); /* received rows, retained or not */
    assert_in_range(asked(&of), 8192, 8192 * 9 / 8 + 256 * 128);
}

static void more_than_there_is_room_for_is_not_asked(void **state)
{
    (void)state;
    struct moe_activation_sizing of = layer_of(8192, 8);
    uint32_t rows;
    assert_false(moe_activation_sizing_ask(&of, &rows));
    of.room = 8192 * 8; /* as many as rows, though padding may have none */
    assert_int_equal(asked(&of), 8192 * 8);
    of.room = 0;
    assert_false(moe_activation_sizing_ask(&of, &rows));
}

static void no_experts_no_rows(void **state)
{
    (void)state;
    struct moe_activation_sizing of = {.bucket = 64};
    assert_int_equal(asked(&of), 0);
}

static void more_counts_at_once_and_fades(void **state)
{
    (void)state;
    double learnt = moe_activation_sizing_learn(1, 640, 64);
    assert_true(learnt == 10);
    learnt = moe_activation_sizing_learn(learnt, 64, 64);
    assert_true(learnt < 10 && learnt > 8);
    for (int i = 0; i < 100; i++)
        learnt = moe_activation_sizing_learn(learnt, 64, 64);
    assert_true(learnt == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_step_does_not_spoil_a_large_one),
        cmocka_unit_test(an_unknown_size_is_tried),
        cmocka_unit_test(more_than_there_is_room_for_is_not_asked),
        cmocka_unit_test(no_experts_no_rows),
        cmocka_unit_test(more_counts_at_once_and_fades),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
