/* SPDX-License-Identifier: Apache-2.0 */
/* What a worker reports of itself: build, view, lease, memory, loading, how rows travel. Requests,
 * steps and training report in their rooms. Without a registry, every function does nothing. */
#ifndef MOE_WORKER_WORKER_METRICS_H
#define MOE_WORKER_WORKER_METRICS_H

#include "daemon/lease.h"
#include "daemon/metrics.h"
#include "models/loader.h"
#include "moe/backend.h"

enum { MOE_WORKER_TRANSPORTS = 8 };

/* The caller owns the memory, which lives until moe_worker_metrics_remove. */
struct moe_worker_metrics {
    struct moe_metrics *registry; /* NULL: no metrics; all handles are NULL then */
    /* Read at each rendering; set by moe_worker_metrics_watch. */
    const struct moe_lease_gate *lease;
    const struct moe_backend *backend;
    struct moe_device *device;
    const struct moe_loader *loader;

    struct moe_gauge *epoch, *lease_left, *heartbeat_age;
    struct moe_gauge *device_total, *device_used, *device_free, *host_total, *host_free;
    struct moe_gauge *loaded, *to_load, *load_seconds;
    struct moe_histogram *heartbeat_seconds, *ticket_seconds;
    struct moe_counter *sessions_joined, *sessions_masked;
    /* Thread of the views. */
    struct {
        const char *name; /* static; NULL: unused */
        struct moe_gauge *gauge;
    } transports[MOE_WORKER_TRANSPORTS];
};

/* Registers the series. `backend`: its name. */
struct moe_status moe_worker_metrics_add(struct moe_worker_metrics *m, struct moe_metrics *registry,
                                         const char *backend) MOE_CHECKED;
/* From now on renderings read these; they live until moe_worker_metrics_remove. */
struct moe_status moe_worker_metrics_watch(struct moe_worker_metrics *m,
                                           const struct moe_lease_gate *lease,
                                           const struct moe_backend *backend,
                                           struct moe_device *device,
                                           const struct moe_loader *loader) MOE_CHECKED;
/* Renderings read nothing of the worker any more. */
void moe_worker_metrics_remove(struct moe_worker_metrics *m);

/* [any thread] */
void moe_worker_metrics_epoch(struct moe_worker_metrics *m, uint64_t epoch);
void moe_worker_metrics_loaded(struct moe_worker_metrics *m, uint64_t took_ns);
/* [thread of the views] A view has a new session, or a mask of an earlier one. */
void moe_worker_metrics_joined(struct moe_worker_metrics *m);
void moe_worker_metrics_masked(struct moe_worker_metrics *m);
/* [thread of the views] `transport`: static, of session_transport; NULL = no view. */
void moe_worker_metrics_transport(struct moe_worker_metrics *m, const char *transport);

#endif
