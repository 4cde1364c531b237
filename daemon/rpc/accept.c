/* SPDX-License-Identifier: Apache-2.0 */
/* accept4 for the core's listeners: survives a lack of file descriptors, and refuses connections to
 * a closed listener gate.
 *
 * The core stops listening for good when accept4 fails with an error other than EAGAIN or EINTR. A
 * process that runs out of descriptors once would then never accept again. The linker therefore
 * puts this accept4 in front of the system's. It keeps one descriptor in reserve. When no other is
 * left, it accepts each waiting connection with the reserve and closes it at once, so that the
 * client gets an error and may retry.
 *
 * Another thread may take the reserve while accept4 reuses it. The core then does not learn of the
 * waiting connections, as it waits for new events of the socket. A watcher thread polls for a free
 * descriptor, restores the reserve and refuses these connections. The thread exists only while
 * connections wait.
 *
 * The core cannot stop listening without shutting down. A server that shuts down therefore closes
 * its listener gate first, and this accept4 refuses connections to that port. */
#include "base/clock.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"
#include "daemon/log.h"
#include "rpc/serving.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WARN_EVERY_NS (30 * MOE_NS_PER_S)
#define POLL_EVERY_NS (20 * MOE_NS_PER_MS)

enum {
    REFUSED_MAX = 64, /* in one hold of the lock */
    STALLED_MAX = 8,  /* further listeners wait for their next connection */
};

/* A listener with waiting connections that could not be accepted. Its descriptor number may belong
 * to another socket later; the address tells them apart. */
struct stalled {
    int fd;
    socklen_t length;
    struct sockaddr_storage address;
};

static struct moe_mutex lock = MOE_MUTEX_INITIALIZER; /* accept_lock in CONCURRENCY.md */
static atomic_int reserve = -1;                       /* written under the lock only */
MOE_GUARDED_BY(lock) static uint64_t warned_ns;       /* 0 = never */
MOE_GUARDED_BY(lock) static struct stalled stalled[STALLED_MAX];
static atomic_uint stalled_count;          /* written under the lock only */
MOE_GUARDED_BY(lock) static bool watching; /* the thread exists */
MOE_GUARDED_BY(lock) static struct moe_rpc_listener_gate *closed;
static atomic_uint closed_count; /* written under the lock only */

static int accept_one(int fd, struct sockaddr *address, socklen_t *length, int flags)
{
    return (int)syscall(SYS_accept4, fd, address, length, flags);
}

