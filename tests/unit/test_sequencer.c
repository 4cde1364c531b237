/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the sequencer: a few single cases, then seeded simulations of a group with slots that
 * announce and report in random order. */
#include "base/size.h"
#include "schedule/sequencer.h"
#include "support/check.h"
#include "support/random.h"

#include <stdlib.h>
#include <string.h>

static const struct moe_step_key key_a = {3, MOE_STEP_FORWARD, MOE_DTYPE_F32};
static const struct moe_step_key key_b = {3, MOE_STEP_FORWARD, MOE_DTYPE_BF16};

static struct moe_sequencer *begin(uint64_t live, uint32_t max_bucket)
{
    struct moe_sequencer *s;
    struct moe_status st = moe_sequencer_create(&s);
    assert_int_equal(st.code, MOE_OK);
    moe_sequencer_begin(s, 7, live, max_bucket);
    return s;
}

static void work(struct moe_sequencer *s, uint32_t slot, const struct moe_step_key *key,
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

static void no_ticket_is_issued_without_work(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x3, 64);
    struct moe_ticket t;
    assert_false(moe_sequencer_next(s, &t));
    work(s, 0, &key_a, 0);
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_destroy(s);
}

/* A group that is idle shows that all slots answer. */
static void a_heartbeat_comes_when_nothing_else_does(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x3, 64);
    struct moe_ticket t;
    moe_sequencer_beat(s, 3);
    moe_sequencer_allow(s, false, true); /* no lease */
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_allow(s, true, true);
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.kind, MOE_STEP_HEARTBEAT);
    assert_int_equal(t.layer, 3);
    assert_int_equal(t.seq, 1);
    assert_int_equal(t.bucket, 1);
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_beat(s, 3);
    done(s, 0, 1);
    assert_false(moe_sequencer_next(s, &t)); /* slot 1 has not answered the first */
    work(s, 1, &key_a, 5);
    assert_true(moe_sequencer_next(s, &t)); /* shows as much */
    assert_int_equal(t.kind, MOE_STEP_FORWARD);
    done(s, 0, 2);
    done(s, 1, 1);
    done(s, 1, 2);
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_beat(s, 3);
    moe_sequencer_begin(s, 8, 0x3, 64);
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

/* Windows of GPUs have room for half as many tokens in F32. */
static void a_limit_of_f32_holds_for_f32_alone_and_for_one_view(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x1, 16);
    struct moe_ticket t;
    moe_sequencer_limit_f32(s, 8);
    work(s, 0, &key_a, 20);
    work(s, 0, &key_b, 20);
    static const uint32_t want[] = {8, 16, 8, 4, 4};
    for (uint64_t seq = 1; seq <= 5; seq++) {
        assert_true(moe_sequencer_next(s, &t));
        assert_int_equal(t.dtype, seq % 2 == 1 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16);
        assert_int_equal(t.bucket, want[seq - 1]);
        done(s, 0, seq);
    }
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_begin(s, 8, 0x1, 16);
    work(s, 0, &key_a, 20);
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.bucket, 16);
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
    assert_false(moe_sequencer_next(s, &t));
    done(s, 0, 1);
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_begin(s, 8, 0x1, 64);
    assert_false(moe_sequencer_next(s, &t)); /* its slot announces waiting work again */
    work(s, 0, &key_a, 1);
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.epoch, 8);
    assert_int_equal(t.seq, 1);
    moe_sequencer_destroy(s);
}

static void nonsense_is_refused(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x5, 64);
    struct moe_ticket t;
    struct moe_step_key odd = {0, (enum moe_step_kind)9, MOE_DTYPE_F32};
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
        struct moe_step_key key = {i + 10, MOE_STEP_FORWARD, MOE_DTYPE_F32};
        st = moe_sequencer_work(s, 0, &key, 1);
    }
    assert_int_equal(st.code, MOE_RESOURCE_EXHAUSTED); /* key_a was one of them */
    moe_sequencer_destroy(s);
}

/* ------------------------------------------------------------------------ models */

static void change(struct moe_sequencer *s, uint32_t model, bool serve)
{
    struct moe_status st = moe_sequencer_change_model(s, model, serve);
    assert_int_equal(st.code, MOE_OK);
}

