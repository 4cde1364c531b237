/* SPDX-License-Identifier: Apache-2.0 */
#include "simulation/world.h"

#include <string.h>

enum moe_guard guard_off = MOE_GUARD_COUNT;

bool moe_guard_is_off(enum moe_guard guard)
{
    return guard_off == guard;
}

struct world w;
const char *broken;

void check(bool holds, const char *promise)
{
    if (!holds && broken == NULL)
        broken = promise;
}

void *base_of(uint32_t client)
{
    return w.memory[client];
}

void add_region(uint32_t c, bool is_alias)
{
    struct moe_region_spec spec = {
        .name = is_alias ? "alias" : "data", .bytes = sizeof w.memory[c], .inode = c + 1};
    uint32_t number;
    struct moe_status st = moe_regions_reserve(&w.regions, c, &spec, &number);
    if (moe_failed(&st))
        return;
    moe_regions_commit(&w.regions, number, base_of(c));
    w.mapped[c][is_alias] = true;
    *(is_alias ? &w.clients[c].alias : &w.clients[c].region) = number;
}

static void add_ring(uint32_t c)
{
    const struct moe_region_spec spec = {.name = "ring",
                                         .bytes = sizeof w.rings[c],
                                         .charge = 1,
                                         .inode = CLIENTS + c + 1,
                                         .is_ring = true};
    struct moe_status st = moe_regions_reserve(&w.regions, c, &spec, &w.clients[c].ring);
    check(!moe_failed(&st), "a client can have a ring");
    moe_regions_commit(&w.regions, w.clients[c].ring, &w.rings[c]);
    w.ring_mapped[c] = true;
}

void create(const struct limits *limits, const struct kind *kind)
{
    const struct moe_regions_limits budget = {
        .bytes = 1000, .identity_bytes = 500, .identity_clients = 1, .client_regions = 3};
    static const char *const names[CLIENTS] = {"honest", "rogue"};
    memset(&w, 0, sizeof w);
    broken = NULL;
    w.left = *limits;
    w.parts = kind->parts;
    w.has_device = kind->has_device;
    w.by_device = kind->by_device;
    w.one_memory = kind->one_memory;
    w.view = true;
    moe_regions_init(&w.regions, &budget);
    for (uint32_t c = 0; c < CLIENTS; c++) {
        uint32_t number;
        struct moe_status st = moe_regions_join(&w.regions, names[c], &number);
        check(!moe_failed(&st) && number == c, "a client can join");
        w.joined[c] = true;
        moe_ring_caller_init(&w.callers[c], &w.rings[c]);
        moe_ring_server_init(&w.servers[c], &w.rings[c]);
        add_ring(c);
        add_region(c, false);
        w.clients[c].registered = true;
    }
}
