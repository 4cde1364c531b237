/* SPDX-License-Identifier: Apache-2.0 */
/* A Save that copies, in the engine and the training room, with reads that take as long as the test
 * wants: the work that runs or waits meanwhile, and the end of its view. */
#include "support/check.h"
#include "training_fixture.h"

#include <string.h>
#include <time.h>

static void block_reads(bool block)
{
    moe_mutex_lock(&script.lock);
    script.block_reads = block;
    pthread_cond_broadcast(&script.changed);
    moe_mutex_unlock(&script.lock);
}

/* Client 0's Save: its ticket is over when its copy has hardly begun. */
static void begin_save(void)
{
    block_reads(true);
    ask(0, MOE_STEP_SAVE, 5, 1);
    order(0, 0);
    wait_until(&test.finished_count, 1, &test.lock);
    wait_until(&script.reading, 1, &script.lock);
    assert_true(test.blocked);
    assert_int_equal(test.clients[0].done, 0);
    assert_int_equal(state_now().job, MOE_STEP_SAVE);
}

/* The progress ticket of announcement `n` is run, as the `finished`-th ticket. */
static void order_progress(int n, int finished)
{
    wait_until(&test.announced_count, n + 1, &test.lock);
    order(n, 0);
    wait_until(&test.finished_count, finished, &test.lock);
}

static void steps_run_while_a_save_copies_and_updates_come_after_it(void **state)
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
    block_reads(false);
    order_progress(2, 6);
    assert_false(test.blocked);
    assert_int_equal(test.block_count, 2);
    ask(2, MOE_STEP_OPTIMIZER, 9, 1);
    int n = test.announced[3].kind == MOE_STEP_OPTIMIZER
                ? 3
                : 4; /* another progress ticket, before or after */
    wait_until(&test.announced_count, n + 1, &test.lock);
    order(n, 0);
    wait_done(2);
    assert_ok(test.clients[2].status);
    assert_int_equal(test.clients[2].answer.outcome.backwards, 1);
    /* There is no directory to write into. The progress ticket may come after the step's. */
    wait_until(&test.announced_count, 5, &test.lock);
    order(7 - n, 0);
    wait_done(0);
    assert_refused(test.clients[0].status, MOE_FAILED_PRECONDITION, MOE_REASON_IO);
    assert_false(script.changed_while_read);
    assert_int_equal(state_now().job, 0);
}

static void a_weight_update_during_a_copy_ends_the_view(void **state)
{
    struct moe_train_digest digest;
    (void)state;
    begin_save();
    ask(1, MOE_STEP_OPTIMIZER, 9, 1);
    order(1, 0); /* a sequencer that does not block */
    wait_until(&test.finished_count, 2, &test.lock);
    assert_int_equal(test.last.code, MOE_INTERNAL);
    wait_done(0);
    wait_done(1);
    assert_refused(test.clients[0].status, MOE_UNAVAILABLE, MOE_REASON_REFORMING);
    assert_int_equal(script.optimizer_steps, 0);
    moe_train_read_digest(test.train, &digest);
    assert_int_equal(digest.inconsistent, 0);
    block_reads(false);
    begin_view();
    assert_false(script.changed_while_read);
}

static void *let_go(void *arg)
{
    (void)arg;
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    block_reads(false);
    return NULL;
}

/* A new view continues with the trainers, or recovers with new ones, once no copy reads them. */
static void after_a_view_ends_during_a_copy_the_next_waits_for_its_readers(void **state)
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
    /* The old one does not delay the next. */
    block_reads(true);
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

static void a_save_is_not_cancelled_while_another_client_waits(void **state)
{
    (void)state;
    begin_save();
    ask(1, MOE_STEP_SAVE, 5, 1); /* its ticket has not come */
    moe_engine_cancel_training(test.engine, &test.clients[0].work);
    wait_done(0);
    assert_int_equal(test.clients[0].status.code, MOE_CANCELLED);
    assert_int_equal(test.announced_count, 2); /* the other slots get nothing: a client waits */
    ask(2, MOE_STEP_SAVE, 6, 1);               /* waits for another job */
    moe_engine_cancel_training(test.engine, &test.clients[1].work);
    order_progress(3, 2);
    order(1, 0); /* it left before it joined, and the first is the last again */
    wait_done(1);
    assert_int_equal(test.clients[1].status.code, MOE_CANCELLED);
    order_progress(4, 4);
    block_reads(false);
    order_progress(5, 5);
    assert_int_equal(state_now().job, 0);
}

/* The queue behind the copy is full. The progress tickets that end the copy must not wait for it.
 */
