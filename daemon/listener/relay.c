/* SPDX-License-Identifier: Apache-2.0 */
/* A relay: a thread that moves the bytes of its connections.
 *
 * Each connection has two sockets in one epoll set, with edges: an edge sets a flag of its end, and
 * a refused read or write clears it. Room to write is an event only while an end has none: else
 * each read of the other side of a socketpair would wake the relay. Connections with work stand in
 * the list `ready` and take turns, so that a large message does not keep small ones waiting. The
 * thread sleeps when the list is empty and no event is expected soon.
 *
 * A step of a TLS handshake may compute for a millisecond. So handshakes stand in a second
 * list: between two rounds of turns there is one step, and all steps together get a quarter of the
 * thread's time. */
#include "base/thread.h"
#include "daemon/log.h"
#include "listener/inside.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define CHECK_EVERY_NS        (250 * MOE_NS_PER_MS)
#define ENDING_NS             MOE_NS_PER_S       /* for the client to take the last bytes */
#define LINGER_NS             (MOE_NS_PER_S / 2) /* for the client to close */
#define LEAST_PER_S           UINT64_C(65536)
#define WARN_EVERY_NS         (30 * MOE_NS_PER_S)
#define HANDSHAKES_ACCOUNT_NS (200 * MOE_NS_PER_MS) /* a quarter of it may be used at once */

enum {
    EVENTS = 64,
    HANDSHAKES_SHARE = 4,   /* one part in so many of the thread's time */
    TURN_BYTES = 1 << 20,   /* of one direction before others have their turn */
    SOCKET_BYTES = 1 << 20, /* wish for the buffers between relay and server */
};

static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
_Static_assert(sizeof preface - 1 == MOE_END_PEEK_BYTES, "a peek sees all of the preface");

/* ------------------------------------------------------------------ lists */

static struct moe_connections *turns_of(const struct moe_connection *c)
{
    return c->state == MOE_CONNECTION_HANDSHAKE ? &c->relay->handshakes : &c->relay->ready;
}

static void make_ready(struct moe_connection *c)
{
    if (c->ready || c->gone)
        return;
    c->ready = true;
    TAILQ_INSERT_TAIL(turns_of(c), c, ready_link);
}

static void make_timed(struct moe_connection *c)
{
    struct moe_relay *r = c->relay;
    if (c->timed)
        return;
    c->timed = true;
    if (TAILQ_EMPTY(&r->timed))
        r->next_check_ns = moe_clock_ns() + CHECK_EVERY_NS;
    TAILQ_INSERT_TAIL(&r->timed, c, timed_link);
}

/* ------------------------------------------------------------------ the end of a connection */

/* The connection enters or leaves the state PARKED. */
static void set_state(struct moe_connection *c, enum moe_connection_state state)
{
    struct moe_gauge *parked = c->relay->listener->parked;
    const int change = (state == MOE_CONNECTION_PARKED) - (c->state == MOE_CONNECTION_PARKED);
    c->state = state;
    if (parked != NULL && change != 0)
        moe_gauge_add(parked, change);
}

static void leave_lists(struct moe_connection *c)
{
    struct moe_relay *r = c->relay;
    if (c->ready)
        TAILQ_REMOVE(turns_of(c), c, ready_link);
    if (c->timed)
        TAILQ_REMOVE(&r->timed, c, timed_link);
    c->ready = c->timed = false;
    moe_mutex_lock(&r->listener->lock);
    TAILQ_REMOVE(&r->connections, c, link);
    if (c->doomed)
        TAILQ_REMOVE(&r->doomed, c, doomed_link);
    if (c->replaceable)
        TAILQ_REMOVE(c->opened ? &r->listener->busy : &r->listener->idle, c, replaceable_link);
    c->doomed = c->replaceable = false;
    if (!c->replaced)
        moe_accept_leave(r->listener, c);
    moe_mutex_unlock(&r->listener->lock);
}

