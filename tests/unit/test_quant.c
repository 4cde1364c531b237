/* SPDX-License-Identifier: Apache-2.0 */
/* The room of quantised formats by itself: numbers, shapes, values and lists of modules, against
 * values by hand. Whole checkpoints are in test_quantised.c. */
#include "moe/numbers.h"
#include "quant/decode.h"
#include "quant/modules.h"
#include "support/check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- numbers ---- */

static void every_e4m3_is_its_definition(void **state)
{
    (void)state;
    for (unsigned b = 0; b < 256; b++) {
        unsigned exponent = b >> 3 & 15, mantissa = b & 7;
        float size = exponent == 0 ? ldexpf((float)mantissa, -9)
                                   : ldexpf((float)(8 + mantissa), (int)exponent - 10);
        float got = moe_e4m3_to_f32((uint8_t)b);
        if ((b & 0x7f) == 0x7f)
            assert_true(isnan(got));
        else
            assert_true(got == (b & 0x80 ? -size : size) && !signbit(got) == !(b & 0x80));
    }
    assert_true(moe_e4m3_to_f32(0x7e) == 448);
}

static void every_e8m0_is_a_power_of_two(void **state)
{
    (void)state;
    for (int b = 0; b < 255; b++)
        assert_true(moe_e8m0_to_f32((uint8_t)b) == ldexpf(1, b - 127));
    assert_true(isnan(moe_e8m0_to_f32(255)));
}

static void every_e2m1_is_in_the_table(void **state)
{
    (void)state;
    static const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (unsigned b = 0; b < 16; b++) {
        assert_true(fabsf(moe_e2m1_to_f32((uint8_t)b)) == sizes[b & 7]);
        assert_true(!signbit(moe_e2m1_to_f32((uint8_t)b)) == (b < 8));
    }
}

static void halves_are_exact(void **state)
{
    (void)state;
    assert_true(moe_f16_to_f32(0x3c00) == 1);
    assert_true(moe_f16_to_f32(0xfbff) == -65504);
    assert_true(moe_f16_to_f32(0x0001) == ldexpf(1, -24));
    assert_true(moe_f16_to_f32(0x03ff) == ldexpf(1023, -24));
    assert_true(isinf(moe_f16_to_f32(0x7c00)) && isnan(moe_f16_to_f32(0x7e00)));
}

/* ---- shapes ---- */

static struct moe_quant quant(enum moe_quant_scheme_id id, uint32_t rows, uint32_t columns)
{
    const struct moe_quant_scheme *s = moe_quant_scheme(id);
    return (struct moe_quant){
        .scheme = s,
        .format = {.encoding = s->encoding, .block_rows = rows, .block_columns = columns}};
}

static void check_shape(const struct moe_quant *q, enum moe_quant_part part, uint32_t bits,
                        uint64_t first, uint64_t second)
{
    uint64_t dims[2];
    uint32_t rank;
    assert_ok(moe_quant_part_shape(q, part, 200, 320, bits, dims, &rank));
    assert_int_equal(dims[0], first);
    if (rank == 2)
        assert_int_equal(dims[1], second);
}

static void shapes_follow_from_the_matrix(void **state)
{
    (void)state;
    struct moe_quant blocks = quant(MOE_QUANT_FP8_BLOCK, 128, 128);
    check_shape(&blocks, MOE_QUANT_DATA, 8, 200, 320);
    check_shape(&blocks, MOE_QUANT_SCALE, 32, 2, 3); /* the last ones are smaller */
    struct moe_quant whole = quant(MOE_QUANT_FP8_SCALE, 0, 0);
    check_shape(&whole, MOE_QUANT_SCALE, 32, 1, 1);
    struct moe_quant int4 = quant(MOE_QUANT_INT4_PACKED, 1, 32);
    check_shape(&int4, MOE_QUANT_DATA, 32, 200, 40);
    check_shape(&int4, MOE_QUANT_SCALE, 16, 200, 10);
    check_shape(&int4, MOE_QUANT_ZERO, 32, 25, 10);
    struct moe_quant gptq = quant(MOE_QUANT_GPTQ, 1, 32);
    check_shape(&gptq, MOE_QUANT_DATA, 32, 40, 200);
    check_shape(&gptq, MOE_QUANT_SCALE, 16, 10, 200);
    check_shape(&gptq, MOE_QUANT_ZERO, 32, 10, 25);
    check_shape(&gptq, MOE_QUANT_GROUPS, 32, 320, 0);
    struct moe_quant awq = quant(MOE_QUANT_AWQ, 1, 64);
    check_shape(&awq, MOE_QUANT_DATA, 32, 320, 25);
    check_shape(&awq, MOE_QUANT_ZERO, 32, 5, 25);
    struct moe_quant fp4 = quant(MOE_QUANT_MXFP4_PACKED, 1, 32);
    check_shape(&fp4, MOE_QUANT_DATA, 8, 200, 160);
}

