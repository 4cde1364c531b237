/* Taking connections when the process has no descriptor left for one.
 *
 * The core stops listening for good when `accept4` fails with anything but EAGAIN: a process that
 * runs out of descriptors once would be deaf from then on, while all else goes on. So the core of a
 * server calls this accept4, which the linker puts in front of the system's. It keeps a descriptor
 * in reserve; when there is no other, it gives that one to each connection that waits, and closes
 * the connection at once: its client is told so, and may come back. Nothing else is changed. */
#include "base/clock.h"
#include "base/log.h"
#include "rpc/serving.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SAID_EVERY_NS (30 * MOE_NS_PER_S)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what follows */
static int reserve = -1;
static uint64_t said_ns; /* 0 = never */

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

/* Closes all connections that wait. */
static void turn_away(int fd)
{
    int taken;
    if (reserve < 0)
        return; /* those stay until a later one comes */
    do {
        close(reserve);
        taken = take_one(fd, NULL, NULL, SOCK_CLOEXEC);
        if (taken >= 0)
            close(taken);
        reserve = -1;
        refill();
    } while (taken >= 0 && reserve >= 0);
}

/* As the system's, but for a lack of descriptors, which is told as if nobody waited. */
__attribute__((visibility("default"))) int accept4(int fd, struct sockaddr *address,
                                                   socklen_t *length, int flags)
{
    int taken = take_one(fd, address, length, flags);
    if (taken >= 0 || (errno != EMFILE && errno != ENFILE))
        return taken;
    pthread_mutex_lock(&lock);
    say_full(errno);
    turn_away(fd);
    pthread_mutex_unlock(&lock);
    errno = EAGAIN;
    return -1;
}
