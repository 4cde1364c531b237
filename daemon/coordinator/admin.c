/* SPDX-License-Identifier: Apache-2.0 */
/* AdminService, for moectl. The owner thread answers calls, so each answer is one consistent state
 * of the machine. The machine logs every change with the reason from the request. */
#include "base/build.h"
#include "coordinator/service_state.h"

#include <stdlib.h>
#include <string.h>

enum { ADMIN_CALLS_MAX = 64 };

void moe_coordinator__reply(struct moe_rpc_call *call, const ProtobufCMessage *m)
{
    size_t length;
    uint8_t *bytes = moe_coordinator__pack(m, &length);
    if (bytes == NULL)
        moe_rpc_fail(call,
                     moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "coordinator"));
    else
        moe_rpc_reply(call, &(struct moe_rpc_out){.head = bytes, .head_length = length});
    free(bytes);
}

/* ------------------------------------------------------------------ methods */

void moe_coordinator__fill_host(const struct moe_membership_host *host, Moe__V1__Host *out)
{
    moe__v1__host__init(out);
    out->id = moe_coordinator__text(host->id);
    out->name = moe_coordinator__text(host->name);
    out->domain = moe_coordinator__text(host->domain);
    out->network_address = moe_coordinator__text(host->network_address);
}

static void fill_error(const struct moe_status *st, Moe__V1__Error *out)
{
    moe__v1__error__init(out);
    out->code = (uint32_t)st->code;
    if (st->reason != MOE_REASON_NONE)
        out->reason = moe_coordinator__text(moe_reason_name(st->reason));
    out->message = moe_coordinator__text(st->text);
    out->retry_after_ms = st->retry_after_ms;
}

static void fill_worker(const struct moe_membership_worker *w, Moe__V1__WorkerStatus *out,
                        Moe__V1__Error *error)
{
    moe__v1__worker_status__init(out);
    out->slot = w->slot;
    out->worker_id = moe_coordinator__text(w->worker_id);
    out->endpoint = moe_coordinator__text(w->endpoint);
    out->state = (Moe__V1__WorkerState)w->state;
    out->lease_remaining_ms = (int64_t)(w->lease_remaining_ns / MOE_NS_PER_MS);
    out->connected = w->connected;
    out->loaded_bytes = w->last.loaded_bytes;
    out->total_bytes = w->last.total_bytes;
    out->tokens = w->last.tokens;
    out->steps = w->last.steps;
    if (w->error->code == MOE_OK)
        return;
    fill_error(w->error, error);
    out->error = error;
}

void moe_coordinator__fill_layer(const struct moe_membership_layer *l, Moe__V1__LayerInfo *out)
{
    moe__v1__layer_info__init(out);
    out->layer = l->layer;
    out->hidden = l->hidden;
    out->experts = l->experts;
    out->top_k = l->top_k;
    out->intermediate = l->intermediate;
    out->zero_experts = l->zero_experts;
    out->routes_by_token_id = l->routes_by_token_id != 0;
    out->vocabulary = l->vocabulary;
    out->latent = l->latent;
    out->shared_intermediate = l->shared_intermediate;
    out->routed_encoding = (Moe__V1__WeightEncoding)l->routed_encoding;
    out->shared_encoding = (Moe__V1__WeightEncoding)l->shared_encoding;
    out->routed_activations = (Moe__V1__ActivationEncoding)l->routed_activations;
    out->shared_activations = (Moe__V1__ActivationEncoding)l->shared_activations;
}

static size_t fill_cordons(const struct moe_coordinator *c, uint32_t slots, Moe__V1__Cordon *out,
                           Moe__V1__Cordon **list)
{
    size_t count = 0;
    for (uint32_t s = 0; s < slots; s++) {
        const char *reason = moe_membership_cordon_reason(c->machine, s);
        if (reason == NULL)
            continue;
        moe__v1__cordon__init(&out[count]);
        out[count].slot = s;
        out[count].reason = moe_coordinator__text(reason);
        list[count] = &out[count];
        count++;
    }
    return count;
}

