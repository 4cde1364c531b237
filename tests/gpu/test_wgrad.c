/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the weights' gradient (kernels/cuda/gemm/ggemm_wgrad.h): correct results for any
 * shape; data between the experts' rows never counts; experts without rows get zeros or do not
 * change; the same bits on every run; and a captured launch that follows the counts. Without a
 * Hopper GPU the tests are skipped, with a message. */
#include "cuda/gemm/ggemm.h"
#include "cuda/plan/limits.h"
#include "ggemm_fixture.h"
#include "ggemm_reference.h"
#include "wgrad_reference.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_EXPERTS = 160 };

struct problem {
    struct moe_cuda_wgrad w;
    uint32_t start[MAX_EXPERTS], count[MAX_EXPERTS];
    size_t elements; /* of dw */
    float *before;   /* device: random; dw before accumulation */
    double *want;    /* device */
};

static void upload_groups(struct problem *p)
{
    size_t bytes = p->w.experts * sizeof(uint32_t);
    assert_int_equal(cudaMemcpy((void *)p->w.start, p->start, bytes, cudaMemcpyHostToDevice), 0);
    assert_int_equal(cudaMemcpy((void *)p->w.count, p->count, bytes, cudaMemcpyHostToDevice), 0);
}

/* bf16 [row_capacity, columns]. Elements without an expert are NaN; they must not change a
 * result. */
static void *make_operand(const struct problem *p, uint32_t columns, uint32_t stride, uint64_t seed,
                          float scale)
{
    uint32_t step = stride != 0 ? stride : columns;
    uint16_t *rows = device_alloc((size_t)p->w.row_capacity * step * 2, 0xff);
    for (uint32_t e = 0; e < p->w.experts; e++) {
        uint32_t pieces = step == columns ? p->count[e] > 0 : p->count[e];
        size_t each = step == columns ? (size_t)p->count[e] * columns : columns;
        for (uint32_t i = 0; i < pieces; i++)
            assert_int_equal(ggemm_fill_bf16(rows + ((size_t)p->start[e] + i) * step, each,
                                             seed + 1000 * e + i, scale),
                             0);
    }
    return rows;
}

static void make_buffers(struct problem *p)
{
    struct moe_cuda_wgrad *w = &p->w;
    uint64_t seed = random_state;
    w->dy = make_operand(p, w->n, w->dy_stride, seed, 1.0f);
    w->x = make_operand(p, w->k, w->x_stride, seed + 500, 2.0f);
    w->start = device_alloc(MAX_EXPERTS * sizeof(uint32_t), 0);
    w->count = device_alloc(MAX_EXPERTS * sizeof(uint32_t), 0);
    p->elements = (size_t)w->experts * w->n * w->k;
    w->dw = device_alloc(p->elements * sizeof(float) + GUARD, 0xff);
    p->before = device_alloc(p->elements * sizeof(float), 0);
    assert_int_equal(ggemm_fill_f32(p->before, p->elements, seed + 1000, 3.0f), 0);
    p->want = device_alloc(p->elements * sizeof(double), 0);
    upload_groups(p);
}

static void free_buffers(struct problem *p)
{
    const void *all[] = {p->w.dy, p->w.x, p->w.start, p->w.count, p->w.dw, p->before, p->want};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        assert_int_equal(cudaFree((void *)all[i]), cudaSuccess);
}

/* Sets dw before a launch: NaN if it is overwritten, else known values. */
static void prepare(struct problem *p)
{
    size_t bytes = p->elements * sizeof(float);
    assert_int_equal(cudaMemset(p->w.dw, 0xff, bytes + GUARD), cudaSuccess);
    if (p->w.accumulate)
        assert_int_equal(cudaMemcpy(p->w.dw, p->before, bytes, cudaMemcpyDeviceToDevice), 0);
}

/* The bound is the error of fp32 sums of a thousand products. */
static double check(struct problem *p)
{
    double worst;
    uint8_t guard[GUARD];
    assert_int_equal(wgrad_reference(&p->w, p->want), 0);
    assert_int_equal(wgrad_compare(&p->w, p->w.accumulate ? p->before : NULL, p->want, &worst), 0);
    if (worst > 1e-4)
        fail_msg("%u experts, %u rows, n %u, k %u, accumulate %d: worst error %g", p->w.experts,
                 p->w.row_capacity, p->w.n, p->w.k, (int)p->w.accumulate, worst);
    assert_int_equal(cudaMemcpy(guard, p->w.dw + p->elements, GUARD, cudaMemcpyDeviceToHost),
                     cudaSuccess);
    for (size_t i = 0; i < GUARD; i++)
        assert_int_equal(guard[i], 0xff);
    return worst;
}

/* dw of experts without rows: zeros, or unchanged. */
static void experts_without_rows_are_right(struct problem *p)
{
    size_t each = (size_t)p->w.n * p->w.k;
    float *got = malloc(each * sizeof *got), *before = calloc(each, sizeof *before);
    assert_true(got != NULL && before != NULL);
    for (uint32_t e = 0; e < p->w.experts; e++) {
        if (p->count[e] != 0)
            continue;
        assert_int_equal(
            cudaMemcpy(got, p->w.dw + e * each, each * sizeof *got, cudaMemcpyDeviceToHost), 0);
        if (p->w.accumulate)
            assert_int_equal(cudaMemcpy(before, p->before + e * each, each * sizeof *before,
                                        cudaMemcpyDeviceToHost),
                             0);
        assert_memory_equal(got, before, each * sizeof *got);
    }
    free(got);
    free(before);
}

