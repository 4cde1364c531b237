/* SPDX-License-Identifier: Apache-2.0 */
/* Who is there: the sockets between the slots of one session.
 *
 * Each pair of slots shares one unix socket. While a session forms, windows travel over it; later
 * it stays open and says one thing: the kernel closes it when a process dies, however it dies. A
 * slot that leaves in good order says so first, and names the slots it gave up waiting for, so that
 * one slot's finding ends the waits of all. */
#ifndef MOE_CPU_PEERS_H
#define MOE_CPU_PEERS_H

#include "base/status.h"
#include "moe/types.h"

struct moe_cpu_peers;

/* What a slot must know of another one to meet it; travels through the caller's all-gather. */
struct moe_cpu_card {
    char name[32];      /* of its socket in the abstract namespace, random */
    uint8_t secret[32]; /* whoever presents it was given the card */
};

/* Starts to listen and fills in the own card. `live`: slots of the session, the own included. */
struct moe_status moe_cpu_peers_listen(uint32_t slot, uint64_t live, struct moe_cpu_peers **out,
                                       struct moe_cpu_card *card) MOE_CHECKED;

/* Meets every live peer: both sides prove that they hold the other's card and run as the same user,
 * and exchange window descriptors. fds[p] are the caller's to close, -1 where there is none; all
 * are -1 on failure. `cards` are indexed by slot. Returns by `deadline_ns`. */
struct moe_status moe_cpu_peers_meet(struct moe_cpu_peers *peers, const struct moe_cpu_card *cards,
                                     int window_fd, uint64_t deadline_ns,
                                     int fds[MOE_MAX_SLOTS]) MOE_CHECKED;

/* Starts the thread that watches the sockets; `changed` is called on it whenever `lost` or `gone`
 * grew. */
struct moe_status moe_cpu_peers_watch(struct moe_cpu_peers *peers, void (*changed)(void *ctx),
                                      void *ctx) MOE_CHECKED;

/* Any thread. Bit s: slot s died, or was given up by someone. Never shrinks. */
uint64_t moe_cpu_peers_lost(const struct moe_cpu_peers *peers);
/* Any thread. Bit s: slot s left in good order. */
uint64_t moe_cpu_peers_gone(const struct moe_cpu_peers *peers);
/* The slot that was lost first, or -1. */
int moe_cpu_peers_first_lost(const struct moe_cpu_peers *peers);

/* Gives up `slots` and tells all peers; naming the own slot tells them to go on without waiting for
 * this one. One thread at a time. */
void moe_cpu_peers_blame(struct moe_cpu_peers *peers, uint64_t slots);

/* Says goodbye, stops the watcher, closes all. NULL is ignored. */
void moe_cpu_peers_close(struct moe_cpu_peers *peers);

#endif
