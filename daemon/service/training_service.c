/* SPDX-License-Identifier: Apache-2.0 */
/* GetTrainState and RecoverTraining, and the parts of the service; see
 * service/training_service.h. */
#include "service/training_service_state.h"

#include "checkpoint/checkpoint.h"

#include <stdlib.h>

#define invalid(reason, ...) moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_##reason, __VA_ARGS__)

/* ------------------------------------------------------------------------- answers */

/* ---------------------------------------------------------------------- GetTrainState */

size_t moe_training_service__name_targets(uint32_t targets, char *names[MOE_TRAINING_TARGETS])
{
    static char gate[] = "gate", up[] = "up", down[] = "down";
    char *const all[MOE_TRAINING_TARGETS] = {gate, up, down};
    size_t count = 0;
    for (unsigned i = 0; i < MOE_TRAINING_TARGETS; i++)
        if ((targets >> i & 1) != 0)
            names[count++] = all[i];
    return count;
}

/* Backward calls to send again, as messages. */
struct lost {
    struct moe_train_micro_batch list[MOE_TRAIN_LOST_MAX];
    Moe__V1__MicroBatch messages[MOE_TRAIN_LOST_MAX];
    Moe__V1__MicroBatch *pointers[MOE_TRAIN_LOST_MAX];
};

static struct moe_status add_lost(struct moe_train *t, Moe__V1__GetTrainStateResponse *a,
                                  struct lost **out)
{
    struct lost *l = *out = malloc(sizeof *l);
    if (l == NULL)
        return moe_service_out_of_memory();
    a->n_lost_micro_batches = moe_train_read_lost(t, l->list);
    a->lost_micro_batches = l->pointers;
    for (size_t i = 0; i < a->n_lost_micro_batches; i++) {
        moe__v1__micro_batch__init(&l->messages[i]);
        l->messages[i].session = l->list[i].session;
        l->messages[i].micro_batch_id = l->list[i].id;
        l->pointers[i] = &l->messages[i];
    }
    return moe_ok();
}

static void state_message(struct moe_rpc_call *rpc, struct moe_rpc_msg *m, void *ctx)
{
    static char none[] = "";
    char *targets[MOE_TRAINING_TARGETS];
    struct moe_training_service *s = ctx;
    const struct moe_trainer_config *c = &moe_train_configured(s->config.training)->trainer;
    struct moe_train_state state;
    Moe__V1__GetTrainStateResponse a;
    moe_rpc_msg_free(m);
    moe_train_read_state(s->config.training, &state);
    moe__v1__get_train_state_response__init(&a);
    a.lineage = state.lineage;
    a.weights_version = state.weights_version;
    a.steps = state.steps;
    a.unsaved_steps = state.unsaved;
    a.backwards = state.backwards;
    a.last_step_id = state.last_step_id;
    a.optimizer = (Moe__V1__Optimizer)c->optimizer;
    a.router_frozen = (state.frozen >> MOE_PARAMS_ROUTER & 1) != 0;
    a.experts_frozen = (state.frozen >> MOE_PARAMS_EXPERTS & 1) != 0;
    a.shared_frozen = (state.frozen >> MOE_PARAMS_SHARED & 1) != 0;
    a.lora_rank = c->lora_rank;
    a.lora_alpha = c->lora_rank != 0 ? (double)c->lora_alpha : 0;
    a.lora_scale = c->lora_rank != 0 ? (double)c->lora_alpha / c->lora_rank : 0;
    a.lora_targets = targets;
    if (c->lora_rank != 0)
        a.n_lora_targets = moe_training_service__name_targets(c->lora_targets, targets);
    a.checkpoint = state.checkpoint;
    a.state_bytes = state.state_bytes;
    a.saving = state.job == MOE_STEP_SAVE ? state.job_name : none;
    a.loading = state.job == MOE_STEP_LOAD ? state.job_name : none;
    a.progress_bytes = state.job_bytes;
    a.progress_bytes_total = state.job_bytes_total;
    a.problem = state.problem;
    a.retained_bytes = state.retained_bytes;
    a.retained_bytes_limit = state.retained_bytes_limit;
    a.retained_device_bytes = state.activation_bytes;
    a.retained_device_bytes_limit = state.activation_bytes_limit;
    a.lost_backwards = state.lost_total;
    struct lost *lost = NULL;
    struct moe_status st =
        state.lost_total > 0 ? add_lost(s->config.training, &a, &lost) : moe_ok();
    if (moe_failed(&st))
        moe_rpc_fail(rpc, st);
    else
        moe_service_reply(rpc, &a.base);
    free(lost);
}

