/* SPDX-License-Identifier: Apache-2.0 */
/* The NVLink domain of a GPU, from the driver's management library (NVML), which is opened at run
 * time: a driver without it, or without a fabric, is no error. */
#ifndef MOE_CUDA_FABRIC_H
#define MOE_CUDA_FABRIC_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* NVML of the driver. */
#define MOE_CUDA_NVML "libnvidia-ml.so.1"

/* The domain of the GPU with this UUID: cluster and clique of the fabric, "8f...09-3". "" if the
 * GPU's fabric is only its host's, is not ready, or cannot be asked. `library`: MOE_CUDA_NVML. */
void moe_cuda_fabric_domain(const char *library, const uint8_t uuid[16], char out[64]);

#ifdef __cplusplus
}
#endif

#endif
