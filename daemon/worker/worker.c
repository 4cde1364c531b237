/* The hooks of the group come from its two threads: what changes the view (load, form, serve,
 * leave) runs on the jobs thread alone, so `session` and `view` need no lock. */
#include "worker/worker.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/wait.h"
#include "descriptors.h"
#include "rpc/client.h"
#include "rpc/server.h"
#include "worker/group.h"
#include "worker/loader.h"
#include "worker/peers.h"
#include "worker/service.h"
#include "worker/training.h"
#include "worker/training_service.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

enum {
    ENDPOINT_BYTES = 256,
    METHODS = MOE_SERVICE_METHODS + 1 + MOE_TRAINING_SERVICE_METHODS,
    SERVER_SHARDS = 2,
    WAITING_READS = 256,    /* large calls that may wait for their turn to be read */
    STREAMS_MAX = 256,      /* calls per connection */
    READ_MS = 15000,        /* a request that takes longer to arrive gives its permit to others */
    LAST_ANSWERS_MS = 1000, /* time for answers to leave once everything is decided */
    GATHER_BUDGETS = 5,     /* an all-gather may take this many wait budgets */
    NOTICE_MS = 200,        /* while clients still get a typed refusal; a closed door gives none */
    REFORM_MS = 5000,       /* requests wait this long for a new view */
    LEFT_RETRY_MS = 100,
};

static const char *const health_services[] = {"", "moe.v1.ExpertService"};

struct moe_worker {
    struct moe_worker_config config;
    char endpoint[ENDPOINT_BYTES], worker_id[ENDPOINT_BYTES];
    uint64_t incarnation;

    struct moe_device *device;
    struct moe_model *model;
    struct moe_loader *loader;
    struct moe_engine *engine;
    struct moe_staging *staging;
    struct moe_staging *training_staging; /* Backward calls that wait take nothing from Forward */
    struct moe_service *service;
    struct moe_train *train; /* NULL: no training, as is the next */
    struct moe_training_service *training_service;
    struct moe_peers *peers;
    struct moe_rpc_client *client;
    struct moe_rpc_server *server;
    struct moe_group *group;
    pthread_mutex_t told_lock;
    bool may_tell; /* under told_lock: `group` is there, whatever a client asks for */
    struct moe_gauge *epoch_gauge;

    /* Jobs thread only. */
    struct moe_session *session; /* formed; NULL = none */
    struct {
        uint64_t epoch;
        uint32_t slots, max_tokens;
        char endpoints[MOE_MAX_SLOTS][ENDPOINT_BYTES]; /* "" where a slot is empty */
    } view;                                            /* of the session */

    _Atomic uint64_t epoch; /* served; 0 = none */
    atomic_bool draining;
};

/* ----------------------------------------------------- engine and peers, joined together */

static void announce(void *ctx, uint32_t layer, enum moe_step_kind kind, enum moe_dtype dtype,
                     uint32_t tokens)
{
    struct moe_worker *w = ctx;
    moe_peers_announce(w->peers, layer, kind, dtype, tokens);
}

static void announce_training(void *ctx, const struct moe_ticket *call, uint32_t tokens)
{
    struct moe_worker *w = ctx;
    moe_peers_announce_training(w->peers, call, tokens);
}

static void finished(void *ctx, const struct moe_ticket *ticket, struct moe_status status,
                     uint64_t lost_slots)
{
    struct moe_worker *w = ctx;
    moe_peers_finished(w->peers, ticket, &status);
    if (moe_failed(&status))
        moe_group_report_lost(w->group, ticket->epoch, lost_slots, status);
}

static void run_ticket(void *ctx, const struct moe_ticket *ticket)
{
    struct moe_worker *w = ctx;
    moe_engine_run(w->engine, ticket);
}

/* A client's call, which may come before the group has begun and after it has ended. */
static void told(void *ctx)
{
    struct moe_worker *w = ctx;
    pthread_mutex_lock(&w->told_lock);
    if (w->may_tell)
        moe_group_try_again(w->group);
    pthread_mutex_unlock(&w->told_lock);
}

