/* SPDX-License-Identifier: Apache-2.0 */
/* A seeded world around the membership machine: workers that follow the protocol, streams that
 * delay, break and lose their tails, processes that are killed, stopped and started again, a
 * coordinator that crashes between any two of its actions, a disk that refuses writes, operators
 * who drain workers and change the size of the group. Time is virtual.
 *
 * After every action the promises of the machine are checked; at the end the world becomes quiet
 * and the group has to be SERVING. Half of the groups have replicas: then some slots die or stop,
 * and the others have to serve within a lease if they have every expert.
 *
 * MOE_SEED=n replays one run and prints its log, MOE_RUNS=n sets their number. `--guards --seeds n`
 * switches each guard of membership_guards.h off, in a separate process: a promise or an
 * invariant has to break. */
#include "base/clock.h"
#include "base/guard.h"
#include "coordinator/membership.h"
#include "sim_stream.h"
#include "support/check.h"
#include "support/random.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    IDS_MAX = 7,
    PROCESSES_MAX = 400,
    EPOCHS_MAX = 4000,
    VERSIONS_MAX = 4000,
    STEP_MS = 5,
    LEASE_MS = 300,
    FORM_MS = 400,
    ATTEMPTS = 5,
    NOTICE_MS = 30, /* peers miss a process after this long */
};

/* The guard that is switched off. */
static enum moe_guard off = MOE_GUARD_COUNT;
static const char *const guard_names[] = {
#define X(name, promise) #name,
#include MOE_GUARD_LIST
#undef X
};

bool moe_guard_is_off(enum moe_guard guard)
{
    return off == guard;
}

/* One worker process. */
struct process {
    bool alive, broken_loader;
    bool replaced; /* another process of the same worker had a slot after this one */
    uint32_t id;
    uint64_t incarnation;
    uint64_t asleep_until_ns; /* stopped by a signal */
    uint64_t gone_ns;         /* when it died or was stopped last */
    uint64_t stream;          /* 0 = none */
    bool coordinator_end;     /* the coordinator knows the stream and has not ended it */
    bool bad_stream_end;      /* the coordinator will learn of the end by the queue's last item */
    struct sim_queue up, down;
    uint64_t connect_at_ns, heartbeat_at_ns;
    bool registered, leaving;
    uint32_t slot, loaded_slot, loaded_version;
    uint64_t load_done_ns;
    uint32_t load_version;
    uint32_t next_version, loading_next; /* the second share; 0 = none */
    uint64_t next_done_ns;
    uint64_t highest_epoch, preparing, committed;
    uint64_t leave_at_ns;
};

struct world {
    uint64_t seed;
    struct rng random;
    uint64_t now_ns;
    uint32_t slots, replicas, ids, rounds; /* slots: workers that the group can have */
    bool elastic, shutting_down;
    uint64_t places; /* of the machine, as it was last seen */
    size_t scalings, scaled, undone, refused;
    bool partial;                     /* views may lack experts */
    bool quiet, async_saves, verbose; /* verbose: the log is printed */
    bool busy;                        /* steps run in each view */
    struct moe_membership *machine;
    struct moe_membership_config config;
    struct moe_membership_saved durable;
    uint64_t pending_save, pending_save_at_ns;
    struct moe_membership_saved pending_state;
    uint64_t next_stream, next_incarnation;
    struct process *processes;
    size_t process_count;
    size_t current[IDS_MAX]; /* newest process of each id */
    uint64_t latest_of[IDS_MAX];
    uint64_t holders[MOE_PLACEMENT_SLOTS_MAX];      /* incarnation in each slot; 0 = none */
    uint64_t last_holders[MOE_PLACEMENT_SLOTS_MAX]; /* also after it is lost */
    uint64_t respawn_at_ns[IDS_MAX];
    bool exited, crash_now;
    /* Observations of each epoch. */
    struct {
        uint64_t members[MOE_PLACEMENT_SLOTS_MAX]; /* incarnations that got PREPARE */
        uint64_t ready[MOE_PLACEMENT_SLOTS_MAX];
        uint64_t committed[MOE_PLACEMENT_SLOTS_MAX];
        uint64_t live;    /* slots that got PREPARE */
        uint32_t version; /* of the placement */
        bool prepared, aborted;
    } epochs[EPOCHS_MAX];
    uint64_t contents[VERSIONS_MAX]; /* hash of each version of the placement; 0 = not seen */
    uint64_t last_live;              /* of the epoch that was committed last */
    uint64_t grown; /* views that have ended for a larger one, since the machine started */
    uint64_t last_epoch;
    bool had_view;      /* since the machine started; in the log counts too */
    uint64_t joined_ns; /* a worker took a slot, or the machine started */
    size_t masked, masks_ended, lacking;
    uint64_t highest_prepared;
    uint32_t tries; /* epochs prepared since a worker came or a view lasted */
    uint64_t commit_ns;
    size_t commits, crashes, restores, adoptions;
    /* Cordons as the operator knows them: bits of `cordons_known` are durable. */
    uint64_t cordoned, cordons_known;
    size_t cordons;
    uint64_t restored_epoch; /* the log held this view when the machine started; 0 = none */
};

static void fail_run(const struct world *w, const char *what)
{
    if (off != MOE_GUARD_COUNT) { /* in a separate process */
        printf("%-20s off: seed %" PRIu64 ": %s\n", guard_names[off], w->seed, what);
        fflush(stdout);
        _exit(1);
    }
    fail_msg("seed %" PRIu64 ", t = %.3f s: %s (replay with MOE_SEED=%" PRIu64 ")", w->seed,
             (double)w->now_ns / 1e9, what, w->seed);
}

