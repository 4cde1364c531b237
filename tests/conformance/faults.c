/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions of any backend under fault, from start to end of a step: a peer that dies, an abort,
 * slots that run different steps, and many joins and leaves. If the backend trains, the same for
 * backward passes and optimizer steps.
 *
 *     faults --backend cuda --slots 4 [--transport network] [--only TEXT]
 *
 * Uses only the backend's table. Forks one process per slot for each scenario. No result depends on
 * time; if a wait must run out, its budget is short. */
#include "faults.h"
#include "session_fixture.h"

#include "base/clock.h"
#ifdef MOE_HAVE_CUDA
#include "cuda/step/backend.h"
#endif
#include "daemon/options.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#ifndef MOE_ONE_GPU
#define MOE_ONE_GPU 0 /* 1: with tests/gpu/one_gpu.c, so several slots share a GPU */
#endif

enum {
    CYCLES = 8,
    STEPS_BEFORE = 50, /* of a slot, before something happens to it */
    KILLS = 4,         /* at moments that differ */
    KILL_US = 3000,    /* latest moment: longer than a step, and than capturing one */
};

/* If there is a ctx, it is the bucket of later steps. */
static struct moe_status step_until_failure(struct member *m, struct session_fixture *s,
                                            struct moe_step_result *result)
{
    for (uint32_t n = 1;; n++) {
        if (n > STEPS_BEFORE && m->ctx != NULL)
            s->args.bucket = *(const uint32_t *)m->ctx;
        struct moe_status st = run_step(s->session, &s->args, result);
        if (moe_failed(&st))
            return st;
        raise_flag(m, n);
    }
}

/* ---------------------------------------------------------------- scenarios */

/* The same weights, in a session without the victim. */
static int go_on_without_victim(struct member *m, struct session_fixture *s)
{
    struct moe_step_result result;
    struct moe_layer *others = NULL;
    m->live &= ~(UINT64_C(1) << VICTIM);
    EXPECT(good(small_layer(s->device, m, m->live, &others)));
    EXPECT(good(join_session(m, s, 8, LONG_MS, false)));
    EXPECT(is(run_step(s->session, &s->args, &result), MOE_UNAVAILABLE,
              MOE_REASON_EXPERT_UNAVAILABLE));
    s->args.layer = others;
    for (int i = 0; i < 20; i++)
        EXPECT(good(run_step(s->session, &s->args, &result)));
    EXPECT(result.missing_slot == -1);
    backend->layer_destroy(others);
    return 0;
}

/* Rows of other copies may be summed by another kernel, with other last bits. */
static bool same_rows(const float *a, const float *b)
{
    float largest = 0, worst = 0;
    for (uint32_t i = 0; i < TOKENS * HIDDEN; i++) {
        largest = fmaxf(largest, fabsf(a[i]));
        worst = fmaxf(worst, fabsf(a[i] - b[i]));
    }
    return largest > 0 && worst <= 1e-5f * largest;
}

/* Steps of the copied layer in a session of `live`, and leaves it. */
static int compute_in(struct member *m, struct session_fixture *s, uint64_t live, uint64_t epoch,
                      const float *want)
{
    struct moe_step_result result;
    m->live = live;
    EXPECT(good(join_session(m, s, epoch, LONG_MS, false)));
    for (int i = 0; i < 3; i++) {
        EXPECT(good(run_step(s->session, &s->args, &result)));
        EXPECT(same_rows(want, s->args.y));
    }
    leave_session(s);
    return 0;
}

/* A layer with two copies of each expert gives the same answers without the victim, and again with
 * it, from the same weights. */
static int compute_with_copies(struct member *m)
{
    static float want[TOKENS * HIDDEN];
    struct session_fixture s;
    struct moe_step_result result;
    struct moe_layer *copied = NULL;
    uint64_t all = m->live, others = all & ~(UINT64_C(1) << VICTIM);
    EXPECT(open_fixture(m, &s, LONG_MS, false));
    EXPECT(good(copied_layer(s.device, m, UINT64_MAX, &copied)));
    s.args.layer = copied;
    EXPECT(good(run_step(s.session, &s.args, &result)));
    memcpy(want, s.args.y, sizeof want);
    leave_session(&s);
    for (uint32_t round = 1; round <= 3; round++) {
        if (m->slot != VICTIM)
            EXPECT(compute_in(m, &s, others, 6 + 2 * round, want) == 0);
        raise_flag(m, round);
        EXPECT(await_flag(m->board, 0, round));
        EXPECT(compute_in(m, &s, all, 7 + 2 * round, want) == 0);
    }
    backend->layer_destroy(copied);
    return close_fixture(&s);
}

