/* SPDX-License-Identifier: Apache-2.0 */
/* Training tickets in the engine, with everything of the training room real and the backend a
 * script: calls in flight when a view ends, repeats in the next ticket, versions, exclusive
 * tickets, and what members of a group decide about where they digest. */
#include "base/clock.h"
#include "support/check.h"
#include "support/random.h"
#include "training/job_machine.h"
#include "training/state.h" /* from within: progress tickets */
#include "training_fixture.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* As the service does with a pass that was run. */
static void keep_answer(int i)
{
    struct moe_pass_record *r;
    assert_ok(moe_pass_store_reserve(moe_train_answers(test.train), 16, moe_clock_ns(), &r));
    moe_pass_store_put(moe_train_answers(test.train), r, "s", test.clients[i].call.id,
                       moe_clock_ns());
}

/* --------------------------------------------------------------------------- promises */

static void a_backward_brings_its_tensors_where_it_was_asked_and_none_elsewhere(void **state)
{
    (void)state;
    ask(0, MOE_STEP_BACKWARD, 1, 5);
    order(0, 0);
    wait_done(0);
    assert_ok(test.clients[0].status);
    assert_true(test.clients[0].dx[0] == 10);
    assert_true(test.clients[0].answer.outcome.number == 0.25);
    assert_int_equal(test.clients[0].answer.outcome.weights_version, 1);
    /* The same call of another slot: a repeat, which nothing is run for. */
    order(0, 1);
    wait_until(&test.finished_count, 2, &test.lock);
    assert_int_equal(script.backwards, 1);
    /* Another call of another slot runs without tokens of ours. */
    struct moe_train_call other = test.clients[0].call;
    other.id = 2;
    moe_train_call_pack(&other, test.announced[0].descriptor.body,
                        &test.announced[0].descriptor.length);
    order(0, 1);
    wait_until(&test.finished_count, 3, &test.lock);
    assert_int_equal(script.backwards, 2);
    assert_int_equal(state_now().backwards, 2);
}

static void a_repeat_in_the_next_ticket_is_one_though_the_first_still_runs(void **state)
{
    (void)state;
    hold_steps(true);
    ask(0, MOE_STEP_BACKWARD, 1, 5);
    ask(1, MOE_STEP_BACKWARD, 1, 5);
    ask(2, MOE_STEP_BACKWARD, 1, 6);
    for (int i = 0; i < 3; i++)
        order(i, 0);
    wait_until(&script.backwards, 1, &script.lock);
    keep_answer(0);
    hold_steps(false);
    for (int i = 0; i < 3; i++)
        wait_done(i);
    assert_ok(test.clients[0].status);
    assert_ok(test.clients[1].status);
    assert_true(test.clients[1].answer.repeated && test.clients[1].answer.record != NULL);
    moe_pass_record_unref(test.clients[1].answer.record);
    assert_refused(test.clients[2].status, MOE_ALREADY_EXISTS, MOE_REASON_ID_REUSED);
    assert_int_equal(script.backwards, 1);
    assert_int_equal(state_now().backwards, 1);
}

static void
a_call_in_flight_when_the_view_ends_fails_and_leaves_the_state_inconsistent(void **state)
{
    (void)state;
    struct moe_train_digest digest;
    hold_steps(true);
    ask(0, MOE_STEP_BACKWARD, 1, 5);
    ask(1, MOE_STEP_BACKWARD, 2, 5); /* its ticket never comes */
    order(0, 0);
    wait_until(&script.backwards, 1, &script.lock);
    moe_engine_stop_view(test.engine);
    wait_done(0);
    assert_refused(test.clients[0].status, MOE_UNAVAILABLE, MOE_REASON_REFORMING);
    assert_true(test.clients[0].status.retry_after_ms > 0);
    assert_int_equal(test.clients[1].done, 0);
    moe_train_read_digest(test.train, &digest);
    assert_int_equal(digest.inconsistent, 1);
    uint64_t lineage = digest.lineage, version = digest.weights_version;
    begin_view();
    assert_true(state_now().lineage > lineage && state_now().weights_version > version);
    assert_int_equal(state_now().backwards, 0);
    /* The one that waited was announced again, once; it is run now, and so is the first one's
     * repeat. */
    assert_int_equal(test.announced_count, 3);
    ask(2, MOE_STEP_BACKWARD, 1, 5);
    order(2, 0);
    order(3, 0);
    wait_done(1);
    wait_done(2);
    assert_ok(test.clients[1].status);
    assert_ok(test.clients[2].status);
    assert_false(test.clients[2].answer.repeated);
    assert_int_equal(state_now().backwards, 2);
}

