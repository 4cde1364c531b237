/* SPDX-License-Identifier: Apache-2.0 */
/* Permits to read large messages. A call without a permit posts no read, so HTTP/2 flow control
 * stops its sender. Permits thus bound the memory for received messages for any number of clients.
 */
#include "rpc/serving.h"

/* Retry hint for refused clients: about the time to read a large message. */
enum { RETRY_MS = 50 };

void moe_rpc_admission_init(struct moe_rpc_admission *a, uint32_t limit, uint32_t max_waiting)
{
    *a = (struct moe_rpc_admission){.limit = limit, .max_waiting = max_waiting};
    moe_mutex_init(&a->lock);
    TAILQ_INIT(&a->queue);
}

void moe_rpc_admission_destroy(struct moe_rpc_admission *a)
{
    moe_mutex_destroy(&a->lock);
}

struct moe_status moe_rpc_admission_enter(struct moe_rpc_admission *a, struct moe_rpc_call *call,
                                          bool *now)
{
    /* The result is not read from call->permit: another shard may grant the permit at any time. */
    *now = false;
    bool refused = false;
    moe_mutex_lock(&a->lock);
    if (a->active < a->limit) {
        a->active++;
        *now = true;
        call->permit = MOE_RPC_PERMIT_GRANTED;
    } else if (a->waiting < a->max_waiting) {
        a->waiting++;
        call->permit = MOE_RPC_PERMIT_WAITING;
        TAILQ_INSERT_TAIL(&a->queue, call, waiting);
    } else {
        refused = true;
    }
    moe_mutex_unlock(&a->lock);
    if (refused)
        return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, RETRY_MS,
                               "too many large requests are waiting to be read");
    return moe_ok();
}

void moe_rpc_admission_forget(struct moe_rpc_admission *a, struct moe_rpc_call *call)
{
    if (!call->entry->method.large)
        return;
    moe_mutex_lock(&a->lock);
    if (call->permit == MOE_RPC_PERMIT_WAITING) {
        a->waiting--;
        call->permit = MOE_RPC_PERMIT_NONE;
        TAILQ_REMOVE(&a->queue, call, waiting);
    }
    moe_mutex_unlock(&a->lock);
}

void moe_rpc_admission_leave(struct moe_rpc_admission *a, struct moe_rpc_call *call)
{
    MOE_INVARIANT(call->permit == MOE_RPC_PERMIT_GRANTED);
    call->permit = MOE_RPC_PERMIT_NONE;
    moe_mutex_lock(&a->lock);
    struct moe_rpc_call *next = TAILQ_FIRST(&a->queue);
    if (next == NULL) {
        a->active--;
    } else {
        a->waiting--;
        next->permit = MOE_RPC_PERMIT_GRANTED;
        TAILQ_REMOVE(&a->queue, next, waiting);
        /* Under the lock: only while the call waits is it certain not to be over. */
        moe_rpc_call_ref(next);
    }
    moe_mutex_unlock(&a->lock);
    if (next != NULL)
        moe_rpc_post(&next->grant_op);
}
