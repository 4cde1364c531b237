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

/* These slots have every expert: those of slot i are also on the next ones. */
static bool covers(const struct world *w, uint64_t slots)
{
    for (uint32_t i = 0; i < w->slot_count; i++) {
        uint64_t holders = 0;
        for (uint32_t c = 0; c < w->coordinator.copies; c++)
            holders |= UINT64_C(1) << (i + c) % w->slot_count;
        if ((holders & slots) == 0)
            return false;
    }
    return true;
}

static void tell_all(struct world *w, enum event_kind kind, uint64_t max_delay)
{
    for (uint32_t i = 0; i < w->slot_count; i++) {
        if ((w->coordinator.live >> i & 1) == 0)
            continue;
        struct event *e = new_event(w, kind, i);
        e->epoch = w->coordinator.epoch;
        e->number = w->coordinator.live;
        post(w, e, 2 + rnd(w, max_delay));
    }
}

/* Processes of the last view that was in force. Without one of them, no slot knows what was
 * answered last. */
static uint64_t find_members(const struct world *w, uint64_t slots)
{
    uint64_t members = 0;
    for (uint32_t i = 0; i < w->slot_count; i++)
        if ((slots >> i & 1) != 0 && w->slots[i].process == w->coordinator.members[i])
            members |= UINT64_C(1) << i;
    return members;
}

/* The state that a checkpoint has, and that all of these slots have; "" = there is none. */
static struct moe_saved_training find_saved(const struct world *w, uint64_t slots)
{
    const struct moe_saved_training none = {0};
    struct moe_saved_training first = saved_of(&w->slots[__builtin_ctzll(slots)]);
    for (uint32_t i = 0; i < w->slot_count; i++) {
        struct moe_saved_training other = saved_of(&w->slots[i]);
        if ((slots >> i & 1) != 0 && !moe_saved_training_same(&first, &other))
            return none;
    }
    return first;
}

/* Those of `waiting` that have read the state of the members; none before all have answered. */
static uint64_t find_readers(const struct world *w, uint64_t members, uint64_t waiting)
{
    struct moe_saved_training saved = find_saved(w, members);
    bool known = saved.calls != 0 && moe_saved_training_same(&saved, &w->coordinator.join.state);
    return known && (waiting & w->coordinator.join.awaited) == 0
               ? waiting & w->coordinator.join.read
               : 0;
}

/* The slots of the next view; 0 = none yet. Sometimes the coordinator knows less than it could. */
static uint64_t next_live(struct world *w)
{
    uint64_t able = w->coordinator.registered;
    if (w->now < w->coordinator.excluded_until)
        able &= ~w->coordinator.excluded;
    uint64_t members = find_members(w, able);
    bool alone = members != able && members != 0 && covers(w, members);
    if (alone && !fault(w, 100))
        able = members | find_readers(w, members, able & ~members);
    return able == all_slots(w) || (members != 0 && covers(w, able)) ? able : 0;
}

static void try_to_form(struct world *w)
{
    if (w->coordinator.forming || w->coordinator.in_force)
        return;
    w->coordinator.live = next_live(w);
    if (w->coordinator.live == 0)
        return;
    w->coordinator.epoch++;
    w->coordinator.forming = true;
    w->coordinator.reported = w->coordinator.ready = 0;
    TRACE(w, "coordinator: epoch %llu", (unsigned long long)w->coordinator.epoch);
    tell_all(w, E_PREPARE, 15);
}

static void grow_later(struct world *w)
{
    bool all = w->coordinator.in_force && w->coordinator.live == all_slots(w);
    bool over = w->coordinator.in_force && w->now > GROWS_END;
    if (w->coordinator.grows || all || over)
        return;
    w->coordinator.grows = true;
    post(w, new_event(w, E_GROW, 0), 5 + rnd(w, 10));
}

static void coordinator_lost(struct world *w, const struct event *e)
{
    if (e->ok)
        w->coordinator.registered &= ~(UINT64_C(1) << e->to);
    if (!e->ok && e->epoch != w->coordinator.epoch)
        return;
    bool member = (w->coordinator.live >> e->to & 1) != 0;
    if (e->ok && !member)
        return;
    if (w->coordinator.forming || w->coordinator.in_force)
        tell_all(w, E_STOP, 20);
    w->coordinator.forming = w->coordinator.in_force = false;
    try_to_form(w);
    grow_later(w);
}

