/* SPDX-License-Identifier: Apache-2.0 */
/* Links to the slots of other hosts, and the thread that drives them; see network.h.
 *
 * As with sockets (peers.c), slot s connects to all lower slots and accepts all higher ones. Both
 * send a HELLO with the other's secret. A link that breaks means a lost slot, unless the slot said
 * goodbye before. */
#include "cpu/network/network_state.h"

#include "base/secret.h"
#include "base/thread.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

enum {
    SPINS = 64,       /* empty looks at the network before the thread sleeps */
    SLEEP_MS = 1000,  /* a backstop: every event wakes the thread */
    CONNECT_MS = 10,  /* the same while connecting, between looks at the clock */
    GOODBYE_MS = 500, /* how long a leaving slot waits for farewells */
    HELPED_MS = 1,    /* so long after a waiting thread's last help, the network thread goes on */
    OWN_SEND_BYTES = 64 << 10, /* larger messages are left to the network thread */
};

static uint64_t bit(uint32_t slot)
{
    return UINT64_C(1) << slot;
}

bool moe_cpu_network_built(void)
{
    return true;
}

/* ------------------------------------------------------------------------ sending */

static void transmit(struct moe_cpu_network *n, struct moe_cpu_message *m)
{
    struct moe_cpu_line *line = &n->line[m->slot];
    if (line->link == NULL || line->broken) {
        moe_cpu_message_drop(m);
        return;
    }
    if (m->head.kind != MOE_CPU_HELLO)
        m->head.number = ++line->sent;
    moe_ucx_send(n->ucx, line->link, &m->send);
}

/* Without memory the message is not sent: a peer that waits for it then notices the closed link. */
static void send_own(struct moe_cpu_network *n, uint32_t slot, enum moe_cpu_message_kind kind,
                     const void *body, size_t bytes)
{
    struct moe_cpu_message *m = moe_cpu_message_own(n, slot, kind);
    if (m == NULL)
        return;
    if (bytes > 0)
        memcpy(m->body, body, bytes);
    m->used = bytes;
    moe_cpu_network_send(n, m);
}

static bool transmit_queue(struct moe_cpu_network *n)
{
    struct moe_cpu_message *m = moe_cpu_message_queue(n);
    bool any = m != NULL;
    while (m != NULL) {
        struct moe_cpu_message *next = m->next;
        transmit(n, m);
        m = next;
    }
    return any;
}

static void wake_thread(struct moe_cpu_network *n)
{
    const uint64_t one = 1;
    /* A failed write is one to a full counter, which is readable anyway. */
    if (__atomic_load_n(&n->asleep, __ATOMIC_SEQ_CST) &&
        write(n->wake_fd, &one, sizeof one) != (ssize_t)sizeof one)
        return;
}

/* The calling thread sends a small message itself, which saves waking the network thread. If UCX is
 * taken, its owner or the network thread sends: rest() looks at the queue before it sleeps. */
void moe_cpu_network_send(struct moe_cpu_network *n, struct moe_cpu_message *m)
{
    bool small = m->used <= OWN_SEND_BYTES;
    moe_cpu_message_enqueue(m);
    if (small && moe_mutex_try_lock(&n->drive)) {
        (void)transmit_queue(n);
        moe_mutex_unlock(&n->drive);
        return;
    }
    wake_thread(n);
}

static uint64_t peers_of(const struct moe_cpu_network *n)
{
    return __atomic_load_n(&n->peers, __ATOMIC_RELAXED);
}

void moe_cpu_network_notify(struct moe_cpu_network *n, uint64_t epoch, uint64_t lost)
{
    const struct moe_cpu_notice notice = {epoch, lost};
    const uint64_t peers = peers_of(n);
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if (peers & bit(s))
            send_own(n, s, MOE_CPU_NOTICE, &notice, sizeof notice);
}

/* ---------------------------------------------------------------------- receiving */

static void part(struct moe_cpu_network *n, uint32_t slot)
{
    moe_mutex_lock(&n->lock);
    n->parted |= bit(slot);
    pthread_cond_broadcast(&n->freed);
    moe_mutex_unlock(&n->lock);
}

/* The line fails: its slot is lost, unless it has left. The link is closed outside callbacks. */
static void break_line(struct moe_cpu_network *n, uint32_t slot)
{
    struct moe_cpu_line *line = &n->line[slot];
    if (line->broken)
        return;
    line->broken = true;
    part(n, slot);
    if (line->verified && !line->left)
        n->config.closed(n->config.ctx, slot);
}

