/* SPDX-License-Identifier: Apache-2.0 */
/* Shards: a completion queue, the thread that polls it, and the inbox through which other threads
 * reach the calls that live here. */
#include "base/clock.h"
#include "base/thread.h"
#include "base/wait.h"
#include "rpc/serving.h"

#include <sched.h>

/* The shard of the current thread; NULL on other threads. */
static _Thread_local struct moe_rpc_shard *this_shard;

/* ------------------------------------------------------------------ inbox */

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
 * (a granted permit, an answer from a part's release); it runs after those already taken out. */
static void drain_inbox(struct moe_rpc_shard *shard)
{
    struct moe_rpc_op *op;
    if (shard->applying)
        return;
    shard->applying = true;
    while ((op = oldest_first(atomic_exchange(&shard->inbox, NULL))) != NULL) {
        for (struct moe_rpc_op *next; op != NULL; op = next) {
            next = op->next;
            moe_rpc_apply(op);
        }
    }
    shard->applying = false;
}

static void on_wake(struct moe_rpc_tag *tag, bool ok)
{
    (void)ok;
    drain_inbox(MOE_RPC_OWNER(struct moe_rpc_shard, on_wake, tag));
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

/* ------------------------------------------------------------------ thread */

/* False when the server could not start. */
static bool wait_for_start(struct moe_rpc_server *server)
{
    moe_mutex_lock(&server->lock);
    while (server->phase == MOE_RPC_STARTING)
        moe_wait(&server->changed, &server->lock);
    bool serving = server->phase == MOE_RPC_SERVING;
    moe_mutex_unlock(&server->lock);
    return serving;
}

static void post_accepts(struct moe_rpc_shard *shard)
{
    struct moe_rpc_server *server = shard->server;
    for (size_t i = 0; i < server->entry_count; i++)
        moe_rpc_accept(shard, i);
    moe_mutex_lock(&server->lock);
    server->shards_ready++;
    pthread_cond_broadcast(&server->changed);
    moe_mutex_unlock(&server->lock);
}

/* The next event, or a timeout: at `at`, or at once while the shard polls. */
static grpc_event next_event(struct moe_rpc_shard *shard, uint64_t at)
{
    const uint64_t spin = shard->server->spin_ns;
    const bool polls = spin > 0 && moe_clock_ns() < shard->spin_until;
    grpc_event event = grpc_completion_queue_next(
        shard->queue, polls ? gpr_inf_past(GPR_CLOCK_MONOTONIC) : moe_rpc_time_to_core(at), NULL);
    if (spin > 0 && event.type == GRPC_OP_COMPLETE)
        shard->spin_until = moe_clock_ns() + spin;
    else if (polls)
        sched_yield(); /* threads with work have priority */
    return event;
}

static void *shard_main(void *arg)
{
    struct moe_rpc_shard *shard = arg;
    this_shard = shard;
    if (!wait_for_start(shard->server))
        return NULL;
    post_accepts(shard);
    for (;;) {
        uint64_t reading = moe_rpc_limits_expire(&shard->reading);
        uint64_t taking = moe_rpc_limits_expire(&shard->taking);
        grpc_event event = next_event(shard, reading < taking ? reading : taking);
        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        if (event.type == GRPC_OP_COMPLETE)
            moe_rpc_run_event(&event);
    }
}

struct moe_status moe_rpc_shard_start(struct moe_rpc_shard *shard)
{
    const struct moe_rpc_server *server = shard->server;
    moe_rpc_limits_init(&shard->reading, server->read_limit_ns, moe_rpc_reading_passed);
    moe_rpc_limits_init(&shard->taking, server->send_limit_ns, moe_rpc_taking_passed);
    shard->on_wake.fn = on_wake;
    if (moe_thread_create(&shard->thread, "moe-rpc-shard", shard_main, shard) != 0)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "cannot start a shard thread");
    shard->started = true;
    return moe_ok();
}

void moe_rpc_shard_stop(struct moe_rpc_shard *shard)
{
    if (shard->queue == NULL)
        return;
    grpc_completion_queue_shutdown(shard->queue);
    if (shard->started)
        pthread_join(shard->thread, NULL);
    /* The queue must be drained until QUEUE_SHUTDOWN, also when the thread never served. */
    while (
        grpc_completion_queue_next(shard->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).type !=
        GRPC_QUEUE_SHUTDOWN)
        ;
    grpc_completion_queue_destroy(shard->queue);
}
