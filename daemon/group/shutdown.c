/* SPDX-License-Identifier: Apache-2.0 */
/* Shutdown: the worker sends DrainNotice, finishes accepted requests, sends Leaving, and takes part
 * in steps of others until the coordinator ends the session. Every phase has a time limit. */
#include "group/state.h"

#include "base/clock.h"
#include "daemon/log.h"
#include "daemon/notify.h"
#include "group/report.h"

enum {
    DRAIN_ANSWER_MS = 1000, /* wait for the answer to DrainNotice before draining anyway */
    DRAIN_POLL_MS = 5,
    FREEING_MS = 20000, /* to free all memory after the drain; for the service manager */
    LINGER_MS = 2000,   /* a drained worker stays this long for others without a coordinator */
};

void moe_group__begin_leave(struct moe_group *g, struct moe_status outcome)
{
    if (g->shutdown >= LEAVING)
        return;
    g->shutdown = LEAVING;
    g->outcome = outcome;
    g->config.hooks.cancel_load(g->config.hooks.ctx);
    moe_group__end_view(g, moe_failed(&outcome) ? outcome.text : "this worker has left");
    moe_group__post_leave(g, true);
}

static void extend_stop(const struct moe_group *g, uint64_t now)
{
    uint64_t left_ns = g->drain_limit_ns > now ? g->drain_limit_ns - now : 0;
    moe_notify_extend(left_ns / MOE_NS_PER_MS + FREEING_MS);
}

void moe_group__await_move(struct moe_group *g)
{
    if (g->shutdown != DRAIN_REQUESTED || g->experts_move)
        return;
    uint64_t now = moe_clock_ns();
    g->experts_move = true;
    g->drain_limit_ns = now + g->config.drain_ms * MOE_NS_PER_MS;
    g->shutdown_ns = now + g->config.drain_ms * MOE_NS_PER_MS / 2;
    moe_log_info("before the drain, other workers load the experts of this one");
    moe_notify_stopping();
    moe_notify_status("leaving: other workers load the experts of this one");
    extend_stop(g, now);
}

void moe_group__begin_drain(struct moe_group *g, uint32_t limit_ms, const char *reason)
{
    if (g->shutdown >= DRAINING)
        return;
    uint64_t now = moe_clock_ns();
    if (!g->experts_move || limit_ms != 0) /* else its time runs already */
        g->drain_limit_ns = now + (limit_ms != 0 ? limit_ms : g->config.drain_ms) * MOE_NS_PER_MS;
    g->shutdown = DRAINING;
    g->shutdown_ns = now;
    moe_log_info("draining: %s", reason);
    moe_notify_stopping();
    moe_notify_status("draining: %s", reason);
    extend_stop(g, now);
    g->config.hooks.drain(g->config.hooks.ctx);
    if (g->epoch == 0 && !g->committed)
        g->give_up_ns = now;
}

/* In DRAINING and DRAINED, at shutdown_ns. */
static void continue_drain(struct moe_group *g)
{
    uint64_t now = moe_clock_ns();
    if (g->shutdown == DRAINING && g->config.hooks.drained(g->config.hooks.ctx)) {
        g->shutdown = DRAINED;
        moe_log_info("drained");
        moe_report_leaving(g->stream, "drained");
        uint64_t linger_ns = g->epoch != 0 ? LINGER_MS * MOE_NS_PER_MS : 0;
        if (!g->registered && g->drain_limit_ns > now + linger_ns)
            g->drain_limit_ns = now + linger_ns;
    }
    if (now >= g->drain_limit_ns)
        moe_group__begin_leave(
            g, g->shutdown == DRAINED
                   ? moe_ok()
                   : moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_DRAINING,
                               "the drain's time is up; remaining requests are cancelled"));
    else
        g->shutdown_ns =
            g->shutdown == DRAINED ? g->drain_limit_ns : now + DRAIN_POLL_MS * MOE_NS_PER_MS;
}

void moe_group__request_drain(struct moe_group *g, const char *reason)
{
    if (g->shutdown != RUNNING)
        return;
    if (!g->registered) {
        moe_group__begin_drain(g, 0, reason);
        return;
    }
    uint64_t now = moe_clock_ns();
    g->shutdown = DRAIN_REQUESTED;
    g->shutdown_ns = now + DRAIN_ANSWER_MS * MOE_NS_PER_MS;
    moe_report_drain_notice(g->stream, reason);
}

void moe_group__on_shutdown_timer(struct moe_group *g)
{
    if (g->shutdown == DRAIN_REQUESTED)
        moe_group__begin_drain(g, 0,
                               g->experts_move ? "its experts have not moved in time"
                                               : "the coordinator does not answer");
    else
        continue_drain(g);
}
