/* SPDX-License-Identifier: Apache-2.0 */
/* The router: logits, scores, choice and weights of every token, all in fp32. A token's routing
 * depends only on the token, so it is the same in every batch.
 *
 * Each pass has a fixed number of tokens, which bounds the scratch. A pass widens rows that need
 * logits to fp32 and multiplies them by the packed router matrix. Then it converts each row of
 * logits into ids and weights. */
#include "cpu/compute/layer.h"

#include <math.h>

enum {
    PASS = 256,                        /* tokens per pass */
    MAX_CHOICES = 2 * MOE_MAX_EXPERTS, /* routed and zero experts */
};

struct router_job {
    const struct moe_layer *layer;
    enum moe_dtype dtype;
    const void *x;
    const uint8_t *mode;
    const int32_t *ids_in;
    const float *weights_in;
    int32_t *ids;
    float *weights;
    uint8_t *token_state;

    /* The current pass: `scored` tokens that need logits. */
    uint32_t scored;
    uint32_t token[PASS];
    float *x32;    /* [scored, H] */
    float *logits; /* [scored, logit_stride] */
    size_t logit_stride;
    uint32_t rows_per_item, panels_per_item;
};

static enum moe_routing_mode mode_of(const struct router_job *job, uint32_t t)
{
    return job->mode == NULL ? MOE_ROUTE_SERVER : moe_routing_of(job->mode[t]);
}

static uint32_t choices_of(const struct moe_layer *layer)
{
    return layer->spec.experts + layer->spec.router.zero_experts;
}

static void refuse_token(const struct router_job *job, uint32_t t, enum moe_token_state state)
{
    uint32_t top_k = job->layer->spec.router.top_k;
    job->token_state[t] = (uint8_t)state;
    for (uint32_t k = 0; k < top_k; k++) {
        job->ids[(size_t)t * top_k + k] = -1;
        job->weights[(size_t)t * top_k + k] = 0;
    }
}

/* --------------------------------------------------------------- one row of logits */

/* A set of choices in the total order: key descending, then id ascending. */
struct choice {
    uint32_t count;
    float key[MOE_MAX_TOP_K];
    uint32_t id[MOE_MAX_TOP_K];
};

/* Inserts an id if it is among the best. Ids come in ascending order, so an equal key goes behind
 * earlier ones. (-0 and +0 compare equal.) */
static void offer(struct choice *c, uint32_t best, float key, uint32_t id)
{
    if (c->count == best && !(key > c->key[best - 1]))
        return;
    uint32_t at = c->count < best ? c->count++ : best - 1;
    for (; at > 0 && key > c->key[at - 1]; at--) {
        c->key[at] = c->key[at - 1];
        c->id[at] = c->id[at - 1];
    }
    c->key[at] = key;
    c->id[at] = id;
}

/* Allows the `topk_group` groups with the largest sum of their `group_best` best keys. Experts of
 * other groups cannot be chosen, as with a key of minus infinity. A key of 0 would be wrong: it
 * would win against an allowed expert with a negative key. */
static void choose_groups(const struct moe_router_spec *r, uint32_t group_size, const float *key,
                          bool *allowed)
{
    /* Groups may outnumber top_k: there are up to MOE_MAX_EXPERTS of one expert each. */
    float score[MOE_MAX_EXPERTS];
    for (uint32_t g = 0; g < r->groups; g++) {
        float best[MOE_MAX_EXPERTS];
        uint32_t count = 0;
        for (uint32_t i = 0; i < group_size; i++) {
            float v = key[g * group_size + i];
            if (count == r->group_best && !(v > best[count - 1]))
                continue;
            uint32_t at = count < r->group_best ? count++ : count - 1;
            for (; at > 0 && v > best[at - 1]; at--)
                best[at] = best[at - 1];
            best[at] = v;
        }
        score[g] = 0;
        for (uint32_t i = 0; i < count; i++)
            score[g] += best[i];
        allowed[g] = false;
    }
    for (uint32_t n = 0; n < r->topk_group; n++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t g = 0; g < r->groups; g++)
            if (!allowed[g] && (best == UINT32_MAX || score[g] > score[best]))
                best = g;
        allowed[best] = true;
    }
}

