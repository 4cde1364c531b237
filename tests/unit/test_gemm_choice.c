/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the tile choice (kernels/cuda/plan/gemm_choice.h): pure, total, and what the
 * measurements say it should be. */
#include "cuda/plan/gemm_choice.h"
#include "cuda/plan/limits.h"
#include "cuda/plan/packing.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

static uint64_t random_state;

static uint32_t random_bits(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(random_state >> 32);
}

static struct moe_cuda_gemm_params deepseek_v3(uint32_t bucket)
{
    return (struct moe_cuda_gemm_params){
        .bucket = bucket, .slots = 4, .top_k = 8, .experts = 256, .n = 4096, .k = 7168};
}

static void expected_rows_are_the_even_share_rounded_up(void **state)
{
    (void)state;
    struct moe_cuda_gemm_params f = deepseek_v3(4096);
    assert_int_equal(moe_cuda_expected_rows(&f), 512);
    f.bucket = 1;
    assert_int_equal(moe_cuda_expected_rows(&f), 1); /* 32 rows for 256 experts */
    f.bucket = 9;
    assert_int_equal(moe_cuda_expected_rows(&f), 2); /* 288 for 256 */
    f.bucket = 0;
    assert_int_equal(moe_cuda_expected_rows(&f), 1);
}

static void expected_rows_do_not_overflow(void **state)
{
    (void)state;
    struct moe_cuda_gemm_params f = {UINT32_MAX, 16, 16, 1, 8, 8, 132};
    assert_int_equal(moe_cuda_expected_rows(&f), UINT32_MAX);
    assert_int_equal(moe_cuda_expected_hits(&f), 1);
    f.experts = 0;
    assert_int_equal(moe_cuda_expected_rows(&f), UINT32_MAX);
    assert_int_equal(moe_cuda_expected_hits(&f), 1);
    (void)moe_cuda_choose_tile(&f);
    f.slots = 0;
    assert_int_equal(moe_cuda_expected_hits(&f), 1);
}

/* Few tokens reach few experts, whatever the mean of their rows is. */
static void expected_hits_are_those_of_random_experts(void **state)
{
    (void)state;
    struct moe_cuda_gemm_params f = deepseek_v3(1);
    assert_int_equal(moe_cuda_expected_hits(&f), 8); /* 256 (1 - (1 - 8/256)^4) / 4 = 7.6 */
    f.slots = 2;
    assert_int_equal(moe_cuda_expected_hits(&f), 8); /* 7.9 */
    f.slots = 1;
    assert_int_equal(moe_cuda_expected_hits(&f), 8);
    f = deepseek_v3(128);
    assert_int_equal(moe_cuda_expected_hits(&f), 64);
    f.bucket = 0;
    assert_int_equal(moe_cuda_expected_hits(&f), 1);
    f = (struct moe_cuda_gemm_params){
        .bucket = 1, .slots = 1, .top_k = 1, .experts = 1, .n = 4096, .k = 7168};
    assert_int_equal(moe_cuda_expected_hits(&f), 1); /* the shared expert */
}

