/* SPDX-License-Identifier: Apache-2.0 */
/* Sends training calls to the home worker, retries them under their ids, and asks the worker that
 * recorded an answer. Also all training calls except Backward (backward.c) and ListCheckpoints
 * (checkpoints.c).
 *
 * A retry under the same id is safe: a group runs a call once and repeats its answer. So only the
 * call's deadline ends the retries. */
#include "training.h"

#include "abi.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/wait.h"
#include "daemon/endpoint.h"
#include "moe/v1/training.pb-c.h"
#include "wire.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ----------------------------------------------------------------- one call, one worker */

/* Parts of a request that the transport still uses. */
struct sent_parts {
    struct moe_mutex lock;
    pthread_cond_t none;
    MOE_GUARDED_BY(lock) size_t count;
};

static void part_released(void *owner)
{
    struct sent_parts *sent = owner;
    moe_mutex_lock(&sent->lock);
    if (--sent->count == 0)
        pthread_cond_signal(&sent->none);
    moe_mutex_unlock(&sent->lock);
}

static struct moe_status send_once(const struct moe_client_connection *connection,
                                   const struct moe_client_training_call *call)
{
    struct sent_parts sent = {.lock = MOE_MUTEX_INITIALIZER,
                              .none = PTHREAD_COND_INITIALIZER,
                              .count = call->request->part_count};
    struct moe_rpc_out out = *call->request;
    for (size_t i = 0; i < out.part_count; i++) {
        out.parts[i].release = part_released;
        out.parts[i].owner = &sent;
    }
    struct moe_rpc_call_options options = {.deadline_ns = call->deadline_ns};
    struct moe_rpc_msg *answer = NULL;
    struct moe_status st =
        moe_rpc_call_wait(connection->channel, call->path, &options, &out, &answer);
    if (st.code == MOE_OK)
        st = call->read(call->ctx, answer);
    moe_rpc_msg_free(answer);

    moe_mutex_lock(&sent.lock);
    while (sent.count > 0)
        moe_wait(&sent.none, &sent.lock);
    moe_mutex_unlock(&sent.lock);
    pthread_cond_destroy(&sent.none);
    moe_mutex_destroy(&sent.lock);
    return moe_client_blame_connection(connection, st);
}

/* The last word of `st` is the endpoint of the worker that has the answer. This client may have no
 * connection to it. */
static struct moe_status ask_elsewhere(const struct moe_client *c,
                                       const struct moe_client_training_call *call,
                                       struct moe_status st)
{
    const char *space = strrchr(st.text, ' ');
    struct moe_client_connection connection = {0};
    struct moe_status bad = space != NULL ? moe_endpoint_check("worker", space + 1) : st;
    if (moe_failed(&bad))
        return st;
    MOE_TRY(moe_client_open_connection(c, space + 1, c->info.max_message_bytes, &connection));
    st = send_once(&connection, call);
    moe_client_close_connection(&connection);
    return st;
}

static void sleep_until(uint64_t at_ns)
{
    uint64_t now = moe_clock_ns();
    if (at_ns <= now)
        return;
    struct timespec left = {.tv_sec = (time_t)((at_ns - now) / MOE_NS_PER_S),
                            .tv_nsec = (long)((at_ns - now) % MOE_NS_PER_S)};
    while (nanosleep(&left, &left) != 0) {
    }
}

/* The deadline of a call that has none: it ends if no worker answers for the client's default time.
 * An attempt that takes longer than that was being executed, so it resets `silent_since`. */
static uint64_t silence_deadline(const struct moe_client *c, uint64_t begun_ns,
                                 uint64_t *silent_since)
{
    uint64_t now = moe_clock_ns(), end;
    uint64_t limit = c->config.timeout_ms < MOE_NEVER / MOE_NS_PER_MS
                         ? c->config.timeout_ms * MOE_NS_PER_MS
                         : MOE_NEVER;
    if (now - begun_ns > limit)
        *silent_since = now;
    return __builtin_add_overflow(*silent_since, limit, &end) ? MOE_NEVER : end;
}

