/* SPDX-License-Identifier: Apache-2.0 */
/* How this slot takes the state with which a forming group continues; see training/recovery.h. */
#include "training/state.h"

#include "base/clock.h"
#include "common/layer_rules.h"
#include "daemon/log.h"

#include <string.h>

void moe_train_read_digest(struct moe_train *t, struct moe_train_digest *out)
{
    *out = (struct moe_train_digest){0};
    if (t == NULL)
        return;
    moe_mutex_lock(&t->lock);
    out->config = t->config_hash;
    out->group = t->last_group;
    out->epoch = t->last_epoch;
    out->lineage = t->lineage;
    out->weights_version = t->weights_version;
    out->calls = moe_ledger_count(t->ledger);
    out->record = moe_ledger_hash(t->ledger);
    out->nonce = t->writer;
    out->inconsistent = t->inconsistent;
    out->unsaved = t->unsaved;
    memcpy(out->checkpoint, t->checkpoint, sizeof t->checkpoint);
    out->explicit_load = t->checkpoint[0] == '\0'
                             ? t->chose_model
                             : moe_checkpoint_explicit_loads_has(&t->explicit_loads, t->checkpoint);
    out->has_target = t->has_target;
    memcpy(out->target, t->target, sizeof t->target);
    out->earlier = t->earlier;
    out->gradients = t->gradients;
    out->undefined = t->undefined;
    out->unsettled = t->unsettled;
    out->saved = moe_train__is_saved(t);
    out->before = t->before;
    out->backward = t->backward;
    memcpy(out->backward_session, t->backward_session, sizeof t->backward_session);
    out->change = t->change;
    out->squares = t->squares;
    out->only_recorded = t->only_recorded;
    out->settled = t->saved_calls != 0 && t->saved_calls == out->calls;
    out->begun = t->begun.id;
    moe_mutex_unlock(&t->lock);
}

void moe_train_set_recovery_target(struct moe_train *t, const char *checkpoint)
{
    moe_mutex_lock(&t->lock);
    t->has_target = true;
    memset(t->target, 0, sizeof t->target);
    strncpy(t->target, checkpoint, MOE_TRAINING_NAME_MAX);
    moe_mutex_unlock(&t->lock);
}

static void take_checkpoint(struct moe_train *t, const struct moe_train_recovery *r)
    MOE_REQUIRES(t->lock)
{
    moe_train__set_checkpoint(t, r->checkpoint);
    t->chose_model = r->explicit_load && r->checkpoint[0] == '\0';
    if (r->explicit_load && !t->chose_model)
        moe_checkpoint_explicit_loads_add(&t->explicit_loads, r->checkpoint);
}

/* The group keeps its state. A view can end when only some slots have noted a checkpoint: from here
 * on all know the latest. */
static void keep_state(struct moe_train *t, const struct moe_train_recovery *r)
    MOE_REQUIRES(t->lock)
{
    t->unsettled = 0; /* all members of that view are here, and none has answered the call */
    if (r->loss == MOE_TRAIN_LOSS_NONE &&
        r->lineage != t->lineage) /* nothing is learnt yet, and a member is new */
        moe_train__begin_lineage(t, r->lineage, r->weights_version);
    if (t->unsaved == r->lost_steps && strcmp(t->checkpoint, r->checkpoint) == 0)
        return;
    if (!r->settled && strcmp(t->checkpoint, r->checkpoint) != 0)
        t->saved_calls = 0;
    take_checkpoint(t, r);
    t->unsaved = r->lost_steps;
}

/* What was cut short here, as on the slots that have run it. */
static struct moe_status run_begun(struct moe_train *t, const struct moe_train_recovery *r)
{
    struct moe_optimizer_args args = t->begun.optimizer;
    struct moe_optimizer_result unused;
    uint64_t begun_ns = moe_clock_ns();
    args.number = t->steps + 1;
    switch (t->begun.kind) {
    case MOE_STEP_OPTIMIZER:
        MOE_TRY(t->config.backend->training->optimizer_finish(t->trainers, t->config.layer_count,
                                                              &args, r->squares, &unused));
        moe_mutex_lock(&t->lock);
        moe_train__count_step(t, r->change.outcome.nonfinite);
        moe_mutex_unlock(&t->lock);
        moe_train__log_stepped(t, t->begun.id, begun_ns, r->change.outcome.nonfinite);
        return moe_ok();
    case MOE_STEP_ZERO_GRAD: return moe_train__run_zero_grad(t);
    default: return moe_train__run_set_frozen(t, t->begun.frozen);
    }
}

