/* SPDX-License-Identifier: Apache-2.0 */
/* What each part of a Save, Load or Export does on this slot, beside the engine; when it does it is
 * the job machine's to say (job_machine.h), and job.c gives it a thread. */
#include "training/parts.h"

#include <stdlib.h>
#include <string.h>

struct moe_checkpoint_context moe_train__context_of(struct moe_train *t)
{
    return (struct moe_checkpoint_context){
        .root = t->config.directory,
        .backend = t->config.backend,
        .model = t->config.model,
        .specs = t->config.specs,
        .placements = t->placements,
        .trainers = t->trainers,
        .layer_count = t->config.layer_count,
        .slot = t->slot,
        .slots = t->slots,
        .live = t->live,
        .config = &t->config.trainer,
        .writer = t->writer,
        .shown = &t->shown,
    };
}

/* ------------------------------------------------------------------------------ Save */

static struct moe_status save_create(struct work *w)
{
    w->state.save[0] = w->call->id;
    memcpy(&w->state.save[1], w->call->content.header_hash, sizeof w->call->content.header_hash);
    memcpy(&w->state.save[3], w->call->content.tensor_hash, sizeof w->call->content.tensor_hash);
    return moe_checkpoint_save_begin(&w->context, w->call->name, &w->state, &w->found);
}

/* Giving gigabytes back takes the time of many steps, which the engine's thread does not have. */
static void give_copy_back(struct work *w)
{
    w->context.copy = NULL;
    moe_checkpoint_copy_free(w->copy);
    w->copy = NULL;
}

static struct moe_status save_write(struct work *w)
{
    if (w->from_trainers) { /* no slot writes from a copy unless all have one */
        give_copy_back(w);
    } else {
        w->context.copy = w->copy;
        w->context.trainers = NULL;
    }
    struct moe_status st =
        moe_checkpoint_save_write(&w->context, w->call->name, &w->state, &w->bytes);
    give_copy_back(w);
    return st;
}

/* The checkpoint remembers its own Save, so that a repeat after a restart from it is one. */
struct moe_status moe_train__pack_records(struct work *w)
{
    struct moe_train *t = w->train;
    struct moe_ledger_outcome outcome = {0};
    struct moe_ledger *copy;
    if (w->context.slot != (uint32_t)__builtin_ctzll(w->context.live))
        return moe_ok();
    outcome.lineage = t->lineage;
    outcome.weights_version = t->weights_version;
    outcome.steps = t->steps;
    const struct moe_ledger_call entry = {.id = w->call->id,
                                          .content = w->call->content,
                                          .origin = (uint32_t)__builtin_ctzll(t->live),
                                          .outcome = outcome};
    MOE_TRY(moe_ledger_copy(t->ledger, &copy));
    moe_ledger_record(copy, "", &entry);
    w->state.record_bytes = moe_ledger_packed_size(copy);
    w->state.owned = malloc(w->state.record_bytes);
    if (w->state.owned != NULL)
        moe_ledger_pack(copy, w->state.owned);
    moe_ledger_destroy(copy);
    w->state.records = w->state.owned;
    return w->state.owned != NULL
               ? moe_ok()
               : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
}

void moe_train__note_checkpoint(struct moe_train *t, const char *name, uint64_t steps)
{
    moe_mutex_lock(&t->lock);
    uint64_t unsaved = t->steps - (steps < t->steps ? steps : t->steps); /* taken beside the Save */
    bool newer = unsaved <= t->unsaved; /* not a Save of before that was written and not recorded */
    if (newer) {
        memset(t->checkpoint, 0, sizeof t->checkpoint);
        strncpy(t->checkpoint, name, MOE_TRAINING_NAME_MAX);
        t->unsaved = unsaved;
    }
    moe_mutex_unlock(&t->lock);
}

struct moe_status moe_train__share_removed(struct work *w, struct moe_session *session,
                                           struct moe_checkpoint_removed *out)
{
    enum { NAMES = 3 };
    struct page {
        uint32_t count;
        char names[NAMES][MOE_CHECKPOINT_NAME_MAX + 1];
    };
    _Static_assert(sizeof(struct page) <= 256, "what a session exchanges");
    uint32_t first = 0, named = 0;
    *out = (struct moe_checkpoint_removed){0};
    if (w->call->keep == 0)
        return moe_ok();
    do {
        struct page mine = {.count = w->removed.count}, all[MOE_MAX_SLOTS] = {0};
        const struct page *lowest = &all[__builtin_ctzll(w->context.live)];
        for (uint32_t i = 0; i < NAMES && first + i < MOE_CHECKPOINT_REMOVED_MAX; i++)
            memcpy(mine.names[i], w->removed.names[first + i], sizeof mine.names[i]);
        MOE_TRY(w->train->config.backend->session_exchange(session, &mine, all, sizeof mine));
        out->count = lowest->count;
        named =
            lowest->count < MOE_CHECKPOINT_REMOVED_MAX ? lowest->count : MOE_CHECKPOINT_REMOVED_MAX;
        for (uint32_t i = 0; i < NAMES && first + i < named; i++) {
            memcpy(out->names[first + i], lowest->names[i], sizeof lowest->names[i]);
            out->names[first + i][MOE_CHECKPOINT_NAME_MAX] = '\0';
        }
        first += NAMES;
    } while (first < named);
    return moe_ok();
}

