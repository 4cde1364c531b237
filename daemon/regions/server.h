/* SPDX-License-Identifier: Apache-2.0 */
/* The daemon's side of one ring. Pure: no I/O, no clock, no threads; one call at a time.
 *
 * An entry that has a request in flight is not read. A sequence number that differs from the last
 * one taken is a new request, whatever the client wrote. So no content of the ring can break the
 * daemon's side: a client that writes nonsense gets errors, or loses its own requests. */
#ifndef MOE_REGIONS_SERVER_H
#define MOE_REGIONS_SERVER_H

#include "regions/ring.h"

struct moe_ring_server {
    struct moe_ring *ring;
    uint32_t taken[MOE_RING_ENTRIES]; /* sequence number of the last request taken */
    bool busy[MOE_RING_ENTRIES];      /* that request has not ended */
    uint32_t next;                    /* the entry to look at first: entries take turns */
};

/* `ring`: memory of the client, with any content. */
void moe_ring_server_init(struct moe_ring_server *s, struct moe_ring *ring);

/* Takes a new request, and copies it to `out`: it may hold anything. False if there is none. Each
 * request that is taken must be completed. */
bool moe_ring_server_take(struct moe_ring_server *s, uint32_t *entry, struct moe_ring_request *out);

/* Gives the entry's request back, as if it had not been taken: it will be taken again. */
void moe_ring_server_give_back(struct moe_ring_server *s, uint32_t entry);

/* Ends the entry's request, after the last access to its tensors. Writes the details, then the
 * completion. Of `details`, the caller fills all but `sequence`. True if a thread of the client
 * sleeps on the completion: the caller wakes it. */
bool moe_ring_server_complete(struct moe_ring_server *s, uint32_t entry, enum moe_code code,
                              const struct moe_ring_details *details);
/* The same for a request that a device has completed: writes the details only. The client may have
 * submitted the entry's next request, and its signal must not end that one's wait. */
bool moe_ring_server_add_details(struct moe_ring_server *s, uint32_t entry,
                                 const struct moe_ring_details *details);

/* What a device stores for an entry's request if all is well: first 1 to `signal`, then `value` to
 * `word`. */
struct moe_ring_good {
    uint64_t *word;
    uint32_t *signal;
    uint64_t value;
};
struct moe_ring_good moe_ring_server_good(const struct moe_ring_server *s, uint32_t entry);

/* Says in the ring whether the daemon's thread sleeps. After `true`, look at all entries once more
 * before sleeping. */
void moe_ring_server_set_sleeps(struct moe_ring_server *s, bool sleeps);

#endif
