/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the experts' networks: every weighting, activation, bias and dtype against the
 * oracle, on every instruction set; padding rows are neither read nor written. */
#include "kernels_fixture.h"

static const struct moe_cpu_isa *const *isas;
static uint32_t isa_count;

static struct moe_layer_spec random_ffn(void)
{
    struct moe_layer_spec spec = plain_spec();
    spec.hidden = random_between(1, 90);
    spec.experts = random_between(1, 6);
    spec.intermediate = random_between(1, 90);
    spec.weighting = random_below(3);
    spec.activation = random_below(MOE_ACT_COUNT);
    spec.gate_up_bias = one_in(2);
    spec.down_bias = one_in(2);
    spec.shared_intermediate = random_between(1, 70);
    spec.shared_gated = one_in(2);
    spec.shared_activation = random_below(MOE_ACT_COUNT);
    spec.swiglu_limit = one_in(2) ? 7 : 0.5f;
    return spec;
}

/* Expert-major rows with NaN in padding rows, which must not be read. */
struct rows {
    struct moe_rows view;
    uint32_t expert[MOE_MAX_EXPERTS], start[MOE_MAX_EXPERTS + 1], count[MOE_MAX_EXPERTS];
    float *weight, *hidden, *out;
};

static void poison(enum moe_dtype dtype, void *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (dtype == MOE_DTYPE_F32)
            ((float *)p)[i] = NAN;
        else
            ((uint16_t *)p)[i] = 0x7fff;
    }
}

/* Row counts up to `max_rows`, some experts empty; some gaps of whole alignments. */
static struct rows *random_rows(const struct moe_layer_spec *spec, enum moe_dtype dtype,
                                uint32_t max_rows)
{
    struct rows *r = calloc(1, sizeof *r);
    assert_non_null(r);
    uint32_t used = 0;
    for (uint32_t e = 0; e < spec->experts; e++) {
        r->expert[e] = e;
        r->start[e] = used;
        r->count[e] = one_in(4) ? 0 : random_between(1, max_rows);
        used += (r->count[e] + MOE_ROW_ALIGN - 1) / MOE_ROW_ALIGN * MOE_ROW_ALIGN;
        used += one_in(4) ? MOE_ROW_ALIGN : 0;
    }
    r->start[spec->experts] = used;
    size_t h = spec->hidden, size = moe_dtype_bytes(dtype);
    char *x = random_tensor(dtype, used * h, 1);
    r->weight = random_tensor(MOE_DTYPE_F32, used, 1);
    r->hidden = malloc(used * (size_t)spec->intermediate * sizeof(float) + 1);
    r->out = malloc(used * h * sizeof(float) + 1);
    assert_true(r->hidden != NULL && r->out != NULL);
    poison(MOE_DTYPE_F32, r->hidden, used * (size_t)spec->intermediate);
    poison(MOE_DTYPE_F32, r->out, used * h);
    for (uint32_t e = 0; e < spec->experts; e++) {
        size_t end = r->start[e] + r->count[e], gap = r->start[e + 1] - end;
        poison(dtype, x + end * h * size, gap * h);
        poison(MOE_DTYPE_F32, r->weight + end, gap);
    }
    r->view = (struct moe_rows){.local_experts = spec->experts,
                                .expert = r->expert,
                                .start = r->start,
                                .count = r->count,
                                .x = x,
                                .weight = r->weight};
    return r;
}

static void free_rows(struct rows *r)
{
    free(r->view.x);
    free(r->weight);
    free(r->hidden);
    free(r->out);
    free(r);
}

static void expect_expert_row(const struct moe_layer_spec *spec,
                              const struct moe_oracle_layer *oracle, uint32_t expert, double weight,
                              double *x, double *want)
{
    bool on_input = spec->weighting == MOE_WEIGHT_INPUT;
    for (uint32_t h = 0; on_input && h < spec->hidden; h++)
        x[h] *= weight;
    assert_ok(moe_oracle_expert(oracle, expert, x, want));
    for (uint32_t h = 0; !on_input && h < spec->hidden; h++)
        want[h] *= weight;
}

