/* SPDX-License-Identifier: Apache-2.0 */
/* What workers believe: a seeded world around the membership machine and the workers' leases. Links
 * are cut in one direction or both, between workers and the coordinator and between workers. Every
 * process has a clock that drifts by up to 5 %. A toy sequencer applies numbered changes under a
 * view. Time is virtual.
 *
 * Promises, checked all the time:
 *  - a worker's lease is over before the coordinator gives its slot away for want of a message;
 *  - no change completes under a view once one has begun under a later view;
 *  - no checkpoint of a view becomes visible once a later view is in force;
 *  - a change that was answered is in every later state of its lineage;
 *  - without further faults the group changes and answers again.
 *
 * Each guard can be switched off (--off NAME): the run has to break a promise then. --guards tries
 * them all. A failure prints its seed: `--seed n` replays it. */
#include "base/clock.h"
#include "coordinator/membership.h"
#include "daemon/lease.h"
#include "sim_stream.h"
#include "support/random.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    IDS_MAX = 5,
    SLOTS_MAX = 3,
    PROCESSES_MAX = 64,
    EPOCHS_MAX = 512,
    LINEAGES_MAX = 512,
    STEP_MS = 4,
    LEASE_MS = 1000,
    FORM_MS = 600,
    CUT_MAX_MS = 2500,
    QUIET_STEPS = 3000,
};

/* ------------------------------------------------------------------ guards */

#define GUARDS(X)                                                                                  \
    X(LEASE)  /* a worker without a lease begins no change */                                      \
    X(MARGIN) /* the coordinator's lease is longer by 15 %, and not by 8 % */                      \
    X(SENT)   /* a lease runs from when the heartbeat was sent, and not from its answer */         \
    X(WAIT)   /* a group that trains waits for leases that it cannot end */                        \
    X(FENCE)  /* the rename of a checkpoint looks at the fence */

enum guard {
#define X(name) GUARD_##name,
    GUARDS(X)
#undef X
        GUARD_COUNT
};
static const char *const guard_names[] = {
#define X(name) #name,
    GUARDS(X)
#undef X
};
static enum guard off = GUARD_COUNT;

static bool is_off(enum guard guard)
{
    return off == guard;
}

/* ------------------------------------------------------------------ the world */

struct process {
    bool alive, registered;
    uint32_t id, slot;
    uint64_t incarnation, stream;
    double rate; /* of its clock */
    struct sim_queue up, down;
    uint64_t up_cut_ns, down_cut_ns, peers_cut_ns; /* cut until then */
    uint64_t asleep_ns, connect_ns, heartbeat_ns;
    struct moe_lease lease;
    uint64_t answered_ns; /* local time of the last answer, for SENT */
    uint64_t floor, preparing, view;
    uint32_t load_version;
    uint64_t load_order;
    uint64_t load_ns, ready_ns, save_ns; /* when due; 0 = not */
    /* State of training. */
    uint64_t lineage, applied, hash;
    bool inconsistent;
};

/* A change under way; one at a time for each view. */
struct change {
    uint64_t epoch, number;
    uint64_t begins_ns[SLOTS_MAX], begun_local_ns[SLOTS_MAX]; /* 0 = has not begun */
    uint64_t came_local_ns[SLOTS_MAX];                        /* 0 = the ticket has not come */
    size_t members[SLOTS_MAX];
    uint64_t takes_ns, complete_ns; /* 0 = is not complete */
    uint32_t origin;
    uint64_t answer_ns, lineage, applied;
};

struct world {
    uint64_t seed;
    struct rng random;
    uint64_t now_ns;
    uint32_t slots, ids;
    bool quiet;
    const char *broken; /* the promise that did not hold */
    struct moe_membership *machine;
    struct moe_membership_config config;
    struct moe_membership_saved durable;
    double rate; /* of the coordinator's clock */
    uint64_t asleep_ns;
    uint64_t next_stream;
    struct process *processes;
    size_t process_count;
    struct change changes[4];
    struct {
        size_t members[SLOTS_MAX];
        bool begun, committed;
        uint64_t lineage;
        bool continues;
    } epochs[EPOCHS_MAX];
    uint64_t last_begun, last_committed; /* epochs */
    uint64_t lineages, answered[LINEAGES_MAX];
    uint64_t fence;
    uint64_t orders[SLOTS_MAX]; /* of the last ASSIGN to each slot */
    size_t commits, done, answers, refused, saves, fenced, replaced;
    size_t late; /* answers to earlier orders */
};