static bool copies_give_the_same_answers_without_a_slot(uint32_t slots)
{
    return run_group(slots, compute_with_copies);
}

/* Whether one of the token's experts is on the victim alone. */
static bool needs_victim(const struct moe_step_args *a, uint32_t t)
{
    for (uint32_t k = 0; k < TOP_K; k++)
        if (a->ids_out[t * TOP_K + k] / 2 == VICTIM)
            return true;
    return false;
}

/* Rows of y that need no lost expert have the bits of `want`, the others are zeros. Counts the
 * others. */
static bool partial_rows(const struct moe_step_args *a, const float *want, uint32_t *lost)
{
    static const float zeros[HIDDEN];
    *lost = 0;
    for (uint32_t t = 0; t < a->tokens; t++) {
        bool needs = needs_victim(a, t);
        const float *y = (const float *)a->y + t * HIDDEN;
        *lost += needs;
        if (a->token_state[t] != (needs ? MOE_TOKEN_UNAVAILABLE : MOE_TOKEN_OK) ||
            memcmp(y, needs ? zeros : want + t * HIDDEN, sizeof zeros) != 0)
            return false;
    }
    return true;
}

/* Without the victim, and without copies: each token has the same bits if its experts live. */
static int compute_partially(struct member *m)
{
    static float want[TOKENS * HIDDEN];
    struct session_fixture s;
    struct moe_step_result result;
    uint64_t all = m->live;
    uint32_t lost;
    EXPECT(open_fixture(m, &s, LONG_MS, false));
    EXPECT(good(run_step(s.session, &s.args, &result)));
    memcpy(want, s.args.y, sizeof want);
    leave_session(&s);
    s.partial = true;
    for (uint32_t round = 1; round <= 3; round++) {
        m->live = all & ~(UINT64_C(1) << VICTIM);
        if (m->slot != VICTIM) {
            EXPECT(good(join_session(m, &s, 6 + 2 * round, LONG_MS, false)));
            EXPECT(good(run_step(s.session, &s.args, &result)));
            EXPECT(partial_rows(&s.args, want, &lost));
            /* Slot 0 has few tokens; in large groups others need the victim's experts rarely. */
            EXPECT(m->slot == 0 ? lost > 0 : lost < s.args.tokens);
            leave_session(&s);
        }
        raise_flag(m, round);
        EXPECT(await_flag(m->board, 0, round));
        m->live = all;
        EXPECT(compute_in(m, &s, all, 7 + 2 * round, want) == 0);
    }
    EXPECT(is(join_session(m, &s, 20, LONG_MS, true), MOE_INVALID_ARGUMENT,
              MOE_REASON_CONFIG_INVALID));
    return close_fixture(&s);
}

static bool a_token_without_its_experts_costs_no_other(uint32_t slots)
{
    return !backend->partial || run_group(slots, compute_partially);
}

/* ---------------------------------------------------------------- masks */

/* The slots that a mask without the victim lacks: with gateways, those of its domain. */
static uint64_t lost_with_victim(const struct member *m, const struct session_fixture *s)
{
    uint64_t together = backend->session_together(s->session);
    bool alone = together == 0 || together == UINT64_C(1) << m->slot;
    uint32_t size = alone ? 1 : group_slots_of_host(m);
    return ((UINT64_C(1) << size) - 1) << VICTIM / size * size;
}

/* The session goes on without the `lost`; all other slots call this. */
static int take_mask(struct member *m, struct session_fixture *s, uint64_t epoch, uint64_t lost)
{
    uint64_t before = m->live, own = UINT64_C(1) << m->slot, victim = UINT64_C(1) << VICTIM;
    if (lost != victim) /* others would be gateways */
        EXPECT(is(backend->session_mask(s->session, epoch, before & ~victim),
                  MOE_FAILED_PRECONDITION, MOE_REASON_REFORMING));
    m->live &= ~lost;
    EXPECT(good(backend->session_mask(s->session, epoch, m->live)));
    EXPECT((backend->session_together(s->session) & own) == own &&
           (backend->session_together(s->session) & ~m->live) == 0);
    EXPECT(good(backend->session_exchange(s->session, NULL, NULL, 0)));
    EXPECT(backend->session_lost(s->session) == 0);
    EXPECT(is(backend->session_mask(s->session, epoch, m->live), MOE_INVALID_ARGUMENT,
              MOE_REASON_CONFIG_INVALID));
    EXPECT(is(backend->session_mask(s->session, epoch + 1, before), MOE_INVALID_ARGUMENT,
              MOE_REASON_CONFIG_INVALID));
    EXPECT(is(backend->session_mask(s->session, epoch + 5000, m->live), MOE_FAILED_PRECONDITION,
              MOE_REASON_NONE));
    return 0;
}

