/* What saving forward steps leave on this slot's device, from the step to the Backward that uses
 * it: when it is dropped, and how much of it there is. Everything here but reading the numbers is
 * the engine's thread's, as trainers are. */
#include "worker/training_state.h"

#include "base/clock.h"

#include <string.h>

/* How much the device keeps now, for those who ask from other threads. */
static void read_bytes(struct moe_train *t)
{
    uint64_t bytes = t->config.backend->training->saved_bytes(t->config.device);
    pthread_mutex_lock(&t->lock);
    t->activation_bytes = bytes;
    pthread_mutex_unlock(&t->lock);
}

static void drop(struct moe_train *t, const struct moe_saved_step *a)
{
    struct moe_trainer *trainer = moe_train__find_trainer(t, a->layer);
    if (trainer != NULL)
        t->config.backend->training->saved_drop(trainer, a->name);
}

static void drop_all_of(struct moe_train *t, const struct moe_train_call *call, bool busy_too)
{
    struct moe_saved_step a;
    while (moe_saved_steps_take(&t->saved_steps, call->session, call->id, busy_too, &a))
        drop(t, &a);
}

void moe_train_limit_activations(struct moe_train *t, uint64_t bytes)
{
    pthread_mutex_lock(&t->lock);
    t->activation_limit = bytes;
    pthread_mutex_unlock(&t->lock);
    t->config.backend->training->saved_limit(t->config.device, bytes);
    t->saved_steps.count = 0;
    read_bytes(t);
}

/* So many in vain are enough to give up, until so many more have been asked for. */
enum { VAIN_MAX = 8, TRY_AGAIN = 64 };

bool moe_train_worth_saving(struct moe_train *t, enum moe_dtype dtype)
{
    bool wide = dtype == MOE_DTYPE_F32;
    pthread_mutex_lock(&t->lock);
    bool worth = t->activation_limit > 0;
    if (worth && t->fruitless[wide] >= VAIN_MAX) {
        t->untried[wide] = (t->untried[wide] + 1) % TRY_AGAIN;
        worth = t->untried[wide] == 0;
    }
    pthread_mutex_unlock(&t->lock);
    return worth;
}

static void note_fruits(struct moe_train *t, const struct moe_ticket *ticket, bool saved)
{
    bool wide = ticket->dtype == MOE_DTYPE_F32;
    pthread_mutex_lock(&t->lock);
    if (ticket->order.origin == t->slot)
        t->fruitless[wide] = saved ? 0 : t->fruitless[wide] + 1;
    pthread_mutex_unlock(&t->lock);
}

/* The id has been used: no Backward will come that could use what is kept for it. */
static bool is_recorded(struct moe_train *t, const struct moe_train_call *call)
{
    pthread_mutex_lock(&t->lock);
    bool recorded = moe_ledger_find(t->ledger, call->session, call->id) != NULL;
    pthread_mutex_unlock(&t->lock);
    return recorded;
}

void moe_train_note_saved(struct moe_train *t, const struct moe_ticket *ticket,
                          const struct moe_train_call *call, bool saved)
{
    struct moe_saved_step a = {.id = call->id,
                               .layer = ticket->layer,
                               .name = ticket->seq,
                               .expires_ns = moe_clock_ns() + t->config.saved_ns};
    struct moe_saved_step oldest;
    memcpy(a.session, call->session, sizeof a.session);
    /* On a slot that was not asked, the Backward may have begun before this step has ended. */
    a.busy = t->holding && t->held_id == call->id && strcmp(t->held_session, call->session) == 0;
    /* The same pass asked for again: a client that has not heard the first answer. */
    drop_all_of(t, call, false);
    if (saved && moe_saved_steps_full(&t->saved_steps) &&
        moe_saved_steps_take_old(&t->saved_steps, MOE_NEVER, &oldest))
        drop(t, &oldest);
    if (saved && (is_recorded(t, call) || moe_saved_steps_full(&t->saved_steps)))
        drop(t, &a);
    else if (saved)
        moe_saved_steps_add(&t->saved_steps, &a);
    note_fruits(t, ticket, saved);
    if (saved && t->metrics.saved_steps != NULL)
        moe_counter_add(t->metrics.saved_steps, 1);
    read_bytes(t);
    moe_train__show(t);
}

void moe_train_drop_empty(struct moe_train *t, const struct moe_ticket *ticket)
{
    const struct moe_saved_step a = {.layer = ticket->layer, .name = ticket->seq};
    drop(t, &a);
    read_bytes(t);
}

void moe_train_note_reused(struct moe_train *t)
{
    if (t->metrics.reused != NULL)
        moe_counter_add(t->metrics.reused, 1);
}

void moe_train__hold_activations(struct moe_train *t, const struct moe_train_call *call, bool hold)
{
    moe_saved_steps_set_busy(&t->saved_steps, call->session, call->id, hold);
    t->holding = hold;
    t->held_id = call->id;
    memcpy(t->held_session, call->session, sizeof t->held_session);
}

void moe_train__drop_activations(struct moe_train *t, const struct moe_train_call *call)
{
    drop_all_of(t, call, true);
    t->holding = false; /* one pass at a time, and this was it, or a repeat beside none */
    read_bytes(t);
}

void moe_train__drop_all_activations(struct moe_train *t)
{
    for (size_t i = 0; i < t->config.layer_count; i++)
        if (t->trainers[i] != NULL)
            t->config.backend->training->saved_drop(t->trainers[i], 0);
    moe_train_forget_activations(t);
}

void moe_train_forget_activations(struct moe_train *t)
{
    t->saved_steps.count = 0;
    t->holding = false;
    pthread_mutex_lock(&t->lock);
    t->activation_bytes = 0;
    pthread_mutex_unlock(&t->lock);
    moe_train__show(t);
}

void moe_train_drop_old(struct moe_train *t, uint64_t now)
{
    struct moe_saved_step a;
    while (moe_saved_steps_take_old(&t->saved_steps, now, &a))
        drop(t, &a);
    read_bytes(t);
    moe_train__show(t);
}

uint64_t moe_train_next_drop(const struct moe_train *t)
{
    return moe_saved_steps_next(&t->saved_steps);
}
