/* SPDX-License-Identifier: Apache-2.0 */
/* Metrics of the group, and its health. Values are copied from the machine after every batch of
 * inputs, so a scrape never waits for the owner thread. */
#include "base/build.h"
#include "coordinator/service_state.h"
#include "daemon/log.h"
#include "daemon/notify.h"

#include <stdio.h>
#include <string.h>

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

static const char *const model_states[] = {
    [MOE_MODEL_PLANNING] = "planning", [MOE_MODEL_LOADING] = "loading",
    [MOE_MODEL_SERVING] = "serving",   [MOE_MODEL_UNLOADING] = "unloading",
    [MOE_MODEL_FAILED] = "failed",     [MOE_MODEL_WAITING] = "waiting"};

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
    for (int s = MOE_MODEL_PLANNING; s <= MOE_MODEL_WAITING; s++)
        MOE_TRY(add_gauge(c, "moe_group_models", "Added models, by state.", "state",
                          model_states[s], &o->models[s]));
    MOE_TRY(add_gauge(c, "moe_group_slots", "Slots with experts: the size of the group.", NULL,
                      NULL, &o->slots));
    MOE_TRY(add_gauge(c, "moe_group_slots_max", "Workers that the group can have.", NULL, NULL,
                      &o->slots_max));
    MOE_TRY(add_gauge(c, "moe_group_spares", "Live workers that hold no experts.", NULL, NULL,
                      &o->spares));
    MOE_TRY(add_gauge(c, "moe_group_slots_taken", "Slots taken by a live worker.", NULL, NULL,
                      &o->taken));
    MOE_TRY(add_gauge(c, "moe_view_live_slots", "Slots of the view in force; 0 = there is none.",
                      NULL, NULL, &o->live_slots));
    for (int i = 0; i < MOE_CAUSE_COUNT; i++)
        MOE_TRY(add_counter(
            c, "moe_group_reforms_total", "Epochs that ended or did not come about, by cause.",
            "reason", moe_membership_cause_name((enum moe_membership_cause)i), &o->reforms[i]));
    for (int moved = 0; moved < 2; moved++)
        MOE_TRY(add_counter(c, "moe_automatic_moves_total",
                            "Moves of experts by --rebalance auto, by how they ended.", "result",
                            moved ? "moved" : "undone", &o->automatic_moves[moved]));
    return moe_ok();
}

