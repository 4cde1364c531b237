/* SPDX-License-Identifier: Apache-2.0 */
/* When the certificates of this daemon end: a warning in the log for the last week, at most one a
 * day for each file, and a metric.
 *
 * One thread looks at files and writes to the log; the metrics are apart, so that a lock may guard
 * them without waiting for a disk. */
#ifndef MOE_ACCESS_EXPIRY_H
#define MOE_ACCESS_EXPIRY_H

#include "daemon/daemon.h"
#include "daemon/metrics.h"
#include "daemon/trusted_file.h"
#include "tls/tls.h"

enum {
    MOE_EXPIRY_FILES = 3,
    MOE_EXPIRY_SOON_S = 7 * 24 * 3600,
    MOE_EXPIRY_REPEAT_S = 24 * 3600,
};

struct moe_expiry_file {
    const char *option, *path; /* NULL path: not given */
    int64_t ends;              /* Unix time, s */
    int64_t warned;            /* the last warning; 0 = none */
};

/* Borrows the paths of `settings`. */
struct moe_expiry {
    struct moe_expiry_file files[MOE_EXPIRY_FILES];
    struct moe_trusted_mark ca_mark;
    bool ca_refused; /* the last look has refused --tls-ca */
};

/* Zero: no metrics yet. */
struct moe_expiry_metrics {
    int64_t ends[MOE_EXPIRY_FILES];
    struct moe_gauge *gauges[MOE_EXPIRY_FILES];
};

void moe_expiry_init(struct moe_expiry *e, const struct moe_daemon_settings *settings);
/* Takes the dates of the files in use (`tls`, may be NULL) and of --tls-ca, and warns. Call every
 * few seconds. `now`: Unix time, s. */
void moe_expiry_look(struct moe_expiry *e, struct moe_tls *tls, int64_t now);
/* Passes the dates on to the metrics. */
void moe_expiry_show(const struct moe_expiry *e, struct moe_expiry_metrics *m);
/* Adds moe_tls_certificate_expiry_seconds{file} for the files that `settings` has, with
 * the dates that were shown last. Errors: those of moe_metrics_add_gauge. */
struct moe_status moe_expiry_add_metrics(struct moe_expiry_metrics *m,
                                         const struct moe_daemon_settings *settings,
                                         struct moe_metrics *registry) MOE_CHECKED;

/* True if a file that ends at `ends` needs a warning at `now`; notes it in `*warned`. */
bool moe_expiry_due(int64_t ends, int64_t now, int64_t *warned);

#endif