/* Closes both ends at once. `c` stays in memory until the events at hand are done. */
static void close_now(struct moe_connection *c, enum moe_close_reason reason)
{
    struct moe_relay *r = c->relay;
    struct moe_listener *l = r->listener;
    leave_lists(c);
    set_state(c, MOE_CONNECTION_ENDING);
    moe_listener_count_closed(l, reason);
    moe_flow_discard(&c->up, &r->pool);
    moe_flow_discard(&c->down, &r->pool);
    moe_tls_close(c->client.tls);
    close(c->client.fd);
    if (c->server.fd >= 0)
        close(c->server.fd);
    if (c->user != NULL)
        l->config.closed(l->config.ctx, c->user);
    c->gone = true;
    TAILQ_INSERT_TAIL(&r->gone, c, gone_link);
    if (l->open != NULL)
        moe_gauge_add(l->open, -1);
}

/* Reads what the client still sends. */
static void drop_rest(struct moe_connection *c)
{
    enum moe_end_result result = MOE_END_WAITS;
    uint8_t rest[4096];
    size_t count, total = 0;
    while (c->client.readable && total < TURN_BYTES) {
        result = moe_end_read(&c->client, rest, sizeof rest, &count);
        if (result == MOE_END_OVER || result == MOE_END_FAILED) {
            close_now(c, c->reason);
            return;
        }
        total += count;
    }
    if (c->client.readable)
        make_ready(c);
}

/* The client has the server's last bytes on their way. It closes first: a socket that is closed
 * with unread bytes resets the connection, and the client would lose what it has not read. */
static void linger(struct moe_connection *c, enum moe_close_reason reason)
{
    set_state(c, MOE_CONNECTION_ENDING);
    c->reason = reason;
    c->lingers = true;
    c->stalled_ns = 0;
    c->deadline_ns = moe_clock_ns() + LINGER_NS;
    moe_flow_discard(&c->up, &c->relay->pool);
    make_timed(c);
    drop_rest(c);
}

/* The server gets the end of the connection now; the client what the server has sent by then. */
static void end(struct moe_connection *c, enum moe_close_reason reason)
{
    if (c->state < MOE_CONNECTION_PARKED) {
        close_now(c, reason);
        return;
    }
    if (c->state == MOE_CONNECTION_PARKED) {
        moe_end_shut(&c->client);
        linger(c, reason);
        return;
    }
    if (c->state == MOE_CONNECTION_ENDING)
        return;
    c->state = MOE_CONNECTION_ENDING;
    c->reason = reason;
    c->deadline_ns = moe_clock_ns() + ENDING_NS;
    moe_flow_discard(&c->up, &c->relay->pool);
    c->up.ended = true;
    make_timed(c);
    make_ready(c);
}

static void free_gone(struct moe_relay *r)
{
    while (!TAILQ_EMPTY(&r->gone)) {
        struct moe_connection *c = TAILQ_FIRST(&r->gone);
        TAILQ_REMOVE(&r->gone, c, gone_link);
        free(c);
    }
}

/* ------------------------------------------------------------------ frames */

static enum moe_flow_look look_up_stream(struct moe_flow *f)
{
    struct moe_connection *c = MOE_LISTENER_OWNER(struct moe_connection, up, f);
    enum moe_frames_outcome outcome =
        moe_frames_scan(&c->frames, f->buffer->bytes, &f->ready, &f->length,
                        sizeof f->buffer->bytes, moe_clock_ns());
    if (outcome != MOE_FRAMES_OK)
        return MOE_FLOW_REFUSED;
    return moe_frames_wants_room(&c->frames) ? MOE_FLOW_NO_ROOM : MOE_FLOW_LOOKED;
}

static enum moe_flow_look look_down_stream(struct moe_flow *f)
{
    struct moe_connection *c = MOE_LISTENER_OWNER(struct moe_connection, down, f);
    moe_frames_follow(&c->frames_back, &c->frames, f->buffer->bytes, &f->ready, &f->length,
                      moe_clock_ns());
    return c->frames.outcome == MOE_FRAMES_OK ? MOE_FLOW_LOOKED : MOE_FLOW_REFUSED;
}

