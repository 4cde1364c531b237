/* SPDX-License-Identifier: Apache-2.0 */
/* Cases with trainers; see trained.h. */
#include "trained.h"

#include "base/clock.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ------------------------------------------------------------------ parameters */

static bool holds(const struct test_case *c, uint32_t expert, uint32_t slot)
{
    for (uint32_t i = c->offset[expert]; i < c->offset[expert + 1]; i++)
        if (c->slot[i] == slot)
            return true;
    return false;
}

bool held_by(const struct trained *t, const struct parameter *p, uint32_t slot)
{
    return !moe_weight_is_expert(p->key.weight) || holds(t->s->c, p->key.expert, slot);
}

static void add_parameter(struct trained *t, enum moe_weight w, uint32_t expert,
                          enum moe_train_part part, size_t rows, size_t columns, bool trained)
{
    struct parameter *p = &t->list[t->count++];
    *p = (struct parameter){.key = {.weight = w, .expert = expert, .part = part},
                            .rows = rows,
                            .columns = columns,
                            .n = rows * columns,
                            .offset = t->floats,
                            .trained = trained};
    p->local = held_by(t, p, t->s->member->slot);
    t->floats += p->n;
}

static uint32_t target_bit(enum moe_weight w)
{
    return w == MOE_WEIGHT_GATE   ? MOE_LORA_GATE
           : w == MOE_WEIGHT_UP   ? MOE_LORA_UP
           : w == MOE_WEIGHT_DOWN ? MOE_LORA_DOWN
                                  : 0;
}

static void add_weight(struct trained *t, enum moe_weight w, uint32_t expert)
{
    size_t rows, columns, r = t->config.lora_rank;
    bool frozen = t->config.frozen >> moe_weight_group(w) & 1;
    moe_weight_shape(&t->s->c->spec, w, &rows, &columns);
    if (rows == 0)
        return;
    bool adapters = r > 0 && moe_weight_is_expert(w);
    add_parameter(t, w, expert, MOE_PART_WEIGHT, rows, columns,
                  !frozen && !adapters && w != MOE_WEIGHT_SELECT_BIAS);
    if (!adapters || (t->config.lora_targets & target_bit(w)) == 0)
        return;
    add_parameter(t, w, expert, MOE_PART_LORA_A, r, columns, !frozen);
    add_parameter(t, w, expert, MOE_PART_LORA_B, rows, r, !frozen);
}

static void list_parameters(struct trained *t)
{
    t->list =
        must(((size_t)MOE_WEIGHT_COUNT + 12 * (size_t)t->s->c->spec.experts) * sizeof *t->list);
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (uint32_t e = 0; e < (moe_weight_is_expert(w) ? t->s->c->spec.experts : 1); e++)
            add_weight(t, w, e);
    MOE_INVARIANT(t->floats * sizeof(float) <= SHARE_BYTES);
}

static void must_work(struct moe_status st)
{
    if (moe_failed(&st))
        fprintf(stderr, "%s/%s: %s\n", moe_code_name(st.code), moe_reason_name(st.reason), st.text);
    MOE_INVARIANT(!moe_failed(&st));
}

float *trained_read(const struct trained *t, const struct parameter *p,
                    enum moe_train_tensor tensor)
{
    struct moe_train_key key = p->key;
    float *data = must(p->n * sizeof *data);
    key.tensor = tensor;
    must_work(t->table->trainer_read(t->trainer, &key, data, p->n * sizeof *data));
    return data;
}

void trained_write(const struct trained *t, const struct parameter *p, enum moe_train_tensor tensor,
                   const float *data)
{
    struct moe_train_key key = p->key;
    key.tensor = tensor;
    must_work(t->table->trainer_write(t->trainer, &key, data, p->n * sizeof *data));
}

