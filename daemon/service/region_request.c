/* SPDX-License-Identifier: Apache-2.0 */
/* See service/region_request.h. `begin` runs on the host's thread, `done` on the engine's. */
#include "service/region_request.h"

#include "base/clock.h"
#include "service/request_checks.h"
#include "service/request_trace.h"
#include "service/service_metrics.h"

#include <stdlib.h>
#include <string.h>

enum { DEFAULT_TIMEOUT_MS = 60000 };

static const struct moe_layer_spec *spec_of(const struct moe_region_requests *s, uint32_t layer)
{
    for (size_t i = 0; i < s->info.layer_count; i++)
        if (s->info.layers[i]->layer == layer)
            return s->info.layers[i];
    return NULL;
}

struct moe_status moe_region_request_layer(void *ctx, uint32_t layer, struct moe_ring_layer *out)
{
    const struct moe_region_requests *s = ctx;
    const struct moe_layer_spec *spec = spec_of(s, layer);
    if (spec == NULL)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND, "the model has no MoE layer %u",
                         layer);
    *out = (struct moe_ring_layer){.hidden = spec->hidden,
                                   .top_k = spec->router.top_k,
                                   .max_tokens = s->info.max_tokens_per_request};
    return moe_ok();
}

/* -------------------------------------------------------------------- the end */

/* Stages do not overlap. */
static uint64_t layer_ns(const struct moe_step_result *step)
{
    uint64_t sum = 0;
    for (int i = 0; i < MOE_STAGE_COUNT; i++)
        sum += step->stage_ns[i];
    return sum;
}

static struct moe_ring_details details_of(const struct moe_region_request *r)
{
    const struct moe_work *w = &r->work;
    uint64_t now = moe_clock_ns();
    return (struct moe_ring_details){
        .epoch = w->answered_epoch,
        .weights_version = w->answered_version,
        .queue_ns = w->started_ns > w->submitted_ns ? w->started_ns - w->submitted_ns : 0,
        .layer_ns = layer_ns(&w->step),
        .step_ns = w->step.total_ns,
        .copy_in_ns = w->copy_in_ns,
        .copy_out_ns = w->copy_out_ns,
        .server_ns = now - r->call->received_ns,
        .step_tokens = w->step_tokens,
        .steps = w->steps,
    };
}

static void trace_end(const struct moe_region_requests *s, const struct moe_region_call *call,
                      const struct moe_trace_context *trace, const struct moe_work *work,
                      const struct moe_status *status, uint64_t handed_back_ns)
{
    const struct moe_request_end e = {.context = trace,
                                      .span = MOE_TRACE_RING,
                                      .work = work,
                                      .spec = spec_of(s, call->request.layer),
                                      .status = status,
                                      .received_ns = call->received_ns,
                                      .handed_back_ns = handed_back_ns,
                                      .end_ns = moe_clock_ns()};
    moe_request_trace_end(s->tracer, &e);
}

/* `handed_back_ns` 0: the engine has not had the request. */
static void end(struct moe_region_request *r, const struct moe_status *status,
                uint64_t handed_back_ns)
{
    const struct moe_ring_details details = details_of(r);
    const struct moe_region_requests *s = r->requests;
    struct moe_region_call *call = r->call;
    struct moe_work_times *times = r->work.times;
    moe_service_metrics_end(moe_service_counts(s->service), MOE_SERVICE_RING, status,
                            call->received_ns);
    moe_buffer_unref(r->ids);
    moe_buffer_unref(r->weights);
    if (!r->trace.sampled) {
        moe_region_host_end_call(call, status, &details);
        return;
    }
    /* The client may submit in this entry again as soon as it has its answer. */
    const struct moe_region_request last = *r;
    const struct moe_region_call ended = *call;
    moe_region_host_end_call(call, status, &details);
    trace_end(s, &ended, &last.trace, &last.work, status, handed_back_ns);
    free(times);
}

/* The engine's thread. A request with a token that is not good has failed as a whole. */
static void done(struct moe_work *work, struct moe_status status)
{
    struct moe_region_request *r = work->user;
    struct moe_service *service = r->requests->service;
    const uint64_t handed_back_ns = r->trace.sampled ? moe_clock_ns() : 0;
    if (!moe_failed(&status) && !moe_service_may_answer(service))
        status = moe_request_lease_lost(); /* the weights may be old */
    moe_service_metrics_left(moe_service_counts(service), work->tokens, !moe_failed(&status));
    end(r, &status, handed_back_ns);
}

/* -------------------------------------------------------------------- the begin */

