/* SPDX-License-Identifier: Apache-2.0 */
/* A peer that has stopped is found after a few turns of the judge. One that only gets no processor
 * is never taken for stopped, however long that lasts and however late the judge itself runs. */
#include "links/pulse.h"

#include "base/clock.h"
#include "base/wait.h"
#include "support/check.h"
#include "support/random.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WORLDS = 2000, TURNS = 3000, LONG_MS = 20000 };

/* ------------------------------------------------------------------------ the judge */

/* A peer and the judge on a busy machine, in turns of 10 ms. Each runs for some turns, then is kept
 * from running for some. */
struct side {
    bool runs;
    uint32_t left; /* turns until that changes */
};

struct world {
    struct rng rng;
    struct side judge, peer;
    enum moe_pulse_thread state; /* of the peer, as the kernel has it */
    uint32_t beat, silence, longest;
    struct moe_pulse_peer seen;
};

static bool pass_turn(struct world *w, struct side *side, uint32_t longest_wait)
{
    if (side->left == 0) {
        side->runs = !side->runs;
        side->left = 1 + rng_below(&w->rng, side->runs ? 40 : longest_wait);
    }
    side->left--;
    return side->runs;
}

static enum moe_pulse_thread state_of(void *ctx)
{
    const struct world *w = ctx;
    return w->state;
}

/* One turn of the clock. True when the judge says that the peer has stopped. */
static bool turn(struct world *w)
{
    bool scheduled = pass_turn(w, &w->peer, 500), beats = scheduled && w->state == MOE_PULSE_RUNS;
    w->beat += beats ? 1 : 0;
    w->silence = beats ? 0 : w->silence + 1;
    w->longest = w->silence > w->longest ? w->silence : w->longest;
    return pass_turn(w, &w->judge, 100) && moe_pulse_judge(&w->seen, w->beat, state_of, w);
}

static struct world new_world(uint64_t seed)
{
    return (struct world){.rng = {seed}, .state = MOE_PULSE_RUNS, .beat = 1};
}

static void a_peer_without_a_processor_is_not_judged(void **state)
{
    (void)state;
    uint64_t seed = choose_seed();
    uint32_t longest = 0;
    for (uint32_t n = 0; n < WORLDS; n++) {
        struct world w = new_world(seed + n);
        for (uint32_t t = 0; t < TURNS; t++)
            assert_false(turn(&w));
        longest = w.longest > longest ? w.longest : longest;
    }
    print_message("  longest silence: %u turns\n", longest);
    assert_true(longest > 2 * MOE_PULSE_ASLEEP_TURNS);
}

/* Turns of the judge from the fault until it says so. */
static uint32_t turns_until_judged(struct world *w)
{
    for (uint32_t turns = 1; turns < TURNS; turns++)
        if (moe_pulse_judge(&w->seen, w->beat, state_of, w))
            return turns;
    fail_msg("the fault was not seen");
    return 0;
}

static void a_fault_is_found_within_its_turns(void **state)
{
    (void)state;
    static const struct {
        enum moe_pulse_thread fault;
        uint32_t turns;
    } cases[] = {{MOE_PULSE_STOPPED, MOE_PULSE_SUSPECT_TURNS},
                 {MOE_PULSE_GONE, MOE_PULSE_SUSPECT_TURNS},
                 {MOE_PULSE_SLEEPS, MOE_PULSE_ASLEEP_TURNS}};
    uint64_t seed = choose_seed();
    for (uint32_t n = 0; n < WORLDS; n++) {
        struct world w = new_world(seed + n);
        for (uint32_t t = rng_below(&w.rng, TURNS); t > 0; t--)
            assert_false(turn(&w));
        w.state = cases[n % 3].fault;
        assert_true(turns_until_judged(&w) <= cases[n % 3].turns + 1);
        for (uint32_t t = 0; t < 200; t++) /* said once */
            assert_false(turn(&w));
    }
}

