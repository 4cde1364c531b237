/* SPDX-License-Identifier: Apache-2.0 */
/* One lock and a ring of jobs. Items are large (a fraction of a millisecond of copying), so one
 * lock operation per item costs little. */
#include "base/thread_pool.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct job {
    struct moe_thread_pool_batch *batch;
    uint32_t items, claimed, done;
    _Alignas(max_align_t) unsigned char content[MOE_THREAD_POOL_JOB_BYTES];
};

struct moe_thread_pool {
    const char *name;
    moe_thread_pool_fn fn;
    void *ctx;
    struct moe_mutex lock;   /* guards the fields below except the threads; also batches */
    pthread_cond_t work;     /* an item can be claimed, or `quit` is set */
    pthread_cond_t finished; /* a job is finished */
    MOE_GUARDED_BY(lock) struct {
        /* Counts of jobs. Job n is in place n % MOE_THREAD_POOL_QUEUE.
         * oldest <= claiming <= submitted, and submitted - oldest <= MOE_THREAD_POOL_QUEUE. All
         * items of jobs `oldest` to `claiming` - 1 are claimed; job `oldest` is not finished. */
        uint64_t oldest, claiming, submitted;
        struct job job[MOE_THREAD_POOL_QUEUE];
        bool quit;
    };
    uint32_t threads; /* started */
    pthread_t thread[MOE_THREAD_POOL_MAX_THREADS];
};

/* The argument of a new thread, which frees it. */
struct start {
    struct moe_thread_pool *pool;
    uint32_t number;
};

static struct job *job_at(struct moe_thread_pool *pool, uint64_t n)
{
    return &pool->job[n % MOE_THREAD_POOL_QUEUE];
}

/* Returns the job of the next item, or NULL when the pool ends. */
static struct job *claim(struct moe_thread_pool *pool, uint32_t *item) MOE_REQUIRES(pool->lock)
{
    while (pool->claiming == pool->submitted && !pool->quit)
        moe_wait(&pool->work, &pool->lock);
    if (pool->claiming == pool->submitted)
        return NULL;
    struct job *job = job_at(pool, pool->claiming);
    *item = job->claimed++;
    if (job->claimed == job->items)
        pool->claiming++;
    return job;
}

static void note_done(struct moe_thread_pool *pool, struct job *job, const struct moe_status *st)
    MOE_REQUIRES(pool->lock)
{
    if (moe_failed(st) && !moe_failed(&job->batch->failure))
        job->batch->failure = *st;
    if (++job->done < job->items)
        return;
    job->batch->unfinished--;
    while (pool->oldest < pool->claiming &&
           job_at(pool, pool->oldest)->done == job_at(pool, pool->oldest)->items)
        pool->oldest++;
    pthread_cond_broadcast(&pool->finished);
}

static void *pool_thread(void *arg)
{
    struct start start = *(struct start *)arg;
    struct moe_thread_pool *pool = start.pool;
    struct job *job;
    uint32_t item;
    free(arg);
    moe_mutex_lock(&pool->lock);
    while ((job = claim(pool, &item)) != NULL) {
        struct moe_status st = moe_ok();
        if (!moe_failed(&job->batch->failure)) {
            moe_mutex_unlock(&pool->lock);
            st = pool->fn(pool->ctx, start.number, job->content, item);
            moe_mutex_lock(&pool->lock);
        }
        note_done(pool, job, &st);
    }
    moe_mutex_unlock(&pool->lock);
    return NULL;
}

static struct moe_status start_thread(struct moe_thread_pool *pool)
{
    struct start *start = malloc(sizeof *start);
    if (start == NULL)
        return moe_thread_failure(pool->name, ENOMEM);
    *start = (struct start){pool, pool->threads};
    int rc = moe_thread_create(&pool->thread[pool->threads], pool->name, pool_thread, start);
    if (rc != 0) {
        free(start);
        return moe_thread_failure(pool->name, rc);
    }
    pool->threads++;
    return moe_ok();
}

struct moe_status moe_thread_pool_create(const char *name, uint32_t threads, moe_thread_pool_fn fn,
                                         void *ctx, struct moe_thread_pool **out)
{
    MOE_INVARIANT(threads >= 1 && threads <= MOE_THREAD_POOL_MAX_THREADS);
    struct moe_thread_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for threads");
    pool->name = name;
    pool->fn = fn;
    pool->ctx = ctx;
    moe_mutex_init(&pool->lock);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->finished, NULL);
    struct moe_status st = moe_ok();
    for (uint32_t i = 0; i < threads && !moe_failed(&st); i++)
        st = start_thread(pool);
    if (moe_failed(&st))
        moe_thread_pool_destroy(pool);
    else
        *out = pool;
    return st;
}

void moe_thread_pool_destroy(struct moe_thread_pool *pool)
{
    if (pool == NULL)
        return;
    moe_mutex_lock(&pool->lock);
    MOE_INVARIANT(pool->oldest == pool->submitted);
    pool->quit = true;
    pthread_cond_broadcast(&pool->work);
    moe_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->threads; i++)
        pthread_join(pool->thread[i], NULL);
    pthread_cond_destroy(&pool->finished);
    pthread_cond_destroy(&pool->work);
    moe_mutex_destroy(&pool->lock);
    free(pool);
}

struct moe_status moe_thread_pool_submit(struct moe_thread_pool *pool,
                                         struct moe_thread_pool_batch *batch, const void *job,
                                         size_t bytes, uint32_t items)
{
    MOE_INVARIANT(bytes <= MOE_THREAD_POOL_JOB_BYTES && items > 0);
    moe_mutex_lock(&pool->lock);
    while (pool->submitted - pool->oldest == MOE_THREAD_POOL_QUEUE && !moe_failed(&batch->failure))
        moe_wait(&pool->finished, &pool->lock);
    struct moe_status failure = batch->failure;
    if (!moe_failed(&failure)) {
        struct job *o = job_at(pool, pool->submitted++);
        o->batch = batch;
        o->items = items;
        o->claimed = o->done = 0;
        memcpy(o->content, job, bytes);
        batch->unfinished++;
        pthread_cond_broadcast(&pool->work);
    }
    moe_mutex_unlock(&pool->lock);
    return failure;
}

struct moe_status moe_thread_pool_wait(struct moe_thread_pool *pool,
                                       struct moe_thread_pool_batch *batch)
{
    moe_mutex_lock(&pool->lock);
    while (batch->unfinished > 0)
        moe_wait(&pool->finished, &pool->lock);
    struct moe_status failure = batch->failure;
    batch->failure = moe_ok();
    moe_mutex_unlock(&pool->lock);
    return failure;
}
