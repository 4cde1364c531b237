/* SPDX-License-Identifier: Apache-2.0 */
/* The comm thread and how it watches exchanges; see net.h. */
#include "cuda/session/net.h"

#include "base/clock.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"
#include "cuda/plan/limits.h"
#include "cuda/session/control.h"
#include "cuda/session/window.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_EXCHANGES = 16,          /* unfinished ones: two steps have at most six */
    SPIN_NS = 200 * 1000,        /* the comm thread spins for this long */
    IDLE_SLEEP_NS = 10 * 1000,   /* and then sleeps this long between two polls */
    SLEEP_SLACK_NS = 1000,       /* precision of timers */
    SETUP_POLL_US = 200,         /* while NCCL forms a group */
    LOOK_NS = 1000 * 1000,       /* how often NCCL is asked for errors */
    GRACE_NS = 100 * 1000 * 1000 /* for data under way when the network fails */
};

/* An exchange that was begun. */
struct exchange {
    uint64_t number;
    const uint8_t *trailer[MOE_CUDA_MAX_SLOTS]; /* device address of that slot's trailer; or NULL */
};

struct moe_cuda_net {
    struct moe_cuda_net_config config;
    ncclComm_t comm; /* atomic; its calls block; NULL once it was ended */
    struct moe_cuda_net_progress *progress, *progress_on_device;
    void *warm_up; /* device memory: a message to and from each slot */
    cudaStream_t side;
    uint64_t *trailers; /* pinned; [slots] */

    pthread_t thread;
    bool started;
    struct moe_mutex lock; /* guards the following fields, up to the next comment */
    pthread_cond_t work, done;
    MOE_GUARDED_BY(lock) struct {
        struct moe_cuda_task *first, *last;
        bool quit, outcome_known;
        struct moe_cuda_step_outcome outcome; /* once known */
    };

    bool broken; /* atomic; set before the outcome is known */
    /* Fields of the comm thread. */
    uint64_t budget_ns;
    uint64_t last_number;
    struct exchange flying[MAX_EXCHANGES]; /* a ring */
    uint32_t oldest, count;
    uint64_t since;  /* when the oldest exchange was first seen to have begun; 0 = not yet */
    uint64_t failed; /* when NCCL first reported an error; 0 = none */
    uint64_t looked; /* when NCCL was last asked */
};

/* The peers: all live slots but this one. */
static bool is_peer(const struct moe_cuda_net *net, uint32_t slot)
{
    return slot != net->config.slot && (net->config.live >> slot & 1);
}

static int rank_of(const struct moe_cuda_net *net, uint32_t slot)
{
    return (int)moe_cuda_rank_of(net->config.live, slot);
}

static uint64_t trailer_of(const struct moe_cuda_net *net, uint64_t number)
{
    return (net->config.epoch & 0xffffff) << 40 | number;
}

/* Callers see this until they ask for the outcome. */
static struct moe_status is_broken(void)
{
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "the network of the session broke");
}

/* ------------------------------------------------------------------ giving up */

/* Returns the slot with the message that did not arrive; the lowest peer if all arrived. */
static uint32_t find_missing(struct moe_cuda_net *net, const struct exchange *x)
{
    uint32_t missing = MOE_CUDA_MAX_SLOTS, lowest = MOE_CUDA_MAX_SLOTS;
    cudaError_t rc = cudaSuccess;
    for (uint32_t s = 0; s < net->config.slots && rc == cudaSuccess; s++)
        if (x->trailer[s] != NULL)
            rc = cudaMemcpyAsync(&net->trailers[s], x->trailer[s], sizeof *net->trailers,
                                 cudaMemcpyDeviceToHost, net->side);
    if (rc == cudaSuccess)
        rc = cudaStreamSynchronize(net->side);
    for (uint32_t s = net->config.slots; s-- > 0;) {
        if (x->trailer[s] == NULL)
            continue;
        lowest = s;
        if (rc == cudaSuccess && net->trailers[s] != trailer_of(net, x->number))
            missing = s;
    }
    return missing != MOE_CUDA_MAX_SLOTS ? missing : lowest;
}

