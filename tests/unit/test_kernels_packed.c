/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of quantised matrices on the CPU: every format gives the products of its values in F32,
 * but for the order of roundings, and the same bits for any number of rows, on every instruction
 * set. */
#include "cpu/compute/packed.h"
#include "kernels_fixture.h"
#include "support/packed.h"

static const struct moe_cpu_isa *const *isas;
static uint32_t isa_count;

/* A matrix twice: quantised, and its values in F32. */
struct pair {
    struct moe_device *device;
    const struct moe_cpu_isa *isa;
    struct moe_weight_format format;
    struct random_packed source;
    uint32_t out, in;
    float *values;
    struct moe_cpu_matrix packed, plain;
};

static void pack_pair(struct pair *p)
{
    struct moe_packed_sizes sizes;
    assert_true(moe_packed_sizes(&p->format, p->out, p->in, &sizes));
    p->values = malloc((size_t)p->out * p->in * sizeof *p->values);
    assert_non_null(p->values);
    for (size_t r = 0; r < p->out; r++)
        for (size_t c = 0; c < p->in; c++)
            p->values[r * p->in + c] =
                moe_packed_value(&p->format, &sizes, &p->source.matrix, r, c);
    assert_true(moe_cpu_computes(NULL, &p->format));
    assert_ok(moe_cpu_matrix_pack_quantised(p->device, p->out, p->in, &p->format, &p->source.matrix,
                                            &p->packed));
    assert_ok(moe_cpu_matrix_pack(p->device, p->out, p->in, MOE_DTYPE_F32, MOE_DTYPE_F32, p->values,
                                  &p->plain));
}

static struct pair random_pair(uint32_t number)
{
    struct rng r = {random_bits()};
    struct pair p = {.isa = isas[number % isa_count]};
    p.device = open_device(p.isa, random_between(1, 3));
    p.format = random_format(&r, MOE_ENC_F8E4M3 + number / isa_count % 3);
    p.out = random_between(1, 300);
    p.in = random_between(1, one_in(4) ? 900 : 300);
    p.source = random_packed(&r, &p.format, p.out, p.in, 1);
    pack_pair(&p);
    return p;
}

static void free_pair(struct pair *p)
{
    moe_cpu_matrix_free(p->device, &p->packed);
    moe_cpu_matrix_free(p->device, &p->plain);
    moe_cpu_device_close(p->device);
    free_packed(&p->source);
    free(p->values);
}

static void check_bits(const struct pair *p, const char *what, const float *got, const float *want,
                       size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(got + i, want + i, sizeof *got) != 0)
            fail_msg("%s, %u x %u, %s: %s %zu is %a, not %a", p->isa->name, p->out, p->in,
                     format_text(&p->format), what, i, (double)got[i], (double)want[i]);
}

/* The same values in F32 give the same sums, up to single roundings of what is summed. */
static void check_near(const struct pair *p, const float *x, uint32_t rows, uint32_t panel,
                       const float *got)
{
    uint32_t width = p->isa->panel;
    for (uint32_t r = 0; r < rows; r += 1 + random_below(20))
        for (uint32_t c = panel * width; c < p->out && c < (panel + 1) * width; c++) {
            double want = 0, size = 0;
            for (uint32_t k = 0; k < p->in; k++) {
                double term = (double)x[r * p->in + k] * (double)p->values[c * p->in + k];
                want += term;
                size += fabs(term);
            }
            double error = fabs((double)got[r * width + c - panel * width] - want);
            if (!(error <= 1e-6 * size))
                fail_msg("%s, %u x %u, %s: product is off by %g of %g", p->isa->name, p->out, p->in,
                         format_text(&p->format), error, size);
        }
}

/* Some rows of a batch have the bits that they have in it, alone and next to another panel. */
static void check_bits_of_some(const struct pair *p, const float *x, uint32_t rows, uint32_t panel,
                               const float *all, float *scratch)
{
    uint32_t width = p->isa->panel;
    for (uint32_t n = 1; n <= 12 && n < rows; n++) {
        uint32_t first = random_below(rows - n), alone = random_below(2);
        const struct moe_cpu_rows some = {.x = x + (size_t)first * p->in, .stride = p->in};
        const struct moe_cpu_part parts[2] = {
            {&p->packed, random_below(p->packed.panels), scratch + (size_t)rows * width},
            {&p->packed, panel, scratch}};
        moe_cpu_matrix_parts(p->isa, 2 - alone, parts + alone, n, &some, width);
        check_bits(p, "product", scratch, all + first * width, (size_t)n * width);
    }
}

