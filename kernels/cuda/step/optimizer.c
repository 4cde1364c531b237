/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer step of a group; see moe/training.h. Live slots sum the gradients that several of
 * them hold, find the same norm, and each updates its own weights. All slots agree on the step
 * before anything changes. The exchange of squares is the last one: a slot that lacks only those
 * can finish the step later. Within a slot everything is enqueued, a few launches per block; the
 * host waits for its peers, and once for the norm. Sums over slots are in reduce.h. No step may run
 * at the same time. */
#include "cuda/plan/limits.h"
#include "cuda/step/backward.h"

#include "common/activation_cache.h"
#include "common/layer_rules.h"
#include "cuda/step/join.h"
#include "cuda/step/step.h"
#include "cuda/training/reduce.h"

#include <math.h>
#include <string.h>

enum {
    LOADS_AT_ONCE = MOE_WINDOW_EXCHANGE_BYTES / sizeof(uint64_t),
};

/* ------------------------------------------------------------- sums over slots */

/* All slots visit the same blocks and experts in the same order. */
static struct moe_status sum_block(struct moe_cuda_reduce *r, struct moe_trainer *t,
                                   struct moe_cuda_block *b)
{
    const struct moe_layer *layer = t->layer;
    const struct moe_placement *p = &layer->placement;
    const uint64_t live = r->s->config.live;
    if (!b->expert) {
        if (live & (live - 1))
            MOE_TRY(moe_cuda_block_clear_grad(t, b));
        return moe_cuda_reduce_add(r, b->grad, b->n, live);
    }
    if (p->offset[p->experts] == p->experts)
        return moe_ok(); /* one copy of each expert */
    MOE_TRY(moe_cuda_block_clear_grad(t, b));
    for (uint32_t e = 0; e < layer->spec.experts; e++) {
        int32_t entry = layer->local_index[e];
        float *grad = entry < 0 ? NULL : b->grad + (size_t)entry * b->n;
        MOE_TRY(moe_cuda_reduce_add(r, grad, b->n, moe_placement_slots_of(p, e) & live));
    }
    return moe_ok();
}

/* Before a step runs, all slots must synchronize; the exchange of the norm does it. */
static struct moe_status sum_gradients(struct moe_session *s, struct moe_trainer *const *trainers,
                                       size_t count)
{
    struct moe_cuda_reduce r;
    moe_cuda_reduce_begin(&r, s);
    for (size_t i = 0; i < count; i++)
        for (uint32_t b = 0; b < trainers[i]->blocks; b++)
            if (moe_cuda_block_moves(trainers[i], &trainers[i]->block[b]))
                MOE_TRY(sum_block(&r, trainers[i], &trainers[i]->block[b]));
    return moe_cuda_reduce_flush(&r);
}

/* Counted loads become those of all slots. */
static struct moe_status sum_loads(struct moe_session *s, struct moe_trainer *t)
{
    uint32_t experts = t->layer->spec.experts;
    uint64_t mine[MOE_CUDA_MAX_EXPERTS], sum[MOE_CUDA_MAX_EXPERTS] = {0};
    uint64_t all[MOE_CUDA_MAX_SLOTS * LOADS_AT_ONCE];
    MOE_TRY(moe_cuda_mem_copy(s->device, mine, t->loads, experts * sizeof *mine));
    for (uint32_t first = 0; first < experts; first += LOADS_AT_ONCE) {
        uint32_t n = experts - first < LOADS_AT_ONCE ? experts - first : LOADS_AT_ONCE;
        MOE_TRY(moe_cuda_session_exchange(s, mine + first, all, n * sizeof *mine));
        for (uint32_t p = 0; p < s->config.slots; p++)
            for (uint32_t i = 0; i < n; i++)
                sum[first + i] += all[(size_t)p * n + i];
    }
    return moe_cuda_mem_copy(s->device, t->loads, sum, experts * sizeof *sum);
}

/* ------------------------------------------------------------------------ norm */

/* The first live slot with a copy counts its gradient. */
static bool counts(const struct moe_session_config *c, const struct moe_layer *layer,
                   uint32_t local)
{
    uint64_t holders = moe_placement_slots_of(&layer->placement, layer->local[local]) & c->live;
    return (uint32_t)__builtin_ctzll(holders) == c->slot;
}

static struct moe_status add_block_squares(const struct moe_session_config *c,
                                           const struct moe_trainer *t,
                                           const struct moe_cuda_block *b, double *sums,
                                           cudaStream_t stream)
{
    const struct moe_layer *layer = t->layer;
    if (b->grad_is_zero)
        return moe_ok();
    if (!b->expert)
        return moe_cuda_add_squares(b->grad, b->n, sums, MOE_CUDA_SQUARES_SHARED, stream);
    for (uint32_t l = 0; l < layer->local_experts;) {
        uint32_t end = l;
        while (end < layer->local_experts && counts(c, layer, end))
            end++;
        if (end > l)
            MOE_TRY(moe_cuda_add_squares(b->grad + l * b->n, (end - l) * b->n, sums,
                                         MOE_CUDA_SQUARES_OWN, stream));
        l = end + 1;
    }
    return moe_ok();
}

