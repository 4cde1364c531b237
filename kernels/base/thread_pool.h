/* SPDX-License-Identifier: Apache-2.0 */
/* A thread pool: a few threads run jobs in the order of their submission. A job has items, which
 * several threads run at the same time in any order. A job is opaque to the pool.
 *
 * Jobs belong to batches; moe_thread_pool_wait returns the result of a batch as a whole. The queue
 * is bounded: moe_thread_pool_submit blocks while it is full. After a failure the remaining items
 * of the batch are skipped. */
#ifndef MOE_BASE_THREAD_POOL_H
#define MOE_BASE_THREAD_POOL_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

enum {
    MOE_THREAD_POOL_MAX_THREADS = 64,
    MOE_THREAD_POOL_QUEUE = 64,      /* unfinished jobs */
    MOE_THREAD_POOL_JOB_BYTES = 192, /* largest job */
};

struct moe_thread_pool;

/* Runs item `item` of a job; `thread` counts from 0. Called from all threads at once. */
typedef struct moe_status (*moe_thread_pool_fn)(void *ctx, uint32_t thread, const void *job,
                                                uint32_t item);

/* Jobs with a common result. Zeroed before the first use; moe_thread_pool_wait makes it usable
 * again. The caller owns it and keeps it until all jobs are finished; the pool writes the fields.
 */
struct moe_thread_pool_batch {
    uint32_t unfinished;       /* jobs */
    struct moe_status failure; /* the first one; MOE_OK while there is none */
};

/* Starts `threads` (1..MOE_THREAD_POOL_MAX_THREADS) threads called `name` (base/thread.h). `name`
 * and `ctx` outlive the pool.
 * Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY; no thread is left then. */
struct moe_status moe_thread_pool_create(const char *name, uint32_t threads, moe_thread_pool_fn fn,
                                         void *ctx, struct moe_thread_pool **out) MOE_CHECKED;
/* Joins the threads. All jobs are finished before the call. NULL is ignored. */
void moe_thread_pool_destroy(struct moe_thread_pool *pool);

/* Copies a job of `bytes` (at most MOE_THREAD_POOL_JOB_BYTES) with `items` items into the queue;
 * blocks while the queue is full. Any thread except those of the pool.
 * Errors: an earlier failure of the batch; the job is not queued then. */
struct moe_status moe_thread_pool_submit(struct moe_thread_pool *pool,
                                         struct moe_thread_pool_batch *batch, const void *job,
                                         size_t bytes, uint32_t items) MOE_CHECKED;
/* Blocks until all jobs of the batch are finished; returns the first failure. */
struct moe_status moe_thread_pool_wait(struct moe_thread_pool *pool,
                                       struct moe_thread_pool_batch *batch) MOE_CHECKED;

#endif
