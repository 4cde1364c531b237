/* SPDX-License-Identifier: Apache-2.0 */
/* What a worker tells of training by itself: series, and lines of the log. */
#include "training/state.h"

#include "base/clock.h"
#include "daemon/log.h"

#include <inttypes.h>

enum { SKIP_PAUSE_S = 10 };

#define MIB (1024.0 * 1024.0)

/* Upper ends in seconds: of a small model in memory, to a large one on a slow disk. */
static const double checkpoint_bounds[] = {0.1, 0.2, 0.5, 1,   2,    5,    10,  20,
                                           50,  100, 200, 500, 1000, 2000, 5000};

/* ---------------------------------------------------------------------------- series */

static struct moe_status add_counter(struct moe_metrics *m, const char *name, const char *help,
                                     struct moe_counter **out)
{
    const struct moe_metric_desc desc = {.name = name, .help = help};
    return moe_metrics_add_counter(m, &desc, out);
}

static struct moe_status add_gauge(struct moe_metrics *m, const char *name, const char *help,
                                   struct moe_gauge **out)
{
    const struct moe_metric_desc desc = {.name = name, .help = help};
    return moe_metrics_add_gauge(m, &desc, out);
}

/* "save" or "load". */
static struct moe_status add_checkpoints(struct moe_metrics *m, const char *kind,
                                         struct moe_train_checkpoint_metrics *out)
{
    const struct moe_metric_desc seconds = {
        .name = "moe_train_checkpoint_seconds",
        .help = "Time from a Save's or Load's turn to its end, of those that ended well.",
        .labels = {{"kind", kind}}};
    const struct moe_metric_desc failures = {
        .name = "moe_train_checkpoint_failures_total",
        .help = "Saves and Loads that had their turn and did not end well, those "
                "called off included.",
        .labels = {{"kind", kind}}};
    MOE_TRY(moe_metrics_add_histogram(m, &seconds, checkpoint_bounds,
                                      sizeof checkpoint_bounds / sizeof *checkpoint_bounds,
                                      &out->seconds));
    return moe_metrics_add_counter(m, &failures, &out->failures);
}

struct moe_status moe_train__add_metrics(struct moe_metrics *m, struct moe_train_metrics *to)
{
    MOE_TRY(add_counter(m, "moe_train_backwards_total",
                        "Backward passes that this worker took part in.", &to->backwards));
    MOE_TRY(add_counter(m, "moe_train_steps_total", "Optimizer steps that moved the weights.",
                        &to->steps));
    MOE_TRY(add_counter(m, "moe_train_skipped_steps_total",
                        "Optimizer steps that moved nothing because a gradient was not finite.",
                        &to->skipped));
    MOE_TRY(add_counter(
        m, "moe_train_repeats_total",
        "Repeats that this worker was asked: calls that had been run and were not run again.",
        &to->repeats));
    MOE_TRY(add_gauge(m, "moe_weights_version", "Version of the weights.", &to->version));
    MOE_TRY(add_gauge(m, "moe_train_lineage",
                      "Rises when the group goes back to a checkpoint or to the model as loaded.",
                      &to->lineage));
    MOE_TRY(add_gauge(m, "moe_train_retained_bytes",
                      "Memory of forward passes retained for Backward on this worker.",
                      &to->retained));
    MOE_TRY(add_counter(
        m, "moe_train_retained_steps_total",
        "Forward steps of which this worker's device retained activations for Backward.",
        &to->saved_steps));
    MOE_TRY(add_counter(m, "moe_train_reused_steps_total",
                        "Backward passes that used retained activations on this worker instead "
                        "of computing gate and up again.",
                        &to->reused));
    MOE_TRY(add_gauge(m, "moe_train_retained_device_bytes",
                      "Device memory of activations retained for Backward on this worker.",
                      &to->activations));
    MOE_TRY(add_gauge(m, "moe_train_answers_bytes",
                      "Memory of Backward answers retained for repeats on this worker.",
                      &to->answers));
    MOE_TRY(add_gauge(m, "moe_train_retained_idle_bytes",
                      "Memory of dropped passes and answers, ready for the next ones.", &to->idle));
    MOE_TRY(add_gauge(m, "moe_train_unsaved_steps",
                      "Optimizer steps since the last checkpoint: lost when the group ends.",
                      &to->unsaved));
    MOE_TRY(add_counter(m, "moe_train_lost_steps_total",
                        "Optimizer steps that were lost as the group went back to a checkpoint or "
                        "to the model as loaded.",
                        &to->lost));
    MOE_TRY(add_checkpoints(m, "save", &to->saves));
    MOE_TRY(add_checkpoints(m, "load", &to->loads));
    const struct moe_metric_desc step = {
        .name = "moe_train_step_seconds",
        .help = "Time of an optimizer step on this worker, waits on other workers included."};
    MOE_TRY(moe_metrics_add_histogram(m, &step, moe_metrics_seconds_bounds,
                                      MOE_METRIC_SECONDS_BOUNDS, &to->step_seconds));
    return add_gauge(m, "moe_train_state_bytes",
                     "Memory of gradients and optimizer state on this worker.", &to->state);
}

