/* SPDX-License-Identifier: Apache-2.0 */
/* The experts' feed-forward networks on a GPU. Calls enqueue and never wait; counts are in device
 * memory only. They use the tensor-core grouped GEMM (ggemm.h) if dtype, shape and device allow,
 * and exact fp32 (ffn_exact.h) otherwise. Weights in W8A8 multiply quantised
 * rows (quantise.h) in both cases; those for gate and up come so (moe/row_format.h), except with
 * input weighting. */
#ifndef MOE_CUDA_FFN_H
#define MOE_CUDA_FFN_H

#include "cuda/layer/step_params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Every call uses only the shape of `layer`. The step parameters name the layer with the weights,
 * so that a captured call serves all layers of the shape. */

/* A product on tensor cores. scratch: what moe_cuda_cublas_scratch_bytes says, if the device uses
 * cuBLAS. */
struct moe_status moe_cuda_multiply(const struct moe_layer *layer, const struct moe_cuda_ggemm *g,
                                    void *scratch, cudaStream_t stream) MOE_CHECKED;

/* Rows to compute, and the bounds that the host knows. */
struct moe_cuda_batch_rows {
    const struct moe_cuda_step_params *params; /* device memory */
    struct moe_rows rows; /* all pointers are device memory; one entry per local expert, in the
                             order of this layer's weights; `expert` is not read */
    uint32_t capacity;    /* rows that fit into rows.x, rows.weight and all outputs */
    uint64_t *began; /* [MOE_STAGE_COUNT] receives the start times of the two products, or NULL */
    uint32_t bucket, slots; /* of the step; they determine the tile */
    void *scratch;          /* moe_cuda_ffn_scratch_bytes(capacity), 256-byte aligned */
    bool retains;           /* gate and up go to params->pre; on tensor cores only */
    bool part;              /* one product alone: hidden is BF16 or F32, never quantised */
};

/* Scratch bytes of one product of the routed experts for `capacity` rows. Successive products may
 * share it. With Hopper's kernels only W8A8 needs some: for rows that it quantises, or for the
 * scales of rows that come quantised. */
size_t moe_cuda_ffn_scratch_bytes(const struct moe_layer *layer, enum moe_dtype dtype,
                                  uint32_t capacity);

/* Bytes of `hidden` between gate_up and down inside a step: BF16 if both run on tensor cores,
 * quantised if down multiplies groups of 128 quantised columns, else F32. */
size_t moe_cuda_ffn_hidden_bytes(const struct moe_layer *layer, enum moe_dtype dtype,
                                 uint32_t capacity);

/* Quantises the step's tokens x [T, W] for their way to the routed experts, to rows of
 * moe/row_format.h at `to`. Only if the layer's rows travel so. `capacity` is at least T. */
struct moe_status moe_cuda_ffn_quantise_tokens(const struct moe_layer *layer, enum moe_dtype dtype,
                                               const struct moe_cuda_step_params *params,
                                               uint32_t capacity, const void *x, void *to,
                                               cudaStream_t stream) MOE_CHECKED;

/* hidden [capacity, I], by the formulas of moe_backend.gemm_gate_up. */
struct moe_status moe_cuda_ffn_gate_up(const struct moe_layer *layer, enum moe_dtype dtype,
                                       const struct moe_cuda_batch_rows *b, void *hidden,
                                       cudaStream_t stream) MOE_CHECKED;
/* The dtype of down's results on their way to combine inside a step. BF16 if down runs on tensor
 * cores, which rounds each weighted row once; else F32. */
enum moe_dtype moe_cuda_ffn_out_dtype(const struct moe_layer *layer, enum moe_dtype dtype);

/* out [capacity, W] of `out_dtype`: F32 or the result of moe_cuda_ffn_out_dtype. Formulas of
 * moe_backend.gemm_down. `dtype` is that of the tokens, as for gate_up. */
struct moe_status moe_cuda_ffn_down(const struct moe_layer *layer, enum moe_dtype dtype,
                                    const struct moe_cuda_batch_rows *b, const void *hidden,
                                    void *out, enum moe_dtype out_dtype,
                                    cudaStream_t stream) MOE_CHECKED;

/* Scratch bytes of moe_cuda_ffn_shared for up to `tokens` of `dtype`; 0 without a shared expert. */
size_t moe_cuda_ffn_shared_bytes(const struct moe_layer *layer, enum moe_dtype dtype,
                                 uint32_t tokens);
/* out [T, H] f32 = shared(x), with T from the step parameters. Only for layers with a shared
 * expert. */
struct moe_cuda_shared {
    const struct moe_cuda_step_params *params; /* device memory */
    enum moe_dtype dtype;
    uint32_t bucket;   /* = T; determines the tile */
    uint32_t capacity; /* = T: rows that fit into x and out */
    const void *x;     /* [T, H] */
    const void *rows;  /* the same, quantised for the routed experts (moe/row_format.h), or NULL */
    void *scratch;     /* moe_cuda_ffn_shared_bytes(capacity) */
    float *out;
    uint64_t *began;     /* receives the first kernel's start time, or NULL */
    bool retains;        /* as in struct moe_cuda_batch_rows */
    uint32_t processors; /* limit of multiprocessors for Hopper's kernels; 0 = all */
};
struct moe_status moe_cuda_ffn_shared(const struct moe_layer *layer,
                                      const struct moe_cuda_shared *s,
                                      cudaStream_t stream) MOE_CHECKED;

/* Members of struct moe_backend. They round hidden as a step does. */
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
