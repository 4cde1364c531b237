/* SPDX-License-Identifier: Apache-2.0 */
/* A process: it takes masks, and runs a step, one store or load at a time (moe/window.h). */
#include "simulation/world.h"

#include <string.h>

static uint64_t stamp_of(uint8_t form, uint8_t step)
{
    return moe_window_stamp(moe_guard_is_off(MOE_GUARD_STAMP_HAS_EPOCH) ? 0 : epoch_of(form), step);
}

static uint32_t row_of(uint8_t form, uint8_t step, uint8_t process)
{
    return (uint32_t)form << 16 | (uint32_t)step << 8 | process;
}

static struct moe_masks *masks_of(const struct process *p)
{
    return &w.masks[number_of(p)];
}

static void push(uint8_t to, const struct process *from, struct notice n)
{
    uint8_t *count = &w.notices[to][number_of(from)];
    MOE_INVARIANT(*count < NOTICES);
    w.notice[to][number_of(from)][(*count)++] = n;
}

/* A line ends when one side has a mask without the other. */
static void notify(const struct process *p, struct notice n)
{
    for (uint8_t to = 0; to < PROCESSES; to++) {
        const struct process *o = &w.process[to];
        bool shares = o->used && !o->dead && o != p && o->joined && o->session == n.session;
        if (shares && (!w.lines || (p->live & bit(o->slot)) != 0))
            push(to, p, n);
    }
}

/* What a store does in the window of the process that it is for. */
static void carry_out(uint8_t slot, const struct process *from, const struct notice *n)
{
    uint64_t stamp = stamp_of(n->form, n->step);
    uint32_t row = row_of(n->form, n->step, number_of(from));
    uint8_t parity = moe_guard_is_off(MOE_GUARD_HEADS_HAVE_PARITY) ? 0 : n->step & 1;
    switch ((enum op)n->op) {
    case STORE_ROW:
        w.window[n->session][slot][from->slot].head[parity] = moe_window_flag(stamp, n->other);
        if (!w.quick)
            w.window[n->session][slot][from->slot].row = row;
        break;
    case STORE_SENT:
        w.window[n->session][slot][from->slot].sent = moe_window_flag(stamp, 1);
        if (w.quick)
            w.window[n->session][slot][from->slot].row = row;
        break;
    case STORE_DONE: w.window[n->session][slot][from->slot].done = moe_window_flag(stamp, 0); break;
    case STORE_CLEAR:
        w.window[n->session][slot][from->slot].clear = moe_window_flag(stamp, 0);
        break;
    default: w.window[n->session][slot][from->slot].met = moe_window_flag(stamp, 0); break;
    }
}

/* Shared memory is written at once, also if its owner has gone. */
static void store(const struct process *from, uint8_t to, uint8_t slot, struct notice n)
{
    const struct process *o = &w.process[to];
    if (!w.lines)
        carry_out(slot, from, &n);
    else if (!o->dead)
        push(to, from, n);
}

/* ------------------------------------------------------------------ steps */

static uint8_t others(const struct run *r, const struct process *p)
{
    return (uint8_t)(r->live & ~bit(p->slot));
}

bool may_begin(const struct process *p)
{
    return runs(p) && p->met && !p->over && !p->run.active && p->steps < w.steps &&
           (w.bare || MOE_GUARD(COMMIT_FIRST, p->committed == p->form));
}

static void end_step(struct process *p, uint8_t outcome)
{
    struct run *r = &p->run;
    uint8_t *before = &w.outcome[r->form][r->step];
    check(!r->wrong, "a step uses the rows that its members have stored for it");
    check(*before == 0 || *before == outcome, "all slots refuse a step, or none");
    *before = outcome;
    if (r->form == p->form)
        p->steps++;
    *r = (struct run){0};
}

