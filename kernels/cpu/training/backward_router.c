/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients through the router: from weights of choices and from the load-balance loss to logits,
 * and from logits to the router's weights and x. Formulas are in moe/training.h. Scores are
 * computed again, in double precision, because differences of nearly equal terms are frequent here.
 *
 * Each pass has a fixed number of tokens, which bounds the scratch. */
#include "cpu/compute/gemm.h"
#include "cpu/training/backward.h"

#include <math.h>

enum {
    PASS = 256,                        /* tokens per pass */
    MAX_CHOICES = 2 * MOE_MAX_EXPERTS, /* routed and zero experts */
    TOKENS_PER_ITEM = 8,
};

/* A pass of tokens; all three parts use it. */
struct router_pass {
    const struct moe_layer *layer;
    const struct moe_cpu_tokens *tokens;
    uint32_t choices;     /* E + Z */
    uint32_t rows;        /* of this pass */
    uint32_t index[PASS]; /* their tokens */
    float *x;             /* [rows, H] */
    float *wide;          /* [rows, E+Z] logits, or their cotangents */
    float *dx;            /* [rows, H], for logits_backward */
};

static struct moe_status open_pass(const struct moe_layer *layer,
                                   const struct moe_cpu_tokens *tokens, struct router_pass *p,
                                   void **scratch)
{
    size_t rows = moe_cpu_min(tokens->count, PASS);
    p->layer = layer;
    p->tokens = tokens;
    p->choices = layer->spec.experts + layer->spec.router.zero_experts;
    MOE_TRY(moe_cpu_scratch_take(
        layer->device, rows * (2 * (size_t)layer->spec.hidden + p->choices) * sizeof(float),
        scratch));
    p->x = *scratch;
    p->dx = p->x + rows * layer->spec.hidden;
    p->wide = p->dx + rows * layer->spec.hidden;
    return moe_ok();
}

static void widen_item(void *ctx, uint32_t item)
{
    const struct router_pass *p = ctx;
    size_t hidden = p->layer->spec.hidden;
    size_t row_bytes = hidden * moe_dtype_bytes(p->tokens->dtype);
    uint32_t end = moe_cpu_min(p->rows, (item + 1) * TOKENS_PER_ITEM);
    for (uint32_t r = item * TOKENS_PER_ITEM; r < end; r++)
        moe_cpu_device_isa(p->layer->device)
            ->widen(p->tokens->dtype, hidden, (const char *)p->tokens->x + p->index[r] * row_bytes,
                    1.0f, p->x + r * hidden);
}

