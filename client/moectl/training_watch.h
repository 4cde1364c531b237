/* SPDX-License-Identifier: Apache-2.0 */
/* While a long call runs, a separate thread reports on stderr how far it is, or why the group does
 * not answer. A failure here does not fail the command. */
#ifndef MOECTL_TRAINING_WATCH_H
#define MOECTL_TRAINING_WATCH_H

#include "moectl/io/cli.h"

struct moectl_watch;

enum { MOECTL_WATCH_LINE = 384 };

/* How far a call is: bytes, or a line instead of them. */
struct moectl_watch_look {
    char what[80]; /* "saving k5" */
    uint64_t done, total;
    char waiting[MOECTL_WATCH_LINE]; /* where `total` is 0 */
};
/* Fills in `look`, which is all zero. Runs on the watch's thread. */
typedef void (*moectl_watch_ask)(void *ctx, struct moectl_watch_look *look);

/* Of any call. `ctx` must live until moectl_watch_end. On a terminal, a bar comes after 0.3 s;
 * lines come after 3 s. NULL if memory is lacking. */
struct moectl_watch *moectl_watch_begin(moectl_watch_ask ask, void *ctx);
/* Of a Save or Load, on all workers together. `endpoint` (of a worker) must live until
 * moectl_watch_end. */
struct moectl_watch *moectl_watch_training(const char *endpoint);
/* Waits until the thread has ended. NULL is ignored. */
void moectl_watch_end(struct moectl_watch *w);

/* Reports the state of that worker's group on stderr, unless it serves. */
void moectl_watch_report_group(const char *endpoint);

#endif
