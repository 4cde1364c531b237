/* SPDX-License-Identifier: Apache-2.0 */
/* The ring's protocol, in all interleavings of a small world and in random ones of a larger world.
 * Both sides of the ring and the registry of regions are the daemon's own code. A daemon with
 * steps, views and a device is a model, and so are the two clients: one keeps the rules, and one
 * writes what it likes to its memory.
 *
 *     ring_sim --all                 # every interleaving of each small world
 *     ring_sim --seeds 20000         # random ones, with more requests and faults
 *     ring_sim --seed 17             # one of them, printed
 *     ring_sim --guards 20000        # every guard, switched off, has to be found
 *
 * The state of the world has no pointers but those into itself, and its place is fixed. So a copy
 * of its bytes is a state to return to, and a hash of them tells a state that was seen. */
#include "base/status.h"
#include "regions/caller.h"
#include "regions/checks.h"
#include "regions/device_caller.h"
#include "regions/registry.h"
#include "regions/server.h"
#include "support/random.h"

#include "moe/types.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CLIENTS = 2,
    HONEST = 0, /* this client keeps the rules, CLIENTS - 1 does not */
    ROGUE = 1,
    PARTS = 2, /* tokens of a request; each is a part where a request has several */
    STEPS = 2,
    JOBS = 4,
    CELLS = 16,   /* of a client's memory, 4 bytes each: 32 bytes of x and y for each entry */
    BAD = 1 << 30 /* a row that the daemon's checks refuse */
};

static const struct moe_ring_layer layer = {.hidden = 1, .top_k = 1, .max_tokens = PARTS};

/* ---------------------------------------------------------------------- guards */

static enum moe_guard off = MOE_GUARD_COUNT;

static const struct {
    const char *name, *promise;
} guards[] = {
#define X(name, promise) {#name, promise},
#include "simulation/guards.h"
#undef X
};

bool moe_guard_is_off(enum moe_guard guard)
{
    return off == guard;
}

/* ----------------------------------------------------------------------- world */

enum part_state { PART_QUEUED, PART_RUNS, PART_ENDED };

/* A request that the daemon has taken. */
struct job {
    bool used, failed, cancelled;
    uint8_t parts, client, entry;
    uint32_t use;
    enum part_state part[PARTS];
    struct moe_ring_tensor tensors[MOE_RING_ROLES];
    void *at[MOE_RING_ROLES];
    bool has_snapshot[PARTS];
    uint32_t snapshot[PARTS]; /* the rows in the lane, and in host memory when a view has ended */
    uint64_t good, *good_at;  /* what the device stores */
};

enum step_state { STEP_NONE, STEP_RUNS, STEP_GOOD, STEP_BAD_TOKEN, STEP_ABORTED, STEP_LATE_ROWS };

struct step {
    enum step_state state;
    bool aborting, forgotten; /* its view ended; the host does not wait for it */
    uint8_t job, part;
    uint32_t order;
};

/* How often each kind of event may still happen. */
struct limits {
    uint8_t requests[CLIENTS], rogue_writes, aborts, bad_tokens, releases, deaths, kicks, closes,
        registrations;
};

struct client {
    bool dead, registered, closing, saw_end;
    uint32_t region, alias; /* numbers; 0 = none */
    uint8_t made;           /* requests */
    uint32_t value[MOE_RING_ENTRIES];
};

struct world {
    struct limits left;
    uint8_t parts;
    bool has_device, daemon_dead, view;
    bool excused; /* something has happened for which a request may fail */
    struct client clients[CLIENTS];
    struct moe_ring_caller callers[CLIENTS];
    bool by_device; /* the honest client's device submits and waits */
    struct moe_ring_device_entry lanes[MOE_RING_ENTRIES];
    uint32_t memory[CLIENTS][CELLS];
    bool lent[CELLS]; /* of the honest client: the daemon may write */
    struct moe_ring rings[CLIENTS];
    /* the daemon */
    struct moe_ring_server servers[CLIENTS];
    struct moe_regions regions;
    bool mapped[CLIENTS][2], joined[CLIENTS], leaving[CLIENTS]; /* the region and its alias */
    uint32_t order, unmapped; /* number of the region that is being unmapped; 0 = none */
    struct job jobs[JOBS];
    struct step steps[STEPS];
};

static struct world w;
static const char *broken; /* the first promise that did not hold */
static bool verbose;

static void check(bool holds, const char *promise)
{
    if (!holds && broken == NULL)
        broken = promise;
}

static void *base_of(uint32_t client)
{
    return w.memory[client];
}

static void add_region(uint32_t c, bool is_alias)
{
    struct moe_region_spec spec = {
        .name = is_alias ? "alias" : "data", .bytes = sizeof w.memory[c], .inode = c + 1};
    uint32_t number;
    struct moe_status st = moe_regions_reserve(&w.regions, c, &spec, &number);
    if (moe_failed(&st))
        return;
    moe_regions_commit(&w.regions, number, base_of(c));
    w.mapped[c][is_alias] = true;
    *(is_alias ? &w.clients[c].alias : &w.clients[c].region) = number;
}

