/* SPDX-License-Identifier: Apache-2.0 */
/* From which state a forming group goes on: the digest of each slot, what all of them choose, and
 * how this one gets there; see training/training.h. */
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
    out->lineage = t->lineage;
    out->weights_version = t->weights_version;
    out->calls = moe_ledger_count(t->ledger);
    out->record = moe_ledger_hash(t->ledger);
    out->nonce = t->writer;
    out->inconsistent = t->inconsistent;
    out->unsaved = t->unsaved;
    memcpy(out->checkpoint, t->checkpoint, sizeof t->checkpoint);
    out->explicit_load = moe_checkpoint_explicit_loads_has(&t->explicit_loads, t->checkpoint);
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

void moe_train__begin_lineage(struct moe_train *t, uint64_t lineage, uint64_t version)
{
    t->lineage = lineage;
    t->weights_version = version;
    t->backwards = 0;
    moe_pass_store_clear(t->passes);
    moe_pass_store_clear(t->answers);
}

/* The group goes on with the state that it has. A view can end when some slots have
 * taken note of a checkpoint and others have not: from here on all know the latest. */
static void take_note(struct moe_train *t, const struct moe_train_recovery *d) MOE_REQUIRES(t->lock)
{
    if (t->unsaved == d->lost_steps && strcmp(t->checkpoint, d->checkpoint) == 0)
        return;
    memset(t->checkpoint, 0, sizeof t->checkpoint);
    memcpy(t->checkpoint, d->checkpoint, MOE_TRAINING_NAME_MAX);
    t->unsaved = d->lost_steps;
    if (d->explicit_load && d->checkpoint[0] != '\0')
        moe_checkpoint_explicit_loads_add(&t->explicit_loads, d->checkpoint);
}

/* The layers are as loaded, and so are the trainers. */
static struct moe_status restart(struct moe_train *t, const struct moe_train_recovery *d)
{
    moe_mutex_lock(&t->lock);
    moe_train__begin_lineage(t, d->lineage, d->weights_version);
    moe_ledger_reset(t->ledger);
    /* Where it could not go there, the next try has to tell of the same steps. */
    t->lost_steps = d->lost_steps > t->lost_steps ? d->lost_steps : t->lost_steps;
    t->steps = t->unsaved = 0;
    t->frozen = t->config.trainer.frozen;
    memset(t->checkpoint, 0, sizeof t->checkpoint);
    memcpy(t->checkpoint, d->checkpoint, MOE_TRAINING_NAME_MAX);
    if (d->explicit_load && d->checkpoint[0] != '\0')
        moe_checkpoint_explicit_loads_add(&t->explicit_loads, d->checkpoint);
    t->inconsistent = true;
    moe_mutex_unlock(&t->lock);
    if (d->checkpoint[0] != '\0')
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
    if (went_back && t->metrics.lost != NULL)
        moe_counter_add(t->metrics.lost, lost);
}

void moe_train_note_problem(struct moe_train *t, const char *why)
{
    moe_mutex_lock(&t->lock);
    memset(t->problem, 0, sizeof t->problem);
    strncpy(t->problem, why, sizeof t->problem - 1);
    moe_mutex_unlock(&t->lock);
}

struct moe_status moe_train_adopt(struct moe_train *t, const struct moe_train_recovery *d,
                                  uint32_t slot, uint32_t slots, uint64_t live)
{
    moe_train__end_copying(t);
    moe_mutex_lock(&t->lock);
    t->slot = slot;
    t->slots = slots;
    t->live = live;
    moe_job_on_view(&t->machine, slot, live);
    /* A group that has learnt nothing yet, and one of whose members is new. */
    if (!d->restart && d->lineage != t->lineage)
        moe_train__begin_lineage(t, d->lineage, d->weights_version);
    if (!d->restart)
        take_note(t, d);
    moe_mutex_unlock(&t->lock);
    struct moe_status st = d->restart ? restart(t, d) : moe_ok();
    moe_train_note_problem(t, moe_failed(&st) ? st.text : "");
    moe_mutex_lock(&t->lock);
    /* A choice that came after the digests were exchanged is for the next time. */
    bool used = d->restart && strcmp(t->target, d->checkpoint) == 0;
    t->has_target = t->has_target && (moe_failed(&st) || !used);
    moe_mutex_unlock(&t->lock);
    if (moe_failed(&st))
        moe_log_error("training cannot go back to %s: %s. The group does not form; "
                      "\"moectl training recover\" says where else to go",
                      moe_train_recovery_name(d->checkpoint), st.text);
    moe_train__show(t);
    return st;
}
