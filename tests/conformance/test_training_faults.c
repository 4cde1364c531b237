/* Training sessions of the CPU backend under fault: slots that mean different passes or optimizer
 * steps refuse alike and change nothing; a peer that dies costs the survivors neither their process
 * nor their trainer; an abort ends a pass. */
#include "seat.h"

#include "moe/training.h"

#include "base/clock.h"
#include "cpu/device.h"
#include "support/check.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { VICTIM = 1, ROUTER_FLOATS = 2 * MOE_MAX_SLOTS * HIDDEN };

static const struct moe_backend *const cpu = &moe_backend_cpu;

/* A seat in a training session, with a trainer and a backward pass that is right. */
struct pupil {
    struct seat seat;
    struct moe_trainer *trainer;
    float dy[TOKENS * HIDDEN], dx[TOKENS * HIDDEN];
    struct moe_backward_args args;
    struct moe_optimizer_args move;
};

static bool go_to_school(struct member *m, struct pupil *p, uint32_t budget_ms)
{
    struct moe_session_config config = member_session(m, 8, budget_ms);
    struct moe_trainer_config trainer = {.optimizer = MOE_OPTIMIZER_ADAMW};
    struct moe_step_result result;
    config.training = true;
    *p = (struct pupil){0};
    if (!sit_down(m, &p->seat, budget_ms))
        return false;
    cpu->session_leave(p->seat.session);
    p->seat.session = NULL;
    if (!good(cpu->session_join(p->seat.device, &config, &p->seat.session)) ||
        !good(run_step(p->seat.session, &p->seat.args, &result)) ||
        !good(cpu->training->trainer_create(p->seat.layer, &trainer, &p->trainer)))
        return false;
    struct rng r = {.state = m->slot + 50};
    for (size_t i = 0; i < TOKENS * HIDDEN; i++)
        p->dy[i] = rng_float(&r);
    p->args = (struct moe_backward_args){.trainer = p->trainer,
                                         .dtype = MOE_DTYPE_F32,
                                         .bucket = BUCKET,
                                         .tokens = TOKENS,
                                         .x = p->seat.tensors.x,
                                         .dy = p->dy,
                                         .ids = p->seat.tensors.ids,
                                         .accumulate = true,
                                         .aux_coeff = 0.01f,
                                         .dx = p->dx,
                                         .token_state = p->seat.tensors.state};
    p->move = (struct moe_optimizer_args){.learning_rate = 0.01,
                                          .beta1 = 0.9,
                                          .beta2 = 0.99,
                                          .epsilon = 1e-8,
                                          .grad_scale = 1,
                                          .number = 1};
    return true;
}

static int go_home(struct pupil *p)
{
    cpu->training->trainer_destroy(p->trainer);
    return get_up(&p->seat);
}

static struct moe_status learn(struct pupil *p, struct moe_step_result *result)
{
    struct moe_step *step;
    MOE_TRY(cpu->training->backward_enqueue(p->seat.session, &p->args, &step));
    return cpu->step_wait(step, MOE_NEVER, result);
}

static struct moe_status move(struct pupil *p)
{
    struct moe_optimizer_result result;
    return cpu->training->optimizer_step(p->seat.session, &p->trainer, 1, &p->move, &result);
}

static bool read_router(struct pupil *p, const struct member *m, enum moe_train_tensor tensor,
                        float *to)
{
    struct moe_train_key key = {MOE_WEIGHT_ROUTER, 0, MOE_PART_WEIGHT, tensor};
    memset(to, 0, ROUTER_FLOATS * sizeof *to);
    return good(cpu->training->trainer_read(p->trainer, &key, to,
                                            2 * m->slots * (size_t)HIDDEN * sizeof *to));
}

/* -------------------------------------------------------------------- disagreement */

/* One slot runs something else; what, changes from round to round. */
static struct moe_status run_otherwise(struct pupil *p, uint32_t round)
{
    struct moe_step_result result;
    struct moe_backward_args right = p->args;
    switch (round % 5) {
    case 0: return run_step(p->seat.session, &p->seat.args, &result);
    case 1: p->args.accumulate = false; break;
    case 2: p->args.aux_coeff = 0.5f; break;
    case 3: p->args.bucket = 2 * BUCKET; break;
    case 4: p->args.aux_coeff = 0; break;
    }
    struct moe_status st = learn(p, &result);
    p->args = right;
    return st;
}

