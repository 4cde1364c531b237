/* SPDX-License-Identifier: Apache-2.0 */
/* The daemon's side of shared memory: the socket, the clients, their regions and rings.
 *
 * Two threads. `moe-regions` owns the socket and all connections. It takes requests from the rings,
 * checks them, finds their memory, and gives them to the owner by `begin`. `moe-regions-map` maps
 * and unmaps memory, and does nothing else. Any thread ends a request by moe_region_host_end_call.
 *
 * Requests arrive without a system call while the thread polls; otherwise the client wakes it with
 * one byte on the socket. */
#ifndef MOE_REGIONS_HOST_H
#define MOE_REGIONS_HOST_H

#include "regions/checks.h"
#include "regions/mapper.h"
#include "regions/registry.h"
#include "regions/server.h"
#include "regions/tickets.h"

#include <stdatomic.h>

struct moe_progress;
struct moe_region_host;
struct moe_region_peer;

enum { MOE_REGION_SOCKET_BYTES = 108 }; /* of a path, with the final 0 */

/* A request of a ring, from `begin` until moe_region_host_end_call. */
struct moe_region_call {
    struct moe_ring_request request; /* the daemon's copy, checked */
    void *at[MOE_RING_ROLES];        /* addresses of its tensors, NULL = absent. The client may
                                        write to this memory at any time */
    bool in_device[MOE_RING_ROLES];  /* the host cannot access the tensor */
    /* What a device may store, and only if the request succeeds: first good.value to `receipt`.
     * Then moe_region_host_end_call must follow with MOE_OK. NULL: no device may, as if y is not in
     * the memory of another GPU. */
    uint64_t *receipt;
    struct moe_ring_good good;
    uint64_t received_ns;
    void *state; /* `state_bytes` bytes of the owner, zero at `begin` */
    /* The host's. */
    struct moe_region_peer *peer;
    uint32_t entry, use;
    bool running;
};

struct moe_region_host_config {
    const char *socket; /* path of the socket; NULL: a new name in the directory of this user's
                           sockets (daemon/local.h) */
    struct moe_regions_limits limits;
    struct moe_progress *progress; /* gets the loop of the thread; borrowed, may be NULL */
    struct moe_region_device
        device; /* of the worker; without `import`, no device memory is shared */
    /* [MOE_REGION_CLIENTS][MOE_RING_ENTRIES] memory of the daemon that the device can write; its
     * receipts. NULL: devices complete no requests. */
    uint64_t *receipts;
    uint64_t
        spin_ns; /* how long the thread polls the rings after a request or an end; 0 = it sleeps */
    size_t state_bytes;
    /* The thread `moe-regions` calls these, without a lock but for `cancel`. */
    /* What the request's layer has. Errors: MOE_NOT_FOUND/LAYER_NOT_FOUND. */
    struct moe_status (*find_layer)(void *ctx, uint32_t layer, struct moe_ring_layer *out);
    /* A request; its tensors are in the client's regions. moe_region_host_end_call must follow
     * exactly once, also from within. */
    void (*begin)(void *ctx, struct moe_region_call *call);
    /* A request was refused before `begin`. */
    void (*refused)(void *ctx, const struct moe_region_call *call, const struct moe_status *why);
    /* The client has left: end the request soon. The host's lock is held: do not call the host. */
    void (*cancel)(void *ctx, struct moe_region_call *call);
    void *ctx;
};

/* Listens, with mode 0600. Errors: MOE_FAILED_PRECONDITION/IO (no directory, or the path is taken),
 * MOE_INVALID_ARGUMENT/CONFIG_INVALID (the path is too long or not absolute),
 * MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_region_host_start(const struct moe_region_host_config *config,
                                        struct moe_region_host **out) MOE_CHECKED;
/* From now on no request begins and no client joins. Call it once, before those parts end that
 * `begin` uses. */
void moe_region_host_stop(struct moe_region_host *h);
/* After stop, when every request has ended: unmaps all memory, then closes all connections. NULL is
 * ignored. */
void moe_region_host_destroy(struct moe_region_host *h);

/* [any thread] A new ticket. Errors: MOE_RESOURCE_EXHAUSTED/QUEUE_FULL, MOE_UNAVAILABLE/IO (no
 * random numbers). */
struct moe_status moe_region_host_invite(struct moe_region_host *h,
                                         const struct moe_region_owner *owner,
                                         uint8_t ticket[MOE_REGION_TICKET]) MOE_CHECKED;
/* Path of the socket; constant. */
const char *moe_region_host_socket(const struct moe_region_host *h);

/* [any thread] Ends a request, after the last access to its tensors. Of `details` the caller fills
 * epoch, version and times; `status` gives the rest. */
void moe_region_host_end_call(struct moe_region_call *call, const struct moe_status *status,
                              const struct moe_ring_details *details);

/* [any thread] Calls `show` for each region of all clients, under the host's lock. */
void moe_region_host_show(struct moe_region_host *h,
                          void (*show)(void *ctx, const struct moe_region_shown *region),
                          void *ctx);

struct moe_region_counters {
    uint64_t bytes;     /* of all regions, from reserve to free */
    uint32_t clients;   /* that have joined and are not forgotten */
    uint32_t in_flight; /* requests */
};
/* [any thread] */
void moe_region_host_read_counters(struct moe_region_host *h, struct moe_region_counters *out);

#endif
