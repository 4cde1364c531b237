/* SPDX-License-Identifier: Apache-2.0 */
/* What health checks say about this worker. Loops of its parts are judged by daemon/progress.h;
 * this file adds the conditions: a view, no drain, a lease where the group trains. */
#include "worker/worker_state.h"

#include "base/clock.h"
#include "rpc/server.h"

static bool holds_lease(const struct moe_worker *w)
{
    return moe_lease_gate_held(w->train != NULL ? &w->lease : NULL);
}

static void add_view(const struct moe_worker *w, struct moe_health *v)
{
    uint64_t epoch = atomic_load(&w->epoch), loaded, total;
    moe_loader_progress(w->loader, &loaded, &total);
    if (epoch != 0)
        moe_health_add(v, "view", NULL, false, "serves epoch %llu", (unsigned long long)epoch);
    else if (loaded < total)
        moe_health_add(v, "view", "LOADING", false, "%llu of %llu bytes of weights are loaded",
                       (unsigned long long)loaded, (unsigned long long)total);
    else
        moe_health_add(v, "view", "NO_VIEW", false, "%s",
                       total == 0 ? "waits for the coordinator's assignment"
                                  : "loaded, waits for the group");
}

/* On any thread; reads atomics only. */
static void add_conditions(void *ctx, struct moe_health *v)
{
    const struct moe_worker *w = ctx;
    bool draining = atomic_load(&w->draining);
    add_view(w, v);
    moe_health_add(v, "drain", draining ? "DRAINING" : NULL, false, "%s",
                   draining ? "finishes accepted work and leaves" : "none");
    if (w->train != NULL)
        moe_health_add(v, "lease", holds_lease(w) ? NULL : "NO_LEASE", false, "%s",
                       holds_lease(w) ? "held" : "a group that trains answers nothing without");
}

struct health {
    bool alive, ready;
};

static struct health look(const struct moe_worker *w)
{
    struct moe_health v = {.alive = true, .ready = true};
    if (w->config.progress != NULL)
        moe_progress_judge(w->config.progress, moe_clock_ns(), &v);
    else
        v.ready = atomic_load(&w->epoch) != 0 && !atomic_load(&w->draining) && holds_lease(w);
    return (struct health){.alive = v.alive, .ready = v.ready};
}

static void set_health_of(struct moe_rpc_server *server, bool trains, struct health h)
{
    moe_rpc_server_set_health(server, MOE_HEALTH_LIVE, h.alive);
    moe_rpc_server_set_health(server, "", h.ready);
    moe_rpc_server_set_health(server, "moe.v1.ExpertService", h.ready);
    if (trains) /* else unknown to health checks */
        moe_rpc_server_set_health(server, "moe.v1.TrainingService", h.ready);
}

static void set_health(struct moe_worker *w, struct health h)
{
    bool trains = w->training_service != NULL;
    set_health_of(w->server, trains && w->admin_server == NULL, h);
    if (w->admin_server != NULL)
        set_health_of(w->admin_server, trains, h);
}

/* Two threads may do this at the same time: the last to set it looks again. */
void moe_worker__show_health(struct moe_worker *w)
{
    struct health shown, now = look(w);
    do {
        shown = now;
        set_health(w, shown);
        now = look(w);
    } while (shown.alive != now.alive || shown.ready != now.ready);
}

static void on_change(void *ctx, const struct moe_health *v)
{
    (void)v;
    moe_worker__show_health(ctx);
}

struct moe_status moe_worker__watch_health(struct moe_worker *w)
{
    if (w->config.progress == NULL)
        return moe_ok();
    moe_progress_set_conditions(w->config.progress, add_conditions, w);
    return moe_progress_watch(w->config.progress, on_change, w);
}
