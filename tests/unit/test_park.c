/* SPDX-License-Identifier: Apache-2.0 */
/* Parked connections as bytes: what a client without a request gets, and what the server learns
 * at the first request. */
#include "listener/frames.h"
#include "support/check.h"
#include "support/random.h"

#include <string.h>

#define SECOND    UINT64_C(1000000000)
#define PREFACE   "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#define SETTINGS  "\0\0\0\4\0\0\0\0\0"
#define ACK       "\0\0\0\4\1\0\0\0\0"
#define REQUEST   "\0\0\1\1\5\0\0\0\1\x82"
#define GREETING  "\0\0\xc\4\0\0\0\0\0\0\3\0\0\0\x80\0\6\0\0\x40\0" /* 128 streams, 16 KiB */
#define BYTES(s)  (s), sizeof(s) - 1
#define CLIENT(s) BYTES(PREFACE s)

enum { BUFFER = 4096 };

struct side {
    uint8_t bytes[BUFFER];
    size_t length;
};

struct run {
    enum moe_frames_outcome outcome;
    bool opened;
    struct side client, server; /* what each side gets */
    struct moe_frames f;
};

static void add(struct side *s, const void *bytes, size_t length)
{
    assert_true(s->length + length <= BUFFER);
    memcpy(s->bytes + s->length, bytes, length);
    s->length += length;
}

/* As the relay does: what is done with while parked goes to no one. */
static void feed(struct run *r, const char *bytes, size_t length, size_t piece)
{
    uint8_t buffer[BUFFER], replay[MOE_PARK_REPLAY_BYTES];
    size_t kept = 0;
    for (size_t at = 0; at < length && r->outcome == MOE_FRAMES_OK;) {
        size_t part = piece < length - at ? piece : length - at, ready = 0, from = 0;
        memcpy(buffer + kept, bytes + at, part);
        at += part;
        size_t end = kept + part;
        bool again;
        do {
            const bool parked = r->f.park.parked;
            r->outcome = moe_frames_scan(&r->f, buffer, &ready, &end, BUFFER, SECOND);
            add(&r->client, r->f.park.answer, r->f.park.answer_bytes);
            again = r->f.park.answer_bytes > 0;
            r->f.park.answer_bytes = 0;
            if (parked)
                from = ready;
            if (r->f.park.requests && !again) {
                again = r->opened = true;
                add(&r->server, replay, moe_park_replay(&r->f, replay));
            }
        } while (again && r->outcome == MOE_FRAMES_OK);
        add(&r->server, buffer + from, ready - from);
        kept = end - ready;
        memmove(buffer, buffer + ready, kept);
    }
}

static struct run run_pieces(const char *bytes, size_t length, size_t piece)
{
    struct run r = {.outcome = MOE_FRAMES_OK};
    moe_park_begin(&r.f, 128, 16384);
    feed(&r, bytes, length, piece);
    return r;
}

/* In pieces of every size from a byte to all. */
static void check(const char *bytes, size_t length, const char *client, size_t client_length,
                  const char *server, size_t server_length)
{
    for (size_t piece = 1; piece <= length; piece++) {
        struct run r = run_pieces(bytes, length, piece);
        assert_int_equal(r.outcome, MOE_FRAMES_OK);
        assert_int_equal(r.opened, server_length > 0);
        assert_int_equal(r.client.length, client_length);
        assert_memory_equal(r.client.bytes, client, client_length);
        assert_int_equal(r.server.length, server_length);
        assert_memory_equal(r.server.bytes, server, server_length);
    }
}

static void check_refused(const char *bytes, size_t length)
{
    for (size_t piece = 1; piece <= length; piece += length - 1) {
        struct run r = run_pieces(bytes, length, piece);
        assert_int_equal(r.outcome, MOE_FRAMES_MALFORMED);
        assert_int_equal(r.server.length, 0);
    }
}

static void an_idle_client_is_answered(void **state)
{
    (void)state;
    check(BYTES(PREFACE), BYTES(GREETING), BYTES(""));
    check(CLIENT(SETTINGS), BYTES(GREETING ACK), BYTES(""));
    check(CLIENT(SETTINGS ACK SETTINGS), BYTES(GREETING ACK ACK), BYTES(""));
    check(CLIENT(SETTINGS "\0\0\x8\6\0\0\0\0\0"
                          "12345678"
                          "\0\0\x8\6\1\0\0\0\0"
                          "abcdefgh"),
          BYTES(GREETING ACK "\0\0\x8\6\1\0\0\0\0"
                             "12345678"),
          BYTES(""));
    /* PRIORITY, GOAWAY with a text, an unknown frame */
    check(CLIENT(SETTINGS "\0\0\5\2\0\0\0\0\3\0\0\0\0\1"
                          "\0\0\xa\7\0\0\0\0\0\0\0\0\0\0\0\0\0ok"
                          "\0\0\1\x77\0\0\0\0\5x"),
          BYTES(GREETING ACK), BYTES(""));
}

