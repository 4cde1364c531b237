/* SPDX-License-Identifier: Apache-2.0 */
/* The worker's servers and its names. Clients and peers have nothing in common: each server has
 * its own listener, threads and memory, so that clients cannot delay a ticket. */
#include "access/guard.h"
#include "base/clock.h"
#include "base/cores.h"
#include "daemon/endpoint.h"
#include "daemon/log.h"
#include "engine/row_metrics.h"
#include "inspect/log_method.h"
#include "inspect/metrics_method.h"
#include "links/peers.h"
#include "proto/descriptors.h"
#include "rpc/server.h"
#include "service/training_service.h"
#include "worker/worker_state.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    METHODS = MOE_SERVICE_METHODS + MOE_REGION_SERVICE_METHODS + MOE_TRAINING_SERVICE_METHODS +
              2,      /* GetMetrics, SetLogLevel */
    SHARDS_LEAST = 2, /* of a server for clients */
    SHARDS_MOST = 4,  /* as many as a client has connections for the parts of a batch */
    CORES_PER_SHARD = 8,
    WAITING_READS = 128, /* messages over 1 MiB that may wait to be read */
    STREAMS_MAX = 256,   /* calls per connection */
    READ_MS = 15000,     /* for a call to bring a message */
    LAST_ANSWERS_MS = 1000,
    /* Of peers. The largest message is a ticket with the descriptor of a training call. */
    PEER_MESSAGE_BYTES = 4096,
    PEER_STREAMS_MAX = 8,
    PEER_READING_BYTES = 64 << 20,
    ADMIN_DESCRIPTORS_PERCENT = 25,
    PEER_DESCRIPTORS_PERCENT = 25, /* of those for connections; clients have the rest */
};

/* ------------------------------------------------------------------ metrics */

static size_t read_expert_rows(const void *ctx, uint32_t layer, uint64_t rows[MOE_MAX_EXPERTS])
{
    return moe_row_metrics_read(ctx, layer, rows);
}

/* ------------------------------------------------------------------ names */

/* Host part of "host:port", brackets of IPv6 included. */
static int host_length(const char *endpoint)
{
    const char *colon = strrchr(endpoint, ':');
    return colon == NULL ? (int)strlen(endpoint) : (int)(colon - endpoint);
}

/* "host:port" with the host of `address`. */
static struct moe_status join(const char *address, uint32_t port,
                              char out[MOE_WORKER_ENDPOINT_BYTES])
{
    int n =
        snprintf(out, MOE_WORKER_ENDPOINT_BYTES, "%.*s:%u", host_length(address), address, port);
    if (n < 0 || n >= MOE_WORKER_ENDPOINT_BYTES)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "the address is too long");
    return moe_ok();
}

struct moe_status moe_worker_check_names(const char *listen, const char *control_listen,
                                         const char *advertise)
{
    if (advertise != NULL && moe_endpoint_is_wildcard(advertise))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "--advertise: clients cannot reach the wildcard address %s", advertise);
    if (advertise == NULL && (moe_endpoint_is_wildcard(listen) ||
                              (control_listen != NULL && moe_endpoint_is_wildcard(control_listen))))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "peers cannot reach a wildcard address: set --advertise");
    return moe_ok();
}

struct moe_status moe_worker_check_id(const char *worker_id)
{
    if (!moe_word_ok(worker_id, MOE_WORKER_ID_MAX))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "--worker-id: 1 to %d printable ASCII characters, none of them a blank, "
                         "a quote or a backslash",
                         MOE_WORKER_ID_MAX);
    return moe_ok();
}

static struct moe_status name_endpoints(struct moe_worker *w)
{
    const struct moe_worker_config *c = &w->config;
    const char *control = c->control_listen != NULL ? c->control_listen : c->listen;
    MOE_TRY(moe_worker_check_names(c->listen, c->control_listen, c->advertise));
    const char *host =
        c->advertise != NULL && moe_endpoint_is_wildcard(control) ? c->advertise : control;
    MOE_TRY(join(host, moe_rpc_server_port(w->control_server), w->control_endpoint));
    if (c->advertise == NULL)
        return join(c->listen, moe_rpc_server_port(w->server), w->endpoint);
    int n = snprintf(w->endpoint, sizeof w->endpoint, "%s", c->advertise);
    if (n < 0 || (size_t)n >= sizeof w->endpoint)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "the address is too long");
    return moe_ok();
}

struct moe_status moe_worker__name_coordinator(struct moe_worker *w, const char *coordinator,
                                               uint32_t admin_port)
{
    char endpoint[MOE_WORKER_ENDPOINT_BYTES];
    MOE_TRY(join(coordinator, admin_port, endpoint));
    return moe_service_set_coordinator(w->service, endpoint);
}

/* Tells clients where to train, if that is another address. */
static struct moe_status name_training_endpoint(struct moe_worker *w)
{
    const char *host = w->config.admin_listen;
    char endpoint[MOE_WORKER_ENDPOINT_BYTES];
    if (w->admin_server == NULL || w->training_service == NULL)
        return moe_ok();
    MOE_TRY(join(moe_endpoint_is_wildcard(host) ? w->endpoint : host,
                 moe_rpc_server_port(w->admin_server), endpoint));
    return moe_service_set_training_endpoint(w->service, endpoint);
}

