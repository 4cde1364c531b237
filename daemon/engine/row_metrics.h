/* SPDX-License-Identifier: Apache-2.0 */
/* Where the rows of forward steps go: how evenly they load the experts of this worker, which
 * experts have the most, and how many rows go to each other worker. Counts are exact and come from
 * the backend after each step.
 *
 * The number of series is bounded: for each layer some figures and its MOE_ROW_TOP most loaded
 * experts, not one series per expert. These figures cover a window: the rows since one to two
 * MOE_ROW_WINDOW_NS ago, or since earlier if there was no
 * scrape. */
#ifndef MOE_ENGINE_ROW_METRICS_H
#define MOE_ENGINE_ROW_METRICS_H

#include "base/clock.h"
#include "daemon/metrics.h"
#include "moe/backend.h"

struct moe_row_metrics;

enum { MOE_ROW_TOP = 8 };
#define MOE_ROW_WINDOW_NS (60 * MOE_NS_PER_S)

/* Of one model. `model`: value of the label `model`; copied, and of no other series. `specs`
 * [count]: the layers, ascending. Registers the counters of all layers. Other series appear once
 * the backend has reported their numbers. `rows_sent`: the metrics that count rows to other
 * workers, of all models together, and outlive these; NULL = these do. If `registry` is NULL,
 * `*out` becomes NULL. */
struct moe_status moe_row_metrics_create(struct moe_metrics *registry, const char *model,
                                         const struct moe_layer_spec *const *specs, size_t count,
                                         struct moe_row_metrics *rows_sent,
                                         struct moe_row_metrics **out) MOE_CHECKED;
/* Removes the series of the layers. NULL is ignored. */
void moe_row_metrics_destroy(struct moe_row_metrics *m);

/* [engine's thread] A forward step of layer `index` has succeeded, and this slot computed `rows`.
 * Takes as long as one addition per expert; no lock. NULL is ignored. */
void moe_row_metrics_add(struct moe_row_metrics *m, size_t index, enum moe_dtype dtype,
                         uint64_t rows, const struct moe_step_counts *counts);

/* [any thread] Reads the rows of each expert of the layer with this index of the model, since the
 * start. Returns the number of experts; 0 = no such layer, or `m` is NULL. */
size_t moe_row_metrics_read(const struct moe_row_metrics *m, uint32_t layer,
                            uint64_t rows[MOE_MAX_EXPERTS]);

/* [one thread at a time] Sets the figures of all windows; renderings do so by themselves. */
void moe_row_metrics_show(struct moe_row_metrics *m, uint64_t now_ns);

#endif