static void a_matrix_that_cannot_be_packed_is_refused(void **state)
{
    (void)state;
    static const struct {
        enum moe_quant_scheme_id id;
        uint64_t rows, columns;
    } cases[] = {{MOE_QUANT_MXFP4_PACKED, 8, 48}, /* half a group */
                 {MOE_QUANT_INT4_PACKED, 8, 36},
                 {MOE_QUANT_GPTQ, 12, 32},
                 {MOE_QUANT_AWQ, 12, 32}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint64_t dims[2];
        uint32_t rank;
        struct moe_quant q = quant(cases[i].id, 1, 32);
        struct moe_status st = moe_quant_part_shape(&q, MOE_QUANT_DATA, cases[i].rows,
                                                    cases[i].columns, 8, dims, &rank);
        assert_true(moe_failed(&st) && st.reason == MOE_REASON_TENSOR_INVALID);
    }
}

/* ---- values ---- */

static void blocks_at_the_edge_have_their_scales(void **state)
{
    (void)state;
    uint8_t data[3 * 5];
    const float scales[4] = {1, 2, 4, 8};
    float to[3 * 5];
    memset(data, 0x38, sizeof data); /* 1 */
    data[7] = 0xb8;
    struct moe_quant q = quant(MOE_QUANT_FP8_BLOCK, 2, 4);
    struct moe_quant_matrix m = {.quant = &q,
                                 .scale = MOE_SCALE_F32,
                                 .rows = 3,
                                 .columns = 5,
                                 .row_step = 1,
                                 .part = {[MOE_QUANT_DATA] = data, [MOE_QUANT_SCALE] = scales}};
    moe_quant_decode(&m, 0, 3, to);
    const float want[15] = {1, 1, 1, 1, 2, 1, 1, -1, 1, 2, 4, 4, 4, 4, 8};
    for (int i = 0; i < 15; i++)
        assert_true(to[i] == want[i]);
    moe_quant_decode(&m, 2, 1, to);
    assert_true(to[0] == 4 && to[4] == 8);
}

static void rows_of_gate_and_up_alternate(void **state)
{
    (void)state;
    const uint8_t data[4] = {0x21, 0x43, 0x65, 0x87}; /* rows of two elements, low first */
    const uint8_t scales[4] = {127, 128, 129, 130};
    float to[4];
    struct moe_quant q = quant(MOE_QUANT_MXFP4_GPT_OSS, 1, 2);
    struct moe_quant_matrix m = {.quant = &q,
                                 .scale = MOE_SCALE_E8M0,
                                 .rows = 2,
                                 .columns = 2,
                                 .first_row = 1,
                                 .row_step = 2,
                                 .part = {[MOE_QUANT_DATA] = data, [MOE_QUANT_SCALE] = scales}};
    moe_quant_decode(&m, 0, 2, to); /* rows 1 and 3: codes 3 4, 7 8 */
    assert_true(to[0] == 3 && to[1] == 4 && to[2] == 48 && to[3] == 0 && signbit(to[3]));
}

