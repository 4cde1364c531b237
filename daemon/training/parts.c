/* SPDX-License-Identifier: Apache-2.0 */
/* What each part of a Save, Load or Export does on this slot. The job machine decides when
 * (job_machine.h), and job.c gives the part a thread. */
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
        .fence = {t->group, t->epoch, t->config.lease},
        .writer = t->writer,
        .shown = &t->shown,
        .moved = &t->moved,
    };
}

/* ------------------------------------------------------------------------------ Save */

static struct moe_status save_create(struct moe_train_job *j)
{
    j->state.save[0] = j->call.id;
    memcpy(&j->state.save[1], &j->call.content, sizeof j->call.content);
    return moe_checkpoint_save_begin(&j->context, j->call.name, &j->state, &j->found);
}

/* To free gigabytes takes the time of many steps: too long for the engine's thread. */
static void free_copy(struct moe_train_job *j)
{
    j->context.copy = NULL;
    moe_checkpoint_copy_free(j->copy);
    j->copy = NULL;
}

static struct moe_status save_write(struct moe_train_job *j, uint64_t *bytes)
{
    if (j->from_trainers) { /* no slot writes from a copy unless all have one */
        free_copy(j);
    } else {
        j->context.copy = j->copy;
        j->context.trainers = NULL;
    }
    struct moe_status st = moe_checkpoint_save_write(&j->context, j->call.name, &j->state, bytes);
    free_copy(j);
    return st;
}

/* The checkpoint has its own Save on record: a repeat after a restart from it is a repeat. */
struct moe_status moe_train__pack_records(struct moe_train_job *j)
{
    uint32_t lowest = (uint32_t)__builtin_ctzll(j->context.live);
    const struct moe_ledger_call entry = {.id = j->call.id,
                                          .content = j->call.content,
                                          .origin = lowest,
                                          .outcome = {.lineage = j->state.lineage,
                                                      .weights_version = j->state.weights_version,
                                                      .steps = j->state.steps}};
    struct moe_ledger *copy;
    if (j->context.slot != lowest)
        return moe_ok();
    MOE_TRY(moe_ledger_copy(j->train->ledger, &copy));
    moe_ledger_record(copy, "", &entry);
    j->state.record_bytes = moe_ledger_packed_size(copy);
    j->state.records = j->state.owned = malloc(j->state.record_bytes);
    if (j->state.owned != NULL)
        moe_ledger_pack(copy, j->state.owned);
    moe_ledger_destroy(copy);
    return j->state.owned != NULL ? moe_ok() : moe_train__out_of_memory();
}

void moe_train__note_checkpoint(struct moe_train *t, const char *name, uint64_t steps)
{
    moe_mutex_lock(&t->lock);
    uint64_t unsaved = t->steps - (steps < t->steps ? steps : t->steps); /* taken while it ran */
    bool newer = unsaved <= t->unsaved; /* false for an earlier Save, not recorded then */
    if (newer) {
        moe_train__set_checkpoint(t, name);
        t->saved_calls = 0; /* it has one call more: its own */
        t->unsaved = unsaved;
    }
    moe_mutex_unlock(&t->lock);
}