/* To the next slot, or to the next operation. */
static void advance(struct process *p)
{
    struct run *r = &p->run;
    uint8_t left = (uint8_t)(others(r, p) & ~(bit(r->peer) | (bit(r->peer) - 1)));
    /* The next one is for the same slot. */
    bool pairs = r->op == STORE_ROW || (!w.quick && r->op == READ_SENT);
    bool second = r->op == STORE_SENT || (!w.quick && r->op == READ_ROW);
    if (pairs) {
        r->op++;
        return;
    }
    if (left != 0) {
        r->peer = (uint8_t)__builtin_ctz(left);
        r->op = (uint8_t)(r->op - second);
        return;
    }
    r->op++;
    if (r->op == STORE_CLEAR && moe_guard_is_off(MOE_GUARD_ALL_ARE_CLEAR))
        r->op = STORE_ROW;
    if (w.quick && r->op == READ_SENT)
        r->op++;
    if (r->op == READ_SENT && r->differs) {
        end_step(p, 2);
        return;
    }
    if (r->op == OPS) {
        end_step(p, 1);
        return;
    }
    r->peer = (uint8_t)__builtin_ctz(others(r, p));
}

void begin(struct process *p, bool other)
{
    check(w.bare || w.committed[p->form], "a step runs in an epoch that was committed");
    bool clears = p->clears && !moe_guard_is_off(MOE_GUARD_CLEAR_FIRST);
    p->clears = false;
    p->run = (struct run){.active = true,
                          .op = clears ? CLEAR : STORE_ROW,
                          .other = other,
                          .step = (uint8_t)(p->steps + 1),
                          .form = p->form,
                          .live = p->live,
                          .session = p->session};
    memcpy(p->run.member, p->member, sizeof p->run.member);
    if (others(&p->run, p) == 0)
        end_step(p, 1);
    else
        p->run.peer = (uint8_t)__builtin_ctz(others(&p->run, p));
}

/* The flag that the next operation waits for; NULL if it does not wait. */
static const uint64_t *awaited(const struct process *p)
{
    const struct run *r = &p->run;
    uint8_t parity = moe_guard_is_off(MOE_GUARD_HEADS_HAVE_PARITY) ? 0 : r->step & 1;
    switch ((enum op)r->op) {
    case READ_HEAD: return &w.window[r->session][p->slot][r->peer].head[parity];
    case READ_SENT: return &w.window[r->session][p->slot][r->peer].sent;
    case READ_DONE: return &w.window[r->session][p->slot][r->peer].done;
    case READ_CLEAR: return &w.window[r->session][p->slot][r->peer].clear;
    default: return NULL;
    }
}

bool can_go_on(const struct process *p)
{
    const uint64_t *flag = awaited(p);
    if (w.quick && p->run.op == READ_ROW)
        return w.window[p->run.session][p->slot][p->run.peer].row != 0;
    return flag == NULL || moe_window_flag_stamp(*flag) == stamp_of(p->run.form, p->run.step);
}

void go_on(struct process *p)
{
    struct run *r = &p->run;
    const struct notice n = {.kind = STORES,
                             .session = r->session,
                             .form = r->form,
                             .op = r->op,
                             .step = r->step,
                             .other = r->other};
    check(r->form != p->form || (p->live & bit(r->peer)) != 0,
          "a step touches the windows of its mask only");
    switch ((enum op)r->op) {
    case STORE_ROW:
    case STORE_SENT:
    case STORE_CLEAR:
    case STORE_DONE: store(p, r->member[r->peer], r->peer, n); break;
    case CLEAR: w.window[r->session][p->slot][r->peer].row = 0; break;
    case READ_HEAD:
        r->differs = r->differs || moe_window_flag_value(*awaited(p)) != r->other;
        break;
    case READ_ROW:
        r->wrong = r->wrong || w.window[r->session][p->slot][r->peer].row !=
                                   row_of(r->form, r->step, r->member[r->peer]);
        if (w.quick)
            w.window[r->session][p->slot][r->peer].row = 0;
        break;
    default: break; /* a wait that has ended */
    }
    advance(p);
}

/* ------------------------------------------------------------------ ends of waits */

