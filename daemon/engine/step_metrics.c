/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/step_metrics.h"

#include "base/clock.h"

#include <stdlib.h>

/* Seconds. A stage of a small batch on a GPU takes microseconds; a pass over thousands of tokens on
 * CPUs takes seconds, and one that waits for a slow peer tens of them. */
static const double bounds[] = {2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4,
                                1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1,  0.2,
                                0.5,  1,    2,    5,    10,   30,   60};
enum { BOUNDS = sizeof bounds / sizeof *bounds };

struct moe_step_metrics {
    struct moe_histogram *forward, *backward; /* whole steps; backward NULL without training */
    struct moe_histogram *forward_stage[MOE_STAGE_COUNT];
    struct moe_histogram *backward_stage[MOE_BACKWARD_STAGE_COUNT];
};

static struct moe_status add_kind(struct moe_metrics *registry, const char *kind,
                                  const char *const *stages, size_t count,
                                  struct moe_histogram **step, struct moe_histogram **stage)
{
    const struct moe_metric_desc whole = {
        .name = "moe_step_seconds",
        .help = "Time of a step on this worker, waits on other workers included.",
        .labels = {{"kind", kind}},
    };
    MOE_TRY(moe_metrics_add_histogram(registry, &whole, bounds, BOUNDS, step));
    for (size_t i = 0; i < count; i++) {
        const struct moe_metric_desc part = {
            .name = "moe_step_stage_seconds",
            .help = "Time of one stage of a step on this worker, one after the other.",
            .labels = {{"kind", kind}, {"stage", stages[i]}},
        };
        MOE_TRY(moe_metrics_add_histogram(registry, &part, bounds, BOUNDS, &stage[i]));
    }
    return moe_ok();
}

struct moe_status moe_step_metrics_create(struct moe_metrics *registry, bool training,
                                          struct moe_step_metrics **out)
{
    *out = NULL;
    if (registry == NULL)
        return moe_ok();
    struct moe_step_metrics *m = calloc(1, sizeof *m);
    if (m == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for metrics");
    struct moe_status st = add_kind(registry, "forward", moe_stage_names, MOE_STAGE_COUNT,
                                    &m->forward, m->forward_stage);
    if (!moe_failed(&st) && training)
        st = add_kind(registry, "backward", moe_backward_stage_names, MOE_BACKWARD_STAGE_COUNT,
                      &m->backward, m->backward_stage);
    if (moe_failed(&st))
        free(m);
    else
        *out = m;
    return st;
}

void moe_step_metrics_destroy(struct moe_step_metrics *m)
{
    free(m);
}

static void observe(struct moe_histogram *h, uint64_t ns)
{
    moe_histogram_observe(h, (double)ns / (double)MOE_NS_PER_S);
}

void moe_step_metrics_forward(struct moe_step_metrics *m, const struct moe_step_result *r)
{
    if (m == NULL)
        return;
    observe(m->forward, r->total_ns);
    for (int i = 0; i < MOE_STAGE_COUNT; i++)
        observe(m->forward_stage[i], r->stage_ns[i]);
}

void moe_step_metrics_backward(struct moe_step_metrics *m, const struct moe_step_result *r)
{
    uint64_t measured = 0;
    if (m == NULL || m->backward == NULL)
        return;
    observe(m->backward, r->total_ns);
    for (int i = 0; i < MOE_BACKWARD_STAGE_COUNT; i++)
        measured += r->backward_ns[i];
    for (int i = 0; i < MOE_BACKWARD_STAGE_COUNT && measured > 0; i++)
        observe(m->backward_stage[i], r->backward_ns[i]);
}