static void rows_of_up_are_columns_of_llama4(void **state)
{
    (void)state;
    /* [2, 4] in the file: each line has column k of rows 0 and 1 of gate, and of up. */
    const uint8_t data[8] = {0x30, 0x30, 0x38, 0xb8, 0x30, 0x30, 0x40, 0xc0};
    const float scales[4] = {100, 100, 1, 4};
    float to[4], row[2];
    uint8_t elements[4], packed_scales[8];
    struct moe_quant q = quant(MOE_QUANT_FP8_LLAMA4, 1, 0);
    struct moe_quant_matrix m = {.quant = &q,
                                 .scale = MOE_SCALE_F32,
                                 .rows = 2,
                                 .columns = 2,
                                 .first_row = 2,
                                 .row_step = 1,
                                 .stored_rows = 4,
                                 .part = {[MOE_QUANT_DATA] = data, [MOE_QUANT_SCALE] = scales}};
    moe_quant_decode(&m, 0, 2, to);
    assert_true(to[0] == 1 && to[1] == 2 && to[2] == -4 && to[3] == -8);
    moe_quant_decode(&m, 1, 1, row);
    assert_memory_equal(row, to + 2, sizeof row);

    struct moe_weight_format f = moe_quant_packed_format(&q, MOE_SCALE_F32, false);
    struct moe_packed_sizes sizes;
    struct moe_packed_matrix packed;
    const struct moe_quant_arrays arrays = {.elements = elements, .scales = packed_scales};
    assert_false(moe_quant_is_packed(&m, &f, &packed));
    assert_true(moe_packed_sizes(&f, 2, 2, &sizes));
    moe_quant_pack(&m, &f, &sizes, 1, 1, &arrays);
    moe_quant_pack(&m, &f, &sizes, 0, 1, &arrays);
    assert_memory_equal(elements, ((const uint8_t[]){0x38, 0x40, 0xb8, 0xc0}), 4);
    assert_memory_equal(packed_scales, scales + 2, sizeof packed_scales);

    float spoilt[4] = {NAN, 1, 1, 1};
    enum moe_quant_part part;
    m.part[MOE_QUANT_SCALE] = spoilt;
    assert_ok(moe_quant_check(&m, &part)); /* that of another matrix */
    spoilt[3] = 0;
    struct moe_status st = moe_quant_check(&m, &part);
    assert_true(moe_failed(&st) && part == MOE_QUANT_SCALE);
}

static void awq_and_gptq_are_transposed(void **state)
{
    (void)state;
    /* Element (n, 0) is n: AWQ has 0 2 4 6 1 3 5 7 from the lowest bits up. */
    const uint32_t awq_data[8] = {0x75316420}, gptq_data[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const uint32_t awq_zeros = 0x75316420, gptq_zeros = 0x77777777;
    const uint16_t scales[8] = {0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x4000};
    float to[64];
    struct moe_quant awq = quant(MOE_QUANT_AWQ, 1, 8), gptq = quant(MOE_QUANT_GPTQ, 1, 8);
    struct moe_quant_matrix m = {.quant = &awq,
                                 .scale = MOE_SCALE_F16,
                                 .rows = 8,
                                 .columns = 8,
                                 .row_step = 1,
                                 .part = {[MOE_QUANT_DATA] = awq_data,
                                          [MOE_QUANT_SCALE] = scales,
                                          [MOE_QUANT_ZERO] = &awq_zeros}};
    awq.format.zero_points = gptq.format.zero_points = true;
    moe_quant_decode(&m, 0, 8, to);
    for (int n = 0; n < 8; n++) {
        assert_true(to[8 * n] == 0);
        assert_true(to[8 * n + 1] == (float)(n == 7 ? -2 * n : -n));
    }
    gptq.zero_offset = 1;
    m.quant = &gptq;
    m.part[MOE_QUANT_DATA] = gptq_data;
    m.part[MOE_QUANT_ZERO] = &gptq_zeros;
    moe_quant_decode(&m, 0, 8, to);
    for (int n = 0; n < 8; n++) {
        assert_true(to[8 * n] == (float)((n - 8) * (n == 7 ? 2 : 1)));
        assert_true(to[8 * n + 1] == (float)(-8 * (n == 7 ? 2 : 1)));
    }
}

static void a_scale_that_is_none_is_refused(void **state)
{
    (void)state;
    const uint8_t data[4] = {0};
    static const float bad[] = {0, -0.0f, NAN, INFINITY, 1e37f};
    enum moe_quant_part part;
    struct moe_quant q = quant(MOE_QUANT_FP8_SCALE, 1, 0);
    float scales[2] = {1, 1};
    struct moe_quant_matrix m = {.quant = &q,
                                 .scale = MOE_SCALE_F32,
                                 .rows = 2,
                                 .columns = 2,
                                 .row_step = 1,
                                 .part = {[MOE_QUANT_DATA] = data, [MOE_QUANT_SCALE] = scales}};
    assert_ok(moe_quant_check(&m, &part));
    scales[0] = -1; /* GPTQ's relatives have such */
    assert_ok(moe_quant_check(&m, &part));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        scales[1] = bad[i];
        struct moe_status st = moe_quant_check(&m, &part);
        assert_true(moe_failed(&st) && st.reason == MOE_REASON_TENSOR_INVALID);
        assert_int_equal(part, MOE_QUANT_SCALE);
    }
}