static void a_view_that_ends_between_calls_costs_nothing(void **state)
{
    (void)state;
    ask(0, MOE_STEP_BACKWARD, 1, 5);
    order(0, 0);
    wait_done(0);
    uint64_t lineage = state_now().lineage;
    moe_engine_stop_view(test.engine);
    ask(1, MOE_STEP_OPTIMIZER, 1, 0); /* while there is no view */
    assert_int_equal(test.announced_count, 1);
    begin_view();
    assert_int_equal(state_now().lineage, lineage);
    assert_int_equal(state_now().backwards, 1);
    assert_int_equal(test.announced_count, 2);
    order(1, 0);
    wait_done(1);
    assert_ok(test.clients[1].status);
    assert_int_equal(test.clients[1].answer.outcome.backwards, 1);
    assert_int_equal(test.clients[1].answer.outcome.weights_version, 2);
}

static void a_step_changes_the_version_for_all_that_begins_later(void **state)
{
    (void)state;
    /* 20 tokens: one step before the change, which then has to be done again. */
    forward(20, 0);
    order_forward(8);
    wait_until(&test.finished_count, 1, &test.lock);
    assert_int_equal(announced_tokens, 20);
    ask(0, MOE_STEP_OPTIMIZER, 1, 0);
    order(0, 0);
    wait_until(&test.finished_count, 2, &test.lock);
    assert_int_equal(announced_tokens, 28);
    for (int i = 0; i < 3; i++)
        order_forward(8);
    wait_until(&test.forward_done, 1, &test.lock);
    assert_ok(test.forward_status);
    assert_int_equal(test.forward.answered_version, 2);
    assert_int_equal(test.forward.steps, 3);
    assert_int_equal(moe_engine_weights_version(test.engine), 2);
    /* One that is pinned to the version that ends. */
    forward(4, 2);
    ask(1, MOE_STEP_OPTIMIZER, 2, 0);
    order(1, 0);
    wait_until(&test.forward_done, 2, &test.lock);
    assert_refused(test.forward_status, MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH);
    test.forward.weights_version = 2;
    assert_refused(moe_engine_submit(test.engine, &test.forward), MOE_FAILED_PRECONDITION,
                   MOE_REASON_VERSION_MISMATCH);
}

static void an_exclusive_ticket_runs_alone(void **state)
{
    (void)state;
    hold_steps(true);
    ask(0, MOE_STEP_BACKWARD, 1, 5);
    ask(1, MOE_STEP_OPTIMIZER, 1, 0);
    ask(2, MOE_STEP_BACKWARD, 2, 5);
    for (int i = 0; i < 3; i++)
        order(i, 0);
    wait_until(&script.backwards, 1, &script.lock);
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    assert_int_equal(script.optimizer_steps, 0);
    assert_int_equal(script.backwards, 1);
    hold_steps(false);
    for (int i = 0; i < 3; i++)
        wait_done(i);
    assert_int_equal(test.clients[0].answer.outcome.weights_version, 1);
    assert_int_equal(test.clients[1].answer.outcome.weights_version, 2);
    assert_int_equal(test.clients[2].answer.outcome.weights_version, 2);
}

static void a_step_that_is_not_finite_changes_no_version(void **state)
{
    (void)state;
    script.nonfinite = true;
    ask(0, MOE_STEP_OPTIMIZER, 4, 0);
    order(0, 0);
    wait_done(0);
    assert_ok(test.clients[0].status);
    assert_true(test.clients[0].answer.outcome.nonfinite);
    assert_int_equal(test.clients[0].answer.outcome.weights_version, 1);
    assert_int_equal(test.clients[0].answer.outcome.steps, 0);
    ask(1, MOE_STEP_OPTIMIZER, 4, 0);
    order(1, 0);
    wait_done(1);
    assert_true(test.clients[1].answer.repeated && test.clients[1].answer.outcome.nonfinite);
    assert_int_equal(script.optimizer_steps, 1);
    assert_int_equal(state_now().last_step_id, 4);
}

static void a_bad_token_fails_its_call_which_has_been_run(void **state)
{
    (void)state;
    script.bad_token = true;
    ask(0, MOE_STEP_BACKWARD, 1, 5);
    order(0, 0);
    wait_done(0);
    assert_refused(test.clients[0].status, MOE_INVALID_ARGUMENT, MOE_REASON_NONFINITE_LOGITS);
    assert_true(test.clients[0].answer.outcome.epoch != 0);
    ask(1, MOE_STEP_BACKWARD, 1, 5);
    order(1, 0);
    wait_done(1); /* no cache has the answer */
    assert_refused(test.clients[1].status, MOE_ALREADY_EXISTS, MOE_REASON_ANSWER_GONE);
    assert_int_equal(script.backwards, 1);
}

