/* SPDX-License-Identifier: Apache-2.0 */
/* One thread that runs tasks in order. The group gives it blocking work (load, form, read, serve,
 * leave), so that the group's own thread never blocks. */
#ifndef MOE_GROUP_SERIAL_EXECUTOR_H
#define MOE_GROUP_SERIAL_EXECUTOR_H

#include "base/status.h"

struct moe_serial_executor;

/* `run` owns `argument`. */
typedef void (*moe_serial_task_fn)(void *ctx, void *argument);

struct moe_status moe_serial_executor_create(struct moe_serial_executor **out) MOE_CHECKED;
/* [any thread] On failure (out of memory) the task does not run and the caller keeps `argument`. */
struct moe_status moe_serial_executor_post(struct moe_serial_executor *e, moe_serial_task_fn run,
                                           void *ctx, void *argument) MOE_CHECKED;
/* Runs all posted tasks, then joins the thread. Not from a task. NULL is ignored. */
void moe_serial_executor_destroy(struct moe_serial_executor *e);

#endif