static struct moe_status name_worker(struct moe_worker *w)
{
    const struct moe_worker_config *c = &w->config;
    char name[HOST_NAME_MAX + 1] = "worker";
    MOE_TRY(name_endpoints(w));
    MOE_TRY(name_training_endpoint(w));
    if (c->worker_id == NULL && gethostname(name, sizeof name) != 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "the host has no name: set --worker-id");
    if (c->worker_id != NULL) {
        MOE_TRY(moe_worker_check_id(c->worker_id));
        (void)snprintf(w->worker_id, sizeof w->worker_id, "%s", c->worker_id);
        return moe_ok();
    }
    (void)snprintf(w->worker_id, sizeof w->worker_id, "%s:%u", name,
                   moe_rpc_server_port(w->server));
    return moe_worker_check_id(w->worker_id);
}

/* ------------------------------------------------------------------ servers */

/* For peers. Default address: the host of --listen, any port. */
static struct moe_status start_control(struct moe_worker *w)
{
    const struct moe_worker_config *c = &w->config;
    char listen[MOE_WORKER_ENDPOINT_BYTES];
    struct moe_rpc_method method;
    moe_peers_method(w->peers, &method);
    MOE_TRY(join(c->listen, 0, listen));
    const struct moe_rpc_server_config server = {
        .listen = c->control_listen != NULL ? c->control_listen : listen,
        .insecure = c->insecure,
        .shards = 1,
        .max_message_bytes = PEER_MESSAGE_BYTES,
        .max_reading_bytes = PEER_READING_BYTES,
        .max_concurrent_streams = PEER_STREAMS_MAX,
        .descriptors_percent = PEER_DESCRIPTORS_PERCENT,
        .spin_ns = c->spin_ns,
        .metrics = c->metrics,
        .progress = c->progress,
        .name = "control",
        .methods = &method,
        .method_count = 1,
    };
    return moe_guard_start_server(c->guard, &server, &w->control_server);
}

/* Other workers of the host have theirs too. */
static uint32_t count_shards(void)
{
    const uint32_t wanted = moe_usable_cores() / CORES_PER_SHARD;
    return wanted < SHARDS_LEAST ? SHARDS_LEAST : wanted > SHARDS_MOST ? SHARDS_MOST : wanted;
}

/* For clients, with TrainingService if `trains`. */
static struct moe_status start_data(struct moe_worker *w, const char *listen, bool trains,
                                    uint32_t descriptors_percent, struct moe_rpc_server **out)
{
    const struct moe_worker_config *c = &w->config;
    struct moe_rpc_method methods[METHODS];
    size_t count = MOE_SERVICE_METHODS;
    moe_service_methods(w->service, methods);
    moe_region_service_methods(w->regions, &methods[count]);
    count += MOE_REGION_SERVICE_METHODS;
    w->shown = (struct moe_inspect_metrics){c->metrics, read_expert_rows, w->row_metrics};
    if (trains) {
        moe_training_service_methods(w->training_service, &methods[count]);
        count += MOE_TRAINING_SERVICE_METHODS;
    }
    if (c->metrics != NULL)
        methods[count++] = moe_inspect_metrics_method(&w->shown);
    methods[count++] = moe_inspect_log_method();
    const struct moe_rpc_server_config server = {
        .listen = listen,
        .insecure = c->insecure,
        .shards = count_shards(),
        .max_message_bytes = c->max_message_bytes,
        .max_reading_bytes = c->max_bytes_in_flight,
        .max_waiting_reads = WAITING_READS,
        .max_read_ms = READ_MS,
        .max_concurrent_streams = STREAMS_MAX,
        .descriptors_percent = descriptors_percent,
        .spin_ns = c->spin_ns,
        .metrics = c->metrics,
        .progress = c->progress,
        .name = out == &w->admin_server ? "admin" : "data",
        .methods = methods,
        .method_count = count,
        .descriptors = moe_proto_descriptors,
        .descriptors_length = (size_t)(moe_proto_descriptors_end - moe_proto_descriptors),
    };
    return moe_guard_start_server(c->guard, &server, out);
}

/* One for all callers, or another one for trainers. */
static struct moe_status start_public(struct moe_worker *w)
{
    const struct moe_worker_config *c = &w->config;
    const uint32_t rest = 100 - PEER_DESCRIPTORS_PERCENT;
    bool trains = w->training_service != NULL;
    if (c->admin_listen == NULL)
        return start_data(w, c->listen, trains, rest, &w->server);
    MOE_TRY(start_data(w, c->listen, false, rest - ADMIN_DESCRIPTORS_PERCENT, &w->server));
    MOE_TRY(start_data(w, c->admin_listen, trains, ADMIN_DESCRIPTORS_PERCENT, &w->admin_server));
    moe_log_info("trainers use port %u", moe_rpc_server_port(w->admin_server));
    return moe_ok();
}

struct moe_status moe_worker__may_retain(void *ctx, const struct moe_rpc_call *call)
{
    const struct moe_worker *w = ctx;
    struct moe_status st =
        moe_guard_may_call(w->config.guard, call, "/moe.v1.TrainingService/Backward");
    return moe_failed(&st) ? moe_error_context(st, "no pass is retained for this caller") : st;
}

struct moe_status moe_worker__start_servers(struct moe_worker *w)
{
    MOE_TRY(start_control(w));
    MOE_TRY(start_public(w));
    moe_worker__show_health(w);
    return name_worker(w);
}

static void stop(const struct moe_worker *w, struct moe_rpc_server *server)
{
    if (server == NULL)
        return;
    moe_guard_remove(w->config.guard, server);
    moe_rpc_server_drain(server, moe_clock_ns() + LAST_ANSWERS_MS * MOE_NS_PER_MS);
    moe_rpc_server_stop(server);
}

void moe_worker__stop_servers(struct moe_worker *w)
{
    stop(w, w->server);
    stop(w, w->admin_server);
    stop(w, w->control_server);
}
