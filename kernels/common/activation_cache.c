/* SPDX-License-Identifier: Apache-2.0 */
/* See activation_cache.h. All pieces are in one block; the list is short, so searches are linear.
 */
#include "common/activation_cache.h"

#include "base/size.h"

#include <string.h>

void moe_activation_cache_open(struct moe_activation_cache *s, struct moe_device *device,
                               struct moe_status (*alloc)(struct moe_device *, enum moe_mem, size_t,
                                                          void **),
                               void (*give)(struct moe_device *, enum moe_mem, void *, size_t))
{
    moe_mutex_not_shared(&s->lock);
    s->device = device;
    s->alloc = alloc;
    s->free = give;
    s->limit = 0;
    s->block = NULL;
    s->age = 0;
    s->readers = 0;
    s->count = 0;
    moe_mutex_init(&s->lock);
}

static void give_block(struct moe_activation_cache *s) MOE_REQUIRES(s->lock)
{
    s->free(s->device, MOE_MEM_DEVICE, s->block, s->limit);
    s->block = NULL;
    s->count = 0;
}

void moe_activation_cache_close(struct moe_activation_cache *s)
{
    moe_mutex_not_shared(&s->lock);
    give_block(s);
    moe_mutex_destroy(&s->lock);
}

void moe_activation_cache_limit(struct moe_activation_cache *s, size_t bytes)
{
    moe_mutex_lock(&s->lock);
    give_block(s);
    s->limit = bytes;
    moe_mutex_unlock(&s->lock);
}

bool moe_activation_cache_give_back(struct moe_activation_cache *s)
{
    moe_mutex_lock(&s->lock);
    bool idle = s->block != NULL && s->readers == 0;
    for (uint32_t i = 0; i < s->count; i++)
        idle = idle && !s->piece[i].open;
    if (idle)
        give_block(s);
    moe_mutex_unlock(&s->lock);
    return idle;
}

void moe_activation_cache_read_begin(struct moe_activation_cache *s)
{
    moe_mutex_lock(&s->lock);
    s->readers++;
    moe_mutex_unlock(&s->lock);
}

void moe_activation_cache_read_end(struct moe_activation_cache *s)
{
    moe_mutex_lock(&s->lock);
    MOE_INVARIANT(s->readers > 0);
    s->readers--;
    moe_mutex_unlock(&s->lock);
}

uint64_t moe_activation_cache_bytes(struct moe_activation_cache *s)
{
    uint64_t bytes = 0;
    moe_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < s->count; i++)
        bytes += s->piece[i].bytes;
    moe_mutex_unlock(&s->lock);
    return bytes;
}

/* ------------------------------------------------------------ with the lock held */

static bool same_name(const struct moe_activation_key *a, const struct moe_activation_key *b)
{
    return a->layer == b->layer && a->session == b->session && a->name == b->name;
}

static bool same_batch(const struct moe_activation_key *a, const struct moe_activation_key *b)
{
    return same_name(a, b) && a->dtype == b->dtype && a->bucket == b->bucket &&
           a->tokens == b->tokens;
}

/* Only its step finds an open piece. */
static struct moe_activation_piece *find(struct moe_activation_cache *s,
                                         const struct moe_activation_key *key,
                                         enum moe_activation_part part, bool open)
    MOE_REQUIRES(s->lock)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (s->piece[i].part == part && s->piece[i].open == open &&
            same_batch(&s->piece[i].key, key) && (!open || s->piece[i].key.step == key->step))
            return &s->piece[i];
    return NULL;
}

/* Removes all pieces for which `goes` is true. */
static void remove_where(struct moe_activation_cache *s,
                         bool (*goes)(const struct moe_activation_piece *, const void *),
                         const void *of) MOE_REQUIRES(s->lock)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < s->count; i++)
        if (!goes(&s->piece[i], of))
            s->piece[left++] = s->piece[i];
    s->count = left;
}

static bool is_committed_of(const struct moe_activation_piece *p, const void *key)
{
    return !p->open && same_name(&p->key, key);
}

