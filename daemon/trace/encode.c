/* SPDX-License-Identifier: Apache-2.0 */
/* The batch as one OTLP message. All parts of the message are in arrays of one size, so that five
 * allocations make it. */
#include "base/build.h"
#include "base/clock.h"
#include "opentelemetry/proto/collector/trace/v1/trace_service.pb-c.h"
#include "trace/inside.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef Opentelemetry__Proto__Trace__V1__Span Span;
typedef Opentelemetry__Proto__Trace__V1__Status Status;
typedef Opentelemetry__Proto__Common__V1__AnyValue Value;
typedef Opentelemetry__Proto__Common__V1__KeyValue Attribute;

/* One attribute with its value. */
struct pair {
    Attribute attribute;
    Value value;
};

enum {
    RESOURCE_ATTRIBUTES = 4,
    ID_BYTES = 8,
    /* Bits of Span.flags above those of traceparent: bit 9 is valid; the parent is remote. */
    FLAG_HAS_REMOTE = 1 << 8,
    FLAG_REMOTE = 1 << 9,
    FLAG_SAMPLED = 1,
};

/* A message under construction. */
struct encoder {
    uint64_t unix_offset_ns; /* added to a monotonic time */
    Span *spans;
    Span **span_list;
    uint64_t *ids; /* of the spans */
    struct pair *pairs;
    Attribute **attributes;
    Status *statuses;
    size_t span_count, pair_count, status_count;
};

static char *text(const char *s)
{
    return (char *)(uintptr_t)s; /* protobuf-c only reads it */
}

static void add_attribute(struct encoder *e, const struct moe_trace_attribute *a)
{
    struct pair *p = &e->pairs[e->pair_count];
    e->attributes[e->pair_count++] = &p->attribute;
    opentelemetry__proto__common__v1__key_value__init(&p->attribute);
    opentelemetry__proto__common__v1__any_value__init(&p->value);
    p->attribute.key = text(a->key);
    p->attribute.value = &p->value;
    if (a->text != NULL) {
        p->value.value_case = OPENTELEMETRY__PROTO__COMMON__V1__ANY_VALUE__VALUE_STRING_VALUE;
        p->value.string_value = text(a->text);
    } else {
        p->value.value_case = OPENTELEMETRY__PROTO__COMMON__V1__ANY_VALUE__VALUE_INT_VALUE;
        p->value.int_value = a->number;
    }
}

static uint64_t unix_offset_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now); /* this clock is always there */
    return (uint64_t)now.tv_sec * MOE_NS_PER_S + (uint64_t)now.tv_nsec - moe_clock_ns();
}

static bool is_set(const uint8_t id[ID_BYTES])
{
    static const uint8_t none[ID_BYTES];
    return memcmp(id, none, ID_BYTES) != 0;
}

/* What only the request's span has. */
static void fill_first(struct encoder *e, struct moe_trace *trace, Span *out)
{
    out->kind = OPENTELEMETRY__PROTO__TRACE__V1__SPAN__SPAN_KIND__SPAN_KIND_SERVER;
    if (is_set(trace->context.parent_id)) {
        out->parent_span_id.data = trace->context.parent_id;
        out->parent_span_id.len = ID_BYTES;
        out->flags |= FLAG_REMOTE;
    }
    out->attributes = &e->attributes[e->pair_count];
    out->n_attributes = trace->attribute_count;
    for (uint32_t i = 0; i < trace->attribute_count; i++)
        add_attribute(e, &trace->attributes[i]);
    if (trace->error == NULL)
        return;
    Status *status = &e->statuses[e->status_count++];
    opentelemetry__proto__trace__v1__status__init(status);
    status->code = OPENTELEMETRY__PROTO__TRACE__V1__STATUS__STATUS_CODE__STATUS_CODE_ERROR;
    status->message = trace->error;
    out->status = status;
}

static void add_trace(struct moe_tracer *t, struct encoder *e, struct moe_trace *trace)
{
    uint64_t *ids = &e->ids[e->span_count];
    for (uint32_t i = 0; i < trace->span_count; i++) {
        const struct moe_trace_span *from = &trace->spans[i];
        Span *out = &e->spans[e->span_count];
        e->span_list[e->span_count++] = out;
        ids[i] = moe_trace_next_id(t);
        opentelemetry__proto__trace__v1__span__init(out);
        out->trace_id.data = trace->context.trace_id;
        out->trace_id.len = sizeof trace->context.trace_id;
        out->span_id.data = (uint8_t *)&ids[i];
        out->span_id.len = ID_BYTES;
        out->name = text(from->name);
        out->start_time_unix_nano = from->start_ns + e->unix_offset_ns;
        out->end_time_unix_nano = from->end_ns + e->unix_offset_ns;
        out->flags = FLAG_SAMPLED | FLAG_HAS_REMOTE;
        if (i == 0) {
            fill_first(e, trace, out);
            continue;
        }
        out->kind = OPENTELEMETRY__PROTO__TRACE__V1__SPAN__SPAN_KIND__SPAN_KIND_INTERNAL;
        out->parent_span_id.data = (uint8_t *)&ids[from->parent];
        out->parent_span_id.len = ID_BYTES;
    }
}

