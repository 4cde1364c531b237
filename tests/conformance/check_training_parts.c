/* SPDX-License-Identifier: Apache-2.0 */
/* Each part of the backward pass alone, against the oracle: router, load balance, logits, dispatch
 * of two rows, experts, combine, shared expert. Padding rows are NaN. */
#include "trained.h"

#include <math.h>
#include <stdlib.h>

/* Inputs of the parts, on host and device. */
struct bench {
    struct trained *t;
    size_t tokens, hidden, top_k, all; /* all = E + Z */
    void *x;                           /* [T,H]; tokens that were refused are zeros */
    const void *dev_x, *dev_dy;
    const int32_t *dev_ids;
    const float *dev_weights;
};

/* A tensor of the parts, compared as a whole: got, exact, and with rounding errors. */
struct compared {
    size_t n;
    double *got, *want[3];
};

static struct compared compared_begin(size_t n)
{
    struct compared c = {.n = n, .got = must(n * sizeof(double))};
    for (int i = 0; i < 3; i++)
        c.want[i] = must(n * sizeof(double));
    return c;
}

static bool compared_end(const struct bench *b, const char *what, struct compared *c, bool good)
{
    const double *const want[3] = {c->want[0], c->want[1], c->want[2]};
    good = good && near_enough(b->t, what, -1, c->n, c->got, want) >= 0;
    free(c->got);
    for (int i = 0; i < 3; i++)
        free(c->want[i]);
    return good;
}

/* Copies a device tensor of floats to `got` and frees the copy. */
static void fetch(const struct bench *b, const float *from, struct compared *c)
{
    float *data = get(b->t->s, from, c->n * sizeof *data);
    for (size_t i = 0; i < c->n; i++)
        c->got[i] = (double)data[i];
    free(data);
}

static float *random_floats(struct trained *t, size_t n, uint64_t salt, double *copies[3])
{
    struct rng r = {.state = t->s->c->seed + salt + 1000 * t->s->member->slot};
    float *data = must(n * sizeof *data);
    for (size_t i = 0; i < n; i++) {
        data[i] = rng_float(&r);
        for (int j = 0; copies != NULL && j < 3; j++)
            copies[j][i] = (double)data[i];
    }
    return data;
}

static void row_of(const struct bench *b, const void *tensor, size_t token, double *row)
{
    for (size_t h = 0; h < b->hidden; h++)
        row[h] = element(b->t->s->c->dtype, tensor, token * b->hidden + h);
}

/* Rounding for pass i of three: none for the first. */
static struct moe_oracle_rounding *rounding_for(const struct bench *b, int i,
                                                struct moe_oracle_rounding *r)
{
    *r = rounding_of(b->t->s->c, 2 * i - 3);
    return i == 0 ? NULL : r;
}

static bool begin_parts(struct trained *t, struct bench *b)
{
    struct subject *s = t->s;
    *b = (struct bench){.t = t,
                        .tokens = s->in->tokens,
                        .hidden = s->c->spec.hidden,
                        .top_k = s->c->spec.router.top_k,
                        .all = (size_t)s->c->spec.experts + s->c->spec.router.zero_experts};
    size_t row = tensor_bytes(s->c, 1), pairs = b->tokens * b->top_k;
    s->dev.used = 0;
    b->x = must(b->tokens * row);
    for (size_t i = 0; i < b->tokens; i++)
        if (s->state[i] == MOE_TOKEN_OK)
            memcpy((uint8_t *)b->x + i * row, (const uint8_t *)s->in->x + i * row, row);
    b->dev_x = put(s, b->x, b->tokens * row);
    b->dev_dy = put(s, t->dy, b->tokens * row);
    b->dev_ids = put(s, s->ids, pairs * sizeof(int32_t));
    b->dev_weights = put(s, s->weights, pairs * sizeof(float));
    return went_well(s, "zero_grad", t->table->zero_grad(t->trainer));
}

/* ------------------------------------------------------------------------ router */

