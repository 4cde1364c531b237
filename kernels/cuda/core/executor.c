/* SPDX-License-Identifier: Apache-2.0 */
/* A queue of tasks and the thread that runs them; see executor.h. */
#include "cuda/core/executor.h"

#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"

#include <stdlib.h>

struct moe_cuda_executor {
    struct moe_device *device;
    pthread_t thread;
    struct moe_mutex lock;
    pthread_cond_t work; /* a task was posted, or `quit` */
    pthread_cond_t done; /* a task is done */
    MOE_GUARDED_BY(lock) struct {
        struct moe_cuda_task *first, *last;
        bool quit;
    };
    uint32_t unfinished; /* tasks; atomic, so that it can be read without the lock */
};

static void finish(struct moe_cuda_executor *x, struct moe_cuda_task *task) MOE_REQUIRES(x->lock)
{
    x->first = task->next;
    task->done = true;
    (void)__atomic_sub_fetch(&x->unfinished, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&x->done);
}

static void *run_tasks(void *arg)
{
    struct moe_cuda_executor *x = arg;
    struct moe_status st = moe_cuda_device_use(x->device);
    moe_mutex_lock(&x->lock);
    for (;;) {
        struct moe_cuda_task *task = x->first;
        if (task == NULL && x->quit)
            break;
        if (task == NULL) {
            moe_wait(&x->work, &x->lock);
            continue;
        }
        moe_mutex_unlock(&x->lock);
        task->status = moe_failed(&st) ? st : task->run(task->ctx);
        moe_mutex_lock(&x->lock);
        finish(x, task);
    }
    moe_mutex_unlock(&x->lock);
    return NULL;
}

static int start_thread(struct moe_cuda_executor *x)
{
    return moe_thread_create(&x->thread, "moe-executor", run_tasks, x);
}

static void free_executor(struct moe_cuda_executor *x)
{
    pthread_cond_destroy(&x->work);
    pthread_cond_destroy(&x->done);
    moe_mutex_destroy(&x->lock);
    free(x);
}

struct moe_status moe_cuda_executor_start(struct moe_device *device, struct moe_cuda_executor **out)
{
    struct moe_cuda_executor *x = calloc(1, sizeof *x);
    if (x == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session");
    x->device = device;
    moe_mutex_init(&x->lock);
    moe_wait_init(&x->work);
    moe_wait_init(&x->done);
    int rc = start_thread(x);
    if (rc != 0) {
        free_executor(x);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_NONE, "cannot start a thread: %s",
                         strerror(rc));
    }
    *out = x;
    return moe_ok();
}

void moe_cuda_executor_stop(struct moe_cuda_executor *x)
{
    if (x == NULL)
        return;
    moe_mutex_lock(&x->lock);
    x->quit = true;
    pthread_cond_signal(&x->work);
    moe_mutex_unlock(&x->lock);
    (void)pthread_join(x->thread, NULL);
    free_executor(x);
}

void moe_cuda_executor_post(struct moe_cuda_executor *x, struct moe_cuda_task *task)
{
    task->next = NULL;
    task->done = false;
    moe_mutex_lock(&x->lock);
    if (x->first == NULL)
        x->first = task;
    else
        x->last->next = task;
    x->last = task;
    (void)__atomic_add_fetch(&x->unfinished, 1, __ATOMIC_RELAXED);
    pthread_cond_signal(&x->work);
    moe_mutex_unlock(&x->lock);
}

bool moe_cuda_executor_busy(const struct moe_cuda_executor *x)
{
    return __atomic_load_n(&x->unfinished, __ATOMIC_ACQUIRE) != 0;
}

bool moe_cuda_executor_await(struct moe_cuda_executor *x, const struct moe_cuda_task *task,
                             uint64_t deadline_ns)
{
    moe_mutex_lock(&x->lock);
    bool in_time = true;
    while (!task->done && in_time)
        in_time = moe_wait_until(&x->done, &x->lock, deadline_ns);
    bool done = task->done;
    moe_mutex_unlock(&x->lock);
    return done;
}