static void expect_ticket(struct moe_sequencer *s, enum moe_step_kind kind, uint32_t layer)
{
    struct moe_ticket t;
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.kind, kind);
    assert_int_equal(t.layer, layer);
    done(s, 0, t.seq);
}

static void a_model_has_tickets_between_its_first_and_its_last(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x1, 64);
    struct moe_ticket t;
    const struct moe_step_key key = {moe_layer_key(9, 3), MOE_STEP_FORWARD, MOE_DTYPE_F32};
    work(s, 0, &key, 5); /* too early: the model is not served */
    assert_int_equal(moe_sequencer_pending(s), 0);
    change(s, 9, false); /* it is not served already */
    assert_false(moe_sequencer_next(s, &t));
    work(s, 0, &key_a, 5);
    change(s, 9, true);
    change(s, 9, true);
    expect_ticket(s, MOE_STEP_ADD_MODEL, moe_layer_key(9, 0)); /* before other work */
    expect_ticket(s, MOE_STEP_FORWARD, 3);
    work(s, 0, &key, 5);
    expect_ticket(s, MOE_STEP_FORWARD, key.layer);
    work(s, 0, &key, 70);
    work(s, 0, &key_a, 1);
    change(s, 9, false);
    expect_ticket(s, MOE_STEP_REMOVE_MODEL, moe_layer_key(9, 0));
    assert_int_equal(moe_sequencer_pending(s), 1); /* its work is dropped */
    work(s, 0, &key, 5);
    expect_ticket(s, MOE_STEP_FORWARD, 3);
    assert_false(moe_sequencer_next(s, &t));
    change(s, 9, true);
    expect_ticket(s, MOE_STEP_ADD_MODEL, moe_layer_key(9, 0));
    moe_sequencer_begin(s, 8, 0x1, 64); /* a view begins with the default model alone */
    work(s, 0, &key, 5);
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_destroy(s);
}

static void a_placement_is_swapped_in_once_and_before_other_work(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x1, 64);
    struct moe_ticket t;
    work(s, 0, &key_a, 5);
    change(s, 9, true);
    moe_sequencer_swap_placement(s, 4);
    moe_sequencer_swap_placement(s, 4); /* orders may be repeated */
    moe_sequencer_swap_placement(s, 3);
    expect_ticket(s, MOE_STEP_SWAP_PLACEMENT, 4);
    moe_sequencer_swap_placement(s, 4); /* by a slot that has not run the ticket yet */
    expect_ticket(s, MOE_STEP_ADD_MODEL, moe_layer_key(9, 0));
    expect_ticket(s, MOE_STEP_FORWARD, 3);
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_swap_placement(s, 5);
    moe_sequencer_begin(s, 8, 0x1, 64); /* the next view forms with it */
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_destroy(s);
}

static void impossible_models_are_refused(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x1, 64);
    assert_refused(moe_sequencer_change_model(s, 0, true), MOE_INVALID_ARGUMENT, MOE_REASON_NONE);
    assert_refused(moe_sequencer_change_model(s, MOE_MODEL_NUMBER_MAX + 1, true),
                   MOE_INVALID_ARGUMENT, MOE_REASON_NONE);
    for (uint32_t i = 1; i <= MOE_ADDED_MODELS_MAX; i++)
        change(s, i, true);
    assert_refused(moe_sequencer_change_model(s, 77, true), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_TOO_LARGE);
    const struct moe_ticket call = {.layer = moe_layer_key(1, 3), .kind = MOE_STEP_ZERO_GRAD};
    assert_refused(moe_sequencer_call(s, 0, &call, 0), MOE_INVALID_ARGUMENT, MOE_REASON_NONE);
    moe_sequencer_destroy(s);
}

/* -------------------------------------------------------------------- simulation */

enum { MODELS = 3, KEYS_EACH = 4, KEYS = MODELS * KEYS_EACH, RUNS = 300, EVENTS = 400 };

struct sim {
    struct moe_sequencer *s;
    struct rng random;
    uint32_t slots[MOE_MAX_SLOTS], slot_count, max_bucket, max_bucket_f32;
    uint64_t pending[KEYS][MOE_MAX_SLOTS]; /* announced, not covered; from the slots' view */
    uint64_t waited[KEYS];                 /* tickets of other keys since this one has waited */
    uint64_t done[MOE_MAX_SLOTS], issued;
    bool served[MODELS];                                   /* by the tickets issued so far */
    uint32_t changes[MOE_SEQUENCER_CHANGES], change_count; /* models that wait for a ticket */
    uint64_t model_tickets;
};

