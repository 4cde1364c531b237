/* SPDX-License-Identifier: Apache-2.0 */
/* The workers' side: processes that follow the protocol, and what happens to them. */
#include "membership_world.h"

static void drop_stream(struct world *w, struct process *p)
{
    if (p->stream == 0)
        return;
    /* The last sent messages may be lost with the connection. */
    if (p->up.count > 0)
        p->up.count -= rnd(w, p->up.count + 1);
    if (p->coordinator_end)
        push(w, &p->up, (struct sim_message){.kind = SIM_CLOSED});
    p->down.count = 0;
    p->bad_stream_end = true;
    p->registered = false;
}

void end_process(struct world *w, struct process *p)
{
    drop_stream(w, p);
    p->alive = false;
    p->gone_ns = w->now_ns;
    if (w->current[p->id] == (size_t)(p - w->processes))
        w->respawn_at_ns[p->id] = w->now_ns + (20 + rnd(w, 600)) * MOE_NS_PER_MS;
}

void spawn(struct world *w, uint32_t id)
{
    check(w, w->process_count < PROCESSES_MAX, "the run spawns a bounded number of processes");
    struct process *p = &w->processes[w->process_count];
    *p = (struct process){.alive = true,
                          .id = id,
                          .incarnation = ++w->next_incarnation,
                          .connect_at_ns = w->now_ns + rnd(w, 50) * MOE_NS_PER_MS,
                          .broken_loader = chance(w, 40)};
    w->current[id] = w->process_count++;
    w->respawn_at_ns[id] = 0;
}

static void send_up(struct world *w, struct process *p, struct sim_message m)
{
    m.slot = p->slot;
    push(w, &p->up, m);
}

static void send_ready(struct world *w, struct process *p, bool good)
{
    if (good)
        p->together = together_in(w, p->session, p->slot);
    send_up(w, p,
            (struct sim_message){
                .kind = SIM_READY, .epoch = p->preparing, .error = !good, .together = p->together});
}

static void answer_round(struct world *w, struct process *p, uint32_t round)
{
    if (chance(w, 80))
        return; /* is silent until the deadline */
    if (round < w->rounds)
        send_up(w, p,
                (struct sim_message){.kind = SIM_BLOB, .epoch = p->preparing, .round = round});
    else
        send_ready(w, p, !chance(w, 25));
}

/* A mask needs no blobs. */
static void take_mask(struct world *w, struct process *p, const struct sim_message *m)
{
    bool kept = p->session == m->session && (m->mask & ~p->mask) == 0;
    w->unkept += !kept;
    bool good = kept && !chance(w, 25);
    if (good)
        p->mask = m->mask;
    send_ready(w, p, good);
}

static void send_loaded(struct world *w, struct process *p, uint32_t version, uint64_t order,
                        bool fails)
{
    send_up(w, p,
            (struct sim_message){
                .kind = SIM_LOADED, .version = version, .order = order, .error = fails});
}

static void on_assign(struct world *w, struct process *p, const struct sim_message *m)
{
    if (p->loaded_slot == p->slot && p->loaded_version != 0 && p->next_version == m->version) {
        send_loaded(w, p, m->version, m->order, false);
        return;
    }
    bool holds = p->loaded_version != 0 && p->loaded_slot == p->slot;
    p->next_version = p->loading_next = 0;
    if (m->keep && (holds || p->load_done_ns != 0) && p->loaded_version != m->version) {
        p->loading_next = m->version; /* one after the other */
        p->next_order = m->order;
        p->next_done_ns = p->load_done_ns > w->now_ns ? p->load_done_ns : w->now_ns;
        p->next_done_ns += (1 + rnd(w, 200)) * MOE_NS_PER_MS;
        return;
    }
    if (p->loaded_version == m->version && p->loaded_slot == p->slot) {
        send_loaded(w, p, m->version, m->order, false);
        return;
    }
    p->loaded_version = 0; /* memory is for one share */
    p->session = 0;
    p->load_version = m->version;
    p->load_order = m->order;
    p->load_done_ns = w->now_ns + (1 + rnd(w, 200)) * MOE_NS_PER_MS;
}

