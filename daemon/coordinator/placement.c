/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/placement.h"

#include <stdlib.h>
#include <string.h>

enum {
    EXPERTS_IN_ALL = MOE_PLACEMENT_LAYERS_MAX * MOE_PLACEMENT_EXPERTS_MAX,
    HOLDERS_IN_ALL = 4 * EXPERTS_IN_ALL,
};

/* Expert e of layer i has row r = first_row[i] + e, and its holders are holders[start[r]] up to but
 * not including holders[start[r + 1]]. */
struct moe_placement {
    uint32_t version, slots;
    size_t layer_count;
    struct moe_placement_layer layers[MOE_PLACEMENT_LAYERS_MAX];
    uint32_t first_row[MOE_PLACEMENT_LAYERS_MAX + 1];
    uint32_t start[EXPERTS_IN_ALL + 1];
    uint8_t holders[HOLDERS_IN_ALL];
};

struct moe_status moe_placement_create(struct moe_placement **out)
{
    *out = calloc(1, sizeof **out);
    if (*out == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "placement");
    return moe_ok();
}

void moe_placement_destroy(struct moe_placement *p)
{
    free(p);
}

void moe_placement_assign(struct moe_placement *to, const struct moe_placement *from)
{
    *to = *from;
}

static struct moe_status invalid(const char *what)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "placement: %s", what);
}

struct moe_status moe_placement_begin(struct moe_placement *p, uint32_t version, uint32_t slots)
{
    if (slots < 1 || slots > MOE_PLACEMENT_SLOTS_MAX)
        return invalid("number of slots out of range");
    p->version = version;
    p->slots = slots;
    p->layer_count = 0;
    p->first_row[0] = 0;
    p->start[0] = 0;
    return moe_ok();
}

static struct moe_status check_lists(const struct moe_placement *p, uint32_t experts,
                                     const uint8_t *copies, const uint8_t *holders, size_t count)
{
    size_t at = 0;
    for (uint32_t e = 0; e < experts; e++) {
        if (copies[e] == 0 || copies[e] > p->slots)
            return invalid("an expert needs 1 .. slots copies");
        if (copies[e] > count - at)
            return invalid("fewer holders than copies");
        for (size_t c = 0; c < copies[e]; c++)
            if (holders[at + c] >= p->slots || (c > 0 && holders[at + c] <= holders[at + c - 1]))
                return invalid("holders must rise and be slots");
        at += copies[e];
    }
    return at == count ? moe_ok() : invalid("more holders than copies");
}

struct moe_status moe_placement_add_layer(struct moe_placement *p,
                                          const struct moe_placement_layer *layer,
                                          const uint8_t *copies, const uint8_t *holders,
                                          size_t holder_count)
{
    size_t i = p->layer_count;
    if (i == MOE_PLACEMENT_LAYERS_MAX)
        return invalid("too many layers");
    if (layer->experts < 1 || layer->experts > MOE_PLACEMENT_EXPERTS_MAX)
        return invalid("number of experts out of range");
    if (i > 0 && layer->layer <= p->layers[i - 1].layer)
        return invalid("layer indices must rise");
    MOE_TRY(check_lists(p, layer->experts, copies, holders, holder_count));
    uint32_t row = p->first_row[i];
    if (holder_count > HOLDERS_IN_ALL - p->start[row])
        return invalid("too many copies");

    memcpy(p->holders + p->start[row], holders, holder_count);
    for (uint32_t e = 0; e < layer->experts; e++)
        p->start[row + e + 1] = p->start[row + e] + copies[e];
    p->layers[i] = *layer;
    p->first_row[i + 1] = row + layer->experts;
    p->layer_count++;
    return moe_ok();
}

uint64_t moe_placement_first_slots(uint32_t count)
{
    return count == 0 ? 0 : UINT64_MAX >> (MOE_PLACEMENT_SLOTS_MAX - count);
}

uint32_t moe_placement_slot_bound(uint64_t places)
{
    return places == 0 ? 0 : 64 - (uint32_t)__builtin_clzll(places);
}

/* The slots of a linear placement, ascending. */
struct places {
    uint32_t count;
    uint8_t slot[MOE_PLACEMENT_SLOTS_MAX];
};

static struct places list_places(uint64_t mask)
{
    struct places p = {0};
    for (; mask != 0; mask &= mask - 1)
        p.slot[p.count++] = (uint8_t)__builtin_ctzll(mask);
    return p;
}

/* The slots with a copy of what place `home` holds without replicas. */
static uint64_t copies_of_place(const struct places *p, uint32_t replicas, uint32_t home)
{
    uint64_t mask = 0;
    for (uint32_t c = 0; c < replicas; c++)
        mask |= UINT64_C(1) << p->slot[(home + c * (p->count / replicas)) % p->count];
    return mask;
}

bool moe_placement_covers(uint64_t places, uint32_t replicas, uint64_t live)
{
    struct places p = list_places(places);
    for (uint32_t i = 0; i < p.count; i++)
        if ((copies_of_place(&p, replicas, i) & live) == 0)
            return false;
    return true;
}

/* Appends the slots of `mask`; returns their number. */
static uint32_t append_slots(uint8_t *holders, uint64_t mask)
{
    uint32_t n = 0;
    for (; mask != 0; mask &= mask - 1)
        holders[n++] = (uint8_t)__builtin_ctzll(mask);
    return n;
}

