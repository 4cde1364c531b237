/* SPDX-License-Identifier: Apache-2.0 */
/* AdminService.GetMetrics: the daemon's own metrics page as an answer. */
#ifndef MOE_INSPECT_METRICS_METHOD_H
#define MOE_INSPECT_METRICS_METHOD_H

#include "daemon/metrics.h"
#include "rpc/server.h"

/* The method to start a server with. `metrics` is borrowed and outlives the server. */
struct moe_rpc_method moe_inspect_metrics_method(struct moe_metrics *metrics);

#endif