static void choose(const struct moe_layer *layer, const float *key, int32_t *ids)
{
    const struct moe_router_spec *r = &layer->spec.router;
    struct choice chosen = {0};
    uint32_t choices = choices_of(layer);
    if (r->groups == 1) {
        for (uint32_t i = 0; i < choices; i++)
            offer(&chosen, r->top_k, key[i], i);
    } else {
        bool allowed[MOE_MAX_EXPERTS];
        uint32_t group_size = layer->spec.experts / r->groups;
        choose_groups(r, group_size, key, allowed);
        for (uint32_t i = 0; i < choices; i++)
            if (allowed[i / group_size])
                offer(&chosen, r->top_k, key[i], i);
    }
    MOE_INVARIANT(chosen.count == r->top_k); /* layer_create checks that there are enough */
    for (uint32_t k = 0; k < r->top_k; k++)
        ids[k] = (int32_t)chosen.id[k];
}

static void softmax(uint32_t n, const float *logit, float *p)
{
    float max = logit[0], sum = 0;
    for (uint32_t i = 1; i < n; i++)
        max = logit[i] > max ? logit[i] : max;
    for (uint32_t i = 0; i < n; i++) {
        p[i] = expf(logit[i] - max);
        sum += p[i];
    }
    for (uint32_t i = 0; i < n; i++)
        p[i] /= sum;
}

static float sqrt_softplus(float z)
{
    return sqrtf(z > 20.0f ? z : log1pf(expf(z)));
}

/* For MOE_SCORE_SOFTMAX_TOPK and MOE_SCORE_SPARSEMIXER the score is the logit until the set is
 * known.
 */
static void score_logits(enum moe_score kind, uint32_t n, const float *logit, float *score)
{
    switch (kind) {
    case MOE_SCORE_SOFTMAX: softmax(n, logit, score); break;
    case MOE_SCORE_SPARSEMIXER:
    case MOE_SCORE_SOFTMAX_TOPK: memcpy(score, logit, n * sizeof *score); break;
    case MOE_SCORE_SIGMOID:
        for (uint32_t i = 0; i < n; i++)
            score[i] = 1.0f / (1.0f + expf(-logit[i]));
        break;
    case MOE_SCORE_SQRTSOFTPLUS:
        for (uint32_t i = 0; i < n; i++)
            score[i] = sqrt_softplus(logit[i]);
        break;
    }
}

/* The weight of choice k in SparseMixer. It divides as the vendor's code, so bounds round alike. */
static float mix(const struct moe_router_spec *r, uint32_t n, const float *logit,
                 const int32_t *ids, uint32_t k)
{
    const float chosen = logit[ids[k]];
    float sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        bool earlier = false;
        for (uint32_t j = 0; j < k; j++)
            earlier |= ids[j] == (int32_t)i;
        bool far = (chosen - logit[i]) / fmaxf(fabsf(logit[i]), chosen) > 2 * r->jitter;
        if ((int32_t)i == ids[k] || !(earlier || far))
            sum += expf(logit[i] - chosen);
    }
    return 1 / sum;
}

/* Weights of the ids in `ids` (-1: none, weight 0) from the unbiased scores [choices].
 */
static void weigh(const struct moe_router_spec *r, uint32_t choices, const float *score,
                  const int32_t *ids, float *weights)
{
    float live[MOE_MAX_TOP_K], sum = 0;
    uint32_t n = 0;
    for (uint32_t k = 0; k < r->top_k; k++)
        if (ids[k] >= 0)
            live[n++] =
                r->score == MOE_SCORE_SPARSEMIXER ? mix(r, choices, score, ids, k) : score[ids[k]];
    if (r->score == MOE_SCORE_SOFTMAX_TOPK && n > 0)
        softmax(n, live, live);
    for (uint32_t i = 0; i < n; i++)
        sum += live[i];

    float divisor = 1;
    if (r->renorm == MOE_RENORM_SUM)
        divisor = sum + r->renorm_eps;
    else if (r->renorm == MOE_RENORM_CLAMPED)
        divisor = sum > r->renorm_eps ? sum : r->renorm_eps;
    if (divisor == 0)
        divisor = 1; /* every score underflowed to 0, and so does every weight */
    uint32_t next = 0;
    for (uint32_t k = 0; k < r->top_k; k++)
        weights[k] = ids[k] >= 0 ? live[next++] / divisor * r->scale : 0;
}

static bool all_finite(uint32_t n, const float *v)
{
    for (uint32_t i = 0; i < n; i++)
        if (!isfinite(v[i]))
            return false;
    return true;
}

