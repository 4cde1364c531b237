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

static struct moe_call_exec backward(uint64_t id)
{
    return (struct moe_call_exec){.call = {.kind = MOE_STEP_BACKWARD, .session = "s", .id = id}};
}

/* Its whole ticket. */
static void run(struct moe_call_exec *x)
{
    const struct moe_ticket ticket = {.epoch = test.epoch, .layer = 7, .kind = x->call.kind};
    struct moe_trainer *trainer;
    assert_ok(moe_train__begin(test.train, &ticket, x, &trainer));
    assert_true(x->run);
    assert_ok(moe_train__end(test.train, &ticket, x));
}

/* Slot 1 is lost, and slot 0 goes on alone. */
static struct moe_train_recovery lose_slot_1(void)
{
    struct moe_train_digest d = digest_now();
    struct moe_train_recovery r;
    assert_ok(moe_train_choose_recovery(&d, 1, &r));
    assert_false(r.restart);
    assert_ok(moe_train_adopt(test.train, &r, 0, 2, 1));
    return r;
}

/* Slot 0 goes on with gradients that a step has left undefined. */
static struct moe_train_recovery lose_undefined(void)
{
    struct moe_train_digest d = digest_now();
    struct moe_train_recovery r;
    d.undefined = 1;
    assert_ok(moe_train_choose_recovery(&d, 1, &r));
    assert_ok(moe_train_adopt(test.train, &r, 0, 2, 1));
    return r;
}

static void run_backwards(const uint64_t *ids, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct moe_call_exec x = backward(ids[i]);
        run(&x);
    }
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

/* One session's ledger does not name so many. */
static void all_lost_calls_are_counted_though_not_all_are_named(void **state)
{
    enum { CALLS = MOE_LEDGER_CALLS + 44 };
    struct moe_train_micro_batch lost[MOE_TRAIN_LOST_MAX];
    (void)state;
    for (uint64_t id = 1; id <= CALLS; id++) {
        struct moe_call_exec x = backward(id);
        run(&x);
    }
    struct moe_call_exec last = backward(CALLS + 1);
    const struct moe_ticket ticket = {.layer = 7, .kind = MOE_STEP_BACKWARD};
    struct moe_trainer *trainer;
    assert_ok(moe_train__begin(test.train, &ticket, &last, &trainer));
    cut_short(&last);
    assert_int_equal(lose_slot_1().loss, MOE_TRAIN_LOSS_GRADIENTS);
    assert_int_equal(state_now().lost_total, CALLS + 1);
    assert_int_equal(moe_train_read_lost(test.train, lost), MOE_LEDGER_CALLS);
    assert_int_equal(lost[0].id, CALLS + 2 - MOE_LEDGER_CALLS);
    assert_int_equal(state_now().backwards, 0);
}

/* Another slot has recorded a Backward, which was not begun here. */
static void learn_of_a_backward(uint64_t id, bool has_gradients)
{
    struct moe_train_digest d[2];
    struct moe_train_recovery r;
    d[0] = d[1] = digest_now();
    d[1].before = d[1].record;
    d[1].calls++;
    d[1].record++;
    d[1].backward.id = id;
    d[1].backward.outcome.backwards = has_gradients;
    strcpy(d[1].backward_session, "s");
    assert_ok(moe_train_choose_recovery(d, 3, &r));
    assert_false(r.restart);
    struct moe_ledger *copy; /* for the hash with that call */
    assert_ok(moe_ledger_copy(test.train->ledger, &copy));
    moe_ledger_record(copy, "s", &r.backward);
    r.record = moe_ledger_hash(copy);
    moe_ledger_destroy(copy);
    assert_ok(moe_train_adopt(test.train, &r, 0, 2, 3));
}

static void a_lost_call_that_only_another_slot_has_recorded_is_counted(void **state)
{
    struct moe_call_exec x = backward(1);
    (void)state;
    run(&x);
    learn_of_a_backward(2, true);
    assert_int_equal(state_now().lost_total, 2);
}