static void a_call_that_nobody_waits_for_is_run_once_it_was_announced(void **state)
{
    (void)state;
    ask(0, MOE_STEP_BACKWARD, 1, 5);
    moe_engine_cancel_training(test.engine, &test.clients[0].work);
    order(0, 0);
    wait_done(0);
    assert_ok(test.clients[0].status);
    moe_engine_stop_view(test.engine);
    ask(1, MOE_STEP_BACKWARD, 2, 5);
    moe_engine_cancel_training(test.engine, &test.clients[1].work);
    wait_done(1);
    assert_refused(test.clients[1].status, MOE_CANCELLED, MOE_REASON_NONE);
    assert_int_equal(script.backwards, 1);
}

static void a_ticket_for_a_call_of_ours_that_we_never_made_ends_the_view(void **state)
{
    (void)state;
    ask(0, MOE_STEP_BACKWARD, 1, 5);
    test.announced[0].descriptor.number += 7;
    order(0, 0);
    wait_until(&test.finished_count, 1, &test.lock);
    assert_refused(test.last, MOE_INTERNAL, MOE_REASON_NONE);
    assert_int_equal(script.backwards, 0);
    begin_view();
    test.announced[1].descriptor.length = 3;
    order(1, 1);
    wait_until(&test.finished_count, 2, &test.lock);
    assert_refused(test.last, MOE_INTERNAL, MOE_REASON_MALFORMED);
    begin_view();
    test.announced[2].dtype = MOE_DTYPE_BF16; /* than the tensors have */
    order(2, 0);
    wait_until(&test.finished_count, 3, &test.lock);
    assert_refused(test.last, MOE_INTERNAL, MOE_REASON_NONE);
    assert_int_equal(script.backwards, 0);
    struct moe_train_digest digest;
    moe_train_read_digest(test.train, &digest);
    assert_int_equal(digest.inconsistent, 0); /* none had begun to change anything */
}

static void assert_nothing_happened(void)
{
    struct moe_train_digest digest;
    moe_train_read_digest(test.train, &digest);
    assert_int_equal(digest.inconsistent, 0);
    assert_int_equal(digest.calls, 0);
    assert_int_equal(state_now().backwards, 0);
    assert_int_equal(state_now().weights_version, 1);
    assert_ok(test.last); /* the view goes on */
}

static void a_pass_that_all_refuse_has_not_happened(void **state)
{
    (void)state;
    script.refuse = true;
    hold_steps(true);
    ask(0, MOE_STEP_BACKWARD, 1, 5);
    ask(1, MOE_STEP_BACKWARD, 1, 5); /* asked again while the first still runs */
    forward(4, 0);
    order(0, 0);
    order_forward(4); /* while the refused one runs */
    order(1, 0);
    wait_until(&script.forwards, 1, &script.lock);
    hold_steps(false);
    for (int i = 0; i < 2; i++) {
        wait_done(i);
        assert_refused(test.clients[i].status, MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY);
        assert_int_equal(test.clients[i].answer.outcome.epoch, 0); /* there is no answer to keep */
    }
    wait_until(&test.forward_done, 1, &test.lock);
    assert_ok(test.forward_status);
    assert_nothing_happened();
    assert_int_equal(script.backwards, 2); /* the second was no repeat */
    script.refuse = false;
    ask(2, MOE_STEP_BACKWARD, 1, 6); /* the id is free, for other content too */
    order(2, 0);
    wait_done(2);
    assert_ok(test.clients[2].status);
    assert_false(test.clients[2].answer.repeated);
    assert_int_equal(state_now().backwards, 1);
}

static void an_optimizer_step_that_all_refuse_has_not_happened(void **state)
{
    (void)state;
    struct moe_train_digest digest;
    script.refuse = true;
    ask(0, MOE_STEP_OPTIMIZER, 1, 0);
    order(0, 0);
    wait_done(0);
    assert_refused(test.clients[0].status, MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY);
    assert_nothing_happened();
    script.refuse = false;
    ask(1, MOE_STEP_OPTIMIZER, 1, 0);
    order(1, 0);
    wait_done(1);
    assert_ok(test.clients[1].status);
    assert_false(test.clients[1].answer.repeated);
    assert_int_equal(test.clients[1].answer.outcome.weights_version, 2);
    /* Refused here and done elsewhere: the slots no longer have one state. */
    script.refuse = script.peer_has_done = true;
    ask(2, MOE_STEP_OPTIMIZER, 2, 0);
    order(2, 0);
    wait_done(2);
    assert_refused(test.clients[2].status, MOE_UNAVAILABLE, MOE_REASON_REFORMING);
    moe_train_read_digest(test.train, &digest);
    assert_int_equal(digest.inconsistent, 1);
}

