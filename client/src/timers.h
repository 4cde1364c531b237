/* SPDX-License-Identifier: Apache-2.0 */
/* One thread that runs small functions at given times: retries after a pause, deadlines of stream
 * requests, and completions that must not run on a thread of the transport. */
#ifndef MOE_CLIENT_TIMERS_H
#define MOE_CLIENT_TIMERS_H

#include "base/status.h"

struct moe_client_timers;

/* Embedded in the object that it serves; all zero while unused. */
struct moe_client_timer {
    uint64_t due_ns; /* monotonic; 0 = at once */
    void (*fire)(struct moe_client_timer *t);
    struct moe_client_timer *before, *after;
    bool armed; /* in the list; `fire` has not begun */
};

struct moe_status moe_client_timers_create(struct moe_client_timers **out) MOE_CHECKED;
/* No timer may be armed. NULL is ignored. */
void moe_client_timers_destroy(struct moe_client_timers *timers);

/* Calls `fire` once, at `due_ns` or soon after, on the timers' thread. `fire` may free `t` or
 * set it again. `t` must not be armed. */
void moe_client_timers_set(struct moe_client_timers *timers, struct moe_client_timer *t,
                           uint64_t due_ns, void (*fire)(struct moe_client_timer *t));
/* True: `fire` will not run. False: it has run, runs, or is about to run. */
bool moe_client_timers_cancel(struct moe_client_timers *timers, struct moe_client_timer *t);

#endif
