/* SPDX-License-Identifier: Apache-2.0 */
/* The four methods; see service/service.h. A request lives from its message until both the
 * transport and the engine are done with it: `references` counts them. Handlers run on the call's
 * shard, `done` on the engine's thread; a stream's lock guards the state that both use. */
#include "service/service.h"

#include "base/build.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "daemon/lease.h"
#include "daemon/log.h"
#include "group/report.h"
#include "moe/v1/expert.pb-c.h"
#include "service/places.h"
#include "service/request.h"
#include "service/request_trace.h"
#include "service/service_metrics.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

/* A name and digest that were served. Requests may use them at any time, so they stay. */
struct served {
    struct moe_served_model model; /* points into `text` */
    struct served *next;
    char text[];
};

struct moe_service {
    struct moe_service_info info; /* as given; `slot` is the first value of the one below */
    struct moe_engine *engine;
    struct moe_staging *staging;
    struct moe_train *training; /* NULL = none */
    struct moe_models *models;  /* NULL = none */
    struct moe_service_metrics *metrics;
    _Atomic uint64_t epoch; /* of the committed view; 0 = none */
    _Atomic uint32_t slot;
    _Atomic bool draining;
    _Atomic bool awaited;               /* see struct moe_standing */
    const struct moe_lease_gate *lease; /* NULL: none is needed */
    struct moe_tracer *tracer;          /* NULL = none */
    struct moe_status (*may_retain)(void *ctx, const struct moe_rpc_call *call); /* as given */
    void *may_retain_ctx;
    _Atomic(const struct moe_served_model *) model;
    struct moe_places places;
    struct moe_mutex lock; /* of the endpoints and names */
    MOE_GUARDED_BY(lock) struct {
        struct served *served; /* each pair once; the group has few in its life */
        char **workers;        /* [worker_count], by slot */
        size_t worker_count;
        char *coordinator;
        char *training_endpoint;
    };
};

/* A ForwardStream call. */
struct stream {
    struct moe_service *service;
    struct moe_rpc_call *call;
    _Atomic uint32_t references; /* the call, and each request that is with the engine */
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        struct forward *running; /* requests that are with the engine, linked by next and prev */
        uint32_t open;           /* requests without a sent answer */
        bool paused;             /* the next message is read when `open` falls */
        bool half_closed;        /* ends with its last running request */
        bool over;               /* cancelled: no request goes to the engine */
    };
};

/* A request that is with the engine. */
struct forward {
    struct moe_request request;
    struct moe_service *service;
    struct moe_rpc_call *call;   /* one reference while the engine has the request */
    struct stream *stream;       /* NULL for a unary call */
    _Atomic uint32_t references; /* the engine; a unary call */
    struct forward *next, *prev; /* in stream->running */
    struct moe_trace_context trace;
    struct moe_work_times *times; /* NULL: not sampled, or no memory */
};

/* --------------------------------------------------------------- life of a request */

static struct moe_request_context context_of(struct moe_service *s, const struct moe_rpc_call *call)
{
    struct moe_request_context c = {.info = &s->info,
                                    .staging = s->staging,
                                    .models = s->models,
                                    .training = s->training,
                                    .weights_version = moe_engine_weights_version(s->engine),
                                    .may_retain = s->may_retain,
                                    .may_retain_ctx = s->may_retain_ctx,
                                    .call = call};
    moe_service_read(s, &c.worker);
    return c;
}

struct moe_status moe_service_out_of_memory(void)
{
    return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, 100, "out of memory");
}

static void drop_forward(struct forward *f)
{
    if (atomic_fetch_sub(&f->references, 1) != 1)
        return;
    moe_request_release(&f->request);
    free(f->times);
    free(f);
}

static enum moe_service_rpc rpc_of(const struct forward *f)
{
    return f->stream != NULL ? MOE_SERVICE_FORWARD_STREAM : MOE_SERVICE_FORWARD;
}