static void on_closed(struct world *w, struct process *p, bool stale)
{
    p->stream = 0;
    p->coordinator_end = p->bad_stream_end = false;
    p->up.count = p->down.count = 0;
    p->registered = false;
    p->connect_at_ns = w->now_ns + (5 + rnd(w, 60)) * MOE_NS_PER_MS;
    if (stale || p->leaving)
        end_process(w, p);
}

/* The next view must not wait for a load of a second share. */
static void end_loading_next(struct world *w, struct process *p)
{
    if (p->loading_next == 0)
        return;
    send_loaded(w, p, p->loading_next, p->next_order, true);
    p->loading_next = 0;
}

static void deliver_down(struct world *w, struct process *p, const struct sim_message *m)
{
    switch (m->kind) {
    case SIM_REGISTERED:
        p->registered = true;
        p->slot = m->slot;
        if (p->next_version != m->version)
            p->next_version = 0; /* of no use */
        send_up(w, p, (struct sim_message){.kind = SIM_HEARTBEAT, .epoch = p->committed});
        break;
    case SIM_ASSIGN: on_assign(w, p, m); break;
    case SIM_PREPARE:
        check(w, m->epoch > p->highest_epoch, "a worker never sees an epoch twice");
        end_loading_next(w, p);
        if (p->next_version == m->version)
            p->loaded_version = m->version;
        check(w, p->loaded_version == m->version && p->loaded_slot == p->slot,
              "a member has loaded the placement of its view");
        p->highest_epoch = p->preparing = m->epoch;
        p->committed = 0;
        if (w->round_trip_ns != 0)
            send_up(w, p, (struct sim_message){.kind = SIM_HEARTBEAT});
        if (m->session != 0) {
            take_mask(w, p, m);
            break;
        }
        p->session = m->epoch;
        p->mask = m->mask;
        p->together = 0;
        answer_round(w, p, 0);
        break;
    case SIM_BLOBS:
        if (p->preparing == m->epoch)
            answer_round(w, p, m->round + 1);
        break;
    case SIM_COMMIT:
        check(w, p->preparing == m->epoch, "COMMIT is for the epoch that was prepared");
        p->committed = m->epoch;
        p->preparing = 0;
        p->next_version = 0;
        break;
    case SIM_ABORT:
        p->preparing = p->preparing == m->epoch ? 0 : p->preparing;
        p->committed = p->committed == m->epoch ? 0 : p->committed;
        end_loading_next(w, p);
        break;
    case SIM_HEARTBEAT_ANSWER:
        p->joiner = m->keep;
        p->released = m->calls;
        break;
    case SIM_READ_CHECKPOINT: /* one after the other */
        p->read_order = m->order;
        p->reading = m->calls;
        p->read_done_ns =
            w->now_ns + (1 + rnd(w, chance(w, 4) ? 10 * READ_MS : READ_MS / 2)) * MOE_NS_PER_MS;
        break;
    case SIM_TRYING_AGAIN: break;
    case SIM_DRAIN: /* `keep`: it waits for its experts to move, and not for long */
        if (!m->keep || p->leave_at_ns == 0)
            p->leave_at_ns = w->now_ns + (1 + rnd(w, m->keep ? 500 : 100)) * MOE_NS_PER_MS;
        break;
    default: on_closed(w, p, m->reason == MOE_REASON_STALE_EPOCH); break;
    }
}

uint64_t save_window(const struct world *w)
{
    return w->now_ns / (4 * LEASE_MS * MOE_NS_PER_MS);
}

/* Somebody saves from time to time. From then on the members hold changes back. Calls of the state
 * that is saved; 0 = it is not. */
