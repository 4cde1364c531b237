/* SPDX-License-Identifier: Apache-2.0 */
/* Single scenarios of the membership machine in groups that train: who holds changes back, for
 * which worker, and for how long. The simulation covers unforeseen ones. */
#include "membership_fixture.h"

#include <string.h>

static void copies_and_training_need_a_backend_for_both(void **unused)
{
    (void)unused;
    create_with_copies();
    trains = true;
    (void)join(0, 10);
    assert_int_equal(closed_with.code, MOE_FAILED_PRECONDITION);
    assert_int_equal(closed_with.reason, MOE_REASON_UNSUPPORTED);
    assert_non_null(strstr(closed_with.text, "replicas"));
    struct moe_membership_config none = {
        .slots = 2, .replicas = 3, .lease_ns = 1, .form_ns = 1, .attempts_max = 1};
    struct moe_membership *refused;
    struct moe_status st = moe_membership_create(&none, &disk, now, &refused);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
}

/* Members of a view that trains hold changes back for a worker that waits, and no longer than it
 * can take part: who leaves waits for calls that are held. */
static void changes_are_held_for_a_worker_only_if_the_view_can_grow(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS], epoch;
    trains = trains_with_copies = true;
    create_with_copies();
    serve(s);
    lose(s, 2, 1);
    ready(s[0], NULL);
    ready(s[1], NULL);
    assert_int_equal(group().live, 3);
    heartbeat(s[0], 2);
    assert_false(answered_keep);
    loaded(join(2, 99));
    heartbeat(s[0], 2);
    assert_true(answered_keep);
    struct moe_status st = moe_membership_drain(m, now, 1, "test", 0, true, &epoch);
    assert_int_equal(st.code, MOE_OK);
    carry_out();
    heartbeat(s[0], 2);
    assert_false(answered_keep);
}

/* Slots 0 and 1 serve and train; a new process in slot 2 has loaded. Returns its stream. */
static uint64_t wait_for_a_save(uint64_t s[SLOTS])
{
    trains = trains_with_copies = true;
    create_with_copies();
    serve(s);
    lose(s, 2, 1);
    ready(s[0], NULL);
    ready(s[1], NULL);
    s[2] = join(2, 99);
    loaded(s[2]);
    forget();
    heartbeat(s[0], 2);
    assert_true(answered_keep);
    assert_int_equal(answered_released, 0);
    return s[2];
}

static void both_report(const uint64_t s[SLOTS], uint64_t calls)
{
    heartbeat_saved(s[0], 2, calls);
    heartbeat_saved(s[1], 2, calls);
}

static void a_worker_reads_the_state_while_the_view_goes_on(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    uint64_t newcomer = wait_for_a_save(s);
    heartbeat_saved(s[0], 2, 7);
    heartbeat_saved(s[1], 2, 6); /* another state */
    assert_int_equal(reads, 0);
    heartbeat_saved(s[1], 2, 7);
    assert_int_equal(reads, 1);
    for (int i = 0; i < 4; i++) { /* it is ordered once */
        pass(READ_MS / 10, 0, &newcomer, 1);
        both_report(s, 7);
    }
    assert_int_equal(reads, 1);
    assert_int_equal(group().epoch, 2);
    assert_int_equal(prepares + aborts, 0);
    uint64_t order = read_order[2];
    read_order[2] = order - 1;
    checkpoint_read(newcomer, 2, NULL); /* the answer to another order */
    assert_int_equal(prepares, 0);
    read_order[2] = order;
    checkpoint_read(newcomer, 2, NULL);
    assert_int_equal(aborts, 2);
    assert_int_equal(prepares, SLOTS);
    assert_int_equal(group().live, 7);
}

static void training_waits_for_a_reader_only_so_long(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    uint64_t newcomer = wait_for_a_save(s);
    both_report(s, 7);
    for (uint64_t t = 50; t < READ_MS; t += 50) {
        pass(50, 0, &newcomer, 1);
        both_report(s, 7);
    }
    both_report(s, 7);
    assert_true(answered_keep);
    pass(50, 0, &newcomer, 1);
    both_report(s, 7);
    assert_false(answered_keep); /* also in a later Save, until it has answered */
    both_report(s, 8);
    assert_false(answered_keep);
    assert_int_equal(reads, 1);
    checkpoint_read(newcomer, 2, NULL); /* a state that is gone */
    assert_int_equal(prepares, 0);
    both_report(s, 8);
    assert_true(answered_keep);
    assert_int_equal(reads, 2);
    checkpoint_read(newcomer, 2, NULL);
    assert_int_equal(prepares, SLOTS);
}

static void a_late_reader_joins_a_group_that_still_has_the_state(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    uint64_t newcomer = wait_for_a_save(s);
    both_report(s, 7);
    for (uint64_t t = 0; t < READ_MS; t += 500) {
        pass(500, 0, &newcomer, 1);
        both_report(s, 7);
    }
    assert_false(answered_keep);
    both_report(s, 0); /* they do not hold changes back any more */
    checkpoint_read(newcomer, 2, NULL);
    assert_int_equal(prepares, 0);
    heartbeat(s[0], 2);
    assert_true(answered_keep);
    assert_int_equal(answered_released, 0);
    both_report(s, 7);
    assert_int_equal(prepares, SLOTS);
}