static void a_request_brings_what_was_said_before(void **state)
{
    (void)state;
    check(CLIENT(SETTINGS REQUEST), BYTES(GREETING ACK), CLIENT(SETTINGS REQUEST));
    /* The first acknowledgement is for the relay, wherever it comes; the next for the server. */
    check(CLIENT(SETTINGS ACK REQUEST ACK), BYTES(GREETING ACK), CLIENT(SETTINGS REQUEST ACK));
    check(CLIENT(SETTINGS REQUEST ACK ACK), BYTES(GREETING ACK), CLIENT(SETTINGS REQUEST ACK));
    check(CLIENT(SETTINGS REQUEST SETTINGS ACK REQUEST), BYTES(GREETING ACK),
          CLIENT(SETTINGS REQUEST SETTINGS REQUEST));
    /* The last value of each setting, also of settings that no one knows here; one window. */
    check(CLIENT("\0\0\x18\4\0\0\0\0\0\0\4\0\1\0\0\0\2\0\0\0\0\xfe\3\0\0\0\1\0\5\0\0\x80\0"
                 "\0\0\4\x8\0\0\0\0\0\0\0\1\0"
                 "\0\0\xc\4\0\0\0\0\0\0\4\0\2\0\0\xfe\3\0\0\0\2"
                 "\0\0\4\x8\0\0\0\0\0\0\1\0\1" REQUEST),
          BYTES(GREETING ACK ACK),
          CLIENT("\0\0\x18\4\0\0\0\0\0\0\2\0\0\0\0\0\4\0\2\0\0\0\5\0\0\x80\0\xfe\3\0\0\0\2"
                 "\0\0\4\x8\0\0\0\0\0\0\1\1\1" REQUEST));
    /* A table of headers that shrank and grew. */
    check(CLIENT("\0\0\6\4\0\0\0\0\0\0\1\0\0\0\0"
                 "\0\0\6\4\0\0\0\0\0\0\1\0\0\x10\0" REQUEST),
          BYTES(GREETING ACK ACK), CLIENT("\0\0\xc\4\0\0\0\0\0\0\1\0\0\0\0\0\1\0\0\x10\0" REQUEST));
}

static void unknown_settings_take_bounded_memory(void **state)
{
    char bytes[24 + 9 + 6 * 200 + 10] = PREFACE "\0\x4\xb0\4\0\0\0\0";
    struct run r;
    (void)state;
    for (int i = 0; i < 200; i++) {
        bytes[24 + 9 + 6 * i] = 1;
        bytes[24 + 9 + 6 * i + 1] = (char)i;
        bytes[24 + 9 + 6 * i + 5] = (char)i;
    }
    memcpy(bytes + sizeof bytes - 10, REQUEST, 10);
    r = run_pieces(bytes, sizeof bytes, 100);
    assert_int_equal(r.outcome, MOE_FRAMES_OK);
    assert_int_equal(r.server.length, 24 + 9 + 6 * MOE_PARK_OTHERS + 10);
    assert_memory_equal(r.server.bytes + 33, bytes + 33, 6 * MOE_PARK_OTHERS);
}

static void a_full_replay_has_the_stated_size(void **state)
{
    struct moe_frames f = {.owes_ack = false};
    uint8_t bytes[MOE_PARK_REPLAY_BYTES];
    (void)state;
    moe_park_begin(&f, 0, 0);
    f.park.known = 63;
    f.park.values[0] = f.park.window = 1;
    f.park.others = MOE_PARK_OTHERS;
    assert_int_equal(moe_park_replay(&f, bytes), MOE_PARK_REPLAY_BYTES);
    assert_false(f.park.parked);
}

