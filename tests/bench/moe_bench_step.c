/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs, checks and timing of one line; see moe_bench.h.
 *
 * Timed steps are checked: their y must equal, bit for bit, the y that was compared with exact
 * arithmetic before. */
#include "moe_bench.h"

#include "base/clock.h"
#include "base/size.h"
#include "oracle/oracle.h"
#include "support/median.h"

#include <math.h>
#include <stdlib.h>

enum { STEP_SLOTS = 2 };

static const double TOLERANCE = 1e-2; /* bf16 outputs against exact ones, relative Frobenius */

/* Tensors of one line, in memory that the device reads directly. */
struct trial {
    uint32_t tokens; /* of this slot: 0, or the same as on all slots with tokens */
    uint32_t bucket;
    enum bench_routing routing;
    enum moe_dtype dtype;
    void *x, *y[STEP_SLOTS];
    uint8_t *mode; /* NULL: the router chooses */
    int32_t *ids_in, *ids[STEP_SLOTS];
    float *weights_in, *weights[STEP_SLOTS];
    uint8_t *state[STEP_SLOTS];
    void *block; /* all of the above */
    size_t block_bytes;
};

/* ----------------------------------------------------------------- tensors */

static void *place(char *block, size_t *at, size_t bytes)
{
    void *p = block == NULL ? NULL : block + *at;
    *at += (bytes + 255) & ~(size_t)255;
    return p;
}

/* Sets all pointers into `block`, and block_bytes. With NULL, sets only block_bytes. */
static void lay_out(struct trial *t, const struct moe_layer_spec *spec, char *block)
{
    size_t at = 0, row = (size_t)t->tokens * spec->hidden * moe_dtype_bytes(t->dtype);
    size_t pairs = (size_t)t->tokens * spec->router.top_k;
    t->x = place(block, &at, row);
    t->mode = place(block, &at, t->tokens);
    t->ids_in = place(block, &at, pairs * sizeof *t->ids_in);
    t->weights_in = place(block, &at, pairs * sizeof *t->weights_in);
    for (int i = 0; i < STEP_SLOTS; i++) {
        t->y[i] = place(block, &at, row);
        t->ids[i] = place(block, &at, pairs * sizeof *t->ids[i]);
        t->weights[i] = place(block, &at, pairs * sizeof *t->weights[i]);
        t->state[i] = place(block, &at, t->tokens);
    }
    t->block_bytes = at > 0 ? at : 1;
}

static struct trial take_tensors(struct bench *b, uint32_t tokens, enum moe_dtype dtype)
{
    struct trial t = {.tokens = b->member->slot < b->plan->sources ? tokens : 0,
                      .bucket = moe_pow2_ceil(tokens),
                      .dtype = dtype};
    lay_out(&t, &b->shape->spec, NULL);
    bench_require(b, "memory",
                  b->plan->backend->mem_alloc(b->device, MOE_MEM_HOST, t.block_bytes, &t.block));
    lay_out(&t, &b->shape->spec, t.block);
    return t;
}

static void give_tensors(struct bench *b, struct trial *t)
{
    b->plan->backend->mem_free(b->device, MOE_MEM_HOST, t->block, t->block_bytes);
}

/* Rows depend only on slot and token. */
static void fill_x(struct bench *b, struct trial *t)
{
    struct rng r = {.state = 77 + b->member->slot};
    uint16_t *x = t->x;
    size_t n = (size_t)t->tokens * b->shape->spec.hidden; /* a multiple of 4 in every preset */
    for (size_t i = 0; i < n; i += 4) {
        uint64_t bits = rng_next(&r);
        for (size_t j = 0; j < 4; j++)
            x[i + j] = moe_f32_to_bf16((float)(int16_t)(bits >> (16 * j)) * 0x1p-15f);
    }
}

/* Cumulative probabilities of the experts, by the line's routing. */
static void chances(const struct bench *b, enum bench_routing routing, double *until)
{
    uint32_t experts = b->shape->spec.experts;
    uint16_t rank[MOE_MAX_EXPERTS] = {0};
    struct rng r = {.state = 5};
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t other = rng_below(&r, e + 1);
        rank[e] = rank[other];
        rank[other] = (uint16_t)e;
    }
    for (uint32_t e = 0; e < experts; e++) {
        double own = routing == BENCH_ZIPF       ? 1.0 / (rank[e] + 1.0)
                     : routing == BENCH_ONE_SLOT ? b->homes.slot[e] == 0
                                                 : 1.0;
        until[e] = own + (e > 0 ? until[e - 1] : 0);
    }
}

static int32_t draw(struct rng *r, const double *until, uint32_t experts)
{
    double at = (double)(rng_next(r) >> 11) * 0x1p-53 * until[experts - 1];
    uint32_t e = 0;
    while (e + 1 < experts && until[e] <= at)
        e++;
    return (int32_t)e;
}

