/* OptimizerStep, ZeroGrad, SetFrozen, SaveCheckpoint, LoadCheckpoint and ExportAdapter: calls
 * without tensors, each with an id. Lives and threads are as in training_service.c. */
#include "worker/training_service_state.h"

#include "base/clock.h"
#include "worker/request_checks.h"

#include <stdatomic.h>
#include <stdlib.h>

#define invalid(reason, ...) moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_##reason, __VA_ARGS__)

/* A call without tensors. */
struct change {
    struct moe_train_work work;
    struct moe_train_call call;
    struct moe_train_answer answer;
    struct moe_training_service *service;
    struct moe_rpc_call *rpc; /* held while the engine has it */
    enum moe_service_rpc method;
    uint64_t received_ns;
    _Atomic uint32_t references; /* the engine; the call */
};

static void drop_change(struct change *c)
{
    if (atomic_fetch_sub(&c->references, 1) == 1)
        free(c);
}

static void reply_step(const struct change *c)
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

static void reply_zero_grad(const struct change *c)
{
    Moe__V1__ZeroGradResponse a;
    moe__v1__zero_grad_response__init(&a);
    a.backwards = c->answer.outcome.backwards;
    a.repeated = c->answer.repeated;
    moe_training_service__reply(c->rpc, &a.base);
}

static void reply_set_frozen(const struct change *c)
{
    Moe__V1__SetFrozenResponse a;
    moe__v1__set_frozen_response__init(&a);
    a.repeated = c->answer.repeated;
    moe_training_service__reply(c->rpc, &a.base);
}

static void reply_save(const struct change *c)
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

static void reply_load(const struct change *c)
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

static void reply_export(const struct change *c)
{
    Moe__V1__ExportAdapterResponse a;
    moe__v1__export_adapter_response__init(&a);
    a.bytes = c->answer.outcome.bytes;
    a.repeated = c->answer.repeated;
    moe_training_service__reply(c->rpc, &a.base);
}

static void fail_change(const struct change *c, struct moe_status st)
{
    moe_training_service__count(c->service, c->method, &st, c->received_ns);
    moe_rpc_fail(c->rpc, st);
}

static void reply_change(const struct change *c)
{
    const struct moe_status ok = moe_ok();
    moe_training_service__count(c->service, c->method, &ok, c->received_ns);
    switch (c->call.kind) {
    case MOE_STEP_OPTIMIZER: reply_step(c); return;
    case MOE_STEP_ZERO_GRAD: reply_zero_grad(c); return;
    case MOE_STEP_SET_FROZEN: reply_set_frozen(c); return;
    case MOE_STEP_SAVE: reply_save(c); return;
    case MOE_STEP_LOAD: reply_load(c); return;
    default: reply_export(c); return;
    }
}

/* The engine's thread. */
static void change_done(struct moe_train_work *work, struct moe_status status)
{
    struct change *c = work->user;
    if (moe_failed(&status))
        fail_change(c, status);
    else
        reply_change(c);
    moe_rpc_call_release(c->rpc);
    drop_change(c);
}

/* Everything that says what the call is to do; not what it presumes. */
static void hash_change(struct moe_train_call *c)
{
    const struct moe_optimizer_args *o = &c->optimizer;
    const uint64_t numbers[] = {(uint64_t)c->kind, c->expected_backwards, c->frozen, c->keep,
                                c->merge};
    const double values[] = {o->learning_rate, o->weight_decay, o->beta1,
                             o->beta2,         o->epsilon,      o->momentum,
                             o->max_grad_norm, o->grad_scale,   o->balance_rate};
    moe_content_mix(c->content.said, numbers, sizeof numbers);
    moe_content_mix(c->content.said, values, sizeof values);
    moe_content_mix(c->content.said, c->name, sizeof c->name);
}