static void fill_store(const struct moe_coordinator *c, Moe__V1__GetStatusResponse *m)
{
    struct moe_etcd_report r;
    const char *store = c->etcd != NULL ? "etcd" : c->store != NULL ? "file" : "none";
    m->store = moe_coordinator__text(store);
    if (c->etcd == NULL)
        return;
    moe_etcd_report(c->etcd, &r);
    m->leader_lease_remaining_ms = (uint32_t)(r.remaining_ns / MOE_NS_PER_MS);
    m->etcd_errors = r.errors;
}

/* Fills `slots` and `experts` with the view in force. */
static void fill_live(const struct moe_coordinator *c, const struct moe_membership_group *g,
                      uint32_t slots[MOE_PLACEMENT_SLOTS_MAX],
                      uint32_t experts[MOE_PLACEMENT_SLOTS_MAX + 1], Moe__V1__GetStatusResponse *m)
{
    m->live_slots = slots;
    m->experts_by_live_copies = experts;
    if (g->epoch == 0)
        return;
    for (uint32_t s = 0; s < g->slots; s++)
        if ((g->live >> s & 1) != 0)
            slots[m->n_live_slots++] = s;
    moe_placement_count_copies(moe_membership_placement(c->machine), g->live, experts);
    m->n_experts_by_live_copies = g->replicas + 1;
}

/* Fills `spares` and `error`. */
static void fill_size(const struct moe_coordinator *c, const struct moe_membership_group *g,
                      uint32_t spares[MOE_PLACEMENT_SLOTS_MAX], Moe__V1__Error *error,
                      Moe__V1__GetStatusResponse *m)
{
    m->slots = moe_placement_slot_bound(g->places);
    m->size = g->size;
    m->max_workers = g->slots;
    m->scaling_to = g->scaling_to;
    m->spare_slots = spares;
    for (uint32_t s = 0; s < g->slots; s++) {
        struct moe_membership_worker w;
        if ((g->places >> s & 1) == 0 && moe_membership_worker(c->machine, s, &w) && w.taken)
            spares[m->n_spare_slots++] = s;
    }
    if (g->scale_error->code == MOE_OK)
        return;
    fill_error(g->scale_error, error);
    m->scale_error = error;
}

