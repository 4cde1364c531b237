/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU device: its memory accounting, its scratch cache and its pool of compute threads.
 *
 * All parallel loops of the backend use moe_cpu_parallel; no other part starts compute threads. Any
 * thread may call all functions here. */
#ifndef MOE_CPU_DEVICE_H
#define MOE_CPU_DEVICE_H

#include "common/activation_cache.h"
#include "cpu/compute/isa.h"
#include "moe/backend.h"

/* Members of struct moe_backend. */
struct moe_status moe_cpu_device_open(const struct moe_device_config *config,
                                      struct moe_device **out) MOE_CHECKED;
void moe_cpu_device_close(struct moe_device *device);
void moe_cpu_device_info(struct moe_device *device, struct moe_device_info *out);
uint64_t moe_cpu_device_progress(const struct moe_device *device);
struct moe_status moe_cpu_mem_alloc(struct moe_device *device, enum moe_mem kind, size_t bytes,
                                    void **out) MOE_CHECKED; /* 0 bytes: NULL */
void moe_cpu_mem_free(struct moe_device *device, enum moe_mem kind, void *p, size_t bytes);
struct moe_status moe_cpu_mem_copy(struct moe_device *device, void *dst, const void *src,
                                   size_t bytes) MOE_CHECKED;

struct moe_status moe_cpu_mem_register(struct moe_device *device, void *p,
                                       size_t bytes) MOE_CHECKED;
void moe_cpu_mem_unregister(struct moe_device *device, void *p, size_t bytes);
struct moe_status moe_cpu_mem_import(struct moe_device *device, int descriptor, size_t bytes,
                                     void **out, bool *same_gpu) MOE_CHECKED;
void moe_cpu_mem_release(struct moe_device *device, void *p, size_t bytes);

/* moe_cpu_device_open with given kernels instead of the best that this processor can run. Tests and
 * benchmarks iterate over moe_cpu_isa_list. */
struct moe_status moe_cpu_device_open_isa(const struct moe_device_config *config,
                                          const struct moe_cpu_isa *isa,
                                          struct moe_device **out) MOE_CHECKED;

/* The activations that forward steps retain for backward passes. */
struct moe_activation_cache *moe_cpu_device_activation_cache(struct moe_device *device);

const struct moe_cpu_isa *moe_cpu_device_isa(const struct moe_device *device);

/* Counts memory that was mapped elsewhere (a peer-visible window) as used on this device.
 * Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY if the sum exceeds the physical memory. */
struct moe_status moe_cpu_device_charge(struct moe_device *device, size_t bytes) MOE_CHECKED;
void moe_cpu_device_discharge(struct moe_device *device, size_t bytes);

/* Runs fn(ctx, 0) .. fn(ctx, items - 1), each once, on the pool and on the calling thread, in any
 * order. Returns when all are done; the caller then sees all their writes. A single item runs on
 * the calling thread. If the pool is busy, or the call comes from inside an item, the calling
 * thread runs all items. So it never waits for other callers. */
void moe_cpu_parallel(struct moe_device *device, uint32_t items,
                      void (*fn)(void *ctx, uint32_t item), void *ctx);

static inline uint32_t moe_cpu_min(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static inline uint32_t moe_cpu_ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* How many units of work, each of `work` multiply-adds, make an item of a few microseconds. Smaller
 * items do not justify waking another thread. */
static inline uint32_t moe_cpu_units_per_item(uint64_t work)
{
    const uint64_t enough = 1 << 17;
    return work >= enough ? 1 : (uint32_t)(enough / (work + 1)) + 1;
}

/* Temporary memory that is cached for reuse; contents undefined, aligned to 4096. It counts as used
 * until the device closes. If memory is short, the activation cache gives its block back, unless it
 * is in use (activation_cache.h). A caller that uses it may release it and try again. */
struct moe_status moe_cpu_scratch_take(struct moe_device *device, size_t bytes,
                                       void **out) MOE_CHECKED;
void moe_cpu_scratch_give(struct moe_device *device, void *p); /* NULL is ignored */

#endif
