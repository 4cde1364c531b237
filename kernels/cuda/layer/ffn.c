/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the kernels of an expert's network; the backend's single parts. See ffn.h. */
#include "cuda/layer/ffn.h"

#include "base/size.h"
#include "cuda/gemm/ggemm_cublas.h"
#include "cuda/gemm/quantise.h"
#include "cuda/layer/ffn_exact.h"
#include "moe/row_format.h"

/* ---------------------------------------------------------------------- choice */

/* Whether the product is that of up alone, with its activation. */
static bool is_ungated(const struct moe_layer *layer, enum moe_cuda_matrices which)
{
    return moe_cuda_is_first(which) && !moe_cuda_is_gated(&layer->spec, which);
}

static bool on_tensor_cores(const struct moe_layer *layer, enum moe_dtype dtype,
                            enum moe_cuda_matrices which)
{
    return dtype == MOE_DTYPE_BF16 && layer->desc.served[which];
}

static bool is_w8a8(const struct moe_layer *layer, enum moe_cuda_matrices which)
{
    return moe_cuda_packing_is_w8a8(layer->desc.matrix[which].packing);
}

static const struct moe_weight_format *format_of(const struct moe_layer *layer,
                                                 enum moe_cuda_matrices which)
{
    bool routed = which == MOE_CUDA_GATE_UP || which == MOE_CUDA_DOWN;
    return routed ? &layer->spec.routed_format : &layer->spec.shared_format;
}

/* Inside a step, gate and up leave hidden rows quantised if a tile has all of a group. */
static bool quantises_hidden(const struct moe_layer *layer, enum moe_dtype dtype,
                             enum moe_cuda_matrices down)
{
    enum moe_cuda_matrices up = down == MOE_CUDA_DOWN ? MOE_CUDA_GATE_UP : MOE_CUDA_SHARED_GATE_UP;
    return is_w8a8(layer, down) && on_tensor_cores(layer, dtype, down) &&
           on_tensor_cores(layer, dtype, up) && format_of(layer, down)->block_columns != 0;
}

/* Of hidden rows that are not quantised yet. W8A8 quantises fp32, never a rounded bf16. */
static enum moe_dtype hidden_dtype(const struct moe_layer *layer, enum moe_dtype dtype,
                                   enum moe_cuda_matrices down)
{
    return on_tensor_cores(layer, dtype, down) && !is_w8a8(layer, down) ? MOE_DTYPE_BF16
                                                                        : MOE_DTYPE_F32;
}

enum moe_dtype moe_cuda_ffn_out_dtype(const struct moe_layer *layer, enum moe_dtype dtype)
{
    return on_tensor_cores(layer, dtype, MOE_CUDA_DOWN) ? MOE_DTYPE_BF16 : MOE_DTYPE_F32;
}

static enum moe_cuda_gemm_tile choose_tile(const struct moe_cuda_gemm_params *params,
                                           const struct moe_cuda_matrix *m)
{
    return m->packing != MOE_CUDA_PACKING_NONE ? moe_cuda_choose_packed_tile(params)
                                               : moe_cuda_choose_tile(params);
}

static enum moe_cuda_gemm_tile tile_of(const struct moe_layer *layer,
                                       const struct moe_cuda_batch_rows *b,
                                       const struct moe_cuda_matrix *m)
{
    struct moe_cuda_gemm_params params = {.bucket = b->bucket,
                                          .slots = b->slots,
                                          .top_k = layer->spec.router.top_k,
                                          .experts = layer->spec.experts,
                                          .n = m->rows,
                                          .k = m->columns,
                                          .processors = (uint32_t)layer->device->multiprocessors};
    return choose_tile(&params, m);
}

size_t moe_cuda_ffn_hidden_bytes(const struct moe_layer *layer, enum moe_dtype dtype,
                                 uint32_t capacity)
{
    uint32_t columns = layer->spec.intermediate;
    if (quantises_hidden(layer, dtype, MOE_CUDA_DOWN))
        return moe_cuda_quantised_bytes(capacity, columns);
    return (size_t)capacity * columns * moe_dtype_bytes(hidden_dtype(layer, dtype, MOE_CUDA_DOWN));
}

/* Where a product stores its start time. */
static uint64_t *began_of(const struct moe_cuda_batch_rows *b, enum moe_stage stage)
{
    return b->began != NULL ? b->began + stage : NULL;
}