/* Whether logits replace scores as keys, because only the order of single keys matters. Every score
 * function increases with the logit, but in fp32 it saturates and would make false ties. */
static bool logits_decide(const struct moe_router_spec *r)
{
    return !r->select_bias && (r->groups == 1 || r->group_best == 1);
}

static void route_row(struct router_job *job, uint32_t row)
{
    const struct moe_layer *layer = job->layer;
    const struct moe_router_spec *r = &layer->spec.router;
    const float *logit_bias = moe_cpu_layer_bias(layer, MOE_WEIGHT_LOGIT_BIAS, 0);
    const float *select_bias = moe_cpu_layer_bias(layer, MOE_WEIGHT_SELECT_BIAS, 0);
    uint32_t t = job->token[row], n = choices_of(layer);
    float *logit = job->logits + row * job->logit_stride;
    int32_t *ids = job->ids + (size_t)t * r->top_k;
    float score[MAX_CHOICES], key[MAX_CHOICES];

    for (uint32_t i = 0; logit_bias != NULL && i < n; i++)
        logit[i] += logit_bias[i];
    if (!all_finite(n, logit)) {
        refuse_token(job, t, MOE_TOKEN_NONFINITE_LOGITS);
        return;
    }
    score_logits(r->score, n, logit, score);
    if (mode_of(job, t) == MOE_ROUTE_SERVER) {
        memcpy(key, logits_decide(r) ? logit : score, n * sizeof *key);
        for (uint32_t i = 0; select_bias != NULL && i < n; i++)
            key[i] += select_bias[i];
        if (!all_finite(n, key)) {
            refuse_token(job, t, MOE_TOKEN_NONFINITE_LOGITS);
            return;
        }
        choose(layer, key, ids);
    } else {
        memcpy(ids, job->ids_in + (size_t)t * r->top_k, r->top_k * sizeof *ids);
    }
    weigh(r, n, score, ids, job->weights + (size_t)t * r->top_k);
    job->token_state[t] = MOE_TOKEN_OK;
}

/* ------------------------------------------------------------------------- passes */

/* Checks the caller's routing of token t; true if the token needs logits. */
static bool take_given(const struct router_job *job, uint32_t t)
{
    uint32_t top_k = job->layer->spec.router.top_k;
    int32_t choices = (int32_t)choices_of(job->layer);
    enum moe_routing_mode mode = mode_of(job, t);
    size_t first = (size_t)t * top_k;
    if (mode == MOE_ROUTE_SERVER)
        return true;
    for (size_t i = first; i < first + top_k; i++) {
        if (job->ids_in[i] < -1 || job->ids_in[i] >= choices) {
            refuse_token(job, t, MOE_TOKEN_BAD_EXPERT);
            return false;
        }
    }
    if (mode == MOE_ROUTE_IDS)
        return true;
    for (size_t i = first; i < first + top_k; i++) {
        if (job->ids_in[i] >= 0 && !isfinite(job->weights_in[i])) {
            refuse_token(job, t, MOE_TOKEN_BAD_WEIGHT);
            return false;
        }
    }
    for (size_t i = first; i < first + top_k; i++) {
        job->ids[i] = job->ids_in[i];
        job->weights[i] = job->ids_in[i] >= 0 ? job->weights_in[i] : 0;
    }
    job->token_state[t] = MOE_TOKEN_OK;
    return false;
}

static void widen_rows(void *ctx, uint32_t item)
{
    struct router_job *job = ctx;
    const struct moe_cpu_isa *isa = moe_cpu_device_isa(job->layer->device);
    size_t hidden = job->layer->spec.hidden, row_bytes = hidden * moe_dtype_bytes(job->dtype);
    uint32_t end = moe_cpu_min(job->scored, (item + 1) * job->rows_per_item);
    for (uint32_t row = item * job->rows_per_item; row < end; row++)
        isa->widen(job->dtype, hidden, (const char *)job->x + job->token[row] * row_bytes, 1.0f,
                   job->x32 + row * hidden);
}