/* The share of busy processors decides. In each case: tiles of 128 columns on 132 processors. */
static void few_tiles_are_narrow(void **state)
{
    (void)state;
    static const struct {
        struct moe_cuda_gemm_params params;
        enum moe_cuda_gemm_tile tile;
    } cases[] = {
        /* Mixtral, 32 tokens on each of 4 slots: 2 experts with 32 rows; 64 and 448 tiles */
        {{32, 4, 2, 8, 4096, 14336, 132}, MOE_CUDA_TILE_DECODE_64},
        {{32, 4, 2, 8, 28672, 4096, 132}, MOE_CUDA_TILE_DECODE_64},
        /* 128 tokens: 2 experts with 128 rows; 64 and 448 tiles */
        {{128, 4, 2, 8, 4096, 14336, 132}, MOE_CUDA_TILE_EVEN_64},
        {{128, 4, 2, 8, 28672, 4096, 132}, MOE_CUDA_TILE_EVEN},
        /* more rows, or a wide tile's wave is full */
        {{256, 4, 2, 8, 4096, 14336, 132}, MOE_CUDA_TILE_EVEN},
        {{128, 4, 4, 16, 4096, 14336, 132}, MOE_CUDA_TILE_EVEN},
        /* one expert with one row: 32 tiles */
        {{1, 1, 1, 1, 4096, 7168, 132}, MOE_CUDA_TILE_DECODE_32},
        {{1, 1, 1, 1, 4096, 7168, 66}, MOE_CUDA_TILE_DECODE_64},
        /* the same with rows that would be most of the bytes */
        {{64, 1, 1, 1, 4096, 7168, 132}, MOE_CUDA_TILE_DECODE_64},
        /* few tokens reach some of the experts: about 256 tiles, but as many as the router says */
        {{1, 2, 8, 256, 4096, 7168, 132}, MOE_CUDA_TILE_DECODE_64},
        {{1, 4, 2, 8, 4096, 14336, 132}, MOE_CUDA_TILE_DECODE_64},
        {{4, 4, 8, 256, 7168, 2048, 132}, MOE_CUDA_TILE_DECODE},
        /* Qwen3: 384 and 512 tiles; DeepSeek-V3: 2048 */
        {{32, 4, 8, 128, 1536, 2048, 132}, MOE_CUDA_TILE_DECODE},
        {{32, 4, 8, 128, 2048, 768, 132}, MOE_CUDA_TILE_DECODE},
        {{128, 4, 8, 256, 4096, 7168, 132}, MOE_CUDA_TILE_DECODE},
        /* nothing is known about the device */
        {{32, 4, 2, 8, 4096, 14336, 0}, MOE_CUDA_TILE_DECODE},
        {{128, 4, 2, 8, 4096, 14336, 0}, MOE_CUDA_TILE_EVEN},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        enum moe_cuda_gemm_tile tile = moe_cuda_choose_tile(&cases[i].params);
        printf("  case %zu: tile %d\n", i, (int)tile);
        assert_int_equal(tile, cases[i].tile);
    }
}

/* Sizes choose among kernels with equal bits only: processors change the width and nothing else. */
static void processors_do_not_change_the_bits(void **state)
{
    (void)state;
    for (int i = 0; i < 5000; i++) {
        struct moe_cuda_gemm_params f = {.bucket = 1 + random_bits() % 512,
                                         .slots = 1 + random_bits() % 16,
                                         .top_k = 1 + random_bits() % 16,
                                         .experts = 1 + random_bits() % MOE_CUDA_MAX_EXPERTS,
                                         .n = 8 * (1 + random_bits() % 4096),
                                         .k = 8 * (1 + random_bits() % 2048)};
        enum moe_cuda_gemm_tile wide = moe_cuda_choose_tile(&f);
        assert_int_equal(moe_cuda_wide_tile(wide), wide);
        f.processors = 1 + random_bits() % 200;
        assert_int_equal(moe_cuda_wide_tile(moe_cuda_choose_tile(&f)), wide);
    }
}

static void few_rows_stream_weights(void **state)
{
    (void)state;
    for (uint32_t bucket = 1; bucket <= 512; bucket *= 2) {
        struct moe_cuda_gemm_params f = deepseek_v3(bucket);
        assert_int_equal(moe_cuda_choose_tile(&f), MOE_CUDA_TILE_DECODE);
    }
}

static void hundreds_of_rows_use_even_tiles_unless_k_is_short(void **state)
{
    (void)state;
    for (uint32_t bucket = 1024; bucket <= 4096; bucket *= 2) { /* 128, 256, 512 rows */
        struct moe_cuda_gemm_params f = deepseek_v3(bucket);
        assert_int_equal(moe_cuda_choose_tile(&f), MOE_CUDA_TILE_EVEN);
        f.k = 768;
        assert_int_equal(moe_cuda_choose_tile(&f), MOE_CUDA_TILE_PINGPONG);
    }
}

static void thousands_of_rows_use_full_tiles(void **state)
{
    (void)state;
    for (uint32_t bucket = 8192; bucket <= 32768; bucket *= 2) {
        struct moe_cuda_gemm_params f = deepseek_v3(bucket);
        assert_int_equal(moe_cuda_choose_tile(&f), MOE_CUDA_TILE_PINGPONG);
    }
}