struct moe_status moe_cuda_multiply(const struct moe_layer *layer, const struct moe_cuda_ggemm *g,
                                    void *scratch, cudaStream_t stream)
{
    struct moe_cuda_cublas *cublas = layer->device->cublas;
    return cublas != NULL ? moe_cuda_cublas_enqueue(cublas, g, scratch, stream)
                          : moe_cuda_ggemm_enqueue(g, stream);
}

/* Whether the routed experts' rows come quantised: gate and up need only room for their scales. */
static bool rows_come_quantised(const struct moe_layer *layer, enum moe_dtype dtype)
{
    return moe_row_format(&layer->spec, dtype).quantised;
}

/* Scratch of one product with a result of this dtype, for tokens of `dtype`. */
static size_t product_bytes(const struct moe_layer *layer, enum moe_dtype dtype,
                            enum moe_cuda_matrices which, enum moe_dtype out_dtype, uint32_t rows)
{
    uint32_t columns = layer->desc.matrix[which].columns;
    if (is_w8a8(layer, which) && !on_tensor_cores(layer, dtype, which))
        return (size_t)rows * columns * sizeof(float);
    if (is_w8a8(layer, which))
        return moe_cuda_quantised_bytes(rows, columns) -
               (which == MOE_CUDA_GATE_UP && rows_come_quantised(layer, dtype)
                    ? moe_cuda_quantised_offset(rows, columns)
                    : 0);
    if (dtype != MOE_DTYPE_BF16 || layer->device->cublas == NULL || !layer->desc.served[which] ||
        rows == 0)
        return 0;
    return moe_cuda_cublas_scratch_bytes(moe_cuda_is_gated(&layer->spec, which), out_dtype, rows,
                                         moe_cuda_product_columns(&layer->spec, which));
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* -------------------------------------------------------------------- quantised rows */

/* What a product multiplies. */
struct product_rows {
    const void *x;
    uint32_t stride;     /* of quantised rows, in bytes, or 0 */
    const float *scales; /* of rows with that stride */
    enum moe_dtype dtype;
    const float *weight; /* of the rows, or NULL */
    uint64_t *began;     /* for the first kernel */
};

/* With W8A8 weights: quantises `in` into `scratch`, and makes it the product's rows. The exact
 * kernels get the quantised values in fp32. `q` says which rows there are. */
static struct moe_status quantise_rows(const struct moe_layer *layer, enum moe_cuda_matrices which,
                                       bool tensor_cores, struct moe_cuda_quantise q, void *scratch,
                                       struct product_rows *in, cudaStream_t stream)
{
    if (!is_w8a8(layer, which))
        return moe_ok();
    const struct moe_weight_format *f = format_of(layer, which);
    bool weighs = which == MOE_CUDA_GATE_UP && layer->spec.weighting == MOE_WEIGHT_INPUT;
    q.dtype = in->dtype;
    q.x = in->x;
    q.weight = weighs ? in->weight : NULL;
    q.columns = layer->desc.matrix[which].columns;
    q.whole_rows = f->block_columns == 0;
    q.pow2 = f->activations == MOE_ACTIVATIONS_F8_POW2;
    q.began = in->began;
    if (tensor_cores)
        q.quantised = scratch;
    else
        q.values = scratch;
    in->x = scratch;
    in->dtype = MOE_DTYPE_F32;
    in->began = NULL;
    if (weighs)
        in->weight = NULL;
    return moe_cuda_quantise_enqueue(&q, stream);
}

static struct moe_cuda_quantise routed_rows(const struct moe_cuda_batch_rows *b)
{
    return (struct moe_cuda_quantise){.experts = b->rows.local_experts,
                                      .row_capacity = b->capacity,
                                      .start = b->rows.start,
                                      .count = b->rows.count};
}

static struct moe_cuda_quantise shared_rows(const struct moe_cuda_shared *s)
{
    return (struct moe_cuda_quantise){.experts = 1,
                                      .row_capacity = s->capacity,
                                      .start = &s->params->first,
                                      .count = &s->params->tokens,
                                      .processors = s->processors};
}

struct moe_status moe_cuda_ffn_quantise_tokens(const struct moe_layer *layer, enum moe_dtype dtype,
                                               const struct moe_cuda_step_params *params,
                                               uint32_t capacity, const void *x, void *to,
                                               cudaStream_t stream)
{
    const struct moe_weight_format *f = &layer->spec.routed_format;
    const struct moe_row_format format = moe_row_format(&layer->spec, dtype);
    struct moe_cuda_quantise q = {.dtype = dtype,
                                  .x = x,
                                  .experts = 1,
                                  .row_capacity = capacity,
                                  .columns = moe_expert_width(&layer->spec),
                                  .start = &params->first,
                                  .count = &params->tokens,
                                  .whole_rows = f->block_columns == 0,
                                  .pow2 = f->activations == MOE_ACTIVATIONS_F8_POW2,
                                  .quantised = to,
                                  .row_bytes = (uint32_t)format.bytes};
    return moe_cuda_quantise_enqueue(&q, stream);
}

/* The same for rows `in` of moe/row_format.h. */
static struct moe_status unpack_rows(const struct moe_layer *layer, bool tensor_cores,
                                     struct moe_cuda_quantise q, void *scratch,
                                     struct product_rows *in, cudaStream_t stream)
{
    const struct moe_row_format format = moe_row_format(&layer->spec, in->dtype);
    struct moe_cuda_unpack u = {.rows = in->x,
                                .row_bytes = (uint32_t)format.bytes,
                                .experts = q.experts,
                                .row_capacity = q.row_capacity,
                                .columns = moe_expert_width(&layer->spec),
                                .start = q.start,
                                .count = q.count,
                                .whole_rows = layer->spec.routed_format.block_columns == 0,
                                .began = in->began};
    in->began = NULL;
    if (tensor_cores) {
        in->stride = u.row_bytes;
        in->scales = u.scales = scratch;
    } else {
        in->x = u.values = scratch;
        in->dtype = MOE_DTYPE_F32;
    }
    return moe_cuda_unpack_enqueue(&u, stream);
}

/* Common arguments of the routed experts' two products. */
static struct moe_cuda_ggemm ggemm_of(const struct moe_layer *layer,
                                      const struct moe_cuda_batch_rows *b,
                                      enum moe_cuda_matrices which, const struct product_rows *in)
{
    const struct moe_cuda_matrix *m = &layer->desc.matrix[which];
    return (struct moe_cuda_ggemm){.tile = tile_of(layer, b, m),
                                   .gated = moe_cuda_is_gated(&layer->spec, which),
                                   .relu2 = is_ungated(layer, which),
                                   .packing = m->packing,
                                   .experts = b->rows.local_experts,
                                   .row_capacity = b->capacity,
                                   .n = moe_cuda_product_columns(&layer->spec, which),
                                   .k = m->columns,
                                   .start = b->rows.start,
                                   .count = b->rows.count,
                                   .x = in->x,
                                   .x_stride = in->stride,
                                   .x_scales = in->scales,
                                   .weights = &b->params->weights[which],
                                   .row_weight = in->weight,
                                   .began = in->began,
                                   .weighting = layer->spec.weighting,
                                   .activation = layer->spec.activation,
                                   .limit = layer->spec.swiglu_limit,
                                   .alpha = layer->spec.swiglu_alpha};
}

/* --------------------------------------------------------------- routed experts */

size_t moe_cuda_ffn_scratch_bytes(const struct moe_layer *layer, enum moe_dtype dtype,
                                  uint32_t capacity)
{
    enum moe_dtype hidden = hidden_dtype(layer, dtype, MOE_CUDA_DOWN);
    return larger(
        product_bytes(layer, dtype, MOE_CUDA_GATE_UP, hidden, capacity),
        /* bf16 results (inside a step) need more scratch than fp32 ones */
        product_bytes(layer, dtype, MOE_CUDA_DOWN, moe_cuda_ffn_out_dtype(layer, dtype), capacity));
}

struct moe_status moe_cuda_ffn_gate_up(const struct moe_layer *layer, enum moe_dtype dtype,
                                       const struct moe_cuda_batch_rows *b, void *hidden,
                                       cudaStream_t stream)
{
    if (b->rows.local_experts == 0 || b->capacity == 0)
        return moe_ok();
    bool tensor_cores = on_tensor_cores(layer, dtype, MOE_CUDA_GATE_UP);
    if (b->rows.quantised != rows_come_quantised(layer, dtype))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "rows for layer %u are %squantised", layer->spec.layer,
                         b->rows.quantised ? "" : "not ");
    struct product_rows in = {.x = b->rows.x,
                              .dtype = dtype,
                              .weight = b->rows.weight,
                              .began = began_of(b, MOE_STAGE_GEMM1)};
    MOE_TRY(b->rows.quantised
                ? unpack_rows(layer, tensor_cores, routed_rows(b), b->scratch, &in, stream)
                : quantise_rows(layer, MOE_CUDA_GATE_UP, tensor_cores, routed_rows(b), b->scratch,
                                &in, stream));
    if (!tensor_cores) {
        struct moe_cuda_exact exact = {.layer = layer,
                                       .params = b->params,
                                       .rows = &b->rows,
                                       .in_dtype = in.dtype,
                                       .in = in.x,
                                       .weight = in.weight,
                                       .out = hidden,
                                       .out_dtype = hidden_dtype(layer, dtype, MOE_CUDA_DOWN),
                                       .began = in.began};
        return moe_cuda_exact_gate_up(&exact, stream);
    }
    struct moe_cuda_ggemm g = ggemm_of(layer, b, MOE_CUDA_GATE_UP, &in);
    g.has_bias = layer->spec.gate_up_bias;
    g.out_dtype = hidden_dtype(layer, dtype, MOE_CUDA_DOWN);
    if (!b->part && quantises_hidden(layer, dtype, MOE_CUDA_DOWN))
        g.out_activations = layer->spec.routed_format.activations;
    g.out = hidden;
    if (b->retains)
        g.pre = &b->params->pre[MOE_ACTIVATION_ROUTED];
    return moe_cuda_multiply(layer, &g, b->scratch, stream);
}

