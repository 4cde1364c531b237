/* SPDX-License-Identifier: Apache-2.0 */
/* The networks of a backward pass, top to bottom in `begin`, `rows_back` and `weights_back`; see
 * train_ffn.h. */
#include "cuda/training/train_ffn.h"

#include "base/size.h"

static bool weighs_input(const struct moe_cuda_train_ffn *f)
{
    return !f->shared && f->t->layer->spec.weighting == MOE_WEIGHT_INPUT;
}

static uint32_t padded(uint32_t inner)
{
    return (inner + MOE_CUDA_INTERLEAVE - 1) / MOE_CUDA_INTERLEAVE * MOE_CUDA_INTERLEAVE;
}

static bool on_tensor_cores(const struct moe_layer *layer, enum moe_dtype dtype,
                            enum moe_cuda_matrices gate_up, enum moe_cuda_matrices down)
{
    return dtype == MOE_DTYPE_BF16 && layer->device->cublas == NULL &&
           layer->desc.served[gate_up] && layer->desc.served[down];
}

bool moe_cuda_train_routed_on_tensor_cores(const struct moe_layer *layer, enum moe_dtype dtype)
{
    return on_tensor_cores(layer, dtype, MOE_CUDA_GATE_UP, MOE_CUDA_DOWN);
}

bool moe_cuda_train_shared_on_tensor_cores(const struct moe_layer *layer, enum moe_dtype dtype)
{
    return layer->spec.shared_intermediate > 0 &&
           on_tensor_cores(layer, dtype, MOE_CUDA_SHARED_GATE_UP, MOE_CUDA_SHARED_DOWN);
}

bool moe_cuda_train_on_tensor_cores(const struct moe_trainer *t, enum moe_dtype dtype)
{
    return moe_cuda_train_routed_on_tensor_cores(t->layer, dtype);
}

/* Products of adapters are exact products, which have no stride. */
bool moe_cuda_train_reads_x_dy_rows(const struct moe_trainer *t, enum moe_dtype dtype)
{
    return moe_cuda_train_on_tensor_cores(t, dtype) && t->config.lora_rank == 0;
}

/* *grad: where this pass adds to a weight's gradient, or NULL. */
static struct moe_status take_grad(const struct moe_cuda_train_ffn *f, enum moe_weight w,
                                   float **grad)
{
    struct moe_cuda_block *b = moe_cuda_train_moving(f, w);
    *grad = b != NULL ? b->grad : NULL;
    return b != NULL ? moe_cuda_block_clear_grad(f->t, b) : moe_ok();
}

/* --------------------------------------------------------------------- scratch */

/* Bytes of one network: of pre, of dh, and of dgu unless it is `pre`. */
struct needs {
    size_t pre, dh, dgu;
};

static struct needs needs_of(size_t rows, uint32_t inner, bool tensor)
{
    size_t columns = padded(inner), each = tensor ? sizeof(uint16_t) : sizeof(float);
    return (struct needs){.pre = rows * 2 * columns * sizeof(float),
                          .dh = rows * columns * each,
                          .dgu = tensor ? rows * 2 * columns * each : 0};
}

static struct moe_status take_floats(struct moe_device *device, enum moe_cuda_scratch_use use,
                                     size_t rows, size_t columns, float **out)
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

