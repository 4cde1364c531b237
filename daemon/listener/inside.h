/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of this room share: addresses.c (listening sockets), accept.c (new connections),
 * peers.c (how many each peer has), handshake.c (TLS), relay.c (threads and their events), end.c
 * (one end of a connection), flow.c (bytes of one direction), listener.c (life). */
#ifndef MOE_LISTENER_INSIDE_H
#define MOE_LISTENER_INSIDE_H

#include "base/clock.h"
#include "base/mutex.h"
#include "daemon/metrics.h"
#include "listener/frames.h"
#include "listener/listener.h"
#include "tls/tls.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <sys/types.h>

/* The struct of which `member` is `pointer`. */
#define MOE_LISTENER_OWNER(type, member, pointer)                                                  \
    ((type *)((char *)(pointer)-offsetof(type, member)))

/* ------------------------------------------------------------------ listening sockets */

struct moe_listen_socket {
    int fd;
    bool is_unix, is_group; /* a group's: also Unix */
    bool watched;           /* accept.c waits for its connections */
    char path[108];
    dev_t device; /* of the socket file, so that another's is not removed */
    ino_t inode;
};

/* Opens the sockets of a list of addresses. `sockets` holds MOE_LISTENER_ADDRESSES_MAX. On failure
 * nothing stays open. */
struct moe_status moe_listen_open(const char *addresses, bool insecure,
                                  struct moe_listen_socket *sockets, size_t *count, uint16_t *port,
                                  bool *local) MOE_CHECKED;
/* Closes the socket and removes its file. */
void moe_listen_close(struct moe_listen_socket *s);

/* ------------------------------------------------------------------ peers */

/* Number of connections per peer. A chained hash table; entries exist while their count is above
 * zero. */
enum { MOE_PEER_BUCKETS = 1024 };
struct moe_peer;
struct moe_peers {
    LIST_HEAD(, moe_peer) buckets[MOE_PEER_BUCKETS];
};
/* Counts one more. False if the peer has `limit` already, or memory is exhausted. */
bool moe_peers_enter(struct moe_peers *p, const struct moe_rpc_identity *who, uint32_t limit);
/* Counts one of them as open. False if `limit` are. */
bool moe_peers_open(struct moe_peers *p, const struct moe_rpc_identity *who, uint32_t limit);
void moe_peers_leave(struct moe_peers *p, const struct moe_rpc_identity *who, bool open);
bool moe_peers_are_one(const struct moe_rpc_identity *a, const struct moe_rpc_identity *b);

/* ------------------------------------------------------------------ flow of bytes */

enum { MOE_FLOW_BYTES = 256 << 10 }; /* one buffer */

/* Buffers of one relay. An idle connection has none. */
struct moe_flow_buffer {
    SLIST_ENTRY(moe_flow_buffer) link;
    uint8_t bytes[MOE_FLOW_BYTES];
};
struct moe_flow_pool {
    SLIST_HEAD(, moe_flow_buffer) spare; /* the last one used comes first: it is in the cache */
    unsigned count;
};
void moe_flow_pool_destroy(struct moe_flow_pool *pool);

/* One end of a relayed connection. The flags say what the next call of the system may do: an edge
 * of epoll sets them, a refusal clears them. */
struct moe_flow_end {
    int fd;
    struct moe_tls_session *tls; /* NULL = plain */
    bool readable, writable;
    bool asks_room;       /* an event tells when it is writable */
    bool read_needs_room; /* TLS: readable again when it is writable */
    bool hung_up;         /* the peer has gone: reads until the end, without waiting for more */
};

enum moe_end_result {
    MOE_END_MOVED, /* some bytes */
    MOE_END_WAITS, /* for an event, unless the flags say that it may go on */
    MOE_END_OVER,  /* the peer sends no more */
    MOE_END_FAILED,
};
enum moe_end_result moe_end_read(struct moe_flow_end *e, void *bytes, size_t room, size_t *count);
enum moe_end_result moe_end_write(struct moe_flow_end *e, const void *bytes, size_t length,
                                  size_t *count);
/* The first bytes of all, without taking them. MOVED only when they are complete; `*count` have
 * come in any case. */
enum { MOE_END_PEEK_BYTES = 24 };
enum moe_end_result moe_end_peek(struct moe_flow_end *e, uint8_t bytes[MOE_END_PEEK_BYTES],
                                 size_t *count);
/* The peer learns that nothing follows. */
void moe_end_shut(struct moe_flow_end *e);

/* What a look at new bytes says. */
enum moe_flow_look {
    MOE_FLOW_LOOKED,  /* bytes up to `ready` may go; the few behind wait for more */
    MOE_FLOW_NO_ROOM, /* the rest is looked at again when these bytes have gone */
    MOE_FLOW_REFUSED, /* the connection must end */
};

