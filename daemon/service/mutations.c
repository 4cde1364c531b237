/* SPDX-License-Identifier: Apache-2.0 */
/* OptimizerStep, ZeroGrad, SetFrozen, SaveCheckpoint, LoadCheckpoint and ExportAdapter: calls
 * without tensors, each with an id. Lives and threads are as in training_service.c. */
#include "service/training_service_state.h"

#include "base/clock.h"
#include "service/request_checks.h"
#include "training/requests.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

struct mutation;

/* A method that changes something. */
struct mutation_row {
    const char *name;
    enum moe_service_rpc rpc;
    enum moe_step_kind kind;
    void (*reply)(const struct mutation *c);
};

/* A call without tensors. */
struct mutation {
    struct moe_train_work work;
    struct moe_train_call call;
    struct moe_train_answer answer;
    struct moe_training_service *service;
    struct moe_rpc_call *rpc; /* held while the engine has it */
    const struct mutation_row *row;
    uint64_t received_ns;
    _Atomic uint32_t references; /* the engine; the call */
};

static void drop_mutation(struct mutation *c)
{
    if (atomic_fetch_sub(&c->references, 1) == 1)
        free(c);
}

static void reply_step(const struct mutation *c)
{
    const struct moe_ledger_outcome *o = &c->answer.outcome;
    Moe__V1__OptimizerStepResponse a;
    moe__v1__optimizer_step_response__init(&a);
    a.weights_version = o->weights_version;
    a.lineage = o->lineage;
    a.repeated = c->answer.repeated;
    a.skipped_nonfinite = o->nonfinite;
    a.grad_norm = o->number;
    a.backwards = o->backwards;
    a.steps = o->steps;
    moe_training_service__reply(c->rpc, &a.base);
}

static void reply_zero_grad(const struct mutation *c)
{
    Moe__V1__ZeroGradResponse a;
    moe__v1__zero_grad_response__init(&a);
    a.backwards = c->answer.outcome.backwards;
    a.repeated = c->answer.repeated;
    moe_training_service__reply(c->rpc, &a.base);
}

static void reply_set_frozen(const struct mutation *c)
{
    Moe__V1__SetFrozenResponse a;
    moe__v1__set_frozen_response__init(&a);
    a.repeated = c->answer.repeated;
    moe_training_service__reply(c->rpc, &a.base);
}

static void reply_save(const struct mutation *c)
{
    Moe__V1__SaveCheckpointResponse a;
    moe__v1__save_checkpoint_response__init(&a);
    a.weights_version = c->answer.outcome.weights_version;
    a.lineage = c->answer.outcome.lineage;
    a.steps = c->answer.outcome.steps;
    a.bytes = c->answer.outcome.bytes;
    a.repeated = c->answer.repeated;
    const struct moe_checkpoint_removed *removed = &c->answer.removed;
    char *names[MOE_CHECKPOINT_REMOVED_MAX];
    a.removed = names;
    a.removed_count = removed->count;
    while (a.n_removed < removed->count && a.n_removed < MOE_CHECKPOINT_REMOVED_MAX) {
        names[a.n_removed] = (char *)(uintptr_t)removed->names[a.n_removed]; /* packing reads */
        a.n_removed++;
    }
    moe_training_service__reply(c->rpc, &a.base);
}

static void reply_load(const struct mutation *c)
{
    Moe__V1__LoadCheckpointResponse a;
    moe__v1__load_checkpoint_response__init(&a);
    a.weights_version = c->answer.outcome.weights_version;
    a.lineage = c->answer.outcome.lineage;
    a.steps = c->answer.outcome.steps;
    a.lost_steps = c->answer.outcome.lost_steps;
    a.lost_backwards = c->answer.outcome.backwards;
    a.repeated = c->answer.repeated;
    moe_training_service__reply(c->rpc, &a.base);
}

static void reply_export(const struct mutation *c)
{
    Moe__V1__ExportAdapterResponse a;
    moe__v1__export_adapter_response__init(&a);
    a.bytes = c->answer.outcome.bytes;
    a.repeated = c->answer.repeated;
    moe_training_service__reply(c->rpc, &a.base);
}

static void fail_mutation(const struct mutation *c, struct moe_status st)
{
    moe_training_service__count(c->service, c->row->rpc, &st, c->received_ns);
    moe_rpc_fail(c->rpc, st);
}

static void reply_mutation(const struct mutation *c)
{
    const struct moe_status ok = moe_ok();
    moe_training_service__count(c->service, c->row->rpc, &ok, c->received_ns);
    c->row->reply(c);
}

/* The engine's thread. */
static void mutation_ended(struct moe_train_work *work, struct moe_status status)
{
    struct mutation *c = work->user;
    if (moe_failed(&status))
        fail_mutation(c, status);
    else
        reply_mutation(c);
    moe_rpc_call_unref(c->rpc);
    drop_mutation(c);
}

