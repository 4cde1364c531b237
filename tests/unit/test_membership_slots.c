/* SPDX-License-Identifier: Apache-2.0 */
/* Single scenarios of the membership machine: who has a slot, and which slots form a view. The
 * simulation covers unforeseen ones. */
#include "membership_fixture.h"

#include <stdio.h>
#include <string.h>

/* ------------------------------------------------------------------ replicas */

/* Another worker takes slot 2, and all form the next view. */
static void refill(uint64_t s[SLOTS])
{
    s[2] = join(2, 99);
    loaded(s[2]);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
}

static void a_group_with_copies_serves_without_a_lost_slot(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    create_with_copies();
    serve(s);
    assert_int_equal(group().live, 7);
    lose(s, 2, 1);
    assert_int_equal(prepares, 2); /* at once */
    assert_int_equal(last_epoch, 2);
    ready(s[0], NULL);
    ready(s[1], NULL);
    expect_state(MOE_GROUP_SERVING);
    assert_int_equal(group().live, 3);
    assert_int_equal(disk.members[2].incarnation, 0);
    assert_int_equal(moe_membership_to_save(m)->view_epoch, 2);
    forget();
    s[2] = join(2, 99);
    assert_int_equal(assigns, 1);
    assert_int_equal(group().epoch, 2); /* while it loads */
    loaded(s[2]);
    assert_int_equal(aborts, 2);
    assert_int_equal(prepares, SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    assert_int_equal(group().epoch, 3);
    assert_int_equal(group().live, 7);
    assert_int_equal(group().causes[MOE_CAUSE_GROWN], 1);
}

/* The others go on in their session; a new process needs another one. */
static void a_lost_slot_costs_the_others_no_new_session(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    create_with_copies();
    domain = 1;
    serve(s);
    assert_int_equal(last_session, 0);
    lose(s, 2, 1);
    assert_int_equal(last_epoch, 2);
    assert_int_equal(last_session, 1);
    ready(s[0], NULL);
    ready(s[1], NULL);
    expect_state(MOE_GROUP_SERVING);
    assert_int_equal(group().max_tokens_per_step, 64);
    s[2] = join(2, 99);
    loaded(s[2]);
    assert_int_equal(last_epoch, 3);
    assert_int_equal(last_session, 0);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    lose(s, 1, 3);
    assert_int_equal(last_session, 3);
}

/* Slots 0 and 1 forward rows for each other. */
static void slots_of_a_domain_are_masked_together(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    create_with_copies();
    domain = 2;
    serve(s);
    lose(s, 2, 1);
    assert_int_equal(last_epoch, 2);
    assert_int_equal(last_session, 1);
    ready(s[0], NULL);
    ready(s[1], NULL);
    refill(s);
    lose(s, 1, 3);
    assert_int_equal(last_epoch, 4);
    assert_int_equal(last_session, 0);
}

/* The same slots, or a session that a member does not have any more: the next attempt is at once.
 */
static void a_mask_that_fails_is_followed_by_a_new_session(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    create_with_copies();
    domain = 1;
    serve(s);
    lose(s, 2, 1);
    assert_int_equal(last_session, 1);
    forget();
    ready(s[1], "this worker has kept no session");
    assert_int_equal(prepares, 2);
    assert_int_equal(last_epoch, 3);
    assert_int_equal(last_session, 0);
    domain = 0;
    ready(s[0], NULL);
    ready(s[1], NULL);
    expect_state(MOE_GROUP_SERVING);
    refill(s);
    lose(s, 2, 4);
    assert_int_equal(last_epoch, 5);
    assert_int_equal(last_session, 0);
}

static void the_last_copy_of_an_expert_is_waited_for(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    create_with_copies();
    serve(s);
    lose_stream(s[2]);
    lose_stream(s[1]);
    miss(s[0], 1, 1 << 2 | 1 << 1);
    pass(500, 0, s, 1);
    assert_int_equal(prepares, 0);
    expect_state(MOE_GROUP_DEGRADED);
    s[1] = join(1, 99);
    loaded(s[1]);
    assert_int_equal(prepares, 2);
}

/* It is connected, so it keeps its slot; it is stopped, so it does not leave the old epoch. */
static void a_stopped_member_stays_out_until_it_shows_life(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    create_with_copies();
    serve(s);
    miss(s[0], 1, 0); /* the sequencer knows only that a step has failed */
    assert_int_equal(group().live, 0);
    miss(s[1], 1, 1 << 0 | 1 << 2); /* slot 0 has left the session: it is not meant */
    pass(150, 0, s, 2);
    assert_int_equal(group().live, 3);
    ready(s[0], NULL);
    ready(s[1], NULL);
    pass(500, 2, s, 2);
    assert_int_equal(group().epoch, 2);
    heartbeat(s[2], 1); /* it goes on, in an epoch that is over */
    assert_int_equal(group().epoch, 2);
    heartbeat(s[2], 0);
    assert_int_equal(group().live, 7);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    assert_int_equal(group().epoch, 3);
}

/* Time without messages. */
static void wait_ms(uint64_t ms)
{
    now += ms * MOE_NS_PER_MS;
    moe_membership_on_tick(m, now);
    carry_out();
}

static void who_reports_is_no_suspect_any_more(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    create_with_copies();
    serve(s);
    miss(s[1], 1, 1 << 0); /* which has only left the view, as slot 2 does not answer */
    assert_int_equal(prepares, 2);
    forget();
    miss(s[0], 1, 1 << 2);
    assert_int_equal(prepares, 2); /* at once, with slot 0 */
    assert_int_equal(last_epoch, 3);
    ready(s[0], NULL);
    ready(s[1], NULL);
    expect_state(MOE_GROUP_SERVING);
    assert_int_equal(group().live, 3);
    heartbeat(s[2], 0);
    wait_ms(150);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    assert_int_equal(group().live, 7);
    miss(s[1], 4, 1 << 0); /* the first strike of slot 0 */
    heartbeat(s[0], 0);
    ready(s[1], NULL);
    ready(s[2], NULL);
    assert_int_equal(group().live, 6);
    forget();
    wait_ms(150);
    assert_int_equal(prepares, SLOTS);
}

static void a_group_that_starts_waits_a_lease_for_the_last_worker(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    create_with_copies();
    s[0] = join(0, 10);
    s[1] = join(1, 11);
    pass(LEASE_MS - 50, 0, s, 2);
    assert_int_equal(assigns, 0);
    pass(50, 0, s, 2);
    assert_int_equal(assigns, 2);
    loaded(s[0]);
    assert_int_equal(prepares, 0);
    loaded(s[1]);
    assert_int_equal(prepares, 2);
}

static void a_newcomer_that_fails_to_form_stays_out(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    create_with_copies();
    serve(s);
    lose(s, 2, 1);
    ready(s[0], NULL);
    ready(s[1], NULL);
    s[2] = join(2, 99);
    loaded(s[2]);
    forget();
    ready(s[1], "slot 2 cannot be reached");
    assert_int_equal(prepares, 2); /* the others go on at once */
    ready(s[0], NULL);
    ready(s[1], NULL);
    assert_int_equal(group().epoch, 4);
    assert_int_equal(group().live, 3);
}

static void a_restart_finds_a_view_with_a_mask(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    create_with_copies();
    serve(s);
    lose(s, 1, 1);
    ready(s[0], NULL);
    ready(s[2], NULL);
    assert_int_equal(group().epoch, 2);
    moe_membership_destroy(m);
    create_for(SLOTS);
    s[0] = join(0, 10);
    s[2] = join(2, 12);
    heartbeat(s[0], 2);
    heartbeat(s[2], 2);
    expect_state(MOE_GROUP_SERVING);
    assert_int_equal(group().epoch, 2);
    assert_int_equal(group().live, 5);
    moe_membership_destroy(m);
    replicas = 1; /* a view without copies needs all slots */
    create_for(SLOTS);
    assert_int_equal(group().epoch, 0);
}

/* All three come back to a restarted coordinator, and tell of the session of `epoch`. */
static void restart(uint64_t s[SLOTS], uint64_t epoch, uint32_t max_tokens)
{
    moe_membership_destroy(m);
    create_for(SLOTS);
    registered_session = epoch;
    registered_tokens = max_tokens;
    for (uint32_t i = 0; i < SLOTS; i++) {
        s[i] = join(i, 10 + i);
        heartbeat(s[i], 1);
        loaded(s[i]);
    }
    expect_state(MOE_GROUP_SERVING);
    assert_int_equal(group().epoch, 1);
}

static void after_a_restart_members_tell_of_their_session(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    create_with_copies();
    domain = 1;
    serve(s);
    restart(s, 1, 64);
    lose(s, 2, 1);
    assert_int_equal(last_epoch, 2);
    assert_int_equal(last_session, 1);
    ready(s[0], NULL);
    ready(s[1], NULL);
    expect_state(MOE_GROUP_SERVING);
}

/* Its session is none of the view in the log, or it has none, or has steps above its own limit. */
static void a_session_that_cannot_be_takes_no_mask(void **unused)
{
    (void)unused;
    static const struct {
        uint64_t epoch;
        uint32_t max_tokens;
    } registered[] = {{0, 64}, {2, 64}, {1, 128}};
    uint64_t s[SLOTS];
    for (size_t i = 0; i < sizeof registered / sizeof *registered; i++) {
        create_with_copies();
        memset(&disk, 0, sizeof disk);
        create_with_copies();
        domain = 1;
        serve(s);
        restart(s, registered[i].epoch, registered[i].max_tokens);
        lose(s, 2, 1);
        assert_int_equal(last_epoch, 2);
        assert_int_equal(last_session, 0);
    }
}

static void the_last_copy_is_drained_by_force_only(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS], epoch;
    create_with_copies();
    serve(s);
    struct moe_status st = moe_membership_drain(m, now, 1, "test", 0, false, &epoch);
    assert_int_equal(st.code, MOE_OK);
    carry_out();
    st = moe_membership_drain(m, now, 2, "test", 0, false, &epoch);
    assert_int_equal(st.code, MOE_FAILED_PRECONDITION);
    assert_int_equal(st.reason, MOE_REASON_EXPERT_UNAVAILABLE);
    assert_int_equal(drains, 1);
    st = moe_membership_drain(m, now, 2, "test", 0, true, &epoch);
    assert_int_equal(st.code, MOE_OK);
    carry_out();
    assert_int_equal(drains, 2);
    moe_membership_on_leaving(m, now, s[1], "drained");
    carry_out();
    expect_state(MOE_GROUP_DEGRADED); /* slot 2 is leaving too */
}