static void set_may_tell(struct moe_worker *w, bool may_tell)
{
    pthread_mutex_lock(&w->told_lock);
    w->may_tell = may_tell;
    pthread_mutex_unlock(&w->told_lock);
}

static void listen(void *ctx)
{
    struct moe_worker *w = ctx;
    if (w->peers != NULL) /* the engine was there before */
        moe_peers_listen(w->peers);
}

static void lost(void *ctx, uint64_t epoch, uint64_t slots, struct moe_status why)
{
    struct moe_worker *w = ctx;
    moe_group_report_lost(w->group, epoch, slots, why);
}

/* ------------------------------------------------------------------- views: jobs thread */

static void set_health(struct moe_worker *w, bool serving)
{
    for (size_t i = 0; i < sizeof health_services / sizeof *health_services; i++)
        moe_rpc_server_set_health(w->server, health_services[i], serving);
}

static struct moe_status tell_service(struct moe_worker *w, uint64_t epoch)
{
    const char *endpoints[MOE_MAX_SLOTS];
    for (uint32_t s = 0; s < w->view.slots; s++)
        endpoints[s] = w->view.endpoints[s];
    return moe_service_set_view(w->service, epoch, endpoints, epoch != 0 ? w->view.slots : 0);
}

static void set_epoch(struct moe_worker *w, uint64_t epoch)
{
    atomic_store(&w->epoch, epoch);
    if (w->epoch_gauge != NULL)
        moe_gauge_set(w->epoch_gauge, (double)epoch);
}

static void leave_view(void *ctx)
{
    struct moe_worker *w = ctx;
    if (w->session == NULL)
        return;
    set_health(w, false);
    set_epoch(w, 0);
    struct moe_status st = tell_service(w, 0);
    if (moe_failed(&st))
        moe_log_error("service: %s", st.text);
    moe_peers_stop(w->peers);
    moe_engine_stop_view(w->engine);
    w->config.backend->session_leave(w->session);
    w->session = NULL;
}

/* Activations are worth having, not worth failing for: without room for them beside what must be
 * there, Backward computes them again. */
static void leave_room(struct moe_worker *w, uint64_t state_bytes)
{
    uint64_t bytes = w->config.saved_device_bytes, both;
    if (__builtin_add_overflow(bytes, state_bytes, &both))
        both = UINT64_MAX;
    struct moe_status st =
        moe_loader_check_room(w->loader, both, "gradients, optimizer state and saved activations");
    if (bytes > 0 && moe_failed(&st)) {
        moe_log_warn("no activations are kept for Backward (--saved-device-bytes): %s", st.text);
        bytes = 0;
    }
    moe_train_limit_activations(w->train, bytes);
}

static struct moe_status attach_training(struct moe_worker *w)
{
    uint64_t bytes;
    struct moe_layer *const *layers = moe_loader_layers(w->loader);
    if (w->train == NULL)
        return moe_ok();
    MOE_TRY(moe_train_bytes(w->train, layers, &bytes));
    MOE_TRY(moe_loader_check_room(w->loader, bytes, "gradients and optimizer state"));
    leave_room(w, bytes);
    return moe_train_attach(w->train, layers, moe_loader_placements(w->loader));
}

static struct moe_status load(void *ctx, const struct moe_group_assignment *assignment)
{
    struct moe_worker *w = ctx;
    if (w->session != NULL && !moe_loader_holds(w->loader, assignment)) {
        moe_group_report_lost(
            w->group, w->view.epoch, 0,
            moe_error(MOE_ABORTED, MOE_REASON_REFORMING, "another placement has to be loaded"));
        leave_view(w);
    }
    if (moe_loader_holds(w->loader, assignment) &&
        (w->train == NULL || moe_train_attached(w->train)))
        return moe_loader_load(w->loader, assignment);
    if (w->train != NULL)
        moe_train_detach(w->train);
    MOE_TRY(moe_loader_load(w->loader, assignment));
    return attach_training(w);
}