static void create(const struct limits *limits, uint8_t parts, bool has_device, bool by_device)
{
    const struct moe_regions_limits budget = {
        .bytes = 1000, .identity_bytes = 500, .identity_clients = 1, .client_regions = 2};
    static const char *const names[CLIENTS] = {"honest", "rogue"};
    memset(&w, 0, sizeof w);
    broken = NULL;
    w.left = *limits;
    w.parts = parts;
    w.has_device = has_device;
    w.by_device = by_device;
    w.view = true;
    moe_regions_init(&w.regions, &budget);
    for (uint32_t c = 0; c < CLIENTS; c++) {
        uint32_t number;
        struct moe_status st = moe_regions_join(&w.regions, names[c], &number);
        check(!moe_failed(&st) && number == c, "a client can join");
        w.joined[c] = true;
        moe_ring_caller_init(&w.callers[c], &w.rings[c]);
        moe_ring_server_init(&w.servers[c], &w.rings[c]);
        add_region(c, false);
        w.clients[c].registered = true;
    }
}

/* ------------------------------------------------- what the daemon does to memory */

/* The cell that `at` points to, for a job of `client`; NULL: it must not be touched. */
static uint32_t *cell(uint32_t client, const void *at)
{
    uintptr_t first = (uintptr_t)base_of(client), p = (uintptr_t)at;
    bool inside = p >= first && p + sizeof(uint32_t) <= first + sizeof w.memory[client];
    check(inside, "the daemon touches only regions of the client");
    check(w.mapped[client][0] || w.mapped[client][1], "the daemon touches only mapped memory");
    check(!w.daemon_dead, "a dead daemon touches nothing");
    return inside ? &w.memory[client][(p - first) / sizeof(uint32_t)] : NULL;
}

static void *tensor_at(const struct job *j, enum moe_ring_role role)
{
    if (!moe_guard_is_off(MOE_GUARD_A_REQUEST_IS_READ_ONCE))
        return j->at[role];
    return (char *)base_of(j->client) + w.rings[j->client].requests[j->entry].tensors[role].offset;
}

/* The one gather: rows of a part, from the region into the lane. False: they are refused. */
static bool gather(struct job *j, uint32_t part)
{
    bool again = j->has_snapshot[part];
    if (again && !moe_guard_is_off(MOE_GUARD_A_RUN_READS_THE_SNAPSHOT))
        return true;
    const uint32_t *from = cell(j->client, (char *)tensor_at(j, MOE_RING_X) + 4 * part);
    j->snapshot[part] = from == NULL ? 0 : *from;
    j->has_snapshot[part] = true;
    if (!again && j->snapshot[part] == BAD)
        return false;
    check(j->snapshot[part] != BAD, "a step uses only rows that were checked");
    return true;
}

static uint32_t layer_of(uint32_t x)
{
    return x | 1 << 20;
}

static void scatter(struct job *j, uint32_t part)
{
    uint32_t *to = cell(j->client, (char *)tensor_at(j, MOE_RING_Y) + 4 * part);
    if (to == NULL)
        return;
    if (j->client == HONEST)
        check(w.lent[to - w.memory[HONEST]], "the daemon writes only to memory that it was lent");
    *to = layer_of(j->snapshot[part]);
}

/* --------------------------------------------------------------- the daemon's acts */

static void complete(uint32_t client, uint32_t entry, struct moe_status st)
{
    struct moe_ring_details details = {.reason = st.reason};
    const struct moe_ring_server *s = &w.servers[client];
    check(w.joined[client], "a ring is mapped while a request of it is in flight");
    uint64_t word = w.rings[client].completed[entry].word;
    check(client != HONEST || moe_ring_sequence_of(word) != s->taken[entry] ||
              moe_ring_code_of(word) == st.code,
          "a request has one result");
    (void)moe_ring_server_complete(&w.servers[client], entry, st.code, &details);
    if (moe_guard_is_off(MOE_GUARD_ENDS_ARE_SIGNALLED))
        w.rings[client].ends[entry] = 0;
}

