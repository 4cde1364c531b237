/* Timers of one client: a list sorted by time, one mutex, one thread. It never runs user code under
 * the mutex. Nearly all timers of a client have the same length, so a new one belongs at the end of
 * the list and is put there by a search from the back. */
#include "timers.h"

#include "base/clock.h"
#include "base/wait.h"

#include <pthread.h>
#include <stdlib.h>

struct moe_client_timers {
    pthread_t thread;
    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t change;
    struct moe_client_timer *first, *last; /* by due_ns, equal ones in the order of their setting */
    bool stop;
};

static void unlink_timer(struct moe_client_timers *timers, struct moe_client_timer *t)
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
    pthread_mutex_lock(&timers->lock);
    while (!timers->stop || timers->first != NULL) {
        struct moe_client_timer *t = timers->first;
        if (t == NULL) {
            pthread_cond_wait(&timers->change, &timers->lock);
        } else if (t->due_ns > moe_clock_ns()) {
            (void)moe_wait_until(&timers->change, &timers->lock, t->due_ns);
        } else {
            unlink_timer(timers, t);
            pthread_mutex_unlock(&timers->lock);
            t->fire(t);
            pthread_mutex_lock(&timers->lock);
        }
    }
    pthread_mutex_unlock(&timers->lock);
    return NULL;
}

struct moe_status moe_client_timers_create(struct moe_client_timers **out)
{
    struct moe_client_timers *timers = calloc(1, sizeof *timers);
    if (timers == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "timers");
    pthread_mutex_init(&timers->lock, NULL);
    moe_wait_init(&timers->change);
    if (pthread_create(&timers->thread, NULL, run, timers) != 0) {
        pthread_cond_destroy(&timers->change);
        pthread_mutex_destroy(&timers->lock);
        free(timers);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_IO, "cannot start the timer thread");
    }
    *out = timers;
    return moe_ok();
}

void moe_client_timers_destroy(struct moe_client_timers *timers)
{
    if (timers == NULL)
        return;
    pthread_mutex_lock(&timers->lock);
    timers->stop = true;
    pthread_cond_signal(&timers->change);
    pthread_mutex_unlock(&timers->lock);
    pthread_join(timers->thread, NULL);
    pthread_cond_destroy(&timers->change);
    pthread_mutex_destroy(&timers->lock);
    free(timers);
}

void moe_client_timers_set(struct moe_client_timers *timers, struct moe_client_timer *t,
                           uint64_t due_ns, void (*fire)(struct moe_client_timer *t))
{
    pthread_mutex_lock(&timers->lock);
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
    pthread_mutex_unlock(&timers->lock);
}

bool moe_client_timers_cancel(struct moe_client_timers *timers, struct moe_client_timer *t)
{
    pthread_mutex_lock(&timers->lock);
    bool armed = t->armed;
    if (armed)
        unlink_timer(timers, t);
    pthread_mutex_unlock(&timers->lock);
    return armed;
}
