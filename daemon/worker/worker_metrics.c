/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/worker_metrics.h"

#include "base/build.h"
#include "base/clock.h"
#include "base/memory.h"
#include "daemon/log.h"

#include <string.h>
#include <unistd.h>

static struct moe_status add_gauge(struct moe_worker_metrics *m, const char *name, const char *help,
                                   const char *kind, struct moe_gauge **out)
{
    const struct moe_metric_desc desc = {
        .name = name, .help = help, .labels = {{kind != NULL ? "kind" : NULL, kind}}};
    return moe_metrics_add_gauge(m->registry, &desc, out);
}

static struct moe_status add_seconds(struct moe_worker_metrics *m, const char *name,
                                     const char *help, struct moe_histogram **out)
{
    const struct moe_metric_desc desc = {.name = name, .help = help};
    return moe_metrics_add_histogram(m->registry, &desc, moe_metrics_seconds_bounds,
                                     MOE_METRIC_SECONDS_BOUNDS, out);
}

static struct moe_status add_sessions(struct moe_worker_metrics *m, const char *how,
                                      struct moe_counter **out)
{
    const struct moe_metric_desc desc = {
        .name = "moe_sessions_total",
        .help = "Sessions that this worker has joined anew (joined), or kept for a smaller view by "
                "a mask (masked).",
        .labels = {{"how", how}}};
    return moe_metrics_add_counter(m->registry, &desc, out);
}

static struct moe_status add_build(struct moe_worker_metrics *m, const char *backend)
{
    struct moe_gauge *info;
    const struct moe_metric_desc build = {.name = "moe_build_info",
                                          .help = "Release, commit and backend of the worker; "
                                                  "always 1.",
                                          .labels = {{"version", moe_build_version()},
                                                     {"commit", moe_build_commit()},
                                                     {"backend", backend}}};
    MOE_TRY(moe_metrics_add_gauge(m->registry, &build, &info));
    moe_gauge_set(info, 1);
    return moe_ok();
}

static struct moe_status add_memory(struct moe_worker_metrics *m)
{
    static const char device[] = "Device memory: total; allocated by this worker (used); free.";
    static const char host[] = "Memory of the host, or less under a limit: total, available.";
    MOE_TRY(add_gauge(m, "moe_device_memory_bytes", device, "total", &m->device_total));
    MOE_TRY(add_gauge(m, "moe_device_memory_bytes", device, "used", &m->device_used));
    MOE_TRY(add_gauge(m, "moe_device_memory_bytes", device, "free", &m->device_free));
    MOE_TRY(add_gauge(m, "moe_host_memory_bytes", host, "total", &m->host_total));
    return add_gauge(m, "moe_host_memory_bytes", host, "available", &m->host_free);
}

struct moe_status moe_worker_metrics_add(struct moe_worker_metrics *m, struct moe_metrics *registry,
                                         const char *backend)
{
    m->registry = registry;
    if (registry == NULL)
        return moe_ok();
    MOE_TRY(add_build(m, backend));
    MOE_TRY(
        add_gauge(m, "moe_epoch", "Epoch of the view that is served; 0 = none.", NULL, &m->epoch));
    MOE_TRY(add_gauge(m, "moe_lease_remaining_seconds",
                      "Time left of this worker's lease; 0 = none. A group that trains stops "
                      "without.",
                      NULL, &m->lease_left));
    MOE_TRY(add_gauge(m, "moe_heartbeat_age_seconds",
                      "Time since this worker sent the last heartbeat that was answered; 0 = none "
                      "yet.",
                      NULL, &m->heartbeat_age));
    MOE_TRY(add_seconds(m, "moe_heartbeat_seconds",
                        "Time from a heartbeat of this worker to the coordinator's answer.",
                        &m->heartbeat_seconds));
    MOE_TRY(add_seconds(m, "moe_ticket_seconds",
                        "Way of a ticket to a slot and of its answer to this sequencer, without "
                        "the step.",
                        &m->ticket_seconds));
    MOE_TRY(add_sessions(m, "joined", &m->sessions_joined));
    MOE_TRY(add_sessions(m, "masked", &m->sessions_masked));
    MOE_TRY(add_memory(m));
    MOE_TRY(add_gauge(m, "moe_load_bytes", "Bytes of the model: read so far, and in all.", "loaded",
                      &m->loaded));
    MOE_TRY(add_gauge(m, "moe_load_bytes", "Bytes of the model: read so far, and in all.", "total",
                      &m->to_load));
    return add_gauge(m, "moe_load_seconds", "Time of the last load of the model; 0 = none yet.",
                     NULL, &m->load_seconds);
}