static struct moe_status refusal_of(uint64_t lineage)
{
    struct moe_call_exec x = {.call = {.kind = MOE_STEP_OPTIMIZER, .id = 99, .lineage = lineage}};
    moe_mutex_lock(&test.train->lock);
    moe_train__judge(test.train, &x);
    moe_mutex_unlock(&test.train->lock);
    return x.refusal;
}

/* A Backward has ended, and ZeroGrad is cut short: slot 1 may have answered it. */
static void clients_learn_that_a_call_may_be_lost_whatever_lineage_they_name(void **state)
{
    struct moe_call_exec x = backward(1);
    struct moe_call_exec zero = {.call = {.kind = MOE_STEP_ZERO_GRAD, .id = 1}};
    uint64_t lineage = state_now().lineage;
    (void)state;
    run(&x);
    script.aborted = true;
    assert_refused(begin(&zero), MOE_ABORTED, MOE_REASON_ABORTED);
    cut_short(&zero);
    assert_int_equal(lose_slot_1().loss, MOE_TRAIN_LOSS_CALL);
    for (int named = 0; named < 2; named++) {
        struct moe_status st = refusal_of(named ? lineage : 0);
        assert_refused(st, MOE_FAILED_PRECONDITION, MOE_REASON_STATE_LOST);
        assert_non_null(strstr(st.text, "one call"));
        assert_non_null(strstr(st.text, "steps are 0"));
    }
    assert_null(strstr(refusal_of(lineage - 1).text, "one call")); /* of another group, perhaps */
    assert_ok(refusal_of(state_now().lineage));
}

static void clients_learn_that_gradients_are_lost_whatever_lineage_they_name(void **state)
{
    struct moe_call_exec x = backward(1);
    uint64_t lineage = state_now().lineage;
    (void)state;
    run(&x);
    assert_int_equal(lose_slot_1().loss, MOE_TRAIN_LOSS_GRADIENTS);
    assert_refused(refusal_of(0), MOE_FAILED_PRECONDITION, MOE_REASON_GRADIENTS_LOST);
    assert_refused(refusal_of(lineage), MOE_FAILED_PRECONDITION, MOE_REASON_GRADIENTS_LOST);
    assert_refused(refusal_of(lineage - 1), MOE_FAILED_PRECONDITION, MOE_REASON_STATE_LOST);
}

/* Two of three calls were sent again, and one is new, when the group loses its gradients again. */
static void a_second_loss_adds_to_what_is_to_be_sent_again(void **state)
{
    static const uint64_t first[] = {1, 2, 3}, second[] = {2, 1, 4}, third[] = {5};
    struct moe_train_micro_batch lost[MOE_TRAIN_LOST_MAX];
    struct moe_call_exec zero = {.call = {.kind = MOE_STEP_ZERO_GRAD, .id = 1}};
    (void)state;
    run_backwards(first, 3);
    lose_slot_1();
    run_backwards(second, 3);
    lose_undefined();
    assert_int_equal(state_now().lost_total, 4);
    assert_int_equal(moe_train_read_lost(test.train, lost), 4);
    for (uint64_t i = 0; i < 4; i++)
        assert_int_equal(lost[i].id, i + 1);
    assert_ok(begin(&zero));
    assert_ok(moe_train__end(test.train, &(struct moe_ticket){.kind = MOE_STEP_ZERO_GRAD}, &zero));
    assert_int_equal(state_now().lost_total, 4); /* other clients have not read it yet */
    run_backwards(third, 1);
    lose_undefined();
    assert_int_equal(state_now().lost_total, 1);
    assert_int_equal(moe_train_read_lost(test.train, lost), 1);
    assert_int_equal(lost[0].id, 5);
}

/* A client that looks at nothing has seen neither loss. */
static void a_loss_of_gradients_does_not_hide_a_lost_call(void **state)
{
    static const uint64_t ids[] = {1};
    struct moe_call_exec zero = {.call = {.kind = MOE_STEP_ZERO_GRAD, .id = 1}};
    (void)state;
    script.aborted = true;
    assert_refused(begin(&zero), MOE_ABORTED, MOE_REASON_ABORTED);
    cut_short(&zero);
    assert_int_equal(lose_slot_1().loss, MOE_TRAIN_LOSS_CALL);
    run_backwards(ids, 1);
    assert_int_equal(lose_undefined().loss, MOE_TRAIN_LOSS_GRADIENTS);
    assert_refused(refusal_of(0), MOE_FAILED_PRECONDITION, MOE_REASON_STATE_LOST);
}