/* Ends the communicator, unless it has ended. */
static void end_communicator(struct moe_cuda_net *net)
{
    ncclComm_t comm = __atomic_exchange_n(&net->comm, NULL, __ATOMIC_ACQ_REL);
    if (comm != NULL)
        (void)ncclCommAbort(comm);
}

/* Ends the communicator, and with it every exchange; then finds the slot that caused it. */
static void give_up(struct moe_cuda_net *net, uint32_t code)
{
    struct moe_cuda_step_outcome outcome = {.code = code};
    const struct exchange *oldest = &net->flying[net->oldest];
    __atomic_store_n(&net->progress->broken, 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&net->broken, true, __ATOMIC_SEQ_CST);
    end_communicator(net);
    if (code == MOE_CUDA_PASS_LOST && net->count > 0)
        outcome.slot = find_missing(net, oldest);
    net->count = 0;
    moe_mutex_lock(&net->lock);
    net->outcome = outcome;
    net->outcome_known = true;
    pthread_cond_broadcast(&net->done);
    moe_mutex_unlock(&net->lock);
}

/* Asks NCCL for errors from time to time. */
static bool network_failed(struct moe_cuda_net *net, uint64_t now)
{
    ncclResult_t state = ncclSuccess;
    if (net->failed == 0 && now - net->looked >= LOOK_NS) {
        net->looked = now;
        ncclResult_t rc = ncclCommGetAsyncError(net->comm, &state);
        if (rc != ncclSuccess || (state != ncclSuccess && state != ncclInProgress))
            net->failed = now;
    }
    return net->failed != 0 && now - net->failed >= GRACE_NS;
}

/* Watches the exchanges under way. False when the network is broken. */
static bool watch(struct moe_cuda_net *net)
{
    if (net->broken)
        return false;
    uint64_t ended = __atomic_load_n(&net->progress->ended, __ATOMIC_ACQUIRE);
    while (net->count > 0 && net->flying[net->oldest].number <= ended) {
        net->oldest = (net->oldest + 1) % MAX_EXCHANGES;
        net->count--;
        net->since = 0;
    }
    if (net->count == 0)
        return true;
    uint64_t now = moe_clock_ns();
    uint64_t begun = __atomic_load_n(&net->progress->begun, __ATOMIC_ACQUIRE);
    if (net->since == 0 && begun >= net->flying[net->oldest].number)
        net->since = now;
    if (__atomic_load_n(net->config.abort, __ATOMIC_ACQUIRE) != 0)
        give_up(net, MOE_CUDA_PASS_ABORTED);
    else if (network_failed(net, now) || (net->since != 0 && now - net->since > net->budget_ns))
        give_up(net, MOE_CUDA_PASS_LOST);
    return !net->broken;
}

/* Waits between two polls; `idle_since` is when polling began. */
static void backoff(uint64_t idle_since)
{
    if (moe_clock_ns() - idle_since < SPIN_NS)
        (void)sched_yield();
    else
        (void)nanosleep(&(struct timespec){.tv_nsec = IDLE_SLEEP_NS}, NULL);
}

/* ------------------------------------------------------------------ exchanges */

uint64_t moe_cuda_net_next_trailer(const struct moe_cuda_net *net)
{
    return trailer_of(net, net->last_number + 1);
}

