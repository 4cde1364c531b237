/* SPDX-License-Identifier: Apache-2.0 */
/* Tickets: each lets one connection share memory under the identity of the call that asked for it.
 * Pure: no I/O, no clock, no randomness, no threads; the caller holds a lock. */
#ifndef MOE_REGIONS_TICKETS_H
#define MOE_REGIONS_TICKETS_H

#include "base/status.h"

#include <stddef.h>

enum {
    MOE_REGION_TICKET = 16, /* bytes */
    MOE_REGION_TICKETS = 64,
    MOE_REGION_TICKETS_EACH =
        16,                   /* of one identity; a new one then takes the place of an old one */
    MOE_REGION_TICKET_S = 10, /* seconds that a ticket lives */
};

/* Who asked. */
struct moe_region_owner {
    char identity[256];
    uint32_t connection; /* that the call came over */
    bool has_uid;        /* the call came from a process of this host, of user `uid` */
    uint32_t uid;
};

struct moe_region_tickets {
    struct {
        uint64_t expires_ns; /* 0 = no ticket */
        uint8_t secret[MOE_REGION_TICKET];
        struct moe_region_owner owner;
    } all[MOE_REGION_TICKETS];
};

/* `secret`: fresh random bytes. When all places are taken, the identity with the most tickets loses
 * its oldest one, if it has at least two more than this identity: so others cannot keep it out.
 * Else, and at the limit of this identity, its connection with the most tickets loses its oldest
 * one: so a client that asks and does not come keeps no other of its identity out.
 * Errors: MOE_RESOURCE_EXHAUSTED/QUEUE_FULL, if this identity has no ticket and no other has two.
 */
struct moe_status moe_region_tickets_add(struct moe_region_tickets *t,
                                         const uint8_t secret[MOE_REGION_TICKET],
                                         const struct moe_region_owner *owner,
                                         uint64_t now_ns) MOE_CHECKED;
/* Takes the ticket of these bytes, once. Errors: MOE_UNAUTHENTICATED. */
struct moe_status moe_region_tickets_take(struct moe_region_tickets *t, const uint8_t *secret,
                                          size_t length, uint64_t now_ns,
                                          struct moe_region_owner *owner) MOE_CHECKED;

#endif