/* Steps of the copied layer, which all give these rows. */
static int compute_masked(struct member *m, struct session_fixture *s, const float *want)
{
    struct moe_step_result result;
    for (int i = 0; i < 200; i++) {
        EXPECT(good(run_step(s->session, &s->args, &result)));
        EXPECT(same_rows(want, s->args.y));
    }
    EXPECT(result.missing_slot == -1 && backend->session_lost(s->session) == 0);
    return 0;
}

/* Steps under a mask, and under a second one of the same slots, after an abort. */
static int compute_under_masks(struct member *m, struct session_fixture *s, const float *want)
{
    struct moe_step_result result;
    EXPECT(compute_masked(m, s, want) == 0);
    backend->session_abort(s->session);
    EXPECT(is(run_step(s->session, &s->args, &result), MOE_ABORTED, MOE_REASON_ABORTED));
    EXPECT(good(backend->session_mask(s->session, 12, m->live)));
    EXPECT(good(backend->session_exchange(s->session, NULL, NULL, 0)));
    s->args.bucket = BUCKET;
    return compute_masked(m, s, want);
}

enum { MASKED = 1 << 20 }; /* flag of a slot that has taken a mask, or does not take it */

/* The victim is killed, or it is stopped in the midst of a step and goes on when the others run
 * steps without it. Then it finds that they have left, and what it stores harms no step. Slots that
 * are lost with the victim leave. A session that takes no mask says so; there, the victim may fail
 * in any way. */
static int lose_the_victim(struct member *m)
{
    static float want[TOKENS * HIDDEN];
    struct session_fixture s;
    struct moe_step_result result;
    struct moe_layer *copied = NULL;
    EXPECT(open_fixture(m, &s, SHORT_MS, false));
    EXPECT(good(copied_layer(s.device, m, UINT64_MAX, &copied)));
    s.args.layer = copied;
    EXPECT(good(run_step(s.session, &s.args, &result)));
    memcpy(want, s.args.y, sizeof want);
    uint64_t lost = lost_with_victim(m, &s);
    bool stays = (lost >> m->slot & 1) == 0, masks = backend->session_together(s.session) != 0;
    struct moe_status st = step_until_failure(m, &s, &result);
    EXPECT(masks || m->slot != VICTIM ? is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST)
                                      : moe_failed(&st));
    if (stays && masks)
        EXPECT(take_mask(m, &s, 9, lost) == 0);
    if (stays && !masks)
        EXPECT(is(backend->session_mask(s.session, 9, m->live & ~lost), MOE_FAILED_PRECONDITION,
                  MOE_REASON_REFORMING));
    raise_flag(m, MASKED);
    if (stays && masks)
        EXPECT(compute_under_masks(m, &s, want) == 0);
    backend->layer_destroy(copied);
    return close_fixture(&s);
}

static bool a_mask_without_a_killed_slot_keeps_the_session(uint32_t slots)
{
    return backend->session_mask == NULL || survive_a_kill(slots, lose_the_victim, STEPS_BEFORE);
}

/* In the midst of a step, or while slots prepare for one of another bucket. */
static bool a_mask_follows_a_kill_at_any_moment(uint32_t slots)
{
    uint64_t seed = moe_clock_ns();
    struct rng r = {.state = seed};
    uint32_t wide = 32 * BUCKET;
    bool right = true;
    printf("       seed %llu\n", (unsigned long long)seed);
    for (uint32_t i = 0; i < KILLS && right && backend->session_mask != NULL; i++) {
        uint32_t after_us = rng_below(&r, KILL_US);
        right = survive_a_kill_with(slots, lose_the_victim, i % 2 == 0 ? NULL : &wide, STEPS_BEFORE,
                                    after_us);
        printf("       a kill %u us after step %d%s: %s\n", after_us, STEPS_BEFORE,
               i % 2 == 0 ? "" : ", in steps of a new bucket", right ? "right" : "WRONG");
        fflush(stdout);
    }
    return right;
}

static bool a_late_writer_harms_no_mask(uint32_t slots)
{
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    if (backend->session_mask == NULL)
        return true;
    group_start(&g, slots, lose_the_victim, NULL);
    bool right = await_flag(g.board, VICTIM, STEPS_BEFORE);
    kill(g.pid[VICTIM], SIGSTOP);
    for (uint32_t s = 0; s < slots; s++)
        right = (s == VICTIM || await_flag(g.board, s, MASKED)) && right;
    kill(g.pid[VICTIM], SIGCONT);
    return group_finish(&g, WATCHDOG_S, status) && right;
}