static enum moe_ledger_decision look(uint64_t id)
{
    const struct moe_content content = {0};
    return moe_ledger_look(test.train->ledger, "s", id, &content, NULL);
}

/* It leaves gradients as they are, and its client has no answer. */
static void a_pass_without_gradients_that_is_cut_short_has_not_happened(void **state)
{
    static const uint64_t ids[] = {1};
    struct moe_call_exec x = backward(2);
    const struct moe_ticket ticket = {.layer = 7, .kind = MOE_STEP_BACKWARD};
    struct moe_trainer *trainer;
    uint64_t lineage = state_now().lineage;
    (void)state;
    run_backwards(ids, 1);
    x.call.input_only = true;
    assert_ok(moe_train__begin(test.train, &ticket, &x, &trainer));
    cut_short(&x);
    assert_int_equal(digest_now().undefined, 0);
    assert_int_equal(digest_now().unsettled, 0);
    assert_int_equal(digest_now().inconsistent, 0);
    assert_int_equal(look(2), MOE_LEDGER_NEW);
    begin_view();
    assert_int_equal(state_now().lineage, lineage);
    assert_int_equal(state_now().backwards, 1);
    assert_int_equal(look(1), MOE_LEDGER_REPEAT);
}

/* The answers go with the gradients, here and on a slot that has not recorded it. */
static void a_pass_without_gradients_is_taken_back_and_not_to_be_sent_again(void **state)
{
    struct moe_call_exec x = backward(1), y = backward(2);
    (void)state;
    x.call.input_only = true;
    run(&x);
    run(&y);
    lose_slot_1();
    assert_int_equal(state_now().lost_total, 1);
    assert_int_equal(look(1), MOE_LEDGER_NEW);
    assert_int_equal(look(2), MOE_LEDGER_NEW);
    learn_of_a_backward(3, false);
    assert_int_equal(state_now().lost_total, 1);
    assert_int_equal(look(3), MOE_LEDGER_NEW);
}

/* Slot 1 has run the call that was cut short here, with this outcome. */
static void learn_that_slot_1_has_run(const struct moe_train_call *call,
                                      struct moe_ledger_outcome outcome)
{
    struct moe_train_digest d[2];
    struct moe_train_recovery r;
    d[0] = d[1] = digest_now();
    outcome.lineage = d[0].lineage;
    outcome.weights_version = d[0].weights_version + (call->kind == MOE_STEP_OPTIMIZER);
    const struct moe_ledger_call entry = {
        .id = call->id, .content = call->content, .origin = 1, .outcome = outcome};
    struct moe_ledger *copy; /* for the hash with that call */
    assert_ok(moe_ledger_copy(test.train->ledger, &copy));
    moe_ledger_record(copy, "", &entry);
    d[1].before = d[1].record;
    d[1].record = moe_ledger_hash(copy);
    moe_ledger_destroy(copy);
    d[1].calls++;
    d[1].weights_version = outcome.weights_version;
    d[1].change = entry;
    d[1].only_recorded = d[1].settled = call->kind == MOE_STEP_SAVE;
    d[1].squares = 6.25;
    d[1].gradients = d[1].undefined = d[1].unsettled = 0;
    assert_ok(moe_train_choose_recovery(d, 3, &r));
    assert_false(r.restart);
    assert_int_equal(r.loss, MOE_TRAIN_LOSS_NONE);
    assert_ok(moe_train_adopt(test.train, &r, 0, 2, 3));
    assert_int_equal(digest_now().record, d[1].record);
    assert_int_equal(digest_now().calls, d[1].calls);
    assert_int_equal(digest_now().begun, 0);
    assert_int_equal(digest_now().change.id, call->id); /* and tells a slot that lacks it */
    assert_int_equal(moe_ledger_look(test.train->ledger, "", call->id, &call->content, NULL),
                     MOE_LEDGER_REPEAT);
}