static struct moe_step_key key_of(uint32_t k)
{
    return (struct moe_step_key){moe_layer_key(k / KEYS_EACH, k % KEYS_EACH / 2), MOE_STEP_FORWARD,
                                 k % 2 == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16};
}

/* The work of a model that is removed goes with it. */
static void check_model_ticket(struct sim *m, const struct moe_ticket *t)
{
    uint32_t model = moe_layer_model(t->layer);
    assert_true(m->change_count > 0 && m->changes[0] == model);
    memmove(m->changes, m->changes + 1, --m->change_count * sizeof *m->changes);
    assert_int_equal(t->kind, m->served[model] ? MOE_STEP_REMOVE_MODEL : MOE_STEP_ADD_MODEL);
    m->served[model] = !m->served[model];
    if (!m->served[model])
        memset(m->pending[model * KEYS_EACH], 0, KEYS_EACH * sizeof m->pending[0]);
    m->model_tickets++;
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
    if (moe_step_traits(t->kind)->changes_models) {
        check_model_ticket(m, t);
        return;
    }
    assert_int_equal(m->change_count, 0); /* changes come first */
    assert_true(m->served[moe_layer_model(t->layer)]);
    const uint32_t limit = t->dtype == MOE_DTYPE_F32 ? m->max_bucket_f32 : m->max_bucket;
    assert_true(moe_pow2_ceil(t->bucket) == t->bucket && t->bucket <= limit);
    uint32_t chosen = moe_layer_model(t->layer) * KEYS_EACH + moe_layer_index(t->layer) * 2 +
                      (t->dtype == MOE_DTYPE_BF16);
    uint64_t most = 0;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        most = m->pending[chosen][s] > most ? m->pending[chosen][s] : most;
    assert_true(most > 0); /* no ticket without work */
    uint64_t fits = most < limit ? most : limit;
    assert_true(t->bucket >= fits);
    assert_true(t->bucket == 1 || t->bucket / 2 < fits); /* and no larger than necessary */
    for (uint32_t k = 0; k < KEYS; k++)
        if (k != chosen)
            m->waited[k]++;
    assert_true(m->waited[chosen] <= KEYS); /* no key starves */
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
    /* No runnable work is delayed. */
    assert_true(in_flight(m) == MOE_SEQUENCER_IN_FLIGHT || waiting_keys(m) == 0);
}

static void announce_something(struct sim *m)
{
    uint32_t k = rng_below(&m->random, KEYS);
    uint32_t slot = m->slots[rng_below(&m->random, m->slot_count)];
    uint32_t tokens = rng_below(&m->random, rng_below(&m->random, 8) == 0 ? 200 : 10);
    struct moe_step_key key = key_of(k);
    uint64_t before = 0;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        before += m->pending[k][s];
    if (before == 0)
        m->waited[k] = 0;
    if (m->served[k / KEYS_EACH])
        m->pending[k][slot] += tokens;
    work(m->s, slot, &key, tokens);
}

/* Toggles a model, unless it has a change that waits. */
static void change_something(struct sim *m)
{
    uint32_t model = 1 + rng_below(&m->random, MODELS - 1);
    for (uint32_t i = 0; i < m->change_count; i++)
        if (m->changes[i] == model)
            return;
    m->changes[m->change_count++] = model;
    change(m->s, model, !m->served[model]);
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
    m->served[0] = true;
    uint64_t live = 0;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if (rng_below(&m->random, 4) == 0 || (s == MOE_MAX_SLOTS - 1 && m->slot_count == 0)) {
            m->slots[m->slot_count++] = s;
            live |= UINT64_C(1) << s;
        }
    m->max_bucket = UINT32_C(1) << rng_below(&m->random, 7);
    m->max_bucket_f32 = m->max_bucket > 1 ? m->max_bucket >> rng_below(&m->random, 2) : 1;
    m->s = begin(live, m->max_bucket);
    moe_sequencer_limit_f32(m->s, m->max_bucket_f32);
    for (int i = 0; i < EVENTS; i++) {
        if (rng_below(&m->random, 24) == 0)
            change_something(m);
        else if (rng_below(&m->random, 3) == 0)
            announce_something(m);
        else
            report_something(m);
        collect_tickets(m);
    }
    /* All announced work is covered once the slots go on reporting. */
    while (in_flight(m) > 0) {
        report_something(m);
        collect_tickets(m);
    }
    assert_int_equal(moe_sequencer_pending(m->s), 0);
    assert_int_equal(waiting_keys(m), 0);
    moe_sequencer_destroy(m->s);
}

