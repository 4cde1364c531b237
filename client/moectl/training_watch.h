/* SPDX-License-Identifier: Apache-2.0 */
/* While a training call runs, a separate thread reports on stderr how far a Save or Load is, or why
 * the group does not answer. A failure here does not fail the command. */
#ifndef MOECTL_TRAINING_WATCH_H
#define MOECTL_TRAINING_WATCH_H

#include "moectl/io/cli.h"

struct moectl_watch;

/* `endpoint` (of a worker) must live until moectl_watch_end. The first report comes after 3 s. NULL
 * if memory is lacking. */
struct moectl_watch *moectl_watch_begin(const char *endpoint);
/* Waits until the thread has ended. NULL is ignored. */
void moectl_watch_end(struct moectl_watch *w);

/* Reports the state of that worker's group on stderr, unless it serves. */
void moectl_watch_report_group(const char *endpoint);

#endif
