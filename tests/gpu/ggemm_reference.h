/* SPDX-License-Identifier: Apache-2.0 */
/* Reference for the grouped GEMM: the formulas of ggemm.h in double precision, one output element
 * per thread, without code of the product. All pointers are device memory; every call waits for its
 * kernel. */
#ifndef MOE_TESTS_GGEMM_REFERENCE_H
#define MOE_TESTS_GGEMM_REFERENCE_H

#include "cuda/gemm/ggemm.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Values in (-scale, scale), a function of seed and index. 0 = success, as in CUDA. */
int ggemm_fill_bf16(void *to, size_t count, uint64_t seed, float scale);
int ggemm_fill_f32(float *to, size_t count, uint64_t seed, float scale);

/* want [row_capacity, n]: writes the experts' rows only. With a packing, weights->data are the
 * weights' values as fp32, in the order of bf16 ones; with W8A8, x is the quantised rows' values as
 * fp32 [row_capacity, k]. */
int ggemm_reference(const struct moe_cuda_ggemm *g, double *want);

/* Largest |out - want| / (|want| + rms) over the experts' rows; rms is of all of want. Infinity if
 * exactly one of the two is NaN. `stray` counts elements of other rows, and between rows, that
 * differ from the test's poison (all bits one). */
struct ggemm_difference {
    double worst;
    unsigned long long stray;
};
int ggemm_compare(const struct moe_cuda_ggemm *g, const double *want, struct ggemm_difference *out);

#ifdef __cplusplus
}
#endif

#endif
