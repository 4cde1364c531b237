/* SPDX-License-Identifier: Apache-2.0 */
/* Masks of a session, in all interleavings of small worlds and in random ones of a larger world.
 * What a slot believes of the others is the backend's own code (kernels/common/masks.h). Steps,
 * one store or load at a time, connections and the coordinator are models.
 *
 *     mask_sim --all                 # every interleaving of each small world
 *     mask_sim --seeds 20000         # random ones, with more faults
 *     mask_sim --seed 17             # one of them, printed
 *     mask_sim --guards 20000        # every guard, switched off, has to be found
 */
#include "simulation/world.h"
#include "support/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name, *promise;
} guards[] = {
#define X(name, promise) {#name, promise},
#include "simulation/guards.h"
#undef X
};

struct world w;
const char *broken;
enum moe_guard guard_off = MOE_GUARD_COUNT;
static bool verbose; /* prints each act */

const char *const act_names[] = {
    "begin", "go on", "give up", "handle", "meet",    "part",    "deliver", "see",
    "form",  "kill",  "stop",    "resume", "suspect", "timeout", "refill",  "drop",
};

bool moe_guard_is_off(enum moe_guard guard)
{
    return guard_off == guard;
}

void check(bool holds, const char *promise)
{
    if (!holds && broken == NULL)
        broken = promise;
}

void create(uint8_t slots, uint8_t steps, struct kind kind, const struct limits *limits)
{
    memset(&w, 0, sizeof w);
    w.slots = slots;
    w.steps = steps;
    w.bare = kind.bare;
    w.far = kind.far;
    w.lines = kind.lines;
    w.quick = kind.quick;
    w.left = *limits;
    broken = NULL;
    for (uint8_t s = 0; s < slots; s++) {
        w.process[s] = (struct process){.used = true, .slot = s, .over = true};
        w.coordinator.member[s] = s;
    }
}

/* ---------------------------------------------------------------- choices */

static void offer(struct choices *to, bool possible, enum act act, uint32_t a, uint32_t b)
{
    if (!possible)
        return;
    MOE_INVARIANT(to->count < sizeof to->list / sizeof to->list[0]);
    to->list[to->count++] = (struct choice){(uint8_t)act, (uint8_t)a, (uint8_t)b, 0};
}

/* In a narrow world each kind of fault has one victim. */
static bool may_fail(const struct process *p, uint8_t slot)
{
    return !w.narrow || p->slot == slot;
}

static void offer_process(struct choices *to, const struct process *p)
{
    uint32_t n = number_of(p);
    bool waits = p->run.active && !can_go_on(p);
    bool prepares = p->messages > 0 && p->message[0].kind == PREPARE;
    offer(to, may_begin(p), BEGIN, n, false);
    offer(to, may_begin(p) && w.left.others > 0, BEGIN, n, true);
    offer(to, p->run.active && !waits, GO_ON, n, 0);
    offer(to, waits && has_cause(p), GIVE_UP, n, 0);
    offer(to, waits && w.left.timeouts > 0 && may_fail(p, 0), TIMEOUT, n, 0);
    offer(to, p->messages > 0 && !(prepares && p->meets), HANDLE, n, 0);
    offer(to, p->meets && can_meet(p), MEET, n, 0);
    offer(to, p->meets && !can_meet(p) && has_cause(p), PART, n, 0);
    for (uint32_t from = 0; from < PROCESSES; from++) {
        offer(to, w.notices[n][from] > 0, DELIVER, n, from);
        if (w.lines && w.notices[n][from] > 1 && moe_guard_is_off(MOE_GUARD_LINES_KEEP_ORDER)) {
            offer(to, true, DELIVER, n, from);
            to->list[to->count - 1].nth = 1;
        }
    }
    offer(to, w.left.stops > 0 && may_fail(p, 0), STOP, n, 0);
    bool has_view = !p->over || p->run.active || p->meets;
    offer(to, w.left.drops > 0 && may_fail(p, 0) && p->joined && !has_view, DROP, n, 0);
}