/* The others that have taken this mask. */
static uint64_t arrived(const struct process *p)
{
    uint64_t all = 0;
    for (uint8_t s = 0; s < w.slots; s++)
        if (moe_window_flag_stamp(w.window[p->session][p->slot][s].met) == stamp_of(p->form, 1))
            all |= bit(s);
    return all;
}

bool has_cause(const struct process *p)
{
    const struct moe_masks *m = masks_of(p);
    uint64_t lost = moe_masks_lost(m), left = moe_masks_left(m);
    if (lost != 0)
        return true;
    if (p->run.active)
        return (left & bit(p->run.peer)) != 0 || p->over;
    bool joins = m->epoch == m->joined; /* a message ends a join */
    return (joins && p->over) || (left & p->live & ~arrived(p)) != 0;
}

/* A report of this epoch, or a dead process, is a cause. */
static void check_cause(const struct process *p)
{
    uint64_t lost = moe_masks_lost(masks_of(p)), good = w.blamed[p->form];
    for (uint8_t s = 0; s < w.slots; s++)
        if (w.process[p->member[s]].dead || (w.lines && w.process[p->member[s]].form > p->form))
            good |= bit(s);
    check((lost & ~good) == 0, "a wait ends for a cause in its epoch");
}

void give_up(struct process *p, bool late)
{
    struct moe_masks *m = masks_of(p);
    struct run r = p->run;
    if (late) {
        w.blamed[r.form] |= bit(r.peer);
        moe_masks_report(m, bit(r.peer));
        notify(p, (struct notice){SPEAKS, p->session, p->form, bit(r.peer), 0, 0, 0});
    } else if (!p->over) {
        check_cause(p);
    }
    p->run = (struct run){0};
    if (!p->over)
        report(r.form, (uint8_t)(moe_masks_lost(m) | moe_masks_left(m)));
    p->over = true;
}

/* ------------------------------------------------------------------ masks */

bool can_meet(const struct process *p)
{
    return (p->live & ~arrived(p) & ~bit(p->slot)) == 0;
}

void meet(struct process *p, bool good)
{
    if (!good && !p->over)
        check_cause(p);
    p->meets = false;
    p->met = good;
    if (!good)
        p->over = true;
    ready(p, p->form, good, true);
}

static void enter(struct process *p, const struct message *m)
{
    p->form = m->form;
    p->live = m->live;
    memcpy(p->member, m->member, sizeof p->member);
    p->over = p->met = false;
    p->steps = p->committed = 0;
    p->clears = w.quick && m->masks;
    const struct notice met = {
        .kind = STORES, .session = p->session, .form = m->form, .op = OPS, .step = 1};
    for (uint8_t s = 0; s < w.slots; s++)
        if (s != p->slot && (m->live & bit(s)) && m->masks)
            store(p, m->member[s], s, met);
        else if (s != p->slot && (m->live & bit(s))) /* before there are lines */
            carry_out(s, p, &met);
    p->meets = true;
    /* The coordinator's commit shows that all have taken a mask; without one, they meet. */
    if (m->masks && (!w.bare || moe_guard_is_off(MOE_GUARD_MEET_FIRST)))
        meet(p, true);
}

static void leave(struct process *p)
{
    if (p->joined) {
        notify(p, (struct notice){LEAVES, p->session, 0, 0, 0, 0, 0});
        notify(p, (struct notice){CLOSES, p->session, 0, 0, 0, 0, 0});
    }
    p->joined = false;
}

void drop_session(struct process *p)
{
    leave(p);
}

static void forget_notices(const struct process *p)
{
    memset(w.notices[number_of(p)], 0, sizeof w.notices[0]);
    memset(w.notice[number_of(p)], 0, sizeof w.notice[0]);
}

/* Connections that a new session cannot make. */
static void find_missing(const struct process *p, const struct message *m)
{
    for (uint8_t s = 0; s < w.slots; s++) {
        const struct process *o = &w.process[m->member[s]];
        if (s == p->slot || !(m->live & bit(s)))
            continue;
        if (o->dead)
            moe_masks_close(masks_of(p), s);
        else if (o->joined && o->session > m->session)
            moe_masks_leave(masks_of(p), s);
    }
}

