/* SPDX-License-Identifier: Apache-2.0 */
/* The worker's lease: when it runs, whatever the clocks do, and what other threads see of it. */
#include "base/clock.h"
#include "daemon/lease.h"
#include "support/check.h"
#include "support/random.h"

enum { COORDINATOR_MS = 5000 };
#define TERM (moe_lease_term_ns(COORDINATOR_MS * MOE_NS_PER_MS, MOE_LEASE_MARGIN_PERCENT))

static uint64_t now_ns;

static uint64_t test_clock(void)
{
    return now_ns;
}

static void the_lease_runs_from_when_the_answered_heartbeat_was_sent(void **state)
{
    (void)state;
    struct moe_lease l = {.term_ns = TERM};
    assert_int_equal(moe_lease_on_sent(&l, 1000), 1);
    assert_int_equal(moe_lease_on_sent(&l, 2000), 2);
    assert_int_equal(l.until_ns, 0); /* nothing is answered yet */
    assert_int_equal(moe_lease_sent_ns(&l, 1), 1000);
    moe_lease_on_answered(&l, 1, 0);
    assert_int_equal(l.until_ns, 1000 + TERM);
    moe_lease_on_answered(&l, 2, 500);
    assert_int_equal(l.until_ns, 2000 + TERM);
    assert_int_equal(l.all_until_ns, 1500 + TERM);
    moe_lease_on_answered(&l, 1, 0); /* a late answer takes nothing away */
    assert_int_equal(l.until_ns, 2000 + TERM);
}

static void unknown_answers_change_nothing(void **state)
{
    (void)state;
    struct moe_lease l = {.term_ns = TERM};
    moe_lease_on_answered(&l, 0, 0);
    moe_lease_on_answered(&l, 1, 0);
    moe_lease_on_answered(&l, UINT64_MAX, 0);
    assert_int_equal(l.until_ns, 0);
    for (uint64_t i = 1; i <= MOE_LEASE_UNANSWERED + 1; i++)
        (void)moe_lease_on_sent(&l, 1000 * i);
    assert_int_equal(moe_lease_sent_ns(&l, 1), 0); /* its time is forgotten */
    assert_int_equal(moe_lease_sent_ns(&l, UINT64_MAX), 0);
    moe_lease_on_answered(&l, 1, 0);
    assert_int_equal(l.until_ns, 0);
    moe_lease_on_answered(&l, 2, 0);
    assert_int_equal(l.until_ns, 2000 + TERM);
}

static void no_answer_revives_a_lease_that_has_ended(void **state)
{
    (void)state;
    struct moe_lease l = {.term_ns = TERM};
    uint64_t sent = moe_lease_on_sent(&l, 1000);
    moe_lease_on_answered(&l, sent, 0);
    moe_lease_end(&l);
    moe_lease_on_answered(&l, sent, 0);
    assert_int_equal(l.until_ns, 0);
    sent = moe_lease_on_sent(&l, 3000);
    moe_lease_on_answered(&l, sent, 0);
    assert_int_equal(l.until_ns, 3000 + TERM);
}

/* True times: the heartbeat is sent at 0 and received `delay` later. Both clocks drift, each by up
 * to the bound. */
static bool worker_ends_first(unsigned margin_percent, struct rng *r)
{
    const double bound = (double)MOE_LEASE_DRIFT_PERCENT / 100.0;
    double worker = 1 - bound + 2 * bound * (double)(rng_next(r) % 1001) / 1000;
    double coordinator = 1 - bound + 2 * bound * (double)(rng_next(r) % 1001) / 1000;
    double delay = (double)(rng_next(r) % 100) * 1e6;
    double lease = (double)COORDINATOR_MS * 1e6;
    double term = (double)moe_lease_term_ns((uint64_t)lease, margin_percent);
    return term / worker < delay + lease / coordinator;
}

static void the_margin_covers_the_drift(void **state)
{
    (void)state;
    uint64_t seed = seed_from_environment(1);
    struct rng r = {seed};
    unsigned late = 0;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int i = 0; i < 200000; i++) {
        assert_true(worker_ends_first(MOE_LEASE_MARGIN_PERCENT, &r));
        late += !worker_ends_first(8, &r);
    }
    assert_true(late > 0); /* 8 % are too little, so the test sees what it looks for */
}

static void the_gate_shows_what_the_time_left_suffices_for(void **state)
{
    (void)state;
    struct moe_lease l = {.term_ns = TERM};
    struct moe_lease_gate g;
    moe_lease_gate_init(&g, test_clock);
    now_ns = MOE_NS_PER_S;
    assert_false(moe_lease_gate_held(&g));
    assert_int_equal(moe_lease_gate_remaining_ns(&g), 0);
    assert_int_equal(moe_lease_gate_heartbeat_age_ns(&g), 0); /* none was answered */
    moe_lease_on_answered(&l, moe_lease_on_sent(&l, now_ns), TERM / 10);
    moe_lease_gate_set(&g, &l);
    assert_true(moe_lease_gate_held(&g) && moe_lease_gate_covers_change(&g) &&
                moe_lease_gate_covers_group(&g));
    now_ns += TERM * 4 / 10; /* another member may have only half of it left */
    assert_int_equal(moe_lease_gate_heartbeat_age_ns(&g), TERM * 4 / 10);
    assert_true(moe_lease_gate_held(&g) && moe_lease_gate_covers_change(&g));
    assert_false(moe_lease_gate_covers_group(&g));
    now_ns += TERM * 2 / 10;
    assert_true(moe_lease_gate_held(&g));
    assert_false(moe_lease_gate_covers_change(&g));
    now_ns += TERM * 4 / 10;
    assert_false(moe_lease_gate_held(&g));
    assert_int_equal(moe_lease_gate_remaining_ns(&g), 0);
    assert_int_equal(moe_lease_gate_heartbeat_age_ns(&g), TERM); /* it grows without a lease, too */
    assert_true(moe_lease_gate_held(NULL) && moe_lease_gate_covers_group(NULL));
}

static struct moe_lease_gate awaiting;
static int looks;

/* The answer comes while the worker looks for the third time. */
static uint64_t clock_with_an_answer(void)
{
    struct moe_lease l = {.term_ns = TERM, .until_ns = now_ns + TERM, .all_until_ns = now_ns};
    if (++looks == 3)
        moe_lease_gate_set(&awaiting, &l);
    return now_ns;
}

static void a_change_waits_as_long_as_from_one_heartbeat_to_the_next(void **state)
{
    (void)state;
    const struct moe_lease over = {.term_ns = 60 * MOE_NS_PER_MS};
    now_ns = MOE_NS_PER_S;
    looks = 0;
    moe_lease_gate_init(&awaiting, clock_with_an_answer);
    moe_lease_gate_set(&awaiting, &over);
    assert_true(moe_lease_gate_await_change(&awaiting));
    assert_int_equal(looks, 3);
    moe_lease_gate_set(&awaiting, &over);
    assert_false(moe_lease_gate_await_change(&awaiting)); /* no answer comes */
    assert_int_equal(looks, 3 + 1 + 60 / MOE_LEASE_HEARTBEATS);
    assert_true(moe_lease_gate_await_change(NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_lease_runs_from_when_the_answered_heartbeat_was_sent),
        cmocka_unit_test(unknown_answers_change_nothing),
        cmocka_unit_test(no_answer_revives_a_lease_that_has_ended),
        cmocka_unit_test(the_margin_covers_the_drift),
        cmocka_unit_test(the_gate_shows_what_the_time_left_suffices_for),
        cmocka_unit_test(a_change_waits_as_long_as_from_one_heartbeat_to_the_next),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
