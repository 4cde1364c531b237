/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of a batch: requests that a client sends over several connections, and that are to share a
 * step. The batcher sets them aside until the last one is here, or for a short time. They may end
 * meanwhile like any request: of their batch, the engine knows only how many have come. */
#include "engine/state.h"

static struct part_batch *find(struct moe_engine *e, const struct moe_step_key *key, uint64_t id)
    MOE_REQUIRES(e->lock)
{
    for (size_t i = 0; i < e->batch_count; i++) {
        struct part_batch *b = &e->batches[i];
        if (b->id == id && b->key.layer == key->layer && b->key.dtype == key->dtype)
            return b;
    }
    return NULL;
}

/* The first part of a batch. False if there is no room. */
static bool add(struct moe_engine *e, const struct moe_step_key *key, const struct moe_work *w)
    MOE_REQUIRES(e->lock)
{
    const uint64_t due = w->submitted_ns + e->config.parts_wait_ns;
    if (e->batch_count == BATCHES_MAX)
        return false;
    e->batches[e->batch_count++] = (struct part_batch){
        .id = w->batch, .key = *key, .missing = w->batch_parts - 1, .due_ns = due};
    if (due < e->batches_due_ns) {
        e->batches_due_ns = due;
        moe_eventcount_notify(e->eventcount); /* the thread may sleep for longer */
    }
    return true;
}

/* Queues the parts that are here, and forgets the batch. */
static uint32_t join(struct moe_engine *e, struct part_batch *b) MOE_REQUIRES(e->lock)
{
    const uint32_t tokens = moe_batcher_join(e->batcher, &b->key, b->id);
    *b = e->batches[--e->batch_count];
    e->batches_due_ns = MOE_NEVER;
    for (size_t i = 0; i < e->batch_count; i++)
        e->batches_due_ns = moe_earlier(e->batches_due_ns, e->batches[i].due_ns);
    return tokens;
}

uint32_t moe_engine__queue(struct moe_engine *e, const struct moe_step_key *key, struct moe_work *w,
                           bool served)
{
    const bool retained = key->kind == MOE_STEP_FORWARD_RETAIN;
    const bool waits =
        served && w->retain_session == NULL && w->batch_parts > 1 && e->config.parts_wait_ns > 0;
    struct part_batch *b = waits ? find(e, key, w->batch) : NULL;
    if (!waits || (b == NULL && !add(e, key, w))) {
        moe_batcher_push(e->batcher, key, w);
        return retained ? 0 : w->tokens;
    }
    moe_batcher_gather(e->batcher, key, w);
    return b != NULL && --b->missing == 0 ? join(e, b) : 0;
}

static struct part_batch *first_due(struct moe_engine *e, uint64_t now_ns) MOE_REQUIRES(e->lock)
{
    for (size_t i = 0; i < e->batch_count; i++)
        if (e->batches[i].due_ns <= now_ns)
            return &e->batches[i];
    return NULL;
}

void moe_engine__queue_late_parts(struct moe_engine *e, uint64_t now_ns)
{
    struct part_batch *b;
    while (now_ns >= e->batches_due_ns && (b = first_due(e, now_ns)) != NULL) {
        const struct moe_step_key key = b->key;
        const uint32_t tokens = join(e, b);
        if (tokens == 0 || !moe_engine__serves(e, key.layer))
            continue;
        moe_mutex_unlock(&e->lock);
        e->config.announce(e->config.ctx, key.layer, key.kind, key.dtype, tokens);
        moe_mutex_lock(&e->lock);
    }
}

void moe_engine__queue_all_parts(struct moe_engine *e)
{
    while (e->batch_count > 0)
        (void)join(e, &e->batches[0]);
}