static uint32_t items_of(const struct router_pass *p)
{
    return (p->rows + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM;
}

/* Loads the tokens of the next pass and their x in fp32. False if there are none left. */
static bool next_pass(struct router_pass *p, uint32_t *at)
{
    p->rows = moe_cpu_tokens_next(p->tokens, at, PASS, p->index);
    moe_cpu_parallel(p->layer->device, items_of(p), widen_item, p);
    return p->rows > 0;
}

static void compute_logits(const struct router_pass *p)
{
    struct moe_cpu_product product = {.factor = MOE_CPU_WEIGHT,
                                      .rows = p->rows,
                                      .k = p->layer->spec.hidden,
                                      .columns = p->choices,
                                      .x = p->x,
                                      .weight = p->layer->matrix[MOE_WEIGHT_ROUTER],
                                      .bias =
                                          moe_cpu_layer_bias(p->layer, MOE_WEIGHT_LOGIT_BIAS, 0),
                                      .scale = 1,
                                      .y = p->wide};
    moe_cpu_gemm_products(p->layer->device, &product, 1);
}

/* ---------------------------------------------------------------------- scores */

static void softmax(uint32_t n, const double *logit, double *p)
{
    double max = -INFINITY, sum = 0; /* a token without experts has n = 0 */
    for (uint32_t i = 0; i < n; i++)
        max = logit[i] > max ? logit[i] : max;
    for (uint32_t i = 0; i < n; i++) {
        p[i] = exp(logit[i] - max);
        sum += p[i];
    }
    for (uint32_t i = 0; i < n; i++)
        p[i] /= sum;
}

static double sigmoid(double z)
{
    return 1 / (1 + exp(-z));
}

/* The score of one logit and its derivative, for scores that do not depend on each other. */
static double score_of(enum moe_score kind, double z, double *slope)
{
    if (kind == MOE_SCORE_SIGMOID) {
        double s = sigmoid(z);
        *slope = s * sigmoid(-z);
        return s;
    }
    double s = sqrt(z > 20 ? z : log1p(exp(z)));
    *slope = s > 0 ? (z > 20 ? 1 : sigmoid(z)) / (2 * s) : 0;
    return s;
}

/* From the cotangents of weights to those of the scores before renormalisation and scale. */
static void renorm_backward(const struct moe_router_spec *r, uint32_t n, const double *score,
                            double *d)
{
    double sum = 0, dot = 0;
    for (uint32_t i = 0; i < n; i++) {
        d[i] *= r->scale;
        sum += score[i];
        dot += d[i] * score[i];
    }
    if (r->renorm == MOE_RENORM_NONE)
        return;
    bool constant = r->renorm == MOE_RENORM_CLAMPED && !(sum > r->renorm_eps);
    double divisor = r->renorm == MOE_RENORM_SUM ? sum + r->renorm_eps
                     : constant                  ? r->renorm_eps
                                                 : sum;
    if (divisor == 0)
        return; /* every score underflowed: the forward pass divides by 1 */
    for (uint32_t i = 0; i < n; i++)
        d[i] = d[i] / divisor - (constant ? 0 : dot / (divisor * divisor));
}

/* -------------------------------------------------------------- router backward */

struct weights_job {
    struct router_pass *pass;
    const int32_t *ids;
    const float *dweights;
    float *dlogits;
};

/* d [n]: cotangents of the scores of the choices `id`; adds to dlogit. */
static void score_backward(const struct moe_router_spec *r, uint32_t choices, const double *logit,
                           uint32_t n, const int32_t *id, const double *score, const double *d,
                           double *dlogit)
{
    if (r->score == MOE_SCORE_SOFTMAX || r->score == MOE_SCORE_SOFTMAX_TOPK) {
        double dot = 0, p[MAX_CHOICES];
        for (uint32_t i = 0; i < n; i++)
            dot += d[i] * score[i];
        for (uint32_t i = 0; i < n; i++)
            dlogit[id[i]] += score[i] * (r->score == MOE_SCORE_SOFTMAX ? d[i] : d[i] - dot);
        if (r->score == MOE_SCORE_SOFTMAX_TOPK)
            return;
        softmax(choices, logit, p);
        for (uint32_t i = 0; i < choices; i++)
            dlogit[i] -= p[i] * dot;
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        double slope;
        (void)score_of(r->score, logit[id[i]], &slope);
        dlogit[id[i]] += d[i] * slope;
    }
}

static void live_scores(const struct moe_router_spec *r, uint32_t choices, const double *logit,
                        uint32_t n, const int32_t *id, double *score)
{
    double all[MAX_CHOICES], slope;
    if (r->score == MOE_SCORE_SOFTMAX)
        softmax(choices, logit, all);
    for (uint32_t i = 0; i < n; i++)
        score[i] = r->score == MOE_SCORE_SOFTMAX        ? all[id[i]]
                   : r->score == MOE_SCORE_SOFTMAX_TOPK ? logit[id[i]]
                                                        : score_of(r->score, logit[id[i]], &slope);
    if (r->score == MOE_SCORE_SOFTMAX_TOPK && n > 0)
        softmax(n, score, score);
}

static void weights_token(const struct weights_job *job, uint32_t row)
{
    const struct router_pass *p = job->pass;
    const struct moe_router_spec *r = &p->layer->spec.router;
    size_t pair = (size_t)p->index[row] * r->top_k;
    double logit[MAX_CHOICES], dlogit[MAX_CHOICES] = {0};
    double score[MOE_MAX_TOP_K], d[MOE_MAX_TOP_K];
    int32_t id[MOE_MAX_TOP_K];
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->choices; i++)
        logit[i] = p->wide[(size_t)row * p->choices + i];
    for (uint32_t k = 0; k < r->top_k; k++) {
        if (job->ids[pair + k] < 0 || job->ids[pair + k] >= (int32_t)p->choices)
            continue;
        id[n] = job->ids[pair + k];
        d[n++] = job->dweights[pair + k];
    }
    live_scores(r, p->choices, logit, n, id, score);
    renorm_backward(r, n, score, d);
    score_backward(r, p->choices, logit, n, id, score, d, dlogit);
    float *out = job->dlogits + (size_t)p->index[row] * p->choices;
    for (uint32_t i = 0; i < p->choices; i++)
        out[i] = (float)dlogit[i];
}

