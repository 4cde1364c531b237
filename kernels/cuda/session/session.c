/* SPDX-License-Identifier: Apache-2.0 */
/* The state of a session, its outcomes, and the calls that its comm thread runs; see session.h.
 * Knows neither layers nor rows. */
#include "cuda/session/session.h"

#include "base/clock.h"

/* ------------------------------------------------------------------ outcomes */

struct moe_status moe_cuda_session_usable(const struct moe_session *s)
{
    if (__atomic_load_n(&s->aborted, __ATOMIC_ACQUIRE))
        return moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "the session was aborted");
    if (!__atomic_load_n(&s->failed, __ATOMIC_ACQUIRE))
        return moe_ok();
    const int missing = moe_cuda_session_missing(s);
    if (missing >= 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                         "the session broke earlier, without slot %d", missing);
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE, "the session broke earlier");
}

int moe_cuda_session_missing(const struct moe_session *s)
{
    return __atomic_load_n(&s->missing, __ATOMIC_ACQUIRE);
}

void moe_cuda_session_fail(struct moe_session *s)
{
    __atomic_store_n(&s->failed, true, __ATOMIC_RELEASE);
}

bool moe_cuda_session_refused(const struct moe_session *s, const struct moe_status *st)
{
    return st->code == MOE_FAILED_PRECONDITION && st->reason == MOE_REASON_SHAPE_MISMATCH &&
           !__atomic_load_n(&s->failed, __ATOMIC_ACQUIRE);
}

struct moe_status moe_cuda_session_outcome_status(struct moe_session *s,
                                                  const struct moe_cuda_step_outcome *outcome)
{
    struct moe_cuda_step_outcome why = *outcome;
    if (why.code == MOE_CUDA_PASS_BROKEN && s->net != NULL)
        (void)moe_cuda_net_outcome(s->net, &why);
    switch (why.code) {
    case MOE_CUDA_PASS_GOOD: return moe_ok();
    case MOE_CUDA_PASS_REFUSED:
        if (why.slot < MOE_CUDA_MEANS_OTHER)
            return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                             "slot %u has no memory for this pass", why.slot);
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH,
                         "slot %u runs another layer, dtype or bucket",
                         why.slot - MOE_CUDA_MEANS_OTHER);
    case MOE_CUDA_PASS_LOST:
        __atomic_store_n(&s->missing, (int)why.slot, __ATOMIC_RELEASE);
        moe_cuda_session_fail(s);
        __atomic_fetch_or(&s->lost, UINT64_C(1) << why.slot, __ATOMIC_ACQ_REL);
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                         "slot %u did not answer within %u ms", why.slot, s->config.wait_budget_ms);
    case MOE_CUDA_PASS_ABORTED:
        moe_cuda_session_fail(s);
        return moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "the session was aborted");
    default:
        moe_cuda_session_fail(s);
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                         "slot %u sends something else than it announced", why.slot);
    }
}

struct moe_status moe_cuda_session_finish(struct moe_session *s)
{
    struct moe_cuda_step_outcome *copy = &s->host_control->outcome;
    struct moe_status st = MOE_CUDA(cudaMemcpyAsync(copy, &s->control->outcome, sizeof *copy,
                                                    cudaMemcpyDeviceToHost, s->device->compute));
    if (!moe_failed(&st))
        st = moe_cuda_device_finish(s->device);
    if (!moe_failed(&st))
        return moe_cuda_session_outcome_status(s, copy);
    moe_cuda_session_fail(s);
    return st;
}

void moe_cuda_session_abort(struct moe_session *s)
{
    __atomic_store_n(&s->aborted, true, __ATOMIC_SEQ_CST);
    __atomic_store_n(&s->host_control->abort, 1, __ATOMIC_SEQ_CST);
}

uint64_t moe_cuda_session_lost(struct moe_session *s)
{
    return __atomic_load_n(&s->lost, __ATOMIC_ACQUIRE);
}

/* ------------------------------------------------------------------ comm thread */

struct comm_call {
    struct moe_session *session;
    struct moe_status (*fn)(void *ctx);
    void *ctx;
};

static struct moe_status run_comm_call(void *ctx)
{
    const struct comm_call *e = ctx;
    MOE_TRY(e->fn(e->ctx));
    return moe_cuda_net_settle(e->session->net);
}

struct moe_status moe_cuda_session_run(struct moe_session *s, struct moe_status (*fn)(void *ctx),
                                       void *ctx)
{
    if (s->net == NULL)
        return fn(ctx);
    struct comm_call comm_call = {.session = s, .fn = fn, .ctx = ctx};
    struct moe_cuda_task task = {.run = run_comm_call, .ctx = &comm_call};
    moe_cuda_net_post(s->net, &task);
    (void)moe_cuda_net_await(s->net, &task, MOE_NEVER);
    return moe_cuda_session_explain(s, task.status);
}

static struct moe_status do_nothing(void *ctx)
{
    (void)ctx;
    return moe_ok();
}

struct moe_status moe_cuda_session_catch_up(struct moe_session *s)
{
    return moe_cuda_session_run(s, do_nothing, NULL);
}

struct moe_status moe_cuda_session_explain(struct moe_session *s, struct moe_status st)
{
    struct moe_cuda_step_outcome why;
    if (moe_failed(&st) && s->net != NULL && moe_cuda_net_outcome(s->net, &why))
        return moe_cuda_session_outcome_status(s, &why);
    return st;
}

const char *moe_cuda_session_transport(const struct moe_session *s)
{
    if (s->net != NULL)
        return s->relay.domains != 0 ? "nvlink and network" : "network";
    const bool alone = (s->config.live & (s->config.live - 1)) == 0;
    return alone ? "none" : "nvlink";
}