static struct moe_status retry_until_answered(struct moe_client *c,
                                              const struct moe_client_training_call *call)
{
    size_t connection = MOE_CLIENT_HOME;
    uint64_t silent_since = moe_clock_ns();
    for (uint32_t attempt = 1;; attempt++) {
        uint64_t begun = moe_clock_ns(), end = call->deadline_ns;
        struct moe_status st = send_once(&c->connections[connection], call);
        if (st.reason == MOE_REASON_RECORDED_ELSEWHERE)
            st = ask_elsewhere(c, call, st);
        if (end == MOE_NEVER)
            end = silence_deadline(c, begun, &silent_since);
        uint64_t at = moe_clock_ns() + moe_client_pause_ns(c, attempt, st.retry_after_ms);
        if (st.code != MOE_UNAVAILABLE || call->once || at >= end)
            return st;
        sleep_until(at);
        if (!call->home)
            connection = (connection + 1) % c->connection_count;
    }
}

struct moe_status moe_client_training_run(struct moe_client *c,
                                          const struct moe_client_training_call *call)
{
    moe_client_enter(c);
    struct moe_status st = retry_until_answered(c, call);
    moe_client_leave(c);
    return st;
}

/* ------------------------------------------------------------------ calls without tensors */

/* The unpacked answer. */
struct unpacked {
    const ProtobufCMessageDescriptor *type;
    void *message; /* in `arena` */
    struct moe_rpc_arena arena;
};

static struct moe_status unpack(void *ctx, struct moe_rpc_msg *answer)
{
    struct unpacked *u = ctx;
    return moe_client_wire_blame(moe_rpc_msg_unpack(answer, u->type, &u->arena, &u->message));
}

struct moe_status moe_client_large_answer_read(void *ctx, struct moe_rpc_msg *answer)
{
    struct moe_client_large_answer *large = ctx;
    size_t length = moe_rpc_msg_length(answer);
    uint8_t *bytes = malloc(length + 1);
    if (bytes == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
    struct moe_status st = moe_rpc_msg_flatten(answer, bytes, length, &length);
    if (!moe_failed(&st))
        st = moe_rpc_unpack(large->type, bytes, length, NULL, &large->message);
    free(bytes);
    return moe_client_wire_blame(st);
}

/* `read`, with `ctx`, takes the answer. */
static struct moe_status run(struct moe_client *c, const char *path, uint64_t timeout_ms,
                             const ProtobufCMessage *request,
                             struct moe_status (*read)(void *ctx, struct moe_rpc_msg *answer),
                             void *ctx)
{
    uint8_t head[MOE_CLIENT_TRAINING_HEAD_MAX];
    struct moe_rpc_out out = {.head = head,
                              .head_length = protobuf_c_message_get_packed_size(request)};
    MOE_INVARIANT(out.head_length <= sizeof head);
    protobuf_c_message_pack(request, head);
    const struct moe_client_training_call call = {
        .path = path,
        .request = &out,
        .deadline_ns = moe_client_deadline(c, timeout_ms),
        .read = read,
        .ctx = ctx,
    };
    return moe_client_training_run(c, &call);
}

static struct moe_status ask(struct moe_client *c, const char *path, uint64_t timeout_ms,
                             const ProtobufCMessage *request, struct unpacked *answer)
{
    return run(c, path, timeout_ms, request, unpack, answer);
}

static struct moe_status check_change(const struct moe_client_change *change)
{
    MOE_TRY(
        moe_client_check_reserved("moe_client_change", change->reserved, sizeof change->reserved));
    if (change->session != NULL && change->session[0] != '\0')
        MOE_TRY(moe_client_wire_check_name("session", change->session));
    return change->step_id != 0
               ? moe_ok()
               : moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID,
                           "step_id must be at least 1 (last_step_id + 1 of the state is free)");
}

/* Packing only reads. */
static char *session_of(const struct moe_client *c, const struct moe_client_change *change)
{
    return (char *)(uintptr_t)(change->session != NULL ? change->session : c->session);
}