/* ---- lists of modules ---- */

static bool match(enum moe_modules_syntax syntax, const char *entry, const char *path)
{
    struct moe_modules *m = NULL;
    assert_ok(moe_modules_create(syntax, &m));
    assert_ok(moe_modules_add(m, "nothing"));
    assert_ok(moe_modules_add(m, entry));
    bool found = moe_modules_match(m, path);
    moe_modules_destroy(m);
    return found;
}

static void lists_match_as_their_producers_mean(void **state)
{
    (void)state;
    static const char gate[] = "model.layers.3.mlp.gate";
    static const char expert[] = "model.layers.3.mlp.experts.17.gate_proj";
    static const char kimi[] = "re:.*mlp\\.(gate|up|gate_up|down)_proj.*";
    static const struct {
        enum moe_modules_syntax syntax;
        const char *entry, *path;
        bool matches;
    } cases[] = {
        {MOE_MODULES_PATHS, "gate", gate, true},
        {MOE_MODULES_PATHS, "gate", expert, false},
        {MOE_MODULES_PATHS, "mlp.gate", gate, true},
        {MOE_MODULES_PATHS, "model.layers.3.mlp.gate", expert, false},
        {MOE_MODULES_PATHS, "model.layers.*.mlp", expert, true},
        {MOE_MODULES_PATHS, "model.layers.3", "model.layers.33.mlp.gate", false},
        {MOE_MODULES_PATHS, "experts.17.gate_proj.x", expert, false},
        {MOE_MODULES_EXACT, gate, gate, true},
        {MOE_MODULES_EXACT, "mlp.gate", gate, false},
        {MOE_MODULES_EXACT, "Linear", expert, true},
        {MOE_MODULES_EXACT, "re:.*gate$", gate, true},
        {MOE_MODULES_EXACT, "re:.*gate$", expert, false},
        {MOE_MODULES_EXACT, "re:mlp", expert, false}, /* as re.match: from the beginning */
        {MOE_MODULES_EXACT, "re:model\\.layers\\.\\d+\\.mlp\\.(?:gate|experts)", expert, true},
        {MOE_MODULES_EXACT, "re:x|model", gate, true},
        {MOE_MODULES_EXACT, "re:[^.]+\\.[a-z_(?]+\\.[0-9]\\.mlp", gate, true},
        {MOE_MODULES_EXACT, kimi, "model.layers.0.mlp.gate_proj", true},
        {MOE_MODULES_EXACT, kimi, expert, false},
        {MOE_MODULES_GLOBS, "*.mlp.gate", gate, true},
        {MOE_MODULES_GLOBS, "*.mlp.gate", expert, false},
        {MOE_MODULES_GLOBS, "model.layers.3.*", expert, true},
        {MOE_MODULES_GLOBS, "gate", gate, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (match(cases[i].syntax, cases[i].entry, cases[i].path) != cases[i].matches)
            fail_msg("%s and %s", cases[i].entry, cases[i].path);
    assert_false(moe_modules_match(NULL, gate));
}

static void other_regular_expressions_are_refused_by_name(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "re:a(?=b)", "re:\\w+",    "re:a*?",         "re:(a)\\1", "re:(",    "re:a{2}", "re:a\\",
        "re:[\\d]+", "re:[^\\d.]", "re:[[:digit:]]", "re:[a",     "re:[]a]", "re:\\<a"};
    struct moe_modules *m = NULL;
    assert_ok(moe_modules_create(MOE_MODULES_EXACT, &m));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct moe_status st = moe_modules_add(m, bad[i]);
        assert_true(moe_failed(&st) && st.reason == MOE_REASON_CONFIG_UNKNOWN_KEY);
        assert_non_null(strstr(st.text, bad[i] + 3));
    }
    moe_modules_destroy(m);
}