static void take(uint32_t client)
{
    struct moe_ring_request q;
    uint32_t entry, use, free_job = 0;
    void *at[MOE_RING_ROLES];
    while (free_job < JOBS && w.jobs[free_job].used)
        free_job++;
    if (free_job == JOBS || !moe_ring_server_take(&w.servers[client], &entry, &q))
        return;
    struct moe_status st = moe_ring_check(&q, &layer);
    if (!moe_failed(&st))
        st = moe_regions_take(&w.regions, client, q.tensors, at, &use);
    if (moe_failed(&st)) {
        complete(client, entry, st);
        return;
    }
    struct job *j = &w.jobs[free_job];
    memset(j, 0, sizeof *j);
    j->used = true;
    j->client = (uint8_t)client;
    j->entry = (uint8_t)entry;
    j->use = use;
    j->parts = w.parts;
    memcpy(j->at, at, sizeof at);
    memcpy(j->tensors, q.tensors, sizeof q.tensors);
    j->good = moe_ring_server_good(&w.servers[client], entry, &j->good_at);
    for (uint32_t i = 0; i < JOBS; i++) {
        const struct job *other = &w.jobs[i];
        uintptr_t mine = (uintptr_t)at[MOE_RING_Y], theirs = (uintptr_t)other->at[MOE_RING_Y];
        check(other == j || !other->used || mine + 8 <= theirs || theirs + 8 <= mine,
              "no two requests in flight write the same byte");
    }
}

static uint32_t steps_of(uint32_t job)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < STEPS; i++)
        n += w.steps[i].state != STEP_NONE && w.steps[i].job == job && !w.steps[i].forgotten;
    return n;
}

/* A part of a job goes into a step. A request has one part, of all its tokens, or one per token. */
static void begin(uint32_t job, uint32_t part, struct step *s)
{
    struct job *j = &w.jobs[job];
    bool good = true;
    for (uint32_t t = part; t < (j->parts == 1 ? PARTS : part + 1); t++)
        good = gather(j, t) && good;
    if (!good) {
        j->failed = true;
        return;
    }
    j->part[part] = PART_RUNS;
    *s = (struct step){
        .state = STEP_RUNS, .job = (uint8_t)job, .part = (uint8_t)part, .order = w.order++ % 4};
}

static void rows_of(const struct step *s)
{
    struct job *j = &w.jobs[s->job];
    for (uint32_t t = s->part; t < (j->parts == 1 ? PARTS : s->part + 1u); t++)
        scatter(j, t);
}

/* The device ends a step. */
static void finish(struct step *s, enum step_state outcome)
{
    struct job *j = &w.jobs[s->job];
    struct moe_ring_part part = {.succeeded = outcome != STEP_ABORTED,
                                 .tokens_ok = outcome != STEP_BAD_TOKEN,
                                 .is_last = true,
                                 .earlier_good = !j->failed};
    for (uint32_t i = 0; i < j->parts; i++)
        part.is_last = part.is_last && (i == s->part || j->part[i] != PART_QUEUED);
    for (uint32_t i = 0; i < STEPS; i++) { /* the other step: earlier, or still to come */
        const struct step *o = &w.steps[i];
        if (o == s || o->state == STEP_NONE || o->job != s->job)
            continue;
        part.is_last = part.is_last && o->state != STEP_RUNS;
        part.earlier_good = part.earlier_good && o->state == STEP_GOOD;
    }
    s->state = outcome;
    if (!w.has_device)
        return;
    if (outcome == STEP_GOOD)
        rows_of(s);
    if (moe_ring_device_completes(&part)) {
        w.rings[j->client].ends[j->entry] = !moe_guard_is_off(MOE_GUARD_ENDS_ARE_SIGNALLED);
        __atomic_store_n(j->good_at, j->good, __ATOMIC_RELEASE);
    }
}

/* The host sees the end of a step. */
static void reap(struct step *s)
{
    struct job *j = &w.jobs[s->job];
    bool again = s->state == STEP_ABORTED;
    if (s->forgotten || s->state == STEP_LATE_ROWS) {
        if (s->state == STEP_LATE_ROWS)
            rows_of(s);
        s->state = STEP_NONE;
        return;
    }
    if (moe_guard_is_off(MOE_GUARD_THE_DEVICE_DECIDES) && s->aborting)
        again = true;
    j->part[s->part] = again ? PART_QUEUED : PART_ENDED;
    j->failed = j->failed || s->state == STEP_BAD_TOKEN;
    enum step_state ended = s->state;
    s->state = STEP_NONE;
    if (w.has_device || ended != STEP_GOOD || again)
        return;
    if (moe_guard_is_off(MOE_GUARD_ROWS_COME_FIRST)) {
        s->state = STEP_LATE_ROWS;
        s->forgotten = true;
    } else {
        rows_of(s);
    }
}

static bool is_settled(const struct job *j)
{
    bool all = true;
    for (uint32_t i = 0; i < j->parts; i++)
        all = all && j->part[i] == PART_ENDED;
    return j->used && (all || j->failed || j->cancelled) && steps_of((uint32_t)(j - w.jobs)) == 0;
}

