/* SPDX-License-Identifier: Apache-2.0 */
/* A step of a large case: the same bits on every run, rows on the slots of the placement, and
 * sampled tokens against the oracle. */
#include "large.h"

#include "base/clock.h"

#include <math.h>
#include <stdlib.h>

struct outcome {
    void *y;
    int32_t *ids;
    float *weights;
    uint8_t *state;
    struct moe_step_result result;
};

/* -------------------------------------------------------------------- helpers */

size_t large_row_bytes(const struct large *l, uint32_t tokens)
{
    return (size_t)tokens * l->c->spec.hidden * moe_dtype_bytes(l->c->dtype);
}

uint32_t large_samples(const struct large *l)
{
    return l->in->tokens < l->samples ? l->in->tokens : l->samples;
}

uint32_t large_sample(const struct large *l, uint32_t i)
{
    uint32_t n = large_samples(l);
    return n < 2 ? 0 : (uint32_t)((uint64_t)i * (l->in->tokens - 1) / (n - 1));
}

void large_copy_row(const struct large *l, const void *rows, uint32_t from, void *out, uint32_t to)
{
    size_t bytes = large_row_bytes(l, 1);
    memcpy((uint8_t *)out + to * bytes, (const uint8_t *)rows + from * bytes, bytes);
}

double large_tolerance(const struct large_case *c)
{
    double length = c->spec.hidden > 4096 ? c->spec.hidden / 4096.0 : 1;
    return c->dtype == MOE_DTYPE_F32 ? tolerance(c->dtype) * length : tolerance(c->dtype);
}

bool large_await_members(struct large *l)
{
    return board_barrier(l->s.member, 600000) || wrong(&l->s, "another slot gave up");
}

static bool give(struct large *l, struct moe_oracle_layer *to, enum moe_weight w, uint32_t expert)
{
    size_t bytes;
    void *data = large_weight(l->c, w, expert, &bytes);
    bool good =
        bytes == 0 || went_well(&l->s, "oracle",
                                moe_oracle_upload(to, w, expert, l->c->weight_dtype, data, bytes));
    free(data);
    return good;
}

bool large_oracle(struct large *l, const int32_t *ids, size_t count, struct moe_oracle_layer **out)
{
    bool good = went_well(&l->s, "oracle", moe_oracle_create(&l->c->spec, out));
    for (uint32_t i = 0; i < MOE_WEIGHT_COUNT && good; i++) {
        enum moe_weight w = (enum moe_weight)i;
        if (!moe_weight_is_expert(w))
            good = give(l, *out, w, 0);
        for (size_t j = 0; j < count && moe_weight_is_expert(w) && good; j++)
            if (ids[j] >= 0 && ids[j] < (int32_t)l->c->spec.experts &&
                moe_oracle_weight(*out, w, (uint32_t)ids[j]) == NULL)
                good = give(l, *out, w, (uint32_t)ids[j]);
    }
    return good;
}

/* ----------------------------------------------------------------------- steps */

/* Outputs start as NaN and as invalid ids, so an unwritten output fails. */
static struct outcome blank_outcome(struct large *l)
{
    struct arena *host = &l->s.host;
    uint32_t tokens = l->in->tokens;
    size_t pairs = (size_t)tokens * l->c->spec.router.top_k;
    struct outcome o = {.y = take(host, large_row_bytes(l, tokens)),
                        .ids = take(host, pairs * sizeof(int32_t)),
                        .weights = take(host, pairs * sizeof(float)),
                        .state = take(host, tokens)};
    memset(o.y, 0xff, large_row_bytes(l, tokens));
    memset(o.ids, 0x7f, pairs * sizeof(int32_t));
    memset(o.weights, 0xff, pairs * sizeof(float));
    memset(o.state, 0xff, tokens);
    return o;
}