/* --------------------------------------------------------------------- RecoverTraining */

static struct moe_status check_recovery(const struct moe_training_service *s,
                                        const Moe__V1__RecoverTrainingRequest *q)
{
    struct moe_standing worker;
    if (q->as_loaded && q->name[0] != '\0')
        return invalid(VALUE_INVALID, "either a name or the model as loaded");
    if (!q->as_loaded && !moe_training_name_ok(q->name))
        return invalid(NAME_INVALID, "not the name of a checkpoint");
    if (!q->as_loaded && moe_train_configured(s->config.training)->directory == NULL)
        return invalid(UNSUPPORTED, "the workers were started without --training-dir");
    moe_service_read(s->config.service, &worker);
    if (worker.epoch == 0 && !q->as_loaded) /* whether it loads is found as the group forms */
        return moe_checkpoint_check_there(moe_train_configured(s->config.training)->directory,
                                          q->name);
    return worker.epoch == 0
               ? moe_ok()
               : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                           "the group serves: use LoadCheckpoint (`moectl training load NAME`)");
}

static struct moe_status recover(const struct moe_training_service *s, struct moe_rpc_msg *m)
{
    struct moe_rpc_arena arena;
    void *message;
    MOE_TRY(
        moe_rpc_msg_unpack(m, &moe__v1__recover_training_request__descriptor, &arena, &message));
    const Moe__V1__RecoverTrainingRequest *q = message;
    MOE_TRY(check_recovery(s, q));
    moe_train_set_recovery_target(s->config.training, q->as_loaded ? "" : q->name);
    s->config.on_recovery_choice(s->config.ctx);
    return moe_ok();
}

static void recover_message(struct moe_rpc_call *rpc, struct moe_rpc_msg *m, void *ctx)
{
    Moe__V1__RecoverTrainingResponse a;
    struct moe_status st = recover(ctx, m);
    moe_rpc_msg_free(m);
    moe__v1__recover_training_response__init(&a);
    if (moe_failed(&st))
        moe_rpc_fail(rpc, st);
    else
        moe_service_reply(rpc, &a.base);
}

/* ------------------------------------------------------------------------ the service */

void moe_training_service_methods(struct moe_training_service *s,
                                  struct moe_rpc_method out[MOE_TRAINING_SERVICE_METHODS])
{
    moe_training_service__calls(s, out);
    out[MOE_TRAINING_CALLS] =
        (struct moe_rpc_method){.path = "/moe.v1.TrainingService/GetTrainState",
                                .kind = MOE_RPC_UNARY,
                                .message = state_message,
                                .ctx = s};
    out[MOE_TRAINING_CALLS + 1] =
        (struct moe_rpc_method){.path = "/moe.v1.TrainingService/RecoverTraining",
                                .kind = MOE_RPC_UNARY,
                                .message = recover_message,
                                .ctx = s};
    out[MOE_TRAINING_CALLS + 2] = moe_training_service__listing(s);
}

struct moe_status moe_training_service_create(const struct moe_training_service_config *config,
                                              struct moe_training_service **out)
{
    struct moe_training_service *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_service_out_of_memory();
    s->config = *config;
    moe_mutex_init(&s->lock);
    pthread_cond_init(&s->idle, NULL);
    *out = s;
    return moe_ok();
}

void moe_training_service_destroy(struct moe_training_service *s)
{
    if (s == NULL)
        return;
    moe_training_service__end_listings(s);
    pthread_cond_destroy(&s->idle);
    moe_mutex_destroy(&s->lock);
    free(s);
}
