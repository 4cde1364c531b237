/* SPDX-License-Identifier: Apache-2.0 */
/* While a call of training is under way: says on stderr, from a thread of its own, how far a Save
 * or Load is, or what keeps the group from answering. It asks for that itself, and is only a
 * remark: no failure here is one of the command. */
#ifndef MOECTL_TRAINING_WATCH_H
#define MOECTL_TRAINING_WATCH_H

#include "moectl/io/cli.h"

struct moectl_watch;

/* `endpoint` (of a worker) must live until the end. Says nothing for the first seconds. NULL where
 * there is no memory for it. */
struct moectl_watch *moectl_watch_begin(const char *endpoint);
/* No word comes after this. NULL is ignored. */
void moectl_watch_end(struct moectl_watch *w);

/* Says what the coordinator of that worker's group says about the group, unless it serves. */
void moectl_watch_say_group(const char *endpoint);

#endif
