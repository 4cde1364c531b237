/* SPDX-License-Identifier: Apache-2.0 */
/* Opens a GPU, allocates and frees memory, and accounts for it; see device.h. It computes
 * nothing. */
#include "cuda/core/device.h"

#include "base/memory.h"
#include "common/activation_cache.h"
#include "cuda/plan/fabric.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PAGE = 4096,     /* alignment of all allocated memory */
    OLDEST_ARCH = 80 /* kernels are built for this and newer */
};

/* One small allocation that the driver did not align to a page: the driver's address, and the
 * aligned one that callers get. */
struct moe_cuda_moved {
    struct moe_cuda_moved *next;
    void *given, *base;
};

/* ---------------------------------------------------------------- open, close */

static struct moe_status no_host_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a device");
}

struct moe_status moe_cuda_device_use(const struct moe_device *device)
{
    return MOE_CUDA(cudaSetDevice(device->ordinal));
}

static struct moe_status read_properties(struct moe_device *device)
{
    int count = 0;
    MOE_TRY(MOE_CUDA(cudaGetDeviceCount(&count)));
    if (device->ordinal < 0 || device->ordinal >= count)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "there is no CUDA device %d: %d are visible", device->ordinal, count);
    struct cudaDeviceProp p;
    MOE_TRY(moe_cuda_device_use(device));
    MOE_TRY(MOE_CUDA(cudaGetDeviceProperties(&p, device->ordinal)));
    device->arch = 10 * p.major + p.minor;
    device->multiprocessors = p.multiProcessorCount;
    device->bulk_shared_bytes = p.major == 9 ? (uint32_t)p.sharedMemPerBlockOptin : 0;
    device->memory_bytes = p.totalGlobalMem;
    static_assert(sizeof device->uuid == sizeof p.uuid, "a GPU's UUID");
    memcpy(&device->uuid, &p.uuid, sizeof device->uuid);
    moe_cuda_fabric_domain(MOE_CUDA_NVML, device->uuid.bytes, device->domain);
    snprintf(device->gpu_name, sizeof device->gpu_name, "%.47s", p.name);
    if (device->arch < OLDEST_ARCH)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "%s has compute capability %d.%d: at least %d.%d is needed", p.name,
                         p.major, p.minor, OLDEST_ARCH / 10, OLDEST_ARCH % 10);
    return moe_ok();
}

static struct moe_status make_streams(struct moe_device *device)
{
    int lowest, highest;
    MOE_TRY(MOE_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest)));
    MOE_TRY(MOE_CUDA(cudaStreamCreateWithFlags(&device->compute, cudaStreamNonBlocking)));
    MOE_TRY(MOE_CUDA(cudaStreamCreateWithFlags(&device->upload, cudaStreamNonBlocking)));
    /* Rows of another step are moved by small kernels, which must not queue behind its products. */
    MOE_TRY(
        MOE_CUDA(cudaStreamCreateWithPriority(&device->copy_in, cudaStreamNonBlocking, highest)));
    return MOE_CUDA(
        cudaStreamCreateWithPriority(&device->copy_out, cudaStreamNonBlocking, highest));
}

static struct moe_status make_branch(struct moe_cuda_branch *branch)
{
    int lowest, highest;
    MOE_TRY(MOE_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest)));
    MOE_TRY(
        MOE_CUDA(cudaStreamCreateWithPriority(&branch->stream, cudaStreamNonBlocking, highest)));
    MOE_TRY(MOE_CUDA(cudaEventCreateWithFlags(&branch->fork_event, cudaEventDisableTiming)));
    return MOE_CUDA(cudaEventCreateWithFlags(&branch->join_event, cudaEventDisableTiming));
}

struct moe_status moe_cuda_device_create(int ordinal, struct moe_device **out)
{
    struct moe_device *device = calloc(1, sizeof *device);
    if (device == NULL)
        return no_host_memory();
    device->ordinal = ordinal;
    device->activation_cache = calloc(1, sizeof *device->activation_cache);
    if (device->activation_cache == NULL) {
        free(device);
        return no_host_memory();
    }
    moe_activation_cache_open(device->activation_cache, device, moe_cuda_mem_alloc,
                              moe_cuda_mem_free);
    moe_mutex_init(&device->memory_lock);
    struct moe_status st;
    MOE_TRY_GOTO(st, read_properties(device), fail);
    MOE_TRY_GOTO(st, make_streams(device), fail);
    MOE_TRY_GOTO(st, make_branch(&device->branch), fail);
    *out = device;
    return st;
fail:
    moe_cuda_device_destroy(device);
    return st;
}

