/* SPDX-License-Identifier: Apache-2.0 */
/* Host side of the router; see router.h. */
#include "cuda/router/router.h"

#include <stdlib.h>

bool moe_cuda_router_on_tensor_cores(const struct moe_layer *layer, enum moe_dtype dtype)
{
    const struct moe_cuda_matrix *m = layer->desc.matrix;
    bool in_bf16 =
        m[MOE_CUDA_ROUTER].dtype == MOE_DTYPE_BF16 || m[MOE_CUDA_ROUTER_PARTS].data != NULL;
    return dtype == MOE_DTYPE_BF16 && in_bf16 && layer->spec.hidden % 8 == 0;
}

uint32_t moe_cuda_router_slices(const struct moe_layer *layer, enum moe_dtype dtype)
{
    if (!moe_cuda_router_on_tensor_cores(layer, dtype))
        return 1;
    return (layer->spec.hidden + MOE_CUDA_ROUTER_SLICE - 1) / MOE_CUDA_ROUTER_SLICE;
}

size_t moe_cuda_router_bytes(const struct moe_layer *layer, enum moe_dtype dtype, uint32_t tokens)
{
    return (size_t)moe_cuda_router_slices(layer, dtype) * tokens *
           layer->desc.matrix[MOE_CUDA_ROUTER].rows * sizeof(float);
}

struct moe_status moe_cuda_router_enqueue(const struct moe_layer *layer,
                                          const struct moe_cuda_routing *r, cudaStream_t stream)
{
    MOE_TRY(moe_cuda_router_logits(layer, r, stream));
    return moe_cuda_router_choose(layer, r, stream);
}

struct moe_status moe_cuda_router_check_modes(uint32_t tokens, const uint8_t *mode, bool has_ids,
                                              bool has_weights, bool *need_logits)
{
    *need_logits = mode == NULL && tokens > 0;
    for (uint32_t t = 0; mode != NULL && t < tokens; t++) {
        enum moe_routing_mode routing = moe_routing_of(mode[t]);
        if (routing > MOE_ROUTE_IDS_WEIGHTS || (routing != MOE_ROUTE_SERVER && !has_ids) ||
            (routing == MOE_ROUTE_IDS_WEIGHTS && !has_weights))
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID,
                             "token %u: routing mode %u lacks its ids or weights", t, mode[t]);
        *need_logits |= routing != MOE_ROUTE_IDS_WEIGHTS;
    }
    return moe_ok();
}

/* The same check for modes in device memory. */
static struct moe_status check_device_modes(struct moe_device *device, uint32_t tokens,
                                            const struct moe_cuda_routing *r, bool *need_logits)
{
    uint8_t *copy = NULL;
    if (r->mode != NULL) {
        copy = malloc(tokens);
        if (copy == NULL)
            return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                             "no memory for %u routing modes", tokens);
    }
    struct moe_status st = moe_ok();
    if (copy != NULL)
        MOE_TRY_GOTO(st, moe_cuda_mem_copy(device, copy, r->mode, tokens), done);
    st = moe_cuda_router_check_modes(tokens, copy, r->ids_in != NULL, r->weights_in != NULL,
                                     need_logits);
done:
    free(copy);
    return st;
}

static struct moe_status check_part(const struct moe_layer *layer, enum moe_dtype dtype)
{
    if (!layer->finished)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_MISSING,
                         "layer %u is not finished", layer->spec.layer);
    if (dtype != MOE_DTYPE_F32 && dtype != MOE_DTYPE_BF16)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED,
                         "tokens are neither F32 nor BF16");
    return moe_ok();
}

struct moe_status moe_cuda_router_forward(struct moe_layer *layer, enum moe_dtype dtype,
                                          uint32_t tokens, const void *x, const uint8_t *mode,
                                          const int32_t *ids_in, const float *weights_in,
                                          int32_t *ids, float *weights, uint8_t *token_state)
{
    struct moe_device *device = layer->device;
    struct moe_cuda_step_params params;
    bool need_logits = true;
    struct moe_cuda_routing r = {.dtype = dtype,
                                 .capacity = tokens,
                                 .x = x,
                                 .mode = mode,
                                 .ids_in = ids_in,
                                 .weights_in = weights_in,
                                 .ids = ids,
                                 .weights = weights,
                                 .token_state = token_state};
    MOE_TRY(check_part(layer, dtype));
    if (tokens == 0)
        return moe_ok();
    MOE_TRY(check_device_modes(device, tokens, &r, &need_logits));
    moe_cuda_step_params_fill(layer, dtype, 0, tokens, &params);
    params.need_logits = need_logits;
    params.has_modes = mode != NULL;
    MOE_TRY(moe_cuda_step_params_upload(layer, &params, &r.params));
    size_t bytes = moe_cuda_router_bytes(layer, dtype, tokens);
    void *logits;
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_DEVICE, bytes, &logits));
    r.logits = logits;
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_cuda_router_enqueue(layer, &r, device->compute), done);
    st = moe_cuda_device_finish(device);
done:
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, logits, bytes);
    return st;
}
