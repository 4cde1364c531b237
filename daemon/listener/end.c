/* SPDX-License-Identifier: Apache-2.0 */
/* One end of a connection: a socket, plain or under TLS. Reads and writes never wait; the flags of
 * the end say what to wait for. */
#include "listener/inside.h"
#include "tls/tls.h"

#include <errno.h>
#include <string.h>

static bool would_wait(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK;
}

/* ------------------------------------------------------------------ TLS */

static enum moe_end_result note_outcome(struct moe_flow_end *e, enum moe_tls_outcome outcome,
                                        size_t count)
{
    /* The last edge of a peer that has gone may have come before these bytes were read. */
    if (outcome == MOE_TLS_WAITS_TO_READ)
        e->readable = e->hung_up;
    /* An answer of TLS itself must go out before more can be read. */
    if (outcome == MOE_TLS_WAITS_TO_WRITE) {
        e->readable = e->writable = false;
        e->read_needs_room = true;
    }
    if (count > 0)
        return MOE_END_MOVED; /* an end or a failure comes again with the next read */
    return outcome == MOE_TLS_ENDED    ? MOE_END_OVER
           : outcome == MOE_TLS_FAILED ? MOE_END_FAILED
                                       : MOE_END_WAITS;
}

static enum moe_end_result write_tls(struct moe_flow_end *e, const void *bytes, size_t length,
                                     size_t *count)
{
    enum moe_tls_outcome outcome = moe_tls_write(e->tls, bytes, length, count);
    if (outcome == MOE_TLS_DONE)
        return MOE_END_MOVED;
    if (outcome != MOE_TLS_WAITS_TO_WRITE)
        return MOE_END_FAILED;
    e->writable = false;
    return *count > 0 ? MOE_END_MOVED : MOE_END_WAITS;
}

/* ------------------------------------------------------------------ both */

enum moe_end_result moe_end_read(struct moe_flow_end *e, void *bytes, size_t room, size_t *count)
{
    if (e->tls != NULL)
        return note_outcome(e, moe_tls_read(e->tls, bytes, room, count), *count);
    ssize_t n = recv(e->fd, bytes, room, MSG_DONTWAIT);
    *count = n > 0 ? (size_t)n : 0;
    /* A stream socket that gives less than asked for has no more: a later edge says so. */
    if (n > 0) {
        e->readable = (size_t)n == room || e->hung_up;
        return MOE_END_MOVED;
    }
    if (n == 0 || would_wait())
        e->readable = false;
    if (n == 0)
        return MOE_END_OVER;
    return would_wait() || errno == EINTR ? MOE_END_WAITS : MOE_END_FAILED;
}

enum moe_end_result moe_end_peek(struct moe_flow_end *e, uint8_t bytes[MOE_END_PEEK_BYTES],
                                 size_t *count)
{
    if (e->tls != NULL) {
        const uint8_t *first;
        enum moe_tls_outcome outcome = moe_tls_peek(e->tls, &first, count);
        memcpy(bytes, first, *count);
        const enum moe_end_result result =
            note_outcome(e, outcome, outcome == MOE_TLS_DONE ? *count : 0);
        return result == MOE_END_WAITS && e->hung_up ? MOE_END_OVER : result;
    }
    ssize_t n = recv(e->fd, bytes, MOE_END_PEEK_BYTES, MSG_DONTWAIT | MSG_PEEK);
    *count = n > 0 ? (size_t)n : 0;
    if (n < 0 && (would_wait() || errno == EINTR)) {
        e->readable = errno == EINTR;
        return MOE_END_WAITS;
    }
    if (n <= 0 || (e->hung_up && n < MOE_END_PEEK_BYTES))
        return MOE_END_OVER;
    e->readable = n == MOE_END_PEEK_BYTES;
    return e->readable ? MOE_END_MOVED : MOE_END_WAITS;
}

enum moe_end_result moe_end_write(struct moe_flow_end *e, const void *bytes, size_t length,
                                  size_t *count)
{
    if (e->tls != NULL)
        return write_tls(e, bytes, length, count);
    ssize_t n = send(e->fd, bytes, length, MSG_DONTWAIT | MSG_NOSIGNAL);
    *count = n > 0 ? (size_t)n : 0;
    if (n >= 0)
        return MOE_END_MOVED;
    if (would_wait())
        e->writable = false;
    return would_wait() || errno == EINTR ? MOE_END_WAITS : MOE_END_FAILED;
}

void moe_end_shut(struct moe_flow_end *e)
{
    if (e->tls != NULL)
        moe_tls_end(e->tls);
    (void)shutdown(e->fd, SHUT_WR);
}