/* Two stop one after the other: when the first is found, the second is looked at, too. */
static void one_that_is_silent_for_less_is_judged_with_another(void **state)
{
    (void)state;
    struct world w = new_world(1);
    assert_false(moe_pulse_judge(&w.seen, w.beat, state_of, &w));
    w.state = MOE_PULSE_STOPPED;
    assert_false(moe_pulse_judge_too(&w.seen, state_of, &w)); /* it has just beaten */
    assert_false(moe_pulse_judge(&w.seen, w.beat, state_of, &w));
    w.state = MOE_PULSE_STOPPED;
    assert_false(moe_pulse_judge_too(&w.seen, state_of, &w)); /* one turn is jitter */
    assert_false(moe_pulse_judge(&w.seen, w.beat, state_of, &w));
    w.state = MOE_PULSE_RUNS;
    assert_false(moe_pulse_judge_too(&w.seen, state_of, &w));
    w.state = MOE_PULSE_SLEEPS;
    assert_false(moe_pulse_judge_too(&w.seen, state_of, &w));
    w.state = MOE_PULSE_STOPPED;
    assert_true(moe_pulse_judge_too(&w.seen, state_of, &w));
    assert_false(moe_pulse_judge_too(&w.seen, state_of, &w)); /* said once */
}

static void a_peer_that_has_left_is_not_judged(void **state)
{
    (void)state;
    struct world w = new_world(1);
    w.state = MOE_PULSE_GONE;
    w.beat = MOE_SHM_BEAT_ENDED;
    for (uint32_t t = 0; t < TURNS; t++)
        assert_false(moe_pulse_judge(&w.seen, w.beat, state_of, &w));
}

/* ------------------------------------------------------------------------ processes */

struct loss {
    _Atomic uint64_t epoch;
    _Atomic uint64_t slots;
    atomic_uint calls;
};

static void note(void *ctx, uint64_t epoch, uint64_t slots, const char *why)
{
    struct loss *v = ctx;
    print_message("  slots %llx of epoch %llu: %s\n", (unsigned long long)slots,
                  (unsigned long long)epoch, why);
    atomic_store(&v->epoch, epoch);
    atomic_store(&v->slots, slots);
    atomic_fetch_add(&v->calls, 1);
}

/* A peer that beats until it is killed. */
static _Noreturn void beat_forever(int to)
{
    struct moe_eventcount *eventcount;
    struct moe_shm_reader *reader;
    struct moe_pulse *pulse;
    struct loss none = {0};
    assert_ok(moe_eventcount_create(&eventcount));
    assert_ok(moe_shm_reader_create(eventcount, &reader));
    assert_ok(moe_pulse_create(note, NULL, &none, &pulse));
    moe_pulse_begin(pulse, 7, reader);
    struct moe_shm_address address = moe_shm_reader_address(reader);
    if (write(to, &address, sizeof address) != (ssize_t)sizeof address)
        _exit(1);
    for (;;)
        pause();
}

struct pair {
    pid_t child;
    struct moe_eventcount *eventcount;
    struct moe_shm_reader *own;
    struct moe_shm_writer *writer;
    struct moe_pulse *pulse;
    struct loss loss;
};

static void start_pair(struct pair *p)
{
    int ends[2];
    struct moe_shm_address address;
    assert_int_equal(pipe(ends), 0);
    p->child = fork();
    if (p->child == 0)
        beat_forever(ends[1]);
    assert_int_equal(read(ends[0], &address, sizeof address), sizeof address);
    close(ends[0]);
    close(ends[1]);
    assert_ok(moe_eventcount_create(&p->eventcount));
    assert_ok(moe_shm_reader_create(p->eventcount, &p->own));
    assert_ok(moe_shm_writer_open(&address, 3, &p->writer));
    assert_ok(moe_pulse_create(note, NULL, &p->loss, &p->pulse));
    moe_pulse_begin(p->pulse, 7, p->own);
    moe_pulse_watch(p->pulse, 5, p->writer);
}

