/* SPDX-License-Identifier: Apache-2.0 */
/* The whole step against the oracle: token states, routing, outputs. A repeat gives the same bits,
 * on this slot and on any other.
 *
 * Routing is compared by a margin rule: if the difference of keys is within fp32 rounding, a
 * backend may choose other ids. So y is compared under the routing of the backend. */
#include "check.h"
#include "group.h"

#include "base/clock.h"
#include "moe/numbers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Everything one step writes. */
struct outcome {
    void *y;
    int32_t *ids;
    float *weights;
    uint8_t *state;
    struct moe_step_counts counts;
    struct moe_step_result result;
};

/* Outputs start as NaN and as invalid ids, so an unwritten output fails. */
static struct outcome blank_outcome(struct subject *s)
{
    size_t pairs = (size_t)s->in->tokens * s->c->spec.router.top_k;
    struct outcome o = {.y = take(&s->host, tensor_bytes(s->c, s->in->tokens)),
                        .ids = take(&s->host, pairs * sizeof(int32_t)),
                        .weights = take(&s->host, pairs * sizeof(float)),
                        .state = take(&s->host, s->in->tokens)};
    memset(o.y, 0xff, tensor_bytes(s->c, s->in->tokens));
    memset(o.ids, 0x7f, pairs * sizeof(int32_t));
    memset(o.weights, 0xff, pairs * sizeof(float));
    memset(o.state, 0xff, s->in->tokens);
    memset(o.counts.expert_rows, 0xff, sizeof o.counts.expert_rows);
    memset(o.counts.sent_rows, 0xff, sizeof o.counts.sent_rows);
    return o;
}

static struct moe_step_args step_args(struct subject *s, struct outcome *o)
{
    const struct case_input *in = s->in;
    size_t pairs = (size_t)in->tokens * s->c->spec.router.top_k;
    struct moe_step_args a = {.layer = s->layer,
                              .dtype = s->c->dtype,
                              .bucket = s->c->bucket,
                              .tokens = in->tokens,
                              .counts = &o->counts};
    if (in->tokens == 0)
        return a; /* NULL pointers are legal then */
    void *x = take(&s->host, tensor_bytes(s->c, in->tokens));
    memcpy(x, in->x, tensor_bytes(s->c, in->tokens));
    a.x = x;
    a.y = o->y;
    a.ids_out = o->ids;
    a.weights_out = o->weights;
    a.token_state = o->state;
    if (in->mode == NULL)
        return a;
    uint8_t *mode = take(&s->host, in->tokens);
    int32_t *ids = take(&s->host, pairs * sizeof *ids);
    float *weights = take(&s->host, pairs * sizeof *weights);
    memcpy(mode, in->mode, in->tokens);
    memcpy(ids, in->ids, pairs * sizeof *ids);
    memcpy(weights, in->weights, pairs * sizeof *weights);
    a.mode = mode;
    a.ids_in = ids;
    a.weights_in = weights;
    return a;
}

static bool finish_step(struct subject *s, struct moe_step *step, struct outcome *o)
{
    struct moe_status st = s->backend->step_wait(step, MOE_NEVER, &o->result);
    return went_well(s, "step", st) &&
           (o->result.missing_slot == -1 ||
            wrong(s, "a good step misses slot %d", o->result.missing_slot));
}

/* A step that has computed has moved the device's count. */
static bool run_once(struct subject *s, struct outcome *o)
{
    struct moe_step *step;
    *o = blank_outcome(s);
    struct moe_step_args a = step_args(s, o);
    uint64_t before = s->backend->device_progress(s->device);
    if (!went_well(s, "enqueue", s->backend->step_enqueue(s->session, &a, &step)) ||
        !finish_step(s, step, o))
        return false;
    return o->result.rows == 0 || s->backend->device_progress(s->device) != before ||
           wrong(s, "a step moves no progress");
}