static struct moe_status get_status(struct moe_coordinator *c, struct admin_call *a,
                                    const void *message)
{
    (void)message;
    struct moe_membership_group g;
    moe_membership_group(c->machine, &g);
    Moe__V1__WorkerStatus workers[MOE_PLACEMENT_SLOTS_MAX], *worker_list[MOE_PLACEMENT_SLOTS_MAX];
    Moe__V1__Error errors[MOE_PLACEMENT_SLOTS_MAX];
    Moe__V1__Host hosts[MOE_PLACEMENT_SLOTS_MAX];
    Moe__V1__LayerInfo layers[MOE_PLACEMENT_LAYERS_MAX], *layer_list[MOE_PLACEMENT_LAYERS_MAX];
    Moe__V1__Cordon cordons[MOE_PLACEMENT_SLOTS_MAX], *cordon_list[MOE_PLACEMENT_SLOTS_MAX];
    size_t worker_count = 0;
    for (uint32_t s = 0; s < g.slots; s++) {
        struct moe_membership_worker w;
        if (!moe_membership_worker(c->machine, s, &w))
            continue;
        fill_worker(&w, &workers[worker_count], &errors[worker_count]);
        moe_coordinator__fill_host(&w.host, &hosts[worker_count]);
        if (w.host.id[0] != '\0')
            workers[worker_count].host = &hosts[worker_count];
        worker_list[worker_count] = &workers[worker_count];
        worker_count++;
    }
    for (size_t i = 0; i < g.layer_count; i++) {
        moe_coordinator__fill_layer(&g.layers[i], &layers[i]);
        layer_list[i] = &layers[i];
    }
    Moe__V1__GetStatusResponse m = MOE__V1__GET_STATUS_RESPONSE__INIT;
    m.version = moe_coordinator__text(moe_build_version());
    m.state = (Moe__V1__GroupState)g.state;
    m.reason = g.reason;
    m.epoch = g.epoch;
    uint32_t spares[MOE_PLACEMENT_SLOTS_MAX];
    Moe__V1__Error scale_error;
    fill_size(c, &g, spares, &scale_error, &m);
    m.n_workers = worker_count;
    m.workers = worker_list;
    m.model = moe_coordinator__text(g.model);
    m.family = moe_coordinator__text(g.family);
    m.n_layers = g.layer_count;
    m.layers = layer_list;
    m.placement_version = moe_placement_version(moe_membership_placement(c->machine));
    m.backend = moe_coordinator__text(g.backend);
    m.model_digest = moe_coordinator__text(
        moe_weights_digest(c->weights, g.fingerprint[0] != '\0' ? g.fingerprint : NULL));
    m.n_cordons = fill_cordons(c, g.slots, cordons, cordon_list);
    m.cordons = cordon_list;
    fill_store(c, &m);
    m.replicas = g.replicas;
    uint32_t live_slots[MOE_PLACEMENT_SLOTS_MAX], by_copies[MOE_PLACEMENT_SLOTS_MAX + 1];
    fill_live(c, &g, live_slots, by_copies, &m);
    m.uptime_ms = (moe_clock_ns() - c->started_ns) / MOE_NS_PER_MS;
    moe_coordinator__reply(a->call, &m.base);
    return moe_ok();
}

/* Expert e's slots in numbers[e * SLOTS_MAX ...]. */
static void fill_experts(const struct moe_placement *p, size_t index, uint32_t experts,
                         Moe__V1__ExpertPlacement *out, uint32_t *numbers)
{
    for (uint32_t e = 0; e < experts; e++) {
        const uint8_t *holders;
        moe__v1__expert_placement__init(&out[e]);
        out[e].expert = e;
        out[e].n_slots = moe_placement_holders(p, index, e, &holders);
        out[e].slots = numbers + (size_t)e * MOE_PLACEMENT_SLOTS_MAX;
        for (size_t i = 0; i < out[e].n_slots; i++)
            out[e].slots[i] = holders[i];
    }
}

static struct moe_status find_placement(struct moe_coordinator *c, const char *model,
                                        const struct moe_placement **out)
{
    struct moe_membership_group g;
    struct moe_added_info info;
    moe_membership_group(c->machine, &g);
    *out = moe_membership_placement(c->machine);
    if (model[0] == '\0' || strcmp(model, g.model) == 0)
        return moe_ok();
    if (!moe_added_find_name(c->models, model, &info))
        return moe_error(MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND, "no model has this name");
    if (info.layer_count == 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_MODEL_LOADING,
                         "no worker has opened the model yet");
    *out = info.placement;
    return moe_ok();
}

static struct moe_status get_placement(struct moe_coordinator *c, struct admin_call *a,
                                       const void *message)
{
    const Moe__V1__GetPlacementRequest *request = message;
    const struct moe_placement *p;
    size_t index;
    MOE_TRY(find_placement(c, request->model, &p));
    if (!moe_placement_find_layer(p, request->layer, &index))
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND, "layer %u is no MoE layer here",
                         request->layer);
    uint32_t experts = moe_placement_layer_at(p, index).experts;
    Moe__V1__ExpertPlacement list[MOE_PLACEMENT_EXPERTS_MAX], *pointers[MOE_PLACEMENT_EXPERTS_MAX];
    uint32_t numbers[MOE_PLACEMENT_EXPERTS_MAX * MOE_PLACEMENT_SLOTS_MAX];
    fill_experts(p, index, experts, list, numbers);
    for (uint32_t e = 0; e < experts; e++)
        pointers[e] = &list[e];
    Moe__V1__GetPlacementResponse m = MOE__V1__GET_PLACEMENT_RESPONSE__INIT;
    m.placement_version = moe_placement_version(p);
    m.n_experts = experts;
    m.experts = pointers;
    moe_coordinator__reply(a->call, &m.base);
    return moe_ok();
}