static bool check_router_backward(struct bench *b)
{
    struct trained *t = b->t;
    struct subject *s = t->s;
    size_t pairs = b->tokens * b->top_k;
    struct compared c = compared_begin(b->tokens * b->all);
    float *dweights = random_floats(t, pairs, 1, NULL), *out = take(&s->dev, c.n * sizeof *out);
    bool good = went_well(s, "router backward",
                          t->table->router_backward(t->trainer, s->c->dtype, (uint32_t)b->tokens,
                                                    b->dev_x, b->dev_ids,
                                                    put(s, dweights, pairs * sizeof(float)), out));
    fetch(b, out, &c);
    for (int i = 0; i < 3 && good; i++) {
        struct moe_oracle_rounding storage, *r = rounding_for(b, i, &storage);
        for (size_t k = 0; k < b->tokens && good; k++) {
            double x[CASE_MAX_HIDDEN], logit[2 * CASE_MAX_EXPERTS], dw[MOE_MAX_TOP_K];
            row_of(b, b->x, k, x);
            for (size_t j = 0; j < b->top_k; j++)
                dw[j] = (double)dweights[k * b->top_k + j];
            good = went_well(s, "oracle", moe_oracle_logits(s->oracle, x, logit));
            for (size_t e = 0; e < b->all && i > 0; e++)
                logit[e] *= 1 + (e % 2 ? 0x1p-22 : -0x1p-22);
            moe_oracle_router_backward(&s->c->spec, logit, s->ids + k * b->top_k, dw,
                                       c.want[i] + k * b->all, r);
        }
    }
    free(dweights);
    return compared_end(b, "dlogits", &c, good);
}

static bool check_aux_backward(struct bench *b)
{
    struct trained *t = b->t;
    struct subject *s = t->s;
    struct compared c = compared_begin(b->tokens * b->all);
    float *start = random_floats(t, c.n, 2, c.want), *dev = put(s, start, c.n * sizeof *start);
    uint32_t n[CASE_MAX_EXPERTS];
    uint64_t group_tokens = 100;
    double loss = 3, want = 3;
    for (uint32_t e = 0; e < s->c->spec.experts; e++)
        n[e] = (uint32_t)(s->c->seed >> (e % 32) & 15);
    bool good =
        went_well(s, "aux",
                  t->table->aux_backward(t->trainer, s->c->dtype, (uint32_t)b->tokens, b->dev_x,
                                         put(s, n, sizeof n), group_tokens, 0.7f, dev, &loss));
    fetch(b, dev, &c);
    for (int i = 0; i < 3 && good; i++) {
        struct moe_oracle_rounding storage, *r = rounding_for(b, i, &storage);
        for (size_t k = 0; k < b->tokens && good; k++) {
            double x[CASE_MAX_HIDDEN], logit[2 * CASE_MAX_EXPERTS];
            row_of(b, b->x, k, x);
            good = went_well(s, "oracle", moe_oracle_logits(s->oracle, x, logit));
            double of_token = moe_oracle_aux_backward(&s->c->spec, (double)0.7f, n, group_tokens,
                                                      logit, c.want[i] + k * b->all, r);
            want += i == 0 ? of_token : 0;
        }
    }
    free(start);
    if (good && !(fabs(loss - want) <= 1e-5 * want))
        good = wrong(s, "the loss of these tokens is %.9g, not %.9g", loss - 3, want - 3);
    return compared_end(b, "dlogits of the aux loss", &c, good);
}

/* Compares a replicated weight's gradient with the oracle's. */
static bool compare_weight(struct bench *b, enum moe_weight w, uint32_t expert,
                           struct moe_oracle_layer *const want[3])
{
    struct trained *t = b->t;
    for (size_t i = 0; i < t->count; i++) {
        const struct parameter *p = &t->list[i];
        if (p->key.weight != w || (moe_weight_is_expert(w) && p->key.expert != expert) || !p->local)
            continue;
        struct compared c = compared_begin(p->n);
        float *got = trained_read(t, p, MOE_TRAIN_GRAD);
        for (size_t j = 0; j < p->n; j++)
            c.got[j] = (double)got[j];
        for (int j = 0; j < 3; j++)
            memcpy(c.want[j], moe_oracle_weight(want[j], w, expert), p->n * sizeof(double));
        free(got);
        return compared_end(
            b, moe_weight_is_expert(w) ? "an expert's gradient alone" : "a shared gradient alone",
            &c, true);
    }
    return true;
}

