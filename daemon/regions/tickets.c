/* SPDX-License-Identifier: Apache-2.0 */
/* See regions/tickets.h. */
#include "regions/tickets.h"

#include "base/clock.h"
#include "base/secret.h"

#include <string.h>

enum { RETRY_MS = 1000 };

static bool lives(const struct moe_region_tickets *t, size_t i, uint64_t now_ns)
{
    return t->all[i].expires_ns > now_ns;
}

/* Tickets of an identity that still live. */
static size_t count_of(const struct moe_region_tickets *t, const char *identity, uint64_t now_ns)
{
    size_t count = 0;
    for (size_t i = 0; i < MOE_REGION_TICKETS; i++)
        count += lives(t, i, now_ns) && strcmp(t->all[i].owner.identity, identity) == 0;
    return count;
}

static bool is_same(const struct moe_region_owner *a, const struct moe_region_owner *b)
{
    return a->connection == b->connection && strcmp(a->identity, b->identity) == 0;
}

static size_t count_of_connection(const struct moe_region_tickets *t,
                                  const struct moe_region_owner *owner, uint64_t now_ns)
{
    size_t count = 0;
    for (size_t i = 0; i < MOE_REGION_TICKETS; i++)
        count += lives(t, i, now_ns) && is_same(&t->all[i].owner, owner);
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

/* The oldest ticket of the identity's connection with the most; MOE_REGION_TICKETS if it has none.
 */
static size_t oldest_of_own(const struct moe_region_tickets *t, const char *identity,
                            uint64_t now_ns)
{
    size_t found = MOE_REGION_TICKETS, most = 0;
    for (size_t i = 0; i < MOE_REGION_TICKETS; i++) {
        if (!lives(t, i, now_ns) || strcmp(t->all[i].owner.identity, identity) != 0)
            continue;
        const size_t count = count_of_connection(t, &t->all[i].owner, now_ns);
        if (count > most || (count == most && t->all[i].expires_ns < t->all[found].expires_ns)) {
            found = i;
            most = count;
        }
    }
    return found;
}

static size_t free_place(const struct moe_region_tickets *t, uint64_t now_ns)
{
    size_t i = 0;
    while (i < MOE_REGION_TICKETS && lives(t, i, now_ns))
        i++;
    return i;
}

struct moe_status moe_region_tickets_add(struct moe_region_tickets *t,
                                         const uint8_t secret[MOE_REGION_TICKET],
                                         const struct moe_region_owner *owner, uint64_t now_ns)
{
    size_t place = MOE_REGION_TICKETS;
    const size_t own = count_of(t, owner->identity, now_ns);
    if (own < MOE_REGION_TICKETS_EACH)
        place = free_place(t, now_ns);
    if (place == MOE_REGION_TICKETS && own < MOE_REGION_TICKETS_EACH)
        place = oldest_of_most(t, own, now_ns);
    if (place == MOE_REGION_TICKETS)
        place = oldest_of_own(t, owner->identity, now_ns);
    if (place == MOE_REGION_TICKETS)
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
