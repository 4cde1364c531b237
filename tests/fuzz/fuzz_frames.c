/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as HTTP/2 from a client. Scanning in one piece and in pieces gives the same outcome and
 * the same bytes; without an owner the bytes are those that came in. The same holds for connections
 * that begin parked, and for the way back. */
#include "base/status.h"
#include "driver.h"
#include "listener/frames.h"

#include <stdbool.h>
#include <string.h>

enum { INPUT_MAX = 4096, ROOM = 65536, NOW = 1000000000 };

struct result {
    enum moe_frames_outcome outcome;
    size_t length;
    uint8_t bytes[ROOM];
};

static size_t begin(void *ctx, uint32_t stream, uint8_t *field)
{
    (void)ctx;
    (void)stream;
    memcpy(field, "\x10\1k\1v", 5);
    return 5;
}

static void scan(const uint8_t *data, size_t size, size_t piece, bool appends, struct result *r)
{
    static const struct moe_frames_events events = {.began = begin};
    static uint8_t buffer[ROOM];
    struct moe_frames f = {.events = appends ? &events : NULL};
    size_t kept = 0, at = 0;
    r->outcome = MOE_FRAMES_OK;
    r->length = 0;
    while (r->outcome == MOE_FRAMES_OK && (at < size || f.wants_room)) {
        size_t part = piece < size - at ? piece : size - at, ready = 0;
        memcpy(buffer + kept, data + at, part);
        at += part;
        size_t length = kept + part;
        r->outcome = moe_frames_scan(&f, buffer, &ready, &length, piece + 200, NOW);
        MOE_INVARIANT(ready <= length && length <= piece + 200);
        memcpy(r->bytes + r->length, buffer, ready);
        r->length += ready;
        kept = length - ready;
        MOE_INVARIANT(f.wants_room || r->outcome != MOE_FRAMES_OK || kept < MOE_FRAMES_HEAD_BYTES);
        memmove(buffer, buffer + ready, kept);
    }
}

/* As the relay does with a parked connection: bytes for the server, then those for the client. */
static void scan_parked(const uint8_t *data, size_t size, size_t piece, struct result *r)
{
    static uint8_t buffer[ROOM], to_client[ROOM];
    struct moe_frames f = {0};
    size_t kept = 0, answered = 0;
    moe_park_begin(&f, 128, 16384);
    r->outcome = MOE_FRAMES_OK;
    r->length = 0;
    for (size_t at = 0; r->outcome == MOE_FRAMES_OK && at < size;) {
        size_t part = piece < size - at ? piece : size - at, ready = 0, from = 0;
        memcpy(buffer + kept, data + at, part);
        at += part;
        size_t length = kept + part;
        bool again;
        do {
            const bool parked = f.park.parked;
            r->outcome = moe_frames_scan(&f, buffer, &ready, &length, ROOM, NOW);
            MOE_INVARIANT(ready <= length && f.park.answer_bytes <= MOE_PARK_ANSWER_BYTES);
            again = f.park.answer_bytes > 0;
            memcpy(to_client + answered, f.park.answer, f.park.answer_bytes);
            answered += f.park.answer_bytes;
            f.park.answer_bytes = 0;
            from = parked ? ready : from;
            if (f.park.requests && !again && r->outcome == MOE_FRAMES_OK) {
                again = true;
                r->length = moe_park_replay(&f, r->bytes);
                MOE_INVARIANT(r->length <= MOE_PARK_REPLAY_BYTES);
            }
        } while (again && r->outcome == MOE_FRAMES_OK);
        memcpy(r->bytes + r->length, buffer + from, ready - from);
        r->length += ready - from;
        kept = length - ready;
        MOE_INVARIANT(r->outcome != MOE_FRAMES_OK || kept < MOE_FRAMES_HEAD_BYTES);
        memmove(buffer, buffer + ready, kept);
    }
    MOE_INVARIANT(answered <= size + MOE_PARK_ANSWER_BYTES);
    memcpy(r->bytes + r->length, to_client, answered);
    r->length += answered;
}

