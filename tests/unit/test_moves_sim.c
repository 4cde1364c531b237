/* SPDX-License-Identifier: Apache-2.0 */
/* A seeded world around the machine of moves: workers that follow the protocol, a sequencer and
 * tickets that each slot runs in its own time, streams that delay and break, processes that are
 * replaced, views that end and form, a coordinator that crashes between any two of its actions, a
 * disk that refuses writes or says so falsely, operators who call and leave. Time is virtual.
 *
 * Promises, at every step: the slots of a step have the same placement; a placement is durable
 * before a slot uses it; a swap finds its experts. At the end the world becomes quiet: all slots
 * use the placement that is saved and hold nothing else, and each call has its answer. `--guards`
 * switches each guard of the machine off in turn: some promise must break. MOE_SEED=n replays one
 * run; `--seeds N` sets their number. */
#include "base/clock.h"
#include "base/guard.h"
#include "coordinator/moves/moves.h"
#include "schedule/sequencer.h"
#include "support/random.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SLOTS_MOST = 4,
    EXPERTS = 12,
    LAYER = 3,
    EPOCHS = 400,
    TICKETS = 4096,
    QUEUE = 256,
    CALLS = 256,
    STEPS = 1000,
    STEP_MS = 20,
    QUIET_STEPS = 4000,
    QUIET_STEP_MS = 250,
};

/* ------------------------------------------------------------------ guards */

static enum moe_guard off = MOE_GUARD_COUNT;

static const struct {
    const char *name, *promise;
} guards[] = {
#define X(name, promise) {#name, promise},
#include "moves_guards.h"
#undef X
};

bool moe_guard_is_off(enum moe_guard guard)
{
    return guard == off;
}

/* ------------------------------------------------------------------ the world */

/* A placement, by version and content; version 0 = none. */
struct placed {
    uint32_t version;
    uint64_t hash;
};

enum kind {
    DOWN_REGISTERED,
    DOWN_ASSIGN,
    DOWN_PREPARE,
    DOWN_ABORT,
    DOWN_ORDER,
    UP_LOADED,
    UP_READY,
    UP_LOST,
    UP_REPORT
};

struct message {
    enum kind kind;
    uint64_t at_ns, epoch, order;
    enum moe_moves_step step;
    struct placed placed;
    bool failed;
    uint64_t rows[EXPERTS];
};

struct stream { /* one direction; a ring */
    struct message *items;
    size_t head, count;
};

struct process {
    uint64_t incarnation, stream; /* stream 0 = not connected */
    uint64_t connect_ns;
    struct placed active, next;
    uint64_t loaded_ns;  /* `active` comes from the disk until then; 0 = it is there */
    uint64_t fetched_ns; /* the same of `next` */
    uint64_t fetch_order;
    uint64_t epoch; /* of the view that it is in; 0 = none */
    size_t run;     /* tickets of the epoch */
    uint64_t ticket_ns;
    uint64_t rows[EXPERTS]; /* since its start */
    struct stream up, down;
};

struct call {
    bool waits, left;
    struct placed before;
};

static struct world {
    uint64_t seed, now_ns;
    struct rng random;
    uint32_t slots;
    bool quiet;
    struct moe_rebalancer_policy automatic;
    struct moe_moves *machine;
    struct moe_placement *placement; /* of the coordinator */
    struct {
        struct placed placed;
        uint64_t epoch, view; /* highest; in force, 0 = none */
    } durable;
    struct placed durable_maybe[CALLS]; /* by writes that were said to have failed */
    size_t maybe_count;
    uint64_t view, forming, form_ns, crash_ns; /* crash_ns: it is to crash then; 0 = not */
    bool restoring;
    uint32_t ready, loaded; /* bits of slots */
    uint64_t next_id, next_order;
    struct process places[SLOTS_MOST];
    bool known[SLOTS_MOST];
    struct moe_sequencer *sequencer; /* of slot 0, in `sequenced` */
    uint64_t sequenced;
    struct {
        struct moe_ticket ticket;
        struct placed used; /* by the first slot that ran it */
    } tickets[TICKETS];     /* of `sequenced` */
    size_t ticket_count;
    struct call calls[CALLS];
    uint64_t call_count;
    size_t moved, failed, crashes, views, swaps, steps, looks, said_moved;
} w;

