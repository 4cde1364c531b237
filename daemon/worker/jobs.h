/* One thread that runs what it is given, in order: for work that blocks (loading, joining a
 * session), so that whoever talks to the coordinator never has to. */
#ifndef MOE_WORKER_JOBS_H
#define MOE_WORKER_JOBS_H

#include "base/status.h"

struct moe_jobs;

/* `run` owns `argument`. */
typedef void (*moe_job_fn)(void *ctx, void *argument);

struct moe_status moe_jobs_create(struct moe_jobs **out) MOE_CHECKED;
/* [any thread] Failure (out of memory): the job does not run, `argument` stays the caller's. */
struct moe_status moe_jobs_post(struct moe_jobs *j, moe_job_fn run, void *ctx,
                                void *argument) MOE_CHECKED;
/* Runs everything posted, then joins the thread. Not from a job. NULL is ignored. */
void moe_jobs_destroy(struct moe_jobs *j);

#endif
