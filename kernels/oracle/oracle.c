/* SPDX-License-Identifier: Apache-2.0 */
/* The double-precision layer: weights are doubles in canonical form, and each function is one
 * formula of moe/layer_spec.h. Clarity counts more than speed. */
#include "oracle/oracle_internal.h"

#include "base/size.h"

#include <math.h>
#include <stdlib.h>

static uint32_t entries_of(const struct moe_layer_spec *spec, enum moe_weight w)
{
    return moe_weight_is_expert(w) ? spec->experts : 1;
}

struct moe_status moe_oracle_out_of_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for the oracle");
}

double moe_oracle_element(enum moe_dtype dtype, const void *data, size_t i)
{
    if (dtype == MOE_DTYPE_F32) {
        float f;
        memcpy(&f, (const char *)data + i * sizeof f, sizeof f);
        return (double)f;
    }
    uint16_t b;
    memcpy(&b, (const char *)data + i * sizeof b, sizeof b);
    return (double)moe_bf16_to_f32(b);
}

/* --------------------------------------------------------------------- weights */

struct moe_status moe_oracle_create(const struct moe_layer_spec *spec,
                                    struct moe_oracle_layer **out)
{
    struct moe_oracle_layer *layer = calloc(1, sizeof *layer);
    if (layer == NULL)
        return moe_oracle_out_of_memory();
    layer->spec = *spec;
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        layer->weight[w] = calloc(entries_of(spec, w), sizeof *layer->weight[w]);
        if (layer->weight[w] == NULL) {
            moe_oracle_destroy(layer);
            return moe_oracle_out_of_memory();
        }
    }
    *out = layer;
    return moe_ok();
}

void moe_oracle_destroy(struct moe_oracle_layer *layer)
{
    if (layer == NULL)
        return;
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        for (uint32_t i = 0; layer->weight[w] != NULL && i < entries_of(&layer->spec, w); i++)
            free(layer->weight[w][i]);
        free(layer->weight[w]);
    }
    free(layer);
}

struct moe_status moe_oracle_upload(struct moe_oracle_layer *layer, enum moe_weight weight,
                                    uint32_t expert, enum moe_dtype dtype, const void *data,
                                    size_t bytes)
{
    size_t rows, columns, count;
    uint32_t entry = moe_weight_is_expert(weight) ? expert : 0;
    moe_weight_shape(&layer->spec, weight, &rows, &columns);
    if (!moe_size_mul(rows, columns, &count) || count == 0 || moe_dtype_bytes(dtype) == 0 ||
        bytes % count != 0 || bytes / count != moe_dtype_bytes(dtype) ||
        entry >= entries_of(&layer->spec, weight))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "weight %d of expert %u with %zu bytes", (int)weight, expert, bytes);
    double *w = calloc(count, sizeof *w);
    if (w == NULL)
        return moe_oracle_out_of_memory();
    for (size_t i = 0; i < count; i++)
        w[i] = moe_oracle_element(dtype, data, i);
    free(layer->weight[weight][entry]);
    layer->weight[weight][entry] = w;
    return moe_ok();
}

struct moe_status moe_oracle_create_gradients(const struct moe_layer_spec *spec,
                                              struct moe_oracle_layer **out)
{
    MOE_TRY(moe_oracle_create(spec, out));
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        size_t rows, columns;
        moe_weight_shape(spec, w, &rows, &columns);
        for (uint32_t i = 0; rows != 0 && i < entries_of(spec, w); i++) {
            (*out)->weight[w][i] = calloc(rows * columns, sizeof(double));
            if ((*out)->weight[w][i] == NULL) {
                moe_oracle_destroy(*out);
                return moe_oracle_out_of_memory();
            }
        }
    }
    return moe_ok();
}

double *moe_oracle_weight(struct moe_oracle_layer *layer, enum moe_weight weight, uint32_t expert)
{
    uint32_t entry = moe_weight_is_expert(weight) ? expert : 0;
    return entry < entries_of(&layer->spec, weight) ? layer->weight[weight][entry] : NULL;
}

