/* SPDX-License-Identifier: Apache-2.0 */
/* What becomes of a placement that experts have moved to: it is kept in the store, found again by
 * the machine, given to later views and workers; damage is not read as data. And which workers a
 * group with places for moves refuses. */
#include "base/clock.h"
#include "coordinator/membership.h"
#include "coordinator/saved.h"
#include "support/check.h"
#include "support/directory.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SLOTS = 2, EXPERTS = 4 };

static char directory[MOE_TEST_DIRECTORY_BYTES];
static struct moe_membership_saved disk;
static struct moe_placement *moved;
static uint64_t now = MOE_NS_PER_S, assigned, prepared, closed;
static struct moe_status closed_with;

static int fresh(void **unused)
{
    static const uint8_t copies[EXPERTS] = {2, 1, 1, 1}, holders[] = {0, 1, 1, 0, 1};
    const struct moe_placement_layer layer = {3, EXPERTS};
    (void)unused;
    memset(&disk, 0, sizeof disk);
    assert_ok(moe_placement_create(&moved));
    assert_ok(moe_placement_begin(moved, 2, SLOTS));
    assert_ok(moe_placement_add_layer(moved, &layer, copies, holders, sizeof holders));
    return moe_test_directory("moved", directory) ? 0 : -1;
}

static int clean(void **unused)
{
    static const char *const names[] = {"group.log", "lock", "placement.0", "placement.1"};
    char path[128];
    (void)unused;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", directory, names[i]);
        (void)unlink(path);
    }
    moe_placement_destroy(moved);
    return rmdir(directory);
}

/* ------------------------------------------------------------------ the store */

