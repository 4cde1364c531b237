/* SPDX-License-Identifier: Apache-2.0 */
/* Training on this slot from create to destroy, and its state as others read it; see
 * training/training.h. execution.c changes the state at tickets, agreement.c as a group forms. */
#include "training/state.h"

#include "base/random.h"

#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------------- lifetime */

static uint64_t hash_config(const struct moe_trainer_config *c)
{
    const uint64_t words[] = {(uint64_t)c->optimizer, c->frozen, c->lora_rank, c->lora_targets,
                              c->lora_seed};
    uint64_t hash[2] = {0, 0};
    moe_content_mix(hash, words, sizeof words);
    moe_content_mix(hash, &c->lora_alpha, sizeof c->lora_alpha);
    return hash[0] | 1; /* 0 is no training */
}

/* Weights that learn cannot be written back as they were quantised. */
static struct moe_status check_quantised(const struct moe_train_config *c)
{
    const uint32_t others = 1 << MOE_PARAMS_ROUTER | 1 << MOE_PARAMS_SHARED;
    const char *scheme = c->model != NULL ? moe_model_quantisation(c->model) : NULL;
    if (scheme == NULL || (c->trainer.lora_rank > 0 && (c->trainer.frozen & others) == others))
        return moe_ok();
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                     "%.80s has quantised experts (%s), which train adapters only: --training "
                     "needs --lora-rank and --freeze router,shared",
                     moe_model_name(c->model), scheme);
}

static struct moe_status check_common(const struct moe_train_config *c)
{
    for (size_t i = 0; i < c->layer_count; i++) {
        const char *uncommon = moe_layer_uncommon(c->specs[i]);
        if (uncommon != NULL)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                             "layer %u of %.80s has %s; such layers do not train: start "
                             "without --training",
                             c->specs[i]->layer, c->model != NULL ? moe_model_name(c->model) : "?",
                             uncommon);
    }
    return moe_ok();
}

static struct moe_status check_config(const struct moe_train_config *c)
{
    const struct moe_trainer_config *trainer = &c->trainer;
    if (c->backend->training == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "the %s backend cannot train", c->backend->name);
    if (trainer->lora_rank > 0 && trainer->lora_targets == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "adapters of rank %u need a matrix to adapt", trainer->lora_rank);
    MOE_TRY(check_common(c));
    MOE_TRY(check_quantised(c));
    uint32_t most = UINT32_MAX;
    for (size_t i = 0; i < c->layer_count; i++) {
        const struct moe_layer_spec *spec = c->specs[i];
        uint32_t side =
            (uint32_t)(spec->hidden < spec->intermediate ? spec->hidden : spec->intermediate);
        most = side < most ? side : most;
    }
    if (trainer->lora_rank > most)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "adapters of rank %u do not fit: --lora-rank must be %u at most with this "
                         "model",
                         trainer->lora_rank, most);
    return moe_ok();
}

static struct moe_status create_store(const struct moe_train_config *c, struct moe_pass_store **out)
{
    return moe_pass_store_create(c->backend, c->device, c->retained_bytes, c->retained_ns, out);
}

struct moe_status moe_train_create(const struct moe_train_config *config, struct moe_train **out)
{
    MOE_TRY(check_config(config));
    struct moe_train *t = calloc(1, sizeof *t);
    if (t == NULL)
        return moe_train__out_of_memory();
    moe_mutex_init(&t->lock);
    t->config = *config;
    t->shown = -1;
    t->config_hash = hash_config(&config->trainer);
    t->frozen = config->trainer.frozen;
    t->weights_version = 1;
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_random_id(&t->writer), fail);
    t->trainers = calloc(config->layer_count + 1, sizeof(struct moe_trainer *));
    MOE_TRY_GOTO(st, t->trainers != NULL ? moe_ok() : moe_train__out_of_memory(), fail);
    MOE_TRY_GOTO(st, moe_ledger_create(&t->ledger), fail);
    MOE_TRY_GOTO(st, create_store(config, &t->passes), fail);
    MOE_TRY_GOTO(st, create_store(config, &t->answers), fail);
    const struct moe_activations_config activations = {.backend = config->backend,
                                                       .device = config->device,
                                                       .specs = config->specs,
                                                       .trainers = t->trainers,
                                                       .layer_count = config->layer_count,
                                                       .keep_ns = config->retained_ns,
                                                       .limit = config->retained_device_bytes};
    MOE_TRY_GOTO(st, moe_activations_create(&activations, &t->activations), fail);
    if (config->metrics != NULL)
        MOE_TRY_GOTO(st, moe_train__add_metrics(config->metrics, &t->metrics), fail);
    if (config->metrics != NULL)
        MOE_TRY_GOTO(st, moe_metrics_add_collector(config->metrics, moe_train__collect, t), fail);
    moe_train__show(t);
    *out = t;
    return st;
fail:
    moe_train_destroy(t);
    return st;
}

void moe_train_destroy(struct moe_train *t)
{
    if (t == NULL)
        return;
    if (t->config.metrics != NULL)
        moe_metrics_remove_collector(t->config.metrics, moe_train__collect, t);
    moe_train__end_jobs(t);
    if (t->trainers != NULL)
        moe_train__drop_trainers(t);
    free(t->trainers);
    moe_activations_destroy(t->activations);
    moe_pass_store_destroy(t->passes);
    moe_pass_store_destroy(t->answers);
    moe_ledger_destroy(t->ledger);
    moe_mutex_destroy(&t->lock);
    free(t);
}

/* --------------------------------------------------------------- layers come and go */

