/* SPDX-License-Identifier: Apache-2.0 */
/* Host buffers of requests and answers, from the first parsed byte until the transport is done with
 * the answer. Buffers have size classes and reference counts, and are kept for reuse: the first
 * touch of memory costs a page fault per 4 KiB, and pinning on a GPU host costs more still.
 *
 * The pool stays within its budget, idle buffers included; a request beyond it gets a retry hint.
 * Every function is safe from any thread; the backend's mem_alloc and mem_free are called under the
 * pool's lock. */
#ifndef MOE_SERVICE_STAGING_H
#define MOE_SERVICE_STAGING_H

#include "moe/backend.h"

struct moe_staging;
struct moe_buffer;

/* `budget` is in bytes; the device outlives the pool. */
struct moe_status moe_staging_create(const struct moe_backend *backend, struct moe_device *device,
                                     uint64_t budget, struct moe_staging **out) MOE_CHECKED;
/* Waits until all references are dropped (the transport may drop those of an answer shortly after
 * its call is over), then frees all. NULL is ignored. */
void moe_staging_destroy(struct moe_staging *s);

/* A buffer of at least `bytes` bytes with one reference; contents undefined, aligned to 4096.
 * Errors: MOE_RESOURCE_EXHAUSTED/QUEUE_FULL with a retry hint when the budget is used up, or
 * without one when `bytes` can never fit; MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_staging_take(struct moe_staging *s, size_t bytes,
                                   struct moe_buffer **out) MOE_CHECKED;

void *moe_buffer_data(const struct moe_buffer *b);
void moe_buffer_ref(struct moe_buffer *b);
/* The last one gives the buffer back to its pool. NULL is ignored. */
void moe_buffer_unref(struct moe_buffer *b);

struct moe_staging_counters {
    uint64_t in_use_bytes; /* of referenced buffers, rounded up to their size class */
    uint64_t idle_bytes;   /* kept for reuse */
};
void moe_staging_read_counters(struct moe_staging *s, struct moe_staging_counters *out);

#endif
