/* SPDX-License-Identifier: Apache-2.0 */
/* Spans from the times that request, service and engine have measured; see
 * service/request_trace.h. Each span begins where the one before ends, so that none stands for a
 * rest. */
#include "service/request_trace.h"

#include "base/clock.h"

#include <string.h>

#define SERVICE          "moe.v1.ExpertService"
#define TRAINING_SERVICE "moe.v1.TrainingService"

enum {
    STEP_SPANS = 12,   /* queue, step, copy_in, start, 7 stages, collect */
    REQUEST_SPANS = 3, /* check, hand_out (or queue), answer */
    /* check, queue, step, start, stages (or pass), collect, hand_out (or job), answer */
    CALL_SPANS = 7 + MOE_BACKWARD_STAGE_COUNT,
};
_Static_assert(STEP_SPANS == 5 + MOE_STAGE_COUNT, "the spans of a step are all counted");

/* The end of a stage: stages are measured by the device's clock, which may run a little faster. */
static uint64_t end_of(uint64_t start_ns, uint64_t length_ns, uint64_t limit_ns)
{
    return start_ns < limit_ns && limit_ns - start_ns > length_ns ? start_ns + length_ns : limit_ns;
}

/* When the backend began the step. Where it does not say so, the step ended when it was seen. */
static uint64_t begin_of(const struct moe_step_times *s)
{
    uint64_t begun =
        s->began_ns != 0 ? s->began_ns : s->ended_ns - moe_earlier(s->total_ns, s->ended_ns);
    return begun < s->taken_ns ? s->taken_ns : moe_earlier(begun, s->ended_ns);
}

static void add_step(struct moe_trace *trace, const struct moe_step_times *s)
{
    const uint32_t step = moe_trace_add(trace, 0, "step", s->taken_ns, s->ended_ns);
    uint64_t at = begin_of(s);
    const uint64_t handed_over = moe_earlier(s->enqueued_ns, at); /* it may begin meanwhile */
    moe_trace_add(trace, step, "copy_in", s->taken_ns, handed_over);
    moe_trace_add(trace, step, "start", handed_over, at);
    for (int i = 0; i < MOE_STAGE_COUNT; i++) {
        if (s->stage_ns[i] == 0)
            continue;
        const uint64_t end = end_of(at, s->stage_ns[i], s->ended_ns);
        moe_trace_add(trace, step, moe_stage_names[i], at, end);
        at = end;
    }
    moe_trace_add(trace, step, "collect", at, s->ended_ns);
}

/* All that happened between the engine's acceptance and its report. */
static void add_engine(struct moe_trace *trace, const struct moe_work *w, uint64_t handed_back_ns)
{
    const uint32_t count = w->times != NULL ? w->times->count : 0;
    const bool hides = w->steps > count; /* the engine does not keep the times of all steps */
    uint64_t at = w->submitted_ns;
    for (uint32_t i = 0; i < count; i++) {
        const struct moe_step_times *s = &w->times->step[i];
        if (i == 0 || s->taken_ns > at)
            moe_trace_add(trace, 0, hides && i + 1 == count ? "steps" : "queue", at, s->taken_ns);
        add_step(trace, s);
        at = at < s->ended_ns ? s->ended_ns : at;
    }
    const bool waited = w->taken < w->tokens; /* its end came while some tokens were queued */
    const bool unseen = hides && count == 0;  /* no memory for the times */
    moe_trace_add(trace, 0,
                  unseen                 ? "steps"
                  : count == 0 || waited ? "queue"
                                         : "hand_out",
                  at, handed_back_ns);
}

static void add_outcome(struct moe_trace *trace, const struct moe_status *status)
{
    moe_trace_set_number(trace, "rpc.grpc.status_code", status->code);
    if (!moe_failed(status))
        return;
    moe_trace_set_text(trace, "error.type",
                       status->reason != MOE_REASON_NONE ? moe_reason_name(status->reason)
                                                         : moe_code_name(status->code));
    moe_trace_fail(trace, status->text);
}

static void add_attributes(struct moe_trace *trace, const struct moe_request_end *e)
{
    const struct moe_work *w = e->work;
    const bool rings = strcmp(e->span, MOE_TRACE_RING) == 0;
    moe_trace_set_text(trace, "rpc.system", rings ? "moe_ring" : "grpc");
    moe_trace_set_text(trace, "rpc.service", SERVICE);
    moe_trace_set_text(trace, "rpc.method", strrchr(e->span, '/') + 1);
    if (e->spec != NULL) {
        moe_trace_set_number(trace, "moe.layer", e->spec->layer);
        moe_trace_set_number(trace, "moe.tokens", w->tokens);
    }
    if (w->steps > 0) {
        moe_trace_set_number(trace, "moe.steps", w->steps);
        moe_trace_set_number(trace, "moe.step.tokens", w->step_tokens);
        moe_trace_set_number(trace, "moe.epoch", (int64_t)w->answered_epoch);
    }
    add_outcome(trace, e->status);
}

