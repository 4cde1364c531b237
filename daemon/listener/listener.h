/* SPDX-License-Identifier: Apache-2.0 */
/* Accepts connections, finds out who they are, and relays their bytes to and from a server.
 *
 * A listener owns the listening sockets and the sockets of clients. The server behind it gets one
 * end of a socketpair per connection, and plain bytes only: TLS ends here. So it is this room that
 * bounds what a
 * connection may cost before a server sees it: how many there are, how long one may take to begin,
 * and how long it may leave its answers unread.
 *
 * Functions marked [any thread] may be called from any thread, also from callbacks. */
#ifndef MOE_LISTENER_LISTENER_H
#define MOE_LISTENER_LISTENER_H

#include "base/status.h"
#include "daemon/identity.h"
#include "listener/frames.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct moe_connection;
struct moe_listener;
struct moe_metrics;
struct moe_tls;

enum { MOE_LISTENER_ADDRESSES_MAX = 4 };

struct moe_listener_config {
    /* 1 to 4 addresses, separated by commas: "host:port", "[v6]:port" (port 0 = any free one), or
     * "unix:/absolute/path". A path's socket has mode 0600; a stale one is replaced. A '*' in the
     * path stands for the port of the first address, which must be a TCP one. The socket of
     * "unix-group:/absolute/path" has mode 0660 and the group of its directory; who connects there
     * is an operator. */
    const char *addresses;
    struct moe_tls *tls; /* of all TCP addresses; outlives the listener. NULL = plain TCP */
    bool insecure;       /* allow TCP addresses that are not loopback without TLS */
    uint32_t relays;     /* threads that move bytes; 0 = 1 */
    uint64_t spin_ns;    /* time that a relay polls without sleep after each event; 0 = it sleeps */
    uint32_t max_connections; /* 0 = 16384. Never more than the descriptors allow: one each until
                                 the first request, then 3 */
    uint32_t descriptors_percent; /* share of this process's descriptors that these connections may
                                     take; 0 = 100. The shares of its listeners add up to 100 */
    uint32_t max_per_peer; /* connections of one name, or, of those without one, of one address;
                              loopback addresses count as one. 0 = three quarters of all */
    uint32_t preface_ms;   /* time for a new connection to begin with HTTP/2, after TLS, and for a
                              client to send all of a header block; 0 = 10 s */
    uint32_t silence_ms;   /* a client that takes less of its waiting answers than 64 KiB/s over
                              this long is closed; 0 = 10 s */
    /* What a client learns before its first request, from SETTINGS. The same as the server's own;
     * 0 = nothing. */
    uint32_t max_streams;        /* MAX_CONCURRENT_STREAMS */
    uint32_t max_header_bytes;   /* MAX_HEADER_LIST_SIZE */
    struct moe_metrics *metrics; /* gets moe_rpc_connections...; may be NULL */
    const char *name;            /* label `server` of the metrics; static */

    /* [a relay's thread] A client makes its first request. The callee owns `fd`, a non-blocking
     * stream socket, from now on. Returns its own pointer for `closed`, or NULL (then it has closed
     * `fd`): the connection ends. `who` is valid until `closed`; `connection`, for
     * moe_listener_end, until `closed` has returned. */
    void *(*opened)(void *ctx, const struct moe_rpc_identity *who,
                    struct moe_connection *connection, int fd);
    /* [any thread] True if this connection keeps its place now. At a limit, an old one that does
     * not is closed for a new one. Runs under a lock: it must not call this room. NULL: all keep
     * their places, and a new connection is closed instead. */
    bool (*keeps)(void *ctx, void *connection);
    /* [a relay's thread] Once for each success of `opened`: the other end of `fd` is closed. */
    void (*closed)(void *ctx, void *connection);
    void *ctx;
    const struct moe_frames_events *streams; /* learns of the streams of each connection, with the
                                                pointer from `opened`; may be NULL. A relay's
                                                thread; before the server reads the bytes */
};

/* Listens at all addresses; connections wait until moe_listener_run. Errors: INVALID_ARGUMENT /
 * CONFIG_INVALID (an address, or not loopback without `insecure`), UNAVAILABLE / IO (cannot
 * listen), OUT_OF_MEMORY. */
struct moe_status moe_listener_open(const struct moe_listener_config *config,
                                    struct moe_listener **out) MOE_CHECKED;
/* Starts the relays. Errors: OUT_OF_MEMORY. */
struct moe_status moe_listener_run(struct moe_listener *l) MOE_CHECKED;
/* The port of the first TCP address; 0 if there is none. */
uint16_t moe_listener_port(const struct moe_listener *l);
/* True if all TCP addresses are loopback addresses. */
bool moe_listener_is_local(const struct moe_listener *l);
/* [any thread] Ends the connections of identities that `which` chooses. The client gets what the
 * server has already sent; the server sees the end of the connection at once. `which` runs under a
 * lock: it must not call this room. */
void moe_listener_disconnect(struct moe_listener *l,
                             bool (*which)(void *ctx, const struct moe_rpc_identity *who),
                             void *ctx);
/* [any thread] Ends one connection that has too many streams: both sides see the end at once. It
 * counts as a flood. */
void moe_listener_end(struct moe_connection *c);
/* Stops listening, so that new clients are refused, and ends all connections as above. Returns when
 * `closed` has run for each. Call once, from no thread of the relays. */
void moe_listener_close(struct moe_listener *l);
/* After close, or when the relays never ran. NULL is ignored. */
void moe_listener_destroy(struct moe_listener *l);

#endif
