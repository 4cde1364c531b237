/* SPDX-License-Identifier: Apache-2.0 */
/* HTTP/2 frames (RFC 9113) in both directions of a connection. */
#include "listener/frames.h"

#include "listener/http2.h"

#include <string.h>

enum stage { HEAD, CONTENT, FIELD, PADDING };
enum {
    PRIORITY_BYTES = 5,
    BLOCK_FRAMES = 16, /* HEADERS and its CONTINUATIONs */
    PIECE_BYTES = 64,  /* the core needs as much for each frame of a message that is not whole */
    ENHANCE_YOUR_CALM = 11,
};

/* Rates per second, how many may come at once, and how many of them at the start of a connection:
 * an attacker who comes back again and again gets no more than that each time. The fastest real
 * clients need a tenth of the rates: 12,000 calls a second on one connection are as many header
 * blocks of 1 KB and window updates; clients that measure bandwidth ping once per answer; one that
 * cancels all its calls resets 128 streams. */
static const struct {
    int64_t per_s, burst, start;
    const char *name;
} rates[MOE_FRAMES_SORTS] = {
    [MOE_FRAMES_RESETS] = {1000, 1000, 150, "RST_STREAM frames"},
    [MOE_FRAMES_REFUSALS] = {5000, 5000, 150, "calls that the server reset"},
    [MOE_FRAMES_SETTINGS] = {10, 100, 10, "SETTINGS frames"},
    [MOE_FRAMES_CONTROL] = {10000, 2000, 200, "PING, PRIORITY or empty DATA frames"},
    [MOE_FRAMES_WINDOWS] = {100000, 100000, 5000, "WINDOW_UPDATE frames"},
    [MOE_FRAMES_PIECES] = {30000, 20000, 2000, "small DATA frames"},
    [MOE_FRAMES_SMALL] = {100000, 20000, 2000, "small messages"},
    [MOE_FRAMES_HEADERS] = {64 << 20, 16 << 20, 1 << 20, "bytes of headers"},
};

/* ------------------------------------------------------------------ rates */

/* Tokens are counted in 1/1024, so that short times give some. */
static void fill_up(struct moe_frames *f, uint64_t now_ns)
{
    const uint64_t second = 1000000000, step = second / 1000, longest = 20 * second;
    const bool start = f->filled_ns == 0;
    uint64_t passed = now_ns > f->filled_ns ? now_ns - f->filled_ns : 0;
    if (!start && passed < step)
        return;
    passed = passed < longest ? passed : longest;
    f->filled_ns = now_ns;
    for (int i = 0; i < MOE_FRAMES_SORTS; i++) {
        const int64_t full = rates[i].burst * 1024;
        f->tokens[i] += (int64_t)(passed / 1000) * rates[i].per_s / 1000 * 1024 / 1000;
        f->tokens[i] = f->tokens[i] < full ? f->tokens[i] : full;
        if (start)
            f->tokens[i] = rates[i].start * 1024;
    }
}

static void spend(struct moe_frames *f, enum moe_frames_sort sort, uint32_t count)
{
    f->tokens[sort] -= (int64_t)count * 1024;
    if (f->tokens[sort] >= 0 || f->outcome != MOE_FRAMES_OK)
        return;
    f->outcome = MOE_FRAMES_FLOOD;
    f->reason = rates[sort].name;
}

static void malformed(struct moe_frames *f)
{
    if (f->outcome == MOE_FRAMES_OK)
        f->outcome = MOE_FRAMES_MALFORMED;
}

static void too_many(struct moe_frames *f, const char *what)
{
    f->outcome = MOE_FRAMES_FLOOD;
    f->reason = what;
}

/* ------------------------------------------------------------------ a frame begins */

static uint32_t get_stream(const uint8_t *head)
{
    return ((uint32_t)head[5] << 24 | moe_http2_get_u24(head + 6)) & 0x7fffffff;
}

/* The head tells where the block's last byte will be: a field that is to follow it must be part of
 * the frame's length now. */
static void promise_field(struct moe_frames *f, uint8_t *head)
{
    if (!f->block_is_first || f->events == NULL || f->events->began == NULL)
        return;
    f->field_length = (uint32_t)f->events->began(f->ctx, f->stream, f->field);
    if (f->field_length == MOE_FRAMES_TOO_MANY) {
        too_many(f, "open streams");
        return;
    }
    if (f->field_length == 0 || f->field_length > MOE_FRAMES_FIELD_BYTES) {
        f->outcome = MOE_FRAMES_NO_MEMORY;
        return;
    }
    moe_http2_put_u24(head, moe_http2_get_u24(head) + f->field_length);
}

static void begin_block(struct moe_frames *f)
{
    f->priority = (f->flags & HAS_PRIORITY) != 0 ? PRIORITY_BYTES : 0;
    if (f->stream % 2 == 0 || f->content < f->priority) {
        malformed(f);
        return;
    }
    f->block_stream = f->stream;
    f->block_bytes = f->block_frames = 0;
    f->block_is_first = f->stream > f->last_stream;
    f->block_ends_stream = (f->flags & END_STREAM) != 0;
    if (f->block_is_first)
        f->last_stream = f->stream;
}