static void check(const struct world *w, bool holds, const char *promise)
{
    if (!holds)
        fail_run(w, promise);
}

static uint64_t rnd(struct world *w, uint64_t below)
{
    return rng_next(&w->random) % below;
}

static bool chance(struct world *w, uint64_t in)
{
    return !w->quiet && rnd(w, in) == 0;
}

static void push(struct world *w, struct sim_queue *q, struct sim_message m)
{
    uint64_t delay_ms = rnd(w, w->quiet ? 5 : chance(w, 30) ? 200 : 20);
    check(w, sim_push(q, m, w->now_ns + delay_ms * MOE_NS_PER_MS),
          "a stream holds a bounded number of messages");
}

/* ------------------------------------------------------------------ the coordinator's side */

static struct process *by_stream(struct world *w, uint64_t stream)
{
    for (size_t i = 0; i < w->process_count; i++)
        if (w->processes[i].stream == stream)
            return &w->processes[i];
    return NULL;
}

static const struct moe_membership_layer layers[2] = {
    {.layer = 1, .hidden = 8, .experts = 7, .top_k = 2, .intermediate = 4},
    {.layer = 3, .hidden = 8, .experts = 3, .top_k = 1, .intermediate = 4}};

/* Those that hold experts. */
static uint64_t all_slots(const struct world *w)
{
    struct moe_membership_group g;
    moe_membership_group(w->machine, &g);
    return g.places;
}

static uint32_t size_of(const struct world *w)
{
    return (uint32_t)__builtin_popcountll(all_slots(w));
}

/* The mask of a new epoch. */
static void check_mask(struct world *w, uint64_t epoch)
{
    struct moe_membership_group g;
    moe_membership_group(w->machine, &g);
    w->epochs[epoch].live = g.live;
    w->epochs[epoch].version = moe_placement_version(moe_membership_placement(w->machine));
    bool covers = moe_placement_covers(g.places, w->replicas, g.live);
    check(w, (g.live & ~g.places) == 0, "spares take no part in views");
    check(w, covers || w->partial, "a view has a copy of every expert");
    check(w, covers || w->had_view, "a view without some experts follows on one with all");
    check(w, covers || 2 * (uint32_t)__builtin_popcountll(g.live) >= g.size,
          "a view without some experts has half of the slots");
    w->lacking += !covers;
}

/* Slots that can serve after a view. */
static bool suffice(const struct world *w, uint64_t live)
{
    return moe_placement_covers(all_slots(w), w->replicas, live) ||
           (w->partial && 2 * (uint32_t)__builtin_popcountll(live) >= size_of(w));
}

static void check_slots(struct world *w, bool restored)
{
    for (uint32_t s = 0; s < w->slots; s++) {
        struct moe_membership_worker a, b;
        bool held = moe_membership_worker(w->machine, s, &a) && a.lease_remaining_ns > 0;
        uint64_t holder = held ? a.incarnation : 0;
        if (held && w->holders[s] != holder) {
            bool same = w->last_holders[s] == holder; /* its lease had ended, and no tick came */
            bool place = (all_slots(w) >> s & 1) != 0;
            if (place)
                w->tries = 0; /* a worker that the group may have lacked: attempts start again */
            if (place && !same)
                w->joined_ns = w->now_ns;
            check(w, restored || same || (w->cordoned & w->cordons_known & UINT64_C(1) << s) == 0,
                  "a cordoned slot gets no new worker");
        }
        w->holders[s] = holder;
        if (!held)
            continue;
        w->last_holders[s] = holder;
        uint32_t id = (uint32_t)(a.worker_id[1] - '0');
        if (w->latest_of[id] != 0 && w->latest_of[id] != a.incarnation)
            w->processes[w->latest_of[id] - 1].replaced = true;
        check(w, !w->processes[a.incarnation - 1].replaced, "a replaced process never comes back");
        w->latest_of[id] = a.incarnation;
        for (uint32_t o = s + 1; o < w->slots; o++)
            check(w,
                  !moe_membership_worker(w->machine, o, &b) || b.lease_remaining_ns == 0 ||
                      strcmp(a.worker_id, b.worker_id) != 0,
                  "a worker has one slot");
    }
}

/* After each input, before its actions are carried out. */
static void check_begin(struct world *w)
{
    struct moe_membership_group g;
    moe_membership_group(w->machine, &g);
    uint64_t grown = g.causes[MOE_CAUSE_GROWN];
    check(w, grown == w->grown || ((w->last_live & ~g.live) == 0 && g.live != w->last_live),
          "a view ends for a larger one only if that has all of its members");
    w->grown = grown;
    if (g.places != w->places)
        w->tries = 0; /* other slots try */
    w->places = g.places;
    check(w, g.size >= w->replicas && g.size <= w->slots,
          "the size of a group is within its limits");
    uint64_t last = moe_membership_to_save(w->machine)->epoch;
    bool begins = last > w->last_epoch && g.epoch == 0 && g.live != 0;
    check(w,
          !begins || g.live == all_slots(w) || w->had_view ||
              w->now_ns - w->joined_ns >= w->config.lease_ns,
          "a group that starts waits a lease for its last workers");
    w->last_epoch = last;
    check_slots(w, false);
}

