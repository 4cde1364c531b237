/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of W8A8 on the CPU: rows are rounded to the nearest F8E4M3, products follow
 * moe/weight_format.h and the oracle, and a row's bits do not depend on its company. */
#include "cpu/compute/packed.h"
#include "kernels_fixture.h"
#include "moe/numbers.h"
#include "moe/row_format.h"
#include "support/packed.h"

static const struct moe_cpu_isa *const *isas;
static uint32_t isa_count;

/* ---------------------------------------------------------------------- rounding */

/* By comparison with all values; of two that are as near, the one with an even mantissa. */
static float nearest_e4m3(float v)
{
    int best = 0;
    for (int code = 0; code < 0x7f; code++) {
        double d = fabs((double)moe_e4m3_to_f32((uint8_t)code) - fabs((double)v));
        double least = fabs((double)moe_e4m3_to_f32((uint8_t)best) - fabs((double)v));
        if (d < least || (d == least && code % 2 == 0))
            best = code;
    }
    float q = moe_e4m3_to_f32((uint8_t)best);
    return v < 0 ? -q : q;
}

static void rounding_finds_the_nearest_value_and_ties_go_to_even(void **state)
{
    (void)state;
    for (int code = 0; code < 0x7e; code++) {
        float low = moe_e4m3_to_f32((uint8_t)code), high = moe_e4m3_to_f32((uint8_t)(code + 1));
        float middle = (low + high) / 2; /* exact */
        const float tries[] = {low, middle, nextafterf(middle, 0), nextafterf(middle, 500)};
        for (size_t i = 0; i < 4; i++) {
            assert_true(moe_round_to_e4m3(tries[i]) == nearest_e4m3(tries[i]));
            assert_true(moe_round_to_e4m3(-tries[i]) == -nearest_e4m3(tries[i]));
        }
    }
    for (uint32_t i = 0; i < 20000; i++) {
        float v = ldexpf((float)(int32_t)random_bits() * 0x1p-31f, (int)random_below(20) - 10);
        assert_true(moe_round_to_e4m3(v) == nearest_e4m3(v));
    }
    assert_true(moe_round_to_e4m3(448.0001f) == 448 && moe_round_to_e4m3(-1e30f) == -448);
    assert_true(moe_round_to_e4m3(1e-30f) == 0 && isnan(moe_round_to_e4m3(NAN)));
}

static void scales_are_those_of_the_definition(void **state)
{
    (void)state;
    assert_true(moe_e4m3_scale(448, false) == 1 && moe_e4m3_scale(448, true) == 1);
    assert_true(moe_e4m3_scale(449, true) == 2 && moe_e4m3_scale(224, true) == 0.5f);
    assert_true(moe_e4m3_scale(0, false) == 1e-10f / 448 && moe_e4m3_scale(1, false) == 1.0f / 448);
    assert_true(isinf(moe_e4m3_scale(INFINITY, true)));
    for (uint32_t i = 0; i < 1000; i++) {
        float largest =
            ldexpf(1 + (float)random_below(1 << 20) * 0x1p-20f, (int)random_below(99) - 50);
        float s = moe_e4m3_scale(largest, false), p = moe_e4m3_scale(largest, true);
        int exponent;
        assert_true(p >= s && p < 2 * s && frexpf(p, &exponent) == 0.5f);
    }
}

