/* SPDX-License-Identifier: Apache-2.0 */
/* Counting HTTP/2 frames: honest clients pass unchanged, whatever the pieces; floods do not. */
#include "listener/frames.h"
#include "support/check.h"
#include "support/random.h"

#include <stdlib.h>
#include <string.h>

#define SECOND UINT64_C(1000000000)

enum { DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION };
enum { END_STREAM = 1, END_HEADERS = 4, PADDED = 8, HAS_PRIORITY = 0x20 };
enum { WIRE_MAX = 4 << 20, STREAMS_MAX = 1000, BUFFER = 65536 };

static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/* ------------------------------------------------------------------ what a client sends */

struct wire {
    uint8_t *bytes;
    size_t length;
};

static void put(struct wire *w, const void *bytes, size_t length)
{
    assert_true(w->length + length <= WIRE_MAX);
    if (length > 0)
        memcpy(w->bytes + w->length, bytes, length);
    w->length += length;
}

static void put_frame(struct wire *w, int type, int flags, uint32_t stream, const void *payload,
                      size_t length)
{
    const uint8_t head[9] = {
        (uint8_t)(length >> 16), (uint8_t)(length >> 8), (uint8_t)length,
        (uint8_t)type,           (uint8_t)flags,         (uint8_t)(stream >> 24),
        (uint8_t)(stream >> 16), (uint8_t)(stream >> 8), (uint8_t)stream};
    put(w, head, sizeof head);
    put(w, payload, length);
}

static struct wire open_wire(void)
{
    struct wire w = {.bytes = malloc(WIRE_MAX)};
    assert_non_null(w.bytes);
    put(&w, preface, sizeof preface - 1);
    put_frame(&w, SETTINGS, 0, 0, NULL, 0);
    return w;
}

/* ------------------------------------------------------------------ what the owner sees */

struct seen {
    uint32_t began[STREAMS_MAX], began_count;
    uint8_t *data;
    size_t data_length;
    uint32_t half_closed, ended;
    bool append;
};

static const uint8_t field[] = {0x10, 3, 'k', 'e', 'y', 5, 'v', 'a', 'l', 'u', 'e'};

static size_t on_began(void *ctx, uint32_t stream, uint8_t *to)
{
    struct seen *s = ctx;
    assert_true(s->began_count < STREAMS_MAX);
    s->began[s->began_count++] = stream;
    memcpy(to, field, sizeof field);
    return sizeof field;
}

static uint32_t on_data(void *ctx, uint32_t stream, const uint8_t *bytes, size_t length)
{
    struct seen *s = ctx;
    assert_true(stream % 2 == 1);
    memcpy(s->data + s->data_length, bytes, length);
    s->data_length += length;
    return 0;
}

static void on_half_closed(void *ctx, uint32_t stream)
{
    (void)stream;
    ((struct seen *)ctx)->half_closed++;
}

static void on_ended(void *ctx, uint32_t stream)
{
    (void)stream;
    ((struct seen *)ctx)->ended++;
}

static const struct moe_frames_events events = {on_began, on_data, on_half_closed, on_ended};

/* Passes all bytes in random pieces through a buffer, as the relay does. Returns the outcome; what
 * may be sent goes to `out`. */
static enum moe_frames_outcome pass(struct moe_frames *f, const struct wire *w, struct wire *out,
                                    size_t piece_max, uint64_t now)
{
    static uint8_t buffer[BUFFER];
    size_t kept = 0, capacity = random_between(200, BUFFER);
    for (size_t at = 0; at < w->length || f->wants_room;) {
        size_t part = at < w->length ? 1 + random_below((uint32_t)piece_max) : 0, ready = 0;
        size_t room = capacity - kept > 100 ? capacity - kept - 100 : 0;
        part = part < room ? part : room;
        part = part < w->length - at ? part : w->length - at;
        memcpy(buffer + kept, w->bytes + at, part);
        at += part;
        size_t length = kept + part;
        enum moe_frames_outcome v = moe_frames_scan(f, buffer, &ready, &length, capacity, now);
        assert_true(ready <= length && length <= capacity);
        put(out, buffer, ready);
        if (v != MOE_FRAMES_OK)
            return v;
        kept = length - ready;
        assert_true(f->wants_room || kept < MOE_FRAMES_HEAD_BYTES);
        memmove(buffer, buffer + ready, kept);
    }
    return MOE_FRAMES_OK;
}

