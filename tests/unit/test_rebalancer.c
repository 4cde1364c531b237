/* SPDX-License-Identifier: Apache-2.0 */
/* When experts move by themselves: single stories, and a simulation with rows that drift, in which
 * the rebalancer and plans keep four slots even. */
#include "balance/plan.h"
#include "balance/rebalancer.h"

#include "base/clock.h"
#include "support/check.h"
#include "support/random.h"

#include <math.h>
#include <string.h>

enum {
    EXPERTS = 64,
    SLOTS = 4,
    PLACES = EXPERTS / SLOTS + 2,
    LEAST_GAIN = 10,
    RUNS = 200,
    DRIFTS = 5,
    LOOKS = 40,  /* after each drift */
    ROWS = 4000, /* of a look, about */
};

#define EVERY_NS (60 * MOE_NS_PER_S)

static const struct moe_rebalancer_policy policy = {EVERY_NS, LEAST_GAIN};

/* ------------------------------------------------------------------ stories */

static void a_gain_moves_experts_if_it_lasts(void **unused)
{
    (void)unused;
    struct moe_rebalancer r;
    moe_rebalancer_begin(&r, &policy, 0);
    assert_int_equal(moe_rebalancer_due(&r), EVERY_NS);
    for (int i = 1; i < MOE_REBALANCER_LOOKS; i++)
        assert_false(moe_rebalancer_decide(&r, LEAST_GAIN));
    assert_false(moe_rebalancer_decide(&r, -1)); /* too few rows say nothing */
    assert_true(moe_rebalancer_decide(&r, LEAST_GAIN));
    moe_rebalancer_moved(&r, EVERY_NS, true);
    assert_int_equal(moe_rebalancer_due(&r), 2 * EVERY_NS);
    for (int i = 1; i < MOE_REBALANCER_REST + MOE_REBALANCER_LOOKS; i++)
        assert_false(moe_rebalancer_decide(&r, 90));
    assert_true(moe_rebalancer_decide(&r, 90));
}

static void a_peak_moves_nothing(void **unused)
{
    (void)unused;
    struct moe_rebalancer r;
    moe_rebalancer_begin(&r, &policy, 0);
    for (int i = 0; i < 100; i++) {
        for (int peak = 1; peak < MOE_REBALANCER_LOOKS; peak++)
            assert_false(moe_rebalancer_decide(&r, 90));
        assert_false(moe_rebalancer_decide(&r, LEAST_GAIN - 1));
    }
}

static void failed_moves_make_it_wait(void **unused)
{
    (void)unused;
    struct moe_rebalancer r;
    uint64_t now = 0, looks = 2;
    moe_rebalancer_begin(&r, &policy, now);
    for (int i = 0; i < 20; i++) {
        moe_rebalancer_moved(&r, now, false);
        assert_int_equal(moe_rebalancer_due(&r), now + looks * EVERY_NS);
        looks = looks < MOE_REBALANCER_PAUSE_MAX ? 2 * looks : looks;
        now = moe_rebalancer_due(&r);
        moe_rebalancer_look(&r, now);
        assert_int_equal(moe_rebalancer_due(&r), now + EVERY_NS);
    }
    moe_rebalancer_moved(&r, now, true);
    assert_int_equal(moe_rebalancer_due(&r), now + EVERY_NS);
}

static void without_a_policy_nothing_is_due(void **unused)
{
    (void)unused;
    struct moe_rebalancer r;
    moe_rebalancer_begin(&r, &(struct moe_rebalancer_policy){0}, 7);
    assert_int_equal(moe_rebalancer_due(&r), MOE_NEVER);
}

/* ------------------------------------------------------------------ rows that drift */

/* Zipf(1.2) over a random order of experts. */
static void drift(double share[EXPERTS])
{
    double sum = 0;
    for (uint32_t e = 0; e < EXPERTS; e++)
        sum += share[e] = pow(e + 1, -1.2);
    for (uint32_t e = EXPERTS - 1; e > 0; e--) {
        uint32_t other = random_below(e + 1);
        double kept = share[e];
        share[e] = share[other];
        share[other] = kept;
    }
    for (uint32_t e = 0; e < EXPERTS; e++)
        share[e] /= sum;
}