static void passes_run_one_after_the_other(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++)
        ask(i, MOE_STEP_BACKWARD, (uint64_t)i + 1, 5);
    for (int i = 0; i < 6; i++)
        order(i, 0);
    for (int i = 0; i < 6; i++)
        wait_done(i);
    assert_false(script.passes_overlap);
    assert_int_equal(script.backwards, 6);
}

/* The ledger has no room for a call below all of a full session's; its answer is whole even so. */
static void hold_passes(bool hold)
{
    moe_mutex_lock(&script.lock);
    script.hold_passes = hold;
    pthread_cond_broadcast(&script.changed);
    moe_mutex_unlock(&script.lock);
}

static void a_cancelled_call_ends_at_once_while_a_pass_and_a_step_run(void **state)
{
    (void)state;
    hold_passes(true);
    ask(0, MOE_STEP_BACKWARD, 1, 5);
    order(0, 0);
    order_forward(8);
    wait_until(&script.backwards, 1, &script.lock);
    wait_until(&script.forwards, 1, &script.lock);
    forward(8, 0); /* waits for a ticket */
    moe_engine_cancel(test.engine, &test.forward);
    wait_until(&test.forward_done, 1, &test.lock);
    assert_int_equal(test.forward_status.code, MOE_CANCELLED);
    assert_int_equal(test.clients[0].done, 0);
    hold_passes(false);
    wait_done(0);
    assert_ok(test.clients[0].status);
}

static void a_call_that_is_forgotten_at_once_is_answered_whole(void **state)
{
    struct moe_call_exec x = {.call = {.kind = MOE_STEP_BACKWARD, .session = "full"}};
    struct moe_ticket ticket = {.epoch = test.epoch, .layer = 7, .kind = MOE_STEP_BACKWARD};
    struct moe_trainer *trainer;
    (void)state;
    for (uint64_t i = 0; i <= MOE_LEDGER_CALLS; i++) {
        x.call.id = i < MOE_LEDGER_CALLS ? 1000 + i : 1;
        assert_ok(moe_train__begin(test.train, &ticket, &x, &trainer));
        assert_true(x.run);
        assert_ok(moe_train__end(test.train, &ticket, &x));
        assert_int_equal(x.answer.outcome.epoch, test.epoch);
        assert_int_equal(x.answer.outcome.weights_version, 1);
        assert_int_equal(x.answer.outcome.lineage, state_now().lineage);
    }
    assert_ok(moe_train__begin(test.train, &ticket, &x, &trainer));
    assert_refused(x.refusal, MOE_ALREADY_EXISTS, MOE_REASON_ID_TOO_OLD);
}

static void a_progress_request_goes_with_its_view(void **state)
{
    const struct moe_train_call call = {.kind = MOE_STEP_SAVE, .id = 1, .is_progress = true};
    struct moe_call_descriptor descriptor;
    (void)state;
    moe_train_call_pack(&call, descriptor.body, &descriptor.length);
    assert_true(test.train->request(test.train->engine, MOE_STEP_SAVE, &descriptor));
    assert_int_equal(test.announced_count, 1);
    moe_engine_stop_view(test.engine);
    /* No client waits for it, so neither does a worker that leaves. */
    assert_true(moe_engine_drain(test.engine, moe_clock_ns() + 10 * MOE_NS_PER_S));
    begin_view();
    assert_int_equal(test.announced_count, 1);
}

/* A Load that ends at once, because there is no such checkpoint; its end waits for a ticket. */
static void begin_load(void)
{
    ask(0, MOE_STEP_LOAD, 5, 1);
    order(0, 0);
    wait_until(&test.announced_count, 2,
               &test.lock); /* its part is over: it asks for a progress ticket */
    assert_int_equal(test.clients[0].done, 0);
}

static void a_view_that_ends_while_a_load_only_reads_tears_nothing(void **state)
{
    struct moe_train_digest digest;
    (void)state;
    begin_load();
    moe_mutex_lock(&script.lock);
    script.aborted = true;
    moe_mutex_unlock(&script.lock);
    order(1, 0); /* how far are you? But the other slot is gone */
    wait_done(0);
    assert_refused(test.clients[0].status, MOE_UNAVAILABLE, MOE_REASON_REFORMING);
    moe_train_read_digest(test.train, &digest);
    assert_int_equal(digest.inconsistent, 0);
}