static void check(struct world *w, bool holds, const char *promise)
{
    if (!holds && w->broken == NULL)
        w->broken = promise;
}

static uint64_t rnd(struct world *w, uint64_t below)
{
    return rng_next(&w->random) % below;
}

static bool chance(struct world *w, uint64_t in)
{
    return !w->quiet && rnd(w, in) == 0;
}

static uint64_t local(const struct world *w, const struct process *p)
{
    return (uint64_t)((double)w->now_ns * p->rate);
}

static uint64_t coordinator_time(const struct world *w, uint64_t at_ns)
{
    return (uint64_t)((double)at_ns * w->rate);
}

/* The gate's functions are the product's; its clock is that of one process. */
static uint64_t gate_now_ns;

static uint64_t gate_clock(void)
{
    return gate_now_ns;
}

static void open_gate(const struct world *w, const struct process *p, struct moe_lease_gate *gate)
{
    gate_now_ns = local(w, p);
    moe_lease_gate_init(gate, gate_clock);
    moe_lease_gate_set(gate, &p->lease);
}

static bool holds_lease(const struct world *w, const struct process *p)
{
    struct moe_lease_gate gate;
    open_gate(w, p, &gate);
    return is_off(GUARD_LEASE) || moe_lease_gate_held(&gate);
}

static bool covers_change(const struct world *w, const struct process *p)
{
    struct moe_lease_gate gate;
    open_gate(w, p, &gate);
    return is_off(GUARD_LEASE) || moe_lease_gate_covers_change(&gate);
}

static bool covers_group(const struct world *w, const struct process *p)
{
    struct moe_lease_gate gate;
    open_gate(w, p, &gate);
    return is_off(GUARD_LEASE) || moe_lease_gate_covers_group(&gate);
}

static uint64_t ticket_ns(const struct process *p)
{
    return p->lease.term_ns / MOE_LEASE_TICKETS;
}

static void push(struct world *w, struct sim_queue *q, struct sim_message m)
{
    uint64_t delay_ms = rnd(w, chance(w, 20) ? 60 : 4);
    check(w, sim_push(q, m, w->now_ns + delay_ms * MOE_NS_PER_MS), "a queue is bounded");
}

/* ------------------------------------------------------------------ the coordinator's side */

static struct process *by_stream(struct world *w, uint64_t stream)
{
    for (size_t i = 0; i < w->process_count; i++)
        if (w->processes[i].stream == stream)
            return &w->processes[i];
    return NULL;
}

static bool same_state(const struct process *a, const struct process *b)
{
    return a->lineage == b->lineage && a->applied == b->applied && a->hash == b->hash &&
           !a->inconsistent && !b->inconsistent;
}

/* All members are READY: they have compared their states. */
static void agree(struct world *w, uint64_t epoch)
{
    const struct process *first = &w->processes[w->epochs[epoch].members[0]];
    bool same = first->lineage != 0;
    for (uint32_t s = 0; s < w->slots; s++)
        same = same && same_state(first, &w->processes[w->epochs[epoch].members[s]]);
    w->epochs[epoch].continues = same;
    w->epochs[epoch].lineage = same ? first->lineage : ++w->lineages;
    check(w, w->lineages < LINEAGES_MAX, "lineages are bounded");
    if (same)
        check(w, first->applied >= w->answered[first->lineage],
              "an answered change is in every later state of its lineage");
    w->epochs[epoch].committed = true;
    w->last_committed = epoch;
    w->commits++;
}

