/* SPDX-License-Identifier: Apache-2.0 */
/* A bounded queue of pointers without locks. Any thread puts, one thread takes, and neither waits.
 *
 * Each cell has a turn. A writer reserves the next position by a compare-and-swap, and may fill its
 * cell when the cell's turn is that position. The reader may empty it when the turn is the position
 * plus one. A full queue shows as a cell with the turn of an earlier round. (Vyukov's bounded
 * queue, with one reader.) */
#ifndef MOE_TRACE_QUEUE_H
#define MOE_TRACE_QUEUE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct moe_trace_cell {
    _Atomic uint64_t turn;
    void *item; /* the writer's or the reader's, by `turn` */
};

struct moe_trace_queue {
    struct moe_trace_cell *cells; /* [mask + 1] */
    uint64_t mask;
    _Atomic uint64_t put; /* position of the next item that is put */
    uint64_t take;        /* the reader's: position of the next item that it takes */
};

/* `count` is a power of two, at least 2. False: out of memory. */
bool moe_trace_queue_init(struct moe_trace_queue *q, uint64_t count);
void moe_trace_queue_free(struct moe_trace_queue *q);
/* False if the queue is full. `*position`: how many items were put before this one. */
bool moe_trace_queue_put(struct moe_trace_queue *q, void *item, uint64_t *position);
/* NULL if the queue is empty. */
void *moe_trace_queue_take(struct moe_trace_queue *q);

#endif
