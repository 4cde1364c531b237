/* SPDX-License-Identifier: Apache-2.0 */
/* Ends of requests. A request is where its tokens are: `queued` is true while some wait in the
 * batcher, `taken - finished` of them are in steps. When neither is left, it has ended. */
#include "engine/state.h"

static void append(struct work_list *list, struct moe_work *w)
{
    w->next = NULL;
    if (list->tail != NULL)
        list->tail->next = w;
    else
        list->head = w;
    list->tail = w;
}

void moe_engine__settle(struct moe_engine *e, struct moe_work *w)
{
    if (w->queued || w->taken != w->finished)
        return;
    append(&e->ended, w);
    moe_eventcount_notify(e->eventcount);
}

void moe_engine__give_up(struct moe_engine *e, struct moe_work *w, struct moe_status reason)
{
    if (!moe_failed(&w->failure))
        w->failure = reason;
    moe_engine__settle(e, w);
}

void moe_engine__give_up_all(struct moe_engine *e, struct moe_work *evicted,
                             struct moe_status reason)
{
    for (struct moe_work *next; evicted != NULL; evicted = next) {
        next = evicted->next;
        moe_engine__give_up(e, evicted, reason);
    }
}

/* ---------------------------------------------------------------- another version */

bool moe_engine__wants_other_version(const struct moe_work *w, uint64_t version)
{
    uint64_t present = moe_layer_model(w->layer) == 0 ? version : 1;
    return w->weights_version != 0 && w->weights_version != present;
}

struct moe_status moe_engine__other_version(uint64_t version)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                     "the weights version is now %llu", (unsigned long long)version);
}

void moe_engine__forget_steps(struct moe_work *w)
{
    w->step = (struct moe_step_result){.missing_slot = -1};
    w->steps = 0;
    if (w->times != NULL)
        w->times->count = 0;
}

static bool rewind_queue(struct moe_engine *e, size_t i, struct moe_step_key *key, uint32_t *tokens)
    MOE_REQUIRES(e->lock)
{
    struct moe_work *w;
    if (!moe_batcher_rewind(e->batcher, i, key, tokens, &w))
        return false;
    if (*tokens > 0)
        moe_engine__forget_steps(w);
    return true;
}

void moe_engine__change_version(struct moe_engine *e, uint64_t version, bool announce)
{
    if (version == e->weights_version)
        return;
    e->weights_version = version;
    moe_engine__give_up_all(e,
                            moe_batcher_evict(e->batcher, moe_engine__wants_other_version, version),
                            moe_engine__other_version(version));
    struct moe_step_key key;
    uint32_t tokens;
    for (size_t i = 0; rewind_queue(e, i, &key, &tokens); i++) {
        if (tokens == 0 || !announce)
            continue;
        moe_mutex_unlock(&e->lock);
        e->config.announce(e->config.ctx, key.layer, key.kind, key.dtype, tokens);
        moe_mutex_lock(&e->lock);
    }
}