static void more_calls_than_may_wait_are_refused(void **state)
{
    (void)state;
    static struct moe_train_work extra[70];
    struct moe_status st = moe_ok();
    int accepted = 0;
    ask(0, MOE_STEP_BACKWARD, 1, 5);
    moe_engine_stop_view(test.engine);
    for (int i = 0; i < 70 && !moe_failed(&st); i++) {
        extra[i] = test.clients[0].work;
        extra[i].user = &test.clients[1];
        st = moe_engine_submit_training(test.engine, &extra[i]);
        accepted += !moe_failed(&st);
    }
    assert_refused(st, MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL);
    assert_int_equal(accepted, 63);
    moe_engine_fail_queued(test.engine, moe_error(MOE_UNAVAILABLE, MOE_REASON_REFORMING, "gone"));
    wait_until(&test.clients[1].done, 63, &test.lock);
    wait_done(0);
    assert_refused(test.clients[0].status, MOE_UNAVAILABLE, MOE_REASON_REFORMING);
}

/* -------------------------------------------------------------- what a phase came to */

static void lack_of_memory_is_the_outcome_only_without_another_reason(void **state)
{
    const struct moe_status poor =
        moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no room");
    const struct moe_status busy =
        moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SAVE_RUNNING, "busy");
    const struct moe_status full = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_IO, "full");
    struct moe_job_report all[MOE_MAX_SLOTS] = {0};
    uint64_t bytes;
    (void)state;
    assert_ok(moe_job_conclude(all, 7, &bytes));
    all[2] = moe_job_report_of(&poor);
    struct moe_status st = moe_job_conclude(all, 7, &bytes);
    assert_int_equal(st.reason, MOE_REASON_OUT_OF_MEMORY);
    all[0] = moe_job_report_of(&poor);
    all[1] = moe_job_report_of(&busy);
    assert_refused(moe_job_conclude(all, 7, &bytes), MOE_FAILED_PRECONDITION,
                   MOE_REASON_SAVE_RUNNING);
    all[2] = moe_job_report_of(&full); /* higher than the first reason */
    assert_refused(moe_job_conclude(all, 7, &bytes), MOE_FAILED_PRECONDITION,
                   MOE_REASON_SAVE_RUNNING);
    all[1] = moe_job_report_of(&poor);
    assert_refused(moe_job_conclude(all, 7, &bytes), MOE_RESOURCE_EXHAUSTED, MOE_REASON_IO);
    assert_refused(moe_job_conclude(all, 3, &bytes), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_OUT_OF_MEMORY);
}

/* ------------------------------------------------------------- where a group digests */

static struct moe_train_digest digest_at(uint64_t lineage, uint64_t version, uint64_t calls,
                                         uint64_t record, const char *checkpoint)
{
    struct moe_train_digest s = {.config = 1,
                                 .lineage = lineage,
                                 .weights_version = version,
                                 .calls = calls,
                                 .record = record};
    strcpy(s.checkpoint, checkpoint);
    return s;
}

/* An operator names it between the exchange of digests and the end of the attempt. */
static void a_choice_that_comes_while_a_group_forms_is_for_the_next_attempt(void **state)
{
    struct moe_train_digest digests[MOE_MAX_SLOTS];
    struct moe_train_recovery d;
    (void)state;
    moe_train_read_digest(test.train, &digests[0]);
    assert_ok(moe_train_choose_recovery(digests, 1, &d));
    moe_train_set_recovery_target(test.train, "first");
    assert_ok(moe_train_adopt(test.train, &d, 0, 2, 3));
    moe_train_read_digest(test.train, &digests[0]);
    assert_int_equal(digests[0].has_target, 1);
    assert_string_equal(digests[0].target, "first");
    assert_refused(moe_train_fence(test.train, 5, 9), MOE_FAILED_PRECONDITION,
                   MOE_REASON_IO); /* there is no directory */
    moe_train_read_digest(test.train, &digests[0]);
    assert_true(digests[0].group == 0 && digests[0].epoch == 0);
    moe_train_in_force(test.train); /* it did not have to go back */
    moe_train_read_digest(test.train, &digests[0]);
    assert_int_equal(digests[0].has_target, 0);
    assert_true(digests[0].group == 5 && digests[0].epoch == 9);
}