static void a_reconnect_within_the_lease_costs_nothing(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    moe_membership_on_stream_closed(m, now, s[2]);
    carry_out();
    pass(LEASE_MS / 2, 1, s, 2);
    s[2] = join(2, 12);
    heartbeat(s[2], 1);
    pass(3 * LEASE_MS, 1, s, SLOTS);
    expect_state(MOE_GROUP_SERVING);
    assert_int_equal(aborts + prepares + assigns + closes, 0);
}

static void a_worker_that_comes_back_without_the_epoch_ends_it(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    s[2] = join(2, 12); /* the new stream replaces the old one */
    assert_int_equal(closes, 1);
    assert_true(closed_stream != s[2]);
    heartbeat(s[2], 0);
    assert_int_equal(aborts, SLOTS);
    expect_state(MOE_GROUP_DEGRADED);
}

static void a_living_worker_keeps_its_slot(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    join(1, 99); /* another process with its worker_id */
    assert_int_equal(closed_stream, last_stream);
    assert_int_equal(closed_with.code, MOE_RESOURCE_EXHAUSTED);
    assert_true(closed_with.retry_after_ms > 0);
    print_message("  %s\n", closed_with.text);
    assert_int_equal(aborts, 0);
    expect_state(MOE_GROUP_SERVING);
    s[1] = replace(s[1], 1, 99); /* the old one has gone: at once */
    assert_int_equal(closes, 1);
    assert_int_equal(aborts, SLOTS - 1);
    expect_state(MOE_GROUP_DEGRADED);
}