/* The server uses its default for a field that is not sent. */
static void fill_defaulted(const struct moe_client_optimizer_step *s,
                           Moe__V1__OptimizerStepRequest *q)
{
    q->beta1 = s->beta1;
    if (s->zeros || s->beta1 != 0)
        q->beta1_given_case = MOE__V1__OPTIMIZER_STEP_REQUEST__BETA1_GIVEN_BETA1;
    q->beta2 = s->beta2;
    if (s->zeros || s->beta2 != 0)
        q->beta2_given_case = MOE__V1__OPTIMIZER_STEP_REQUEST__BETA2_GIVEN_BETA2;
    q->epsilon = s->epsilon;
    if (s->epsilon != 0)
        q->epsilon_given_case = MOE__V1__OPTIMIZER_STEP_REQUEST__EPSILON_GIVEN_EPSILON;
    q->grad_scale = s->grad_scale;
    if (s->grad_scale != 0)
        q->grad_scale_given_case = MOE__V1__OPTIMIZER_STEP_REQUEST__GRAD_SCALE_GIVEN_GRAD_SCALE;
}

struct moe_status moe_client_optimizer_step(struct moe_client *c,
                                            struct moe_client_optimizer_step *s)
{
    MOE_TRY(MOE_CLIENT_CHECK_SIZE(s, optimizer_step, OPTIMIZER_STEP));
    MOE_TRY(check_change(&s->change));
    Moe__V1__OptimizerStepRequest q = MOE__V1__OPTIMIZER_STEP_REQUEST__INIT;
    q.step_id = s->change.step_id;
    q.session = session_of(c, &s->change);
    q.lineage = s->change.lineage;
    q.optimizer = (Moe__V1__Optimizer)s->optimizer;
    q.learning_rate = s->learning_rate;
    q.weight_decay = s->weight_decay;
    q.momentum = s->momentum;
    q.max_grad_norm = s->max_grad_norm;
    fill_defaulted(s, &q);
    q.balance_rate = s->balance_rate;
    q.expected_backwards = s->expected_backwards;
    struct unpacked u = {.type = &moe__v1__optimizer_step_response__descriptor};
    MOE_TRY(ask(c, "/moe.v1.TrainingService/OptimizerStep", s->change.timeout_ms, &q.base, &u));
    const Moe__V1__OptimizerStepResponse *a = u.message;
    s->change.repeated = a->repeated;
    s->weights_version = a->weights_version;
    s->answered_lineage = a->lineage;
    s->skipped_nonfinite = a->skipped_nonfinite;
    s->grad_norm = a->grad_norm;
    s->backwards = a->backwards;
    s->steps = a->steps;
    return moe_ok();
}

struct moe_status moe_client_zero_grad(struct moe_client *c, struct moe_client_change *change,
                                       uint32_t *backwards)
{
    MOE_TRY(check_change(change));
    Moe__V1__ZeroGradRequest q = MOE__V1__ZERO_GRAD_REQUEST__INIT;
    q.step_id = change->step_id;
    q.session = session_of(c, change);
    q.lineage = change->lineage;
    struct unpacked u = {.type = &moe__v1__zero_grad_response__descriptor};
    MOE_TRY(ask(c, "/moe.v1.TrainingService/ZeroGrad", change->timeout_ms, &q.base, &u));
    const Moe__V1__ZeroGradResponse *a = u.message;
    change->repeated = a->repeated;
    if (backwards != NULL)
        *backwards = a->backwards;
    return moe_ok();
}

struct moe_status moe_client_set_frozen(struct moe_client *c, struct moe_client_change *change,
                                        struct moe_client_frozen frozen)
{
    MOE_TRY(check_change(change));
    MOE_TRY(
        moe_client_check_reserved("moe_client_frozen", frozen.reserved, sizeof frozen.reserved));
    Moe__V1__SetFrozenRequest q = MOE__V1__SET_FROZEN_REQUEST__INIT;
    q.step_id = change->step_id;
    q.session = session_of(c, change);
    q.lineage = change->lineage;
    q.router = frozen.router;
    q.experts = frozen.experts;
    q.shared = frozen.shared;
    struct unpacked u = {.type = &moe__v1__set_frozen_response__descriptor};
    MOE_TRY(ask(c, "/moe.v1.TrainingService/SetFrozen", change->timeout_ms, &q.base, &u));
    const Moe__V1__SetFrozenResponse *a = u.message;
    change->repeated = a->repeated;
    return moe_ok();
}