struct moe_status moe_cuda_ffn_down(const struct moe_layer *layer, enum moe_dtype dtype,
                                    const struct moe_cuda_batch_rows *b, const void *hidden,
                                    void *out, enum moe_dtype out_dtype, cudaStream_t stream)
{
    if (b->rows.local_experts == 0 || b->capacity == 0)
        return moe_ok();
    bool tensor_cores = on_tensor_cores(layer, dtype, MOE_CUDA_DOWN);
    struct product_rows in = {.x = hidden,
                              .dtype = hidden_dtype(layer, dtype, MOE_CUDA_DOWN),
                              .weight = b->rows.weight,
                              .began = began_of(b, MOE_STAGE_GEMM2)};
    if (b->part || !quantises_hidden(layer, dtype, MOE_CUDA_DOWN))
        MOE_TRY(quantise_rows(layer, MOE_CUDA_DOWN, tensor_cores, routed_rows(b), b->scratch, &in,
                              stream));
    if (!tensor_cores) {
        struct moe_cuda_exact exact = {.layer = layer,
                                       .params = b->params,
                                       .rows = &b->rows,
                                       .in_dtype = in.dtype,
                                       .in = in.x,
                                       .weight = in.weight,
                                       .out = out,
                                       .began = in.began};
        return moe_cuda_exact_down(&exact, stream);
    }
    struct moe_cuda_ggemm g = ggemm_of(layer, b, MOE_CUDA_DOWN, &in);
    g.has_bias = layer->spec.down_bias;
    g.out_dtype = out_dtype;
    g.out = out;
    return moe_cuda_multiply(layer, &g, b->scratch, stream);
}

