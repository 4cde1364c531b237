/* SPDX-License-Identifier: Apache-2.0 */
/* Single scenarios of a group that is scaled; the simulation (test_membership_sim) covers
 * unforeseen ones. The world here writes at once, and sends what a test says. */
#include "base/clock.h"
#include "coordinator/membership.h"
#include "support/check.h"

#include <stdio.h>
#include <string.h>

enum { SLOTS = 4, LEASE_MS = 1000 };

static struct moe_membership *m;
static struct moe_membership_saved disk;
static bool disk_full, trains;
static uint32_t replicas;
static uint64_t now, last_stream, last_epoch, closed_stream;
static struct moe_status closed_with;
/* Outputs since the last look; bit s: to slot s. */
static uint64_t prepared, committed, assigned, kept, drained, waits; /* waits: drained later */
static uint32_t version;                                             /* of the last ASSIGN */
static uint64_t order[SLOTS];         /* of the last one to each slot */
static char warning[MOE_STATUS_TEXT]; /* the last one */

static void carry_out(void)
{
    struct moe_membership_action a;
    while (moe_membership_next_action(m, &a)) {
        struct moe_status st = moe_ok();
        uint64_t bit = a.slot < SLOTS ? UINT64_C(1) << a.slot : 0;
        if (a.kind == MOE_MEMBERSHIP_LOG)
            print_message("    %s\n", a.status.text);
        if (a.kind == MOE_MEMBERSHIP_LOG && a.level == MOE_LOG_WARN)
            (void)snprintf(warning, sizeof warning, "%s", a.status.text);
        if (a.kind == MOE_MEMBERSHIP_CLOSE) {
            closed_stream = a.stream;
            closed_with = a.status;
        }
        if (a.kind == MOE_MEMBERSHIP_SAVE && disk_full)
            st = moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "no space left");
        else if (a.kind == MOE_MEMBERSHIP_SAVE)
            disk = *moe_membership_to_save(m);
        if (a.kind == MOE_MEMBERSHIP_SAVE)
            moe_membership_on_saved(m, now, a.sequence, &st);
        if (a.kind != MOE_MEMBERSHIP_SEND)
            continue;
        prepared |= a.message == MOE_MEMBERSHIP_PREPARE ? bit : 0;
        committed |= a.message == MOE_MEMBERSHIP_COMMIT ? bit : 0;
        drained |= a.message == MOE_MEMBERSHIP_DRAIN && !a.keep ? bit : 0;
        waits |= a.message == MOE_MEMBERSHIP_DRAIN && a.keep ? bit : 0;
        if (a.message == MOE_MEMBERSHIP_PREPARE)
            last_epoch = a.epoch;
        if (a.message != MOE_MEMBERSHIP_ASSIGN)
            continue;
        assigned |= bit;
        kept |= a.keep ? bit : 0;
        version = a.version;
        order[a.slot] = a.order;
    }
}

static void forget(void)
{
    prepared = committed = assigned = kept = drained = waits = 0;
}

static struct moe_membership_group group(void)
{
    struct moe_membership_group g;
    moe_membership_group(m, &g);
    return g;
}

static struct moe_status create(uint32_t slots, uint32_t size)
{
    struct moe_membership_config config = {.slots = slots,
                                           .size = size,
                                           .replicas = replicas,
                                           .group_id = 7,
                                           .lease_ns = LEASE_MS * MOE_NS_PER_MS,
                                           .form_ns = 500 * MOE_NS_PER_MS,
                                           .shutdown_ns = MOE_NS_PER_S,
                                           .backoff_ns = 100 * MOE_NS_PER_MS,
                                           .backoff_max_ns = 300 * MOE_NS_PER_MS,
                                           .attempts_max = 3,
                                           .version = "1.2.0"};
    struct moe_status st = moe_membership_create(&config, &disk, now, &m);
    if (!moe_failed(&st))
        carry_out();
    return st;
}

