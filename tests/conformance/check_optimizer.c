/* SPDX-License-Identifier: Apache-2.0 */
/* Optimizer steps against the oracle's: sums over slots and copies, the common norm, moments,
 * masters, resident weights; gradients that are not finite; the balance rule. */
#include "trained.h"

#include <math.h>
#include <stdlib.h>

/* ---------------------------------------------------------------- before a step */

/* All tensors before a step. Pointers are [floats]; `sum` and `size` over all slots. */
struct before {
    float *grad, *value, *moment1, *moment2;
    double *sum, *size; /* of gradients, and of their magnitudes */
    double squares;     /* of all trained parameters of the group, each once */
};

static bool sum_gradients(const struct trained *t, struct before *b)
{
    const float *all[MOE_MAX_SLOTS];
    b->sum = must(t->floats * sizeof *b->sum);
    b->size = must(t->floats * sizeof *b->size);
    b->squares = 0;
    if (!trained_show(t, b->grad, all))
        return false;
    for (size_t i = 0; i < t->count; i++) {
        const struct parameter *p = &t->list[i];
        for (uint32_t s = 0; s < t->s->member->slots && p->trained; s++)
            for (size_t j = p->offset; j < p->offset + p->n && held_by(t, p, s); j++) {
                b->sum[j] += (double)all[s][j];
                b->size[j] += fabs((double)all[s][j]);
            }
        if (p->trained)
            moe_oracle_add_squares(p->n, b->sum + p->offset, &b->squares);
    }
    return trained_shown(t);
}

static bool look_before(const struct trained *t, struct before *b)
{
    b->grad = trained_read_all(t, MOE_TRAIN_GRAD);
    b->value = trained_read_all(t, MOE_TRAIN_VALUE);
    b->moment1 = trained_read_all(t, MOE_TRAIN_MOMENT1);
    b->moment2 = trained_read_all(t, MOE_TRAIN_MOMENT2);
    return sum_gradients(t, b);
}

static void before_free(struct before *b)
{
    free(b->grad);
    free(b->value);
    free(b->moment1);
    free(b->moment2);
    free(b->sum);
    free(b->size);
}

static struct moe_optimizer_args draw_args(const struct trained *t, uint64_t number, double norm)
{
    struct rng r = {.state = t->s->c->seed * 13 + number};
    static const double scales[] = {1, 0.25, 0.5, 1};
    struct moe_optimizer_args a = {.learning_rate = 0.02 + 0.1 * fabs((double)rng_float(&r)),
                                   .weight_decay = rng_chance(&r, 50) ? 0.1 : 0,
                                   .beta1 = 0.9,
                                   .beta2 = rng_chance(&r, 50) ? 0.999 : 0.95,
                                   .epsilon = rng_chance(&r, 50) ? 1e-8 : 1e-3,
                                   .momentum = rng_chance(&r, 70) ? 0.9 : 0,
                                   .grad_scale = scales[rng_below(&r, 4)],
                                   .balance_rate = rng_chance(&r, 60) ? 0.01 : 0,
                                   .number = number};
    uint32_t clip = rng_below(&r, 3); /* never, above the norm, below it */
    a.max_grad_norm = clip == 0 ? 0 : clip == 1 ? 10 * norm + 1 : 0.1 * norm;
    return a;
}

/* ----------------------------------------------------------------- after a step */

static double distance_to(size_t n, const double *want, const double *from)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (want[i] - from[i]) * (want[i] - from[i]);
    return sqrt(sum);
}

/* One tensor after a step. `rough`: with gradients that were summed in fp32. `moved`: the exact
 * change. */
static bool tensor_is(const struct trained *t, const struct parameter *p,
                      enum moe_train_tensor tensor, const double *want, const double *rough,
                      double moved)
{
    float *got = trained_read(t, p, tensor);
    double *values = must(p->n * sizeof *values), *zeros = must(p->n * sizeof *zeros);
    for (size_t i = 0; i < p->n; i++)
        values[i] = (double)got[i];
    double error = distance_to(p->n, values, want), size = distance_to(p->n, want, zeros);
    double smallest = 1e-37 * sqrt((double)p->n); /* below, fp32 has no more digits */
    double limit = smallest + 3e-7 * size + fmax(1e-5 * moved, 2 * distance_to(p->n, rough, want));
    free(got);
    free(values);
    free(zeros);
    return error <= limit ||
           wrong(t->s, "tensor %d of weight %d is off by %g after a step; it moved by %g",
                 (int)tensor, (int)p->key.weight, error, moved);
}