static void spoil(const char *name, off_t at)
{
    char path[128];
    uint8_t byte = 0;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0 && pread(fd, &byte, 1, at) == 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static void a_placement_is_read_as_it_was_written(void **unused)
{
    (void)unused;
    struct moe_store *store;
    struct moe_added_saved models;
    struct moe_placement *found;
    assert_ok(moe_saved_open(directory, &store, &disk, &models));
    struct moe_membership_saved state = {.placement_version = 2,
                                         .placement_hash = moe_placement_content_hash(moved)};
    assert_ok(moe_saved_read_placement(store, &state, &found));
    assert_null(found);
    assert_ok(moe_saved_write_placement(store, moved));
    assert_ok(moe_saved_read_placement(store, &state, &found));
    assert_non_null(found);
    assert_true(moe_placement_hash(found) == moe_placement_hash(moved));
    moe_placement_destroy(found);
    moe_placement_set_version(moved, 3); /* of a move that was not saved */
    assert_ok(moe_saved_write_placement(store, moved));
    assert_ok(moe_saved_read_placement(store, &state, &found));
    assert_non_null(found);
    moe_placement_destroy(found);
    state.placement_hash ^= 1; /* the model has other layers since */
    assert_ok(moe_saved_read_placement(store, &state, &found));
    assert_null(found);
    for (off_t at = 0; at < 44; at++) {
        spoil("placement.0", at);
        assert_refused(moe_saved_read_placement(store, &state, &found), MOE_DATA_LOSS,
                       MOE_REASON_MALFORMED);
        spoil("placement.0", at);
    }
    moe_store_close(store);
}

static uint32_t next_version(uint32_t placement, uint32_t last)
{
    const struct moe_membership_saved state = {.placement_version = placement,
                                               .last_version = last};
    return moe_saved_next_version(&state);
}

/* Versions are given without an image too: to a placement that was not saved, or only scaled to. */
static void a_move_gets_a_new_version_and_spares_the_image_in_use(void **unused)
{
    (void)unused;
    assert_int_equal(next_version(4, 4), 5);
    assert_int_equal(next_version(4, 5), 7); /* 6 would replace 4 */
    assert_int_equal(next_version(4, 6), 7);
    assert_int_equal(next_version(0, 0), 1);
}

/* ------------------------------------------------------------------ the machine */

static void carry_out(struct moe_membership *m)
{
    struct moe_membership_action a;
    struct moe_status ok = moe_ok();
    while (moe_membership_next_action(m, &a)) {
        if (a.kind == MOE_MEMBERSHIP_SAVE) {
            disk = *moe_membership_to_save(m);
            moe_membership_on_saved(m, now, a.sequence, &ok);
        } else if (a.kind == MOE_MEMBERSHIP_SEND) {
            assigned += a.message == MOE_MEMBERSHIP_ASSIGN;
            prepared = a.message == MOE_MEMBERSHIP_PREPARE ? a.epoch : prepared;
        } else if (a.kind == MOE_MEMBERSHIP_CLOSE) {
            closed = a.stream;
            closed_with = a.status;
        }
    }
}

static struct moe_membership *create(uint32_t spare, const struct moe_placement *p)
{
    const struct moe_membership_config config = {.slots = SLOTS,
                                                 .replicas = 1,
                                                 .spare = spare,
                                                 .placement = p,
                                                 .group_id = 7,
                                                 .lease_ns = MOE_NS_PER_S,
                                                 .form_ns = MOE_NS_PER_S,
                                                 .shutdown_ns = MOE_NS_PER_S,
                                                 .backoff_ns = MOE_NS_PER_MS,
                                                 .backoff_max_ns = MOE_NS_PER_MS,
                                                 .attempts_max = 3,
                                                 .version = "1.2.0"};
    struct moe_membership *m;
    assert_ok(moe_membership_create(&config, &disk, now, &m));
    carry_out(m);
    return m;
}

static void join(struct moe_membership *m, uint64_t stream, uint64_t incarnation, bool moves,
                 bool trains)
{
    static const uint8_t token[MOE_MEMBERSHIP_TOKEN_BYTES] = {1};
    char name[16], endpoint[32];
    snprintf(name, sizeof name, "w%u", (unsigned)(stream % 10));
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%u", (unsigned)(stream % 10) + 1);
    const struct moe_membership_layer layer = {
        .layer = 3, .hidden = 8, .experts = EXPERTS, .top_k = 2};
    const struct moe_membership_register r = {.worker_id = name,
                                              .endpoint = endpoint,
                                              .control_endpoint = "127.0.0.1:2",
                                              .backend = "cpu",
                                              .model = "m",
                                              .fingerprint = "f",
                                              .family = "mixtral",
                                              .version = "1.2.0",
                                              .incarnation = incarnation,
                                              .identity = "uid:7",
                                              .slot_token = token,
                                              .max_tokens_per_step = 64,
                                              .moves_experts = moves,
                                              .trains = trains,
                                              .layers = &layer,
                                              .layer_count = 1};
    moe_membership_on_register(m, now, stream, &r);
    carry_out(m);
}

static void load_and_form(struct moe_membership *m, const uint64_t streams[SLOTS])
{
    struct moe_status ok = moe_ok();
    uint32_t version = moe_placement_version(moe_membership_placement(m));
    for (int s = 0; s < SLOTS; s++) {
        moe_membership_on_loaded(m, now, streams[s], version, 0, &ok);
        carry_out(m);
    }
    for (int s = 0; s < SLOTS; s++) {
        moe_membership_on_ready(m, now, streams[s], prepared, false, &ok);
        carry_out(m);
    }
}

static struct moe_membership *serve(void)
{
    static const uint64_t streams[SLOTS] = {10, 11};
    struct moe_membership *m = create(1, NULL);
    join(m, 10, 100, true, false);
    join(m, 11, 101, true, false);
    assert_false(moe_membership_may_move(m));
    load_and_form(m, streams);
    assert_true(moe_membership_may_move(m));
    return m;
}

static void a_moved_placement_is_that_of_later_views_and_coordinators(void **unused)
{
    (void)unused;
    struct moe_membership *m = serve();
    struct moe_membership_group g;
    uint64_t before = disk.placement_hash;
    moe_membership_move(m, moved);
    assert_int_equal(moe_membership_to_save(m)->placement_version, 2);
    moe_membership_undo_move(m);
    assert_int_equal(moe_membership_to_save(m)->placement_version, 1);
    assert_true(moe_membership_to_save(m)->placement_hash == before);
    moe_membership_move(m, moved);
    disk = *moe_membership_to_save(m);
    moe_membership_group(m, &g);
    assert_int_equal(g.epoch, 1); /* the view goes on */
    assigned = 0;
    moe_membership_on_stream_closed(m, now, 11);
    carry_out(m);
    join(m, 21, 201, true, false); /* a new process of worker 1 */
    assert_int_equal(assigned, 1);
    assert_true(moe_membership_awaits(m, 1, 2, 0));
    const uint64_t streams[SLOTS] = {10, 21};
    load_and_form(m, streams);
    moe_membership_group(m, &g);
    assert_int_equal(g.state, MOE_GROUP_SERVING);
    moe_membership_destroy(m);

    m = create(1, moved);
    join(m, 30, 100, true, false);
    assert_int_equal(moe_placement_version(moe_membership_placement(m)), 2);
    assert_true(moe_placement_hash(moe_membership_placement(m)) == moe_placement_hash(moved));
    moe_membership_group(m, &g);
    assert_int_equal(g.epoch, 2); /* of the log: its other member has a lease to come back */
    moe_membership_destroy(m);

    m = create(0, moved); /* the settings do not allow it any more */
    join(m, 40, 300, true, false);
    assert_int_equal(moe_placement_version(moe_membership_placement(m)), 3);
    assert_true(moe_placement_fits(moe_membership_placement(m), 1, 0));
    moe_membership_destroy(m);
}

static void workers_that_cannot_move_experts_are_refused(void **unused)
{
    (void)unused;
    struct moe_membership *m = create(1, NULL);
    join(m, 10, 100, false, false);
    assert_int_equal(closed, 10);
    assert_refused(closed_with, MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED);
    join(m, 11, 101, true, true);
    assert_int_equal(closed, 11);
    assert_refused(closed_with, MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED);
    join(m, 12, 102, true, false);
    assert_int_equal(closed, 11);
    moe_membership_destroy(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_placement_is_read_as_it_was_written, fresh, clean),
        cmocka_unit_test(a_move_gets_a_new_version_and_spares_the_image_in_use),
        cmocka_unit_test_setup_teardown(a_moved_placement_is_that_of_later_views_and_coordinators,
                                        fresh, clean),
        cmocka_unit_test_setup_teardown(workers_that_cannot_move_experts_are_refused, fresh, clean),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
