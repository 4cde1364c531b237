/* SPDX-License-Identifier: Apache-2.0 */
/* A seeded world around the machine of added models: workers that follow the protocol, streams that
 * delay and break, processes that are replaced, stop answering or have other files, views that end,
 * a coordinator that crashes between any two of its actions, a disk that refuses writes, operators
 * who load, unload and leave. Time is virtual.
 *
 * Promises are checked at every step; at the end the world becomes quiet, and all models that the
 * group has must be served. `--guards` switches each guard of the machine off in turn: some promise
 * must break. MOE_SEED=n replays one run; `--seeds N` sets their number. */
#include "base/clock.h"
#include "base/guard.h"
#include "coordinator/models.h"
#include "support/random.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SLOTS_MOST = 4,
    NUMBERS = 256,
    EPOCHS = 600,
    TICKETS = 64,
    QUEUE = 512,
    CALLS = 256,
    NAMES = 4,
    STEPS = 1200,
    STEP_MS = 20,
    QUIET_STEPS = 16000,
    QUIET_STEP_MS = 250,
    FREE_BYTES = 1000,
};

/* ------------------------------------------------------------------ guards */

static enum moe_guard off = MOE_GUARD_COUNT;

static const struct {
    const char *name, *promise;
} guards[] = {
#define X(name, promise) {#name, promise},
#include "models_guards.h"
#undef X
};

bool moe_guard_is_off(enum moe_guard guard)
{
    return guard == off;
}

/* ------------------------------------------------------------------ the world */

enum kind { DOWN_REGISTERED, DOWN_COMMIT, DOWN_ABORT, DOWN_ORDER, UP_REPORT, UP_PROGRESS };

struct message {
    enum kind kind;
    uint64_t at_ns;
    uint64_t epoch, order;
    enum moe_added_step step;
    uint32_t number, directory;
    bool if_idle, numbers[NUMBERS];
    struct moe_status error;
    uint64_t files, bytes, digest;
};

struct stream { /* one direction; a ring */
    struct message *items;
    size_t head, count;
};

enum holding { NOTHING, OPENED, LOADING, HOLDS };

struct held {
    enum holding state;
    uint32_t directory;
    bool quiesced, added;
    bool unlisted; /* the group does not have it: free it when no view serves it */
    uint64_t last_order[MOE_ADDED_RESUME + 1];
    uint64_t loaded_ns; /* LOADING: it ends then */
    uint64_t idle_ns;   /* a QUIESCE that waits is reported then; 0 = none waits */
    uint64_t files, digest;
};

struct process {
    uint64_t incarnation, stream; /* stream 0 = not connected */
    uint64_t connect_ns;
    bool stuck;
    uint64_t epoch;
    size_t run; /* tickets of the epoch */
    uint64_t ticket_ns;
    struct stream up, down;
    struct held models[NUMBERS];
};

struct ticket {
    uint32_t number;
    bool add;
};

struct call {
    bool waits, load, dry_run, left;
    uint32_t number; /* of an unload */
};

static struct world {
    uint64_t seed, now_ns;
    struct rng random;
    uint32_t slots;
    bool quiet;
    struct moe_added *machine;
    struct moe_added_saved durable;
    uint64_t epoch, view, form_ns; /* highest epoch; in force */
    uint64_t live;                 /* slots of the view */
    uint64_t next_id, next_order;
    struct process places[SLOTS_MOST];
    bool known[SLOTS_MOST]; /* the coordinator knows the process of the slot */
    struct {
        struct ticket list[TICKETS];
        size_t count;
    } tickets[EPOCHS];
    uint32_t directories;           /* given so far; each load gets a new one */
    uint32_t directory_of[NUMBERS]; /* 0 = not seen */
    bool must_exist[NUMBERS];       /* a load was answered */
    uint64_t record[NUMBERS];       /* digest; 0 = none */
    struct call calls[CALLS];
    uint64_t call_count;
    size_t served, unloaded, failed, crashes, views, replaced, masked;
} w;