static int mean_other_passes(struct member *m)
{
    struct pupil p;
    struct moe_step_result result;
    float before[ROUTER_FLOATS], after[ROUTER_FLOATS];
    EXPECT(go_to_school(m, &p, LONG_MS));
    EXPECT(good(learn(&p, &result)));
    for (uint32_t round = 0; round < 15; round++) {
        EXPECT(read_router(&p, m, MOE_TRAIN_GRAD, before));
        struct moe_status st =
            m->slot == round % m->slots ? run_otherwise(&p, round) : learn(&p, &result);
        EXPECT(is(st, MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH));
        EXPECT(result.refused || m->slot == round % m->slots);
        EXPECT(read_router(&p, m, MOE_TRAIN_GRAD, after));
        EXPECT(memcmp(before, after, sizeof before) == 0);
        if (round % 2 == 0) /* refusals in a row, and with passes between them */
            EXPECT(good(learn(&p, &result)));
    }
    EXPECT(read_router(&p, m, MOE_TRAIN_GRAD, after));
    EXPECT(memcmp(before, after, sizeof before) != 0);
    return go_home(&p);
}

static void slots_that_mean_different_passes_all_refuse_and_change_nothing(void **state)
{
    (void)state;
    assert_true(run_group(3, mean_other_passes));
}

static int mean_other_moves(struct member *m)
{
    struct pupil p;
    struct moe_step_result result;
    float before[ROUTER_FLOATS], after[ROUTER_FLOATS];
    EXPECT(go_to_school(m, &p, LONG_MS));
    const struct moe_optimizer_args right = p.move;
    for (uint32_t round = 0; round < 9; round++) {
        bool odd = m->slot == round % m->slots;
        EXPECT(good(learn(&p, &result)));
        EXPECT(read_router(&p, m, MOE_TRAIN_VALUE, before));
        if (odd && round % 3 == 0)
            p.move.learning_rate = 0.5;
        if (odd && round % 3 == 1)
            p.move.number = 99;
        if (odd && round % 3 == 2)
            p.move.grad_scale = 0; /* which no slot can do */
        struct moe_status st = move(&p);
        EXPECT(odd && round % 3 == 2 ? is(st, MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID)
                                     : is(st, MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH));
        EXPECT(read_router(&p, m, MOE_TRAIN_VALUE, after));
        EXPECT(memcmp(before, after, sizeof before) == 0);
        p.move = right;
        EXPECT(good(move(&p)));
        EXPECT(read_router(&p, m, MOE_TRAIN_VALUE, after));
        EXPECT(memcmp(before, after, sizeof before) != 0);
    }
    return go_home(&p);
}

static void slots_that_mean_different_optimizer_steps_all_refuse_and_move_nothing(void **state)
{
    (void)state;
    assert_true(run_group(3, mean_other_moves));
}

/* -------------------------------------------------------------------------- memory */

/* Takes all that the device has left. */
static bool starve(struct pupil *p, size_t *taken)
{
    struct moe_device_info info;
    cpu->device_info(p->seat.device, &info);
    *taken = (size_t)(info.memory_bytes - info.used_bytes);
    return good(moe_cpu_device_charge(p->seat.device, *taken));
}

/* The first pass of a group, which has no scratch memory yet. *ctx: bits of the slots that have no
 * memory for it. */
static int find_no_memory(struct member *m)
{
    struct pupil p;
    struct moe_step_result result;
    float before[ROUTER_FLOATS], after[ROUTER_FLOATS];
    size_t taken = 0;
    bool poor = (*(const uint32_t *)m->ctx >> m->slot & 1) != 0;
    EXPECT(go_to_school(m, &p, LONG_MS));
    EXPECT(read_router(&p, m, MOE_TRAIN_GRAD, before));
    EXPECT(!poor || starve(&p, &taken));
    EXPECT(is(learn(&p, &result), MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY));
    EXPECT(result.refused);
    EXPECT(is(learn(&p, &result), MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY));
    moe_cpu_device_discharge(p.seat.device, taken);
    EXPECT(read_router(&p, m, MOE_TRAIN_GRAD, after));
    EXPECT(memcmp(before, after, sizeof before) == 0);
    EXPECT(good(run_step(p.seat.session, &p.seat.args, &result))); /* the session goes on */
    EXPECT(good(learn(&p, &result)));
    EXPECT(!result.refused);
    EXPECT(good(move(&p)));
    return go_home(&p);
}