static void check_prepare(struct world *w, const struct moe_membership_action *a)
{
    uint64_t e = a->epoch;
    check(w, e <= w->durable.epoch, "an epoch is durable before it is announced");
    check(w, e < EPOCHS_MAX, "epochs do not run away");
    if (!w->epochs[e].prepared) {
        check(w, e > w->highest_prepared, "epochs only rise");
        w->epochs[e].prepared = true;
        check_mask(w, e);
        if ((w->replicas > 1 || w->partial) &&
            w->epochs[w->highest_prepared].live != w->epochs[e].live)
            w->tries = 0; /* other slots try */
        w->highest_prepared = e;
        if (w->commit_ns != 0 && w->now_ns - w->commit_ns >= w->config.lease_ns)
            w->tries = 0;
        w->commit_ns = 0;
        w->tries++;
        check(w, w->tries <= ATTEMPTS, "attempts are bounded");
    }
    check(w, w->highest_prepared == e, "one epoch is prepared at a time");
    struct moe_membership_worker worker;
    check(w, moe_membership_worker(w->machine, a->slot, &worker), "members are known");
    check(w, w->epochs[e].members[a->slot] == 0, "PREPARE goes to each slot once");
    check(w, (w->epochs[e].live >> a->slot & 1) != 0, "PREPARE goes to slots of the mask");
    w->epochs[e].members[a->slot] = worker.incarnation;
}

static void check_commit(struct world *w, const struct moe_membership_action *a)
{
    uint64_t e = a->epoch;
    struct moe_membership_worker worker;
    check(w, moe_membership_worker(w->machine, a->slot, &worker), "members are known");
    check(w, w->durable.view_epoch == e, "a view is durable before it is committed");
    check(w, !w->epochs[e].aborted, "an aborted epoch is never committed");
    for (uint32_t s = 0; s < w->slots; s++) {
        bool live = (w->epochs[e].live >> s & 1) != 0;
        check(w, live == (w->epochs[e].members[s] != 0), "PREPARE goes to all slots of the mask");
        check(w, w->epochs[e].ready[s] == w->epochs[e].members[s],
              "COMMIT comes after READY of all members");
        check(w, w->durable.members[s].incarnation == w->epochs[e].members[s],
              "the log has the members of a view");
    }
    check(w, w->durable.places == all_slots(w), "the places of a view are durable");
    w->masked += w->epochs[e].live != all_slots(w);
    w->last_live = w->epochs[e].live;
    w->had_view = true;
    check(w, w->epochs[e].members[a->slot] == worker.incarnation,
          "a view is committed to those who prepared it");
    check(w, w->epochs[e].committed[a->slot] == 0, "COMMIT goes to each slot once");
    w->epochs[e].committed[a->slot] = worker.incarnation;
    w->commit_ns = w->now_ns;
    w->commits++;
}

/* A worker says by the version alone what it has loaded. */
static void check_version(struct world *w, uint32_t version)
{
    check(w, version < VERSIONS_MAX, "versions do not run away");
    const struct moe_placement *p = moe_membership_find_placement(w->machine, version);
    check(w, p != NULL, "what is assigned is known");
    uint64_t *content = &w->contents[version], now = moe_placement_content_hash(p);
    check(w, *content == 0 || *content == now,
          "a version names one placement, also after a restart");
    *content = now;
}

static void send_down(struct world *w, const struct moe_membership_action *a)
{
    struct sim_message m = {
        .kind = (enum sim_kind)a->message, .epoch = a->epoch, .round = a->round, .slot = a->slot};
    if (a->message == MOE_MEMBERSHIP_PREPARE) {
        check_prepare(w, a);
        m.version = moe_placement_version(moe_membership_placement(w->machine));
        check(w, m.version == w->durable.placement_version,
              "a placement is durable before a view of it is prepared");
    }
    if (a->message == MOE_MEMBERSHIP_DRAIN && strstr(a->status.text, "fewer workers") != NULL)
        check(w, (w->durable.places >> a->slot & 1) == 0,
              "a worker is drained for a smaller group once that is durable");
    if (a->message == MOE_MEMBERSHIP_DRAIN)
        m.keep = a->keep;
    if (a->message == MOE_MEMBERSHIP_COMMIT)
        check_commit(w, a);
    if (a->message == MOE_MEMBERSHIP_REGISTERED) {
        check(w, a->epoch <= w->durable.epoch, "only durable epochs are sent to newcomers");
        m.version = moe_membership_next_version(w->machine);
        if (m.version == 0)
            m.version = moe_placement_version(moe_membership_placement(w->machine));
    }
    if (a->message == MOE_MEMBERSHIP_ASSIGN) {
        m.version = a->version;
        m.keep = a->keep;
        struct moe_membership_group g;
        moe_membership_group(w->machine, &g);
        check(w, m.version == w->durable.placement_version || g.scaling_to != 0,
              "a placement is durable before it is assigned, or loaded for the next view");
        check_version(w, a->version);
        check(w, !a->keep || g.epoch != 0, "a second share is loaded only during a view");
    }
    if (a->message == MOE_MEMBERSHIP_ABORT && a->epoch < EPOCHS_MAX)
        w->epochs[a->epoch].aborted = true;
    for (uint32_t s = 0; a->message == MOE_MEMBERSHIP_BLOBS && s < w->slots; s++) {
        size_t length;
        const uint8_t *data = moe_membership_blob(w->machine, s, &length);
        if ((w->epochs[a->epoch].live >> s & 1) == 0) {
            check(w, length == 0, "BLOBS holds nothing of slots that take no part");
            continue;
        }
        uint64_t want = w->epochs[a->epoch].members[s] * 1000 + a->round;
        check(w, length == sizeof want && memcmp(data, &want, length) == 0,
              "BLOBS holds what each member gave in this round");
    }
    struct process *p = by_stream(w, a->stream);
    if (p != NULL && p->coordinator_end)
        push(w, &p->down, m);
}

