/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of the double-precision layer: each function is one formula of moe/training.h. It
 * computes the forward values again that it needs. */
#include "oracle/oracle_internal.h"

#include "base/size.h"

#include <math.h>
#include <stdlib.h>

/* ------------------------------------------------------------------- rounding */

static double random_sign(struct moe_oracle_rounding *r) /* -1 .. 1; xorshift64* */
{
    uint64_t z = r->state != 0 ? r->state : UINT64_C(0x9e3779b97f4a7c15);
    z ^= z >> 12;
    z ^= z << 25;
    z ^= z >> 27;
    r->state = z;
    return (double)(int64_t)(z * UINT64_C(0x2545f4914f6cdd1d)) * 0x1p-63;
}

/* A computed value. */
static double off(struct moe_oracle_rounding *r, double v)
{
    return r == NULL || r->arithmetic == 0 ? v : v * (1 + r->arithmetic * random_sign(r));
}

/* A value of a row that a backend may store in the step's dtype. */
static double stored(struct moe_oracle_rounding *r, double v)
{
    return r == NULL || r->stored == 0 ? off(r, v) : v * (1 + r->stored * random_sign(r));
}

/* Whether v is beyond the kink at `limit`. */
static bool beyond(const struct moe_oracle_rounding *r, double v, double limit)
{
    return v > limit - (r == NULL ? 0 : r->lean * r->kink);
}

/* One chain: each partial sum is rounded, and may be much larger than the last one. */
static double dot(struct moe_oracle_rounding *r, size_t n, const double *a, const double *b)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum = off(r, sum + a[i] * b[i]);
    return sum;
}

/* --------------------------------------------------------------------- router */

/* Softmax backward: dz_i = p_i (g_i - sum_j p_j g_j). Added to dz. */
static void softmax_backward(struct moe_oracle_rounding *r, uint32_t n, const double *p,
                             const double *g, double *dz)
{
    double mean = dot(r, n, p, g);
    for (uint32_t i = 0; i < n; i++)
        dz[i] += off(r, p[i] * off(r, g[i])) - off(r, p[i] * mean);
}

/* d score / d logit, for scores that depend on one logit. */
static double score_slope(struct moe_oracle_rounding *r, enum moe_score kind, double z)
{
    double s = off(r, moe_oracle_sigmoid(z)), y;
    if (kind == MOE_SCORE_SIGMOID)
        return s * (1 - off(r, s));
    moe_oracle_scores(kind, 1, &z, &y);
    return y == 0 ? 0 : off(r, (z > 20 ? 1 : s) / (2 * y));
}

/* ds [n] from dw [n]: through scale and renormalisation; s: scores of the choices. */
static void renorm_backward(struct moe_oracle_rounding *r, const struct moe_router_spec *spec,
                            uint32_t n, const double *s, const double *dw, double *ds)
{
    double sum = 0, divisor = 1, pull = 0, eps = (double)spec->renorm_eps;
    bool constant = spec->renorm == MOE_RENORM_NONE;
    for (uint32_t i = 0; i < n; i++)
        sum += off(r, s[i]);
    if (spec->renorm == MOE_RENORM_SUM)
        divisor = sum + eps;
    if (spec->renorm == MOE_RENORM_CLAMPED) {
        constant = beyond(r, eps, sum);
        divisor = constant ? eps : sum;
    }
    for (uint32_t i = 0; i < n; i++)
        pull += off(r, dw[i] * s[i]);
    for (uint32_t i = 0; i < n; i++) {
        double scale = (double)spec->scale;
        ds[i] = divisor == 0 ? 0 : off(r, scale * dw[i] / divisor);
        if (!constant && divisor != 0)
            ds[i] -= off(r, scale * pull / (divisor * divisor));
    }
}