static struct message queue_memory[2 * SLOTS_MOST][QUEUE];
static struct moe_placement
    *memory[3]; /* w.placement, those that are durable by version's parity */
static jmp_buf broken;
static char broken_text[200];

__attribute__((noreturn, format(printf, 1, 2))) static void fail_run(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(broken_text, sizeof broken_text, fmt, args);
    va_end(args);
    longjmp(broken, 1);
}

#define CHECK(holds, ...) ((holds) ? (void)0 : fail_run(__VA_ARGS__))

static uint64_t rnd(uint64_t below)
{
    return rng_next(&w.random) % below;
}

static bool chance(uint64_t in)
{
    return !w.quiet && rnd(in) == 0;
}

static uint64_t after_ms(uint64_t most)
{
    return w.now_ns + rnd(most + 1) * MOE_NS_PER_MS;
}

static bool same(struct placed a, struct placed b)
{
    return a.version == b.version && a.hash == b.hash;
}

static struct placed name_of(const struct moe_placement *p)
{
    return (struct placed){moe_placement_version(p), moe_placement_hash(p)};
}

static void push(struct stream *q, struct message m)
{
    m.at_ns = after_ms(w.quiet ? 5 : chance(10) ? 1500 : 40);
    if (q->count > 0) {
        uint64_t last = q->items[(q->head + q->count - 1) % QUEUE].at_ns;
        m.at_ns = m.at_ns > last ? m.at_ns : last;
    }
    CHECK(q->count < QUEUE, "a stream holds a bounded number of messages");
    q->items[(q->head + q->count++) % QUEUE] = m;
}

static bool pop(struct stream *q, struct message *m)
{
    if (q->count == 0 || q->items[q->head].at_ns > w.now_ns)
        return false;
    *m = q->items[q->head];
    q->head = (q->head + 1) % QUEUE;
    q->count--;
    return true;
}

static void send(uint32_t slot, struct message m)
{
    if (w.places[slot].stream != 0)
        push(&w.places[slot].down, m);
}

static void answer(struct process *p, struct message m)
{
    if (p->stream != 0)
        push(&p->up, m);
}

/* ------------------------------------------------------------------ workers */

static bool is_here(uint64_t loaded_ns)
{
    return loaded_ns == 0;
}

static void report(struct process *p, enum moe_moves_step step, uint64_t order, bool failed)
{
    struct message m = {
        .kind = UP_REPORT, .step = step, .order = order, .epoch = p->epoch, .failed = failed};
    for (uint32_t e = 0; step == MOE_MOVES_COUNT && e < EXPERTS; e++)
        m.rows[e] = p->rows[e] += rnd(100) < 30 ? rnd(1000) : 0;
    answer(p, m);
}

static void leave(struct process *p)
{
    p->epoch = 0;
    p->run = 0;
}

static void drop_next(struct process *p)
{
    p->next = (struct placed){0};
    p->fetched_ns = p->fetch_order = 0;
}

/* Loads from the disk, unless it has it: at once, as no step runs, or by a later ticket. */
static void assign(struct process *p, const struct message *m)
{
    bool next = same(p->next, m->placed) && is_here(p->fetched_ns);
    if (!same(p->active, m->placed) && !next) {
        answer(p, (struct message){.kind = UP_LOST, .epoch = p->epoch});
        leave(p);
        drop_next(p);
        p->active = m->placed;
        p->loaded_ns = after_ms(300) + 1;
    } else if (is_here(p->loaded_ns)) {
        answer(p, (struct message){.kind = UP_LOADED, .placed = m->placed});
    }
}

static void prepare(struct process *p, const struct message *m)
{
    leave(p);
    if (same(p->next, m->placed) && is_here(p->fetched_ns))
        p->active = p->next;
    drop_next(p);
    bool good = same(p->active, m->placed) && is_here(p->loaded_ns);
    answer(p, (struct message){.kind = UP_READY, .epoch = m->epoch, .failed = !good});
    if (good)
        p->epoch = m->epoch; /* tickets come once the sequencer begins the epoch */
}

static void swap_order(uint32_t slot, const struct message *m)
{
    struct process *p = &w.places[slot];
    if (m->epoch != p->epoch || p->epoch == 0)
        return;
    if (p->active.version == m->placed.version) {
        report(p, MOE_MOVES_SWAP, m->order, false);
        return;
    }
    if (slot == 0 && w.sequenced == p->epoch)
        moe_sequencer_swap_placement(w.sequencer, m->placed.version);
}

