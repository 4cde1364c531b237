/* SPDX-License-Identifier: Apache-2.0 */
/* From the gradient of the logits to router, logit bias and x; see train_stages.h. On tensor cores
 * the parts of the fp32 operands lie next to each other (train_kernels.h). So each gradient is one
 * grouped product with one group: dx = [parts of dlogits] [parts of W_r]; dW_r is the sum of the
 * rows from the high and the low part of dlogits. */
#include "cuda/gemm/ggemm_wgrad.h"
#include "cuda/layer/ffn_exact.h"
#include "cuda/training/train_stages.h"

enum { LINE = 256 };

/* What the kernels read from device memory: the only group, and the stacked router. */
struct logits_params {
    struct moe_cuda_ggemm_weights stacked;
    const struct moe_cuda_ggemm_weights *weights; /* at `stacked`, on the device */
    uint32_t start, count;
};

/* Scratch, in device memory. */
struct logits_scratch {
    struct logits_params *params;
    void *dlogits; /* [T, parts * choices] bf16 */
    void *router;  /* [parts * choices, H] bf16 */
    float *sums;   /* [2 * choices, H]: products of the parts of dlogits with x */
    void *x;       /* [T, H] bf16, with zeros where `use` excludes rows */
    size_t bytes;
};

static uint32_t choices_of(const struct moe_layer *layer)
{
    return layer->spec.experts + layer->spec.router.zero_experts;
}

static bool router_is_narrow(const struct moe_layer *layer)
{
    return layer->desc.matrix[MOE_CUDA_ROUTER].dtype == MOE_DTYPE_BF16;
}

static uint32_t parts_of(const struct moe_layer *layer)
{
    return router_is_narrow(layer) ? MOE_CUDA_LOGIT_PARTS_BF16 : MOE_CUDA_LOGIT_PARTS_F32;
}

static bool on_tensor_cores(const struct moe_layer *layer, enum moe_dtype dtype)
{
    return dtype == MOE_DTYPE_BF16 && layer->device->cublas == NULL &&
           moe_cuda_ggemm_serves(choices_of(layer), layer->spec.hidden) &&
           (router_is_narrow(layer) || layer->desc.matrix[MOE_CUDA_ROUTER_PARTS].data != NULL);
}

/* ------------------------------------------------------------------------ exactly */

static struct moe_status router_gradient(struct moe_trainer *t,
                                         const struct moe_cuda_logits_backward *a, float *grad)
{
    struct moe_cuda_exact_dw g = {.rows = {.groups = 1, .rows = a->tokens, .use = a->use},
                                  .y_dtype = MOE_DTYPE_F32,
                                  .x_dtype = a->dtype,
                                  .y = a->dlogits,
                                  .x = a->x,
                                  .n = choices_of(t->layer),
                                  .k = t->layer->spec.hidden,
                                  .scale = 1.0f,
                                  .out = grad};
    return moe_cuda_exact_wgrad(&g, t->layer->device->compute);
}

static struct moe_status bias_gradient(struct moe_trainer *t,
                                       const struct moe_cuda_logits_backward *a, float *grad)
{
    uint32_t choices = choices_of(t->layer);
    struct moe_cuda_column_sum g = {.rows = {.groups = 1, .rows = a->tokens, .use = a->use},
                                    .y_dtype = MOE_DTYPE_F32,
                                    .y = a->dlogits,
                                    .n = choices,
                                    .stride = choices,
                                    .step = MOE_CUDA_INTERLEAVE,
                                    .out = grad};
    return moe_cuda_exact_column_sum(&g, t->layer->device->compute);
}

