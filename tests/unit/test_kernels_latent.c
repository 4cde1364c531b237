/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the projections of a latent space: against the oracle on every instruction set and in
 * both dtypes; a row's bits do not depend on the batch. */
#include "kernels_fixture.h"

enum { MOST = 300 }; /* tokens: more than one pass */

static const struct moe_cpu_isa *const *isas;
static uint32_t isa_count;

/* A layer with a latent space, and the oracle with the same weights. */
struct world {
    struct moe_device *device;
    struct moe_layer *layer;
    struct moe_oracle_layer *oracle;
    struct moe_layer_spec spec;
};

static void open_world(struct world *w, const struct moe_cpu_isa *isa, bool norm)
{
    w->device = open_device(isa, 2);
    w->spec = plain_spec();
    w->spec.hidden = random_between(5, 90);
    w->spec.latent = random_between(4, w->spec.hidden);
    w->spec.latent_norm = norm;
    w->spec.latent_eps = norm ? 1e-5f : 0;
    w->layer = random_layer(w->device, &w->spec, MOE_DTYPE_NONE, true, &w->oracle);
}

static void close_world(struct world *w)
{
    moe_oracle_destroy(w->oracle);
    moe_cpu_layer_destroy(w->layer);
    moe_cpu_device_close(w->device);
}

/* y [rows] = W x, in double precision. */
static void product(struct moe_oracle_layer *oracle, enum moe_weight w, size_t rows, size_t columns,
                    const double *x, double *y)
{
    const double *matrix = moe_oracle_weight(oracle, w, 0);
    for (size_t r = 0; r < rows; r++) {
        y[r] = 0;
        for (size_t c = 0; c < columns; c++)
            y[r] += matrix[r * columns + c] * x[c];
    }
}

static double difference(size_t n, enum moe_dtype dtype, const void *got, const double *want)
{
    float *wide = calloc(n + 1, sizeof *wide);
    assert_non_null(wide);
    for (size_t i = 0; i < n; i++)
        wide[i] = (float)element_of(dtype, got, i);
    double error = relative_error(n, wide, want);
    free(wide);
    return error;
}

static double check_into(struct world *w, enum moe_dtype dtype, uint32_t tokens)
{
    const size_t h = w->spec.hidden, l = w->spec.latent;
    void *x = random_tensor(dtype, tokens * h, 1), *z = calloc(tokens * l + 1, 4);
    double *want = calloc(tokens * l + 1, sizeof *want), row[90];
    assert_true(z != NULL && want != NULL);
    for (size_t t = 0; t < tokens; t++) {
        for (size_t i = 0; i < h; i++)
            row[i] = element_of(dtype, x, t * h + i);
        product(w->oracle, MOE_WEIGHT_TO_LATENT, l, h, row, want + t * l);
    }
    assert_ok(moe_cpu_to_latent(w->layer, dtype, tokens, x, z));
    double error = difference(tokens * l, dtype, z, want);
    free(want);
    free(x);
    free(z);
    return error;
}

/* y = W_from norm(u) + base, with tokens that are refused, and tokens without a base. */
static double check_out(struct world *w, enum moe_dtype dtype, uint32_t tokens)
{
    const size_t h = w->spec.hidden, l = w->spec.latent;
    void *u = random_tensor(dtype, tokens * l, 1), *y = malloc(tokens * h * 4 + 1);
    float *base = random_tensor(MOE_DTYPE_F32, tokens * h, 1);
    uint8_t mode[MOST], state[MOST];
    double *want = calloc(tokens * h + 1, sizeof *want), row[90];
    assert_true(y != NULL && want != NULL);
    for (size_t t = 0; t < tokens; t++) {
        double mean = 0;
        mode[t] = one_in(3) ? MOE_ROUTE_WITHOUT_SHARED : 0;
        state[t] = one_in(8) ? MOE_TOKEN_NONFINITE_LOGITS : MOE_TOKEN_OK;
        for (size_t i = 0; i < l; i++) {
            row[i] = element_of(dtype, u, t * l + i);
            mean += row[i] * row[i] / (double)l;
        }
        for (size_t i = 0; i < l && w->spec.latent_norm; i++)
            row[i] *= moe_oracle_weight(w->oracle, MOE_WEIGHT_LATENT_NORM, 0)[i] /
                      sqrt(mean + (double)w->spec.latent_eps);
        product(w->oracle, MOE_WEIGHT_FROM_LATENT, h, l, row, want + t * h);
        for (size_t i = 0; i < h; i++)
            want[t * h + i] = state[t] != MOE_TOKEN_OK ? 0
                              : mode[t] == 0           ? want[t * h + i] + (double)base[t * h + i]
                                                       : want[t * h + i];
    }
    assert_ok(moe_cpu_from_latent(w->layer, dtype, tokens, u, base, mode, state, y));
    double error = difference(tokens * h, dtype, y, want);
    free(want);
    free(base);
    free(u);
    free(y);
    return error;
}

static void projections_agree_with_the_oracle(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < isa_count; i++) {
        double worst[2] = {0};
        for (uint32_t c = 0; c < 40; c++) {
            struct world w;
            enum moe_dtype dtype = c % 2 == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
            uint32_t tokens = c < 4 ? MOST : random_below(40);
            open_world(&w, isas[i], one_in(2));
            worst[c % 2] = fmax(worst[c % 2], check_into(&w, dtype, tokens));
            worst[c % 2] = fmax(worst[c % 2], check_out(&w, dtype, tokens));
            close_world(&w);
        }
        print_message("  %-8s worst error: f32 %.1e, bf16 %.1e\n", isas[i]->name, worst[0],
                      worst[1]);
        assert_true(worst[0] < 2e-6 && worst[1] < 4e-3);
    }
}

static void a_row_has_the_same_bits_in_any_batch(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < isa_count; i++)
        for (uint32_t c = 0; c < 10; c++) {
            struct world w;
            open_world(&w, isas[i], c % 2 == 0);
            const size_t h = w.spec.hidden, l = w.spec.latent;
            float *x = random_tensor(MOE_DTYPE_F32, MOST * h, 1);
            float *z = calloc(MOST * l, sizeof *z), *y = calloc(MOST * h, sizeof *y);
            float alone_z[90], alone_y[90];
            assert_true(z != NULL && y != NULL);
            assert_ok(moe_cpu_to_latent(w.layer, MOE_DTYPE_F32, MOST, x, z));
            assert_ok(moe_cpu_from_latent(w.layer, MOE_DTYPE_F32, MOST, z, NULL, NULL, NULL, y));
            for (size_t t = 0; t < MOST; t += random_between(1, 60)) {
                assert_ok(moe_cpu_to_latent(w.layer, MOE_DTYPE_F32, 1, x + t * h, alone_z));
                assert_memory_equal(alone_z, z + t * l, l * sizeof *z);
                assert_ok(moe_cpu_from_latent(w.layer, MOE_DTYPE_F32, 1, alone_z, NULL, NULL, NULL,
                                              alone_y));
                assert_memory_equal(alone_y, y + t * h, h * sizeof *y);
            }
            free(x);
            free(z);
            free(y);
            close_world(&w);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(projections_agree_with_the_oracle),
        cmocka_unit_test(a_row_has_the_same_bits_in_any_batch),
    };
    seed_random();
    isas = moe_cpu_isa_list(&isa_count);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