static void offer_slot(struct choices *to, uint8_t slot)
{
    const struct process *p = &w.process[w.coordinator.member[slot]];
    bool known = !(w.coordinator.lost & bit(slot));
    offer(to, known && p->dead, SEE, slot, 0);
    offer(to, known && p->stopped, SUSPECT, slot, 0);
    offer(to, !known && w.left.refills > 0 && !w.process[PROCESSES - 1].used, REFILL, slot, 0);
}

void find_choices(struct choices *to)
{
    to->count = 0;
    for (uint32_t n = 0; n < PROCESSES; n++) {
        const struct process *p = &w.process[n];
        if (runs(p))
            offer_process(to, p);
        bool lives = p->used && !p->dead && may_fail(p, (uint8_t)(w.slots - 1));
        offer(to, lives && w.left.kills > 0, KILL, n, 0);
        offer(to, p->stopped && w.left.resumes > 0, RESUME, n, 0);
    }
    for (uint8_t s = 0; s < w.slots; s++)
        offer_slot(to, s);
    offer(to, may_form(), FORM, 0, 0);
}

static void apply_fault(struct choice c)
{
    switch ((enum act)c.act) {
    case KILL:
        w.left.kills--;
        die(&w.process[c.a]);
        break;
    case STOP:
        w.left.stops--;
        w.process[c.a].stopped = true;
        break;
    case RESUME:
        w.left.resumes--;
        w.process[c.a].stopped = false;
        break;
    case SUSPECT: lose(c.a); break;
    case TIMEOUT:
        w.left.timeouts--;
        give_up(&w.process[c.a], true);
        break;
    case REFILL:
        w.left.refills--;
        refill(c.a);
        break;
    case DROP:
        w.left.drops--;
        drop_session(&w.process[c.a]);
        break;
    default: break;
    }
}

void apply(struct choice c)
{
    struct process *p = &w.process[c.a];
    switch ((enum act)c.act) {
    case BEGIN:
        w.left.others = (uint8_t)(w.left.others - c.b);
        begin(p, c.b);
        break;
    case GO_ON: go_on(p); break;
    case GIVE_UP: give_up(p, false); break;
    case HANDLE: handle(p); break;
    case MEET: meet(p, true); break;
    case PART: meet(p, false); break;
    case DELIVER: deliver(p, c.b, c.nth); break;
    case SEE: lose(c.a); break;
    case FORM: form(); break;
    default: apply_fault(c); break;
    }
}

static bool takes_part(const struct process *p)
{
    return (w.coordinator.live & bit(p->slot)) != 0 &&
           &w.process[w.coordinator.member[p->slot]] == p;
}

/* The process that the step waits for. */
static const struct process *awaited(const struct process *p)
{
    return &w.process[p->run.member[p->run.peer]];
}

/* Two processes that the coordinator has lost may wait for each other: here, no message and no
 * other link tells them. */
void check_rest(void)
{
    for (uint8_t n = 0; n < PROCESSES; n++)
        if (w.process[n].stopped) /* its peers wait for their budget, and the coordinator for it */
            return;
    if (w.bare && w.coordinator.forms) /* a slot that has left is missed for a budget */
        return;
    check(!w.coordinator.forms, "a view forms, or ends");
    if (!w.coordinator.serves) /* this world ends; else a later view tells those that are lost */
        return;
    for (uint8_t n = 0; n < PROCESSES; n++) {
        const struct process *p = &w.process[n];
        bool member = takes_part(p) || (p->run.active && takes_part(awaited(p)));
        check(!member || !(p->run.active || p->meets), "every wait ends");
    }
    for (uint8_t s = 0; s < w.slots; s++)
        check(!(w.coordinator.live & bit(s)) || w.process[w.coordinator.member[s]].steps == w.steps,
              "a view that serves runs its steps");
}

/* ---------------------------------------------------------------- every interleaving */

enum { SEEN_BITS = 24 };
static uint64_t *seen; /* hashes of states; 0 = free */
static size_t states;

