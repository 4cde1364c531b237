/* SPDX-License-Identifier: Apache-2.0 */
/* The products of a backward pass on Hopper's tensor cores; see train_ffn.h. Nothing here waits.
 * Sizes that depend on the routing are read on the device. */
#include "cuda/gemm/ggemm_wgrad.h"
#include "cuda/layer/ffn_exact.h"
#include "cuda/training/train_ffn.h"

/* What the products of a network have in common; n, k: columns of the result, and depth. */
static struct moe_cuda_ggemm product_of(const struct moe_cuda_train_ffn *f,
                                        enum moe_cuda_matrices which, uint32_t n, uint32_t k)
{
    const struct moe_layer_spec *spec = &f->t->layer->spec;
    const enum moe_cuda_packing packing = f->t->layer->desc.matrix[which].packing;
    struct moe_cuda_gemm_params params = {.bucket = f->bucket,
                                          .slots = f->slots,
                                          .top_k = f->shared ? 1 : spec->router.top_k,
                                          .experts = f->shared ? 1 : spec->experts,
                                          .n = n,
                                          .k = k};
    return (struct moe_cuda_ggemm){
        .tile = packing != MOE_CUDA_PACKING_NONE ? moe_cuda_choose_packed_tile(&params)
                                                 : moe_cuda_choose_tile(&params),
        .packing = packing,
        .experts = f->rows.groups,
        .row_capacity = f->rows.rows,
        .n = n,
        .k = k,
        .start = f->shared ? &f->params->first : f->rows.start,
        .count = f->shared ? &f->params->tokens : f->rows.count,
        .weights = &f->params->weights[which],
        .weighting = MOE_WEIGHT_OUTPUT_LATE,
        .processors = f->processors,
    };
}

struct moe_status moe_cuda_train_tensor_pre(const struct moe_cuda_train_ffn *f)
{
    uint32_t hidden = f->t->layer->spec.hidden;
    struct moe_cuda_ggemm pre = product_of(f, f->gate_up, 2 * f->padded, hidden);
    pre.x = f->x;
    pre.x_stride = f->stride;
    pre.out_dtype = MOE_DTYPE_F32;
    pre.out = f->pre;
    return moe_cuda_ggemm_enqueue(&pre, f->stream);
}

struct moe_status moe_cuda_train_tensor_dh(const struct moe_cuda_train_ffn *f)
{
    uint32_t hidden = f->t->layer->spec.hidden;
    struct moe_cuda_ggemm dh = product_of(f, f->down, f->inner, hidden);
    dh.back = true;
    dh.x = f->dy;
    dh.x_stride = f->stride;
    dh.out_dtype = MOE_DTYPE_BF16;
    dh.out = f->dh;
    return moe_cuda_ggemm_enqueue(&dh, f->stream);
}

struct moe_status moe_cuda_train_tensor_dx(const struct moe_cuda_train_ffn *f)
{
    struct moe_device *device = f->t->layer->device;
    uint32_t hidden = f->t->layer->spec.hidden;
    size_t n = (size_t)f->rows.rows * hidden;
    struct moe_cuda_ggemm dx = product_of(f, f->gate_up, hidden, 2 * f->padded);
    void *apart;
    dx.back = true;
    dx.x = f->dgu;
    dx.out_dtype = MOE_DTYPE_F32;
    dx.out = f->dx;
    dx.out_stride = f->dx_stride;
    if (!f->add)
        return moe_cuda_ggemm_enqueue(&dx, f->stream);
    MOE_TRY(
        moe_cuda_train_scratch_take(device, MOE_CUDA_SCRATCH_ADDEND, n * sizeof(float), &apart));
    dx.out = apart;
    MOE_TRY(moe_cuda_ggemm_enqueue(&dx, f->stream));
    return moe_cuda_add(f->dx, apart, n, f->stream);
}

/* How many of the experts' gradients of a weight are computed during the overlap, and on how many
 * multiprocessors. */
struct overlapped {
    uint32_t experts, processors;
};

/* dW (+)= dy^T x. A gradient that only counts as zero is overwritten, which is much cheaper. */
static struct moe_status weight_gradient(const struct moe_cuda_train_ffn *f, enum moe_weight weight,
                                         struct moe_cuda_wgrad *w, struct overlapped overlapped)
{
    cudaStream_t stream = f->t->layer->device->compute;
    struct moe_cuda_block *block = moe_cuda_train_moving(f, weight);
    if (block == NULL)
        return moe_ok();
    w->row_capacity = f->rows.rows;
    w->start = f->shared ? &f->params->first : f->rows.start;
    w->count = f->shared ? &f->params->tokens : f->rows.count;
    w->accumulate = !block->grad_is_zero;
    w->dw = block->grad;
    block->grad_is_zero = false;
    if (overlapped.experts > 0) {
        w->experts = overlapped.experts;
        w->processors = overlapped.processors;
        MOE_TRY(moe_cuda_wgrad_enqueue(w, stream));
    }
    if (overlapped.experts == f->rows.groups)
        return moe_ok();
    w->start += overlapped.experts;
    w->count += overlapped.experts;
    w->dw += (size_t)overlapped.experts * w->n * w->k;
    w->experts = f->rows.groups - overlapped.experts;
    w->processors = 0;
    return moe_cuda_wgrad_enqueue(w, stream);
}

/* Takes from *left, which counts gradients of down; a gradient of this weight counts as `each` of
 * them. */
static struct overlapped overlapped_of(const struct moe_cuda_train_ffn *f, uint32_t processors,
                                       uint32_t each, uint32_t *left)
{
    uint32_t experts = (*left + each - 1) / each;
    if (experts > f->rows.groups)
        experts = f->rows.groups;
    *left -= experts * each < *left ? experts * each : *left;
    return (struct overlapped){experts, processors};
}

struct moe_status moe_cuda_train_tensor_weights(const struct moe_cuda_train_ffn *f,
                                                const struct moe_cuda_overlap_plan *overlap)
{
    static const struct moe_cuda_overlap_plan alone = {0};
    const struct moe_cuda_overlap_plan *c = overlap != NULL ? overlap : &alone;
    uint32_t hidden = f->t->layer->spec.hidden;
    /* gate and up together are twice as large as down */
    uint32_t left = c->processors > 0 ? (uint32_t)(c->share * 3 * f->rows.groups + 0.5) : 0;
    struct overlapped first = overlapped_of(f, c->processors, 2, &left);
    struct overlapped second = overlapped_of(f, c->processors, 1, &left);
    struct moe_cuda_wgrad gate_up = {
        .n = 2 * f->padded, .k = hidden, .dy = f->dgu, .x = f->x, .x_stride = f->stride};
    struct moe_cuda_wgrad down = {
        .n = hidden, .k = f->inner, .dy = f->dy, .dy_stride = f->stride, .x = f->dh};
    moe_cuda_train_ffn_mark(f, MOE_BACKWARD_WGRAD_GATE_UP);
    MOE_TRY(weight_gradient(f, f->first, &gate_up, first));
    moe_cuda_train_ffn_mark(f, MOE_BACKWARD_WGRAD_DOWN);
    return weight_gradient(f, f->last, &down, second);
}