float *trained_read_all(const struct trained *t, enum moe_train_tensor tensor)
{
    float *all = must(t->floats * sizeof *all);
    for (size_t i = 0; i < t->count; i++) {
        const struct parameter *p = &t->list[i];
        if (!p->local || (tensor != MOE_TRAIN_VALUE && !p->trained) ||
            (tensor == MOE_TRAIN_MOMENT2 && t->config.optimizer == MOE_OPTIMIZER_SGD))
            continue;
        float *data = trained_read(t, p, tensor);
        memcpy(all + p->offset, data, p->n * sizeof *data);
        free(data);
    }
    return all;
}

/* ---------------------------------------------------------------------- showing */

bool trained_show(const struct trained *t, const float *mine, const float *all[MOE_MAX_SLOTS])
{
    uint8_t *share = t->s->share;
    memcpy(share + (size_t)t->s->member->slot * SHARE_BYTES, mine, t->floats * sizeof *mine);
    for (uint32_t p = 0; p < t->s->member->slots; p++)
        all[p] = (const float *)(const void *)(share + (size_t)p * SHARE_BYTES);
    return board_barrier(t->s->member, 60000) || wrong(t->s, "another slot gave up");
}

bool trained_shown(const struct trained *t)
{
    return board_barrier(t->s->member, 60000) || wrong(t->s, "another slot gave up");
}

/* ----------------------------------------------------------------------- inputs */

void *cotangent(const struct test_case *c, uint32_t slot)
{
    size_t n = (size_t)c->input[slot].tokens * c->spec.hidden;
    struct rng r = {.state = c->seed * 31 + slot};
    void *dy = must(n * moe_dtype_bytes(c->dtype));
    for (size_t i = 0; i < n; i++)
        if (c->dtype == MOE_DTYPE_F32)
            ((float *)dy)[i] = rng_float(&r);
        else
            ((uint16_t *)dy)[i] = moe_f32_to_bf16(rng_float(&r));
    return dy;
}

static enum moe_routing_mode mode_of(const struct case_input *in, uint32_t token)
{
    return in->mode != NULL ? moe_routing_of(in->mode[token]) : MOE_ROUTE_SERVER;
}

/* The routing of the forward step, or the invalid routing of a refused token. */
static void draw_routing(struct trained *t, uint32_t token)
{
    const struct subject *s = t->s;
    uint32_t top_k = s->c->spec.router.top_k;
    enum moe_routing_mode mode = mode_of(s->in, token);
    t->mode[token] = mode == MOE_ROUTE_IDS_WEIGHTS ? MOE_ROUTE_IDS_WEIGHTS : MOE_ROUTE_IDS;
    for (size_t i = (size_t)token * top_k; i < (size_t)(token + 1) * top_k; i++) {
        bool routed = mode == MOE_ROUTE_SERVER && s->state[token] == MOE_TOKEN_OK;
        t->ids[i] = routed                     ? s->ids[i]
                    : mode == MOE_ROUTE_SERVER ? (int32_t)(i % top_k)
                                               : s->in->ids[i];
        t->weights[i] = mode == MOE_ROUTE_IDS_WEIGHTS ? s->in->weights[i] : NAN; /* not read */
    }
}

static void prepare_inputs(struct trained *t)
{
    struct subject *s = t->s;
    uint32_t tokens = s->in->tokens;
    size_t pairs = (size_t)tokens * s->c->spec.router.top_k, bytes = tensor_bytes(s->c, tokens);
    if (tokens == 0)
        return;
    void *dy = cotangent(s->c, s->member->slot);
    t->x = take(&s->host, bytes);
    t->dy = take(&s->host, bytes);
    t->mode = take(&s->host, tokens);
    t->ids = take(&s->host, pairs * sizeof *t->ids);
    t->weights = take(&s->host, pairs * sizeof *t->weights);
    memcpy(t->x, s->in->x, bytes);
    memcpy(t->dy, dy, bytes);
    for (uint32_t i = 0; i < tokens; i++)
        draw_routing(t, i);
    free(dy);
}