static void take_order(uint32_t slot, const struct message *m)
{
    struct process *p = &w.places[slot];
    switch (m->step) {
    case MOE_MOVES_COUNT: report(p, m->step, m->order, false); break;
    case MOE_MOVES_FETCH:
        if (same(p->active, m->placed) || (same(p->next, m->placed) && is_here(p->fetched_ns))) {
            report(p, m->step, m->order, false);
            break;
        }
        drop_next(p);
        p->next = m->placed;
        p->fetched_ns = after_ms(chance(4) ? 4000 : 200) + 1;
        p->fetch_order = m->order;
        break;
    case MOE_MOVES_SWAP: swap_order(slot, m); break;
    case MOE_MOVES_DROP:
        drop_next(p);
        report(p, m->step, m->order, false);
        break;
    }
}

static void check_swap(const struct process *p, uint32_t version)
{
    CHECK(w.durable.placed.version >= version || w.maybe_count > 0,
          "placement %u is used before it is durable", version);
    CHECK(p->next.version == version && is_here(p->fetched_ns), "a swap finds no experts");
}

static void run_ticket(uint32_t slot)
{
    struct process *p = &w.places[slot];
    if (p->epoch == 0 || p->epoch != w.sequenced || p->run >= w.ticket_count ||
        p->ticket_ns > w.now_ns)
        return;
    const struct moe_ticket *t = &w.tickets[p->run].ticket;
    if (t->kind == MOE_STEP_SWAP_PLACEMENT) {
        check_swap(p, t->layer);
        p->active = p->next;
        drop_next(p);
        report(p, MOE_MOVES_SWAP, 0, false);
        w.swaps++;
    } else {
        struct placed *used = &w.tickets[p->run].used;
        if (used->version == 0)
            *used = p->active;
        CHECK(same(*used, p->active), "slots of a step have placements %u and %u", used->version,
              p->active.version);
        w.steps++;
    }
    p->run++;
    p->ticket_ns = after_ms(20);
    struct moe_status st = moe_sequencer_done(w.sequencer, slot, p->run, true);
    CHECK(!moe_failed(&st), "the sequencer: %s", st.text);
}

/* The worker of slot 0 is the sequencer; it begins when all have joined. */
static void sequence(void)
{
    const struct process *p = &w.places[0];
    if (p->epoch == 0 || p->epoch != w.view)
        return;
    if (w.sequenced != p->epoch) {
        for (uint32_t s = 0; s < w.slots; s++)
            if (w.places[s].epoch != w.view)
                return;
        w.sequenced = p->epoch;
        w.ticket_count = 0;
        moe_sequencer_begin(w.sequencer, w.sequenced, UINT64_MAX >> (64 - w.slots), 64);
    }
    const struct moe_step_key key = {LAYER, MOE_STEP_FORWARD, MOE_DTYPE_F32};
    struct moe_status st = moe_sequencer_work(w.sequencer, (uint32_t)rnd(w.slots), &key, 1);
    CHECK(!moe_failed(&st), "the sequencer: %s", st.text);
    struct moe_ticket t;
    while (moe_sequencer_next(w.sequencer, &t)) {
        CHECK(w.ticket_count < TICKETS, "tickets do not run away");
        w.tickets[w.ticket_count].ticket = t;
        w.tickets[w.ticket_count++].used = (struct placed){0};
    }
}

static void work(uint32_t slot)
{
    struct process *p = &w.places[slot];
    struct message m;
    while (p->stream != 0 && pop(&p->down, &m)) {
        switch (m.kind) {
        case DOWN_REGISTERED:
            if (p->next.version != m.placed.version)
                drop_next(p);
            break;
        case DOWN_ASSIGN: assign(p, &m); break;
        case DOWN_PREPARE: prepare(p, &m); break;
        case DOWN_ABORT:
            if (p->epoch == m.epoch)
                leave(p);
            break;
        default: take_order(slot, &m); break;
        }
    }
    if (p->loaded_ns != 0 && p->loaded_ns <= w.now_ns) {
        p->loaded_ns = 0;
        answer(p, (struct message){.kind = UP_LOADED, .placed = p->active});
    }
    if (p->fetched_ns != 0 && p->fetched_ns <= w.now_ns) {
        uint64_t order = p->fetch_order;
        bool failed = chance(12);
        p->fetched_ns = 0;
        if (failed)
            drop_next(p);
        report(p, MOE_MOVES_FETCH, order, failed);
    }
    run_ticket(slot);
}

