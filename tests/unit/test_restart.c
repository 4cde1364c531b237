/* SPDX-License-Identifier: Apache-2.0 */
/* How long a program waits before it starts anew. */
#include "base/restart.h"

#include "base/clock.h"
#include "support/check.h"
#include "support/directory.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void waits_double_to_ten_seconds_and_a_good_life_resets_them(void **state)
{
    static const uint64_t ms[] = {100, 200, 400, 800, 1600, 3200, 6400, 10000, 10000};
    uint32_t ends = 0;
    (void)state;
    for (size_t i = 0; i < sizeof ms / sizeof *ms; i++) {
        assert_int_equal(moe_restart_wait_ns(&ends, 59 * MOE_NS_PER_S), ms[i] * MOE_NS_PER_MS);
        assert_int_equal(ends, i + 1);
    }
    assert_int_equal(moe_restart_wait_ns(&ends, 60 * MOE_NS_PER_S), 100 * MOE_NS_PER_MS);
    assert_int_equal(ends, 1);
    ends = UINT32_MAX;
    assert_int_equal(moe_restart_wait_ns(&ends, 0), 10 * MOE_NS_PER_S);
    assert_int_equal(ends, UINT32_MAX);
}

static char directory[MOE_TEST_DIRECTORY_BYTES], path[MOE_TEST_DIRECTORY_BYTES + 16];

static int make_path(void **state)
{
    (void)state;
    if (!moe_test_directory("restart", directory))
        return -1;
    (void)snprintf(path, sizeof path, "%s/starts", directory);
    return 0;
}

static int remove_path(void **state)
{
    (void)state;
    (void)unlink(path);
    return rmdir(directory);
}

static void write_text(const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static void each_start_notes_itself_and_waits_for_the_rest(void **state)
{
    static const uint64_t ms[] = {0, 0, 100, 300, 700};
    uint64_t wait;
    uint32_t ends;
    (void)state;
    for (size_t i = 0; i < sizeof ms / sizeof *ms; i++) {
        assert_ok(moe_restart_note(path, &wait, &ends));
        assert_int_equal(ends, i);
        assert_int_equal(wait, ms[i] * MOE_NS_PER_MS);
        /* As if the process had lived for a moment: the record has its start, after the wait. */
        char text[64];
        (void)snprintf(text, sizeof text, "%u %llu\n", ends, (unsigned long long)moe_clock_ns());
        write_text(text);
    }
    moe_restart_forget(path);
    assert_ok(moe_restart_note(path, &wait, &ends));
    assert_int_equal(ends, 0);
    assert_int_equal(wait, 0);
}

static void what_is_no_record_of_this_boot_means_nothing(void **state)
{
    static const char *const no[] = {"", "x", "7", "-", "9 18446744073709551615\n"};
    uint64_t wait;
    uint32_t ends;
    (void)state;
    for (size_t i = 0; i < sizeof no / sizeof *no; i++) {
        write_text(no[i]);
        assert_ok(moe_restart_note(path, &wait, &ends));
        assert_int_equal(wait, 0);
    }
    assert_refused(moe_restart_note("/no/such/directory/starts", &wait, &ends), MOE_UNAVAILABLE,
                   MOE_REASON_IO);
    assert_int_equal(wait, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(waits_double_to_ten_seconds_and_a_good_life_resets_them),
        cmocka_unit_test(each_start_notes_itself_and_waits_for_the_rest),
        cmocka_unit_test(what_is_no_record_of_this_boot_means_nothing),
    };
    return cmocka_run_group_tests(tests, make_path, remove_path);
}
