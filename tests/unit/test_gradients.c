/* SPDX-License-Identifier: Apache-2.0 */
/* What is lost when a view ends, and what clients learn of it, with a backend that trains with
 * copies. Tickets come without an engine: each ends here, or is abandoned as its view ends. */
#include "support/check.h"
#include "training/state.h" /* from within */
#include "training_fixture.h"

#include <string.h>

static char session_memory;

static struct moe_status begin(struct moe_call_exec *x)
{
    const struct moe_ticket ticket = {.epoch = test.epoch, .layer = 7, .kind = x->call.kind};
    struct moe_step *step;
    return moe_train_call_ops.begin(test.train, &ticket, NULL,
                                    (struct moe_session *)(void *)&session_memory, NULL, x, &step);
}

static struct moe_train_digest digest_now(void)
{
    struct moe_train_digest d;
    moe_train_read_digest(test.train, &d);
    return d;
}

/* The view ends while the call runs. */
static void cut_short(struct moe_call_exec *x)
{
    moe_train_call_ops.abandon(test.train, x);
}

/* The slots have not met, so none of those that remain has merged. One that is gone may have. */
static void a_merge_that_is_cut_short_before_it_begins_leaves_the_weights(void **state)
{
    struct moe_call_exec x = {.call = {.kind = MOE_STEP_EXPORT, .id = 1, .merge = true}};
    (void)state;
    script.aborted = true;
    assert_refused(begin(&x), MOE_ABORTED, MOE_REASON_ABORTED);
    assert_true(x.run);
    cut_short(&x);
    struct moe_train_digest d = digest_now();
    assert_int_equal(d.inconsistent, 0);
    assert_int_equal(d.unsettled, 3);
    assert_int_equal(d.calls, 0);
}

#define with_copies(name) cmocka_unit_test_setup_teardown(name, open_copies, close_engine)

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_copies(a_merge_that_is_cut_short_before_it_begins_leaves_the_weights),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