static struct message queue_memory[2 * SLOTS_MOST][QUEUE];
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

static void push(struct stream *q, struct message m)
{
    m.at_ns = after_ms(w.quiet ? 5 : chance(20) ? 1500 : 40);
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

/* ------------------------------------------------------------------ workers */

static void report(struct process *p, uint32_t number, enum moe_added_step step, uint64_t order,
                   struct moe_status error)
{
    const struct held *h = &p->models[number];
    bool small = h->directory % 7 == 3 && p->incarnation % 2 == 0;
    struct message m = {.kind = UP_REPORT,
                        .number = number,
                        .step = step == MOE_ADDED_RESUME ? MOE_ADDED_QUIESCE : step,
                        .order = order,
                        .epoch = p->epoch,
                        .error = error,
                        .files = h->files,
                        .digest = h->digest,
                        .bytes = small ? 10 : FREE_BYTES};
    if (p->stream != 0)
        push(&p->up, m);
}

static void report_ok(struct process *p, uint32_t number, enum moe_added_step step)
{
    report(p, number, step, p->models[number].last_order[step], moe_ok());
}

/* Index behind the last ticket of `number` that is ADD (or REMOVE); 0 = there is none. */
static size_t last_ticket(uint64_t epoch, uint32_t number, bool add)
{
    size_t last = 0;
    for (size_t i = 0; i < w.tickets[epoch].count; i++)
        if (w.tickets[epoch].list[i].number == number && w.tickets[epoch].list[i].add == add)
            last = i + 1;
    return last;
}

/* The worker of slot 0 is the sequencer. */
static void take_ticket_order(uint32_t slot, const struct message *m)
{
    struct process *p = &w.places[slot];
    bool add = m->step == MOE_ADDED_ADD;
    if (m->epoch != p->epoch || p->epoch == 0)
        return;
    size_t mine = last_ticket(p->epoch, m->number, add);
    size_t other = last_ticket(p->epoch, m->number, !add);
    if (mine > other) {
        if (p->run >= mine)
            report_ok(p, m->number, m->step);
        return;
    }
    if (slot != (uint32_t)__builtin_ctzll(w.live)) /* the sequencer */
        return;
    for (uint32_t s = 0; add && s < w.slots; s++) {
        const struct held *h = &w.places[s].models[m->number];
        if (w.places[s].epoch != p->epoch)
            continue; /* it has left: the ticket never runs there */
        CHECK(h->state == HOLDS, "ADD of model %u before slot %u holds it", m->number, s);
        CHECK(h->digest == p->models[m->number].digest,
              "ADD of model %u with other bytes on slot %u", m->number, s);
    }
    if (add) {
        bool durable = false;
        for (uint32_t i = 0; i < w.durable.count; i++)
            durable = durable || w.durable.models[i].number == m->number;
        CHECK(durable, "ADD of model %u before it is durable", m->number);
    }
    CHECK(w.tickets[p->epoch].count < TICKETS, "tickets do not run away");
    w.tickets[p->epoch].list[w.tickets[p->epoch].count++] =
        (struct ticket){.number = m->number, .add = add};
}

static void run_tickets(struct process *p)
{
    if (p->epoch == 0 || p->run >= w.tickets[p->epoch].count || p->ticket_ns > w.now_ns)
        return;
    const struct ticket *t = &w.tickets[p->epoch].list[p->run++];
    struct held *h = &p->models[t->number];
    CHECK(!t->add || h->state == HOLDS, "a ticket of model %u finds no layers", t->number);
    CHECK(t->add || h->quiesced || !h->added, "REMOVE of model %u while requests are taken",
          t->number);
    h->added = t->add;
    report_ok(p, t->number, t->add ? MOE_ADDED_ADD : MOE_ADDED_REMOVE);
    p->ticket_ns = after_ms(60);
}

static void check_close(const struct process *p, uint32_t number)
{
    CHECK(!p->models[number].added, "CLOSE of model %u while it is served", number);
    CHECK(p->epoch == 0 ||
              last_ticket(p->epoch, number, true) <= (last_ticket(p->epoch, number, false) > p->run
                                                          ? p->run
                                                          : last_ticket(p->epoch, number, false)),
          "CLOSE of model %u before its last ticket", number);
}

static void forget(struct held *h)
{
    uint64_t orders[MOE_ADDED_RESUME + 1];
    memcpy(orders, h->last_order, sizeof orders);
    *h = (struct held){0};
    memcpy(h->last_order, orders, sizeof orders);
}

static void take_quiesce(struct process *p, const struct message *m)
{
    struct held *h = &p->models[m->number];
    if (m->if_idle && chance(4)) {
        struct moe_status busy =
            moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_IN_USE, "requests wait");
        report(p, m->number, m->step, m->order, busy);
        return;
    }
    h->quiesced = h->state == HOLDS;
    if (m->if_idle || !h->quiesced)
        report_ok(p, m->number, m->step);
    else if (h->idle_ns == 0)
        h->idle_ns = after_ms(300);
}

