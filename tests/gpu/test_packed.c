/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of products with weights that stay quantised (kernels/cuda/gemm/packed.h), for every
 * packing: each element has its value, results as in double precision with the values that
 * daemon/quant's interface defines, equal bits for a row alone, among 64 and among thousands, no
 * writes outside the experts' rows. The same for the gradient of rows, with W instead of W^T. The
 * layer's parts are checked the same way, also with F32 tokens. W8A8 is compared with rows that are
 * quantised alike, on the host. Without a Hopper GPU the tests are skipped, with a message. */
#include "packed_problem.h"

#include "cuda/gemm/quantise.h"
#include "cuda/plan/limits.h"
#include "cuda/step/backend.h"
#include "moe/backend.h"
#include "moe/numbers.h"
#include "moe/row_format.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Products with W^T, with gate and up, with up alone, and with W. */
enum form { PLAIN, GATED, UP, BACK, FORMS };
static const char *const form_name[FORMS] = {"plain", "gated", "up", "back"};

static void random_case(const struct moe_weight_format *f, enum form form, enum moe_dtype out,
                        double *worst)
{
    struct problem p = {.format = f,
                        .g = {.gated = form == GATED,
                              .relu2 = form == UP,
                              .back = form == BACK,
                              .experts = 1 + random_below(5),
                              .n = 8 * (1 + random_below(40)),
                              .k = 8 * (1 + random_below(60)),
                              .weighting = (enum moe_weighting)random_below(3),
                              .activation = (enum moe_activation)random_below(MOE_ACT_RELU2),
                              .limit = 1.5f,
                              .alpha = 1.702f,
                              .out_dtype = out}};
    p.g.row_capacity = random_groups(p.g.experts, 300, random_below(2) == 0, p.start, p.count);
    if (f->activations != MOE_ACTIVATIONS_PLAIN)
        p.g.row_capacity = align_groups(&p);
    const struct moe_cuda_ggemm_weights *const *plain = make(&p);
    double *want = device_alloc((size_t)p.g.row_capacity * p.g.n * sizeof(double), 0);
    multiply(&p, MOE_CUDA_TILE_DECODE);
    double few = error_of(&p, plain, want);
    char *first = result(&p);
    multiply(&p, MOE_CUDA_TILE_EVEN);
    double many = error_of(&p, plain, want);
    char *second = result(&p);
    assert_memory_equal(first, second, p.out_bytes);
    double bound = out == MOE_DTYPE_F32 ? 1e-4 : 4e-3;
    if (p.alike != NULL) /* sums inside the instructions have about 14 bits; 5.25e-3 was seen */
        bound += 8e-3;
    if (few > bound || many > bound)
        fail_msg("%s, %s, %u experts, %u rows, n %u, k %u, fp32 %d: errors %g, %g", name_of(f),
                 form_name[form], p.g.experts, p.g.row_capacity, p.g.n, p.g.k, out == MOE_DTYPE_F32,
                 few, many);
    *worst = fmax(*worst, fmax(few, many));
    assert_int_equal(cudaFree(want), cudaSuccess);
    free(first);
    free(second);
    release(&p);
}

static void check_shapes(bool w8a8)
{
    enum { CASES = 5 };
    for (int i = 0; i < FORMATS; i++)
        for (enum form form = 0;
             form < FORMS && (formats[i].activations != MOE_ACTIVATIONS_PLAIN) == w8a8; form++) {
            double bf16 = 0, fp32 = 0;
            if (form == BACK && w8a8)
                continue; /* the only product with W8A8 is that with W^T */
            for (int c = 0; c < CASES; c++) {
                random_case(&formats[i], form, MOE_DTYPE_BF16, &bf16);
                random_case(&formats[i], form, MOE_DTYPE_F32, &fp32);
            }
            printf("  %-28s %s: worst element of %d shapes, bf16 %.2e, fp32 %.2e\n",
                   name_of(&formats[i]), form_name[form], CASES, bf16, fp32);
        }
}