static struct moe_status submit_change(struct change *c)
{
    struct moe_training_service *s = c->service;
    if (moe_train_recall(s->config.training, &c->call, &c->answer)) {
        reply_change(c);
        return moe_ok();
    }
    c->work.kind = c->call.kind;
    moe_train_call_pack(&c->call, c->work.body, &c->work.body_length);
    c->work.answer = &c->answer;
    c->work.deadline_ns = moe_rpc_call_deadline(c->rpc);
    c->work.done = change_done;
    c->work.user = c;
    moe_rpc_call_hold(c->rpc);
    atomic_fetch_add(&c->references, 1);
    moe_rpc_call_set_user(c->rpc, c);
    struct moe_status st = moe_engine_submit_training(s->config.engine, &c->work);
    if (moe_failed(&st)) {
        moe_rpc_call_release(c->rpc);
        drop_change(c);
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

/* A method that changes something: what its message is, and what fills the call from it. */
struct change_method {
    enum moe_service_rpc rpc;
    const ProtobufCMessageDescriptor *type;
    struct moe_status (*read)(const struct moe_training_service *s, const void *message,
                              struct moe_train_call *call);
};

static struct moe_status read_change(const struct moe_training_service *s, struct moe_rpc_msg *m,
                                     const struct change_method *method,
                                     struct moe_train_call *call)
{
    struct moe_rpc_arena arena;
    void *message;
    MOE_TRY(moe_rpc_msg_unpack(m, method->type, &arena, &message));
    MOE_TRY(method->read(s, message, call));
    hash_change(call);
    return check_service(s, call);
}

static void change_message(struct moe_rpc_call *rpc, struct moe_rpc_msg *m, void *ctx,
                           const struct change_method *method)
{
    struct change *c = calloc(1, sizeof *c);
    if (c == NULL) {
        moe_rpc_msg_free(m);
        moe_rpc_fail(rpc, moe_training_service__out_of_memory());
        return;
    }
    c->service = ctx;
    c->rpc = rpc;
    c->method = method->rpc;
    c->received_ns = moe_clock_ns();
    atomic_store(&c->references, 1);
    struct moe_status st = read_change(ctx, m, method, &c->call);
    moe_rpc_msg_free(m);
    if (!moe_failed(&st))
        st = submit_change(c);
    if (moe_failed(&st))
        fail_change(c, st);
    if (moe_rpc_call_user(rpc) != c)
        drop_change(c);
}

static void change_cancelled(struct moe_rpc_call *rpc, void *ctx)
{
    struct moe_training_service *s = ctx;
    struct change *c = moe_rpc_call_user(rpc);
    if (c != NULL)
        moe_engine_cancel_training(s->config.engine, &c->work);
}

static void change_done_call(struct moe_rpc_call *rpc, void *ctx)
{
    struct change *c = moe_rpc_call_user(rpc);
    (void)ctx;
    if (c != NULL)
        drop_change(c);
}

/* ------------------------------------------------------------------- what they say */

static struct moe_status begin_call(struct moe_train_call *call, enum moe_step_kind kind,
                                    uint64_t step_id, uint64_t lineage, const char *session)
{
    call->kind = kind;
    call->id = step_id;
    call->lineage = lineage;
    if (session[0] != '\0' && !moe_training_name_ok(session))
        return invalid(NAME_INVALID, "a session has 1 to 64 characters of A-Z a-z 0-9 . _ - and "
                                     "begins with no dot");
    if (session[0] != '\0')
        moe_content_mix(call->content.rest, session, strlen(session));
    /* The upper half would leave no id to those who take the next one. */
    return step_id != 0 && step_id <= INT64_MAX
               ? moe_ok()
               : invalid(VALUE_INVALID, "step_id must be from 1 to 2^63 - 1");
}

static struct moe_status take_name(struct moe_train_call *call, const char *name)
{
    if (!moe_training_name_ok(name))
        return invalid(NAME_INVALID, "a name has 1 to 64 characters of A-Z a-z 0-9 . _ - and "
                                     "begins with no dot");
    strcpy(call->name, name);
    return moe_ok();
}

/* Within [low, high), and a number. */
static struct moe_status check_range(const char *what, double value, double low, double high)
{
    if (value >= low && value < high)
        return moe_ok();
    return invalid(VALUE_INVALID, "%s is not a number from %g to below %g", what, low, high);
}

static struct moe_status check_optimizer(const struct moe_optimizer_args *o)
{
    const double most = 1e30;
    MOE_TRY(check_range("learning_rate", o->learning_rate, 0, most));
    MOE_TRY(check_range("weight_decay", o->weight_decay, 0, most));
    MOE_TRY(check_range("beta1", o->beta1, 0, 1));
    MOE_TRY(check_range("beta2", o->beta2, 0, 1));
    MOE_TRY(check_range("epsilon", o->epsilon, 0, most));
    if (o->epsilon == 0)
        return invalid(VALUE_INVALID, "epsilon must be above 0: a parameter that never had a "
                                      "gradient would become 0 / 0");
    MOE_TRY(check_range("momentum", o->momentum, 0, 1));
    MOE_TRY(check_range("max_grad_norm", o->max_grad_norm, 0, most));
    MOE_TRY(check_range("grad_scale", o->grad_scale, -most, most));
    if (o->grad_scale == 0)
        return invalid(VALUE_INVALID, "grad_scale must not be 0: ZeroGrad forgets gradients");
    return check_range("balance_rate", o->balance_rate, 0, most);
}

static struct moe_status read_step(const struct moe_training_service *s, const void *message,
                                   struct moe_train_call *call)
{
    const Moe__V1__OptimizerStepRequest *q = message;
    MOE_TRY(begin_call(call, MOE_STEP_OPTIMIZER, q->step_id, q->lineage, q->session));
    enum moe_optimizer ours = moe_train_configured(s->config.training)->trainer.optimizer;
    if (q->optimizer != MOE__V1__OPTIMIZER__OPTIMIZER_UNSPECIFIED && (int)q->optimizer != (int)ours)
        return invalid(VALUE_INVALID, "the workers were started with the other optimizer");
    if (ours == MOE_OPTIMIZER_ADAMW && q->momentum != 0)
        return invalid(VALUE_INVALID, "momentum is SGD's: the workers run adamw, which has betas");
    call->optimizer = (struct moe_optimizer_args){
        .learning_rate = q->learning_rate,
        .weight_decay = q->weight_decay,
        .beta1 = q->beta1_given_case != 0 ? q->beta1 : 0.9,
        .beta2 = q->beta2_given_case != 0 ? q->beta2 : 0.999,
        .epsilon = q->epsilon_given_case != 0 ? q->epsilon : 1e-8,
        .momentum = q->momentum,
        .max_grad_norm = q->max_grad_norm,
        .grad_scale = q->grad_scale_given_case != 0 ? q->grad_scale : 1,
        .balance_rate = q->balance_rate,
    };
    call->expected_backwards = q->expected_backwards;
    return check_optimizer(&call->optimizer);
}

static struct moe_status read_zero_grad(const struct moe_training_service *s, const void *message,
                                        struct moe_train_call *call)
{
    (void)s;
    const Moe__V1__ZeroGradRequest *q = message;
    return begin_call(call, MOE_STEP_ZERO_GRAD, q->step_id, q->lineage, q->session);
}

static struct moe_status read_set_frozen(const struct moe_training_service *s, const void *message,
                                         struct moe_train_call *call)
{
    (void)s;
    const Moe__V1__SetFrozenRequest *q = message;
    call->frozen = (uint32_t)q->router << MOE_PARAMS_ROUTER |
                   (uint32_t)q->experts << MOE_PARAMS_EXPERTS |
                   (uint32_t)q->shared << MOE_PARAMS_SHARED;
    return begin_call(call, MOE_STEP_SET_FROZEN, q->step_id, q->lineage, q->session);
}

static struct moe_status read_save(const struct moe_training_service *s, const void *message,
                                   struct moe_train_call *call)
{
    (void)s;
    const Moe__V1__SaveCheckpointRequest *q = message;
    call->keep = q->keep;
    MOE_TRY(begin_call(call, MOE_STEP_SAVE, q->step_id, q->lineage, q->session));
    return take_name(call, q->name);
}

static struct moe_status read_load(const struct moe_training_service *s, const void *message,
                                   struct moe_train_call *call)
{
    (void)s;
    const Moe__V1__LoadCheckpointRequest *q = message;
    MOE_TRY(begin_call(call, MOE_STEP_LOAD, q->step_id, q->lineage, q->session));
    return take_name(call, q->name);
}

static struct moe_status read_export(const struct moe_training_service *s, const void *message,
                                     struct moe_train_call *call)
{
    (void)s;
    const Moe__V1__ExportAdapterRequest *q = message;
    MOE_TRY(begin_call(call, MOE_STEP_EXPORT, q->step_id, q->lineage, q->session));
    call->merge = q->merge;
    if (!q->merge)
        return take_name(call, q->name);
    return q->name[0] == '\0' ? moe_ok() : invalid(VALUE_INVALID, "merge writes nothing: no name");
}

static void step_message(struct moe_rpc_call *rpc, struct moe_rpc_msg *m, void *ctx)
{
    static const struct change_method method = {
        MOE_SERVICE_OPTIMIZER_STEP, &moe__v1__optimizer_step_request__descriptor, read_step};
    change_message(rpc, m, ctx, &method);
}

static void zero_grad_message(struct moe_rpc_call *rpc, struct moe_rpc_msg *m, void *ctx)
{
    static const struct change_method method = {
        MOE_SERVICE_ZERO_GRAD, &moe__v1__zero_grad_request__descriptor, read_zero_grad};
    change_message(rpc, m, ctx, &method);
}

static void set_frozen_message(struct moe_rpc_call *rpc, struct moe_rpc_msg *m, void *ctx)
{
    static const struct change_method method = {
        MOE_SERVICE_SET_FROZEN, &moe__v1__set_frozen_request__descriptor, read_set_frozen};
    change_message(rpc, m, ctx, &method);
}

static void save_message(struct moe_rpc_call *rpc, struct moe_rpc_msg *m, void *ctx)
{
    static const struct change_method method = {
        MOE_SERVICE_SAVE_CHECKPOINT, &moe__v1__save_checkpoint_request__descriptor, read_save};
    change_message(rpc, m, ctx, &method);
}

static void load_message(struct moe_rpc_call *rpc, struct moe_rpc_msg *m, void *ctx)
{
    static const struct change_method method = {
        MOE_SERVICE_LOAD_CHECKPOINT, &moe__v1__load_checkpoint_request__descriptor, read_load};
    change_message(rpc, m, ctx, &method);
}

static void export_message(struct moe_rpc_call *rpc, struct moe_rpc_msg *m, void *ctx)
{
    static const struct change_method method = {
        MOE_SERVICE_EXPORT_ADAPTER, &moe__v1__export_adapter_request__descriptor, read_export};
    change_message(rpc, m, ctx, &method);
}

/* ------------------------------------------------------------------------- methods */

static struct moe_rpc_method change_method(struct moe_training_service *s, const char *path,
                                           void (*message)(struct moe_rpc_call *,
                                                           struct moe_rpc_msg *, void *))
{
    return (struct moe_rpc_method){.path = path,
                                   .kind = MOE_RPC_UNARY,
                                   .message = message,
                                   .cancelled = change_cancelled,
                                   .done = change_done_call,
                                   .ctx = s};
}

void moe_training_service__changes(struct moe_training_service *s,
                                   struct moe_rpc_method out[MOE_TRAINING_CHANGES])
{
    out[0] = change_method(s, "/moe.v1.TrainingService/OptimizerStep", step_message);
    out[1] = change_method(s, "/moe.v1.TrainingService/ZeroGrad", zero_grad_message);
    out[2] = change_method(s, "/moe.v1.TrainingService/SetFrozen", set_frozen_message);
    out[3] = change_method(s, "/moe.v1.TrainingService/SaveCheckpoint", save_message);
    out[4] = change_method(s, "/moe.v1.TrainingService/LoadCheckpoint", load_message);
    out[5] = change_method(s, "/moe.v1.TrainingService/ExportAdapter", export_message);
}