static bool among(const int32_t *ids, uint32_t n, int32_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

static void fill_routing(struct bench *b, struct trial *t)
{
    const struct moe_layer_spec *spec = &b->shape->spec;
    uint32_t k_count = spec->router.top_k, reachable = spec->experts;
    double until[MOE_MAX_EXPERTS];
    struct rng r = {.state = 991 * (b->member->slot + 1)};
    chances(b, t->routing, until);
    if (t->routing == BENCH_ONE_SLOT)
        reachable = (uint32_t)until[spec->experts - 1];
    for (uint32_t i = 0; i < t->tokens; i++) {
        int32_t *ids = t->ids_in + (size_t)i * k_count;
        for (uint32_t k = 0; k < k_count; k++) {
            do
                ids[k] =
                    t->routing == BENCH_ONE_EXPERT && k == 0 ? 0 : draw(&r, until, spec->experts);
            while (k < reachable && among(ids, k, ids[k])); /* K different ones if there are
                                                               enough */
            t->weights_in[(size_t)i * k_count + k] =
                (1.0f + 0.25f * rng_float(&r)) / (float)k_count;
        }
    }
    memset(t->mode, MOE_ROUTE_IDS_WEIGHTS, t->tokens);
}

/* -------------------------------------------------------------------- steps */

static struct moe_step *enqueue(struct bench *b, struct trial *t, int step_slot)
{
    struct moe_step_args a = {.layer = b->layer,
                              .dtype = t->dtype,
                              .bucket = t->bucket,
                              .tokens = t->tokens,
                              .x = t->x,
                              .y = t->y[step_slot],
                              .ids_out = t->ids[step_slot],
                              .weights_out = t->weights[step_slot],
                              .token_state = t->state[step_slot]};
    if (t->mode != NULL) {
        a.mode = t->mode;
        a.ids_in = t->ids_in;
        a.weights_in = t->weights_in;
    }
    struct moe_step *step;
    bench_require(b, "enqueue", b->plan->backend->step_enqueue(b->session, &a, &step));
    return step;
}

static struct moe_step_result finish(struct bench *b, struct moe_step *step)
{
    struct moe_step_result result;
    bench_require(b, "step", b->plan->backend->step_wait(step, MOE_NEVER, &result));
    return result;
}

static void poison(const struct bench *b, struct trial *t)
{
    size_t bytes = (size_t)t->tokens * b->shape->spec.hidden * moe_dtype_bytes(t->dtype);
    for (int i = 0; i < STEP_SLOTS; i++) {
        memset(t->y[i], 0xff, bytes);
        memset(t->state[i], 0xff, t->tokens);
    }
}

/* ------------------------------------------------------------------- checks */

static uint32_t sample_count(uint32_t tokens)
{
    return tokens < BENCH_SAMPLES ? tokens : BENCH_SAMPLES;
}

/* Token index of sample i: spread over the batch, with the first and the last token. */
static uint32_t sample(const struct trial *t, uint32_t i)
{
    uint32_t n = sample_count(t->tokens);
    return n < 2 ? 0 : (uint32_t)((uint64_t)i * (t->tokens - 1) / (n - 1));
}

static double frobenius(size_t n, const uint16_t *got, const float *want)
{
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)moe_bf16_to_f32(got[i]) - (double)want[i];
        difference += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    return norm > 0 ? sqrt(difference / norm) : INFINITY;
}

/* Computes the sampled tokens again as F32 tokens, exact on every backend, with the routing of the
 * checked step. */
static double error_against_exact(struct bench *b, const struct trial *t, uint32_t tokens)
{
    size_t hidden = b->shape->spec.hidden, k = b->shape->spec.router.top_k;
    uint32_t n = sample_count(t->tokens);
    struct trial exact = take_tensors(b, sample_count(tokens), MOE_DTYPE_F32);
    float *x = exact.x;
    for (uint32_t i = 0; i < n; i++) {
        const uint16_t *from = (const uint16_t *)t->x + sample(t, i) * hidden;
        for (size_t h = 0; h < hidden; h++)
            x[i * hidden + h] = moe_bf16_to_f32(from[h]);
        memcpy(exact.ids_in + i * k, t->ids[0] + sample(t, i) * k, k * sizeof(int32_t));
        memcpy(exact.weights_in + i * k, t->weights[0] + sample(t, i) * k, k * sizeof(float));
    }
    memset(exact.mode, MOE_ROUTE_IDS_WEIGHTS, n);
    poison(b, &exact);
    finish(b, enqueue(b, &exact, 0));
    double worst = 0;
    for (uint32_t i = 0; i < n; i++) {
        double e = frobenius(hidden, (const uint16_t *)t->y[0] + sample(t, i) * hidden,
                             (const float *)exact.y[0] + i * hidden);
        worst = e > worst || e != e ? e : worst;
    }
    give_tensors(b, &exact);
    return worst;
}