static void a_copy_ends_with_a_full_queue_behind_it(void **state)
{
    enum { BLOCKED = 64 };
    (void)state;
    begin_save();
    for (int i = 1; i <= BLOCKED; i++)
        ask(i, MOE_STEP_OPTIMIZER, 8 + (uint64_t)i, 1);
    struct moe_train_work one_more = test.clients[1].work;
    assert_refused(moe_engine_submit_training(test.engine, &one_more), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_QUEUE_FULL);
    block_reads(false);
    order_progress(BLOCKED + 1, 2);
    assert_false(test.blocked);
    for (int i = 1; i <= BLOCKED; i++) {
        order(i, 0);
        wait_done(i);
    }
    assert_int_equal(script.optimizer_steps, BLOCKED);
}

/* The same with a cancellation, more than once: one ticket informs the other slots. */
static void a_save_is_cancelled_with_a_full_queue_behind_it(void **state)
{
    enum { SAVES = 4, BLOCKED = 64 - SAVES };
    (void)state;
    begin_save();
    for (int i = 1; i <= BLOCKED; i++)
        ask(i, MOE_STEP_OPTIMIZER, 8 + (uint64_t)i, 1);
    moe_engine_cancel_training(test.engine, &test.clients[0].work);
    for (int i = BLOCKED + 1; i <= BLOCKED + SAVES; i++) {
        ask(i, MOE_STEP_SAVE, 5, 1);
        moe_engine_cancel_training(test.engine, &test.clients[i].work);
    }
    wait_until(&test.announced_count, 1 + BLOCKED + 1 + SAVES, &test.lock);
    assert_true(test.announced[BLOCKED + 1].kind == MOE_STEP_SAVE);
    order_progress(BLOCKED + 1, 2);
    block_reads(false);
    order_progress(1 + BLOCKED + 1 + SAVES, 3);
    assert_false(test.blocked);
    assert_int_equal(state_now().job, 0);
    assert_int_equal(test.announced_count, 1 + BLOCKED + 1 + SAVES + 1);
}

static void a_save_without_a_waiting_client_stops_copying(void **state)
{
    (void)state;
    begin_save();
    moe_engine_cancel_training(test.engine, &test.clients[0].work);
    wait_done(0);
    assert_int_equal(test.clients[0].status.code, MOE_CANCELLED);
    order_progress(1, 2); /* a ticket informs the other slots */
    assert_true(test.blocked);
    block_reads(false);
    order_progress(2, 3); /* the copy is over */
    assert_false(test.blocked);
    assert_true(script.reads < 4);
    assert_int_equal(state_now().job, 0);
    assert_int_equal(test.announced_count, 3);
}

/* On this slot or another: the Save is written from the trainers. Calls that would change them wait
 * until it is written; forward passes do not. */
static void a_save_without_a_copy_blocks_updates_until_it_is_written(void **state)
{
    (void)state;
    begin_save();
    moe_mutex_lock(&script.lock);
    script.no_read_memory = true;
    moe_mutex_unlock(&script.lock);
    block_reads(false);
    order_progress(1, 2);
    assert_true(test.blocked);
    assert_int_equal(test.clients[0].done, 0);
    assert_int_equal(state_now().job, MOE_STEP_SAVE);
    forward(4, 0);
    order_forward(8);
    wait_until(&test.forward_done, 1, &test.lock);
    assert_ok(test.forward_status);
    /* The next part finds that there is no directory to write into. */
    order_progress(2, 4);
    wait_done(0);
    assert_refused(test.clients[0].status, MOE_FAILED_PRECONDITION, MOE_REASON_IO);
    assert_false(test.blocked);
    assert_int_equal(state_now().job, 0);
}

static void weights_under_an_adapter_are_read_and_not_written(void **state)
{
    (void)state;
    begin_save();
    block_reads(false);
    order_progress(1, 2);
    assert_int_equal(script.reads_of_base, 3); /* of the only expert of this slot */
    assert_int_equal(script.writes, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_engine(steps_run_while_a_save_copies_and_updates_come_after_it),
        with_engine(a_weight_update_during_a_copy_ends_the_view),
        with_engine(after_a_view_ends_during_a_copy_the_next_waits_for_its_readers),
        with_engine(a_save_is_not_cancelled_while_another_client_waits),
        with_engine(a_copy_ends_with_a_full_queue_behind_it),
        with_engine(a_save_is_cancelled_with_a_full_queue_behind_it),
        with_engine(a_save_without_a_waiting_client_stops_copying),
        with_engine(a_save_without_a_copy_blocks_updates_until_it_is_written),
        cmocka_unit_test_setup_teardown(weights_under_an_adapter_are_read_and_not_written,
                                        open_adapters, close_engine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