static void take_order(uint32_t slot, const struct message *m)
{
    struct process *p = &w.places[slot];
    struct held *h = &p->models[m->number];
    h->last_order[m->step] = m->order;
    switch (m->step) {
    case MOE_ADDED_OPEN:
        if (h->state == NOTHING) {
            h->state = OPENED;
            h->directory = m->directory;
            h->files = chance(30) ? 2 : 1;
            h->digest = chance(30) ? 2 : 1;
        }
        CHECK(h->directory == m->directory, "number %u is given twice", m->number);
        report_ok(p, m->number, MOE_ADDED_OPEN);
        break;
    case MOE_ADDED_LOAD:
        CHECK(h->state != NOTHING, "LOAD of model %u before OPEN", m->number);
        CHECK(h->directory % 7 != 3 || p->incarnation % 2 != 0, "LOAD of model %u without memory",
              m->number);
        CHECK(h->files == m->files, "LOAD of model %u with other files", m->number);
        if (h->state == OPENED) {
            h->state = LOADING;
            h->loaded_ns = after_ms(400);
        } else if (h->state == HOLDS) {
            report_ok(p, m->number, MOE_ADDED_LOAD);
        }
        break;
    case MOE_ADDED_ADD:
    case MOE_ADDED_REMOVE: take_ticket_order(slot, m); break;
    case MOE_ADDED_QUIESCE: take_quiesce(p, m); break;
    case MOE_ADDED_RESUME:
        h->quiesced = false;
        h->idle_ns = 0;
        report_ok(p, m->number, MOE_ADDED_RESUME);
        break;
    case MOE_ADDED_CLOSE:
        check_close(p, m->number);
        forget(h);
        report_ok(p, m->number, MOE_ADDED_CLOSE);
        break;
    }
}

static void leave_epoch(struct process *p)
{
    p->epoch = 0;
    p->run = 0;
    for (uint32_t n = 0; n < NUMBERS; n++) {
        p->models[n].added = false;
        if (p->models[n].unlisted)
            forget(&p->models[n]);
    }
}

/* In a view that has ended, a ticket that has not run here may still add an unlisted model. */
static void take_registered(struct process *p, const struct message *m)
{
    bool ended = p->epoch != 0 && p->epoch != m->epoch;
    for (uint32_t n = 0; n < NUMBERS; n++)
        if (!m->numbers[n] && (ended || p->models[n].added))
            p->models[n].unlisted = true;
        else if (!m->numbers[n])
            forget(&p->models[n]);
}

