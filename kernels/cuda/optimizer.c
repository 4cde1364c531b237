/* The optimizer step of a group: gradients of what several slots hold are summed, all slots find
 * the same norm, then each moves what it holds; see moe/training.h.
 *
 * Sums travel through the rows' regions of the windows, a piece at a time: every holder copies its
 * piece to the others, all slots meet, every holder adds the pieces in slot order, all meet again.
 * So the sums are the same bits everywhere, and no step may run meanwhile. */
#include "cuda/backward.h"

#include "cuda/step.h"
#include "layer_rules.h"

#include <math.h>
#include <string.h>

enum { LOADS_AT_ONCE = MOE_WINDOW_EXCHANGE_BYTES / sizeof(uint64_t) };

/* Every slot waits for every other, in both directions. */
static struct moe_status meet(struct moe_session *s)
{
    uint8_t nothing = 0, all[MOE_MAX_SLOTS];
    return moe_cuda_session_exchange(s, &nothing, all, sizeof nothing);
}

static float *region_of(const struct moe_session *s, uint32_t owner, uint32_t source)
{
    return moe_window_row_of(&s->layout, s->window.base[owner], source, 0, 0);
}

static struct moe_status send_piece(struct moe_session *s, const float *piece, size_t n,
                                    uint64_t holders)
{
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (p != s->config.slot && (holders >> p & 1))
            MOE_TRY(
                MOE_CUDA(cudaMemcpyAsync(region_of(s, p, s->config.slot), piece, n * sizeof *piece,
                                         cudaMemcpyDeviceToDevice, s->device->compute)));
    return moe_ok();
}

static struct moe_status add_piece(struct moe_session *s, float *piece, size_t n, uint64_t holders)
{
    struct moe_sources sources = {{NULL}};
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (holders >> p & 1)
            sources.from[p] = p == s->config.slot ? piece : region_of(s, s->config.slot, p);
    return moe_cuda_sum_sources(&sources, n, piece, s->device->compute);
}

/* data [n] of every slot in `holders` becomes the sum over them; the others only keep step. */
static struct moe_status sum_over_slots(struct moe_session *s, float *data, size_t n,
                                        uint64_t holders)
{
    bool mine = holders >> s->config.slot & 1;
    size_t most = s->layout.row_region / sizeof(float);
    if (__builtin_popcountll(holders) < 2)
        return moe_ok();
    for (size_t first = 0; first < n; first += most) {
        size_t part = n - first < most ? n - first : most;
        if (mine)
            MOE_TRY(send_piece(s, data + first, part, holders));
        MOE_TRY(meet(s));
        if (mine)
            MOE_TRY(add_piece(s, data + first, part, holders));
        MOE_TRY(meet(s));
    }
    return moe_ok();
}

/* ------------------------------------------------------------------- gradients */

static uint64_t holders_of(const struct moe_layer *layer, uint32_t expert)
{
    const struct moe_placement *p = &layer->placement;
    uint64_t holders = 0;
    for (uint32_t i = p->offset[expert]; i < p->offset[expert + 1]; i++)
        holders |= UINT64_C(1) << p->slot[i];
    return holders;
}

/* All slots walk over the same blocks and experts in the same order. */
static struct moe_status sum_block(struct moe_session *s, struct moe_trainer *t,
                                   const struct moe_cuda_block *b)
{
    const struct moe_layer *layer = t->layer;
    if (!b->expert)
        return sum_over_slots(s, b->grad, b->n, s->config.live);
    for (uint32_t e = 0; e < layer->spec.experts; e++) {
        int32_t entry = layer->local_index[e];
        float *grad = entry < 0 ? NULL : b->grad + (size_t)entry * b->n;
        MOE_TRY(sum_over_slots(s, grad, b->n, holders_of(layer, e)));
    }
    return moe_ok();
}

static struct moe_status add_squares(struct moe_trainer *t, const float *v, size_t n, double *sum)
{
    double parts[MOE_CUDA_SUM_PARTS];
    struct moe_device *device = t->layer->device;
    if (n == 0)
        return moe_ok();
    MOE_TRY(moe_cuda_sum_squares(v, n, t->partials, device->compute));
    MOE_TRY(moe_cuda_device_finish(device));
    MOE_TRY(moe_cuda_mem_copy(device, parts, t->partials, sizeof parts));
    for (uint32_t i = 0; i < MOE_CUDA_SUM_PARTS; i++)
        *sum += parts[i];
    return moe_ok();
}

/* Of experts with several copies, the first holder counts. */
static struct moe_status add_block_squares(struct moe_trainer *t, const struct moe_cuda_block *b,
                                           double *shared, double *own)
{
    const struct moe_layer *layer = t->layer;
    const struct moe_placement *p = &layer->placement;
    if (!b->expert)
        return add_squares(t, b->grad, b->n, shared);
    if (p->offset[p->experts] == p->experts)
        return add_squares(t, b->grad, b->entries * b->n, own);
    for (uint32_t l = 0; l < layer->local_experts; l++)
        if (p->slot[p->offset[layer->local[l]]] == layer->slot)
            MOE_TRY(add_squares(t, b->grad + l * b->n, b->n, own));
    return moe_ok();
}

