/* SPDX-License-Identifier: Apache-2.0 */
/* The HTTP side of a daemon, on a separate thread (libmicrohttpd). Plain HTTP without
 * authentication: listen where only operators reach it.
 *
 *   /metrics            for Prometheus
 *   /livez              200: the daemon is alive; 503: a restart would help
 *   /readyz, /healthz   200: it is ready for work; 503: not now
 *
 * The body of a probe names the reasons, with ?verbose everything that was looked at
 * (moe_health_print).
 *
 * The number of connections is bounded. Beyond the bound, the connection with the oldest last
 * complete request is closed, so a flood cannot lock out other clients. A request has at most 16
 * KiB, and 2 s for each next byte. A client that takes too long for a whole request, or for its
 * answer, is closed when another one comes. */
#ifndef MOE_BASE_METRICS_HTTP_H
#define MOE_BASE_METRICS_HTTP_H

#include "daemon/metrics.h"
#include "daemon/progress.h"

struct moe_metrics_http;

struct moe_metrics_http_config {
    const char *listen;            /* "host:port" or "[v6]:port", numeric; port 0 = any */
    struct moe_metrics *metrics;   /* borrowed; outlives the endpoint */
    struct moe_progress *progress; /* answers probes; borrowed. NULL = always 200 */
    uint32_t limit_ms; /* for a whole request, and for its answer to be taken; 0 = 30 s */
};

/* Errors: MOE_INVALID_ARGUMENT (address), MOE_UNAVAILABLE/IO (cannot bind). */
struct moe_status moe_metrics_http_start(const struct moe_metrics_http_config *config,
                                         struct moe_metrics_http **out) MOE_CHECKED;
uint16_t moe_metrics_http_port(const struct moe_metrics_http *h);
/* Waits for running requests. NULL is ignored. */
void moe_metrics_http_stop(struct moe_metrics_http *h);

#endif
