/* SPDX-License-Identifier: Apache-2.0 */
/* State that host.c and host_peers.c share; only these files include it. */
#ifndef MOE_REGIONS_HOST_STATE_H
#define MOE_REGIONS_HOST_STATE_H

#include "base/mutex.h"
#include "daemon/progress.h"
#include "regions/host.h"
#include "regions/mapper.h"
#include "regions/packet.h"
#include "regions/server.h"

#include <pthread.h>

enum moe_region_peer_state {
    MOE_PEER_FREE,
    MOE_PEER_WAITS,   /* connected; its ticket has not come */
    MOE_PEER_JOINS,   /* its ring is being mapped */
    MOE_PEER_JOINED,  /* its ring is polled */
    MOE_PEER_LEAVING, /* its regions are being freed; then its socket is closed */
};

/* A connection. Only `moe-regions` changes it, but for the ring and the calls: these need the lock.
 */
struct moe_region_peer {
    struct moe_region_host *host;
    enum moe_region_peer_state state;
    int socket;
    uint32_t uid;
    uint64_t until_ns; /* WAITS: closed then */
    bool has_client;   /* the registry knows it, as `client` */
    uint32_t client;
    uint64_t join_id;            /* of its JoinRegions */
    struct moe_ring_server ring; /* with `attached` */
    bool attached;
    uint32_t in_flight;            /* requests; with the lock */
    struct moe_region_call *calls; /* [MOE_RING_ENTRIES] */
    char *states;                  /* of the calls */
};

/* A registration or its end: its answer waits for the mapper. By place of the region. */
struct moe_region_answer {
    bool waits;
    uint64_t id;
    struct moe_region_peer *peer;
    bool is_ring;
};

struct moe_region_host {
    struct moe_region_host_config config;
    char path[MOE_REGION_SOCKET_BYTES];
    int listener, wake; /* `wake`: an eventfd */
    bool bound;         /* the path is this host's */
    pthread_t thread;
    bool thread_runs;
    struct moe_region_mapper *mapper;
    _Atomic bool stopping;
    /* Requests that end must wake the thread: somebody waits for memory to be unused. */
    _Atomic bool frees;
    _Atomic bool ended;  /* a request has ended: the thread polls for a while */
    _Atomic bool asleep; /* an end must wake the thread */
    /* Of the thread. */
    struct moe_loop *loop; /* NULL: not judged */
    uint64_t accept_at_ns; /* no connection is accepted before */
    struct moe_region_peer peers[MOE_REGION_CLIENTS];
    struct moe_region_answer answers[MOE_REGIONS_MAX];
    bool same_gpu[MOE_REGIONS_MAX]; /* regions in the GPU of the worker; by place */
    struct moe_mutex lock; /* also guards `ring`, `attached`, `calls` and `in_flight` of peers */
    MOE_GUARDED_BY(lock) struct {
        struct moe_regions *registry;
        struct moe_region_tickets tickets;
    };
};

/* host_peers.c; all on the thread `moe-regions`. */
void moe_region_peers_accept(struct moe_region_host *h);
/* Reads what has arrived. */
void moe_region_peer_read(struct moe_region_peer *p);
/* Ends its connection: its regions are closed, its requests cancelled. */
void moe_region_peer_end(struct moe_region_peer *p);
/* Goes on with what the mapper has done, and with memory that is not used any more. */
void moe_region_peers_advance(struct moe_region_host *h);

#endif