static bool same_outcome(struct subject *s, const struct outcome *a, const struct outcome *b)
{
    size_t pairs = (size_t)s->in->tokens * s->c->spec.router.top_k;
    if (memcmp(a->y, b->y, tensor_bytes(s->c, s->in->tokens)) != 0)
        return wrong(s, "y differs from run to run");
    if (memcmp(a->ids, b->ids, pairs * sizeof *a->ids) != 0 ||
        memcmp(a->weights, b->weights, pairs * sizeof *a->weights) != 0 ||
        memcmp(a->state, b->state, s->in->tokens) != 0)
        return wrong(s, "routing differs from run to run");
    return true;
}

/* Two steps in flight give the results of one, and a third is refused. */
static bool check_two_in_flight(struct subject *s, const struct outcome *first)
{
    struct outcome o[2] = {blank_outcome(s), blank_outcome(s)};
    struct moe_step *step[3];
    struct moe_step_args a[2] = {step_args(s, &o[0]), step_args(s, &o[1])};
    for (int i = 0; i < 2; i++)
        if (!went_well(s, "enqueue", s->backend->step_enqueue(s->session, &a[i], &step[i])))
            return false;
    struct moe_status third = s->backend->step_enqueue(s->session, &a[0], &step[2]);
    if (third.code != MOE_FAILED_PRECONDITION)
        return wrong(s, "a third step was answered with %s", moe_code_name(third.code));
    return finish_step(s, step[0], &o[0]) && finish_step(s, step[1], &o[1]) &&
           same_outcome(s, first, &o[0]) && same_outcome(s, first, &o[1]);
}

/* ----------------------------------------------------------------- segments */

/* Where the rows of one segment lie: separate memory, of the host or of the device, that is off
 * from a multiple of 16 bytes by one element for odd numbers. */
static void *rows_at(struct subject *s, uint32_t number, const void *from, size_t bytes,
                     size_t element_bytes)
{
    const size_t shift = number % 2 == 1 ? element_bytes : 0;
    char *plain = must(bytes + element_bytes), *p = plain;
    memset(plain, 0xff, bytes + element_bytes);
    if (from != NULL)
        memcpy(plain + shift, from, bytes);
    if (number / 2 % 2 == 1) {
        p = put(s, plain, bytes + element_bytes);
    } else {
        p = take(&s->host, bytes + element_bytes);
        memcpy(p, plain, bytes + element_bytes);
    }
    free(plain);
    return p + shift;
}

/* Compares memory of host or device with plain memory. */
static bool same_bytes(struct subject *s, const void *p, const void *want, size_t bytes)
{
    void *got = get(s, p, bytes);
    bool same = memcmp(got, want, bytes) == 0;
    free(got);
    return same;
}

/* The tokens from `first` on that have the mode of the first one, at most `most`. */
static struct moe_step_segment segment_at(struct subject *s, uint32_t first, uint32_t most,
                                          uint32_t number)
{
    const struct case_input *in = s->in;
    const size_t k = s->c->spec.router.top_k, row = tensor_bytes(s->c, 1);
    struct moe_step_segment g = {.mode = in->mode != NULL ? in->mode[first] : MOE_ROUTE_SERVER};
    const enum moe_routing_mode mode = moe_routing_of(g.mode);
    while (g.tokens < most && first + g.tokens < in->tokens &&
           (in->mode == NULL || in->mode[first + g.tokens] == in->mode[first]))
        g.tokens++;
    const size_t n = g.tokens, each = moe_dtype_bytes(s->c->dtype);
    g.y = rows_at(s, number, (const char *)in->x + first * row, n * row, each);
    g.x = g.y; /* a step that read x again, or wrote y before its end, would fail */
    if (number % 4 != 2)
        g.y = rows_at(s, number, NULL, n * row, each);
    if (mode != MOE_ROUTE_SERVER)
        g.ids_in = rows_at(s, number, in->ids + first * k, n * k * sizeof(int32_t), 4);
    if (mode == MOE_ROUTE_IDS_WEIGHTS)
        g.weights_in = rows_at(s, number, in->weights + first * k, n * k * sizeof(float), 4);
    if (number % 3 == 0) /* outputs that are not wanted */
        return g;
    g.ids_out = rows_at(s, number, NULL, n * k * sizeof(int32_t), 4);
    g.weights_out = rows_at(s, number, NULL, n * k * sizeof(float), 4);
    g.token_state = rows_at(s, number, NULL, n, 1);
    return g;
}

