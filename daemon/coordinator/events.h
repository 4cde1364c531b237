/* SPDX-License-Identifier: Apache-2.0 */
/* The last events of the group, for operators: a ring that forgets the oldest. Pure: the caller
 * gives the time. One thread at a time. Not durable. */
#ifndef MOE_COORDINATOR_EVENTS_H
#define MOE_COORDINATOR_EVENTS_H

#include "coordinator/membership.h"

enum { MOE_EVENTS_MAX = 512 };

struct moe_event {
    uint64_t sequence; /* 1, 2, 3 ...; moe_events_add sets it */
    int64_t unix_ms;
    enum moe_membership_event kind;
    enum moe_log_level level;
    uint32_t slot; /* or MOE_MEMBERSHIP_NO_SLOT */
    uint64_t epoch;
    char text[MOE_STATUS_TEXT]; /* longer ones are cut */
};

struct moe_events {
    uint64_t count; /* ever added; event n is ring[(n - 1) % MOE_EVENTS_MAX] */
    struct moe_event ring[MOE_EVENTS_MAX];
};

/* Copies `event`. */
void moe_events_add(struct moe_events *e, const struct moe_event *event);
/* Lists the newest `limit` events (0 = all) with a sequence above `after`, oldest first. Returns
 * their number. Pointers are valid until the next add. */
size_t moe_events_list(const struct moe_events *e, uint64_t after, size_t limit,
                       const struct moe_event *out[MOE_EVENTS_MAX]);

#endif
