#include "base/queue.h"

#include "base/size.h"
#include "base/wait.h"

#include <pthread.h>
#include <stdlib.h>

struct moe_queue {
    pthread_mutex_t lock;
    pthread_cond_t ready;
    bool closed;
    size_t capacity, head, length; /* items sit at (head + i) % capacity, i < length */
    void *items[];
};

struct moe_status moe_queue_create(size_t capacity, struct moe_queue **out)
{
    size_t bytes;
    if (capacity == 0 || !moe_size_mul(capacity, sizeof(void *), &bytes) ||
        !moe_size_add(bytes, sizeof(struct moe_queue), &bytes))
        return moe_error(MOE_INTERNAL, MOE_REASON_CONFIG_INVALID, "queue capacity %zu", capacity);
    struct moe_queue *q = calloc(1, bytes);
    if (q == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "queue of %zu",
                         capacity);
    q->capacity = capacity;
    pthread_mutex_init(&q->lock, NULL);
    moe_wait_init(&q->ready);
    *out = q;
    return moe_ok();
}

void moe_queue_destroy(struct moe_queue *q)
{
    if (q == NULL)
        return;
    pthread_cond_destroy(&q->ready);
    pthread_mutex_destroy(&q->lock);
    free(q);
}

bool moe_queue_push(struct moe_queue *q, void *item)
{
    pthread_mutex_lock(&q->lock);
    bool room = !q->closed && q->length < q->capacity;
    if (room) {
        q->items[(q->head + q->length++) % q->capacity] = item;
        pthread_cond_signal(&q->ready);
    }
    pthread_mutex_unlock(&q->lock);
    return room;
}

void *moe_queue_pop(struct moe_queue *q, uint64_t deadline_ns)
{
    void *item = NULL;
    bool in_time = deadline_ns != 0;
    pthread_mutex_lock(&q->lock);
    while (q->length == 0 && !q->closed && in_time)
        in_time = moe_wait_until(&q->ready, &q->lock, deadline_ns);
    if (q->length > 0) {
        item = q->items[q->head];
        q->head = (q->head + 1) % q->capacity;
        q->length--;
    }
    pthread_mutex_unlock(&q->lock);
    return item;
}

void moe_queue_close(struct moe_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->closed = true;
    pthread_cond_broadcast(&q->ready);
    pthread_mutex_unlock(&q->lock);
}

size_t moe_queue_length(struct moe_queue *q)
{
    pthread_mutex_lock(&q->lock);
    size_t n = q->length;
    pthread_mutex_unlock(&q->lock);
    return n;
}