static void work(uint32_t slot)
{
    struct process *p = &w.places[slot];
    struct message m;
    while (!p->stuck && p->stream != 0 && pop(&p->down, &m)) {
        switch (m.kind) {
        case DOWN_REGISTERED: take_registered(p, &m); break;
        case DOWN_COMMIT:
            leave_epoch(p);
            p->epoch = m.epoch;
            break;
        case DOWN_ABORT: leave_epoch(p); break;
        default: take_order(slot, &m); break;
        }
    }
    if (p->stuck)
        return;
    run_tickets(p);
    for (uint32_t n = 0; n < NUMBERS; n++) {
        struct held *h = &p->models[n];
        if (h->state == LOADING && h->loaded_ns <= w.now_ns) {
            struct moe_status st = moe_ok();
            if (chance(30))
                st = moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "a bad disk");
            h->state = moe_failed(&st) ? OPENED : HOLDS;
            report(p, n, MOE_ADDED_LOAD, h->last_order[MOE_ADDED_LOAD], st);
        } else if (h->state == LOADING && chance(10) && p->stream != 0) {
            push(&p->up, (struct message){.kind = UP_PROGRESS, .number = n, .bytes = rnd(100)});
        }
        if (h->idle_ns != 0 && h->idle_ns <= w.now_ns) {
            h->idle_ns = 0;
            report_ok(p, n, MOE_ADDED_QUIESCE);
        }
    }
}

/* ------------------------------------------------------------------ the coordinator */

static void crash(void);

static void send_order(const struct moe_added_action *a)
{
    struct moe_added_info info;
    struct process *p = &w.places[a->slot];
    CHECK(moe_added_find(w.machine, a->number, &info), "orders are about models");
    CHECK(a->number < NUMBERS, "numbers do not run away");
    if (p->stream == 0 || p->stream != a->stream)
        return;
    uint32_t directory = (uint32_t)strtoul(info.directory + 2, NULL, 10);
    if (w.directory_of[a->number] == 0)
        w.directory_of[a->number] = directory;
    CHECK(w.directory_of[a->number] == directory, "number %u is given twice", a->number);
    push(&p->down, (struct message){.kind = DOWN_ORDER,
                                    .step = a->step,
                                    .number = a->number,
                                    .order = a->order,
                                    .epoch = a->epoch,
                                    .if_idle = a->if_idle,
                                    .directory = directory,
                                    .files = (uint64_t)(info.fingerprint[0] - '0')});
}

static void answer(const struct moe_added_action *a)
{
    struct call *c = &w.calls[a->call];
    struct moe_added_info info;
    CHECK(c->waits, "a call has one answer");
    CHECK(!c->left, "an operator who has left gets no answer");
    c->waits = false;
    if (moe_failed(&a->status)) {
        w.failed++;
        return;
    }
    if (c->load && !c->dry_run) {
        CHECK(moe_added_find(w.machine, a->number, &info) && info.state == MOE_MODEL_SERVING,
              "a load is answered when the model is served");
        w.must_exist[a->number] = true;
        w.served++;
    } else if (!c->load) {
        for (uint32_t s = 0; s < w.slots; s++)
            CHECK(!w.places[s].models[c->number].added || w.places[s].epoch != w.view,
                  "an unload is answered when no slot serves the model");
        w.unloaded++;
    }
}

static void save(const struct moe_added_action *a)
{
    struct moe_status st = moe_ok();
    if (chance(30))
        st = moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "disk full");
    else
        w.durable = *moe_added_to_save(w.machine);
    moe_added_on_saved(w.machine, w.now_ns, a->sequence, &st);
}

static void carry_out(void)
{
    struct moe_added_action a;
    while (moe_added_next_action(w.machine, &a)) {
        switch (a.kind) {
        case MOE_ADDED_ORDER: send_order(&a); break;
        case MOE_ADDED_SAVE: save(&a); break;
        case MOE_ADDED_ANSWER: answer(&a); break;
        case MOE_ADDED_LOG: break;
        case MOE_ADDED_FORGET: w.record[a.number] = 0; break;
        }
        if (chance(400)) {
            crash();
            return;
        }
    }
}

static void look(void)
{
    struct moe_added_slot slots[MOE_PLACEMENT_SLOTS_MAX] = {{0}};
    for (uint32_t s = 0; s < w.slots; s++)
        if (w.known[s])
            slots[s] = (struct moe_added_slot){w.places[s].incarnation, w.places[s].stream, 0};
    moe_added_on_group(w.machine, w.now_ns, w.view, w.live, moe_placement_first_slots(w.slots),
                       slots);
    carry_out();
}

