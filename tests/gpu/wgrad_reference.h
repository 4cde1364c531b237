/* SPDX-License-Identifier: Apache-2.0 */
/* What the weights' gradient is held to: the formula of ggemm_wgrad.h in double precision, one
 * element to a thread, with no code of the product. All pointers are device memory; every call
 * waits for its kernel and returns 0 for success, as CUDA does. */
#ifndef MOE_TESTS_WGRAD_REFERENCE_H
#define MOE_TESTS_WGRAD_REFERENCE_H

#include "cuda/gemm/ggemm_wgrad.h"

#ifdef __cplusplus
extern "C" {
#endif

/* want [experts, n, k]: the sums over the rows, without what dw held before. */
int wgrad_reference(const struct moe_cuda_wgrad *w, double *want);

/* Largest |dw - before - want| / (|want| + rms of want); `before` NULL counts as zeros. Infinity
 * where dw is NaN and want is not. */
int wgrad_compare(const struct moe_cuda_wgrad *w, const float *before, const double *want,
                  double *worst);

#ifdef __cplusplus
}
#endif

#endif