/* ------------------------------------------------------------------ at each rendering */

static void show_seconds(struct moe_gauge *g, uint64_t ns)
{
    moe_gauge_set(g, (double)ns / (double)MOE_NS_PER_S);
}

static void show_memory(const struct moe_worker_metrics *m)
{
    struct moe_device_info info = {0};
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    uint64_t available = moe_available_memory();
    m->backend->device_info(m->device, &info);
    moe_gauge_set(m->device_total, (double)info.memory_bytes);
    moe_gauge_set(m->device_used, (double)info.used_bytes);
    moe_gauge_set(m->device_free, (double)info.free_bytes);
    if (pages > 0 && page > 0)
        moe_gauge_set(m->host_total, (double)pages * (double)page);
    if (available != UINT64_MAX)
        moe_gauge_set(m->host_free, (double)available);
}

static void collect(void *ctx)
{
    const struct moe_worker_metrics *m = ctx;
    uint64_t loaded, total;
    show_seconds(m->lease_left, moe_lease_gate_remaining_ns(m->lease));
    show_seconds(m->heartbeat_age, moe_lease_gate_heartbeat_age_ns(m->lease));
    show_memory(m);
    moe_loader_progress(m->loader, &loaded, &total);
    moe_gauge_set(m->loaded, (double)loaded);
    moe_gauge_set(m->to_load, (double)total);
}

struct moe_status moe_worker_metrics_watch(struct moe_worker_metrics *m,
                                           const struct moe_lease_gate *lease,
                                           const struct moe_backend *backend,
                                           struct moe_device *device,
                                           const struct moe_loader *loader)
{
    if (m->registry == NULL)
        return moe_ok();
    m->lease = lease;
    m->backend = backend;
    m->device = device;
    m->loader = loader;
    return moe_metrics_add_collector(m->registry, collect, m);
}

void moe_worker_metrics_remove(struct moe_worker_metrics *m)
{
    if (m->registry != NULL)
        moe_metrics_remove_collector(m->registry, collect, m);
}

/* ------------------------------------------------------------------ at changes */

void moe_worker_metrics_epoch(struct moe_worker_metrics *m, uint64_t epoch)
{
    if (m->registry != NULL)
        moe_gauge_set(m->epoch, (double)epoch);
}

void moe_worker_metrics_loaded(struct moe_worker_metrics *m, uint64_t took_ns)
{
    if (m->registry != NULL)
        show_seconds(m->load_seconds, took_ns);
}

void moe_worker_metrics_joined(struct moe_worker_metrics *m)
{
    if (m->registry != NULL)
        moe_counter_add(m->sessions_joined, 1);
}

void moe_worker_metrics_masked(struct moe_worker_metrics *m)
{
    if (m->registry != NULL)
        moe_counter_add(m->sessions_masked, 1);
}

/* The gauge of `transport`, registered at its first use; NULL if that is impossible. */
static struct moe_gauge *find_transport(struct moe_worker_metrics *m, const char *transport)
{
    size_t i = 0;
    while (i < MOE_WORKER_TRANSPORTS && m->transports[i].name != NULL &&
           strcmp(m->transports[i].name, transport) != 0)
        i++;
    if (i == MOE_WORKER_TRANSPORTS || m->transports[i].name != NULL)
        return i == MOE_WORKER_TRANSPORTS ? NULL : m->transports[i].gauge;
    const struct moe_metric_desc desc = {.name = "moe_transport_info",
                                         .help = "1 for the way that rows travel in the present "
                                                 "view; 0 for ways of earlier ones.",
                                         .labels = {{"transport", transport}}};
    struct moe_status st = moe_metrics_add_gauge(m->registry, &desc, &m->transports[i].gauge);
    if (moe_failed(&st)) {
        moe_log_warn("no metric of the transport: %s", st.text);
        return NULL;
    }
    m->transports[i].name = transport;
    return m->transports[i].gauge;
}

void moe_worker_metrics_transport(struct moe_worker_metrics *m, const char *transport)
{
    if (m->registry == NULL)
        return;
    for (size_t i = 0; i < MOE_WORKER_TRANSPORTS && m->transports[i].name != NULL; i++)
        moe_gauge_set(m->transports[i].gauge, 0);
    struct moe_gauge *present = transport != NULL ? find_transport(m, transport) : NULL;
    if (present != NULL)
        moe_gauge_set(present, 1);
}
