/* SPDX-License-Identifier: Apache-2.0 */
/* Training calls with an id, from message to answer: Backward, and the calls of mutations.c. A call
 * lives until both the transport and the engine are done with it. Handlers run on the call's
 * thread, ends on the engine's. */
#include "service/training_service_state.h"

#include "base/clock.h"
#include "service/request_trace.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { ENDPOINT_BYTES = 256 };

struct training_kind {
    const char *path;
    enum moe_service_rpc rpc;
    enum moe_step_kind step;
};

static const struct training_kind kinds[MOE_TRAINING_CALLS] = {
    {"/moe.v1.TrainingService/Backward", MOE_SERVICE_BACKWARD, MOE_STEP_BACKWARD},
    {"/moe.v1.TrainingService/OptimizerStep", MOE_SERVICE_OPTIMIZER_STEP, MOE_STEP_OPTIMIZER},
    {"/moe.v1.TrainingService/ZeroGrad", MOE_SERVICE_ZERO_GRAD, MOE_STEP_ZERO_GRAD},
    {"/moe.v1.TrainingService/SetFrozen", MOE_SERVICE_SET_FROZEN, MOE_STEP_SET_FROZEN},
    {"/moe.v1.TrainingService/SaveCheckpoint", MOE_SERVICE_SAVE_CHECKPOINT, MOE_STEP_SAVE},
    {"/moe.v1.TrainingService/LoadCheckpoint", MOE_SERVICE_LOAD_CHECKPOINT, MOE_STEP_LOAD},
    {"/moe.v1.TrainingService/ExportAdapter", MOE_SERVICE_EXPORT_ADAPTER, MOE_STEP_EXPORT},
};

struct pending_call {
    struct moe_training_request request;
    struct moe_training_service *service;
    const struct training_kind *kind;
    struct moe_rpc_call *rpc; /* referenced while the engine has the request */
    uint64_t received_ns;
    struct moe_trace_context trace;
    uint64_t handed_back_ns;     /* of a sampled call: the engine's end of it; 0: none yet */
    _Atomic uint32_t references; /* the engine; the transport */
};

static void drop(struct pending_call *p)
{
    if (atomic_fetch_sub(&p->references, 1) != 1)
        return;
    moe_backward_release(&p->request);
    free(p);
}

static bool is_backward(const struct pending_call *p)
{
    return p->kind->step == MOE_STEP_BACKWARD;
}

/* ------------------------------------------------------------------------- answers */

static void count(const struct pending_call *p, const struct moe_status *st)
{
    moe_service_metrics_end(moe_service_counts(p->service->config.service), p->kind->rpc, st,
                            p->received_ns);
}

/* Before the message is read. */
static void begin_trace(struct pending_call *p)
{
    size_t length;
    if (p->service->config.tracer == NULL)
        return;
    const char *parent = moe_rpc_call_header(p->rpc, "traceparent", &length);
    moe_trace_begin(p->service->config.tracer, parent, length, &p->trace);
}

/* The answer is on its way. */
static void end_trace(const struct pending_call *p, const struct moe_status *st)
{
    if (!p->trace.sampled)
        return;
    const struct moe_training_end end = {.context = &p->trace,
                                         .path = p->kind->path,
                                         .work = &p->request.work,
                                         .status = st,
                                         .received_ns = p->received_ns,
                                         .handed_back_ns = p->handed_back_ns,
                                         .end_ns = moe_clock_ns()};
    moe_training_trace_end(p->service->config.tracer, &end);
}

/* Training knows a slot; the client needs an address. */
static struct moe_status name_worker(const struct pending_call *p, struct moe_status st)
{
    char endpoint[ENDPOINT_BYTES];
    if (st.reason != MOE_REASON_RECORDED_ELSEWHERE)
        return st;
    moe_service_worker(p->service->config.service, p->request.answer.recorded_at, endpoint,
                       sizeof endpoint);
    return moe_error(st.code, st.reason, "the answer is recorded on another worker; ask %.180s",
                     endpoint);
}

static void fail(const struct pending_call *p, struct moe_status st)
{
    st = name_worker(p, st);
    count(p, &st);
    moe_rpc_fail(p->rpc, st);
    end_trace(p, &st);
}

static void reply_backward(const struct pending_call *p)
{
    const struct moe_training_request *r = &p->request;
    struct moe_pass_record *cached = r->answer.repeated ? r->answer.record : r->cached;
    uint8_t head[MOE_BACKWARD_HEAD_MAX];
    struct moe_rpc_out out;
    struct moe_status st = moe_backward_cached_status(cached);
    if (moe_failed(&st)) {
        fail(p, st);
        return;
    }
    count(p, &st);
    moe_backward_answer(r, cached, r->answer.repeated, head, &out);
    moe_rpc_reply(p->rpc, &out);
    end_trace(p, &st);
}

/* Without a lease the answer waits for the repeat of the call: another group may have its place. */
static void reply(const struct pending_call *p)
{
    const struct moe_status ok = moe_ok();
    if (!moe_service_may_answer(p->service->config.service)) {
        fail(p, moe_request_lease_lost());
        return;
    }
    if (is_backward(p)) {
        reply_backward(p);
        return;
    }
    count(p, &ok);
    moe_training_service__reply_mutation(p->rpc, p->kind->step, &p->request.answer);
    end_trace(p, &ok);
}