/* Copies a tensor out of the client's host memory. */
static struct moe_status copy_tensor(const struct moe_region_request *r, enum moe_ring_role role,
                                     struct moe_buffer **out)
{
    size_t bytes = r->call->request.tensors[role].bytes;
    MOE_TRY(moe_staging_take(r->requests->staging, bytes, out));
    memcpy(moe_buffer_data(*out), r->call->at[role], bytes);
    return moe_ok();
}

/* What lies in a device's memory goes to the step as it is: the router checks its own copy. */
static struct moe_status copy_ids(struct moe_region_request *r, const struct moe_layer_spec *spec)
{
    const struct moe_ring_request *q = &r->call->request;
    r->work.ids_in = r->call->at[MOE_RING_IDS];
    if (r->call->in_device[MOE_RING_IDS])
        return moe_ok();
    MOE_TRY(copy_tensor(r, MOE_RING_IDS, &r->ids));
    r->work.ids_in = moe_buffer_data(r->ids);
    return moe_request_check_ids(spec, q->tokens, MOE__V1__DATA_TYPE__DATA_TYPE_I32, r->ids,
                                 q->tensors[MOE_RING_IDS].bytes);
}

/* The ids of the layer's table for the given token ids, which are copied first: the client may
 * write there at any time. */
static struct moe_status look_up_ids(struct moe_region_request *r,
                                     const struct moe_layer_spec *spec)
{
    const struct moe_ring_request *q = &r->call->request;
    const struct moe_token_table *table =
        moe_token_tables_find(&r->requests->info.token_tables, q->layer);
    struct moe_buffer *token_ids = NULL;
    if (r->call->in_device[MOE_RING_IDS])
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "token_ids in a device's memory are not looked up: put them into a region "
                         "of host memory, or give topk_ids");
    struct moe_status st = copy_tensor(r, MOE_RING_IDS, &token_ids);
    if (!moe_failed(&st))
        st = moe_request_check_token_ids(spec, table, q->tokens, token_ids,
                                         q->tensors[MOE_RING_IDS].bytes);
    if (!moe_failed(&st))
        st = moe_staging_take(r->requests->staging,
                              (size_t)q->tokens * spec->router.top_k * sizeof(int32_t), &r->ids);
    if (!moe_failed(&st)) {
        moe_request_look_up(table, q->tokens, token_ids, moe_buffer_data(r->ids));
        r->work.ids_in = moe_buffer_data(r->ids);
    }
    moe_buffer_unref(token_ids);
    return st;
}

static struct moe_status copy_weights(struct moe_region_request *r,
                                      const struct moe_layer_spec *spec)
{
    const struct moe_ring_request *q = &r->call->request;
    r->work.weights_in = r->call->at[MOE_RING_WEIGHTS];
    if (r->call->in_device[MOE_RING_WEIGHTS])
        return moe_ok();
    MOE_TRY(copy_tensor(r, MOE_RING_WEIGHTS, &r->weights));
    r->work.weights_in = moe_buffer_data(r->weights);
    return moe_request_check_weights(spec, q->tokens, r->weights,
                                     q->tensors[MOE_RING_WEIGHTS].bytes);
}

static struct moe_status copy_routing(struct moe_region_request *r,
                                      const struct moe_layer_spec *spec)
{
    const struct moe_ring_request *q = &r->call->request;
    struct moe_work *w = &r->work;
    if (q->tokens == 0)
        return moe_ok();
    if (q->parts == MOE_PARTS_SHARED) {
        MOE_TRY(
            moe_request_route_nowhere(r->requests->staging, spec, q->tokens, &r->ids, &r->weights));
        w->mode = MOE_ROUTE_IDS_WEIGHTS;
        w->ids_in = moe_buffer_data(r->ids);
        w->weights_in = moe_buffer_data(r->weights);
        return moe_ok();
    }
    if (q->routing == MOE_RING_ROUTE_TOKEN_IDS)
        return look_up_ids(r, spec);
    MOE_TRY(moe_request_check_routed(spec, w->mode));
    if (w->mode == MOE_ROUTE_SERVER)
        return moe_ok();
    MOE_TRY(copy_ids(r, spec));
    return w->mode == MOE_ROUTE_IDS_WEIGHTS ? copy_weights(r, spec) : moe_ok();
}

static struct moe_step_completion completion_of(const struct moe_region_call *call)
{
    if (call->receipt == NULL)
        return (struct moe_step_completion){0};
    return (struct moe_step_completion){.word = call->good.word,
                                        .signal = call->good.signal,
                                        .receipt = call->receipt,
                                        .value = call->good.value};
}