/* One line for each request, at level debug. */
static void log_end(const struct forward *f, const struct moe_status *status)
{
    const struct moe_request *r = &f->request;
    char id[24], trace[MOE_TRACE_ID_TEXT];
    struct moe_log_fields about = {0};
    if (!moe_log_is_on(MOE_LOG_DEBUG))
        return;
    (void)snprintf(id, sizeof id, "%" PRIu64, r->id);
    moe_trace_id_text(&f->trace, trace);
    if (f->stream != NULL)
        about.request = id;
    if (trace[0] != '\0')
        about.trace = trace;
    if (r->spec != NULL)
        about.layer_plus_one = r->spec->layer + 1;
    moe_log_write_about(MOE_LOG_DEBUG, &about, "%s: %u tokens, %s after %" PRIu64 " us%s%s",
                        f->stream != NULL ? "ForwardStream" : "Forward", r->work.tokens,
                        moe_code_name(status->code), (moe_clock_ns() - r->received_ns) / 1000,
                        moe_failed(status) ? ": " : "", moe_failed(status) ? status->text : "");
}

static void record(struct forward *f, const struct moe_status *status)
{
    log_end(f, status);
    moe_service_metrics_end(f->service->metrics, rpc_of(f), status, f->request.received_ns);
}

/* Before the request is parsed. */
static void begin_trace(struct forward *f)
{
    size_t length;
    if (f->service->tracer == NULL)
        return;
    const char *parent = moe_rpc_call_header(f->call, "traceparent", &length);
    moe_trace_begin(f->service->tracer, parent, length, &f->trace);
    if (f->trace.sampled)
        f->times = calloc(1, sizeof *f->times); /* without memory, steps are not shown */
}

/* `handed_back_ns` 0: the engine has not had the request. */
static void end_trace(struct forward *f, const struct moe_status *status, uint64_t handed_back_ns)
{
    const uint64_t answered_ns = f->request.answered_ns;
    if (!f->trace.sampled)
        return;
    const struct moe_request_end end = {.context = &f->trace,
                                        .span = f->stream != NULL ? MOE_TRACE_FORWARD_STREAM
                                                                  : MOE_TRACE_FORWARD,
                                        .work = &f->request.work,
                                        .spec = f->request.spec,
                                        .status = status,
                                        .received_ns = f->request.received_ns,
                                        .handed_back_ns = handed_back_ns,
                                        .end_ns = answered_ns != 0 ? answered_ns : moe_clock_ns()};
    moe_request_trace_end(f->service->tracer, &end);
}

/* A request that the engine has not accepted. */
static void record_refusal(struct forward *f, const struct moe_status *status)
{
    record(f, status);
    end_trace(f, status, 0);
}

static void stream_answered(struct forward *f, const struct moe_rpc_out *out);

/* The engine's thread: the end of a request that it had accepted. Its spans are made when the
 * answer has left. */
static void forward_done(struct moe_work *work, struct moe_status status)
{
    struct forward *f = work->user;
    const uint64_t handed_back_ns = f->trace.sampled ? moe_clock_ns() : 0;
    uint8_t head[MOE_REQUEST_HEAD_MAX];
    struct moe_rpc_out out;
    if (!moe_failed(&status) && !moe_service_may_answer(f->service))
        status = moe_request_lease_lost(); /* the weights may be old */
    moe_service_metrics_left(f->service->metrics, work->tokens, !moe_failed(&status));
    record(f, &status);
    if (!moe_failed(&status))
        moe_request_answer(&f->request, head, &out);
    else if (f->stream != NULL)
        moe_request_answer_error(f->request.id, &status, head, &out);
    if (f->stream != NULL)
        stream_answered(f, &out);
    else if (moe_failed(&status))
        moe_rpc_fail(f->call, status);
    else
        moe_rpc_reply(f->call, &out);
    moe_request_finish(&f->request);
    end_trace(f, &status, handed_back_ns);
    moe_rpc_call_unref(f->call);
    drop_forward(f);
}

/* Gives a checked request and a reference to its call to the engine; takes both back on failure. */
static struct moe_status submit(struct forward *f)
{
    uint32_t tokens = f->request.work.tokens; /* the request may be done before submit returns */
    struct moe_service *s = f->service;
    f->request.work.deadline_ns = moe_rpc_call_deadline(f->call);
    f->request.work.done = forward_done;
    f->request.work.user = f;
    moe_rpc_call_ref(f->call);
    moe_service_metrics_entered(s->metrics, tokens);
    struct moe_status st = moe_engine_submit(s->engine, &f->request.work);
    if (moe_failed(&st)) {
        moe_service_metrics_left(s->metrics, tokens, false);
        moe_rpc_call_unref(f->call);
    }
    return st;
}

