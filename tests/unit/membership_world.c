/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator's side: the machine with its disk and its crashes, and checks of its promises. */
#include "membership_world.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum moe_guard off = MOE_GUARD_COUNT;
const char *const guard_names[] = {
#define X(name, promise) #name,
#include MOE_GUARD_LIST
#undef X
};

bool moe_guard_is_off(enum moe_guard guard)
{
    return off == guard;
}

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

void check(const struct world *w, bool holds, const char *promise)
{
    if (!holds)
        fail_run(w, promise);
}

uint64_t rnd(struct world *w, uint64_t below)
{
    return rng_next(&w->random) % below;
}

bool chance(struct world *w, uint64_t in)
{
    return !w->quiet && rnd(w, in) == 0;
}

void push(struct world *w, struct sim_queue *q, struct sim_message m)
{
    uint64_t delay_ms = rnd(w, w->quiet ? 5 : chance(w, 30) ? 200 : 20);
    check(w, sim_push(q, m, w->now_ns + delay_ms * MOE_NS_PER_MS),
          "a stream holds a bounded number of messages");
}

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
uint64_t all_slots(const struct world *w)
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

static bool is_heir(const struct world *w, uint64_t incarnation)
{
    for (uint32_t s = 0; s < MOE_PLACEMENT_SLOTS_MAX; s++)
        if (incarnation != 0 && w->durable.last_members[s] == incarnation)
            return true;
    return false;
}

/* Once all members of a group that trains have got PREPARE. */
static void check_heirs(struct world *w, uint64_t e)
{
    uint64_t heirs = 0, members = 0, state = 0;
    bool saved = true, read = true;
    for (uint32_t s = 0; s < w->slots; s++) {
        uint64_t incarnation = w->epochs[e].members[s];
        bool heir = is_heir(w, incarnation);
        members |= (uint64_t)(incarnation != 0) << s;
        heirs |= (uint64_t)heir << s;
        state = heir ? w->saved[incarnation % PROCESSES_MAX] : state;
        saved = saved && (!heir || state != 0);
    }
    for (uint32_t s = 0; s < w->slots; s++) {
        bool newcomer = ((members & ~heirs) >> s & 1) != 0;
        read = read && (!newcomer || w->has_read[w->epochs[e].members[s] % PROCESSES_MAX] == state);
    }
    if (!w->trains || members != w->epochs[e].live)
        return;
    check(w, heirs != 0 || members == all_slots(w),
          "a smaller view that trains has a process of the view before");
    check(w, saved || heirs == members || heirs == 0 || !suffice(w, heirs),
          "a process without the state waits until it is saved, if the others can go on");
    check(w, read || heirs == 0 || !suffice(w, heirs),
          "a process joins a view that trains once it has read its state");
    w->joins += read && heirs != 0 && heirs != members;
}

/* Slots that can serve after a view. */
bool suffice(const struct world *w, uint64_t live)
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

uint64_t together_in(const struct world *w, uint64_t session, uint32_t s)
{
    if (w->domain == 0)
        return 0;
    uint64_t domain = ((UINT64_C(1) << w->domain) - 1) << s / w->domain * w->domain;
    return domain & w->epochs[session].live;
}

/* A view that keeps a session. */
static void check_session(struct world *w, uint64_t e)
{
    uint64_t s = w->epochs[e].session;
    if (s == 0) {
        w->epochs[e].mask = w->epochs[e].live;
        return;
    }
    check(w, s < e && w->epochs[s].session == 0 && w->epochs[s].in_force,
          "a mask is of a session that has served");
    check(w,
          (w->epochs[e].live & ~w->epochs[s].mask) == 0 && w->epochs[e].live != w->epochs[s].mask,
          "a mask has fewer slots than the one before");
    for (uint32_t i = 0; i < w->slots; i++)
        check(w,
              (w->epochs[e].live >> i & 1) == 0 || (together_in(w, s, i) & ~w->epochs[e].live) == 0,
              "a mask has or lacks the slots of a domain together");
    w->epochs[s].mask = w->epochs[e].live;
    w->kept++;
    w->learnt += s < w->first_epoch;
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
        w->epochs[e].session = a->session_epoch;
        check_session(w, e);
        if ((w->replicas > 1 || w->partial) &&
            w->epochs[w->highest_prepared].live != w->epochs[e].live)
            w->tries = 0; /* other slots try */
        w->highest_prepared = e;
        if (w->commit_ns != 0 && w->now_ns - w->commit_ns >= w->config.lease_ns)
            w->tries = 0;
        w->commit_ns = 0;
        w->tries += a->session_epoch == 0; /* a mask that fails is followed by another attempt */
        check(w, w->tries <= ATTEMPTS, "attempts are bounded");
    }
    check(w, w->highest_prepared == e, "one epoch is prepared at a time");
    struct moe_membership_worker worker;
    check(w, moe_membership_worker(w->machine, a->slot, &worker), "members are known");
    check(w, w->epochs[e].members[a->slot] == 0, "PREPARE goes to each slot once");
    check(w, (w->epochs[e].live >> a->slot & 1) != 0, "PREPARE goes to slots of the mask");
    w->epochs[e].members[a->slot] = worker.incarnation;
    check_heirs(w, e);
    check(w, w->epochs[e].session == a->session_epoch, "members get the same PREPARE");
    check(w,
          a->session_epoch == 0 ||
              w->epochs[a->session_epoch].members[a->slot] == worker.incarnation,
          "a mask keeps the processes of its session");
}

