/* SPDX-License-Identifier: Apache-2.0 */
/* Stories of four slots, seen by slot 1. tests/simulation/mask has all others. */
#include "common/masks.h"
#include "support/check.h"

enum { EPOCH = 7, ALL = 15 };

/* Slot 2 is lost; slot 0 has said so, and goes on. Slot 0 must not be taken for the lost one. */
static void a_report_outlives_the_next_epoch_of_its_slot(void **state)
{
    (void)state;
    struct moe_masks m;
    moe_masks_begin(&m, 1, EPOCH, ALL);
    moe_masks_notice(&m, 0, EPOCH, 1 << 2);
    assert_int_equal(moe_masks_lost(&m), 1 << 2);
    assert_int_equal(moe_masks_left(&m), 0);
    moe_masks_notice(&m, 0, EPOCH + 1, 0);
    moe_masks_notice(&m, 3, EPOCH + 1, 0);
    assert_int_equal(moe_masks_lost(&m), 1 << 2);
    assert_int_equal(moe_masks_left(&m), 1 << 0 | 1 << 3);
    moe_masks_take(&m, EPOCH + 1, ALL & ~(1 << 2));
    assert_int_equal(moe_masks_lost(&m), 0);
    assert_int_equal(moe_masks_left(&m), 0);
}

static void a_report_of_an_earlier_epoch_counts_for_nothing(void **state)
{
    (void)state;
    struct moe_masks m;
    moe_masks_begin(&m, 1, EPOCH, ALL);
    assert_ok(moe_masks_check(&m, EPOCH + 1, ALL & ~(1 << 2), true));
    moe_masks_take(&m, EPOCH + 1, ALL & ~(1 << 2));
    moe_masks_notice(&m, 0, EPOCH, 1 << 3);
    assert_int_equal(moe_masks_lost(&m), 0);
    assert_int_equal(moe_masks_left(&m), 0);
}

static void a_slot_that_is_gone_takes_no_mask(void **state)
{
    (void)state;
    struct moe_masks m;
    moe_masks_begin(&m, 1, EPOCH, ALL);
    moe_masks_close(&m, 3);
    struct moe_status st = moe_masks_check(&m, EPOCH + 1, ALL & ~(1 << 2), true);
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    assert_int_equal(st.reason, MOE_REASON_PEER_LOST);
    assert_ok(moe_masks_check(&m, EPOCH + 1, ALL & ~(1 << 3), true));
    st = moe_masks_check(&m, EPOCH + 1, ALL & ~(1 << 3), false);
    assert_int_equal(st.code, MOE_FAILED_PRECONDITION);
    st = moe_masks_check(&m, EPOCH, ALL & ~(1 << 3), true);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_report_outlives_the_next_epoch_of_its_slot),
        cmocka_unit_test(a_report_of_an_earlier_epoch_counts_for_nothing),
        cmocka_unit_test(a_slot_that_is_gone_takes_no_mask),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