static int be_killed_or_survive(struct member *m)
{
    struct session_fixture s;
    struct moe_step_result result;
    EXPECT(open_fixture(m, &s, LONG_MS, false));
    struct moe_status st = step_until_failure(m, &s, &result);
    if (m->slot == VICTIM)
        return 1;
    EXPECT(is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(result.missing_slot == VICTIM);
    EXPECT(backend->session_lost(s.session) == 1u << VICTIM);
    EXPECT(is(run_step(s.session, &s.args, &result), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    leave_session(&s);
    EXPECT(go_on_without_victim(m, &s) == 0);
    return close_fixture(&s);
}

static bool a_killed_peer_costs_the_survivors_one_step_and_no_weights(uint32_t slots)
{
    return survive_a_kill(slots, be_killed_or_survive, STEPS_BEFORE);
}

/* Slot 1 takes part in no more steps; the others wait for it with a budget longer than the
 * watchdog. They have run steps before, because the first ones of a process may wait while its
 * device loads code. */
static int abort_a_step(struct member *m)
{
    struct session_fixture s;
    struct moe_step *step[2];
    struct moe_step_result result;
    EXPECT(open_fixture(m, &s, 2 * 1000 * WATCHDOG_S, false));
    for (int i = 0; i < 2; i++)
        EXPECT(good(run_step(s.session, &s.args, &result)));
    for (int i = 0; i < 2 && m->slot != VICTIM; i++)
        EXPECT(good(backend->step_enqueue(s.session, &s.args, &step[i])));
    for (int i = 0; i < 2 && m->slot != VICTIM; i++) {
        EXPECT(is(backend->step_wait(step[0], moe_clock_ns() + 50 * MOE_NS_PER_MS, &result),
                  MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE));
    }
    backend->session_abort(s.session);
    for (int i = 0; i < 2 && m->slot != VICTIM; i++)
        EXPECT(
            is(backend->step_wait(step[i], MOE_NEVER, &result), MOE_ABORTED, MOE_REASON_ABORTED));
    EXPECT(
        is(backend->session_exchange(s.session, NULL, NULL, 0), MOE_ABORTED, MOE_REASON_ABORTED));
    EXPECT(backend->session_lost(s.session) == 0);
    EXPECT(board_barrier(m, LONG_MS)); /* no slot leaves before all have seen this */
    return close_fixture(&s);
}

static bool abort_ends_present_and_later_waits(uint32_t slots)
{
    return run_group(slots, abort_a_step);
}

static int mean_another_step(struct member *m)
{
    struct session_fixture s;
    struct moe_step_result result;
    EXPECT(open_fixture(m, &s, LONG_MS, false));
    for (uint32_t i = 0; i < 12; i++) {
        bool odd = i % 3 == 1;
        s.args.bucket = odd && m->slot == i / 3 % m->slots ? 2 * BUCKET : BUCKET;
        struct moe_status st = run_step(s.session, &s.args, &result);
        EXPECT(odd ? is(st, MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH) : good(st));
    }
    EXPECT(backend->session_lost(s.session) == 0);
    return close_fixture(&s);
}

static bool slots_that_mean_different_steps_all_refuse_and_go_on(uint32_t slots)
{
    return run_group(slots, mean_another_step);
}

static int join_and_leave(struct member *m)
{
    struct session_fixture s;
    struct moe_step_result result;
    struct moe_device_info before, after;
    EXPECT(open_fixture(m, &s, LONG_MS, false));
    leave_session(&s);
    backend->device_info(s.device, &before);
    for (uint32_t i = 0; i < CYCLES; i++) {
        EXPECT(good(join_session(m, &s, 100 + i, LONG_MS, false)));
        EXPECT(good(run_step(s.session, &s.args, &result)));
        leave_session(&s);
    }
    backend->device_info(s.device, &after);
    /* A device may cache the memory of a step, but not once per session. */
    EXPECT(after.used_bytes <= before.used_bytes + (1 << 20));
    return close_fixture(&s);
}

static bool joining_and_leaving_leaks_nothing(uint32_t slots)
{
    return run_group(slots, join_and_leave);
}

/* Slots 0 and 1 on the first GPU, 2 and 3 on the second, and so on. */
static int share_gpus(struct member *m)
{
    struct moe_device_config config = {.ordinal = (int)m->slot / 2, .threads = 1};
    struct moe_session_config session = member_session(m, 7, LONG_MS);
    struct moe_session *joined = NULL;
    struct moe_device *device;
    EXPECT(good(backend->device_open(&config, &device)));
    struct moe_status st = backend->session_join(device, &session, &joined);
    EXPECT(is(st, MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID));
    EXPECT(strstr(st.text, "slots 0 and 1 use the same GPU") != NULL);
    backend->device_close(device);
    return 0;
}

static bool two_slots_on_one_gpu_are_refused_by_name(uint32_t slots)
{
    return run_group(slots, share_gpus);
}

/* Only for GPUs: processes may share a CPU. */
static const struct scenario gpu_scenarios[] = {
    SCENARIO(two_slots_on_one_gpu_are_refused_by_name),
};

static const struct scenario scenarios[] = {
    SCENARIO(slots_that_mean_different_steps_all_refuse_and_go_on),
    SCENARIO(abort_ends_present_and_later_waits),
    SCENARIO(a_killed_peer_costs_the_survivors_one_step_and_no_weights),
    SCENARIO(copies_give_the_same_answers_without_a_slot),
    SCENARIO(a_mask_without_a_killed_slot_keeps_the_session),
    SCENARIO(a_mask_follows_a_kill_at_any_moment),
    SCENARIO(a_late_writer_harms_no_mask),
    SCENARIO(a_token_without_its_experts_costs_no_other),
    SCENARIO(joining_and_leaving_leaks_nothing),
};

/* Runs the scenarios with `only` in their name; *run counts them. */
static bool run_all(const struct scenario *list, size_t count, uint32_t slots, const char *only,
                    uint32_t *run)
{
    bool all = true;
    for (size_t i = 0; i < count; i++) {
        if (strstr(list[i].name, only) == NULL)
            continue;
        ++*run;
        uint64_t start = moe_clock_ns();
        bool right = list[i].run(slots);
        printf("%-6s %s, %s, %.1f s\n", right ? "right" : "WRONG", list[i].name, backend->name,
               (double)(moe_clock_ns() - start) / 1e9);
        fflush(stdout);
        all = all && right;
    }
    return all;
}

static struct moe_status find_backend(const char *name, const struct moe_backend **out)
{
#ifdef MOE_HAVE_CUDA
    /* Linked in, because full_device.c wraps one of its calls. */
    if (strcmp(name, "cuda") == 0) {
        *out = &moe_backend_cuda;
        return moe_ok();
    }
#endif
    return moe_backend_find(name, out);
}

int main(int argc, char **argv)
{
    const char *name = "cpu", *transport = "auto", *only = "";
    uint64_t slots = 3, domain_size = 0;
    const struct moe_option options[] = {
        {"backend", 'b', MOE_OPTION_STRING, &name, 0, 0, "NAME", "backend to test"},
        {"slots", 'n', MOE_OPTION_UINT, &slots, 2, MOE_MAX_SLOTS, "N", "processes"},
        {"transport", 0, MOE_OPTION_STRING, &transport, 0, 0, "NAME",
         "how rows travel between slots: auto, nvlink or network"},
        {"domain-size", 0, MOE_OPTION_UINT, &domain_size, 0, MOE_MAX_SLOTS, "N",
         "N slots each count as a host; 0 = all are on one"},
        {"only", 0, MOE_OPTION_STRING, &only, 0, 0, "TEXT",
         "only scenarios with this in their name"},
    };
    size_t count = sizeof options / sizeof *options;
    struct moe_options parsed;
    int first;
    struct moe_status st = moe_options_parse(options, count, NULL, argc, argv, &first, &parsed);
    if (!moe_failed(&st))
        st = find_backend(name, &backend);
    if (moe_failed(&st)) {
        fprintf(stderr, "%s\n", st.text);
        moe_options_print(stderr, options, count, SIZE_MAX);
        return 2;
    }
    group_set(backend, "transport", transport);
    group_domain_size = (uint32_t)domain_size;
    uint32_t run = 0, n = (uint32_t)slots;
    bool all = run_all(scenarios, sizeof scenarios / sizeof *scenarios, n, only, &run);
    if (strcmp(backend->name, "cuda") == 0 && !MOE_ONE_GPU)
        all = run_all(gpu_scenarios, 1, n, only, &run) && all;
    if (backend->training == NULL) {
        printf("no training: %s has none\n", name);
    } else {
        all = run_all(training_scenarios, training_scenario_count, n, only, &run) && all;
        all = run_all(enqueue_scenarios, enqueue_scenario_count, n, only, &run) && all;
    }
    if (run == 0)
        printf("no scenario's name contains %s\n", only);
    moe_options_free(&parsed);
    return all && run > 0 ? 0 : 1;
}
