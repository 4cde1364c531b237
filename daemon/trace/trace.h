/* SPDX-License-Identifier: Apache-2.0 */
/* Tracing: W3C traceparent in, spans of requests out over OTLP/gRPC. README.md has what users see.
 *
 * A request gets a context when it arrives (moe_trace_begin). If it is sampled, its owner notes
 * times while it runs, and makes its spans when its answer is on its way: moe_trace_create,
 * moe_trace_add, moe_trace_finish. A thread of the tracer sends them. No function here waits. */
#ifndef MOE_TRACE_TRACE_H
#define MOE_TRACE_TRACE_H

#include "daemon/identity.h"
#include "daemon/metrics.h"

#include <stdint.h>

struct moe_tracer;
struct moe_trace;

/* ------------------------------------------------------------------ contexts */

enum { MOE_TRACE_PARENT_LENGTH = 55, MOE_TRACE_ID_TEXT = 33 };

/* Zero: no trace. */
struct moe_trace_context {
    uint8_t trace_id[16]; /* zeros: the request has no parent and is not sampled */
    uint8_t parent_id[8]; /* the caller's span; zeros: the request begins its trace */
    bool sampled;         /* its spans are to be sent */
};

/* Reads the value of a `traceparent` header; `text` needs no NUL. False, and `*out` is zero, unless
 * it has version 00 and its form exactly. Pure. */
bool moe_trace_parse(const char *text, size_t length, struct moe_trace_context *out);
/* The trace id as 32 hex digits, for logs; "" if the request belongs to no trace. */
void moe_trace_id_text(const struct moe_trace_context *c, char out[MOE_TRACE_ID_TEXT]);
/* [any thread] The context of a request that arrives. `traceparent`: the header's value, `length`
 * bytes; NULL: it has none. `t` NULL: zero. */
void moe_trace_begin(struct moe_tracer *t, const char *traceparent, size_t length,
                     struct moe_trace_context *out);
/* The same with the caller's context in binary form. An id of zeros: it has none. */
void moe_trace_begin_from(struct moe_tracer *t, const struct moe_trace_context *parent,
                          struct moe_trace_context *out);

/* ------------------------------------------------------------------ the tracer */

struct moe_tracer_config {
    const char *collector;             /* see moe_tracer_check */
    const struct moe_rpc_trust *trust; /* of https only; its token is not used */
    double sample;                     /* share of requests without a parent, 0 to 1 */
    const char *service_name;          /* "moe-worker"; static */
    struct moe_metrics *metrics;       /* NULL: none */
    /* 0: the defaults of README.md. */
    uint32_t queue_traces;  /* a power of two, at least 2 */
    uint32_t parents_per_s; /* sampled requests with a parent; as many at once */
    uint32_t flush_ms, send_ms, retry_ms;
};

/* Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID (not HOST:PORT, http://HOST:PORT or
 * https://HOST:PORT; https without a CA). `setting` is its name for the user. */
struct moe_status moe_tracer_check(const char *setting, const char *collector,
                                   bool has_ca) MOE_CHECKED;
/* Does not connect yet. Errors: those of moe_tracer_check, of the files of TLS; OUT_OF_MEMORY. */
struct moe_status moe_tracer_create(const struct moe_tracer_config *config,
                                    struct moe_tracer **out) MOE_CHECKED;
/* Sends what is queued, for at most a second. No other function runs. NULL is ignored. */
void moe_tracer_destroy(struct moe_tracer *t);
/* [any thread] Attributes of the process, for traces that are sent later. `id` outlives the tracer.
 * `t` NULL: nothing. */
void moe_tracer_set_instance(struct moe_tracer *t, const char *id);
void moe_tracer_set_slot(struct moe_tracer *t, uint32_t slot);

/* ------------------------------------------------------------------ spans of one request */

enum { MOE_TRACE_ATTRIBUTES_MAX = 12 };

/* All names, keys and texts are static. Times are of moe_clock_ns. Functions ignore a NULL
 * `trace`. */

/* The spans of a sampled request: its first span, and at most `children` more. The first one is of
 * kind SERVER. NULL if memory is missing, which is counted. */
struct moe_trace *moe_trace_create(struct moe_tracer *t, const struct moe_trace_context *c,
                                   const char *name, uint64_t start_ns, uint32_t children);
/* Adds a child of the span with number `parent` (0: the first one); returns its number. An end
 * before the start counts as the start. */
uint32_t moe_trace_add(struct moe_trace *trace, uint32_t parent, const char *name,
                       uint64_t start_ns, uint64_t end_ns);
/* Attributes of the first span, MOE_TRACE_ATTRIBUTES_MAX in all. */
void moe_trace_set_text(struct moe_trace *trace, const char *key, const char *text);
void moe_trace_set_number(struct moe_trace *trace, const char *key, int64_t number);
/* The first span has failed; takes a copy of the text. */
void moe_trace_fail(struct moe_trace *trace, const char *text);
/* [any thread] The request is over: queues its spans, or drops and counts them. Takes `trace`
 * over. */
void moe_trace_finish(struct moe_tracer *t, struct moe_trace *trace, uint64_t end_ns);

#endif