/* Bytes from one end to the other. */
struct moe_flow {
    struct moe_flow_buffer *buffer; /* NULL while no byte waits */
    size_t at, ready, length;       /* at..ready wait for the sink, ready..length for room */
    bool again;                     /* the last look found no room */
    uint8_t carried[MOE_FRAMES_HEAD_BYTES]; /* the beginning of a frame's head */
    size_t carried_length;
    bool ended;     /* the source sends no more */
    bool shut;      /* ... and the sink knows */
    uint64_t moved; /* bytes written to the sink */
    /* Looks at bytes ready..length; sets `ready`, and `length` if it adds some. */
    enum moe_flow_look (*look)(struct moe_flow *f);
};

enum moe_flow_state {
    MOE_FLOW_WAITS,         /* for an event of either end */
    MOE_FLOW_GOES_ON,       /* its turn is over, but more may be done at once */
    MOE_FLOW_SOURCE_FAILED, /* nothing more can be read, or memory is exhausted */
    MOE_FLOW_SINK_FAILED,   /* nothing more can be written */
    MOE_FLOW_LOOK_FAILED,   /* MOE_FLOW_REFUSED */
};

/* Moves up to `budget` bytes. */
enum moe_flow_state moe_flow_run(struct moe_flow *f, struct moe_flow_end *from,
                                 struct moe_flow_end *to, struct moe_flow_pool *pool,
                                 size_t budget);
/* One part of that: reads once, into an empty buffer, and looks. WAITS is not among its results. */
enum moe_flow_state moe_flow_take(struct moe_flow *f, struct moe_flow_end *from,
                                  struct moe_flow_pool *pool);
/* Adds bytes of the relay itself behind those that wait for the sink. False without memory or room.
 */
bool moe_flow_put(struct moe_flow *f, struct moe_flow_pool *pool, const void *bytes, size_t length);
/* Drops waiting bytes. */
void moe_flow_discard(struct moe_flow *f, struct moe_flow_pool *pool);

/* ------------------------------------------------------------------ connections */

/* Why a connection ended: label `reason` of moe_rpc_connections_closed_total. */
enum moe_close_reason {
    MOE_CLOSE_CLIENT,      /* the client left */
    MOE_CLOSE_SERVER,      /* the server ended it */
    MOE_CLOSE_SHUTDOWN,    /* the listener closes */
    MOE_CLOSE_IDENTITY,    /* moe_listener_disconnect */
    MOE_CLOSE_LIMIT,       /* too many connections */
    MOE_CLOSE_DESCRIPTORS, /* no descriptor or memory is left */
    MOE_CLOSE_HANDSHAKE,   /* TLS: no session, or not in time */
    MOE_CLOSE_PREFACE,     /* it did not begin in time, or not with HTTP/2 */
    MOE_CLOSE_UNREAD,      /* it left its answers unread */
    MOE_CLOSE_MALFORMED,   /* it does not speak HTTP/2 */
    MOE_CLOSE_FLOOD,       /* too many frames of a sort, or too large headers */
    MOE_CLOSE_REASONS
};

enum moe_connection_state {
    MOE_CONNECTION_HANDSHAKE, /* TLS: no session yet */
    MOE_CONNECTION_NEW,       /* its preface has not arrived */
    MOE_CONNECTION_PARKED,    /* no request has arrived: the relay answers */
    MOE_CONNECTION_OPEN,      /* relayed */
    MOE_CONNECTION_ENDING,    /* the server's last bytes go to the client */
};

enum { MOE_OPEN_DESCRIPTORS = 3 }; /* of an open connection; others have one */

struct moe_connection {
    struct moe_relay *relay;
    struct moe_rpc_identity who;      /* changes once, at the end of a handshake, under the lock */
    TAILQ_ENTRY(moe_connection) link; /* arrivals, then connections; guarded by the lock */
    bool doomed;                      /* in the relay's list `doomed`; guarded by the lock */
    TAILQ_ENTRY(moe_connection) doomed_link; /* guarded by the lock */
    bool replaced;    /* for a newer connection, so it does not count; guarded by the lock */
    bool flooded;     /* moe_listener_end; guarded by the lock */
    bool opened;      /* counts as open: takes 3 descriptors; guarded by the lock */
    bool replaceable; /* in one of the lists `idle` and `busy`; guarded by the lock */
    TAILQ_ENTRY(moe_connection) replaceable_link; /* guarded by the lock */
    uint64_t arrived_ns;                          /* does not change */

    /* The relay's thread only. */
    enum moe_connection_state state;
    enum moe_close_reason reason; /* of an ENDING connection, of a failed handshake, or why a
                                     PARKED one could not be opened */
    struct moe_flow_end client, server;
    struct moe_flow up, down;           /* client to server, server to client */
    void *user;                         /* from `opened` */
    struct moe_frames frames;           /* of `up` */
    struct moe_frames_back frames_back; /* of `down` */
    uint64_t owes_ns;                   /* since when a header block is open; 0 = none is */
    uint64_t deadline_ns;               /* of all states but OPEN; PARKED: until SETTINGS come */
    uint64_t stalled_ns;    /* since when `down` waits for the client; 0 = it does not */
    uint64_t stalled_moved; /* down.moved at that time */
    bool ready;             /* in the list `ready`, or `handshakes` in that state */
    bool timed;             /* in the list `timed` */
    bool gone;              /* in the list `gone` */
    bool lingers;           /* has all bytes for the client; waits for it to close */
    TAILQ_ENTRY(moe_connection) ready_link, timed_link, gone_link;
};
TAILQ_HEAD(moe_connections, moe_connection);

