/* SPDX-License-Identifier: Apache-2.0 */
/* The workers of a group as a table: `status`, `get workers`. */
#ifndef MOECTL_WORKERS_H
#define MOECTL_WORKERS_H

#include "moe/v1/admin.pb-c.h"
#include "moectl/io/table.h"

/* One row for each worker. `all`: with columns that change all the time. NULL when out of memory.
 */
struct moectl_table *moectl_workers_table(const Moe__V1__GetStatusResponse *s, bool all);
/* Workers that are not GONE. */
size_t moectl_workers_live(const Moe__V1__GetStatusResponse *s);
/* The worker of `slot`; NULL when it was never taken. */
const Moe__V1__WorkerStatus *moectl_workers_find(const Moe__V1__GetStatusResponse *s,
                                                 uint32_t slot);
/* MOECTL_OK, or MOECTL_USAGE after a message. */
int moectl_parse_slot(const char *text, uint32_t *slot);

#endif