/* Parses `m` into a new request that has one reference. `*id` is the number of a stream's item,
 * also on failure. */
static struct moe_status parse_forward(struct moe_service *s, struct moe_rpc_call *call,
                                       struct stream *stream, struct moe_rpc_msg *m,
                                       struct forward **out, uint64_t *id)
{
    struct forward *f = calloc(1, sizeof *f);
    *id = 0;
    *out = NULL;
    if (f == NULL)
        return moe_service_out_of_memory();
    f->service = s;
    f->call = call;
    f->stream = stream;
    atomic_store(&f->references, 1);
    begin_trace(f);
    struct moe_request_context context = context_of(s, call);
    struct moe_status st = moe_request_parse(&f->request, &context, m);
    *id = f->request.id;
    f->request.work.times = f->times;
    if (!moe_failed(&st)) {
        *out = f;
        return st;
    }
    record_refusal(f, &st);
    drop_forward(f);
    return st;
}

/* --------------------------------------------------------------------------- Forward */

static void unary_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct forward *f;
    uint64_t id;
    struct moe_status st = parse_forward(ctx, call, NULL, m, &f, &id);
    moe_rpc_msg_free(m);
    if (moe_failed(&st)) {
        moe_rpc_fail(call, st);
        return;
    }
    f->request.id = 0; /* for items of streams only */
    atomic_fetch_add(&f->references, 1);
    moe_rpc_call_set_user(call, f);
    st = submit(f);
    if (moe_failed(&st)) {
        record_refusal(f, &st);
        moe_rpc_fail(call, st);
        drop_forward(f); /* the engine's reference; the call's goes with `done` */
    }
}

static void unary_cancelled(struct moe_rpc_call *call, void *ctx)
{
    struct moe_service *s = ctx;
    struct forward *f = moe_rpc_call_user(call);
    if (f != NULL)
        moe_engine_cancel(s->engine, &f->request.work);
}

static void unary_done(struct moe_rpc_call *call, void *ctx)
{
    (void)ctx;
    struct forward *f = moe_rpc_call_user(call);
    if (f != NULL)
        drop_forward(f);
}

/* --------------------------------------------------------------------- ForwardStream */

static void drop_stream(struct stream *s)
{
    if (atomic_fetch_sub(&s->references, 1) != 1)
        return;
    moe_mutex_destroy(&s->lock);
    free(s);
}

static void stream_started(struct moe_rpc_call *call, void *ctx)
{
    struct stream *s = calloc(1, sizeof *s);
    if (s == NULL) {
        moe_rpc_fail(call, moe_service_out_of_memory());
        return;
    }
    s->service = ctx;
    s->call = call;
    atomic_store(&s->references, 1);
    moe_mutex_init(&s->lock);
    moe_rpc_call_set_user(call, s);
}

static void link_running(struct stream *s, struct forward *f) MOE_REQUIRES(s->lock)
{
    f->prev = NULL;
    f->next = s->running;
    if (s->running != NULL)
        s->running->prev = f;
    s->running = f;
}

static void unlink_running(struct stream *s, struct forward *f) MOE_REQUIRES(s->lock)
{
    if (f->prev != NULL)
        f->prev->next = f->next;
    else
        s->running = f->next;
    if (f->next != NULL)
        f->next->prev = f->prev;
}

/* Takes a request off the running list; the last one ends a half-closed stream. */
static void stop_running(struct stream *s, struct forward *f)
{
    moe_mutex_lock(&s->lock);
    unlink_running(s, f);
    bool finish = s->half_closed && s->running == NULL;
    moe_mutex_unlock(&s->lock);
    if (finish)
        moe_rpc_finish(s->call);
}

/* The engine's thread. Queues the answer before the request leaves the list, so that the stream
 * ends after it. */
static void stream_answered(struct forward *f, const struct moe_rpc_out *out)
{
    struct stream *s = f->stream;
    moe_rpc_send(s->call, out);
    stop_running(s, f);
    drop_stream(s);
}