static void an_optimizer_step_that_others_have_taken_is_finished(void **state)
{
    static const uint64_t ids[] = {1};
    struct moe_call_exec x = {.call = {.kind = MOE_STEP_OPTIMIZER, .id = 4}};
    uint64_t lineage = state_now().lineage, version = state_now().weights_version;
    (void)state;
    run_backwards(ids, 1);
    script.aborted = true;
    assert_refused(begin(&x), MOE_ABORTED, MOE_REASON_ABORTED);
    cut_short(&x);
    assert_int_equal(digest_now().begun, 4);
    assert_int_equal(digest_now().undefined, 1);
    learn_that_slot_1_has_run(
        &x.call, (struct moe_ledger_outcome){.steps = 1, .backwards = 1, .number = 2.5});
    assert_int_equal(script.finished_steps, 1);
    assert_true(script.squares == 6.25);
    assert_int_equal(state_now().lineage, lineage);
    assert_int_equal(state_now().weights_version, version + 1);
    assert_int_equal(state_now().steps, 1);
    assert_int_equal(state_now().backwards, 0);
    assert_int_equal(digest_now().undefined, 0);
    assert_int_equal(digest_now().gradients, 0);
}

static void a_zero_grad_and_a_new_frozen_set_that_others_have_run_are_finished(void **state)
{
    static const uint64_t ids[] = {1};
    struct moe_call_exec zero = {.call = {.kind = MOE_STEP_ZERO_GRAD, .id = 4}};
    struct moe_call_exec freeze = {.call = {.kind = MOE_STEP_SET_FROZEN, .id = 5, .frozen = 2}};
    (void)state;
    run_backwards(ids, 1);
    script.aborted = true;
    assert_refused(begin(&zero), MOE_ABORTED, MOE_REASON_ABORTED);
    cut_short(&zero);
    int before = script.zero_grads;
    learn_that_slot_1_has_run(&zero.call, (struct moe_ledger_outcome){.backwards = 1});
    assert_int_equal(script.zero_grads, before + 1);
    assert_int_equal(state_now().backwards, 0);
    assert_refused(begin(&freeze), MOE_ABORTED, MOE_REASON_ABORTED);
    cut_short(&freeze);
    learn_that_slot_1_has_run(&freeze.call, (struct moe_ledger_outcome){0});
    assert_int_equal(state_now().frozen, 2);
}

/* Its checkpoint has the records of all earlier calls, which no slot takes back then. */
static void a_save_that_others_have_recorded_is_recorded(void **state)
{
    const struct moe_train_call save = {.kind = MOE_STEP_SAVE, .id = 4};
    uint64_t lineage = state_now().lineage;
    struct moe_call_exec x = backward(1);
    static const uint64_t more[] = {2};
    (void)state;
    x.call.input_only = true;
    run(&x);
    learn_that_slot_1_has_run(&save, (struct moe_ledger_outcome){.bytes = 100});
    assert_int_equal(digest_now().settled, 1);
    assert_int_equal(state_now().lineage, lineage);
    run_backwards(more, 1);
    lose_undefined();
    assert_int_equal(look(1), MOE_LEDGER_REPEAT);
    assert_int_equal(look(2), MOE_LEDGER_NEW);
    assert_int_equal(script.finished_steps, 0);
}

/* No slot has run it: it has not happened, and can be sent again. */
static void a_call_that_nobody_has_run_is_not_finished(void **state)
{
    struct moe_call_exec x = {.call = {.kind = MOE_STEP_OPTIMIZER, .id = 4}};
    (void)state;
    script.aborted = true;
    assert_refused(begin(&x), MOE_ABORTED, MOE_REASON_ABORTED);
    cut_short(&x);
    assert_int_equal(lose_slot_1().loss, MOE_TRAIN_LOSS_CALL);
    assert_int_equal(script.finished_steps, 0);
    assert_int_equal(digest_now().begun, 0);
    assert_int_equal(state_now().steps, 0);
}