static void send_down(struct world *w, const struct moe_membership_action *a)
{
    struct sim_message m = {.kind = (enum sim_kind)a->message,
                            .stream = a->stream,
                            .epoch = a->epoch,
                            .slot = a->slot,
                            .sequence = a->sequence,
                            .oldest_ns = a->oldest_ms * MOE_NS_PER_MS,
                            .order = a->order,
                            .version = moe_placement_version(moe_membership_placement(w->machine))};
    struct process *p = by_stream(w, a->stream);
    if (p == NULL || a->epoch >= EPOCHS_MAX)
        return;
    if (a->message == MOE_MEMBERSHIP_ASSIGN)
        w->orders[a->slot] = a->order;
    if (a->message == MOE_MEMBERSHIP_PREPARE)
        w->epochs[a->epoch].members[a->slot] = (size_t)(p - w->processes);
    if (a->message == MOE_MEMBERSHIP_COMMIT && !w->epochs[a->epoch].committed)
        agree(w, a->epoch);
    push(w, &p->down, m);
}

/* The log names the slots that are lost for want of a message. */
static void on_log(struct world *w, const char *text, const size_t holders[SLOTS_MAX])
{
    unsigned slot;
    if (strstr(text, "lost: lease expired") == NULL || sscanf(text, "slot %u", &slot) != 1 ||
        slot >= w->slots)
        return;
    const struct process *p = &w->processes[holders[slot]];
    struct moe_lease_gate gate;
    open_gate(w, p, &gate);
    check(w, !p->alive || !moe_lease_gate_held(&gate),
          "a worker's lease is over before its slot is given away");
}

static void carry_out(struct world *w)
{
    struct moe_membership_action a;
    size_t holders[SLOTS_MAX];
    for (uint32_t s = 0; s < w->slots; s++) {
        struct moe_membership_worker worker;
        bool known = moe_membership_worker(w->machine, s, &worker);
        holders[s] = known ? (size_t)worker.incarnation - 1 : 0;
    }
    while (moe_membership_next_action(w->machine, &a)) {
        struct moe_status ok = moe_ok();
        struct process *p;
        switch (a.kind) {
        case MOE_MEMBERSHIP_SAVE:
            w->durable = *moe_membership_to_save(w->machine);
            moe_membership_on_saved(w->machine, coordinator_time(w, w->now_ns), a.sequence, &ok);
            break;
        case MOE_MEMBERSHIP_SEND: send_down(w, &a); break;
        case MOE_MEMBERSHIP_CLOSE:
            p = by_stream(w, a.stream);
            if (p != NULL)
                push(w, &p->down,
                     (struct sim_message){
                         .kind = SIM_CLOSED, .stream = a.stream, .reason = a.status.reason});
            break;
        case MOE_MEMBERSHIP_LOG: on_log(w, a.status.text, holders); break;
        case MOE_MEMBERSHIP_EXIT: break;
        }
    }
}

static void start_machine(struct world *w)
{
    struct moe_status st =
        moe_membership_create(&w->config, &w->durable, coordinator_time(w, w->now_ns), &w->machine);
    check(w, st.code == MOE_OK, "the machine starts");
    carry_out(w);
}

static void crash_machine(struct world *w)
{
    moe_membership_destroy(w->machine);
    for (size_t i = 0; i < w->process_count; i++) {
        struct process *p = &w->processes[i];
        p->up.count = 0;
        if (p->stream != 0)
            push(w, &p->down, (struct sim_message){.kind = SIM_CLOSED, .stream = p->stream});
    }
    start_machine(w);
}

static void register_up(struct world *w, const struct process *p, uint64_t now, uint64_t stream)
{
    static const struct moe_membership_layer layer = {
        .layer = 1, .hidden = 8, .experts = 6, .top_k = 2, .intermediate = 4};
    char id[8], endpoint[32], control[32];
    uint8_t token[MOE_MEMBERSHIP_TOKEN_BYTES] = {0};
    memcpy(token, &p->incarnation, sizeof p->incarnation);
    snprintf(id, sizeof id, "w%u", p->id);
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%u", 7000 + p->id);
    snprintf(control, sizeof control, "127.0.0.1:%u", 8000 + p->id);
    struct moe_membership_register r = {.worker_id = id,
                                        .endpoint = endpoint,
                                        .control_endpoint = control,
                                        .identity = "",
                                        .slot_token = token,
                                        .backend = "cpu",
                                        .model = "m",
                                        .fingerprint = "f00d",
                                        .family = "mixtral",
                                        .version = "1.2.3",
                                        .incarnation = p->incarnation,
                                        .max_tokens_per_step = 64,
                                        .trains = !is_off(GUARD_WAIT),
                                        .layers = &layer,
                                        .layer_count = 1};
    moe_membership_on_register(w->machine, now, stream, &r);
}

