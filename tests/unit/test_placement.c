/* SPDX-License-Identifier: Apache-2.0 */
/* Placement: linear shares, lists of copies, and a hash that changes when anything changes. */
#include "coordinator/placement.h"
#include "support/check.h"
#include "support/random.h"

#include <string.h>

static struct moe_placement *new_placement(void)
{
    struct moe_placement *p;
    assert_ok(moe_placement_create(&p));
    return p;
}

static void linear_shares_differ_by_at_most_one(void **unused)
{
    (void)unused;
    struct moe_placement *p = new_placement();
    for (uint32_t slots = 1; slots <= MOE_PLACEMENT_SLOTS_MAX; slots++) {
        for (uint32_t experts = 1; experts <= MOE_PLACEMENT_EXPERTS_MAX; experts++) {
            struct moe_placement_layer layer = {.layer = 3, .experts = experts};
            struct moe_status st =
                moe_placement_set_linear(p, 1, moe_placement_first_slots(slots), 1, &layer, 1);
            assert_int_equal(st.code, MOE_OK);
            uint32_t share[MOE_PLACEMENT_SLOTS_MAX] = {0}, last = 0;
            for (uint32_t e = 0; e < experts; e++) {
                const uint8_t *holders;
                assert_int_equal(moe_placement_holders(p, 0, e, &holders), 1);
                assert_true(holders[0] >= last && holders[0] < slots);
                last = holders[0];
                share[last]++;
            }
            for (uint32_t s = 0; s < slots; s++)
                assert_int_equal(share[s], experts / slots + (s < experts % slots ? 1 : 0));
        }
    }
    moe_placement_destroy(p);
}

static uint64_t holders_of(const struct moe_placement *p, uint32_t expert)
{
    const uint8_t *holders;
    uint64_t mask = 0;
    uint32_t n = moe_placement_holders(p, 0, expert, &holders);
    for (uint32_t c = 0; c < n; c++)
        mask |= UINT64_C(1) << holders[c];
    return mask;
}

/* What a live mask covers is what the lists say, for each mask of small groups. */
static void a_mask_covers_what_the_copies_say(void **unused)
{
    (void)unused;
    struct moe_placement *p = new_placement();
    for (uint32_t slots = 1; slots <= 8; slots++)
        for (uint32_t replicas = 1; replicas <= slots; replicas++) {
            struct moe_placement_layer layer = {.layer = 3, .experts = 2 * slots + 1};
            assert_ok(moe_placement_set_linear(p, 1, moe_placement_first_slots(slots), replicas,
                                               &layer, 1));
            for (uint64_t live = 0; live < UINT64_C(1) << slots; live++) {
                uint32_t count[MOE_PLACEMENT_SLOTS_MAX + 1], want[9] = {0};
                for (uint32_t e = 0; e < layer.experts; e++) {
                    assert_int_equal(__builtin_popcountll(holders_of(p, e)), replicas);
                    want[__builtin_popcountll(holders_of(p, e) & live)]++;
                }
                moe_placement_count_copies(p, live, count);
                assert_memory_equal(count, want, sizeof want);
                assert_int_equal(
                    moe_placement_covers(moe_placement_first_slots(slots), replicas, live),
                    want[0] == 0);
            }
        }
    moe_placement_destroy(p);
}

/* Hosts of slots / replicas slots each: the loss of one is covered. */
static void the_loss_of_neighbours_is_covered(void **unused)
{
    (void)unused;
    for (uint32_t replicas = 2; replicas <= 8; replicas++)
        for (uint32_t slots = replicas; slots <= MOE_PLACEMENT_SLOTS_MAX; slots += replicas)
            for (uint32_t first = 0; first < slots; first += slots / replicas) {
                uint64_t lost = (UINT64_C(1) << slots / replicas) - 1;
                uint64_t all = UINT64_MAX >> (64 - slots);
                assert_true(moe_placement_covers(moe_placement_first_slots(slots), replicas,
                                                 all & ~(lost << first)));
                assert_false(moe_placement_covers(moe_placement_first_slots(slots), 1,
                                                  all & ~(UINT64_C(1) << first)));
            }
}

/* A random placement with replicas, as lists; kept so that it can be built again with one change.
 */
struct draft {
    uint32_t slots, layer_count;
    struct moe_placement_layer layers[4];
    uint8_t copies[4][16], holders[4][16 * MOE_PLACEMENT_SLOTS_MAX];
    size_t holder_count[4];
};

static void draw(struct draft *d)
{
    memset(d, 0, sizeof *d);
    d->slots = 2 + random_below(MOE_PLACEMENT_SLOTS_MAX - 1);
    d->layer_count = 1 + random_below(4);
    for (uint32_t l = 0; l < d->layer_count; l++) {
        d->layers[l] =
            (struct moe_placement_layer){.layer = 2 * l + 1, .experts = 1 + random_below(16)};
        for (uint32_t e = 0; e < d->layers[l].experts; e++) {
            uint64_t mask = random_bits() & UINT64_MAX >> (64 - d->slots);
            mask |= UINT64_C(1) << random_below(d->slots);
            for (uint32_t s = 0; s < d->slots; s++) {
                if ((mask >> s & 1) == 0)
                    continue;
                d->holders[l][d->holder_count[l]++] = (uint8_t)s;
                d->copies[l][e]++;
            }
        }
    }
}

static void build(struct moe_placement *p, const struct draft *d)
{
    assert_ok(moe_placement_begin(p, 7, d->slots));
    for (uint32_t l = 0; l < d->layer_count; l++) {
        assert_ok(moe_placement_add_layer(p, &d->layers[l], d->copies[l], d->holders[l],
                                          d->holder_count[l]));
    }
}