/* The table of experts of a full tile has room for fewer than a layer may have. */
static void a_tile_can_have_all_experts_of_the_layer(void **state)
{
    (void)state;
    for (uint32_t experts = MOE_CUDA_PINGPONG_EXPERTS; experts <= MOE_CUDA_MAX_EXPERTS;
         experts += MOE_CUDA_PINGPONG_EXPERTS)
        for (uint32_t bucket = 1; bucket <= 65536; bucket *= 2) {
            struct moe_cuda_gemm_params f = deepseek_v3(bucket);
            f.experts = experts;
            enum moe_cuda_gemm_tile tile = moe_cuda_choose_tile(&f);
            assert_true(experts <= moe_cuda_tile_shape(tile).experts);
        }
}

/* The tables of dispatch, by slots and experts of one. */
static void layers_without_room_for_their_tables_are_found(void **state)
{
    (void)state;
    assert_true(moe_cuda_tables_fit(1, 1024, 1024));
    assert_true(moe_cuda_tables_fit(8, 1024, 8 * 1024)); /* every expert on every slot */
    assert_true(moe_cuda_tables_fit(16, 512, 16 * 512));
    assert_true(moe_cuda_tables_fit(32, 352, 32 * 352));
    assert_true(moe_cuda_tables_fit(64, 16, 1024));      /* the largest layer, spread evenly */
    assert_true(moe_cuda_tables_fit(64, 176, 64 * 176)); /* and eleven copies of each */
    assert_false(moe_cuda_tables_fit(64, 177, 1024));
    assert_false(moe_cuda_tables_fit(32, 353, 1024));
    assert_false(moe_cuda_tables_fit(16, 1024, 16 * 1024));
    assert_false(moe_cuda_tables_fit(64, 32, MOE_CUDA_MAX_COPIES + 1));
}

/* A bigger bucket never goes back to a form for fewer rows. */
static void choice_is_monotonic_in_the_bucket(void **state)
{
    (void)state;
    for (int i = 0; i < 2000; i++) {
        struct moe_cuda_gemm_params f = {.bucket = 1 + random_bits() % 32768,
                                         .slots = 1 + random_bits() % 16,
                                         .top_k = 1 + random_bits() % 16,
                                         .experts = 1 + random_bits() % MOE_CUDA_MAX_EXPERTS,
                                         .n = 8 * (1 + random_bits() % 4096),
                                         .k = 8 * (1 + random_bits() % 2048),
                                         .processors = random_bits() % 200};
        enum moe_cuda_gemm_tile small = moe_cuda_wide_tile(moe_cuda_choose_tile(&f));
        f.bucket *= 2;
        enum moe_cuda_gemm_tile large = moe_cuda_wide_tile(moe_cuda_choose_tile(&f));
        assert_true(small < MOE_CUDA_TILE_COUNT && large < MOE_CUDA_TILE_COUNT);
        assert_true(large >= small);
    }
}

/* Packed weights have a tile for few rows and one for many. */
static void packed_weights_have_two_tiles(void **state)
{
    (void)state;
    struct moe_cuda_gemm_params f = deepseek_v3(128);
    assert_int_equal(moe_cuda_expected_rows(&f), 16);
    assert_int_equal(moe_cuda_choose_packed_tile(&f), MOE_CUDA_TILE_DECODE);
    f.bucket = 4096;
    assert_int_equal(moe_cuda_choose_packed_tile(&f), MOE_CUDA_TILE_EVEN);
}

static enum moe_cuda_packing packing(enum moe_encoding e, uint32_t rows, uint32_t columns,
                                     enum moe_scale_type scale)
{
    struct moe_weight_format f = {
        .encoding = e, .block_rows = rows, .block_columns = columns, .scale = scale};
    return moe_cuda_packing_of(&f);
}

