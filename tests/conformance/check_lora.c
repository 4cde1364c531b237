/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters: initial values, gradients of A and B, and the merged weight of a forward pass. */
#include "trained.h"

#include <math.h>
#include <stdlib.h>

static struct moe_trainer_config draw_config(const struct subject *s)
{
    const struct moe_layer_spec *spec = &s->c->spec;
    struct rng r = {.state = s->c->seed * 3};
    uint32_t least = spec->hidden < spec->intermediate ? spec->hidden : spec->intermediate;
    bool shared = moe_weight_format_of(spec, MOE_WEIGHT_SHARED_GATE) == NULL; /* may learn */
    uint32_t never = 1u << MOE_PARAMS_EXPERTS | (shared ? 0 : 1u << MOE_PARAMS_SHARED);
    return (struct moe_trainer_config){
        .optimizer = rng_chance(&r, 70) ? MOE_OPTIMIZER_ADAMW : MOE_OPTIMIZER_SGD,
        .frozen = (rng_below(&r, 8) & ~never) | (shared ? 0 : 1u << MOE_PARAMS_SHARED),
        .lora_rank = rng_range(&r, 1, least < 8 ? least : 8),
        .lora_alpha = 0.5f + (float)rng_below(&r, 8),
        .lora_targets = rng_range(&r, 1, 7),
        .lora_seed = rng_next(&r)};
}

static const struct parameter *part_of(const struct trained *t, const struct parameter *p,
                                       enum moe_train_part part)
{
    for (size_t i = 0; i < t->count; i++)
        if (t->list[i].key.weight == p->key.weight && t->list[i].key.expert == p->key.expert &&
            t->list[i].key.part == part)
            return &t->list[i];
    return NULL;
}

/* A is small and random, B zero. They are the same on every slot with the expert, and differ
 * between experts. */
static bool check_beginning(struct trained *t)
{
    const float *all[MOE_MAX_SLOTS];
    float *mine = trained_read_all(t, MOE_TRAIN_VALUE);
    bool good = trained_show(t, mine, all);
    const struct parameter *last = NULL;
    for (size_t i = 0; i < t->count && good; i++) {
        const struct parameter *p = &t->list[i];
        double bound = 1 / sqrt((double)p->columns);
        for (size_t j = p->offset; j < p->offset + p->n && p->local && good; j++) {
            if (p->key.part == MOE_PART_LORA_B && mine[j] != 0)
                good = wrong(t->s, "B does not begin as zeros");
            if (p->key.part == MOE_PART_LORA_A &&
                !(fabs((double)mine[j]) <= bound * (1 + 1e-6) && mine[j] != 0))
                good = wrong(t->s, "A begins with %g, bound %g", (double)mine[j], bound);
            for (uint32_t s = 0; s < t->s->member->slots && good; s++)
                if (held_by(t, p, s) && memcmp(&all[s][j], &mine[j], sizeof mine[j]) != 0)
                    good = wrong(t->s, "A begins differently on slot %u", s);
        }
        if (p->key.part != MOE_PART_LORA_A || !p->local)
            continue;
        if (good && last != NULL && last->n == p->n && p->n > 4 &&
            memcmp(mine + last->offset, mine + p->offset, p->n * sizeof *mine) == 0)
            good = wrong(t->s, "two adapters begin with the same A");
        last = p;
    }
    free(mine);
    return good && trained_shown(t);
}

/* A and B as after some training: the same on all holders. */
static void write_adapters(struct trained *t)
{
    for (size_t i = 0; i < t->count; i++) {
        const struct parameter *p = &t->list[i];
        struct rng r = {.state = t->s->c->seed * 5 + i};
        if (!p->local || p->key.part == MOE_PART_WEIGHT)
            continue;
        float *data = must(p->n * sizeof *data);
        for (size_t j = 0; j < p->n; j++)
            data[j] = 0.5f * rng_float(&r);
        trained_write(t, p, MOE_TRAIN_VALUE, data);
        free(data);
    }
}

static double *as_doubles(size_t n, const float *v)
{
    double *d = must(n * sizeof *d);
    for (size_t i = 0; i < n; i++)
        d[i] = (double)v[i];
    return d;
}

static void absolute(size_t n, double *v)
{
    for (size_t i = 0; i < n; i++)
        v[i] = fabs(v[i]);
}

/* The resident weight is W0 + alpha / r B A, rounded once to its dtype: BF16 if W0 is quantised.
 * Then `base`, the resident weight at the beginning, is W0 rounded. */
