/* SPDX-License-Identifier: Apache-2.0 */
/* The clients of a daemon that share memory, their regions, and the requests that use them. Pure:
 * no I/O, no clock, no threads, no allocation; the caller holds a lock around each call, and maps
 * and unmaps memory without it.
 *
 * Life of a region: reserve (its budget is taken) -> the caller maps it -> commit (requests may use
 * it) -> close (no new ones may) -> unused (none does any more) -> the caller unmaps it -> free.
 * A region that cannot be mapped goes from reserve to free. When a client leaves, all of its
 * regions are closed, and those still being mapped are when they are committed. */
#ifndef MOE_REGIONS_REGISTRY_H
#define MOE_REGIONS_REGISTRY_H

#include "base/status.h"
#include "regions/ring.h"

enum {
#ifdef MOE_SIMULATION
    MOE_REGIONS_MAX = 8,
    MOE_REGION_CLIENTS = 2,
    MOE_REGION_USES = 3,
#else
    MOE_REGIONS_MAX = 1024,  /* of a daemon; a power of two */
    MOE_REGION_CLIENTS = 64, /* that share memory at the same time */
    MOE_REGION_USES = 128,   /* requests of one client in flight, from its ring and over gRPC */
#endif
    MOE_REGION_NAME = 64, /* characters */
};

/* A budget counts the bytes from reserve to free. */
struct moe_regions_limits {
    uint64_t bytes;            /* of all clients */
    uint64_t identity_bytes;   /* of one identity */
    uint32_t identity_clients; /* connections of one identity */
    uint32_t client_regions;   /* regions of one client; these two: so that others find places */
};

/* A region to be registered. */
struct moe_region_spec {
    const char *name;       /* 1 to 64 characters of [A-Za-z0-9._-], not beginning with a dot */
    uint64_t bytes;         /* of the memory as the kernel tells it, not as the client does */
    uint64_t device, inode; /* of the memory's file: each file is one region of a client */
    uint64_t charge;        /* what counts against the budgets; 0 = bytes */
    bool is_ring;           /* holds the client's ring; no tensor lies in it */
    bool in_device;         /* memory of a device: `device` and `inode` are 0, not known */
};

struct moe_region_info {
    char name[MOE_REGION_NAME + 1];
    uint32_t number;
    uint64_t bytes;
    uint32_t references; /* tensors of requests in flight; of a ring: requests */
    bool mapping;        /* not committed yet */
    bool closing;
    bool in_device;
};

enum moe_region_state {
    MOE_REGION_FREE,
    MOE_REGION_RESERVED,
    MOE_REGION_OPEN,
    MOE_REGION_CLOSING,
    MOE_REGION_UNMAPPING,
};

/* The structs below are open for tests; only registry.c uses their fields. */
struct moe_region {
    enum moe_region_state state;
    struct moe_region_info info;
    uint32_t client;
    bool is_ring, left; /* the client left while the region was reserved */
    uint64_t device, inode, charge;
    void *base;
};

/* The tensors of one request in flight. */
struct moe_region_use {
    bool used;
    struct moe_ring_tensor tensors[MOE_RING_ROLES];
};

struct moe_region_client {
    bool used, leaving;
    uint32_t ring; /* number of the region with its ring; 0 = none */
    char identity[256];
    struct moe_region_use uses[MOE_REGION_USES];
};

struct moe_regions {
    struct moe_regions_limits limits;
    uint32_t generation; /* of the next region: numbers of freed regions stay unknown for long */
    struct moe_region regions[MOE_REGIONS_MAX];
    struct moe_region_client clients[MOE_REGION_CLIENTS];
};

/* `r`: zeroed memory. */
void moe_regions_init(struct moe_regions *r, const struct moe_regions_limits *limits);

/* A client has connected. Errors: MOE_RESOURCE_EXHAUSTED/REGION_LIMIT. */
struct moe_status moe_regions_join(struct moe_regions *r, const char *identity,
                                   uint32_t *client) MOE_CHECKED;
/* Its connection has ended: closes its regions and refuses its requests. */
void moe_regions_leave(struct moe_regions *r, uint32_t client);
/* After leave: forgets the client if no region and no request of it is left; `client` may then name
 * another. */
bool moe_regions_forget(struct moe_regions *r, uint32_t client);

/* Errors: MOE_INVALID_ARGUMENT/NAME_INVALID, REGION_INVALID (no bytes, or a ring of another size);
 * MOE_ALREADY_EXISTS/REGION_EXISTS (the name, or the same memory); MOE_RESOURCE_EXHAUSTED/
 * REGION_LIMIT; MOE_UNAVAILABLE/ABORTED (the client has left). */
struct moe_status moe_regions_reserve(struct moe_regions *r, uint32_t client,
                                      const struct moe_region_spec *spec,
                                      uint32_t *number) MOE_CHECKED;
/* `base`: the mapped memory. If the client has left meanwhile, the region is closed at once. */
void moe_regions_commit(struct moe_regions *r, uint32_t number, void *base);
/* Errors: MOE_NOT_FOUND/REGION_NOT_FOUND (also when it is being closed). */
struct moe_status moe_regions_close(struct moe_regions *r, uint32_t client, const char *name,
                                    uint32_t *number) MOE_CHECKED;
/* Finds a closed region that no request uses, and its client. The caller unmaps it and calls free.
 */
bool moe_regions_unused(struct moe_regions *r, uint32_t *number, uint32_t *client, void **base,
                        uint64_t *bytes);
void moe_regions_free(struct moe_regions *r, uint32_t number);
/* False once the region is free. */
bool moe_regions_has(const struct moe_regions *r, uint32_t number);
/* Whether a region that is not free lies in a device's memory. */
bool moe_regions_in_device(const struct moe_regions *r, uint32_t number);

/* Checks the tensors of a request against the client's regions and its requests in flight, and adds
 * a reference for each, and one to the client's ring: a device may store the completion. An output
 * must not share bytes with another tensor of this request or of one in flight. (Two regions in
 * device memory may be the same memory. That is not seen, and harms the client's own results.) `at`
 * gets the address of each tensor, NULL if absent. The request's sizes must have been checked
 * (moe_ring_check). Errors: MOE_NOT_FOUND/REGION_NOT_FOUND (no such region of this client, or it is
 * being closed), MOE_OUT_OF_RANGE/REGION_RANGE (past the end, or not aligned),
 * MOE_FAILED_PRECONDITION/REGION_OVERLAP, MOE_RESOURCE_EXHAUSTED/QUEUE_FULL,
 * MOE_UNAVAILABLE/ABORTED (the client has left). */
struct moe_status moe_regions_take(struct moe_regions *r, uint32_t client,
                                   const struct moe_ring_tensor tensors[MOE_RING_ROLES],
                                   void *at[MOE_RING_ROLES], uint32_t *use) MOE_CHECKED;
/* The request has ended: no access to its tensors follows. */
void moe_regions_put(struct moe_regions *r, uint32_t client, uint32_t use);

/* The regions of a client, in no order. `*cursor` begins at 0. False: no more. */
bool moe_regions_next(const struct moe_regions *r, uint32_t client, uint32_t *cursor,
                      struct moe_region_info *out);
/* The same for the regions of all clients, with those of their rings. */
struct moe_region_shown {
    struct moe_region_info info;
    const char *owner; /* identity of the client, valid as long as the region */
    bool is_ring;
};
bool moe_regions_next_of_all(const struct moe_regions *r, uint32_t *cursor,
                             struct moe_region_shown *out);
/* Bytes that one identity's regions take; NULL = all. */
uint64_t moe_regions_bytes(const struct moe_regions *r, const char *identity);

#endif