static void deliver_up(struct world *w, const struct process *p, const struct sim_message *m)
{
    const struct moe_status ok = moe_ok();
    uint64_t now = coordinator_time(w, m->at_ns); /* when it came in */
    struct moe_membership_heartbeat h = {.epoch = m->epoch, .sequence = m->sequence};
    uint32_t slot;
    switch (m->kind) {
    case SIM_REGISTER: register_up(w, p, now, m->stream); break;
    case SIM_HEARTBEAT: moe_membership_on_heartbeat(w->machine, now, m->stream, &h); break;
    case SIM_LOADED:
        w->late += m->order != 0 && moe_membership_slot_of(w->machine, m->stream, &slot) &&
                   m->order < w->orders[slot];
        moe_membership_on_loaded(w->machine, now, m->stream, m->version, m->order, &ok);
        break;
    case SIM_READY:
        moe_membership_on_ready(w->machine, now, m->stream, m->epoch, false, &ok);
        break;
    case SIM_PEER_LOST:
        moe_membership_on_peer_lost(w->machine, now, m->stream, m->epoch, m->mask);
        break;
    default: moe_membership_on_stream_closed(w->machine, now, m->stream); break;
    }
    carry_out(w);
}

/* ------------------------------------------------------------------ a worker's side */

static void send_up(struct world *w, struct process *p, struct sim_message m)
{
    m.stream = p->stream;
    push(w, &p->up, m);
}

static void spawn(struct world *w, uint32_t id)
{
    static const double rates[] = {0.95, 1.0, 1.05};
    if (w->process_count == PROCESSES_MAX)
        return;
    struct process *p = &w->processes[w->process_count];
    *p = (struct process){
        .alive = true, .id = id, .incarnation = ++w->process_count, .rate = rates[rnd(w, 3)]};
    p->connect_ns = w->now_ns + rnd(w, 50) * MOE_NS_PER_MS;
}

static void lose_stream(struct world *w, struct process *p)
{
    if (p->stream != 0)
        send_up(w, p, (struct sim_message){.kind = SIM_CLOSED});
    p->stream = 0;
    p->registered = false;
    p->preparing = p->ready_ns = 0;
    p->connect_ns = w->now_ns + (10 + rnd(w, 60)) * MOE_NS_PER_MS;
}

static void heartbeat(struct world *w, struct process *p)
{
    uint64_t sequence = moe_lease_on_sent(&p->lease, local(w, p));
    send_up(w, p,
            (struct sim_message){.kind = SIM_HEARTBEAT, .epoch = p->view, .sequence = sequence});
    p->heartbeat_ns = local(w, p) + p->lease.term_ns / MOE_LEASE_HEARTBEATS;
}

static void on_answer(struct world *w, struct process *p, const struct sim_message *m)
{
    if (is_off(GUARD_SENT))
        p->lease.sent_ns[m->sequence % MOE_LEASE_UNANSWERED] = local(w, p);
    moe_lease_on_answered(&p->lease, m->sequence, m->oldest_ns);
}

static void on_closed(struct world *w, struct process *p, const struct sim_message *m)
{
    p->stream = 0;
    lose_stream(w, p);
    if (m->reason == MOE_REASON_STALE_EPOCH) {
        p->alive = false;
    } else if (m->reason == MOE_REASON_SLOT_TAKEN) {
        p->view = 0;
        moe_lease_end(&p->lease);
    }
}

static void on_commit(struct world *w, struct process *p, uint64_t epoch)
{
    if (p->preparing != epoch)
        return;
    p->preparing = 0;
    p->view = epoch;
    if (!w->epochs[epoch].continues) {
        p->lineage = w->epochs[epoch].lineage;
        p->applied = p->hash = 0;
        p->inconsistent = false;
    }
    heartbeat(w, p);
}

