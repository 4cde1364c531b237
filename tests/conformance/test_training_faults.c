/* SPDX-License-Identifier: Apache-2.0 */
/* Training sessions of the CPU backend, for tests that use internals or CPU-only properties (the
 * rest is in faults_training.c). Slots that run different passes, or have no memory for one, refuse
 * alike and change nothing. An abort ends a running pass. */
#include "trainer_fixture.h"

#include "base/clock.h"
#include "cpu/compute/device.h"
#include "support/check.h"

/* -------------------------------------------------------------------- disagreement */

/* One slot runs a different pass, another one in each round. */
static struct moe_status run_otherwise(struct trainer_fixture *p, uint32_t round)
{
    struct moe_step_result result;
    struct moe_backward_args right = p->args;
    switch (round % 5) {
    case 0: return run_step(p->base.session, &p->base.args, &result);
    case 1: p->args.accumulate = false; break;
    case 2: p->args.aux_coeff = 0.5f; break;
    case 3: p->args.bucket = 2 * BUCKET; break;
    case 4: p->args.aux_coeff = 0; break;
    }
    struct moe_status st = run_backward(p, &result);
    p->args = right;
    return st;
}

static int mean_other_passes(struct member *m)
{
    struct trainer_fixture p;
    struct moe_step_result result;
    uint64_t before, after;
    EXPECT(open_trainer_fixture(m, &p, LONG_MS));
    EXPECT(good(run_backward(&p, &result)));
    for (uint32_t round = 0; round < 15; round++) {
        EXPECT(hash_of(&p, MOE_TRAIN_GRAD, &before));
        struct moe_status st =
            m->slot == round % m->slots ? run_otherwise(&p, round) : run_backward(&p, &result);
        EXPECT(is(st, MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH));
        EXPECT(result.refused || m->slot == round % m->slots);
        EXPECT(hash_of(&p, MOE_TRAIN_GRAD, &after));
        EXPECT(before == after);
        if (round % 2 == 0) /* refusals in a row, and with passes between them */
            EXPECT(good(run_backward(&p, &result)));
    }
    EXPECT(hash_of(&p, MOE_TRAIN_GRAD, &after));
    EXPECT(before != after);
    return close_trainer_fixture(&p);
}

static void slots_that_mean_different_passes_all_refuse_and_change_nothing(void **state)
{
    (void)state;
    assert_true(run_group(3, mean_other_passes));
}

/* ---------------------------------------------------------------------------- memory */

enum {
    ROOM = 8 << 20
}; /* enough for all retained activations here, and more than any pass needs */

/* The memory that is left, by round: each time a different allocation of scratch fails. */
static bool next_left(size_t *left)
{
    *left += *left < 64 << 10 ? 512 : (16 << 10) + 512;
    return *left < ROOM / 4;
}

struct gave_way {
    uint32_t retained, gone; /* rounds in which retained activations stayed, or did not */
};

/* BF16 rows are widened, which takes more scratch. */
static void narrow(struct moe_step_args *a)
{
    float *x = (float *)(uintptr_t)a->x;
    for (uint32_t i = 0; i < TOKENS * HIDDEN; i++) {
        float value = x[i];
        ((uint16_t *)x)[i] = moe_f32_to_bf16(value);
    }
    a->dtype = MOE_DTYPE_BF16;
}

/* A step on slot 0, which has scratch for no tokens, and a retained step that can be evicted. */
static int run_poor_step(struct member *m, size_t left, struct gave_way *seen)
{
    static struct memory_hog hog;
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_SGD};
    struct moe_step_result result;
    struct moe_trainer *trainer;
    struct session_fixture s;
    EXPECT(open_fixture(m, &s, LONG_MS, true));
    EXPECT(good(backend->training->trainer_create(s.layer, &config, &trainer)));
    backend->training->retained_limit(s.device, ROOM);
    if (left % 1024 == 0)
        narrow(&s.args);
    for (uint64_t name = 1; name < 3; name++) {
        s.args.retain = name;
        s.args.tokens = name == 1 ? 0 : TOKENS;
        if (name == 2 && m->slot == 0)
            exhaust_memory(s.device, left, 1, &hog);
        EXPECT(good(run_step(s.session, &s.args, &result)));
        EXPECT(result.retained || (name == 2 && m->slot == 0));
        EXPECT(result.retained || backend->training->retained_bytes(s.device) == 0);
    }
    release_memory(s.device, &hog);
    seen->retained += result.retained;
    seen->gone += !result.retained;
    backend->training->trainer_destroy(trainer);
    return close_fixture(&s);
}