/* Copies the inputs to memory for the device, once for all steps of a case. */
static struct moe_step_args step_inputs(struct large *l)
{
    const struct large_input *in = l->in;
    struct arena *host = &l->s.host;
    size_t pairs = (size_t)in->tokens * l->c->spec.router.top_k;
    struct moe_step_args a = {
        .layer = l->s.layer, .dtype = l->c->dtype, .bucket = l->c->bucket, .tokens = in->tokens};
    if (in->tokens == 0)
        return a; /* NULL pointers are legal then */
    void *x = take(host, large_row_bytes(l, in->tokens));
    uint8_t *mode = take(host, in->tokens);
    int32_t *ids = take(host, pairs * sizeof *ids);
    float *weights = take(host, pairs * sizeof *weights);
    memcpy(x, in->x, large_row_bytes(l, in->tokens));
    memcpy(mode, in->mode, in->tokens);
    memcpy(ids, in->ids, pairs * sizeof *ids);
    memcpy(weights, in->weights, pairs * sizeof *weights);
    a.x = x;
    a.mode = mode;
    a.ids_in = ids;
    a.weights_in = weights;
    return a;
}

static bool start(struct large *l, struct moe_step_args a, struct outcome *o, struct moe_step **out)
{
    *o = blank_outcome(l);
    if (a.tokens > 0) {
        a.y = o->y;
        a.ids_out = o->ids;
        a.weights_out = o->weights;
        a.token_state = o->state;
    }
    return went_well(&l->s, "enqueue", l->s.backend->step_enqueue(l->s.session, &a, out));
}

static bool finish(struct large *l, struct moe_step *step, struct outcome *o)
{
    return went_well(&l->s, "step", l->s.backend->step_wait(step, MOE_NEVER, &o->result)) &&
           (o->result.missing_slot == -1 ||
            wrong(&l->s, "a good step misses slot %d", o->result.missing_slot));
}

static bool same_outcome(struct large *l, const struct outcome *a, const struct outcome *b)
{
    size_t pairs = (size_t)l->in->tokens * l->c->spec.router.top_k;
    return (memcmp(a->y, b->y, large_row_bytes(l, l->in->tokens)) == 0 &&
            memcmp(a->ids, b->ids, pairs * sizeof *a->ids) == 0 &&
            memcmp(a->weights, b->weights, pairs * sizeof *a->weights) == 0 &&
            memcmp(a->state, b->state, l->in->tokens) == 0) ||
           wrong(&l->s, "y or routing differs from run to run");
}

/* One step alone, then two in flight: the same bits. */
static bool run_steps(struct large *l, struct outcome *first)
{
    struct moe_step_args a = step_inputs(l);
    struct outcome o[2];
    struct moe_step *step[2];
    return start(l, a, first, &step[0]) && finish(l, step[0], first) &&
           start(l, a, &o[0], &step[0]) && start(l, a, &o[1], &step[1]) &&
           finish(l, step[0], &o[0]) && finish(l, step[1], &o[1]) &&
           same_outcome(l, first, &o[0]) && same_outcome(l, first, &o[1]);
}

/* ------------------------------------------------------------------ all tokens */

/* Every token is accepted, every number is finite, every id is legal. */
static bool check_all(struct large *l, const struct outcome *o)
{
    const struct moe_layer_spec *spec = &l->c->spec;
    int32_t ids = (int32_t)(spec->experts + spec->router.zero_experts);
    size_t pairs = (size_t)l->in->tokens * spec->router.top_k;
    for (uint32_t t = 0; t < l->in->tokens; t++)
        if (o->state[t] != MOE_TOKEN_OK)
            return wrong(&l->s, "token %u: state %u", t, o->state[t]);
    for (size_t i = 0; i < pairs; i++)
        if (o->ids[i] < 0 || o->ids[i] >= ids || !isfinite(o->weights[i]))
            return wrong(&l->s, "choice %zu: expert %d with weight %g", i, o->ids[i],
                         (double)o->weights[i]);
    for (size_t i = 0; i < (size_t)l->in->tokens * spec->hidden; i++)
        if (!isfinite(element(l->c->dtype, o->y, i)))
            return wrong(&l->s, "y of token %zu is not finite", i / spec->hidden);
    return true;
}