static void count_loads(struct trained *t)
{
    const struct subject *s = t->s;
    const struct board *b = s->member->board;
    uint32_t top_k = s->c->spec.router.top_k;
    for (uint32_t p = 0; p < s->member->slots; p++)
        for (uint32_t i = 0; i < s->c->input[p].tokens; i++) {
            if (mode_of(&s->c->input[p], i) == MOE_ROUTE_IDS_WEIGHTS ||
                b->state[p][i] != MOE_TOKEN_OK)
                continue;
            t->group_tokens++;
            for (uint32_t k = i * top_k; k < (i + 1) * top_k; k++)
                if (b->ids[p][k] >= 0 && b->ids[p][k] < (int32_t)s->c->spec.experts)
                    t->loads[b->ids[p][k]]++;
        }
}

void trained_begin(struct trained *t, struct subject *s, const struct moe_trainer_config *config)
{
    struct rng r = {.state = s->c->seed * 17};
    *t = (struct trained){.s = s, .table = s->backend->training, .config = *config};
    t->aux_coeff = rng_chance(&r, 50) ? 0.3f : 0;
    list_parameters(t);
    prepare_inputs(t);
    count_loads(t);
}

void trained_end(struct trained *t)
{
    t->table->trainer_destroy(t->trainer);
    free(t->list);
}

/* ----------------------------------------------------------------------- passes */

struct pass blank_pass(struct trained *t)
{
    struct subject *s = t->s;
    uint32_t tokens = s->in->tokens;
    size_t pairs = (size_t)tokens * s->c->spec.router.top_k;
    struct pass p = {.dx = take(&s->host, tensor_bytes(s->c, tokens)),
                     .dweights = take(&s->host, pairs * sizeof(float)),
                     .state = take(&s->host, tokens),
                     .aux_loss = take(&s->host, sizeof(double))};
    memset(p.dx, 0xff, tensor_bytes(s->c, tokens));
    memset(p.dweights, 0xff, pairs * sizeof(float));
    memset(p.state, 0xff, tokens);
    memset(p.aux_loss, 0xff, sizeof(double));
    return p;
}

struct moe_backward_args pass_args(struct trained *t, struct pass *p, bool accumulate)
{
    bool none = t->s->in->tokens == 0;
    return (struct moe_backward_args){.trainer = t->trainer,
                                      .dtype = t->s->c->dtype,
                                      .bucket = t->s->c->bucket,
                                      .tokens = t->s->in->tokens,
                                      .x = t->x,
                                      .dy = t->dy,
                                      .mode = t->mode,
                                      .ids = t->ids,
                                      .weights = t->weights,
                                      .aux_coeff = t->aux_coeff,
                                      .accumulate = accumulate,
                                      .dx = none ? NULL : p->dx,
                                      .dweights = none ? NULL : p->dweights,
                                      .token_state = none ? NULL : p->state,
                                      .aux_loss = p->aux_loss};
}

static bool note_pass(struct trained *t, const struct moe_step_result *result)
{
    struct tally *tally = t->s->tally;
    if (result->on_tensor_cores && result->rows > 0 &&
        tally->last_tensor_case != tally->cases + 1) {
        tally->last_tensor_case = tally->cases + 1;
        tally->tensor_cases++;
    }
    return true;
}

bool run_pass(struct trained *t, struct pass *p, bool accumulate)
{
    struct moe_step *step;
    struct moe_step_result result;
    *p = blank_pass(t);
    struct moe_backward_args a = pass_args(t, p, accumulate);
    t->counted += accumulate;
    return went_well(t->s, "backward", t->table->backward_enqueue(t->s->session, &a, &step)) &&
           went_well(t->s, "backward", t->s->backend->step_wait(step, MOE_NEVER, &result)) &&
           (result.missing_slot == -1 || wrong(t->s, "a good pass misses a slot")) &&
           note_pass(t, &result);
}

bool same_pass(struct trained *t, const char *what, const struct pass *a, const struct pass *b)
{
    const struct subject *s = t->s;
    size_t pairs = (size_t)s->in->tokens * s->c->spec.router.top_k;
    if (memcmp(a->dx, b->dx, tensor_bytes(s->c, s->in->tokens)) != 0)
        return wrong(s, "dx differs %s", what);
    if (memcmp(a->dweights, b->dweights, pairs * sizeof(float)) != 0 ||
        memcmp(a->state, b->state, s->in->tokens) != 0 ||
        memcmp(a->aux_loss, b->aux_loss, sizeof(double)) != 0)
        return wrong(s, "gradients of weights, token states or aux loss differ %s", what);
    return true;
}