void moe_oracle_router_backward(const struct moe_layer_spec *spec, const double *logit,
                                const int32_t *ids, const double *dweights, double *dlogit,
                                struct moe_oracle_rounding *rounding)
{
    const struct moe_router_spec *o = &spec->router;
    uint32_t all = spec->experts + o->zero_experts, n = 0, chosen[MOE_MAX_TOP_K];
    double score[2 * MOE_MAX_EXPERTS], dscore[2 * MOE_MAX_EXPERTS] = {0};
    double s[MOE_MAX_TOP_K], dw[MOE_MAX_TOP_K], ds[MOE_MAX_TOP_K] = {0}, dz[MOE_MAX_TOP_K] = {0};
    moe_oracle_scores(o->score, all, logit, score);
    for (uint32_t k = 0; k < o->top_k; k++)
        if (ids[k] >= 0) {
            chosen[n] = (uint32_t)ids[k];
            s[n] = score[ids[k]];
            dw[n++] = dweights[k];
        }
    if (o->score == MOE_SCORE_SOFTMAX_TOPK)
        moe_oracle_softmax(n, s, s);
    renorm_backward(rounding, o, n, s, dw, ds);
    if (o->score == MOE_SCORE_SOFTMAX_TOPK)
        softmax_backward(rounding, n, s, ds, dz);
    for (uint32_t i = 0; i < n; i++) /* an expert may be given twice */
        dscore[chosen[i]] += o->score == MOE_SCORE_SOFTMAX_TOPK ? dz[i] : ds[i];
    for (uint32_t e = 0; e < all; e++) {
        dlogit[e] = o->score == MOE_SCORE_SOFTMAX_TOPK ? dscore[e] : 0;
        if (o->score == MOE_SCORE_SIGMOID || o->score == MOE_SCORE_SQRTSOFTPLUS)
            dlogit[e] = dscore[e] * score_slope(rounding, o->score, logit[e]);
    }
    if (o->score == MOE_SCORE_SOFTMAX)
        softmax_backward(rounding, all, score, dscore, dlogit);
}

double moe_oracle_aux_backward(const struct moe_layer_spec *spec, double aux_coeff,
                               const uint32_t *n, uint64_t group_tokens, const double *logit,
                               double *dlogit, struct moe_oracle_rounding *rounding)
{
    enum moe_score kind = spec->router.score;
    double tokens = (double)group_tokens, a[MOE_MAX_EXPERTS], da[MOE_MAX_EXPERTS], sum = 1e-20;
    double c = aux_coeff * spec->experts / (spec->router.top_k * tokens * tokens), loss = 0;
    bool soft = kind == MOE_SCORE_SOFTMAX || kind == MOE_SCORE_SOFTMAX_TOPK;
    moe_oracle_scores(kind, spec->experts, logit, a);
    if (soft)
        moe_oracle_softmax(spec->experts, logit, a);
    for (uint32_t e = 0; e < spec->experts; e++)
        sum += soft ? 0 : a[e];
    for (uint32_t e = 0; e < spec->experts; e++) {
        a[e] = soft ? a[e] : a[e] / sum;
        da[e] = c * n[e];
        loss += a[e] * da[e];
    }
    if (soft)
        softmax_backward(rounding, spec->experts, a, da, dlogit);
    for (uint32_t e = 0; e < spec->experts && !soft; e++) {
        double ds = off(rounding, da[e] / sum) - off(rounding, loss / sum);
        dlogit[e] += ds * score_slope(rounding, kind, logit[e]);
    }
    return loss;
}

struct moe_status moe_oracle_logits_backward(const struct moe_oracle_layer *layer, const double *x,
                                             const double *dlogit, double *dx,
                                             struct moe_oracle_layer *gradients,
                                             struct moe_oracle_rounding *rounding)
{
    size_t hidden = layer->spec.hidden;
    MOE_TRY(moe_oracle_require(layer, MOE_WEIGHT_ROUTER, 0));
    const double *w = layer->weight[MOE_WEIGHT_ROUTER][0];
    double *dw = gradients != NULL ? gradients->weight[MOE_WEIGHT_ROUTER][0] : NULL;
    double *db = gradients != NULL ? gradients->weight[MOE_WEIGHT_LOGIT_BIAS][0] : NULL;
    for (size_t e = 0; e < layer->spec.experts + layer->spec.router.zero_experts; e++) {
        for (size_t h = 0; h < hidden && dx != NULL; h++)
            dx[h] += off(rounding, dlogit[e] * w[e * hidden + h]);
        for (size_t h = 0; h < hidden && dw != NULL; h++)
            dw[e * hidden + h] += off(rounding, dlogit[e] * x[h]);
        if (db != NULL)
            db[e] += off(rounding, dlogit[e]);
    }
    return moe_ok();
}

/* ------------------------------------------------------------------- networks */

