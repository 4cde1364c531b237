/* SPDX-License-Identifier: Apache-2.0 */
/* Grouped GEMM on Hopper's tensor cores. For every local expert e and each of its rows r it
 * computes one of three products of struct moe_layer_spec:
 *
 *   gate and up   act(x Wg[e]^T + gate_bias[e], x Wu[e]^T + up_bias[e]); for input weighting
 *                 weight[r] multiplies both products before the bias
 *   up alone      max(x W[e]^T + bias[e], 0)^2, weighted as gate and up
 *   plain         weight[r] (x W[e]^T + bias[e]), for input weighting without the weight
 *
 * bf16 in (W8A8: quantised rows), fp32 accumulate and epilogue, bf16 or fp32 out. The kernel reads
 * the experts' row counts on the device: nothing here waits, and a captured launch serves all
 * counts. For a given tile, a row's bits depend on that row and its expert alone. */
#ifndef MOE_CUDA_GGEMM_H
#define MOE_CUDA_GGEMM_H

#include "base/status.h"
#include "cuda/gemm/packed.h"
#include "cuda/plan/gemm_choice.h"
#include "cuda/plan/limits.h"
#include "moe/layer_spec.h"

struct CUstream_st;

#ifdef __cplusplus
extern "C" {
#endif

/* A matrix as the copy engine reads it: a CUtensorMap without its alignment on the host. */
struct moe_cuda_tensor_map {
    uint64_t opaque[16];
};

/* The weights of one layer for a product. The host writes it; the kernel reads it in device memory,
 * 128-byte aligned. It must not change while a kernel runs. */
struct moe_cuda_ggemm_weights {
    struct moe_cuda_tensor_map map[MOE_CUDA_TILE_COUNT]; /* of `data`, in the boxes of each tile */
    struct moe_cuda_tensor_map back;                     /* for products with W, not W^T */
    const void *data;     /* bf16 [experts, n, k]; gated: [experts, 2n, k], with rows gate 0-7, up
                             0-7, gate 8-15, ...; or packed (packed.h), without maps */
    const float *bias;    /* [experts, n], or NULL; gated: the gate's; both biases or none */
    const float *up_bias; /* gated: [experts, n] */
    uint64_t unused[13];  /* keeps neighbours in an array aligned */
};

/* Buffer for gate and up before weight, bias and activation: fp32 [rows, 2n], interleaved like the
 * weights. Its values equal those of the plain product of the same tile, bit for bit. Rows from
 * `rows` on are not stored. In device memory; the kernel reads it when it runs. */
struct moe_cuda_ggemm_pre {
    float *data; /* 16-byte aligned */
    uint32_t rows, unused;
};

/* All pointers are device memory, 16-byte aligned (start, count and row_weight: 4). The layer's
 * data is behind `weights`, not in here, so that one captured launch serves many layers. */
struct moe_cuda_ggemm {
    enum moe_cuda_gemm_tile tile; /* from moe_cuda_choose_tile; `back`: narrow ones count as wide */
    bool gated;                   /* gate and up with activation, or plain */
    bool relu2;                   /* not gated: up alone, instead of plain */
    bool back; /* plain only: x W[e] instead of x W[e]^T, for the gradient of the rows; the weights
                  are then [experts, k, n], as stored */
    enum moe_cuda_packing packing; /* of the weights. Packed ones have a tile for few rows and one
                                      for many, which give the same bits. `back` and W8A8 have
                                      one for both. W8A8: no `back`, no `pre` */
    uint32_t experts;              /* local ones, 1.. the most of the tile */
    uint32_t row_capacity;         /* rows of x and out */
    uint32_t n; /* columns of out, a multiple of 8; the weights have n rows, gated: 2n */
    uint32_t k; /* a multiple of 8 */

    /* Expert e owns rows start[e] .. start[e] + count[e] - 1 of x, row_weight and out. They lie
     * below row_capacity and do not overlap. No other row of out is written; the values of other
     * rows of x do not matter. */
    const uint32_t *start; /* [experts], at any row; W8A8: at multiples of 4 */
    const uint32_t *count; /* [experts] */
    const void *x;     /* bf16 [row_capacity, k]; W8A8: quantised, in the buffer of quantise.h */
    uint32_t x_stride; /* elements from row to row, a multiple of 8; 0 = k. W8A8: bytes, a multiple
                          of 16; 0 = as in that buffer */
    const float *x_scales; /* W8A8: the rows' scales, as in that buffer; NULL = behind x */
    /* Pointer in device memory to the weights' address; read when the kernel runs. */
    const struct moe_cuda_ggemm_weights *const *weights;
    bool has_bias;           /* the weights have biases */
    const float *row_weight; /* [row_capacity], or NULL = 1 */
    enum moe_weighting weighting;
    enum moe_activation activation; /* gated only: any with a gate; uses limit and alpha */
    float limit, alpha;
    enum moe_dtype out_dtype; /* BF16 or F32 */
    /* W8A8, gated or relu2: not PLAIN quantises the results in groups of 128 columns. */
    enum moe_activation_format out_activations;
    void *out;           /* [row_capacity, n], or the buffer of quantise.h, for n columns */
    uint32_t out_stride; /* elements from row to row, a multiple of 8; 0 = n */
    const struct moe_cuda_ggemm_pre *pre; /* NULL: gate and up are not stored; else gated with bf16
                                             out */
    uint64_t *began;     /* receives the kernel's start time (stamp.cuh), or NULL */
    uint32_t processors; /* limit of multiprocessors; 0 = all */
};

/* Whether this thread's current device and these shapes are supported. For all others the caller
 * uses its fallback. */
bool moe_cuda_ggemm_serves(uint32_t n, uint32_t k);

/* Fills `out` except its biases, which do not change. data: device memory, 16-byte aligned, bf16
 * [experts, rows, columns]; columns are a multiple of 8. */
struct moe_status moe_cuda_ggemm_describe(const void *data, uint32_t experts, uint32_t rows,
                                          uint32_t columns,
                                          struct moe_cuda_ggemm_weights *out) MOE_CHECKED;

/* Encodes the maps of x and out and launches one kernel on `stream`; capturable. The maps take a
 * few microseconds of host time, which a captured graph spends once. Errors: MOE_INVALID_ARGUMENT
 * (a shape is out of range), MOE_FAILED_PRECONDITION/UNSUPPORTED (no Hopper device, driver too
 * old), MOE_INTERNAL (the launch was refused). */
struct moe_status moe_cuda_ggemm_enqueue(const struct moe_cuda_ggemm *g,
                                         struct CUstream_st *stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
