/* SPDX-License-Identifier: Apache-2.0 */
/* Single scenarios of the membership machine; the simulation covers unforeseen ones. The world here
 * answers every PREPARE at once and writes at once. */
#include "base/clock.h"
#include "coordinator/membership.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { SLOTS = 3, LEASE_MS = 1000, ATTEMPTS = 3 };

static struct moe_membership *m;
static struct moe_membership_saved disk;
static uint64_t now;
/* Outputs since the last look. */
static size_t prepares, commits, aborts, drains, closes, assigns, saves, answers;
static uint64_t last_epoch, closed_stream, last_stream;
static struct moe_status closed_with;
static bool exited, disk_full;
static bool trains;
static uint32_t replicas;
static size_t heartbeat_answers;
static uint64_t answered_sequence;
static uint32_t answered_oldest_ms;

static void carry_out(void)
{
    struct moe_membership_action a;
    struct moe_status st = moe_ok();
    while (moe_membership_next_action(m, &a)) {
        switch (a.kind) {
        case MOE_MEMBERSHIP_SAVE:
            saves++;
            if (disk_full)
                st = moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "no space left");
            else
                disk = *moe_membership_to_save(m);
            moe_membership_on_saved(m, now, a.sequence, &st);
            break;
        case MOE_MEMBERSHIP_SEND:
            prepares += a.message == MOE_MEMBERSHIP_PREPARE;
            commits += a.message == MOE_MEMBERSHIP_COMMIT;
            aborts += a.message == MOE_MEMBERSHIP_ABORT;
            drains += a.message == MOE_MEMBERSHIP_DRAIN;
            assigns += a.message == MOE_MEMBERSHIP_ASSIGN;
            answers += a.message == MOE_MEMBERSHIP_TRYING_AGAIN;
            if (a.message == MOE_MEMBERSHIP_HEARTBEAT_ANSWER) {
                heartbeat_answers++;
                answered_sequence = a.sequence;
                answered_oldest_ms = a.oldest_ms;
            }
            if (a.message == MOE_MEMBERSHIP_PREPARE)
                last_epoch = a.epoch;
            break;
        case MOE_MEMBERSHIP_CLOSE:
            closes++;
            closed_stream = a.stream;
            closed_with = a.status;
            break;
        case MOE_MEMBERSHIP_LOG: print_message("    %s\n", a.status.text); break;
        case MOE_MEMBERSHIP_EXIT: exited = true; break;
        }
    }
}

static void forget(void)
{
    prepares = commits = aborts = drains = closes = assigns = saves = answers = 0;
    heartbeat_answers = 0;
}

static void create_for(uint32_t slots)
{
    struct moe_membership_config config = {.slots = slots,
                                           .replicas = replicas,
                                           .group_id = 0xabcdef,
                                           .lease_ns = LEASE_MS * MOE_NS_PER_MS,
                                           .form_ns = 500 * MOE_NS_PER_MS,
                                           .shutdown_ns = 2000 * MOE_NS_PER_MS,
                                           .backoff_ns = 100 * MOE_NS_PER_MS,
                                           .backoff_max_ns = 300 * MOE_NS_PER_MS,
                                           .attempts_max = ATTEMPTS,
                                           .version = "1.2.0"};
    struct moe_status st = moe_membership_create(&config, &disk, now, &m);
    assert_int_equal(st.code, MOE_OK);
    carry_out();
    forget();
}

static int setup(void **unused)
{
    (void)unused;
    memset(&disk, 0, sizeof disk);
    now = MOE_NS_PER_S;
    last_stream = 0;
    exited = disk_full = trains = false;
    replicas = 1;
    create_for(SLOTS);
    return 0;
}

static int teardown(void **unused)
{
    (void)unused;
    moe_membership_destroy(m);
    return 0;
}

static uint32_t experts = 6;

static bool address_of_0; /* workers register with the address of worker 0 */

/* Worker `id`'s process `incarnation` registers on a new stream under this identity, with a slot
 * token of bytes `token`; returns the stream's number. */
static uint64_t join_as(uint32_t id, uint64_t incarnation, const char *identity, int token)
{
    char name[16], endpoint[32];
    uint8_t slot_token[MOE_MEMBERSHIP_TOKEN_BYTES];
    memset(slot_token, token, sizeof slot_token);
    snprintf(name, sizeof name, "w%u", id);
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%u", 1 + (address_of_0 ? 0 : id));
    struct moe_membership_layer layer = {.layer = 0, .hidden = 8, .experts = experts, .top_k = 2};
    struct moe_membership_register r = {.worker_id = name,
                                        .endpoint = endpoint,
                                        .control_endpoint = "127.0.0.1:2",
                                        .backend = "cpu",
                                        .model = "Mod\xc3\xa8le 7 B",
                                        .fingerprint = "f00d",
                                        .family = "mixtral",
                                        .version = "1.2.9",
                                        .incarnation = incarnation,
                                        .identity = identity,
                                        .slot_token = slot_token,
                                        .max_tokens_per_step = 64,
                                        .trains = trains,
                                        .layers = &layer,
                                        .layer_count = 1};
    moe_membership_on_register(m, now, ++last_stream, &r);
    carry_out();
    return last_stream;
}

static uint64_t join(uint32_t id, uint64_t incarnation)
{
    return join_as(id, incarnation, "uid:7", (int)incarnation);
}

/* The same, after the old process's stream has ended. */
static uint64_t replace(uint64_t old_stream, uint32_t id, uint64_t incarnation)
{
    moe_membership_on_stream_closed(m, now, old_stream);
    carry_out();
    return join(id, incarnation);
}

