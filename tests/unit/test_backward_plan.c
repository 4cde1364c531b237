/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of a backward pass's plan (kernels/cuda/plan/backward_plan.h): pure and total; what runs
 * at the same time fits on the device together, in whole pairs of multiprocessors. */
#include "cuda/plan/backward_plan.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

static uint64_t random_state;

static uint32_t random_below(uint32_t n)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(random_state >> 32) % n;
}

static struct moe_cuda_backward_params deepseek_v3(void)
{
    return (struct moe_cuda_backward_params){.multiprocessors = 132,
                                             .slots = 4,
                                             .bucket = 4096,
                                             .top_k = 8,
                                             .hidden = 7168,
                                             .intermediate = 2048,
                                             .local_experts = 64,
                                             .shared = true,
                                             .weights = true};
}

/* Else a kernel that waits for a peer would wait for the one that runs next to it as well. */
static void what_runs_at_the_same_time_fits_together(void **state)
{
    (void)state;
    for (int i = 0; i < 10000; i++) {
        struct moe_cuda_backward_params f = {.multiprocessors = 1 + random_below(200),
                                             .slots = 1 + random_below(16),
                                             .bucket = 1u << random_below(16),
                                             .top_k = 1 + random_below(16),
                                             .hidden = 8 * (1 + random_below(2048)),
                                             .intermediate = 1 + random_below(30000),
                                             .local_experts = random_below(1025),
                                             .shared = random_below(2),
                                             .shared_pre = random_below(2),
                                             .weights = random_below(2),
                                             .adds = random_below(2)};
        struct moe_cuda_backward_plan p = moe_cuda_backward_plan(&f);
        assert_true(p.dispatch + p.shared <= f.multiprocessors);
        assert_int_equal(p.dispatch > 0, p.shared > 0);
        assert_true(p.combine + p.overlap.processors <= f.multiprocessors);
        assert_int_equal(p.combine > 0, p.overlap.processors > 0);
        assert_int_equal(p.overlap.processors % 2, 0);
        assert_true(p.overlap.share >= 0 && p.overlap.share <= 1);
        assert_true(f.shared || p.dispatch == 0);
        assert_true((f.weights && f.local_experts > 0) || p.combine == 0);
    }
}

static void a_slot_alone_does_one_thing_after_the_other(void **state)
{
    (void)state;
    struct moe_cuda_backward_params f = deepseek_v3();
    f.slots = 1;
    struct moe_cuda_backward_plan p = moe_cuda_backward_plan(&f);
    assert_int_equal(p.dispatch, 0);
    assert_int_equal(p.combine, 0);
}

static double share(const struct moe_cuda_backward_params *f)
{
    return moe_cuda_backward_plan(f).overlap.share;
}

/* The time that combine takes decides how many gradients make room for it. */
static void overlap_lasts_as_long_as_rows_travel(void **state)
{
    (void)state;
    const struct moe_cuda_backward_params base = deepseek_v3();
    assert_true(share(&base) > 0.05 && share(&base) < 0.5);
    struct moe_cuda_backward_params f = base;
    f.adds = true; /* the products take longer */
    assert_true(share(&f) < share(&base));
    f = base;
    f.local_experts = 8; /* rows are as many, and so are products */
    assert_true(share(&f) == share(&base));
    f = base;
    f.intermediate = 256; /* hardly any product */
    assert_true(share(&f) == 1);
    f = base;
    f.slots = 2; /* fewer sums on their way */
    assert_true(share(&f) < share(&base));
}

int main(int argc, char **argv)
{
    random_state = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    printf("seed %" PRIu64 "\n", random_state);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_runs_at_the_same_time_fits_together),
        cmocka_unit_test(a_slot_alone_does_one_thing_after_the_other),
        cmocka_unit_test(overlap_lasts_as_long_as_rows_travel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