static struct moe_status keep_view(struct moe_worker *w, const struct moe_group_view *v)
{
    w->view.epoch = v->epoch;
    w->view.slots = v->slots;
    w->view.max_tokens = v->max_tokens_per_step;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        const char *endpoint = v->live >> s & 1 ? v->members[s].endpoint : "";
        if (strlen(endpoint) >= ENDPOINT_BYTES)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                             "the endpoint of slot %u is too long", s);
        strcpy(w->view.endpoints[s], endpoint);
    }
    return moe_ok();
}

static struct moe_status join_session(struct moe_worker *w, const struct moe_group_view *v,
                                      moe_allgather_fn allgather, void *allgather_ctx)
{
    struct moe_session_config c = {
        .slot = v->slot,
        .slots = v->slots,
        .live = v->live,
        .epoch = v->epoch,
        .max_tokens = v->max_tokens_per_step,
        .training = w->train != NULL,
        .wait_budget_ms = w->config.wait_budget_ms,
        .transport = w->config.transport,
        .allgather = allgather,
        .allgather_ctx = allgather_ctx,
    };
    const struct moe_layer_spec *const *specs = moe_loader_specs(w->loader);
    for (size_t i = 0; i < moe_loader_layer_count(w->loader); i++) {
        c.max_hidden = specs[i]->hidden > c.max_hidden ? specs[i]->hidden : c.max_hidden;
        c.max_top_k = specs[i]->router.top_k > c.max_top_k ? specs[i]->router.top_k : c.max_top_k;
        c.max_experts = specs[i]->experts > c.max_experts ? specs[i]->experts : c.max_experts;
    }
    MOE_TRY(w->config.backend->session_join(w->device, &c, &w->session));
    moe_log_info("epoch %llu: rows travel over %s", (unsigned long long)v->epoch,
                 w->config.backend->session_transport(w->session));
    return moe_ok();
}

/* What every slot tells every other before READY, through the windows. */
struct proof {
    uint64_t epoch, placement_hash;
    struct moe_train_stand stand;
};
_Static_assert(sizeof(struct proof) <= 256, "a session's exchange carries no more");

static struct moe_status exchange_proofs(struct moe_worker *w, const struct moe_group_view *v,
                                         struct moe_train_stand stands[MOE_MAX_SLOTS])
{
    struct proof mine = {.epoch = v->epoch, .placement_hash = moe_loader_placement_hash(w->loader)};
    struct proof all[MOE_MAX_SLOTS];
    moe_train_stand(w->train, &mine.stand);
    memset(all, 0, sizeof all);
    MOE_TRY(w->config.backend->session_exchange(w->session, &mine, all, sizeof mine));
    for (uint32_t s = 0; s < v->slots; s++) {
        stands[s] = all[s].stand;
        if ((v->live >> s & 1) != 0 &&
            (all[s].epoch != mine.epoch || all[s].placement_hash != mine.placement_hash))
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                             "slot %u does not agree on epoch and placement", s);
    }
    return moe_ok();
}

/* The weights as the model has them; what was learnt is lost. */
static struct moe_status reload(struct moe_worker *w)
{
    moe_train_detach(w->train);
    MOE_TRY(moe_loader_reload(w->loader));
    return attach_training(w);
}

static struct moe_status who_could_not(const struct moe_train_stand *stands, uint64_t live,
                                       const struct moe_train_decision *d)
{
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((live >> s & 1) != 0 && stands[s].torn != 0)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CANNOT_GO_BACK,
                             "slot %u cannot go back to %s%s: see what slot %u says", s,
                             d->checkpoint[0] != '\0' ? "checkpoint " : "the model as loaded",
                             d->checkpoint, s);
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                     "the slots went back to different states of training");
}

/* A group that does not stand at one state of training goes back, as a whole; see training.proto.
 * Reloading takes longer on one slot than on another, which the second exchange may not wait for:
 * the epoch does not form then, and in the next one all stand at the new state. However long all
 * that takes, nobody gives up. */