static void nothing_but_a_request_opens_a_stream(void **state)
{
    (void)state;
    check_refused(CLIENT(REQUEST));                                    /* no SETTINGS */
    check_refused(CLIENT(SETTINGS "\0\0\1\0\1\0\0\0\1x"));             /* DATA */
    check_refused(CLIENT(SETTINGS "\0\0\4\3\0\0\0\0\1\0\0\0\x8"));     /* RST_STREAM */
    check_refused(CLIENT(SETTINGS "\0\0\5\5\4\0\0\0\1\0\0\0\2\x82"));  /* PUSH_PROMISE */
    check_refused(CLIENT(SETTINGS "\0\0\1\x9\4\0\0\0\1\x82"));         /* CONTINUATION */
    check_refused(CLIENT(SETTINGS "\0\0\4\x8\0\0\0\0\1\0\0\0\1"));     /* window of a stream */
    check_refused(CLIENT(SETTINGS "\0\0\4\x8\0\0\0\0\0\0\0\0\0"));     /* by nothing */
    check_refused(CLIENT(SETTINGS "\0\0\4\x8\0\0\0\0\0\x7f\xff\0\1")); /* above 2^31 - 1 */
    check_refused(CLIENT(SETTINGS "\0\0\7\6\0\0\0\0\0"
                                  "1234567")); /* a short PING */
    check_refused(CLIENT(SETTINGS "\0\0\x8\6\0\0\0\0\1"
                                  "12345678"));                   /* of a stream */
    check_refused(CLIENT("\0\0\5\4\0\0\0\0\0\0\4\0\0\0"));        /* no whole setting */
    check_refused(CLIENT("\0\0\6\4\1\0\0\0\0\0\4\0\0\0\1"));      /* ACK with a setting */
    check_refused(CLIENT("\0\0\0\4\0\0\0\0\1"));                  /* of a stream */
    check_refused(CLIENT("\0\0\6\4\0\0\0\0\0\0\4\x80\0\0\0"));    /* window above 2^31 - 1 */
    check_refused(CLIENT("\0\0\6\4\0\0\0\0\0\0\2\0\0\0\2"));      /* push: 0 or 1 */
    check_refused(CLIENT("\0\0\6\4\0\0\0\0\0\0\5\0\0\x3f\xff"));  /* frames below 16 KiB */
    check_refused(CLIENT(SETTINGS "\0\0\4\7\0\0\0\0\0\0\0\0\0")); /* a short GOAWAY */
    check_refused(CLIENT(SETTINGS "\0\x40\1\x77\0\0\0\0\0x"));    /* above 16 KiB */
    check_refused(CLIENT(SETTINGS "\0\0\4\2\0\0\0\0\3\0\0\0\0")); /* a short PRIORITY */
}

/* The rates are those of frames.c: here, that they count while parked. */
static void floods_are_noticed_while_parked(void **state)
{
    static const struct {
        const char *bytes;
        size_t length;
        int allowed; /* at the start of a connection */
    } floods[] = {
        {BYTES(SETTINGS), 9}, /* the first one has been */
        {BYTES("\0\0\x8\6\0\0\0\0\0"
               "12345678"),
         200},
        {BYTES("\0\0\0\x77\0\0\0\0\0"), 200},
        {BYTES("\0\0\4\x8\0\0\0\0\0\0\0\0\1"), 5000},
    };
    (void)state;
    for (size_t i = 0; i < sizeof floods / sizeof *floods; i++) {
        struct run r = run_pieces(CLIENT(SETTINGS), BUFFER);
        for (int n = 0; n < floods[i].allowed; n++) {
            feed(&r, floods[i].bytes, floods[i].length, BUFFER);
            r.client.length = 0;
        }
        assert_int_equal(r.outcome, MOE_FRAMES_OK);
        feed(&r, floods[i].bytes, floods[i].length, BUFFER);
        assert_int_equal(r.outcome, MOE_FRAMES_FLOOD);
    }
}

/* Any order of such frames, in any pieces: the server gets one SETTINGS frame, then the request. */
static void random_beginnings_are_legal(void **state)
{
    static const struct {
        const char *bytes;
        size_t length;
    } frames[] = {{BYTES(SETTINGS)},
                  {BYTES("\0\0\x8\6\0\0\0\0\0"
                         "12345678")},
                  {BYTES("\0\0\4\x8\0\0\0\0\0\0\0\0\1")},
                  {BYTES("\0\0\5\2\0\0\0\0\3\0\0\0\0\1")},
                  {BYTES("\0\0\6\4\0\0\0\0\0\0\4\0\1\0\0")}};
    (void)state;
    for (int round = 0; round < 2000; round++) {
        struct side in = {.length = 0};
        size_t pings = 0, acks = 1;
        add(&in, CLIENT(SETTINGS));
        for (uint32_t n = random_below(7); n > 0; n--) {
            uint32_t i = random_below(5);
            add(&in, frames[i].bytes, frames[i].length);
            pings += i == 1;
            acks += i == 0 || i == 4;
        }
        add(&in, BYTES(REQUEST));
        struct run r =
            run_pieces((const char *)in.bytes, in.length, 1 + random_below((uint32_t)in.length));
        assert_int_equal(r.outcome, MOE_FRAMES_OK);
        assert_int_equal(r.client.length, 21 + 17 * pings + 9 * acks);
        assert_memory_equal(r.server.bytes, PREFACE, 24);
        assert_memory_equal(r.server.bytes + r.server.length - 10, REQUEST, 10);
    }
}

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_idle_client_is_answered),
        cmocka_unit_test(a_request_brings_what_was_said_before),
        cmocka_unit_test(unknown_settings_take_bounded_memory),
        cmocka_unit_test(a_full_replay_has_the_stated_size),
        cmocka_unit_test(nothing_but_a_request_opens_a_stream),
        cmocka_unit_test(floods_are_noticed_while_parked),
        cmocka_unit_test(random_beginnings_are_legal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
