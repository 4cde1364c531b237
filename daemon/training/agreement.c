/* SPDX-License-Identifier: Apache-2.0 */
/* How this slot takes the state with which a forming group continues; see training/recovery.h. */
#include "training/state.h"

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
    if (r->lineage != t->lineage) /* nothing is learnt yet, and a member is new */
        moe_train__begin_lineage(t, r->lineage, r->weights_version);
    if (t->unsaved == r->lost_steps && strcmp(t->checkpoint, r->checkpoint) == 0)
        return;
    take_checkpoint(t, r);
    t->unsaved = r->lost_steps;
}

/* The layers are as loaded, and so are the trainers. */
static struct moe_status restart(struct moe_train *t, const struct moe_train_recovery *r)
{
    moe_mutex_lock(&t->lock);
    moe_train__begin_lineage(t, r->lineage, r->weights_version);
    moe_ledger_reset(t->ledger);
    /* After a restart that failed, the next one reports the same steps. */
    t->lost_steps = r->lost_steps > t->lost_steps ? r->lost_steps : t->lost_steps;
    t->steps = t->unsaved = 0;
    t->frozen = t->config.trainer.frozen;
    take_checkpoint(t, r);
    t->inconsistent = true;
    moe_mutex_unlock(&t->lock);
    if (r->checkpoint[0] != '\0')
        MOE_TRY(moe_train__load_checkpoint(t));
    moe_mutex_lock(&t->lock);
    t->inconsistent = false;
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
    moe_train__end_copying(t);
    moe_mutex_lock(&t->lock);
    t->slot = slot;
    t->slots = slots;
    t->live = live;
    moe_job_on_view(&t->machine, slot, live);
    if (!r->restart)
        keep_state(t, r);
    moe_mutex_unlock(&t->lock);
    struct moe_status st = r->restart ? restart(t, r) : moe_ok();
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
