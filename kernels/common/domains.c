/* SPDX-License-Identifier: Apache-2.0 */
/* Cuts a group into domains of equal size; see domains.h. */
#include "common/domains.h"

static uint32_t greatest_common_divisor(uint32_t a, uint32_t b)
{
    while (b != 0) {
        uint32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Slots of `number`, up to and without `end`. */
static uint32_t slots_of(const uint32_t *domain, uint32_t end, uint32_t number)
{
    uint32_t n = 0;
    for (uint32_t s = 0; s < end; s++)
        n += domain[s] == number;
    return n;
}

/* Gives each live slot to a part of `size` slots of its domain. Parts are numbered as their first
 * slots appear. *parts: how many there are, at most MOE_DOMAINS_MAX. */
static bool place_slots(const uint32_t *domain, struct moe_domains *m, uint32_t *parts)
{
    *parts = 0;
    for (uint32_t s = 0; s < m->slots; s++) {
        if (domain[s] == MOE_DOMAIN_NONE)
            continue;
        uint32_t before = slots_of(domain, s, domain[s]), index = before % m->size, part = *parts;
        if (index == 0 && ++*parts > MOE_DOMAINS_MAX)
            return false;
        /* The part's earlier slots are the last `index` slots of this domain before s. */
        for (uint32_t p = s; index > 0 && p-- > 0;)
            if (domain[p] == domain[s]) {
                part = m->domain_of[p];
                break;
            }
        m->domain_of[s] = (uint16_t)part;
        m->index_of[s] = (uint16_t)index;
        m->slot_at[part * m->size + index] = (uint16_t)s;
    }
    return true;
}

uint64_t moe_domains_together(const struct moe_domains *m, uint32_t slot)
{
    uint64_t together = UINT64_C(1) << slot;
    for (uint32_t i = 0; !moe_domains_flat(m) && i < m->size; i++)
        together |= UINT64_C(1) << moe_domains_slot(m, m->domain_of[slot], i);
    return together;
}

/* Domains stay as they are, also parts of one host that would now be joined: else other slots would
 * be gateways. */
bool moe_domains_without(const struct moe_domains *m, uint64_t live, struct moe_domains *out)
{
    struct moe_domains left = {.slots = m->slots, .size = m->size};
    for (uint32_t d = 0; d < m->domains; d++) {
        uint32_t kept = 0;
        for (uint32_t i = 0; i < m->size; i++) {
            uint32_t slot = moe_domains_slot(m, d, i);
            kept += (uint32_t)(live >> slot & 1);
            left.domain_of[slot] = (uint16_t)left.domains;
            left.index_of[slot] = (uint16_t)i;
            left.slot_at[left.domains * m->size + i] = (uint16_t)slot;
        }
        if (kept != 0 && kept != m->size)
            return false;
        left.domains += kept != 0;
    }
    *out = left;
    return true;
}

struct moe_status moe_domains_make(const uint32_t *domain, uint32_t slots, struct moe_domains *out)
{
    *out = (struct moe_domains){.slots = slots};
    if (slots < 1 || slots > MOE_DOMAINS_MAX_SLOTS)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a domain map of %u slots; at most %d", slots, MOE_DOMAINS_MAX_SLOTS);
    for (uint32_t s = 0; s < slots; s++)
        if (domain[s] != MOE_DOMAIN_NONE)
            out->size = greatest_common_divisor(out->size, slots_of(domain, slots, domain[s]));
    if (out->size == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a domain map of %u slots has no live slot", slots);
    if (out->size > MOE_DOMAINS_MAX_SIZE || !place_slots(domain, out, &out->domains))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "%u slots form more than %d domains, or domains of more than %d slots",
                         slots, MOE_DOMAINS_MAX, MOE_DOMAINS_MAX_SIZE);
    return moe_ok();
}
