/* SPDX-License-Identifier: Apache-2.0 */
/* A Save that copies, in the engine and the training room, with reads that take as long as the test
 * wants: what goes on beside it, what waits, and what becomes of it when its view ends. */
#include "support/check.h"
#include "training_fixture.h"

#include <string.h>
#include <time.h>

static void hold_reads(bool hold)
{
    moe_mutex_lock(&script.lock);
    script.hold_reads = hold;
    pthread_cond_broadcast(&script.changed);
    moe_mutex_unlock(&script.lock);
}

/* Client 0's Save, whose ticket is over while its copy has hardly begun. */
static void begin_save(void)
{
    hold_reads(true);
    ask(0, MOE_STEP_SAVE, 5, 1);
    order(0, 0);
    wait_until(&test.finished_count, 1, &test.lock);
    wait_until(&script.reading, 1, &script.lock);
    assert_true(test.blocked);
    assert_int_equal(test.clients[0].done, 0);
    assert_int_equal(state_now().job, MOE_STEP_SAVE);
}

/* The progress of announcement `n` gets its ticket, which is the `finished`-th. */
static void order_progress(int n, int finished)
{
    wait_until(&test.announced_count, n + 1, &test.lock);
    order(n, 0);
    wait_until(&test.finished_count, finished, &test.lock);
}

static void steps_run_while_a_save_copies_and_what_changes_the_state_may_come_after(void **state)
{
    (void)state;
    begin_save();
    for (int i = 1; i <= 3; i++) { /* forward passes, and a Backward between them */
        forward(4, 0);
        order_forward(8);
        wait_until(&test.forward_done, i, &test.lock);
        assert_ok(test.forward_status);
        if (i > 1)
            continue;
        ask(1, MOE_STEP_BACKWARD, 1, 5);
        order(1, 0);
        wait_done(1);
        assert_ok(test.clients[1].status);
    }
    assert_int_equal(script.reading, 1); /* all along */
    assert_int_equal(test.announced_count, 2);
    assert_true(test.blocked);
    hold_reads(false);
    order_progress(2, 6);
    assert_false(test.blocked);
    assert_int_equal(test.block_count, 2);
    ask(2, MOE_STEP_OPTIMIZER, 9, 1);
    int n = test.announced[3].kind == MOE_STEP_OPTIMIZER
                ? 3
                : 4; /* another progress, before or after */
    wait_until(&test.announced_count, n + 1, &test.lock);
    order(n, 0);
    wait_done(2);
    assert_ok(test.clients[2].status);
    assert_int_equal(test.clients[2].answer.outcome.backwards, 1);
    /* There is no directory to write into. The progress may come after the step's ticket. */
    wait_until(&test.announced_count, 5, &test.lock);
    order(7 - n, 0);
    wait_done(0);
    assert_refused(test.clients[0].status, MOE_FAILED_PRECONDITION, MOE_REASON_IO);
    assert_false(script.changed_while_read);
    assert_int_equal(state_now().job, 0);
}

static void a_ticket_that_would_change_what_is_copied_ends_the_view(void **state)
{
    struct moe_train_digest digest;
    (void)state;
    begin_save();
    ask(1, MOE_STEP_OPTIMIZER, 9, 1);
    order(1, 0); /* a sequencer that does not hold */
    wait_until(&test.finished_count, 2, &test.lock);
    assert_int_equal(test.last.code, MOE_INTERNAL);
    wait_done(0);
    wait_done(1);
    assert_refused(test.clients[0].status, MOE_UNAVAILABLE, MOE_REASON_REFORMING);
    assert_int_equal(script.optimizer_steps, 0);
    moe_train_read_digest(test.train, &digest);
    assert_int_equal(digest.inconsistent, 0);
    hold_reads(false);
    begin_view();
    assert_false(script.changed_while_read);
}

static void *let_go(void *arg)
{
    (void)arg;
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    hold_reads(false);
    return NULL;
}

/* A new view goes on with the trainers, or goes back with new ones: not before they are left alone.
 */
static void a_view_that_ends_under_a_copy_is_followed_by_the_next_once_nobody_reads(void **state)
{
    pthread_t other;
    (void)state;
    begin_save();
    moe_engine_stop_view(test.engine); /* does not wait for the copy */
    wait_done(0);
    assert_refused(test.clients[0].status, MOE_UNAVAILABLE, MOE_REASON_REFORMING);
    assert_int_equal(script.reading, 1);
    assert_int_equal(pthread_create(&other, NULL, let_go, NULL), 0);
    begin_view();
    assert_int_equal(script.reading, 0);
    pthread_join(other, NULL);
    int reads = script.reads;
    assert_true(reads < 4); /* of twelve: it was cut short */
    ask(1, MOE_STEP_OPTIMIZER, 9, 1);
    order(1, 0);
    wait_done(1);
    assert_ok(test.clients[1].status);
    assert_int_equal(script.reads, reads);
    assert_false(script.changed_while_read);
    /* Nothing of the old one is in the way of the next. */
    hold_reads(true);
    ask(2, MOE_STEP_SAVE, 10, 1);
    order(2, 0);
    wait_until(&test.finished_count, 3, &test.lock);
    wait_until(&script.reading, 1, &script.lock);
    assert_true(test.blocked);
    moe_engine_stop_view(test.engine);
    assert_int_equal(pthread_create(&other, NULL, let_go, NULL), 0);
    moe_train_detach(test.train);
    pthread_join(other, NULL);
    assert_false(script.changed_while_read);
}

