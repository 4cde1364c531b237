/* SPDX-License-Identifier: Apache-2.0 */
/* The two products that only a backward pass has, in exact fp32: any dtypes, any shape, any device.
 * Rows come in groups as in struct moe_rows, one weight matrix each, with counts in device memory;
 * or as one plain block of rows. Padding rows are never read. Calls enqueue and do not wait. Each
 * output element is one chain of multiply-adds in ascending order, the same on every run. */
#ifndef MOE_CUDA_TRAIN_GEMM_H
#define MOE_CUDA_TRAIN_GEMM_H

#include "cuda/layer/layer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of a product. */
struct moe_cuda_row_groups {
    const uint32_t *start, *count; /* device; as in struct moe_rows. NULL: one group of `rows` */
    uint32_t groups;               /* 1 without `start` */
    uint32_t rows;      /* without `start`: number of rows; with it: maximum number of rows */
    const uint8_t *use; /* device [rows], only without `start`: 0 = a row that counts as zeros,
                           whatever its values. NULL = all count */
};

/* out[row][k] (+)= sum over n of y[row][n] * w[group][n][k]. */
struct moe_cuda_exact_dx {
    struct moe_cuda_row_groups rows;
    enum moe_dtype y_dtype, w_dtype;
    enum moe_cuda_packing packing; /* of w; not NONE: w_dtype is unused */
    const void *y;                 /* [rows, N] */
    const void *w;                 /* [groups][N][K] */
    uint32_t n, k;
    float *out; /* [rows, out_stride], columns 0 .. K-1 */
    uint32_t out_stride;
    bool add; /* else overwrite. Rows that do not count are unchanged when adding, and become zeros
                 otherwise */
};
struct moe_status moe_cuda_exact_dgrad(const struct moe_cuda_exact_dx *g,
                                       cudaStream_t stream) MOE_CHECKED;

/* out[group][n][k] += scale * sum over the group's rows of y[row][n] * x[row][k]. */
struct moe_cuda_exact_dw {
    struct moe_cuda_row_groups rows;
    enum moe_dtype y_dtype, x_dtype;
    const void *y; /* [rows, N] */
    const void *x; /* [rows, K] */
    uint32_t n, k;
    float scale;
    float *out; /* [groups][N][K] */
};
struct moe_status moe_cuda_exact_wgrad(const struct moe_cuda_exact_dw *g,
                                       cudaStream_t stream) MOE_CHECKED;

/* out[row][n] = sum over k of x[row][k] * w[group][n][k], in fp32: a backward pass recomputes this
 * part of the forward pass. */
struct moe_cuda_exact_xw {
    struct moe_cuda_row_groups rows;
    enum moe_dtype x_dtype, w_dtype;
    enum moe_cuda_packing packing; /* as above */
    const void *x, *w;
    uint32_t n, k;
    float *out; /* [rows, N] */
};
struct moe_status moe_cuda_exact_product(const struct moe_cuda_exact_xw *g,
                                         cudaStream_t stream) MOE_CHECKED;

/* out[group][n] += sum over the group's rows of weight[row] * y[row * stride + n]. */
struct moe_cuda_column_sum {
    struct moe_cuda_row_groups rows;
    enum moe_dtype y_dtype;
    const void *y;
    uint32_t n, stride, step; /* columns are `step` elements apart where they alternate in blocks:
                                 column i stands at i / 8 * step + i % 8; 8 = plain */
    const float *weight;      /* [rows] or NULL = 1 */
    float *out;
};
struct moe_status moe_cuda_exact_column_sum(const struct moe_cuda_column_sum *g,
                                            cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
