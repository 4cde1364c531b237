/* SPDX-License-Identifier: Apache-2.0 */
/* One list in order of age, which is also the order of expiry. Records are few and large, so a walk
 * is cheaper than an index. */
#include "activations/pass_store.h"

#include "base/mutex.h"
#include "base/wait.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct moe_pass_store {
    const struct moe_backend *backend;
    struct moe_device *device;
    uint64_t budget, keep_ns;
    struct moe_mutex lock;
    pthread_cond_t unused; /* bytes has become 0 */
    MOE_GUARDED_BY(lock) struct {
        struct moe_pass_record *oldest, *newest;
        uint64_t bytes; /* cost of all existing records */
        size_t records;
        /* Memory of dropped records, for new ones of the same size, newest first: allocating and
         * pinning memory costs more than a pass. */
        struct moe_pass_record *idle;
        uint64_t idle_bytes; /* bytes + idle_bytes <= budget */
        uint64_t now;        /* latest that a caller gave */
    };
};

enum { RETRY_MS = 50, PAGE = 4096 };

/* Cost of a record, with its overhead, so that many small ones are not free. The caller has checked
 * that `bytes` is within the budget. */
static uint64_t cost_of(size_t bytes)
{
    return ((uint64_t)bytes + PAGE - 1) / PAGE * PAGE + sizeof(struct moe_pass_record);
}

struct moe_status moe_pass_store_create(const struct moe_backend *backend,
                                        struct moe_device *device, uint64_t budget,
                                        uint64_t keep_ns, struct moe_pass_store **out)
{
    struct moe_pass_store *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for retained passes");
    s->backend = backend;
    s->device = device;
    s->budget = budget;
    s->keep_ns = keep_ns;
    moe_mutex_init(&s->lock);
    pthread_cond_init(&s->unused, NULL);
    *out = s;
    return moe_ok();
}

/* --------------------------------------------------------------- with the lock held */

static void retire_record(struct moe_pass_store *s, struct moe_pass_record *r) MOE_REQUIRES(s->lock)
{
    s->bytes -= cost_of(r->bytes);
    s->records--;
    s->idle_bytes += cost_of(r->bytes);
    r->expires_ns = s->now + s->keep_ns;
    r->next = s->idle;
    s->idle = r;
    if (s->bytes == 0)
        pthread_cond_signal(&s->unused);
}

/* Frees the idle record at `at`. */
static void free_idle(struct moe_pass_store *s, struct moe_pass_record **at) MOE_REQUIRES(s->lock)
{
    struct moe_pass_record *r = *at;
    *at = r->next;
    s->idle_bytes -= cost_of(r->bytes);
    s->backend->mem_free(s->device, MOE_MEM_HOST, r->data, r->bytes);
    free(r);
}

static void free_all_idle(struct moe_pass_store *s) MOE_REQUIRES(s->lock)
{
    while (s->idle != NULL)
        free_idle(s, &s->idle);
}

/* The record that has been idle for longest is the last one. */
static struct moe_pass_record **last_idle(struct moe_pass_store *s)
{
    struct moe_pass_record **at = &s->idle;
    while ((*at)->next != NULL)
        at = &(*at)->next;
    return at;
}

static struct moe_pass_record *take_idle(struct moe_pass_store *s, size_t bytes)
    MOE_REQUIRES(s->lock)
{
    struct moe_pass_record **at = &s->idle;
    while (*at != NULL && (*at)->bytes != bytes)
        at = &(*at)->next;
    struct moe_pass_record *r = *at;
    if (r == NULL)
        return NULL;
    *at = r->next;
    s->idle_bytes -= cost_of(bytes);
    return r;
}

static void drop_reference(struct moe_pass_store *s, struct moe_pass_record *r)
    MOE_REQUIRES(s->lock)
{
    if (atomic_fetch_sub(&r->references, 1) == 1)
        retire_record(s, r);
}

static void unlist(struct moe_pass_store *s, struct moe_pass_record *r) MOE_REQUIRES(s->lock)
{
    if (r->prev != NULL)
        r->prev->next = r->next;
    else
        s->oldest = r->next;
    if (r->next != NULL)
        r->next->prev = r->prev;
    else
        s->newest = r->prev;
    r->next = r->prev = NULL;
    drop_reference(s, r);
}

