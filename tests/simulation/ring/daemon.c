/* SPDX-License-Identifier: Apache-2.0 */
/* A model of the daemon. It calls the real server's side of the ring and the real registry. */
#include "simulation/world.h"

#include <string.h>

static const struct moe_ring_layer layer = {.hidden = 1, .top_k = 1, .max_tokens = PARTS};

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

uint32_t layer_of(uint32_t x)
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

/* `by_device`: it has the completion already. */
static void complete(uint32_t client, uint32_t entry, struct moe_status st, bool by_device)
{
    struct moe_ring_details details = {.reason = st.reason};
    const struct moe_ring_server *s = &w.servers[client];
    check(w.ring_mapped[client], "a ring is mapped while a request of it is in flight");
    uint64_t word = w.rings[client].completed[entry].word;
    check(client != HONEST || moe_ring_sequence_of(word) != s->taken[entry] ||
              moe_ring_code_of(word) == st.code,
          "a request has one result");
    if (by_device) {
        check(st.code == MOE_OK, "a request that a device has completed has succeeded");
        (void)moe_ring_server_add_details(&w.servers[client], entry, &details);
        return;
    }
    (void)moe_ring_server_complete(&w.servers[client], entry, st.code, &details);
    if (moe_guard_is_off(MOE_GUARD_ENDS_ARE_SIGNALLED))
        w.rings[client].ends[entry] = 0;
}

/* The client may use memory of a request again that the host has not ended yet. */
static bool ends_soon(uint32_t client)
{
    bool found = false;
    for (uint32_t i = 0; i < JOBS; i++)
        found = found || (w.jobs[i].used && w.jobs[i].client == client && w.jobs[i].completed);
    return found;
}

void take(uint32_t client)
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
    if (st.reason == MOE_REASON_REGION_OVERLAP &&
        !MOE_GUARD(COMPLETED_MEMORY_IS_FREE, !ends_soon(client))) {
        moe_ring_server_give_back(&w.servers[client], entry);
        return;
    }
    if (moe_failed(&st)) {
        complete(client, entry, st, false);
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
    j->good = moe_ring_server_good(&w.servers[client], entry);
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

static bool completes(const struct job *j, uint32_t part)
{
    const uint32_t each = PARTS / j->parts; /* tokens */
    struct moe_request_part p = {
        .first = part * each, .count = each, .tokens = PARTS, .failed = j->failed};
    for (uint32_t i = 0; i < j->parts; i++)
        p.finished += j->part[i] == PART_ENDED ? each : 0;
    return moe_part_completes(&p);
}

void begin(uint32_t job, uint32_t part, struct step *s)
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
    *s = (struct step){.state = STEP_RUNS,
                       .job = (uint8_t)job,
                       .part = (uint8_t)part,
                       .order = w.order++ % 4,
                       .completes = completes(j, part)};
}

static void rows_of(const struct step *s)
{
    struct job *j = &w.jobs[s->job];
    for (uint32_t t = s->part; t < (j->parts == 1 ? PARTS : s->part + 1u); t++)
        scatter(j, t);
}

void finish(struct step *s, enum step_state outcome)
{
    struct job *j = &w.jobs[s->job];
    const bool good = MOE_GUARD(GOOD_NEEDS_THE_STEP, outcome != STEP_ABORTED) &&
                      MOE_GUARD(GOOD_NEEDS_ALL_TOKENS, outcome != STEP_BAD_TOKEN);
    s->state = outcome;
    if (!w.has_device)
        return;
    if (outcome == STEP_GOOD)
        rows_of(s);
    if (!s->completes || !good)
        return;
    check(w.ring_mapped[j->client], "a ring is mapped as long as a device may store to it");
    j->completed = true;
    *j->good.signal = !moe_guard_is_off(MOE_GUARD_ENDS_ARE_SIGNALLED);
    __atomic_store_n(j->good.word, j->good.value, __ATOMIC_RELEASE);
}

void reap(struct step *s)
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

bool is_settled(const struct job *j)
{
    bool all = true;
    for (uint32_t i = 0; i < j->parts; i++)
        all = all && j->part[i] == PART_ENDED;
    return j->used && (all || j->failed || j->cancelled) && steps_of((uint32_t)(j - w.jobs)) == 0;
}

/* A request ends. */
void settle(struct job *j)
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
    complete(j->client, j->entry, st, j->completed);
}

void end_view(void)
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

bool may_form(void)
{
    bool idle = true;
    for (uint32_t i = 0; i < STEPS; i++)
        idle = idle && (w.steps[i].state == STEP_NONE || w.steps[i].forgotten);
    return !w.view && idle;
}

void leave(uint32_t client)
{
    w.leaving[client] = true;
    moe_regions_leave(&w.regions, client);
    for (uint32_t i = 0; i < JOBS; i++)
        if (w.jobs[i].used && w.jobs[i].client == client)
            w.jobs[i].cancelled = true;
}

void unmap(void)
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
        if (w.clients[c].ring == number)
            w.ring_mapped[c] = false;
        if (w.clients[c].region == number)
            w.mapped[c][0] = false;
        if (w.clients[c].alias == number)
            w.mapped[c][1] = false;
    }
    w.unmapped = number;
}