static struct moe_status drain_worker(struct moe_coordinator *c, struct admin_call *a,
                                      const void *message)
{
    const Moe__V1__DrainWorkerRequest *request = message;
    Moe__V1__DrainWorkerResponse m = MOE__V1__DRAIN_WORKER_RESPONSE__INIT;
    MOE_TRY(moe_membership_drain(c->machine, moe_clock_ns(), request->slot, request->reason,
                                 request->limit_ms, request->force, &m.epoch));
    moe_coordinator__reply(a->call, &m.base);
    return moe_ok();
}

/* The answer follows the write. */
static struct moe_status cordon_slot(struct moe_coordinator *c, struct admin_call *a,
                                     const void *message)
{
    const Moe__V1__CordonSlotRequest *request = message;
    Moe__V1__CordonSlotResponse m = MOE__V1__CORDON_SLOT_RESPONSE__INIT;
    uint64_t now = moe_clock_ns();
    if (request->uncordon)
        MOE_TRY(moe_membership_uncordon(c->machine, now, request->slot, request->reason));
    else
        MOE_TRY(moe_membership_cordon(c->machine, now, request->slot, request->reason));
    moe_coordinator__act(c);
    if (!moe_membership_cordons_saved(c->machine))
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO,
                         "the state of the group cannot be written: the change is lost when the "
                         "coordinator ends; see its log");
    moe_coordinator__reply(a->call, &m.base);
    return moe_ok();
}

static struct moe_status scale(struct moe_coordinator *c, struct admin_call *a, const void *message)
{
    const Moe__V1__ScaleRequest *request = message;
    Moe__V1__ScaleResponse m = MOE__V1__SCALE_RESPONSE__INIT;
    MOE_TRY(moe_membership_scale(c->machine, moe_clock_ns(), request->size, request->reason));
    moe_coordinator__reply(a->call, &m.base);
    return moe_ok();
}

static struct moe_status shut_down(struct moe_coordinator *c, struct admin_call *a,
                                   const void *message)
{
    const Moe__V1__ShutdownRequest *request = message;
    Moe__V1__ShutdownResponse m = MOE__V1__SHUTDOWN_RESPONSE__INIT;
    MOE_TRY(moe_membership_shutdown(c->machine, moe_clock_ns(), request->reason, request->limit_ms,
                                    &m.epoch));
    moe_coordinator__reply(a->call, &m.base);
    return moe_ok();
}

static struct moe_status accept_model(struct moe_coordinator *c, struct admin_call *a,
                                      const void *message)
{
    const Moe__V1__AcceptModelRequest *request = message;
    Moe__V1__AcceptModelResponse m = MOE__V1__ACCEPT_MODEL_RESPONSE__INIT;
    char forgotten[MOE_SHA256_HEX];
    MOE_TRY(moe_coordinator__accept_model(c, request->model, request->reason, forgotten));
    m.forgotten = forgotten;
    moe_coordinator__reply(a->call, &m.base);
    return moe_ok();
}

static Moe__V1__EventSeverity severity(enum moe_log_level level)
{
    return level == MOE_LOG_ERROR  ? MOE__V1__EVENT_SEVERITY__EVENT_SEVERITY_ERROR
           : level == MOE_LOG_WARN ? MOE__V1__EVENT_SEVERITY__EVENT_SEVERITY_WARNING
                                   : MOE__V1__EVENT_SEVERITY__EVENT_SEVERITY_INFO;
}

