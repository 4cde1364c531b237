/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU backend's table of training. Parts that are callable alone are built here from the
 * functions of a backward pass. */
#include "cpu/step/training.h"
#include "cpu/exchange/ep.h"
#include "cpu/exchange/session.h"
#include "cpu/step/optimizer.h"
#include "cpu/step/step.h"
#include "cpu/training/backward.h"

static struct moe_status check_dtype(enum moe_dtype dtype)
{
    if (moe_dtype_bytes(dtype) == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED, "unknown dtype %d",
                         (int)dtype);
    return moe_ok();
}

static struct moe_status router_backward(struct moe_trainer *t, enum moe_dtype dtype,
                                         uint32_t count, const void *x, const int32_t *ids,
                                         const float *dweights, float *dlogits)
{
    struct moe_cpu_tokens tokens = {dtype, count, x, NULL};
    MOE_TRY(check_dtype(dtype));
    return moe_cpu_router_backward(t, &tokens, ids, dweights, dlogits);
}

static struct moe_status aux_backward(struct moe_trainer *t, enum moe_dtype dtype, uint32_t count,
                                      const void *x, const uint32_t *n, uint64_t group_tokens,
                                      float aux_coeff, float *dlogits, double *loss)
{
    struct moe_cpu_tokens tokens = {dtype, count, x, NULL};
    uint64_t loads[MOE_MAX_EXPERTS];
    MOE_TRY(check_dtype(dtype));
    for (uint32_t e = 0; e < t->layer->spec.experts; e++)
        loads[e] = n[e];
    return moe_cpu_aux_backward(t, &tokens, loads, group_tokens, aux_coeff, dlogits, loss);
}

static struct moe_status logits_backward(struct moe_trainer *t, enum moe_dtype dtype,
                                         uint32_t count, const void *x, const float *dlogits,
                                         float *dx)
{
    struct moe_cpu_tokens tokens = {dtype, count, x, NULL};
    MOE_TRY(check_dtype(dtype));
    return moe_cpu_logits_backward(t, &tokens, true, dlogits, dx);
}

static struct moe_status experts_backward(struct moe_trainer *t, enum moe_dtype dtype,
                                          const struct moe_rows *rows, const void *dy_rows,
                                          float *dx_rows, float *dweight_rows)
{
    MOE_TRY(check_dtype(dtype));
    return moe_cpu_experts_backward(t, dtype, true, rows, dy_rows, NULL, dx_rows, dweight_rows);
}

static struct moe_status shared_backward(struct moe_trainer *t, enum moe_dtype dtype,
                                         uint32_t count, const void *x, const void *dy, float *dx)
{
    struct moe_cpu_tokens tokens = {dtype, count, x, NULL};
    MOE_TRY(check_dtype(dtype));
    return moe_cpu_shared_backward(t, &tokens, true, dy, NULL, dx);
}

static struct moe_cpu_batch batch_of(struct moe_layer *layer, enum moe_dtype dtype, uint32_t bucket,
                                     uint32_t tokens, const void *x, const void *dy,
                                     const int32_t *ids, const float *weights)
{
    return (struct moe_cpu_batch){.layer = layer,
                                  .dtype = dtype,
                                  .bucket = bucket,
                                  .tokens = tokens,
                                  .x = x,
                                  .backward = true,
                                  .dy = dy,
                                  .ids = ids,
                                  .weights = weights};
}

static struct moe_status dispatch(struct moe_session *s, struct moe_layer *layer,
                                  enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                  const void *x, const void *dy, const int32_t *ids,
                                  const float *weights, struct moe_rows *out, const void **dy_rows)
{
    struct moe_cpu_batch batch = batch_of(layer, dtype, bucket, tokens, x, dy, ids, weights);
    MOE_TRY(moe_cpu_steps_idle(s->steps));
    if (!s->config.training)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the session was not joined for training");
    MOE_TRY(moe_cpu_ep_check(s, layer, dtype, bucket, tokens));
    MOE_TRY(moe_cpu_ep_prepare(s->ep, &batch));
    moe_cpu_ep_send(s->ep);
    MOE_TRY(moe_cpu_ep_receive(s->ep, out));
    *dy_rows = moe_cpu_ep_dy_rows(s->ep);
    return moe_ok();
}

static struct moe_status combine(struct moe_session *s, struct moe_layer *layer,
                                 enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                 const void *x, const void *dy, const int32_t *ids,
                                 const float *weights, const struct moe_rows *rows,
                                 const float *dx_rows, const float *dweight_rows, float *dx,
                                 float *dweights)
{
    struct moe_cpu_batch batch = batch_of(layer, dtype, bucket, tokens, x, dy, ids, weights);
    MOE_TRY(moe_cpu_steps_idle(s->steps));
    MOE_TRY(moe_cpu_ep_same_pass(s->ep, &batch, rows));
    return moe_cpu_ep_combine_backward(s->ep, dx_rows, dweight_rows, dx, dweights);
}

static void retained_limit(struct moe_device *device, uint64_t bytes)
{
    moe_activation_cache_limit(moe_cpu_device_activation_cache(device),
                               bytes < SIZE_MAX ? (size_t)bytes : SIZE_MAX);
}

static void retained_drop(struct moe_trainer *trainer, uint64_t name)
{
    moe_activation_cache_drop(moe_cpu_device_activation_cache(trainer->layer->device),
                              trainer->layer, name);
}

static uint64_t retained_bytes(struct moe_device *device)
{
    return moe_activation_cache_bytes(moe_cpu_device_activation_cache(device));
}

const struct moe_training moe_cpu_training = {
    .live_copies = true,
    .quantised_base = true,
    .trainer_create = moe_cpu_trainer_create,
    .trainer_destroy = moe_cpu_trainer_destroy,
    .trainer_bytes = moe_cpu_trainer_bytes,
    .trainer_read = moe_cpu_trainer_read,
    .trainer_write = moe_cpu_trainer_write,
    .zero_grad = moe_cpu_zero_grad,
    .set_frozen = moe_cpu_set_frozen,
    .backward_enqueue = moe_cpu_backward_enqueue,
    .optimizer_step = moe_cpu_optimizer_step,
    .optimizer_finish = moe_cpu_optimizer_finish,
    .retained_limit = retained_limit,
    .retained_drop = retained_drop,
    .retained_bytes = retained_bytes,
    .router_backward = router_backward,
    .aux_backward = aux_backward,
    .logits_backward = logits_backward,
    .dispatch = dispatch,
    .experts_backward = experts_backward,
    .combine = combine,
    .shared_backward = shared_backward,
};