struct moe_status moe_cuda_train_reserve_ffn(struct moe_trainer *t, enum moe_dtype dtype,
                                             uint32_t rows, uint32_t tokens)
{
    struct moe_layer *layer = t->layer;
    struct moe_device *device = layer->device;
    uint32_t inner = layer->spec.intermediate;
    struct needs a = needs_of(rows, inner, moe_cuda_train_on_tensor_cores(t, dtype));
    struct needs b = needs_of(tokens, layer->spec.shared_intermediate,
                              moe_cuda_train_shared_on_tensor_cores(layer, dtype));
    const struct {
        enum moe_cuda_scratch_use use;
        size_t bytes;
    } all[] = {{MOE_CUDA_SCRATCH_PRE, a.pre},
               {MOE_CUDA_SCRATCH_DH, a.dh},
               {MOE_CUDA_SCRATCH_DGU, a.dgu},
               {MOE_CUDA_SCRATCH_FFN_PARAMS, sizeof(struct moe_cuda_step_params)},
               {MOE_CUDA_SCRATCH_SHARED_PRE, b.pre},
               {MOE_CUDA_SCRATCH_SHARED_DH, b.dh},
               {MOE_CUDA_SCRATCH_SHARED_DGU, b.dgu},
               {MOE_CUDA_SCRATCH_SHARED_PARAMS, sizeof(struct moe_cuda_step_params)}};
    void *unused;
    float *floats;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        MOE_TRY(moe_cuda_train_scratch_take(device, all[i].use, all[i].bytes, &unused));
    MOE_TRY(take_floats(device, MOE_CUDA_SCRATCH_TOKENS, 2, tokens, &floats));
    if (t->config.lora_rank == 0)
        return moe_ok();
    MOE_TRY(take_floats(device, MOE_CUDA_SCRATCH_HALF, rows, inner, &floats));
    return take_floats(device, MOE_CUDA_SCRATCH_LOW, rows, 2 * (size_t)t->config.lora_rank,
                       &floats);
}

static struct moe_status take_scratch(struct moe_cuda_train_ffn *f)
{
    struct moe_device *device = f->t->layer->device;
    struct needs n = needs_of(f->rows.rows, f->inner, f->tensor);
    bool own = f->shared;
    void *pre;
    f->padded = padded(f->inner);
    f->row_dtype = f->tensor ? MOE_DTYPE_BF16 : MOE_DTYPE_F32;
    MOE_TRY(moe_cuda_train_scratch_take(
        device, own ? MOE_CUDA_SCRATCH_SHARED_PRE : MOE_CUDA_SCRATCH_PRE, n.pre, &pre));
    MOE_TRY(moe_cuda_train_scratch_take(
        device, own ? MOE_CUDA_SCRATCH_SHARED_DH : MOE_CUDA_SCRATCH_DH, n.dh, &f->dh));
    f->pre = pre;
    f->dgu = pre;
    if (!f->tensor)
        return moe_ok();
    return moe_cuda_train_scratch_take(
        device, own ? MOE_CUDA_SCRATCH_SHARED_DGU : MOE_CUDA_SCRATCH_DGU, n.dgu, &f->dgu);
}

/* ------------------------------------------------------------- products, exactly */

static struct moe_status exact_pre(const struct moe_cuda_train_ffn *f, cudaStream_t stream)
{
    const struct moe_layer *layer = f->t->layer;
    const struct moe_cuda_matrix *gate_up = &layer->desc.matrix[f->gate_up];
    struct moe_cuda_exact_xw pre = {.rows = f->rows,
                                    .x_dtype = f->dtype,
                                    .w_dtype = gate_up->dtype,
                                    .packing = gate_up->packing,
                                    .x = f->x,
                                    .w = gate_up->data,
                                    .n = gate_up->rows,
                                    .k = layer->spec.hidden,
                                    .out = f->pre};
    return moe_cuda_exact_product(&pre, stream);
}

static struct moe_status exact_dh(const struct moe_cuda_train_ffn *f, cudaStream_t stream)
{
    const struct moe_layer *layer = f->t->layer;
    const struct moe_cuda_matrix *down = &layer->desc.matrix[f->down];
    struct moe_cuda_exact_dx dh = {.rows = f->rows,
                                   .y_dtype = f->dtype,
                                   .w_dtype = down->dtype,
                                   .packing = down->packing,
                                   .y = f->dy,
                                   .w = down->data,
                                   .n = layer->spec.hidden,
                                   .k = f->inner,
                                   .out = f->dh,
                                   .out_stride = f->inner};
    return moe_cuda_exact_dgrad(&dh, stream);
}

