/* SPDX-License-Identifier: Apache-2.0 */
/* Moves bytes from one end to the other. One buffer per direction bounds what waits: while the
 * sink takes nothing, the source is not read, and its sender stops. */
#include "listener/inside.h"

#include <stdlib.h>
#include <string.h>

enum {
    SPARE_MAX = 8,    /* buffers that an idle relay keeps */
    ROOM_BYTES = 1024 /* for bytes that a look adds */
};

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
    f->at = f->ready = f->length = 0;
    f->again = false;
}

/* Looks at what is new. The beginning of a frame's head leaves the buffer: a client that stops in
 * the middle of one costs no buffer. */
static bool look(struct moe_flow *f)
{
    enum moe_flow_look result = f->look(f);
    f->again = result == MOE_FLOW_NO_ROOM;
    if (result == MOE_FLOW_LOOKED) {
        f->carried_length = f->length - f->ready;
        MOE_INVARIANT(f->carried_length <= sizeof f->carried);
        memcpy(f->carried, f->buffer->bytes + f->ready, f->carried_length);
        f->length = f->ready;
    }
    return result != MOE_FLOW_REFUSED;
}

/* False if the end has failed. */
static bool fill(struct moe_flow *f, struct moe_flow_end *from)
{
    uint8_t *bytes = f->buffer->bytes;
    const size_t room = sizeof f->buffer->bytes - f->carried_length - ROOM_BYTES;
    size_t count;
    enum moe_end_result result = moe_end_read(from, bytes + f->carried_length, room, &count);
    if (count > 0) {
        memcpy(bytes, f->carried, f->carried_length);
        f->length = f->carried_length + count;
        f->carried_length = 0;
    }
    f->ended = result == MOE_END_OVER;
    return result != MOE_END_FAILED;
}

static bool empty(struct moe_flow *f, struct moe_flow_end *to)
{
    size_t count;
    enum moe_end_result result =
        moe_end_write(to, f->buffer->bytes + f->at, f->ready - f->at, &count);
    f->at += count;
    f->moved += count;
    return result != MOE_END_FAILED;
}

/* All that was ready has gone: what found no room is looked at again. */
static bool look_again(struct moe_flow *f)
{
    uint8_t *bytes = f->buffer->bytes;
    f->length -= f->ready;
    memmove(bytes, bytes + f->ready, f->length);
    f->at = f->ready = 0;
    return look(f);
}

enum moe_flow_state moe_flow_take(struct moe_flow *f, struct moe_flow_end *from,
                                  struct moe_flow_pool *pool)
{
    f->at = f->ready = f->length = 0;
    if (f->buffer == NULL && (f->buffer = borrow(pool)) == NULL)
        return MOE_FLOW_SOURCE_FAILED;
    if (!fill(f, from))
        return MOE_FLOW_SOURCE_FAILED;
    if (f->length > 0 && !look(f))
        return MOE_FLOW_LOOK_FAILED;
    return MOE_FLOW_GOES_ON;
}

bool moe_flow_put(struct moe_flow *f, struct moe_flow_pool *pool, const void *bytes, size_t length)
{
    if (f->buffer == NULL && (f->buffer = borrow(pool)) == NULL)
        return false;
    if (length > sizeof f->buffer->bytes - f->length)
        return false;
    memcpy(f->buffer->bytes + f->length, bytes, length);
    f->ready = f->length += length;
    return true;
}

enum moe_flow_state moe_flow_run(struct moe_flow *f, struct moe_flow_end *from,
                                 struct moe_flow_end *to, struct moe_flow_pool *pool, size_t budget)
{
    const uint64_t turn_ends = f->moved + budget;
    enum moe_flow_state state = MOE_FLOW_GOES_ON;
    while (state == MOE_FLOW_GOES_ON) {
        if (f->at < f->ready) {
            if (!to->writable)
                state = MOE_FLOW_WAITS;
            else if (!empty(f, to))
                state = MOE_FLOW_SINK_FAILED;
        } else if (f->again) {
            if (!look_again(f))
                state = MOE_FLOW_LOOK_FAILED;
        } else if (f->ended) {
            if (!f->shut)
                moe_end_shut(to);
            f->shut = true;
            state = MOE_FLOW_WAITS;
        } else if (!from->readable) {
            state = MOE_FLOW_WAITS;
        } else if (f->moved >= turn_ends) {
            break;
        } else {
            state = moe_flow_take(f, from, pool);
        }
    }
    if (f->at == f->ready && !f->again)
        moe_flow_discard(f, pool);
    return state;
}
