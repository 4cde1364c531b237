/* SPDX-License-Identifier: Apache-2.0 */
/* Backward passes and optimizer steps of any backend under fault: a peer dies or stays away, an
 * abort, slots that run different steps or have no memory for one. moe/training.h states the
 * result: the session has ended, the trainer is intact (gradients of a failed pass are undefined),
 * and training goes on in the next session. */
#include "faults.h"
#include "trainer_fixture.h"

#include "base/clock.h"
#include "base/wait.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ABORT_AFTER_MS = 300 };

/* Opens a fixture and runs its first pass; *gradients: hash of the gradients. */
static bool begin_to_learn(struct member *m, struct trainer_fixture *p, uint32_t budget_ms,
                           uint64_t *gradients)
{
    struct moe_step_result result;
    return open_trainer_fixture(m, p, budget_ms) && good(run_backward(p, &result)) &&
           hash_of(p, MOE_TRAIN_GRAD, gradients);
}

/* The next session of the same members: the same pass gives the same gradients as the `first`, and
 * the step is taken. */
static int begin_again(struct member *m, struct trainer_fixture *p, uint64_t first, uint64_t epoch)
{
    struct moe_step_result result;
    uint64_t before[3], after[3], gradients;
    leave_session(&p->base);
    EXPECT(board_barrier(m, LONG_MS));
    EXPECT(good(join_session(m, &p->base, epoch, LONG_MS, true)));
    EXPECT(good(backend->training->zero_grad(p->trainer)));
    EXPECT(good(run_backward(p, &result)));
    EXPECT(result.missing_slot == -1);
    EXPECT(hash_of(p, MOE_TRAIN_GRAD, &gradients));
    EXPECT(gradients == first);
    EXPECT(hash_state(p, before));
    EXPECT(good(run_optimizer(p)));
    EXPECT(hash_state(p, after));
    EXPECT(before[0] != after[0] && before[1] != after[1] && before[2] != after[2]);
    return 0;
}

/* -------------------------------------------------------------------- disagreement */

static int mean_other_moves(struct member *m)
{
    struct trainer_fixture p;
    struct moe_step_result result;
    uint64_t first, before[3], after[3];
    EXPECT(begin_to_learn(m, &p, LONG_MS, &first));
    for (uint32_t round = 0; round < 9; round++) {
        const struct moe_optimizer_args right = p.optimizer;
        bool odd = m->slot == round % m->slots;
        EXPECT(good(run_backward(&p, &result)));
        EXPECT(hash_state(&p, before));
        if (odd && round % 3 == 0)
            p.optimizer.learning_rate = 0.5;
        if (odd && round % 3 == 1)
            p.optimizer.number = 99;
        if (odd && round % 3 == 2)
            p.optimizer.grad_scale = 0; /* which no slot can do */
        struct moe_status st = run_optimizer(&p);
        EXPECT(odd && round % 3 == 2 ? is(st, MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID)
                                     : is(st, MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH));
        EXPECT(hash_state(&p, after));
        EXPECT(memcmp(before, after, sizeof before) == 0);
        p.optimizer = right;
        EXPECT(good(run_optimizer(&p)));
        EXPECT(hash_state(&p, after));
        EXPECT(before[0] != after[0]);
    }
    return close_trainer_fixture(&p);
}

static bool slots_that_mean_different_optimizer_steps_all_refuse_and_move_nothing(uint32_t slots)
{
    return run_group(slots, mean_other_moves);
}

/* -------------------------------------------------------------------------- memory */

