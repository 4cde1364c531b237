/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of kernels/cuda/gemm/quantise.h: rows get the codes and scales that moe/numbers.h gives
 * them on the host, bit for bit, whatever their dtype, length and groups are; padding is zero;
 * other rows are not written; rows of moe/row_format.h unpack to the same. Without a Hopper GPU the
 * tests are skipped, with a message. */
#include "ggemm_fixture.h"

#include "cuda/gemm/quantise.h"
#include "moe/numbers.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXPERTS = 5, MAX_ROWS = 40 };

struct rows {
    struct moe_cuda_quantise q;
    struct moe_weight_format format;
    uint32_t start[EXPERTS], count[EXPERTS];
    float *x, *weight; /* on the host */
    void *device[4];
};

static void *to_device(const void *data, size_t bytes)
{
    void *p = device_alloc(bytes, 0);
    assert_int_equal(cudaMemcpy(p, data, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return p;
}

static void *to_host(const void *data, size_t bytes)
{
    void *p = malloc(bytes);
    assert_non_null(p);
    assert_int_equal(cudaMemcpy(p, data, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    return p;
}

/* Magnitudes of many orders, some zeros, and quotients that lie between two codes. */
static float random_value(void)
{
    uint32_t kind = random_below(8);
    float v = ldexpf((float)(random_below(1 << 16)) - 32768, (int)random_below(20) - 24);
    if (kind == 0)
        v = 0;
    if (kind == 1)
        v = ldexpf(1 + (float)(2 * random_below(8) + 1) / 16, (int)random_below(12) - 6);
    if (kind == 2)
        v = ldexpf(v, -(int)random_below(130));
    return v;
}

static struct rows random_rows(enum moe_dtype dtype, bool whole, bool pow2, bool weighs)
{
    struct rows r = {.format = {MOE_ENC_F8E4M3, 128, whole ? 0 : 128, MOE_SCALE_F32, false, false,
                                pow2 ? MOE_ACTIVATIONS_F8_POW2 : MOE_ACTIVATIONS_F8}};
    uint32_t columns = 1 + random_below(300), capacity;
    if (random_below(2) == 0)
        columns = 8 * (1 + random_below(600));
    capacity = random_groups(EXPERTS, MAX_ROWS, random_below(2) == 0, r.start, r.count);
    size_t n = (size_t)capacity * columns;
    r.x = malloc(n * sizeof *r.x);
    r.weight = malloc(capacity * sizeof *r.weight);
    uint16_t *half = malloc(n * sizeof *half);
    assert_true(r.x != NULL && r.weight != NULL && half != NULL);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        r.x[i] = random_value();
        memcpy(&bits, &r.x[i], sizeof bits);
        half[i] = (uint16_t)(bits >> 16);
        if (dtype == MOE_DTYPE_BF16)
            r.x[i] = moe_bf16_to_f32(half[i]);
    }
    for (uint32_t i = 0; i < capacity; i++)
        r.weight[i] = (float)random_below(1000) / 999;
    r.device[0] = dtype == MOE_DTYPE_F32 ? to_device(r.x, n * sizeof *r.x)
                                         : to_device(half, n * sizeof *half);
    r.device[1] = to_device(r.weight, capacity * sizeof *r.weight);
    r.device[2] = to_device(r.start, sizeof r.start);
    r.device[3] = to_device(r.count, sizeof r.count);
    free(half);
    r.q = (struct moe_cuda_quantise){.dtype = dtype,
                                     .x = r.device[0],
                                     .weight = weighs ? r.device[1] : NULL,
                                     .experts = EXPERTS,
                                     .row_capacity = capacity,
                                     .columns = columns,
                                     .start = r.device[2],
                                     .count = r.device[3],
                                     .whole_rows = whole,
                                     .pow2 = pow2};
    return r;
}

static void release(struct rows *r)
{
    for (int i = 0; i < 4; i++)
        assert_int_equal(cudaFree(r->device[i]), cudaSuccess);
    free(r->x);
    free(r->weight);
}

static bool has_row(const struct rows *r, uint32_t row)
{
    for (uint32_t e = 0; e < EXPERTS; e++)
        if (row >= r->start[e] && row - r->start[e] < r->count[e])
            return true;
    return false;
}

struct results {
    uint8_t *bytes;
    float *values;
    size_t value_bytes;
};

static struct results quantise(struct rows *r)
{
    size_t bytes = moe_cuda_quantised_bytes(r->q.row_capacity, r->q.columns);
    struct results out = {.value_bytes = (size_t)r->q.row_capacity * r->q.columns * sizeof(float)};
    void *buffer = device_alloc(bytes + GUARD, 0xff);
    float *values = device_alloc(out.value_bytes + GUARD, 0xff);
    r->q.quantised = buffer;
    r->q.values = NULL;
    ok(moe_cuda_quantise_enqueue(&r->q, NULL));
    r->q.quantised = NULL;
    r->q.values = values;
    ok(moe_cuda_quantise_enqueue(&r->q, NULL));
    finish();
    out.bytes = to_host(buffer, bytes + GUARD);
    out.values = to_host(values, out.value_bytes + GUARD);
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(out.bytes[bytes + i], 0xff);
        assert_int_equal(((uint8_t *)out.values)[out.value_bytes + i], 0xff);
    }
    assert_int_equal(cudaFree(buffer), cudaSuccess);
    assert_int_equal(cudaFree(values), cudaSuccess);
    return out;
}

static float scale_at(const struct rows *r, const struct results *out, uint32_t row, uint32_t step)
{
    float s;
    size_t at = moe_cuda_quantised_offset(r->q.row_capacity, r->q.columns) +
                ((size_t)step * moe_cuda_quantised_scales(r->q.row_capacity) + row) * sizeof s;
    memcpy(&s, out->bytes + at, sizeof s);
    return s;
}

static void check_row(const struct rows *r, const struct results *out, uint32_t row)
{
    uint32_t columns = r->q.columns, stride = moe_cuda_quantised_stride(columns);
    const uint8_t *codes = out->bytes + (size_t)row * stride;
    const float *values = out->values + (size_t)row * columns;
    float x[4800], want[4800], scales[38];
    for (uint32_t c = 0; c < columns; c++)
        x[c] = r->x[(size_t)row * columns + c] * (r->q.weight != NULL ? r->weight[row] : 1.0f);
    quantise_row(&r->format, columns, x, want, scales);
    for (uint32_t c = 0; c < stride; c++) {
        float got = moe_e4m3_to_f32(codes[c]), wanted = c < columns ? want[c] : 0;
        if (got != wanted || (c < columns && values[c] != x[c]))
            fail_msg("row %u of %u, column %u of %u, groups %d, pow2 %d: %g, not %g; value %g, "
                     "not %g",
                     row, r->q.row_capacity, c, columns, !r->q.whole_rows, r->q.pow2, (double)got,
                     (double)wanted, c < columns ? (double)values[c] : 0,
                     c < columns ? (double)x[c] : 0);
    }
    for (uint32_t step = 0; step < moe_cuda_quantised_steps(columns); step++) {
        float wanted = scales[r->q.whole_rows ? 0 : step], got = scale_at(r, out, row, step);
        if (got != wanted)
            fail_msg("row %u, step %u: scale %g, not %g", row, step, (double)got, (double)wanted);
    }
}

static void check_poison(const struct rows *r, const struct results *out, uint32_t row)
{
    uint32_t columns = r->q.columns, stride = moe_cuda_quantised_stride(columns), bits;
    for (uint32_t c = 0; c < stride; c++)
        assert_int_equal(out->bytes[(size_t)row * stride + c], 0xff);
    for (uint32_t step = 0; step < moe_cuda_quantised_steps(columns); step++) {
        float s = scale_at(r, out, row, step);
        memcpy(&bits, &s, sizeof bits);
        assert_int_equal(bits, 0xffffffff);
    }
    for (uint32_t c = 0; c < columns; c++) {
        memcpy(&bits, out->values + (size_t)row * columns + c, sizeof bits);
        assert_int_equal(bits, 0xffffffff);
    }
}

static void rows_get_the_codes_and_scales_of_the_definition(void **state)
{
    (void)state;
    enum { CASES = 20 };
    uint32_t checked = 0;
    for (uint32_t c = 0; c < 16 * CASES; c++) {
        struct rows r = random_rows((c & 1) != 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16, (c & 2) != 0,
                                    (c & 4) != 0, (c & 8) != 0);
        struct results out = quantise(&r);
        for (uint32_t row = 0; row < r.q.row_capacity; row++)
            if (has_row(&r, row)) {
                check_row(&r, &out, row);
                checked++;
            } else {
                check_poison(&r, &out, row);
            }
        free(out.bytes);
        free(out.values);
        release(&r);
    }
    printf("  %u rows, codes, scales and values equal\n", checked);
    assert_true(checked > 0);
}

/* Rows of moe/row_format.h, and what they unpack to: the layout of the buffer, and values. */
struct travelled {
    uint8_t *rows, *scales, *values; /* on the host */
    size_t row_bytes;
};

static struct travelled travel(struct rows *r)
{
    const struct moe_cuda_quantise *q = &r->q;
    size_t steps = moe_cuda_quantised_steps(q->columns), groups = q->whole_rows ? 1 : steps;
    size_t scale_bytes = steps * moe_cuda_quantised_scales(q->row_capacity) * sizeof(float);
    size_t value_bytes = (size_t)q->row_capacity * q->columns * sizeof(float);
    struct travelled t = {.row_bytes = (q->columns + 15) / 16 * 16 +
                                       (groups * sizeof(float) + 15) / 16 * 16};
    size_t bytes = q->row_capacity * t.row_bytes;
    void *rows = device_alloc(bytes, 0xff), *scales = device_alloc(scale_bytes, 0xff);
    void *values = device_alloc(value_bytes, 0xff);
    r->q.row_bytes = (uint32_t)t.row_bytes;
    r->q.quantised = rows;
    r->q.values = NULL;
    struct moe_cuda_unpack u = {.rows = rows,
                                .row_bytes = r->q.row_bytes,
                                .experts = q->experts,
                                .row_capacity = q->row_capacity,
                                .columns = q->columns,
                                .start = q->start,
                                .count = q->count,
                                .whole_rows = q->whole_rows,
                                .scales = scales};
    ok(moe_cuda_quantise_enqueue(q, NULL));
    ok(moe_cuda_unpack_enqueue(&u, NULL));
    u.scales = NULL;
    u.values = values;
    ok(moe_cuda_unpack_enqueue(&u, NULL));
    finish();
    t.rows = to_host(rows, bytes);
    t.scales = to_host(scales, scale_bytes);
    t.values = to_host(values, value_bytes);
    for (int i = 0; i < 3; i++)
        assert_int_equal(cudaFree(i == 0 ? rows : i == 1 ? scales : values), cudaSuccess);
    return t;
}

static void check_travelled(const struct rows *r, const struct results *want,
                            const struct travelled *t)
{
    uint32_t columns = r->q.columns, stride = moe_cuda_quantised_stride(columns);
    size_t steps = moe_cuda_quantised_steps(columns), groups = r->q.whole_rows ? 1 : steps;
    assert_memory_equal(t->scales,
                        want->bytes + moe_cuda_quantised_offset(r->q.row_capacity, columns),
                        steps * moe_cuda_quantised_scales(r->q.row_capacity) * sizeof(float));
    assert_memory_equal(t->values, want->values, want->value_bytes);
    for (uint32_t row = 0; row < r->q.row_capacity; row++) {
        const uint8_t *at = t->rows + row * t->row_bytes;
        assert_memory_equal(at, want->bytes + (size_t)row * stride, stride);
        for (size_t i = 0; i < groups; i++) {
            float scale = scale_at(r, want, row, (uint32_t)i);
            assert_memory_equal(at + stride + i * sizeof scale, &scale, sizeof scale);
        }
        for (size_t i = stride + groups * sizeof(float); i < t->row_bytes; i++)
            assert_int_equal(at[i], has_row(r, row) ? 0 : 0xff);
    }
}

static void rows_with_their_scales_unpack_to_the_same(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 160; c++) {
        struct rows r = random_rows((c & 1) != 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16, (c & 2) != 0,
                                    (c & 4) != 0, (c & 8) != 0);
        struct results out = quantise(&r);
        struct travelled t = travel(&r);
        check_travelled(&r, &out, &t);
        free(out.bytes);
        free(out.values);
        free(t.rows);
        free(t.scales);
        free(t.values);
        release(&r);
    }
}

static void impossible_arguments_are_refused(void **state)
{
    (void)state;
    struct rows r = random_rows(MOE_DTYPE_BF16, false, false, false);
    struct moe_cuda_quantise wrong[] = {r.q, r.q, r.q, r.q};
    wrong[0].dtype = MOE_DTYPE_NONE;
    wrong[1].columns = 0;
    wrong[2].experts = 0;
    wrong[3].row_bytes = 8;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct moe_status st = moe_cuda_quantise_enqueue(&wrong[i], NULL);
        assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    }
    release(&r);
}

int main(int argc, char **argv)
{
    if (!ggemm_test_begin(argc, argv))
        return SKIP_CODE;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_get_the_codes_and_scales_of_the_definition),
        cmocka_unit_test(rows_with_their_scales_unpack_to_the_same),
        cmocka_unit_test(impossible_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
