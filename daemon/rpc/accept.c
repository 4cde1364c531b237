/* Taking connections when the process has no descriptor left for one.
 *
 * The core stops listening for good when `accept4` fails with anything but EAGAIN or EINTR: a
 * process that runs out of descriptors once would be deaf from then on, while all else goes on. So
 * the core of a server calls this accept4, which the linker puts in front of the system's. It keeps
 * a descriptor in reserve; when there is no other, it gives that one to each connection that waits,
 * and closes the connection at once: its client is told so, and may come back. Nothing else is
 * changed.
 *
 * Another thread may snatch the reserve while it changes hands. It is taken back as soon as there
 * is a descriptor for it. */
#include "base/clock.h"
#include "base/log.h"
#include "rpc/serving.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SAID_EVERY_NS (30 * MOE_NS_PER_S)

enum { TURNED_AWAY_MAX = 64 }; /* while the lock is held */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what follows */
static atomic_int reserve = -1;                          /* written under the lock only */
static uint64_t said_ns;                                 /* 0 = never */

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
 * more, or none can be taken (they stay until a later one comes: the core waits for news of the
 * socket); EINTR when there may be more, on which it calls again at once. */
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

/* As the system's, but for a lack of descriptors. */
__attribute__((visibility("default"))) int accept4(int fd, struct sockaddr *address,
                                                   socklen_t *length, int flags)
{
    int taken = take_one(fd, address, length, flags);
    if (taken >= 0 && atomic_load(&reserve) < 0)
        moe_rpc_reserve_descriptor();
    if (taken >= 0 || (errno != EMFILE && errno != ENFILE))
        return taken;
    pthread_mutex_lock(&lock);
    say_full(errno);
    int told = turn_away(fd);
    pthread_mutex_unlock(&lock);
    errno = told;
    return -1;
}
