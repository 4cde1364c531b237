/* SPDX-License-Identifier: Apache-2.0 */
/* The workers of a group as a table: `status`, `get workers`. */
#ifndef MOECTL_WORKERS_H
#define MOECTL_WORKERS_H

#include "moe/v1/admin.pb-c.h"
#include "moectl/io/table.h"

/* One row for each worker. `all`: with columns that change all the time. NULL when out of memory.
 */
struct moectl_table *moectl_workers_table(const Moe__V1__GetStatusResponse *s, bool all);
/* Slots that hold experts. */
uint32_t moectl_workers_size(const Moe__V1__GetStatusResponse *s);
/* Whether the slot's worker holds no experts. */
bool moectl_workers_is_spare(const Moe__V1__GetStatusResponse *s, uint32_t slot);
/* Workers that are not GONE, without spares. */
size_t moectl_workers_live(const Moe__V1__GetStatusResponse *s);
/* Workers that are GONE. */
size_t moectl_workers_gone(const Moe__V1__GetStatusResponse *s);
/* Whether `moectl scale` with the present size gives the place of a lost worker to a spare. */
bool moectl_workers_can_fill(const Moe__V1__GetStatusResponse *s);
/* Whether a worker loads weights, and knows how many bytes they have: bytes loaded and in all,
 * summed over the live workers. */
bool moectl_workers_load(const Moe__V1__GetStatusResponse *s, uint64_t *done, uint64_t *total);
/* Of a view in force in a group with replicas: "slots 0, 1, 3 of 4; experts with 1 live copy: 32,
 * with 2: 32". */
void moectl_workers_describe_view(const Moe__V1__GetStatusResponse *s, char *out, size_t size);
/* The worker of `slot`; NULL when it was never taken. */
const Moe__V1__WorkerStatus *moectl_workers_find(const Moe__V1__GetStatusResponse *s,
                                                 uint32_t slot);
/* MOECTL_OK, or MOECTL_USAGE after a message. */
int moectl_parse_slot(const char *text, uint32_t *slot);

#endif