static void loaded(uint64_t stream)
{
    struct moe_status st = moe_ok();
    moe_membership_on_loaded(m, now, stream, moe_placement_version(moe_membership_placement(m)),
                             &st);
    carry_out();
}

static void heartbeat(uint64_t stream, uint64_t epoch)
{
    struct moe_membership_heartbeat h = {.epoch = epoch};
    moe_membership_on_heartbeat(m, now, stream, &h);
    carry_out();
}

static void ready(uint64_t stream, const char *error)
{
    struct moe_status st =
        error != NULL ? moe_error(MOE_INTERNAL, MOE_REASON_NONE, "%s", error) : moe_ok();
    moe_membership_on_ready(m, now, stream, last_epoch, &st);
    carry_out();
}

/* Time passes in small steps, with heartbeats of the streams given. */
static void pass(uint64_t ms, uint64_t epoch, const uint64_t *streams, size_t count)
{
    for (uint64_t t = 0; t < ms; t += 50) {
        now += 50 * MOE_NS_PER_MS;
        for (size_t i = 0; i < count; i++)
            heartbeat(streams[i], epoch);
        moe_membership_on_tick(m, now);
        carry_out();
    }
}

static struct moe_membership_group group(void)
{
    static struct moe_membership_group g;
    moe_membership_group(m, &g);
    return g;
}

static void expect_state(enum moe_group_state want)
{
    struct moe_membership_group g = group();
    print_message("  state %d, epoch %" PRIu64 ": %s\n", g.state, g.epoch, g.reason);
    assert_int_equal(g.state, want);
}

static void load_all(uint64_t s[SLOTS])
{
    for (uint32_t i = 0; i < SLOTS; i++)
        s[i] = join(i, 10 + i);
    for (uint32_t i = 0; i < SLOTS; i++)
        loaded(s[i]);
}

static void serve(uint64_t s[SLOTS])
{
    load_all(s);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    expect_state(MOE_GROUP_SERVING);
    forget();
}

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
    moe_membership_on_ready(m, now, s[2], last_epoch, &none);
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

/* ------------------------------------------------------------------ replicas */

/* A new group, with two copies of each expert: any one slot may be lost. */
static void create_with_copies(void)
{
    moe_membership_destroy(m);
    replicas = 2;
    create_for(SLOTS);
}

static void lose_stream(uint64_t stream)
{
    moe_membership_on_stream_closed(m, now, stream);
    carry_out();
}

static void miss(uint64_t stream, uint64_t epoch, uint64_t slots)
{
    moe_membership_on_peer_lost(m, now, stream, epoch, slots);
    carry_out();
}

static void a_group_with_copies_serves_without_a_lost_slot(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    create_with_copies();
    serve(s);
    assert_int_equal(group().live, 7);
    lose_stream(s[2]);
    miss(s[0], 1, 1 << 2);
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
    lose_stream(s[2]);
    miss(s[0], 1, 1 << 2);
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
    lose_stream(s[1]);
    miss(s[0], 1, 1 << 1);
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

static void copies_and_training_exclude_each_other(void **unused)
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
    address_of_0 = true;
    join(1, 11);
    assert_int_equal(closed_with.code, MOE_ALREADY_EXISTS);
    assert_non_null(strstr(closed_with.text, "is the address of w0, in slot 0"));
    moe_membership_on_stream_closed(m, now, first); /* its port may have a new owner */
    carry_out();
    forget();
    join(1, 11);
    assert_int_equal(closes, 0);
    address_of_0 = false;
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
    moe_membership_on_loaded(m, now, s[1], 1, &st);
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
        moe_membership_on_ready(m, now, s[1], last_epoch, &stuck);
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
        moe_membership_on_ready(m, now, s[1], last_epoch, &stuck);
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
    moe_membership_on_ready(m, now, s[1], last_epoch, &stuck);
    carry_out();
    assert_int_equal(last_epoch, before + 2);
    /* But not for ever. */
    moe_membership_on_ready(m, now, s[1], last_epoch, &stuck);
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
        moe_membership_on_ready(m, now, s[1], last_epoch, &other);
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
#define STORY(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
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
        STORY(a_group_with_copies_serves_without_a_lost_slot),
        STORY(the_last_copy_of_an_expert_is_waited_for),
        STORY(a_stopped_member_stays_out_until_it_shows_life),
        STORY(a_group_that_starts_waits_a_lease_for_the_last_worker),
        STORY(a_newcomer_that_fails_to_form_stays_out),
        STORY(a_restart_finds_a_view_with_a_mask),
        STORY(the_last_copy_is_drained_by_force_only),
        STORY(copies_and_training_exclude_each_other),
        STORY(a_reconnect_within_the_lease_costs_nothing),
        STORY(a_worker_that_comes_back_without_the_epoch_ends_it),
        STORY(a_living_worker_keeps_its_slot),
        STORY(the_address_of_another_worker_is_refused),
        STORY(the_reason_of_a_refusal_is_shown_whole),
        STORY(another_identity_waits_for_the_end_of_the_lease),
        STORY(the_same_process_proves_itself_by_its_token),
        STORY(the_reason_names_the_empty_slot),
        STORY(a_worker_too_many_learns_when_a_slot_may_become_free),
        STORY(a_cordoned_slot_gets_no_new_worker),
        STORY(cordons_outlive_the_coordinator),
        STORY(a_silent_worker_loses_its_slot_and_not_before_its_lease),
        STORY(a_lease_runs_from_when_a_message_came_in),
        STORY(a_pause_of_the_coordinator_costs_no_worker_its_slot),
        STORY(a_worker_that_still_serves_an_ended_epoch_gets_an_answer),
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