static void quantised_rows_have_a_scale_for_each_group(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 30 * isa_count; c++) {
        const struct moe_cpu_isa *isa = isas[c % isa_count];
        uint32_t n = random_between(1, 300), group = random_between(1, 140),
                 groups = (n - 1) / group + 1;
        bool pow2 = one_in(2);
        float *x = random_tensor(MOE_DTYPE_F32, n, 30), *got = malloc(n * sizeof *got);
        float *scale = malloc(groups * sizeof *scale);
        assert_true(got != NULL && scale != NULL);
        memcpy(got, x, n * sizeof *got);
        isa->quantise(pow2, group, n, got, scale);
        for (uint32_t g = 0; g < groups; g++) {
            float largest = 0;
            for (uint32_t i = g * group; i < n && i < (g + 1) * group; i++)
                largest = fmaxf(largest, fabsf(x[i]));
            assert_true(scale[g] == moe_e4m3_scale(largest, pow2));
            for (uint32_t i = g * group; i < n && i < (g + 1) * group; i++)
                if (got[i] != nearest_e4m3(x[i] / scale[g]))
                    fail_msg("%s: %g / %g is %g, not %g", isa->name, (double)x[i], (double)scale[g],
                             (double)got[i], (double)nearest_e4m3(x[i] / scale[g]));
        }
        free(x);
        free(got);
        free(scale);
    }
}

static void a_byte_holds_each_value_of_e4m3(void **state)
{
    (void)state;
    uint8_t bytes[256], back[256];
    float values[256];
    for (uint32_t i = 0; i < 256; i++)
        bytes[i] = (uint8_t)i;
    for (uint32_t c = 0; c < isa_count; c++) {
        isas[c]->widen_bytes(256, bytes, values);
        for (uint32_t i = 0; i < 256; i++) {
            bool is_nan = (i & 0x7f) == 0x7f;
            back[i] = moe_e4m3_byte(values[i]);
            assert_true(is_nan ? isnan(values[i]) && (back[i] & 0x7f) == 0x7f : back[i] == i);
        }
    }
}

/* From F32 and from BF16, also in groups that need several tiles. */
static void rows_in_bytes_have_the_values_and_scales_of_quantised_rows(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 40 * isa_count; c++) {
        const struct moe_cpu_isa *isa = isas[c % isa_count];
        uint32_t n = random_between(1, c < 8 * isa_count ? 2000 : 300);
        uint32_t group = random_between(1, one_in(2) ? n : 140), groups = (n - 1) / group + 1;
        enum moe_dtype dtype = one_in(2) ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
        bool pow2 = one_in(2);
        void *x = random_tensor(dtype, n, 30);
        if (one_in(4)) {
            uint32_t at = random_below(n);
            float bad = one_in(2) ? NAN : -INFINITY;
            if (dtype == MOE_DTYPE_F32)
                ((float *)x)[at] = bad;
            else
                ((uint16_t *)x)[at] = moe_f32_to_bf16(bad);
        }
        float *want = malloc(n * sizeof *want), *got = malloc(n * sizeof *got);
        float *scale = malloc(2 * groups * sizeof *scale);
        uint8_t *bytes = malloc(n);
        assert_true(want != NULL && got != NULL && scale != NULL && bytes != NULL);
        isa->widen(dtype, n, x, 1.0f, want);
        isa->quantise(pow2, group, n, want, scale);
        isa->quantise_bytes(dtype, pow2, group, n, x, bytes, scale + groups);
        isa->widen_bytes(n, bytes, got);
        assert_memory_equal(scale, scale + groups, groups * sizeof *scale);
        for (uint32_t i = 0; i < n; i++)
            if (isnan(want[i]) ? !isnan(got[i]) : got[i] != want[i])
                fail_msg("%s, value %u of %u in groups of %u: %g, not %g", isa->name, i, n, group,
                         (double)got[i], (double)want[i]);
        free(x);
        free(want);
        free(got);
        free(scale);
        free(bytes);
    }
}

/* ---------------------------------------------------------------------- products */

/* A quantised matrix and quantised rows. */
struct product {
    struct moe_device *device;
    const struct moe_cpu_isa *isa;
    struct moe_weight_format format;
    struct random_packed source;
    struct moe_cpu_matrix matrix;
    struct moe_cpu_rows x;
    float *q, *scale;
    uint32_t rows, out, in;
};