static bool has_old_idle(struct moe_pass_store *s, uint64_t now) MOE_REQUIRES(s->lock)
{
    return s->idle != NULL && (*last_idle(s))->expires_ns <= now;
}

static void drop_old(struct moe_pass_store *s, uint64_t now) MOE_REQUIRES(s->lock)
{
    s->now = now > s->now ? now : s->now;
    while (s->oldest != NULL && s->oldest->expires_ns <= now)
        unlist(s, s->oldest);
}

static void expire(struct moe_pass_store *s, uint64_t now) MOE_REQUIRES(s->lock)
{
    while (has_old_idle(s, now))
        free_idle(s, last_idle(s));
    drop_old(s, now);
}

static struct moe_pass_record *find(const struct moe_pass_store *s, const char *session,
                                    uint64_t id) MOE_REQUIRES(s->lock)
{
    for (struct moe_pass_record *r = s->newest; r != NULL; r = r->prev)
        if (r->id == id && strcmp(r->session, session) == 0)
            return r;
    return NULL;
}

/* Only the list has a reference. The lock is held, so no other can be taken. */
static bool is_idle(const struct moe_pass_record *r)
{
    return atomic_load(&r->references) == 1;
}

static bool has_room(const struct moe_pass_store *s, uint64_t cost, uint64_t bytes, size_t records)
{
    return bytes <= s->budget - cost && records < MOE_PASS_STORE_RECORDS;
}

/* Drops records without other references, the oldest first, until `cost` (at most the budget) fits.
 * Drops none if even dropping all of them would not be enough. */
static bool make_room(struct moe_pass_store *s, uint64_t cost) MOE_REQUIRES(s->lock)
{
    uint64_t bytes = s->bytes;
    size_t records = s->records;
    for (const struct moe_pass_record *r = s->oldest; r != NULL; r = r->next)
        if (is_idle(r)) {
            bytes -= cost_of(r->bytes);
            records--;
        }
    if (!has_room(s, cost, bytes, records))
        return false;
    for (struct moe_pass_record *next, *r = s->oldest;
         r != NULL && !has_room(s, cost, s->bytes, s->records); r = next) {
        next = r->next;
        if (is_idle(r))
            unlist(s, r);
    }
    return true;
}

static struct moe_status new_record(struct moe_pass_store *s, size_t bytes,
                                    struct moe_pass_record **out) MOE_REQUIRES(s->lock)
{
    while (s->idle != NULL && s->bytes + s->idle_bytes + cost_of(bytes) > s->budget)
        free_idle(s, last_idle(s));
    struct moe_pass_record *r = calloc(1, sizeof *r);
    if (r == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
    struct moe_status st = s->backend->mem_alloc(s->device, MOE_MEM_HOST, bytes, &r->data);
    if (moe_failed(&st)) {
        free(r);
        return st;
    }
    *out = r;
    return st;
}

static struct moe_status make_record(struct moe_pass_store *s, size_t bytes,
                                     struct moe_pass_record **out) MOE_REQUIRES(s->lock)
{
    struct moe_pass_record *r = take_idle(s, bytes);
    if (r == NULL)
        MOE_TRY(new_record(s, bytes, &r));
    *r = (struct moe_pass_record){.data = r->data};
    r->store = s;
    r->bytes = bytes;
    atomic_store(&r->references, 1);
    s->bytes += cost_of(bytes);
    s->records++;
    *out = r;
    return moe_ok();
}

/* ------------------------------------------------------------------------ any thread */

void moe_pass_store_destroy(struct moe_pass_store *s)
{
    if (s == NULL)
        return;
    moe_pass_store_clear(s);
    moe_mutex_lock(&s->lock);
    while (s->bytes > 0)
        moe_wait(&s->unused, &s->lock);
    free_all_idle(s);
    moe_mutex_unlock(&s->lock);
    pthread_cond_destroy(&s->unused);
    moe_mutex_destroy(&s->lock);
    free(s);
}

struct moe_status moe_pass_store_reserve(struct moe_pass_store *s, size_t bytes, uint64_t now,
                                         struct moe_pass_record **out)
{
    if (bytes == 0 || bytes > s->budget || cost_of(bytes) > s->budget)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL,
                         "%zu bytes exceed the limit of retained bytes", bytes);
    moe_mutex_lock(&s->lock);
    expire(s, now);
    struct moe_status st =
        make_room(s, cost_of(bytes))
            ? make_record(s, bytes, out)
            : moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, RETRY_MS,
                              "calls in flight use all retained bytes");
    moe_mutex_unlock(&s->lock);
    return st;
}