static void warn_of_flood(struct moe_connection *c)
{
    struct moe_listener *l = c->relay->listener;
    uint64_t now = moe_clock_ns(), last = atomic_load(&l->flood_ns);
    if ((last == 0 || now >= last + WARN_EVERY_NS) &&
        atomic_compare_exchange_strong(&l->flood_ns, &last, now))
        moe_log_warn("a connection of %s was closed: too many %s",
                     c->who.name[0] != '\0' ? c->who.name : c->who.address, c->frames.reason);
}

/* The frames of a client are not to be answered. The client learns why, if that is possible now. */
static void refuse_frames(struct moe_connection *c)
{
    uint8_t goaway[MOE_FRAMES_GOAWAY_BYTES];
    const bool flood = c->frames.outcome == MOE_FRAMES_FLOOD;
    if (flood)
        warn_of_flood(c);
    if (flood && c->down.at == c->down.ready && moe_frames_at_border(&c->frames_back)) {
        size_t count; /* if it does not fit, the client learns nothing */
        moe_frames_goaway(c->frames.last_stream, goaway);
        (void)moe_end_write(&c->client, goaway, sizeof goaway, &count);
    }
    close_now(c, flood                                       ? MOE_CLOSE_FLOOD
                 : c->frames.outcome == MOE_FRAMES_NO_MEMORY ? c->reason
                                                             : MOE_CLOSE_MALFORMED);
}

/* Others need the streams that it has. */
static void refuse_streams(struct moe_connection *c)
{
    c->frames.outcome = MOE_FRAMES_FLOOD;
    c->frames.reason = "open streams";
    refuse_frames(c);
}

/* Notes since when the client owes the rest of a header block. */
static void note_headers(struct moe_connection *c)
{
    if (!moe_frames_owes_headers(&c->frames)) {
        c->owes_ns = 0;
    } else if (c->owes_ns == 0) {
        c->owes_ns = moe_clock_ns();
        make_timed(c);
    }
}

/* ------------------------------------------------------------------ the start of a connection */

/* `how` is EPOLL_CTL_ADD or EPOLL_CTL_MOD. */
static bool watch(struct moe_connection *c, struct moe_flow_end *e, enum moe_event_kind kind,
                  int how)
{
    const uint32_t room = e->writable ? 0 : EPOLLOUT;
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET | room,
                                .data.u64 = (uintptr_t)c | kind};
    e->asks_room = room != 0;
    return epoll_ctl(c->relay->epoll, how, e->fd, &event) == 0;
}

/* An edge that came before is not lost: epoll looks at the socket again. */
static bool ask_for_room(struct moe_connection *c, struct moe_flow_end *e, enum moe_event_kind kind)
{
    return e->asks_room != e->writable || watch(c, e, kind, EPOLL_CTL_MOD);
}

/* Makes the pair to the server. */
static bool open_server(struct moe_connection *c)
{
    const struct moe_listener_config *config = &c->relay->listener->config;
    int pair[2], bytes = SOCKET_BYTES;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0)
        return false;
    for (int i = 0; i < 2; i++)
        (void)setsockopt(pair[i], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    c->server = (struct moe_flow_end){.fd = pair[0], .writable = true};
    if (!watch(c, &c->server, MOE_EVENT_SERVER, EPOLL_CTL_ADD)) {
        close(pair[1]);
        return false;
    }
    void *user = config->opened(config->ctx, &c->who, c, pair[1]);
    moe_mutex_lock(&c->relay->listener->lock); /* make_place looks at it */
    c->user = user;
    moe_mutex_unlock(&c->relay->listener->lock);
    c->up.look = look_up_stream;
    c->down.look = look_down_stream;
    c->frames.events = config->streams;
    c->frames.ctx = c->user;
    c->frames_back.drops_ack = true;
    set_state(c, MOE_CONNECTION_OPEN);
    return c->user != NULL;
}

