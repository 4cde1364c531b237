/* SPDX-License-Identifier: Apache-2.0 */
/* Random products with weights that stay quantised; see packed_problem.h. */
#include "packed_problem.h"

#include "ggemm_reference.h"

#include "cuda/gemm/quantise.h"
#include "moe/numbers.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct moe_weight_format formats[FORMATS] = {
    {.encoding = MOE_ENC_F8E4M3, .block_rows = 128, .block_columns = 128, .scale = MOE_SCALE_F32},
    {.encoding = MOE_ENC_F8E4M3, .block_rows = 128, .block_columns = 128, .scale = MOE_SCALE_BF16},
    {.encoding = MOE_ENC_F8E4M3, .block_rows = 128, .block_columns = 128, .scale = MOE_SCALE_E8M0},
    {.encoding = MOE_ENC_F8E4M3, .block_rows = 1, .block_columns = 0, .scale = MOE_SCALE_F32},
    {.encoding = MOE_ENC_F8E4M3, .block_rows = 0, .block_columns = 0, .scale = MOE_SCALE_F32},
    {.encoding = MOE_ENC_F8E4M3, .block_rows = 1, .block_columns = 32, .scale = MOE_SCALE_E8M0},
    {.encoding = MOE_ENC_F8E4M3, .block_rows = 32, .block_columns = 32, .scale = MOE_SCALE_E8M0},
    {.encoding = MOE_ENC_E2M1, .block_rows = 1, .block_columns = 32, .scale = MOE_SCALE_E8M0},
    {.encoding = MOE_ENC_E2M1, .block_rows = 1, .block_columns = 16, .scale = MOE_SCALE_E4M3},
    {.encoding = MOE_ENC_E2M1,
     .block_rows = 1,
     .block_columns = 16,
     .scale = MOE_SCALE_E4M3,
     .global_divides = true},
    {.encoding = MOE_ENC_INT4, .block_rows = 1, .block_columns = 32, .scale = MOE_SCALE_BF16},
    {.encoding = MOE_ENC_INT4, .block_rows = 1, .block_columns = 64, .scale = MOE_SCALE_BF16},
    {.encoding = MOE_ENC_INT4,
     .block_rows = 1,
     .block_columns = 32,
     .scale = MOE_SCALE_BF16,
     .zero_points = true},
    {.encoding = MOE_ENC_INT4, .block_rows = 1, .block_columns = 128, .scale = MOE_SCALE_BF16},
    {.encoding = MOE_ENC_INT4, .block_rows = 1, .block_columns = 128, .scale = MOE_SCALE_F32},
    {.encoding = MOE_ENC_INT4,
     .block_rows = 1,
     .block_columns = 128,
     .scale = MOE_SCALE_F16,
     .zero_points = true},
    {.encoding = MOE_ENC_INT4, .block_rows = 1, .block_columns = 0, .scale = MOE_SCALE_F16},
    {MOE_ENC_F8E4M3, 128, 128, MOE_SCALE_F32, false, false, MOE_ACTIVATIONS_F8},
    {MOE_ENC_F8E4M3, 128, 128, MOE_SCALE_E8M0, false, false, MOE_ACTIVATIONS_F8_POW2},
    {MOE_ENC_F8E4M3, 1, 0, MOE_SCALE_F32, false, false, MOE_ACTIVATIONS_F8},
    {MOE_ENC_F8E4M3, 0, 0, MOE_SCALE_BF16, false, false, MOE_ACTIVATIONS_F8},
};

const char *name_of(const struct moe_weight_format *f)
{
    static char text[64];
    (void)snprintf(text, sizeof text, "%s %ux%u scale %d%s", moe_encoding_traits(f->encoding).name,
                   f->block_rows, f->block_columns, (int)f->scale,
                   f->zero_points                            ? " zeros"
                   : f->global_divides                       ? " divides"
                   : f->activations != MOE_ACTIVATIONS_PLAIN ? " W8A8"
                                                             : "");
    return text;
}

/* ------------------------------------------------------------ quantised matrices */