static enum moe_frames_outcome outcome_at(const struct wire *w, uint64_t now)
{
    struct moe_frames f = {0};
    struct wire out = {.bytes = malloc(WIRE_MAX)};
    enum moe_frames_outcome v = pass(&f, w, &out, 70000, now);
    if (v != MOE_FRAMES_OK)
        print_message("  outcome %d: %s\n", v, f.reason != NULL ? f.reason : "malformed");
    free(out.bytes);
    return v;
}

/* ------------------------------------------------------------------ honest clients */

/* Some fields of every form: indexed, literal with and without a name, Huffman, long. */
static size_t random_block(uint8_t *to)
{
    static const uint8_t start[] = {0x83, 0x86, 0x44, 0x85, 1, 2, 3, 4, 5, 0x41, 2, 'h', 'i'};
    size_t n = 0;
    memcpy(to, start, sizeof start);
    n += sizeof start;
    if (one_in(2)) {
        const uint8_t own[] = {0x40, 2, 't', 'e', 3, 'a', 'b', 'c', 0xbe, 0x3f, 0xe1, 0x1f};
        memcpy(to + n, own, sizeof own);
        n += sizeof own;
    }
    if (one_in(3)) { /* a value of 1000 bytes, never indexed */
        const uint8_t own[] = {0x1f, 0x08, 0x7f, 0xe9, 0x06};
        memcpy(to + n, own, sizeof own);
        memset(to + n + sizeof own, 'v', 1000 - 0);
        n += sizeof own + 1000;
    }
    return n;
}

/* A block in one frame or several, padded or with a priority. */
static void put_block(struct wire *w, uint32_t stream, bool ends, const uint8_t *block, size_t n)
{
    uint8_t payload[4096];
    size_t at = 0, length = 0, first = one_in(2) ? n : random_below((uint32_t)n + 1);
    int flags = (ends ? END_STREAM : 0) | (first == n ? END_HEADERS : 0);
    uint8_t padding = one_in(3) ? (uint8_t)random_below(256) : 0;
    if (padding > 0) {
        flags |= PADDED;
        payload[length++] = padding;
    }
    if (one_in(3)) {
        flags |= HAS_PRIORITY;
        memset(payload + length, 1, 5);
        length += 5;
    }
    memcpy(payload + length, block, first);
    length += first;
    memset(payload + length, 0, padding);
    put_frame(w, HEADERS, flags, stream, payload, length + padding);
    for (at = first; at < n;) {
        size_t part = 1 + random_below((uint32_t)(n - at));
        part = part * 4 < n ? n / 4 + 1 : part;
        part = part < n - at ? part : n - at;
        put_frame(w, CONTINUATION, at + part == n ? END_HEADERS : 0, stream, block + at, part);
        at += part;
    }
}

static void put_data(struct wire *w, struct wire *data, uint32_t stream, bool ends, size_t length)
{
    uint8_t *payload = malloc(length + 300);
    uint8_t padding = one_in(3) ? (uint8_t)random_below(256) : 0;
    bool padded = padding > 0;
    payload[0] = padding;
    fill_random(payload + padded, length);
    put(data, payload + padded, length);
    memset(payload + padded + length, 0, padding);
    put_frame(w, DATA, (ends ? END_STREAM : 0) | (padded ? PADDED : 0), stream, payload,
              padded + length + padding);
    free(payload);
}

