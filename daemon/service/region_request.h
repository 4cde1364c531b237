/* SPDX-License-Identifier: Apache-2.0 */
/* One request of a ring, from its checked copy to its completion. It takes the same way as a
 * Forward: the same checks, queue, steps and errors. x and the outputs stay in the client's
 * memory; steps copy their rows. ids and weights in host memory are copied here, then checked;
 * those in a device's memory are copied and checked by each step. Token ids lie in host memory
 * only: they are copied, checked and looked up here. */
#ifndef MOE_SERVICE_REGION_REQUEST_H
#define MOE_SERVICE_REGION_REQUEST_H

#include "engine/engine.h"
#include "regions/host.h"
#include "service/service.h"
#include "trace/trace.h"

/* Input of the checks, and where requests go. All borrowed. */
struct moe_region_requests {
    struct moe_service_info info;
    struct moe_service *service; /* knows the view */
    struct moe_engine *engine;
    struct moe_staging *staging;
    struct moe_tracer *tracer; /* NULL = none */
};

/* Of a call. */
struct moe_region_request {
    struct moe_work work;
    const struct moe_region_requests *requests;
    struct moe_region_call *call;
    struct moe_buffer *ids, *weights; /* NULL = none */
    struct moe_trace_context trace;   /* `work.times` is its memory for steps */
};

/* Hooks of the host (regions/host.h); `ctx` is a struct moe_region_requests. */
struct moe_status moe_region_request_layer(void *ctx, uint32_t layer,
                                           struct moe_ring_layer *out) MOE_CHECKED;
void moe_region_request_begin(void *ctx, struct moe_region_call *call);
void moe_region_request_refused(void *ctx, const struct moe_region_call *call,
                                const struct moe_status *why);
void moe_region_request_cancel(void *ctx, struct moe_region_call *call);

#endif
