/* SPDX-License-Identifier: Apache-2.0 */
/* See regions/mapper.h. */
#include "regions/mapper.h"

#include "base/mutex.h"
#include "base/sealed.h"
#include "base/thread.h"
#include "base/wait.h"
#include "regions/memory.h"
#include "regions/registry.h"

#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { SLICE = 4 << 20 }; /* bytes of a turn; whole pages */

enum place_state {
    PLACE_FREE,
    PLACE_WAITS, /* not begun, or some slices are done */
    PLACE_DONE,
};

struct place {
    enum place_state state;
    uint64_t order; /* of its arrival */
    size_t at;      /* bytes that are done */
    struct moe_region_job job;
};

struct moe_region_mapper {
    int done; /* eventfd */
    struct moe_region_device device;
    pthread_t thread;
    struct moe_mutex lock;
    pthread_cond_t more;
    MOE_GUARDED_BY(lock) struct {
        bool finishing;
        uint64_t added;
        uint32_t turn; /* client of the last slice */
        struct place places[MOE_REGIONS_MAX];
    };
};

/* The first job of the client with the next turn; NULL if there is no job. */
static struct place *next_place(struct moe_region_mapper *m) MOE_REQUIRES(m->lock)
{
    struct place *next = NULL;
    uint32_t wait = 0; /* turns before that of `next` */
    for (size_t i = 0; i < MOE_REGIONS_MAX; i++) {
        struct place *p = &m->places[i];
        const uint32_t turns =
            (p->job.client + MOE_REGION_CLIENTS - m->turn - 1) % MOE_REGION_CLIENTS;
        if (p->state != PLACE_WAITS)
            continue;
        if (next == NULL || turns < wait || (turns == wait && p->order < next->order)) {
            next = p;
            wait = turns;
        }
    }
    return next;
}

/* The device pins whole pages. */
static size_t whole_pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

static void pin(const struct moe_region_device *d, struct moe_region_job *job)
{
    if (d->pin == NULL)
        return;
    job->status = d->pin(d->ctx, job->base, whole_pages(job->bytes));
    if (moe_failed(&job->status))
        moe_region_memory_unmap(job->base, job->bytes);
}

static void unpin(const struct moe_region_device *d, const struct moe_region_job *job)
{
    if (d->pin != NULL && job->base != NULL)
        d->unpin(d->ctx, job->base, whole_pages(job->bytes));
}

/* Maps, or makes a slice resident. True: that was the last one, or it failed. */
static bool map_slice(const struct moe_region_device *d, struct moe_region_job *job, size_t at,
                      size_t bytes)
{
    if (job->in_device) {
        job->status = d->import(d->ctx, job->descriptor, job->bytes, &job->base, &job->same_gpu);
        return true;
    }
    if (at == 0)
        job->status = moe_sealed_map(job->descriptor, job->bytes, &job->base);
    if (moe_failed(&job->status))
        return true;
    moe_sealed_populate((char *)job->base + at, bytes);
    if (at + bytes < job->bytes)
        return false;
    pin(d, job);
    return true;
}

static bool unmap_slice(const struct moe_region_device *d, const struct moe_region_job *job,
                        size_t at, size_t bytes)
{
    if (job->in_device) {
        d->release(d->ctx, job->base, job->bytes);
        return true;
    }
    if (at == 0)
        unpin(d, job);
    if (job->base != NULL)
        moe_sealed_release((char *)job->base + at, bytes);
    return job->base == NULL || at + bytes == job->bytes;
}

/* One slice. The thread alone changes a place that waits. */
static bool carry_out(const struct moe_region_device *d, struct place *p)
{
    struct moe_region_job *job = &p->job;
    const size_t at = p->at, left = job->bytes - at, bytes = left < SLICE ? left : SLICE;
    p->at += bytes;
    if (job->unmaps)
        return unmap_slice(d, job, at, bytes);
    if (!map_slice(d, job, at, bytes))
        return false;
    close(job->descriptor);
    return true;
}

void moe_region_mapper_drop(struct moe_region_mapper *m, const struct moe_region_job *job)
{
    if (job->in_device) {
        m->device.release(m->device.ctx, job->base, job->bytes);
        return;
    }
    unpin(&m->device, job);
    moe_region_memory_unmap(job->base, job->bytes);
}

static void *run(void *arg)
{
    struct moe_region_mapper *m = arg;
    moe_mutex_lock(&m->lock);
    for (;;) {
        struct place *p;
        while ((p = next_place(m)) == NULL && !m->finishing)
            moe_wait(&m->more, &m->lock);
        if (p == NULL)
            break;
        m->turn = p->job.client;
        moe_mutex_unlock(&m->lock);
        const bool done = carry_out(&m->device, p);
        moe_mutex_lock(&m->lock);
        if (!done)
            continue;
        p->state = PLACE_DONE;
        (void)eventfd_write(m->done, 1);
    }
    moe_mutex_unlock(&m->lock);
    return NULL;
}

struct moe_status moe_region_mapper_create(int done, const struct moe_region_device *device,
                                           struct moe_region_mapper **out)
{
    struct moe_region_mapper *m = calloc(1, sizeof *m);
    if (m == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for shared memory");
    m->done = done;
    m->device = *device;
    moe_mutex_init(&m->lock);
    moe_wait_init(&m->more);
    int error = moe_thread_create(&m->thread, "moe-regions-map", run, m);
    if (error != 0) {
        moe_region_mapper_destroy(m);
        return moe_thread_failure("moe-regions-map", error);
    }
    *out = m;
    return moe_ok();
}

void moe_region_mapper_finish(struct moe_region_mapper *m)
{
    moe_mutex_lock(&m->lock);
    m->finishing = true;
    pthread_cond_signal(&m->more);
    moe_mutex_unlock(&m->lock);
    (void)pthread_join(m->thread, NULL);
}

void moe_region_mapper_destroy(struct moe_region_mapper *m)
{
    if (m == NULL)
        return;
    pthread_cond_destroy(&m->more);
    moe_mutex_destroy(&m->lock);
    free(m);
}

static struct place *find_place(struct moe_region_mapper *m, enum place_state state)
    MOE_REQUIRES(m->lock)
{
    for (size_t i = 0; i < MOE_REGIONS_MAX; i++)
        if (m->places[i].state == state)
            return &m->places[i];
    return NULL;
}

void moe_region_mapper_add(struct moe_region_mapper *m, const struct moe_region_job *job)
{
    moe_mutex_lock(&m->lock);
    struct place *p = find_place(m, PLACE_FREE);
    MOE_INVARIANT(p != NULL && job->client < MOE_REGION_CLIENTS);
    *p = (struct place){.state = PLACE_WAITS, .order = m->added++, .job = *job};
    p->job.status = moe_ok();
    pthread_cond_signal(&m->more);
    moe_mutex_unlock(&m->lock);
}

bool moe_region_mapper_take_done(struct moe_region_mapper *m, struct moe_region_job *out)
{
    moe_mutex_lock(&m->lock);
    struct place *p = find_place(m, PLACE_DONE);
    if (p != NULL) {
        *out = p->job;
        p->state = PLACE_FREE;
    }
    moe_mutex_unlock(&m->lock);
    return p != NULL;
}
