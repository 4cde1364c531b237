/* SPDX-License-Identifier: Apache-2.0 */
/* Events in the order of virtual time, promises, and one run from its seed. */
#include "simulation/world.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

uint64_t rnd(struct world *w, uint64_t below)
{
    return below > 0 ? rng_next(&w->random) % below : 0;
}

bool chance(struct world *w, uint32_t permille)
{
    return rnd(w, 1000) < permille;
}

bool fault(struct world *w, uint32_t permille)
{
    return !w->quiet && chance(w, permille);
}

void check(struct world *w, bool holds, const char *promise)
{
    if (holds || w->broken != NULL)
        return;
    w->broken = promise;
    TRACE(w, "BROKEN: %s", promise);
}

/* --------------------------------------------------------------------------- events */

static void grow_events(struct world *w)
{
    size_t old = w->event_capacity, capacity = old == 0 ? 256 : old * 2;
    w->events = realloc(w->events, capacity * sizeof *w->events);
    w->free_events = realloc(w->free_events, capacity * sizeof *w->free_events);
    w->heap = realloc(w->heap, capacity * sizeof *w->heap);
    if (w->events == NULL || w->free_events == NULL || w->heap == NULL)
        abort();
    for (size_t i = capacity; i-- > old;)
        w->free_events[w->free_count++] = (uint32_t)i;
    w->event_capacity = capacity;
}

/* Valid until the next event is made. */
struct event *new_event(struct world *w, enum event_kind kind, uint32_t to)
{
    if (w->free_count == 0)
        grow_events(w);
    struct event *e = &w->events[w->free_events[w->free_count - 1]];
    e->kind = kind;
    e->to = e->from = to;
    e->process = e->epoch = e->number = 0;
    e->tokens = e->op = 0;
    e->ok = false;
    return e;
}

static bool earlier(const struct timed *a, const struct timed *b)
{
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

/* `e` is the event made last. */
void post(struct world *w, struct event *e, uint64_t delay)
{
    struct timed t = {w->now + delay, ++w->last_order, w->free_events[--w->free_count]};
    size_t at = w->heap_count++;
    MOE_INVARIANT(e == &w->events[t.event]);
    for (; at > 0 && earlier(&t, &w->heap[(at - 1) / 2]); at = (at - 1) / 2)
        w->heap[at] = w->heap[(at - 1) / 2];
    w->heap[at] = t;
}

static struct timed take_first(struct world *w)
{
    struct timed first = w->heap[0], last = w->heap[--w->heap_count];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < w->heap_count; at = child) {
        child += child + 1 < w->heap_count && earlier(&w->heap[child + 1], &w->heap[child]);
        if (!earlier(&w->heap[child], &last))
            break;
        w->heap[at] = w->heap[child];
    }
    w->heap[at] = last;
    return first;
}

/* --------------------------------------------------------------------------- a run */

static void deliver(struct world *w, const struct event *e)
{
    struct slot *s = &w->slots[e->to % SLOTS_MAX];
    if (e->kind >= E_THINK) {
        client_event(w, e);
    } else if (e->kind == E_LINK) {
        lose_link(w, e->from, e->to);
    } else if (e->kind >= E_COORDINATOR_LOST) {
        coordinator_event(w, e);
    } else if (e->kind == E_RESTART) {
        start_slot(w, s);
    } else if (s->alive && (e->process == 0 || e->process == s->process)) {
        if (e->kind == E_CRASH)
            crash_slot(w, s);
        else if (e->kind >= E_PREPARE)
            form_event(w, s, e);
        else if (e->kind == E_PART || e->kind == E_ASK)
            job_event(w, s, e);
        else
            slot_event(w, s, e);
        w->totals.inputs++;
    }
}

static void plan_faults(struct world *w)
{
    for (uint64_t n = rnd(w, 4); n > 0; n--)
        post(w, new_event(w, E_CRASH, (uint32_t)rnd(w, w->slot_count)), 20 + rnd(w, FAULTS_END));
    for (uint64_t n = rnd(w, 3); n > 0; n--) {
        struct event *e = new_event(w, E_LINK, (uint32_t)rnd(w, w->slot_count));
        e->from = (e->to + 1 + (uint32_t)rnd(w, w->slot_count - 1)) % w->slot_count;
        post(w, e, 20 + rnd(w, FAULTS_END));
    }
}

