/* SPDX-License-Identifier: Apache-2.0 */
/* The beats between two workers on different hosts, and the judge of the peer. Pure: times are
 * arguments. Workers of one host have pulse.h.
 *
 * Every turn each side sends a beat on the stream between them. A beat has a number, the number of
 * the peer's last beat, and how long ago that came in. So each side knows the round trip. The host
 * of the peer cannot be asked what the peer does, so the limit follows what is normal between the
 * two. It does not depend on how far away the peer is, but on delays of beats, and on what TCP
 * takes for a lost packet: a round trip and 200 ms. Silence is counted in turns of the judge: time
 * in which this process does not run counts as one turn at most. */
#ifndef MOE_LINKS_BEATS_H
#define MOE_LINKS_BEATS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    MOE_BEATS_TURN_MS = 20,
    /* A peer is lost after that much silence and one and a half round trips, or ... */
    MOE_BEATS_LEAST_MS = 300,
    MOE_BEATS_TIMES = 4,      /* ... so many of the longest delays ... */
    MOE_BEATS_SLACK_MS = 20,  /* ... and that, if this is more */
    MOE_BEATS_FIRST_MS = 100, /* taken for the longest delay in the beginning */
    MOE_BEATS_KNOWN = 3,      /* beats of a peer, and an answer, before it is judged */
    MOE_BEATS_REMEMBERED = 64,
    MOE_BEATS_FADES =
        1024, /* the longest delay loses this part of it with each beat: a half in 14 s */
};

/* One message. */
struct moe_beat {
    uint64_t number;  /* 1, 2, 3 ... of the sender */
    uint64_t seen;    /* the highest number of the receiver that has come in; 0 = none */
    uint64_t held_ns; /* since then */
};

/* One peer. */
struct moe_beats {
    uint64_t sent_ns[MOE_BEATS_REMEMBERED]; /* of beat n at [n % MOE_BEATS_REMEMBERED] */
    uint64_t sent, answered;                /* numbers of this side: the last, the last answered */
    uint64_t seen, seen_ns;                 /* the peer's last number, and when it came in */
    uint64_t trip_ns;                       /* the shortest round trip of late; 0 = not known */
    uint64_t late_ns; /* the longest delay of a beat, or of a round trip; fading */
    uint32_t silent;  /* turns since the last beat */
};

void moe_beats_begin(struct moe_beats *b);
/* The next beat to send, now. False: the peer has answered none for so long that no more is sent.
 */
bool moe_beats_next(struct moe_beats *b, uint64_t now_ns, struct moe_beat *out);
/* A beat of the peer has come in. */
void moe_beats_receive(struct moe_beats *b, const struct moe_beat *beat, uint64_t now_ns);
/* One turn of the judge. True: the peer is lost. */
bool moe_beats_judge(struct moe_beats *b);
/* Another peer is lost in this turn: whether this one is late, too. The view ends once, and the
 * next one should lack both. A peer that is there reports itself. */
bool moe_beats_is_late(const struct moe_beats *b);

#endif
