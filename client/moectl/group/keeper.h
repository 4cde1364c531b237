/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps the daemons of a group alive, as a service manager does. One that dies is started again
 * with its old command line, after the waits of base/restart.h; a worker that leaves, after a
 * second. */
#ifndef MOECTL_KEEPER_H
#define MOECTL_KEEPER_H

#include "moectl/group/daemons.h"

enum moectl_kept {
    MOECTL_KEPT_STOP,  /* a signal asks moectl to end */
    MOECTL_KEPT_ENDED, /* the coordinator has exited with 0, or a `moectl down` is at work */
};

/* Returns when the group is to end. `directory` is that of the state; `group` is written there
 * after each new start. A daemon that waited for its next start counts as ended without failure. */
enum moectl_kept moectl_keep(struct moectl_daemons *d, int directory, struct moectl_group *group);

#endif
