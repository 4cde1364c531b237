/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the packed-panel kernels, for every instruction set that this processor has. */
#include "kernels_fixture.h"

static const struct moe_cpu_isa *const *isas;
static uint32_t isa_count;

struct product {
    uint32_t rows, out, in;
    enum moe_dtype dtype; /* of the weights */
    float *x;             /* [rows, x_stride]: `in` values, then NaN that must not be read */
    size_t x_stride;
    void *w;      /* [out, in] */
    double *want; /* [rows, out] */
};

static struct product random_product(uint32_t rows, uint32_t out, uint32_t in, enum moe_dtype dtype)
{
    struct product p = {.rows = rows, .out = out, .in = in, .dtype = dtype};
    p.x_stride = (size_t)in + 3;
    p.x = random_tensor(MOE_DTYPE_F32, rows * p.x_stride, 1);
    for (size_t i = 0; i < rows * p.x_stride; i++)
        if (i % p.x_stride >= in)
            p.x[i] = NAN;
    p.w = random_tensor(dtype, (size_t)out * in, 1);
    p.want = calloc((size_t)rows * out, sizeof *p.want);
    assert_non_null(p.want);
    for (size_t r = 0; r < rows; r++)
        for (size_t o = 0; o < out; o++)
            for (size_t i = 0; i < in; i++)
                p.want[r * out + o] +=
                    (double)p.x[r * p.x_stride + i] * element_of(dtype, p.w, o * in + i);
    return p;
}

static void free_product(struct product *p)
{
    free(p->x);
    free(p->w);
    free(p->want);
}

/* y [rows, out] for rows [first, first + rows) of the product. */
static void multiply(const struct moe_cpu_isa *isa, const struct product *p,
                     const struct moe_cpu_matrix *m, uint32_t first, uint32_t rows, float *y)
{
    float *tile = calloc((size_t)rows * isa->panel, sizeof *tile);
    assert_non_null(tile);
    for (uint32_t panel = 0; panel < m->panels; panel++) {
        moe_cpu_matrix_panel(isa, m, panel, rows, p->x + first * p->x_stride, p->x_stride, tile,
                             isa->panel);
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t c = 0; c < isa->panel && panel * isa->panel + c < p->out; c++)
                y[(size_t)r * p->out + panel * isa->panel + c] = tile[r * isa->panel + c];
    }
    free(tile);
}

static double check_product(const struct moe_cpu_isa *isa, struct moe_device *device,
                            const struct product *p)
{
    struct moe_cpu_matrix m;
    char *odd = malloc((size_t)p->out * p->in * 4 + 1); /* uploads come with any alignment */
    size_t count = (size_t)p->rows * p->out;
    float *y = calloc(count, sizeof *y), *alone = calloc(p->out, sizeof *alone);
    assert_true(odd != NULL && y != NULL && alone != NULL);
    memcpy(odd + 1, p->w, (size_t)p->out * p->in * moe_dtype_bytes(p->dtype));
    assert_ok(moe_cpu_matrix_pack(device, p->out, p->in, p->dtype, p->dtype, odd + 1, &m));
    multiply(isa, p, &m, 0, p->rows, y);
    double error = relative_error(count, y, p->want);
    if (!(error <= 1e-5))
        fail_msg("%s rows %u out %u in %u dtype %d: error %g", isa->name, p->rows, p->out, p->in,
                 (int)p->dtype, error);
    for (uint32_t r = 0; r < p->rows; r++) {
        multiply(isa, p, &m, r, 1, alone);
        assert_memory_equal(alone, y + (size_t)r * p->out, p->out * sizeof *alone);
    }
    moe_cpu_matrix_free(device, &m);
    free(odd);
    free(y);
    free(alone);
    return error;
}

static void odd_shapes_are_right_and_rows_are_bitwise_independent(void **state)
{
    (void)state;
    double worst[8] = {0};
    for (uint32_t c = 0; c < 150; c++) {
        struct product p =
            random_product(random_between(1, 40), random_between(1, 100), random_between(1, 160),
                           one_in(2) ? MOE_DTYPE_F32 : MOE_DTYPE_BF16);
        for (uint32_t i = 0; i < isa_count; i++) {
            struct moe_device *device = open_device(isas[i], 2);
            worst[i] = fmax(worst[i], check_product(isas[i], device, &p));
            moe_cpu_device_close(device);
        }
        free_product(&p);
    }
    for (uint32_t i = 0; i < isa_count; i++)
        print_message("  %-8s worst error %.2g\n", isas[i]->name, worst[i]);
}

