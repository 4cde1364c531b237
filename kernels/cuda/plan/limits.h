/* SPDX-License-Identifier: Apache-2.0 */
/* How large groups of GPUs are. Kernels keep tables of slots and experts in shared memory and in
 * the lanes of a warp, so they hold less than moe/types.h allows. layer_create and session_join
 * refuse more. */
#ifndef MOE_CUDA_LIMITS_H
#define MOE_CUDA_LIMITS_H

enum {
    MOE_CUDA_MAX_SLOTS = 16,
    MOE_CUDA_MAX_EXPERTS = 512, /* routed experts of one layer */
};

#endif
