/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of a pass: which slot sends which token's row to which slot, over which leg.
 *
 * One source slot's tokens take these legs, for a domain map (domains.h):
 *
 *   inside   the row goes to each slot of the source's domain that has one of its experts. One row
 *            per slot, through windows
 *   across   the row goes to each other domain with one of its experts: once per domain, to the
 *            gateway, which is the slot of the source's index there. Over the network
 *   forward  the gateway passes the row on to each slot of its domain that has one of its experts.
 *            One row per slot, through windows
 *
 * Sums go back over the same legs. Each slot adds its rows of a token. Inside the source's domain
 * it returns the sum. In another domain it returns the sum to the gateway, which adds the sums of
 * its domain and sends one sum across. So legs carry the same number of sums back as rows out.
 *
 * With one domain there is only `inside`. With domains of one slot there is only `across`, to every
 * slot. Both backends use this plan, and so does the model of larger groups. A placement, the ids
 * and the map decide it, so every slot computes the same. Pure: O(tokens x top-k), no allocation,
 * any thread. */
#ifndef MOE_DISPATCH_PLAN_H
#define MOE_DISPATCH_PLAN_H

#include "common/domains.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MOE_PLAN_NO_SLOT = 0xffff }; /* target of a choice that gets no row */

/* Bytes before the row in a record, the unit that crosses domains: {token, choices} and the routes
 * {expert, position, weight} of all K choices, rounded up to 16. */
enum { MOE_PLAN_RECORD_HEAD = 16, MOE_PLAN_ROUTE = 12, MOE_PLAN_RECORD_ALIGN = 16 };

struct moe_dispatch_input {
    const struct moe_domains *domains;     /* NULL if no array of legs is set */
    const struct moe_placement *placement; /* active: its copies are on live slots */
    uint32_t slot;                         /* the source */
    uint32_t tokens, top_k;                /* T, K */
    uint32_t zero_experts;                 /* Z: ids E .. E+Z-1 get no row */
    const int32_t *ids;                    /* [T, K]; < 0: not routed */
    const uint32_t *keys;                  /* [T] choose copies; NULL: the tokens' indices do */
    const uint8_t *token_state; /* [T] enum moe_token_state; a token that is not MOE_TOKEN_OK gets
                                   no row, and its ids are not read. NULL = all OK */
};

/* The caller's arrays. Those of legs may be NULL. */
struct moe_dispatch_plan {
    uint16_t *target; /* [T, K] slot of each choice, or MOE_PLAN_NO_SLOT */
    uint32_t *count;  /* [slots][stride] expert rows: choices of each expert on each slot */
    size_t stride;    /* >= E; of `count` */
    uint64_t *wanted; /* [T] bit s: slot s has rows of t; NULL in groups of more than 64 slots */

    /* Legs. */
    uint64_t *inside; /* [T] bit i: the slot of index i in the source's domain has rows of t. The
                         source's own bit counts too */
    uint64_t *across; /* [T] bit d: domain d has rows of t. Never the source's own domain */
    uint32_t *tokens_for; /* [slots] tokens with a row on the slot, the source included */
    uint32_t *crossings;  /* [D] tokens with a row in the domain; 0 for the source's own */
};

/* Errors: MOE_INVALID_ARGUMENT/EXPERT_INDEX_RANGE for an id of E + Z or more,
 * MOE_UNAVAILABLE/EXPERT_UNAVAILABLE for an expert without a copy. Outputs are undefined then. */
struct moe_status moe_dispatch_plan(const struct moe_dispatch_input *in,
                                    const struct moe_dispatch_plan *out) MOE_CHECKED;

/* The slot that computes expert `expert` for a token of any source; `token`: its index, or key. */
static inline uint32_t moe_dispatch_target(const struct moe_placement *p, uint32_t expert,
                                           uint32_t token)
{
    uint32_t first = p->offset[expert], copies = p->offset[expert + 1] - first;
    return p->slot[first + token % copies];
}

/* For a gateway: bit i: the slot of index i in `domain` gets the row of this token. target [K]. */
uint64_t moe_dispatch_slots_in(const struct moe_domains *map, uint32_t domain,
                               const uint16_t *target, uint32_t top_k);

/* --------------------------------------------------------------------------- bytes per leg */

enum moe_leg { MOE_LEG_INSIDE, MOE_LEG_ACROSS, MOE_LEG_FORWARD, MOE_LEG_COUNT };

/* A pass as its legs see it. */
struct moe_pass_shape {
    uint32_t hidden, top_k;
    enum moe_dtype dtype;
    bool backward; /* rows are x and dy; sums are fp32 and carry a gradient for each choice */
};

/* Rows that leave one source over each leg; `forward` rows leave the source's gateways. tokens_for
 * and crossings as in the plan of that source. Returns the rows of all legs. */
uint64_t moe_dispatch_legs(const struct moe_domains *map, uint32_t slot, const uint32_t *tokens_for,
                           const uint32_t *crossings, uint64_t rows[MOE_LEG_COUNT]);

/* Bytes of one row on a leg. Across domains a row is a record. Inside, its routing entries go
 * apart, and count for all K. */
size_t moe_dispatch_row_bytes(const struct moe_pass_shape *shape, enum moe_leg leg);
/* Bytes of one sum, on any leg. */
size_t moe_dispatch_sum_bytes(const struct moe_pass_shape *shape);

#ifdef __cplusplus
}
#endif

#endif
