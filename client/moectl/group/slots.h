/* SPDX-License-Identifier: Apache-2.0 */
/* Which daemons of a local group the coordinator counts as its workers.
 *
 * A child process makes the call: after using gRPC this process could not fork daemons. */
#ifndef MOECTL_SLOTS_H
#define MOECTL_SLOTS_H

#include "moectl/group/state.h"

struct moectl_slots {
    bool draining;                       /* the group is shutting down */
    bool filled[MOECTL_PROCESSES_MAX];   /* [index in the group]: connected and in its slot */
    bool cordoned[MOECTL_PROCESSES_MAX]; /* [index in the group]: its slot gets no new worker */
};

/* Asks the group's coordinator, for at most 2 s. False if it does not answer. */
bool moectl_slots_ask(const struct moectl_group *group, struct moectl_slots *out);

#endif
