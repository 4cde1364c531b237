/* SPDX-License-Identifier: Apache-2.0 */
/* Counts the HTTP/2 frames that a client sends, before a server sees them. Pure: no I/O; time comes
 * in as an argument.
 *
 * A server pays for each frame, however small: so each sort of frame has a rate, as a token bucket.
 * A block of headers has a bound, both as it is sent and as it unfolds: HPACK (RFC 7541) lets one
 * byte stand for a field of 4 KiB. This walks HPACK without decoding it. The sizes that it keeps
 * are upper bounds; the order of the table is exact.
 *
 * It may also append one header field of its owner to the first block of each stream. The field
 * goes behind a field that has ended, so no client can make it part of another field.
 *
 * A connection may begin parked (park.c): until its first request, this answers the client's
 * frames, and notes what the server must learn later. */
#ifndef MOE_LISTENER_FRAMES_H
#define MOE_LISTENER_FRAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MOE_FRAMES_FIELD_BYTES = 96, /* an appended field */
    MOE_FRAMES_TOO_MANY = MOE_FRAMES_FIELD_BYTES + 1,
    MOE_FRAMES_HEAD_BYTES = 10,     /* a frame's head, and the length of its padding */
    MOE_FRAMES_BLOCK_BYTES = 65536, /* of one header block, sent or unfolded */
    MOE_HPACK_ENTRIES = 128,        /* a table of 4 KiB has no more: each counts 32 bytes */
};

enum moe_frames_outcome {
    MOE_FRAMES_OK,
    MOE_FRAMES_MALFORMED, /* not HTTP/2: the server would end the connection too */
    MOE_FRAMES_FLOOD,     /* too much of something: `reason` says what */
    MOE_FRAMES_NO_MEMORY, /* `began` failed */
};

/* What the owner learns. Every function may be NULL. */
struct moe_frames_events {
    /* A stream begins. Writes a header field in HPACK, a literal that needs no table, to `field`
     * (MOE_FRAMES_FIELD_BYTES). Returns its length; 0 = out of memory; MOE_FRAMES_TOO_MANY = the
     * client has too many open streams. */
    size_t (*began)(void *ctx, uint32_t stream, uint8_t *field);
    /* Bytes of DATA without padding, in any pieces. Returns how many small messages begin in them:
     * a frame may have thousands, and a server pays for each. */
    uint32_t (*data)(void *ctx, uint32_t stream, const uint8_t *bytes, size_t length);
    void (*half_closed)(void *ctx, uint32_t stream); /* END_STREAM of the client */
    void (*ended)(void *ctx, uint32_t stream);       /* RST_STREAM, or END_STREAM of the server */
};

/* What has a rate, as a token bucket. */
enum moe_frames_sort {
    MOE_FRAMES_RESETS,   /* RST_STREAM of the client */
    MOE_FRAMES_REFUSALS, /* RST_STREAM of the server */
    MOE_FRAMES_SETTINGS,
    MOE_FRAMES_CONTROL, /* PING, PRIORITY, empty DATA, unknown frames */
    MOE_FRAMES_WINDOWS, /* WINDOW_UPDATE */
    MOE_FRAMES_PIECES,  /* DATA of 1 to 63 bytes that others follow */
    MOE_FRAMES_SMALL,   /* small messages, as the owner counts them */
    MOE_FRAMES_HEADERS, /* bytes of unfolded headers */
    MOE_FRAMES_SORTS
};

/* ------------------------------------------------------------------ parked connections */

enum {
    MOE_PARK_KNOWN = 6,         /* settings of RFC 9113 have the identifiers 1 to 6 */
    MOE_PARK_OTHERS = 6,        /* further settings that are replayed; more are ignored */
    MOE_PARK_ANSWER_BYTES = 21, /* SETTINGS with two values; an answer to a PING has 17 bytes */
    /* The preface, SETTINGS with all of the above and the lowest table size, WINDOW_UPDATE. */
    MOE_PARK_REPLAY_BYTES = 24 + 9 + 6 * (MOE_PARK_KNOWN + MOE_PARK_OTHERS + 1) + 13,
};

/* A connection without a request. */
struct moe_park {
    bool parked;
    bool requests;         /* HEADERS are next: the server must be opened */
    uint8_t have;          /* bytes of `part` */
    uint8_t answer_bytes;  /* of `answer`; 0 = nothing is to be sent */
    uint8_t known, others; /* known: bit N - 1 stands for identifier N. others: a count */
    uint8_t part[8];       /* the setting, increment or PING that passes */
    uint8_t answer[MOE_PARK_ANSWER_BYTES];
    uint32_t max_streams, max_header_bytes; /* what the client learns; 0 = nothing */
    uint32_t window;                        /* sum of the increments of the connection's window */
    uint32_t lowest_table;                  /* the lowest SETTINGS_HEADER_TABLE_SIZE */
    uint32_t values[MOE_PARK_KNOWN + MOE_PARK_OTHERS]; /* the last value of each setting */
    uint16_t names[MOE_PARK_OTHERS];
};