static bool same_segment(struct subject *s, const struct moe_step_segment *g, uint32_t first,
                         const struct outcome *want)
{
    const size_t k = s->c->spec.router.top_k, row = tensor_bytes(s->c, 1), n = g->tokens;
    if (n == 0)
        return true;
    if (!same_bytes(s, g->y, (const char *)want->y + first * row, n * row))
        return wrong(s, "y of the segment at token %u differs from that without segments", first);
    if (g->ids_out != NULL &&
        !(same_bytes(s, g->ids_out, want->ids + first * k, n * k * sizeof *want->ids) &&
          same_bytes(s, g->weights_out, want->weights + first * k, n * k * sizeof *want->weights) &&
          same_bytes(s, g->token_state, want->state + first, n)))
        return wrong(s, "routing of the segment at token %u differs", first);
    return true;
}

/* Wrong segments are refused, and the session goes on. */
static bool check_refused_segments(struct subject *s, const struct moe_step_args *good)
{
    struct moe_step *step;
    struct moe_step_segment first = good->segments[0];
    struct moe_step_args a = *good, b = *good;
    first.x = NULL;
    a.segments = &first;
    a.segment_count = 1;
    b.segment_count--;
    if (s->in->tokens == 0)
        return true;
    if (s->backend->step_enqueue(s->session, &a, &step).code != MOE_INVALID_ARGUMENT ||
        s->backend->step_enqueue(s->session, &b, &step).code != MOE_INVALID_ARGUMENT)
        return wrong(s, "segments without x, or with too few tokens, are accepted");
    return true;
}

/* What a segment's completion stores. */
struct marks {
    uint64_t word, receipt;
    uint32_t signal;
};

/* Gives every third segment no completion. */
static struct moe_step_completion completion_at(struct marks *m, uint32_t number)
{
    *m = (struct marks){0};
    if (number % 3 == 2)
        return (struct moe_step_completion){0};
    return (struct moe_step_completion){
        .word = &m->word, .signal = &m->signal, .receipt = &m->receipt, .value = number + 1};
}

/* The device stores a completion if all tokens of the segment are good. */
static bool check_marks(struct subject *s, const struct marks *m, uint32_t number,
                        const uint8_t *states, uint32_t tokens)
{
    bool stored = s->backend->stores_completions && number % 3 != 2;
    for (uint32_t t = 0; t < tokens; t++)
        stored = stored && states[t] == MOE_TOKEN_OK;
    const uint64_t value = stored ? number + 1 : 0;
    return (m->word == value && m->receipt == value && m->signal == stored) ||
           wrong(s, "segment %u has the completion %llu, receipt %llu, signal %u, not %llu", number,
                 (unsigned long long)m->word, (unsigned long long)m->receipt, m->signal,
                 (unsigned long long)value);
}

/* Segments of some tokens, the last of them empty, give the bits of one piece. */
static bool check_segments(struct subject *s, const struct outcome *first)
{
    struct outcome o = blank_outcome(s);
    struct moe_step_args a = {.layer = s->layer,
                              .dtype = s->c->dtype,
                              .bucket = s->c->bucket,
                              .tokens = s->in->tokens,
                              .ids_out = o.ids,
                              .weights_out = o.weights,
                              .token_state = o.state,
                              .counts = &o.counts};
    struct moe_step_segment *segments = must((s->in->tokens + 1) * sizeof *segments);
    struct marks *marks = take(&s->host, (s->in->tokens + 1) * sizeof *marks);
    struct moe_step *step;
    uint32_t count = 0, at = 0;
    for (; at < s->in->tokens; at += segments[count++].tokens) {
        segments[count] = segment_at(s, at, 1 + (7 * count + s->in->tokens) % 23, count);
        segments[count].completion = completion_at(&marks[count], count);
    }
    const bool room = count < s->in->tokens;
    if (room)
        segments[count] = (struct moe_step_segment){0};
    a.segments = segments;
    a.segment_count = count;
    bool good = check_refused_segments(s, &a);
    a.segment_count += room;
    good = good && went_well(s, "segments", s->backend->step_enqueue(s->session, &a, &step)) &&
           finish_step(s, step, &o);
    at = 0;
    for (uint32_t i = 0; i < count && good; at += segments[i++].tokens)
        good = same_segment(s, &segments[i], at, first) &&
               check_marks(s, &marks[i], i, o.state + at, segments[i].tokens);
    free(segments);
    return good && (memcmp(o.state, first->state, s->in->tokens) == 0 ||
                    wrong(s, "token states differ with segments"));
}

