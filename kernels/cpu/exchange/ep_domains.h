/* SPDX-License-Identifier: Apache-2.0 */
/* Passes of a session over several domains (common/domains.h): a gateway forwards the rows of its
 * partners inside its domain, and adds its domain's sums before they cross. See
 * kernels/decisions/0009-steps-over-domains.md. Internal to ep*.c.
 *
 * Windows are laid out as ever. A source's row lies at [source][token] of every window that it
 * reaches, and so do its routing entries: in the gateway's window those of the whole domain, in
 * other windows those of their slot. */
#ifndef MOE_CPU_EP_DOMAINS_H
#define MOE_CPU_EP_DOMAINS_H

#include "cpu/exchange/ep_pass.h"

struct moe_cpu_ep_domains {
    struct moe_domains map;
    uint32_t own, index; /* this slot's domain and its place there */
    uint16_t *hop;       /* see struct moe_cpu_ep */
    uint64_t *direct;    /* see struct moe_cpu_ep */
    uint64_t *across;    /* see struct moe_dispatch_plan */
    /* Tokens with rows in this domain, of the slots with this slot's index: [D][max_tokens], by the
     * slot's domain; this slot's tokens at [own]. The slot of routing entry i of a token, as an
     * index in this domain, is at [that][i] of `entry_index`, [D][max_tokens][max_top_k]. */
    uint8_t *entries;
    uint8_t *entry_index;
    uint32_t from; /* argument of the parallel loops: the domain of the partner */
};

static inline size_t domain_token(const struct moe_cpu_ep *ep, uint32_t from, uint32_t t)
{
    return (size_t)from * ep->session->layout.shape.max_tokens + t;
}

/* The slots of the entries of such a token. */
static inline const uint8_t *entries_of(const struct moe_cpu_ep *ep, uint32_t from, uint32_t t)
{
    size_t top_k = ep->session->layout.shape.max_top_k;
    return ep->domains->entry_index + domain_token(ep, from, t) * top_k;
}

/* Bit i: the slot of index i has rows of such a token. */
static inline uint64_t slots_with_rows(const struct moe_cpu_ep *ep, uint32_t from, uint32_t t)
{
    const uint8_t *entry = entries_of(ep, from, t);
    uint64_t slots = 0;
    for (uint32_t i = 0; i < ep->domains->entries[domain_token(ep, from, t)]; i++)
        slots |= UINT64_C(1) << entry[i];
    return slots;
}

/* ep_domain_sums.c: ways of a pass (ep_pass.h). */
struct moe_status moe_cpu_ep_return_over_domains(struct moe_cpu_ep *ep) MOE_CHECKED;
void moe_cpu_ep_finish_over_domains(void *ep, uint32_t item);
void moe_cpu_ep_finish_backward_over_domains(void *ep, uint32_t item);

#endif