/* The rows of a look: up to a tenth more or less than the shares, and single peaks. */
static void draw(const double share[EXPERTS], uint64_t rows[EXPERTS])
{
    for (uint32_t e = 0; e < EXPERTS; e++)
        rows[e] = (uint64_t)(share[e] * (double)ROWS * (0.9 + random_below(200) / 1000.0));
    if (random_below(10) == 0)
        rows[random_below(EXPERTS)] += ROWS / 2;
}

static struct moe_placement_plan_input plan_of(const uint64_t rows[EXPERTS])
{
    return (struct moe_placement_plan_input){.slots = SLOTS,
                                             .layers = 1,
                                             .experts = EXPERTS,
                                             .places = PLACES,
                                             .copies = 1,
                                             .rows = rows};
}

/* Fills `masks` [EXPERTS] with the slots of a plan for `rows`. */
static void make_plan(const uint64_t rows[EXPERTS], const uint64_t now[EXPERTS],
                      uint64_t masks[EXPERTS])
{
    uint16_t expert[SLOTS * PLACES];
    const struct moe_placement_plan_input in = plan_of(rows);
    assert_ok(moe_placement_plan(&in, expert));
    assert_ok(moe_placement_match(&in, now, expert));
    memset(masks, 0, EXPERTS * sizeof *masks);
    for (uint32_t i = 0; i < SLOTS * PLACES; i++)
        masks[expert[i]] |= UINT64_C(1) << i / PLACES;
}

struct tally {
    size_t moves, looks;
    double before, after; /* sums of the busiest slot over the mean: without moves, with them */
};

/* Looks under one distribution of rows; the experts stay where they were at `holders`. */
static size_t look(struct moe_rebalancer *r, const double share[EXPERTS], uint64_t holders[EXPERTS],
                   const uint64_t first[EXPERTS], struct tally *t)
{
    size_t moves = 0;
    for (int i = 0; i < LOOKS; i++) {
        uint64_t rows[EXPERTS], planned[EXPERTS];
        double mean;
        draw(share, rows);
        make_plan(rows, holders, planned);
        double now = moe_placement_busiest(SLOTS, EXPERTS, rows, holders, &mean);
        double then = moe_placement_busiest(SLOTS, EXPERTS, rows, planned, &mean);
        t->before += moe_placement_busiest(SLOTS, EXPERTS, rows, first, &mean) / mean;
        t->after += now / mean;
        t->looks++;
        if (!moe_rebalancer_decide(r, 100 * (now - then) / now))
            continue;
        memcpy(holders, planned, sizeof planned);
        moe_rebalancer_moved(r, 0, true);
        moves++;
    }
    t->moves += moves;
    return moves;
}

static void a_drift_costs_few_moves_and_noise_none(void **unused)
{
    (void)unused;
    struct tally t = {0};
    size_t noise = 0; /* moves long after a drift */
    seed_random();
    for (int run = 0; run < RUNS; run++) {
        struct moe_rebalancer r;
        double share[EXPERTS];
        uint64_t holders[EXPERTS], first[EXPERTS];
        moe_rebalancer_begin(&r, &policy, 0);
        for (uint32_t e = 0; e < EXPERTS; e++)
            holders[e] = first[e] = UINT64_C(1) << e / (EXPERTS / SLOTS);
        for (int d = 0; d < DRIFTS; d++) {
            drift(share);
            (void)look(&r, share, holders, first, &t);
            noise += look(&r, share, holders, first, &t);
        }
    }
    print_message("%zu looks, %zu moves for %d drifts, %zu of them late: the busiest slot has %.3f "
                  "of the mean rows, "
                  "without moves %.3f\n",
                  t.looks, t.moves, RUNS * DRIFTS, noise, t.after / (double)t.looks,
                  t.before / (double)t.looks);
    assert_true(10 * t.moves < 12 * RUNS * DRIFTS && 10 * noise < RUNS * DRIFTS);
    assert_true(t.after < 1.2 * (double)t.looks && t.before > 1.5 * (double)t.looks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_gain_moves_experts_if_it_lasts),
        cmocka_unit_test(a_peak_moves_nothing),
        cmocka_unit_test(failed_moves_make_it_wait),
        cmocka_unit_test(without_a_policy_nothing_is_due),
        cmocka_unit_test(a_drift_costs_few_moves_and_noise_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