static void any_shape_matches_double_precision(void **state)
{
    (void)state;
    check_shapes(false);
}

static void any_shape_in_w8a8_matches_rows_that_are_quantised_alike(void **state)
{
    (void)state;
    check_shapes(true);
}

/* Stored gate and up are the results of the plain product, bit for bit, and change no result. */
static void gate_and_up_can_be_stored(void **state)
{
    (void)state;
    for (int i = 0; i < FORMATS; i++) {
        struct problem p = {.format = &formats[i],
                            .count = {40, 150},
                            .start = {0, 128},
                            .g = {.gated = true,
                                  .experts = 2,
                                  .row_capacity = 278,
                                  .n = 200,
                                  .k = 264,
                                  .weighting = MOE_WEIGHT_INPUT,
                                  .activation = MOE_ACT_SWIGLU,
                                  .out_dtype = MOE_DTYPE_BF16}};
        if (formats[i].activations != MOE_ACTIVATIONS_PLAIN)
            continue;
        (void)make(&p);
        size_t bytes = (size_t)p.g.row_capacity * 2 * p.g.n * sizeof(float);
        struct moe_cuda_ggemm_pre pre = {.data = own(&p, device_alloc(bytes, 0xff)),
                                         .rows = p.g.row_capacity - 20};
        const struct moe_cuda_ggemm_pre *there = own(&p, to_device(&pre, sizeof pre));
        struct problem plain = p;
        plain.g.gated = plain.g.has_bias = false;
        plain.g.row_weight = NULL;
        plain.g.n *= 2;
        plain.g.out_dtype = MOE_DTYPE_F32;
        plain.out_bytes = bytes;
        plain.g.out = own(&p, device_alloc(bytes + GUARD, 0xff));
        multiply(&plain, MOE_CUDA_TILE_EVEN);
        char *want = result(&plain), *stored = malloc(bytes);
        assert_non_null(stored);
        size_t room = (size_t)pre.rows * 2 * p.g.n * sizeof(float);
        memset(want + room, 0xff, bytes - room);
        for (int tile = 0; tile < 2; tile++) {
            enum moe_cuda_gemm_tile t = tile == 0 ? MOE_CUDA_TILE_DECODE : MOE_CUDA_TILE_EVEN;
            p.g.pre = NULL;
            multiply(&p, t);
            char *without = result(&p);
            assert_int_equal(cudaMemset(pre.data, 0xff, bytes), cudaSuccess);
            p.g.pre = there;
            multiply(&p, t);
            char *with = result(&p);
            assert_memory_equal(without, with, p.out_bytes);
            assert_int_equal(cudaMemcpy(stored, pre.data, bytes, cudaMemcpyDeviceToHost), 0);
            if (memcmp(stored, want, bytes) != 0)
                fail_msg("%s, tile %d: stored gate and up differ", name_of(&formats[i]), tile);
            free(without);
            free(with);
        }
        free(want);
        free(stored);
        release(&p);
    }
}

static void check_hidden(const struct problem *p, const uint8_t *got, const float *fp32)
{
    const struct moe_cuda_ggemm *g = &p->g;
    uint32_t stride = moe_cuda_quantised_stride(g->n), groups = moe_cuda_quantised_steps(g->n);
    const float *scales =
        (const float *)(const void *)(got + moe_cuda_quantised_offset(g->row_capacity, g->n));
    float x[512], codes[512], scale[4];
    for (uint32_t row = 0; row < g->row_capacity; row++) {
        bool real = false;
        for (uint32_t e = 0; e < g->experts; e++)
            real = real || (row >= p->start[e] && row - p->start[e] < p->count[e]);
        if (!real) {
            for (uint32_t c = 0; c < stride; c++)
                assert_int_equal(got[(size_t)row * stride + c], 0xff);
            continue;
        }
        memcpy(x, fp32 + (size_t)row * g->n, g->n * sizeof *x);
        quantise_row(p->format, g->n, x, codes, scale);
        for (uint32_t c = 0; c < stride; c++) {
            float code = moe_e4m3_to_f32(got[(size_t)row * stride + c]);
            float s = scales[(size_t)(c / 128) * moe_cuda_quantised_scales(g->row_capacity) + row];
            if (code != (c < g->n ? codes[c] : 0) || s != scale[c / 128])
                fail_msg("%s, tile %d, %u experts, %u x %u: row %u of %u, column %u: code %g, not "
                         "%g; scale %g, not %g; %u groups",
                         name_of(p->format), (int)g->tile, g->experts, g->n, g->k, row,
                         g->row_capacity, c, (double)code, (double)codes[c], (double)s,
                         (double)scale[c / 128], groups);
        }
    }
}

