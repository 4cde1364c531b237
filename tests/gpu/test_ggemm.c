/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the grouped GEMM (kernels/cuda/gemm/ggemm.h), each for every tile: correct results
 * for any shape, no writes outside the experts' rows, the same bits on every run and with every
 * width, and a captured launch that follows the counts. Without a Hopper GPU the tests are skipped,
 * with a message. */
#include "cuda/plan/limits.h"

#include "ggemm_fixture.h"
#include "ggemm_reference.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_EXPERTS = MOE_CUDA_MAX_EXPERTS };

/* Products with W^T, with gate and up, with W, with up alone. */
enum form { PLAIN, GATED, BACK, UP, FORMS };
static const char *const form_name[FORMS] = {"plain", "gated", "back", "up"};
static const char *const tile_name[MOE_CUDA_TILE_COUNT] = {
    [MOE_CUDA_TILE_DECODE] = "decode",       [MOE_CUDA_TILE_EVEN] = "even",
    [MOE_CUDA_TILE_PINGPONG] = "pingpong",   [MOE_CUDA_TILE_DECODE_64] = "decode_64",
    [MOE_CUDA_TILE_DECODE_32] = "decode_32", [MOE_CUDA_TILE_EVEN_64] = "even_64"};

static void *device_copy(const void *data, size_t bytes)
{
    void *p = device_alloc(bytes, 0);
    assert_int_equal(cudaMemcpy(p, data, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return p;
}

/* Device copies for `g`, and the host's view of the groups. */
struct problem {
    struct moe_cuda_ggemm g;
    struct moe_cuda_ggemm_weights weights;
    struct moe_cuda_ggemm_weights *weights_on_device; /* `g.weights` points to this pointer */
    uint32_t start[MAX_EXPERTS], count[MAX_EXPERTS];
    size_t out_bytes;
    double *want; /* device */
};

static size_t out_size(const struct moe_cuda_ggemm *g)
{
    return (size_t)g->row_capacity * (g->out_stride != 0 ? g->out_stride : g->n) *
           moe_dtype_bytes(g->out_dtype);
}

static void upload_groups(struct problem *p)
{
    size_t bytes = p->g.experts * sizeof(uint32_t);
    assert_int_equal(cudaMemcpy((void *)p->g.start, p->start, bytes, cudaMemcpyHostToDevice), 0);
    assert_int_equal(cudaMemcpy((void *)p->g.count, p->count, bytes, cudaMemcpyHostToDevice), 0);
}

/* Fills rows one by one if they have gaps between them. */
static void fill_rows(char *x, uint32_t rows, uint32_t k, uint32_t stride, uint64_t seed)
{
    uint32_t pieces = stride == k ? (rows > 0) : rows;
    for (uint32_t i = 0; i < pieces; i++)
        assert_int_equal(ggemm_fill_bf16(x + (size_t)i * stride * 2,
                                         stride == k ? (size_t)rows * k : k, seed + i, 2.0f),
                         0);
}

/* Elements of x without an expert are NaN; they must not change a result. */
static void make_buffers(struct problem *p)
{
    struct moe_cuda_ggemm *g = &p->g;
    uint32_t stride = g->x_stride != 0 ? g->x_stride : g->k;
    size_t row = (size_t)g->k * 2, weight_rows = (size_t)g->experts * g->n * (g->gated ? 2 : 1);
    uint64_t seed = random_state;
    char *x = device_alloc((size_t)g->row_capacity * stride * 2, 0xff);
    for (uint32_t e = 0; e < g->experts; e++)
        fill_rows(x + (size_t)p->start[e] * stride * 2, p->count[e], g->k, stride, seed + 1000 * e);
    void *weights = device_alloc(weight_rows * row, 0);
    assert_int_equal(ggemm_fill_bf16(weights, weight_rows * g->k, seed + 7000, 0.2f), 0);
    float *row_weight = device_alloc(g->row_capacity * sizeof(float), 0);
    assert_int_equal(ggemm_fill_f32(row_weight, g->row_capacity, seed + 7001, 1.0f), 0);
    size_t biases = (size_t)g->experts * g->n;
    float *bias = device_alloc(biases * sizeof(float), 0);
    float *up_bias = device_alloc(biases * sizeof(float), 0);
    assert_int_equal(ggemm_fill_f32(bias, biases, seed + 7002, 3.0f), 0);
    assert_int_equal(ggemm_fill_f32(up_bias, biases, seed + 7003, 3.0f), 0);
    g->x = x;
    g->row_weight = row_weight;
    g->has_bias = true;
    uint32_t rows = g->back ? g->k : (uint32_t)(weight_rows / g->experts);
    ok(moe_cuda_ggemm_describe(weights, g->experts, rows, g->back ? g->n : g->k, &p->weights));
    p->weights.bias = bias;
    p->weights.up_bias = up_bias;
    p->weights_on_device = device_copy(&p->weights, sizeof p->weights);
    g->weights = device_copy(&p->weights_on_device, sizeof p->weights_on_device);
    g->start = device_alloc(MAX_EXPERTS * sizeof(uint32_t), 0);
    g->count = device_alloc(MAX_EXPERTS * sizeof(uint32_t), 0);
    p->out_bytes = out_size(g) + GUARD;
    g->out = device_alloc(p->out_bytes, 0xff);
    p->want = device_alloc((size_t)g->row_capacity * g->n * sizeof(double), 0);
    upload_groups(p);
}

static void free_buffers(struct problem *p)
{
    const void *all[] = {p->g.x,
                         p->weights.data,
                         p->g.row_weight,
                         p->weights.bias,
                         p->weights.up_bias,
                         p->weights_on_device,
                         (const void *)p->g.weights,
                         p->g.start,
                         p->g.count,
                         p->g.out,
                         p->want};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        assert_int_equal(cudaFree((void *)all[i]), cudaSuccess);
}

static void poison(struct problem *p)
{
    assert_int_equal(cudaMemset(p->g.out, 0xff, p->out_bytes), cudaSuccess);
}

static void guard_is_untouched(const struct problem *p)
{
    uint8_t guard[GUARD];
    const char *end = (const char *)p->g.out + out_size(&p->g);
    assert_int_equal(cudaMemcpy(guard, end, GUARD, cudaMemcpyDeviceToHost), cudaSuccess);
    for (size_t i = 0; i < GUARD; i++)
        assert_int_equal(guard[i], 0xff);
}

/* Worst error against the reference. The bound is two roundings to bf16, or, for fp32, the error of
 * sums of a thousand products and the fast exponential. */
static double check(struct problem *p)
{
    struct ggemm_difference d;
    assert_int_equal(ggemm_reference(&p->g, p->want), 0);
    assert_int_equal(ggemm_compare(&p->g, p->want, &d), 0);
    double bound = p->g.out_dtype == MOE_DTYPE_F32 ? 1e-4 : 4e-3;
    if (d.worst > bound || d.stray != 0)
        fail_msg("tile %s, %s, %u experts, %u rows, n %u, k %u, activation %d, weighting %d, bias "
                 "%d, fp32 %d: worst error %g, %llu strays",
                 tile_name[p->g.tile],
                 form_name[p->g.gated   ? GATED
                           : p->g.back  ? BACK
                           : p->g.relu2 ? UP
                                        : PLAIN],
                 p->g.experts, p->g.row_capacity, p->g.n, p->g.k, (int)p->g.activation,
                 (int)p->g.weighting, p->g.has_bias, p->g.out_dtype == MOE_DTYPE_F32, d.worst,
                 d.stray);
    guard_is_untouched(p);
    return d.worst;
}

static struct moe_cuda_ggemm random_task(enum moe_cuda_gemm_tile tile, enum form form,
                                         enum moe_dtype dtype)
{
    return (struct moe_cuda_ggemm){
        .tile = tile,
        .gated = form == GATED,
        .back = form == BACK,
        .relu2 = form == UP,
        .experts = random_below(5) == 0 ? 1 + random_below(300) : 1 + random_below(24),
        .n = 8 * (1 + random_below(80)),
        .k = 8 * (1 + random_below(100)),
        .weighting = (enum moe_weighting)random_below(3),
        .activation = (enum moe_activation)random_below(MOE_ACT_RELU2),
        .limit = 1.5f,
        .alpha = 1.702f,
        .out_dtype = dtype,
    };
}

/* The most experts of the tile, in small products. */
static struct moe_cuda_ggemm widest_task(enum moe_cuda_gemm_tile tile, enum form form,
                                         enum moe_dtype dtype)
{
    struct moe_cuda_ggemm g = random_task(tile, form, dtype);
    g.experts = moe_cuda_tile_shape(tile).experts;
    g.n = 8 * (1 + random_below(20));
    g.k = 8 * (1 + random_below(20));
    return g;
}

static void random_case(struct moe_cuda_ggemm task, double *worst)
{
    struct problem p = {.g = task};
    bool apart = random_below(3) == 0; /* gaps between rows of x and out */
    if (apart) {
        p.g.x_stride = p.g.k + 8 * random_below(20);
        p.g.out_stride = p.g.n + 8 * random_below(20);
    }
    p.g.row_capacity = random_groups(p.g.experts, apart || p.g.experts > 24 ? 40 : 500,
                                     random_below(2) == 0, p.start, p.count);
    make_buffers(&p);
    const float *row_weight = p.g.row_weight;
    p.g.has_bias = random_below(2) == 0;
    if (random_below(3) == 0)
        p.g.row_weight = NULL;
    ok(moe_cuda_ggemm_enqueue(&p.g, NULL));
    finish();
    double error = check(&p);
    if (error > *worst)
        *worst = error;
    p.g.row_weight = row_weight;
    free_buffers(&p);
}

static void any_shape_matches_double_precision(void **state)
{
    (void)state;
    enum { CASES = 12 };
    for (int tile = 0; tile < MOE_CUDA_TILE_COUNT; tile++)
        for (int variant = 0; variant < 2 * FORMS; variant++) {
            double worst = 0;
            enum moe_dtype dtype = variant % 2 == 0 ? MOE_DTYPE_BF16 : MOE_DTYPE_F32;
            for (int i = 0; i < CASES; i++)
                random_case((i == 0 ? widest_task : random_task)((enum moe_cuda_gemm_tile)tile,
                                                                 (enum form)(variant / 2), dtype),
                            &worst);
            printf("  %-9s %s %s: worst element of %d shapes %.2e\n", tile_name[tile],
                   form_name[variant / 2], variant % 2 == 0 ? "bf16" : "fp32", CASES, worst);
        }
}

/* A problem with several tiles for every block. */
static struct problem large_problem(enum moe_cuda_gemm_tile tile, enum form form)
{
    struct problem p = {.g = {.tile = tile,
                              .gated = form == GATED,
                              .back = form == BACK,
                              .relu2 = form == UP,
                              .experts = 48,
                              .n = 1032,
                              .k = 520,
                              .weighting = MOE_WEIGHT_OUTPUT_EARLY,
                              .activation = MOE_ACT_SWIGLU_OAI,
                              .limit = 7.0f,
                              .alpha = 1.702f,
                              .out_dtype = MOE_DTYPE_BF16}};
    p.g.row_capacity = random_groups(p.g.experts, 400, false, p.start, p.count);
    make_buffers(&p);
    return p;
}

static void every_run_gives_the_same_bits(void **state)
{
    (void)state;
    enum { RUNS = 30 };
    for (int variant = 0; variant < FORMS * MOE_CUDA_TILE_COUNT; variant++) {
        struct problem p =
            large_problem((enum moe_cuda_gemm_tile)(variant / FORMS), (enum form)(variant % FORMS));
        char *first = malloc(p.out_bytes), *again = malloc(p.out_bytes);
        assert_non_null(first);
        assert_non_null(again);
        for (int run = 0; run < RUNS; run++) {
            poison(&p);
            ok(moe_cuda_ggemm_enqueue(&p.g, NULL));
            finish();
            assert_int_equal(
                cudaMemcpy(run == 0 ? first : again, p.g.out, p.out_bytes, cudaMemcpyDeviceToHost),
                cudaSuccess);
            if (run > 0)
                assert_memory_equal(first, again, p.out_bytes);
        }
        (void)check(&p);
        free(first);
        free(again);
        free_buffers(&p);
    }
}

static void a_rows_bits_do_not_depend_on_its_neighbours(void **state)
{
    (void)state;
    for (int variant = 0; variant < FORMS * MOE_CUDA_TILE_COUNT; variant++) {
        struct problem p =
            large_problem((enum moe_cuda_gemm_tile)(variant / FORMS), (enum form)(variant % FORMS));
        size_t row = (size_t)p.g.n * 2;
        char *full = malloc(p.out_bytes), *part = malloc(p.out_bytes);
        assert_non_null(full);
        assert_non_null(part);
        ok(moe_cuda_ggemm_enqueue(&p.g, NULL));
        finish();
        assert_int_equal(cudaMemcpy(full, p.g.out, p.out_bytes, cudaMemcpyDeviceToHost), 0);
        for (uint32_t e = 0; e < p.g.experts; e++) /* keep a random number of each expert's last
                                                      rows */
            if (p.count[e] > 0) {
                uint32_t fewer = random_below(p.count[e] + 1);
                p.start[e] += p.count[e] - fewer;
                p.count[e] = fewer;
            }
        upload_groups(&p);
        poison(&p);
        ok(moe_cuda_ggemm_enqueue(&p.g, NULL));
        finish();
        assert_int_equal(cudaMemcpy(part, p.g.out, p.out_bytes, cudaMemcpyDeviceToHost), 0);
        for (uint32_t e = 0; e < p.g.experts; e++)
            assert_memory_equal(full + p.start[e] * row, part + p.start[e] * row, p.count[e] * row);
        free(full);
        free(part);
        free_buffers(&p);
    }
}

static void a_captured_launch_follows_the_counts(void **state)
{
    (void)state;
    for (int tile = 0; tile < MOE_CUDA_TILE_COUNT; tile++) {
        struct problem p = large_problem((enum moe_cuda_gemm_tile)tile, GATED);
        uint32_t most[MAX_EXPERTS];
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        memcpy(most, p.count, sizeof most);
        assert_int_equal(cudaStreamCreate(&stream), cudaSuccess);
        assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), 0);
        ok(moe_cuda_ggemm_enqueue(&p.g, stream));
        assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        assert_int_equal(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        for (int replay = 0; replay < 5; replay++) {
            for (uint32_t e = 0; e < p.g.experts; e++)
                p.count[e] = replay == 4 ? 0 : random_below(most[e] + 1);
            upload_groups(&p);
            poison(&p);
            assert_int_equal(cudaGraphLaunch(exec, stream), cudaSuccess);
            finish();
            (void)check(&p);
        }
        assert_int_equal(cudaGraphExecDestroy(exec), cudaSuccess);
        assert_int_equal(cudaGraphDestroy(graph), cudaSuccess);
        assert_int_equal(cudaStreamDestroy(stream), cudaSuccess);
        free_buffers(&p);
    }
}

static void nan_stays_in_its_row(void **state)
{
    (void)state;
    for (int variant = 0; variant < FORMS * MOE_CUDA_TILE_COUNT; variant++) {
        struct problem p =
            large_problem((enum moe_cuda_gemm_tile)(variant / FORMS), (enum form)(variant % FORMS));
        uint16_t nan = 0x7fc0;
        uint32_t e = 0;
        while (p.count[e] == 0)
            e++;
        size_t at = ((size_t)p.start[e] + random_below(p.count[e])) * p.g.k + random_below(p.g.k);
        assert_int_equal(
            cudaMemcpy((uint16_t *)p.g.x + at, &nan, sizeof nan, cudaMemcpyHostToDevice), 0);
        ok(moe_cuda_ggemm_enqueue(&p.g, NULL));
        finish();
        (void)check(&p); /* the reference has NaN in that row only */
        free_buffers(&p);
    }
}

/* A copy of device memory. */
static char *host_copy(const void *device, size_t bytes)
{
    char *p = malloc(bytes);
    assert_non_null(p);
    assert_int_equal(cudaMemcpy(p, device, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    return p;
}

/* Rows up to `room` are `want`; all other rows are unchanged. */
static void check_left(const struct problem *p, const char *got, const char *want, uint32_t room,
                       size_t row)
{
    char *expect = malloc(p->g.row_capacity * row);
    assert_non_null(expect);
    memset(expect, 0xff, p->g.row_capacity * row);
    for (uint32_t e = 0; e < p->g.experts; e++)
        for (uint32_t r = p->start[e]; r < p->start[e] + p->count[e] && r < room; r++)
            memcpy(expect + r * row, want + r * row, row);
    assert_memory_equal(got, expect, p->g.row_capacity * row);
    free(expect);
}

/* Computes the result again with the tile, and compares all bytes with `want`. */
static void check_bits(struct problem *p, enum moe_cuda_gemm_tile tile, const char *want)
{
    enum moe_cuda_gemm_tile wide = p->g.tile;
    p->g.tile = tile;
    poison(p);
    ok(moe_cuda_ggemm_enqueue(&p->g, NULL));
    finish();
    char *got = host_copy(p->g.out, p->out_bytes);
    if (memcmp(got, want, p->out_bytes) != 0)
        fail_msg("tile %s has other bits than %s: %u experts, n %u, k %u, gated %d, relu2 %d, fp32 "
                 "%d",
                 tile_name[tile], tile_name[wide], p->g.experts, p->g.n, p->g.k, p->g.gated,
                 p->g.relu2, p->g.out_dtype == MOE_DTYPE_F32);
    free(got);
    p->g.tile = wide;
}

/* The choice of a width depends on the size of a step, so it must not change a bit. */
static void narrow_tiles_have_the_bits_of_wide_ones(void **state)
{
    (void)state;
    enum { CASES = 6 };
    for (int tile = 0; tile < MOE_CUDA_TILE_COUNT; tile++) {
        enum moe_cuda_gemm_tile narrow = (enum moe_cuda_gemm_tile)tile;
        enum moe_cuda_gemm_tile wide = moe_cuda_wide_tile(narrow);
        for (int i = 0; wide != narrow && i < 2 * FORMS * CASES; i++) {
            enum moe_dtype dtype = i % 2 == 0 ? MOE_DTYPE_BF16 : MOE_DTYPE_F32;
            struct problem p = {.g = random_task(wide, (enum form)(i / 2 % FORMS), dtype)};
            p.g.row_capacity =
                random_groups(p.g.experts, 300, random_below(2) == 0, p.start, p.count);
            make_buffers(&p);
            ok(moe_cuda_ggemm_enqueue(&p.g, NULL));
            finish();
            char *want = host_copy(p.g.out, p.out_bytes);
            check_bits(&p, narrow, want);
            free(want);
            free_buffers(&p);
        }
    }
}

/* Stored gate and up equal the values that a backward pass would compute again. Storing them does
 * not change the result. */
static void what_is_left_is_the_plain_product(void **state)
{
    (void)state;
    for (int tile = 0; tile < MOE_CUDA_TILE_COUNT; tile++) {
        struct problem p = large_problem((enum moe_cuda_gemm_tile)tile, GATED);
        size_t row = 2 * (size_t)p.g.n * sizeof(float), bytes = p.g.row_capacity * row;
        struct moe_cuda_ggemm_pre pre = {.data = device_alloc(bytes, 0xff),
                                         .rows = p.g.row_capacity};
        struct moe_cuda_ggemm plain = p.g, leaves = p.g;
        p.g.has_bias = leaves.has_bias = tile % 2 == 0;
        leaves.weighting = p.g.weighting = MOE_WEIGHT_INPUT;
        plain.gated = plain.has_bias = false;
        plain.n = 2 * p.g.n;
        plain.row_weight = NULL;
        plain.out_dtype = MOE_DTYPE_F32;
        plain.out = device_alloc(bytes, 0xff);
        leaves.pre = device_copy(&pre, sizeof pre);
        ok(moe_cuda_ggemm_enqueue(&plain, NULL));
        ok(moe_cuda_ggemm_enqueue(&p.g, NULL));
        finish();
        char *want = host_copy(plain.out, bytes), *out = host_copy(p.g.out, p.out_bytes);
        for (int less = 0; less < 2; less++) {
            poison(&p);
            assert_int_equal(cudaMemset(pre.data, 0xff, bytes), cudaSuccess);
            pre.rows -= less == 0 ? 0 : random_below(p.g.row_capacity);
            assert_int_equal(
                cudaMemcpy((void *)leaves.pre, &pre, sizeof pre, cudaMemcpyHostToDevice), 0);
            ok(moe_cuda_ggemm_enqueue(&leaves, NULL));
            finish();
            char *left = host_copy(pre.data, bytes), *again = host_copy(p.g.out, p.out_bytes);
            check_left(&p, left, want, pre.rows, row);
            assert_memory_equal(again, out, p.out_bytes);
            free(left);
            free(again);
        }
        free(want);
        free(out);
        assert_int_equal(cudaFree(pre.data), cudaSuccess);
        assert_int_equal(cudaFree(plain.out), cudaSuccess);
        assert_int_equal(cudaFree((void *)leaves.pre), cudaSuccess);
        free_buffers(&p);
    }
}

static void impossible_shapes_are_refused(void **state)
{
    (void)state;
    struct problem p = large_problem(MOE_CUDA_TILE_DECODE, PLAIN);
    struct moe_cuda_ggemm wrong[] = {p.g, p.g, p.g, p.g, p.g, p.g, p.g, p.g, p.g, p.g, p.g, p.g};
    wrong[0].n = 12;
    wrong[1].k = 4;
    wrong[2].experts = MOE_CUDA_MAX_EXPERTS + 1;
    wrong[3].tile = MOE_CUDA_TILE_COUNT;
    wrong[4].out_dtype = MOE_DTYPE_NONE;
    wrong[5].gated = wrong[5].back = true;
    wrong[6].x_stride = p.g.k + 4;
    wrong[7].out_stride = p.g.n - 8;
    wrong[8].pre = (const struct moe_cuda_ggemm_pre *)p.g.x; /* not gated */
    wrong[9].tile = MOE_CUDA_TILE_PINGPONG;
    wrong[9].experts = MOE_CUDA_PINGPONG_EXPERTS + 1;
    wrong[10].gated = wrong[10].relu2 = true;
    wrong[11].gated = true;
    wrong[11].activation = MOE_ACT_RELU2;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct moe_status st = moe_cuda_ggemm_enqueue(&wrong[i], NULL);
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
        cmocka_unit_test(a_rows_bits_do_not_depend_on_its_neighbours),
        cmocka_unit_test(a_captured_launch_follows_the_counts),
        cmocka_unit_test(nan_stays_in_its_row),
        cmocka_unit_test(narrow_tiles_have_the_bits_of_wide_ones),
        cmocka_unit_test(what_is_left_is_the_plain_product),
        cmocka_unit_test(impossible_shapes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