/* ---------------------------------------------------------------- shared expert */

/* Scratch of the shared expert: the tokens' weights, the activations, a product's scratch. */
struct shared_scratch {
    float *weight;
    void *hidden, *product;
};

enum { LINE = 256 };

static size_t in_lines(size_t bytes)
{
    return (bytes + LINE - 1) / LINE * LINE;
}

/* Room for hidden rows in fp32 or quantised. */
static size_t shared_hidden_bytes(const struct moe_layer *layer, uint32_t tokens)
{
    uint32_t inner = layer->spec.shared_intermediate;
    return in_lines(
        larger((size_t)tokens * inner * sizeof(float),
               is_w8a8(layer, MOE_CUDA_SHARED_DOWN) ? moe_cuda_quantised_bytes(tokens, inner) : 0));
}

static bool shared_on_tensor_cores(const struct moe_layer *layer, enum moe_dtype dtype)
{
    return on_tensor_cores(layer, dtype, MOE_CUDA_SHARED_GATE_UP) &&
           on_tensor_cores(layer, dtype, MOE_CUDA_SHARED_DOWN);
}

size_t moe_cuda_ffn_shared_bytes(const struct moe_layer *layer, enum moe_dtype dtype,
                                 uint32_t tokens)
{
    if (layer->spec.shared_intermediate == 0)
        return 0;
    return in_lines(tokens * sizeof(float)) + shared_hidden_bytes(layer, tokens) +
           larger(product_bytes(layer, dtype, MOE_CUDA_SHARED_GATE_UP, MOE_DTYPE_BF16, tokens),
                  product_bytes(layer, dtype, MOE_CUDA_SHARED_DOWN, MOE_DTYPE_F32, tokens));
}