void moe_train_count_retained(struct moe_train *t)
{
    if (t->metrics.saved_steps != NULL)
        moe_counter_add(t->metrics.saved_steps, 1);
}

void moe_train_count_reused(struct moe_train *t)
{
    if (t->metrics.reused != NULL)
        moe_counter_add(t->metrics.reused, 1);
}

void moe_train__show(struct moe_train *t)
{
    if (t->config.metrics == NULL)
        return;
    moe_mutex_lock(&t->lock);
    double version = (double)t->weights_version, lineage = (double)t->lineage;
    double unsaved = (double)t->unsaved;
    double state = (double)t->state_bytes;
    moe_mutex_unlock(&t->lock);
    moe_gauge_set(t->metrics.version, version);
    moe_gauge_set(t->metrics.lineage, lineage);
    moe_gauge_set(t->metrics.unsaved, unsaved);
    moe_gauge_set(t->metrics.state, state);
    moe_gauge_set(t->metrics.activations, (double)moe_activations_bytes(t->activations));
    moe_gauge_set(t->metrics.retained, (double)moe_pass_store_bytes(t->passes));
    moe_gauge_set(t->metrics.answers, (double)moe_pass_store_bytes(t->answers));
    moe_gauge_set(t->metrics.idle, (double)(moe_pass_store_idle_bytes(t->passes) +
                                            moe_pass_store_idle_bytes(t->answers)));
}

/* ------------------------------------------------------------------------------- log */

static double seconds_since(uint64_t begun_ns)
{
    return (double)(moe_clock_ns() - begun_ns) / (double)MOE_NS_PER_S;
}

void moe_train__log_begun(const struct moe_train *t, const struct moe_train_call *call)
{
    if (call->kind == MOE_STEP_SAVE)
        moe_log_info("checkpoint %s: saving begins, of the state after step %" PRIu64
                     ", weights version %" PRIu64,
                     call->name, t->steps, t->weights_version);
    else
        moe_log_info("checkpoint %s: loading begins: its files are checked first", call->name);
}

void moe_train__log_saved(struct moe_train *t, const char *name, uint64_t begun_ns, uint64_t bytes,
                          struct moe_status st)
{
    double seconds = seconds_since(begun_ns);
    if (moe_failed(&st)) {
        moe_log_warn("checkpoint %s: not saved, after %.1f s: %s", name, seconds, st.text);
        if (t->metrics.saves.failures != NULL)
            moe_counter_add(t->metrics.saves.failures, 1);
        return;
    }
    moe_log_info("checkpoint %s: saved in %.1f s, %.1f MiB by all workers", name, seconds,
                 (double)bytes / MIB);
    if (t->metrics.saves.seconds != NULL)
        moe_histogram_observe(t->metrics.saves.seconds, seconds);
}

void moe_train__log_loaded(struct moe_train *t, const char *name, uint64_t begun_ns,
                           uint64_t checked, uint64_t lost_steps, struct moe_status st)
{
    double seconds = seconds_since(begun_ns);
    if (moe_failed(&st)) {
        moe_log_warn("checkpoint %s: not loaded, after %.1f s: %s", name, seconds, st.text);
        if (t->metrics.loads.failures != NULL)
            moe_counter_add(t->metrics.loads.failures, 1);
        return;
    }
    moe_log_info(
        "checkpoint %s: loaded in %.1f s, %.1f MiB checked by this worker; lineage %" PRIu64
        ", weights version %" PRIu64 "; steps that no checkpoint had and that are lost: %" PRIu64,
        name, seconds, (double)checked / MIB, t->lineage, t->weights_version, lost_steps);
    if (t->metrics.loads.seconds != NULL)
        moe_histogram_observe(t->metrics.loads.seconds, seconds);
}

void moe_train__log_stepped(struct moe_train *t, uint64_t id, uint64_t begun_ns, bool skipped)
{
    if (t->metrics.steps != NULL) {
        moe_counter_add(skipped ? t->metrics.skipped : t->metrics.steps, 1);
        moe_histogram_observe(t->metrics.step_seconds, seconds_since(begun_ns));
    }
    if (!skipped)
        return;
    t->skips++;
    uint64_t now = moe_clock_ns();
    if (t->skip_logged_ns != 0 && now - t->skip_logged_ns < SKIP_PAUSE_S * MOE_NS_PER_S)
        return; /* gradients that are never finite would fill the disk */
    t->skip_logged_ns = now;
    moe_log_warn("optimizer step %" PRIu64 " was skipped: a gradient was not finite (%" PRIu64
                 " skipped since this worker started)",
                 id, t->skips);
}
