/* SPDX-License-Identifier: Apache-2.0 */
/* The core as a library: its life, clock, log and allocator. */
#include "base/clock.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"
#include "daemon/log.h"
#include "rpc/core.h"

#include <dlfcn.h>
#include <grpc/support/log.h>
#include <grpc/support/time.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Starting needs as many threads as the machine has processors, within limits, and a few more; and
 * room for what they allocate, also in the allocator's present heap. */
enum { THREADS_LEAST = 2, THREADS_MOST = 32, THREADS_MORE = 5 };
enum { ROOM_BYTES = 128 << 20, HEAP_BYTES = 4 << 20 };
/* The core ends within milliseconds, or, if it could not start a thread, never. */
#define END_NS (20 * MOE_NS_PER_S)

static void forward_log(gpr_log_func_args *line)
{
    /* A peer causes most of the core's errors (refused connections, broken handshakes). They also
     * arrive as statuses. */
    moe_log_debug("grpc: %s", line->message);
}

static void install_log(void)
{
    gpr_set_log_function(forward_log);
}

/* ------------------------------------------------------------------ start */

struct probe {
    struct moe_mutex gate; /* held until all threads have started */
};

static void *probe_main(void *arg)
{
    struct probe *p = arg;
    moe_mutex_lock(&p->gate);
    moe_mutex_unlock(&p->gate);
    return NULL;
}

static size_t threads_of_core(void)
{
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    const size_t own = processors < THREADS_LEAST  ? THREADS_LEAST
                       : processors > THREADS_MOST ? THREADS_MOST
                                                   : (size_t)processors;
    return own + THREADS_MORE;
}

/* Whether the system gives what the core needs. The core itself cannot be asked: it aborts without
 * memory, and goes on without a thread that it counts as started. */
static bool core_can_start(void)
{
    pthread_t threads[THREADS_MOST + THREADS_MORE];
    const size_t wanted = threads_of_core();
    size_t started = 0;
    struct probe p;
    moe_mutex_init(&p.gate);
    moe_mutex_lock(&p.gate);
    while (started < wanted &&
           moe_thread_create(&threads[started], "moe-rpc-probe", probe_main, &p) == 0)
        started++;
    void *room =
        mmap(NULL, ROOM_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void *volatile block = malloc(HEAP_BYTES); /* volatile: no compiler may leave it out */
    moe_mutex_unlock(&p.gate);
    for (size_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    const bool enough = started == wanted && room != MAP_FAILED && block != NULL;
    if (room != MAP_FAILED)
        (void)munmap(room, ROOM_BYTES);
    free(block);
    moe_mutex_destroy(&p.gate);
    return enough;
}

static atomic_uint users;
/* The process that has started the core; 0 while it is not used. */
static atomic_int owner;

/* A child that fork leaves without exec has the core's descriptors, of which one is an epoll that
 * it shares with its parent, but none of its threads. What it does there ends the parent. */
static struct moe_status check_owner(void)
{
    int self = getpid(), known = 0;
    if (atomic_compare_exchange_strong(&owner, &known, self) || known == self)
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                     "this process was forked from one that uses gRPC, and gRPC does not survive "
                     "fork: fork before the first client, or exec");
}

struct moe_status moe_rpc_library_ref(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    MOE_TRY(check_owner());
    if (atomic_load(&users) == 0 && !core_can_start())
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "gRPC cannot start: the system gives less than %d MiB of addresses, or "
                         "less than %zu threads (ulimit -v, ulimit -u, the control group)",
                         ROOM_BYTES >> 20, threads_of_core());
    pthread_once(&once, install_log);
    grpc_init();
    atomic_fetch_add(&users, 1);
    return moe_ok();
}

/* ------------------------------------------------------------------ end */

/* The wait for the core's end. */
struct ending {
    pthread_cond_t changed;
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) bool over;
};

static void *ending_main(void *arg)
{
    struct ending *e = arg;
    grpc_shutdown_blocking();
    moe_mutex_lock(&e->lock);
    e->over = true;
    pthread_cond_signal(&e->changed);
    moe_mutex_unlock(&e->lock);
    return NULL;
}

static bool wait_for_end(struct ending *e)
{
    const uint64_t until = moe_clock_ns() + END_NS;
    moe_mutex_lock(&e->lock);
    bool in_time = true;
    while (!e->over && in_time)
        in_time = moe_wait_until(&e->changed, &e->lock, until);
    const bool over = e->over;
    moe_mutex_unlock(&e->lock);
    return over;
}

