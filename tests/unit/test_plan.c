/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of plans for copies of experts: every expert has one, no slot two of one expert, all
 * places are used, equal inputs give equal plans; and what plans gain. */
#include "balance/plan.h"

#include "base/clock.h"
#include "support/check.h"
#include "support/random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { EXPERTS = 256, SLOTS = 16, LAYERS = 58, RUNS = 3000 };

static void check_plan(const struct moe_placement_plan_input *in, const uint16_t *expert)
{
    for (uint32_t l = 0; l < in->layers; l++) {
        uint32_t copies[EXPERTS] = {0};
        for (uint32_t s = 0; s < in->slots; s++)
            for (uint32_t p = 0; p < in->places; p++, expert++) {
                assert_true(*expert < in->experts);
                assert_true(p == 0 || expert[0] > expert[-1]);
                copies[*expert]++;
            }
        for (uint32_t e = 0; e < in->experts; e++)
            assert_true(copies[e] >= in->copies && copies[e] <= in->slots);
    }
}

static void random_inputs_keep_the_rules(void **state)
{
    (void)state;
    static uint16_t first[2 * SLOTS * EXPERTS], again[2 * SLOTS * EXPERTS];
    static uint64_t rows[2 * EXPERTS];
    seed_random();
    for (int run = 0; run < RUNS; run++) {
        uint32_t slots = random_between(1, SLOTS), experts = random_between(1, EXPERTS / 4);
        struct moe_placement_plan_input in = {.slots = slots,
                                              .layers = 2,
                                              .experts = experts,
                                              .copies = one_in(2) ? 1 : random_between(1, slots),
                                              .rows = rows};
        in.places = (experts * in.copies + slots - 1) / slots;
        in.places = one_in(3) ? experts : random_between(in.places, experts);
        for (uint32_t i = 0; i < 2 * experts; i++)
            rows[i] = one_in(4) ? 0 : one_in(8) ? random_bits() >> 8 : random_below(1000);
        assert_ok(moe_placement_plan(&in, first));
        check_plan(&in, first);
        memset(again, 0xff, sizeof again);
        assert_ok(moe_placement_plan(&in, again));
        assert_memory_equal(first, again, 2 * slots * in.places * sizeof *first);
        double imbalance = moe_placement_imbalance(&in, rows, first);
        assert_true(imbalance >= 1 - 1e-9 && imbalance <= slots + 1e-9);
    }
}

static uint64_t mask_of(const struct moe_placement_plan_input *in, const uint16_t *expert,
                        uint16_t e)
{
    uint64_t mask = 0;
    for (uint32_t i = 0; i < in->slots * in->places; i++)
        if (expert[i] == e)
            mask |= UINT64_C(1) << i / in->places;
    return mask;
}

/* Copies that slots lack. */
static uint32_t count_moves(const struct moe_placement_plan_input *in, const uint64_t *holders,
                            const uint16_t *expert)
{
    uint32_t moves = 0;
    for (uint16_t e = 0; e < in->experts; e++)
        moves += (uint32_t)__builtin_popcountll(mask_of(in, expert, e) & ~holders[e]);
    return moves;
}

/* The lists of a plan in another order go back to where they are: nothing moves. For a plan of
 * other rows, no more copies move than before. */
static void matched_plans_move_less(void **state)
{
    (void)state;
    uint16_t expert[8 * 64], shuffled[8 * 64];
    uint64_t rows[64], holders[64];
    uint32_t before = 0, after = 0;
    seed_random();
    for (int run = 0; run < 200; run++) {
        uint32_t slots = random_between(1, 8), experts = random_between(slots, 64);
        struct moe_placement_plan_input in = {.slots = slots,
                                              .layers = 1,
                                              .experts = experts,
                                              .places = (experts + slots - 1) / slots,
                                              .copies = 1,
                                              .rows = rows};
        for (uint32_t e = 0; e < experts; e++)
            rows[e] = random_below(1000);
        assert_ok(moe_placement_plan(&in, expert));
        for (uint16_t e = 0; e < experts; e++)
            holders[e] = mask_of(&in, expert, e);
        double mean, busiest = moe_placement_busiest(slots, experts, rows, holders, &mean);
        assert_true(fabs(busiest - mean * moe_placement_imbalance(&in, rows, expert)) < 1e-3);
        for (uint32_t s = 0; s < slots; s++)
            memcpy(shuffled + (s + 1) % slots * in.places, expert + s * in.places,
                   in.places * sizeof *expert);
        assert_ok(moe_placement_match(&in, holders, shuffled));
        check_plan(&in, shuffled);
        assert_int_equal(count_moves(&in, holders, shuffled), 0);
        for (uint32_t e = 0; e < experts; e++)
            rows[e] = random_below(1000);
        assert_ok(moe_placement_plan(&in, expert));
        before += count_moves(&in, holders, expert);
        assert_ok(moe_placement_match(&in, holders, expert));
        check_plan(&in, expert);
        after += count_moves(&in, holders, expert);
    }
    print_message("  copies that move: %u, matched %u\n", before, after);
    assert_true(after <= before);
}

