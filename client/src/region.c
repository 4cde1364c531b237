/* SPDX-License-Identifier: Apache-2.0 */
/* Regions of moe/regions.h: memory of this process that the worker maps too. */
#include "base/clock.h"
#include "regions/memory.h"
#include "session.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

void moe_client_region_free(struct moe_client_region *r)
{
    if (!r->in_device)
        moe_region_memory_unmap(r->data, r->bytes);
    else if (r->release != NULL)
        r->release(r->ctx, r->data, r->bytes);
    free(r);
}

static struct moe_status register_region(struct moe_client_region *r, int descriptor)
{
    Moe__V1__AddRegion action = MOE__V1__ADD_REGION__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    action.name = r->name;
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_ADD;
    q.add = &action;
    if (r->in_device) {
        action.kind = MOE__V1__REGION_KIND__REGION_KIND_DEVICE;
        action.bytes = r->bytes;
    }
    return moe_client_session_ask(r->session, &q, descriptor, &r->number);
}

struct moe_status moe_client_region_add(struct moe_client_session *s, const char *name,
                                        const struct moe_client_region *like, int descriptor,
                                        struct moe_client_region **out)
{
    MOE_TRY(moe_client_wire_check_name("the name of a region", name));
    struct moe_client_region *r = malloc(sizeof *r);
    if (r == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "region: out of memory");
    *r = *like;
    r->session = s;
    (void)snprintf(r->name, sizeof r->name, "%s", name);
    struct moe_status st = register_region(r, descriptor);
    if (moe_failed(&st)) {
        free(r);
        return st;
    }
    moe_mutex_lock(&s->lock);
    r->next = s->regions;
    s->regions = r;
    moe_mutex_unlock(&s->lock);
    *out = r;
    return st;
}

struct moe_status moe_region_create(struct moe_client_session *s, const char *name, size_t bytes,
                                    struct moe_client_region **out)
{
    int descriptor;
    struct moe_client_region region = {.bytes = bytes};
    MOE_TRY(moe_client_wire_check_name("the name of a region", name));
    MOE_TRY(moe_region_memory_create(bytes, &descriptor, &region.data));
    struct moe_status st = moe_client_region_add(s, name, &region, descriptor, out);
    close(descriptor);
    if (moe_failed(&st))
        moe_region_memory_unmap(region.data, bytes);
    return st;
}

void *moe_region_data(const struct moe_client_region *r)
{
    return r->data;
}

size_t moe_region_bytes(const struct moe_client_region *r)
{
    return r->bytes;
}

struct moe_status moe_region_destroy(struct moe_client_region *r)
{
    struct moe_client_session *s = r->session;
    Moe__V1__RemoveRegion action = MOE__V1__REMOVE_REGION__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    action.name = r->name;
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_REMOVE;
    q.remove = &action;
    struct moe_status st = moe_client_session_ask(s, &q, -1, NULL);
    moe_mutex_lock(&s->lock);
    struct moe_client_region **at = &s->regions;
    while (*at != r)
        at = &(*at)->next;
    *at = r->next;
    moe_mutex_unlock(&s->lock);
    moe_client_region_free(r);
    return st;
}