static void order_to_read(struct world *w, uint32_t slot)
{
    struct event *e = new_event(w, E_READ, slot);
    e->process = w->slots[slot].process;
    e->number = w->coordinator.join.orders[slot] = ++w->coordinator.join.last_order;
    e->epoch = w->coordinator.epoch;
    e->u.saved = w->coordinator.join.state;
    post(w, e, 1 + rnd(w, 10));
    w->coordinator.join.asked |= UINT64_C(1) << slot;
    w->coordinator.join.awaited |= UINT64_C(1) << slot;
}

/* As in coordinator/members.c: slots that wait read the state that the members have. */
static void ask_to_read(struct world *w, uint64_t waiting)
{
    struct moe_saved_training saved = find_saved(w, w->coordinator.live);
    if (saved.calls != 0 && !moe_saved_training_same(&saved, &w->coordinator.join.state)) {
        w->coordinator.join.state = saved;
        w->coordinator.join.first_order = w->coordinator.join.last_order + 1;
        w->coordinator.join.awaited = w->coordinator.join.read = w->coordinator.join.failed = 0;
        w->coordinator.join.deadline = w->now + READ_LIMIT;
    }
    uint64_t others = waiting & ~w->coordinator.join.asked & ~w->coordinator.join.read;
    if (w->now >= w->coordinator.join.deadline) {
        w->coordinator.join.awaited = 0;
        w->coordinator.join.failed |= others;
    }
    others &= ~w->coordinator.join.failed;
    for (uint32_t i = 0; saved.calls != 0 && i < w->slot_count; i++)
        if ((others >> i & 1) != 0)
            order_to_read(w, i);
}

static void forget_readers(struct world *w, uint64_t slots)
{
    w->coordinator.join.asked &= ~slots;
    w->coordinator.join.awaited &= ~slots;
    w->coordinator.join.read &= ~slots;
    w->coordinator.join.failed &= ~slots;
}

static void read_done(struct world *w, const struct event *e)
{
    uint64_t bit = UINT64_C(1) << e->to;
    if ((w->coordinator.join.asked & bit) == 0 || e->number != w->coordinator.join.orders[e->to])
        return;
    w->coordinator.join.asked &= ~bit;
    w->coordinator.join.awaited &= ~bit;
    if (e->number < w->coordinator.join.first_order)
        return;
    w->coordinator.join.read |= e->ok ? bit : 0;
    w->coordinator.join.failed |= e->ok ? 0 : bit;
}

/* Looks whether the view in force, or none, can have more slots; as long as some wait. */
static void grow(struct world *w)
{
    uint64_t waiting = w->coordinator.registered & ~w->coordinator.live;
    w->coordinator.grows = false;
    if (!w->coordinator.forming && !w->coordinator.in_force)
        try_to_form(w);
    bool joiner = w->coordinator.in_force && waiting != 0;
    if (joiner)
        ask_to_read(w, waiting);
    uint64_t busy = w->coordinator.join.asked & ~w->coordinator.join.awaited;
    bool waits = (waiting & ~busy & ~w->coordinator.join.failed) != 0;
    if (w->coordinator.in_force)
        for (uint32_t i = 0; i < w->slot_count; i++) {
            if ((w->coordinator.live >> i & 1) == 0)
                continue;
            struct event *e = new_event(w, E_JOINER, i);
            e->ok = (waiting & ~busy) != 0;
            e->number = waits ? 0 : w->coordinator.join.state.calls;
            e->epoch = w->coordinator.epoch;
            post(w, e, 1 + rnd(w, 5));
        }
    if (joiner && (find_readers(w, w->coordinator.live, waiting) != 0 || fault(w, 20))) {
        TRACE(w, "coordinator: ends epoch %llu for a larger view",
              (unsigned long long)w->coordinator.epoch);
        tell_all(w, E_STOP, 20);
        w->coordinator.in_force = false;
        try_to_form(w);
    }
    grow_later(w);
}

