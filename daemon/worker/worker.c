/* SPDX-License-Identifier: Apache-2.0 */
/* The worker's parts: created, connected, destroyed. Hooks of the group run on its two threads.
 * Those that change the view or its state (load, form, read, serve, leave: worker_view.c) run on
 * the serial executor only, so `session` and `view` need no lock. */
#include "worker/host.h"
#include "worker/worker_state.h"

#include "base/build.h"
#include "base/clock.h"
#include "base/random.h"
#include "base/wait.h"
#include "daemon/log.h"
#include "engine/row_metrics.h"
#include "engine/step_metrics.h"
#include "links/eventcount.h"
#include "rpc/client.h"
#include "rpc/server.h"
#include "service/request_checks.h"
#include "service/training_service.h"
#include "training/training.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* About the cost of a second step, which a part of a batch needs that comes too late. */
#define PARTS_WAIT_NS MOE_NS_PER_MS

enum {
    ENDPOINT_BYTES = MOE_WORKER_ENDPOINT_BYTES,
    GATHER_BUDGETS = 5, /* an all-gather may take this many wait budgets */
    NOTICE_MS = 200,    /* clients get a typed refusal this long; a closed port gives none */
    REFORM_MS = 5000,   /* requests wait this long for a new view */
    LEFT_RETRY_MS = 100,
};

/* ----------------------------------------------------- callbacks between engine and peers */

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

static void heartbeat(void *ctx, uint32_t layer)
{
    struct moe_worker *w = ctx;
    if (w->peers != NULL) /* the engine starts before the peers */
        moe_peers_beat(w->peers, layer);
}

static void block_weight_updates(void *ctx, bool on)
{
    struct moe_worker *w = ctx;
    moe_peers_block_weight_updates(w->peers, on);
}

static void finished(void *ctx, const struct moe_ticket *ticket, struct moe_status status,
                     uint64_t lost_slots)
{
    struct moe_worker *w = ctx;
    moe_peers_finished(w->peers, ticket, &status);
    if (moe_failed(&status))
        moe_group_report_lost(w->group, ticket->epoch, lost_slots, status);
}

static enum moe_hold find_hold(void *ctx)
{
    struct moe_worker *w = ctx;
    return moe_train_find_hold(w->train);
}

static void run_ticket(void *ctx, const struct moe_ticket *ticket)
{
    struct moe_worker *w = ctx;
    moe_engine_run(w->engine, ticket);
}

/* A client's call: it may come before the group exists and after its end. */
static void on_recovery_choice(void *ctx)
{
    struct moe_worker *w = ctx;
    moe_mutex_lock(&w->wake_lock);
    if (w->may_wake_group)
        moe_group_try_again(w->group);
    moe_mutex_unlock(&w->wake_lock);
}

static void set_may_wake_group(struct moe_worker *w, bool may_wake_group)
{
    moe_mutex_lock(&w->wake_lock);
    w->may_wake_group = may_wake_group;
    moe_mutex_unlock(&w->wake_lock);
}

static void listen(void *ctx)
{
    struct moe_worker *w = ctx;
    if (w->peers != NULL) /* the engine starts before the peers */
        moe_peers_listen(w->peers);
}

static void lost(void *ctx, uint64_t epoch, uint64_t slots, struct moe_status why)
{
    struct moe_worker *w = ctx;
    moe_group_report_lost(w->group, epoch, slots, why);
}

/* ------------------------------------------------------------------ the group's own thread */

static void slot_assigned(void *ctx, uint32_t slot, uint32_t slots, const char *coordinator,
                          uint32_t admin_port)
{
    struct moe_worker *w = ctx;
    (void)slots;
    struct moe_status st = moe_worker__name_coordinator(w, coordinator, admin_port);
    if (moe_failed(&st))
        moe_log_warn("clients do not get the coordinator's address: %s", st.text);
    moe_service_set_slot(w->service, slot);
    moe_tracer_set_slot(w->tracer, slot);
    w->config.slot_assigned(w->config.ctx, slot);
}

static void numbers(void *ctx, struct moe_group_numbers *out)
{
    struct moe_worker *w = ctx;
    struct moe_engine_counters c;
    moe_engine_read_counters(w->engine, &c);
    moe_loader_progress(w->loader, &out->loaded_bytes, &out->total_bytes);
    out->tokens = c.tokens;
    out->steps = c.steps;
    moe_train_read_saved(w->train, &out->training_saved);
}