/* Ignores errors: an earlier call has reported them, or they no longer matter to any caller. */
void moe_cuda_device_destroy(struct moe_device *device)
{
    if (device == NULL)
        return;
    cudaStream_t streams[] = {device->compute, device->branch.stream, device->copy_in,
                              device->copy_out, device->upload};
    cudaEvent_t events[] = {device->branch.fork_event, device->branch.join_event};
    (void)cudaSetDevice(device->ordinal);
    moe_activation_cache_close(device->activation_cache);
    free(device->activation_cache);
    for (size_t i = 0; i < sizeof streams / sizeof *streams; i++)
        if (streams[i] != NULL) {
            (void)cudaStreamSynchronize(streams[i]);
            (void)cudaStreamDestroy(streams[i]);
        }
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (events[i] != NULL)
            (void)cudaEventDestroy(events[i]);
    moe_mutex_destroy(&device->memory_lock);
    free(device);
}

void moe_cuda_device_info(struct moe_device *device, struct moe_device_info *out)
{
    snprintf(out->name, sizeof out->name, "%s, device %d", device->gpu_name, device->ordinal);
    memcpy(out->domain, device->domain, sizeof out->domain);
    out->memory_bytes = device->memory_bytes;
    out->used_bytes = __atomic_load_n(&device->used_bytes, __ATOMIC_RELAXED);
    size_t free_bytes = 0, total = 0;
    struct moe_status st = moe_cuda_device_use(device);
    if (!moe_failed(&st) && cudaMemGetInfo(&free_bytes, &total) != cudaSuccess)
        free_bytes = 0; /* a device that does not answer reports 0 */
    out->free_bytes = free_bytes;
}

void moe_cuda_device_moved(struct moe_device *device)
{
    (void)__atomic_add_fetch(&device->progress, 1, __ATOMIC_RELAXED);
}

uint64_t moe_cuda_device_progress(const struct moe_device *device)
{
    return __atomic_load_n(&device->progress, __ATOMIC_RELAXED);
}

static struct moe_status finish(struct moe_device *device, cudaStream_t stream)
{
    MOE_TRY(MOE_CUDA(cudaStreamSynchronize(stream)));
    moe_cuda_device_moved(device);
    return moe_ok();
}

struct moe_status moe_cuda_device_finish(struct moe_device *device)
{
    return finish(device, device->compute);
}

struct moe_status moe_cuda_branch_fork(struct moe_device *device)
{
    const struct moe_cuda_branch *b = &device->branch;
    MOE_TRY(MOE_CUDA(cudaEventRecord(b->fork_event, device->compute)));
    return MOE_CUDA(cudaStreamWaitEvent(b->stream, b->fork_event, 0));
}

struct moe_status moe_cuda_branch_join(struct moe_device *device)
{
    const struct moe_cuda_branch *b = &device->branch;
    MOE_TRY(MOE_CUDA(cudaEventRecord(b->join_event, b->stream)));
    return MOE_CUDA(cudaStreamWaitEvent(device->compute, b->join_event, 0));
}

/* --------------------------------------------------------------------- account */

static struct moe_status does_not_fit(size_t bytes, size_t free_bytes)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "%zu bytes do not fit: %zu are free", bytes, free_bytes);
}

static void add_used(struct moe_device *device, size_t bytes)
{
    (void)__atomic_add_fetch(&device->used_bytes, bytes, __ATOMIC_RELAXED);
}

/* The driver's figure includes memory of other libraries and processes. */
static struct moe_status check_room(size_t bytes)
{
    size_t free_bytes = 0, total = 0;
    MOE_TRY(MOE_CUDA(cudaMemGetInfo(&free_bytes, &total)));
    return bytes <= free_bytes ? moe_ok() : does_not_fit(bytes, free_bytes);
}

struct moe_status moe_cuda_device_charge(struct moe_device *device, size_t bytes)
{
    MOE_TRY(moe_cuda_device_use(device));
    MOE_TRY(check_room(bytes));
    add_used(device, bytes);
    return moe_ok();
}

void moe_cuda_device_discharge(struct moe_device *device, size_t bytes)
{
    uint64_t before = __atomic_fetch_sub(&device->used_bytes, bytes, __ATOMIC_RELAXED);
    MOE_INVARIANT(before >= bytes);
}

/* ---------------------------------------------------------------------- memory */

static bool page_aligned(const void *p)
{
    return (uintptr_t)p % PAGE == 0;
}

