/* SPDX-License-Identifier: Apache-2.0 */
/* Single scenarios of the membership machine: how views form and end, leases, saved state,
 * operators. The simulation covers unforeseen ones. */
#include "membership_fixture.h"

#include <string.h>

/* ------------------------------------------------------------------ stories */

static void a_failing_group_gives_up_with_a_reason_until_a_new_worker_comes(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    load_all(s);
    for (int attempt = 1; attempt <= ATTEMPTS; attempt++) {
        assert_int_equal(last_epoch, attempt);
        ready(s[1], "no memory\n\x1b[31m for windows");
        pass(400, 0, s, SLOTS);
    }
    assert_int_equal(prepares, ATTEMPTS * SLOTS);
    expect_state(MOE_GROUP_FAILED);
    assert_non_null(strstr(group().reason, "slot 1: no memory??[31m for windows"));
    pass(5000, 0, s, SLOTS);
    assert_int_equal(prepares, ATTEMPTS * SLOTS);
    s[1] = replace(s[1], 1, 99);
    loaded(s[1]);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    expect_state(MOE_GROUP_SERVING);
    assert_int_equal(group().epoch, ATTEMPTS + 1);
}

/* Another attempt would fail in the same way. */
static void slots_without_a_transport_end_the_first_attempt_for_good(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    load_all(s);
    const struct moe_status none = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                                             "slots 0 and 2 are on different hosts");
    moe_membership_on_ready(m, now, s[2], last_epoch, false, &none);
    carry_out();
    expect_state(MOE_GROUP_FAILED);
    assert_non_null(strstr(group().reason, "slots 0 and 2 are on different hosts"));
    pass(5000, 0, s, SLOTS);
    assert_int_equal(prepares, SLOTS);
    s[2] = replace(s[2], 2, 99);
    loaded(s[2]);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    expect_state(MOE_GROUP_SERVING);
}

static void silence_while_forming_is_named(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    load_all(s);
    ready(s[0], NULL);
    pass(550, 0, s, SLOTS);
    assert_int_equal(aborts, SLOTS);
    assert_non_null(strstr(group().reason, "no READY in time from slots 1, 2"));
}

