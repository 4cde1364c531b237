/* SPDX-License-Identifier: Apache-2.0 */
/* A backward pass of a large case. dx and the gradients of routing weights are compared on sampled
 * tokens. Gradients of an expert's weights are compared on sampled inner units, over all rows of
 * the expert. A unit depends only on its rows of gate and up and its column of down. So an expert
 * that is reduced to those units has exactly their gradients. */
#include "large.h"

#include "base/clock.h"

#include <math.h>
#include <stdlib.h>

enum { UNITS = 8 };
static const double UNIT_WORK = 4e8; /* multiplications for the units of one expert */

struct gradients {
    struct large *l;
    const struct moe_training *table;
    struct moe_trainer *trainer;
    uint8_t *mode;
    double aux_coeff;
    uint32_t loads[MOE_MAX_EXPERTS]; /* n_e of the group */
    uint64_t group_tokens;           /* Tg */
};

struct pass {
    void *dx;
    float *dweights;
    uint8_t *state;
};

/* In fp32, the errors of three more products add up. */
static double gradient_tolerance(const struct large_case *c)
{
    return (c->dtype == MOE_DTYPE_F32 ? 4 : 1) * large_tolerance(c);
}

/* ---------------------------------------------------------------------- passes */

static void count_loads(struct gradients *g)
{
    const struct large *l = g->l;
    uint32_t top_k = l->c->spec.router.top_k;
    for (uint32_t p = 0; p < l->s.member->slots; p++)
        for (uint32_t t = 0; t < l->c->input[p].tokens; t++) {
            if (l->c->input[p].mode[t] == MOE_ROUTE_IDS_WEIGHTS)
                continue;
            g->group_tokens++;
            for (uint32_t i = t * top_k; i < (t + 1) * top_k; i++)
                if (l->s.member->board->ids[p][i] < (int32_t)l->c->spec.experts)
                    g->loads[l->s.member->board->ids[p][i]]++;
        }
}

static bool run_pass(struct gradients *g, bool accumulate, struct pass *p)
{
    struct large *l = g->l;
    struct arena *host = &l->s.host;
    uint32_t tokens = l->in->tokens;
    size_t pairs = (size_t)tokens * l->c->spec.router.top_k, bytes = large_row_bytes(l, tokens);
    *p = (struct pass){take(host, bytes), take(host, pairs * sizeof(float)), take(host, tokens)};
    memset(p->dx, 0xff, bytes);
    memset(p->dweights, 0xff, pairs * sizeof(float));
    memset(p->state, 0xff, tokens);
    struct moe_backward_args a = {.trainer = g->trainer,
                                  .dtype = l->c->dtype,
                                  .bucket = l->c->bucket,
                                  .tokens = tokens,
                                  .aux_coeff = (float)g->aux_coeff,
                                  .accumulate = accumulate};
    if (tokens > 0) {
        void *x = take(host, bytes), *dy = take(host, bytes);
        memcpy(x, l->in->x, bytes);
        memcpy(dy, l->in->dy, bytes);
        a.x = x;
        a.dy = dy;
        a.mode = g->mode;
        a.ids = l->ids;
        a.weights = l->weights;
        a.dx = p->dx;
        a.dweights = p->dweights;
        a.token_state = p->state;
    }
    struct moe_step *step;
    struct moe_step_result result;
    if (!went_well(&l->s, "backward", g->table->backward_enqueue(l->s.session, &a, &step)) ||
        !went_well(&l->s, "backward", l->s.backend->step_wait(step, MOE_NEVER, &result)))
        return false;
    l->s.tally->tensor_cases += accumulate && result.on_tensor_cores && result.rows > 0;
    return true;
}

static bool same_pass(const struct gradients *g, const struct pass *a, const struct pass *b)
{
    const struct large *l = g->l;
    size_t pairs = (size_t)l->in->tokens * l->c->spec.router.top_k;
    return (memcmp(a->dx, b->dx, large_row_bytes(l, l->in->tokens)) == 0 &&
            memcmp(a->dweights, b->dweights, pairs * sizeof(float)) == 0) ||
           wrong(&l->s, "dx or gradients of weights differ from run to run");
}

/* --------------------------------------------------------------- sampled tokens */

