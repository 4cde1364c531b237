/* SPDX-License-Identifier: Apache-2.0 */
/* Metrics of the group. Values are copied from the machine after every batch of
 * inputs, so a scrape never waits for the owner thread. */
#include "base/build.h"
#include "coordinator/service_state.h"
#include "daemon/log.h"
#include "daemon/notify.h"

#include <stdio.h>

static struct moe_status add_gauge(struct moe_coordinator *c, const char *name, const char *help,
                                   const char *label, const char *value, struct moe_gauge **out)
{
    struct moe_metric_desc d = {.name = name, .help = help, .labels = {{label, value}}};
    return moe_metrics_add_gauge(c->seen.registry, &d, out);
}

static struct moe_status add_counter(struct moe_coordinator *c, const char *name, const char *help,
                                     const char *label, const char *value, struct moe_counter **out)
{
    struct moe_metric_desc d = {.name = name, .help = help, .labels = {{label, value}}};
    return moe_metrics_add_counter(c->seen.registry, &d, out);
}

static const char *const states[] = {
    [MOE_GROUP_WAITING] = "waiting",   [MOE_GROUP_LOADING] = "loading",
    [MOE_GROUP_FORMING] = "forming",   [MOE_GROUP_SERVING] = "serving",
    [MOE_GROUP_DEGRADED] = "degraded", [MOE_GROUP_DRAINING] = "draining",
    [MOE_GROUP_FAILED] = "failed"};

const char *moe_coordinator__state_name(int state)
{
    return states[state];
}

static struct moe_status add_group(struct moe_coordinator *c)
{
    struct observed *o = &c->seen;
    struct moe_gauge *info;
    const struct moe_metric_desc build = {
        .name = "moe_build_info",
        .help = "Release and commit of the coordinator; always 1.",
        .labels = {{"version", moe_build_version()}, {"commit", moe_build_commit()}}};
    MOE_TRY(moe_metrics_add_gauge(c->seen.registry, &build, &info));
    moe_gauge_set(info, 1);
    MOE_TRY(add_gauge(c, "moe_group_epoch", "Epoch in force; 0 = none.", NULL, NULL, &o->epoch));
    MOE_TRY(add_gauge(c, "moe_group_last_epoch", "Highest epoch ever announced.", NULL, NULL,
                      &o->last_epoch));
    for (int s = MOE_GROUP_WAITING; s <= MOE_GROUP_FAILED; s++)
        MOE_TRY(add_gauge(c, "moe_group_state", "1 for the state that the group is in.", "state",
                          states[s], &o->state[s]));
    MOE_TRY(add_gauge(c, "moe_group_slots", "Slots of the group.", NULL, NULL, &o->slots));
    MOE_TRY(add_gauge(c, "moe_group_slots_taken", "Slots taken by a live worker.", NULL, NULL,
                      &o->taken));
    for (int i = 0; i < MOE_CAUSE_COUNT; i++)
        MOE_TRY(add_counter(
            c, "moe_group_reforms_total", "Epochs that ended or did not come about, by cause.",
            "reason", moe_membership_cause_name((enum moe_membership_cause)i), &o->reforms[i]));
    return moe_ok();
}

static struct moe_status add_waited(struct moe_coordinator *c, const char *message,
                                    struct moe_histogram **out)
{
    const struct moe_metric_desc d = {
        .name = "moe_session_wait_seconds",
        .help = "Time from the arrival of a worker's message to its turn in the coordinator.",
        .labels = {{"message", message}}};
    return moe_metrics_add_histogram(c->seen.registry, &d, moe_metrics_seconds_bounds,
                                     MOE_METRIC_SECONDS_BOUNDS, out);
}

/* Seconds: of workers that have kept their weights, to a load of a large model. */
static const double recovery_bounds[] = {0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1,   2.5,
                                         5,    10,    20,   30,  60,   120, 300, 600};

