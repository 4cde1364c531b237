/* SPDX-License-Identifier: Apache-2.0 */
/* Which daemons of a local group the coordinator counts as its workers.
 *
 * A child process asks, for gRPC and fork do not mix: the caller forks daemons afterwards. */
#ifndef MOECTL_SLOTS_H
#define MOECTL_SLOTS_H

#include "moectl/group/state.h"

struct moectl_slots {
    bool draining;                   /* the group is being ended */
    bool held[MOECTL_PROCESSES_MAX]; /* by number in the group: connected, and in its slot */
};

/* Asks the group's coordinator, for two seconds at most. False where it does not answer. */
bool moectl_slots_ask(const struct moectl_group *group, struct moectl_slots *out);

#endif