/* There is no directory to read from. */
static void a_slot_that_has_read_the_state_joins_without_reading(void **state)
{
    struct moe_call_exec x = backward(1);
    (void)state;
    run(&x);
    struct moe_train_digest d = digest_now();
    struct moe_train_recovery r = {.lineage = 9,
                                   .weights_version = 5,
                                   .checkpoint = "c",
                                   .calls = d.calls,
                                   .record = d.record + 1,
                                   .joiners = 1};
    test.train->ahead =
        (struct moe_saved_training){.checkpoint = "c", .calls = r.calls, .record = r.record};
    assert_ok(moe_train_adopt(test.train, &r, 0, 2, 3));
    d = digest_now();
    assert_true(d.lineage == 9 && d.weights_version == 5 && d.record == r.record);
    assert_true(d.saved == 1 && d.inconsistent == 0 && d.gradients == 0);
    assert_string_equal(d.checkpoint, "c");
    struct moe_saved_training joined = {.checkpoint = "c",
                                        .lineage = 9,
                                        .weights_version = 5,
                                        .calls = r.calls,
                                        .record = r.record};
    assert_true(moe_train_has_ahead(test.train, &joined)); /* also if no view forms */
    joined.calls++;
    assert_false(moe_train_has_ahead(test.train, &joined));
    struct moe_status st = moe_train_adopt(test.train, &r, 0, 2, 3); /* once */
    assert_true(moe_failed(&st));
    assert_int_equal(digest_now().inconsistent, 1);
}

static void a_slot_that_cannot_read_ahead_forgets_its_state_only(void **state)
{
    const struct moe_saved_training wanted = {
        .checkpoint = "c", .lineage = 9, .weights_version = 5, .calls = 4, .record = 8};
    struct moe_call_exec x = backward(1);
    (void)state;
    run(&x);
    moe_mutex_lock(&test.train->lock);
    moe_train__set_checkpoint(test.train, "before");
    test.train->unsaved = 3;
    moe_mutex_unlock(&test.train->lock);
    struct moe_status st = moe_train_read_ahead(test.train, &wanted, 0, 2);
    assert_true(moe_failed(&st));
    print_message("  %s\n", st.text);
    assert_false(moe_train_has_ahead(test.train, &wanted));
    struct moe_train_digest d = digest_now();
    assert_true(d.inconsistent == 1 && d.calls == 0 && d.lineage == 9);
    assert_int_equal(state_now().lineage, 0);    /* for clients: it is not of that group yet */
    assert_string_equal(d.checkpoint, "before"); /* where the group would go back to */
    assert_int_equal(d.unsaved, 3);
}

/* Until it has joined, it answers no repeat: the group's next calls may change what it has read. */
static void a_slot_that_has_read_ahead_answers_nothing(void **state)
{
    struct moe_call_exec x = {.call = {.kind = MOE_STEP_ZERO_GRAD, .id = 1}};
    struct moe_train_answer answer;
    (void)state;
    run(&x);
    struct moe_train_digest d = digest_now();
    struct moe_train_recovery r = {
        .lineage = 9, .weights_version = 5, .checkpoint = "c", .calls = d.calls, .joiners = 1};
    assert_true(moe_train_recall(test.train, &x.call, &answer));
    moe_mutex_lock(&test.train->lock);
    test.train->apart = test.train->inconsistent = true; /* as after a read */
    test.train->ahead = (struct moe_saved_training){.checkpoint = "c", .calls = r.calls};
    moe_mutex_unlock(&test.train->lock);
    assert_false(moe_train_recall(test.train, &x.call, &answer));
    assert_refused(moe_train_recall_header(test.train, &x.call, &answer), MOE_FAILED_PRECONDITION,
                   MOE_REASON_RETAINED_PASS_GONE);
    assert_int_equal(state_now().lineage, 0);
    assert_ok(moe_train_adopt(test.train, &r, 0, 2, 3));
    assert_true(moe_train_recall(test.train, &x.call, &answer));
    assert_int_equal(state_now().lineage, 9);
}

