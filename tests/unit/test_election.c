/* SPDX-License-Identifier: Apache-2.0 */
/* When one of several coordinators looks for a leader, and when it proposes itself. */
#include "base/clock.h"
#include "store/election.h"
#include "support/check.h"

#define POLL (250 * MOE_NS_PER_MS)

/* One look, with a call that takes no time. Returns the pause until the next one. */
static uint64_t look(struct moe_election *e, uint64_t *now, bool ok, bool exists)
{
    *now = moe_election_deadline(e);
    assert_int_equal(moe_election_next(e, *now), MOE_ELECTION_LOOK);
    moe_election_on_looked(e, *now, ok, exists);
    return moe_election_deadline(e) - *now;
}

static void looks_without_an_answer_become_rare(void **state)
{
    (void)state;
    struct moe_election e;
    uint64_t now = 0, pause = 0;
    moe_election_init(&e, 5, POLL, 1);
    for (int i = 0; i < 4; i++) /* a cluster that has lost a member */
        assert_int_equal(look(&e, &now, false, false), POLL);
    for (int i = 0; i < 20; i++) {
        uint64_t next = look(&e, &now, false, false);
        assert_true(next >= pause && next <= 8 * POLL);
        pause = next;
    }
    assert_int_equal(pause, 8 * POLL);
    assert_int_equal(look(&e, &now, true, true), POLL); /* an answer, and all is as before */
    assert_int_equal(look(&e, &now, false, false), POLL);
}

static void a_held_process_looks_and_proposes_nothing(void **state)
{
    (void)state;
    struct moe_election e;
    uint64_t now = 0;
    moe_election_init(&e, 5, POLL, 1);
    moe_election_hold(&e, true);
    for (int i = 0; i < 10; i++)
        assert_int_equal(look(&e, &now, true, false), POLL);
    moe_election_hold(&e, false);
    now = moe_election_deadline(&e);
    assert_int_equal(moe_election_next(&e, now), MOE_ELECTION_LOOK);
    moe_election_on_looked(&e, now, true, false);
    assert_int_equal(moe_election_next(&e, now), MOE_ELECTION_GRANT);
}

/* Else it would say for a while that no coordinator leads. */
static void one_that_came_second_looks_at_once_who_leads(void **state)
{
    (void)state;
    struct moe_election e;
    uint64_t now = 0;
    for (int answered = 1; answered >= 0; answered--) {
        moe_election_init(&e, 5, POLL, 1);
        now = moe_election_deadline(&e);
        assert_int_equal(moe_election_next(&e, now), MOE_ELECTION_LOOK);
        moe_election_on_looked(&e, now, true, false);
        assert_int_equal(moe_election_next(&e, now), MOE_ELECTION_GRANT);
        moe_election_on_granted(&e, now, true, 7, 5);
        assert_int_equal(moe_election_next(&e, now), MOE_ELECTION_PROPOSE);
        moe_election_on_proposed(&e, now, answered, 0);
        assert_int_equal(moe_election_next(&e, now), MOE_ELECTION_RELEASE);
        moe_election_on_released(&e, now);
        assert_int_equal(moe_election_deadline(&e), answered ? now : now + POLL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(looks_without_an_answer_become_rare),
        cmocka_unit_test(a_held_process_looks_and_proposes_nothing),
        cmocka_unit_test(one_that_came_second_looks_at_once_who_leads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