static struct moe_status exact_dx(struct moe_trainer *t, const struct moe_cuda_logits_backward *a)
{
    const struct moe_cuda_matrix *router = &t->layer->desc.matrix[MOE_CUDA_ROUTER];
    struct moe_cuda_exact_dx g = {.rows = {.groups = 1, .rows = a->tokens, .use = a->use},
                                  .y_dtype = MOE_DTYPE_F32,
                                  .w_dtype = router->dtype,
                                  .y = a->dlogits,
                                  .w = router->data,
                                  .n = choices_of(t->layer),
                                  .k = t->layer->spec.hidden,
                                  .out = a->dx,
                                  .out_stride = t->layer->spec.hidden,
                                  .add = a->add};
    return moe_cuda_exact_dgrad(&g, t->layer->device->compute);
}

/* ---------------------------------------------------------------- on tensor cores */

static void *place(char *base, size_t *at, size_t bytes)
{
    void *p = base == NULL ? NULL : base + *at;
    *at += (bytes + LINE - 1) / LINE * LINE;
    return p;
}

/* With NULL only `bytes` is set. Sizes are small multiples of existing tensors. */
static struct logits_scratch lay_out(const struct moe_layer *layer, uint32_t tokens, void *base)
{
    size_t choices = choices_of(layer), hidden = layer->spec.hidden, parts = parts_of(layer);
    struct logits_scratch s = {.bytes = 0};
    s.params = place(base, &s.bytes, sizeof *s.params);
    s.dlogits = place(base, &s.bytes, tokens * parts * choices * sizeof(uint16_t));
    s.router = place(base, &s.bytes, parts * choices * hidden * sizeof(uint16_t));
    s.sums = place(base, &s.bytes, 2 * choices * hidden * sizeof(float));
    s.x = place(base, &s.bytes, tokens * hidden * sizeof(uint16_t));
    return s;
}

static struct moe_status take_scratch(struct moe_layer *layer, uint32_t tokens,
                                      struct logits_scratch *out)
{
    void *base;
    *out = lay_out(layer, tokens, NULL);
    MOE_TRY(moe_cuda_train_scratch_take(layer->device, MOE_CUDA_SCRATCH_ROUTER, out->bytes, &base));
    *out = lay_out(layer, tokens, base);
    return moe_ok();
}

struct moe_status moe_cuda_train_reserve_logits(struct moe_trainer *t, enum moe_dtype dtype,
                                                uint32_t tokens)
{
    struct logits_scratch unused;
    return on_tensor_cores(t->layer, dtype) ? take_scratch(t->layer, tokens, &unused) : moe_ok();
}

/* The operands, in parts. */
static struct moe_status split(struct moe_layer *layer, const struct moe_cuda_logits_backward *a,
                               const struct logits_scratch *s)
{
    cudaStream_t stream = layer->device->compute;
    uint32_t choices = choices_of(layer), hidden = layer->spec.hidden, parts = parts_of(layer);
    enum moe_cuda_matrices from = router_is_narrow(layer) ? MOE_CUDA_ROUTER : MOE_CUDA_ROUTER_PARTS;
    struct logits_params params = {.weights = &s->params->stacked, .count = a->tokens};
    MOE_TRY(moe_cuda_ggemm_describe(s->router, 1, parts * choices, hidden, &params.stacked));
    /* From pageable memory: it has been read when this returns. */
    MOE_TRY(MOE_CUDA(
        cudaMemcpyAsync(s->params, &params, sizeof params, cudaMemcpyHostToDevice, stream)));
    MOE_TRY(
        moe_cuda_split_logits(a->tokens, choices, parts, a->use, a->dlogits, s->dlogits, stream));
    return moe_cuda_stack_router(choices, hidden, parts, layer->desc.matrix[from].data, s->router,
                                 stream);
}

