/* SPDX-License-Identifier: Apache-2.0 */
/* A group without its coordinator: its workers, which go on serving. Their endpoints come from the
 * state directory of the local group and from the other workers. */
#ifndef MOECTL_ORPHANED_GROUP_H
#define MOECTL_ORPHANED_GROUP_H

#include "moectl/group/link.h"

struct moectl_orphaned_group {
    char coordinator[MOECTL_ENDPOINT_MAX];            /* "" = not known */
    char workers[MOE_MAX_SLOTS][MOECTL_ENDPOINT_MAX]; /* all known endpoints */
    bool answers[MOE_MAX_SLOTS];
    size_t count, answering;
    size_t serving;     /* workers that answer and have a view in force */
    bool local;         /* known from the state directory, so `moectl replace` works */
    bool foreground;    /* its `moectl up` runs, so `moectl replace` refuses it */
    pid_t process;      /* of a local coordinator that runs, but perhaps does not answer; else 0 */
    char command[2048]; /* restarts the coordinator; "" = not known */
};

/* Asks the local group's workers, or the one at common->endpoint, and those that they name, each
 * for at most 0.5 s. If none answers, `answering` is 0. */
void moectl_orphaned_group_find(const struct moectl_common *common,
                                struct moectl_orphaned_group *out);

/* Reports on stderr which workers still serve and how to restart the coordinator. False, without a
 * report, if no worker answers. */
bool moectl_orphaned_group_report(const struct moectl_orphaned_group *r);

/* After a command has failed with `failure`: the same report, if a daemon could not be reached and
 * the coordinator does not answer. */
bool moectl_orphaned_group_explain(const struct moectl_common *common,
                                   const struct moe_status *failure);

#endif
