/* Backward passes and optimizer steps of any backend under fault: a peer dies or stays away, an
 * abort, slots that mean different steps. What must hold afterwards is said in moe/training.h: the
 * session has ended, the trainer is whole (gradients of a pass that failed are undefined), and the
 * next session learns as if nothing had happened. */
#include "faults.h"

#include "base/clock.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ABORT_AFTER_MS = 300 };

/* A seat in a training session, a trainer, and a pass and a step that are right. */
struct pupil {
    struct seat seat;
    struct moe_trainer *trainer;
    struct moe_backward_args args;
    struct moe_optimizer_args move;
    uint64_t gradients; /* hash of them after one pass from zero */
};

/* ------------------------------------------------------------------------ acts */

static struct moe_status learn(struct pupil *p, struct moe_step_result *result)
{
    struct moe_step *step;
    MOE_TRY(backend->training->backward_enqueue(p->seat.session, &p->args, &step));
    return backend->step_wait(step, MOE_NEVER, result);
}

static struct moe_status move(struct pupil *p)
{
    struct moe_optimizer_result result;
    MOE_TRY(backend->training->optimizer_step(p->seat.session, &p->trainer, 1, &p->move, &result));
    p->move.number++;
    return moe_ok();
}

/* FNV-1a of one kind of tensor, of everything that this slot holds. */
static bool hash_of(struct pupil *p, const struct member *m, enum moe_train_tensor tensor,
                    uint64_t *hash)
{
    float data[2 * MOE_MAX_SLOTS * HIDDEN];
    static const enum moe_weight weights[] = {MOE_WEIGHT_ROUTER, MOE_WEIGHT_GATE, MOE_WEIGHT_UP,
                                              MOE_WEIGHT_DOWN};
    uint32_t experts = 2 * (uint32_t)__builtin_popcountll(m->live);
    *hash = UINT64_C(0xcbf29ce484222325);
    for (size_t w = 0; w < sizeof weights / sizeof *weights; w++)
        for (uint32_t e = 0; e < (w == 0 ? 1 : experts); e++) {
            struct moe_train_key key = {weights[w], e, MOE_PART_WEIGHT, tensor};
            size_t n = w == 0 ? (size_t)experts * HIDDEN : (size_t)INNER * HIDDEN;
            struct moe_status st =
                backend->training->trainer_read(p->trainer, &key, data, n * sizeof *data);
            if (st.code == MOE_NOT_FOUND && w > 0)
                continue; /* another slot's */
            if (!good(st))
                return false;
            for (size_t i = 0; i < n * sizeof *data; i++)
                *hash = (*hash ^ ((const uint8_t *)data)[i]) * UINT64_C(0x100000001b3);
        }
    return true;
}

/* Of masters and moments. */
static bool hash_state(struct pupil *p, const struct member *m, uint64_t hash[3])
{
    return hash_of(p, m, MOE_TRAIN_VALUE, &hash[0]) && hash_of(p, m, MOE_TRAIN_MOMENT1, &hash[1]) &&
           hash_of(p, m, MOE_TRAIN_MOMENT2, &hash[2]);
}

/* A trainer for the seat's layer, and its first pass, whose gradients stay. */
static bool begin_to_learn(struct member *m, struct pupil *p)
{
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_ADAMW};
    struct moe_step_result result;
    if (!good(run_step(&p->seat, &result)) ||
        !good(backend->training->trainer_create(p->seat.layer, &config, &p->trainer)))
        return false;
    p->args = (struct moe_backward_args){.trainer = p->trainer,
                                         .dtype = MOE_DTYPE_F32,
                                         .bucket = BUCKET,
                                         .tokens = TOKENS,
                                         .x = p->seat.args.x,
                                         .dy = p->seat.dy,
                                         .ids = p->seat.args.ids_out,
                                         .accumulate = true,
                                         .aux_coeff = 0.01f,
                                         .dx = p->seat.dx,
                                         .token_state = p->seat.args.token_state};
    p->move = (struct moe_optimizer_args){.learning_rate = 0.01,
                                          .beta1 = 0.9,
                                          .beta2 = 0.99,
                                          .epsilon = 1e-8,
                                          .grad_scale = 1,
                                          .number = 1};
    return good(learn(p, &result)) && hash_of(p, m, MOE_TRAIN_GRAD, &p->gradients);
}