/* Squares of this slot: of the replicated weights, and of the experts that only it counts. */
static struct moe_status local_squares(const struct moe_session *s,
                                       struct moe_trainer *const *trainers, size_t count,
                                       double squares[MOE_CUDA_SQUARES])
{
    cudaStream_t stream = s->device->compute;
    squares[MOE_CUDA_SQUARES_SHARED] = squares[MOE_CUDA_SQUARES_OWN] = 0;
    if (count == 0)
        return moe_ok();
    double *sums = trainers[0]->sums;
    MOE_TRY(moe_cuda_clear_squares(sums, stream));
    for (size_t i = 0; i < count; i++)
        for (uint32_t b = 0; b < trainers[i]->blocks; b++)
            if (moe_cuda_block_moves(trainers[i], &trainers[i]->block[b]))
                MOE_TRY(add_block_squares(&s->config, trainers[i], &trainers[i]->block[b], sums,
                                          stream));
    return moe_cuda_read_squares(sums, squares, stream);
}

/* The last that slots exchange: one that has the squares of all takes the step. */
static struct moe_status measure(struct moe_session *s, struct moe_trainer *const *trainers,
                                 size_t count, double *squares, bool *can_finish)
{
    double mine[MOE_CUDA_SQUARES], all[MOE_CUDA_MAX_SLOTS] = {0};
    MOE_TRY(local_squares(s, trainers, count, mine));
    *can_finish = true;
    MOE_TRY(moe_cuda_session_exchange(s, &mine[MOE_CUDA_SQUARES_OWN], all, sizeof *mine));
    *squares = mine[MOE_CUDA_SQUARES_SHARED];
    for (uint32_t p = 0; p < s->config.slots; p++)
        *squares += all[p];
    return moe_ok();
}

/* ---------------------------------------------------------------------- moving */

static struct moe_status move_block(struct moe_trainer *t, struct moe_cuda_block *b,
                                    const struct moe_train_update *u)
{
    struct moe_layer *layer = t->layer;
    cudaStream_t stream = layer->device->compute;
    enum moe_dtype dtype = MOE_DTYPE_F32;
    void *resident = NULL;
    if (b->kind == MOE_CUDA_BLOCK_BIAS)
        resident = layer->desc.bias[b->weight];
    if (b->kind == MOE_CUDA_BLOCK_MATRIX) {
        resident = layer->desc.matrix[b->matrix].data;
        dtype = layer->desc.matrix[b->matrix].dtype;
    }
    MOE_TRY(moe_cuda_block_clear_grad(t, b));
    MOE_TRY(moe_cuda_update(u, b->entries * b->n, b->value, b->grad, b->moment1, b->moment2, dtype,
                            resident, stream));
    if (b->kind == MOE_CUDA_BLOCK_MATRIX && b->matrix == MOE_CUDA_ROUTER)
        return moe_cuda_layer_split_router(layer, stream);
    /* B comes after A, so both have been updated. */
    return b->part == MOE_PART_LORA_B ? moe_cuda_trainer_renew(t, b, stream) : moe_ok();
}

static bool balances(const struct moe_trainer *t, double rate)
{
    return rate != 0 && t->layer->spec.router.select_bias;
}

static struct moe_status balance(struct moe_trainer *t, double rate)
{
    struct moe_layer *layer = t->layer;
    uint32_t experts = layer->spec.experts;
    uint64_t loads[MOE_CUDA_MAX_EXPERTS], total = 0;
    float bias[MOE_CUDA_MAX_EXPERTS];
    if (!balances(t, rate))
        return moe_ok();
    MOE_TRY(moe_cuda_mem_copy(layer->device, loads, t->loads, experts * sizeof *loads));
    for (uint32_t e = 0; e < experts; e++)
        total += loads[e];
    float *resident = layer->desc.bias[MOE_WEIGHT_SELECT_BIAS];
    MOE_TRY(moe_cuda_mem_copy(layer->device, bias, resident, experts * sizeof *bias));
    for (uint32_t e = 0; e < experts; e++)
        bias[e] += (float)moe_balance_change(rate, loads[e], total, experts);
    return moe_cuda_mem_copy(layer->device, resident, bias, experts * sizeof *bias);
}

static struct moe_status move_all(struct moe_trainer *t, const struct moe_train_update *u)
{
    for (uint32_t b = 0; b < t->blocks; b++)
        if (moe_cuda_block_moves(t, &t->block[b]))
            MOE_TRY(move_block(t, &t->block[b], u));
    return moe_ok();
}

