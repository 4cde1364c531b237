/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the ledger, by seeded simulation: calls of many sessions come in every order, again
 * and again, with crashes between them after which the ledger is read from its packed form. The
 * yardstick is a plain list of everything that was ever run. */
#include "support/check.h"
#include "support/random.h"
#include "training/ledger.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SESSIONS = 40, RUNS = 8, EVENTS = 3000, IDS = 700 };

/* What was run: content by session and id; 0 = not run. */
static uint64_t history[SESSIONS][IDS + 1];

static void name_of(uint32_t session, char out[16])
{
    if (session == 0)
        out[0] = '\0'; /* the sequence of all other calls */
    else
        (void)snprintf(out, 16, "s%u", session);
}

static struct moe_content content_of(uint64_t value)
{
    return (struct moe_content){{value, ~value}, {value * 3, 7}};
}

static struct moe_ledger *fresh(void)
{
    struct moe_ledger *l;
    assert_ok(moe_ledger_create(&l));
    return l;
}

static void record(struct moe_ledger *l, const char *session, uint64_t id, uint64_t value)
{
    const struct moe_ledger_call call = {.id = id,
                                         .content = content_of(value),
                                         .origin = (uint32_t)(id % 4),
                                         .outcome = {.weights_version = id, .number = 0.5}};
    moe_ledger_record(l, session, &call);
}

/* Killed and read again from what a checkpoint holds. */
static void crash(struct moe_ledger **l)
{
    size_t bytes = moe_ledger_packed_size(*l);
    uint8_t *packed = malloc(bytes);
    assert_non_null(packed);
    moe_ledger_pack(*l, packed);
    struct moe_ledger *next = fresh();
    assert_ok(moe_ledger_unpack(next, packed, bytes));
    assert_int_equal(moe_ledger_count(next), moe_ledger_count(*l));
    assert_int_equal(moe_ledger_hash(next), moe_ledger_hash(*l));
    assert_int_equal(moe_ledger_packed_size(next), bytes);
    moe_ledger_destroy(*l);
    *l = next;
    free(packed);
}

static void check_decision(const struct moe_ledger *l, uint32_t session, uint64_t id,
                           uint64_t value, enum moe_ledger_decision decision,
                           const struct moe_ledger_call *call)
{
    uint64_t was = history[session][id];
    switch (decision) {
    case MOE_LEDGER_NEW: assert_int_equal(was, 0); break; /* never twice */
    case MOE_LEDGER_REPEAT:
        assert_int_equal(was, value);
        assert_int_equal(call->id, id);
        assert_int_equal(call->outcome.weights_version, id);
        break;
    case MOE_LEDGER_REUSED: assert_true(was != 0 && was != value); break;
    case MOE_LEDGER_TOO_OLD: assert_true(id < moe_ledger_count(l) + IDS); break;
    }
}

static uint64_t simulate(uint64_t seed)
{
    struct rng r = {seed};
    struct moe_ledger *l = fresh(), *other = fresh(); /* two slots */
    uint64_t ran = 0, highest[SESSIONS] = {0};
    memset(history, 0, sizeof history);
    for (int i = 0; i < EVENTS; i++) {
        char name[16];
        uint32_t s = rng_below(&r, SESSIONS);
        /* Mostly near the front, as clients do; sometimes anywhere. */
        uint64_t front = highest[s] + 1, id = rng_chance(&r, 60) ? front : 1 + rng_below(&r, IDS);
        id = id > IDS ? IDS : id;
        uint64_t value =
            rng_chance(&r, 80) && history[s][id] != 0 ? history[s][id] : 1 + rng_below(&r, 1000);
        name_of(s, name);
        const struct moe_content content = content_of(value);
        const struct moe_ledger_call *call = NULL, *theirs = NULL;
        enum moe_ledger_decision v = moe_ledger_look(l, name, id, &content, &call);
        assert_int_equal(v, moe_ledger_look(other, name, id, &content, &theirs));
        check_decision(l, s, id, value, v, call);
        if (id > highest[s])
            assert_int_equal(v, MOE_LEDGER_NEW); /* rising ids are always accepted */
        if (v == MOE_LEDGER_NEW) {
            record(l, name, id, value);
            record(other, name, id, value);
            history[s][id] = value;
            highest[s] = id > highest[s] ? id : highest[s];
            ran++;
        }
        assert_int_equal(moe_ledger_highest(l, name), highest[s]);
        if (rng_below(&r, 300) == 0)
            crash(rng_chance(&r, 50) ? &l : &other);
        assert_int_equal(moe_ledger_hash(l), moe_ledger_hash(other));
    }
    moe_ledger_destroy(l);
    moe_ledger_destroy(other);
    return ran;
}

static void no_call_is_run_twice_and_two_slots_always_agree(void **state)
{
    (void)state;
    uint64_t seed = choose_seed(), ran = 0;
    for (uint64_t run = 0; run < RUNS; run++)
        ran += simulate(seed + run);
    print_message("%d schedules of %d calls, %llu run\n", RUNS, EVENTS, (unsigned long long)ran);
    assert_true(ran > RUNS);
}

