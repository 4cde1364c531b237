/* SPDX-License-Identifier: Apache-2.0 */
/* Turns every return code of CUDA and NCCL into a moe_status: the one error idiom of this folder.
 *
 * An asynchronous failure of an earlier kernel may surface in any later call; the status names that
 * call. Out-of-memory keeps a separate code, so that callers can refuse the request and
 * continue. */
#ifndef MOE_CUDA_CHECK_H
#define MOE_CUDA_CHECK_H

#include "base/status.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#ifdef __cplusplus
extern "C" {
#endif

/* `call`: source text of the call; the status has only the function's name. */
struct moe_status moe_cuda_status(cudaError_t rc, const char *call) MOE_CHECKED;
struct moe_status moe_cuda_nccl_status(ncclResult_t rc, const char *call) MOE_CHECKED;

/* Statuses for MOE_TRY and MOE_TRY_GOTO. */
#define MOE_CUDA(expr) moe_cuda_status((expr), #expr)
#define MOE_NCCL(expr) moe_cuda_nccl_status((expr), #expr)

/* Status of the launch just made: CUDA accepted its configuration, or not. */
#define MOE_LAUNCHED(kernel) moe_cuda_status(cudaGetLastError(), kernel)

#ifdef __cplusplus
}
#endif

#endif