static void check_products(const struct pair *p, uint32_t rows)
{
    uint32_t width = p->isa->panel;
    float *x = random_tensor(MOE_DTYPE_F32, (size_t)rows * p->in, 1);
    float *got = calloc((size_t)rows * width, sizeof *got);
    float *scratch = calloc((size_t)rows * width, 2 * sizeof *scratch);
    assert_true(got != NULL && scratch != NULL);
    for (uint32_t panel = 0; panel < p->packed.panels; panel++) {
        moe_cpu_matrix_panel(p->isa, &p->packed, panel, rows, x, p->in, got, width);
        check_near(p, x, rows, panel, got);
        check_bits_of_some(p, x, rows, panel, got, scratch);
    }
    free(x);
    free(got);
    free(scratch);
}

static void every_format_gives_products_with_the_same_bits_for_any_rows(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 240; c++) {
        struct pair p = random_pair(c);
        assert_int_equal(p.packed.dtype, MOE_DTYPE_NONE);
        check_products(&p, random_between(1, 4)); /* elements are used as they are decoded */
        check_products(&p, random_between(5, 90));
        free_pair(&p);
    }
}

/* Products of `rows` rows from row `first` on with one panel, or with it next to another one, have
 * the bits that `all` has. */
static void check_part(const struct pair *p, const float *x, uint32_t first, uint32_t rows,
                       uint32_t panel, bool next_to_another, const float *all, float *scratch)
{
    const uint32_t width = p->isa->panel;
    const struct moe_cpu_rows some = {.x = x + (size_t)first * p->in, .stride = p->in};
    const struct moe_cpu_part parts[2] = {
        {&p->packed, panel, scratch},
        {&p->packed, (panel + 1) % p->packed.panels, scratch + (size_t)rows * width}};
    moe_cpu_matrix_parts(p->isa, next_to_another ? 2 : 1, parts, rows, &some, width);
    check_bits(p, "product", scratch, all + (size_t)first * width, (size_t)rows * width);
}

static void a_row_has_the_same_bits_alone_and_in_64_and_180_rows(void **state)
{
    (void)state;
    enum { ALL = 200 }; /* more than the kernels take at a time */
    for (uint32_t c = 0; c < isa_count * 9; c++) {
        struct pair p = random_pair(c);
        const uint32_t width = p.isa->panel, panel = random_below(p.packed.panels);
        float *x = random_tensor(MOE_DTYPE_F32, (size_t)ALL * p.in, 1);
        float *all = calloc((size_t)ALL * width, sizeof *all);
        float *scratch = calloc((size_t)ALL * width, 2 * sizeof *scratch);
        assert_true(all != NULL && scratch != NULL);
        moe_cpu_matrix_panel(p.isa, &p.packed, panel, ALL, x, p.in, all, width);
        check_near(&p, x, ALL, panel, all);
        for (uint32_t two = 0; two < 2; two++) {
            check_part(&p, x, 0, ALL, panel, two != 0, all, scratch);
            check_part(&p, x, 0, 180, panel, two != 0, all, scratch);
            check_part(&p, x, 100, 64, panel, two != 0, all, scratch);
            for (uint32_t r = 0; r < ALL; r++)
                check_part(&p, x, r, 1, panel, two != 0, all, scratch);
        }
        free(x);
        free(all);
        free(scratch);
        free_pair(&p);
    }
}

static void values_are_read_back_exactly(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 120; c++) {
        struct pair p = random_pair(c);
        uint32_t width = p.isa->panel, row = random_below(p.packed.panels) * width;
        uint32_t column = random_below((p.in + width - 1) / width) * width;
        uint32_t rows = random_between(1, p.out - row < width ? p.out - row : width);
        float *got = malloc((size_t)p.out * p.in * sizeof *got);
        assert_non_null(got);
        moe_cpu_matrix_read(p.device, &p.packed, got);
        check_bits(&p, "value", got, p.values, (size_t)p.out * p.in);
        float block[MOE_CPU_MAX_PANEL * MOE_CPU_MAX_PANEL], plain[sizeof block / sizeof *block];
        moe_cpu_matrix_block(p.isa, &p.packed, row, rows, column, block);
        moe_cpu_matrix_block(p.isa, &p.plain, row, rows, column, plain);
        check_bits(&p, "element of a block", block, plain, (size_t)rows * width);
        free(got);
        free_pair(&p);
    }
}