static void every_announced_token_is_covered_with_two_steps_in_flight_at_most(void **state)
{
    (void)state;
    uint64_t seed = choose_seed();
    uint64_t tickets = 0, changes = 0;
    for (uint64_t run = 0; run < RUNS; run++) {
        struct sim m = {0};
        run_simulation(&m, seed + run);
        tickets += m.issued;
        changes += m.model_tickets;
    }
    print_message("%d schedules, %llu tickets, %llu of them change models\n", RUNS,
                  (unsigned long long)tickets, (unsigned long long)changes);
    assert_true(tickets > RUNS && changes > RUNS);
}

/* ---------------------------------------------------------------------- training */

static void call(struct moe_sequencer *s, uint32_t slot, enum moe_step_kind kind, uint64_t number,
                 uint32_t tokens)
{
    struct moe_ticket t = {.layer = 3, .kind = kind, .dtype = MOE_DTYPE_F32};
    t.descriptor.number = number;
    t.descriptor.length = 4;
    memcpy(t.descriptor.body, "body", 4);
    struct moe_status st = moe_sequencer_call(s, slot, &t, tokens);
    assert_int_equal(st.code, MOE_OK);
}

static void a_training_call_gets_a_separate_ticket_with_its_body(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x3, 64);
    struct moe_ticket t;
    call(s, 1, MOE_STEP_BACKWARD, 9, 33);
    call(s, 0, MOE_STEP_BACKWARD, 4, 1);
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.kind, MOE_STEP_BACKWARD);
    assert_int_equal(t.bucket, 64);
    assert_int_equal(t.descriptor.origin, 1);
    assert_int_equal(t.descriptor.number, 9);
    assert_int_equal(t.descriptor.length, 4);
    assert_memory_equal(t.descriptor.body, "body", 4);
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.descriptor.origin, 0);
    assert_int_equal(t.bucket, 1);
    moe_sequencer_destroy(s);
}

/* Its batch must be its Backward's, so work of other slots goes into other steps. */
static void a_retained_forward_shares_no_ticket(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x3, 512);
    struct moe_ticket t;
    work(s, 0, &key_a, 7);
    call(s, 1, MOE_STEP_FORWARD_RETAIN, 1, 300); /* of the same layer and dtype */
    call(s, 0, MOE_STEP_FORWARD_RETAIN, 1, 256);
    call(s, 1, MOE_STEP_BACKWARD, 2, 300);
    work(s, 1, &key_a, 3);
    assert_true(moe_sequencer_next(s, &t)); /* training has no credit */
    assert_int_equal(t.kind, MOE_STEP_FORWARD);
    assert_int_equal(t.bucket, 8);
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.kind, MOE_STEP_FORWARD_RETAIN);
    assert_int_equal(t.bucket, 512);
    assert_int_equal(t.descriptor.origin, 1);
    assert_int_equal(t.descriptor.number, 1);
    assert_memory_equal(t.descriptor.body, "body", 4);
    work(s, 0, &key_a, 5);
    for (uint32_t slot = 0; slot < 2; slot++)
        for (uint64_t seq = 1; seq <= 2; seq++)
            done(s, slot, seq);
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.kind, MOE_STEP_FORWARD_RETAIN);
    assert_int_equal(t.descriptor.origin, 0);
    assert_true(moe_sequencer_next(s, &t)); /* training has had its share */
    assert_int_equal(t.kind, MOE_STEP_FORWARD);
    for (uint32_t slot = 0; slot < 2; slot++)
        done(s, slot, 3);
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.kind, MOE_STEP_BACKWARD);
    for (uint32_t slot = 0; slot < 2; slot++)
        done(s, slot, 4);
    /* With forward work, two of them are not in flight at the same time. */
    call(s, 1, MOE_STEP_FORWARD_RETAIN, 3, 300);
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_destroy(s);
}

