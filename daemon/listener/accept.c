/* SPDX-License-Identifier: Apache-2.0 */
/* New connections: accepting them, also without a free descriptor, and their limits.
 *
 * A process without a free descriptor cannot accept, and its clients would wait for ever. So one
 * descriptor is in reserve. When no other is left, it is given up for each waiting connection,
 * which is closed at once: its client gets an error and may try again. Another thread may take the
 * reserve meanwhile. Then nothing is accepted until a descriptor is free again; the relay's loop
 * tries every 20 ms. */
#include "daemon/log.h"
#include "listener/inside.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#define WARN_EVERY_NS  (30 * MOE_NS_PER_S)
#define RETRY_EVERY_NS (20 * MOE_NS_PER_MS)
#define YOUNG_NS       MOE_NS_PER_S /* so long after its arrival a connection is new */

enum {
    KEEPALIVE_IDLE_S = 30,
    KEEPALIVE_PROBE_S = 10,
    PART = 64,  /* connections that are accepted before others have their turn */
    LOOKS = 64, /* connections that are looked at to make a place */
    OPEN_TAKES = MOE_OPEN_DESCRIPTORS - 1, /* more descriptors than a parked connection */
};

static void warn(struct moe_listener *l, const char *why)
{
    uint64_t now = moe_clock_ns();
    if (l->warned_ns != 0 && now < l->warned_ns + WARN_EVERY_NS)
        return;
    l->warned_ns = now;
    moe_log_warn("new connections are closed: %s", why);
}

/* ------------------------------------------------------------------ listening sockets */

void moe_accept_watch(struct moe_listener *l)
{
    for (size_t i = 0; i < l->socket_count; i++) {
        struct moe_listen_socket *s = &l->sockets[i];
        struct epoll_event event = {.events = EPOLLIN, .data.u64 = (uintptr_t)s | MOE_EVENT_LISTEN};
        if (!s->watched && s->fd >= 0)
            s->watched = epoll_ctl(l->relays[0].epoll, EPOLL_CTL_ADD, s->fd, &event) == 0;
        if (!s->watched) /* out of memory */
            l->retry_ns = moe_clock_ns() + RETRY_EVERY_NS;
    }
}

static void stop_watching(struct moe_listener *l)
{
    l->retry_ns = moe_clock_ns() + RETRY_EVERY_NS;
    for (size_t i = 0; i < l->socket_count; i++)
        if (l->sockets[i].watched &&
            epoll_ctl(l->relays[0].epoll, EPOLL_CTL_DEL, l->sockets[i].fd, NULL) == 0)
            l->sockets[i].watched = false;
}

void moe_accept_stop(struct moe_listener *l)
{
    for (size_t i = 0; i < l->socket_count; i++)
        moe_listen_close(&l->sockets[i]);
    if (l->reserve >= 0)
        close(l->reserve);
    l->reserve = -1;
    l->socket_count = 0;
    l->retry_ns = MOE_NEVER;
}