/* A request ends. */
static void settle(struct job *j)
{
    struct moe_status st = moe_ok();
    bool all = true;
    for (uint32_t i = 0; i < j->parts; i++)
        all = all && j->part[i] == PART_ENDED;
    if (j->failed)
        st = moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONFINITE_LOGITS, "a token");
    else if (!all)
        st = moe_error(MOE_CANCELLED, MOE_REASON_ABORTED, "the client has left");
    j->used = false;
    bool there = w.joined[j->client];
    for (size_t i = 0; i < MOE_RING_ROLES; i++)
        there = there &&
                (j->tensors[i].region == 0 || moe_regions_has(&w.regions, j->tensors[i].region));
    check(there, "clients and regions stay while a request uses them");
    if (!there)
        return;
    moe_regions_put(&w.regions, j->client, j->use);
    complete(j->client, j->entry, st);
}

static void end_view(void)
{
    w.view = false;
    w.left.aborts--;
    for (uint32_t i = 0; i < STEPS; i++) {
        struct step *s = &w.steps[i];
        if (s->state != STEP_RUNS || s->forgotten)
            continue;
        s->aborting = true;
        if (moe_guard_is_off(MOE_GUARD_A_NEW_VIEW_WAITS)) {
            s->forgotten = true;
            w.jobs[s->job].part[s->part] = PART_QUEUED;
        }
    }
}

static bool may_form(void)
{
    bool idle = true;
    for (uint32_t i = 0; i < STEPS; i++)
        idle = idle && (w.steps[i].state == STEP_NONE || w.steps[i].forgotten);
    return !w.view && idle;
}

static void leave(uint32_t client)
{
    w.leaving[client] = true;
    moe_regions_leave(&w.regions, client);
    for (uint32_t i = 0; i < JOBS; i++)
        if (w.jobs[i].used && w.jobs[i].client == client)
            w.jobs[i].cancelled = true;
}

static void unmap(void)
{
    uint32_t number, client;
    uint64_t bytes;
    void *base;
    if (w.unmapped != 0) { /* it is unmapped without the lock */
        moe_regions_free(&w.regions, w.unmapped);
        w.unmapped = 0;
        return;
    }
    if (!moe_regions_unused(&w.regions, &number, &client, &base, &bytes))
        return;
    for (uint32_t c = 0; c < CLIENTS; c++) {
        if (w.clients[c].region == number)
            w.mapped[c][0] = false;
        if (w.clients[c].alias == number)
            w.mapped[c][1] = false;
    }
    w.unmapped = number;
}

/* -------------------------------------------------------------- the clients' acts */

static struct moe_ring_request request_of(uint32_t client, uint32_t entry)
{
    struct moe_ring_request q = {.tokens = PARTS, .hidden = 1, .dtype = MOE_DTYPE_F32};
    uint32_t region = w.clients[client].region;
    q.tensors[MOE_RING_X] =
        (struct moe_ring_tensor){.region = region, .offset = 32 * entry, .bytes = 4 * PARTS};
    q.tensors[MOE_RING_Y] =
        (struct moe_ring_tensor){.region = region, .offset = 32 * entry + 16, .bytes = 4 * PARTS};
    return q;
}

static uint32_t *x_of(uint32_t client, uint32_t entry)
{
    return &w.memory[client][8 * entry];
}

static void lend(uint32_t entry, bool lent)
{
    for (uint32_t t = 0; t < PARTS; t++)
        w.lent[8 * entry + 4 + t] = lent;
}

/* The daemon has completed the last request of an entry of the honest client's device. */
static bool lane_is_done(uint32_t entry)
{
    uint32_t sequence = w.lanes[entry].sequence;
    return sequence == 0 || moe_ring_sequence_of(w.rings[HONEST].completed[entry].word) == sequence;
}

static void submit_by_device(uint32_t entry, const struct moe_ring_request *q)
{
    bool done = lane_is_done(entry);
    w.lanes[entry].request = *q;
    moe_ring_device_submit(&w.lanes[entry], &w.rings[HONEST], entry);
    check(done || w.lanes[entry].refused != 0,
          "a device submits nothing before the daemon is done with what it gave up");
    if (w.lanes[entry].refused == 0)
        lend(entry, true);
}

static void submit(uint32_t entry)
{
    struct client *c = &w.clients[HONEST];
    struct moe_ring_request q = request_of(HONEST, entry);
    c->value[entry] = ++c->made;
    for (uint32_t t = 0; t < PARTS; t++)
        x_of(HONEST, entry)[t] = c->value[entry] * PARTS + t;
    w.left.requests[HONEST]--;
    if (w.by_device) {
        submit_by_device(entry, &q);
        return;
    }
    lend(entry, true);
    moe_ring_caller_submit(&w.callers[HONEST], entry, &q);
}

static bool take_result(uint32_t entry, enum moe_code *code)
{
    struct moe_ring_device_entry *lane = &w.lanes[entry];
    if (!w.by_device)
        return moe_ring_caller_poll(&w.callers[HONEST], entry, code);
    if (!moe_ring_device_poll(lane, &w.rings[HONEST], entry))
        return false;
    *code = moe_ring_code_of(lane->result);
    return true;
}

