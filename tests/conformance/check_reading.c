/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a trainer during steps: the bits of values, moments and W0 do not change while passes
 * run.
 */
#include "trained.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { READABLE = 4 };

static const enum moe_train_tensor readable[READABLE] = {MOE_TRAIN_VALUE, MOE_TRAIN_MOMENT1,
                                                         MOE_TRAIN_MOMENT2, MOE_TRAIN_BASE};

static bool has_adapter(const struct trained *t, const struct parameter *p)
{
    for (size_t i = 0; i < t->count; i++)
        if (t->list[i].key.weight == p->key.weight && t->list[i].key.part == MOE_PART_LORA_A)
            return p->key.part == MOE_PART_WEIGHT;
    return false;
}

static bool is_held(const struct trained *t, const struct parameter *p,
                    enum moe_train_tensor tensor)
{
    if (!p->local || (tensor == MOE_TRAIN_MOMENT2 && t->config.optimizer == MOE_OPTIMIZER_SGD))
        return false;
    if (tensor == MOE_TRAIN_BASE)
        return has_adapter(t, p);
    return tensor == MOE_TRAIN_VALUE || p->trained;
}

/* ------------------------------------------------------------------------ during steps */

struct reader {
    const struct trained *t;
    float *before[READABLE]; /* [floats] each */
    atomic_bool stop;
    unsigned rounds; /* whole ones */
    bool good;
    struct moe_status failure;
};

static float *read_held(const struct trained *t, enum moe_train_tensor tensor)
{
    float *all = must(t->floats * sizeof *all);
    for (size_t i = 0; i < t->count; i++) {
        const struct parameter *p = &t->list[i];
        if (!is_held(t, p, tensor))
            continue;
        float *data = trained_read(t, p, tensor);
        memcpy(all + p->offset, data, p->n * sizeof *data);
        free(data);
    }
    return all;
}

static bool is_as_before(struct reader *r, const struct parameter *p, int kind, float *data)
{
    const struct trained *t = r->t;
    struct moe_train_key key = p->key;
    key.tensor = readable[kind];
    r->failure = t->table->trainer_read(t->trainer, &key, data, p->n * sizeof *data);
    return !moe_failed(&r->failure) &&
           memcmp(data, r->before[kind] + p->offset, p->n * sizeof *data) == 0;
}

static void *read_on(void *arg)
{
    struct reader *r = arg;
    const struct trained *t = r->t;
    float *data = must(t->floats * sizeof *data);
    do {
        for (int kind = 0; kind < READABLE; kind++)
            for (size_t i = 0; i < t->count && r->good; i++)
                if (is_held(t, &t->list[i], readable[kind]))
                    r->good = is_as_before(r, &t->list[i], kind, data);
        r->rounds++;
    } while (r->good && !atomic_load(&r->stop));
    free(data);
    return NULL;
}

/* The same on all slots, independent of the time of their readers. */
static bool run_during_reads(struct trained *t)
{
    struct pass first, second, third;
    return run_pass(t, &first, true) && run_pass(t, &second, false) &&
           same_pass(t, "during a read", &first, &second) &&
           went_well(t->s, "zero_grad", t->table->zero_grad(t->trainer)) &&
           run_pass(t, &third, true) &&
           went_well(t->s, "set_frozen",
                     t->table->set_frozen(t->trainer, (1u << MOE_PARAMS_COUNT) - 1)) &&
           went_well(t->s, "set_frozen", t->table->set_frozen(t->trainer, t->config.frozen)) &&
           same_pass(t, "during a read, again", &first, &third);
}

bool check_reading(struct trained *t)
{
    struct subject *s = t->s;
    struct reader r = {.t = t, .good = true, .failure = moe_ok()};
    size_t used = s->host.used;
    pthread_t thread;
    for (int kind = 0; kind < READABLE; kind++)
        r.before[kind] = read_held(t, readable[kind]);
    MOE_INVARIANT(pthread_create(&thread, NULL, read_on, &r) == 0);
    bool good = run_during_reads(t);
    atomic_store(&r.stop, true);
    pthread_join(thread, NULL);
    for (int kind = 0; kind < READABLE; kind++)
        free(r.before[kind]);
    s->host.used = used;
    t->counted = 0;
    return good && went_well(s, "zero_grad", t->table->zero_grad(t->trainer)) &&
           went_well(s, "reading during steps", r.failure) &&
           ((r.good && r.rounds > 0) || wrong(s, "values read during steps differ"));
}

/* ----------------------------------------------------------------------------- adapters */

bool check_base(struct trained *t, const float *base)
{
    bool good = true;
    for (size_t i = 0; i < t->count && good; i++) {
        const struct parameter *p = &t->list[i];
        struct moe_train_key key = p->key;
        float *data = must(p->n * sizeof *data);
        key.tensor = MOE_TRAIN_BASE;
        struct moe_status st = t->table->trainer_read(t->trainer, &key, data, p->n * sizeof *data);
        if (!is_held(t, p, MOE_TRAIN_BASE)) {
            good = st.code == MOE_NOT_FOUND || wrong(t->s, "W0 of what has none was read");
            free(data);
            continue;
        }
        good = went_well(t->s, "W0", st);
        /* A scale of the whole matrix divides, or its inverse multiplies: a bit may differ. */
        const struct moe_weight_format *f = moe_weight_format_of(&t->s->c->spec, p->key.weight);
        double unit = f != NULL && f->global_divides ? 0x1p-22 : 0;
        for (size_t j = 0; j < p->n && good; j++) {
            double want = f != NULL ? case_weight_at(t->s->c, p->key.weight, p->key.expert, j)
                                    : (double)base[p->offset + j];
            good = fabs((double)data[j] - want) <= unit * fabs(want) ||
                   wrong(t->s, "W0 of weight %d is %g, not %g", (int)p->key.weight, (double)data[j],
                         want);
        }
        st = t->table->trainer_write(t->trainer, &key, data, p->n * sizeof *data);
        good = good && (st.code == MOE_INVALID_ARGUMENT || wrong(t->s, "W0 was written"));
        free(data);
    }
    return good;
}