static struct moe_status agree_on_training(struct moe_worker *w, const struct moe_group_view *v,
                                           struct moe_train_stand stands[MOE_MAX_SLOTS])
{
    struct moe_train_decision decision, again;
    MOE_TRY(moe_train_decide(stands, v->live, v->epoch, &decision));
    if (w->train == NULL)
        return moe_ok();
    if (decision.restart)
        MOE_TRY(reload(w));
    struct moe_status taken = moe_train_adopt(w->train, &decision, v->slot, v->slots, v->live);
    if (!decision.restart)
        return taken;
    struct moe_status met = exchange_proofs(w, v, stands); /* who could not tells the others so */
    taken.reason = met.reason = MOE_REASON_CANNOT_GO_BACK;
    if (moe_failed(&taken))
        return taken;
    MOE_TRY(met);
    MOE_TRY(moe_train_decide(stands, v->live, v->epoch, &again));
    if (!again.restart)
        return moe_ok();
    struct moe_status st = who_could_not(stands, v->live, &decision);
    moe_train_note_problem(w->train, st.text);
    return st;
}

/* The proof before READY: every slot reads from every other slot's window that it means the same
 * epoch, holds the same placement, and stands at the same state of training. */
static struct moe_status verify(struct moe_worker *w, const struct moe_group_view *v)
{
    struct moe_train_stand stands[MOE_MAX_SLOTS] = {0};
    if (moe_loader_placement_hash(w->loader) != v->placement_hash)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "this worker holds another placement than epoch %llu has",
                         (unsigned long long)v->epoch);
    MOE_TRY(exchange_proofs(w, v, stands));
    return agree_on_training(w, v, stands);
}

static struct moe_status expect_peers(struct moe_worker *w, const struct moe_group_view *v)
{
    struct moe_peers_view expected = {
        .epoch = v->epoch,
        .live = v->live,
        .slot = v->slot,
        .max_bucket = v->max_tokens_per_step,
    };
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        expected.members[s] = (struct moe_peer){v->members[s].incarnation, v->members[s].endpoint};
    return moe_peers_expect(w->peers, &expected);
}

static struct moe_status form(void *ctx, const struct moe_group_view *v, moe_allgather_fn allgather,
                              void *allgather_ctx)
{
    struct moe_worker *w = ctx;
    leave_view(w);
    MOE_TRY(keep_view(w, v));
    MOE_TRY(join_session(w, v, allgather, allgather_ctx));
    struct moe_status st = verify(w, v);
    if (!moe_failed(&st))
        st = expect_peers(w, v);
    if (moe_failed(&st))
        leave_view(w);
    return st;
}

static struct moe_status serve(void *ctx)
{
    struct moe_worker *w = ctx;
    MOE_INVARIANT(w->session != NULL);
    moe_engine_start_view(w->engine, w->session, w->view.epoch, w->view.max_tokens);
    MOE_TRY(moe_peers_start(w->peers));
    MOE_TRY(tell_service(w, w->view.epoch));
    set_epoch(w, w->view.epoch);
    if (w->train != NULL)
        moe_train_in_force(w->train);
    /* `drain` may come at any moment: it raises the flag first, so one of the two sees the other.
     */
    if (!atomic_load(&w->draining))
        set_health(w, true);
    if (atomic_load(&w->draining))
        set_health(w, false);
    return moe_ok();
}

/* ------------------------------------------------------------------ the group's own thread */

static void seated(void *ctx, uint32_t slot, uint32_t slots)
{
    struct moe_worker *w = ctx;
    (void)slots;
    moe_service_set_slot(w->service, slot);
    w->config.seated(w->config.ctx, slot);
}

static void numbers(void *ctx, struct moe_group_numbers *out)
{
    struct moe_worker *w = ctx;
    struct moe_engine_counters c;
    moe_engine_read_counters(w->engine, &c);
    moe_loader_progress(w->loader, &out->loaded_bytes, &out->total_bytes);
    out->tokens = c.tokens;
    out->steps = c.steps;
}

static void cancel_load(void *ctx)
{
    struct moe_worker *w = ctx;
    moe_loader_cancel(w->loader);
}

static void give_up(void *ctx, struct moe_status why)
{
    struct moe_worker *w = ctx;
    moe_engine_fail_queued(w->engine, why);
}

static void drain(void *ctx)
{
    struct moe_worker *w = ctx;
    atomic_store(&w->draining, true);
    set_health(w, false);
    moe_service_set_draining(w->service);
}

static bool drained(void *ctx)
{
    struct moe_worker *w = ctx;
    return moe_engine_drain(w->engine, 0);
}

