/* SPDX-License-Identifier: Apache-2.0 */
/* The whole backward pass against the oracle, and properties of several passes: the same bits
 * again, gradients that add up, stay, vanish and freeze. */
#include "trained.h"

#include "base/clock.h"

#include <math.h>
#include <stdlib.h>

/* -------------------------------------------------------------------- one pass */

static bool compare_dx(struct trained *t, const struct pass *p, const struct expected *e)
{
    const struct subject *s = t->s;
    size_t hidden = s->c->spec.hidden, n = s->in->tokens * hidden;
    double *got = must(n * sizeof *got);
    bool good = true;
    for (uint32_t i = 0; i < s->in->tokens && good; i++)
        if (p->state[i] != s->state[i])
            good = wrong(s, "token %u: state %u in the backward pass, %u before", i, p->state[i],
                         s->state[i]);
    for (size_t i = 0; i < n && good; i++) {
        got[i] = element(s->c->dtype, p->dx, i);
        if (s->state[i / hidden] != MOE_TOKEN_OK && got[i] != 0)
            good = wrong(s, "dx of the refused token %zu is %g", i / hidden, got[i]);
    }
    const double *const want[3] = {e->dx[0], e->dx[1], e->dx[2]};
    good = good && near_enough(t, "dx", 0, n, got, want) >= 0;
    free(got);
    return good;
}

static bool compare_dweights(struct trained *t, const struct pass *p, const struct expected *e)
{
    const struct subject *s = t->s;
    size_t top_k = s->c->spec.router.top_k, n = s->in->tokens * top_k;
    double *got = must(n * sizeof *got);
    bool good = true;
    for (size_t i = 0; i < n && good; i++) {
        got[i] = (double)p->dweights[i];
        bool routed = s->state[i / top_k] == MOE_TOKEN_OK && t->ids[i] >= 0;
        if (!routed && got[i] != 0)
            good = wrong(s, "choice %zu has no expert, but its weight a gradient of %g", i, got[i]);
    }
    const double *const want[3] = {e->dweights[0], e->dweights[1], e->dweights[2]};
    good = good && near_enough(t, "dweights", 0, n, got, want) >= 0;
    free(got);
    return good;
}

static bool all_zero(size_t n, const double *v)
{
    for (size_t i = 0; i < n; i++)
        if (v[i] != 0)
            return false;
    return true;
}

static bool expert_has_rows(const struct trained *t, uint32_t expert)
{
    const struct subject *s = t->s;
    for (uint32_t p = 0; p < s->member->slots; p++)
        for (uint32_t i = 0; i < s->c->input[p].tokens * s->c->spec.router.top_k; i++)
            if (s->member->board->ids[p][i] == (int32_t)expert &&
                case_target(s->c, i / s->c->spec.router.top_k, (int32_t)expert) ==
                    (int)s->member->slot)
                return true;
    return false;
}

/* limits [count]: the error that was allowed. */
static bool compare_gradients(struct trained *t, const float *got, const struct expected *e,
                              double *limits)
{
    bool good = true;
    for (size_t i = 0; i < t->count && good; i++) {
        const struct parameter *p = &t->list[i];
        if (!p->local || !p->trained)
            continue;
        const double *want[3];
        for (int j = 0; j < 3; j++)
            want[j] = e->gradients[j] == NULL
                          ? NULL
                          : moe_oracle_weight(e->gradients[j], p->key.weight, p->key.expert);
        double *values = must(p->n * sizeof *values);
        for (size_t j = 0; j < p->n; j++)
            values[j] = (double)got[p->offset + j];
        limits[i] = near_enough(t, "gradient of weight", (int)p->key.weight, p->n, values, want);
        good = limits[i] >= 0;
        if (good && moe_weight_is_expert(p->key.weight) && !expert_has_rows(t, p->key.expert)) {
            t->s->tally->idle_experts++;
            good = all_zero(p->n, values) ||
                   wrong(t->s, "expert %u has no token, but a gradient", p->key.expert);
        }
        free(values);
    }
    return good;
}

static bool compare_aux(struct trained *t, const struct pass *p, const struct expected *e)
{
    const struct subject *s = t->s;
    double want = t->aux_coeff != 0 ? e->aux_loss : 0;
    uint8_t *mine = (uint8_t *)s->share + (size_t)s->member->slot * SHARE_BYTES;
    if (!(fabs(*p->aux_loss - want) <= 1e-5 * fabs(want) + 1e-12))
        return wrong(s, "the aux loss is %.9g, not %.9g", *p->aux_loss, want);
    memcpy(mine, p->aux_loss, sizeof(double));
    if (!trained_shown(t))
        return false;
    for (uint32_t i = 0; i < s->member->slots; i++)
        if (memcmp((uint8_t *)s->share + (size_t)i * SHARE_BYTES, mine, sizeof(double)) != 0)
            return wrong(s, "slot %u has another aux loss", i);
    return trained_shown(t);
}

