/* SPDX-License-Identifier: Apache-2.0 */
/* The inbox of a shard: the way for other threads to the calls that live there. A lock-free stack;
 * a push to an empty one wakes the shard's thread. */
#include "rpc/serving.h"

/* The shard of the current thread; NULL on other threads. */
static _Thread_local struct moe_rpc_shard *this_shard;

/* True when the inbox was empty. */
static bool push(struct moe_rpc_shard *shard, struct moe_rpc_op *op)
{
    struct moe_rpc_op *head = atomic_load(&shard->inbox);
    do {
        op->next = head;
    } while (!atomic_compare_exchange_weak(&shard->inbox, &head, op));
    return head == NULL;
}

static struct moe_rpc_op *oldest_first(struct moe_rpc_op *newest)
{
    struct moe_rpc_op *oldest = NULL;
    while (newest != NULL) {
        struct moe_rpc_op *next = newest->next;
        newest->next = oldest;
        oldest = newest;
        newest = next;
    }
    return oldest;
}

/* Applies all operations in the order of posting. An operation may post another one to this inbox
 * (an answer from a part's release); it runs after those already taken out. */
static void drain_inbox(struct moe_rpc_shard *shard)
{
    struct moe_rpc_op *op;
    if (shard->applying)
        return;
    shard->applying = true;
    while ((op = oldest_first(atomic_exchange(&shard->inbox, NULL))) != NULL) {
        for (struct moe_rpc_op *next; op != NULL; op = next) {
            next = op->next;
            shard->apply(op);
        }
    }
    shard->applying = false;
}

static void on_wake(struct moe_rpc_tag *tag, bool ok)
{
    (void)ok;
    drain_inbox(MOE_RPC_OWNER(struct moe_rpc_shard, on_wake, tag));
}

void moe_rpc_inbox_init(struct moe_rpc_shard *shard, void (*apply)(struct moe_rpc_op *op))
{
    shard->on_wake.fn = on_wake;
    shard->apply = apply;
}

void moe_rpc_inbox_enter(struct moe_rpc_shard *shard)
{
    this_shard = shard;
}

/* An empty batch completes at once: the core's only public way to add an event to a queue. If the
 * inbox was not empty, such an event is pending, or the inbox is being drained. */
void moe_rpc_post(struct moe_rpc_op *op)
{
    struct moe_rpc_call *c = op->call;
    struct moe_rpc_shard *shard = c->shard;
    if (this_shard == shard) {
        (void)push(shard, op);
        drain_inbox(shard);
        return;
    }
    moe_rpc_call_ref(c); /* the op and its reference may be gone once it is in the inbox */
    if (push(shard, op))
        MOE_RPC_START(c->core, NULL, 0, &shard->on_wake);
    moe_rpc_call_unref(c);
}
