/* Training sessions of the CPU backend where a test has to look inside, or may presume more than of
 * any backend (faults_training.c): slots that mean different passes, or have no memory for one,
 * refuse alike and change nothing; an abort ends a pass that is being waited for. */
#include "pupil.h"

#include "base/clock.h"
#include "cpu/device.h"
#include "support/check.h"

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
    uint64_t before, after;
    EXPECT(go_to_school(m, &p, LONG_MS));
    EXPECT(good(learn(&p, &result)));
    for (uint32_t round = 0; round < 15; round++) {
        EXPECT(hash_of(&p, m, MOE_TRAIN_GRAD, &before));
        struct moe_status st =
            m->slot == round % m->slots ? run_otherwise(&p, round) : learn(&p, &result);
        EXPECT(is(st, MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH));
        EXPECT(result.refused || m->slot == round % m->slots);
        EXPECT(hash_of(&p, m, MOE_TRAIN_GRAD, &after));
        EXPECT(before == after);
        if (round % 2 == 0) /* refusals in a row, and with passes between them */
            EXPECT(good(learn(&p, &result)));
    }
    EXPECT(hash_of(&p, m, MOE_TRAIN_GRAD, &after));
    EXPECT(before != after);
    return go_home(&p);
}

static void slots_that_mean_different_passes_all_refuse_and_change_nothing(void **state)
{
    (void)state;
    assert_true(run_group(3, mean_other_passes));
}

/* -------------------------------------------------------------------- other refusals */

static int abort_a_pass(struct member *m)
{
    struct pupil p;
    struct moe_step *step;
    struct moe_step_result result;
    EXPECT(go_to_school(m, &p, 2 * 1000 * PATIENCE_S));
    EXPECT(good(learn(&p, &result)));
    if (m->slot != VICTIM) {
        EXPECT(good(backend->training->backward_enqueue(p.seat.session, &p.args, &step)));
        EXPECT(is(backend->step_wait(step, moe_clock_ns() + 50 * MOE_NS_PER_MS, &result),
                  MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE));
    }
    backend->session_abort(p.seat.session);
    if (m->slot != VICTIM)
        EXPECT(is(backend->step_wait(step, MOE_NEVER, &result), MOE_ABORTED, MOE_REASON_ABORTED));
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
    EXPECT(sit_down(m, &s, LONG_MS, false));
    EXPECT(good(backend->training->trainer_create(s.layer, &config, &trainer)));
    struct moe_backward_args args = {
        .trainer = trainer, .dtype = MOE_DTYPE_F32, .bucket = BUCKET, .accumulate = true};
    EXPECT(is(backend->training->backward_enqueue(s.session, &args, &step), MOE_FAILED_PRECONDITION,
              MOE_REASON_UNSUPPORTED));
    backend->training->trainer_destroy(trainer);
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
        cmocka_unit_test(abort_ends_a_pass_and_all_that_follows),
        cmocka_unit_test(a_session_for_serving_refuses_to_train),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