struct moe_status moe_oracle_require(const struct moe_oracle_layer *layer, enum moe_weight w,
                                     uint32_t entry)
{
    size_t rows, columns;
    moe_weight_shape(&layer->spec, w, &rows, &columns);
    if (rows != 0 && layer->weight[w][entry] == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_MISSING,
                         "weight %d of expert %u was not uploaded", (int)w, entry);
    return moe_ok();
}

/* y [rows] = W x + b; b may be NULL. */
static void linear(const double *w, const double *b, size_t rows, size_t columns, const double *x,
                   double *y)
{
    for (size_t r = 0; r < rows; r++) {
        double sum = 0;
        for (size_t c = 0; c < columns; c++)
            sum += w[r * columns + c] * x[c];
        y[r] = b != NULL ? sum + b[r] : sum;
    }
}

/* --------------------------------------------------------------------- routing */

struct candidate {
    double key;
    uint32_t id;
};

/* The total order: key descending, then id ascending. */
static int compare(const void *a, const void *b)
{
    const struct candidate *p = a, *q = b;
    if (p->key != q->key)
        return p->key > q->key ? -1 : 1;
    return p->id < q->id ? -1 : p->id > q->id;
}

static void lower(double *margin, double gap)
{
    if (margin != NULL && gap < *margin)
        *margin = gap;
}

double moe_oracle_sigmoid(double z)
{
    return 1.0 / (1.0 + exp(-z));
}

void moe_oracle_softmax(uint32_t n, const double *z, double *p)
{
    double max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++)
        max = fmax(max, z[i]);
    for (uint32_t i = 0; i < n; i++)
        sum += exp(z[i] - max);
    for (uint32_t i = 0; i < n; i++)
        p[i] = exp(z[i] - max) / sum;
}

void moe_oracle_scores(enum moe_score kind, uint32_t n, const double *logit, double *score)
{
    if (kind == MOE_SCORE_SOFTMAX)
        moe_oracle_softmax(n, logit, score);
    for (uint32_t i = 0; i < n; i++) {
        if (kind == MOE_SCORE_SOFTMAX_TOPK || kind == MOE_SCORE_SPARSEMIXER)
            score[i] = logit[i];
        else if (kind == MOE_SCORE_SIGMOID)
            score[i] = moe_oracle_sigmoid(logit[i]);
        else if (kind == MOE_SCORE_SQRTSOFTPLUS)
            score[i] = sqrt(logit[i] > 20 ? logit[i] : log1p(exp(logit[i])));
    }
}

/* Group g is allowed: its `group_best` best keys sum to one of the `topk_group` largest sums. */
static void choose_groups(const struct moe_layer_spec *spec, const double *key, bool *stays,
                          double *margin)
{
    const struct moe_router_spec *r = &spec->router;
    uint32_t size = spec->experts / r->groups;
    struct candidate group[MOE_MAX_EXPERTS], member[MOE_MAX_EXPERTS];
    for (uint32_t g = 0; g < r->groups; g++) {
        for (uint32_t i = 0; i < size; i++)
            member[i] = (struct candidate){key[g * size + i], i};
        qsort(member, size, sizeof *member, compare);
        group[g] = (struct candidate){0, g};
        for (uint32_t i = 0; i < r->group_best; i++)
            group[g].key += member[i].key;
        stays[g] = false;
    }
    qsort(group, r->groups, sizeof *group, compare);
    for (uint32_t i = 0; i < r->topk_group; i++)
        stays[group[i].id] = true;
    /* Equal sums count as a margin of 0: in other arithmetic they may differ. */
    if (r->topk_group < r->groups)
        lower(margin, group[r->topk_group - 1].key - group[r->topk_group].key);
}

static void choose(const struct moe_layer_spec *spec, const double *key, int32_t *ids,
                   double *margin)
{
    const struct moe_router_spec *r = &spec->router;
    struct candidate best[2 * MOE_MAX_EXPERTS];
    bool stays[MOE_MAX_EXPERTS];
    uint32_t n = 0;
    if (r->groups > 1)
        choose_groups(spec, key, stays, margin);
    for (uint32_t e = 0; e < spec->experts + r->zero_experts; e++)
        if (r->groups == 1 || stays[e / (spec->experts / r->groups)])
            best[n++] = (struct candidate){key[e], e};
    qsort(best, n, sizeof *best, compare);
    for (uint32_t k = 0; k < r->top_k; k++) {
        ids[k] = (int32_t)best[k].id;
        /* Skip exact ties: fp32 may tie the next key with them, and then its lower id wins. */
        uint32_t next = k + 1;
        while (next < n && best[next].key == best[k].key)
            next++;
        if (next < n)
            lower(margin, best[k].key - best[next].key);
    }
}