/* --------------------------------------------------------------- pass after pass */

static bool same_gradients(struct trained *t, const char *what, const float *want)
{
    float *got = trained_read_all(t, MOE_TRAIN_GRAD);
    bool same = memcmp(got, want, t->floats * sizeof *got) == 0;
    free(got);
    return same || wrong(t->s, "gradients differ %s", what);
}

static bool twice_is_double(struct trained *t, const float *once, const double *limits)
{
    float *twice = trained_read_all(t, MOE_TRAIN_GRAD);
    bool good = true;
    for (size_t i = 0; i < t->count && good; i++) {
        const struct parameter *p = &t->list[i];
        double error = 0, size = 0;
        for (size_t j = p->offset; j < p->offset + p->n; j++) {
            error += pow((double)twice[j] - 2 * (double)once[j], 2);
            size += pow(2 * (double)once[j], 2);
        }
        if (p->local && p->trained && !(sqrt(error) <= fmax(1e-5 * sqrt(size), limits[i])))
            good = wrong(t->s, "two passes do not double the gradient of weight %d: off by %g",
                         (int)p->key.weight, sqrt(error));
    }
    free(twice);
    return good;
}

/* Again: adds; without accumulating: changes nothing; from zero: the same bits as the first time.
 */
static bool check_accumulation(struct trained *t, const struct pass *first, const float *once,
                               const double *limits)
{
    struct pass p;
    float *zeros = must(t->floats * sizeof *zeros);
    bool good = run_pass(t, &p, true) && same_pass(t, "from run to run", first, &p) &&
                twice_is_double(t, once, limits);
    float *twice = trained_read_all(t, MOE_TRAIN_GRAD);
    good = good && run_pass(t, &p, false) &&
           same_pass(t, "where gradients are not accumulated", first, &p) &&
           same_gradients(t, "after a pass that accumulates none", twice) &&
           went_well(t->s, "zero_grad", t->table->zero_grad(t->trainer)) &&
           same_gradients(t, "from zero after zero_grad", zeros);
    t->counted = 0;
    good = good && run_pass(t, &p, true) && same_gradients(t, "from run to run", once);
    free(zeros);
    free(twice);
    return good;
}

/* A forward step and a backward pass at the same time; no third. */
static bool check_next_to_a_step(struct trained *t, const struct pass *first)
{
    struct subject *s = t->s;
    size_t bytes = tensor_bytes(s->c, s->in->tokens), pairs = s->in->tokens;
    pairs *= s->c->spec.router.top_k;
    struct pass p = blank_pass(t);
    struct moe_backward_args b = pass_args(t, &p, false);
    void *y = take(&s->host, bytes);
    int32_t *ids = take(&s->host, pairs * sizeof *ids);
    float *weights = take(&s->host, pairs * sizeof *weights);
    uint8_t *state = take(&s->host, s->in->tokens);
    struct moe_step_args f = {.layer = s->layer,
                              .dtype = s->c->dtype,
                              .bucket = s->c->bucket,
                              .tokens = s->in->tokens,
                              .x = t->x,
                              .y = y,
                              .ids_out = ids,
                              .weights_out = weights,
                              .token_state = state};
    struct moe_step *step[3];
    struct moe_step_result result;
    if (!went_well(s, "enqueue", s->backend->step_enqueue(s->session, &f, &step[0])) ||
        !went_well(s, "backward", t->table->backward_enqueue(s->session, &b, &step[1])))
        return false;
    struct moe_status third = t->table->backward_enqueue(s->session, &b, &step[2]);
    if (third.code != MOE_FAILED_PRECONDITION)
        return wrong(s, "a third pass was answered with %s", moe_code_name(third.code));
    return went_well(s, "step", s->backend->step_wait(step[0], MOE_NEVER, &result)) &&
           went_well(s, "backward", s->backend->step_wait(step[1], MOE_NEVER, &result)) &&
           same_pass(t, "next to a forward step", first, &p);
}

