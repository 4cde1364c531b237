/* Taking connections when the process has no descriptor left for one, and taking none any more.
 *
 * The core stops listening for good when `accept4` fails with anything but EAGAIN or EINTR: a
 * process that runs out of descriptors once would be deaf from then on, while all else goes on. So
 * the core of a server calls this accept4, which the linker puts in front of the system's. It keeps
 * a descriptor in reserve; when there is no other, it gives that one to each connection that waits,
 * and closes the connection at once: its client is told so, and may come back. Nothing else is
 * changed.
 *
 * Another thread may snatch the reserve while it changes hands. Who waits then is seen by nobody,
 * as the core waits for news of the socket: so a thread looks for a descriptor now and then, takes
 * the reserve back and turns them away. It lives only while somebody waits.
 *
 * A server that goes down shuts its door first, as the core cannot stop listening without shutting
 * down altogether: who comes to a shut door is turned away by the same accept4. */
#include "base/clock.h"
#include "base/log.h"
#include "base/wait.h"
#include "rpc/serving.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SAID_EVERY_NS (30 * MOE_NS_PER_S)
#define LOOK_EVERY_NS (20 * MOE_NS_PER_MS)

enum {
    TURNED_AWAY_MAX = 64, /* while the lock is held */
    LEFT_MAX = 8,         /* listeners of a process; more are left to those who come later */
};

/* A listener at which connections wait that could not be taken. Its number may have become another
 * socket's by the time there is a descriptor: the address tells. */