static struct moe_status list_events(struct moe_coordinator *c, struct admin_call *a,
                                     const void *message)
{
    const Moe__V1__ListEventsRequest *request = message;
    const struct moe_event *found[MOE_EVENTS_MAX];
    Moe__V1__Event list[MOE_EVENTS_MAX], *pointers[MOE_EVENTS_MAX];
    Moe__V1__ListEventsResponse m = MOE__V1__LIST_EVENTS_RESPONSE__INIT;
    m.n_events = moe_events_list(&c->events, request->after, request->limit, found);
    m.events = pointers;
    m.started_unix_ms = c->started_unix_ms;
    for (size_t i = 0; i < m.n_events; i++) {
        moe__v1__event__init(&list[i]);
        pointers[i] = &list[i];
        list[i].sequence = found[i]->sequence;
        list[i].unix_ms = found[i]->unix_ms;
        list[i].kind = (Moe__V1__EventKind)found[i]->kind;
        list[i].severity = severity(found[i]->level);
        list[i].slot = found[i]->slot == MOE_MEMBERSHIP_NO_SLOT ? -1 : (int32_t)found[i]->slot;
        list[i].epoch = found[i]->epoch;
        list[i].text = moe_coordinator__text(found[i]->text);
    }
    moe_coordinator__reply(a->call, &m.base);
    return moe_ok();
}

/* ------------------------------------------------------------------ calls */

static bool may_wait(enum admin_method method)
{
    return method == ADMIN_LOAD || method == ADMIN_UNLOAD || method == ADMIN_REBALANCE;
}

static void free_call(struct moe_coordinator *c, struct admin_call *a)
{
    moe_rpc_call_unref(a->call);
    free(a);
    atomic_fetch_sub(&c->admin_calls, 1);
}

static void run_call(struct moe_coordinator *c, struct event *e)
{
    static const struct {
        const ProtobufCMessageDescriptor *request;
        struct moe_status (*run)(struct moe_coordinator *c, struct admin_call *a,
                                 const void *message);
    } methods[ADMIN_METHODS] = {
        [ADMIN_STATUS] = {&moe__v1__get_status_request__descriptor, get_status},
        [ADMIN_PLACEMENT] = {&moe__v1__get_placement_request__descriptor, get_placement},
        [ADMIN_DRAIN] = {&moe__v1__drain_worker_request__descriptor, drain_worker},
        [ADMIN_CORDON] = {&moe__v1__cordon_slot_request__descriptor, cordon_slot},
        [ADMIN_SCALE] = {&moe__v1__scale_request__descriptor, scale},
        [ADMIN_SHUTDOWN] = {&moe__v1__shutdown_request__descriptor, shut_down},
        [ADMIN_ACCEPT] = {&moe__v1__accept_model_request__descriptor, accept_model},
        [ADMIN_EVENTS] = {&moe__v1__list_events_request__descriptor, list_events},
        [ADMIN_LOAD] = {&moe__v1__load_model_request__descriptor, moe_coordinator__load_model},
        [ADMIN_UNLOAD] = {&moe__v1__unload_model_request__descriptor,
                          moe_coordinator__unload_model},
        [ADMIN_MODELS] = {&moe__v1__list_models_request__descriptor, moe_coordinator__list_models},
        [ADMIN_REBALANCE] = {&moe__v1__rebalance_request__descriptor, moe_coordinator__rebalance},
    };
    struct admin_call *a = (struct admin_call *)((char *)e - offsetof(struct admin_call, event));
    struct moe_rpc_arena arena;
    void *message;
    struct moe_status st = moe_coordinator__refusal(c, false);
    if (st.code == MOE_OK)
        st = moe_rpc_msg_unpack(a->received, methods[a->method].request, &arena, &message);
    if (st.code == MOE_OK)
        st = methods[a->method].run(c, a, message);
    if (st.code != MOE_OK)
        moe_rpc_fail(a->call, st);
    moe_rpc_msg_free(a->received);
    if (!may_wait(a->method))
        free_call(c, a);
}

