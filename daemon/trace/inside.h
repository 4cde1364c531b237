/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of this room share; only they include it. */
#ifndef MOE_TRACE_INSIDE_H
#define MOE_TRACE_INSIDE_H

#include "rpc/client.h"
#include "trace/queue.h"
#include "trace/trace.h"

#include <pthread.h>
#include <semaphore.h>

enum {
    MOE_TRACE_BATCH_TRACES = 256,
    MOE_TRACE_BATCH_SPANS = 4096, /* about 500 KB; receivers take 4 MiB by default */
};

struct moe_trace_span {
    const char *name;
    uint64_t start_ns, end_ns;
    uint32_t parent; /* number of another span; of the first one: without meaning */
};

struct moe_trace_attribute {
    const char *key, *text; /* text NULL: a number */
    int64_t number;
};

struct moe_trace {
    struct moe_trace_context context;
    char *error; /* UTF-8; NULL: no failure */
    struct moe_trace_attribute attributes[MOE_TRACE_ATTRIBUTES_MAX];
    uint32_t attribute_count;
    uint32_t span_count, span_max;
    struct moe_trace_span spans[]; /* [span_max]; the first is the request */
};

enum moe_trace_result {
    MOE_TRACE_EXPORTED,
    MOE_TRACE_DROPPED,
    MOE_TRACE_FAILED,
    MOE_TRACE_REJECTED,
    MOE_TRACE_RESULTS
};

struct moe_tracer {
    struct moe_trace_queue queue;
    _Atomic uint64_t id_state; /* splitmix64, from a random start: ids do not repeat */
    uint64_t threshold;        /* a root is sampled if a random number is at most this */
    bool samples_roots;        /* false: none is */
    uint64_t parent_ns;        /* one sampled request with a parent in this time, */
    uint64_t parents_ns;       /* and as many at once as in this time */
    /* When so many would be due as have been sampled; behind now: there is room for more. */
    _Atomic uint64_t parents_until;
    struct moe_counter *capped; /* NULL without metrics */
    const char *service_name;
    _Atomic(const char *) instance;                  /* "": not known yet */
    _Atomic int64_t slot;                            /* -1: not known yet */
    struct moe_counter *counters[MOE_TRACE_RESULTS]; /* NULL without metrics */
    uint64_t flush_ns, send_ns, retry_ns;
    struct moe_rpc_client *client;
    struct moe_rpc_channel *channel;
    pthread_t thread;
    bool started;
    const struct moe_tracer_config *config; /* until `opened` */
    sem_t opened;                           /* the thread has set `status`: of the channel */
    sem_t wake;                             /* the thread has something to do */
    atomic_bool stopping;
    _Atomic uint64_t stop_at; /* with `stopping`: nothing is sent after this */

    /* The thread's. */
    struct moe_trace *batch[MOE_TRACE_BATCH_TRACES];
    size_t batch_count;
    uint64_t batch_spans;
    bool failing; /* the log has said so */

    /* Of the call in flight: written by the client's thread before `answered`. */
    atomic_bool answered;
    struct moe_status status;
    int64_t rejected;
};

/* Not 0, and not the same twice in a process. */
uint64_t moe_trace_next_id(struct moe_tracer *t);
void moe_trace_count(struct moe_tracer *t, enum moe_trace_result result, uint64_t spans);
/* NULL is ignored. */
void moe_trace_free(struct moe_trace *trace);
/* The batch as an ExportTraceServiceRequest; the caller frees it. NULL: out of memory. */
uint8_t *moe_trace_encode(struct moe_tracer *t, size_t *length);

#endif
