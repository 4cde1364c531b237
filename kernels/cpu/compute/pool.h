/* SPDX-License-Identifier: Apache-2.0 */
/* The persistent threads behind moe_cpu_parallel. Internal to device.c and pool.c, except
 * for the pause of a waiting thread. */
#ifndef MOE_CPU_POOL_H
#define MOE_CPU_POOL_H

#include "base/status.h"

#include <stdint.h>

enum { MOE_CPU_MAX_THREADS = 256 };

struct moe_cpu_pool;

/* `threads` >= 1 counts the caller of moe_cpu_pool_run, so the pool starts threads - 1. */
struct moe_status moe_cpu_pool_create(uint32_t threads, struct moe_cpu_pool **out) MOE_CHECKED;
void moe_cpu_pool_destroy(struct moe_cpu_pool *pool); /* idle; NULL is ignored */
void moe_cpu_pool_run(struct moe_cpu_pool *pool, uint32_t items,
                      void (*fn)(void *ctx, uint32_t item), void *ctx);

/* Any thread: a number that changes with each item that begins. */
uint64_t moe_cpu_pool_progress(const struct moe_cpu_pool *pool);

/* Tells the processor that this thread waits in a loop. */
static inline void moe_cpu_spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