static bool allocate(struct moe_tracer *t, struct encoder *e)
{
    size_t pairs = RESOURCE_ATTRIBUTES, spans = t->batch_spans;
    for (size_t i = 0; i < t->batch_count; i++)
        pairs += t->batch[i]->attribute_count;
    *e = (struct encoder){.unix_offset_ns = unix_offset_ns()};
    e->spans = calloc(spans, sizeof *e->spans);
    e->span_list = calloc(spans, sizeof *e->span_list);
    e->ids = calloc(spans, sizeof *e->ids);
    e->pairs = calloc(pairs, sizeof *e->pairs);
    e->attributes = calloc(pairs, sizeof *e->attributes);
    e->statuses = calloc(t->batch_count, sizeof *e->statuses);
    return e->spans != NULL && e->span_list != NULL && e->ids != NULL && e->pairs != NULL &&
           e->attributes != NULL && e->statuses != NULL;
}

static void release(struct encoder *e)
{
    free(e->spans);
    free(e->span_list);
    free(e->ids);
    free(e->pairs);
    free(e->attributes);
    free(e->statuses);
}

static void add_process(struct moe_tracer *t, struct encoder *e)
{
    const char *instance = atomic_load(&t->instance);
    int64_t slot = atomic_load(&t->slot);
    add_attribute(e, &(struct moe_trace_attribute){.key = "service.name", .text = t->service_name});
    add_attribute(
        e, &(struct moe_trace_attribute){.key = "service.version", .text = moe_build_version()});
    if (instance[0] != '\0')
        add_attribute(
            e, &(struct moe_trace_attribute){.key = "service.instance.id", .text = instance});
    if (slot >= 0)
        add_attribute(e, &(struct moe_trace_attribute){.key = "moe.slot", .number = slot});
}

static uint8_t *pack(struct encoder *e, size_t resource_attributes, size_t *length)
{
    Opentelemetry__Proto__Common__V1__InstrumentationScope scope;
    Opentelemetry__Proto__Resource__V1__Resource resource;
    Opentelemetry__Proto__Trace__V1__ScopeSpans scope_spans, *scopes[] = {&scope_spans};
    Opentelemetry__Proto__Trace__V1__ResourceSpans resource_spans, *resources[] = {&resource_spans};
    Opentelemetry__Proto__Collector__Trace__V1__ExportTraceServiceRequest request;
    opentelemetry__proto__common__v1__instrumentation_scope__init(&scope);
    opentelemetry__proto__resource__v1__resource__init(&resource);
    opentelemetry__proto__trace__v1__scope_spans__init(&scope_spans);
    opentelemetry__proto__trace__v1__resource_spans__init(&resource_spans);
    opentelemetry__proto__collector__trace__v1__export_trace_service_request__init(&request);
    scope.name = text("moed");
    scope.version = text(moe_build_version());
    resource.attributes = e->attributes; /* they are the first ones */
    resource.n_attributes = resource_attributes;
    scope_spans.scope = &scope;
    scope_spans.spans = e->span_list;
    scope_spans.n_spans = e->span_count;
    resource_spans.resource = &resource;
    resource_spans.scope_spans = scopes;
    resource_spans.n_scope_spans = 1;
    request.resource_spans = resources;
    request.n_resource_spans = 1;
    *length =
        opentelemetry__proto__collector__trace__v1__export_trace_service_request__get_packed_size(
            &request);
    uint8_t *bytes = malloc(*length);
    if (bytes != NULL)
        opentelemetry__proto__collector__trace__v1__export_trace_service_request__pack(&request,
                                                                                       bytes);
    return bytes;
}

uint8_t *moe_trace_encode(struct moe_tracer *t, size_t *length)
{
    struct encoder e;
    uint8_t *bytes = NULL;
    if (allocate(t, &e)) {
        add_process(t, &e);
        size_t resource_attributes = e.pair_count;
        for (size_t i = 0; i < t->batch_count; i++)
            add_trace(t, &e, t->batch[i]);
        bytes = pack(&e, resource_attributes, length);
    }
    release(&e);
    return bytes;
}