/* Others have recorded a call that this slot lacks. After a failure the state is inconsistent. */
static struct moe_status finish(struct moe_train *t, const struct moe_train_recovery *r)
{
    struct moe_status st = r->only_recorded ? moe_ok() : run_begun(t, r);
    moe_mutex_lock(&t->lock);
    t->inconsistent = moe_failed(&st);
    t->squares = r->squares;
    moe_train__record_change(t, &r->change, r->only_recorded ? MOE_TRAIN_RECORD : MOE_TRAIN_FINISH);
    if (r->settled) { /* as on the slots that have written it */
        t->saved_calls = moe_ledger_count(t->ledger);
        moe_ledger_settle(t->ledger);
    }
    moe_mutex_unlock(&t->lock);
    if (!moe_failed(&st))
        moe_log_info("training: this worker has finished call %llu, which others had run",
                     (unsigned long long)r->change.id);
    return st;
}

/* The group keeps its weights, and goes on without gradients. */
static struct moe_status lose_gradients(struct moe_train *t, const struct moe_train_recovery *r)
{
    moe_mutex_lock(&t->lock);
    struct moe_status st = moe_train__lose_gradients(t, r);
    uint64_t total = t->lost_total;
    moe_mutex_unlock(&t->lock);
    MOE_TRY(st);
    moe_log_warn("training goes on from the same weights without the gradients of %llu Backward "
                 "calls, which a lost worker or step had; lineage %llu",
                 (unsigned long long)total, (unsigned long long)r->lineage);
    return moe_train__zero_grad(t);
}

/* The layers are as loaded, and so are the trainers. The state is whole once a checkpoint is read.
 */
static void begin_as_loaded(struct moe_train *t, uint64_t lineage, uint64_t version)
    MOE_REQUIRES(t->lock)
{
    moe_train__begin_lineage(t, lineage, version);
    moe_ledger_reset(t->ledger);
    t->steps = 0;
    t->frozen = t->config.trainer.frozen;
    t->inconsistent = true;
    t->ahead = (struct moe_saved_training){0};
}

static void begin_anew(struct moe_train *t, const struct moe_train_recovery *r)
    MOE_REQUIRES(t->lock)
{
    begin_as_loaded(t, r->lineage, r->weights_version);
    t->unsaved = 0;
    take_checkpoint(t, r);
}

/* A checkpoint of the same name may be another one: its records are not those of the group. */
static struct moe_status check_joined(struct moe_train *t, const char *checkpoint, uint64_t calls)
    MOE_REQUIRES(t->lock)
{
    uint64_t found = moe_ledger_count(t->ledger);
    if (found == calls)
        return moe_ok();
    moe_ledger_reset(t->ledger);
    t->steps = 0;
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH,
                     "checkpoint %s records %llu calls, and the group has run %llu", checkpoint,
                     (unsigned long long)found, (unsigned long long)calls);
}

/* The others read nothing, so this slot checks the hashes of all files. */
static struct moe_status read_alone(struct moe_train *t, const char *checkpoint,
                                    const atomic_bool *cancel)
{
    return moe_train__load_checkpoint(t, checkpoint, UINT64_C(1) << t->slot, cancel);
}

/* What this slot knows of the group's past stays: the others may go on without it, and remove the
 * checkpoint. */