/* Allocates one page more than asked for, and records the driver's address. */
static struct moe_status alloc_moved(struct moe_device *device, size_t bytes, void **out)
{
    struct moe_cuda_moved *m = malloc(sizeof *m);
    if (m == NULL)
        return no_host_memory();
    struct moe_status st = MOE_CUDA(cudaMalloc(&m->base, bytes + PAGE));
    if (moe_failed(&st)) {
        free(m);
        return st;
    }
    m->given = (void *)(((uintptr_t)m->base + PAGE - 1) / PAGE * PAGE);
    moe_mutex_lock(&device->memory_lock);
    m->next = device->moved;
    device->moved = m;
    moe_mutex_unlock(&device->memory_lock);
    *out = m->given;
    return moe_ok();
}

/* The driver's address of `p`. */
static void *base_of(struct moe_device *device, void *p)
{
    moe_mutex_lock(&device->memory_lock);
    struct moe_cuda_moved **at = &device->moved;
    while (*at != NULL && (*at)->given != p)
        at = &(*at)->next;
    struct moe_cuda_moved *m = *at;
    if (m != NULL)
        *at = m->next;
    moe_mutex_unlock(&device->memory_lock);
    if (m == NULL)
        return p;
    void *base = m->base;
    free(m);
    return base;
}

static struct moe_status alloc_device(struct moe_device *device, size_t bytes, void **out)
{
    void *p = NULL;
    MOE_TRY(check_room(bytes));
    MOE_TRY(MOE_CUDA(cudaMalloc(&p, bytes)));
    if (!page_aligned(p)) {
        (void)cudaFree(p);
        MOE_TRY(alloc_moved(device, bytes, &p));
    }
    *out = p;
    struct moe_status st = MOE_CUDA(cudaMemsetAsync(p, 0, bytes, device->upload));
    return moe_failed(&st) ? st : MOE_CUDA(cudaStreamSynchronize(device->upload));
}

/* Only the driver knows how much memory exists: virtual machines get more as they use it. */
static struct moe_status alloc_host(size_t bytes, void **out)
{
    uint64_t confined = moe_confined_memory();
    if (bytes > confined) /* beyond the limit, the system would kill a process */
        return does_not_fit(bytes, (size_t)confined);
    MOE_TRY(MOE_CUDA(cudaHostAlloc(out, bytes, cudaHostAllocPortable)));
    memset(*out, 0, bytes);
    return moe_ok();
}

struct moe_status moe_cuda_mem_alloc(struct moe_device *device, enum moe_mem kind, size_t bytes,
                                     void **out)
{
    *out = NULL;
    if (bytes == 0)
        return moe_ok();
    MOE_TRY(moe_cuda_device_use(device));
    void *p = NULL;
    struct moe_status st =
        kind == MOE_MEM_DEVICE ? alloc_device(device, bytes, &p) : alloc_host(bytes, &p);
    if (p != NULL)
        add_used(device, bytes);
    if (moe_failed(&st)) {
        moe_cuda_mem_free(device, kind, p, bytes);
        return st;
    }
    *out = p;
    return moe_ok();
}

void moe_cuda_mem_free(struct moe_device *device, enum moe_mem kind, void *p, size_t bytes)
{
    if (p == NULL)
        return;
    (void)cudaSetDevice(device->ordinal);
    if (kind == MOE_MEM_DEVICE)
        (void)cudaFree(base_of(device, p));
    else
        (void)cudaFreeHost(p);
    moe_cuda_device_discharge(device, bytes);
}

struct moe_status moe_cuda_mem_copy(struct moe_device *device, void *dst, const void *src,
                                    size_t bytes)
{
    if (bytes == 0)
        return moe_ok();
    MOE_TRY(moe_cuda_device_use(device));
    MOE_TRY(MOE_CUDA(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, device->upload)));
    return finish(device, device->upload);
}

struct moe_status moe_cuda_buffer_reserve(struct moe_device *device, struct moe_cuda_buffer *buffer,
                                          size_t bytes)
{
    if (bytes <= buffer->bytes)
        return moe_ok();
    MOE_TRY(moe_cuda_device_use(device));
    /* Enqueued work may use the old buffer. `compute` may wait for peers for long, so wait for that
     * stream first: this does not block other threads' CUDA calls. */
    MOE_TRY(moe_cuda_device_finish(device));
    MOE_TRY(MOE_CUDA(cudaDeviceSynchronize()));
    device->buffers_moved++;
    moe_cuda_buffer_free(device, buffer);
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_DEVICE, bytes, &buffer->data));
    buffer->bytes = bytes;
    return moe_ok();
}

void moe_cuda_buffer_free(struct moe_device *device, struct moe_cuda_buffer *buffer)
{
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, buffer->data, buffer->bytes);
    *buffer = (struct moe_cuda_buffer){0};
}
