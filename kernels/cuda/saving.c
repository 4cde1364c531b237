/* See saving.h. */
#include "cuda/saving.h"

#include "base/size.h"
#include "cuda/ep.h"
#include "cuda/train_ffn.h"

/* More room than expected rows need: a fraction of this size. */
enum { SLACK = 8 };

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
    return key_of(s, a->layer, a->save, a->dtype, a->bucket, a->tokens);
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

/* Rows that a step of this bucket is to be given room for: those of an even routing, or, if it is
 * more, of the steps that were saved before. */
static uint32_t expected_rows(const struct moe_session *s, const struct moe_layer *layer,
                              uint32_t bucket)
{
    uint32_t most = moe_cuda_ep_most_rows(s, layer, bucket);
    double live = __builtin_popcountll(s->config.live);
    double copies = layer->placement.offset[layer->spec.experts];
    double per_token = layer->saved_rows_per_token;
    if (per_token == 0)
        per_token = live * layer->spec.router.top_k * layer->local_experts / copies;
    double rows = per_token * bucket * (1 + 1.0 / SLACK) + layer->local_experts * MOE_ROW_ALIGN;
    return rows < most ? (uint32_t)rows : most;
}

/* The most of the last steps; one that had more counts at once, fewer count slowly. */
static void learn(struct moe_layer *layer, uint32_t bucket, uint32_t in_use)
{
    double now = (double)in_use / bucket, before = layer->saved_rows_per_token;
    before -= before / SLACK;
    layer->saved_rows_per_token = now > before ? now : before;
}

static bool take(struct moe_session *s, const struct moe_step_args *a, enum moe_kept_part part,
                 uint32_t rows, struct moe_cuda_ggemm_pre *pre)
{
    const struct moe_kept_key key = key_of_step(s, a);
    pre[part].data = moe_kept_take(s->device->kept, &key, part, bytes_of(a->layer, part, rows));
    pre[part].rows = rows;
    return pre[part].data != NULL;
}

bool moe_cuda_saving_begin(struct moe_session *s, const struct moe_step_args *a,
                           struct moe_cuda_ggemm_pre *pre)
{
    struct moe_layer *layer = a->layer;
    for (int part = 0; part < MOE_KEPT_PARTS; part++)
        pre[part] = (struct moe_cuda_ggemm_pre){0};
    if (a->save == 0 || !layer->trained || !s->config.training || s->net != NULL ||
        !moe_cuda_train_routed_on_tensor_cores(layer, a->dtype))
        return false;
    bool all = true;
    if (a->tokens > 0 && moe_cuda_train_shared_on_tensor_cores(layer, a->dtype))
        all = take(s, a, MOE_KEPT_SHARED, a->tokens, pre);
    all = all && take(s, a, MOE_KEPT_ROUTED, expected_rows(s, layer, a->bucket), pre);
    if (!all)
        (void)moe_cuda_saving_end(s, a, pre, false, 0, 0);
    return all;
}

bool moe_cuda_saving_end(struct moe_session *s, const struct moe_step_args *a,
                         const struct moe_cuda_ggemm_pre *pre, bool good, uint64_t rows,
                         uint32_t in_use)
{
    const struct moe_kept_key key = key_of_step(s, a);
    struct moe_kept *kept = s->device->kept;
    if (good)
        learn(a->layer, a->bucket, in_use);
    if (!good || in_use > pre[MOE_KEPT_ROUTED].rows) {
        moe_kept_forget(kept, &key);
        return false;
    }
    moe_kept_fill(kept, &key, MOE_KEPT_ROUTED, rows, in_use,
                  bytes_of(a->layer, MOE_KEPT_ROUTED, in_use));
    moe_kept_fill(kept, &key, MOE_KEPT_SHARED, a->tokens, a->tokens,
                  bytes_of(a->layer, MOE_KEPT_SHARED, a->tokens));
    moe_kept_commit(kept, &key);
    return true;
}

bool moe_cuda_saving_find(struct moe_session *s, const struct moe_backward_args *a,
                          enum moe_kept_part part, struct moe_kept_piece *out)
{
    struct moe_kept_key key =
        key_of(s, a->trainer->layer, a->saved, a->dtype, a->bucket, a->tokens);
    return a->saved != 0 && moe_kept_find(s->device->kept, &key, part, out);
}