static struct product random_product(uint32_t number)
{
    struct rng r = {random_bits()};
    struct product p = {.isa = isas[number % isa_count]};
    p.device = open_device(p.isa, 1);
    p.format = random_format(&r, MOE_ENC_F8E4M3);
    p.format.activations = MOE_ACTIVATIONS_F8;
    p.rows = MOE_CPU_W8A8_ROWS;
    p.out = random_between(1, 90);
    p.in = random_between(1, 400);
    p.source = random_packed(&r, &p.format, p.out, p.in, 1);
    if (one_in(4)) /* kept in F32 */
        ((uint8_t *)p.source.elements)[random_below(p.out * p.in)] = 0x7f;
    assert_true(moe_cpu_computes(NULL, &p.format));
    assert_ok(moe_cpu_matrix_pack_quantised(p.device, p.out, p.in, &p.format, &p.source.matrix,
                                            &p.matrix));
    uint32_t group = moe_activation_group(&p.format, p.in), groups = (p.in - 1) / group + 1;
    p.q = random_tensor(MOE_DTYPE_F32, (size_t)p.rows * p.in, 1);
    p.scale = malloc((size_t)p.rows * groups * sizeof *p.scale);
    assert_non_null(p.scale);
    for (uint32_t row = 0; row < p.rows; row++)
        p.isa->quantise(one_in(2), group, p.in, p.q + (size_t)row * p.in, p.scale + row * groups);
    p.x = (struct moe_cpu_rows){p.q, p.in, p.scale, group, groups};
    return p;
}

static void free_product(struct product *p)
{
    moe_cpu_matrix_free(p->device, &p->matrix);
    moe_cpu_device_close(p->device);
    free_packed(&p->source);
    free(p->q);
    free(p->scale);
}

/* The definition in double precision; *size: the sum of absolute values. */
static double element_of_product(const struct product *p, const struct moe_packed_sizes *sizes,
                                 uint32_t row, uint32_t c, double *size)
{
    double y = 0;
    *size = 0;
    for (uint32_t k = 0; k < p->in; k++) {
        double x = (double)p->q[(size_t)row * p->in + k] *
                   (double)p->scale[row * p->x.groups + k / p->x.group];
        double term = x * (double)moe_packed_value(&p->format, sizes, &p->source.matrix, c, k);
        y += term;
        *size += fabs(term);
    }
    return y;
}

static void check_panel(const struct product *p, const struct moe_packed_sizes *sizes,
                        uint32_t panel, const float *y)
{
    uint32_t width = p->isa->panel, first = panel * width;
    for (uint32_t row = 0; row < p->rows; row += 1 + random_below(20))
        for (uint32_t c = first; c < p->out && c < first + width; c++) {
            double size, want = element_of_product(p, sizes, row, c, &size);
            float got = y[row * width + c - first];
            if (isnan(want) ? !isnan(got) : !(fabs((double)got - want) <= 1e-6 * size))
                fail_msg("%s, %s, %u x %u: row %u, output %u is %g, not %g", p->isa->name,
                         format_text(&p->format), p->out, p->in, row, c, (double)got, want);
        }
}

static void products_follow_the_definition_with_the_same_bits_for_any_rows(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 60 * isa_count; c++) {
        struct product p = random_product(c);
        struct moe_packed_sizes sizes;
        uint32_t width = p.isa->panel, panel = random_below(p.matrix.panels);
        float all[MOE_CPU_W8A8_ROWS * MOE_CPU_MAX_PANEL], some[sizeof all / sizeof *all],
            other[sizeof all / sizeof *all];
        assert_true(moe_packed_sizes(&p.format, p.out, p.in, &sizes));
        const struct moe_cpu_part part = {&p.matrix, panel, all};
        moe_cpu_matrix_parts(p.isa, 1, &part, p.rows, &p.x, width);
        check_panel(&p, &sizes, panel, all);
        for (uint32_t rows = 1; rows < 9; rows++) {
            struct moe_cpu_rows x = p.x;
            uint32_t first = random_below(p.rows - rows);
            x.x += (size_t)first * p.in;
            x.scale += first * x.groups;
            /* The panel alone, and with another one. */
            const struct moe_cpu_part two[2] = {{&p.matrix, random_below(p.matrix.panels), other},
                                                {&p.matrix, panel, some}};
            uint32_t alone = random_below(2);
            moe_cpu_matrix_parts(p.isa, 2 - alone, two + alone, rows, &x, width);
            assert_memory_equal(some, all + first * width, rows * width * sizeof *some);
        }
        free_product(&p);
    }
}

