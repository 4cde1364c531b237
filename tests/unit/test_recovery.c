/* SPDX-License-Identifier: Apache-2.0 */
/* Where a group with copies of experts goes on when it has lost a member: training/recovery.h. The
 * group simulator has the random schedules; these are the single stories. */
#include "support/check.h"
#include "training/recovery.h"

#include <string.h>

/* Slots 0 to 2 of a view of four, after 20 calls; slot 3 is lost. */
static struct moe_train_digest s[MOE_MAX_SLOTS];
enum { SURVIVORS = 7, ALL = 15 };

static void begin(void)
{
    memset(s, 0, sizeof s);
    for (int i = 0; i < 3; i++) {
        s[i] = (struct moe_train_digest){.config = 1,
                                         .group = 5,
                                         .epoch = 9,
                                         .lineage = 4,
                                         .weights_version = 6,
                                         .nonce = 1,
                                         .calls = 20,
                                         .record = 77,
                                         .unsaved = 2};
        strcpy(s[i].checkpoint, "a");
    }
    s[3] = (struct moe_train_digest){.config = 1, .weights_version = 1}; /* a new process */
}

static struct moe_train_recovery choose(uint64_t live)
{
    struct moe_train_recovery d;
    assert_ok(moe_train_choose_recovery(s, live, &d));
    return d;
}

/* A Backward was recorded last on this slot, and not on the others. */
static void record_backward(int slot)
{
    s[slot].before = s[slot].record;
    s[slot].calls++;
    s[slot].record = 99;
    s[slot].backward = (struct moe_ledger_call){.id = 3};
    strcpy(s[slot].backward_session, "run");
}

static void members_with_whole_gradients_go_on(void **state)
{
    (void)state;
    begin();
    struct moe_train_recovery d = choose(SURVIVORS);
    assert_false(d.restart);
    assert_int_equal(d.loss, MOE_TRAIN_LOSS_NONE);
    assert_int_equal(d.lineage, 4);
    for (int i = 0; i < 3; i++)
        s[i].gradients = SURVIVORS; /* of Backward calls after the loss */
    assert_int_equal(choose(SURVIVORS).loss, MOE_TRAIN_LOSS_NONE);
    for (int i = 0; i < 3; i++)
        s[i].unsettled = SURVIVORS; /* a call was cut short, and no slot has run it */
    assert_int_equal(choose(SURVIVORS).loss, MOE_TRAIN_LOSS_NONE);
}

static void gradients_with_a_part_on_a_lost_slot_are_dropped_and_the_weights_stay(void **state)
{
    (void)state;
    begin();
    for (int i = 0; i < 3; i++)
        s[i].gradients = ALL;
    struct moe_train_recovery d = choose(SURVIVORS);
    assert_false(d.restart);
    assert_int_equal(d.loss, MOE_TRAIN_LOSS_GRADIENTS);
    assert_true(d.lineage > 4);
    assert_int_equal(d.earlier, 4);
    assert_int_equal(d.weights_version, 6);
    assert_int_equal(d.calls, 20);
    begin();
    s[1].undefined = 1; /* a pass was cut short there */
    assert_int_equal(choose(SURVIVORS).loss, MOE_TRAIN_LOSS_GRADIENTS);
}

static void the_others_learn_a_backward_that_only_some_have_recorded(void **state)
{
    (void)state;
    begin();
    record_backward(1);
    struct moe_train_recovery d = choose(SURVIVORS);
    assert_false(d.restart);
    assert_int_equal(d.loss, MOE_TRAIN_LOSS_GRADIENTS);
    assert_int_equal(d.calls, 21);
    assert_int_equal(d.record, 99);
    assert_int_equal(d.backward.id, 3);
    assert_string_equal(d.backward_session, "run");
    s[0].record++; /* another history: this is no such difference */
    assert_true(choose(SURVIVORS).restart);
}

/* Slots 0 and 1 have run a call, and slot 2 was cut short in it. */
static void run_on_two(uint64_t weights_version)
{
    for (int i = 0; i < 2; i++) {
        s[i].before = s[i].record;
        s[i].calls++;
        s[i].record = 99;
        s[i].weights_version = weights_version;
        s[i].change = (struct moe_ledger_call){.id = 9};
        s[i].squares = 2.5;
    }
    s[2].gradients = s[2].unsettled = ALL;
    s[2].undefined = 1;
}