/* The same bits as fp32 results that are quantised afterwards, in both tiles, also of up alone. */
static void gate_and_up_leave_quantised_hidden_rows(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 12 * FORMATS; c++) {
        const struct moe_weight_format *f = &formats[c % FORMATS];
        const bool up_alone = c / FORMATS % 2 == 1;
        struct problem p = {.format = f,
                            .g = {.gated = !up_alone,
                                  .relu2 = up_alone,
                                  .experts = 1 + random_below(5),
                                  .n = 8 * (1 + random_below(60)),
                                  .k = 8 * (1 + random_below(60)),
                                  .weighting = (enum moe_weighting)random_below(3),
                                  .activation = (enum moe_activation)random_below(MOE_ACT_RELU2),
                                  .limit = 1.5f,
                                  .alpha = 1.702f,
                                  .out_dtype = MOE_DTYPE_F32}};
        if (f->activations == MOE_ACTIVATIONS_PLAIN || f->block_columns == 0)
            continue;
        (void)random_groups(p.g.experts, 500, random_below(2) == 0, p.start, p.count);
        p.g.row_capacity = align_groups(&p);
        (void)make(&p);
        multiply(&p, MOE_CUDA_TILE_EVEN);
        float *fp32 = (float *)(void *)result(&p);
        p.out_bytes = moe_cuda_quantised_bytes(p.g.row_capacity, p.g.n);
        p.g.out = own(&p, device_alloc(p.out_bytes + GUARD, 0xff));
        p.g.out_activations = f->activations;
        for (int tile = 0; tile < 2; tile++) {
            multiply(&p, tile == 0 ? MOE_CUDA_TILE_DECODE : MOE_CUDA_TILE_EVEN);
            char *got = result(&p);
            check_hidden(&p, (const uint8_t *)got, fp32);
            free(got);
        }
        free(fp32);
        release(&p);
    }
}

/* One expert with 4,096 rows; then its last rows alone, with either tile. */
static void a_row_has_the_same_bits_in_any_number_of_rows(void **state)
{
    (void)state;
    enum { ROWS = 4096 };
    static const uint32_t fewer[] = {1, 3, 8, 17, 33, 64, 65, 128, 200, 1000};
    for (int c = 0; c < 2 * FORMATS; c++) {
        const struct moe_weight_format *f = &formats[c / 2];
        const bool back = c % 2 != 0;
        if (back && f->activations != MOE_ACTIVATIONS_PLAIN)
            continue;
        struct problem p = {.format = f,
                            .count = {ROWS},
                            .g = {.gated = !back && c / 2 % 2 == 0,
                                  .back = back,
                                  .experts = 1,
                                  .row_capacity = ROWS,
                                  .n = 264,
                                  .k = 520,
                                  .weighting = MOE_WEIGHT_OUTPUT_EARLY,
                                  .activation = MOE_ACT_SWIGLU,
                                  .out_dtype = MOE_DTYPE_BF16}};
        (void)make(&p);
        multiply(&p, MOE_CUDA_TILE_EVEN);
        char *all = result(&p);
        for (size_t j = 0; j < sizeof fewer / sizeof *fewer; j++) {
            uint32_t start = (ROWS - fewer[j]) / 4 * 4;
            assert_int_equal(cudaMemcpy((void *)p.g.start, &start, 4, cudaMemcpyHostToDevice), 0);
            assert_int_equal(cudaMemcpy((void *)p.g.count, &fewer[j], 4, cudaMemcpyHostToDevice),
                             0);
            for (int tile = 0; tile < 2; tile++) {
                multiply(&p, tile == 0 ? MOE_CUDA_TILE_DECODE : MOE_CUDA_TILE_EVEN);
                char *part = result(&p);
                size_t from = (size_t)start * p.g.n * 2;
                assert_memory_equal(all + from, part + from, (size_t)fewer[j] * p.g.n * 2);
                free(part);
            }
        }
        free(all);
        release(&p);
    }
}

