/* SPDX-License-Identifier: Apache-2.0 */
/* An eventcount wakes one thread, its owner. Any thread of any process that has it open may notify.
 * It is a counter in shared memory with a futex on it. The owner sleeps on the futex, or polls the
 * counter while it expects news soon. A notifier first changes the shared state, then notifies.
 *
 * No notification is lost: the owner reads the counter (prepare), looks at all shared state, and
 * waits until the counter differs. */
#ifndef MOE_LINKS_EVENTCOUNT_H
#define MOE_LINKS_EVENTCOUNT_H

#include "base/status.h"

#include <stdint.h>

struct moe_eventcount;

struct moe_status moe_eventcount_create(struct moe_eventcount **out) MOE_CHECKED;
/* Opens the eventcount that process `process` has as descriptor `fd`, to notify its owner. Errors:
 * MOE_FAILED_PRECONDITION (not visible from here, or no eventcount), MOE_RESOURCE_EXHAUSTED. */
struct moe_status moe_eventcount_open(uint32_t process, uint32_t fd,
                                      struct moe_eventcount **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_eventcount_destroy(struct moe_eventcount *b);

/* Descriptor of its memory, for moe_eventcount_open in another process. The eventcount owns it. */
int moe_eventcount_fd(const struct moe_eventcount *b);

/* Any thread. An owner that reads the new count also sees everything written before this call. */
void moe_eventcount_notify(struct moe_eventcount *b);

/* Owner. The number of notifications, modulo 2^32. */
uint32_t moe_eventcount_prepare(const struct moe_eventcount *b);
/* Owner. Sleeps while the count is `seen`, at most until `deadline_ns` (MOE_NEVER: no limit). May
 * wake up spuriously. */
void moe_eventcount_wait(struct moe_eventcount *b, uint32_t seen, uint64_t deadline_ns);
/* Owner. The same without sleep: shorter latency, at the cost of a busy core. */
void moe_eventcount_poll(const struct moe_eventcount *b, uint32_t seen, uint64_t deadline_ns);

#endif