/* Gradients of three passes of the oracle. */
struct three {
    struct moe_oracle_layer *of[3];
};

static bool three_begin(struct bench *b, struct three *g)
{
    *g = (struct three){0};
    for (int i = 0; i < 3; i++)
        if (!went_well(b->t->s, "oracle",
                       moe_oracle_create_gradients(&b->t->s->c->spec, &g->of[i])))
            return false;
    return true;
}

static void three_end(struct three *g)
{
    for (int i = 0; i < 3; i++)
        moe_oracle_destroy(g->of[i]);
}

static bool check_logits_backward(struct bench *b)
{
    struct trained *t = b->t;
    struct subject *s = t->s;
    struct compared c = compared_begin(b->tokens * b->hidden);
    float *start = random_floats(t, c.n, 3, c.want), *dx = put(s, start, c.n * sizeof *start);
    float *dlogits = random_floats(t, b->tokens * b->all, 4, NULL);
    struct three g;
    bool good = three_begin(b, &g) &&
                went_well(s, "logits backward",
                          t->table->logits_backward(
                              t->trainer, s->c->dtype, (uint32_t)b->tokens, b->dev_x,
                              put(s, dlogits, b->tokens * b->all * sizeof *dlogits), dx));
    fetch(b, dx, &c);
    for (int i = 0; i < 3 && good; i++) {
        struct moe_oracle_rounding storage, *r = rounding_for(b, i, &storage);
        for (size_t k = 0; k < b->tokens && good; k++) {
            double x[CASE_MAX_HIDDEN], d[2 * CASE_MAX_EXPERTS];
            row_of(b, b->x, k, x);
            for (size_t e = 0; e < b->all; e++)
                d[e] = (double)dlogits[k * b->all + e];
            good = went_well(
                s, "oracle",
                moe_oracle_logits_backward(s->oracle, x, d, c.want[i] + k * b->hidden, g.of[i], r));
        }
    }
    good = good && compare_weight(b, MOE_WEIGHT_ROUTER, 0, g.of) &&
           compare_weight(b, MOE_WEIGHT_LOGIT_BIAS, 0, g.of);
    three_end(&g);
    free(start);
    free(dlogits);
    return compared_end(b, "dx of the logits", &c, good);
}

/* ------------------------------------------------------------------------ shared */

static bool check_shared_backward(struct bench *b)
{
    struct trained *t = b->t;
    struct subject *s = t->s;
    struct compared c = compared_begin(b->tokens * b->hidden);
    float *start = random_floats(t, c.n, 5, c.want), *dx = put(s, start, c.n * sizeof *start);
    struct three g;
    bool good = three_begin(b, &g) &&
                went_well(s, "shared backward",
                          t->table->shared_backward(t->trainer, s->c->dtype, (uint32_t)b->tokens,
                                                    b->dev_x, b->dev_dy, dx));
    fetch(b, dx, &c);
    for (int i = 0; i < 3 && good; i++) {
        struct moe_oracle_rounding storage, *r = rounding_for(b, i, &storage);
        for (size_t k = 0; k < b->tokens && good; k++) {
            double x[CASE_MAX_HIDDEN], dy[CASE_MAX_HIDDEN];
            row_of(b, b->x, k, x);
            row_of(b, t->dy, k, dy);
            good = went_well(s, "oracle",
                             moe_oracle_shared_backward(s->oracle, x, dy, c.want[i] + k * b->hidden,
                                                        g.of[i], r));
        }
    }
    for (enum moe_weight w = MOE_WEIGHT_SHARED_GATE; w < MOE_WEIGHT_COUNT && good; w++)
        good = compare_weight(b, w, 0, g.of);
    three_end(&g);
    free(start);
    return compared_end(b, "dx of the shared expert", &c, good);
}