static void the_address_of_another_worker_is_refused(void **unused)
{
    (void)unused;
    uint64_t first = join(0, 10);
    given_endpoint = "127.0.0.1:1";
    join(1, 11);
    assert_int_equal(closed_with.code, MOE_ALREADY_EXISTS);
    assert_non_null(strstr(closed_with.text, "is the address of w0, in slot 0"));
    moe_membership_on_stream_closed(m, now, first); /* its port may have a new owner */
    carry_out();
    forget();
    join(1, 11);
    assert_int_equal(closes, 0);
    given_endpoint = NULL;
}

/* gRPC would take most of these, and reach something else than the worker. */
static void an_address_that_leads_to_no_worker_is_refused(void **unused)
{
    (void)unused;
    static const char *const bad[] = {
        "",           "h",       "h:0",       "h:65536", "unix:/run/x",
        "dns:///h:1", "h:1,g:2", "0.0.0.0:1", "[::]:1",  "[::ffff:0.0.0.0]:1"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        for (int control = 0; control < 2; control++) {
            const char **given = control ? &given_control : &given_endpoint;
            *given = bad[i];
            join(0, 10);
            *given = NULL;
            assert_int_equal(closed_with.code, MOE_INVALID_ARGUMENT);
            assert_non_null(strstr(closed_with.text, control ? "control_endpoint" : "endpoint"));
            forget();
        }
    }
    join(0, 10);
    assert_int_equal(closes, 0);
}