/* The first request is at `ready`. The server begins with what the client has said before. */
static enum moe_flow_look open_and_replay(struct moe_connection *c)
{
    struct moe_flow *f = &c->up;
    uint8_t *bytes = f->buffer->bytes, before[MOE_PARK_REPLAY_BYTES];
    const size_t rest = f->length - f->ready, count = moe_park_replay(&c->frames, before);
    const bool fits = moe_accept_open(c->relay->listener, c);
    c->reason = fits ? MOE_CLOSE_DESCRIPTORS : MOE_CLOSE_LIMIT;
    if (!fits || count > sizeof f->buffer->bytes - rest || !open_server(c)) {
        c->frames.outcome = MOE_FRAMES_NO_MEMORY;
        return MOE_FLOW_REFUSED;
    }
    memmove(bytes + count, bytes + f->ready, rest);
    memcpy(bytes, before, count);
    f->at = 0;
    f->ready = count;
    f->length = count + rest;
    return look_up_stream(f);
}

/* Nothing goes to a server. The answers are shorter than what they answer, so they find room. */
static enum moe_flow_look look_parked(struct moe_flow *f)
{
    struct moe_connection *c = MOE_LISTENER_OWNER(struct moe_connection, up, f);
    struct moe_park *park = &c->frames.park;
    enum moe_frames_outcome outcome;
    do {
        outcome = moe_frames_scan(&c->frames, f->buffer->bytes, &f->ready, &f->length,
                                  sizeof f->buffer->bytes, moe_clock_ns());
        if (park->answer_bytes == 0)
            break;
        if (!moe_flow_put(&c->down, &c->relay->pool, park->answer, park->answer_bytes))
            outcome = c->frames.outcome = MOE_FRAMES_NO_MEMORY;
        park->answer_bytes = 0;
    } while (outcome == MOE_FRAMES_OK);
    f->at = f->ready;
    if (outcome != MOE_FRAMES_OK)
        return MOE_FLOW_REFUSED;
    return park->requests ? open_and_replay(c) : MOE_FLOW_LOOKED;
}

static void begin_parked(struct moe_connection *c)
{
    const struct moe_listener_config *config = &c->relay->listener->config;
    set_state(c, MOE_CONNECTION_PARKED);
    c->reason = MOE_CLOSE_DESCRIPTORS; /* until it is opened: no memory for an answer */
    c->up.look = look_parked;
    moe_park_begin(&c->frames, config->max_streams, config->max_header_bytes);
}

/* The preface stays in the socket until it is whole: a client that waits costs no buffer. */
static void read_preface(struct moe_connection *c)
{
    uint8_t text[MOE_END_PEEK_BYTES];
    size_t count;
    if (!c->client.readable)
        return;
    enum moe_end_result result = moe_end_peek(&c->client, text, &count);
    if (result == MOE_END_OVER || result == MOE_END_FAILED)
        close_now(c, MOE_CLOSE_CLIENT);
    else if (memcmp(text, preface, count) != 0)
        close_now(c, MOE_CLOSE_PREFACE);
    else if (result == MOE_END_MOVED)
        begin_parked(c);
}

static void arrive(struct moe_connection *c)
{
    c->state = c->who.link == MOE_RPC_LINK_TLS ? MOE_CONNECTION_HANDSHAKE : MOE_CONNECTION_NEW;
    c->deadline_ns = moe_clock_ns() + c->relay->listener->config.preface_ms * MOE_NS_PER_MS;
    make_timed(c);
    if (!watch(c, &c->client, MOE_EVENT_CLIENT, EPOLL_CTL_ADD))
        close_now(c, MOE_CLOSE_DESCRIPTORS);
}

/* ------------------------------------------------------------------ relaying */

