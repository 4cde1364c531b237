/* SPDX-License-Identifier: Apache-2.0 */
/* Who shares memory with whom, and who needs a network: one pure rule, so all slots that know the
 * same things decide alike. Sharing is only tried where this says so; each pair then proves it by
 * passing a descriptor. */
#ifndef MOE_COMMON_REACH_H
#define MOE_COMMON_REACH_H

#include "base/status.h"
#include "moe/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What each slot says of itself. */
struct moe_reach_slot {
    uint64_t host;    /* moe_reach_host; equal: the slots may share memory */
    uint64_t machine; /* moe_reach_machine */
    uint32_t domain;  /* slots of one host with other numbers do not share (tests) */
    uint32_t user;    /* effective user id */
    bool network;     /* its build has a network transport */
    bool loopback;    /* its network address is that of its host alone */
};

struct moe_reach {
    uint64_t sharing[MOE_MAX_SLOTS]; /* [s] bit p: s and p try to share memory; own bit set */
    bool network;                    /* at least one pair needs the network */
};

/* Numbers of a host's name (struct moe_session_host), and of the machine in it: of the part before
 * the network namespace. */
uint64_t moe_reach_host(const char *id);
uint64_t moe_reach_machine(const char *id);

/* slot [slots]; entries of slots that are not live are ignored. `network_only`: no pair shares.
 * Errors: MOE_FAILED_PRECONDITION/UNSUPPORTED, which trying again does not mend. The text names the
 * first pair that cannot reach each other. */
struct moe_status moe_reach_plan(uint64_t live, uint32_t slots, const struct moe_reach_slot *slot,
                                 bool network_only, struct moe_reach *out) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