struct moe_status moe_train__share_removed(struct moe_train_job *j, struct moe_session *session,
                                           struct moe_checkpoint_removed *out)
{
    enum { NAMES = 3 };
    struct page {
        uint32_t count;
        char names[NAMES][MOE_CHECKPOINT_NAME_MAX + 1];
    };
    _Static_assert(sizeof(struct page) <= 256, "more than a session exchanges");
    uint32_t first = 0, named = 0;
    *out = (struct moe_checkpoint_removed){0};
    if (j->call.keep == 0)
        return moe_ok();
    do {
        struct page mine = {.count = j->removed.count}, all[MOE_MAX_SLOTS] = {0};
        const struct page *lowest = &all[__builtin_ctzll(j->context.live)];
        for (uint32_t i = 0; i < NAMES && first + i < MOE_CHECKPOINT_REMOVED_MAX; i++)
            memcpy(mine.names[i], j->removed.names[first + i], sizeof mine.names[i]);
        MOE_TRY(j->train->config.backend->session_exchange(session, &mine, all, sizeof mine));
        out->count = lowest->count;
        named =
            lowest->count < MOE_CHECKPOINT_REMOVED_MAX ? lowest->count : MOE_CHECKPOINT_REMOVED_MAX;
        for (uint32_t i = 0; i < NAMES && first + i < named; i++)
            memcpy(out->names[first + i], lowest->names[i], MOE_CHECKPOINT_NAME_MAX);
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
    MOE_TRY(moe_train__set_frozen(t, frozen));
    moe_mutex_lock(&t->lock);
    struct moe_status st = moe_ledger_unpack(t->ledger, state->records, state->record_bytes);
    t->steps = state->steps;
    t->unsaved = 0;
    t->frozen = frozen;
    t->backwards = 0;
    moe_mutex_unlock(&t->lock);
    return st;
}

/* In the view's present context: trainers may have changed since it was read. */
static struct moe_status load_take(struct moe_train_job *j)
{
    j->context = moe_train__context_of(j->train);
    return take_tensors(j->train, &j->context, j->call.name, &j->state);
}

struct moe_status moe_train__load_checkpoint(struct moe_train *t, const char *name,
                                             uint64_t readers, const atomic_bool *cancel)
{
    struct moe_checkpoint_context context = moe_train__context_of(t);
    struct moe_checkpoint_state state = {0};
    context.live = readers;
    context.cancel = cancel;
    struct moe_status st = t->config.directory != NULL
                               ? moe_checkpoint_load_read(&context, name, &state)
                               : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CHECKPOINT_NOT_FOUND,
                                           "checkpoint %s needs --training-dir", name);
    if (!moe_failed(&st))
        st = take_tensors(t, &context, name, &state);
    if (!moe_failed(&st)) {
        moe_mutex_lock(&t->lock);
        moe_checkpoint_explicit_loads_join(&t->explicit_loads, &state.explicit_loads);
        moe_mutex_unlock(&t->lock);
    }
    moe_checkpoint_state_free(&state);
    return st;
}

/* ----------------------------------------------------------------------------- parts */

static struct moe_status run_save(struct moe_train_job *j, enum moe_job_part part, uint64_t *bytes)
{
    const struct moe_checkpoint_context *c = &j->context;
    const char *name = j->call.name;
    switch (part) {
    case MOE_JOB_COPY: return moe_checkpoint_copy_take(c, &j->copy);
    case MOE_JOB_CREATE: return save_create(j);
    case MOE_JOB_WRITE: return save_write(j, bytes);
    case MOE_JOB_COMMIT: return moe_checkpoint_save_commit(c, name, &j->state);
    case MOE_JOB_TIDY: moe_checkpoint_save_tidy(c, name, j->call.keep, &j->removed); break;
    case MOE_JOB_UNDO: moe_checkpoint_abandon(c, name); break;
    default: break;
    }
    return moe_ok();
}

static struct moe_status run_export(struct moe_train_job *j, enum moe_job_part part,
                                    uint64_t *bytes)
{
    const struct moe_checkpoint_context *c = &j->context;
    const char *name = j->call.name;
    switch (part) {
    case MOE_JOB_CREATE: return moe_checkpoint_export_begin(c, name);
    case MOE_JOB_WRITE: return moe_checkpoint_export_write(c, name, bytes);
    case MOE_JOB_COMMIT: return moe_checkpoint_export_commit(c, name);
    case MOE_JOB_UNDO: moe_checkpoint_abandon(c, name); break;
    default: break;
    }
    return moe_ok();
}

struct moe_job_end moe_train__run_part(struct moe_train_job *j, enum moe_job_part part)
{
    struct moe_job_end end = {0};
    if (j->call.kind == MOE_STEP_SAVE)
        end.status = run_save(j, part, &end.bytes);
    else if (j->call.kind == MOE_STEP_EXPORT)
        end.status = run_export(j, part, &end.bytes);
    else if (part == MOE_JOB_TAKE)
        end.status = load_take(j);
    else
        end.status = moe_checkpoint_load_read(&j->context, j->call.name, &j->state);
    end.found = j->found;
    end.weights_version = j->state.weights_version;
    end.steps = j->state.steps;
    return end;
}
