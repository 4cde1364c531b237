/* SPDX-License-Identifier: Apache-2.0 */
/* What a worker reports of training by itself: series, and lines of the log. */
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

/* "save" or "load". */
static struct moe_status add_checkpoints(struct moe_metrics *m, const char *kind,
                                         struct moe_train_checkpoint_metrics *out)
{
    const struct moe_metric_desc seconds = {
        .name = "moe_train_checkpoint_seconds",
        .help = "Time from a Save's or Load's ticket to its end, of those that ended well.",
        .labels = {{"kind", kind}}};
    const struct moe_metric_desc failures = {
        .name = "moe_train_checkpoint_failures_total",
        .help = "Saves and Loads that began and did not end well, those "
                "called off included.",
        .labels = {{"kind", kind}}};
    MOE_TRY(moe_metrics_add_histogram(m, &seconds, checkpoint_bounds,
                                      sizeof checkpoint_bounds / sizeof *checkpoint_bounds,
                                      &out->seconds));
    return moe_metrics_add_counter(m, &failures, &out->failures);
}

/* "done" or "total". */
static struct moe_status add_progress(struct moe_metrics *m, const char *kind,
                                      struct moe_gauge **out)
{
    const struct moe_metric_desc desc = {
        .name = "moe_train_checkpoint_bytes",
        .help = "Bytes of the Save or Load under way that this worker has written or checked, and "
                "in all; 0 = none, or not known yet.",
        .labels = {{"kind", kind}}};
    return moe_metrics_add_gauge(m, &desc, out);
}

struct moe_status moe_train__add_metrics(struct moe_metrics *m, struct moe_train_metrics *to)
{
    const struct {
        const char *name, *help;
        struct moe_counter **counter;
        struct moe_gauge **gauge;
    } rows[] = {
        {"moe_train_backwards_total", "Backward passes that this worker took part in.",
         .counter = &to->backwards},
        {"moe_train_steps_total", "Optimizer steps that moved the weights.", .counter = &to->steps},
        {"moe_train_skipped_steps_total",
         "Optimizer steps that moved nothing because a gradient was not finite.",
         .counter = &to->skipped},
        {"moe_train_repeats_total",
         "Repeats that this worker was asked: calls that had been run and were not run again.",
         .counter = &to->repeats},
        {"moe_weights_version", "Version of the weights.", .gauge = &to->version},
        {"moe_train_lineage",
         "Rises when the group goes back to a checkpoint or to the model as loaded.",
         .gauge = &to->lineage},
        {"moe_train_retained_bytes",
         "Memory of forward passes retained for Backward on this worker.", .gauge = &to->retained},
        {"moe_train_retained_steps_total",
         "Forward steps of which this worker's device retained activations for Backward.",
         .counter = &to->retained_steps},
        {"moe_train_reused_steps_total",
         "Backward passes that used retained activations on this worker instead of computing gate "
         "and up again.",
         .counter = &to->reused},
        {"moe_train_retained_device_bytes",
         "Device memory of activations retained for Backward on this worker.",
         .gauge = &to->activations},
        {"moe_train_answers_bytes",
         "Memory of Backward answers retained for repeats on this worker.", .gauge = &to->answers},
        {"moe_train_retained_idle_bytes",
         "Memory of dropped passes and answers, ready for the next ones.", .gauge = &to->idle},
        {"moe_train_unsaved_steps",
         "Optimizer steps since the last checkpoint: lost when the group ends.",
         .gauge = &to->unsaved},
        {"moe_train_lost_steps_total",
         "Optimizer steps that were lost as the group went back to a checkpoint or to the model as "
         "loaded.",
         .counter = &to->lost},
        {"moe_train_state_bytes", "Memory of gradients and optimizer state on this worker.",
         .gauge = &to->state},
    };
    const struct moe_metric_desc step = {
        .name = "moe_train_step_seconds",
        .help = "Time of an optimizer step on this worker, waits on other workers included."};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct moe_metric_desc desc = {.name = rows[i].name, .help = rows[i].help};
        MOE_TRY(rows[i].counter != NULL ? moe_metrics_add_counter(m, &desc, rows[i].counter)
                                        : moe_metrics_add_gauge(m, &desc, rows[i].gauge));
    }
    MOE_TRY(add_progress(m, "done", &to->job_done));
    MOE_TRY(add_progress(m, "total", &to->job_total));
    MOE_TRY(add_checkpoints(m, "save", &to->saves));
    MOE_TRY(add_checkpoints(m, "load", &to->loads));
    return moe_metrics_add_histogram(m, &step, moe_metrics_seconds_bounds,
                                     MOE_METRIC_SECONDS_BOUNDS, &to->step_seconds);
}