static bool is_free(uint32_t entry)
{
    return w.by_device ? w.lanes[entry].waiting == 0 && lane_is_done(entry)
                       : moe_ring_caller_is_free(&w.callers[HONEST], entry);
}

static void poll_result(uint32_t entry)
{
    enum moe_code code;
    if (!take_result(entry, &code))
        return;
    const uint32_t *y = x_of(HONEST, entry) + 4;
    for (uint32_t t = 0; t < PARTS && code == MOE_OK; t++)
        check(y[t] == layer_of(w.clients[HONEST].value[entry] * PARTS + t),
              "a good answer has all rows of its request");
    check(code == MOE_OK || w.excused, "no request fails without a cause");
    if (is_free(entry))
        lend(entry, false);
}

/* The rogue's requests, and what it writes over them. */
enum rogue {
    ROGUE_GOOD,
    ROGUE_PAST_END,
    ROGUE_WRAPS,
    ROGUE_FOREIGN,
    ROGUE_OVERLAP,
    ROGUE_ALIAS,
    ROGUE_REQUESTS
};

static struct moe_ring_request rogue_request(enum rogue kind, uint32_t entry)
{
    struct moe_ring_request q = request_of(ROGUE, entry);
    struct moe_ring_tensor *y = &q.tensors[MOE_RING_Y];
    switch (kind) {
    case ROGUE_PAST_END: y->offset = sizeof w.memory[0]; break;
    case ROGUE_WRAPS: y->offset = UINT64_MAX - 15; break;
    case ROGUE_FOREIGN: y->region = w.clients[HONEST].region; break;
    case ROGUE_OVERLAP: y->offset = 16; break;
    case ROGUE_ALIAS:
        y->region = w.clients[ROGUE].alias;
        y->offset = 16;
        break;
    default: break;
    }
    return q;
}

/* -------------------------------------------------------------------- interleaving */

enum act {
    /* of the daemon */
    TAKE,
    BEGIN,
    FINISH,
    REAP,
    SETTLE,
    FORM,
    LEAVE,
    UNMAP,
    FORGET,
    /* of the honest client */
    SUBMIT,
    POLL,
    REUSE,
    SEE_END,
    WATCH,
    REGISTER,
    FAULTS, /* those below may happen, and need not */
    END_VIEW = FAULTS,
    BAD_TOKEN,
    RELEASE,
    CLIENT_DIES,
    DAEMON_DIES,
    KICK,
    CLOSE,
    ROGUE_SUBMIT,
    ROGUE_OVERWRITE,
    ROGUE_BAD_ROW,
    ROGUE_REGISTER,
};

static const char *const act_names[] = {
    "take",          "begin",          "finish",   "reap",     "settle",       "form",
    "leave",         "unmap",          "forget",   "submit",   "poll",         "reuse",
    "see end",       "watch",          "register", "end view", "bad token",    "release",
    "client dies",   "daemon dies",    "kick",     "close",    "rogue submit", "rogue overwrite",
    "rogue bad row", "rogue register",
};

struct choice {
    uint8_t act, a, b;
};

struct choices {
    struct choice list[96];
    size_t count;
};

static void offer(struct choices *to, bool possible, enum act act, uint32_t a, uint32_t b)
{
    if (possible && to->count < sizeof to->list / sizeof to->list[0])
        to->list[to->count++] = (struct choice){(uint8_t)act, (uint8_t)a, (uint8_t)b};
}

/* Steps of a session end in order. */
static bool is_oldest(const struct step *s)
{
    for (uint32_t i = 0; i < STEPS; i++) {
        const struct step *o = &w.steps[i];
        if (o != s && o->state == STEP_RUNS && (s->order - o->order) % 4 == 1)
            return false;
    }
    return true;
}

static void offer_steps(struct choices *to)
{
    for (uint32_t i = 0; i < STEPS; i++) {
        const struct step *s = &w.steps[i];
        bool runs = s->state == STEP_RUNS && (is_oldest(s) || s->forgotten);
        offer(to, runs, FINISH, i, STEP_GOOD);
        offer(to, runs && s->aborting, FINISH, i, STEP_ABORTED);
        offer(to, runs && w.left.bad_tokens > 0, BAD_TOKEN, i, 0);
        offer(to, s->state != STEP_NONE && s->state != STEP_RUNS, REAP, i, 0);
    }
    for (uint32_t i = 0; i < JOBS; i++) {
        const struct job *j = &w.jobs[i];
        offer(to, is_settled(j), SETTLE, i, 0);
        if (!j->used || j->failed || j->cancelled || !w.view)
            continue;
        for (uint32_t p = 0; p < j->parts; p++)
            if (j->part[p] == PART_QUEUED) { /* parts go in order */
                offer(to, w.steps[0].state == STEP_NONE || w.steps[1].state == STEP_NONE, BEGIN, i,
                      p);
                break;
            }
    }
}