/* The three tensors of a parameter in double precision, [3 * n]: value, first and second moment. */
static double *tensors_of(const struct before *b, const struct parameter *p)
{
    double *v = must(3 * p->n * sizeof *v);
    for (size_t i = 0; i < p->n; i++) {
        v[i] = (double)b->value[p->offset + i];
        v[p->n + i] = (double)b->moment1[p->offset + i];
        v[2 * p->n + i] = (double)b->moment2[p->offset + i];
    }
    return v;
}

static void step_of(const struct trained *t, const struct moe_optimizer_args *a, double factor,
                    size_t n, const double *grad, double *tensors)
{
    moe_oracle_optimizer_step(t->config.optimizer, a, factor, n, grad, tensors, tensors + n,
                              t->config.optimizer == MOE_OPTIMIZER_ADAMW ? tensors + 2 * n : NULL);
}

static bool parameter_moved(const struct trained *t, const struct before *b,
                            const struct parameter *p, const struct moe_optimizer_args *a,
                            double factor)
{
    double *start = tensors_of(b, p), *want = tensors_of(b, p), *rough = tensors_of(b, p);
    double *grad = must(p->n * sizeof *grad);
    for (size_t i = 0; i < p->n; i++)
        grad[i] = b->sum[p->offset + i] + (i % 2 ? 0x1p-22 : -0x1p-22) * b->size[p->offset + i];
    step_of(t, a, factor, p->n, b->sum + p->offset, want);
    step_of(t, a, factor, p->n, grad, rough);
    bool good = true;
    static const enum moe_train_tensor kinds[3] = {MOE_TRAIN_VALUE, MOE_TRAIN_MOMENT1,
                                                   MOE_TRAIN_MOMENT2};
    size_t tensors = t->config.optimizer == MOE_OPTIMIZER_ADAMW ? 3 : 2;
    for (size_t i = 0; i < tensors && good; i++)
        good = tensor_is(t, p, kinds[i], want + i * p->n, rough + i * p->n,
                         distance_to(p->n, want + i * p->n, start + i * p->n));
    free(start);
    free(want);
    free(rough);
    free(grad);
    return good;
}

static bool same_values(const struct trained *t, const struct parameter *p, const float *want)
{
    float *got = trained_read(t, p, MOE_TRAIN_VALUE);
    bool same = memcmp(got, want + p->offset, p->n * sizeof *got) == 0;
    free(got);
    return same;
}

static bool bias_balanced(const struct trained *t, const struct before *b,
                          const struct parameter *p, double rate)
{
    double bias[2 * CASE_MAX_EXPERTS];
    uint64_t load[CASE_MAX_EXPERTS];
    for (size_t i = 0; i < p->n; i++)
        bias[i] = (double)b->value[p->offset + i];
    for (uint32_t e = 0; e < t->s->c->spec.experts; e++)
        load[e] = (uint64_t)t->loads[e] * t->counted;
    moe_oracle_balance(t->s->c->spec.experts, load, rate, bias);
    float *got = trained_read(t, p, MOE_TRAIN_VALUE);
    bool good = true;
    for (size_t i = 0; i < p->n && good; i++)
        if (!(fabs((double)got[i] - bias[i]) <= 1e-7 * (1 + fabs(bias[i]))))
            good = wrong(t->s, "selection bias %zu is %g, not %g", i, (double)got[i], bias[i]);
    free(got);
    return good;
}

static bool gradients_are_zero(const struct trained *t)
{
    float *grad = trained_read_all(t, MOE_TRAIN_GRAD);
    bool good = true;
    for (size_t i = 0; i < t->floats && good; i++)
        good = grad[i] == 0 || wrong(t->s, "gradients are left after an optimizer step");
    free(grad);
    return good;
}