static void deliver_down(struct world *w, struct process *p, const struct sim_message *m)
{
    unsigned margin = is_off(GUARD_MARGIN) ? 8 : MOE_LEASE_MARGIN_PERCENT;
    switch (m->kind) {
    case SIM_REGISTERED:
        p->registered = true;
        p->slot = m->slot;
        p->lease.term_ns = moe_lease_term_ns(LEASE_MS * MOE_NS_PER_MS, margin);
        heartbeat(w, p);
        break;
    case SIM_ASSIGN:
        p->load_version = m->version;
        p->load_order = m->order;
        p->load_ns = w->now_ns + (1 + rnd(w, 100)) * MOE_NS_PER_MS;
        break;
    case SIM_PREPARE:
        p->view = 0;
        p->preparing = m->epoch;
        p->ready_ns = w->now_ns + (1 + rnd(w, 20)) * MOE_NS_PER_MS;
        break;
    case SIM_COMMIT: on_commit(w, p, m->epoch); break;
    case SIM_ABORT:
        p->view = p->view == m->epoch ? 0 : p->view;
        p->preparing = p->preparing == m->epoch ? 0 : p->preparing;
        break;
    case SIM_HEARTBEAT_ANSWER: on_answer(w, p, m); break;
    case SIM_CLOSED: on_closed(w, p, m); break;
    default: break;
    }
}

/* The lowest slot writes a checkpoint now and then; the rename is one moment. */
static void save(struct world *w, struct process *p)
{
    p->save_ns = 0;
    if (p->view == 0 || !holds_lease(w, p))
        return;
    if (!is_off(GUARD_FENCE) && w->fence > p->view) {
        w->fenced++;
        return;
    }
    w->saves++;
    check(w, p->view >= w->last_committed,
          "no checkpoint becomes visible once a later view is in force");
}

static void run_timers(struct world *w, struct process *p)
{
    if (p->stream == 0 && w->now_ns >= p->connect_ns) {
        p->stream = ++w->next_stream;
        p->down.count = 0;
        send_up(w, p, (struct sim_message){.kind = SIM_REGISTER});
    }
    if (p->registered && local(w, p) >= p->heartbeat_ns)
        heartbeat(w, p);
    if (p->registered && p->load_ns != 0 && w->now_ns >= p->load_ns) {
        p->load_ns = 0;
        send_up(w, p,
                (struct sim_message){
                    .kind = SIM_LOADED, .version = p->load_version, .order = p->load_order});
    }
    if (p->preparing != 0 && p->ready_ns != 0 && w->now_ns >= p->ready_ns) {
        p->ready_ns = 0;
        if (p->slot == 0 && w->fence < p->preparing)
            w->fence = p->preparing;
        send_up(w, p, (struct sim_message){.kind = SIM_READY, .epoch = p->preparing});
    }
    if (p->save_ns == 0 && p->slot == 0 && p->view != 0)
        p->save_ns = w->now_ns + (20 + rnd(w, 200)) * MOE_NS_PER_MS;
    if (p->save_ns != 0 && w->now_ns >= p->save_ns)
        save(w, p);
}

static void cut(struct world *w, uint64_t *until_ns)
{
    *until_ns = w->now_ns + rnd(w, CUT_MAX_MS) * MOE_NS_PER_MS;
}

static const struct process *newest_of(const struct world *w, uint32_t id)
{
    const struct process *newest = NULL;
    for (size_t i = 0; i < w->process_count; i++)
        if (w->processes[i].id == id)
            newest = &w->processes[i];
    return newest;
}

static void disturb(struct world *w, struct process *p)
{
    if (chance(w, 700))
        cut(w, &p->up_cut_ns);
    if (chance(w, 700))
        cut(w, &p->down_cut_ns);
    if (chance(w, 1500))
        cut(w, &p->peers_cut_ns);
    if (chance(w, 800))
        lose_stream(w, p);
    if (chance(w, 1200))
        p->asleep_ns = w->now_ns + rnd(w, CUT_MAX_MS) * MOE_NS_PER_MS;
    if (chance(w, 1500))
        p->alive = false;
    /* A supervisor that cannot reach the process starts another one of the same worker. */
    bool gone = p->up_cut_ns > w->now_ns || p->asleep_ns > w->now_ns;
    if (gone && newest_of(w, p->id) == p && chance(w, 60)) {
        w->replaced++;
        lose_stream(w, p);
        spawn(w, p->id);
    }
}