static void joiner_waits(void *ctx, bool waits, uint64_t released_calls)
{
    struct moe_worker *w = ctx;
    if (w->train != NULL && moe_train_set_joiner(w->train, waits, released_calls))
        moe_eventcount_notify(moe_engine_eventcount(w->engine)); /* the sequencer looks */
}

static void places_listed(void *ctx, const char *const *endpoints, size_t count)
{
    struct moe_worker *w = ctx;
    moe_service_set_places(w->service, endpoints, count);
}

static void lease_changed(void *ctx, bool held)
{
    struct moe_worker *w = ctx;
    if (w->train == NULL)
        return;
    /* What waits is refused, as what comes from now on is. */
    moe_engine_suspend(w->engine, held ? moe_ok() : moe_request_lease_lost());
    if (held) /* the sequencer may issue tickets that waited */
        moe_eventcount_notify(moe_engine_eventcount(w->engine));
    moe_worker__show_health(w);
}

static void allow_next_load(void *ctx, bool allowed)
{
    struct moe_worker *w = ctx;
    moe_loader_allow_next(w->loader, allowed);
}

static void allow_read(void *ctx, bool allowed)
{
    struct moe_worker *w = ctx;
    if (w->train != NULL)
        moe_train_allow_read(w->train, allowed);
}

static void cancel_load(void *ctx)
{
    struct moe_worker *w = ctx;
    moe_loader_cancel(w->loader);
    allow_read(w, false);
}

static void give_up(void *ctx, struct moe_status why)
{
    struct moe_worker *w = ctx;
    moe_service_give_up(w->service);
    moe_engine_fail_queued(w->engine, why);
}

static void drain(void *ctx)
{
    struct moe_worker *w = ctx;
    atomic_store(&w->draining, true);
    moe_train_log_leaving(w->train);
    moe_worker__show_health(w);
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

/* Whether quantised matrices are decoded, whatever the backend computes with. */
static bool decodes(const struct moe_worker_config *c)
{
    return c->decode_weights ||
           (c->training && c->backend->training != NULL && !c->backend->training->quantised_base);
}

static const char *why_decoded(const struct moe_worker_config *c)
{
    if (c->decode_weights)
        return "as --weights says";
    return decodes(c) ? "as this backend does not train with them"
                      : "as this backend does not compute with them";
}

static const char *arithmetic_of(const struct moe_worker *w)
{
    for (size_t i = 0; i < moe_model_layer_count(w->model); i++) {
        const struct moe_layer_spec *spec = moe_model_layer(w->model, i);
        if (spec->routed_format.activations != MOE_ACTIVATIONS_PLAIN ||
            spec->shared_format.activations != MOE_ACTIVATIONS_PLAIN)
            return ", and FP8 experts quantise activations (W8A8)";
    }
    return w->config.w8a8 ? "; none is in FP8, so --fp8-compute changes nothing" : "";
}

/* Memory of one expert of each layer, by its bytes in the files. */
static double growth(const struct moe_worker *w)
{
    static const uint32_t first = 0; /* all experts of a layer are alike */
    uint64_t read = 0, kept = 0;
    for (size_t i = 0; i < moe_model_layer_count(w->model); i++) {
        read += moe_model_layer_bytes(w->model, i, &first, 1);
        kept += moe_model_layer_memory(w->model, i, &first, 1);
    }
    return read == 0 ? 0 : (double)kept / (double)read;
}

/* How quantised experts lie in memory, and what decoding costs. */
static void log_quantisation(const struct moe_worker *w)
{
    const char *schemes = moe_model_quantisation(w->model);
    if (schemes == NULL)
        return;
    if (moe_model_decodes_projections(w->model))
        moe_log_info("quantised projections of the latent space are decoded to BF16 while they "
                     "are loaded");
    if (!moe_model_decodes(w->model))
        moe_log_info("quantised experts (%s) stay as they are%s", schemes, arithmetic_of(w));
    else
        moe_log_info("quantised experts (%s) are decoded to BF16 while they are loaded, %s: they "
                     "take %.1f times the memory, and steps read as much more",
                     schemes, why_decoded(&w->config), growth(w));
}

static struct moe_status open_model(struct moe_worker *w)
{
    const struct moe_worker_config *c = &w->config;
    MOE_TRY(moe_error_context(moe_model_open(c->model, &w->model), "%.100s", c->model));
    MOE_TRY(moe_error_context(moe_model_read_token_tables(w->model, &w->token_tables), "%.100s",
                              c->model));
    MOE_TRY(c->backend->device_open(&c->device, &w->device));
    MOE_TRY(moe_error_context(
        moe_model_keep_quantised(w->model, decodes(c) ? NULL : c->backend->computes, w->device,
                                 c->w8a8),
        "%sbackend %s", c->w8a8 ? "--fp8-compute w8a8, " : "", c->backend->name));
    MOE_TRY(moe_loader_create(c->backend, w->device, w->model, NULL, &w->loader));
    struct moe_device_info info;
    c->backend->device_info(w->device, &info);
    moe_log_info("%s (%s), %zu MoE layers, on %s: %s", moe_model_name(w->model),
                 moe_model_family(w->model), moe_loader_layer_count(w->loader), c->backend->name,
                 info.name);
    log_quantisation(w);
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
        .lease = &w->lease,
        .retained_bytes = c->retained_bytes,
        .retained_ns = c->retained_ns,
        .retained_device_bytes = c->retained_device_bytes,
        .directory = c->training_directory,
        .metrics = c->metrics,
    };
    MOE_TRY(moe_train_create(&train, &w->train));
    char settings[256];
    moe_checkpoint_describe(&c->trainer, settings, sizeof settings);
    moe_log_info("trains: %s; %s%s", settings,
                 c->training_directory != NULL ? "checkpoints below " : "no --training-dir: ",
                 c->training_directory != NULL ? c->training_directory : "no Save is possible");
    return moe_ok();
}

