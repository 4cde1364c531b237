/* SPDX-License-Identifier: Apache-2.0 */
/* Agreement on the bytes of a model: slots are compared with each other and with the record, lost
 * processes do not count, and the record's file is read back as it was or not at all. */
#include "coordinator/weights.h"
#include "support/check.h"
#include "support/random.h"

#include <stdlib.h>
#include <string.h>

enum { SLOTS = 3, EXPERTS = 8, LAYERS = 2, FIRST_LAYER = 3 };

static struct moe_placement *placement;
static struct moe_weights *weights;

static int set_up(void **unused)
{
    (void)unused;
    const struct moe_placement_layer layers[LAYERS] = {{FIRST_LAYER, EXPERTS},
                                                       {FIRST_LAYER + 1, EXPERTS}};
    assert_ok(moe_placement_create(&placement));
    assert_ok(moe_placement_set_linear(placement, 1, moe_placement_first_slots(SLOTS), 1, layers,
                                       LAYERS));
    assert_ok(moe_weights_create(SLOTS, "accept", &weights));
    return 0;
}

static int tear_down(void **unused)
{
    (void)unused;
    moe_weights_destroy(weights);
    moe_placement_destroy(placement);
    return 0;
}

/* What a slot reads: `model` chooses the bytes; expert `spoilt` of the last layer has others
 * (EXPERTS: none). */
struct bytes {
    uint8_t model;
    uint32_t spoilt;
};
static const struct bytes good = {1, EXPERTS};

static void set_unit(struct moe_digest_table *t, uint32_t layer, uint32_t expert, struct bytes b)
{
    struct moe_digest_unit unit = {.digest.bytes = {b.model, (uint8_t)layer, (uint8_t)expert}};
    if (layer == FIRST_LAYER + LAYERS - 1 && expert == b.spoilt) {
        unit.digest.bytes[31] = 1;
        unit.tags[1][0] = 1;
    }
    moe_digest_table_set(t, layer, expert, &unit);
}

/* Sends what `slot` of a linear placement holds, less the last expert if `cut`. */
static void report(uint32_t slot, uint64_t incarnation, struct bytes b, bool cut)
{
    static const struct moe_digest_names common = {1, {"gate"}},
                                         expert = {2, {"experts.*.down", "experts.*.up"}};
    struct moe_digest_table *t;
    assert_ok(moe_digest_table_create(&t));
    uint32_t first = slot < SLOTS ? 3 * slot : EXPERTS;
    uint32_t end = slot < SLOTS - 1 ? first + 3 : EXPERTS;
    for (uint32_t layer = FIRST_LAYER; layer < FIRST_LAYER + LAYERS; layer++) {
        assert_ok(moe_digest_table_add_layer(t, layer, EXPERTS, &common, &expert));
        set_unit(t, layer, MOE_DIGEST_COMMON, b);
        for (uint32_t e = first; e < end - cut; e++)
            set_unit(t, layer, e, b);
    }
    uint8_t part[MOE_DIGEST_PART_MIN_BYTES];
    struct moe_digest_cursor at = {0};
    size_t length;
    while ((length = moe_digest_table_pack(t, &at, part, sizeof part)) > 0)
        assert_ok(moe_weights_add_part(weights, slot, incarnation, placement, part, length));
    moe_digest_table_destroy(t);
}

static struct moe_status load(uint32_t slot, uint64_t incarnation, struct bytes b, bool *begun)
{
    report(slot, incarnation, b, false);
    return moe_weights_check(weights, slot, incarnation, "print", placement, begun);
}

static void load_all(struct bytes b)
{
    for (uint32_t s = 0; s < SLOTS; s++) {
        bool begun;
        assert_ok(load(s, 100 + s, b, &begun));
        assert_int_equal(begun, s == SLOTS - 1);
    }
}

static void expect_mismatch(struct moe_status st, const char *named)
{
    print_message("  %s\n", st.text);
    assert_int_equal(st.code, MOE_FAILED_PRECONDITION);
    assert_int_equal(st.reason, MOE_REASON_MODEL_MISMATCH);
    assert_non_null(strstr(st.text, named));
}

static void the_record_begins_when_all_slots_have_loaded_and_agree(void **unused)
{
    (void)unused;
    bool begun;
    assert_ok(load(0, 100, good, &begun));
    assert_string_equal(moe_weights_digest(weights, NULL), "");
    load_all(good); /* slot 0 again: a repeated Loaded */
    assert_int_equal(strlen(moe_weights_digest(weights, "print")), 64);
    assert_string_equal(moe_weights_digest(weights, "another"), "");
}

static void a_slot_that_differs_from_the_record_is_refused_by_tensor(void **unused)
{
    (void)unused;
    bool begun;
    load_all(good);
    expect_mismatch(load(2, 7, (struct bytes){1, 6}, &begun), "experts.6.up");
    expect_mismatch(load(1, 8, (struct bytes){9, EXPERTS}, &begun), "gate");
    assert_ok(load(2, 9, good, &begun));
    assert_false(begun);
}

static void without_a_record_slots_are_compared_with_each_other(void **unused)
{
    (void)unused;
    bool begun;
    assert_ok(load(0, 100, good, &begun));
    expect_mismatch(load(1, 101, (struct bytes){2, EXPERTS}, &begun), "slot 0: gate");
    /* Slot 0 is gone: what it had counts no more, and what was refused never did. */
    moe_weights_keep(weights, (uint64_t[SLOTS]){0, 0, 0});
    load_all((struct bytes){2, EXPERTS});
}