/* ------------------------------------------------------------------ expectations */

struct moe_oracle_rounding rounding_of(const struct test_case *c, int lean)
{
    bool bf16 = c->dtype == MOE_DTYPE_BF16;
    /* Weighted inputs may be stored in bf16, and the rounding may move them across a clamp. */
    double kink = bf16 && c->spec.weighting == MOE_WEIGHT_INPUT ? 1e-2 : 4e-6;
    return (struct moe_oracle_rounding){.arithmetic = 0x1p-22,
                                        .stored = bf16 ? 0x1p-9 : 0x1p-22,
                                        .kink = kink * (1 + (double)c->spec.swiglu_limit),
                                        .lean = lean,
                                        .state = c->seed + (uint64_t)(lean + 1)};
}

/* Rows of all slots that this slot's copies compute, into `to`; only experts' entries are used. */
static struct moe_status expect_experts(const struct trained *t, struct moe_oracle_layer *to,
                                        struct moe_oracle_rounding *rounding)
{
    const struct subject *s = t->s;
    const struct board *b = s->member->board;
    uint32_t top_k = s->c->spec.router.top_k, hidden = s->c->spec.hidden;
    double x[CASE_MAX_HIDDEN], dy[CASE_MAX_HIDDEN], dweight;
    for (uint32_t p = 0; p < s->member->slots; p++) {
        void *cotangents = cotangent(s->c, p);
        for (uint32_t i = 0; i < s->c->input[p].tokens * top_k; i++) {
            if (case_target(s->c, i / top_k, b->ids[p][i]) != (int)s->member->slot)
                continue;
            for (uint32_t h = 0; h < hidden; h++) {
                x[h] = element(s->c->dtype, s->c->input[p].x, (size_t)(i / top_k) * hidden + h);
                dy[h] = element(s->c->dtype, cotangents, (size_t)(i / top_k) * hidden + h);
            }
            struct moe_status st = moe_oracle_expert_backward(s->oracle, (uint32_t)b->ids[p][i],
                                                              (double)b->weights[p][i], x, dy, NULL,
                                                              &dweight, to, rounding);
            if (moe_failed(&st)) {
                free(cotangents);
                return st;
            }
        }
        free(cotangents);
    }
    return moe_ok();
}

/* This slot's tokens: dx, dweights, gradients of router and shared expert. */
static struct moe_status expect_own(const struct trained *t, double *dx, double *dweights,
                                    struct moe_oracle_layer *to,
                                    struct moe_oracle_rounding *rounding)
{
    const struct subject *s = t->s;
    struct moe_oracle_layer *all = NULL;
    MOE_TRY(moe_oracle_create_gradients(&s->c->spec, &all));
    struct moe_oracle_backward a = {.dtype = s->c->dtype,
                                    .tokens = s->in->tokens,
                                    .x = t->x,
                                    .dy = t->dy,
                                    .mode = t->mode,
                                    .ids = t->ids,
                                    .weights = t->weights,
                                    .aux_coeff = (double)t->aux_coeff,
                                    .loads = t->loads,
                                    .group_tokens = t->group_tokens,
                                    .dx = dx,
                                    .dweights = dweights,
                                    .gradients = all,
                                    .rounding = rounding};
    struct moe_status st = moe_oracle_backward(s->oracle, &a);
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        size_t rows, columns;
        moe_weight_shape(&s->c->spec, w, &rows, &columns);
        if (rows > 0 && !moe_weight_is_expert(w))
            memcpy(moe_oracle_weight(to, w, 0), moe_oracle_weight(all, w, 0),
                   rows * columns * sizeof(double));
    }
    moe_oracle_destroy(all);
    return st;
}