/* ------------------------------------------------------------------ routing */

/* The oracle's routing of one token. */
struct expectation {
    enum moe_token_state state;
    int32_t ids[MOE_MAX_TOP_K];
    double weights[MOE_MAX_TOP_K];
    double margin;
    double largest_logit;
};

static bool expect_route(struct subject *s, uint32_t t, struct expectation *e)
{
    const struct test_case *c = s->c;
    const struct case_input *in = s->in;
    uint32_t hidden = c->spec.hidden, n = c->spec.experts + c->spec.router.zero_experts;
    size_t first = (size_t)t * c->spec.router.top_k;
    double x[CASE_MAX_HIDDEN], logit[2 * CASE_MAX_EXPERTS], bias[2 * CASE_MAX_EXPERTS];
    for (uint32_t i = 0; i < hidden; i++)
        x[i] = element(c->dtype, in->x, (size_t)t * hidden + i);
    if (!went_well(s, "oracle", moe_oracle_logits(s->oracle, x, logit)))
        return false;
    e->largest_logit = 0;
    for (uint32_t i = 0; i < n; i++) {
        e->largest_logit = fmax(e->largest_logit, fabs(logit[i]));
        if (c->spec.router.select_bias)
            bias[i] = moe_oracle_weight(s->oracle, MOE_WEIGHT_SELECT_BIAS, 0)[i];
    }
    e->state =
        moe_oracle_route(&c->spec, logit, c->spec.router.select_bias ? bias : NULL,
                         in->mode ? moe_routing_of(in->mode[t]) : MOE_ROUTE_SERVER, in->ids + first,
                         in->weights + first, e->ids, e->weights, &e->margin);
    return true;
}

/* Ids that differ from the oracle's must be legal, distinct, and within rounding of its choice. */
static bool near_tie(struct subject *s, const struct expectation *e, const int32_t *ids)
{
    const struct moe_layer_spec *spec = &s->c->spec;
    for (uint32_t k = 0; k < spec->router.top_k; k++) {
        if (ids[k] < 0 || ids[k] >= (int32_t)(spec->experts + spec->router.zero_experts))
            return false;
        for (uint32_t j = 0; j < k; j++)
            if (ids[j] == ids[k])
                return false;
    }
    return e->margin <= 3e-6 * (1 + e->largest_logit);
}

static bool check_routing(struct subject *s, const struct outcome *o)
{
    uint32_t top_k = s->c->spec.router.top_k;
    size_t n = 0, pairs = (size_t)s->in->tokens * top_k;
    double *got = must(pairs * sizeof *got), *want = must(pairs * sizeof *want);
    bool good = true;
    for (uint32_t t = 0; t < s->in->tokens && good; t++) {
        struct expectation e;
        const int32_t *ids = o->ids + (size_t)t * top_k;
        good = expect_route(s, t, &e);
        if (good && o->state[t] != e.state)
            good = wrong(s, "token %u: state %u, not %d", t, o->state[t], (int)e.state);
        if (!good || e.state != MOE_TOKEN_OK) {
            s->tally->refused++;
            continue;
        }
        bool same = memcmp(ids, e.ids, top_k * sizeof *ids) == 0;
        if (!same && !near_tie(s, &e, ids))
            good = wrong(s, "token %u: routed to %d %d .., not %d %d .. (margin %g)", t, ids[0],
                         top_k > 1 ? ids[1] : -1, e.ids[0], top_k > 1 ? e.ids[1] : -1, e.margin);
        s->tally->swaps += !same;
        for (uint32_t k = 0; k < top_k && same; k++, n++) {
            got[n] = (double)o->weights[(size_t)t * top_k + k];
            want[n] = e.weights[k];
        }
    }
    double error = frobenius(n, got, want);
    if (good && !(error <= 1e-5))
        good = wrong(s, "routing weights are off by %g", error);
    free(got);
    free(want);
    return good;
}