void moe_pass_store_put(struct moe_pass_store *s, struct moe_pass_record *r, const char *session,
                        uint64_t id, uint64_t now)
{
    moe_mutex_lock(&s->lock);
    struct moe_pass_record *old = find(s, session, id);
    if (old != NULL)
        unlist(s, old);
    memset(r->session, 0, sizeof r->session);
    strncpy(r->session, session, MOE_TRAINING_NAME_MAX);
    r->id = id;
    r->expires_ns = now + s->keep_ns;
    r->prev = s->newest;
    r->next = NULL;
    if (s->newest != NULL)
        s->newest->next = r;
    else
        s->oldest = r;
    s->newest = r;
    moe_mutex_unlock(&s->lock);
}

struct moe_pass_record *moe_pass_store_get(struct moe_pass_store *s, const char *session,
                                           uint64_t id, uint64_t now)
{
    moe_mutex_lock(&s->lock);
    expire(s, now);
    struct moe_pass_record *r = find(s, session, id);
    if (r != NULL)
        moe_pass_record_ref(r);
    moe_mutex_unlock(&s->lock);
    return r;
}

void moe_pass_store_drop(struct moe_pass_store *s, const char *session, uint64_t id)
{
    moe_mutex_lock(&s->lock);
    struct moe_pass_record *r = find(s, session, id);
    if (r != NULL)
        unlist(s, r);
    moe_mutex_unlock(&s->lock);
}

void moe_pass_store_clear(struct moe_pass_store *s)
{
    moe_mutex_lock(&s->lock);
    while (s->oldest != NULL)
        unlist(s, s->oldest);
    free_all_idle(s);
    moe_mutex_unlock(&s->lock);
}

void moe_pass_store_expire(struct moe_pass_store *s, uint64_t now)
{
    moe_mutex_lock(&s->lock);
    if (has_old_idle(s, now))
        free_idle(s, last_idle(s));
    drop_old(s, now);
    moe_mutex_unlock(&s->lock);
}

uint64_t moe_pass_store_next_expiry(struct moe_pass_store *s, uint64_t now)
{
    moe_mutex_lock(&s->lock);
    uint64_t next = now + s->keep_ns;
    if (s->oldest != NULL && s->oldest->expires_ns < next)
        next = s->oldest->expires_ns;
    if (s->idle != NULL && (*last_idle(s))->expires_ns < next)
        next = (*last_idle(s))->expires_ns;
    moe_mutex_unlock(&s->lock);
    return next;
}

void moe_pass_record_ref(struct moe_pass_record *r)
{
    atomic_fetch_add(&r->references, 1);
}

void moe_pass_record_unref(struct moe_pass_record *r)
{
    if (r == NULL)
        return;
    struct moe_pass_store *s = r->store;
    moe_mutex_lock(&s->lock);
    drop_reference(s, r);
    moe_mutex_unlock(&s->lock);
}

uint64_t moe_pass_store_bytes(struct moe_pass_store *s)
{
    moe_mutex_lock(&s->lock);
    uint64_t bytes = s->bytes;
    moe_mutex_unlock(&s->lock);
    return bytes;
}

uint64_t moe_pass_store_idle_bytes(struct moe_pass_store *s)
{
    moe_mutex_lock(&s->lock);
    uint64_t bytes = s->idle_bytes;
    moe_mutex_unlock(&s->lock);
    return bytes;
}

uint64_t moe_pass_store_budget(const struct moe_pass_store *s)
{
    return s->budget;
}