static void ended(void *ctx, struct moe_status why)
{
    struct moe_worker *w = ctx;
    w->config.ended(w->config.ctx, why);
}

/* -------------------------------------------------------------------------- starting */

static struct moe_status open_model(struct moe_worker *w)
{
    const struct moe_worker_config *c = &w->config;
    MOE_TRY(moe_error_context(moe_model_open(c->model, &w->model), "%.100s", c->model));
    MOE_TRY(c->backend->device_open(&c->device, &w->device));
    MOE_TRY(moe_loader_create(c->backend, w->device, w->model, &w->loader));
    struct moe_device_info info;
    c->backend->device_info(w->device, &info);
    moe_log_info("%s (%s), %zu MoE layers, on %s: %s", moe_model_name(w->model),
                 moe_model_family(w->model), moe_loader_layer_count(w->loader), c->backend->name,
                 info.name);
    return moe_ok();
}

static struct moe_status create_training(struct moe_worker *w)
{
    const struct moe_worker_config *c = &w->config;
    if (!c->training)
        return moe_ok();
    const struct moe_train_config train = {
        .backend = c->backend,
        .device = w->device,
        .model = w->model,
        .specs = moe_loader_specs(w->loader),
        .layer_count = moe_loader_layer_count(w->loader),
        .trainer = c->trainer,
        .saved_bytes = c->saved_bytes,
        .saved_ns = c->saved_ns,
        .saved_device_bytes = c->saved_device_bytes,
        .directory = c->training_directory,
        .metrics = c->metrics,
    };
    return moe_train_create(&train, &w->train);
}

static struct moe_status create_engine(struct moe_worker *w)
{
    const struct moe_engine_config engine = {
        .backend = w->config.backend,
        .device = w->device,
        .layers = moe_loader_layers(w->loader),
        .specs = moe_loader_specs(w->loader),
        .layer_count = moe_loader_layer_count(w->loader),
        .max_tokens_per_step = w->config.max_tokens_per_step,
        .max_queued_tokens = w->config.max_queued_tokens,
        .training = w->train,
        .announce = announce,
        .announce_training = announce_training,
        .finished = finished,
        .listen = listen,
        .spin_ns = w->config.spin_ns,
        .ctx = w,
    };
    return moe_engine_create(&engine, &w->engine);
}

static struct moe_status create_service(struct moe_worker *w)
{
    const struct moe_worker_config *c = &w->config;
    MOE_TRY(moe_staging_create(c->backend, w->device, c->max_bytes_in_flight, &w->staging));
    const struct moe_service_config service = {
        .info =
            {
                .model = moe_model_name(w->model),
                .family = moe_model_family(w->model),
                .backend = c->backend->name,
                .layers = moe_loader_specs(w->loader),
                .layer_count = moe_loader_layer_count(w->loader),
                .max_message_bytes = c->max_message_bytes,
                .max_tokens_per_request = c->max_tokens_per_request,
                .max_tokens_per_step = c->max_tokens_per_step,
                .max_bytes_in_flight = c->max_bytes_in_flight,
            },
        .engine = w->engine,
        .staging = w->staging,
        .training = w->train,
        .metrics = c->metrics,
    };
    MOE_TRY(moe_service_create(&service, &w->service));
    MOE_TRY(moe_service_set_coordinator(w->service, c->coordinator));
    if (w->train == NULL)
        return moe_ok();
    MOE_TRY(
        moe_staging_create(c->backend, w->device, c->max_bytes_in_flight, &w->training_staging));
    const struct moe_training_service_config training = {
        .info = service.info,
        .service = w->service,
        .engine = w->engine,
        .staging = w->training_staging,
        .training = w->train,
        .told = told,
        .ctx = w,
    };
    return moe_training_service_create(&training, &w->training_service);
}

static struct moe_status create_peers(struct moe_worker *w)
{
    MOE_TRY(moe_rpc_client_create(&w->client));
    const struct moe_peers_config peers = {
        .client = w->client,
        .incarnation = w->incarnation,
        .training_permille = w->config.training_permille,
        .bell = moe_engine_bell(w->engine),
        .run = run_ticket,
        .lost = lost,
        .ctx = w,
    };
    return moe_peers_create(&peers, &w->peers);
}

