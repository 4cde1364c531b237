/* SPDX-License-Identifier: Apache-2.0 */
/* The spans of one Forward request, made when its answer is on its way. daemon/trace/README.md
 * lists them. */
#ifndef MOE_SERVICE_REQUEST_TRACE_H
#define MOE_SERVICE_REQUEST_TRACE_H

#include "service/request.h"
#include "trace/trace.h"

/* How a sampled request has ended. */
struct moe_request_end {
    const struct moe_trace_context *context;
    bool streamed; /* an item of ForwardStream */
    const struct moe_request *request;
    const struct moe_status *status;
    uint64_t handed_back_ns; /* the engine reported its end; 0: the engine did not accept it */
    uint64_t end_ns;         /* the end of the answer's server_ns; of a failure: now */
};

/* [any thread] Makes the spans and gives them to the tracer. The steps come from
 * `request->work.times`, which may be NULL. */
void moe_request_trace_end(struct moe_tracer *t, const struct moe_request_end *e);

#endif