/* The first pass of a group, before it has scratch memory. Every subset of the slots once. */
static int find_no_memory(struct member *m)
{
    static struct memory_hog hog;
    struct moe_step_result result;
    for (uint32_t poor = 1; poor < 1u << m->slots; poor++) {
        struct trainer_fixture p;
        uint64_t before, after;
        EXPECT(open_trainer_fixture(m, &p, LONG_MS));
        EXPECT(hash_of(&p, MOE_TRAIN_GRAD, &before));
        if (poor >> m->slot & 1)
            exhaust_memory(p.base.device, 0, 4096, &hog);
        for (int again = 0; again < 2; again++) {
            EXPECT(is(run_backward(&p, &result), MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY));
            EXPECT(result.refused && result.missing_slot == -1);
        }
        release_memory(p.base.device, &hog);
        EXPECT(hash_of(&p, MOE_TRAIN_GRAD, &after));
        EXPECT(before == after);
        EXPECT(good(run_step(p.base.session, &p.base.args, &result))); /* the session goes on */
        EXPECT(good(run_backward(&p, &result)));
        EXPECT(!result.refused);
        EXPECT(good(run_optimizer(&p)));
        EXPECT(close_trainer_fixture(&p) == 0);
        EXPECT(board_barrier(m, LONG_MS));
    }
    return 0;
}

static bool slots_without_memory_make_all_refuse_a_pass_and_change_nothing(uint32_t slots)
{
    return run_group(slots, find_no_memory);
}

/* One live slot in a group of several has no window memory for rows of others. A refused pass, and
 * the steps after it, must not write to the memory behind the window. */
static int refuse_alone(struct member *m)
{
    static struct memory_hog hog;
    static struct canaries canaries;
    struct moe_step_result result;
    struct trainer_fixture p;
    if (m->slot != 0)
        return 0;
    m->live = 1;
    EXPECT(open_trainer_fixture(m, &p, LONG_MS));
    EXPECT(lay_canaries(p.base.device, &canaries));
    deny_memory(p.base.device, &hog);
    for (int again = 0; again < 3; again++) {
        EXPECT(is(run_backward(&p, &result), MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY));
        EXPECT(result.refused && result.missing_slot == -1);
    }
    release_memory(p.base.device, &hog);
    EXPECT(good(run_step(p.base.session, &p.base.args, &result))); /* the session goes on */
    EXPECT(good(run_backward(&p, &result)));
    EXPECT(!result.refused);
    EXPECT(good(run_optimizer(&p)));
    EXPECT(check_canaries(p.base.device, &canaries));
    return close_trainer_fixture(&p);
}

static bool a_slot_alone_that_refuses_a_pass_writes_nowhere_else(uint32_t slots)
{
    return run_group(slots, refuse_alone);
}

/* ---------------------------------------------------------------------------- loss */

/* Another layer, with a new trainer. */
static bool use_layer(struct trainer_fixture *p, struct moe_status made, struct moe_layer *layer,
                      uint32_t experts)
{
    backend->training->trainer_destroy(p->trainer);
    p->trainer = NULL;
    backend->layer_destroy(p->base.layer);
    p->base.layer = p->base.args.layer = layer;
    p->experts = experts;
    return good(made) && start_training(p);
}

static bool use_small_layer(struct member *m, struct trainer_fixture *p)
{
    struct moe_layer *layer = NULL;
    struct moe_status st = small_layer(p->base.device, m, m->live, &layer);
    return use_layer(p, st, layer, 2 * (uint32_t)__builtin_popcountll(m->live));
}

static bool use_copied_layer(struct member *m, struct trainer_fixture *p, uint64_t holders)
{
    struct moe_layer *layer = NULL;
    struct moe_status st = copied_layer(p->base.device, m, holders, &layer);
    return use_layer(p, st, layer, 2 * m->slots);
}

/* The same weights, in a group without the victim: a layer and a trainer for the others. */
static int learn_without_victim(struct member *m, struct trainer_fixture *p)
{
    struct moe_step_result result;
    uint64_t before[3], after[3];
    m->live &= ~(UINT64_C(1) << VICTIM);
    EXPECT(good(join_session(m, &p->base, 8, LONG_MS, true)));
    EXPECT(use_small_layer(m, p) && good(run_backward(p, &result)));
    EXPECT(hash_state(p, before));
    for (int i = 0; i < 5; i++) {
        EXPECT(good(run_backward(p, &result)));
        EXPECT(good(run_optimizer(p)));
    }
    EXPECT(hash_state(p, after));
    EXPECT(before[0] != after[0]);
    return close_trainer_fixture(p);
}

