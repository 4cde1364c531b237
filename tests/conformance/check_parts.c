/* SPDX-License-Identifier: Apache-2.0 */
/* Each part alone: the router gives the routing of the step, and dispatched rows are right to the
 * byte. GEMMs, the shared expert and combine are compared with sums in double precision. */
#include "check.h"
#include "moe/numbers.h"
#include "moe/row_format.h"

#include <math.h>
#include <stdlib.h>

enum { SAMPLE = 16 /* checked rows of a GEMM */ };

/* Host copies of what dispatch returned. */
struct received {
    struct moe_rows rows; /* the backend's own */
    uint32_t total;
    uint8_t *x;
    float *weight;
};

void *put(struct subject *s, const void *data, size_t bytes)
{
    void *p = take(&s->dev, bytes);
    if (bytes > 0) {
        struct moe_status st = s->backend->mem_copy(s->device, p, data, bytes);
        MOE_INVARIANT(st.code == MOE_OK);
    }
    return p;
}

void *get(struct subject *s, const void *data, size_t bytes)
{
    void *p = must(bytes);
    if (bytes > 0) {
        struct moe_status st = s->backend->mem_copy(s->device, p, data, bytes);
        MOE_INVARIANT(st.code == MOE_OK);
    }
    return p;
}

/* ------------------------------------------------------------------- router */

static bool check_router(struct subject *s, const void *x)
{
    const struct case_input *in = s->in;
    size_t pairs = (size_t)in->tokens * s->c->spec.router.top_k;
    int32_t *ids = take(&s->dev, pairs * sizeof *ids);
    float *weights = take(&s->dev, pairs * sizeof *weights);
    uint8_t *state = take(&s->dev, in->tokens);
    const uint8_t *mode = in->mode != NULL ? put(s, in->mode, in->tokens) : NULL;
    const int32_t *ids_in = put(s, in->ids, pairs * sizeof *ids);
    const float *weights_in = put(s, in->weights, pairs * sizeof *weights);
    if (!went_well(s, "router",
                   s->backend->router_forward(s->layer, s->c->dtype, in->tokens, x, mode, ids_in,
                                              weights_in, ids, weights, state)))
        return false;
    int32_t *got_ids = get(s, ids, pairs * sizeof *ids);
    float *got_weights = get(s, weights, pairs * sizeof *weights);
    uint8_t *got_state = get(s, state, in->tokens);
    bool same = memcmp(got_ids, s->ids, pairs * sizeof *ids) == 0 &&
                memcmp(got_weights, s->weights, pairs * sizeof *weights) == 0 &&
                memcmp(got_state, s->state, in->tokens) == 0;
    free(got_ids);
    free(got_weights);
    free(got_state);
    return same || wrong(s, "the router alone does not do what it does in the step");
}

/* ----------------------------------------------------------------- dispatch */

static void expect_expert(const struct subject *s, uint32_t expert, struct expected_rows *e)
{
    uint32_t top_k = s->c->spec.router.top_k, at = e->start[e->local], first = e->n;
    for (uint32_t p = 0; p < s->member->slots; p++)
        for (uint32_t i = 0; i < s->c->input[p].tokens * top_k; i++) {
            int32_t id = s->member->board->ids[p][i];
            if (id == (int32_t)expert && case_target(s->c, i / top_k, id) == (int)s->member->slot)
                e->list[e->n++] = (struct expected_row){
                    .source = p, .token = i / top_k, .k = i % top_k, .expert = expert, .row = at++};
        }
    e->expert[e->local] = expert;
    e->count[e->local] = e->n - first;
    e->start[++e->local] = (at + MOE_ROW_ALIGN - 1) / MOE_ROW_ALIGN * MOE_ROW_ALIGN;
}

void expect_rows(const struct subject *s, struct expected_rows *e)
{
    size_t most = 0;
    for (uint32_t p = 0; p < s->member->slots; p++)
        most += (size_t)s->c->input[p].tokens * s->c->spec.router.top_k;
    *e = (struct expected_rows){.list = must(most * sizeof *e->list)};
    for (uint32_t x = 0; x < s->c->spec.experts; x++)
        for (uint32_t i = s->c->offset[x]; i < s->c->offset[x + 1]; i++)
            if (s->c->slot[i] == s->member->slot)
                expect_expert(s, x, e);
}

