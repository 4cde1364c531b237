/* SPDX-License-Identifier: Apache-2.0 */
/* `moectl training list`: the checkpoints in the workers' training directory. */
#ifndef MOECTL_CHECKPOINTS_H
#define MOECTL_CHECKPOINTS_H

#include "moectl/io/cli.h"

/* Prints the list, as a table or as the document "Checkpoints" (ListCheckpointsResponse). Returns
 * the exit code. Does not print a failure: the caller prints `*st`. */
int moectl_list_checkpoints(const struct moectl_common *common, struct moe_status *st);

#endif
