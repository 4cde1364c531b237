/* SPDX-License-Identifier: Apache-2.0 */
/* What has become of the daemons of a local group, by what the kernel says of their processes.
 * Nothing here starts or ends one. */
#ifndef MOECTL_PROCESS_H
#define MOECTL_PROCESS_H

#include "moectl/group/state.h"

enum moectl_process_state {
    MOECTL_PROCESS_RUNS,
    MOECTL_PROCESS_ENDING, /* killed or dumping core; it may hold its port and its streams still */
    MOECTL_PROCESS_ENDED,
};
/* What has become of the daemon that was recorded as the group's number `i`. */
enum moectl_process_state moectl_process_state(const struct moectl_group *group, size_t i);
/* Whether it runs, or is still ending. */
bool moectl_process_runs(const struct moectl_group *group, size_t i);
#endif
