/* SPDX-License-Identifier: Apache-2.0 */
/* See regions/packet.h. */
#include "regions/packet.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Room for one descriptor. Its padding has room for another one. */
union control {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr align;
};

/* Takes one descriptor out of the message, and closes more. False if there were more. */
static bool take_descriptors(struct msghdr *m, int *descriptor)
{
    bool good = true;
    *descriptor = -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c != NULL; c = CMSG_NXTHDR(m, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (*descriptor < 0) {
                *descriptor = fd;
                continue;
            }
            close(fd);
            good = false;
        }
    }
    return good;
}

enum moe_packet moe_packet_receive(int socket, uint8_t bytes[MOE_PACKET_BYTES], size_t *length,
                                   int *descriptor)
{
    union control control;
    struct iovec part = {.iov_base = bytes, .iov_len = MOE_PACKET_BYTES};
    struct msghdr m = {.msg_iov = &part,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    ssize_t n;
    *descriptor = -1;
    do {
        n = recvmsg(socket, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? MOE_PACKET_NONE : MOE_PACKET_END;
    bool good = take_descriptors(&m, descriptor);
    /* Without a free descriptor the kernel cuts the one that came: the message says so then. */
    bool cut = (m.msg_flags & MSG_CTRUNC) != 0 && *descriptor >= 0;
    if (good && !cut && n > 0 && (m.msg_flags & MSG_TRUNC) == 0) {
        *length = (size_t)n;
        return n == 1 && *descriptor < 0 ? MOE_PACKET_WAKE : MOE_PACKET_MESSAGE;
    }
    if (*descriptor >= 0)
        close(*descriptor);
    *descriptor = -1;
    return MOE_PACKET_END;
}

struct moe_status moe_packet_send(int socket, const void *bytes, size_t length, int descriptor)
{
    union control control = {{0}};
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = length};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor >= 0) {
        m.msg_control = control.bytes;
        m.msg_controllen = sizeof control.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof descriptor);
        memcpy(CMSG_DATA(c), &descriptor, sizeof descriptor);
    }
    ssize_t n;
    do {
        n = sendmsg(socket, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    return n >= 0 ? moe_ok()
                  : moe_error(MOE_UNAVAILABLE, MOE_REASON_IO,
                              "the other side of the socket has gone or does not read");
}

void moe_packet_wake(int socket)
{
    static const uint8_t wake;
    struct moe_status st = moe_packet_send(socket, &wake, sizeof wake, -1);
    (void)st; /* the socket's end is seen elsewhere */
}
