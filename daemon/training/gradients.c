/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients between Backward and OptimizerStep: the slots that hold parts of them, and what becomes
 * of them when a view ends. If all members have the same weights, the group goes on without
 * gradients that are gone, under a new lineage; see training/recovery.h. */
#include "training/state.h"

#include <string.h>

/* A Backward is recorded and counted alike on all slots, whether it has ended there or was cut
 * short. It can be taken back with the gradients, also if it has none: its answer goes too. */
void moe_train__record_backward(struct moe_train *t, const char *session,
                                const struct moe_ledger_call *call)
{
    t->before = moe_ledger_hash(t->ledger);
    t->backward = *call;
    memset(t->backward_session, 0, sizeof t->backward_session);
    strncpy(t->backward_session, session, MOE_TRAINING_NAME_MAX);
    t->backwards += (uint32_t)call->outcome.backwards;
    t->change.id = 0; /* another call came after it */
    moe_ledger_record_pending(t->ledger, session, call);
}

enum moe_train_missed moe_train__missed(const struct moe_train_call *call)
{
    switch (call->kind) {
    case MOE_STEP_OPTIMIZER:
    case MOE_STEP_ZERO_GRAD:
    case MOE_STEP_SET_FROZEN: return MOE_TRAIN_FINISH;
    case MOE_STEP_SAVE: return MOE_TRAIN_RECORD;
    case MOE_STEP_EXPORT: return call->merge ? MOE_TRAIN_LOST : MOE_TRAIN_RECORD;
    default: return MOE_TRAIN_LOST;
    }
}

void moe_train__record_change(struct moe_train *t, const struct moe_ledger_call *call,
                              enum moe_train_missed missed)
{
    t->before = moe_ledger_hash(t->ledger);
    t->backward.id = 0; /* another call came after it */
    t->change = missed != MOE_TRAIN_LOST ? *call : (struct moe_ledger_call){0};
    t->only_recorded = missed == MOE_TRAIN_RECORD;
    moe_ledger_record(t->ledger, "", call);
}

void moe_train__drop_gradients(struct moe_train *t)
{
    moe_ledger_settle(t->ledger);
    t->gradients = t->unsettled = 0;
    t->undefined = t->gradients_lost = false;
    t->backwards = 0;
    t->backward = t->change = (struct moe_ledger_call){0};
}

bool moe_train__is_saved(const struct moe_train *t)
{
    return t->saved_calls != 0 && t->saved_calls == moe_ledger_count(t->ledger) &&
           t->checkpoint[0] != '\0' && t->unsaved == 0 && t->backwards == 0 && !t->undefined &&
           t->unsettled == 0 && !t->gradients_lost && !t->inconsistent;
}

/* ----------------------------------------------------------------------- a view ends */

/* A call has begun here, and its view ends. Another slot may have run it to its end and answered.
 * A Backward leaves undefined gradients and good weights; one without gradients leaves nothing. */
void moe_train__cut_short(struct moe_train *t, const struct moe_call_exec *x)
{
    const struct moe_train_call *c = &x->call;
    bool backward = c->kind == MOE_STEP_BACKWARD;
    if (!x->run)
        return;
    if (!(x->unchanged && t->config.backend->training->live_copies)) {
        t->inconsistent = t->inconsistent || x->changes;
        t->unsettled |= x->changes ? 0 : t->live;
        return;
    }
    if (backward && c->input_only)
        return;
    t->undefined = t->undefined || backward || c->kind == MOE_STEP_OPTIMIZER;
    t->unsettled |= backward ? 0 : t->live;
    if (x->can_finish && moe_train__missed(c) == MOE_TRAIN_FINISH)
        t->begun = *c;
    struct moe_ledger_outcome o = {.epoch = x->epoch};
    if (backward)
        moe_train__record(t, c, x->origin, &o);
}

/* --------------------------------------------------------------- the next view forms */

/* Of a call that was sent again and is lost again. */
static bool is_named(const struct moe_train *t, uint32_t count, const char *session, uint64_t id)
{
    for (uint32_t i = 0; i < count; i++)
        if (t->lost[i].id == id && strcmp(t->lost[i].session, session) == 0)
            return true;
    return false;
}

struct losses {
    struct moe_train *t;
    uint32_t before; /* calls that were named before */
};

static void add_lost(void *ctx, const char *session, const struct moe_ledger_call *call)
{
    const struct losses *l = ctx;
    struct moe_train *t = l->t;
    if (call->outcome.backwards == 0) /* it had no gradients */
        return;
    if (is_named(t, l->before, session, call->id)) {
        t->lost_total--; /* it is counted already */
        return;
    }
    if (t->lost_count == MOE_TRAIN_LOST_MAX)
        return;
    struct moe_train_micro_batch *b = &t->lost[t->lost_count++];
    memset(b, 0, sizeof *b);
    strncpy(b->session, session, MOE_TRAINING_NAME_MAX);
    b->id = call->id;
}

struct moe_status moe_train__lose_gradients(struct moe_train *t, const struct moe_train_recovery *r)
{
    if (moe_ledger_count(t->ledger) + 1 == r->calls && r->backward.id != 0)
        moe_train__record_backward(t, r->backward_session, &r->backward);
    if (moe_ledger_count(t->ledger) != r->calls || moe_ledger_hash(t->ledger) != r->record) {
        t->inconsistent = true;
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                         "this slot has recorded other calls than the group");
    }
    if (t->earlier != r->earlier && !t->gradients_lost)
        moe_train__forget_lost(t);
    struct losses losses = {t, t->lost_count};
    t->lost_total += t->backwards; /* also those that the ledger has forgotten */
    moe_ledger_take_back(t->ledger, add_lost, &losses);
    moe_train__drop_gradients(t);
    t->lineage = r->lineage;
    t->earlier = r->earlier;
    t->loss = r->loss > t->loss ? r->loss : t->loss; /* a lost call, until a step is taken */
    t->gradients_lost = true;
    t->saved_calls = 0;
    moe_pass_store_clear(t->passes);
    moe_pass_store_clear(t->answers);
    return moe_ok();
}

void moe_train__forget_lost(struct moe_train *t)
{
    t->earlier = 0;
    t->loss = MOE_TRAIN_LOSS_NONE;
    t->lost_count = 0;
    t->lost_total = 0;
    t->gradients_lost = false;
}
