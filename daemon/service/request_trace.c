/* SPDX-License-Identifier: Apache-2.0 */
/* Spans from the times that request, service and engine have measured; see
 * service/request_trace.h. Each span begins where the one before ends, so that none stands for a
 * rest. */
#include "service/request_trace.h"

#include "base/clock.h"

#define SERVICE "moe.v1.ExpertService"

enum {
    STEP_SPANS = 12,   /* queue, step, copy_in, start, 7 stages, collect */
    REQUEST_SPANS = 3, /* check, hand_out (or queue), answer */
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

static void add_attributes(struct moe_trace *trace, const struct moe_request_end *e)
{
    const struct moe_request *r = e->request;
    const struct moe_work *w = &r->work;
    moe_trace_set_text(trace, "rpc.system", "grpc");
    moe_trace_set_text(trace, "rpc.service", SERVICE);
    moe_trace_set_text(trace, "rpc.method", e->streamed ? "ForwardStream" : "Forward");
    moe_trace_set_number(trace, "rpc.grpc.status_code", e->status->code);
    if (r->spec != NULL) {
        moe_trace_set_number(trace, "moe.layer", r->spec->layer);
        moe_trace_set_number(trace, "moe.tokens", w->tokens);
    }
    if (w->steps > 0) {
        moe_trace_set_number(trace, "moe.steps", w->steps);
        moe_trace_set_number(trace, "moe.step.tokens", w->step_tokens);
        moe_trace_set_number(trace, "moe.epoch", (int64_t)w->answered_epoch);
    }
    if (!moe_failed(e->status))
        return;
    moe_trace_set_text(trace, "error.type",
                       e->status->reason != MOE_REASON_NONE ? moe_reason_name(e->status->reason)
                                                            : moe_code_name(e->status->code));
    moe_trace_fail(trace, e->status->text);
}

void moe_request_trace_end(struct moe_tracer *t, const struct moe_request_end *e)
{
    const struct moe_request *r = e->request;
    const uint32_t steps = r->work.times != NULL ? r->work.times->count : 0;
    struct moe_trace *trace =
        moe_trace_create(t, e->context, e->streamed ? SERVICE "/ForwardStream" : SERVICE "/Forward",
                         r->received_ns, REQUEST_SPANS + steps * STEP_SPANS);
    if (e->handed_back_ns == 0) {
        moe_trace_add(trace, 0, "check", r->received_ns, e->end_ns);
    } else {
        moe_trace_add(trace, 0, "check", r->received_ns, r->work.submitted_ns);
        add_engine(trace, &r->work, e->handed_back_ns);
        moe_trace_add(trace, 0, "answer", e->handed_back_ns, e->end_ns);
    }
    add_attributes(trace, e);
    moe_trace_finish(t, trace, e->end_ns);
}