static void another_identity_waits_for_the_end_of_the_lease(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    moe_membership_on_stream_closed(m, now, s[1]);
    carry_out();
    join_as(1, 99, "uid:8", 99);
    assert_int_equal(closed_with.code, MOE_RESOURCE_EXHAUSTED);
    expect_state(MOE_GROUP_SERVING);
    uint64_t others[] = {s[0], s[2]};
    pass(LEASE_MS, 1, others, 2);
    expect_state(MOE_GROUP_DEGRADED);
    forget();
    s[1] = join_as(1, 99, "uid:8", 99);
    assert_int_equal(closes, 0);
    assert_int_equal(assigns, 1);
}

static void the_same_process_proves_itself_by_its_token(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    join_as(1, 11, "uid:7", 12); /* its worker_id and incarnation, and another token */
    assert_int_equal(closed_with.code, MOE_PERMISSION_DENIED);
    assert_int_equal(aborts, 0);
    expect_state(MOE_GROUP_SERVING);
    s[1] = join(1, 11);
    heartbeat(s[1], 1);
    expect_state(MOE_GROUP_SERVING);
    assert_int_equal(aborts, 0);
}

static void a_member_that_breaks_the_protocol_is_no_wanted_loss(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    last_stream = s[2] - 1;
    join(2, 99); /* another process, on the stream of the member */
    assert_int_equal(closed_stream, s[2]);
    struct moe_membership_worker w;
    assert_true(moe_membership_worker(m, 2, &w));
    assert_int_equal(w.state, MOE_WORKER_GONE);
    assert_int_equal(group().causes[MOE_CAUSE_OUT_OF_STEP], 1);
    assert_int_equal(ended_level, MOE_LOG_WARN); /* `moectl health` warns of it */
}

static void the_reason_names_the_empty_slot(void **unused)
{
    (void)unused;
    expect_state(MOE_GROUP_WAITING);
    assert_string_equal(group().reason, "slot 0 is empty (0 of 3 workers)");
    join(0, 1);
    join(1, 1);
    expect_state(MOE_GROUP_WAITING);
    assert_string_equal(group().reason, "slot 2 is empty (2 of 3 workers)");
    assert_int_equal(assigns, 0);
    join(2, 1);
    assert_int_equal(assigns, SLOTS);
    expect_state(MOE_GROUP_LOADING);
    assert_string_equal(group().reason, "slot 0 is loading");
}

