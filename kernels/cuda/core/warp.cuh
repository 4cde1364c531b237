/* SPDX-License-Identifier: Apache-2.0 */
/* Warp helpers. */
#ifndef MOE_CUDA_WARP_CUH
#define MOE_CUDA_WARP_CUH

#include <stdint.h>

constexpr unsigned ALL_LANES = 0xffffffffu;

#endif