/* Frames of `out` must be those of `in`, with the field at the end of each stream's first block. */
static void check_output(const struct wire *in, const struct wire *out, bool appended)
{
    size_t i = sizeof preface - 1, o = i;
    uint32_t last = 0;
    assert_memory_equal(in->bytes, out->bytes, i);
    bool first_block = false;
    while (i < in->length) {
        const uint8_t *a = in->bytes + i, *b = out->bytes + o;
        size_t n = (size_t)a[0] << 16 | (size_t)a[1] << 8 | a[2];
        size_t m = (size_t)b[0] << 16 | (size_t)b[1] << 8 | b[2];
        uint32_t stream = (uint32_t)a[7] << 8 | a[8];
        assert_memory_equal(a + 3, b + 3, 6);
        if (a[3] == HEADERS) {
            first_block = stream > last;
            last = first_block ? stream : last;
        }
        bool more = appended && first_block && (a[3] == HEADERS || a[3] == CONTINUATION) &&
                    (a[4] & END_HEADERS) != 0;
        size_t padding = a[3] == HEADERS && (a[4] & PADDED) != 0 ? a[9] : 0;
        assert_int_equal(m, n + (more ? sizeof field : 0));
        assert_memory_equal(a + 9, b + 9, n - padding);
        if (more)
            assert_memory_equal(b + 9 + n - padding, field, sizeof field);
        assert_memory_equal(a + 9 + n - padding, b + 9 + m - padding, padding);
        i += 9 + n;
        o += 9 + m;
    }
    assert_int_equal(o, out->length);
}

static void honest_calls_pass_in_any_pieces(void **state)
{
    (void)state;
    for (int round = 0; round < 300; round++) {
        struct wire w = open_wire(), data = {.bytes = malloc(WIRE_MAX)};
        struct wire out = {.bytes = malloc(WIRE_MAX)};
        struct seen s = {.data = malloc(WIRE_MAX)};
        struct moe_frames f = {.events = one_in(4) ? NULL : &events, .ctx = &s};
        uint32_t calls = 1 + random_below(40), halves = 0, resets = 0;
        for (uint32_t i = 0; i < calls; i++) {
            uint8_t block[4096];
            uint32_t stream = 2 * i + 1;
            bool reset = one_in(5);
            put_block(&w, stream, false, block, random_block(block));
            for (uint32_t k = random_below(4); k > 0; k--)
                put_data(&w, &data, stream, false, random_below(one_in(5) ? 20000 : 50));
            if (one_in(3))
                put_frame(&w, PING, 0, 0, "12345678", 8);
            if (one_in(3))
                put_frame(&w, WINDOW, 0, stream, "\0\0\1\0", 4);
            if (reset)
                put_frame(&w, RST_STREAM, 0, stream, "\0\0\0\x08", 4);
            else if (one_in(4)) /* trailers: no second stream */
                put_block(&w, stream, true, (const uint8_t *)"\x82", 1);
            else
                put_data(&w, &data, stream, true, random_below(100));
            halves += !reset;
            resets += reset;
        }
        assert_int_equal(pass(&f, &w, &out, one_in(2) ? 30 : 50000, SECOND), MOE_FRAMES_OK);
        check_output(&w, &out, f.events != NULL);
        if (f.events != NULL) {
            assert_int_equal(s.began_count, calls);
            assert_int_equal(s.half_closed, halves);
            assert_int_equal(s.ended, resets);
            assert_int_equal(s.data_length, data.length);
            assert_memory_equal(s.data, data.bytes, data.length);
        }
        free(w.bytes);
        free(data.bytes);
        free(out.bytes);
        free(s.data);
    }
}

/* Three times the fastest client seen: 36,000 calls a second, each with a window update and a ping
 * for every fourth; and one that cancels 900 a second. */
static void a_fast_client_stays_below_the_rates(void **state)
{
    struct moe_frames f = {0};
    struct wire out = {.bytes = malloc(WIRE_MAX)}, w = open_wire();
    (void)state;
    uint32_t stream = 1;
    for (uint64_t ms = 0; ms < 5000; ms++) {
        for (int i = 0; i < 36; i++, stream += 2) {
            put_frame(&w, HEADERS, END_HEADERS | END_STREAM, stream,
                      "\x83\x86\x44\x85\x01\x02\x03\x04\x05", 9);
            put_frame(&w, WINDOW, 0, 0, "\0\0\1\0", 4);
            if (i % 4 == 0)
                put_frame(&w, PING, 0, 0, "12345678", 8);
        }
        if (ms % 10 < 9)
            put_frame(&w, RST_STREAM, 0, stream - 2, "\0\0\0\x08", 4);
        assert_int_equal(pass(&f, &w, &out, 5000, SECOND + ms * 1000000), MOE_FRAMES_OK);
        w.length = out.length = 0;
    }
    free(out.bytes);
    free(w.bytes);
}