static void long_sums_stay_accurate(void **state)
{
    (void)state;
    for (enum moe_dtype dtype = MOE_DTYPE_F32; dtype <= MOE_DTYPE_BF16; dtype++) {
        struct product p = random_product(3, 33, MOE_MAX_HIDDEN - 1, dtype);
        for (uint32_t i = 0; i < isa_count; i++) {
            struct moe_device *device = open_device(isas[i], 1);
            print_message("  %-8s %.2g\n", isas[i]->name, check_product(isas[i], device, &p));
            moe_cpu_device_close(device);
        }
        free_product(&p);
    }
}

/* Bit for bit, and with gaps between rows of y. */
static void a_panel_adds_what_it_would_store(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 60; c++) {
        uint32_t rows = random_between(1, 40), k = random_between(1, 130);
        size_t stride = MOE_CPU_MAX_PANEL + random_between(0, 9), count = rows * stride;
        float *x = random_tensor(MOE_DTYPE_F32, (size_t)rows * k, 1), *w = NULL;
        float *old = random_tensor(MOE_DTYPE_F32, count, 1), *y = malloc(count * sizeof *y);
        float *sum = malloc(count * sizeof *sum);
        assert_true(y != NULL && sum != NULL);
        assert_int_equal(posix_memalign((void **)&w, 64, k * MOE_CPU_MAX_PANEL * sizeof *w), 0);
        for (size_t i = 0; i < (size_t)k * MOE_CPU_MAX_PANEL; i++)
            w[i] = random_normal();
        for (uint32_t i = 0; i < isa_count; i++) {
            memcpy(y, old, count * sizeof *y);
            memcpy(sum, old, count * sizeof *sum);
            isas[i]->panel_f32(rows, x, k, w, k, y, stride);
            isas[i]->panel_f32_add(rows, x, k, w, k, sum, stride);
            for (size_t j = 0; j < count; j++)
                y[j] = j % stride < isas[i]->panel ? y[j] + old[j] : old[j];
            assert_memory_equal(sum, y, count * sizeof *y);
        }
        free(x);
        free(w);
        free(old);
        free(y);
        free(sum);
    }
}

/* --------------------------------------------------------------------- activation */

static void activations_agree_with_the_oracle(void **state)
{
    (void)state;
    enum { N = 20011 };
    const float limit = 7, alpha = 1.702f;
    float *g = calloc(N, sizeof *g), *u = calloc(N, sizeof *u), *got = calloc(N, sizeof *got);
    assert_true(g != NULL && u != NULL && got != NULL);
    for (int i = 0; i < N; i++) {
        g[i] = i < 4000 ? (float)(i - 2000) * 0.05f : 4 * random_normal(); /* -100 .. 100 */
        u[i] = 6 * random_normal();
    }
    for (uint32_t i = 0; i < isa_count; i++) {
        for (enum moe_activation a = MOE_ACT_SWIGLU; a < MOE_ACT_COUNT; a++) {
            double worst = 0;
            memcpy(got, g, N * sizeof *g);
            if (moe_activation_has_gate(a)) {
                isas[i]->activate(a, limit, alpha, N, got, u);
            } else {
                memcpy(got, u, N * sizeof *u);
                isas[i]->activate_ungated(N, got);
            }
            for (int j = 0; j < N; j++) {
                double want = moe_oracle_activate(a, (double)limit, (double)alpha, (double)g[j],
                                                  (double)u[j]);
                /* exp(z) of an fp32 z is uncertain by |z| units of rounding; left of -87 the
                 * result stops falling at about 1e-34, as good as zero. */
                double unit = fabs(want) * (1 + fabs((double)g[j])) + 1e-28;
                worst = fmax(worst, fabs((double)got[j] - want) / unit);
            }
            print_message("  %-8s activation %d: worst error %.2g\n", isas[i]->name, (int)a, worst);
            assert_true(worst < 5e-7);
        }
    }
    free(g);
    free(u);
    free(got);
}

static void activations_keep_nan(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < isa_count; i++) {
        for (enum moe_activation a = MOE_ACT_SWIGLU; a <= MOE_ACT_SITU; a++) {
            float g[5] = {1, NAN, 1, -3, NAN}, u[5] = {1, 1, NAN, 1, NAN};
            isas[i]->activate(a, 7, 1.702f, 5, g, u);
            assert_true(isfinite(g[0]) && isnan(g[1]) && isnan(g[2]) && isfinite(g[3]) &&
                        isnan(g[4]));
        }
        float up[5] = {-1, NAN, 3, INFINITY, -0.0f};
        isas[i]->activate_ungated(5, up);
        assert_true(up[0] == 0 && isnan(up[1]) && up[2] == 9 && isinf(up[3]) && up[4] == 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(odd_shapes_are_right_and_rows_are_bitwise_independent),
        cmocka_unit_test(long_sums_stay_accurate),
        cmocka_unit_test(a_panel_adds_what_it_would_store),
        cmocka_unit_test(activations_agree_with_the_oracle),
        cmocka_unit_test(activations_keep_nan),
    };
    seed_random();
    isas = moe_cpu_isa_list(&isa_count);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