/* READY, or the reason why not. A slot that lacks the state is left out for a while. */
static void slot_ready(struct world *w, const struct event *e)
{
    w->coordinator.ready |= UINT64_C(1) << e->to;
    if (!e->ok) {
        if (w->now >= w->coordinator.excluded_until)
            w->coordinator.excluded = 0;
        w->coordinator.excluded |= e->number;
        w->coordinator.excluded_until = w->now + 30;
        TRACE(w, "coordinator: epoch %llu does not form", (unsigned long long)w->coordinator.epoch);
        coordinator_lost(w, &(struct event){.to = e->to, .epoch = w->coordinator.epoch});
        return;
    }
    if (w->coordinator.ready != w->coordinator.live)
        return;
    w->coordinator.forming = false;
    w->coordinator.in_force = true;
    for (uint32_t i = 0; i < w->slot_count; i++)
        w->coordinator.members[i] = (w->coordinator.live >> i & 1) != 0 ? w->slots[i].process : 0;
    forget_readers(w, w->coordinator.live);
    w->totals.views++;
    w->totals.smaller_views += w->coordinator.live != all_slots(w);
    tell_all(w, E_COMMIT, 1);
}

void coordinator_event(struct world *w, const struct event *e)
{
    uint64_t bit = UINT64_C(1) << e->to;
    bool present = w->coordinator.forming && e->epoch == w->coordinator.epoch;
    switch (e->kind) {
    case E_REGISTERED:
        if (!w->slots[e->to].alive || w->slots[e->to].process != e->number)
            return;
        if ((w->coordinator.forming || w->coordinator.in_force) && (w->coordinator.live & bit) != 0)
            coordinator_lost(w, &(struct event){.to = e->to, .ok = true});
        w->coordinator.registered |= bit;
        forget_readers(w, bit);
        try_to_form(w);
        grow_later(w);
        return;
    case E_GROW: grow(w); return;
    case E_READ_DONE: read_done(w, e); return;
    case E_COORDINATOR_LOST: coordinator_lost(w, e); return;
    case E_DIGEST:
        if (!present)
            return;
        w->coordinator.digests[e->to] = e->u.digest;
        w->coordinator.reported |= bit;
        if (w->coordinator.reported == w->coordinator.live)
            tell_all(w, E_ADOPT, 15);
        return;
    case E_READY:
        if (present)
            slot_ready(w, e);
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

struct moe_saved_training saved_of(const struct slot *s)
{
    struct moe_saved_training saved = {0};
    if (!is_saved(s))
        return saved;
    name_checkpoint(s->checkpoint, saved.checkpoint);
    saved.lineage = s->state.lineage;
    saved.weights_version = s->state.version;
    saved.calls = moe_ledger_count(s->ledger);
    saved.record = moe_ledger_hash(s->ledger);
    return saved;
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
                                   .explicit_load = s->checkpoint_explicit_load,
                                   .earlier = s->earlier,
                                   .gradients = s->gradient_slots,
                                   .undefined = s->undefined,
                                   .unsettled = s->unsettled,
                                   .saved = is_saved(s),
                                   .before = s->before,
                                   .backward = s->backward,
                                   .change = s->change,
                                   .only_recorded = s->only_recorded,
                                   .settled = s->saved_calls != 0 &&
                                              s->saved_calls == moe_ledger_count(s->ledger),
                                   .begun = s->begun_op != 0 ? w->ops[s->begun_op].id : 0};
    memcpy(d->backward_session, s->backward_session, sizeof d->backward_session);
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
    bool joins = (d->joiners >> s->index & 1) != 0;
    if ((d->finishers >> s->index & 1) != 0)
        finish_op(w, s, d);
    s->begun_op = 0;
    if (d->restart) {
        w->totals.lost_states += s->index == 0;
        restart_state(w, s, d);
    } else if (joins) {
        join_state(w, s, d);
    } else if (d->loss != MOE_TRAIN_LOSS_NONE) {
        w->totals.lost_gradients += s->index == (uint32_t)__builtin_ctzll(s->forming_live);
        lose_gradients(w, s, d);
    } else if (d->lineage != s->state.lineage) {
        s->state.lineage = d->lineage;
        s->state.version = d->weights_version;
        forget_gradients(s);
        s->earlier = 0;
        s->open = false;
    }
    if (!d->restart) {
        s->unsettled = 0; /* all members of that view are here, and none has answered the call */
        if (!d->settled && s->checkpoint != checkpoint_named(d->checkpoint))
            s->saved_calls = 0;
        s->checkpoint = checkpoint_named(d->checkpoint);
        s->checkpoint_explicit_load = d->explicit_load;
        s->unsaved = d->lost_steps;
    }
    TRACE(w, "slot %u: lineage %llu, version %llu%s", s->index,
          (unsigned long long)s->state.lineage, (unsigned long long)s->state.version,
          d->restart ? ", went back" : "");
    struct event *e = new_event(w, E_READY, s->index);
    e->epoch = s->forming;
    e->ok = true;
    post(w, e, 1 + rnd(w, d->restart || joins ? 20 : 5));
}

/* Whatever was cut short, the members of a view have all that was answered in it. */
static void check_members_stay(struct world *w, const struct slot *s)
{
    const struct moe_train_digest *first = NULL;
    bool members = true;
    for (uint32_t i = 0; i < w->slot_count; i++) {
        const struct moe_train_digest *d = &w->coordinator.digests[i];
        if ((s->forming_live >> i & 1) == 0)
            continue;
        first = first != NULL ? first : d;
        members = members && d->epoch != 0 && d->epoch == first->epoch &&
                  d->lineage == first->lineage && d->inconsistent == 0;
    }
    check(w, !members || !s->adopting.restart, "members of a view do not go back together");
}

static void decide(struct world *w, struct slot *s)
{
    const struct moe_train_digest *digests = w->coordinator.digests;
    uint64_t live = s->forming_live;
    struct moe_status st = moe_train_choose_recovery(digests, live, &s->adopting);
    check(w, !moe_failed(&st), "a group can always decide from where to go on");
    check_members_stay(w, s);
    st = moe_train_keep_copies(digests, live, covers(w, s->adopting.heirs), &s->adopting);
    if (!moe_failed(&st)) {
        adopt(w, s);
        return;
    }
    struct event *e = new_event(w, E_READY, s->index);
    e->epoch = s->forming;
    e->number = s->adopting.joiners;
    post(w, e, 1 + rnd(w, 5));
}

static void tell_read(struct world *w, const struct slot *s, uint64_t order, bool ok)
{
    struct event *e = new_event(w, E_READ_DONE, s->index);
    e->number = order;
    e->ok = ok;
    TRACE(w, "slot %u: has %s the state ahead", s->index, ok ? "read" : "not read");
    post(w, e, 1 + rnd(w, 10));
}

/* A slot outside of the view reads the state; PREPARE ends that. */
static void read_event(struct world *w, struct slot *s, const struct event *e)
{
    bool overtaken = e->epoch < s->forming; /* by PREPARE: a stream would have kept the order */
    if (e->kind == E_READ && (s->epoch != 0 || overtaken)) {
        tell_read(w, s, e->number, false);
        return;
    }
    if (e->kind == E_READ) {
        if (!moe_saved_training_same(&s->ahead, &e->u.saved))
            begin_ahead(s, &e->u.saved);
        s->reading = e->number;
        struct event *end = new_event(w, E_READ_END, s->index);
        end->process = s->process;
        end->number = e->number;
        end->u.saved = e->u.saved;
        post(w, end, 1 + rnd(w, fault(w, 200) ? 3 * READ_LIMIT : READ_LIMIT / 2));
        return;
    }
    if (e->number != s->reading)
        return;
    s->reading = 0;
    tell_read(w, s, e->number,
              moe_saved_training_same(&s->ahead, &e->u.saved) || read_ahead(w, s, &e->u.saved));
}

void form_event(struct world *w, struct slot *s, const struct event *e)
{
    if (e->kind == E_READ || e->kind == E_READ_END) {
        read_event(w, s, e);
        return;
    }
    if (e->kind == E_PREPARE && e->epoch <= s->forming)
        return;
    if (e->kind == E_PREPARE) {
        if (s->epoch != 0)
            end_view(w, s);
        if (s->reading != 0)
            tell_read(w, s, s->reading, false);
        s->reading = 0;
        s->forming = e->epoch;
        s->forming_live = e->number;
        send_digest(w, s);
        return;
    }
    if (e->epoch != s->forming || e->epoch != w->coordinator.epoch)
        return;
    if (e->kind == E_ADOPT) {
        decide(w, s);
    } else if (e->kind == E_READY_CHECK) {
        adopt(w, s);
    } else if (w->coordinator.in_force) {
        begin_view(w, s, e->epoch, s->forming_live);
        for (uint32_t i = 0; i < w->slot_count; i++) /* lost while the view formed */
            if (w->link_epoch[i][s->index] >= e->epoch)
                post_lost(w, s->index, e->epoch);
    }
}