static uint64_t saved_calls(const struct world *w, const struct process *p)
{
    uint64_t calls = w->quiet ? w->quiet_calls : save_window(w);
    bool saved = p->joiner && p->committed != 0 && calls % 2 != 0;
    return saved && calls != p->released ? calls : 0;
}

/* The members of a quiet view go on from a state that need not be held, and save the next one. */
static void save_again(struct world *w, const struct process *p)
{
    bool sequencer =
        p->committed != 0 && p->slot == (uint32_t)__builtin_ctzll(w->epochs[p->committed].live);
    if (w->quiet && sequencer && p->released == w->quiet_calls)
        w->quiet_calls += 2;
}

static void end_reading(struct world *w, struct process *p)
{
    if (p->reading == 0 || w->now_ns < p->read_done_ns)
        return;
    send_up(w, p,
            (struct sim_message){.kind = SIM_CHECKPOINT_READ,
                                 .order = p->read_order,
                                 .calls = p->reading,
                                 .error = chance(w, 8)});
    p->reading = 0;
}

bool is_running(const struct world *w, const struct process *p)
{
    return p->alive && p->asleep_until_ns <= w->now_ns;
}

/* Peers of the view that give no answer for some time. */
static uint64_t missed_by(const struct world *w, const struct process *p)
{
    uint64_t missed = 0;
    for (uint32_t s = 0; s < w->slots; s++) {
        uint64_t member = w->epochs[p->committed].members[s];
        const struct process *peer = member != 0 ? &w->processes[member - 1] : NULL;
        if (peer != NULL && !is_running(w, peer) &&
            w->now_ns - peer->gone_ns >= NOTICE_MS * MOE_NS_PER_MS)
            missed |= UINT64_C(1) << s;
    }
    return missed;
}

/* Living peers that have left the view. */
static uint64_t left_by(const struct world *w, const struct process *p)
{
    uint64_t left = 0;
    for (uint32_t s = 0; s < w->slots; s++) {
        uint64_t member = w->epochs[p->committed].members[s];
        const struct process *peer = member != 0 ? &w->processes[member - 1] : NULL;
        if (peer != NULL && is_running(w, peer) && peer->committed != p->committed &&
            peer->preparing != p->committed)
            left |= UINT64_C(1) << s;
    }
    return left;
}

/* Whether the view is over for this member, and whom it misses. The sequencer has a stream of each
 * member, and takes one that has left for lost. The others have a stream of the sequencer, which
 * says that it leaves; and they see all peers if steps run. */
static bool misses(struct world *w, const struct process *p, uint64_t *missed)
{
    uint64_t live = w->epochs[p->committed].live;
    bool sequencer = p->slot == (uint32_t)__builtin_ctzll(live);
    bool steps = w->busy || (w->seed + p->committed) % 2 == 0;
    uint64_t left = left_by(w, p) & (sequencer ? live : live & -live);
    *missed = missed_by(w, p) & (sequencer || steps ? live : live & -live);
    bool others = (live & ~*missed & ~(UINT64_C(1) << p->slot)) != 0;
    if (*missed == 0 && (left == 0 || rnd(w, 2) == 0))
        return false;
    if (sequencer && left != 0 && rnd(w, 2) == 0)
        *missed = left;
    else if (sequencer && steps && others && rnd(w, 2) == 0)
        *missed = 0; /* it knows only that a step has failed */
    if (w->round_trip_ns != 0 && w->seed % 2 == 0)
        *missed &= -*missed; /* the first that it has missed */
    return true;
}

/* If a step fails, the worker reports the peers, and leaves the view. */
static void miss_peers(struct world *w, struct process *p)
{
    uint64_t missed;
    if (p->committed == 0 || !misses(w, p, &missed))
        return;
    send_up(w, p,
            (struct sim_message){.kind = SIM_PEER_LOST, .epoch = p->committed, .mask = missed});
    p->committed = 0;
    end_loading_next(w, p);
}