/* ------------------------------------------------------------------- output */

/* y of the oracle with the routing of the backend; refused tokens are zeros. */
static bool expect_output(struct subject *s, const struct outcome *o, double *want)
{
    const struct test_case *c = s->c;
    uint8_t *given = must(s->in->tokens);
    for (uint32_t t = 0; t < s->in->tokens; t++)
        given[t] = MOE_ROUTE_IDS_WEIGHTS |
                   (s->in->mode != NULL ? s->in->mode[t] & MOE_ROUTE_WITHOUT_SHARED : 0);
    struct moe_status st = moe_oracle_forward(s->oracle, c->dtype, s->in->tokens, s->in->x, given,
                                              o->ids, o->weights, NULL, NULL, NULL, NULL, want);
    free(given);
    for (uint32_t t = 0; t < s->in->tokens; t++)
        if (o->state[t] != MOE_TOKEN_OK)
            memset(want + (size_t)t * c->spec.hidden, 0, c->spec.hidden * sizeof *want);
    return went_well(s, "oracle", st);
}

/* Row `row` of a matrix times x, plus the bias if there is one. `size`: the same of magnitudes. */
static double row_times(const double *w, const double *bias, size_t row, size_t n, const double *x,
                        double *size)
{
    double sum = bias == NULL ? 0 : bias[row];
    *size = fabs(sum);
    for (size_t i = 0; i < n; i++) {
        sum += w[row * n + i] * x[i];
        *size += fabs(w[row * n + i] * x[i]);
    }
    return sum;
}

/* What an output is compared by. */
struct summands {
    double *size;   /* [H] the sum of the magnitudes that down adds up */
    double *either; /* [H] W8A8: what hidden values change that may be rounded up or down */
};

/* One expert's activations, and how far a backend's may be off. */
struct activations {
    uint32_t n;
    double value[CASE_MAX_INNER], off[CASE_MAX_INNER];
};

/* The largest change of an activation if g and u are off by dg and du. */
static double activation_off(const struct moe_layer_spec *s, enum moe_activation act, double g,
                             double u, double dg, double du)
{
    double limit = (double)s->swiglu_limit, alpha = (double)s->swiglu_alpha, off = 0;
    double a = moe_oracle_activate(act, limit, alpha, g, u);
    for (int corner = 0; corner < 4; corner++) {
        double moved = moe_oracle_activate(act, limit, alpha, corner % 2 == 0 ? g - dg : g + dg,
                                           corner / 2 == 0 ? u - du : u + du);
        off = fmax(off, fabs(moved - a));
    }
    return off;
}

/* How far a backend's quantised value `i` may be from that of the oracle, because both roundings
 * are next to each other. `scale`: that of its group; `off`: of the activation, and of the scale.
 */
static double rounding_step(double value, double off, double scale)
{
    double most = fabs(value) + off, least = fmax(fabs(value) - off, 0);
    return scale * (double)(moe_round_to_e4m3((float)(most / scale)) -
                            moe_round_to_e4m3((float)(least / scale)));
}