static void send_error(struct stream *s, uint64_t id, const struct moe_status *error)
{
    uint8_t head[MOE_REQUEST_HEAD_MAX];
    struct moe_rpc_out out;
    moe_request_answer_error(id, error, head, &out);
    moe_rpc_send(s->call, &out);
}

/* Gives a checked request to the engine. */
static struct moe_status stream_submit(struct stream *s, struct forward *f)
{
    moe_mutex_lock(&s->lock);
    bool over = s->over;
    if (!over)
        link_running(s, f);
    moe_mutex_unlock(&s->lock);
    if (over)
        return moe_error(MOE_CANCELLED, MOE_REASON_NONE, "cancelled");
    atomic_fetch_add(&s->references, 1);
    struct moe_status st = submit(f);
    if (moe_failed(&st)) {
        stop_running(s, f);
        drop_stream(s);
    }
    return st;
}

/* One item: answered by the engine, or at once with its error. */
static void take_item(struct stream *s, struct moe_rpc_msg *m)
{
    struct forward *f;
    uint64_t id;
    struct moe_status st = parse_forward(s->service, s->call, s, m, &f, &id);
    moe_rpc_msg_free(m);
    if (!moe_failed(&st)) {
        st = stream_submit(s, f);
        if (moe_failed(&st)) {
            record_refusal(f, &st);
            drop_forward(f);
        }
    }
    if (moe_failed(&st))
        send_error(s, id, &st);
}

static void stream_half_closed(struct stream *s)
{
    moe_mutex_lock(&s->lock);
    s->half_closed = true;
    bool finish = s->running == NULL;
    moe_mutex_unlock(&s->lock);
    if (finish)
        moe_rpc_finish(s->call);
}

static void stream_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    (void)ctx;
    struct stream *s = moe_rpc_call_user(call);
    if (s == NULL) { /* refused when it started */
        moe_rpc_msg_free(m);
        return;
    }
    if (m == NULL) {
        stream_half_closed(s);
        return;
    }
    moe_mutex_lock(&s->lock);
    s->open++;
    moe_mutex_unlock(&s->lock);
    take_item(s, m);
    moe_mutex_lock(&s->lock);
    s->paused = s->open >= MOE_SERVICE_STREAM_REQUESTS;
    bool read = !s->paused;
    moe_mutex_unlock(&s->lock);
    if (read)
        moe_rpc_read_next(call);
}

/* Every message sent is the answer of one item. */
static void stream_sent(struct moe_rpc_call *call, void *ctx)
{
    (void)ctx;
    struct stream *s = moe_rpc_call_user(call);
    moe_mutex_lock(&s->lock);
    s->open--;
    bool read = s->paused && s->open < MOE_SERVICE_STREAM_REQUESTS;
    if (read)
        s->paused = false;
    moe_mutex_unlock(&s->lock);
    if (read)
        moe_rpc_read_next(call);
}

/* The engine ends cancelled requests on its thread, so the list does not change meanwhile. */
static void stream_cancelled(struct moe_rpc_call *call, void *ctx)
{
    (void)ctx;
    struct stream *s = moe_rpc_call_user(call);
    if (s == NULL)
        return;
    moe_mutex_lock(&s->lock);
    s->over = true;
    for (struct forward *f = s->running; f != NULL; f = f->next)
        moe_engine_cancel(s->service->engine, &f->request.work);
    moe_mutex_unlock(&s->lock);
}

static void stream_done(struct moe_rpc_call *call, void *ctx)
{
    (void)ctx;
    struct stream *s = moe_rpc_call_user(call);
    if (s != NULL)
        drop_stream(s);
}

/* ------------------------------------------------------------ GetServerInfo, GetModel */

void moe_service_reply(struct moe_rpc_call *call, const ProtobufCMessage *answer)
{
    size_t length = protobuf_c_message_get_packed_size(answer);
    uint8_t *bytes = malloc(length + 1);
    if (bytes == NULL) {
        moe_rpc_fail(call, moe_service_out_of_memory());
        return;
    }
    protobuf_c_message_pack(answer, bytes);
    const struct moe_rpc_out out = {.head = bytes, .head_length = length};
    moe_rpc_reply(call, &out);
    free(bytes);
}

/* For a message, which has no text that is NULL. */
static char *text_or_empty(const char *text)
{
    static char none[] = "";
    return text != NULL ? (char *)(uintptr_t)text : none;
}