static void begin_part_of_block(struct moe_frames *f, uint8_t *head)
{
    f->block_bytes += f->content;
    if (++f->block_frames > BLOCK_FRAMES)
        too_many(f, "CONTINUATION frames");
    else if (f->block_bytes > MOE_FRAMES_BLOCK_BYTES)
        too_many(f, "bytes of headers in one block");
    else if ((f->flags & END_HEADERS) != 0)
        promise_field(f, head);
}

static void begin_kind(struct moe_frames *f, uint8_t *head)
{
    switch (f->type) {
    case HEADERS:
        begin_block(f);
        if (f->outcome == MOE_FRAMES_OK)
            begin_part_of_block(f, head);
        break;
    case CONTINUATION: begin_part_of_block(f, head); break;
    case DATA:
        if (f->content < PIECE_BYTES && (f->flags & END_STREAM) == 0)
            spend(f, f->content == 0 ? MOE_FRAMES_CONTROL : MOE_FRAMES_PIECES, 1);
        break;
    case RST_STREAM: spend(f, MOE_FRAMES_RESETS, 1); break;
    case SETTINGS: spend(f, MOE_FRAMES_SETTINGS, 1); break;
    case WINDOW_UPDATE: spend(f, MOE_FRAMES_WINDOWS, 1); break;
    default: spend(f, MOE_FRAMES_CONTROL, 1); break;
    }
}

/* Bytes of a frame's head that are needed before it begins. */
static size_t head_length(const uint8_t *head)
{
    bool padded = (head[3] == DATA || head[3] == HEADERS) && (head[4] & PADDED) != 0;
    return padded ? MOE_FRAMES_HEAD_BYTES : MOE_FRAMES_HEAD_BYTES - 1;
}

static void begin_frame(struct moe_frames *f, uint8_t *head)
{
    const bool padded = head_length(head) == MOE_FRAMES_HEAD_BYTES;
    const uint32_t length = moe_http2_get_u24(head);
    f->type = head[3];
    f->flags = head[4];
    f->stream = get_stream(head);
    f->stage = CONTENT;
    f->padding = padded ? head[9] : 0;
    f->priority = 0;
    if (padded && length < 1 + f->padding) {
        malformed(f);
        return;
    }
    f->content = length - padded - f->padding;
    const bool first = !f->settled;
    f->settled = true;
    /* Nothing comes between the parts of a header block, and SETTINGS comes before all else. */
    const bool part = f->type == CONTINUATION;
    if ((first && f->type != SETTINGS) || part != (f->block_stream != 0) ||
        (part && f->stream != f->block_stream)) {
        malformed(f);
        return;
    }
    begin_kind(f, head);
    if (f->park.parked && f->outcome == MOE_FRAMES_OK && !moe_park_allows(f))
        malformed(f);
}

/* True for the acknowledgement of SETTINGS that the server has not sent. */
static bool is_not_for_server(struct moe_frames *f)
{
    const bool yes = f->owes_ack && f->type == SETTINGS && (f->flags & ACK) != 0 && f->content == 0;
    f->owes_ack = f->owes_ack && !yes;
    return yes && !f->park.parked;
}

/* ------------------------------------------------------------------ a frame passes and ends */

static void pass_content(struct moe_frames *f, const uint8_t *bytes, size_t length)
{
    f->content -= (uint32_t)length;
    if (f->park.parked) {
        if (!moe_park_take(f, bytes, length))
            malformed(f);
    } else if (f->type == DATA) {
        if (f->events != NULL && f->events->data != NULL)
            spend(f, MOE_FRAMES_SMALL, f->events->data(f->ctx, f->stream, bytes, length));
    } else if (f->type == HEADERS || f->type == CONTINUATION) {
        size_t skipped = length < f->priority ? length : f->priority;
        f->priority -= (uint32_t)skipped;
        if (moe_hpack_walk(&f->hpack, bytes + skipped, length - skipped))
            return;
        if (f->hpack.unfolded > MOE_FRAMES_BLOCK_BYTES)
            too_many(f, "bytes of headers in one block");
        else
            malformed(f);
    }
}

static void end_block(struct moe_frames *f)
{
    spend(f, MOE_FRAMES_HEADERS, f->hpack.unfolded);
    if (!moe_hpack_end(&f->hpack))
        malformed(f);
}

static void end_frame(struct moe_frames *f)
{
    const struct moe_frames_events *events = f->events;
    const bool block_over = f->block_stream != 0 && (f->flags & END_HEADERS) != 0;
    bool half_closed = f->type == DATA && (f->flags & END_STREAM) != 0;
    f->stage = HEAD;
    if (f->park.parked)
        moe_park_end(f);
    if (block_over) {
        half_closed = f->block_ends_stream;
        f->block_stream = 0;
    }
    if (half_closed && events != NULL && events->half_closed != NULL)
        events->half_closed(f->ctx, f->stream);
    if (f->type == RST_STREAM && events != NULL && events->ended != NULL)
        events->ended(f->ctx, f->stream);
}