static void formats_have_the_packing_that_computes_them(void **state)
{
    (void)state;
    enum moe_encoding f8 = MOE_ENC_F8E4M3;
    assert_int_equal(packing(f8, 128, 128, MOE_SCALE_F32), MOE_CUDA_PACKING_F8_BLOCK);
    assert_int_equal(packing(f8, 128, 128, MOE_SCALE_E8M0), MOE_CUDA_PACKING_F8_BLOCK);
    assert_int_equal(packing(f8, 0, 0, MOE_SCALE_BF16), MOE_CUDA_PACKING_F8_BLOCK);
    assert_int_equal(packing(f8, 1, 0, MOE_SCALE_F32), MOE_CUDA_PACKING_F8_ROW);
    assert_int_equal(packing(f8, 1, 32, MOE_SCALE_E8M0), MOE_CUDA_PACKING_F8_E8M0);
    assert_int_equal(packing(f8, 1, 32, MOE_SCALE_F32), MOE_CUDA_PACKING_NONE);
    assert_int_equal(packing(f8, 1, 128, MOE_SCALE_E4M3), MOE_CUDA_PACKING_NONE);
    assert_int_equal(packing(MOE_ENC_E2M1, 1, 32, MOE_SCALE_E8M0), MOE_CUDA_PACKING_E2M1_E8M0);
    assert_int_equal(packing(MOE_ENC_E2M1, 1, 16, MOE_SCALE_E4M3), MOE_CUDA_PACKING_E2M1_E4M3);
    assert_int_equal(packing(MOE_ENC_E2M1, 1, 16, MOE_SCALE_E8M0), MOE_CUDA_PACKING_NONE);
    assert_int_equal(packing(MOE_ENC_E2M1, 1, 32, MOE_SCALE_BF16), MOE_CUDA_PACKING_NONE);
    enum moe_encoding int4 = MOE_ENC_INT4;
    assert_int_equal(packing(int4, 1, 32, MOE_SCALE_BF16), MOE_CUDA_PACKING_INT4_GROUP);
    assert_int_equal(packing(int4, 1, 64, MOE_SCALE_BF16), MOE_CUDA_PACKING_INT4_GROUP);
    assert_int_equal(packing(int4, 1, 16, MOE_SCALE_BF16), MOE_CUDA_PACKING_NONE);
    assert_int_equal(packing(int4, 1, 32, MOE_SCALE_F16), MOE_CUDA_PACKING_NONE);
    assert_int_equal(packing(int4, 1, 128, MOE_SCALE_BF16), MOE_CUDA_PACKING_INT4_ROW);
    assert_int_equal(packing(int4, 1, 128, MOE_SCALE_F16), MOE_CUDA_PACKING_INT4_ROW);
    assert_int_equal(packing(int4, 1, 0, MOE_SCALE_F32), MOE_CUDA_PACKING_INT4_ROW);
    assert_int_equal(packing(int4, 1, 128, MOE_SCALE_E4M3), MOE_CUDA_PACKING_NONE);
    struct moe_weight_format zeros = {int4, 1, 32, MOE_SCALE_BF16, .zero_points = true};
    assert_int_equal(moe_cuda_packing_of(&zeros), MOE_CUDA_PACKING_INT4_GROUP_ZEROS);
    zeros.block_columns = 128;
    assert_int_equal(moe_cuda_packing_of(&zeros), MOE_CUDA_PACKING_INT4_ROW);
    assert_int_equal(packing(MOE_ENC_NONE, 0, 0, MOE_SCALE_F32), MOE_CUDA_PACKING_NONE);
    struct moe_weight_format w8a8 = {MOE_ENC_F8E4M3,    128, 128, MOE_SCALE_F32, false, false,
                                     MOE_ACTIVATIONS_F8};
    assert_int_equal(moe_cuda_packing_of(&w8a8), MOE_CUDA_PACKING_W8A8_BLOCK);
    w8a8.block_rows = 1;
    w8a8.block_columns = 0;
    w8a8.activations = MOE_ACTIVATIONS_F8_POW2;
    assert_int_equal(moe_cuda_packing_of(&w8a8), MOE_CUDA_PACKING_W8A8_ROW);
    w8a8.block_columns = 256; /* no kernel has groups of 256 */
    assert_int_equal(moe_cuda_packing_of(&w8a8), MOE_CUDA_PACKING_NONE);
    w8a8 = (struct moe_weight_format){.encoding = MOE_ENC_E2M1,
                                      .block_rows = 1,
                                      .block_columns = 32,
                                      .scale = MOE_SCALE_E8M0,
                                      .activations = MOE_ACTIVATIONS_F8};
    assert_int_equal(moe_cuda_packing_of(&w8a8), MOE_CUDA_PACKING_NONE);
}