void moe_client_copy_text(char *to, size_t capacity, const char *from)
{
    size_t length = strnlen(from, capacity - 1);
    memcpy(to, from, length);
    to[length] = '\0';
}

static void take_lost(const Moe__V1__GetTrainStateResponse *a, struct moe_client_train_state *out)
{
    uint32_t capacity = out->lost_micro_batches != NULL ? out->lost_capacity : 0;
    out->lost_backwards = a->lost_backwards;
    out->lost_count = 0;
    for (size_t i = 0; i < a->n_lost_micro_batches && i < capacity; i++) {
        const Moe__V1__MicroBatch *from = a->lost_micro_batches[i];
        struct moe_client_micro_batch *to = &out->lost_micro_batches[out->lost_count++];
        *to = (struct moe_client_micro_batch){.micro_batch_id = from->micro_batch_id};
        moe_client_copy_text(to->session, sizeof to->session, from->session);
    }
}

static void take_state(const Moe__V1__GetTrainStateResponse *a, struct moe_client_train_state *out)
{
    struct moe_client_train_state state = {
        .size = out->size,
        .lineage = a->lineage,
        .weights_version = a->weights_version,
        .steps = a->steps,
        .unsaved_steps = a->unsaved_steps,
        .last_step_id = a->last_step_id,
        .backwards = a->backwards,
        .optimizer = (enum moe_client_optimizer)a->optimizer,
        .frozen = {.router = a->router_frozen,
                   .experts = a->experts_frozen,
                   .shared = a->shared_frozen},
        .lora_rank = a->lora_rank,
        .lora_scale = a->lora_scale,
        .state_bytes = a->state_bytes,
        .retained_bytes = a->retained_bytes,
        .retained_bytes_limit = a->retained_bytes_limit,
        .retained_device_bytes = a->retained_device_bytes,
        .retained_device_bytes_limit = a->retained_device_bytes_limit,
        .progress_bytes = a->progress_bytes,
        .progress_bytes_total = a->progress_bytes_total,
    };
    for (size_t i = 0; i < a->n_lora_targets && i < MOE_CLIENT_LORA_TARGETS_MAX; i++)
        moe_client_copy_text(state.lora_targets[i], sizeof state.lora_targets[i],
                             a->lora_targets[i]);
    moe_client_copy_text(state.checkpoint, sizeof state.checkpoint, a->checkpoint);
    moe_client_copy_text(state.saving, sizeof state.saving, a->saving);
    moe_client_copy_text(state.loading, sizeof state.loading, a->loading);
    moe_client_copy_text(state.problem, sizeof state.problem, a->problem);
    if (MOE_CLIENT_HAS(out, lost_backwards)) {
        state.lost_micro_batches = out->lost_micro_batches;
        state.lost_capacity = out->lost_capacity;
        take_lost(a, &state);
    }
    memcpy(out, &state, out->size < sizeof state ? out->size : sizeof state);
}

/* The answer names Backward calls that are lost, up to 1024. */
struct moe_status moe_client_get_train_state(struct moe_client *c, uint64_t timeout_ms,
                                             struct moe_client_train_state *out)
{
    MOE_TRY(MOE_CLIENT_CHECK_SIZE(out, train_state, TRAIN_STATE));
    Moe__V1__GetTrainStateRequest q = MOE__V1__GET_TRAIN_STATE_REQUEST__INIT;
    struct moe_client_large_answer large = {.type = &moe__v1__get_train_state_response__descriptor};
    MOE_TRY(run(c, "/moe.v1.TrainingService/GetTrainState", timeout_ms, &q.base,
                moe_client_large_answer_read, &large));
    Moe__V1__GetTrainStateResponse *a = large.message;
    take_state(a, out);
    moe__v1__get_train_state_response__free_unpacked(a, NULL);
    return moe_ok();
}

