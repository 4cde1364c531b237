/* SPDX-License-Identifier: Apache-2.0 */
/* Timers of one client: a list sorted by time, one mutex, one thread. It never runs user code under
 * the mutex. Nearly all timers of a client have the same length, so insertion searches from the
 * back. */
#include "timers.h"

#include "base/clock.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"

#include <pthread.h>
#include <stdlib.h>

struct moe_client_timers {
    pthread_t thread;
    struct moe_mutex lock;
    pthread_cond_t change;
    MOE_GUARDED_BY(lock) struct {
        struct moe_client_timer *first,
            *last; /* by due_ns; equal ones in the order in which they were set */
        bool stop;
    };
};

static void unlink_timer(struct moe_client_timers *timers, struct moe_client_timer *t)
    MOE_REQUIRES(timers->lock)
{
    if (t->before != NULL)
        t->before->after = t->after;
    else
        timers->first = t->after;
    if (t->after != NULL)
        t->after->before = t->before;
    else
        timers->last = t->before;
    t->before = t->after = NULL;
    t->armed = false;
}

static void *run(void *arg)
{
    struct moe_client_timers *timers = arg;
    moe_mutex_lock(&timers->lock);
    while (!timers->stop || timers->first != NULL) {
        struct moe_client_timer *t = timers->first;
        if (t == NULL) {
            moe_wait(&timers->change, &timers->lock);
        } else if (t->due_ns > moe_clock_ns()) {
            (void)moe_wait_until(&timers->change, &timers->lock, t->due_ns);
        } else {
            unlink_timer(timers, t);
            moe_mutex_unlock(&timers->lock);
            t->fire(t);
            moe_mutex_lock(&timers->lock);
        }
    }
    moe_mutex_unlock(&timers->lock);
    return NULL;
}

struct moe_status moe_client_timers_create(struct moe_client_timers **out)
{
    struct moe_client_timers *timers = calloc(1, sizeof *timers);
    if (timers == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "timers");
    moe_mutex_init(&timers->lock);
    moe_wait_init(&timers->change);
    int rc = moe_thread_create(&timers->thread, "moe-timers", run, timers);
    if (rc != 0) {
        pthread_cond_destroy(&timers->change);
        moe_mutex_destroy(&timers->lock);
        free(timers);
        return moe_thread_failure("moe-timers", rc);
    }
    *out = timers;
    return moe_ok();
}

void moe_client_timers_destroy(struct moe_client_timers *timers)
{
    if (timers == NULL)
        return;
    moe_mutex_lock(&timers->lock);
    timers->stop = true;
    pthread_cond_signal(&timers->change);
    moe_mutex_unlock(&timers->lock);
    pthread_join(timers->thread, NULL);
    pthread_cond_destroy(&timers->change);
    moe_mutex_destroy(&timers->lock);
    free(timers);
}

void moe_client_timers_set(struct moe_client_timers *timers, struct moe_client_timer *t,
                           uint64_t due_ns, void (*fire)(struct moe_client_timer *t))
{
    moe_mutex_lock(&timers->lock);
    MOE_INVARIANT(!t->armed);
    *t = (struct moe_client_timer){.due_ns = due_ns, .fire = fire, .armed = true};
    struct moe_client_timer *earlier = timers->last;
    while (earlier != NULL && earlier->due_ns > due_ns)
        earlier = earlier->before;
    t->before = earlier;
    t->after = earlier != NULL ? earlier->after : timers->first;
    if (t->before != NULL)
        t->before->after = t;
    else
        timers->first = t;
    if (t->after != NULL)
        t->after->before = t;
    else
        timers->last = t;
    if (timers->first == t)
        pthread_cond_signal(&timers->change);
    moe_mutex_unlock(&timers->lock);
}

bool moe_client_timers_cancel(struct moe_client_timers *timers, struct moe_client_timer *t)
{
    moe_mutex_lock(&timers->lock);
    bool armed = t->armed;
    if (armed)
        unlink_timer(timers, t);
    moe_mutex_unlock(&timers->lock);
    return armed;
}
