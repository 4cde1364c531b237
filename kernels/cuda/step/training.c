/* SPDX-License-Identifier: Apache-2.0 */
/* The table of training, and the parts that it offers separately: stages of a backward pass, each
 * followed by a wait. */
#include "cuda/step/training.h"

#include "common/activation_cache.h"
#include "cuda/exchange/ep.h"
#include "cuda/step/backward.h"
#include "cuda/step/step.h"
#include "cuda/training/train_ffn.h"

/* ------------------------------------------------------------------- one slot */

static struct moe_status router_backward(struct moe_trainer *t, enum moe_dtype dtype,
                                         uint32_t tokens, const void *x, const int32_t *ids,
                                         const float *dweights, float *dlogits)
{
    struct moe_device *device = t->layer->device;
    float *logits;
    MOE_TRY(moe_cuda_device_use(device));
    MOE_TRY(moe_cuda_train_logits(t, dtype, tokens, x, &logits));
    MOE_TRY(moe_cuda_train_router(t, dtype, tokens, logits, NULL, ids, dweights, dlogits));
    return moe_cuda_device_finish(device);
}

static struct moe_status aux_backward(struct moe_trainer *t, enum moe_dtype dtype, uint32_t tokens,
                                      const void *x, const uint32_t *n, uint64_t group_tokens,
                                      float aux_coeff, float *dlogits, double *loss)
{
    struct moe_device *device = t->layer->device;
    double factor = moe_aux_constant(&t->layer->spec, aux_coeff, group_tokens);
    float *logits;
    void *losses;
    MOE_TRY(moe_cuda_device_use(device));
    MOE_TRY(moe_cuda_train_logits(t, dtype, tokens, x, &logits));
    MOE_TRY(moe_cuda_train_scratch_take(device, MOE_CUDA_SCRATCH_PASS, tokens * sizeof(double),
                                        &losses));
    MOE_TRY(moe_cuda_train_aux(t, dtype, tokens, logits, NULL, n, factor, dlogits, losses));
    return moe_cuda_train_sum_losses(device, losses, tokens, loss);
}

static struct moe_status logits_backward(struct moe_trainer *t, enum moe_dtype dtype,
                                         uint32_t tokens, const void *x, const float *dlogits,
                                         float *dx)
{
    struct moe_cuda_logits_backward a = {.dtype = dtype,
                                         .tokens = tokens,
                                         .x = x,
                                         .dlogits = dlogits,
                                         .accumulate = true,
                                         .add = true,
                                         .dx = dx};
    MOE_TRY(moe_cuda_device_use(t->layer->device));
    MOE_TRY(moe_cuda_train_logits_backward(t, &a));
    return moe_cuda_device_finish(t->layer->device);
}

/* Rows in use; only the device knows their number. */
static struct moe_status rows_in_use(struct moe_device *device, const struct moe_rows *rows,
                                     uint32_t *out)
{
    *out = 0;
    if (rows->local_experts == 0)
        return moe_ok();
    return moe_cuda_mem_copy(device, out, rows->start + rows->local_experts, sizeof *out);
}

static struct moe_status experts_backward(struct moe_trainer *t, enum moe_dtype dtype,
                                          const struct moe_rows *rows, const void *dy_rows,
                                          float *dx_rows, float *dweight_rows)
{
    struct moe_device *device = t->layer->device;
    const struct moe_layer_spec *spec = &t->layer->spec;
    struct moe_cuda_train_rows r = {.rows = rows,
                                    .dy = dy_rows,
                                    .stride = spec->hidden,
                                    .slots = 1,
                                    .accumulate = true,
                                    .dx = dx_rows,
                                    .dx_stride = spec->hidden,
                                    .dweight = dweight_rows};
    struct moe_cuda_train_ffn f;
    MOE_TRY(moe_cuda_device_use(device));
    MOE_TRY(rows_in_use(device, rows, &r.capacity));
    r.bucket = r.capacity / spec->router.top_k + 1;
    MOE_TRY(moe_cuda_train_experts_begin(t, dtype, &r, &f));
    MOE_TRY(moe_cuda_train_experts_rows(&f));
    MOE_TRY(moe_cuda_train_experts_weights(&f, NULL));
    return moe_cuda_device_finish(device);
}

static struct moe_status shared_backward(struct moe_trainer *t, enum moe_dtype dtype,
                                         uint32_t tokens, const void *x, const void *dy, float *dx)
{
    struct moe_cuda_train_tokens a = {.dtype = dtype,
                                      .tokens = tokens,
                                      .bucket = tokens,
                                      .x = x,
                                      .dy = dy,
                                      .accumulate = true,
                                      .add = true,
                                      .dx = dx};
    struct moe_cuda_train_ffn f;
    MOE_TRY(moe_cuda_device_use(t->layer->device));
    MOE_TRY(moe_cuda_train_shared_begin(t, &a, &f));
    MOE_TRY(moe_cuda_train_shared_end(&f));
    return moe_cuda_device_finish(t->layer->device);
}

/* ------------------------------------------------------------------ collective */

static struct moe_status ready(struct moe_session *s)
{
    MOE_TRY(moe_cuda_device_use(s->device));
    MOE_TRY(moe_cuda_steps_idle(s->steps));
    MOE_TRY(moe_cuda_session_usable(s));
    return moe_cuda_backward_supported(s);
}