static void run_done(struct moe_coordinator *c, struct event *e)
{
    struct admin_call *a =
        (struct admin_call *)((char *)e - offsetof(struct admin_call, done_event));
    moe_coordinator__forget_call(c, a);
    free_call(c, a);
}

/* On a gRPC thread. Bounds the number and size of requests that wait for the owner thread. */
static struct moe_status admit(struct moe_coordinator *c, const struct moe_rpc_msg *m,
                               struct admin_call **out)
{
    if (moe_rpc_msg_length(m) > MOE_RPC_HEAD_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "a request may have %d bytes",
                         MOE_RPC_HEAD_MAX);
    if (atomic_fetch_add(&c->admin_calls, 1) >= ADMIN_CALLS_MAX) {
        atomic_fetch_sub(&c->admin_calls, 1);
        return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, 100,
                               "too many operator calls are waiting");
    }
    *out = calloc(1, sizeof **out);
    if (*out != NULL)
        return moe_ok();
    atomic_fetch_sub(&c->admin_calls, 1);
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "coordinator");
}

/* On a gRPC thread. */
static void on_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    const struct admin_context *method = ctx;
    struct admin_call *a;
    struct moe_status st = admit(method->coordinator, m, &a);
    if (st.code != MOE_OK) {
        moe_rpc_msg_free(m);
        moe_rpc_fail(call, st);
        return;
    }
    *a = (struct admin_call){.event.run = run_call,
                             .done_event.run = run_done,
                             .call = call,
                             .received = m,
                             .method = method->method};
    moe_rpc_call_ref(call);
    if (may_wait(a->method))
        moe_rpc_call_set_user(call, a);
    moe_coordinator__post(method->coordinator, &a->event);
}

/* On a gRPC thread, after on_message. The operator has its answer, or has left. */
static void on_done(struct moe_rpc_call *call, void *ctx)
{
    const struct admin_context *method = ctx;
    struct admin_call *a = moe_rpc_call_user(call);
    if (a != NULL)
        moe_coordinator__post(method->coordinator, &a->done_event);
}

void moe_coordinator__admin_methods(struct moe_coordinator *c, struct moe_rpc_method *out)
{
    static const char *const paths[ADMIN_METHODS] = {
        [ADMIN_STATUS] = "/moe.v1.AdminService/GetStatus",
        [ADMIN_PLACEMENT] = "/moe.v1.AdminService/GetPlacement",
        [ADMIN_DRAIN] = "/moe.v1.AdminService/DrainWorker",
        [ADMIN_CORDON] = "/moe.v1.AdminService/CordonSlot",
        [ADMIN_SCALE] = "/moe.v1.AdminService/Scale",
        [ADMIN_SHUTDOWN] = "/moe.v1.AdminService/Shutdown",
        [ADMIN_ACCEPT] = "/moe.v1.AdminService/AcceptModel",
        [ADMIN_EVENTS] = "/moe.v1.AdminService/ListEvents",
        [ADMIN_LOAD] = "/moe.v1.AdminService/LoadModel",
        [ADMIN_UNLOAD] = "/moe.v1.AdminService/UnloadModel",
        [ADMIN_MODELS] = "/moe.v1.AdminService/ListModels",
        [ADMIN_REBALANCE] = "/moe.v1.AdminService/Rebalance",
    };
    for (int i = 0; i < ADMIN_METHODS; i++) {
        c->admin[i] = (struct admin_context){.coordinator = c, .method = (enum admin_method)i};
        out[i] = (struct moe_rpc_method){.path = paths[i],
                                         .kind = MOE_RPC_UNARY,
                                         .message = on_message,
                                         .done = on_done,
                                         .ctx = &c->admin[i]};
    }
}