static bool same_table(struct subject *s, const char *what, const uint32_t *table,
                       const uint32_t *want, uint32_t n)
{
    uint32_t *got = get(s, table, n * sizeof *got);
    bool same = memcmp(got, want, n * sizeof *got) == 0;
    free(got);
    return same || wrong(s, "dispatch: %s of the local experts is wrong", what);
}

static size_t bytes_of_rows(const struct test_case *c, const struct moe_rows *rows, uint32_t n)
{
    return rows->quantised ? n * moe_row_format(&c->spec, c->dtype).bytes : tensor_bytes(c, n);
}

static const uint8_t *token_of_row(const struct test_case *c, const struct expected_row *w)
{
    return (const uint8_t *)c->input[w->source].x + w->token * tensor_bytes(c, 1);
}

/* Whether a row is `x`, quantised as moe/row_format.h says. */
static bool is_quantised(const struct test_case *c, const uint8_t *row, const uint8_t *x)
{
    const struct moe_row_format format = moe_row_format(&c->spec, c->dtype);
    bool pow2 = c->spec.routed_format.activations == MOE_ACTIVATIONS_F8_POW2, same = true;
    for (uint32_t g = 0; g < format.groups; g++) {
        uint32_t first = g * format.group, end = first + format.group;
        end = end < c->spec.hidden ? end : c->spec.hidden;
        float largest = 0, scale;
        for (uint32_t i = first; i < end; i++)
            largest = fmaxf(largest, fabsf((float)element(c->dtype, x, i)));
        memcpy(&scale, row + format.scales_at + g * sizeof scale, sizeof scale);
        same = same && scale == moe_e4m3_scale(largest, pow2);
        for (uint32_t i = first; i < end; i++) {
            float got = moe_e4m3_to_f32(row[i]);
            float want = moe_round_to_e4m3((float)element(c->dtype, x, i) / scale);
            same = same && (got == want || (isnan(got) && isnan(want)));
        }
    }
    return same;
}

static bool check_dispatched(struct subject *s, const struct expected_rows *e,
                             const struct received *r)
{
    size_t bytes = bytes_of_rows(s->c, &r->rows, 1);
    s->tally->quantised_rows += r->rows.quantised ? e->n : 0;
    for (uint32_t i = 0; i < e->n; i++) {
        const struct expected_row *w = &e->list[i];
        const uint8_t *row = r->x + w->row * bytes, *x = token_of_row(s->c, w);
        size_t pair = (size_t)w->token * s->c->spec.router.top_k + w->k;
        if (r->rows.quantised ? !is_quantised(s->c, row, x) : memcmp(row, x, bytes) != 0)
            return wrong(s, "dispatch: row %u is not token %u of slot %u", w->row, w->token,
                         w->source);
        if (memcmp(&r->weight[w->row], &s->member->board->weights[w->source][pair],
                   sizeof(float)) != 0)
            return wrong(s, "dispatch: row %u has the wrong weight", w->row);
    }
    return true;
}

static bool dispatch(struct subject *s, const void *x, const int32_t *ids, const float *weights,
                     const struct expected_rows *e, struct received *r)
{
    if (!went_well(s, "dispatch",
                   s->backend->dispatch(s->session, s->layer, s->c->dtype, s->c->bucket,
                                        s->in->tokens, x, ids, weights, &r->rows)))
        return false;
    if (r->rows.local_experts != e->local)
        return wrong(s, "dispatch: %u local experts, not %u", r->rows.local_experts, e->local);
    if (!same_table(s, "ids", r->rows.expert, e->expert, e->local) ||
        !same_table(s, "starts", r->rows.start, e->start, e->local + 1) ||
        !same_table(s, "counts", r->rows.count, e->count, e->local))
        return false;
    r->total = e->start[e->local];
    r->x = get(s, r->rows.x, bytes_of_rows(s->c, &r->rows, r->total));
    r->weight = get(s, r->rows.weight, r->total * sizeof(float));
    return check_dispatched(s, e, r);
}

