/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/queue.h"

#include <stdlib.h>

bool moe_trace_queue_init(struct moe_trace_queue *q, uint64_t count)
{
    *q = (struct moe_trace_queue){.mask = count - 1};
    q->cells = calloc(count, sizeof *q->cells);
    for (uint64_t i = 0; q->cells != NULL && i < count; i++)
        atomic_init(&q->cells[i].turn, i);
    return q->cells != NULL;
}

void moe_trace_queue_free(struct moe_trace_queue *q)
{
    free(q->cells);
    q->cells = NULL;
}

bool moe_trace_queue_put(struct moe_trace_queue *q, void *item, uint64_t *position)
{
    uint64_t at = atomic_load_explicit(&q->put, memory_order_relaxed);
    for (;;) {
        struct moe_trace_cell *cell = &q->cells[at & q->mask];
        uint64_t turn = atomic_load_explicit(&cell->turn, memory_order_acquire);
        if (turn < at)
            return false; /* the reader has not emptied it since the round before */
        if (turn > at) {  /* another writer was faster */
            at = atomic_load_explicit(&q->put, memory_order_relaxed);
            continue;
        }
        if (!atomic_compare_exchange_weak_explicit(&q->put, &at, at + 1, memory_order_relaxed,
                                                   memory_order_relaxed))
            continue; /* `at` is the present position now */
        cell->item = item;
        atomic_store_explicit(&cell->turn, at + 1, memory_order_release);
        *position = at;
        return true;
    }
}

void *moe_trace_queue_take(struct moe_trace_queue *q)
{
    struct moe_trace_cell *cell = &q->cells[q->take & q->mask];
    if (atomic_load_explicit(&cell->turn, memory_order_acquire) != q->take + 1)
        return NULL;
    void *item = cell->item;
    atomic_store_explicit(&cell->turn, q->take + q->mask + 1, memory_order_release);
    q->take++;
    return item;
}
