/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_cuda_runtime.h"

#include "base/clock.h"
#include "base/wait.h"
#include "device_region.h"
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

struct fake_cuda fake_cuda;
static _Thread_local int current; /* device of the thread */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 2;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    current = device;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorHostMemoryAlreadyRegistered ? "registered already" : "a failure";
}

/* It takes its time, so that threads meet in it. */
cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags)
{
    (void)memory;
    (void)bytes;
    (void)flags;
    moe_sleep_until(moe_clock_ns() + 5 * MOE_NS_PER_MS);
    atomic_fetch_add(&fake_cuda.registrations, 1);
    return atomic_exchange(&fake_cuda.registered, 1) == 0 ? cudaSuccess
                                                          : cudaErrorHostMemoryAlreadyRegistered;
}

cudaError_t cudaHostUnregister(void *memory)
{
    (void)memory;
    return atomic_exchange(&fake_cuda.registered, 0) == 1 ? cudaSuccess
                                                          : cudaErrorHostMemoryNotRegistered;
}

cudaError_t cudaHostGetDevicePointer(void **out, void *memory, unsigned flags)
{
    (void)flags;
    *out = memory;
    return atomic_load(&fake_cuda.registered) == 1 ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *memory)
{
    *out = (struct cudaPointerAttributes){.type = cudaMemoryTypeDevice,
                                          .device = fake_cuda.device_of_memory,
                                          .devicePointer = (void *)(uintptr_t)memory};
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    *out = malloc(bytes);
    return *out != NULL ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *memory)
{
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    (void)kind;
    memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    (void)stream;
    return cudaSuccess;
}

struct moe_status moe_cuda_driver_find(struct moe_cuda_driver *out)
{
    *out = (struct moe_cuda_driver){0};
    return moe_ok();
}

struct moe_status moe_cuda_failure(cudaError_t rc, const char *call)
{
    return rc == cudaSuccess
               ? moe_ok()
               : moe_error(MOE_INTERNAL, MOE_REASON_NONE, "%s: %s", call, cudaGetErrorString(rc));
}

struct moe_status moe_cuda_driver_failure(CUresult rc, const char *call)
{
    return rc == CUDA_SUCCESS ? moe_ok() : moe_error(MOE_INTERNAL, MOE_REASON_NONE, "%s", call);
}

struct moe_status moe_device_region_create(const struct moe_cuda_driver *driver, int device,
                                           struct moe_client_session *session, const char *name,
                                           size_t bytes, struct moe_client_region **out)
{
    (void)driver;
    (void)device;
    (void)session;
    (void)name;
    (void)bytes;
    (void)out;
    return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED, "not here");
}

cudaError_t moe_stream_load(void)
{
    return cudaSuccess;
}

cudaError_t moe_stream_enqueue_submit(const struct moe_stream_wait *w, cudaStream_t stream)
{
    (void)w;
    (void)stream;
    return cudaErrorNotSupported;
}

cudaError_t moe_stream_enqueue_wait(const struct moe_stream_wait *w, cudaStream_t stream)
{
    return moe_stream_enqueue_submit(w, stream);
}
