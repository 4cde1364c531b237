/* SPDX-License-Identifier: Apache-2.0 */
/* A thread names itself: a detached one may end at any time, and its creator could then name
 * another thread. */
#include "base/thread.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

struct start {
    void *(*run)(void *);
    void *arg;
    char name[MOE_THREAD_NAME_MAX + 1];
};

static void *run_named(void *arg)
{
    const struct start start = *(struct start *)arg;
    free(arg);
    (void)pthread_setname_np(pthread_self(), start.name);
    return start.run(start.arg);
}

int moe_thread_create(pthread_t *thread, const char *name, void *(*run)(void *), void *arg)
{
    sigset_t all, before;
    struct start *start = malloc(sizeof *start);
    if (start == NULL)
        return ENOMEM;
    MOE_INVARIANT(name[0] != '\0' && strlen(name) <= MOE_THREAD_NAME_MAX);
    *start = (struct start){.run = run, .arg = arg};
    strcpy(start->name, name);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(thread, NULL, run_named, start);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0)
        free(start);
    return rc;
}

struct moe_status moe_thread_failure(const char *name, int error)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_NONE, "cannot start the thread %s: %s",
                     name, strerrordesc_np(error));
}