static void impossible_training_calls_are_refused(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x1, 64);
    struct moe_ticket t = {.kind = MOE_STEP_BACKWARD, .dtype = MOE_DTYPE_F32};
    struct moe_status st = moe_sequencer_call(s, 0, &t, 65);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = moe_sequencer_call(s, 0, &t, 0);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = moe_sequencer_call(s, 1, &t, 1);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    t.descriptor.length = MOE_TRAINING_BODY_MAX + 1;
    st = moe_sequencer_call(s, 0, &t, 1);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    t.descriptor.length = 0;
    t.kind = MOE_STEP_FORWARD;
    st = moe_sequencer_call(s, 0, &t, 1);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    t.kind = MOE_STEP_KINDS;
    st = moe_sequencer_call(s, 0, &t, 1);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    t.kind = MOE_STEP_FORWARD_RETAIN;
    st = moe_sequencer_call(s, 0, &t, 0);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = moe_sequencer_call(s, 0, &t, 65);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    const struct moe_step_key retained = {3, MOE_STEP_FORWARD_RETAIN, MOE_DTYPE_F32};
    st = moe_sequencer_work(s, 0, &retained, 1); /* only as a call */
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    for (uint64_t i = 0; i < MOE_SEQUENCER_CALLS; i++)
        call(s, 0, MOE_STEP_OPTIMIZER, i + 1, 0);
    t.kind = MOE_STEP_BACKWARD;
    st = moe_sequencer_call(s, 0, &t, 1);
    assert_int_equal(st.code, MOE_RESOURCE_EXHAUSTED);
    moe_sequencer_destroy(s);
}

/* Forward work without end competes with training without end, on every slot. */
struct contest {
    struct moe_sequencer *s;
    struct rng random;
    uint32_t slots, permille;
    uint64_t issued, done[MOE_MAX_SLOTS];
    uint64_t forward, training; /* tickets while both waited */
    uint64_t since_training;    /* forward tickets since the last training one, both waiting */
    uint64_t called[MOE_MAX_SLOTS], ordered[MOE_MAX_SLOTS]; /* numbers, by slot */
    uint32_t arrival[4096];                                 /* slots in order of calling */
    bool is_exclusive[4096];                                /* of the same calls */
    size_t arrived, taken;
    uint64_t exclusive; /* seq in flight */
};

static uint64_t least_done(const struct contest *c)
{
    uint64_t least = c->issued;
    for (uint32_t s = 0; s < c->slots; s++)
        least = c->done[s] < least ? c->done[s] : least;
    return least;
}

static void contest_feed(struct contest *c)
{
    for (uint32_t slot = 0; slot < c->slots; slot++) {
        if (rng_chance(&c->random, 50))
            work(c->s, slot, rng_chance(&c->random, 50) ? &key_a : &key_b,
                 1 + rng_below(&c->random, 20));
        if (c->called[slot] - c->ordered[slot] < 3 && c->arrived < 4096) {
            bool exclusive = rng_chance(&c->random, 25), retained = rng_chance(&c->random, 50);
            call(c->s, slot,
                 exclusive  ? MOE_STEP_OPTIMIZER
                 : retained ? MOE_STEP_FORWARD_RETAIN
                            : MOE_STEP_BACKWARD,
                 ++c->called[slot], exclusive ? 0 : 1 + rng_below(&c->random, 16));
            c->is_exclusive[c->arrived] = exclusive;
            c->arrival[c->arrived++] = slot;
        }
    }
}

static void contest_check(struct contest *c, const struct moe_ticket *t, bool both)
{
    assert_int_equal(t->seq, ++c->issued);
    assert_int_equal(c->exclusive, 0); /* an exclusive ticket is alone */
    if (t->kind == MOE_STEP_FORWARD) {
        c->forward += both;
        c->since_training += both;
        /* An exclusive call waits for more: for all work that waited at the last one. */
        if (both && !c->is_exclusive[c->taken])
            assert_true(c->since_training <= (1000 - c->permille) / c->permille + 3);
        return;
    }
    assert_int_equal(t->descriptor.origin, c->arrival[c->taken++]); /* in order of arrival */
    assert_int_equal(t->descriptor.number, ++c->ordered[t->descriptor.origin]);
    if (moe_step_traits(t->kind)->is_exclusive)
        c->exclusive = t->seq;
    c->training += both;
    c->since_training = 0;
    /* The share, except for a burst that the credit allows. */
    double most = (double)c->permille / 1000 * (double)(c->forward + c->training);
    assert_true((double)c->training <= most + 1000.0 / (1000 - c->permille) + 1);
}

