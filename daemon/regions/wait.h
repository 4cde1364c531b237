/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting for a completion, and waking those who wait: a futex on the completion's sequence number.
 */
#ifndef MOE_REGIONS_WAIT_H
#define MOE_REGIONS_WAIT_H

#include "regions/caller.h"

/* Client. Spins for `spin_ns`, then sleeps, until the entry's request has a result (true) or
 * `deadline_ns` has come (false). A release of the watchdog may be noticed 20 ms late. */
bool moe_ring_wait(struct moe_ring_caller *c, uint32_t entry, uint64_t spin_ns,
                   uint64_t deadline_ns, enum moe_code *code);
/* Daemon, after moe_ring_server_complete returned true; client, after moe_ring_caller_end. */
void moe_ring_wake(struct moe_ring *ring, uint32_t entry);

#endif
