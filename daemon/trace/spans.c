/* SPDX-License-Identifier: Apache-2.0 */
/* The spans of one request, from its end until they are sent. */
#include "daemon/log.h"
#include "trace/inside.h"

#include <stdlib.h>
#include <string.h>

void moe_trace_free(struct moe_trace *trace)
{
    if (trace == NULL)
        return;
    free(trace->error);
    free(trace);
}

struct moe_trace *moe_trace_create(struct moe_tracer *t, const struct moe_trace_context *c,
                                   const char *name, uint64_t start_ns, uint32_t children)
{
    uint32_t spans = children + 1;
    struct moe_trace *trace = malloc(sizeof *trace + spans * sizeof *trace->spans);
    if (trace == NULL) {
        moe_trace_count(t, MOE_TRACE_DROPPED, spans);
        return NULL;
    }
    trace->context = *c;
    trace->error = NULL;
    trace->attribute_count = 0;
    trace->span_count = 1;
    trace->span_max = spans;
    trace->spans[0] = (struct moe_trace_span){.name = name, .start_ns = start_ns};
    return trace;
}

uint32_t moe_trace_add(struct moe_trace *trace, uint32_t parent, const char *name,
                       uint64_t start_ns, uint64_t end_ns)
{
    if (trace == NULL)
        return 0;
    MOE_INVARIANT(trace->span_count < trace->span_max && parent < trace->span_count);
    trace->spans[trace->span_count] =
        (struct moe_trace_span){.name = name,
                                .start_ns = start_ns,
                                .end_ns = end_ns < start_ns ? start_ns : end_ns,
                                .parent = parent};
    return trace->span_count++;
}

static void set(struct moe_trace *trace, struct moe_trace_attribute attribute)
{
    if (trace == NULL)
        return;
    MOE_INVARIANT(trace->attribute_count < MOE_TRACE_ATTRIBUTES_MAX);
    trace->attributes[trace->attribute_count++] = attribute;
}

void moe_trace_set_text(struct moe_trace *trace, const char *key, const char *text)
{
    set(trace, (struct moe_trace_attribute){.key = key, .text = text});
}

void moe_trace_set_number(struct moe_trace *trace, const char *key, int64_t number)
{
    set(trace, (struct moe_trace_attribute){.key = key, .number = number});
}

/* Texts may have bytes of clients, and a protobuf string must be UTF-8: a collector would refuse
 * the whole message. */
void moe_trace_fail(struct moe_trace *trace, const char *text)
{
    char escaped[MOE_STATUS_TEXT + 64];
    if (trace == NULL)
        return;
    moe_log_escape(escaped, sizeof escaped, text);
    free(trace->error);
    trace->error = strdup(escaped);
}

void moe_trace_finish(struct moe_tracer *t, struct moe_trace *trace, uint64_t end_ns)
{
    uint64_t position;
    if (trace == NULL)
        return;
    struct moe_trace_span *first = &trace->spans[0];
    first->end_ns = end_ns < first->start_ns ? first->start_ns : end_ns;
    if (!moe_trace_queue_put(&t->queue, trace, &position)) {
        moe_trace_count(t, MOE_TRACE_DROPPED, trace->span_count);
        moe_trace_free(trace);
        return;
    }
    if (position % MOE_TRACE_BATCH_TRACES == MOE_TRACE_BATCH_TRACES - 1)
        (void)sem_post(&t->wake); /* fails only where the count is at its limit */
}