/* ids without zero experts, in scratch. */
static struct moe_status sort_ids(struct moe_layer *layer, uint32_t tokens, const int32_t *ids,
                                  const int32_t **sent)
{
    uint32_t top_k = layer->spec.router.top_k;
    size_t flags = (tokens + (size_t)255) / 256 * 256;
    void *memory;
    MOE_TRY(moe_cuda_train_scratch_take(layer->device, MOE_CUDA_SCRATCH_PASS,
                                        3 * flags + (size_t)tokens * top_k * sizeof(int32_t),
                                        &memory));
    uint8_t *state = memory;
    struct moe_cuda_sorted_tokens a = {.tokens = tokens,
                                       .top_k = top_k,
                                       .experts = layer->spec.experts,
                                       .token_state = state,
                                       .ids = ids,
                                       .ok = state + flags,
                                       .routed = state + 2 * flags,
                                       .ids_sent = (void *)(state + 3 * flags)};
    *sent = a.ids_sent;
    if (tokens == 0)
        return moe_ok();
    MOE_TRY(MOE_CUDA(cudaMemsetAsync(state, MOE_TOKEN_OK, tokens, layer->device->compute)));
    return moe_cuda_sort_tokens(&a, layer->device->compute);
}

static struct moe_status dispatch(struct moe_session *s, struct moe_layer *layer,
                                  enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                  const void *x, const void *dy, const int32_t *ids,
                                  const float *weights, struct moe_rows *out, const void **dy_rows)
{
    struct moe_cuda_x_dy_rows batch = {.layer = layer,
                                       .dtype = dtype,
                                       .bucket = bucket,
                                       .tokens = tokens,
                                       .flags = MOE_HEAD_BACKWARD,
                                       .x = x,
                                       .dy = dy,
                                       .weights = weights};
    MOE_TRY(ready(s));
    MOE_TRY(moe_cuda_ep_check_ids(s, layer, tokens, ids));
    MOE_TRY(sort_ids(layer, tokens, ids, &batch.ids));
    MOE_TRY(moe_cuda_x_dy_dispatch(s, &batch, out, dy_rows));
    MOE_TRY(moe_cuda_x_dy_split(s, &batch, out, dy_rows));
    return moe_cuda_session_finish(s);
}

static struct moe_status combine(struct moe_session *s, struct moe_layer *layer,
                                 enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                 const void *x, const void *dy, const int32_t *ids,
                                 const float *weights, const struct moe_rows *rows,
                                 const float *dx_rows, const float *dweight_rows, float *dx,
                                 float *dweights)
{
    struct moe_device *device = s->device;
    size_t hidden = layer->spec.hidden, columns = hidden + MOE_CUDA_WEIGHT_COLUMNS;
    struct moe_cuda_x_dy_rows batch = {
        .layer = layer, .dtype = dtype, .bucket = bucket, .tokens = tokens};
    uint32_t n;
    void *wide, *flags;
    float *combined;
    MOE_TRY(ready(s));
    MOE_TRY(rows_in_use(device, rows, &n));
    MOE_TRY(moe_cuda_train_scratch_take(device, MOE_CUDA_SCRATCH_DX, n * columns * sizeof(float),
                                        &wide));
    if (n > 0)
        MOE_TRY(MOE_CUDA(cudaMemcpy2DAsync(wide, columns * sizeof(float), dx_rows,
                                           hidden * sizeof(float), hidden * sizeof(float), n,
                                           cudaMemcpyDeviceToDevice, device->compute)));
    MOE_TRY(moe_cuda_x_dy_combine(s, &batch, wide, dweight_rows, &combined, device->compute));
    MOE_TRY(moe_cuda_session_finish(s));
    MOE_TRY(moe_cuda_train_scratch_take(device, MOE_CUDA_SCRATCH_TOKENS, tokens, &flags));
    if (tokens > 0)
        MOE_TRY(MOE_CUDA(cudaMemsetAsync(flags, 1, tokens, device->compute)));
    struct moe_cuda_home_gradients home = {.tokens = tokens,
                                           .hidden = layer->spec.hidden,
                                           .top_k = layer->spec.router.top_k,
                                           .experts = layer->spec.experts,
                                           .dtype = dtype,
                                           .x = x,
                                           .dy = dy,
                                           .ok = flags,
                                           .ids = ids,
                                           .weights = weights,
                                           .combined = combined,
                                           .dx = dx,
                                           .dweights = dweights};
    MOE_TRY(moe_cuda_home_gradients(&home, device->compute));
    return moe_cuda_device_finish(device);
}

static void retained_limit(struct moe_device *device, uint64_t bytes)
{
    moe_activation_cache_limit(device->activation_cache,
                               bytes < SIZE_MAX ? (size_t)bytes : SIZE_MAX);
}

static void retained_drop(struct moe_trainer *trainer, uint64_t name)
{
    moe_activation_cache_drop(trainer->layer->device->activation_cache, trainer->layer, name);
}

static uint64_t retained_bytes(struct moe_device *device)
{
    return moe_activation_cache_bytes(device->activation_cache);
}

const struct moe_training moe_cuda_training = {
    .live_copies = true,
    .quantised_base = true,
    .trainer_create = moe_cuda_trainer_create,
    .trainer_destroy = moe_cuda_trainer_destroy,
    .trainer_bytes = moe_cuda_trainer_bytes,
    .trainer_read = moe_cuda_trainer_read,
    .trainer_write = moe_cuda_trainer_write,
    .zero_grad = moe_cuda_zero_grad,
    .set_frozen = moe_cuda_set_frozen,
    .backward_enqueue = moe_cuda_backward_enqueue,
    .optimizer_step = moe_cuda_optimizer_step,
    .optimizer_finish = moe_cuda_optimizer_finish,
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