static void a_session_that_is_forgotten_is_never_run_again(void **state)
{
    (void)state;
    enum { MANY = 3 * MOE_LEDGER_SESSIONS };
    struct moe_ledger *l = fresh();
    const struct moe_content content = content_of(1);
    char name[16];
    uint32_t collisions = 0;
    record(l, "", 3, 1);
    for (uint32_t i = 0; i < MANY; i++) {
        (void)snprintf(name, sizeof name, "flood-%u", i);
        enum moe_ledger_decision v = moe_ledger_look(l, name, 5, &content, NULL);
        collisions += v != MOE_LEDGER_NEW;
        record(l, name, 5, 1);
        if (i % 100 == 99)
            crash(&l);
    }
    for (uint32_t i = 0; i < MANY; i++) {
        (void)snprintf(name, sizeof name, "flood-%u", i);
        enum moe_ledger_decision v = moe_ledger_look(l, name, 5, &content, NULL);
        assert_int_equal(v, i < MANY - MOE_LEDGER_SESSIONS + 1 ? MOE_LEDGER_TOO_OLD
                                                               : MOE_LEDGER_REPEAT);
        if (v == MOE_LEDGER_TOO_OLD) { /* higher ones are welcome */
            v = moe_ledger_look(l, name, 6, &content, NULL);
            assert_int_equal(v, MOE_LEDGER_NEW);
        }
    }
    /* The sequence of optimizer steps outlives any number of sessions. */
    enum moe_ledger_decision step = moe_ledger_look(l, "", 3, &content, NULL);
    assert_int_equal(step, MOE_LEDGER_REPEAT);
    print_message("%u sessions refused that need not be\n", collisions);
    assert_true(collisions < MANY / 20);
    moe_ledger_destroy(l);
}

static void damaged_records_are_refused_and_change_nothing(void **state)
{
    (void)state;
    struct moe_ledger *l = fresh(), *other = fresh();
    seed_random();
    for (uint64_t id = 1; id <= 300; id++) {
        record(l, id % 2 == 0 ? "even" : "odd", id, id);
        record(other, "", id, 9);
    }
    size_t bytes = moe_ledger_packed_size(l);
    uint8_t *packed = malloc(bytes);
    assert_non_null(packed);
    uint64_t hash = moe_ledger_hash(other);
    for (size_t cut = 0; cut < bytes; cut += 1 + random_below(500)) {
        moe_ledger_pack(l, packed);
        struct moe_status st = moe_ledger_unpack(other, packed, cut);
        assert_int_equal(st.code, MOE_DATA_LOSS);
        assert_int_equal(moe_ledger_hash(other), hash);
    }
    for (int i = 0; i < 200; i++) { /* whatever is read, nothing is out of bounds */
        moe_ledger_pack(l, packed);
        for (uint32_t n = 1 + random_below(8); n > 0; n--)
            packed[random_below((uint32_t)bytes)] ^= (uint8_t)(1u << random_below(8));
        struct moe_ledger *victim = fresh();
        struct moe_status st = moe_ledger_unpack(victim, packed, bytes);
        if (!moe_failed(&st))
            record(victim, "odd", 1000, 1);
        moe_ledger_destroy(victim);
    }
    free(packed);
    moe_ledger_destroy(l);
    moe_ledger_destroy(other);
}

static void count_taken(void *ctx, const char *session, const struct moe_ledger_call *call)
{
    uint64_t *taken = ctx;
    *taken = *taken * 100 + call->id + (session[0] == 'b' ? 50 : 0);
}

/* Gradients of three calls are lost; what was settled before stays. */
static void pending_calls_are_taken_back_and_their_ids_are_free(void **state)
{
    (void)state;
    struct moe_ledger *l = fresh();
    const struct moe_ledger_call call = {.content = content_of(5)};
    uint64_t taken = 0;
    for (uint64_t id = 1; id <= 4; id++) {
        struct moe_ledger_call c = call;
        c.id = id;
        moe_ledger_record_pending(l, id == 2 ? "b" : "a", &c);
        if (id == 1)
            moe_ledger_settle(l);
    }
    record(l, "a", 9, 5); /* without gradients */
    uint64_t count = moe_ledger_count(l), hash = moe_ledger_hash(l);
    moe_ledger_take_back(l, count_taken, &taken);
    assert_int_equal(taken, 30452); /* a/3, a/4, b/2 */
    assert_int_equal(moe_ledger_count(l), count);
    assert_int_equal(moe_ledger_hash(l), hash);
    static const struct {
        const char *session;
        uint64_t id;
        enum moe_ledger_decision want;
    } looks[] = {{"a", 1, MOE_LEDGER_REPEAT},
                 {"b", 2, MOE_LEDGER_NEW},
                 {"a", 3, MOE_LEDGER_NEW},
                 {"a", 4, MOE_LEDGER_NEW},
                 {"a", 9, MOE_LEDGER_REPEAT}};
    for (size_t i = 0; i < sizeof looks / sizeof *looks; i++)
        assert_int_equal(moe_ledger_look(l, looks[i].session, looks[i].id, &call.content, NULL),
                         looks[i].want);
    taken = 0;
    moe_ledger_take_back(l, count_taken, &taken);
    assert_int_equal(taken, 0);
    moe_ledger_destroy(l);
}

static void names_are_plain(void **state)
{
    (void)state;
    static const char *const good[] = {"a", "run-7.b_C", "0", "-x", "_"};
    static const char *const bad[] = {"", ".", "..", ".x", "a/b", "a b", "a\n", "\xc3\xa4", "a\\b"};
    char longest[MOE_TRAINING_NAME_MAX + 2];
    memset(longest, 'x', sizeof longest);
    longest[MOE_TRAINING_NAME_MAX + 1] = '\0';
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_true(moe_training_name_ok(good[i]));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(moe_training_name_ok(bad[i]));
    assert_false(moe_training_name_ok(longest));
    longest[MOE_TRAINING_NAME_MAX] = '\0';
    assert_true(moe_training_name_ok(longest));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_call_is_run_twice_and_two_slots_always_agree),
        cmocka_unit_test(a_session_that_is_forgotten_is_never_run_again),
        cmocka_unit_test(damaged_records_are_refused_and_change_nothing),
        cmocka_unit_test(pending_calls_are_taken_back_and_their_ids_are_free),
        cmocka_unit_test(names_are_plain),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