/* ------------------------------------------------------------------ floods */

static void floods_are_noticed(void **state)
{
    struct {
        int type, flags;
        uint32_t stream;
        const char *payload;
        size_t length, count;
    } floods[] = {
        {RST_STREAM, 0, 1, "\0\0\0\x08", 4, 3000}, {SETTINGS, 0, 0, "", 0, 300},
        {PING, 0, 0, "12345678", 8, 30000},        {PING, 1, 0, "12345678", 8, 30000},
        {PRIORITY, 0, 1, "12345", 5, 30000},       {DATA, 0, 1, "", 0, 30000},
        {DATA, PADDED, 1, "\0", 1, 30000},         {DATA, 0, 1, "x", 1, 30000},
        {WINDOW, 0, 0, "\0\0\0\x01", 4, 300000},   {200, 0, 0, "", 0, 30000},
    };
    (void)state;
    for (size_t i = 0; i < sizeof floods / sizeof *floods; i++) {
        struct wire w = open_wire();
        put_frame(&w, HEADERS, END_HEADERS, 1, "\x83", 1);
        for (size_t n = 0; n < floods[i].count; n++)
            put_frame(&w, floods[i].type, floods[i].flags, floods[i].stream, floods[i].payload,
                      floods[i].length);
        assert_int_equal(outcome_at(&w, SECOND), MOE_FRAMES_FLOOD);
        free(w.bytes);
    }
}

static uint32_t count_fives(void *ctx, uint32_t stream, const uint8_t *bytes, size_t length)
{
    (void)ctx;
    (void)stream;
    (void)bytes;
    return (uint32_t)length / 5;
}

/* Empty messages of five bytes, 400 in a frame of 2,000 bytes: at a rate that is allowed, and as
 * fast as they go. */
static void small_messages_have_a_rate_in_large_frames(void **state)
{
    static const struct moe_frames_events counting = {.data = count_fives};
    static const char messages[2000];
    struct moe_frames f = {.events = &counting};
    struct wire out = {.bytes = malloc(WIRE_MAX)}, w = open_wire();
    uint64_t now = SECOND;
    (void)state;
    put_frame(&w, HEADERS, END_HEADERS, 1, "\x83", 1);
    for (int i = 0; i < 1000; i++, now += SECOND / 200) {
        put_frame(&w, DATA, 0, 1, messages, sizeof messages);
        assert_int_equal(pass(&f, &w, &out, 5000, now), MOE_FRAMES_OK);
        w.length = out.length = 0;
    }
    for (int i = 0; i < 100; i++)
        put_frame(&w, DATA, 0, 1, messages, sizeof messages);
    assert_int_equal(pass(&f, &w, &out, 5000, now), MOE_FRAMES_FLOOD);
    assert_string_equal(f.reason, "small messages");
    free(out.bytes);
    free(w.bytes);
}

static void rapid_resets_are_noticed(void **state)
{
    struct wire w = open_wire();
    (void)state;
    for (uint32_t i = 0; i < 3000; i++) {
        put_frame(&w, HEADERS, END_HEADERS, 2 * i + 1, "\x83", 1);
        put_frame(&w, RST_STREAM, 0, 2 * i + 1, "\0\0\0\x08", 4);
    }
    assert_int_equal(outcome_at(&w, SECOND), MOE_FRAMES_FLOOD);
    free(w.bytes);
}

/* The client makes the server reset its streams. */
static void resets_of_the_server_count_as_well(void **state)
{
    struct moe_frames f = {0};
    struct moe_frames_back back = {0};
    struct wire w = {.bytes = malloc(WIRE_MAX)};
    (void)state;
    for (uint32_t i = 0; i < 10000; i++)
        put_frame(&w, RST_STREAM, 0, 2 * i + 1, "\0\0\0\x08", 4);
    size_t ready = 0;
    moe_frames_follow(&back, &f, w.bytes, &ready, &w.length, SECOND);
    assert_int_equal(f.outcome, MOE_FRAMES_FLOOD);
    free(w.bytes);
}