/* Weight k^-1.2 for rank k; ranks are shuffled over experts. */
static void zipf(double weight[EXPERTS], uint32_t experts)
{
    for (uint32_t e = 0; e < experts; e++)
        weight[e] = pow(e + 1, -1.2);
    for (uint32_t e = experts - 1; e > 0; e--) {
        uint32_t other = random_below(e + 1);
        double w = weight[e];
        weight[e] = weight[other];
        weight[other] = w;
    }
}

/* Rows of a prefill: each token goes to `top_k` different experts, by weight. */
static void draw_rows(const double *weight, uint32_t experts, uint32_t top_k, uint64_t *rows)
{
    memset(rows, 0, experts * sizeof *rows);
    for (uint32_t token = 0; token < 20000; token++) {
        bool taken[EXPERTS] = {false};
        for (uint32_t k = 0; k < top_k; k++) {
            double left = 0;
            for (uint32_t e = 0; e < experts; e++)
                left += taken[e] ? 0 : weight[e];
            double at = left * (double)(random_bits() >> 11) / (double)(UINT64_C(1) << 53);
            uint32_t e = 0;
            for (; e + 1 < experts && (taken[e] || at >= weight[e]); e++)
                at -= taken[e] ? 0 : weight[e];
            while (taken[e])
                e--;
            taken[e] = true;
            rows[e]++;
        }
    }
}

/* The plan is made from the rows of one batch, and judged by those of another. */
static void zipf_becomes_even(void **state)
{
    (void)state;
    double weight[EXPERTS];
    uint64_t rows[64], next[64];
    uint16_t expert[4 * 18], contiguous[4 * 18];
    seed_random();
    for (uint32_t k = 1; k <= 8; k += 7) {
        double worst = 0, before = 0;
        for (int run = 0; run < 10; run++) {
            struct moe_placement_plan_input in = {
                .slots = 4, .layers = 1, .experts = 64, .places = 18, .copies = 1, .rows = rows};
            zipf(weight, 64);
            draw_rows(weight, 64, k, rows);
            draw_rows(weight, 64, k, next);
            assert_ok(moe_placement_plan(&in, expert));
            check_plan(&in, expert);
            worst = fmax(worst, moe_placement_imbalance(&in, next, expert));
            struct moe_placement_plan_input plain = in;
            plain.places = 16;
            for (uint16_t e = 0; e < 64; e++)
                contiguous[e] = e;
            before = fmax(before, moe_placement_imbalance(&plain, next, contiguous));
        }
        print_message("  K = %u: max/mean rows %.3f, contiguous %.3f\n", k, worst, before);
        assert_true(worst <= 1.1 && before > 1.1);
    }
}

static void wrong_sizes_are_refused(void **state)
{
    (void)state;
    uint64_t rows[8] = {0};
    uint16_t expert[64];
    const struct moe_placement_plan_input good = {
        .slots = 2, .layers = 1, .experts = 8, .places = 4, .copies = 1, .rows = rows};
    struct moe_placement_plan_input in = good;
    assert_ok(moe_placement_plan(&in, expert));
    in.places = 3;
    assert_refused(moe_placement_plan(&in, expert), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
    in.places = 9;
    assert_refused(moe_placement_plan(&in, expert), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
    in = good;
    in.copies = 2;
    assert_refused(moe_placement_plan(&in, expert), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
    in = good;
    in.slots = 0;
    assert_refused(moe_placement_plan(&in, expert), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
    in = good;
    in.experts = MOE_MAX_EXPERTS + 1;
    assert_refused(moe_placement_plan(&in, expert), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
}

/* DeepSeek-V3 on 8 slots with 4 spare places each. Printed, not judged. */
static void the_time_of_a_large_plan(void **state)
{
    (void)state;
    static uint64_t rows[LAYERS * EXPERTS];
    static uint16_t expert[LAYERS * 8 * 36];
    struct moe_placement_plan_input in = {
        .slots = 8, .layers = LAYERS, .experts = EXPERTS, .places = 36, .copies = 1, .rows = rows};
    double weight[EXPERTS], best = 1e9;
    seed_random();
    for (uint32_t l = 0; l < LAYERS; l++) {
        zipf(weight, EXPERTS);
        for (uint32_t e = 0; e < EXPERTS; e++)
            rows[l * EXPERTS + e] = (uint64_t)(1e6 * weight[e]);
    }
    for (int run = 0; run < 20; run++) {
        uint64_t begun = moe_clock_ns();
        assert_ok(moe_placement_plan(&in, expert));
        best = fmin(best, (double)(moe_clock_ns() - begun) / 1e6);
    }
    check_plan(&in, expert);
    print_message("  58 layers of 256 experts, 8 slots of 36 places: %.2f ms\n", best);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_inputs_keep_the_rules),
        cmocka_unit_test(matched_plans_move_less),
        cmocka_unit_test(zipf_becomes_even),
        cmocka_unit_test(wrong_sizes_are_refused),
        cmocka_unit_test(the_time_of_a_large_plan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
