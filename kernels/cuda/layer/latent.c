/* SPDX-License-Identifier: Apache-2.0 */
/* See latent.h. */
#include "cuda/layer/latent.h"

#include "cuda/gemm/ggemm_cublas.h"
#include "cuda/layer/ffn.h"
#include "cuda/layer/ffn_exact.h"

static size_t product_bytes(const struct moe_layer *layer, enum moe_cuda_matrices which,
                            enum moe_dtype out, uint32_t bucket)
{
    if (layer->device->cublas == NULL || !layer->desc.served[which] || bucket == 0)
        return 0;
    return moe_cuda_cublas_scratch_bytes(false, out, bucket,
                                         moe_cuda_product_columns(&layer->spec, which));
}

size_t moe_cuda_latent_scratch_bytes(const struct moe_layer *layer, enum moe_dtype dtype,
                                     uint32_t bucket)
{
    if (layer->spec.latent == 0 || dtype != MOE_DTYPE_BF16)
        return 0;
    size_t to = product_bytes(layer, MOE_CUDA_TO_LATENT, dtype, bucket);
    size_t from = product_bytes(layer, MOE_CUDA_FROM_LATENT, MOE_DTYPE_F32, bucket);
    return to > from ? to : from;
}

/* out [T, columns] of `out_dtype` = in W^T */
static struct moe_status multiply(const struct moe_cuda_latent *l, enum moe_cuda_matrices which,
                                  const void *in, void *out, enum moe_dtype out_dtype,
                                  cudaStream_t stream)
{
    const struct moe_layer *layer = l->layer;
    const struct moe_cuda_matrix *m = &layer->desc.matrix[which];
    if (l->dtype != MOE_DTYPE_BF16 || !layer->desc.served[which]) {
        const struct moe_cuda_exact exact = {.layer = layer,
                                             .params = l->params,
                                             .in_dtype = l->dtype,
                                             .in = in,
                                             .out = out,
                                             .out_dtype = out_dtype};
        return moe_cuda_exact_linear(&exact, which, stream);
    }
    const uint32_t all = (uint32_t)layer->device->multiprocessors;
    const struct moe_cuda_gemm_params shape = {.bucket = l->bucket,
                                               .slots = 1,
                                               .top_k = 1,
                                               .experts = 1,
                                               .n = m->rows,
                                               .k = m->columns,
                                               .processors =
                                                   l->processors != 0 ? l->processors : all};
    const struct moe_cuda_ggemm g = {.tile = moe_cuda_choose_tile(&shape),
                                     .experts = 1,
                                     .row_capacity = l->bucket,
                                     .n = m->rows,
                                     .k = m->columns,
                                     .start = &l->params->first,
                                     .count = &l->params->tokens,
                                     .x = in,
                                     .weights = &l->params->weights[which],
                                     .out_dtype = out_dtype,
                                     .out = out,
                                     .processors = l->processors};
    return moe_cuda_multiply(layer, &g, l->scratch, stream);
}

struct moe_status moe_cuda_to_latent(const struct moe_cuda_latent *l, const void *x, void *z,
                                     cudaStream_t stream)
{
    return multiply(l, MOE_CUDA_TO_LATENT, x, z, l->dtype, stream);
}

struct moe_status moe_cuda_from_latent(const struct moe_cuda_latent *l,
                                       const struct moe_cuda_latent_sums *f, cudaStream_t stream)
{
    if (l->layer->spec.latent_norm)
        MOE_TRY(moe_cuda_latent_normalise(l, f->u, stream));
    MOE_TRY(multiply(l, MOE_CUDA_FROM_LATENT, f->u, f->out, MOE_DTYPE_F32, stream));
    return moe_cuda_latent_finish(l, f, stream);
}
