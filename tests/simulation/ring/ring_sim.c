/* SPDX-License-Identifier: Apache-2.0 */
/* The ring's protocol, in all interleavings of a small world and in random ones of a larger world.
 * Both sides of the ring and the registry of regions are the daemon's own code. A daemon with
 * steps, views and a device is a model, and so are the two clients: one keeps the rules, and one
 * writes what it likes to its memory.
 *
 *     ring_sim --all                 # every interleaving of each small world
 *     ring_sim --seeds 20000         # random ones, with more requests and faults
 *     ring_sim --seed 17             # one of them, printed
 *     ring_sim --guards 20000        # every guard, switched off, has to be found
 */
#include "simulation/world.h"
#include "support/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name, *promise;
} guards[] = {
#define X(name, promise) {#name, promise},
#include "simulation/guards.h"
#undef X
};

static bool verbose; /* prints each act */

/* ---------------------------------------------------------------- every interleaving */

enum { SEEN_BITS = 22 };
static uint64_t *seen; /* hashes of states; 0 = free */
static size_t states;

static uint64_t hash_of_world(void)
{
    uint64_t h = 0x9e3779b97f4a7c15u, word;
    for (size_t i = 0; i + sizeof word <= sizeof w; i += sizeof word) {
        memcpy(&word, (const char *)&w + i, sizeof word);
        h = (h ^ word) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    return h == 0 ? 1 : h;
}

/* True if the state was not there. */
static bool remember(uint64_t hash)
{
    size_t mask = ((size_t)1 << SEEN_BITS) - 1, i = hash & mask;
    while (seen[i] != 0 && seen[i] != hash)
        i = (i + 1) & mask;
    if (seen[i] == hash)
        return false;
    seen[i] = hash;
    states++;
    MOE_INVARIANT(states < mask / 4 * 3);
    return true;
}

static bool explore(uint32_t depth)
{
    struct choices choices;
    find_choices(&choices);
    uint64_t here = hash_of_world();
    bool rests = true;
    struct world *before = malloc(sizeof *before);
    MOE_INVARIANT(before != NULL && depth < 2000);
    memcpy(before, &w, sizeof w);
    for (size_t i = 0; i < choices.count && broken == NULL; i++) {
        apply(choices.list[i]);
        uint64_t hash = hash_of_world();
        rests = rests && (choices.list[i].act >= FAULTS || hash == here);
        if (broken != NULL || (remember(hash) && !explore(depth + 1))) {
            printf("  from the end: %s %u %u\n", act_names[choices.list[i].act], choices.list[i].a,
                   choices.list[i].b);
            break;
        }
        memcpy(&w, before, sizeof w);
    }
    free(before);
    if (broken == NULL && rests)
        check_rest();
    return broken == NULL;
}

/* Small worlds: all that may happen in each. */
static const struct {
    const char *name;
    struct limits limits;
    uint8_t parts;
    bool one_memory;
} worlds[] = {
    {"an end of a view and a release", {.requests = {2}, .aborts = 1, .releases = 1}, 1, false},
    {"two parts, and an end of a view", {.requests = {1}, .aborts = 1, .releases = 1}, 2, false},
    {"a bad token and two parts", {.requests = {1}, .bad_tokens = 1, .aborts = 1}, 2, false},
    {"a death and a release", {.requests = {2}, .deaths = 1, .releases = 1}, 1, false},
    {"a connection that the daemon ends", {.requests = {1}, .kicks = 1, .closes = 1}, 1, false},
    {"an unregistration", {.requests = {2}, .closes = 1, .releases = 1}, 1, false},
    {"a rogue", {.requests = {1, 2}, .rogue_writes = 1, .registrations = 1}, 1, false},
    {"a rogue, and an end of a view",
     {.requests = {0, 1}, .rogue_writes = 1, .aborts = 1},
     1,
     false},
    {"a rogue that dies", {.requests = {1, 1}, .deaths = 1, .closes = 1}, 1, false},
    {"memory in turns, and an end of a view", {.requests = {2}, .aborts = 1}, 1, true},
    {"memory in turns, and a release", {.requests = {2}, .releases = 1}, 1, true},
};

static bool run_all(bool quiet)
{
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++)
        for (int device = 0; device < 4; device++) {
            memset(seen, 0, sizeof *seen << SEEN_BITS);
            states = 0;
            const struct kind kind = {.parts = worlds[i].parts,
                                      .has_device = device % 2 == 1,
                                      .by_device = device >= 2,
                                      .one_memory = worlds[i].one_memory};
            create(&worlds[i].limits, &kind);
            bool good = explore(0);
            if (!quiet || !good)
                printf("%s, %s%s: %zu states%s%s\n", worlds[i].name,
                       device % 2 == 1 ? "with a device" : "host only",
                       device >= 2 ? ", a client's device" : "", states,
                       good ? "" : ", broken: ", good ? "" : broken);
            if (!good)
                return false;
        }
    return true;
}

/* -------------------------------------------------------------- random interleavings */

static bool run_seed(uint64_t seed)
{
    struct rng r = {seed};
    struct limits limits = {.requests = {(uint8_t)rng_range(&r, 3, 8), (uint8_t)rng_below(&r, 6)},
                            .rogue_writes = (uint8_t)rng_below(&r, 5),
                            .aborts = (uint8_t)rng_below(&r, 4),
                            .bad_tokens = (uint8_t)rng_below(&r, 3),
                            .releases = (uint8_t)rng_below(&r, 4),
                            .deaths = (uint8_t)rng_below(&r, 2),
                            .kicks = (uint8_t)rng_below(&r, 2),
                            .closes = (uint8_t)rng_below(&r, 3),
                            .registrations = (uint8_t)rng_below(&r, 2)};
    const struct kind kind = {.parts = (uint8_t)rng_range(&r, 1, PARTS),
                              .has_device = rng_chance(&r, 50),
                              .by_device = rng_chance(&r, 50),
                              .one_memory = rng_chance(&r, 25)};
    create(&limits, &kind);
    for (uint32_t n = 0, idle = 0; idle < 400 && n < 4000 && broken == NULL; n++) {
        struct choices choices;
        find_choices(&choices);
        if (choices.count == 0)
            break;
        uint64_t before = hash_of_world();
        struct choice c = choices.list[rng_below(&r, (uint32_t)choices.count)];
        if (c.act >= FAULTS && !rng_chance(&r, 30))
            continue;
        if (verbose)
            printf("  %s %u %u\n", act_names[c.act], c.a, c.b);
        apply(c);
        idle = hash_of_world() == before ? idle + 1 : 0;
    }
    if (broken == NULL)
        check_rest();
    if (broken != NULL)
        printf("seed %llu: broken: %s\n", (unsigned long long)seed, broken);
    return broken == NULL;
}

#include "support/simulation_main.h"
