/* SPDX-License-Identifier: Apache-2.0 */
/* What is left of a group whose coordinator does not answer: its workers, which go on serving. They
 * are known from the state directory of the local group, and from one another. */
#ifndef MOECTL_ORPHANED_GROUP_H
#define MOECTL_ORPHANED_GROUP_H

#include "moectl/group/link.h"

struct moectl_orphaned_group {
    char coordinator[MOECTL_ENDPOINT_MAX];            /* "" = not known */
    char workers[MOE_MAX_SLOTS][MOECTL_ENDPOINT_MAX]; /* all that are known of */
    bool answers[MOE_MAX_SLOTS];
    size_t count, answering;
    size_t serving;     /* of those that answer, with a view in force */
    bool local;         /* of this machine's state directory, for `moectl replace` */
    char command[2048]; /* that starts the coordinator again, for a person; "" = not known */
};

/* Asks the local group's workers, or the one at common->endpoint, and those that they name, each
 * for half a second at most. Nobody there is no failure: the numbers say so. */
void moectl_orphaned_group_look(const struct moectl_common *common,
                                struct moectl_orphaned_group *out);

/* Says on stderr who still serves, and how the coordinator is started again; nothing where no
 * worker answers. True when something was said. */
bool moectl_orphaned_group_say(const struct moectl_orphaned_group *r);

/* The same of the group that a command has failed for: with a failure that is not of a daemon that
 * cannot be reached, and where the coordinator does answer, nothing. */
bool moectl_orphaned_group_explain(const struct moectl_common *common,
                                   const struct moe_status *failure);

#endif