static void join(struct process *p, const struct message *m)
{
    leave(p);
    p->joined = true;
    p->session = m->session;
    forget_notices(p); /* of the session before */
    moe_masks_begin(masks_of(p), p->slot, epoch_of(m->form), m->live);
    find_missing(p, m);
    enter(p, m);
}

/* The process ends its lines to those that a mask lacks. */
static void cut_lines(struct process *p, uint8_t live)
{
    for (uint8_t to = 0; w.lines && to < PROCESSES; to++) {
        const struct process *o = &w.process[to];
        bool shares = o->used && !o->dead && o->joined && o->session == p->session;
        if (shares && (p->live & (uint8_t)~live & bit(o->slot)) != 0)
            push(to, p, (struct notice){CLOSES, p->session, 0, 0, 0, 0, 0});
    }
}

/* False: a step must end first. */
static bool take(struct process *p, const struct message *m)
{
    struct moe_masks *masks = masks_of(p);
    if (p->run.active && !moe_guard_is_off(MOE_GUARD_STEPS_END_FIRST)) {
        p->over = true; /* its waits end */
        return false;
    }
    if (!m->masks || (!p->joined && moe_guard_is_off(MOE_GUARD_MASK_SHRINKS))) {
        join(p, m);
        return true;
    }
    struct moe_status st =
        moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_REFORMING, "no session was kept");
    if (p->joined && p->session == m->session)
        st = moe_masks_check(masks, epoch_of(m->form), m->live, !p->run.active);
    if (moe_failed(&st)) {
        p->over = true;
        ready(p, m->form, false, st.reason == MOE_REASON_PEER_LOST);
        return true;
    }
    moe_masks_take(masks, epoch_of(m->form), m->live);
    notify(p, (struct notice){SPEAKS, p->session, m->form, 0, 0, 0, 0});
    cut_lines(p, m->live);
    enter(p, m);
    return true;
}

void handle(struct process *p)
{
    struct message m = p->message[0];
    if (m.kind == PREPARE && !take(p, &m))
        return;
    if (m.kind == COMMIT && m.form == p->form && p->met)
        p->committed = m.form;
    if (m.kind == ABORT && m.form == p->form)
        p->over = true;
    p->messages--;
    memmove(p->message, p->message + 1, sizeof p->message - sizeof p->message[0]);
    memset(&p->message[QUEUE - 1], 0, sizeof p->message[0]);
}

void deliver(struct process *to, uint8_t from, uint8_t nth)
{
    uint8_t *count = &w.notices[number_of(to)][from];
    struct notice *queue = w.notice[number_of(to)][from], n = queue[nth];
    struct moe_masks *m = masks_of(to);
    uint32_t slot = w.process[from].slot;
    (*count)--;
    memmove(queue + nth, queue + nth + 1, (NOTICES - 1u - nth) * sizeof *queue);
    memset(&queue[NOTICES - 1], 0, sizeof *queue);
    if (!to->joined || n.session != to->session)
        return;
    switch ((enum notice_kind)n.kind) {
    case SPEAKS: moe_masks_notice(m, slot, epoch_of(n.form), n.lost); break;
    case LEAVES: moe_masks_leave(m, slot); break;
    case CLOSES: moe_masks_close(m, slot); break;
    case STORES: carry_out(to->slot, &w.process[from], &n); break;
    }
}

void die(struct process *p)
{
    uint8_t slot = p->slot, number = number_of(p);
    for (uint8_t to = 0; to < PROCESSES; to++) { /* also those that still connect to it */
        const struct process *o = &w.process[to];
        bool shares = p->joined && o->session == p->session;
        bool waits = (o->live & bit(slot)) != 0 && o->member[slot] == number;
        if (o != p && o->joined && (shares || waits))
            push(to, p, (struct notice){CLOSES, o->session, 0, 0, 0, 0, 0});
    }
    *p = (struct process){.used = true, .dead = true, .slot = slot};
    memset(&w.masks[number], 0, sizeof w.masks[number]);
    forget_notices(p);
}
