/* SPDX-License-Identifier: Apache-2.0 */
/* AdminService.GetMetrics: the daemon's own metrics page as an answer. Also the rows of each expert
 * of a layer, which are too many for the page. */
#ifndef MOE_INSPECT_METRICS_METHOD_H
#define MOE_INSPECT_METRICS_METHOD_H

#include "daemon/metrics.h"
#include "moe/types.h"
#include "rpc/server.h"

struct moe_inspect_metrics {
    struct moe_metrics *metrics;
    /* [any thread] Reads the rows of each expert of `layer`; returns the number of experts, 0 = no
     * such layer. NULL: this daemon has no experts. */
    size_t (*expert_rows)(const void *ctx, uint32_t layer, uint64_t rows[MOE_MAX_EXPERTS]);
    const void *ctx;
};

/* The method to start a server with. `what` is borrowed and outlives the server. */
struct moe_rpc_method moe_inspect_metrics_method(struct moe_inspect_metrics *what);

#endif
