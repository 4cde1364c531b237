/* SPDX-License-Identifier: Apache-2.0 */
/* The queues behind schedule/batcher.h: for each model a table of lists, one per key, indexed by
 * (layer, kind, dtype). The position of a split request is `taken`, the number of its tokens handed
 * to steps; it is the only thing that put-back has to restore. */
#include "schedule/batcher.h"

#include "base/clock.h"

#include <stdlib.h>

enum {
    KINDS = 2,  /* MOE_STEP_FORWARD, MOE_STEP_FORWARD_RETAIN */
    DTYPES = 2, /* F32, BF16 */
    QUEUES_PER_LAYER = KINDS * DTYPES,
};

struct moe_queue {
    struct moe_work *head, *tail; /* linked by next and prev; both NULL when empty */
    uint64_t tokens;              /* sum of tokens - taken over the list */
};

/* The queues of one model. */
struct table {
    struct table *next;
    uint32_t model;
    size_t layer_count;        /* at least 1 */
    uint32_t *layers;          /* [layer_count], ascending */
    struct moe_queue queues[]; /* [layer_count * QUEUES_PER_LAYER] */
};

struct moe_batcher {
    struct table *tables; /* in the order of adding; that of create is the first */
    /* Set aside; each one has a `home`. */
    struct moe_queue held, gathering;
    uint64_t tokens;      /* over all queues, and of those set aside */
    uint64_t next_expiry; /* <= every queued deadline; MOE_NEVER when none can expire */
};

static struct moe_status check_layers(const uint32_t *layers, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (layers[i] <= layers[i - 1] || moe_layer_model(layers[i]) != moe_layer_model(layers[0]))
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                             "layers of one model must be listed in ascending order");
    return moe_ok();
}

struct moe_status moe_batcher_add_model(struct moe_batcher *b, const uint32_t *layers, size_t count)
{
    struct table **end = &b->tables, *t;
    if (count == 0)
        return moe_ok();
    MOE_TRY(check_layers(layers, count));
    for (; *end != NULL; end = &(*end)->next)
        if ((*end)->model == moe_layer_model(layers[0]))
            return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_NONE, "model %u has queues",
                             moe_layer_model(layers[0]));
    t = calloc(1, sizeof *t + count * QUEUES_PER_LAYER * sizeof t->queues[0]);
    uint32_t *copy = calloc(count, sizeof *copy);
    if (t == NULL || copy == NULL) {
        free(t);
        free(copy);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the queues");
    }
    memcpy(copy, layers, count * sizeof *copy);
    t->model = moe_layer_model(layers[0]);
    t->layer_count = count;
    t->layers = copy;
    *end = t;
    return moe_ok();
}