/* Notes since when bytes wait for the client. */
static void note_stall(struct moe_connection *c)
{
    if (c->down.at == c->down.ready || c->client.writable) {
        c->stalled_ns = 0;
    } else if (c->stalled_ns == 0) {
        c->stalled_ns = moe_clock_ns();
        c->stalled_moved = c->down.moved;
        make_timed(c);
    }
}

/* True if the connection goes on. */
static bool relay_up(struct moe_connection *c, enum moe_flow_state *state)
{
    struct moe_flow_pool *pool = &c->relay->pool;
    *state = MOE_FLOW_WAITS;
    if (c->up.shut)
        return true;
    *state = moe_flow_run(&c->up, &c->client, &c->server, pool, TURN_BYTES);
    if (*state == MOE_FLOW_SOURCE_FAILED) {
        close_now(c, MOE_CLOSE_CLIENT);
        return false;
    }
    if (*state == MOE_FLOW_LOOK_FAILED) {
        refuse_frames(c);
        return false;
    }
    if (*state == MOE_FLOW_SINK_FAILED) { /* the server's last bytes may still be there */
        moe_flow_discard(&c->up, pool);
        c->up.shut = true;
    }
    note_headers(c);
    return true;
}

static bool relay_down(struct moe_connection *c, enum moe_flow_state *state)
{
    *state = moe_flow_run(&c->down, &c->server, &c->client, &c->relay->pool, TURN_BYTES);
    if (*state == MOE_FLOW_LOOK_FAILED) {
        refuse_frames(c);
        return false;
    }
    if (*state == MOE_FLOW_SINK_FAILED) {
        close_now(c, MOE_CLOSE_CLIENT);
        return false;
    }
    if (c->down.shut || *state == MOE_FLOW_SOURCE_FAILED) {
        const enum moe_close_reason reason = c->state == MOE_CONNECTION_ENDING ? c->reason
                                             : c->up.ended                     ? MOE_CLOSE_CLIENT
                                                                               : MOE_CLOSE_SERVER;
        if (!c->down.shut) /* the core has closed with unread bytes; its own have come before */
            moe_end_shut(&c->client);
        linger(c, reason);
        return false;
    }
    note_stall(c);
    return true;
}

/* True while answers wait for the client: until they have gone, nothing is read. */
static bool answers_wait(const struct moe_connection *c)
{
    return c->down.at < c->down.ready;
}

/* True when the connection has been opened. */
static bool serve_parked(struct moe_connection *c)
{
    enum moe_flow_state state;
    if (answers_wait(c) && (!relay_down(c, &state) || answers_wait(c)))
        return false;
    if (!c->client.readable)
        return false;
    state = moe_flow_take(&c->up, &c->client, &c->relay->pool);
    if (state == MOE_FLOW_LOOK_FAILED) {
        refuse_frames(c);
        return false;
    }
    if (state == MOE_FLOW_SOURCE_FAILED || (c->up.ended && c->state == MOE_CONNECTION_PARKED)) {
        close_now(c, MOE_CLOSE_CLIENT);
        return false;
    }
    if (c->state == MOE_CONNECTION_OPEN)
        return true;
    moe_flow_discard(&c->up, &c->relay->pool);
    if (answers_wait(c) && !relay_down(c, &state))
        return false;
    if (c->client.readable)
        make_ready(c);
    return false;
}

static void relay_bytes(struct moe_connection *c)
{
    enum moe_flow_state up, down;
    if (c->lingers) {
        drop_rest(c);
        return;
    }
    if (c->state == MOE_CONNECTION_PARKED && !serve_parked(c))
        return;
    if (!relay_up(c, &up) || !relay_down(c, &down))
        return;
    if (up == MOE_FLOW_GOES_ON || down == MOE_FLOW_GOES_ON)
        make_ready(c);
}

/* When handshakes have less than their account in use. */
static uint64_t next_handshake_ns(const struct moe_relay *r)
{
    return r->handshakes_ns > HANDSHAKES_ACCOUNT_NS ? r->handshakes_ns - HANDSHAKES_ACCOUNT_NS : 0;
}