/* ------------------------------------------------------------------ the coordinator */

static void start(void);

/* Restarts it now and then; the rest of the actions is lost. */
static bool crash(uint64_t in)
{
    if (!chance(in))
        return false;
    w.crashes++;
    moe_moves_destroy(w.machine);
    w.machine = NULL;
    for (uint64_t i = 1; i <= w.call_count; i++)
        w.calls[i].waits = false;
    start();
    return true;
}

static void look(void);

/* A write fails: the disk may have the new state all the same. */
static void save(uint64_t sequence)
{
    const struct moe_placement *plan = moe_moves_plan(w.machine);
    struct placed placed = name_of(plan);
    CHECK(placed.version == name_of(w.placement).version + 1, "versions rise by one");
    bool fails = chance(6), written = !fails || rnd(2) == 0;
    if (written) {
        moe_placement_assign(memory[1 + placed.version % 2], plan);
        if (fails)
            w.durable_maybe[w.maybe_count++ % CALLS] = placed;
        w.durable.placed = placed;
    }
    if (!fails)
        moe_placement_assign(w.placement, plan);
    if (fails && rnd(2) == 0)
        w.crash_ns = after_ms(1000) + 1;
    struct moe_status st = fails ? moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "disk") : moe_ok();
    if (!crash(60))
        moe_moves_on_saved(w.machine, w.now_ns, sequence, &st);
    else
        look();
}

static void end_call(const struct moe_moves_action *a)
{
    struct call *c = &w.calls[a->call];
    struct moe_moves_outcome outcome;
    CHECK(a->call >= 1 && a->call <= w.call_count && (c->waits || c->left), "two answers");
    moe_moves_outcome(w.machine, &outcome);
    bool moved = a->status.code == MOE_OK && outcome.moved;
    if (moved)
        CHECK(w.durable.placed.version > c->before.version, "a move that is not durable");
    if (a->status.code != MOE_OK && a->status.code != MOE_DEADLINE_EXCEEDED && w.maybe_count == 0)
        CHECK(same(name_of(w.placement), c->before), "a failed move has changed the placement");
    c->waits = false;
    w.moved += moved;
    w.failed += a->status.code != MOE_OK;
}

static void carry_out(void)
{
    struct moe_moves_action a;
    while (moe_moves_next_action(w.machine, &a)) {
        if (crash(60))
            return;
        switch (a.kind) {
        case MOE_MOVES_ORDER:
            if (w.places[a.slot].stream == a.stream)
                send(a.slot, (struct message){.kind = DOWN_ORDER,
                                              .step = a.step,
                                              .order = a.order,
                                              .epoch = a.epoch,
                                              .placed = a.step == MOE_MOVES_FETCH
                                                            ? name_of(moe_moves_plan(w.machine))
                                                            : name_of(w.placement)});
            break;
        case MOE_MOVES_SAVE: save(a.sequence); break;
        case MOE_MOVES_ANSWER: end_call(&a); break;
        case MOE_MOVES_LOG: w.said_moved += a.event == MOE_EVENT_MOVED; break;
        }
    }
}

static void look(void)
{
    struct moe_added_slot slots[MOE_PLACEMENT_SLOTS_MAX] = {{0}};
    for (uint32_t s = 0; s < w.slots; s++)
        if (w.known[s])
            slots[s] = (struct moe_added_slot){w.places[s].incarnation, w.places[s].stream, 0};
    moe_moves_on_group(w.machine, w.now_ns, w.view, UINT64_MAX >> (64 - w.slots),
                       w.loaded == (1u << w.slots) - 1, slots);
    if (moe_moves_wants_look(w.machine)) {
        const struct moe_moves_request r = {.now = w.placement,
                                            .places = UINT64_MAX >> (64 - w.slots),
                                            .new_version = name_of(w.placement).version + 1};
        struct moe_status st = moe_moves_begin(w.machine, w.now_ns, &r);
        w.looks += st.code == MOE_OK;
    }
    carry_out();
}

static void abort_all(uint64_t epoch)
{
    for (uint32_t s = 0; s < w.slots; s++)
        send(s, (struct message){.kind = DOWN_ABORT, .epoch = epoch});
}