/* ----------------------------------------------------------------------- experts */

/* The cotangents of all slots, and the result of dispatch here. */
struct arrived {
    struct expected_rows rows;
    void *dy[MOE_MAX_SLOTS];
    struct moe_rows got;
    const void *dy_rows;
    uint32_t total;
};

static bool rows_are_right(struct bench *b, const struct arrived *a, const uint8_t *x,
                           const uint8_t *dy, const float *weight)
{
    const struct subject *s = b->t->s;
    size_t bytes = tensor_bytes(s->c, 1);
    for (uint32_t i = 0; i < a->rows.n; i++) {
        const struct expected_row *w = &a->rows.list[i];
        size_t pair = (size_t)w->token * b->top_k + w->k;
        const uint8_t *want_x = s->c->input[w->source].x, *want_dy = a->dy[w->source];
        if (memcmp(x + w->row * bytes, want_x + w->token * bytes, bytes) != 0 ||
            memcmp(dy + w->row * bytes, want_dy + w->token * bytes, bytes) != 0 ||
            memcmp(&weight[w->row], &s->member->board->weights[w->source][pair], sizeof(float)) !=
                0)
            return wrong(s, "dispatch of two: row %u is not token %u of slot %u", w->row, w->token,
                         w->source);
    }
    return true;
}

static bool dispatch_two(struct bench *b, struct arrived *a)
{
    struct trained *t = b->t;
    struct subject *s = t->s;
    expect_rows(s, &a->rows);
    for (uint32_t p = 0; p < s->member->slots; p++)
        a->dy[p] = cotangent(s->c, p);
    if (!went_well(s, "dispatch",
                   t->table->dispatch(s->session, s->layer, s->c->dtype, s->c->bucket,
                                      (uint32_t)b->tokens, b->dev_x, b->dev_dy, b->dev_ids,
                                      b->dev_weights, &a->got, &a->dy_rows)))
        return false;
    a->total = a->rows.start[a->rows.local];
    uint32_t *start = get(s, a->got.start, (a->rows.local + 1) * sizeof *start);
    uint32_t *count = get(s, a->got.count, a->rows.local * sizeof *count);
    bool good = a->got.local_experts == a->rows.local &&
                memcmp(start, a->rows.start, (a->rows.local + 1) * sizeof *start) == 0 &&
                memcmp(count, a->rows.count, a->rows.local * sizeof *count) == 0;
    free(start);
    free(count);
    if (!good)
        return wrong(s, "dispatch of two: the local experts' rows are others");
    uint8_t *x = get(s, a->got.x, tensor_bytes(s->c, a->total));
    uint8_t *dy = get(s, a->dy_rows, tensor_bytes(s->c, a->total));
    float *weight = get(s, a->got.weight, a->total * sizeof *weight);
    good = rows_are_right(b, a, x, dy, weight);
    free(x);
    free(dy);
    free(weight);
    return good;
}

/* A device copy of `from`, rows of `bytes`, with NaN in padding rows. */
static void *with_poison(struct bench *b, const struct arrived *a, const void *from, size_t bytes)
{
    struct subject *s = b->t->s;
    uint8_t *data = get(s, from, a->total * bytes), *poisoned = must(a->total * bytes);
    memset(poisoned, 0xff, a->total * bytes);
    for (uint32_t i = 0; i < a->rows.n; i++)
        memcpy(poisoned + a->rows.list[i].row * bytes, data + a->rows.list[i].row * bytes, bytes);
    void *dev = put(s, poisoned, a->total * bytes);
    free(data);
    free(poisoned);
    return dev;
}