static void a_worker_that_cannot_read_is_asked_after_the_next_save(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    uint64_t newcomer = wait_for_a_save(s);
    both_report(s, 7);
    checkpoint_read(newcomer, 2, "a file is damaged");
    both_report(s, 7);
    assert_int_equal(answered_released, 7); /* and held back in the next Save */
    assert_true(answered_keep);
    assert_int_equal(reads, 1);
    assert_int_equal(prepares, 0);
    both_report(s, 9);
    assert_int_equal(answered_released, 0);
    assert_int_equal(reads, 2);
    checkpoint_read(newcomer, 2, NULL);
    assert_int_equal(prepares, SLOTS);
}

static void a_read_that_is_called_off_is_ordered_again(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    uint64_t newcomer = wait_for_a_save(s);
    both_report(s, 7);
    checkpoint_read_as(newcomer, 2, moe_error(MOE_CANCELLED, MOE_REASON_NONE, "called off"));
    both_report(s, 7);
    assert_int_equal(answered_released, 0);
    assert_int_equal(reads, 2);
    checkpoint_read(newcomer, 2, NULL);
    assert_int_equal(prepares, SLOTS);
}

static void a_reader_without_its_experts_loads_again(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    uint64_t newcomer = wait_for_a_save(s);
    both_report(s, 7);
    assert_int_equal(assigns, 0);
    checkpoint_read_as(newcomer, 2,
                       moe_error(MOE_DATA_LOSS, MOE_REASON_VERSION_MISMATCH, "not loaded"));
    assert_int_equal(assigns, 1);
    both_report(s, 7);
    assert_false(answered_keep);
    assert_int_equal(reads, 1);
    loaded(newcomer);
    both_report(s, 7);
    both_report(s, 7);
    assert_int_equal(reads, 2);
    checkpoint_read(newcomer, 2, NULL);
    assert_int_equal(prepares, SLOTS);
}

/* Another member comes back on a new stream: the view cannot grow for a moment. */
static void a_reader_is_kept_while_a_member_reconnects(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    uint64_t newcomer = wait_for_a_save(s);
    both_report(s, 7);
    lose_stream(s[1]);
    heartbeat_saved(s[0], 2, 7);
    assert_false(answered_keep);
    checkpoint_read(newcomer, 2, NULL);
    assert_int_equal(prepares, 0);
    s[1] = join(1, 11);
    both_report(s, 7);
    both_report(s, 7);
    assert_int_equal(reads, 1);
    assert_int_equal(prepares, SLOTS);
}

/* It answers on the stream that is lost, or not at all. Training does not wait again. */
static void a_late_reader_that_reconnects_is_asked_again(void **unused)
{
    (void)unused;
    for (int read = 0; read < 2; read++) {
        uint64_t s[SLOTS];
        uint64_t newcomer = wait_for_a_save(s);
        both_report(s, 7);
        for (uint64_t t = 0; t < READ_MS; t += 500) {
            pass(500, 0, &newcomer, 1);
            both_report(s, 7);
        }
        both_report(s, 7);
        assert_false(answered_keep);
        if (read)
            checkpoint_read(newcomer, 2, NULL); /* and both members have let go of the state */
        assert_int_equal(reads, 1);
        lose_stream(newcomer);
        newcomer = join(2, 99);
        heartbeat(s[0], 2);
        heartbeat(s[1], 2);
        assert_int_equal(reads, 2);
        assert_false(answered_keep);
        checkpoint_read(newcomer, 2, NULL);
        heartbeat(s[0], 2);
        assert_true(answered_keep);
        assert_int_equal(prepares, 0);
        both_report(s, 7); /* the group still has it */
        assert_int_equal(prepares, SLOTS);
        assert_int_equal(reads, 2);
        teardown(NULL);
        setup(NULL);
    }
}

/* Each Save makes training wait for it. */
static void a_worker_that_never_can_read_is_given_up(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    uint64_t newcomer = wait_for_a_save(s);
    struct moe_membership_worker w;
    for (uint64_t calls = 7; calls < 13; calls++) {
        both_report(s, calls);
        if (reads == calls - 6)
            checkpoint_read(newcomer, 2, "a file is damaged");
    }
    assert_int_equal(reads, 3);
    assert_false(answered_keep);
    assert_true(moe_membership_worker(m, 2, &w));
    assert_non_null(strstr(w.error->text, "restart it: a file is damaged"));
    lose_stream(newcomer);
    newcomer = join(2, 99); /* the same process */
    both_report(s, 13);
    assert_false(answered_keep);
    newcomer = replace(newcomer, 2, 100);
    loaded(newcomer);
    heartbeat(s[0], 2);
    assert_true(answered_keep);
    both_report(s, 14);
    assert_int_equal(reads, 4);
    checkpoint_read(newcomer, 2, NULL);
    assert_int_equal(prepares, SLOTS);
}