struct moe_status moe_batcher_create(const uint32_t *layers, size_t count, struct moe_batcher **out)
{
    struct moe_batcher *b = calloc(1, sizeof *b);
    if (b == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the queues");
    b->next_expiry = MOE_NEVER;
    struct moe_status st = moe_batcher_add_model(b, layers, count);
    if (moe_failed(&st))
        moe_batcher_destroy(b);
    else
        *out = b;
    return st;
}

static void free_table(struct table *t)
{
    free(t->layers);
    free(t);
}

void moe_batcher_remove_model(struct moe_batcher *b, uint32_t model)
{
    struct table **at = &b->tables;
    while (*at != NULL && ((*at)->model != model || at == &b->tables))
        at = &(*at)->next;
    struct table *t = *at;
    if (t == NULL)
        return;
    for (size_t i = 0; i < t->layer_count * QUEUES_PER_LAYER; i++)
        MOE_INVARIANT(t->queues[i].head == NULL);
    *at = t->next;
    free_table(t);
}

void moe_batcher_destroy(struct moe_batcher *b)
{
    if (b == NULL)
        return;
    for (struct table *next, *t = b->tables; t != NULL; t = next) {
        next = t->next;
        free_table(t);
    }
    free(b);
}

static int compare_layers(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static struct moe_queue *find_queue(const struct moe_batcher *b, const struct moe_step_key *key)
{
    struct table *t = b->tables;
    if (!moe_step_traits(key->kind)->queued ||
        (key->dtype != MOE_DTYPE_F32 && key->dtype != MOE_DTYPE_BF16))
        return NULL;
    while (t != NULL && t->model != moe_layer_model(key->layer))
        t = t->next;
    const uint32_t *at = t == NULL ? NULL
                                   : bsearch(&key->layer, t->layers, t->layer_count,
                                             sizeof *t->layers, compare_layers);
    if (at == NULL)
        return NULL;
    size_t ordinal = (size_t)(at - t->layers);
    size_t kind = key->kind == MOE_STEP_FORWARD_RETAIN, dtype = key->dtype == MOE_DTYPE_BF16;
    return &t->queues[ordinal * QUEUES_PER_LAYER + kind * DTYPES + dtype];
}

bool moe_batcher_has(const struct moe_batcher *b, const struct moe_step_key *key)
{
    return find_queue(b, key) != NULL;
}

/* ----------------------------------------------------------------------- lists */

static void link_tail(struct moe_queue *q, struct moe_work *w)
{
    w->prev = q->tail;
    w->next = NULL;
    if (q->tail != NULL)
        q->tail->next = w;
    else
        q->head = w;
    q->tail = w;
    w->queue = q;
    w->queued = true;
}

static void link_head(struct moe_queue *q, struct moe_work *w)
{
    w->prev = NULL;
    w->next = q->head;
    if (q->head != NULL)
        q->head->prev = w;
    else
        q->tail = w;
    q->head = w;
    w->queue = q;
    w->queued = true;
}

static void unlink_work(struct moe_queue *q, struct moe_work *w)
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
    w->home = NULL;
    w->gathers = w->queued = false;
}

static void add_tokens(struct moe_batcher *b, struct moe_queue *q, uint32_t tokens)
{
    q->tokens += tokens;
    b->tokens += tokens;
}

static void subtract_tokens(struct moe_batcher *b, struct moe_queue *q, uint32_t tokens)
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

/* `home`: NULL, or the queue that it goes to later. */
static void push(struct moe_batcher *b, struct moe_queue *q, struct moe_queue *home,
                 struct moe_work *w)
{
    MOE_INVARIANT(q != NULL && w->tokens > 0);
    w->taken = w->finished = 0;
    w->home = home;
    w->gathers = home != NULL;
    link_tail(q, w);
    add_tokens(b, q, w->tokens);
    note_deadline(b, w);
}

void moe_batcher_push(struct moe_batcher *b, const struct moe_step_key *key, struct moe_work *w)
{
    push(b, find_queue(b, key), NULL, w);
}

void moe_batcher_gather(struct moe_batcher *b, const struct moe_step_key *key, struct moe_work *w)
{
    struct moe_queue *home = find_queue(b, key);
    MOE_INVARIANT(home != NULL);
    push(b, &b->gathering, home, w);
}

size_t moe_batcher_take(struct moe_batcher *b, const struct moe_step_key *key, uint32_t capacity,
                        struct moe_segment *segments, uint32_t *tokens)
{
    struct moe_queue *q = find_queue(b, key);
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
    struct moe_queue *q = find_queue(b, key);
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
    struct moe_queue *q = w->queue;
    MOE_INVARIANT(w->taken == segment->first + segment->count);
    if (!w->queued)
        link_head(q, w);
    w->taken = segment->first;
    add_tokens(b, q, segment->count);
    note_deadline(b, w);
}

bool moe_batcher_remove(struct moe_batcher *b, struct moe_work *w)
{
    if (!w->queued)
        return false;
    struct moe_queue *q = w->queue;
    unlink_work(q, w);
    subtract_tokens(b, q, w->tokens - w->taken);
    return true;
}

void moe_batcher_hold(struct moe_batcher *b, struct moe_work *w)
{
    MOE_INVARIANT(!w->queued && w->queue != &b->held);
    struct moe_queue *home = w->queue;
    w->taken = w->finished = 0;
    link_tail(&b->held, w);
    w->home = home;
    add_tokens(b, &b->held, w->tokens);
    note_deadline(b, w);
}

/* Appends a request that is set aside to its queue. */
static void go_home(struct moe_batcher *b, struct moe_work *w)
{
    struct moe_queue *home = w->home;
    (void)moe_batcher_remove(b, w);
    link_tail(home, w);
    add_tokens(b, home, w->tokens);
}

void moe_batcher_release(struct moe_batcher *b)
{
    for (struct moe_work *w; (w = b->held.head) != NULL;)
        go_home(b, w);
}

uint32_t moe_batcher_join(struct moe_batcher *b, const struct moe_step_key *key, uint64_t batch)
{
    const struct moe_queue *home = find_queue(b, key);
    uint32_t tokens = 0;
    for (struct moe_work *next, *w = b->gathering.head; w != NULL; w = next) {
        next = w->next;
        if (w->batch != batch || w->home != home)
            continue;
        tokens += w->tokens;
        go_home(b, w);
    }
    return tokens;
}

/* The `i`-th queue over all tables, and its key; NULL past the last. */
static struct moe_queue *queue_at(const struct moe_batcher *b, size_t i, struct moe_step_key *key)
{
    struct table *t = b->tables;
    for (; t != NULL && i >= t->layer_count * QUEUES_PER_LAYER; t = t->next)
        i -= t->layer_count * QUEUES_PER_LAYER;
    if (t == NULL)
        return NULL;
    key->layer = t->layers[i / QUEUES_PER_LAYER];
    key->kind = i / DTYPES % KINDS == 0 ? MOE_STEP_FORWARD : MOE_STEP_FORWARD_RETAIN;
    key->dtype = i % DTYPES == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
    return &t->queues[i];
}

/* -------------------------------------------------------------------- eviction */

/* Appends what matches to the list at `end`; returns its new end. */
static struct moe_work **evict_from(struct moe_batcher *b, const struct moe_queue *q,
                                    moe_batcher_match match, uint64_t arg, struct moe_work **end)
{
    struct moe_work *next;
    for (struct moe_work *w = q->head; w != NULL; w = next) {
        next = w->next;
        if (!match(w, arg)) {
            note_deadline(b, w);
            continue;
        }
        (void)moe_batcher_remove(b, w);
        *end = w;
        end = &w->next;
    }
    return end;
}

struct moe_work *moe_batcher_evict(struct moe_batcher *b, moe_batcher_match match, uint64_t arg)
{
    struct moe_work *first = NULL, **end = &first;
    b->next_expiry = MOE_NEVER;
    struct moe_step_key key;
    const struct moe_queue *q;
    for (size_t i = 0; (q = queue_at(b, i, &key)) != NULL; i++)
        end = evict_from(b, q, match, arg, end);
    end = evict_from(b, &b->held, match, arg, end);
    (void)evict_from(b, &b->gathering, match, arg, end);
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

bool moe_batcher_queue(const struct moe_batcher *b, size_t i, struct moe_step_key *key,
                       uint64_t *tokens)
{
    const struct moe_queue *q = queue_at(b, i, key);
    if (q != NULL)
        *tokens = q->tokens;
    return q != NULL;
}

void moe_batcher_visit_retain(struct moe_batcher *b, void (*visit)(struct moe_work *w, void *arg),
                              void *arg)
{
    struct moe_step_key key;
    const struct moe_queue *q;
    for (size_t i = 0; (q = queue_at(b, i, &key)) != NULL; i++)
        for (struct moe_work *w = q->head; w != NULL && key.kind == MOE_STEP_FORWARD_RETAIN;
             w = w->next)
            visit(w, arg);
}

bool moe_batcher_rewind(struct moe_batcher *b, size_t i, struct moe_step_key *key, uint32_t *tokens,
                        struct moe_work **w)
{
    struct moe_queue *q = queue_at(b, i, key);
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
