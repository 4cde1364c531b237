/* SPDX-License-Identifier: Apache-2.0 */
/* Links between slots, and a coordinator that forms one view after the other. */
#include "simulation/world.h"

#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------------------- links */

/* A link keeps the order of its messages; different links do not. */
void send_to(struct world *w, uint32_t from, struct event *e)
{
    e->from = from;
    if (from == e->to) {
        post(w, e, 0);
        return;
    }
    if (w->link_epoch[from][e->to] >= e->epoch)
        return;
    bool slow = fault(w, from == w->slow_from && e->to == w->slow_to ? 300 : 30);
    uint64_t at = w->now + 1 + rnd(w, slow ? 60 : 4);
    uint64_t *last = &w->link_free_at[from][e->to];
    *last = at > *last ? at : *last;
    post(w, e, *last - w->now);
}

static void post_lost(struct world *w, uint32_t to, uint64_t epoch)
{
    struct event *e = new_event(w, E_LOST, to);
    e->epoch = epoch;
    post(w, e, 1 + rnd(w, 25));
}

void lose_link(struct world *w, uint32_t a, uint32_t b)
{
    uint64_t epoch = w->coordinator.epoch;
    if (!w->slots[a].alive || !w->slots[b].alive)
        return;
    TRACE(w, "link %u-%u is lost", a, b);
    w->totals.links++;
    w->link_epoch[a][b] = w->link_epoch[b][a] = epoch;
    post_lost(w, a, epoch);
    post_lost(w, b, epoch);
}

/* ------------------------------------------------------------------------ processes */

void start_slot(struct world *w, struct slot *s)
{
    static const uint32_t layers[1] = {LAYER};
    uint32_t index = s->index;
    struct moe_status st;
    if (s->alive)
        return;
    moe_sequencer_destroy(s->sequencer);
    moe_batcher_destroy(s->batcher);
    moe_ledger_destroy(s->ledger);
    moe_ledger_destroy(s->job_records);
    moe_ledger_destroy(s->orphan_records);
    memset(s, 0, sizeof *s);
    s->index = index;
    s->alive = true;
    s->process = ++w->last_process;
    reset_state(&s->state);
    st = moe_sequencer_create(&s->sequencer);
    if (!moe_failed(&st))
        st = moe_batcher_create(layers, 1, &s->batcher);
    if (!moe_failed(&st))
        st = moe_ledger_create(&s->ledger);
    MOE_INVARIANT(!moe_failed(&st));
    TRACE(w, "slot %u: process %llu", index, (unsigned long long)s->process);
    struct event *e = new_event(w, E_REGISTERED, index);
    e->number = s->process;
    post(w, e, 1 + rnd(w, 10));
}

static void forget_calls(struct world *w, struct slot *s)
{
    for (size_t i = 0; i < CALLS_MAX; i++)
        if (w->calls[i].used && w->calls[i].work.user == s)
            w->calls[i].used = false;
}

void crash_slot(struct world *w, struct slot *s)
{
    TRACE(w, "slot %u crashes", s->index);
    w->totals.crashes++;
    s->alive = false;
    forget_calls(w, s);
    for (uint32_t i = 0; i < w->slot_count; i++) {
        if (i == s->index)
            continue;
        if (chance(w, 500)) /* with its messages in flight */
            w->link_epoch[s->index][i] = w->coordinator.epoch;
        post_lost(w, i, w->coordinator.epoch);
    }
    struct event *e = new_event(w, E_COORDINATOR_LOST, s->index);
    e->ok = true;
    e->epoch = w->coordinator.epoch;
    post(w, e, 5 + rnd(w, 40));
    post(w, new_event(w, E_RESTART, s->index), 50 + rnd(w, 60));
}

/* ---------------------------------------------------------------------- coordinator */

void tell_coordinator_lost(struct world *w, const struct slot *s)
{
    struct event *e = new_event(w, E_COORDINATOR_LOST, s->index);
    e->epoch = s->epoch;
    post(w, e, 1 + rnd(w, 10));
}

static uint64_t all_slots(const struct world *w)
{
    return (UINT64_C(1) << w->slot_count) - 1;
}

static void tell_all(struct world *w, enum event_kind kind, uint64_t max_delay)
{
    for (uint32_t i = 0; i < w->slot_count; i++) {
        struct event *e = new_event(w, kind, i);
        e->epoch = w->coordinator.epoch;
        post(w, e, 2 + rnd(w, max_delay));
    }
}

static void try_to_form(struct world *w)
{
    if (w->coordinator.forming || w->coordinator.in_force ||
        w->coordinator.registered != all_slots(w))
        return;
    w->coordinator.epoch++;
    w->coordinator.forming = true;
    w->coordinator.reported = w->coordinator.ready = 0;
    TRACE(w, "coordinator: epoch %llu", (unsigned long long)w->coordinator.epoch);
    tell_all(w, E_PREPARE, 15);
}

static void coordinator_lost(struct world *w, const struct event *e)
{
    if (e->ok)
        w->coordinator.registered &= ~(UINT64_C(1) << e->to);
    if (!e->ok && e->epoch != w->coordinator.epoch)
        return;
    if (w->coordinator.forming || w->coordinator.in_force)
        tell_all(w, E_STOP, 20);
    w->coordinator.forming = w->coordinator.in_force = false;
    try_to_form(w);
}

