/* SPDX-License-Identifier: Apache-2.0 */
/* See saving.h. */
#include "cuda/step/saving.h"

#include "base/size.h"
#include "common/saved_rows.h"
#include "cuda/exchange/ep.h"
#include "cuda/training/train_ffn.h"

static struct moe_kept_key key_of(const struct moe_session *s, const struct moe_layer *layer,
                                  uint64_t name, enum moe_dtype dtype, uint32_t bucket,
                                  uint32_t tokens)
{
    return (struct moe_kept_key){.layer = layer,
                                 .session = s,
                                 .name = name,
                                 .dtype = dtype,
                                 .bucket = bucket,
                                 .tokens = tokens};
}

static struct moe_kept_key key_of_step(const struct moe_session *s, const struct moe_step_args *a)
{
    struct moe_kept_key key = key_of(s, a->layer, a->save, a->dtype, a->bucket, a->tokens);
    key.step = a; /* the lane's own */
    return key;
}

static uint32_t columns_of(const struct moe_layer *layer, enum moe_kept_part part)
{
    return 2 *
           (part == MOE_KEPT_SHARED ? layer->spec.shared_intermediate : layer->spec.intermediate);
}

static size_t bytes_of(const struct moe_layer *layer, enum moe_kept_part part, uint32_t rows)
{
    return (size_t)rows * columns_of(layer, part) * sizeof(float);
}

static double learnt(const struct moe_layer *layer)
{
    double rows;
    __atomic_load(&layer->saved_rows_per_token, &rows, __ATOMIC_RELAXED);
    return rows;
}

/* Rows to take room for where `bytes` are left for them; false where that is for nothing. */
static bool ask(const struct moe_session *s, const struct moe_step_args *a, size_t bytes,
                uint32_t *rows)
{
    const struct moe_layer *layer = a->layer;
    double live = __builtin_popcountll(s->config.live);
    double copies = layer->placement.offset[layer->spec.experts];
    const struct moe_saved_rows of = {.learnt = learnt(layer),
                                      .even = live * layer->spec.router.top_k *
                                              layer->local_experts / copies,
                                      .bucket = a->bucket,
                                      .local_experts = layer->local_experts,
                                      .most = moe_cuda_ep_most_rows(s, layer, a->bucket),
                                      .room = bytes / bytes_of(layer, MOE_KEPT_ROUTED, 1)};
    return moe_saved_rows_ask(&of, rows);
}

static bool take(struct moe_session *s, const struct moe_step_args *a, enum moe_kept_part part,
                 uint32_t rows, struct moe_cuda_ggemm_pre *pre)
{
    const struct moe_kept_key key = key_of_step(s, a);
    pre[part].data = moe_kept_take(s->device->kept, &key, part, bytes_of(a->layer, part, rows));
    pre[part].rows = rows;
    return pre[part].data != NULL;
}

static bool able(const struct moe_session *s, const struct moe_step_args *a)
{
    return a->save != 0 && a->layer->trained && s->config.training &&
           moe_cuda_train_routed_on_tensor_cores(a->layer, a->dtype);
}

/* The shared expert's first, as how much it needs is known. */
static bool take_both(struct moe_session *s, const struct moe_step_args *a,
                      struct moe_cuda_ggemm_pre *pre)
{
    const struct moe_kept_key key = key_of_step(s, a);
    struct moe_kept *kept = s->device->kept;
    const bool shared = a->tokens > 0 && moe_cuda_train_shared_on_tensor_cores(a->layer, a->dtype);
    size_t room = moe_kept_begin(kept, &key), first = 0;
    uint32_t rows;
    if (shared &&
        !moe_size_round_up(bytes_of(a->layer, MOE_KEPT_SHARED, a->tokens), MOE_KEPT_ALIGN, &first))
        return false;
    if (first > room || !ask(s, a, room - first, &rows))
        return false;
    if (shared && !take(s, a, MOE_KEPT_SHARED, a->tokens, pre))
        return false;
    /* It may lie where it leaves less than the rest. */
    return ask(s, a, moe_kept_begin(kept, &key), &rows) && take(s, a, MOE_KEPT_ROUTED, rows, pre);
}

bool moe_cuda_saving_begin(struct moe_session *s, const struct moe_step_args *a,
                           struct moe_cuda_ggemm_pre *pre)
{
    for (int part = 0; part < MOE_KEPT_PARTS; part++)
        pre[part] = (struct moe_cuda_ggemm_pre){0};
    if (!able(s, a))
        return false;
    bool all = take_both(s, a, pre);
    if (!all)
        (void)moe_cuda_saving_end(s, a, pre, false, 0, 0);
    return all;
}

void moe_cuda_saving_learn(const struct moe_session *s, const struct moe_step_args *a,
                           uint64_t rows)
{
    struct moe_layer *layer = a->layer;
    if (able(s, a)) {
        double now = moe_saved_rows_learn(learnt(layer), rows, a->bucket);
        __atomic_store(&layer->saved_rows_per_token, &now, __ATOMIC_RELAXED);
    }
}

bool moe_cuda_saving_end(struct moe_session *s, const struct moe_step_args *a,
                         const struct moe_cuda_ggemm_pre *pre, bool good, uint64_t rows,
                         uint32_t in_use)
{
    const struct moe_kept_key key = key_of_step(s, a);
    struct moe_kept *kept = s->device->kept;
    if (!good || in_use > pre[MOE_KEPT_ROUTED].rows) {
        moe_kept_forget(kept, &key);
        return false;
    }
    moe_kept_fill(kept, &key, MOE_KEPT_ROUTED, rows, in_use,
                  bytes_of(a->layer, MOE_KEPT_ROUTED, in_use));
    moe_kept_fill(kept, &key, MOE_KEPT_SHARED, a->tokens, a->tokens,
                  bytes_of(a->layer, MOE_KEPT_SHARED, a->tokens));
    return moe_kept_commit(kept, &key);
}

bool moe_cuda_saving_find(struct moe_session *s, const struct moe_backward_args *a,
                          enum moe_kept_part part, struct moe_kept_piece *out)
{
    struct moe_kept_key key =
        key_of(s, a->trainer->layer, a->saved, a->dtype, a->bucket, a->tokens);
    return a->saved != 0 && moe_kept_find(s->device->kept, &key, part, out);
}
