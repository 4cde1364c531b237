/* SPDX-License-Identifier: Apache-2.0 */
/* The experts' feed-forward networks on a GPU: enqueued, never waiting, driven by counts that are
 * in device memory only. Picks the tensor-core grouped GEMM (ggemm.h) where dtype, shape and device
 * allow, and exact fp32 (ffn_exact.h) otherwise. */
#ifndef MOE_CUDA_FFN_H
#define MOE_CUDA_FFN_H

#include "cuda/layer/step_params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* In every call `layer` is asked for its shape alone: the step parameters name the layer whose
 * weights are used, so that a captured call serves all layers of the shape. */

/* Rows to compute on, and what the host knows of their number. */
struct moe_cuda_batch_rows {
    const struct moe_cuda_step_params *params; /* device memory */
    struct moe_rows rows; /* every pointer is to device memory; one entry per local expert, whose
                             weights are this layer's in the same order; `expert` is not read */
    uint32_t capacity;    /* rows that rows.x, rows.weight and all outputs have room for */
    uint64_t *began; /* [MOE_STAGE_COUNT] gets the times when the two products began, or NULL */
    uint32_t bucket, slots; /* of the step: what the choice of a tile goes by */
    void *scratch;          /* moe_cuda_ffn_scratch_bytes(capacity) */
    bool retains; /* gate and up go where the step parameters say (params->pre), on tensor cores
                     only */
};

/* Bytes of scratch that a product of the routed experts needs for `capacity` rows; one after the
 * other they may use the same. 0 where Hopper's kernels multiply. */
size_t moe_cuda_ffn_scratch_bytes(const struct moe_layer *layer, enum moe_dtype dtype,
                                  uint32_t capacity);

/* The dtype in which `hidden` travels from gate_up to down inside a step: BF16 where both run on
 * tensor cores, else F32. The same for all steps of a layer and dtype. */
enum moe_dtype moe_cuda_ffn_hidden_dtype(const struct moe_layer *layer, enum moe_dtype dtype);

/* hidden [capacity, I] of `hidden_dtype`, by the formulas of moe_backend.gemm_gate_up. */
struct moe_status moe_cuda_ffn_gate_up(const struct moe_layer *layer, enum moe_dtype dtype,
                                       const struct moe_cuda_batch_rows *b, void *hidden,
                                       enum moe_dtype hidden_dtype,
                                       cudaStream_t stream) MOE_CHECKED;
/* The dtype in which down's results travel to combine inside a step: BF16 where down runs on tensor
 * cores, which rounds each weighted row once, else F32. */
enum moe_dtype moe_cuda_ffn_out_dtype(const struct moe_layer *layer, enum moe_dtype dtype);

/* out [capacity, H] of `out_dtype`, F32 or what moe_cuda_ffn_out_dtype says, by the formulas of
 * moe_backend.gemm_down. */
struct moe_status moe_cuda_ffn_down(const struct moe_layer *layer,
                                    const struct moe_cuda_batch_rows *b, const void *hidden,
                                    enum moe_dtype hidden_dtype, void *out,
                                    enum moe_dtype out_dtype, cudaStream_t stream) MOE_CHECKED;

/* Bytes of scratch that moe_cuda_ffn_shared needs for up to `tokens`; 0 without a shared expert. */
size_t moe_cuda_ffn_shared_bytes(const struct moe_layer *layer, uint32_t tokens);
/* out [T, H] f32 = shared(x), for the step parameters' T. Only for layers that have a shared
 * expert. */
struct moe_cuda_shared {
    const struct moe_cuda_step_params *params; /* device memory */
    enum moe_dtype dtype;
    uint32_t bucket;   /* >= T: what the choice of a tile goes by */
    uint32_t capacity; /* >= T: rows that x and out have room for */
    const void *x;     /* [T, H] */
    void *scratch;     /* moe_cuda_ffn_shared_bytes(capacity) */
    float *out;
    uint64_t *began;     /* gets the time when the first kernel began, or NULL */
    bool retains;        /* as in struct moe_cuda_batch_rows */
    uint32_t processors; /* most multiprocessors to take where Hopper's kernels multiply; 0 = all */
};
struct moe_status moe_cuda_ffn_shared(const struct moe_layer *layer,
                                      const struct moe_cuda_shared *s,
                                      cudaStream_t stream) MOE_CHECKED;

/* Members of struct moe_backend. They round hidden to what it is inside a step. */
struct moe_status moe_cuda_gemm_gate_up(struct moe_layer *layer, enum moe_dtype dtype,
                                        const struct moe_rows *rows, float *hidden) MOE_CHECKED;
struct moe_status moe_cuda_gemm_down(struct moe_layer *layer, enum moe_dtype dtype,
                                     const struct moe_rows *rows, const float *hidden,
                                     float *out) MOE_CHECKED;
struct moe_status moe_cuda_shared_forward(struct moe_layer *layer, enum moe_dtype dtype,
                                          uint32_t tokens, const void *x, float *y) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
