/* SPDX-License-Identifier: Apache-2.0 */
/* Sockets between slots: connecting, watching, leaving; see peers.h.
 *
 * Slot s connects to all lower slots and accepts all higher ones, so each pair connects once. No
 * order of arrival can deadlock, because a slot listens before it publishes its endpoint. */
#include "cpu/exchange/peers.h"

#include "base/clock.h"
#include "base/mutex.h"
#include "base/secret.h"
#include "base/thread.h"
#include "common/masks.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    MAX_PENDING = 2 * MOE_MAX_SLOTS, /* accepted sockets that have not sent a hello */
};

struct moe_cpu_peers {
    uint32_t slot;
    struct moe_mutex lock;
    struct moe_masks masks MOE_GUARDED_BY(lock);
    uint64_t sharing; /* slots of this host; set while connecting */
    struct moe_cpu_endpoint endpoint;
    int listener;          /* -1 once all are connected */
    int fd[MOE_MAX_SLOTS]; /* to each peer; -1 = none */
    int stop;              /* eventfd that ends the watcher, -1 without one */
    bool watching;
    pthread_t watcher;
    void (*changed)(void *ctx);
    void *ctx;
    /* What `masks` says, for threads that wait. Atomic; stored under the lock. */
    uint64_t lost, left;
    int first_lost; /* -1 until a slot is lost */
};

struct hello {
    uint32_t slot;      /* of the sender */
    uint8_t secret[32]; /* of the receiver's endpoint */
};

/* The only message after hello. */
struct notice {
    uint64_t epoch; /* of the sender's mask; 0 = the sender leaves the session in order */
    uint64_t lost;  /* slots that the sender lost in it */
};

static uint64_t bit(uint32_t slot)
{
    return UINT64_C(1) << slot;
}

static struct moe_status os_error(const char *what)
{
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "%s: %s", what, strerror(errno));
}

/* Returns the length of the address: the leading zero byte counts, nothing follows the name. */
static socklen_t abstract_address(const struct moe_cpu_endpoint *endpoint, struct sockaddr_un *out)
{
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(out->sun_path + 1, endpoint->name, sizeof endpoint->name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + sizeof endpoint->name);
}

static struct moe_status make_endpoint(struct moe_cpu_endpoint *endpoint)
{
    static const char digits[] = "0123456789abcdef";
    uint8_t raw[sizeof endpoint->name + sizeof endpoint->secret];
    if (getrandom(raw, sizeof raw, 0) != (ssize_t)sizeof raw)
        return os_error("no random bytes for a session");
    for (size_t i = 0; i < sizeof endpoint->name; i++)
        endpoint->name[i] = digits[raw[i] & 15];
    memcpy(endpoint->secret, raw + sizeof endpoint->name, sizeof endpoint->secret);
    return moe_ok();
}

