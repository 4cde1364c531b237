/* SPDX-License-Identifier: Apache-2.0 */
/* OptimizerStep, ZeroGrad, SetFrozen, SaveCheckpoint, LoadCheckpoint and ExportAdapter: the checks
 * of their messages, and their answers. training_calls.c does the rest. */
#include "service/training_service_state.h"

#include "service/request_checks.h"
#include "training/requests.h"

/* ------------------------------------------------------------------------- answers */

static void reply_step(struct moe_rpc_call *rpc, const struct moe_train_answer *answer)
{
    const struct moe_ledger_outcome *o = &answer->outcome;
    Moe__V1__OptimizerStepResponse a;
    moe__v1__optimizer_step_response__init(&a);
    a.weights_version = o->weights_version;
    a.lineage = o->lineage;
    a.repeated = answer->repeated;
    a.skipped_nonfinite = o->nonfinite != 0;
    a.grad_norm = o->number;
    a.backwards = (uint32_t)o->backwards;
    a.steps = o->steps;
    moe_service_reply(rpc, &a.base);
}

static void reply_zero_grad(struct moe_rpc_call *rpc, const struct moe_train_answer *answer)
{
    Moe__V1__ZeroGradResponse a;
    moe__v1__zero_grad_response__init(&a);
    a.backwards = (uint32_t)answer->outcome.backwards;
    a.repeated = answer->repeated;
    moe_service_reply(rpc, &a.base);
}

static void reply_set_frozen(struct moe_rpc_call *rpc, const struct moe_train_answer *answer)
{
    Moe__V1__SetFrozenResponse a;
    moe__v1__set_frozen_response__init(&a);
    a.repeated = answer->repeated;
    moe_service_reply(rpc, &a.base);
}

static void reply_save(struct moe_rpc_call *rpc, const struct moe_train_answer *answer)
{
    Moe__V1__SaveCheckpointResponse a;
    moe__v1__save_checkpoint_response__init(&a);
    a.weights_version = answer->outcome.weights_version;
    a.lineage = answer->outcome.lineage;
    a.steps = answer->outcome.steps;
    a.bytes = answer->outcome.bytes;
    a.repeated = answer->repeated;
    const struct moe_checkpoint_removed *removed = &answer->removed;
    char *names[MOE_CHECKPOINT_REMOVED_MAX];
    a.removed = names;
    a.removed_count = removed->count;
    while (a.n_removed < removed->count && a.n_removed < MOE_CHECKPOINT_REMOVED_MAX) {
        names[a.n_removed] = (char *)(uintptr_t)removed->names[a.n_removed]; /* packing reads */
        a.n_removed++;
    }
    moe_service_reply(rpc, &a.base);
}

static void reply_load(struct moe_rpc_call *rpc, const struct moe_train_answer *answer)
{
    Moe__V1__LoadCheckpointResponse a;
    moe__v1__load_checkpoint_response__init(&a);
    a.weights_version = answer->outcome.weights_version;
    a.lineage = answer->outcome.lineage;
    a.steps = answer->outcome.steps;
    a.lost_steps = answer->outcome.lost_steps;
    a.lost_backwards = (uint32_t)answer->outcome.backwards;
    a.repeated = answer->repeated;
    moe_service_reply(rpc, &a.base);
}

static void reply_export(struct moe_rpc_call *rpc, const struct moe_train_answer *answer)
{
    Moe__V1__ExportAdapterResponse a;
    moe__v1__export_adapter_response__init(&a);
    a.bytes = answer->outcome.bytes;
    a.repeated = answer->repeated;
    moe_service_reply(rpc, &a.base);
}

void moe_training_service__reply_mutation(struct moe_rpc_call *rpc, enum moe_step_kind kind,
                                          const struct moe_train_answer *answer)
{
    static void (*const replies[MOE_STEP_KINDS])(struct moe_rpc_call *,
                                                 const struct moe_train_answer *) = {
        [MOE_STEP_OPTIMIZER] = reply_step,
        [MOE_STEP_ZERO_GRAD] = reply_zero_grad,
        [MOE_STEP_SET_FROZEN] = reply_set_frozen,
        [MOE_STEP_SAVE] = reply_save,
        [MOE_STEP_LOAD] = reply_load,
        [MOE_STEP_EXPORT] = reply_export,
    };
    replies[kind](rpc, answer);
}

/* -------------------------------------------------------------------------- checks */

/* Trainers wait for the group as long as it takes. An operator who saves or loads gets the reason
 * why the group does not serve. */
static struct moe_status check_service(const struct moe_training_service *s,
                                       enum moe_step_kind kind)
{
    struct moe_train_state state;
    struct moe_standing worker;
    moe_service_read(s->config.service, &worker);
    moe_train_read_state(s->config.training, &state);
    if (moe_step_traits(kind)->is_job && !worker.draining && worker.epoch == 0 &&
        state.problem[0] != '\0')
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CANNOT_GO_BACK,
                         "the group does not serve: %.150s (`moectl training recover NAME`)",
                         state.problem);
    return moe_request_check_worker(&worker);
}

struct moe_status moe_training_service__read_mutation(const struct moe_training_service *s,
                                                      enum moe_step_kind kind,
                                                      struct moe_rpc_msg *m,
                                                      struct moe_train_call *out)
{
    struct moe_rpc_arena arena;
    void *message;
    MOE_TRY(moe_rpc_msg_unpack(m, moe_train_request_type(kind), &arena, &message));
    MOE_TRY(moe_train_read_request(kind, message, out));
    MOE_TRY(moe_train_check_request(moe_train_configured(s->config.training), kind, message));
    return check_service(s, kind);
}