/* ------------------------------------------------------------------------ layers */

static struct moe_weight_format random_w8a8(void)
{
    struct rng r = {random_bits()};
    struct moe_weight_format f = random_format(&r, MOE_ENC_F8E4M3);
    f.activations = one_in(2) ? MOE_ACTIVATIONS_F8 : MOE_ACTIVATIONS_F8_POW2;
    return f;
}

static struct moe_layer_spec random_spec(void)
{
    struct moe_layer_spec spec = plain_spec();
    spec.hidden = random_between(1, 300);
    spec.intermediate = random_between(1, 200);
    spec.weighting = random_below(3);
    spec.activation = random_below(MOE_ACT_COUNT);
    spec.gate_up_bias = one_in(2);
    spec.down_bias = one_in(2);
    spec.shared_intermediate = random_between(1, 200);
    spec.shared_gated = one_in(2);
    spec.swiglu_limit = 7;
    spec.routed_format = random_w8a8();
    spec.shared_format = random_w8a8();
    return spec;
}

/* Rows of the one expert, and the outputs of its products and of the shared expert. */
struct batch {
    uint32_t tokens;
    void *x;
    float *weight, *hidden, *out, *y;
};

static struct batch random_batch(const struct moe_layer_spec *spec, enum moe_dtype dtype,
                                 uint32_t n)
{
    size_t h = spec->hidden;
    struct batch b = {.tokens = n, .x = random_tensor(dtype, n * h, 1)};
    b.weight = random_tensor(MOE_DTYPE_F32, n, 1);
    b.hidden = calloc(n * (size_t)spec->intermediate, sizeof *b.hidden);
    b.out = calloc(n * h, sizeof *b.out);
    b.y = calloc(n * h, sizeof *b.y);
    assert_true(b.hidden != NULL && b.out != NULL && b.y != NULL);
    return b;
}

static void free_batch(struct batch *b)
{
    free(b->x);
    free(b->weight);
    free(b->hidden);
    free(b->out);
    free(b->y);
}

/* The products of n rows of the one expert, which are quantised or not. */
static void run_products(struct moe_layer *layer, enum moe_dtype dtype, void *x, bool quantised,
                         const float *weight, uint32_t n, const struct batch *b)
{
    static const uint32_t expert = 0;
    const uint32_t start[2] = {0, (n + MOE_ROW_ALIGN - 1) / MOE_ROW_ALIGN * MOE_ROW_ALIGN};
    const struct moe_rows rows = {.local_experts = 1,
                                  .expert = &expert,
                                  .start = start,
                                  .count = &n,
                                  .x = x,
                                  .quantised = quantised,
                                  .weight = weight};
    assert_ok(moe_cpu_gemm_gate_up(layer, dtype, &rows, b->hidden));
    assert_ok(moe_cpu_gemm_down(layer, dtype, &rows, b->hidden, b->out));
}

/* Tokens first .. first + n - 1 of `all`, to the start of `b`. */
static void run(struct moe_layer *layer, enum moe_dtype dtype, const struct batch *all,
                uint32_t first, uint32_t n, const struct batch *b)
{
    size_t h = layer->spec.hidden;
    void *x = (char *)all->x + first * h * moe_dtype_bytes(dtype);
    memset(b->y, 0, n * h * sizeof *b->y);
    run_products(layer, dtype, x, false, all->weight + first, n, b);
    assert_ok(moe_cpu_shared_forward(layer, dtype, n, x, b->y));
}

