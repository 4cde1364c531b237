/* SPDX-License-Identifier: Apache-2.0 */
/* What the module and tests may know of the CUDA backend: its table. This header needs no CUDA
 * header. */
#ifndef MOE_CUDA_BACKEND_H
#define MOE_CUDA_BACKEND_H

#include "moe/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const struct moe_backend moe_backend_cuda;

#ifdef __cplusplus
}
#endif

#endif