/* Host part of "host:port", brackets of IPv6 included. */
static int host_length(const char *endpoint)
{
    const char *colon = strrchr(endpoint, ':');
    return colon == NULL ? (int)strlen(endpoint) : (int)(colon - endpoint);
}

static bool is_wildcard(const char *endpoint)
{
    return strncmp(endpoint, "0.0.0.0:", 8) == 0 || strncmp(endpoint, "[::]:", 5) == 0;
}

static struct moe_status name_worker(struct moe_worker *w)
{
    const struct moe_worker_config *c = &w->config;
    if (c->advertise == NULL && is_wildcard(c->listen))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "peers cannot reach a wildcard address: --advertise says which to use");
    const char *host = c->advertise != NULL ? c->advertise : c->listen;
    unsigned port = moe_rpc_server_port(w->server);
    int n = c->advertise != NULL ? snprintf(w->endpoint, sizeof w->endpoint, "%s", c->advertise)
                                 : snprintf(w->endpoint, sizeof w->endpoint, "%.*s:%u",
                                            host_length(host), host, port);
    if (n < 0 || (size_t)n >= sizeof w->endpoint)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "the address is too long");
    char name[128] = "worker";
    if (c->worker_id == NULL && gethostname(name, sizeof name - 1) != 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "the host has no name: use --worker-id");
    n = c->worker_id != NULL ? snprintf(w->worker_id, sizeof w->worker_id, "%s", c->worker_id)
                             : snprintf(w->worker_id, sizeof w->worker_id, "%s:%u", name, port);
    if (n <= 0 || (size_t)n >= sizeof w->worker_id)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "the worker's id is empty or too long");
    return moe_ok();
}

static struct moe_status start_server(struct moe_worker *w)
{
    const struct moe_worker_config *c = &w->config;
    struct moe_rpc_method methods[METHODS];
    moe_service_methods(w->service, methods);
    moe_peers_method(w->peers, &methods[MOE_SERVICE_METHODS]);
    if (w->training_service != NULL)
        moe_training_service_methods(w->training_service, &methods[MOE_SERVICE_METHODS + 1]);
    const struct moe_rpc_server_config server = {
        .listen = c->listen,
        .insecure = c->insecure,
        .shards = SERVER_SHARDS,
        .max_message_bytes = c->max_message_bytes,
        .max_reading_bytes = c->max_bytes_in_flight,
        .max_waiting_reads = WAITING_READS,
        .max_read_ms = READ_MS,
        .max_concurrent_streams = STREAMS_MAX,
        .spin_ns = c->spin_ns,
        .methods = methods,
        .method_count = METHODS - (w->training_service == NULL ? MOE_TRAINING_SERVICE_METHODS : 0),
        .descriptors = moe_proto_descriptors,
        .descriptors_length = (size_t)(moe_proto_descriptors_end - moe_proto_descriptors),
    };
    MOE_TRY(moe_rpc_server_start(&server, &w->server));
    set_health(w, false);
    return name_worker(w);
}

static struct moe_status start_group(struct moe_worker *w)
{
    const struct moe_worker_config *c = &w->config;
    const struct moe_group_config group = {
        .client = w->client,
        .coordinator = c->coordinator,
        .identity =
            {
                .worker_id = w->worker_id,
                .incarnation = w->incarnation,
                .endpoint = w->endpoint,
                .backend = c->backend->name,
                .model = moe_model_name(w->model),
                .fingerprint = moe_model_fingerprint(w->model),
                .family = moe_model_family(w->model),
                .version = MOE_VERSION,
                .layers = moe_loader_specs(w->loader),
                .layer_count = moe_loader_layer_count(w->loader),
                .max_tokens_per_step = c->max_tokens_per_step,
                .wanted_slot_plus_one = c->wanted_slot_plus_one,
            },
        .drain_ms = c->drain_ms,
        .gather_ms = c->wait_budget_ms * GATHER_BUDGETS,
        .reform_ms = REFORM_MS,
        .hooks =
            {
                .load = load,
                .form = form,
                .serve = serve,
                .leave = leave_view,
                .seated = seated,
                .numbers = numbers,
                .cancel_load = cancel_load,
                .give_up = give_up,
                .drain = drain,
                .drained = drained,
                .ended = ended,
                .ctx = w,
            },
    };
    return moe_group_start(&group, &w->group);
}