static struct moe_status submit_mutation(struct mutation *c)
{
    struct moe_training_service *s = c->service;
    if (moe_train_recall(s->config.training, &c->call, &c->answer)) {
        reply_mutation(c);
        return moe_ok();
    }
    c->work.kind = c->call.kind;
    moe_train_call_pack(&c->call, c->work.body, &c->work.body_length);
    c->work.answer = &c->answer;
    c->work.deadline_ns = moe_rpc_call_deadline(c->rpc);
    c->work.done = mutation_ended;
    c->work.user = c;
    moe_rpc_call_ref(c->rpc);
    atomic_fetch_add(&c->references, 1);
    moe_rpc_call_set_user(c->rpc, c);
    struct moe_status st = moe_engine_submit_training(s->config.engine, &c->work);
    if (moe_failed(&st)) {
        moe_rpc_call_unref(c->rpc);
        drop_mutation(c);
    }
    return st;
}

/* What trainers do waits for the group, however long that takes. An operator who stands before the
 * command line learns what it waits for. */
static struct moe_status check_stuck(const struct moe_training_service *s,
                                     const struct moe_train_call *call)
{
    struct moe_train_state state;
    moe_train_read_state(s->config.training, &state);
    if (state.problem[0] == '\0' || (call->kind != MOE_STEP_SAVE && call->kind != MOE_STEP_LOAD &&
                                     call->kind != MOE_STEP_EXPORT))
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CANNOT_GO_BACK,
                     "the group does not serve: %.150s (`moectl training recover NAME`)",
                     state.problem);
}

static struct moe_status check_service(const struct moe_training_service *s,
                                       const struct moe_train_call *call)
{
    uint64_t epoch;
    bool draining;
    moe_service_read(s->config.service, &epoch, &draining);
    if (!draining && epoch == 0)
        MOE_TRY(check_stuck(s, call));
    return moe_request_check_worker(draining, epoch);
}

static struct moe_status read_mutation(struct mutation *c, struct moe_rpc_msg *m)
{
    const struct moe_training_service *s = c->service;
    struct moe_rpc_arena arena;
    void *message;
    MOE_TRY(moe_rpc_msg_unpack(m, moe_train_request_type(c->row->kind), &arena, &message));
    MOE_TRY(moe_train_read_request(c->row->kind, message, &c->call));
    MOE_TRY(
        moe_train_check_request(moe_train_configured(s->config.training), c->row->kind, message));
    return check_service(s, &c->call);
}

static void mutation_message(struct moe_rpc_call *rpc, struct moe_rpc_msg *m, void *ctx)
{
    const struct moe_training_method *method = ctx;
    struct mutation *c = calloc(1, sizeof *c);
    if (c == NULL) {
        moe_rpc_msg_free(m);
        moe_rpc_fail(rpc, moe_training_service__out_of_memory());
        return;
    }
    c->service = method->service;
    c->rpc = rpc;
    c->row = method->row;
    c->received_ns = moe_clock_ns();
    atomic_store(&c->references, 1);
    struct moe_status st = read_mutation(c, m);
    moe_rpc_msg_free(m);
    if (!moe_failed(&st))
        st = submit_mutation(c);
    if (moe_failed(&st))
        fail_mutation(c, st);
    if (moe_rpc_call_user(rpc) != c)
        drop_mutation(c);
}

static void mutation_cancelled(struct moe_rpc_call *rpc, void *ctx)
{
    const struct moe_training_method *method = ctx;
    struct mutation *c = moe_rpc_call_user(rpc);
    if (c != NULL)
        moe_engine_cancel_training(method->service->config.engine, &c->work);
}

static void mutation_done(struct moe_rpc_call *rpc, void *ctx)
{
    struct mutation *c = moe_rpc_call_user(rpc);
    (void)ctx;
    if (c != NULL)
        drop_mutation(c);
}

/* ------------------------------------------------------------------------- methods */

static const struct mutation_row rows[MOE_TRAINING_MUTATIONS] = {
    {"OptimizerStep", MOE_SERVICE_OPTIMIZER_STEP, MOE_STEP_OPTIMIZER, reply_step},
    {"ZeroGrad", MOE_SERVICE_ZERO_GRAD, MOE_STEP_ZERO_GRAD, reply_zero_grad},
    {"SetFrozen", MOE_SERVICE_SET_FROZEN, MOE_STEP_SET_FROZEN, reply_set_frozen},
    {"SaveCheckpoint", MOE_SERVICE_SAVE_CHECKPOINT, MOE_STEP_SAVE, reply_save},
    {"LoadCheckpoint", MOE_SERVICE_LOAD_CHECKPOINT, MOE_STEP_LOAD, reply_load},
    {"ExportAdapter", MOE_SERVICE_EXPORT_ADAPTER, MOE_STEP_EXPORT, reply_export},
};

void moe_training_service__mutations(struct moe_training_service *s,
                                     struct moe_rpc_method out[MOE_TRAINING_MUTATIONS])
{
    for (size_t i = 0; i < MOE_TRAINING_MUTATIONS; i++) {
        struct moe_training_method *m = &s->mutations[i];
        m->service = s;
        m->row = &rows[i];
        (void)snprintf(m->path, sizeof m->path, "/moe.v1.TrainingService/%s", rows[i].name);
        out[i] = (struct moe_rpc_method){.path = m->path,
                                         .kind = MOE_RPC_UNARY,
                                         .message = mutation_message,
                                         .cancelled = mutation_cancelled,
                                         .done = mutation_done,
                                         .ctx = m};
    }
}