static ncclResult_t send_and_receive(struct moe_cuda_net *net,
                                     const struct moe_cuda_transfer transfer[MOE_CUDA_MAX_SLOTS])
{
    const struct moe_cuda_net_config *c = &net->config;
    ncclComm_t comm = __atomic_load_n(&net->comm, __ATOMIC_ACQUIRE);
    ncclResult_t rc = comm == NULL ? ncclInvalidUsage : ncclGroupStart();
    if (rc != ncclSuccess)
        return rc;
    for (uint32_t i = 1; i < c->slots && rc == ncclSuccess; i++) {
        uint32_t to = (c->slot + i) % c->slots, from = (c->slot + c->slots - i) % c->slots;
        if (is_peer(net, to) && transfer[to].send != NULL)
            rc = ncclSend(transfer[to].send, transfer[to].send_bytes, ncclInt8, rank_of(net, to),
                          comm, c->device->compute);
        if (rc == ncclSuccess && is_peer(net, from) && transfer[from].send != NULL)
            rc = ncclRecv(transfer[from].recv, transfer[from].recv_bytes, ncclInt8,
                          rank_of(net, from), comm, c->device->compute);
    }
    ncclResult_t end = ncclGroupEnd();
    return rc != ncclSuccess ? rc : end;
}

static void remember(struct moe_cuda_net *net, uint64_t number,
                     const struct moe_cuda_transfer transfer[MOE_CUDA_MAX_SLOTS])
{
    MOE_INVARIANT(net->count < MAX_EXCHANGES);
    struct exchange *x = &net->flying[(net->oldest + net->count++) % MAX_EXCHANGES];
    *x = (struct exchange){.number = number};
    for (uint32_t s = 0; s < net->config.slots; s++)
        if (is_peer(net, s) && transfer[s].send != NULL)
            x->trailer[s] =
                (const uint8_t *)transfer[s].recv + transfer[s].recv_bytes - sizeof(uint64_t);
}

struct moe_status moe_cuda_net_exchange(struct moe_cuda_net *net,
                                        const struct moe_cuda_transfer transfer[MOE_CUDA_MAX_SLOTS],
                                        const struct moe_cuda_completion *completion)
{
    cudaStream_t stream = net->config.device->compute;
    if (!watch(net))
        return is_broken();
    uint64_t number = ++net->last_number;
    remember(net, number, transfer);
    MOE_TRY(moe_cuda_launch_begun(net->progress_on_device, number, stream));
    if (send_and_receive(net, transfer) != ncclSuccess) {
        give_up(net, MOE_CUDA_PASS_LOST);
        return is_broken();
    }
    return moe_cuda_launch_ended(net->progress_on_device, number, net->config.control, completion,
                                 stream);
}

struct moe_status moe_cuda_net_settle(struct moe_cuda_net *net)
{
    uint64_t start = moe_clock_ns();
    while (watch(net)) {
        if (net->count == 0)
            return moe_ok();
        backoff(start);
    }
    return is_broken();
}

/* -------------------------------------------------------------------- comm thread */

void moe_cuda_net_post(struct moe_cuda_net *net, struct moe_cuda_task *task)
{
    task->next = NULL;
    task->done = false;
    moe_mutex_lock(&net->lock);
    if (net->first == NULL)
        net->first = task;
    else
        net->last->next = task;
    net->last = task;
    pthread_cond_signal(&net->work);
    moe_mutex_unlock(&net->lock);
}

bool moe_cuda_net_await(struct moe_cuda_net *net, const struct moe_cuda_task *task,
                        uint64_t deadline_ns)
{
    moe_mutex_lock(&net->lock);
    bool in_time = true;
    while (!task->done && in_time)
        in_time = moe_wait_until(&net->done, &net->lock, deadline_ns);
    bool done = task->done;
    moe_mutex_unlock(&net->lock);
    return done;
}

bool moe_cuda_net_outcome(struct moe_cuda_net *net, struct moe_cuda_step_outcome *out)
{
    if (!__atomic_load_n(&net->broken, __ATOMIC_SEQ_CST))
        return false;
    moe_mutex_lock(&net->lock);
    while (!net->outcome_known)
        moe_wait(&net->done, &net->lock);
    *out = net->outcome;
    moe_mutex_unlock(&net->lock);
    return true;
}

static void finish_task(struct moe_cuda_net *net, struct moe_cuda_task *task)
    MOE_REQUIRES(net->lock)
{
    net->first = task->next;
    task->done = true;
    pthread_cond_broadcast(&net->done);
}

