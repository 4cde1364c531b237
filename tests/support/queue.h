/* SPDX-License-Identifier: Apache-2.0 */
/* A bounded queue of pointers between threads, for tests that wait for events of another thread. */
#ifndef MOE_TEST_QUEUE_H
#define MOE_TEST_QUEUE_H

#include "base/status.h"

#include <stddef.h>

struct queue;

/* Aborts if memory is lacking. */
struct queue *queue_create(size_t capacity);
/* The queue does not own pointers that are still in it. */
void queue_destroy(struct queue *q);

/* False if it is full; the caller then keeps `item` (not NULL). */
bool queue_push(struct queue *q, void *item);

/* The oldest item, or NULL after `deadline_ns` (monotonic; 0 = do not wait). */
void *queue_pop(struct queue *q, uint64_t deadline_ns);

#endif