static struct moe_status add_linear_layer(struct moe_placement *p, const struct places *places,
                                          uint32_t replicas,
                                          const struct moe_placement_layer *layer)
{
    uint8_t copies[MOE_PLACEMENT_EXPERTS_MAX];
    uint8_t holders[MOE_PLACEMENT_EXPERTS_MAX * MOE_PLACEMENT_SLOTS_MAX];
    uint32_t count = places->count, experts = layer->experts;
    if (experts > MOE_PLACEMENT_EXPERTS_MAX)
        return invalid("number of experts out of range");
    uint32_t base = experts / count, larger = experts % count, e = 0;
    size_t held = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t mask = copies_of_place(places, replicas, i);
        for (uint32_t n = base + (i < larger ? 1 : 0); n > 0; n--) {
            copies[e++] = (uint8_t)replicas;
            held += append_slots(holders + held, mask);
        }
    }
    return moe_placement_add_layer(p, layer, copies, holders, held);
}

struct moe_status moe_placement_set_linear(struct moe_placement *p, uint32_t version,
                                           uint64_t places, uint32_t replicas,
                                           const struct moe_placement_layer *layers, size_t count)
{
    struct places list = list_places(places);
    MOE_TRY(moe_placement_begin(p, version, moe_placement_slot_bound(places)));
    if (replicas < 1 || replicas > list.count)
        return invalid("an expert has 1 .. slots replicas");
    for (size_t i = 0; i < count; i++)
        MOE_TRY(add_linear_layer(p, &list, replicas, &layers[i]));
    return moe_ok();
}

bool moe_placement_is_live(const struct moe_placement *p, uint64_t live)
{
    for (size_t i = 0; i < p->layer_count; i++)
        for (uint32_t e = 0; e < p->layers[i].experts; e++)
            if ((moe_placement_mask(p, i, e) & live) == 0)
                return false;
    return true;
}

uint32_t moe_placement_places(uint32_t slots, uint32_t experts, uint32_t replicas, uint32_t spare)
{
    uint32_t places = replicas * (experts / slots + (experts % slots != 0)) + spare;
    return places < experts ? places : experts;
}

bool moe_placement_fits(const struct moe_placement *p, uint32_t replicas, uint32_t spare)
{
    for (size_t i = 0; i < p->layer_count; i++) {
        uint32_t held[MOE_PLACEMENT_SLOTS_MAX] = {0}, experts = p->layers[i].experts;
        for (uint32_t e = 0; e < experts; e++) {
            const uint8_t *holders;
            uint32_t n = moe_placement_holders(p, i, e, &holders);
            if (n < replicas)
                return false;
            for (uint32_t c = 0; c < n; c++)
                held[holders[c]]++;
        }
        for (uint32_t s = 0; s < p->slots; s++)
            if (held[s] > moe_placement_places(p->slots, experts, replicas, spare))
                return false;
    }
    return true;
}

void moe_placement_count_copies(const struct moe_placement *p, uint64_t live,
                                uint32_t experts[MOE_PLACEMENT_SLOTS_MAX + 1])
{
    memset(experts, 0, (MOE_PLACEMENT_SLOTS_MAX + 1) * sizeof *experts);
    for (size_t i = 0; i < p->layer_count; i++)
        for (uint32_t e = 0; e < p->layers[i].experts; e++)
            experts[__builtin_popcountll(moe_placement_mask(p, i, e) & live)]++;
}

void moe_placement_set_version(struct moe_placement *p, uint32_t version)
{
    p->version = version;
}

uint32_t moe_placement_version(const struct moe_placement *p)
{
    return p->version;
}

uint32_t moe_placement_slots(const struct moe_placement *p)
{
    return p->slots;
}

size_t moe_placement_layer_count(const struct moe_placement *p)
{
    return p->layer_count;
}

struct moe_placement_layer moe_placement_layer_at(const struct moe_placement *p, size_t index)
{
    MOE_INVARIANT(index < p->layer_count);
    return p->layers[index];
}

bool moe_placement_find_layer(const struct moe_placement *p, uint32_t layer, size_t *index)
{
    for (size_t i = 0; i < p->layer_count; i++) {
        if (p->layers[i].layer == layer) {
            *index = i;
            return true;
        }
    }
    return false;
}

uint32_t moe_placement_holders(const struct moe_placement *p, size_t index, uint32_t expert,
                               const uint8_t **holders)
{
    MOE_INVARIANT(index < p->layer_count && expert < p->layers[index].experts);
    uint32_t row = p->first_row[index] + expert;
    *holders = p->holders + p->start[row];
    return p->start[row + 1] - p->start[row];
}

uint64_t moe_placement_mask(const struct moe_placement *p, size_t index, uint32_t expert)
{
    const uint8_t *holders;
    uint64_t mask = 0;
    for (uint32_t n = moe_placement_holders(p, index, expert, &holders); n > 0; n--)
        mask |= UINT64_C(1) << *holders++;
    return mask;
}

static uint64_t mix(uint64_t hash, uint32_t value)
{
    for (int shift = 0; shift < 32; shift += 8) {
        hash ^= (value >> shift) & 0xff;
        hash *= UINT64_C(0x100000001b3);
    }
    return hash;
}

uint64_t moe_placement_content_hash(const struct moe_placement *p)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    hash = mix(hash, p->slots);
    hash = mix(hash, (uint32_t)p->layer_count);
    for (size_t i = 0; i < p->layer_count; i++) {
        hash = mix(hash, p->layers[i].layer);
        hash = mix(hash, p->layers[i].experts);
        for (uint32_t e = 0; e < p->layers[i].experts; e++) {
            const uint8_t *holders;
            uint32_t n = moe_placement_holders(p, i, e, &holders);
            hash = mix(hash, n);
            for (uint32_t c = 0; c < n; c++)
                hash = mix(hash, holders[c]);
        }
    }
    return hash;
}

uint64_t moe_placement_hash(const struct moe_placement *p)
{
    return mix(moe_placement_content_hash(p), p->version);
}
