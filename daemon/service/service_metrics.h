/* SPDX-License-Identifier: Apache-2.0 */
/* Metrics of the services' requests. All functions are safe from any thread and do nothing without
 * a registry. */
#ifndef MOE_SERVICE_SERVICE_METRICS_H
#define MOE_SERVICE_SERVICE_METRICS_H

#include "daemon/metrics.h"
#include "engine/engine.h"

enum moe_service_rpc {
    MOE_SERVICE_FORWARD,
    MOE_SERVICE_FORWARD_STREAM,
    MOE_SERVICE_RING, /* requests of rings in shared memory; region_service.h */
    /* TrainingService; only a worker that offers it has these series. */
    MOE_SERVICE_BACKWARD,
    MOE_SERVICE_OPTIMIZER_STEP,
    MOE_SERVICE_ZERO_GRAD,
    MOE_SERVICE_SET_FROZEN,
    MOE_SERVICE_SAVE_CHECKPOINT,
    MOE_SERVICE_LOAD_CHECKPOINT,
    MOE_SERVICE_EXPORT_ADAPTER,
    MOE_SERVICE_RPC_COUNT
};

struct moe_service_metrics;

/* `registry` may be NULL; `engine`: source of counters; `training`: TrainingService is offered. */
struct moe_status moe_service_metrics_create(struct moe_metrics *registry,
                                             struct moe_engine *engine, bool training,
                                             struct moe_service_metrics **out) MOE_CHECKED;
void moe_service_metrics_destroy(struct moe_service_metrics *m);

/* A request (or one item of a stream) that arrived at `received_ns` has been answered. */
void moe_service_metrics_end(struct moe_service_metrics *m, enum moe_service_rpc rpc,
                             const struct moe_status *status, uint64_t received_ns);
/* Tokens given to the engine, and returned by it, computed or not. */
void moe_service_metrics_entered(struct moe_service_metrics *m, uint32_t tokens);
void moe_service_metrics_left(struct moe_service_metrics *m, uint32_t tokens, bool computed);

#endif