static uint64_t join(uint32_t id)
{
    char name[16], endpoint[32];
    uint8_t token[MOE_MEMBERSHIP_TOKEN_BYTES] = {(uint8_t)id};
    struct moe_membership_layer layer = {.layer = 0, .hidden = 8, .experts = 7, .top_k = 2};
    snprintf(name, sizeof name, "w%u", id);
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%u", 1 + id);
    struct moe_membership_register r = {.worker_id = name,
                                        .endpoint = endpoint,
                                        .control_endpoint = endpoint,
                                        .backend = "cpu",
                                        .model = "m",
                                        .fingerprint = "f00d",
                                        .family = "mixtral",
                                        .version = "1.2.0",
                                        .incarnation = 10 + id,
                                        .identity = "uid:7",
                                        .slot_token = token,
                                        .max_tokens_per_step = 64,
                                        .trains = trains,
                                        .layers = &layer,
                                        .layer_count = 1};
    moe_membership_on_register(m, now, ++last_stream, &r);
    carry_out();
    return last_stream;
}

static void loaded_for(uint64_t stream, uint32_t of, uint64_t by, struct moe_status st)
{
    moe_membership_on_loaded(m, now, stream, of, by, &st);
    carry_out();
}

/* By the last order. */
static void loaded(uint64_t stream, uint32_t of, struct moe_status st)
{
    uint32_t slot;
    assert_true(moe_membership_slot_of(m, stream, &slot));
    loaded_for(stream, of, order[slot], st);
}

static void ready(uint64_t stream)
{
    const struct moe_status st = moe_ok();
    moe_membership_on_ready(m, now, stream, last_epoch, false, &st);
    carry_out();
}

/* The first `size` workers serve. */
static void serve(uint64_t *s, uint32_t size)
{
    assert_ok(create(SLOTS, size));
    for (uint32_t i = 0; i < size; i++)
        s[i] = join(i);
    for (uint32_t i = 0; i < size; i++)
        loaded(s[i], version, moe_ok());
    for (uint32_t i = 0; i < size; i++)
        ready(s[i]);
    assert_int_equal(group().state, MOE_GROUP_SERVING);
    now += 2 * LEASE_MS * MOE_NS_PER_MS; /* with a heartbeat of each: the view is stable */
    for (uint32_t i = 0; i < size; i++) {
        struct moe_membership_heartbeat h = {.epoch = 1};
        moe_membership_on_heartbeat(m, now, s[i], &h);
        carry_out();
    }
    forget();
}

static struct moe_status scale(uint32_t size)
{
    struct moe_status st = moe_membership_scale(m, now, size, "test");
    carry_out();
    return st;
}

static int setup(void **unused)
{
    (void)unused;
    memset(&disk, 0, sizeof disk);
    now = MOE_NS_PER_S;
    last_stream = last_epoch = 0;
    disk_full = trains = false;
    replicas = 1;
    m = NULL;
    forget();
    return 0;
}

static int teardown(void **unused)
{
    (void)unused;
    moe_membership_destroy(m);
    return 0;
}

/* ------------------------------------------------------------------ stories */

static void a_view_is_replaced_when_all_have_loaded(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s, 2);
    s[2] = join(2);
    assert_int_equal(assigned, 0); /* it waits as a spare */
    assert_int_equal(group().places, 3);
    assert_ok(scale(3));
    assert_int_equal(assigned, 7);
    assert_int_equal(kept, 3); /* the spare holds nothing */
    loaded(s[2], version, moe_ok());
    loaded(s[1], version, moe_ok());
    assert_int_equal(prepared, 0);
    assert_int_equal(group().epoch, 1);
    assert_int_equal(disk.places, 3); /* a restart would find the old size */
    loaded(s[0], version, moe_ok());
    assert_int_equal(prepared, 7);
    assert_int_equal(disk.places, 7);
    assert_int_equal(disk.placement_version, version);
    for (uint32_t i = 0; i < 3; i++)
        ready(s[i]);
    assert_int_equal(committed, 7);
    assert_true(group().size == 3 && group().scaling_to == 0 && group().live == 7);
    assert_int_equal(moe_placement_slots(moe_membership_placement(m)), 3);
}