static bool merged_is_right(const struct trained *t, const struct parameter *p, const float *base,
                            const float *now)
{
    const struct parameter *a = part_of(t, p, MOE_PART_LORA_A);
    const struct parameter *b = part_of(t, p, MOE_PART_LORA_B);
    bool quantised = moe_weight_format_of(&t->s->c->spec, p->key.weight) != NULL;
    if (a == NULL)
        return memcmp(base + p->offset, now + p->offset, p->n * sizeof *now) == 0 ||
               wrong(t->s, "a weight without adapter moved");
    double *w0 = as_doubles(p->n, base + p->offset), *da = as_doubles(a->n, now + a->offset);
    double *db = as_doubles(b->n, now + b->offset), *want = must(p->n * sizeof *want);
    double *size = must(p->n * sizeof *size); /* what was summed */
    moe_oracle_lora_merge(p->rows, p->columns, t->config.lora_rank, (double)t->config.lora_alpha,
                          w0, da, db, want);
    absolute(p->n, w0);
    absolute(a->n, da);
    absolute(b->n, db);
    moe_oracle_lora_merge(p->rows, p->columns, t->config.lora_rank, (double)t->config.lora_alpha,
                          w0, da, db, size);
    bool good = true;
    for (size_t i = 0; i < p->n && good; i++) {
        double got = (double)now[p->offset + i], unit = 0x1p-8, rest = quantised ? 0x1p-8 : 1e-6;
        /* A matrix that is stored together with an F32 matrix is F32. */
        if (t->s->c->weight_dtype[p->key.weight] == MOE_DTYPE_F32 && !quantised)
            unit = 1e-6;
        if (!(fabs(got - want[i]) <= unit * fabs(want[i]) + rest * size[i]))
            good = wrong(t->s, "merged weight %d is %g, not %g", (int)p->key.weight, got, want[i]);
    }
    free(w0);
    free(da);
    free(db);
    free(want);
    free(size);
    return good;
}

static bool check_merged(const struct trained *t, const float *base)
{
    float *now = trained_read_all(t, MOE_TRAIN_VALUE);
    bool good = true;
    for (size_t i = 0; i < t->count && good; i++)
        if (t->list[i].local && t->list[i].key.part == MOE_PART_WEIGHT &&
            moe_weight_is_expert(t->list[i].key.weight))
            good = merged_is_right(t, &t->list[i], base, now);
    free(now);
    return good;
}

/* dA and dB, from the oracle's dW. */
static bool adapter_gradients(const struct trained *t, const struct expected *e, const float *value,
                              const float *grad, const struct parameter *w)
{
    const struct parameter *a = part_of(t, w, MOE_PART_LORA_A);
    const struct parameter *b = part_of(t, w, MOE_PART_LORA_B);
    double *da[3] = {NULL}, *db[3] = {NULL};
    double *va = as_doubles(a->n, value + a->offset), *vb = as_doubles(b->n, value + b->offset);
    for (int i = 0; i < 3 && e->gradients[i] != NULL; i++) {
        da[i] = must(a->n * sizeof(double));
        db[i] = must(b->n * sizeof(double));
        moe_oracle_lora_backward(
            w->rows, w->columns, t->config.lora_rank, (double)t->config.lora_alpha, va, vb,
            moe_oracle_weight(e->gradients[i], w->key.weight, w->key.expert), da[i], db[i]);
    }
    double *got_a = as_doubles(a->n, grad + a->offset), *got_b = as_doubles(b->n, grad + b->offset);
    const double *const want_a[3] = {da[0], da[1], da[2]}, *const want_b[3] = {db[0], db[1], db[2]};
    bool good = near_enough(t, "dA of weight", (int)w->key.weight, a->n, got_a, want_a) >= 0 &&
                near_enough(t, "dB of weight", (int)w->key.weight, b->n, got_b, want_b) >= 0;
    for (int i = 0; i < 3; i++) {
        free(da[i]);
        free(db[i]);
    }
    free(va);
    free(vb);
    free(got_a);
    free(got_b);
    return good;
}

static bool compare_gradients(const struct trained *t, const struct expected *e, const float *grad)
{
    float *value = trained_read_all(t, MOE_TRAIN_VALUE);
    bool good = true;
    for (size_t i = 0; i < t->count && good; i++) {
        const struct parameter *p = &t->list[i];
        if (p->local && p->key.part == MOE_PART_WEIGHT && part_of(t, p, MOE_PART_LORA_A) != NULL)
            good = adapter_gradients(t, e, value, grad, p);
    }
    free(value);
    return good;
}

static bool check_gradients(struct trained *t)
{
    struct pass p;
    struct expected e = {0};
    bool good = expect_training(t, &e) && run_pass(t, &p, true);
    float *grad = good ? trained_read_all(t, MOE_TRAIN_GRAD) : NULL;
    good = good && (compare_gradients(t, &e, grad) ||
                    (expect_rough(t, &e) && compare_gradients(t, &e, grad)));
    free(grad);
    expected_free(&e);
    return good;
}

/* Inputs of a pass use the routing of the last step. */
static bool begin_again(struct trained *t)
{
    struct moe_trainer *trainer = t->trainer;
    struct subject *s = t->s;
    struct moe_trainer_config config = t->config;
    free(t->list);
    s->host.used = 0;
    if (!check_step(s))
        return false;
    trained_begin(t, s, &config);
    t->trainer = trainer;
    return true;
}

bool check_lora(struct subject *s)
{
    struct moe_trainer_config config = draw_config(s);
    struct trained t;
    uint64_t bytes;
    trained_begin(&t, s, &config);
    if (!went_well(s, "bytes", t.table->trainer_bytes(s->layer, &config, &bytes)) ||
        !went_well(s, "trainer", t.table->trainer_create(s->layer, &config, &t.trainer)) ||
        !check_beginning(&t))
        return false;
    float *base = trained_read_all(&t, MOE_TRAIN_VALUE);
    write_adapters(&t);
    bool good = check_merged(&t, base) && follow_values(&t) && begin_again(&t) &&
                check_gradients(&t) && check_reading(&t) && check_retained(&t) &&
                check_optimizer(&t) && check_merged(&t, base) && check_base(&t, base);
    free(base);
    trained_end(&t);
    return good;
}