/* Rows of the unit matrix: each result is one element. */
static void each_element_has_its_value(void **state)
{
    (void)state;
    enum { N = 136, K = 328 };
    for (int i = 0; i < 2 * FORMATS; i++) {
        const struct moe_weight_format *f = &formats[i / 2];
        const bool back = i % 2 != 0;
        if (back && f->activations != MOE_ACTIVATIONS_PLAIN)
            continue;
        struct problem p = {.format = f,
                            .count = {K},
                            .g = {.back = back,
                                  .experts = 1,
                                  .row_capacity = K,
                                  .n = N,
                                  .k = K,
                                  .weighting = MOE_WEIGHT_INPUT,
                                  .out_dtype = MOE_DTYPE_F32}};
        (void)make(&p);
        p.g.has_bias = false;
        uint16_t *unit = calloc((size_t)K * K, sizeof *unit);
        float *want = malloc((size_t)N * K * sizeof *want), worst = 0;
        assert_true(unit != NULL && want != NULL);
        for (size_t c = 0; c < K; c++)
            unit[c * K + c] = cut_to_bf16(1);
        assert_int_equal(cudaMemcpy(p.x, unit, (size_t)K * K * 2, cudaMemcpyHostToDevice), 0);
        if (p.alike != NULL)
            quantise_rows(&p);
        assert_int_equal(
            cudaMemcpy(want, p.plain.data, (size_t)N * K * sizeof *want, cudaMemcpyDeviceToHost),
            0);
        for (int tile = 0; tile < 2; tile++) {
            multiply(&p, tile == 0 ? MOE_CUDA_TILE_DECODE : MOE_CUDA_TILE_EVEN);
            char *bytes = result(&p);
            const float *got = (const float *)bytes;
            for (size_t r = 0; r < N; r++)
                for (size_t c = 0; c < K; c++) {
                    float w = want[back ? c * N + r : r * K + c];
                    float off = fabsf(got[c * N + r] - w) / fabsf(w);
                    if (w == 0 ? got[c * N + r] != 0 : !(off < 2e-6f))
                        fail_msg("%s, tile %d, %s, column %zu of row %zu: %.9g instead of %.9g",
                                 name_of(f), tile, form_name[p.g.back ? BACK : PLAIN], r, c,
                                 (double)got[c * N + r], (double)w);
                    worst = w == 0 ? worst : fmaxf(worst, off);
                }
            free(bytes);
        }
        printf("  %-28s %s: worst element, relative: %.1e\n", name_of(f),
               form_name[back ? BACK : PLAIN], (double)worst);
        free(unit);
        free(want);
        release(&p);
    }
}

