/* SPDX-License-Identifier: Apache-2.0 */
/* Promises about groups of GPUs by size (kernels/cuda/plan): the order in which up to 64 slots
 * send, and the memory of a slot. */
#include "common/session_rules.h"
#include "cuda/plan/limits.h"
#include "cuda/plan/peers.h"
#include "cuda/plan/rows.h"
#include "support/check.h"

#include <stdio.h>

/* A warp looks at 32 distances at a time. Every slot has one lane in one turn; no lane has an index
 * beyond the tables of slots. */
static void a_sender_meets_every_slot_once(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= MOE_CUDA_MAX_SLOTS; slots++)
        for (uint32_t sender = 0; sender < slots; sender++) {
            uint64_t met = 0;
            assert_int_equal(moe_cuda_slot_at(sender, slots, 0), sender);
            for (uint32_t first = 0; first < slots; first += MOE_CUDA_WARP_SLOTS)
                for (uint32_t lane = 0; lane < MOE_CUDA_WARP_SLOTS; lane++) {
                    uint32_t slot = moe_cuda_slot_at(sender, slots, first + lane);
                    assert_true(slot < MOE_CUDA_MAX_SLOTS);
                    if (first + lane >= slots)
                        continue;
                    assert_true(slot < slots && !(met >> slot & 1));
                    met |= UINT64_C(1) << slot;
                }
            assert_true(met == UINT64_MAX >> (64 - slots));
        }
}

/* At each turn, no two slots send to the same one. */
static void slots_begin_with_different_peers(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= MOE_CUDA_MAX_SLOTS; slots++)
        for (uint32_t distance = 0; distance < slots; distance++) {
            uint64_t taken = 0;
            for (uint32_t sender = 0; sender < slots; sender++)
                taken |= UINT64_C(1) << moe_cuda_slot_at(sender, slots, distance);
            assert_true(taken == UINT64_MAX >> (64 - slots));
        }
}

enum { TOKENS = 8192, HIDDEN = 7168, TOP_K = 8, EXPERTS = 384, INNER = 2048 };

static struct moe_window_layout layout_of(uint32_t slots, uint32_t tokens_f32, bool training)
{
    const struct moe_window_shape shape = {.slots = slots,
                                           .max_tokens = TOKENS,
                                           .max_tokens_f32 = tokens_f32,
                                           .max_hidden = HIDDEN,
                                           .max_top_k = TOP_K,
                                           .max_experts = EXPERTS,
                                           .training = training};
    struct moe_window_layout l;
    assert_true(moe_window_layout_of(&shape, &l));
    return l;
}

/* Kimi-K2 with buckets of 8192 tokens. With half as many in F32, rows and partials have the strides
 * of BF16. */
static void half_the_tokens_in_f32_need_half_the_window(void **state)
{
    (void)state;
    static const uint32_t slots[] = {8, 16, 64};
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++) {
        const struct moe_window_layout all = layout_of(slots[i], 0, false),
                                       half = layout_of(slots[i], TOKENS / 2, false);
        printf("Kimi-K2, %u slots: window of %.2f GB, and %.2f GB with half the tokens in F32\n",
               slots[i], (double)all.quick_bytes / 1e9, (double)half.quick_bytes / 1e9);
        assert_true(all.row_region == (size_t)TOKENS * HIDDEN * 4);
        assert_true(half.row_region == (size_t)TOKENS * HIDDEN * 2);
        assert_true(half.partial_region == half.row_region);
        assert_true(half.quick_region == (size_t)MOE_WINDOW_QUICK_TOKENS * HIDDEN * 2);
        /* Only flags and routing stay as they are. */
        assert_true(all.rows == half.rows);
        assert_true(all.quick_bytes - all.rows == 2 * (half.quick_bytes - half.rows));
    }
}