static bool go_to_school(struct member *m, struct pupil *p, uint32_t budget_ms)
{
    *p = (struct pupil){0};
    return good(sit_down(m, &p->seat, budget_ms, true)) && begin_to_learn(m, p);
}

static int go_home(struct pupil *p)
{
    backend->training->trainer_destroy(p->trainer);
    return get_up(&p->seat);
}

static void leave(struct pupil *p)
{
    backend->session_leave(p->seat.session);
    p->seat.session = NULL;
}

/* The next session of the same members: the same pass gives the same gradients again, and the step
 * is taken. */
static int begin_again(struct member *m, struct pupil *p, uint64_t epoch)
{
    struct moe_step_result result;
    uint64_t before[3], after[3], gradients;
    leave(p);
    EXPECT(board_barrier(m, LONG_MS));
    EXPECT(good(join(m, &p->seat, epoch, LONG_MS, true)));
    EXPECT(good(backend->training->zero_grad(p->trainer)));
    EXPECT(good(learn(p, &result)));
    EXPECT(result.missing_slot == -1);
    EXPECT(hash_of(p, m, MOE_TRAIN_GRAD, &gradients));
    EXPECT(gradients == p->gradients);
    EXPECT(hash_state(p, m, before));
    EXPECT(good(move(p)));
    EXPECT(hash_state(p, m, after));
    EXPECT(before[0] != after[0] && before[1] != after[1] && before[2] != after[2]);
    return 0;
}

/* -------------------------------------------------------------------- disagreement */

static int mean_other_moves(struct member *m)
{
    struct pupil p;
    struct moe_step_result result;
    uint64_t before[3], after[3];
    EXPECT(go_to_school(m, &p, LONG_MS));
    for (uint32_t round = 0; round < 9; round++) {
        const struct moe_optimizer_args right = p.move;
        bool odd = m->slot == round % m->slots;
        EXPECT(good(learn(&p, &result)));
        EXPECT(hash_state(&p, m, before));
        if (odd && round % 3 == 0)
            p.move.learning_rate = 0.5;
        if (odd && round % 3 == 1)
            p.move.number = 99;
        if (odd && round % 3 == 2)
            p.move.grad_scale = 0; /* which no slot can do */
        struct moe_status st = move(&p);
        EXPECT(odd && round % 3 == 2 ? is(st, MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID)
                                     : is(st, MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH));
        EXPECT(hash_state(&p, m, after));
        EXPECT(memcmp(before, after, sizeof before) == 0);
        p.move = right;
        EXPECT(good(move(&p)));
        EXPECT(hash_state(&p, m, after));
        EXPECT(before[0] != after[0]);
    }
    return go_home(&p);
}

static bool slots_that_mean_different_optimizer_steps_all_refuse_and_move_nothing(uint32_t slots)
{
    return all_return_zero(slots, mean_other_moves);
}

/* ---------------------------------------------------------------------------- loss */

/* The same weights, in a group without the victim: a layer and a trainer for the rest. */
static int learn_without_victim(struct member *m, struct pupil *p)
{
    struct moe_step_result result;
    uint64_t before[3], after[3];
    backend->training->trainer_destroy(p->trainer);
    p->trainer = NULL;
    backend->layer_destroy(p->seat.layer);
    p->seat.layer = NULL;
    m->live &= ~(UINT64_C(1) << VICTIM);
    EXPECT(good(small_layer(p->seat.device, m, m->live, &p->seat.layer)));
    p->seat.args.layer = p->seat.layer;
    EXPECT(good(join(m, &p->seat, 8, LONG_MS, true)));
    EXPECT(begin_to_learn(m, p));
    EXPECT(hash_state(p, m, before));
    for (int i = 0; i < 5; i++) {
        EXPECT(good(learn(p, &result)));
        EXPECT(good(move(p)));
    }
    EXPECT(hash_state(p, m, after));
    EXPECT(before[0] != after[0]);
    return go_home(p);
}

