/* SPDX-License-Identifier: Apache-2.0 */
/* Shards: a completion queue and the thread that polls it; inbox.c has the way in for other
 * threads. */
#include "base/clock.h"
#include "base/thread.h"
#include "rpc/serving.h"

#include <sched.h>

/* The next event, or a timeout: at `at`, or at once while the shard polls. */
static grpc_event next_event(struct moe_rpc_shard *shard, uint64_t at)
{
    const uint64_t spin = shard->server->spin_ns;
    const bool polls = spin > 0 && moe_clock_ns() < shard->spin_until;
    const bool looks = polls || !TAILQ_EMPTY(&shard->waiting);
    grpc_event event = grpc_completion_queue_next(
        shard->queue, looks ? gpr_inf_past(GPR_CLOCK_MONOTONIC) : moe_rpc_time_to_core(at), NULL);
    if (spin > 0 && event.type == GRPC_OP_COMPLETE)
        shard->spin_until = moe_clock_ns() + spin;
    else if (polls)
        sched_yield(); /* threads with work have priority */
    return event;
}

/* Does what is due, and returns when something is due again. The first shard does the server's
 * part. */
static uint64_t do_timed(struct moe_rpc_shard *shard)
{
    struct moe_rpc_server *server = shard->server;
    uint64_t next = moe_rpc_limits_expire(&shard->reading);
    next = moe_earlier(next, moe_rpc_limits_expire(&shard->taking));
    if (shard->turn_ns > 0)
        next = moe_earlier(next, moe_clock_ns() + shard->turn_ns);
    return shard == server->shards ? moe_earlier(next, moe_rpc_memory_check(&server->memory))
                                   : next;
}

static void *shard_main(void *arg)
{
    struct moe_rpc_shard *shard = arg;
    moe_rpc_inbox_enter(shard);
    for (;;) {
        moe_loop_turn(shard->loop);
        grpc_event event = next_event(shard, do_timed(shard));
        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        if (event.type == GRPC_OP_COMPLETE)
            moe_rpc_run_event(&event);
        else
            moe_rpc_next_round(shard);
    }
}

struct moe_status moe_rpc_shard_start(struct moe_rpc_shard *shard)
{
    const struct moe_rpc_server *server = shard->server;
    moe_rpc_limits_init(&shard->reading, server->read_limit_ns, moe_rpc_reading_passed);
    moe_rpc_limits_init(&shard->taking, server->send_limit_ns, moe_rpc_taking_passed);
    moe_rpc_inbox_init(shard, moe_rpc_apply);
    TAILQ_INIT(&shard->waiting);
    int rc = moe_thread_create(&shard->thread, "moe-rpc-shard", shard_main, shard);
    shard->started = rc == 0;
    return rc == 0 ? moe_ok() : moe_thread_failure("moe-rpc-shard", rc);
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