/* SparseMixer's weight of choice k, which is not -1: of a softmax over the logits that stay. A
 * logit near the bound may stay in other arithmetic. */
static double mix(double jitter, uint32_t n, const double *logit, const int32_t *ids, uint32_t k,
                  double *margin)
{
    double stays[2 * MOE_MAX_EXPERTS], best = logit[ids[k]];
    for (uint32_t i = 0; i < n; i++) {
        double bound = 2 * jitter * fmax(fabs(logit[i]), best);
        bool is_far = best - logit[i] > bound;
        lower(margin, fabs(best - logit[i] - bound));
        stays[i] = is_far ? -INFINITY : logit[i];
    }
    for (uint32_t i = 0; i < k; i++)
        if (ids[i] >= 0)
            stays[ids[i]] = -INFINITY;
    stays[ids[k]] = best;
    moe_oracle_softmax(n, stays, stays);
    return stays[ids[k]];
}

static void weigh(const struct moe_router_spec *r, uint32_t choices, const double *score,
                  const int32_t *ids, double *weights, double *margin)
{
    double s[MOE_MAX_TOP_K] = {0}, sum = 0, divisor = 1;
    uint32_t n = 0;
    for (uint32_t k = 0; k < r->top_k; k++)
        if (ids[k] >= 0)
            s[n++] = r->score == MOE_SCORE_SPARSEMIXER
                         ? mix((double)r->jitter, choices, score, ids, k, margin)
                         : score[ids[k]];
    if (r->score == MOE_SCORE_SOFTMAX_TOPK)
        moe_oracle_softmax(n, s, s);
    for (uint32_t i = 0; i < n; i++)
        sum += s[i];
    if (r->renorm == MOE_RENORM_SUM)
        divisor = sum + (double)r->renorm_eps;
    if (r->renorm == MOE_RENORM_CLAMPED)
        divisor = fmax(sum, (double)r->renorm_eps);
    n = 0;
    for (uint32_t k = 0; k < r->top_k; k++) {
        weights[k] = 0;
        if (ids[k] >= 0 && s[n++] != 0)
            weights[k] = s[n - 1] / divisor * (double)r->scale;
    }
}

static enum moe_token_state check_given(const struct moe_layer_spec *spec,
                                        enum moe_routing_mode mode, const int32_t *ids,
                                        const float *weights)
{
    int32_t choices = (int32_t)(spec->experts + spec->router.zero_experts);
    for (uint32_t k = 0; k < spec->router.top_k; k++)
        if (ids[k] < -1 || ids[k] >= choices)
            return MOE_TOKEN_BAD_EXPERT;
    for (uint32_t k = 0; mode == MOE_ROUTE_IDS_WEIGHTS && k < spec->router.top_k; k++)
        if (ids[k] != -1 && !isfinite(weights[k]))
            return MOE_TOKEN_BAD_WEIGHT;
    return MOE_TOKEN_OK;
}

static enum moe_token_state route_by_logits(const struct moe_layer_spec *spec, const double *logit,
                                            const double *select_bias, bool choosing, int32_t *ids,
                                            double *weights, double *margin)
{
    const struct moe_router_spec *r = &spec->router;
    uint32_t n = spec->experts + r->zero_experts;
    double score[2 * MOE_MAX_EXPERTS], key[2 * MOE_MAX_EXPERTS];
    for (uint32_t i = 0; i < n; i++)
        if (!isfinite(logit[i]))
            return MOE_TOKEN_NONFINITE_LOGITS;
    moe_oracle_scores(r->score, n, logit, score);
    /* Without a selection bias and sums of keys, the order of scores is the order of logits. */
    bool by_logit = select_bias == NULL && (r->groups == 1 || r->group_best == 1);
    for (uint32_t i = 0; i < n; i++)
        key[i] = by_logit ? logit[i] : score[i] + (select_bias != NULL ? select_bias[i] : 0);
    if (choosing)
        choose(spec, key, ids, margin);
    weigh(r, n, score, ids, weights, margin);
    return MOE_TOKEN_OK;
}

