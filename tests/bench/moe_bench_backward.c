/* SPDX-License-Identifier: Apache-2.0 */
/* Backward passes of one line; see moe_bench.h.
 *
 * The same tokens go backward twice. First as F32 tokens, which every backend multiplies in exact
 * fp32. This gives dx, gradients of the routing weights, and gradients of some parameters; the BF16
 * pass is compared with them. Every later, timed pass must have the same bits if gradients begin as
 * zeros, and give multiples of them if gradients add up. Both also with retained forward values. */
#include "moe_bench.h"

#include "base/clock.h"
#include "base/size.h"

#include <math.h>
#include <stdlib.h>

static const double TOLERANCE = 1e-2; /* bf16 against exact, relative Frobenius */
static const double SUM_TOLERANCE = 1e-5;

enum { MAX_WATCHED = 16, RETAINED_NAME = 1 };

/* Parameters with compared gradients. */
struct watched {
    struct moe_train_key key[MAX_WATCHED];
    size_t n[MAX_WATCHED];
    float *want[MAX_WATCHED];  /* from the exact pass */
    float *first[MAX_WATCHED]; /* from the first BF16 pass */
    uint32_t count;
};

/* Tensors of a line, in memory that the device reads directly: BF16 tokens, and the same as F32. */
struct backward_trial {
    uint32_t tokens, bucket;
    void *x, *dy, *dx, *x_wide, *dy_wide, *dx_wide, *y;
    int32_t *ids;
    float *weights, *dweights, *dweights_wide;
    uint8_t *state;
    void *block;
    size_t block_bytes;
    struct watched watched;
    struct moe_trainer *trainer;
};

/* ----------------------------------------------------------------- tensors */

static void *place(char *block, size_t *at, size_t bytes)
{
    void *p = block == NULL ? NULL : block + *at;
    *at += (bytes + 255) & ~(size_t)255;
    return p;
}

static void lay_out(struct backward_trial *t, const struct moe_layer_spec *spec, char *block)
{
    size_t at = 0, n = (size_t)t->tokens * spec->hidden;
    size_t pairs = (size_t)t->tokens * spec->router.top_k;
    void **narrow[] = {&t->x, &t->dy, &t->dx, &t->y};
    void **wide[] = {&t->x_wide, &t->dy_wide, &t->dx_wide};
    for (size_t i = 0; i < sizeof narrow / sizeof *narrow; i++)
        *narrow[i] = place(block, &at, n * sizeof(uint16_t));
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        *wide[i] = place(block, &at, n * sizeof(float));
    t->ids = place(block, &at, pairs * sizeof *t->ids);
    t->weights = place(block, &at, pairs * sizeof *t->weights);
    t->dweights = place(block, &at, pairs * sizeof *t->dweights);
    t->dweights_wide = place(block, &at, pairs * sizeof *t->dweights_wide);
    t->state = place(block, &at, t->tokens);
    t->block_bytes = at > 0 ? at : 1;
}

static void fill(void *narrow, void *wide, size_t n, uint64_t seed)
{
    struct rng r = {.state = seed};
    for (size_t i = 0; i < n; i++) {
        ((uint16_t *)narrow)[i] = moe_f32_to_bf16((float)(int16_t)rng_next(&r) * 0x1p-15f);
        ((float *)wide)[i] = moe_bf16_to_f32(((const uint16_t *)narrow)[i]);
    }
}

static void take_tensors(struct bench *b, uint32_t tokens, struct backward_trial *t)
{
    const struct moe_layer_spec *spec = &b->shape->spec;
    *t = (struct backward_trial){.tokens = b->member->slot < b->plan->sources ? tokens : 0,
                                 .bucket = moe_pow2_ceil(tokens)};
    lay_out(t, spec, NULL);
    bench_require(b, "memory",
                  b->plan->backend->mem_alloc(b->device, MOE_MEM_HOST, t->block_bytes, &t->block));
    lay_out(t, spec, t->block);
    fill(t->x, t->x_wide, (size_t)t->tokens * spec->hidden, 177 + b->member->slot);
    fill(t->dy, t->dy_wide, (size_t)t->tokens * spec->hidden, 277 + b->member->slot);
}