void moe_train__count(struct moe_counter *counter, uint64_t more)
{
    if (counter != NULL && more != 0)
        moe_counter_add(counter, more);
}

void moe_train__show(struct moe_train *t)
{
    const struct moe_train_metrics *m = &t->metrics;
    if (t->config.metrics == NULL)
        return;
    moe_mutex_lock(&t->lock);
    moe_gauge_set(m->version, (double)t->weights_version);
    moe_gauge_set(m->lineage, (double)t->lineage);
    moe_gauge_set(m->unsaved, (double)t->unsaved);
    moe_gauge_set(m->state, (double)t->state_bytes);
    moe_mutex_unlock(&t->lock);
    moe_gauge_set(m->activations, (double)moe_activations_bytes(t->activations));
    moe_gauge_set(m->retained, (double)moe_pass_store_bytes(t->passes));
    moe_gauge_set(m->answers, (double)moe_pass_store_bytes(t->answers));
    moe_gauge_set(m->idle, (double)(moe_pass_store_idle_bytes(t->passes) +
                                    moe_pass_store_idle_bytes(t->answers)));
}

void moe_train__collect(void *train)
{
    struct moe_train *t = train;
    struct moe_train_state state = {0};
    moe_mutex_lock(&t->lock);
    moe_train__read_job(t, &state);
    moe_mutex_unlock(&t->lock);
    moe_gauge_set(t->metrics.job_done, (double)state.job_bytes);
    moe_gauge_set(t->metrics.job_total, (double)state.job_bytes_total);
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
    else if (call->kind == MOE_STEP_LOAD)
        moe_log_info("checkpoint %s: loading begins: its files are checked first", call->name);
}

void moe_train__log_ended(struct moe_train *t, const struct moe_train_call *call, uint64_t begun_ns,
                          uint64_t bytes, uint64_t lost_steps, struct moe_status st)
{
    bool is_save = call->kind == MOE_STEP_SAVE;
    struct moe_train_checkpoint_metrics *m = is_save ? &t->metrics.saves : &t->metrics.loads;
    double seconds = seconds_since(begun_ns), mib = (double)bytes / MIB;
    if (call->kind == MOE_STEP_EXPORT)
        return;
    if (moe_failed(&st)) {
        moe_log_warn("checkpoint %s: not %s, after %.1f s: %s", call->name,
                     is_save ? "saved" : "loaded", seconds, st.text);
        moe_train__count(m->failures, 1);
        return;
    }
    if (is_save)
        moe_log_info("checkpoint %s: saved in %.1f s, %.1f MiB by all workers", call->name, seconds,
                     mib);
    else
        moe_log_info("checkpoint %s: loaded in %.1f s, %.1f MiB checked by this worker; lineage "
                     "%" PRIu64 ", weights version %" PRIu64
                     "; steps that no checkpoint had and that are lost: %" PRIu64,
                     call->name, seconds, mib, t->lineage, t->weights_version, lost_steps);
    if (m->seconds != NULL)
        moe_histogram_observe(m->seconds, seconds);
}

void moe_train_log_leaving(struct moe_train *t)
{
    struct moe_train_state state;
    if (t == NULL)
        return;
    moe_train_read_state(t, &state);
    if (state.unsaved == 0)
        return;
    moe_log_warn("%" PRIu64 " optimizer step%s in no checkpoint and %s lost as this worker "
                 "leaves%s",
                 state.unsaved, state.unsaved == 1 ? " is" : "s are",
                 state.unsaved == 1 ? "is" : "are",
                 state.job == MOE_STEP_SAVE ? ", unless the Save under way completes" : "");
}

void moe_train__log_stepped(struct moe_train *t, uint64_t id, uint64_t begun_ns, bool skipped)
{
    moe_train__count(skipped ? t->metrics.skipped : t->metrics.steps, 1);
    if (t->metrics.step_seconds != NULL)
        moe_histogram_observe(t->metrics.step_seconds, seconds_since(begun_ns));
    if (!skipped)
        return;
    t->skips++;
    uint64_t now = moe_clock_ns();
    if (t->skip_logged_ns != 0 && now - t->skip_logged_ns < SKIP_PAUSE_S * MOE_NS_PER_S)
        return; /* else gradients that are never finite fill the disk */
    t->skip_logged_ns = now;
    moe_log_warn("optimizer step %" PRIu64 " was skipped: a gradient was not finite (%" PRIu64
                 " skipped since this worker started)",
                 id, t->skips);
}