static void a_slot_finishes_a_call_that_others_have_run(void **state)
{
    (void)state;
    begin();
    run_on_two(7);
    assert_true(choose(SURVIVORS).restart); /* it has not all that it needs */
    s[2].begun = 8;
    assert_true(choose(SURVIVORS).restart);
    s[2].begun = 9;
    struct moe_train_recovery d = choose(SURVIVORS);
    assert_false(d.restart);
    assert_int_equal(d.loss, MOE_TRAIN_LOSS_NONE);
    assert_int_equal(d.lineage, 4);
    assert_int_equal(d.weights_version, 7);
    assert_int_equal(d.finishers, 4);
    assert_int_equal(d.change.id, 9);
    assert_true(d.squares == 2.5);
    assert_int_equal(d.calls, 21);
    s[0].gradients = s[1].gradients = ALL; /* SetFrozen keeps them */
    d = choose(SURVIVORS);
    assert_int_equal(d.loss, MOE_TRAIN_LOSS_GRADIENTS);
    assert_int_equal(d.finishers, 4);
    s[2].inconsistent = 1;
    assert_true(choose(SURVIVORS).restart);
    s[2].inconsistent = 0;
    s[2].epoch--; /* it was cut off earlier, in another call of this id */
    assert_true(choose(SURVIVORS).restart);
}

static void a_slot_records_a_save_that_others_have_recorded(void **state)
{
    (void)state;
    begin();
    run_on_two(6);
    assert_true(choose(SURVIVORS).restart);
    s[0].only_recorded = s[1].only_recorded = 1;
    struct moe_train_recovery d = choose(SURVIVORS);
    assert_false(d.restart);
    assert_int_equal(d.finishers, 4);
    assert_true(d.only_recorded);
    assert_false(d.settled); /* calls were run while it was written */
    s[0].settled = s[1].settled = 1;
    assert_true(choose(SURVIVORS).settled);
    s[2].weights_version = 5;
    assert_true(choose(SURVIVORS).restart);
}

static void a_call_that_a_lost_slot_may_have_answered_ends_the_lineage(void **state)
{
    (void)state;
    begin();
    s[2].unsettled = ALL;
    struct moe_train_recovery d = choose(SURVIVORS);
    assert_false(d.restart); /* the weights are those before the call */
    assert_int_equal(d.loss, MOE_TRAIN_LOSS_CALL);
    assert_true(d.lineage > 4);
}

static void a_lineage_that_only_some_have_begun_is_followed_by_another(void **state)
{
    (void)state;
    begin(); /* an attempt failed after slot 0 had taken its decision */
    for (int i = 1; i < 3; i++)
        s[i].gradients = ALL;
    s[0].lineage = 8;
    s[0].earlier = 4;
    struct moe_train_recovery d = choose(SURVIVORS);
    assert_false(d.restart);
    assert_int_equal(d.loss, MOE_TRAIN_LOSS_GRADIENTS);
    assert_true(d.lineage > 8);
    assert_int_equal(d.earlier, 4);
    s[0].calls++; /* it has run a call since */
    assert_true(choose(SURVIVORS).restart);
}

