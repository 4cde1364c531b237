/* SPDX-License-Identifier: Apache-2.0 */
/* Starts again and again: how long to wait before a program that has ended starts anew.
 *
 * 100 ms after its first end, twice as long after each further one, and at most 10 s. After a life
 * of 60 s the next wait is the first one again. So a daemon that dies once is back at once, and one
 * that cannot start costs little.
 *
 * `moectl up --restart` waits so. systemd has one constant pause (RestartSec=100ms): there the
 * daemon waits for the rest at its start, and a small file remembers the ends before. */
#ifndef MOE_BASE_RESTART_H
#define MOE_BASE_RESTART_H

#include "base/status.h"

#include <stdint.h>

/* The wait after an end, in ns. `*ends` counts those in a row; 0 at first. `lived_ns` is the time
 * from the last start to the end. Pure. */
uint64_t moe_restart_wait_ns(uint32_t *ends, uint64_t lived_ns);

/* The start of this process by a service manager that waits 100 ms between an end and a start.
 * Reads and writes the record at `path`. `*wait_ns` is what is left to wait, `*ends` the number of
 * ends in a row. Errors: MOE_UNAVAILABLE/IO; then there is nothing to wait for. */
struct moe_status moe_restart_note(const char *path, uint64_t *wait_ns, uint32_t *ends) MOE_CHECKED;
/* A regular end: the next start waits for nothing. */
void moe_restart_forget(const char *path);

#endif