uint16_t cut_to_bf16(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* To nearest, ties to even; no NaN. */
static float round_to_bf16(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return moe_bf16_to_f32((uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

/* Weights of about 0.1 to 1: the fast exponential has larger errors for larger gates. */
static void random_scale(const struct moe_weight_format *f, uint8_t *to)
{
    float unit = f->encoding == MOE_ENC_INT4 ? 3e-5f : 1e-6f;
    float s = (float)(1 + random_below(1000)) * unit * (random_below(8) == 0 ? -1.0f : 1.0f);
    uint16_t half = cut_to_bf16(s);
    switch (f->scale) {
    case MOE_SCALE_F32: memcpy(to, &s, sizeof s); return;
    case MOE_SCALE_E8M0:
        *to = (uint8_t)((f->encoding == MOE_ENC_E2M1 ? 118 : 112) + random_below(8));
        return;
    case MOE_SCALE_E4M3: *to = (uint8_t)(1 + random_below(0x7e)); return;
    case MOE_SCALE_F16: /* 2^-8 .. 2^-5 */
        half = (uint16_t)(random_below(2) << 15 | (7 + random_below(3)) << 10 | random_below(1024));
        break;
    default: break;
    }
    memcpy(to, &half, sizeof half);
}

struct quantised random_matrix(const struct moe_weight_format *f, size_t rows, size_t columns)
{
    struct quantised q = {.rows = rows, .columns = columns};
    assert_true(moe_packed_sizes(f, rows, columns, &q.sizes));
    q.bytes = malloc(q.sizes.bytes);
    assert_non_null(q.bytes);
    for (size_t i = 0; i < q.sizes.elements; i++) {
        uint8_t b = (uint8_t)random_below(256);
        bool nan = f->encoding == MOE_ENC_F8E4M3 && (b & 0x7f) == 0x7f;
        q.bytes[i] = nan ? 0x80 : b;
    }
    uint8_t *scales = q.bytes + q.sizes.elements, *zeros = scales + q.sizes.scales;
    for (size_t i = 0; i < q.sizes.scales; i += moe_scale_bytes(f->scale))
        random_scale(f, scales + i);
    for (size_t i = 0; i < q.sizes.zeros; i++)
        zeros[i] = (uint8_t)random_below(17);
    q.m = (struct moe_packed_matrix){.elements = q.bytes,
                                     .scales = scales,
                                     .zeros = f->zero_points ? zeros : NULL,
                                     .global = f->global_divides ? 7.1e3f : 1.7e-4f};
    return q;
}

float value_of(const struct moe_weight_format *f, const struct quantised *q, size_t row,
               size_t column)
{
    return moe_packed_value(f, &q->sizes, &q->m, row, column);
}

/* What tensor cores multiply by: INT4 is rounded to bf16, after its scale. So is everything in a
 * product with W. */
static float operand_of(const struct moe_weight_format *f, const struct quantised *q, size_t row,
                        size_t column, bool back)
{
    if (f->encoding != MOE_ENC_INT4)
        return back ? round_to_bf16(value_of(f, q, row, column)) : value_of(f, q, row, column);
    size_t block = moe_packed_block(f, q->sizes.scale_columns, row, column);
    float scale = moe_scale_to_f32(f, q->m.scales, block, 1);
    uint8_t byte = q->bytes[row * q->sizes.row_bytes + column / 2];
    uint32_t zero = q->m.zeros != NULL ? q->m.zeros[block] : 8;
    float element = moe_element_to_f32(f->encoding, byte >> 4 * (column % 2) & 15, zero);
    return round_to_bf16(element * round_to_bf16(scale));
}

void *to_device(const void *data, size_t bytes)
{
    void *p = device_alloc(bytes > 0 ? bytes : 1, 0);
    if (bytes > 0)
        assert_int_equal(cudaMemcpy(p, data, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return p;
}

/* ---------------------------------------------------------------------- products */

void *own(struct problem *p, void *memory)
{
    assert_true(p->owns < sizeof p->owned / sizeof *p->owned);
    p->owned[p->owns++] = memory;
    return memory;
}

void put_matrix(const struct moe_cuda_packed_weight *w, const struct moe_weight_format *f,
                const struct quantised *q)
{
    void *elements = to_device(q->m.elements, q->sizes.elements);
    void *scales = to_device(q->m.scales, q->sizes.scales);
    void *zeros = to_device(q->m.zeros, q->sizes.zeros);
    uint32_t half = w->rows / 2, scale_rows = (uint32_t)q->sizes.scale_rows;
    ok(moe_cuda_packed_place(w, elements, 0, half, NULL));
    ok(moe_cuda_packed_place(w, (char *)elements + half * q->sizes.row_bytes, half, w->rows - half,
                             NULL));
    ok(moe_cuda_packed_scale(w, f, scales, 0, scale_rows, NULL));
    if (f->zero_points)
        ok(moe_cuda_packed_zeros(w, f, zeros, 0, scale_rows, NULL));
    finish();
    assert_int_equal(cudaFree(elements), cudaSuccess);
    assert_int_equal(cudaFree(scales), cudaSuccess);
    assert_int_equal(cudaFree(zeros), cudaSuccess);
}

/* n x k weights: all rows of an entry, or one of two matrices with alternating rows. */
static void place(struct problem *p, char *entry, float *values, uint32_t n, uint32_t k,
                  bool interleaved, uint32_t offset)
{
    struct quantised q = random_matrix(p->format, n, k);
    struct moe_cuda_packed_weight w = {.packing = p->g.packing,
                                       .entry = entry,
                                       .rows = n,
                                       .columns = k,
                                       .interleaved = interleaved,
                                       .offset = offset,
                                       .global =
                                           p->format->global_divides ? 1 / q.m.global : q.m.global,
                                       .wrong = p->wrong};
    put_matrix(&w, p->format, &q);
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t c = 0; c < k; c++)
            values[(size_t)(interleaved ? r / 8 * 16 + r % 8 + offset : r) * k + c] =
                operand_of(p->format, &q, r, c, p->g.back);
    free(q.bytes);
}

/* Packed weights, and their values as fp32 behind `plain`. */
static void make_weights(struct problem *p)
{
    uint32_t k = p->g.back ? p->g.n : p->g.k, experts = p->g.experts;
    uint32_t stored = p->g.back ? p->g.k : p->g.gated ? 2 * p->g.n : p->g.n;
    bool two = p->g.gated || (p->g.back && stored % 16 == 0);
    uint32_t rows = two ? stored / 2 : stored;
    size_t entry = moe_cuda_packed_bytes(p->g.packing, stored, k);
    size_t each = (size_t)stored * k;
    char *packed = own(p, device_alloc(experts * entry, 0));
    float *values = calloc(experts * each, sizeof *values);
    assert_non_null(values);
    for (uint32_t e = 0; e < experts; e++) {
        place(p, packed + e * entry, values + e * each, rows, k, two, 0);
        if (two)
            place(p, packed + e * entry, values + e * each, rows, k, true, 8);
    }
    p->weights.data = packed;
    p->plain.data = own(p, to_device(values, experts * each * sizeof *values));
    free(values);
}

static const struct moe_cuda_ggemm_weights *const *describe(struct problem *p,
                                                            const struct moe_cuda_ggemm_weights *w)
{
    void *there = own(p, to_device(w, sizeof *w));
    return own(p, to_device(&there, sizeof there));
}

/* Lets the product read rows of moe/row_format.h, quantised as `q` says. All others stay NaN. */
static void quantise_as_they_travel(struct problem *p, struct moe_cuda_quantise q)
{
    struct moe_cuda_ggemm *g = &p->g;
    uint32_t groups = q.whole_rows ? 1 : moe_cuda_quantised_steps(q.columns);
    size_t scales = (size_t)moe_cuda_quantised_steps(q.columns) *
                    moe_cuda_quantised_scales(q.row_capacity) * sizeof(float);
    q.row_bytes = (q.columns + 15) / 16 * 16 + (groups * 4 + 15) / 16 * 16;
    q.quantised = own(p, device_alloc((size_t)q.row_capacity * q.row_bytes, 0xff));
    struct moe_cuda_unpack u = {.rows = q.quantised,
                                .row_bytes = q.row_bytes,
                                .experts = q.experts,
                                .row_capacity = q.row_capacity,
                                .columns = q.columns,
                                .start = q.start,
                                .count = q.count,
                                .whole_rows = q.whole_rows,
                                .scales = own(p, device_alloc(scales, 0xff))};
    ok(moe_cuda_quantise_enqueue(&q, NULL));
    ok(moe_cuda_unpack_enqueue(&u, NULL));
    g->x = q.quantised;
    g->x_stride = q.row_bytes;
    g->x_scales = u.scales;
}

void quantise_rows(struct problem *p)
{
    struct moe_cuda_ggemm *g = &p->g;
    size_t n = (size_t)g->row_capacity * g->k;
    bool weighs = (g->gated || g->relu2) && g->weighting == MOE_WEIGHT_INPUT;
    char *buffer = own(p, device_alloc(moe_cuda_quantised_bytes(g->row_capacity, g->k), 0xff));
    struct moe_cuda_quantise q = {.dtype = MOE_DTYPE_BF16,
                                  .x = p->x,
                                  .weight = weighs ? g->row_weight : NULL,
                                  .experts = g->experts,
                                  .row_capacity = g->row_capacity,
                                  .columns = g->k,
                                  .start = g->start,
                                  .count = g->count,
                                  .whole_rows = p->format->block_columns == 0,
                                  .pow2 = p->format->activations == MOE_ACTIVATIONS_F8_POW2,
                                  .quantised = buffer};
    g->x = buffer;
    g->x_stride = 0;
    g->x_scales = NULL;
    if (random_below(2) == 0)
        quantise_as_they_travel(p, q);
    else
        ok(moe_cuda_quantise_enqueue(&q, NULL));
    finish();
    uint16_t *x = malloc(n * sizeof *x);
    float *values = malloc(n * sizeof *values), *weight = malloc(g->row_capacity * sizeof *weight);
    assert_true(x != NULL && values != NULL && weight != NULL);
    assert_int_equal(cudaMemcpy(x, p->x, n * sizeof *x, cudaMemcpyDeviceToHost), 0);
    assert_int_equal(
        cudaMemcpy(weight, g->row_weight, g->row_capacity * sizeof *weight, cudaMemcpyDeviceToHost),
        0);
    for (uint32_t row = 0; row < g->row_capacity; row++) {
        float *v = values + (size_t)row * g->k;
        for (uint32_t c = 0; c < g->k; c++)
            v[c] = moe_bf16_to_f32(x[(size_t)row * g->k + c]) * (weighs ? weight[row] : 1.0f);
        quantise_row(p->format, g->k, v, NULL, NULL);
    }
    if (weighs)
        g->row_weight = NULL;
    p->alike = own(p, to_device(values, n * sizeof *values));
    free(x);
    free(values);
    free(weight);
}

const struct moe_cuda_ggemm_weights *const *make(struct problem *p)
{
    struct moe_cuda_ggemm *g = &p->g;
    uint64_t seed = random_state;
    g->packing = moe_cuda_packing_of(p->format);
    assert_int_not_equal(g->packing, MOE_CUDA_PACKING_NONE);
    p->wrong = own(p, device_alloc(sizeof *p->wrong, 0));
    char *x = own(p, device_alloc((size_t)g->row_capacity * g->k * 2, 0xff));
    for (uint32_t e = 0; e < g->experts; e++) /* all other rows are NaN */
        assert_int_equal(ggemm_fill_bf16(x + (size_t)p->start[e] * g->k * 2,
                                         (size_t)p->count[e] * g->k, seed + e, 2.0f),
                         0);
    float *weight = own(p, device_alloc(g->row_capacity * sizeof(float), 0));
    float *bias = own(p, device_alloc((size_t)g->experts * g->n * sizeof(float), 0));
    float *up_bias = own(p, device_alloc((size_t)g->experts * g->n * sizeof(float), 0));
    assert_int_equal(ggemm_fill_f32(weight, g->row_capacity, seed + 7001, 1.0f), 0);
    assert_int_equal(ggemm_fill_f32(bias, (size_t)g->experts * g->n, seed + 7002, 3.0f), 0);
    assert_int_equal(ggemm_fill_f32(up_bias, (size_t)g->experts * g->n, seed + 7003, 3.0f), 0);
    make_weights(p);
    p->weights.bias = p->plain.bias = bias;
    p->weights.up_bias = p->plain.up_bias = up_bias;
    g->x = p->x = x;
    g->row_weight = weight;
    g->has_bias = true;
    g->start = own(p, to_device(p->start, sizeof p->start));
    g->count = own(p, to_device(p->count, sizeof p->count));
    g->weights = describe(p, &p->weights);
    if (moe_cuda_packing_is_w8a8(g->packing))
        quantise_rows(p);
    p->out_bytes = (size_t)g->row_capacity * g->n * moe_dtype_bytes(g->out_dtype);
    g->out = own(p, device_alloc(p->out_bytes + GUARD, 0xff));
    return describe(p, &p->plain);
}

void release(struct problem *p)
{
    for (size_t i = 0; i < p->owns; i++)
        assert_int_equal(cudaFree(p->owned[i]), cudaSuccess);
}

void multiply(struct problem *p, enum moe_cuda_gemm_tile tile)
{
    p->g.tile = tile;
    assert_int_equal(cudaMemset(p->g.out, 0xff, p->out_bytes + GUARD), cudaSuccess);
    ok(moe_cuda_ggemm_enqueue(&p->g, NULL));
    finish();
}

char *result(const struct problem *p)
{
    char *bytes = malloc(p->out_bytes + GUARD);
    assert_non_null(bytes);
    assert_int_equal(cudaMemcpy(bytes, p->g.out, p->out_bytes + GUARD, cudaMemcpyDeviceToHost), 0);
    for (size_t i = 0; i < GUARD; i++)
        assert_int_equal((uint8_t)bytes[p->out_bytes + i], 0xff);
    return bytes;
}

double error_of(struct problem *p, const struct moe_cuda_ggemm_weights *const *plain, double *want)
{
    struct moe_cuda_ggemm g = p->g;
    struct ggemm_difference d;
    g.weights = plain;
    if (p->alike != NULL) {
        g.x = p->alike;
        g.x_stride = 0;
    }
    assert_int_equal(ggemm_reference(&g, want), 0);
    assert_int_equal(ggemm_compare(&g, want, &d), 0);
    assert_int_equal(d.stray, 0);
    return d.worst;
}

uint32_t align_groups(struct problem *p)
{
    uint32_t end = 0;
    for (uint32_t e = 0; e < p->g.experts; e++) {
        uint32_t start = p->start[e] > end ? p->start[e] : end;
        p->start[e] = (start + 3) / 4 * 4;
        end = p->start[e] + p->count[e];
    }
    return end > 0 ? end : 1;
}