static void end_pair(struct pair *p)
{
    moe_pulse_end(p->pulse);
    moe_pulse_destroy(p->pulse);
    moe_shm_writer_close(p->writer);
    moe_shm_reader_destroy(p->own);
    moe_eventcount_destroy(p->eventcount);
    kill(p->child, SIGKILL);
    assert_int_equal(waitpid(p->child, NULL, 0), p->child);
}

static void await_beats(const struct pair *p, uint32_t more)
{
    uint32_t first = moe_shm_writer_beat(p->writer);
    for (uint32_t ms = 0; moe_shm_writer_beat(p->writer) - first < more; ms++) {
        assert_true(ms < LONG_MS);
        usleep(1000);
    }
}

static void await_loss(const struct pair *p)
{
    for (uint32_t ms = 0; atomic_load(&p->loss.calls) == 0; ms++) {
        assert_true(ms < LONG_MS);
        usleep(1000);
    }
    assert_int_equal(atomic_load(&p->loss.epoch), 7);
    assert_int_equal(atomic_load(&p->loss.slots), 1 << 5);
}

static void a_stopped_process_is_found(void **state)
{
    (void)state;
    struct pair p = {0};
    start_pair(&p);
    await_beats(&p, 20);
    assert_int_equal(atomic_load(&p.loss.calls), 0);
    uint64_t begun = moe_clock_ns();
    assert_int_equal(kill(p.child, SIGSTOP), 0);
    await_loss(&p);
    print_message("  after %.0f ms\n", (double)(moe_clock_ns() - begun) / 1e6);
    assert_int_equal(kill(p.child, SIGCONT), 0);
    await_beats(&p, 20);
    assert_int_equal(atomic_load(&p.loss.calls), 1);
    end_pair(&p);
}

static void a_dead_process_is_found(void **state)
{
    (void)state;
    struct pair p = {0};
    start_pair(&p);
    await_beats(&p, 5);
    assert_int_equal(kill(p.child, SIGKILL), 0);
    await_loss(&p);
    end_pair(&p);
}

/* Nothing is read from memory after the view, also if the peer then stops. */
static void the_end_of_a_view_ends_the_watch(void **state)
{
    (void)state;
    struct pair p = {0};
    start_pair(&p);
    await_beats(&p, 5);
    moe_pulse_end(p.pulse);
    assert_int_equal(kill(p.child, SIGSTOP), 0);
    usleep(20 * MOE_PULSE_SUSPECT_TURNS * MOE_PULSE_TURN_MS * 100);
    assert_int_equal(atomic_load(&p.loss.calls), 0);
    end_pair(&p);
}

static void the_kernel_tells_threads_apart(void **state)
{
    (void)state;
    uint32_t own = (uint32_t)getpid();
    assert_int_equal(moe_pulse_look(own, (uint32_t)gettid()), MOE_PULSE_RUNS);
    assert_int_equal(moe_pulse_look(own, UINT32_MAX), MOE_PULSE_GONE);
    pid_t child = fork();
    if (child == 0)
        for (;;)
            pause();
    while (moe_pulse_look((uint32_t)child, (uint32_t)child) == MOE_PULSE_RUNS)
        usleep(1000);
    assert_int_equal(moe_pulse_look((uint32_t)child, (uint32_t)child), MOE_PULSE_SLEEPS);
    kill(child, SIGSTOP);
    assert_int_equal(waitpid(child, NULL, WUNTRACED), child);
    assert_int_equal(moe_pulse_look((uint32_t)child, (uint32_t)child), MOE_PULSE_STOPPED);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_int_equal(moe_pulse_look((uint32_t)child, (uint32_t)child), MOE_PULSE_GONE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_peer_without_a_processor_is_not_judged),
        cmocka_unit_test(a_fault_is_found_within_its_turns),
        cmocka_unit_test(one_that_is_silent_for_less_is_judged_with_another),
        cmocka_unit_test(a_peer_that_has_left_is_not_judged),
        cmocka_unit_test(the_kernel_tells_threads_apart),
        cmocka_unit_test(a_stopped_process_is_found),
        cmocka_unit_test(a_dead_process_is_found),
        cmocka_unit_test(the_end_of_a_view_ends_the_watch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