/* steps [n]: rounding_step of each value of hidden rows in W8A8. */
static void rounding_steps(const struct moe_weight_format *f, const struct activations *a,
                           double *steps)
{
    uint32_t group = moe_activation_group(f, a->n);
    for (uint32_t first = 0; first < a->n; first += group) {
        uint32_t end = a->n - first < group ? a->n : first + group;
        double largest = 0, off = 0;
        for (uint32_t i = first; i < end; i++) {
            largest = fmax(largest, fabs(a->value[i]));
            off = fmax(off, a->off[i]);
        }
        double scale =
            (double)moe_e4m3_scale((float)largest, f->activations == MOE_ACTIVATIONS_F8_POW2);
        for (uint32_t i = first; i < end && largest > 0; i++)
            steps[i] = rounding_step(a->value[i],
                                     a->off[i] + fabs(a->value[i]) * fmin(off / largest, 1), scale);
    }
}

/* Adds `scale` * an expert's output, or the shared expert's with expert < 0, with the weights of
 * the oracle. x [H], weighted already where that is done to inputs. A zero expert adds |x|. */
static void add_expert_summands(struct moe_oracle_layer *o, const struct moe_layer_spec *s,
                                int32_t expert, const double *x, double scale, struct summands *to)
{
    bool shared = expert < 0;
    if (expert >= (int32_t)s->experts) {
        for (uint32_t h = 0; h < s->hidden; h++)
            to->size[h] += scale * fabs(x[h]);
        return;
    }
    const struct moe_weight_format *f = shared ? &s->shared_format : &s->routed_format;
    bool w8a8 = f->encoding != MOE_ENC_NONE && f->activations != MOE_ACTIVATIONS_PLAIN;
    uint32_t e = shared ? 0 : (uint32_t)expert;
    enum moe_activation act = shared ? s->shared_activation : s->activation;
    const double *gate = moe_oracle_weight(o, shared ? MOE_WEIGHT_SHARED_GATE : MOE_WEIGHT_GATE, e);
    const double *up = moe_oracle_weight(o, shared ? MOE_WEIGHT_SHARED_UP : MOE_WEIGHT_UP, e);
    const double *down = moe_oracle_weight(o, shared ? MOE_WEIGHT_SHARED_DOWN : MOE_WEIGHT_DOWN, e);
    const double *bias[3] = {NULL};
    for (int i = 0; i < 3 && !shared; i++)
        bias[i] = moe_oracle_weight(o, (enum moe_weight)(MOE_WEIGHT_GATE_BIAS + i), e);
    struct activations a = {.n = shared ? s->shared_intermediate : s->intermediate};
    double steps[CASE_MAX_INNER] = {0}, row[CASE_MAX_HIDDEN];
    memcpy(row, x, s->hidden * sizeof *row);
    moe_oracle_quantise(f, s->hidden, row);
    for (uint32_t i = 0; i < a.n; i++) {
        double g_size, u_size;
        double g = row_times(gate, bias[0], i, s->hidden, row, &g_size);
        double u = row_times(up, bias[1], i, s->hidden, row, &u_size);
        a.value[i] =
            moe_oracle_activate(act, (double)s->swiglu_limit, (double)s->swiglu_alpha, g, u);
        /* Sums inside the instructions of GPUs have about 14 bits; 11 of them count here. */
        a.off[i] = activation_off(s, act, g, u, 0x1p-11 * g_size, 0x1p-11 * u_size);
    }
    if (w8a8)
        rounding_steps(f, &a, steps);
    for (uint32_t i = 0; i < a.n; i++)
        for (uint32_t h = 0; h < s->hidden; h++) {
            to->size[h] += scale * fabs(a.value[i] * down[(size_t)h * a.n + i]);
            to->either[h] += scale * steps[i] * fabs(down[(size_t)h * a.n + i]);
        }
    for (uint32_t h = 0; h < s->hidden && bias[2] != NULL; h++)
        to->size[h] += scale * fabs(bias[2][h]);
}

