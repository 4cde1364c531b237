/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as HTTP/2 from a client. Scanning in one piece and in pieces gives the same outcome and
 * the same bytes; without an owner the bytes are those that came in. */
#include "base/status.h"
#include "driver.h"
#include "listener/frames.h"

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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct result whole, parts;
    static struct moe_frames f;
    struct moe_frames_back back = {0};
    size = size < INPUT_MAX ? size : INPUT_MAX;
    for (int appends = 0; appends < 2; appends++) {
        scan(data, size, INPUT_MAX, appends, &whole);
        scan(data, size, 7, appends, &parts);
        MOE_INVARIANT(whole.outcome == parts.outcome);
        if (whole.outcome == MOE_FRAMES_OK) {
            MOE_INVARIANT(whole.length == parts.length);
            MOE_INVARIANT(memcmp(whole.bytes, parts.bytes, whole.length) == 0);
        }
        if (appends == 0)
            MOE_INVARIANT(whole.length <= size && memcmp(whole.bytes, data, whole.length) == 0);
    }
    memset(&f, 0, sizeof f);
    moe_frames_follow(&back, &f, data, size, NOW);
    return 0;
}

size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static const uint8_t calls[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
                                   "\0\0\x0f\1\5\0\0\0\1\x83\x86\x44\2ab\x40\1k\1v\xbe\x10\1n\0"
                                   "\0\0\3\0\x08\0\0\0\1\1x\0"
                                   "\0\0\2\1\0\0\0\0\3\x83\xbe\0\0\2\x09\4\0\0\0\3\x0f\x2f"
                                   "\0\0\4\3\0\0\0\0\1\0\0\0\x08\0\0\x08\6\0\0\0\0\0wonderful";
    *data = calls;
    return i == 0 ? sizeof calls - 1 : 0;
}
