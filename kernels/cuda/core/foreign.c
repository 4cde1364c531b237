/* SPDX-License-Identifier: Apache-2.0 */
/* See cuda/core/foreign.h. Device memory is shared by the driver's virtual memory calls: an import
 * holds a reference to the pages, so they live on when their owner ends. The driver's library is
 * not linked; its functions are asked for by name. */
#include "cuda/core/foreign.h"

#include <cuda.h>

/* ------------------------------------------------------------------ the driver */

struct driver {
    __typeof__(&cuMemImportFromShareableHandle) import;
    __typeof__(&cuMemGetAllocationPropertiesFromHandle) properties;
    __typeof__(&cuMemGetAllocationGranularity) granularity;
    __typeof__(&cuMemAddressReserve) reserve;
    __typeof__(&cuMemMap) map;
    __typeof__(&cuMemSetAccess) set_access;
    __typeof__(&cuMemUnmap) unmap;
    __typeof__(&cuMemAddressFree) address_free;
    __typeof__(&cuMemRelease) release;
};

static struct moe_status find(const char *name, void *out)
{
    enum { SINCE = 12000 };
    enum cudaDriverEntryPointQueryResult found;
    MOE_TRY(
        MOE_CUDA(cudaGetDriverEntryPointByVersion(name, out, SINCE, cudaEnableDefault, &found)));
    return found == cudaDriverEntryPointSuccess
               ? moe_ok()
               : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                           "the CUDA driver has no %s", name);
}

static struct moe_status find_driver(struct driver *d)
{
    MOE_TRY(find("cuMemImportFromShareableHandle", &d->import));
    MOE_TRY(find("cuMemGetAllocationPropertiesFromHandle", &d->properties));
    MOE_TRY(find("cuMemGetAllocationGranularity", &d->granularity));
    MOE_TRY(find("cuMemAddressReserve", &d->reserve));
    MOE_TRY(find("cuMemMap", &d->map));
    MOE_TRY(find("cuMemSetAccess", &d->set_access));
    MOE_TRY(find("cuMemUnmap", &d->unmap));
    MOE_TRY(find("cuMemAddressFree", &d->address_free));
    return find("cuMemRelease", &d->release);
}

static struct moe_status invalid(CUresult rc, const char *what)
{
    if (rc == CUDA_ERROR_OUT_OF_MEMORY)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no room to map memory of another process");
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID, "%s (CUDA error %d)", what,
                     (int)rc);
}

/* --------------------------------------------------------------------- import */

/* Fills `*of`. */
static struct moe_status check(const struct driver *d, CUmemGenericAllocationHandle handle,
                               size_t bytes, CUmemAllocationProp *of)
{
    size_t granule = 0;
    CUresult rc = d->properties(of, handle);
    if (rc != CUDA_SUCCESS || of->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        of->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return invalid(rc, "the descriptor is not that of a GPU's memory");
    rc = d->granularity(&granule, of, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (rc != CUDA_SUCCESS)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "this process does not see the GPU of the memory");
    if (bytes == 0 || granule == 0 || bytes % granule != 0)
        return invalid(rc, "the size is not a multiple of the GPU's granularity");
    return moe_ok();
}

/* Maps the memory at `at`, a reserved range of addresses. The driver refuses a range that is longer
 * than the memory. */
static struct moe_status map_at(const struct driver *d, const struct moe_device *device,
                                CUmemGenericAllocationHandle handle, CUdeviceptr at, size_t bytes)
{
    const CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult rc = d->map(at, bytes, 0, handle, 0);
    if (rc != CUDA_SUCCESS)
        return invalid(rc, "the memory has another size");
    rc = d->set_access(at, bytes, &access, 1);
    if (rc == CUDA_SUCCESS)
        return moe_ok();
    (void)d->unmap(at, bytes);
    return rc == CUDA_ERROR_OUT_OF_MEMORY
               ? invalid(rc, "")
               : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                           "the worker's GPU does not reach the GPU of the memory (CUDA error %d)",
                           (int)rc);
}

static struct moe_status map(const struct driver *d, const struct moe_device *device,
                             CUmemGenericAllocationHandle handle, size_t bytes, void **out,
                             bool *same_gpu)
{
    CUmemAllocationProp of;
    CUdeviceptr at = 0;
    MOE_TRY(check(d, handle, bytes, &of));
    *same_gpu = of.location.id == device->ordinal;
    CUresult rc = d->reserve(&at, bytes, 0, 0, 0);
    if (rc != CUDA_SUCCESS)
        return invalid(rc, "no range of addresses has this size");
    struct moe_status st = map_at(d, device, handle, at, bytes);
    if (moe_failed(&st))
        (void)d->address_free(at, bytes);
    else
        *out = (void *)(uintptr_t)at;
    return st;
}

struct moe_status moe_cuda_mem_import(struct moe_device *device, int descriptor, size_t bytes,
                                      void **out, bool *same_gpu)
{
    struct driver d;
    CUmemGenericAllocationHandle handle;
    MOE_TRY(moe_cuda_device_use(device));
    MOE_TRY(find_driver(&d));
    CUresult rc =
        d.import(&handle, (void *)(intptr_t)descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (rc != CUDA_SUCCESS)
        return invalid(rc, "the descriptor is not that of a GPU's memory");
    struct moe_status st = map(&d, device, handle, bytes, out, same_gpu);
    (void)d.release(handle); /* the mapping keeps the memory */
    return st;
}

void moe_cuda_mem_release(struct moe_device *device, void *p, size_t bytes)
{
    struct driver d;
    if (p == NULL)
        return;
    struct moe_status st = moe_cuda_device_use(device);
    if (!moe_failed(&st))
        st = find_driver(&d);
    if (moe_failed(&st)) /* the process then keeps the mapping until its end */
        return;
    (void)d.unmap((CUdeviceptr)(uintptr_t)p, bytes);
    (void)d.address_free((CUdeviceptr)(uintptr_t)p, bytes);
}

/* --------------------------------------------------------------------- register */

/* The failed call must not fail the next launch. */
static struct moe_status refuse(cudaError_t rc)
{
    (void)cudaGetLastError();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                     "this GPU cannot use shared host memory: %s", cudaGetErrorString(rc));
}

struct moe_status moe_cuda_mem_register(struct moe_device *device, void *p, size_t bytes)
{
    void *there = NULL;
    MOE_TRY(moe_cuda_device_use(device));
    cudaError_t rc = cudaHostRegister(p, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (rc == cudaErrorMemoryAllocation)
        return MOE_CUDA(rc);
    if (rc != cudaSuccess)
        return refuse(rc);
    rc = cudaHostGetDevicePointer(&there, p, 0);
    if (rc == cudaSuccess && there == p)
        return moe_ok();
    (void)cudaHostUnregister(p);
    return refuse(rc != cudaSuccess ? rc : cudaErrorNotSupported);
}

void moe_cuda_mem_unregister(struct moe_device *device, void *p, size_t bytes)
{
    (void)bytes;
    (void)cudaSetDevice(device->ordinal);
    if (cudaHostUnregister(p) != cudaSuccess)
        (void)cudaGetLastError();
}