/* The oracle's rows in the order of a->rows.list: dx [n,H] and dweight [n]. */
static bool expect_expert_rows(struct bench *b, const struct arrived *a, struct compared *dx,
                               struct compared *dw, struct three *g)
{
    struct subject *s = b->t->s;
    bool good = true;
    for (int i = 0; i < 3; i++) {
        struct moe_oracle_rounding storage, *r = rounding_for(b, i, &storage);
        for (uint32_t k = 0; k < a->rows.n && good; k++) {
            const struct expected_row *w = &a->rows.list[k];
            double x[CASE_MAX_HIDDEN], dy[CASE_MAX_HIDDEN];
            float weight = s->member->board->weights[w->source][w->token * b->top_k + w->k];
            row_of(b, s->c->input[w->source].x, w->token, x);
            row_of(b, a->dy[w->source], w->token, dy);
            good = went_well(s, "oracle",
                             moe_oracle_expert_backward(s->oracle, w->expert, (double)weight, x, dy,
                                                        dx->want[i] + (size_t)k * b->hidden,
                                                        &dw->want[i][k], g->of[i], r));
        }
    }
    return good;
}

static bool check_experts_backward(struct bench *b, const struct arrived *a)
{
    struct trained *t = b->t;
    struct subject *s = t->s;
    struct compared dx = compared_begin(a->rows.n * b->hidden), dw = compared_begin(a->rows.n);
    struct three g;
    struct moe_rows rows = a->got;
    rows.x = with_poison(b, a, a->got.x, tensor_bytes(s->c, 1));
    rows.weight = with_poison(b, a, a->got.weight, sizeof(float));
    const void *dy = with_poison(b, a, a->dy_rows, tensor_bytes(s->c, 1));
    float *dx_rows = take(&s->dev, a->total * b->hidden * sizeof *dx_rows);
    float *dweight_rows = take(&s->dev, a->total * sizeof *dweight_rows);
    bool good = three_begin(b, &g) &&
                went_well(s, "experts backward",
                          t->table->experts_backward(t->trainer, s->c->dtype, &rows, dy, dx_rows,
                                                     dweight_rows)) &&
                expect_expert_rows(b, a, &dx, &dw, &g);
    float *host_dx = get(s, dx_rows, a->total * b->hidden * sizeof *host_dx);
    float *host_dw = get(s, dweight_rows, a->total * sizeof *host_dw);
    for (uint32_t k = 0; k < a->rows.n; k++) {
        size_t row = a->rows.list[k].row;
        dw.got[k] = (double)host_dw[row];
        for (size_t h = 0; h < b->hidden; h++)
            dx.got[k * b->hidden + h] = (double)host_dx[row * b->hidden + h];
    }
    free(host_dx);
    free(host_dw);
    for (uint32_t l = 0; l < a->rows.local && good; l++)
        for (enum moe_weight w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN_BIAS && good; w++)
            good = compare_weight(b, w, a->rows.expert[l], g.of);
    three_end(&g);
    good = compared_end(b, "dx of expert rows", &dx, good);
    return compared_end(b, "dweight of expert rows", &dw, good);
}

/* A value for each column of each (source, token, k); every slot can compute it. Column -1 is the
 * weight's gradient. */
static float made_up(uint32_t source, uint32_t token, uint32_t k, int column)
{
    struct rng r = {.state = (uint64_t)source << 48 | (uint64_t)token << 24 | k << 16 |
                             (uint32_t)(column + 1)};
    return rng_float(&r);
}

/* dx and dweights of this slot's tokens from generated rows; dweights exactly. */
static void expect_combined(const struct bench *b, double *dx, double *dweights)
{
    const struct subject *s = b->t->s;
    double dy[CASE_MAX_HIDDEN], x[CASE_MAX_HIDDEN];
    for (uint32_t i = 0; i < b->tokens * b->top_k; i++) {
        uint32_t token = i / (uint32_t)b->top_k, k = i % (uint32_t)b->top_k;
        row_of(b, b->t->dy, token, dy);
        row_of(b, b->x, token, x);
        bool zero = s->ids[i] >= (int32_t)s->c->spec.experts;
        dweights[i] = s->ids[i] < 0 || zero ? 0 : (double)made_up(s->member->slot, token, k, -1);
        for (size_t h = 0; h < b->hidden && s->ids[i] >= 0; h++) {
            dx[token * b->hidden + h] += zero ? (double)s->weights[i] * dy[h]
                                              : (double)made_up(s->member->slot, token, k, (int)h);
            dweights[i] += zero ? dy[h] * x[h] : 0;
        }
    }
}