static struct moe_status tensor_dx(struct moe_layer *layer,
                                   const struct moe_cuda_logits_backward *a,
                                   const struct logits_scratch *s)
{
    cudaStream_t stream = layer->device->compute;
    size_t n = (size_t)a->tokens * layer->spec.hidden;
    void *apart = a->dx;
    struct moe_cuda_gemm_params params = {.bucket = a->tokens,
                                          .slots = 1,
                                          .top_k = 1,
                                          .experts = 1,
                                          .n = layer->spec.hidden,
                                          .k = parts_of(layer) * choices_of(layer)};
    if (a->add)
        MOE_TRY(moe_cuda_train_scratch_take(layer->device, MOE_CUDA_SCRATCH_ADDEND,
                                            n * sizeof(float), &apart));
    struct moe_cuda_ggemm g = {.tile = moe_cuda_choose_tile(&params),
                               .back = true,
                               .experts = 1,
                               .row_capacity = a->tokens,
                               .n = params.n,
                               .k = params.k,
                               .start = &s->params->start,
                               .count = &s->params->count,
                               .x = s->dlogits,
                               .weights = &s->params->weights,
                               .weighting = MOE_WEIGHT_OUTPUT_LATE,
                               .out_dtype = MOE_DTYPE_F32,
                               .out = apart};
    MOE_TRY(moe_cuda_ggemm_enqueue(&g, stream));
    return a->add ? moe_cuda_add(a->dx, apart, n, stream) : moe_ok();
}

static struct moe_status tensor_gradient(struct moe_layer *layer,
                                         const struct moe_cuda_logits_backward *a,
                                         const struct logits_scratch *s, float *grad)
{
    cudaStream_t stream = layer->device->compute;
    uint32_t choices = choices_of(layer), hidden = layer->spec.hidden;
    struct moe_cuda_wgrad w = {.experts = 1,
                               .row_capacity = a->tokens,
                               .n = 2 * choices,
                               .k = hidden,
                               .start = &s->params->start,
                               .count = &s->params->count,
                               .dy = s->dlogits,
                               .dy_stride = parts_of(layer) * choices,
                               .x = a->x,
                               .dw = s->sums};
    if (a->use != NULL) { /* zeros in dlogits would not stop a NaN of a token that does not count */
        MOE_TRY(moe_cuda_clear_rows(a->tokens, hidden * sizeof(uint16_t), a->use, a->x, s->x, NULL,
                                    stream));
        w.x = s->x;
    }
    MOE_TRY(moe_cuda_wgrad_enqueue(&w, stream));
    return moe_cuda_add_parts((size_t)choices * hidden, s->sums, grad, stream);
}

/* ----------------------------------------------------------------------- either way */

/* *grad: where this pass adds to a weight's gradient, or NULL. */
static struct moe_status take_grad(struct moe_trainer *t, enum moe_weight w, bool accumulate,
                                   float **grad)
{
    struct moe_cuda_block *b = moe_cuda_trainer_block(t, w, MOE_PART_WEIGHT);
    *grad = NULL;
    if (!accumulate || b == NULL || !moe_cuda_block_moves(t, b))
        return moe_ok();
    *grad = b->grad;
    return moe_cuda_block_clear_grad(t, b);
}

struct moe_status moe_cuda_train_logits_backward(struct moe_trainer *t,
                                                 const struct moe_cuda_logits_backward *a)
{
    struct moe_layer *layer = t->layer;
    bool tensor = on_tensor_cores(layer, a->dtype);
    struct logits_scratch s = {0};
    float *router, *bias;
    if (a->tokens == 0)
        return moe_ok();
    MOE_TRY(take_grad(t, MOE_WEIGHT_ROUTER, a->accumulate, &router));
    MOE_TRY(take_grad(t, MOE_WEIGHT_LOGIT_BIAS, a->accumulate, &bias));
    if (tensor) {
        MOE_TRY(take_scratch(layer, a->tokens, &s));
        MOE_TRY(split(layer, a, &s));
    }
    if (router != NULL)
        MOE_TRY(tensor ? tensor_gradient(layer, a, &s, router) : router_gradient(t, a, router));
    if (bias != NULL)
        MOE_TRY(bias_gradient(t, a, bias));
    return tensor ? tensor_dx(layer, a, &s) : exact_dx(t, a);
}