static void any_shape_matches_double_precision(void **state)
{
    (void)state;
    enum { CASES = 24 };
    double worst = 0;
    for (int i = 0; i < CASES; i++) {
        struct problem p = {.w = {.experts = i == 7       ? MAX_EXPERTS
                                             : i % 8 == 7 ? 1 + random_below(MAX_EXPERTS)
                                                          : 1 + random_below(12),
                                  .n = 8 * (1 + random_below(48)),
                                  .k = 8 * (1 + random_below(48)),
                                  .accumulate = i % 2}};
        if (i % 3 == 0) { /* whole slabs, like real shapes */
            p.w.n = (p.w.n + 63) / 64 * 64;
            p.w.k = (p.w.k + 63) / 64 * 64;
        }
        if (i % 4 == 1) { /* gaps between rows */
            p.w.dy_stride = p.w.n + 8 * random_below(20);
            p.w.x_stride = p.w.k + 8 * random_below(20);
        }
        p.w.row_capacity = random_groups(p.w.experts, i % 4 == 1 || p.w.experts > 12 ? 40 : 500,
                                         random_below(2) == 0, p.start, p.count);
        make_buffers(&p);
        prepare(&p);
        ok(moe_cuda_wgrad_enqueue(&p.w, NULL));
        finish();
        double error = check(&p);
        worst = error > worst ? error : worst;
        experts_without_rows_are_right(&p);
        free_buffers(&p);
    }
    printf("  worst element of %d shapes %.2e\n", CASES, worst);
}

/* Several tiles for every block. */
static struct problem large_problem(bool accumulate)
{
    struct problem p = {.w = {.experts = 24, .n = 520, .k = 768, .accumulate = accumulate}};
    p.w.row_capacity = random_groups(p.w.experts, 700, false, p.start, p.count);
    make_buffers(&p);
    return p;
}

/* On any number of multiprocessors. */
static void every_run_gives_the_same_bits(void **state)
{
    (void)state;
    enum { RUNS = 20, MAX_PAIRS = 70 };
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        struct problem p = large_problem(accumulate);
        size_t bytes = p.elements * sizeof(float);
        char *first = malloc(bytes), *again = malloc(bytes);
        assert_true(first != NULL && again != NULL);
        for (int run = 0; run < RUNS; run++) {
            p.w.processors = run % 2 == 0 ? 0 : 2 * (1 + random_below(MAX_PAIRS));
            prepare(&p);
            ok(moe_cuda_wgrad_enqueue(&p.w, NULL));
            finish();
            assert_int_equal(
                cudaMemcpy(run == 0 ? first : again, p.w.dw, bytes, cudaMemcpyDeviceToHost), 0);
            if (run > 0)
                assert_memory_equal(first, again, bytes);
        }
        (void)check(&p);
        free(first);
        free(again);
        free_buffers(&p);
    }
}

static void a_captured_launch_follows_the_counts(void **state)
{
    (void)state;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        struct problem p = large_problem(accumulate);
        uint32_t most[MAX_EXPERTS];
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        memcpy(most, p.count, sizeof most);
        assert_int_equal(cudaStreamCreate(&stream), cudaSuccess);
        assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), 0);
        ok(moe_cuda_wgrad_enqueue(&p.w, stream));
        assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        assert_int_equal(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        for (int replay = 0; replay < 5; replay++) {
            for (uint32_t e = 0; e < p.w.experts; e++)
                p.count[e] = replay == 4 ? 0 : random_below(most[e] + 1);
            upload_groups(&p);
            prepare(&p);
            assert_int_equal(cudaGraphLaunch(exec, stream), cudaSuccess);
            finish();
            (void)check(&p);
            experts_without_rows_are_right(&p);
        }
        assert_int_equal(cudaGraphExecDestroy(exec), cudaSuccess);
        assert_int_equal(cudaGraphDestroy(graph), cudaSuccess);
        assert_int_equal(cudaStreamDestroy(stream), cudaSuccess);
        free_buffers(&p);
    }
}

static void nan_stays_in_its_expert(void **state)
{
    (void)state;
    struct problem p = large_problem(false);
    uint16_t nan = 0x7fc0;
    uint32_t e = 0;
    while (p.count[e] == 0)
        e++;
    size_t at = ((size_t)p.start[e] + p.count[e] - 1) * p.w.k + random_below(p.w.k);
    assert_int_equal(cudaMemcpy((uint16_t *)p.w.x + at, &nan, sizeof nan, cudaMemcpyHostToDevice),
                     0);
    prepare(&p);
    ok(moe_cuda_wgrad_enqueue(&p.w, NULL));
    finish();
    (void)check(&p); /* the reference has NaN in that column of that expert only */
    free_buffers(&p);
}

static void impossible_shapes_are_refused(void **state)
{
    (void)state;
    struct problem p = large_problem(false);
    struct moe_cuda_wgrad wrong[] = {p.w, p.w, p.w, p.w, p.w, p.w};
    wrong[0].n = 12;
    wrong[1].k = 0;
    wrong[2].experts = MOE_CUDA_MAX_EXPERTS + 1;
    wrong[3].row_capacity = 0;
    wrong[4].dy_stride = p.w.n + 12;
    wrong[5].processors = 3;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct moe_status st = moe_cuda_wgrad_enqueue(&wrong[i], NULL);
        assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    }
    free_buffers(&p);
}

int main(int argc, char **argv)
{
    if (!ggemm_test_begin(argc, argv))
        return SKIP_CODE;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_shape_matches_double_precision),
        cmocka_unit_test(every_run_gives_the_same_bits),
        cmocka_unit_test(a_captured_launch_follows_the_counts),
        cmocka_unit_test(nan_stays_in_its_expert),
        cmocka_unit_test(impossible_shapes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
