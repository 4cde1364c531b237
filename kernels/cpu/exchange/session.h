/* SPDX-License-Identifier: Apache-2.0 */
/* A session: this process's slot in an EP group on the CPU. Owns the windows of all slots and the
 * only wait for a peer. A wait is bounded and abortable, and it names the missing slot. */
#ifndef MOE_CPU_SESSION_H
#define MOE_CPU_SESSION_H

#include "cpu/compute/device.h"
#include "cpu/exchange/peers.h"
#include "cpu/exchange/window.h"
#include "cpu/network/network.h"

struct moe_cpu_ep;    /* prepare, dispatch and combine: ep.h */
struct moe_cpu_steps; /* queue and thread of whole steps: step.h */

struct moe_session {
    struct moe_device *device;
    struct moe_session_config config; /* epoch and live: of the present mask */
    struct moe_window_layout layout;
    /* This slot's window at config.slot; those of slots on other hosts are not mapped. */
    struct moe_cpu_window window[MOE_MAX_SLOTS];
    size_t charged; /* bytes on the device's account */
    struct moe_cpu_peers *peers;
    struct moe_cpu_network *network; /* NULL if all windows were mapped in the join */
    bool aborted;                    /* atomic */
    uint32_t spins, yields;          /* tries of a wait before it sleeps */
    uint32_t step;                   /* number of the last step begun, from 1; in every stamp */
    uint32_t exchanges;              /* exchanges begun; in their stamps */
    int missing; /* the slot a wait failed for, or -1. Only waiting threads use it */
    bool failed; /* a wait failed: the session can only be left */
    struct moe_cpu_ep *ep;
    struct moe_cpu_steps *steps;
};

/* Members of struct moe_backend; the others are in step/join.h. */
void moe_cpu_session_abort(struct moe_session *s);
uint64_t moe_cpu_session_lost(struct moe_session *s);
const char *moe_cpu_session_transport(const struct moe_session *s);

/* For ep.c and step.c. */

static inline uint8_t *moe_cpu_session_own(const struct moe_session *s)
{
    return s->window[s->config.slot].base;
}

static inline bool moe_cpu_session_has_peer(const struct moe_session *s, uint32_t slot)
{
    return slot != s->config.slot && (s->config.live >> slot & 1);
}

/* Waits until `flag` in this slot's window carries `stamp`, and returns its value. `slot` stores
 * the flag. Errors: MOE_ABORTED; MOE_UNAVAILABLE/PEER_LOST with s->missing set. */
struct moe_status moe_cpu_session_wait(struct moe_session *s, const uint64_t *flag, uint64_t stamp,
                                       uint32_t slot, uint32_t *value) MOE_CHECKED;

/* moe_cpu_session_exchange from inside a step, without its checks; all [slots * bytes] as there.
 * The caller records a failure. */
struct moe_status moe_cpu_session_gather(struct moe_session *s, const void *mine, void *all,
                                         size_t bytes) MOE_CHECKED;

/* Returns when every live slot has called it. */
struct moe_status moe_cpu_session_barrier(struct moe_session *s) MOE_CHECKED;

/* Wakes the threads that sleep in `slot`, which has a mapped window. */
void moe_cpu_session_wake(struct moe_session *s, uint32_t slot);

/* Reports `slots` as lost to all slots. One thread at a time. */
void moe_cpu_session_report_lost(struct moe_session *s, uint64_t slots);

/* The failure that later calls of this session get, or success. */
struct moe_status moe_cpu_session_usable(const struct moe_session *s) MOE_CHECKED;

/* A step failed on this slot, and peers may wait for it: the session cannot run anything more.
 * Notifies the peers, so that their waits end at once. */
void moe_cpu_session_fail(struct moe_session *s, const struct moe_status *why);

#endif
