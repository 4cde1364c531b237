/* SPDX-License-Identifier: Apache-2.0 */
/* See driver.h. */
#include "driver.h"

struct moe_status moe_cuda_failure(cudaError_t rc, const char *call)
{
    enum moe_code code = MOE_INTERNAL;
    enum moe_reason reason = MOE_REASON_NONE;
    if (rc == cudaSuccess)
        return moe_ok();
    if (rc == cudaErrorMemoryAllocation) {
        code = MOE_RESOURCE_EXHAUSTED;
        reason = MOE_REASON_OUT_OF_MEMORY;
    } else if (rc == cudaErrorNoDevice || rc == cudaErrorInvalidDevice ||
               rc == cudaErrorInsufficientDriver || rc == cudaErrorNotSupported ||
               rc == cudaErrorNoKernelImageForDevice) {
        code = MOE_FAILED_PRECONDITION;
        reason = MOE_REASON_UNSUPPORTED;
    }
    (void)cudaGetLastError();
    return moe_error(code, reason, "%s: %s", call, cudaGetErrorString(rc));
}

struct moe_status moe_cuda_driver_failure(CUresult rc, const char *call)
{
    switch (rc) {
    case CUDA_SUCCESS: return moe_ok();
    case CUDA_ERROR_OUT_OF_MEMORY:
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "%s: the device has no room", call);
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NOT_PERMITTED:
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "%s: the device does not support it", call);
    default: return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "%s: CUDA error %d", call, (int)rc);
    }
}

static struct moe_status find(const char *name, void *out)
{
    enum { SINCE = 12000 };
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t rc = cudaGetDriverEntryPointByVersion(name, out, SINCE, cudaEnableDefault, &found);
    MOE_TRY(moe_cuda_failure(rc, name));
    return found == cudaDriverEntryPointSuccess
               ? moe_ok()
               : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                           "the CUDA driver has no %s", name);
}

struct moe_status moe_cuda_driver_find(struct moe_cuda_driver *d)
{
    MOE_TRY(find("cuMemCreate", &d->create));
    MOE_TRY(find("cuMemExportToShareableHandle", &d->export));
    MOE_TRY(find("cuMemGetAllocationGranularity", &d->granularity));
    MOE_TRY(find("cuMemAddressReserve", &d->reserve));
    MOE_TRY(find("cuMemMap", &d->map));
    MOE_TRY(find("cuMemSetAccess", &d->set_access));
    MOE_TRY(find("cuMemUnmap", &d->unmap));
    MOE_TRY(find("cuMemAddressFree", &d->address_free));
    MOE_TRY(find("cuMemRelease", &d->release));
    return find("cuStreamWaitValue32", &d->wait_value);
}
