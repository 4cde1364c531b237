/* SPDX-License-Identifier: Apache-2.0 */
/* moe/backend.h promises that enqueueing waits for no slot. One slot, the victim, enqueues only
 * after all others have returned from their enqueue. An enqueue that waited for it would run out of
 * budget, and the step would fail. step_wait returns later errors, for each step in order. */
#include "faults.h"
#include "trainer_fixture.h"

#include "base/clock.h"

#include <stdlib.h>
#include <string.h>

/* Outputs of a step; in MOE_MEM_HOST. */
struct written {
    float y[TOKENS * HIDDEN], dx[TOKENS * HIDDEN], weights[TOKENS * TOP_K];
    int32_t ids[TOKENS * TOP_K];
    uint8_t state[TOKENS];
};

/* Two steps at a time. Bit i of `kinds`: step i is a backward pass, else a forward step. */
struct flight {
    struct moe_step *step[2];
    struct written *out; /* [2] */
};

enum { MAX_TOKENS = 512 }; /* of a session of member_session */
enum { FORWARD_FORWARD, BACKWARD_FORWARD, FORWARD_BACKWARD, BACKWARD_BACKWARD, KINDS };

static bool make_flight(struct trainer_fixture *p, struct flight *f)
{
    void *out;
    if (!good(backend->mem_alloc(p->base.device, MOE_MEM_HOST, 2 * sizeof *f->out, &out)))
        return false;
    f->out = out;
    return true;
}

static int end_flight(struct trainer_fixture *p, struct flight *f)
{
    backend->mem_free(p->base.device, MOE_MEM_HOST, f->out, 2 * sizeof *f->out);
    return close_trainer_fixture(p);
}

static struct moe_status enqueue(struct trainer_fixture *p, bool backward, struct written *out,
                                 struct moe_step **step)
{
    struct moe_backward_args b = p->args;
    struct moe_step_args f = p->base.args;
    memset(out, 0xff, sizeof *out);
    b.dx = out->dx;
    f.y = out->y;
    f.ids_out = out->ids;
    f.weights_out = out->weights;
    b.token_state = f.token_state = out->state;
    return backward ? backend->training->backward_enqueue(p->base.session, &b, step)
                    : backend->step_enqueue(p->base.session, &f, step);
}

static bool enqueue_both(struct trainer_fixture *p, uint32_t kinds, struct flight *f)
{
    for (uint32_t i = 0; i < 2; i++)
        if (!good(enqueue(p, kinds >> i & 1, &f->out[i], &f->step[i])))
            return false;
    return true;
}

static struct moe_status wait_for(struct flight *f, uint32_t i, struct moe_step_result *result)
{
    return backend->step_wait(f->step[i], MOE_NEVER, result);
}

/* Both are running, because no step ends before all slots have enqueued it. */
static bool neither_has_ended(struct flight *f)
{
    for (uint32_t i = 0; i < 2; i++)
        if (!is(backend->step_wait(f->step[i], 0, NULL), MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE))
            return false;
    return true;
}

static bool await_others(struct member *m, uint32_t round)
{
    for (uint32_t s = 0; s < m->slots; s++)
        if (s != m->slot && !await_flag(m->board, s, round))
            return false;
    return true;
}

/* ------------------------------------------------------------------ before the peers */

static int come_last(struct member *m)
{
    struct trainer_fixture p;
    struct flight f;
    struct written *first;
    struct moe_step_result result;
    EXPECT(open_trainer_fixture(m, &p, LONG_MS) && make_flight(&p, &f));
    EXPECT((first = malloc(sizeof *first)) != NULL);
    EXPECT(good(run_step(p.base.session, &p.base.args, &result)) &&
           good(run_backward(&p, &result)));
    memcpy(first->y, p.base.args.y, sizeof first->y);
    memcpy(first->dx, p.args.dx, sizeof first->dx);
    for (uint32_t round = 1; round <= 3 * KINDS; round++) {
        const uint32_t kinds = round % KINDS;
        EXPECT(m->slot != VICTIM || await_others(m, round));
        EXPECT(enqueue_both(&p, kinds, &f));
        EXPECT(m->slot == VICTIM || neither_has_ended(&f));
        raise_flag(m, round);
        for (uint32_t i = 0; i < 2; i++) {
            bool backward = kinds >> i & 1;
            EXPECT(good(wait_for(&f, i, &result)));
            EXPECT(memcmp(backward ? f.out[i].dx : f.out[i].y, backward ? first->dx : first->y,
                          sizeof first->y) == 0);
        }
        EXPECT(board_barrier(m, LONG_MS));
    }
    free(first);
    return end_flight(&p, &f);
}

static bool an_enqueue_returns_before_the_peers_have_come(uint32_t slots)
{
    return run_group(slots, come_last);
}

