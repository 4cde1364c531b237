/* SPDX-License-Identifier: Apache-2.0 */
/* The queues behind schedule/batcher.h: one list per key in a flat array indexed by (layer, kind,
 * dtype). The position of a split request is `taken`, the number of its tokens handed to steps; it
 * is the only thing that put-back has to restore. */
#include "schedule/batcher.h"

#include "base/clock.h"

#include <stdlib.h>

enum {
    KINDS = 2,  /* MOE_STEP_FORWARD, MOE_STEP_FORWARD_RETAIN */
    DTYPES = 2, /* F32, BF16 */
    QUEUES_PER_LAYER = KINDS * DTYPES,
};

struct queue {
    struct moe_work *head, *tail; /* linked by next and prev; both NULL when empty */
    uint64_t tokens;              /* sum of tokens - taken over the list */
};

struct moe_batcher {
    uint32_t *layers; /* [layer_count], ascending */
    size_t layer_count;
    struct queue *queues; /* [layer_count * QUEUES_PER_LAYER] */
    uint64_t tokens;      /* over all queues */
    uint64_t next_expiry; /* <= every queued deadline; MOE_NEVER when none can expire */
};

struct moe_status moe_batcher_create(const uint32_t *layers, size_t count, struct moe_batcher **out)
{
    for (size_t i = 1; i < count; i++)
        if (layers[i] <= layers[i - 1])
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                             "layers must be listed in ascending order");
    struct moe_batcher *b = calloc(1, sizeof *b);
    if (b == NULL)
        goto no_memory;
    b->layers = calloc(count + 1, sizeof *b->layers);
    b->queues = calloc(count * QUEUES_PER_LAYER + 1, sizeof *b->queues);
    if (b->layers == NULL || b->queues == NULL)
        goto no_memory;
    for (size_t i = 0; i < count; i++)
        b->layers[i] = layers[i];
    b->layer_count = count;
    b->next_expiry = MOE_NEVER;
    *out = b;
    return moe_ok();
no_memory:
    moe_batcher_destroy(b);
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for the queues");
}

void moe_batcher_destroy(struct moe_batcher *b)
{
    if (b == NULL)
        return;
    free(b->layers);
    free(b->queues);
    free(b);
}

