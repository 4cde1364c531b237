/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer step: agree, sum over slots, compute the norm, optimize. See moe/training.h.
 *
 * A slot makes all checks and sends its vote before any sum, so all slots refuse or none. Sums of
 * squares are in double, over chunks of a fixed size, added in order. So the norm has the same bits
 * on all slots and for any number of threads. */
#include "cpu/step/optimizer.h"

#include "common/layer_rules.h"
#include "cpu/step/step.h"
#include "cpu/training/reduce.h"

#include <stdlib.h>

enum { CHUNK = 1 << 16 }; /* elements that a thread works on at a time */

struct step {
    struct moe_session *session;
    struct moe_trainer *const *trainers;
    size_t count;
    const struct moe_optimizer_args *args;
    struct moe_cpu_shared_piece *piece;
    uint32_t pieces;
    double *squares; /* of each chunk of the largest parameter */
};

/* ------------------------------------------------------------------- agreement */

static uint64_t fingerprint(const struct step *step)
{
    uint64_t hash = moe_optimizer_hash(step->args, step->count);
    for (size_t i = 0; i < step->count; i++) {
        const struct moe_trainer *t = step->trainers[i];
        moe_optimizer_mix_trainer(&hash, &t->layer->spec, &t->layer->placement, &t->config,
                                  t->frozen);
    }
    return hash;
}

/* *refused: all slots have all votes, and all refuse. */
static struct moe_status agree(const struct step *step, const struct moe_status *own, bool *refused)
{
    struct moe_session *s = step->session;
    struct moe_optimizer_vote mine = {.refuses = moe_failed(own)}, all[MOE_MAX_SLOTS];
    if (mine.refuses == 0)
        mine.hash = fingerprint(step);
    MOE_TRY(moe_cpu_session_gather(s, &mine, all, sizeof mine));
    struct moe_status st = moe_optimizer_check_votes(&s->config, all, own);
    *refused = moe_failed(&st);
    return st;
}

/* ----------------------------------------------------------------- preparation */

static bool is_frozen(const struct moe_trainer *t, const struct moe_cpu_param *p)
{
    return t->frozen >> moe_weight_group(p->what.weight) & 1;
}

static void add_piece(struct step *step, uint64_t holders, size_t n, float *data)
{
    if (__builtin_popcountll(holders) > 1)
        step->piece[step->pieces++] = (struct moe_cpu_shared_piece){holders, n, data};
}

static void list_pieces(struct step *step, const struct moe_trainer *t,
                        const struct moe_cpu_param *p)
{
    const struct moe_layer *layer = t->layer;
    if (is_frozen(t, p))
        return;
    if (!moe_weight_is_expert(p->what.weight)) {
        add_piece(step, step->session->config.live, p->n, p->grad);
        return;
    }
    for (uint32_t e = 0; e < layer->spec.experts; e++) {
        int32_t local = layer->local_index[e];
        uint64_t holders = moe_placement_slots_of(&layer->placement, e);
        add_piece(step, holders & step->session->config.live, p->n,
                  local >= 0 ? p->grad + (size_t)local * p->n : NULL);
    }
}

