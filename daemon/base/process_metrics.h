/* SPDX-License-Identifier: Apache-2.0 */
/* The series that Prometheus expects of every process, under their usual names: processor time,
 * memory, descriptors, threads, start. */
#ifndef MOE_BASE_PROCESS_METRICS_H
#define MOE_BASE_PROCESS_METRICS_H

#include "daemon/metrics.h"

/* Handles; the caller owns the memory. */
struct moe_process_metrics {
    struct moe_gauge *cpu_seconds, *resident, *virtual, *open_fds, *max_fds, *start, *threads;
};

/* Registers the series of this process in `m`. Each rendering reads /proc; a figure that cannot be
 * read stays as it was. `p` lives until the last rendering. */
struct moe_status moe_process_metrics_add(struct moe_metrics *m,
                                          struct moe_process_metrics *p) MOE_CHECKED;

#endif
