/* SPDX-License-Identifier: Apache-2.0 */
/* Retained Forward requests in the engine and the training room: their tickets, their activations,
 * the use of these, and when they are dropped. */
#include "base/clock.h"
#include "support/check.h"
#include "support/test_clock.h"
#include "training_fixture.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { EXTRA = 40 };

/* test.forward, to be retained as (s, id), for that version of the weights. */
static void save_version(uint32_t tokens, uint64_t id, uint64_t version)
{
    test.forward = (struct moe_work){
        .layer = 7,
        .dtype = MOE_DTYPE_F32,
        .tokens = tokens,
        .x = test.x,
        .y = test.y,
        .retain_session = "s",
        .retain_id = id,
        .weights_version = version,
        .deadline_ns = MOE_NEVER,
        .done = on_forward_done,
    };
    assert_ok(moe_engine_submit(test.engine, &test.forward));
}

static void save(uint32_t tokens, uint64_t id)
{
    save_version(tokens, id, 0);
}

/* Ticket of announcement `n`, in a bucket for all. */
static void order_retained(int n, uint32_t origin)
{
    struct moe_ticket t = test.announced[n];
    t.epoch = test.epoch;
    t.seq = ++test.seq;
    t.descriptor.origin = origin;
    t.bucket = BUCKET;
    moe_engine_run(test.engine, &t);
}

/* Client i calls Backward of the pass `id`, retained by the step of that name. */
static void ask_retained(int i, uint64_t id, uint64_t name, uint64_t epoch)
{
    ask(i, MOE_STEP_BACKWARD, id, 5); /* announced without the name: it has no ticket yet */
    struct moe_ticket *t = &test.announced[test.announced_count - 1];
    struct moe_train_call call = test.clients[i].call;
    call.retained = name;
    call.retained_epoch = epoch;
    moe_train_call_pack(&call, t->descriptor.body, &t->descriptor.length);
}

static int kept(void)
{
    int count = 0;
    moe_mutex_lock(&script.lock);
    for (size_t i = 0; i < sizeof script.kept / sizeof *script.kept; i++)
        count += script.kept[i] != 0;
    moe_mutex_unlock(&script.lock);
    return count;
}