/* Tensors of several slots have the same bits on all of them. */
static bool copies_agree(const struct trained *t)
{
    const float *all[MOE_MAX_SLOTS];
    float *mine = trained_read_all(t, MOE_TRAIN_VALUE);
    add_to_hash(&t->s->tally->trained_bits, mine, t->floats * sizeof *mine);
    bool good = trained_show(t, mine, all);
    for (size_t i = 0; i < t->count && good; i++)
        for (uint32_t s = 0; s < t->s->member->slots && t->list[i].local; s++)
            if (held_by(t, &t->list[i], s) &&
                memcmp(mine + t->list[i].offset, all[s] + t->list[i].offset,
                       t->list[i].n * sizeof *mine) != 0)
                good = wrong(t->s, "slot %u holds other bits of weight %d", s,
                             (int)t->list[i].key.weight);
    free(mine);
    return good && trained_shown(t);
}

static bool moved_as_expected(struct trained *t, const struct before *b,
                              const struct moe_optimizer_args *a,
                              const struct moe_optimizer_result *result)
{
    double norm, factor = moe_oracle_gradient_factor(a, b->squares, &norm);
    if (result->nonfinite || !(fabs(result->grad_norm - norm) <= 1e-5 * norm + 1e-12))
        return wrong(t->s, "the norm is %.9g%s, not %.9g", result->grad_norm,
                     result->nonfinite ? " (not finite)" : "", norm);
    if (result->unchanged || result->can_finish ||
        !(fabs(result->squares - b->squares) <= 1e-5 * b->squares + 1e-12))
        return wrong(t->s, "a step that was taken tells of squares %.9g, not %.9g", result->squares,
                     b->squares);
    for (size_t i = 0; i < t->count; i++) {
        const struct parameter *p = &t->list[i];
        if (!p->local)
            continue;
        bool merged = t->config.lora_rank > 0 && moe_weight_is_expert(p->key.weight);
        bool good = p->key.weight == MOE_WEIGHT_SELECT_BIAS
                        ? bias_balanced(t, b, p, a->balance_rate)
                    : p->trained ? parameter_moved(t, b, p, a, factor)
                    : merged     ? true /* check_lora looks at them */
                             : same_values(t, p, b->value) || wrong(t->s, "a frozen weight moved");
        if (!good)
            return false;
    }
    t->counted = 0;
    return gradients_are_zero(t) && copies_agree(t);
}

/* One slot alone needs no peer. There, each second step is finished from the squares. */
static struct moe_status take_step(struct trained *t, const struct moe_optimizer_args *a,
                                   double squares, struct moe_optimizer_result *result)
{
    const bool alone = t->s->member->slots == 1 && t->table->optimizer_finish != NULL;
    if (alone && a->number % 2 == 0)
        return t->table->optimizer_finish(&t->trainer, 1, a, squares, result);
    return t->table->optimizer_step(t->s->session, &t->trainer, 1, a, result);
}

static bool one_step(struct trained *t, uint64_t number)
{
    struct before b = {0};
    struct moe_optimizer_result result = {.grad_norm = -1, .nonfinite = true};
    bool good = look_before(t, &b);
    if (good) {
        struct moe_optimizer_args a = draw_args(t, number, sqrt(b.squares));
        good = went_well(t->s, "optimizer", take_step(t, &a, b.squares, &result)) &&
               moved_as_expected(t, &b, &a, &result);
    }
    before_free(&b);
    return good;
}

/* Gradients that do not come from a pass, different on every slot. */
static void write_gradients(struct trained *t)
{
    struct rng r = {.state = t->s->c->seed * 7 + t->s->member->slot};
    for (size_t i = 0; i < t->count; i++) {
        const struct parameter *p = &t->list[i];
        if (!p->local || !p->trained)
            continue;
        float *data = must(p->n * sizeof *data);
        for (size_t j = 0; j < p->n; j++)
            data[j] = rng_float(&r);
        trained_write(t, p, MOE_TRAIN_GRAD, data);
        free(data);
    }
}

