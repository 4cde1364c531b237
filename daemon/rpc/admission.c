/* Who may read a large message. A call without a permit has no read posted, so that HTTP/2 flow
 * control holds its sender back: memory for messages being received is bounded by permits, not by
 * the number of clients. */
#include "rpc/serving.h"

/* What a refused client should wait: about the time a large message takes to be read. */
enum { RETRY_MS = 50 };

void moe_rpc_admission_init(struct moe_rpc_admission *a, uint32_t limit, uint32_t max_waiting)
{
    *a = (struct moe_rpc_admission){.limit = limit, .max_waiting = max_waiting};
    pthread_mutex_init(&a->lock, NULL);
    TAILQ_INIT(&a->queue);
}

void moe_rpc_admission_destroy(struct moe_rpc_admission *a)
{
    pthread_mutex_destroy(&a->lock);
}

struct moe_status moe_rpc_admission_enter(struct moe_rpc_admission *a, struct moe_rpc_call *call,
                                          bool *now)
{
    /* Not told from call->permit afterwards: another shard may turn WAITING into HELD meanwhile. */
    *now = false;
    bool refused = false;
    pthread_mutex_lock(&a->lock);
    if (a->active < a->limit) {
        a->active++;
        *now = true;
        call->permit = MOE_RPC_PERMIT_HELD;
    } else if (a->waiting < a->max_waiting) {
        a->waiting++;
        call->permit = MOE_RPC_PERMIT_WAITING;
        TAILQ_INSERT_TAIL(&a->queue, call, waiting);
    } else {
        refused = true;
    }
    pthread_mutex_unlock(&a->lock);
    if (refused)
        return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, RETRY_MS,
                               "too many large requests are waiting to be read");
    return moe_ok();
}

void moe_rpc_admission_forget(struct moe_rpc_admission *a, struct moe_rpc_call *call)
{
    if (!call->entry->method.large)
        return;
    pthread_mutex_lock(&a->lock);
    if (call->permit == MOE_RPC_PERMIT_WAITING) {
        a->waiting--;
        call->permit = MOE_RPC_PERMIT_NONE;
        TAILQ_REMOVE(&a->queue, call, waiting);
    }
    pthread_mutex_unlock(&a->lock);
}

void moe_rpc_admission_leave(struct moe_rpc_admission *a, struct moe_rpc_call *call)
{
    MOE_INVARIANT(call->permit == MOE_RPC_PERMIT_HELD);
    call->permit = MOE_RPC_PERMIT_NONE;
    pthread_mutex_lock(&a->lock);
    struct moe_rpc_call *next = TAILQ_FIRST(&a->queue);
    if (next == NULL) {
        a->active--;
    } else {
        a->waiting--;
        next->permit = MOE_RPC_PERMIT_HELD;
        TAILQ_REMOVE(&a->queue, next, waiting);
        /* Under the lock: a call that waits is not over, but it may be as soon as it does not. */
        moe_rpc_call_hold(next);
    }
    pthread_mutex_unlock(&a->lock);
    if (next != NULL)
        moe_rpc_post(&next->grant_op);
}
