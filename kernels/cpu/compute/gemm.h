/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products of the backward pass: many at a time, of any orientation, on the panel kernels.
 *
 * The kernels multiply rows by a panel of columns. A packed weight has panels of its outputs, for
 * the forward pass. Every other factor is packed into panels during the product: a block of K_BLOCK
 * inputs at a time, on the thread's stack. So no second copy of a weight exists. All
 * sums are fp32 and go in fixed blocks: results depend neither on the number of threads nor on
 * other products. */
#ifndef MOE_CPU_GEMM_H
#define MOE_CPU_GEMM_H

#include "cpu/compute/device.h"
#include "cpu/compute/matrix.h"

/* y [rows, columns] = scale * x [rows, k] M [k, columns] (+ y, where `add` is set) (+ bias). */
struct moe_cpu_product {
    enum moe_cpu_factor {
        MOE_CPU_WEIGHT,            /* M = the transpose of `weight` [columns, k], as forward */
        MOE_CPU_WEIGHT_TRANSPOSED, /* M = `weight` [k, columns] */
        MOE_CPU_PLAIN,             /* M = `plain` [k, columns] */
        MOE_CPU_PLAIN_TRANSPOSED,  /* M = the transpose of `plain` [columns, k] */
    } factor;
    uint32_t rows, k, columns;
    const float *x; /* rows are k apart */
    const struct moe_cpu_matrix *weight;
    const float *plain;
    const float *bias; /* [columns], or NULL */
    float scale;
    bool add;
    float *y; /* rows are `columns` apart */
};

/* sum [out, in] += the transpose of a [rows, out] times b [rows, in]. in = 0: sum [out] += the sum
 * of the rows of a. */
struct moe_cpu_outer {
    uint32_t rows, out, in;
    const float *a, *b;
    float *sum;
};

/* The outputs of one call must not overlap. Empty products are legal. */
void moe_cpu_gemm_products(struct moe_device *device, const struct moe_cpu_product *product,
                           uint32_t count);
void moe_cpu_gemm_outers(struct moe_device *device, const struct moe_cpu_outer *outer,
                         uint32_t count);

#endif