static void offer_daemon(struct choices *to)
{
    for (uint32_t c = 0; c < CLIENTS; c++) {
        offer(to, w.joined[c] && !w.leaving[c], TAKE, c, 0);
        offer(to, w.joined[c] && !w.leaving[c] && w.clients[c].dead, LEAVE, c, 0);
        offer(to, w.joined[c] && !w.leaving[c] && !w.clients[c].dead && w.left.kicks > 0, KICK, c,
              0);
        offer(to, w.joined[c] && w.leaving[c], FORGET, c, 0);
    }
    offer_steps(to);
    offer(to, true, UNMAP, 0, 0);
    offer(to, may_form(), FORM, 0, 0);
    offer(to, w.view && w.left.aborts > 0, END_VIEW, 0, 0);
    offer(to, w.left.deaths > 0, DAEMON_DIES, 0, 0);
}

static void offer_honest(struct choices *to)
{
    struct client *c = &w.clients[HONEST];
    if (c->dead)
        return;
    for (uint32_t e = 0; e < MOE_RING_ENTRIES; e++) {
        const struct moe_ring_device_entry *lane = &w.lanes[e];
        bool idle = is_free(e), waits = w.callers[HONEST].waiting[e];
        offer(to, idle && w.lent[8 * e + 4], REUSE, e, 0);
        if (w.by_device) { /* a stream sleeps until it sees the signal; it submits in any case */
            waits = lane->waiting != 0 || lane->refused != 0;
            idle = !waits;
        }
        offer(to, idle && w.left.requests[HONEST] > 0, SUBMIT, e, 0);
        offer(to, waits && (!w.by_device || w.rings[HONEST].ends[e] != 0), POLL, e, 0);
    }
    offer(to, w.by_device && c->saw_end, WATCH, 0, 0);
    bool over = w.daemon_dead || !w.joined[HONEST];
    offer(to, over && !c->saw_end, SEE_END, 0, 0);
    offer(to, w.left.releases > 0, RELEASE, 0, 0);
    offer(to, w.left.deaths > 0, CLIENT_DIES, HONEST, 0);
    bool serves = !w.daemon_dead && w.joined[HONEST] && !w.leaving[HONEST];
    offer(to, serves && c->registered && w.left.closes > 0, CLOSE, HONEST, 0);
    offer(to, serves && c->closing && !moe_regions_has(&w.regions, c->region), REGISTER, HONEST, 0);
}

static void offer_rogue(struct choices *to)
{
    const struct client *c = &w.clients[ROGUE];
    if (c->dead || w.daemon_dead || !w.joined[ROGUE])
        return;
    for (uint32_t e = 0; e < MOE_RING_ENTRIES; e++)
        for (uint32_t kind = 0; kind < ROGUE_REQUESTS; kind++) {
            bool possible = kind != ROGUE_ALIAS || c->alias != 0;
            bool twin = kind == ROGUE_OVERLAP || kind == ROGUE_ALIAS; /* of entry 0 */
            offer(to, possible && twin == (e == 1) && w.left.requests[ROGUE] > 0, ROGUE_SUBMIT, e,
                  kind);
            offer(to, e == 0 && !twin && w.left.rogue_writes > 0, ROGUE_OVERWRITE, e, kind);
        }
    offer(to, w.left.rogue_writes > 0, ROGUE_BAD_ROW, 0, 0);
    bool serves = !w.leaving[ROGUE];
    offer(to, serves && w.left.registrations > 0, ROGUE_REGISTER, 0, 0);
    offer(to, serves && c->registered && w.left.closes > 0, CLOSE, ROGUE, 0);
    offer(to, w.left.deaths > 0, CLIENT_DIES, ROGUE, 0);
}

static void find_choices(struct choices *to)
{
    to->count = 0;
    if (!w.daemon_dead)
        offer_daemon(to);
    offer_honest(to);
    offer_rogue(to);
}

static void close_by_client(uint32_t client)
{
    struct client *c = &w.clients[client];
    uint32_t number;
    struct moe_status st = moe_regions_close(&w.regions, client, "data", &number);
    check(!moe_failed(&st), "an open region can be closed");
    c->registered = false;
    c->closing = true;
    w.left.closes--;
    w.excused = w.excused || client == HONEST;
}