/* Ends the core on another thread, which is left alone if the core does not end. */
static bool end_core(void)
{
    pthread_t thread;
    struct ending *e = calloc(1, sizeof *e);
    if (e == NULL)
        return false;
    moe_wait_init(&e->changed);
    moe_mutex_init(&e->lock);
    const bool started = moe_thread_create(&thread, "moe-rpc-end", ending_main, e) == 0;
    if (started && !wait_for_end(e)) {
        (void)pthread_detach(thread); /* it may still use `e` */
        return false;
    }
    if (started)
        (void)pthread_join(thread, NULL);
    moe_mutex_destroy(&e->lock);
    (void)pthread_cond_destroy(&e->changed);
    free(e);
    return started;
}

void moe_rpc_library_unref(void)
{
    if (atomic_fetch_sub(&users, 1) > 1)
        grpc_shutdown_blocking(); /* others use the core: returns at once */
    else if (end_core())
        atomic_store(&owner, 0);
    else
        moe_log_warn("gRPC does not end, or has no thread for it: it is left as it is");
}

/* ------------------------------------------------------------------ clock */

gpr_timespec moe_rpc_time_to_core(uint64_t deadline_ns)
{
    if (deadline_ns == MOE_NEVER)
        return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    uint64_t now = moe_clock_ns();
    uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
    left = left < INT64_MAX ? left : INT64_MAX;
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                        gpr_time_from_nanos((int64_t)left, GPR_TIMESPAN));
}

uint64_t moe_rpc_time_from_core(gpr_timespec deadline)
{
    if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) == 0)
        return MOE_NEVER;
    gpr_timespec left = gpr_time_sub(deadline, gpr_now(deadline.clock_type));
    if (left.tv_sec < 0)
        return moe_clock_ns();
    uint64_t seconds = (uint64_t)left.tv_sec;
    if (seconds > UINT32_MAX)
        return MOE_NEVER;
    return moe_clock_ns() + seconds * MOE_NS_PER_S + (uint64_t)left.tv_nsec;
}

/* ------------------------------------------------------------------ settings */

void moe_rpc_tune_allocator(void)
{
    /* Set all three: to set only one of them freezes the dynamic mmap threshold at 128 KiB. glibc
     * accepts at most 32 MiB. */
    enum { KEEP_BYTES = 1 << 30, GROW_BYTES = 64 << 20, MMAP_BYTES = 32 << 20 };
    if (mallopt(M_MMAP_THRESHOLD, MMAP_BYTES) == 0 || mallopt(M_TRIM_THRESHOLD, KEEP_BYTES) == 0 ||
        mallopt(M_TOP_PAD, GROW_BYTES) == 0)
        moe_log_debug("malloc is not glibc's and stays as it is");
}

/* absl::SetMutexDeadlockDetectionMode(kIgnore). The name has the inline namespace of Debian's
 * builds, "debian3" for example; other builds have the search off. */
static void stop_lock_search(void)
{
    enum { NAMESPACES = 40, IGNORE = 0 };
    void *process = dlopen(NULL, RTLD_LAZY);
    void (*set_mode)(int mode) = NULL;
    for (int i = 1; process != NULL && set_mode == NULL && i < NAMESPACES; i++) {
        char name[96];
        (void)snprintf(name, sizeof name,
                       "_ZN4absl%ddebian%d29SetMutexDeadlockDetectionModeENS0_15OnDeadlockCycleE",
                       i < 10 ? 7 : 8, i);
        *(void **)&set_mode = dlsym(process, name);
    }
    if (set_mode != NULL)
        set_mode(IGNORE);
    if (process != NULL)
        (void)dlclose(process);
}

struct moe_status moe_rpc_force_polling(void)
{
    static const char name[] = "GRPC_POLL_STRATEGY";
    const char *strategy = getenv(name);
    if (strategy != NULL && strcmp(strategy, "poll") != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "%s=%.64s: with it, clients can delay heartbeats; unset it or set it to "
                         "\"poll\"",
                         name, strategy);
    if (setenv(name, "poll", 1) != 0)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for %s",
                         name);
    stop_lock_search();
    return moe_ok();
}