static int lose_a_peer(struct member *m, bool in_step)
{
    struct trainer_fixture p;
    struct moe_step_result result = {.missing_slot = -1};
    struct moe_status st = moe_ok();
    uint64_t first, before[3], after[3];
    EXPECT(begin_to_learn(m, &p, SHORT_MS, &first));
    EXPECT(hash_state(&p, before));
    for (uint32_t n = 1; !moe_failed(&st); n++) {
        st = in_step ? run_optimizer(&p) : run_backward(&p, &result);
        __atomic_store_n(&m->board->flag[m->slot], n, __ATOMIC_RELEASE);
    }
    if (m->slot == VICTIM)
        return 1;
    EXPECT(is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(in_step || result.missing_slot == VICTIM);
    EXPECT(backend->session_lost(p.base.session) == 1u << VICTIM);
    EXPECT(is(run_backward(&p, &result), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(is(run_optimizer(&p), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    leave_session(&p.base);
    EXPECT(hash_state(&p, after));
    EXPECT(in_step || memcmp(before, after, sizeof before) == 0);
    EXPECT(good(backend->training->zero_grad(p.trainer)));
    return learn_without_victim(m, &p);
}

static int lose_a_peer_in_a_pass(struct member *m)
{
    return lose_a_peer(m, false);
}

static int lose_a_peer_in_a_step(struct member *m)
{
    return lose_a_peer(m, true);
}

static bool a_peer_killed_in_a_backward_pass_costs_no_state(uint32_t slots)
{
    return survive_a_kill(slots, lose_a_peer_in_a_pass, 20);
}

static bool a_peer_killed_in_an_optimizer_step_costs_no_trainer(uint32_t slots)
{
    return survive_a_kill(slots, lose_a_peer_in_a_step, 20);
}

/* What a trainer has after some passes and steps. */
struct learnt {
    uint64_t gradients, state[3];
};

static int learn(struct member *m, struct trainer_fixture *p, struct learnt *out)
{
    struct moe_step_result result;
    for (int i = 0; i < 2; i++) {
        EXPECT(good(run_backward(p, &result)));
        EXPECT(good(run_backward(p, &result)));
        EXPECT(hash_of(p, MOE_TRAIN_GRAD, &out->gradients));
        EXPECT(good(run_optimizer(p)));
    }
    EXPECT(hash_state(p, out->state));
    return 0;
}

/* Experts with one copy, and those with a lost copy. */
static int learn_twice(struct member *m, struct trainer_fixture *p, struct learnt out[2])
{
    EXPECT(use_small_layer(m, p) && learn(m, p, &out[0]) == 0);
    EXPECT(use_copied_layer(m, p, UINT64_MAX) && learn(m, p, &out[1]) == 0);
    return 0;
}

/* A mask changes no trainer. Passes and steps under it have the bits of those in a session that was
 * joined without the victim, with its copies in the placement or not. With gateways it takes no
 * mask. */
static int learn_under_a_mask(struct member *m)
{
    struct trainer_fixture p;
    struct moe_step_result result = {.missing_slot = -1};
    uint64_t first, before[4], after[4], others = m->live & ~(UINT64_C(1) << VICTIM);
    struct learnt masked[2], joined[2], placed;
    EXPECT(begin_to_learn(m, &p, SHORT_MS, &first));
    for (uint32_t n = 1; result.missing_slot != VICTIM; n++) {
        struct moe_status st = run_backward(&p, &result);
        EXPECT(!moe_failed(&st) || result.missing_slot == VICTIM);
        raise_flag(m, n);
    }
    if (backend->session_together(p.base.session) == 0) {
        EXPECT(is(backend->session_mask(p.base.session, 9, others), MOE_FAILED_PRECONDITION,
                  MOE_REASON_REFORMING));
        return close_trainer_fixture(&p);
    }
    EXPECT(hash_state(&p, before) && hash_of(&p, MOE_TRAIN_GRAD, &before[3]));
    EXPECT(good(backend->session_mask(p.base.session, 9, others)));
    EXPECT(good(backend->session_exchange(p.base.session, NULL, NULL, 0)));
    EXPECT(hash_state(&p, after) && hash_of(&p, MOE_TRAIN_GRAD, &after[3]));
    EXPECT(memcmp(before, after, sizeof before) == 0);
    EXPECT(is(run_optimizer(&p), MOE_UNAVAILABLE, MOE_REASON_EXPERT_UNAVAILABLE));
    m->live = others;
    EXPECT(learn_twice(m, &p, masked) == 0);
    leave_session(&p.base);
    EXPECT(good(join_session(m, &p.base, 10, LONG_MS, true)));
    EXPECT(learn_twice(m, &p, joined) == 0);
    EXPECT(memcmp(masked, joined, sizeof masked) == 0);
    EXPECT(use_copied_layer(m, &p, others) && learn(m, &p, &placed) == 0);
    EXPECT(memcmp(&joined[1], &placed, sizeof placed) == 0);
    return close_trainer_fixture(&p);
}

static bool learning_under_a_mask_has_the_bits_of_a_new_session(uint32_t slots)
{
    return backend->session_mask == NULL || survive_a_kill(slots, learn_under_a_mask, 20);
}

/* Without peers, a step and its end without a session are the same. */
static int finish_alone(struct member *m)
{
    struct trainer_fixture p;
    struct moe_step_result result;
    struct moe_optimizer_result finished;
    uint64_t want[3], got[3], gradients[2];
    if (m->slot != 0)
        return 0;
    m->live = 1;
    EXPECT(open_trainer_fixture(m, &p, LONG_MS));
    p.optimizer.max_grad_norm = 0.5;
    EXPECT(good(run_backward(&p, &result)) && good(run_optimizer(&p)));
    EXPECT(!p.taken.unchanged && !p.taken.can_finish && p.taken.squares > 0.25);
    EXPECT(hash_state(&p, want) && hash_of(&p, MOE_TRAIN_GRAD, &gradients[0]));
    EXPECT(use_small_layer(m, &p) && good(run_backward(&p, &result)));
    p.optimizer.max_grad_norm = 0.5;
    leave_session(&p.base);
    EXPECT(good(backend->training->optimizer_finish(&p.trainer, 1, &p.optimizer, p.taken.squares,
                                                    &finished)));
    EXPECT(finished.grad_norm == p.taken.grad_norm && finished.squares == p.taken.squares);
    EXPECT(!finished.nonfinite && !finished.unchanged && !finished.can_finish);
    EXPECT(hash_state(&p, got) && hash_of(&p, MOE_TRAIN_GRAD, &gradients[1]));
    EXPECT(memcmp(want, got, sizeof want) == 0 && gradients[0] == gradients[1]);
    return close_trainer_fixture(&p);
}

static bool a_step_is_finished_without_a_session(uint32_t slots)
{
    return backend->training->optimizer_finish == NULL || run_group(slots, finish_alone);
}

/* ------------------------------------------------------- staying away, and aborts */

/* The victim takes part in neither; the others run out of budget, and the group goes on. */
static int stay_away(struct member *m)
{
    struct trainer_fixture p;
    struct moe_step_result result = {.missing_slot = -1};
    uint64_t first, before[3], after[3];
    EXPECT(begin_to_learn(m, &p, SHORT_MS, &first));
    EXPECT(hash_state(&p, before));
    for (uint64_t round = 0; round < 2; round++) {
        if (m->slot != VICTIM) {
            struct moe_status st = round == 0 ? run_backward(&p, &result) : run_optimizer(&p);
            EXPECT(is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
            EXPECT(result.missing_slot == VICTIM);
            EXPECT(round == 0 || (p.taken.unchanged && !p.taken.can_finish));
            EXPECT(backend->session_lost(p.base.session) == 1u << VICTIM);
        }
        EXPECT(board_barrier(m, LONG_MS)); /* no slot leaves before all have seen this */
        EXPECT(hash_state(&p, after));
        EXPECT(memcmp(before, after, sizeof before) == 0);
        leave_session(&p.base);
        EXPECT(good(join_session(m, &p.base, 20 + round, SHORT_MS, true)));
    }
    EXPECT(begin_again(m, &p, first, 30) == 0);
    return close_trainer_fixture(&p);
}

static bool a_peer_that_stays_away_ends_the_session_and_nothing_else(uint32_t slots)
{
    return run_group(slots, stay_away);
}

static void *abort_later(void *session)
{
    usleep(ABORT_AFTER_MS * 1000);
    backend->session_abort(session);
    return NULL;
}

static int abort_training(struct member *m)
{
    struct trainer_fixture p;
    struct moe_step_result result;
    uint64_t first, before[3], after[3];
    EXPECT(begin_to_learn(m, &p, 2 * 1000 * WATCHDOG_S, &first));
    EXPECT(hash_state(&p, before));
    for (uint64_t round = 0; round < 2; round++) {
        pthread_t thread;
        EXPECT(pthread_create(&thread, NULL, abort_later, p.base.session) == 0);
        struct moe_status st = moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "stayed away");
        if (m->slot != VICTIM)
            st = round == 0 ? run_backward(&p, &result) : run_optimizer(&p);
        pthread_join(thread, NULL);
        EXPECT(is(st, MOE_ABORTED, MOE_REASON_ABORTED));
        EXPECT(is(run_backward(&p, &result), MOE_ABORTED, MOE_REASON_ABORTED));
        EXPECT(is(run_optimizer(&p), MOE_ABORTED, MOE_REASON_ABORTED));
        EXPECT(backend->session_lost(p.base.session) == 0);
        EXPECT(board_barrier(m, LONG_MS));
        EXPECT(hash_state(&p, after));
        EXPECT(memcmp(before, after, sizeof before) == 0);
        leave_session(&p.base);
        EXPECT(good(join_session(m, &p.base, 20 + round, 2 * 1000 * WATCHDOG_S, true)));
    }
    EXPECT(begin_again(m, &p, first, 30) == 0);
    return close_trainer_fixture(&p);
}

static bool abort_ends_passes_and_optimizer_steps(uint32_t slots)
{
    return run_group(slots, abort_training);
}

/* ------------------------------------------------------- steps that are cut short */

enum {
    CUTS = 12,
    CUT_EXPERTS = 2 * MOE_MAX_SLOTS,
};

/* What a slot tells of its steps. */
struct taken {
    uint64_t steps;
    double squares; /* of the last one */
};

struct cut {
    void *session;
    uint64_t after_ns;
};

static void *abort_at(void *ctx)
{
    const struct cut *cut = ctx;
    moe_sleep_until(moe_clock_ns() + cut->after_ns);
    backend->session_abort(cut->session);
    return NULL;
}

/* One pass and one step. Returns a moment at which the next step runs, if it takes as long: in ns
 * from the beginning of its pass. 0: a failure. */
static uint64_t learn_once(struct trainer_fixture *p, struct rng *r)
{
    struct moe_step_result result;
    uint64_t begun = moe_clock_ns();
    if (!good(run_backward(p, &result)))
        return 0;
    uint64_t passed = moe_clock_ns();
    if (!good(run_optimizer(p)))
        return 0;
    uint64_t step_us = (moe_clock_ns() - passed) / 1000;
    return passed - begun + rng_below(r, (uint32_t)step_us + 1) * UINT64_C(1000);
}

/* Passes and steps until one fails. */
static struct moe_status learn_until_failure(struct trainer_fixture *p, struct taken *mine)
{
    struct moe_step_result result;
    for (;;) {
        p->taken = (struct moe_optimizer_result){0};
        MOE_TRY(run_backward(p, &result));
        MOE_TRY(run_optimizer(p));
        *mine = (struct taken){mine->steps + 1, p->taken.squares};
    }
}

/* Masters of the router and of each expert have the same bits on all slots that hold them. */
static int compare_copies(struct member *m, struct trainer_fixture *p)
{
    static uint64_t mine[CUT_EXPERTS + 1], all[MOE_MAX_SLOTS][CUT_EXPERTS + 1];
    const uint32_t tensors = p->experts + 1;
    for (uint32_t i = 0; i < tensors; i++)
        EXPECT(hash_tensor(p, i == 0 ? MOE_WEIGHT_ROUTER : MOE_WEIGHT_DOWN, i == 0 ? 0 : i - 1,
                           MOE_TRAIN_VALUE, &mine[i]));
    EXPECT(good(board_allgather(m, mine, all, sizeof mine)));
    for (uint32_t s = 0; s < m->slots; s++)
        for (uint32_t i = 0; i < tensors; i++)
            EXPECT(all[s][i] == mine[i] || all[s][i] == 0 || mine[i] == 0);
    return 0;
}

static uint64_t cut_seed;

/* One slot gives up in a step. Then some slots may have taken a step that others have not:
 * those lack the squares only, and finish it. */
static int cut_steps_short(struct member *m)
{
    struct trainer_fixture p;
    struct taken mine = {0}, all[MOE_MAX_SLOTS] = {0};
    struct rng r = {.state = cut_seed + m->slot};
    uint32_t finished = 0;
    EXPECT(open_trainer_fixture(m, &p, SHORT_MS) && use_copied_layer(m, &p, UINT64_MAX));
    p.optimizer.max_grad_norm = 0.01;
    for (uint32_t round = 0; round < CUTS; round++) {
        pthread_t thread;
        bool cuts = round % m->slots == m->slot;
        struct cut cut = {p.base.session, learn_once(&p, &r)};
        EXPECT(cut.after_ns != 0);
        mine.steps++;
        EXPECT(!cuts || pthread_create(&thread, NULL, abort_at, &cut) == 0);
        struct moe_status st = learn_until_failure(&p, &mine);
        EXPECT(st.code == MOE_ABORTED || st.code == MOE_UNAVAILABLE);
        EXPECT(!cuts || pthread_join(thread, NULL) == 0);
        leave_session(&p.base);
        EXPECT(good(board_allgather(m, &mine, all, sizeof mine)));
        struct taken most = mine;
        for (uint32_t s = 0; s < m->slots; s++)
            most = all[s].steps > most.steps ? all[s] : most;
        if (most.steps > mine.steps) {
            EXPECT(most.steps == mine.steps + 1 && p.taken.unchanged && p.taken.can_finish);
            EXPECT(good(backend->training->optimizer_finish(&p.trainer, 1, &p.optimizer,
                                                            most.squares, &p.taken)));
            p.optimizer.number++;
            mine = most;
            finished++;
        }
        EXPECT(compare_copies(m, &p) == 0);
        EXPECT(good(backend->training->zero_grad(p.trainer)));
        EXPECT(good(join_session(m, &p.base, 20 + round, SHORT_MS, true)));
    }
    fprintf(stderr, "       slot %u: %llu steps, %u finished\n", m->slot,
            (unsigned long long)mine.steps, finished);
    return close_trainer_fixture(&p);
}

static bool a_step_that_is_cut_short_is_taken_by_all_or_none(uint32_t slots)
{
    const char *replay = getenv("MOE_SEED");
    cut_seed = replay != NULL ? strtoull(replay, NULL, 10) : moe_clock_ns();
    printf("       MOE_SEED=%llu\n", (unsigned long long)cut_seed);
    fflush(stdout);
    return backend->training->optimizer_finish == NULL || run_group(slots, cut_steps_short);
}

const struct scenario training_scenarios[] = {
    SCENARIO(slots_that_mean_different_optimizer_steps_all_refuse_and_move_nothing),
    SCENARIO(slots_without_memory_make_all_refuse_a_pass_and_change_nothing),
    SCENARIO(a_slot_alone_that_refuses_a_pass_writes_nowhere_else),
    SCENARIO(a_peer_killed_in_a_backward_pass_costs_no_state),
    SCENARIO(a_peer_killed_in_an_optimizer_step_costs_no_trainer),
    SCENARIO(learning_under_a_mask_has_the_bits_of_a_new_session),
    SCENARIO(a_step_is_finished_without_a_session),
    SCENARIO(a_peer_that_stays_away_ends_the_session_and_nothing_else),
    SCENARIO(abort_ends_passes_and_optimizer_steps),
    SCENARIO(a_step_that_is_cut_short_is_taken_by_all_or_none),
};
const size_t training_scenario_count = sizeof training_scenarios / sizeof *training_scenarios;