static bool check_combined(struct bench *b, const float *dx, const float *dweights)
{
    struct subject *s = b->t->s;
    size_t pairs = b->tokens * b->top_k;
    struct compared c = compared_begin(b->tokens * b->hidden), dw = compared_begin(pairs);
    fetch(b, dx, &c);
    fetch(b, dweights, &dw);
    bool good = true;
    expect_combined(b, c.want[0], dw.want[0]);
    for (size_t i = 0; i < pairs && good; i++)
        if (s->ids[i] < (int32_t)s->c->spec.experts && dw.got[i] != dw.want[0][i])
            good =
                wrong(s, "combine: dweight %zu is %g, not exactly %g", i, dw.got[i], dw.want[0][i]);
    for (int i = 1; i < 3; i++) { /* sums of up to K values, and dots with x, in fp32 */
        for (size_t j = 0; j < c.n; j++)
            c.want[i][j] = c.want[0][j] + (j % 2 ? 4e-7 : -4e-7);
        for (size_t j = 0; j < dw.n; j++)
            dw.want[i][j] = dw.want[0][j] + (j % 2 ? 1e-6 : -1e-6) * sqrt((double)b->hidden);
    }
    good = compared_end(b, "combined dx", &c, good);
    return compared_end(b, "combined dweights", &dw, good);
}

static bool check_combine_backward(struct bench *b, const struct arrived *a)
{
    struct trained *t = b->t;
    struct subject *s = t->s;
    size_t made = a->total * b->hidden;
    float *rows = must(made * sizeof *rows), *weights = must(a->total * sizeof *weights);
    memset(rows, 0xff, made * sizeof *rows); /* NaN in padding rows must not be read */
    memset(weights, 0xff, a->total * sizeof *weights);
    for (uint32_t i = 0; i < a->rows.n; i++) {
        const struct expected_row *w = &a->rows.list[i];
        weights[w->row] = made_up(w->source, w->token, w->k, -1);
        for (size_t h = 0; h < b->hidden; h++)
            rows[w->row * b->hidden + h] = made_up(w->source, w->token, w->k, (int)h);
    }
    float *dx = take(&s->dev, b->tokens * b->hidden * sizeof *dx);
    float *dweights = take(&s->dev, b->tokens * b->top_k * sizeof *dweights);
    const float *dev_rows = put(s, rows, made * sizeof *rows);
    const float *dev_weights = put(s, weights, a->total * sizeof *weights);
    bool good = went_well(s, "combine",
                          t->table->combine(s->session, s->layer, s->c->dtype, s->c->bucket,
                                            (uint32_t)b->tokens, b->dev_x, b->dev_dy, b->dev_ids,
                                            b->dev_weights, &a->got, dev_rows, dev_weights, dx,
                                            dweights)) &&
                check_combined(b, dx, dweights);
    free(rows);
    free(weights);
    return good;
}

/* Before and after: the gradients of one whole pass. */
bool check_training_parts(struct trained *t)
{
    struct bench b;
    struct arrived a = {0};
    struct pass p;
    bool good = begin_parts(t, &b) && check_router_backward(&b) && check_aux_backward(&b) &&
                check_logits_backward(&b) && check_shared_backward(&b) && dispatch_two(&b, &a) &&
                check_experts_backward(&b, &a) && check_combine_backward(&b, &a) &&
                went_well(t->s, "zero_grad", t->table->zero_grad(t->trainer));
    t->counted = 0;
    free(a.rows.list);
    for (uint32_t i = 0; i < MOE_MAX_SLOTS; i++)
        free(a.dy[i]);
    free(b.x);
    return good && run_pass(t, &p, true);
}