/* Shows the routing to all slots, and counts the rows for this slot from all of them. */
static bool check_rows(struct large *l, const struct outcome *o)
{
    struct board *b = l->s.member->board;
    uint32_t top_k = l->c->spec.router.top_k, slot = l->s.member->slot;
    uint64_t want = 0;
    memcpy(b->ids[slot], o->ids, (size_t)l->in->tokens * top_k * sizeof *o->ids);
    memcpy(b->weights[slot], o->weights, (size_t)l->in->tokens * top_k * sizeof *o->weights);
    if (!large_await_members(l))
        return false;
    for (uint32_t p = 0; p < l->s.member->slots; p++)
        for (uint32_t i = 0; i < l->c->input[p].tokens * top_k; i++)
            want += large_target(l->c, i / top_k, b->ids[p][i]) == (int)slot;
    l->s.tally->rows += want;
    return o->result.rows == want ||
           wrong(&l->s, "the step computed %llu rows, not %llu", (unsigned long long)o->result.rows,
                 (unsigned long long)want);
}

/* -------------------------------------------------------------- sampled tokens */

/* Sampled tokens, gathered. */
struct sampled {
    uint32_t n;
    void *x;
    uint8_t mode[LARGE_TOGETHER], given[LARGE_TOGETHER];
    int32_t ids[LARGE_TOGETHER * MOE_MAX_TOP_K], ids_in[LARGE_TOGETHER * MOE_MAX_TOP_K];
    float weights[LARGE_TOGETHER * MOE_MAX_TOP_K], weights_in[LARGE_TOGETHER * MOE_MAX_TOP_K];
};

static void gather(const struct large *l, const struct outcome *o, uint32_t first,
                   struct sampled *to)
{
    uint32_t top_k = l->c->spec.router.top_k;
    *to = (struct sampled){.x = must(large_row_bytes(l, LARGE_TOGETHER))};
    memset(to->given, MOE_ROUTE_IDS_WEIGHTS, sizeof to->given);
    for (; to->n < LARGE_TOGETHER && first + to->n < large_samples(l); to->n++) {
        uint32_t t = large_sample(l, first + to->n), at = to->n * top_k;
        large_copy_row(l, l->in->x, t, to->x, to->n);
        to->mode[to->n] = l->in->mode[t];
        memcpy(to->ids + at, o->ids + (size_t)t * top_k, top_k * sizeof *to->ids);
        memcpy(to->weights + at, o->weights + (size_t)t * top_k, top_k * sizeof *to->weights);
        memcpy(to->ids_in + at, l->in->ids + (size_t)t * top_k, top_k * sizeof *to->ids);
        memcpy(to->weights_in + at, l->in->weights + (size_t)t * top_k,
               top_k * sizeof *to->weights);
    }
}

static double *token_in_double(const struct large *l, const void *rows, uint32_t row)
{
    size_t hidden = l->c->spec.hidden;
    double *x = must(hidden * sizeof *x);
    for (size_t h = 0; h < hidden; h++)
        x[h] = element(l->c->dtype, rows, row * hidden + h);
    return x;
}