static void end_view(void)
{
    uint64_t epoch = w.forming != 0 ? w.forming : w.view;
    w.view = w.forming = 0;
    w.restoring = false;
    w.form_ns = after_ms(rnd(2) == 0 ? 20 : 400);
    if (epoch != 0)
        abort_all(epoch);
    look();
}

/* A view from the log is in force again once all members have come back with its epoch. */
static void start(void)
{
    const struct moe_moves_config config = {.slots = w.slots,
                                            .replicas = 1,
                                            .spare = 2,
                                            .first_order = w.next_order,
                                            .automatic = w.automatic};
    w.next_order += 1000000;
    moe_placement_assign(w.placement, memory[1 + w.durable.placed.version % 2]);
    CHECK(same(name_of(w.placement), w.durable.placed), "the durable placement is lost");
    w.view = w.durable.view;
    w.forming = 0;
    w.restoring = w.view != 0;
    w.ready = w.loaded = 0;
    w.form_ns = after_ms(2000);
    struct moe_status st = moe_moves_create(&config, w.view, &w.machine);
    CHECK(!moe_failed(&st), "%s", st.text);
    for (uint32_t s = 0; s < w.slots; s++) {
        w.places[s].stream = 0;
        w.places[s].up.count = w.places[s].down.count = 0;
        w.places[s].connect_ns = after_ms(300);
        w.known[s] = w.known[s] && w.restoring;
    }
}

static void connect(uint32_t slot)
{
    struct process *p = &w.places[slot];
    p->stream = ++w.next_id;
    bool wrong = w.view != 0 && p->epoch != w.view;
    w.known[slot] = true;
    uint32_t fetched = moe_moves_fetched_version(w.machine);
    struct placed keep = {fetched != 0 ? fetched : name_of(w.placement).version, 0};
    send(slot, (struct message){.kind = DOWN_REGISTERED, .placed = keep});
    if ((w.loaded >> slot & 1) == 0)
        send(slot, (struct message){.kind = DOWN_ASSIGN, .placed = name_of(w.placement)});
    if (wrong)
        end_view();
    look();
}

static void disconnect(struct process *p)
{
    p->stream = 0;
    p->up.count = p->down.count = 0;
    p->connect_ns = after_ms(300);
}

static void replace(uint32_t slot)
{
    struct process *p = &w.places[slot];
    struct stream up = p->up, down = p->down;
    end_view();
    w.known[slot] = false;
    if (rnd(2) == 0)
        look();
    *p = (struct process){.incarnation = ++w.next_id, .up = up, .down = down};
    disconnect(p);
    w.loaded &= ~(1u << slot);
    look();
}

static void form(void)
{
    uint32_t all = (1u << w.slots) - 1;
    for (uint32_t s = 0; s < w.slots; s++)
        if (w.places[s].stream == 0)
            return;
    if (w.view != 0 || w.forming != 0 || w.loaded != all || w.now_ns < w.form_ns)
        return;
    CHECK(w.durable.epoch + 1 < EPOCHS, "epochs do not run away");
    w.forming = ++w.durable.epoch;
    w.ready = 0;
    w.form_ns = w.now_ns + 5 * MOE_NS_PER_S;
    for (uint32_t s = 0; s < w.slots; s++)
        send(s, (struct message){
                    .kind = DOWN_PREPARE, .epoch = w.forming, .placed = name_of(w.placement)});
}

static void take_ready(uint32_t slot, const struct message *m)
{
    if (m->epoch != w.forming || w.forming == 0)
        return;
    if (m->failed) {
        end_view();
        return;
    }
    w.ready |= 1u << slot;
    if (w.ready != (1u << w.slots) - 1)
        return;
    w.durable.view = w.view = w.forming;
    w.durable.placed = name_of(w.placement);
    w.forming = 0;
    w.views++;
    look();
}