/* A member that died since then is lost soon. */
static void check_members(struct world *w, uint64_t e)
{
    uint64_t session = w->epochs[e].session != 0 ? w->epochs[e].session : e;
    for (size_t i = 0; i < w->process_count; i++) {
        const struct process *p = &w->processes[i];
        for (uint32_t s = 0; p->alive && s < w->slots; s++)
            check(w,
                  p->incarnation != w->epochs[e].members[s] ||
                      (p->session == session && p->mask == w->epochs[e].live),
                  "members of a view have one session and one mask");
    }
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
        check(w, w->durable.last_members[s] == w->epochs[e].members[s],
              "the log keeps the members of the last view");
    }
    check(w, w->durable.places == all_slots(w), "the places of a view are durable");
    w->masked += w->epochs[e].live != all_slots(w);
    w->epochs[e].in_force = true;
    w->last_live = w->epochs[e].live;
    w->had_view = true;
    check(w, w->epochs[e].members[a->slot] == worker.incarnation,
          "a view is committed to those who prepared it");
    check(w, w->epochs[e].committed[a->slot] == 0, "COMMIT goes to each slot once");
    check_members(w, e);
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
        m.session = a->session_epoch;
        m.mask = w->epochs[a->epoch].live;
        check(w, m.version == w->durable.placement_version,
              "a placement is durable before a view of it is prepared");
    }
    if (a->message == MOE_MEMBERSHIP_DRAIN && strstr(a->status.text, "fewer workers") != NULL)
        check(w, (w->durable.places >> a->slot & 1) == 0,
              "a worker is drained for a smaller group once that is durable");
    if (a->message == MOE_MEMBERSHIP_DRAIN || a->message == MOE_MEMBERSHIP_HEARTBEAT_ANSWER)
        m.keep = a->keep;
    if (a->message == MOE_MEMBERSHIP_HEARTBEAT_ANSWER)
        m.calls = a->released_calls;
    if (a->message == MOE_MEMBERSHIP_READ_CHECKPOINT) {
        m.order = a->order;
        m.calls = moe_membership_to_read(w->machine)->calls;
        w->reads++;
    }
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
        m.order = a->order;
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

void carry_out(struct world *w)
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

void start_machine(struct world *w)
{
    struct moe_status st = moe_membership_create(&w->config, &w->durable, w->now_ns, &w->machine);
    assert_int_equal(st.code, MOE_OK);
    w->restored_epoch = w->durable.view_epoch;
    w->first_epoch = w->durable.epoch + 1;
    if (w->durable.view_epoch != 0)
        w->epochs[w->durable.view_epoch].in_force = true; /* all of its members were ready */
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
                                        .trains = w->trains,
                                        .trains_with_copies = true,
                                        .session = {p->session, p->together, 64},
                                        .layers = layers,
                                        .layer_count = 2};
    moe_membership_on_register(w->machine, w->now_ns, p->stream, &r);
}

void deliver_up(struct world *w, struct process *p, const struct sim_message *m)
{
    struct moe_status error = moe_ok();
    uint64_t blob = p->incarnation * 1000 + m->round;
    if (m->error)
        error = moe_error(MOE_INTERNAL, MOE_REASON_NONE, "as the dice want");
    switch (m->kind) {
    case SIM_REGISTER: register_up(w, p); break;
    case SIM_HEARTBEAT: {
        struct moe_membership_heartbeat h = {
            .epoch = m->epoch,
            .round_trip_ns = w->round_trip_ns,
            .training_saved = {.checkpoint = "c", .calls = m->calls}};
        if (m->calls != 0)
            w->saved[p->incarnation % PROCESSES_MAX] = m->calls;
        moe_membership_on_heartbeat(w->machine, w->now_ns, p->stream, &h);
        break;
    }
    case SIM_LOADED:
        moe_membership_on_loaded(w->machine, w->now_ns, p->stream, m->version, m->order, &error);
        break;
    case SIM_CHECKPOINT_READ:
        if (!m->error)
            w->has_read[p->incarnation % PROCESSES_MAX] = m->calls;
        moe_membership_on_checkpoint_read(w->machine, w->now_ns, p->stream, m->order, &error);
        break;
    case SIM_BLOB:
        moe_membership_on_blob(w->machine, w->now_ns, p->stream, m->epoch, m->round,
                               (const uint8_t *)&blob, sizeof blob);
        break;
    case SIM_READY:
        if (!m->error)
            w->epochs[m->epoch].ready[m->slot] = p->incarnation;
        moe_membership_on_ready(w->machine, w->now_ns, p->stream, m->epoch, m->together, &error);
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