static void send_hello(struct moe_cpu_network *n, uint32_t slot)
{
    send_own(n, slot, MOE_CPU_HELLO, n->endpoints[slot].secret, sizeof n->endpoint.secret);
}

/* The first message of a process that connected; or the answer of one that this slot called. */
static void take_hello(struct moe_cpu_network *n, moe_ucx_link from,
                       const struct moe_cpu_message_head *head, const void *body, size_t bytes)
{
    uint32_t slot = head->slot;
    if (head->kind != MOE_CPU_HELLO || slot >= MOE_MAX_SLOTS || !(peers_of(n) & bit(slot)) ||
        head->epoch != n->config.epoch || bytes != sizeof n->endpoint.secret ||
        !moe_secret_equal(body, n->endpoint.secret, bytes))
        return;
    struct moe_cpu_line *line = &n->line[slot];
    if (slot < n->config.slot) {
        line->verified = line->link == from;
        return;
    }
    for (uint32_t i = 0; i < MOE_CPU_MAX_STRANGERS && line->link == NULL; i++) {
        if (n->stranger[i] != from)
            continue;
        n->stranger[i] = NULL;
        line->link = from;
        line->verified = true;
        send_hello(n, slot);
    }
}

static void take_notice(struct moe_cpu_network *n, uint32_t slot, const void *body, size_t bytes)
{
    struct moe_cpu_notice notice;
    if (bytes != sizeof notice)
        return;
    memcpy(&notice, body, sizeof notice);
    n->config.noticed(n->config.ctx, slot, notice.epoch, notice.lost);
}

static void take_message(struct moe_cpu_network *n, uint32_t slot,
                         const struct moe_cpu_message_head *head, const void *body, size_t bytes)
{
    struct moe_cpu_line *line = &n->line[slot];
    if (head->slot != slot || head->epoch != n->config.epoch || head->number != ++line->received) {
        break_line(n, slot);
        return;
    }
    switch ((enum moe_cpu_message_kind)head->kind) {
    case MOE_CPU_STORES:
        if (!moe_cpu_message_carry_out(n, body, bytes))
            break_line(n, slot);
        n->config.stored(n->config.ctx);
        break;
    case MOE_CPU_NOTICE: take_notice(n, slot, body, bytes); break;
    case MOE_CPU_GOODBYE:
        line->left = true;
        n->config.left(n->config.ctx, slot);
        send_own(n, slot, MOE_CPU_FAREWELL, NULL, 0);
        break;
    case MOE_CPU_FAREWELL: part(n, slot); break;
    case MOE_CPU_HELLO: break_line(n, slot); break;
    default: break_line(n, slot); break;
    }
}

/* MOE_MAX_SLOTS if the link is no slot's. */
static uint32_t slot_of(const struct moe_cpu_network *n, moe_ucx_link link)
{
    uint32_t s = 0;
    while (s < MOE_MAX_SLOTS && n->line[s].link != link)
        s++;
    return s;
}

static void on_message(void *ctx, moe_ucx_link from, const void *head, size_t head_bytes,
                       const void *data, size_t bytes)
{
    struct moe_cpu_network *n = ctx;
    struct moe_cpu_message_head h;
    uint32_t slot = slot_of(n, from);
    if (head_bytes != sizeof h)
        return;
    memcpy(&h, head, sizeof h);
    if (slot < MOE_MAX_SLOTS && n->line[slot].verified)
        take_message(n, slot, &h, data, bytes);
    else
        take_hello(n, from, &h, data, bytes);
}

static bool on_connected(void *ctx, moe_ucx_link link)
{
    struct moe_cpu_network *n = ctx;
    for (uint32_t i = 0; i < MOE_CPU_MAX_STRANGERS; i++)
        if (n->stranger[i] == NULL) {
            n->stranger[i] = link;
            n->stranger_broken[i] = false;
            return true;
        }
    return false;
}

static void on_broken(void *ctx, moe_ucx_link link, const char *why)
{
    struct moe_cpu_network *n = ctx;
    uint32_t slot = slot_of(n, link);
    if (slot < MOE_MAX_SLOTS) {
        n->line[slot].why = why;
        break_line(n, slot);
    }
    for (uint32_t i = 0; i < MOE_CPU_MAX_STRANGERS; i++)
        if (n->stranger[i] == link)
            n->stranger_broken[i] = true;
}