static void weights_item(void *ctx, uint32_t item)
{
    const struct weights_job *job = ctx;
    uint32_t end = moe_cpu_min(job->pass->rows, (item + 1) * TOKENS_PER_ITEM);
    for (uint32_t row = item * TOKENS_PER_ITEM; row < end; row++)
        weights_token(job, row);
}

struct moe_status moe_cpu_router_backward(struct moe_trainer *t,
                                          const struct moe_cpu_tokens *tokens, const int32_t *ids,
                                          const float *dweights, float *dlogits)
{
    if (tokens->count == 0)
        return moe_ok();
    struct router_pass pass;
    void *scratch;
    MOE_TRY(open_pass(t->layer, tokens, &pass, &scratch));
    struct weights_job job = {&pass, ids, dweights, dlogits};
    for (uint32_t at = 0; next_pass(&pass, &at);) {
        compute_logits(&pass);
        moe_cpu_parallel(t->layer->device, items_of(&pass), weights_item, &job);
    }
    moe_cpu_scratch_give(t->layer->device, scratch);
    return moe_ok();
}

/* ------------------------------------------------------------ load-balance loss */

struct aux_job {
    struct router_pass *pass;
    double constant;
    const uint64_t *n; /* [E] */
    float *dlogits;
    double loss[PASS]; /* of each token of the pass */
};

/* The token's share of the loss. Its gradient by the normalised score a_e is constant * n_e. */
static void aux_token(struct aux_job *job, uint32_t row)
{
    const struct router_pass *p = job->pass;
    const struct moe_layer_spec *spec = &p->layer->spec;
    double logit[MOE_MAX_EXPERTS] = {0}, score[MOE_MAX_EXPERTS], slope[MOE_MAX_EXPERTS];
    bool soft =
        spec->router.score == MOE_SCORE_SOFTMAX || spec->router.score == MOE_SCORE_SOFTMAX_TOPK;
    double sum = 0, dot = 0;
    for (uint32_t e = 0; e < spec->experts; e++)
        logit[e] = p->wide[(size_t)row * p->choices + e];
    if (soft)
        softmax(spec->experts, logit, score);
    for (uint32_t e = 0; e < spec->experts; e++) {
        score[e] = soft ? score[e] : score_of(spec->router.score, logit[e], &slope[e]);
        sum += score[e];
    }
    double divisor = soft ? 1 : sum + 1e-20;
    for (uint32_t e = 0; e < spec->experts; e++)
        dot += score[e] / divisor * (double)job->n[e];
    float *out = job->dlogits + (size_t)p->index[row] * p->choices;
    for (uint32_t e = 0; e < spec->experts; e++) {
        double d = job->constant * ((double)job->n[e] - dot);
        out[e] += (float)(soft ? score[e] * d : d / divisor * slope[e]);
    }
    job->loss[row] = job->constant * dot;
}

static void aux_item(void *ctx, uint32_t item)
{
    struct aux_job *job = ctx;
    uint32_t end = moe_cpu_min(job->pass->rows, (item + 1) * TOKENS_PER_ITEM);
    for (uint32_t row = item * TOKENS_PER_ITEM; row < end; row++)
        aux_token(job, row);
}