static void server_info_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    static char name[] = "moe-worker";
    static char stream[] = "forward_stream", routing[] = "return_routing", ids[] = "client_routing";
    static char training[] = "training", regions[] = "regions", parts[] = "batch_parts";
    char *extensions[6] = {stream, routing, ids, parts}, none[] = "";
    size_t extension_count = 4;
    struct moe_service *s = ctx;
    if (s->training != NULL)
        extensions[extension_count++] = training;
    if (s->info.regions)
        extensions[extension_count++] = regions;
    moe_rpc_msg_free(m);
    Moe__V1__GetServerInfoResponse answer;
    moe__v1__get_server_info_response__init(&answer);
    answer.name = name;
    answer.version = (char *)(uintptr_t)moe_build_version();
    answer.n_extensions = extension_count;
    answer.extensions = extensions;
    answer.max_message_bytes = s->info.max_message_bytes;
    answer.max_tokens_per_request = s->info.max_tokens_per_request;
    answer.max_tokens_per_step = s->info.max_tokens_per_step;
    answer.max_bytes_in_flight = s->info.max_bytes_in_flight;
    answer.slot = atomic_load(&s->slot);
    answer.epoch = atomic_load(&s->epoch);
    answer.backend = (char *)(uintptr_t)s->info.backend;
    answer.backend_asked = text_or_empty(s->info.backend_asked);
    answer.cuda_module = text_or_empty(s->info.cuda_module);
    answer.cuda_problem = text_or_empty(s->info.cuda_problem);
    char added[MOE_ADDED_MODELS_MAX][MOE_MODELS_NAME_BYTES], *models[MOE_ADDED_MODELS_MAX + 1];
    const size_t count = moe_models_list(s->models, answer.epoch, added);
    models[0] = (char *)(uintptr_t)atomic_load(&s->model)->name;
    for (size_t i = 0; i < count; i++)
        models[i + 1] = added[i];
    answer.n_models = answer.epoch != 0 ? count + 1 : 0;
    answer.models = models;
    moe_mutex_lock(&s->lock);
    answer.n_workers = s->worker_count;
    answer.workers = s->workers;
    answer.coordinator = s->coordinator != NULL ? s->coordinator : none;
    answer.training_endpoint = s->training_endpoint != NULL ? s->training_endpoint : none;
    moe_service_reply(call, &answer.base);
    moe_mutex_unlock(&s->lock);
}

/* A model as GetModel describes it. */
struct description {
    const struct moe_added_model *added; /* a reference; NULL: the default model */
    const char *name, *digest, *family;
    const struct moe_layer_spec *const *layers;
    size_t layer_count;
    uint64_t weights_version;
};

static struct moe_status describe_model(struct moe_service *s, struct moe_rpc_msg *m,
                                        struct description *out)
{
    const struct moe_served_model *served = atomic_load(&s->model);
    struct moe_rpc_arena arena;
    void *message;
    *out = (struct description){0};
    MOE_TRY(moe_rpc_msg_unpack(m, &moe__v1__get_model_request__descriptor, &arena, &message));
    const char *name = ((const Moe__V1__GetModelRequest *)message)->model;
    if (moe_request_wants_default(served, name)) {
        *out = (struct description){.name = served->name,
                                    .digest = served->digest,
                                    .family = s->info.family,
                                    .layers = s->info.layers,
                                    .layer_count = s->info.layer_count,
                                    .weights_version = moe_engine_weights_version(s->engine)};
        return moe_ok();
    }
    MOE_TRY(moe_models_take(s->models, name, &out->added));
    out->name = out->added->name;
    out->digest = out->added->digest;
    out->family = out->added->family;
    out->layers = out->added->layers;
    out->layer_count = out->added->layer_count;
    out->weights_version = 1;
    return moe_ok();
}

