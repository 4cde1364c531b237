/* SPDX-License-Identifier: Apache-2.0 */
/* Backward, GetTrainState and RecoverTraining; see service/training_service.h. As in service.c, a
 * call lives until both the transport and the engine are done with it; handlers run on the call's
 * own thread, ends on the engine's. */
#include "service/training_service_state.h"

#include "base/clock.h"
#include "service/training_request.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ENDPOINT_BYTES = 256 };

#define invalid(reason, ...) moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_##reason, __VA_ARGS__)

/* The training room knows a slot; the client needs an address. */
static struct moe_status name_worker(struct moe_training_service *s, struct moe_status st,
                                     const struct moe_train_answer *answer)
{
    char endpoint[ENDPOINT_BYTES];
    if (st.reason != MOE_REASON_RECORDED_ELSEWHERE)
        return st;
    moe_service_worker(s->config.service, answer->recorded_at, endpoint, sizeof endpoint);
    return moe_error(st.code, st.reason, "the answer is recorded on another worker; ask %.180s",
                     endpoint);
}

/* -------------------------------------------------------------------------- Backward */

struct backward {
    struct moe_backward_request request;
    struct moe_training_service *service;
    struct moe_rpc_call *call; /* held while the engine has the request */
    uint64_t received_ns;
    _Atomic uint32_t references; /* the engine; the call */
};

static void drop_backward(struct backward *b)
{
    if (atomic_fetch_sub(&b->references, 1) != 1)
        return;
    moe_backward_release(&b->request);
    free(b);
}

static void count_backward(const struct backward *b, const struct moe_status *st)
{
    moe_training_service__count(b->service, MOE_SERVICE_BACKWARD, st, b->received_ns);
}

static void fail_backward(const struct backward *b, struct moe_status st)
{
    count_backward(b, &st);
    moe_rpc_fail(b->call, st);
}

static void reply_cached(struct backward *b, struct moe_pass_record *cached, bool repeated)
{
    uint8_t head[MOE_BACKWARD_HEAD_MAX];
    struct moe_rpc_out out;
    struct moe_status st = moe_backward_cached_status(cached);
    if (moe_failed(&st)) {
        fail_backward(b, st);
        return;
    }
    count_backward(b, &st);
    moe_backward_answer(&b->request, cached, repeated, head, &out);
    moe_rpc_reply(b->call, &out);
}

/* The engine's thread. A pass that was run is cached even where it ended with bad tokens: it has
 * been recorded everywhere, and added what its other tokens give. */
static void backward_done(struct moe_train_work *work, struct moe_status status)
{
    struct backward *b = work->user;
    struct moe_backward_request *r = &b->request;
    bool was_run = r->answer.outcome.epoch != 0 && !r->answer.repeated;
    if (was_run)
        moe_backward_cache(r, b->service->config.training, &status);
    if (moe_failed(&status))
        fail_backward(b, name_worker(b->service, status, &r->answer));
    else
        reply_cached(b, r->answer.repeated ? r->answer.record : r->cached, r->answer.repeated);
    moe_rpc_call_unref(b->call);
    drop_backward(b);
}

static struct moe_backward_context context_of(struct moe_training_service *s)
{
    struct moe_backward_context c = {
        .info = &s->config.info, .staging = s->config.staging, .training = s->config.training};
    moe_service_read(s->config.service, &c.epoch, &c.draining);
    return c;
}

/* A message without x, and no saved pass: it can only be answered if it is a repeat. */
static struct moe_status answer_without_x(struct backward *b)
{
    struct moe_backward_request *r = &b->request;
    struct moe_training_service *s = b->service;
    struct moe_train_known known;
    if (!moe_train_knows(s->config.training, &r->call, &known))
        return known.refusal;
    if (known.origin_elsewhere) {
        r->answer.recorded_at = known.origin;
        return name_worker(
            s,
            moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_RECORDED_ELSEWHERE, "recorded elsewhere"),
            &r->answer);
    }
    if (memcmp(known.content.header_hash, r->call.content.header_hash,
               sizeof known.content.header_hash) != 0)
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_REUSED,
                         "id %llu was used for something else", (unsigned long long)r->call.id);
    moe_train_count_repeat(s->config.training);
    r->answer.record = moe_pass_store_get(moe_train_answers(s->config.training), r->call.session,
                                          r->call.id, r->received_ns);
    if (r->answer.record == NULL || !moe_backward_matches(r->answer.record, r))
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ANSWER_GONE,
                         "id %llu has been run; its answer is not, or no longer, cached",
                         (unsigned long long)r->call.id);
    reply_cached(b, r->answer.record, true);
    return moe_ok();
}

/* Answers at once, or gives the request to the engine. */
static struct moe_status serve_backward(struct backward *b)
{
    struct moe_backward_request *r = &b->request;
    struct moe_training_service *s = b->service;
    const struct moe_backward_context context = context_of(s);
    if (!r->whole)
        return answer_without_x(b);
    if (moe_train_recall(s->config.training, &r->call, &r->answer)) {
        reply_cached(b, r->answer.record, true);
        return moe_ok();
    }
    MOE_TRY(moe_backward_prepare(r, &context));
    r->work.deadline_ns = moe_rpc_call_deadline(b->call);
    r->work.done = backward_done;
    r->work.user = b;
    moe_rpc_call_ref(b->call);
    atomic_fetch_add(&b->references, 1);
    moe_rpc_call_set_user(b->call, b);
    struct moe_status st = moe_engine_submit_training(s->config.engine, &r->work);
    if (moe_failed(&st)) {
        moe_rpc_call_unref(b->call);
        drop_backward(b); /* the engine's; the call's goes with `done` */
    }
    return st;
}