struct moe_status moe_cpu_aux_backward(struct moe_trainer *t, const struct moe_cpu_tokens *tokens,
                                       const uint64_t *n, uint64_t group_tokens, float aux_coeff,
                                       float *dlogits, double *loss)
{
    if (tokens->count == 0)
        return moe_ok();
    struct router_pass pass;
    void *scratch;
    MOE_TRY(open_pass(t->layer, tokens, &pass, &scratch));
    struct aux_job job = {.pass = &pass,
                          .constant = moe_aux_constant(&t->layer->spec, aux_coeff, group_tokens),
                          .n = n,
                          .dlogits = dlogits};
    for (uint32_t at = 0; next_pass(&pass, &at);) {
        compute_logits(&pass);
        moe_cpu_parallel(t->layer->device, items_of(&pass), aux_item, &job);
        for (uint32_t r = 0; r < pass.rows; r++)
            *loss += job.loss[r];
    }
    moe_cpu_scratch_give(t->layer->device, scratch);
    return moe_ok();
}

/* ------------------------------------------------------------- logits backward */

struct scatter_job {
    const struct router_pass *pass;
    const float *dlogits;
    float *dx;
};

static void gather_item(void *ctx, uint32_t item)
{
    const struct scatter_job *job = ctx;
    const struct router_pass *p = job->pass;
    uint32_t end = moe_cpu_min(p->rows, (item + 1) * TOKENS_PER_ITEM);
    for (uint32_t r = item * TOKENS_PER_ITEM; r < end; r++)
        memcpy(p->wide + (size_t)r * p->choices, job->dlogits + (size_t)p->index[r] * p->choices,
               p->choices * sizeof(float));
}

static void scatter_item(void *ctx, uint32_t item)
{
    const struct scatter_job *job = ctx;
    const struct router_pass *p = job->pass;
    size_t hidden = p->layer->spec.hidden;
    uint32_t end = moe_cpu_min(p->rows, (item + 1) * TOKENS_PER_ITEM);
    for (uint32_t r = item * TOKENS_PER_ITEM; r < end; r++)
        for (size_t i = 0; i < hidden; i++)
            job->dx[p->index[r] * hidden + i] += p->dx[r * hidden + i];
}

static void logits_gradients(struct moe_trainer *t, const struct router_pass *p)
{
    struct moe_cpu_outer outer[2];
    uint32_t n = 0;
    float *router = moe_cpu_trainer_grad(t, MOE_WEIGHT_ROUTER, MOE_PART_WEIGHT, 0);
    float *bias = moe_cpu_trainer_grad(t, MOE_WEIGHT_LOGIT_BIAS, MOE_PART_WEIGHT, 0);
    struct moe_cpu_outer o = {.rows = p->rows, .out = p->choices, .a = p->wide, .b = p->x};
    if (router != NULL) {
        outer[n] = o;
        outer[n].in = p->layer->spec.hidden;
        outer[n++].sum = router;
    }
    if (bias != NULL) {
        outer[n] = o;
        outer[n++].sum = bias;
    }
    moe_cpu_gemm_outers(p->layer->device, outer, n);
}

struct moe_status moe_cpu_logits_backward(struct moe_trainer *t,
                                          const struct moe_cpu_tokens *tokens, bool accumulate,
                                          const float *dlogits, float *dx)
{
    if (tokens->count == 0)
        return moe_ok();
    struct moe_device *device = t->layer->device;
    struct router_pass pass;
    void *scratch;
    MOE_TRY(open_pass(t->layer, tokens, &pass, &scratch));
    struct scatter_job job = {&pass, dlogits, dx};
    for (uint32_t at = 0; next_pass(&pass, &at);) {
        moe_cpu_parallel(device, items_of(&pass), gather_item, &job);
        struct moe_cpu_product product = {.factor = MOE_CPU_WEIGHT_TRANSPOSED,
                                          .rows = pass.rows,
                                          .k = pass.choices,
                                          .columns = t->layer->spec.hidden,
                                          .x = pass.wide,
                                          .weight = t->layer->matrix[MOE_WEIGHT_ROUTER],
                                          .scale = 1,
                                          .y = pass.dx};
        moe_cpu_gemm_products(device, &product, 1);
        moe_cpu_parallel(device, items_of(&pass), scatter_item, &job);
        if (accumulate)
            logits_gradients(t, &pass);
    }
    moe_cpu_scratch_give(device, scratch);
    return moe_ok();
}