static struct shared_scratch lay_out_shared(const struct moe_layer *layer,
                                            const struct moe_cuda_shared *s)
{
    size_t weights = in_lines((size_t)s->capacity * sizeof(float));
    size_t hidden = shared_hidden_bytes(layer, s->capacity);
    char *base = s->scratch;
    return (struct shared_scratch){
        .weight = s->scratch, .hidden = base + weights, .product = base + weights + hidden};
}

/* Whether the shared expert multiplies rows with the bits of those for the routed experts. */
static bool shares_rows(const struct moe_layer *layer, const struct moe_cuda_shared *s)
{
    const struct moe_weight_format *f = &layer->spec.shared_format, *r = &layer->spec.routed_format;
    return s->rows != NULL && is_w8a8(layer, MOE_CUDA_SHARED_GATE_UP) &&
           f->activations == r->activations && f->block_columns == r->block_columns &&
           layer->spec.latent == 0;
}

/* Quantises the tokens for gate and up, if they multiply quantised rows. */
static struct moe_status quantise_shared(const struct moe_layer *layer,
                                         const struct moe_cuda_shared *s, bool tensor_cores,
                                         void *scratch, struct product_rows *in,
                                         cudaStream_t stream)
{
    if (!shares_rows(layer, s))
        return quantise_rows(layer, MOE_CUDA_SHARED_GATE_UP, tensor_cores, shared_rows(s), scratch,
                             in, stream);
    in->x = s->rows;
    return unpack_rows(layer, tensor_cores, shared_rows(s), scratch, in, stream);
}

static struct moe_status shared_product(const struct moe_layer *layer,
                                        const struct moe_cuda_shared *s,
                                        const struct shared_scratch *at,
                                        enum moe_cuda_matrices which, struct product_rows in,
                                        enum moe_dtype out_dtype, void *out, cudaStream_t stream)
{
    const struct moe_cuda_matrix *m = &layer->desc.matrix[which];
    bool quantises = quantises_hidden(layer, s->dtype, MOE_CUDA_SHARED_DOWN);
    if (moe_cuda_is_first(which))
        MOE_TRY(quantise_shared(layer, s, true, at->product, &in, stream));
    else if (!quantises)
        MOE_TRY(quantise_rows(layer, which, true, shared_rows(s), at->product, &in, stream));
    const uint32_t all = (uint32_t)layer->device->multiprocessors;
    struct moe_cuda_gemm_params params = {.bucket = s->bucket,
                                          .slots = 1,
                                          .top_k = 1,
                                          .experts = 1,
                                          .n = m->rows,
                                          .k = m->columns,
                                          .processors = s->processors != 0 ? s->processors : all};
    struct moe_cuda_ggemm g = {.tile = choose_tile(&params, m),
                               .gated = moe_cuda_is_gated(&layer->spec, which),
                               .relu2 = is_ungated(layer, which),
                               .packing = m->packing,
                               .experts = 1,
                               .row_capacity = s->capacity,
                               .n = moe_cuda_product_columns(&layer->spec, which),
                               .k = m->columns,
                               .start = &s->params->first,
                               .count = &s->params->tokens,
                               .x = in.x,
                               .x_stride = in.stride,
                               .x_scales = in.scales,
                               .weights = &s->params->weights[which],
                               .row_weight = in.weight,
                               .weighting = MOE_WEIGHT_OUTPUT_LATE,
                               .activation = layer->spec.shared_activation,
                               .limit = layer->spec.swiglu_limit,
                               .alpha = layer->spec.swiglu_alpha,
                               .out_dtype = out_dtype,
                               .out = out,
                               .began = in.began,
                               .processors = s->processors};
    if (quantises && moe_cuda_is_first(which))
        g.out_activations = layer->spec.shared_format.activations;
    if (s->retains && moe_cuda_is_first(which))
        g.pre = &s->params->pre[MOE_ACTIVATION_SHARED];
    return moe_cuda_multiply(layer, &g, at->product, stream);
}