static void slots_without_memory_make_all_refuse_and_change_nothing(void **state)
{
    (void)state;
    for (uint32_t poor = 1; poor < 8; poor++)
        assert_true(run_group_with(3, find_no_memory, &poor));
}

/* ---------------------------------------------------------------------------- loss */

static int learn_until_the_end(struct member *m)
{
    struct pupil p;
    struct moe_step_result result;
    struct moe_status st = moe_ok();
    float value[ROUTER_FLOATS];
    EXPECT(go_to_school(m, &p, SHORT_MS));
    for (uint32_t n = 1; !moe_failed(&st); n++) {
        st = n % 2 == 0 ? move(&p) : learn(&p, &result);
        raise_flag(m, n);
    }
    if (m->slot == VICTIM)
        return 1;
    EXPECT(is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(is(learn(&p, &result), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(is(move(&p), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(result.missing_slot == VICTIM || result.missing_slot == -1);
    cpu->session_leave(p.seat.session);
    p.seat.session = NULL;
    EXPECT(read_router(&p, m, MOE_TRAIN_VALUE, value));
    EXPECT(good(cpu->training->zero_grad(p.trainer)));
    return go_home(&p);
}

static void a_killed_peer_costs_the_survivors_neither_process_nor_trainer(void **state)
{
    (void)state;
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&g, 3, learn_until_the_end, NULL);
    bool ran = await_flag(g.board, VICTIM, 40);
    kill(g.pid[VICTIM], SIGKILL);
    (void)group_finish(&g, PATIENCE_S, status);
    assert_true(ran);
    for (uint32_t s = 0; s < 3; s++)
        assert_true(s == VICTIM ? WIFSIGNALED(status[s])
                                : WIFEXITED(status[s]) && WEXITSTATUS(status[s]) == 0);
}

static int abort_a_pass(struct member *m)
{
    struct pupil p;
    struct moe_step *step;
    struct moe_step_result result;
    EXPECT(go_to_school(m, &p, 2 * 1000 * PATIENCE_S));
    EXPECT(good(learn(&p, &result)));
    if (m->slot != VICTIM) {
        EXPECT(good(cpu->training->backward_enqueue(p.seat.session, &p.args, &step)));
        EXPECT(is(cpu->step_wait(step, moe_clock_ns() + 50 * MOE_NS_PER_MS, &result),
                  MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE));
    }
    cpu->session_abort(p.seat.session);
    if (m->slot != VICTIM)
        EXPECT(is(cpu->step_wait(step, MOE_NEVER, &result), MOE_ABORTED, MOE_REASON_ABORTED));
    EXPECT(is(move(&p), MOE_ABORTED, MOE_REASON_ABORTED));
    EXPECT(board_barrier(m, LONG_MS)); /* nobody leaves before all have seen this */
    return go_home(&p);
}

static void abort_ends_a_pass_and_all_that_follows(void **state)
{
    (void)state;
    assert_true(run_group(3, abort_a_pass));
}

static int train_in_a_session_for_serving(struct member *m)
{
    struct seat s;
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_SGD};
    struct moe_trainer *trainer;
    struct moe_step *step;
    EXPECT(sit_down(m, &s, LONG_MS));
    EXPECT(good(cpu->training->trainer_create(s.layer, &config, &trainer)));
    struct moe_backward_args args = {
        .trainer = trainer, .dtype = MOE_DTYPE_F32, .bucket = BUCKET, .accumulate = true};
    EXPECT(is(cpu->training->backward_enqueue(s.session, &args, &step), MOE_FAILED_PRECONDITION,
              MOE_REASON_UNSUPPORTED));
    cpu->training->trainer_destroy(trainer);
    return get_up(&s);
}

static void a_session_for_serving_refuses_to_train(void **state)
{
    (void)state;
    assert_true(run_group(2, train_in_a_session_for_serving));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_that_mean_different_passes_all_refuse_and_change_nothing),
        cmocka_unit_test(slots_that_mean_different_optimizer_steps_all_refuse_and_move_nothing),
        cmocka_unit_test(slots_without_memory_make_all_refuse_and_change_nothing),
        cmocka_unit_test(a_killed_peer_costs_the_survivors_neither_process_nor_trainer),
        cmocka_unit_test(abort_ends_a_pass_and_all_that_follows),
        cmocka_unit_test(a_session_for_serving_refuses_to_train),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
