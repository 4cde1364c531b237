/* SPDX-License-Identifier: Apache-2.0 */
/* The series of service/service_metrics.h. tokens / steps is the mean batch of this worker. The
 * series of dropped tokens stays 0: no token is dropped. */
#include "service/service_metrics.h"

#include "base/clock.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { CODES = MOE_UNAUTHENTICATED + 1 };

struct moe_service_metrics {
    struct moe_metrics *registry; /* NULL: nothing below is there */
    struct moe_engine *engine;
    struct moe_counter *requests[MOE_SERVICE_RPC_COUNT][CODES];
    struct moe_histogram *seconds[MOE_SERVICE_RPC_COUNT];
    /* By reason, or by code if the status has none. */
    struct moe_counter *refused[MOE_REASON_COUNT], *refused_code[CODES];
    struct moe_counter *tokens, *steps, *dropped, *nonfinite;
    struct moe_gauge *queued;
    _Atomic uint64_t steps_seen; /* of the engine's counter */
};

static const char *const rpc_names[MOE_SERVICE_RPC_COUNT] = {
    "Forward",  "ForwardStream", "Ring",           "Backward",       "OptimizerStep",
    "ZeroGrad", "SetFrozen",     "SaveCheckpoint", "LoadCheckpoint", "ExportAdapter"};

static struct moe_status add_rpc(struct moe_service_metrics *m, enum moe_service_rpc rpc)
{
    struct moe_metric_desc seconds = {
        .name = "moe_request_seconds",
        .help = "Time from a request's arrival to its answer, on this worker.",
        .labels = {{"rpc", rpc_names[rpc]}},
    };
    MOE_TRY(moe_metrics_add_histogram(m->registry, &seconds, moe_metrics_seconds_bounds,
                                      MOE_METRIC_SECONDS_BOUNDS, &m->seconds[rpc]));
    for (int code = 0; code < CODES; code++) {
        struct moe_metric_desc requests = {
            .name = "moe_requests_total",
            .help = "Requests answered, by method and status code; items of streams count singly.",
            .labels = {{"rpc", rpc_names[rpc]}, {"code", moe_code_name((enum moe_code)code)}},
        };
        MOE_TRY(moe_metrics_add_counter(m->registry, &requests, &m->requests[rpc][code]));
    }
    return moe_ok();
}

static struct moe_status add_counter(struct moe_service_metrics *m, const char *name,
                                     const char *help, struct moe_counter **out)
{
    const struct moe_metric_desc desc = {.name = name, .help = help};
    return moe_metrics_add_counter(m->registry, &desc, out);
}

static struct moe_status add_refused(struct moe_service_metrics *m, const char *reason,
                                     struct moe_counter **out)
{
    const struct moe_metric_desc desc = {
        .name = "moe_refused_total",
        .help = "Requests that were not answered with a result, by reason, or code without one.",
        .labels = {{"reason", reason}}};
    return moe_metrics_add_counter(m->registry, &desc, out);
}

/* A code and a reason may have one name: they share the series. */
static struct moe_status add_refusals(struct moe_service_metrics *m)
{
    for (int r = MOE_REASON_NONE + 1; r < MOE_REASON_COUNT; r++)
        MOE_TRY(add_refused(m, moe_reason_name((enum moe_reason)r), &m->refused[r]));
    for (int code = MOE_OK + 1; code < CODES; code++) {
        const char *name = moe_code_name((enum moe_code)code);
        enum moe_reason same = moe_reason_from_name(name);
        if (same != MOE_REASON_NONE)
            m->refused_code[code] = m->refused[same];
        else
            MOE_TRY(add_refused(m, name, &m->refused_code[code]));
    }
    return moe_ok();
}

static struct moe_status add_all(struct moe_service_metrics *m, bool training)
{
    const struct moe_metric_desc queued = {
        .name = "moe_queue_tokens",
        .help = "Tokens of accepted requests that are waiting or being computed."};
    int count = training ? MOE_SERVICE_RPC_COUNT : MOE_SERVICE_BACKWARD;
    for (int rpc = 0; rpc < count; rpc++)
        MOE_TRY(add_rpc(m, (enum moe_service_rpc)rpc));
    MOE_TRY(add_refusals(m));
    MOE_TRY(add_counter(m, "moe_tokens_total", "Tokens computed and answered.", &m->tokens));
    MOE_TRY(add_counter(m, "moe_steps_total", "Steps that this worker took part in.", &m->steps));
    MOE_TRY(add_counter(m, "moe_dropped_tokens_total",
                        "Tokens not computed by all of their experts: always 0.", &m->dropped));
    MOE_TRY(add_counter(m, "moe_nonfinite_total",
                        "Requests refused because router logits were NaN or infinite.",
                        &m->nonfinite));
    return moe_metrics_add_gauge(m->registry, &queued, &m->queued);
}

struct moe_status moe_service_metrics_create(struct moe_metrics *registry,
                                             struct moe_engine *engine, bool training,
                                             struct moe_service_metrics **out)
{
    struct moe_service_metrics *m = calloc(1, sizeof *m);
    if (m == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for metrics");
    m->registry = registry;
    m->engine = engine;
    struct moe_status st = registry != NULL ? add_all(m, training) : moe_ok();
    if (moe_failed(&st))
        free(m);
    else
        *out = m;
    return st;
}

void moe_service_metrics_destroy(struct moe_service_metrics *m)
{
    free(m);
}

void moe_service_metrics_end(struct moe_service_metrics *m, enum moe_service_rpc rpc,
                             const struct moe_status *status, uint64_t received_ns)
{
    if (m->registry == NULL)
        return;
    unsigned code = (unsigned)status->code < CODES ? (unsigned)status->code : MOE_UNKNOWN;
    moe_counter_add(m->requests[rpc][code], 1);
    moe_histogram_observe(m->seconds[rpc],
                          (double)(moe_clock_ns() - received_ns) / (double)MOE_NS_PER_S);
    if (code != MOE_OK && (unsigned)status->reason < MOE_REASON_COUNT &&
        status->reason != MOE_REASON_NONE)
        moe_counter_add(m->refused[status->reason], 1);
    else if (code != MOE_OK)
        moe_counter_add(m->refused_code[code], 1);
    if (status->reason == MOE_REASON_NONFINITE_LOGITS)
        moe_counter_add(m->nonfinite, 1);
}

void moe_service_metrics_entered(struct moe_service_metrics *m, uint32_t tokens)
{
    if (m->registry != NULL)
        moe_gauge_add(m->queued, tokens);
}

/* The engine counts steps; the series follows when a request ends. */
static void follow_steps(struct moe_service_metrics *m)
{
    struct moe_engine_counters counters;
    moe_engine_read_counters(m->engine, &counters);
    uint64_t seen = atomic_load(&m->steps_seen);
    while (counters.steps > seen) {
        if (atomic_compare_exchange_weak(&m->steps_seen, &seen, counters.steps)) {
            moe_counter_add(m->steps, counters.steps - seen);
            return;
        }
    }
}

void moe_service_metrics_left(struct moe_service_metrics *m, uint32_t tokens, bool computed)
{
    if (m->registry == NULL)
        return;
    moe_gauge_add(m->queued, -(double)tokens);
    if (computed)
        moe_counter_add(m->tokens, tokens);
    follow_steps(m);
}
