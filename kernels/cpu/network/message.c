/* SPDX-License-Identifier: Apache-2.0 */
/* Messages: a pool, a queue for the network thread, the records in them; see network.h. */
#include "cpu/network/network_state.h"

#include <stdlib.h>
#include <string.h>

#define SLICE_NS (20 * MOE_NS_PER_MS) /* between looks at `ended` */

/* ------------------------------------------------------------------------ pool */

static void put_back(struct moe_ucx_send *send)
{
    moe_cpu_message_drop(
        (struct moe_cpu_message *)(void *)((uint8_t *)send -
                                           offsetof(struct moe_cpu_message, send)));
}

void moe_cpu_message_drop(struct moe_cpu_message *m)
{
    struct moe_cpu_network *n = m->network;
    moe_mutex_lock(&n->lock);
    if (m->counted)
        n->outstanding[m->slot]--;
    m->next = n->free;
    n->free = m;
    pthread_cond_signal(&n->freed);
    moe_mutex_unlock(&n->lock);
}

/* A free message or a new one; NULL if there is none. */
static struct moe_cpu_message *find_free(struct moe_cpu_network *n, uint32_t limit)
    MOE_REQUIRES(n->lock)
{
    struct moe_cpu_message *m = n->free;
    if (m != NULL) {
        n->free = m->next;
        return m;
    }
    if (n->made >= limit)
        return NULL;
    m = calloc(1, sizeof *m);
    if (m != NULL) {
        n->all[n->made++] = m;
        m->network = n;
    }
    return m;
}

static void make_empty(struct moe_cpu_message *m, uint32_t slot, enum moe_cpu_message_kind kind)
{
    const struct moe_cpu_network *n = m->network;
    m->slot = slot;
    m->counted = false;
    m->used = 0;
    m->flags = NULL;
    m->next = NULL;
    m->head = (struct moe_cpu_message_head){
        .kind = kind, .slot = n->config.slot, .epoch = n->config.epoch};
    m->send = (struct moe_ucx_send){
        .head = &m->head, .head_bytes = sizeof m->head, .data = m->body, .done = put_back};
}

struct moe_cpu_message *moe_cpu_message_own(struct moe_cpu_network *n, uint32_t slot,
                                            enum moe_cpu_message_kind kind)
{
    moe_mutex_lock(&n->lock);
    struct moe_cpu_message *m = find_free(n, MOE_CPU_ALL_MESSAGES);
    moe_mutex_unlock(&n->lock);
    if (m != NULL)
        make_empty(m, slot, kind);
    return m;
}

/* The slot that holds up the most messages. */
static uint32_t slowest(const struct moe_cpu_network *n) MOE_REQUIRES(n->lock)
{
    uint32_t slot = 0;
    for (uint32_t s = 1; s < MOE_MAX_SLOTS; s++)
        if (n->outstanding[s] > n->outstanding[slot])
            slot = s;
    return slot;
}

struct moe_cpu_message *moe_cpu_network_take(struct moe_cpu_network *n, uint32_t slot)
{
    uint64_t deadline = moe_clock_ns() + n->config.budget_ms * MOE_NS_PER_MS;
    bool late = false;
    uint32_t blocking = slot;
    moe_mutex_lock(&n->lock);
    struct moe_cpu_message *m;
    while ((m = find_free(n, MOE_CPU_MAX_MESSAGES)) == NULL && !late &&
           !n->config.ended(n->config.ctx)) {
        uint64_t now = moe_clock_ns();
        late = now >= deadline;
        blocking = slowest(n);
        (void)moe_wait_until(&n->freed, &n->lock,
                             now + SLICE_NS < deadline ? now + SLICE_NS : deadline);
    }
    if (m != NULL)
        n->outstanding[slot]++;
    moe_mutex_unlock(&n->lock);
    if (m == NULL) {
        if (late)
            n->config.late(n->config.ctx, UINT64_C(1) << blocking);
        return NULL;
    }
    make_empty(m, slot, MOE_CPU_STORES);
    m->counted = true;
    return m;
}