/* Ids of the oracle, or others within rounding of its choice; weights near those of the oracle. */
static bool check_route(struct large *l, struct moe_oracle_layer *oracle, const struct sampled *p,
                        uint32_t i)
{
    uint32_t top_k = l->c->spec.router.top_k, n = l->c->spec.experts;
    double logit[2 * MOE_MAX_EXPERTS], want[MOE_MAX_TOP_K], got[MOE_MAX_TOP_K], margin;
    double largest = 0, length = fmax(1, l->c->spec.hidden / 4096.0);
    int32_t ids[MOE_MAX_TOP_K];
    double *x = token_in_double(l, p->x, i);
    struct moe_status st = moe_oracle_logits(oracle, x, logit);
    free(x);
    if (!went_well(&l->s, "oracle", st))
        return false;
    for (uint32_t e = 0; e < n + l->c->spec.router.zero_experts; e++)
        largest = fmax(largest, fabs(logit[e]));
    enum moe_token_state state =
        moe_oracle_route(&l->c->spec, logit, moe_oracle_weight(oracle, MOE_WEIGHT_SELECT_BIAS, 0),
                         (enum moe_routing_mode)p->mode[i], p->ids_in + i * top_k,
                         p->weights_in + i * top_k, ids, want, &margin);
    if (state != MOE_TOKEN_OK)
        return wrong(&l->s, "the oracle refuses a token: %d", (int)state);
    if (memcmp(ids, p->ids + i * top_k, top_k * sizeof *ids) != 0) {
        l->s.tally->swaps++;
        return margin <= 3e-6 * length * (1 + largest) ||
               wrong(&l->s, "sample %u: routed to %d .., not %d .. (margin %g)", i,
                     p->ids[i * top_k], ids[0], margin);
    }
    for (uint32_t k = 0; k < top_k; k++)
        got[k] = (double)p->weights[i * top_k + k];
    double error = frobenius(top_k, got, want);
    return error <= 1e-5 * length || wrong(&l->s, "routing weights are off by %g", error);
}

static bool check_output(struct large *l, struct moe_oracle_layer *oracle, const struct sampled *p,
                         const struct outcome *o, uint32_t first)
{
    size_t hidden = l->c->spec.hidden, n = p->n * hidden;
    double *want = must(n * sizeof *want), *got = must(n * sizeof *got);
    bool good = went_well(&l->s, "oracle",
                          moe_oracle_forward(oracle, l->c->dtype, p->n, p->x, p->given, p->ids,
                                             p->weights, NULL, NULL, NULL, NULL, want));
    for (size_t i = 0; i < n; i++)
        got[i] = element(l->c->dtype, o->y,
                         large_sample(l, first + (uint32_t)(i / hidden)) * hidden + i % hidden);
    for (uint32_t i = 0; i < p->n && good; i++) { /* each by itself: a wrong one must not hide */
        double error = frobenius(hidden, got + i * hidden, want + i * hidden);
        if (!(error <= large_tolerance(l->c)))
            good = wrong(&l->s, "y of token %u is off by %g", large_sample(l, first + i), error);
        l->s.tally->worst[l->c->dtype] = fmax(l->s.tally->worst[l->c->dtype], error);
    }
    l->oracle_tokens += p->n;
    free(want);
    free(got);
    return good;
}

static bool check_samples(struct large *l, const struct outcome *o)
{
    bool good = true;
    for (uint32_t first = 0; first < large_samples(l) && good; first += LARGE_TOGETHER) {
        struct sampled p;
        struct moe_oracle_layer *oracle = NULL;
        gather(l, o, first, &p);
        good = large_oracle(l, p.ids, (size_t)p.n * l->c->spec.router.top_k, &oracle);
        for (uint32_t i = 0; i < p.n && good; i++)
            good = check_route(l, oracle, &p, i);
        good = good && check_output(l, oracle, &p, o, first);
        moe_oracle_destroy(oracle);
        free(p.x);
    }
    return good;
}

bool large_check_step(struct large *l)
{
    struct outcome o;
    if (!run_steps(l, &o) || !check_all(l, &o) || !check_rows(l, &o) || !check_samples(l, &o))
        return false;
    add_to_hash(&l->s.tally->bits, o.y, large_row_bytes(l, l->in->tokens));
    l->s.tally->tokens += l->in->tokens;
    l->ids = o.ids;
    l->weights = o.weights;
    return true;
}