static void upload_to_oracle(struct bench *b, struct moe_oracle_layer *oracle, enum moe_weight w,
                             uint32_t expert)
{
    size_t rows, columns;
    moe_weight_shape(&b->shape->spec, w, &rows, &columns);
    if (rows > 0 && bench_is_quantised(b, w)) {
        const struct moe_packed_matrix m = bench_matrix(b, w, expert);
        bench_require(b, "oracle", moe_oracle_upload_packed(oracle, w, expert, &m));
    } else if (rows > 0)
        bench_require(b, "oracle",
                      moe_oracle_upload(oracle, w, expert, MOE_DTYPE_BF16,
                                        bench_weight(b, w, expert), rows * columns * 2));
}

/* Computes one token in double precision, with only the weights that it needs. */
static double token_against_oracle(struct bench *b, const struct trial *t, uint32_t token)
{
    size_t hidden = b->shape->spec.hidden, k = b->shape->spec.router.top_k;
    struct moe_oracle_layer *oracle;
    bench_require(b, "oracle", moe_oracle_create(&b->shape->spec, &oracle));
    for (uint32_t i = 0; i < k; i++)
        for (uint32_t w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN; w++)
            upload_to_oracle(b, oracle, (enum moe_weight)w, (uint32_t)t->ids[0][token * k + i]);
    for (uint32_t w = MOE_WEIGHT_SHARED_GATE; w <= MOE_WEIGHT_SHARED_DOWN; w++)
        upload_to_oracle(b, oracle, (enum moe_weight)w, 0);
    for (uint32_t w = MOE_WEIGHT_ROUTER; w <= MOE_WEIGHT_SELECT_BIAS; w++)
        upload_to_oracle(b, oracle, (enum moe_weight)w, 0); /* required although routing is given */
    double *y = bench_alloc(b, hidden * sizeof *y);
    float *want = bench_alloc(b, hidden * sizeof *want);
    uint8_t mode = MOE_ROUTE_IDS_WEIGHTS;
    bench_require(b, "oracle",
                  moe_oracle_forward(oracle, t->dtype, 1, (const uint16_t *)t->x + token * hidden,
                                     &mode, t->ids[0] + token * k, t->weights[0] + token * k, NULL,
                                     NULL, NULL, NULL, y));
    for (size_t h = 0; h < hidden; h++)
        want[h] = (float)y[h];
    double error = frobenius(hidden, (const uint16_t *)t->y[0] + token * hidden, want);
    free(y);
    free(want);
    moe_oracle_destroy(oracle);
    return error;
}

/* Only for the first line of a shape, on slot 0, for the requested number of sampled tokens. */
static double error_against_oracle(struct bench *b, const struct trial *t)
{
    double worst = -1; /* not compared */
    uint32_t n = sample_count(t->tokens) < b->plan->oracle_tokens
                     ? sample_count(t->tokens)
                     : (uint32_t)b->plan->oracle_tokens;
    if (b->member->slot != 0 || t->tokens != b->plan->length[0])
        return worst;
    for (uint32_t i = 0; i < n; i++) {
        double e = token_against_oracle(b, t, sample(t, i));
        worst = e > worst || e != e ? e : worst;
    }
    return worst;
}

static bool check_first(struct bench *b, const struct trial *t, uint32_t tokens,
                        struct bench_slot_report *r)
{
    for (uint32_t i = 0; i < t->tokens; i++)
        if (t->state[0][i] != MOE_TOKEN_OK) {
            fprintf(stderr, "slot %u: token %u was refused (%u)\n", b->member->slot, i,
                    t->state[0][i]);
            return false;
        }
    r->exact_error = error_against_exact(b, t, tokens);
    r->oracle_error = error_against_oracle(b, t);
    bench_meet(b); /* the oracle takes seconds; a wait for a peer must end sooner */
    if (r->exact_error <= TOLERANCE && r->oracle_error <= TOLERANCE)
        return true;
    fprintf(stderr, "slot %u: %u tokens, %s: y is off by %g (exact), %g (oracle)\n",
            b->member->slot, t->tokens, bench_routing_name(t->routing), r->exact_error,
            r->oracle_error);
    return false;
}

/* ------------------------------------------------------------------- timing */

struct samples {
    double *of[MOE_STAGE_COUNT + 3]; /* stages, then layer, gemm, enqueue or wall */
    uint32_t n;
};
enum { LAYER = MOE_STAGE_COUNT, GEMM, ENQUEUE, SERIES };

