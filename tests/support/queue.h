/* SPDX-License-Identifier: Apache-2.0 */
/* A bounded queue of pointers between threads: for tests that wait for what another thread gets. */
#ifndef MOE_TEST_QUEUE_H
#define MOE_TEST_QUEUE_H

#include "base/status.h"

#include <stddef.h>

struct queue;

/* Ends the process where there is no memory. */
struct queue *queue_create(size_t capacity);
/* Must be empty or hold only pointers that someone else owns. */
void queue_destroy(struct queue *q);

/* False when full; `item` (not NULL) stays with the caller then. */
bool queue_push(struct queue *q, void *item);

/* The oldest item, or NULL when `deadline_ns` (monotonic; 0 = do not wait) has passed. */
void *queue_pop(struct queue *q, uint64_t deadline_ns);

#endif