static struct moe_status reply_model(struct moe_service *s, struct moe_rpc_call *call,
                                     const struct description *d)
{
    size_t n = d->layer_count;
    Moe__V1__LayerInfo *layers = calloc(n + 1, sizeof *layers);
    Moe__V1__LayerInfo **list = calloc(n + 1, sizeof *list);
    bool complete = layers != NULL && list != NULL;
    for (size_t i = 0; complete && i < n; i++) {
        moe_report_layer(d->layers[i], &layers[i]);
        list[i] = &layers[i];
    }
    Moe__V1__GetModelResponse answer;
    moe__v1__get_model_response__init(&answer);
    answer.model = (char *)(uintptr_t)d->name;
    answer.model_digest = (char *)(uintptr_t)d->digest;
    answer.family = (char *)(uintptr_t)d->family;
    answer.n_layers = n;
    answer.layers = list;
    answer.weights_version = d->weights_version;
    answer.epoch = atomic_load(&s->epoch);
    if (complete)
        moe_service_reply(call, &answer.base);
    free(layers);
    free(list);
    return complete ? moe_ok() : moe_service_out_of_memory();
}

static void model_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct moe_service *s = ctx;
    struct description d;
    struct moe_status st = describe_model(s, m, &d);
    moe_rpc_msg_free(m);
    if (!moe_failed(&st))
        st = reply_model(s, call, &d);
    if (moe_failed(&st))
        moe_rpc_fail(call, st);
    if (d.added != NULL) {
        moe_models_finish(s->models, d.added);
        moe_models_unref(s->models, d.added);
    }
}

/* -------------------------------------------------------------------------- the service */

void moe_service_methods(struct moe_service *s, struct moe_rpc_method out[MOE_SERVICE_METHODS])
{
    const struct moe_rpc_method methods[MOE_SERVICE_METHODS] = {
        {.path = "/moe.v1.ExpertService/Forward",
         .kind = MOE_RPC_UNARY,
         .message = unary_message,
         .cancelled = unary_cancelled,
         .done = unary_done,
         .ctx = s},
        {.path = "/moe.v1.ExpertService/ForwardStream",
         .kind = MOE_RPC_STREAM,
         .endless = true, /* a drain ends it after the answers of all its requests */
         .started = stream_started,
         .message = stream_message,
         .sent = stream_sent,
         .cancelled = stream_cancelled,
         .done = stream_done,
         .ctx = s},
        {.path = "/moe.v1.ExpertService/GetServerInfo",
         .kind = MOE_RPC_UNARY,
         .message = server_info_message,
         .ctx = s},
        {.path = "/moe.v1.ExpertService/GetModel",
         .kind = MOE_RPC_UNARY,
         .message = model_message,
         .ctx = s},
    };
    memcpy(out, methods, sizeof methods);
}

struct moe_status moe_service_create(const struct moe_service_config *config,
                                     struct moe_service **out)
{
    if (config->info.max_message_bytes < 2 * MOE_REQUEST_HEAD_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "messages of %u bytes are too small", config->info.max_message_bytes);
    struct moe_service *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_service_out_of_memory();
    s->info = config->info;
    s->engine = config->engine;
    s->staging = config->staging;
    s->training = config->training;
    s->models = config->models;
    s->lease = config->lease;
    s->tracer = config->tracer;
    s->may_retain = config->may_retain;
    s->may_retain_ctx = config->may_retain_ctx;
    atomic_store(&s->slot, config->info.slot);
    struct moe_status st = moe_service_metrics_create(config->metrics, s->engine,
                                                      config->training != NULL, &s->metrics);
    if (moe_failed(&st)) {
        free(s);
        return st;
    }
    moe_mutex_init(&s->lock);
    moe_places_init(&s->places);
    st = moe_service_set_model(s, s->info.model, "");
    if (moe_failed(&st)) {
        moe_service_destroy(s);
        return st;
    }
    *out = s;
    return st;
}

static void free_strings(char **strings, size_t count)
{
    for (size_t i = 0; strings != NULL && i < count; i++)
        free(strings[i]);
    free(strings);
}

void moe_service_destroy(struct moe_service *s)
{
    if (s == NULL)
        return;
    moe_mutex_not_shared(&s->lock);
    moe_places_destroy(&s->places);
    free_strings(s->workers, s->worker_count);
    free(s->coordinator);
    free(s->training_endpoint);
    for (struct served *next, *each = s->served; each != NULL; each = next) {
        next = each->next;
        free(each);
    }
    moe_service_metrics_destroy(s->metrics);
    moe_mutex_destroy(&s->lock);
    free(s);
}

