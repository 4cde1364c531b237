/* A linked list under a lock and a thread that takes its head. */
#include "worker/jobs.h"

#include <pthread.h>
#include <stdlib.h>

struct job {
    struct job *next;
    moe_job_fn run;
    void *ctx, *argument;
};

struct moe_jobs {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct job *first, **end; /* *end is NULL, and where the next job is linked */
    bool quit;
};

static struct job *take_job(struct moe_jobs *j)
{
    pthread_mutex_lock(&j->lock);
    while (j->first == NULL && !j->quit)
        pthread_cond_wait(&j->wake, &j->lock);
    struct job *job = j->first;
    if (job != NULL) {
        j->first = job->next;
        if (j->first == NULL)
            j->end = &j->first;
    }
    pthread_mutex_unlock(&j->lock);
    return job;
}

static void *thread_main(void *arg)
{
    struct job *job;
    while ((job = take_job(arg)) != NULL) {
        job->run(job->ctx, job->argument);
        free(job);
    }
    return NULL;
}

struct moe_status moe_jobs_create(struct moe_jobs **out)
{
    struct moe_jobs *j = calloc(1, sizeof *j);
    if (j == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for jobs");
    j->end = &j->first;
    pthread_mutex_init(&j->lock, NULL);
    pthread_cond_init(&j->wake, NULL);
    if (pthread_create(&j->thread, NULL, thread_main, j) != 0) {
        pthread_mutex_destroy(&j->lock);
        pthread_cond_destroy(&j->wake);
        free(j);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_NONE, "cannot start a thread");
    }
    *out = j;
    return moe_ok();
}

struct moe_status moe_jobs_post(struct moe_jobs *j, moe_job_fn run, void *ctx, void *argument)
{
    struct job *job = calloc(1, sizeof *job);
    if (job == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a job");
    *job = (struct job){.run = run, .ctx = ctx, .argument = argument};
    pthread_mutex_lock(&j->lock);
    *j->end = job;
    j->end = &job->next;
    pthread_cond_signal(&j->wake);
    pthread_mutex_unlock(&j->lock);
    return moe_ok();
}

void moe_jobs_destroy(struct moe_jobs *j)
{
    if (j == NULL)
        return;
    pthread_mutex_lock(&j->lock);
    j->quit = true;
    pthread_cond_signal(&j->wake);
    pthread_mutex_unlock(&j->lock);
    pthread_join(j->thread, NULL);
    pthread_mutex_destroy(&j->lock);
    pthread_cond_destroy(&j->wake);
    free(j);
}
