/* SPDX-License-Identifier: Apache-2.0 */
/* See device_region.h. The worker's import holds its own reference to the pages. */
#include "device_region.h"

#include "base/size.h"

#include <stdlib.h>
#include <unistd.h>

struct memory {
    struct moe_cuda_driver driver;
    int device;
    CUdeviceptr at;
    size_t bytes;
};

static void unmap(struct memory *m)
{
    (void)m->driver.unmap(m->at, m->bytes);
    (void)m->driver.address_free(m->at, m->bytes);
    free(m);
}

/* Of the region. */
static void release(void *ctx, void *data, size_t bytes)
{
    struct memory *m = ctx;
    int before = m->device;
    (void)data;
    (void)bytes;
    (void)cudaGetDevice(&before);
    (void)cudaSetDevice(m->device);
    unmap(m);
    (void)cudaSetDevice(before);
}

static CUmemAllocationProp properties(int device)
{
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
}

static struct moe_status round_up(const struct moe_cuda_driver *d, int device, size_t bytes,
                                  size_t *out)
{
    const CUmemAllocationProp of = properties(device);
    size_t granule = 0;
    MOE_TRY(
        moe_cuda_driver_failure(d->granularity(&granule, &of, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                                "cuMemGetAllocationGranularity"));
    if (bytes == 0 || !moe_size_round_up(bytes, granule, out))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID,
                         "a region has at least 1 byte, and less than 2^63");
    return moe_ok();
}

static struct moe_status map_at(const struct memory *m, CUmemGenericAllocationHandle handle)
{
    const CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = m->device},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    MOE_TRY(moe_cuda_driver_failure(m->driver.map(m->at, m->bytes, 0, handle, 0), "cuMemMap"));
    struct moe_status st = moe_cuda_driver_failure(
        m->driver.set_access(m->at, m->bytes, &access, 1), "cuMemSetAccess");
    if (!moe_failed(&st))
        st = moe_cuda_failure(cudaMemset((void *)(uintptr_t)m->at, 0, m->bytes), "cudaMemset");
    if (!moe_failed(&st)) /* of other streams, too */
        st = moe_cuda_failure(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    if (moe_failed(&st))
        (void)m->driver.unmap(m->at, m->bytes);
    return st;
}

/* On success `*out` is mapped. */
static struct moe_status map(const struct moe_cuda_driver *d, int device, size_t bytes,
                             CUmemGenericAllocationHandle handle, struct memory **out)
{
    struct memory *m = malloc(sizeof *m);
    if (m == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "region: out of memory");
    *m = (struct memory){.driver = *d, .device = device, .bytes = bytes};
    struct moe_status st =
        moe_cuda_driver_failure(d->reserve(&m->at, bytes, 0, 0, 0), "cuMemAddressReserve");
    if (!moe_failed(&st)) {
        st = map_at(m, handle);
        if (moe_failed(&st))
            (void)d->address_free(m->at, bytes);
    }
    if (moe_failed(&st))
        free(m);
    else
        *out = m;
    return st;
}

/* The worker maps the memory behind the descriptor. */
static struct moe_status share(struct memory *m, CUmemGenericAllocationHandle handle,
                               struct moe_client_session *session, const char *name,
                               struct moe_client_region **out)
{
    int descriptor = -1;
    MOE_TRY(moe_cuda_driver_failure(
        m->driver.export(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle"));
    const struct moe_client_memory memory = {.size = sizeof memory,
                                             .data = (void *)(uintptr_t)m->at,
                                             .bytes = m->bytes,
                                             .release = release,
                                             .ctx = m,
                                             .descriptor = descriptor};
    struct moe_status st = moe_region_adopt(session, name, &memory, out);
    close(descriptor);
    return st;
}

struct moe_status moe_device_region_create(const struct moe_cuda_driver *d, int device,
                                           struct moe_client_session *session, const char *name,
                                           size_t bytes, struct moe_client_region **out)
{
    const CUmemAllocationProp of = properties(device);
    CUmemGenericAllocationHandle handle;
    struct memory *m = NULL;
    MOE_TRY(round_up(d, device, bytes, &bytes));
    MOE_TRY(moe_cuda_driver_failure(d->create(&handle, bytes, &of, 0), "cuMemCreate"));
    struct moe_status st = map(d, device, bytes, handle, &m);
    if (!moe_failed(&st)) {
        st = share(m, handle, session, name, out);
        if (moe_failed(&st))
            unmap(m);
    }
    (void)d->release(handle); /* the mapping keeps the memory */
    return st;
}