/* A pass from a retained step on slot 0, which has no scratch for passes; gradients do not change.
 */
static int run_poor_pass(struct member *m, size_t left, struct gave_way *seen, uint64_t *want)
{
    static struct memory_hog hog;
    struct moe_step_result result;
    struct trainer_fixture p;
    uint64_t got;
    EXPECT(open_trainer_fixture(m, &p, LONG_MS));
    backend->training->retained_limit(p.base.device, ROOM);
    p.base.args.retain = p.args.retained = 1;
    EXPECT(good(run_step(p.base.session, &p.base.args, &result)));
    EXPECT(result.retained);
    if (m->slot == 0)
        exhaust_memory(p.base.device, left, 1, &hog);
    EXPECT(good(run_backward(&p, &result)));
    release_memory(p.base.device, &hog);
    EXPECT(result.used_retained || m->slot == 0);
    seen->retained += result.used_retained;
    seen->gone += !result.used_retained;
    EXPECT(hash_of(&p, MOE_TRAIN_GRAD, &got));
    EXPECT(got == *want || *want == 0);
    *want = got;
    return close_trainer_fixture(&p);
}

static int give_way(struct member *m)
{
    struct gave_way steps = {0}, passes = {0};
    uint64_t gradients = 0;
    for (size_t left = 0; next_left(&left);)
        EXPECT(run_poor_step(m, left, &steps) == 0 &&
               run_poor_pass(m, left, &passes, &gradients) == 0);
    fprintf(stderr, "  slot %u: %u of %u steps retained nothing, %u of %u passes computed again\n",
            m->slot, steps.gone, steps.gone + steps.retained, passes.gone,
            passes.gone + passes.retained);
    EXPECT(steps.retained > 0 && passes.retained > 0);
    EXPECT(m->slot != 0 || (steps.gone > 0 && passes.gone > 0));
    return 0;
}

static void retained_activations_give_way_if_a_step_or_pass_lacks_memory(void **state)
{
    (void)state;
    with_shared_expert = true;
    assert_true(run_group(2, give_way));
    with_shared_expert = false;
}

/* -------------------------------------------------------------------- other refusals */

static int abort_a_pass(struct member *m)
{
    struct trainer_fixture p;
    struct moe_step *step;
    struct moe_step_result result;
    EXPECT(open_trainer_fixture(m, &p, 2 * 1000 * WATCHDOG_S));
    EXPECT(good(run_backward(&p, &result)));
    if (m->slot != VICTIM) {
        EXPECT(good(backend->training->backward_enqueue(p.base.session, &p.args, &step)));
        EXPECT(is(backend->step_wait(step, moe_clock_ns() + 50 * MOE_NS_PER_MS, &result),
                  MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE));
    }
    backend->session_abort(p.base.session);
    if (m->slot != VICTIM)
        EXPECT(is(backend->step_wait(step, MOE_NEVER, &result), MOE_ABORTED, MOE_REASON_ABORTED));
    EXPECT(is(run_optimizer(&p), MOE_ABORTED, MOE_REASON_ABORTED));
    EXPECT(board_barrier(m, LONG_MS)); /* no slot leaves before all have seen this */
    return close_trainer_fixture(&p);
}

static void abort_ends_a_pass_and_all_that_follows(void **state)
{
    (void)state;
    assert_true(run_group(3, abort_a_pass));
}

static int train_in_a_session_for_serving(struct member *m)
{
    struct session_fixture s;
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_SGD};
    struct moe_trainer *trainer;
    struct moe_step *step;
    EXPECT(open_fixture(m, &s, LONG_MS, false));
    EXPECT(good(backend->training->trainer_create(s.layer, &config, &trainer)));
    struct moe_backward_args args = {
        .trainer = trainer, .dtype = MOE_DTYPE_F32, .bucket = BUCKET, .accumulate = true};
    EXPECT(is(backend->training->backward_enqueue(s.session, &args, &step), MOE_FAILED_PRECONDITION,
              MOE_REASON_UNSUPPORTED));
    backend->training->trainer_destroy(trainer);
    return close_fixture(&s);
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
        cmocka_unit_test(retained_activations_give_way_if_a_step_or_pass_lacks_memory),
        cmocka_unit_test(abort_ends_a_pass_and_all_that_follows),
        cmocka_unit_test(a_session_for_serving_refuses_to_train),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
