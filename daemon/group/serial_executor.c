/* SPDX-License-Identifier: Apache-2.0 */
/* A linked list under a lock and a thread that takes its head. */
#include "group/serial_executor.h"

#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"

#include <pthread.h>
#include <stdlib.h>

struct task {
    struct task *next;
    moe_serial_task_fn run;
    void *ctx, *argument;
};

struct moe_serial_executor {
    pthread_t thread;
    struct moe_mutex lock;
    pthread_cond_t wake;
    MOE_GUARDED_BY(lock) struct {
        struct task *first, **end; /* *end is NULL: the next task is linked there */
        bool quit;
    };
};

static struct task *take_task(struct moe_serial_executor *e)
{
    moe_mutex_lock(&e->lock);
    while (e->first == NULL && !e->quit)
        moe_wait(&e->wake, &e->lock);
    struct task *task = e->first;
    if (task != NULL) {
        e->first = task->next;
        if (e->first == NULL)
            e->end = &e->first;
    }
    moe_mutex_unlock(&e->lock);
    return task;
}

static void *thread_main(void *arg)
{
    struct task *task;
    while ((task = take_task(arg)) != NULL) {
        task->run(task->ctx, task->argument);
        free(task);
    }
    return NULL;
}

struct moe_status moe_serial_executor_create(struct moe_serial_executor **out)
{
    struct moe_serial_executor *e = calloc(1, sizeof *e);
    if (e == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for a thread");
    moe_mutex_init(&e->lock);
    moe_mutex_not_shared(&e->lock);
    e->end = &e->first;
    pthread_cond_init(&e->wake, NULL);
    int rc = moe_thread_create(&e->thread, "moe-group-exec", thread_main, e);
    if (rc != 0) {
        moe_mutex_destroy(&e->lock);
        pthread_cond_destroy(&e->wake);
        free(e);
        return moe_thread_failure("moe-group-exec", rc);
    }
    *out = e;
    return moe_ok();
}

struct moe_status moe_serial_executor_post(struct moe_serial_executor *e, moe_serial_task_fn run,
                                           void *ctx, void *argument)
{
    struct task *task = calloc(1, sizeof *task);
    if (task == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a task");
    *task = (struct task){.run = run, .ctx = ctx, .argument = argument};
    moe_mutex_lock(&e->lock);
    *e->end = task;
    e->end = &task->next;
    pthread_cond_signal(&e->wake);
    moe_mutex_unlock(&e->lock);
    return moe_ok();
}

void moe_serial_executor_destroy(struct moe_serial_executor *e)
{
    if (e == NULL)
        return;
    moe_mutex_lock(&e->lock);
    e->quit = true;
    pthread_cond_signal(&e->wake);
    moe_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
    moe_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->wake);
    free(e);
}