struct left {
    int fd;
    socklen_t length;
    struct sockaddr_storage address;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what follows */
static atomic_int reserve = -1;                          /* written under the lock only */
static uint64_t said_ns;                                 /* 0 = never */
static struct left left[LEFT_MAX];
static atomic_uint left_count; /* written under the lock only */
static bool looking;           /* the thread is there */
static struct moe_rpc_door *shut;
static atomic_uint shut_count; /* written under the lock only */

static int take_one(int fd, struct sockaddr *address, socklen_t *length, int flags)
{
    return (int)syscall(SYS_accept4, fd, address, length, flags);
}

static void refill(void)
{
    if (reserve < 0)
        reserve = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void moe_rpc_reserve_descriptor(void)
{
    pthread_mutex_lock(&lock);
    refill();
    pthread_mutex_unlock(&lock);
}

static void say_full(int error)
{
    uint64_t now = moe_clock_ns();
    if (said_ns == 0 || now >= said_ns + SAID_EVERY_NS) {
        said_ns = now;
        moe_log_warn("connections are closed as they come: %s",
                     error == ENFILE ? "the system has no file descriptor left"
                                     : "this process has no file descriptor left");
    }
}

/* Closes connections that wait, and returns what the core is to hear: EAGAIN when there are no
 * more, or none can be taken; EINTR when there may be more, on which it calls again at once. */
static int turn_away(int fd)
{
    refill();
    for (int i = 0; i < TURNED_AWAY_MAX && reserve >= 0; i++) {
        close(reserve);
        int taken = take_one(fd, NULL, NULL, SOCK_CLOEXEC);
        if (taken >= 0)
            close(taken);
        reserve = -1;
        refill();
        if (taken < 0)
            return EAGAIN;
    }
    return reserve >= 0 ? EINTR : EAGAIN;
}

/* --------------------------------------------------- who waits while there is no reserve */

static struct left *find_left(int fd)
{
    for (unsigned i = 0; i < left_count; i++)
        if (left[i].fd == fd)
            return &left[i];
    return NULL;
}

static void forget_left(struct left *l)
{
    if (l != NULL)
        *l = left[--left_count];
}

static bool get_address(int fd, struct left *out)
{
    *out = (struct left){.fd = fd, .length = sizeof out->address};
    return getsockname(fd, (struct sockaddr *)&out->address, &out->length) == 0 &&
           out->length <= sizeof out->address;
}

static bool is_still_there(const struct left *l)
{
    struct left now;
    int listens = 0;
    socklen_t length = sizeof listens;
    return get_address(l->fd, &now) && now.length == l->length &&
           memcmp(&now.address, &l->address, l->length) == 0 &&
           getsockopt(l->fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens != 0;
}

/* With the lock held: turns away all who wait, as far as there is a reserve for it. */
static void look_after_left(void)
{
    refill();
    while (reserve >= 0 && left_count > 0) {
        struct left *l = &left[left_count - 1];
        if (!is_still_there(l) || turn_away(l->fd) == EAGAIN) {
            if (reserve < 0) /* snatched again */
                return;
            forget_left(l);
        }
    }
}

static void *look_after(void *unused)
{
    (void)unused;
    bool done = false;
    while (!done) {
        moe_sleep_until(moe_clock_ns() + LOOK_EVERY_NS);
        pthread_mutex_lock(&lock);
        look_after_left();
        done = left_count == 0;
        looking = !done;
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

/* With the lock held. Without memory for a thread they wait for somebody who comes later. */
static void leave(int fd)
{
    struct left l;
    if (find_left(fd) == NULL && left_count < LEFT_MAX && get_address(fd, &l))
        left[left_count++] = l;
    pthread_t thread;
    if (looking || left_count == 0 || pthread_create(&thread, NULL, look_after, NULL) != 0)
        return;
    looking = true;
    pthread_detach(thread);
    pthread_setname_np(thread, "rpc-door");
}

/* The core goes on taking connections from this listener until there is none. */
static void taken_again(int fd)
{
    pthread_mutex_lock(&lock);
    refill();
    forget_left(find_left(fd));
    pthread_mutex_unlock(&lock);
}

/* ----------------------------------------------------------------------- shut doors */

void moe_rpc_shut_door(struct moe_rpc_door *door, uint16_t port)
{
    pthread_mutex_lock(&lock);
    door->port = port;
    door->next = shut;
    shut = door;
    shut_count++;
    pthread_mutex_unlock(&lock);
}

void moe_rpc_forget_door(struct moe_rpc_door *door)
{
    pthread_mutex_lock(&lock);
    struct moe_rpc_door **at = &shut;
    while (*at != door)
        at = &(*at)->next;
    *at = door->next;
    shut_count--;
    pthread_mutex_unlock(&lock);
}

/* The port of IPv4 and of IPv6 is at the same place. */
static bool is_shut(int fd)
{
    struct sockaddr_in6 at = {0};
    socklen_t length = sizeof at;
    if (getsockname(fd, (struct sockaddr *)&at, &length) != 0 ||
        (at.sin6_family != AF_INET && at.sin6_family != AF_INET6))
        return false;
    pthread_mutex_lock(&lock);
    const struct moe_rpc_door *door = shut;
    while (door != NULL && door->port != ntohs(at.sin6_port))
        door = door->next;
    pthread_mutex_unlock(&lock);
    return door != NULL;
}

/* ------------------------------------------------------------------------- accept4 */

/* As the system's, but for shut doors and a lack of descriptors. */
__attribute__((visibility("default"))) int accept4(int fd, struct sockaddr *address,
                                                   socklen_t *length, int flags)
{
    int taken = take_one(fd, address, length, flags);
    if (taken >= 0 && atomic_load(&shut_count) > 0 && is_shut(fd)) {
        close(taken);
        errno = EINTR; /* there may be more: the core calls again at once */
        return -1;
    }
    if (taken >= 0 && (atomic_load(&reserve) < 0 || atomic_load(&left_count) > 0))
        taken_again(fd);
    if (taken >= 0 || (errno != EMFILE && errno != ENFILE))
        return taken;
    pthread_mutex_lock(&lock);
    say_full(errno);
    int told = turn_away(fd);
    if (reserve < 0)
        leave(fd);
    pthread_mutex_unlock(&lock);
    errno = told;
    return -1;
}