static void note(struct samples *s, const struct moe_step_result *r, uint64_t enqueue_ns)
{
    double layer = 0;
    for (int i = 0; i < MOE_STAGE_COUNT; i++) {
        s->of[i][s->n] = (double)r->stage_ns[i] / 1e3;
        layer += s->of[i][s->n];
    }
    s->of[LAYER][s->n] = layer;
    s->of[GEMM][s->n] =
        s->of[MOE_STAGE_GEMM1][s->n] + s->of[MOE_STAGE_GEMM2][s->n] + s->of[MOE_STAGE_SHARED][s->n];
    s->of[ENQUEUE][s->n] = (double)enqueue_ns / 1e3;
    s->n++;
}

/* Steps one after the other; all slots start together. */
static void time_alone(struct bench *b, struct trial *t, struct samples *s,
                       struct bench_slot_report *r)
{
    for (uint64_t i = 0; i < b->plan->repeats / 2 + BENCH_WARM_UP; i++) {
        bench_meet(b);
        uint64_t start = moe_clock_ns();
        struct moe_step_result result = finish(b, enqueue(b, t, 0));
        if (i >= BENCH_WARM_UP)
            note(s, &result, moe_clock_ns() - start);
    }
    r->alone_us = median(s->of[ENQUEUE], s->n);
    r->alone_layer_us = median(s->of[LAYER], s->n);
    for (int i = 0; i < MOE_STAGE_COUNT; i++)
        r->alone_stage_us[i] = median(s->of[i], s->n);
    s->n = 0;
}

/* Two steps in flight, as the worker runs them. */
static void time_steady(struct bench *b, struct trial *t, struct samples *s,
                        struct bench_slot_report *r)
{
    uint64_t steps = b->plan->repeats + BENCH_WARM_UP, start = 0, took[STEP_SLOTS] = {0};
    struct moe_step *step[STEP_SLOTS];
    struct moe_step_result result = {0};
    bench_meet(b);
    for (uint64_t i = 0; i <= steps; i++) {
        int step_slot = (int)(i % STEP_SLOTS);
        if (i == BENCH_WARM_UP + 1)
            start = moe_clock_ns(); /* step WARM_UP - 1 has just ended */
        if (i < steps) {
            uint64_t before = moe_clock_ns();
            step[step_slot] = enqueue(b, t, step_slot);
            took[step_slot] = moe_clock_ns() - before;
        }
        if (i == 0)
            continue;
        result = finish(b, step[step_slot ^ 1]);
        if (i > BENCH_WARM_UP)
            note(s, &result, took[step_slot ^ 1]);
    }
    r->wall_us = (double)(moe_clock_ns() - start) / 1e3 / (double)b->plan->repeats;
    r->rows = result.rows;
    for (int i = 0; i < MOE_STAGE_COUNT; i++)
        r->stage_us[i] = median(s->of[i], s->n);
    r->layer_us = median(s->of[LAYER], s->n);
    r->gemm_us = median(s->of[GEMM], s->n);
    r->enqueue_us = median(s->of[ENQUEUE], s->n);
}

static void time_both(struct bench *b, struct trial *t, struct bench_slot_report *r)
{
    struct samples s = {.n = 0};
    for (int i = 0; i < SERIES; i++)
        s.of[i] = bench_alloc(b, b->plan->repeats * sizeof(double));
    time_alone(b, t, &s, r);
    time_steady(b, t, &s, r);
    for (int i = 0; i < SERIES; i++)
        free(s.of[i]);
}

/* Both step slots must hold the first step's result. */
static bool check_last(struct bench *b, const struct trial *t, const void *first)
{
    size_t bytes = (size_t)t->tokens * b->shape->spec.hidden * moe_dtype_bytes(t->dtype);
    for (int i = 0; i < STEP_SLOTS; i++)
        if (memcmp(t->y[i], first, bytes) != 0) {
            fprintf(stderr, "slot %u: %u tokens, %s: y of a timed step is another\n",
                    b->member->slot, t->tokens, bench_routing_name(t->routing));
            return false;
        }
    return true;
}

bool bench_measure(struct bench *b, uint32_t tokens, enum bench_routing routing)
{
    struct bench_slot_report *r = &b->plan->report[b->member->slot];
    struct trial t = take_tensors(b, tokens, MOE_DTYPE_BF16);
    size_t bytes = (size_t)t.tokens * b->shape->spec.hidden * moe_dtype_bytes(t.dtype);
    void *first = bench_alloc(b, bytes);
    t.routing = routing;
    fill_x(b, &t);
    if (routing == BENCH_ROUTER)
        t.mode = NULL;
    else
        fill_routing(b, &t);
    poison(b, &t);
    finish(b, enqueue(b, &t, 0));
    bool good = check_first(b, &t, tokens, r);
    memcpy(first, t.y[0], bytes);
    poison(b, &t);
    if (good) {
        time_both(b, &t, r);
        good = check_last(b, &t, first);
    }
    free(first);
    give_tensors(b, &t);
    return good;
}