/* Blocks of 128 x 128, each with its scales. */
static void packed_matrices_have_whole_blocks(void **state)
{
    (void)state;
    enum moe_cuda_packing f8 = MOE_CUDA_PACKING_F8_BLOCK, f4 = MOE_CUDA_PACKING_E2M1_E8M0;
    assert_int_equal(moe_cuda_packed_bytes(f8, 128, 128), 16384 + 64);
    assert_int_equal(moe_cuda_packed_bytes(f8, 129, 257), 2 * 3 * (16384 + 64));
    assert_int_equal(moe_cuda_packed_bytes(f4, 4096, 7168), 4096 * 7168 / 32 * 17);
    assert_int_equal(moe_cuda_packed_bytes(f4, 0, 128), 0);
    assert_int_equal(moe_cuda_packed_bytes(MOE_CUDA_PACKING_E2M1_E4M3, 1, 1), 8192 + 1024 + 64);
    assert_int_equal(moe_cuda_packed_bytes(MOE_CUDA_PACKING_INT4_ROW, 1, 1), 8192 + 512 + 128);
    assert_int_equal(moe_cuda_packed_bytes(MOE_CUDA_PACKING_INT4_GROUP, 1, 1), 8192 + 1024);
    assert_int_equal(moe_cuda_packed_bytes(MOE_CUDA_PACKING_INT4_GROUP_ZEROS, 1, 1),
                     8192 + 1024 + 512);
    for (unsigned p = 1; p < MOE_CUDA_PACKING_COUNT; p++) /* what one bulk copy can load */
        assert_int_equal(moe_cuda_packed_block_bytes((enum moe_cuda_packing)p) % 16, 0);
    assert_int_equal(moe_cuda_packed_bytes(MOE_CUDA_PACKING_W8A8_BLOCK, 129, 128),
                     2 * (16384 + 64));
    assert_int_equal(moe_cuda_packed_bytes(MOE_CUDA_PACKING_W8A8_ROW, 1, 1), 16384 + 512);
}

/* What the kernels are built on: K steps of 128 bytes, and instructions of 64 rows. Those are rows
 * of weights in even tiles. */
static void tiles_have_shapes_that_kernels_can_have(void **state)
{
    (void)state;
    for (int tile = 0; tile < MOE_CUDA_TILE_COUNT; tile++) {
        struct moe_cuda_tile_shape s = moe_cuda_tile_shape((enum moe_cuda_gemm_tile)tile);
        printf("  tile %d: %u x %u x %u, %u stages\n", tile, s.rows, s.columns, s.depth, s.stages);
        assert_int_equal(s.depth, 64);
        bool even = moe_cuda_wide_tile((enum moe_cuda_gemm_tile)tile) == MOE_CUDA_TILE_EVEN;
        assert_int_equal((even ? s.columns : s.rows) % 64, 0);
        assert_int_equal((even ? s.rows : s.columns) % 16, 0);
        assert_true((s.rows + s.columns) * s.depth * 2 * s.stages <= 227 * 1024);
    }
}

int main(void)
{
    const char *replay = getenv("MOE_SEED");
    random_state = replay != NULL ? strtoull(replay, NULL, 10) : (uint64_t)time(NULL);
    printf("MOE_SEED=%" PRIu64 "\n", random_state);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(expected_rows_are_the_even_share_rounded_up),
        cmocka_unit_test(expected_rows_do_not_overflow),
        cmocka_unit_test(expected_hits_are_those_of_random_experts),
        cmocka_unit_test(few_tiles_are_narrow),
        cmocka_unit_test(processors_do_not_change_the_bits),
        cmocka_unit_test(few_rows_stream_weights),
        cmocka_unit_test(hundreds_of_rows_use_even_tiles_unless_k_is_short),
        cmocka_unit_test(thousands_of_rows_use_full_tiles),
        cmocka_unit_test(a_tile_can_have_all_experts_of_the_layer),
        cmocka_unit_test(layers_without_room_for_their_tables_are_found),
        cmocka_unit_test(choice_is_monotonic_in_the_bucket),
        cmocka_unit_test(tiles_have_shapes_that_kernels_can_have),
        cmocka_unit_test(packed_weights_have_two_tiles),
        cmocka_unit_test(formats_have_the_packing_that_computes_them),
        cmocka_unit_test(packed_matrices_have_whole_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
