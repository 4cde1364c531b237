/* SPDX-License-Identifier: Apache-2.0 */
/* SIGHUP reopens the log file, and makes a daemon look at the log level of its settings and at the
 * files of its trust again. Log rotation renames the file and then sends this signal; by default it
 * would end the process.
 *
 * The signal is blocked in all threads and read from a descriptor, so one that comes while the
 * daemon starts or ends is neither fatal nor lost before the loop runs. Process-wide. */
#ifndef MOE_BASE_HANGUP_H
#define MOE_BASE_HANGUP_H

#include "base/status.h"

#include <uv.h>

/* After this call SIGHUP does not end the process. Call before any other thread exists: threads
 * inherit the mask. Errors: MOE_INTERNAL/IO. */
struct moe_status moe_hangup_hold(void) MOE_CHECKED;

/* Serves the signal on `loop`. Close `watch` like any handle of the loop. Call after
 * moe_hangup_hold. Errors: MOE_INTERNAL/IO. */
struct moe_status moe_hangup_watch(uv_loop_t *loop, uv_poll_t *watch) MOE_CHECKED;

enum moe_hangup_part { MOE_HANGUP_SETTINGS, MOE_HANGUP_TRUST, MOE_HANGUP_PARTS };
/* Calls `fn` for this part of the daemon at each SIGHUP, on the loop; NULL ends that. Before
 * moe_hangup_watch, or on the loop's thread. */
void moe_hangup_call(enum moe_hangup_part part, void (*fn)(void *ctx), void *ctx);

#endif