static bool check_finite(const struct gradients *g, const struct pass *p)
{
    const struct large *l = g->l;
    for (uint32_t t = 0; t < l->in->tokens; t++)
        if (p->state[t] != MOE_TOKEN_OK)
            return wrong(&l->s, "token %u: state %u in the backward pass", t, p->state[t]);
    for (size_t i = 0; i < (size_t)l->in->tokens * l->c->spec.hidden; i++)
        if (!isfinite(element(l->c->dtype, p->dx, i)))
            return wrong(&l->s, "dx of token %zu is not finite", i / l->c->spec.hidden);
    return true;
}

static bool compare_tokens(struct gradients *g, const struct pass *p, uint32_t n, const double *dx,
                           const double *dweights)
{
    struct large *l = g->l;
    size_t hidden = l->c->spec.hidden, top_k = l->c->spec.router.top_k;
    double *got = must(n * hidden * sizeof *got), *worst = &l->worst_dx[l->c->dtype];
    double weights[LARGE_TOGETHER * MOE_MAX_TOP_K];
    bool good = true;
    for (uint32_t i = 0; i < n && good; i++) {
        size_t t = large_sample(l, i);
        for (size_t h = 0; h < hidden; h++)
            got[h] = element(l->c->dtype, p->dx, t * hidden + h);
        for (size_t k = 0; k < top_k; k++)
            weights[i * top_k + k] = (double)p->dweights[t * top_k + k];
        double error = frobenius(hidden, got, dx + i * hidden);
        *worst = fmax(*worst, error);
        good = error <= gradient_tolerance(l->c) ||
               wrong(&l->s, "dx of token %zu is off by %g", t, error);
    }
    free(got);
    double error = frobenius(n * top_k, weights, dweights);
    return good && (error <= gradient_tolerance(l->c) ||
                    wrong(&l->s, "gradients of routing weights are off by %g", error));
}

static bool check_tokens(struct gradients *g, const struct pass *p)
{
    struct large *l = g->l;
    uint32_t n = large_samples(l) < LARGE_TOGETHER ? large_samples(l) : LARGE_TOGETHER;
    size_t hidden = l->c->spec.hidden, top_k = l->c->spec.router.top_k;
    void *x = must(large_row_bytes(l, LARGE_TOGETHER)), *dy = must(large_row_bytes(l, n));
    int32_t ids[LARGE_TOGETHER * MOE_MAX_TOP_K];
    float weights[LARGE_TOGETHER * MOE_MAX_TOP_K];
    uint8_t mode[LARGE_TOGETHER];
    double *dx = must(n * hidden * sizeof *dx), dweights[LARGE_TOGETHER * MOE_MAX_TOP_K];
    l->samples = n; /* the same spread of fewer tokens */
    for (uint32_t i = 0; i < n; i++) {
        uint32_t t = large_sample(l, i);
        large_copy_row(l, l->in->x, t, x, i);
        large_copy_row(l, l->in->dy, t, dy, i);
        mode[i] = g->mode[t];
        memcpy(ids + i * top_k, l->ids + t * top_k, top_k * sizeof *ids);
        memcpy(weights + i * top_k, l->weights + t * top_k, top_k * sizeof *weights);
    }
    struct moe_oracle_layer *oracle = NULL;
    struct moe_oracle_backward a = {.dtype = l->c->dtype,
                                    .tokens = n,
                                    .x = x,
                                    .dy = dy,
                                    .mode = mode,
                                    .ids = ids,
                                    .weights = weights,
                                    .aux_coeff = g->aux_coeff,
                                    .loads = g->loads,
                                    .group_tokens = g->group_tokens,
                                    .dx = dx,
                                    .dweights = dweights};
    bool good = large_oracle(l, ids, n * top_k, &oracle) &&
                went_well(&l->s, "oracle", moe_oracle_backward(oracle, &a)) &&
                compare_tokens(g, p, n, dx, dweights);
    moe_oracle_destroy(oracle);
    free(x);
    free(dy);
    free(dx);
    return good;
}

/* ---------------------------------------------------------------- sampled units */

/* One expert, reduced to some of its inner units. */
struct cut {
    uint32_t expert, rows, units;
    uint32_t unit[UNITS];
    struct moe_layer_spec spec;
    struct moe_oracle_layer *weights, *gradients;
};

static uint32_t rows_of(const struct large *l, uint32_t expert)
{
    uint32_t n = 0, top_k = l->c->spec.router.top_k;
    for (uint32_t p = 0; p < l->s.member->slots; p++)
        for (uint32_t i = 0; i < l->c->input[p].tokens * top_k; i++)
            n += l->s.member->board->ids[p][i] == (int32_t)expert &&
                 large_target(l->c, i / top_k, (int32_t)expert) == (int)l->s.member->slot;
    return n;
}

