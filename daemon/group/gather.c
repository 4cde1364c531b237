/* SPDX-License-Identifier: Apache-2.0 */
/* A round is an array of blobs under a lock. It is complete when the bits of all live slots are
 * set.
 */
#include "group/gather.h"

#include "base/mutex.h"
#include "base/wait.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct moe_gather {
    moe_gather_send_fn send;
    void *ctx;
    struct moe_mutex lock;
    pthread_cond_t wake;
    MOE_GUARDED_BY(lock) struct {
        uint64_t epoch, live;
        uint32_t slots;
        uint64_t aborted; /* this epoch and all earlier ones are aborted */
        uint32_t round;   /* current or next */
        uint64_t have;    /* bit s: the blob of slot s is in `blob` */
        size_t length[MOE_MAX_SLOTS];
        uint8_t blob[MOE_MAX_SLOTS][MOE_GATHER_BLOB_MAX];
    };
};

struct moe_status moe_gather_create(moe_gather_send_fn send, void *ctx, struct moe_gather **out)
{
    struct moe_gather *g = calloc(1, sizeof *g);
    if (g == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for an all-gather");
    g->send = send;
    g->ctx = ctx;
    moe_wait_init(&g->wake);
    moe_mutex_init(&g->lock);
    *out = g;
    return moe_ok();
}

void moe_gather_destroy(struct moe_gather *g)
{
    if (g == NULL)
        return;
    pthread_cond_destroy(&g->wake);
    moe_mutex_destroy(&g->lock);
    free(g);
}

void moe_gather_begin(struct moe_gather *g, uint64_t epoch, uint32_t slots, uint64_t live)
{
    moe_mutex_lock(&g->lock);
    g->epoch = epoch;
    g->slots = slots;
    g->live = live;
    g->round = 0;
    g->have = 0;
    moe_mutex_unlock(&g->lock);
}

void moe_gather_deliver(struct moe_gather *g, uint64_t epoch, uint32_t round, uint32_t slot,
                        const void *data, size_t length)
{
    moe_mutex_lock(&g->lock);
    if (epoch == g->epoch && round == g->round && slot < MOE_MAX_SLOTS &&
        length <= MOE_GATHER_BLOB_MAX) {
        if (length > 0)
            memcpy(g->blob[slot], data, length);
        g->length[slot] = length;
        g->have |= UINT64_C(1) << slot;
        pthread_cond_broadcast(&g->wake);
    }
    moe_mutex_unlock(&g->lock);
}

void moe_gather_abort(struct moe_gather *g, uint64_t epoch)
{
    moe_mutex_lock(&g->lock);
    if (epoch > g->aborted) {
        g->aborted = epoch;
        pthread_cond_broadcast(&g->wake);
    }
    moe_mutex_unlock(&g->lock);
}

static struct moe_status wait_for_round(struct moe_gather *g, uint64_t deadline_ns)
    MOE_REQUIRES(g->lock)
{
    while (g->epoch > g->aborted && (g->have & g->live) != g->live)
        if (!moe_wait_until(&g->wake, &g->lock, deadline_ns))
            break;
    if (g->epoch <= g->aborted)
        return moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "epoch %llu was aborted",
                         (unsigned long long)g->epoch);
    if ((g->have & g->live) != g->live)
        return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                         "not all workers answered round %u of epoch %llu", g->round,
                         (unsigned long long)g->epoch);
    return moe_ok();
}

/* Copies a complete round out and starts the next. */
static struct moe_status take_round(struct moe_gather *g, uint8_t *all, size_t stride,
                                    size_t length) MOE_REQUIRES(g->lock)
{
    for (uint32_t s = 0; s < g->slots; s++) {
        if ((g->live >> s & 1) == 0)
            continue;
        if (g->length[s] != length)
            return moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED,
                             "slot %u sent a blob of another length", s);
        memcpy(all + s * stride, g->blob[s], length);
    }
    g->round++;
    g->have = 0;
    return moe_ok();
}

static struct moe_status exchange_part(struct moe_gather *g, const uint8_t *mine, uint8_t *all,
                                       size_t stride, size_t length, uint64_t deadline_ns)
{
    moe_mutex_lock(&g->lock);
    uint64_t epoch = g->epoch;
    uint32_t round = g->round;
    moe_mutex_unlock(&g->lock);
    MOE_TRY(g->send(g->ctx, epoch, round, mine, length));
    moe_mutex_lock(&g->lock);
    struct moe_status st = wait_for_round(g, deadline_ns);
    if (!moe_failed(&st))
        st = take_round(g, all, stride, length);
    moe_mutex_unlock(&g->lock);
    return st;
}

struct moe_status moe_gather_exchange(struct moe_gather *g, const void *mine, void *all,
                                      size_t bytes, uint64_t deadline_ns)
{
    moe_mutex_lock(&g->lock);
    memset(all, 0, bytes * g->slots);
    moe_mutex_unlock(&g->lock);
    for (size_t at = 0; at < bytes; at += MOE_GATHER_BLOB_MAX) {
        size_t length = bytes - at < MOE_GATHER_BLOB_MAX ? bytes - at : MOE_GATHER_BLOB_MAX;
        MOE_TRY(exchange_part(g, (const uint8_t *)mine + at, (uint8_t *)all + at, bytes, length,
                              deadline_ns));
    }
    return moe_ok();
}