static void save(struct world *w, uint64_t sequence)
{
    struct moe_status st = moe_ok();
    if (chance(w, 60)) {
        st = moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "disk full");
        w->tries = 0; /* an operator must act: not a failed attempt of the group */
        moe_membership_on_saved(w->machine, w->now_ns, sequence, &st);
        return;
    }
    const struct moe_membership_saved *state = moe_membership_to_save(w->machine);
    check(w, state->epoch >= w->durable.epoch, "saved epochs never fall");
    check(w, state->view_epoch <= state->epoch, "a view is no later than the epoch");
    if (w->async_saves && w->pending_save == 0 && rnd(w, 2) == 0) {
        w->pending_save = sequence;
        w->pending_state = *state;
        w->pending_save_at_ns = w->now_ns + rnd(w, 40) * MOE_NS_PER_MS;
        return;
    }
    if (w->pending_save != 0) { /* writes are in order: the earlier one is done first */
        w->durable = w->pending_state;
        uint64_t earlier = w->pending_save;
        w->pending_save = 0;
        moe_membership_on_saved(w->machine, w->now_ns, earlier, &st);
    }
    w->durable = *state;
    moe_membership_on_saved(w->machine, w->now_ns, sequence, &st);
}

static void crash_machine(struct world *w);

static void carry_out(struct world *w)
{
    struct moe_membership_action a;
    check_begin(w);
    while (!w->crash_now && moe_membership_next_action(w->machine, &a)) {
        check(w, !w->exited, "nothing follows EXIT");
        struct process *p;
        switch (a.kind) {
        case MOE_MEMBERSHIP_SAVE: save(w, a.sequence); break;
        case MOE_MEMBERSHIP_SEND: send_down(w, &a); break;
        case MOE_MEMBERSHIP_CLOSE:
            p = by_stream(w, a.stream);
            check(w, p == NULL || a.status.code != MOE_OK || p->leaving || w->shutting_down,
                  "a worker that lost its place leaves when it has drained");
            if (p != NULL && p->coordinator_end) {
                p->coordinator_end = false;
                push(w, &p->down,
                     (struct sim_message){.kind = SIM_CLOSED, .reason = a.status.reason});
            }
            break;
        case MOE_MEMBERSHIP_LOG:
            if (w->verbose)
                printf("%9.3f  %s\n", (double)w->now_ns / 1e9, a.status.text);
            break;
        case MOE_MEMBERSHIP_EXIT: w->exited = true; break;
        }
        w->crash_now = chance(w, 1000);
    }
    if (w->crash_now)
        crash_machine(w);
    if (moe_membership_cordons_saved(w->machine)) {
        w->cordons_known = UINT64_MAX;
        w->cordoned = w->durable.cordoned;
        for (uint32_t s = 0; s < w->slots; s++)
            check(w,
                  (moe_membership_cordon_reason(w->machine, s) != NULL) ==
                      ((w->durable.cordoned >> s & 1) != 0),
                  "a cordon that counts as saved is durable");
    }
    struct moe_membership_group g;
    moe_membership_group(w->machine, &g);
    if (g.state == MOE_GROUP_SERVING && g.epoch == w->restored_epoch) {
        w->adoptions++;
        w->restored_epoch = 0;
    }
}

static void start_machine(struct world *w)
{
    struct moe_status st = moe_membership_create(&w->config, &w->durable, w->now_ns, &w->machine);
    assert_int_equal(st.code, MOE_OK);
    w->restored_epoch = w->durable.view_epoch;
    /* Replaced processes are remembered for the life of the coordinator only. */
    memset(w->latest_of, 0, sizeof w->latest_of);
    for (size_t i = 0; i < w->process_count; i++)
        w->processes[i].replaced = false;
    w->restores += w->durable.view_epoch != 0;
    w->tries = 0;
    w->grown = 0;
    w->last_epoch = w->durable.epoch;
    w->places = all_slots(w);
    check(w, !w->elastic || w->durable.places == 0 || w->places == w->durable.places,
          "the size survives a restart");
    w->had_view = w->durable.view_epoch != 0;
    w->joined_ns = w->now_ns;
    memset(w->last_holders, 0, sizeof w->last_holders);
    for (uint32_t s = 0; w->had_view && s < w->slots; s++)
        check(w, w->durable.members[s].incarnation == w->epochs[w->durable.view_epoch].members[s],
              "a restart finds the members of the view");
    check(w, ((w->durable.cordoned ^ w->cordoned) & w->cordons_known) == 0,
          "saved cordons survive a crash");
    w->cordoned = w->durable.cordoned;
    w->cordons_known = UINT64_MAX;
    check_slots(w, true);
    carry_out(w);
}

/* All streams break; durable state stays. An unfinished write may or may not have happened. */
static void crash_machine(struct world *w)
{
    w->crash_now = false;
    w->crashes++;
    if (w->pending_save != 0 && rnd(w, 2) == 0)
        w->durable = w->pending_state;
    w->pending_save = 0;
    moe_membership_destroy(w->machine);
    for (size_t i = 0; i < w->process_count; i++) {
        struct process *p = &w->processes[i];
        if (p->stream == 0)
            continue;
        if (p->coordinator_end)
            push(w, &p->down, (struct sim_message){.kind = SIM_CLOSED});
        p->coordinator_end = false;
        p->up.count = 0;
    }
    start_machine(w);
}