/* One step of the handshake that has waited longest, if it is time for one. */
static void run_handshake(struct moe_relay *r)
{
    struct moe_connection *c = TAILQ_FIRST(&r->handshakes);
    if (c == NULL)
        return;
    const uint64_t began = moe_clock_ns();
    if (began < next_handshake_ns(r))
        return;
    TAILQ_REMOVE(&r->handshakes, c, ready_link);
    c->ready = false;
    enum moe_handshake_outcome outcome = moe_handshake_step(c);
    const uint64_t start = r->handshakes_ns > began ? r->handshakes_ns : began;
    r->handshakes_ns = start + HANDSHAKES_SHARE * (moe_clock_ns() - began);
    if (outcome == MOE_HANDSHAKE_FAILED) {
        close_now(c, c->reason);
    } else if (outcome == MOE_HANDSHAKE_DONE) {
        c->state = MOE_CONNECTION_NEW;
        c->client.readable = true; /* the session may have read on */
        make_ready(c);
    }
}

/* One turn for each connection that is ready now. */
static void run_ready(struct moe_relay *r)
{
    struct moe_connections now = TAILQ_HEAD_INITIALIZER(now);
    struct moe_connection *c;
    TAILQ_CONCAT(&now, &r->ready, ready_link);
    while ((c = TAILQ_FIRST(&now)) != NULL) {
        TAILQ_REMOVE(&now, c, ready_link);
        c->ready = false;
        if (c->state == MOE_CONNECTION_NEW)
            read_preface(c);
        if (!c->gone && c->state != MOE_CONNECTION_NEW)
            relay_bytes(c);
        if (!c->gone && c->server.fd >= 0 &&
            (!ask_for_room(c, &c->client, MOE_EVENT_CLIENT) ||
             !ask_for_room(c, &c->server, MOE_EVENT_SERVER)))
            close_now(c, MOE_CLOSE_DESCRIPTORS);
    }
}

/* ------------------------------------------------------------------ time limits */

/* True while `deadline_ns` counts. */
static bool has_deadline(const struct moe_connection *c)
{
    return c->state != MOE_CONNECTION_OPEN &&
           (c->state != MOE_CONNECTION_PARKED || !c->frames.settled);
}

/* True while a limit of `c` runs. */
static bool check_time(struct moe_connection *c, uint64_t now)
{
    const struct moe_listener_config *config = &c->relay->listener->config;
    const uint64_t window = config->silence_ms * MOE_NS_PER_MS;
    if (has_deadline(c) && now >= c->deadline_ns) {
        if (c->state == MOE_CONNECTION_HANDSHAKE)
            moe_handshake_late(c);
        close_now(c, c->state == MOE_CONNECTION_HANDSHAKE ? MOE_CLOSE_HANDSHAKE
                     : c->state == MOE_CONNECTION_ENDING  ? c->reason
                                                          : MOE_CLOSE_PREFACE);
        return true;
    }
    if (c->owes_ns != 0 && now >= c->owes_ns + config->preface_ms * MOE_NS_PER_MS) {
        close_now(c, MOE_CLOSE_PREFACE);
        return true;
    }
    if (c->stalled_ns != 0 && now >= c->stalled_ns + window) {
        if (c->down.moved - c->stalled_moved < LEAST_PER_S * window / MOE_NS_PER_S) {
            close_now(c, MOE_CLOSE_UNREAD);
            return true;
        }
        c->stalled_ns = now;
        c->stalled_moved = c->down.moved;
    }
    return has_deadline(c) || c->stalled_ns != 0 || c->owes_ns != 0;
}

static void check_times(struct moe_relay *r, uint64_t now)
{
    struct moe_connection *c, *next;
    if (TAILQ_EMPTY(&r->timed) || now < r->next_check_ns)
        return;
    r->next_check_ns = now + CHECK_EVERY_NS;
    for (c = TAILQ_FIRST(&r->timed); c != NULL; c = next) {
        next = TAILQ_NEXT(c, timed_link);
        if (check_time(c, now))
            continue;
        TAILQ_REMOVE(&r->timed, c, timed_link);
        c->timed = false;
    }
}