/* -------------------------------------------------------------------- GEMMs */

/* Row `row` of a weight times v [n], plus its bias; `*size`: the same sum of absolute values. */
static double product(const struct test_case *c, enum moe_weight w, enum moe_weight bias,
                      uint32_t expert, size_t row, size_t n, const double *v, double *size)
{
    double sum = c->weight[bias] == NULL ? 0 : case_weight_at(c, bias, expert, row);
    *size = fabs(sum);
    for (size_t i = 0; i < n; i++) {
        double summand = case_weight_at(c, w, expert, row * n + i) * v[i];
        sum += summand;
        *size += fabs(summand);
    }
    return sum;
}

/* `size`: what the result's rounding is relative to. A rounding of gate and up, relative to the
 * size of their sums, passes through the activation. */
static void expect_hidden(const struct test_case *c, const struct expected_row *w, double weight,
                          const uint8_t *row, double *hidden, double *size)
{
    const struct moe_layer_spec *s = &c->spec;
    double x[CASE_MAX_HIDDEN];
    for (uint32_t i = 0; i < s->hidden; i++)
        x[i] = element(c->dtype, row, i) * (s->weighting == MOE_WEIGHT_INPUT ? weight : 1);
    moe_oracle_quantise(&s->routed_format, s->hidden, x);
    for (uint32_t i = 0; i < s->intermediate; i++) {
        double limit = (double)s->swiglu_limit, alpha = (double)s->swiglu_alpha;
        double g_size, u_size, by_g, by_u;
        double g =
            product(c, MOE_WEIGHT_GATE, MOE_WEIGHT_GATE_BIAS, w->expert, i, s->hidden, x, &g_size);
        double u =
            product(c, MOE_WEIGHT_UP, MOE_WEIGHT_UP_BIAS, w->expert, i, s->hidden, x, &u_size);
        hidden[i] = moe_oracle_activate(s->activation, limit, alpha, g, u);
        moe_oracle_activate_backward(s->activation, limit, alpha, g, u, 1, &by_g, &by_u);
        size[i] = fmax(fabs(hidden[i]), fabs(by_g) * g_size + fabs(by_u) * u_size);
    }
}

static void expect_down(const struct test_case *c, const struct expected_row *w, double weight,
                        const float *hidden, double *out, double *size)
{
    const struct moe_layer_spec *s = &c->spec;
    double h[CASE_MAX_INNER];
    for (uint32_t i = 0; i < s->intermediate; i++)
        h[i] = (double)hidden[i];
    moe_oracle_quantise(&s->routed_format, s->intermediate, h);
    for (uint32_t i = 0; i < s->hidden; i++) {
        double factor = s->weighting == MOE_WEIGHT_INPUT ? 1 : weight;
        out[i] = factor * product(c, MOE_WEIGHT_DOWN, MOE_WEIGHT_DOWN_BIAS, w->expert, i,
                                  s->intermediate, h, &size[i]);
        size[i] *= fabs(factor);
    }
}

/* Values to compare, and the sizes of their summands. */
struct compared {
    double *want, *got, *size;
};

static struct compared compared_of(size_t n)
{
    return (struct compared){must(n * sizeof(double)), must(n * sizeof(double)),
                             must(n * sizeof(double))};
}

/* Frees the values. */
static double error_of(size_t n, struct compared *c)
{
    double error = frobenius_of_summands(n, c->got, c->want, c->size);
    free(c->want);
    free(c->got);
    free(c->size);
    return error;
}