static struct moe_status find_norm(struct moe_session *s, struct moe_trainer *const *trainers,
                                   size_t count, double *norm)
{
    double shared = 0, own = 0, all[MOE_MAX_SLOTS] = {0};
    for (size_t i = 0; i < count; i++)
        for (uint32_t b = 0; b < trainers[i]->blocks; b++)
            if (moe_cuda_block_moves(trainers[i], &trainers[i]->block[b]))
                MOE_TRY(add_block_squares(trainers[i], &trainers[i]->block[b], &shared, &own));
    MOE_TRY(moe_cuda_session_exchange(s, &own, all, sizeof own));
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (s->config.live >> p & 1)
            shared += all[p];
    *norm = sqrt(shared);
    return moe_ok();
}

/* ---------------------------------------------------------------------- moving */

static struct moe_status move_block(struct moe_trainer *t, const struct moe_cuda_block *b,
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
    MOE_TRY(moe_cuda_update(u, b->entries * b->n, b->value, b->grad, b->moment1, b->moment2, dtype,
                            resident, stream));
    if (b->kind == MOE_CUDA_BLOCK_MATRIX && b->matrix == MOE_CUDA_ROUTER)
        return moe_cuda_layer_split_router(layer, stream);
    /* B comes behind A, so both have moved. */
    return b->part == MOE_PART_LORA_B ? moe_cuda_trainer_renew(t, b, stream) : moe_ok();
}

/* loads [E] of the group. */
static struct moe_status sum_loads(struct moe_session *s, const struct moe_trainer *t,
                                   uint64_t *loads)
{
    uint32_t experts = t->layer->spec.experts;
    uint64_t mine[MOE_MAX_EXPERTS], all[MOE_MAX_SLOTS][LOADS_AT_ONCE];
    MOE_TRY(moe_cuda_mem_copy(t->layer->device, mine, t->loads, experts * sizeof *mine));
    memset(loads, 0, experts * sizeof *loads);
    for (uint32_t first = 0; first < experts; first += LOADS_AT_ONCE) {
        uint32_t n = experts - first < LOADS_AT_ONCE ? experts - first : LOADS_AT_ONCE;
        memset(all, 0, sizeof all);
        MOE_TRY(moe_cuda_session_exchange(s, mine + first, all, n * sizeof *mine));
        const uint64_t *from = &all[0][0];
        for (uint32_t p = 0; p < s->config.slots; p++)
            for (uint32_t i = 0; i < n; i++)
                loads[first + i] += from[(size_t)p * n + i];
    }
    return moe_ok();
}

static struct moe_status balance(struct moe_session *s, struct moe_trainer *t, double rate)
{
    struct moe_layer *layer = t->layer;
    uint32_t experts = layer->spec.experts;
    uint64_t loads[MOE_MAX_EXPERTS], total = 0;
    float bias[MOE_MAX_EXPERTS];
    if (rate == 0 || !layer->spec.router.select_bias)
        return moe_ok();
    MOE_TRY(sum_loads(s, t, loads));
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

/* ------------------------------------------------------------------------ step */

static struct moe_status check(struct moe_session *s, struct moe_trainer *const *trainers,
                               size_t count, const struct moe_optimizer_args *args)
{
    MOE_TRY(moe_cuda_steps_idle(s->steps));
    MOE_TRY(moe_cuda_session_usable(s));
    for (size_t i = 0; i < count; i++)
        MOE_TRY(moe_optimizer_check(trainers[i]->config.optimizer, args));
    return moe_cuda_backward_supported(s);
}

static struct moe_status run(struct moe_session *s, struct moe_trainer *const *trainers,
                             size_t count, const struct moe_optimizer_args *args,
                             struct moe_optimizer_result *result)
{
    double norm;
    for (size_t i = 0; i < count; i++)
        MOE_TRY(moe_cuda_trainer_clear_grads(trainers[i]));
    for (size_t i = 0; i < count; i++)
        for (uint32_t b = 0; b < trainers[i]->blocks; b++)
            if (moe_cuda_block_moves(trainers[i], &trainers[i]->block[b]))
                MOE_TRY(sum_block(s, trainers[i], &trainers[i]->block[b]));
    MOE_TRY(find_norm(s, trainers, count, &norm));
    result->grad_norm = norm * fabs(args->grad_scale);
    result->nonfinite = !isfinite(norm);
    for (size_t i = 0; i < count && !result->nonfinite; i++) {
        double clip = moe_clip_factor(result->grad_norm, args->max_grad_norm);
        struct moe_train_update u = moe_train_update_of(trainers[i]->config.optimizer, args, clip);
        MOE_TRY(balance(s, trainers[i], args->balance_rate));
        MOE_TRY(move_all(trainers[i], &u));
    }
    for (size_t i = 0; i < count; i++)
        MOE_TRY(moe_cuda_zero_grad(trainers[i]));
    return moe_ok();
}

struct moe_status moe_cuda_optimizer_step(struct moe_session *s,
                                          struct moe_trainer *const *trainers, size_t count,
                                          const struct moe_optimizer_args *args,
                                          struct moe_optimizer_result *result)
{
    MOE_TRY(moe_cuda_device_use(s->device));
    MOE_TRY(check(s, trainers, count, args));
    struct moe_status st = run(s, trainers, count, args, result);
    if (moe_failed(&st))
        moe_cuda_session_fail(s);
    return st;
}