static void multiply_panels(void *ctx, uint32_t item)
{
    struct router_job *job = ctx;
    const struct moe_cpu_matrix *router = job->layer->matrix[MOE_WEIGHT_ROUTER];
    const struct moe_cpu_isa *isa = moe_cpu_device_isa(job->layer->device);
    size_t hidden = job->layer->spec.hidden;
    uint32_t end = moe_cpu_min(router->panels, (item + 1) * job->panels_per_item);
    for (uint32_t p = item * job->panels_per_item; p < end; p++)
        moe_cpu_matrix_panel(isa, router, p, job->scored, job->x32, hidden,
                             job->logits + (size_t)p * isa->panel, job->logit_stride);
}

static void route_rows(void *ctx, uint32_t item)
{
    struct router_job *job = ctx;
    uint32_t end = moe_cpu_min(job->scored, (item + 1) * job->rows_per_item);
    for (uint32_t row = item * job->rows_per_item; row < end; row++)
        route_row(job, row);
}

static uint32_t items_of(uint32_t units, uint32_t per_item)
{
    return (units + per_item - 1) / per_item;
}

static void route_scored(struct router_job *job)
{
    struct moe_device *device = job->layer->device;
    const struct moe_cpu_matrix *router = job->layer->matrix[MOE_WEIGHT_ROUTER];
    uint64_t hidden = job->layer->spec.hidden;

    job->rows_per_item = moe_cpu_units_per_item(hidden);
    moe_cpu_parallel(device, items_of(job->scored, job->rows_per_item), widen_rows, job);
    job->panels_per_item =
        moe_cpu_units_per_item(hidden * job->scored * moe_cpu_device_isa(device)->panel);
    moe_cpu_parallel(device, items_of(router->panels, job->panels_per_item), multiply_panels, job);
    /* Scores and comparisons of one expert cost about 32 multiply-adds. */
    job->rows_per_item = moe_cpu_units_per_item((uint64_t)choices_of(job->layer) * 32);
    moe_cpu_parallel(device, items_of(job->scored, job->rows_per_item), route_rows, job);
}

static struct moe_status check_arguments(const struct router_job *job, uint32_t tokens)
{
    if (!job->layer->finished)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_MISSING,
                         "layer %u is not finished", job->layer->spec.layer);
    if (job->dtype != MOE_DTYPE_F32 && job->dtype != MOE_DTYPE_BF16)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED,
                         "tokens are neither F32 nor BF16");
    for (uint32_t t = 0; job->mode != NULL && t < tokens; t++) {
        enum moe_routing_mode mode = moe_routing_of(job->mode[t]);
        if (mode > MOE_ROUTE_IDS_WEIGHTS || (mode != MOE_ROUTE_SERVER && job->ids_in == NULL) ||
            (mode == MOE_ROUTE_IDS_WEIGHTS && job->weights_in == NULL))
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID,
                             "token %u: routing mode %u lacks its ids or weights", t, mode);
    }
    return moe_ok();
}

struct moe_status moe_cpu_router_forward(struct moe_layer *layer, enum moe_dtype dtype,
                                         uint32_t tokens, const void *x, const uint8_t *mode,
                                         const int32_t *ids_in, const float *weights_in,
                                         int32_t *ids, float *weights, uint8_t *token_state)
{
    struct router_job job = {
        .layer = layer,
        .dtype = dtype,
        .x = x,
        .mode = mode,
        .ids_in = ids_in,
        .weights_in = weights_in,
        .ids = ids,
        .weights = weights,
        .token_state = token_state,
    };
    MOE_TRY(check_arguments(&job, tokens));
    if (tokens == 0)
        return moe_ok();
    size_t rows = moe_cpu_min(tokens, PASS);
    job.logit_stride =
        (size_t)layer->matrix[MOE_WEIGHT_ROUTER]->panels * moe_cpu_device_isa(layer->device)->panel;
    void *scratch;
    MOE_TRY(moe_cpu_scratch_take(
        layer->device, rows * (layer->spec.hidden + job.logit_stride) * sizeof(float), &scratch));
    job.logits = scratch;
    job.x32 = job.logits + rows * job.logit_stride;
    for (uint32_t first = 0; first < tokens; first += moe_cpu_min(PASS, tokens - first)) {
        job.scored = 0;
        uint32_t end = first + moe_cpu_min(PASS, tokens - first);
        for (uint32_t t = first; t < end; t++)
            if (take_given(&job, t))
                job.token[job.scored++] = t;
        if (job.scored > 0)
            route_scored(&job);
    }
    moe_cpu_scratch_give(layer->device, scratch);
    return moe_ok();
}