static void activate_backward(struct moe_oracle_rounding *r, enum moe_activation activation,
                              double limit, double alpha, double g, double u, double dh, double *dg,
                              double *du)
{
    bool clamps = activation != MOE_ACT_SWIGLU;
    bool g_out = clamps && beyond(r, g, limit);
    bool u_out = clamps && beyond(r, fabs(u), limit);
    if (clamps) {
        g = g > limit ? limit : g;
        u = u > limit ? limit : u < -limit ? -limit : u;
    }
    if (activation == MOE_ACT_SWIGLU_OAI)
        u += 1;
    else
        alpha = 1;
    /* d/dg of g sigmoid(alpha g) */
    double s = off(r, moe_oracle_sigmoid(alpha * g));
    double slope = off(r, s) + off(r, alpha * g * s * (1 - off(r, s)));
    *dg = g_out ? 0 : dh * u * slope;
    *du = u_out ? 0 : dh * g * s;
}

void moe_oracle_activate_backward(enum moe_activation activation, double limit, double alpha,
                                  double g, double u, double dh, double *dg, double *du)
{
    activate_backward(NULL, activation, limit, alpha, g, u, dh, dg, du);
}

/* down( act(gate x + gate bias, up x + up bias) ) + down bias, and its gradients. */
struct network {
    const struct moe_layer_spec *spec;
    enum moe_activation activation;
    size_t inner;
    const double *w[6]; /* gate, up, down, and their biases; biases may be NULL */
    double *grad[6];    /* all NULL if gradients are not wanted */
};

static const enum moe_weight expert_weight[6] = {MOE_WEIGHT_GATE,    MOE_WEIGHT_UP,
                                                 MOE_WEIGHT_DOWN,    MOE_WEIGHT_GATE_BIAS,
                                                 MOE_WEIGHT_UP_BIAS, MOE_WEIGHT_DOWN_BIAS};
static const enum moe_weight shared_weight[3] = {MOE_WEIGHT_SHARED_GATE, MOE_WEIGHT_SHARED_UP,
                                                 MOE_WEIGHT_SHARED_DOWN};

static struct moe_status load(struct network *net, const struct moe_oracle_layer *layer,
                              const struct moe_oracle_layer *gradients, const enum moe_weight *kind,
                              size_t kinds, uint32_t entry)
{
    net->spec = &layer->spec;
    for (size_t i = 0; i < kinds; i++) {
        MOE_TRY(moe_oracle_require(layer, kind[i], entry));
        net->w[i] = layer->weight[kind[i]][entry];
        net->grad[i] = gradients != NULL ? gradients->weight[kind[i]][entry] : NULL;
    }
    return moe_ok();
}

/* to [rows, columns] += a b^T; to may be NULL. */
static void add_outer(struct moe_oracle_rounding *r, double *to, size_t rows, size_t columns,
                      const double *a, const double *b)
{
    for (size_t i = 0; to != NULL && i < rows; i++)
        for (size_t j = 0; j < columns; j++)
            to[i * columns + j] = off(r, to[i * columns + j] + a[i] * b[j]);
}

/* out [columns] += W^T v. */
static void add_transposed(struct moe_oracle_rounding *r, double *out, size_t rows, size_t columns,
                           const double *w, const double *v)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < columns; j++)
            out[j] = off(r, out[j] + w[i * columns + j] * v[i]);
}

static void add(double *to, size_t n, const double *v)
{
    for (size_t i = 0; to != NULL && i < n; i++)
        to[i] += v[i];
}

/* Forward again and backward of weight * network(x). vec: 6 rows of [inner] and one of [H].
 * *dweight = dy . network(x); adds to dx [H]. */
static void network_rows(const struct network *net, double weight, const double *x,
                         const double *dy, double *dx, double *dweight, double *vec,
                         struct moe_oracle_rounding *r)
{
    const struct moe_layer_spec *spec = net->spec;
    size_t inner = net->inner, hidden = spec->hidden;
    double *g = vec, *u = g + inner, *h = u + inner, *dh = h + inner, *dg = dh + inner,
           *du = dg + inner, *wdy = du + inner;
    double limit = (double)spec->swiglu_limit, alpha = (double)spec->swiglu_alpha;
    for (size_t i = 0; i < inner; i++) {
        g[i] = dot(r, hidden, net->w[0] + i * hidden, x) + (net->w[3] ? net->w[3][i] : 0);
        u[i] = dot(r, hidden, net->w[1] + i * hidden, x) + (net->w[4] ? net->w[4][i] : 0);
        h[i] = stored(r, moe_oracle_activate(net->activation, limit, alpha, g[i], u[i]));
    }
    add_transposed(r, dh, hidden, inner, net->w[2], dy);
    *dweight = dot(r, inner, dh, h) + (net->w[5] ? dot(r, hidden, dy, net->w[5]) : 0);
    for (size_t i = 0; i < inner; i++) {
        activate_backward(r, net->activation, limit, alpha, g[i], u[i], weight * dh[i], &dg[i],
                          &du[i]);
        dg[i] = stored(r, dg[i]);
        du[i] = stored(r, du[i]);
    }
    for (size_t i = 0; i < hidden; i++)
        wdy[i] = stored(r, weight * dy[i]);
    add_outer(r, net->grad[0], inner, hidden, dg, x);
    add_outer(r, net->grad[1], inner, hidden, du, x);
    add_outer(r, net->grad[2], hidden, inner, wdy, h);
    add(net->grad[3], inner, dg);
    add(net->grad[4], inner, du);
    add(net->grad[5], hidden, wdy);
    add_transposed(r, dx, inner, hidden, net->w[0], dg);
    add_transposed(r, dx, inner, hidden, net->w[1], du);
}

