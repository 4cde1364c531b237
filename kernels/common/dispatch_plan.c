/* SPDX-License-Identifier: Apache-2.0 */
/* One walk over the choices of a slot's tokens; see dispatch_plan.h. */
#include "common/dispatch_plan.h"

#include "moe/window.h"

#include <string.h>

/* The masks of one token. `slots` holds a mask of indices for each domain, and only those of the
 * domains in `domains` are valid. So a token costs O(K), however many domains there are. */
struct token_masks {
    uint64_t domains;
    uint64_t slots[MOE_DOMAINS_MAX];
};

static bool add_to_masks(struct token_masks *m, uint32_t domain, uint32_t index)
{
    uint64_t domain_bit = UINT64_C(1) << domain, slot_bit = UINT64_C(1) << index;
    if ((m->domains & domain_bit) == 0)
        m->slots[domain] = 0;
    m->domains |= domain_bit;
    bool added = (m->slots[domain] & slot_bit) == 0;
    m->slots[domain] |= slot_bit;
    return added;
}

/* The choices of token t that get a row. */
static struct moe_status plan_token(const struct moe_dispatch_input *in,
                                    const struct moe_dispatch_plan *out, uint32_t t,
                                    struct token_masks *masks)
{
    const struct moe_domains *map = in->domains;
    int64_t experts = in->placement->experts, limit = experts + in->zero_experts;
    const int32_t *ids = in->ids + (size_t)t * in->top_k;
    uint16_t *target = out->target + (size_t)t * in->top_k;
    for (uint32_t k = 0; k < in->top_k; k++) {
        if (ids[k] >= limit)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE,
                             "token %u is routed to expert %d of %lld", t, ids[k],
                             (long long)limit);
        if (ids[k] < 0 || ids[k] >= experts)
            continue;
        uint32_t slot = moe_dispatch_target(in->placement, (uint32_t)ids[k], t);
        target[k] = (uint16_t)slot;
        bool added = add_to_masks(masks, map->domain_of[slot], map->index_of[slot]);
        if (out->tokens_for != NULL && added)
            out->tokens_for[slot]++;
        if (out->count != NULL)
            out->count[slot * out->stride + (uint32_t)ids[k]]++;
    }
    return moe_ok();
}

static void count_crossings(uint64_t across, uint32_t *crossings)
{
    for (; across != 0; across &= across - 1)
        crossings[__builtin_ctzll(across)]++;
}

static void clear_counts(const struct moe_dispatch_input *in, const struct moe_dispatch_plan *out)
{
    uint32_t slots = in->domains->slots;
    if (out->count != NULL)
        memset(out->count, 0, slots * out->stride * sizeof *out->count);
    if (out->tokens_for != NULL)
        memset(out->tokens_for, 0, slots * sizeof *out->tokens_for);
    if (out->crossings != NULL)
        memset(out->crossings, 0, in->domains->domains * sizeof *out->crossings);
}

struct moe_status moe_dispatch_plan(const struct moe_dispatch_input *in,
                                    const struct moe_dispatch_plan *out)
{
    uint32_t own = in->domains->domain_of[in->slot];
    uint64_t own_bit = UINT64_C(1) << own;
    struct token_masks masks;
    clear_counts(in, out);
    for (uint32_t t = 0; t < in->tokens; t++) {
        masks.domains = 0;
        memset(out->target + (size_t)t * in->top_k, 0xff, in->top_k * sizeof *out->target);
        if (in->token_state == NULL || in->token_state[t] == MOE_TOKEN_OK)
            MOE_TRY(plan_token(in, out, t, &masks));
        if (out->inside != NULL)
            out->inside[t] = (masks.domains & own_bit) != 0 ? masks.slots[own] : 0;
        if (out->across != NULL)
            out->across[t] = masks.domains & ~own_bit;
        if (out->crossings != NULL)
            count_crossings(masks.domains & ~own_bit, out->crossings);
    }
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
