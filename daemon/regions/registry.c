/* SPDX-License-Identifier: Apache-2.0 */
/* See regions/registry.h. A region's number is its place in the table plus MOE_REGIONS_MAX times a
 * generation, from 1 on. So a number finds its region at once, and an old one finds none. */
#include "regions/registry.h"

#include "base/size.h"
#include "daemon/name.h"

#include <string.h>

_Static_assert((MOE_REGIONS_MAX & (MOE_REGIONS_MAX - 1)) == 0, "numbers of regions wrap");

enum { ALIGNMENT = 16 };

void moe_regions_init(struct moe_regions *r, const struct moe_regions_limits *limits)
{
    r->limits = *limits;
    r->generation = 1;
}

static struct moe_region_client *client_at(struct moe_regions *r, uint32_t client)
{
    MOE_INVARIANT(client < MOE_REGION_CLIENTS && r->clients[client].used);
    return &r->clients[client];
}

static struct moe_region *region_at(struct moe_regions *r, uint32_t number)
{
    struct moe_region *g = &r->regions[number % MOE_REGIONS_MAX];
    MOE_INVARIANT(g->state != MOE_REGION_FREE && g->info.number == number);
    return g;
}

bool moe_regions_has(const struct moe_regions *r, uint32_t number)
{
    const struct moe_region *g = &r->regions[number % MOE_REGIONS_MAX];
    return g->state != MOE_REGION_FREE && g->info.number == number;
}

bool moe_regions_in_device(const struct moe_regions *r, uint32_t number)
{
    MOE_INVARIANT(moe_regions_has(r, number));
    return r->regions[number % MOE_REGIONS_MAX].info.in_device;
}

static bool is_of(const struct moe_region *g, uint32_t client)
{
    return g->state != MOE_REGION_FREE && g->client == client;
}

/* --------------------------------------------------------------------- clients */

struct moe_status moe_regions_join(struct moe_regions *r, const char *identity, uint32_t *client)
{
    uint32_t place = MOE_REGION_CLIENTS, of_identity = 0;
    for (uint32_t i = MOE_REGION_CLIENTS; i-- > 0;) {
        if (!r->clients[i].used)
            place = i;
        else if (strcmp(r->clients[i].identity, identity) == 0)
            of_identity++;
    }
    if (place == MOE_REGION_CLIENTS || of_identity >= r->limits.identity_clients)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_REGION_LIMIT,
                         "too many clients share memory with this worker");
    struct moe_region_client *c = &r->clients[place];
    memset(c, 0, sizeof *c);
    c->used = true;
    strncpy(c->identity, identity, sizeof c->identity - 1);
    *client = place;
    return moe_ok();
}

static void close_region(struct moe_region *g)
{
    g->state = MOE_REGION_CLOSING;
    g->info.closing = true;
}

void moe_regions_leave(struct moe_regions *r, uint32_t client)
{
    client_at(r, client)->leaving = true;
    for (uint32_t i = 0; i < MOE_REGIONS_MAX; i++) {
        struct moe_region *g = &r->regions[i];
        if (is_of(g, client) && g->state == MOE_REGION_OPEN)
            close_region(g);
        if (is_of(g, client) && g->state == MOE_REGION_RESERVED)
            g->left = true;
    }
}

bool moe_regions_forget(struct moe_regions *r, uint32_t client)
{
    struct moe_region_client *c = client_at(r, client);
    bool empty = c->leaving;
    for (uint32_t i = 0; i < MOE_REGIONS_MAX; i++)
        empty = empty && !is_of(&r->regions[i], client);
    for (uint32_t i = 0; i < MOE_REGION_USES; i++)
        empty = empty && !c->uses[i].used;
    if (!MOE_GUARD(CLIENTS_STAY_UNTIL_EMPTY, empty))
        return false;
    c->used = false;
    return true;
}

/* --------------------------------------------------------------------- regions */

uint64_t moe_regions_bytes(const struct moe_regions *r, const char *identity)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < MOE_REGIONS_MAX; i++) {
        const struct moe_region *g = &r->regions[i];
        if (g->state != MOE_REGION_FREE &&
            (identity == NULL || strcmp(r->clients[g->client].identity, identity) == 0))
            sum += g->charge; /* at most limits.bytes */
    }
    return sum;
}

static struct moe_status check_spec(const struct moe_region_spec *spec)
{
    if (!moe_training_name_ok(spec->name))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NAME_INVALID,
                         "a region's name has 1 to 64 characters of A-Z a-z 0-9 . _ - and begins "
                         "with no dot");
    if (spec->bytes == 0 || (spec->is_ring && spec->bytes < sizeof(struct moe_ring)))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID,
                         "the memory of the region has %llu bytes",
                         (unsigned long long)spec->bytes);
    return moe_ok();
}

