/* SPDX-License-Identifier: Apache-2.0 */
/* See queue.h. */
#include "queue.h"

#include "base/mutex.h"
#include "base/wait.h"

#include <pthread.h>
#include <stdlib.h>

struct queue {
    struct moe_mutex lock;
    pthread_cond_t ready;
    size_t capacity, head, length; /* items sit at (head + i) % capacity, i < length */
    void *items[];
};

struct queue *queue_create(size_t capacity)
{
    struct queue *q = calloc(1, sizeof *q + capacity * sizeof(void *));
    MOE_INVARIANT(q != NULL);
    q->capacity = capacity;
    moe_mutex_init(&q->lock);
    moe_wait_init(&q->ready);
    return q;
}

void queue_destroy(struct queue *q)
{
    pthread_cond_destroy(&q->ready);
    moe_mutex_destroy(&q->lock);
    free(q);
}

bool queue_push(struct queue *q, void *item)
{
    moe_mutex_lock(&q->lock);
    bool room = q->length < q->capacity;
    if (room) {
        q->items[(q->head + q->length++) % q->capacity] = item;
        pthread_cond_signal(&q->ready);
    }
    moe_mutex_unlock(&q->lock);
    return room;
}

void *queue_pop(struct queue *q, uint64_t deadline_ns)
{
    void *item = NULL;
    bool in_time = deadline_ns != 0;
    moe_mutex_lock(&q->lock);
    while (q->length == 0 && in_time)
        in_time = moe_wait_until(&q->ready, &q->lock, deadline_ns);
    if (q->length > 0) {
        item = q->items[q->head];
        q->head = (q->head + 1) % q->capacity;
        q->length--;
    }
    moe_mutex_unlock(&q->lock);
    return item;
}
