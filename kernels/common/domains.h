/* SPDX-License-Identifier: Apache-2.0 */
/* The domain map of a session: which slots share memory with each other.
 *
 * A domain is a set of slots that can store into each other's windows: the GPUs of one NVLink
 * domain, the processes of one host. All domains of a map have the same size, so slots of equal
 * index form pairs across domains. Between two domains only such pairs exchange rows. Pure data and
 * arithmetic: no memory, no clock, no device. */
#ifndef MOE_DOMAINS_H
#define MOE_DOMAINS_H

#include "moe/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MOE_DOMAINS_MAX_SLOTS = 1024, /* wider than MOE_MAX_SLOTS: models of larger groups use it too */
    MOE_DOMAINS_MAX = 64,         /* domains of a map: bits of a mask */
    MOE_DOMAINS_MAX_SIZE = 64,    /* slots of a domain: bits of a mask */
};
#define MOE_DOMAIN_NONE UINT32_MAX /* of a slot that is not live */

struct moe_domains {
    uint32_t slots;                            /* slots of the group, live or not */
    uint32_t domains;                          /* D, in the order of their lowest slots */
    uint32_t size;                             /* m: slots of each domain */
    uint16_t domain_of[MOE_DOMAINS_MAX_SLOTS]; /* [slots]; undefined for slots that are not live */
    uint16_t index_of[MOE_DOMAINS_MAX_SLOTS];  /* [slots] place in the domain, by slot number */
    uint16_t slot_at[MOE_DOMAINS_MAX_SLOTS];   /* [D][m] the slots of each domain, ascending */
};

/* Makes the map of a group. domain [slots]: any number that is equal for slots of one domain, or
 * MOE_DOMAIN_NONE. Domains of different sizes are cut, in slot order, into parts of the greatest
 * common divisor of their sizes. Slots of two parts then count as slots of two domains.
 * Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID for no live slot, or a map over the limits. */
struct moe_status moe_domains_make(const uint32_t *domain, uint32_t slots,
                                   struct moe_domains *out) MOE_CHECKED;

static inline uint32_t moe_domains_slot(const struct moe_domains *m, uint32_t domain,
                                        uint32_t index)
{
    return m->slot_at[domain * m->size + index];
}

/* The slot of `domain` that exchanges rows with `slot` of another domain, and forwards them inside
 * its own: the one of the same index. */
static inline uint32_t moe_domains_gateway(const struct moe_domains *m, uint32_t slot,
                                           uint32_t domain)
{
    return moe_domains_slot(m, domain, m->index_of[slot]);
}

/* Rows need no gateway: all slots share memory, or none do. */
static inline bool moe_domains_flat(const struct moe_domains *m)
{
    return m->domains == 1 || m->size == 1;
}

/* The slots that a session with this map keeps, or loses, together with `slot` (bit s: slot s, less
 * than 64). Of a flat map this is `slot` alone, else its domain: its slots are gateways for each
 * other. */
uint64_t moe_domains_together(const struct moe_domains *m, uint32_t slot);
/* The map of such a session without the slots that `live` lacks; `m` is not flat. Rows and sums in
 * every region of a window have the writer that they had before, so late ones come before those of
 * the new map. False, and *out is not set: a domain would lose some of its slots, but not all. */
bool moe_domains_without(const struct moe_domains *m, uint64_t live, struct moe_domains *out);

#ifdef __cplusplus
}
#endif

#endif