/* Whether the client may have this region next to those that it has. */
static struct moe_status check_others(const struct moe_regions *r, uint32_t client,
                                      const struct moe_region_spec *spec)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < MOE_REGIONS_MAX; i++) {
        const struct moe_region *g = &r->regions[i];
        if (!is_of(g, client))
            continue;
        count++;
        if (strcmp(g->info.name, spec->name) == 0)
            return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_REGION_EXISTS, "there is a region %s",
                             spec->name);
        bool other = spec->in_device || g->info.in_device || g->device != spec->device ||
                     g->inode != spec->inode;
        if (!MOE_GUARD(MEMORY_IS_ONE_REGION, other))
            return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_REGION_EXISTS,
                             "the memory of %s is that of region %s", spec->name, g->info.name);
    }
    if (count >= r->limits.client_regions)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_REGION_LIMIT,
                         "a client may have %u regions", r->limits.client_regions);
    return moe_ok();
}

static bool fits(uint64_t used, uint64_t more, uint64_t limit)
{
    return used <= limit && more <= limit - used;
}

struct moe_status moe_regions_reserve(struct moe_regions *r, uint32_t client,
                                      const struct moe_region_spec *spec, uint32_t *number)
{
    struct moe_region_client *c = client_at(r, client);
    uint32_t place = 0;
    if (c->leaving)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_ABORTED, "the client has left");
    MOE_TRY(check_spec(spec));
    MOE_TRY(check_others(r, client, spec));
    while (place < MOE_REGIONS_MAX && r->regions[place].state != MOE_REGION_FREE)
        place++;
    if (place == MOE_REGIONS_MAX)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_REGION_LIMIT,
                         "all clients together have %d regions already", MOE_REGIONS_MAX);
    uint64_t charge = spec->charge != 0 ? spec->charge : spec->bytes;
    if (!fits(moe_regions_bytes(r, NULL), charge, r->limits.bytes) ||
        !fits(moe_regions_bytes(r, c->identity), charge, r->limits.identity_bytes))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_REGION_LIMIT,
                         "a region of %llu bytes is over the limit of shared memory",
                         (unsigned long long)spec->bytes);
    struct moe_region *g = &r->regions[place];
    memset(g, 0, sizeof *g);
    g->state = MOE_REGION_RESERVED;
    g->client = client;
    g->is_ring = spec->is_ring;
    g->device = spec->device;
    g->inode = spec->inode;
    g->charge = charge;
    g->info.bytes = spec->bytes;
    g->info.mapping = true;
    g->info.in_device = spec->in_device;
    g->info.number = r->generation * MOE_REGIONS_MAX + place;
    strncpy(g->info.name, spec->name, MOE_REGION_NAME);
    r->generation = r->generation == UINT32_MAX / MOE_REGIONS_MAX ? 1 : r->generation + 1;
    *number = g->info.number;
    return moe_ok();
}

void moe_regions_commit(struct moe_regions *r, uint32_t number, void *base)
{
    struct moe_region *g = region_at(r, number);
    g->base = base;
    g->info.mapping = false;
    g->state = MOE_REGION_OPEN;
    if (g->is_ring)
        client_at(r, g->client)->ring = number;
    if (g->left)
        close_region(g);
}

struct moe_status moe_regions_close(struct moe_regions *r, uint32_t client, const char *name,
                                    uint32_t *number)
{
    for (uint32_t i = 0; i < MOE_REGIONS_MAX; i++) {
        struct moe_region *g = &r->regions[i];
        if (is_of(g, client) && g->state == MOE_REGION_OPEN && strcmp(g->info.name, name) == 0) {
            close_region(g);
            *number = g->info.number;
            return moe_ok();
        }
    }
    return moe_error(MOE_NOT_FOUND, MOE_REASON_REGION_NOT_FOUND, "there is no such region");
}

bool moe_regions_unused(struct moe_regions *r, uint32_t *number, uint32_t *client, void **base,
                        uint64_t *bytes)
{
    for (uint32_t i = 0; i < MOE_REGIONS_MAX; i++) {
        struct moe_region *g = &r->regions[i];
        if (g->state == MOE_REGION_CLOSING &&
            MOE_GUARD(REGIONS_STAY_WHILE_USED, g->info.references == 0)) {
            g->state = MOE_REGION_UNMAPPING;
            *number = g->info.number;
            *client = g->client;
            *base = g->base;
            *bytes = g->info.bytes;
            return true;
        }
    }
    return false;
}

void moe_regions_free(struct moe_regions *r, uint32_t number)
{
    region_at(r, number)->state = MOE_REGION_FREE;
}

bool moe_regions_next(const struct moe_regions *r, uint32_t client, uint32_t *cursor,
                      struct moe_region_info *out)
{
    while (*cursor < MOE_REGIONS_MAX) {
        const struct moe_region *g = &r->regions[(*cursor)++];
        if (is_of(g, client) && !g->is_ring) {
            *out = g->info;
            return true;
        }
    }
    return false;
}

bool moe_regions_next_of_all(const struct moe_regions *r, uint32_t *cursor,
                             struct moe_region_shown *out)
{
    while (*cursor < MOE_REGIONS_MAX) {
        const struct moe_region *g = &r->regions[(*cursor)++];
        if (g->state == MOE_REGION_FREE)
            continue;
        *out = (struct moe_region_shown){
            .info = g->info, .owner = r->clients[g->client].identity, .is_ring = g->is_ring};
        return true;
    }
    return false;
}

