/* SPDX-License-Identifier: Apache-2.0 */
/* When certificates end: which date counts, when the log warns, what the metric shows. */
#include "access/expiry.h"
#include "certificates.h"
#include "support/check.h"

#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { HOUR = 3600, DAY = 24 * HOUR };

static void warnings_come_once_a_day_in_the_last_week(void **state)
{
    const int64_t ends = INT64_C(2000000000);
    int64_t warned = 0;
    unsigned warnings = 0;
    (void)state;
    for (int64_t now = ends - 30 * DAY; now < ends + 2 * DAY; now += HOUR) {
        bool due = moe_expiry_due(ends, now, &warned);
        assert_true(!due || ends - now < MOE_EXPIRY_SOON_S);
        warnings += due;
    }
    assert_int_equal(warnings, 9);
    warned = 0;
    assert_false(moe_expiry_due(0, ends, &warned)); /* not given */
    assert_true(moe_expiry_due(ends, ends - DAY, &warned));
    assert_true(moe_expiry_due(ends, ends - 2 * DAY, &warned)); /* the clock was set back */
}

static int64_t days_left(int64_t ends)
{
    return (ends - (int64_t)time(NULL) + HOUR) / DAY;
}

static void the_first_end_of_a_chain_and_the_last_of_roots_count(void **state)
{
    char at[CERTIFICATES_PATH];
    struct moe_tls_dates dates;
    (void)state;
    certificates_directory(at);
    certificates_make(at, "old", NULL, NULL, -60, 3 * DAY);
    certificates_make(at, "ca", NULL, NULL, -60, 90 * DAY);
    certificates_make(at, "between", "ca", NULL, -60, 5 * DAY);
    certificates_make(at, "pair", "between", "DNS:localhost", -60, 30 * DAY);
    certificates_join(at, "chain", "pair", "between");
    certificates_join(at, "roots", "old", "ca");
    assert_ok(moe_tls_dates_read(&(struct moe_rpc_tls_files){certificates_file(at, "chain", "pem"),
                                                             certificates_file(at, "pair", "key"),
                                                             certificates_file(at, "roots", "pem")},
                                 &dates));
    assert_int_equal(days_left(dates.certificate), 5);
    assert_int_equal(days_left(dates.ca), 90);
    assert_ok(moe_tls_dates_read(
        &(struct moe_rpc_tls_files){.ca = certificates_file(at, "old", "pem")}, &dates));
    assert_int_equal(dates.certificate, 0);
    assert_int_equal(days_left(dates.ca), 3);
    certificates_remove(at);
}

static void the_metric_follows_a_replaced_file(void **state)
{
    char at[CERTIFICATES_PATH], ca[CERTIFICATES_PATH + 64], want[128];
    struct moe_daemon_settings settings = {.tls_ca = ca};
    struct moe_expiry e;
    struct moe_expiry_metrics shown = {0};
    struct moe_metrics *m;
    (void)state;
    certificates_directory(at);
    strcpy(ca, certificates_file(at, "ca", "pem"));
    certificates_make(at, "ca", NULL, NULL, -60, 3 * DAY);
    moe_expiry_init(&e, &settings);
    moe_expiry_look(&e, NULL, (int64_t)time(NULL));
    moe_expiry_show(&e, &shown);
    assert_ok(moe_metrics_create(&m));
    assert_ok(moe_expiry_add_metrics(&shown, &settings, m));
    for (int round = 0; round < 2; round++) {
        char *text;
        size_t length;
        moe_expiry_look(&e, NULL, (int64_t)time(NULL));
        moe_expiry_show(&e, &shown);
        assert_int_equal(days_left(shown.ends[2]), round == 0 ? 3 : 60);
        assert_ok(moe_metrics_render(m, &text, &length));
        snprintf(want, sizeof want, "moe_tls_certificate_expiry_seconds{file=\"tls-ca\"} %lld\n",
                 (long long)shown.ends[2]);
        assert_non_null(strstr(text, want));
        assert_null(strstr(text, "tls-certificate")); /* not given */
        free(text);
        certificates_make(at, "ca", NULL, NULL, -60, 60 * DAY);
    }
    assert_false(e.ca_refused);
    certificates_write(at, "ca", "pem", "rubbish\n", 0644);
    for (int look = 0; look < 2; look++) { /* until it is replaced */
        moe_expiry_look(&e, NULL, (int64_t)time(NULL));
        assert_true(e.ca_refused);
    }
    moe_expiry_show(&e, &shown);
    assert_int_equal(days_left(shown.ends[2]), 60); /* the roots before stay in use */
    certificates_make(at, "ca", NULL, NULL, -60, 30 * DAY);
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &(struct rlimit){.rlim_max = limit.rlim_max}), 0);
    moe_expiry_look(&e, NULL, (int64_t)time(NULL));
    assert_true(e.ca_refused); /* it is valid, and cannot be opened */
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    moe_expiry_look(&e, NULL, (int64_t)time(NULL));
    assert_false(e.ca_refused);
    moe_expiry_show(&e, &shown);
    assert_int_equal(days_left(shown.ends[2]), 30);
    moe_metrics_destroy(m);
    certificates_remove(at);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(warnings_come_once_a_day_in_the_last_week),
        cmocka_unit_test(the_first_end_of_a_chain_and_the_last_of_roots_count),
        cmocka_unit_test(the_metric_follows_a_replaced_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
