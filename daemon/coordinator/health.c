/* SPDX-License-Identifier: Apache-2.0 */
/* What health checks say about the coordinator. It is ready while it can take in workers, whatever
 * the state of the group: a coordinator that were not reachable because no worker has come would
 * never get one. */
#include "coordinator/service_state.h"

/* A main loop that saves state waits for this much at least without being stuck. */
#define SLOW_DISK_NS (2 * MOE_NS_PER_S)

enum { STEP_MS = 500 };

/* On any thread; reads atomics only. */
static void add_conditions(void *ctx, struct moe_health *v)
{
    const struct moe_coordinator *c = ctx;
    int state = atomic_load(&c->health.state);
    moe_health_add(v, "group", state == MOE_GROUP_DRAINING ? "DRAINING" : NULL, false,
                   "%s: %u of %u workers", moe_coordinator__state_name(state),
                   atomic_load(&c->health.taken), c->health.slots);
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
