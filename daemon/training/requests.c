/* SPDX-License-Identifier: Apache-2.0 */
/* The rows of training/requests.h, and the valid values of all fields. */
#include "training/requests.h"

#include "moe/v1/training.pb-c.h"

#include <string.h>

#define invalid(reason, ...) moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_##reason, __VA_ARGS__)

/* -------------------------------------------------------------------------- fields */

static struct moe_status begin_call(struct moe_train_call *call, uint64_t step_id, uint64_t lineage,
                                    const char *session)
{
    call->id = step_id;
    call->lineage = lineage;
    if (session[0] != '\0' && !moe_training_name_ok(session))
        return invalid(NAME_INVALID, "a session has 1 to 64 characters of A-Z a-z 0-9 . _ - and "
                                     "begins with no dot");
    if (session[0] != '\0')
        moe_content_mix(call->content.tensor_hash, session, strlen(session));
    /* Higher ids would leave none for the next calls. */
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

static struct moe_status check_optimizer(const struct moe_optimizer_args *o)
{
    const double most = 1e30;
    const struct {
        const char *name;
        double value, low, high;
    } fields[] = {
        {"learning_rate", o->learning_rate, 0, most},
        {"weight_decay", o->weight_decay, 0, most},
        {"beta1", o->beta1, 0, 1},
        {"beta2", o->beta2, 0, 1},
        {"epsilon", o->epsilon, 0, most},
        {"momentum", o->momentum, 0, 1},
        {"max_grad_norm", o->max_grad_norm, 0, most},
        {"grad_scale", o->grad_scale, -most, most},
        {"balance_rate", o->balance_rate, 0, most},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (!(fields[i].value >= fields[i].low && fields[i].value < fields[i].high))
            return invalid(VALUE_INVALID, "%s is not a number from %g to below %g", fields[i].name,
                           fields[i].low, fields[i].high);
    if (o->epsilon == 0)
        return invalid(VALUE_INVALID, "epsilon must be above 0: a parameter that never had a "
                                      "gradient would become 0 / 0");
    return o->grad_scale != 0
               ? moe_ok()
               : invalid(VALUE_INVALID, "grad_scale must not be 0: ZeroGrad forgets gradients");
}

/* ---------------------------------------------------------------------------- rows */

static struct moe_status read_step(const void *message, struct moe_train_call *call)
{
    const Moe__V1__OptimizerStepRequest *q = message;
    MOE_TRY(begin_call(call, q->step_id, q->lineage, q->session));
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

static struct moe_status check_step(const struct moe_train_config *config, const void *message)
{
    const Moe__V1__OptimizerStepRequest *q = message;
    enum moe_optimizer ours = config->trainer.optimizer;
    if (q->optimizer != MOE__V1__OPTIMIZER__OPTIMIZER_UNSPECIFIED && (int)q->optimizer != (int)ours)
        return invalid(VALUE_INVALID, "the workers were started with the other optimizer");
    if (ours == MOE_OPTIMIZER_ADAMW && q->momentum != 0)
        return invalid(VALUE_INVALID, "momentum is SGD's: the workers run adamw, which has betas");
    return moe_ok();
}

static struct moe_status read_zero_grad(const void *message, struct moe_train_call *call)
{
    const Moe__V1__ZeroGradRequest *q = message;
    return begin_call(call, q->step_id, q->lineage, q->session);
}

static struct moe_status read_set_frozen(const void *message, struct moe_train_call *call)
{
    const Moe__V1__SetFrozenRequest *q = message;
    call->frozen = (uint32_t)q->router << MOE_PARAMS_ROUTER |
                   (uint32_t)q->experts << MOE_PARAMS_EXPERTS |
                   (uint32_t)q->shared << MOE_PARAMS_SHARED;
    return begin_call(call, q->step_id, q->lineage, q->session);
}

static struct moe_status read_save(const void *message, struct moe_train_call *call)
{
    const Moe__V1__SaveCheckpointRequest *q = message;
    call->keep = q->keep;
    MOE_TRY(begin_call(call, q->step_id, q->lineage, q->session));
    return take_name(call, q->name);
}

static struct moe_status read_load(const void *message, struct moe_train_call *call)
{
    const Moe__V1__LoadCheckpointRequest *q = message;
    MOE_TRY(begin_call(call, q->step_id, q->lineage, q->session));
    return take_name(call, q->name);
}

static struct moe_status read_export(const void *message, struct moe_train_call *call)
{
    const Moe__V1__ExportAdapterRequest *q = message;
    MOE_TRY(begin_call(call, q->step_id, q->lineage, q->session));
    call->merge = q->merge;
    if (!q->merge)
        return take_name(call, q->name);
    return q->name[0] == '\0' ? moe_ok() : invalid(VALUE_INVALID, "merge writes nothing: no name");
}

struct row {
    const ProtobufCMessageDescriptor *type;
    struct moe_status (*read)(const void *message, struct moe_train_call *call);
    struct moe_status (*check)(const struct moe_train_config *config, const void *message);
};

static const struct row rows[MOE_STEP_KINDS] = {
    [MOE_STEP_OPTIMIZER] = {&moe__v1__optimizer_step_request__descriptor, read_step, check_step},
    [MOE_STEP_ZERO_GRAD] = {&moe__v1__zero_grad_request__descriptor, read_zero_grad, NULL},
    [MOE_STEP_SET_FROZEN] = {&moe__v1__set_frozen_request__descriptor, read_set_frozen, NULL},
    [MOE_STEP_SAVE] = {&moe__v1__save_checkpoint_request__descriptor, read_save, NULL},
    [MOE_STEP_LOAD] = {&moe__v1__load_checkpoint_request__descriptor, read_load, NULL},
    [MOE_STEP_EXPORT] = {&moe__v1__export_adapter_request__descriptor, read_export, NULL},
};

/* Everything that the call is to do, without its conditions. */
static void hash_change(struct moe_train_call *c)
{
    const struct moe_optimizer_args *o = &c->optimizer;
    const uint64_t numbers[] = {(uint64_t)c->kind, c->expected_backwards, c->frozen, c->keep,
                                c->merge};
    const double values[] = {o->learning_rate, o->weight_decay, o->beta1,
                             o->beta2,         o->epsilon,      o->momentum,
                             o->max_grad_norm, o->grad_scale,   o->balance_rate};
    moe_content_mix(c->content.header_hash, numbers, sizeof numbers);
    moe_content_mix(c->content.header_hash, values, sizeof values);
    moe_content_mix(c->content.header_hash, c->name, sizeof c->name);
}

const struct ProtobufCMessageDescriptor *moe_train_request_type(enum moe_step_kind kind)
{
    return (unsigned)kind < MOE_STEP_KINDS ? rows[kind].type : NULL;
}

struct moe_status moe_train_read_request(enum moe_step_kind kind,
                                         const struct ProtobufCMessage *message,
                                         struct moe_train_call *out)
{
    *out = (struct moe_train_call){.kind = kind};
    size_t length = protobuf_c_message_get_packed_size(message);
    if (length > sizeof out->request)
        return invalid(TOO_LARGE, "a request of %zu bytes; %zu are the most", length,
                       sizeof out->request);
    MOE_TRY(rows[kind].read(message, out));
    out->request_length = (uint32_t)protobuf_c_message_pack(message, out->request);
    hash_change(out);
    return moe_ok();
}

struct moe_status moe_train_check_request(const struct moe_train_config *config,
                                          enum moe_step_kind kind,
                                          const struct ProtobufCMessage *message)
{
    return rows[kind].check != NULL ? rows[kind].check(config, message) : moe_ok();
}