/* One slot runs a different pass: all refuse it, and nothing has changed. */
static bool check_disagreement(struct trained *t, const struct pass *first, const float *once)
{
    const struct subject *s = t->s;
    bool odd = s->c->seed / 5 % s->member->slots == s->member->slot;
    struct pass p = blank_pass(t);
    struct moe_backward_args a = pass_args(t, &p, true);
    struct moe_step *step;
    struct moe_step_result result;
    if (s->c->seed % 2 == 0)
        a.aux_coeff = odd ? 0.125f : 0.5f;
    else
        a.accumulate = !odd;
    if (!went_well(s, "backward", t->table->backward_enqueue(s->session, &a, &step)))
        return false;
    struct moe_status st = s->backend->step_wait(step, MOE_NEVER, &result);
    if (st.code != MOE_FAILED_PRECONDITION)
        return wrong(s, "slots that mean different passes were answered with %s",
                     moe_code_name(st.code));
    return same_gradients(t, "after a refused pass", once) && run_pass(t, &p, false) &&
           same_pass(t, "after a refused pass", first, &p);
}

/* Freezes one group: it has no gradients any more, and nothing else changes. */
static bool check_freezing(struct trained *t, const struct pass *first, const float *once)
{
    enum moe_param_group group = (enum moe_param_group)(t->s->c->seed % MOE_PARAMS_COUNT);
    float *want = must(t->floats * sizeof *want);
    struct pass p;
    memcpy(want, once, t->floats * sizeof *want);
    for (size_t i = 0; i < t->count; i++)
        if (moe_weight_group(t->list[i].key.weight) == group)
            memset(want + t->list[i].offset, 0, t->list[i].n * sizeof *want);
    bool good = went_well(t->s, "freeze", t->table->set_frozen(t->trainer, 1u << group)) &&
                same_gradients(t, "where a group was frozen", want) &&
                went_well(t->s, "zero_grad", t->table->zero_grad(t->trainer));
    t->counted = 0;
    good = good && run_pass(t, &p, true) && same_pass(t, "with a frozen group", first, &p) &&
           same_gradients(t, "with a frozen group", want) &&
           went_well(t->s, "thaw", t->table->set_frozen(t->trainer, 0)) &&
           same_gradients(t, "after thawing", want) &&
           went_well(t->s, "zero_grad", t->table->zero_grad(t->trainer));
    t->counted = 0;
    good = good && run_pass(t, &p, true) && same_gradients(t, "after thawing", once);
    free(want);
    return good;
}

static bool compare_pass(struct trained *t, const struct pass *p, const float *gradients,
                         const struct expected *e, double *limits)
{
    return compare_dx(t, p, e) && compare_dweights(t, p, e) &&
           compare_gradients(t, gradients, e, limits);
}

static void note_bits(struct trained *t, const struct pass *p, const float *gradients)
{
    uint64_t *bits = &t->s->tally->trained_bits;
    size_t pairs = (size_t)t->s->in->tokens * t->s->c->spec.router.top_k;
    add_to_hash(bits, p->dx, tensor_bytes(t->s->c, t->s->in->tokens));
    add_to_hash(bits, p->dweights, pairs * sizeof *p->dweights);
    add_to_hash(bits, p->aux_loss, sizeof *p->aux_loss);
    add_to_hash(bits, gradients, t->floats * sizeof *gradients);
}

static bool check_passes(struct trained *t, struct expected *e)
{
    struct pass first;
    double *limits = must(t->count * sizeof *limits);
    bool good = run_pass(t, &first, true);
    float *once = good ? trained_read_all(t, MOE_TRAIN_GRAD) : NULL;
    good = good && (compare_pass(t, &first, once, e, limits) ||
                    (expect_rough(t, e) && compare_pass(t, &first, once, e, limits)));
    if (good)
        note_bits(t, &first, once);
    good = good && compare_aux(t, &first, e) && check_accumulation(t, &first, once, limits);
    if (good && t->s->c->seed % 3 == 0)
        good = check_next_to_a_step(t, &first);
    if (good && t->s->c->seed % 3 == 1)
        good = check_freezing(t, &first, once);
    if (good && t->s->c->seed % 3 == 2 && t->s->member->slots > 1)
        good = check_disagreement(t, &first, once);
    free(once);
    free(limits);
    return good;
}

/* ------------------------------------------------------------------ life of a trainer */

