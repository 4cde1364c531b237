/* SPDX-License-Identifier: Apache-2.0 */
/* A parked connection: the HTTP/2 (RFC 9113) of a client that has made no request. Its SETTINGS and
 * PINGs are answered here. At the first request, the server gets the preface and one SETTINGS frame
 * with the last value of each setting, and one WINDOW_UPDATE. It acknowledges that frame, and the
 * relay takes the acknowledgement out: the client has had it. PRIORITY, GOAWAY and unknown frames
 * say nothing that a server must know. All other frames need a stream, which a request opens. */
#include "listener/http2.h"

void moe_park_begin(struct moe_frames *f, uint32_t max_streams, uint32_t max_header_bytes)
{
    f->park = (struct moe_park){
        .parked = true, .max_streams = max_streams, .max_header_bytes = max_header_bytes};
    f->owes_ack = true;
}

/* ------------------------------------------------------------------ writing frames */

static uint8_t *put_head(uint8_t *to, size_t length, enum type type, enum flag flags)
{
    moe_http2_put_u24(to, (uint32_t)length);
    to[3] = (uint8_t)type;
    to[4] = (uint8_t)flags;
    moe_http2_put_u32(to + 5, 0);
    return to + HEAD_BYTES;
}

static uint8_t *put_setting(uint8_t *to, uint32_t name, uint32_t value)
{
    to[0] = (uint8_t)(name >> 8);
    to[1] = (uint8_t)name;
    moe_http2_put_u32(to + 2, value);
    return to + SETTING_BYTES;
}

/* ------------------------------------------------------------------ answers */

void moe_park_greet(struct moe_frames *f)
{
    struct moe_park *p = &f->park;
    uint8_t *to = p->answer + HEAD_BYTES;
    if (p->max_streams > 0)
        to = put_setting(to, MAX_CONCURRENT_STREAMS, p->max_streams);
    if (p->max_header_bytes > 0)
        to = put_setting(to, MAX_HEADER_LIST_SIZE, p->max_header_bytes);
    p->answer_bytes = (uint8_t)(to - p->answer);
    (void)put_head(p->answer, p->answer_bytes - HEAD_BYTES, SETTINGS, 0);
}

void moe_park_end(struct moe_frames *f)
{
    struct moe_park *p = &f->park;
    if ((f->flags & ACK) != 0 || (f->type != SETTINGS && f->type != PING))
        return;
    const size_t length = f->type == PING ? PING_BYTES : 0;
    memcpy(put_head(p->answer, length, f->type, ACK), p->part, length);
    p->answer_bytes = (uint8_t)(HEAD_BYTES + length);
}

/* ------------------------------------------------------------------ what the client says */

bool moe_park_allows(const struct moe_frames *f)
{
    const uint32_t length = f->content;
    switch (f->type) {
    case SETTINGS:
        return f->stream == 0 && length <= LEAST_FRAME && length % SETTING_BYTES == 0 &&
               ((f->flags & ACK) == 0 || length == 0);
    case PING: return f->stream == 0 && length == PING_BYTES;
    case WINDOW_UPDATE: return f->stream == 0 && length == INCREMENT_BYTES;
    case GOAWAY: return f->stream == 0 && length >= 8 && length <= LEAST_FRAME;
    case PRIORITY: return f->stream != 0 && length == 5;
    case DATA:
    case HEADERS:
    case RST_STREAM:
    case PUSH_PROMISE:
    case CONTINUATION: return false;
    default: return length <= LEAST_FRAME;
    }
}

/* Where the value of a setting stands; NULL = there are too many that no one knows. */
static uint32_t *place_of(struct moe_park *p, uint32_t name)
{
    if (name >= 1 && name <= MOE_PARK_KNOWN)
        return &p->values[name - 1];
    for (uint32_t i = 0; i < p->others; i++)
        if (p->names[i] == name)
            return &p->values[MOE_PARK_KNOWN + i];
    if (p->others == MOE_PARK_OTHERS)
        return NULL;
    p->names[p->others] = (uint16_t)name;
    return &p->values[MOE_PARK_KNOWN + p->others++];
}

static bool is_valid(uint32_t name, uint32_t value)
{
    switch (name) {
    case ENABLE_PUSH: return value <= 1;
    case INITIAL_WINDOW_SIZE: return value <= LARGEST_WINDOW;
    case MAX_FRAME_SIZE: return value >= LEAST_FRAME && value <= LARGEST_FRAME;
    default: return true;
    }
}

static bool take_setting(struct moe_park *p)
{
    const uint32_t name = (uint32_t)p->part[0] << 8 | p->part[1];
    const uint32_t value = moe_http2_get_u32(p->part + 2);
    uint32_t *place = place_of(p, name);
    if (!is_valid(name, value))
        return false;
    if (name == HEADER_TABLE_SIZE && ((p->known & 1) == 0 || value < p->lowest_table))
        p->lowest_table = value;
    if (name >= 1 && name <= MOE_PARK_KNOWN)
        p->known |= (uint8_t)(1U << (name - 1));
    if (place != NULL)
        *place = value;
    return true;
}

static bool take_increment(struct moe_park *p)
{
    const uint32_t more = moe_http2_get_u32(p->part) & LARGEST_WINDOW;
    if (more == 0 || more > LARGEST_WINDOW - FIRST_WINDOW - p->window)
        return false;
    p->window += more;
    return true;
}

bool moe_park_take(struct moe_frames *f, const uint8_t *bytes, size_t length)
{
    struct moe_park *p = &f->park;
    const size_t whole = f->type == SETTINGS        ? SETTING_BYTES
                         : f->type == PING          ? PING_BYTES
                         : f->type == WINDOW_UPDATE ? INCREMENT_BYTES
                                                    : 0;
    for (size_t i = 0; i < length && whole > 0; i++) {
        p->part[p->have++] = bytes[i];
        if (p->have < whole)
            continue;
        p->have = 0;
        if ((f->type == SETTINGS && !take_setting(p)) ||
            (f->type == WINDOW_UPDATE && !take_increment(p)))
            return false;
    }
    return true;
}

/* ------------------------------------------------------------------ the first request */

size_t moe_park_replay(struct moe_frames *f, uint8_t bytes[MOE_PARK_REPLAY_BYTES])
{
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const struct moe_park *p = &f->park;
    uint8_t *const settings = bytes + PREFACE, *to = settings + HEAD_BYTES;
    memcpy(bytes, preface, PREFACE);
    /* A table that shrank in between must be seen to shrink (RFC 7541, 4.2). */
    if ((p->known & 1) != 0 && p->lowest_table < p->values[0])
        to = put_setting(to, HEADER_TABLE_SIZE, p->lowest_table);
    for (uint32_t i = 0; i < MOE_PARK_KNOWN; i++)
        if ((p->known >> i & 1) != 0)
            to = put_setting(to, i + 1, p->values[i]);
    for (uint32_t i = 0; i < p->others; i++)
        to = put_setting(to, p->names[i], p->values[MOE_PARK_KNOWN + i]);
    (void)put_head(settings, (size_t)(to - settings) - HEAD_BYTES, SETTINGS, 0);
    if (p->window > 0) {
        to = put_head(to, INCREMENT_BYTES, WINDOW_UPDATE, 0);
        moe_http2_put_u32(to, p->window);
        to += INCREMENT_BYTES;
    }
    f->park.parked = f->park.requests = false;
    return (size_t)(to - bytes);
}