/* A trained parameter and a slot that has it, the same on all slots; NULL if there is none. */
static const struct parameter *poisoned(const struct trained *t, uint32_t *holder)
{
    uint64_t seed = t->s->c->seed;
    for (size_t i = 0; i < t->count; i++) {
        const struct parameter *p = &t->list[(i + seed) % t->count];
        if (!p->trained)
            continue;
        *holder = (uint32_t)(seed / 7 % t->s->member->slots);
        while (!held_by(t, p, *holder))
            *holder = (*holder + 1) % t->s->member->slots;
        return p;
    }
    return NULL;
}

/* One slot's gradient has one bad number: no slot changes a parameter, and all gradients are zero.
 */
static bool check_nonfinite(struct trained *t)
{
    struct before b = {0};
    struct moe_optimizer_result result = {0};
    uint64_t seed = t->s->c->seed;
    uint32_t holder;
    write_gradients(t);
    const struct parameter *p = poisoned(t, &holder);
    if (p == NULL)
        return true; /* nothing is trained */
    if (holder == t->s->member->slot) {
        float *data = trained_read(t, p, MOE_TRAIN_GRAD);
        data[seed % p->n] = seed % 2 ? NAN : -INFINITY;
        trained_write(t, p, MOE_TRAIN_GRAD, data);
        free(data);
    }
    bool good = look_before(t, &b);
    struct moe_optimizer_args a = draw_args(t, 3, 1);
    good = good &&
           went_well(t->s, "optimizer",
                     t->table->optimizer_step(t->s->session, &t->trainer, 1, &a, &result)) &&
           (result.nonfinite || wrong(t->s, "a gradient that is not finite was not noticed"));
    for (enum moe_train_tensor k = MOE_TRAIN_VALUE; k <= MOE_TRAIN_MOMENT2 && good; k++) {
        if (k == MOE_TRAIN_GRAD)
            continue;
        const float *was = k == MOE_TRAIN_VALUE     ? b.value
                           : k == MOE_TRAIN_MOMENT1 ? b.moment1
                                                    : b.moment2;
        float *is = trained_read_all(t, k);
        good = memcmp(is, was, t->floats * sizeof *is) == 0 ||
               wrong(t->s, "tensors of kind %d moved by gradients that are not finite", (int)k);
        free(is);
    }
    before_free(&b);
    return good && gradients_are_zero(t);
}

/* ------------------------------------------------------------------ resident weights */

/* A backend may store a BF16 upload as F32. Such weights get values that are exact in both. */
static void round_small_weights(const struct trained *t)
{
    for (size_t i = 0; i < t->count; i++) {
        const struct parameter *p = &t->list[i];
        enum moe_weight w = p->key.weight;
        bool large = (w >= MOE_WEIGHT_GATE && w <= MOE_WEIGHT_DOWN) ||
                     (w >= MOE_WEIGHT_SHARED_GATE && w <= MOE_WEIGHT_SHARED_DOWN);
        if (large || !p->local || t->s->c->weight_dtype[w] != MOE_DTYPE_BF16)
            continue;
        float *data = trained_read(t, p, MOE_TRAIN_VALUE);
        for (size_t j = 0; j < p->n; j++)
            data[j] = moe_bf16_to_f32(moe_f32_to_bf16(data[j]));
        trained_write(t, p, MOE_TRAIN_VALUE, data);
        free(data);
    }
}

/* An oracle with the values of trainers: masters, rounded like resident weights. */
static bool oracle_of_values(struct trained *t, struct moe_oracle_layer **out)
{
    const struct subject *s = t->s;
    const float *all[MOE_MAX_SLOTS];
    float *mine = trained_read_all(t, MOE_TRAIN_VALUE);
    bool good =
        went_well(s, "oracle", moe_oracle_create(&s->c->spec, out)) && trained_show(t, mine, all);
    for (size_t i = 0; i < t->count && good; i++) {
        const struct parameter *p = &t->list[i];
        uint32_t holder = 0;
        if (p->key.part != MOE_PART_WEIGHT)
            continue;
        while (!held_by(t, p, holder))
            holder++;
        float *data = must(p->n * sizeof *data);
        for (size_t j = 0; j < p->n; j++) {
            data[j] = all[holder][p->offset + j];
            if (p->trained && s->c->weight_dtype[p->key.weight] == MOE_DTYPE_BF16)
                data[j] = moe_bf16_to_f32(moe_f32_to_bf16(data[j]));
        }
        good = went_well(s, "oracle",
                         moe_oracle_upload(*out, p->key.weight, p->key.expert, MOE_DTYPE_F32, data,
                                           p->n * sizeof *data));
        free(data);
    }
    free(mine);
    return good && trained_shown(t);
}

