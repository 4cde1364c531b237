/* SPDX-License-Identifier: Apache-2.0 */
/* How long steps and their stages take on this worker, as histograms. They give means and tails of
 * a stage over time and over the workers of a group; a single request's times are in its answer
 * (StageTimes). */
#ifndef MOE_ENGINE_STEP_METRICS_H
#define MOE_ENGINE_STEP_METRICS_H

#include "daemon/metrics.h"
#include "moe/backend.h"

struct moe_step_metrics;

/* `training`: backward passes will run, too. If `registry` is NULL, `*out` becomes NULL. */
struct moe_status moe_step_metrics_create(struct moe_metrics *registry, bool training,
                                          struct moe_step_metrics **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_step_metrics_destroy(struct moe_step_metrics *m);

/* [any thread] A step has succeeded, with or without tokens of this worker. NULL is ignored. */
void moe_step_metrics_forward(struct moe_step_metrics *m, const struct moe_step_result *r);
/* The same for a backward pass; its stages only if the backend has measured them. */
void moe_step_metrics_backward(struct moe_step_metrics *m, const struct moe_step_result *r);

#endif