static struct moe_status create_engine(struct moe_worker *w)
{
    MOE_TRY(moe_step_metrics_create(w->config.metrics, w->train != NULL, &w->step_metrics));
    MOE_TRY(moe_row_metrics_create(w->config.metrics, moe_model_name(w->model),
                                   moe_loader_specs(w->loader), moe_loader_layer_count(w->loader),
                                   NULL, &w->row_metrics));
    const struct moe_engine_config engine = {
        .backend = w->config.backend,
        .device = w->device,
        .layers = moe_loader_layers(w->loader),
        .specs = moe_loader_specs(w->loader),
        .placements = moe_loader_placements(w->loader),
        .layer_count = moe_loader_layer_count(w->loader),
        .max_hidden = w->widths.hidden,
        .max_top_k = w->widths.top_k,
        .max_tokens_per_step = w->config.max_tokens_per_step,
        .max_queued_tokens = w->config.max_queued_tokens,
        .calls = w->train != NULL ? &moe_train_call_ops : NULL,
        .calls_ctx = w->train,
        .metrics = w->step_metrics,
        .row_metrics = w->row_metrics,
        .announce = announce,
        .announce_training = announce_training,
        .model_changed = moe_worker__model_changed,
        .swap_placement = moe_worker__swap_placement,
        .placement_swapped = moe_worker__placement_swapped,
        .progress = w->config.progress,
        .heartbeat = heartbeat,
        .block_weight_updates = block_weight_updates,
        .finished = finished,
        .listen = listen,
        .spin_ns = w->config.spin_ns,
        .parts_wait_ns = PARTS_WAIT_NS,
        .ctx = w,
    };
    return moe_engine_create(&engine, &w->engine);
}

static struct moe_status create_tracer(struct moe_worker *w)
{
    const struct moe_tracer_config tracer = {
        .collector = w->config.otlp,
        .trust = &w->config.trust,
        .sample = w->config.trace_sample,
        .service_name = "moe-worker",
        .metrics = w->config.metrics,
    };
    return tracer.collector != NULL ? moe_tracer_create(&tracer, &w->tracer) : moe_ok();
}

/* A group that only serves goes on without a lease: its weights never change. */
static const struct moe_lease_gate *gate_of(const struct moe_worker *w)
{
    return w->train != NULL ? &w->lease : NULL;
}