static void *run_comm_thread(void *arg)
{
    struct moe_cuda_net *net = arg;
    uint64_t idle_since = moe_clock_ns();
    (void)prctl(PR_SET_TIMERSLACK, SLEEP_SLACK_NS);
    struct moe_status st = moe_cuda_device_use(net->config.device);
    moe_mutex_lock(&net->lock);
    for (;;) {
        struct moe_cuda_task *task = net->first;
        if (task != NULL) {
            moe_mutex_unlock(&net->lock);
            task->status = moe_failed(&st) ? st : task->run(task->ctx);
            idle_since = moe_clock_ns();
            moe_mutex_lock(&net->lock);
            finish_task(net, task);
        } else if (net->count > 0) {
            moe_mutex_unlock(&net->lock);
            if (watch(net))
                backoff(idle_since);
            moe_mutex_lock(&net->lock);
        } else if (net->quit) {
            break;
        } else {
            moe_wait(&net->work, &net->lock);
        }
    }
    moe_mutex_unlock(&net->lock);
    return NULL;
}

/* ---------------------------------------------------------------- open, close */

/* Waits until the call that answered `rc` has ended on this slot. */
static struct moe_status await_group(ncclComm_t group, ncclResult_t rc, uint64_t deadline_ns)
{
    while (rc == ncclSuccess || rc == ncclInProgress) {
        ncclResult_t state = ncclInProgress;
        rc = ncclCommGetAsyncError(group, &state);
        if (rc == ncclSuccess && state == ncclSuccess)
            return moe_ok();
        rc = rc == ncclSuccess ? state : rc;
        if (moe_clock_ns() >= deadline_ns)
            break;
        usleep(SETUP_POLL_US);
    }
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                     "the slots did not connect over the network in time");
}

/* If the calls of a communicator block, each exchange of a step saves about 40 us, because NCCL
 * starts no thread per call. Forming it must not block, so it is split off one that does not block.
 */
static struct moe_status form_network(struct moe_cuda_net *net, ncclComm_t group,
                                      uint64_t deadline_ns)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    ncclResult_t rc = ncclCommSplit(group, 0, rank_of(net, net->config.slot), &net->comm, &config);
    struct moe_status st = await_group(group, rc, deadline_ns);
    if (!net->config.keeps_group) {
        if (!moe_failed(&st))
            st = await_group(group, ncclCommFinalize(group), deadline_ns);
        if (moe_failed(&st) || ncclCommDestroy(group) != ncclSuccess)
            (void)ncclCommAbort(group);
    }
    if (!moe_failed(&st) && net->comm == NULL)
        st = moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ncclCommSplit gave no communicator");
    return st;
}

/* The first exchange of a communicator connects its slots. */
static struct moe_status warm_up(void *ctx)
{
    struct moe_cuda_net *net = ctx;
    struct moe_cuda_transfer transfer[MOE_CUDA_MAX_SLOTS];
    uint8_t *at = net->warm_up;
    uint64_t trailer[2] = {0, moe_cuda_net_next_trailer(net)};
    static_assert(sizeof trailer == MOE_CUDA_TRAILER_BYTES, "a trailer alone is a message");
    MOE_TRY(moe_cuda_mem_copy(net->config.device, at, trailer, sizeof trailer));
    for (uint32_t s = 0; s < net->config.slots; s++)
        transfer[s] = (struct moe_cuda_transfer){.send = at,
                                                 .recv = at + (s + 1) * sizeof trailer,
                                                 .send_bytes = sizeof trailer,
                                                 .recv_bytes = sizeof trailer};
    MOE_TRY(moe_cuda_net_exchange(net, transfer, NULL));
    return moe_cuda_net_settle(net);
}