static struct moe_status add_leadership(struct moe_coordinator *c)
{
    struct observed *o = &c->seen;
    MOE_TRY(add_gauge(c, "moe_coordinator_leads",
                      "1 while this coordinator leads the group; always 1 without etcd.", NULL,
                      NULL, &o->leads));
    MOE_TRY(add_gauge(c, "moe_leader_lease_remaining_seconds",
                      "Time left of the leader's lease, by its own count; 0 = does not lead.", NULL,
                      NULL, &o->leader_lease));
    MOE_TRY(add_gauge(c, "moe_leader_lease_age_seconds",
                      "Time since the last renewal that etcd has answered; 0 = does not lead.",
                      NULL, NULL, &o->leader_age));
    MOE_TRY(add_gauge(c, "moe_etcd_away", "1 while etcd has not answered for a leader's lease.",
                      NULL, NULL, &o->etcd_away));
    MOE_TRY(add_counter(c, "moe_leader_terms_total", "Times that this coordinator began to lead.",
                        NULL, NULL, &o->terms));
    return add_counter(c, "moe_etcd_errors_total",
                       "Calls of etcd that failed, or had no answer in time.", NULL, NULL,
                       &o->etcd_errors);
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
    MOE_TRY(add_leadership(c));
    struct moe_membership_group g;
    moe_membership_group(c->machine, &g);
    c->health.slots = g.slots;
    for (uint32_t n = 0; n <= g.replicas; n++) {
        char copies[8];
        snprintf(copies, sizeof copies, "%u", n);
        MOE_TRY(add_gauge(c, "moe_view_experts",
                          "Experts of the default model, over all layers, by the number of copies "
                          "on slots of the view in force.",
                          "live_copies", copies, &o->view_experts[n]));
    }
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
    MOE_TRY(add_gauge(c, "moe_state_saved", "1 unless the last write of the group state failed.",
                      NULL, NULL, &o->saved));
    moe_gauge_set(o->saved, 1);
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
    c->seen.reported_state = REPORTED_NOTHING;
    MOE_TRY(moe_metrics_create(&c->seen.registry));
    c->seen.shown = (struct moe_inspect_metrics){.metrics = c->seen.registry};
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

static void observe_models(struct moe_coordinator *c)
{
    unsigned count[MOE_MODEL_WAITING + 1] = {0};
    struct moe_added_info info;
    for (size_t i = 0; moe_added_info(c->models, i, &info); i++)
        count[info.state]++;
    for (int s = MOE_MODEL_PLANNING; s <= MOE_MODEL_WAITING; s++)
        moe_gauge_set(c->seen.models[s], count[s]);
}

static void observe_leadership(struct moe_coordinator *c)
{
    struct observed *o = &c->seen;
    struct moe_etcd_report r;
    moe_gauge_set(o->leads, c->leads ? 1 : 0);
    if (c->etcd == NULL)
        return;
    moe_etcd_report(c->etcd, &r);
    moe_gauge_set(o->leader_lease, (double)r.remaining_ns / (double)MOE_NS_PER_S);
    moe_gauge_set(o->leader_age, (double)r.age_ns / (double)MOE_NS_PER_S);
    moe_gauge_set(o->etcd_away, r.away ? 1 : 0);
    moe_counter_add(o->terms, r.terms - moe_counter_value(o->terms));
    moe_counter_add(o->etcd_errors, r.errors - moe_counter_value(o->etcd_errors));
    atomic_store(&c->health.store_away, r.away || r.stray || c->unfit || c->unchecked);
}

/* A coordinator that does not lead knows nothing of the group. */
static void observe_standby(struct moe_coordinator *c)
{
    struct observed *o = &c->seen;
    o->seen_epoch = o->view_end_ns = 0;
    moe_log_set_epoch(0);
    moe_gauge_set(o->epoch, 0);
    moe_gauge_set(o->slots, 0);
    moe_gauge_set(o->slots_max, 0);
    moe_gauge_set(o->spares, 0);
    moe_gauge_set(o->taken, 0);
    for (int s = MOE_GROUP_WAITING; s <= MOE_GROUP_FAILED; s++)
        moe_gauge_set(o->state[s], 0);
    for (uint32_t s = 0; s < c->health.slots; s++)
        moe_gauge_set(o->lease[s], 0);
    observe_models(c);
    moe_gauge_set(o->live_slots, 0);
    for (uint32_t n = 0; n <= c->machine_config.replicas; n++)
        moe_gauge_set(o->view_experts[n], 0);
    o->counted_epoch = 0;
    atomic_store(&c->health.state, 0);
    int state = atomic_load(&c->health.store_away) ? REPORTED_AWAY : 0;
    if (o->reported_state != state)
        moe_notify_status(state == 0 ? "does not lead" : "does not lead: etcd cannot be used");
    o->reported_state = state;
}

/* The experts are counted once for each view, and after each move. */
static void observe_view(struct moe_coordinator *c, const struct moe_membership_group *g)
{
    struct observed *o = &c->seen;
    uint32_t experts[MOE_PLACEMENT_SLOTS_MAX + 1] = {0};
    moe_gauge_set(o->live_slots, g->epoch != 0 ? __builtin_popcountll(g->live) : 0);
    uint32_t version = moe_placement_version(moe_membership_placement(c->machine));
    if (o->counted_epoch == g->epoch && o->counted_version == version)
        return;
    o->counted_epoch = g->epoch;
    o->counted_version = version;
    if (g->epoch != 0)
        moe_placement_count_copies(moe_membership_placement(c->machine), g->live, experts);
    for (uint32_t n = 0; n <= g->replicas; n++)
        moe_gauge_set(o->view_experts[n], experts[n]);
}

void moe_coordinator__observe(struct moe_coordinator *c)
{
    observe_leadership(c);
    if (!c->leads) {
        observe_standby(c);
        return;
    }
    struct observed *o = &c->seen;
    struct moe_membership_group g;
    moe_membership_group(c->machine, &g);
    moe_log_set_epoch(g.epoch);
    moe_gauge_set(o->epoch, (double)g.epoch);
    moe_gauge_set(o->last_epoch, (double)g.last_epoch);
    moe_gauge_set(o->slots, g.size);
    moe_gauge_set(o->slots_max, g.slots);
    observe_view(c, &g);
    observe_recovery(o, g.epoch);
    for (int s = MOE_GROUP_WAITING; s <= MOE_GROUP_FAILED; s++)
        moe_gauge_set(o->state[s], g.state == (enum moe_group_state)s ? 1 : 0);
    observe_models(c);
    for (int i = 0; i < MOE_CAUSE_COUNT; i++)
        moe_counter_add(o->reforms[i], g.causes[i] - o->seen_causes[i]);
    memcpy(o->seen_causes, g.causes, sizeof o->seen_causes);
    for (int moved = 0; moved < 2; moved++) {
        uint64_t ended = moe_moves_automatic(c->moves, moved != 0);
        moe_counter_add(o->automatic_moves[moved], ended - o->seen_moves[moved]);
        o->seen_moves[moved] = ended;
    }
    unsigned taken = 0, spares = 0;
    for (uint32_t s = 0; s < g.slots; s++) {
        struct moe_membership_worker w = {0};
        bool here = moe_membership_worker(c->machine, s, &w) && w.lease_remaining_ns > 0;
        bool place = (g.places >> s & 1) != 0;
        taken += here && place;
        spares += here && !place;
        moe_gauge_set(o->lease[s], (double)w.lease_remaining_ns / (double)MOE_NS_PER_S);
    }
    moe_gauge_set(o->taken, taken);
    moe_gauge_set(o->spares, spares);
    atomic_store(&c->health.size, g.size);
    atomic_store(&c->health.state, (int)g.state);
    atomic_store(&c->health.taken, taken);
    if (o->reported_state == (int)g.state && o->reported_taken == taken &&
        o->reported_size == g.size)
        return;
    o->reported_state = (int)g.state;
    o->reported_taken = taken;
    o->reported_size = g.size;
    moe_notify_status("%s: %u of %u workers", states[g.state], taken, g.size);
}

void moe_coordinator__observe_stop(struct moe_coordinator *c)
{
    moe_metrics_http_stop(c->seen.http);
    moe_metrics_destroy(c->seen.registry);
}

/* ------------------------------------------------------------------ health
 *
 * The coordinator is ready while it can take in workers, whatever the state of the group: one that
 * were not reachable because no worker has come would never get one. */

/* A main loop that saves state waits for this much at least without being stuck. */
#define SLOW_DISK_NS (2 * MOE_NS_PER_S)

enum { STEP_MS = 500 };

/* On any thread; reads atomics only. */
static void add_conditions(void *ctx, struct moe_health *v)
{
    const struct moe_coordinator *c = ctx;
    int state = atomic_load(&c->health.state);
    if (atomic_load(&c->health.store_away))
        moe_health_add(v, "store", "STORE_AWAY", false, "etcd cannot be used; see the log");
    if (state == 0)
        moe_health_add(v, "group", NULL, false, "does not lead");
    else
        moe_health_add(v, "group", state == MOE_GROUP_DRAINING ? "DRAINING" : NULL, false,
                       "%s: %u of %u workers", moe_coordinator__state_name(state),
                       atomic_load(&c->health.taken), atomic_load(&c->health.size));
}

static void show(void *ctx, const struct moe_health *v)
{
    struct moe_coordinator *c = ctx;
    struct moe_rpc_server *sessions = c->control_server != NULL ? c->control_server : c->server;
    moe_rpc_server_set_health(c->server, MOE_HEALTH_LIVE, v->alive);
    moe_rpc_server_set_health(c->server, "", v->ready);
    moe_rpc_server_set_health(c->server, "moe.v1.AdminService", v->ready);
    if (sessions != c->server)
        moe_rpc_server_set_health(sessions, MOE_HEALTH_LIVE, v->alive);
    moe_rpc_server_set_health(sessions, "moe.v1.CoordinatorService", v->ready);
}

struct moe_status moe_coordinator__health_create(struct moe_coordinator *c, uint64_t step_ms)
{
    uint64_t step_ns = (step_ms > 0 ? step_ms : STEP_MS) * MOE_NS_PER_MS;
    const struct moe_progress_config config = {.step_ns = step_ns,
                                               .limit_ns = step_ns + SLOW_DISK_NS};
    MOE_TRY(moe_progress_create(&config, &c->health.progress));
    moe_progress_set_conditions(c->health.progress, add_conditions, c);
    return moe_ok();
}

struct moe_status moe_coordinator__health_watch(struct moe_coordinator *c)
{
    struct moe_health v;
    moe_progress_judge(c->health.progress, moe_clock_ns(), &v);
    show(c, &v); /* before anyone can ask */
    return moe_progress_watch(c->health.progress, show, c);
}
