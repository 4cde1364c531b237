/* SPDX-License-Identifier: Apache-2.0 */
/* State that worker.c and worker_view.c share; only these files include it. */
#ifndef MOE_WORKER_WORKER_STATE_H
#define MOE_WORKER_WORKER_STATE_H

#include "base/mutex.h"
#include "daemon/lease.h"
#include "daemon/name.h"
#include "group/group.h"
#include "inspect/metrics_method.h"
#include "links/peers.h"
#include "model/sha256.h"
#include "models/loader.h"
#include "models/models.h"
#include "models/mover.h"
#include "service/region_service.h"
#include "service/service.h"
#include "trace/trace.h"
#include "worker/worker.h"
#include "worker/worker_metrics.h"

#include <stdatomic.h>

enum { MOE_WORKER_ENDPOINT_BYTES = 256 };

struct moe_worker {
    struct moe_worker_config config;
    char endpoint[MOE_WORKER_ENDPOINT_BYTES]; /* for clients */
    char control_endpoint[MOE_WORKER_ENDPOINT_BYTES];
    char worker_id[MOE_WORKER_ID_MAX + 1];
    struct moe_session_host host;
    char host_name[64];
    uint64_t incarnation;
    uint8_t slot_token[16]; /* secret; see Register */

    bool said_unencrypted; /* once in the life of the process; the serial executor's */

    struct moe_device *device;
    struct moe_model *model;
    struct moe_token_tables token_tables; /* of the model */
    struct moe_loader *loader;
    struct moe_engine *engine;
    struct moe_models *models;
    struct moe_mover *mover;
    struct moe_models_widths widths;       /* of sessions */
    struct moe_step_metrics *step_metrics; /* NULL: none */
    struct moe_tracer *tracer;             /* NULL: none */
    struct moe_row_metrics *row_metrics;   /* NULL: none */
    struct moe_inspect_metrics shown;      /* by GetMetrics */
    struct moe_staging *staging;
    struct moe_staging *
        training_staging; /* separate, so that waiting Backward calls take no memory from Forward */
    struct moe_service *service;
    struct moe_region_service *regions;            /* also if clients may share no memory */
    struct moe_train *train;                       /* NULL: no training */
    struct moe_training_service *training_service; /* NULL: no training */
    struct moe_peers *peers;
    struct moe_rpc_client *client;
    struct moe_rpc_server *server, *control_server; /* for clients; for peers */
    struct moe_rpc_server *admin_server;            /* for trainers; NULL: they use `server` */
    struct moe_group *group;
    struct moe_lease_gate lease; /* the group writes it */
    struct moe_mutex wake_lock;
    MOE_GUARDED_BY(wake_lock)
    bool may_wake_group; /* `group` exists; choices and reports of other threads may reach it */
    struct moe_worker_metrics metrics;

    /* Jobs thread only. */
    struct moe_session *session; /* formed; NULL = none. Without a view it is kept for a mask */
    struct {
        uint64_t epoch;
        uint32_t slot, slots, max_tokens;
    } joined; /* as the session was joined */
    struct {
        uint64_t epoch; /* in service, or formed; 0 = none */
        uint64_t live;  /* bit s: slot s is a member */
        uint32_t slots, max_tokens;
        char model[MOE_SERVICE_NAME_BYTES], model_digest[MOE_SHA256_HEX];
        char endpoints[MOE_MAX_SLOTS][MOE_WORKER_ENDPOINT_BYTES]; /* "" = empty slot */
    } view;                                                       /* of the session */

    /* Of moe_worker_report: the transfer that it reports, "" = none. */
    struct {
        char what[MOE_TRAINING_NAME_MAX + 32];
        uint64_t begun_ns, logged_ns;
    } report;

    _Atomic uint64_t epoch; /* in service; 0 = none */
    atomic_bool draining;
};

/* Hooks of the group (group/group.h), on the serial executor; ctx is the worker. */
struct moe_status moe_worker__digests(void *ctx, moe_group_part_fn add, void *add_ctx) MOE_CHECKED;
struct moe_status moe_worker__load(void *ctx,
                                   const struct moe_group_assignment *assignment) MOE_CHECKED;
struct moe_status moe_worker__read_checkpoint(void *ctx, const struct moe_saved_training *state,
                                              uint32_t slot, uint32_t slots) MOE_CHECKED;
struct moe_status moe_worker__form(void *ctx, const struct moe_group_view *v,
                                   moe_allgather_fn allgather, void *allgather_ctx,
                                   uint64_t *slots) MOE_CHECKED;
struct moe_status moe_worker__serve(void *ctx) MOE_CHECKED;
void moe_worker__leave_view(void *ctx);
/* After the last view: leaves the session that was kept, if any. */
void moe_worker__drop_session(void *ctx);
/* Added models (worker_models.c). The last two are hooks, of the engine and of the group. */
struct moe_status moe_worker__create_models(struct moe_worker *w) MOE_CHECKED;
void moe_worker__measure_widths(struct moe_worker *w);
void moe_worker__model_changed(void *ctx, uint32_t model, bool served, uint64_t epoch);
void moe_worker__model_order(void *ctx, const struct moe_group_model_order *order);
void moe_worker__models_listed(void *ctx, const uint32_t *models, const char *const *names,
                               size_t count);
/* Moves of experts, in the same file; the first three are hooks. */
struct moe_status moe_worker__swap_placement(void *ctx, uint32_t version) MOE_CHECKED;
void moe_worker__placement_swapped(void *ctx, uint32_t version, uint64_t epoch);
void moe_worker__fetched_listed(void *ctx, uint32_t version);
struct moe_status moe_worker__create_mover(struct moe_worker *w) MOE_CHECKED;
/* Starts both servers, then names the worker. On failure moe_worker__stop_servers follows. */
struct moe_status moe_worker__start_servers(struct moe_worker *w) MOE_CHECKED;
/* For moe_service_config.may_retain; `ctx` is the worker. A retained pass takes the place of older
 * ones, so it is for callers that may call Backward. */
struct moe_status moe_worker__may_retain(void *ctx, const struct moe_rpc_call *call) MOE_CHECKED;
/* Clients get the host of `coordinator` with this port. */
struct moe_status moe_worker__name_coordinator(struct moe_worker *w, const char *coordinator,
                                               uint32_t admin_port) MOE_CHECKED;
/* Stops those that were started. */
void moe_worker__stop_servers(struct moe_worker *w);
/* [any thread] Sets the answers of health checks: SERVING under a view, unless the worker leaves,
 * or trains and has no lease, or a loop is stuck. Call it after a change of one of these. */
void moe_worker__show_health(struct moe_worker *w);
/* Gives config.progress the worker's conditions, and watches its judge. */
struct moe_status moe_worker__watch_health(struct moe_worker *w) MOE_CHECKED;

#endif