static void follow(const uint8_t *data, size_t size, size_t piece, struct result *r)
{
    static uint8_t buffer[ROOM];
    struct moe_frames f = {0};
    struct moe_frames_back back = {.drops_ack = true};
    size_t kept = 0;
    r->length = 0;
    for (size_t at = 0; at < size;) {
        size_t part = piece < size - at ? piece : size - at, ready = 0;
        memcpy(buffer + kept, data + at, part);
        at += part;
        size_t length = kept + part;
        moe_frames_follow(&back, &f, buffer, &ready, &length, NOW);
        memcpy(r->bytes + r->length, buffer, ready);
        r->length += ready;
        kept = length - ready;
        MOE_INVARIANT(kept < MOE_FRAMES_HEAD_BYTES);
        memmove(buffer, buffer + ready, kept);
    }
    MOE_INVARIANT(r->length + kept + (back.drops_ack ? 0 : 9) == size);
}

static void check_same(const struct result *a, const struct result *b)
{
    MOE_INVARIANT(a->length == b->length && memcmp(a->bytes, b->bytes, a->length) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct result whole, parts;
    size = size < INPUT_MAX ? size : INPUT_MAX;
    for (int appends = 0; appends < 2; appends++) {
        scan(data, size, INPUT_MAX, appends, &whole);
        scan(data, size, 7, appends, &parts);
        MOE_INVARIANT(whole.outcome == parts.outcome);
        if (whole.outcome == MOE_FRAMES_OK) {
            check_same(&whole, &parts);
        }
        if (appends == 0)
            MOE_INVARIANT(whole.length <= size && memcmp(whole.bytes, data, whole.length) == 0);
    }
    scan_parked(data, size, INPUT_MAX, &whole);
    scan_parked(data, size, 7, &parts);
    MOE_INVARIANT(whole.outcome == parts.outcome);
    if (whole.outcome == MOE_FRAMES_OK)
        check_same(&whole, &parts);
    follow(data, size, INPUT_MAX, &whole);
    follow(data, size, 7, &parts);
    check_same(&whole, &parts);
    return 0;
}

size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static const uint8_t calls[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
                                   "\0\0\x0f\1\5\0\0\0\1\x83\x86\x44\2ab\x40\1k\1v\xbe\x10\1n\0"
                                   "\0\0\3\0\x08\0\0\0\1\1x\0"
                                   "\0\0\2\1\0\0\0\0\3\x83\xbe\0\0\2\x09\4\0\0\0\3\x0f\x2f"
                                   "\0\0\4\3\0\0\0\0\1\0\0\0\x08\0\0\x08\6\0\0\0\0\0wonderful";
    static const uint8_t idle[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                                  "\0\0\x12\4\0\0\0\0\0\0\1\0\0\0\0\0\4\0\1\0\0\xfe\3\0\0\0\1"
                                  "\0\0\4\x08\0\0\0\0\0\0\0\1\0\0\0\x08\6\0\0\0\0\0wonderfu"
                                  "\0\0\6\4\0\0\0\0\0\0\1\0\0\x10\0"
                                  "\0\0\5\2\0\0\0\0\3\0\0\0\0\1"
                                  "\0\0\x0a\7\0\0\0\0\0\0\0\0\0\0\0\0\0ok\0\0\0\4\1\0\0\0\0"
                                  "\0\0\1\1\5\0\0\0\1\x82\0\0\0\4\1\0\0\0\0";
    static const struct {
        const uint8_t *bytes;
        size_t length;
    } seeds[] = {{calls, sizeof calls - 1}, {idle, sizeof idle - 1}};
    if (i >= sizeof seeds / sizeof *seeds)
        return 0;
    *data = seeds[i].bytes;
    return seeds[i].length;
}