static struct moe_status exact_dx(const struct moe_cuda_train_ffn *f, cudaStream_t stream)
{
    const struct moe_cuda_matrix *gate_up = &f->t->layer->desc.matrix[f->gate_up];
    struct moe_cuda_exact_dx dx = {.rows = f->rows,
                                   .y_dtype = MOE_DTYPE_F32,
                                   .w_dtype = gate_up->dtype,
                                   .packing = gate_up->packing,
                                   .y = f->dgu,
                                   .w = gate_up->data,
                                   .n = gate_up->rows,
                                   .k = f->t->layer->spec.hidden,
                                   .out = f->dx,
                                   .out_stride = f->dx_stride,
                                   .add = f->add};
    return moe_cuda_exact_dgrad(&dx, stream);
}

static struct moe_status exact_weights(const struct moe_cuda_train_ffn *f, cudaStream_t stream)
{
    const struct moe_layer *layer = f->t->layer;
    struct moe_cuda_exact_dw gate_up = {.rows = f->rows,
                                        .y_dtype = MOE_DTYPE_F32,
                                        .x_dtype = f->dtype,
                                        .y = f->dgu,
                                        .x = f->x,
                                        .n = layer->desc.matrix[f->gate_up].rows,
                                        .k = layer->spec.hidden,
                                        .scale = 1.0f};
    struct moe_cuda_exact_dw down = {.rows = f->rows,
                                     .y_dtype = f->dtype,
                                     .x_dtype = MOE_DTYPE_F32,
                                     .y = f->dy,
                                     .x = f->dh,
                                     .n = layer->spec.hidden,
                                     .k = f->inner,
                                     .scale = 1.0f};
    MOE_TRY(take_grad(f, f->first, &gate_up.out));
    MOE_TRY(take_grad(f, f->last, &down.out));
    moe_cuda_train_ffn_mark(f, MOE_BACKWARD_WGRAD_GATE_UP);
    if (gate_up.out != NULL)
        MOE_TRY(moe_cuda_exact_wgrad(&gate_up, stream));
    moe_cuda_train_ffn_mark(f, MOE_BACKWARD_WGRAD_DOWN);
    return down.out != NULL ? moe_cuda_exact_wgrad(&down, stream) : moe_ok();
}

/* ---------------------------------------------------------- element by element */

static struct moe_status through_activation(const struct moe_cuda_train_ffn *f, cudaStream_t stream)
{
    const struct moe_layer *layer = f->t->layer;
    const struct moe_layer_spec *spec = &layer->spec;
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
                                             .dy_stride = f->stride,
                                             .pre = f->pre,
                                             .dh = f->dh,
                                             .dgu = f->dgu,
                                             .row_dtype = f->row_dtype,
                                             .dweight = f->dweight};
    if (!f->shared) {
        a.gate_bias = layer->desc.bias[MOE_WEIGHT_GATE_BIAS];
        a.up_bias = layer->desc.bias[MOE_WEIGHT_UP_BIAS];
        a.down_bias = layer->desc.bias[MOE_WEIGHT_DOWN_BIAS];
    }
    return moe_cuda_activation_backward(&a, stream);
}

/* dg, or with `up` du, in the interleaved dgu. */
static const void *half_of(const struct moe_cuda_train_ffn *f, bool up)
{
    return (const char *)f->dgu + (up ? MOE_CUDA_INTERLEAVE * moe_dtype_bytes(f->row_dtype) : 0);
}

/* Biases exist for routed experts only. */
static struct moe_status bias_gradients(const struct moe_cuda_train_ffn *f, cudaStream_t stream)
{
    struct moe_cuda_column_sum half = {.rows = f->rows,
                                       .y_dtype = f->row_dtype,
                                       .n = f->inner,
                                       .stride = 2 * f->padded,
                                       .step = 2 * MOE_CUDA_INTERLEAVE};
    struct moe_cuda_column_sum down = {.rows = f->rows,
                                       .y_dtype = f->dtype,
                                       .y = f->dy,
                                       .n = f->t->layer->spec.hidden,
                                       .stride = f->stride,
                                       .step = MOE_CUDA_INTERLEAVE,
                                       .weight = weighs_input(f) ? NULL : f->weight};
    static const enum moe_weight halves[] = {MOE_WEIGHT_GATE_BIAS, MOE_WEIGHT_UP_BIAS};
    for (int i = 0; i < 2; i++) {
        half.y = half_of(f, i == 1);
        MOE_TRY(take_grad(f, halves[i], &half.out));
        if (half.out != NULL)
            MOE_TRY(moe_cuda_exact_column_sum(&half, stream));
    }
    MOE_TRY(take_grad(f, MOE_WEIGHT_DOWN_BIAS, &down.out));
    return down.out != NULL ? moe_cuda_exact_column_sum(&down, stream) : moe_ok();
}