static void records_of_another_checkpoint_are_forgotten(void **state)
{
    struct moe_call_exec x = backward(1);
    (void)state;
    run(&x);
    struct moe_train_digest d = digest_now();
    struct moe_train_recovery r = {
        .lineage = 9, .weights_version = 5, .checkpoint = "c", .calls = d.calls + 1, .joiners = 1};
    moe_mutex_lock(&test.train->lock);
    test.train->inconsistent = true; /* as after a read */
    moe_mutex_unlock(&test.train->lock);
    test.train->ahead = (struct moe_saved_training){.checkpoint = "c", .calls = r.calls};
    assert_refused(moe_train_adopt(test.train, &r, 0, 2, 3), MOE_FAILED_PRECONDITION,
                   MOE_REASON_MODEL_MISMATCH);
    d = digest_now();
    assert_true(d.inconsistent == 1 && d.calls == 0);
    assert_int_equal(state_now().lineage, 0);
}

/* Changes wait in a saved state while a process waits, but not once that state is released. */
static void changes_wait_for_a_process_that_reads(void **state)
{
    struct moe_call_exec x = backward(1);
    struct moe_saved_training saved;
    (void)state;
    run(&x);
    struct moe_train_digest d = digest_now();
    struct moe_train_recovery r = {
        .lineage = 9, .weights_version = 5, .checkpoint = "c", .calls = d.calls, .joiners = 1};
    test.train->ahead = (struct moe_saved_training){.checkpoint = "c", .calls = r.calls};
    assert_ok(moe_train_adopt(test.train, &r, 0, 2, 3)); /* the state is saved */
    assert_int_equal(moe_train_find_hold(test.train), MOE_HOLD_NOTHING);
    assert_true(moe_train_set_joiner(test.train, true, 0));
    assert_int_equal(moe_train_find_hold(test.train), MOE_HOLD_TRAINING);
    moe_train_read_saved(test.train, &saved);
    assert_true(saved.calls == r.calls && saved.lineage == 9 && saved.weights_version == 5);
    assert_string_equal(saved.checkpoint, "c");
    assert_true(moe_train_set_joiner(test.train, true, r.calls));
    assert_false(moe_train_set_joiner(test.train, true, r.calls));
    assert_int_equal(moe_train_find_hold(test.train), MOE_HOLD_NOTHING);
    moe_train_read_saved(test.train, &saved);
    assert_int_equal(saved.calls, 0);
    assert_true(moe_train_set_joiner(test.train, true, r.calls + 1)); /* another state */
    assert_int_equal(moe_train_find_hold(test.train), MOE_HOLD_TRAINING);
}

#define with_copies(name) cmocka_unit_test_setup_teardown(name, open_copies, close_engine)

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_copies(a_merge_that_is_cut_short_before_it_begins_leaves_the_weights),
        with_copies(all_lost_calls_are_counted_though_not_all_are_named),
        with_copies(a_lost_call_that_only_another_slot_has_recorded_is_counted),
        with_copies(clients_learn_that_a_call_may_be_lost_whatever_lineage_they_name),
        with_copies(clients_learn_that_gradients_are_lost_whatever_lineage_they_name),
        with_copies(a_second_loss_adds_to_what_is_to_be_sent_again),
        with_copies(a_loss_of_gradients_does_not_hide_a_lost_call),
        with_copies(a_pass_without_gradients_that_is_cut_short_has_not_happened),
        with_copies(a_pass_without_gradients_is_taken_back_and_not_to_be_sent_again),
        with_copies(an_optimizer_step_that_others_have_taken_is_finished),
        with_copies(a_zero_grad_and_a_new_frozen_set_that_others_have_run_are_finished),
        with_copies(a_save_that_others_have_recorded_is_recorded),
        with_copies(a_call_that_nobody_has_run_is_not_finished),
        with_copies(a_slot_that_has_read_the_state_joins_without_reading),
        with_copies(a_slot_that_cannot_read_ahead_forgets_its_state_only),
        with_copies(a_slot_that_has_read_ahead_answers_nothing),
        with_copies(records_of_another_checkpoint_are_forgotten),
        with_copies(changes_wait_for_a_process_that_reads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
