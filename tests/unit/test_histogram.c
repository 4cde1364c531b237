/* SPDX-License-Identifier: Apache-2.0 */
/* The distributions of moectl bench against sorted arrays. */
#include "moectl/io/histogram.h"

#include "client_fixture.h"

#include <stdlib.h>

enum { VALUES = 5000 };

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void percentiles_are_those_of_the_sorted_values(void **state)
{
    (void)state;
    static const double percents[] = {1, 10, 50, 90, 99, 99.9};
    for (unsigned bits = 1; bits < 64; bits += 3) {
        struct moectl_histogram *h = calloc(1, sizeof *h);
        uint64_t *values = calloc(VALUES, sizeof *values);
        assert_true(h != NULL && values != NULL);
        for (size_t i = 0; i < VALUES; i++) {
            uint64_t wide = (uint64_t)random_below(UINT32_MAX) << 32 | random_below(UINT32_MAX);
            values[i] = wide >> (64 - bits);
            moectl_histogram_add(h, values[i]);
        }
        qsort(values, VALUES, sizeof *values, by_value);
        for (size_t p = 0; p < sizeof percents / sizeof *percents; p++) {
            double want =
                (double)values[(size_t)(percents[p] / 100 * (double)VALUES + 0.999999) - 1];
            double got = (double)moectl_histogram_percentile(h, percents[p]);
            if (got < want * 0.996 - 1 || got > want * 1.004 + 1)
                fail_msg("%u bits: p%g is %g instead of %g", bits, percents[p], got, want);
        }
        assert_true(moectl_histogram_percentile(h, 100) <= values[VALUES - 1]);
        assert_int_equal(h->max, values[VALUES - 1]);
        assert_int_equal(h->count, VALUES);
        free(values);
        free(h);
    }
}

static void extremes_have_a_place(void **state)
{
    (void)state;
    struct moectl_histogram *h = calloc(1, sizeof *h);
    assert_non_null(h);
    assert_int_equal(moectl_histogram_percentile(h, 50), 0);
    moectl_histogram_add(h, 0);
    moectl_histogram_add(h, UINT64_MAX);
    assert_int_equal(moectl_histogram_percentile(h, 50), 0);
    assert_true(moectl_histogram_percentile(h, 99) > UINT64_MAX - (UINT64_MAX >> 8));
    free(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(percentiles_are_those_of_the_sorted_values),
        cmocka_unit_test(extremes_have_a_place),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
