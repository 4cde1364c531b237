/* SPDX-License-Identifier: Apache-2.0 */
/* The sockets between the slots of one session on this host, which detect lost slots; and the lists
 * of lost slots of the whole session.
 *
 * Each such pair of slots shares one unix socket. While a session forms, window descriptors travel
 * over it. Then it stays open: the kernel closes it when a process dies for any reason. A slot that
 * leaves in order sends a notice first. A slot that gives up waiting sends a notice with the lost
 * slots, so the waits of all slots end. A slot that takes a new mask sends a notice with its epoch.
 * common/masks.h says which notice counts in which epoch. */
#ifndef MOE_CPU_PEERS_H
#define MOE_CPU_PEERS_H

#include "base/status.h"
#include "moe/types.h"

struct moe_cpu_peers;

/* Lets a slot connect to another slot. Travels through the caller's all-gather. */
struct moe_cpu_endpoint {
    char name[32];      /* of its socket in the abstract namespace, random */
    uint8_t secret[32]; /* proves that a process got this endpoint */
};

/* Starts to listen and fills in this slot's endpoint. `live`: slots of the session, this slot
 * included. */
struct moe_status moe_cpu_peers_listen(uint32_t slot, uint64_t epoch, uint64_t live,
                                       struct moe_cpu_peers **out,
                                       struct moe_cpu_endpoint *endpoint) MOE_CHECKED;

/* Connects to the slots of `sharing` (bit s: slot s; they do the same) and exchanges window
 * descriptors. Both sides prove that they have the other's endpoint and run as the same user. The
 * caller closes fds[p]; -1 = no descriptor, and all are -1 on failure. `endpoints` are indexed by
 * slot. `optional`: a slot that cannot be reached is left out, instead of a failure. Returns by
 * `deadline_ns`. */
struct moe_status moe_cpu_peers_connect(struct moe_cpu_peers *peers, uint64_t sharing,
                                        bool optional, const struct moe_cpu_endpoint *endpoints,
                                        int window_fd, uint64_t deadline_ns,
                                        int fds[MOE_MAX_SLOTS]) MOE_CHECKED;
/* Closes the socket of a slot that turned out not to share its window after all. */
void moe_cpu_peers_part(struct moe_cpu_peers *peers, uint32_t slot);

/* Starts the thread that watches the sockets. It calls `changed` after every event, in particular
 * when `lost` or `left` grew. */
struct moe_status moe_cpu_peers_watch(struct moe_cpu_peers *peers, void (*changed)(void *ctx),
                                      void *ctx) MOE_CHECKED;

/* Goes on in `epoch` with the slots of `live`, and tells them; `idle`: no step is unfinished, and
 * no thread waits. What was lost in the epoch before does not count any more, unless its connection
 * is closed. Errors: as moe_masks_check; then nothing has changed. */
struct moe_status moe_cpu_peers_mask(struct moe_cpu_peers *peers, uint64_t epoch, uint64_t live,
                                     bool idle) MOE_CHECKED;

/* Any thread. Bit s: slot s died, or a slot reported it lost. Grows until the next mask. */
uint64_t moe_cpu_peers_lost(const struct moe_cpu_peers *peers);
/* Any thread. Bit s: slot s left in order, has a later mask, or reported this slot lost. */
uint64_t moe_cpu_peers_left(const struct moe_cpu_peers *peers);
/* The slot that was lost first in this epoch, or -1. */
int moe_cpu_peers_first_lost(const struct moe_cpu_peers *peers);

/* Any thread. What the network knows of a slot on another host: its line ended, it said goodbye, or
 * it says that it has the mask of `epoch` and has lost these slots in it. */
void moe_cpu_peers_note_closed(struct moe_cpu_peers *peers, uint32_t slot);
void moe_cpu_peers_note_left(struct moe_cpu_peers *peers, uint32_t slot);
void moe_cpu_peers_note_notice(struct moe_cpu_peers *peers, uint32_t slot, uint64_t epoch,
                               uint64_t lost);
/* Any thread. Marks `slots` as lost here, and tells no peer. */
void moe_cpu_peers_note_lost(struct moe_cpu_peers *peers, uint64_t slots);

/* Marks `slots` as lost and notifies all peers on this host, of the present epoch. If `slots`
 * contains this slot, the peers end their waits for it. One thread at a time. */
void moe_cpu_peers_report_lost(struct moe_cpu_peers *peers, uint64_t slots);

/* Tells the peers that this slot leaves the session in order. Once, and nothing follows but close.
 */
void moe_cpu_peers_leave(struct moe_cpu_peers *peers);
/* If watched: leaves, and stops the watcher. Closes all sockets. NULL is ignored. */
void moe_cpu_peers_close(struct moe_cpu_peers *peers);

#endif
