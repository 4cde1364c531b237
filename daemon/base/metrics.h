/* SPDX-License-Identifier: Apache-2.0 */
/* Metrics of one process in the Prometheus text format.
 *
 * Every series (a name with its label values) is registered once and updated through its handle,
 * lock-free, from any thread. Registration takes a lock and may run while others update or render;
 * handles live as long as the registry, unless moe_metrics_remove_series ends them. Values that
 * others hold, such as memory or a lease, come from collectors: functions that run before each
 * rendering. Nothing here listens: see metrics_http.h. */
#ifndef MOE_BASE_METRICS_H
#define MOE_BASE_METRICS_H

#include "base/status.h"

#include <stddef.h>

struct moe_metrics;
struct moe_counter;   /* never decreases; by convention the name ends in _total */
struct moe_gauge;     /* any finite or infinite number */
struct moe_histogram; /* counts of observations per bucket, and their sum */

enum {
    MOE_METRIC_LABELS_MAX = 4,
    MOE_METRIC_BUCKETS_MAX = 32, /* without the one for +Inf */
};

struct moe_metric_label {
    const char *name, *value;
};

/* Name and labels of a series. All strings are copied. Series of one name share kind and help. */
struct moe_metric_desc {
    const char *name;                                      /* [a-zA-Z_:][a-zA-Z0-9_:]* */
    const char *help;                                      /* one sentence */
    struct moe_metric_label labels[MOE_METRIC_LABELS_MAX]; /* ends at the first NULL name */
};

struct moe_status moe_metrics_create(struct moe_metrics **out) MOE_CHECKED;
/* All handles become invalid. NULL is ignored. */
void moe_metrics_destroy(struct moe_metrics *m);

/* Errors of the four: MOE_INVALID_ARGUMENT (name or label name; buckets not rising; the name is
 * taken by another kind), MOE_ALREADY_EXISTS (same name and labels), OUT_OF_MEMORY. */
struct moe_status moe_metrics_add_counter(struct moe_metrics *m, const struct moe_metric_desc *desc,
                                          struct moe_counter **out) MOE_CHECKED;
struct moe_status moe_metrics_add_gauge(struct moe_metrics *m, const struct moe_metric_desc *desc,
                                        struct moe_gauge **out) MOE_CHECKED;
/* A counter of what somebody else counts, such as the kernel: it may have fractions, and its owner
 * sets it, never to less than before. */
struct moe_status moe_metrics_add_set_counter(struct moe_metrics *m,
                                              const struct moe_metric_desc *desc,
                                              struct moe_gauge **out) MOE_CHECKED;
/* `bounds`: upper bounds (inclusive) of the buckets, strictly rising and finite. */
struct moe_status moe_metrics_add_histogram(struct moe_metrics *m,
                                            const struct moe_metric_desc *desc,
                                            const double *bounds, size_t bound_count,
                                            struct moe_histogram **out) MOE_CHECKED;

/* [any thread] From now on each rendering calls `fn` first, on its thread; one call at a time. `fn`
 * sets handles, and may register series; it must not block, and not add or remove collectors. `ctx`
 * must live until the removal or the last rendering. Errors: OUT_OF_MEMORY. */
struct moe_status moe_metrics_add_collector(struct moe_metrics *m, void (*fn)(void *ctx),
                                            void *ctx) MOE_CHECKED;
/* [any thread] Afterwards `fn` is not called with this `ctx`, and no call is running. Does nothing
 * if there is no such collector. */
void moe_metrics_remove_collector(struct moe_metrics *m, void (*fn)(void *ctx), const void *ctx);

/* [any thread] Removes every series that has this label with this value. Their handles become
 * invalid: nothing may use them any longer, collectors included. */
void moe_metrics_remove_series(struct moe_metrics *m, struct moe_metric_label label);

/* [any thread] Updates; lock-free, no allocation. */
void moe_counter_add(struct moe_counter *c, uint64_t n);
void moe_gauge_set(struct moe_gauge *g, double value);
void moe_gauge_add(struct moe_gauge *g, double delta);
/* Ignores NaN, which would make the sum NaN for good. */
void moe_histogram_observe(struct moe_histogram *h, double value);

/* [any thread] For tests and status answers. */
uint64_t moe_counter_value(const struct moe_counter *c);
double moe_gauge_value(const struct moe_gauge *g);

/* [any thread] Text exposition format 0.0.4, series of one name together, in order of registration.
 * The caller frees `*text`. Errors: OUT_OF_MEMORY. */
struct moe_status moe_metrics_render(struct moe_metrics *m, char **text,
                                     size_t *length) MOE_CHECKED;

/* 100 us .. 60 s in steps of about 2.2: the default for request and step times in seconds. */
enum { MOE_METRIC_SECONDS_BOUNDS = 18 };
extern const double moe_metrics_seconds_bounds[MOE_METRIC_SECONDS_BOUNDS];

#endif