static void a_failed_load_undoes_it(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s, 3);
    uint32_t before = disk.placement_version;
    assert_ok(scale(2));
    assert_int_equal(kept, 3);
    loaded(s[0], version, moe_ok());
    loaded(s[1], version,
           moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "12 MiB are missing"));
    struct moe_membership_group g = group();
    assert_true(g.epoch == 1 && g.size == 3 && g.scaling_to == 0 && drained == 0 && prepared == 0);
    assert_int_equal(g.scale_error->reason, MOE_REASON_OUT_OF_MEMORY);
    assert_string_equal(g.scale_error->text, "slot 1: 12 MiB are missing");
    assert_int_equal(version, before); /* they get their present share again, and free the other */
    assert_int_equal(assigned & ~kept, 0);
    assert_int_equal(disk.places, 7);
    assert_ok(scale(2)); /* under a new version, so that late reports of the old one do not count */
    assert_true(version > before + 1 && group().scale_error->code == MOE_OK);
}

static enum moe_worker_state state_of(uint32_t slot)
{
    struct moe_membership_worker w;
    assert_true(moe_membership_worker(m, slot, &w));
    return w.state;
}

static void only_the_answer_to_the_last_order_counts(void **unused)
{
    (void)unused;
    const struct moe_status failure =
        moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "12 MiB are missing");
    uint64_t s[SLOTS];
    replicas = 2;
    serve(s, 3);
    assert_ok(scale(2));
    loaded(s[0], version, failure); /* undone: slots 0 and 1 get their present share again */
    const uint32_t present = version;
    const uint64_t early = order[1];
    moe_membership_on_peer_lost(m, now, s[0], 1, 2);
    carry_out();
    ready(s[0]);
    ready(s[2]);
    assert_int_equal(group().live, 5);
    assert_ok(scale(2));
    forget();
    s[1] = join(1); /* on a new stream, with its answer still to come */
    assert_int_equal(assigned, 2);
    assert_int_equal(kept, 0); /* it drops the present share */
    loaded(s[0], version, failure);
    assert_int_equal(version, present);
    assert_int_equal(state_of(1), MOE_WORKER_LOADING);
    loaded_for(s[1], present, early, moe_ok());
    assert_int_equal(state_of(1), MOE_WORKER_LOADING);
    loaded(s[1], present, moe_ok());
    assert_int_equal(state_of(1), MOE_WORKER_LOADED);
}

/* The order may be lost with the stream, and then the worker would keep both shares. */
static void an_order_without_an_answer_is_repeated_on_the_next_stream(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s, 3);
    assert_ok(scale(2));
    loaded(s[1], version,
           moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "12 MiB are missing"));
    loaded(s[1], version, moe_ok());
    forget();
    for (uint32_t i = 0; i < 3; i++)
        s[i] = join(i);
    assert_int_equal(assigned, 1); /* slot 1 has answered, slot 2 was not asked */
    assert_int_equal(group().epoch, 1);
}

/* An order of the present share would throw away what has been read of the next one: with a stream
 * that is lost more often than a share loads, scaling would not end. */
static void a_member_that_reconnects_goes_on_loading_its_next_share(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s, 3);
    assert_ok(scale(2));
    const uint32_t next = version;
    loaded(s[0], next, moe_ok());
    for (int times = 0; times < 2; times++) {
        forget();
        s[1] = join(1);
        assert_int_equal(assigned, 2);
        assert_int_equal(kept, 2); /* and no other order: `version` would be the present one */
        assert_int_equal(version, next);
        struct moe_membership_heartbeat h = {.epoch = 1};
        moe_membership_on_heartbeat(m, now, s[1], &h);
        carry_out();
    }
    loaded(s[1], next, moe_ok());
    assert_int_equal(disk.places, 3);
}