static uint64_t mix(uint64_t h, const void *from, size_t bytes)
{
    uint64_t word;
    for (size_t i = 0; i < bytes; i += sizeof word) {
        word = 0;
        memcpy(&word, (const char *)from + i, bytes - i < sizeof word ? bytes - i : sizeof word);
        h = (h ^ word) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    return h;
}

uint64_t hash_of_world(void)
{
    uint64_t h = mix(0x9e3779b97f4a7c15u, &w, offsetof(struct world, masks));
    for (uint32_t p = 0; p < PROCESSES; p++) {
        const struct moe_masks *m = &w.masks[p];
        h = mix(h, m, offsetof(struct moe_masks, said_epoch));
        h = mix(h, m->said_epoch, SLOTS * sizeof m->said_epoch[0]);
        h = mix(h, m->said_lost, SLOTS * sizeof m->said_lost[0]);
        for (uint32_t from = 0; from < PROCESSES; from++)
            h = mix(h, w.notice[p][from], w.notices[p][from] * sizeof w.notice[p][from][0]);
    }
    return h == 0 ? 1 : h;
}

/* True if the state was not there. */
static bool remember(uint64_t hash)
{
    size_t mask = ((size_t)1 << SEEN_BITS) - 1, i = hash & mask;
    while (seen[i] != 0 && seen[i] != hash)
        i = (i + 1) & mask;
    if (seen[i] == hash)
        return false;
    seen[i] = hash;
    states++;
    MOE_INVARIANT(states < mask / 4 * 3);
    return true;
}

static bool explore(uint32_t depth)
{
    struct choices choices;
    find_choices(&choices);
    uint64_t here = hash_of_world();
    bool rests = true;
    struct world *before = malloc(sizeof *before);
    MOE_INVARIANT(before != NULL && depth < 4000);
    memcpy(before, &w, sizeof w);
    for (size_t i = 0; i < choices.count && broken == NULL; i++) {
        apply(choices.list[i]);
        uint64_t hash = hash_of_world();
        rests = rests && (choices.list[i].act >= FAULTS || hash == here);
        if (broken != NULL || (remember(hash) && !explore(depth + 1))) {
            if (verbose)
                printf("  from the end: %s %u %u\n", act_names[choices.list[i].act],
                       choices.list[i].a, choices.list[i].b);
            break;
        }
        memcpy(&w, before, sizeof w);
    }
    free(before);
    if (broken == NULL && rests)
        check_rest();
    return broken == NULL;
}

/* The first view serves; no step has begun, and no fault has happened. */
static void form_first(void)
{
    bool goes_on = true;
    while (goes_on) {
        struct choices choices;
        find_choices(&choices);
        goes_on = false;
        for (size_t i = 0; i < choices.count && !goes_on; i++) {
            goes_on = choices.list[i].act >= HANDLE && choices.list[i].act < FAULTS;
            if (goes_on)
                apply(choices.list[i]);
        }
    }
}

/* Small worlds: all that may happen in each. */
static const struct {
    const char *name;
    uint8_t slots, steps;
    bool narrow; /* from the first view on */
    struct kind kind;
    struct limits limits;
} worlds[] = {
    {"two slots, a refused step", 2, 2, 0, {0}, {.others = 1}},
    {"two slots, a death", 2, 2, 0, {0}, {.kills = 1}},
    {"two slots, a death, epochs far apart", 2, 1, 0, {.far = true}, {.kills = 1}},
    {"two slots, an abort", 2, 2, 0, {0}, {.others = 1, .timeouts = 1}},
    {"two slots, a late writer", 2, 1, 0, {0}, {.stops = 1, .resumes = 1, .refills = 1}},
    {"three slots, a death", 3, 1, 0, {0}, {.kills = 1}},
    {"three slots, a death, no commit", 3, 1, 0, {.bare = true}, {.kills = 1}},
    {"three slots, a death, epochs far apart", 3, 1, 1, {.far = true}, {.kills = 1}},
    {"three slots, a death and an abort", 3, 1, 1, {0}, {.kills = 1, .timeouts = 1}},
    {"three slots, a death and a stop", 3, 1, 1, {0}, {.kills = 1, .stops = 1, .resumes = 1}},
    {"two slots, a refused step, over lines", 2, 2, 0, {.lines = true}, {.others = 1}},
    {"two slots, a death, over lines", 2, 2, 0, {.lines = true}, {.kills = 1}},
    {"two slots, a late writer, over lines",
     2,
     1,
     1,
     {.lines = true},
     {.stops = 1, .resumes = 1, .refills = 1}},
    {"three slots, a death, over lines", 3, 1, 1, {.lines = true}, {.kills = 1}},
    {"three slots, a death, quick", 3, 1, 1, {.quick = true}, {.kills = 1}},
    {"three slots, a death, no commit, quick",
     3,
     1,
     1,
     {.bare = true, .quick = true},
     {.kills = 1}},
    {"three slots, a death and a stop, quick",
     3,
     1,
     1,
     {.quick = true},
     {.kills = 1, .stops = 1, .resumes = 1}},
    {"two slots, a death, a dropped session", 2, 2, 0, {0}, {.kills = 1, .drops = 1}},
    {"three slots, a death, a dropped session", 3, 1, 1, {0}, {.kills = 1, .drops = 1}},
    {"three slots, the same, over lines", 3, 1, 1, {.lines = true}, {.kills = 1, .drops = 1}},
};

static bool run_all(bool quiet)
{
    verbose = verbose || !quiet;
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
        memset(seen, 0, sizeof *seen << SEEN_BITS);
        states = 0;
        create(worlds[i].slots, worlds[i].steps, worlds[i].kind, &worlds[i].limits);
        if (worlds[i].narrow) {
            form_first();
            w.narrow = true;
        }
        bool good = explore(0);
        if (!quiet || !good)
            printf("%s: %zu states%s%s\n", worlds[i].name, states,
                   good ? "" : ", broken: ", good ? "" : broken);
        if (!good)
            return false;
    }
    return true;
}