/* Adds the summands of one token's y. */
static void add_summands(struct subject *s, const struct outcome *o, uint32_t t,
                         struct summands *to)
{
    const struct moe_layer_spec *spec = &s->c->spec;
    bool input = spec->weighting == MOE_WEIGHT_INPUT;
    double x[CASE_MAX_HIDDEN], scaled[CASE_MAX_HIDDEN];
    for (uint32_t h = 0; h < spec->hidden; h++)
        x[h] = element(s->c->dtype, s->in->x, (size_t)t * spec->hidden + h);
    for (uint32_t k = 0; k < spec->router.top_k; k++) {
        size_t pair = (size_t)t * spec->router.top_k + k;
        double w = (double)o->weights[pair];
        for (uint32_t h = 0; h < spec->hidden; h++)
            scaled[h] = input ? w * x[h] : x[h];
        if (o->ids[pair] >= 0)
            add_expert_summands(s->oracle, spec, o->ids[pair], scaled, input ? 1 : fabs(w), to);
    }
    if (spec->shared_intermediate != 0)
        add_expert_summands(s->oracle, spec, -1, x, 1, to);
}

/* Given weights of both signs can make y as small as chance likes: the same expert with weights 0.7
 * and -0.7 leaves rounding errors alone. So can the terms of a product with few columns.
 *
 * A hidden value of W8A8 next to a rounding boundary may go either way, by 2^-4 of itself. With few
 * columns one such value is a large part of y. So y may be off by what those values change. */
static double error_of_summands(struct subject *s, const struct outcome *o, const double *got,
                                const double *want)
{
    uint32_t hidden = s->c->spec.hidden;
    size_t n = (size_t)s->in->tokens * hidden;
    double *size = must(n * sizeof *size), *either = must(n * sizeof *either);
    double *nearest = must(n * sizeof *nearest);
    for (uint32_t t = 0; t < s->in->tokens; t++)
        if (o->state[t] == MOE_TOKEN_OK)
            add_summands(
                s, o, t,
                &(struct summands){size + (size_t)t * hidden, either + (size_t)t * hidden});
    for (size_t i = 0; i < n; i++)
        nearest[i] = fmin(fmax(got[i], want[i] - either[i]), want[i] + either[i]);
    double error = frobenius_of_summands(n, got, nearest, size);
    free(size);
    free(either);
    free(nearest);
    return error;
}

static bool check_output(struct subject *s, const struct outcome *o)
{
    const struct test_case *c = s->c;
    size_t n = (size_t)s->in->tokens * c->spec.hidden;
    double *want = must(n * sizeof *want), *got = must(n * sizeof *got);
    bool good = expect_output(s, o, want);
    for (size_t i = 0; i < n; i++)
        got[i] = element(c->dtype, o->y, i);
    for (size_t i = 0; i < n && good; i++)
        if (o->state[i / c->spec.hidden] != MOE_TOKEN_OK && got[i] != 0)
            good = wrong(s, "y of the refused token %zu is %g", i / c->spec.hidden, got[i]);
    double error = frobenius(n, got, want), limit = output_tolerance(c);
    if (good && !(error <= limit)) { /* wrong, or a sum that cancels: look closer */
        double plain = error;
        error = error_of_summands(s, o, got, want);
        good =
            error <= limit || wrong(s, "y is off by %g, and by %g of what is summed", plain, error);
    }
    if (error > s->tally->worst[c->dtype])
        s->tally->worst[c->dtype] = error;
    free(want);
    free(got);
    return good;
}

/* The counts by expert and by slot. `want` [E]: rows here. */
static bool check_counts(struct subject *s, const struct outcome *o, const uint32_t *want)
{
    const struct moe_step_counts *n = &o->counts;
    const struct board *b = s->member->board;
    uint32_t top_k = s->c->spec.router.top_k, own = s->member->slot, sent[MOE_MAX_SLOTS] = {0};
    if (!(n->by_expert && n->to_slots))
        return wrong(s, "the step reports no counts");
    for (uint32_t e = 0; e < s->c->spec.experts; e++)
        if (n->expert_rows[e] != want[e])
            return wrong(s, "expert %u has %u rows, not %u", e, n->expert_rows[e], want[e]);
    for (uint32_t t = 0; t < s->in->tokens; t++) {
        uint64_t to = 0;
        for (uint32_t k = 0; k < top_k; k++) {
            int slot = case_target(s->c, t, b->ids[own][t * top_k + k]);
            to |= slot >= 0 ? UINT64_C(1) << slot : 0;
        }
        for (uint32_t p = 0; p < s->member->slots; p++)
            sent[p] += p != own && (to >> p & 1) != 0;
    }
    if (n->slots != s->member->slots)
        return wrong(s, "the counts are of %u slots", n->slots);
    for (uint32_t p = 0; !group_has_hosts() && p < s->member->slots; p++)
        if (n->sent_rows[p] != sent[p])
            return wrong(s, "%u rows went to slot %u, not %u", n->sent_rows[p], p, sent[p]);
    return true;
}