enum moe_token_state moe_oracle_route(const struct moe_layer_spec *spec, const double *logit,
                                      const double *select_bias, enum moe_routing_mode mode,
                                      const int32_t *ids_in, const float *weights_in, int32_t *ids,
                                      double *weights, double *margin)
{
    uint32_t top_k = spec->router.top_k;
    enum moe_token_state state = MOE_TOKEN_OK;
    if (margin != NULL)
        *margin = INFINITY;
    if (mode != MOE_ROUTE_SERVER) {
        state = check_given(spec, mode, ids_in, weights_in);
        memcpy(ids, ids_in, top_k * sizeof *ids);
    }
    if (state == MOE_TOKEN_OK && mode == MOE_ROUTE_IDS_WEIGHTS)
        for (uint32_t k = 0; k < top_k; k++)
            weights[k] = ids[k] == -1 ? 0 : (double)weights_in[k];
    else if (state == MOE_TOKEN_OK)
        state = route_by_logits(spec, logit, select_bias, mode == MOE_ROUTE_SERVER, ids, weights,
                                margin);
    for (uint32_t k = 0; state != MOE_TOKEN_OK && k < top_k; k++) {
        ids[k] = -1;
        weights[k] = 0;
    }
    return state;
}

struct moe_status moe_oracle_logits(const struct moe_oracle_layer *layer, const double *x,
                                    double *logit)
{
    MOE_TRY(moe_oracle_require(layer, MOE_WEIGHT_ROUTER, 0));
    MOE_TRY(moe_oracle_require(layer, MOE_WEIGHT_LOGIT_BIAS, 0));
    linear(layer->weight[MOE_WEIGHT_ROUTER][0], layer->weight[MOE_WEIGHT_LOGIT_BIAS][0],
           (size_t)layer->spec.experts + layer->spec.router.zero_experts, layer->spec.hidden, x,
           logit);
    return moe_ok();
}

/* --------------------------------------------------------------------- networks */

double moe_oracle_activate(enum moe_activation activation, double limit, double alpha, double g,
                           double u)
{
    if (activation == MOE_ACT_RELU2)
        return u < 0 ? 0 : u * u;
    if (activation == MOE_ACT_SITU)
        return alpha * tanh(g / alpha) * moe_oracle_sigmoid(g) * limit * tanh(u / limit);
    if (activation != MOE_ACT_SWIGLU) {
        g = g > limit ? limit : g; /* not fmin: NaN must stay NaN */
        u = u > limit ? limit : u < -limit ? -limit : u;
    }
    if (activation == MOE_ACT_SWIGLU_OAI)
        return g * moe_oracle_sigmoid(alpha * g) * (u + 1);
    return g * moe_oracle_sigmoid(g) * u;
}

/* y [width] = down( act(gate x + gate bias, up x + up bias) ) + down bias; biases may be NULL. W8A8
 * rounds x and the activation, and nothing else. */
static struct moe_status network(const struct moe_layer_spec *spec,
                                 const struct moe_weight_format *format,
                                 enum moe_activation activation, size_t width, size_t inner,
                                 const double *const w[6], const double *x, double *y)
{
    double *g = calloc(2 * inner + width, sizeof *g), *u = g + inner, *row = u + inner;
    if (g == NULL)
        return moe_oracle_out_of_memory();
    memcpy(row, x, width * sizeof *row);
    moe_oracle_quantise(format, width, row);
    if (moe_activation_has_gate(activation))
        linear(w[0], w[3], inner, width, row, g);
    linear(w[1], w[4], inner, width, row, u);
    for (size_t i = 0; i < inner; i++)
        g[i] = moe_oracle_activate(activation, (double)spec->swiglu_limit,
                                   (double)spec->swiglu_alpha, g[i], u[i]);
    moe_oracle_quantise(format, inner, g);
    linear(w[2], w[5], width, inner, g, y);
    free(g);
    return moe_ok();
}