static void a_save_is_not_called_off_under_somebody_who_has_asked_for_it_too(void **state)
{
    (void)state;
    begin_save();
    ask(1, MOE_STEP_SAVE, 5, 1); /* its ticket has not come */
    moe_engine_cancel_training(test.engine, &test.clients[0].work);
    wait_done(0);
    assert_int_equal(test.clients[0].status.code, MOE_CANCELLED);
    assert_int_equal(test.announced_count, 2); /* nobody is told that nobody waits */
    ask(2, MOE_STEP_SAVE, 6, 1);               /* waits for something else */
    moe_engine_cancel_training(test.engine, &test.clients[1].work);
    order_progress(3, 2);
    order(1, 0); /* it has left before it joined, and is the last again */
    wait_done(1);
    assert_int_equal(test.clients[1].status.code, MOE_CANCELLED);
    order_progress(4, 4);
    hold_reads(false);
    order_progress(5, 5);
    assert_int_equal(state_now().job, 0);
}

/* As many as may wait here wait behind the copy. What ends it must not wait for them. */
static void a_copy_ends_behind_which_as_many_calls_wait_as_may(void **state)
{
    enum { HELD = 64 };
    (void)state;
    begin_save();
    for (int i = 1; i <= HELD; i++)
        ask(i, MOE_STEP_OPTIMIZER, 8 + (uint64_t)i, 1);
    struct moe_train_work one_more = test.clients[1].work;
    assert_refused(moe_engine_submit_training(test.engine, &one_more), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_QUEUE_FULL);
    hold_reads(false);
    order_progress(HELD + 1, 2);
    assert_false(test.blocked);
    for (int i = 1; i <= HELD; i++) {
        order(i, 0);
        wait_done(i);
    }
    assert_int_equal(script.optimizer_steps, HELD);
}

/* The same, called off instead, more than once: one ticket tells the others. */
static void a_save_is_called_off_behind_which_as_many_calls_wait_as_may(void **state)
{
    enum { SAVES = 4, HELD = 64 - SAVES };
    (void)state;
    begin_save();
    for (int i = 1; i <= HELD; i++)
        ask(i, MOE_STEP_OPTIMIZER, 8 + (uint64_t)i, 1);
    moe_engine_cancel_training(test.engine, &test.clients[0].work);
    for (int i = HELD + 1; i <= HELD + SAVES; i++) {
        ask(i, MOE_STEP_SAVE, 5, 1);
        moe_engine_cancel_training(test.engine, &test.clients[i].work);
    }
    wait_until(&test.announced_count, 1 + HELD + 1 + SAVES, &test.lock);
    assert_true(test.announced[HELD + 1].kind == MOE_STEP_SAVE);
    order_progress(HELD + 1, 2);
    hold_reads(false);
    order_progress(1 + HELD + 1 + SAVES, 3);
    assert_false(test.blocked);
    assert_int_equal(state_now().job, 0);
    assert_int_equal(test.announced_count, 1 + HELD + 1 + SAVES + 1);
}

static void a_save_that_nobody_waits_for_stops_copying(void **state)
{
    (void)state;
    begin_save();
    moe_engine_cancel_training(test.engine, &test.clients[0].work);
    wait_done(0);
    assert_int_equal(test.clients[0].status.code, MOE_CANCELLED);
    order_progress(1, 2); /* the others hear of it */
    assert_true(test.blocked);
    hold_reads(false);
    order_progress(2, 3); /* the copy is over */
    assert_false(test.blocked);
    assert_true(script.reads < 4);
    assert_int_equal(state_now().job, 0);
    assert_int_equal(test.announced_count, 3);
}

/* Of this slot or another: the Save is written from the trainers. What would change them waits
 * until it is written, and forward passes do not. */
static void a_save_without_room_for_a_copy_keeps_updates_away_until_it_is_written(void **state)
{
    (void)state;
    begin_save();
    moe_mutex_lock(&script.lock);
    script.no_read_memory = true;
    moe_mutex_unlock(&script.lock);
    hold_reads(false);
    order_progress(1, 2);
    assert_true(test.blocked);
    assert_int_equal(test.clients[0].done, 0);
    assert_int_equal(state_now().job, MOE_STEP_SAVE);
    forward(4, 0);
    order_forward(8);
    wait_until(&test.forward_done, 1, &test.lock);
    assert_ok(test.forward_status);
    /* There is no directory to write into: that is what the next part finds. */
    order_progress(2, 4);
    wait_done(0);
    assert_refused(test.clients[0].status, MOE_FAILED_PRECONDITION, MOE_REASON_IO);
    assert_false(test.blocked);
    assert_int_equal(state_now().job, 0);
}

static void what_is_under_an_adapter_is_read_and_nothing_is_written(void **state)
{
    (void)state;
    begin_save();
    hold_reads(false);
    order_progress(1, 2);
    assert_int_equal(script.reads_of_base, 3); /* of the one expert that is here */
    assert_int_equal(script.writes, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_engine(steps_run_while_a_save_copies_and_what_changes_the_state_may_come_after),
        with_engine(a_ticket_that_would_change_what_is_copied_ends_the_view),
        with_engine(a_view_that_ends_under_a_copy_is_followed_by_the_next_once_nobody_reads),
        with_engine(a_save_is_not_called_off_under_somebody_who_has_asked_for_it_too),
        with_engine(a_copy_ends_behind_which_as_many_calls_wait_as_may),
        with_engine(a_save_is_called_off_behind_which_as_many_calls_wait_as_may),
        with_engine(a_save_that_nobody_waits_for_stops_copying),
        with_engine(a_save_without_room_for_a_copy_keeps_updates_away_until_it_is_written),
        cmocka_unit_test_setup_teardown(what_is_under_an_adapter_is_read_and_nothing_is_written,
                                        open_adapters, close_engine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