/* Rows on this slot by the routing of all slots: the step must have computed so many. */
static bool check_rows(struct subject *s, const struct outcome *o)
{
    const struct board *b = s->member->board;
    uint32_t top_k = s->c->spec.router.top_k, of_expert[CASE_MAX_EXPERTS] = {0};
    uint64_t want = 0;
    for (uint32_t p = 0; p < s->member->slots; p++)
        for (uint32_t i = 0; i < s->c->input[p].tokens * top_k; i++)
            if (case_target(s->c, i / top_k, b->ids[p][i]) == (int)s->member->slot) {
                want++;
                of_expert[b->ids[p][i]]++;
            }
    s->tally->rows += want;
    if (o->result.rows != want)
        return wrong(s, "the step computed %llu rows, not %llu", (unsigned long long)o->result.rows,
                     (unsigned long long)want);
    return check_counts(s, o, of_expert);
}

/* ------------------------------------------------------------------ anywhere */

/* All slots bring the tokens of one slot to a step: y has the same bits on all of them. */
static bool check_anywhere(struct subject *s)
{
    const struct case_input *mine = s->in;
    struct board *b = s->member->board;
    uint32_t giver = 0;
    while (giver + 1 < s->member->slots && s->c->input[giver].tokens == 0)
        giver++;
    struct outcome o;
    s->in = &s->c->input[giver];
    bool good = run_once(s, &o);
    uint64_t h = 0;
    if (good)
        add_to_hash(&h, o.y, tensor_bytes(s->c, s->in->tokens));
    s->in = mine;
    memcpy(b->weights[s->member->slot], &h, sizeof h);
    if (!good || !board_barrier(s->member, 60000))
        return good && wrong(s, "another slot gave up");
    for (uint32_t p = 0; p < s->member->slots; p++)
        good = good && memcmp(b->weights[p], &h, sizeof h) == 0;
    /* The board is reused after all have read it. */
    if (!board_barrier(s->member, 60000))
        return wrong(s, "another slot gave up");
    return good || wrong(s, "the same tokens come out otherwise on another slot");
}

/* Shows this slot's routing to all slots; true when every slot has done so. */
static bool share_routing(struct subject *s, const struct outcome *o)
{
    struct board *b = s->member->board;
    size_t pairs = (size_t)s->in->tokens * s->c->spec.router.top_k;
    memcpy(b->ids[s->member->slot], o->ids, pairs * sizeof *o->ids);
    memcpy(b->weights[s->member->slot], o->weights, pairs * sizeof *o->weights);
    memcpy(b->state[s->member->slot], o->state, s->in->tokens);
    return board_barrier(s->member, 60000) || wrong(s, "another slot gave up");
}

bool check_step(struct subject *s)
{
    struct outcome o;
    if (!run_once(s, &o) || !check_routing(s, &o) || !check_output(s, &o) ||
        !check_two_in_flight(s, &o) || !check_segments(s, &o) || !check_anywhere(s) ||
        !share_routing(s, &o) || !check_rows(s, &o))
        return false;
    add_to_hash(&s->tally->bits, o.y, tensor_bytes(s->c, s->in->tokens));
    s->tally->tokens += s->in->tokens;
    s->ids = o.ids;
    s->weights = o.weights;
    s->state = o.state;
    return true;
}
