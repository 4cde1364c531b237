/* SPDX-License-Identifier: Apache-2.0 */
/* Walks over the choices of a slot's tokens; see dispatch_plan.h. */
#include "common/dispatch_plan.h"

#include "moe/window.h"

#include <string.h>

static bool has_copy(const struct moe_placement *p, int32_t expert)
{
    return p->offset[expert] != p->offset[expert + 1];
}

/* The slots of all choices. Returns the token with an id out of range, or with an expert that has
 * no copy, or the number of tokens. The local variables are for speed: stores through `out` could
 * change what `in` points to. */
static uint32_t choose_slots(const struct moe_dispatch_input *in,
                             const struct moe_dispatch_plan *out)
{
    const struct moe_placement place = *in->placement;
    const uint32_t tokens = in->tokens, top_k = in->top_k;
    const int32_t experts = (int32_t)place.experts, limit = experts + (int32_t)in->zero_experts;
    const uint8_t *state = in->token_state;
    const uint32_t *keys = in->keys;
    const int32_t *ids = in->ids;
    uint16_t *target = out->target;
    uint32_t *count = out->count;
    const size_t stride = out->stride;
    for (uint32_t t = 0; t < tokens; t++, ids += top_k, target += top_k) {
        bool skip = state != NULL && state[t] != MOE_TOKEN_OK;
        uint64_t wanted = 0;
        uint32_t key = keys != NULL ? keys[t] : t;
        for (uint32_t k = 0; k < top_k; k++) {
            int32_t id = ids[k];
            if (id >= limit && !skip)
                return t;
            target[k] = MOE_PLAN_NO_SLOT;
            if (skip || id < 0 || id >= experts)
                continue;
            if (!has_copy(&place, id))
                return t;
            uint32_t slot = moe_dispatch_target(&place, (uint32_t)id, key);
            target[k] = (uint16_t)slot;
            wanted |= UINT64_C(1) << (slot & 63);
            count[slot * stride + (uint32_t)id]++;
        }
        if (out->wanted != NULL)
            out->wanted[t] = wanted;
    }
    return tokens;
}

static struct moe_status no_slot(const struct moe_dispatch_input *in, uint32_t t)
{
    int32_t experts = (int32_t)in->placement->experts;
    int64_t limit = (int64_t)experts + in->zero_experts;
    const int32_t *id = in->ids + (size_t)t * in->top_k;
    while (*id < 0 || (*id < experts ? has_copy(in->placement, *id) : *id < limit))
        id++;
    if (*id < limit)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_EXPERT_UNAVAILABLE,
                         "token %u is routed to expert %d, which has no copy on a live slot", t,
                         *id);
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE,
                     "token %u is routed to expert %d of %lld", t, *id, (long long)limit);
}

/* Which slots have rows of one token, by domain. Entries of `slots` are valid for the domains in
 * `domains`. So a token costs O(K), however many domains there are. */
struct token_masks {
    uint64_t domains;
    uint64_t slots[MOE_DOMAINS_MAX];
};

static bool add_slot(struct token_masks *m, uint32_t domain, uint32_t index)
{
    uint64_t domain_bit = UINT64_C(1) << domain, slot_bit = UINT64_C(1) << index;
    if ((m->domains & domain_bit) == 0)
        m->slots[domain] = 0;
    m->domains |= domain_bit;
    bool added = (m->slots[domain] & slot_bit) == 0;
    m->slots[domain] |= slot_bit;
    return added;
}

static void choose_legs(const struct moe_dispatch_input *in, const struct moe_dispatch_plan *out,
                        uint32_t t)
{
    const struct moe_domains *map = in->domains;
    const uint16_t *target = out->target + (size_t)t * in->top_k;
    uint32_t own = map->domain_of[in->slot];
    struct token_masks masks;
    masks.domains = 0;
    for (uint32_t k = 0; k < in->top_k; k++)
        if (target[k] != MOE_PLAN_NO_SLOT &&
            add_slot(&masks, map->domain_of[target[k]], map->index_of[target[k]]) &&
            out->tokens_for != NULL)
            out->tokens_for[target[k]]++;
    uint64_t own_bit = UINT64_C(1) << own, across = masks.domains & ~own_bit;
    if (out->inside != NULL)
        out->inside[t] = (masks.domains & own_bit) != 0 ? masks.slots[own] : 0;
    if (out->across != NULL)
        out->across[t] = across;
    for (; out->crossings != NULL && across != 0; across &= across - 1)
        out->crossings[__builtin_ctzll(across)]++;
}

struct moe_status moe_dispatch_plan(const struct moe_dispatch_input *in,
                                    const struct moe_dispatch_plan *out)
{
    uint32_t slots = in->placement->slots;
    memset(out->count, 0, slots * out->stride * sizeof *out->count);
    uint32_t planned = choose_slots(in, out);
    if (planned < in->tokens)
        return no_slot(in, planned);
    if (out->tokens_for != NULL)
        memset(out->tokens_for, 0, slots * sizeof *out->tokens_for);
    if (out->crossings != NULL)
        memset(out->crossings, 0, in->domains->domains * sizeof *out->crossings);
    bool legs = out->inside != NULL || out->across != NULL || out->tokens_for != NULL ||
                out->crossings != NULL;
    for (uint32_t t = 0; legs && t < in->tokens; t++)
        choose_legs(in, out, t);
    return moe_ok();
}

uint64_t moe_dispatch_slots_in(const struct moe_domains *map, uint32_t domain,
                               const uint16_t *target, uint32_t top_k)
{
    uint64_t mask = 0;
    for (uint32_t k = 0; k < top_k; k++)
        if (target[k] != MOE_PLAN_NO_SLOT && map->domain_of[target[k]] == domain)
            mask |= UINT64_C(1) << map->index_of[target[k]];
    return mask;
}

/* ------------------------------------------------------------------------------------- bytes */

uint64_t moe_dispatch_legs(const struct moe_domains *map, uint32_t slot, const uint32_t *tokens_for,
                           const uint32_t *crossings, uint64_t rows[MOE_LEG_COUNT])
{
    memset(rows, 0, MOE_LEG_COUNT * sizeof *rows);
    for (uint32_t d = 0; d < map->domains; d++) {
        enum moe_leg leg = d == map->domain_of[slot] ? MOE_LEG_INSIDE : MOE_LEG_FORWARD;
        rows[MOE_LEG_ACROSS] += crossings[d];
        for (uint32_t i = 0; i < map->size; i++)
            if (i != map->index_of[slot])
                rows[leg] += tokens_for[moe_domains_slot(map, d, i)];
    }
    return rows[MOE_LEG_INSIDE] + rows[MOE_LEG_ACROSS] + rows[MOE_LEG_FORWARD];
}

size_t moe_dispatch_row_bytes(const struct moe_pass_shape *shape, enum moe_leg leg)
{
    size_t row = (size_t)shape->hidden * moe_dtype_bytes(shape->dtype);
    row = shape->backward ? 2 * row : row;
    if (leg != MOE_LEG_ACROSS)
        return row + shape->top_k * sizeof(struct moe_window_route);
    size_t bytes = MOE_PLAN_RECORD_HEAD + (size_t)shape->top_k * MOE_PLAN_ROUTE;
    const size_t align = MOE_PLAN_RECORD_ALIGN - 1;
    return ((bytes + align) & ~align) + ((row + align) & ~align);
}

size_t moe_dispatch_sum_bytes(const struct moe_pass_shape *shape)
{
    if (shape->backward)
        return shape->hidden * sizeof(float) + shape->top_k * sizeof(float);
    return shape->hidden * moe_dtype_bytes(shape->dtype);
}