struct moe_status moe_train_bytes(const struct moe_train *t, struct moe_layer *const *layers,
                                  uint64_t *bytes)
{
    *bytes = 0;
    for (size_t i = 0; i < t->config.layer_count; i++) {
        uint64_t more;
        MOE_TRY(t->config.backend->training->trainer_bytes(layers[i], &t->config.trainer, &more));
        if (more > UINT64_MAX - *bytes)
            return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                             "training state would be too large");
        *bytes += more;
    }
    return moe_ok();
}

struct moe_status moe_train_attach(struct moe_train *t, struct moe_layer *const *layers,
                                   const struct moe_placement *placements)
{
    uint64_t bytes;
    t->layers = layers;
    t->placements = placements;
    MOE_TRY(moe_train_bytes(t, layers, &bytes));
    MOE_TRY(moe_train__make_trainers(t));
    moe_activations_set_limit(t->activations, moe_activations_limit(t->activations));
    moe_mutex_lock(&t->lock);
    t->state_bytes = bytes;
    moe_mutex_unlock(&t->lock);
    moe_train__show(t);
    return moe_ok();
}

bool moe_train_attached(const struct moe_train *t)
{
    return t->trainers[0] != NULL;
}

/* The state is not that of the model as loaded. */
static bool is_touched(const struct moe_train *t) MOE_REQUIRES(t->lock)
{
    return t->weights_version != 1 || moe_ledger_count(t->ledger) != 0;
}

void moe_train_detach(struct moe_train *t)
{
    moe_train__end_copying(t);
    moe_train__drop_trainers(t);
    t->ahead = (struct moe_saved_training){0};
    moe_mutex_lock(&t->lock);
    t->inconsistent = t->inconsistent || is_touched(t);
    t->state_bytes = 0;
    moe_mutex_unlock(&t->lock);
}

/* ------------------------------------------------------------------------ any thread */

void moe_train_read_state(struct moe_train *t, struct moe_train_state *out)
{
    *out = (struct moe_train_state){0};
    moe_mutex_lock(&t->lock);
    out->lineage = t->apart ? 0 : t->lineage;
    out->weights_version = t->weights_version;
    out->steps = t->steps;
    out->unsaved = t->unsaved;
    out->last_step_id = moe_train__highest_id(t);
    out->state_bytes = t->state_bytes;
    out->backwards = t->backwards;
    out->lost_total = t->lost_total;
    out->frozen = t->frozen;
    memcpy(out->checkpoint, t->checkpoint, sizeof out->checkpoint);
    memcpy(out->problem, t->problem, sizeof out->problem);
    moe_train__read_job(t, out);
    moe_mutex_unlock(&t->lock);
    out->activation_bytes = moe_activations_bytes(t->activations);
    out->activation_bytes_limit = moe_activations_limit(t->activations);
    out->retained_bytes = moe_pass_store_bytes(t->passes);
    out->retained_bytes_limit = moe_pass_store_budget(t->passes);
}

uint32_t moe_train_read_lost(struct moe_train *t,
                             struct moe_train_micro_batch out[MOE_TRAIN_LOST_MAX])
{
    moe_mutex_lock(&t->lock);
    uint32_t count = t->lost_count;
    memcpy(out, t->lost, count * sizeof *out);
    moe_mutex_unlock(&t->lock);
    return count;
}

bool moe_train_set_joiner(struct moe_train *t, bool waits, uint64_t released_calls)
{
    moe_mutex_lock(&t->lock);
    bool changes = t->joiner != waits || t->released_calls != released_calls;
    t->joiner = waits;
    t->released_calls = released_calls;
    moe_mutex_unlock(&t->lock);
    return changes;
}

/* A checkpoint has the state, and a process may read it: changes wait. */
static bool holds_state(const struct moe_train *t) MOE_REQUIRES(t->lock)
{
    return t->joiner && moe_train__is_saved(t) && moe_ledger_count(t->ledger) != t->released_calls;
}

enum moe_hold moe_train_find_hold(struct moe_train *t)
{
    if (t == NULL)
        return MOE_HOLD_NOTHING;
    moe_mutex_lock(&t->lock);
    const struct moe_train_call *job = moe_train__job_call(t, 0);
    bool saves = job != NULL && job->kind == MOE_STEP_SAVE;
    bool holds = (t->joiner && saves) || holds_state(t);
    moe_mutex_unlock(&t->lock);
    return !holds ? MOE_HOLD_NOTHING : job != NULL ? MOE_HOLD_CHANGES : MOE_HOLD_TRAINING;
}

void moe_train_read_saved(struct moe_train *t, struct moe_saved_training *out)
{
    *out = (struct moe_saved_training){0};
    if (t == NULL)
        return;
    moe_mutex_lock(&t->lock);
    if (holds_state(t)) {
        memcpy(out->checkpoint, t->checkpoint, sizeof out->checkpoint);
        out->lineage = t->lineage;
        out->weights_version = t->weights_version;
        out->calls = moe_ledger_count(t->ledger);
        out->record = moe_ledger_hash(t->ledger);
    }
    moe_mutex_unlock(&t->lock);
}

const struct moe_train_config *moe_train_configured(const struct moe_train *t)
{
    return &t->config;
}

struct moe_pass_store *moe_train_passes(struct moe_train *t)
{
    return t->passes;
}

struct moe_pass_store *moe_train_answers(struct moe_train *t)
{
    return t->answers;
}

struct moe_activations *moe_train_activations(struct moe_train *t)
{
    return t->activations;
}
