/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of the CUDA driver, found at run time: libcuda is not linked. And errors of CUDA as
 * statuses. */
#ifndef MOE_CLIENT_CUDA_DRIVER_H
#define MOE_CLIENT_CUDA_DRIVER_H

#include "base/status.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

struct moe_cuda_driver {
    __typeof__(&cuMemCreate) create;
    __typeof__(&cuMemExportToShareableHandle) export;
    __typeof__(&cuMemGetAllocationGranularity) granularity;
    __typeof__(&cuMemAddressReserve) reserve;
    __typeof__(&cuMemMap) map;
    __typeof__(&cuMemSetAccess) set_access;
    __typeof__(&cuMemUnmap) unmap;
    __typeof__(&cuMemAddressFree) address_free;
    __typeof__(&cuMemRelease) release;
    __typeof__(&cuStreamWaitValue32) wait_value;
};

/* Errors: MOE_FAILED_PRECONDITION/UNSUPPORTED. */
struct moe_status moe_cuda_driver_find(struct moe_cuda_driver *out) MOE_CHECKED;

/* MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY, MOE_FAILED_PRECONDITION/UNSUPPORTED (no driver or device),
 * or MOE_INTERNAL; `call` names it. Clears the error. */
struct moe_status moe_cuda_failure(cudaError_t rc, const char *call) MOE_CHECKED;
struct moe_status moe_cuda_driver_failure(CUresult rc, const char *call) MOE_CHECKED;

#endif
