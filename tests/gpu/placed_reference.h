/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised weights as a block of device memory has them (kernels/cuda/gemm/packed_layout.cuh),
 * made on the host, one element and one scale at a time. */
#ifndef MOE_TESTS_PLACED_REFERENCE_H
#define MOE_TESTS_PLACED_REFERENCE_H

#include "cuda/plan/packing.h"
#include "moe/packed_matrix.h"

#ifdef __cplusplus
extern "C" {
#endif

enum placed_rows { PLACED_PLAIN, PLACED_GATE, PLACED_UP };

/* Adds matrix `m` [rows, columns] to `entry`, which is zero at first. `global`: what scales are
 * multiplied by, with MOE_SCALE_E4M3. */
void placed_reference(const struct moe_weight_format *f, const struct moe_packed_matrix *m,
                      uint32_t rows, uint32_t columns, enum placed_rows order, float global,
                      uint8_t *entry);

#ifdef __cplusplus
}
#endif

#endif