/* Those who leave do so together: the view serves the last one's requests until then. */
static void workers_without_a_place_leave_together(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s, 4);
    assert_ok(scale(2));
    loaded(s[0], version, moe_ok());
    disk_full = true;
    loaded(s[1], version, moe_ok());
    assert_int_equal(drained, 0); /* a restart would want them back */
    disk_full = false;
    now += 300 * MOE_NS_PER_MS;
    moe_membership_on_tick(m, now);
    carry_out();
    assert_int_equal(drained, 12);
    moe_membership_on_leaving(m, now, s[3], "drained");
    carry_out();
    assert_int_equal(group().epoch, 1);
    assert_int_equal(prepared, 0);
    moe_membership_on_leaving(m, now, s[2], "drained");
    carry_out();
    assert_int_equal(prepared, 3); /* at once: this is no failure */
    ready(s[0]);
    ready(s[1]);
    assert_true(group().state == MOE_GROUP_SERVING && group().size == 2);
}

static void what_is_refused_changes_nothing(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s, 2);
    struct moe_membership_saved before = disk;
    struct moe_status st = scale(0);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = scale(SLOTS + 1);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = scale(3);
    assert_int_equal(st.code, MOE_FAILED_PRECONDITION);
    assert_non_null(strstr(st.text, "start 1 more"));
    st = moe_membership_scale(m, now, 1, "");
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    moe_membership_set_models(m, true);
    st = scale(1);
    assert_int_equal(st.reason, MOE_REASON_MODEL_IN_USE);
    moe_membership_set_models(m, false);
    uint64_t epoch;
    assert_ok(scale(1));
    st = moe_membership_drain(m, now, 0, "test", 0, false, &epoch); /* it is being scaled */
    assert_int_equal(st.reason, MOE_REASON_REFORMING);
    s[2] = join(2);
    st = scale(3);
    assert_int_equal(st.reason, MOE_REASON_REFORMING);
    assert_non_null(strstr(st.text, "undo it with `moectl scale 2`. The experts move to slot 0;"));
    assert_ok(scale(2)); /* the present size: undone */
    assert_true(group().scaling_to == 0 && group().size == 2 && drained == 0);
    assert_true(disk.last_version > before.last_version); /* no other placement gets it */
    before.last_version = disk.last_version;
    assert_memory_equal(&disk, &before, sizeof disk);
    trains = true;
    join(3);
    assert_int_equal(closed_stream, last_stream);
    assert_int_equal(closed_with.reason, MOE_REASON_SLOT_TAKEN); /* no spare trains */
}

static void the_last_holder_leaves_only_by_force(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS], epoch;
    serve(s, 1);
    struct moe_status st = moe_membership_drain(m, now, 0, "test", 0, false, &epoch);
    assert_int_equal(st.reason, MOE_REASON_EXPERT_UNAVAILABLE);
    assert_int_equal(drained, 0);
    s[1] = join(1);
    assert_ok(moe_membership_drain(m, now, 0, "test", 0, false, &epoch)); /* to the spare */
    carry_out();
    assert_int_equal(assigned, 2);
    loaded(s[1], version, moe_ok());
    assert_int_equal(drained, 1);
    moe_membership_on_leaving(m, now, s[0], "drained");
    carry_out();
    ready(s[1]);
    assert_true(group().state == MOE_GROUP_SERVING && group().places == 2);
}

static void the_size_outlives_the_coordinator(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s, 2);
    assert_ok(scale(1));
    loaded(s[0], version, moe_ok());
    assert_int_equal(disk.places, 1);
    moe_membership_destroy(m);
    m = NULL;
    assert_ok(create(SLOTS, 3)); /* --workers is the size of a new group only */
    assert_int_equal(group().size, 1);
    assert_int_equal(group().state, MOE_GROUP_WAITING); /* for the members of the old view */
    drained = 0;
    for (uint32_t i = 0; i < 2; i++) {
        struct moe_membership_heartbeat h = {.epoch = 1};
        s[i] = join(i);
        moe_membership_on_heartbeat(m, now, s[i], &h);
        carry_out();
    }
    assert_int_equal(group().epoch, 1);
    assert_int_equal(drained, 2); /* again */
    loaded(s[0], version, moe_ok());
    moe_membership_on_leaving(m, now, s[1], "drained");
    carry_out();
    ready(s[0]);
    assert_true(group().state == MOE_GROUP_SERVING && group().live == 1);
    moe_membership_destroy(m);
    m = NULL;
    disk.places = 8;
    struct moe_status st = create(3, 1);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    assert_non_null(strstr(st.text, "slot 3 of the group holds experts"));
    assert_ok(create(SLOTS, 0)); /* a fixed size: all slots */
    assert_int_equal(group().size, SLOTS);
    assert_non_null(strstr(warning, "were on slot 3, and are on slots 0, 1, 2, 3 now: without "
                                    "--max-workers"));
    st = scale(2);
    assert_int_equal(st.reason, MOE_REASON_UNSUPPORTED);
}