static void backward_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct moe_training_service *s = ctx;
    struct backward *b = calloc(1, sizeof *b);
    if (b == NULL) {
        moe_rpc_msg_free(m);
        moe_rpc_fail(call, moe_training_service__out_of_memory());
        return;
    }
    b->service = s;
    b->call = call;
    b->received_ns = moe_clock_ns();
    atomic_store(&b->references, 1);
    const struct moe_backward_context context = context_of(s);
    struct moe_status st = moe_backward_parse(&b->request, &context, m);
    moe_rpc_msg_free(m);
    if (!moe_failed(&st))
        st = serve_backward(b);
    if (moe_failed(&st))
        fail_backward(b, st);
    if (moe_rpc_call_user(call) != b)
        drop_backward(b);
}

static void backward_cancelled(struct moe_rpc_call *call, void *ctx)
{
    struct moe_training_service *s = ctx;
    struct backward *b = moe_rpc_call_user(call);
    if (b != NULL)
        moe_engine_cancel_training(s->config.engine, &b->request.work);
}

static void backward_done_call(struct moe_rpc_call *call, void *ctx)
{
    struct backward *b = moe_rpc_call_user(call);
    (void)ctx;
    if (b != NULL)
        drop_backward(b);
}

/* ---------------------------------------------------------------------- GetTrainState */

static void state_message(struct moe_rpc_call *rpc, struct moe_rpc_msg *m, void *ctx)
{
    static char gate[] = "gate", up[] = "up", down[] = "down", none[] = "";
    char *all[] = {gate, up, down}, *targets[3];
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
    for (unsigned i = 0; i < 3 && c->lora_rank != 0; i++)
        if ((c->lora_targets >> i & 1) != 0)
            targets[a.n_lora_targets++] = all[i];
    a.checkpoint = state.checkpoint;
    a.state_bytes = state.state_bytes;
    a.saving = state.job == MOE_STEP_SAVE ? state.job_name : none;
    a.loading = state.job == MOE_STEP_LOAD ? state.job_name : none;
    a.progress_bytes = state.job_bytes;
    a.progress_bytes_total = state.job_bytes_total;
    a.problem = state.problem;
    a.retained_bytes = state.retained_bytes;
    a.retained_bytes_limit = state.saved_bytes_limit;
    a.retained_device_bytes = state.activation_bytes;
    a.retained_device_bytes_limit = state.activation_bytes_limit;
    moe_training_service__reply(rpc, &a.base);
}

/* --------------------------------------------------------------------- RecoverTraining */

/* Only that: whether it can be taken is found out as the group forms. */
static struct moe_status check_exists(const char *directory, const char *name)
{
    struct stat there;
    int root = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool found = root >= 0 && fstatat(root, name, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
                 S_ISDIR(there.st_mode);
    if (root >= 0)
        close(root);
    return found ? moe_ok()
                 : moe_error(MOE_NOT_FOUND, MOE_REASON_CHECKPOINT_NOT_FOUND,
                             "there is no checkpoint %s", name);
}

static struct moe_status check_recovery(const struct moe_training_service *s,
                                        const Moe__V1__RecoverTrainingRequest *q)
{
    uint64_t epoch;
    bool draining;
    if (q->as_loaded && q->name[0] != '\0')
        return invalid(VALUE_INVALID, "either a name or the model as loaded");
    if (!q->as_loaded && !moe_training_name_ok(q->name))
        return invalid(NAME_INVALID, "not the name of a checkpoint");
    if (!q->as_loaded && moe_train_configured(s->config.training)->directory == NULL)
        return invalid(UNSUPPORTED, "the workers were started without --training-dir");
    moe_service_read(s->config.service, &epoch, &draining);
    if (epoch == 0 && !q->as_loaded)
        return check_exists(moe_train_configured(s->config.training)->directory, q->name);
    return epoch == 0
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
        moe_training_service__reply(rpc, &a.base);
}

/* ------------------------------------------------------------------------ the service */

void moe_training_service_methods(struct moe_training_service *s,
                                  struct moe_rpc_method out[MOE_TRAINING_SERVICE_METHODS])
{
    out[0] = (struct moe_rpc_method){.path = "/moe.v1.TrainingService/Backward",
                                     .kind = MOE_RPC_UNARY,
                                     .large = true,
                                     .message = backward_message,
                                     .cancelled = backward_cancelled,
                                     .done = backward_done_call,
                                     .ctx = s};
    moe_training_service__mutations(s, out + 1);
    out[1 + MOE_TRAINING_MUTATIONS] =
        (struct moe_rpc_method){.path = "/moe.v1.TrainingService/GetTrainState",
                                .kind = MOE_RPC_UNARY,
                                .message = state_message,
                                .ctx = s};
    out[2 + MOE_TRAINING_MUTATIONS] =
        (struct moe_rpc_method){.path = "/moe.v1.TrainingService/RecoverTraining",
                                .kind = MOE_RPC_UNARY,
                                .message = recover_message,
                                .ctx = s};
    out[3 + MOE_TRAINING_MUTATIONS] = moe_training_service__listing(s);
}

struct moe_status moe_training_service_create(const struct moe_training_service_config *config,
                                              struct moe_training_service **out)
{
    struct moe_training_service *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_training_service__out_of_memory();
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