int moe_accept_reserve(void)
{
    return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void moe_accept_retry(struct moe_listener *l, uint64_t now)
{
    if (now < l->retry_ns)
        return;
    l->retry_ns = MOE_NEVER;
    if (l->reserve < 0)
        l->reserve = moe_accept_reserve();
    if (l->reserve < 0)
        l->retry_ns = now + RETRY_EVERY_NS;
    else
        moe_accept_watch(l);
}

/* Closes one waiting connection. False if none waits, or descriptors have run out. */
static bool refuse_one(struct moe_listener *l, struct moe_listen_socket *s)
{
    if (l->reserve >= 0)
        close(l->reserve);
    int fd = accept4(s->fd, NULL, NULL, SOCK_CLOEXEC);
    bool none = fd < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    if (fd >= 0) {
        moe_listener_count_closed(l, MOE_CLOSE_DESCRIPTORS);
        close(fd);
    }
    l->reserve = moe_accept_reserve();
    if (l->reserve < 0)
        stop_watching(l);
    return l->reserve >= 0 && !none;
}

/* ------------------------------------------------------------------ new connections */

/* Who it is, as far as the kernel knows; TLS may give a name later. */
static bool identify(const struct moe_listener *l, const struct moe_listen_socket *s, int fd,
                     const struct sockaddr_storage *from, socklen_t length,
                     struct moe_rpc_identity *who)
{
    *who = (struct moe_rpc_identity){.link = l->config.tls != NULL ? MOE_RPC_LINK_TLS
                                                                   : MOE_RPC_LINK_TCP};
    if (s->is_unix) {
        struct ucred peer;
        socklen_t size = sizeof peer;
        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
            return false;
        who->link = MOE_RPC_LINK_UNIX;
        who->uid = peer.uid;
        who->is_operator = s->is_group;
        (void)snprintf(who->name, sizeof who->name, "uid:%u", peer.uid);
        return true;
    }
    /* The core would do both. The second bounds how long the kernel keeps bytes for a peer that
     * does not acknowledge them, or has no room. The relay's limit for unread answers comes first.
     */
    int yes = 1, idle_s = KEEPALIVE_IDLE_S, probe_s = KEEPALIVE_PROBE_S;
    unsigned limit_ms = 2 * l->config.silence_ms;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, sizeof limit_ms);
    /* The core pings its clients. A parked one is not known to it: there the kernel notices one
     * that has gone without a word. */
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &probe_s, sizeof probe_s);
    return getnameinfo((const struct sockaddr *)from, length, who->address, sizeof who->address,
                       NULL, 0, NI_NUMERICHOST) == 0;
}

static bool has_descriptors(const struct moe_listener *l, uint32_t more) MOE_REQUIRES(l->lock)
{
    return l->count + OPEN_TAKES * l->opened + more <= l->descriptors;
}

void moe_accept_leave(struct moe_listener *l, struct moe_connection *c)
{
    moe_peers_leave(&l->peers, &c->who, c->opened);
    l->count--;
    l->opened -= c->opened;
}

/* Ends a connection of a list that does not keep its place, about the oldest; of the peer `of`,
 * unless that is NULL. False if none is found, or the next one came after `latest_ns`. Connections
 * that are passed over go to the end of the line: the number of looks is bounded, and the next new
 * connection looks at others. */
static bool replace_one(struct moe_listener *l, struct moe_connections *list,
                        const struct moe_rpc_identity *of, uint64_t latest_ns) MOE_REQUIRES(l->lock)
{
    struct moe_connection *c;
    for (int i = 0; i < LOOKS && (c = TAILQ_FIRST(list)) != NULL; i++) {
        if (c->arrived_ns > latest_ns)
            return false;
        TAILQ_REMOVE(list, c, replaceable_link);
        if ((of != NULL && !moe_peers_are_one(&c->who, of)) ||
            (c->user != NULL && l->config.keeps(l->config.ctx, c->user))) {
            TAILQ_INSERT_TAIL(list, c, replaceable_link);
            continue;
        }
        c->replaceable = false;
        c->replaced = true;
        moe_accept_leave(l, c);
        moe_relay_doom(c);
        moe_relay_wake(c->relay);
        return true;
    }
    return false;
}

/* So callers who hold places and say nothing that is allowed keep no member of the group out. A
 * connection that has made no request for a while goes first. One that has just come may be about
 * to make its first: it goes last. */
static bool make_place(struct moe_listener *l, const struct moe_rpc_identity *of)
    MOE_REQUIRES(l->lock)
{
    const uint64_t now = moe_clock_ns(), old = now > YOUNG_NS ? now - YOUNG_NS : 0;
    return replace_one(l, &l->idle, of, old) || replace_one(l, &l->busy, of, MOE_NEVER) ||
           replace_one(l, &l->idle, of, MOE_NEVER);
}