/* Masters are the weights that were uploaded; moments and gradients are zero. */
static bool check_beginning(struct trained *t)
{
    for (size_t i = 0; i < t->count; i++) {
        const struct parameter *p = &t->list[i];
        if (!p->local)
            continue;
        float *value = trained_read(t, p, MOE_TRAIN_VALUE);
        bool same = true;
        for (size_t j = 0; j < p->n; j++)
            same = same &&
                   (double)value[j] == case_weight_at(t->s->c, p->key.weight, p->key.expert, j);
        free(value);
        if (!same)
            return wrong(t->s, "weight %d does not begin as it was uploaded", (int)p->key.weight);
    }
    float *zeros = must(t->floats * sizeof *zeros);
    bool good = true;
    for (enum moe_train_tensor k = MOE_TRAIN_GRAD; k <= MOE_TRAIN_MOMENT2 && good; k++) {
        float *data = trained_read_all(t, k);
        good = memcmp(data, zeros, t->floats * sizeof *data) == 0 ||
               wrong(t->s, "tensors of kind %d do not begin as zeros", (int)k);
        free(data);
    }
    free(zeros);
    return good;
}

static bool refused(struct trained *t, const char *what, struct moe_status st, enum moe_code code)
{
    return st.code == code || wrong(t->s, "%s was answered with %s", what, moe_code_name(st.code));
}

/* A trainer refuses a tensor that it does not have, by name. */
static bool check_refusals(struct trained *t)
{
    float *data = must(t->floats * sizeof *data);
    bool good = true;
    struct moe_trainer *second = NULL;
    good =
        refused(t, "a second trainer", t->table->trainer_create(t->s->layer, &t->config, &second),
                MOE_FAILED_PRECONDITION);
    for (size_t i = 0; i < t->count && good; i++) {
        const struct parameter *p = &t->list[i];
        struct moe_train_key key = p->key;
        key.tensor = p->local && p->trained ? MOE_TRAIN_MOMENT2 : MOE_TRAIN_GRAD;
        bool held = p->local && p->trained && t->config.optimizer == MOE_OPTIMIZER_ADAMW;
        good = refused(t, held ? "a moment" : "what is not held",
                       t->table->trainer_read(t->trainer, &key, data, p->n * sizeof *data),
                       held ? MOE_OK : MOE_NOT_FOUND);
        key.tensor = MOE_TRAIN_VALUE;
        if (good && p->local)
            good = refused(t, "a wrong size",
                           t->table->trainer_read(t->trainer, &key, data, p->n * 4 - 1),
                           MOE_INVALID_ARGUMENT);
    }
    free(data);
    return good;
}

static bool check_bytes(struct trained *t)
{
    struct subject *s = t->s;
    struct moe_device_info before, after;
    uint64_t bytes = 0;
    s->backend->device_info(s->device, &before);
    if (!went_well(s, "bytes", t->table->trainer_bytes(s->layer, &t->config, &bytes)) ||
        !went_well(s, "trainer", t->table->trainer_create(s->layer, &t->config, &t->trainer)))
        return false;
    s->backend->device_info(s->device, &after);
    return after.used_bytes - before.used_bytes == bytes ||
           wrong(s, "a trainer takes %llu bytes and reported %llu",
                 (unsigned long long)(after.used_bytes - before.used_bytes),
                 (unsigned long long)bytes);
}

/* Frozen from the beginning: no memory, no gradient, no thawing. */
static bool check_frozen_from_the_beginning(struct subject *s)
{
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_SGD,
                                        .frozen = 1u << (s->c->seed / 3 % MOE_PARAMS_COUNT)};
    struct trained t;
    struct pass p;
    size_t host = s->host.used;
    trained_begin(&t, s, &config);
    bool good = check_bytes(&t) && check_refusals(&t) && run_pass(&t, &p, true) &&
                refused(&t, "thawing", t.table->set_frozen(t.trainer, 0), MOE_FAILED_PRECONDITION);
    trained_end(&t);
    s->host.used = host;
    return good;
}

bool check_training(struct subject *s)
{
    struct moe_trainer_config config = {.optimizer = s->c->seed % 2 == 0 ? MOE_OPTIMIZER_ADAMW
                                                                         : MOE_OPTIMIZER_SGD};
    struct trained t;
    struct expected e = {0};
    if (adapters_alone(s->c))
        return check_lora(s);
    if (s->c->seed % 5 == 0 && !check_frozen_from_the_beginning(s))
        return false;
    trained_begin(&t, s, &config);
    bool good = check_bytes(&t) && check_beginning(&t) && check_refusals(&t) &&
                expect_training(&t, &e) && check_passes(&t, &e) && check_reading(&t) &&
                check_retained(&t) && check_training_parts(&t) && check_optimizer(&t);
    expected_free(&e);
    if (good)
        good = check_retained_to_the_end(&t);
    else
        trained_end(&t);
    return good && (s->c->seed % 3 != 2 || check_two_trainers(s));
}
