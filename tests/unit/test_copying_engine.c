/* A Save that copies, in the engine and the training room, with reads that take as long as the test
 * wants: what goes on beside it, what waits, and what becomes of it when its view ends. */
#include "support/check.h"
#include "training_fixture.h"

#include <string.h>
#include <time.h>

static void hold_reads(bool hold)
{
    pthread_mutex_lock(&script.lock);
    script.hold_reads = hold;
    pthread_cond_broadcast(&script.changed);
    pthread_mutex_unlock(&script.lock);
}

/* Client 0's Save, whose ticket is over while its copy has hardly begun. */
static void begin_save(void)
{
    hold_reads(true);
    ask(0, MOE_STEP_SAVE, 5, 1);
    order(0, 0);
    wait_until(&test.finished_count, 1, &test.lock);
    wait_until(&script.reading, 1, &script.lock);
    assert_true(test.held);
    assert_int_equal(test.clients[0].done, 0);
    assert_int_equal(state_now().job, MOE_STEP_SAVE);
}

/* The poke of announcement `n` gets its ticket, which is the `finished`-th. */
static void order_poke(int n, int finished)
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
    assert_true(test.held);
    hold_reads(false);
    order_poke(2, 6);
    assert_false(test.held);
    assert_int_equal(test.held_count, 2);
    ask(2, MOE_STEP_OPTIMIZER, 9, 1);
    int n =
        test.announced[3].kind == MOE_STEP_OPTIMIZER ? 3 : 4; /* another poke, before or after */
    wait_until(&test.announced_count, n + 1, &test.lock);
    order(n, 0);
    wait_done(2);
    assert_ok(test.clients[2].status);
    assert_int_equal(test.clients[2].answer.outcome.backwards, 1);
    /* There is no directory to write into. The poke may come after the step's ticket. */
    wait_until(&test.announced_count, 5, &test.lock);
    order(7 - n, 0);
    wait_done(0);
    assert_refused(test.clients[0].status, MOE_FAILED_PRECONDITION, MOE_REASON_IO);
    assert_false(script.changed_while_read);
    assert_int_equal(state_now().job, 0);
}

static void a_ticket_that_would_change_what_is_copied_ends_the_view(void **state)
{
    struct moe_train_stand stand;
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
    moe_train_stand(test.train, &stand);
    assert_int_equal(stand.torn, 0);
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
    assert_true(test.held);
    moe_engine_stop_view(test.engine);
    assert_int_equal(pthread_create(&other, NULL, let_go, NULL), 0);
    moe_train_detach(test.train);
    pthread_join(other, NULL);
    assert_false(script.changed_while_read);
}

static void a_save_that_nobody_waits_for_stops_copying(void **state)
{
    (void)state;
    begin_save();
    moe_engine_cancel_training(test.engine, &test.clients[0].work);
    wait_done(0);
    assert_int_equal(test.clients[0].status.code, MOE_CANCELLED);
    order_poke(1, 2); /* the others hear of it */
    assert_true(test.held);
    hold_reads(false);
    order_poke(2, 3); /* the copy is over */
    assert_false(test.held);
    assert_true(script.reads < 4);
    assert_int_equal(state_now().job, 0);
    assert_int_equal(test.announced_count, 3);
}

/* Of this slot or another: the copy is given back, and the Save is written from the trainers in the
 * turn that finds this out, before anything may change them. */
static void a_save_without_room_for_a_copy_is_written_where_all_find_out(void **state)
{
    (void)state;
    begin_save();
    pthread_mutex_lock(&script.lock);
    script.no_read_memory = true;
    pthread_mutex_unlock(&script.lock);
    hold_reads(false);
    order_poke(1, 2);
    wait_done(0);
    /* There is no directory to write into: said in that same turn. */
    assert_refused(test.clients[0].status, MOE_FAILED_PRECONDITION, MOE_REASON_IO);
    assert_false(test.held);
    assert_int_equal(state_now().job, 0);
    assert_int_equal(test.announced_count, 2);
}

static void what_is_under_an_adapter_is_read_and_nothing_is_written(void **state)
{
    (void)state;
    begin_save();
    hold_reads(false);
    order_poke(1, 2);
    assert_int_equal(script.reads_of_base, 3); /* of the one expert that is here */
    assert_int_equal(script.writes, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_engine(steps_run_while_a_save_copies_and_what_changes_the_state_may_come_after),
        with_engine(a_ticket_that_would_change_what_is_copied_ends_the_view),
        with_engine(a_view_that_ends_under_a_copy_is_followed_by_the_next_once_nobody_reads),
        with_engine(a_save_that_nobody_waits_for_stops_copying),
        with_engine(a_save_without_room_for_a_copy_is_written_where_all_find_out),
        cmocka_unit_test_setup_teardown(what_is_under_an_adapter_is_read_and_nothing_is_written,
                                        open_adapters, close_engine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