/* NULL, with a reason, when there are too many. */
static const char *enter(struct moe_listener *l, struct moe_connection *c)
{
    const char *refusal = NULL;
    moe_mutex_lock(&l->lock);
    if (l->closing)
        refusal = "the server shuts down";
    else if ((l->count >= l->config.max_connections || !has_descriptors(l, 1)) &&
             !make_place(l, NULL))
        refusal = "there are too many";
    else if (!moe_peers_enter(&l->peers, &c->who, l->config.max_per_peer) &&
             !(make_place(l, &c->who) &&
               moe_peers_enter(&l->peers, &c->who, l->config.max_per_peer)))
        refusal = "one peer has too many";
    if (refusal == NULL) {
        l->count++;
        if (l->accepted != NULL) { /* before the relay can end it */
            moe_counter_add(l->accepted, 1);
            moe_gauge_add(l->open, 1);
        }
        TAILQ_INSERT_TAIL(&c->relay->arrivals, c, link);
        c->replaceable = l->config.keeps != NULL;
        if (c->replaceable)
            TAILQ_INSERT_TAIL(&l->idle, c, replaceable_link);
    }
    moe_mutex_unlock(&l->lock);
    return refusal;
}

bool moe_accept_open(struct moe_listener *l, struct moe_connection *c)
{
    moe_mutex_lock(&l->lock);
    bool fits = !c->replaced;
    const bool replaceable = c->replaceable;
    if (replaceable) /* it does not make room for itself */
        TAILQ_REMOVE(&l->idle, c, replaceable_link);
    c->replaceable = false;
    for (int i = 0; i < OPEN_TAKES && fits && !has_descriptors(l, OPEN_TAKES); i++)
        fits = make_place(l, NULL);
    if (fits && !moe_peers_open(&l->peers, &c->who, l->max_open_per_peer))
        fits = replace_one(l, &l->busy, &c->who, MOE_NEVER) &&
               moe_peers_open(&l->peers, &c->who, l->max_open_per_peer);
    if (fits) {
        c->opened = true;
        l->opened++;
        c->replaceable = replaceable;
        if (replaceable)
            TAILQ_INSERT_TAIL(&l->busy, c, replaceable_link);
    }
    moe_mutex_unlock(&l->lock);
    return fits;
}

static void begin(struct moe_listener *l, const struct moe_listen_socket *s, int fd,
                  const struct sockaddr_storage *from, socklen_t length)
{
    struct moe_connection *c = calloc(1, sizeof *c);
    if (c == NULL || !identify(l, s, fd, from, length, &c->who)) {
        free(c);
        moe_listener_count_closed(l, MOE_CLOSE_DESCRIPTORS);
        close(fd);
        return;
    }
    struct moe_relay *relay = &l->relays[l->next_relay++ % l->relay_count];
    c->relay = relay;
    c->arrived_ns = moe_clock_ns();
    c->client.fd = fd;
    c->server.fd = -1;
    const char *refusal = enter(l, c);
    if (refusal != NULL) {
        warn(l, refusal);
        free(c);
        moe_listener_count_closed(l, MOE_CLOSE_LIMIT);
        close(fd);
        return;
    }
    moe_relay_wake(relay); /* it may have ended and freed `c` by now */
}

void moe_accept_ready(struct moe_listener *l, struct moe_listen_socket *s)
{
    for (int i = 0; i < PART; i++) {
        struct sockaddr_storage from;
        socklen_t length = sizeof from;
        int fd = accept4(s->fd, (struct sockaddr *)&from, &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            begin(l, s, fd, &from, length);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return;
        } else if (errno == EMFILE || errno == ENFILE) {
            warn(l, errno == ENFILE ? "the system is out of file descriptors"
                                    : "this process is out of file descriptors");
            if (!refuse_one(l, s))
                return;
        } else if (errno == ENOMEM || errno == ENOBUFS) {
            warn(l, "the system is out of memory");
            stop_watching(l);
            return;
        } /* else this connection has failed already */
    }
}