/* A row with one NaN, or one infinity, is NaN in all columns; its neighbours are as without it. */
static void a_row_with_a_nan_keeps_it_to_itself(void **state)
{
    (void)state;
    static const uint16_t bad[] = {0x7fc0, 0x7f80, 0xff80};
    for (int i = 0; i < FORMATS; i++) {
        if (formats[i].activations == MOE_ACTIVATIONS_PLAIN)
            continue;
        struct problem p = {.format = &formats[i],
                            .count = {40},
                            .g = {.experts = 1,
                                  .row_capacity = 40,
                                  .n = 72,
                                  .k = 264,
                                  .weighting = MOE_WEIGHT_OUTPUT_LATE,
                                  .out_dtype = MOE_DTYPE_F32}};
        (void)make(&p);
        multiply(&p, MOE_CUDA_TILE_EVEN);
        float *sound = (float *)result(&p);
        for (size_t b = 0; b < sizeof bad / sizeof *bad; b++) {
            char *cell = (char *)p.x + ((size_t)17 * p.g.k + 200) * 2;
            assert_int_equal(cudaMemcpy(cell, &bad[b], 2, cudaMemcpyHostToDevice), 0);
            quantise_rows(&p);
            multiply(&p, MOE_CUDA_TILE_EVEN);
            float *got = (float *)result(&p);
            for (uint32_t r = 0; r < 40; r++)
                for (uint32_t c = 0; c < p.g.n; c++)
                    if (r == 17 ? !isnan(got[r * p.g.n + c])
                                : got[r * p.g.n + c] != sound[r * p.g.n + c])
                        fail_msg("%s, value %x: row %u, column %u is %g, was %g", name_of(p.format),
                                 bad[b], r, c, (double)got[r * p.g.n + c],
                                 (double)sound[r * p.g.n + c]);
            free(got);
        }
        free(sound);
        release(&p);
    }
}

enum part { ELEMENT, SCALE, ZERO };

/* Whether a matrix with these bits as a byte of its elements, or as its scale or zero point number
 * 3, has a place. */
static uint32_t report(const struct moe_weight_format *f, enum part part, uint32_t bits)
{
    enum { N = 40, K = 264 };
    struct quantised q = random_matrix(f, N, K);
    size_t each = moe_scale_bytes(f->scale);
    uint8_t *scales = q.bytes + q.sizes.elements, *zeros = scales + q.sizes.scales;
    memcpy(part == ELEMENT ? q.bytes + 7 * q.sizes.row_bytes + 31
           : part == SCALE ? scales + 3 * each
                           : zeros + 3,
           &bits, part == SCALE ? each : 1);
    enum moe_cuda_packing packing = moe_cuda_packing_of(f);
    uint32_t *wrong = device_alloc(sizeof *wrong, 0), reported;
    struct moe_cuda_packed_weight w = {.packing = packing,
                                       .entry =
                                           device_alloc(moe_cuda_packed_bytes(packing, N, K), 0),
                                       .rows = N,
                                       .columns = K,
                                       .global = 1,
                                       .wrong = wrong};
    put_matrix(&w, f, &q);
    assert_int_equal(cudaMemcpy(&reported, wrong, sizeof reported, cudaMemcpyDeviceToHost), 0);
    assert_int_equal(cudaFree(w.entry), cudaSuccess);
    assert_int_equal(cudaFree(wrong), cudaSuccess);
    free(q.bytes);
    return reported;
}

