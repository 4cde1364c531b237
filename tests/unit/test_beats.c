/* SPDX-License-Identifier: Apache-2.0 */
/* Two workers on different hosts, in simulated time: a peer that has stopped, or is cut off, is
 * lost soon, and one on a busy host or a slow network is not. */
#include "links/beats.h"

#include "base/clock.h"
#include "support/check.h"
#include "support/random.h"

#include <string.h>

enum { WORLDS = 300, RUN_MS = 20000, WAY = 4096, LONG_MS = 60000 };

/* What the hosts and the network do. */
struct rough {
    uint32_t way_ms, jitter_ms;              /* of each message */
    uint32_t stall_in, stall_min, stall_max; /* once in so many turns, a thread gets no processor */
    uint32_t lost_in; /* one packet of so many is lost: TCP sends it again, and all wait for it */
};

struct side {
    struct moe_beats beats;
    uint64_t turn_ms; /* the next one */
    struct {
        uint64_t at_ms; /* comes in then, behind the one before */
        struct moe_beat beat;
    } way[WAY]; /* to this side */
    uint32_t first, last;
};

struct world {
    struct rng rng;
    struct rough rough;
    uint64_t now_ms;
    struct side side[2];
    bool frozen; /* side 1 does nothing */
    bool cut;    /* messages of side 1 are lost */
};

static uint32_t between(struct world *w, uint32_t from, uint32_t to)
{
    return from + rng_below(&w->rng, to - from + 1);
}

static void send(struct world *w, uint32_t to, const struct moe_beat *beat)
{
    struct side *s = &w->side[to];
    uint64_t at = w->now_ms + between(w, w->rough.way_ms, w->rough.way_ms + w->rough.jitter_ms);
    if (to == 0 && w->cut)
        return;
    if (w->rough.lost_in != 0 && rng_below(&w->rng, w->rough.lost_in) == 0)
        at += 2 * w->rough.way_ms + 200;
    if (s->last != s->first && s->way[(s->last - 1) % WAY].at_ms > at)
        at = s->way[(s->last - 1) % WAY].at_ms;
    assert_true(s->last - s->first < WAY);
    s->way[s->last % WAY].at_ms = at;
    s->way[s->last++ % WAY].beat = *beat;
}

/* A millisecond of one side. True: it has lost the other one. */
static bool pass(struct world *w, uint32_t n)
{
    struct side *s = &w->side[n];
    uint64_t now_ns = w->now_ms * MOE_NS_PER_MS;
    struct moe_beat beat;
    for (; s->first != s->last && s->way[s->first % WAY].at_ms <= w->now_ms; s->first++)
        moe_beats_receive(&s->beats, &s->way[s->first % WAY].beat, now_ns);
    if (w->now_ms < s->turn_ms)
        return false;
    s->turn_ms = w->now_ms + MOE_BEATS_TURN_MS;
    if (w->rough.stall_in != 0 && rng_below(&w->rng, w->rough.stall_in) == 0)
        s->turn_ms += between(w, w->rough.stall_min, w->rough.stall_max);
    bool lost = moe_beats_judge(&s->beats);
    if (moe_beats_next(&s->beats, now_ns, &beat))
        send(w, 1 - n, &beat);
    return lost;
}

/* Whether side 0 has lost side 1 within that time. */
static bool run(struct world *w, uint64_t ms)
{
    bool lost = false;
    for (uint64_t end = w->now_ms + ms; w->now_ms < end && !lost; w->now_ms++) {
        lost = pass(w, 0);
        if (!w->frozen && pass(w, 1))
            w->side[1].turn_ms = UINT64_MAX; /* it ends its view */
    }
    return lost;
}

static const struct rough roughs[] = {
    {0, 0, 0, 0, 0, 0},         /* two quiet hosts */
    {100, 0, 0, 0, 0, 0},       /* the same, far apart */
    {0, 0, 700, 150, 250, 0},   /* a quiet host that stands still once in a while */
    {0, 3, 50, 1, 70, 0},       /* a host with other work */
    {1, 10, 5, 20, 90, 0},      /* a limit of half a processor */
    {0, 5, 4, 150, 250, 0},     /* far too much work */
    {200, 20, 50, 1, 50, 0},    /* far apart */
    {0, 1, 0, 0, 0, 400},       /* a bad line */
    {100, 5, 50, 1, 50, 400},   /* a bad line to a host far away */
    {40, 60, 10, 10, 100, 400}, /* all of it */
};
enum { ROUGHS = sizeof roughs / sizeof *roughs, QUIET = 0, FAR = 1 };

