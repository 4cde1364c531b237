/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU device: its memory accounting, its scratch cache and its pool of compute threads.
 *
 * Every loop of the backend that is worth sharing goes through moe_cpu_parallel; no other part
 * starts threads. All functions here may be called from any thread unless stated. */
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
struct moe_status moe_cpu_mem_alloc(struct moe_device *device, enum moe_mem kind, size_t bytes,
                                    void **out) MOE_CHECKED; /* 0 bytes: NULL */
void moe_cpu_mem_free(struct moe_device *device, enum moe_mem kind, void *p, size_t bytes);
struct moe_status moe_cpu_mem_copy(struct moe_device *device, void *dst, const void *src,
                                   size_t bytes) MOE_CHECKED;

/* moe_cpu_device_open with kernels of the caller's choice instead of the best this processor can
 * run (tests and benchmarks walk through moe_cpu_isa_list). */
struct moe_status moe_cpu_device_open_isa(const struct moe_device_config *config,
                                          const struct moe_cpu_isa *isa,
                                          struct moe_device **out) MOE_CHECKED;

/* What forward steps keep for backward passes. */
struct moe_activation_cache *moe_cpu_device_activation_cache(struct moe_device *device);

const struct moe_cpu_isa *moe_cpu_device_isa(const struct moe_device *device);

/* Puts memory that was mapped elsewhere (a peer-visible window) on the device's account.
 * Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY when physical memory would be exceeded. */
struct moe_status moe_cpu_device_charge(struct moe_device *device, size_t bytes) MOE_CHECKED;
void moe_cpu_device_discharge(struct moe_device *device, size_t bytes);

/* Runs fn(ctx, 0) .. fn(ctx, items - 1), each once, on the pool and on the calling thread, in any
 * order; returns when all are done, and all they wrote is then visible to the caller. One item
 * runs at once on the calling thread. A call that finds the pool busy with another caller's items
 * (or is made from inside an item) runs all its items itself, so it never waits for strangers. */
void moe_cpu_parallel(struct moe_device *device, uint32_t items,
                      void (*fn)(void *ctx, uint32_t item), void *ctx);

/* How many units of work, each of `work` multiply-adds, make an item that is worth waking another
 * thread for: a few microseconds. */
static inline uint32_t moe_cpu_units_per_item(uint64_t work)
{
    const uint64_t enough = 1 << 17;
    return work >= enough ? 1 : (uint32_t)(enough / (work + 1)) + 1;
}

/* Temporary memory that is kept for the next taker instead of going back to the system at once;
 * contents undefined, aligned to 4096. Counts as used until the device closes. What forward steps
 * have kept goes where there is no memory otherwise, unless somebody is at it (activation_cache.h):
 * a taker that is may try again once it has let go. */
struct moe_status moe_cpu_scratch_take(struct moe_device *device, size_t bytes,
                                       void **out) MOE_CHECKED;
void moe_cpu_scratch_give(struct moe_device *device, void *p); /* NULL is ignored */

#endif