static struct moe_status connect_slots(struct moe_cuda_net *net, uint64_t deadline_ns)
{
    struct moe_cuda_task task = {.run = warm_up, .ctx = net};
    uint64_t now = moe_clock_ns();
    net->budget_ns = now < deadline_ns ? deadline_ns - now : 1;
    moe_cuda_net_post(net, &task);
    if (!moe_cuda_net_await(net, &task, deadline_ns + GRACE_NS)) {
        /* The call that connects does not return; this ends it. */
        end_communicator(net);
        (void)moe_cuda_net_await(net, &task, MOE_NEVER);
        return is_broken();
    }
    net->budget_ns = net->config.budget_ns;
    return task.status;
}

static size_t warm_up_bytes(const struct moe_cuda_net *net)
{
    return (net->config.slots + (size_t)1) * MOE_CUDA_TRAILER_BYTES;
}

static struct moe_status take_memory(struct moe_cuda_net *net)
{
    struct moe_device *device = net->config.device;
    void *p;
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_HOST, sizeof *net->progress, &p));
    net->progress = p;
    MOE_TRY(MOE_CUDA(cudaHostGetDevicePointer((void **)&net->progress_on_device, p, 0)));
    MOE_TRY(
        moe_cuda_mem_alloc(device, MOE_MEM_HOST, MOE_CUDA_MAX_SLOTS * sizeof *net->trailers, &p));
    net->trailers = p;
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_DEVICE, warm_up_bytes(net), &net->warm_up));
    return MOE_CUDA(cudaStreamCreateWithFlags(&net->side, cudaStreamNonBlocking));
}

static struct moe_status start_comm_thread(struct moe_cuda_net *net)
{
    moe_mutex_init(&net->lock);
    pthread_cond_init(&net->work, NULL);
    moe_wait_init(&net->done);
    net->started = moe_thread_create(&net->thread, "moe-net", run_comm_thread, net) == 0;
    return net->started ? moe_ok()
                        : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                                    "no thread for a session's network");
}

struct moe_status moe_cuda_net_open(const struct moe_cuda_net_config *config, ncclComm_t group,
                                    uint64_t deadline_ns, struct moe_cuda_net **out)
{
    struct moe_cuda_net *net = calloc(1, sizeof *net);
    if (net == NULL) {
        if (!config->keeps_group)
            (void)ncclCommAbort(group);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session's network");
    }
    net->config = *config;
    struct moe_status st;
    MOE_TRY_GOTO(st, form_network(net, group, deadline_ns), failed);
    MOE_TRY_GOTO(st, take_memory(net), failed);
    MOE_TRY_GOTO(st, start_comm_thread(net), failed);
    MOE_TRY_GOTO(st, connect_slots(net, deadline_ns), failed);
    *out = net;
    return st;
failed:
    moe_cuda_net_close(net, false);
    return st;
}

static void stop_comm_thread(struct moe_cuda_net *net)
{
    if (!net->started)
        return;
    moe_mutex_lock(&net->lock);
    net->quit = true;
    pthread_cond_signal(&net->work);
    moe_mutex_unlock(&net->lock);
    (void)pthread_join(net->thread, NULL);
    pthread_cond_destroy(&net->work);
    pthread_cond_destroy(&net->done);
    moe_mutex_destroy(&net->lock);
}

void moe_cuda_net_close(struct moe_cuda_net *net, bool together)
{
    if (net == NULL)
        return;
    stop_comm_thread(net);
    /* No exchange is under way, so nothing here waits for a peer. */
    if (together && net->comm != NULL && ncclCommFinalize(net->comm) == ncclSuccess &&
        ncclCommDestroy(net->comm) == ncclSuccess)
        net->comm = NULL;
    end_communicator(net);
    if (net->side != NULL)
        (void)cudaStreamDestroy(net->side);
    struct moe_device *device = net->config.device;
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, net->warm_up, warm_up_bytes(net));
    moe_cuda_mem_free(device, MOE_MEM_HOST, net->trailers,
                      MOE_CUDA_MAX_SLOTS * sizeof *net->trailers);
    moe_cuda_mem_free(device, MOE_MEM_HOST, net->progress, sizeof *net->progress);
    free(net);
}