static void set_up(struct world *w, uint64_t seed, bool trace)
{
    w->seed = seed;
    w->random.state = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    w->trace = trace;
    w->slot_count = 2 + (uint32_t)rnd(w, SLOTS_MAX - 1);
    w->coordinator.copies = 1 + (uint32_t)rnd(w, w->slot_count);
    w->slow_from = (uint32_t)rnd(w, w->slot_count);
    w->slow_to = (uint32_t)rnd(w, w->slot_count);
    w->op_count = 1; /* 0 is no operation */
    for (uint32_t i = 0; i < w->slot_count; i++) {
        w->slots[i].index = i;
        start_slot(w, &w->slots[i]);
    }
    start_clients(w);
    plan_faults(w);
}

static void check_slot_at_end(struct world *w, const struct slot *s)
{
    uint32_t first = w->coordinator.in_force ? (uint32_t)__builtin_ctzll(w->coordinator.live) : 0;
    check(w, w->coordinator.in_force, "a group forms once faults have stopped");
    if (w->coordinator.in_force && (w->coordinator.live >> s->index & 1) == 0) {
        bool failed = (w->coordinator.join.failed >> s->index & 1) != 0;
        check(w, s->alive && s->epoch == 0 && (failed || !is_saved(&w->slots[first])),
              "a slot without the state waits for a Save only");
        return;
    }
    bool serves = s->alive && s->epoch != 0 && s->epoch == w->slots[first].epoch;
    check(w, serves, "a group forms once faults have stopped");
    check(w, s->waiting_count == 0 && s->pending_count == 0, "what waits ends");
    check(w, s->execution_count == 0 && s->ticket_count == 0, "tickets end");
    check(w, !moe_job_is_active(&s->job), "a job ends");
    check(w, !moe_job_blocks_weight_updates(&s->job), "weight updates are let go");
    check(w, !s->part.runs && !s->orphan.runs, "parts end");
    check(w, moe_batcher_tokens(s->batcher) == 0, "forward requests end");
    if (s->index == first)
        check(w, moe_sequencer_pending(s->sequencer) == 0 && moe_sequencer_calls(s->sequencer) == 0,
              "announced work gets its ticket");
    check(w, hash_state(s) == hash_state(&w->slots[first]), "slots have the same state");
}

/* What was answered under the lineage that is in force is in the state of all slots. */
static void check_answers_at_end(struct world *w)
{
    for (uint32_t i = 1; i < w->op_count; i++) {
        const struct op *op = &w->ops[i];
        if (!op->answered || op->kind == OP_FORWARD)
            continue;
        for (uint32_t s = 0; s < w->slot_count; s++)
            if (w->slots[s].epoch != 0 && op->done_lineage == w->slots[s].state.lineage)
                check(w, has_applied(&w->slots[s].state, (uint16_t)i),
                      "an answered call is in the state of every slot");
    }
}

static void check_end(struct world *w)
{
    for (uint32_t i = 0; i < CLIENTS; i++)
        check(w, !w->clients[i].busy, "every client gets its answer");
    for (uint32_t i = 0; i < w->slot_count; i++)
        check_slot_at_end(w, &w->slots[i]);
    check_answers_at_end(w);
    check_disk_at_end(w);
}

static void tear_down(struct world *w)
{
    for (uint32_t i = 0; i < w->slot_count; i++) {
        struct slot *s = &w->slots[i];
        moe_sequencer_destroy(s->sequencer);
        moe_batcher_destroy(s->batcher);
        moe_ledger_destroy(s->ledger);
        moe_ledger_destroy(s->job_records);
        moe_ledger_destroy(s->orphan_records);
    }
    for (size_t i = 0; i < CHECKPOINTS_MAX; i++)
        if (w->disk[i].used)
            moe_ledger_destroy(w->disk[i].records);
    free(w->events);
    free(w->free_events);
    free(w->heap);
    free(w);
}

bool run_world(uint64_t seed, bool trace, struct totals *totals, char *why, size_t capacity)
{
    struct world *w = calloc(1, sizeof *w);
    if (w == NULL)
        abort();
    set_up(w, seed, trace);
    while (w->heap_count > 0 && w->broken == NULL) {
        struct timed first = take_first(w);
        struct event e = w->events[first.event];
        w->free_events[w->free_count++] = first.event;
        w->now = first.at;
        w->quiet = w->now > FAULTS_END;
        check(w, w->now <= RUN_END, "the group comes to rest");
        deliver(w, &e);
    }
    if (w->broken == NULL)
        check_end(w);
    bool good = w->broken == NULL;
    if (!good)
        snprintf(why, capacity, "%s (at %" PRIu64 " ms)", w->broken, w->now);
    uint64_t *to = (uint64_t *)totals;
    const uint64_t *from = (const uint64_t *)&w->totals;
    for (size_t i = 0; i < sizeof *totals / sizeof *to; i++)
        to[i] += from[i];
    tear_down(w);
    return good;
}