/* Actions of a worker without a message. */
static void run_timers(struct world *w, struct process *p)
{
    if (p->stream == 0 && w->now_ns >= p->connect_at_ns && !w->exited) {
        p->stream = ++w->next_stream;
        p->coordinator_end = true;
        p->preparing = 0; /* the epoch in preparation on the old stream is lost */
        send_up(w, p, (struct sim_message){.kind = SIM_REGISTER});
        if (chance(w, 10))
            send_up(w, p,
                    (struct sim_message){.kind = SIM_REGISTER}); /* repeated: answered alike */
    }
    if (!p->registered || p->bad_stream_end)
        return;
    if (w->now_ns >= p->heartbeat_at_ns) {
        p->heartbeat_at_ns = w->now_ns + LEASE_MS / 4 * MOE_NS_PER_MS;
        send_up(w, p,
                (struct sim_message){
                    .kind = SIM_HEARTBEAT, .epoch = p->committed, .calls = saved_calls(w, p)});
    }
    end_reading(w, p);
    save_again(w, p);
    if (p->loading_next != 0 && w->now_ns >= p->next_done_ns) {
        bool fails = chance(w, 8); /* memory does not hold both */
        p->next_version = fails ? 0 : p->loading_next;
        send_loaded(w, p, p->loading_next, p->next_order, fails);
        p->loading_next = 0;
    }
    if (p->load_done_ns != 0 && w->now_ns >= p->load_done_ns) {
        p->load_done_ns = 0;
        if (!p->broken_loader) {
            p->loaded_version = p->load_version;
            p->loaded_slot = p->slot;
        }
        send_loaded(w, p, p->load_version, p->load_order, p->broken_loader);
    }
    if (p->session != 0 && p->committed == 0 && p->preparing == 0 && chance(w, 50))
        p->session = p->mask = p->together = 0; /* without a view it is not kept for ever */
    if (p->leave_at_ns != 0 && w->now_ns >= p->leave_at_ns && !p->leaving) {
        p->leaving = true;
        send_up(w, p, (struct sim_message){.kind = SIM_LEAVING});
    }
    miss_peers(w, p);
    if (p->committed != 0 && chance(w, 1500))
        send_up(w, p,
                (struct sim_message){.kind = SIM_PEER_LOST,
                                     .epoch = p->committed,
                                     .mask = 1 + rnd(w, UINT64_C(1) << w->slots)});
    if (chance(w, 8000))
        send_up(w, p, (struct sim_message){.kind = SIM_NOTICE});
    if (chance(w, 4000))
        send_up(w, p, (struct sim_message){.kind = SIM_TRY_AGAIN});
}

void put_to_sleep(const struct world *w, struct process *p, uint64_t ms)
{
    p->asleep_until_ns = w->now_ns + ms * MOE_NS_PER_MS;
    p->gone_ns = w->now_ns;
}

static void disturb(struct world *w, struct process *p)
{
    if (p->stream != 0 && chance(w, 1200))
        drop_stream(w, p);
    if (chance(w, 1500))
        put_to_sleep(w, p, rnd(w, 3 * LEASE_MS));
    if (chance(w, 1500))
        end_process(w, p);
    /* The supervisor takes a stopped process for dead and starts another. */
    if (p->asleep_until_ns > w->now_ns && w->current[p->id] == (size_t)(p - w->processes) &&
        chance(w, 100))
        spawn(w, p->id);
}

void step_process(struct world *w, struct process *p)
{
    struct sim_message m;
    /* Sent messages arrive even if the sender sleeps or is dead. */
    while (p->stream != 0 && !w->exited && sim_pop(&p->up, w->now_ns, &m))
        deliver_up(w, p, &m);
    if (p->bad_stream_end && p->up.count == 0)
        on_closed(w, p, false);
    if (!p->alive || p->asleep_until_ns > w->now_ns)
        return;
    while (p->stream != 0 && !p->bad_stream_end && sim_pop(&p->down, w->now_ns, &m))
        deliver_down(w, p, &m);
    if (p->alive)
        run_timers(w, p);
    if (p->alive)
        disturb(w, p);
}
