/* SPDX-License-Identifier: Apache-2.0 */
/* Host buffers that requests and answers live in from the first parsed byte until the transport is
 * done with the answer. Buffers come in size classes, are counted by reference and are kept for
 * reuse: memory that is touched for the first time costs a page fault per 4 KiB, and on a GPU host
 * pinning costs more still.
 *
 * The pool never holds more than its budget, idle buffers included; whoever asks beyond it is told
 * to retry. Every function is safe from any thread; the backend's mem_alloc and mem_free are called
 * under the pool's own lock. */
#ifndef MOE_SERVICE_STAGING_H
#define MOE_SERVICE_STAGING_H

#include "moe/backend.h"

struct moe_staging;
struct moe_buffer;

/* `budget` is in bytes; the device outlives the pool. */
struct moe_status moe_staging_create(const struct moe_backend *backend, struct moe_device *device,
                                     uint64_t budget, struct moe_staging **out) MOE_CHECKED;
/* Waits until every buffer has been released (the transport may let go of an answer a little after
 * its call is over), then frees all. NULL is ignored. */
void moe_staging_destroy(struct moe_staging *s);

/* A buffer of at least `bytes` bytes with one reference; contents undefined, aligned to 4096.
 * Errors: MOE_RESOURCE_EXHAUSTED/QUEUE_FULL with a retry hint when the budget is used up, or
 * without one when `bytes` can never fit; MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_staging_take(struct moe_staging *s, size_t bytes,
                                   struct moe_buffer **out) MOE_CHECKED;

void *moe_buffer_data(const struct moe_buffer *b);
void moe_buffer_hold(struct moe_buffer *b);
/* The last release gives the buffer back to its pool. NULL is ignored. */
void moe_buffer_release(struct moe_buffer *b);

struct moe_staging_counters {
    uint64_t in_use_bytes; /* of buffers that someone holds, rounded up to their size class */
    uint64_t idle_bytes;   /* kept for reuse */
    uint64_t refused;      /* requests beyond the budget, since the start */
};
void moe_staging_read_counters(struct moe_staging *s, struct moe_staging_counters *out);

#endif