static void fill_work(struct moe_region_request *r)
{
    static const enum moe_routing_mode modes[MOE_RING_ROUTES] = {
        [MOE_RING_ROUTE_SERVER] = MOE_ROUTE_SERVER,
        [MOE_RING_ROUTE_IDS] = MOE_ROUTE_IDS,
        [MOE_RING_ROUTE_IDS_WEIGHTS] = MOE_ROUTE_IDS_WEIGHTS,
        [MOE_RING_ROUTE_TOKEN_IDS] = MOE_ROUTE_IDS,
    };
    struct moe_region_call *call = r->call;
    const struct moe_ring_request *q = &call->request;
    uint64_t timeout_ms = q->timeout_ms != 0 ? q->timeout_ms : DEFAULT_TIMEOUT_MS;
    r->work = (struct moe_work){
        .layer = moe_layer_key(0, q->layer),
        .dtype = (enum moe_dtype)q->dtype,
        .tokens = q->tokens,
        .mode = modes[q->routing],
        .without_shared = q->parts == MOE_PARTS_ROUTED,
        .x = call->at[MOE_RING_X],
        .by_copy = true,
        .deadline_ns = call->received_ns + timeout_ms * MOE_NS_PER_MS,
        .epoch = q->epoch,
        .weights_version = q->weights_version,
        .completion = completion_of(call),
        .y = call->at[MOE_RING_Y],
        .ids_out = call->at[MOE_RING_IDS_OUT],
        .weights_out = call->at[MOE_RING_WEIGHTS_OUT],
        .token_state = call->at[MOE_RING_TOKEN_STATE],
        .done = done,
        .user = r,
    };
}

static struct moe_status check(struct moe_region_request *r)
{
    const struct moe_region_requests *s = r->requests;
    const struct moe_ring_request *q = &r->call->request;
    uint64_t version = moe_engine_weights_version(s->engine);
    struct moe_standing worker;
    moe_service_read(s->service, &worker);
    MOE_TRY(copy_routing(r, spec_of(s, q->layer)));
    MOE_TRY(moe_request_check_epoch(&worker, q->epoch));
    MOE_TRY(moe_request_check_version(version, q->weights_version));
    MOE_TRY(moe_request_check_worker(&worker));
    r->work.answered_epoch = worker.epoch; /* of T = 0; the engine sets them for all others */
    r->work.answered_version = version;
    return moe_ok();
}

/* The trace that the request belongs to. */
static void begin_trace(const struct moe_region_requests *s, const struct moe_ring_request *q,
                        struct moe_trace_context *trace)
{
    struct moe_trace_context parent = {.sampled = (q->trace_flags & 1) != 0};
    memcpy(parent.trace_id, q->trace_id, sizeof parent.trace_id);
    memcpy(parent.parent_id, q->parent_id, sizeof parent.parent_id);
    moe_trace_begin_from(s->tracer, &parent, trace);
}

void moe_region_request_begin(void *ctx, struct moe_region_call *call)
{
    const struct moe_region_requests *s = ctx;
    struct moe_service_metrics *counts = moe_service_counts(s->service);
    struct moe_region_request *r = call->state;
    uint32_t tokens = call->request.tokens;
    r->requests = s;
    r->call = call;
    fill_work(r);
    begin_trace(s, &call->request, &r->trace);
    if (r->trace.sampled)
        r->work.times = calloc(1, sizeof *r->work.times); /* without memory, steps are not shown */
    struct moe_status st = check(r);
    if (moe_failed(&st) || tokens == 0) {
        end(r, &st, 0);
        return;
    }
    moe_service_metrics_entered(counts, tokens);
    st = moe_engine_submit(s->engine, &r->work); /* `done` may have run already */
    if (!moe_failed(&st))
        return;
    moe_service_metrics_left(counts, tokens, false);
    end(r, &st, 0);
}

void moe_region_request_refused(void *ctx, const struct moe_region_call *call,
                                const struct moe_status *why)
{
    const struct moe_region_requests *s = ctx;
    const struct moe_work none = {.tokens = call->request.tokens};
    struct moe_trace_context trace;
    moe_service_metrics_end(moe_service_counts(s->service), MOE_SERVICE_RING, why,
                            call->received_ns);
    begin_trace(s, &call->request, &trace);
    if (trace.sampled)
        trace_end(s, call, &trace, &none, why, 0);
}

void moe_region_request_cancel(void *ctx, struct moe_region_call *call)
{
    const struct moe_region_requests *s = ctx;
    struct moe_region_request *r = call->state;
    moe_engine_cancel(s->engine, &r->work);
}
