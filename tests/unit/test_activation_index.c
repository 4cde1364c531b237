/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the list of retained steps: which entry is taken when. */
#include "activations/activation_index.h"
#include "base/clock.h"
#include "support/check.h"
#include "support/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void add(struct moe_activation_index *l, const char *session, uint64_t id, uint64_t name,
                uint64_t expires)
{
    struct moe_activation_entry step = {.id = id, .layer = 3, .name = name, .expires_ns = expires};
    strcpy(step.session, session);
    moe_activation_index_add(l, &step);
}

static void a_backward_takes_its_entries_and_no_others(void **state)
{
    (void)state;
    static struct moe_activation_index l;
    struct moe_activation_entry out;
    add(&l, "a", 1, 11, 100);
    add(&l, "b", 1, 12, 200);
    add(&l, "a", 1, 13, 300); /* requested twice, at two workers */
    add(&l, "a", 2, 14, 400);
    assert_true(moe_activation_index_take(&l, "a", 1, true, &out));
    assert_int_equal(out.name, 11);
    assert_true(moe_activation_index_take(&l, "a", 1, true, &out));
    assert_int_equal(out.name, 13);
    assert_false(moe_activation_index_take(&l, "a", 1, true, &out));
    assert_int_equal(l.count, 2);
    assert_int_equal(moe_activation_index_next(&l), 200);
}

static void an_entry_in_use_does_not_expire(void **state)
{
    (void)state;
    static struct moe_activation_index l;
    struct moe_activation_entry out;
    assert_int_equal(moe_activation_index_next(&l), MOE_NEVER);
    add(&l, "a", 1, 11, 100);
    add(&l, "a", 2, 12, 200);
    moe_activation_index_set_busy(&l, "a", 1, true);
    assert_int_equal(moe_activation_index_next(&l), 200);
    assert_false(moe_activation_index_take_old(&l, 199, &out));
    assert_true(moe_activation_index_take_old(&l, 200, &out));
    assert_int_equal(out.name, 12);
    assert_false(moe_activation_index_take_old(&l, MOE_NEVER, &out));
    assert_int_equal(moe_activation_index_next(&l), MOE_NEVER);
    assert_false(moe_activation_index_take(&l, "a", 1, false, &out));
    moe_activation_index_set_busy(&l, "a", 1, false); /* the pass was refused: it may come again */
    assert_true(moe_activation_index_take_old(&l, 200, &out));
    assert_int_equal(out.name, 11);
    assert_int_equal(l.count, 0);
}

/* Compared with a plain list of names. */
static void no_entry_is_lost_or_taken_twice(void **state)
{
    (void)state;
    static struct moe_activation_index l;
    struct rng random = {.state = choose_seed()};
    bool *there = calloc(20001, sizeof *there);
    uint64_t now = 0, added = 0, taken = 0;
    struct moe_activation_entry out;
    assert_non_null(there);
    for (int i = 0; i < 20000; i++) {
        char session[8];
        (void)snprintf(session, sizeof session, "s%u", rng_below(&random, 3));
        uint64_t id = 1 + rng_below(&random, 20);
        unsigned what = rng_below(&random, 5);
        bool got = false;
        now += rng_below(&random, 3);
        if (what < 2 && !moe_activation_index_full(&l)) {
            add(&l, session, id, ++added, now + 100);
            there[added] = true;
        } else if (what < 4) {
            got = moe_activation_index_take(&l, session, id, true, &out);
            assert_true(!got || (out.id == id && strcmp(out.session, session) == 0));
        } else {
            got = moe_activation_index_take_old(&l, now, &out);
            assert_true(!got || out.expires_ns <= now);
        }
        if (got) {
            assert_true(there[out.name]);
            there[out.name] = false;
            taken++;
        }
        assert_int_equal(l.count, added - taken);
    }
    while (moe_activation_index_take_old(&l, MOE_NEVER, &out))
        taken++;
    assert_int_equal(added, taken);
    assert_true(added > 1000);
    free(there);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_backward_takes_its_entries_and_no_others),
        cmocka_unit_test(an_entry_in_use_does_not_expire),
        cmocka_unit_test(no_entry_is_lost_or_taken_twice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