struct moe_frames;
/* A new connection begins parked. The answer to its preface is SETTINGS with these limits, which
 * must be those of the server; 0 = no limit is sent. */
void moe_park_begin(struct moe_frames *f, uint32_t max_streams, uint32_t max_header_bytes);
/* At the first request (`requests`): the connection is no longer parked. Writes what the server
 * must get before the request, and returns its length. */
size_t moe_park_replay(struct moe_frames *f, uint8_t bytes[MOE_PARK_REPLAY_BYTES]);

/* ------------------------------------------------------------------ header blocks */

/* Where a walk through a header block stands. */
struct moe_hpack {
    uint8_t state, prefix; /* hpack.c */
    bool indexed;          /* the field enters the table */
    bool has_name;         /* the string that comes is the value */
    uint8_t shift;
    uint32_t value;    /* the integer so far */
    uint32_t left;     /* bytes of the string that have not come */
    uint32_t name;     /* bytes of the field's name */
    uint32_t unfolded; /* bytes of this block's fields, each with 32 more */
    uint32_t newest, count;
    struct {
        uint32_t name, size;
    } entries[MOE_HPACK_ENTRIES];
};
/* Walks on. False if the block is malformed or unfolds to more than MOE_FRAMES_BLOCK_BYTES. */
bool moe_hpack_walk(struct moe_hpack *h, const uint8_t *bytes, size_t length);
/* The block is over. False in the middle of a field. */
bool moe_hpack_end(struct moe_hpack *h);

/* Frames in one direction. All zero before the first byte. */
struct moe_frames {
    const struct moe_frames_events *events;
    void *ctx;                       /* of the events */
    enum moe_frames_outcome outcome; /* stays once it is not OK */
    const char *reason;              /* of a flood: "PING frames" */
    uint32_t preface;                /* bytes of it that have passed */
    bool settled;                    /* the first frame, SETTINGS, has come */
    uint32_t last_stream;

    /* The frame that passes. */
    uint8_t stage, type, flags;
    uint32_t stream;
    uint32_t content, padding; /* bytes to come */
    uint32_t priority;         /* bytes of HEADERS before the header block */

    /* The header block that is open. */
    uint32_t block_stream; /* 0 = none */
    uint32_t block_bytes, block_frames;
    bool block_is_first, block_ends_stream;
    uint8_t field[MOE_FRAMES_FIELD_BYTES];
    uint32_t field_length; /* 0 = none is to be appended */
    bool wants_room;       /* ... but the buffer was full */
    struct moe_hpack hpack;

    struct moe_park park;
    bool owes_ack; /* the client has not acknowledged the SETTINGS of moe_park_begin */

    uint64_t filled_ns;               /* when the buckets were filled up; 0 = never */
    int64_t tokens[MOE_FRAMES_SORTS]; /* in 1/1024 */
};

/* Looks at bytes *ready..*length of a buffer of `capacity` bytes, from client to server. Those
 * before *ready may be sent afterwards. The rest, the head of a frame or bytes that found no room
 * for an appended field, is to be given again at the start of a buffer.
 *
 * While the connection is parked, bytes before *ready are done with, and no one else gets them. A
 * scan stops at each answer: send `park.answer`, set `answer_bytes` to 0, and scan on. It also
 * stops at the first request, with `park.requests`.
 *
 * The acknowledgement of the SETTINGS of moe_park_begin is taken out, so *length may shrink. */
enum moe_frames_outcome moe_frames_scan(struct moe_frames *f, uint8_t *bytes, size_t *ready,
                                        size_t *length, size_t capacity, uint64_t now_ns);
/* True when the last scan stopped because an appended field found no room. */
static inline bool moe_frames_wants_room(const struct moe_frames *f)
{
    return f->wants_room;
}
/* True while a header block is open: the client owes the rest. */
static inline bool moe_frames_owes_headers(const struct moe_frames *f)
{
    return f->block_stream != 0;
}
/* Frames from server to client: finds the streams that end, and whether a frame could be put in. */
struct moe_frames_back {
    uint32_t left;  /* bytes of the frame that passes */
    bool drops_ack; /* the server's next acknowledgement of SETTINGS is taken out: park.c has sent
                       one */
};
/* Looks at bytes *ready..*length, as moe_frames_scan does. Calls `ended` for streams that the
 * server ends, and counts resets in `f`. The rest behind *ready is the beginning of a frame's head.
 */
void moe_frames_follow(struct moe_frames_back *b, struct moe_frames *f, uint8_t *bytes,
                       size_t *ready, size_t *length, uint64_t now_ns);
static inline bool moe_frames_at_border(const struct moe_frames_back *b)
{
    return b->left == 0;
}

/* GOAWAY with ENHANCE_YOUR_CALM, from a server that has seen `last_stream`. */
enum { MOE_FRAMES_GOAWAY_BYTES = 17 };
void moe_frames_goaway(uint32_t last_stream, uint8_t bytes[MOE_FRAMES_GOAWAY_BYTES]);

#endif