void coordinator_event(struct world *w, const struct event *e)
{
    uint64_t bit = UINT64_C(1) << e->to;
    bool present = w->coordinator.forming && e->epoch == w->coordinator.epoch;
    switch (e->kind) {
    case E_REGISTERED:
        if (!w->slots[e->to].alive || w->slots[e->to].process != e->number)
            return;
        if (w->coordinator.forming || w->coordinator.in_force)
            coordinator_lost(w, &(struct event){.to = e->to, .ok = true});
        w->coordinator.registered |= bit;
        try_to_form(w);
        return;
    case E_COORDINATOR_LOST: coordinator_lost(w, e); return;
    case E_DIGEST:
        if (!present)
            return;
        w->coordinator.digests[e->to] = e->u.digest;
        w->coordinator.reported |= bit;
        if (w->coordinator.reported == all_slots(w))
            tell_all(w, E_ADOPT, 15);
        return;
    case E_READY:
        if (!present)
            return;
        w->coordinator.ready |= bit;
        if (w->coordinator.ready != all_slots(w))
            return;
        w->coordinator.forming = false;
        w->coordinator.in_force = true;
        w->totals.views++;
        tell_all(w, E_COMMIT, 1);
        return;
    default: return;
    }
}

/* -------------------------------------------------------------- a slot joins a view */

static void name_checkpoint(uint32_t name, char *text)
{
    text[0] = text[1] = '\0';
    if (name != 0) {
        text[0] = 'c';
        text[1] = (char)('A' + name);
        text[2] = '\0';
    }
}

uint32_t checkpoint_named(const char *text)
{
    return text[0] == '\0' ? 0 : (uint32_t)(text[1] - 'A');
}

static void send_digest(struct world *w, struct slot *s)
{
    struct event *e = new_event(w, E_DIGEST, s->index);
    struct moe_train_digest *d = &e->u.digest;
    e->epoch = s->forming;
    *d = (struct moe_train_digest){.config = 1,
                                   .group = 1,
                                   .epoch = s->last_epoch,
                                   .lineage = s->state.lineage,
                                   .weights_version = s->state.version,
                                   .nonce = s->process * UINT64_C(0x9e3779b97f4a7c15),
                                   .calls = moe_ledger_count(s->ledger),
                                   .record = moe_ledger_hash(s->ledger),
                                   .inconsistent = s->inconsistent,
                                   .unsaved = s->unsaved,
                                   .explicit_load = s->checkpoint_explicit_load};
    name_checkpoint(s->checkpoint, d->checkpoint);
    post(w, e, 1 + rnd(w, 10));
}

/* Trainers are about to be replaced: a share that still reads them goes first. */
static void adopt(struct world *w, struct slot *s)
{
    const struct moe_train_recovery *d = &s->adopting;
    if (!moe_job_frees_trainers(&s->job)) {
        struct event *e = new_event(w, E_READY_CHECK, s->index);
        e->epoch = s->forming;
        e->process = s->process;
        post(w, e, 2);
        return;
    }
    if (d->restart) {
        w->totals.lost_states += s->index == 0;
        restart_state(w, s, d);
    } else if (d->lineage != s->state.lineage) {
        s->state.lineage = d->lineage;
        s->state.version = d->weights_version;
        s->state.gradients = s->state.backwards = 0;
    }
    if (!d->restart) {
        s->checkpoint = checkpoint_named(d->checkpoint);
        s->checkpoint_explicit_load = d->explicit_load;
        s->unsaved = d->lost_steps;
    }
    TRACE(w, "slot %u: lineage %llu, version %llu%s", s->index,
          (unsigned long long)s->state.lineage, (unsigned long long)s->state.version,
          d->restart ? ", went back" : "");
    struct event *e = new_event(w, E_READY, s->index);
    e->epoch = s->forming;
    post(w, e, 1 + rnd(w, d->restart ? 20 : 5));
}

void form_event(struct world *w, struct slot *s, const struct event *e)
{
    if (e->kind == E_PREPARE && e->epoch <= s->forming)
        return;
    if (e->kind == E_PREPARE) {
        if (s->epoch != 0)
            end_view(w, s);
        s->forming = e->epoch;
        send_digest(w, s);
        return;
    }
    if (e->epoch != s->forming || e->epoch != w->coordinator.epoch)
        return;
    if (e->kind == E_ADOPT) {
        struct moe_status st =
            moe_train_choose_recovery(w->coordinator.digests, all_slots(w), &s->adopting);
        check(w, !moe_failed(&st), "a group can always decide from where to go on");
        adopt(w, s);
    } else if (e->kind == E_READY_CHECK) {
        adopt(w, s);
    } else if (w->coordinator.in_force) {
        begin_view(w, s, e->epoch, all_slots(w));
        for (uint32_t i = 0; i < w->slot_count; i++) /* lost while the view formed */
            if (w->link_epoch[i][s->index] >= e->epoch)
                post_lost(w, s->index, e->epoch);
    }
}