static struct moe_status shared_exactly(const struct moe_layer *layer,
                                        const struct moe_cuda_shared *s,
                                        const struct shared_scratch *at, struct product_rows in,
                                        cudaStream_t stream)
{
    struct product_rows hidden = {.x = at->hidden, .dtype = MOE_DTYPE_F32, .weight = in.weight};
    MOE_TRY(quantise_shared(layer, s, false, at->product, &in, stream));
    struct moe_cuda_exact up = {.layer = layer,
                                .params = s->params,
                                .in_dtype = in.dtype,
                                .in = in.x,
                                .out = at->hidden,
                                .out_dtype = MOE_DTYPE_F32,
                                .began = in.began};
    MOE_TRY(moe_cuda_exact_gate_up(&up, stream));
    MOE_TRY(quantise_rows(layer, MOE_CUDA_SHARED_DOWN, false, shared_rows(s), at->product, &hidden,
                          stream));
    struct moe_cuda_exact down = {.layer = layer,
                                  .params = s->params,
                                  .in_dtype = hidden.dtype,
                                  .in = hidden.x,
                                  .weight = hidden.weight,
                                  .out = s->out};
    return moe_cuda_exact_down(&down, stream);
}

struct moe_status moe_cuda_ffn_shared(const struct moe_layer *layer,
                                      const struct moe_cuda_shared *s, cudaStream_t stream)
{
    struct shared_scratch at = lay_out_shared(layer, s);
    struct product_rows x = {.x = s->x, .dtype = s->dtype, .began = s->began};
    if (layer->spec.shared_gated) {
        MOE_TRY(moe_cuda_shared_weights(layer, s->params, s->dtype, s->capacity, s->x, at.weight,
                                        x.began, stream));
        x.weight = at.weight;
        x.began = NULL;
    }
    if (!shared_on_tensor_cores(layer, s->dtype))
        return shared_exactly(layer, s, &at, x, stream);
    struct product_rows hidden = {.x = at.hidden,
                                  .dtype = hidden_dtype(layer, s->dtype, MOE_CUDA_SHARED_DOWN),
                                  .weight = x.weight};
    MOE_TRY(
        shared_product(layer, s, &at, MOE_CUDA_SHARED_GATE_UP, x, hidden.dtype, at.hidden, stream));
    return shared_product(layer, s, &at, MOE_CUDA_SHARED_DOWN, hidden, MOE_DTYPE_F32, s->out,
                          stream);
}

/* ------------------------------------------------------------------- parts alone */

static struct moe_status check_part(const struct moe_layer *layer)
{
    if (!layer->finished)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_MISSING,
                         "layer %u is not finished", layer->spec.layer);
    return moe_cuda_device_use(layer->device);
}

static struct moe_status check_dtype(enum moe_dtype dtype)
{
    if (dtype != MOE_DTYPE_F32 && dtype != MOE_DTYPE_BF16)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED,
                         "tokens are neither F32 nor BF16");
    return moe_ok();
}

/* Reads the number of rows and uploads the layer's step parameters. Waits, as a single part may. */
static struct moe_status measure_rows(struct moe_layer *layer, const struct moe_rows *rows,
                                      struct moe_cuda_batch_rows *b)
{
    *b = (struct moe_cuda_batch_rows){.rows = *rows, .slots = 1};
    if (rows->local_experts != layer->local_experts)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "rows of %u experts, %u are here", rows->local_experts,
                         layer->local_experts);
    if (rows->local_experts == 0)
        return moe_ok();
    MOE_TRY(moe_cuda_mem_copy(layer->device, &b->capacity, rows->start + rows->local_experts,
                              sizeof b->capacity));
    b->bucket = b->capacity / layer->spec.router.top_k + 1;
    struct moe_cuda_step_params params;
    moe_cuda_step_params_fill(layer, MOE_DTYPE_NONE, 0, 0, &params);
    return moe_cuda_step_params_upload(layer, &params, &b->params);
}

/* Common state of both parts, with its memory. */
struct part {
    struct moe_cuda_batch_rows b;
    enum moe_dtype inner; /* of hidden inside a step */
    size_t elements;      /* of hidden */
    void *narrow;         /* buffer for hidden if `inner` is not F32, else NULL */
    size_t narrow_bytes, scratch_bytes;
};

