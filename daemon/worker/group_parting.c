/* How a worker leaves: it says so, finishes what it has accepted, says that too, and takes part in
 * the steps of others until the coordinator ends the session. Every stage has a limit. */
#include "worker/group_state.h"

#include "base/clock.h"
#include "base/log.h"
#include "worker/report.h"

enum {
    DRAIN_ANSWER_MS = 1000, /* wait for the answer to DrainNotice before draining anyway */
    DRAIN_POLL_MS = 5,
    LINGER_MS = 2000, /* a drained worker stays this long for others when nobody can tell it that
                         they are done */
};

void moe_group__go(struct moe_group *g, struct moe_status outcome)
{
    if (g->parting >= GOING)
        return;
    g->parting = GOING;
    g->outcome = outcome;
    g->config.hooks.cancel_load(g->config.hooks.ctx);
    moe_group__end_view(g, moe_failed(&outcome) ? outcome.text : "this worker has left");
    moe_group__post_leave(g, true);
}

void moe_group__begin_drain(struct moe_group *g, uint32_t limit_ms, const char *reason)
{
    if (g->parting >= DRAINING)
        return;
    g->parting = DRAINING;
    uint64_t now = moe_clock_ns();
    g->drain_limit_ns = now + (limit_ms != 0 ? limit_ms : g->config.drain_ms) * MOE_NS_PER_MS;
    g->parting_ns = now;
    moe_log_info("draining: %s", reason);
    g->config.hooks.drain(g->config.hooks.ctx);
    if (g->epoch == 0 && !g->committed)
        g->give_up_ns = now;
}

/* DRAINING and DRAINED, at parting_ns. */
static void continue_drain(struct moe_group *g)
{
    uint64_t now = moe_clock_ns();
    if (g->parting == DRAINING && g->config.hooks.drained(g->config.hooks.ctx)) {
        g->parting = DRAINED;
        moe_log_info("drained");
        moe_report_leaving(g->stream, "drained");
        uint64_t linger_ns = g->epoch != 0 ? LINGER_MS * MOE_NS_PER_MS : 0;
        if (!g->registered && g->drain_limit_ns > now + linger_ns)
            g->drain_limit_ns = now + linger_ns;
    }
    if (now >= g->drain_limit_ns)
        moe_group__go(
            g, g->parting == DRAINED
                   ? moe_ok()
                   : moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_DRAINING,
                               "the drain's time is up; requests that were left are cancelled"));
    else
        g->parting_ns =
            g->parting == DRAINED ? g->drain_limit_ns : now + DRAIN_POLL_MS * MOE_NS_PER_MS;
}

void moe_group__on_drain_wish(struct moe_group *g, const char *reason)
{
    if (g->parting != STAYING)
        return;
    if (!g->registered) {
        moe_group__begin_drain(g, 0, reason);
        return;
    }
    g->parting = ASKED;
    g->parting_ns = moe_clock_ns() + DRAIN_ANSWER_MS * MOE_NS_PER_MS;
    moe_report_drain_notice(g->stream, reason);
}

void moe_group__on_parting_timer(struct moe_group *g)
{
    if (g->parting == ASKED)
        moe_group__begin_drain(g, 0, "the coordinator does not answer");
    else
        continue_drain(g);
}