/* False if the field finds no room. */
static bool put_field(struct moe_frames *f, uint8_t *bytes, size_t *at, size_t *length,
                      size_t capacity)
{
    f->wants_room = capacity - *length < f->field_length;
    if (f->wants_room)
        return false;
    memmove(bytes + *at + f->field_length, bytes + *at, *length - *at);
    memcpy(bytes + *at, f->field, f->field_length);
    *at += f->field_length;
    *length += f->field_length;
    f->field_length = 0;
    return true;
}

enum moe_frames_outcome moe_frames_scan(struct moe_frames *f, uint8_t *bytes, size_t *ready,
                                        size_t *length, size_t capacity, uint64_t now_ns)
{
    size_t at = *ready;
    fill_up(f, now_ns);
    f->wants_room = false;
    while (f->outcome == MOE_FRAMES_OK && f->park.answer_bytes == 0) {
        const size_t here = *length - at;
        if (f->preface < PREFACE) {
            size_t part = here < PREFACE - f->preface ? here : PREFACE - f->preface;
            f->preface += (uint32_t)part;
            at += part;
            if (f->preface < PREFACE)
                break;
            if (f->park.parked)
                moe_park_greet(f);
        } else if (f->stage == HEAD) {
            if (here < MOE_FRAMES_HEAD_BYTES - 1 || here < head_length(bytes + at))
                break;
            size_t head = head_length(bytes + at);
            f->park.requests = f->park.parked && f->settled && bytes[at + 3] == HEADERS;
            if (f->park.requests)
                break;
            begin_frame(f, bytes + at);
            if (f->outcome == MOE_FRAMES_OK && is_not_for_server(f))
                moe_http2_take_out(bytes, at, length, head);
            else
                at += head;
        } else if (f->stage == CONTENT) {
            size_t part = here < f->content ? here : f->content;
            if (part > 0)
                pass_content(f, bytes + at, part);
            at += part;
            if (f->content > 0)
                break;
            if (f->block_stream != 0 && (f->flags & END_HEADERS) != 0)
                end_block(f);
            f->stage = FIELD;
        } else if (f->stage == FIELD) {
            if (f->field_length > 0 && !put_field(f, bytes, &at, length, capacity))
                break;
            f->stage = PADDING;
        } else {
            size_t part = here < f->padding ? here : f->padding;
            f->padding -= (uint32_t)part;
            at += part;
            if (f->padding > 0)
                break;
            end_frame(f);
        }
    }
    *ready = at;
    return f->outcome;
}

/* ------------------------------------------------------------------ the way back */

static void begin_back(struct moe_frames_back *b, struct moe_frames *f, const uint8_t *head,
                       uint64_t now_ns)
{
    const uint8_t type = head[3], flags = head[4];
    const bool ends = (type == DATA || type == HEADERS) && (flags & END_STREAM) != 0;
    b->left = moe_http2_get_u24(head);
    if (type == RST_STREAM) {
        fill_up(f, now_ns);
        spend(f, MOE_FRAMES_REFUSALS, 1);
    }
    if ((type == RST_STREAM || ends) && f->events != NULL && f->events->ended != NULL)
        f->events->ended(f->ctx, get_stream(head));
}

void moe_frames_follow(struct moe_frames_back *b, struct moe_frames *f, uint8_t *bytes,
                       size_t *ready, size_t *length, uint64_t now_ns)
{
    size_t at = *ready;
    while (at < *length) {
        const size_t here = *length - at;
        if (b->left > 0) {
            size_t part = here < b->left ? here : b->left;
            b->left -= (uint32_t)part;
            at += part;
            continue;
        }
        if (here < HEAD_BYTES)
            break;
        begin_back(b, f, bytes + at, now_ns);
        const bool drop =
            b->drops_ack && bytes[at + 3] == SETTINGS && (bytes[at + 4] & ACK) != 0 && b->left == 0;
        b->drops_ack = b->drops_ack && !drop;
        if (drop)
            moe_http2_take_out(bytes, at, length, HEAD_BYTES);
        else
            at += HEAD_BYTES;
    }
    *ready = at;
}

void moe_frames_goaway(uint32_t last_stream, uint8_t bytes[MOE_FRAMES_GOAWAY_BYTES])
{
    memset(bytes, 0, MOE_FRAMES_GOAWAY_BYTES);
    moe_http2_put_u24(bytes, MOE_FRAMES_GOAWAY_BYTES - 9);
    bytes[3] = GOAWAY;
    bytes[9] = (uint8_t)(last_stream >> 24);
    moe_http2_put_u24(bytes + 10, last_stream & 0xffffff);
    bytes[16] = ENHANCE_YOUR_CALM;
}