static void a_group_decides_together_where_to_go_on(void **state)
{
    (void)state;
    struct moe_train_digest s[MOE_MAX_SLOTS] = {0};
    struct moe_train_recovery d;
    const struct moe_train_digest new = digest_at(0, 1, 0, 0, ""),
                                  far = digest_at(4, 9, 20, 77, "b"),
                                  behind = digest_at(4, 8, 19, 70, "a");
    s[0] = s[2] = new; /* all new: no reload, version 1 */
    assert_ok(moe_train_choose_recovery(s, 5, &d));
    assert_false(d.restart);
    assert_int_equal(d.lineage, 1);
    assert_int_equal(d.weights_version, 1);
    s[0].nonce = UINT64_MAX - 1; /* a random number of a process: another group begins elsewhere */
    assert_ok(moe_train_choose_recovery(s, 5, &d));
    assert_true(d.lineage > 1 && d.lineage <= UINT64_C(1) << 32);
    s[0] = s[2] = far; /* all the same: nothing changes */
    assert_ok(moe_train_choose_recovery(s, 5, &d));
    assert_false(d.restart);
    assert_int_equal(d.lineage, 4);
    assert_int_equal(d.weights_version, 9);
    s[0].unsaved = 3; /* one has not yet taken note of the checkpoint that all of it is in */
    s[2].unsaved = 1;
    strcpy(s[2].checkpoint, "c");
    assert_ok(moe_train_choose_recovery(s, 5, &d));
    assert_false(d.restart);
    assert_string_equal(d.checkpoint, "c");
    assert_int_equal(d.lost_steps, 1);
    s[0] = far;
    s[2] = new; /* one is new: back to what the other knows */
    assert_ok(moe_train_choose_recovery(s, 5, &d));
    assert_true(d.restart);
    assert_int_equal(d.lineage, 5);
    assert_int_equal(d.weights_version, 10);
    assert_string_equal(d.checkpoint, "b");
    s[2] = behind; /* one missed the last call */
    assert_ok(moe_train_choose_recovery(s, 5, &d));
    assert_true(d.restart);
    assert_int_equal(d.lineage, 5); /* above all */
    s[0].nonce = 41;                /* and above what one that is lost may have reported */
    assert_ok(moe_train_choose_recovery(s, 5, &d));
    assert_int_equal(d.lineage, 46);
    assert_string_equal(d.checkpoint, "b");
    s[2] = far;
    s[2].record++; /* as many calls, but others */
    assert_ok(moe_train_choose_recovery(s, 5, &d));
    assert_true(d.restart);
    s[2] = far;
    s[0].inconsistent = 1;
    assert_ok(moe_train_choose_recovery(s, 5, &d));
    assert_true(d.restart);
    assert_string_equal(d.checkpoint, "b");
    assert_false(d.explicit_load);
    s[0].explicit_load = 1; /* it had loaded it, by its name: retention has to know */
    assert_ok(moe_train_choose_recovery(s, 5, &d));
    assert_true(d.explicit_load);
    s[0].explicit_load = 0;
    s[2].has_target = 1; /* an operator has given one of them a target */
    strcpy(s[2].target, "a");
    assert_ok(moe_train_choose_recovery(s, 5, &d));
    assert_string_equal(d.checkpoint, "a");
    assert_true(d.explicit_load);
    s[0].has_target = 1; /* and the other something else */
    assert_refused(moe_train_choose_recovery(s, 5, &d), MOE_FAILED_PRECONDITION,
                   MOE_REASON_CANNOT_GO_BACK);
    s[2].target[0] = '\0'; /* both: the model as loaded */
    assert_ok(moe_train_choose_recovery(s, 5, &d));
    assert_string_equal(d.checkpoint, "");
    s[0] = s[2] = far; /* who need not go back does not */
    s[0].has_target = 1;
    assert_ok(moe_train_choose_recovery(s, 5, &d));
    assert_false(d.restart);
    s[0] = new;
    s[0].config = 2;
    assert_refused(moe_train_choose_recovery(s, 5, &d), MOE_FAILED_PRECONDITION,
                   MOE_REASON_CONFIG_INVALID);
}