/* A restart with another --max-workers does not end the view. */
static void the_limit_can_be_raised_while_the_group_serves(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s, 2);
    moe_membership_destroy(m);
    m = NULL;
    assert_ok(create(SLOTS + 2, 2));
    for (uint32_t i = 0; i < 2; i++) {
        struct moe_membership_heartbeat h = {.epoch = 1};
        s[i] = join(i);
        moe_membership_on_heartbeat(m, now, s[i], &h);
        carry_out();
    }
    assert_true(group().state == MOE_GROUP_SERVING && group().epoch == 1);
    assert_true(group().slots == SLOTS + 2 && group().size == 2);
}

/* A worker may still load a placement that a restart has undone, and report it by its version. */
static void no_two_placements_have_one_version(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s, 2);
    s[2] = join(2);
    disk_full = true;
    assert_ok(scale(3));
    assert_true(assigned == 0 && group().scaling_to == 0);
    assert_int_equal(group().scale_error->reason, MOE_REASON_IO);
    disk_full = false;
    assert_ok(scale(3));
    assert_int_equal(assigned, 7);
    uint32_t undone = version;
    moe_membership_destroy(m);
    m = NULL;
    assert_ok(create(SLOTS, 2));
    for (uint32_t i = 0; i < 3; i++) {
        struct moe_membership_heartbeat h = {.epoch = i < 2};
        s[i] = join(i);
        moe_membership_on_heartbeat(m, now, s[i], &h);
        carry_out();
    }
    for (uint32_t i = 0; i < 2; i++)
        loaded(s[i], version, moe_ok());
    assert_ok(scale(3));
    assert_true(version > undone);
    for (uint32_t i = 0; i < 3; i++)
        loaded(s[i], undone, moe_ok());
    assert_int_equal(group().places, 3);
    for (uint32_t i = 0; i < 3; i++)
        loaded(s[i], version, moe_ok());
    assert_int_equal(group().places, 7);
}

static void notice(uint64_t stream)
{
    moe_membership_on_drain_notice(m, now, stream, "terminated");
    carry_out();
}

static void a_worker_that_gets_sigterm_moves_its_experts_to_a_spare_first(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s, 2);
    s[2] = join(2);
    notice(s[1]);
    assert_true(waits == 2 && drained == 0 && assigned == 5);
    loaded(s[0], version, moe_ok());
    loaded(s[2], version, moe_ok());
    assert_int_equal(drained, 2);
    moe_membership_on_leaving(m, now, s[1], "drained");
    carry_out();
    ready(s[0]);
    ready(s[2]);
    assert_true(group().state == MOE_GROUP_SERVING && group().places == 5);
    forget();
    s[1] = join(1);
    notice(s[0]);
    assert_true(waits == 1 && drained == 0 && assigned == 6);
    loaded(s[1], version,
           moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "12 MiB are missing"));
    assert_int_equal(drained, 1); /* as without a move */
    notice(s[0]);
    assert_true(group().places == 5 && group().scaling_to == 0);
}

static void without_a_spare_sigterm_drains_at_once_and_the_size_stays(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    serve(s, 3);
    notice(s[2]);
    notice(s[1]);
    assert_true(waits == 0 && drained == 6);
    notice(s[0]);
    assert_true(drained == 7 && group().places == 7 && group().scaling_to == 0);
}