bool follow_values(struct trained *t)
{
    struct moe_oracle_layer *layer = NULL;
    bool good = oracle_of_values(t, &layer);
    moe_oracle_destroy(t->s->oracle);
    t->s->oracle = layer;
    return good;
}

/* Matrices that are stored together may have one dtype; with several, a test cannot know it. */
static bool one_dtype(const struct test_case *c)
{
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        if (c->weight_dtype[w] != c->weight_dtype[0])
            return false;
    return true;
}

bool check_optimizer(struct trained *t)
{
    if (!one_step(t, 1))
        return false;
    write_gradients(t);
    if (!one_step(t, 2) || !check_nonfinite(t))
        return false;
    if (!one_dtype(t->s->c))
        return true;
    round_small_weights(t);
    return follow_values(t) && check_step(t->s);
}

/* --------------------------------------------------------------------- two layers */

static bool begin_one(struct subject *s, struct moe_layer **layer, struct trained *t)
{
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_ADAMW};
    const struct test_case *c = s->c;
    s->layer = NULL;
    bool good = went_well(
        s, "layer",
        s->backend->layer_create(s->device, &c->spec, &c->placement, s->member->slot, layer));
    s->layer = *layer;
    s->host.used = 0;
    trained_begin(t, s, &config);
    return good && upload_all(s) &&
           went_well(s, "trainer", t->table->trainer_create(*layer, &config, &t->trainer));
}

/* The norm is over both layers, and clips both. */
static bool step_both(struct trained t[2])
{
    struct before b[2] = {{0}, {0}};
    struct moe_optimizer_result result = {.nonfinite = true};
    struct moe_trainer *trainers[2] = {t[0].trainer, t[1].trainer};
    write_gradients(&t[0]);
    write_gradients(&t[1]);
    float *half = trained_read_all(&t[1], MOE_TRAIN_GRAD);
    for (size_t i = 0; i < t[1].floats; i++)
        half[i] *= 0.5f;
    for (size_t i = 0; i < t[1].count; i++)
        if (t[1].list[i].local && t[1].list[i].trained)
            trained_write(&t[1], &t[1].list[i], MOE_TRAIN_GRAD, half + t[1].list[i].offset);
    free(half);
    bool good = look_before(&t[0], &b[0]) && look_before(&t[1], &b[1]);
    b[0].squares = b[1].squares = b[0].squares + b[1].squares;
    struct moe_optimizer_args a = draw_args(&t[0], 1, sqrt(b[0].squares));
    a.max_grad_norm = 0.3 * sqrt(b[0].squares);
    good = good &&
           went_well(t->s, "optimizer",
                     t->table->optimizer_step(t->s->session, trainers, 2, &a, &result)) &&
           moved_as_expected(&t[0], &b[0], &a, &result) &&
           moved_as_expected(&t[1], &b[1], &a, &result);
    before_free(&b[0]);
    before_free(&b[1]);
    return good;
}

bool check_two_trainers(struct subject *s)
{
    struct trained t[2] = {0};
    struct moe_layer *layer[2] = {NULL, NULL}, *original = s->layer;
    bool good = begin_one(s, &layer[0], &t[0]) && begin_one(s, &layer[1], &t[1]) && step_both(t);
    for (int i = 0; i < 2; i++) {
        if (t[i].s != NULL)
            trained_end(&t[i]);
        s->backend->layer_destroy(layer[i]);
    }
    s->layer = original;
    return good;
}