static void start(void)
{
    struct moe_added_config config = {.slots = w.slots, .replicas = 1, .first_order = w.next_order};
    struct moe_status st = moe_added_create(&config, &w.durable, w.epoch, &w.machine);
    CHECK(!moe_failed(&st), "create: %s", st.text);
    w.next_order += 100000;
    for (uint32_t n = 0; n < NUMBERS; n++) {
        bool there = !w.must_exist[n];
        for (uint32_t i = 0; i < w.durable.count; i++)
            there = there || w.durable.models[i].number == n;
        CHECK(there, "model %u is lost in a restart", n);
    }
}

static bool is_live(uint32_t slot)
{
    return (w.live >> slot & 1) != 0;
}

static void end_view(void)
{
    if (w.view == 0)
        return;
    w.view = 0;
    for (uint32_t s = 0; s < w.slots; s++)
        if (is_live(s) && w.places[s].stream != 0)
            push(&w.places[s].down, (struct message){.kind = DOWN_ABORT});
}

static void disconnect(struct process *p)
{
    p->stream = 0;
    p->up.count = p->down.count = 0;
    p->connect_ns = after_ms(w.quiet ? 10 : 500);
}

/* The view goes on if the log had it, and its members come back. */
static void crash(void)
{
    w.crashes++;
    moe_added_destroy(w.machine);
    for (size_t i = 1; i <= w.call_count; i++)
        w.calls[i].waits = false;
    bool restored = w.view != 0 && rnd(3) > 0;
    for (uint32_t s = 0; s < w.slots; s++) {
        disconnect(&w.places[s]);
        w.known[s] = restored && is_live(s);
    }
    if (!restored)
        w.view = 0;
    start();
    look();
}

static void connect(uint32_t slot)
{
    struct process *p = &w.places[slot];
    struct message m = {.kind = DOWN_REGISTERED, .epoch = w.view};
    struct moe_added_info info;
    p->stream = ++w.next_id;
    w.known[slot] = true;
    for (size_t i = 0; moe_added_info(w.machine, i, &info); i++)
        m.numbers[info.number] = !info.closed;
    push(&p->down, m);
    if (p->epoch != w.view && (is_live(slot) || p->epoch != 0)) {
        if (is_live(slot))
            end_view();
        push(&p->down, (struct message){.kind = DOWN_ABORT});
    }
    look();
}

static void replace(uint32_t slot)
{
    struct process *p = &w.places[slot];
    w.replaced++;
    if (is_live(slot))
        end_view();
    w.known[slot] = false;
    if (rnd(2) == 0)
        look();
    struct stream up = p->up, down = p->down;
    *p = (struct process){.incarnation = ++w.next_id, .up = up, .down = down};
    disconnect(p);
    look();
}

/* A view of all slots, or now and then of those that are there; that one gives way to a larger
 * one. */
static void form(void)
{
    uint64_t able = 0, all = UINT64_MAX >> (64 - w.slots);
    for (uint32_t s = 0; s < w.slots; s++)
        able |= (uint64_t)(w.known[s] && w.places[s].stream != 0) << s;
    if (w.view != 0 && w.live != all && able == all && rnd(20) == 0) {
        end_view();
        look();
    }
    bool masked = w.view == 0 && able != 0 && able != all && chance(40);
    if (!masked && (w.view != 0 || able != all)) {
        w.form_ns = after_ms(400);
        return;
    }
    if (!masked && w.now_ns < w.form_ns)
        return;
    w.live = able;
    w.masked += masked;
    CHECK(w.epoch + 1 < EPOCHS, "epochs do not run away");
    w.view = ++w.epoch;
    w.views++;
    for (uint32_t s = 0; s < w.slots; s++)
        if (is_live(s))
            push(&w.places[s].down, (struct message){.kind = DOWN_COMMIT, .epoch = w.view});
    look();
}