/* The index in the whole weight of element i of a reduced one. */
static size_t whole(const struct large *l, const struct cut *c, enum moe_weight w, size_t i)
{
    size_t hidden = l->c->spec.hidden;
    if (w == MOE_WEIGHT_GATE || w == MOE_WEIGHT_UP)
        return c->unit[i / hidden] * hidden + i % hidden;
    if (w == MOE_WEIGHT_DOWN)
        return i / c->units * l->c->spec.intermediate + c->unit[i % c->units];
    return w == MOE_WEIGHT_DOWN_BIAS ? i : c->unit[i];
}

static bool give_cut(struct large *l, struct cut *c, enum moe_weight w)
{
    size_t rows, columns, bytes, each = moe_dtype_bytes(l->c->weight_dtype);
    moe_weight_shape(&c->spec, w, &rows, &columns);
    if (rows == 0)
        return true;
    uint8_t *all = large_weight(l->c, w, c->expert, &bytes), *some = must(rows * columns * each);
    for (size_t i = 0; i < rows * columns; i++)
        memcpy(some + i * each, all + whole(l, c, w, i) * each, each);
    bool good = went_well(
        &l->s, "oracle",
        moe_oracle_upload(c->weights, w, 0, l->c->weight_dtype, some, rows * columns * each));
    free(all);
    free(some);
    return good;
}

static bool make_cut(struct large *l, uint32_t expert, struct cut *c)
{
    uint32_t inner = l->c->spec.intermediate;
    *c = (struct cut){.expert = expert, .rows = rows_of(l, expert), .spec = l->c->spec};
    double affordable = UNIT_WORK / (7.0 * l->c->spec.hidden * (c->rows + 1));
    c->units = affordable < 1 ? 1 : affordable < (double)UNITS ? (uint32_t)affordable : UNITS;
    c->units = c->units < inner ? c->units : inner;
    for (uint32_t i = 0; i < c->units; i++)
        c->unit[i] =
            c->units < 2 ? inner - 1 : (uint32_t)((uint64_t)i * (inner - 1) / (c->units - 1));
    c->spec.experts = 1;
    c->spec.intermediate = c->units;
    c->spec.shared_intermediate = 0;
    c->spec.router = (struct moe_router_spec){
        .top_k = 1, .groups = 1, .topk_group = 1, .group_best = 1, .scale = 1};
    bool good = went_well(&l->s, "oracle", moe_oracle_create(&c->spec, &c->weights)) &&
                went_well(&l->s, "oracle", moe_oracle_create_gradients(&c->spec, &c->gradients));
    for (enum moe_weight w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN_BIAS && good; w++)
        good = give_cut(l, c, w);
    return good;
}

static void drop_cut(struct cut *c)
{
    moe_oracle_destroy(c->weights);
    moe_oracle_destroy(c->gradients);
}

/* All rows of the expert on this slot, from every slot's tokens. */
static bool add_rows(struct large *l, struct cut *c)
{
    const struct board *b = l->s.member->board;
    size_t hidden = l->c->spec.hidden;
    uint32_t top_k = l->c->spec.router.top_k;
    double *x = must(2 * hidden * sizeof *x), *dy = x + hidden, dweight;
    bool good = true;
    for (uint32_t p = 0; p < l->s.member->slots; p++)
        for (uint32_t i = 0; i < l->c->input[p].tokens * top_k && good; i++) {
            uint32_t t = i / top_k;
            if (b->ids[p][i] != (int32_t)c->expert ||
                large_target(l->c, t, b->ids[p][i]) != (int)l->s.member->slot)
                continue;
            for (size_t h = 0; h < hidden; h++) {
                x[h] = element(l->c->dtype, l->c->input[p].x, t * hidden + h);
                dy[h] = element(l->c->dtype, l->c->input[p].dy, t * hidden + h);
            }
            good = went_well(&l->s, "oracle",
                             moe_oracle_expert_backward(c->weights, 0, (double)b->weights[p][i], x,
                                                        dy, NULL, &dweight, c->gradients, NULL));
        }
    free(x);
    return good;
}

