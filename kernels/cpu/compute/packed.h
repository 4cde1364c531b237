/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised matrices in panels: which formats there are, and packing. isa.h has the layout. */
#ifndef MOE_CPU_PACKED_H
#define MOE_CPU_PACKED_H

#include "cpu/compute/matrix.h"

/* Member of struct moe_backend. */
bool moe_cpu_computes(const struct moe_device *device, const struct moe_weight_format *format);

/* Packs a matrix of a format that moe_cpu_computes accepts. It is kept in F32 if an element is NaN,
 * or a scale so large that the kernels' product with it would overflow. */
struct moe_status moe_cpu_matrix_pack_quantised(struct moe_device *device, uint32_t out,
                                                uint32_t in, const struct moe_weight_format *format,
                                                const struct moe_packed_matrix *data,
                                                struct moe_cpu_matrix *matrix) MOE_CHECKED;

#endif
