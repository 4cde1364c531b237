/* SPDX-License-Identifier: Apache-2.0 */
/* The whole road from disk to numbers: every golden checkpoint is opened and loaded, and the
 * double-precision oracle computes from that what transformers computed. A wrong setting, a wrong
 * tensor or a wrong stride anywhere would show here. */
#include "model_fixture.h"
#include "oracle/oracle.h"
#include "support/golden.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static struct moe_status upload(void *ctx, enum moe_weight weight, uint32_t expert,
                                enum moe_dtype dtype, const void *data, size_t bytes)
{
    return moe_oracle_upload(ctx, weight, expert, dtype, data, bytes);
}

static struct moe_oracle_layer *load_layer(const struct moe_model *m, size_t i)
{
    struct moe_oracle_layer *layer = NULL;
    const struct moe_layer_spec *spec = moe_model_layer(m, i);
    uint32_t experts[MOE_MAX_EXPERTS];
    for (uint32_t e = 0; e < spec->experts; e++)
        experts[e] = e;
    assert_ok(moe_oracle_create(spec, &layer));
    assert_ok(moe_model_load_layer(m, i, experts, spec->experts, upload, layer, NULL, NULL));
    return layer;
}

static float *read_tensor(const struct moe_st_file *file, uint32_t layer, unsigned tokens,
                          const char *what)
{
    char name[64];
    snprintf(name, sizeof name, "layer%u.T%u.%s", layer, tokens, what);
    const struct moe_tensor *t = moe_st_find(file, name);
    assert_non_null(t);
    assert_int_equal(t->dtype, MOE_ST_F32);
    float *data = malloc((size_t)t->bytes);
    assert_non_null(data);
    assert_ok(moe_st_read(file, t, 0, t->bytes, data));
    return data;
}

/* Relative Frobenius norm of the difference, over the tokens. */
static double error_of(const double *got, const float *want, size_t n)
{
    double difference = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        difference += (got[i] - (double)want[i]) * (got[i] - (double)want[i]);
        size += (double)want[i] * (double)want[i];
    }
    return sqrt(difference / size);
}

static void check_layer(const struct moe_model *m, size_t i, const struct moe_st_file *golden)
{
    static const unsigned counts[] = {1, 37};
    const struct moe_layer_spec *spec = moe_model_layer(m, i);
    struct moe_oracle_layer *layer = load_layer(m, i);
    for (size_t c = 0; c < 2; c++) {
        unsigned tokens = counts[c];
        float *x = read_tensor(golden, spec->layer, tokens, "x");
        float *want = read_tensor(golden, spec->layer, tokens, "y");
        size_t n = (size_t)tokens * spec->hidden;
        double *y = calloc(n, sizeof *y);
        assert_non_null(y);
        assert_ok(moe_oracle_forward(layer, MOE_DTYPE_F32, tokens, x, NULL, NULL, NULL, NULL, NULL,
                                     NULL, NULL, y));
        double error = error_of(y, want, n);
        print_message("    %s layer %u, T = %u: relative error %.1e\n", moe_model_name(m),
                      spec->layer, tokens, error);
        assert_true(error <= 1e-5);
        free(x);
        free(want);
        free(y);
    }
    moe_oracle_destroy(layer);
}

static void check_models(const char *directory)
{
    struct golden_models models;
    golden_models_list(directory, &models);
    for (size_t f = 0; f < models.count; f++) {
        char path[512];
        struct moe_model *m;
        struct moe_st_file *golden;
        snprintf(path, sizeof path, "%s/%s", directory, models.names[f]);
        assert_ok(moe_model_open(path, &m));
        snprintf(path, sizeof path, "%s/%s/golden.safetensors", directory, models.names[f]);
        assert_ok(moe_st_open(path, &golden));
        for (size_t i = 0; i < moe_model_layer_count(m); i++)
            check_layer(m, i, golden);
        moe_st_close(golden);
        moe_model_close(m);
    }
}

static void every_golden_model_gives_the_numbers_of_transformers(void **state)
{
    (void)state;
    check_models(MOE_GOLDEN_DIR);
    check_models(MOE_UNCOMMON_DIR);
}

static void every_model_of_numpy_gives_its_numbers(void **state)
{
    (void)state;
    check_models(MOE_NUMPY_DIR);
}

static void every_quantised_model_gives_the_numbers_of_its_dequantised_weights(void **state)
{
    (void)state;
    check_models(MOE_QUANTISED_DIR);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_golden_model_gives_the_numbers_of_transformers),
        cmocka_unit_test(every_model_of_numpy_gives_its_numbers),
        cmocka_unit_test(every_quantised_model_gives_the_numbers_of_its_dequantised_weights),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
