/* See train_stages.h; the formulas are those of moe/training.h. */
#include "cuda/train_stages.h"

#include "base/size.h"
#include "cuda/router.h"

#include <stdlib.h>

/* --------------------------------------------------------------------- scratch */

void moe_cuda_train_scratch_free(struct moe_device *device)
{
    if (device->train == NULL)
        return;
    for (int i = 0; i < MOE_CUDA_SCRATCHES; i++)
        moe_cuda_buffer_free(device, &device->train->buffer[i]);
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

static struct moe_status take(struct moe_device *device, enum moe_cuda_scratch_use use, size_t rows,
                              size_t columns, float **out)
{
    size_t bytes;
    void *p;
    if (!moe_size_mul3(rows, columns, sizeof(float), &bytes))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "a backward pass of this size does not fit in memory");
    MOE_TRY(moe_cuda_train_scratch_take(device, use, bytes, &p));
    *out = p;
    return moe_ok();
}

struct moe_status moe_cuda_train_tell(struct moe_device *device, const struct moe_cuda_facts *f,
                                      const struct moe_cuda_facts **on_device)
{
    void *facts;
    MOE_TRY(moe_cuda_train_scratch_take(device, MOE_CUDA_SCRATCH_FACTS, sizeof *f, &facts));
    *on_device = facts;
    /* From pageable memory: *f may change when this returns. */
    return MOE_CUDA(cudaMemcpyAsync(facts, f, sizeof *f, cudaMemcpyHostToDevice, device->compute));
}