struct moe_status moe_train_read_ahead(struct moe_train *t, const struct moe_saved_training *state,
                                       uint32_t slot, uint32_t slots)
{
    moe_train__end_copying(t);
    moe_mutex_lock(&t->lock);
    uint64_t unsaved = t->unsaved;
    t->begun.id = 0;
    t->slot = slot;
    t->slots = slots;
    t->live = UINT64_C(1) << slot; /* no view is in force here */
    begin_as_loaded(t, state->lineage, state->weights_version);
    t->apart = true;
    moe_mutex_unlock(&t->lock);
    struct moe_status st = read_alone(t, state->checkpoint, &t->no_read);
    moe_mutex_lock(&t->lock);
    t->unsaved = unsaved;
    if (!moe_failed(&st))
        st = check_joined(t, state->checkpoint, state->calls);
    moe_mutex_unlock(&t->lock);
    if (!moe_failed(&st))
        t->ahead = *state;
    return st;
}

void moe_train_allow_read(struct moe_train *t, bool allowed)
{
    atomic_store(&t->no_read, !allowed);
}

static struct moe_saved_training own_state(const struct moe_train *t) MOE_REQUIRES(t->lock)
{
    struct moe_saved_training own = {.lineage = t->lineage,
                                     .weights_version = t->weights_version,
                                     .calls = moe_ledger_count(t->ledger),
                                     .record = moe_ledger_hash(t->ledger)};
    memcpy(own.checkpoint, t->checkpoint, sizeof own.checkpoint);
    return own;
}

bool moe_train_has_ahead(struct moe_train *t, const struct moe_saved_training *state)
{
    moe_mutex_lock(&t->lock);
    struct moe_saved_training own = own_state(t);
    bool is_own = moe_train__is_saved(t) && moe_saved_training_same(&own, state);
    moe_mutex_unlock(&t->lock);
    return is_own || (t->ahead.calls != 0 && moe_saved_training_same(&t->ahead, state));
}

bool moe_train_is_joined(const struct moe_train *t, const struct moe_train_recovery *r)
{
    return moe_train_is_ahead(&t->ahead, r);
}

/* This slot has read the state already. */
static void begin_with_ahead(struct moe_train *t, const struct moe_train_recovery *r)
    MOE_REQUIRES(t->lock)
{
    moe_train__begin_lineage(t, r->lineage, r->weights_version);
    t->unsaved = 0;
    take_checkpoint(t, r);
    t->ahead = (struct moe_saved_training){0};
}

/* The others go on with a state that `checkpoint` has. What they lost before it is not known here:
 * calls of the lineage before get STATE_LOST. */
static struct moe_status join(struct moe_train *t, const struct moe_train_recovery *r)
{
    bool ahead = moe_train_is_ahead(&t->ahead, r);
    moe_mutex_lock(&t->lock);
    t->apart = true;
    if (ahead)
        begin_with_ahead(t, r);
    else
        begin_anew(t, r);
    moe_mutex_unlock(&t->lock);
    if (!ahead)
        MOE_TRY(read_alone(t, r->checkpoint, NULL));
    moe_mutex_lock(&t->lock);
    struct moe_status st = check_joined(t, r->checkpoint, r->calls);
    if (!moe_failed(&st)) {
        moe_ledger_set_hash(t->ledger, r->record);
        t->saved_calls = moe_ledger_count(t->ledger);
        t->inconsistent = t->apart = false;
    }
    moe_mutex_unlock(&t->lock);
    if (!moe_failed(&st))
        moe_log_info("training: this worker has joined with checkpoint %s; lineage %llu, version "
                     "%llu",
                     r->checkpoint, (unsigned long long)r->lineage,
                     (unsigned long long)r->weights_version);
    return st;
}

static struct moe_status restart(struct moe_train *t, const struct moe_train_recovery *r)
{
    moe_mutex_lock(&t->lock);
    begin_anew(t, r);
    /* After a restart that failed, the next one reports the same steps. */
    t->lost_steps = r->lost_steps > t->lost_steps ? r->lost_steps : t->lost_steps;
    moe_mutex_unlock(&t->lock);
    if (r->checkpoint[0] != '\0')
        MOE_TRY(moe_train__load_checkpoint(t, r->checkpoint, t->live, NULL));
    moe_mutex_lock(&t->lock);
    t->inconsistent = t->apart = false;
    t->saved_calls = moe_ledger_count(t->ledger);
    t->went_back = true;
    moe_mutex_unlock(&t->lock);
    return moe_ok();
}

