/* SPDX-License-Identifier: Apache-2.0 */
/* See retain.h. */
#include "cuda/step/retain.h"

#include "base/size.h"
#include "common/activation_sizing.h"
#include "cuda/exchange/ep.h"
#include "cuda/training/train_ffn.h"

static struct moe_activation_key key_of(const struct moe_session *s, const struct moe_layer *layer,
                                        uint64_t name, enum moe_dtype dtype, uint32_t bucket,
                                        uint32_t tokens)
{
    return (struct moe_activation_key){.layer = layer,
                                       .session = s,
                                       .name = name,
                                       .dtype = dtype,
                                       .bucket = bucket,
                                       .tokens = tokens};
}

static struct moe_activation_key key_of_step(const struct moe_session *s,
                                             const struct moe_step_args *a)
{
    struct moe_activation_key key = key_of(s, a->layer, a->retain, a->dtype, a->bucket, a->tokens);
    key.step = a; /* address in the step slot */
    return key;
}

static uint32_t columns_of(const struct moe_layer *layer, enum moe_activation_part part)
{
    return 2 * (part == MOE_ACTIVATION_SHARED ? layer->spec.shared_intermediate
                                              : layer->spec.intermediate);
}

static size_t bytes_of(const struct moe_layer *layer, enum moe_activation_part part, uint32_t rows)
{
    return (size_t)rows * columns_of(layer, part) * sizeof(float);
}

static double learnt(const struct moe_layer *layer)
{
    double rows;
    __atomic_load(&layer->retained_rows_per_token, &rows, __ATOMIC_RELAXED);
    return rows;
}

/* Rows to take room for when `bytes` are left; false if room would be useless. */
static bool ask(const struct moe_session *s, const struct moe_step_args *a, size_t bytes,
                uint32_t *rows)
{
    const struct moe_layer *layer = a->layer;
    double live = __builtin_popcountll(s->config.live);
    double copies = layer->active.offset[layer->spec.experts];
    const struct moe_activation_sizing of = {
        .learnt = learnt(layer),
        .even = live * layer->spec.router.top_k * layer->local_experts / copies,
        .bucket = a->bucket,
        .local_experts = layer->local_experts,
        .max_rows = moe_cuda_ep_max_rows(s, layer, a->bucket),
        .room = bytes / bytes_of(layer, MOE_ACTIVATION_ROUTED, 1)};
    return moe_activation_sizing_ask(&of, rows);
}

static bool take(struct moe_session *s, const struct moe_step_args *a,
                 enum moe_activation_part part, uint32_t rows, struct moe_cuda_ggemm_pre *pre)
{
    const struct moe_activation_key key = key_of_step(s, a);
    pre[part].data = moe_activation_cache_take(s->device->activation_cache, &key, part,
                                               bytes_of(a->layer, part, rows));
    pre[part].rows = rows;
    return pre[part].data != NULL;
}

static bool able(const struct moe_session *s, const struct moe_step_args *a)
{
    return a->retain != 0 && a->layer->trained && s->config.training &&
           moe_cuda_train_routed_on_tensor_cores(a->layer, a->dtype);
}

/* Takes the shared expert's room first, because its size is known. */
static bool take_both(struct moe_session *s, const struct moe_step_args *a,
                      struct moe_cuda_ggemm_pre *pre)
{
    const struct moe_activation_key key = key_of_step(s, a);
    struct moe_activation_cache *cache = s->device->activation_cache;
    const bool shared = a->tokens > 0 && moe_cuda_train_shared_on_tensor_cores(a->layer, a->dtype);
    size_t room = moe_activation_cache_begin(cache, &key), first = 0;
    uint32_t rows;
    if (shared && !moe_size_round_up(bytes_of(a->layer, MOE_ACTIVATION_SHARED, a->tokens),
                                     MOE_ACTIVATION_ALIGN, &first))
        return false;
    if (first > room || !ask(s, a, room - first, &rows))
        return false;
    if (shared && !take(s, a, MOE_ACTIVATION_SHARED, a->tokens, pre))
        return false;
    /* Its place may leave less than the rest, so this asks again. */
    return ask(s, a, moe_activation_cache_begin(cache, &key), &rows) &&
           take(s, a, MOE_ACTIVATION_ROUTED, rows, pre);
}

bool moe_cuda_retaining_begin(struct moe_session *s, const struct moe_step_args *a,
                              struct moe_cuda_ggemm_pre *pre)
{
    for (int part = 0; part < MOE_ACTIVATION_PARTS; part++)
        pre[part] = (struct moe_cuda_ggemm_pre){0};
    if (!able(s, a))
        return false;
    bool all = take_both(s, a, pre);
    if (!all)
        (void)moe_cuda_retaining_end(s, a, pre, false, 0, 0);
    return all;
}

void moe_cuda_retaining_learn(const struct moe_session *s, const struct moe_step_args *a,
                              uint64_t rows)
{
    struct moe_layer *layer = a->layer;
    if (able(s, a)) {
        double now = moe_activation_sizing_learn(learnt(layer), rows, a->bucket);
        __atomic_store(&layer->retained_rows_per_token, &now, __ATOMIC_RELAXED);
    }
}

bool moe_cuda_retaining_end(struct moe_session *s, const struct moe_step_args *a,
                            const struct moe_cuda_ggemm_pre *pre, bool good, uint64_t rows,
                            uint32_t in_use)
{
    const struct moe_activation_key key = key_of_step(s, a);
    struct moe_activation_cache *cache = s->device->activation_cache;
    if (!good || in_use > pre[MOE_ACTIVATION_ROUTED].rows) {
        moe_activation_cache_forget(cache, &key);
        return false;
    }
    moe_activation_cache_fill(cache, &key, MOE_ACTIVATION_ROUTED, rows, in_use,
                              bytes_of(a->layer, MOE_ACTIVATION_ROUTED, in_use));
    moe_activation_cache_fill(cache, &key, MOE_ACTIVATION_SHARED, a->tokens, a->tokens,
                              bytes_of(a->layer, MOE_ACTIVATION_SHARED, a->tokens));
    return moe_activation_cache_commit(cache, &key);
}

bool moe_cuda_retaining_find(struct moe_session *s, const struct moe_backward_args *a,
                             enum moe_activation_part part, struct moe_activation_piece *out)
{
    struct moe_activation_key key =
        key_of(s, a->trainer->layer, a->retained, a->dtype, a->bucket, a->tokens);
    return a->retained != 0 &&
           moe_activation_cache_find(s->device->activation_cache, &key, part, out);
}
