/* SPDX-License-Identifier: Apache-2.0 */
/* A client's side of a ring. Pure: no I/O, no clock, no threads. The caller serialises the calls
 * for one entry; moe_ring_caller_watch and moe_ring_caller_end may run next to the others. */
#ifndef MOE_REGIONS_CALLER_H
#define MOE_REGIONS_CALLER_H

#include "regions/ring.h"

struct moe_ring_caller {
    struct moe_ring *ring;
    /* Of each entry: the last request; whether its result has been taken; and whether the watchdog
     * gave it up. Until the daemon has completed such a request, it may write to the outputs. */
    uint32_t sequence[MOE_RING_ENTRIES];
    bool waiting[MOE_RING_ENTRIES];
    bool abandoned[MOE_RING_ENTRIES];
    bool ended; /* the daemon has closed the connection: it writes nothing any more */
    /* The watchdog's. */
    uint32_t seen[MOE_RING_ENTRIES];
    uint64_t since_ns[MOE_RING_ENTRIES];
};

/* `ring`: zeroed memory. */
void moe_ring_caller_init(struct moe_ring_caller *c, struct moe_ring *ring);

/* True if the entry takes a request: no result is outstanding, and the daemon is done with the last
 * one. Only then the memory of its outputs is the client's again. */
bool moe_ring_caller_is_free(struct moe_ring_caller *c, uint32_t entry);

/* Copies the request into a free entry and submits it. Returns its sequence number. After
 * moe_ring_caller_end its result is MOE_UNAVAILABLE at once. */
uint32_t moe_ring_caller_submit(struct moe_ring_caller *c, uint32_t entry,
                                const struct moe_ring_request *request);
/* True if the daemon must be woken: its thread sleeps. Call it after moe_ring_caller_submit. */
bool moe_ring_caller_must_wake(const struct moe_ring_caller *c);

/* True when the entry's request has a result. On false it is still under way. With MOE_OK all
 * outputs are there. The watchdog's results are MOE_DEADLINE_EXCEEDED and MOE_UNAVAILABLE. After
 * these the daemon may still write to the outputs, until the entry is free. */
bool moe_ring_caller_poll(struct moe_ring_caller *c, uint32_t entry, enum moe_code *code);
/* After a result: what the daemon's host says of the request. False if that is not there: the
 * watchdog's result, or the device was faster than its host. */
bool moe_ring_caller_details(const struct moe_ring_caller *c, uint32_t entry,
                             struct moe_ring_details *out);
/* The same of a request that a device has submitted. */
bool moe_ring_caller_details_of(const struct moe_ring_caller *c, uint32_t entry, uint32_t sequence,
                                struct moe_ring_details *out);

/* A device has submitted in this entry (device_caller.h), and does so no more: the host goes on
 * with the next sequence number. */
void moe_ring_caller_take_back(struct moe_ring_caller *c, uint32_t entry);

/* True if a request has no result, also one that a device submitted. */
bool moe_ring_caller_is_busy(const struct moe_ring_caller *c);
/* The watchdog: gives up requests that have been under way for `limit_ns` since it first saw them;
 * all of them after moe_ring_caller_end. It finds them in the ring, so that it also sees those that
 * a device submitted. */
void moe_ring_caller_watch(struct moe_ring_caller *c, uint64_t now_ns, uint64_t limit_ns);
/* The daemon has closed the connection or has died. All requests without a completion end with
 * MOE_UNAVAILABLE, and every entry is free once its result is taken. */
void moe_ring_caller_end(struct moe_ring_caller *c);

#endif
