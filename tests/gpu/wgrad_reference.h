/* SPDX-License-Identifier: Apache-2.0 */
/* Reference for the weights' gradient: the formula of ggemm_wgrad.h in double precision, one
 * element per thread, without code of the product. All pointers are device memory; every call waits
 * for its kernel and returns 0 for success, as CUDA does. */
#ifndef MOE_TESTS_WGRAD_REFERENCE_H
#define MOE_TESTS_WGRAD_REFERENCE_H

#include "cuda/gemm/ggemm_wgrad.h"

#ifdef __cplusplus
extern "C" {
#endif

/* want [experts, n, k]: the sums over the rows, without the previous dw. */
int wgrad_reference(const struct moe_cuda_wgrad *w, double *want);

/* Largest |dw - before - want| / (|want| + rms of want); `before` NULL counts as zeros. Infinity if
 * dw is NaN and want is not. */
int wgrad_compare(const struct moe_cuda_wgrad *w, const float *before, const double *want,
                  double *worst);

#ifdef __cplusplus
}
#endif

#endif