/* As `scale` chooses. */
static void a_worker_that_leaves_takes_no_experts(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS], epoch;
    serve(s, 3);
    notice(s[2]);
    forget();
    assert_ok(moe_membership_drain(m, now, 1, "test", 0, false, &epoch));
    carry_out();
    assert_int_equal(assigned, 1);
    assert_ok(scale(3)); /* undone */
    forget();
    assert_ok(scale(1));
    assert_int_equal(assigned, 1);
    assert_ok(scale(3));
    notice(s[1]);
    struct moe_status st = moe_membership_drain(m, now, 0, "test", 0, false, &epoch);
    assert_int_equal(st.reason, MOE_REASON_EXPERT_UNAVAILABLE);
    s[3] = join(3); /* a spare that leaves too */
    notice(s[3]);
    st = moe_membership_drain(m, now, 0, "test", 0, false, &epoch);
    assert_int_equal(st.reason, MOE_REASON_EXPERT_UNAVAILABLE);
    assert_true(group().places == 7 && group().scaling_to == 0);
}

static void pass(uint64_t ms, const uint64_t *s, uint32_t count)
{
    const struct moe_membership_heartbeat h = {0};
    now += ms * MOE_NS_PER_MS;
    for (uint32_t i = 0; i < count; i++) {
        moe_membership_on_heartbeat(m, now, s[i], &h);
        carry_out();
    }
}

static void fail_to_form(uint64_t stream)
{
    const struct moe_status st = moe_error(MOE_INTERNAL, MOE_REASON_NONE, "no windows");
    moe_membership_on_ready(m, now, stream, last_epoch, false, &st);
    carry_out();
}

/* It takes part in no view, so it cannot be what the group lacked. Spares that come and go would
 * else keep the group trying for ever. */
static void a_spare_does_not_start_a_failed_group_again(void **unused)
{
    (void)unused;
    uint64_t s[SLOTS];
    assert_ok(create(SLOTS, 2));
    for (uint32_t i = 0; i < 2; i++)
        s[i] = join(i);
    for (uint32_t i = 0; i < 2; i++)
        loaded(s[i], version, moe_ok());
    for (int attempt = 0; attempt < 3; attempt++) {
        fail_to_form(s[1]);
        pass(400, s, 2);
    }
    assert_int_equal(group().state, MOE_GROUP_FAILED);
    forget();
    s[2] = join(2);
    pass(400, s, 3);
    assert_true(group().state == MOE_GROUP_FAILED && prepared == 0);
    moe_membership_on_leaving(m, now, s[1], "drained");
    carry_out();
    s[3] = join(3); /* in its place */
    loaded(s[3], version, moe_ok());
    assert_int_equal(prepared, 3);
}

/* Only those that hold experts change them. */
static void a_spare_does_not_say_whether_the_group_trains(void **unused)
{
    (void)unused;
    trains = true;
    assert_ok(create(SLOTS, 2));
    for (uint32_t i = 0; i < 2; i++)
        join(i);
    trains = false;
    join(2);
    assert_true(group().trains);
    join(2); /* on a new stream */
    assert_true(group().trains);
}

int main(void)
{
#define STORY(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        STORY(a_view_is_replaced_when_all_have_loaded),
        STORY(a_failed_load_undoes_it),
        STORY(only_the_answer_to_the_last_order_counts),
        STORY(an_order_without_an_answer_is_repeated_on_the_next_stream),
        STORY(a_member_that_reconnects_goes_on_loading_its_next_share),
        STORY(workers_without_a_place_leave_together),
        STORY(what_is_refused_changes_nothing),
        STORY(the_last_holder_leaves_only_by_force),
        STORY(the_size_outlives_the_coordinator),
        STORY(the_limit_can_be_raised_while_the_group_serves),
        STORY(no_two_placements_have_one_version),
        STORY(a_worker_that_gets_sigterm_moves_its_experts_to_a_spare_first),
        STORY(without_a_spare_sigterm_drains_at_once_and_the_size_stays),
        STORY(a_worker_that_leaves_takes_no_experts),
        STORY(a_spare_does_not_start_a_failed_group_again),
        STORY(a_spare_does_not_say_whether_the_group_trains),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