static void refill(void) MOE_REQUIRES(lock)
{
    if (reserve < 0)
        reserve = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void moe_rpc_reserve_descriptor(void)
{
    moe_mutex_lock(&lock);
    refill();
    moe_mutex_unlock(&lock);
}

static void warn_full(int error) MOE_REQUIRES(lock)
{
    uint64_t now = moe_clock_ns();
    if (warned_ns == 0 || now >= warned_ns + WARN_EVERY_NS) {
        warned_ns = now;
        moe_log_warn("new connections are closed: %s",
                     error == ENFILE ? "the system is out of file descriptors"
                                     : "this process is out of file descriptors");
    }
}

/* Accepts and closes waiting connections. Returns the errno for the core: EAGAIN when none is left
 * or none can be accepted; EINTR when more may wait, on which the core calls again at once. */
static int refuse_waiting(int fd) MOE_REQUIRES(lock)
{
    refill();
    for (int i = 0; i < REFUSED_MAX && reserve >= 0; i++) {
        close(reserve);
        int taken = accept_one(fd, NULL, NULL, SOCK_CLOEXEC);
        if (taken >= 0)
            close(taken);
        reserve = -1;
        refill();
        if (taken < 0)
            return EAGAIN;
    }
    return reserve >= 0 ? EINTR : EAGAIN;
}

/* ---------------------------------------- connections that wait for the reserve */

static struct stalled *find_stalled(int fd) MOE_REQUIRES(lock)
{
    for (unsigned i = 0; i < stalled_count; i++)
        if (stalled[i].fd == fd)
            return &stalled[i];
    return NULL;
}

static void forget_stalled(struct stalled *l) MOE_REQUIRES(lock)
{
    if (l != NULL)
        *l = stalled[--stalled_count];
}

static bool get_address(int fd, struct stalled *out)
{
    *out = (struct stalled){.fd = fd, .length = sizeof out->address};
    return getsockname(fd, (struct sockaddr *)&out->address, &out->length) == 0 &&
           out->length <= sizeof out->address;
}

static bool still_listens(const struct stalled *l)
{
    struct stalled now;
    int listens = 0;
    socklen_t length = sizeof listens;
    return get_address(l->fd, &now) && now.length == l->length &&
           memcmp(&now.address, &l->address, l->length) == 0 &&
           getsockopt(l->fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens != 0;
}

/* Refuses all waiting connections for as long as the reserve lasts. */
static void refuse_stalled(void) MOE_REQUIRES(lock)
{
    refill();
    while (reserve >= 0 && stalled_count > 0) {
        struct stalled *l = &stalled[stalled_count - 1];
        if (!still_listens(l) || refuse_waiting(l->fd) == EAGAIN) {
            if (reserve < 0) /* another thread took it again */
                return;
            forget_stalled(l);
        }
    }
}

static void *watch_stalled(void *unused)
{
    (void)unused;
    bool done = false;
    while (!done) {
        moe_sleep_until(moe_clock_ns() + POLL_EVERY_NS);
        moe_mutex_lock(&lock);
        refuse_stalled();
        done = stalled_count == 0;
        watching = !done;
        moe_mutex_unlock(&lock);
    }
    return NULL;
}

/* Without memory for a thread, connections wait until a later one arrives. */
static void add_stalled(int fd) MOE_REQUIRES(lock)
{
    struct stalled l;
    if (find_stalled(fd) == NULL && stalled_count < STALLED_MAX && get_address(fd, &l))
        stalled[stalled_count++] = l;
    pthread_t thread;
    if (watching || stalled_count == 0 ||
        moe_thread_create(&thread, "moe-rpc-accept", watch_stalled, NULL) != 0)
        return;
    watching = true;
    pthread_detach(thread);
}

/* The core itself accepts from this listener until no connection is left. */
static void note_accepted(int fd)
{
    moe_mutex_lock(&lock);
    refill();
    forget_stalled(find_stalled(fd));
    moe_mutex_unlock(&lock);
}

/* ----------------------------------------------------------------------- listener gates */

void moe_rpc_listener_gate_close(struct moe_rpc_listener_gate *gate, uint16_t port)
{
    moe_mutex_lock(&lock);
    gate->port = port;
    gate->next = closed;
    closed = gate;
    closed_count++;
    moe_mutex_unlock(&lock);
}

void moe_rpc_listener_gate_remove(struct moe_rpc_listener_gate *gate)
{
    moe_mutex_lock(&lock);
    struct moe_rpc_listener_gate **at = &closed;
    while (*at != gate)
        at = &(*at)->next;
    *at = gate->next;
    closed_count--;
    moe_mutex_unlock(&lock);
}

/* The port of IPv4 and of IPv6 is at the same place. */
static bool is_closed(int fd)
{
    struct sockaddr_in6 at = {0};
    socklen_t length = sizeof at;
    if (getsockname(fd, (struct sockaddr *)&at, &length) != 0 ||
        (at.sin6_family != AF_INET && at.sin6_family != AF_INET6))
        return false;
    moe_mutex_lock(&lock);
    const struct moe_rpc_listener_gate *gate = closed;
    while (gate != NULL && gate->port != ntohs(at.sin6_port))
        gate = gate->next;
    moe_mutex_unlock(&lock);
    return gate != NULL;
}

/* ------------------------------------------------------------------------- accept4 */

/* As the system's, except for closed gates and a lack of descriptors. */
__attribute__((visibility("default"))) int accept4(int fd, struct sockaddr *address,
                                                   socklen_t *length, int flags)
{
    int taken = accept_one(fd, address, length, flags);
    if (taken >= 0 && atomic_load(&closed_count) > 0 && is_closed(fd)) {
        close(taken);
        errno = EINTR; /* there may be more: the core calls again at once */
        return -1;
    }
    if (taken >= 0 && (atomic_load(&reserve) < 0 || atomic_load(&stalled_count) > 0))
        note_accepted(fd);
    if (taken >= 0 || (errno != EMFILE && errno != ENFILE))
        return taken;
    moe_mutex_lock(&lock);
    warn_full(errno);
    int error = refuse_waiting(fd);
    if (reserve < 0)
        add_stalled(fd);
    moe_mutex_unlock(&lock);
    errno = error;
    return -1;
}
