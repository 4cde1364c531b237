/* SPDX-License-Identifier: Apache-2.0 */
/* The events of a group: `get events`, `describe`, `diag`. */
#ifndef MOECTL_EVENTS_H
#define MOECTL_EVENTS_H

#include "moectl/group/link.h"
#include "moectl/io/table.h"

enum { MOECTL_ALL_EVENTS = -2, MOECTL_TIME_BYTES = 32 };

/* Those with a higher sequence than `after`, the newest `limit` (0 = all). Free the answer with
 * moe__v1__list_events_response__free_unpacked. */
struct moe_status moectl_events_ask(struct moectl_link *link, uint64_t deadline_ns, uint64_t after,
                                    uint32_t limit, Moe__V1__ListEventsResponse **out) MOE_CHECKED;
/* One row for each event about `slot`, or MOECTL_ALL_EVENTS. NULL when out of memory. */
struct moectl_table *moectl_events_table(const Moe__V1__ListEventsResponse *e, int32_t slot,
                                         bool wide);
/* "2026-01-31T12:00:00.123Z"; "-" for a time that no calendar has. */
const char *moectl_time_text(int64_t unix_ms, char text[MOECTL_TIME_BYTES]);

#endif