/* ------------------------------------------------------------------------------ Load */

static struct moe_status take_tensors(struct moe_train *t,
                                      const struct moe_checkpoint_context *context,
                                      const char *name, const struct moe_checkpoint_state *state)
{
    MOE_TRY(moe_checkpoint_load_take(context, name));
    uint32_t frozen = state->frozen | t->config.trainer.frozen;
    for (size_t i = 0; i < t->config.layer_count; i++) {
        MOE_TRY(t->config.backend->training->zero_grad(t->trainers[i]));
        MOE_TRY(t->config.backend->training->set_frozen(t->trainers[i], frozen));
    }
    moe_mutex_lock(&t->lock);
    struct moe_status st = moe_ledger_unpack(t->ledger, state->records, state->record_bytes);
    t->steps = state->steps;
    t->unsaved = 0;
    t->frozen = frozen;
    t->backwards = 0;
    moe_mutex_unlock(&t->lock);
    return st;
}

/* The view's context now: trainers may be others than when it was read. */
static struct moe_status load_take(struct work *w)
{
    w->context = moe_train__context_of(w->train);
    return take_tensors(w->train, &w->context, w->call->name, &w->state);
}

struct moe_status moe_train__load_checkpoint(struct moe_train *t)
{
    const struct moe_checkpoint_context context = moe_train__context_of(t);
    struct moe_checkpoint_state state = {0};
    struct moe_status st = t->config.directory != NULL
                               ? moe_checkpoint_load_read(&context, t->checkpoint, &state)
                               : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CHECKPOINT_NOT_FOUND,
                                           "checkpoint %s needs --training-dir", t->checkpoint);
    if (!moe_failed(&st))
        st = take_tensors(t, &context, t->checkpoint, &state);
    if (!moe_failed(&st)) {
        moe_mutex_lock(&t->lock);
        moe_checkpoint_explicit_loads_join(&t->explicit_loads, &state.explicit_loads);
        moe_mutex_unlock(&t->lock);
    }
    moe_checkpoint_state_free(&state);
    return st;
}

/* ----------------------------------------------------------------------------- parts */

static struct moe_status run_save(struct work *w, enum moe_job_part part)
{
    switch (part) {
    case MOE_JOB_COPY: return moe_checkpoint_copy_take(&w->context, &w->copy);
    case MOE_JOB_CREATE: return save_create(w);
    case MOE_JOB_WRITE: return save_write(w);
    case MOE_JOB_COMMIT: return moe_checkpoint_save_commit(&w->context, w->call->name, &w->state);
    case MOE_JOB_TIDY:
        moe_checkpoint_save_tidy(&w->context, w->call->name, w->call->keep, &w->removed);
        return moe_ok();
    case MOE_JOB_UNDO: moe_checkpoint_save_abandon(&w->context, w->call->name); return moe_ok();
    default: return moe_ok();
    }
}

static struct moe_status run_export(struct work *w, enum moe_job_part part)
{
    switch (part) {
    case MOE_JOB_CREATE: return moe_checkpoint_export_begin(&w->context, w->call->name);
    case MOE_JOB_WRITE: return moe_checkpoint_export_write(&w->context, w->call->name, &w->bytes);
    case MOE_JOB_COMMIT: return moe_checkpoint_export_commit(&w->context, w->call->name);
    case MOE_JOB_UNDO: moe_checkpoint_export_abandon(&w->context, w->call->name); return moe_ok();
    default: return moe_ok();
    }
}

struct moe_job_end moe_train__run_part(struct work *w, enum moe_job_part part)
{
    struct moe_job_end end = {.status = moe_ok()};
    w->bytes = 0;
    if (w->call->kind == MOE_STEP_LOAD)
        end.status = part == MOE_JOB_TAKE
                         ? load_take(w)
                         : moe_checkpoint_load_read(&w->context, w->call->name, &w->state);
    else
        end.status = w->call->kind == MOE_STEP_SAVE ? run_save(w, part) : run_export(w, part);
    end.bytes = w->bytes;
    end.found = w->found;
    end.weights_version = w->state.weights_version;
    end.steps = w->state.steps;
    return end;
}

/* The resident weights are the merged ones already: what is new is that adapters start from them.
 */
struct moe_status moe_train__merge(struct moe_train *t)
{
    moe_train__drop_trainers(t);
    MOE_TRY(moe_train__make_trainers(t));
    for (size_t i = 0; i < t->config.layer_count; i++)
        MOE_TRY(t->config.backend->training->set_frozen(t->trainers[i], t->frozen));
    moe_mutex_lock(&t->lock);
    t->steps = 0;
    moe_mutex_unlock(&t->lock);
    return moe_ok();
}