static void receive(uint32_t slot)
{
    struct process *p = &w.places[slot];
    struct message m;
    while (p->stream != 0 && pop(&p->up, &m)) {
        if (m.kind == UP_PROGRESS) {
            moe_added_on_progress(w.machine, w.now_ns, slot, m.number, m.bytes, 100);
            continue;
        }
        struct moe_status st = m.error;
        if (m.step == MOE_ADDED_LOAD && !moe_failed(&st) &&
            moe_added_awaits_load(w.machine, slot, m.number, m.order)) {
            if (w.record[m.number] == 0)
                w.record[m.number] = m.digest;
            if (w.record[m.number] != m.digest)
                st = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH, "other bytes");
        }
        char fingerprint[2] = {(char)('0' + m.files), '\0'};
        struct moe_model_layer layer = {
            .info = {.layer = 3, .hidden = 8, .experts = 8, .top_k = 2, .intermediate = 4},
            .common_file = 10,
            .common_resident = 20,
            .expert_file = 1,
            .expert_resident = 2};
        struct moe_added_report r = {.number = m.number,
                                     .step = m.step,
                                     .order = m.order,
                                     .epoch = m.epoch,
                                     .error = &st,
                                     .fingerprint = fingerprint,
                                     .family = "mixtral",
                                     .layers = &layer,
                                     .layer_count = 1,
                                     .free_bytes = m.bytes};
        moe_added_on_report(w.machine, w.now_ns, slot, &r);
        carry_out();
    }
}

/* ------------------------------------------------------------------ operators */

static void operate(void)
{
    if (w.call_count + 1 >= CALLS || w.durable.highest + 1 >= NUMBERS)
        return;
    struct call *c = &w.calls[w.call_count + 1];
    char directory[32], name[8];
    struct moe_status st;
    (void)snprintf(name, sizeof name, "m%u", (unsigned)rnd(NAMES));
    *c = (struct call){.load = rnd(3) > 0};
    if (c->load) {
        c->dry_run = rnd(6) == 0;
        (void)snprintf(directory, sizeof directory, "/m%u", ++w.directories);
        st = moe_added_load(w.machine, w.now_ns, w.call_count + 1, directory, name, "default",
                            c->dry_run);
    } else {
        struct moe_added_info info;
        bool known = moe_added_find_name(w.machine, name, &info);
        st = moe_added_unload(w.machine, w.now_ns, w.call_count + 1, name, rnd(2) == 0);
        CHECK(known || st.code == MOE_NOT_FOUND, "an unknown model cannot be unloaded");
        if (!moe_failed(&st)) {
            c->number = info.number;
            w.must_exist[info.number] = false;
        }
    }
    if (!moe_failed(&st)) {
        c->waits = true;
        w.call_count++;
    }
    carry_out();
}

static void cancel(void)
{
    uint64_t number = 1 + rnd(w.call_count + 1);
    if (number > w.call_count || !w.calls[number].waits)
        return;
    w.calls[number].waits = false;
    w.calls[number].left = true;
    moe_added_cancel(w.machine, w.now_ns, number);
    carry_out();
}

/* ------------------------------------------------------------------ runs */

static void step(uint64_t ms)
{
    w.now_ns += ms * MOE_NS_PER_MS;
    if (chance(25))
        operate();
    if (chance(250))
        cancel();
    if (chance(300))
        replace((uint32_t)rnd(w.slots));
    if (chance(200))
        end_view();
    if (chance(100))
        disconnect(&w.places[rnd(w.slots)]);
    if (chance(500))
        w.places[rnd(w.slots)].stuck = true;
    if (chance(400))
        w.now_ns += rnd(400) * MOE_NS_PER_S;
    for (uint32_t s = 0; s < w.slots; s++) {
        struct process *p = &w.places[s];
        p->stuck = p->stuck && !w.quiet && !chance(100);
        if (p->stream == 0 && p->connect_ns <= w.now_ns)
            connect(s);
        work(s);
        receive(s);
    }
    look();
    form();
    if (moe_added_deadline(w.machine) <= w.now_ns) {
        moe_added_on_tick(w.machine, w.now_ns);
        carry_out();
    }
}