static int compare_layers(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static struct queue *find_queue(const struct moe_batcher *b, const struct moe_step_key *key)
{
    if (!moe_step_traits(key->kind)->queued ||
        (key->dtype != MOE_DTYPE_F32 && key->dtype != MOE_DTYPE_BF16) || b->layer_count == 0)
        return NULL;
    const uint32_t *at =
        bsearch(&key->layer, b->layers, b->layer_count, sizeof *b->layers, compare_layers);
    if (at == NULL)
        return NULL;
    size_t ordinal = (size_t)(at - b->layers);
    size_t kind = key->kind == MOE_STEP_FORWARD_RETAIN, dtype = key->dtype == MOE_DTYPE_BF16;
    return &b->queues[ordinal * QUEUES_PER_LAYER + kind * DTYPES + dtype];
}

bool moe_batcher_has(const struct moe_batcher *b, const struct moe_step_key *key)
{
    return find_queue(b, key) != NULL;
}

/* ----------------------------------------------------------------------- lists */

static void link_tail(struct moe_batcher *b, struct queue *q, struct moe_work *w)
{
    w->prev = q->tail;
    w->next = NULL;
    if (q->tail != NULL)
        q->tail->next = w;
    else
        q->head = w;
    q->tail = w;
    w->queue = (uint32_t)(q - b->queues);
    w->queued = true;
}

static void link_head(struct moe_batcher *b, struct queue *q, struct moe_work *w)
{
    w->prev = NULL;
    w->next = q->head;
    if (q->head != NULL)
        q->head->prev = w;
    else
        q->tail = w;
    q->head = w;
    w->queue = (uint32_t)(q - b->queues);
    w->queued = true;
}

static void unlink_work(struct queue *q, struct moe_work *w)
{
    if (w->prev != NULL)
        w->prev->next = w->next;
    else
        q->head = w->next;
    if (w->next != NULL)
        w->next->prev = w->prev;
    else
        q->tail = w->prev;
    w->prev = w->next = NULL;
    w->queued = false;
}

static void add_tokens(struct moe_batcher *b, struct queue *q, uint32_t tokens)
{
    q->tokens += tokens;
    b->tokens += tokens;
}

static void subtract_tokens(struct moe_batcher *b, struct queue *q, uint32_t tokens)
{
    MOE_INVARIANT(q->tokens >= tokens && b->tokens >= tokens);
    q->tokens -= tokens;
    b->tokens -= tokens;
}

/* ------------------------------------------------------------- push, take, undo */

static void note_deadline(struct moe_batcher *b, const struct moe_work *w)
{
    if (w->deadline_ns < b->next_expiry)
        b->next_expiry = w->deadline_ns;
}

void moe_batcher_push(struct moe_batcher *b, const struct moe_step_key *key, struct moe_work *w)
{
    struct queue *q = find_queue(b, key);
    MOE_INVARIANT(q != NULL && w->tokens > 0);
    w->taken = w->finished = 0;
    link_tail(b, q, w);
    add_tokens(b, q, w->tokens);
    note_deadline(b, w);
}

size_t moe_batcher_take(struct moe_batcher *b, const struct moe_step_key *key, uint32_t capacity,
                        struct moe_segment *segments, uint32_t *tokens)
{
    struct queue *q = find_queue(b, key);
    MOE_INVARIANT(q != NULL);
    size_t count = 0;
    *tokens = 0;
    while (q->head != NULL && *tokens < capacity) {
        struct moe_work *w = q->head;
        uint32_t left = w->tokens - w->taken, room = capacity - *tokens;
        uint32_t n = left < room ? left : room;
        segments[count++] = (struct moe_segment){w, w->taken, n};
        w->taken += n;
        *tokens += n;
        if (w->taken == w->tokens)
            unlink_work(q, w);
    }
    subtract_tokens(b, q, *tokens);
    return count;
}

bool moe_batcher_take_whole(struct moe_batcher *b, const struct moe_step_key *key, uint64_t number,
                            struct moe_segment *segment)
{
    struct queue *q = find_queue(b, key);
    MOE_INVARIANT(q != NULL && key->kind == MOE_STEP_FORWARD_RETAIN && number != 0);
    struct moe_work *w = q->head;
    while (w != NULL && w->number != number)
        w = w->next;
    if (w == NULL)
        return false;
    *segment = (struct moe_segment){w, 0, w->tokens};
    w->taken = w->tokens;
    unlink_work(q, w);
    subtract_tokens(b, q, w->tokens);
    return true;
}

void moe_batcher_put_back(struct moe_batcher *b, const struct moe_segment *segment)
{
    struct moe_work *w = segment->work;
    struct queue *q = &b->queues[w->queue];
    MOE_INVARIANT(w->taken == segment->first + segment->count);
    if (!w->queued)
        link_head(b, q, w);
    w->taken = segment->first;
    add_tokens(b, q, segment->count);
    note_deadline(b, w);
}

bool moe_batcher_remove(struct moe_batcher *b, struct moe_work *w)
{
    if (!w->queued)
        return false;
    struct queue *q = &b->queues[w->queue];
    unlink_work(q, w);
    subtract_tokens(b, q, w->tokens - w->taken);
    return true;
}

/* -------------------------------------------------------------------- eviction */

struct moe_work *moe_batcher_evict(struct moe_batcher *b, moe_batcher_match match, uint64_t arg)
{
    struct moe_work *first = NULL, **end = &first;
    b->next_expiry = MOE_NEVER;
    for (size_t i = 0; i < b->layer_count * QUEUES_PER_LAYER; i++) {
        struct moe_work *next;
        for (struct moe_work *w = b->queues[i].head; w != NULL; w = next) {
            next = w->next;
            if (!match(w, arg)) {
                note_deadline(b, w);
                continue;
            }
            (void)moe_batcher_remove(b, w);
            *end = w;
            end = &w->next;
        }
    }
    return first;
}

static bool has_expired(const struct moe_work *w, uint64_t now)
{
    return w->deadline_ns <= now;
}

struct moe_work *moe_batcher_expire(struct moe_batcher *b, uint64_t now)
{
    return now < b->next_expiry ? NULL : moe_batcher_evict(b, has_expired, now);
}

uint64_t moe_batcher_next_expiry(const struct moe_batcher *b)
{
    return b->next_expiry;
}

uint64_t moe_batcher_tokens(const struct moe_batcher *b)
{
    return b->tokens;
}

static struct queue *queue_at(const struct moe_batcher *b, size_t i, struct moe_step_key *key)
{
    if (i >= b->layer_count * QUEUES_PER_LAYER)
        return NULL;
    key->layer = b->layers[i / QUEUES_PER_LAYER];
    key->kind = i / DTYPES % KINDS == 0 ? MOE_STEP_FORWARD : MOE_STEP_FORWARD_RETAIN;
    key->dtype = i % DTYPES == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
    return &b->queues[i];
}

bool moe_batcher_queue(const struct moe_batcher *b, size_t i, struct moe_step_key *key,
                       uint64_t *tokens)
{
    const struct queue *q = queue_at(b, i, key);
    if (q != NULL)
        *tokens = q->tokens;
    return q != NULL;
}

void moe_batcher_visit_retain(struct moe_batcher *b, void (*visit)(struct moe_work *w, void *arg),
                              void *arg)
{
    struct moe_step_key key;
    const struct queue *q;
    for (size_t i = 0; (q = queue_at(b, i, &key)) != NULL; i++)
        for (struct moe_work *w = q->head; w != NULL && key.kind == MOE_STEP_FORWARD_RETAIN;
             w = w->next)
            visit(w, arg);
}

bool moe_batcher_rewind(struct moe_batcher *b, size_t i, struct moe_step_key *key, uint32_t *tokens,
                        struct moe_work **w)
{
    struct queue *q = queue_at(b, i, key);
    if (q == NULL)
        return false;
    *w = q->head;
    *tokens = *w != NULL ? (*w)->taken : 0;
    if (*tokens == 0)
        return true;
    MOE_INVARIANT((*w)->finished == (*w)->taken);
    (*w)->taken = (*w)->finished = 0;
    add_tokens(b, q, *tokens);
    return true;
}