static struct moe_status network_backward(const struct network *net, double weight, const double *x,
                                          const double *dy, double *dx, double *dweight,
                                          struct moe_oracle_rounding *r)
{
    double *vec = calloc(6 * net->inner + net->spec->hidden, sizeof *vec);
    if (vec == NULL)
        return moe_oracle_out_of_memory();
    network_rows(net, weight, x, dy, dx, dweight, vec, r);
    free(vec);
    return moe_ok();
}

struct moe_status moe_oracle_expert_backward(const struct moe_oracle_layer *layer, uint32_t expert,
                                             double weight, const double *x, const double *dy,
                                             double *dx, double *dweight,
                                             struct moe_oracle_layer *gradients,
                                             struct moe_oracle_rounding *rounding)
{
    size_t hidden = layer->spec.hidden;
    bool on_input = layer->spec.weighting == MOE_WEIGHT_INPUT;
    struct network net = {.activation = layer->spec.activation, .inner = layer->spec.intermediate};
    if (expert >= layer->spec.experts) {
        *dweight = dot(rounding, hidden, dy, x);
        for (size_t h = 0; h < hidden && dx != NULL; h++)
            dx[h] += off(rounding, weight * dy[h]);
        return moe_ok();
    }
    MOE_TRY(load(&net, layer, gradients, expert_weight, 6, expert));
    double *part = calloc(2 * hidden, sizeof *part), *input = part + hidden;
    if (part == NULL)
        return moe_oracle_out_of_memory();
    for (size_t h = 0; h < hidden; h++)
        input[h] = on_input ? stored(rounding, weight * x[h]) : x[h];
    struct moe_status st =
        network_backward(&net, on_input ? 1 : weight, input, dy, part, dweight, rounding);
    if (on_input)
        *dweight = dot(rounding, hidden, part, x);
    for (size_t h = 0; h < hidden && dx != NULL; h++)
        dx[h] += on_input ? off(rounding, weight * part[h]) : part[h];
    free(part);
    return st;
}

struct moe_status moe_oracle_shared_backward(const struct moe_oracle_layer *layer, const double *x,
                                             const double *dy, double *dx,
                                             struct moe_oracle_layer *gradients,
                                             struct moe_oracle_rounding *rounding)
{
    const struct moe_layer_spec *spec = &layer->spec;
    struct network net = {.activation = spec->shared_activation,
                          .inner = spec->shared_intermediate};
    if (net.inner == 0)
        return moe_ok();
    MOE_TRY(load(&net, layer, gradients, shared_weight, 3, 0));
    MOE_TRY(moe_oracle_require(layer, MOE_WEIGHT_SHARED_GATE_VECTOR, 0));
    const double *v = layer->weight[MOE_WEIGHT_SHARED_GATE_VECTOR][0];
    double gate =
        v != NULL ? off(rounding, moe_oracle_sigmoid(dot(rounding, spec->hidden, v, x))) : 1;
    double *part = calloc(spec->hidden, sizeof *part), dgate;
    if (part == NULL)
        return moe_oracle_out_of_memory();
    struct moe_status st = network_backward(&net, gate, x, dy, part, &dgate, rounding);
    double dz = dgate * gate * (1 - off(rounding, gate)); /* of v . x */
    for (size_t h = 0; h < spec->hidden && v != NULL; h++)
        part[h] += off(rounding, dz * v[h]);
    if (v != NULL && gradients != NULL)
        add_outer(rounding, gradients->weight[MOE_WEIGHT_SHARED_GATE_VECTOR][0], 1, spec->hidden,
                  &dz, x);
    add(dx, spec->hidden, part);
    free(part);
    return st;
}

