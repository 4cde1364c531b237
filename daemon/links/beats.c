/* SPDX-License-Identifier: Apache-2.0 */
/* See beats.h. */
#include "links/beats.h"

#include "base/clock.h"

#define TURN_NS (MOE_BEATS_TURN_MS * MOE_NS_PER_MS)

void moe_beats_begin(struct moe_beats *b)
{
    *b = (struct moe_beats){.late_ns = MOE_BEATS_FIRST_MS * MOE_NS_PER_MS};
}

bool moe_beats_next(struct moe_beats *b, uint64_t now_ns, struct moe_beat *out)
{
    if (b->sent - b->answered >= MOE_BEATS_REMEMBERED)
        return false;
    b->sent++;
    b->sent_ns[b->sent % MOE_BEATS_REMEMBERED] = now_ns;
    *out = (struct moe_beat){
        .number = b->sent, .seen = b->seen, .held_ns = b->seen != 0 ? now_ns - b->seen_ns : 0};
    return true;
}

/* The shortest one is the distance, and follows a longer way slowly. Returns what this one took on
 * top. */
static uint64_t note_trip(struct moe_beats *b, uint64_t ns)
{
    if (b->trip_ns == 0 || ns < b->trip_ns)
        b->trip_ns = ns;
    else
        b->trip_ns += (ns - b->trip_ns) / MOE_BEATS_FADES;
    return ns - b->trip_ns;
}

static void note_delay(struct moe_beats *b, uint64_t ns)
{
    uint64_t before_ns = b->late_ns - b->late_ns / MOE_BEATS_FADES;
    b->late_ns = ns > before_ns ? ns : before_ns;
}

void moe_beats_receive(struct moe_beats *b, const struct moe_beat *beat, uint64_t now_ns)
{
    if (beat->number <= b->seen || beat->seen > b->sent)
        return; /* no beat of a worker that keeps to the rules */
    uint64_t pause_ns = b->seen != 0 ? now_ns - b->seen_ns : 0, extra_ns = 0;
    if (beat->seen > b->answered) {
        uint64_t total_ns = now_ns - b->sent_ns[beat->seen % MOE_BEATS_REMEMBERED];
        b->answered = beat->seen;
        extra_ns = note_trip(b, total_ns > beat->held_ns ? total_ns - beat->held_ns : 0);
    }
    uint64_t late_ns = pause_ns > TURN_NS ? pause_ns - TURN_NS : 0;
    note_delay(b, late_ns > extra_ns ? late_ns : extra_ns);
    b->seen = beat->number;
    b->seen_ns = now_ns;
    b->silent = 0;
}

static uint64_t limit_ns(const struct moe_beats *b)
{
    const uint64_t max_ns = 60 * MOE_NS_PER_S; /* of either time: more cannot overflow */
    uint64_t trip_ns = b->trip_ns < max_ns ? b->trip_ns : max_ns;
    uint64_t late_ns = b->late_ns < max_ns ? b->late_ns : max_ns;
    uint64_t least_ns = MOE_BEATS_LEAST_MS * MOE_NS_PER_MS + trip_ns + trip_ns / 2;
    uint64_t ns = MOE_BEATS_TIMES * late_ns + MOE_BEATS_SLACK_MS * MOE_NS_PER_MS;
    return ns > least_ns ? ns : least_ns;
}

static bool is_known(const struct moe_beats *b)
{
    return b->seen >= MOE_BEATS_KNOWN && b->answered != 0;
}

bool moe_beats_judge(struct moe_beats *b)
{
    if (b->silent < UINT32_MAX)
        b->silent++;
    return is_known(b) && b->silent * TURN_NS > limit_ns(b) + TURN_NS;
}

bool moe_beats_is_late(const struct moe_beats *b)
{
    return is_known(b) && b->silent * TURN_NS > limit_ns(b) / 2;
}