static void apply_daemon(struct choice c)
{
    switch ((enum act)c.act) {
    case TAKE: take(c.a); break;
    case BEGIN: begin(c.a, c.b, &w.steps[w.steps[0].state != STEP_NONE]); break;
    case FINISH: finish(&w.steps[c.a], (enum step_state)c.b); break;
    case REAP: reap(&w.steps[c.a]); break;
    case SETTLE: settle(&w.jobs[c.a]); break;
    case FORM: w.view = true; break;
    case LEAVE: leave(c.a); break;
    case UNMAP: unmap(); break;
    case FORGET:
        if (moe_regions_forget(&w.regions, c.a))
            w.joined[c.a] = false;
        break;
    case END_VIEW: end_view(); break;
    case BAD_TOKEN:
        w.left.bad_tokens--;
        w.excused = true;
        finish(&w.steps[c.a], STEP_BAD_TOKEN);
        break;
    case DAEMON_DIES:
        w.left.deaths--;
        w.excused = w.daemon_dead = true;
        break;
    case KICK:
        w.left.kicks--;
        w.excused = true;
        leave(c.a);
        break;
    default: break;
    }
}

static void apply_client(struct choice c)
{
    struct moe_ring_caller *caller = &w.callers[HONEST];
    switch ((enum act)c.act) {
    case SUBMIT: submit(c.a); break;
    case POLL: poll_result(c.a); break;
    case REUSE: lend(c.a, false); break;
    case SEE_END:
        w.clients[HONEST].saw_end = true;
        moe_ring_caller_end(caller);
        break;
    case WATCH: moe_ring_caller_watch(caller, 0, UINT64_MAX); break;
    case REGISTER:
        w.clients[HONEST].closing = false;
        add_region(HONEST, false);
        w.clients[HONEST].registered = true;
        break;
    case RELEASE:
        w.left.releases--;
        w.excused = true;
        moe_ring_caller_watch(caller, 1, 0);
        break;
    case CLIENT_DIES:
        w.left.deaths--;
        w.clients[c.a].dead = true;
        break;
    case CLOSE: close_by_client(c.a); break;
    case ROGUE_SUBMIT: {
        struct moe_ring_request q = rogue_request((enum rogue)c.b, c.a);
        w.left.requests[ROGUE]--;
        moe_ring_caller_submit(&w.callers[ROGUE], c.a, &q);
        break;
    }
    case ROGUE_OVERWRITE:
        w.left.rogue_writes--;
        w.rings[ROGUE].requests[c.a] = rogue_request((enum rogue)c.b, c.a);
        break;
    case ROGUE_BAD_ROW:
        w.left.rogue_writes--;
        x_of(ROGUE, 0)[0] = BAD;
        break;
    case ROGUE_REGISTER:
        w.left.registrations--;
        add_region(ROGUE, true);
        break;
    default: break;
    }
}

static void apply(struct choice c)
{
    if (verbose)
        printf("  %s %u %u\n", act_names[c.act], c.a, c.b);
    apply_daemon(c);
    apply_client(c);
}

/* Nothing is left to happen but faults. */
static void check_rest(void)
{
    for (uint32_t e = 0; e < MOE_RING_ENTRIES; e++)
        check(w.clients[HONEST].dead || (!w.callers[HONEST].waiting[e] && !w.lanes[e].waiting),
              "every wait ends");
    if (w.daemon_dead)
        return;
    for (uint32_t i = 0; i < JOBS; i++)
        check(!w.jobs[i].used, "every request ends");
    for (uint32_t c = 0; c < CLIENTS; c++) {
        check(!w.leaving[c] || !w.joined[c], "a client that has left is forgotten");
        check(w.joined[c] || (!w.mapped[c][0] && !w.mapped[c][1]),
              "no memory of a client that has left is mapped");
    }
}

/* ---------------------------------------------------------------- every interleaving */

enum { SEEN_BITS = 22 };
static uint64_t *seen; /* hashes of states; 0 = free */
static size_t states;