static void register_up(struct world *w, const struct process *p)
{
    char id[8], endpoint[32];
    uint8_t slot_token[MOE_MEMBERSHIP_TOKEN_BYTES];
    memset(slot_token, (int)p->incarnation, sizeof slot_token);
    snprintf(id, sizeof id, "w%u", p->id);
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%u", 7000 + p->id);
    struct moe_membership_register r = {.worker_id = id,
                                        .endpoint = endpoint,
                                        .control_endpoint = endpoint,
                                        .backend = "cpu",
                                        .model = "m",
                                        .fingerprint = "f00d",
                                        .family = "mixtral",
                                        .version = "1.2.3",
                                        .incarnation = p->incarnation,
                                        .identity = "uid:7",
                                        .slot_token = slot_token,
                                        .max_tokens_per_step = 64,
                                        .partial = true,
                                        .layers = layers,
                                        .layer_count = 2};
    moe_membership_on_register(w->machine, w->now_ns, p->stream, &r);
}

static void deliver_up(struct world *w, struct process *p, const struct sim_message *m)
{
    struct moe_status error = moe_ok();
    uint64_t blob = p->incarnation * 1000 + m->round;
    if (m->error)
        error = moe_error(MOE_INTERNAL, MOE_REASON_NONE, "as the dice want");
    switch (m->kind) {
    case SIM_REGISTER: register_up(w, p); break;
    case SIM_HEARTBEAT: {
        struct moe_membership_heartbeat h = {.epoch = m->epoch};
        moe_membership_on_heartbeat(w->machine, w->now_ns, p->stream, &h);
        break;
    }
    case SIM_LOADED:
        moe_membership_on_loaded(w->machine, w->now_ns, p->stream, m->version, &error);
        break;
    case SIM_BLOB:
        moe_membership_on_blob(w->machine, w->now_ns, p->stream, m->epoch, m->round,
                               (const uint8_t *)&blob, sizeof blob);
        break;
    case SIM_READY:
        if (!m->error)
            w->epochs[m->epoch].ready[m->slot] = p->incarnation;
        moe_membership_on_ready(w->machine, w->now_ns, p->stream, m->epoch, &error);
        break;
    case SIM_PEER_LOST:
        moe_membership_on_peer_lost(w->machine, w->now_ns, p->stream, m->epoch, m->mask);
        break;
    case SIM_NOTICE:
        moe_membership_on_drain_notice(w->machine, w->now_ns, p->stream, "tired");
        break;
    case SIM_TRY_AGAIN:
        w->tries = 0; /* an operator's request: attempts start anew */
        moe_membership_on_try_again(w->machine, w->now_ns, p->stream);
        break;
    case SIM_LEAVING: moe_membership_on_leaving(w->machine, w->now_ns, p->stream, "bye"); break;
    default:
        p->coordinator_end = false;
        moe_membership_on_stream_closed(w->machine, w->now_ns, p->stream);
        break;
    }
    carry_out(w);
}

/* ------------------------------------------------------------------ the workers' side */

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

static void end_process(struct world *w, struct process *p)
{
    drop_stream(w, p);
    p->alive = false;
    p->gone_ns = w->now_ns;
    if (w->current[p->id] == (size_t)(p - w->processes))
        w->respawn_at_ns[p->id] = w->now_ns + (20 + rnd(w, 600)) * MOE_NS_PER_MS;
}

static void spawn(struct world *w, uint32_t id)
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

static void answer_round(struct world *w, struct process *p, uint32_t round)
{
    if (chance(w, 80))
        return; /* is silent until the deadline */
    if (round < w->rounds)
        send_up(w, p,
                (struct sim_message){.kind = SIM_BLOB, .epoch = p->preparing, .round = round});
    else
        send_up(
            w, p,
            (struct sim_message){.kind = SIM_READY, .epoch = p->preparing, .error = chance(w, 25)});
}

static void on_assign(struct world *w, struct process *p, const struct sim_message *m)
{
    if (p->loaded_slot == p->slot && p->loaded_version != 0 && p->next_version == m->version) {
        send_up(w, p, (struct sim_message){.kind = SIM_LOADED, .version = m->version});
        return;
    }
    bool holds = p->loaded_version != 0 && p->loaded_slot == p->slot;
    p->next_version = p->loading_next = 0;
    if (m->keep && (holds || p->load_done_ns != 0) && p->loaded_version != m->version) {
        p->loading_next = m->version; /* one after the other */
        p->next_done_ns = p->load_done_ns > w->now_ns ? p->load_done_ns : w->now_ns;
        p->next_done_ns += (1 + rnd(w, 200)) * MOE_NS_PER_MS;
        return;
    }
    if (p->loaded_version == m->version && p->loaded_slot == p->slot) {
        send_up(w, p, (struct sim_message){.kind = SIM_LOADED, .version = m->version});
        return;
    }
    p->loaded_version = 0; /* memory is for one share */
    p->load_version = m->version;
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
    send_up(w, p,
            (struct sim_message){.kind = SIM_LOADED, .version = p->loading_next, .error = true});
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
    case SIM_TRYING_AGAIN: break;
    case SIM_DRAIN: /* `keep`: it waits for its experts to move, and not for long */
        if (!m->keep || p->leave_at_ns == 0)
            p->leave_at_ns = w->now_ns + (1 + rnd(w, m->keep ? 500 : 100)) * MOE_NS_PER_MS;
        break;
    default: on_closed(w, p, m->reason == MOE_REASON_STALE_EPOCH); break;
    }
}