static float *read_gradient(struct gradients *g, enum moe_weight w, uint32_t expert, size_t *n)
{
    size_t rows, columns;
    struct moe_train_key key = {
        .weight = w, .expert = expert, .part = MOE_PART_WEIGHT, .tensor = MOE_TRAIN_GRAD};
    moe_weight_shape(&g->l->c->spec, w, &rows, &columns);
    *n = rows * columns;
    float *data = must(*n * sizeof *data);
    if (*n > 0 && !went_well(&g->l->s, "gradient",
                             g->table->trainer_read(g->trainer, &key, data, *n * sizeof *data)))
        data[0] = NAN;
    return data;
}

static bool compare_cut(struct gradients *g, const struct cut *c, enum moe_weight w)
{
    struct large *l = g->l;
    size_t rows, columns, n;
    moe_weight_shape(&c->spec, w, &rows, &columns);
    if (rows == 0)
        return true;
    float *all = read_gradient(g, w, c->expert, &n);
    double *got = must(rows * columns * sizeof *got), zero = 0;
    for (size_t i = 0; i < rows * columns; i++)
        got[i] = (double)all[whole(l, c, w, i)];
    double error = frobenius(rows * columns, got, moe_oracle_weight(c->gradients, w, 0));
    for (size_t i = 0; i < n; i++)
        zero += fabs((double)all[i]);
    free(got);
    free(all);
    l->worst_dx[l->c->dtype] = fmax(l->worst_dx[l->c->dtype], error);
    if (c->rows == 0)
        return zero == 0 || wrong(&l->s, "expert %u has no rows, but a gradient", c->expert);
    return error <= gradient_tolerance(l->c) ||
           wrong(&l->s, "the gradient of weight %d of expert %u, %u rows, is off by %g", (int)w,
                 c->expert, c->rows, error);
}

static bool check_expert(struct gradients *g, uint32_t expert)
{
    struct cut c;
    bool good = make_cut(g->l, expert, &c) && add_rows(g->l, &c);
    for (enum moe_weight w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN_BIAS && good; w++)
        good = compare_cut(g, &c, w);
    g->l->oracle_units += c.units;
    drop_cut(&c);
    return good;
}

/* Of the local experts, the one with most rows, the one with the fewest, and one without any. */
static bool check_experts(struct gradients *g)
{
    const struct large *l = g->l;
    int busy = -1, quiet = -1, idle = -1;
    uint32_t most = 0, least = UINT32_MAX;
    for (uint32_t e = 0; e < l->c->spec.experts; e++) {
        if (!large_holds(l->c, e, l->s.member->slot))
            continue;
        uint32_t n = rows_of(l, e);
        idle = n == 0 ? (int)e : idle;
        busy = n > most ? (int)e : busy;
        quiet = n > 0 && n < least ? (int)e : quiet;
        most = n > most ? n : most;
        least = n > 0 && n < least ? n : least;
    }
    return (busy < 0 || check_expert(g, (uint32_t)busy)) &&
           (quiet < 0 || quiet == busy || check_expert(g, (uint32_t)quiet)) &&
           (idle < 0 || check_expert(g, (uint32_t)idle));
}

/* ------------------------------------------------------------------------- all */

static bool check_passes(struct gradients *g)
{
    struct pass first, again;
    struct arena *host = &g->l->s.host;
    if (!run_pass(g, true, &first))
        return false;
    size_t used = host->used;
    bool good = check_finite(g, &first) && check_tokens(g, &first) && check_experts(g) &&
                large_await_members(g->l) && run_pass(g, false, &again) &&
                same_pass(g, &first, &again);
    host->used = used;
    if (good && g->l->in->tokens > 0)
        add_to_hash(&g->l->s.tally->trained_bits, first.dx,
                    large_row_bytes(g->l, g->l->in->tokens));
    return good;
}

bool large_check_backward(struct large *l)
{
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_SGD};
    struct gradients g = {.l = l,
                          .table = l->s.backend->training,
                          .mode = take(&l->s.host, l->in->tokens),
                          .aux_coeff = l->c->seed % 2 == 0 ? 0.3f : 0};
    for (uint32_t t = 0; t < l->in->tokens; t++)
        g.mode[t] = l->in->mode[t] == MOE_ROUTE_IDS_WEIGHTS ? MOE_ROUTE_IDS_WEIGHTS : MOE_ROUTE_IDS;
    count_loads(&g);
    bool good =
        went_well(&l->s, "trainer", g.table->trainer_create(l->s.layer, &config, &g.trainer)) &&
        check_passes(&g);
    g.table->trainer_destroy(g.trainer);
    return good;
}