/* The program's watchdog bounds this loop. */
static void pause_briefly(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static void await_kept(int count)
{
    while (kept() > count)
        pause_briefly();
    assert_int_equal(kept(), count);
}

/* A retained pass of `id`, by a ticket of this slot; returns its name. */
static uint64_t save_and_run(uint64_t id)
{
    int before = test.forward_done;
    script.keep = true;
    save(5, id);
    order_retained(test.announced_count - 1, 0);
    wait_until(&test.forward_done, before + 1, &test.lock);
    assert_ok(test.forward_status);
    return test.forward.retained_name;
}

static void backward(int i, uint64_t id, uint64_t name, uint64_t epoch)
{
    ask_retained(i, id, name, epoch);
    order(test.announced_count - 1, 0);
    wait_done(i);
}

/* ------------------------------------------------------------------------ promises */

static void a_retained_forward_has_a_separate_ticket_and_its_name(void **state)
{
    (void)state;
    script.keep = true;
    save(5, 9);
    assert_int_equal(announced_tokens, 0);
    assert_int_equal(test.announced_count, 1);
    assert_int_equal(test.announced[0].kind, MOE_STEP_FORWARD_RETAIN);
    struct moe_train_call call;
    assert_ok(moe_train_call_read(&test.announced[0], &call));
    assert_string_equal(call.session, "s");
    assert_int_equal(call.id, 9);
    order_forward(8); /* another slot's: takes no tokens of it */
    wait_until(&test.finished_count, 1, &test.lock);
    assert_int_equal(script.save, 0);
    assert_int_equal(test.forward_done, 0);
    order_retained(0, 0);
    wait_until(&test.forward_done, 1, &test.lock);
    assert_ok(test.forward_status);
    assert_int_equal(script.save, 2);
    assert_int_equal(test.forward.retained_name, 2);
    assert_true(test.forward.retained_here);
    assert_int_equal(test.forward.answered_epoch, test.epoch);
    assert_true(test.y[5 * HIDDEN - 1] == 1);
    assert_int_equal(state_now().activation_bytes, 1);
    assert_int_equal(state_now().activation_bytes_limit, 1 << 20);
}

static void without_room_on_the_device_the_step_runs_all_the_same(void **state)
{
    (void)state;
    save(5, 9);
    order_retained(0, 0);
    wait_until(&test.forward_done, 1, &test.lock);
    assert_ok(test.forward_status);
    assert_int_equal(test.forward.retained_name, 1); /* other slots may keep it */
    assert_false(test.forward.retained_here);
    assert_int_equal(state_now().activation_bytes, 0);
    backward(0, 9, 1, test.epoch);
    assert_ok(test.clients[0].status);
    assert_int_equal(script.retained, 1);
    assert_false(test.clients[0].work.step.used_retained);
}

static int count_worth(enum moe_dtype dtype, int tries)
{
    int worth = 0;
    for (int i = 0; i < tries; i++)
        worth += moe_activations_are_worth(moe_train_activations(test.train), dtype,
                                           MOE_ACTIVATIONS_TOKENS_MIN);
    return worth;
}

static void after_misses_it_is_tried_once_in_sixty_four(void **state)
{
    (void)state;
    assert_int_equal(count_worth(MOE_DTYPE_F32, 100), 100);
    for (uint64_t id = 1; id <= 8; id++) {
        save(5, id);
        order_retained(test.announced_count - 1, 0);
        wait_until(&test.forward_done, (int)id, &test.lock);
    }
    assert_int_equal(count_worth(MOE_DTYPE_F32, 128), 2);
    assert_int_equal(count_worth(MOE_DTYPE_BF16, 100), 100); /* another way through the backend */
    (void)save_and_run(9);
    assert_int_equal(count_worth(MOE_DTYPE_F32, 100), 100);
    moe_activations_set_limit(moe_train_activations(test.train), 0);
    assert_int_equal(count_worth(MOE_DTYPE_F32, 100), 0);
}

/* Like the service: a separate step only while it is worth it. */
static void ask_as_the_service_does(uint64_t id)
{
    if (moe_activations_are_worth(moe_train_activations(test.train), MOE_DTYPE_F32,
                                  MOE_ACTIVATIONS_TOKENS_MIN))
        save(5, id);
    else
        forward(5, 0);
}

/* Three tokens that wait in the common queue. */
static void ask_shared(struct moe_work *w)
{
    *w = (struct moe_work){.layer = 7,
                           .dtype = MOE_DTYPE_F32,
                           .tokens = 3,
                           .x = test.x + 5 * HIDDEN,
                           .y = test.y + 5 * HIDDEN,
                           .deadline_ns = MOE_NEVER,
                           .done = on_forward_done};
    assert_ok(moe_engine_submit(test.engine, w));
}

static void check_figures(const struct moe_work *w, uint32_t step_tokens, uint64_t name)
{
    assert_int_equal(w->steps, 1);
    assert_int_equal(w->step_tokens, step_tokens);
    assert_int_equal(w->retained_name, name);
    assert_false(w->retained_here);
}

static void after_eight_misses_it_shares_a_step_and_its_answer_has_that_step(void **state)
{
    (void)state;
    struct moe_work shared;
    for (uint64_t id = 1; id <= 8; id++) {
        int before = test.forward_done;
        ask_shared(&shared);
        ask_as_the_service_does(id);
        order_retained((int)id - 1, 0);
        wait_until(&test.forward_done, before + 1, &test.lock);
        check_figures(&test.forward, 5, 2 * id - 1);
        order_forward(BUCKET);
        wait_until(&test.forward_done, before + 2, &test.lock);
        check_figures(&shared, 3, 0);
    }
    ask_shared(&shared);
    ask_as_the_service_does(9);
    assert_int_equal(test.announced_count, 8); /* it waits in the common queue */
    order_forward(BUCKET);
    wait_until(&test.forward_done, 18, &test.lock);
    check_figures(&test.forward, 8, 0);
    check_figures(&shared, 8, 0);
}

static void its_backward_uses_and_drops_it(void **state)
{
    (void)state;
    uint64_t name = save_and_run(9), other = save_and_run(10);
    assert_int_equal(kept(), 2);
    backward(0, 9, name, test.epoch);
    assert_ok(test.clients[0].status);
    assert_int_equal(script.retained, name);
    assert_true(test.clients[0].work.step.used_retained);
    assert_int_equal(kept(), 1);
    assert_int_equal(state_now().activation_bytes, 1);
    backward(1, 10, other, test.epoch);
    assert_int_equal(kept(), 0);
    /* A repeat finds no activations, and is not run. */
    backward(2, 9, name, test.epoch);
    assert_int_equal(script.backwards, 2);
}

static void a_backward_with_other_tensors_drops_it_unused(void **state)
{
    (void)state;
    (void)save_and_run(9);
    backward(0, 9, 0, 0);
    assert_ok(test.clients[0].status);
    assert_int_equal(script.retained, 0);
    assert_int_equal(kept(), 0);
}

static void other_slots_keep_and_drop_it_too(void **state)
{
    (void)state;
    script.keep = true;
    save(5, 9);
    order_retained(0, 1); /* the same call of slot 1: this slot brings no tokens */
    wait_until(&test.finished_count, 1, &test.lock);
    assert_int_equal(script.save, 1);
    assert_int_equal(test.forward_done, 0);
    assert_int_equal(kept(), 1);
    ask_retained(0, 9, 1, test.epoch);
    order(1, 1);
    wait_until(&test.finished_count, 2, &test.lock);
    assert_int_equal(script.retained, 1);
    assert_int_equal(kept(), 0);
}

static void a_repeated_pass_replaces_the_first(void **state)
{
    (void)state;
    (void)save_and_run(9);
    uint64_t name = save_and_run(9);
    assert_int_equal(kept(), 1);
    backward(0, 9, name, test.epoch);
    assert_true(test.clients[0].work.step.used_retained);
    assert_int_equal(kept(), 0);
    (void)save_and_run(9); /* no call will use it after its Backward */
    assert_int_equal(kept(), 0);
}

static void a_change_of_the_weights_drops_all(void **state)
{
    (void)state;
    (void)save_and_run(9);
    (void)save_and_run(10);
    script.nonfinite = true;
    ask(0, MOE_STEP_OPTIMIZER, 1, 0);
    order(test.announced_count - 1, 0);
    wait_done(0);
    assert_int_equal(kept(), 2); /* no weight has changed */
    ask(1, MOE_STEP_ZERO_GRAD, 2, 0);
    order(test.announced_count - 1, 0);
    wait_done(1);
    assert_int_equal(kept(), 2);
    script.nonfinite = false;
    ask(2, MOE_STEP_OPTIMIZER, 3, 0);
    order(test.announced_count - 1, 0);
    wait_done(2);
    assert_int_equal(kept(), 0);
    assert_int_equal(state_now().activation_bytes, 0);
}

static void a_refused_pass_leaves_it_for_the_next_try(void **state)
{
    (void)state;
    uint64_t name = save_and_run(9);
    script.refuse = true;
    backward(0, 9, name, test.epoch);
    assert_refused(test.clients[0].status, MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY);
    assert_int_equal(kept(), 1);
    script.refuse = false;
    backward(1, 9, name, test.epoch);
    assert_ok(test.clients[1].status);
    assert_true(test.clients[1].work.step.used_retained);
    assert_int_equal(kept(), 0);
}

static void it_expires_without_a_ticket_but_not_while_a_pass_uses_it(void **state)
{
    (void)state;
    uint64_t name = save_and_run(9);
    (void)save_and_run(10);
    hold_steps(true);
    ask_retained(0, 9, name, test.epoch);
    order(test.announced_count - 1, 0);
    wait_until(&script.backwards, 1, &script.lock);
    moe_test_clock_advance(KEPT_NS);
    await_kept(1);
    assert_int_equal(state_now().activation_bytes, 1);
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    assert_int_equal(kept(), 1); /* the one in use is as old */
    hold_steps(false);
    wait_done(0);
    assert_true(test.clients[0].work.step.used_retained);
    assert_int_equal(kept(), 0);
    (void)save_and_run(11); /* and without other calls */
    moe_test_clock_advance(KEPT_NS);
    await_kept(0);
}

static void the_end_of_a_view_drops_it_and_voids_its_name(void **state)
{
    (void)state;
    uint64_t name = save_and_run(9), epoch = test.epoch;
    moe_engine_stop_view(test.engine);
    assert_int_equal(state_now().activation_bytes, 0);
    begin_view();
    backward(0, 9, name, epoch); /* this worker has kept its x */
    assert_ok(test.clients[0].status);
    assert_int_equal(script.retained, 0);
}

static void a_step_in_flight_at_the_end_of_a_view_runs_again_under_the_next(void **state)
{
    (void)state;
    script.keep = true;
    hold_steps(true);
    save(5, 9);
    order_forward(4); /* another slot's, so that the later name differs */
    order_retained(0, 0);
    wait_until(&script.forwards, 2, &script.lock);
    moe_engine_stop_view(test.engine);
    assert_int_equal(test.forward_done, 0);
    assert_int_equal(kept(), 0);
    begin_view();
    assert_int_equal(test.announced_count, 2); /* announced again, once */
    assert_int_equal(announced_tokens, 0);
    order_retained(1, 0);
    wait_until(&test.forward_done, 1, &test.lock);
    assert_ok(test.forward_status);
    assert_int_equal(test.forward.retained_name, 1);
    assert_int_equal(test.forward.answered_epoch, test.epoch);
}

static void a_request_larger_than_the_view_shares_steps(void **state)
{
    (void)state;
    moe_engine_stop_view(test.engine);
    save(7, 9); /* while there is no view */
    assert_int_equal(test.announced_count, 0);
    begin_view_of(4);
    assert_int_equal(test.announced_count, 0);
    assert_int_equal(announced_tokens, 7);
    order_forward(4);
    order_forward(4);
    wait_until(&test.forward_done, 1, &test.lock);
    assert_ok(test.forward_status);
    assert_int_equal(test.forward.steps, 2);
    assert_int_equal(test.forward.retained_name, 0);
    save(5, 10); /* nor one that comes now */
    assert_int_equal(test.announced_count, 0);
    assert_int_equal(announced_tokens, 12);
    order_forward(4);
    order_forward(1);
    wait_until(&test.forward_done, 2, &test.lock);
}

static void a_cancelled_request_leaves_an_empty_step(void **state)
{
    (void)state;
    script.keep = true;
    save(5, 9);
    moe_engine_cancel(test.engine, &test.forward);
    wait_until(&test.forward_done, 1, &test.lock);
    assert_refused(test.forward_status, MOE_CANCELLED, MOE_REASON_NONE);
    order_retained(0, 0); /* other slots have begun it */
    wait_until(&test.finished_count, 1, &test.lock);
    assert_ok(test.last);
    assert_int_equal(script.forwards, 1);
    /* A step that runs when its client leaves runs to its end. */
    hold_steps(true);
    save(5, 10);
    order_retained(1, 0);
    wait_until(&script.forwards, 2, &script.lock);
    moe_engine_cancel(test.engine, &test.forward);
    hold_steps(false);
    wait_until(&test.forward_done, 2, &test.lock);
    assert_int_equal(test.forward.retained_name, 2);
}

static void empty_steps_drop_none_and_count_neither_as_miss_nor_success(void **state)
{
    (void)state;
    uint64_t name = save_and_run(9);
    script.nobodys = true;
    for (int i = 0; i < 20; i++) { /* of this slot, cancelled before their tickets */
        int at = test.announced_count, ended = test.finished_count;
        save(5, 100 + (uint64_t)i);
        moe_engine_cancel(test.engine, &test.forward);
        order_retained(at, 0);
        wait_until(&test.finished_count, ended + 1, &test.lock);
    }
    int ended = test.finished_count;
    order_retained(test.announced_count - 1, 1); /* of the other slot, with rows only there */
    order_forward(4);                            /* later tickets begin after its end */
    order_forward(4);
    wait_until(&test.finished_count, ended + 3, &test.lock);
    assert_int_equal(kept(), 1);
    assert_int_equal(state_now().activation_bytes, 1);
    script.keep = false; /* eight misses, mixed with empty steps that would be kept */
    for (uint64_t id = 200; id < 208; id++) {
        int before = test.forward_done;
        save(5, id);
        order_retained(test.announced_count - 1, 0);
        wait_until(&test.forward_done, before + 1, &test.lock);
        script.keep = true;
        int at = test.announced_count;
        ended = test.finished_count;
        save(5, 1000 + id);
        moe_engine_cancel(test.engine, &test.forward);
        order_retained(at, 0);
        wait_until(&test.finished_count, ended + 1, &test.lock);
        script.keep = false;
    }
    order_forward(4);
    order_forward(4);
    wait_until(&test.finished_count, ended + 3, &test.lock);
    assert_int_equal(count_worth(MOE_DTYPE_F32, 64), 1);
    script.nobodys = false;
    backward(0, 9, name, test.epoch);
    assert_true(test.clients[0].work.step.used_retained);
}

static void activations_stay_for_a_pass_that_began_before_their_step_ended(void **state)
{
    (void)state;
    script.keep = true;
    hold_steps(true);
    save(5, 9);
    order_retained(0, 1); /* of the other slot: its Backward may come at any time */
    ask_retained(0, 9, 1, test.epoch);
    script.hold_passes = true;
    order(1, 1);
    wait_until(&script.unfinished, 2, &script.lock);
    hold_steps(false);
    wait_until(&test.finished_count, 1, &test.lock);
    moe_test_clock_advance(2 * KEPT_NS); /* it expired long ago */
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    assert_int_equal(kept(), 1);
    moe_mutex_lock(&script.lock);
    script.hold_passes = false;
    pthread_cond_broadcast(&script.changed);
    moe_mutex_unlock(&script.lock);
    wait_until(&test.finished_count, 2, &test.lock);
    assert_int_equal(script.retained, 1);
    assert_int_equal(kept(), 0);
}

static void a_request_that_expires_before_its_ticket_fails(void **state)
{
    (void)state;
    save(5, 9);
    test.forward_done = 0;
    struct moe_work late = test.forward;
    late.retain_id = 10;
    late.deadline_ns = moe_clock_ns() + 10000000;
    assert_ok(moe_engine_submit(test.engine, &late));
    wait_until(&test.forward_done, 1, &test.lock);
    assert_refused(test.forward_status, MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE);
    order_retained(1, 0);
    order_retained(0, 0);
    wait_until(&test.forward_done, 2, &test.lock);
    assert_ok(test.forward_status);
}

static void it_sees_one_version_and_obeys_pins(void **state)
{
    (void)state;
    save_version(5, 9, 1);
    ask(0, MOE_STEP_OPTIMIZER, 1, 0);
    order(1, 0);
    wait_done(0);
    wait_until(&test.forward_done, 1, &test.lock);
    assert_refused(test.forward_status, MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH);
    order_retained(0, 0);
    (void)save_and_run(10);
    assert_int_equal(test.forward.answered_version, 2);
}

static void requests_beyond_the_limit_share_steps(void **state)
{
    (void)state;
    static struct moe_work extra[EXTRA];
    int own = 0;
    save(5, 1);
    for (int i = 0; i < EXTRA; i++) {
        extra[i] = test.forward;
        extra[i].retain_id = 2 + (uint64_t)i;
        assert_ok(moe_engine_submit(test.engine, &extra[i]));
        own += extra[i].own_step;
    }
    assert_int_equal(own, 31);
    assert_int_equal(test.announced_count, 32);
    assert_int_equal(announced_tokens, (EXTRA - own) * 5);
    order_retained(0, 0);
    wait_until(&test.forward_done, 1, &test.lock);
    save(5, 100); /* there is room again */
    assert_int_equal(test.announced_count, 33);
    moe_engine_fail_queued(test.engine, moe_error(MOE_UNAVAILABLE, MOE_REASON_REFORMING, "gone"));
    wait_until(&test.forward_done, EXTRA + 2, &test.lock);
}

static void a_ticket_for_an_unannounced_request_ends_the_view(void **state)
{
    (void)state;
    save(5, 9);
    test.announced[0].descriptor.number += 7;
    order_retained(0, 0);
    wait_until(&test.finished_count, 1, &test.lock);
    assert_refused(test.last, MOE_INTERNAL, MOE_REASON_NONE);
    begin_view();
    test.announced[1].descriptor.length = 3;
    order_retained(1, 0);
    wait_until(&test.finished_count, 2, &test.lock);
    assert_refused(test.last, MOE_INTERNAL, MOE_REASON_MALFORMED);
    begin_view();
    struct moe_ticket small = test.announced[2]; /* than the request is */
    small.epoch = test.epoch;
    small.seq = ++test.seq;
    small.bucket = 4;
    moe_engine_run(test.engine, &small);
    wait_until(&test.finished_count, 3, &test.lock);
    assert_refused(test.last, MOE_INTERNAL, MOE_REASON_NONE);
    begin_view(); /* and the request is served all the same */
    order_retained(3, 0);
    wait_until(&test.forward_done, 1, &test.lock);
    assert_ok(test.forward_status);
}

static void a_retained_step_may_run_during_a_pass(void **state)
{
    (void)state;
    hold_steps(true);
    ask(0, MOE_STEP_BACKWARD, 1, 5);
    save(5, 9);
    order(0, 0);
    order_retained(1, 0);
    wait_until(&script.unfinished, 2, &script.lock);
    hold_steps(false);
    wait_done(0);
    wait_until(&test.forward_done, 1, &test.lock);
    assert_ok(test.forward_status);
}

/* No further call comes, and none has had a ticket: the worker's memory is freed all the same. */
static void passes_and_answers_expire_without_calls_and_so_does_their_memory(void **state)
{
    struct moe_pass_store *stores[] = {moe_train_passes(test.train), moe_train_answers(test.train)};
    (void)state;
    for (int i = 0; i < 2; i++)
        for (uint64_t id = 1; id <= 3; id++) {
            struct moe_pass_record *r;
            assert_ok(moe_pass_store_reserve(stores[i], 20000, moe_clock_ns(), &r));
            moe_pass_store_put(stores[i], r, "s", id, moe_clock_ns());
        }
    /* Records expire first; their memory is idle then, and expires after the same time again. */
    moe_test_clock_advance(KEPT_NS);
    for (int i = 0; i < 2; i++)
        while (moe_pass_store_bytes(stores[i]) > 0)
            pause_briefly();
    moe_test_clock_advance(KEPT_NS);
    for (int i = 0; i < 2; i++)
        while (moe_pass_store_idle_bytes(stores[i]) > 0)
            pause_briefly();
}

static int close_and_check(void **state)
{
    int failed = close_engine(state);
    assert_false(script.dropped_in_use);
    return failed;
}

#define retain_test(name) cmocka_unit_test_setup_teardown(name, open_engine, close_and_check)

int main(void)
{
    const struct CMUnitTest tests[] = {
        retain_test(a_retained_forward_has_a_separate_ticket_and_its_name),
        retain_test(without_room_on_the_device_the_step_runs_all_the_same),
        retain_test(after_misses_it_is_tried_once_in_sixty_four),
        retain_test(after_eight_misses_it_shares_a_step_and_its_answer_has_that_step),
        retain_test(its_backward_uses_and_drops_it),
        retain_test(a_backward_with_other_tensors_drops_it_unused),
        retain_test(other_slots_keep_and_drop_it_too),
        retain_test(a_repeated_pass_replaces_the_first),
        retain_test(a_change_of_the_weights_drops_all),
        retain_test(a_refused_pass_leaves_it_for_the_next_try),
        cmocka_unit_test_setup_teardown(it_expires_without_a_ticket_but_not_while_a_pass_uses_it,
                                        open_engine, close_and_check),
        cmocka_unit_test_setup_teardown(
            passes_and_answers_expire_without_calls_and_so_does_their_memory, open_engine,
            close_and_check),
        retain_test(the_end_of_a_view_drops_it_and_voids_its_name),
        retain_test(a_step_in_flight_at_the_end_of_a_view_runs_again_under_the_next),
        retain_test(a_request_larger_than_the_view_shares_steps),
        retain_test(a_cancelled_request_leaves_an_empty_step),
        retain_test(empty_steps_drop_none_and_count_neither_as_miss_nor_success),
        cmocka_unit_test_setup_teardown(
            activations_stay_for_a_pass_that_began_before_their_step_ended, open_engine,
            close_and_check),
        retain_test(a_request_that_expires_before_its_ticket_fails),
        retain_test(it_sees_one_version_and_obeys_pins),
        retain_test(requests_beyond_the_limit_share_steps),
        retain_test(a_ticket_for_an_unannounced_request_ends_the_view),
        retain_test(a_retained_step_may_run_during_a_pass),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