/* Rows of every bucket of either dtype fit their regions. */
static void all_rows_of_a_step_fit(void **state)
{
    (void)state;
    for (uint32_t hidden = 1; hidden <= 200; hidden++)
        for (uint32_t tokens = 1; tokens <= 2048; tokens *= 2)
            for (uint32_t f32 = 1; f32 <= tokens; f32 *= 2) {
                const struct moe_window_shape shape = {64, tokens, hidden, 8, 64, false, f32};
                struct moe_window_layout l;
                assert_true(moe_window_layout_of(&shape, &l));
                assert_true(tokens * moe_window_row_stride(hidden, MOE_DTYPE_BF16) <= l.row_region);
                assert_true(f32 * moe_window_row_stride(hidden, MOE_DTYPE_F32) <= l.row_region);
                assert_true(l.partial_region == l.row_region);
                uint32_t small = MOE_WINDOW_QUICK_TOKENS;
                small = tokens < small ? tokens : small;
                assert_true(moe_window_is_quick(&l, small, hidden, MOE_DTYPE_BF16));
                assert_false(
                    moe_window_is_quick(&l, 2 * MOE_WINDOW_QUICK_TOKENS, hidden, MOE_DTYPE_BF16));
                if (f32 == tokens)
                    assert_true(moe_window_is_quick(&l, small, hidden, MOE_DTYPE_F32));
            }
    const struct moe_window_layout trains = layout_of(2, TOKENS / 2, true);
    assert_true(trains.row_region == TOKENS * moe_window_row_stride(2 * HIDDEN, MOE_DTYPE_BF16));
    assert_true(trains.partial_region == TOKENS * moe_window_gradient_stride(HIDDEN));
    const struct moe_window_shape wrong = {2, 64, 32, 4, 8, false, 65};
    struct moe_window_layout l;
    assert_false(moe_window_layout_of(&wrong, &l));
}

static struct moe_status check_bucket(enum moe_dtype dtype, uint32_t max_tokens_f32,
                                      uint32_t bucket)
{
    const struct moe_session_config config = {.slots = 64,
                                              .live = UINT64_MAX,
                                              .max_tokens = 64,
                                              .max_tokens_f32 = max_tokens_f32,
                                              .max_hidden = 32,
                                              .max_top_k = 2,
                                              .max_experts = 4,
                                              .partial = true};
    const struct moe_layer_spec spec = {.hidden = 32, .experts = 4, .router = {.top_k = 2}};
    const struct moe_placement placement = {.slots = 64, .experts = 4};
    return moe_session_check_step(&config, &spec, &placement, 0, dtype, bucket, 1);
}

static void a_bucket_of_f32_is_refused_beyond_its_limit(void **state)
{
    (void)state;
    assert_ok(check_bucket(MOE_DTYPE_F32, 0, 64));
    assert_ok(check_bucket(MOE_DTYPE_F32, 32, 32));
    assert_ok(check_bucket(MOE_DTYPE_BF16, 32, 64));
    assert_refused(check_bucket(MOE_DTYPE_F32, 32, 64), MOE_INVALID_ARGUMENT,
                   MOE_REASON_TOKEN_LIMIT);
    assert_refused(check_bucket(MOE_DTYPE_BF16, 32, 128), MOE_INVALID_ARGUMENT,
                   MOE_REASON_TOKEN_LIMIT);
}

/* One step of Kimi-K2 on eight slots. Arrived rows and down's results lie in the same memory. */
static void results_lie_over_the_rows(void **state)
{
    (void)state;
    const size_t rows = moe_cuda_max_rows(8, TOKENS, TOP_K, EXPERTS / 8);
    const size_t row = moe_cuda_row_bytes(HIDDEN, MOE_DTYPE_BF16, MOE_DTYPE_BF16);
    const double arrived = (double)(rows * row), inner = (double)(rows * INNER * 2);
    printf("Kimi-K2, 8 slots: %zu rows of a step; %.2f GB of rows and results, %.2f GB between the "
           "products\n",
           rows, arrived / 1e9, inner / 1e9);
    assert_int_equal(rows, 530304); /* 8 * 8192 * 8, and padding of 48 experts */
    assert_int_equal(row, HIDDEN * 2);
    /* Separate results would need another 7.6 GB. */
    assert_true(arrived + inner < 9.8e9);
    /* A result of F32 decides if it is wider. */
    assert_int_equal(moe_cuda_row_bytes(HIDDEN, MOE_DTYPE_BF16, MOE_DTYPE_F32), HIDDEN * 4);
    assert_int_equal(moe_cuda_max_rows(8, TOKENS, TOP_K, 0), 0);
    assert_int_equal(moe_cuda_max_rows(1, 1, 2, 8), 256);
    /* The largest step of the largest group is a number of 32 bits. */
    assert_true(moe_cuda_max_rows(MOE_CUDA_MAX_SLOTS, 65536, MOE_MAX_TOP_K, MOE_CUDA_MAX_EXPERTS) >=
                UINT32_C(64) * 65536 * MOE_MAX_TOP_K);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_sender_meets_every_slot_once),
        cmocka_unit_test(slots_begin_with_different_peers),
        cmocka_unit_test(half_the_tokens_in_f32_need_half_the_window),
        cmocka_unit_test(all_rows_of_a_step_fit),
        cmocka_unit_test(a_bucket_of_f32_is_refused_beyond_its_limit),
        cmocka_unit_test(results_lie_over_the_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
