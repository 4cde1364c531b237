/* SPDX-License-Identifier: Apache-2.0 */
/* The pool behind service/staging.h. Size classes are four per doubling, so that rounding up wastes
 * at most a quarter; each class keeps a stack of idle buffers. When a new buffer does not fit, idle
 * ones are freed, largest class first, until it does. */
#include "service/staging.h"

#include "base/mutex.h"
#include "base/wait.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum {
    CLASS_MIN = 4096,
    CLASSES = 4 * 40, /* up to 2^52 bytes */
    RETRY_MS = 20,
};

struct moe_buffer {
    struct moe_staging *pool;
    struct moe_buffer *next; /* while idle */
    void *data;
    unsigned size_class;
    _Atomic uint32_t references;
};

struct moe_staging {
    const struct moe_backend *backend;
    struct moe_device *device;
    uint64_t budget;
    struct moe_mutex lock;
    pthread_cond_t unused; /* in_use_bytes has become 0 */
    MOE_GUARDED_BY(lock) struct {
        struct moe_buffer *idle[CLASSES];
        struct moe_staging_counters counters; /* in_use_bytes + idle_bytes <= budget */
    };
};

/* Classes are 4096, 5120, 6144, 7168, 8192, 10240 ... */
static uint64_t class_bytes(unsigned size_class)
{
    return (uint64_t)(CLASS_MIN / 4) * (4 + size_class % 4) << (size_class / 4);
}

/* The smallest class that holds `bytes`; CLASSES when there is none. */
static unsigned class_of(size_t bytes)
{
    unsigned size_class = 0;
    while (size_class < CLASSES && class_bytes(size_class) < bytes)
        size_class += class_bytes(size_class) < bytes / 2 ? 4 : 1;
    return size_class;
}

struct moe_status moe_staging_create(const struct moe_backend *backend, struct moe_device *device,
                                     uint64_t budget, struct moe_staging **out)
{
    struct moe_staging *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the staging pool");
    s->backend = backend;
    s->device = device;
    s->budget = budget;
    moe_mutex_init(&s->lock);
    pthread_cond_init(&s->unused, NULL);
    *out = s;
    return moe_ok();
}

static void free_buffer(struct moe_buffer *b)
{
    struct moe_staging *s = b->pool;
    s->backend->mem_free(s->device, MOE_MEM_HOST, b->data, class_bytes(b->size_class));
    free(b);
}

/* Frees idle buffers, largest first, until `bytes` more fit the budget. */
static bool make_room(struct moe_staging *s, uint64_t bytes) MOE_REQUIRES(s->lock)
{
    struct moe_staging_counters *c = &s->counters;
    if (bytes > s->budget || c->in_use_bytes > s->budget - bytes)
        return false;
    for (unsigned i = CLASSES; i-- > 0 && c->in_use_bytes + c->idle_bytes + bytes > s->budget;) {
        while (s->idle[i] != NULL && c->in_use_bytes + c->idle_bytes + bytes > s->budget) {
            struct moe_buffer *b = s->idle[i];
            s->idle[i] = b->next;
            c->idle_bytes -= class_bytes(i);
            free_buffer(b);
        }
    }
    return true;
}

void moe_staging_destroy(struct moe_staging *s)
{
    if (s == NULL)
        return;
    moe_mutex_lock(&s->lock);
    while (s->counters.in_use_bytes > 0)
        moe_wait(&s->unused, &s->lock);
    moe_mutex_unlock(&s->lock);
    moe_mutex_not_shared(&s->lock);
    for (unsigned i = 0; i < CLASSES; i++) {
        for (struct moe_buffer *next, *b = s->idle[i]; b != NULL; b = next) {
            next = b->next;
            free_buffer(b);
        }
    }
    pthread_cond_destroy(&s->unused);
    moe_mutex_destroy(&s->lock);
    free(s);
}

static struct moe_status new_buffer(struct moe_staging *s, unsigned size_class,
                                    struct moe_buffer **out)
{
    struct moe_buffer *b = calloc(1, sizeof *b);
    struct moe_status st;
    if (b == NULL)
        return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, RETRY_MS,
                               "out of memory");
    b->pool = s;
    b->size_class = size_class;
    st = s->backend->mem_alloc(s->device, MOE_MEM_HOST, class_bytes(size_class), &b->data);
    if (moe_failed(&st)) {
        free(b);
        return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, RETRY_MS,
                               "the device has no staging memory left");
    }
    *out = b;
    return st;
}

static struct moe_status take_locked(struct moe_staging *s, unsigned size_class,
                                     struct moe_buffer **out) MOE_REQUIRES(s->lock)
{
    struct moe_buffer *b = s->idle[size_class];
    if (b != NULL) {
        s->idle[size_class] = b->next;
        s->counters.idle_bytes -= class_bytes(size_class);
    } else {
        if (!make_room(s, class_bytes(size_class)))
            return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, RETRY_MS,
                                   "too many bytes of requests are in flight");
        MOE_TRY(new_buffer(s, size_class, &b));
    }
    s->counters.in_use_bytes += class_bytes(size_class);
    atomic_store(&b->references, 1);
    *out = b;
    return moe_ok();
}

struct moe_status moe_staging_take(struct moe_staging *s, size_t bytes, struct moe_buffer **out)
{
    unsigned size_class = class_of(bytes);
    if (size_class == CLASSES || class_bytes(size_class) > s->budget)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL,
                         "a tensor of %zu bytes exceeds the limit of bytes in flight", bytes);
    moe_mutex_lock(&s->lock);
    struct moe_status st = take_locked(s, size_class, out);
    moe_mutex_unlock(&s->lock);
    return st;
}

void *moe_buffer_data(const struct moe_buffer *b)
{
    return b->data;
}

void moe_buffer_ref(struct moe_buffer *b)
{
    atomic_fetch_add(&b->references, 1);
}

void moe_buffer_unref(struct moe_buffer *b)
{
    if (b == NULL || atomic_fetch_sub(&b->references, 1) != 1)
        return;
    struct moe_staging *s = b->pool;
    moe_mutex_lock(&s->lock);
    s->counters.in_use_bytes -= class_bytes(b->size_class);
    s->counters.idle_bytes += class_bytes(b->size_class);
    b->next = s->idle[b->size_class];
    s->idle[b->size_class] = b;
    if (s->counters.in_use_bytes == 0)
        pthread_cond_signal(&s->unused);
    moe_mutex_unlock(&s->lock);
}

void moe_staging_read_counters(struct moe_staging *s, struct moe_staging_counters *out)
{
    moe_mutex_lock(&s->lock);
    *out = s->counters;
    moe_mutex_unlock(&s->lock);
}