/* Outside callbacks: closes links that have failed; with `strangers` all that sent no hello. */
static void close_links(struct moe_cpu_network *n, bool strangers)
{
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        moe_ucx_link link = n->line[s].link;
        if (link == NULL || !n->line[s].broken)
            continue;
        n->line[s].link = NULL;
        moe_ucx_hang_up(n->ucx, link);
    }
    for (uint32_t i = 0; i < MOE_CPU_MAX_STRANGERS; i++) {
        moe_ucx_link link = n->stranger[i];
        if (link == NULL || !(strangers || n->stranger_broken[i]))
            continue;
        n->stranger[i] = NULL;
        moe_ucx_hang_up(n->ucx, link);
    }
}

/* ------------------------------------------------------------------------- thread */

/* True if there was something to do. */
static bool work(struct moe_cpu_network *n)
{
    moe_mutex_lock(&n->drive);
    bool sent = transmit_queue(n);
    bool progressed = moe_ucx_progress(n->ucx);
    close_links(n, false);
    moe_mutex_unlock(&n->drive);
    return sent || progressed;
}

/* Sleeps until there is something to do, a sender or helper wakes the thread, or `limit_ms` has
 * passed. While a waiting thread drives UCX, events of the network do not wake this one. */
static void sleep_until_event(struct moe_cpu_network *n, int limit_ms)
{
    struct pollfd set[] = {{.fd = n->wake_fd, .events = POLLIN},
                           {.fd = moe_ucx_events(n->ucx), .events = POLLIN}};
    uint64_t helped = __atomic_load_n(&n->helped_ns, __ATOMIC_ACQUIRE);
    if (helped != 0 && moe_clock_ns() < helped + HELPED_MS * MOE_NS_PER_MS) {
        (void)poll(set, 1, HELPED_MS);
        return;
    }
    moe_mutex_lock(&n->drive);
    bool armed = moe_ucx_arm(n->ucx);
    moe_mutex_unlock(&n->drive);
    if (armed)
        (void)poll(set, 2, limit_ms);
}

static void rest(struct moe_cpu_network *n, int limit_ms)
{
    __atomic_store_n(&n->asleep, true, __ATOMIC_SEQ_CST);
    moe_mutex_lock(&n->lock);
    bool idle = n->first == NULL && !n->stop;
    moe_mutex_unlock(&n->lock);
    if (idle)
        sleep_until_event(n, limit_ms);
    __atomic_store_n(&n->asleep, false, __ATOMIC_SEQ_CST);
    uint64_t count;
    while (read(n->wake_fd, &count, sizeof count) > 0)
        continue;
}

void moe_cpu_network_help(struct moe_cpu_network *n)
{
    if (!moe_mutex_try_lock(&n->drive))
        return;
    __atomic_store_n(&n->helped_ns, moe_clock_ns(), __ATOMIC_RELEASE);
    (void)transmit_queue(n);
    (void)moe_ucx_progress(n->ucx);
    moe_mutex_unlock(&n->drive);
}

void moe_cpu_network_stop_helping(struct moe_cpu_network *n)
{
    if (__atomic_exchange_n(&n->helped_ns, 0, __ATOMIC_SEQ_CST) != 0)
        wake_thread(n);
}

static void *run_network(void *arg)
{
    struct moe_cpu_network *n = arg;
    uint32_t idle = 0;
    for (;;) {
        if (work(n)) {
            idle = 0;
            continue;
        }
        moe_mutex_lock(&n->lock);
        bool stop = n->stop;
        moe_mutex_unlock(&n->lock);
        if (stop)
            return NULL;
        if (++idle > SPINS)
            rest(n, SLEEP_MS);
    }
}

/* --------------------------------------------------------------- open, connect, close */

struct moe_status moe_cpu_network_open(const struct moe_cpu_network_config *config,
                                       struct moe_cpu_network **out,
                                       struct moe_cpu_network_endpoint *endpoint)
{
    struct moe_cpu_network *n = calloc(1, sizeof *n);
    if (n == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session's network");
    n->config = *config;
    moe_mutex_init(&n->drive);
    moe_mutex_init(&n->lock);
    moe_wait_init(&n->freed);
    n->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    const struct moe_ucx_callbacks callbacks = {
        .message = on_message, .connected = on_connected, .broken = on_broken, .ctx = n};
    uint16_t port = 0;
    struct moe_status st = moe_ok();
    size_t length = strlen(config->address);
    if (n->wake_fd < 0 || length >= sizeof n->endpoint.address ||
        getrandom(n->endpoint.secret, sizeof n->endpoint.secret, 0) !=
            (ssize_t)sizeof n->endpoint.secret)
        st = moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "cannot prepare a session's network");
    if (!moe_failed(&st))
        st = moe_ucx_open(config->address, &callbacks, &n->ucx, &port);
    if (moe_failed(&st)) {
        moe_cpu_network_close(n);
        return st;
    }
    memcpy(n->endpoint.address, config->address, length + 1);
    n->endpoint.port = port;
    n->config.address = n->endpoint.address;
    *endpoint = n->endpoint;
    *out = n;
    return moe_ok();
}