/* Worst relative error over the rows; fails where a gap was written. */
static double check_rows(const struct moe_layer_spec *spec, const struct moe_oracle_layer *oracle,
                         enum moe_dtype dtype, const struct rows *r)
{
    double x[128], want[128], error = 0, norm = 0;
    for (uint32_t e = 0; e < spec->experts; e++) {
        for (uint32_t row = r->start[e]; row < r->start[e + 1]; row++) {
            const float *out = r->out + (size_t)row * spec->hidden;
            if (row >= r->start[e] + r->count[e]) {
                assert_true(isnan(out[0]) && isnan(out[spec->hidden - 1]));
                assert_true(isnan(r->hidden[(size_t)row * spec->intermediate]));
                continue;
            }
            for (uint32_t h = 0; h < spec->hidden; h++)
                x[h] = element_of(dtype, r->view.x, (size_t)row * spec->hidden + h);
            expect_expert_row(spec, oracle, e, (double)r->weight[row], x, want);
            for (uint32_t h = 0; h < spec->hidden; h++) {
                error += ((double)out[h] - want[h]) * ((double)out[h] - want[h]);
                norm += want[h] * want[h];
            }
        }
    }
    return error == 0 ? 0 : sqrt(error / norm);
}

static void random_experts_agree_with_the_oracle_and_ignore_what_lies_between(void **state)
{
    (void)state;
    double worst[8] = {0};
    for (uint32_t c = 0; c < 300; c++) {
        uint32_t isa = c % isa_count;
        struct moe_device *device = open_device(isas[isa], random_between(1, 3));
        struct moe_layer_spec spec = random_ffn();
        enum moe_dtype dtype = one_in(2) ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
        struct moe_oracle_layer *oracle;
        struct moe_layer *layer = random_layer(device, &spec, MOE_DTYPE_NONE, true, &oracle);
        struct rows *r = random_rows(&spec, dtype, one_in(10) ? 400 : 20);
        assert_ok(moe_cpu_gemm_gate_up(layer, dtype, &r->view, r->hidden));
        assert_ok(moe_cpu_gemm_down(layer, dtype, &r->view, r->hidden, r->out));
        double error = check_rows(&spec, oracle, dtype, r);
        worst[isa] = fmax(worst[isa], error);
        if (!(error <= 1e-5))
            fail_msg("case %u on %s: error %g", c, isas[isa]->name, error);
        free_rows(r);
        moe_oracle_destroy(oracle);
        moe_cpu_layer_destroy(layer);
        moe_cpu_device_close(device);
    }
    for (uint32_t i = 0; i < isa_count; i++)
        print_message("  %-8s worst error %.2g\n", isas[i]->name, worst[i]);
}

static void shared_experts_agree_with_the_oracle(void **state)
{
    (void)state;
    double worst = 0;
    for (uint32_t c = 0; c < 60; c++) {
        struct moe_device *device = open_device(isas[c % isa_count], 2);
        struct moe_layer_spec spec = random_ffn();
        enum moe_dtype dtype = one_in(2) ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
        struct moe_oracle_layer *oracle;
        struct moe_layer *layer = random_layer(device, &spec, MOE_DTYPE_NONE, false, &oracle);
        uint32_t tokens = one_in(10) ? 600 : random_between(1, 20);
        size_t count = (size_t)tokens * spec.hidden;
        void *x = random_tensor(dtype, count, 1);
        float *y = random_tensor(MOE_DTYPE_F32, count, 1);
        double *want = calloc(count, sizeof *want), token[128], part[128];
        assert_non_null(want);
        for (size_t t = 0; t < tokens; t++) {
            for (size_t h = 0; h < spec.hidden; h++)
                token[h] = element_of(dtype, x, t * spec.hidden + h);
            assert_ok(moe_oracle_shared(oracle, token, part));
            for (size_t h = 0; h < spec.hidden; h++)
                want[t * spec.hidden + h] = (double)y[t * spec.hidden + h] + part[h];
        }
        assert_ok(moe_cpu_shared_forward(layer, dtype, tokens, x, y));
        worst = fmax(worst, relative_error(count, y, want));
        assert_true(worst <= 1e-5);
        free(x);
        free(y);
        free(want);
        moe_oracle_destroy(oracle);
        moe_cpu_layer_destroy(layer);
        moe_cpu_device_close(device);
    }
    print_message("  worst error %.2g\n", worst);
}