/* ---- packed ---- */

/* Scales of several types in one layer become F32; the values stay. */
static void scales_of_several_types_are_packed_as_f32(void **state)
{
    (void)state;
    static const uint8_t elements[2 * 8] = {0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0,
                                            0x0f, 0x1e, 0x2d, 0x3c, 0x4b, 0x5a, 0x69, 0x78};
    static const uint16_t scales[2] = {0x3c80, 0xbd01}; /* BF16 */
    struct moe_quant q = quant(MOE_QUANT_INT4_PACKED, 1, 16);
    const struct moe_quant_matrix m = {
        .quant = &q,
        .scale = MOE_SCALE_BF16,
        .rows = 2,
        .columns = 16,
        .row_step = 1,
        .part = {[MOE_QUANT_DATA] = elements, [MOE_QUANT_SCALE] = scales}};
    struct moe_weight_format same = moe_quant_packed_format(&q, MOE_SCALE_BF16, false);
    struct moe_weight_format f = moe_quant_packed_format(&q, MOE_SCALE_BF16, true);
    struct moe_packed_matrix packed;
    struct moe_packed_sizes sizes;
    assert_int_equal(same.scale, MOE_SCALE_BF16);
    assert_true(moe_quant_is_packed(&m, &same, &packed) && packed.elements == elements);
    assert_int_equal(f.scale, MOE_SCALE_F32);
    assert_false(moe_quant_is_packed(&m, &f, &packed));
    uint8_t to_elements[16];
    float to_scales[2], want[2 * 16];
    assert_true(moe_packed_sizes(&f, 2, 16, &sizes) && sizes.elements == sizeof to_elements &&
                sizes.scales == sizeof to_scales);
    const struct moe_quant_arrays to = {to_elements, (uint8_t *)to_scales, NULL};
    moe_quant_pack(&m, &f, &sizes, 0, 2, &to);
    packed = (struct moe_packed_matrix){.elements = to_elements, .scales = to_scales};
    moe_quant_decode(&m, 0, 2, want);
    for (size_t i = 0; i < 2 * 16; i++)
        assert_true(moe_packed_value(&f, &sizes, &packed, i / 16, i % 16) == want[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scales_of_several_types_are_packed_as_f32),
        cmocka_unit_test(every_e4m3_is_its_definition),
        cmocka_unit_test(every_e8m0_is_a_power_of_two),
        cmocka_unit_test(every_e2m1_is_in_the_table),
        cmocka_unit_test(halves_are_exact),
        cmocka_unit_test(shapes_follow_from_the_matrix),
        cmocka_unit_test(a_matrix_that_cannot_be_packed_is_refused),
        cmocka_unit_test(blocks_at_the_edge_have_their_scales),
        cmocka_unit_test(rows_of_gate_and_up_alternate),
        cmocka_unit_test(rows_of_up_are_columns_of_llama4),
        cmocka_unit_test(awq_and_gptq_are_transposed),
        cmocka_unit_test(a_scale_that_is_none_is_refused),
        cmocka_unit_test(lists_match_as_their_producers_mean),
        cmocka_unit_test(other_regular_expressions_are_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