/* Compares rows, evenly spread over all received ones; `hidden` and `out` are the backend's. */
static bool compare_gemms(struct subject *s, const struct expected_rows *e,
                          const struct received *r, const float *hidden, const float *out)
{
    const struct moe_layer_spec *spec = &s->c->spec;
    size_t inner = spec->intermediate, outer = spec->hidden;
    uint32_t step = e->n / SAMPLE + 1, rows = 0;
    struct compared hidden_rows = compared_of(SAMPLE * inner),
                    out_rows = compared_of(SAMPLE * outer);
    for (uint32_t i = 0; i < e->n && rows < SAMPLE; i += step, rows++) {
        const struct expected_row *w = &e->list[i];
        double weight = (double)r->weight[w->row];
        expect_hidden(s->c, w, weight, token_of_row(s->c, w), hidden_rows.want + rows * inner,
                      hidden_rows.size + rows * inner);
        expect_down(s->c, w, weight, hidden + w->row * inner, out_rows.want + rows * outer,
                    out_rows.size + rows * outer);
        for (size_t j = 0; j < inner; j++)
            hidden_rows.got[rows * inner + j] = (double)hidden[w->row * inner + j];
        for (size_t j = 0; j < outer; j++)
            out_rows.got[rows * outer + j] = (double)out[w->row * outer + j];
    }
    double gate_up = error_of(rows * inner, &hidden_rows), down = error_of(rows * outer, &out_rows);
    double limit = tolerance(s->c->dtype);
    return (gate_up <= limit || wrong(s, "gate and up are off by %g", gate_up)) &&
           (down <= limit || wrong(s, "down is off by %g", down));
}

static bool check_gemms(struct subject *s, const struct expected_rows *e, const struct received *r)
{
    size_t inner = (size_t)r->total * s->c->spec.intermediate;
    size_t outer = (size_t)r->total * s->c->spec.hidden;
    float *hidden = take(&s->dev, inner * sizeof *hidden);
    float *out = take(&s->dev, outer * sizeof *out);
    if (!went_well(s, "gate and up",
                   s->backend->gemm_gate_up(s->layer, s->c->dtype, &r->rows, hidden)) ||
        !went_well(s, "down", s->backend->gemm_down(s->layer, s->c->dtype, &r->rows, hidden, out)))
        return false;
    float *host_hidden = get(s, hidden, inner * sizeof *hidden);
    float *host_out = get(s, out, outer * sizeof *out);
    bool good = compare_gemms(s, e, r, host_hidden, host_out);
    free(host_hidden);
    free(host_out);
    return good;
}

/* ------------------------------------------------------------------ combine */

/* A value for each column of each (source, token, k); every slot can compute it. */
static float made_up(uint32_t source, uint32_t token, uint32_t k, uint32_t column)
{
    struct rng r = {.state = (uint64_t)source << 48 | (uint64_t)token << 24 | k << 16 | column};
    return rng_float(&r);
}

/* `size`: the same sums of absolute values. */
static void expect_combined(const struct subject *s, double *want, double *size)
{
    const struct moe_layer_spec *spec = &s->c->spec;
    uint32_t top_k = spec->router.top_k, hidden = spec->hidden;
    for (uint32_t i = 0; i < s->in->tokens * top_k; i++) {
        uint32_t t = i / top_k;
        bool zero_expert = s->ids[i] >= (int32_t)spec->experts;
        for (uint32_t h = 0; h < hidden && s->ids[i] >= 0; h++) {
            size_t at = (size_t)t * hidden + h;
            double summand = zero_expert
                                 ? (double)s->weights[i] * element(s->c->dtype, s->in->x, at)
                                 : (double)made_up(s->member->slot, t, i % top_k, h);
            want[at] += summand;
            size[at] += fabs(summand);
        }
    }
}