struct moe_status moe_oracle_expert(const struct moe_oracle_layer *layer, uint32_t expert,
                                    const double *x, double *y)
{
    static const enum moe_weight kind[6] = {MOE_WEIGHT_GATE,    MOE_WEIGHT_UP,
                                            MOE_WEIGHT_DOWN,    MOE_WEIGHT_GATE_BIAS,
                                            MOE_WEIGHT_UP_BIAS, MOE_WEIGHT_DOWN_BIAS};
    if (expert >= layer->spec.experts) {
        memcpy(y, x, layer->spec.hidden * sizeof *y);
        return moe_ok();
    }
    const double *w[6];
    for (int i = 0; i < 6; i++) {
        MOE_TRY(moe_oracle_require(layer, kind[i], expert));
        w[i] = layer->weight[kind[i]][expert];
    }
    return network(&layer->spec, &layer->spec.routed_format, layer->spec.activation,
                   moe_expert_width(&layer->spec), layer->spec.intermediate, w, x, y);
}

struct moe_status moe_oracle_shared(const struct moe_oracle_layer *layer, const double *x,
                                    double *y)
{
    const struct moe_layer_spec *spec = &layer->spec;
    memset(y, 0, spec->hidden * sizeof *y);
    if (spec->shared_intermediate == 0)
        return moe_ok();
    for (enum moe_weight w = MOE_WEIGHT_SHARED_GATE; w <= MOE_WEIGHT_SHARED_GATE_VECTOR; w++)
        MOE_TRY(moe_oracle_require(layer, w, 0));
    const double *w[6] = {layer->weight[MOE_WEIGHT_SHARED_GATE][0],
                          layer->weight[MOE_WEIGHT_SHARED_UP][0],
                          layer->weight[MOE_WEIGHT_SHARED_DOWN][0]};
    MOE_TRY(network(spec, &spec->shared_format, spec->shared_activation, spec->hidden,
                    spec->shared_intermediate, w, x, y));
    if (!spec->shared_gated)
        return moe_ok();
    double gate;
    linear(layer->weight[MOE_WEIGHT_SHARED_GATE_VECTOR][0], NULL, 1, spec->hidden, x, &gate);
    for (uint32_t h = 0; h < spec->hidden; h++)
        y[h] *= moe_oracle_sigmoid(gate);
    return moe_ok();
}

/* ------------------------------------------------------------------------- layer */

/* y [W] += sum over k of the weighted experts of x [W]; `scratch` [2W]. */
static struct moe_status add_experts(const struct moe_oracle_layer *layer, const int32_t *ids,
                                     const double *weights, const double *x, double *scratch,
                                     double *y)
{
    const struct moe_layer_spec *spec = &layer->spec;
    const uint32_t width = moe_expert_width(spec);
    bool on_input = spec->weighting == MOE_WEIGHT_INPUT;
    double *weighted = scratch, *part = scratch + width;
    for (uint32_t k = 0; k < spec->router.top_k; k++) {
        if (ids[k] < 0)
            continue;
        for (uint32_t h = 0; h < width; h++)
            weighted[h] = on_input ? weights[k] * x[h] : x[h];
        MOE_TRY(moe_oracle_expert(layer, (uint32_t)ids[k], weighted, part));
        for (uint32_t h = 0; h < width; h++)
            y[h] += on_input ? part[h] : weights[k] * part[h];
    }
    return moe_ok();
}

/* u [L] = g * u / sqrt(mean(u^2) + eps) */
static void normalise(const struct moe_layer_spec *spec, const double *g, double *u)
{
    double mean = 0;
    for (uint32_t i = 0; i < spec->latent; i++)
        mean += u[i] * u[i] / spec->latent;
    for (uint32_t i = 0; i < spec->latent; i++)
        u[i] *= g[i] / sqrt(mean + (double)spec->latent_eps);
}

