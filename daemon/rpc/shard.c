/* Shards: a completion queue, the thread that polls it, and the inbox through which other threads
 * reach the calls that live here. */
#include "base/clock.h"
#include "rpc/serving.h"

#include <sched.h>

/* The shard whose thread this is. */
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

/* Applies everything, in the order of posting. What an operation posts here in turn (a permit that
 * goes on, an answer out of a part's release) waits for those taken out before it. */
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

/* An empty batch completes at once: the core's only public way to put an event of one's own into a
 * queue. An inbox that was not empty has such an event on its way already, or is being drained. */
void moe_rpc_post(struct moe_rpc_op *op)
{
    struct moe_rpc_call *c = op->call;
    struct moe_rpc_shard *shard = c->shard;
    if (this_shard == shard) {
        (void)push(shard, op);
        drain_inbox(shard);
        return;
    }
    moe_rpc_call_hold(c); /* the op and its reference may be gone once it is in the inbox */
    if (push(shard, op))
        MOE_RPC_START(c->core, NULL, 0, &shard->on_wake);
    moe_rpc_call_release(c);
}

/* ------------------------------------------------------------------ thread */

/* False when the server could not start. */
static bool wait_for_start(struct moe_rpc_server *server)
{
    pthread_mutex_lock(&server->lock);
    while (server->phase == MOE_RPC_STARTING)
        pthread_cond_wait(&server->changed, &server->lock);
    bool serving = server->phase == MOE_RPC_SERVING;
    pthread_mutex_unlock(&server->lock);
    return serving;
}

static void post_accepts(struct moe_rpc_shard *shard)
{
    struct moe_rpc_server *server = shard->server;
    for (size_t i = 0; i < server->entry_count; i++)
        moe_rpc_accept(shard, i);
    pthread_mutex_lock(&server->lock);
    server->shards_ready++;
    pthread_cond_broadcast(&server->changed);
    pthread_mutex_unlock(&server->lock);
}

/* The next event, or a timeout at `at` or while the shard stays awake. */
static grpc_event next_event(struct moe_rpc_shard *shard, uint64_t at)
{
    const uint64_t spin = shard->server->spin_ns;
    const bool awake = spin > 0 && moe_clock_ns() < shard->awake_until;
    grpc_event event = grpc_completion_queue_next(
        shard->queue, awake ? gpr_inf_past(GPR_CLOCK_MONOTONIC) : moe_rpc_time_to_core(at), NULL);
    if (spin > 0 && event.type == GRPC_OP_COMPLETE)
        shard->awake_until = moe_clock_ns() + spin;
    else if (awake)
        sched_yield(); /* who has something to do comes first */
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
        if (event.type == GRPC_OP_COMPLETE) {
            struct moe_rpc_tag *tag = event.tag;
            tag->fn(tag, event.success != 0);
        }
    }
}

struct moe_status moe_rpc_shard_start(struct moe_rpc_shard *shard)
{
    const struct moe_rpc_server *server = shard->server;
    moe_rpc_limits_init(&shard->reading, server->read_limit_ns, moe_rpc_reading_passed);
    moe_rpc_limits_init(&shard->taking, server->send_limit_ns, moe_rpc_taking_passed);
    shard->on_wake.fn = on_wake;
    if (pthread_create(&shard->thread, NULL, shard_main, shard) != 0)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "cannot start a thread for serving");
    shard->started = true;
    pthread_setname_np(shard->thread, "rpc-shard");
    return moe_ok();
}

void moe_rpc_shard_stop(struct moe_rpc_shard *shard)
{
    if (shard->queue == NULL)
        return;
    grpc_completion_queue_shutdown(shard->queue);
    if (shard->started)
        pthread_join(shard->thread, NULL);
    /* The core wants to be asked until it says so, also where the thread never served. */
    while (
        grpc_completion_queue_next(shard->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).type !=
        GRPC_QUEUE_SHUTDOWN)
        ;
    grpc_completion_queue_destroy(shard->queue);
}