static void a_worker_too_many_learns_when_a_slot_may_become_free(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    struct moe_membership_worker w;
    serve(s);
    join(7, 1);
    print_message("    refused: %s\n", closed_with.text);
    assert_int_equal(closed_with.code, MOE_RESOURCE_EXHAUSTED);
    assert_string_equal(closed_with.text, "all 3 slots are taken");
    assert_true(moe_membership_worker(m, 1, &w) && w.connected);
    moe_membership_on_stream_closed(m, now, s[1]);
    carry_out();
    assert_true(moe_membership_worker(m, 1, &w) && !w.connected);
    join(7, 1);
    print_message("    refused: %s\n", closed_with.text);
    assert_non_null(strstr(closed_with.text, "slot 1 is not connected, its lease ends in 1.0 s"));
    assert_in_range(closed_with.retry_after_ms, 1, LEASE_MS + 1);
}

/* The name of a tensor, and what to do, stand at its end. */
static void the_reason_of_a_refusal_is_shown_whole(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    struct moe_status why = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH, "%s", "");
    memset(why.text, 'x', sizeof why.text - 2);
    why.text[sizeof why.text - 2] = '!';
    why.text[sizeof why.text - 1] = '\0';
    serve(s);
    moe_membership_on_wrong_weights(m, now, s[1], &why);
    carry_out();
    expect_state(MOE_GROUP_DEGRADED);
    print_message("    reason: %s\n", group().reason);
    assert_non_null(strstr(group().reason, why.text));
    struct moe_membership_worker w;
    assert_true(moe_membership_worker(m, 1, &w));
    assert_string_equal(w.error->text, why.text);
}

static struct moe_status cordon(uint32_t slot, const char *reason)
{
    struct moe_status st = moe_membership_cordon(m, now, slot, reason);
    carry_out();
    return st;
}

static void a_cordoned_slot_gets_no_new_worker(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    assert_int_equal(cordon(1, "").code, MOE_INVALID_ARGUMENT);
    assert_int_equal(cordon(SLOTS, "why").code, MOE_NOT_FOUND);
    serve(s);
    assert_int_equal(cordon(1, "a fan is broken").code, MOE_OK);
    assert_true(moe_membership_cordons_saved(m));
    expect_state(MOE_GROUP_SERVING);
    s[1] = replace(s[1], 1, 11); /* the same process comes back */
    assert_int_equal(closes, 0);
    s[1] = replace(s[1], 1, 99); /* another one does not get the slot */
    assert_int_equal(closed_with.code, MOE_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(closed_with.text, "slot 1 is cordoned: a fan is broken"));
    pass(LEASE_MS, 1, (uint64_t[]){s[0], s[2]}, 2);
    expect_state(MOE_GROUP_DEGRADED);
    assert_non_null(strstr(group().reason, "slot 1 is cordoned"));
    (void)join(7, 107);
    assert_non_null(strstr(closed_with.text, "slot 1 is cordoned: a fan is broken"));
    struct moe_status st = moe_membership_uncordon(m, now, 1, "mended");
    assert_int_equal(st.code, MOE_OK);
    carry_out();
    forget();
    (void)join(7, 107);
    assert_int_equal(closes, 0);
}

static void cordons_outlive_the_coordinator(void **unused)
{
    (void)unused;
    assert_int_equal(cordon(2, "first").code, MOE_OK);
    assert_int_equal(cordon(2, "second").code, MOE_OK);
    disk_full = true;
    assert_int_equal(cordon(0, "lost").code, MOE_OK);
    assert_false(moe_membership_cordons_saved(m));
    assert_string_equal(moe_membership_cordon_reason(m, 0), "lost");
    disk_full = false;
    moe_membership_destroy(m);
    create_for(SLOTS);
    assert_null(moe_membership_cordon_reason(m, 0));
    assert_string_equal(moe_membership_cordon_reason(m, 2), "second");
    moe_membership_destroy(m);
    create_for(2); /* the slot is gone, and its cordon too */
    assert_int_equal(moe_membership_to_save(m)->cordoned, 0);
}