/* Three slots, in each of their orders. */
static struct moe_train_recovery recovery_of(const struct moe_train_digest members[3])
{
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                     {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    struct moe_train_digest digests[MOE_MAX_SLOTS] = {0};
    struct moe_train_recovery first, d;
    for (size_t o = 0; o < 6; o++) {
        for (size_t s = 0; s < 3; s++)
            digests[s] = members[orders[o][s]];
        assert_ok(moe_train_choose_recovery(digests, 7, &d));
        assert_int_equal(d.heirs & ~UINT64_C(7), 0);
        d.heirs = 0; /* slots, of this order */
        first = o == 0 ? d : first;
        assert_memory_equal(&d, &first, sizeof d);
    }
    return first;
}

/* Workers of an ended group come back to one that began meanwhile: lineages of both are random. */
static void a_checkpoint_counts_more_than_a_lineage_that_began_apart(void **state)
{
    (void)state;
    struct moe_train_digest orphan = digest_at(1000, 7, 10, 77, "p1");
    orphan.unsaved = 3;
    for (uint64_t lineage = 999; lineage <= 1001; lineage += 2) {
        const struct moe_train_digest untouched = digest_at(lineage, 1, 0, 0, "");
        struct moe_train_digest trained = digest_at(lineage, 6, 9, 70, "");
        struct moe_train_recovery d =
            recovery_of((struct moe_train_digest[]){untouched, orphan, untouched});
        assert_true(d.restart);
        assert_string_equal(d.checkpoint, "p1");
        assert_int_equal(d.lost_steps, 3);
        assert_true(d.lineage > 1000 && d.lineage > lineage);
        trained.unsaved = 5;
        d = recovery_of((struct moe_train_digest[]){trained, orphan, untouched});
        assert_string_equal(d.checkpoint, "p1");
        assert_int_equal(d.lost_steps, 5);
        trained.explicit_load = 1; /* an operator chose the model as loaded */
        d = recovery_of((struct moe_train_digest[]){trained, orphan, trained});
        assert_string_equal(d.checkpoint, lineage > 1000 ? "" : "p1");
        assert_int_equal(d.lost_steps, 5);
    }
    struct moe_train_digest behind = orphan; /* same state, but it has not noted p1 */
    behind.inconsistent = 1;
    behind.unsaved = 6;
    behind.checkpoint[0] = '\0';
    const struct moe_train_recovery d =
        recovery_of((struct moe_train_digest[]){behind, orphan, orphan});
    assert_string_equal(d.checkpoint, "p1");
    assert_int_equal(d.lost_steps, 3);
}

static bool knows(const struct moe_train_digest *d)
{
    return d->checkpoint[0] != '\0' || d->explicit_load != 0;
}

static struct moe_train_digest random_member(void)
{
    static const char *const names[] = {"", "a", "b", "c"};
    struct moe_train_digest d = digest_at(1 + random_below(3), 2 + random_below(3), random_below(4),
                                          random_below(2), names[random_below(4)]);
    d.group = 1 + random_below(2);
    d.epoch = 1 + random_below(4);
    d.unsaved = random_below(3);
    d.explicit_load = d.checkpoint[0] == '\0' && random_below(4) == 0;
    return d;
}

/* A member of the same group knows `checkpoint`, from the same view or a later one. */
static bool has_later(const struct moe_train_digest s[3], const struct moe_train_digest *than,
                      const char *checkpoint)
{
    bool found = false;
    for (int i = 0; i < 3; i++)
        found = found || (knows(&s[i]) && s[i].group == than->group && s[i].epoch >= than->epoch &&
                          strcmp(s[i].checkpoint, checkpoint) == 0);
    return found;
}

/* Members that a partition or a lost coordinator had separated, in each order. The latest view of
 * their group decides; between two groups, an operator does. */
static void the_latest_view_decides_and_between_groups_an_operator(void **state)
{
    int refused = 0, back = 0;
    (void)state;
    for (int run = 0; run < 20000; run++) {
        struct moe_train_digest s[MOE_MAX_SLOTS] = {0}, turned[MOE_MAX_SLOTS] = {0};
        struct moe_train_recovery d, e;
        bool apart = false;
        for (int i = 0; i < 3; i++)
            s[i] = random_member();
        for (int i = 0; i < 3; i++) {
            turned[2 - i] = s[i];
            for (int j = 0; j < i; j++)
                apart = apart || (knows(&s[i]) && knows(&s[j]) && s[i].group != s[j].group &&
                                  strcmp(s[i].checkpoint, s[j].checkpoint) != 0);
        }
        struct moe_status st = moe_train_choose_recovery(s, 7, &d);
        struct moe_status again = moe_train_choose_recovery(turned, 7, &e);
        assert_int_equal(st.code, again.code);
        if (moe_failed(&st)) {
            assert_true(apart && st.reason == MOE_REASON_CANNOT_GO_BACK);
            s[random_below(3)].has_target = 1; /* the model as loaded */
            assert_ok(moe_train_choose_recovery(s, 7, &d));
            assert_string_equal(d.checkpoint, "");
            refused++;
            continue;
        }
        assert_string_equal(d.checkpoint, e.checkpoint);
        if (!d.restart)
            continue;
        for (int i = 0; i < 3; i++)
            assert_true(!knows(&s[i]) || strcmp(s[i].checkpoint, d.checkpoint) == 0 ||
                        has_later(s, &s[i], d.checkpoint));
        back++;
    }
    print_message("  %d went back, %d were refused\n", back, refused);
    assert_true(refused > 1000 && back > 1000);
    struct moe_train_digest s[MOE_MAX_SLOTS] = {digest_at(9, 2, 1, 1, "old"),
                                                digest_at(3, 2, 1, 1, "new")};
    struct moe_train_recovery d;
    s[0].group = s[1].group = 1;
    s[0].epoch = 4; /* cut off, with a higher lineage */
    s[1].epoch = 5;
    assert_ok(moe_train_choose_recovery(s, 3, &d));
    assert_string_equal(d.checkpoint, "new");
    s[0].group = 2;
    assert_refused(moe_train_choose_recovery(s, 3, &d), MOE_FAILED_PRECONDITION,
                   MOE_REASON_CANNOT_GO_BACK);
}

static void an_operators_choice_of_the_model_is_known_to_the_next_recovery(void **state)
{
    struct moe_train_digest digest;
    const struct moe_train_recovery chosen = {
        .restart = true, .lineage = 5, .weights_version = 2, .explicit_load = true};
    struct moe_train_recovery fallback = chosen;
    (void)state;
    assert_ok(moe_train_adopt(test.train, &chosen, 0, 2, 3));
    moe_train_read_digest(test.train, &digest);
    assert_int_equal(digest.explicit_load, 1);
    fallback.explicit_load = false;
    assert_ok(moe_train_adopt(test.train, &fallback, 0, 2, 3));
    moe_train_read_digest(test.train, &digest);
    assert_int_equal(digest.explicit_load, 0);
}

static void what_was_loaded_is_remembered_latest_first(void **state)
{
    (void)state;
    struct moe_checkpoint_explicit_loads explicit_loads = {0}, other = {0};
    char name[MOE_CHECKPOINT_NAME_MAX + 1];
    for (int i = 0; i <= MOE_CHECKPOINT_EXPLICIT_LOADS_MAX; i++) {
        snprintf(name, sizeof name, "n%d", i);
        moe_checkpoint_explicit_loads_add(&explicit_loads, name);
        assert_string_equal(explicit_loads.names[0], name);
    }
    assert_int_equal(explicit_loads.count, MOE_CHECKPOINT_EXPLICIT_LOADS_MAX);
    assert_false(
        moe_checkpoint_explicit_loads_has(&explicit_loads, "n0")); /* the earliest makes room */
    assert_true(moe_checkpoint_explicit_loads_has(&explicit_loads, "n1"));
    moe_checkpoint_explicit_loads_add(&explicit_loads,
                                      "n1"); /* again: it moves, and is there once */
    assert_string_equal(explicit_loads.names[0], "n1");
    assert_string_equal(explicit_loads.names[MOE_CHECKPOINT_EXPLICIT_LOADS_MAX - 1], "n2");
    moe_checkpoint_explicit_loads_add(&other, "mine");
    moe_checkpoint_explicit_loads_join(&other, &explicit_loads);
    assert_string_equal(other.names[0], "mine");
    assert_string_equal(other.names[1], "n1");
    assert_int_equal(other.count, MOE_CHECKPOINT_EXPLICIT_LOADS_MAX);
    moe_checkpoint_explicit_loads_join(&other, &explicit_loads);
    assert_int_equal(other.count, MOE_CHECKPOINT_EXPLICIT_LOADS_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_engine(a_backward_brings_its_tensors_where_it_was_asked_and_none_elsewhere),
        with_engine(a_repeat_in_the_next_ticket_is_one_though_the_first_still_runs),
        with_engine(a_call_in_flight_when_the_view_ends_fails_and_leaves_the_state_inconsistent),
        with_engine(a_view_that_ends_between_calls_costs_nothing),
        with_engine(a_step_changes_the_version_for_all_that_begins_later),
        with_engine(an_exclusive_ticket_runs_alone),
        with_engine(a_step_that_is_not_finite_changes_no_version),
        with_engine(a_bad_token_fails_its_call_which_has_been_run),
        with_engine(a_call_that_nobody_waits_for_is_run_once_it_was_announced),
        with_engine(a_ticket_for_a_call_of_ours_that_we_never_made_ends_the_view),
        with_engine(a_pass_that_all_refuse_has_not_happened),
        with_engine(an_optimizer_step_that_all_refuse_has_not_happened),
        with_engine(passes_run_one_after_the_other),
        with_engine(a_cancelled_call_ends_at_once_while_a_pass_and_a_step_run),
        with_engine(a_call_that_is_forgotten_at_once_is_answered_whole),
        with_engine(a_progress_request_goes_with_its_view),
        with_engine(a_view_that_ends_while_a_load_only_reads_tears_nothing),
        with_engine(more_calls_than_may_wait_are_refused),
        cmocka_unit_test(lack_of_memory_is_the_outcome_only_without_another_reason),
        cmocka_unit_test(a_group_decides_together_where_to_go_on),
        cmocka_unit_test(a_checkpoint_counts_more_than_a_lineage_that_began_apart),
        cmocka_unit_test(the_latest_view_decides_and_between_groups_an_operator),
        with_engine(an_operators_choice_of_the_model_is_known_to_the_next_recovery),
        with_engine(a_choice_that_comes_while_a_group_forms_is_for_the_next_attempt),
        cmocka_unit_test(what_was_loaded_is_remembered_latest_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