static struct moe_status expect_aux(const struct trained *t, double *loss)
{
    const struct subject *s = t->s;
    uint32_t hidden = s->c->spec.hidden;
    *loss = 0;
    for (uint32_t p = 0; p < s->member->slots && t->group_tokens > 0; p++)
        for (uint32_t i = 0; i < s->c->input[p].tokens; i++) {
            double x[CASE_MAX_HIDDEN], logit[2 * CASE_MAX_EXPERTS], d[2 * CASE_MAX_EXPERTS] = {0};
            if (mode_of(&s->c->input[p], i) == MOE_ROUTE_IDS_WEIGHTS ||
                s->member->board->state[p][i] != MOE_TOKEN_OK)
                continue;
            for (uint32_t h = 0; h < hidden; h++)
                x[h] = element(s->c->dtype, s->c->input[p].x, (size_t)i * hidden + h);
            MOE_TRY(moe_oracle_logits(s->oracle, x, logit));
            *loss += moe_oracle_aux_backward(&s->c->spec, (double)t->aux_coeff, t->loads,
                                             t->group_tokens, logit, d, NULL);
        }
    return moe_ok();
}

static bool expect_some(struct trained *t, struct expected *e, int from, int to)
{
    const struct subject *s = t->s;
    size_t tokens = s->in->tokens;
    bool good = true;
    for (int i = from; i <= to && good; i++) {
        struct moe_oracle_rounding rounding = rounding_of(s->c, 2 * i - 3);
        e->dx[i] = must(tokens * s->c->spec.hidden * sizeof(double));
        e->dweights[i] = must(tokens * s->c->spec.router.top_k * sizeof(double));
        good =
            went_well(s, "oracle", moe_oracle_create_gradients(&s->c->spec, &e->gradients[i])) &&
            went_well(s, "oracle",
                      expect_own(t, e->dx[i], e->dweights[i], e->gradients[i],
                                 i == 0 ? NULL : &rounding)) &&
            went_well(s, "oracle", expect_experts(t, e->gradients[i], i == 0 ? NULL : &rounding));
    }
    return good;
}

bool expect_training(struct trained *t, struct expected *e)
{
    *e = (struct expected){0};
    return went_well(t->s, "oracle", expect_aux(t, &e->aux_loss)) && expect_some(t, e, 0, 0);
}

bool expect_rough(struct trained *t, struct expected *e)
{
    return expect_some(t, e, 1, 2);
}

void expected_free(struct expected *e)
{
    for (int i = 0; i < 3; i++) {
        moe_oracle_destroy(e->gradients[i]);
        free(e->dx[i]);
        free(e->dweights[i]);
    }
}

static double distance(size_t n, const double *a, const double *b)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (a[i] - b[i]) * (a[i] - b[i]);
    return sqrt(sum);
}

double near_enough(const struct trained *t, const char *what, int which, size_t n,
                   const double *got, const double *const want[3])
{
    double size = 0, error = distance(n, got, want[0]), limit;
    double rough = 0;
    /* In a narrow layer, all values of a gradient share the roundings of few units. Two samples of
     * these roundings may both be small by chance. */
    const double margin = 4 * (1 + 4.0 / t->s->c->spec.intermediate);
    if (want[1] != NULL)
        rough = distance(n, want[1], want[0]) + distance(n, want[2], want[0]);
    struct tally *tally = t->s->tally;
    for (size_t i = 0; i < n; i++)
        size += want[0][i] * want[0][i];
    limit = fmax(tolerance(t->s->c->dtype) * sqrt(size), margin * rough);
    if (!(error <= limit)) {
        if (want[1] != NULL)
            wrong(t->s, "%s %d is off by %g: norm %g, rounding %g", what, which, error, sqrt(size),
                  rough);
        return -1;
    }
    tally->tensors++;
    if (margin * rough > tolerance(t->s->c->dtype) * sqrt(size))
        tally->rough++;
    else if (size > 0)
        tally->worst[t->s->c->dtype] = fmax(tally->worst[t->s->c->dtype], error / sqrt(size));
    return limit;
}