static struct moe_status add_all(struct moe_coordinator *c)
{
    struct observed *o = &c->seen;
    MOE_TRY(add_group(c));
    struct moe_membership_group g;
    moe_membership_group(c->machine, &g);
    c->health.slots = g.slots;
    for (uint32_t s = 0; s < g.slots; s++) {
        char slot[8];
        snprintf(slot, sizeof slot, "%u", s);
        MOE_TRY(add_gauge(c, "moe_lease_remaining_seconds", "Time left of the lease of each slot.",
                          "slot", slot, &o->lease[s]));
    }
    MOE_TRY(add_counter(c, "moe_session_messages_total", "Messages received from workers.", NULL,
                        NULL, &o->messages));
    MOE_TRY(add_counter(c, "moe_session_malformed_total",
                        "Messages from workers that could not be understood.", NULL, NULL,
                        &o->malformed));
    MOE_TRY(add_counter(c, "moe_state_save_failures_total",
                        "Writes of the group state that failed.", NULL, NULL, &o->save_failures));
    MOE_TRY(add_waited(c, "heartbeat", &o->heartbeat_waited));
    MOE_TRY(add_waited(c, "other", &o->others_waited));
    const struct moe_metric_desc recovery = {
        .name = "moe_group_recovery_seconds",
        .help = "Time from the end of a view to the commit of the next one."};
    MOE_TRY(moe_metrics_add_histogram(o->registry, &recovery, recovery_bounds,
                                      sizeof recovery_bounds / sizeof *recovery_bounds,
                                      &o->recovery_seconds));
    struct moe_metric_desc save = {.name = "moe_state_save_seconds",
                                   .help = "Time to make the group state durable."};
    return moe_metrics_add_histogram(o->registry, &save, moe_metrics_seconds_bounds,
                                     MOE_METRIC_SECONDS_BOUNDS, &o->save_seconds);
}

struct moe_status moe_coordinator__observe_start(struct moe_coordinator *c, const char *listen)
{
    c->seen.reported_state = -1;
    MOE_TRY(moe_metrics_create(&c->seen.registry));
    MOE_TRY(moe_process_metrics_add(c->seen.registry, &c->seen.process));
    MOE_TRY(add_all(c));
    if (listen == NULL)
        return moe_ok();
    struct moe_metrics_http_config http = {
        .listen = listen, .metrics = c->seen.registry, .progress = c->health.progress};
    return moe_metrics_http_start(&http, &c->seen.http);
}

/* A view that ends and the next one are never of the same look: between them, members answer. */
static void observe_recovery(struct observed *o, uint64_t epoch)
{
    uint64_t now = moe_clock_ns();
    if (epoch == 0 && o->seen_epoch != 0)
        o->view_end_ns = now;
    if (epoch != 0 && o->view_end_ns != 0) {
        moe_histogram_observe(o->recovery_seconds,
                              (double)(now - o->view_end_ns) / (double)MOE_NS_PER_S);
        o->view_end_ns = 0;
    }
    o->seen_epoch = epoch;
}

void moe_coordinator__observe(struct moe_coordinator *c)
{
    struct observed *o = &c->seen;
    struct moe_membership_group g;
    moe_membership_group(c->machine, &g);
    moe_log_set_epoch(g.epoch);
    moe_gauge_set(o->epoch, (double)g.epoch);
    moe_gauge_set(o->last_epoch, (double)g.last_epoch);
    moe_gauge_set(o->slots, g.slots);
    observe_recovery(o, g.epoch);
    for (int s = MOE_GROUP_WAITING; s <= MOE_GROUP_FAILED; s++)
        moe_gauge_set(o->state[s], g.state == (enum moe_group_state)s ? 1 : 0);
    for (int i = 0; i < MOE_CAUSE_COUNT; i++)
        moe_counter_add(o->reforms[i], g.causes[i] - moe_counter_value(o->reforms[i]));
    unsigned taken = 0;
    for (uint32_t s = 0; s < g.slots; s++) {
        struct moe_membership_worker w = {0};
        if (moe_membership_worker(c->machine, s, &w) && w.lease_remaining_ns > 0)
            taken++;
        moe_gauge_set(o->lease[s], (double)w.lease_remaining_ns / (double)MOE_NS_PER_S);
    }
    moe_gauge_set(o->taken, taken);
    atomic_store(&c->health.state, (int)g.state);
    atomic_store(&c->health.taken, taken);
    if (o->reported_state == (int)g.state && o->reported_taken == taken)
        return;
    o->reported_state = (int)g.state;
    o->reported_taken = taken;
    moe_notify_status("%s: %u of %u workers", states[g.state], taken, g.slots);
}

void moe_coordinator__observe_stop(struct moe_coordinator *c)
{
    moe_metrics_http_stop(c->seen.http);
    moe_metrics_destroy(c->seen.registry);
}