static void a_value_that_a_block_cannot_hold_is_reported(void **state)
{
    (void)state;
    static const struct moe_weight_format mxfp8 = {.encoding = MOE_ENC_F8E4M3,
                                                   .block_rows = 1,
                                                   .block_columns = 32,
                                                   .scale = MOE_SCALE_E8M0},
                                          nvfp4 = {.encoding = MOE_ENC_E2M1,
                                                   .block_rows = 1,
                                                   .block_columns = 16,
                                                   .scale = MOE_SCALE_E4M3},
                                          int4 = {.encoding = MOE_ENC_INT4,
                                                  .block_rows = 1,
                                                  .block_columns = 128,
                                                  .scale = MOE_SCALE_F32,
                                                  .zero_points = true},
                                          int4_group = {.encoding = MOE_ENC_INT4,
                                                        .block_rows = 1,
                                                        .block_columns = 32,
                                                        .scale = MOE_SCALE_BF16};
    static const struct {
        const struct moe_weight_format *format;
        enum part part;
        uint32_t bits, wrong;
    } cases[] = {
        {&mxfp8, ELEMENT, 0x11, 0},
        {&mxfp8, ELEMENT, 0xff, 1}, /* NaN */
        {&mxfp8, SCALE, 127 + 65, 0},
        {&mxfp8, SCALE, 127 + 66, 1},
        {&nvfp4, SCALE, 0x01, 0},
        {&nvfp4, SCALE, 0x7e, 0},
        {&nvfp4, SCALE, 0x00, 1},
        {&nvfp4, SCALE, 0x7f, 1},
        {&nvfp4, SCALE, 0x81, 1},
        {&nvfp4, SCALE, 0xfe, 1},
        {&int4, ZERO, 16, 0},
        {&int4, ZERO, 17, 1},
        {&int4, SCALE, 0x4d000000, 0}, /* 2^27 */
        {&int4, SCALE, 0xcd000001, 1},
        {&int4, SCALE, 0x7fc00000, 1},
        {&int4_group, SCALE, 0xcd00, 0}, /* -2^27 */
        {&int4_group, SCALE, 0x4d01, 1},
        {&int4_group, SCALE, 0x7fc0, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (report(cases[i].format, cases[i].part, cases[i].bits) != cases[i].wrong)
            fail_msg("%s, part %d, bits 0x%x: not reported as expected", name_of(cases[i].format),
                     (int)cases[i].part, cases[i].bits);
}

/* ------------------------------------------------------------------------- layer */

enum { HIDDEN = 136, INNER = 72, EXPERTS = 3, ALIGN = MOE_ROW_ALIGN };

static const struct moe_backend *const backend = &moe_backend_cuda;

struct layer_case {
    struct moe_layer_spec spec;
    struct quantised gate[EXPERTS], up[EXPERTS], down[EXPERTS];
    struct moe_layer *layer;
};

static void upload(struct layer_case *c, struct moe_device *device,
                   const struct moe_weight_format *f)
{
    uint32_t offset[EXPERTS + 1];
    uint16_t slot[EXPERTS] = {0};
    for (uint32_t e = 0; e <= EXPERTS; e++)
        offset[e] = e;
    struct moe_placement placement = {
        .slots = 1, .experts = EXPERTS, .offset = offset, .slot = slot};
    c->spec = (struct moe_layer_spec){
        .hidden = HIDDEN,
        .intermediate = INNER,
        .experts = EXPERTS,
        .activation = MOE_ACT_SWIGLU,
        .weighting = MOE_WEIGHT_OUTPUT_LATE,
        .router = {.top_k = 1, .groups = 1, .topk_group = 1, .group_best = 1, .scale = 1},
        .routed_format = *f};
    ok(backend->layer_create(device, &c->spec, &placement, 0, &c->layer));
    float *router = calloc(EXPERTS * HIDDEN, sizeof *router);
    assert_non_null(router);
    ok(backend->layer_upload(c->layer, MOE_WEIGHT_ROUTER, 0, MOE_DTYPE_F32, router,
                             EXPERTS * HIDDEN * sizeof *router));
    free(router);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        c->gate[e] = random_matrix(f, INNER, HIDDEN);
        c->up[e] = random_matrix(f, INNER, HIDDEN);
        c->down[e] = random_matrix(f, HIDDEN, INNER);
        ok(backend->layer_upload_packed(c->layer, MOE_WEIGHT_GATE, e, &c->gate[e].m));
        ok(backend->layer_upload_packed(c->layer, MOE_WEIGHT_UP, e, &c->up[e].m));
        ok(backend->layer_upload_packed(c->layer, MOE_WEIGHT_DOWN, e, &c->down[e].m));
        struct moe_status twice =
            backend->layer_upload_packed(c->layer, MOE_WEIGHT_DOWN, e, &c->down[e].m);
        assert_int_equal(twice.code, MOE_ALREADY_EXISTS);
    }
    ok(backend->layer_finish(c->layer));
}

static double dot(const struct moe_weight_format *f, const struct quantised *q, size_t row,
                  const float *x)
{
    double sum = 0;
    for (size_t i = 0; i < q->columns; i++)
        sum += (double)value_of(f, q, row, i) * (double)x[i];
    return sum;
}

/* W8A8: what the products of the two parts multiply. */
static void quantise_alike(const struct moe_weight_format *f, uint32_t rows, float *x, float *h)
{
    for (uint32_t r = 0; r < rows && f->activations != MOE_ACTIVATIONS_PLAIN; r++) {
        quantise_row(f, HIDDEN, x + (size_t)r * HIDDEN, NULL, NULL);
        quantise_row(f, INNER, h + (size_t)r * INNER, NULL, NULL);
    }
}

/* Rows as the layer's dispatch brings them; `r` has tokens. Returns memory that `r` uses, or NULL.
 */
static void *as_dispatched(const struct layer_case *c, enum moe_dtype dtype, uint32_t rows,
                           struct moe_rows *r)
{
    const struct moe_row_format row = moe_row_format(&c->spec, dtype);
    if (!row.quantised)
        return NULL;
    void *quantised = device_alloc(rows * row.bytes, 0xff);
    struct moe_cuda_quantise q = {.dtype = dtype,
                                  .x = r->x,
                                  .experts = EXPERTS,
                                  .row_capacity = rows,
                                  .columns = HIDDEN,
                                  .start = r->start,
                                  .count = r->count,
                                  .whole_rows = c->spec.routed_format.block_columns == 0,
                                  .pow2 =
                                      c->spec.routed_format.activations == MOE_ACTIVATIONS_F8_POW2,
                                  .quantised = quantised,
                                  .row_bytes = (uint32_t)row.bytes};
    ok(moe_cuda_quantise_enqueue(&q, NULL));
    finish();
    r->x = quantised;
    r->quantised = true;
    return quantised;
}

/* Relative error (Frobenius) of hidden and of out, each part with separate inputs. */
static void check_parts(struct layer_case *c, const struct moe_weight_format *f,
                        enum moe_dtype dtype, double bound)
{
    static const uint32_t counts[EXPERTS] = {5, 0, ALIGN + 1};
    uint32_t start[EXPERTS + 1] = {0, ALIGN, ALIGN, 3 * ALIGN}, rows = 3 * ALIGN;
    float *x = calloc((size_t)rows * HIDDEN, sizeof *x);
    float *h = calloc((size_t)rows * INNER, sizeof *h);
    float *hidden = malloc((size_t)rows * INNER * sizeof *hidden);
    float *out = malloc((size_t)rows * HIDDEN * sizeof *out);
    uint16_t *half = malloc((size_t)rows * HIDDEN * sizeof *half);
    float *weight = malloc(rows * sizeof *weight);
    assert_true(x && h && hidden && out && half && weight);
    for (size_t i = 0; i < (size_t)rows * HIDDEN; i++) {
        half[i] = cut_to_bf16((float)random_below(1000) / 500 - 1);
        x[i] = moe_bf16_to_f32(half[i]);
    }
    for (size_t i = 0; i < (size_t)rows * INNER; i++)
        h[i] = moe_bf16_to_f32(cut_to_bf16((float)random_below(1000) / 500 - 1));
    for (uint32_t i = 0; i < rows; i++)
        weight[i] = 0.5f;
    struct moe_rows r = {.local_experts = EXPERTS,
                         .start = to_device(start, sizeof start),
                         .count = to_device(counts, sizeof counts),
                         .x = dtype == MOE_DTYPE_F32
                                  ? to_device(x, (size_t)rows * HIDDEN * sizeof *x)
                                  : to_device(half, (size_t)rows * HIDDEN * sizeof *half),
                         .weight = to_device(weight, rows * sizeof *weight)};
    void *tokens = r.x, *quantised = as_dispatched(c, dtype, rows, &r);
    float *on_device = to_device(h, (size_t)rows * INNER * sizeof *h);
    float *hidden_d = device_alloc((size_t)rows * INNER * sizeof *hidden, 0);
    float *out_d = device_alloc((size_t)rows * HIDDEN * sizeof *out, 0);
    ok(backend->gemm_gate_up(c->layer, dtype, &r, hidden_d));
    ok(backend->gemm_down(c->layer, dtype, &r, on_device, out_d));
    assert_int_equal(
        cudaMemcpy(hidden, hidden_d, (size_t)rows * INNER * sizeof *hidden, cudaMemcpyDeviceToHost),
        0);
    assert_int_equal(
        cudaMemcpy(out, out_d, (size_t)rows * HIDDEN * sizeof *out, cudaMemcpyDeviceToHost), 0);
    quantise_alike(f, rows, x, h);
    double square[2] = {0, 0}, off[2] = {0, 0};
    for (uint32_t e = 0; e < EXPERTS; e++)
        for (uint32_t i = start[e]; i < start[e] + counts[e]; i++) {
            for (uint32_t n = 0; n < INNER; n++) {
                double g = dot(f, &c->gate[e], n, x + (size_t)i * HIDDEN);
                double want = g / (1 + exp(-g)) * dot(f, &c->up[e], n, x + (size_t)i * HIDDEN);
                double d = (double)hidden[(size_t)i * INNER + n] - want;
                square[0] += want * want;
                off[0] += d * d;
            }
            for (uint32_t n = 0; n < HIDDEN; n++) {
                double want = 0.5 * dot(f, &c->down[e], n, h + (size_t)i * INNER);
                double d = (double)out[(size_t)i * HIDDEN + n] - want;
                square[1] += want * want;
                off[1] += d * d;
            }
        }
    double up = sqrt(off[0] / square[0]), down = sqrt(off[1] / square[1]);
    printf("  %-28s %s tokens: gate and up %.2e, down %.2e\n", name_of(f),
           dtype == MOE_DTYPE_F32 ? "F32 " : "BF16", up, down);
    assert_true(up <= bound && down <= bound);
    const void *device[] = {r.start,  r.count,   tokens,   quantised,
                            r.weight, on_device, hidden_d, out_d};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        assert_int_equal(cudaFree((void *)device[i]), cudaSuccess);
    void *host[] = {x, h, hidden, out, half, weight};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++)
        free(host[i]);
}