static bool is_running(const struct world *w, const struct process *p)
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
        send_up(w, p, (struct sim_message){.kind = SIM_HEARTBEAT, .epoch = p->committed});
    }
    if (p->loading_next != 0 && w->now_ns >= p->next_done_ns) {
        bool fails = chance(w, 8); /* memory does not hold both */
        p->next_version = fails ? 0 : p->loading_next;
        send_up(
            w, p,
            (struct sim_message){.kind = SIM_LOADED, .version = p->loading_next, .error = fails});
        p->loading_next = 0;
    }
    if (p->load_done_ns != 0 && w->now_ns >= p->load_done_ns) {
        p->load_done_ns = 0;
        if (!p->broken_loader) {
            p->loaded_version = p->load_version;
            p->loaded_slot = p->slot;
        }
        send_up(w, p,
                (struct sim_message){
                    .kind = SIM_LOADED, .version = p->load_version, .error = p->broken_loader});
    }
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

static void put_to_sleep(const struct world *w, struct process *p, uint64_t ms)
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

static void step_process(struct world *w, struct process *p)
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

/* ------------------------------------------------------------------ one run */

/* An operator's change of a cordon. It is certain when it is saved. */
static void change_cordon(struct world *w, uint32_t slot, bool cordon)
{
    w->cordons_known &= ~(UINT64_C(1) << slot);
    struct moe_status st = cordon ? moe_membership_cordon(w->machine, w->now_ns, slot, "repair")
                                  : moe_membership_uncordon(w->machine, w->now_ns, slot, "done");
    assert_int_equal(st.code, MOE_OK);
    w->cordons += cordon;
    carry_out(w);
}

/* What a refused change must leave as it was. */
struct sized {
    uint64_t places, epoch, saved_epoch;
    uint32_t scaling_to, version;
};

static struct sized sized(const struct world *w)
{
    struct moe_membership_group g;
    moe_membership_group(w->machine, &g);
    const struct moe_membership_saved *saved = moe_membership_to_save(w->machine);
    return (struct sized){g.places, g.epoch, saved->epoch, g.scaling_to,
                          moe_placement_version(moe_membership_placement(w->machine))};
}

/* An operator's change of the size, at any time and to any number. */
static void change_size(struct world *w)
{
    uint32_t size = (uint32_t)rnd(w, w->slots + 2);
    struct sized before = sized(w);
    bool wrong = size < 1 || size > w->slots || size < w->replicas || !w->elastic || w->exited;
    struct moe_status st = moe_membership_scale(w->machine, w->now_ns, size, "test");
    struct sized after = sized(w);
    check(w, !wrong || st.code != MOE_OK, "a size out of the limits is refused");
    check(w,
          st.code == MOE_OK ||
              (before.places == after.places && before.epoch == after.epoch &&
               before.saved_epoch == after.saved_epoch && before.scaling_to == after.scaling_to &&
               before.version == after.version),
          "a refused scaling changes nothing");
    w->refused += st.code != MOE_OK;
    w->scalings += st.code == MOE_OK;
    carry_out(w);
}

static void count_scalings(struct world *w, const struct sized *before)
{
    struct sized after = sized(w);
    w->scaled += before->places != after.places;
    w->undone += before->scaling_to != 0 && after.scaling_to == 0 && before->places == after.places;
}

static void step(struct world *w)
{
    struct sized before = sized(w);
    w->now_ns += STEP_MS * MOE_NS_PER_MS;
    if (w->pending_save != 0 && w->now_ns >= w->pending_save_at_ns) {
        struct moe_status st = moe_ok();
        uint64_t sequence = w->pending_save;
        w->pending_save = 0;
        w->durable = w->pending_state;
        moe_membership_on_saved(w->machine, w->now_ns, sequence, &st);
        carry_out(w);
    }
    for (size_t i = 0; i < w->process_count; i++)
        if (w->processes[i].alive || w->processes[i].stream != 0)
            step_process(w, &w->processes[i]);
    for (uint32_t id = 0; id < w->ids; id++)
        if (!w->processes[w->current[id]].alive && w->respawn_at_ns[id] != 0 &&
            w->now_ns >= w->respawn_at_ns[id] && !w->exited)
            spawn(w, id);
    moe_membership_on_tick(w->machine, w->now_ns);
    carry_out(w);
    check(w, moe_membership_deadline(w->machine) > w->now_ns, "a tick leaves nothing due");
    uint64_t epoch;
    if (chance(w, 3000)) {
        struct moe_status st = moe_membership_drain(
            w->machine, w->now_ns, (uint32_t)rnd(w, w->slots), "test", 0, rnd(w, 2) == 0, &epoch);
        (void)st.code; /* the slot may be empty */
        carry_out(w);
    }
    if (chance(w, 400) && !w->exited)
        change_size(w);
    count_scalings(w, &before);
    if (chance(w, 1500) && !w->exited)
        change_cordon(w, (uint32_t)rnd(w, w->slots), rnd(w, 3) == 0);
}

static enum moe_group_state state_of(const struct world *w)
{
    struct moe_membership_group g;
    moe_membership_group(w->machine, &g);
    return g.state;
}

/* SERVING, and every member has committed the epoch in force. */
static bool is_serving(const struct world *w)
{
    struct moe_membership_group g;
    moe_membership_group(w->machine, &g);
    uint32_t agree = 0;
    for (size_t i = 0; i < w->process_count; i++)
        if (w->processes[i].alive && g.epoch != 0 && w->processes[i].committed == g.epoch)
            agree++;
    return g.state == MOE_GROUP_SERVING && agree == g.size && g.scaling_to == 0;
}

