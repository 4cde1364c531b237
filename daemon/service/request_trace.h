/* SPDX-License-Identifier: Apache-2.0 */
/* The spans of one Forward request or training call, made when its answer is on its way.
 * daemon/trace/README.md lists them. */
#ifndef MOE_SERVICE_REQUEST_TRACE_H
#define MOE_SERVICE_REQUEST_TRACE_H

#include "schedule/work.h"
#include "service/request.h"
#include "trace/trace.h"

/* How a sampled request has ended. */
struct moe_request_end {
    const struct moe_trace_context *context;
    const char *span;                  /* name of the first span; static */
    const struct moe_work *work;       /* its steps are those of `work->times`, which may be NULL */
    const struct moe_layer_spec *spec; /* NULL: no layer was found */
    const struct moe_status *status;
    uint64_t received_ns;
    uint64_t handed_back_ns; /* the engine reported its end; 0: the engine did not accept it */
    uint64_t end_ns;         /* the end of the answer's server_ns; of a failure: now */
};

/* Names of first spans. */
#define MOE_TRACE_FORWARD        "moe.v1.ExpertService/Forward"
#define MOE_TRACE_FORWARD_STREAM "moe.v1.ExpertService/ForwardStream" /* an item of it */
#define MOE_TRACE_RING           "moe.v1.ExpertService/Ring" /* a request of a ring; no method */

/* [any thread] Makes the spans and gives them to the tracer. */
void moe_request_trace_end(struct moe_tracer *t, const struct moe_request_end *e);

/* How a sampled training call has ended. */
struct moe_training_end {
    const struct moe_trace_context *context;
    const char *path; /* of its method; static */
    const struct moe_train_work *work;
    const struct moe_status *status;
    uint64_t received_ns;
    uint64_t handed_back_ns; /* the engine reported its end; 0: the engine did not get it */
    uint64_t end_ns;
};

/* [any thread] As moe_request_trace_end. */
void moe_training_trace_end(struct moe_tracer *t, const struct moe_training_end *e);

#endif