static void a_new_process_waits_for_a_checkpoint_with_the_state(void **state)
{
    (void)state;
    begin();
    struct moe_train_recovery d = choose(ALL);
    assert_true(d.restart);
    assert_int_equal(d.heirs, SURVIVORS);
    struct moe_train_recovery without = d;
    assert_ok(moe_train_keep_copies(s, ALL, false, &without)); /* the others lack experts */
    assert_true(without.restart);
    assert_refused(moe_train_keep_copies(s, ALL, true, &d), MOE_FAILED_PRECONDITION,
                   MOE_REASON_REFORMING);
    assert_int_equal(d.joiners, 8);
    for (int i = 0; i < 3; i++) {
        s[i].saved = 1;
        s[i].unsaved = 0;
        strcpy(s[i].checkpoint, "b");
        s[i].earlier = 3; /* with gradients that were lost; the new slot has no list of them */
    }
    d = choose(ALL);
    assert_ok(moe_train_keep_copies(s, ALL, true, &d));
    assert_false(d.restart);
    assert_int_equal(d.joiners, 8);
    assert_int_equal(d.lineage, 4);
    assert_int_equal(d.weights_version, 6);
    assert_string_equal(d.checkpoint, "b");
    assert_int_equal(d.calls, 20);
    assert_int_equal(d.earlier, 0);
    struct moe_saved_training ahead = {.checkpoint = "b", .calls = 20, .record = d.record};
    assert_true(moe_train_is_ahead(&ahead, &d)); /* it has read that state */
    ahead.record++;
    assert_false(moe_train_is_ahead(&ahead, &d)); /* another one of that name */
    ahead = (struct moe_saved_training){0};
    d.checkpoint[0] = '\0';
    d.calls = d.record = 0;
    assert_false(moe_train_is_ahead(&ahead, &d));
    s[1].has_target = 1; /* an operator wants to go back */
    strcpy(s[1].target, "a");
    d = choose(ALL);
    assert_ok(moe_train_keep_copies(s, ALL, true, &d));
    assert_true(d.restart);
    assert_string_equal(d.checkpoint, "a");
}

/* The view was given up while it read checkpoint a. */
static void a_process_that_has_read_a_checkpoint_in_vain_is_as_a_new_one(void **state)
{
    (void)state;
    begin();
    for (int i = 0; i < 3; i++) {
        strcpy(s[i].checkpoint, "b");
        s[i].saved = 1;
        s[i].unsaved = 0;
    }
    strcpy(s[3].checkpoint, "a");
    struct moe_train_recovery d = choose(ALL);
    assert_ok(moe_train_keep_copies(s, ALL, true, &d));
    assert_int_equal(d.joiners, 8);
    assert_string_equal(d.checkpoint, "b");
    assert_int_equal(d.calls, 20);
}

static void a_member_that_has_missed_a_call_makes_the_group_go_back(void **state)
{
    (void)state;
    begin();
    s[0].calls++; /* it has taken a step, and may have answered it */
    s[0].weights_version++;
    struct moe_train_recovery d = choose(SURVIVORS);
    assert_true(d.restart);
    assert_int_equal(d.heirs, 1);
    assert_ok(moe_train_keep_copies(s, SURVIVORS, true, &d));
    assert_true(d.restart);
}

static void a_process_of_an_earlier_view_is_as_a_new_one(void **state)
{
    (void)state;
    begin();
    s[3] = s[0];
    s[3].epoch = 7;
    s[3].calls = 12;
    s[3].record = 12;
    s[3].weights_version = 4;
    struct moe_train_recovery d = choose(ALL);
    assert_int_equal(d.heirs, SURVIVORS);
    assert_refused(moe_train_keep_copies(s, ALL, true, &d), MOE_FAILED_PRECONDITION,
                   MOE_REASON_REFORMING);
    s[2].inconsistent = 1; /* the latest view has a member that cannot go on */
    s[0].inconsistent = s[1].inconsistent = 1;
    d = choose(ALL);
    assert_true(d.restart);
    assert_int_equal(d.heirs, 0);
    assert_ok(moe_train_keep_copies(s, ALL, true, &d));
    assert_true(d.restart); /* the older state is no state to go on from */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(members_with_whole_gradients_go_on),
        cmocka_unit_test(gradients_with_a_part_on_a_lost_slot_are_dropped_and_the_weights_stay),
        cmocka_unit_test(the_others_learn_a_backward_that_only_some_have_recorded),
        cmocka_unit_test(a_slot_finishes_a_call_that_others_have_run),
        cmocka_unit_test(a_slot_records_a_save_that_others_have_recorded),
        cmocka_unit_test(a_call_that_a_lost_slot_may_have_answered_ends_the_lineage),
        cmocka_unit_test(a_lineage_that_only_some_have_begun_is_followed_by_another),
        cmocka_unit_test(a_new_process_waits_for_a_checkpoint_with_the_state),
        cmocka_unit_test(a_process_that_has_read_a_checkpoint_in_vain_is_as_a_new_one),
        cmocka_unit_test(a_member_that_has_missed_a_call_makes_the_group_go_back),
        cmocka_unit_test(a_process_of_an_earlier_view_is_as_a_new_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
