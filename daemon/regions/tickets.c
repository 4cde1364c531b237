/* SPDX-License-Identifier: Apache-2.0 */
/* See regions/tickets.h. */
#include "regions/tickets.h"

#include "base/clock.h"
#include "base/secret.h"

#include <string.h>

enum { RETRY_MS = 1000 };

/* Tickets of an identity that still live. */
static size_t count_of(const struct moe_region_tickets *t, const char *identity, uint64_t now_ns)
{
    size_t count = 0;
    for (size_t i = 0; i < MOE_REGION_TICKETS; i++)
        count += t->all[i].expires_ns > now_ns && strcmp(t->all[i].owner.identity, identity) == 0;
    return count;
}

/* The oldest ticket of the identity with the most, if those are at least two more than `own`: then
 * both have an equal share or more afterwards. Else MOE_REGION_TICKETS. */
static size_t oldest_of_most(const struct moe_region_tickets *t, size_t own, uint64_t now_ns)
{
    size_t found = MOE_REGION_TICKETS, most = own + 1;
    for (size_t i = 0; i < MOE_REGION_TICKETS; i++) {
        const size_t count = count_of(t, t->all[i].owner.identity, now_ns);
        if (count > most || (found < MOE_REGION_TICKETS && count == most &&
                             t->all[i].expires_ns < t->all[found].expires_ns)) {
            found = i;
            most = count;
        }
    }
    return found;
}

struct moe_status moe_region_tickets_add(struct moe_region_tickets *t,
                                         const uint8_t secret[MOE_REGION_TICKET],
                                         const struct moe_region_owner *owner, uint64_t now_ns)
{
    size_t place = MOE_REGION_TICKETS;
    const size_t own = count_of(t, owner->identity, now_ns);
    for (size_t i = 0; i < MOE_REGION_TICKETS; i++)
        if (t->all[i].expires_ns <= now_ns)
            place = i;
    if (place == MOE_REGION_TICKETS)
        place = oldest_of_most(t, own, now_ns);
    if (place == MOE_REGION_TICKETS || own >= MOE_REGION_TICKETS_EACH)
        return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, RETRY_MS,
                               "too many tickets for shared memory are unused");
    t->all[place].expires_ns = now_ns + MOE_REGION_TICKET_S * MOE_NS_PER_S;
    memcpy(t->all[place].secret, secret, MOE_REGION_TICKET);
    t->all[place].owner = *owner;
    return moe_ok();
}

struct moe_status moe_region_tickets_take(struct moe_region_tickets *t, const uint8_t *secret,
                                          size_t length, uint64_t now_ns,
                                          struct moe_region_owner *owner)
{
    for (size_t i = 0; length == MOE_REGION_TICKET && i < MOE_REGION_TICKETS; i++) {
        if (t->all[i].expires_ns <= now_ns ||
            !moe_secret_equal(t->all[i].secret, secret, MOE_REGION_TICKET))
            continue;
        *owner = t->all[i].owner;
        memset(&t->all[i], 0, sizeof t->all[i]);
        return moe_ok();
    }
    return moe_error(MOE_UNAUTHENTICATED, MOE_REASON_NONE,
                     "the ticket for shared memory is unknown, used or too old");
}
