/* SPDX-License-Identifier: Apache-2.0 */
/* How large groups of GPUs are. A CTA of dispatch keeps tables of its layer in shared memory. So in
 * the largest groups not every slot can have a copy of every expert; layer_create refuses that. */
#ifndef MOE_CUDA_LIMITS_H
#define MOE_CUDA_LIMITS_H

#include "moe/types.h"

#include <stdbool.h>

enum {
    /* Kernels have masks of 64 slots, and two slots for each lane of a warp. */
    MOE_CUDA_MAX_SLOTS = MOE_MAX_SLOTS,
    MOE_CUDA_MAX_EXPERTS = MOE_MAX_EXPERTS, /* routed experts of one layer */
    /* Slots times the experts of one of them: tables by source and local expert. */
    MOE_CUDA_MAX_CELLS = 11264,
    /* Copies of all experts: a table that uses the memory of two such tables. */
    MOE_CUDA_MAX_COPIES = 2 * MOE_CUDA_MAX_CELLS,
    /* Shared memory that a CTA can have on every supported GPU: 99 KiB on 8.6, 8.9 and 12.0; 163 on
     * 8.0, 227 on 9.0. */
    MOE_CUDA_LEAST_SHARED = 99 << 10,
};

/* Whether dispatch has room for the tables of a layer, on a slot with `local_experts`. */
static inline bool moe_cuda_tables_fit(uint32_t slots, uint32_t local_experts, uint32_t copies)
{
    return (uint64_t)slots * local_experts <= MOE_CUDA_MAX_CELLS && copies <= MOE_CUDA_MAX_COPIES;
}

#endif
