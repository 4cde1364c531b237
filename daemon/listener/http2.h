/* SPDX-License-Identifier: Apache-2.0 */
/* Private: the numbers of RFC 9113, and what frames.c and park.c share. */
#ifndef MOE_LISTENER_HTTP2_H
#define MOE_LISTENER_HTTP2_H

#include "listener/frames.h"

#include <string.h>

enum type {
    DATA,
    HEADERS,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    PUSH_PROMISE,
    PING,
    GOAWAY,
    WINDOW_UPDATE,
    CONTINUATION
};
enum flag { ACK = 1, END_STREAM = 1, END_HEADERS = 4, PADDED = 8, HAS_PRIORITY = 0x20 };
enum setting {
    HEADER_TABLE_SIZE = 1,
    ENABLE_PUSH,
    MAX_CONCURRENT_STREAMS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
};
enum {
    PREFACE = 24,
    HEAD_BYTES = 9,
    SETTING_BYTES = 6,
    PING_BYTES = 8,
    INCREMENT_BYTES = 4,   /* of WINDOW_UPDATE */
    LEAST_FRAME = 1 << 14, /* MAX_FRAME_SIZE until SETTINGS say more */
    LARGEST_FRAME = (1 << 24) - 1,
    FIRST_WINDOW = 65535,
};
#define LARGEST_WINDOW UINT32_C(0x7fffffff)

static inline uint32_t moe_http2_get_u24(const uint8_t *from)
{
    return (uint32_t)from[0] << 16 | (uint32_t)from[1] << 8 | from[2];
}

static inline uint32_t moe_http2_get_u32(const uint8_t *from)
{
    return (uint32_t)from[0] << 24 | moe_http2_get_u24(from + 1);
}

static inline void moe_http2_put_u24(uint8_t *to, uint32_t value)
{
    to[0] = (uint8_t)(value >> 16);
    to[1] = (uint8_t)(value >> 8);
    to[2] = (uint8_t)value;
}

static inline void moe_http2_put_u32(uint8_t *to, uint32_t value)
{
    to[0] = (uint8_t)(value >> 24);
    moe_http2_put_u24(to + 1, value & 0xffffff);
}

/* Takes bytes at..at+count out of `*length` bytes. */
static inline void moe_http2_take_out(uint8_t *bytes, size_t at, size_t *length, size_t count)
{
    *length -= count;
    memmove(bytes + at, bytes + at + count, *length - at);
}

/* Of a parked connection (park.c). The preface has come: the answer is SETTINGS. */
void moe_park_greet(struct moe_frames *f);
/* A frame begins. False if the client must not send it before a request. */
bool moe_park_allows(const struct moe_frames *f);
/* Bytes of the frame. False if they are not valid. */
bool moe_park_take(struct moe_frames *f, const uint8_t *bytes, size_t length);
/* The frame has ended, and may have an answer. */
void moe_park_end(struct moe_frames *f);

#endif