static int lose_a_peer(struct member *m, bool in_step)
{
    struct pupil p;
    struct moe_step_result result = {.missing_slot = -1};
    struct moe_status st = moe_ok();
    uint64_t before[3], after[3];
    EXPECT(go_to_school(m, &p, SHORT_MS));
    EXPECT(hash_state(&p, m, before));
    for (uint32_t n = 1; !moe_failed(&st); n++) {
        st = in_step ? move(&p) : learn(&p, &result);
        __atomic_store_n(&m->board->flag[m->slot], n, __ATOMIC_RELEASE);
    }
    if (m->slot == VICTIM)
        return 1;
    EXPECT(is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(in_step || result.missing_slot == VICTIM);
    EXPECT(backend->session_lost(p.seat.session) == 1u << VICTIM);
    EXPECT(is(learn(&p, &result), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(is(move(&p), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    leave(&p);
    EXPECT(hash_state(&p, m, after));
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

/* ------------------------------------------------------- staying away, and aborts */

/* The victim takes part in neither; the others run out of budget, and the group goes on. */
static int stay_away(struct member *m)
{
    struct pupil p;
    struct moe_step_result result = {.missing_slot = -1};
    uint64_t before[3], after[3];
    EXPECT(go_to_school(m, &p, SHORT_MS));
    EXPECT(hash_state(&p, m, before));
    for (uint64_t round = 0; round < 2; round++) {
        if (m->slot != VICTIM) {
            struct moe_status st = round == 0 ? learn(&p, &result) : move(&p);
            EXPECT(is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
            EXPECT(result.missing_slot == VICTIM);
            EXPECT(backend->session_lost(p.seat.session) == 1u << VICTIM);
        }
        EXPECT(board_barrier(m, LONG_MS)); /* nobody leaves before all have seen this */
        EXPECT(hash_state(&p, m, after));
        EXPECT(memcmp(before, after, sizeof before) == 0);
        leave(&p);
        EXPECT(good(join(m, &p.seat, 20 + round, SHORT_MS, true)));
    }
    EXPECT(begin_again(m, &p, 30) == 0);
    return go_home(&p);
}

static bool a_peer_that_stays_away_ends_the_session_and_nothing_else(uint32_t slots)
{
    return all_return_zero(slots, stay_away);
}

static void *abort_later(void *session)
{
    usleep(ABORT_AFTER_MS * 1000);
    backend->session_abort(session);
    return NULL;
}

static int abort_training(struct member *m)
{
    struct pupil p;
    struct moe_step_result result;
    uint64_t before[3], after[3];
    EXPECT(go_to_school(m, &p, 2 * 1000 * PATIENCE_S));
    EXPECT(hash_state(&p, m, before));
    for (uint64_t round = 0; round < 2; round++) {
        pthread_t thread;
        EXPECT(pthread_create(&thread, NULL, abort_later, p.seat.session) == 0);
        struct moe_status st = moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "stayed away");
        if (m->slot != VICTIM)
            st = round == 0 ? learn(&p, &result) : move(&p);
        pthread_join(thread, NULL);
        EXPECT(is(st, MOE_ABORTED, MOE_REASON_ABORTED));
        EXPECT(is(learn(&p, &result), MOE_ABORTED, MOE_REASON_ABORTED));
        EXPECT(is(move(&p), MOE_ABORTED, MOE_REASON_ABORTED));
        EXPECT(backend->session_lost(p.seat.session) == 0);
        EXPECT(board_barrier(m, LONG_MS));
        EXPECT(hash_state(&p, m, after));
        EXPECT(memcmp(before, after, sizeof before) == 0);
        leave(&p);
        EXPECT(good(join(m, &p.seat, 20 + round, 2 * 1000 * PATIENCE_S, true)));
    }
    EXPECT(begin_again(m, &p, 30) == 0);
    return go_home(&p);
}

static bool abort_ends_passes_and_optimizer_steps(uint32_t slots)
{
    return all_return_zero(slots, abort_training);
}

const struct scenario training_scenarios[] = {
    SCENARIO(slots_that_mean_different_optimizer_steps_all_refuse_and_move_nothing),
    SCENARIO(a_peer_killed_in_a_backward_pass_costs_no_state),
    SCENARIO(a_peer_killed_in_an_optimizer_step_costs_no_trainer),
    SCENARIO(a_peer_that_stays_away_ends_the_session_and_nothing_else),
    SCENARIO(abort_ends_passes_and_optimizer_steps),
};
const size_t training_scenario_count = sizeof training_scenarios / sizeof *training_scenarios;
