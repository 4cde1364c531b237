/* A crew: a few threads that work off orders, first come, first served. An order is cut into items
 * that different threads do at the same time, in no particular order; what an order is, only its
 * maker and the crew's function know.
 *
 * Whoever gives orders collects them in a batch and asks for the outcome of the batch as a whole.
 * The queue is bounded: who gives an order may wait for room. After a failure the items that are
 * left of the batch are skipped. */
#ifndef MOE_BASE_CREW_H
#define MOE_BASE_CREW_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

enum {
    MOE_CREW_MAX_THREADS = 64,
    MOE_CREW_QUEUE = 16,        /* orders that are not finished */
    MOE_CREW_ORDER_BYTES = 128, /* largest order */
};

struct moe_crew;

/* Does item `item` of an order; `thread` counts from 0. Called from all threads at once. */
typedef struct moe_status (*moe_crew_fn)(void *ctx, uint32_t thread, const void *order,
                                         uint32_t item);

/* Orders whose outcome is asked for together; zeroed to begin with, and again after
 * moe_crew_wait. Belongs to whoever gives the orders, and stays until they are finished. Both
 * fields are the crew's. */
struct moe_crew_batch {
    uint32_t unfinished;       /* orders */
    struct moe_status failure; /* the first one; MOE_OK while there is none */
};

/* Starts `threads` (1..MOE_CREW_MAX_THREADS) threads; `ctx` outlives the crew.
 * Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY, and no thread is left. */
struct moe_status moe_crew_create(uint32_t threads, moe_crew_fn fn, void *ctx,
                                  struct moe_crew **out) MOE_CHECKED;
/* Every batch has been waited for. Ends and joins the threads. NULL is ignored. */
void moe_crew_destroy(struct moe_crew *crew);

/* Copies an order of `bytes` (at most MOE_CREW_ORDER_BYTES) and gives it, as `items` items, to the
 * threads; waits while the queue is full. Any thread, but the crew's own.
 * Errors: a failure of the batch that is known already; the order is then not taken. */
struct moe_status moe_crew_give(struct moe_crew *crew, struct moe_crew_batch *batch,
                                const void *order, size_t bytes, uint32_t items) MOE_CHECKED;
/* Waits until all orders of the batch are finished, and tells what went wrong first. */
struct moe_status moe_crew_wait(struct moe_crew *crew, struct moe_crew_batch *batch) MOE_CHECKED;

#endif
