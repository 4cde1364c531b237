/* SPDX-License-Identifier: Apache-2.0 */
/* A pool of compute threads that run one job at a time: threads claim items from a counter.
 *
 * The important part is the gate. The owner of a job opens the gate and wakes threads. A thread
 * first counts itself in (`inside`), and only then checks the gate. At the end, the owner closes
 * the gate and waits until `inside` is zero. All operations are sequentially consistent, so the
 * owner sees the thread, or the thread sees the closed gate. So no thread touches a finished job,
 * and the owner does not wait for threads that slept through it: a small job is cheap on a big
 * pool. */
#include "cpu/compute/pool.h"

#include "base/mutex.h"
#include "base/thread.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Polls before a sleep: a few microseconds, about the cost of a sleep and a wake-up. More would
 * take time from other processes on a shared machine. */
enum { SPINS = 200 };

struct moe_cpu_pool {
    struct moe_mutex owner; /* locked by the caller while its job runs; guards the job's fields */

    /* The job: written only while the gate is closed and `inside` is zero. */
    void (*fn)(void *ctx, uint32_t item);
    void *ctx;
    uint32_t items;
    _Alignas(64) atomic_uint next; /* first item not yet claimed */

    _Alignas(64) atomic_uint announced; /* increases with every job; idle threads sleep on it */
    atomic_uint sleepers;               /* threads asleep on `announced`, or about to be */
    atomic_bool open;                   /* the gate */
    atomic_bool quit;
    _Alignas(64) atomic_uint inside; /* threads that may touch the job, without the owner */
    atomic_bool owner_sleeps;        /* the owner sleeps on `inside` */

    /* Items that a caller ran alone. */
    _Alignas(64) _Atomic uint64_t alone;

    uint32_t threads; /* started */
    pthread_t thread[];
};

static void futex_wait(atomic_uint *value, uint32_t seen)
{
    /* After every kind of return (woken, interrupted, value already changed) the caller checks
     * again. */
    (void)syscall(SYS_futex, value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(atomic_uint *value, uint32_t threads)
{
    (void)syscall(SYS_futex, value, FUTEX_WAKE_PRIVATE, threads, NULL, NULL, 0);
}

static void claim_items(struct moe_cpu_pool *pool)
{
    /* `next` overshoots by at most one per thread. moe_cpu_pool_run checks that it cannot wrap. */
    for (;;) {
        uint32_t item = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (item >= pool->items)
            return;
        pool->fn(pool->ctx, item);
    }
}

/* Returns the number of the newest announcement once it differs from `seen`. */
static uint32_t await_announcement(struct moe_cpu_pool *pool, uint32_t seen)
{
    for (int i = 0; i < SPINS; i++) {
        uint32_t now = atomic_load(&pool->announced);
        if (now != seen)
            return now;
        moe_cpu_spin_pause();
    }
    atomic_fetch_add(&pool->sleepers, 1);
    uint32_t now = atomic_load(&pool->announced);
    while (now == seen) {
        futex_wait(&pool->announced, seen);
        now = atomic_load(&pool->announced);
    }
    atomic_fetch_sub(&pool->sleepers, 1);
    return now;
}

static void *pool_thread(void *arg)
{
    struct moe_cpu_pool *pool = arg;
    uint32_t seen = 0;
    for (;;) {
        seen = await_announcement(pool, seen);
        if (atomic_load(&pool->quit))
            return NULL;
        atomic_fetch_add(&pool->inside, 1);
        if (atomic_load(&pool->open))
            claim_items(pool);
        uint32_t left = atomic_fetch_sub(&pool->inside, 1) - 1;
        if (left == 0 && atomic_load(&pool->owner_sleeps))
            futex_wake(&pool->inside, 1);
    }
}

static void await_empty(struct moe_cpu_pool *pool)
{
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load(&pool->inside) == 0)
            return;
        moe_cpu_spin_pause();
    }
    atomic_store(&pool->owner_sleeps, true);
    uint32_t inside = atomic_load(&pool->inside);
    while (inside != 0) {
        futex_wait(&pool->inside, inside);
        inside = atomic_load(&pool->inside);
    }
    atomic_store(&pool->owner_sleeps, false);
}

void moe_cpu_pool_run(struct moe_cpu_pool *pool, uint32_t items,
                      void (*fn)(void *ctx, uint32_t item), void *ctx)
{
    MOE_INVARIANT(items <= UINT32_MAX - MOE_CPU_MAX_THREADS);
    if (items <= 1 || pool->threads == 0 || !moe_mutex_try_lock(&pool->owner)) {
        for (uint32_t i = 0; i < items; i++) {
            atomic_fetch_add_explicit(&pool->alone, 1, memory_order_relaxed);
            fn(ctx, i);
        }
        return;
    }
    pool->fn = fn;
    pool->ctx = ctx;
    pool->items = items;
    atomic_store(&pool->next, 0);
    atomic_store(&pool->open, true);
    atomic_fetch_add(&pool->announced, 1);
    uint32_t sleepers = atomic_load(&pool->sleepers);
    if (sleepers > 0)
        futex_wake(&pool->announced, sleepers < items - 1 ? sleepers : items - 1);

    claim_items(pool);
    atomic_store(&pool->open, false);
    await_empty(pool);
    moe_mutex_unlock(&pool->owner);
}

uint64_t moe_cpu_pool_progress(const struct moe_cpu_pool *pool)
{
    uint64_t jobs = atomic_load_explicit(&pool->announced, memory_order_relaxed);
    uint64_t items = atomic_load_explicit(&pool->next, memory_order_relaxed);
    return (jobs << 32) + items + atomic_load_explicit(&pool->alone, memory_order_relaxed);
}

static void stop_threads(struct moe_cpu_pool *pool)
{
    atomic_store(&pool->quit, true);
    atomic_fetch_add(&pool->announced, 1);
    futex_wake(&pool->announced, INT32_MAX);
    for (uint32_t i = 0; i < pool->threads; i++)
        pthread_join(pool->thread[i], NULL);
}

struct moe_status moe_cpu_pool_create(uint32_t threads, struct moe_cpu_pool **out)
{
    MOE_INVARIANT(threads >= 1 && threads <= MOE_CPU_MAX_THREADS);
    size_t bytes = sizeof(struct moe_cpu_pool) + (threads - 1) * sizeof(pthread_t);
    struct moe_cpu_pool *pool = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (pool == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the compute threads");
    memset(pool, 0, bytes);
    moe_mutex_init(&pool->owner);
    int rc = 0;
    while (rc == 0 && pool->threads < threads - 1) {
        rc = moe_thread_create(&pool->thread[pool->threads], "moe-cpu-pool", pool_thread, pool);
        if (rc == 0)
            pool->threads++;
    }
    if (rc != 0) {
        struct moe_status st =
            moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                      "cannot start %u compute threads: %s", threads - 1, strerrordesc_np(rc));
        moe_cpu_pool_destroy(pool);
        return st;
    }
    *out = pool;
    return moe_ok();
}

void moe_cpu_pool_destroy(struct moe_cpu_pool *pool)
{
    if (pool == NULL)
        return;
    stop_threads(pool);
    moe_mutex_destroy(&pool->owner);
    free(pool);
}