/* One change that keeps the draft legal. */
static void change(struct draft *d)
{
    uint32_t l = random_below(d->layer_count);
    switch (random_below(4)) {
    case 0: /* one expert more, on slot 0 */
        if (d->layers[l].experts < 16) {
            d->copies[l][d->layers[l].experts++] = 1;
            d->holders[l][d->holder_count[l]++] = 0;
            return;
        }
        break;
    case 1: /* the last layer has another number */
        d->layers[d->layer_count - 1].layer += 1 + random_below(5);
        return;
    case 2: /* the group has another size; holders stay in range */
        if (d->slots < MOE_PLACEMENT_SLOTS_MAX) {
            d->slots++;
            return;
        }
        break;
    default: break;
    }
    /* the last expert of the layer lives elsewhere */
    uint32_t last = d->layers[l].experts - 1;
    uint8_t old = d->holders[l][d->holder_count[l] - 1];
    d->holder_count[l] -= d->copies[l][last];
    bool single = d->copies[l][last] == 1;
    d->copies[l][last] = 1;
    d->holders[l][d->holder_count[l]++] = (uint8_t)(single ? (old + 1u) % d->slots : old);
}

static void the_hash_changes_when_anything_changes(void **unused)
{
    (void)unused;
    struct moe_placement *p = new_placement();
    for (int i = 0; i < 3000; i++) {
        struct draft d;
        draw(&d);
        build(p, &d);
        uint64_t content = moe_placement_content_hash(p), whole = moe_placement_hash(p);
        build(p, &d);
        assert_true(content == moe_placement_content_hash(p));
        moe_placement_set_version(p, 8);
        assert_true(content == moe_placement_content_hash(p));
        assert_true(whole != moe_placement_hash(p));
        change(&d);
        build(p, &d);
        if (content == moe_placement_content_hash(p))
            fail_msg("round %d: a change went unnoticed", i);
    }
    moe_placement_destroy(p);
}

static void lists_come_back_as_they_were_given(void **unused)
{
    (void)unused;
    struct moe_placement *p = new_placement();
    for (int i = 0; i < 500; i++) {
        struct draft d;
        draw(&d);
        build(p, &d);
        assert_int_equal(moe_placement_layer_count(p), d.layer_count);
        assert_int_equal(moe_placement_version(p), 7);
        for (uint32_t l = 0; l < d.layer_count; l++) {
            size_t index = 99, at = 0;
            assert_true(moe_placement_find_layer(p, d.layers[l].layer, &index));
            assert_int_equal(index, l);
            for (uint32_t e = 0; e < d.layers[l].experts; e++) {
                const uint8_t *holders;
                assert_int_equal(moe_placement_holders(p, l, e, &holders), d.copies[l][e]);
                assert_memory_equal(holders, d.holders[l] + at, d.copies[l][e]);
                at += d.copies[l][e];
            }
        }
        size_t index;
        assert_false(moe_placement_find_layer(p, 2, &index));
    }
    moe_placement_destroy(p);
}

static void expect_refused(struct moe_status st)
{
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    print_message("  %s\n", st.text);
}

static void impossible_placements_are_refused(void **unused)
{
    (void)unused;
    struct moe_placement *p = new_placement();
    struct moe_placement_layer two = {.layer = 5, .experts = 2}, none = {.layer = 6};
    struct moe_placement_layer huge = {.layer = 6, .experts = MOE_PLACEMENT_EXPERTS_MAX + 1};
    const uint8_t ones[2] = {1, 1}, zero[2] = {1, 0}, both[2] = {1, 2};
    const uint8_t good[2] = {0, 1}, out[2] = {0, 2}, falling[3] = {0, 1, 0}, twice[3] = {0, 1, 1};
    expect_refused(moe_placement_begin(p, 1, 0));
    expect_refused(moe_placement_begin(p, 1, MOE_PLACEMENT_SLOTS_MAX + 1));
    assert_ok(moe_placement_begin(p, 1, 2));
    expect_refused(moe_placement_add_layer(p, &none, ones, good, 0));
    expect_refused(moe_placement_add_layer(p, &two, zero, good, 1));
    expect_refused(moe_placement_add_layer(p, &two, ones, out, 2));
    expect_refused(moe_placement_add_layer(p, &two, ones, good, 1));
    expect_refused(moe_placement_add_layer(p, &two, ones, falling, 3));
    expect_refused(moe_placement_add_layer(p, &two, both, falling, 3));
    expect_refused(moe_placement_add_layer(p, &two, both, twice, 3));
    assert_int_equal(moe_placement_layer_count(p), 0);
    assert_ok(moe_placement_add_layer(p, &two, ones, good, 2));
    expect_refused(moe_placement_add_layer(p, &two, ones, good, 2)); /* the same layer again */
    expect_refused(moe_placement_set_linear(p, 1, 3, 1, &huge, 1));
    expect_refused(moe_placement_set_linear(p, 1, 3, 0, &two, 1));
    expect_refused(moe_placement_set_linear(p, 1, 3, 3, &two, 1));
    moe_placement_destroy(p);
}

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_shares_differ_by_at_most_one),
        cmocka_unit_test(a_mask_covers_what_the_copies_say),
        cmocka_unit_test(the_loss_of_neighbours_is_covered),
        cmocka_unit_test(the_hash_changes_when_anything_changes),
        cmocka_unit_test(lists_come_back_as_they_were_given),
        cmocka_unit_test(impossible_placements_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