static void a_layer_computes_with_quantised_experts(void **state)
{
    (void)state;
    struct moe_device *device;
    struct moe_device_config config = {.ordinal = 0};
    ok(backend->device_open(&config, &device));
    for (int i = 0; i < FORMATS; i++) {
        struct layer_case c = {0};
        assert_true(backend->computes(device, &formats[i]));
        upload(&c, device, &formats[i]);
        bool w8a8 = formats[i].activations != MOE_ACTIVATIONS_PLAIN;
        check_parts(&c, &formats[i], MOE_DTYPE_BF16, w8a8 ? 5e-3 : 1e-2);
        check_parts(&c, &formats[i], MOE_DTYPE_F32, 1e-5);
        backend->layer_destroy(c.layer);
        for (uint32_t e = 0; e < EXPERTS; e++) {
            free(c.gate[e].bytes);
            free(c.up[e].bytes);
            free(c.down[e].bytes);
        }
    }
    backend->device_close(device);
}

int main(int argc, char **argv)
{
    if (!ggemm_test_begin(argc, argv))
        return SKIP_CODE;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_element_has_its_value),
        cmocka_unit_test(any_shape_matches_double_precision),
        cmocka_unit_test(any_shape_in_w8a8_matches_rows_that_are_quantised_alike),
        cmocka_unit_test(gate_and_up_can_be_stored),
        cmocka_unit_test(gate_and_up_leave_quantised_hidden_rows),
        cmocka_unit_test(a_row_has_the_same_bits_in_any_number_of_rows),
        cmocka_unit_test(a_row_with_a_nan_keeps_it_to_itself),
        cmocka_unit_test(a_value_that_a_block_cannot_hold_is_reported),
        cmocka_unit_test(a_layer_computes_with_quantised_experts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