/* The experts in the latent space: y [H] += W_from norm(their sum for W_to x). `scratch` [4H]. */
static struct moe_status add_latent(const struct moe_oracle_layer *layer, const int32_t *ids,
                                    const double *weights, const double *x, double *scratch,
                                    double *y)
{
    const struct moe_layer_spec *spec = &layer->spec;
    const uint32_t width = spec->latent;
    double *z = scratch, *u = z + width, *out = u + width;
    for (enum moe_weight w = MOE_WEIGHT_TO_LATENT; w <= MOE_WEIGHT_LATENT_NORM; w++)
        MOE_TRY(moe_oracle_require(layer, w, 0));
    linear(layer->weight[MOE_WEIGHT_TO_LATENT][0], NULL, width, spec->hidden, x, z);
    memset(u, 0, width * sizeof *u);
    MOE_TRY(add_experts(layer, ids, weights, z, out, u));
    if (spec->latent_norm)
        normalise(spec, layer->weight[MOE_WEIGHT_LATENT_NORM][0], u);
    linear(layer->weight[MOE_WEIGHT_FROM_LATENT][0], NULL, spec->hidden, width, u, out);
    for (uint32_t h = 0; h < spec->hidden; h++)
        y[h] += out[h];
    return moe_ok();
}

/* y [H] = sum over k of the weighted experts + shared(x); `scratch` [4H]. */
static struct moe_status token_output(const struct moe_oracle_layer *layer, const int32_t *ids,
                                      const double *weights, const double *x, double *scratch,
                                      bool with_shared, double *y)
{
    if (with_shared)
        MOE_TRY(moe_oracle_shared(layer, x, y));
    return layer->spec.latent != 0 ? add_latent(layer, ids, weights, x, scratch, y)
                                   : add_experts(layer, ids, weights, x, scratch, y);
}

static struct moe_status forward_token(const struct moe_oracle_layer *layer, uint8_t mode_in,
                                       const int32_t *ids_in, const float *weights_in,
                                       const double *x, double *scratch, int32_t *ids,
                                       double *weights, uint8_t *state, double *margin, double *y)
{
    const enum moe_routing_mode mode = moe_routing_of(mode_in);
    double logit[2 * MOE_MAX_EXPERTS];
    if (mode != MOE_ROUTE_IDS_WEIGHTS)
        MOE_TRY(moe_oracle_logits(layer, x, logit));
    MOE_TRY(moe_oracle_require(layer, MOE_WEIGHT_SELECT_BIAS, 0));
    *state =
        (uint8_t)moe_oracle_route(&layer->spec, logit, layer->weight[MOE_WEIGHT_SELECT_BIAS][0],
                                  mode, ids_in, weights_in, ids, weights, margin);
    memset(y, 0, layer->spec.hidden * sizeof *y);
    if (*state != MOE_TOKEN_OK)
        return moe_ok();
    return token_output(layer, ids, weights, x, scratch, (mode_in & MOE_ROUTE_WITHOUT_SHARED) == 0,
                        y);
}

struct moe_status moe_oracle_forward(const struct moe_oracle_layer *layer, enum moe_dtype dtype,
                                     uint32_t tokens, const void *x, const uint8_t *mode,
                                     const int32_t *ids_in, const float *weights_in,
                                     int32_t *ids_out, double *weights_out, uint8_t *token_state,
                                     double *margin, double *y)
{
    size_t h = layer->spec.hidden, top_k = layer->spec.router.top_k;
    double *row = calloc(5 * h, sizeof *row); /* the token, and scratch */
    if (row == NULL)
        return moe_oracle_out_of_memory();
    struct moe_status st = moe_ok();
    for (size_t t = 0; t < tokens && !moe_failed(&st); t++) {
        int32_t ids[MOE_MAX_TOP_K];
        double weights[MOE_MAX_TOP_K], gap;
        uint8_t state = MOE_TOKEN_OK;
        for (size_t i = 0; i < h; i++)
            row[i] = moe_oracle_element(dtype, x, t * h + i);
        st = forward_token(layer, mode != NULL ? mode[t] : MOE_ROUTE_SERVER,
                           ids_in != NULL ? ids_in + t * top_k : NULL,
                           weights_in != NULL ? weights_in + t * top_k : NULL, row, row + h, ids,
                           weights, &state, &gap, y + t * h);
        if (ids_out != NULL)
            memcpy(ids_out + t * top_k, ids, top_k * sizeof *ids);
        if (weights_out != NULL)
            memcpy(weights_out + t * top_k, weights, top_k * sizeof *weights);
        if (token_state != NULL)
            token_state[t] = state;
        if (margin != NULL)
            margin[t] = gap;
    }
    free(row);
    return st;
}