static bool check_combine(struct subject *s, const struct expected_rows *e,
                          const struct received *r, const void *x, const int32_t *ids,
                          const float *weights)
{
    uint32_t hidden = s->c->spec.hidden;
    size_t n = (size_t)s->in->tokens * hidden, made = (size_t)r->total * hidden;
    float *out = must(made * sizeof *out);
    memset(out, 0xff, made * sizeof *out); /* NaN in padding rows must not be read */
    for (uint32_t i = 0; i < e->n; i++)
        for (uint32_t h = 0; h < hidden; h++)
            out[(size_t)e->list[i].row * hidden + h] =
                made_up(e->list[i].source, e->list[i].token, e->list[i].k, h);
    void *y = take(&s->dev, tensor_bytes(s->c, s->in->tokens));
    const float *dev_out = put(s, out, made * sizeof *out);
    free(out);
    if (!went_well(s, "combine",
                   s->backend->combine(s->session, s->layer, s->c->dtype, s->c->bucket,
                                       s->in->tokens, x, ids, weights, &r->rows, dev_out, y)))
        return false;
    void *host_y = get(s, y, tensor_bytes(s->c, s->in->tokens));
    double *got = must(n * sizeof *got), *want = must(n * sizeof *want);
    double *size = must(n * sizeof *size);
    expect_combined(s, want, size);
    for (size_t i = 0; i < n; i++)
        got[i] = element(s->c->dtype, host_y, i);
    double error = frobenius_of_summands(n, got, want, size);
    free(host_y);
    free(got);
    free(want);
    free(size);
    return error <= tolerance(s->c->dtype) || wrong(s, "combine is off by %g", error);
}

/* ------------------------------------------------------------------- shared */

static bool check_shared(struct subject *s, const void *x)
{
    uint32_t hidden = s->c->spec.hidden;
    size_t n = (size_t)s->in->tokens * hidden;
    float *start = must(n * sizeof *start);
    double *want = must(n * sizeof *want), *got = must(n * sizeof *got);
    bool good = true;
    for (uint32_t t = 0; t < s->in->tokens && good; t++) {
        double row[CASE_MAX_HIDDEN];
        for (uint32_t h = 0; h < hidden; h++)
            row[h] = element(s->c->dtype, s->in->x, (size_t)t * hidden + h);
        good = went_well(s, "oracle", moe_oracle_shared(s->oracle, row, want + (size_t)t * hidden));
        for (uint32_t h = 0; h < hidden; h++) {
            start[(size_t)t * hidden + h] = made_up(s->member->slot, t, 99, h);
            want[(size_t)t * hidden + h] += (double)start[(size_t)t * hidden + h];
        }
    }
    float *y = put(s, start, n * sizeof *start);
    good =
        good && went_well(s, "shared",
                          s->backend->shared_forward(s->layer, s->c->dtype, s->in->tokens, x, y));
    float *host_y = get(s, y, n * sizeof *y);
    size_t used = 0;
    for (uint32_t t = 0; t < s->in->tokens; t++)
        for (uint32_t h = 0; h < hidden && s->state[t] == MOE_TOKEN_OK; h++, used++) {
            got[used] = (double)host_y[(size_t)t * hidden + h];
            want[used] = want[(size_t)t * hidden + h]; /* used <= t * hidden + h */
        }
    double error = frobenius(used, got, want);
    free(start);
    free(want);
    free(got);
    free(host_y);
    return good && (error <= output_tolerance(s->c) || wrong(s, "shared is off by %g", error));
}

bool check_parts(struct subject *s)
{
    const struct test_case *c = s->c;
    size_t pairs = (size_t)s->in->tokens * c->spec.router.top_k;
    const void *x = put(s, s->in->x, tensor_bytes(c, s->in->tokens));
    const int32_t *ids = put(s, s->ids, pairs * sizeof *ids);
    const float *weights = put(s, s->weights, pairs * sizeof *weights);
    struct expected_rows e;
    struct received r = {0};
    expect_rows(s, &e);
    /* A pass without combine must not disturb the next one. */
    bool again = c->placement.version % 4 == 0;
    bool good = check_router(s, x) && check_shared(s, x) && dispatch(s, x, ids, weights, &e, &r);
    if (good && again) {
        free(r.x);
        free(r.weight);
        r = (struct received){0};
        good = dispatch(s, x, ids, weights, &e, &r);
    }
    good = good && check_gemms(s, &e, &r) && check_combine(s, &e, &r, x, ids, weights);
    free(e.list);
    free(r.x);
    free(r.weight);
    /* The routing of all slots stays on the board until all have read it. */
    return good && (board_barrier(s->member, 60000) || wrong(s, "another slot gave up"));
}