static void contest_run(struct contest *c)
{
    for (int i = 0; i < 1500; i++) {
        contest_feed(c);
        for (;;) {
            struct moe_ticket t;
            bool both = moe_sequencer_pending(c->s) > 0 && moe_sequencer_calls(c->s) > 0;
            if (!moe_sequencer_next(c->s, &t))
                break;
            contest_check(c, &t, both);
        }
        uint32_t slot = rng_below(&c->random, c->slots);
        if (c->done[slot] < c->issued)
            done(c->s, slot, ++c->done[slot]);
        if (c->exclusive != 0 && least_done(c) >= c->exclusive)
            c->exclusive = 0;
    }
}

static void training_keeps_its_share_and_order_and_no_slot_starves(void **state)
{
    (void)state;
    static const uint32_t shares[] = {10, 100, 333, 500, 900, 990};
    uint64_t seed = choose_seed();
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++) {
        uint64_t forward = 0, training = 0;
        for (uint64_t run = 0; run < 10; run++) {
            struct contest *c = calloc(1, sizeof *c);
            assert_non_null(c);
            c->random.state = seed + run;
            c->slots = 1 + rng_below(&c->random, 4);
            c->permille = shares[i];
            c->s = begin((UINT64_C(1) << c->slots) - 1, 16);
            moe_sequencer_set_share(c->s, shares[i]);
            contest_run(c);
            forward += c->forward;
            training += c->training;
            moe_sequencer_destroy(c->s);
            free(c);
        }
        print_message("share %.2f: %llu of %llu tickets are training's\n", shares[i] / 1000.0,
                      (unsigned long long)training, (unsigned long long)(forward + training));
        assert_true(training > 0 && forward > 0);
    }
}

static void an_exclusive_ticket_waits_for_work_that_waited_at_the_last_one(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x3, 16);
    struct moe_ticket t;
    moe_sequencer_set_share(s, 990);
    call(s, 0, MOE_STEP_OPTIMIZER, 1, 0);
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.kind, MOE_STEP_OPTIMIZER);
    work(s, 1, &key_a, 40); /* three steps */
    call(s, 0, MOE_STEP_OPTIMIZER, 2, 0);
    assert_false(moe_sequencer_next(s, &t));
    done(s, 0, 1);
    assert_false(moe_sequencer_next(s, &t)); /* slot 1 still runs it */
    done(s, 1, 1);
    for (uint64_t seq = 2; seq <= 4; seq++) {
        assert_true(moe_sequencer_next(s, &t));
        assert_int_equal(t.kind, MOE_STEP_FORWARD);
        work(s, 1, &key_a, 1); /* later work does not count */
        done(s, 0, seq);
        done(s, 1, seq);
    }
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.kind, MOE_STEP_OPTIMIZER);
    assert_int_equal(t.descriptor.number, 2);
    moe_sequencer_destroy(s);
}

static void with_forward_work_one_training_ticket_is_in_flight_at_most(void **state)
{
    (void)state;
    struct moe_sequencer *s = begin(0x1, 16);
    struct moe_ticket t;
    work(s, 0, &key_a, 1);
    assert_true(moe_sequencer_next(s, &t));
    done(s, 0, 1);
    for (uint64_t n = 1; n <= 20; n++)
        call(s, 0, MOE_STEP_BACKWARD, n, 1);
    uint64_t seq = 1;
    for (; seq < MOE_SEQUENCER_LATELY; seq++) {
        assert_true(moe_sequencer_next(s, &t));
        assert_false(moe_sequencer_next(s, &t));
        done(s, 0, seq + 1);
    }
    assert_true(moe_sequencer_next(s, &t)); /* no forward work for a while */
    assert_true(moe_sequencer_next(s, &t));
    moe_sequencer_destroy(s);
}