/* ------------------------------------------------------------------ relays */

struct moe_relay {
    struct moe_listener *listener;
    pthread_t thread;
    int epoll, wake; /* `wake` is an eventfd */
    struct moe_flow_pool pool;
    struct moe_connections ready;      /* their turn was over before their work */
    struct moe_connections handshakes; /* those that wait for a step of their handshake */
    uint64_t handshakes_ns; /* when handshakes will have had no more than their share of time */
    struct moe_connections timed; /* those with a time limit that runs */
    struct moe_connections gone;  /* closed; freed when no event can name them */
    uint64_t next_check_ns;       /* of `timed` */
    uint64_t spin_until;          /* until then the thread polls instead of sleeping */
    /* Guarded by the listener's lock. */
    struct moe_connections arrivals, connections;
    struct moe_connections doomed; /* they are to be ended */
};

/* What an event of a relay's epoll set is about: the low bits of its data, next to the pointer to a
 * connection or a listening socket. An event without a pointer is the relay's `wake`. */
enum moe_event_kind { MOE_EVENT_CLIENT = 1, MOE_EVENT_SERVER = 2, MOE_EVENT_LISTEN = 4 };

struct moe_status moe_relay_start(struct moe_listener *l, struct moe_relay *r) MOE_CHECKED;
/* After the listener began to close: joins the thread. Frees what the relay has. */
void moe_relay_stop(struct moe_relay *r);
/* [any thread] Makes the relay look at its arrivals, doomed connections and `closing`. */
void moe_relay_wake(struct moe_relay *r);

/* ------------------------------------------------------------------ listener */

struct moe_listener {
    struct moe_listener_config config;
    struct moe_listen_socket sockets[MOE_LISTENER_ADDRESSES_MAX];
    size_t socket_count;
    uint16_t port;
    bool local;
    uint32_t descriptors;       /* that connections may take */
    uint32_t max_open_per_peer; /* connections */
    struct moe_relay *relays;   /* the first one accepts */
    uint32_t relay_count;       /* those that run */

    /* The first relay's thread only (accept.c). */
    int reserve;               /* a descriptor to be given up for one that comes; -1 = lost */
    uint32_t next_relay;       /* gets the next connection */
    uint64_t retry_ns;         /* when to try again to get the reserve; MOE_NEVER = it is there */
    uint64_t warned_ns;        /* last line about refused connections */
    _Atomic uint64_t flood_ns; /* last line about a flood; any relay */
    _Atomic uint64_t handshake_warned_ns; /* last line about a handshake; any relay */

    struct moe_counter *accepted, *closed[MOE_CLOSE_REASONS]; /* NULL without metrics */
    struct moe_counter *handshakes_failed[MOE_TLS_FAILURES];  /* NULL without TLS, too. The first
                                                                 one counts those out of time */
    struct moe_gauge *open, *parked;                          /* NULL without metrics */

    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        struct moe_peers peers;
        uint32_t count;  /* connections without those that are being replaced */
        uint32_t opened; /* those of them that are open */
        /* All of them, if some may be replaced: those without a request, and others. Those looked
         * at lately, and new ones, come last. */
        struct moe_connections idle, busy;
        bool closing;
    };
};

/* ------------------------------------------------------------------ handshakes */

enum moe_handshake_outcome {
    MOE_HANDSHAKE_WAITS, /* for an event of the client */
    MOE_HANDSHAKE_DONE,  /* `who` has the name of the certificate */
    MOE_HANDSHAKE_FAILED /* counted; the connection ends with its `reason` */
};
/* One step; it may take a millisecond of computing. */
enum moe_handshake_outcome moe_handshake_step(struct moe_connection *c);
/* Counts one that ran out of time. */
void moe_handshake_late(struct moe_connection *c);

/* [any thread] Counts the end of a connection, or one that never began. */
void moe_listener_count_closed(struct moe_listener *l, enum moe_close_reason reason);

/* [the first relay's thread] The listening sockets become events of its epoll with the address of
 * the socket as data. */
void moe_accept_watch(struct moe_listener *l);
/* Accepts what waits at `s`, a part at a time. */
void moe_accept_ready(struct moe_listener *l, struct moe_listen_socket *s);
/* Stops listening for good. */
void moe_accept_stop(struct moe_listener *l);
/* Opens a descriptor for the reserve; -1 = there is none. */
int moe_accept_reserve(void);
/* [a relay's thread] A parked connection is to be opened: counts it as open, and makes room for
 * that. False at a limit. */
bool moe_accept_open(struct moe_listener *l, struct moe_connection *c);
/* The connection does not count any more. */
void moe_accept_leave(struct moe_listener *l, struct moe_connection *c) MOE_REQUIRES(l->lock);
/* [with the lock] The relay ends the connection once it is woken. */
void moe_relay_doom(struct moe_connection *c);
/* Tries to get the reserve back once its time has come. */
void moe_accept_retry(struct moe_listener *l, uint64_t now);

#endif