/* It may send digests before the record begins, and its Loaded after that. */
static void a_slot_without_experts_is_not_waited_for(void **unused)
{
    (void)unused;
    bool begun;
    moe_weights_destroy(weights);
    assert_ok(moe_weights_create(SLOTS + 1, "accept", &weights));
    report(SLOTS, 100 + SLOTS, good, false);
    load_all(good);
    assert_ok(moe_weights_check(weights, SLOTS, 100 + SLOTS, "print", placement, &begun));
    assert_false(begun);
}

static void missing_digests_are_a_mismatch(void **unused)
{
    (void)unused;
    bool begun;
    expect_mismatch(moe_weights_check(weights, 0, 1, "print", placement, &begun), "missing");
    report(0, 2, good, true);
    expect_mismatch(moe_weights_check(weights, 0, 2, "print", placement, &begun), "missing");
    report(0, 2, good, false);
    /* Those of an earlier process do not count for its successor. */
    expect_mismatch(moe_weights_check(weights, 0, 3, "print", placement, &begun), "missing");
}

static void another_fingerprint_begins_another_record(void **unused)
{
    (void)unused;
    char before[MOE_SHA256_HEX];
    const struct bytes upgraded = {2, EXPERTS};
    bool begun;
    load_all(good);
    strcpy(before, moe_weights_digest(weights, "print"));
    moe_weights_keep(weights, (uint64_t[SLOTS]){0, 0, 0});
    for (uint32_t s = 0; s < SLOTS; s++) {
        report(s, 200 + s, upgraded, false);
        assert_ok(moe_weights_check(weights, s, 200 + s, "other", placement, &begun));
        assert_string_equal(moe_weights_digest(weights, NULL),
                            begun ? moe_weights_digest(weights, "other") : before);
    }
    assert_true(begun);
    assert_string_not_equal(moe_weights_digest(weights, "other"), before);
}

static void parts_of_other_layers_are_refused(void **unused)
{
    (void)unused;
    const uint8_t strange[64] = {99, 0, 0, 0, EXPERTS}, wide[64] = {FIRST_LAYER, 0, 0, 0, 9};
    assert_int_equal(moe_weights_add_part(weights, 0, 1, placement, strange, 64).reason,
                     MOE_REASON_MALFORMED);
    assert_int_equal(moe_weights_add_part(weights, 0, 1, placement, wide, 64).reason,
                     MOE_REASON_MALFORMED);
    assert_int_equal(moe_weights_add_part(weights, 0, 1, placement, wide, 7).reason,
                     MOE_REASON_MALFORMED);
}

static void a_record_is_read_back_and_damage_is_found(void **unused)
{
    (void)unused;
    char before[MOE_SHA256_HEX];
    uint8_t *image;
    size_t length;
    bool begun;
    load_all(good);
    strcpy(before, moe_weights_digest(weights, "print"));
    assert_ok(moe_weights_encode(weights, &image, &length));
    print_message("  %zu bytes\n", length);
    assert_ok(moe_weights_decode(weights, image, length));
    assert_string_equal(moe_weights_digest(weights, "print"), before);
    expect_mismatch(load(2, 7, (struct bytes){1, 6}, &begun), "experts.6.up");
    for (size_t cut = 0; cut < length; cut++)
        assert_int_equal(moe_weights_decode(weights, image, cut).code, MOE_DATA_LOSS);
    for (size_t at = 0; at < length; at++) {
        image[at] ^= 0x10;
        assert_int_equal(moe_weights_decode(weights, image, length).code, MOE_DATA_LOSS);
        image[at] ^= 0x10;
    }
    assert_string_equal(moe_weights_digest(weights, NULL), "");
    free(image);
}

/* Reports in any order, of right and wrong processes that come and go: a wrong one never gets in,
 * right ones always do, and at the end the record is that of the right bytes. */
static void no_schedule_lets_other_bytes_in_once_the_record_has_begun(void **unused)
{
    (void)unused;
    char want[MOE_SHA256_HEX];
    uint64_t present[SLOTS] = {100, 101, 102}, next = 1000;
    bool begun;
    seed_random();
    load_all(good);
    strcpy(want, moe_weights_digest(weights, "print"));
    for (int i = 0; i < 20000; i++) {
        uint32_t slot = random_below(SLOTS);
        if (random_below(2) == 0)
            present[slot] = next++;
        moe_weights_keep(weights, present);
        uint32_t spoilt = random_below(2) == 0 ? random_below(EXPERTS) : EXPERTS;
        bool holds = spoilt < EXPERTS && (spoilt < 6 ? spoilt / 3 : 2) == slot;
        struct moe_status st = load(slot, present[slot], (struct bytes){1, spoilt}, &begun);
        assert_int_equal(st.code, holds ? MOE_FAILED_PRECONDITION : MOE_OK);
        assert_false(begun);
        if (holds)
            present[slot] = 0;
    }
    assert_string_equal(moe_weights_digest(weights, "print"), want);
}

int main(void)
{
#define WEIGHTS_TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        WEIGHTS_TEST(the_record_begins_when_all_slots_have_loaded_and_agree),
        WEIGHTS_TEST(a_slot_that_differs_from_the_record_is_refused_by_tensor),
        WEIGHTS_TEST(without_a_record_slots_are_compared_with_each_other),
        WEIGHTS_TEST(a_slot_without_experts_is_not_waited_for),
        WEIGHTS_TEST(missing_digests_are_a_mismatch),
        WEIGHTS_TEST(another_fingerprint_begins_another_record),
        WEIGHTS_TEST(parts_of_other_layers_are_refused),
        WEIGHTS_TEST(a_record_is_read_back_and_damage_is_found),
        WEIGHTS_TEST(no_schedule_lets_other_bytes_in_once_the_record_has_begun),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