static struct moe_status unreachable(const struct moe_cpu_network *n, uint32_t slot,
                                     const char *what)
{
    const struct moe_cpu_network_endpoint *e = &n->endpoints[slot];
    const char *why = n->line[slot].why;
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                     "slot %u %s over the network (%.47s port %u): %s", slot, what, e->address,
                     e->port, why != NULL ? why : "no answer from that address");
}

static struct moe_status call_lower_slots(struct moe_cpu_network *n)
{
    for (uint32_t s = 0; s < n->config.slot; s++) {
        if (!(n->peers & bit(s)))
            continue;
        const struct moe_cpu_network_endpoint *e = &n->endpoints[s];
        if (memchr(e->address, 0, sizeof e->address) == NULL || e->port > UINT16_MAX)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MALFORMED,
                             "slot %u has no network address", s);
        MOE_TRY(moe_ucx_dial(n->ucx, e->address, (uint16_t)e->port, &n->line[s].link));
        send_hello(n, s);
    }
    return moe_ok();
}

static struct moe_status await_all(struct moe_cpu_network *n, uint64_t deadline_ns)
{
    for (;;) {
        uint32_t missing = MOE_MAX_SLOTS;
        for (uint32_t s = MOE_MAX_SLOTS; s-- > 0;)
            if ((n->peers & bit(s)) && !n->line[s].verified)
                missing = s;
        if (missing == MOE_MAX_SLOTS)
            return moe_ok();
        for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
            if (n->line[s].broken && !n->line[s].verified) /* else it has joined, and left */
                return unreachable(n, s, "cannot be reached");
        if (n->config.ended(n->config.ctx))
            return moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "the session was aborted");
        if (moe_clock_ns() >= deadline_ns)
            return unreachable(n, missing, "does not answer");
        if (!work(n))
            rest(n, CONNECT_MS);
    }
}

struct moe_status moe_cpu_network_connect(struct moe_cpu_network *n, uint64_t peers,
                                          const struct moe_cpu_network_endpoint *endpoints,
                                          uint64_t deadline_ns)
{
    n->peers = peers;
    n->endpoints = endpoints;
    struct moe_status st = call_lower_slots(n);
    if (!moe_failed(&st))
        st = await_all(n, deadline_ns);
    n->endpoints = NULL;
    moe_ucx_stop_listening(n->ucx);
    close_links(n, true);
    MOE_TRY(st);
    int rc = moe_thread_create(&n->thread, "moe-cpu-net", run_network, n);
    n->running = rc == 0;
    return rc == 0 ? moe_ok() : moe_thread_failure("moe-cpu-net", rc);
}

/* A slot that has stopped would hold its messages for ever, and others would wait for free ones. */
void moe_cpu_network_keep(struct moe_cpu_network *n, uint64_t live)
{
    uint64_t gone = peers_of(n) & ~live;
    __atomic_store_n(&n->peers, peers_of(n) & live, __ATOMIC_RELAXED);
    moe_mutex_lock(&n->drive);
    (void)transmit_queue(n);
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if (gone & bit(s))
            n->line[s].broken = true;
    close_links(n, false);
    moe_mutex_unlock(&n->drive);
}

static void part_from_all(struct moe_cpu_network *n)
{
    const uint64_t peers = peers_of(n);
    uint64_t deadline = moe_clock_ns() + GOODBYE_MS * MOE_NS_PER_MS;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if (peers & bit(s))
            send_own(n, s, MOE_CPU_GOODBYE, NULL, 0);
    moe_mutex_lock(&n->lock);
    while ((n->parted & peers) != peers && moe_wait_until(&n->freed, &n->lock, deadline))
        continue;
    n->stop = true;
    moe_mutex_unlock(&n->lock);
    wake_thread(n);
}

void moe_cpu_network_close(struct moe_cpu_network *n)
{
    if (n == NULL)
        return;
    if (n->running) {
        part_from_all(n);
        pthread_join(n->thread, NULL);
    }
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        n->line[s].broken = true;
    if (n->ucx != NULL)
        close_links(n, true);
    moe_ucx_close(n->ucx);
    moe_cpu_message_free_all(n);
    if (n->wake_fd >= 0)
        close(n->wake_fd);
    moe_mutex_not_shared(&n->lock);
    pthread_cond_destroy(&n->freed);
    moe_mutex_destroy(&n->lock);
    moe_mutex_destroy(&n->drive);
    free(n);
}