void moe_cpu_message_free_all(struct moe_cpu_network *n)
{
    moe_mutex_not_shared(&n->lock);
    for (uint32_t i = 0; i < n->made; i++)
        free(n->all[i]);
}

/* ----------------------------------------------------------------------- queue */

void moe_cpu_message_enqueue(struct moe_cpu_message *m)
{
    struct moe_cpu_network *n = m->network;
    m->send.bytes = m->used;
    m->next = NULL;
    moe_mutex_lock(&n->lock);
    if (n->first == NULL)
        n->first = m;
    else
        n->last->next = m;
    n->last = m;
    moe_mutex_unlock(&n->lock);
}

struct moe_cpu_message *moe_cpu_message_queue(struct moe_cpu_network *n)
{
    moe_mutex_lock(&n->lock);
    struct moe_cpu_message *first = n->first;
    n->first = n->last = NULL;
    moe_mutex_unlock(&n->lock);
    return first;
}

/* ---------------------------------------------------------------------- records */

void *moe_cpu_message_store(struct moe_cpu_message *m, size_t offset, size_t bytes)
{
    size_t padded = (bytes + 7) / 8 * 8;
    if (bytes > sizeof m->body ||
        sizeof m->body - m->used < sizeof(struct moe_cpu_store_record) + padded)
        return NULL;
    struct moe_cpu_store_record *record = (void *)((uint8_t *)m->body + m->used);
    *record = (struct moe_cpu_store_record){.offset = offset, .bytes = (uint32_t)bytes};
    m->used += sizeof *record + padded;
    m->flags = NULL;
    return record + 1;
}

bool moe_cpu_message_flag(struct moe_cpu_message *m, size_t offset, uint64_t flag)
{
    struct moe_cpu_store_record *record = m->flags;
    bool follows = record != NULL && record->offset + record->bytes == offset &&
                   sizeof m->body - m->used >= sizeof flag;
    void *to = (uint8_t *)m->body + m->used;
    if (follows) {
        record->bytes += (uint32_t)sizeof flag;
        m->used += sizeof flag;
    } else {
        to = moe_cpu_message_store(m, offset, sizeof flag);
        if (to == NULL)
            return false;
        m->flags = (struct moe_cpu_store_record *)to - 1;
        m->flags->is_flags = 1;
    }
    memcpy(to, &flag, sizeof flag);
    return true;
}

/* The header of a window belongs to its owner. */
static bool fits(const struct moe_cpu_network *n, const struct moe_cpu_store_record *r)
{
    size_t end = n->config.layout->bytes;
    bool aligned = !r->is_flags || (r->offset % 8 == 0 && r->bytes % 8 == 0);
    return aligned && r->offset >= n->config.layout->exchange && r->offset <= end &&
           r->bytes <= end - r->offset;
}

bool moe_cpu_message_carry_out(const struct moe_cpu_network *n, const void *body, size_t bytes)
{
    const uint8_t *at = body, *end = at + bytes;
    while (at < end) {
        struct moe_cpu_store_record r;
        if ((size_t)(end - at) < sizeof r)
            return false;
        memcpy(&r, at, sizeof r);
        at += sizeof r;
        size_t padded = ((size_t)r.bytes + 7) / 8 * 8;
        if (padded > (size_t)(end - at) || !fits(n, &r))
            return false;
        uint8_t *to = n->config.window + r.offset;
        for (uint32_t i = 0; r.is_flags && i < r.bytes; i += 8) {
            uint64_t flag;
            memcpy(&flag, at + i, sizeof flag);
            __atomic_store_n((uint64_t *)(void *)(to + i), flag, __ATOMIC_RELEASE);
        }
        if (!r.is_flags)
            memcpy(to, at, r.bytes);
        at += padded;
    }
    return true;
}
