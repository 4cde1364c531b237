/* SPDX-License-Identifier: Apache-2.0 */
/* Moves bytes from one socket to another. One buffer per direction bounds what waits: while the
 * sink takes nothing, the source is not read, and its sender stops. */
#include "listener/inside.h"

#include <errno.h>
#include <stdlib.h>

enum { SPARE_MAX = 8 }; /* buffers that an idle relay keeps */

static struct moe_flow_buffer *borrow(struct moe_flow_pool *pool)
{
    struct moe_flow_buffer *b = SLIST_FIRST(&pool->spare);
    if (b == NULL)
        return malloc(sizeof *b);
    SLIST_REMOVE_HEAD(&pool->spare, link);
    pool->count--;
    return b;
}

static void give_back(struct moe_flow_pool *pool, struct moe_flow_buffer *b)
{
    if (pool->count >= SPARE_MAX) {
        free(b);
        return;
    }
    SLIST_INSERT_HEAD(&pool->spare, b, link);
    pool->count++;
}

void moe_flow_pool_destroy(struct moe_flow_pool *pool)
{
    while (!SLIST_EMPTY(&pool->spare)) {
        struct moe_flow_buffer *b = SLIST_FIRST(&pool->spare);
        SLIST_REMOVE_HEAD(&pool->spare, link);
        free(b);
    }
}

void moe_flow_discard(struct moe_flow *f, struct moe_flow_pool *pool)
{
    if (f->buffer != NULL)
        give_back(pool, f->buffer);
    f->buffer = NULL;
    f->at = f->length = 0;
}

/* False on an error of the socket. */
static bool fill(struct moe_flow *f, struct moe_flow_end *from)
{
    ssize_t n = recv(from->fd, f->buffer->bytes, sizeof f->buffer->bytes, MSG_DONTWAIT);
    if (n > 0) {
        f->length = (size_t)n;
        /* A stream socket that gives less than asked for has no more: a later edge says so. */
        if (f->length < sizeof f->buffer->bytes && !from->hung_up)
            from->readable = false;
    } else if (n == 0) {
        f->ended = true;
        from->readable = false;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        from->readable = false;
    } else if (errno != EINTR) {
        return false;
    }
    return true;
}

static bool empty(struct moe_flow *f, struct moe_flow_end *to)
{
    ssize_t n =
        send(to->fd, f->buffer->bytes + f->at, f->length - f->at, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) {
        f->at += (size_t)n;
        f->moved += (uint64_t)n;
        if (f->at == f->length)
            f->at = f->length = 0;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        to->writable = false;
    } else if (errno != EINTR) {
        return false;
    }
    return true;
}

enum moe_flow_state moe_flow_run(struct moe_flow *f, struct moe_flow_end *from,
                                 struct moe_flow_end *to, struct moe_flow_pool *pool, size_t budget)
{
    const uint64_t turn_ends = f->moved + budget;
    enum moe_flow_state state = MOE_FLOW_WAITS;
    for (;;) {
        if (f->at < f->length) {
            if (!to->writable)
                break;
            if (!empty(f, to))
                return MOE_FLOW_SINK_FAILED;
            continue;
        }
        if (f->ended) {
            if (!f->shut)
                (void)shutdown(to->fd, SHUT_WR);
            f->shut = true;
            break;
        }
        if (!from->readable)
            break;
        if (f->moved >= turn_ends) {
            state = MOE_FLOW_GOES_ON;
            break;
        }
        if (f->buffer == NULL && (f->buffer = borrow(pool)) == NULL)
            return MOE_FLOW_SOURCE_FAILED;
        if (!fill(f, from))
            return MOE_FLOW_SOURCE_FAILED;
    }
    if (f->at == f->length)
        moe_flow_discard(f, pool);
    return state;
}