/* A forward pass; retained if `name` is not 0. The first one gives the router's choices. */
static struct moe_step_result forward(struct bench *b, struct backward_trial *t, uint64_t name)
{
    struct moe_step_args a = {.layer = b->layer,
                              .dtype = MOE_DTYPE_BF16,
                              .bucket = t->bucket,
                              .tokens = t->tokens,
                              .x = t->x,
                              .y = t->y,
                              .ids_out = t->ids,
                              .weights_out = t->weights,
                              .token_state = t->state,
                              .retain = name};
    struct moe_step *step;
    struct moe_step_result result;
    bench_require(b, "enqueue", b->plan->backend->step_enqueue(b->session, &a, &step));
    bench_require(b, "step", b->plan->backend->step_wait(step, MOE_NEVER, &result));
    return result;
}

/* ----------------------------------------------------------- what is watched */

static void watch(struct bench *b, struct watched *w, enum moe_weight weight, uint32_t expert)
{
    size_t rows, columns;
    moe_weight_shape(&b->shape->spec, weight, &rows, &columns);
    if (rows == 0)
        return;
    w->key[w->count] = (struct moe_train_key){
        .weight = weight, .expert = expert, .part = MOE_PART_WEIGHT, .tensor = MOE_TRAIN_GRAD};
    w->n[w->count] = rows * columns;
    w->want[w->count] = bench_alloc(b, rows * columns * sizeof(float));
    w->first[w->count] = bench_alloc(b, rows * columns * sizeof(float));
    w->count++;
}

/* Watches the first and the last local expert, and everything outside experts. */
static void choose_watched(struct bench *b, struct watched *w)
{
    uint32_t first = UINT32_MAX, last = 0;
    for (uint32_t e = 0; e < b->shape->spec.experts; e++)
        if (b->homes.slot[e] == b->member->slot) {
            first = e < first ? e : first;
            last = e;
        }
    for (uint32_t i = MOE_WEIGHT_GATE; i <= MOE_WEIGHT_DOWN && first != UINT32_MAX; i++) {
        watch(b, w, (enum moe_weight)i, first);
        if (last != first)
            watch(b, w, (enum moe_weight)i, last);
    }
    watch(b, w, MOE_WEIGHT_ROUTER, 0);
    for (uint32_t i = MOE_WEIGHT_SHARED_GATE; i <= MOE_WEIGHT_SHARED_DOWN; i++)
        watch(b, w, (enum moe_weight)i, 0);
}

static void read_watched(struct bench *b, struct backward_trial *t, float *const to[MAX_WATCHED])
{
    const struct watched *w = &t->watched;
    for (uint32_t i = 0; i < w->count; i++)
        bench_require(b, "gradient",
                      b->plan->backend->training->trainer_read(t->trainer, &w->key[i], to[i],
                                                               w->n[i] * sizeof(float)));
}

/* |a - scale * b| / |scale * b| */
static double distance(size_t n, const float *a, const float *b, double scale)
{
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        double want = scale * (double)b[i], d = (double)a[i] - want;
        difference += d * d;
        norm += want * want;
    }
    return norm > 0 ? sqrt(difference / norm) : difference > 0 ? INFINITY : 0;
}

static double worse(double a, double b)
{
    return b > a || b != b ? b : a;
}

/* -------------------------------------------------------------------- passes */

static struct moe_step_result pass(struct bench *b, struct backward_trial *t, enum moe_dtype dtype,
                                   uint64_t retained)
{
    bool wide = dtype == MOE_DTYPE_F32;
    struct moe_backward_args a = {.trainer = t->trainer,
                                  .dtype = dtype,
                                  .bucket = t->bucket,
                                  .tokens = t->tokens,
                                  .x = wide ? t->x_wide : t->x,
                                  .dy = wide ? t->dy_wide : t->dy,
                                  .ids = t->ids,
                                  .accumulate = true,
                                  .dx = wide ? t->dx_wide : t->dx,
                                  .dweights = wide ? t->dweights_wide : t->dweights,
                                  .token_state = t->state,
                                  .retained = retained};
    struct moe_step *step;
    struct moe_step_result result;
    bench_require(b, "backward",
                  b->plan->backend->training->backward_enqueue(b->session, &a, &step));
    bench_require(b, "backward", b->plan->backend->step_wait(step, MOE_NEVER, &result));
    return result;
}

static void zero(struct bench *b, struct backward_trial *t)
{
    bench_require(b, "zero_grad", b->plan->backend->training->zero_grad(t->trainer));
}