static void a_layer_without_a_shared_expert_adds_nothing(void **state)
{
    (void)state;
    struct moe_device *device = open_device(NULL, 1);
    struct moe_layer_spec spec = plain_spec();
    struct moe_layer *layer = random_layer(device, &spec, MOE_DTYPE_F32, false, NULL);
    float x[4] = {1, 2, 3, 4}, y[4] = {5, 6, 7, 8};
    assert_ok(moe_cpu_shared_forward(layer, MOE_DTYPE_F32, 1, x, y));
    assert_true(y[0] == 5 && y[3] == 8);
    moe_cpu_layer_destroy(layer);
    moe_cpu_device_close(device);
}

/* One row alone gives the same bits as the same row among hundreds, on any number of threads. */
static void a_row_does_not_depend_on_its_company(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 3 * isa_count; c++) {
        const struct moe_cpu_isa *isa = isas[c % isa_count];
        struct moe_layer_spec spec = random_ffn();
        enum moe_dtype dtype = one_in(2) ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
        spec.experts = 1;
        struct moe_device *device = open_device(isa, 3);
        struct moe_layer *layer = random_layer(device, &spec, MOE_DTYPE_NONE, true, NULL);
        struct rows *r = random_rows(&spec, dtype, 400);
        float *y = calloc((size_t)r->count[0] * spec.hidden + 1, sizeof *y);
        assert_non_null(y);
        assert_ok(moe_cpu_gemm_gate_up(layer, dtype, &r->view, r->hidden));
        assert_ok(moe_cpu_gemm_down(layer, dtype, &r->view, r->hidden, r->out));
        assert_ok(moe_cpu_shared_forward(layer, dtype, r->count[0], r->view.x, y));
        for (uint32_t row = 0; row < r->count[0]; row += 1 + random_below(20)) {
            const uint32_t start[2] = {0, MOE_ROW_ALIGN}, one = 1;
            float hidden[128], out[128], alone[128] = {0};
            struct moe_rows single = r->view;
            single.start = start;
            single.count = &one;
            single.weight = r->weight + row;
            single.x = (char *)r->view.x + (size_t)row * spec.hidden * moe_dtype_bytes(dtype);
            assert_ok(moe_cpu_gemm_gate_up(layer, dtype, &single, hidden));
            assert_ok(moe_cpu_gemm_down(layer, dtype, &single, hidden, out));
            assert_ok(moe_cpu_shared_forward(layer, dtype, 1, single.x, alone));
            size_t at = (size_t)row * spec.hidden, bytes = spec.hidden * sizeof(float);
            assert_memory_equal(out, r->out + at, bytes);
            assert_memory_equal(alone, y + at, bytes);
        }
        free(y);
        free_rows(r);
        moe_cpu_layer_destroy(layer);
        moe_cpu_device_close(device);
    }
}

static void rows_of_experts_that_are_elsewhere_are_refused(void **state)
{
    (void)state;
    struct moe_device *device = open_device(NULL, 1);
    struct moe_layer_spec spec = plain_spec();
    struct moe_layer *layer = random_layer(device, &spec, MOE_DTYPE_F32, true, NULL);
    const uint32_t start[2] = {0, MOE_ROW_ALIGN}, count = 1, elsewhere = 1;
    struct moe_rows rows = {
        .local_experts = 1, .expert = &elsewhere, .start = start, .count = &count};
    float hidden[4];
    assert_refused(moe_cpu_gemm_gate_up(layer, MOE_DTYPE_F32, &rows, hidden), MOE_INVALID_ARGUMENT,
                   MOE_REASON_EXPERT_INDEX_RANGE);
    rows.local_experts = 2;
    assert_refused(moe_cpu_gemm_down(layer, MOE_DTYPE_F32, &rows, hidden, hidden),
                   MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH);
    rows.local_experts = 0;
    assert_ok(moe_cpu_gemm_gate_up(layer, MOE_DTYPE_F32, &rows, hidden));
    assert_ok(moe_cpu_gemm_down(layer, MOE_DTYPE_F32, &rows, hidden, hidden));
    moe_cpu_layer_destroy(layer);
    moe_cpu_device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_experts_agree_with_the_oracle_and_ignore_what_lies_between),
        cmocka_unit_test(shared_experts_agree_with_the_oracle),
        cmocka_unit_test(a_layer_without_a_shared_expert_adds_nothing),
        cmocka_unit_test(a_row_does_not_depend_on_its_company),
        cmocka_unit_test(rows_of_experts_that_are_elsewhere_are_refused),
    };
    seed_random();
    isas = moe_cpu_isa_list(&isa_count);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
