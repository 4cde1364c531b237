/* SPDX-License-Identifier: Apache-2.0 */
/* Turns the libraries' codes into statuses; see check.h. */
#include "cuda/core/check.h"

#include <string.h>

static struct moe_status failure(enum moe_code code, enum moe_reason reason, const char *call,
                                 const char *text)
{
    return moe_error(code, reason, "%.*s: %s", (int)strcspn(call, "("), call, text);
}

struct moe_status moe_cuda_status(cudaError_t rc, const char *call)
{
    switch (rc) {
    case cudaSuccess: return moe_ok();
    case cudaErrorMemoryAllocation:
        (void)cudaGetLastError(); /* cleared, so that a refused allocation does not fail the next
                                     launch */
        return failure(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, call,
                       "the device has no room");
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoKernelImageForDevice:
        return failure(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED, call,
                       cudaGetErrorString(rc));
    default: return failure(MOE_INTERNAL, MOE_REASON_NONE, call, cudaGetErrorString(rc));
    }
}

struct moe_status moe_cuda_nccl_status(ncclResult_t rc, const char *call)
{
    if (rc == ncclSuccess)
        return moe_ok();
    return failure(MOE_INTERNAL, MOE_REASON_NONE, call, ncclGetErrorString(rc));
}