/* The second step is larger than all before it. */
static int grow_last(struct member *m)
{
    struct trainer_fixture p;
    struct flight f;
    struct moe_step_result result;
    EXPECT(open_trainer_fixture(m, &p, LONG_MS) && make_flight(&p, &f));
    for (uint32_t round = 1; BUCKET << round <= MAX_TOKENS; round++) {
        EXPECT(m->slot != VICTIM || await_others(m, round));
        for (uint32_t i = 0; i < 2; i++) {
            p.base.args.bucket = (uint32_t)BUCKET << (i == 0 ? 0 : round);
            EXPECT(good(enqueue(&p, false, &f.out[i], &f.step[i])));
        }
        EXPECT(m->slot == VICTIM || neither_has_ended(&f));
        raise_flag(m, round);
        EXPECT(good(wait_for(&f, 0, &result)) && good(wait_for(&f, 1, &result)));
        EXPECT(board_barrier(m, LONG_MS));
    }
    return end_flight(&p, &f);
}

static bool a_step_that_needs_more_memory_than_all_before_waits_for_nobody(uint32_t slots)
{
    return run_group(slots, grow_last);
}

/* --------------------------------------------------------------- errors come later */

/* The victim runs a different pass: all refuse it, and the next step runs. */
static int mean_another_pass(struct member *m)
{
    struct trainer_fixture p;
    struct flight f;
    struct moe_step_result result;
    EXPECT(open_trainer_fixture(m, &p, LONG_MS) && make_flight(&p, &f));
    if (m->slot == VICTIM)
        p.args.aux_coeff = 0.5f;
    for (uint32_t round = 1; round <= 4; round++) {
        EXPECT(m->slot != VICTIM || await_others(m, round));
        EXPECT(enqueue_both(&p, BACKWARD_FORWARD, &f));
        raise_flag(m, round);
        EXPECT(is(wait_for(&f, 0, &result), MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH));
        EXPECT(result.refused);
        EXPECT(good(wait_for(&f, 1, &result)));
        EXPECT(board_barrier(m, LONG_MS));
    }
    return end_flight(&p, &f);
}

static bool a_step_behind_a_pass_that_all_refuse_is_run(uint32_t slots)
{
    return run_group(slots, mean_another_pass);
}

/* The victim stays away. Each pair of kinds needs a session, because a lost slot ends it. */
static int lose_two_steps(struct member *m)
{
    struct trainer_fixture p;
    struct flight f;
    struct moe_step_result result;
    EXPECT(open_trainer_fixture(m, &p, SHORT_MS) && make_flight(&p, &f));
    for (uint32_t kinds = 0; kinds < KINDS; kinds++) {
        EXPECT(m->slot == VICTIM || enqueue_both(&p, kinds, &f));
        for (uint32_t i = 0; i < 2 && m->slot != VICTIM; i++) {
            EXPECT(is(wait_for(&f, i, &result), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
            EXPECT(result.missing_slot == VICTIM);
        }
        EXPECT(board_barrier(m, LONG_MS)); /* no slot leaves before all have seen this */
        leave_session(&p.base);
        EXPECT(good(join_session(m, &p.base, 20 + kinds, SHORT_MS, true)));
    }
    return end_flight(&p, &f);
}

static bool steps_whose_peer_stays_away_say_so_each_in_its_turn(uint32_t slots)
{
    return run_group(slots, lose_two_steps);
}

/* The others wait for the victim with a budget longer than the watchdog. */
static int abort_two_steps(struct member *m)
{
    const uint32_t budget_ms = 2 * 1000 * WATCHDOG_S;
    struct trainer_fixture p;
    struct flight f;
    struct moe_step_result result;
    EXPECT(open_trainer_fixture(m, &p, budget_ms) && make_flight(&p, &f));
    for (uint32_t kinds = 0; kinds < KINDS; kinds++) {
        EXPECT(m->slot == VICTIM || enqueue_both(&p, kinds, &f));
        EXPECT(m->slot == VICTIM || neither_has_ended(&f));
        backend->session_abort(p.base.session);
        for (uint32_t i = 0; i < 2 && m->slot != VICTIM; i++)
            EXPECT(is(wait_for(&f, i, &result), MOE_ABORTED, MOE_REASON_ABORTED));
        EXPECT(backend->session_lost(p.base.session) == 0);
        EXPECT(board_barrier(m, LONG_MS));
        leave_session(&p.base);
        EXPECT(good(join_session(m, &p.base, 40 + kinds, budget_ms, true)));
    }
    return end_flight(&p, &f);
}

static bool abort_ends_two_steps_of_any_kind(uint32_t slots)
{
    return run_group(slots, abort_two_steps);
}

const struct scenario enqueue_scenarios[] = {
    SCENARIO(an_enqueue_returns_before_the_peers_have_come),
    SCENARIO(a_step_that_needs_more_memory_than_all_before_waits_for_nobody),
    SCENARIO(a_step_behind_a_pass_that_all_refuse_is_run),
    SCENARIO(steps_whose_peer_stays_away_say_so_each_in_its_turn),
    SCENARIO(abort_ends_two_steps_of_any_kind),
};
const size_t enqueue_scenario_count = sizeof enqueue_scenarios / sizeof *enqueue_scenarios;