static void a_silent_worker_loses_its_slot_and_not_before_its_lease(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    pass(LEASE_MS - 50, 1, s, 2);
    expect_state(MOE_GROUP_SERVING);
    pass(50, 1, s, 2);
    expect_state(MOE_GROUP_DEGRADED);
    assert_non_null(strstr(group().reason, "slot 2 lost: lease expired"));
    assert_int_equal(aborts, 2);
    assert_int_equal(closed_stream, s[2]);
    heartbeat(s[2], 1); /* it wakes up, and its stream has no slot */
    assert_int_equal(closed_with.code, MOE_FAILED_PRECONDITION);
}

/* Its message came in during its lease, and the coordinator reads it after the lease of then. */
static void a_lease_runs_from_when_a_message_came_in(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    pass(LEASE_MS - 50, 1, s, 2);
    uint64_t late = now - 200 * MOE_NS_PER_MS;
    uint64_t present = now;
    now = late;
    heartbeat(s[2], 1);
    now = present;
    pass(LEASE_MS - 250, 1, s, 2);
    expect_state(MOE_GROUP_SERVING);
    pass(50, 1, s, 2);
    expect_state(MOE_GROUP_DEGRADED);
    assert_non_null(strstr(group().reason, "slot 2 lost: lease expired"));
}

static void a_pause_of_the_coordinator_costs_no_worker_its_slot(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    now += 10 * LEASE_MS * MOE_NS_PER_MS; /* stopped, with the heartbeats of that time unread */
    moe_membership_on_tick(m, now);
    carry_out();
    expect_state(MOE_GROUP_SERVING);
    pass(2 * LEASE_MS, 1, s, SLOTS);
    expect_state(MOE_GROUP_SERVING);
    assert_int_equal(aborts, 0);
}

static void a_worker_that_still_serves_an_ended_epoch_gets_an_answer(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s);
    pass(LEASE_MS, 1, s, 2);
    forget();
    s[2] = join(2, 12); /* away while the epoch ended; the same process */
    heartbeat(s[2], 1);
    assert_int_equal(aborts, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        STORY(a_group_with_copies_serves_without_a_lost_slot),
        STORY(a_lost_slot_costs_the_others_no_new_session),
        STORY(slots_of_a_domain_are_masked_together),
        STORY(a_mask_that_fails_is_followed_by_a_new_session),
        STORY(the_last_copy_of_an_expert_is_waited_for),
        STORY(a_stopped_member_stays_out_until_it_shows_life),
        STORY(who_reports_is_no_suspect_any_more),
        STORY(a_group_that_starts_waits_a_lease_for_the_last_worker),
        STORY(a_newcomer_that_fails_to_form_stays_out),
        STORY(a_restart_finds_a_view_with_a_mask),
        STORY(after_a_restart_members_tell_of_their_session),
        STORY(a_session_that_cannot_be_takes_no_mask),
        STORY(the_last_copy_is_drained_by_force_only),
        STORY(a_reconnect_within_the_lease_costs_nothing),
        STORY(a_worker_that_comes_back_without_the_epoch_ends_it),
        STORY(a_living_worker_keeps_its_slot),
        STORY(the_address_of_another_worker_is_refused),
        STORY(an_address_that_leads_to_no_worker_is_refused),
        STORY(the_reason_of_a_refusal_is_shown_whole),
        STORY(another_identity_waits_for_the_end_of_the_lease),
        STORY(the_same_process_proves_itself_by_its_token),
        STORY(a_member_that_breaks_the_protocol_is_no_wanted_loss),
        STORY(the_reason_names_the_empty_slot),
        STORY(a_worker_too_many_learns_when_a_slot_may_become_free),
        STORY(a_cordoned_slot_gets_no_new_worker),
        STORY(cordons_outlive_the_coordinator),
        STORY(a_silent_worker_loses_its_slot_and_not_before_its_lease),
        STORY(a_lease_runs_from_when_a_message_came_in),
        STORY(a_pause_of_the_coordinator_costs_no_worker_its_slot),
        STORY(a_worker_that_still_serves_an_ended_epoch_gets_an_answer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