/* The next ticket has this kind and call, and is run. */
static void expect(struct moe_sequencer *s, enum moe_step_kind kind, uint64_t number)
{
    struct moe_ticket t;
    assert_true(moe_sequencer_next(s, &t));
    assert_int_equal(t.kind, kind);
    if (kind != MOE_STEP_FORWARD)
        assert_int_equal(t.descriptor.number, number);
    done(s, 0, t.seq);
}

static void blocked_calls_and_later_ones_wait_except_kinds_that_may_pass(void **state)
{
    struct moe_ticket t;
    (void)state;
    struct moe_sequencer *s = begin(0x1, 16);
    call(s, 0, MOE_STEP_SAVE, 1, 0);
    call(s, 0, MOE_STEP_BACKWARD, 2, 4);
    call(s, 0, MOE_STEP_OPTIMIZER, 3, 0);
    call(s, 0, MOE_STEP_BACKWARD, 4, 4);
    call(s, 0, MOE_STEP_ZERO_GRAD, 5, 0);
    call(s, 0, MOE_STEP_OPTIMIZER, 6, 0);
    expect(s, MOE_STEP_SAVE, 1);
    moe_sequencer_block_weight_updates(s, true);
    expect(s, MOE_STEP_BACKWARD, 2);
    assert_false(moe_sequencer_next(s, &t));
    work(s, 0, &key_a, 3);
    expect(s, MOE_STEP_FORWARD, 0);
    call(s, 0, MOE_STEP_FORWARD_RETAIN, 7, 4);
    expect(s, MOE_STEP_FORWARD_RETAIN, 7);
    call(s, 0, MOE_STEP_SAVE, 8, 0); /* a progress ticket */
    assert_int_equal(moe_sequencer_calls(s), 5);
    expect(s, MOE_STEP_SAVE, 8);
    assert_false(moe_sequencer_next(s, &t));
    moe_sequencer_block_weight_updates(s, false);
    expect(s, MOE_STEP_OPTIMIZER, 3);
    expect(s, MOE_STEP_BACKWARD, 4);
    expect(s, MOE_STEP_ZERO_GRAD, 5);
    expect(s, MOE_STEP_OPTIMIZER, 6);
    assert_int_equal(moe_sequencer_calls(s), 0);
    /* The end of the view ends the block. */
    moe_sequencer_block_weight_updates(s, true);
    moe_sequencer_begin(s, 8, 0x1, 16);
    call(s, 0, MOE_STEP_OPTIMIZER, 1, 0);
    assert_true(moe_sequencer_next(s, &t));
    moe_sequencer_destroy(s);
}

/* A job that is under way goes on; once it is done, a held state stays until the hold ends. */
static void no_job_begins_in_a_held_state(void **state)
{
    struct moe_ticket t;
    (void)state;
    struct moe_sequencer *s = begin(0x1, 16);
    call(s, 0, MOE_STEP_SAVE, 1, 0);
    expect(s, MOE_STEP_SAVE, 1);
    moe_sequencer_hold(s, MOE_HOLD_CHANGES);
    call(s, 0, MOE_STEP_BACKWARD, 2, 4);
    call(s, 0, MOE_STEP_SAVE, 3, 0); /* a progress ticket */
    expect(s, MOE_STEP_SAVE, 3);
    moe_sequencer_hold(s, MOE_HOLD_TRAINING);
    call(s, 0, MOE_STEP_SAVE, 4, 0);
    call(s, 0, MOE_STEP_EXPORT, 5, 0);
    call(s, 0, MOE_STEP_LOAD, 6, 0);
    assert_false(moe_sequencer_next(s, &t));
    call(s, 0, MOE_STEP_FORWARD_RETAIN, 7, 4);
    expect(s, MOE_STEP_FORWARD_RETAIN, 7);
    work(s, 0, &key_a, 3);
    expect(s, MOE_STEP_FORWARD, 0);
    moe_sequencer_hold(s, MOE_HOLD_NOTHING);
    for (uint64_t number = 2; number <= 6; number += number == 2 ? 2 : 1) {
        assert_true(moe_sequencer_next(s, &t));
        assert_int_equal(t.descriptor.number, number);
        done(s, 0, t.seq);
    }
    /* The end of the view ends the hold. */
    moe_sequencer_hold(s, MOE_HOLD_TRAINING);
    moe_sequencer_begin(s, 8, 0x1, 16);
    call(s, 0, MOE_STEP_SAVE, 1, 0);
    assert_true(moe_sequencer_next(s, &t));
    moe_sequencer_destroy(s);
}

