/* SPDX-License-Identifier: Apache-2.0 */
/* A thread that maps and unmaps regions, and does nothing else: to make a large region's pages
 * resident, or to pin them, takes as long as many steps. It works in slices, and clients take
 * turns: so the memory of one delays the registration of another by a slice of each client, not by
 * its size. (To pin or to import is one call of the device, and one slice.) Jobs of one client are
 * carried out in their order. */
#ifndef MOE_REGIONS_MAPPER_H
#define MOE_REGIONS_MAPPER_H

#include "base/status.h"

#include <stddef.h>

struct moe_region_mapper;

/* What the worker's device does with memory of clients; see mem_register, mem_import and their ends
 * in moe/backend.h. Called by the mapper's thread, and by moe_region_mapper_drop. */
struct moe_region_device {
    struct moe_status (*pin)(void *ctx, void *base, size_t bytes); /* NULL: not needed */
    void (*unpin)(void *ctx, void *base, size_t bytes);
    struct moe_status (*import)(void *ctx, int descriptor, size_t bytes, void **base,
                                bool *same_gpu);
    void (*release)(void *ctx, void *base, size_t bytes);
    void *ctx;
};

struct moe_region_job {
    uint32_t number; /* of the region */
    uint32_t client; /* below MOE_REGION_CLIENTS: its turn */
    bool unmaps;
    bool in_device; /* memory of a device: imported, and the host cannot access it */
    int descriptor; /* to be mapped; the mapper closes it */
    uint64_t bytes;
    void *base;               /* result of mapping; or what is to be unmapped */
    bool same_gpu;            /* result of an import */
    struct moe_status status; /* of mapping */
};

/* Writes to the eventfd `done` after each job. `device` is copied. Errors: MOE_RESOURCE_EXHAUSTED/
 * OUT_OF_MEMORY, those of starting a thread. */
struct moe_status moe_region_mapper_create(int done, const struct moe_region_device *device,
                                           struct moe_region_mapper **out) MOE_CHECKED;
/* Carries out what is queued, then joins the thread. Call moe_region_mapper_take_done before
 * moe_region_mapper_destroy. */
void moe_region_mapper_finish(struct moe_region_mapper *m);
/* After finish: unmaps the memory of a region, and leaves the content of host memory to the client.
 */
void moe_region_mapper_drop(struct moe_region_mapper *m, const struct moe_region_job *job);
/* After finish. NULL is ignored. */
void moe_region_mapper_destroy(struct moe_region_mapper *m);

/* Queues a job. Each region has at most one that has not been taken. */
void moe_region_mapper_add(struct moe_region_mapper *m, const struct moe_region_job *job);
/* Takes a finished job, in no order. False if there is none. */
bool moe_region_mapper_take_done(struct moe_region_mapper *m, struct moe_region_job *out);

#endif
