/* Promises of the sequencer: a few plain cases, then seeded simulations of a whole group whose
 * slots announce and report in random order. */
#include "base/size.h"
#include "support/check.h"
#include "support/random.h"
#include "worker/sequencer.h"

static const struct moe_sequencer_key key_a = {3, MOE_STEP_FORWARD, MOE_DTYPE_F32};
static const struct moe_sequencer_key key_b = {3, MOE_STEP_FORWARD, MOE_DTYPE_BF16};

static struct moe_sequencer *begin(uint64_t live, uint32_t max_bucket)
{
    struct moe_sequencer *s;
    struct moe_status st = moe_sequencer_create(&s);
    assert_int_equal(st.code, MOE_OK);
    moe_sequencer_begin(s, 7, live, max_bucket);
    return s;
}

static void work(struct moe_sequencer *s, uint32_t slot, const struct moe_sequencer_key *key,
                 uint32_t tokens)
{
    struct moe_status st = moe_sequencer_work(s, slot, key, tokens);
    assert_int_equal(st.code, MOE_OK);
}

static void done(struct moe_sequencer *s, uint32_t slot, uint64_t seq)
{
    struct moe_status st = moe_sequencer_done(s, slot, seq, true);
    assert_int_equal(st.code, MOE_OK);
}

static void nothing_is_ordered_without_work(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x3, 64);
    struct moe_ticket t;
    assert_false(moe_sequencer_next(s, &t));
    work(s, 0, &key_a, 0);
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_destroy(s);
}

static void work_that_comes_while_two_steps_run_shares_the_next(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x3, 64);
    struct moe_ticket t;
    for (uint64_t seq = 1; seq <= 2; seq++) {
        work(s, 1, &key_a, 5);
        assert_true(moe_sequencer_next(s, &t));
        assert_int_equal(t.epoch, 7);
        assert_int_equal(t.seq, seq);
        assert_int_equal(t.layer, 3);
        assert_int_equal(t.bucket, 8);
    }
    for (int i = 0; i < 10; i++) {
        work(s, (uint32_t)i % 2, &key_a, 3);
        assert_false(moe_sequencer_next(s, &t));
    }
    done(s, 0, 1);
    assert_false(moe_sequencer_next(s, &t)); /* slot 1 still runs it */
    done(s, 1, 1);
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.seq, 3);
    assert_int_equal(t.bucket, 16); /* 15 on either slot */
    assert_int_equal(moe_sequencer_pending(s), 0);
    moe_sequencer_destroy(s);
}

static void more_than_the_largest_bucket_is_split_over_steps(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x1, 16);
    static const uint32_t want[] = {16, 16, 16, 2};
    struct moe_ticket t;
    work(s, 0, &key_a, 50);
    for (uint64_t seq = 1; seq <= 4; seq++) {
        assert_true(moe_sequencer_next(s, &t));
        assert_int_equal(t.bucket, want[seq - 1]);
        done(s, 0, seq);
    }
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_destroy(s);
}

static void kinds_of_work_take_turns(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x1, 4);
    struct moe_ticket t;
    work(s, 0, &key_a, 40);
    work(s, 0, &key_b, 8);
    enum moe_dtype want[] = {MOE_DTYPE_F32,  MOE_DTYPE_BF16, MOE_DTYPE_F32,
                             MOE_DTYPE_BF16, MOE_DTYPE_F32,  MOE_DTYPE_F32};
    for (uint64_t seq = 1; seq <= 6; seq++) {
        assert_true(moe_sequencer_next(s, &t));
        assert_int_equal(t.dtype, want[seq - 1]);
        done(s, 0, seq);
    }
    moe_sequencer_destroy(s);
}

static void a_failed_step_stops_everything_until_the_next_view(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x3, 64);
    struct moe_ticket t;
    work(s, 0, &key_a, 1);
    assert_true(moe_sequencer_next(s, &t));
    work(s, 0, &key_a, 1);
    struct moe_status st = moe_sequencer_done(s, 1, 1, false);
    assert_int_equal(st.code, MOE_OK);
    assert_true(moe_sequencer_stopped(s));
    done(s, 0, 1);
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_begin(s, 8, 0x1, 64);
    assert_false(moe_sequencer_next(s, &t)); /* what waited is announced again by its slot */
    work(s, 0, &key_a, 1);
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.epoch, 8);
    assert_int_equal(t.seq, 1);
    moe_sequencer_destroy(s);
}

static void what_makes_no_sense_is_refused(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x5, 64);
    struct moe_ticket t;
    struct moe_sequencer_key odd = {0, (enum moe_step_kind)9, MOE_DTYPE_F32};
    struct moe_status st = moe_sequencer_work(s, 1, &key_a, 1); /* not live */
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = moe_sequencer_work(s, 99, &key_a, 1);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = moe_sequencer_work(s, 0, &odd, 1);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = moe_sequencer_done(s, 0, 1, true); /* never issued */
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    work(s, 0, &key_a, 1);
    assert_true(moe_sequencer_next(s, &t));
    st = moe_sequencer_done(s, 0, 2, true); /* out of order */
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    done(s, 0, 1);
    st = moe_sequencer_done(s, 0, 1, true); /* twice */
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    for (uint32_t i = 0; i < MOE_SEQUENCER_KEYS; i++) {
        struct moe_sequencer_key key = {i + 10, MOE_STEP_FORWARD, MOE_DTYPE_F32};
        st = moe_sequencer_work(s, 0, &key, 1);
    }
    assert_int_equal(st.code, MOE_RESOURCE_EXHAUSTED); /* key_a was one of them */
    moe_sequencer_destroy(s);
}

/* -------------------------------------------------------------------- simulation */