static void expect_serving(struct world *w)
{
    w->quiet = true;
    for (uint32_t s = 0; s < w->slots; s++)
        change_cordon(w, s, false);
    for (int i = 0; i < 250; i++)
        step(w); /* stopped processes wake up, drains come to their end */
    for (int i = 0; i < 1200 && !is_serving(w); i++) {
        step(w);
        /* The operator's part: a group that gave up, or workers that cannot load, need new ones.
         * Stopped predecessors that woke up and still ask for a slot go with them. */
        bool failed = state_of(w) == MOE_GROUP_FAILED;
        for (size_t p = 0; i % 300 == 299 && p < w->process_count; p++)
            if (w->processes[p].alive && (failed || w->processes[p].broken_loader))
                end_process(w, &w->processes[p]);
    }
    struct moe_membership_group g;
    moe_membership_group(w->machine, &g);
    char what[MOE_MEMBERSHIP_REASON_BYTES + 80];
    (void)snprintf(what, sizeof what, "a quiet network does not lead to SERVING: state %d, %s",
                   g.state, g.reason);
    check(w, is_serving(w), what);
    for (int i = 0; i < 200; i++) {
        step(w);
        check(w, is_serving(w), "a quiet group stays SERVING");
    }
}

/* SERVING, and exactly the slots of the mask have committed the epoch, each with a living process.
 */
static bool serves_without_the_dead(const struct world *w)
{
    struct moe_membership_group g;
    moe_membership_group(w->machine, &g);
    if (g.state != MOE_GROUP_SERVING || g.epoch == 0)
        return false;
    for (uint32_t s = 0; s < w->slots; s++) {
        if ((g.live >> s & 1) == 0)
            continue;
        const struct process *p = &w->processes[w->epochs[g.epoch].members[s] - 1];
        if (!is_running(w, p) || p->committed != g.epoch)
            return false;
    }
    return true;
}

/* The operator's part in the middle: workers that cannot load are replaced. */
static void await_all(struct world *w)
{
    for (int i = 0; i < 1200 && !is_serving(w); i++) {
        step(w);
        for (size_t p = 0; i == 300 && p < w->process_count; p++)
            if (w->processes[p].alive && w->processes[p].broken_loader)
                end_process(w, &w->processes[p]);
    }
    check(w, is_serving(w), "the group serves with all slots once all are back");
}

/* A process dies, and its peers miss it. The lease is not what decides. */
static void expect_loss_at_once(struct world *w)
{
    struct moe_membership_group g;
    struct moe_membership_worker worker;
    moe_membership_group(w->machine, &g);
    uint32_t slot = (uint32_t)rnd(w, w->slots);
    if (g.size < 2 || (g.live >> slot & 1) == 0)
        return;
    struct process *p = &w->processes[w->epochs[g.epoch].members[slot] - 1];
    end_process(w, p);
    w->respawn_at_ns[p->id] = w->now_ns + 2 * LEASE_MS * MOE_NS_PER_MS;
    for (int i = 0; i < LEASE_MS / 2 / STEP_MS; i++)
        step(w);
    check(w,
          !moe_membership_worker(w->machine, slot, &worker) || !worker.taken ||
              worker.incarnation != p->incarnation,
          "a dead member loses its slot when its peers miss it");
    await_all(w);
}

/* The processes of some slots die, or stop for long. The others suffice, and serve within a lease.
 * Once all are back, the group serves with all. */
static void expect_mask(struct world *w)
{
    struct moe_membership_group g;
    moe_membership_group(w->machine, &g);
    uint64_t lost = rnd(w, UINT64_C(1) << w->slots) & g.places, epoch = g.epoch;
    if (lost == 0 || !suffice(w, all_slots(w) & ~lost))
        return;
    bool stop = rnd(w, 2) == 0;
    w->busy = true; /* in an idle view, only the sequencer would see others stop */
    for (uint32_t s = 0; s < w->slots; s++) {
        struct process *p = &w->processes[w->epochs[epoch].members[s] - 1];
        if ((lost >> s & 1) == 0)
            continue;
        if (stop)
            put_to_sleep(w, p, 6 * LEASE_MS);
        else
            end_process(w, p);
        w->respawn_at_ns[p->id] = stop ? 0 : w->now_ns + 6 * LEASE_MS * MOE_NS_PER_MS;
    }
    for (int i = 0; i < LEASE_MS / STEP_MS && !serves_without_the_dead(w); i++)
        step(w);
    check(w, serves_without_the_dead(w), "the others serve within a lease if they suffice");
    w->masks_ended++;
    await_all(w);
}

static void expect_shutdown(struct world *w)
{
    uint64_t epoch;
    w->shutting_down = true;
    struct moe_status st = moe_membership_shutdown(w->machine, w->now_ns, "test over", 500, &epoch);
    assert_int_equal(st.code, MOE_OK);
    carry_out(w);
    for (int i = 0; i < 400 && !w->exited; i++)
        step(w);
    check(w, w->exited, "a shutdown ends in bounded time");
    if (w->pending_save != 0)
        w->durable = w->pending_state; /* writes under way are finished before the process ends */
    check(w, w->durable.view_epoch == 0, "no view outlives a shutdown");
    check(w, moe_membership_deadline(w->machine) == MOE_NEVER, "nothing is due after EXIT");
}