static void a_missed_peer_ends_the_view_but_not_its_worker(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    moe_membership_on_peer_lost(m, now, s[0], 7, 1 << 2); /* of an epoch that is not in force */
    carry_out();
    expect_state(MOE_GROUP_SERVING);
    moe_membership_on_peer_lost(m, now, s[0], 1, 1 << 2);
    carry_out();
    assert_int_equal(aborts, SLOTS);
    assert_int_equal(closes, 0);
    expect_state(MOE_GROUP_DEGRADED);
    pass(150, 0, s, SLOTS); /* after the pause, slot 2 has its chance to answer */
    assert_int_equal(prepares, SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    expect_state(MOE_GROUP_SERVING);
    assert_int_equal(group().epoch, 2);
}

static void a_missed_peer_without_a_stream_is_lost_at_once(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    moe_membership_on_stream_closed(m, now, s[2]);
    carry_out();
    expect_state(MOE_GROUP_SERVING); /* it may come back within its lease */
    moe_membership_on_peer_lost(m, now, s[0], 1, 1 << 2);
    carry_out();
    struct moe_membership_worker w;
    assert_true(moe_membership_worker(m, 2, &w));
    assert_int_equal(w.state, MOE_WORKER_GONE);
    assert_int_equal(aborts, 2);
    expect_state(MOE_GROUP_DEGRADED);
}

/* The two pieces of evidence may come in either order. */
static void a_missed_peer_is_lost_as_soon_as_its_stream_ends(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    moe_membership_on_peer_lost(m, now, s[0], 1, 1 << 2);
    carry_out();
    moe_membership_on_stream_closed(m, now, s[2]);
    carry_out();
    struct moe_membership_worker w;
    assert_true(moe_membership_worker(m, 2, &w));
    assert_int_equal(w.state, MOE_WORKER_GONE);
    assert_non_null(strstr(group().reason, "missed by its peers"));
    s[2] = join(9, 99); /* another worker has the slot at once */
    assert_true(moe_membership_worker(m, 2, &w));
    assert_int_equal(w.incarnation, 99);
}

/* A member that leaves the view may be missed by one that does not know why. */
static void each_member_s_report_of_a_loss_counts(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    moe_membership_on_stream_closed(m, now, s[2]);
    carry_out();
    moe_membership_on_peer_lost(m, now, s[1], 1, 1 << 0);
    carry_out();
    struct moe_membership_worker w;
    assert_true(moe_membership_worker(m, 2, &w));
    assert_int_not_equal(w.state, MOE_WORKER_GONE); /* it may come back within its lease */
    moe_membership_on_peer_lost(m, now, s[0], 1, 1 << 1 | 1 << 2);
    carry_out();
    assert_true(moe_membership_worker(m, 2, &w));
    assert_int_equal(w.state, MOE_WORKER_GONE);
    moe_membership_on_peer_lost(m, now, s[1], 1, 1 << 0); /* again: it has left the view */
    carry_out();
    for (uint32_t i = 0; i < 2; i++) {
        moe_membership_on_stream_closed(m, now, s[i]);
        carry_out();
    }
    for (uint32_t i = 0; i < 2; i++) { /* who reports is there */
        assert_true(moe_membership_worker(m, i, &w));
        assert_int_not_equal(w.state, MOE_WORKER_GONE);
    }
}

static void evidence_of_a_view_that_is_over_does_not_count_later(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    moe_membership_on_peer_lost(m, now, s[0], 1, 1 << 2);
    carry_out();
    pass(150, 0, s, SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    expect_state(MOE_GROUP_SERVING);
    moe_membership_on_stream_closed(m, now, s[2]);
    carry_out();
    expect_state(MOE_GROUP_SERVING); /* it may come back within its lease */
}

/* ------------------------------------------------------------------ leases */

static void beat(uint64_t stream, uint64_t epoch, uint64_t sequence)
{
    struct moe_membership_heartbeat h = {.epoch = epoch, .sequence = sequence};
    moe_membership_on_heartbeat(m, now, stream, &h);
    carry_out();
}

static void heartbeats_are_answered_with_the_silence_of_the_others(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    forget();
    now += 40 * MOE_NS_PER_MS;
    beat(s[1], 1, 17);
    assert_int_equal(heartbeat_answers, 1);
    assert_int_equal(answered_sequence, 17);
    assert_int_equal(answered_oldest_ms, 40); /* slots 0 and 2 */
    moe_membership_on_peer_lost(m, now, s[0], 1, 1 << 2);
    carry_out();
    beat(s[1], 1, 18); /* the epoch is over: ABORT, and no lease */
    assert_int_equal(heartbeat_answers, 1);
    beat(s[1], 0, 19);
    assert_int_equal(heartbeat_answers, 2);
}

/* After a restart the coordinator does not know for how long the others have been silent. */
static void a_restarted_coordinator_vouches_for_no_silent_member(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    moe_membership_destroy(m);
    create_for(SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++) {
        s[i] = join(i, 10 + i);
        beat(s[i], 1, 1);
        assert_int_equal(answered_oldest_ms, i + 1 < SLOTS ? LEASE_MS : 0);
    }
}

/* Replaces the processes of the slots from `first` on by new processes of the same workers: the old
 * ones may still hold their leases, on the other side of a cut. */
static void replace_from(uint32_t first, uint64_t s[SLOTS])
{
    for (uint32_t i = first; i < SLOTS; i++) {
        moe_membership_on_stream_closed(m, now, s[i]);
        carry_out();
        s[i] = join(i, 90 + i);
    }
    for (uint32_t i = first; i < SLOTS; i++)
        loaded(s[i]);
}

static void a_group_that_trains_waits_for_leases_it_cannot_end(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    trains = true;
    serve(s);
    uint64_t received_ns = now;
    now += 20 * MOE_NS_PER_MS;
    forget();
    replace_from(0, s);
    pass(LEASE_MS - 120, 0, s, SLOTS); /* longer than any back-off */
    assert_int_equal(prepares, 0);
    assert_non_null(strstr(group().reason, "may hold a lease"));
    pass(200, 0, s, SLOTS);
    assert_int_equal(prepares, SLOTS);
    assert_true(now >= received_ns + LEASE_MS * MOE_NS_PER_MS);
}

static void one_survivor_makes_the_wait_needless(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    trains = true;
    serve(s);
    forget();
    replace_from(1, s);
    pass(150, 0, s, SLOTS);
    assert_int_equal(prepares, SLOTS);
}

static void a_group_that_does_not_train_does_not_wait(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    forget();
    replace_from(0, s);
    pass(150, 0, s, SLOTS);
    assert_int_equal(prepares, SLOTS);
}

static void leave_all(const uint64_t s[SLOTS])
{
    uint64_t epoch;
    struct moe_status st = moe_membership_shutdown(m, now, "test over", 0, &epoch);
    assert_int_equal(st.code, MOE_OK);
    carry_out();
    for (uint32_t i = 0; i < SLOTS; i++) {
        moe_membership_on_leaving(m, now, s[i], "drained");
        carry_out();
    }
}

/* The log tells a settled end from one that no log has. */
static void a_restart_waits_unless_all_had_left(void **unused)
{
    (void)unused;
    for (int settled = 0; settled < 2; settled++) {
        uint64_t s[SLOTS];
        trains = true;
        serve(s);
        if (settled)
            leave_all(s);
        else
            moe_membership_on_peer_lost(m, now, s[0], 1, 1 << 2); /* no view is in the log */
        carry_out();
        assert_int_equal(disk.view_epoch, 0);
        assert_int_equal(disk.settled, settled);
        assert_int_equal(disk.group_id, 0xabcdef);
        moe_membership_destroy(m);
        create_for(SLOTS);
        replace_from(0, s);
        pass(150, 0, s, SLOTS);
        assert_int_equal(prepares, settled ? SLOTS : 0);
        if (!settled)
            pass(LEASE_MS, 0, s, SLOTS);
        assert_int_equal(prepares, SLOTS);
        teardown(NULL);
        setup(NULL);
    }
}

static void epochs_go_on_above_what_workers_know(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS]; /* the state was lost: the workers have been further than this machine */
    for (uint32_t i = 0; i < SLOTS; i++) {
        s[i] = join(i, 10 + i);
        heartbeat(s[i], 41);
    }
    heartbeat(s[0], UINT64_MAX); /* no plausible epoch */
    for (uint32_t i = 0; i < SLOTS; i++)
        loaded(s[i]);
    assert_int_equal(last_epoch, 42);
}

static void a_full_disk_announces_nothing(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    disk_full = true;
    for (uint32_t i = 0; i < SLOTS; i++)
        s[i] = join(i, 10 + i);
    pass(250, 0, s, SLOTS);
    assert_int_equal(assigns + prepares, 0);
    assert_non_null(strstr(group().reason, "no space left"));
    disk_full = false;
    pass(500, 0, s, SLOTS);
    assert_int_equal(assigns, SLOTS);
    disk_full = true;
    for (uint32_t i = 0; i < SLOTS; i++)
        loaded(s[i]);
    assert_int_equal(prepares, 0);
    disk_full = false;
    pass(500, 0, s, SLOTS);
    assert_int_equal(prepares, SLOTS);
    assert_true(disk.epoch >= last_epoch);
}

static void a_disk_that_is_full_for_long_does_not_end_the_group(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    load_all(s);
    disk_full = true;
    moe_membership_on_stream_closed(m, now, s[1]); /* the epoch in work ends */
    carry_out();
    s[1] = join(1, 21);
    loaded(s[1]);
    pass(4 * ATTEMPTS * 300, 0, s, SLOTS);
    assert_int_not_equal(group().state, MOE_GROUP_FAILED);
    assert_non_null(strstr(group().reason, "cannot save"));
    disk_full = false;
    pass(300, 0, s, SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    expect_state(MOE_GROUP_SERVING);
}

static void a_worker_that_cannot_load_blocks_the_group_until_replaced(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    for (uint32_t i = 0; i < SLOTS; i++)
        s[i] = join(i, 10 + i);
    struct moe_status st = moe_error(MOE_NOT_FOUND, MOE_REASON_TENSOR_MISSING, "no tensor w1");
    moe_membership_on_loaded(m, now, s[1], 1, 0, &st);
    carry_out();
    loaded(s[0]);
    loaded(s[2]);
    expect_state(MOE_GROUP_FAILED);
    assert_non_null(strstr(group().reason, "slot 1 cannot load: no tensor w1"));
    s[1] = replace(s[1], 1, 99);
    expect_state(MOE_GROUP_LOADING);
    loaded(s[1]);
    assert_int_equal(prepares, SLOTS);
}

static void another_model_gets_another_placement_version(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    assert_int_equal(disk.placement_version, 1);
    moe_membership_destroy(m);
    create_for(SLOTS); /* restarted; the old workers are gone and another model is to be served */
    assert_int_equal(group().epoch, 1);
    experts = 9;
    join(7, 1);
    experts = 6;
    assert_int_equal(closed_with.code,
                     MOE_RESOURCE_EXHAUSTED); /* the slots stay taken for a lease */
    pass(LEASE_MS, 0, NULL, 0);
    experts = 9;
    for (uint32_t i = 0; i < SLOTS; i++)
        s[i] = join(7 + i, 1);
    experts = 6;
    assert_int_equal(assigns, SLOTS);
    assert_int_equal(disk.placement_version, 2);
    for (uint32_t i = 0; i < SLOTS; i++)
        loaded(s[i]);
    assert_int_equal(last_epoch, 2);
}

static void a_group_of_another_size_starts_afresh_above_the_old_epochs(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    moe_membership_destroy(m);
    create_for(1);
    assert_int_equal(group().epoch, 0);
    s[0] = join(0, 10);
    loaded(s[0]);
    assert_int_equal(last_epoch, 2);
    assert_int_equal(moe_placement_version(moe_membership_placement(m)), 2);
}

static void a_shutdown_waits_for_all_and_not_for_ever(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS], epoch;
    serve(s);
    struct moe_status st = moe_membership_shutdown(m, now, "", 0, &epoch);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = moe_membership_shutdown(m, now, "done", 0, &epoch);
    assert_int_equal(st.code, MOE_OK);
    carry_out();
    assert_int_equal(epoch, 1);
    assert_int_equal(drains, SLOTS);
    moe_membership_on_leaving(m, now, s[0], "drained");
    carry_out();
    assert_int_equal(aborts + closes, 0); /* the others may still need its experts */
    assert_int_equal(group().epoch, 1);
    join(9, 1);
    assert_int_equal(closed_with.reason, MOE_REASON_DRAINING);
    pass(1900, 1, s, SLOTS);
    assert_false(exited);
    pass(100, 1, s, SLOTS);
    assert_true(exited);
    assert_int_equal(disk.view_epoch, 0);
    assert_int_equal(moe_membership_deadline(m), MOE_NEVER);
}

static void a_group_that_waits_for_an_operator_never_gives_up(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    struct moe_membership_worker w;
    load_all(s);
    struct moe_status stuck =
        moe_error(MOE_DATA_LOSS, MOE_REASON_CANNOT_GO_BACK, "checkpoint e6: there is none");
    uint64_t first = last_epoch;
    for (uint64_t attempt = 0; attempt < 4 * ATTEMPTS; attempt++) {
        assert_int_equal(last_epoch, first + attempt);
        moe_membership_on_ready(m, now, s[1], last_epoch, false, &stuck);
        carry_out();
        if (attempt == ATTEMPTS) { /* at the longest pause by now */
            pass(250, 0, s, SLOTS);
            assert_int_equal(last_epoch, first + attempt);
        }
        pass(300, 0, s, SLOTS);
        expect_state(MOE_GROUP_FORMING);
        assert_non_null(strstr(group().reason, "checkpoint e6: there is none"));
    }
    assert_true(moe_membership_worker(m, 1, &w));
    assert_int_equal(w.error->code, MOE_DATA_LOSS);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    expect_state(MOE_GROUP_SERVING);
    assert_true(moe_membership_worker(m, 1, &w)); /* the failure is over */
    assert_int_equal(w.error->code, MOE_OK);
}

/* The operator may ask in every stage of an attempt. */
static void a_group_with_a_recovery_choice_does_not_wait(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    load_all(s);
    struct moe_status stuck =
        moe_error(MOE_DATA_LOSS, MOE_REASON_CANNOT_GO_BACK, "checkpoint e6: there is none");
    for (int i = 0; i < 5; i++) { /* until the pause is at its longest */
        moe_membership_on_ready(m, now, s[1], last_epoch, false, &stuck);
        carry_out();
        pass(i < 4 ? 300 : 0, 0, s, SLOTS);
    }
    uint64_t before = last_epoch;
    moe_membership_on_try_again(m, now, s[0]);
    carry_out();
    assert_int_equal(last_epoch, before + 1);
    /* While an attempt runs that may have begun without knowing it: one more follows at once. */
    moe_membership_on_try_again(m, now, s[1]);
    carry_out();
    assert_int_equal(last_epoch, before + 1);
    moe_membership_on_ready(m, now, s[1], last_epoch, false, &stuck);
    carry_out();
    assert_int_equal(last_epoch, before + 2);
    /* But not for ever. */
    moe_membership_on_ready(m, now, s[1], last_epoch, false, &stuck);
    carry_out();
    assert_int_equal(last_epoch, before + 2);
    pass(300, 0, s, SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    expect_state(MOE_GROUP_SERVING);
    moe_membership_on_try_again(m, now, s[1]); /* no attempt is possible */
    carry_out();
    expect_state(MOE_GROUP_SERVING);
    assert_int_equal(answers, 3); /* each was answered */
}

/* The attempt in which the operator asked succeeds: the request has no effect on later failures. */
static void what_an_operator_said_is_over_with_its_epoch(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    load_all(s);
    moe_membership_on_try_again(m, now, s[0]);
    carry_out();
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    expect_state(MOE_GROUP_SERVING);
    disk_full = true; /* and another model comes; its placement must be saved */
    for (uint32_t i = 0; i < SLOTS; i++) {
        moe_membership_on_leaving(m, now, s[i], "bye");
        carry_out();
    }
    uint32_t usual = experts;
    experts = 9;
    for (uint32_t i = 0; i < SLOTS; i++)
        s[i] = join(i, 50 + i);
    experts = usual;
    forget();
    pass(3000, 0, s, SLOTS);
    print_message("  %zu writes tried in 3 s\n", saves);
    assert_in_range(saves, 5, 3000 / 100);
}

static void a_group_that_has_failed_begins_again_on_a_recovery_choice(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    load_all(s);
    struct moe_status other = moe_error(MOE_UNAVAILABLE, MOE_REASON_NONE, "something else");
    for (int i = 0; i < ATTEMPTS; i++) {
        moe_membership_on_ready(m, now, s[1], last_epoch, false, &other);
        carry_out();
        pass(300, 0, s, SLOTS);
    }
    expect_state(MOE_GROUP_FAILED);
    uint64_t before = last_epoch;
    moe_membership_on_try_again(m, now, s[0]);
    carry_out();
    assert_int_equal(last_epoch, before + 1);
    expect_state(MOE_GROUP_FORMING);
}

static void a_view_that_keeps_breaking_is_given_up(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    for (int i = 0; i < 10; i++) {
        moe_membership_on_peer_lost(m, now, s[0], group().epoch, 2);
        carry_out();
        pass(350, 0, s, SLOTS);
        for (uint32_t k = 0; k < SLOTS; k++)
            ready(s[k], NULL);
    }
    expect_state(MOE_GROUP_FAILED);
    assert_int_equal(prepares, (ATTEMPTS - 1) * SLOTS);
}

static void blobs_out_of_turn_end_the_attempt(void **unused)
{
    (void)unused;
    static const uint8_t data[MOE_MEMBERSHIP_BLOB_BYTES + 1];
    static const struct {
        uint32_t round;
        size_t length, count;
        const char *why;
    } cases[] = {{1, 4, 1, "of another round"},
                 {0, sizeof data, 1, "too large"},
                 {0, 4, 2, "more than asked for"}};
    for (size_t c = 0; c < 3; c++) {
        uint64_t s[SLOTS];
        load_all(s);
        for (size_t i = 0; i < cases[c].count; i++) {
            moe_membership_on_blob(m, now, s[1], last_epoch, cases[c].round, data, cases[c].length);
            carry_out();
        }
        expect_state(MOE_GROUP_LOADING);
        assert_non_null(strstr(group().reason, cases[c].why));
        teardown(NULL);
        setup(NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        STORY(a_failing_group_gives_up_with_a_reason_until_a_new_worker_comes),
        STORY(slots_without_a_transport_end_the_first_attempt_for_good),
        STORY(silence_while_forming_is_named),
        STORY(a_missed_peer_ends_the_view_but_not_its_worker),
        STORY(a_missed_peer_without_a_stream_is_lost_at_once),
        STORY(a_missed_peer_is_lost_as_soon_as_its_stream_ends),
        STORY(each_member_s_report_of_a_loss_counts),
        STORY(evidence_of_a_view_that_is_over_does_not_count_later),
        STORY(heartbeats_are_answered_with_the_silence_of_the_others),
        STORY(a_restarted_coordinator_vouches_for_no_silent_member),
        STORY(a_group_that_trains_waits_for_leases_it_cannot_end),
        STORY(one_survivor_makes_the_wait_needless),
        STORY(a_group_that_does_not_train_does_not_wait),
        STORY(a_restart_waits_unless_all_had_left),
        STORY(epochs_go_on_above_what_workers_know),
        STORY(a_full_disk_announces_nothing),
        STORY(a_disk_that_is_full_for_long_does_not_end_the_group),
        STORY(a_worker_that_cannot_load_blocks_the_group_until_replaced),
        STORY(another_model_gets_another_placement_version),
        STORY(a_group_of_another_size_starts_afresh_above_the_old_epochs),
        STORY(a_shutdown_waits_for_all_and_not_for_ever),
        STORY(a_group_that_waits_for_an_operator_never_gives_up),
        STORY(a_group_with_a_recovery_choice_does_not_wait),
        STORY(what_an_operator_said_is_over_with_its_epoch),
        STORY(a_group_that_has_failed_begins_again_on_a_recovery_choice),
        STORY(a_view_that_keeps_breaking_is_given_up),
        STORY(blobs_out_of_turn_end_the_attempt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