static void large_header_blocks_are_noticed(void **state)
{
    static uint8_t block[16384];
    struct wire w = open_wire();
    (void)state;
    /* CONTINUATION without an end: many, or long ones. */
    put_frame(&w, HEADERS, 0, 1, "\x83", 1);
    for (int i = 0; i < 100; i++)
        put_frame(&w, CONTINUATION, 0, 1, "", 0);
    assert_int_equal(outcome_at(&w, SECOND), MOE_FRAMES_FLOOD);
    free(w.bytes);
    w = open_wire();
    put_frame(&w, HEADERS, 0, 1, "\x83", 1);
    memset(block, 0x82, sizeof block);
    for (int i = 0; i < 8; i++)
        put_frame(&w, CONTINUATION, 0, 1, block, sizeof block);
    assert_int_equal(outcome_at(&w, SECOND), MOE_FRAMES_FLOOD);
    free(w.bytes);
    /* HPACK: one entry of 3.9 KB, and one byte for each copy of it. */
    w = open_wire();
    uint8_t entry[5000] = {0x40, 1, 'x', 0x7f, 0xbd, 0x1d}; /* 3900 = 127 + 0x3d + 29 * 128 */
    memset(entry + 6, 'v', 3900);
    put_frame(&w, HEADERS, END_HEADERS, 1, entry, 3906);
    put_frame(&w, HEADERS, END_HEADERS, 3, "\xbe\xbe\xbe", 3); /* three copies: 12 KB */
    assert_int_equal(outcome_at(&w, SECOND), MOE_FRAMES_OK);
    memset(block, 0xbe, 100);
    put_frame(&w, HEADERS, END_HEADERS, 5, block, 100);
    assert_int_equal(outcome_at(&w, SECOND), MOE_FRAMES_FLOOD);
    free(w.bytes);
    /* The same below the bound of one block, again and again. */
    w = open_wire();
    put_frame(&w, HEADERS, END_HEADERS, 1, entry, 3906);
    for (uint32_t i = 1; i < 2000; i++)
        put_frame(&w, HEADERS, END_HEADERS, 2 * i + 1, block, 15);
    assert_int_equal(outcome_at(&w, SECOND), MOE_FRAMES_FLOOD);
    free(w.bytes);
}

/* ------------------------------------------------------------------ malformed */

static void malformed_frames_end_the_connection(void **state)
{
    struct {
        int type, flags;
        uint32_t stream;
        const char *payload;
        size_t length;
    } frames[] = {
        {CONTINUATION, END_HEADERS, 1, "\x83", 1}, /* of no block */
        {DATA, PADDED, 1, "\x05....", 5},          /* more padding than frame */
        {DATA, PADDED, 1, "", 0},                  /* no length of padding */
        {HEADERS, END_HEADERS, 0, "\x83", 1},      /* of the connection */
        {HEADERS, END_HEADERS, 2, "\x83", 1},      /* a stream of the server */
        {HEADERS, END_HEADERS | HAS_PRIORITY, 1, "123", 3},
        {HEADERS, END_HEADERS, 1, "\x80", 1},               /* index 0 */
        {HEADERS, END_HEADERS, 1, "\xbe", 1},               /* an entry that is not there */
        {HEADERS, END_HEADERS, 1, "\x83\x40\x03", 3},       /* ends inside a name */
        {HEADERS, END_HEADERS, 1, "\x83\x10\x01k\x7f", 5},  /* inside a length */
        {HEADERS, END_HEADERS, 1, "\x83\x10\x01k\x05v", 6}, /* inside a value */
        {HEADERS, END_HEADERS, 1, "\xff\xff\xff\xff\xff\xff\x7f", 7}, /* a large integer */
    };
    (void)state;
    for (size_t i = 0; i < sizeof frames / sizeof *frames; i++) {
        struct wire w = open_wire();
        put_frame(&w, frames[i].type, frames[i].flags, frames[i].stream, frames[i].payload,
                  frames[i].length);
        put_frame(&w, PING, 0, 0, "12345678", 8);
        assert_int_equal(outcome_at(&w, SECOND), MOE_FRAMES_MALFORMED);
        free(w.bytes);
    }
    struct wire w = open_wire(); /* another frame, another stream inside a block */
    put_frame(&w, HEADERS, 0, 1, "\x83", 1);
    size_t length = w.length;
    put_frame(&w, DATA, 0, 1, "x", 1);
    assert_int_equal(outcome_at(&w, SECOND), MOE_FRAMES_MALFORMED);
    w.length = length;
    put_frame(&w, CONTINUATION, END_HEADERS, 3, "\x83", 1);
    assert_int_equal(outcome_at(&w, SECOND), MOE_FRAMES_MALFORMED);
    w.length = sizeof preface - 1; /* no SETTINGS */
    put_frame(&w, PING, 0, 0, "12345678", 8);
    assert_int_equal(outcome_at(&w, SECOND), MOE_FRAMES_MALFORMED);
    free(w.bytes);
}