enum { KEYS = 6, RUNS = 300, EVENTS = 400 };

struct sim {
    struct moe_sequencer *s;
    struct rng random;
    uint32_t slots[MOE_MAX_SLOTS], slot_count, max_bucket;
    uint64_t pending[KEYS][MOE_MAX_SLOTS]; /* announced, not covered; what the slots believe */
    uint64_t waited[KEYS];                 /* tickets of other keys since this one has waited */
    uint64_t done[MOE_MAX_SLOTS], issued;
};

static struct moe_sequencer_key key_of(uint32_t k)
{
    return (struct moe_sequencer_key){k / 2, MOE_STEP_FORWARD,
                                      k % 2 == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16};
}

static uint64_t in_flight(const struct sim *m)
{
    uint64_t least = m->issued;
    for (uint32_t i = 0; i < m->slot_count; i++)
        least = m->done[m->slots[i]] < least ? m->done[m->slots[i]] : least;
    return m->issued - least;
}

static uint64_t waiting_keys(const struct sim *m)
{
    uint64_t count = 0;
    for (uint32_t k = 0; k < KEYS; k++) {
        uint64_t sum = 0;
        for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
            sum += m->pending[k][s];
        count += sum != 0;
    }
    return count;
}

static void check_ticket(struct sim *m, const struct moe_ticket *t)
{
    assert_int_equal(t->seq, m->issued + 1);
    assert_true(moe_pow2_ceil(t->bucket) == t->bucket && t->bucket <= m->max_bucket);
    uint32_t chosen = t->layer * 2 + (t->dtype == MOE_DTYPE_BF16);
    uint64_t most = 0;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        most = m->pending[chosen][s] > most ? m->pending[chosen][s] : most;
    assert_true(most > 0); /* no ticket without work */
    uint64_t fits = most < m->max_bucket ? most : m->max_bucket;
    assert_true(t->bucket >= fits);
    assert_true(t->bucket == 1 || t->bucket / 2 < fits); /* and no larger than it must be */
    for (uint32_t k = 0; k < KEYS; k++)
        if (k != chosen)
            m->waited[k]++;
    assert_true(m->waited[chosen] <= KEYS); /* nobody starves */
    m->waited[chosen] = 0;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        m->pending[chosen][s] -=
            m->pending[chosen][s] < t->bucket ? m->pending[chosen][s] : t->bucket;
}

static void collect_tickets(struct sim *m)
{
    struct moe_ticket t;
    while (moe_sequencer_next(m->s, &t)) {
        assert_true(in_flight(m) < MOE_SEQUENCER_IN_FLIGHT);
        check_ticket(m, &t);
        m->issued++;
    }
    /* Nothing that could run is held back. */
    assert_true(in_flight(m) == MOE_SEQUENCER_IN_FLIGHT || waiting_keys(m) == 0);
}

static void announce_something(struct sim *m)
{
    uint32_t k = rng_below(&m->random, KEYS);
    uint32_t slot = m->slots[rng_below(&m->random, m->slot_count)];
    uint32_t tokens = rng_below(&m->random, rng_below(&m->random, 8) == 0 ? 200 : 10);
    struct moe_sequencer_key key = key_of(k);
    uint64_t before = 0;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        before += m->pending[k][s];
    if (before == 0)
        m->waited[k] = 0;
    m->pending[k][slot] += tokens;
    work(m->s, slot, &key, tokens);
}

static void report_something(struct sim *m)
{
    uint32_t slot = m->slots[rng_below(&m->random, m->slot_count)];
    if (m->done[slot] < m->issued)
        done(m->s, slot, ++m->done[slot]);
}

static void run_simulation(struct sim *m, uint64_t seed)
{
    m->random.state = seed;
    m->slot_count = 0;
    uint64_t live = 0;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if (rng_below(&m->random, 4) == 0 || (s == MOE_MAX_SLOTS - 1 && m->slot_count == 0)) {
            m->slots[m->slot_count++] = s;
            live |= UINT64_C(1) << s;
        }
    m->max_bucket = UINT32_C(1) << rng_below(&m->random, 7);
    m->s = begin(live, m->max_bucket);
    for (int i = 0; i < EVENTS; i++) {
        if (rng_below(&m->random, 3) == 0)
            announce_something(m);
        else
            report_something(m);
        collect_tickets(m);
    }
    /* Whatever was announced is covered once the slots go on reporting. */
    while (in_flight(m) > 0) {
        report_something(m);
        collect_tickets(m);
    }
    assert_int_equal(moe_sequencer_pending(m->s), 0);
    assert_int_equal(waiting_keys(m), 0);
    moe_sequencer_destroy(m->s);
}

static void every_announced_token_is_covered_in_turn_by_two_steps_at_most(void **state)
{
    (void)state;
    uint64_t seed = choose_seed();
    uint64_t tickets = 0;
    for (uint64_t run = 0; run < RUNS; run++) {
        struct sim m = {0};
        run_simulation(&m, seed + run);
        tickets += m.issued;
    }
    print_message("%d schedules, %llu tickets\n", RUNS, (unsigned long long)tickets);
    assert_true(tickets > RUNS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_ordered_without_work),
        cmocka_unit_test(work_that_comes_while_two_steps_run_shares_the_next),
        cmocka_unit_test(more_than_the_largest_bucket_is_split_over_steps),
        cmocka_unit_test(kinds_of_work_take_turns),
        cmocka_unit_test(a_failed_step_stops_everything_until_the_next_view),
        cmocka_unit_test(what_makes_no_sense_is_refused),
        cmocka_unit_test(every_announced_token_is_covered_in_turn_by_two_steps_at_most),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