/* -------------------------------------------------------------------- requests */

static struct moe_status find(struct moe_regions *r, uint32_t client, uint32_t number,
                              struct moe_region **out)
{
    struct moe_region *g = &r->regions[number % MOE_REGIONS_MAX];
    bool known = g->state != MOE_REGION_FREE && g->info.number == number && !g->is_ring;
    if (!known || !MOE_GUARD(REGIONS_OF_THE_CLIENT, g->client == client) ||
        !MOE_GUARD(REGIONS_ARE_OPEN, g->state == MOE_REGION_OPEN))
        return moe_error(MOE_NOT_FOUND, MOE_REASON_REGION_NOT_FOUND,
                         "this client has no open region %u", number);
    *out = g;
    return moe_ok();
}

static struct moe_status check_range(const struct moe_region *g, const struct moe_ring_tensor *t)
{
    size_t end;
    bool inside = moe_size_add(t->offset, t->bytes, &end) && end <= g->info.bytes;
    if (!MOE_GUARD(TENSORS_END_IN_TIME, inside))
        return moe_error(MOE_OUT_OF_RANGE, MOE_REASON_REGION_RANGE,
                         "a tensor goes past the end of region %s", g->info.name);
    if (t->offset % ALIGNMENT != 0)
        return moe_error(MOE_OUT_OF_RANGE, MOE_REASON_REGION_RANGE,
                         "a tensor's offset is not a multiple of %d", ALIGNMENT);
    return moe_ok();
}

/* Both end inside of their regions. */
static bool share_bytes(const struct moe_ring_tensor *a, const struct moe_ring_tensor *b)
{
    return a->region != 0 && a->region == b->region && a->offset < b->offset + b->bytes &&
           b->offset < a->offset + a->bytes;
}

/* True if an output of one shares bytes with a tensor of the other; `a` may be `b`. */
static bool overlap(const struct moe_ring_tensor *a, const struct moe_ring_tensor *b)
{
    for (size_t i = 0; i < MOE_RING_ROLES; i++)
        for (size_t j = 0; j < MOE_RING_ROLES; j++)
            if ((i >= MOE_RING_INPUTS || j >= MOE_RING_INPUTS) && !(a == b && i == j) &&
                share_bytes(&a[i], &b[j]))
                return true;
    return false;
}

static struct moe_status check_overlap(const struct moe_region_client *c,
                                       const struct moe_ring_tensor *tensors)
{
    bool found = overlap(tensors, tensors);
    for (uint32_t i = 0; i < MOE_REGION_USES && !found; i++)
        found = c->uses[i].used && overlap(tensors, c->uses[i].tensors);
    if (!MOE_GUARD(OUTPUTS_ARE_APART, !found))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_REGION_OVERLAP,
                         "an output shares bytes with a tensor of this request or of one in "
                         "flight");
    return moe_ok();
}

struct moe_status moe_regions_take(struct moe_regions *r, uint32_t client,
                                   const struct moe_ring_tensor tensors[MOE_RING_ROLES],
                                   void *at[MOE_RING_ROLES], uint32_t *use)
{
    struct moe_region_client *c = client_at(r, client);
    struct moe_region *regions[MOE_RING_ROLES] = {NULL};
    uint32_t place = 0;
    if (c->leaving)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_ABORTED, "the client has left");
    while (place < MOE_REGION_USES && c->uses[place].used)
        place++;
    if (place == MOE_REGION_USES)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL,
                         "too many requests of this client are in flight");
    for (size_t i = 0; i < MOE_RING_ROLES; i++) {
        at[i] = NULL;
        if (tensors[i].region == 0)
            continue;
        MOE_TRY(find(r, client, tensors[i].region, &regions[i]));
        MOE_TRY(check_range(regions[i], &tensors[i]));
    }
    MOE_TRY(check_overlap(c, tensors));
    for (size_t i = 0; i < MOE_RING_ROLES; i++)
        if (regions[i] != NULL) {
            regions[i]->info.references++;
            at[i] = (char *)regions[i]->base + tensors[i].offset;
        }
    if (c->ring != 0)
        region_at(r, c->ring)->info.references++;
    memcpy(c->uses[place].tensors, tensors, sizeof c->uses[place].tensors);
    c->uses[place].used = true;
    *use = place;
    return moe_ok();
}

void moe_regions_put(struct moe_regions *r, uint32_t client, uint32_t use)
{
    struct moe_region_client *c = client_at(r, client);
    MOE_INVARIANT(use < MOE_REGION_USES && c->uses[use].used);
    for (size_t i = 0; i < MOE_RING_ROLES; i++)
        if (c->uses[use].tensors[i].region != 0)
            region_at(r, c->uses[use].tensors[i].region)->info.references--;
    if (c->ring != 0)
        region_at(r, c->ring)->info.references--;
    c->uses[use].used = false;
}
