/* SPDX-License-Identifier: Apache-2.0 */
/* A session: this process's seat in an EP group on the CPU. Owns the windows of all slots, and the
 * one way to wait for a peer: bounded, abortable, and able to say who was missing. */
#ifndef MOE_CPU_SESSION_H
#define MOE_CPU_SESSION_H

#include "cpu/compute/device.h"
#include "cpu/exchange/peers.h"
#include "cpu/exchange/window.h"

struct moe_cpu_ep;    /* prepare, dispatch and combine: ep.h */
struct moe_cpu_steps; /* queue and thread of whole steps: step.h */

struct moe_session {
    struct moe_device *device;
    struct moe_session_config config;
    struct moe_window_layout layout;
    struct moe_cpu_window window[MOE_MAX_SLOTS]; /* the own one at config.slot */
    size_t charged;                              /* bytes on the device's account */
    struct moe_cpu_peers *peers;
    bool aborted;           /* atomic */
    uint32_t spins, yields; /* how long a wait tries before it sleeps */
    uint32_t step;          /* number of the last step begun, from 1; in every stamp */
    uint32_t exchanges;     /* session_exchange calls begun */
    int missing;            /* the slot a wait failed for, or -1. Kept by the waiting thread */
    bool failed;            /* a wait failed: the session can only be left */
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

/* Waits until `word` in the own window carries `stamp`, and gives its value. `slot` is the one that
 * will store it. Errors: MOE_ABORTED; MOE_UNAVAILABLE/PEER_LOST with s->missing set. */
struct moe_status moe_cpu_session_wait(struct moe_session *s, const uint64_t *word, uint64_t stamp,
                                       uint32_t slot, uint32_t *value) MOE_CHECKED;

/* moe_cpu_session_exchange from inside a step, without its checks; all [slots * bytes] as there. A
 * failure is left to the caller to record. */
struct moe_status moe_cpu_session_gather(struct moe_session *s, const void *mine, void *all,
                                         size_t bytes) MOE_CHECKED;

/* Returns when every live slot has called it. */
struct moe_status moe_cpu_session_barrier(struct moe_session *s) MOE_CHECKED;

/* Stores a word into a peer's window, after everything this thread stored there before. */
static inline void moe_cpu_session_store(uint64_t *word, uint64_t stamp, uint32_t value)
{
    __atomic_store_n(word, moe_window_flag(stamp, value), __ATOMIC_RELEASE);
}

/* Wakes whoever sleeps in `slot`; to be called after storing the last word of a batch. */
void moe_cpu_session_ring(struct moe_session *s, uint32_t slot);

/* The failure that later calls of this session get, or success. */
struct moe_status moe_cpu_session_usable(const struct moe_session *s) MOE_CHECKED;

/* A step broke on this slot after others may have begun to wait for it: nothing can be run in this
 * session any more. Tells the peers, so that they need not use up their budget. */
void moe_cpu_session_fail(struct moe_session *s, const struct moe_status *why);

#endif