/* ---------------------------------------------------------------------- the engine */

/* The engine's thread. A Backward that was run is cached even if some tokens were bad: it is
 * recorded on all slots, and its other tokens have added their gradients. */
static void on_ended(struct moe_train_work *work, struct moe_status status)
{
    struct pending_call *p = work->user;
    struct moe_training_request *r = &p->request;
    p->handed_back_ns = p->trace.sampled ? moe_clock_ns() : 0;
    bool was_run = r->answer.outcome.epoch != 0 && !r->answer.repeated;
    if (is_backward(p) && was_run)
        moe_backward_cache(r, p->service->config.training, &status);
    if (moe_failed(&status))
        fail(p, status);
    else
        reply(p);
    moe_rpc_call_unref(p->rpc);
    drop(p);
}

static struct moe_status submit(struct pending_call *p)
{
    struct moe_train_work *w = &p->request.work;
    w->kind = p->kind->step;
    moe_train_call_pack(&p->request.call, w->body, &w->body_length);
    w->answer = &p->request.answer;
    w->deadline_ns = moe_rpc_call_deadline(p->rpc);
    w->done = on_ended;
    w->user = p;
    moe_rpc_call_ref(p->rpc);
    atomic_fetch_add(&p->references, 1);
    moe_rpc_call_set_user(p->rpc, p);
    struct moe_status st = moe_engine_submit_training(p->service->config.engine, w);
    if (moe_failed(&st)) {
        moe_rpc_call_unref(p->rpc);
        drop(p); /* the engine's reference; `done` drops the transport's */
    }
    return st;
}

/* -------------------------------------------------------------------- the transport */

static struct moe_backward_context context_of(struct moe_training_service *s)
{
    struct moe_backward_context c = {
        .info = &s->config.info, .staging = s->config.staging, .training = s->config.training};
    moe_service_read(s->config.service, &c.worker);
    /* A Backward waits for no view: the next one may drop the forward pass that it names. */
    c.worker.awaited = false;
    return c;
}

static struct moe_status read_message(struct pending_call *p, struct moe_rpc_msg *m)
{
    const struct moe_backward_context context = context_of(p->service);
    return is_backward(p) ? moe_backward_parse(&p->request, &context, m)
                          : moe_training_service__read_mutation(p->service, p->kind->step, m,
                                                                &p->request.call);
}

/* No x, and no retained pass: only a repeat can be answered. */
static struct moe_status answer_without_x(struct pending_call *p)
{
    struct moe_training_request *r = &p->request;
    MOE_TRY(moe_train_recall_header(p->service->config.training, &r->call, &r->answer));
    if (!moe_backward_matches(r->answer.record, r))
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ANSWER_GONE,
                         "id %llu has been run; its answer is not cached",
                         (unsigned long long)r->call.id);
    reply(p);
    return moe_ok();
}

/* Answers at once, or gives the request to the engine. */
static struct moe_status serve(struct pending_call *p)
{
    struct moe_training_request *r = &p->request;
    const struct moe_backward_context context = context_of(p->service);
    if (is_backward(p) && !r->whole)
        return answer_without_x(p);
    if (moe_train_recall(p->service->config.training, &r->call, &r->answer)) {
        reply(p);
        return moe_ok();
    }
    if (is_backward(p))
        MOE_TRY(moe_backward_prepare(r, &context));
    return submit(p);
}

static void on_message(struct moe_rpc_call *rpc, struct moe_rpc_msg *m, void *ctx)
{
    const struct moe_training_method *method = ctx;
    struct pending_call *p = calloc(1, sizeof *p);
    if (p == NULL) {
        moe_rpc_msg_free(m);
        moe_rpc_fail(rpc, moe_service_out_of_memory());
        return;
    }
    p->service = method->service;
    p->kind = method->kind;
    p->rpc = rpc;
    p->received_ns = moe_clock_ns();
    atomic_store(&p->references, 1);
    begin_trace(p);
    struct moe_status st = read_message(p, m);
    moe_rpc_msg_free(m);
    if (!moe_failed(&st))
        st = serve(p);
    if (moe_failed(&st))
        fail(p, st);
    if (moe_rpc_call_user(rpc) != p)
        drop(p);
}

static void on_cancelled(struct moe_rpc_call *rpc, void *ctx)
{
    const struct moe_training_method *method = ctx;
    struct pending_call *p = moe_rpc_call_user(rpc);
    if (p != NULL)
        moe_engine_cancel_training(method->service->config.engine, &p->request.work);
}

static void on_done(struct moe_rpc_call *rpc, void *ctx)
{
    struct pending_call *p = moe_rpc_call_user(rpc);
    (void)ctx;
    if (p != NULL)
        drop(p);
}

void moe_training_service__calls(struct moe_training_service *s,
                                 struct moe_rpc_method out[MOE_TRAINING_CALLS])
{
    for (size_t i = 0; i < MOE_TRAINING_CALLS; i++) {
        s->methods[i] = (struct moe_training_method){s, &kinds[i]};
        out[i] = (struct moe_rpc_method){.path = kinds[i].path,
                                         .kind = MOE_RPC_UNARY,
                                         .message = on_message,
                                         .cancelled = on_cancelled,
                                         .done = on_done,
                                         .ctx = &s->methods[i]};
    }
}