static void step_process(struct world *w, struct process *p)
{
    struct sim_message m;
    while (w->now_ns >= w->asleep_ns && p->up_cut_ns <= w->now_ns && sim_pop(&p->up, w->now_ns, &m))
        deliver_up(w, p, &m);
    if (p->asleep_ns > w->now_ns || !p->alive)
        return;
    while (p->alive && p->down_cut_ns <= w->now_ns && sim_pop(&p->down, w->now_ns, &m))
        if (m.stream == p->stream && p->stream != 0)
            deliver_down(w, p, &m);
    if (p->alive)
        run_timers(w, p);
}

/* ------------------------------------------------------------------ changes */

static bool reachable(const struct world *w, const struct process *p)
{
    return p->alive && p->asleep_ns <= w->now_ns && p->peers_cut_ns <= w->now_ns;
}

static void fail_change(struct world *w, struct change *c)
{
    for (uint32_t s = 0; s < w->slots; s++) {
        struct process *p = &w->processes[c->members[s]];
        if (p->view != c->epoch || p->asleep_ns > w->now_ns)
            continue;
        p->inconsistent = p->inconsistent || c->begun_local_ns[s] != 0;
        send_up(w, p,
                (struct sim_message){.kind = SIM_PEER_LOST,
                                     .epoch = p->view,
                                     .mask = rnd(w, UINT64_C(1) << w->slots)});
        p->view = 0;
    }
    c->epoch = 0;
}

/* All members have begun; none sleeps, none has left the view. */
static void complete_change(struct world *w, struct change *c)
{
    check(w, c->epoch >= w->last_begun,
          "no change completes once one has begun under a later view");
    for (uint32_t s = 0; s < w->slots; s++) {
        struct process *p = &w->processes[c->members[s]];
        p->applied++;
        p->hash = p->hash * 31 + c->number + c->epoch;
    }
    const struct process *origin = &w->processes[c->members[c->origin]];
    c->lineage = origin->lineage;
    c->applied = origin->applied;
    c->complete_ns = w->now_ns;
    c->answer_ns = w->now_ns + rnd(w, 30) * MOE_NS_PER_MS;
    w->done++;
}

static void answer_change(struct world *w, struct change *c)
{
    const struct process *origin = &w->processes[c->members[c->origin]];
    if (origin->alive && origin->asleep_ns <= w->now_ns && origin->view == c->epoch &&
        holds_lease(w, origin)) {
        w->answers++;
        if (c->applied > w->answered[c->lineage])
            w->answered[c->lineage] = c->applied;
    } else {
        w->refused++;
    }
    c->epoch = 0;
}

/* The slot has the ticket. It waits for a lease that is long enough; false: it fails the ticket. */
static bool try_begin(const struct world *w, struct change *c, uint32_t s)
{
    const struct process *p = &w->processes[c->members[s]];
    if (c->came_local_ns[s] == 0)
        c->came_local_ns[s] = local(w, p);
    if (!covers_change(w, p))
        return local(w, p) - c->came_local_ns[s] < p->lease.term_ns / MOE_LEASE_HEARTBEATS;
    c->begun_local_ns[s] = local(w, p);
    c->begins_ns[s] = w->now_ns;
    return true;
}

/* Each slot waits for the others as long as a ticket may take, by its own clock. */
static void step_change(struct world *w, struct change *c)
{
    bool ready = true, late = false, left = false;
    uint64_t last_ns = 0;
    if (c->complete_ns != 0) {
        if (w->now_ns >= c->answer_ns)
            answer_change(w, c);
        return;
    }
    for (uint32_t s = 0; s < w->slots; s++) {
        const struct process *p = &w->processes[c->members[s]];
        bool present = reachable(w, p);
        left = left || p->view != c->epoch;
        if (present && !left && c->begun_local_ns[s] == 0 && w->now_ns >= c->begins_ns[s])
            left = !try_begin(w, c, s);
        ready = ready && present && c->begun_local_ns[s] != 0;
        late = late || (c->begun_local_ns[s] != 0 && p->asleep_ns <= w->now_ns &&
                        local(w, p) - c->begun_local_ns[s] > ticket_ns(p));
        last_ns = c->begins_ns[s] > last_ns ? c->begins_ns[s] : last_ns;
    }
    if (left || late)
        fail_change(w, c);
    else if (ready && w->now_ns >= last_ns + c->takes_ns)
        complete_change(w, c);
}