static void end_part(struct moe_layer *layer, struct part *p)
{
    moe_cuda_mem_free(layer->device, MOE_MEM_DEVICE, p->narrow, p->narrow_bytes);
    moe_cuda_mem_free(layer->device, MOE_MEM_DEVICE, p->b.scratch, p->scratch_bytes);
}

static struct moe_status begin_part(struct moe_layer *layer, enum moe_dtype dtype,
                                    const struct moe_rows *rows, struct part *p)
{
    *p = (struct part){.inner = MOE_DTYPE_F32};
    MOE_TRY(check_part(layer));
    MOE_TRY(check_dtype(dtype));
    MOE_TRY(measure_rows(layer, rows, &p->b));
    p->b.part = true;
    p->inner = hidden_dtype(layer, dtype, MOE_CUDA_DOWN);
    p->elements = (size_t)p->b.capacity * layer->spec.intermediate;
    p->narrow_bytes = p->inner == MOE_DTYPE_F32 ? 0 : p->elements * sizeof(uint16_t);
    p->scratch_bytes = moe_cuda_ffn_scratch_bytes(layer, dtype, p->b.capacity);
    MOE_TRY(moe_cuda_mem_alloc(layer->device, MOE_MEM_DEVICE, p->narrow_bytes, &p->narrow));
    struct moe_status st =
        moe_cuda_mem_alloc(layer->device, MOE_MEM_DEVICE, p->scratch_bytes, &p->b.scratch);
    if (moe_failed(&st))
        end_part(layer, p);
    return st;
}

struct moe_status moe_cuda_gemm_gate_up(struct moe_layer *layer, enum moe_dtype dtype,
                                        const struct moe_rows *rows, float *hidden)
{
    struct part p;
    struct moe_status st;
    MOE_TRY(begin_part(layer, dtype, rows, &p));
    cudaStream_t stream = layer->device->compute;
    void *to = p.narrow != NULL ? p.narrow : hidden;
    MOE_TRY_GOTO(st, moe_cuda_ffn_gate_up(layer, dtype, &p.b, to, stream), done);
    if (p.narrow != NULL)
        MOE_TRY_GOTO(st, moe_cuda_widen(p.narrow, hidden, p.elements, stream), done);
    st = moe_cuda_device_finish(layer->device);
done:
    end_part(layer, &p);
    return st;
}

struct moe_status moe_cuda_gemm_down(struct moe_layer *layer, enum moe_dtype dtype,
                                     const struct moe_rows *rows, const float *hidden, float *out)
{
    struct part p;
    struct moe_status st;
    MOE_TRY(begin_part(layer, dtype, rows, &p));
    cudaStream_t stream = layer->device->compute;
    const void *from = p.narrow != NULL ? p.narrow : hidden;
    if (p.narrow != NULL)
        MOE_TRY_GOTO(st, moe_cuda_narrow(hidden, p.narrow, p.elements, stream), done);
    MOE_TRY_GOTO(st, moe_cuda_ffn_down(layer, dtype, &p.b, from, out, MOE_DTYPE_F32, stream), done);
    st = moe_cuda_device_finish(layer->device);
done:
    end_part(layer, &p);
    return st;
}

struct moe_status moe_cuda_shared_forward(struct moe_layer *layer, enum moe_dtype dtype,
                                          uint32_t tokens, const void *x, float *y)
{
    struct moe_device *device = layer->device;
    MOE_TRY(check_part(layer));
    MOE_TRY(check_dtype(dtype));
    if (layer->spec.shared_intermediate == 0 || tokens == 0)
        return moe_ok();
    size_t n = (size_t)tokens * layer->spec.hidden, out_bytes = in_lines(n * sizeof *y);
    size_t bytes = out_bytes + moe_cuda_ffn_shared_bytes(layer, dtype, tokens);
    struct moe_cuda_shared s = {
        .dtype = dtype, .bucket = moe_pow2_ceil(tokens), .capacity = tokens, .x = x};
    struct moe_cuda_step_params params;
    moe_cuda_step_params_fill(layer, dtype, 0, tokens, &params);
    MOE_TRY(moe_cuda_step_params_upload(layer, &params, &s.params));
    void *out;
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_DEVICE, bytes, &out));
    s.out = out;
    s.scratch = (char *)out + out_bytes;
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_cuda_ffn_shared(layer, &s, device->compute), done);
    MOE_TRY_GOTO(st, moe_cuda_add(y, out, n, device->compute), done);
    st = moe_cuda_device_finish(device);
done:
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, out, bytes);
    return st;
}