static void receive(uint32_t slot)
{
    struct process *p = &w.places[slot];
    struct message m;
    while (p->stream != 0 && pop(&p->up, &m)) {
        struct moe_status st =
            m.failed ? moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "no experts") : moe_ok();
        if (m.kind == UP_READY) {
            take_ready(slot, &m);
        } else if (m.kind == UP_LOST) {
            if (m.epoch != 0 && m.epoch == w.view)
                end_view();
        } else if (m.kind == UP_LOADED) {
            w.loaded |= (uint32_t)same(m.placed, name_of(w.placement)) << slot;
            look();
        } else {
            const struct moe_moves_report r = {
                .step = m.step, .order = m.order, .epoch = m.epoch, .error = &st};
            if (m.step == MOE_MOVES_COUNT) {
                struct moe_status rows =
                    moe_moves_on_rows(w.machine, w.now_ns, slot, m.order, LAYER, m.rows, EXPERTS);
                CHECK(!moe_failed(&rows), "%s", rows.text);
            }
            if (m.step == MOE_MOVES_FETCH && chance(8))
                end_view();
            moe_moves_on_report(w.machine, w.now_ns, slot, &r);
            carry_out();
        }
    }
}

/* ------------------------------------------------------------------ operators */

static void operate(void)
{
    if (w.call_count + 1 >= CALLS)
        return;
    struct call *c = &w.calls[w.call_count + 1];
    struct moe_moves_request r = {.call = w.call_count + 1,
                                  .now = w.placement,
                                  .places = UINT64_MAX >> (64 - w.slots),
                                  .dry_run = rnd(8) == 0,
                                  .spare = 1,
                                  .least_gain = rnd(3) == 0 ? 5 : 0,
                                  .version = rnd(10) == 0 ? 1 : 0,
                                  .new_version = name_of(w.placement).version + 1};
    *c = (struct call){.before = name_of(w.placement)};
    struct moe_status st = moe_moves_begin(w.machine, w.now_ns, &r);
    if (!moe_failed(&st)) {
        c->waits = true;
        w.call_count++;
    }
    carry_out();
}

static void cancel(void)
{
    uint64_t number = w.call_count;
    if (number == 0 || !w.calls[number].waits)
        return;
    w.calls[number].waits = false;
    moe_moves_cancel(w.machine, w.now_ns, number);
    carry_out();
}

/* ------------------------------------------------------------------ runs */

static void step(uint64_t ms)
{
    w.now_ns += ms * MOE_NS_PER_MS;
    if (chance(15))
        operate();
    if (chance(150))
        cancel();
    if (chance(250))
        replace((uint32_t)rnd(w.slots));
    if (chance(120))
        end_view();
    if (chance(150))
        disconnect(&w.places[rnd(w.slots)]);
    if (w.crash_ns != 0 && w.crash_ns <= w.now_ns) {
        w.crash_ns = 0;
        (void)crash(1);
    }
    if (chance(400))
        w.now_ns += rnd(400) * MOE_NS_PER_S;
    for (uint32_t s = 0; s < w.slots; s++) {
        if (w.places[s].stream == 0 && w.places[s].connect_ns <= w.now_ns)
            connect(s);
        if (w.places[s].fetched_ns != 0 && chance(20))
            disconnect(&w.places[s]);
        work(s);
        receive(s);
    }
    sequence();
    if (w.forming != 0 && w.now_ns >= w.form_ns)
        end_view();
    look();
    form();
    if (moe_moves_deadline(w.machine) <= w.now_ns) {
        moe_moves_on_tick(w.machine, w.now_ns);
        carry_out();
    }
}

/* Steps go on without end: nothing else is under way. */
static bool is_settled(void)
{
    bool settled = w.view != 0 && !moe_moves_busy(w.machine) && w.sequenced == w.view;
    for (uint32_t s = 0; settled && s < w.slots; s++)
        settled = w.places[s].stream != 0 && w.places[s].epoch == w.view &&
                  w.places[s].up.count == 0 && w.places[s].down.count == 0 &&
                  w.places[s].fetched_ns == 0;
    return settled && w.ticket_count > 20;
}

static void check_end(void)
{
    CHECK(is_settled(), "the world is quiet");
    for (uint64_t i = 1; i <= w.call_count; i++)
        CHECK(!w.calls[i].waits, "call %" PRIu64 " got no answer", i);
    for (uint32_t s = 0; s < w.slots; s++) {
        const struct process *p = &w.places[s];
        CHECK(same(p->active, name_of(w.placement)),
              "slot %u uses placement %u, not %u, at the end", s, p->active.version,
              name_of(w.placement).version);
        CHECK(p->next.version == 0, "slot %u holds experts that it does not use", s);
    }
}