static void begin_change(struct world *w, const struct process *p)
{
    struct change *free = NULL;
    for (size_t i = 0; i < sizeof w->changes / sizeof *w->changes; i++) {
        if (w->changes[i].epoch == p->view)
            return;
        free = w->changes[i].epoch == 0 ? &w->changes[i] : free;
    }
    if (free == NULL || !covers_group(w, p))
        return;
    *free = (struct change){.epoch = p->view, .number = rnd(w, 1000)};
    free->takes_ns = rnd(w, 12) * 10 * MOE_NS_PER_MS;
    free->origin = (uint32_t)rnd(w, w->slots);
    for (uint32_t s = 0; s < w->slots; s++) {
        free->members[s] = w->epochs[p->view].members[s];
        free->begins_ns[s] = w->now_ns + rnd(w, 15) * MOE_NS_PER_MS;
    }
    if (p->view > w->last_begun)
        w->last_begun = p->view;
}

/* ------------------------------------------------------------------ one run */

static void step(struct world *w)
{
    w->now_ns += STEP_MS * MOE_NS_PER_MS;
    if (w->now_ns >= w->asleep_ns && chance(w, 1500))
        w->asleep_ns = w->now_ns + rnd(w, CUT_MAX_MS) * MOE_NS_PER_MS;
    if (chance(w, 1500))
        crash_machine(w);
    if (chance(w, 900)) /* all workers at once are cut off from the coordinator */
        for (size_t i = 0; i < w->process_count; i++)
            cut(w, rnd(w, 2) == 0 ? &w->processes[i].up_cut_ns : &w->processes[i].down_cut_ns);
    for (size_t i = 0; i < w->process_count; i++) {
        struct process *p = &w->processes[i];
        if (p->alive || p->up.count > 0)
            step_process(w, p);
        if (p->alive)
            disturb(w, p);
    }
    for (size_t i = 0; i < w->process_count; i++) {
        const struct process *p = &w->processes[i];
        if (p->slot == 0 && p->view != 0 && reachable(w, p) && rnd(w, 3) == 0)
            begin_change(w, p);
    }
    for (size_t i = 0; i < sizeof w->changes / sizeof *w->changes; i++)
        if (w->changes[i].epoch != 0)
            step_change(w, &w->changes[i]);
    if (w->now_ns >= w->asleep_ns) {
        moe_membership_on_tick(w->machine, coordinator_time(w, w->now_ns));
        carry_out(w);
    }
}

/* A supervisor starts what has died. */
static void restart_dead(struct world *w)
{
    for (uint32_t id = 0; id < w->ids; id++)
        if (!newest_of(w, id)->alive)
            spawn(w, id);
}

/* With no further faults the group changes and answers again. */
static void expect_answers(struct world *w)
{
    size_t before = w->answers;
    w->quiet = true;
    for (int i = 0; i < QUIET_STEPS && w->answers == before && w->broken == NULL; i++) {
        step(w);
        if (i % 64 == 0)
            restart_dead(w);
    }
    check(w, w->answers > before, "a quiet group answers changes");
}