/* For spin_ns after the last event of an open connection the thread polls: the rest of a message,
 * or an answer, is expected soon, and each wake-up costs its latency once more. */
static bool is_spinning(const struct moe_relay *r)
{
    return r->listener->config.spin_ns > 0 && moe_clock_ns() < r->spin_until;
}

static int sleep_ms(const struct moe_relay *r)
{
    uint64_t until = TAILQ_EMPTY(&r->timed) ? MOE_NEVER : r->next_check_ns;
    if (r == r->listener->relays)
        until = moe_earlier(until, r->listener->retry_ns);
    if (!TAILQ_EMPTY(&r->ready))
        return 0;
    if (!TAILQ_EMPTY(&r->handshakes))
        until = moe_earlier(until, next_handshake_ns(r));
    if (until == MOE_NEVER)
        return -1;
    uint64_t now = moe_clock_ns();
    return until <= now ? 0 : (int)((until - now) / MOE_NS_PER_MS) + 1;
}

/* ------------------------------------------------------------------ thread */

void moe_relay_wake(struct moe_relay *r)
{
    const uint64_t one = 1;
    /* Fails only when the counter is full: then the relay wakes anyway. */
    ssize_t n = write(r->wake, &one, sizeof one);
    (void)n;
}

void moe_relay_doom(struct moe_connection *c)
{
    if (!c->doomed)
        TAILQ_INSERT_TAIL(&c->relay->doomed, c, doomed_link);
    c->doomed = true;
}

/* Moves arrivals to `connections` and to `started`. True if the listener closes; then all are
 * doomed. */
static bool take_arrivals(struct moe_relay *r, struct moe_connections *started)
{
    struct moe_listener *l = r->listener;
    struct moe_connection *c;
    moe_mutex_lock(&l->lock);
    const bool closing = l->closing;
    while ((c = TAILQ_FIRST(&r->arrivals)) != NULL) {
        TAILQ_REMOVE(&r->arrivals, c, link);
        TAILQ_INSERT_TAIL(&r->connections, c, link);
        TAILQ_INSERT_TAIL(started, c, ready_link); /* it is not ready yet */
    }
    if (closing)
        TAILQ_FOREACH(c, &r->connections, link)
    moe_relay_doom(c);
    moe_mutex_unlock(&l->lock);
    return closing;
}

/* Ends one that is doomed. False if none is. */
static bool end_doomed(struct moe_relay *r, bool closing)
{
    moe_mutex_lock(&r->listener->lock);
    struct moe_connection *c = TAILQ_FIRST(&r->doomed);
    const bool replaced = c != NULL && c->replaced, flooded = c != NULL && c->flooded;
    if (c != NULL) {
        TAILQ_REMOVE(&r->doomed, c, doomed_link);
        c->doomed = false;
    }
    moe_mutex_unlock(&r->listener->lock);
    if (replaced)
        close_now(c, MOE_CLOSE_LIMIT);
    else if (flooded)
        refuse_streams(c);
    else if (c != NULL)
        end(c, closing ? MOE_CLOSE_SHUTDOWN : MOE_CLOSE_IDENTITY);
    return c != NULL;
}

static void on_wake(struct moe_relay *r)
{
    struct moe_connections started = TAILQ_HEAD_INITIALIZER(started);
    struct moe_connection *c;
    uint64_t count;
    ssize_t n = read(r->wake, &count, sizeof count);
    (void)n; /* spurious wakes do no harm */
    const bool closing = take_arrivals(r, &started);
    if (closing && r == r->listener->relays)
        moe_accept_stop(r->listener);
    TAILQ_FOREACH(c, &started, ready_link)
    arrive(c);
    while (end_doomed(r, closing))
        ;
}