static void start(struct world *w, uint64_t seed, const struct rough *rough)
{
    memset(w, 0, sizeof *w);
    w->rng.state = seed;
    w->rough = *rough;
    for (uint32_t n = 0; n < 2; n++) {
        moe_beats_begin(&w->side[n].beats);
        w->side[n].turn_ms = rng_below(&w->rng, MOE_BEATS_TURN_MS);
    }
}

static struct world w;

static void a_peer_on_a_busy_host_or_a_slow_network_is_not_lost(void **state)
{
    (void)state;
    uint64_t seed = choose_seed();
    for (uint32_t n = 0; n < WORLDS; n++) {
        start(&w, seed + n, &roughs[n % ROUGHS]);
        bool lost = run(&w, RUN_MS);
        if (lost)
            print_message("  world %u: lost after %llu ms\n", n, (unsigned long long)w.now_ms);
        assert_false(lost);
        assert_true(w.side[0].beats.answered > 10);
    }
}

static void a_peer_that_stops_or_is_cut_off_is_lost_soon(void **state)
{
    (void)state;
    uint64_t seed = choose_seed();
    uint64_t worst[ROUGHS] = {0};
    for (uint32_t n = 0; n < WORLDS; n++) {
        const struct rough *rough = &roughs[n % ROUGHS];
        start(&w, seed + n, rough);
        w.rough.lost_in = 0; /* the packet before the last one could be lost */
        uint32_t known_ms = 200 + 2 * rough->way_ms + 10 * rough->stall_max;
        assert_false(run(&w, known_ms + rng_below(&w.rng, 2000)));
        w.frozen = n / ROUGHS % 2 == 0;
        w.cut = !w.frozen;
        uint64_t begun = w.now_ms;
        assert_true(run(&w, LONG_MS));
        uint64_t took = w.now_ms - begun;
        worst[n % ROUGHS] = took > worst[n % ROUGHS] ? took : worst[n % ROUGHS];
    }
    for (uint32_t r = 0; r < ROUGHS; r++)
        print_message("  network of %u ms, stalls up to %u ms: lost after at most %llu ms\n",
                      roughs[r].way_ms, roughs[r].stall_max, (unsigned long long)worst[r]);
    assert_true(worst[QUIET] <= 4 * MOE_BEATS_FIRST_MS + 3 * MOE_BEATS_TURN_MS);
    /* Its last beat is on the way, and comes in later than in the quiet world. */
    uint32_t way_ms = roughs[FAR].way_ms;
    assert_true(worst[FAR] <= way_ms + MOE_BEATS_LEAST_MS + 3 * way_ms + 3 * MOE_BEATS_TURN_MS);
}

/* Two stop one after the other: as the first is lost, the second is late. */
static void one_that_is_silent_for_less_is_late(void **state)
{
    (void)state;
    start(&w, 1, &roughs[0]);
    assert_false(run(&w, 5000));
    assert_false(moe_beats_is_late(&w.side[0].beats));
    w.frozen = true;
    for (; !moe_beats_is_late(&w.side[0].beats); w.now_ms++)
        assert_false(pass(&w, 0));
    assert_true(run(&w, 2 * MOE_BEATS_LEAST_MS));
}

static void nonsense_changes_nothing(void **state)
{
    (void)state;
    start(&w, 1, &roughs[0]);
    assert_false(run(&w, 1000));
    struct moe_beats before = w.side[0].beats;
    const struct moe_beat bad[] = {
        {0, 0, 0}, {before.seen, before.sent, 0}, {before.seen + 1, before.sent + 1, 0}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        moe_beats_receive(&w.side[0].beats, &bad[i], w.now_ms * MOE_NS_PER_MS);
    assert_memory_equal(&before, &w.side[0].beats, sizeof before);
    /* A peer that claims to have held a beat for long makes no round trip below 0. */
    const struct moe_beat held = {before.seen + 1, before.sent, UINT64_MAX};
    moe_beats_receive(&w.side[0].beats, &held, w.now_ms * MOE_NS_PER_MS);
    assert_true(w.side[0].beats.trip_ns <= before.trip_ns);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_peer_on_a_busy_host_or_a_slow_network_is_not_lost),
        cmocka_unit_test(a_peer_that_stops_or_is_cut_off_is_lost_soon),
        cmocka_unit_test(one_that_is_silent_for_less_is_late),
        cmocka_unit_test(nonsense_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
