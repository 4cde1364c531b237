/* SPDX-License-Identifier: Apache-2.0 */
/* base/transfer.h: texts of transfers. */
#include "base/transfer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define GIB ((uint64_t)1 << 30)

static void bytes_have_a_unit(void **state)
{
    char text[MOE_BYTES_TEXT];
    (void)state;
    moe_bytes_text(0, text);
    assert_string_equal(text, "0.0 KiB");
    moe_bytes_text(1536, text);
    assert_string_equal(text, "1.5 KiB");
    moe_bytes_text(5 * GIB / 2, text);
    assert_string_equal(text, "2.5 GiB");
    moe_bytes_text(UINT64_MAX, text);
    assert_string_equal(text, "16777216.0 TiB");
}

static void hundred_percent_is_all(void **state)
{
    (void)state;
    assert_int_equal(moe_transfer_percent(0, 0), 0);
    assert_int_equal(moe_transfer_percent(0, 7), 0);
    assert_int_equal(moe_transfer_percent(UINT64_MAX - 1, UINT64_MAX), 99);
    assert_int_equal(moe_transfer_percent(UINT64_MAX, UINT64_MAX), 100);
    assert_int_equal(moe_transfer_percent(9, 7), 100);
    assert_int_equal(moe_transfer_percent(45, 100), 45);
}

static void a_text_has_bytes_rate_and_time_left(void **state)
{
    char text[MOE_TRANSFER_TEXT];
    (void)state;
    moe_transfer_text(GIB, 4 * GIB, (double)GIB / 2, text);
    assert_string_equal(text, "25 %, 1.0 GiB of 4.0 GiB, 512.0 MiB/s, 6 s left");
    moe_transfer_text(GIB, 101 * GIB, (double)GIB, text);
    assert_string_equal(text, "0 %, 1.0 GiB of 101.0 GiB, 1.0 GiB/s, 1 min 40 s left");
    moe_transfer_text(0, 7500 * GIB, (double)GIB, text);
    assert_string_equal(text, "0 %, 0.0 KiB of 7.3 TiB, 1.0 GiB/s, 2 h 5 min left");
    moe_transfer_text(4 * GIB, 4 * GIB, (double)GIB, text);
    assert_string_equal(text, "100 %, 4.0 GiB of 4.0 GiB, 1.0 GiB/s");
    moe_transfer_text(0, GIB, 0, text); /* no rate yet */
    assert_string_equal(text, "0 %, 0.0 KiB of 1.0 GiB");
    moe_transfer_text(1, UINT64_MAX, 1e-9, text); /* fits */
    assert_non_null(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_have_a_unit),
        cmocka_unit_test(hundred_percent_is_all),
        cmocka_unit_test(a_text_has_bytes_rate_and_time_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