static struct moe_status create_regions(struct moe_worker *w, const struct moe_service_info *info)
{
    const struct moe_worker_config *c = &w->config;
    const struct moe_region_service_config regions = {
        .info = *info,
        .service = w->service,
        .engine = w->engine,
        .staging = w->staging,
        .backend = c->backend,
        .device = w->device,
        .tracer = w->tracer,
        .metrics = c->metrics,
        .progress = c->progress,
        .bytes = c->client_memory,
        .identity_bytes = c->client_memory_each,
        .socket = c->client_memory_socket,
        .spin_ns = c->spin_ns,
    };
    return moe_region_service_create(&regions, &w->regions);
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
                .backend_asked = c->backend_asked,
                .cuda_module = c->cuda_module,
                .cuda_problem = c->cuda_problem,
                .layers = moe_loader_specs(w->loader),
                .layer_count = moe_loader_layer_count(w->loader),
                .token_tables = w->token_tables,
                .max_message_bytes = c->max_message_bytes,
                .max_tokens_per_request = c->max_tokens_per_request,
                .max_tokens_per_step = c->max_tokens_per_step,
                .max_bytes_in_flight = c->max_bytes_in_flight,
                .regions = c->client_memory != 0,
            },
        .engine = w->engine,
        .staging = w->staging,
        .training = w->train,
        .models = w->models,
        .metrics = c->metrics,
        .lease = gate_of(w),
        .tracer = w->tracer,
        .may_retain = moe_worker__may_retain,
        .may_retain_ctx = w,
    };
    MOE_TRY(moe_service_create(&service, &w->service));
    MOE_TRY(create_regions(w, &service.info));
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
        .tracer = w->tracer,
        .on_recovery_choice = on_recovery_choice,
        .ctx = w,
    };
    return moe_training_service_create(&training, &w->training_service);
}

static struct moe_status create_peers(struct moe_worker *w)
{
    MOE_TRY(moe_rpc_client_create(&w->client));
    MOE_TRY(moe_rpc_trust_check(w->client, &w->config.trust));
    const struct moe_peers_config peers = {
        .client = w->client,
        .trust = w->config.trust,
        .incarnation = w->incarnation,
        .training_permille = w->config.training_permille,
        .eventcount = moe_engine_eventcount(w->engine),
        .lease = gate_of(w),
        .ticket_seconds = w->metrics.ticket_seconds,
        .find_hold = find_hold,
        .run = run_ticket,
        .lost = lost,
        .ctx = w,
    };
    return moe_peers_create(&peers, &w->peers);
}

static struct moe_status start_group(struct moe_worker *w)
{
    const struct moe_worker_config *c = &w->config;
    MOE_TRY(moe_worker_describe_host(c->network_address, w->endpoint, &w->host, w->host_name,
                                     sizeof w->host_name));
    struct moe_device_info device = {0};
    c->backend->device_info(w->device, &device);
    memcpy(w->host.domain, device.domain, sizeof w->host.domain);
    struct moe_group_config group = {
        .client = w->client,
        .coordinator = c->coordinator,
        .trust = c->trust,
        .identity =
            {
                .worker_id = w->worker_id,
                .incarnation = w->incarnation,
                .endpoint = w->endpoint,
                .control_endpoint = w->control_endpoint,
                .backend = c->backend->name,
                .model = moe_model_name(w->model),
                .fingerprint = moe_model_fingerprint(w->model),
                .family = moe_model_family(w->model),
                .version = moe_build_version(),
                .layers = moe_loader_specs(w->loader),
                .layer_count = moe_loader_layer_count(w->loader),
                .max_tokens_per_step = c->max_tokens_per_step,
                .wanted_slot_plus_one = c->wanted_slot_plus_one,
                .trains = w->train != NULL,
                .partial = c->backend->partial,
                .trains_with_copies =
                    c->backend->training != NULL && c->backend->training->live_copies,
                .moves_experts = moe_loader_moves(w->loader),
                .host = &w->host,
                .host_name = w->host_name,
            },
        .drain_ms = c->drain_ms,
        .gather_ms = c->wait_budget_ms * GATHER_BUDGETS,
        .reform_ms = REFORM_MS,
        .lease = &w->lease,
        .progress = c->progress,
        .heartbeat_seconds = w->metrics.heartbeat_seconds,
        .hooks =
            {
                .load = moe_worker__load,
                .digests = moe_worker__digests,
                .read_checkpoint = moe_worker__read_checkpoint,
                .form = moe_worker__form,
                .serve = moe_worker__serve,
                .leave = moe_worker__leave_view,
                .drop_session = moe_worker__drop_session,
                .slot_assigned = slot_assigned,
                .numbers = numbers,
                .cancel_load = cancel_load,
                .allow_next_load = allow_next_load,
                .allow_read = allow_read,
                .lease_changed = lease_changed,
                .places_listed = places_listed,
                .joiner_waits = joiner_waits,
                .give_up = give_up,
                .drain = drain,
                .drained = drained,
                .model_order = moe_worker__model_order,
                .models_listed = moe_worker__models_listed,
                .fetched_listed = moe_worker__fetched_listed,
                .ended = ended,
                .ctx = w,
            },
    };
    memcpy(group.identity.slot_token, w->slot_token, sizeof w->slot_token);
    return moe_group_start(&group, &w->group);
}