/* All orders of arrival of a few calls, blocked and unblocked at any time: calls that may not pass
 * keep their order, no blocked call comes during a block, and every call comes in the end. */
static void blocked_calls_keep_their_order_and_come_in_the_end(void **state)
{
    enum { CALLS_OF_RUN = 40, LAPS = 200 };
    static const enum moe_step_kind kinds[] = {MOE_STEP_OPTIMIZER,      MOE_STEP_BACKWARD,
                                               MOE_STEP_SAVE,           MOE_STEP_ZERO_GRAD,
                                               MOE_STEP_FORWARD_RETAIN, MOE_STEP_SET_FROZEN};
    struct rng random = {.state = choose_seed()};
    uint64_t passed = 0;
    (void)state;
    for (int lap = 0; lap < LAPS; lap++) {
        struct moe_sequencer *s = begin(0x1, 16);
        uint64_t called = 0, last = 0, last_passing = 0, count = 0;
        bool holding = false;
        while (count < CALLS_OF_RUN) {
            struct moe_ticket t;
            if (called < CALLS_OF_RUN && rng_chance(&random, 60)) {
                enum moe_step_kind kind = kinds[rng_below(&random, 6)];
                call(s, 0, kind, ++called, moe_step_traits(kind)->has_rows ? 4 : 0);
            }
            if (rng_chance(&random, 20)) {
                holding = !holding;
                moe_sequencer_block_weight_updates(s, holding);
            }
            if (rng_chance(&random, 10))
                work(s, 0, &key_a, 1 + rng_below(&random, 20));
            if (!moe_sequencer_next(s, &t))
                continue;
            done(s, 0, t.seq);
            if (t.kind == MOE_STEP_FORWARD)
                continue;
            assert_false(holding && moe_step_traits(t.kind)->is_weight_update);
            if (moe_step_traits(t.kind)->passes_blocked) {
                assert_true(t.descriptor.number > last_passing);
                last_passing = t.descriptor.number;
                passed += t.descriptor.number > count + 1;
            } else {
                assert_true(t.descriptor.number > last);
                last = t.descriptor.number;
            }
            count++;
        }
        assert_int_equal(moe_sequencer_calls(s), 0);
        moe_sequencer_destroy(s);
    }
    assert_true(passed > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_ticket_is_issued_without_work),
        cmocka_unit_test(a_heartbeat_comes_when_nothing_else_does),
        cmocka_unit_test(work_that_comes_while_two_steps_run_shares_the_next),
        cmocka_unit_test(more_than_the_largest_bucket_is_split_over_steps),
        cmocka_unit_test(a_limit_of_f32_holds_for_f32_alone_and_for_one_view),
        cmocka_unit_test(kinds_of_work_take_turns),
        cmocka_unit_test(a_failed_step_stops_everything_until_the_next_view),
        cmocka_unit_test(nonsense_is_refused),
        cmocka_unit_test(a_model_has_tickets_between_its_first_and_its_last),
        cmocka_unit_test(a_placement_is_swapped_in_once_and_before_other_work),
        cmocka_unit_test(impossible_models_are_refused),
        cmocka_unit_test(every_announced_token_is_covered_with_two_steps_in_flight_at_most),
        cmocka_unit_test(a_training_call_gets_a_separate_ticket_with_its_body),
        cmocka_unit_test(a_retained_forward_shares_no_ticket),
        cmocka_unit_test(impossible_training_calls_are_refused),
        cmocka_unit_test(training_keeps_its_share_and_order_and_no_slot_starves),
        cmocka_unit_test(an_exclusive_ticket_waits_for_work_that_waited_at_the_last_one),
        cmocka_unit_test(with_forward_work_one_training_ticket_is_in_flight_at_most),
        cmocka_unit_test(blocked_calls_and_later_ones_wait_except_kinds_that_may_pass),
        cmocka_unit_test(no_job_begins_in_a_held_state),
        cmocka_unit_test(blocked_calls_keep_their_order_and_come_in_the_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