static struct moe_status choose_incarnation(uint64_t *out)
{
    do {
        if (getrandom(out, sizeof *out, 0) != (ssize_t)sizeof *out)
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "no random numbers: %s",
                             strerrorname_np(errno));
    } while (*out == 0);
    return moe_ok();
}

static struct moe_status add_metrics(struct moe_worker *w)
{
    if (w->config.metrics == NULL)
        return moe_ok();
    const struct moe_metric_desc build = {
        .name = "moe_build_info",
        .help = "Release and backend of the worker; always 1.",
        .labels = {{"version", MOE_VERSION}, {"backend", w->config.backend->name}}};
    struct moe_gauge *info;
    MOE_TRY(moe_metrics_add_gauge(w->config.metrics, &build, &info));
    moe_gauge_set(info, 1);
    const struct moe_metric_desc desc = {.name = "moe_epoch",
                                         .help = "Epoch of the view that is served; 0 = none."};
    return moe_metrics_add_gauge(w->config.metrics, &desc, &w->epoch_gauge);
}

struct moe_status moe_worker_start(const struct moe_worker_config *config, struct moe_worker **out)
{
    struct moe_worker *w = calloc(1, sizeof *w);
    if (w == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the worker");
    struct moe_status st;
    w->config = *config;
    pthread_mutex_init(&w->told_lock, NULL);
    MOE_TRY_GOTO(st, choose_incarnation(&w->incarnation), fail);
    MOE_TRY_GOTO(st, add_metrics(w), fail);
    MOE_TRY_GOTO(st, open_model(w), fail);
    MOE_TRY_GOTO(st, create_training(w), fail);
    MOE_TRY_GOTO(st, create_engine(w), fail);
    MOE_TRY_GOTO(st, create_service(w), fail);
    MOE_TRY_GOTO(st, create_peers(w), fail);
    MOE_TRY_GOTO(st, start_server(w), fail);
    MOE_TRY_GOTO(st, start_group(w), fail);
    set_may_tell(w, true);
    *out = w;
    return st;
fail:
    moe_worker_stop(w);
    return st;
}

void moe_worker_stop(struct moe_worker *w)
{
    if (w == NULL)
        return;
    set_may_tell(w, false);
    moe_group_destroy(w->group); /* leaves the view: no step runs any more */
    if (w->server != NULL) {
        moe_service_set_draining(w->service);
        (void)moe_engine_drain(w->engine, 0); /* what passed the service before is refused there */
        moe_engine_fail_queued(w->engine, moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_DRAINING,
                                                          LEFT_RETRY_MS, "this worker has left"));
        moe_sleep_until(moe_clock_ns() + NOTICE_MS * MOE_NS_PER_MS);
        moe_rpc_server_drain(w->server, moe_clock_ns() + LAST_ANSWERS_MS * MOE_NS_PER_MS);
        moe_rpc_server_stop(w->server);
    }
    moe_engine_destroy(w->engine);
    moe_training_service_destroy(w->training_service);
    moe_service_destroy(w->service);
    moe_peers_destroy(w->peers);
    moe_rpc_client_destroy(w->client);
    moe_staging_destroy(w->staging);
    moe_staging_destroy(w->training_staging);
    moe_train_destroy(w->train);
    moe_loader_destroy(w->loader);
    if (w->device != NULL)
        w->config.backend->device_close(w->device);
    moe_model_close(w->model);
    pthread_mutex_destroy(&w->told_lock);
    free(w);
}

const char *moe_worker_endpoint(const struct moe_worker *w)
{
    return w->endpoint;
}

void moe_worker_drain(struct moe_worker *w, const char *reason)
{
    moe_group_drain(w->group, reason);
}

uint64_t moe_worker_epoch(const struct moe_worker *w)
{
    return atomic_load(&w->epoch);
}