static void packed_panels_take_few_bytes_more_than_the_file(void **state)
{
    (void)state;
    static const struct moe_weight_format formats[] = {
        {MOE_ENC_F8E4M3, 128, 128, MOE_SCALE_F32, false, false, MOE_ACTIVATIONS_PLAIN},
        {MOE_ENC_E2M1, 1, 32, MOE_SCALE_E8M0, false, false, MOE_ACTIVATIONS_PLAIN},
        {MOE_ENC_E2M1, 1, 16, MOE_SCALE_E4M3, false, false, MOE_ACTIVATIONS_PLAIN},
        {MOE_ENC_INT4, 1, 32, MOE_SCALE_BF16, false, false, MOE_ACTIVATIONS_PLAIN},
        {MOE_ENC_INT4, 1, 128, MOE_SCALE_F16, true, false, MOE_ACTIVATIONS_PLAIN},
    };
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        struct rng r = {random_bits()};
        struct pair p = {.isa = isas[isa_count - 1], .format = formats[i], .out = 256, .in = 512};
        struct moe_packed_sizes sizes;
        p.device = open_device(p.isa, 1);
        p.source = random_packed(&r, &p.format, p.out, p.in, 1);
        pack_pair(&p);
        assert_true(moe_packed_sizes(&p.format, p.out, p.in, &sizes));
        if (p.packed.bytes > sizes.bytes + sizes.bytes / 50)
            fail_msg("%s: %zu bytes in panels, %zu in the file", format_text(&p.format),
                     p.packed.bytes, sizes.bytes);
        free_pair(&p);
    }
}

/* The kernels take neither; such a matrix is kept in F32. */
static void nan_and_huge_scales_keep_their_values(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < isa_count * 2; c++) {
        struct rng r = {random_bits()};
        struct pair p = {.isa = isas[c / 2],
                         .format = {.encoding = MOE_ENC_F8E4M3, .block_rows = 1},
                         .out = 40,
                         .in = 33};
        p.device = open_device(p.isa, 1);
        p.source = random_packed(&r, &p.format, p.out, p.in, 1);
        ((float *)p.source.scales)[7] = c % 2 ? ldexpf(1, 115) : 1;
        ((uint8_t *)p.source.elements)[7 * p.in + 5] = c % 2 ? 0x08 : 0xff;
        pack_pair(&p);
        assert_int_equal(p.packed.dtype, MOE_DTYPE_F32);
        float got[40 * 33];
        moe_cpu_matrix_read(p.device, &p.packed, got);
        for (size_t i = 0; i < 40 * 33; i++)
            assert_true(got[i] == p.values[i] || (isnan(got[i]) && isnan(p.values[i])));
        assert_true(c % 2 ? got[7 * 33 + 5] == ldexpf(1, 109) : isnan(got[7 * 33 + 5]));
        free_pair(&p);
    }
}

static void formats_that_no_word_holds_are_not_computed(void **state)
{
    (void)state;
    struct moe_weight_format f = {.encoding = MOE_ENC_F8E4M3, .block_rows = 1, .block_columns = 3};
    assert_false(moe_cpu_computes(NULL, &f));
    f.block_columns = 2;
    assert_true(moe_cpu_computes(NULL, &f));
    f.encoding = MOE_ENC_INT4;
    assert_false(moe_cpu_computes(NULL, &f));
    f.encoding = MOE_ENC_NONE;
    assert_false(moe_cpu_computes(NULL, &f));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format_gives_products_with_the_same_bits_for_any_rows),
        cmocka_unit_test(a_row_has_the_same_bits_alone_and_in_64_and_180_rows),
        cmocka_unit_test(values_are_read_back_exactly),
        cmocka_unit_test(packed_panels_take_few_bytes_more_than_the_file),
        cmocka_unit_test(nan_and_huge_scales_keep_their_values),
        cmocka_unit_test(formats_that_no_word_holds_are_not_computed),
    };
    seed_random();
    isas = moe_cpu_isa_list(&isa_count);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