static bool is_open_of(const struct moe_activation_piece *p, const void *key)
{
    const struct moe_activation_key *of = key;
    return p->open && p->key.step == of->step && same_batch(&p->key, of);
}

static bool has_age(const struct moe_activation_piece *p, const void *age)
{
    return p->age == *(const uint64_t *)age;
}

static bool is_of_layer(const struct moe_activation_piece *p, const void *of)
{
    const struct moe_activation_key *key = of;
    return p->key.layer == key->layer && (key->name == 0 || p->key.name == key->name);
}

static bool is_of_session(const struct moe_activation_piece *p, const void *session)
{
    return p->key.session == session;
}

/* The end of a piece, aligned. */
static size_t end_of(const struct moe_activation_piece *p)
{
    return p->offset +
           (p->bytes + MOE_ACTIVATION_ALIGN - 1) / MOE_ACTIVATION_ALIGN * MOE_ACTIVATION_ALIGN;
}

/* The end of the room for pieces. */
static size_t end_of_block(const struct moe_activation_cache *s) MOE_REQUIRES(s->lock)
{
    return s->limit / MOE_ACTIVATION_ALIGN * MOE_ACTIVATION_ALIGN;
}

/* Evicts the oldest committed name; false if there is none. */
static bool evict_oldest(struct moe_activation_cache *s) MOE_REQUIRES(s->lock)
{
    const struct moe_activation_piece *oldest = NULL;
    for (uint32_t i = 0; i < s->count; i++) {
        const struct moe_activation_piece *p = &s->piece[i];
        if (!p->open && (oldest == NULL || p->age < oldest->age))
            oldest = p;
    }
    if (oldest == NULL)
        return false;
    uint64_t age = oldest->age;
    remove_where(s, has_age, &age);
    return true;
}

/* Finds a gap for `bytes` (a multiple of MOE_ACTIVATION_ALIGN): the piece's future index, and its
 * offset. Shared parts are small. They go to the far end, so they do not split the room of the
 * large parts. */
static bool find_gap(const struct moe_activation_cache *s, enum moe_activation_part part,
                     size_t bytes, uint32_t *index, size_t *offset) MOE_REQUIRES(s->lock)
{
    size_t at = 0;
    bool found = false;
    if (s->count == MOE_ACTIVATION_MAX)
        return false;
    for (uint32_t i = 0; i <= s->count; i++) {
        size_t end = i < s->count ? s->piece[i].offset : end_of_block(s);
        if (end >= at && end - at >= bytes) {
            found = true;
            *index = i;
            *offset = part == MOE_ACTIVATION_SHARED ? end - bytes : at;
            if (part != MOE_ACTIVATION_SHARED)
                return true;
        }
        if (i < s->count)
            at = end_of(&s->piece[i]);
    }
    return found;
}

/* The largest gap between open pieces: the room if all other pieces are evicted. */
static size_t largest_room(const struct moe_activation_cache *s) MOE_REQUIRES(s->lock)
{
    size_t at = 0, largest = 0, end = end_of_block(s);
    uint32_t open = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        const struct moe_activation_piece *p = &s->piece[i];
        if (!p->open)
            continue;
        largest = p->offset - at > largest ? p->offset - at : largest;
        at = end_of(p);
        open++;
    }
    largest = end - at > largest ? end - at : largest;
    return open < MOE_ACTIVATION_MAX ? largest : 0;
}

static bool has_block(struct moe_activation_cache *s) MOE_REQUIRES(s->lock)
{
    if (s->block != NULL || s->limit == 0)
        return s->block != NULL;
    struct moe_status st = s->alloc(s->device, MOE_MEM_DEVICE, s->limit, &s->block);
    if (moe_failed(&st))
        s->block = NULL;
    return s->block != NULL;
}

/* All parts of a name have the age of its first part, so they are evicted together. */
static uint64_t age_of(struct moe_activation_cache *s, const struct moe_activation_key *key)
    MOE_REQUIRES(s->lock)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (is_open_of(&s->piece[i], key))
            return s->piece[i].age;
    return ++s->age;
}

