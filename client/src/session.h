/* SPDX-License-Identifier: Apache-2.0 */
/* A session of moe/regions.h; session.c, session_forward.c and region.c share it. */
#ifndef MOE_CLIENT_SESSION_H
#define MOE_CLIENT_SESSION_H

#include "base/mutex.h"
#include "internal.h"
#include "moe/regions_device.h"
#include "moe/v1/regions.pb-c.h"
#include "regions/caller.h"

#include <pthread.h>
#include <stdatomic.h>

struct moe_client_region {
    struct moe_client_session *session;
    struct moe_client_region *next; /* of the session */
    void *data;
    size_t bytes;
    uint32_t number; /* on the worker */
    char name[65];
    bool in_device; /* `data` is an address of a device, and `release`, if not NULL, frees it */
    void (*release)(void *ctx, void *data, size_t bytes);
    void *ctx;
};

struct moe_client_session {
    struct moe_client *client;
    int socket, wake; /* `wake`: an eventfd for the watchdog */
    struct moe_ring_caller caller;
    uint64_t timeout_ns, spin_ns;
    pthread_t watchdog;
    bool watched;               /* the watchdog runs */
    _Atomic bool closing, idle; /* `idle`: the watchdog sleeps without a limit */
    _Atomic uint32_t in_flight; /* requests without a returned end */
    _Atomic uint32_t lent;      /* entries of the ring that a device uses */
    struct moe_mutex lock;
    pthread_cond_t change; /* of the fields below */
    MOE_GUARDED_BY(lock) struct {
        bool ended; /* the connection has */
        /* Entries of the ring with a request in them: its end has not been returned. */
        bool taken[MOE_RING_ENTRIES];
        struct moe_client_region *regions;
        /* The call on the socket: one at a time. */
        bool asking, replied;
        uint64_t id; /* of the last one */
        struct moe_status reply;
        uint32_t number;
    };
};

/* Sends a request on the socket, with a descriptor unless that is -1, and waits for its reply.
 * `q->id` is filled in. `number` may be NULL. */
struct moe_status moe_client_session_ask(struct moe_client_session *s, Moe__V1__RegionsRequest *q,
                                         int descriptor, uint32_t *number) MOE_CHECKED;
/* Wakes the watchdog if it sleeps without a limit. */
void moe_client_session_watch(struct moe_client_session *s);
/* Adds a region with the data of `like`, and has the worker map its descriptor, which the caller
 * keeps. On failure the data stays the caller's. */
struct moe_status moe_client_region_add(struct moe_client_session *s, const char *name,
                                        const struct moe_client_region *like, int descriptor,
                                        struct moe_client_region **out) MOE_CHECKED;
/* Makes the ring's form of a request. */
struct moe_status moe_client_session_fill(const struct moe_client_session *s,
                                          const struct moe_client_session_forward *f,
                                          struct moe_ring_request *q) MOE_CHECKED;
/* Takes an entry of the ring that the worker is done with. False if there is none. */
bool moe_client_session_take(struct moe_client_session *s, uint32_t *entry) MOE_REQUIRES(s->lock);
/* What the worker says of a request that has ended with `code`. If a device has completed it, the
 * worker's host writes that some microseconds later: waits for it, but not for long. False: the
 * worker has said nothing of it, or a later request is in the entry. */
bool moe_client_session_details(const struct moe_client_session *s, uint32_t entry,
                                uint32_t sequence, enum moe_code code,
                                struct moe_ring_details *out);
/* The status of a request that has ended; `d` NULL: the worker has said nothing of it. */
struct moe_status moe_client_session_status(enum moe_code code,
                                            const struct moe_ring_details *d) MOE_CHECKED;
void moe_client_session_answer_of(const struct moe_ring_details *d,
                                  struct moe_client_session_answer *to);
/* Frees the memory of a region here. */
void moe_client_region_free(struct moe_client_region *r);

#endif