/* Nothing is under way anywhere: more steps change nothing. */
static bool is_settled(void)
{
    bool settled = w.view != 0 && w.live == UINT64_MAX >> (64 - w.slots) &&
                   moe_added_deadline(w.machine) == MOE_NEVER;
    for (uint32_t s = 0; settled && s < w.slots; s++) {
        const struct process *p = &w.places[s];
        settled = p->stream != 0 && p->up.count == 0 && p->down.count == 0 && p->epoch == w.view &&
                  p->run == w.tickets[w.view].count;
        for (uint32_t n = 0; settled && n < NUMBERS; n++)
            settled = p->models[n].state != LOADING && p->models[n].idle_ns == 0;
    }
    return settled;
}

static void check_end(void)
{
    struct moe_added_info info;
    bool known[NUMBERS] = {false};
    CHECK(w.view != 0, "the world is quiet");
    for (uint64_t i = 1; i <= w.call_count; i++)
        CHECK(!w.calls[i].waits, "call %" PRIu64 " got no answer", i);
    for (size_t i = 0; moe_added_info(w.machine, i, &info); i++) {
        known[info.number] = true;
        bool spoilt = w.record[info.number] == 2 || info.fingerprint[0] == '2' ||
                      w.directory_of[info.number] % 7 == 3;
        CHECK(spoilt || info.state == MOE_MODEL_SERVING, "model %u is in state %d at the end: %s",
              info.number, info.state, info.reason);
        for (uint32_t s = 0; !spoilt && s < w.slots; s++)
            CHECK(w.places[s].models[info.number].added &&
                      !w.places[s].models[info.number].quiesced,
                  "slot %u does not serve model %u", s, info.number);
    }
    for (uint32_t n = 0; n < NUMBERS; n++) {
        CHECK(known[n] || !w.must_exist[n], "model %u is gone", n);
        for (uint32_t s = 0; s < w.slots; s++)
            CHECK(known[n] || w.places[s].models[n].state == NOTHING,
                  "slot %u has model %u, which the group does not have", s, n);
    }
}

static size_t total[7];

/* False: a promise was broken; see broken_text. */
static bool run(uint64_t seed)
{
    w = (struct world){.seed = seed, .random = {.state = seed * 2654435761u + 1}, .next_order = 1};
    w.now_ns = MOE_NS_PER_S;
    w.slots = 1 + (uint32_t)rnd(SLOTS_MOST);
    for (uint32_t s = 0; s < w.slots; s++) {
        w.places[s].incarnation = ++w.next_id;
        w.places[s].up.items = queue_memory[2 * s];
        w.places[s].down.items = queue_memory[2 * s + 1];
    }
    bool good = setjmp(broken) == 0;
    if (good) {
        start();
        for (int i = 0; i < STEPS; i++)
            step(STEP_MS);
        w.quiet = true;
        end_view(); /* a slot that failed in a restored view is tried again in the next one */
        for (int i = 0; i < QUIET_STEPS && !is_settled(); i++)
            step(QUIET_STEP_MS);
        check_end();
    }
    moe_added_destroy(w.machine);
    const size_t seen[7] = {w.served, w.unloaded, w.failed, w.crashes,
                            w.views,  w.replaced, w.masked};
    for (int i = 0; i < 7; i++)
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
            printf("%-20s off: seed %" PRIu64 ": %s\n", guards[g].name, seed, broken_text);
        else
            printf("%-20s off: nothing was broken (%s)\n", guards[g].name, guards[g].promise);
        missed += seed > seeds;
    }
    return missed;
}

int main(int argc, char **argv)
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
    printf("%" PRIu64 " runs: %zu loads, %zu unloads, %zu calls failed, %zu crashes, %zu views, "
           "%zu workers replaced, %zu views of some slots\n",
           seeds - first + 1, total[0], total[1], total[2], total[3], total[4], total[5], total[6]);
    return total[0] > 0 && total[1] > 0 && total[6] > 0 ? 0 : 1;
}