/* Checks everything and allocates the lists. */
static struct moe_status prepare(struct step *step)
{
    size_t pieces = 1, chunks = 1;
    for (size_t i = 0; i < step->count; i++) {
        const struct moe_trainer *t = step->trainers[i];
        MOE_TRY(moe_optimizer_check_live(&step->session->config, &t->layer->spec,
                                         &t->layer->placement, t->layer->slot));
        MOE_TRY(moe_optimizer_check(t->config.optimizer, step->args));
        for (uint32_t p = 0; p < t->params; p++) {
            size_t n = (t->param[p].n * t->param[p].entries + CHUNK - 1) / CHUNK;
            chunks = n > chunks ? n : chunks;
            pieces += moe_weight_is_expert(t->param[p].what.weight) ? t->layer->spec.experts : 1;
        }
    }
    step->piece = calloc(pieces, sizeof *step->piece);
    step->squares = calloc(chunks, sizeof *step->squares);
    if (step->piece == NULL || step->squares == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for an optimizer step");
    for (size_t i = 0; i < step->count; i++)
        for (uint32_t p = 0; p < step->trainers[i]->params; p++)
            list_pieces(step, step->trainers[i], &step->trainers[i]->param[p]);
    return moe_ok();
}

/* ------------------------------------------------------------------------ norm */

struct squares_job {
    const float *grad;
    size_t n;
    double *squares;
};

static void squares_item(void *ctx, uint32_t item)
{
    const struct squares_job *job = ctx;
    size_t first = (size_t)item * CHUNK, end = first + CHUNK < job->n ? first + CHUNK : job->n;
    double lane[8] = {0};
    size_t i = first;
    for (; i + 8 <= end; i += 8)
        for (size_t j = 0; j < 8; j++)
            lane[j] += (double)job->grad[i + j] * job->grad[i + j];
    for (; i < end; i++)
        lane[0] += (double)job->grad[i] * job->grad[i];
    job->squares[item] = 0;
    for (int j = 0; j < 8; j++)
        job->squares[item] += lane[j];
}

static double sum_of_squares(const struct step *step, struct moe_device *device, const float *grad,
                             size_t n)
{
    struct squares_job job = {grad, n, step->squares};
    uint32_t items = (uint32_t)((n + CHUNK - 1) / CHUNK);
    double sum = 0;
    moe_cpu_parallel(device, items, squares_item, &job);
    for (uint32_t i = 0; i < items; i++)
        sum += step->squares[i];
    return sum;
}

/* The first live slot with a copy counts its gradient. */
static uint32_t first_holder(const struct step *step, const struct moe_layer *layer,
                             uint32_t expert)
{
    uint64_t holders = moe_placement_slots_of(&layer->placement, expert);
    return (uint32_t)__builtin_ctzll(holders & step->session->config.live);
}

/* Sums over the gradients that this slot counts. */
static double own_squares(const struct step *step, const struct moe_trainer *t,
                          const struct moe_cpu_param *p)
{
    const struct moe_layer *layer = t->layer;
    uint32_t own = step->session->config.slot;
    if (is_frozen(t, p))
        return 0;
    if (!moe_weight_is_expert(p->what.weight)) {
        bool first = (uint32_t)__builtin_ctzll(step->session->config.live) == own;
        return first ? sum_of_squares(step, layer->device, p->grad, p->n) : 0;
    }
    double sum = 0;
    for (uint32_t l = 0; l < layer->local_experts; l++)
        if (first_holder(step, layer, layer->local[l]) == own)
            sum += sum_of_squares(step, layer->device, p->grad + l * p->n, p->n);
    return sum;
}

/* The last that slots exchange: one that has the squares of all takes the step. */
static struct moe_status measure(const struct step *step, double *squares, bool *can_finish)
{
    double own = 0, all[MOE_MAX_SLOTS];
    for (size_t i = 0; i < step->count; i++)
        for (uint32_t p = 0; p < step->trainers[i]->params; p++)
            own += own_squares(step, step->trainers[i], &step->trainers[i]->param[p]);
    *can_finish = true;
    MOE_TRY(moe_cpu_session_gather(step->session, &own, all, sizeof own));
    *squares = 0;
    for (uint32_t s = 0; s < step->session->config.slots; s++)
        *squares += all[s];
    return moe_ok();
}

/* ------------------------------------------------------------------------ move */

struct optimize_job {
    const struct moe_cpu_isa *isa;
    const struct moe_train_update *update;
    const struct moe_cpu_param *param;
};

static void optimize_item(void *ctx, uint32_t item)
{
    const struct optimize_job *job = ctx;
    const struct moe_cpu_param *p = job->param;
    size_t first = (size_t)item * CHUNK, left = p->n * p->entries - first;
    job->isa->optimize(job->update, left < CHUNK ? left : CHUNK, p->value + first, p->grad + first,
                       p->moment1 + first, p->moment2 != NULL ? p->moment2 + first : NULL);
}

static void optimize_param(struct moe_trainer *t, const struct moe_cpu_param *p,
                           const struct moe_train_update *update)
{
    struct optimize_job job = {moe_cpu_device_isa(t->layer->device), update, p};
    moe_cpu_parallel(t->layer->device, (uint32_t)((p->n * p->entries + CHUNK - 1) / CHUNK),
                     optimize_item, &job);
    if (p->what.part == MOE_PART_LORA_A)
        return; /* B follows, then both are merged */
    for (uint32_t e = 0; e < p->entries; e++)
        moe_cpu_trainer_renew(t, p->what.weight, e);
}

static void balance(struct moe_trainer *t, double rate)
{
    float *bias = t->layer->bias[MOE_WEIGHT_SELECT_BIAS];
    uint32_t experts = t->layer->spec.experts;
    uint64_t total = 0;
    if (bias == NULL || rate == 0)
        return;
    for (uint32_t e = 0; e < experts; e++)
        total += t->loads[e];
    for (uint32_t e = 0; e < experts; e++)
        bias[e] += (float)moe_balance_change(rate, t->loads[e], total, experts);
}

static struct moe_status optimize_all(const struct step *step, double squares,
                                      struct moe_optimizer_result *result)
{
    double norm = sqrt(squares) * fabs(step->args->grad_scale);
    *result = (struct moe_optimizer_result){
        .grad_norm = norm, .nonfinite = !isfinite(squares), .squares = squares};
    for (size_t i = 0; i < step->count; i++) {
        struct moe_trainer *t = step->trainers[i];
        moe_activation_cache_drop(moe_cpu_device_activation_cache(t->layer->device), t->layer, 0);
        struct moe_train_update update = moe_train_update_of(
            t->config.optimizer, step->args, moe_clip_factor(norm, step->args->max_grad_norm));
        for (uint32_t p = 0; !result->nonfinite && p < t->params; p++)
            if (!is_frozen(t, &t->param[p]))
                optimize_param(t, &t->param[p], &update);
        if (!result->nonfinite)
            balance(t, step->args->balance_rate);
        MOE_TRY(moe_cpu_zero_grad(t));
    }
    return moe_ok();
}

/* ------------------------------------------------------------------------ step */

static struct moe_status run(struct step *step, struct moe_optimizer_result *result)
{
    struct moe_session *s = step->session;
    double squares = 0;
    bool refused = false, can_finish = false;
    struct moe_status own = prepare(step), st = agree(step, &own, &refused);
    if (!moe_failed(&st))
        st = moe_cpu_reduce(s, step->piece, step->pieces);
    if (!moe_failed(&st))
        st = measure(step, &squares, &can_finish);
    *result = (struct moe_optimizer_result){.unchanged = moe_failed(&st), .can_finish = can_finish};
    if (!moe_failed(&st))
        st = optimize_all(step, squares, result);
    if (moe_failed(&st) && !refused)
        moe_cpu_session_fail(s, &st);
    return st;
}

struct moe_status moe_cpu_optimizer_step(struct moe_session *session,
                                         struct moe_trainer *const *trainers, size_t count,
                                         const struct moe_optimizer_args *args,
                                         struct moe_optimizer_result *result)
{
    *result = (struct moe_optimizer_result){.unchanged = true};
    MOE_TRY(moe_cpu_steps_idle(session->steps));
    MOE_TRY(moe_cpu_session_usable(session));
    struct step step = {.session = session, .trainers = trainers, .count = count, .args = args};
    struct moe_status st = run(&step, result);
    free(step.piece);
    free(step.squares);
    return st;
}

struct moe_status moe_cpu_optimizer_finish(struct moe_trainer *const *trainers, size_t count,
                                           const struct moe_optimizer_args *args, double squares,
                                           struct moe_optimizer_result *result)
{
    const struct step step = {.trainers = trainers, .count = count, .args = args};
    *result = (struct moe_optimizer_result){0};
    for (size_t i = 0; i < count; i++)
        MOE_TRY(moe_optimizer_check(trainers[i]->config.optimizer, args));
    return optimize_all(&step, squares, result);
}