void moe_request_trace_end(struct moe_tracer *t, const struct moe_request_end *e)
{
    const uint32_t steps = e->work->times != NULL ? e->work->times->count : 0;
    struct moe_trace *trace = moe_trace_create(t, e->context, e->span, e->received_ns,
                                               REQUEST_SPANS + steps * STEP_SPANS);
    if (e->handed_back_ns == 0) {
        moe_trace_add(trace, 0, "check", e->received_ns, e->end_ns);
    } else {
        moe_trace_add(trace, 0, "check", e->received_ns, e->work->submitted_ns);
        add_engine(trace, e->work, e->handed_back_ns);
        moe_trace_add(trace, 0, "answer", e->handed_back_ns, e->end_ns);
    }
    add_attributes(trace, e);
    moe_trace_finish(t, trace, e->end_ns);
}

/* ------------------------------------------------------------------ training calls */

/* The pass of a Backward. CPUs measure its length only, GPUs its stages too. */
static void add_pass(struct moe_trace *trace, uint32_t step, const struct moe_train_work *w)
{
    const struct moe_step_result *r = &w->step;
    const struct moe_step_times times = {.taken_ns = w->started_ns,
                                         .ended_ns = w->ended_ns,
                                         .began_ns = r->began_ns,
                                         .total_ns = r->total_ns};
    const uint64_t begun = begin_of(&times);
    uint64_t at = begun;
    moe_trace_add(trace, step, "start", w->started_ns, begun);
    for (int i = 0; i < MOE_BACKWARD_STAGE_COUNT; i++) {
        if (r->backward_ns[i] == 0)
            continue;
        const uint64_t end = end_of(at, r->backward_ns[i], w->ended_ns);
        moe_trace_add(trace, step, moe_backward_stage_names[i], at, end);
        at = end;
    }
    if (at == begun) {
        at = end_of(begun, r->total_ns, w->ended_ns);
        moe_trace_add(trace, step, "pass", begun, at);
    }
    moe_trace_add(trace, step, "collect", at, w->ended_ns);
}

/* A Save or Load goes on after its ticket. */
static void add_call(struct moe_trace *trace, const struct moe_train_work *w,
                     uint64_t handed_back_ns)
{
    const uint64_t taken_ns = w->started_ns != 0 ? w->started_ns : handed_back_ns;
    moe_trace_add(trace, 0, "queue", w->submitted_ns, taken_ns);
    if (w->started_ns == 0)
        return;
    const uint64_t ended_ns = w->ended_ns != 0 ? w->ended_ns : handed_back_ns;
    const uint32_t step = moe_trace_add(trace, 0, "step", taken_ns, ended_ns);
    if (w->step.total_ns != 0 && w->ended_ns != 0)
        add_pass(trace, step, w);
    moe_trace_add(trace, 0, moe_step_traits(w->kind)->is_job ? "job" : "hand_out", ended_ns,
                  handed_back_ns);
}

void moe_training_trace_end(struct moe_tracer *t, const struct moe_training_end *e)
{
    const struct moe_train_work *w = e->work;
    const uint64_t checked_ns = e->handed_back_ns != 0 ? w->submitted_ns : e->end_ns;
    struct moe_trace *trace =
        moe_trace_create(t, e->context, e->path + 1, e->received_ns, CALL_SPANS);
    moe_trace_add(trace, 0, "check", e->received_ns, checked_ns);
    if (e->handed_back_ns != 0) {
        add_call(trace, w, e->handed_back_ns);
        moe_trace_add(trace, 0, "answer", e->handed_back_ns, e->end_ns);
    }
    moe_trace_set_text(trace, "rpc.system", "grpc");
    moe_trace_set_text(trace, "rpc.service", TRAINING_SERVICE);
    moe_trace_set_text(trace, "rpc.method", strrchr(e->path, '/') + 1);
    if (w->tokens > 0) {
        moe_trace_set_number(trace, "moe.layer", w->layer);
        moe_trace_set_number(trace, "moe.tokens", w->tokens);
    }
    add_outcome(trace, e->status);
    moe_trace_finish(t, trace, e->end_ns);
}