static void run_one(struct world *w, uint64_t seed)
{
    struct process *processes = w->processes;
    memset(w, 0, sizeof *w);
    w->processes = processes;
    w->seed = seed;
    w->random.state = seed;
    w->now_ns = MOE_NS_PER_S;
    w->slots = 1 + (uint32_t)rnd(w, 5);
    w->elastic = rnd(w, 2) == 0;
    uint32_t size = w->elastic ? 1 + (uint32_t)rnd(w, w->slots) : 0;
    w->replicas = 1 + (rnd(w, 2) == 0 ? (uint32_t)rnd(w, w->elastic ? size : w->slots) : 0);
    w->partial = rnd(w, 3) == 0;
    w->ids = w->slots + (uint32_t)rnd(w, 2);
    w->rounds = (uint32_t)rnd(w, 4);
    w->async_saves = rnd(w, 2) == 0;
    w->verbose = getenv("MOE_SEED") != NULL;
    w->config = (struct moe_membership_config){.slots = w->slots,
                                               .size = size,
                                               .replicas = w->replicas,
                                               .partial = w->partial,
                                               .lease_ns = LEASE_MS * MOE_NS_PER_MS,
                                               .form_ns = FORM_MS * MOE_NS_PER_MS,
                                               .shutdown_ns = MOE_NS_PER_S,
                                               .backoff_ns = 20 * MOE_NS_PER_MS,
                                               .backoff_max_ns = 200 * MOE_NS_PER_MS,
                                               .attempts_max = ATTEMPTS,
                                               .version = "1.2.0"};
    start_machine(w);
    for (uint32_t id = 0; id < w->ids; id++)
        spawn(w, id);
    uint64_t steps = 200 + rnd(w, 1800);
    for (uint64_t i = 0; i < steps; i++)
        step(w);
    expect_serving(w);
    expect_loss_at_once(w);
    if (w->replicas > 1 || w->partial)
        expect_mask(w);
    if (rnd(w, 2) == 0)
        expect_shutdown(w);
    moe_membership_destroy(w->machine);
}

static void random_schedules_keep_every_promise(void **state)
{
    (void)state;
    const char *runs_text = getenv("MOE_RUNS");
    uint64_t first = seed_from_environment(1);
    uint64_t runs = getenv("MOE_SEED") != NULL ? 1
                    : runs_text != NULL        ? strtoull(runs_text, NULL, 10)
                                               : 2000;
    struct world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->processes = calloc(PROCESSES_MAX, sizeof *w->processes);
    assert_non_null(w->processes);
    size_t commits = 0, crashes = 0, restores = 0, adoptions = 0, processes = 0, cordons = 0;
    size_t masked = 0, masks_ended = 0, lacking = 0;
    size_t scalings = 0, scaled = 0, undone = 0, refused = 0;
    for (uint64_t seed = first; seed < first + runs; seed++) {
        run_one(w, seed);
        commits += w->commits;
        crashes += w->crashes;
        restores += w->restores;
        adoptions += w->adoptions;
        cordons += w->cordons;
        processes += w->process_count;
        masked += w->masked;
        masks_ended += w->masks_ended;
        lacking += w->lacking;
        scalings += w->scalings;
        scaled += w->scaled;
        undone += w->undone;
        refused += w->refused;
    }
    print_message(
        "%" PRIu64 " runs from seed %" PRIu64
        ": %zu commits, %zu coordinator crashes (%zu with a view in force, %zu of them went on "
        "under it), %zu worker processes, %zu cordons; %zu views of fewer than all slots (%zu "
        "without some experts), and %zu losses that the others served through\n",
        runs, first, commits, crashes, restores, adoptions, processes, cordons, masked, lacking,
        masks_ended);
    print_message("sizes changed %zu times; %zu requests were accepted, %zu undone, %zu refused\n",
                  scaled, scalings, undone, refused);
    if (runs >= 100) { /* the world is as rough as it claims to be */
        assert_true(commits > runs && crashes > runs / 20 && cordons > runs / 20);
        assert_true(adoptions > 0 && adoptions < restores);
        assert_true(masked > runs / 4 && masks_ended > runs / 20 && lacking > runs / 20);
        assert_true(scaled > runs / 8 && undone > runs / 20 && refused > runs / 4);
    }
    free(w->processes);
    free(w);
}

/* In a separate process, as a machine without a guard may fail an invariant. */
static bool is_found(enum moe_guard guard, uint64_t seeds)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        struct world *w = calloc(1, sizeof *w);
        off = guard;
        if (w == NULL || (w->processes = calloc(PROCESSES_MAX, sizeof *w->processes)) == NULL)
            _exit(0);
        for (uint64_t seed = 1; seed <= seeds; seed++)
            run_one(w, seed);
        _exit(0);
    }
    int status = 0;
    bool ended = pid > 0 && waitpid(pid, &status, 0) == pid;
    if (ended && WIFSIGNALED(status))
        printf("%-20s off: an invariant of the machine\n", guard_names[guard]);
    return ended && (WIFSIGNALED(status) || WEXITSTATUS(status) == 1);
}

static int try_guards(uint64_t seeds)
{
    int unfound = 0;
    for (enum moe_guard guard = 0; guard < MOE_GUARD_COUNT; guard++) {
        if (is_found(guard, seeds))
            continue;
        printf("%-20s off: nothing was broken in %" PRIu64 " runs\n", guard_names[guard], seeds);
        unfound++;
    }
    return unfound > 0;
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "--guards") == 0 && strcmp(argv[2], "--seeds") == 0)
        return try_guards(strtoull(argv[3], NULL, 10));
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_schedules_keep_every_promise)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
