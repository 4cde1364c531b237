/* SPDX-License-Identifier: Apache-2.0 */
/* Fills step parameters on the host; see step_params.h. */
#include "cuda/layer/step_params.h"

/* Fills this step's head: what must be equal on all slots, and this slot's number of tokens. */
static void fill_head(const struct moe_layer *layer, enum moe_dtype dtype, uint32_t bucket,
                      uint32_t tokens, uint32_t head[MOE_HEAD_COUNT])
{
    const uint32_t mask = (1u << MOE_WINDOW_VALUE_BITS) - 1;
    head[MOE_HEAD_TOKENS] = tokens;
    head[MOE_HEAD_LAYER] = layer->spec.layer & mask;
    head[MOE_HEAD_HIDDEN] = moe_expert_width(&layer->spec);
    head[MOE_HEAD_EXPERTS] = layer->spec.experts;
    head[MOE_HEAD_TOP_K] = layer->spec.router.top_k;
    head[MOE_HEAD_DTYPE] = dtype;
    head[MOE_HEAD_BUCKET] = bucket != 0 ? (uint32_t)__builtin_ctz(bucket) : 0;
    head[MOE_HEAD_PLACEMENT] = layer->placement.version & mask;
}

void moe_cuda_step_params_fill(const struct moe_layer *layer, enum moe_dtype dtype, uint32_t bucket,
                               uint32_t tokens, struct moe_cuda_step_params *out)
{
    *out = (struct moe_cuda_step_params){.layer = layer->on_device,
                                         .placement = layer->desc.placement,
                                         .tokens = tokens,
                                         .need_logits = 1};
    for (uint32_t m = 0; m < MOE_CUDA_MATRICES; m++)
        out->weights[m] = &layer->on_device->product[m];
    fill_head(layer, dtype, bucket, tokens, out->head);
}

struct moe_status moe_cuda_step_params_upload(struct moe_layer *layer,
                                              const struct moe_cuda_step_params *f,
                                              const struct moe_cuda_step_params **on_device)
{
    MOE_TRY(moe_cuda_buffer_reserve(layer->device, &layer->params, sizeof *f));
    *on_device = layer->params.data;
    return moe_cuda_mem_copy(layer->device, layer->params.data, f, sizeof *f);
}