struct moe_status moe_worker_start(const struct moe_worker_config *config, struct moe_worker **out)
{
    struct moe_worker *w = calloc(1, sizeof *w);
    if (w == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the worker");
    struct moe_status st;
    w->config = *config;
    moe_mutex_init(&w->wake_lock);
    moe_lease_gate_init(&w->lease, moe_lease_clock_ns);
    MOE_TRY_GOTO(st, moe_random_id(&w->incarnation), fail);
    MOE_TRY_GOTO(st, moe_random_bytes(w->slot_token, sizeof w->slot_token), fail);
    MOE_TRY_GOTO(st, moe_worker_metrics_add(&w->metrics, config->metrics, config->backend->name),
                 fail);
    MOE_TRY_GOTO(st, open_model(w), fail);
    MOE_TRY_GOTO(
        st, moe_worker_metrics_watch(&w->metrics, &w->lease, config->backend, w->device, w->loader),
        fail);
    MOE_TRY_GOTO(st, create_training(w), fail);
    moe_worker__measure_widths(w);
    MOE_TRY_GOTO(st, create_engine(w), fail);
    MOE_TRY_GOTO(st, moe_worker__create_models(w), fail);
    MOE_TRY_GOTO(st, moe_worker__create_mover(w), fail);
    MOE_TRY_GOTO(st, create_tracer(w), fail);
    MOE_TRY_GOTO(st, create_service(w), fail);
    MOE_TRY_GOTO(st, create_peers(w), fail);
    MOE_TRY_GOTO(st, moe_worker__start_servers(w), fail);
    moe_tracer_set_instance(w->tracer, w->worker_id);
    MOE_TRY_GOTO(st, moe_worker__watch_health(w), fail);
    MOE_TRY_GOTO(st, start_group(w), fail);
    set_may_wake_group(w, true);
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
    set_may_wake_group(w, false);
    moe_progress_close(w->config.progress);
    moe_worker_metrics_remove(&w->metrics);
    if (!atomic_load(&w->draining)) /* else the drain has logged it */
        moe_train_log_leaving(w->train);
    moe_group_destroy(w->group); /* leaves the view; no step runs afterwards */
    moe_worker__drop_session(w);
    moe_models_stop(w->models);
    if (w->server != NULL) {
        moe_service_set_draining(w->service);
        (void)moe_engine_drain(w->engine, 0); /* refuses requests that passed the service before */
        moe_engine_fail_queued(w->engine, moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_DRAINING,
                                                          LEFT_RETRY_MS, "this worker has left"));
        moe_sleep_until(moe_clock_ns() + NOTICE_MS * MOE_NS_PER_MS);
    }
    moe_worker__stop_servers(w);
    moe_region_service_stop(w->regions);
    moe_engine_destroy(w->engine);
    moe_step_metrics_destroy(w->step_metrics);
    moe_training_service_destroy(w->training_service);
    moe_region_service_destroy(w->regions);
    moe_service_destroy(w->service);
    moe_mover_destroy(w->mover);
    moe_models_destroy(w->models);
    moe_row_metrics_destroy(w->row_metrics);
    moe_tracer_destroy(w->tracer);
    moe_peers_destroy(w->peers);
    moe_rpc_client_destroy(w->client);
    moe_staging_destroy(w->staging);
    moe_staging_destroy(w->training_staging);
    moe_train_destroy(w->train);
    moe_loader_destroy(w->loader);
    if (w->device != NULL)
        w->config.backend->device_close(w->device);
    moe_token_tables_free(&w->token_tables);
    moe_model_close(w->model);
    moe_mutex_destroy(&w->wake_lock);
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