/* -------------------------------------------------------------- random interleavings */

/* Often the process that acted last goes on, so one may be far ahead of the others. */
static struct choice pick(struct rng *r, const struct choices *from, uint32_t last)
{
    struct choice c = from->list[rng_below(r, (uint32_t)from->count)];
    bool stay = rng_chance(r, 70);
    for (uint32_t i = 0; stay && i < 8 && (c.act >= SEE || c.a != last); i++)
        c = from->list[rng_below(r, (uint32_t)from->count)];
    return c;
}

static bool run_seed(uint64_t seed)
{
    struct rng r = {seed};
    struct limits limits = {.kills = (uint8_t)rng_below(&r, 3),
                            .stops = (uint8_t)rng_below(&r, 3),
                            .resumes = (uint8_t)rng_below(&r, 4),
                            .timeouts = (uint8_t)rng_below(&r, 3),
                            .refills = (uint8_t)rng_below(&r, 2),
                            .others = (uint8_t)rng_below(&r, 3),
                            .drops = (uint8_t)rng_below(&r, 3)};
    uint8_t slots = (uint8_t)rng_range(&r, 2, SLOTS), steps = (uint8_t)rng_range(&r, 1, STEPS);
    struct kind kind = {.bare = rng_chance(&r, 40), .far = rng_chance(&r, 25)};
    kind.lines = rng_chance(&r, 30);
    kind.quick = !kind.lines && seed % 4 == 0;
    if (kind.quick)
        limits.others = 0; /* GPUs clear after a refused step, too: not modelled */
    uint32_t often = rng_chance(&r, 50) ? 40 : 8; /* faults, in percent */
    uint32_t last = 0;                            /* the process that acted last */
    create(slots, steps, kind, &limits);
    for (uint32_t n = 0, idle = 0; idle < 400 && n < 4000 && broken == NULL; n++) {
        struct choices choices;
        find_choices(&choices);
        if (choices.count == 0)
            break;
        uint64_t before = hash_of_world();
        struct choice c = pick(&r, &choices, last);
        if (c.act >= FAULTS && !rng_chance(&r, often))
            continue;
        last = c.act < SEE ? c.a : last;
        if (verbose)
            printf("  %s %u %u\n", act_names[c.act], c.a, c.b);
        apply(c);
        idle = hash_of_world() == before ? idle + 1 : 0;
    }
    if (broken == NULL)
        check_rest();
    if (broken != NULL)
        printf("seed %llu: broken: %s\n", (unsigned long long)seed, broken);
    return broken == NULL;
}

#include "support/simulation_main.h"
