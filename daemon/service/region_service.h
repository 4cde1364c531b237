/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that clients share with this worker: OpenRegions and ListRegions of ExpertService, and the
 * host behind them (regions/host.h), which gives requests to the engine. */
#ifndef MOE_SERVICE_REGION_SERVICE_H
#define MOE_SERVICE_REGION_SERVICE_H

#include "regions/registry.h"
#include "service/service.h"

struct moe_region_service;

enum { MOE_REGION_SERVICE_METHODS = 2 };

struct moe_region_service_config {
    struct moe_service_info info;
    struct moe_service *service; /* borrowed, as are the next two */
    struct moe_engine *engine;
    struct moe_staging *staging;
    const struct moe_backend *backend; /* these two take memory of clients */
    struct moe_device *device;
    struct moe_tracer *tracer;     /* NULL = none */
    struct moe_metrics *metrics;   /* NULL = none */
    struct moe_progress *progress; /* see moe_region_host_config */
    /* Bytes of all clients; 0: no client may share memory, and both methods fail. */
    uint64_t bytes;
    uint64_t identity_bytes; /* of one identity; 0 = `bytes` */
    const char *socket;      /* NULL: a name in the directory of this user's sockets */
    uint64_t spin_ns;        /* see moe_region_host_config */
};

/* Errors: those of moe_region_host_start, and of adding metrics. */
struct moe_status moe_region_service_create(const struct moe_region_service_config *config,
                                            struct moe_region_service **out) MOE_CHECKED;
/* After the servers have stopped, before moe_engine_destroy: no request goes to the engine any
 * more. NULL is ignored. */
void moe_region_service_stop(struct moe_region_service *s);
/* After moe_engine_destroy, before moe_service_destroy. NULL is ignored. */
void moe_region_service_destroy(struct moe_region_service *s);

/* The methods to start the server with. */
void moe_region_service_methods(struct moe_region_service *s,
                                struct moe_rpc_method out[MOE_REGION_SERVICE_METHODS]);

#endif