static void expect_token(const struct moe_layer_spec *spec, const struct moe_oracle_layer *oracle,
                         const double *x, double weight, double *out, double *y)
{
    double row[300];
    bool input = spec->weighting == MOE_WEIGHT_INPUT;
    for (uint32_t h = 0; h < spec->hidden; h++)
        row[h] = input ? weight * x[h] : x[h];
    assert_ok(moe_oracle_expert(oracle, 0, row, out));
    for (uint32_t h = 0; !input && h < spec->hidden; h++)
        out[h] *= weight;
    assert_ok(moe_oracle_shared(oracle, x, y));
}

static void layers_agree_with_the_oracle_that_quantises_alike(void **state)
{
    (void)state;
    double worst = 0, middle = 0;
    uint32_t outside = 0;
    const uint32_t cases = 40 * isa_count;
    for (uint32_t c = 0; c < cases; c++) {
        struct moe_device *device = open_device(isas[c % isa_count], random_between(1, 3));
        struct moe_layer_spec spec = random_spec();
        enum moe_dtype dtype = one_in(2) ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
        struct moe_oracle_layer *oracle;
        struct moe_layer *layer = random_layer(device, &spec, MOE_DTYPE_NONE, true, &oracle);
        struct batch b = random_batch(&spec, dtype, random_between(1, 80));
        size_t h = spec.hidden, n = b.tokens * h;
        double x[300], *out = calloc(2 * n, sizeof *out), *y = out + n;
        assert_non_null(out);
        run(layer, dtype, &b, 0, b.tokens, &b);
        for (uint32_t t = 0; t < b.tokens; t++) {
            for (size_t i = 0; i < h; i++)
                x[i] = element_of(dtype, b.x, t * h + i);
            expect_token(&spec, oracle, x, (double)b.weight[t], out + t * h, y + t * h);
        }
        double error = fmax(relative_error(n, b.out, out), relative_error(n, b.y, y));
        worst = fmax(worst, error);
        middle += error / cases;
        outside += !(error <= 1e-2);
        if (!(error <= 3e-2))
            fail_msg("case %u: %s, %s: error %g", c, isas[c % isa_count]->name,
                     format_text(&spec.routed_format), error);
        free(out);
        free_batch(&b);
        moe_oracle_destroy(oracle);
        moe_cpu_layer_destroy(layer);
        moe_cpu_device_close(device);
    }
    print_message("  worst error %.2g, mean %.2g\n", worst, middle);
    /* A largest value next to a power of two has another scale in double precision. */
    assert_true(outside <= cases / 40);
}

/* The same bits alone, in 64 and in 4,096. */
static void a_token_has_the_same_bits_in_any_batch(void **state)
{
    (void)state;
    enum { MOST = 4096 };
    for (uint32_t c = 0; c < isa_count; c++) {
        struct moe_device *device = open_device(isas[c], 2);
        struct moe_layer_spec spec = random_spec();
        spec.hidden = random_between(129, 200);
        spec.intermediate = random_between(40, 60);
        spec.shared_intermediate = random_between(40, 60);
        enum moe_dtype dtype = one_in(2) ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
        struct moe_layer *layer = random_layer(device, &spec, MOE_DTYPE_NONE, true, NULL);
        struct batch all = random_batch(&spec, dtype, MOST), some = random_batch(&spec, dtype, 64);
        size_t h = spec.hidden;
        run(layer, dtype, &all, 0, MOST, &all);
        for (uint32_t i = 0; i < 20; i++) {
            uint32_t n = i % 2 == 0 ? 1 : 64, first = random_below(MOST - 64);
            run(layer, dtype, &all, first, n, &some);
            assert_memory_equal(some.out, all.out + first * h, n * h * sizeof *some.out);
            assert_memory_equal(some.y, all.y + first * h, n * h * sizeof *some.y);
        }
        free_batch(&all);
        free_batch(&some);
        moe_cpu_layer_destroy(layer);
        moe_cpu_device_close(device);
    }
}