static void begin_world(void)
{
    const struct moe_placement_layer layer = {LAYER, EXPERTS};
    struct moe_status st = moe_placement_set_linear(memory[2], 1, w.slots, 1, &layer, 1);
    CHECK(!moe_failed(&st), "%s", st.text);
    w.placement = memory[0];
    w.durable.placed = name_of(memory[2]);
    for (uint32_t s = 0; s < w.slots; s++) {
        w.places[s].incarnation = ++w.next_id;
        w.places[s].up.items = queue_memory[2 * s];
        w.places[s].down.items = queue_memory[2 * s + 1];
    }
    start();
}

static size_t total[8];

/* False: a promise was broken; see broken_text. */
static bool run(uint64_t seed)
{
    struct moe_sequencer *sequencer = w.sequencer;
    w = (struct world){.seed = seed,
                       .random = {.state = seed * 2654435761u + 1},
                       .next_order = 1,
                       .now_ns = MOE_NS_PER_S,
                       .sequencer = sequencer};
    w.slots = 1 + (uint32_t)rnd(SLOTS_MOST);
    if (rnd(2) == 0)
        w.automatic = (struct moe_rebalancer_policy){MOE_NS_PER_S, 1};
    bool good = setjmp(broken) == 0;
    if (good) {
        begin_world();
        for (int i = 0; i < STEPS; i++)
            step(STEP_MS);
        for (int i = 0; i < 20; i++) {
            operate(); /* so that a move is often under way */
            step(STEP_MS);
        }
        w.quiet = true;
        end_view(); /* slots that fetch have nothing to fetch then */
        for (int i = 0; i < QUIET_STEPS && !is_settled(); i++)
            step(QUIET_STEP_MS);
        check_end();
    }
    moe_moves_destroy(w.machine);
    const size_t seen[8] = {w.moved, w.failed, w.crashes, w.views,
                            w.swaps, w.steps,  w.looks,   w.said_moved};
    for (int i = 0; i < 8; i++)
        total[i] += seen[i];
    return good;
}

static int try_guards(uint64_t seeds)
{
    int missed = 0;
    for (int g = 0; g < (int)MOE_GUARD_COUNT; g++) {
        uint64_t seed = 1;
        off = (enum moe_guard)g;
        while (seed <= seeds && run(seed))
            seed++;
        if (seed <= seeds)
            printf("%-24s off: seed %" PRIu64 ": %s\n", guards[g].name, seed, broken_text);
        else
            printf("%-24s off: nothing was broken (%s)\n", guards[g].name, guards[g].promise);
        missed += seed > seeds;
    }
    return missed;
}

static bool make_memory(void)
{
    struct moe_status st = moe_sequencer_create(&w.sequencer);
    for (int i = 0; i < 3 && !moe_failed(&st); i++)
        st = moe_placement_create(&memory[i]);
    return !moe_failed(&st);
}

static int run_all(int argc, char **argv)
{
    uint64_t seeds = 150, first = 1;
    bool guarded = false;
    for (int i = 1; i < argc; i++) {
        guarded = guarded || strcmp(argv[i], "--guards") == 0;
        if (strcmp(argv[i], "--seeds") == 0 && i + 1 < argc)
            seeds = strtoull(argv[i + 1], NULL, 10);
    }
    if (guarded)
        return try_guards(seeds) == 0 ? 0 : 1;
    const char *replay = getenv("MOE_SEED");
    if (replay != NULL) {
        first = strtoull(replay, NULL, 10);
        seeds = first;
    }
    for (uint64_t seed = first; seed <= seeds; seed++) {
        if (run(seed))
            continue;
        printf("t = %.3f s: %s (replay with MOE_SEED=%" PRIu64 ")\n", (double)w.now_ns / 1e9,
               broken_text, seed);
        return 1;
    }
    printf("%" PRIu64 " runs: %zu moves, %zu calls failed, %zu crashes, %zu views, %zu swaps, %zu "
           "steps of a slot; %zu looks, %zu moves said with those of no operator\n",
           seeds - first + 1, total[0], total[1], total[2], total[3], total[4], total[5], total[6],
           total[7]);
    bool rough = total[0] > 0 && total[1] > 0 && total[2] > 0 && total[6] > 0;
    return rough && (seeds == first || total[7] > total[0]) ? 0 : 1;
}

int main(int argc, char **argv)
{
    int code = make_memory() ? run_all(argc, argv) : 1;
    moe_sequencer_destroy(w.sequencer);
    for (int i = 0; i < 3; i++)
        moe_placement_destroy(memory[i]);
    return code;
}
