/* SPDX-License-Identifier: Apache-2.0 */
/* Every answer of CUDA and NCCL becomes a moe_status: the one error idiom of this folder.
 *
 * An asynchronous failure of an earlier kernel may surface in any call; its text then names the
 * call that told us. Out-of-memory keeps its own code, so that callers can refuse instead of end.
 */
#ifndef MOE_CUDA_CHECK_H
#define MOE_CUDA_CHECK_H

#include "base/status.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#ifdef __cplusplus
extern "C" {
#endif

/* `call` is the text of the call; only the function's name goes into the status. */
struct moe_status moe_cuda_status(cudaError_t rc, const char *call) MOE_CHECKED;
struct moe_status moe_cuda_nccl_status(ncclResult_t rc, const char *call) MOE_CHECKED;

/* As statuses, for MOE_TRY and MOE_TRY_GOTO. */
#define MOE_CUDA(expr) moe_cuda_status((expr), #expr)
#define MOE_NCCL(expr) moe_cuda_nccl_status((expr), #expr)

/* The launch just made: its configuration was accepted. */
#define MOE_LAUNCHED(kernel) moe_cuda_status(cudaGetLastError(), kernel)

#ifdef __cplusplus
}
#endif

#endif