/* Runs the exact pass and then the BF16 pass; returns the error of the latter. */
static double error_against_exact(struct bench *b, struct backward_trial *t)
{
    const struct watched *w = &t->watched;
    size_t hidden = b->shape->spec.hidden, n = t->tokens * hidden;
    size_t pairs = (size_t)t->tokens * b->shape->spec.router.top_k;
    zero(b, t);
    pass(b, t, MOE_DTYPE_F32, 0);
    read_watched(b, t, w->want);
    zero(b, t);
    memset(t->dx, 0xff, n * sizeof(uint16_t));
    pass(b, t, MOE_DTYPE_BF16, 0);
    read_watched(b, t, w->first);
    double error = distance(pairs, t->dweights, t->dweights_wide, 1);
    for (uint32_t i = 0; i < w->count; i++)
        error = worse(error, distance(w->n[i], w->first[i], w->want[i], 1));
    float *dx = bench_alloc(b, n * sizeof *dx);
    for (size_t i = 0; i < n; i++)
        dx[i] = moe_bf16_to_f32(((const uint16_t *)t->dx)[i]);
    error = worse(error, distance(n, dx, t->dx_wide, 1));
    free(dx);
    return error;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Fills one kind of the report with medians. False if a pass used retained values against its kind,
 * or did not use them. */
static bool time_passes(struct bench *b, struct backward_trial *t, int kind,
                        struct bench_backward_report *r)
{
    uint64_t n = b->plan->repeats;
    bool as_named = true;
    double *of[MOE_BACKWARD_STAGE_COUNT + 2];
    enum { LAYER = MOE_BACKWARD_STAGE_COUNT, WALL, SERIES };
    for (int i = 0; i < SERIES; i++)
        of[i] = bench_alloc(b, n * sizeof(double));
    for (uint64_t i = 0; i < n + BENCH_WARM_UP; i++) {
        if ((kind & BENCH_ADDS) == 0)
            zero(b, t);
        bench_meet(b);
        uint64_t start = moe_clock_ns(), at = i < BENCH_WARM_UP ? 0 : i - BENCH_WARM_UP;
        struct moe_step_result result =
            pass(b, t, MOE_DTYPE_BF16, kind & BENCH_FROM_RETAINED ? RETAINED_NAME : 0);
        of[WALL][at] = (double)(moe_clock_ns() - start) / 1e3;
        of[LAYER][at] = 0;
        for (int s = 0; s < MOE_BACKWARD_STAGE_COUNT; s++) {
            of[s][at] = (double)result.backward_ns[s] / 1e3;
            of[LAYER][at] += of[s][at];
        }
        r->rows = result.rows;
        r->on_tensor_cores = result.on_tensor_cores;
        as_named = as_named && result.used_retained == ((kind & BENCH_FROM_RETAINED) != 0);
    }
    for (int i = 0; i < SERIES; i++) {
        qsort(of[i], n, sizeof(double), by_value);
        double median = of[i][n / 2];
        *(i == LAYER  ? &r->layer_us[kind]
          : i == WALL ? &r->wall_us[kind]
                      : &r->stage_us[kind][i]) = median;
        free(of[i]);
    }
    if (r->layer_us[kind] == 0) /* the backend does not measure stages */
        r->layer_us[kind] = r->wall_us[kind];
    if (!as_named)
        fprintf(stderr, "slot %u: a timed pass %s what was retained\n", b->member->slot,
                kind & BENCH_FROM_RETAINED ? "did not use" : "used");
    return as_named;
}

/* Distance of the watched gradients from `passes` times those of the first pass; with one pass they
 * must have the same bits. */
static bool check_sum(struct bench *b, struct backward_trial *t, uint64_t passes)
{
    const struct watched *w = &t->watched;
    bool good = true;
    read_watched(b, t, w->want);
    for (uint32_t i = 0; i < w->count; i++)
        good = good && (passes == 1 ? memcmp(w->want[i], w->first[i], w->n[i] * sizeof(float)) == 0
                                    : distance(w->n[i], w->want[i], w->first[i], (double)passes) <=
                                          SUM_TOLERANCE);
    if (!good)
        fprintf(stderr, "slot %u: gradients of %llu timed passes are others\n", b->member->slot,
                (unsigned long long)passes);
    return good;
}

/* Twice the most that one step can retain on one slot. */
static uint64_t max_retained(const struct bench *b, const struct backward_trial *t)
{
    const struct moe_layer_spec *spec = &b->shape->spec;
    uint64_t rows = (uint64_t)t->bucket * b->member->slots * spec->router.top_k;
    uint64_t columns = 2 * (uint64_t)spec->intermediate;
    uint64_t shared = (uint64_t)t->bucket * 2 * spec->shared_intermediate;
    rows += (uint64_t)spec->experts * MOE_ROW_ALIGN;
    return 2 * (rows * columns + shared) * sizeof(float);
}

/* Times forward steps, without and with retaining. The last one stays retained. */
static void time_forwards(struct bench *b, struct backward_trial *t,
                          struct bench_backward_report *r)
{
    const struct moe_training *table = b->plan->backend->training;
    uint64_t n = b->plan->repeats;
    double *us = bench_alloc(b, n * sizeof *us);
    bool retained = true;
    table->retained_limit(b->device, max_retained(b, t));
    for (uint64_t name = 0; name <= RETAINED_NAME; name++) {
        for (uint64_t i = 0; i < n + BENCH_WARM_UP; i++) {
            bench_meet(b);
            struct moe_step_result result = forward(b, t, name);
            double *of = &us[i < BENCH_WARM_UP ? 0 : i - BENCH_WARM_UP];
            *of = 0;
            for (int s = 0; s < MOE_STAGE_COUNT; s++)
                *of += (double)result.stage_ns[s] / 1e3;
            retained = result.retained;
        }
        qsort(us, n, sizeof *us, by_value);
        *(name == 0 ? &r->plain_us : &r->retaining_us) = us[n / 2];
    }
    r->retained_mib = (double)table->retained_bytes(b->device) / (1 << 20);
    r->retains = retained;
    free(us);
    bench_meet(b);
}

bool bench_all_retain(const struct bench *b)
{
    bool all = true;
    for (uint32_t s = 0; s < b->member->slots; s++)
        all = all && b->plan->report[s].backward.retains;
    return all;
}

/* Measures passes that overwrite, with the first pass's bits, then passes that add, with sums of
 * them. */
static bool measure_kinds(struct bench *b, struct backward_trial *t, int kind, const void *dx,
                          struct bench_backward_report *r)
{
    size_t bytes = (size_t)t->tokens * b->shape->spec.hidden * sizeof(uint16_t);
    bool good = time_passes(b, t, kind, r) && check_sum(b, t, 1) && memcmp(dx, t->dx, bytes) == 0;
    bench_meet(b);
    if (good) {
        good = time_passes(b, t, kind | BENCH_ADDS, r) &&
               check_sum(b, t, 1 + b->plan->repeats + BENCH_WARM_UP) &&
               memcmp(dx, t->dx, bytes) == 0;
    }
    bench_meet(b);
    return good;
}

static bool measure(struct bench *b, struct backward_trial *t, struct bench_backward_report *r)
{
    size_t bytes = (size_t)t->tokens * b->shape->spec.hidden * sizeof(uint16_t);
    r->error = error_against_exact(b, t);
    bench_meet(b); /* comparing takes seconds; a wait for a peer must end sooner */
    if (!(r->error <= TOLERANCE)) {
        fprintf(stderr, "slot %u: a backward pass of %u tokens is off by %g\n", b->member->slot,
                t->tokens, r->error);
        return false;
    }
    void *first = bench_alloc(b, bytes);
    memcpy(first, t->dx, bytes);
    bool good = measure_kinds(b, t, 0, first, r);
    if (good)
        time_forwards(b, t, r);
    if (good && bench_all_retain(b))
        good = measure_kinds(b, t, BENCH_FROM_RETAINED, first, r);
    free(first);
    return good;
}

bool bench_measure_backward(struct bench *b, uint32_t tokens)
{
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_SGD};
    const struct moe_training *table = b->plan->backend->training;
    struct bench_backward_report *r = &b->plan->report[b->member->slot].backward;
    struct backward_trial t;
    take_tensors(b, tokens, &t);
    (void)forward(b, &t, 0);
    bench_require(b, "trainer", table->trainer_create(b->layer, &config, &t.trainer));
    choose_watched(b, &t.watched);
    bench_meet(b);
    bool good = measure(b, &t, r);
    table->trainer_destroy(t.trainer);
    table->retained_limit(b->device, 0);
    for (uint32_t i = 0; i < t.watched.count; i++) {
        free(t.watched.want[i]);
        free(t.watched.first[i]);
    }
    b->plan->backend->mem_free(b->device, MOE_MEM_HOST, t.block, t.block_bytes);
    return good;
}