static uint64_t hash_of_world(void)
{
    uint64_t h = 0x9e3779b97f4a7c15u, word;
    for (size_t i = 0; i + sizeof word <= sizeof w; i += sizeof word) {
        memcpy(&word, (const char *)&w + i, sizeof word);
        h = (h ^ word) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
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
    MOE_INVARIANT(before != NULL && depth < 2000);
    memcpy(before, &w, sizeof w);
    for (size_t i = 0; i < choices.count && broken == NULL; i++) {
        apply(choices.list[i]);
        uint64_t hash = hash_of_world();
        rests = rests && (choices.list[i].act >= FAULTS || hash == here);
        if (broken != NULL || (remember(hash) && !explore(depth + 1))) {
            printf("  from the end: %s %u %u\n", act_names[choices.list[i].act], choices.list[i].a,
                   choices.list[i].b);
            break;
        }
        memcpy(&w, before, sizeof w);
    }
    free(before);
    if (broken == NULL && rests)
        check_rest();
    return broken == NULL;
}

/* Small worlds: all that may happen in each. */
static const struct {
    const char *name;
    struct limits limits;
    uint8_t parts;
} worlds[] = {
    {"an end of a view and a release", {.requests = {2}, .aborts = 1, .releases = 1}, 1},
    {"two parts, and an end of a view", {.requests = {1}, .aborts = 1, .releases = 1}, 2},
    {"a bad token and two parts", {.requests = {1}, .bad_tokens = 1, .aborts = 1}, 2},
    {"a death and a release", {.requests = {2}, .deaths = 1, .releases = 1}, 1},
    {"a connection that the daemon ends", {.requests = {1}, .kicks = 1, .closes = 1}, 1},
    {"an unregistration", {.requests = {2}, .closes = 1, .releases = 1}, 1},
    {"a rogue", {.requests = {1, 2}, .rogue_writes = 1, .registrations = 1}, 1},
    {"a rogue, and an end of a view", {.requests = {0, 1}, .rogue_writes = 1, .aborts = 1}, 1},
    {"a rogue that dies", {.requests = {1, 1}, .deaths = 1, .closes = 1}, 1},
};

static bool run_all(bool quiet)
{
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++)
        for (int device = 0; device < 4; device++) {
            memset(seen, 0, sizeof *seen << SEEN_BITS);
            states = 0;
            create(&worlds[i].limits, worlds[i].parts, device % 2 == 1, device >= 2);
            bool good = explore(0);
            if (!quiet || !good)
                printf("%s, %s%s: %zu states%s%s\n", worlds[i].name,
                       device % 2 == 1 ? "with a device" : "host only",
                       device >= 2 ? ", a client's device" : "", states,
                       good ? "" : ", broken: ", good ? "" : broken);
            if (!good)
                return false;
        }
    return true;
}

/* -------------------------------------------------------------- random interleavings */

static bool run_seed(uint64_t seed)
{
    struct rng r = {seed};
    struct limits limits = {.requests = {(uint8_t)rng_range(&r, 3, 8), (uint8_t)rng_below(&r, 6)},
                            .rogue_writes = (uint8_t)rng_below(&r, 5),
                            .aborts = (uint8_t)rng_below(&r, 4),
                            .bad_tokens = (uint8_t)rng_below(&r, 3),
                            .releases = (uint8_t)rng_below(&r, 4),
                            .deaths = (uint8_t)rng_below(&r, 2),
                            .kicks = (uint8_t)rng_below(&r, 2),
                            .closes = (uint8_t)rng_below(&r, 3),
                            .registrations = (uint8_t)rng_below(&r, 2)};
    create(&limits, (uint8_t)rng_range(&r, 1, PARTS), rng_chance(&r, 50), rng_chance(&r, 50));
    for (uint32_t n = 0, idle = 0; idle < 400 && n < 4000 && broken == NULL; n++) {
        struct choices choices;
        find_choices(&choices);
        if (choices.count == 0)
            break;
        uint64_t before = hash_of_world();
        struct choice c = choices.list[rng_below(&r, (uint32_t)choices.count)];
        if (c.act >= FAULTS && !rng_chance(&r, 30))
            continue;
        apply(c);
        idle = hash_of_world() == before ? idle + 1 : 0;
    }
    if (broken == NULL)
        check_rest();
    if (broken != NULL)
        printf("seed %llu: broken: %s\n", (unsigned long long)seed, broken);
    return broken == NULL;
}

static bool run_seeds(uint64_t first, uint64_t count)
{
    for (uint64_t s = first; s < first + count; s++)
        if (!run_seed(s))
            return false;
    return true;
}

/* Every guard, switched off, breaks a promise; says where. */
static bool run_guards(uint64_t seeds)
{
    bool good = true;
    for (size_t i = 0; i < sizeof guards / sizeof guards[0]; i++) {
        off = (enum moe_guard)i;
        printf("without %s (%s)\n", guards[i].name, guards[i].promise);
        if (run_seeds(1, seeds)) {
            printf("  NOT FOUND in %llu seeds\n", (unsigned long long)seeds);
            good = false;
        }
        if (run_all(true)) {
            printf("  NOT FOUND in the small worlds\n");
            good = false;
        }
    }
    off = MOE_GUARD_COUNT;
    return good;
}

int main(int argc, char **argv)
{
    bool good = true;
    seen = calloc((size_t)1 << SEEN_BITS, sizeof *seen);
    MOE_INVARIANT(seen != NULL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 1; i < argc && good; i++) {
        uint64_t n = i + 1 < argc ? strtoull(argv[i + 1], NULL, 10) : 0;
        if (strcmp(argv[i], "--all") == 0) {
            good = run_all(false);
        } else if (strcmp(argv[i], "--seeds") == 0) {
            good = run_seeds(1, n);
        } else if (strcmp(argv[i], "--seed") == 0) {
            verbose = true;
            good = run_seed(n);
        } else if (strcmp(argv[i], "--guards") == 0) {
            good = run_guards(n);
        }
    }
    printf("%s; a state has %zu bytes\n", good ? "all promises hold" : "FAILED", sizeof w);
    free(seen);
    return good ? 0 : 1;
}