static void run_one(struct world *w, uint64_t seed)
{
    struct process *processes = w->processes;
    static const double rates[] = {0.95, 1.0, 1.05};
    memset(w, 0, sizeof *w);
    w->processes = processes;
    w->seed = w->random.state = seed;
    w->now_ns = 10 * MOE_NS_PER_S;
    w->slots = 1 + (uint32_t)rnd(w, SLOTS_MAX);
    w->ids = w->slots + (uint32_t)rnd(w, 3);
    w->rate = rates[rnd(w, 3)];
    w->config = (struct moe_membership_config){.slots = w->slots,
                                               .replicas = 1,
                                               .group_id = 1,
                                               .lease_ns = LEASE_MS * MOE_NS_PER_MS,
                                               .form_ns = FORM_MS * MOE_NS_PER_MS,
                                               .shutdown_ns = MOE_NS_PER_S,
                                               .backoff_ns = 5 * MOE_NS_PER_MS,
                                               .backoff_max_ns = 20 * MOE_NS_PER_MS,
                                               .attempts_max = 1000,
                                               .version = "1.2.0"};
    start_machine(w);
    for (uint32_t id = 0; id < w->ids; id++)
        spawn(w, id);
    uint64_t steps = 500 + rnd(w, 1000);
    for (uint64_t i = 0; i < steps && w->broken == NULL; i++) {
        step(w);
        if (i % 64 == 0)
            restart_dead(w);
    }
    expect_answers(w);
    moe_membership_destroy(w->machine);
}

struct totals {
    uint64_t broken; /* a seed with a broken promise; 0 = none */
    size_t commits, done, answers, refused, saves, fenced, replaced, late;
};

static struct totals run_seeds(struct world *w, uint64_t first, uint64_t count)
{
    struct totals t = {0};
    for (uint64_t seed = first; seed < first + count && t.broken == 0; seed++) {
        run_one(w, seed);
        t.broken = w->broken != NULL ? seed : 0;
        t.commits += w->commits;
        t.done += w->done;
        t.answers += w->answers;
        t.refused += w->refused;
        t.saves += w->saves;
        t.fenced += w->fenced;
        t.replaced += w->replaced;
        t.late += w->late;
    }
    return t;
}

/* Every guard, switched off, has to be found. */
static int try_guards(struct world *w, uint64_t seeds)
{
    int unfound = 0;
    for (off = 0; off < GUARD_COUNT; off++) {
        struct totals t = run_seeds(w, 1, seeds);
        if (t.broken != 0)
            printf("%-7s off: seed %" PRIu64 ": %s\n", guard_names[off], t.broken, w->broken);
        else
            printf("%-7s off: nothing was broken in %" PRIu64 " runs\n", guard_names[off], seeds);
        unfound += t.broken == 0;
    }
    return unfound > 0;
}

int main(int argc, char **argv)
{
    uint64_t first = 1, seeds = 2000;
    bool guards = false;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        guards = guards || strcmp(argv[i], "--guards") == 0;
        if (strcmp(argv[i], "--seeds") == 0)
            seeds = strtoull(value, NULL, 10);
        if (strcmp(argv[i], "--seed") == 0) {
            first = strtoull(value, NULL, 10);
            seeds = 1;
        }
        for (int g = 0; strcmp(argv[i], "--off") == 0 && g < GUARD_COUNT; g++)
            if (strcmp(value, guard_names[g]) == 0)
                off = (enum guard)g;
    }
    struct world *w = calloc(1, sizeof *w);
    struct process *processes = calloc(PROCESSES_MAX, sizeof *processes);
    if (w == NULL || processes == NULL)
        return 2;
    w->processes = processes;
    int failed = 0;
    if (guards) {
        failed = try_guards(w, seeds);
    } else {
        struct totals t = run_seeds(w, first, seeds);
        failed = t.broken != 0;
        if (failed)
            printf("seed %" PRIu64 ", t = %.3f s: %s (replay with --seed %" PRIu64 ")\n", t.broken,
                   (double)w->now_ns / 1e9, w->broken, t.broken);
        printf("%" PRIu64 " runs: %zu views, %zu changes, %zu answered, %zu not answered for want "
               "of a lease or a view, %zu checkpoints, %zu stopped by the fence, %zu living "
               "processes replaced, %zu late reports of loads\n",
               seeds, t.commits, t.done, t.answers, t.refused, t.saves, t.fenced, t.replaced,
               t.late);
        if (!failed && seeds >= 1000 &&
            (t.answers < seeds || t.fenced == 0 || t.replaced < seeds || t.late == 0))
            failed = 1; /* the world is not as rough as it claims to be */
    }
    free(processes);
    free(w);
    return failed;
}
