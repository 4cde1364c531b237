/* SPDX-License-Identifier: Apache-2.0 */
/* States of the processes of a local group, from /proc. Never starts or ends a process. */
#ifndef MOECTL_PROCESS_H
#define MOECTL_PROCESS_H

#include "moectl/group/state.h"

enum moectl_process_state {
    MOECTL_PROCESS_RUNS,
    MOECTL_PROCESS_ENDING, /* killed or dumping core; its port may still be taken */
    MOECTL_PROCESS_ENDED,
};
/* The state of daemon `i` of the group. */
enum moectl_process_state moectl_process_state(const struct moectl_group *group, size_t i);
/* True if it runs or is ending. */
bool moectl_process_runs(const struct moectl_group *group, size_t i);
#endif