struct moe_status moe_service_set_view(struct moe_service *s, uint64_t epoch,
                                       const char *const *workers, size_t count)
{
    char **copy = calloc(count + 1, sizeof *copy);
    bool complete = copy != NULL;
    for (size_t i = 0; complete && i < count; i++) {
        copy[i] = strdup(workers[i]);
        complete = copy[i] != NULL;
    }
    if (!complete) {
        free_strings(copy, count);
        return moe_service_out_of_memory();
    }
    moe_mutex_lock(&s->lock);
    char **old = s->workers;
    size_t old_count = s->worker_count;
    s->workers = copy;
    s->worker_count = count;
    /* A view that does not form leaves the wait as it is. */
    bool ended = atomic_load(&s->epoch) != 0 || atomic_load(&s->awaited);
    atomic_store(&s->awaited, epoch == 0 && ended);
    atomic_store(&s->epoch, epoch);
    moe_mutex_unlock(&s->lock);
    free_strings(old, old_count);
    return moe_ok();
}

static struct served *new_served(const char *name, const char *digest)
{
    size_t name_bytes = strlen(name) + 1, digest_bytes = strlen(digest) + 1;
    struct served *each = malloc(sizeof *each + name_bytes + digest_bytes);
    if (each == NULL)
        return NULL;
    memcpy(each->text, name, name_bytes);
    memcpy(each->text + name_bytes, digest, digest_bytes);
    each->model = (struct moe_served_model){each->text, each->text + name_bytes};
    return each;
}

struct moe_status moe_service_set_model(struct moe_service *s, const char *name, const char *digest)
{
    moe_mutex_lock(&s->lock);
    struct served *each = s->served;
    while (each != NULL &&
           (strcmp(each->model.name, name) != 0 || strcmp(each->model.digest, digest) != 0))
        each = each->next;
    if (each == NULL && (each = new_served(name, digest)) != NULL) {
        each->next = s->served;
        s->served = each;
    }
    if (each != NULL)
        atomic_store(&s->model, &each->model);
    moe_mutex_unlock(&s->lock);
    return each != NULL ? moe_ok() : moe_service_out_of_memory();
}

static struct moe_status replace(struct moe_service *s, char **text, const char *by)
{
    char *copy = strdup(by);
    if (copy == NULL)
        return moe_service_out_of_memory();
    moe_mutex_lock(&s->lock);
    char *old = *text;
    *text = copy;
    moe_mutex_unlock(&s->lock);
    free(old);
    return moe_ok();
}

struct moe_status moe_service_set_coordinator(struct moe_service *s, const char *endpoint)
{
    return replace(s, &s->coordinator, endpoint);
}

struct moe_status moe_service_set_training_endpoint(struct moe_service *s, const char *endpoint)
{
    return replace(s, &s->training_endpoint, endpoint);
}

void moe_service_set_slot(struct moe_service *s, uint32_t slot)
{
    atomic_store(&s->slot, slot);
}

void moe_service_set_places(struct moe_service *s, const char *const *endpoints, size_t count)
{
    moe_places_set(&s->places, endpoints, count);
}

void moe_service_set_draining(struct moe_service *s)
{
    atomic_store(&s->draining, true);
}

void moe_service_give_up(struct moe_service *s)
{
    atomic_store(&s->awaited, false);
}

bool moe_service_needs_lease(const struct moe_service *s)
{
    return s->lease != NULL;
}

bool moe_service_may_answer(const struct moe_service *s)
{
    return moe_lease_gate_held(s->lease);
}

void moe_service_read(struct moe_service *s, struct moe_standing *out)
{
    *out = (struct moe_standing){.places = &s->places,
                                 .epoch = atomic_load(&s->epoch),
                                 .draining = atomic_load(&s->draining),
                                 .awaited = atomic_load(&s->awaited),
                                 .lease_lost = !moe_service_may_answer(s),
                                 .model = atomic_load(&s->model)};
}

struct moe_service_metrics *moe_service_counts(struct moe_service *s)
{
    return s->metrics;
}

void moe_service_worker(struct moe_service *s, uint32_t slot, char *out, size_t capacity)
{
    moe_mutex_lock(&s->lock);
    (void)snprintf(out, capacity, "%s", slot < s->worker_count ? s->workers[slot] : "");
    moe_mutex_unlock(&s->lock);
}