/* Follows pieces of a buffer, as the relay does. Returns what goes to the client. */
static struct wire follow_in_pieces(struct moe_frames_back *back, struct moe_frames *f,
                                    const struct wire *w)
{
    struct wire out = {.bytes = malloc(WIRE_MAX)};
    uint8_t buffer[64];
    size_t kept = 0;
    for (size_t at = 0; at < w->length;) {
        size_t part = 1 + random_below(40), ready = 0;
        part = part < w->length - at ? part : w->length - at;
        memcpy(buffer + kept, w->bytes + at, part);
        size_t length = kept + part;
        moe_frames_follow(back, f, buffer, &ready, &length, SECOND);
        put(&out, buffer, ready);
        kept = length - ready;
        assert_true(kept < 9);
        memmove(buffer, buffer + ready, kept);
        at += part;
    }
    assert_int_equal(kept, 0);
    return out;
}

static void the_way_back_shows_what_ends(void **state)
{
    struct seen s = {.data = NULL};
    struct moe_frames f = {.events = &events, .ctx = &s};
    struct moe_frames_back back = {0};
    struct wire w = {.bytes = malloc(WIRE_MAX)};
    uint8_t payload[300] = {0};
    (void)state;
    for (uint32_t i = 0; i < 200; i++) {
        put_frame(&w, SETTINGS, 1, 0, NULL, 0);
        put_frame(&w, HEADERS, END_HEADERS, 2 * i + 1, payload, 20);
        put_frame(&w, DATA, 0, 2 * i + 1, payload, random_below(300));
        put_frame(&w, i % 2 == 0 ? HEADERS : RST_STREAM, i % 2 == 0 ? END_STREAM | END_HEADERS : 0,
                  2 * i + 1, payload, 4);
    }
    struct wire sent = follow_in_pieces(&back, &f, &w);
    assert_true(moe_frames_at_border(&back));
    assert_int_equal(sent.length, w.length);
    assert_memory_equal(sent.bytes, w.bytes, w.length);
    /* One acknowledgement is not the server's to give: only the first is taken out. */
    back.drops_ack = true;
    free(sent.bytes);
    f = (struct moe_frames){.events = &events, .ctx = &s};
    sent = follow_in_pieces(&back, &f, &w);
    assert_int_equal(sent.length, w.length - 9);
    assert_memory_equal(sent.bytes, w.bytes + 9, w.length - 9);
    assert_false(back.drops_ack);
    free(sent.bytes);
    assert_int_equal(s.ended, 400);
    assert_int_equal(f.outcome, MOE_FRAMES_OK);
    free(w.bytes);
}

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(honest_calls_pass_in_any_pieces),
        cmocka_unit_test(a_fast_client_stays_below_the_rates),
        cmocka_unit_test(floods_are_noticed),
        cmocka_unit_test(small_messages_have_a_rate_in_large_frames),
        cmocka_unit_test(rapid_resets_are_noticed),
        cmocka_unit_test(resets_of_the_server_count_as_well),
        cmocka_unit_test(large_header_blocks_are_noticed),
        cmocka_unit_test(malformed_frames_end_the_connection),
        cmocka_unit_test(the_way_back_shows_what_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