static void *take(struct moe_activation_cache *s, const struct moe_activation_key *key,
                  enum moe_activation_part part, size_t bytes) MOE_REQUIRES(s->lock)
{
    size_t room, offset = 0;
    uint32_t at = 0;
    remove_where(s, is_committed_of, key);
    if (!moe_size_round_up(bytes, MOE_ACTIVATION_ALIGN, &room) || room > largest_room(s) ||
        !has_block(s) || find(s, key, part, true) != NULL)
        return NULL;
    while (!find_gap(s, part, room, &at, &offset))
        if (!evict_oldest(s))
            return NULL;
    uint64_t age = age_of(s, key);
    memmove(&s->piece[at + 1], &s->piece[at], (s->count - at) * sizeof *s->piece);
    s->count++;
    s->piece[at] = (struct moe_activation_piece){.key = *key,
                                                 .part = part,
                                                 .open = true,
                                                 .offset = offset,
                                                 .bytes = bytes,
                                                 .age = age,
                                                 .data = (char *)s->block + offset};
    return s->piece[at].data;
}

/* ------------------------------------------------------------------------- calls */

size_t moe_activation_cache_begin(struct moe_activation_cache *s,
                                  const struct moe_activation_key *key)
{
    moe_mutex_lock(&s->lock);
    remove_where(s, is_committed_of, key);
    size_t room = largest_room(s);
    moe_mutex_unlock(&s->lock);
    return room;
}

void *moe_activation_cache_take(struct moe_activation_cache *s,
                                const struct moe_activation_key *key, enum moe_activation_part part,
                                size_t bytes)
{
    moe_mutex_lock(&s->lock);
    void *data = take(s, key, part, bytes);
    moe_mutex_unlock(&s->lock);
    return data;
}

void moe_activation_cache_fill(struct moe_activation_cache *s, const struct moe_activation_key *key,
                               enum moe_activation_part part, uint64_t rows, uint32_t in_use,
                               size_t bytes)
{
    moe_mutex_lock(&s->lock);
    struct moe_activation_piece *p = find(s, key, part, true);
    if (p != NULL) {
        MOE_INVARIANT(bytes <= p->bytes);
        p->rows = rows;
        p->in_use = in_use;
        p->bytes = bytes;
    }
    moe_mutex_unlock(&s->lock);
}

bool moe_activation_cache_commit(struct moe_activation_cache *s,
                                 const struct moe_activation_key *key)
{
    bool any = false;
    moe_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < s->count; i++)
        any = any || is_open_of(&s->piece[i], key);
    if (any) /* pieces of another step of this name, which ended first */
        remove_where(s, is_committed_of, key);
    for (uint32_t i = 0; i < s->count; i++)
        if (is_open_of(&s->piece[i], key))
            s->piece[i].open = false;
    moe_mutex_unlock(&s->lock);
    return any;
}

void moe_activation_cache_forget(struct moe_activation_cache *s,
                                 const struct moe_activation_key *key)
{
    moe_mutex_lock(&s->lock);
    remove_where(s, is_open_of, key);
    moe_mutex_unlock(&s->lock);
}

bool moe_activation_cache_find(struct moe_activation_cache *s, const struct moe_activation_key *key,
                               enum moe_activation_part part, struct moe_activation_piece *out)
{
    moe_mutex_lock(&s->lock);
    const struct moe_activation_piece *p = find(s, key, part, false);
    if (p != NULL)
        *out = *p;
    moe_mutex_unlock(&s->lock);
    return p != NULL;
}

void moe_activation_cache_drop(struct moe_activation_cache *s, const struct moe_layer *layer,
                               uint64_t name)
{
    struct moe_activation_key of = {.layer = layer, .name = name};
    moe_mutex_lock(&s->lock);
    remove_where(s, is_of_layer, &of);
    moe_mutex_unlock(&s->lock);
}

void moe_activation_cache_drop_session(struct moe_activation_cache *s,
                                       const struct moe_session *session)
{
    moe_mutex_lock(&s->lock);
    remove_where(s, is_of_session, session);
    moe_mutex_unlock(&s->lock);
}