/* ------------------------------------------------------------------------ checkpoints */

struct moe_status moe_client_save_checkpoint(struct moe_client *c, struct moe_client_checkpoint *s)
{
    MOE_TRY(MOE_CLIENT_CHECK_SIZE(s, checkpoint, CHECKPOINT));
    MOE_TRY(check_change(&s->change));
    MOE_TRY(moe_client_wire_check_name("name", s->name));
    Moe__V1__SaveCheckpointRequest q = MOE__V1__SAVE_CHECKPOINT_REQUEST__INIT;
    q.step_id = s->change.step_id;
    q.session = session_of(c, &s->change);
    q.lineage = s->change.lineage;
    q.name = (char *)(uintptr_t)s->name; /* packing only reads */
    q.keep = s->keep;
    struct unpacked u = {.type = &moe__v1__save_checkpoint_response__descriptor};
    MOE_TRY(ask(c, "/moe.v1.TrainingService/SaveCheckpoint", s->change.timeout_ms, &q.base, &u));
    const Moe__V1__SaveCheckpointResponse *a = u.message;
    s->change.repeated = a->repeated;
    s->weights_version = a->weights_version;
    s->answered_lineage = a->lineage;
    s->steps = a->steps;
    s->bytes = a->bytes;
    s->removed_count = a->removed_count;
    memset(s->removed, 0, sizeof s->removed);
    for (size_t n = 0; n < a->n_removed && n < MOE_CLIENT_REMOVED_MAX; n++)
        moe_client_copy_text(s->removed[n], sizeof s->removed[n], a->removed[n]);
    return moe_ok();
}

struct moe_status moe_client_load_checkpoint(struct moe_client *c, struct moe_client_checkpoint *s)
{
    MOE_TRY(MOE_CLIENT_CHECK_SIZE(s, checkpoint, CHECKPOINT));
    MOE_TRY(check_change(&s->change));
    MOE_TRY(moe_client_wire_check_name("name", s->name));
    Moe__V1__LoadCheckpointRequest q = MOE__V1__LOAD_CHECKPOINT_REQUEST__INIT;
    q.step_id = s->change.step_id;
    q.session = session_of(c, &s->change);
    q.lineage = s->change.lineage;
    q.name = (char *)(uintptr_t)s->name;
    struct unpacked u = {.type = &moe__v1__load_checkpoint_response__descriptor};
    MOE_TRY(ask(c, "/moe.v1.TrainingService/LoadCheckpoint", s->change.timeout_ms, &q.base, &u));
    const Moe__V1__LoadCheckpointResponse *a = u.message;
    s->change.repeated = a->repeated;
    s->steps = a->steps;
    s->lost_steps = a->lost_steps;
    s->lost_backwards = a->lost_backwards;
    s->weights_version = a->weights_version;
    s->answered_lineage = a->lineage;
    return moe_ok();
}

struct moe_status moe_client_export_adapter(struct moe_client *c, struct moe_client_checkpoint *s)
{
    MOE_TRY(MOE_CLIENT_CHECK_SIZE(s, checkpoint, CHECKPOINT));
    MOE_TRY(check_change(&s->change));
    if (s->name != NULL)
        MOE_TRY(moe_client_wire_check_name("name", s->name));
    Moe__V1__ExportAdapterRequest q = MOE__V1__EXPORT_ADAPTER_REQUEST__INIT;
    q.step_id = s->change.step_id;
    q.session = session_of(c, &s->change);
    q.lineage = s->change.lineage;
    if (s->name != NULL)
        q.name = (char *)(uintptr_t)s->name;
    q.merge = s->name == NULL;
    struct unpacked u = {.type = &moe__v1__export_adapter_response__descriptor};
    MOE_TRY(ask(c, "/moe.v1.TrainingService/ExportAdapter", s->change.timeout_ms, &q.base, &u));
    const Moe__V1__ExportAdapterResponse *a = u.message;
    s->change.repeated = a->repeated;
    s->bytes = a->bytes;
    return moe_ok();
}
