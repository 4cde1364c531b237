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
#include "membership_world.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Where members answer PREPARE, leases are too long to help. */
static uint64_t lease_ms(const struct world *w)
{
    return w->round_trip_ns != 0 ? 5 * LEASE_MS : LEASE_MS;
}

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
    w->quiet_calls = save_window(w) | 1; /* a state that is saved and held stays so */
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

/* The processes of some slots die, or stop for long. The others suffice, and serve within a lease;
 * long before, if members answer PREPARE. Once all are back, the group serves with all. */
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
    uint64_t answer_ms = 5 * w->round_trip_ns / MOE_NS_PER_MS;
    for (uint64_t i = 0; i < (LEASE_MS + answer_ms) / STEP_MS && !serves_without_the_dead(w); i++)
        step(w);
    check(w, serves_without_the_dead(w),
          lease_ms(w) > LEASE_MS ? "the others serve long before the leases of the lost ones end"
                                 : "the others serve within a lease if they suffice");
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
    w->trains = w->replicas > 1 && !w->partial && !w->elastic && rnd(w, 2) == 0;
    w->ids = w->slots + (uint32_t)rnd(w, 2);
    w->rounds = (uint32_t)rnd(w, 4);
    w->async_saves = rnd(w, 2) == 0;
    w->domain = (const uint32_t[]){0, 1, 1, 2}[rnd(w, 4)];
    w->round_trip_ns = (const uint64_t[]){0, 5, 10, 60}[rnd(w, 4)] * MOE_NS_PER_MS;
    w->verbose = getenv("MOE_SEED") != NULL;
    w->config = (struct moe_membership_config){.slots = w->slots,
                                               .size = size,
                                               .replicas = w->replicas,
                                               .partial = w->partial,
                                               .lease_ns = lease_ms(w) * MOE_NS_PER_MS,
                                               .answer_ns = 20 * MOE_NS_PER_MS,
                                               .form_ns = FORM_MS * MOE_NS_PER_MS,
                                               .read_ns = READ_MS * MOE_NS_PER_MS,
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
    size_t masked = 0, masks_ended = 0, lacking = 0, kept = 0, unkept = 0, learnt = 0;
    size_t scalings = 0, scaled = 0, undone = 0, refused = 0, reads = 0, joins = 0;
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
        kept += w->kept;
        unkept += w->unkept;
        learnt += w->learnt;
        scalings += w->scalings;
        scaled += w->scaled;
        undone += w->undone;
        refused += w->refused;
        reads += w->reads;
        joins += w->joins;
    }
    print_message(
        "%" PRIu64 " runs from seed %" PRIu64
        ": %zu commits, %zu coordinator crashes (%zu with a view in force, %zu of them went on "
        "under it), %zu worker processes, %zu cordons; %zu views of fewer than all slots (%zu "
        "without some experts), and %zu losses that the others served through\n",
        runs, first, commits, crashes, restores, adoptions, processes, cordons, masked, lacking,
        masks_ended);
    print_message("%zu views kept a session, %zu of them one of an earlier coordinator, and %zu "
                  "times a worker had not\n",
                  kept, learnt, unkept);
    print_message("sizes changed %zu times; %zu requests were accepted, %zu undone, %zu refused\n",
                  scaled, scalings, undone, refused);
    print_message("%zu times a worker was ordered to read the state of training, and %zu PREPAREs "
                  "were of views with workers that had\n",
                  reads, joins);
    if (runs >= 100) { /* the world is as rough as it claims to be */
        assert_true(commits > runs && crashes > runs / 20 && cordons > runs / 20);
        assert_true(adoptions > 0 && adoptions < restores);
        assert_true(masked > runs / 4 && masks_ended > runs / 20 && lacking > runs / 20);
        assert_true(reads > joins && joins > runs / 20);
        assert_true(kept > runs / 4 && learnt > 0 && unkept > 0);
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