void moe_train_in_force(struct moe_train *t)
{
    moe_mutex_lock(&t->lock);
    t->last_group = t->group;
    t->last_epoch = t->epoch;
    t->has_target = false;
    bool went_back = t->went_back;
    bool to_model = t->checkpoint[0] == '\0';
    uint64_t lost = t->lost_steps;
    t->went_back = false;
    t->lost_steps = went_back ? 0 : lost;
    if (went_back)
        moe_log_warn("training went back to %s%s: %llu optimizer step%s that no checkpoint had %s "
                     "lost; lineage %llu, version %llu",
                     to_model ? "the model as loaded" : "checkpoint ", t->checkpoint,
                     (unsigned long long)lost, lost == 1 ? "" : "s", lost == 1 ? "is" : "are",
                     (unsigned long long)t->lineage, (unsigned long long)t->weights_version);
    moe_mutex_unlock(&t->lock);
    if (went_back)
        moe_train__count(t->metrics.lost, lost);
}

void moe_train_note_problem(struct moe_train *t, const char *why)
{
    moe_mutex_lock(&t->lock);
    memset(t->problem, 0, sizeof t->problem);
    strncpy(t->problem, why, sizeof t->problem - 1);
    moe_mutex_unlock(&t->lock);
}

struct moe_status moe_train_adopt(struct moe_train *t, const struct moe_train_recovery *r,
                                  uint32_t slot, uint32_t slots, uint64_t live)
{
    struct moe_status st = moe_ok();
    moe_train__end_copying(t);
    if ((r->finishers >> slot & 1) != 0)
        st = finish(t, r);
    moe_mutex_lock(&t->lock);
    t->begun.id = 0;
    t->slot = slot;
    t->slots = slots;
    t->live = live;
    moe_job_on_view(&t->machine, slot, live);
    bool joins = (r->joiners >> slot & 1) != 0, loses = r->loss != MOE_TRAIN_LOSS_NONE;
    if (!r->restart && !joins)
        keep_state(t, r);
    moe_mutex_unlock(&t->lock);
    if (!moe_failed(&st))
        st = r->restart ? restart(t, r)
             : joins    ? join(t, r)
             : loses    ? lose_gradients(t, r)
                        : moe_ok();
    /* After a restart here, another slot may still fail: what the last attempt met stays known. */
    if (moe_failed(&st) || !r->restart)
        moe_train_note_problem(t, moe_failed(&st) ? st.text : "");
    moe_mutex_lock(&t->lock);
    /* A target that came after the exchange of digests is for the next time. */
    bool used = r->restart && strcmp(t->target, r->checkpoint) == 0;
    t->has_target = t->has_target && (moe_failed(&st) || !used);
    moe_mutex_unlock(&t->lock);
    if (moe_failed(&st))
        moe_log_error("training cannot go back to %s: %s. The group does not form; "
                      "\"moectl training recover\" says where else to go",
                      moe_train_recovery_name(r->checkpoint), st.text);
    moe_train__show(t);
    return st;
}

bool moe_train_covers(const struct moe_train *t, uint64_t slots)
{
    if (!t->config.backend->training->live_copies)
        return false;
    for (size_t i = 0; i < t->config.layer_count; i++) {
        struct moe_status st = moe_placement_check_live(&t->placements[i], slots);
        if (moe_failed(&st))
            return false;
    }
    return true;
}

struct moe_status moe_train_fence(struct moe_train *t, uint64_t group, uint64_t epoch)
{
    moe_mutex_lock(&t->lock);
    t->group = group;
    t->epoch = epoch;
    bool lowest = t->slot == (uint32_t)__builtin_ctzll(t->live);
    moe_mutex_unlock(&t->lock);
    if (!lowest || group == 0 || t->config.directory == NULL)
        return moe_ok();
    return moe_checkpoint_raise_fence(t->config.directory, group, epoch);
}
