/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/events.h"

void moe_events_add(struct moe_events *e, const struct moe_event *event)
{
    struct moe_event *to = &e->ring[e->count++ % MOE_EVENTS_MAX];
    *to = *event;
    to->sequence = e->count;
}

size_t moe_events_list(const struct moe_events *e, uint64_t after, size_t limit,
                       const struct moe_event *out[MOE_EVENTS_MAX])
{
    uint64_t oldest = e->count > MOE_EVENTS_MAX ? e->count - MOE_EVENTS_MAX : 0;
    if (after < oldest)
        after = oldest;
    if (limit != 0 && e->count > after && e->count - after > limit)
        after = e->count - limit;
    size_t listed = 0;
    for (; after < e->count; after++)
        out[listed++] = &e->ring[after % MOE_EVENTS_MAX];
    return listed;
}