static struct moe_status weigh_input(const struct moe_cuda_train_ffn *f, cudaStream_t stream)
{
    struct moe_cuda_input_backward a = {.rows = f->rows,
                                        .hidden = f->t->layer->spec.hidden,
                                        .x_stride = f->stride,
                                        .dx_stride = f->dx_stride,
                                        .dgu_columns = 2 * f->padded,
                                        .dtype = f->dtype,
                                        .x = f->x,
                                        .weight = f->weight,
                                        .dx = f->dx,
                                        .dgu_dtype = f->row_dtype,
                                        .dgu = f->dgu,
                                        .dweight = f->dweight};
    return moe_cuda_input_backward(&a, stream);
}

/* -------------------------------------------------------------------- adapters */

/* One target: W [out, in] was multiplied by rows x, and d is the gradient of the product. */
static struct moe_status adapter_gradient(const struct moe_cuda_train_ffn *f, enum moe_weight w,
                                          enum moe_dtype d_dtype, const void *d,
                                          enum moe_dtype x_dtype, const void *x,
                                          cudaStream_t stream)
{
    struct moe_trainer *t = f->t;
    struct moe_cuda_block *a = moe_cuda_trainer_block(t, w, MOE_PART_LORA_A);
    struct moe_cuda_block *b = moe_cuda_trainer_block(t, w, MOE_PART_LORA_B);
    if (a == NULL || b == NULL || !f->accumulate || !moe_cuda_block_moves(t, a))
        return moe_ok();
    uint32_t r = t->config.lora_rank;
    uint32_t in = (uint32_t)(a->n / r), out = (uint32_t)(b->n / r);
    float *xa, scale = t->config.lora_alpha / (float)r;
    MOE_TRY(moe_cuda_block_clear_grad(t, a));
    MOE_TRY(moe_cuda_block_clear_grad(t, b));
    MOE_TRY(take_floats(t->layer->device, MOE_CUDA_SCRATCH_LOW, f->rows.rows, 2 * (size_t)r, &xa));
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

static struct moe_status adapter_gradients(const struct moe_cuda_train_ffn *f, cudaStream_t stream)
{
    if (f->shared || f->t->config.lora_rank == 0)
        return moe_ok();
    float *half;
    MOE_TRY(take_floats(f->t->layer->device, MOE_CUDA_SCRATCH_HALF, f->rows.rows, f->inner, &half));
    static const enum moe_weight targets[] = {MOE_WEIGHT_GATE, MOE_WEIGHT_UP};
    for (uint32_t i = 0; i < 2; i++) {
        MOE_TRY(moe_cuda_take_half(&f->rows, f->inner, f->row_dtype, f->dgu, i == 1, half, stream));
        MOE_TRY(adapter_gradient(f, targets[i], MOE_DTYPE_F32, half, f->dtype, f->x, stream));
    }
    return adapter_gradient(f, MOE_WEIGHT_DOWN, f->dtype, f->dy, f->row_dtype, f->dh, stream);
}

/* ----------------------------------------------------------------- both networks */

static struct moe_status compute_pre(const struct moe_cuda_train_ffn *f)
{
    return f->tensor ? moe_cuda_train_tensor_pre(f) : exact_pre(f, f->stream);
}

/* Changes no gradient. */
static struct moe_status begin(struct moe_cuda_train_ffn *f)
{
    MOE_TRY(take_scratch(f));
    if (f->retained == NULL) {
        moe_cuda_train_ffn_mark(f, MOE_BACKWARD_PRE);
        MOE_TRY(compute_pre(f));
    }
    moe_cuda_train_ffn_mark(f, MOE_BACKWARD_DH);
    return f->tensor ? moe_cuda_train_tensor_dh(f) : exact_dh(f, f->stream);
}

/* Of the gradients, only those of the routed experts' biases change. */
static struct moe_status rows_back(struct moe_cuda_train_ffn *f)
{
    if (f->retained != NULL)
        f->pre = f->retained;
    moe_cuda_train_ffn_mark(f, MOE_BACKWARD_ACTIVATION);
    MOE_TRY(through_activation(f, f->stream));
    if (!f->shared)
        MOE_TRY(bias_gradients(f, f->stream));
    moe_cuda_train_ffn_mark(f, MOE_BACKWARD_DX);
    MOE_TRY(f->tensor ? moe_cuda_train_tensor_dx(f) : exact_dx(f, f->stream));
    return weighs_input(f) ? weigh_input(f, f->stream) : moe_ok();
}

static struct moe_status weights_back(const struct moe_cuda_train_ffn *f,
                                      const struct moe_cuda_overlap_plan *overlap)
{
    cudaStream_t stream = f->t->layer->device->compute;
    MOE_TRY(f->tensor ? moe_cuda_train_tensor_weights(f, overlap) : exact_weights(f, stream));
    return adapter_gradients(f, stream);
}

/* Uploads the step parameters, which the tensor cores' kernels read. */
static struct moe_status upload_params(struct moe_cuda_train_ffn *f, uint32_t tokens)
{
    struct moe_cuda_step_params params;
    if (!f->tensor)
        return moe_ok();
    moe_cuda_step_params_fill(f->t->layer, f->dtype, 0, tokens, &params);
    return moe_cuda_train_upload_params(f->t->layer->device,
                                        f->shared ? MOE_CUDA_SCRATCH_SHARED_PARAMS
                                                  : MOE_CUDA_SCRATCH_FFN_PARAMS,
                                        &params, &f->params, f->stream);
}

static bool has_rows(const struct moe_cuda_train_ffn *f)
{
    return f->rows.groups > 0 && f->rows.rows > 0;
}

struct moe_status moe_cuda_train_experts_begin(struct moe_trainer *t, enum moe_dtype dtype,
                                               const struct moe_cuda_train_rows *rows,
                                               struct moe_cuda_train_ffn *out)
{
    struct moe_cuda_train_ffn f = {.t = t,
                                   .accumulate = rows->accumulate,
                                   .tensor = moe_cuda_train_on_tensor_cores(t, dtype),
                                   .stream = t->layer->device->compute,
                                   .rows = {.start = rows->rows->start,
                                            .count = rows->rows->count,
                                            .groups = rows->rows->local_experts,
                                            .rows = rows->capacity},
                                   .bucket = rows->bucket,
                                   .slots = rows->slots,
                                   .dtype = dtype,
                                   .x = rows->rows->x,
                                   .dy = rows->dy,
                                   .stride = rows->stride,
                                   .weight = rows->rows->weight,
                                   .inner = t->layer->spec.intermediate,
                                   .first = MOE_WEIGHT_GATE,
                                   .last = MOE_WEIGHT_DOWN,
                                   .gate_up = MOE_CUDA_GATE_UP,
                                   .down = MOE_CUDA_DOWN,
                                   .dx = rows->dx,
                                   .dx_stride = rows->dx_stride,
                                   .dweight = rows->dweight,
                                   .retained = rows->retained};
    *out = f;
    if (!has_rows(&f))
        return moe_ok();
    MOE_TRY(upload_params(out, 0));
    return begin(out);
}

struct moe_status moe_cuda_train_experts_without_retained(struct moe_cuda_train_ffn *f)
{
    if (f->retained == NULL || !has_rows(f))
        return moe_ok();
    f->retained = NULL;
    return compute_pre(f);
}

struct moe_status moe_cuda_train_experts_rows(struct moe_cuda_train_ffn *f)
{
    return has_rows(f) ? rows_back(f) : moe_ok();
}

struct moe_status moe_cuda_train_experts_weights(struct moe_cuda_train_ffn *f,
                                                 const struct moe_cuda_overlap_plan *overlap)
{
    return has_rows(f) ? weights_back(f, overlap) : moe_ok();
}

/* The gate of the shared expert: its own gradient, and its part of dx. */
static struct moe_status gate_gradient(const struct moe_cuda_train_ffn *f, cudaStream_t stream)
{
    const struct moe_layer *layer = f->t->layer;
    MOE_TRY(moe_cuda_shared_gate_backward(f->rows.rows, layer->spec.hidden, f->ok, f->weight,
                                          layer->desc.matrix[MOE_CUDA_SHARED_VECTOR].data,
                                          f->dweight, f->dx, stream));
    struct moe_cuda_exact_dw g = {.rows = {.groups = 1, .rows = f->rows.rows, .use = f->ok},
                                  .y_dtype = MOE_DTYPE_F32,
                                  .x_dtype = f->dtype,
                                  .y = f->dweight,
                                  .x = f->x,
                                  .n = 1,
                                  .k = layer->spec.hidden,
                                  .scale = 1.0f};
    MOE_TRY(take_grad(f, MOE_WEIGHT_SHARED_GATE_VECTOR, &g.out));
    return g.out != NULL ? moe_cuda_exact_wgrad(&g, stream) : moe_ok();
}

/* The shared expert is an expert with its gate as its weight. */
static struct moe_status weigh_by_gate(struct moe_cuda_train_ffn *f)
{
    const struct moe_layer *layer = f->t->layer;
    float *gate;
    MOE_TRY(take_floats(layer->device, MOE_CUDA_SCRATCH_TOKENS, 2, f->rows.rows, &gate));
    f->weight = gate;
    f->dweight = gate + f->rows.rows;
    return moe_cuda_shared_gate(f->rows.rows, layer->spec.hidden, f->dtype, f->x,
                                layer->desc.matrix[MOE_CUDA_SHARED_VECTOR].data, gate, f->stream);
}

struct moe_status moe_cuda_train_shared_begin(struct moe_trainer *t,
                                              const struct moe_cuda_train_tokens *a,
                                              struct moe_cuda_train_ffn *f)
{
    const struct moe_layer *layer = t->layer;
    const struct moe_layer_spec *spec = &layer->spec;
    bool tensor = moe_cuda_train_shared_on_tensor_cores(layer, a->dtype);
    uint32_t tokens = spec->shared_intermediate > 0 ? a->tokens : 0;
    *f = (struct moe_cuda_train_ffn){
        .t = t,
        .shared = true,
        .accumulate = a->accumulate,
        .tensor = tensor,
        .stream = a->stream != NULL ? a->stream : layer->device->compute,
        .processors = a->processors,
        .rows = {.groups = 1, .rows = tokens, .use = tensor ? NULL : a->ok},
        .ok = a->ok,
        .bucket = a->bucket,
        .slots = 1,
        .dtype = a->dtype,
        .x = a->x,
        .dy = a->dy,
        .stride = spec->hidden,
        .inner = spec->shared_intermediate,
        .first = MOE_WEIGHT_SHARED_GATE,
        .last = MOE_WEIGHT_SHARED_DOWN,
        .gate_up = MOE_CUDA_SHARED_GATE_UP,
        .down = MOE_CUDA_SHARED_DOWN,
        .dx = a->dx,
        .dx_stride = spec->hidden,
        .add = a->add,
        .retained = a->retained};
    if (!has_rows(f))
        return moe_ok();
    if (a->retained != NULL && a->ok != NULL)
        MOE_TRY(moe_cuda_clear_rows(tokens, 2 * (size_t)spec->shared_intermediate * sizeof(float),
                                    a->ok, a->retained, a->retained, NULL, f->stream));
    if (spec->shared_gated)
        MOE_TRY(weigh_by_gate(f));
    MOE_TRY(upload_params(f, tokens));
    MOE_TRY(begin(f));
    return rows_back(f);
}

struct moe_status moe_cuda_train_shared_end(struct moe_cuda_train_ffn *f)
{
    const struct moe_layer *layer = f->t->layer;
    if (!has_rows(f))
        return moe_ok();
    MOE_TRY(weights_back(f, NULL));
    return layer->spec.shared_gated ? gate_gradient(f, layer->device->compute) : moe_ok();
}
