/* SPDX-License-Identifier: Apache-2.0 */
/* Tells the service manager what this daemon does, by systemd's protocol: one datagram of
 * NAME=VALUE lines to the socket that NOTIFY_SOCKET names. No library is needed. Process-wide.
 *
 * Without NOTIFY_SOCKET all functions do nothing. Nothing here blocks: a message that the socket
 * has no room for is lost, and the next one says more. */
#ifndef MOE_BASE_NOTIFY_H
#define MOE_BASE_NOTIFY_H

#include "base/status.h"
#include "daemon/progress.h"

#include <uv.h>

/* Reads NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, and removes them from the environment, so
 * that no child speaks for this process. Call before there is a second thread.
 * Errors, after which the daemon runs without a service manager:
 * MOE_INVALID_ARGUMENT/CONFIG_INVALID (no name of a socket, or no time), MOE_UNAVAILABLE/IO (no
 * socket is there). */
struct moe_status moe_notify_open(void) MOE_CHECKED;
/* Closes the socket; for tests. */
void moe_notify_close(void);

/* Any thread. */
void moe_notify_ready(void); /* it listens; also ends a reload */
void moe_notify_reloading(void);
void moe_notify_stopping(void);
/* One line for `systemctl status`; control characters become blanks. */
void moe_notify_status(const char *fmt, ...) MOE_PRINTF(1, 2);
/* Starting or stopping may take `ms` from now. */
void moe_notify_extend(uint64_t ms);

/* Feeds the watchdog from `loop`, four times in each of its periods, while the judge of `p` says
 * that the daemon is alive: one that is stopped, or that a loop without progress has made useless,
 * is restarted. Does nothing without a watchdog. Close `timer` like any handle of the loop; `p`
 * outlives it. Errors: MOE_INTERNAL/IO. */
struct moe_status moe_notify_watch(struct moe_progress *p, uv_loop_t *loop,
                                   uv_timer_t *timer) MOE_CHECKED;

#endif