/* Everything after the exchanges: the step is taken, or skipped if a gradient is not finite. */
static struct moe_status optimize(struct moe_trainer *const *trainers, size_t count,
                                  const struct moe_optimizer_args *args, double squares,
                                  struct moe_optimizer_result *result)
{
    const double norm = sqrt(squares) * fabs(args->grad_scale);
    *result = (struct moe_optimizer_result){
        .grad_norm = norm, .nonfinite = !isfinite(squares), .squares = squares};
    for (size_t i = 0; i < count && !result->nonfinite; i++) {
        struct moe_trainer *t = trainers[i];
        double clip = moe_clip_factor(norm, args->max_grad_norm);
        struct moe_train_update u = moe_train_update_of(t->config.optimizer, args, clip);
        moe_activation_cache_drop(t->layer->device->activation_cache, t->layer, 0);
        MOE_TRY(balance(t, args->balance_rate));
        MOE_TRY(move_all(t, &u));
    }
    for (size_t i = 0; i < count; i++)
        MOE_TRY(moe_cuda_trainer_forget_grads(trainers[i]));
    return count == 0 ? moe_ok() : moe_cuda_device_finish(trainers[0]->layer->device);
}

/* ------------------------------------------------------------------------ step */

static struct moe_status check(struct moe_session *s, struct moe_trainer *const *trainers,
                               size_t count, const struct moe_optimizer_args *args)
{
    for (size_t i = 0; i < count; i++) {
        const struct moe_layer *layer = trainers[i]->layer;
        MOE_TRY(moe_optimizer_check_live(&s->config, &layer->spec, &layer->placement, layer->slot));
        MOE_TRY(moe_optimizer_check(trainers[i]->config.optimizer, args));
    }
    return moe_cuda_reduce_reserve(s);
}

/* *refused: all slots have voted, so none of them goes on. */
static struct moe_status agree(struct moe_session *s, struct moe_trainer *const *trainers,
                               size_t count, const struct moe_optimizer_args *args, bool *refused)
{
    struct moe_status own = check(s, trainers, count, args);
    struct moe_optimizer_vote mine = {.refuses = moe_failed(&own)}, all[MOE_CUDA_MAX_SLOTS];
    if (mine.refuses == 0)
        mine.hash = moe_optimizer_hash(args, count);
    for (size_t i = 0; i < count && mine.refuses == 0; i++)
        moe_optimizer_mix_trainer(&mine.hash, &trainers[i]->layer->spec,
                                  &trainers[i]->layer->placement, &trainers[i]->config,
                                  trainers[i]->frozen);
    MOE_TRY(moe_cuda_session_exchange(s, &mine, all, sizeof mine));
    struct moe_status st = moe_optimizer_check_votes(&s->config, all, &own);
    *refused = moe_failed(&st);
    return st;
}

/* Sums over slots, and the squares of all gradients. */
static struct moe_status gather(struct moe_session *s, struct moe_trainer *const *trainers,
                                size_t count, const struct moe_optimizer_args *args,
                                double *squares, bool *can_finish)
{
    MOE_TRY(sum_gradients(s, trainers, count));
    for (size_t i = 0; i < count; i++)
        if (balances(trainers[i], args->balance_rate))
            MOE_TRY(sum_loads(s, trainers[i]));
    return measure(s, trainers, count, squares, can_finish);
}

struct moe_status moe_cuda_optimizer_step(struct moe_session *s,
                                          struct moe_trainer *const *trainers, size_t count,
                                          const struct moe_optimizer_args *args,
                                          struct moe_optimizer_result *result)
{
    bool refused = false, can_finish = false;
    double squares = 0;
    *result = (struct moe_optimizer_result){.unchanged = true};
    MOE_TRY(moe_cuda_device_use(s->device));
    MOE_TRY(moe_cuda_steps_idle(s->steps));
    MOE_TRY(moe_cuda_session_usable(s));
    MOE_TRY(moe_cuda_backward_supported(s));
    struct moe_status st = agree(s, trainers, count, args, &refused);
    if (!moe_failed(&st))
        st = gather(s, trainers, count, args, &squares, &can_finish);
    *result = (struct moe_optimizer_result){.unchanged = moe_failed(&st), .can_finish = can_finish};
    if (!moe_failed(&st))
        st = optimize(trainers, count, args, squares, result);
    if (moe_failed(&st) && !refused)
        moe_cuda_session_fail(s);
    return st;
}

struct moe_status moe_cuda_optimizer_finish(struct moe_trainer *const *trainers, size_t count,
                                            const struct moe_optimizer_args *args, double squares,
                                            struct moe_optimizer_result *result)
{
    *result = (struct moe_optimizer_result){0};
    for (size_t i = 0; i < count; i++)
        MOE_TRY(moe_optimizer_check(trainers[i]->config.optimizer, args));
    if (count > 0)
        MOE_TRY(moe_cuda_device_use(trainers[0]->layer->device));
    return optimize(trainers, count, args, squares, result);
}