/* Rows that come quantised, as moe_cpu_quantise_rows makes them, give the bits of plain rows. */
static void quantised_rows_give_the_bits_of_plain_ones(void **state)
{
    (void)state;
    uint32_t quantised = 0;
    for (uint32_t c = 0; c < 20 * isa_count; c++) {
        struct moe_device *device = open_device(isas[c % isa_count], random_between(1, 3));
        struct moe_layer_spec spec = random_spec();
        enum moe_dtype dtype = one_in(2) ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
        struct moe_layer *layer = random_layer(device, &spec, MOE_DTYPE_NONE, true, NULL);
        uint32_t n = random_between(1, 100);
        struct batch plain = random_batch(&spec, dtype, n), b = random_batch(&spec, dtype, n);
        const struct moe_row_format format = moe_row_format(&spec, dtype);
        size_t row_bytes;
        void *rows;
        run(layer, dtype, &plain, 0, n, &plain);
        assert_ok(moe_cpu_quantise_rows(layer, dtype, n, plain.x, &rows, &row_bytes));
        assert_int_equal(row_bytes, format.quantised ? format.bytes : 0);
        assert_true(format.quantised || format.bytes == spec.hidden * moe_dtype_bytes(dtype));
        if (format.quantised) {
            assert_true(format.bytes <= spec.hidden * moe_dtype_bytes(dtype));
            run_products(layer, dtype, rows, true, plain.weight, n, &b);
            assert_memory_equal(b.hidden, plain.hidden, n * spec.intermediate * sizeof *b.hidden);
            assert_memory_equal(b.out, plain.out, (size_t)n * spec.hidden * sizeof *b.out);
            quantised++;
        }
        moe_cpu_scratch_give(device, rows);
        free_batch(&plain);
        free_batch(&b);
        moe_cpu_layer_destroy(layer);
        moe_cpu_device_close(device);
    }
    assert_true(quantised >= isa_count);
}

/* Not finite: the row is NaN, and other rows keep their bits. */
static void a_row_that_is_not_finite_stays_alone(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 4 * isa_count; c++) {
        struct moe_device *device = open_device(isas[c % isa_count], 1);
        struct moe_layer_spec spec = random_spec();
        spec.weighting = MOE_WEIGHT_OUTPUT_LATE;
        struct moe_layer *layer = random_layer(device, &spec, MOE_DTYPE_NONE, true, NULL);
        struct batch clean = random_batch(&spec, MOE_DTYPE_F32, 9);
        size_t h = spec.hidden;
        float *before = malloc(9 * h * sizeof *before);
        assert_non_null(before);
        run(layer, MOE_DTYPE_F32, &clean, 0, 9, &clean);
        memcpy(before, clean.out, 9 * h * sizeof *before);
        ((float *)clean.x)[3 * h + random_below((uint32_t)h)] = one_in(2) ? NAN : -INFINITY;
        run(layer, MOE_DTYPE_F32, &clean, 0, 9, &clean);
        for (size_t row = 0; row < 9; row++)
            for (size_t i = 0; i < h; i++)
                assert_true(row == 3 ? isnan(clean.out[row * h + i])
                                     : clean.out[row * h + i] == before[row * h + i]);
        free(before);
        free_batch(&clean);
        moe_cpu_layer_destroy(layer);
        moe_cpu_device_close(device);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rounding_finds_the_nearest_value_and_ties_go_to_even),
        cmocka_unit_test(scales_are_those_of_the_definition),
        cmocka_unit_test(quantised_rows_have_a_scale_for_each_group),
        cmocka_unit_test(a_byte_holds_each_value_of_e4m3),
        cmocka_unit_test(rows_in_bytes_have_the_values_and_scales_of_quantised_rows),
        cmocka_unit_test(products_follow_the_definition_with_the_same_bits_for_any_rows),
        cmocka_unit_test(layers_agree_with_the_oracle_that_quantises_alike),
        cmocka_unit_test(a_token_has_the_same_bits_in_any_batch),
        cmocka_unit_test(quantised_rows_give_the_bits_of_plain_ones),
        cmocka_unit_test(a_row_that_is_not_finite_stays_alone),
    };
    seed_random();
    isas = moe_cpu_isa_list(&isa_count);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