static uint32_t padded(uint32_t inner)
{
    return (inner + MOE_CUDA_INTERLEAVE - 1) / MOE_CUDA_INTERLEAVE * MOE_CUDA_INTERLEAVE;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

struct moe_status moe_cuda_train_reserve(struct moe_trainer *t, uint32_t rows, uint32_t tokens)
{
    const struct moe_layer_spec *spec = &t->layer->spec;
    struct moe_device *device = t->layer->device;
    size_t inner = spec->intermediate, shared = spec->shared_intermediate;
    size_t columns =
        larger(padded((uint32_t)inner) * (size_t)rows, padded((uint32_t)shared) * (size_t)tokens);
    float *unused;
    MOE_TRY(take(device, MOE_CUDA_SCRATCH_PRE, columns, 2, &unused));
    MOE_TRY(take(device, MOE_CUDA_SCRATCH_DH, columns, 1, &unused));
    MOE_TRY(take(device, MOE_CUDA_SCRATCH_TOKENS, 2, tokens, &unused));
    if (t->config.lora_rank == 0)
        return moe_ok();
    MOE_TRY(take(device, MOE_CUDA_SCRATCH_HALF, rows, inner, &unused));
    return take(device, MOE_CUDA_SCRATCH_LOW, rows, 2 * (size_t)t->config.lora_rank, &unused);
}

/* ---------------------------------------------------------------------- router */

struct moe_status moe_cuda_train_logits(struct moe_trainer *t, enum moe_dtype dtype,
                                        uint32_t tokens, const void *x, float **logits)
{
    struct moe_layer *layer = t->layer;
    struct moe_cuda_facts facts;
    void *p;
    MOE_TRY(moe_cuda_train_scratch_take(layer->device, MOE_CUDA_SCRATCH_LOGITS,
                                        moe_cuda_router_bytes(layer, dtype, tokens), &p));
    *logits = p;
    if (tokens == 0)
        return moe_ok();
    moe_cuda_facts_fill(layer, dtype, 0, tokens, &facts);
    struct moe_cuda_routing r = {.dtype = dtype, .capacity = tokens, .x = x, .logits = *logits};
    MOE_TRY(moe_cuda_train_tell(layer->device, &facts, &r.facts));
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

static float *grad_of(struct moe_trainer *t, enum moe_weight w, bool accumulate)
{
    return accumulate ? moe_cuda_trainer_grad(t, w, MOE_PART_WEIGHT) : NULL;
}

struct moe_status moe_cuda_train_logits_backward(struct moe_trainer *t, enum moe_dtype dtype,
                                                 uint32_t tokens, const void *x, const uint8_t *use,
                                                 const float *dlogits, bool accumulate, float *dx)
{
    const struct moe_layer *layer = t->layer;
    const struct moe_cuda_matrix *router = &layer->desc.matrix[MOE_CUDA_ROUTER];
    cudaStream_t stream = layer->device->compute;
    struct moe_cuda_row_groups rows = {.groups = 1, .rows = tokens, .use = use};
    uint32_t choices = layer->spec.experts + layer->spec.router.zero_experts;
    if (accumulate)
        MOE_TRY(moe_cuda_trainer_clear_grads(t));
    float *dw = grad_of(t, MOE_WEIGHT_ROUTER, accumulate);
    float *db = grad_of(t, MOE_WEIGHT_LOGIT_BIAS, accumulate);
    if (dw != NULL) {
        struct moe_cuda_exact_dw g = {.rows = rows,
                                      .y_dtype = MOE_DTYPE_F32,
                                      .x_dtype = dtype,
                                      .y = dlogits,
                                      .x = x,
                                      .n = choices,
                                      .k = layer->spec.hidden,
                                      .scale = 1.0f,
                                      .out = dw};
        MOE_TRY(moe_cuda_exact_wgrad(&g, stream));
    }
    if (db != NULL) {
        struct moe_cuda_column_sum g = {.rows = rows,
                                        .y_dtype = MOE_DTYPE_F32,
                                        .y = dlogits,
                                        .n = choices,
                                        .stride = choices,
                                        .step = MOE_CUDA_INTERLEAVE,
                                        .out = db};
        MOE_TRY(moe_cuda_exact_column_sum(&g, stream));
    }
    struct moe_cuda_exact_dx g = {.rows = rows,
                                  .y_dtype = MOE_DTYPE_F32,
                                  .w_dtype = router->dtype,
                                  .y = dlogits,
                                  .w = router->data,
                                  .n = choices,
                                  .k = layer->spec.hidden,
                                  .out = dx,
                                  .out_stride = layer->spec.hidden,
                                  .add = true};
    return moe_cuda_exact_dgrad(&g, stream);
}

/* --------------------------------------------------------------------- experts */

/* The feed-forward network of the routed experts, or the shared one. */
struct ffn {
    struct moe_trainer *t;
    bool shared, accumulate;
    struct moe_cuda_row_groups rows;
    enum moe_dtype dtype;
    const void *x, *dy;
    const float *weight; /* [rows] or NULL = 1 */
    uint32_t inner, padded;
    enum moe_weight first; /* MOE_WEIGHT_GATE or MOE_WEIGHT_SHARED_GATE */
    const struct moe_cuda_matrix *gate_up, *down;
    float *pre, *dh; /* scratch: become dgu and the weighted activation */
    float *dx;
    uint32_t dx_stride;
    bool add; /* to dx */
    float *dweight;
};

static bool weighs_input(const struct ffn *f)
{
    return !f->shared && f->t->layer->spec.weighting == MOE_WEIGHT_INPUT;
}

static struct moe_status take_ffn_scratch(struct ffn *f)
{
    struct moe_device *device = f->t->layer->device;
    f->padded = padded(f->inner);
    MOE_TRY(take(device, MOE_CUDA_SCRATCH_PRE, f->rows.rows, 2 * (size_t)f->padded, &f->pre));
    return take(device, MOE_CUDA_SCRATCH_DH, f->rows.rows, f->inner, &f->dh);
}

/* pre = x W_gu^T, dh = dy W_d, then both through the activation. */
static struct moe_status to_activation(const struct ffn *f, cudaStream_t stream)
{
    const struct moe_layer *layer = f->t->layer;
    const struct moe_layer_spec *spec = &layer->spec;
    struct moe_cuda_exact_xw pre = {.rows = f->rows,
                                    .x_dtype = f->dtype,
                                    .w_dtype = f->gate_up->dtype,
                                    .x = f->x,
                                    .w = f->gate_up->data,
                                    .n = f->gate_up->rows,
                                    .k = spec->hidden,
                                    .out = f->pre};
    struct moe_cuda_exact_dx dh = {.rows = f->rows,
                                   .y_dtype = f->dtype,
                                   .w_dtype = f->down->dtype,
                                   .y = f->dy,
                                   .w = f->down->data,
                                   .n = spec->hidden,
                                   .k = f->inner,
                                   .out = f->dh,
                                   .out_stride = f->inner};
    struct moe_cuda_activation_backward a = {.rows = f->rows,
                                             .activation = f->shared ? spec->shared_activation
                                                                     : spec->activation,
                                             .limit = spec->swiglu_limit,
                                             .alpha = spec->swiglu_alpha,
                                             .hidden = spec->hidden,
                                             .inner = f->inner,
                                             .input_weighting = weighs_input(f),
                                             .weight = f->weight,
                                             .dtype = f->dtype,
                                             .dy = f->dy,
                                             .pre = f->pre,
                                             .dh = f->dh,
                                             .dweight = f->dweight};
    if (!f->shared) {
        a.gate_bias = layer->desc.bias[MOE_WEIGHT_GATE_BIAS];
        a.up_bias = layer->desc.bias[MOE_WEIGHT_UP_BIAS];
        a.down_bias = layer->desc.bias[MOE_WEIGHT_DOWN_BIAS];
    }
    MOE_TRY(moe_cuda_exact_product(&pre, stream));
    MOE_TRY(moe_cuda_exact_dgrad(&dh, stream));
    return moe_cuda_activation_backward(&a, stream);
}

static struct moe_status to_input(const struct ffn *f, cudaStream_t stream)
{
    struct moe_cuda_exact_dx dx = {.rows = f->rows,
                                   .y_dtype = MOE_DTYPE_F32,
                                   .w_dtype = f->gate_up->dtype,
                                   .y = f->pre,
                                   .w = f->gate_up->data,
                                   .n = f->gate_up->rows,
                                   .k = f->t->layer->spec.hidden,
                                   .out = f->dx,
                                   .out_stride = f->dx_stride,
                                   .add = f->add};
    return moe_cuda_exact_dgrad(&dx, stream);
}

/* Biases exist for routed experts only. */
static struct moe_status bias_gradients(const struct ffn *f, cudaStream_t stream)
{
    const struct moe_layer_spec *spec = &f->t->layer->spec;
    float *gate = grad_of(f->t, MOE_WEIGHT_GATE_BIAS, f->accumulate);
    float *up = grad_of(f->t, MOE_WEIGHT_UP_BIAS, f->accumulate);
    float *down = grad_of(f->t, MOE_WEIGHT_DOWN_BIAS, f->accumulate);
    struct moe_cuda_column_sum g = {.rows = f->rows,
                                    .y_dtype = MOE_DTYPE_F32,
                                    .n = f->inner,
                                    .stride = 2 * f->padded,
                                    .step = 2 * MOE_CUDA_INTERLEAVE};
    if (gate != NULL) {
        g.y = f->pre;
        g.out = gate;
        MOE_TRY(moe_cuda_exact_column_sum(&g, stream));
    }
    if (up != NULL) {
        g.y = f->pre + MOE_CUDA_INTERLEAVE;
        g.out = up;
        MOE_TRY(moe_cuda_exact_column_sum(&g, stream));
    }
    if (down == NULL)
        return moe_ok();
    struct moe_cuda_column_sum d = {.rows = f->rows,
                                    .y_dtype = f->dtype,
                                    .y = f->dy,
                                    .n = spec->hidden,
                                    .stride = spec->hidden,
                                    .step = MOE_CUDA_INTERLEAVE,
                                    .weight = weighs_input(f) ? NULL : f->weight,
                                    .out = down};
    return moe_cuda_exact_column_sum(&d, stream);
}

static struct moe_status matrix_gradients(const struct ffn *f, cudaStream_t stream)
{
    const struct moe_layer_spec *spec = &f->t->layer->spec;
    float *gate_up = grad_of(f->t, f->first, f->accumulate);
    float *down =
        grad_of(f->t, f->shared ? MOE_WEIGHT_SHARED_DOWN : MOE_WEIGHT_DOWN, f->accumulate);
    if (gate_up != NULL) {
        struct moe_cuda_exact_dw g = {.rows = f->rows,
                                      .y_dtype = MOE_DTYPE_F32,
                                      .x_dtype = f->dtype,
                                      .y = f->pre,
                                      .x = f->x,
                                      .n = f->gate_up->rows,
                                      .k = spec->hidden,
                                      .scale = 1.0f,
                                      .out = gate_up};
        MOE_TRY(moe_cuda_exact_wgrad(&g, stream));
    }
    if (down == NULL)
        return moe_ok();
    struct moe_cuda_exact_dw g = {.rows = f->rows,
                                  .y_dtype = f->dtype,
                                  .x_dtype = MOE_DTYPE_F32,
                                  .y = f->dy,
                                  .x = f->dh,
                                  .n = spec->hidden,
                                  .k = f->inner,
                                  .scale = 1.0f,
                                  .out = down};
    return moe_cuda_exact_wgrad(&g, stream);
}

/* -------------------------------------------------------------------- adapters */

/* One target: W [out, in] met rows `in_rows`, and d is the gradient of its product. */
static struct moe_status adapter_gradient(const struct ffn *f, enum moe_weight w,
                                          enum moe_dtype d_dtype, const void *d,
                                          enum moe_dtype x_dtype, const void *x,
                                          cudaStream_t stream)
{
    struct moe_trainer *t = f->t;
    const struct moe_cuda_block *a = moe_cuda_trainer_block(t, w, MOE_PART_LORA_A);
    const struct moe_cuda_block *b = moe_cuda_trainer_block(t, w, MOE_PART_LORA_B);
    if (a == NULL || b == NULL || !f->accumulate || !moe_cuda_block_moves(t, a))
        return moe_ok();
    uint32_t r = t->config.lora_rank;
    uint32_t in = (uint32_t)(a->n / r), out = (uint32_t)(b->n / r);
    float *xa, scale = t->config.lora_alpha / (float)r;
    MOE_TRY(take(t->layer->device, MOE_CUDA_SCRATCH_LOW, f->rows.rows, 2 * (size_t)r, &xa));
    float *db = xa + (size_t)f->rows.rows * r;
    struct moe_cuda_exact_xw inner = {.rows = f->rows,
                                      .x_dtype = x_dtype,
                                      .w_dtype = MOE_DTYPE_F32,
                                      .x = x,
                                      .w = a->value,
                                      .n = r,
                                      .k = in,
                                      .out = xa};
    struct moe_cuda_exact_dx outer = {.rows = f->rows,
                                      .y_dtype = d_dtype,
                                      .w_dtype = MOE_DTYPE_F32,
                                      .y = d,
                                      .w = b->value,
                                      .n = out,
                                      .k = r,
                                      .out = db,
                                      .out_stride = r};
    struct moe_cuda_exact_dw to_b = {.rows = f->rows,
                                     .y_dtype = d_dtype,
                                     .x_dtype = MOE_DTYPE_F32,
                                     .y = d,
                                     .x = xa,
                                     .n = out,
                                     .k = r,
                                     .scale = scale,
                                     .out = b->grad};
    struct moe_cuda_exact_dw to_a = {.rows = f->rows,
                                     .y_dtype = MOE_DTYPE_F32,
                                     .x_dtype = x_dtype,
                                     .y = db,
                                     .x = x,
                                     .n = r,
                                     .k = in,
                                     .scale = scale,
                                     .out = a->grad};
    MOE_TRY(moe_cuda_exact_product(&inner, stream));
    MOE_TRY(moe_cuda_exact_dgrad(&outer, stream));
    MOE_TRY(moe_cuda_exact_wgrad(&to_b, stream));
    return moe_cuda_exact_wgrad(&to_a, stream);
}

static struct moe_status adapter_gradients(const struct ffn *f, cudaStream_t stream)
{
    if (f->shared || f->t->config.lora_rank == 0)
        return moe_ok();
    float *half;
    MOE_TRY(take(f->t->layer->device, MOE_CUDA_SCRATCH_HALF, f->rows.rows, f->inner, &half));
    static const enum moe_weight targets[] = {MOE_WEIGHT_GATE, MOE_WEIGHT_UP};
    for (uint32_t i = 0; i < 2; i++) {
        MOE_TRY(
            moe_cuda_take_half(&f->rows, f->inner, f->pre + i * MOE_CUDA_INTERLEAVE, half, stream));
        MOE_TRY(adapter_gradient(f, targets[i], MOE_DTYPE_F32, half, f->dtype, f->x, stream));
    }
    return adapter_gradient(f, MOE_WEIGHT_DOWN, f->dtype, f->dy, MOE_DTYPE_F32, f->dh, stream);
}

/* ------------------------------------------------------------------- both FFNs */

static struct moe_status backward(struct ffn *f)
{
    const struct moe_layer *layer = f->t->layer;
    cudaStream_t stream = layer->device->compute;
    if (f->accumulate)
        MOE_TRY(moe_cuda_trainer_clear_grads(f->t));
    MOE_TRY(take_ffn_scratch(f));
    MOE_TRY(to_activation(f, stream));
    MOE_TRY(to_input(f, stream));
    if (!f->shared)
        MOE_TRY(bias_gradients(f, stream));
    if (weighs_input(f)) {
        struct moe_cuda_input_backward a = {.rows = f->rows,
                                            .hidden = layer->spec.hidden,
                                            .dx_stride = f->dx_stride,
                                            .dgu_columns = 2 * f->padded,
                                            .dtype = f->dtype,
                                            .x = f->x,
                                            .weight = f->weight,
                                            .dx = f->dx,
                                            .dgu = f->pre,
                                            .dweight = f->dweight};
        MOE_TRY(moe_cuda_input_backward(&a, stream));
    }
    MOE_TRY(matrix_gradients(f, stream));
    return adapter_gradients(f, stream);
}

struct moe_status moe_cuda_train_experts(struct moe_trainer *t, enum moe_dtype dtype,
                                         const struct moe_rows *rows, uint32_t capacity,
                                         const void *dy_rows, bool accumulate, float *dx_rows,
                                         uint32_t dx_stride, float *dweight_rows)
{
    const struct moe_layer *layer = t->layer;
    if (rows->local_experts == 0 || capacity == 0)
        return moe_ok();
    struct ffn f = {.t = t,
                    .accumulate = accumulate,
                    .rows = {.start = rows->start,
                             .count = rows->count,
                             .groups = rows->local_experts,
                             .rows = capacity},
                    .dtype = dtype,
                    .x = rows->x,
                    .dy = dy_rows,
                    .weight = rows->weight,
                    .inner = layer->spec.intermediate,
                    .first = MOE_WEIGHT_GATE,
                    .gate_up = &layer->desc.matrix[MOE_CUDA_GATE_UP],
                    .down = &layer->desc.matrix[MOE_CUDA_DOWN],
                    .dx = dx_rows,
                    .dx_stride = dx_stride,
                    .dweight = dweight_rows};
    return backward(&f);
}

/* The shared expert is an expert whose weight is its gate. */
struct moe_status moe_cuda_train_shared(struct moe_trainer *t, enum moe_dtype dtype,
                                        uint32_t tokens, const void *x, const void *dy,
                                        const uint8_t *ok, bool accumulate, float *dx)
{
    const struct moe_layer *layer = t->layer;
    const struct moe_layer_spec *spec = &layer->spec;
    cudaStream_t stream = layer->device->compute;
    if (spec->shared_intermediate == 0 || tokens == 0)
        return moe_ok();
    float *gate = NULL;
    const float *vector = layer->desc.matrix[MOE_CUDA_SHARED_VECTOR].data;
    MOE_TRY(take(layer->device, MOE_CUDA_SCRATCH_TOKENS, 2, tokens, &gate));
    float *dgate = gate + tokens;
    if (spec->shared_gated)
        MOE_TRY(moe_cuda_shared_gate(tokens, spec->hidden, dtype, x, vector, gate, stream));
    struct ffn f = {.t = t,
                    .shared = true,
                    .accumulate = accumulate,
                    .rows = {.groups = 1, .rows = tokens, .use = ok},
                    .dtype = dtype,
                    .x = x,
                    .dy = dy,
                    .weight = spec->shared_gated ? gate : NULL,
                    .inner = spec->shared_intermediate,
                    .first = MOE_WEIGHT_SHARED_GATE,
                    .gate_up = &layer->desc.matrix[MOE_CUDA_SHARED_GATE_UP],
                    .down = &layer->desc.matrix[MOE_CUDA_SHARED_DOWN],
                    .dx = dx,
                    .dx_stride = spec->hidden,
                    .add = true,
                    .dweight = spec->shared_gated ? dgate : NULL};
    MOE_TRY(backward(&f));
    if (!spec->shared_gated)
        return moe_ok();
    MOE_TRY(
        moe_cuda_shared_gate_backward(tokens, spec->hidden, ok, gate, vector, dgate, dx, stream));
    struct moe_cuda_exact_dw g = {.rows = f.rows,
                                  .y_dtype = MOE_DTYPE_F32,
                                  .x_dtype = dtype,
                                  .y = dgate,
                                  .x = x,
                                  .n = 1,
                                  .k = spec->hidden,
                                  .scale = 1.0f,
                                  .out = grad_of(t, MOE_WEIGHT_SHARED_GATE_VECTOR, accumulate)};
    return g.out != NULL ? moe_cuda_exact_wgrad(&g, stream) : moe_ok();
}
