/* SPDX-License-Identifier: Apache-2.0 */
/* See train_stages.h; the formulas are those of moe/training.h. */
#include "cuda/training/train_stages.h"

#include "cuda/router/router.h"

#include <stdlib.h>
#include <string.h>

/* --------------------------------------------------------------------- scratch */

void moe_cuda_train_scratch_free(struct moe_device *device)
{
    if (device->train == NULL)
        return;
    for (int i = 0; i < MOE_CUDA_SCRATCHES; i++)
        moe_cuda_buffer_free(device, &device->train->buffer[i]);
    for (int i = 0; i < MOE_CUDA_TRAIN_MARKS; i++)
        if (device->train->event[i] != NULL)
            (void)cudaEventDestroy(device->train->event[i]);
    free(device->train);
    device->train = NULL;
}

struct moe_status moe_cuda_train_scratch_take(struct moe_device *device,
                                              enum moe_cuda_scratch_use use, size_t bytes,
                                              void **out)
{
    if (device->train == NULL)
        device->train = calloc(1, sizeof *device->train);
    if (device->train == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for training");
    struct moe_cuda_buffer *buffer = &device->train->buffer[use];
    MOE_TRY(moe_cuda_buffer_reserve(device, buffer, bytes));
    *out = buffer->data;
    return moe_ok();
}

struct moe_status moe_cuda_train_upload_params(struct moe_device *device,
                                               enum moe_cuda_scratch_use use,
                                               const struct moe_cuda_step_params *f,
                                               const struct moe_cuda_step_params **on_device,
                                               cudaStream_t stream)
{
    void *params;
    MOE_TRY(moe_cuda_train_scratch_take(device, use, sizeof *f, &params));
    *on_device = params;
    /* From pageable memory: *f may change when this returns. */
    return MOE_CUDA(cudaMemcpyAsync(params, f, sizeof *f, cudaMemcpyHostToDevice, stream));
}

/* ----------------------------------------------------------------------- times */

void moe_cuda_train_marks_begin(struct moe_device *device)
{
    if (device->train != NULL)
        device->train->marks = 0;
}

void moe_cuda_train_mark(struct moe_device *device, enum moe_backward_stage stage)
{
    struct moe_cuda_train_scratch *s = device->train;
    if (s == NULL || s->marks == MOE_CUDA_TRAIN_MARKS)
        return;
    cudaEvent_t *event = &s->event[s->marks];
    if (*event == NULL && cudaEventCreate(event) != cudaSuccess) {
        *event = NULL;
        return;
    }
    s->stage[s->marks] = stage;
    if (cudaEventRecord(*event, device->compute) == cudaSuccess)
        s->marks++;
}

void moe_cuda_train_marks_follow(struct moe_device *device)
{
    const struct moe_cuda_train_scratch *s = device->train;
    for (uint32_t i = 0; s != NULL && i < s->marks; i++)
        if (cudaEventSynchronize(s->event[i]) == cudaSuccess)
            moe_cuda_device_moved(device);
}

void moe_cuda_train_marks_read(const struct moe_device *device,
                               uint64_t ns[MOE_BACKWARD_STAGE_COUNT])
{
    const struct moe_cuda_train_scratch *s = device->train;
    memset(ns, 0, MOE_BACKWARD_STAGE_COUNT * sizeof *ns);
    for (uint32_t i = 0; s != NULL && i + 1 < s->marks; i++) {
        float ms = 0;
        if (cudaEventElapsedTime(&ms, s->event[i], s->event[i + 1]) == cudaSuccess)
            ns[s->stage[i]] += (uint64_t)((double)ms * 1e6);
    }
}

/* ---------------------------------------------------------------------- router */

struct moe_status moe_cuda_train_logits(struct moe_trainer *t, enum moe_dtype dtype,
                                        uint32_t tokens, const void *x, float **logits)
{
    struct moe_layer *layer = t->layer;
    struct moe_cuda_step_params params;
    void *p;
    MOE_TRY(moe_cuda_train_scratch_take(layer->device, MOE_CUDA_SCRATCH_LOGITS,
                                        moe_cuda_router_bytes(layer, dtype, tokens), &p));
    *logits = p;
    if (tokens == 0)
        return moe_ok();
    moe_cuda_step_params_fill(layer, dtype, 0, tokens, &params);
    struct moe_cuda_routing r = {.dtype = dtype, .capacity = tokens, .x = x, .logits = *logits};
    MOE_TRY(moe_cuda_train_upload_params(layer->device, MOE_CUDA_SCRATCH_PASS_PARAMS, &params,
                                         &r.params, layer->device->compute));
    return moe_cuda_router_logits(layer, &r, layer->device->compute);
}

static struct moe_cuda_router_backward router_args(const struct moe_trainer *t,
                                                   enum moe_dtype dtype, uint32_t tokens,
                                                   const float *logits, const uint8_t *use)
{
    const struct moe_layer *layer = t->layer;
    return (struct moe_cuda_router_backward){
        .spec = layer->spec.router,
        .tokens = tokens,
        .experts = layer->spec.experts,
        .slices = moe_cuda_router_slices(layer, dtype),
        .logits = logits,
        .logit_bias = layer->desc.bias[MOE_WEIGHT_LOGIT_BIAS],
        .use = use,
    };
}

struct moe_status moe_cuda_train_router(struct moe_trainer *t, enum moe_dtype dtype,
                                        uint32_t tokens, const float *logits, const uint8_t *use,
                                        const int32_t *ids, const float *dweights, float *dlogits)
{
    struct moe_cuda_router_backward a = router_args(t, dtype, tokens, logits, use);
    a.ids = ids;
    a.dweights = dweights;
    a.dlogits = dlogits;
    return moe_cuda_router_backward(&a, t->layer->device->compute);
}

struct moe_status moe_cuda_train_aux(struct moe_trainer *t, enum moe_dtype dtype, uint32_t tokens,
                                     const float *logits, const uint8_t *use, const uint32_t *loads,
                                     double factor, float *dlogits, double *loss)
{
    struct moe_cuda_aux_backward a = {.router = router_args(t, dtype, tokens, logits, use),
                                      .loads = loads,
                                      .factor = factor,
                                      .loss = loss};
    a.router.dlogits = dlogits;
    return moe_cuda_aux_backward(&a, t->layer->device->compute);
}

struct moe_status moe_cuda_train_sum_losses(struct moe_device *device, const double *losses,
                                            uint32_t tokens, double *sum)
{
    if (tokens == 0)
        return moe_ok();
    double *host = calloc(tokens, sizeof *host);
    if (host == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for the losses of %u tokens", tokens);
    struct moe_status st = moe_cuda_device_finish(device);
    if (!moe_failed(&st))
        st = moe_cuda_mem_copy(device, host, losses, tokens * sizeof *host);
    for (uint32_t i = 0; !moe_failed(&st) && i < tokens; i++)
        *sum += host[i];
    free(host);
    return st;
}