/* ---------------------------------------------------------------------- layer */

/* One token of a pass. */
struct token {
    enum moe_routing_mode mode;
    const int32_t *ids;
    const float *weights_in;
    const double *x, *dy; /* [H] */
    double *dx;           /* [H] zeros */
    double dweights[MOE_MAX_TOP_K];
    double logit[2 * MOE_MAX_EXPERTS];
    double aux_loss;
};

static struct moe_status routed_backward(const struct moe_oracle_layer *layer,
                                         const struct moe_oracle_backward *a, const double *weights,
                                         struct token *t)
{
    const struct moe_layer_spec *spec = &layer->spec;
    double dlogit[2 * MOE_MAX_EXPERTS];
    for (uint32_t k = 0; k < spec->router.top_k; k++)
        if (t->ids[k] >= 0)
            MOE_TRY(moe_oracle_expert_backward(layer, (uint32_t)t->ids[k], weights[k], t->x, t->dy,
                                               t->dx, &t->dweights[k], a->gradients, a->rounding));
    if (t->mode == MOE_ROUTE_IDS_WEIGHTS)
        return moe_ok();
    moe_oracle_router_backward(spec, t->logit, t->ids, t->dweights, dlogit, a->rounding);
    if (a->aux_coeff != 0 && a->group_tokens != 0)
        t->aux_loss = moe_oracle_aux_backward(spec, a->aux_coeff, a->loads, a->group_tokens,
                                              t->logit, dlogit, a->rounding);
    return moe_oracle_logits_backward(layer, t->x, dlogit, t->dx, a->gradients, a->rounding);
}

static struct moe_status backward_token(const struct moe_oracle_layer *layer,
                                        const struct moe_oracle_backward *a, struct token *t,
                                        enum moe_token_state *state)
{
    const struct moe_layer_spec *spec = &layer->spec;
    double weights[MOE_MAX_TOP_K];
    int32_t ids[MOE_MAX_TOP_K];
    if (t->mode != MOE_ROUTE_IDS_WEIGHTS)
        MOE_TRY(moe_oracle_logits(layer, t->x, t->logit));
    for (uint32_t e = 0; e < spec->experts + spec->router.zero_experts; e++)
        t->logit[e] = off(a->rounding, t->logit[e]);
    *state =
        moe_oracle_route(spec, t->logit, NULL, t->mode, t->ids, t->weights_in, ids, weights, NULL);
    if (*state != MOE_TOKEN_OK)
        return moe_ok();
    MOE_TRY(routed_backward(layer, a, weights, t));
    return moe_oracle_shared_backward(layer, t->x, t->dy, t->dx, a->gradients, a->rounding);
}

struct moe_status moe_oracle_backward(const struct moe_oracle_layer *layer,
                                      const struct moe_oracle_backward *a)
{
    size_t hidden = layer->spec.hidden, top_k = layer->spec.router.top_k;
    double *row = calloc(3 * hidden, sizeof *row), loss = 0;
    if (row == NULL)
        return moe_oracle_out_of_memory();
    struct moe_status st = moe_ok();
    for (size_t t = 0; t < a->tokens && !moe_failed(&st); t++) {
        enum moe_token_state state = MOE_TOKEN_OK;
        struct token token = {.mode = a->mode != NULL ? a->mode[t] : MOE_ROUTE_IDS,
                              .ids = a->ids + t * top_k,
                              .weights_in = a->weights != NULL ? a->weights + t * top_k : NULL,
                              .x = row,
                              .dy = row + hidden,
                              .dx = row + 2 * hidden};
        for (size_t h = 0; h < hidden; h++) {
            row[h] = moe_oracle_element(a->dtype, a->x, t * hidden + h);
            row[hidden + h] = moe_oracle_element(a->dtype, a->dy, t * hidden + h);
            row[2 * hidden + h] = 0;
        }
        st = backward_token(layer, a, &token, &state);
        loss += token.aux_loss;
        for (size_t h = 0; a->dx != NULL && h < hidden; h++)
            a->dx[t * hidden + h] = stored(a->rounding, token.dx[h]);
        if (a->dweights != NULL)
            memcpy(a->dweights + t * top_k, token.dweights, top_k * sizeof *a->dweights);
        if (a->token_state != NULL)
            a->token_state[t] = (uint8_t)state;
    }
    if (a->aux_loss != NULL)
        *a->aux_loss = loss;
    free(row);
    return st;
}