struct moe_status moe_cpu_peers_listen(uint32_t slot, uint64_t epoch, uint64_t live,
                                       struct moe_cpu_peers **out,
                                       struct moe_cpu_endpoint *endpoint)
{
    struct moe_cpu_peers *p = calloc(1, sizeof *p);
    if (p == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session");
    p->slot = slot;
    moe_mutex_init(&p->lock);
    moe_mutex_lock(&p->lock);
    moe_masks_begin(&p->masks, slot, epoch, live);
    moe_mutex_unlock(&p->lock);
    p->stop = -1;
    p->first_lost = -1;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        p->fd[s] = -1;
    p->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct moe_status st = p->listener < 0 ? os_error("cannot make a socket") : moe_ok();
    if (!moe_failed(&st))
        st = make_endpoint(&p->endpoint);
    struct sockaddr_un address;
    socklen_t length = abstract_address(&p->endpoint, &address);
    if (!moe_failed(&st) && (bind(p->listener, (struct sockaddr *)&address, length) != 0 ||
                             listen(p->listener, MAX_PENDING) != 0))
        st = os_error("cannot listen for the other slots");
    if (moe_failed(&st)) {
        moe_cpu_peers_close(p);
        return st;
    }
    *endpoint = p->endpoint;
    *out = p;
    return moe_ok();
}

/* ------------------------------------------------------------------ connecting */

union descriptor_message {
    struct cmsghdr align;
    char space[CMSG_SPACE(sizeof(int))];
};

static bool send_hello(int to, const struct hello *h, int window_fd)
{
    struct iovec part = {.iov_base = (void *)(uintptr_t)h, .iov_len = sizeof *h};
    union descriptor_message control;
    memset(&control, 0, sizeof control);
    struct msghdr m = {.msg_iov = &part,
                       .msg_iovlen = 1,
                       .msg_control = control.space,
                       .msg_controllen = sizeof control.space};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &window_fd, sizeof window_fd);
    return sendmsg(to, &m, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof *h;
}

/* The descriptor that came with a whole hello, or -1 with nothing left open. */
static int receive_hello(int from, struct hello *h)
{
    struct iovec part = {.iov_base = h, .iov_len = sizeof *h};
    union descriptor_message control;
    struct msghdr m = {.msg_iov = &part,
                       .msg_iovlen = 1,
                       .msg_control = control.space,
                       .msg_controllen = sizeof control.space};
    ssize_t n = recvmsg(from, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    struct cmsghdr *c = n < 0 ? NULL : CMSG_FIRSTHDR(&m);
    if (c == NULL || c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS ||
        c->cmsg_len != CMSG_LEN(sizeof(int)))
        return -1;
    int fd;
    memcpy(&fd, CMSG_DATA(c), sizeof fd);
    if (n == (ssize_t)sizeof *h && !(m.msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
        return fd;
    close(fd);
    return -1;
}

static bool same_user(int fd)
{
    struct ucred who;
    socklen_t length = sizeof who;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 && who.uid == geteuid();
}

/* Only the secret keeps other processes of this user out. */
static bool secret_matches(const struct hello *h, const struct moe_cpu_peers *p)
{
    return moe_secret_equal(h->secret, p->endpoint.secret, sizeof h->secret);
}

static struct hello hello_to(const struct moe_cpu_peers *p, const struct moe_cpu_endpoint *endpoint)
{
    struct hello h = {.slot = p->slot};
    memcpy(h.secret, endpoint->secret, sizeof h.secret);
    return h;
}

static struct moe_status connect_slot(struct moe_cpu_peers *p, uint32_t slot,
                                      const struct moe_cpu_endpoint *endpoint, int window_fd)
{
    struct sockaddr_un address;
    socklen_t length = abstract_address(endpoint, &address);
    struct hello h = hello_to(p, endpoint);
    p->fd[slot] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (p->fd[slot] < 0)
        return os_error("cannot make a socket");
    const char *why = NULL;
    if (connect(p->fd[slot], (struct sockaddr *)&address, length) != 0)
        why = strerror(errno);
    else if (!same_user(p->fd[slot]))
        why = "another user has its socket";
    else if (!send_hello(p->fd[slot], &h, window_fd))
        why = strerror(errno);
    return why == NULL ? moe_ok()
                       : moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                                   "slot %u of this host cannot be reached: %s", slot, why);
}

/* The state of moe_cpu_peers_connect. */
struct connecting {
    struct moe_cpu_peers *peers;
    const struct moe_cpu_endpoint *endpoints;
    int window_fd;
    int *fds;                 /* received windows, by slot */
    int pending[MAX_PENDING]; /* accepted, no hello so far */
    uint32_t pending_count;
};

static void verify_pending(struct connecting *m, uint32_t index)
{
    struct moe_cpu_peers *p = m->peers;
    int fd = m->pending[index];
    m->pending[index] = m->pending[--m->pending_count];
    struct hello h;
    int window = receive_hello(fd, &h);
    bool welcome = window >= 0 && h.slot > p->slot && h.slot < MOE_MAX_SLOTS &&
                   (p->sharing & bit(h.slot)) && p->fd[h.slot] < 0 && secret_matches(&h, p);
    if (welcome) {
        struct hello answer = hello_to(p, &m->endpoints[h.slot]);
        welcome = send_hello(fd, &answer, m->window_fd);
    }
    if (!welcome) {
        if (window >= 0)
            close(window);
        close(fd);
        return;
    }
    p->fd[h.slot] = fd;
    m->fds[h.slot] = window;
}

static void accept_pending(struct connecting *m)
{
    while (m->pending_count < MAX_PENDING) {
        int fd = accept4(m->peers->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            return;
        if (same_user(fd))
            m->pending[m->pending_count++] = fd;
        else
            close(fd);
    }
}

static struct moe_status read_answer(struct connecting *m, uint32_t slot)
{
    struct hello h;
    int window = receive_hello(m->peers->fd[slot], &h);
    if (window < 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                         "slot %u went away while the session formed", slot);
    if (h.slot != slot || !secret_matches(&h, m->peers)) {
        close(window);
        return moe_error(MOE_PERMISSION_DENIED, MOE_REASON_NONE,
                         "slot %u could not prove that it belongs to the session", slot);
    }
    m->fds[slot] = window;
    return moe_ok();
}

/* Waits for events on the sockets and handles them once. */
static struct moe_status handle_events(struct connecting *m, uint64_t missing, uint64_t deadline_ns)
{
    struct pollfd set[1 + MAX_PENDING + MOE_MAX_SLOTS];
    uint32_t from[MOE_MAX_SLOTS], answers = 0;
    struct moe_cpu_peers *p = m->peers;
    uint32_t pending_count = m->pending_count;
    set[0] = (struct pollfd){.fd = p->listener, .events = POLLIN};
    for (uint32_t i = 0; i < pending_count; i++)
        set[1 + i] = (struct pollfd){.fd = m->pending[i], .events = POLLIN};
    for (uint32_t s = 0; s < p->slot; s++)
        if (missing & bit(s)) {
            set[1 + pending_count + answers] = (struct pollfd){.fd = p->fd[s], .events = POLLIN};
            from[answers++] = s;
        }
    uint64_t now = moe_clock_ns();
    if (now >= deadline_ns)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot %d did not join in time",
                         __builtin_ctzll(missing));
    int wait_ms = (int)((deadline_ns - now) / MOE_NS_PER_MS) + 1;
    if (poll(set, 1 + pending_count + answers, wait_ms) < 0)
        return errno == EINTR ? moe_ok() : os_error("cannot wait for the other slots");
    for (uint32_t i = 0; i < answers; i++)
        if (set[1 + pending_count + i].revents)
            MOE_TRY(read_answer(m, from[i]));
    /* From the last: verify_pending moves the last socket into the free place. */
    for (uint32_t i = pending_count; i-- > 0;)
        if (set[1 + i].revents)
            verify_pending(m, i);
    if (set[0].revents)
        accept_pending(m);
    return moe_ok();
}

static uint64_t still_missing(const struct connecting *m)
{
    uint64_t missing = 0;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((m->peers->sharing & bit(s)) && s != m->peers->slot && m->fds[s] < 0)
            missing |= bit(s);
    return missing;
}

void moe_cpu_peers_part(struct moe_cpu_peers *p, uint32_t slot)
{
    p->sharing &= ~bit(slot);
    if (p->fd[slot] >= 0)
        close(p->fd[slot]);
    p->fd[slot] = -1;
}

/* Leaves out the slots of `missing` if the others can do without. */
static struct moe_status leave_out(struct connecting *m, uint64_t missing, bool optional,
                                   struct moe_status why)
{
    for (uint32_t s = 0; optional && s < MOE_MAX_SLOTS; s++)
        if (missing & bit(s))
            moe_cpu_peers_part(m->peers, s);
    return optional ? moe_ok() : why;
}

static struct moe_status connect_all(struct connecting *m, bool optional, uint64_t deadline_ns)
{
    struct moe_cpu_peers *p = m->peers;
    for (uint32_t s = 0; s < p->slot; s++) {
        if (!(p->sharing & bit(s)))
            continue;
        struct moe_status st = connect_slot(p, s, &m->endpoints[s], m->window_fd);
        if (moe_failed(&st))
            MOE_TRY(leave_out(m, bit(s), optional, st));
    }
    for (uint64_t missing; (missing = still_missing(m)) != 0;) {
        struct moe_status st = handle_events(m, missing, deadline_ns);
        if (moe_failed(&st))
            MOE_TRY(leave_out(m, missing, optional, st));
    }
    return moe_ok();
}

struct moe_status moe_cpu_peers_connect(struct moe_cpu_peers *p, uint64_t sharing, bool optional,
                                        const struct moe_cpu_endpoint *endpoints, int window_fd,
                                        uint64_t deadline_ns, int fds[MOE_MAX_SLOTS])
{
    struct connecting m = {.peers = p, .endpoints = endpoints, .window_fd = window_fd, .fds = fds};
    p->sharing = sharing;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        fds[s] = -1;
    struct moe_status st = connect_all(&m, optional, deadline_ns);
    for (uint32_t i = 0; i < m.pending_count; i++)
        close(m.pending[i]);
    close(p->listener);
    p->listener = -1;
    for (uint32_t s = 0; moe_failed(&st) && s < MOE_MAX_SLOTS; s++)
        if (fds[s] >= 0) {
            close(fds[s]);
            fds[s] = -1;
        }
    return st;
}

/* ----------------------------------------------------------------- watching */

/* Shows what has changed to waiting threads. A slot that leaves because it lost another says so
 * first, so who sees `left` sees `lost` too. */
static void publish(struct moe_cpu_peers *p) MOE_REQUIRES(p->lock)
{
    uint64_t lost = moe_masks_lost(&p->masks);
    int first = moe_cpu_peers_first_lost(p);
    if (first < 0 || (lost >> first & 1) == 0)
        first = lost == 0 ? -1 : __builtin_ctzll(lost);
    __atomic_store_n(&p->first_lost, first, __ATOMIC_RELEASE);
    __atomic_store_n(&p->lost, lost, __ATOMIC_RELEASE);
    __atomic_store_n(&p->left, moe_masks_left(&p->masks), __ATOMIC_RELEASE);
}

/* Reads one notice. False when the socket is closed. */
static bool read_notice(struct moe_cpu_peers *p, uint32_t slot)
{
    struct notice v;
    ssize_t n = recv(p->fd[slot], &v, sizeof v, MSG_DONTWAIT);
    if (n < 0 && errno == ECONNRESET) /* reported once, before data: read again */
        n = recv(p->fd[slot], &v, sizeof v, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    bool came = n == (ssize_t)sizeof v;
    moe_mutex_lock(&p->lock);
    if (!came)
        moe_masks_close(&p->masks, slot);
    else if (v.epoch == 0)
        moe_masks_leave(&p->masks, slot);
    else
        moe_masks_notice(&p->masks, slot, v.epoch, v.lost);
    publish(p);
    moe_mutex_unlock(&p->lock);
    return came;
}

static void *watch(void *arg)
{
    struct moe_cpu_peers *p = arg;
    struct pollfd set[1 + MOE_MAX_SLOTS];
    uint32_t from[1 + MOE_MAX_SLOTS], n = 1;
    set[0] = (struct pollfd){.fd = p->stop, .events = POLLIN};
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if (p->fd[s] >= 0) {
            set[n] = (struct pollfd){.fd = p->fd[s], .events = POLLIN};
            from[n++] = s;
        }
    for (;;) {
        if (poll(set, n, -1) < 0)
            continue; /* EINTR; other errors are bad arguments */
        if (set[0].revents)
            return NULL;
        for (uint32_t i = 1; i < n; i++)
            if (set[i].revents && !read_notice(p, from[i]))
                set[i].fd = -1; /* poll skips it from now on */
        p->changed(p->ctx);
    }
}

struct moe_status moe_cpu_peers_watch(struct moe_cpu_peers *p, void (*changed)(void *ctx),
                                      void *ctx)
{
    p->changed = changed;
    p->ctx = ctx;
    p->stop = eventfd(0, EFD_CLOEXEC);
    if (p->stop < 0)
        return os_error("cannot make an event descriptor");
    int rc = moe_thread_create(&p->watcher, "moe-cpu-watch", watch, p);
    p->watching = rc == 0;
    return rc == 0 ? moe_ok() : moe_thread_failure("moe-cpu-watch", rc);
}

uint64_t moe_cpu_peers_lost(const struct moe_cpu_peers *p)
{
    return __atomic_load_n(&p->lost, __ATOMIC_ACQUIRE);
}

uint64_t moe_cpu_peers_left(const struct moe_cpu_peers *p)
{
    return __atomic_load_n(&p->left, __ATOMIC_ACQUIRE);
}

int moe_cpu_peers_first_lost(const struct moe_cpu_peers *p)
{
    return __atomic_load_n(&p->first_lost, __ATOMIC_ACQUIRE);
}

/* Errors do not matter: such a peer is dead, or it will see the socket close. */
static void send_notice(struct moe_cpu_peers *p, uint64_t epoch, uint64_t lost)
{
    struct notice v = {.epoch = epoch, .lost = lost};
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if (p->fd[s] >= 0)
            (void)send(p->fd[s], &v, sizeof v, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Returns the epoch of the mask. */
static uint64_t note_lost(struct moe_cpu_peers *p, uint64_t slots)
{
    moe_mutex_lock(&p->lock);
    moe_masks_report(&p->masks, slots);
    publish(p);
    uint64_t epoch = p->masks.epoch;
    moe_mutex_unlock(&p->lock);
    return epoch;
}

void moe_cpu_peers_note_lost(struct moe_cpu_peers *p, uint64_t slots)
{
    (void)note_lost(p, slots);
}

void moe_cpu_peers_note_closed(struct moe_cpu_peers *p, uint32_t slot)
{
    moe_mutex_lock(&p->lock);
    moe_masks_close(&p->masks, slot);
    publish(p);
    moe_mutex_unlock(&p->lock);
}

void moe_cpu_peers_note_left(struct moe_cpu_peers *p, uint32_t slot)
{
    moe_mutex_lock(&p->lock);
    moe_masks_leave(&p->masks, slot);
    publish(p);
    moe_mutex_unlock(&p->lock);
}

void moe_cpu_peers_note_notice(struct moe_cpu_peers *p, uint32_t slot, uint64_t epoch,
                               uint64_t lost)
{
    moe_mutex_lock(&p->lock);
    moe_masks_notice(&p->masks, slot, epoch, lost);
    publish(p);
    moe_mutex_unlock(&p->lock);
}

void moe_cpu_peers_report_lost(struct moe_cpu_peers *p, uint64_t slots)
{
    send_notice(p, note_lost(p, slots), slots);
}

struct moe_status moe_cpu_peers_mask(struct moe_cpu_peers *p, uint64_t epoch, uint64_t live,
                                     bool idle)
{
    moe_mutex_lock(&p->lock);
    struct moe_status st = moe_masks_check(&p->masks, epoch, live, idle);
    if (!moe_failed(&st)) {
        moe_masks_take(&p->masks, epoch, live);
        publish(p);
    }
    moe_mutex_unlock(&p->lock);
    if (!moe_failed(&st))
        send_notice(p, epoch, 0);
    return st;
}

void moe_cpu_peers_leave(struct moe_cpu_peers *p)
{
    send_notice(p, 0, 0);
}

void moe_cpu_peers_close(struct moe_cpu_peers *p)
{
    if (p == NULL)
        return;
    if (p->watching) {
        moe_cpu_peers_leave(p);
        uint64_t one = 1;
        while (write(p->stop, &one, sizeof one) < 0 && errno == EINTR)
            continue;
        pthread_join(p->watcher, NULL);
    }
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if (p->fd[s] >= 0)
            close(p->fd[s]);
    if (p->listener >= 0)
        close(p->listener);
    if (p->stop >= 0)
        close(p->stop);
    moe_mutex_destroy(&p->lock);
    free(p);
}
