/* SPDX-License-Identifier: Apache-2.0 */
/* Elementary changes of the state of training; see training/state.h. */
#include "training/state.h"

#include <string.h>

struct moe_status moe_train__out_of_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
}

void moe_train__drop_trainers(struct moe_train *t)
{
    for (size_t i = 0; i < t->config.layer_count; i++) {
        t->config.backend->training->trainer_destroy(t->trainers[i]);
        t->trainers[i] = NULL;
    }
}

struct moe_status moe_train__make_trainers(struct moe_train *t)
{
    const struct moe_training *backend = t->config.backend->training;
    for (size_t i = 0; i < t->config.layer_count; i++) {
        struct moe_status st =
            backend->trainer_create(t->layers[i], &t->config.trainer, &t->trainers[i]);
        if (moe_failed(&st)) {
            t->trainers[i] = NULL;
            moe_train__drop_trainers(t);
            return moe_error_context(st, "training state of layer %u", t->config.specs[i]->layer);
        }
    }
    return moe_ok();
}

struct moe_trainer *moe_train__find_trainer(const struct moe_train *t, uint32_t layer)
{
    for (size_t i = 0; i < t->config.layer_count; i++)
        if (t->config.specs[i]->layer == layer)
            return t->trainers[i];
    return NULL;
}

struct moe_status moe_train__zero_grad(struct moe_train *t)
{
    for (size_t i = 0; i < t->config.layer_count; i++)
        MOE_TRY(t->config.backend->training->zero_grad(t->trainers[i]));
    return moe_ok();
}

struct moe_status moe_train__set_frozen(struct moe_train *t, uint32_t frozen)
{
    for (size_t i = 0; i < t->config.layer_count; i++)
        MOE_TRY(t->config.backend->training->set_frozen(t->trainers[i], frozen));
    return moe_ok();
}

struct moe_status moe_train__run_zero_grad(struct moe_train *t)
{
    MOE_TRY(moe_train__zero_grad(t));
    moe_mutex_lock(&t->lock);
    moe_train__drop_gradients(t);
    moe_mutex_unlock(&t->lock);
    return moe_ok();
}

struct moe_status moe_train__run_set_frozen(struct moe_train *t, uint32_t frozen)
{
    MOE_TRY(moe_train__set_frozen(t, frozen));
    moe_mutex_lock(&t->lock);
    t->frozen = frozen;
    moe_mutex_unlock(&t->lock);
    return moe_ok();
}

void moe_train__begin_lineage(struct moe_train *t, uint64_t lineage, uint64_t version)
{
    t->lineage = lineage;
    t->weights_version = version;
    moe_train__forget_lost(t);
    moe_train__drop_gradients(t);
    t->saved_calls = 0;
    moe_pass_store_clear(t->passes);
    moe_pass_store_clear(t->answers);
}

void moe_train__count_step(struct moe_train *t, bool nonfinite)
{
    moe_train__drop_gradients(t);
    t->steps += !nonfinite;
    t->unsaved += !nonfinite;
    t->weights_version += !nonfinite;
}

void moe_train__set_checkpoint(struct moe_train *t, const char *name)
{
    memset(t->checkpoint, 0, sizeof t->checkpoint);
    strncpy(t->checkpoint, name, MOE_TRAINING_NAME_MAX);
}

void moe_train__record(struct moe_train *t, const struct moe_train_call *call, uint64_t origin,
                       struct moe_ledger_outcome *outcome)
{
    if (outcome->lineage == 0) { /* a Save names the state that it copied */
        outcome->lineage = t->lineage;
        outcome->weights_version = t->weights_version;
        outcome->steps = t->steps;
    }
    if (call->kind == MOE_STEP_BACKWARD)
        outcome->backwards = !call->input_only;
    const struct moe_ledger_call entry = {
        .id = call->id, .content = call->content, .origin = origin, .outcome = *outcome};
    if (call->kind == MOE_STEP_BACKWARD) {
        moe_train__record_backward(t, call->session, &entry);
        return;
    }
    moe_train__record_change(t, &entry, moe_train__missed(call));
}
