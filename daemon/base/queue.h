/* A bounded queue of pointers between threads.
 *
 * Any number of threads may push and pop. Full means refuse, never block: whoever pushes decides
 * what a full queue means. After close, pushes are refused and pops drain what is left. */
#ifndef MOE_BASE_QUEUE_H
#define MOE_BASE_QUEUE_H

#include "base/status.h"

#include <stddef.h>

struct moe_queue;

struct moe_status moe_queue_create(size_t capacity, struct moe_queue **out) MOE_CHECKED;
/* Must be empty or hold only pointers that someone else owns. NULL is ignored. */
void moe_queue_destroy(struct moe_queue *q);

/* False when full or closed; `item` (not NULL) stays with the caller then. */
bool moe_queue_push(struct moe_queue *q, void *item);

/* The oldest item, or NULL when `deadline_ns` (monotonic; 0 = do not wait, MOE_NEVER = wait for
 * ever) has passed, or when the queue is closed and empty. */
void *moe_queue_pop(struct moe_queue *q, uint64_t deadline_ns);

/* Wakes everyone who waits. */
void moe_queue_close(struct moe_queue *q);

size_t moe_queue_length(struct moe_queue *q);

#endif