static void a_state_that_is_released_is_not_read_any_more(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    uint64_t newcomer = wait_for_a_save(s);
    both_report(s, 7);
    checkpoint_read(newcomer, 2, "no such checkpoint");
    both_report(s, 7);
    assert_int_equal(answered_released, 7); /* from now on they may change it */
    newcomer = replace(newcomer, 2, 100);
    loaded(newcomer);
    assert_int_equal(reads, 1);
    heartbeat(s[0], 2);
    assert_int_equal(answered_released, 0);
    both_report(s, 7); /* they have not changed it, and hold it again */
    assert_int_equal(reads, 2);
}

static void a_reader_that_is_lost_holds_nothing_back(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    uint64_t newcomer = wait_for_a_save(s);
    both_report(s, 7);
    newcomer = replace(newcomer, 2, 100);
    both_report(s, 7);
    assert_false(answered_keep); /* the new process loads */
    loaded(newcomer);
    both_report(s, 7);
    assert_true(answered_keep);
    assert_int_equal(reads, 2);
    checkpoint_read(newcomer, 2, NULL);
    assert_int_equal(prepares, SLOTS);
}

/* A group that trains, with copies: the first member tells a restarted coordinator that the view is
 * over. The one that comes back a moment later has state too, and is not left out. */
static void after_a_restart_training_waits_for_a_lease_for_its_members(void **unused)
{
    (void)unused;
    for (int late = 0; late < 2; late++) {
        uint64_t s[SLOTS];
        trains = trains_with_copies = true;
        create_with_copies();
        serve(s);
        moe_membership_destroy(m);
        create_for(SLOTS);
        s[0] = join(0, 10);
        heartbeat(s[0], 0);
        s[2] = join(2, 12);
        uint64_t both[] = {s[0], s[2]};
        pass(LEASE_MS / 4, 0, both, 2); /* they get their shares */
        loaded(s[0]);
        loaded(s[2]);
        forget();
        pass(LEASE_MS / 4, 0, both, 2);
        assert_int_equal(prepares, 0);
        if (late) {
            s[1] = join(1, 11);
            loaded(s[1]);
            assert_int_equal(group().live, 7);
        } else {
            for (int i = 0; i < 20 && prepares == 0; i++)
                pass(LEASE_MS / 20, 0, both, 2);
            assert_int_equal(group().live, 5); /* it is lost */
        }
        assert_int_equal(prepares, late ? 3 : 2);
        teardown(NULL);
        setup(NULL);
    }
}

/* The same, though the first to register is the successor of one that died meanwhile. */
static void a_successor_that_comes_first_leaves_no_member_out(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    trains = trains_with_copies = true;
    create_with_copies();
    serve(s);
    moe_membership_destroy(m);
    create_for(SLOTS);
    s[2] = join(2, 99);
    s[0] = join(0, 10);
    heartbeat(s[0], 0);
    uint64_t both[] = {s[0], s[2]};
    pass(LEASE_MS / 4, 0, both, 2); /* they get their shares */
    loaded(s[0]);
    loaded(s[2]);
    forget();
    pass(LEASE_MS / 4, 0, both, 2);
    assert_int_equal(prepares, 0);
    s[1] = join(1, 11);
    loaded(s[1]);
    assert_int_equal(group().live & 3, 3);
}

/* The last view had no slot 1: the others do not wait for it. */
static void after_a_restart_training_waits_for_members_only(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    trains = trains_with_copies = true;
    create_with_copies();
    serve(s);
    lose(s, 1, 1);
    ready(s[0], NULL);
    ready(s[2], NULL);
    assert_int_equal(group().live, 5);
    moe_membership_destroy(m);
    create_for(SLOTS);
    s[0] = join(0, 10);
    heartbeat(s[0], 0);
    s[2] = join(2, 12);
    uint64_t both[] = {s[0], s[2]};
    pass(LEASE_MS / 4, 0, both, 2); /* they get their shares */
    loaded(s[0]);
    assert_int_equal(prepares, 0);
    loaded(s[2]);
    assert_int_equal(prepares, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        STORY(copies_and_training_need_a_backend_for_both),
        STORY(changes_are_held_for_a_worker_only_if_the_view_can_grow),
        STORY(a_worker_reads_the_state_while_the_view_goes_on),
        STORY(training_waits_for_a_reader_only_so_long),
        STORY(a_late_reader_joins_a_group_that_still_has_the_state),
        STORY(a_worker_that_cannot_read_is_asked_after_the_next_save),
        STORY(a_read_that_is_called_off_is_ordered_again),
        STORY(a_reader_without_its_experts_loads_again),
        STORY(a_reader_is_kept_while_a_member_reconnects),
        STORY(a_late_reader_that_reconnects_is_asked_again),
        STORY(a_worker_that_never_can_read_is_given_up),
        STORY(a_state_that_is_released_is_not_read_any_more),
        STORY(a_reader_that_is_lost_holds_nothing_back),
        STORY(after_a_restart_training_waits_for_a_lease_for_its_members),
        STORY(a_successor_that_comes_first_leaves_no_member_out),
        STORY(after_a_restart_training_waits_for_members_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