static void on_event(struct moe_relay *r, const struct epoll_event *event)
{
    const uint64_t kinds = MOE_EVENT_CLIENT | MOE_EVENT_SERVER | MOE_EVENT_LISTEN;
    void *object = (void *)(uintptr_t)(event->data.u64 & ~kinds);
    const uint64_t kind = event->data.u64 & kinds;
    if (object == NULL) {
        on_wake(r);
        return;
    }
    if (kind == MOE_EVENT_LISTEN) {
        moe_accept_ready(r->listener, object);
        return;
    }
    struct moe_connection *c = object;
    struct moe_flow_end *e = kind == MOE_EVENT_CLIENT ? &c->client : &c->server;
    const uint32_t over = EPOLLRDHUP | EPOLLHUP | EPOLLERR;
    if (c->state == MOE_CONNECTION_OPEN) /* strangers keep no thread busy */
        r->spin_until = moe_clock_ns() + r->listener->config.spin_ns;
    e->readable |= (event->events & (EPOLLIN | over)) != 0;
    e->writable |= (event->events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0;
    e->hung_up |= (event->events & over) != 0;
    if (e->read_needs_room && e->writable) {
        e->read_needs_room = false;
        e->readable = true;
    }
    make_ready(c);
}

static bool is_finished(struct moe_relay *r)
{
    moe_mutex_lock(&r->listener->lock);
    bool yes = r->listener->closing && TAILQ_EMPTY(&r->arrivals) && TAILQ_EMPTY(&r->connections);
    moe_mutex_unlock(&r->listener->lock);
    return yes;
}

static void *relay_main(void *arg)
{
    struct moe_relay *r = arg;
    struct epoll_event events[EVENTS];
    if (r == r->listener->relays)
        moe_accept_watch(r->listener);
    while (!is_finished(r)) {
        const bool spinning = is_spinning(r);
        int n = epoll_wait(r->epoll, events, EVENTS, spinning ? 0 : sleep_ms(r));
        if (n == 0 && spinning && TAILQ_EMPTY(&r->ready) && TAILQ_EMPTY(&r->handshakes))
            sched_yield(); /* threads with work have priority */
        for (int i = 0; i < n; i++)
            on_event(r, &events[i]);
        run_ready(r);
        run_handshake(r);
        uint64_t now = moe_clock_ns();
        check_times(r, now);
        if (r == r->listener->relays)
            moe_accept_retry(r->listener, now);
        free_gone(r);
    }
    return NULL;
}

/* ------------------------------------------------------------------ life */

static void relay_free(struct moe_relay *r)
{
    moe_flow_pool_destroy(&r->pool);
    if (r->epoll >= 0)
        close(r->epoll);
    if (r->wake >= 0)
        close(r->wake);
}

struct moe_status moe_relay_start(struct moe_listener *l, struct moe_relay *r)
{
    struct epoll_event event = {.events = EPOLLIN};
    r->listener = l;
    SLIST_INIT(&r->pool.spare);
    TAILQ_INIT(&r->ready);
    TAILQ_INIT(&r->handshakes);
    TAILQ_INIT(&r->timed);
    TAILQ_INIT(&r->gone);
    TAILQ_INIT(&r->arrivals);
    TAILQ_INIT(&r->connections);
    TAILQ_INIT(&r->doomed);
    r->epoll = epoll_create1(EPOLL_CLOEXEC);
    r->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    int rc = 0;
    if (r->epoll < 0 || r->wake < 0 || epoll_ctl(r->epoll, EPOLL_CTL_ADD, r->wake, &event) != 0)
        rc = errno;
    if (rc == 0)
        rc = moe_thread_create(&r->thread, "moe-relay", relay_main, r);
    if (rc == 0)
        return moe_ok();
    relay_free(r);
    return moe_thread_failure("moe-relay", rc);
}

void moe_relay_stop(struct moe_relay *r)
{
    pthread_join(r->thread, NULL);
    relay_free(r);
}
